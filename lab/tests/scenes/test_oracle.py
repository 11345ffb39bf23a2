"""The oracle: it keeps what texts speak of, item by item, and knows no other picture."""

import pytest
import torch
from torch import Tensor

from diffprune.backbones._clip import grid_boxes
from diffprune.types import VisualTokens
from diffprune_lab.scenes import PICTURE, make_scene
from diffprune_lab.scenes.oracle import Oracle, items, rank_tokens


def cells(side: int) -> Tensor:
    borders = torch.arange(side + 1) * (PICTURE / side)
    return grid_boxes(borders, borders)


def tokens_for(seeds: list[int], side: int = 12) -> VisualTokens:
    return VisualTokens(
        x=torch.zeros(len(seeds), side * side, 4),
        grid=((side, side),) * len(seeds),
        seeds=tuple(seeds),
        boxes=cells(side).expand(len(seeds), -1, -1),
    )


def covers(cell: Tensor, box: tuple[int, int, int, int]) -> bool:
    x0, y0, x1, y1 = cell.tolist()
    return min(x1, box[2]) > max(x0, box[0]) and min(y1, box[3]) > max(y0, box[1])


@pytest.mark.parametrize("kind", ["plain", "sign", "diagram"])
@pytest.mark.parametrize("side", [12, 24])
def test_every_item_gets_a_token_before_any_gets_more_than_it_needs(kind: str, side: int) -> None:
    scenes = [make_scene("test", index, kind=kind) for index in range(20)]
    oracle = Oracle.of(enumerate(scenes))
    tokens = tokens_for(list(range(20)), side)
    for row, scene in enumerate(scenes):
        wanted = items(scene)
        keep = oracle.select(tokens, torch.full((20,), len(wanted)))[row]
        for box in wanted:
            assert any(covers(cells(side)[token], box) for token in keep.tolist())


def test_few_tokens_cover_as_many_items_as_they_can_and_none_twice() -> None:
    near = [(0, 0, 20, 20), (8, 0, 22, 20), (100, 100, 120, 120)]  # the first cell shows most of the first two
    where = cells(12)
    order = rank_tokens(where, near).argsort(descending=True).tolist()
    assert all(covers(where[order[0]], box) for box in near[:2])
    assert covers(where[order[1]], near[2])


def test_no_item_gets_a_second_token_before_every_one_has_its_first() -> None:
    for index in range(20):
        boxes = items(make_scene("test", index, kind="plain"))
        where = cells(24)
        order = rank_tokens(where, boxes).argsort(descending=True).tolist()
        first = {next(step for step, token in enumerate(order) if covers(where[token], box)) for box in boxes}
        assert max(first) < len(boxes)


def test_a_picture_without_items_is_kept_evenly() -> None:
    assert (rank_tokens(cells(12), []) <= -1e4).all()


def test_what_is_left_of_the_budget_goes_to_what_sees_an_item() -> None:
    scene = make_scene("test", 3, kind="sign")
    keep = Oracle.of([(0, scene)]).select(tokens_for([0]), torch.tensor([16]))[0]
    seen = sum(any(covers(cells(12)[token], box) for box in items(scene)) for token in keep.tolist())
    there = sum(any(covers(cell, box) for box in items(scene)) for cell in cells(12))
    assert seen == min(16, there)


def test_a_sign_counts_each_letter_and_a_diagram_each_tag() -> None:
    sign = make_scene("test", 0, kind="sign")
    assert sign.sign is not None
    assert len(items(sign)) == len(sign.things) + len(sign.sign.text)
    diagram = make_scene("test", 0, kind="diagram")
    assert len(items(diagram)) == 2 * len(diagram.things)


def test_the_token_that_sees_most_of_an_item_comes_first() -> None:
    logits = rank_tokens(cells(3), [(60, 0, 120, 20)])  # 4 pixels in the first cell, 56 in the second
    assert logits.argsort(descending=True)[:2].tolist() == [1, 0]
    assert (logits[2:] < logits[0]).all()


def test_pictures_it_does_not_know_are_refused() -> None:
    oracle = Oracle.of([(0, make_scene("test", 0))])
    with pytest.raises(ValueError, match="knows nothing of these pictures"):
        oracle.score(tokens_for([7]))
    with pytest.raises(ValueError, match="knows nothing of these pictures"):
        oracle.score(VisualTokens(x=torch.zeros(1, 4, 4)))
