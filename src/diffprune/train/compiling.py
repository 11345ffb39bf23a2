"""The frozen model as a run computes it: its decoder layers compiled or run again, and attention by which kernel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from diffprune.backbones.base import Backbone
from diffprune.config import RunConfig
from diffprune.inside.layers import CudnnAttention, run_layer
from diffprune.model import PrunedVLM
from diffprune.train.frozen import recomputing

MULTIPLE = 16  # lengths of sequences for compiled layers: few of them, all aligned
TRIED = 512  # length of the sequence that is tried: about that of a step, for code is made for its size
FAR = {torch.float32: 1e-3}  # how far what is compiled may be off, relative; in 16 bits by both ways' rounding
FAR_HALF = 0.1


@contextmanager
def computing(vlm: PrunedVLM, config: RunConfig, autocast: Callable[..., Any] = nullcontext) -> Iterator[str]:
    """Inside, the frozen model computes as the config of a run says; a sentence of what cannot be had, else nothing.

    Args:
        autocast: Around every forward pass of the run.
    """
    optim = config.optim
    # cuDNN's attention plans anew for every length, on the host, and lengths differ from step to step. Repeatable runs
    # need it: without the memory-efficient kernel nothing else takes a mask.
    kernel = CudnnAttention(enabled=config.deterministic and torch.backends.cuda.cudnn_sdp_enabled())
    with (
        kernel,
        recomputing(vlm.backbone, enabled=optim.gradient_checkpointing),
        compiled(vlm, enabled=optim.compile, batch_size=optim.batch_size, autocast=autocast) as said,
    ):
        yield said


@contextmanager
def compiled(
    vlm: PrunedVLM,
    *,
    enabled: bool,
    batch_size: int = 2,
    autocast: Callable[..., Any] = nullcontext,
) -> Iterator[str]:
    """Inside, each decoder layer of the frozen model runs as torch.compile makes it; afterwards as it is.

    Layers are compiled one by one, so that all of them share one piece of code, for every length of a sequence; lengths
    are filled up to multiples of `MULTIPLE`. Nothing in them learns, so the backward pass has no products for weights.
    A layer is tried first, forward and backward: where torch cannot compile it, or gets it wrong, all run as they are,
    and a sentence says so.
    """
    layers = list(vlm.backbone.language_model.layers) if enabled else []
    decoder: Any = getattr(vlm.decoder, "stock", vlm.decoder)
    said = ""
    is_split = hasattr(vlm.backbone.language_model, "unshard")  # then a layer does not run by itself
    plain = try_layer(vlm.backbone, batch_size, autocast) if layers and not is_split else None
    for layer in layers:
        layer.compile(dynamic=True)
    if plain is not None:
        said = refusal(lambda: try_layer(vlm.backbone, batch_size, autocast), plain)
        if said:
            _as_they_are(layers)
    decoder.multiple = MULTIPLE if layers and not said else 1
    try:
        yield said
    finally:
        _as_they_are(layers)
        decoder.multiple = 1


def _as_they_are(layers: list[Any]) -> None:
    for layer in layers:
        layer._compiled_call_impl = None


def refusal(call: Callable[[], tuple[Tensor, Tensor]], plain: tuple[Tensor, Tensor]) -> str:
    """Why what is compiled is not used, in a sentence; nothing where it gives what the plain layer gave."""
    try:
        found = call()
    except Exception as error:  # of the compiler, the C compiler it calls, or the device
        reason = " ".join(str(error).split())[:200]
        return f"optim.compile: torch cannot compile the decoder layers here ({reason}); they run as they are"
    for ours, theirs in zip(found, plain, strict=True):
        error = float((ours - theirs).float().norm() / theirs.float().norm().clamp_min(1e-12))
        if not error <= FAR.get(ours.dtype, FAR_HALF):
            return f"optim.compile: the compiled decoder layers are off by {error:.1g}, relative; they run as they are"
    return ""


def try_layer(backbone: Backbone, batch_size: int, autocast: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """What the first decoder layer adds to noise, and to a gradient that comes back through it."""
    decoder, weight = backbone.language_model, backbone.model.get_input_embeddings().weight
    shape = (batch_size, TRIED, weight.shape[1])
    draw = torch.Generator().manual_seed(0)
    noise, back = (torch.randn(shape, generator=draw).to(weight.device, weight.dtype) for _ in range(2))
    positions = torch.arange(shape[1], device=weight.device).expand(*shape[:2])
    positions = positions if backbone.plain_positions else positions.expand(3, *shape[:2])
    noise.requires_grad_()
    with torch.enable_grad(), autocast():
        out = run_layer(decoder, 0, noise, positions, decoder.rotary_emb(noise, positions), None)
    (gradient,) = torch.autograd.grad(out, noise, back.to(out.dtype))
    return (out - noise).detach(), gradient - back
