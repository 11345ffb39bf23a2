"""What one conversation keeps from turn to turn: its pictures as they were encoded, and the language model's cache.

A turn lays out the whole conversation anew, and its sequence is compared column by column with the one the cache was
made of: token, position, and for a visual token its picture, its place in it and how many of that picture were kept.
The cache is taken as far as both agree and no further, so a turn with another budget, method, template or history
answers as if it were asked anew. Where weights have changed since, nothing is taken.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache

from diffprune.backbones.base import Backbone, with_needs, without_prompt
from diffprune.backbones.pictures import MADE_LATER, join_tokens
from diffprune.backbones.prompts import Batch
from diffprune.types import LMInputs, VisualTokens

# Arguments of `generate` with which a cache is not one row of every token, and the values that leave it so.
ONE_ROW: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "use_cache": (None, True),
    "cache_implementation": (None, "dynamic"),
    "guidance_scale": (None, 1, 1.0),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}


class Memory:
    """The pictures and the cache of one conversation; give the same one to every turn's `generate(messages=...)`.

    Attributes:
        num_encoded: Pictures that the vision tower has run on, over all turns.
        num_reused: Columns of the last turn's sequence that were taken from the cache.
    """

    def __init__(self) -> None:
        self.num_encoded = self.num_reused = 0
        self._pictures: dict[tuple[Any, ...], tuple[int, VisualTokens]] = {}  # with a number of their own
        self._numbers: list[int] = []  # of this turn's pictures
        self._weights: tuple[Any, ...] = ()
        self._reads_text = False
        self.forget_cache()

    def forget_cache(self) -> None:
        """Keep the pictures alone."""
        self.num_reused = 0
        self._cache: Any = None
        self._columns: Int[Tensor, "T C"] | None = None

    # ------------------------------------------------------------------------------------- pictures

    def encode(self, vlm: Any, batch: Batch) -> VisualTokens | None:
        """Visual tokens of the conversation's pictures; the vision tower runs on those alone that are new to it."""
        if len(batch.features["input_ids"]) != 1:
            raise ValueError("a memory is one conversation's; give each conversation a memory and a call of its own")
        weights = weights_of(vlm)
        if weights != self._weights:
            self._pictures, self._weights = {}, weights
            self.forget_cache()
        self._reads_text = "text" in vlm.method.needs
        backbone, needs = vlm.backbone, vlm.method.needs - MADE_LATER
        keys = [
            (batch.seeds[image], batch.sizes[image], backbone.picture_mode(batch, image), needs)
            for image in range(batch.num_images)
        ]
        new = {key: image for image, key in enumerate(keys) if key not in self._pictures}
        if new:
            with torch.no_grad():
                tokens = backbone.encode_some(batch, list(new.values()), needs)
            self._pictures |= {key: (self.num_encoded + row, tokens.take([row])) for row, key in enumerate(new)}
            self.num_encoded += len(new)
        self._pictures = {key: self._pictures[key] for key in keys}  # of pictures that left the conversation nothing
        self._numbers = [self._pictures[key][0] for key in keys]
        if not keys:
            return None
        tokens = join_tokens([self._pictures[key][1] for key in keys])
        return with_needs(backbone, batch, tokens, vlm.method.needs)

    # ------------------------------------------------------------------------------------- the cache

    def generate(self, backbone: Backbone, lm: LMInputs, **kwargs: Any) -> Any:
        """As `backbone.generate`, over as much of the last turn's cache as holds for this one."""
        columns, last = describe(lm, self._numbers), lm.input_ids.shape[1] - 1
        cache: Any = self._cache
        known, reads_text = self._columns, self._reads_text
        self.forget_cache()  # a turn that fails leaves nothing half-run behind
        empty = DynamicCache(config=backbone.language_model.config)
        if backbone.two_way(lm) is not None or any(empty.is_sliding) or not is_one_row(backbone.model, kwargs):
            return backbone.generate(lm, **kwargs)
        reused = 0
        if cache is not None and known is not None and not reads_text:
            reused = min(num_equal(columns, known), cache.get_seq_length(), last)
        if cache is None or not reused:
            cache = empty
        elif reused < cache.get_seq_length():
            cache.crop(reused - cache.get_seq_length())
        self.num_reused = reused
        if reused < last:
            backbone.fill(lm, cache, reused)
        out = backbone.go_on(lm, cache, **kwargs)
        sequences = out if isinstance(out, Tensor) else out.sequences
        self._cache, self._columns = cache, with_answer(columns, sequences[0, last + 1 :].cpu())
        return without_prompt(out, last + 1)


def is_one_row(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether `generate` leaves one row of every token in its cache."""
    config = kwargs.get("generation_config") or model.generation_config
    return all(kwargs.get(name, getattr(config, name, None)) in plain for name, plain in ONE_ROW.items())


def weights_of(vlm: Any) -> tuple[Any, ...]:
    """Changes wherever a weight of the model or its method does, or one of them is another."""
    parameters = (*vlm.base.parameters(), *vlm.method.parameters(), *vlm.method.buffers())
    found: list[Any] = [id(vlm.base), id(vlm.method), vlm.budget_rule, vlm.backbone.keeps_newlines]
    for value in parameters:
        found += [value.data_ptr(), -1 if value.is_inference() else value._version]
    return tuple(found)


def describe(lm: LMInputs, pictures: Sequence[int]) -> Int[Tensor, "T C"]:
    """What each column of a sequence of one row is: its id, its position, its picture, token and budget.

    Args:
        pictures: A number for each picture that is another for whatever is encoded otherwise.
    """
    ids, positions = lm.input_ids[0].cpu(), lm.position_ids[..., 0, :].reshape(-1, lm.input_ids.shape[1]).cpu()
    picture, token, kept = (torch.full_like(ids, -1) for _ in range(3))
    if lm.origin is not None:
        place = lm.origin.index[0].cpu()
        num = lm.origin.tokens.x.shape[1]
        stands = place >= 0
        image = place[stands] // num
        picture[stands], token[stands] = torch.tensor(pictures)[image], place[stands] % num
        kept[stands] = torch.bincount(image, minlength=len(pictures))[image]
    return torch.stack([ids, *positions, picture, token, kept], dim=-1)


def num_equal(first: Int[Tensor, "T C"], second: Int[Tensor, "U C"]) -> int:
    """Columns from the first on that two sequences share."""
    if first.shape[1] != second.shape[1]:
        return 0
    length = min(len(first), len(second))
    return int((first[:length] == second[:length]).all(-1).long().cumprod(0).sum())


def with_answer(columns: Int[Tensor, "T C"], answer: Int[Tensor, " A"]) -> Int[Tensor, "U C"]:
    """The columns with those of an answer behind them, which is numbered on from the last."""
    steps = torch.arange(1, len(answer) + 1)
    own = [answer, *(last + steps for last in columns[-1, 1:-3]), *(torch.full_like(answer, -1) for _ in range(3))]
    return torch.cat([columns, torch.stack(own, dim=-1)])
