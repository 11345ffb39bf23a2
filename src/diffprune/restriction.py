"""The visual tokens as a training step runs them: all of them, each weakened by its weight, the lightest taken out."""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffprune.methods.base import Pruner, Restricted
from diffprune.ops import hard_mask, linear_gate, take_tokens
from diffprune.ops.noise import Generators, draw_normal
from diffprune.tiles import PerTile
from diffprune.types import LMInputs, VisualTokens


def restrict(
    rule: Pruner | PerTile,
    tokens: VisualTokens,
    k: Int[Tensor, " B"],
    *,
    tau: float | Tensor,
    generator: Generators = None,
    remove_below: float = 0.0,
) -> tuple[VisualTokens, Restricted]:
    """What the method makes of the tokens, and the tokens with their planes weakened too.

    Args:
        remove_below: Tokens whose weight has become smaller are really taken out (progressive removal), all but the K
            best; 0 takes none out. As the temperature falls the sequence shortens from N towards K, and what is run is
            still what is differentiated.
    """
    kept = rule.restrict(tokens, k, tau=tau, generator=generator)
    if rule.is_inside or kept.own_loss is not None:
        refuse_removal(remove_below)
        return tokens, kept
    if kept.soft_mask is None:
        tokens = replace(tokens, planes=restrict_planes(tokens, kept.alpha, generator))
    if remove_below > 0:
        index = survivors(kept.alpha, k, tokens.mask, remove_below)
        kept = kept._replace(x=take_tokens(kept.x, index), index=index)
    return tokens, kept


def by_prompt(kept: Restricted, mean: Callable[[Tensor], Tensor]) -> Restricted:
    """With what each image has of a loss as what each prompt has.

    Args:
        mean: Over each prompt's images (`Batch.mean_by_prompt`).
    """
    found = {"penalty": kept.penalty, "own_loss": kept.own_loss}
    return kept._replace(**{name: mean(values) for name, values in found.items() if values is not None})


def refuse_removal(remove_below: float) -> None:
    """An error where tokens are to be taken out of a sequence that none is weakened in."""
    if remove_below > 0:
        raise ValueError(
            f"remove_below={remove_below} is for choices before the language model that learn from its loss; set it to "
            "0, as recipe=default does"
        )


def with_soft_mask(lm: LMInputs, soft_mask: Float[Tensor, "B N"]) -> LMInputs:
    """The sequence with the soft mask of its visual tokens; all attend to its text as ever."""
    assert lm.origin is not None
    index = lm.origin.index  # -1 at text
    return replace(lm, soft_mask=torch.where(index < 0, 1.0, soft_mask.flatten()[index.clamp_min(0)]))


def survivors(
    alpha: Float[Tensor, "B N"], k: Int[Tensor, " B"], mask: Bool[Tensor, "B N"], threshold: float
) -> Int[Tensor, "B K"]:
    """Indices of the tokens whose weight reaches the threshold, and of the K heaviest in any case."""
    stays = ((alpha >= threshold) & mask) | hard_mask(alpha, k, mask)
    width = max(1, int(stays.sum(-1).max()))
    order = torch.argsort((~stays).long(), dim=-1, stable=True)[:, :width]  # those that stay first, in raster order
    return torch.where(stays.gather(1, order), order, -1)


def restrict_planes(
    tokens: VisualTokens, alpha: Float[Tensor, "B N"], generator: Generators
) -> tuple[Float[Tensor, "B N D"], ...]:
    """The tokens' other planes (DeepStack), weakened by the same weights as their features.

    Left whole, they would show the language model what the restricted features no longer may. The noise has the
    scale of the image's own features, which the tower leaves free; the linear gate has a finite slope at any weight.
    """
    gated = []
    for plane in tokens.planes:
        real = tokens.mask[..., None]
        energy = torch.where(real, plane.float().square(), 0.0).sum((1, 2), keepdim=True)
        scale = (energy / (real.sum(1, keepdim=True) * plane.shape[-1])).sqrt()  # [B, 1, 1]
        noise = draw_normal(plane, tokens.padding_mask, generator) * scale
        gated.append(linear_gate(plane, alpha, noise=noise.to(plane.dtype)))
    return tuple(gated)
