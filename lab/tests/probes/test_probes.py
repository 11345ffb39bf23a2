"""Every probe at its tiny size, with what must hold there."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diffprune.methods.options import build_method
from diffprune.ops import take_tokens
from diffprune.types import VisualTokens
from diffprune_lab.probes import alignment, coherence, landscape, relevance
from diffprune_lab.probes.bench import Bench
from diffprune_lab.probes.data import inside_box
from diffprune_lab.probes.settings import SIZES
from diffprune_lab.probes.store import SEEDS, Store
from diffprune_lab.probes.throttling import budget_counts, draw_budgets, run_throttled


def rows_of(probe, measured, folder: Path) -> list[dict]:
    """The rows of one seed, after a round through the file, and a figure drawn from them."""
    store = Store(path=folder / "x.json", notes="", summarise=probe.summarise, key_names=probe.KEY)
    store.add(measured(probe))
    probe.draw(store.rows(), folder / "x.png")
    assert (folder / "x.png").stat().st_size > 5_000
    return store.rows()


# --- the bench --------------------------------------------------------------------------------------------------------


def test_both_methods_start_from_the_same_scorer_with_a_random_head(bench: Bench) -> None:
    first, second = (bench.start(name, 42).scorer.state_dict() for name in ("diffprune", "gumbel_ste"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert first["head.weight"].abs().min() > 0
    other = bench.start("diffprune", 123).scorer.state_dict()
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_training_moves_the_scorer_and_leaves_the_classifier_alone(bench: Bench) -> None:
    before = {name: value.clone() for name, value in bench.classifier.model.state_dict().items()}
    _, snapshots = bench.trained("diffprune", 42)
    assert [snapshot.moment for snapshot in snapshots] == [0.0, 1.0]
    assert snapshots[0].tau == 2.0 and snapshots[-1].tau == pytest.approx(0.1)
    assert not torch.equal(snapshots[0].state["scorer.head.weight"], snapshots[-1].state["scorer.head.weight"])
    after = bench.classifier.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_budgets_of_a_batch_lie_between_the_two_shares() -> None:
    k = draw_budgets(1000, 64, (0.05, 0.6), torch.Generator().manual_seed(0))
    assert (int(k.min()), int(k.max())) == (3, 38)
    assert k.median() < 13  # a logarithmic scale: half of them below the geometric mean


def test_the_backbone_learned_something_and_says_how_good_it_is(bench: Bench) -> None:
    training = bench.classifier.training
    assert training is not None and training.num_visual == 64
    assert training.top1 > 35  # four classes
    assert len(training.curve["step"]) >= 5 and training.curve["step"] == sorted(training.curve["step"])


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, is_exact", [("diffprune", True), ("gumbel_ste", False)])
def test_only_diffprunes_scorer_gradient_equals_finite_differences(bench: Bench, name: str, is_exact: bool) -> None:
    """On the classifier itself, in float64, along the normalised direction of the landscape."""
    method = bench.start(name, 42).double()
    deit = bench.cut_open()
    deit.model.double()
    try:
        encoded = deit.encode(bench.classifier.pixel_values(bench.photos.pixels[:4]).double())
        weights = list(method.scorer.parameters())
        start = [weight.detach().clone() for weight in weights]
        way = landscape.filter_normalised(start, 1)

        def loss() -> torch.Tensor:
            noise = torch.Generator().manual_seed(0)
            logits, _ = run_throttled(deit.logits, method, encoded, budget_counts(encoded, 0.25), 0.5, noise)
            return torch.nn.functional.cross_entropy(logits, bench.photos.labels[:4])

        claimed = sum(float((g * d).sum()) for g, d in zip(torch.autograd.grad(loss(), weights), way, strict=True))
        step = 1e-6
        back, here, forth = landscape.walk(weights, start, [[step * d for d in way]], 3, lambda: loss().item()).tolist()
        found = (forth - back) / (2 * step)
        assert here == loss().item()  # the walk puts the weights back
        if is_exact:
            assert claimed == pytest.approx(found, rel=1e-4) and abs(found) > 1e-7
        else:
            assert found == 0.0 and abs(claimed) > 1e-7
    finally:
        deit.model.float()


def test_equal_gradients_have_cosine_one_and_independent_ones_none() -> None:
    same = torch.randn(1, 50, generator=torch.Generator().manual_seed(0)).expand(6, -1)
    cosine, error = coherence.pairwise_cosine(same)
    assert cosine == pytest.approx(1) and error == pytest.approx(0, abs=1e-6)
    cosine, error = coherence.pairwise_cosine(torch.randn(16, 4000, generator=torch.Generator().manual_seed(0)))
    assert abs(cosine) < 3 * error + 0.01 and 0 < error < 0.02


def test_the_jackknife_error_is_the_spread_of_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(1, 30, generator=generator)
    found = [coherence.pairwise_cosine(shared + 2 * torch.randn(12, 30, generator=generator)) for _ in range(200)]
    means, errors = torch.tensor(found, dtype=torch.float64).unbind(-1)
    assert float(errors.mean()) == pytest.approx(float(means.std()), rel=0.35)


def test_a_ratio_is_given_only_where_both_cosines_are_above_0() -> None:
    def cosine(value: float, half: float) -> dict[str, Any]:
        return {"cosine": value, "ci95": [value - half, value + half]}

    ours = cosine(0.8, 0.1)
    assert coherence.compare(ours, cosine(0.2, 0.1)) == pytest.approx({"ratio": 4.0, "ratio_at_least": 0.7 / 0.3})
    assert coherence.compare(ours, cosine(0.09, 0.1)) == pytest.approx({"ratio_at_least": 0.7 / 0.19})
    assert coherence.compare(ours, cosine(-0.2, 0.1)) == {}
    assert coherence.compare(cosine(0.8, 0.9), cosine(0.2, 0.1)) == {}


# --- each probe -------------------------------------------------------------------------------------------------------


def test_coherence_compares_both_methods_along_training(bench: Bench, measured, tmp_path: Path) -> None:
    rows = rows_of(coherence, measured, tmp_path)
    cosines = [row for row in rows if "moment" in row]
    assert {(row["method"], row["moment"]) for row in cosines} == {
        ("diffprune_plain", 0.0),
        *((name, moment) for name in ("diffprune", "gumbel_ste") for moment in (0.0, 1.0)),
    }
    for row in cosines:
        assert -1 <= row["cosine"] <= 1 and row["ci95"][0] <= row["cosine"] <= row["ci95"][1]
        if "ratio" in row:
            assert row["method"] != "gumbel_ste" and row["ratio"] >= row["ratio_at_least"]
    accuracy = {(row["method"], row["keep"]): row["top1"] for row in rows if "top1" in row}
    assert {name for name, _ in accuracy} == {"diffprune", "diffprune-diverse", "gumbel_ste", "random", "box", "full"}
    assert accuracy["full", 1.0] == pytest.approx(bench.classifier.training.top1, abs=0.01)


def test_the_box_is_kept_before_anything_else(bench: Bench, monkeypatch) -> None:
    kept = []
    monkeypatch.setattr(coherence, "take_tokens", lambda x, keep: kept.append(keep) or take_tokens(x, keep))
    bench.right_when(coherence.keeping_the_box(bench, 42), 0.25)  # of 64 tokens 16
    inside = inside_box(bench.photos.boxes, 8)
    found = inside.gather(1, torch.cat(kept)).sum(-1)
    assert torch.equal(found, inside.sum(-1).clamp(max=16))


def test_too_few_pictures_for_the_batches_are_one_sentence(bench: Bench) -> None:
    many = Bench(backbone="deit-tiny", settings=bench.settings.changed(batches=99), _kept=bench._kept)
    with pytest.raises(ValueError, match="99 batches of 8 need 792 training pictures, there are 256"):
        coherence.batch_gradients(many, bench.start("diffprune", 42), 42, keep=0.25, tau=1.0)


def test_the_throttled_landscape_is_smoother_than_the_hard_one(bench: Bench, measured, tmp_path: Path) -> None:
    rows = {(row["method"], row["tau"]): row for row in rows_of(landscape, measured, tmp_path)}
    assert {name for name, _ in rows} == {"diffprune", "diffprune_plain", "gumbel_ste"}
    smooth, rough = rows["diffprune_plain", 2.0], rows["gumbel_ste", 2.0]
    assert smooth["variation"] < rough["variation"] and smooth["ratio"] > 1
    curves = smooth[SEEDS]["42"]["curves"]
    assert len(curves["line"]) == bench.settings.line and np.shape(curves["slice"]) == (4, 4)
    assert "slice" in rough[SEEDS]["42"]["curves"]
    assert "slice" not in rows["diffprune_plain", 0.1][SEEDS]["42"]["curves"]  # at the starting temperature alone
    assert "slice" not in rows["diffprune", 2.0][SEEDS]["42"]["curves"]  # the paper's has no bridge


def test_fast_products_are_for_a_gpu_and_for_the_landscape_alone() -> None:
    before = torch.get_float32_matmul_precision()
    with landscape.fast_float32("cpu"):
        assert torch.get_float32_matmul_precision() == before
    with pytest.raises(KeyError), landscape.fast_float32("cuda"):
        assert torch.get_float32_matmul_precision() == "high"
        raise KeyError
    assert torch.get_float32_matmul_precision() == before


def test_a_direction_is_as_long_as_the_weights_filter_by_filter() -> None:
    weights = [torch.randn(5, 7), torch.randn(4), torch.zeros(3)]
    matrix, vector, zeros = landscape.filter_normalised(weights, 0)
    torch.testing.assert_close(matrix.norm(dim=1), weights[0].norm(dim=1))
    torch.testing.assert_close(vector.norm(), weights[1].norm())
    assert not zeros.any()


def test_the_mean_stepwise_variation_is_what_it_says() -> None:
    assert landscape.stepwise_variation(torch.tensor([0.0, 1.0, 0.0, 3.0])) == pytest.approx(5 / 3)


def test_alignment_compares_two_operators_on_the_same_scores(measured, tmp_path: Path) -> None:
    rows = rows_of(alignment, measured, tmp_path)
    assert [row["keep"] for row in rows] == [0.5, 0.1111, 0.0556]
    for row in rows:
        for name in ("top1", "top5"):
            assert row[f"gap_{name}"] == pytest.approx(row[f"throttled_{name}"] - row[f"hard_{name}"], abs=1e-4)
            assert row[f"gap_{name}_ci95"][0] <= row[f"gap_{name}"] <= row[f"gap_{name}_ci95"][1]
            assert row["hard_top1"] <= row["hard_top5"] <= 100
        assert 0 < row["weight"] <= 1


def test_both_operators_agree_where_every_token_is_kept(bench: Bench) -> None:
    method, _ = bench.trained("diffprune", 42)
    deit = bench.cut_open()

    def throttled(encoded, k):
        return run_throttled(deit.logits, method, encoded, k, 0.1, torch.Generator().manual_seed(0))[0]

    method.throttle_block.block.zero_outputs_()  # the block is gone at deployment
    try:
        soft, hard = (bench.right_when(run, 1.0) for run in (throttled, coherence.dropping(bench, method)))
        assert torch.equal(soft, hard)
    finally:
        bench._kept.pop("trained diffprune")


def test_with_the_bridge_a_hard_choice_in_training_is_the_deployed_one(bench: Bench) -> None:
    method, remove_below = bench.start("diffprune", 42), bench.recipe_of("diffprune")[1]
    assert remove_below > 0 and bench.recipe_of("gumbel_ste") == ({}, 0.0)
    _, encoded = next(iter(bench.encoded(bench.photos)))
    deit, k, seen = bench.cut_open(), budget_counts(encoded, 0.25), []

    def read(prefix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[1])
        return deit.logits(prefix, x)

    def throttled(tau: float, below: float) -> torch.Tensor:
        return run_throttled(read, method, encoded, k, tau, torch.Generator().manual_seed(0), below)[0]

    hard = coherence.dropping(bench, method)(encoded, k)
    torch.testing.assert_close(throttled(1e-6, remove_below), hard, atol=1e-4, rtol=1e-4)
    assert (throttled(1e-6, 0.0) - hard).abs().max() > 1e-2  # noise in their place is not their absence
    throttled(2.0, remove_below)
    assert seen == [int(k[0]), 64, 64]  # while weights are soft, nothing is taken out


def test_relevance_of_random_is_chance_and_every_lead_is_against_diffprune(
    bench: Bench, measured, tmp_path: Path
) -> None:
    rows = {(row["method"], row["keep"]): row for row in rows_of(relevance, measured, tmp_path)}
    methods = {name for name, _ in rows}
    assert {
        "diffprune",
        "diffprune-diverse",
        "gumbel_ste",
        "supervised",
        "random",
        "centre",
        "cls_attention",
        "divprune",
    } <= methods
    assert {"full", "fastv", "mmtok", "oc_vtp"}.isdisjoint(methods)
    for keep in bench.settings.box_keeps:
        low, high = rows["random", keep]["ci95"]
        assert low - 0.3 < 1 < high + 0.3
        ours, centre = rows["diffprune", keep], rows["centre", keep]
        assert "lead" not in ours
        assert centre["lead"] == pytest.approx(ours["inside"] - centre["inside"], abs=1e-3)
        assert ours["lift"] == pytest.approx(ours["inside"] / ours["chance"], abs=1e-3)
        assert {"preference_first", "preference_last"} <= ours.keys() and "preference_first" not in centre
        assert set(rows["cls_attention", keep][SEEDS]["42"]["cuts"]) == {"1", "3"}
        assert set(centre[SEEDS]["42"]["cuts"]) == {"1"}


def test_what_is_the_same_at_every_budget_is_asked_once_per_tokens() -> None:
    asked = []
    ask = relevance.once_per_tokens(lambda tokens: asked.append(tokens) or len(asked))
    first, second = [1], [1]  # equal, and not the same
    assert [ask(first), ask(first), ask(second), ask(second), ask(first)] == [1, 1, 2, 2, 3]


def test_agilepruner_keeps_the_same_tokens_when_its_spectrum_is_shared(bench: Bench) -> None:
    photos = relevance.small_boxes(bench.photos, 8)
    plain = relevance.shares_inside(bench, photos, {"agilepruner": build_method("agilepruner")}, 3)
    shared = relevance._untrained(bench, photos, 3, relevance.untrained_methods() - relevance.BLIND)
    assert all(torch.equal(values, shared[key]) for key, values in plain.items())


def test_only_pictures_with_a_small_box_count(bench: Bench) -> None:
    photos = relevance.small_boxes(bench.photos, 8)
    assert 2 <= len(photos) <= len(bench.photos) and float(photos.box_shares.max()) < 0.4
    assert len(photos.seeds) == len(photos)
    large = bench.photos.__class__(
        pixels=photos.pixels[:3],
        labels=photos.labels[:3],
        boxes=torch.tensor([[0.0, 0.0, 1.0, 1.0]] * 3),
        seeds=(1, 2, 3),
    )
    between = replace(large, boxes=torch.tensor([[0.1, 0.1, 0.15, 0.15]] * 3))  # the centres of no two cells
    with pytest.raises(ValueError, match="0 of 3 pictures"):
        relevance.small_boxes(between, 8)
    with pytest.raises(ValueError, match="0 of 3 pictures"):
        relevance.small_boxes(large, 8)


def test_an_oracle_of_the_box_has_the_largest_lift_there_is(bench: Bench) -> None:
    photos = relevance.small_boxes(bench.photos, 8)
    inside = inside_box(photos.boxes, 8).double()
    found = relevance.compare(torch.full((len(photos),), 100.0, dtype=torch.float64), 100 * inside.mean(-1), None)
    assert found["lift"] == pytest.approx(1 / float(inside.mean()), rel=1e-6) and found["lift_error"] > 0


def test_a_scorer_supervised_by_the_boxes_finds_them(bench: Bench) -> None:
    kept = {name: made for name, made in bench._kept.items() if not name.startswith("trained ")}
    longer = Bench(backbone="deit-tiny", settings=bench.settings.changed(steps=60), _kept=kept)
    photos = relevance.small_boxes(bench.photos, 8)
    before, after = longer.start("diffprune", 42), longer.supervised(42)
    assert after is not None and not after.training
    inside = relevance.shares_inside(longer, photos, {"before": before, "after": after}, longer.cut_open().cut)
    chance = 100 * float(inside_box(photos.boxes, 8).double().mean())
    assert float(inside["after", 0.1111].mean()) > max(2 * chance, float(inside["before", 0.1111].mean()) + 5)


def test_the_throttled_loss_prefers_the_box_and_nothing_where_there_is_nothing_to_find(bench: Bench) -> None:
    """In drawn pictures a block of colour is the class; where boxes lie elsewhere, nothing prefers them."""
    photos, method = relevance.small_boxes(bench.train_photos, 8), bench.start("diffprune", 42)
    place = {"keeps": (0.25,), "taus": (0.5,)}
    wanted = relevance.box_preference(bench, method, photos, 42, **place)[0.25, 0.5]
    elsewhere = replace(photos, boxes=photos.boxes.roll(1, 0))
    assert wanted * len(photos) ** 0.5 > 4
    assert abs(relevance.box_preference(bench, method, elsewhere, 42, **place)[0.25, 0.5]) < wanted / 2


def test_pictures_without_a_finite_gradient_do_not_count_and_are_reported(bench: Bench) -> None:
    said: list[str] = []
    loud = replace(bench, say=said.append)
    finite = torch.arange(40.0)
    holed = torch.cat([finite, torch.tensor([float("nan"), float("inf")])])
    assert relevance._in_deviations(loud, finite) == relevance._in_deviations(loud, holed)
    assert said == ["deit-tiny: 2 of 42 pictures had no finite gradient"]
    with pytest.raises(ValueError, match="1 of 2 pictures had no finite gradient"):
        relevance._in_deviations(loud, torch.tensor([1.0, float("nan")]))


def test_without_pictures_to_train_on_nothing_is_supervised(bench: Bench) -> None:
    pictures = replace(bench.pictures)
    pictures.trained_on = None
    alone = Bench(backbone="deit-tiny", settings=bench.settings, _kept={**bench._kept, "pictures": pictures})
    assert alone.supervised(42) is None


# --- centre -----------------------------------------------------------------------------------------------------------


def test_centre_keeps_squares_around_the_middle() -> None:
    tokens = VisualTokens(x=torch.zeros(1, 36, 1), grid=(6, 6))
    method = build_method("centre")
    assert method.select(tokens, torch.tensor([4])).tolist() == [[14, 15, 20, 21]]
    kept = method.select(tokens, torch.tensor([16]))[0]
    assert {int(token) // 6 for token in kept} == {1, 2, 3, 4} == {int(token) % 6 for token in kept}


def test_centre_without_a_grid_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r"centre needs VisualTokens.grid"):
        build_method("centre").select(VisualTokens(x=torch.zeros(1, 4, 1)), torch.tensor([1]))


def test_full_settings_are_those_of_the_paper_and_train_for_the_budgets_that_are_judged() -> None:
    settings = SIZES["full"]
    assert settings.train_keep == (min(settings.keeps), max(settings.keeps))
    assert (settings.batches, settings.pictures, settings.line, settings.draws) == (32, 64, 101, 100_000)
    assert (settings.shape.side // settings.shape.patch) ** 2 >= 196
    assert math.isclose(settings.keeps[1] * 256, 28.44, abs_tol=0.01)
