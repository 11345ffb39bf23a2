"""The language model's pass in training: answers from the kept tokens, and what the kept tokens know of their thing.

Head and base of a thing lie on different tokens, and binding them is what a small decoder learns last. A reader of the
visual tokens half-way up (`Binding`) asks each of them for the whole thing it is part of, which teaches the decoder to
gather a thing's tokens where it can; it is thrown away afterwards and changes nothing that the model is.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlavaForConditionalGeneration

from diffprune_lab.pretrain import passes, turns
from diffprune_lab.pretrain.feed import Batch
from diffprune_lab.pretrain.supervision import classify
from diffprune_lab.scarce import masks, targets

BOUND = {
    "noun": len(masks.NOUNS),
    "top": len(masks.COLORS),
    "bottom": len(masks.COLORS),
    "size": len(masks.SIZES),
    "digit": len(masks.DIGITS),
}


class Binding(nn.Module):
    """Reads from each visual token, half-way up the decoder, what thing it is part of."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, sum(BOUND.values()))

    def forward(
        self, states: Float[Tensor, "B K L"], things: Int[Tensor, "B 10 7"], thing: Int[Tensor, "B K"]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, " F"]]:
        """(loss, accuracies): over tokens of things, in the order of BOUND."""
        wanted = torch.stack([targets.of_thing(things, thing, name) for name in BOUND], dim=-1)
        return classify(self.head(self.norm(states)), wanted, BOUND, {})


def answer_pass(
    model: LlavaForConditionalGeneration,
    features: Float[Tensor, "B N D"],
    keep: Int[Tensor, "B K"],
    batch: Batch,
    start_ids: Int[Tensor, " S"],
    *,
    parts: turns.LayerParts = turns.PLAIN,
) -> tuple[Float[Tensor, ""], Int[Tensor, "B T"], turns.TurnLayout, Float[Tensor, "B K L"]]:
    """(loss, guesses, layout, middle): `passes.answer_loss`, and the visual tokens' states half-way up."""
    language, start = model.model.language_model, len(start_ids)
    layout = turns.turn_layout(batch["ids"], batch["lengths"], batch["answers"])
    kept = features.gather(1, keep[:, :, None].expand(-1, -1, features.shape[-1]))
    visual = model.model.multi_modal_projector(kept)
    embedded = language.embed_tokens(torch.cat((start_ids.expand(len(keep), -1), batch["ids"]), dim=1)).to(visual.dtype)
    steps = torch.arange(start, device=keep.device).expand(len(keep), -1)
    prefix = start + keep.shape[1]
    states = torch.cat((embedded[:, :start], visual, embedded[:, start:]), dim=1)
    positions = torch.cat((steps, keep + start, layout.offset + start + features.shape[1]), dim=1)
    cos, sin = language.rotary_emb(states.new_empty(0, dtype=torch.float32), positions)
    bias, middle = None, states
    for number, layer in enumerate(language.layers):
        query, key, value = parts.project(layer, states, cos, sin)
        if bias is None:
            bias = turns.turn_bias(layout.turn, prefix, value.dtype)
        last = number == len(language.layers) - 1
        mixed = turns.attend(query, key, value, bias, turns_only=last)
        if last:
            states = states[:, prefix:].contiguous()
        states = parts.mix(layer, states, mixed)
        if number == (len(language.layers) - 1) // 2:
            middle = states[:, start:prefix]
    loss, guesses = passes.turns_loss(model.lm_head(language.norm(states)).float(), layout)
    return loss, guesses, layout, middle
