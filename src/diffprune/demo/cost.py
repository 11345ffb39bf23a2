"""What a language model's prefill costs, counted from its shape."""

from typing import Any


def prefill_flops(text_config: Any, num_tokens: int) -> int:
    """Floating-point operations of a LLaMA-like decoder over a prompt: a multiply and an add count two.

    Linear maps of all layers, causal attention counted half, and the head on the last position alone. Norms, rotary
    positions and the softmax are left out, as usual.
    """
    width, layers = text_config.hidden_size, text_config.num_hidden_layers
    head = getattr(text_config, "head_dim", None) or width // text_config.num_attention_heads
    queries, keys = text_config.num_attention_heads * head, text_config.num_key_value_heads * head
    weights = width * (2 * queries + 2 * keys) + 3 * width * text_config.intermediate_size
    attention = 2 * 2 * num_tokens * num_tokens * queries // 2
    return layers * (2 * weights * num_tokens + attention) + 2 * width * text_config.vocab_size
