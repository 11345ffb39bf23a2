"""The page of evidence is what the results files say."""

from pathlib import Path

import pytest

from diffprune.evaluate.answers import Answers, Entry, Sheet, answers_file, write_sheet
from diffprune.evaluate.join import join_files
from diffprune.evaluate.rows import quality_rows
from diffprune.results import write_results
from diffprune_lab.probes import alignment, coherence, comparison, evidence, findings, landscape, measured, relevance
from diffprune_lab.probes.store import Store


def test_the_page_is_what_the_results_say(root: Path) -> None:
    text = (root / "docs/evidence.md").read_text()
    assert text == evidence.refresh(text, root / "results"), "run python -m diffprune_lab.probes.evidence"
    for name in evidence.PAGES:
        assert f"<!-- probe: {name} -->" in text
    for name in findings.FINDINGS:
        assert f"<!-- probe: {name} -->" in text
        has_results = (root / f"results/{name}.json").exists()
        assert (f"makes `results/{name}.json`" in text) != has_results


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
    ours = {
        "method": "diffprune",
        "keep": 320,
        "retention": 97.25,
        "ci95": [96.75, 97.75],
        "ci_over": "seeds and questions",
        "n_seeds": 3,
    }
    other = {"method": "fastv", "keep": 320, "retention": 95.0, "ci95": [94, 96], "n_seeds": 1, "average": 500.0}
    write_results(tmp_path / "scenes_next.json", name="x", rows=[ours, other], notes="a trial", commit="abc1234")
    said = evidence.block("scenes_next", tmp_path)
    assert "| DiffPrune | 97.2 (96.8 to 97.8) |" in said and "| fastv* | 95.0 |" in said and ".png" not in said


def test_the_best_method_without_training_is_named_by_size_and_rate() -> None:
    row = {
        "backbone": "scenes-qwen-s",
        "pruned": 88.9,
        "ci95": [70.0, 95.0],
        "ci_over": "seeds and questions",
        "n_seeds": 3,
    }
    kept = {
        "diffprune": 90.0,
        "diffprune-diverse": 91.5,
        "diffprune[tau.start=0.5]": 80.0,
        "random": 60.0,
        "gots": 91.0,
        "divprune": 92.0,
    }
    said = findings.about_scaling([{**row, "method": name, "retention": value} for name, value in kept.items()])
    assert "| DiffPrune, diverse choice |" in said and "| tau.start=0.5 |" in said
    assert all(f"| {kept} (70.0 to 95.0) |" in said for kept in (90.0, 91.5, 80.0)) and "| 92.0 (divprune) |" in said
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


def test_first_tokens_of_joined_runs_reach_the_page(tmp_path: Path) -> None:
    """As a study does it: a process for each method, its answers joined, the page made from the joined file."""
    questions = [{"id": str(place), "task": "gqa", "prompt": "what?", "answer": "yes"} for place in range(4)]

    def part(method: str, right: int, kl: float) -> Path:
        runs = [
            Answers(
                Entry(name, keep, 0),
                said=["yes"] * count + ["no"] * (4 - count),
                score={"gqa": 25.0 * count},
                raw={"gqa": 25.0 * count},
                units={"gqa": [100.0] * count + [0.0] * (4 - count)},
                values={"first_token_kl": [far / 2, far, far, 1.5 * far], "first_token_same": [1.0] * 3 + [0.0]},
            )
            for name, keep, count, far in (("full", 1.0, 4, 0.0), (method, 8, right, kl))
        ]
        sheet, path = Sheet(questions, {"gqa": 0.0}, runs), tmp_path / f"{method}.json"
        write_results(path, name=method, rows=quality_rows(runs, runs[0]), commit="abc1234")
        write_sheet(answers_file(path), sheet)
        return path

    parts = [part("near", 3, 0.1), part("far", 1, 0.4), part("random", 2, 0.2)]
    joined = join_files(parts, tmp_path / "scenes_main.json", versus="near", notes="a trial")
    summary = {row["method"]: row for row in joined.rows if "retention" in row}
    assert {name: row["first_token_kl"] for name, row in summary.items()} == pytest.approx(
        {"full": 0.0, "near": 0.1, "far": 0.4, "random": 0.2}
    )
    assert all(row["first_token_same"] == 0.75 for row in joined.rows)
    (line,) = [line for line in evidence.block("scenes_main", tmp_path).splitlines() if line.startswith("- ")]
    assert line.startswith("- 8 tokens, 3 methods:") and "a rank correlation of 1.00" in line
    assert "first by retention is near, by `first_token_kl` near" in line
    alike = [{**one, "retention": 100.0} for one in joined.rows if "retention" in one]
    assert "yet" in findings.about_faithfulness(alike)  # no order to compare


