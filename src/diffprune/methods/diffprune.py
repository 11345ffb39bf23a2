"""DiffPrune: learn what to keep by restricting how much of each token gets through (paper, Section 4).

TRAINING    s = S_theta(X)   alpha = Phi_K(s / tau)   X~ = G(X; alpha)   X- = D_phi(X~)
INFERENCE   s = S_theta(X)   keep the K largest; everything named `throttle_*` is gone
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float, Int
from torch import Tensor

from diffprune.methods.base import Card, Restricted, TrainablePruner, check_choices, require_block
from diffprune.nn import BlockSpec, DiagonalBlock, FeatureStatistics, GlobalBlock, make_scorer, standardise
from diffprune.nn.blocks import zero_padding
from diffprune.nn.scorer import GROUPS, TILES
from diffprune.ops import RESPONSES, scale_gate, soft_topk, vp_noise
from diffprune.ops.noise import Generators, draw_normal
from diffprune.registry import METHODS
from diffprune.types import VisualTokens

BLOCKS = {"diagonal": DiagonalBlock, "global": GlobalBlock, "none": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffPruneOptions:
    """Args:
    scorer: "blocks" (Transformer blocks of the tower's kind) or "bilinear" (each token against the mean token).
    scorer_depth: Number of those blocks.
    final_norm: Norm before the scorer's head; not in the paper.
    groups: What the blocks work on where a token is made of several patches (Qwen): "patches" (a token's logit is the
        mean of theirs) or "merged" (their mean, a quarter of the work and of the attention a sixteenth).
    tiles: Whether a token of a picture of several tiles (LLaVA-NeXT) attends to its own tile ("apart") or to all
        of them ("joined").
    standardise: Give the logits of an image mean 0 and deviation 1 before Soft Top-K; not in the paper.
    response: Of Soft Top-K, "laplace" or "sigmoid".
    gate: "vp" mixes noise into a token, "scale" shrinks it.
    noise: "unit" is N(0, I), "matched" has the features' own mean and deviation per channel (see `calibrate`).
    attention: Of the throttler's block: "diagonal", "global" (a token attends to others and may recover what it
        lost), or "none" for no block.
    kept_exact: Scale the block's branches by 1 - alpha, so that a kept token is what will be deployed; not in the
        paper.
    """

    scorer: str = "blocks"
    scorer_depth: int = 2
    final_norm: bool = True
    groups: str = "patches"
    tiles: str = "apart"
    standardise: bool = True
    response: str = "laplace"
    gate: str = "vp"
    noise: str = "unit"
    attention: str = "diagonal"
    kept_exact: bool = True

    def __post_init__(self) -> None:
        check_choices(
            self,
            scorer=("blocks", "bilinear"),
            groups=GROUPS,
            tiles=TILES,
            response=RESPONSES,
            gate=("vp", "scale"),
            noise=("unit", "matched"),
            attention=tuple(BLOCKS),
        )


@METHODS.register("diffprune", "diffprune-scale", "diffprune-global")
class DiffPrune(TrainablePruner):
    """The paper's method; its ablations are options."""

    card = Card(
        idea="a scorer trained through an exactly differentiated path: soft top-k weights, noise on what weighs little",
        paper="DiffPrune: Differentiable Information Throttling for Token Pruning in Vision-Language Models",
        year=2026,
        licence="Apache-2.0",
        certainty="formula",
    )
    Options: ClassVar[type] = DiffPruneOptions
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "diffprune": {},
        "diffprune-scale": {"gate": "scale"},
        "diffprune-global": {"attention": "global"},
    }

    def __init__(self, options: Any = None, *, block: BlockSpec | None = None) -> None:
        super().__init__(options, block=block)
        options, spec = self.options, require_block("diffprune", block)
        self.scorer = make_scorer(
            options.scorer,
            spec,
            depth=options.scorer_depth,
            final_norm=options.final_norm,
            groups=options.groups,
            tiles=options.tiles,
        )
        self.throttle_noise = FeatureStatistics(spec.width) if options.noise == "matched" else None
        throttle_block = BLOCKS[options.attention]
        self.throttle_block = None if throttle_block is None else throttle_block(spec)

    def score(self, tokens: VisualTokens) -> Float[Tensor, "B N"]:
        return self.scorer(tokens.x, mask=tokens.padding_mask, coords=tokens.coords, segment=tokens.segment)

    def restrict(
        self, tokens: VisualTokens, k: Int[Tensor, " B"], *, tau: float | Tensor, generator: Generators = None
    ) -> Restricted:
        options, mask = self.options, tokens.mask
        logits = self.score(tokens)  # s = S_theta(X)
        ranked = standardise(logits, mask) if options.standardise else logits
        alpha, z = soft_topk(ranked, k, tau=tau, mask=mask, response=options.response, return_z=True)  # Eq. 5
        x = self.gate(tokens, alpha, z, generator)  # Eq. 6
        if self.throttle_block is not None:
            branch_scale = 1 - alpha if options.kept_exact else None
            x = self.throttle_block(x, mask=mask, coords=tokens.coords, branch_scale=branch_scale)  # D_phi, Section 4.3
        return Restricted(x, alpha, logits)

    def gate(
        self, tokens: VisualTokens, alpha: Float[Tensor, "B N"], z: Float[Tensor, "B N"], generator: Generators
    ) -> Float[Tensor, "B N D"]:
        """Every token weakened by its weight: mixed with noise of its own scale, or in the ablation shrunk."""
        x = zero_padding(tokens.x, tokens.mask)
        if self.options.gate == "scale":
            return scale_gate(x, alpha)
        mu, sigma = (None, None) if self.throttle_noise is None else self.throttle_noise(x.shape[-1])
        noise = draw_normal(x, tokens.padding_mask, generator)
        return vp_noise(x, z, response=self.options.response, noise=noise, mu=mu, sigma=sigma)

    def calibrate(self, batches: Iterable[VisualTokens]) -> None:
        """Set the mean and deviation of matched noise, per channel, from the real tokens of some training images."""
        if self.throttle_noise is not None:
            self.throttle_noise.calibrate((tokens.x, tokens.mask) for tokens in batches)
