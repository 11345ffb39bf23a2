"""A ready model in one call: `dp.load` for Python, `load_vlm` for the command line."""

from functools import partial
from pathlib import Path
from typing import Any

from diffprune.fitting import move_model, refuse_full_budget
from diffprune.loading import hub_options, is_pruner, load_base, require_name, require_revision
from diffprune.methods.options import parse_method, require_weights
from diffprune.model import PrunedVLM
from diffprune.ops.arguments import checked
from diffprune.terminal import hush_loader
from diffprune.types import Budget


@partial(checked, but=("name", "keep"))
def load(name: str | Path, *, method: str | None = None, keep: int | float | None = None, **options: Any) -> PrunedVLM:
    """A ready model in one call: a saved pruner on the base it names, or a base model with a method around it.

    Args:
        name: Of a saved pruner or of a base model: a folder, a hub id, a preset (`llava-1.5-7b`), or a model that an
            installed package brings along.
        method: For a base model: a method's name (`dp.methods()`), with options `fastv[layer=3]`. A saved pruner has
            its own; another one that takes the same weights may be asked for (`diffprune` and `diffprune-diverse`).
        keep: The budget: an int is tokens per image, a float a share. Default: the largest a saved pruner was trained
            for, else all tokens. A budget without anything that chooses is an error.
        options: Go to `from_pretrained` of the saved pruner or the base model: revision, token, dtype, device_map, ...

    Example:
        vlm = dp.load("llava-hf/llava-1.5-7b-hf", method="divprune", keep=64)
        vlm.generate(images=[image], text="What does the sign say?", max_new_tokens=32)
    """
    require_name(name)
    if keep is not None:
        keep = Budget(keep).keep  # refused now, not after minutes of loading
    require_revision(options.get("revision"))
    if is_pruner(name, **hub_options(options)):
        return PrunedVLM.from_pretrained(name, keep=keep, method=method, **options)
    method = "full" if method is None else method
    if method == "full":
        refuse_full_budget(keep)
    require_weights(parse_method(method).name)
    base, processor = load_base(name, **options)
    return PrunedVLM(base, processor, method=method, keep=1.0 if keep is None else keep)


def refuse_second_model(pruner: str, model: str | None) -> None:
    """A `ValueError` where the command line names a model beside a saved pruner, which has its own."""
    if pruner != "none" and model is not None:
        raise ValueError(
            f"--pruner {pruner} brings its own base model, so --model {model} would be ignored; leave one of the "
            "two out"
        )


def load_vlm(
    pruner: str,
    *,
    model: str | None = None,
    method: str | None = None,
    keep: str | None = None,
    device: str,
    default_model: str = "scenes-llava",
    default_method: str = "full",
) -> PrunedVLM:
    """What the command line names: a saved pruner on its base, or with `none` any method around any model.

    Args:
        model: Of `--pruner none`; a saved pruner names its own.
        method: A name, or with options `name[option=value;option=value]`; a saved pruner has one, and takes others that
            use its weights.
    """
    hush_loader()
    budget = None if keep is None else Budget.parse(keep).keep
    if pruner != "none":
        refuse_second_model(pruner, model)
        vlm = PrunedVLM.from_pretrained(pruner, keep=budget, method=method or None)
    else:
        method = method or default_method
        if method == "full":
            refuse_full_budget(budget)
        require_weights(parse_method(method).name)
        base, processor = load_base(model or default_model)
        vlm = PrunedVLM(base, processor, method=method, keep=1.0 if budget is None else budget)
    move_model(vlm.base, device)
    vlm.method.to(device)
    return vlm
