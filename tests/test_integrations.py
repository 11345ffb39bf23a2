"""Plug-ins where their packages are not installed, or not as they should be; how the harness's samples become units."""

import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from diffprune.cli import main as cli
from diffprune.extras import missing_modules
from diffprune.integrations.lmms import require_harness
from diffprune.integrations.readings import counted, read
from diffprune.integrations.resuming import Said, answer_open, open_journal, process_file, questions_text
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
        (["--harness", "lmms", "--questions", "8"], "--questions cannot be asked through a harness; give --limit"),
        (["--harness", "lmms", "--split", "validation"], "--split cannot be asked through a harness"),
        (["--harness", "lmms", "--max-new-tokens", "8"], "--max-new-tokens cannot be asked through a harness"),
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


# A run that was killed -----------------------------------------------------------------------------------------------

ROWS = {"pope": 4, "gqa": 3}
ASKED = [(task, row) for task, count in ROWS.items() for row in range(count)]


class Model:
    """Answers in batches of two, and is killed before one of them."""

    def __init__(self, killed_at: int = -1) -> None:
        self.asked: list[int] = []
        self.killed_at = killed_at

    def __call__(self, places: Sequence[int]) -> Iterator[tuple[Sequence[int], list[Said]]]:
        for number, start in enumerate(range(0, len(places), 2)):
            if number == self.killed_at:
                raise KeyboardInterrupt
            batch = places[start : start + 2]
            self.asked += batch
            yield batch, [(f"answer {ASKED[place]}", 10 + place) for place in batch]


def test_a_harness_is_not_asked_twice_for_what_is_written_down(tmp_path: Path) -> None:
    path = tmp_path / "x.answers.jsonl"
    expected = [(f"answer {row}", 10 + place) for place, row in enumerate(ASKED)]
    full, pruned = open_journal(path, {"model": "a"}, ROWS, runs=2)
    assert answer_open(ASKED, full, Model()) == expected
    with pytest.raises(KeyboardInterrupt):
        answer_open(ASKED, pruned, killed := Model(killed_at=2))
    assert killed.asked == [0, 1, 2, 3]
    with path.open("ab") as file:
        file.write(b'{"asked": [11], "runs": [{"sa')  # within a line
    full, pruned = open_journal(path, {"model": "a"}, ROWS, runs=2)
    assert answer_open(ASKED, full, again := Model()) == expected and again.asked == []
    assert answer_open(ASKED, pruned, again) == expected and again.asked == [4, 5, 6]
    with pytest.raises(ValueError, match="holds answers with other model"):
        open_journal(path, {"model": "b"}, ROWS, runs=2)


def test_without_a_journal_everything_is_asked() -> None:
    model = Model()
    assert [text for text, _ in answer_open(ASKED, None, model)] == [f"answer {row}" for row in ASKED]
    assert model.asked == list(range(7))


def test_every_process_writes_a_file_of_its_own(tmp_path: Path) -> None:
    names = [process_file(tmp_path / "x.json", rank).name for rank in range(3)]
    assert names == ["x.answers.jsonl", "x.answers.1.jsonl", "x.answers.2.jsonl"]


class Docs(list[dict[str, str]]):
    """Rows of a task's data, as `datasets` has them as far as they are read here."""

    features: ClassVar = {"question": "Value('string')", "image": "List(Image(mode=None))"}

    def select_columns(self, names: list[str]) -> "Docs":
        return Docs({name: row[name] for name in names} for row in self)


def test_questions_are_known_by_their_texts_and_their_number_not_by_reading_pictures() -> None:
    def known(limit: int | None = None, **changed: str) -> str:
        docs = Docs([{"question": changed.get("question", "Who?"), "image": changed.get("image", "a")}] * 3)
        config = SimpleNamespace(task="t", doc_to_text=changed.get("prompt", "{{question}}"), generation_kwargs={})
        return questions_text([SimpleNamespace(eval_docs=docs, config=config)], limit)

    assert known() == known(limit=5) == known(image="b") and known().startswith("3, ")
    assert len({known(), known(limit=2), known(question="What?"), known(prompt="{{question}}?")}) == 4
