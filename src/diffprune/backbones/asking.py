"""Prompts and pictures as a family takes them: questions, conversations and a processor's own output as batches."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from PIL import Image
from torch import Tensor

from diffprune.backbones import prompts
from diffprune.backbones.features import Layout, read_features
from diffprune.backbones.messages import Talk, read_talks
from diffprune.backbones.processors import move_features, open_by_prompt, pixel_seed
from diffprune.backbones.prompts import IGNORE, Batch, Exchange, require_unicode
from diffprune.ops.transfer import to_device


class Asking:
    """The half of a backbone that lays out prompts by the family's own processor."""

    family: ClassVar[str]
    # Per-token features of the processor that are gathered together with the ids, and their value in an answer.
    sequence_features: ClassVar[Mapping[str, int]] = {}
    model: Any
    processor: Any

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
        pictures = open_by_prompt(images, num_prompts=len(texts), single=isinstance(text, str))
        asked = [self._prompt(question, len(row), chat) for question, row in zip(texts, pictures, strict=True)]
        features = self.process(pictures, asked)
        labels = None
        if answers is not None:
            if len(answers) != len(texts):
                raise ValueError(f"{len(answers)} answers for {len(texts)} prompts; give one each")
            talks = [()] * len(texts) if later is None else later
            if len(talks) != len(texts):
                raise ValueError(f"{len(talks)} later conversations for {len(texts)} prompts; give one each")
            tails = [self._tail(*talk) for talk in zip(texts, answers, talks, strict=True)]
            features, labels = self._append(features, [ids for ids, _ in tails], [targets for _, targets in tails])
        return self._batch(features, pictures, labels)

    def prepare_messages(self, messages: Any, images: Any = None) -> Batch:
        """Conversations as the model takes them, each up to where its next answer begins.

        Args:
            messages: Of one conversation, or a list of conversations; `messages.py` says how they are written.
            images: Pictures for parts that name one and hold none.
        """
        talks = read_talks(messages, images)
        return self.prepare_prompts([self.lay_out(talk) for talk in talks], [talk.pictures for talk in talks])

    def prepare_prompts(self, asked: list[str], pictures: list[list[Image.Image]]) -> Batch:
        """Prompts that hold a placeholder for each of their pictures already, as the model takes them."""
        return self._batch(self.process(pictures, asked), pictures)

    def lay_out(self, talk: Talk) -> str:
        """The whole conversation as one text, its placeholders where its pictures belong."""
        text = prompts.in_turns(self.processor, talk.turns, family=self.family)
        prompts.require_placeholders(text, len(talk.pictures), self.image_token)
        return text

    def read(self, features: Mapping[str, Any]) -> Batch:
        """What the family's own processor gave, `processor(text=..., images=..., return_tensors="pt")`, as a batch.

        The original pictures are not known then: what is drawn at random for a picture is drawn from its pixels as the
        processor made them, and boxes are in those.
        """
        return read_features(cast(Any, self), features)

    def picture_layout(self, features: Mapping[str, Tensor]) -> Layout:
        """The pictures of a processor's output; here all alike, each with a row of its own among the pixels."""
        pixels = features["pixel_values"]
        total = int((features["input_ids"] == self.image_token_id).sum())
        size = (int(pixels.shape[-1]), int(pixels.shape[-2]))
        return Layout([total // len(pixels)] * len(pixels), [size] * len(pixels))

    def _batch(
        self, features: Mapping[str, Any], pictures: Sequence[Sequence[Image.Image]], labels: Tensor | None = None
    ) -> Batch:
        """What the processor gave for the pictures of each prompt, on the model's device."""
        device, dtype = self.model.get_input_embeddings().weight.device, self.model.dtype
        flat = [image for row in pictures for image in row]
        return Batch(
            features=move_features(features, device, dtype),
            row_of_image=tuple(row for row, images_of in enumerate(pictures) for _ in images_of),
            sizes=tuple(image.size for image in flat),
            seeds=tuple(pixel_seed(image) for image in flat),
            labels=None if labels is None else to_device(labels, device),
            num_targets=None if labels is None else int((labels[:, 1:] != IGNORE).sum()),
        )

    def process(self, pictures: list[list[Image.Image]], prompts: list[str]) -> dict[str, Tensor]:
        """The family's own processor on prompts whose placeholders are counted already."""
        for text in prompts:
            require_unicode(text)
        flat = [image for row in pictures for image in row]
        kwargs: dict[str, Any] = {"images": flat} if flat else {}
        return dict(self.processor(text=prompts, padding=True, padding_side="left", return_tensors="pt", **kwargs))

    def placeholder_prompt(self, num_images: int) -> str:
        """The shortest text that holds `num_images` placeholders."""
        return self.image_token * num_images

    def _prompt(self, text: str, num_images: int, chat: bool) -> str:
        """The text that is given to the processor: a question in the chat template, a prompt as it is."""
        if chat and self.image_token not in text:
            if prompts.has_template(self.processor):
                text = prompts.in_template(self.processor, text, num_images)
            elif not text:
                return self.placeholder_prompt(num_images)
        prompts.require_placeholders(text, num_images, self.image_token)
        return text

    def _answer_ids(self, answer: str) -> list[int]:
        """An answer as the model would write it: one space, the words, the end token."""
        require_unicode(answer)
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
        """What stands in the model's chat template between one answer and the next."""
        return prompts.between_answers(
            self.processor,
            questions,
            family=self.family,
            image_token=self.image_token,
            end=self.tokenizer.eos_token,
        )

    def _append(
        self, features: dict[str, Tensor], tails: list[list[int]], targets: list[list[int]] | None = None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Prompts with a tail of ids behind each, and labels: the targets; default: all of the tail."""
        return prompts.append_tails(
            features, tails, targets or tails, pad_id=self.pad_id, per_token=self.sequence_features
        )

    @property
    def pad_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(pad if pad is not None else self.tokenizer.eos_token_id)
