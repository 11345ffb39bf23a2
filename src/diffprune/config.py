"""What one training run is made of: frozen dataclasses, strict YAML, dotted overrides.

    run = load_config("configs/llava/diffprune_k64.yaml", ["optim.lr=1e-4"])

An unknown key, a value of the wrong type or one out of range is a `ValueError` that names the dotted key and the value.
Values come, weakest first, from the defaults below, the recipe, the file, the overrides.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from diffprune.types import Budget

Recipe = Literal["default", "paper", "bridge"]
STARTS = (2.0, 0.25)  # temperatures to start from that tau.start=auto chooses from, the paper's first


def _require(holds: bool, key: str, value: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{key} is {value!r}: must be {wanted}")


def _is_amount(value: int | float) -> bool:
    """An int of 0 or more (steps), or a share of the run."""
    return value >= 0 if isinstance(value, int) else 0 <= value <= 1


_AMOUNT = "an integer number of steps or a float share of the run in [0, 1]"


@dataclass(frozen=True, kw_only=True, slots=True)
class BackboneConfig:
    """The frozen model.

    Args:
        name: A family (`llava`) or a preset (`llava-1.5-7b`); `diffprune backbones` lists both.
        weights: A Hugging Face model id or a folder; the preset's own where left out.
        revision: Of the model id.
        dtype: Of the frozen weights.
        random_weights: The real shape with random numbers in it, for measuring speed without a download.
        shard: Split the decoder layers over the processes (FSDP2), for a model that does not fit on one GPU. The
            vision tower, the embeddings and the pruner stay whole in each.
    """

    name: str
    weights: str | None = None
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    random_weights: bool = False
    shard: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodConfig:
    """A method by name, and its own options, which YAML writes beside the name: `{name: diffprune, noise: unit}`."""

    name: str = "diffprune"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetConfig:
    """What stays during training: one `keep`, or a `range` from which K is drawn for each picture at each step."""

    keep: int | float | None = None
    range: tuple[int | float, int | float] | None = None

    def __post_init__(self) -> None:
        if (self.keep is None) == (self.range is None):
            raise ValueError(f"keep is {self.keep!r} and range is {self.range!r}: give one and set the other to null")
        for keep in (self.keep,) if self.range is None else self.range:
            assert keep is not None  # one of the two is given
            Budget(keep)  # a budget that cannot be is refused there
        if self.range is not None:
            low, high = self.range
            _require(type(low) is type(high), "range", self.range, "two integers or two floats")
            _require(low <= high, "range", self.range, "[smaller, larger]")


@dataclass(frozen=True, kw_only=True, slots=True)
class TauConfig:
    """The Soft Top-K temperature; `anneal_steps` is optimiser steps (int) or a share of the run (float).

    Args:
        start: A temperature, or "auto": the highest of `STARTS` at which the throttled loss agrees with the loss of
            dropping about which rankings are good, measured before the first step (`diffprune.train.agreement`).
    """

    start: float | Literal["auto"] = 2.0
    end: float = 0.1
    anneal_steps: int | float = 2000

    def __post_init__(self) -> None:
        start, named = (STARTS[-1], "the lowest start of auto") if self.start == "auto" else (self.start, "start")
        _require(start > 0, "start", start, "above 0")
        _require(0 < self.end <= start, "end", self.end, f"above 0 and at most {named}, {start}")
        _require(_is_amount(self.anneal_steps), "anneal_steps", self.anneal_steps, _AMOUNT)

    @property
    def given_start(self) -> float:
        """The temperature to start from where it is given; a run finds out what "auto" is before its first step."""
        if self.start == "auto":
            raise ValueError('tau.start is "auto", which `diffprune train` alone can find out; give a number')
        return self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW with a cosine learning rate.

    Args:
        lr: Peak learning rate.
        batch_size: Samples per device and forward pass.
        accumulate: Forward passes per optimiser step; the effective batch is batch_size * accumulate * devices.
        epochs: Passes over the data at most.
        steps: Optimiser steps; in place of `epochs` where given.
        weight_decay: Decoupled, as AdamW has it.
        clip: Largest gradient norm; None does not clip.
        warmup: Optimiser steps (int) or a share of the run (float).
        patience: Validations without a better loss before the run stops, counted once the temperature has settled;
            None never stops early.
        precision: Of the forward and backward pass; the trained weights are float32.
        gradient_checkpointing: Run each decoder layer of the frozen model again in the backward pass instead of
            keeping what it computed: less memory, more time.
    """

    lr: float = 2e-4
    batch_size: int = 4
    accumulate: int = 4
    epochs: int = 1
    steps: int | None = None
    weight_decay: float = 0.0
    clip: float | None = 1.0
    warmup: int | float = 0.03
    patience: int | None = 3
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        _require(self.lr > 0, "lr", self.lr, "above 0")
        for key in ("batch_size", "accumulate", "epochs", "steps", "patience"):
            value = getattr(self, key)
            _require(value is None or value >= 1, key, value, "1 or more")
        _require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more")
        _require(self.clip is None or self.clip > 0, "clip", self.clip, "above 0, or null for none")
        _require(_is_amount(self.warmup), "warmup", self.warmup, _AMOUNT)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Pictures with captions.

    Args:
        name: `scenes` (drawn, no download); a folder with a JSONL file, parquet files or WebDataset tar shards; a JSON
            file of LLaVA conversations; or a Hugging Face dataset id, which is streamed.
        split: Of a Hugging Face dataset.
        image: Column with the picture: its file, or its bytes.
        caption: Column with the text to learn.
        images: Folder that file names of pictures start from; where left out, the folder the data lies in.
        prompt: What is asked where a row has no `question`; the caption is its answer. Conversations bring their own.
        share: How much of the data is used, drawn once without replacement by `seed`.
        seed: Of that draw alone, so that runs with other seeds see the same subset.
        validation: Samples held out for the validation loss.
        buffer: Rows of a stream (parquet, hub) that are held in memory to shuffle it.
        sizes: Of the pictures of scenes: "fixed" (192 x 192), "384" or "varying"; where left out, what the model's
            folder says (`scenes.json`), else fixed.
    """

    name: str = "scenes"
    split: str = "train"
    image: str = "image"
    caption: str = "caption"
    images: str | None = None
    prompt: str = "Describe the picture."
    share: float = 1.0
    seed: int = 42
    validation: int = 256
    buffer: int = 1024
    sizes: Literal["fixed", "384", "varying"] | None = None

    def __post_init__(self) -> None:
        _require(0 < self.share <= 1, "share", self.share, "above 0 and at most 1")
        _require(self.validation >= 0, "validation", self.validation, "0 or more")
        _require(self.buffer >= 1, "buffer", self.buffer, "1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationConfig:
    """When the held-out samples are looked at, and what decides which weights are the best.

    Args:
        every: Optimiser steps (int) or a share of the run (float) between two validations; there is one at the end.
        choose_by: "hard" takes the weights with the smallest hard top-K loss, which is the deployed path's;
            "throttled" those with the smallest loss of the kind that is trained.
    """

    every: int | float = 0.05
    choose_by: Literal["hard", "throttled"] = "hard"

    def __post_init__(self) -> None:
        _require(self.every > 0 and _is_amount(self.every), "every", self.every, f"above 0: {_AMOUNT}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavingConfig:
    """What a run leaves in its folder while it is under way.

    Args:
        every: Optimiser steps between two checkpoints; there is also one after each validation.
        keep: Checkpoints that stay, the newest ones.
        tensorboard: Curves for TensorBoard, where that is installed.
    """

    every: int = 200
    keep: int = 2
    tensorboard: bool = True

    def __post_init__(self) -> None:
        _require(self.every >= 1, "every", self.every, "1 or more")
        _require(self.keep >= 1, "keep", self.keep, "1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One training run, complete: written beside its results, and enough to start it again.

    Args:
        remove_below: Tokens with a weight below this are taken out of the training sequence, all but the K best;
            0 takes none out, as in the paper.
        recipe: What set values before the file did (`recipe_values`). A file that names none is by the bridge where it
            trains diffprune and by the defaults where it trains another method; here it has been decided.
    """

    backbone: BackboneConfig
    budget: BudgetConfig
    method: MethodConfig = field(default_factory=MethodConfig)
    tau: TauConfig = field(default_factory=TauConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    saving: SavingConfig = field(default_factory=SavingConfig)
    remove_below: float = 0.0
    seed: int = 42
    recipe: Recipe = "default"

    def __post_init__(self) -> None:
        _require(0 <= self.remove_below < 0.5, "remove_below", self.remove_below, "0 or more and below 0.5")


def is_ours(method: object) -> bool:
    """Whether a method is DiffPrune or one of its ablations."""
    return isinstance(method, str) and method.startswith("diffprune")


def recipe_values(recipe: Recipe, method: object) -> dict[str, Any]:
    """What a recipe sets before the file does.

    `paper` has what is printed and nothing else: no warm-up, no clipping, AdamW's weight decay as its library has it,
    none of our additions to the method. `bridge` leads from throttling to dropping: logits are standardised, so
    that the temperature really hardens them, tokens of negligible weight leave the training sequence, and a kept token
    is what will be deployed.
    """
    values: dict[str, Any] = {}
    if recipe == "paper":
        values = {"optim": {"warmup": 0, "clip": None, "weight_decay": 0.01}, "remove_below": 0.0}
        if is_ours(method):
            values["method"] = {"final_norm": False, "standardise": False, "noise": "unit", "kept_exact": False}
    elif recipe == "bridge":
        values = {"remove_below": 1e-3}
        if is_ours(method):
            values["method"] = {"kept_exact": True, "standardise": True}
    return values


# --- plain values to dataclasses --------------------------------------------------------------------------------------


def _describe(kind: Any) -> str:
    """A type as a reader of an error message would say it."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(_describe(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"a list of {len(typing.get_args(kind))}"
    if typing.get_origin(kind) is dict:
        return "a mapping"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "null"}[kind]


def _matches(value: object, kind: Any) -> bool:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, part) for part in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(arguments) and all(map(_matches, value, arguments))
    if origin is dict:
        return isinstance(value, dict)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, float) and math.isfinite(value)
    return isinstance(value, kind)


def _coerce(kind: Any, value: object, key: str) -> Any:
    """`value` as `kind`; converted are lists to tuples and, where no int is asked for, ints to floats or choices."""
    if isinstance(value, list):
        value = tuple(value)
    if not _matches(value, kind) and isinstance(value, int) and not isinstance(value, bool):
        if _matches(0.0, kind):
            value = float(value)
        elif not _matches("", kind) and _matches(str(value), kind):  # a choice like "384", which YAML reads as a number
            value = str(value)
    if not _matches(value, kind):
        raise ValueError(f"{key} is {value!r}: must be {_describe(kind)}")
    return value


def _unknown_key(key: str, known: Sequence[str]) -> ValueError:
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    return ValueError(f"unknown key {key}; {hint}")


def _build(cls: type, values: object, prefix: str = "") -> Any:
    """An instance of the dataclass `cls` from plain values, every key and type checked."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{prefix or 'the file'} is {values!r}: must be a mapping of keys to values")
    if cls is MethodConfig:
        # YAML writes options beside the name; which options there are is the method's own business
        options = dict(values)
        name = {"name": options.pop("name")} if "name" in options else {}
        values = name | {"options": options}
    kinds = typing.get_type_hints(cls)
    known = [item.name for item in dataclasses.fields(cls)]
    dot = f"{prefix}." if prefix else ""
    for key in values:
        if key not in known:
            raise _unknown_key(f"{dot}{key}", [f"{dot}{name}" for name in known])
    arguments: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        key = f"{dot}{item.name}"
        if item.name in values:
            convert = _build if dataclasses.is_dataclass(kinds[item.name]) else _coerce
            arguments[item.name] = convert(kinds[item.name], values[item.name], key)
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise ValueError(f"{key} is missing: add it to the file or give {key}=... on the command line")
    try:
        return cls(**arguments)
    except ValueError as error:  # a range check of the dataclass, which knows its own keys only
        raise ValueError(f"{dot}{error}") from None


