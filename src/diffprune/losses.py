"""The loss of a training step: cross entropy of the answers, and the distance from what the unpruned model says."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from diffprune.methods.base import Distillation
from diffprune.ops.arguments import LARGEST, shown


class AnswerStates(NamedTuple):
    """What a loss is made of.

    Args:
        hidden: Last hidden states.
        targets: What each of them should say next, -100 where nothing.
        kept: With soft masks: True at visual tokens that are kept.
        tokens: With soft masks: which of the batch's visual tokens each column is, -1 at text.
        alpha: With decisions inside the layers: the weight of each visual token in the end, 0 elsewhere.
        penalty: Of the method's decisions, of each prompt.
        num_targets: How many targets there are, where that is known without waiting for the device.
    """

    hidden: Float[Tensor, "B T L"]
    targets: Int[Tensor, "B T"]
    kept: Bool[Tensor, "B T"] | None = None
    tokens: Int[Tensor, "B T"] | None = None
    alpha: Float[Tensor, "B T"] | None = None
    penalty: Float[Tensor, " B"] | None = None
    num_targets: int | None = None


def cross_entropy(
    head: Any,
    states: AnswerStates,
    *,
    num_targets: int | Tensor | None = None,
) -> Float[Tensor, ""]:
    """The answers' summed loss over `num_targets`.

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
    return total / (wanted.sum() if num_targets is None else num_targets)


def distance_from_full(
    head: Any,
    states: AnswerStates,
    full: AnswerStates,
    weights: Distillation,
    *,
    num_targets: int | Tensor | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, " B"]]:
    """How far a masked pass is from the one without masks: in what it says, summed over `num_targets` as the answers'
    own loss, and in the tokens that each prompt keeps, mean over them. Columns of either may have been taken out."""
    assert states.kept is not None
    wanted, kept = states.targets != -100, states.kept
    ours, theirs = (head(one.hidden[one.targets != -100]).float().log_softmax(-1) for one in (states, full))
    answers = F.kl_div(ours, theirs, reduction="sum", log_target=True)
    answers = answers / (wanted.sum() if num_targets is None else num_targets)
    if weights.tokens == 0:
        return weights.answers * answers, states.hidden.new_zeros(len(kept), dtype=torch.float32)
    moved = (states.hidden - at_tokens_of(states, full)).float().where(kept[..., None], 0.0).square().mean(-1)  # [B, T]
    tokens = moved.sum(-1) / kept.sum(-1).clamp(min=1)
    return weights.answers * answers, weights.tokens * tokens


def at_tokens_of(states: AnswerStates, full: AnswerStates) -> Float[Tensor, "B T L"]:
    """The hidden states of `full` at the visual tokens that stand in the columns of `states`."""
    assert states.tokens is not None and full.tokens is not None
    whole = full.tokens.flatten()
    columns = (whole >= 0).nonzero().squeeze(-1)
    place = whole.new_zeros(int(whole.max()) + 1).index_put((whole[columns],), columns)
    return full.hidden.flatten(0, 1)[place[states.tokens.clamp_min(0)]]


def share_of(
    rows: Float[Tensor, " B"],
    labels: Int[Tensor, "B T"] | None,
    num_targets: int | Tensor | None,
    num_prompts: int | None,
) -> Float[Tensor, ""]:
    """The mean of what each prompt has, with this batch's share of all prompts: the parts of a global batch sum to its
    mean.

    Where their number is not known the share of the answer tokens stands for it, or the batch is the whole.
    """
    mean = rows.mean()
    if num_prompts is not None and labels is not None:
        return mean * (len(labels) / num_prompts)
    return mean if num_targets is None or labels is None else mean * ((labels != -100).sum() / num_targets)


def check_prompts(num_prompts: int | None) -> None:
    """An error where it is no number of prompts; None where that is not known."""
    if num_prompts is not None and not 0 < num_prompts < LARGEST:
        raise ValueError(f"num_prompts={shown(num_prompts)} is no number of prompts; give the global batch's")


def add(total: Float[Tensor, " B"] | None, more: Float[Tensor, " B"] | None) -> Float[Tensor, " B"] | None:
    """The sum of what there is."""
    return total if more is None else more if total is None else total + more
