"""What the golden runs record by Python calls: kept indices, greedy tokens, losses, and the fast path's tokens."""

import contextlib
import copy
import logging
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from tools.golden import Row, digest, shipped

# --- kept -------------------------------------------------------------------------------------------------------------

FAMILIES = ("llava", "llava_next", "qwen2_5_vl")
BUDGETS: tuple[int | float, ...] = (5, 0.5)
SIZES = ((168, 140), (112, 150))
QUESTIONS = ("what does the sign say?", "is it red or not?")
ANSWERS = ("stop", "it is blue")
GREEDY: Row = {"max_new_tokens": 8, "do_sample": False, "return_ids": True}
# Rules of the model around the method, each on top of the defaults.
VARIANTS: dict[str, tuple[tuple[str, Row], ...]] = {
    "llava": (("divprune", {"positions": "packed"}),),
    "llava_next": tuple(
        (method, rule)
        for method in ("diffprune", "divprune")
        for rule in ({"budget": "per_tile"}, {"newline": "all"}, {"newline": "none"})
    ),
    "qwen2_5_vl": (("divprune", {"positions": "packed"}),),
}


def fill(module: Any) -> None:
    """Weights drawn from each parameter's own name, so that neither order nor number of the others matters."""
    import torch

    with torch.no_grad():
        for name, parameter in module.named_parameters():
            drawn = torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())), dtype=torch.float32
            )
            wide = drawn * 2 * parameter[0].numel() ** -0.5 if parameter.ndim > 1 else drawn * 0.2
            parameter.copy_(wide + 1 if parameter.ndim == 1 and name.endswith("weight") else wide)


def make_vlm(family: str, method: str, *, double: bool = False, **options: Any) -> Any:
    """A tiny model with a method around it, whose weights, where it has some, are seeded."""
    import torch

    import diffprune as dp
    from tests import tiny

    model, processor = tiny.build(family)
    torch.manual_seed(0)
    if method.startswith("diffprune"):  # as recorded, before the bridge became the default of its options
        options = {"standardise": False, "kept_exact": False, **options}
    vlm = dp.PrunedVLM(copy.deepcopy(model).double() if double else model, processor, method=method, **options)
    fill(vlm.method)
    if double:
        vlm.method.double()
    return vlm


def select(vlm: Any, keep: int | float) -> list[list[int]] | None:
    """Kept indices (of merged tokens their positions) of each picture; None where the method chooses inside the LLM."""
    try:
        return [one.keep.tolist() for one in vlm.select(pictures(), list(QUESTIONS), keep=keep)]
    except ValueError as error:
        if "language model" not in str(error):
            raise
        return None


def pictures() -> list[Any]:
    from tests import tiny

    return [tiny.picture(seed, size) for seed, size in enumerate(SIZES)]


def kept_row(family: str, method: str, keep: int | float, **options: Any) -> Row:
    """What a method keeps of two pictures and what the model then says; only that it refuses, where it does."""
    about = {"family": family, "method": method, "keep": keep, **({"options": options} if options else {})}
    try:
        vlm = make_vlm(family, method, **options)
    except ValueError:
        return {**about, "refused": True}
    if method == "full":
        keep = 1.0  # it kept all whatever it was given; by now a budget without anything that chooses is refused
    kept = select(vlm, keep)
    said = vlm.generate(pictures(), list(QUESTIONS), keep=keep, **GREEDY)
    row = {**about, "said": said.tolist()}
    if kept is not None:
        with contextlib.suppress(RuntimeError):  # a method that works in float32 alone has no second opinion
            row["clear"] = select(make_vlm(family, method, double=True, **options), keep) == kept
        row |= {"counts": [len(one) for one in kept], "kept": kept[0][:8], "digest": digest(kept)}
    return row | losses(vlm, keep)


