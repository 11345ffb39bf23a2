"""lmms-eval: the plug-in answers as our own runner does, in one process and in two, and the suite is what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diffprune.evaluate.answers import answers_file
from diffprune.integrations.resuming import process_file
from diffprune.integrations.suites import PAPER
from tests.integrations import recorded

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]  # the harness's warnings are its own

KINDS = {"scenes_presence": ("pope", 13), "scenes_open": ("gqa", 12)}  # 25 questions: two processes have 13 and 12
PRUNER, DEPLOYED = "scenes-llava-diffprune", "diffprune-diverse"  # how it chooses, as its config says
KEEP = 32


def run(folder: Path, *arguments: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """A module of this environment in its own process, or in several that share the work."""
    python = [sys.executable, "-m"]
    if ranks > 1:
        python += ["torch.distributed.run", f"--nproc_per_node={ranks}", "--master_port=29519", "-m"]
    more = {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "HF_DATASETS_CACHE": str(folder / "cache")}
    return subprocess.run(
        [*python, *arguments], cwd=folder, env=os.environ | more, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("harness")


@pytest.fixture(scope="module")
def native(folder: Path) -> dict[str, list[str]]:
    """What our own runner answers to the questions of both tasks: by method, task after task. Writes the tasks."""
    from diffprune.api import load_vlm
    from tests.integrations.local_tasks import pictures_of, write_scenes_task

    vlm = load_vlm(PRUNER, keep=str(KEEP), device="cpu")
    methods = {
        "full": vlm.with_method("full"),
        "random": vlm.with_method("random", keep=KEEP, seed=0),
        DEPLOYED: vlm,
    }
    said: dict[str, list[str]] = {method: [] for method in methods}
    for name, (kind, count) in KINDS.items():
        task = write_scenes_task(folder / "tasks", name, kind, count)
        prompts = [question.prompt for question in task.questions]
        for method, one in methods.items():
            said[method] += one.generate(images=pictures_of(task), text=prompts, max_new_tokens=8)
    assert {len(answers) for answers in said.values()} == {25} and said["full"] != said["random"]
    return said


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_answer_is_the_native_runner_s(folder: Path, native: dict[str, list[str]], ranks: int) -> None:
    out = folder / f"ranks{ranks}.json"
    done = run(
        folder, "diffprune", "eval", "--harness", "lmms", "--tasks", ",".join(KINDS), "--include", "tasks",
        "--pruner", PRUNER, "--methods", "random", "--seeds", "0", "--keep", str(KEEP), "--batch-size", "5",
        "--device", "cpu", "--out", str(out), ranks=ranks,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told = [f"process {rank + 1} of {ranks} answers" in done.stderr for rank in range(ranks)]
    assert told == [ranks > 1] * ranks  # there really were so many
    sheet = json.loads(out.with_suffix(".answers.json").read_text())
    assert {run["method"]: run["said"] for run in sheet["runs"]} == native
    rows = json.loads(out.read_text())["rows"]
    (summary,) = [row for row in rows if row["method"] == "random" and "retention" in row]
    same = sum(a == b for a, b in zip(native["full"], native["random"], strict=True))
    assert summary["unchanged"] == pytest.approx(same / len(native["full"]))
    lengths = {row["method"]: row["prompt_tokens"] for row in rows if row.get("task") == "scenes_open"}
    assert lengths["full"] - lengths[DEPLOYED] == pytest.approx(576 - KEEP)  # the harness's own logs show the saving


KILLED = """\
import os, sys
sys.path.insert(0, sys.argv.pop(1))
point, rank = sys.argv.pop(1).split("/")
if os.environ.get("RANK", "0") == rank:
    from tests.evaluate.killed import die_at
    die_at(point)
from diffprune.cli.main import main
main()
"""


@pytest.mark.parametrize(("ranks", "point"), [(1, "between@7/0"), (2, "after@3/1")])
def test_a_killed_run_goes_on_and_asks_nothing_twice(
    folder: Path, native: dict[str, list[str]], ranks: int, point: str
) -> None:
    """SIGKILL in the middle of the second measurement; the answers file ends as an unbroken run's."""
    (folder / "killed_run.py").write_text(KILLED)
    whole, broken = folder / f"whole{ranks}.json", folder / f"broken{ranks}.json"
    arguments = [
        "eval", "--harness", "lmms", "--tasks", ",".join(KINDS), "--include", "tasks", "--model", "scenes-nano",
        "--methods", "random", "--seeds", "0", "--keep", "16", "--batch-size", "5", "--device", "cpu", "--out",
    ]  # fmt: skip
    assert run(folder, "diffprune", *arguments, str(whole), ranks=ranks).returncode == 0
    root = str(Path(__file__).parents[2])
    assert run(folder, "killed_run", root, point, *arguments, str(broken), ranks=ranks).returncode != 0
    assert not broken.exists()
    journals = [process_file(broken, rank) for rank in range(ranks)]
    for journal in journals:
        journal.with_suffix(".kept").hardlink_to(journal)  # sees what is added, and stays
    done = run(folder, "diffprune", *arguments, str(broken), ranks=ranks)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not any(journal.exists() for journal in journals)
    assert answers_file(broken).read_bytes() == answers_file(whole).read_bytes()
    assert json.loads(broken.read_text())["rows"] == json.loads(whole.read_text())["rows"]
    asked = []
    for journal in journals:
        first, *lines = [json.loads(line) for line in journal.with_suffix(".kept").read_text().splitlines()]
        assert first["made_by"]["processes"] == str(ranks)
        own = [place for line in lines for place in line["asked"]]
        asked += own if journal == journals[0] else dict.fromkeys(own)  # the second has one less, and is padded
    assert sorted(asked) == list(range(2 * 25))
    other = run(folder, "diffprune", *arguments, str(broken), "--limit", "4", ranks=ranks)
    assert other.returncode != 0 and "holds answers with other questions" in other.stderr
    assert run(folder, "diffprune", *arguments, str(broken), ranks=ranks).returncode == 0  # it is over


