"""What a model family must say about itself: how to encode, project and number tokens. The rest is written once here.

A backbone takes a loaded Hugging Face model and calls its parts (vision tower, projector, language model). It patches
nothing and subclasses nothing, so the model stays what it was.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor, nn

from diffprune.backbones.images import open_image, pixel_seed
from diffprune.nn import BlockSpec
from diffprune.nn.language import LanguageSpec
from diffprune.ops import take_tokens
from diffprune.types import LMInputs, Origin, VisualTokens

IGNORE = -100  # label of a position without a target
ANSWER = "\0"  # stands for an answer while the chat template lays out what is between answers
NEWLINE_RULES = ("rows", "all", "none")

Exchange = tuple[str, str]  # a question and its answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Prompts and pictures, ready for the model.

    Args:
        features: What the processor gave: ids, mask, pixels and whatever the family adds. Left-padded.
        row_of_image: The prompt each image belongs to.
        sizes: (width, height) of each original picture.
        seeds: One number per picture, made from its pixels.
        positions: Of every token, where they were numbered before: prompts that are spliced many times.
    """

    features: dict[str, Tensor]
    row_of_image: tuple[int, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    seeds: tuple[int, ...] = ()
    labels: Tensor | None = None
    positions: Int[Tensor, "*R B T"] | None = None

    @property
    def num_images(self) -> int:
        return len(self.row_of_image)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A real size of a family: the hub id, and how many visual tokens a picture gives there."""

    hub_id: str
    num_visual: str
    note: str = field(default="")


class Backbone(ABC):
    """A vision-language model cut open where tokens can be dropped.

    A family says how to `encode` and `project`; where its numbering is not plain counting, `positions`.
    """

    family: ClassVar[str]
    presets: ClassVar[dict[str, Preset]] = {}
    provides: ClassVar[frozenset[str]] = frozenset({"projected", "text"})
    # Per-token features of the processor that are gathered together with the ids.
    sequence_features: ClassVar[tuple[str, ...]] = ()
    # Whether a position is one number: then a release that shortens the prompt numbers it anew.
    plain_positions: ClassVar[bool] = True
    # Per-image features of the processor, one row each, that `positions` reads.
    picture_features: ClassVar[tuple[str, ...]] = ()

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

    @property
    @abstractmethod
    def block(self) -> BlockSpec:
        """The kind of block the vision tower is made of."""

    @abstractmethod
    def vision_modules(self) -> dict[str, nn.Module]:
        """The parts a pruner depends on (tower and projector), for the fingerprint."""

    # ------------------------------------------------------------------------------------- what most families share

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)

    @property
    def image_token_id(self) -> int:
        return int(self.config.image_token_id)

    @property
    def image_token(self) -> str:
        """The placeholder a user writes once per image."""
        return str(
            getattr(self.processor, "image_token", None) or self.tokenizer.convert_ids_to_tokens(self.image_token_id)
        )

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

    # ------------------------------------------------------------------------------------- prompts and pictures

    def prepare(
        self,
        images: Any,
        text: str | Sequence[str],
        *,
        answers: Sequence[str] | None = None,
        later: Sequence[Sequence[Exchange]] | None = None,
        chat: bool = True,
    ) -> Batch:
        """Prompts and pictures as the model takes them; with `answers`, for training on them.

        Args:
            images: For one prompt its images; for several prompts one entry each: an image, a list of them, or None.
            text: A question, or a prompt that already holds the image placeholder.
            answers: One answer per prompt; the loss is on these alone.
            later: For each prompt the questions and answers that follow its own; the loss is on these answers too.
            chat: Put questions into the model's chat template.
        """
        texts = [text] if isinstance(text, str) else list(text)
        pictures = _per_prompt(images, num_prompts=len(texts), single=isinstance(text, str))
        prompts = [self._prompt(question, len(row), chat) for question, row in zip(texts, pictures, strict=True)]
        features = self.process(pictures, prompts)
        labels = None
        if answers is not None:
            if len(answers) != len(texts):
                raise ValueError(f"{len(answers)} answers for {len(texts)} prompts; give one each")
            talks = [()] * len(texts) if later is None else later
            if len(talks) != len(texts):
                raise ValueError(f"{len(talks)} later conversations for {len(texts)} prompts; give one each")
            tails = [self._tail(*talk) for talk in zip(texts, answers, talks, strict=True)]
            features, labels = self._append(features, [ids for ids, _ in tails], [targets for _, targets in tails])
        device, dtype = self.model.get_input_embeddings().weight.device, self.model.dtype
        moved = {
            key: value.to(device=device, dtype=dtype if value.is_floating_point() else value.dtype)
            for key, value in features.items()
            if isinstance(value, Tensor)
        }
        flat = [image for row in pictures for image in row]
        return Batch(
            features=moved,
            row_of_image=tuple(row for row, images_of in enumerate(pictures) for _ in images_of),
            sizes=tuple(image.size for image in flat),
            seeds=tuple(pixel_seed(image) for image in flat),
            labels=None if labels is None else labels.to(device),
        )

    def process(self, pictures: list[list[Image.Image]], prompts: list[str]) -> dict[str, Tensor]:
        """The family's own processor on prompts whose placeholders are counted already."""
        flat = [image for row in pictures for image in row]
        kwargs: dict[str, Any] = {"images": flat} if flat else {}
        return dict(self.processor(text=prompts, padding=True, padding_side="left", return_tensors="pt", **kwargs))

    def placeholder_prompt(self, num_images: int) -> str:
        """The shortest text that holds `num_images` placeholders."""
        return self.image_token * num_images

    def _prompt(self, text: str, num_images: int, chat: bool) -> str:
        found = text.count(self.image_token)
        if found == 0 and chat:
            if getattr(self.processor, "chat_template", None):
                content: list[dict[str, str]] = [{"type": "image"}] * num_images + [{"type": "text", "text": text}]
                message = [{"role": "user", "content": content}]
                text = self.processor.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
                found = text.count(self.image_token)
            elif not text:
                return self.placeholder_prompt(num_images)
        if found == 0 and num_images > 0:
            raise ValueError(
                f"the prompt holds no image placeholder for {num_images} image(s); "
                f"put {self.image_token} where each belongs"
            )
        if found != num_images:
            raise ValueError(
                f"{num_images} image(s) for {found} placeholder(s) {self.image_token}; give one image each"
            )
        return text

    def _answer_ids(self, answer: str) -> list[int]:
        """An answer as the model would write it: one space, the words, the end token."""
        ids = self.tokenizer(" " + answer, add_special_tokens=False)["input_ids"]
        return [*ids, self.tokenizer.eos_token_id]

    def _tail(self, question: str, answer: str, later: Sequence[Exchange]) -> tuple[list[int], list[int]]:
        """Ids of all that follows a prompt, and what is to be learnt of them: the answers, not the later questions."""
        ids = self._answer_ids(answer)
        targets = list(ids)
        if later:
            between = self._between([question, *(asked for asked, _ in later)])
            for text, (_, said) in zip(between, later, strict=True):
                asked = self.tokenizer(text, add_special_tokens=False)["input_ids"]
                words = self._answer_ids(said)
                ids += [*asked, *words]
                targets += [*[IGNORE] * len(asked), *words]
        return ids, targets

    def _between(self, questions: Sequence[str]) -> list[str]:
        """What stands in the model's chat template between one answer and the next; each answer has its end already."""
        if not getattr(self.processor, "chat_template", None):
            raise ValueError(
                f"{self.family} has no chat template, so a conversation of {len(questions)} questions cannot be laid "
                "out; train on one question and answer for each picture"
            )
        turns = [
            {"role": role, "content": [{"type": "text", "text": text}]}
            for question in questions
            for role, text in (("user", question), ("assistant", ANSWER))
        ]
        between = []
        for number in range(1, len(questions)):  # a record may open its answers otherwise than a prompt does
            asked = turns[: 2 * number + 1]
            whole = self.processor.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
            if whole.count(ANSWER) != number:
                raise ValueError(f"the chat template of {self.family} cannot lay out {number + 1} questions in a row")
            between.append(whole.rpartition(ANSWER)[2])
        for text in between:
            if self.image_token in text:
                raise ValueError(f"a later question holds {self.image_token}; pictures belong to the first one")
        end = self.tokenizer.eos_token or ""
        return [text.lstrip(" ").removeprefix(end) for text in between]

    def _append(
        self, features: dict[str, Tensor], tails: list[list[int]], targets: list[list[int]] | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The same left-padded batch with a tail of ids after each prompt, and labels: its targets, else all of it."""
        ids, mask = features["input_ids"], features["attention_mask"]
        lengths = [int(n) + len(tail) for n, tail in zip(mask.sum(-1).tolist(), tails, strict=True)]
        width = max(lengths)
        out = {
            "input_ids": ids.new_full((len(tails), width), self.pad_id),
            "attention_mask": mask.new_zeros(len(tails), width),
        }
        labels = ids.new_full((len(tails), width), IGNORE)
        per_token = [key for key in self.sequence_features if key in features]
        out |= {key: features[key].new_zeros(len(tails), width) for key in per_token}
        for row, (tail, length, wanted) in enumerate(zip(tails, lengths, targets or tails, strict=True)):
            start, prompt = width - length, ids.shape[1] - (length - len(tail))
            end = width - len(tail)
            out["input_ids"][row, start:end] = ids[row, prompt:]
            out["input_ids"][row, end:] = torch.tensor(tail)
            out["attention_mask"][row, start:] = 1
            labels[row, end:] = torch.tensor(wanted)
            for key in per_token:
                out[key][row, start:end] = features[key][row, prompt:]
        return {**features, **out}, labels

    @property
    def pad_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else self.tokenizer.eos_token_id)

    # ------------------------------------------------------------------------------------- splice

    def splice(
        self,
        batch: Batch,
        tokens: VisualTokens | None,
        visual: Float[Tensor, "I K L"] | None,
        keep: Int[Tensor, "I K"] | None,
        *,
        positions: str = "original",
        order: str = "raster",
    ) -> LMInputs:
        """Text and kept tokens in one left-padded sequence, each at the position it had before anything was dropped.

        Args:
            positions: "packed" numbers what is left without gaps instead.
            order: "raster", or "native": each image's tokens as `keep` has them.
        """
        ids, mask = batch.features["input_ids"], batch.features["attention_mask"].bool()
        placeholder = (ids == self.image_token_id) & mask
        stays = mask.clone()
        sources: list[Tensor] = []  # for each kept placeholder its row in the table of visual embeddings
        table: list[Tensor] = []
        if tokens is not None and visual is not None and keep is not None:
            slot_stays, held = self._held(tokens, keep)
            if int(placeholder.sum()) != slot_stays.numel():
                raise ValueError(
                    f"the prompt holds {int(placeholder.sum())} image placeholders but the pictures fill "
                    f"{slot_stays.numel()}; process text and images in one call"
                )
            stays[placeholder] = slot_stays.to(stays.device)
            sources = [held]
            table = [visual.flatten(0, 1)]
        elif placeholder.any():
            raise ValueError(f"the prompt holds {int(placeholder.sum())} image placeholders and no image was given")

        columns, new_mask = left_pad_order(stays)
        is_visual = (placeholder.gather(1, columns)) & new_mask
        if order == "native" and sources:
            columns, sources = in_given_order(columns, is_visual, sources[0].to(columns.device))
        new_ids = torch.where(new_mask, ids.gather(1, columns), self.pad_id)
        content = is_visual  # less the newlines, where there are any
        origin = None
        embeds = self.model.get_input_embeddings()(new_ids)
        extra: dict[str, object] = {
            key: torch.where(new_mask, batch.features[key].gather(1, columns), 0)
            for key in self.sequence_features
            if key in batch.features
        }
        if tokens is not None and keep is not None and table:
            source = torch.cat(sources).to(embeds.device)
            rows = table[0].to(embeds.device, embeds.dtype)
            if bool((source < 0).any()):
                newline = self.newline
                assert newline is not None, f"{self.family} has placeholders without content but no embedding for them"
                rows = torch.cat([rows, newline.to(rows)[None]])  # row -1
            embeds = embeds.masked_scatter(is_visual[..., None], rows[source])
            content = is_visual.masked_scatter(is_visual, source >= 0)
            first = torch.arange(len(tokens), device=keep.device)[:, None] * tokens.x.shape[1]
            token = torch.where(source < 0, -1, (keep + first).flatten().to(source.device)[source])
            origin = Origin(tokens=tokens, index=torch.full_like(new_ids, -1).masked_scatter(is_visual, token))
            if tokens.planes:
                extra |= self.plane_inputs([take_tokens(plane, keep) for plane in tokens.planes], source, is_visual)

        where = self.positions(batch) if batch.positions is None else batch.positions
        if positions == "original":
            index = columns.expand(*where.shape[:-2], *columns.shape)
            new_positions = torch.where(new_mask, where.gather(-1, index), 0)
        else:
            new_positions = (new_mask.cumsum(-1) - 1).clamp_min(0).expand(*where.shape[:-2], *columns.shape)
        labels = batch.labels
        return LMInputs(
            input_ids=new_ids,
            inputs_embeds=embeds,
            attention_mask=new_mask.long(),
            position_ids=new_positions,
            visual=content,
            source=columns,
            labels=None if labels is None else torch.where(new_mask, labels.gather(1, columns), IGNORE),
            extra=extra,
            origin=origin,
        )

    def _held(self, tokens: VisualTokens, keep: Int[Tensor, "I K"]) -> tuple[Tensor, Tensor]:
        """Of all images' placeholders: which stay [S], and where in `keep`, flat, each of those has its token.

        A newline has -1. All images at once: the device is not waited for image by image.
        """
        width, num = keep.shape[1], tokens.x.shape[1]
        first = torch.arange(len(tokens), device=keep.device)[:, None] * width  # [I, 1]
        place = torch.where(keep < 0, num, keep)  # what keeps nothing goes to a column of its own
        held = keep.new_full((len(tokens), num + 1), -1)
        held = held.scatter(1, place, first + torch.arange(width, device=keep.device))[:, :num]
        if tokens.slots is None:
            stay = held >= 0
            return (stay.flatten() if tokens.is_full else stay[tokens.mask.to(stay.device)]), held[stay]
        slots = tokens.slots
        held = torch.where(slots >= 0, held.gather(1, slots.clamp_min(0)), -1)  # [I, S]
        stay = held >= 0
        if self.keeps_newlines == "all":
            stay = stay | (slots == -1)
        elif self.keeps_newlines == "rows":
            row_of = self.rows_of_slots(slots)
            row_keeps = torch.zeros_like(row_of).scatter_add(1, row_of, stay.long()) > 0  # fewer rows than slots
            stay = stay | ((slots == -1) & row_keeps.gather(1, row_of))
        return stay[slots != -2], held[stay]

    # ------------------------------------------------------------------------------------- run

    def hidden(self, lm: LMInputs) -> Float[Tensor, "B T L"]:
        """Last hidden states of the language model over the whole sequence, no cache."""
        return self.model.model(
            inputs_embeds=lm.inputs_embeds,
            attention_mask=lm.attention_mask,
            position_ids=lm.position_ids,
            use_cache=False,
            **lm.extra,
        ).last_hidden_state

    def logits(self, lm: LMInputs) -> Float[Tensor, "B T V"]:
        """Next-token logits at every position."""
        return self.model.lm_head(self.hidden(lm))

    def generate(self, lm: LMInputs, **kwargs: Any) -> Int[Tensor, "B T"]:
        """New tokens by the model's own `generate`; positions carry on from the last original one."""
        out = self.run_generate(lm, **kwargs)
        sequences = out if isinstance(out, Tensor) else out.sequences
        return sequences[:, lm.input_ids.shape[1] :]

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


def behind_prompt(labels: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """True from each row's first answer word on: what was not there when it began, later questions included."""
    return (labels != IGNORE).cumsum(-1) > 0


def left_pad_order(stays: Tensor) -> tuple[Tensor, Tensor]:
    """Columns that stay, in order and flush right, as indices [B, T'] and the mask of real ones [B, T']."""
    width = max(1, int(stays.sum(-1).max()))
    order = torch.argsort(stays.long(), dim=-1, stable=True)[:, -width:]
    return order, stays.gather(1, order)


def in_given_order(
    columns: Int[Tensor, "B T"], is_visual: Bool[Tensor, "B T"], source: Int[Tensor, " S"]
) -> tuple[Int[Tensor, "B T"], list[Int[Tensor, " S"]]]:
    """Columns and sources with each image's tokens in the order they were given in; newlines (-1) stay where they are.

    Args:
        columns: Of the unpruned sequence, in raster order.
        is_visual: True where a visual token stands.
        source: Place among all given tokens of the one at each True of `is_visual`, row by row.
    """
    given = source >= 0
    rank = source[given].argsort()  # never across images: those given first also stand first
    content = is_visual.masked_scatter(is_visual, given)
    return columns.masked_scatter(content, columns[content][rank]), [source.masked_scatter(given, source[given][rank])]


def real_columns_first(lm: LMInputs) -> LMInputs:
    """The same rows with their padding behind and a mask of ones, for one causal pass without a cache.

    Being causal already keeps real tokens from hearing what stands behind them. A mask with a zero in it would be made
    a T x T tensor and keep SDPA from its flash kernel.
    """
    real = lm.attention_mask.bool()
    if bool(real.all()):
        return lm
    order = torch.argsort((~real).long(), dim=-1, stable=True)  # [B, T]

    def take(columns: Any) -> Any:
        is_row = isinstance(columns, Tensor) and columns.shape == order.shape
        return columns.gather(1, order) if is_row else columns

    return replace(
        lm,
        input_ids=take(lm.input_ids),
        inputs_embeds=lm.inputs_embeds.gather(1, order[..., None].expand_as(lm.inputs_embeds)),
        attention_mask=torch.ones_like(lm.attention_mask),
        position_ids=lm.position_ids.gather(-1, order.expand_as(lm.position_ids)),
        visual=take(lm.visual),
        source=take(lm.source),
        labels=take(lm.labels),
        extra={key: take(value) for key, value in lm.extra.items()},
        origin=None if lm.origin is None else replace(lm.origin, index=take(lm.origin.index)),
        soft_mask=take(lm.soft_mask),
    )


def pad_rows(rows: Sequence[Tensor], value: float | int | bool = 0) -> Tensor:
    """Tensors of different length in their first axis, stacked and padded at the end."""
    width = max(len(row) for row in rows)
    out = rows[0].new_full((len(rows), width, *rows[0].shape[1:]), value)
    for i, row in enumerate(rows):
        out[i, : len(row)] = row
    return out


def with_needs(backbone: Backbone, batch: Batch, tokens: VisualTokens, needs: frozenset[str]) -> VisualTokens:
    """The same tokens with what any family can give: projected features and the prompt's text."""
    if "projected" in needs:
        tokens = replace(tokens, projected=backbone.project(tokens.x))
    if "text" in needs:
        text, text_mask = backbone.text_embeddings(batch, batch.row_of_image)
        tokens = replace(tokens, text=text, text_mask=text_mask)
    return tokens


def _per_prompt(images: Any, *, num_prompts: int, single: bool) -> list[list[Image.Image]]:
    if images is None:
        return [[] for _ in range(num_prompts)]
    if not isinstance(images, (list, tuple)):
        raise ValueError(f"images is a {type(images).__name__}; give a list of images, even for one")
    if single:
        return [[open_image(image) for image in images]]
    if len(images) != num_prompts:
        raise ValueError(
            f"{len(images)} entries in images for {num_prompts} prompts; give one each (None for text only)"
        )
    rows = [[] if row is None else list(row) if isinstance(row, (list, tuple)) else [row] for row in images]
    return [[open_image(image) for image in row] for row in rows]
