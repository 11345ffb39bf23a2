"""The page of evidence is what the results files say."""

from pathlib import Path

import pytest

from diffprune.results import write_results
from diffprune_lab.probes import alignment, coherence, evidence, findings, landscape, relevance
from diffprune_lab.probes.store import Store


def test_the_page_is_what_the_results_say(root: Path) -> None:
    text = (root / "docs/evidence.md").read_text()
    assert text == evidence.refresh(text, root / "results"), "run python -m diffprune_lab.probes.evidence"
    for name in findings.FINDINGS:
        assert f"<!-- probe: {name} -->" in text
        has_results = (root / f"results/{name}.json").exists()
        assert (f"there is no `results/{name}.json`" in text) != has_results


@pytest.mark.parametrize("probe", [coherence, landscape, alignment, relevance], ids=lambda probe: probe.NAME)
def test_every_probe_has_a_table_of_what_it_found(probe, measured, tmp_path: Path) -> None:
    path = tmp_path / f"{probe.NAME}.json"
    Store(path=path, notes="a trial", summarise=probe.summarise, key_names=probe.KEY).add(measured(probe))
    said = evidence.block(probe.NAME, tmp_path)
    assert "DeiT-Tiny" in said and "A trial." in said and f"img/{probe.NAME}.png" in said and "nan" not in said


def test_the_page_says_how_many_seeds_a_number_has() -> None:
    rows = [{"backbone": name, "n_seeds": count} for name, count in (("deit-tiny", 5), ("deit-base", 3))]
    assert evidence.seed_counts(rows) == " Seeds behind a number: DeiT-Tiny 5, DeiT-Base 3."
    rows.append({"backbone": "deit-base", "n_seeds": 4})
    assert evidence.seed_counts(rows).endswith("DeiT-Base 3 to 4.")
    assert evidence.seed_counts([{"estimator": "x"}, {"backbone": "scenes-qwen-s", "n_seeds": 3}]) == ""


def test_a_block_of_no_probe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names the probe 'magic'"):
        evidence.refresh("<!-- probe: magic -->\n<!-- end of probe -->", tmp_path)


def test_a_method_inside_the_language_model_has_a_mark(tmp_path: Path) -> None:
    ours = {"method": "diffprune", "keep": 320, "retention": 97.25, "retention_std": 0.5, "n_seeds": 3}
    other = {"method": "fastv", "keep": 320, "retention": 95.0, "retention_std": 0.0, "n_seeds": 1, "average": 500.0}
    write_results(tmp_path / "scenes_next.json", name="x", rows=[ours, other], notes="a trial", commit="abc1234")
    said = evidence.block("scenes_next", tmp_path)
    assert "| DiffPrune | 97.2 ± 0.5 |" in said and "| fastv* | 95.0 |" in said and ".png" not in said


def test_the_best_method_without_training_is_named_by_size_and_rate() -> None:
    row = {"backbone": "scenes-qwen-s", "pruned": 88.9, "retention_std": 1.0}
    kept = {"diffprune": 90.0, "diffprune[tau.start=0.5]": 80.0, "random": 60.0, "gots": 91.0, "divprune": 92.0}
    said = findings.about_scaling([{**row, "method": name, "retention": value} for name, value in kept.items()])
    assert "| 90.0 ± 1.0 |" in said and "| 80.0 ± 1.0 |" in said and "| 92.0 (divprune) |" in said
    assert "gots" not in said and "93.1" in said


def test_orders_by_retention_and_by_first_tokens_are_compared_at_each_budget(tmp_path: Path) -> None:
    kept = {"a": (99.0, 0.01), "b": (97.0, 0.05), "c": (90.0, 0.04), "oracle": (99.9, 9.0), "a-throttled": (1.0, 0.0)}
    rows = [
        {"method": name, "keep": 64, "retention": retention, "first_token_kl": kl}
        for name, (retention, kl) in kept.items()
    ]
    said = findings.about_faithfulness([*rows, {"method": "a", "keep": 32, "retention": 90.0}])
    assert said.count("\n") == 1 and "- 64 tokens, 3 methods:" in said
    assert "correlation of 0.50; first by retention is a, by `first_token_kl` a" in said
    assert "yet" in findings.about_faithfulness([{"method": "a", "keep": 32, "retention": 90.0}])