def row(method: str, value: float, half: float = 0.5, **more: object) -> dict[str, object]:
    return {"method": method, "keep": 64, "retention": value, "ci95": [value - half, value + half], **more}


def test_a_statement_agrees_by_its_interval_and_not_by_its_mean(tmp_path: Path) -> None:
    rows = [
        row("diffprune-paper", 96.0),
        row("gots", 94.0, versus="diffprune-diverse", lead=3.5, lead_ci95=[2.0, 5.0]),
        row("oracle", 99.0),
        row("diffprune-diverse", 97.5),
        row("gumbel_ste", 95.8),
    ]
    found = measured.summaries(rows, 64)
    assert measured.next_best(found) == "gots"  # neither a bound nor an ablation of ours
    paired, unpaired = (measured.difference(found, name, "gots") for name in ("diffprune-diverse", "diffprune-paper"))
    assert paired == measured.Found(3.5, 2.0, 5.0) and comparison.verdict(paired, 4.0) == "agrees"
    assert comparison.verdict(paired, 8.1) == "same sign"
    assert unpaired is not None and unpaired.value == pytest.approx(2.0) and unpaired.low == pytest.approx(2 - 0.5**0.5)
    narrow = measured.difference(found, "diffprune-paper", "gumbel_ste")
    assert narrow is not None and narrow.value > 0 and comparison.verdict(narrow, 1.0) == "not shown"
    behind = measured.difference(found, "gots", "diffprune-diverse")
    assert behind is not None and comparison.verdict(behind, 1.4) == "opposite"
    kept = measured.Found(97.5, 97.0, 98.0)
    assert [comparison.reaches(kept, printed) for printed in (96.5, 97.6, 99.0)] == ["more", "agrees", "less"]
    write_results(tmp_path / "scarce_methods.json", name="scarce_methods", rows=rows, notes="a trial", commit="abc1234")
    said = comparison.about_paper(tmp_path)
    assert "| ahead of the next best at 64 (ours) | 1.4 | not measured | 3.5 (2.0 to 5.0, gots) | - / agrees |" in said
    assert "| ahead of the next best at 32 (ours) | 2.0 | not measured | not measured | - / - |" in said
    assert (
        "`WORLD=scarce runs/study.sh all OUT COMMIT` makes the rows of `results/scarce_methods.json`, `results/sc"
        in said
    )


def test_a_table_of_which_nothing_is_measured_is_the_sentence_that_says_so(tmp_path: Path) -> None:
    for name in [*evidence.PAGES, *findings.FINDINGS]:
        said = evidence.block(name, tmp_path)
        assert "ot measured yet" in said and "|" not in said and ".json`" in said, name
        for command in ("runs/study.sh", "runs/scarce_probes.sh", "runs/recipe.sh", "runs/measure_gpu.sh"):
            assert command not in said or (Path(__file__).parents[3] / command).exists()
    assert evidence.block("recipe", tmp_path).startswith("Not measured yet: `runs/recipe.sh OUT COMMIT` makes")
    assert "; `diffprune probe bias` makes `results/bias.json`" in evidence.block("bias", tmp_path).replace("yet;", ";")


def test_an_interval_over_questions_alone_claims_nothing_of_seeds(tmp_path: Path) -> None:
    """Of before seeds were resampled: other seeds may lie on the other side of 0."""
    lead = {"versus": "diffprune", "lead": 2.0, "lead_ci95": [1.0, 3.0], "n_seeds": 3}
    rows = [row("diffprune", 99.0, n_seeds=3), row("diffprune-scale", 97.0, **lead)]
    write_results(tmp_path / "scenes_ablation.json", name="x", rows=rows, notes="a trial", commit="abc1234")
    part = "scale gate loses at 64 (ours) | 2.3"
    said = comparison.about_table5(tmp_path)
    assert f"| {part} | 2.0 (1.0 to 3.0, questions alone) | not measured | not shown / - |" in said
    over = {"ci_over": "seeds and questions"}
    write_results(
        tmp_path / "scenes_ablation.json",
        name="x",
        rows=[one | over for one in rows],
        notes="a trial",
        commit="abc1234",
    )
    assert f"| {part} | 2.0 (1.0 to 3.0) | not measured | agrees / - |" in comparison.about_table5(tmp_path)


