"""Questions with their pictures encoded, each once, and batches of prompts put together with them."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL import Image

from diffprune.backbones.pictures import MADE_LATER
from diffprune.backbones.prompts import Batch
from diffprune.evaluate.pictures import (
    EncodedPictures,
    Ids,
    encode_images,
    is_encoded_apart,
    pad_left,
    prompt_ids,
)
from diffprune.evaluate.sources import Questions
from diffprune.evaluate.task import Question, Task
from diffprune.methods.base import Pruner
from diffprune.model import PrunedVLM
from diffprune.types import VisualTokens

Progress = Callable[[str, int, int], None]  # stage, how much of it is done, of how much
PromptBatches = list[tuple[list[int], Batch]]  # places of the prompts among all, and these prompts


@dataclass(frozen=True, slots=True)
class EncodedQuestions:
    """Questions, all or some of those of several tasks, and each picture they are about encoded once.

    Attributes:
        asked: The questions, task after task.
        images: The pictures, as the questions name them.
        pictures: These encoded; None where no question has any.
        rows: Of each prompt the rows of `pictures` that it is about.
        ids: The prompts as the model reads them, with the placeholders of their pictures.
        together: Which pictures are encoded as ones that are not alone in their prompt.
    """

    questions: Questions
    asked: tuple[Question, ...]
    images: tuple[Any, ...]
    pictures: EncodedPictures | None
    rows: tuple[tuple[int, ...], ...]
    ids: tuple[Ids, ...]
    together: tuple[bool, ...] = ()

    @property
    def tasks(self) -> tuple[Task, ...]:
        return self.questions.tasks

    @property
    def tokens(self) -> VisualTokens:
        """The visual tokens of the pictures."""
        assert self.pictures is not None, "no question has a picture"
        return self.pictures.tokens

    @property
    def prompts(self) -> list[str]:
        return [question.prompt for question in self.asked]

    @property
    def num_visual(self) -> list[tuple[int, ...]]:
        """Of each prompt the tokens of its pictures."""
        counts = [] if self.pictures is None else self.tokens.counts.tolist()
        return [tuple(counts[row] for row in rows) for rows in self.rows]

    def rows_of(self, prompts: Sequence[int]) -> list[int]:
        """The pictures of some prompts, one after the other."""
        return [row for index in prompts for row in self.rows[index]]

    def oracle(self) -> Pruner:
        """The pruner that knows these pictures, where their source does."""
        seeds = self.tokens.seeds
        assert seeds is not None
        return self.questions.oracle(self.images, seeds)

    def with_pictures(self, vlm: PrunedVLM, pictures: EncodedPictures | None) -> "EncodedQuestions":
        """The same questions about other forms of their pictures, or about none."""
        rows = self.rows if pictures is not None else ((),) * len(self.asked)
        return replace(self, pictures=pictures, rows=rows, ids=_ids(vlm, self.asked, rows, pictures))


def all_asked(questions: Questions) -> tuple[Question, ...]:
    """Every question, task after task."""
    return tuple(question for task in questions.tasks for question in task.questions)


@torch.inference_mode()
def encode_questions(
    vlm: PrunedVLM,
    questions: Questions,
    *,
    needs: frozenset[str] = frozenset(),
    batch_size: int = 64,
    places: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> EncodedQuestions:
    """Encode the pictures of questions, with whatever the methods to come need.

    Args:
        needs: Of all the methods that will be measured.
        places: Of the questions that are asked now, among all; default: all.
    """
    questions = questions.for_model(vlm)
    asked = all_asked(questions)
    asked = asked if places is None else tuple(asked[place] for place in places)
    apart = any(len(question.images) > 1 for question in asked) and is_encoded_apart(vlm)
    rows, images, together = _distinct(asked, apart)
    parts: list[EncodedPictures] = []
    done = 0
    for some, is_together in _stretches(images, together, batch_size):
        encode = questions.encode_together if is_together else questions.encode
        parts.append(encode(vlm, some, needs - MADE_LATER))
        done += len(some)
        if progress:
            progress("encode pictures", done, len(images))
    pictures = EncodedPictures.join(parts) if parts else None
    return EncodedQuestions(questions, asked, images, pictures, rows, _ids(vlm, asked, rows, pictures), together)


def reencode(
    vlm: PrunedVLM,
    images: Sequence[Any],
    together: Sequence[bool],
    *,
    opened: Callable[[Any], Image.Image],
    batch_size: int,
) -> EncodedPictures:
    """Pictures encoded through the model's own processor, some as ones that are not alone in their prompt.

    Args:
        opened: What is encoded of each; called for one batch at a time, so that no more are in memory.
    """
    parts = [
        encode_images(vlm, [opened(image) for image in some], together=is_together)
        for some, is_together in _stretches(images, together, batch_size)
    ]
    return EncodedPictures.join(parts)


def _distinct(
    asked: Sequence[Question], apart: bool
) -> tuple[tuple[tuple[int, ...], ...], tuple[Any, ...], tuple[bool, ...]]:
    """The rows of each question's pictures, the distinct pictures, and which of these are not alone in their prompt.

    Equal pictures, or one object, are one; with `apart` a picture is another where it is not alone.
    """
    known: dict[Hashable, int] = {}
    images: list[Any] = []
    together: list[bool] = []

    def row_of(image: Any, is_together: bool) -> int:
        key = (picture_key(image), is_together)
        if key not in known:
            known[key] = len(images)
            images.append(image)
            together.append(is_together)
        return known[key]

    rows = tuple(
        tuple(row_of(image, apart and len(question.images) > 1) for image in question.images) for question in asked
    )
    return rows, tuple(images), tuple(together)


def picture_key(image: Any) -> Hashable:
    """What tells pictures apart: those of PIL and arrays have no hash."""
    return image if isinstance(image, Hashable) else id(image)


def _stretches(images: Sequence[Any], together: Sequence[bool], most: int) -> Iterator[tuple[Sequence[Any], bool]]:
    """The pictures in their order, in batches of one kind."""
    start = 0
    while start < len(images):
        end = start + 1
        while end < len(images) and end - start < most and together[end] == together[start]:
            end += 1
        yield images[start:end], together[start]
        start = end


def _ids(
    vlm: PrunedVLM, asked: Sequence[Question], rows: Sequence[Sequence[int]], pictures: EncodedPictures | None
) -> tuple[Ids, ...]:
    placeholders = [[pictures.placeholders[row] for row in of_prompt] if pictures else [] for of_prompt in rows]
    turns = [question.turns for question in asked]
    return prompt_ids(vlm, [question.prompt for question in asked], placeholders, turns)


# Parts and batches ---------------------------------------------------------------------------------------------------


def picture_groups(asked: Sequence[Question]) -> list[list[int]]:
    """Prompts about the same first picture, in the order of their first appearance; one without a picture is alone."""
    groups: dict[Hashable, list[int]] = {}
    for place, question in enumerate(asked):
        key = picture_key(question.images[0]) if question.images else ("no picture", place)
        groups.setdefault(key, []).append(place)
    return list(groups.values())


def parts_of(asked: Sequence[Question], held: int) -> Iterator[list[int]]:
    """Places of prompts that are answered together, so that at most `held` pictures are in memory at a time."""
    part: list[int] = []
    images: set[Hashable] = set()
    for group in picture_groups(asked):
        own = {picture_key(image) for place in group for image in asked[place].images}
        if part and len(images | own) > held:
            yield part
            part, images = [], set()
        part += group
        images |= own
    if part:
        yield part


def question_order(vlm: PrunedVLM, encoded: EncodedQuestions) -> list[int]:
    """The prompts such that those with answers of like length come together, then those of like length.

    A batch is decoded until its last answer has ended.
    """
    answers = [" " + question.answer for question in encoded.asked]
    spelled = vlm.backbone.tokenizer(answers, add_special_tokens=False)["input_ids"] if answers else []
    return sorted(range(len(answers)), key=lambda index: (len(spelled[index]), len(encoded.ids[index])))


def question_batches(vlm: PrunedVLM, encoded: EncodedQuestions, batch_size: int) -> PromptBatches:
    """All prompts in batches, each about its pictures."""
    order = question_order(vlm, encoded)
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return [(asked, prompt_batch(vlm, encoded, asked)) for asked in batches]


def prompt_batch(vlm: PrunedVLM, encoded: EncodedQuestions, asked: Sequence[int]) -> Batch:
    """Some prompts, left-padded, each about its pictures."""
    backbone, rows = vlm.backbone, encoded.rows_of(asked)
    features = pad_left([encoded.ids[index] for index in asked], backbone.pad_id)
    device = vlm.base.get_input_embeddings().weight.device
    features = {key: value.to(device) for key, value in features.items()}
    features |= backbone.prompt_features(features["input_ids"])
    of_prompt: tuple[int, ...] = ()
    if rows and encoded.pictures is not None:
        features |= {key: value[rows] for key, value in encoded.pictures.features.items()}
        of_prompt = tuple(place for place, index in enumerate(asked) for _ in encoded.rows[index])
    batch = Batch(features=features, row_of_image=of_prompt)
    return replace(batch, positions=backbone.positions(batch))
