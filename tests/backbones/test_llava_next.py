"""What is special about LLaVA-NeXT: newlines, unpadding, tiles, budgets per tile, and where its tokens look."""

import copy
import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from diffprune.backbones._anyres import num_tiles_of, unpadded
from diffprune.methods.base import Card, Kept, MergingPruner, Pruner
from diffprune.model import PrunedVLM
from diffprune.tiles import shares, split_tiles
from diffprune.types import VisualTokens
from tests import tiny
from tests.contracts.vlm import EveryOther, Moved, pruned
from tests.tiny.llava_next import PINPOINTS, SIDE

OVERVIEW = 16
SHAPES = [(100, 70), (70, 100), (160, 24), (24, 160), (112, 112)]


class Fixed(Pruner):
    """Keeps the tokens of a fixed index."""

    name = "fixed"
    card = Card(idea="for tests")

    def __init__(self, *keep: int) -> None:
        super().__init__()
        self.keep = torch.tensor([keep])

    def select(self, tokens: VisualTokens, k: Tensor) -> Tensor:
        return self.keep


class Halves(MergingPruner):
    """Every kept token is the mean of itself and the row's first."""

    name = "halves"
    card = Card(idea="for tests")

    def reduce(self, tokens: VisualTokens, k: Tensor) -> Kept:
        keep = EveryOther().select(tokens, k)
        x = tokens.x.gather(1, keep.clamp_min(0)[..., None].expand(-1, -1, tokens.x.shape[-1]))
        return Kept((x + tokens.x[:, :1]) / 2, keep)


def num_placeholders(vlm: PrunedVLM, size: tuple[int, int] = (100, 70)) -> int:
    batch = vlm.prepare([tiny.picture(1, size)], ["what?"])
    lm = vlm.lm_inputs(batch, vlm.encode(batch))
    return int((lm.input_ids == vlm.backbone.image_token_id).sum())


# ----------------------------------------------------------------------------------------- newlines


def test_a_newline_stays_where_its_row_keeps_a_token() -> None:
    columns = unpadded((100, 70), vlm_pinpoints(), SIDE, 4).columns
    first_row, third_row = OVERVIEW, OVERVIEW + 2 * columns
    assert num_placeholders(pruned("llava_next", Fixed(first_row, first_row + 1))) == 2 + 1
    assert num_placeholders(pruned("llava_next", Fixed(first_row, third_row))) == 2 + 2
    assert num_placeholders(pruned("llava_next", Fixed(0, 3, third_row))) == 3 + 1


def test_the_overview_is_no_row_and_keeps_no_newline() -> None:
    assert num_placeholders(pruned("llava_next", Fixed(0, 5, 15))) == 3


@pytest.mark.parametrize("size", SHAPES)
def test_all_or_none_of_the_newlines_stay_when_asked_for(size: tuple[int, int]) -> None:
    rows = unpadded(size, vlm_pinpoints(), SIDE, 4).rows
    assert num_placeholders(pruned("llava_next", EveryOther(), keep=5, newline="none"), size) == 5
    assert num_placeholders(pruned("llava_next", EveryOther(), keep=5, newline="all"), size) == 5 + rows


def test_the_newline_in_the_sequence_is_the_models_own() -> None:
    vlm = pruned("llava_next", EveryOther(), keep=5, newline="all")
    batch = vlm.prepare([tiny.picture(1)], ["what?"])
    lm = vlm.lm_inputs(batch, vlm.encode(batch))
    newline = (lm.inputs_embeds == vlm.base.model.image_newline).all(-1)
    assert int(newline.sum()) == unpadded((100, 70), vlm_pinpoints(), SIDE, 4).rows
    assert not (newline & lm.visual).any(), "a newline is not counted as a visual token"
    assert int(lm.visual.sum()) == 5


# ----------------------------------------------------------------------------------------- counting


def vlm_pinpoints() -> list[list[int]]:
    return pruned("llava_next").base.config.image_grid_pinpoints


