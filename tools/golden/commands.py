"""What the golden runs record by the command line: training, resuming and answers."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.golden import ROOT, Row, digest, weights_digest

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

# --- the recipe, in full: no default of the code has a part in it -----------------------------------------------------

STEPS = 20
RECIPE: Row = {
    "backbone": {
        "name": "scenes-nano",
        "weights": None,
        "revision": None,
        "dtype": "float32",
        "random_weights": False,
        "shard": False,
    },
    "budget": {"keep": 16, "range": None},
    "method": {
        "name": "diffprune",
        "scorer": "blocks",
        "scorer_depth": 2,
        "final_norm": True,
        "standardise": True,
        "response": "laplace",
        "gate": "vp",
        "noise": "unit",
        "attention": "diagonal",
        "kept_exact": True,
    },
    "tau": {"start": 2.0, "end": 0.1, "anneal_steps": 0.8},
    "optim": {
        "lr": 5e-4,
        "batch_size": 16,
        "accumulate": 1,
        "epochs": 1,
        "steps": STEPS,
        "weight_decay": 0.0,
        "clip": 1.0,
        "warmup": 0.03,
        "patience": None,
        "precision": "float32",
        "gradient_checkpointing": False,
    },
    "data": {
        "name": "scenes",
        "split": "train",
        "image": "image",
        "caption": "caption",
        "images": None,
        "prompt": "Describe the picture.",
        "share": 1.0,
        "seed": 42,
        "validation": 16,
        "buffer": 1024,
        "sizes": None,
    },
    "validation": {"every": 10, "choose_by": "hard"},
    "saving": {"every": 5, "keep": 2, "tensorboard": False},
    "remove_below": 1e-3,
    "hardness": 0.0,
    "hardness_ramp": 1.0,
    "seed": 42,
    "recipe": "bridge",
}
# Settings a later version no longer has, with the value at which they did nothing: not given to the command.
RETIRED: Row = {"hardness": 0.0, "hardness_ramp": 1.0}
LATER: Row = {"drawn": False}  # of the temperature: what the recipe has had since the runs were recorded
# By name what changes of the recipe; `small` is quick enough for the test suite.
RUNS: dict[str, Row] = {"default": {}, "small": {"optim": {"batch_size": 2}, "data": {"validation": 8}}}


def recipe_of(run: str) -> Row:
    changes = RUNS[run]
    return {key: {**value, **changes[key]} if key in changes else value for key, value in RECIPE.items()}


def write_config(path: Path, recipe: Row) -> Path:
    """The recipe as a file for `diffprune train`; JSON is YAML."""
    given = {key: value for key, value in recipe.items() if key not in RETIRED or value != RETIRED[key]}
    given["tau"] = {**LATER, **given["tau"]}
    path.write_text(json.dumps(given, indent=1))
    return path


# --- small helpers ----------------------------------------------------------------------------------------------------


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "diffprune", *arguments]


def run_command(*arguments: str) -> None:
    """A command of diffprune in a process of its own; an error says how it ended."""
    done = subprocess.run(
        command(*arguments), cwd=ROOT, env={**os.environ, **ONE_THREAD}, capture_output=True, text=True
    )
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise RuntimeError(f"diffprune {shlex.join(arguments)} ended with {done.returncode}: {last}")


# --- train and resume -------------------------------------------------------------------------------------------------


def metrics(folder: Path) -> list[Row]:
    """What a run wrote down, floats as their bits; the last word on a step is the one that counts."""
    rows: dict[tuple[str, int], Row] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] in ("train", "validation"):
            names = ("loss", "tau", "entropy") if record["kind"] == "train" else ("throttled", "hard", "random")
            bits = {name: float(record[name]).hex() for name in names}
            rows[record["kind"], record["step"]] = {
                "kind": record["kind"],
                "step": record["step"],
                **bits,
                "value": record[names[0]],
            }
    return list(rows.values())


def train_rows(run: str, folder: Path) -> list[Row]:
    config = write_config(folder / f"{run}.yaml", recipe_of(run))
    run_command("train", "--config", str(config), "--out", str(folder / run), "--json")
    rows = [{"run": run, **row} for row in metrics(folder / run)]
    return [*rows, {"run": run, "kind": "weights", "digest": weights_digest(folder / run / "model.safetensors")}]


def record_train(_: Sequence[Row] = ()) -> Iterator[Row]:
    """Losses as bits (float.hex); recipes are written out in full."""
    with tempfile.TemporaryDirectory() as folder:
        for run in RUNS:
            yield from train_rows(run, Path(folder))


KILLED_AT = (3, 12)  # steps after which the run is killed, in this order; checkpoints are every 5 steps


def record_resume(_: Sequence[Row] = ()) -> Iterator[Row]:
    """Digests of weights and losses of the run `small`, unbroken and killed twice."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        unbroken = train_rows("small", folder)
        yield {**unbroken[-1], "run": "unbroken", "losses": digest(unbroken[:-1])}
        arguments = ["train", "--config", str(folder / "small.yaml"), "--out", str(folder / "killed"), "--json"]
        for count in KILLED_AT:
            kill_after(count, folder / "killed", [*arguments, "--resume"])
        run_command(*arguments, "--resume")
        losses = digest([{"run": "small", **row} for row in metrics(folder / "killed")])
        weights = weights_digest(folder / "killed" / "model.safetensors")
        yield {"run": "killed", "kind": "weights", "digest": weights, "losses": losses}


