"""CDPruner: keep tokens that are relevant to the question and unlike one another (a conditional DPP). No training."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from diffprune.methods.base import Card, Counts, Pruner, check_choices
from diffprune.nn import BlockSpec
from diffprune.ops import cosine_matrix, greedy_determinant, unit_range, wide_cosines
from diffprune.ops.greedy import RANK_TOLERANCE
from diffprune.registry import METHODS
from diffprune.types import VisualTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class CDPrunerOptions:
    """Args:
    relevance: What a token's relevance is measured by.
        "clip" is the release's: the question through CLIP's text tower, which `VisualTokens.text` must then hold,
        against the patches in CLIP's joint space, for which a CLIP model has to be attached (`attach_clip`). The least
        similar patch counts as the most relevant, as released; the authors saw that with CLIP alone.
        "llm_embed" is ours, for models without a text tower: projected tokens against the language model's embeddings
        of the prompt, the most similar most relevant.
        "none" leaves the text out.
        "auto" is "clip" where `native` is set, else "llm_embed".
    native: As released: past the kernel's rank the rounding of the residuals decides, else the relevance does. Tokens
        are brought to length one in their own type, else in float32; that part is not checked against the release.
    """

    relevance: str = "auto"
    native: bool = False

    def __post_init__(self) -> None:
        check_choices(self, relevance=("auto", "clip", "llm_embed", "none"))


@METHODS.register("cdpruner")
class CDPruner(Pruner):
    """Greedy MAP of the determinantal point process with kernel `r_i cos(P_i, P_j) r_j`."""

    card = Card(
        idea="keeps tokens relevant to the question and unlike one another: a large determinant of both together; the "
        "relevance is ours (projected tokens against the prompt's embeddings) unless relevance=clip",
        paper="CDPruner: Beyond Attention or Similarity: Maximizing Conditional Diversity for Token Pruning in MLLMs",
        year=2025,
        licence="Apache-2.0",
        certainty="release read",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"projected", "text"})
    native_positions: ClassVar[str] = "packed"
    Options: ClassVar[type] = CDPrunerOptions

    def __init__(self, options: Any = None, *, block: BlockSpec | None = None) -> None:
        super().__init__(options, block=block)
        self._to_joint: tuple[nn.Module, ...] = ()  # a tuple, so that CLIP's weights are in no state dict
        if self._rule != "llm_embed":  # a backbone's text is the language model's embeddings, not CLIP's
            self.needs = frozenset({"projected"})  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def _rule(self) -> str:
        """What relevance is measured by, once "auto" is decided."""
        rule = self.options.relevance
        return rule if rule != "auto" else "clip" if self.options.native else "llm_embed"

    def attach_clip(self, clip: Any) -> None:
        """Take the way into CLIP's joint space from a Hugging Face `CLIPModel` of the same vision tower.

        `VisualTokens.text` must then hold the text tower's embeddings of the question, one row per segment of at most
        77 tokens: `clip.get_text_features(...).pooler_output`.
        """
        self._to_joint = (clip.vision_model.post_layernorm.eval(), clip.visual_projection.eval())

    def select(self, tokens: VisualTokens, k: Counts) -> Int[Tensor, "B K"]:
        if tokens.projected is None:
            raise ValueError("cdpruner compares VisualTokens.projected, which is None; let the backbone give it")
        relevance = self.relevance(tokens)
        native, projected = self.options.native, tokens.projected
        similarity = cosine_matrix(projected, dtype=torch.float32) if native else wide_cosines(projected)
        if not native:  # a token is wholly like itself: where all are as relevant, rounding must not choose the first
            similarity.diagonal(dim1=1, dim2=2).round_()
        kernel = relevance.unsqueeze(2) * similarity * relevance.unsqueeze(1)
        return greedy_determinant(kernel, k, tokens.padding_mask, tolerance=0.0 if native else RANK_TOLERANCE)

    def relevance(self, tokens: VisualTokens) -> Float[Tensor, "B N"]:
        """How much each token has to do with the question, from almost 0 to 1 within each image; 0 at padding."""
        rule = self._rule
        if rule == "none":
            return tokens.mask.float()
        if rule == "clip" and not self._to_joint:
            raise ValueError(
                "cdpruner measures relevance='clip' in CLIP's joint space, and no CLIP model is attached; "
                f"{_HINTS[rule]}"
            )
        if tokens.text is None:
            raise ValueError(
                f"cdpruner measures relevance={rule!r} by VisualTokens.text, which is None; {_HINTS[rule]}"
            )
        visual = self._clip_embeddings(tokens) if rule == "clip" else tokens.projected
        if visual is None or visual.shape[-1] != tokens.text.shape[-1]:
            raise ValueError(
                f"relevance={rule!r} compares visual tokens of width {None if visual is None else visual.shape[-1]} "
                f"with text of width {tokens.text.shape[-1]}: not one space; {_HINTS[rule]}"
            )
        text = self._as_compared(tokens.text)
        cosines = cosine_matrix(self._as_compared(visual), text, dtype=torch.float32)  # [B, N, M]
        if tokens.text_mask is None:
            mean = cosines.mean(-1)
        else:
            real = tokens.text_mask.unsqueeze(1)
            mean = cosines.where(real, 0).sum(-1) / real.sum(-1).clamp(min=1)
        return unit_range(-mean if rule == "clip" else mean, tokens.mask, floor=1e-6)

    def _as_compared(self, x: Float[Tensor, "B N W"]) -> Float[Tensor, "B N W"]:
        return x if self.options.native else x.float()

    def _clip_embeddings(self, tokens: VisualTokens) -> Float[Tensor, "B N W"]:
        """The tokens in CLIP's joint space."""
        x = tokens.x
        for module in self._to_joint:
            module = module.to(x.device)
            x = module(x.to(next(module.parameters()).dtype))
        return x


_HINTS = {
    "clip": "call method.attach_clip(CLIPModel.from_pretrained(...)) and give what its text tower makes of the "
    "question as VisualTokens.text, or say relevance='llm_embed'",
    "llm_embed": "give VisualTokens.text from the language model's embedding table, or say relevance='none'",
}