@pytest.mark.parametrize("size", SHAPES)
def test_n_counts_neither_newlines_nor_unpadded_slots(size: tuple[int, int]) -> None:
    vlm = pruned("llava_next")
    batch = vlm.prepare([tiny.picture(1, size)], ["what?"])
    tokens = vlm.encode(batch)
    rows, columns = tokens.grid[0]
    slots = int((batch.features["input_ids"] == vlm.backbone.image_token_id).sum())
    assert int(tokens.counts[0]) == OVERVIEW + rows * columns == slots - rows
    if size != (112, 112):
        assert int(tokens.counts[0]) < OVERVIEW * num_tiles_of(size, vlm_pinpoints(), SIDE), "some slots were unpadded"


def test_our_geometry_is_the_processors_for_many_sizes() -> None:
    processor = pruned("llava_next").processor
    draw = random.Random(0)
    for _ in range(80):
        size = (draw.randint(20, 400), draw.randint(20, 400))
        view = unpadded(size, processor.image_processor.image_grid_pinpoints, SIDE, 4)
        expected = processor._get_number_of_features(size[1], size[0], SIDE, SIDE)
        assert expected == OVERVIEW + 1 + view.rows * view.columns + view.rows, size


def test_pictures_of_different_aspect_in_one_batch_are_as_they_are_alone() -> None:
    vlm = pruned("llava_next")
    pictures = [tiny.picture(index, size) for index, size in enumerate(SHAPES)]
    together = vlm.backbone.encode(vlm.prepare(pictures, ["?"] * len(pictures)), frozenset({"cls_attention", "keys"}))
    assert len(set(together.counts.tolist())) > 1, "the rows have different lengths"
    for row, picture in enumerate(pictures):
        alone = vlm.backbone.encode(vlm.prepare([picture], ["?"]), frozenset({"cls_attention", "keys"}))
        count = int(alone.counts[0])
        assert int(together.counts[row]) == count and together.grid[row] == alone.grid[0]
        for name in ("x", "boxes", "cls_attention", "keys", "segment"):
            ours, theirs = getattr(together, name)[row, :count], getattr(alone, name)[0]
            assert (ours - theirs).abs().max() < 1e-5, name
        assert not together.mask[row, count:].any()


def test_attention_is_the_towers_own_within_each_tile() -> None:
    vlm = pruned("llava_next")
    batch = vlm.prepare([tiny.picture(1)], ["?"])
    tokens = vlm.backbone.encode(batch, frozenset({"cls_attention"}))
    model, _ = tiny.build("llava_next")
    tower = copy.deepcopy(model.model.vision_tower)  # with a config of its own: the tiny models are shared
    tower.set_attn_implementation("eager")
    with torch.no_grad():
        maps = tower.eval()(batch.features["pixel_values"][0], output_attentions=True).attentions[-2]
    overview = maps[0].mean(0)[0, 1:]  # the [CLS] row of the first tile
    assert (tokens.cls_attention[0, :OVERVIEW] - overview).abs().max() < 1e-5


# ----------------------------------------------------------------------------------------- where tokens look


@pytest.mark.parametrize("size", SHAPES)
def test_a_bright_spot_is_seen_by_the_overview_and_by_the_large_view(size: tuple[int, int]) -> None:
    vlm = pruned("llava_next")
    width, height = size
    black = vlm.encode(vlm.prepare([Image.new("RGB", size)], ["?"]))
    for place in [(0.2, 0.25), (0.6, 0.45), (0.85, 0.8)]:
        x, y = int(place[0] * width), int(place[1] * height)
        pixels = np.zeros((height, width, 3), np.uint8)
        pixels[max(0, y - 3) : y + 3, max(0, x - 3) : x + 3] = 255
        tokens = vlm.encode(vlm.prepare([Image.fromarray(pixels)], ["?"]))
        moved = Moved(black.x).score(tokens)[0]
        for part in (range(OVERVIEW), range(OVERVIEW, int(tokens.counts[0]))):
            index = part[int(moved[list(part)].argmax())]
            x0, y0, x1, y1 = tokens.boxes[0, index].tolist()
            assert x0 - 3 <= x <= x1 + 3 and y0 - 3 <= y <= y1 + 3, (place, index, (x0, y0, x1, y1))


