"""VisionSelector: a bilinear scorer trained by scaling tokens, with a loss that hardens the weights.

TRAINING    s = S(X)   alpha = sigmoid(s + t), sum alpha = K   X~ = alpha X   loss + w BCE(alpha, hard top-K of s)
INFERENCE   s = S(X)   keep the K largest

On DiffPrune's own interface it is a row of switches: the scorer, the response, the gate, and what makes the weights
hard (a falling temperature there, a rising loss term here). Each may be turned alone.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffprune.methods.base import Card, Restricted, TrainablePruner, check_choices, require_block
from diffprune.nn import BlockSpec, make_scorer
from diffprune.nn.blocks import zero_padding
from diffprune.ops import RESPONSES, Response, hard_mask, log_weight, scale_gate, soft_topk, vp_noise
from diffprune.ops.noise import Generators, draw_normal
from diffprune.registry import METHODS
from diffprune.types import VisualTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSelectorOptions:
    """Args:
    scorer: "bilinear" (each token against the mean token) or "blocks", as in DiffPrune.
    response: Of Soft Top-K, "sigmoid" or "laplace".
    gate: "scale" shrinks a token, "vp" mixes noise into it.
    sharpening: "bce" holds the temperature at 1 and adds the hardness loss; "tau" follows the run's temperature and
        adds nothing.
    weight_start, weight_end: Of the hardness loss, rising linearly from one to the other (2 for Qwen, 3 for
        LLaVA-OneVision). Large early it would freeze a random ranking.
    ramp_steps: Optimiser steps over which it rises.
    native: As released: a share of N tokens is rounded down.
    """

    scorer: str = "bilinear"
    response: str = "sigmoid"
    gate: str = "scale"
    sharpening: str = "bce"
    weight_start: float = 0.1
    weight_end: float = 2.0
    ramp_steps: int = 280
    native: bool = False

    def __post_init__(self) -> None:
        check_choices(
            self,
            scorer=("blocks", "bilinear"),
            response=RESPONSES,
            gate=("scale", "vp"),
            sharpening=("bce", "tau"),
        )
        if self.ramp_steps < 1:
            raise ValueError(f"ramp_steps={self.ramp_steps} is no number of steps; give 1 or more")


@METHODS.register("visionselector")
class VisionSelector(TrainablePruner):
    """Deployed like DiffPrune: the K largest logits."""

    card = Card(
        idea="a bilinear scorer trained by scaling tokens with soft top-k weights, hardened by a rising loss term",
        paper="VisionSelector: End-to-End Learnable Visual Token Compression for Efficient Multimodal LLMs",
        year=2025,
        licence="none (no licence file)",
        certainty="release read",
    )
    native_rounding: ClassVar[str] = "down"
    Options: ClassVar[type] = VisionSelectorOptions
    throttle_passes: Int[Tensor, ""]  # optimiser steps so far; checkpoints of before counted passes by this name

    def __init__(self, options: Any = None, *, block: BlockSpec | None = None) -> None:
        super().__init__(options, block=block)
        self.scorer = make_scorer(self.options.scorer, require_block("visionselector", block))
        self.register_buffer("throttle_passes", torch.zeros((), dtype=torch.int64))

    def score(self, tokens: VisualTokens) -> Float[Tensor, "B N"]:
        return self.scorer(tokens.x, mask=tokens.padding_mask, coords=tokens.coords, segment=tokens.segment)

    def restrict(
        self, tokens: VisualTokens, k: Int[Tensor, " B"], *, tau: float | Tensor, generator: Generators = None
    ) -> Restricted:
        options, mask, hardens = self.options, tokens.mask, self.options.sharpening == "bce"
        logits = self.score(tokens)
        tau = 1.0 if hardens else tau
        alpha, z = soft_topk(logits, k, tau=tau, mask=mask, response=options.response, return_z=True)
        x = zero_padding(tokens.x, mask)
        if options.gate == "scale":
            x = scale_gate(x, alpha)
        else:
            noise = draw_normal(x, tokens.padding_mask, generator)
            x = vp_noise(x, z, response=options.response, noise=noise)
        if not hardens:
            return Restricted(x, alpha, logits)
        penalty = self.hardness_weight() * hardness_loss(z, hard_mask(logits.detach(), k, mask), mask, options.response)
        return Restricted(x, alpha, logits, penalty)

    def at_step(self, step: int) -> None:
        self.throttle_passes.fill_(step)

    def hardness_weight(self) -> Float[Tensor, ""]:
        """The weight of the hardness loss at this step; in evaluation its last one, so that validations compare."""
        options = self.options
        progress = (self.throttle_passes / options.ramp_steps).clamp(max=1.0)
        progress = progress if self.training else torch.ones_like(progress)
        return options.weight_start + (options.weight_end - options.weight_start) * progress


def hardness_loss(
    z: Float[Tensor, "B N"], chosen: Bool[Tensor, "B N"], mask: Bool[Tensor, "B N"], response: Response
) -> Float[Tensor, " B"]:
    """Binary cross-entropy between the weights f(z) and the hard choice, mean over its tokens, of each image.

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
    return cost.sum(-1) / mask.sum(-1).clamp(min=1)
