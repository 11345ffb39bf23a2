"""Pictures encoded apart from any prompt, and prompts put together with them afterwards as the processor would."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from PIL import Image
from torch import Tensor

from diffprune.backbones.pictures import join_tokens
from diffprune.backbones.prompts import Batch, has_template, require_placeholders
from diffprune.evaluate.task import Question
from diffprune.model import PrunedVLM
from diffprune.types import VisualTokens

Ids = tuple[int, ...]
Turns = Sequence[tuple[str, str]]  # questions and answers that come before a prompt

ANY_QUESTION = "What is it?"


@dataclass(frozen=True, slots=True)
class EncodedPictures:
    """Pictures encoded apart from any prompt, and what a prompt about one of them must know of it.

    Attributes:
        placeholders: The ids that stand for each picture in a prompt.
        features: What the numbering of a prompt reads of each picture (`Backbone.picture_features`), one row each.
    """

    tokens: VisualTokens
    placeholders: tuple[Ids, ...]
    features: dict[str, Tensor]

    def take(self, rows: Sequence[int]) -> "EncodedPictures":
        """Some of the pictures, in the order given."""
        index = list(rows)
        return EncodedPictures(
            self.tokens.take(index),
            tuple(self.placeholders[row] for row in index),
            {key: value[index] for key, value in self.features.items()},
        )

    @classmethod
    def join(cls, parts: Sequence["EncodedPictures"]) -> "EncodedPictures":
        """Several batches as one, all padded to the most tokens a picture has."""
        return cls(
            join_tokens([part.tokens for part in parts]),
            tuple(ids for part in parts for ids in part.placeholders),
            {key: torch.cat([part.features[key] for part in parts]) for key in parts[0].features},
        )


def encode_images(
    vlm: PrunedVLM, images: Sequence[Any], needs: frozenset[str] = frozenset(), *, together: bool = False
) -> EncodedPictures:
    """Pictures encoded through the model's own processor.

    Args:
        images: Paths, pictures of PIL or arrays of bytes.
        needs: Of the methods to come, without `MADE_LATER`.
        together: As pictures that are not alone in their prompt, where `is_encoded_apart` says that these differ.
    """
    backbone = vlm.backbone
    if together:
        shown = list(images) * (2 if len(images) == 1 else 1)  # one would be alone
        batch = vlm.prepare([shown], [ANY_QUESTION])
        tokens = backbone.encode(batch, needs).take(range(len(images)))
        placeholders = tuple((backbone.image_token_id,) * length for length in num_placeholders(tokens))
    else:
        batch = vlm.prepare(list(images), [ANY_QUESTION] * len(images))
        tokens, placeholders = backbone.encode(batch, needs), placeholder_ids(vlm, batch)
    features = {key: batch.features[key][: len(images)] for key in backbone.picture_features}
    return EncodedPictures(tokens, placeholders, features)


def placeholder_ids(vlm: PrunedVLM, batch: Batch) -> tuple[Ids, ...]:
    """The ids that stand for each picture of a batch that asks `ANY_QUESTION` of all: what is more than the text."""
    backbone = vlm.backbone
    (bare,) = prompt_ids(vlm, [ANY_QUESTION], [[(backbone.image_token_id,)]])
    place = bare.index(backbone.image_token_id)
    before, after = bare[:place], bare[place + 1 :]
    known: dict[Ids, Ids] = {}  # many are alike: each is held once
    found = []
    for ids, mask in zip(*(batch.features[key].tolist() for key in ("input_ids", "attention_mask")), strict=True):
        row = tuple(ids[len(mask) - sum(mask) :])
        end = len(row) - len(after)
        if row[:place] != before or row[end:] != after:
            raise ValueError(
                f"the {backbone.family} family writes more than a picture's placeholders into a prompt, so questions "
                "cannot be asked of pictures encoded before; choose a model of another family"
            )
        found.append(known.setdefault(row[place:end], row[place:end]))
    return tuple(found)


def is_encoded_apart(vlm: PrunedVLM) -> bool:
    """Whether a family encodes several pictures of one prompt otherwise than each by itself."""
    image = Image.new("RGB", (96, 64))
    one, two = (vlm.prepare([[image] * count], [ANY_QUESTION]) for count in (1, 2))
    (ids,) = prompt_ids(vlm, [ANY_QUESTION], [placeholder_ids(vlm, one) * 2])
    return list(ids) != two.features["input_ids"][0].tolist()


def num_placeholders(tokens: VisualTokens) -> list[int]:
    """Placeholders of each picture, where each is one token or a newline."""
    if tokens.slots is not None:
        return (tokens.slots != -2).sum(-1).tolist()
    return [tokens.x.shape[1]] * len(tokens) if tokens.is_full else tokens.counts.tolist()


def prompt_ids(
    vlm: PrunedVLM,
    prompts: Sequence[str],
    placeholders: Sequence[Sequence[Ids]],
    turns: Sequence[Turns] | None = None,
) -> tuple[Ids, ...]:
    """Prompts as the model reads them.

    Args:
        placeholders: For each prompt the ids that stand for each of its pictures.
        turns: For each prompt the questions and answers that come before it.
    """
    backbone = vlm.backbone
    texts = [
        backbone.written(_prompt_text(vlm, prompt, len(pictures), before))
        for prompt, pictures, before in zip(prompts, placeholders, turns or [()] * len(prompts), strict=True)
    ]
    found = []
    for ids, pictures in zip(backbone.tokenizer(texts)["input_ids"] if texts else [], placeholders, strict=True):
        remaining = iter(pictures)
        filled: list[int] = []
        for token in ids:
            filled += next(remaining) if token == backbone.image_token_id else (token,)
        found.append(tuple(filled))
    return tuple(found)


def require_prompts(vlm: PrunedVLM, asked: Sequence[Question], *, blind: bool = False) -> None:
    """An error that names the first question which cannot be laid out for a model.

    Args:
        blind: They are asked without their pictures too.
    """
    placeholder = vlm.backbone.image_token
    for one in asked:
        try:
            _prompt_text(vlm, one.prompt, len(one.images), one.turns)
        except ValueError as error:
            raise ValueError(f"question {one.id!r} cannot be asked: {error}") from error
        if blind and placeholder in one.prompt:
            raise ValueError(
                f"question {one.id!r} says by {placeholder} where its picture stands, and --blind asks without "
                f"pictures; take {placeholder} out of it, or leave --blind out"
            )


def _prompt_text(vlm: PrunedVLM, prompt: str, num_images: int, before: Turns) -> str:
    """A prompt with its placeholders, in the chat template."""
    backbone = vlm.backbone
    if not before:
        return backbone._prompt(prompt, num_images, chat=True)
    if not has_template(vlm.processor):
        raise ValueError(
            f"{backbone.family} has no chat template, so a question after {len(before)} turns cannot be laid out; "
            "leave `turns` out, or choose a model of another family"
        )
    said = [text for turn in before for text in turn]
    messages = [
        {"role": ("user", "assistant")[place % 2], "content": [{"type": "text", "text": text}]}
        for place, text in enumerate([*said, prompt])
    ]
    messages[0]["content"] = [{"type": "image"}] * num_images + messages[0]["content"]
    text = vlm.processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    require_placeholders(text, num_images, backbone.image_token)
    return text


def pad_left(ids: Sequence[Sequence[int]], pad_id: int) -> dict[str, Int[Tensor, "B T"]]:
    """Ids and mask of a batch as a processor gives them."""
    width = max(map(len, ids))
    padded = np.full((len(ids), width), pad_id, dtype=np.int64)
    mask = np.zeros_like(padded)
    for row, prompt in enumerate(ids):
        padded[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return {"input_ids": torch.from_numpy(padded), "attention_mask": torch.from_numpy(mask)}
