"""Every kind of file that is read, whole ones to start from, and mutations of them: used, or refused in one sentence.

A `Kind` makes a folder with whole files and uses it as a command would; the mutated file must then be read, or the
error must name it. Mutations are of bytes, and of values where the file has some (JSON, JSON lines, YAML).
"""

import contextlib
import copy
import io
import json
import random
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import torch
import yaml

from diffprune.answering import read_answers
from diffprune.config import DataConfig, load_config, to_yaml
from diffprune.evaluate.answers import Answers, Entry, Sheet, read_sheet, write_sheet
from diffprune.evaluate.files import read_questions
from diffprune.evaluate.journal import Journal
from diffprune.evaluate.rows import quality_rows
from diffprune.model import PrunedVLM
from diffprune.report import read_folder, render_page
from diffprune.report.formats import to_csv
from diffprune.results import check_rows, write_results
from diffprune.train.checkpointing import Checkpoint, load_latest, save_checkpoint, set_damaged_aside
from diffprune.train.feed import Broken, Sample
from diffprune.train.sources import open_feed
from diffprune.train.watch import plot_losses, read_metrics
from tests import tiny
from tests.contracts.vlm import pruned

BYTES = (
    *(b"\x00", b"\xff\xff\xff\xff", b"{", b"]", b'"', b"\n", b"1e999", b"null", b"-1", b"NaN", b"\xed\xa0\x80"),
    *(b"&a *a", b"\xe2\x80\xa8", b"[" * 3000, b"9" * 5000, b": ", b"- ", b"\t", b"!!python/object:os.system x"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3.5, 1e308, 10**400, "", "x", "\ud800", "\u2028", "é" * 3000, "../../etc/passwd"),
    *([], {}, [None], [[]], {"": None}, {"x": []}, float("nan"), float("inf"), "NaN", "\x00", [1, 2, 3], ["a"]),
)


def mutated(rng: random.Random, content: bytes) -> bytes:
    """Some bytes flipped, cut, repeated or put in."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        place = rng.randrange(max(1, len(data)))
        kind = rng.randrange(5)
        if kind == 0 and data:
            data[min(place, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[place : place + rng.randint(1, 40)]
        elif kind == 2:
            data[place:place] = data[place : place + rng.randint(1, 40)]
        elif kind == 3:
            data[place:place] = rng.choice(BYTES)
        else:
            del data[place:]
    return bytes(data)


def changed(rng: random.Random, value: Any) -> Any:
    """The value with something in it replaced by another value, left out, said twice or renamed."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        owner, key = rng.choice(list(_places(value)) or [(None, None)])
        kind = rng.randrange(5)
        if owner is None:
            return rng.choice(VALUES)
        if kind == 0:
            del owner[key]
        elif kind == 1 and isinstance(owner, list):
            owner.insert(key, copy.deepcopy(owner[key]))
        elif kind == 1:
            owner[rng.choice(["x", "", f"{key}s", "name"])] = owner.pop(key)
        else:
            owner[key] = copy.deepcopy(rng.choice(VALUES))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from _places(item)


