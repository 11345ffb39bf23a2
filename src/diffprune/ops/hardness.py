"""How far soft weights are from the hard choice they stand for."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diffprune.ops.gates import log_weight
from diffprune.ops.soft_topk import Response


def hardness(
    z: Float[Tensor, "B N"], chosen: Bool[Tensor, "B N"], mask: Bool[Tensor, "B N"], response: Response
) -> Float[Tensor, ""]:
    """Binary cross-entropy between the weights f(z) and the hard choice, mean over each image's tokens, then images.

    Of z and not of the weights, so that nothing is clamped. Both sum to k, so the gradient in a logit is
    (alpha_i - h_i) / (N tau) for the sigmoid response: it pushes what is on top now further up, whatever the task says.

    Args:
        z: Thresholded logits of `soft_topk(..., return_z=True)`.
        chosen: True at the K largest logits.
        mask: True where a token is real.
        response: The one `soft_topk` was called with.
    """
    free = mask & z.isfinite()  # where all or nothing stays, the weights are the choice and cost nothing
    signed = torch.where(chosen, z, -z).where(free, 0.0)
    cost = -log_weight(signed, response=response).where(free, 0.0)
    return (cost.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
