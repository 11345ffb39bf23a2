"""What tokens look at, what they are trained to say, and which of them an oracle and the rules of training keep."""

import pytest
import torch

from diffprune.types import VisualTokens
from diffprune_lab.scarce import prefixes, targets, tokens
from diffprune_lab.scarce.draw import pack, render
from diffprune_lab.scarce.feed import draw_batch, tower_batch
from diffprune_lab.scarce.oracle import Oracle, rank_tokens
from diffprune_lab.scarce.world import make_scene

SCENES = [make_scene("train", index, sign=True) for index in range(6)]


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    return draw_batch(tower_batch(SCENES), torch.device("cpu"))


@pytest.fixture(scope="module")
def seen(batch: dict[str, torch.Tensor]) -> tokens.Tokens:
    return tokens.read_tokens(batch["labels"])


def _targets(batch: dict[str, torch.Tensor], seen: tokens.Tokens) -> torch.Tensor:
    names = ("regions", "grounds", "things", "letters", "litter")
    return targets.token_targets(seen, *(batch[name] for name in names))


def test_every_unit_is_shown_by_some_token(seen: tokens.Tokens) -> None:
    shown = tokens.shown_units(seen).any(1)
    for row, scene in enumerate(SCENES):
        assert scene.sign is not None
        letters = [tokens.FIRST_LETTER + place for place in range(len(scene.sign.text))]
        ends = [4 * place + which + 1 for place in range(len(scene.things)) for which in (tokens.HEAD, tokens.BASE)]
        badges = [4 * place + tokens.BADGE + 1 for place, thing in enumerate(scene.things) if thing.digit >= 0]
        assert shown[row].nonzero().flatten().tolist() == sorted(letters + ends + badges)


def test_coverage_is_all_of_all_tokens_and_nothing_of_ground(seen: tokens.Tokens) -> None:
    everything = torch.arange(576).expand(len(SCENES), -1)
    assert tokens.coverage(seen, everything) == 1
    ground = (seen.item == 0).float().topk(32, -1).indices
    assert tokens.coverage(seen, ground) == 0


def test_no_field_names_a_whole_item() -> None:
    assert not {"noun", "size", "cell", "text", "shape"} & set(targets.FIELDS)


def test_tokens_name_what_they_show(batch: dict[str, torch.Tensor], seen: tokens.Tokens) -> None:
    wanted = _targets(batch, seen)
    column = {name: place for place, name in enumerate(targets.FIELDS)}
    for row, scene in enumerate(SCENES):
        for place, thing in enumerate(scene.things, start=1):
            own = wanted[row][seen.thing[row] == place]
            assert set(own[:, column["head"]].tolist()) == {targets.IGNORE, thing.head}
            assert set(own[:, column["base"]].tolist()) == {targets.IGNORE, thing.base}
            assert set(own[:, column["color"]].tolist()) <= {targets.IGNORE, thing.top, thing.bottom}
        assert scene.sign is not None
        spelled = wanted[row][seen.letter[row] >= 0]
        read = {(int(one[column["place"]]), int(one[column["letter"]])) for one in spelled}
        assert "".join(targets.masks.LETTERS[letter] for _, letter in sorted(read)) == scene.sign.text


def test_a_token_is_unchanged_only_where_its_surroundings_are() -> None:
    one = torch.zeros(1, 3, 192, 192, dtype=torch.uint8)
    other = one.clone()
    other[0, 0, 11, 100] = 1  # in row 1, column 12, and within 4 pixels of row 0 and of column 13
    changed = (~targets.unchanged(one, other)).nonzero()[:, 1].tolist()
    assert changed == [12, 13, 24 + 12, 24 + 13]


def test_the_leak_is_what_moved_without_cause() -> None:
    features = torch.randn(2, 576, 8)
    same = torch.ones(2, 576, dtype=torch.bool)
    assert targets.leak(features, features, same) < 1e-3
    assert targets.leak(features, features + 1, same) > 0.5
    assert targets.leak(features, features + 1, ~same) < 1e-3


def test_the_length_of_features_is_set_and_their_mean_is_0() -> None:
    features = torch.randn(64, 576, 16)
    features = features / features.square().mean(-1, keepdim=True).sqrt()
    assert targets.length_loss(features, torch.zeros(64, 576)) < 0.01
    assert targets.length_loss(2 * features, torch.zeros(64, 576)) > 0.4
    assert targets.length_loss(torch.ones(64, 576, 16), torch.zeros(64, 576)) > 0.9


def test_tokens_that_are_alike_are_pushed_apart() -> None:
    apart = torch.eye(192).repeat(1, 3, 1)
    assert targets.spread_loss(torch.ones(1, 576, 16)).item() == pytest.approx(4, abs=1e-4)
    assert targets.spread_loss(apart) < 0.5


def test_lengths_do_not_tell_items_from_ground(batch: dict[str, torch.Tensor], seen: tokens.Tokens) -> None:
    longest = targets.token_lengths(batch["pixels"]).topk(64, -1).indices
    share = (seen.item.gather(1, longest) > 0).float().mean()
    assert abs(share - (seen.item > 0).float().mean()) < 0.1


def test_the_oracle_covers_every_unit_within_its_budget(batch: dict[str, torch.Tensor], seen: tokens.Tokens) -> None:
    keep = rank_tokens(tokens.unit_pixels(batch["labels"])).topk(64, -1).indices
    assert tokens.coverage(seen, keep) > 0.995


def test_the_oracle_refuses_pictures_it_does_not_know() -> None:
    oracle = Oracle.of([7, 8], SCENES[:2])
    x = torch.zeros(2, 576, 4)
    assert oracle.select(VisualTokens(x=x, seeds=(8, 7)), 64).shape == (2, 64)
    with pytest.raises(ValueError, match=r"Oracle\.of"):
        oracle.select(VisualTokens(x=x, seeds=(8, 9)), 64)


@pytest.mark.parametrize("rule", list(prefixes.RULES))
def test_rules_of_training_give_every_token_a_priority(rule: str, seen: tokens.Tokens) -> None:
    features = torch.randn(len(SCENES), 576, 8, generator=torch.Generator().manual_seed(0))
    rules = torch.full((len(SCENES),), list(prefixes.RULES).index(rule))
    priority = prefixes.priorities(seen, features, rules, torch.Generator().manual_seed(0))
    assert priority.isfinite().all() and priority.shape == (len(SCENES), 576)
    share = (seen.item.gather(1, priority.topk(64, -1).indices) > 0).float().mean()
    if rule in ("items", "units"):
        assert share > 0.95
    if rule == "ground":
        assert share == 0


def test_the_rule_of_units_covers_them_evenly(seen: tokens.Tokens) -> None:
    features = torch.randn(len(SCENES), 576, 8)
    rules = torch.full((len(SCENES),), list(prefixes.RULES).index("units"))
    keep = prefixes.priorities(seen, features, rules).topk(96, -1).indices
    assert tokens.coverage(seen, keep) > 0.95


def test_a_picture_is_drawn_alike_alone_and_in_a_batch() -> None:
    together, alone = render(pack(SCENES))[0], render(pack(SCENES[3:4]))[0]
    assert torch.equal(together[3:4], alone)
