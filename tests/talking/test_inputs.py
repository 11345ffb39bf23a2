"""`generate(**inputs)` takes what the family's own processor gives and answers as the stock model does."""

from typing import Any

import pytest
import torch

from diffprune.registry import BACKBONES
from tests import tiny
from tests.contracts.vlm import EveryOther, pruned

FAMILIES = [name for name in BACKBONES.names() if name != "deit"]
PICTURES = [[tiny.picture(1, (100, 70))], [tiny.picture(2, (64, 120)), tiny.picture(3, (150, 60))], []]
QUESTIONS = ["what is it?", "compare the two, please", "hello there"]
STEPS: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_processor_s_output_answers_as_its_pictures_do(family: str) -> None:
    vlm = pruned(family)
    batch = vlm.prepare(PICTURES, QUESTIONS)
    inputs = {key: value for key, value in batch.features.items() if key != "token_type_ids"}
    sequences = vlm.generate(**inputs, **STEPS)
    with torch.no_grad():
        stock = vlm.base.generate(**batch.features, **STEPS)
    assert torch.equal(sequences, stock)
    few = pruned(family, EveryOther(), keep=5)
    ids = few.generate(PICTURES, QUESTIONS, return_ids=True, **STEPS)
    assert torch.equal(few.generate(**inputs, **STEPS)[:, inputs["input_ids"].shape[1] :], ids)
    read = few.backbone.read(inputs)
    assert read.row_of_image == batch.row_of_image and len(set(read.seeds)) == 3
    for image, row in enumerate(batch.row_of_image):  # what is drawn for a picture is the same in any batch
        alone = {
            key: value for key, value in vlm.prepare(PICTURES[row : row + 1], QUESTIONS[row : row + 1]).features.items()
        }
        place = sum(other == row for other in batch.row_of_image[:image])
        assert few.backbone.read(alone).seeds[place] == read.seeds[image]


def test_what_is_no_processor_s_output_is_refused_in_a_sentence() -> None:
    vlm = pruned("llava")
    inputs = vlm.prepare(PICTURES[:1], QUESTIONS[:1]).features
    with pytest.raises(ValueError, match="give the prompt once"):
        vlm.generate(PICTURES[0], "what?", **inputs)
    with pytest.raises(ValueError, match="placeholders but the pictures fill"):
        vlm.generate(
            **{**inputs, "input_ids": inputs["input_ids"][:, :10], "attention_mask": inputs["attention_mask"][:, :10]}
        )
    with pytest.raises(ValueError, match='padding_side="left"'):
        mask = inputs["attention_mask"].clone()
        mask[:, -1] = 0
        vlm.generate(**{**inputs, "attention_mask": mask})
    with pytest.raises(ValueError, match="videos are not pruned"):
        vlm.generate(**inputs, pixel_values_videos=inputs["pixel_values"])
    with pytest.raises(ValueError, match="return_tensors"):
        vlm.generate(input_ids=[[1, 2]])
    with pytest.raises(ValueError, match="no image was given"):
        vlm.generate(input_ids=inputs["input_ids"])
