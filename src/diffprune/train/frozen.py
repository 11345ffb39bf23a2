"""The frozen model of a run: found by its config, refused early where it is another one or cannot be run here."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from diffprune.backbones.base import Backbone
from diffprune.base_files import quantiser
from diffprune.config import BackboneConfig
from diffprune.fitting import wrap_backbone
from diffprune.inside.layers import CudnnAttention
from diffprune.loading import brought_models, describe_base, load_base, refuse_unknown, unreachable
from diffprune.methods.base import Pruner
from diffprune.registry import BACKBONES
from diffprune.shapes import SHAPES, build, require_gpu

NO_GPU = (  # the end of the sentence
    " and about as much again for what the backward pass keeps (optim.gradient_checkpointing=true lowers that); or "
    "train scenes-llava, which a CPU can"
)


def family_of(config: BackboneConfig) -> tuple[str, str]:
    """The family a config is for, and the weights it names."""
    brought = brought_models()
    if config.name in brought:
        return brought[config.name], config.weights or config.name
    if config.name in BACKBONES:
        if config.weights is None:
            raise ValueError(f"backbone.weights is missing: {config.name!r} is a family; name a model id or a folder")
        return config.name, config.weights
    presets = {
        preset: (family, found.hub_id)
        for family in BACKBONES.names()
        for preset, found in BACKBONES.get(family).presets.items()
    }
    if config.name not in presets:
        raise ValueError(
            f"backbone.name is {config.name!r}; choose a family ({', '.join(BACKBONES.names())}), a preset "
            f"({', '.join(presets)}) or {', '.join(brought)}"
        )
    family, hub_id = presets[config.name]
    return family, config.weights or hub_id


def load_frozen(config: BackboneConfig, device: torch.device, mesh: DeviceMesh | None = None) -> tuple[Any, Any, str]:
    """The model on the device, its processor, and the name a saved pruner is to load it by.

    Args:
        mesh: Processes to split the decoder layers over; each then holds its part of them.
    """
    family, weights = family_of(config)
    brought = brought_models()
    is_brought = weights in brought
    if is_brought and config.name not in (weights, brought[weights]):
        raise ValueError(
            f"the config is for {config.name} and {weights} is another model; set backbone.name={weights} too, or "
            f"name the weights of {config.name}"
        )
    dtype = getattr(torch, config.dtype)
    if config.random_weights:
        model, processor = _random(config.name, device, dtype)
        return shard(model, processor, mesh), processor, ""
    if not is_brought:
        described = _describe(weights, config.revision)
        if described.model_type != family:
            raise ValueError(
                f"the config is for {family} ({config.name}) and {weights} is a {described.model_type}; "
                "set backbone.name and backbone.weights to the same family"
            )
        require_gpu(weights, described, dtype, device, what="training", way_out=NO_GPU)
        revision = {} if config.revision is None else {"revision": config.revision}
        model, processor = load_base(weights, dtype=dtype, **revision)
    else:
        model, processor = load_base(weights)
    model = shard(model.to(dtype=dtype), processor, mesh)  # before the move: the device never holds it whole
    return model.to(device=device), processor, weights


def shard(model: Any, processor: Any, mesh: DeviceMesh | None) -> Any:
    """The model with its decoder layers split over the processes; a layer is put together while it runs."""
    if mesh is not None:
        model.requires_grad_(False)
        decoder = wrap_backbone(model, processor).language_model
        for layer in decoder.layers:
            fully_shard(layer, mesh=mesh)
        whole = {value for name, value in decoder.named_parameters() if not name.startswith("layers.")}
        fully_shard(decoder, mesh=mesh, ignored_params=whole)  # embeddings are also looked up from outside
    return model


def require_whole_layers(method: Pruner, backbone: Backbone) -> None:
    """An error where layers are split over processes and the method runs them one by one: FSDP puts a layer together
    within a pass of the whole model."""
    if hasattr(backbone.language_model, "unshard") and (method.is_inside or method.hides_tokens):
        raise ValueError(
            f"backbone.shard is true, and {method.name} runs decoder layers one by one, which cannot be split over "
            "processes; set it to false, or train a method that weakens tokens before the language model"
        )


def _describe(weights: str, revision: str | None) -> Any:
    """The configuration of the model, found quickly or not at all; a quantised one is refused."""
    setting = f"backbone.weights={weights!r}"
    refuse_unknown(weights, setting)
    if not Path(weights).is_dir():
        ask_hub_once(weights, revision, setting)
    described = describe_base(weights, setting, revision=revision)
    found = quantiser(getattr(described, "quantization_config", None))
    if found is not None:
        raise ValueError(
            f"{setting} is quantised by {found}, and a pruner is not trained on that; name the checkpoint it was made "
            "from, and load the pruner onto the quantised one afterwards"
        )
    return described


def ask_hub_once(weights: str, revision: str | None, setting: str) -> None:
    """Raise where the hub does not answer and nothing of the model is here: its own client would try for half a minute.

    Args:
        setting: The model as the user gave it, for the message.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(try_to_load_from_cache(weights, "config.json", revision=revision), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(weights, "config.json", revision=revision))
    except HfHubHTTPError:
        return  # an answer: whoever loads the model explains it
    except Exception as error:  # of the network; the client's own classes change with its versions
        raise unreachable(setting, error) from error


def _random(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """The real shape with random numbers, without a download."""
    if name not in SHAPES:
        raise ValueError(
            f"backbone.random_weights is there for {', '.join(SHAPES)}, not for {name!r}; set it to false or take one"
        )
    described, processor = SHAPES[name](False)
    require_gpu(name, described, dtype, device, what="training", way_out=NO_GPU)
    return build(described, str(device), dtype), processor


@contextmanager
def recomputing(backbone: Backbone, *, enabled: bool) -> Iterator[None]:
    """Inside, each decoder layer runs again in the backward pass instead of keeping what it computed.

    Only the layers' own switches are touched, and put back: below a layer nothing is in training mode, so a frozen
    model with dropout stays without.
    """
    if not enabled:
        yield
        return
    layers: list[Any] = [
        layer for layer in backbone.language_model.layers if isinstance(layer, GradientCheckpointingLayer)
    ]
    if not layers:
        raise ValueError(
            f"optim.gradient_checkpointing is true and the decoder layers of {backbone.family} cannot do it; "
            "set it to false"
        )
    for layer in layers:
        layer.gradient_checkpointing, layer.training = True, True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, context_fn=same_kernels)
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing, layer.training = False, False
            del layer._gradient_checkpointing_func


@contextmanager
def not_recomputing(backbone: Backbone) -> Iterator[None]:
    """Inside `recomputing`: layers run once, for what never goes backward; one that will run again takes no cache."""
    layers: list[Any] = [
        layer for layer in backbone.language_model.layers if getattr(layer, "gradient_checkpointing", False)
    ]
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True


def same_kernels() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around a layer and around its second run: the second chooses among the attention kernels that the first had."""
    return nullcontext(), CudnnAttention(enabled=torch.backends.cuda.cudnn_sdp_enabled())
