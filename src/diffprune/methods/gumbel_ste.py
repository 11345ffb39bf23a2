"""Gumbel-STE: the surrogate DiffPrune is compared with, on the same scorer, gate and block (paper, Eq. 1).

The forward pass executes a hard choice, the backward pass differentiates a soft one that was not executed.
A dropped token is replaced by noise, as in DiffPrune. `gumbel_ste-masked` leaves it as it is and hides it from the
language model's attention instead: then a dropped token has no part in the forward pass, as in deployment.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from diffprune.methods._keep_or_drop import draw_keep, ratio_penalty
from diffprune.methods.base import Card, Restricted, TrainablePruner, check_choices, require_block
from diffprune.nn import BlockSpec, DiagonalBlock, FeatureStatistics, make_scorer
from diffprune.nn.blocks import zero_padding
from diffprune.ops import RESPONSES, gumbel_topk, linear_gate
from diffprune.ops.noise import Generators, draw_gumbel, draw_normal
from diffprune.registry import METHODS
from diffprune.types import VisualTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GumbelSTEOptions:
    """Args:
    scorer: "blocks" or "bilinear", as in DiffPrune.
    scorer_depth: Number of blocks.
    final_norm: Norm before the scorer's head.
    response: Of the relaxation that the backward pass differentiates.
    min_tau: Floor of its temperature: below it the gradient vanishes almost everywhere.
    noise: "unit" or "matched", as in DiffPrune.
    choice: "topk" keeps exactly K of the perturbed logits; "token" decides each token by itself as DynamicViT does
        (temperature 1), and a penalty holds the share near K / N.
    ratio_weight: Of that penalty.
    dropped: What becomes of a dropped token in training: "noise" takes its place, or it is "masked": as it is, but the
        language model's attention passes it by. Then there is no block, as there is nothing to map back.
    """

    scorer: str = "blocks"
    scorer_depth: int = 2
    final_norm: bool = True
    response: str = "laplace"
    min_tau: float = 0.5
    noise: str = "unit"
    choice: str = "topk"
    ratio_weight: float = 2.0
    dropped: str = "noise"

    def __post_init__(self) -> None:
        check_choices(
            self,
            scorer=("blocks", "bilinear"),
            response=RESPONSES,
            noise=("unit", "matched"),
            choice=("topk", "token"),
            dropped=("noise", "masked"),
        )
        if self.min_tau < 0:
            raise ValueError(f"min_tau={self.min_tau} is no floor of a temperature; give 0 or more")


@METHODS.register("gumbel_ste", "gumbel_ste-masked")
class GumbelSTE(TrainablePruner):
    """Deployed like DiffPrune: the K largest logits, without noise."""

    card = Card(
        idea="a scorer trained by a straight-through estimator: hard Gumbel top-k forward, its relaxation backward",
        paper="DiffPrune, Eq. 1; the per-token choice is DynamicViT's",
        year=2026,
        licence="MIT (DynamicViT)",
        certainty="formula",
    )
    Options: ClassVar[type] = GumbelSTEOptions
    presets: ClassVar[dict[str, dict[str, Any]]] = {"gumbel_ste": {}, "gumbel_ste-masked": {"dropped": "masked"}}

    def __init__(self, options: Any = None, *, block: BlockSpec | None = None) -> None:
        super().__init__(options, block=block)
        options, spec = self.options, require_block("gumbel_ste", block)
        self.scorer = make_scorer(options.scorer, spec, depth=options.scorer_depth, final_norm=options.final_norm)
        makes_noise = options.dropped == "noise"
        self.throttle_noise = FeatureStatistics(spec.width) if makes_noise and options.noise == "matched" else None
        self.throttle_block = DiagonalBlock(spec) if makes_noise else None
        self.exact_in_training = options.choice == "topk"
        self.hides_tokens = not makes_noise

    def score(self, tokens: VisualTokens) -> Float[Tensor, "B N"]:
        return self.scorer(tokens.x, mask=tokens.padding_mask, coords=tokens.coords, segment=tokens.segment)

    def restrict(
        self, tokens: VisualTokens, k: Int[Tensor, " B"], *, tau: float | Tensor, generator: Generators = None
    ) -> Restricted:
        options, mask = self.options, tokens.mask
        logits = self.score(tokens)
        penalty = None
        if options.choice == "topk":
            gumbel = draw_gumbel(logits, tokens.padding_mask, generator)
            chosen = gumbel_topk(
                logits, k, tau=tau, min_tau=options.min_tau, mask=mask, response=options.response, noise=gumbel
            )  # Eq. 1
        else:
            log_probs = torch.stack((F.logsigmoid(logits), F.logsigmoid(-logits)), dim=-1)  # keep, drop
            chosen = draw_keep(log_probs, mask, tau=1.0, generator=generator)
            penalty = options.ratio_weight * ratio_penalty(chosen, k, mask)
        x = zero_padding(tokens.x, mask)
        if self.throttle_block is None:
            return Restricted(x, chosen, logits, penalty, soft_mask=chosen)
        mu, sigma = (None, None) if self.throttle_noise is None else self.throttle_noise(x.shape[-1])
        noise = draw_normal(x, tokens.padding_mask, generator)
        x = linear_gate(x, chosen, noise=noise, mu=mu, sigma=sigma)  # the values of Eq. 6 at weights 0 and 1
        x = self.throttle_block(x, mask=mask)
        return Restricted(x, chosen, logits, penalty)

    def calibrate(self, batches: Iterable[VisualTokens]) -> None:
        """Set the mean and deviation of matched noise, per channel, from the real tokens of some training images."""
        if self.throttle_noise is not None:
            self.throttle_noise.calibrate((tokens.x, tokens.mask) for tokens in batches)
