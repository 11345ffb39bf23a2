"""What is special to the Qwen families: window order, 2 x 2 groups, ragged batches, three-row positions, DeepStack."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from diffprune.model import PrunedVLM
from diffprune.restriction import restrict_planes
from tests import tiny
from tests.contracts.vlm import EveryOther, pruned, splice_all, stays, stock_inputs, throttle

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
QUESTIONS = ["what is it?", "where is the small red thing, please?"]


def ragged_pictures() -> list[Any]:
    """Two prompts, three pictures of different size: rows of visual tokens of different length."""
    return [[tiny.picture(1, (100, 70)), tiny.picture(2, (64, 64))], tiny.picture(3, (150, 110))]


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_the_towers_own_in_raster_order(family: str) -> None:
    vlm = pruned(family)
    batch = vlm.prepare(ragged_pictures(), QUESTIONS)
    tokens = vlm.encode(batch)
    with torch.no_grad():
        stock = vlm.base.model.get_image_features(batch.features["pixel_values"], batch.features["image_grid_thw"])
        ours = vlm.backbone.project(tokens.x)
    assert len(set(tokens.counts.tolist())) == 3, "the rows must differ in length"
    for row, expected in enumerate(stock.pooler_output):
        assert tokens.grid[row][0] * tokens.grid[row][1] == len(expected) == int(tokens.mask[row].sum())
        assert (ours[row, : len(expected)] - expected).abs().max() < 1e-5


def test_the_tiny_towers_window_order_is_not_raster_order() -> None:
    vlm = pruned("qwen2_5_vl")
    grid = vlm.prepare([tiny.picture(1, (112, 112))], [""]).features["image_grid_thw"]
    order, cuts = vlm.backbone.window_order(grid)
    assert order.tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    assert cuts.tolist() == [0, 16, 32, 48, 64]
    assert vlm.backbone.full_blocks == {1}, "the blocks on both sides of the full one attend within windows"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_group_is_the_four_patches_of_one_square(family: str) -> None:
    vlm = pruned(family)
    batch = vlm.prepare([tiny.picture(1, (100, 170))], [""])
    tokens = vlm.encode(batch)
    rows, columns = tokens.grid[0]
    assert tokens.group == 4 and rows > columns > 1
    assert tokens.coords.shape == (1, rows * columns, 4, 2)
    for index in range(rows * columns):
        row, column = divmod(index, columns)
        square = [[2 * row + i, 2 * column + j] for i in (0, 1) for j in (0, 1)]
        assert tokens.coords[0, index].tolist() == square
    with torch.no_grad():
        patches = vlm.backbone.embed_patches(batch.features["pixel_values"], batch.features["image_grid_thw"])
        outputs, _ = vlm.backbone.run_blocks(batch.features["pixel_values"], batch.features["image_grid_thw"], {-1})
    assert torch.equal(outputs[-1], patches), "window order is undone for whatever is taken from the tower"


@pytest.mark.parametrize("family", FAMILIES)
def test_boxes_tile_the_original_picture(family: str) -> None:
    tokens = pruned(family).encode(pruned(family).prepare([tiny.picture(1, (100, 70))], [""]))
    rows, columns = tokens.grid[0]
    boxes = tokens.boxes[0]
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    assert torch.allclose(area.sum(), torch.tensor(7000.0))
    assert boxes[0].tolist() == pytest.approx([0, 0, 100 / columns, 70 / rows])
    assert boxes[-1, 2:].tolist() == pytest.approx([100, 70])


@pytest.mark.parametrize("family", FAMILIES)
def test_dropping_equals_masking_with_several_images_of_different_size(family: str) -> None:
    vlm = pruned(family, EveryOther(), keep=0.4)
    batch = vlm.prepare(ragged_pictures(), QUESTIONS)
    logits, lm = vlm.logits(batch)
    keep = stays(batch, lm)
    with torch.no_grad():
        stock = vlm.base(**stock_inputs(vlm, batch, keep.long())).logits
    for row in range(2):
        assert (stock[row][keep[row]] - logits[row][lm.attention_mask[row].bool()]).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "how", [{"cache_implementation": "static"}, {"num_beams": 2}, {"num_beams": 3, "num_return_sequences": 2}]
)
def test_static_caches_and_beams_keep_the_untouched_models_answer(family: str, how: dict[str, Any]) -> None:
    vlm = pruned(family)
    batch = vlm.prepare(ragged_pictures(), QUESTIONS)
    with torch.no_grad():
        stock = vlm.base.generate(**batch.features, max_new_tokens=5, do_sample=False, **how)
    ours = vlm.generate(ragged_pictures(), QUESTIONS, return_ids=True, max_new_tokens=5, do_sample=False, **how)
    assert torch.equal(ours, stock[:, batch.features["input_ids"].shape[1] :])
    dropped = pruned(family, EveryOther(), keep=2)
    fewer = dropped.generate(ragged_pictures(), QUESTIONS, return_ids=True, max_new_tokens=5, do_sample=False, **how)
    assert fewer.shape == ours.shape


@pytest.mark.parametrize("family", FAMILIES)
def test_a_static_cache_drops_as_a_growing_one_does(family: str) -> None:
    vlm = pruned(family, EveryOther(), keep=3)
    growing, static = (
        vlm.generate(ragged_pictures(), QUESTIONS, return_ids=True, max_new_tokens=6, do_sample=False, **how)
        for how in ({}, {"cache_implementation": "static"})
    )
    assert torch.equal(growing, static)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_runs_and_is_near_single_precision(family: str) -> None:
    model, processor = tiny.build(family)
    half = PrunedVLM(copy.deepcopy(model).to(torch.bfloat16), processor, method=EveryOther(), keep=3)
    single = pruned(family, EveryOther(), keep=3)
    logits, _ = half.logits(half.prepare(ragged_pictures(), QUESTIONS))
    expected, lm = single.logits(single.prepare(ragged_pictures(), QUESTIONS))
    real = lm.attention_mask.bool()
    assert logits.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(logits[real].float(), expected[real], dim=-1).min() > 0.98
    assert isinstance(half.generate([tiny.picture(1)], "what?", max_new_tokens=2), str)


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_kept_on_the_model_are_neither_read_nor_changed(family: str) -> None:
    model, processor = tiny.build(family)
    vlm = PrunedVLM(copy.deepcopy(model), processor, method=EveryOther(), keep=3)
    inner = vlm.base.model
    inner.rope_deltas = None  # whatever other tests left there

    def both() -> list[Tensor]:
        one = vlm.generate([tiny.picture(1, (150, 110))], ["what is it?"], return_ids=True, max_new_tokens=4)
        two = vlm.generate(ragged_pictures(), QUESTIONS, return_ids=True, max_new_tokens=4)
        text = vlm.generate(None, ["hello", "hello you"], return_ids=True, max_new_tokens=4)
        return [one, two, text]

    fresh = both()
    assert inner.rope_deltas is None
    stale = torch.tensor([[-7], [40], [3]])
    inner.rope_deltas = stale
    assert all(torch.equal(a, b) for a, b in zip(fresh, both(), strict=True))
    assert inner.rope_deltas is stale


@pytest.mark.parametrize("family", FAMILIES)
def test_received_attention_is_the_column_mean_of_the_last_full_block(family: str) -> None:
    model, processor = tiny.build(family)
    vlm = PrunedVLM(copy.deepcopy(model), processor)
    batch = vlm.prepare(ragged_pictures(), QUESTIONS)
    tokens = vlm.backbone.encode(batch, frozenset({"cls_attention", "keys"}))
    seen: list[tuple[Any, Tensor]] = []

    def spy(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **kwargs: Any
    ) -> Any:
        seen.append((module, torch.softmax(query @ key.transpose(-1, -2) * scaling, -1).mean((0, 1, 2))))
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)

    AttentionInterface.register("diffprune_test_spy", spy)
    tower = vlm.base.model.visual
    tower.config._attn_implementation = "diffprune_test_spy"
    with torch.no_grad():
        tower(batch.features["pixel_values"], grid_thw=batch.features["image_grid_thw"])
    wanted = tower.blocks[max(vlm.backbone.full_blocks)].attn
    by_image = [weights for module, weights in seen if module is wanted]
    assert len(by_image) == len(tokens)
    for row, weights in enumerate(by_image):
        groups = weights.unflatten(0, (-1, 4)).mean(1)
        if family == "qwen2_5_vl":
            order, _ = vlm.backbone.window_order(batch.features["image_grid_thw"][row : row + 1])
            groups = groups[order.argsort()]
        count = len(groups)
        assert torch.allclose(tokens.cls_attention[row, :count], groups, atol=1e-6)
        assert torch.allclose(tokens.cls_attention[row].sum() * 4, torch.tensor(1.0)), (
            "one image's attention, no other's"
        )
    assert tokens.keys.shape[-1] == tiny.WIDTH


@pytest.mark.parametrize("family", FAMILIES)
def test_images_side_by_side_are_refused_with_the_way_out(family: str) -> None:
    vlm = pruned(family)
    with pytest.raises(ValueError, match=r"<\|vision_start\|><\|image_pad\|><\|vision_end\|> for each"):
        vlm.generate([[tiny.picture(1), tiny.picture(2)]], ["<|image_pad|><|image_pad|> compare"])


# ----------------------------------------------------------------------------------------- DeepStack


def test_every_plane_is_kept_with_the_same_indices() -> None:
    vlm = pruned("qwen3_vl", EveryOther(), keep=3)
    batch = vlm.prepare(ragged_pictures(), QUESTIONS)
    tokens = vlm.encode(batch)
    lm = vlm.lm_inputs(batch, tokens)
    with torch.no_grad():
        stock = vlm.base.model.visual(batch.features["pixel_values"], grid_thw=batch.features["image_grid_thw"])
    keep = EveryOther().select(tokens, vlm.budget.counts(tokens.mask))
    counts = tokens.counts.tolist()
    assert len(stock.deepstack_features) == len(tokens.planes) == 2
    for ours, full in zip(lm.extra["deepstack_visual_embeds"], stock.deepstack_features, strict=True):
        kept = torch.cat([image[index] for image, index in zip(full.split(counts), keep, strict=True)])
        assert (ours - kept).abs().max() < 1e-5
    assert torch.equal(lm.extra["visual_pos_masks"], lm.visual)


def test_without_its_planes_the_answer_changes() -> None:
    vlm = pruned("qwen3_vl")
    batch = vlm.prepare(ragged_pictures(), QUESTIONS)
    logits, lm = vlm.logits(batch)
    lm.extra.clear()
    assert (vlm.backbone.logits(lm) - logits).abs().max() > 1e-2, "DeepStack must matter in the tiny model"


def test_no_hook_is_left_on_the_model_even_after_an_error() -> None:
    vlm = pruned("qwen3_vl", EveryOther(), keep=3)
    module = vlm.base.model.language_model
    vlm.generate([tiny.picture(1)], "what?", max_new_tokens=2)
    assert not module._forward_pre_hooks
    with pytest.raises(ValueError, match="not used by the model"):
        vlm.generate([tiny.picture(1)], "what?", max_new_tokens=2, no_such_option=1)
    assert not module._forward_pre_hooks


def test_planes_are_throttled_with_their_tokens() -> None:
    vlm = pruned("qwen3_vl")
    tokens = vlm.encode(vlm.prepare(ragged_pictures(), QUESTIONS))
    alpha = torch.zeros_like(tokens.mask, dtype=torch.float32)
    alpha[:, 0] = 1.0
    generator = torch.Generator().manual_seed(0)
    for plane, gated in zip(tokens.planes, restrict_planes(tokens, alpha, generator), strict=True):
        assert torch.equal(gated[:, 0], plane[:, 0]), "weight 1 leaves a token as it is"
        hidden = tokens.mask & (alpha == 0)
        likeness = torch.nn.functional.cosine_similarity(gated[hidden], plane[hidden], dim=-1)
        assert likeness.abs().mean() < 0.1, "weight 0 leaves nothing of it"
        assert 0.5 < float(gated[hidden].norm() / plane[hidden].norm()) < 2.0


def test_a_training_step_throttles_the_planes_of_a_token_with_it() -> None:
    vlm = pruned("qwen3_vl", "diffprune", keep=3)
    for parameter in vlm.method.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    batch = vlm.prepare(ragged_pictures(), QUESTIONS)
    tokens = vlm.encode(batch)
    whole = splice_all(vlm, batch, tokens)
    lm, kept = throttle(vlm, batch, tokens, tau=1e-3, generator=torch.Generator().manual_seed(0))
    place = lm.origin.index[lm.origin.index >= 0]
    alpha = kept.alpha.detach().flatten()[place]
    assert (alpha > 0.999).sum() >= 6 and (alpha < 0.001).sum() >= 6
    for gated, plane in zip(lm.extra["deepstack_visual_embeds"], whole.extra["deepstack_visual_embeds"], strict=True):
        torch.testing.assert_close(gated[alpha > 0.999], plane[alpha > 0.999], rtol=1e-2, atol=1e-2)
        hidden = alpha < 0.001
        assert (gated[hidden] - plane[hidden]).norm() > 0.5 * plane[hidden].norm(), "a plane shows what is hidden"
