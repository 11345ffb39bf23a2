"""What similarity rules share: inputs checked, orders of indices, and walks that skip what is too similar."""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffprune.types import VisualTokens


def cls_attention(tokens: VisualTokens, method: str) -> Float[Tensor, "B N"]:
    """The attention the encoder pays to each token, float32, 0 at padding; a `ValueError` where it was not given."""
    if tokens.cls_attention is None:
        raise ValueError(f"{method} reads VisualTokens.cls_attention, which is None; let the backbone give it")
    attention = tokens.cls_attention.float()
    return attention if tokens.is_full else attention.masked_fill(~tokens.mask, 0.0)


def projected_and_text(tokens: VisualTokens, method: str) -> tuple[Float[Tensor, "B N L"], Float[Tensor, "B M L"]]:
    """Visual tokens and the prompt's text in one space; a `ValueError` where one is missing or the widths differ."""
    projected, text = tokens.projected, tokens.text
    if projected is None or text is None:
        missing = "projected" if projected is None else "text"
        raise ValueError(f"{method} compares VisualTokens.{missing}, which is None; let the backbone give it")
    if projected.shape[-1] != text.shape[-1]:
        raise ValueError(
            f"projected tokens have width {projected.shape[-1]} and text has {text.shape[-1]}: not one space; "
            "give VisualTokens.text from the language model's embedding table"
        )
    return projected, text


def descending(values: Float[Tensor, "B N"], mask: Bool[Tensor, "B N"] | None) -> Int[Tensor, "B N"]:
    """Indices from the largest value to the smallest, of equal ones the lower index first, padding last."""
    if mask is not None:
        values = values.masked_fill(~mask, -torch.inf)
    return values.sort(dim=-1, descending=True, stable=True).indices


def pack(index: Int[Tensor, "B M"], chosen: Bool[Tensor, "B M"], width: int) -> Int[Tensor, "B K"]:
    """The first `width` chosen entries of each row in their order, -1 at the end of rows that have fewer."""
    order = (~chosen).byte().sort(dim=-1, stable=True).indices[:, :width]
    return torch.where(chosen.gather(-1, order), index.gather(-1, order), -1)


def raster_order(index: Int[Tensor, "B K"]) -> Int[Tensor, "B K"]:
    """Where each index stands in its row when they ascend, -1 at the end."""
    return index.masked_fill(index < 0, torch.iinfo(index.dtype).max).sort(dim=-1).indices


def raster(index: Int[Tensor, "B K"]) -> Int[Tensor, "B K"]:
    """Indices of kept tokens ascending, -1 at the end."""
    last = torch.iinfo(index.dtype).max
    ordered = (index & last).sort(dim=-1).values  # without its sign bit -1 is the last number there is
    return ordered.masked_fill(ordered == last, -1)


def walk(
    similarity: Float[Tensor, "B N N"],
    mask: Bool[Tensor, "B N"],
    limit: Callable[[Int[Tensor, "B N"]], Float[Tensor, "B #N"]],
) -> Bool[Tensor, "B N"]:
    """True at the survivors of a walk from the first token to the last.

    A survivor strikes out every later token that is more similar to it than its limit; `limit` gives that from the
    survivor's number (the first one is 1).

    Args:
        similarity: Of the tokens in the order they are visited.
        mask: True where a token is real.
    """
    num_tokens = mask.shape[-1]
    earlier = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=mask.device).tril(-1)  # [later, earlier]

    def decide(alive: Bool[Tensor, "B N"]) -> Bool[Tensor, "B N"]:
        limits = limit(alive.cumsum(-1))
        struck = (similarity > limits[:, None, :]) & earlier & alive[:, None, :]
        return mask & ~struck.any(-1)

    return settle(decide, mask)


_FIXED_ROUNDS = (
    32  # without reading the device; seeded walks of real size took 10 (PruneSID) and 14 (AgilePruner) at most
)


def may_wait(device: torch.device) -> bool:
    """Whether this thread may read values back from a device, and so wait for it.

    It may not while a CUDA graph is captured, nor where torch is set to refuse it (`set_sync_debug_mode("error")`).
    """
    if device.type != "cuda":
        return True
    return not torch.cuda.is_current_stream_capturing() and torch.cuda.get_sync_debug_mode() < 2


def settle(decide: Callable[[Tensor], Tensor], alive: Tensor, *, rounds: int = 4) -> Tensor:
    """The survivors when each strikes out some of those visited after it: what `decide` gives back unchanged.

    Instead of token by token, all are decided at once again and again: a round settles at least one more token of the
    walk, and a round that changes nothing has found the walk's own answer. Where the device may not be read to see
    whether one did, there are as many rounds as any walk but a contrived one needs: a chain of tokens,
    each struck out by the one before it alone, has one link settled in a round.

    Args:
        decide: The survivors if those passed in strike out others.
        alive: All tokens of the walk.
        rounds: Between two reads of the device.
    """
    if not may_wait(alive.device):
        for _ in range(_FIXED_ROUNDS):
            alive = decide(alive)
        return alive
    before = alive
    while True:
        for _ in range(rounds):
            before, alive = alive, decide(alive)
        if torch.equal(before, alive):
            return alive
