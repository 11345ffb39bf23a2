"""Conversations with a `PrunedVLM`, turn by turn, and answers as they are made."""

from collections.abc import Iterator, Sequence
from typing import Any

from diffprune.backbones.messages import Message, is_one_talk
from diffprune.memory import Memory
from diffprune.streaming import pieces


class Talking:
    """The part of `PrunedVLM` that streams and chats."""

    def stream(self, images: Any = None, text: str | Sequence[str] = "", **kwargs: Any) -> Iterator[Any]:
        """The answer piece by piece: texts for one prompt, (row, text) for several; arguments as `generate` has them.

        The pieces of an answer joined and stripped are what `generate` gives. Closing the iterator ends the generation.
        """
        vlm: Any = self
        messages = kwargs.get("messages")
        is_one = isinstance(text, str) if messages is None else is_one_talk(messages)
        found = pieces(
            vlm.backbone.tokenizer,
            lambda streamer: vlm.generate(images, text, **{**kwargs, "return_ids": True, "streamer": streamer}),
        )
        return (piece for _, piece in found) if is_one else found

    def chat(self, messages: Sequence[Message] = (), *, keep: Any = None, **kwargs: Any) -> "Conversation":
        """A conversation that keeps its pictures and its cache between turns.

        Args:
            messages: What was said before.
            keep: The budget, and each turn may give its own; a list is one for each picture.
            kwargs: Of every turn's `generate`.
        """
        return Conversation(self, messages, keep=keep, **kwargs)


class Conversation:
    """Questions and answers about pictures that may come with any turn.

    Every turn answers as the same messages asked anew would. The vision tower runs once for each picture. The language
    model's cache is kept too, but for methods that read the text or choose inside the language model: these look at the
    newest question and choose again.

    Example:
        talk = vlm.chat(keep=64, max_new_tokens=32)
        talk.ask("What does the sign say?", images=[picture])
        talk.ask("And what is behind it?")
    """

    def __init__(self, vlm: Any, messages: Sequence[Message] = (), *, keep: Any = None, **kwargs: Any) -> None:
        self.vlm, self.keep, self.kwargs = vlm, keep, kwargs
        self.messages: list[Message] = list(messages)
        self.memory = Memory()

    def ask(self, text: str, images: Sequence[Any] = (), **kwargs: Any) -> str:
        """The answer to the next question, which is then part of the conversation.

        Args:
            images: Pictures that come with the question.
            kwargs: As `generate` has them.
        """
        messages = [*self.messages, self._question(text, images)]
        answer = self.vlm.generate(messages=messages, memory=self.memory, **self._arguments(kwargs))
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return answer

    def stream(self, text: str, images: Sequence[Any] = (), **kwargs: Any) -> Iterator[str]:
        """As `ask`, piece by piece; a turn that is not heard to its end is as if it had not been asked."""
        messages = [*self.messages, self._question(text, images)]
        answer = ""
        for piece in self.vlm.stream(messages=messages, memory=self.memory, **self._arguments(kwargs)):
            answer += piece
            yield piece
        self.messages = [*messages, {"role": "assistant", "content": answer.strip()}]

    def _arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {"keep": self.keep, **self.kwargs, **kwargs}

    def _question(self, text: str, images: Sequence[Any]) -> Message:
        parts: list[Message] = [{"type": "image", "image": image} for image in images]
        return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
