"""A ready model in one call: `dp.load` for Python, `load_vlm` for the command line."""

from pathlib import Path
from typing import Any

from diffprune.loading import is_pruner, load_base
from diffprune.methods.options import parse_method, require_weights
from diffprune.model import PrunedVLM
from diffprune.types import Budget


def load(name: str | Path, *, method: str | None = None, keep: int | float | None = None, **options: Any) -> PrunedVLM:
    """A ready model in one call: a saved pruner on the base it names, or a base model with a method around it.

    Args:
        name: Of a saved pruner or of a base model: a folder, a hub id, a preset (`llava-1.5-7b`), or a model that an
            installed package brings along.
        method: For a base model: a method's name (`dp.methods()`), with options `fastv[layer=3]`. A saved pruner has
            its own.
        keep: The budget: an int is tokens per image, a float a share. Default: the smallest range a saved pruner was
            trained for, else all tokens.
        options: Go to the model's `from_pretrained`: dtype, device_map, revision, ...

    Example:
        vlm = dp.load("llava-hf/llava-1.5-7b-hf", method="divprune", keep=64)
        vlm.generate(images=[image], text="What does the sign say?", max_new_tokens=32)
    """
    if is_pruner(name):
        if method is not None:
            raise ValueError(
                f"{name} is a saved pruner and brings its own method; leave method={method!r} out, or load its base"
            )
        return PrunedVLM.from_pretrained(name, keep=keep, **options)
    if method is None:
        if keep is not None:
            raise ValueError(
                f"keep={keep} needs something that chooses what is kept; name a method (method='divprune') or load a "
                "saved pruner"
            )
        method = "full"
    require_weights(parse_method(method).name)
    base, processor = load_base(name, **options)
    return PrunedVLM(base, processor, method=method, keep=1.0 if keep is None else keep)


def load_vlm(pruner: str, *, model: str, method: str, keep: str | None, device: str) -> PrunedVLM:
    """What the command line names: a saved pruner on its base, or with `none` any method around any model.

    Args:
        method: A name, or with options `name[option=value;option=value]`.
    """
    budget = None if keep is None else Budget.parse(keep).keep
    if pruner != "none":
        vlm = PrunedVLM.from_pretrained(pruner, keep=budget)
    else:
        require_weights(parse_method(method).name)
        base, processor = load_base(model)
        vlm = PrunedVLM(base, processor, method=method, keep=1.0 if budget is None else budget)
    vlm.base.to(device)
    vlm.method.to(device)
    return vlm
