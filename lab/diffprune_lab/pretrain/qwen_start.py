"""What the scenes-qwen models know before their language stage: a tower, and the decoder of a smaller LLaVA.

A LLaMA decoder is a Qwen decoder without biases, and text has one number for time, row and column, so M-RoPE turns it
as plain rotary positions do. `grow_decoder_` therefore gives a decoder that reads and writes text exactly as the one it
comes from, however much wider and deeper it is. `align_merger_` then makes the merger write what that decoder is used
to see: its projector's tokens of the same pictures, by least squares. What is left to learn is where tokens stand.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from diffprune_lab.pretrain import package, passes, qwen_passes
from diffprune_lab.scenes.qwen import UNIT

RIDGE = 1e-3  # of the mean variance of what the last map of the merger takes


def load_start(model: nn.Module, folder: Path) -> bool:
    """Puts what a run wrote into the model; whether it was a whole model.

    Of a tower that was trained for another size all fits but the last map of the merger, which stays as it is.
    """
    state, own = package.read_state(folder), model.state_dict()
    whole = any(not package.is_tower(name) for name in state)
    if not whole:
        state = {
            name: value for name, value in state.items() if not _is_last_map(name) or value.shape == own[name].shape
        }
    missing = [
        name for name in own if name not in state and (whole or (package.is_tower(name) and not _is_last_map(name)))
    ]
    odd = [name for name, value in state.items() if name not in own or own[name].shape != value.shape]
    if missing or odd:
        raise ValueError(f"{folder} does not fit the model: missing {missing[:3]}, of another shape or name {odd[:3]}.")
    model.load_state_dict(state, strict=False)
    return whole


def _is_last_map(name: str) -> bool:
    return ".merger.mlp.2." in name


# The decoder ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def grow_decoder_(model: Any, base: Any) -> None:
    """Starts the decoder and the head as those of `base`, which may be narrower and have fewer layers.

    What is new writes nothing yet: entries of the stream are zero, heads and hidden units are read by nobody, and the
    layers between those of `base` add nothing. All of it is read or fed by random weights, so that it learns.

    Args:
        model: A Qwen2.5-VL with fresh weights.
        base: A LLaVA with a LLaMA decoder.
    """
    small, large = base.model.language_model, model.model.language_model
    old, new = len(small.layers), len(large.layers)
    norm_scale = (small.config.hidden_size / large.config.hidden_size) ** 0.5  # the mean is over more entries, all zero
    _grow_norm_(large.norm.weight, small.norm.weight, norm_scale)
    _grow_(large.embed_tokens.weight, small.embed_tokens.weight, writes=False)
    large.embed_tokens.weight[:, small.config.hidden_size :] = 0
    _grow_(model.lm_head.weight, base.lm_head.weight, writes=False)
    sources = {round(i * (new - 1) / (old - 1)): layer for i, layer in enumerate(small.layers)}
    for number, layer in enumerate(large.layers):
        source = sources.get(number)
        writers = (layer.self_attn.o_proj, layer.mlp.down_proj)
        if source is None:
            for writer in writers:
                writer.weight.zero_()
            continue
        for name in ("q_proj", "k_proj", "v_proj"):
            projection = getattr(layer.self_attn, name)
            _grow_(projection.weight, getattr(source.self_attn, name).weight, writes=False)
            projection.bias.zero_()
        for name in ("gate_proj", "up_proj"):
            _grow_(getattr(layer.mlp, name).weight, getattr(source.mlp, name).weight, writes=False)
        for writer, written in zip(writers, (source.self_attn.o_proj, source.mlp.down_proj), strict=True):
            _grow_(writer.weight, written.weight, writes=True)
        for name in ("input_layernorm", "post_attention_layernorm"):
            _grow_norm_(getattr(layer, name).weight, getattr(source, name).weight, norm_scale)


def _grow_(large: Tensor, small: Tensor, *, writes: bool) -> None:
    """Puts the small matrix at the top left of the large one; the rest is zero where it `writes` to the stream."""
    if writes:
        large.zero_()
    large[: small.shape[0], : small.shape[1]] = small.to(large)


def _grow_norm_(large: Tensor, small: Tensor, scale: float) -> None:
    large.fill_(float(small.mean()) * scale)
    large[: len(small)] = small.to(large) * scale


# The merger ----------------------------------------------------------------------------------------------------------


def base_tokens(base: Any, pixels: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, "B N L"]:
    """What the decoder of `base` is shown of each square of `UNIT` pixels: the mean of its tokens there."""
    patch = base.config.vision_config.patch_size
    states, _ = passes.tower_states(base.model.vision_tower, pixels, last=False)
    tokens = base.model.multi_modal_projector(states[:, 1:])
    (rows, columns), per = qwen_passes.grid_of(pixels, UNIT), UNIT // patch
    return tokens.unflatten(1, (rows, per, columns, per)).mean((2, 4)).flatten(1, 2)


def merger_hidden(tower: Any, features: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
    """What the last map of the merger takes."""
    first, activation, _ = tower.merger.mlp
    return activation(first(qwen_passes.norm_features(tower, features)))


@torch.no_grad()
def align_merger_(tower: Any, base: Any, pictures: Iterable[UInt8[Tensor, "B 3 H W"]]) -> float:
    """Sets the last map of the merger by least squares to what the decoder of `base` is used to see.

    Args:
        tower: Of the model, trained.
        pictures: Of the size that `base` takes, on the device of both.

    Returns:
        The share of the variance of these tokens that the tower explains.
    """
    gram, moment, total = (torch.zeros((), dtype=torch.float64) for _ in range(3))
    for pixels in pictures:
        hidden, target = (
            torch.cat((part.flatten(0, 1).double(), part.new_ones(part.shape[:2].numel(), 1).double()), dim=1)
            for part in (merger_hidden(tower, qwen_passes.tower_features(tower, pixels)), base_tokens(base, pixels))
        )
        gram, moment, total = gram + hidden.T @ hidden, moment + hidden.T @ target, total + target.T @ target
    count = total[-1, -1]
    ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    ridge[-1, -1] = 0
    solved = torch.linalg.solve(gram + ridge, moment[:, :-1])  # [D + 1, L]
    last, width = tower.merger.mlp[2], solved.shape[1]
    last.weight.zero_()
    last.bias.zero_()
    last.weight[:width] = solved[:-1].T.to(last.weight)
    last.bias[:width] = solved[-1].to(last.bias)
    mean = total[-1, :-1] / count
    variance = total.diagonal()[:-1] - count * mean.square()
    left = total.diagonal()[:-1] - 2 * (solved * moment[:, :-1]).sum(0) + (solved * (gram @ solved)).sum(0)
    return float(1 - left.sum() / variance.sum())
