"""Every public call with odd values, one argument at a time: answered, or refused in one sentence of ours.

    python -m tests.fuzz.odd_calls             # what was found, as JSON
    python -m tests.fuzz.odd_calls generate    # of the calls whose name holds that

It runs in a process of its own: the tests check every annotation, and would refuse what a user's process takes.
"""

import copy
import io
import json
import logging
import math
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import diffprune as dp
from diffprune.config import load_config, make_config
from tests import tiny

SOURCES = str(Path(dp.__file__).parent)
LONGEST = 600  # characters of a sentence


def closed_file() -> io.BytesIO:
    file = io.BytesIO(b"x")
    file.close()
    return file


def nested(depth: int = 50) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


# Arguments of which some values are not yet refused in a sentence of ours; the search shows which. None may be added.
LEFT = frozenset(
    {
        "Budget.count(num_tokens)",
        "Config(remove_below)",
        "ask(images)",
        "chat(messages)",
        "compile(batch_sizes)",
        "compile(fuse)",
        "compile(image_sizes)",
        "compile(keep)",
        "compile(max_new_tokens)",
        "compile(text_buckets)",
        "generate(eos_token_id)",
        "generate(generation_config)",
        "generate(num_beams)",
        "generate(num_return_sequences)",
        "generate(repetition_penalty)",
        "generate(streamer)",
        "generate(temperature)",
        "generate(unknown)",
        "load(attn_implementation)",
        "load(dtype)",
        "load_config(path)",
        "loss(num_targets)",
        "loss(remove_below)",
        "ops.greedy_determinant(tolerance)",
        "ops.greedy_orthogonal(tolerance)",
        "ops.gumbel_keep(tau)",
        "ops.gumbel_topk(min_tau)",
        "ops.gumbel_topk(tau)",
        "ops.pad_rows(left)",
        "ops.pad_rows(rows)",
        "ops.pad_rows(value)",
        "ops.soft_topk(tau)",
        "ops.take_tokens(x)",
        "push_to_hub(repo_id)",
        "save_pretrained(base_id)",
        "save_pretrained(notes)",
    }
)

# Each by the name that the lists of what is fine use.
VALUES: dict[str, Any] = {
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "0": 0,
    "1": 1,
    "-1": -1,
    "0.0": 0.0,
    "0.5": 0.5,
    "1.0": 1.0,
    "-0.5": -0.5,
    "2**63": 2**63,
    "10**400": 10**400,
    "-10**400": -(10**400),
    "true": True,
    "false": False,
    "none": None,
    "complex": 1j,
    "decimal nan": Decimal("nan"),
    "fraction": Fraction(1, 3),
    "numpy int": np.int64(2),
    "numpy nan": np.float32("nan"),
    "numpy array": np.zeros(3),
    "numpy objects": np.array([None, "x"], dtype=object),
    "empty text": "",
    "digits": "64",
    "text": "odd",
    "surrogate": "\ud800",
    "null byte": "a\0b",
    "long text": "x" * 5000,
    "bytes": b"\xff",
    "empty list": [],
    "nested": nested(),
    "list of none": [None],
    "list of nan": [math.nan],
    "list of huge": [10**400],
    "list of lists": [[1], [2]],
    "list of texts": ["a", "\ud800"],
    "dict": {},
    "dict of lists": {"a": [None]},
    "set": {1},
    "object": object(),
    "type": int,
    "function": len,
    "closed file": closed_file(),
    "0-d tensor": torch.tensor(2),
    "0-d nan": torch.tensor(math.nan),
    "empty tensor": torch.zeros(0),
    "int tensor": torch.tensor([2]),
    "bool tensor": torch.tensor([True]),
    "nan tensor": torch.full((1, 16), math.nan),
    "3-d tensor": torch.zeros(1, 2, 3),
    "complex tensor": torch.zeros(1, 16, dtype=torch.complex64),
}


@dataclass(frozen=True)
class Call:
    """One argument of one call, and the names of the odd values that it may take."""

    name: str
    make: Callable[[Any], Any]
    fine: frozenset[str]


