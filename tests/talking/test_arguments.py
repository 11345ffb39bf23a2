"""Every argument of transformers' `generate`: as the stock model on the masked full prompt, or refused by name."""

import inspect
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, WatermarkingConfig
from transformers.generation.utils import GenerationMixin

from diffprune.arguments import MADE_HERE, REFUSED, check_arguments
from diffprune.model import PrunedVLM
from tests import tiny
from tests.contracts.vlm import EveryOther, pruned, splice_all, stays

PICTURES = [tiny.picture(1, (100, 70)), tiny.picture(2, (64, 120))]
QUESTIONS = ["what is it?", "where is the small red thing, please?"]
SAMPLED: dict[str, Any] = {"do_sample": True}


class Reversed:
    """A logits processor that turns the order round."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return -scores


class AfterThree:
    """A stopping criterion: three new tokens."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls += 1
        return torch.full((len(ids),), self.calls >= 3)


# Arguments that do what they do to the stock model, each with what it is tried with.
TRIED: dict[str, dict[str, Any]] = {
    "max_new_tokens": {"max_new_tokens": 3},
    "min_new_tokens": {"min_new_tokens": 4, "eos_token_id": list(range(0, 200))},
    "eos_token_id": {"eos_token_id": list(range(0, 200))},
    "pad_token_id": {"eos_token_id": list(range(0, 200)), "pad_token_id": 7},
    "do_sample": SAMPLED,
    "temperature": SAMPLED | {"temperature": 0.3},
    "top_k": SAMPLED | {"top_k": 4},
    "top_p": SAMPLED | {"top_p": 0.5},
    "min_p": SAMPLED | {"min_p": 0.3},
    "top_h": SAMPLED | {"top_h": 0.4},
    "typical_p": SAMPLED | {"typical_p": 0.5},
    "epsilon_cutoff": SAMPLED | {"epsilon_cutoff": 0.01},
    "eta_cutoff": SAMPLED | {"eta_cutoff": 0.01},
    "renormalize_logits": SAMPLED | {"top_k": 4, "renormalize_logits": True},
    "num_beams": {"num_beams": 3},
    "length_penalty": {"num_beams": 3, "length_penalty": 3.0, "eos_token_id": list(range(0, 60))},
    "early_stopping": {"num_beams": 3, "early_stopping": True, "eos_token_id": list(range(0, 60))},
    "num_return_sequences": {"num_beams": 3, "num_return_sequences": 2},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[n] for n in range(100, 250)]},
    "suppress_tokens": {"suppress_tokens": list(range(100, 250))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(100, 250))},
    "forced_bos_token_id": {"forced_bos_token_id": 65},
    "forced_eos_token_id": {"forced_eos_token_id": 66},
    "sequence_bias": {"sequence_bias": [[[65], 50.0]]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (2, 4.0), "eos_token_id": 70},
    "remove_invalid_values": {"remove_invalid_values": True},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "max_time": {"max_time": 1e6},
    "cache_implementation": {"cache_implementation": "static", "disable_compile": True},
    "generation_config": {
        "generation_config": GenerationConfig(max_new_tokens=4, repetition_penalty=1.7, pad_token_id=0)
    },
    "logits_processor": {"logits_processor": LogitsProcessorList([Reversed()])},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: [65, 66, 67 + row]},
    "synced_gpus": {"synced_gpus": False},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "output_logits": {"output_logits": True, "return_dict_in_generate": True},
    "return_dict_in_generate": {"return_dict_in_generate": True},
}
SHOWN_ELSEWHERE = {
    "streamer": "tests/talking/test_streaming.py",
    "stopping_criteria": "below",
    "stop_strings": "below",
    "output_attentions": "of the pruned sequence, so of another width",
    "output_hidden_states": "of the pruned sequence, so of another width",
    "kwargs": "the names of the configuration",
    "disable_compile": "with cache_implementation",
    "compile_config": "only with a compiled cache, on a GPU",
    "cache_config": "only with a quantised cache, which needs an extra package",
    "max_cache_len": "only with a static cache: its least size",
    "bos_token_id": "only without a prompt",
    "decoder_start_token_id": "only of encoder-decoder models",
    "transformers_version": "no setting",
    "_from_model_config": "no setting",
}


def stock(vlm: PrunedVLM, batch: Any, mask: torch.Tensor, **kwargs: Any) -> Any:
    """The untouched model's own `generate` on the full prompt with the dropped tokens masked."""
    tokens = vlm.encode(batch)
    assert tokens is not None
    positions = vlm.backbone.generation_positions(replace(splice_all(vlm, batch, tokens), attention_mask=mask))
    torch.manual_seed(3)
    with torch.no_grad():
        return vlm.base.generate(**{**batch.features, "attention_mask": mask}, position_ids=positions, **kwargs)


def test_every_argument_is_tried_or_refused() -> None:
    names = {*GenerationConfig().to_dict(), *inspect.signature(GenerationMixin.generate).parameters} - {"self"}
    assert not names - TRIED.keys() - SHOWN_ELSEWHERE.keys() - REFUSED.keys() - set(MADE_HERE)
    assert not TRIED.keys() & REFUSED.keys()


