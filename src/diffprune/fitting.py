"""Which model, method and rules go together: each that does not is refused in one sentence before anything runs."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from diffprune.backbones.base import Backbone
from diffprune.backbones.splice import NEWLINE_RULES
from diffprune.base_files import quantiser
from diffprune.fingerprint import vision_state
from diffprune.json_files import short
from diffprune.methods.base import Pruner
from diffprune.methods.options import parse_method
from diffprune.ops.arguments import shown
from diffprune.registry import BACKBONES
from diffprune.tiles import BUDGETS
from diffprune.types import Keep
from diffprune.types import refuse_full_budget as refuse_full_budget

POSITIONS = ("original", "packed")


def wrap_backbone(model: nn.Module, processor: Any) -> Backbone:
    """The backbone for a loaded model, by its `model_type`."""
    family = require_family(getattr(getattr(model, "config", None), "model_type", None))
    if getattr(processor, "image_processor", None) is None:
        raise ValueError(
            f"the processor is {shown(processor)}, which has no image_processor; give the model's own: "
            "AutoProcessor.from_pretrained(...)"
        )
    return family(model, processor)


def require_family(model_type: str | None) -> type[Backbone]:
    """The backbone class of a `model_type`; an error where there is none."""
    if model_type not in BACKBONES:
        raise ValueError(
            f"model type {model_type!r} is not supported; there are {', '.join(BACKBONES.names())}. "
            "docs/add_a_backbone.md shows how to add one in one file"
        )
    family = BACKBONES.get(cast(str, model_type))
    if not issubclass(family, Backbone):
        raise ValueError(f"model type {model_type!r} is an image classifier, not a vision-language model")
    return family


def build_for(backbone: Backbone, method: str | Pruner, options: Mapping[str, Any]) -> Pruner:
    """The method, built of the backbone's own kind of block where it is given by name."""
    if not isinstance(method, str):
        if options:
            raise ValueError(f"options {', '.join(options)} given beside a built method; give them to the method")
        return method
    named = parse_method(method)
    if twice := sorted(named.options.keys() & options.keys()):
        raise ValueError(f"option {twice[0]!r} of method {method!r} is given beside it too; give it once")
    return named.build(block=backbone.block, language=backbone.language, **options)


def plain_model(model: Any) -> Any:
    """The Hugging Face model itself where PEFT has wrapped one: its adapters stand in the layers and stay at work."""
    if type(model).__module__.partition(".")[0] == "peft":
        return model.get_base_model()
    return model


def move_model(model: Any, device: str) -> None:
    """Bring the model to a device; an error where it is quantised or spread over devices and lies elsewhere."""
    spread = getattr(model, "hf_device_map", None)
    if not getattr(model, "is_quantized", False) and not spread:
        model.to(device)
        return
    here = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    if here - {torch.device(device).type}:
        raise ValueError(
            f"the model is quantised or spread over devices and lies on {', '.join(sorted(here))}, not on {device}; "
            "it cannot be moved afterwards, so load it there"
        )


def refuse_compiling(model: Any) -> None:
    """An error where the fast path, which reads weights itself and lays them out anew, would not find plain ones."""
    stored = quantiser(getattr(model.config, "quantization_config", None))
    offloaded = any(parameter.device.type == "meta" for parameter in model.parameters())
    if stored is not None or offloaded:
        how = f"quantised by {stored}" if stored else "offloaded to the CPU or the disk"
        raise ValueError(f"the fast path needs plain weights, and these are {how}; generate() works without it")
    weights = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    devices = sorted({str(weight.device) for weight in weights})
    precisions = sorted({str(weight.dtype).removeprefix("torch.") for weight in weights})
    for one, found in (("on one device", devices), ("in one precision", precisions)):
        if len(found) > 1:
            raise ValueError(
                f"the fast path needs all weights {one}, and here are {' and '.join(found)}; "
                "generate() works without it"
            )


def check_rules(positions: str | None, newline: str, budget: str, keep: Keep | None = None) -> None:
    """An error where one of a model's rules is none.

    Args:
        keep: A budget that no method was named for.
    """
    refuse_full_budget(keep)
    if positions not in (None, *POSITIONS):
        raise ValueError(f'positions={short(positions)} is unknown; choose "original" or "packed"')
    if newline not in NEWLINE_RULES:
        raise ValueError(f"newline={short(newline)} is unknown; choose {', '.join(NEWLINE_RULES)}")
    if budget not in BUDGETS:
        raise ValueError(f"budget={short(budget)} is unknown; choose {' or '.join(BUDGETS)}")


def check_fit(method: Pruner, backbone: Backbone, positions: str | None, budget: str) -> None:
    """An error where the method asks for what the backbone cannot give, or a rule has no meaning for it."""
    if method.is_inside and positions == "packed":
        raise ValueError(
            f'method {method.name!r} drops inside the language model, where positions="packed" has no meaning; '
            "leave it out, or see the method's own options"
        )
    if method.is_inside and budget == "per_tile":
        raise ValueError(
            f"budget='per_tile' is for choices before the language model; {method.name!r} makes its own inside"
        )
    if missing := method.needs - backbone.provides - {"llm_attention"}:
        raise ValueError(
            f"method {method.name!r} needs {', '.join(sorted(missing))}, which the {backbone.family} family "
            f"cannot give; it gives {', '.join(sorted(backbone.provides))}"
        )


def refuse_offloaded(backbone: Backbone, device: torch.device) -> None:
    """An error where weights that are read here, of embeddings, tower or projector, lie on a disk or another device."""
    elsewhere = {str(value.device) for value in vision_state(backbone).values() if value.device.type == "meta"}
    if device.type == "meta" or elsewhere:
        raise ValueError(
            "device_map has offloaded the model's embeddings, vision tower or projector, and tokens are scored beside "
            "them; give these a device (or load a smaller dtype): only decoder layers may be offloaded"
        )
