"""Prompts as a model takes them: the chat template, and behind it in training answers and further questions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from diffprune.ops import pad_rows
from diffprune.ops.transfer import to_device
from diffprune.types import Grid

IGNORE = -100  # label of a position without a target
ANSWER = "\0"  # stands for an answer while the chat template lays out what is between answers

Exchange = tuple[str, str]  # a question and its answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Prompts and pictures, ready for the model.

    Args:
        features: What the processor gave: ids, mask, pixels and whatever the family adds. Left-padded.
        row_of_image: The prompt each image belongs to.
        sizes: (width, height) of each original picture; empty where they are not known, and then no token has a box.
        seeds: One number per picture, made from its pixels.
        num_targets: Of the labels, where they were counted before they went to a device.
        positions: Of every token, where they were numbered before: prompts that are spliced many times.
        tile_grids: (rows, columns) of each picture's tiles, where a processor's output tells them and `sizes` do not.
    """

    features: dict[str, Tensor]
    row_of_image: tuple[int, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    seeds: tuple[int, ...] = ()
    labels: Tensor | None = None
    num_targets: int | None = None
    positions: Int[Tensor, "*R B T"] | None = None
    tile_grids: tuple[Grid, ...] | None = None

    @property
    def num_images(self) -> int:
        return len(self.row_of_image)

    def sum_by_prompt(self, values: Shaped[Tensor, " I"]) -> Shaped[Tensor, " B"]:
        """What images have, summed over each prompt's; 0 where it has none."""
        rows = to_device(torch.tensor(self.row_of_image, dtype=torch.long), values.device)
        return values.new_zeros(len(self.features["input_ids"])).index_add(0, rows, values)

    def mean_by_prompt(self, values: Float[Tensor, " I"]) -> Float[Tensor, " B"]:
        """What images have, as a mean over each prompt's; 0 where it has none."""
        if self.row_of_image == tuple(range(len(self.features["input_ids"]))):
            return values
        count = [self.row_of_image.count(row) for row in self.row_of_image]
        return self.sum_by_prompt(values / to_device(torch.tensor(count), values.device))

    def only(self, images: Sequence[int], features: dict[str, Tensor]) -> "Batch":
        """The batch with some of its pictures alone, whose own features these are; its prompts as they are."""
        return replace(
            self,
            features={key: self.features[key] for key in ("input_ids", "attention_mask")} | features,
            row_of_image=tuple(self.row_of_image[image] for image in images),
            sizes=tuple(self.sizes[image] for image in images) if self.sizes else (),
            seeds=tuple(self.seeds[image] for image in images),
            tile_grids=None if self.tile_grids is None else tuple(self.tile_grids[image] for image in images),
        )


def has_template(processor: Any) -> bool:
    """Whether the processor comes with a chat template."""
    return bool(getattr(processor, "chat_template", None))


def in_template(processor: Any, text: str, num_images: int) -> str:
    """A question behind its images, in the model's chat template, up to where the answer begins."""
    content: list[dict[str, str]] = [{"type": "image"}] * num_images + [{"type": "text", "text": text}]
    message = [{"role": "user", "content": content}]
    return processor.apply_chat_template(message, add_generation_prompt=True, tokenize=False)


def in_turns(processor: Any, turns: Sequence[Mapping[str, Any]], *, family: str) -> str:
    """A conversation in the model's chat template, up to where the next answer begins."""
    from jinja2 import TemplateError  # comes with torch

    if not has_template(processor):
        raise ValueError(
            f"this {family} model has no chat template, so messages cannot be laid out; give text= with placeholders"
        )
    try:
        return processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise ValueError(f"the chat template of this {family} model refuses these messages: {error}") from error


def require_unicode(text: str) -> None:
    """An error where a text holds half of a surrogate pair, which no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        near = ascii(text[max(0, error.start - 20) : error.end + 20])
        raise ValueError(
            f"the text {near} holds the lone surrogate {text[error.start]!a}, which is no character; "
            "decode it again with errors='replace'"
        ) from None


def require_placeholders(text: str, num_images: int, image_token: str) -> None:
    """An error where a prompt does not hold one placeholder for each image."""
    found = text.count(image_token)
    if found == 0 and num_images > 0:
        raise ValueError(
            f"the prompt holds no image placeholder for {num_images} image(s); put {image_token} where each belongs"
        )
    if found != num_images:
        raise ValueError(f"{num_images} image(s) for {found} placeholder(s) {image_token}; give one image each")


def between_answers(
    processor: Any, questions: Sequence[str], *, family: str, image_token: str, end: str | None
) -> list[str]:
    """What stands in the chat template between one answer and the next; each answer has its end already.

    Args:
        end: The token that ends an answer.
    """
    if not has_template(processor):
        raise ValueError(
            f"{family} has no chat template, so a conversation of {len(questions)} questions cannot be laid "
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
        whole = processor.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        if whole.count(ANSWER) != number:
            raise ValueError(f"the chat template of {family} cannot lay out {number + 1} questions in a row")
        between.append(whole.rpartition(ANSWER)[2])
    for text in between:
        if image_token in text:
            raise ValueError(f"a later question holds {image_token}; pictures belong to the first one")
    return [text.lstrip(" ").removeprefix(end or "") for text in between]


def append_tails(
    features: dict[str, Tensor],
    tails: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    *,
    pad_id: int,
    per_token: Mapping[str, int],
) -> tuple[dict[str, Tensor], Int[Tensor, "B T"]]:
    """A left-padded batch with a tail of ids behind each prompt, and the labels.

    Args:
        features: What the processor gave for the prompts.
        tails: Ids that follow each prompt.
        targets: What is to be learnt of them, as long.
        per_token: Further features that have a value for each token, and their value in a tail.
    """
    ids, real = features["input_ids"], features["attention_mask"].bool()
    behind = [ids.new_tensor(tail, dtype=ids.dtype) for tail in tails]

    def longer(key: str, tails: Sequence[Tensor], padding: int) -> Int[Tensor, "B T"]:
        parts = zip(features[key], real, tails, strict=True)
        return pad_rows([torch.cat([row[own], tail.to(row.dtype)]) for row, own, tail in parts], padding, left=True)

    out = {
        "input_ids": longer("input_ids", behind, pad_id),
        "attention_mask": longer("attention_mask", [torch.ones_like(tail) for tail in behind], 0),
    }
    for key, value in per_token.items():
        if key in features:
            out[key] = longer(key, [torch.full_like(tail, value) for tail in behind], 0)
    labels = torch.full_like(out["input_ids"], IGNORE)
    for row, wanted in enumerate(targets):
        labels[row, labels.shape[1] - len(wanted) :] = ids.new_tensor(wanted, dtype=ids.dtype)
    return {**features, **out}, labels


def behind_prompt(labels: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """True from each row's first answer word on: what was not there when it began, later questions included."""
    return (labels != IGNORE).cumsum(-1) > 0
