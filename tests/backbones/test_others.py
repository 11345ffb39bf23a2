"""What is special about InternVL, LLaVA-OneVision, Idefics3, SmolVLM and PaliGemma."""

import copy
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from diffprune.methods.base import Card, Pruner
from diffprune.model import PrunedVLM
from diffprune.types import VisualTokens
from tests import stock, tiny
from tests.contracts.vlm import EveryOther, Moved, pruned
from tests.tiny import internvl, llava_onevision

SHAPES = [(100, 70), (70, 100), (160, 40), (40, 160), (112, 112)]


class LastOnly(Pruner):
    """Keeps the last token."""

    name = "last_only"
    card = Card(idea="for tests")

    def select(self, tokens: VisualTokens, k: Tensor) -> Tensor:
        return tokens.counts[:, None] - 1


def sizes(count: int = 40) -> list[tuple[int, int]]:
    draw = random.Random(0)
    return [(draw.randint(8, 300), draw.randint(8, 300)) for _ in range(count)]


def eager_copy(tower: torch.nn.Module) -> torch.nn.Module:
    """A copy of the tower under eager attention, whose weights can be returned."""
    own = copy.deepcopy(tower)  # with a config of its own, or the shared tower would change its attention too
    own.set_attn_implementation("eager")
    return own.eval()