def public_calls(folder: Path) -> Iterator[Call]:
    """All of them; what they write goes into the folder."""

    def call(name: str, make: Callable[[Any], Any], fine: str = "") -> Call:
        return Call(name, make, frozenset(item for item in fine.split(", ") if item))

    model, processor = tiny.build("llava")
    saved, checkpoint = folder / "saved", folder / "model"
    model.save_pretrained(checkpoint)
    processor.save_pretrained(checkpoint)
    vlm = dp.PrunedVLM(model, processor, method="divprune", keep=4)
    learned = dp.PrunedVLM(model, processor, method="diffprune", keep=4)
    learned.save_pretrained(saved, base_id=str(checkpoint))
    picture = tiny.picture()
    batch = learned.prepare([[picture]], ["What is it?"], ["A sign."])
    budgets = "1, 2**63, 0.5, 1.0, numpy int, fraction, none, 10**400"
    one_each = "int tensor, list of huge"

    yield call("load(name)", lambda v: dp.load(v, method="divprune", keep=4))
    for key, fine in {
        "method": "",
        "keep": budgets,
        "dtype": "none",
        "device_map": "none",
        "revision": "none, empty text, digits, text, surrogate, null byte, long text",
        "attn_implementation": "none",
        "unknown": "",
    }.items():
        yield call(
            f"load({key})", lambda v, key=key: dp.load(checkpoint, **{"method": "divprune", "keep": 4, key: v}), fine
        )

    yield call("PrunedVLM(model)", lambda v: dp.PrunedVLM(v, processor, method="divprune", keep=4))
    yield call("PrunedVLM(processor)", lambda v: dp.PrunedVLM(model, v, method="divprune", keep=4))
    for key, fine in {
        "method": "",
        "keep": budgets,
        "positions": "none",
        "newline": "",
        "budget": "",
        "unknown": "",
        "native": "true, false",
    }.items():
        yield call(
            f"PrunedVLM({key})",
            lambda v, key=key: dp.PrunedVLM(model, processor, **{"method": "divprune", "keep": 4, key: v}),
            fine,
        )

    asked = {"images": [picture], "text": "What?", "max_new_tokens": 2}
    texts = "empty text, digits, text, null byte, long text"
    for key, fine in {
        "images": "none, empty list",
        "text": texts,
        "messages": "none",
        "keep": budgets + ", " + one_each,
        "chat": "true",
        "return_ids": "true, false",
        "memory": "none",
        "max_new_tokens": "1, numpy int, none",
        "do_sample": "true, false, none",
        "temperature": "none, 0.5, 1.0, 1",
        "num_beams": "1, none, numpy int",
        "num_return_sequences": "1, none",
        "repetition_penalty": "none, 0.5, 1.0, 1",
        "eos_token_id": "none, 0, 1, int tensor",
        "streamer": "none",
        "generation_config": "none",
        "unknown": "",
    }.items():
        yield call(f"generate({key})", lambda v, key=key: vlm.generate(**{**asked, key: v}), fine)
    yield call("stream(text)", lambda v: list(vlm.stream([picture], v, max_new_tokens=2)), texts)
    yield call(
        "stream(max_new_tokens)", lambda v: list(vlm.stream([picture], "a", max_new_tokens=v)), "1, numpy int, none"
    )
    yield call("chat(messages)", lambda v: vlm.chat(v, max_new_tokens=2).ask("a", [picture]), "empty list, dict")
    yield call(
        "chat(keep)", lambda v: vlm.chat(keep=v, max_new_tokens=2).ask("a", [picture]), budgets + ", " + one_each
    )
    yield call("ask(text)", lambda v: vlm.chat(max_new_tokens=2).ask(v, [picture]), texts)
    yield call("ask(images)", lambda v: vlm.chat(max_new_tokens=2).ask("a", v), "empty list, dict")

    yield call("select(images)", lambda v: vlm.select(v))
    yield call("select(images[0])", lambda v: vlm.select([v]))
    yield call("select(text)", lambda v: vlm.select([picture], v), texts + ", none")
    yield call("select(keep)", lambda v: vlm.select([picture], keep=v), budgets + ", " + one_each)
    yield call("with_method(method)", lambda v: vlm.with_method(v))
    yield call("with_method(keep)", lambda v: vlm.with_method("divprune", keep=v), budgets)
    yield call("prepare(images)", lambda v: vlm.prepare(v, ["a"], ["b"]), "none, list of none")
    yield call("prepare(text)", lambda v: vlm.prepare([[picture]], v, ["b"]))
    yield call("prepare(answers)", lambda v: vlm.prepare([[picture]], ["a"], v), "none")
    yield call("logits(batch)", lambda v: vlm.logits(v))
    yield call("logits(keep)", lambda v: vlm.logits(batch, keep=v), budgets + ", " + one_each)

    yield call("loss(batch)", lambda v: learned.loss(v))
    for key, fine in {
        "tau": "1, 0.5, 1.0",
        "keep": budgets + ", " + one_each,
        "generator": "none",
        "hard": "true, false",
        "tokens": "none",
        "num_targets": "1, none, 0-d tensor, numpy int, 2**63",
        "num_prompts": "1, none",
        "remove_below": "0, 0.0",
        "return_alpha": "true, false",
    }.items():
        yield call(f"loss({key})", lambda v, key=key: learned.loss(batch, **{key: v}), fine)

    for key, fine in {
        "keep": budgets,
        "batch_sizes": "",
        "text_buckets": "",
        "image_sizes": "none",
        "max_new_tokens": "1",
        "fuse": "true, false, none",
        "unknown": "",
    }.items():
        yield call(
            f"compile({key})", lambda v, key=key: compiled(model, processor, {"max_new_tokens": 2, key: v}), fine
        )

    yield call("save_pretrained(directory)", lambda v: vlm.save_pretrained(inside(folder, v)), "digits, text")
    yield call(
        "save_pretrained(base_id)", lambda v: vlm.save_pretrained(folder / "again", base_id=v), "none, digits, text"
    )
    yield call("save_pretrained(notes)", lambda v: vlm.save_pretrained(folder / "again", notes=v), texts)
    yield call(
        "save_pretrained(card_rows)", lambda v: vlm.save_pretrained(folder / "again", card_rows=v), "none, empty list"
    )
    yield call("push_to_hub(repo_id)", lambda v: vlm.push_to_hub(v))
    yield call("from_pretrained(directory)", lambda v: dp.PrunedVLM.from_pretrained(v, keep=4))
    for key, fine in {
        "keep": budgets,
        "method": "none",
        "base": "none",
        "processor": "none",
        "allow_other_base": "true, false",
        "unknown": "",
    }.items():
        yield call(f"from_pretrained({key})", lambda v, key=key: dp.PrunedVLM.from_pretrained(saved, **{key: v}), fine)

    config = make_config({"backbone": {"name": "llava"}, "budget": {"keep": 4}, "data": {"name": "nowhere"}})
    yield call("train(config)", lambda v: dp.train(v, folder / "run"))
    yield call("train(folder)", lambda v: dp.train(config, inside(folder, v)))
    for key in ("backbone", "budget", "method", "tau", "optim", "data", "validation", "saving", "remove_below", "seed"):
        fine = {"remove_below": "0, 0.0", "seed": "0, 1, -1, 2**63"}.get(key, "")
        yield call(f"Config({key})", lambda v, key=key: dp.Config(**{**parts_of(config), key: v}), fine)
    yield call("make_config(values)", lambda v: make_config(v))
    yield call(
        "make_config(overrides)",
        lambda v: make_config({"backbone": {"name": "llava"}, "budget": {"keep": 4}, "data": {"name": "x"}}, v),
        "empty list",
    )
    yield call("load_config(path)", lambda v: load_config(v))

    yield call("Budget(keep)", dp.Budget, budgets.replace(", none", ""))
    yield call("Budget(rounding)", lambda v: dp.Budget(4, v))
    yield call("Budget.parse(text)", lambda v: dp.Budget.parse(v), "digits")
    yield call("Budget.count(num_tokens)", lambda v: dp.Budget(4).count(v), "1, 2**63, 10**400, numpy int, 0")
    yield call("register(name)", lambda v: dp.register(v)(type("Odd", (dp.Pruner,), {})), "digits, text")
    yield call("register(class)", lambda v: dp.register("odd-thing")(v), "type")
    yield call("methods.get(name)", lambda v: importlib_get("METHODS", v), "digits, text")
    yield call("backbones.get(name)", lambda v: importlib_get("BACKBONES", v))
    yield from ops_calls(call)