@pytest.mark.parametrize("size", SHAPES)
def test_boxes_lie_in_the_picture_and_both_views_cover_it(size: tuple[int, int]) -> None:
    vlm = pruned("llava_next")
    boxes = vlm.encode(vlm.prepare([tiny.picture(1, size)], ["?"])).boxes[0]
    for part in (boxes[:OVERVIEW], boxes[OVERVIEW:]):
        assert (part[:, :2] >= 0).all() and (part[:, 2] <= size[0]).all() and (part[:, 3] <= size[1]).all()
        areas = (part[:, 2:] - part[:, :2]).prod(-1)
        assert (areas > 0).all()
        assert areas.sum() > 0.85 * size[0] * size[1], "whole patches are cut, so a border may be lost"


def test_a_segment_is_a_tile() -> None:
    vlm = pruned("llava_next")
    tokens = vlm.encode(vlm.prepare([tiny.picture(1, (112, 112))], ["?"]))
    assert tokens.segment[0].tolist()[:OVERVIEW] == [0] * OVERVIEW
    large = tokens.segment[0, OVERVIEW:].view(8, 8)
    assert (
        large[:4, :4].eq(1).all()
        and large[:4, 4:].eq(2).all()
        and large[4:, :4].eq(3).all()
        and large[4:, 4:].eq(4).all()
    )


# ----------------------------------------------------------------------------------------- budgets per tile


def test_a_budget_is_shared_out_in_proportion_and_adds_up() -> None:
    assert shares(10, [16, 16, 16, 16]) == [3, 3, 2, 2]
    assert shares(4, [16, 1, 16, 16]) == [1, 1, 1, 1]
    assert shares(33, [16, 1, 16]) == [16, 1, 16]
    assert shares(12, [100, 2, 2, 2]) == [9, 1, 1, 1]


@pytest.mark.parametrize("keep", [7, 20, 0.5, 1.0])
def test_per_tile_every_tile_keeps_its_share(keep: int | float) -> None:
    vlm = pruned("llava_next", "feature_norm", keep=keep, budget="per_tile")
    for size in SHAPES:
        picture = tiny.picture(1, size)
        tokens = vlm.encode(vlm.prepare([picture], ["?"]))
        (entry,) = vlm.select([picture])
        total = vlm.budget.count(int(tokens.counts[0]))
        assert len(entry.keep) == total and entry.keep.tolist() == sorted(set(entry.keep.tolist()))
        sizes = tokens.segment[0].bincount()
        kept = tokens.segment[0][entry.keep].bincount(minlength=len(sizes))
        assert kept.tolist() == shares(total, sizes.tolist())
        for tile in range(len(sizes)):  # within a tile the best ones
            inside = (tokens.segment[0] == tile).nonzero()[:, 0]
            best = inside[entry.logits[inside].topk(int(kept[tile])).indices].sort().values
            assert torch.equal(best, entry.keep[tokens.segment[0][entry.keep] == tile])


def test_global_spends_the_budget_where_the_best_tokens_are() -> None:
    picture = tiny.picture(1, (112, 112))
    entry = pruned("llava_next", "feature_norm", keep=10).select([picture])[0]
    assert torch.equal(entry.keep, entry.logits.topk(10).indices.sort().values)