def test_the_harness_s_own_command_knows_the_model(folder: Path, native: dict[str, list[str]]) -> None:
    done = run(
        folder, "lmms_eval", "--model", "diffprune", "--model_args", f"pruner={PRUNER},keep={KEEP}",
        "--tasks", "scenes_open", "--include_path", "tasks", "--batch_size", "5", "--force_simple",
        "--log_samples", "--output_path", "logs",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (log,) = (folder / "logs").rglob("*samples_scenes_open.jsonl")
    samples = sorted((json.loads(line) for line in log.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    assert [sample["filtered_resps"] for sample in samples] == native[DEPLOYED][13:]
    assert all(sample["token_counts"][0]["input_tokens"] < 576 for sample in samples)


def test_a_conversation_is_asked_as_one() -> None:
    from lmms_eval.api.instance import Instance
    from PIL import Image

    from diffprune.api import load_vlm
    from diffprune.integrations.lmms_model import Chat

    vlm = load_vlm("none", model="scenes-nano", method="random", keep="16", device="cpu")
    picture = Image.new("RGB", (192, 192), "red")
    turns = [
        {"role": "user", "content": [{"type": "image", "url": picture}, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "A ball."}]},
        {"role": "user", "content": [{"type": "text", "text": "Which color does it have?"}]},
    ]
    model = Chat(vlm=vlm, batch_size=4)
    model.task_dict = {"talk": {"test": [turns, turns[:1]]}}
    requests = [
        Instance(
            "generate_until",
            ("", lambda doc: doc, {"max_new_tokens": 4, "until": "\n"}, place, "talk", "test"),
            place,
            {"task": "talk", "doc_id": place, "repeats": 1},
        )
        for place in (0, 1)
    ]
    whole, first = model.generate_until(requests)
    assert whole.text == vlm.generate(messages=turns, max_new_tokens=4).split("\n")[0].strip()
    assert first.text == vlm.generate(images=[picture], text="What is it?", max_new_tokens=4).split("\n")[0].strip()
    assert whole.token_counts.input_tokens > first.token_counts.input_tokens


def test_a_whole_suite_is_asked_summed_up_and_noted(folder: Path) -> None:
    from tests.integrations.local_tasks import write_benchmarks

    write_benchmarks(folder)
    out = folder / "paper.json"
    done = run(
        folder, "diffprune", "eval", "--harness", "lmms", "--suite", "paper", "--model", "scenes-nano",
        "--methods", "random", "--keep", "16", "--seeds", "0", "--batch-size", "8", "--device", "cpu",
        "--versus", "random", "--out", str(out), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(out.read_text())
    assert json.loads(done.stdout) == results["rows"]  # nothing of the harness is printed among them
    scores = {row["task"]: row for row in results["rows"] if row["method"] == "full" and "task" in row}
    assert list(scores) == [one.task for one in PAPER]
    for one in PAPER:
        assert scores[one.task]["notes"] == one.row_note and "chance" in scores[one.task]
    assert scores["mme"]["score_raw"] == pytest.approx(scores["mme"]["score"] / 100 * 200 * 3)  # three subtasks here
    asked = json.loads(out.with_suffix(".answers.json").read_text())["questions"]
    assert sum(question["task"] == "seedbench" for question in asked) == 7  # the one about a video does not count
    (summary,) = [row for row in results["rows"] if row["method"] == "random" and "retention" in row]
    assert summary["ci95"][0] <= summary["retention"] <= summary["ci95"][1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pruner", "runs/nowhere", "--tasks", "scenes_open", "--include", "tasks"], "runs/nowhere"),
        (["--model", "scenes-nano", "--tasks", "pope"], "lmms-lab-encoder/POPE"),
        (["--model", "scenes-nano", "--tasks", "popp"], "has no task 'popp'"),
        (["--model", "scenes-nano", "--suite", "papers"], "no suite 'papers'"),
    ],
)
def test_a_failed_run_ends_with_a_sentence_and_a_code(native, folder: Path, arguments: list[str], words: str) -> None:
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    if not (empty / "tasks").exists():
        (empty / "tasks").symlink_to(folder / "tasks")
    done = run(empty, "diffprune", "eval", "--harness", "lmms", "--device", "cpu", *arguments)
    assert done.returncode == 2
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("diffprune:")]
    assert words in sentence
    if "POPE" in words:
        assert str(empty / words) in sentence and str(empty / "cache") in sentence


def test_the_tasks_and_keys_of_the_suite_are_those_of_the_harness() -> None:
    from lmms_eval.tasks import TaskManager

    manager = TaskManager()
    for one in PAPER:
        assert one.task in manager.task_index
        config = manager._get_config(one.task)
        assert set(one.keys) <= {metric["metric"] for metric in config["metric_list"]}, one.task
        assert (config["dataset_path"], config["test_split"]) == (one.hub, one.split)


def test_recorded_answers_are_judged_by_the_harness_as_recorded() -> None:
    for record in recorded.read_records():
        assert recorded.harness(record) == pytest.approx(record["harness"], abs=1e-9), record
