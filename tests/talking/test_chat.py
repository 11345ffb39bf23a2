"""A conversation answers each turn as the same messages asked anew, whatever it keeps between its turns."""

from typing import Any

import pytest
import torch

from diffprune.backbones.messages import Message
from diffprune.memory import Memory
from diffprune.model import PrunedVLM
from diffprune.registry import BACKBONES
from tests import tiny
from tests.contracts.vlm import EveryOther, pruned

FAMILIES = [name for name in BACKBONES.names() if name != "deit"]
NO_CACHE = {"paligemma"}  # its prefix is read in both directions
QUESTIONS = ["what is it?", "and which color?", "how many are there, then?"]
STEPS = {"max_new_tokens": 6, "do_sample": False}


def question(text: str, *pictures: Any) -> Message:
    parts = [{"type": "image", "image": picture} for picture in pictures]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def three_turns(vlm: PrunedVLM, memory: Memory | None, second: tuple[Any, ...] = ()) -> list[Any]:
    """Output objects of three turns, each with the logits behind every answer token."""
    messages: list[Message] = []
    found = []
    for number, text in enumerate(QUESTIONS):
        messages.append(question(text, *((tiny.picture(1),) if number == 0 else second if number == 1 else ())))
        out = vlm.generate(messages=messages, memory=memory, return_dict_in_generate=True, output_logits=True, **STEPS)
        found.append(out)
        messages.append({"role": "assistant", "content": vlm.backbone.tokenizer.decode(out.sequences[0])})
    return found


def assert_same(ours: list[Any], wanted: list[Any]) -> None:
    for own, other in zip(ours, wanted, strict=True):
        assert torch.equal(own.sequences, other.sequences)
        assert (torch.stack(own.logits) - torch.stack(other.logits)).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_three_turns_answer_as_asked_anew(family: str) -> None:
    vlm, memory = pruned(family, EveryOther(), keep=5), Memory()
    ours = three_turns(vlm, memory, second=(tiny.picture(2, (64, 120)),))
    assert_same(ours, three_turns(vlm, None, second=(tiny.picture(2, (64, 120)),)))
    assert memory.num_encoded == (3 if family == "llava_onevision" else 2)
    assert (memory.num_reused > 0) == (family not in NO_CACHE)


@pytest.mark.parametrize("family", FAMILIES)
def test_later_turns_run_no_vision_tower_and_only_the_new_columns(family: str, monkeypatch: Any) -> None:
    vlm, memory = pruned(family, EveryOther(), keep=5), Memory()
    filled = []
    run = vlm.backbone.fill
    monkeypatch.setattr(vlm.backbone, "fill", lambda lm, cache, start: (filled.append(start), run(lm, cache, start)))
    three_turns(vlm, memory)
    assert memory.num_encoded == 1
    if family not in NO_CACHE:
        assert filled[0] == 0 and 0 < filled[1] < filled[2]  # the second and third turn begin where the last one ended
