"""How far the throttled loss agrees with that of dropping, and the temperature that a run starts from for it."""

import json
from typing import Any

import pytest
import torch

from diffprune.config import STARTS, BudgetConfig, make_config
from diffprune.model import PrunedVLM
from diffprune.train import trainer as trainer_module
from diffprune.train.agreement import (
    Captions,
    choose_start,
    correlation,
    fixed_logits,
    random_rankings,
    smallest_share,
)
from diffprune.train.watch import read_metrics
from tests import tiny
from tests.train.runs import train


@pytest.fixture(scope="module")
def some() -> tuple[PrunedVLM, list[Captions]]:
    """A tiny model and a few captions."""
    vlm = PrunedVLM(*tiny.build("llava"), method="diffprune", keep=4)
    batch = vlm.prepare([tiny.picture(0), tiny.picture(1)], ["a", "b"], ["c", "d"])
    tokens = vlm.encode(batch)
    assert tokens is not None
    return vlm, [Captions(batch=batch, tokens=tokens, ids=[0, 1], seed=42, remove_below=1e-3)]


def test_rankings_come_in_opposites_and_padding_counts_for_nothing() -> None:
    vlm = PrunedVLM(*tiny.build("llava_next"), method="full")
    batch = vlm.prepare([tiny.picture(0, (60, 30)), tiny.picture(1, (30, 30))], ["a", "b"])
    tokens = vlm.encode(batch)
    assert tokens is not None and not tokens.mask.all()
    ((first, second, third, fourth),) = random_rankings([tokens], 4, seed=1)
    real = tokens.mask
    torch.testing.assert_close(first[real], -third[real])
    torch.testing.assert_close(second[real], -fourth[real])
    assert not torch.allclose(first[real].abs(), second[real].abs())
    with torch.autocast("cpu", torch.bfloat16):
        assert random_rankings([tokens], 4, seed=1)[0][0].dtype == torch.float32
    for row, mask in zip(first, real, strict=True):
        assert row[mask].mean().item() == pytest.approx(0, abs=1e-4)
        assert row[mask].std(correction=0).item() == pytest.approx(1, rel=1e-3)


def test_correlation_is_within_rows_and_0_without_variation() -> None:
    table = torch.tensor([[1.0, 2.0, 3.0], [11.0, 12.0, 13.0]])
    assert correlation(table, 5 + 2 * table) == pytest.approx(1)
    assert correlation(table, -table + torch.tensor([[0.0], [90.0]])) == pytest.approx(-1)
    assert correlation(table, torch.ones(2, 3)) == 0
    assert correlation(table, torch.full((2, 3), torch.nan)) == 0


@pytest.mark.parametrize(
    ("values", "start", "tried"),
    [
        ({0.25: 0.8, 2.0: 0.65, 1.0: 0.9}, 2.0, 2),  # the highest that is nearly as good; no more is measured
        ({0.25: 0.8, 2.0: 0.1, 1.0: 0.5, 0.5: 0.7}, 0.5, 4),
        ({0.25: 0.8, 2.0: 0.5}, 0.25, 2),
        ({0.25: -0.1, 2.0: -0.3}, 0.25, 2),  # nothing to be trusted
        ({0.25: 0.0, 2.0: 0.0}, 0.25, 2),  # nothing that varies
        ({0.25: -0.1, 2.0: 0.1}, 2.0, 2),
    ],
)
def test_the_start_is_the_highest_temperature_about_as_good_as_the_lowest(values, start, tried) -> None:
    found, seen = choose_start(iter(values.items()))
    assert found == start and len(seen) == tried


def test_the_smallest_budget_is_a_share_and_no_less_than_a_twentieth(some) -> None:
    _, captions = some
    num_tokens = int(captions[0].tokens.counts[0])
    assert smallest_share(BudgetConfig(range=(0.01, 0.4)), captions) == 0.05
    assert smallest_share(BudgetConfig(range=(5, 12)), captions) == pytest.approx(5 / num_tokens)
    assert smallest_share(BudgetConfig(keep=0.25), captions) == 0.25
    assert smallest_share(BudgetConfig(keep=10_000), captions) == 1.0


