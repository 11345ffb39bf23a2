"""Choices by a scorer on static tensors: the K largest scores without a sort, or worth times diversity."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffprune.methods.diffprune_diverse import DiffPruneDiverse
from diffprune.ops import greedy_determinant
from diffprune.ops.on_gpu import products
from diffprune.types import VisualTokens

# Features in; indices, features of the kept tokens and scores out, written into the tensors given.
Choose = Callable[[Tensor, tuple[Tensor, Tensor, Tensor]], None]

RANKED_AT_ONCE = 4096  # up to here the ranks come from all pairs in one kernel; beyond, from a sort
RANKED_ON_CPU = 256  # the same without a compiler, where every comparison of all pairs is a pass over memory


def keep_largest(logits: Float[Tensor, "B N"], k: int) -> Int[Tensor, "B K"]:
    """Indices of the k largest logits, ascending, of equal ones the lower: `hard_topk` without a sort.

    A token's rank is the number of tokens that go before it, a comparison of all pairs that compiles into one kernel;
    the kept ones then count themselves into place.
    """
    num_tokens = logits.shape[1]
    index = torch.arange(num_tokens, device=logits.device)
    if num_tokens > (RANKED_AT_ONCE if logits.is_cuda else RANKED_ON_CPU):
        order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        return order.sort(dim=-1).values
    this, other = logits[:, :, None], logits[:, None, :]
    before = (other > this) | ((other == this) & (index[None, :] < index[:, None]))
    kept = before.sum(-1) < k
    place = torch.where(kept, kept.cumsum(-1) - 1, -1)
    ranks = torch.arange(k, device=logits.device)
    return torch.where(place[:, None, :] == ranks[:, None], index, 0).sum(-1)  # a scatter would be a kernel of its own


def take(x: Float[Tensor, "B N D"], keep: Int[Tensor, "B K"]) -> Float[Tensor, "B K D"]:
    """The tokens that stay."""
    return x.gather(1, keep[..., None].expand(-1, -1, x.shape[-1]))


def choose_by_score(score: Callable[[Tensor], Tensor], k: int, compiler: Any) -> Choose:
    """The k largest scores."""

    def finish(scores: Tensor, x: Tensor, into: tuple[Tensor, Tensor, Tensor]) -> None:
        chosen = keep_largest(scores, k)
        into[0].copy_(chosen)
        into[1].copy_(take(x, chosen))
        into[2].copy_(scores)

    finish_fused = compiler(finish)
    return lambda x, into: finish_fused(score(x), x, into)


def choose_diverse(
    read: Callable[[Tensor], tuple[Tensor, Tensor | None]],
    method: DiffPruneDiverse,
    tokens: VisualTokens,
    k: int,
    compiler: Any,
) -> Choose:
    """What that method chooses: `greedy_diverse` with the small steps around its kernel compiled.

    Args:
        read: Logits, and hidden states where the method compares these.
        tokens: Whose features the choice is called with.
    """
    closeness = method.closeness(tokens)

    def finish(chosen: Tensor, logits: Tensor, x: Tensor, into: tuple[Tensor, Tensor, Tensor]) -> None:
        into[0].copy_(chosen)
        into[1].copy_(take(x, chosen))
        into[2].copy_(logits)

    worth, finish_fused = compiler(method.worth), compiler(finish)

    def choose(x: Tensor, into: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, hidden = read(x)
        kernel = products(method.compared(tokens, hidden))
        chosen = greedy_determinant(kernel if closeness is None else kernel * closeness, k, worth=worth(logits))
        finish_fused(chosen, logits, x, into)

    return choose