def test_tiles_are_rows_with_their_own_grid_and_seed() -> None:
    vlm = pruned("llava_next")
    tokens = vlm.encode(vlm.prepare([tiny.picture(1, (112, 112)), tiny.picture(2, (160, 24))], ["?", "?"]))
    tiles = split_tiles(tokens)
    assert len(tiles.tokens) == 5 + num_tiles_of((160, 24), vlm_pinpoints(), SIDE)
    assert tiles.tokens.grid[:5] == ((4, 4),) * 5
    assert all(
        rows * columns == count for (rows, columns), count in zip(tiles.tokens.grid, tiles.tokens.counts, strict=True)
    )
    assert len(set(tiles.tokens.seeds)) == len(tiles.tokens), "every tile draws by itself"
    back = tokens.x[tiles.image[2], tiles.index[2]]
    assert torch.equal(back, tiles.tokens.x[2]) and torch.equal(tokens.boxes[0, tiles.index[2]], tiles.tokens.boxes[2])


def test_per_tile_trains_and_its_weights_add_up_in_each_tile() -> None:
    vlm = pruned("llava_next", "diffprune", keep=0.5, budget="per_tile")
    batch = vlm.prepare([tiny.picture(1, (112, 112)), tiny.picture(2, (160, 24))], ["?", "??"], answers=["a", "b"])
    tokens = vlm.encode(batch)
    counts = vlm.budget.counts(tokens.mask)
    generators = [torch.Generator().manual_seed(row) for row in range(2)]
    restricted = vlm.rule.restrict(tokens, counts, tau=1.0, generator=generators)
    for row in range(2):
        sizes = tokens.segment[row][tokens.mask[row]].bincount()
        for tile, share in enumerate(shares(int(counts[row]), sizes.tolist())):
            assert abs(float(restricted.alpha.detach()[row][tokens.segment[row] == tile].sum()) - share) < 1e-4
    vlm.loss(batch, tau=1.0, generator=torch.Generator().manual_seed(0)).backward()
    assert any(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in vlm.method.parameters())


def test_per_tile_worth_and_diversity_choose_within_a_tile() -> None:
    vlm = pruned("llava_next", "diffprune-diverse", keep=10, budget="per_tile")
    torch.manual_seed(1)
    for parameter in vlm.method.parameters():
        parameter.data.normal_(std=0.2)
    picture = tiny.picture(1, (112, 112))
    tokens = vlm.encode(vlm.prepare([picture], ["?"]))
    (entry,) = vlm.select([picture])
    for tile in range(5):
        inside = (tokens.segment[0] == tile).nonzero()[:, 0]
        own = VisualTokens(x=tokens.x[:, inside])
        assert torch.equal(entry.keep[tokens.segment[0][entry.keep] == tile], inside[vlm.method.select(own, 2)[0]])


def test_per_tile_each_picture_draws_from_its_own_generator() -> None:
    vlm = pruned("llava_next", "diffprune", keep=0.5, budget="per_tile")
    images = [tiny.picture(1, (112, 112)), tiny.picture(2, (112, 112))]

    def throttled(some: list[Any], seeds: list[int]) -> Tensor:
        tokens = vlm.encode(vlm.prepare(some, ["?"] * len(some)))
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return vlm.rule.restrict(tokens, vlm.budget.counts(tokens.mask), tau=1.0, generator=generators).x.detach()

    together = throttled(images, [3, 4])
    for row in range(2):
        torch.testing.assert_close(together[row], throttled(images[row : row + 1], [3 + row])[0])


def test_per_tile_merges_within_a_tile() -> None:
    vlm = pruned("llava_next", Halves(), keep=10, budget="per_tile")
    tokens = vlm.encode(vlm.prepare([tiny.picture(1, (112, 112))], ["?"]))
    merged = vlm.rule.deploy(tokens, torch.tensor([10]))
    firsts = {tile: int((tokens.segment[0] == tile).nonzero()[0]) for tile in range(5)}
    for x, position in zip(merged.x[0], merged.index[0].tolist(), strict=True):
        first = firsts[int(tokens.segment[0, position])]
        assert torch.allclose(x, (tokens.x[0, position] + tokens.x[0, first]) / 2, atol=1e-6)
    assert isinstance(vlm.generate([tiny.picture(1, (112, 112))], "what?", max_new_tokens=2), str)


# ----------------------------------------------------------------------------------------- refusals, save and load