def test_a_method_has_its_own_scorer_again_after_an_error(some) -> None:
    vlm, captions = some
    own = vlm.method.scorer
    with pytest.raises(RuntimeError), fixed_logits(vlm.method, captions[0].tokens.x[..., 0]):
        assert vlm.method.scorer is not own
        raise RuntimeError
    assert vlm.method.scorer is own


def test_a_run_finds_its_start_once_and_keeps_it_when_resumed(disk, tmp_path, monkeypatch) -> None:
    measured = {0.25: 0.8, 2.0: 0.5}
    asked = []

    def measure(vlm: Any, captions: Any, keep: float, taus: Any) -> Any:
        asked.append((len(captions), keep, tuple(taus)))
        return ((tau, measured[tau]) for tau in taus)

    monkeypatch.setattr(trainer_module, "agreement", measure)
    changes: Any = {"tau": {"start": "auto"}, "optim": {"steps": 6}, "method": {"standardise": True}}
    original = trainer_module.Trainer.save
    monkeypatch.setattr(trainer_module.Trainer, "save", lambda self: original(self) or _stop(self))
    with pytest.raises(KeyboardInterrupt):
        train(disk, tmp_path, **changes)
    monkeypatch.setattr(trainer_module.Trainer, "save", original)
    train(disk, tmp_path, resume=True, **changes)
    assert len(asked) == 1 and asked[0][2] == (STARTS[-1], *STARTS[:-1])
    records = read_metrics(tmp_path)
    taus = [record["tau"] for record in records if record["kind"] == "train"]
    assert taus[0] == 0.25 and len(taus) == 6 and taus[-1] == 0.1
    assert [record for record in records if record["kind"] == "start"] == [
        {"kind": "start", "step": 0, "tau": 0.25, "agreement_0.25": 0.8, "agreement_2": 0.5}
    ]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])["kind"] == "start"


def _stop(run: trainer_module.Trainer) -> None:
    if run.state.step == 2:
        raise KeyboardInterrupt


def test_a_start_is_found_with_a_model_that_has_learned_nothing(disk, tmp_path) -> None:
    changes: Any = {"optim": {"steps": 2}, "method": {"standardise": True}}
    summary = train(disk, tmp_path / "auto", tau={"start": "auto"}, **changes)
    start, *steps = read_metrics(tmp_path / "auto")
    assert summary["ended"] == "finished" and start["kind"] == "start" and start["tau"] in STARTS
    train(disk, tmp_path / "given", tau={"start": start["tau"]}, **changes)
    assert [record.get("loss") for record in steps] == [
        record.get("loss") for record in read_metrics(tmp_path / "given")
    ]  # measuring has changed nothing


def test_a_start_is_found_for_diffprune_alone(disk, tmp_path) -> None:
    with pytest.raises(
        ValueError, match=r"tau.start=auto is measured with diffprune's throttled loss, and 'gumbel_ste'"
    ):
        train(disk, tmp_path / "a", method={"name": "gumbel_ste"}, tau={"start": "auto"})
    with pytest.raises(ValueError, match=r"with standardised logits, and method.standardise is false; set it to true"):
        train(disk, tmp_path / "b", method={"standardise": False}, tau={"start": "auto"})


def test_rows_that_cannot_be_used_are_nothing_to_measure_with(disk, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(trainer_module.Trainer, "_first", lambda *_: iter(()))
    with pytest.raises(ValueError, match=r"none of the first 32 rows of .* can be used, so tau.start=auto"):
        train(disk, tmp_path, tau={"start": "auto"}, method={"standardise": True})


def test_bad_starts_are_refused() -> None:
    some = {"backbone": {"name": "llava"}, "budget": {"keep": 4}, "data": {"name": "x"}}
    for start, words in (("aut", "tau.start is 'aut': must be a number or 'auto'"), (0.0, "tau.start is 0.0")):
        with pytest.raises(ValueError, match=words):
            make_config({**some, "tau": {"start": start}})
    with pytest.raises(ValueError, match=r"tau.end is 0.5: must be above 0 and at most the lowest start of auto, 0.25"):
        make_config({**some, "tau": {"start": "auto", "end": 0.5}})
    with pytest.raises(ValueError, match="which `diffprune train` alone can find out"):
        _ = make_config({**some, "tau": {"start": "auto"}}).tau.given_start
