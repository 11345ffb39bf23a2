"""Tasks of lmms-eval that need no download: parquet files of scenes, one yes/no and one open, and the ten benchmarks'
repositories with a few rows each."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
from PIL import Image

from diffprune.evaluate.task import Task
from diffprune_lab.scenes.encode import scene_images
from diffprune_lab.scenes.tasks import build_task

YAML = """\
dataset_path: parquet
dataset_kwargs:
  data_files:
    test: {parquet}
task: {task}
test_split: test
output_type: generate_until
doc_to_visual: !function {module}.to_pictures
doc_to_text: "{{{{question}}}}"
doc_to_target: "answer"
generation_kwargs:
  max_new_tokens: 8
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_case: true
    ignore_punctuation: true
metadata:
  - version: 0.0
"""
MODULE = 'def to_pictures(doc):\n    return [doc["image"].convert("RGB")]\n'


def pictures_of(task: Task) -> list[Image.Image]:
    """The picture of each question of a scenes task."""
    return scene_images([question.images[0] for question in task.questions], "fixed")


def write_scenes_task(folder: Path, name: str, kind: str, count: int) -> Task:
    """A task of the harness over the first questions of a scenes task, and these questions."""
    built = build_task(kind, "test", count)
    task = Task(name, built.questions[:count], built.metric)
    rows = {
        "image": pictures_of(task),
        "question": [question.prompt for question in task.questions],
        "answer": [question.answer for question in task.questions],
    }
    folder.mkdir(parents=True, exist_ok=True)
    parquet = folder / f"{name}.parquet"
    _dataset(rows).to_parquet(parquet)
    (folder / f"{name}_utils.py").write_text(MODULE)
    (folder / f"{name}.yaml").write_text(YAML.format(parquet=parquet, task=name, module=f"{name}_utils"))
    return task


def _dataset(rows: dict[str, list[Any]]) -> datasets.Dataset:
    """Rows with their pictures as PNG bytes, which keep every pixel."""

    def png(image: Image.Image) -> dict[str, Any]:
        file = io.BytesIO()
        image.save(file, "PNG")
        return {"bytes": file.getvalue(), "path": None}

    plain = {key: values for key, values in rows.items() if key != "image"}
    images = rows["image"]
    many = isinstance(images[0], list)
    packed = [[png(one) for one in some] if many else png(some) for some in images]
    kind = datasets.List(datasets.Image()) if many else datasets.Image()
    return datasets.Dataset.from_dict({**plain, "image": packed}).cast_column("image", kind)


# The ten benchmarks' repositories, a few made-up rows each ------------------------------------------------------------

PLAIN = "---\nconfigs:\n{configs}---\n"


def write_repository(root: Path, hub: str, parts: dict[tuple[str, str], dict[str, list[Any]]]) -> None:
    """A dataset's folder as the hub has it: by (config, split) a parquet file, and a card that names them."""
    folder = root / hub
    configs: dict[str, list[tuple[str, str]]] = {}
    for (config, split), rows in parts.items():
        file = f"{config}/{split}-00000-of-00001.parquet"
        (folder / config).mkdir(parents=True, exist_ok=True)
        (_dataset(rows) if "image" in rows else datasets.Dataset.from_dict(rows)).to_parquet(folder / file)
        configs.setdefault(config, []).append((split, file))
    lines = []
    for config, files in configs.items():
        lines.append(f"- config_name: {config}\n  data_files:\n")
        lines += [f"  - split: {split}\n    path: {file}\n" for split, file in files]
    (folder / "README.md").write_text(PLAIN.format(configs="".join(lines)))


def write_benchmarks(root: Path, count: int = 8) -> None:
    """All ten, with pictures and questions of scenes: what the harness loads when it is run in that folder."""
    open_, letters, yes_no = (build_task(kind, "test", count).questions for kind in ("gqa", "seed", "pope"))
    signs = build_task("textvqa", "test", count).questions
    pairs = build_task("mme", "test", count // 2).questions
    circular = build_task("mmbench", "test", 2).questions
    ids = [str(place) for place in range(count)]

    def drawn(questions: Sequence[Any]) -> list[Image.Image]:
        return scene_images([question.images[0] for question in questions], "fixed")

    def asks(questions: Sequence[Any]) -> list[str]:
        return [question.prompt.split("\n")[0] for question in questions]

    def letters_of(questions: Sequence[Any]) -> dict[str, list[str]]:
        return {letter: [(q.choices + ("nan",) * 4)[place] for q in questions] for place, letter in enumerate("ABCD")}

    def named(name: str) -> str:
        return f"lmms-lab-encoder/{name}"

    write_repository(root, named("GQA"), {
        ("testdev_balanced_images", "testdev"): {"id": ids, "image": drawn(open_)},
        ("testdev_balanced_instructions", "testdev"): {
            "id": ids, "imageId": ids, "question": asks(open_), "answer": [question.answer for question in open_],
        },
    })  # fmt: skip
    bench = {
        # the rotations of a question are numbered 1,000,000 further on, as in the benchmark's own file
        "index": [place // 4 + 1_000_000 * (place % 4) for place in range(len(circular))],
        "question": asks(circular),
        "answer": [question.answer for question in circular],
        "hint": ["nan"] * len(circular),
        "source": ["scenes"] * len(circular),
        "split": ["dev"] * len(circular),
        "category": ["some"] * len(circular),
        "L2-category": ["any"] * len(circular),
        "image": drawn(circular),
        **letters_of(circular),
    }
    write_repository(root, named("MMBench"), {("en", "dev"): bench, ("cn", "dev"): bench})
    subtasks = ["existence", "count", "code_reasoning"]
    write_repository(root, named("MME"), {("default", "test"): {
        "question_id": [f"{place // 2}.png" for place in range(len(pairs))],
        "question": asks(pairs),
        "answer": [question.answer.capitalize() for question in pairs],
        "category": [subtasks[place // 2 % 3] for place in range(len(pairs))],
        "image": drawn(pairs),
    }})  # fmt: skip
    write_repository(root, named("POPE"), {("default", "test"): {
        "question_id": ids, "question": asks(yes_no), "answer": [question.answer for question in yes_no],
        "image": drawn(yes_no),
    }})  # fmt: skip
    choices = {
        "question": asks(letters),
        "hint": [""] * count,
        "choices": [list(question.choices) for question in letters],
        "answer": ["ABCD".index(question.answer) for question in letters],
        "image": drawn(letters),
    }
    write_repository(root, named("ScienceQA"), {("ScienceQA-IMG", "test"): choices})
    annotated = [[{"answer": a, "answer_id": i} for i, a in enumerate((q.answer,) * 10)] for q in open_]
    write_repository(root, named("VQAv2"), {("default", "validation"): {
        "question_id": ids, "question": asks(open_), "answers": annotated, "image": drawn(open_),
    }})  # fmt: skip
    for name, split in (("textvqa", "validation"), ("VizWiz-VQA", "val")):
        write_repository(root, named(name), {("default", split): {
            "question_id": ids, "question": asks(signs), "answers": [list(question.answers) for question in signs],
            "image": drawn(signs),
        }})  # fmt: skip
    write_repository(root, named("SEED-Bench"), {("default", "test"): {
        "question_id": ids,
        "question": asks(letters),
        **{f"choice_{letter.lower()}": options for letter, options in letters_of(letters).items()},
        "answer": [question.answer for question in letters],
        "data_type": ["image"] * (count - 1) + ["video"],
        "image": [[picture] for picture in drawn(letters)],
    }})  # fmt: skip
