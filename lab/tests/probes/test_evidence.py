"""The page of evidence is what the results files say."""

from pathlib import Path

import pytest

from diffprune.results import write_results
from diffprune_lab.probes import alignment, classifier_findings, coherence, evidence, landscape, relevance
from diffprune_lab.probes.figures import ORDER
from diffprune_lab.probes.store import Store


def test_the_page_is_what_the_results_say(root: Path) -> None:
    text = (root / "docs/evidence.md").read_text()
    assert text == evidence.refresh(text, root / "results"), "run python -m diffprune_lab.probes.evidence"
    for name in evidence.FINDINGS:
        assert f"<!-- probe: {name} -->" in text
        has_results = (root / f"results/{name}.json").exists()
        assert (f"there is no `results/{name}.json`" in text) != has_results


@pytest.mark.parametrize("probe", [coherence, landscape, alignment, relevance], ids=lambda probe: probe.NAME)
def test_every_probe_has_words_for_what_it_found(probe, measured, tmp_path: Path) -> None:
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


def test_the_high_resolution_block_compares_with_the_nearest_method(tmp_path: Path) -> None:
    ours = {"method": "diffprune", "keep": 320, "retention": 97.25, "retention_std": 0.5, "n_seeds": 3}
    other = {"method": "divprune", "keep": 320, "retention": 95.0, "retention_std": 0.0, "n_seeds": 1}
    bound = {"method": "oracle", "keep": 320, "retention": 99.0, "retention_std": 0.0, "n_seeds": 1}

    def said(low: float) -> str:
        rows = [ours, {**other, "lead": 2.25, "lead_ci95": [low, 4.0]}, {**bound, "lead": -1.75, "lead_ci95": [-2, -1]}]
        write_results(tmp_path / "scenes_next.json", name="scenes_next", rows=rows, notes="a trial", commit="abc1234")
        return evidence.block("scenes_next", tmp_path)

    assert "97.2 ± 0.5 % (3 seeds)" in said(0.5) and "ahead of all others, as in the paper" in said(0.5)
    assert "2.2 points ahead of the best, divprune (its lead lies between 0.5 and 4.0)" in said(
        0.5
    ) and ".png" not in said(0.5)
    assert "not ahead of all others" in said(-0.5)
    assert "| oracle | 99.0 |" in said(0.5)
    rows = [{**other, "lead": 1.0, "lead_ci95": [0, 2]}]
    write_results(tmp_path / "scenes_next.json", name="scenes_next", rows=rows, notes="a trial", commit="abc1234")
    assert "No scorer was measured" in evidence.block("scenes_next", tmp_path)


def start(backbone: str, keep: float, **ratio: float) -> dict:
    return {"backbone": backbone, "method": "diffprune_plain", "keep": keep, "moment": 0.0, "cosine": 0.5, **ratio}


def starts(keep: float, *ratios: float | None) -> list[dict]:
    """Rows of Tiny, Small and Base; None where a ratio cannot be given."""
    return [
        start(name, keep, **({"ratio_at_least": 9.0} if ratio is None else {"ratio": ratio}))
        for name, ratio in zip(ORDER, ratios, strict=False)
    ]


def test_ratios_of_gradients_are_told_by_budget() -> None:
    said = classifier_findings._starts([*starts(0.25, 4.5, 6.0, 20.0), start("deit-tiny", 0.5, ratio_at_least=1.25)])
    assert "25 % kept: DeiT-Tiny 4.5, DeiT-Small 6.0, DeiT-Base 20.0; 50 % kept: DeiT-Tiny at least 1.2." in said
    assert "none" in classifier_findings._starts([start("deit-tiny", 0.25)])


@pytest.mark.parametrize(
    "rows, words",
    [
        ([*starts(0.25, 4.5, 6.0, 20.0), *starts(0.5, 20.0, 6.0, 4.5)], "With 25 % kept this agrees"),
        (starts(0.25, 20.0, 6.0, 4.5), "does not agree"),  # shrinking
        (starts(0.25, 3.0, 6.0, 20.0), "does not agree"),  # out of the paper's range
        (starts(0.25, 4.5, 6.0, None), "is not known"),
        (starts(0.25, 4.5, 6.0), "is not known"),  # without the largest
    ],
)
def test_ratios_of_gradients_are_held_against_the_papers(rows: list[dict], words: str) -> None:
    assert words in classifier_findings._starts(rows)


def test_names_of_older_files_are_read_as_todays() -> None:
    old = {"method": "taught", "lift": 2.0, "asked_first": 0.25}
    assert evidence.renamed(old) == {"method": "supervised", "lift": 2.0, "preference_first": 0.25}
    assert evidence.renamed({"estimator": "x"}) == {"estimator": "x"}
    assert (
        evidence.with_new_names("taught: a scorer; asked_last: more") == "supervised: a scorer; preference_last: more"
    )
