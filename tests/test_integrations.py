"""Plug-ins where their packages are not installed, or not as they should be; how the harness's samples become units."""

import statistics
import sys
from pathlib import Path

import pytest

from diffprune.cli import main as cli
from diffprune.extras import missing_modules
from diffprune.integrations.lmms import require_harness
from diffprune.integrations.readings import counted, read
from diffprune.integrations.suites import PAPER, suite_tasks

BENCHMARKS = {one.task: one for one in PAPER}


@pytest.fixture
def old_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of the harness's name as it was before it took models by entry points."""
    models = tmp_path / "lmms_eval" / "models"
    models.mkdir(parents=True)
    for folder in (models, models.parent):
        (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "lmms_eval"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "lmms_eval"]:
        del sys.modules[name]


def test_a_harness_too_old_for_entry_points_is_told(old_harness, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"too old: it takes no models by entry points; update it"):
        require_harness()
    assert cli._run(["eval", "--harness", "lmms", "--model", "scenes-nano", "--device", "cpu"]) == 2
    assert "too old" in capsys.readouterr().err


@pytest.mark.skipif(not missing_modules("lmms"), reason="the harness is installed here")
def test_a_harness_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._run(["eval", "--harness", "lmms", "--model", "scenes-nano", "--device", "cpu"]) == 2
    assert "'lmms' is not installed: run pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--harness", "helm"], "no harness 'helm'; choose lmms"),
        (["--harness", "lmms", "--suite", "papers"], "no suite 'papers'; choose paper"),
        (["--harness", "lmms", "--blind"], "--blind cannot be asked through a harness"),
        (["--harness", "lmms", "--methods", "oracle"], "oracle"),
    ],
)
def test_a_mistake_is_one_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert cli._run(["eval", *arguments, "--device", "cpu"]) == 2
    assert words in capsys.readouterr().err


def test_the_suite_has_ten_tasks_each_with_a_note() -> None:
    assert len(suite_tasks("paper")) == 10 == len({one.column for one in PAPER})
    assert all(one.note and one.split in one.row_note and one.keys[0] in one.row_note for one in PAPER)


def sample(place: int, key: str, value) -> dict:
    return {"doc_id": place, key: value}


def test_shares_are_units_in_the_order_of_the_data() -> None:
    gqa = BENCHMARKS["gqa"]
    samples = [sample(1, "exact_match", 0.0), sample(0, "exact_match", 1.0), sample(2, "exact_match", 0.6)]
    scored, maximum = read(gqa, counted(gqa, samples))
    assert scored.units == pytest.approx([100.0, 0.0, 60.0]) and maximum == 100


def test_pope_is_one_f1_and_an_odd_answer_is_no_miss() -> None:
    said = [("yes", "yes"), ("yes", "no"), ("no", "yes"), ("no", "no"), ("maybe", "yes"), ("yes", "yes")]
    pope = BENCHMARKS["pope"]
    verdicts = [{"prediction": p, "ground_truth": t, "score": float(p == t)} for p, t in said]
    scored, _ = read(pope, [sample(i, "pope_f1_score", one) for i, one in enumerate(verdicts)])
    assert scored.score == pytest.approx(100 * 2 * 2 / (2 * 2 + 1 + 1))  # two right, one false alarm, one miss
    assert statistics.fmean(scored.units) == pytest.approx(scored.score) and len(scored.units) == 6


def test_mme_adds_perception_and_cognition_by_pairs() -> None:
    mme = BENCHMARKS["mme"]
    right = {("count", "a"): (1, 1), ("count", "b"): (1, 0), ("code_reasoning", "c"): (0, 1)}
    keys = {"count": "mme_perception_score", "code_reasoning": "mme_cognition_score"}
    samples = [
        sample(i, keys[category], {"category": category, "question_id": name, "score": float(value)})
        for i, ((category, name), value) in enumerate((pair, v) for pair, both in right.items() for v in both)
    ]
    scored, maximum = read(mme, counted(mme, samples))
    assert maximum == 400 and scored.score / 100 * maximum == pytest.approx((200 + 50) / 2 + 50)
    assert len(scored.units) == 3


def test_seed_counts_pictures_and_leaves_videos_out() -> None:
    seed = BENCHMARKS["seedbench"]
    rows = [("seed_image", "a", "A"), ("seed_video", "B", "B"), ("seed_image", "C", "D")]
    samples = [sample(i, key, {"pred": p, "answer": a}) for i, (key, p, a) in enumerate(rows)]
    found = counted(seed, samples)
    assert [one["doc_id"] for one in found] == [0, 2] and read(seed, found)[0].score == 50.0
