"""One decoder layer as the loop runs it: its mask, soft or not, and a layer that only some tokens go through."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from diffprune.inside.state import Route
from diffprune.inside.stream import LayerCache, Stream, columns_left
from diffprune.ops import take_tokens

LEAST = 1e-6  # of a weight; DynamicViT's own attention leaks as much


def attention_mask(
    decoder: Any, stream: Stream, soft_mask: Float[Tensor, "B T"] | None = None
) -> Float[Tensor, "B 1 T T"] | None:
    """What a layer is given as its mask: nothing under SDPA, where being causal is enough; else all of it.

    A column of soft mask w enters every other column's attention as w exp(logit): at 0 it is as if it were not there.
    Each always attends to itself. The weight is a bias log(w) in the layer's own attention, with w no less than 1e-6:
    the gradient in w, exp(logit) / sum, is then that of the product also where w is 0.
    """
    if soft_mask is None and stream.two_way is None and decoder.config._attn_implementation == "sdpa":
        return None
    width = stream.valid.shape[1]
    allowed = torch.ones(width, width, dtype=torch.bool, device=stream.valid.device).tril()
    if stream.two_way is not None:
        allowed = allowed | (stream.two_way[:, :, None] & stream.two_way[:, None])
    mask = additive_mask((allowed & stream.valid[:, None])[:, None], stream.hidden)
    if soft_mask is None:
        return mask
    bias = (LEAST + (1 - LEAST) * soft_mask).log()[:, None, None].to(stream.hidden.dtype)  # [B, 1, 1, T]
    itself = torch.eye(width, dtype=torch.bool, device=soft_mask.device)
    return mask + bias.masked_fill(itself, 0.0)


def additive_mask(allowed: Bool[Tensor, "B 1 Q T"], like: Tensor) -> Float[Tensor, "B 1 Q T"]:
    """0 where a key is seen and the lowest number where not: SDPA and eager attention both take it."""
    mask = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~allowed, torch.finfo(like.dtype).min)


def run_layer(
    decoder: Any,
    index: int,
    hidden: Float[Tensor, "B T L"],
    positions: Int[Tensor, "*R B T"],
    tables: tuple[Tensor, Tensor],
    mask: Float[Tensor, "B 1 T U"] | None,
    cache: DynamicCache | None = None,
) -> Float[Tensor, "B T L"]:
    """One layer as it is, its keys and values put into the cache where there is one."""
    learns = mask is not None and mask.requires_grad
    # On a GPU, SDPA's memory-efficient kernel keeps what the gradient of a bias is made of (the log-sum-exp of each
    # row) only where queries, keys or values need a gradient too, and of a frozen model on frozen tokens none does:
    # its backward pass then fails. cuDNN's kernel, the first choice on some GPUs, has no gradient for a bias at all.
    if learns and not hidden.requires_grad:
        hidden = hidden.detach().requires_grad_()
    with CudnnAttention(enabled=False) if learns else nullcontext():
        out = decoder.layers[index](
            hidden,
            attention_mask=mask,
            position_ids=positions if positions.ndim == 2 else positions[0],
            past_key_values=cache,
            use_cache=cache is not None,
            position_embeddings=tables,
        )
    return out[0] if isinstance(out, tuple) else out


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


def run_routed(
    decoder: Any,
    index: int,
    stream: Stream,
    visual: Int[Tensor, "B M"],
    route: Route,
    cache: LayerCache | None,
) -> Stream:
    """The whole sequence after a layer that only the text and some of the visual tokens go through.

    Those: x' = x + attention, then x' + weight * MLP. A visual token that skips it: weight * x. Text: unweighted.
    """
    block, width = plain_layer(decoder, index), stream.valid.shape[1]
    columns = visual.gather(1, route.keep.clamp_min(0)).masked_fill(route.keep < 0, width)
    left, valid = columns_left(stream, columns)
    some = stream.take(left, valid)
    if cache is not None:  # decoding goes on from the whole sequence, over what this layer saw
        segment = stream.segment(range(index, index + 1))
        cache.segments.append(replace(segment, valid=some.valid, padded=not bool(some.valid.all())))
    weight = stream.hidden.new_ones(len(visual), width + 1)
    weight = weight.scatter(1, visual.masked_fill(visual < 0, width), route.weight.to(weight.dtype))[:, :width, None]
    attention, _ = block.self_attn(
        hidden_states=block.input_layernorm(some.hidden),
        attention_mask=attention_mask(decoder, some),
        position_ids=some.positions if some.positions.ndim == 2 else some.positions[0],
        past_key_values=None if cache is None else cache.keys_values,
        use_cache=cache is not None,
        position_embeddings=decoder.rotary_emb(some.hidden, some.positions),
    )
    passed = some.hidden + attention
    passed = passed + take_tokens(weight, left) * block.mlp(block.post_attention_layernorm(passed))
    target = left.masked_fill(~some.valid, width)[..., None].expand_as(passed)
    whole = functional.pad(weight * stream.hidden, (0, 0, 0, 1)).scatter(1, target, passed)[:, :width]
    return replace(stream, hidden=add_after(stream, index, whole))


def plain_layer(decoder: Any, index: int) -> Any:
    """The layer, where it is attention and an MLP with one norm before each; else a `ValueError`."""
    block = decoder.layers[index]
    parts = {name for name, _ in block.named_children()}
    if parts != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        raise ValueError(
            f"layers of {type(block).__name__} have other parts than attention, an MLP and a norm before each "
            f"({', '.join(sorted(parts))}), so tokens cannot be weighed in them; choose a method that drops tokens"
        )
    return block


def add_after(stream: Stream, index: int, hidden: Float[Tensor, "B T L"]) -> Float[Tensor, "B T L"]:
    """What leaves a layer, with what the family adds to it there."""
    return hidden + stream.additions[index] if index < len(stream.additions) else hidden
