"""Language models whose layers attend within a sliding window: where dropping tokens would move the window.

The stock masks count columns. While columns are positions that is the same; once tokens are dropped and the others keep
their positions, a window of columns reaches further back than the model was trained to see. So the window must hold all
of the unpruned prompt and the answer, and then it hides nothing and plays no part.
"""

from typing import Any

from torch import Tensor

from diffprune.types import LMInputs

UNLIMITED_NEW = 20  # tokens that transformers generates where nobody says how many


def window_of(config: Any) -> int | None:
    """The window within which some layer of a language model attends; None where all see everything before them."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return None if window is None or (kinds is not None and "sliding_attention" not in kinds) else int(window)


def refuse_beyond_window(config: Any, lm: LMInputs, *, new_tokens: int = 0, in_layers: bool = False) -> None:
    """A `ValueError` where the language model's window would count other tokens than before the dropping.

    Args:
        config: The language model's.
        lm: The prompt, after dropping or before.
        new_tokens: That may follow it.
        in_layers: Tokens are dropped between the layers, which are then run without the model's own masks.
    """
    window = window_of(config)
    if window is None:
        return
    real = lm.attention_mask.bool()
    last = lm.source.masked_fill(~real, -1).amax(-1)
    first = lm.source.masked_fill(~real, int(lm.source.max())).amin(-1)
    spans = last - first + 1  # columns of the unpruned prompts
    reach = int(spans.max()) + new_tokens
    has_gaps = bool((spans > real.sum(-1)).any()) and not is_counted(lm.position_ids, real)
    if reach <= window or not (in_layers or has_gaps):
        return
    way_out = "choose a method before the language model" if in_layers else 'use positions="packed"'
    raise ValueError(
        f"the language model attends within a window of {window} tokens and prompt and answer may take {reach}: after "
        f"dropping, the window would hold other tokens; use smaller pictures, ask for fewer new tokens, or {way_out}"
    )


def is_counted(positions: Tensor, real: Tensor) -> bool:
    """Whether each row's real columns are numbered without a gap."""
    offset = positions - real.cumsum(-1)
    first = offset.masked_fill(~real, int(offset.max())).amin(-1, keepdim=True)
    return bool(((offset == first) | ~real).all())


def most_new_tokens(model: Any, length: int, kwargs: dict[str, Any]) -> int:
    """How many tokens `generate` may add to a prompt of that length, by its arguments or the model's own settings."""
    config = kwargs.get("generation_config") or model.generation_config
    new = kwargs.get("max_new_tokens", getattr(config, "max_new_tokens", None))
    if new is not None:
        return int(new)
    most = kwargs.get("max_length", getattr(config, "max_length", None))
    return UNLIMITED_NEW if most is None else max(UNLIMITED_NEW, int(most) - length)