def test_what_cannot_be_is_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match="newline='some'"):
        pruned("llava_next", newline="some")
    with pytest.raises(ValueError, match="budget='tile'"):
        pruned("llava_next", budget="tile")
    with pytest.raises(ValueError, match="5 tiles"):
        pruned("llava_next", "feature_norm", keep=3, budget="per_tile").select([tiny.picture(1, (112, 112))])
    with pytest.raises(ValueError, match="hidden_norm"):
        pruned("llava_next", "hidden_norm", budget="per_tile")


def test_newline_and_budget_rules_are_saved_with_the_pruner(tmp_path) -> None:
    vlm = pruned("llava_next", "diffprune", keep=7, newline="none", budget="per_tile")
    vlm.save_pretrained(tmp_path, base_id="somewhere")
    model, processor = tiny.build("llava_next")
    loaded = PrunedVLM.from_pretrained(tmp_path, base=model, processor=processor)
    assert loaded.backbone.keeps_newlines == "none" and loaded.budget_rule == "per_tile"
    picture = tiny.picture(1, (112, 112))
    assert torch.equal(loaded.select([picture])[0].keep, vlm.select([picture])[0].keep)


@pytest.mark.parametrize("family", ["llava_next", "llava_onevision"])
@pytest.mark.parametrize("size", [(2, 300), (9, 168), (300, 2), (1, 1), (4, 700), (168, 9)])
def test_narrow_pictures_keep_the_newlines_of_rows_without_a_token(family: str, size: tuple[int, int]) -> None:
    vlm = pruned(family)
    batch = vlm.prepare([[tiny.picture(1, size)]], ["what?"])
    with torch.no_grad():
        stock = vlm.base(**batch.features).logits
    logits, lm = vlm.logits(batch)
    assert torch.equal(lm.attention_mask, batch.features["attention_mask"])
    assert (logits - stock).abs().max() < 1e-5 * max(1.0, float(stock.abs().max()))


def test_rows_that_lose_all_their_tokens_lose_their_newline_and_empty_rows_keep_theirs() -> None:
    vlm = pruned("llava_next", EveryOther(), keep=1)
    batch = vlm.prepare([[tiny.picture(1, (2, 300))], [tiny.picture(1, (100, 70))]], ["what?"] * 2)
    tokens = vlm.encode(batch)
    empty, other = ((tokens.slots[row] == -1).sum().item() for row in range(2))
    lm = vlm.logits(batch)[1]
    held = [int((lm.input_ids[row] == vlm.backbone.image_token_id).sum()) for row in range(2)]
    assert tokens.grid[0][1] == 0 and empty == tokens.grid[0][0]
    assert held == [1 + empty, 1] and other > 0


def test_the_scorer_attends_within_a_tile() -> None:
    vlm = pruned("llava_next", "diffprune", keep=5)
    for parameter in vlm.method.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tokens = vlm.encode(vlm.prepare([[tiny.picture(1)]], ["what?"]))
    assert tokens.segment[0].unique().tolist() == list(range(num_tiles_of((100, 70), PINPOINTS, SIDE)))
    with torch.no_grad():
        before = vlm.method.score(tokens)
        for tile in tokens.segment[0].unique():
            inside = tokens.segment == tile
            moved = dataclasses.replace(tokens, x=tokens.x + inside[..., None] * torch.randn(tokens.x.shape[-1]))
            after = vlm.method.score(moved)
            torch.testing.assert_close(after[~inside], before[~inside])
            assert ((after - before)[inside].abs() > 1e-3).any()


@pytest.mark.parametrize("name", ["atp_llava", "glimpse_prune"])
def test_methods_that_ask_where_tokens_stand_take_a_view_without_a_column(name: str) -> None:
    vlm = pruned("llava_next", name, keep=3)
    assert vlm.encode(vlm.prepare([[tiny.picture(1, (2, 300))]], ["what?"])).grid[0][1] == 0
    assert vlm.generate([tiny.picture(1, (2, 300))], "what?", max_new_tokens=2, return_ids=True).shape == (1, 2)
