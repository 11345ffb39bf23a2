"""DiffPrune deployed by worth and diversity: its rule, its options, and one saved artefact that serves both choices."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import diffprune as dp
from diffprune.evaluate.pruners import load_pruners, parse_pruners
from diffprune.methods.diffprune_diverse import DiffPruneDiverse
from diffprune.methods.options import build_method, deployed_as
from diffprune.model import PrunedVLM
from diffprune.nn import standardise
from diffprune.types import VisualTokens
from tests import tiny
from tests.methods.examples import SPEC, make_method, make_tokens, one_image

K = torch.tensor([4, 3, 2])


def diverse(**options: object) -> DiffPruneDiverse:
    method = make_method("diffprune-diverse", **options)
    assert isinstance(method, DiffPruneDiverse)
    return method


def by_hand(z: Tensor, x: Tensor, k: int, beta: float, nearness: Tensor | None = None) -> list[int]:
    """The picks by determinants themselves, in float64."""
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    cosine = unit @ unit.T if nearness is None else unit @ unit.T * nearness.double()
    kernel = torch.exp(beta * z.double())[:, None] * cosine * torch.exp(beta * z.double())
    taken: list[int] = []
    for _ in range(k):
        rest = [token for token in range(len(z)) if token not in taken]
        gains = [round(torch.det(kernel[[*taken, token]][:, [*taken, token]]).item(), 12) for token in rest]  # ties
        taken.append(rest[max(range(len(rest)), key=lambda place: gains[place])])
    return sorted(taken)


@pytest.mark.parametrize("features", ["encoder", "scorer"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 2.0])
def test_each_pick_has_the_largest_determinant_there_is(features: str, beta: float) -> None:
    method, tokens = diverse(beta=beta, features=features), make_tokens()
    keep, logits = method.choose(tokens, K)
    for row, k in enumerate(K.tolist()):
        alone = one_image(tokens, row)
        own, hidden = method.scorer.read(alone.x)  # type: ignore[union-attr]
        x = (hidden if features == "scorer" else alone.x)[0]
        torch.testing.assert_close(logits[row, : x.shape[0]], own[0])  # type: ignore[index]
        assert keep[row, :k].tolist() == by_hand(standardise(own)[0], x, k, beta)
        assert method.select(alone, k)[0].tolist() == keep[row, :k].tolist()  # whatever else is in the batch


def test_a_reach_makes_tokens_alike_only_where_they_are_near() -> None:
    method, tokens = diverse(beta=1.0, features="encoder", reach=1.5), make_tokens((12, 12))
    where = torch.tensor([[index // 4, index % 4] for index in range(12)], dtype=torch.float64)
    nearness = torch.exp(-0.5 * (torch.cdist(where, where) / 1.5) ** 2)
    for row in range(2):
        z = standardise(method.score(tokens))[row]
        assert method.select(tokens, 5)[row].tolist() == by_hand(z, tokens.x[row], 5, 1.0, nearness)
    tiles = dataclasses.replace(tokens, segment=torch.zeros(2, 12, dtype=torch.long), grid=())
    with pytest.raises(ValueError, match=r"reach=1.5 asks where tokens lie in the picture.* leave reach out"):
        method.select(tiles, 5)
    corner = where.flip(-1).float() * 8
    boxed = dataclasses.replace(tiles, boxes=torch.cat([corner, corner + 8], -1).expand(2, -1, -1))
    assert torch.equal(method.select(boxed, 5), method.select(tokens, 5))


def test_much_beta_is_top_k_and_copies_are_kept_last() -> None:
    tokens = make_tokens((12, 12))
    for beta in (40.0, 1e6):  # far beyond what float32 holds of exp(beta z)
        much = diverse(beta=beta)
        assert torch.equal(much.select(tokens, 5), dp.ops.hard_topk(much.score(tokens), 5))
    twins = VisualTokens(x=tokens.x[:, :6].repeat(1, 2, 1))
    keep = diverse(beta=0.5, features="encoder").select(twins, 6)
    assert torch.equal(keep, torch.arange(6).expand(2, -1))


def test_past_the_rank_worth_decides() -> None:
    method, rank = diverse(beta=0.3, features="encoder"), 3
    x = torch.randn(1, 12, rank, generator=torch.Generator().manual_seed(1)) @ torch.eye(rank, 16)
    tokens = VisualTokens(x=x)
    first, ranked = set(method.select(tokens, rank)[0].tolist()), method.score(tokens)[0].argsort(descending=True)
    rest = [token for token in ranked.tolist() if token not in first]
    for k in range(rank, 13):
        assert set(method.select(tokens, k)[0].tolist()) == first | set(rest[: k - rank])


def test_tokens_of_several_patches_stand_for_their_mean() -> None:
    method, tokens = diverse(), make_tokens((12, 10), group=4)
    whole = dataclasses.replace(tokens, x=tokens.x.unflatten(-1, (4, -1)).mean(-2), group=1)
    assert torch.equal(method.compared(tokens, None), whole.x)
    assert method.select(tokens, torch.tensor([4, 4])).shape == (2, 4)
    assert diverse(features="scorer").select(tokens, torch.tensor([4, 4])).shape == (2, 4)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"beta": -1.0}, "beta=-1.0 is not known; give a number from 0 to 1e+06"),
        ({"beta": 1e300}, "beta=1e+300"),  # finite, and all worth is infinite
        ({"beta": float("nan")}, "beta=nan"),
        ({"beta": float("inf")}, "beta=inf"),
        ({"reach": -2.0}, "reach=-2.0"),
        ({"features": "keys"}, "features='keys' is not known; give one of encoder, scorer"),
        ({"features": "scorer", "scorer": "bilinear"}, "scorer='bilinear' has none; say features='encoder'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        build_method("diffprune-diverse", block=SPEC, **options)


def test_there_is_nothing_to_train() -> None:
    with pytest.raises(ValueError, match="'diffprune-diverse' has nothing to train"):
        diverse().restrict(make_tokens(), K, tau=1.0)


# --- one artefact for both choices ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved diffprune pruner with logits that differ."""
    model, processor = tiny.build("llava")
    vlm = PrunedVLM(model, processor, method="diffprune", keep=4, gate="scale")
    torch.nn.init.normal_(vlm.method.scorer.head.weight, generator=torch.Generator().manual_seed(0))
    vlm.save_pretrained(tmp_path / "p", base_id="x/y")
    return tmp_path / "p"


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def choose(folder: Path, **options: Any) -> PrunedVLM:
    model, processor = tiny.build("llava")
    return PrunedVLM.from_pretrained(folder, base=model, processor=processor, **options)