def kill_after(count: int, folder: Path, arguments: Sequence[str]) -> None:
    """Start the run and kill it as soon as it has told of that step."""
    child = subprocess.Popen(
        command(*arguments),
        cwd=ROOT,
        env={**os.environ, **ONE_THREAD},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    path, wanted = folder / "metrics.jsonl", re.compile(rf'"kind": "train", "step": {count}\b')
    while child.poll() is None and not (path.exists() and wanted.search(path.read_text())):
        time.sleep(0.005)
    if child.poll() is not None:
        assert child.stderr is not None
        raise RuntimeError(f"the run ended before step {count}: {child.stderr.read().decode().strip()[-200:]}")
    os.kill(child.pid, signal.SIGKILL)
    child.wait()


# --- answers ----------------------------------------------------------------------------------------------------------

PRUNER = "scenes-llava-diffprune"
SHIPPED_AT = "b9e068a"  # the last commit with the scorer that the answers were recorded with
EVAL = ("--keep", "64,32", "--tasks", "scenes", "--questions", "50", "--seeds", "0", "--device", "cpu")
# Methods that are measured in one process, which encodes the pictures once with what they need; `full` comes along.
GROUPS = (
    ("diffprune", "centre"),  # with a trained pruner
    ("average_pool", "feature_norm", "gots", "random", "tome", "uniform_grid"),
    ("agilepruner", "cls_attention", "fastervlm", "holov", "prunesid", "visionzip", "vispruner"),
    ("cdpruner", "divprune", "mmtok", "text_cluster"),
    ("fastv", "hidden_norm", "pyramiddrop"),
    ("dart", "sparsevlm", "sparsevlm-plus"),
)


def untrained() -> list[str]:
    """Methods that need no weights, by what the command line says of them."""
    told = subprocess.run(command("methods", "--json"), cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [one["name"] for one in json.loads(told) if not one["trained"]]


def recorded_pruner(folder: Path) -> Path:
    """The pruner that the answers were recorded with, out of git: another one ships today."""
    path = f"lab/diffprune_lab/assets/{PRUNER}"
    packed = subprocess.run(["git", "archive", SHIPPED_AT, path], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=packed, check=True)
    return folder / path


def answer_rows(methods: Sequence[str], *, with_pruner: bool) -> list[Row]:
    """The rows of one `diffprune eval`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "x.json"
        pruner = str(recorded_pruner(Path(folder))) if with_pruner else "none"
        run_command("eval", "--pruner", pruner, "--methods", ",".join(methods), *EVAL, "--out", str(out))
        return read_answers(out.with_suffix(".answers.json"))


def read_answers(path: Path) -> list[Row]:
    """Of each run of an answers file a digest, the first few answers, two hex digits of each, and the scores."""
    return [
        {
            **{key: run[key] for key in ("method", "keep", "seed")},
            "digest": digest(run["said"]),
            # a score may be summed in another order, a task named with its world before it
            "scores": {task.rpartition("/")[2]: round(score, 9) for task, score in run["score"].items()},
            "said": run["said"][:12],
            "marks": "".join(f"{zlib.crc32(said.encode()) % 256:02x}" for said in run["said"]),
            **({"average": run["average"]} if run.get("average") is not None else {}),
        }
        for run in json.loads(path.read_text())["runs"]
    ]


def record_answers(known: Sequence[Row] = ()) -> Iterator[Row]:
    """Answers of a trained pruner and of methods without training; groups of methods that are known are left out."""
    done = {row["method"] for row in known}
    grouped = {"full", *(name for group in GROUPS for name in group)}
    others = tuple(name for name in untrained() if name not in grouped)  # that came later
    for group in (*GROUPS, *([others] if others else [])):
        if not set(group) <= done:
            asked = [name for name in group if name != "diffprune"]
            found = answer_rows(["full", *asked], with_pruner="diffprune" in group)
            yield from (row for row in found if row["method"] not in done)
            done |= {row["method"] for row in found}
