"""Sampling, stop strings, penalties and streams on the fast path: one seed gives the tokens of the reference path."""

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

from diffprune.fast.options import NotCompiled, read_decoding
from tests import tiny
from tests.fast.compiled import QUESTIONS, compiled

ROWS = ["what?", "what does the sign beside it say?"]
SAMPLED: dict[str, dict[str, Any]] = {
    "plain": {"do_sample": True},
    "cold": {"do_sample": True, "temperature": 0.7, "top_k": 20},
    "narrow": {"do_sample": True, "top_p": 0.8, "repetition_penalty": 1.3},
    "least": {"do_sample": True, "min_p": 0.01, "min_new_tokens": 4},
    "penalty": {"do_sample": False, "repetition_penalty": 5.0},
    "grams": {"do_sample": False, "no_repeat_ngram_size": 2},
    "without": {"do_sample": False, "suppress_tokens": [70, 80, 90], "bad_words_ids": [[75], [60, 61]]},
}


class NoReference:
    """In place of the reference path's decoder: a request that gets here was not answered by the fast path."""

    def generate(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("the reference path answered")


def both(vlm: Any, images: Any, text: Any, *, seed: int = 0, **kwargs: Any) -> tuple[Any, Any]:
    """What the fast path and what the reference path say with one seed."""
    fast, decoder = vlm.fast, vlm.decoder
    asked = {"max_new_tokens": 6, "return_ids": True, **kwargs}
    found = []
    for own, runs in ((fast, NoReference()), (None, decoder)):
        vlm.fast, vlm.decoder = own, runs
        torch.manual_seed(seed)
        try:
            found.append(vlm.generate(images, text, **asked))
        finally:
            vlm.fast, vlm.decoder = fast, decoder
    return found[0], found[1]


@pytest.mark.parametrize("settings", list(SAMPLED))
@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen2_5_vl"])
def test_one_seed_gives_the_tokens_of_the_reference_path(family: str, settings: str) -> None:
    vlm, drawn = compiled(family, "feature_norm"), []
    for seed, question in enumerate(QUESTIONS):
        found, wanted = both(vlm, [tiny.picture(seed)], question, seed=seed, **SAMPLED[settings])
        assert torch.equal(found, wanted)
        drawn.append(found[0].tolist())
    images = [tiny.picture(seed) for seed in (3, 4)]
    found, wanted = both(vlm, images, ROWS, **SAMPLED[settings])
    assert torch.equal(found, wanted)
    if SAMPLED[settings]["do_sample"]:
        assert not torch.equal(found, both(vlm, images, ROWS, seed=9, **SAMPLED[settings])[0]), "nothing was drawn"


def test_pictures_spliced_by_the_reference_code_and_text_alone_are_sampled_fast_too() -> None:
    vlm = compiled("llava", "feature_norm")
    rows = [[tiny.picture(1), tiny.picture(2)], None]
    for images, text in ((None, "hello"), (rows, ["what are these?", "hello"])):
        found, wanted = both(vlm, images, text, do_sample=True, repetition_penalty=1.5)
        assert torch.equal(found, wanted)


def test_an_answer_ends_at_a_stop_string_or_an_end_token_as_on_the_reference_path() -> None:
    vlm = compiled("llava", "feature_norm")
    images = [tiny.picture(seed) for seed in (1, 2)]
    whole, _ = both(vlm, images, ROWS, do_sample=False)
    tokenizer = vlm.backbone.tokenizer
    stop = tokenizer.decode(whole[0, 1:3])
    for text, pictures in ((ROWS, images), (ROWS[0], images[:1])):
        found, wanted = both(
            vlm, pictures, text, do_sample=False, stop_strings=[stop], tokenizer=tokenizer, max_new_tokens=6
        )
        assert torch.equal(found, wanted)
    assert found.shape[1] < 6, "nothing was stopped"
    end = int(whole[0, 2])
    found, wanted = both(vlm, images, ROWS, do_sample=False, repetition_penalty=1.0001, eos_token_id=end)
    assert torch.equal(found, wanted) and (found[0] == end).any()


def test_processors_and_criteria_of_the_caller_see_what_they_see_on_the_reference_path() -> None:
    class Spy(LogitsProcessor):
        def __init__(self) -> None:
            self.seen: list[list[list[int]]] = []

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            self.seen.append(input_ids.tolist())
            return scores

    class AfterThree(StoppingCriteria):
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            self.calls += 1
            return torch.full((len(input_ids),), self.calls % 3 == 0)

    for family in ("llava", "llava_next", "llava_onevision", "qwen2_5_vl"):
        vlm, spy = compiled(family, "feature_norm"), Spy()
        images = [tiny.picture(seed) for seed in (1, 2)]
        asked: dict[str, Any] = {"logits_processor": [spy], "stopping_criteria": [AfterThree()], "do_sample": False}
        found, wanted = both(vlm, images, ROWS, **asked)
        assert torch.equal(found, wanted) and found.shape == (2, 3)
        assert spy.seen[:3] == spy.seen[3:] and len(spy.seen) == 6, family


class Heard:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.values: list[list[Any]] = []
        self.ends = 0

    def put(self, value: Any) -> None:
        assert value.device.type == "cpu"
        self.values.append(value.tolist())

    def end(self) -> None:
        self.ends += 1


@pytest.mark.parametrize("settings", [{"do_sample": False}, {"do_sample": True}])
@pytest.mark.parametrize("family", ["llava", "llava_next"])
def test_a_streamer_is_given_what_the_reference_path_gives_it(family: str, settings: dict[str, Any]) -> None:
    vlm = compiled(family, "feature_norm")
    images = [tiny.picture(seed) for seed in (1, 2)]
    heard = [Heard(), Heard()]
    fast, answers = vlm.fast, []
    for own, streamer in zip((fast, None), heard, strict=True):
        vlm.fast = own
        torch.manual_seed(0)
        answers.append(vlm.generate(images, ROWS, max_new_tokens=4, return_ids=True, streamer=streamer, **settings))
    assert torch.equal(*answers)
    assert heard[0].values == heard[1].values and len(heard[0].values) == 5 and heard[0].ends == heard[1].ends == 1


def test_the_pieces_of_a_stream_are_the_answer() -> None:
    vlm = compiled("llava", "feature_norm")
    decoder, vlm.decoder = vlm.decoder, NoReference()
    pieces = list(vlm.stream([tiny.picture(1)], "what?", max_new_tokens=6, do_sample=False))
    vlm.decoder = decoder
    assert "".join(pieces).strip() == vlm.generate([tiny.picture(1)], "what?", max_new_tokens=6, do_sample=False)


def test_tokens_may_be_chosen_by_who_runs_the_steps() -> None:
    vlm = compiled("llava", "feature_norm")
    request = vlm.fast.start(vlm.prepare([[tiny.picture(1)]], ["what?"]))
    second = [token.tolist() for token in vlm.fast.tokens(request, 4, lambda logits: logits.topk(2).indices[:, 1])]
    request = vlm.fast.start(vlm.prepare([[tiny.picture(1)]], ["what?"]))
    first = [token.tolist() for token in vlm.fast.tokens(request, 4, lambda logits: logits.argmax(-1))]
    wanted = both(vlm, [tiny.picture(1)], "what?", do_sample=False, max_new_tokens=4)[1]
    assert [token for (token,) in first] == wanted[0].tolist() and first[0] != second[0]


@pytest.mark.parametrize(
    ("kwargs", "sentence"),
    [
        ({"do_sample": True, "num_beams": 3}, "num_beams=3 asks for more"),
        ({"do_sample": True, "num_return_sequences": 2}, "num_return_sequences=2 asks for more"),
        ({"do_sample": True, "return_dict_in_generate": True}, "return_dict_in_generate=True asks for more"),
        ({"do_sample": True, "max_new_tokens": None}, "max_new_tokens is not given"),
    ],
)
def test_what_needs_another_loop_is_named(kwargs: dict[str, Any], sentence: str) -> None:
    config = tiny.build("llava")[0].generation_config
    with pytest.raises(NotCompiled, match=sentence):
        read_decoding(config, {"max_new_tokens": 4, **kwargs})


def test_what_a_model_s_own_settings_ask_for_is_done_on_the_fast_path() -> None:
    vlm = compiled("llava", "feature_norm")
    config = vlm.base.generation_config
    before = config.repetition_penalty
    config.repetition_penalty = 3.0
    try:
        found, wanted = both(vlm, [tiny.picture(1)], "what?", do_sample=False)
    finally:
        config.repetition_penalty = before
    assert torch.equal(found, wanted)
    assert not torch.equal(found, both(vlm, [tiny.picture(1)], "what?", do_sample=False)[0])


def test_cuts_between_layers_are_sampled_by_the_reference_path() -> None:
    vlm = compiled("llava", "fastv")
    with pytest.raises(NotCompiled, match="drops inside the language model, where only greedy"):
        vlm.fast.generate(vlm.prepare([[tiny.picture(1)]], ["what?"]), max_new_tokens=2, steering={"do_sample": True})
    torch.manual_seed(0)
    assert isinstance(vlm.generate([tiny.picture(1)], "what?", max_new_tokens=2, do_sample=True), str)
