"""A LLaMA- or Qwen2-type decoder as pure functions over the stock modules' weights, with a static cache.

The stock forward decides much at run time: mask, cache, kernels. Here shapes and addresses are fixed, so that a prefill
or a decode step can be one CUDA graph. Real columns come first and padding behind, so being causal is all the mask a
prompt needs.

A layer is given the residual and the branch not yet added to it, so that addition and norm fall into one kernel.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from diffprune.backbones.windows import window_of
from diffprune.fast.graphs import num_bytes
from diffprune.fast.precision import Linear, Map, Scaled, scaled_map, scaled_product
from diffprune.ops import rotate


class Unsupported(ValueError):
    """The language model has parts that the fast path does not know."""


class LayerWeights(NamedTuple):
    """One decoder layer. `qkv` and `gate_up` hold one fused map each, or the stock ones side by side."""

    input_norm: Tensor
    qkv: tuple[Map, ...]
    head_norms: tuple[Tensor, ...]  # of queries and keys, where a family has them
    out: Map
    mlp_norm: Tensor
    gate_up: tuple[Map, ...]
    down: Map


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is the same in all layers."""

    heads: int
    key_heads: int
    head_width: int
    scaling: float
    eps: float
    head_eps: float
    activation: Callable[[Tensor], Tensor]

    @property
    def widths(self) -> list[int]:
        """Columns of queries, keys and values in a fused product."""
        return [self.heads * self.head_width, *[self.key_heads * self.head_width] * 2]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A language model taken apart: what `prefill` and `decode` run."""

    shape: Shape
    layers: list[LayerWeights]
    final_norm: Tensor
    head: Linear
    embed: Callable[[Tensor], Tensor]
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    own_bytes: int  # of private copies

    @property
    def in_eight_bits(self) -> bool:
        """Whether maps of its layers are in 8 bits."""
        return any(isinstance(each, Scaled) for each in (*self.layers[0].qkv, self.layers[0].down))


def read_decoder(model: Any, language_model: Any, *, fuse: bool) -> DecoderWeights:
    """The weights of a language model in the layout of the fast path; `fuse` makes private copies of some.

    Raises `Unsupported` where a part is missing or there is one more than expected; what cannot be seen from the parts
    is for the caller to check against the stock forward.
    """
    layers = list(language_model.layers)
    first = layers[0]
    if (window := window_of(language_model.config)) is not None:
        raise Unsupported(f"its attention slides over a window of {window} tokens")
    expected = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    for layer in layers:
        names = {name for name, _ in layer.named_children()}
        if names != expected:
            raise Unsupported(f"its decoder layers are made of {', '.join(sorted(names))}")
        parts = {name for name, _ in layer.self_attn.named_children()} - {"rotary_emb"}
        if (
            not {"q_proj", "k_proj", "v_proj", "o_proj"}
            <= parts
            <= {
                *("q_proj", "k_proj", "v_proj", "o_proj"),
                *("q_norm", "k_norm"),
            }
        ):
            raise Unsupported(f"its attention is made of {', '.join(sorted(parts))}")
        if not {"gate_proj", "up_proj", "down_proj"} <= {name for name, _ in layer.mlp.named_children()}:
            raise Unsupported("its MLP is not gated")
    attention = first.self_attn
    width = int(attention.head_dim)
    shape = Shape(
        heads=attention.q_proj.out_features // width,
        key_heads=attention.k_proj.out_features // width,
        head_width=width,
        scaling=float(attention.scaling),
        eps=norm_eps(first.input_layernorm),
        head_eps=norm_eps(attention.q_norm) if hasattr(attention, "q_norm") else 0.0,
        activation=first.mlp.act_fn,
    )
    weights = [layer_weights(layer, fuse=fuse) for layer in layers]
    fused = [linear for layer in weights for group in (layer.qkv, layer.gate_up) for linear in group] if fuse else []
    return DecoderWeights(
        shape=shape,
        layers=weights,
        final_norm=language_model.norm.weight.detach(),
        head=linear_of(model.lm_head),
        embed=model.get_input_embeddings(),
        rotary=language_model.rotary_emb,
        own_bytes=num_bytes(*(tensor for linear in fused for tensor in linear)),
    )


def in_eight_bits(weights: DecoderWeights) -> DecoderWeights:
    """The same model with the maps of its layers in 8 bits, private copies all of them."""
    layers = [
        layer._replace(
            qkv=tuple(map(scaled_map, layer.qkv)),
            out=scaled_map(layer.out),
            gate_up=tuple(map(scaled_map, layer.gate_up)),
            down=scaled_map(layer.down),
        )
        for layer in weights.layers
    ]
    maps = [each for layer in layers for each in (*layer.qkv, layer.out, *layer.gate_up, layer.down)]
    own = [tensor for each in maps if isinstance(each, Scaled) for tensor in (each.weight, each.scale)]
    return replace(weights, layers=layers, own_bytes=num_bytes(*own))


def layer_weights(layer: Any, *, fuse: bool) -> LayerWeights:
    """One stock layer's weights."""
    attention, mlp = layer.self_attn, layer.mlp
    norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()
    return LayerWeights(
        input_norm=layer.input_layernorm.weight.detach(),
        qkv=side_by_side((attention.q_proj, attention.k_proj, attention.v_proj), fuse=fuse),
        head_norms=tuple(norm.weight.detach() for norm in norms),
        out=linear_of(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=side_by_side((mlp.gate_proj, mlp.up_proj), fuse=fuse),
        down=linear_of(mlp.down_proj),
    )


def linear_of(linear: Any) -> Linear:
    """Weight and bias of a linear module; `Unsupported` where it is another, which may do more than these say."""
    if type(linear) is not nn.Linear:
        raise Unsupported(f"one of its linear maps is a {type(linear).__name__}")
    return linear.weight.detach(), None if linear.bias is None else linear.bias.detach()


def side_by_side(linears: Iterable[Any], *, fuse: bool, dtype: torch.dtype | None = None) -> tuple[Linear, ...]:
    """Linear maps of one input: as they are, or as one map whose output is theirs in a row."""
    each = [linear_of(linear) for linear in linears]
    if dtype is not None:
        each = [(weight.to(dtype), None if bias is None else bias.to(dtype)) for weight, bias in each]
    return fused(tuple(each)) if fuse else tuple(each)


def fused(each: tuple[Linear, ...]) -> tuple[Linear, ...]:
    """Linear maps of one input as one map; a single one as it is."""
    if len(each) == 1:
        return each
    biases = [bias for _, bias in each if bias is not None]
    assert len(biases) in (0, len(each)), "some of the maps have a bias and some have not"
    return ((torch.cat([weight for weight, _ in each]), torch.cat(biases) if biases else None),)


def norm_eps(norm: Any) -> float:
    """The small number of a norm, under any of its names."""
    return float(getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 1e-6)


# One layer -----------------------------------------------------------------------------------------------------------


def rms_norm(x: Float[Tensor, "*B L"], weight: Float[Tensor, " L"], eps: float) -> Float[Tensor, "*B L"]:
    """Unit mean square in float32, then the weight, as the stock norms do."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def apply(x: Tensor, linear: Map) -> Tensor:
    """What a linear map makes of x."""
    return scaled_product(x, linear) if isinstance(linear, Scaled) else F.linear(x, *linear)


def apply_each(x: Tensor, linears: tuple[Map, ...], widths: list[int]) -> tuple[Tensor, ...]:
    """What several linear maps make of x, whether they are fused or not."""
    if len(linears) == 1:
        return apply(x, linears[0]).split(widths, dim=-1)
    return tuple(apply(x, linear) for linear in linears)


def attention_inputs(
    shape: Shape, x: Float[Tensor, "B T L"], weights: LayerWeights, cos: Tensor, sin: Tensor
) -> tuple[Float[Tensor, "B H T E"], Float[Tensor, "B J T E"], Float[Tensor, "B J T E"]]:
    """Turned queries, turned keys and values of a layer for what enters it."""
    normed = rms_norm(x, weights.input_norm, shape.eps)
    query, key, value = (
        part.unflatten(-1, (-1, shape.head_width)) for part in apply_each(normed, weights.qkv, shape.widths)
    )
    if weights.head_norms:
        query = rms_norm(query, weights.head_norms[0], shape.head_eps)
        key = rms_norm(key, weights.head_norms[1], shape.head_eps)
    return rotate(query.transpose(1, 2), cos, sin), rotate(key.transpose(1, 2), cos, sin), value.transpose(1, 2)


def mlp(shape: Shape, x: Float[Tensor, "B T L"], weights: LayerWeights) -> Float[Tensor, "B T L"]:
    normed = rms_norm(x, weights.mlp_norm, shape.eps)
    half = weights.down[0].shape[1]
    gate, up = apply_each(normed, weights.gate_up, [half, half])
    return apply(shape.activation(gate) * up, weights.down)


def prefill_layer(
    shape: Shape,
    residual: Float[Tensor, "B T L"],
    branch: Float[Tensor, "B T L"],
    weights: LayerWeights,
    cos: Float[Tensor, "B T E"],
    sin: Float[Tensor, "B T E"],
    keys: Float[Tensor, "B J C E"],
    values: Float[Tensor, "B J C E"],
) -> tuple[Float[Tensor, "B T L"], Float[Tensor, "B T L"]]:
    """Residual and branch after one layer over a whole prompt; its keys and values are put into the first columns."""
    residual = residual + branch
    query, key, value = attention_inputs(shape, residual, weights, cos, sin)
    keys[:, :, : key.shape[2]] = key
    values[:, :, : value.shape[2]] = value
    attended = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=shape.scaling, enable_gqa=shape.heads != shape.key_heads
    )
    residual = residual + apply(attended.transpose(1, 2).flatten(2), weights.out)
    return residual, mlp(shape, residual, weights)


def decode_layer(
    shape: Shape,
    residual: Float[Tensor, "B 1 L"],
    branch: Float[Tensor, "B 1 L"],
    weights: LayerWeights,
    cos: Float[Tensor, "B 1 E"],
    sin: Float[Tensor, "B 1 E"],
    keys: Float[Tensor, "B J C E"],
    values: Float[Tensor, "B J C E"],
    column: Int[Tensor, " B"],
    seen: Bool[Tensor, "B 1 1 C"],
) -> tuple[Float[Tensor, "B 1 L"], Float[Tensor, "B 1 L"]]:
    """Residual and branch after one layer for one more token, whose key and value go to each row's own column."""
    residual = residual + branch
    query, key, value = attention_inputs(shape, residual, weights, cos, sin)
    rows = torch.arange(len(column), device=column.device)
    keys[rows, :, column] = key[:, :, 0]
    values[rows, :, column] = value[:, :, 0]
    grouped = query[:, :, 0].unflatten(1, (shape.key_heads, -1))  # the queries of one key head stand in for its rows
    attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=seen, scale=shape.scaling)
    residual = residual + apply(attended.flatten(1)[:, None], weights.out)
    return residual, mlp(shape, residual, weights)