# --- YAML -------------------------------------------------------------------------------------------------------------


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that reads `1e-4` as a number and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise ValueError(f"key {key} is given twice, again on line {key_node.start_mark.line + 1}")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_StrictLoader.add_implicit_resolver(  # YAML 1.1 wants a dot in a float; people write 1e-4
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over` laid on it, mappings merged key by key."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def parse_override(text: str) -> dict[str, Any]:
    """`"optim.lr=1e-4"` as `{"optim": {"lr": 0.0001}}`; the value is read as YAML."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ValueError(f"override {text!r} is not of the form key.name=value, for example optim.lr=1e-4")
    nested: Any = _parse_yaml(value, f"override {text!r}")
    for part in reversed(parts):
        nested = {part: nested}
    return nested


def make_config(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """A checked `RunConfig` from plain nested values; `overrides` are dotted and win."""
    for override in overrides:
        values = _merge(values, parse_override(override))
    values = _without_retired(values)
    method = values.get("method")
    name = method.get("name", MethodConfig().name) if isinstance(method, Mapping) else MethodConfig().name
    given = values.get("recipe")
    recipe = ("bridge" if is_ours(name) else "default") if given is None else _coerce(Recipe, given, "recipe")
    return _build(RunConfig, _merge(recipe_values(recipe, name), {**values, "recipe": recipe}))


def _without_retired(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values without keys that run folders still name and no run has any more, where they change nothing."""
    if values.get("hardness", 0) not in (0, None):  # a term of the loss that was tried and did not help
        raise ValueError(f"hardness={values['hardness']!r} is no longer an option; leave it out")
    return {key: value for key, value in values.items() if key not in ("hardness", "hardness_ramp")}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """A checked `RunConfig` from a YAML file; `overrides` like `optim.lr=1e-4` win over the file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read config {path}: {error.strerror}") from error
    values = _parse_yaml(text, str(path))
    if not isinstance(values, Mapping):
        raise ValueError(f"{path} holds {values!r}: a config is a mapping with the keys backbone, method, budget, ...")
    try:
        return make_config(values, overrides)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def to_yaml(config: RunConfig) -> str:
    """The resolved config as YAML that `load_config` reads back to an equal one."""
    values = dataclasses.asdict(config)
    method = values["method"]
    values["method"] = {"name": method["name"], **method["options"]}
    if values["budget"]["range"] is not None:
        values["budget"]["range"] = list(values["budget"]["range"])
    return yaml.safe_dump(values, sort_keys=False)


def differences(before: RunConfig, after: RunConfig) -> list[str]:
    """What differs between two configs, one `key: old -> new` each; empty where they are equal."""

    def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in values.items():
            nested = flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
            out |= nested
        return out

    old, new = (flat(yaml.safe_load(to_yaml(config))) for config in (before, after))
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    ]