def in_groups(values: Tensor, side: int, scale: int) -> Tensor:
    """Mean over scale x scale neighbours of a raster of side x side values."""
    return values.view(side // scale, scale, side // scale, scale).mean((1, 3)).flatten()


# ----------------------------------------------------------------------------------------- tiles and an overview


@pytest.mark.parametrize("family", ["internvl", "idefics3", "smolvlm"])
def test_our_tiles_are_the_processors_for_many_sizes(family: str) -> None:
    vlm = pruned(family)
    processor = vlm.processor.image_processor
    for size in sizes():
        rows, columns = vlm.backbone.tile_grid(size)
        picture = Image.new("RGB", size)
        if family == "internvl":
            out = processor(images=[picture], crop_to_patches=True, return_tensors="pt")
            assert int(out["num_patches"][0]) == (rows * columns + 1 if rows * columns > 1 else 1), size
        else:
            out = processor(images=[[picture]], return_row_col_info=True, return_tensors="pt")
            cut = (int(out["rows"][0][0]), int(out["cols"][0][0]))
            assert cut == ((rows, columns) if rows * columns > 1 else (0, 0)), size


@pytest.mark.parametrize("family", ["internvl", "idefics3", "smolvlm"])
def test_every_tile_and_the_overview_see_the_spot_that_lies_in_them(family: str) -> None:
    vlm = pruned(family)
    for width, height in SHAPES:
        black = vlm.encode(vlm.prepare([Image.new("RGB", (width, height))], ["?"]))
        for place in [(0.2, 0.25), (0.6, 0.4), (0.85, 0.8)]:
            x, y = int(place[0] * width), int(place[1] * height)
            pixels = np.zeros((height, width, 3), np.uint8)
            pixels[max(0, y - 3) : y + 3, max(0, x - 3) : x + 3] = 255
            tokens = vlm.encode(vlm.prepare([Image.fromarray(pixels)], ["?"]))
            moved = Moved(black.x).score(tokens)[0]
            last = int(tokens.segment[0].max())
            for part in (tokens.segment[0] < max(last, 1), tokens.segment[0] == last):
                index = int(torch.where(part, moved, -1.0).argmax())
                x0, y0, x1, y1 = tokens.boxes[0, index].tolist()
                assert x0 - 4 <= x <= x1 + 4 and y0 - 4 <= y <= y1 + 4, ((width, height), place, (x0, y0, x1, y1))


@pytest.mark.parametrize("family", ["internvl", "idefics3", "smolvlm"])
def test_tiles_stand_one_below_the_other(family: str) -> None:
    vlm = pruned(family)
    tokens = vlm.encode(vlm.prepare([tiny.picture(1, (112, 112)), tiny.picture(2, (50, 150))], ["?", "?"]))
    assert tokens.group == 4 and tokens.x.shape[-1] == 4 * tiny.WIDTH
    for row, (rows, columns) in enumerate(tokens.grid):
        assert rows * columns == int(tokens.counts[row]) and columns == 4
        assert tokens.segment[row][tokens.mask[row]].tolist() == [index // 16 for index in range(rows * columns)]
    assert tokens.counts[0] != tokens.counts[1]


def test_internvl_gives_a_group_the_mean_of_its_patches_attention() -> None:
    vlm = pruned("internvl")
    batch = vlm.prepare([tiny.picture(1, (112, 112))], ["?"])
    tokens = vlm.backbone.encode(batch, frozenset({"cls_attention"}))
    with torch.no_grad():
        tower = eager_copy(vlm.base.model.vision_tower)
        maps = tower(batch.features["pixel_values"], output_attentions=True).attentions[-1]
    side = internvl.SIDE // internvl.PATCH
    for tile in range(len(maps)):
        expected = in_groups(maps[tile].mean(0)[0, 1:], side, 2)
        assert (tokens.cls_attention[0, 16 * tile : 16 * (tile + 1)] - expected).abs().max() < 1e-6


@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_without_a_cls_token_attention_is_the_mean_over_all_queries(family: str) -> None:
    vlm = pruned(family)
    batch = vlm.prepare([tiny.picture(1, (112, 112))], ["?"])
    tokens = vlm.backbone.encode(batch, frozenset({"cls_attention"}))
    with torch.no_grad():
        tower = eager_copy(vlm.base.model.vision_model)
        maps = tower(batch.features["pixel_values"][0], output_attentions=True).attentions[-1]
    for tile in range(len(maps)):
        expected = in_groups(maps[tile].mean((0, 1)), 8, 2)
        assert (tokens.cls_attention[0, 16 * tile : 16 * (tile + 1)] - expected).abs().max() < 1e-6


@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_the_names_of_tiles_stay_when_their_tokens_go(family: str) -> None:
    vlm = pruned(family, LastOnly(), keep=1)
    batch = vlm.prepare([tiny.picture(1, (112, 112))], ["?"])
    lm = vlm.lm_inputs(batch, vlm.encode(batch))
    text = vlm.backbone.tokenizer.decode(lm.input_ids[0])
    assert text.count("<image>") == 1 and all(
        f"<row_{row}_col_{column}>" in text for row in (1, 2) for column in (1, 2)
    )


def test_a_processor_that_cuts_otherwise_is_detected() -> None:
    vlm = pruned("internvl")
    batch = vlm.prepare([tiny.picture(1, (112, 112))], ["?"])
    half = {**batch.features, "pixel_values": batch.features["pixel_values"][:3]}
    with pytest.raises(ValueError, match="3 tiles where its rule gives 5"):
        vlm.backbone.encode(type(batch)(features=half, row_of_image=(0,), sizes=batch.sizes, seeds=batch.seeds))


def test_tiles_can_share_the_budget_in_any_tiled_family() -> None:
    for family in ("internvl", "idefics3", "llava_onevision"):
        vlm = pruned(family, "feature_norm", keep=10, budget="per_tile")
        picture = tiny.picture(1, (112, 112))
        tokens = vlm.encode(vlm.prepare([picture], ["?"]))
        kept = tokens.segment[0][vlm.select([picture])[0].keep].bincount()
        assert int(kept.sum()) == 10 and int(kept.min()) >= 1


# ----------------------------------------------------------------------------------------- LLaVA-OneVision


def test_onevision_selects_behind_the_projector_and_the_scaling() -> None:
    vlm = pruned("llava_onevision")
    batch = vlm.prepare([tiny.picture(1, (112, 112))], ["?"])
    tokens = vlm.encode(batch)
    assert tokens.grid[0] == (5, 5), "8 x 8 tokens scaled to about two tiles' worth"
    with torch.no_grad():
        stock = vlm.base.model.get_image_features(
            batch.features["pixel_values"], batch.features["image_sizes"]
        ).pooler_output[0]
    content = tokens.slots[0] >= 0
    assert torch.allclose(tokens.x[0], stock[content], atol=1e-6)
    assert torch.equal(stock[~content], vlm.base.model.image_newline.expand(5, -1))
    assert vlm.backbone.project(tokens.x) is tokens.x
    assert vlm.backbone.block.width == vlm.base.config.text_config.hidden_size


@pytest.mark.parametrize("size", [*SHAPES, (168, 168), (56, 56)])
def test_onevision_grid_is_that_of_the_large_view(size: tuple[int, int]) -> None:
    vlm = pruned("llava_onevision")
    tokens = vlm.encode(vlm.prepare([tiny.picture(1, size)], ["?"]))
    rows, columns = tokens.grid[0]
    assert int(tokens.counts[0]) == 16 + rows * columns == len(tokens.boxes[0])
    assert int((tokens.slots[0] == -1).sum()) == rows
    boxes = tokens.boxes[0]
    assert (boxes[:, :2] >= 0).all() and (boxes[:, 2] <= size[0]).all() and (boxes[:, 3] <= size[1]).all()


def test_onevision_pictures_that_share_a_prompt_are_one_square_tile_each() -> None:
    vlm = pruned("llava_onevision", EveryOther(), keep=4)
    pictures = [tiny.picture(1, (100, 50)), tiny.picture(2, (64, 120))]
    batch = vlm.prepare([pictures, tiny.picture(3, (112, 112))], ["compare", "what?"])
    tokens = vlm.encode(batch)
    assert tokens.counts.tolist() == [16, 16, 16 + 25] and tokens.grid[:2] == ((4, 4), (4, 4))
    assert tokens.boxes[0, 0].tolist() == [0.0, 0.0, 25.0, 0.0], "above the picture: nothing to see"
    assert tokens.boxes[0, 4].tolist() == [0.0, 0.0, 25.0, 25.0]
    lm = vlm.lm_inputs(batch, tokens)
    first = (lm.input_ids[0] == vlm.backbone.image_token_id).sum()
    assert int(first) == 2 * (4 + 1), "the newline that closes each whole picture stays"


def test_onevision_keeps_no_newline_for_the_overview_alone() -> None:
    vlm = pruned("llava_onevision", EveryOther(), keep=1)
    batch = vlm.prepare([tiny.picture(1, (112, 112))], ["?"])
    lm = vlm.lm_inputs(batch, vlm.encode(batch))
    assert int((lm.input_ids == vlm.backbone.image_token_id).sum()) == 1


def test_onevision_cannot_give_attention_and_says_so() -> None:
    with pytest.raises(ValueError, match="cls_attention"):
        pruned("llava_onevision", "cls_attention")
    assert pruned("llava_onevision").base.config.vision_aspect_ratio == llava_onevision.RATIO


# ----------------------------------------------------------------------------------------- PaliGemma


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in the stock processor
def test_paligemma_prompts_are_those_of_its_own_processor() -> None:
    vlm = pruned("paligemma")
    pictures = [tiny.picture(1), tiny.picture(2)]
    batch = vlm.prepare([pictures[0], pictures], ["what is it?", "compare"])
    stock = vlm.processor(
        images=[pictures[0], *pictures],
        text=["<image>what is it?", "<image><image>compare"],
        padding=True,
        padding_side="left",
        return_tensors="pt",
    )
    for key in ("input_ids", "attention_mask", "token_type_ids", "pixel_values"):
        assert torch.equal(batch.features[key], stock[key]), key


def test_paligemma_reads_a_prompt_without_a_picture() -> None:
    vlm = pruned("paligemma")
    batch = vlm.prepare(None, ["hello there"])
    assert vlm.backbone.tokenizer.decode(batch.features["input_ids"][0]) == "<s>hello there\n"
    assert "pixel_values" not in batch.features


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in the stock processor
def test_paligemma_learns_from_a_causal_answer_as_the_untouched_model_does() -> None:
    vlm = pruned("paligemma")
    questions, answers = ["what is it?", "and where, please?"], ["a star", "left of it"]
    pictures = [tiny.picture(1), tiny.picture(2)]
    ours = vlm.loss(vlm.prepare(pictures, questions, answers=answers), hard=True)
    inputs = vlm.processor(
        images=pictures,
        text=[f"<image>{question}" for question in questions],
        suffix=answers,
        padding=True,
        padding_side="left",
        return_tensors="pt",
    )
    with torch.no_grad():
        inputs["labels"] = inputs["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
        stock = vlm.base(**inputs).loss
    assert abs(float(ours) - float(stock)) < 1e-5


def test_paligemma_answers_do_not_see_what_comes_after_them() -> None:
    vlm = pruned("paligemma")
    first = vlm.logits(vlm.prepare([tiny.picture(1)], ["what?"], answers=["aab"]))[0]
    second = vlm.logits(vlm.prepare([tiny.picture(1)], ["what?"], answers=["aaz"]))[0]
    assert (first[:, :-2] - second[:, :-2]).abs().max() < 1e-6
    assert (first[:, -2:] - second[:, -2:]).abs().max() > 1e-3


@pytest.mark.parametrize("kwargs", [{"num_beams": 3}, {"do_sample": False, "repetition_penalty": 1.5}])
def test_paligemma_generates_through_its_filled_cache_as_the_untouched_model(kwargs: dict) -> None:
    vlm = pruned("paligemma")
    batch = vlm.prepare([tiny.picture(1), tiny.picture(2)], ["what?", "and where, please?"])
    with torch.no_grad():
        stock = vlm.base.generate(**batch.features, max_new_tokens=6, **kwargs)[
            :, batch.features["input_ids"].shape[1] :
        ]
    ours = vlm.generate(
        [tiny.picture(1), tiny.picture(2)], ["what?", "and where, please?"], return_ids=True, max_new_tokens=6, **kwargs
    )
    assert torch.equal(ours, stock)


def test_paligemma_refuses_another_kind_of_cache() -> None:
    with pytest.raises(ValueError, match="cache_implementation='static'"):
        pruned("paligemma").generate([tiny.picture(1)], "what?", max_new_tokens=2, cache_implementation="static")


def test_paligemma_attention_is_the_mean_over_all_queries() -> None:
    vlm = pruned("paligemma")
    batch = vlm.prepare([tiny.picture(1)], ["?"])
    tokens = vlm.backbone.encode(batch, frozenset({"cls_attention"}))
    with torch.no_grad():
        tower = eager_copy(vlm.base.model.vision_tower)
        maps = tower(batch.features["pixel_values"], output_attentions=True).attentions[-1]
    assert (tokens.cls_attention - maps.mean((1, 2))).abs().max() < 1e-6


# ----------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize("family", ["llava_next", "llava_onevision", "internvl"])
def test_features_joined_from_several_layers_are_refused(family: str) -> None:
    model, processor = tiny.build(family)
    before = model.config.vision_feature_layer
    model.config.vision_feature_layer = [-2, -1]
    try:
        with pytest.raises(ValueError, match="from several layers"):
            PrunedVLM(model, processor)
    finally:
        model.config.vision_feature_layer = before


@pytest.mark.parametrize("family", stock.FAMILIES)
def test_tokens_are_the_same_without_the_sizes_of_pictures_and_have_no_boxes(family: str) -> None:
    vlm = PrunedVLM(*tiny.build(family), method="feature_norm", keep=4)
    batch = vlm.prepare([tiny.picture(1, (100, 70))], ["What?"])
    rule = getattr(vlm.backbone, "tile_grid", None)  # where tiles follow from the size alone
    grids = None if rule is None else tuple(rule(size) for size in batch.sizes)
    tokens = vlm.encode(batch)
    without = vlm.encode(replace(batch, sizes=(), tile_grids=grids))
    assert tokens.boxes is not None and without.boxes is None
    assert torch.equal(tokens.x, without.x) and tokens.grid == without.grid
