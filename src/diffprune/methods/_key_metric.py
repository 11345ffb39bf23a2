"""The encoder's keys as a metric between tokens, for methods that merge by it."""

from jaxtyping import Float
from torch import Tensor

from diffprune.nn import BlockSpec
from diffprune.types import VisualTokens


def key_metric(
    tokens: VisualTokens, method: str, block: BlockSpec | None, heads: int | None = None
) -> Float[Tensor, "B N E"]:
    """The encoder's keys averaged over its heads, float32.

    Keys as wide as the tower's block are split into its heads, others (averaged already) are taken as they are. Without
    a block, keys as wide as a patch's features are those of all heads, and `heads` must say how many.
    """
    if tokens.keys is None:
        raise ValueError(f"{method} compares VisualTokens.keys, which is None; let the backbone give them")
    keys = tokens.keys.float()
    width = keys.shape[-1]
    if heads is None and block is not None:
        heads = block.heads if width == block.width else 1
    if heads is None and width == tokens.x.shape[-1] // tokens.group:
        raise ValueError(
            f"{method} averages keys over the encoder's heads, and of keys of width {width} it does not know how many; "
            "give heads=16 or what the encoder has (1 where they are averaged already), or block=BlockSpec.from_config"
        )
    heads = heads or 1
    if width % heads:
        raise ValueError(f"heads={heads} does not split keys of width {width}; give the encoder's own number of heads")
    return keys.unflatten(-1, (heads, -1)).mean(-2)


def check_heads(heads: int | None) -> None:
    """A `ValueError` where an option `heads` is no number of heads."""
    if heads is not None and heads < 1:
        raise ValueError(f"heads={heads} is no number of heads; give 1 or more, or leave it out")
