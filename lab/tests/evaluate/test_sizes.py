"""Scenes through the runner on models with their own processor: ragged pictures and tiles."""

import pytest
import torch

from diffprune.evaluate.encoded import EncodedQuestions, encode_questions, question_batches
from diffprune.evaluate.runner import Measurement, answer, choose, evaluate
from diffprune.evaluate.throttled import Throttle
from diffprune.methods.options import build_method
from diffprune.model import PrunedVLM
from diffprune_lab.scenes import make_scene
from diffprune_lab.scenes.captions import item_regions
from diffprune_lab.scenes.encode import encode_scenes, scene_images
from diffprune_lab.scenes.oracle import items
from diffprune_lab.scenes.pixels import takes_pixels
from diffprune_lab.scenes.sizes import picture_size
from diffprune_lab.scenes.source import SCENES_TASKS, ScenesQuestions
from lab.tests import tiny_scenes
from tests import tiny

WAYS = {"qwen2_5_vl": "varying", "llava_next": "384"}
FAMILIES = [*WAYS, "qwen3_vl", "internvl", "idefics3", "llava_onevision", "llava"]
NEEDS = frozenset({"cls_attention", "keys"})


def pruned(family: str, method="full", keep: int | float = 1.0, **options) -> PrunedVLM:
    return PrunedVLM(*tiny.build(family), method=method, keep=keep, **options)


_encoded: dict[str, EncodedQuestions] = {}


def encoded_of(family: str) -> EncodedQuestions:
    if family not in _encoded:
        vlm = pruned(family)
        needs = NEEDS & vlm.backbone.provides
        sizes = WAYS.get(family, "varying")
        _encoded[family] = encode_questions(
            vlm, SCENES_TASKS.build(("gqa", "mme"), count=2, sizes=sizes), needs=needs, batch_size=2
        )
    return _encoded[family]


def pictures_of(encoded: EncodedQuestions) -> list:
    questions = encoded.questions
    assert isinstance(questions, ScenesQuestions)
    images = scene_images(encoded.images, questions.sizes)
    return [images[row] for (row,) in encoded.rows]


def same_as_generate(family: str, method, keep: int | float) -> None:
    encoded = encoded_of(family)
    torch.manual_seed(0)
    vlm = pruned(family, method, keep)
    if method == "diffprune":
        torch.nn.init.normal_(vlm.method.scorer.head.weight)  # it starts with all logits equal
    ours = answer(vlm, encoded, keep=keep, batch_size=4, max_new_tokens=3)
    theirs = [
        vlm.generate([image], prompt, keep=keep, max_new_tokens=3, do_sample=False)
        for image, prompt in zip(pictures_of(encoded), encoded.prompts, strict=True)
    ]
    assert ours == theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_put_together_as_its_processor_would_have_it(family: str) -> None:
    encoded, vlm = encoded_of(family), pruned(family, "uniform_grid", 0.4)
    pictures = pictures_of(encoded)
    for (index,), batch in question_batches(vlm, encoded, batch_size=1):
        theirs = vlm.prepare([pictures[index]], [encoded.prompts[index]])
        assert torch.equal(batch.features["input_ids"], theirs.features["input_ids"])
        tokens = encoded.tokens.take(encoded.rows[index])
        ours, expected = vlm.lm_inputs(batch, tokens), vlm.lm_inputs(theirs, vlm.encode(theirs))
        assert torch.equal(ours.position_ids, expected.position_ids)
        assert torch.equal(ours.visual, expected.visual)
        torch.testing.assert_close(ours.inputs_embeds, expected.inputs_embeds, atol=1e-4, rtol=1e-4)
    lengths = {len(ids) for ids in encoded.ids}
    assert len(lengths) > 1


@pytest.mark.parametrize("family", WAYS)
@pytest.mark.parametrize(
    ("method", "keep"), [("full", 1.0), ("random", 9), ("uniform_grid", 0.333), ("diffprune", 0.1), ("fastv", 0.5)]
)
def test_answers_are_those_of_generate_whatever_the_pictures_size(family: str, method: str, keep: int | float) -> None:
    same_as_generate(family, method, keep)


