"""The decoder in training: nothing is dropped, but what a method would drop is heard less or not at all.

A token that is heard with weight h enters every other token's attention as h exp(logit): at 0 it is as if it were not
there. Each token always hears itself. The weight is put into the layers' own attention as a bias log(h), with h no less
than 1e-6: the gradient in h, exp(logit) / sum, is then that of the product also for a token that nobody hears.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from diffprune.backbones.base import IGNORE, Backbone
from diffprune.inside.loop import (
    Stream,
    add_after,
    additive,
    look,
    pass_some,
    plan_stages,
    prefill_mask,
    run_layer,
    start,
    with_glimpse,
    with_glimpse_of,
)
from diffprune.inside.state import Route
from diffprune.methods.base import TrainableLayerPruner
from diffprune.ops.noise import Generators
from diffprune.types import LMInputs

LEAST = 1e-6  # of a weight; DynamicViT's own attention leaks as much


class Lesson(NamedTuple):
    """A training pass, real columns first.

    Args:
        hidden: Last hidden states.
        targets: What each column should say next, -100 where nothing.
        kept: True at visual tokens that are heard.
        alpha: How much of each visual token is heard in the end.
        penalty: Of the method, summed over its cuts.
    """

    hidden: Float[Tensor, "B T L"]
    targets: Int[Tensor, "B T"]
    kept: Tensor
    alpha: Float[Tensor, "B M"]
    penalty: Float[Tensor, ""] | None


def listen(
    backbone: Backbone,
    lm: LMInputs,
    method: TrainableLayerPruner | None = None,
    k: Int[Tensor, " B"] | None = None,
    *,
    tau: float | Tensor = 1.0,
    generator: Generators = None,
) -> Lesson:
    """The language model over prompts and answers, each token heard as much as `lm` or the method's decisions say.

    Args:
        method: Decides before its own layers; none: `lm.heard` alone holds.
        k: Visual tokens that each prompt is to keep.
    """
    assert lm.labels is not None
    decoder = backbone.language_model
    stream, prompt = start(backbone, lm)
    plan = {} if method is None or k is None else plan_stages(method, len(decoder.layers), lm.visual.sum(-1), k)
    if method is not None and any(bool((lm.visual.sum(-1) > left).any()) for left in plan.values()):
        stream = with_glimpse(stream, prompt, method)
    heard = stream.hidden.new_ones(stream.valid.shape, dtype=torch.float32)
    if lm.heard is not None:
        heard = lm.heard.float().gather(1, stream.source)
    tables = decoder.rotary_emb(stream.hidden, stream.positions)
    mask = hearing_mask(decoder, stream, heard if lm.heard is not None else None)
    penalty, entered = None, None
    for index in range(len(decoder.layers)):
        stream = replace(stream, hidden=with_glimpse_of(stream, method, index))
        chosen = None
        if method is not None and index in plan and bool((stream.visual.sum(-1) > plan[index]).any()):
            state = look(decoder, index, stream, prompt, entered, None, heard)
            count = (state.visual >= 0).sum(-1)
            chosen = method.decide(state, plan[index].minimum(count), tau=tau, generator=generator)
            if not isinstance(chosen, Route):
                # A prompt that may keep all its tokens loses none.
                weights = torch.where((plan[index] < count)[:, None], chosen.heard, 1.0)
                heard = multiply_at(heard, state.visual, weights)
                mask = hearing_mask(decoder, stream, heard)
                if chosen.penalty is not None:
                    penalty = chosen.penalty if penalty is None else penalty + chosen.penalty
        entered = stream.hidden
        if isinstance(chosen, Route):
            stream = pass_some(decoder, index, stream, state.visual, chosen, None)
        else:
            hidden = run_hearing(decoder, index, entered, stream.positions, tables, mask)
            stream = replace(stream, hidden=add_after(stream, index, hidden))
    nexts = functional.pad(lm.labels[:, 1:], (0, 1), value=IGNORE)  # what follows each column of `lm`
    silent = ~stream.valid if stream.glimpse is None else ~stream.valid | stream.glimpse
    return Lesson(
        hidden=decoder.norm(stream.hidden),
        targets=nexts.gather(1, stream.source).masked_fill(silent, IGNORE),
        kept=stream.visual & (heard > 0.5),
        alpha=heard.detach().masked_fill(~stream.visual, 0.0),
        penalty=penalty,
    )


def hearing_mask(
    decoder: object, stream: Stream, heard: Float[Tensor, "B T"] | None
) -> Float[Tensor, "B 1 T T"] | None:
    """What a layer is given as its mask: log(heard) where a column is seen by another, and never above itself."""
    if heard is None:
        return prefill_mask(decoder, stream)
    width = stream.valid.shape[1]
    allowed = torch.ones(width, width, dtype=torch.bool, device=heard.device).tril()
    if stream.two_way is not None:
        allowed = allowed | (stream.two_way[:, :, None] & stream.two_way[:, None])
    bias = (LEAST + (1 - LEAST) * heard).log()[:, None, None].to(stream.hidden.dtype)  # [B, 1, 1, T]
    itself = torch.eye(width, dtype=torch.bool, device=heard.device)
    return additive((allowed & stream.valid[:, None])[:, None], stream.hidden) + bias.masked_fill(itself, 0.0)


def run_hearing(
    decoder: Any,
    index: int,
    hidden: Float[Tensor, "B T L"],
    positions: Int[Tensor, "*R B T"],
    tables: tuple[Tensor, Tensor],
    mask: Float[Tensor, "B 1 T T"] | None,
) -> Float[Tensor, "B T L"]:
    """One layer under such a mask, by an attention kernel that has a gradient for it."""
    if mask is None or not mask.requires_grad:
        return run_layer(decoder, index, hidden, positions, tables, mask, None)
    # On a GPU, SDPA's memory-efficient kernel keeps what the gradient of a bias is made of (the log-sum-exp of each
    # row) only where queries, keys or values need a gradient too, and of a frozen model on frozen tokens none does:
    # its backward pass then fails. cuDNN's kernel, the first choice on some GPUs, has no gradient for a bias at all.
    if not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()
    with CudnnAttention(enabled=False):
        return run_layer(decoder, index, hidden, positions, tables, mask, None)


class CudnnAttention:
    """Inside, SDPA may or may not use cuDNN's kernel; behind it, all is as before. Can be entered again."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.before: list[bool] = []

    def __enter__(self) -> None:
        self.before.append(torch.backends.cuda.cudnn_sdp_enabled())
        torch.backends.cuda.enable_cudnn_sdp(self.enabled)

    def __exit__(self, *error: object) -> None:
        torch.backends.cuda.enable_cudnn_sdp(self.before.pop())


def multiply_at(
    values: Float[Tensor, "B T"], columns: Int[Tensor, "B M"], factors: Float[Tensor, "B M"]
) -> Float[Tensor, "B T"]:
    """The values, those at the columns (-1: none) multiplied by their factors."""
    width = values.shape[1]
    spread = values.new_ones(len(values), width + 1)
    spread = spread.scatter(1, columns.masked_fill(columns < 0, width), factors.to(values.dtype))
    return values * spread[:, :width]
