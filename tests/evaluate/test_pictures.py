"""Pictures encoded before their prompts are known: the same tokens, ids and positions as in one call."""

import pytest
import torch

from diffprune.evaluate.encoded import encode_questions, question_batches
from diffprune.evaluate.pictures import EncodedPictures, encode_images, prompt_ids
from diffprune.model import PrunedVLM
from tests import tiny
from tests.evaluate.memory import MEMORY, PICTURES

NEEDS = frozenset({"cls_attention", "keys"})
FAMILIES = ["llava", "llava_next", "llava_onevision", "qwen2_5_vl", "qwen3_vl", "internvl", "idefics3", "smolvlm"]
FAMILIES += ["paligemma", "qwen2_vl"]


def pruned(family: str, method="full", keep: int | float = 1.0) -> PrunedVLM:
    return PrunedVLM(*tiny.build(family), method=method, keep=keep)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_put_together_as_its_processor_would_have_it(family: str) -> None:
    """With one picture, with two and with none."""
    vlm = pruned(family, "uniform_grid", 0.4)
    encoded = encode_questions(vlm, MEMORY.build(["words"], count=4), batch_size=2)
    for (index,), batch in question_batches(vlm, encoded, batch_size=1):
        images = list(encoded.asked[index].images)
        theirs = vlm.prepare([images or None], [encoded.prompts[index]])
        assert torch.equal(batch.features["input_ids"], theirs.features["input_ids"])
        tokens = encoded.tokens.take(encoded.rows[index]) if images else None
        ours, expected = vlm.lm_inputs(batch, tokens), vlm.lm_inputs(theirs, vlm.encode(theirs))
        assert torch.equal(ours.position_ids, expected.position_ids)
        assert torch.equal(ours.visual, expected.visual)
        torch.testing.assert_close(ours.inputs_embeds, expected.inputs_embeds, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen2_5_vl", "qwen3_vl"])
def test_joined_batches_are_what_one_batch_gives(family: str) -> None:
    vlm = pruned(family)
    needs = NEEDS & vlm.backbone.provides
    whole = encode_images(vlm, PICTURES, needs)
    joined = EncodedPictures.join([encode_images(vlm, part, needs) for part in (PICTURES[:2], PICTURES[2:])])
    assert joined.tokens.grid == whole.tokens.grid and joined.tokens.seeds == whole.tokens.seeds
    assert joined.placeholders == whole.placeholders and set(joined.features) == set(whole.features)
    assert len(joined.tokens.planes) == len(whole.tokens.planes) == (0 if family != "qwen3_vl" else 2)
    for name in ("x", "mask", "boxes", "coords", "segment", "slots", "cls_attention", "keys", "planes"):
        ours, theirs = getattr(joined.tokens, name), getattr(whole.tokens, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            torch.testing.assert_close(ours, theirs, msg=name, atol=1e-4, rtol=1e-4)


def test_a_prompt_with_its_own_placeholder_keeps_it_in_place() -> None:
    vlm = pruned("llava")
    (ids,) = prompt_ids(vlm, ["before <image> after"], [[(7, 8, 9)]])
    before, after = (
        vlm.backbone.tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("before ", " after")
    )
    assert ids[-len(before) - 3 - len(after) :] == (*before, 7, 8, 9, *after)