MORE = [pytest.param(name, marks=pytest.mark.slow) for name in ("llava", "paligemma")]


@pytest.mark.parametrize("family", ["qwen2_5_vl", *MORE])
def test_arguments_do_what_they_do_to_the_stock_model(family: str) -> None:
    vlm = pruned(family, EveryOther(), keep=5)
    batch = vlm.prepare(PICTURES, QUESTIONS)
    mask = stays(batch, vlm.logits(batch)[1]).long()
    length = mask.shape[1]
    wrong, plain = [], None
    for name, tried in {"nothing": {}, **TRIED}.items():
        if family == "paligemma" and name == "cache_implementation":
            continue
        kwargs = {} if "generation_config" in tried else {"max_new_tokens": 6, "pad_token_id": vlm.backbone.pad_id}
        kwargs |= tried
        wanted = stock(vlm, batch, mask, **kwargs)
        torch.manual_seed(3)
        ours = vlm.generate(PICTURES, QUESTIONS, return_ids=True, **kwargs)
        for key in ("scores", "logits"):
            if (values := getattr(wanted, key, None)) is not None:
                torch.testing.assert_close(torch.stack(getattr(ours, key)), torch.stack(values), rtol=1e-4, atol=1e-4)
        ours, wanted = (out if isinstance(out, torch.Tensor) else out.sequences for out in (ours, wanted))
        plain = ours if name == "nothing" else plain
        if not torch.equal(ours, wanted[:, length:]):
            wrong.append(name)
    assert wrong == []
    assert plain is not None and plain.shape == (2, 6)


REFUSALS: dict[str, Any] = {
    "assistant_model": object(),
    "prompt_lookup_num_tokens": 3,
    "encoder_repetition_penalty": 1.5,
    "encoder_no_repeat_ngram_size": 2,
    "guidance_scale": 1.5,
    "use_cache": False,
    "max_length": 40,
    "min_length": 40,
    "prefill_chunk_size": 8,
    "num_beam_groups": 2,
    "custom_generate": "someone/loop",
    "dola_layers": "high",
    "token_healing": True,
}


@pytest.mark.parametrize("name", sorted(REFUSALS))
def test_what_would_change_answers_silently_is_refused_by_name(name: str) -> None:
    for method in ("divprune", "fastv"):
        vlm = pruned("llava", method, keep=5)
        with pytest.raises(ValueError, match=rf"{name}=.*cannot be given"):
            vlm.generate([PICTURES[0]], "what?", **{name: REFUSALS[name]})


def test_settings_of_a_generation_config_are_refused_as_well() -> None:
    vlm = pruned("llava", "divprune", keep=5)
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens=3 cannot"):
        vlm.generate([PICTURES[0]], "what?", generation_config=GenerationConfig(prompt_lookup_num_tokens=3))
    own = SimpleNamespace(generation_config=GenerationConfig(encoder_repetition_penalty=1.5))
    with pytest.raises(ValueError, match="encoder_repetition_penalty=1"):
        check_arguments(own, {})
    check_arguments(SimpleNamespace(generation_config=GenerationConfig(max_length=4096, use_cache=True)), {})


@pytest.mark.parametrize("name", ["divprune", "fastv"])
def test_criteria_processors_and_scores_work_inside_the_language_model_too(name: str) -> None:
    vlm = pruned("llava", name, keep=1.0)  # with everything kept, both are the stock model
    batch = vlm.prepare([PICTURES[0]], [QUESTIONS[0]])
    full = stock(vlm, batch, batch.features["attention_mask"], max_new_tokens=6, do_sample=False)
    kwargs: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    criteria = StoppingCriteriaList([AfterThree()])  # type: ignore[list-item]
    out = vlm.generate([PICTURES[0]], [QUESTIONS[0]], max_new_tokens=6, stopping_criteria=criteria, **kwargs)
    length = batch.features["input_ids"].shape[1]
    assert torch.equal(out.sequences, full[:, length : length + 3])
    assert len(out.scores) == len(out.logits) == 3
    turned = vlm.generate([PICTURES[0]], [QUESTIONS[0]], max_new_tokens=6, logits_processor=[Reversed()], **kwargs)
    assert turned.sequences[0, 0] == out.logits[0].argmin() and torch.equal(turned.scores[0], -turned.logits[0])


def test_stop_strings_end_an_answer_as_in_the_stock_model() -> None:
    model, processor = tiny.always_says("q")
    vlm = PrunedVLM(model, processor, method=EveryOther(), keep=5)
    model.generation_config.eos_token_id = None
    ids = vlm.generate(
        PICTURES[:1], ["a"], max_new_tokens=6, return_ids=True, stop_strings=["q"], tokenizer=processor.tokenizer
    )
    assert ids.shape == (1, 1)


@pytest.mark.parametrize("key", ["attention_mask", "pixel_values", "inputs_embeds", "position_ids"])
def test_what_is_made_here_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} is made by the pruned path"):
        pruned("llava").generate(PICTURES[:1], "what?", **{key: torch.zeros(1, 1)})


def test_the_docs_list_every_argument(root: Path) -> None:
    page = (root / "docs/chat.md").read_text()
    assert [name for name in (*TRIED, *REFUSED) if f"`{name}`" not in page] == []