@pytest.mark.parametrize("family", WAYS)
def test_the_oracle_knows_pictures_of_any_size(family: str) -> None:
    same_as_generate(family, encoded_of(family).oracle(), 6)


@pytest.mark.parametrize("family", WAYS)
def test_a_share_is_taken_of_each_picture_s_own_tokens(family: str) -> None:
    encoded = encoded_of(family)
    counts = encoded.tokens.counts
    assert (len(set(counts.tolist())) > 1) == (family == "qwen2_5_vl")  # ragged
    chosen = choose(pruned(family, "random"), encoded.tokens, keep=0.333, batch_size=2)
    assert chosen is not None
    assert (chosen >= 0).sum(-1).tolist() == [int(0.333 * count + 0.5) for count in counts.tolist()]


@pytest.mark.parametrize("family", WAYS)
def test_an_item_is_seen_where_it_lies_in_the_picture(family: str) -> None:
    """Tokens that look at an item are those whose field of view meets its box, in the large view and the overview."""
    scenes = [make_scene("test", index, kind="sign") for index in range(3)]
    sizes = WAYS[family]
    tokens = encode_scenes(pruned(family), scenes, sizes=sizes).tokens
    regions = item_regions(tokens, scenes, sizes)
    assert regions is not None and not (regions & ~tokens.mask).any()
    for row, scene in enumerate(scenes):
        height, width = picture_size(scene, sizes)
        mask = torch.zeros(height, width, dtype=torch.bool)
        for x0, y0, x1, y1 in items(scene, (height, width)):
            mask[int(y0 + 0.999) : int(y1), int(x0 + 0.999) : int(x1)] = True
        for token in range(int(tokens.counts[row])):
            x0, y0, x1, y1 = (round(value) for value in tokens.boxes[row, token].tolist())
            if mask[y0:y1, x0:x1].any():
                assert regions[row, token]
        share = regions[row].sum() / tokens.counts[row]
        assert 0 < share < 1
    if family == "llava_next":
        side = pruned(family).backbone.side
        assert regions[:, : side**2].any() and regions[:, side**2 :].any()


@pytest.mark.parametrize("family", WAYS)
def test_a_run_is_scored_and_throttled_answers_are_the_same_in_any_batch(family: str) -> None:
    encoded = encoded_of(family)
    vlm = pruned(family)
    answers = evaluate(vlm, encoded, [Measurement("random", 0.2, 0, build_method("random"))], batch_size=3)
    assert [len(one.said) for one in answers] == [len(encoded.prompts)] * 2
    torch.manual_seed(0)
    learned = pruned(family, "diffprune")
    throttle = Throttle(tau=0.1)
    several, one = (
        answer(learned, encoded, keep=0.2, throttle=throttle, batch_size=size, max_new_tokens=2) for size in (4, 1)
    )
    assert several == one


def test_blind_questions_have_no_picture() -> None:
    encoded, vlm = encoded_of("qwen2_5_vl"), pruned("qwen2_5_vl")
    ours = answer(vlm, encoded, keep=1.0, blind=True, batch_size=4, max_new_tokens=2)
    assert ours == [vlm.generate(None, prompt, max_new_tokens=2, do_sample=False) for prompt in encoded.prompts]


def test_pixels_go_straight_to_the_tower_only_at_its_own_size() -> None:
    vlm = tiny_scenes.pruned()
    assert takes_pixels(vlm.backbone, "fixed") and not takes_pixels(vlm.backbone, "384")
    assert not takes_pixels(pruned("llava").backbone, "fixed") and not takes_pixels(
        pruned("llava_next").backbone, "fixed"
    )
    large = encode_scenes(vlm, [make_scene("test", 0)], sizes="384").tokens
    assert large.x.shape[1] == tiny_scenes.NUM_VISUAL  # the processor made it small again
