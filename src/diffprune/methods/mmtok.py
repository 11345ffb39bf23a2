"""MMTok: keep tokens that together cover the words of the question and the other visual tokens. No training."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffprune.methods.base import Card, Counts, Pruner
from diffprune.ops import cosine_matrix, greedy_coverage
from diffprune.ops.similarity import projected_and_text
from diffprune.registry import METHODS
from diffprune.types import VisualTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MMTokOptions:
    """Args:
    visual_weight: Of covering the other visual tokens, beside 1 for covering the text.
    tau_text: Temperature of the text's softmax over tokens; the release has 0.02 for LLaVA, 0.01 for Qwen.
    tau_visual: Temperature of the visual tokens' softmax over tokens.
    native: As released: tokens are brought to length one in their own type, else in float32; a share of N tokens, which
        the release takes on Qwen, is rounded down.
    """

    visual_weight: float = 0.5
    tau_text: float = 0.02
    tau_visual: float = 0.2
    native: bool = False

    def __post_init__(self) -> None:
        for name in ("tau_text", "tau_visual"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} is no temperature; give a number above 0")
        if not self.visual_weight >= 0:
            raise ValueError(f"visual_weight={self.visual_weight} is no weight; give 0 or more")


@METHODS.register("mmtok")
class MMTok(Pruner):
    """Greedy maximum coverage of two kinds of targets: text tokens by projected tokens, visual tokens by features."""

    card = Card(
        idea="keeps tokens that together cover the question's words and the picture: greedy maximum coverage",
        paper="MMTok: Multimodal Coverage Maximization for Efficient Inference of VLMs",
        year=2025,
        licence="Apache-2.0",
        certainty="release read",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"projected", "text"})
    native_positions: ClassVar[str] = "packed"
    native_rounding: ClassVar[str] = "down"
    Options: ClassVar[type] = MMTokOptions

    def select(self, tokens: VisualTokens, k: Counts) -> Int[Tensor, "B K"]:
        return greedy_coverage(self.coverage(tokens), k, tokens.padding_mask)

    def coverage(self, tokens: VisualTokens) -> Float[Tensor, "B R N"]:
        """What each token covers of each target: M text tokens, then N visual ones; R = M + N.

        The text's rows sum to 1 over all, the visual ones to `visual_weight`; rows and columns of padding are 0.
        """
        options, mask = self.options, tokens.mask
        projected, text = projected_and_text(tokens, "mmtok")
        real = tokens.text_mask
        if real is None:
            real = torch.ones(text.shape[:2], dtype=torch.bool, device=mask.device)
        x = tokens.x.unflatten(-1, (tokens.group, -1)).mean(-2)
        if not options.native:
            x, projected, text = x.float(), projected.float(), text.float()
        by_text = cosine_matrix(text, projected, dtype=torch.float32) / options.tau_text  # [B, M, N]
        by_visual = cosine_matrix(x, dtype=torch.float32) / options.tau_visual  # [B, N, N]
        return torch.cat([_shares(by_text, real, mask), options.visual_weight * _shares(by_visual, mask, mask)], dim=1)


def _shares(
    logits: Float[Tensor, "B R N"], targets: Bool[Tensor, "B R"], mask: Bool[Tensor, "B N"]
) -> Float[Tensor, "B R N"]:
    """Softmax of each target's row over the real tokens, divided by the number of real targets."""
    weights = logits.masked_fill(~mask.unsqueeze(1), -torch.inf).softmax(-1)
    counts = targets.sum(-1).clamp(min=1).view(-1, 1, 1)
    return torch.where(targets.unsqueeze(-1), weights / counts, 0.0)