def test_a_difference_that_holms_correction_does_not_hold_is_marked(tmp_path: Path) -> None:
    """The tables of the same rows claim no such lead."""
    over = {"ci_over": "seeds and questions", "n_seeds": 3}
    lead = {"versus": "diffprune", "lead": 2.0, "lead_ci95": [1.0, 3.0], **over}
    for is_held, word in ((True, "agrees"), (False, "agrees\\*")):
        rows = [row("diffprune", 99.0, **over), row("diffprune-scale", 97.0, **lead, lead_holds=is_held)]
        write_results(tmp_path / "scarce_ablation.json", name="x", rows=rows, notes="a trial", commit="abc1234")
        assert f"| 2.0 (1.0 to 3.0) | - / {word} |" in comparison.about_table5(tmp_path)
    behind = measured.difference({one["method"]: one for one in rows}, "diffprune-scale", "diffprune")
    assert behind is not None and behind.low == -3.0 and comparison.verdict(behind, 1.0) == "opposite\\*"
    assert comparison.verdict(measured.Found(0.2, 0.0, 0.4, is_held=False), 0.1) == "not shown"


def test_a_part_that_is_measured_later_takes_its_place(tmp_path: Path) -> None:
    over = {"ci_over": "seeds and questions", "n_seeds": 3}
    rows = [row("diffprune", 99.0, **over), row("diffprune-scale", 97.0, **over)]
    late = row("diffprune-global", 95.0, versus="diffprune", lead=4.0, lead_ci95=[3.0, 5.0], **over)
    part = "| global attention loses at 64 (ours) | 2.8 |"
    for found, cell in ((rows, "not measured | - / - |"), ([*rows, late], "4.0 (3.0 to 5.0) | - / agrees |")):
        write_results(tmp_path / "scarce_ablation.json", name="x", rows=found, notes="a trial", commit="abc1234")
        assert f"{part} not measured | {cell}" in comparison.about_table5(tmp_path)


def test_what_is_read_behind_the_block_is_told_against_chance(tmp_path: Path) -> None:
    place = {"recipe": "paper", "place": "ground", "reads": "other", "stage": "block", "backbone": "scarce-llava"}
    rows = [
        {**place, "throttler": "global attention", "accuracy": 61.0, "chance": 50.0, "ci95": [58.0, 64.0]},
        {**place, "throttler": "diagonal attention", "accuracy": 51.0, "chance": 50.0, "ci95": [49.0, 53.0]},
        {**place, "throttler": "scale gate", "n_seeds": 0},
    ]
    write_results(tmp_path / "scarce_leak.json", name="scarce_leak", rows=rows, notes="a trial", commit="abc1234")
    said = comparison.about_paper(tmp_path)
    assert "11.0 (8.0 to 14.0) | - / read |" in said and "1.0 (-1.0 to 3.0) | - / not read |" in said
    told = comparison.about_leak(tmp_path)
    assert "no such token" in told and "OUT COMMIT out/study-scenes` makes `results/scenes_leak.json`" in told


def test_the_roughness_at_the_start_is_of_the_temperature_there(tmp_path: Path) -> None:
    place = {"method": "diffprune_plain", "moment": 0.0, "backbone": "scarce-llava"}
    rows = [
        {**place, "tau": 2.0, "ratio": 1.5, "ci95": [1.2, 1.9]},
        {**place, "tau": 0.1, "ratio": 30.0, "ci95": [25.0, 36.0]},  # at the end of a training
    ]
    write_results(tmp_path / "scarce_landscape.json", name="x", rows=rows, notes="a trial", commit="abc1234")
    said = comparison.about_paper(tmp_path)
    assert "at the start | about 24 | not measured | 1.5 (1.2 to 1.9) | - / same sign |" in said


def test_what_was_measured_without_a_number_is_not_called_unmeasured(tmp_path: Path) -> None:
    """Cosines around 0 have no ratio, and a throttler may leave no token of little weight."""
    place = {"backbone": "scarce-llava", "keep": 0.1111, "moment": 0.0}
    rows = [
        {**place, "method": "diffprune_plain", "cosine": 0.01, "ci95": [-0.1, 0.12]},
        {**place, "method": "gumbel_ste", "cosine": 0.02, "ci95": [0.01, 0.03]},
    ]
    write_results(tmp_path / "scarce_coherence.json", name="x", rows=rows, notes="a trial", commit="abc1234")
    stage = {"recipe": "paper", "place": "ground", "reads": "other", "stage": "block", "backbone": "scarce-llava"}
    leak = [{**stage, "throttler": "scale gate", "n_seeds": 0}]
    write_results(tmp_path / "scarce_leak.json", name="x", rows=leak, notes="a trial", commit="abc1234")
    said = comparison.about_paper(tmp_path)
    assert "at the start | up to 28.4 | not measured | no ratio, 0 is inside | - / not shown |" in said
    assert (
        "scale gate (paper recipe) | weaker restriction than noise | not measured | no such token | - / not sh" in said
    )
    assert "scarce_coherence.json" not in said  # nothing of it is to come
    without = [{**rows[0], "moment": 1.0}]  # another moment alone
    write_results(tmp_path / "scarce_coherence.json", name="x", rows=without, notes="a trial", commit="abc1234")
    assert "scarce_coherence.json" in comparison.about_paper(tmp_path)


