"""What a language model in 8 bits costs: the same questions answered by its own numbers and by 8-bit ones.

    python -m diffprune_lab.studies.eight_bits --model scenes-llava=scenes-llava \\
        --pruner scenes-llava=scenes-llava-diffprune --keep 64,32 --out results/scenes_fp8.json

Maps of the decoder's layers are what `compile(precision="fp8")` runs (`fast/precision.py`), put into a copy of the
stock model; the encoder, the choice of tokens, the cache and the head stay as they are. Percentages and
`first_token_kl` are of the full model in its own numbers; rows in 8 bits carry the `lead` of their own numbers over
them, so that what 8 bits cost stands beside what pruning does. A CPU takes products of the same numbers as a GPU and
sums them in another order. Answers are written down as they come; started again, it goes on.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffprune.evaluate.answers import OTHERWISE
from diffprune.evaluate.pruners import SavedPruner
from diffprune.evaluate.runner import FULL, Measurement
from diffprune.evaluate.session import Asked, Session
from diffprune.evaluate.sources import Questions
from diffprune.fast.decoder import apply
from diffprune.fast.precision import PRECISIONS, Scaled, scaled_map, why_not_eight_bits
from diffprune.model import PrunedVLM
from diffprune_lab.studies import by_model


class EightBitLinear(nn.Module):
    """A linear map of a decoder layer as the fast path runs it in 8 bits."""

    def __init__(self, scaled: Scaled) -> None:
        super().__init__()
        self.scaled = scaled

    def forward(self, x: Float[Tensor, "*B K"]) -> Float[Tensor, "*B N"]:
        return apply(x, self.scaled)


def in_eight_bits(vlm: PrunedVLM) -> PrunedVLM:
    """A copy that answers with the maps of its decoder layers in 8 bits, all that the fast path would convert."""
    own = copy.deepcopy(vlm)
    for layer in own.backbone.language_model.layers:
        for part in list(layer.modules()):
            for name, child in part.named_children():
                if isinstance(child, nn.Linear):
                    scaled = scaled_map((child.weight.detach(), child.bias))
                    if isinstance(scaled, Scaled):
                        setattr(part, name, EightBitLinear(scaled))
    return own


class BothPrecisions(Session):
    """An evaluation in which every method answers a second time in 8 bits."""

    def plan(
        self, vlm: PrunedVLM, saved: Sequence[SavedPruner], questions: Questions
    ) -> tuple[list[Measurement], list[str]]:
        planned, sentences = super().plan(vlm, saved, questions)
        other, full = in_eight_bits(vlm), Measurement(FULL, 1.0, 0, vlm.method)
        again = [replace(one, method=one.method + OTHERWISE, by=other) for one in (full, *planned)]
        return planned + again, sentences


def measure(name: str, asked: Asked) -> by_model.Measured:
    """Rows of one model in both precisions, with its name, and what must be said of it."""
    if asked.device != "cpu" and (reason := why_not_eight_bits(torch.device(asked.device))):
        raise ValueError(f"nothing to compare: {reason}; --device cpu has them, slowly")
    outcome = BothPrecisions(asked).run()
    rows = by_model.rows_both_ways(outcome.answers, key="precision", ways=PRECISIONS, origins=outcome.rows)
    return [{"backbone": name, **row} for row in rows], [f"{name}: {sentence}" for sentence in outcome.sentences]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line above."""
    by_model.run(__doc__, measure, arguments, methods="random,divprune", keep="128,64,32")


if __name__ == "__main__":
    main()
