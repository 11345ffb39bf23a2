"""Features made on the device: what the processor would give, for the sizes it leaves alone."""

import pytest
import torch

from diffprune.evaluate.encoded import encode_questions
from diffprune.evaluate.pictures import ANY_QUESTION, placeholder_ids
from diffprune.evaluate.runner import answer
from diffprune.model import PrunedVLM
from diffprune_lab.scenes import make_scene
from diffprune_lab.scenes.captions import INSTRUCTION, caption_batch
from diffprune_lab.scenes.encode import encode_scenes, scene_images
from diffprune_lab.scenes.pixels import make_features, takes_pixels
from diffprune_lab.scenes.sizes import draw_sized
from diffprune_lab.scenes.source import SCENES_TASKS
from lab.tests import tiny_scenes, tiny_sized
from tests import tiny

WAYS = {"llava": "fixed", **tiny_sized.WAYS}
SCENES = [make_scene("test", index) for index in range(4)]


def pruned(family: str, *arguments, **options) -> PrunedVLM:
    build = (
        tiny_scenes.pruned if family == "llava" else lambda *given, **more: tiny_sized.pruned(family, *given, **more)
    )
    return build(*arguments, **options)


@pytest.mark.parametrize(("family", "sizes"), WAYS.items())
def test_features_are_those_of_the_processor(family: str, sizes: str) -> None:
    vlm = pruned(family)
    assert takes_pixels(vlm.backbone, sizes)
    theirs = vlm.prepare(scene_images(SCENES, sizes), [ANY_QUESTION] * 4)
    ours = make_features(vlm.backbone, draw_sized(SCENES, sizes))
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs.features[name], atol=2e-6, rtol=1e-5, msg=name)
    assert set(theirs.features) - set(ours) <= {"input_ids", "attention_mask", "mm_token_type_ids"}


@pytest.mark.parametrize(("family", "sizes"), WAYS.items())
def test_pictures_are_encoded_as_through_the_processor(family: str, sizes: str) -> None:
    vlm = pruned(family)
    batch = vlm.prepare(scene_images(SCENES, sizes), [ANY_QUESTION] * 4)
    theirs = vlm.encode(batch)
    ours = encode_scenes(vlm, SCENES, sizes=sizes)
    assert theirs is not None
    assert ours.placeholders == placeholder_ids(vlm, batch)
    assert ours.tokens.seeds == theirs.seeds and ours.tokens.grid == theirs.grid
    torch.testing.assert_close(ours.tokens.x, theirs.x, atol=1e-4, rtol=1e-4)
    for name in ("mask", "boxes", "slots", "segment", "coords"):
        value, wanted = getattr(ours.tokens, name), getattr(theirs, name)
        assert value is wanted is None or torch.equal(value, wanted), name
    for name, value in ours.features.items():
        assert torch.equal(value, batch.features[name])


@pytest.mark.parametrize(("family", "sizes"), WAYS.items())
def test_a_caption_batch_is_what_prepare_would_give(family: str, sizes: str) -> None:
    vlm = pruned(family, "diffprune", 0.2)
    texts = ["a red star", "two", "a very small blue ring and a sign", "a cross"]
    batch, tokens = caption_batch(vlm, SCENES, texts, sizes)
    theirs = vlm.prepare(scene_images(SCENES, sizes), [INSTRUCTION] * 4, texts)
    assert torch.equal(batch.features["input_ids"], theirs.features["input_ids"])
    assert torch.equal(batch.features["attention_mask"], theirs.features["attention_mask"])
    assert batch.labels is not None and theirs.labels is not None and torch.equal(batch.labels, theirs.labels)
    ours = vlm.loss(batch, tokens=tokens, hard=True)
    torch.testing.assert_close(ours, vlm.loss(theirs, hard=True), atol=1e-4, rtol=1e-4)


def test_a_caption_batch_has_what_the_method_needs() -> None:
    class Needy(type(pruned("llava", "diffprune").method)):
        needs = frozenset({"text", "projected", "cls_attention"})

    vlm = pruned("llava", "diffprune", 4)
    vlm.method.__class__ = Needy
    _, tokens = caption_batch(vlm, SCENES, ["one"] * 4)
    assert tokens.text is not None and tokens.projected is not None and tokens.cls_attention is not None


@pytest.mark.parametrize(
    ("family", "sizes"), [("llava", "384"), ("llava", "varying"), ("llava_next", "fixed"), ("llava_next", "varying")]
)
def test_sizes_that_the_processor_changes_are_left_to_it(family: str, sizes: str) -> None:
    assert not takes_pixels(pruned(family).backbone, sizes)


def test_families_that_are_not_known_and_units_that_do_not_fit_are_left_to_the_processor() -> None:
    for family in ("internvl", "paligemma", "qwen2_5_vl"):  # that one has 28 x 28 pixels a token
        assert not takes_pixels(PrunedVLM(*tiny.build(family)).backbone, "varying")


@pytest.mark.parametrize(("family", "sizes"), tiny_sized.WAYS.items())
def test_answers_to_pictures_drawn_on_the_device_are_those_of_generate(family: str, sizes: str) -> None:
    questions = SCENES_TASKS.build(("gqa", "textvqa"), count=3, sizes=sizes)
    encoded = encode_questions(pruned(family), questions, batch_size=4)
    images = scene_images(encoded.images, sizes)
    for method, keep in (("full", 1.0), ("random", 0.333), (encoded.oracle(), 5)):
        vlm = pruned(family, method, keep)
        ours = answer(vlm, encoded, keep=keep, batch_size=4, max_new_tokens=3)
        theirs = [
            vlm.generate([images[row]], prompt, keep=keep, max_new_tokens=3, do_sample=False)
            for (row,), prompt in zip(encoded.rows, encoded.prompts, strict=True)
        ]
        assert ours == theirs
