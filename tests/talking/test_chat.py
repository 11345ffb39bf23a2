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


def turn(vlm: PrunedVLM, memory: Memory | None, messages: list[Message], **kwargs: Any) -> Any:
    return vlm.generate(
        messages=messages, memory=memory, return_dict_in_generate=True, output_logits=True, **(STEPS | kwargs)
    )


def test_a_cache_of_another_budget_choice_or_history_is_not_taken() -> None:
    vlm, memory = pruned("llava", EveryOther(), keep=5), Memory()
    asked = [question("what is it?", tiny.picture(1))]
    turn(vlm, memory, asked)
    said = [*asked, {"role": "assistant", "content": "a ring"}, question("and now?")]
    whole = turn(vlm, memory, said)
    before = memory.num_reused
    assert before > 10
    # another budget: what stands before the picture alone
    assert_same([turn(vlm, memory, said, keep=9)], [turn(vlm, None, said, keep=9)])
    assert memory.num_reused < before and memory.num_encoded == 1
    # the old budget again, and another history behind the picture
    other = [*asked, {"role": "assistant", "content": "a house"}, question("and now?")]
    assert_same([turn(vlm, memory, said)], [whole])
    assert_same([turn(vlm, memory, other)], [turn(vlm, None, other)])
    assert memory.num_reused == before + len("a ")  # up to where the two answers differ
    # another picture in the first message
    swapped = [question("what is it?", tiny.picture(5)), *said[1:]]
    assert_same([turn(vlm, memory, swapped)], [turn(vlm, None, swapped)])
    assert memory.num_encoded == 2 and memory.num_reused < 10
    # another method on the same model, over the same memory
    norm = vlm.with_method("feature_norm")
    assert_same([turn(norm, memory, said)], [turn(norm, None, said)])
    assert memory.num_reused == 0
    # changed weights
    turn(norm, memory, said)
    layer = norm.base.model.language_model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        layer.mul_(1.5)
    try:
        assert_same([turn(norm, memory, said)], [turn(norm, None, said)])
        assert memory.num_reused == 0
    finally:
        with torch.no_grad():
            layer.div_(1.5)


@pytest.mark.parametrize(("name", "options"), [("cdpruner", {}), ("fastv", {"layer": 1}), ("sparsevlm", {})])
def test_methods_that_look_at_the_question_choose_again_each_turn(name: str, options: dict[str, Any]) -> None:
    vlm, memory = pruned("llava", name, keep=5, **options), Memory()
    assert_same(three_turns(vlm, memory), three_turns(vlm, None))
    assert memory.num_encoded == 1 and memory.num_reused == 0


def test_a_cache_from_elsewhere_is_refused() -> None:
    vlm = pruned("llava", EveryOther(), keep=5)
    out = vlm.generate([tiny.picture(1)], "what?", keep=3, return_dict_in_generate=True, **STEPS)
    with pytest.raises(ValueError, match=r"past_key_values is given.*vlm\.chat"):
        vlm.generate([tiny.picture(1)], "what?", past_key_values=out.past_key_values, **STEPS)


def test_a_turn_that_fails_or_has_beams_leaves_no_cache_behind() -> None:
    vlm, talk = pruned("llava", EveryOther(), keep=5), pruned("llava", EveryOther(), keep=5).chat(**STEPS)
    first = talk.ask("what is it?", [tiny.picture(1)])
    with pytest.raises(ValueError, match="holds 2 budgets"):
        talk.ask("and now?", keep=[3, 4])
    assert len(talk.messages) == 2 and talk.messages[1]["content"] == first
    talk.ask("with beams?", num_beams=2)
    assert talk.memory.num_reused == 0
    last = [*talk.messages, question("and now?")]
    assert talk.ask("and now?") == vlm.generate(messages=last, **STEPS)
    assert talk.memory.num_reused == 0
    last = [*talk.messages, question("again?")]
    assert talk.ask("again?") == vlm.generate(messages=last, **STEPS)
    assert talk.memory.num_reused > 0