def test_one_config_is_told_model_by_model_beside_the_best_known_start(tmp_path: Path) -> None:
    def rows_of(
        method: str, backbone: str, keep: float, by_seed: list[float], **more: object
    ) -> list[dict[str, object]]:
        place = {"method": method, "backbone": backbone, "keep": keep, **more}
        tasks = [
            {**place, "seed": seed, "task": task, "score": kept, "full_score": 100.0}
            for seed, kept in enumerate(by_seed)
            for task in ("a", "b")
        ]
        mean = sum(by_seed) / len(by_seed)
        return [*tasks, {**place, "retention": mean, "ci95": [mean - 1, mean + 1], "n_seeds": len(by_seed)}]

    start = "diffprune[tau.drawn=false;tau.start=0.25]"
    recipe = [
        *rows_of("diffprune", "scenes-nano", 0.1111, [97.0, 99.0, 98.0], recipe="bridge"),
        *rows_of(start, "scenes-nano", 0.1111, [97.5], recipe="bridge"),
        *rows_of("diffprune", "scarce-llava", 0.1111, [97.0, 90.0, 98.0], recipe="bridge"),
        *rows_of(start, "scarce-llava", 0.1111, [97.5], recipe="bridge"),
    ]
    old = rows_of("diffprune", "scenes-qwen-s", 0.1111, [60.0])  # of before rows had a recipe: another training
    for name, rows in (("recipe", recipe), ("scaling", old)):
        write_results(tmp_path / f"{name}.json", name=name, rows=rows, notes="a trial", commit="abc1234")
    said = evidence.block("recipe", tmp_path)
    assert "| scenes-nano | 3 | 98.0 (97.0 to 99.0) | 97.0 | 97.5 (from 0.25) | yes |" in said
    assert "| scarce-llava | 3 | 95.0 (94.0 to 96.0) | 90.0 | 97.5 (from 0.25) | no |" in said
    assert f"| scenes-qwen-s |{' not measured |' * 6}" in said
    assert "`runs/scenes_next.sh all MINUTES OUT COMMIT` makes the rows of `results/scenes_next.json`" in said
    assert "runs/recipe.sh" in said and "*Worst training*" in said  # scenes-llava is to come


def test_tables_of_our_own_scorers_are_there_with_their_files(tmp_path: Path) -> None:
    for name in ("rivals", "any_budget", "throttled"):
        assert f"makes `results/scarce_{name}.json`" in evidence.block(name, tmp_path)
    rows = [
        row("diffprune", 96.0, n_seeds=5, recipe="bridge"),
        row(
            "diffprune-throttled",
            97.0,
            n_seeds=5,
            recipe="bridge",
            versus="diffprune",
            lead=-1.0,
            lead_ci95=[-2.0, 0.5],
        ),
        row("diffprune-dedicated", 95.0, n_seeds=3, recipe="bridge"),
        row("visionselector", 94.0, n_seeds=5, recipe="default"),
        row("gots", 93.0, n_seeds=1),
    ]
    for name in ("rivals", "any_budget", "throttled"):
        write_results(tmp_path / f"scarce_{name}.json", name=name, rows=rows, notes="a trial", commit="abc1234")
    rivals = evidence.block("rivals", tmp_path)
    assert "| visionselector | 5 | 94.0 (93.5 to 94.5) |" in rivals and "gots" not in rivals
    some = evidence.block("any_budget", tmp_path)
    assert "| diffprune-dedicated | 95.0 (94.5 to 95.5) |" in some and "dash" not in some
    assert "a trial; intervals over questions alone, seeds averaged)" in some
    more = [*rows, row("diffprune", 80.0, n_seeds=5) | {"keep": 8}]
    write_results(tmp_path / "scarce_any_budget.json", name="x", rows=more, notes="a trial", commit="abc1234")
    some = evidence.block("any_budget", tmp_path)
    assert "| diffprune-dedicated | 95.0 (94.5 to 95.5) | - |" in some and "A dash: not asked" in some
    gap = "| DiffPrune | 64 | 5 | 97.0 (96.5 to 97.5) | 96.0 (95.5 to 96.5) | 1.0 (-0.5 to 2.0, questions alone) |"
    assert gap in evidence.block("throttled", tmp_path)
