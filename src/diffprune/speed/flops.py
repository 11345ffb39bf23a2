"""What a model costs, counted in closed form from its configuration: operations, weights and cache.

A multiply and an add count as two operations. Linear maps and attention products are counted; norms, rotary positions,
activations and the softmax are not, as usual. Causal attention is counted half: position t attends to t keys. The
language model's head runs on the last position alone, which is all that a first token needs.
"""

from collections.abc import Sequence
from typing import Any

from diffprune.nn import BlockSpec
from diffprune.registry import BACKBONES

Layers = int | Sequence[int]  # tokens of every layer, or of each layer where tokens are dropped between them


# --- the language model -----------------------------------------------------------------------------------------------


def prefill_flops(text_config: Any, num_tokens: Layers) -> int:
    """Operations of a LLaMA-like decoder over one prompt, grouped key-value heads included.

    Args:
        text_config: Of the language model.
        num_tokens: Tokens of the prompt, text and picture; one number per layer where layers hold different tokens.
    """
    linear = 2 * layer_weights(text_config)
    queries = text_config.num_attention_heads * head_width(text_config)
    layers = _per_layer(text_config, num_tokens)
    attention = sum(2 * tokens * tokens * queries for tokens in layers)  # two products, each half of 2 T T queries
    return linear * sum(layers) + attention + 2 * text_config.hidden_size * text_config.vocab_size


def layer_weights(text_config: Any) -> int:
    """Weights of one layer's linear maps: four of the attention, three of the gated MLP."""
    head, width = head_width(text_config), text_config.hidden_size
    queries, keys = text_config.num_attention_heads * head, text_config.num_key_value_heads * head
    return width * (2 * queries + 2 * keys) + 3 * width * text_config.intermediate_size


def decoder_weights(text_config: Any) -> int:
    """Weights that every prefill and every decoded token reads once: all layers and the head.

    The table of embeddings is not among them: a prompt reads a few rows of it.
    """
    return text_config.num_hidden_layers * layer_weights(text_config) + text_config.hidden_size * text_config.vocab_size


def kv_bytes(text_config: Any, num_tokens: Layers, *, batch: int = 1, element_size: int = 2) -> int:
    """Bytes of keys and values: of the exact length in a growing cache, of the bucket's length in a static one."""
    pair = 2 * text_config.num_key_value_heads * head_width(text_config) * element_size
    return batch * pair * sum(_per_layer(text_config, num_tokens))


def head_width(text_config: Any) -> int:
    """Features of one attention head."""
    return getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads


def layer_tokens(stages: dict[int, int], num_layers: int, num_visual: int, num_text: int) -> list[int]:
    """Tokens that each layer holds where a method drops between layers: `stages` as `LayerPruner.stages` gives them."""
    held, tokens = num_visual, []
    for layer in range(num_layers):
        held = min(held, stages.get(layer, held))
        tokens.append(held + num_text)
    return tokens


def _per_layer(text_config: Any, num_tokens: Layers) -> Sequence[int]:
    if isinstance(num_tokens, int):
        return [num_tokens] * text_config.num_hidden_layers
    assert len(num_tokens) == text_config.num_hidden_layers
    return num_tokens


# --- before it --------------------------------------------------------------------------------------------------------


def block_flops(spec: BlockSpec, num_patches: int, attended: int | None = None) -> int:
    """Operations of one Transformer block of a vision tower on one picture.

    Args:
        spec: The block.
        num_patches: What it runs on.
        attended: Patches each one attends to: all of them, or those of its window.
    """
    attended = num_patches if attended is None else min(attended, num_patches)
    return 2 * num_patches * block_weights(spec) + 4 * num_patches * attended * spec.width


def block_weights(spec: BlockSpec) -> int:
    """Weights of the block's linear maps."""
    return 4 * spec.width * spec.width + (3 if spec.gated else 2) * spec.width * spec.mlp_width


def scorer_flops(spec: BlockSpec, num_patches: int, depth: int = 2) -> int:
    """Operations of a scorer made of `depth` such blocks and a linear head."""
    return depth * block_flops(spec, num_patches) + 2 * num_patches * spec.width


def encoder_flops(config: Any, num_visual: int) -> int:
    """Operations of the vision tower on one picture of `num_visual` language tokens: patch embedding and every block.

    Windowed blocks (Qwen2.5-VL) attend within their windows; [CLS], where a tower has it, is one patch more. Towers cut
    pictures in tiles where `num_visual` is more than one tile gives; tiles do not attend to each other.
    """
    vision = config.vision_config
    family = BACKBONES.get(config.model_type)
    spec = family.tower_block(config)
    patches = num_visual * patches_per_token(config)
    patch, size = (_side(getattr(vision, name, 0)) for name in ("patch_size", "image_size"))
    pixels = 3 * patch**2 * getattr(vision, "temporal_patch_size", 1)
    depth = getattr(vision, "depth", None) or vision.num_hidden_layers
    embedding = 2 * patches * pixels * spec.width
    if hasattr(vision, "window_size"):
        full = len(vision.fullatt_block_indexes)
        window = (vision.window_size // patch) ** 2
        blocks = full * block_flops(spec, patches) + (depth - full) * block_flops(spec, patches, window)
    elif hasattr(vision, "spatial_merge_size"):  # native resolution, every block over the whole picture
        blocks = depth * block_flops(spec, patches)
    else:
        tile = (size // patch) ** 2
        extra = int(family.has_class_token(config))
        tiles, rest = divmod(patches, tile)
        blocks = depth * (tiles * block_flops(spec, tile + extra) + (block_flops(spec, rest + extra) if rest else 0))
    return embedding + blocks


def patches_per_token(config: Any) -> int:
    """Patches of the tower that become one language token."""
    merge = getattr(config.vision_config, "spatial_merge_size", None) or getattr(config, "scale_factor", 1)
    return round(merge / getattr(config, "downsample_ratio", 1)) ** 2


def _side(length: int | Sequence[int]) -> int:
    """Of a square; some configurations name both sides."""
    return length if isinstance(length, int) else length[0]


def projector_flops(config: Any, num_tokens: int) -> int:
    """Operations of the two linear maps between tower and language model, for `num_tokens` language tokens."""
    wide = config.text_config.hidden_size
    merge = getattr(config.vision_config, "spatial_merge_size", 1)
    width = BACKBONES.get(config.model_type).tower_block(config).width * merge * merge
    hidden = width if merge > 1 else wide  # Qwen's merger keeps its input's width, LLaVA's projector takes the output's
    return 2 * num_tokens * (width * hidden + hidden * wide)