def ops_calls(call: Callable[..., Call]) -> Iterator[Call]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 16, 8, generator=generator)
    logits, mask = torch.randn(1, 16, generator=generator), torch.ones(1, 16, dtype=torch.bool)
    square = dp.ops.cosine_matrix(x)
    response = {"response": ""}
    some = "0, 1, int tensor"
    tables: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
        "soft_topk": (
            dict(logits=logits, k=4, tau=1.0),
            {
                "k": some,
                "tau": "1, 0.5, 1.0",
                "mask": "none",
                "return_z": "true, false",
                **response,
            },
        ),
        "hard_topk": (dict(logits=logits, k=4), {"k": some, "mask": "none"}),
        "hard_mask": (dict(logits=logits, k=4), {"k": some, "mask": "none"}),
        "take_tokens": (dict(x=x, keep=torch.tensor([[0, 3]])), {}),
        "vp_noise": (
            dict(x=x, z=logits),
            {"z": "nan tensor", "generator": "none", "noise": "none", "mu": "none", "sigma": "none", **response},
        ),
        "linear_gate": (
            dict(x=x, weights=logits),
            {"weights": "nan tensor", "generator": "none", "noise": "none", "mu": "none", "sigma": "none"},
        ),
        "scale_gate": (dict(x=x, weights=logits), {"weights": "nan tensor"}),
        "sqrt_weight": (dict(z=logits), {"z": "0-d nan, empty tensor, nan tensor, 3-d tensor", **response}),
        "log_weight": (dict(z=logits), {"z": "0-d nan, empty tensor, nan tensor, 3-d tensor", **response}),
        "gumbel_topk": (
            dict(logits=logits, k=4, tau=1.0),
            {
                "k": some,
                "tau": "1, 0.5, 1.0",
                "min_tau": "0, 1, 0.0, 0.5, 1.0",
                "mask": "none",
                "generator": "none",
                "noise": "none",
                **response,
            },
        ),
        "gumbel_keep": (
            dict(log_probs=torch.randn(1, 16, 2, generator=generator)),
            {"previous": "none, nan tensor", "tau": "1, 0.5, 1.0", "generator": "none", "noise": "none"},
        ),
        "cosine_matrix": (dict(first=x), {"first": "3-d tensor", "second": "none"}),
        "wide_cosines": (dict(x=x), {"x": "3-d tensor"}),
        "unit_range": (
            dict(values=logits, mask=mask),
            {"values": "nan tensor", "floor": "0, 1, 0.0, 0.5, 1.0, -0.5, -1, inf, -inf"},
        ),
        "greedy_diverse": (dict(x=x, worth=logits.exp(), k=4), {"k": some, "mask": "none", "closeness": "none"}),
        "greedy_determinant": (
            dict(kernel=square, k=4),
            {"k": some, "mask": "none", "worth": "none", "tolerance": "0, 0.0, 0.5"},
        ),
        "greedy_orthogonal": (dict(x=x, k=4), {"k": some, "mask": "none", "tolerance": "none, 0, 0.0, 0.5"}),
        "greedy_max_min": (dict(distance=1 - square, k=4), {"k": some, "mask": "none"}),
        "greedy_coverage": (dict(coverage=square, k=4), {"k": some, "mask": "none"}),
        "pad_rows": (
            dict(rows=[torch.zeros(2), torch.zeros(3)]),
            {
                "rows": "nan tensor, 3-d tensor",
                "value": "nan, inf, -inf, 0, 1, -1, 0.0, 0.5, 1.0, -0.5, true, false",
                "left": "true, false",
            },
        ),
        "rotate": (dict(x=torch.randn(1, 2, 16, 8), cos=torch.ones(1, 16, 8), sin=torch.zeros(1, 16, 8)), {}),
    }
    missing = {name for name in dp.ops.__all__ if callable(getattr(dp.ops, name)) and name.islower()} - tables.keys()
    assert not missing, missing
    for name, (usual, fine) in tables.items():
        for key in {**usual, **fine}:
            run = partial(
                lambda v, name, key, usual: getattr(dp.ops, name)(**{**usual, key: v}), name=name, key=key, usual=usual
            )
            yield call(f"ops.{name}({key})", run, fine.get(key, ""))