def losses(vlm: Any, keep: int | float) -> Row:
    """The loss with tokens dropped; of methods that learn from answers also the loss in training, and its gradient.

    Tiny models like to say one thing over and over: a loss shows every change of what the language model was given.
    """
    import torch

    batch = vlm.prepare(pictures(), list(QUESTIONS), list(ANSWERS))
    with torch.no_grad():
        row = {"dropped": float(vlm.loss(batch, keep=keep, hard=True)).hex()}
    if not any(parameter.requires_grad for parameter in vlm.method.parameters()):
        return row
    torch.manual_seed(0)
    try:
        loss = vlm.loss(batch, tau=0.5, keep=keep)
    except (ValueError, RuntimeError, AttributeError):  # it learns from more than answers
        return {**row, "loss": "refused"}
    loss.backward()
    gradients = [value.grad for value in vlm.method.parameters() if value.grad is not None]
    norm = sum(float(value.double().square().sum()) for value in gradients) ** 0.5
    return {**row, "loss": loss.item().hex(), "gradient": float(norm).hex(), "value": loss.item()}


def is_about(row: Row, **about: Any) -> bool:
    """Whether a row is about this and no variant of it."""
    return "options" not in row and all(row.get(key) == value for key, value in about.items())


def method_names() -> list[str]:
    import diffprune as dp

    return list(dp.methods())  # pyright: ignore[reportCallIssue]  # a package that can be called


def record_kept(_: Sequence[Row] = (), methods: Sequence[str] | None = None) -> Iterator[Row]:
    """Kept indices of two pictures; `clear` where float64 chooses the same, so that rounding has no part in it."""
    from tests import tiny

    for family in FAMILIES:
        tensors = tiny.build(family)[0].state_dict()
        sums = {name: float(value.double().sum()).hex() for name, value in tensors.items()}
        yield {"family": family, "kind": "model", "digest": digest(sums)}
        for method in method_names() if methods is None else methods:
            for keep in BUDGETS:
                yield kept_row(family, method, keep)
        for method, options in VARIANTS[family]:
            yield kept_row(family, method, BUDGETS[0], **options)


# --- fast -------------------------------------------------------------------------------------------------------------

COMPILED: tuple[tuple[str, str, int | float], ...] = (
    *(("llava", method, 5) for method in ("full", "diffprune", "divprune", "visionzip", "fastv", "pyramiddrop")),
    *(("qwen2_5_vl", method, 5) for method in ("full", "diffprune", "divprune", "fastv", "pyramiddrop")),
    *(("scenes-nano", method, 16) for method in ("full", "diffprune", "divprune", "fastv", "pyramiddrop")),
)


class Notices(logging.Handler):
    """Warnings of the library, which says so where a request does not fit the fast path."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def load_nano(method: str, keep: int | float) -> Any:
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    import diffprune as dp

    folder = shipped("scenes-nano")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    vlm = dp.PrunedVLM(model, AutoProcessor.from_pretrained(folder), method=method, keep=keep)
    fill(vlm.method)
    return vlm


def record_fast(_: Sequence[Row] = ()) -> Iterator[Row]:
    """One picture and two of one size, by the fast path; beside it whether the plain path says the same."""
    from tests import tiny

    for family, method, keep in COMPILED:
        is_nano = family == "scenes-nano"
        size = (192, 192) if is_nano else SIZES[0]
        vlm = load_nano(method, keep) if is_nano else make_vlm(family, method, keep=keep)
        requests = [([tiny.picture(seed, size) for seed in range(count)], list(QUESTIONS[:count])) for count in (1, 2)]
        options = {**GREEDY, "max_new_tokens": 16}
        plain = [vlm.generate(*request, **options).tolist() for request in requests]
        vlm.compile(batch_sizes=(1, 2), text_buckets=(64,), max_new_tokens=16, image_sizes=[size])
        notices = Notices()
        logging.getLogger("diffprune").addHandler(notices)
        said = [vlm.generate(*request, **options).tolist() for request in requests]
        logging.getLogger("diffprune").removeHandler(notices)
        about = {"family": family, "method": method, "keep": keep}
        yield {**about, "said": said, "as_plain": said == plain, "fits": not notices.found}
