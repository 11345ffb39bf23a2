"""Answers as text while they are made: the same text as at once, for every family and inside the language model too."""

import threading
from typing import Any

import pytest
import torch
from transformers import TextIteratorStreamer

from diffprune.registry import BACKBONES
from diffprune.streaming import BatchStreamer
from tests import tiny
from tests.contracts.vlm import EveryOther, pruned

FAMILIES = [name for name in BACKBONES.names() if name != "deit"]
LETTERS = pruned("llava").processor.tokenizer("abcdefghij klmnopqrstuvwxyz", add_special_tokens=False)["input_ids"]


def letters_alone(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A random model says bytes that are no text, which a streamer holds back to the end."""
    allowed = torch.full_like(scores, -torch.inf)
    allowed[:, LETTERS] = scores[:, LETTERS]
    return allowed


STEPS: dict[str, Any] = {"max_new_tokens": 8, "logits_processor": [letters_alone]}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_pieces_are_the_answer(family: str, inside: bool) -> None:
    vlm = pruned(family, "hidden_norm", keep=5, layer=1) if inside else pruned(family, EveryOther(), keep=5)
    pieces = list(vlm.stream([tiny.picture(1)], "what is it?", **STEPS))
    assert len(pieces) > 1
    assert "".join(pieces).strip() == vlm.generate([tiny.picture(1)], "what is it?", **STEPS)


@pytest.mark.parametrize("name", ["divprune", "fastv"])
def test_several_prompts_stream_at_once(name: str) -> None:
    vlm = pruned("llava", name, keep=5)
    images, texts = [tiny.picture(1), None, tiny.picture(2)], ["what is it?", "hello", "and this, please?"]
    answers = ["", "", ""]
    for row, piece in vlm.stream(images, texts, **STEPS):
        answers[row] += piece
    assert [answer.strip() for answer in answers] == vlm.generate(images, texts, **STEPS)


@pytest.mark.parametrize("name", ["divprune", "fastv"])
def test_transformers_own_streamer_does_as_well(name: str) -> None:
    vlm = pruned("llava", name, keep=5)
    streamer = TextIteratorStreamer(vlm.processor.tokenizer, skip_prompt=True, skip_special_tokens=True)
    answer = vlm.generate([tiny.picture(1)], "what is it?", streamer=streamer, **STEPS)
    assert "".join(streamer).strip() == answer


@pytest.mark.parametrize("name", ["divprune", "fastv"])
def test_closing_the_iterator_ends_the_generation(name: str, monkeypatch: Any) -> None:
    vlm = pruned("llava", name, keep=5)
    head, calls = vlm.base.lm_head, []
    handle = head.register_forward_hook(lambda *_: calls.append(1))
    try:
        pieces = vlm.stream([tiny.picture(1)], "what is it?", max_new_tokens=3000, logits_processor=[letters_alone])
        next(pieces)
        pieces.close()
    finally:
        handle.remove()
    assert len(calls) < 3000
    assert not [thread for thread in threading.enumerate() if thread.name == "diffprune-stream"]


def test_an_error_reaches_the_listener() -> None:
    vlm = pruned("llava", "divprune", keep=5)
    with pytest.raises(ValueError, match="there is no image file"):
        list(vlm.stream(["/nowhere.png"], "what is it?"))
    with pytest.raises(ValueError, match="num_beams"):
        list(pruned("llava", "fastv", keep=5).stream([tiny.picture(1)], "what?", num_beams=2, **STEPS))


def test_a_character_of_several_tokens_comes_whole() -> None:
    tokenizer = pruned("llava").processor.tokenizer
    said: list[str] = []
    streamer = BatchStreamer(tokenizer, lambda row, text: said.append(text))
    ids = tokenizer("größe → ok", add_special_tokens=False)["input_ids"]
    streamer.put(torch.tensor([[1, 2, 3]]))
    for token in ids:
        streamer.put(torch.tensor([token]))
    streamer.end()
    assert "".join(said) == tokenizer.decode(ids) and "\ufffd" not in "".join(said)


def test_a_conversation_streams_and_remembers() -> None:
    vlm = pruned("llava", "divprune", keep=5)
    talk, heard = vlm.chat(**STEPS), vlm.chat(**STEPS)
    assert "".join(heard.stream("what is it?", [tiny.picture(1)])).strip() == talk.ask("what is it?", [tiny.picture(1)])
    broken = heard.stream("which color?")
    next(broken)
    broken.close()  # as if it had not been asked
    assert "".join(heard.stream("how many?")).strip() == talk.ask("how many?")
    assert [message["content"] for message in heard.messages[1::2]] == [m["content"] for m in talk.messages[1::2]]
    assert heard.memory.num_encoded == talk.memory.num_encoded == 1
