"""The sizes of a language model, for methods that learn inside it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageSpec:
    """What a stack of decoder layers is made of; `LanguageSpec.from_config` reads it off a Hugging Face text config.

    Args:
        width: Features of a hidden state.
        heads: Query heads of a layer.
        layers: How many of them.
    """

    width: int
    heads: int
    layers: int

    @classmethod
    def from_config(cls, config: Any) -> "LanguageSpec":
        """The stack that a text config describes, or a model's config that holds one."""
        config = getattr(config, "text_config", config)
        return cls(width=config.hidden_size, heads=config.num_attention_heads, layers=config.num_hidden_layers)