def mutate(rng: random.Random, path: Path) -> None:
    """Change a file, by its values as often as by its bytes where it has some."""
    content = path.read_bytes()
    if rng.random() < 0.5 or path.suffix not in (".json", ".jsonl", ".yaml"):
        path.write_bytes(mutated(rng, content))
    elif path.suffix == ".json":
        path.write_text(json.dumps(changed(rng, json.loads(content))))
    elif path.suffix == ".yaml":
        path.write_text(yaml.safe_dump(changed(rng, yaml.safe_load(content)), sort_keys=False))
    else:
        lines = changed(rng, [json.loads(line) for line in content.splitlines()])
        path.write_text("".join(json.dumps(line) + "\n" for line in lines) if isinstance(lines, list) else "")


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Args:
        make: Fills a folder.
        files: Those of them that may be mutated.
        use: Reads the folder as a command would.
        by_folder: Whether an error may name the folder instead of the file.
    """

    make: Callable[[Path], None]
    files: tuple[str, ...]
    use: Callable[[Path], object]
    by_folder: bool = False


# Configs, results, what a run leaves ---------------------------------------------------------------------------------


def make_config_file(folder: Path) -> None:
    shutil.copy("configs/llava/diffprune_k64.yaml", folder / "run.yaml")


def use_config(folder: Path) -> None:
    config = load_config(folder / "run.yaml")
    (folder / "again.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert load_config(folder / "again.yaml") == config


def make_results(folder: Path) -> None:
    def row(method: str, keep: int | float, task: str, score: float) -> dict[str, Any]:
        return {"method": method, "keep": keep, "seed": 0, "task": task, "score": score, "full_score": 50.0}

    rows: list[dict[str, Any]] = [row("full", 1.0, "scenes/sign", 50.0), row("random", 32, "scenes/sign", 40.0)]
    rows += [{"method": "random", "keep": 32, "retention": 80.0, "ci95": [70.0, 90.0], "n_seeds": 1, "unchanged": 0.5}]
    rows += [{"method": "full", "path": "fast", "batch": 1, "num_visual": 576, "num_kept": 576.0, "ttft_ms": 12.5}]
    write_results(folder / "x.json", name="x", rows=rows, seeds=[0], notes="", command="made", commit="none", device="")


def use_results(folder: Path) -> None:
    found = read_folder(folder)
    render_page(found, "results", {})
    for one in found.values():
        to_csv(one)


def make_metrics(folder: Path) -> None:
    records: list[dict[str, Any]] = [{"kind": "start", "step": 0, "tau": 1.0}]
    for step in range(1, 5):
        records.append({"kind": "train", "step": step, "loss": 1.0 / step, "tau": 2.0, "lr": 0.1, "entropy": 0.5})
    records.append({"kind": "validation", "step": 4, "throttled": 0.5, "hard": 0.6, "gap": 0.1, "best": True})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))


def use_metrics(folder: Path) -> None:
    records = read_metrics(folder, until=4)
    if len(records) % 3 == 1:  # drawing is slow
        plot_losses(folder, records)


def make_checkpoints(folder: Path) -> None:
    for step in (1, 2):
        weights = {"weights": {"a": torch.full((4,), float(step))}}
        save_checkpoint(folder, step, Checkpoint({"step": step}, weights), keep=2)


def use_checkpoints(folder: Path) -> None:
    """The older one is whole, so there is always one to go on from."""
    found = load_latest(folder)
    set_damaged_aside(folder)
    again = load_latest(folder)
    assert found is not None and again is not None and found.state == again.state
    states = [json.loads((path / "state.json").read_bytes()) for path in folder.glob("checkpoint-*")]
    if all("state_digest" in state for state in states):  # as in all that this version writes
        assert torch.equal(found.tensors["weights"]["a"], torch.full((4,), float(found.state["step"])))


@cache
def base() -> tuple[Any, Any]:
    vlm = pruned("llava", "diffprune", keep=4)
    return vlm.base, vlm.processor


def make_pruner(folder: Path) -> None:
    PrunedVLM(*base(), method="diffprune", keep=4).save_pretrained(folder, base_id="some/base")


def use_pruner(folder: Path) -> None:
    model, processor = base()
    vlm = PrunedVLM.from_pretrained(folder, base=model, processor=processor)
    vlm.select(images=[tiny.picture(0)])


# Answers and questions -----------------------------------------------------------------------------------------------


RUN: dict[str, Any] = {"question": "what?", "method": "divprune", "keep": "5", "max_new_tokens": 3}


def make_answers(folder: Path) -> None:
    lines = [json.dumps({"image": f"{number}.png", "answer": "a", **RUN}) for number in range(3)]
    (folder / "answers.jsonl").write_text("\n".join(lines) + "\n")


def use_answers(folder: Path) -> None:
    assert all(isinstance(name, str) for name in read_answers(folder / "answers.jsonl", RUN))


def open_journal(folder: Path) -> Journal:
    return Journal(folder / "x.answers.jsonl", {"model": "m", "questions": "q"}, runs=2, count=4)


def make_journal(folder: Path) -> None:
    journal = open_journal(folder)
    for asked in ([0, 1], [2, 3]):
        replies = [{"said": ["a", "b\u2028c"], "first_token_kl": [0.0, 0.5], "average": [None, 3.0]} for _ in range(2)]
        journal.add(asked, replies)


def use_journal(folder: Path) -> None:
    journal = open_journal(folder)
    for place in range(4):
        if journal.missing([place]):
            journal.add([place], [{"said": ["a"]}, {"said": ["b"]}])
    assert all(isinstance(text, str) for run in range(2) for text in journal.column(run, "said"))
    open_journal(folder)


def make_sheet_file(folder: Path) -> None:
    questions = [{"id": str(n), "task": "t", "prompt": "what?", "answer": "a"} for n in range(3)]
    answers = [
        Answers(
            Entry(method, keep, 0), ["a", "b", "a"], {"t": 50.0}, {"t": 0.5}, {"t": [100.0, 0.0, 50.0]},
            values={"first_token_kl": [0.0, 0.1, None]}, right={"t": [True, False, True]},
        )
        for method, keep in (("full", 1.0), ("random", 2))
    ]  # fmt: skip
    sheet = Sheet(questions, {"t": 0.0}, answers, metrics={"t": "exact"}, made_by={"model": "m"}, notes={"t": "n"})
    write_sheet(folder / "x.answers.json", sheet)


def use_sheet(folder: Path) -> None:
    sheet = read_sheet(folder / "x.answers.json")
    if sheet.answers:
        check_rows(quality_rows(sheet.answers, sheet.answers[0], chance=sheet.chance, notes=sheet.notes))


def questions() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"image": f"{n}.png", "question": "what?", "answer": "a", "id": f"q{n}"} for n in range(2)
    ]
    rows.append({"question": "which?", "choices": ["a", "b"], "answer": 1, "turns": [["one?", "yes"]], "task": "u"})
    rows.append({"image": ["0.png", "1.png"], "question": "what?", "answers": ["a"] * 10, "subset": "s", "task": "v"})
    return rows


def save_pictures(folder: Path) -> None:
    for number in range(2):
        tiny.picture(number, (12, 8)).save(folder / f"{number}.png")


def make_questions(folder: Path) -> None:
    save_pictures(folder)
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions()))


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    tiny.picture(number, (12, 8)).save(buffer, "PNG")
    return buffer.getvalue()


def make_question_table(folder: Path) -> None:
    rows = [{"image": png(n), "question": "what?", "answer": "a", "id": f"q{n}"} for n in range(4)]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "data.parquet", row_group_size=2, compression="none")


def use_questions(folder: Path) -> None:
    found = read_questions(next(path for path in sorted(folder.glob("data.*"))))
    for task in found.tasks:
        for question in task.questions:
            found.open(question.images)


# Training data -------------------------------------------------------------------------------------------------------


def make_captions(folder: Path) -> None:
    save_pictures(folder)
    rows = [{"image": f"{n % 2}.png", "caption": f"number {n}", "question": "what?"} for n in range(4)]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_conversations(folder: Path) -> None:
    save_pictures(folder)
    turns = [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "a"}] * 2
    (folder / "data.json").write_text(json.dumps([{"image": f"{n % 2}.png", "conversations": turns} for n in range(3)]))


def make_caption_table(folder: Path) -> None:
    rows = [{"image": {"bytes": png(n), "path": None}, "caption": f"number {n}"} for n in range(4)]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "data.parquet", row_group_size=2, compression="none")


def make_shard(folder: Path) -> None:
    with tarfile.open(folder / "data.tar", "w") as shard:
        for number in range(3):
            for ending, content in ((".png", png(number)), (".json", json.dumps({"caption": "a"}).encode())):
                member = tarfile.TarInfo(f"{number}{ending}")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))


def use_training_data(folder: Path) -> None:
    single = folder / "data.json"
    feed = open_feed(DataConfig(name=str(single if single.exists() else folder), validation=1, buffer=2), 0)
    assert feed.per_epoch is not None
    positions = range(feed.per_epoch)
    for row in [*feed.validation(), *feed.read(positions, positions).values()]:
        assert isinstance(row, Sample | Broken)
        if isinstance(row, Broken):
            assert_sentence(row.reason)


KINDS: dict[str, Kind] = {
    "config": Kind(make_config_file, ("run.yaml",), use_config),
    "results": Kind(make_results, ("x.json",), use_results),
    "metrics": Kind(make_metrics, ("metrics.jsonl",), use_metrics),
    "checkpoints": Kind(
        make_checkpoints, ("checkpoint-000002/state.json", "checkpoint-000002/weights.safetensors"), use_checkpoints
    ),
    "pruner config": Kind(make_pruner, ("config.json",), use_pruner, True),
    "pruner weights": Kind(make_pruner, ("model.safetensors",), use_pruner),
    "answers of ask": Kind(make_answers, ("answers.jsonl",), use_answers),
    "answers as they come": Kind(make_journal, ("x.answers.jsonl",), use_journal),
    "answers of a run": Kind(make_sheet_file, ("x.answers.json",), use_sheet),
    "questions": Kind(make_questions, ("data.jsonl",), use_questions),
    "questions in parquet": Kind(make_question_table, ("data.parquet",), use_questions),
    "captions": Kind(make_captions, ("metadata.jsonl",), use_training_data, True),
    "conversations": Kind(make_conversations, ("data.json",), use_training_data),
    "captions in parquet": Kind(make_caption_table, ("data.parquet",), use_training_data, True),
    "shards": Kind(make_shard, ("data.tar",), use_training_data, True),
}


@cache
def template(name: str) -> Path:
    """A folder with whole files of a kind, made once."""
    folder = Path(tempfile.mkdtemp(prefix="odd-files-"))
    KINDS[name].make(folder)
    return folder


def assert_sentence(text: str) -> None:
    assert text and "\n" not in text.strip() and len(text) < 1000, f"no sentence: {text[:300]!r}"
    text.encode("utf-8")  # it can be printed


def try_one(name: str, rng: random.Random, folder: Path) -> str:
    """Mutate a file of a kind and use it: "used", or "refused" by a sentence that names it; anything else raises."""
    kind = KINDS[name]
    shutil.copytree(template(name), folder, dirs_exist_ok=True)
    file = rng.choice(kind.files)
    mutate(rng, folder / file)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            kind.use(folder)
    except ValueError as error:
        text = str(error)
        assert_sentence(text)
        named = str(folder) if kind.by_folder else Path(file).name
        assert named in text, f"it does not name {named}: {text[:300]!r}"
        return "refused"
    return "used"
