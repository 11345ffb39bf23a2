"""The loss of a training step: cross entropy of the answers, and the distance from what the unpruned model says."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from diffprune.methods.base import Distillation


class AnswerStates(NamedTuple):
    """What a loss is made of.

    Args:
        hidden: Last hidden states.
        targets: What each of them should say next, -100 where nothing.
        kept: With soft masks: True at visual tokens that are kept.
        alpha: With decisions inside the layers: the weight of each visual token in the end, 0 elsewhere.
        penalty: Of the method's decisions.
        num_targets: How many targets there are, where that is known without waiting for the device.
    """

    hidden: Float[Tensor, "B T L"]
    targets: Int[Tensor, "B T"]
    kept: Bool[Tensor, "B T"] | None = None
    alpha: Float[Tensor, "B T"] | None = None
    penalty: Float[Tensor, ""] | None = None
    num_targets: int | None = None


def cross_entropy(
    head: Any,
    states: AnswerStates,
    *,
    num_targets: int | Tensor | None = None,
    penalty: Float[Tensor, ""] | None = None,
) -> Float[Tensor, ""]:
    """The answers' summed loss over `num_targets`, and a penalty with this batch's share of them.

    Args:
        head: Of the language model: hidden states to logits. It runs on answer positions alone.
        num_targets: Default: the batch's own answer tokens.
    """
    wanted = states.targets != -100
    flat = wanted.flatten()
    if states.num_targets is None:
        places = flat.nonzero().squeeze(-1)
    else:  # the same, their number given: it is not asked of the device
        places = torch.argsort((~flat).long(), stable=True)[: states.num_targets]
    logits = head(states.hidden.flatten(0, 1).index_select(0, places))
    wide = torch.promote_types(logits.dtype, torch.float32)
    total = F.cross_entropy(logits.to(wide), states.targets.flatten()[places], reduction="sum")
    if penalty is not None:
        total = total + penalty * wanted.sum()
    return total / (wanted.sum() if num_targets is None else num_targets)


def distance_from_full(head: Any, states: AnswerStates, full: AnswerStates, weights: Distillation) -> Float[Tensor, ""]:
    """How far a masked pass is from the one without masks: in what it says, and in the tokens it keeps."""
    assert states.kept is not None
    wanted, kept = states.targets != -100, states.kept
    ours, theirs = (head(one.hidden[wanted]).float().log_softmax(-1) for one in (states, full))
    answers = F.kl_div(ours, theirs, reduction="batchmean", log_target=True)
    moved = (states.hidden[kept] - full.hidden[kept]).float().square().sum()
    tokens = moved / (kept.sum().clamp(min=1) * states.hidden.shape[-1])
    return weights.answers * answers + weights.tokens * tokens


def share_of(
    loss: Float[Tensor, ""], labels: Int[Tensor, "B T"] | None, num_targets: int | Tensor | None
) -> Float[Tensor, ""]:
    """A loss that is a mean over images, with this batch's share of the answer tokens; default: all of them."""
    return loss if num_targets is None or labels is None else loss * ((labels != -100).sum() / num_targets)


def add(total: Float[Tensor, ""] | None, more: Float[Tensor, ""] | None) -> Float[Tensor, ""] | None:
    """The sum of what there is."""
    return total if more is None else more if total is None else total + more
