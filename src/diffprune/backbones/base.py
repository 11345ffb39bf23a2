"""What a model family must say about itself: how to encode, project and number tokens. The rest is written once here.

A backbone takes a loaded Hugging Face model and calls its parts (vision tower, projector, language model). It patches
nothing and subclasses nothing, so the model stays what it was.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from diffprune.backbones import splice
from diffprune.backbones._presets import Preset
from diffprune.backbones.asking import Asking
from diffprune.backbones.forms import Form
from diffprune.backbones.processors import Picture
from diffprune.backbones.prompts import IGNORE, Batch, behind_prompt
from diffprune.backbones.windows import refuse_beyond_window
from diffprune.nn import BlockSpec
from diffprune.nn.language import LanguageSpec
from diffprune.ops import take_tokens
from diffprune.types import LMInputs, VisualTokens


class Backbone(Asking, ABC):
    """A vision-language model cut open where tokens can be dropped.

    A family says how to `encode` and `project`; where its numbering is not plain counting, `positions`.
    """

    presets: ClassVar[dict[str, Preset]] = {}
    provides: ClassVar[frozenset[str]] = frozenset({"projected", "text"})
    # Whether a position is one number: then a release that shortens the prompt numbers it anew.
    plain_positions: ClassVar[bool] = True
    # Per-image features of the processor, one row each, that `positions` reads.
    picture_features: ClassVar[tuple[str, ...]] = ()
    # The tower as functions that the fast path compiles, "module:class"; None where the stock tower runs there too.
    compiled_tower: ClassVar[str | None] = None
    # Why a serving engine (vLLM) cannot take pruned pictures of this family; None where it can.
    unserved: ClassVar[str | None] = None

    def __init__(self, model: nn.Module, processor: Any) -> None:
        self.model = cast(Any, model)
        self.processor = processor
        # Which placeholders without picture content stay: "rows" (where their row keeps a token), "all" or "none".
        self.keeps_newlines = "rows"
        configs = (self.model.config, getattr(self.model.config, "text_config", None))
        implementation = " ".join(str(getattr(config, "_attn_implementation", "")) for config in configs).strip()
        if "flash" in implementation:
            raise ValueError(
                f"the model runs {implementation}, which reads gaps in positions as packed sequences; "
                'load it with attn_implementation="sdpa"'
            )

    # ------------------------------------------------------------------------------------- what a family must say

    @abstractmethod
    def encode(self, batch: Batch, needs: frozenset[str] = frozenset()) -> VisualTokens:
        """Features of every image as the projector takes them, raster order, one row per image."""

    @abstractmethod
    def project(self, x: Float[Tensor, "B K D"]) -> Float[Tensor, "B K L"]:
        """Features in the language model's space; each token by itself."""

    @abstractmethod
    def vision_modules(self) -> dict[str, nn.Module]:
        """The parts a pruner depends on (tower and projector), for the fingerprint."""

    # ------------------------------------------------------------------------------------- what its config says

    @classmethod
    def tower_block(cls, config: Any) -> BlockSpec:
        """The kind of block the vision tower is made of; default: one like CLIP's."""
        return BlockSpec.from_config(config)

    @classmethod
    def has_class_token(cls, config: Any) -> bool:
        """Whether the tower runs a [CLS] patch beside those of a picture; default: where it is CLIP's."""
        return getattr(config.vision_config, "model_type", "").startswith("clip")

    @classmethod
    def num_newlines(cls, config: Any, size: tuple[int, int]) -> int:
        """Placeholders without picture content of a picture of (width, height)."""
        return 0

    @classmethod
    def num_encoded(cls, config: Any, size: tuple[int, int], num_visual: int) -> int:
        """Tokens the tower works on for a picture of (width, height); more than stay where padding is cut away."""
        return num_visual

    # ------------------------------------------------------------------------------------- what most families share

    @property
    def block(self) -> BlockSpec:
        """The kind of block scorers are made of: the tower's own."""
        return self.tower_block(self.config)

    @property
    def language_model(self) -> Any:
        """The stack of decoder layers."""
        return self.model.model.language_model

    @property
    def newline(self) -> Float[Tensor, " L"] | None:
        """The embedding of placeholders that carry no picture content, where the family has one."""
        return None

    def rows_of_slots(self, slots: Int[Tensor, "I S"]) -> Int[Tensor, "I S"]:
        """The row each placeholder of an image belongs to; one without content closes the row before it."""
        newline = (slots == -1).long()
        return newline.cumsum(-1) - newline

    @property
    def language(self) -> LanguageSpec:
        """The sizes of the language model."""
        return LanguageSpec.from_config(self.language_model.config)

    def two_way(self, lm: LMInputs) -> Bool[Tensor, "B T"] | None:
        """True at positions of a prefix that see each other in both directions; None where all is causal."""
        return None

    def positions(self, batch: Batch) -> Int[Tensor, "*R B T"]:
        """Position of every token of the unpruned sequence."""
        return (batch.features["attention_mask"].cumsum(-1) - 1).clamp_min(0)

    def generation_positions(self, lm: LMInputs) -> Int[Tensor, "*R B T"]:
        """Positions in the form the family's own `generate` takes."""
        return lm.position_ids

    def plane_inputs(
        self, planes: Sequence[Float[Tensor, "I K D"]], source: Int[Tensor, " S"], visual: Bool[Tensor, "B T"]
    ) -> dict[str, object]:
        """What the language model is further given for the kept tokens' other planes (`VisualTokens.planes`).

        Args:
            planes: Each plane's features of the kept tokens.
            source: The token (row of `planes[i].flatten(0, 1)`) that stands at each True of `visual`, row by row.
            visual: True where a visual token stands.
        """
        raise AssertionError(f"{self.family} gives planes of features but does not say what becomes of them")

    def layer_additions(self, lm: LMInputs) -> list[Float[Tensor, "B T L"]]:
        """What is added to the hidden states after each of the first decoder layers; most families add nothing."""
        return []

    def text_embeddings(self, batch: Batch, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Embeddings of each prompt's text (its placeholders and padding masked out), one row per image.

        Answers to learn from, and all behind the first of them, are masked out too: a method never sees them in use.
        """
        ids = batch.features["input_ids"][list(rows)]
        mask = batch.features["attention_mask"][list(rows)].bool() & (ids != self.image_token_id)
        if batch.labels is not None:
            mask = mask & ~behind_prompt(batch.labels[list(rows)])
        return self.model.get_input_embeddings()(ids), mask

    def pictures_of(self, batch: Batch, images: Sequence[int]) -> Batch:
        """The batch with some of its pictures alone, as `encode` takes it; here each has a row of every feature."""
        index = torch.tensor(images, dtype=torch.int64, device=batch.features["input_ids"].device)
        own = {key: batch.features[key][index] for key in ("pixel_values", "image_sizes") if key in batch.features}
        return batch.only(images, own)

    def encode_some(self, batch: Batch, images: Sequence[int], needs: frozenset[str] = frozenset()) -> VisualTokens:
        """Features of some of a batch's images, as they are among all of them; `needs` without text."""
        return self.encode(self.pictures_of(batch, images), needs)

    def picture_mode(self, batch: Batch, image: int) -> int:
        """A number that is another where the same picture would be encoded otherwise in this batch."""
        return 0

    def keeps_size(self, size: tuple[int, int]) -> bool:
        """Whether the processor leaves a picture of (width, height) as large as it is and `pixel_features` serves."""
        return False

    def forms(self, size: tuple[int, int], *, alone: bool = True) -> Iterator[Form]:
        """Forms of a picture of (width, height), the largest first; none where a family has one size for all.

        Args:
            alone: Whether it is the only picture of its prompt.
        """
        return iter(())

    def pixel_features(self, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        """What the processor would give for such pictures beside the ids of a prompt, made on their device."""
        raise AssertionError(f"{self.family} keeps the size of no picture")

    def written(self, prompt: str) -> str:
        """The prompt as it is put into ids, its placeholders not yet counted out."""
        return prompt

    def prompt_features(self, ids: Int[Tensor, "B T"]) -> dict[str, Tensor]:
        """What the processor gives beside the ids of a prompt for each of them, where the model must be told it."""
        return {}

    # ------------------------------------------------------------------------------------- splice

    def splice(
        self,
        batch: Batch,
        tokens: VisualTokens | None,
        visual: Float[Tensor, "I K L"] | None,
        keep: Int[Tensor, "I K"] | None,
        *,
        positions: str = "original",
    ) -> LMInputs:
        """Text and kept tokens in one left-padded sequence, each at the position it had before anything was dropped.

        Args:
            keep: Of each image; None keeps all, and then the device is not waited for.
            positions: "packed" numbers what is left without gaps instead.
        """
        ids, mask = batch.features["input_ids"], batch.features["attention_mask"].bool()
        placeholder = (ids == self.image_token_id) & mask
        place = None  # of each column its row among the visual embeddings, -1 for text and newlines
        if tokens is None or visual is None:
            if placeholder.any():
                raise ValueError(f"the prompt holds {int(placeholder.sum())} image placeholders and no image was given")
            columns, new_mask = splice.left_pad_order(mask)
            is_visual = placeholder.gather(1, columns)
        elif keep is None and (tokens.slots is None or self.keeps_newlines != "none"):
            columns, new_mask, is_visual = (
                torch.arange(ids.shape[1], device=ids.device).expand_as(ids),
                mask,
                placeholder,
            )
            place = splice.tokens_in_place(tokens, placeholder)
        else:
            keep = tokens.everything if keep is None else keep
            slot_stays, source = splice.held_slots(
                tokens, keep, newlines=self.keeps_newlines, rows_of_slots=self.rows_of_slots
            )
            splice.require_filled(slot_stays.numel(), int(placeholder.sum()))
            stays = mask.masked_scatter(placeholder, slot_stays.to(mask.device))
            columns, new_mask = splice.left_pad_order(stays)
            is_visual = placeholder.gather(1, columns) & new_mask
            place = torch.full_like(columns, -1).masked_scatter(is_visual, source.to(columns.device))
        new_ids = torch.where(new_mask, ids.gather(1, columns), self.pad_id)
        content = is_visual  # less the newlines, where there are any
        origin = None
        embeds = self.model.get_input_embeddings()(new_ids)
        extra: dict[str, object] = {
            key: torch.where(new_mask, batch.features[key].gather(1, columns), 0)
            for key in self.sequence_features
            if key in batch.features
        }
        if place is not None:
            assert tokens is not None and visual is not None
            newline = None if tokens.slots is None else self.newline
            embeds = splice.fill(embeds, is_visual, place, visual.flatten(0, 1), newline)
            content = is_visual & (place >= 0)
            origin = splice.origin_of(tokens, keep, place)
            if tokens.planes:
                planes = tokens.planes if keep is None else [take_tokens(plane, keep) for plane in tokens.planes]
                extra |= self.plane_inputs(planes, place[is_visual], is_visual)

        unpruned = self.positions(batch) if batch.positions is None else batch.positions
        labels = batch.labels
        return LMInputs(
            input_ids=new_ids,
            inputs_embeds=embeds,
            attention_mask=new_mask.long(),
            position_ids=splice.positions_of(columns, new_mask, unpruned, packed=positions == "packed"),
            visual=content,
            source=columns,
            labels=None if labels is None else torch.where(new_mask, labels.gather(1, columns), IGNORE),
            num_targets=batch.num_targets,
            extra=extra,
            origin=origin,
        )

    # ------------------------------------------------------------------------------------- run

    def hidden(self, lm: LMInputs) -> Float[Tensor, "B T L"]:
        """Last hidden states of the language model over the whole sequence, no cache."""
        return self.prefill(lm, use_cache=False).last_hidden_state

    def prefill(self, lm: LMInputs, *, use_cache: bool) -> Any:
        """What the language model gives over the whole sequence: last hidden states, and with `use_cache` its cache."""
        return self.model.model(
            inputs_embeds=lm.inputs_embeds,
            attention_mask=lm.attention_mask,
            position_ids=lm.position_ids,
            use_cache=use_cache,
            **lm.extra,
        )

    def logits(self, lm: LMInputs) -> Float[Tensor, "B T V"]:
        """Next-token logits at every position."""
        return self.model.lm_head(self.last_states(lm))

    def last_states(self, lm: LMInputs) -> Float[Tensor, "B T L"]:
        """The same as `hidden`, where the language model may run these inputs."""
        refuse_beyond_window(self.language_model.config, lm)
        return self.hidden(lm)

    def generate(self, lm: LMInputs, **kwargs: Any) -> Any:
        """New tokens by the model's own `generate`; positions carry on from the last original one.

        Where it gives an output object (`return_dict_in_generate`), that one, its sequences without the prompt.
        """
        return without_prompt(self.run_generate(lm, **kwargs), lm.input_ids.shape[1])

    def run_generate(self, lm: LMInputs, **kwargs: Any) -> Any:
        """Whatever the model's own `generate` gives for these inputs: ids, prompt included, or its output object."""
        if lm.soft_mask is not None:
            raise ValueError("tokens that are hidden from attention are for training; generate drops them instead")
        return self.model.generate(
            input_ids=lm.input_ids,
            inputs_embeds=lm.inputs_embeds,
            attention_mask=lm.attention_mask,
            position_ids=self.generation_positions(lm),
            **{"pad_token_id": self.pad_id, **kwargs, **lm.extra},
        )

    def fill(self, lm: LMInputs, cache: Any, start: int) -> None:
        """Run the columns from `start` on, all but the last, over a cache that holds those before."""
        end = lm.input_ids.shape[1] - 1
        extra = {key: value[:, start:end] for key, value in lm.extra.items() if isinstance(value, Tensor)}
        self.model.model(
            inputs_embeds=lm.inputs_embeds[:, start:end],
            attention_mask=lm.attention_mask[:, :end],
            position_ids=lm.position_ids[..., start:end],
            past_key_values=cache,
            use_cache=True,
            **extra,
        )

    def go_on(self, lm: LMInputs, cache: Any, **kwargs: Any) -> Any:
        """What the model's own `generate` gives over a cache of all of the prompt but its last token, which is text."""
        return self.model.generate(
            input_ids=lm.input_ids,
            attention_mask=lm.attention_mask,
            position_ids=self.generation_positions(lm),
            past_key_values=cache,
            **{"pad_token_id": self.pad_id, **kwargs},
        )


def without_prompt(out: Any, length: int) -> Any:
    """Ids that a stock `generate` gave, or its output object, without the prompt's."""
    if isinstance(out, Tensor):
        return out[:, length:]
    out.sequences = out.sequences[:, length:]
    return out


def with_needs(backbone: Backbone, batch: Batch, tokens: VisualTokens, needs: frozenset[str]) -> VisualTokens:
    """Tokens with what any family can add to them: projected features and the prompt's text."""
    if "projected" in needs:
        tokens = replace(tokens, projected=backbone.project(tokens.x))
    if "text" in needs:
        text, text_mask = backbone.text_embeddings(batch, batch.row_of_image)
        tokens = replace(tokens, text=text, text_mask=text_mask)
    return tokens