def test_one_artefact_serves_both_choices_and_says_which_it_deploys(folder: Path, tmp_path: Path) -> None:
    top_k = choose(folder)
    assert top_k.method.name == "diffprune" and "choice" not in config_of(folder)
    other = choose(folder, method="diffprune-diverse[beta=2;features=scorer]")
    assert (other.method.name, other.method.options.beta) == ("diffprune-diverse", 2.0)
    states = [dict(vlm.method.scorer.state_dict()) for vlm in (top_k, other)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    other.save_pretrained(tmp_path / "q", base_id="x/y")
    saved = config_of(tmp_path / "q")
    assert saved["choice"] == {"name": "diverse", "beta": 2.0, "features": "scorer", "reach": 0.0}
    assert (
        saved["method"] == config_of(folder)["method"]
        and saved["weights_digest"] == config_of(folder)["weights_digest"]
    )
    again, back = choose(tmp_path / "q"), choose(tmp_path / "q", method="diffprune")
    assert again.method.options == other.method.options and back.method.name == "diffprune"
    assert choose(tmp_path / "q", method="diffprune-diverse[beta=3]").method.options.features == "scorer"
    image = [tiny.picture()]
    assert again.select(image)[0].keep.tolist() == other.select(image)[0].keep.tolist()
    assert back.select(image)[0].keep.tolist() == top_k.select(image)[0].keep.tolist()
    back.save_pretrained(tmp_path / "r", base_id="x/y")
    assert "choice" not in config_of(tmp_path / "r")


def test_a_method_that_takes_other_weights_is_refused(folder: Path) -> None:
    for asked in ("divprune", "gumbel_ste", "diffprune-scale"):
        with pytest.raises(
            ValueError, match=f"weights of 'diffprune' cannot be deployed as '{asked}'; they go with diff"
        ):
            choose(folder, method=asked)
    with pytest.raises(ValueError, match="cannot be deployed as"):
        deployed_as(make_method("gumbel_ste"), None, "diffprune-diverse")


@pytest.mark.parametrize("choice", [{"beta": 1.0}, "diverse", {"name": 3}])
def test_a_choice_that_cannot_be_read_is_named(folder: Path, choice: object) -> None:
    config = config_of(folder) | {"choice": choice}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"choice is .*: must be a dict with its name"):
        choose(folder)


def test_a_choice_of_another_version_is_named(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config_of(folder) | {"choice": {"name": "wiser"}}))
    with pytest.raises(ValueError, match="unknown method 'diffprune-wiser'"):
        choose(folder)


def test_evaluation_measures_both_from_one_artefact(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffprune.saved_pruners.load_base", lambda *_, **__: tiny.build("llava"))
    names = ["full", "random", "diffprune", "diffprune-diverse", "diffprune-diverse[beta=2]"]
    _, saved = load_pruners(parse_pruners(str(folder)), "", "cpu", names=names)
    assert [(one.label, one.origin["choice"]) for one in saved] == [
        ("diffprune", "top-k"),
        ("diffprune-diverse", "diverse"),
        ("diffprune-diverse[beta=2]", "diverse"),
    ]
    assert len({id(one.pruner.scorer) for one in saved}) == 1  # type: ignore[union-attr]
    _, labelled = load_pruners(parse_pruners(f"mine={folder}"), "", "cpu", names=names)
    assert [one.label for one in labelled] == ["mine"]