def next_logits(
    residual: Float[Tensor, "B T L"],
    branch: Float[Tensor, "B T L"],
    last: Int[Tensor, " B"],
    norm: Float[Tensor, " L"],
    eps: float,
    head: Linear,
) -> Float[Tensor, "B V"]:
    """Logits of the token after each row's column `last`."""
    rows = torch.arange(len(last), device=last.device)
    return F.linear(rms_norm(residual[rows, last] + branch[rows, last], norm, eps), *head)


# The whole model -----------------------------------------------------------------------------------------------------


class Cache(NamedTuple):
    """Keys and values of one layer: C columns, real ones first."""

    keys: Float[Tensor, "B J C E"]
    values: Float[Tensor, "B J C E"]


class Decoder:
    """The functions above over one model's weights, compiled where that is asked for."""

    def __init__(self, weights: DecoderWeights, compiler: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.weights = weights
        shape = weights.shape

        def over_prompt(*arguments: Any) -> tuple[Tensor, Tensor]:
            return prefill_layer(shape, *arguments)

        def one_token(*arguments: Any) -> tuple[Tensor, Tensor]:
            return decode_layer(shape, *arguments)

        self._over_prompt = compiler(over_prompt)
        self.compiled = self._over_prompt is not over_prompt
        self._one_token = compiler(one_token)
        self._next_logits = compiler(next_logits)

    def tables(self, like: Tensor, positions: Int[Tensor, "*R B T"]) -> tuple[Tensor, Tensor]:
        """Rotary cosines and sines, by the stock module."""
        cos, sin = self.weights.rotary(like, positions)
        return cos, sin

    def run_layers(
        self,
        residual: Float[Tensor, "B T L"],
        branch: Float[Tensor, "B T L"],
        positions: Int[Tensor, "*R B T"],
        cache: list[Cache],
        layers: range,
    ) -> tuple[Float[Tensor, "B T L"], Float[Tensor, "B T L"]]:
        """Some layers over a whole prompt."""
        cos, sin = self.tables(residual, positions)
        for index in layers:
            residual, branch = self._over_prompt(residual, branch, self.weights.layers[index], cos, sin, *cache[index])
        return residual, branch

    def logits_at(self, residual: Tensor, branch: Tensor, last: Int[Tensor, " B"]) -> Float[Tensor, "B V"]:
        weights = self.weights
        return self._next_logits(residual, branch, last, weights.final_norm, weights.shape.eps, weights.head)

    def prefill(
        self,
        embeds: Float[Tensor, "B T L"],
        positions: Int[Tensor, "*R B T"],
        last: Int[Tensor, " B"],
        cache: list[Cache],
    ) -> Float[Tensor, "B V"]:
        """Logits after each row's last real column, and the prompt's keys and values in the cache."""
        every = range(len(self.weights.layers))
        residual, branch = self.run_layers(embeds, torch.zeros_like(embeds), positions, cache, every)
        return self.logits_at(residual, branch, last)

    def decode(
        self,
        token: Int[Tensor, " B"],
        positions: Int[Tensor, "*R B 1"],
        segments: list[tuple[range, Int[Tensor, " B"]]],
        cache: list[Cache],
    ) -> Float[Tensor, "B V"]:
        """Logits after one more token.

        Args:
            segments: Layers that hold the same tokens, and the column of their caches the new token goes to.
        """
        residual = self.weights.embed(token[:, None])
        residual, branch = self.step_layers(residual, torch.zeros_like(residual), positions, segments, cache)
        return self.logits_at(residual, branch, torch.zeros_like(token))

    def step_layers(
        self,
        residual: Float[Tensor, "B 1 L"],
        branch: Float[Tensor, "B 1 L"],
        positions: Int[Tensor, "*R B 1"],
        segments: list[tuple[range, Int[Tensor, " B"]]],
        cache: list[Cache],
    ) -> tuple[Float[Tensor, "B 1 L"], Float[Tensor, "B 1 L"]]:
        """Some layers over one more token."""
        cos, sin = self.tables(residual, positions)
        for layers, column in segments:
            columns = torch.arange(cache[layers[0]].keys.shape[2], device=column.device)
            seen = (columns <= column[:, None])[:, None, None]  # [B, 1, 1, C]
            for index in layers:
                weights = self.weights.layers[index]
                residual, branch = self._one_token(residual, branch, weights, cos, sin, *cache[index], column, seen)
        return residual, branch
