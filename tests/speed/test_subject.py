"""Models with a method around them, and the prompts they are timed on."""

from typing import Any

import pytest
import torch

from diffprune.speed.subject import load_subject, with_method
from tests.speed.sample import batch_of


def test_a_prompt_has_exactly_the_text_tokens_asked_for(subject):
    batch = batch_of(subject, num_text=37)
    ids = batch.features["input_ids"]
    assert ids.shape == (2, 12 + 37)
    assert int((ids == subject.backbone.image_token_id).sum()) == 2 * 12
    assert not torch.equal(*batch.features["pixel_values"].chunk(2))
    with pytest.raises(ValueError, match="5 text tokens are fewer than the prompt's own"):
        batch_of(subject, num_text=5)


def test_a_scorer_without_weights_is_given_some_that_rank(subject):
    vlm = with_method(subject, "diffprune", keep=3, dtype=torch.float32)
    tokens = vlm.encode(batch_of(subject))
    assert tokens is not None
    assert len(vlm.method.score(tokens)[0].unique()) == 12  # type: ignore[operator]


def test_random_weights_are_there_for_known_sizes_alone():
    options: dict[str, Any] = dict(random_weights=True, tiny=True, device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match="'mystery' is not known; random weights are there for llava"):
        load_subject("mystery", **options)
    with pytest.raises(
        ValueError, match=r"'qwen3-vl-2b' is known, but its size cannot be built .* leave --random-weights"
    ):
        load_subject("qwen3-vl-2b", **options)
    with pytest.raises(ValueError, match=r"7.1 billion parameters and there is no GPU .* 26 GiB .* --size tiny"):
        load_subject("llava-1.5-7b", **{**options, "tiny": False})