def importlib_get(registry: str, name: Any) -> Any:
    from diffprune import registry as home

    return getattr(home, registry).get(name)


def compiled(model: Any, processor: Any, options: dict[str, Any]) -> Any:
    return dp.PrunedVLM(model, processor, method="divprune", keep=4).compile(**options)


def parts_of(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def inside(folder: Path, value: Any) -> Any:
    """A text as a name in the folder, so that nothing is written elsewhere; anything else as it is."""
    return f"{folder}/{value}" if isinstance(value, str) and value else value


def verdict(error: BaseException, value: Any) -> str:
    """What is wrong with a refusal; empty where it is one sentence of ours."""
    said = str(error)
    where = traceback.extract_tb(error.__traceback__)[-1].filename
    if not isinstance(error, ValueError | TypeError):
        return "class"
    if not where.startswith(SOURCES):
        return "not ours"
    if not said or "\n" in said or len(said) > LONGEST:
        return "form"
    return ""


def try_all(folder: Path, only: str = "") -> Iterator[dict[str, str]]:
    for call in public_calls(folder):
        if only not in call.name:
            continue
        for name, value in VALUES.items():
            found = {"call": call.name, "value": name}
            try:
                call.make(copy.copy(value) if isinstance(value, list | dict) else value)
            except BaseException as error:
                said = str(error)
                wrong = verdict(error, value)
                if name in call.fine:
                    yield {**found, "wrong": "refused although fine", "class": type(error).__name__, "said": said[:200]}
                elif wrong:
                    place = traceback.extract_tb(error.__traceback__)[-1]
                    yield {
                        **found,
                        "wrong": wrong,
                        "class": type(error).__name__,
                        "said": said[:200],
                        "at": f"{place.filename}:{place.lineno}",
                    }
                continue
            if name not in call.fine:
                yield {**found, "wrong": "taken"}


def main() -> int:
    logging.disable()
    torch.set_num_threads(1)
    only = sys.argv[1] if len(sys.argv) > 1 else ""
    with tempfile.TemporaryDirectory() as folder:
        found = 0
        for one in try_all(Path(folder), only):
            found += 1
            print(json.dumps(one), flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
