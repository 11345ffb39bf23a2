"""Small runs for the tests: a tiny LLaVA on disk, pictures with captions, and a server that starts runs quickly."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from diffprune.config import DataConfig
from diffprune.train.feed import Broken, Feed, Sample
from tests import tiny

ROOT = Path(__file__).resolve().parents[2]
COLORS = ("red", "green", "blue", "grey")


def save_model(folder: Path, family: str = "llava") -> Path:
    """The tiny model of a family as a folder that `from_pretrained` reads."""
    model, processor = tiny.build(family)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def caption(index: int) -> str:
    return f"a {COLORS[index % 4]} one, number {index}"


def save_pictures(folder: Path, count: int = 24) -> Path:
    """A folder of pictures with `metadata.jsonl`."""
    folder.mkdir(parents=True)
    lines = []
    for index in range(count):
        tiny.picture(index, (40, 30)).save(folder / f"{index}.png")
        lines.append(json.dumps({"image": f"{index}.png", "caption": caption(index)}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def save_both(folder: Path) -> Path:
    """A folder with a tiny model and with pictures that have captions."""
    save_model(folder / "model")
    save_pictures(folder / "data")
    return folder


class Endless(Feed):
    """Pictures without end, as another package may bring them by `diffprune.data`."""

    def __init__(self, config: DataConfig, seed: int) -> None:
        self.config, self.seed = config, seed

    @property
    def per_epoch(self) -> None:
        return None

    def validation(self) -> list[Sample | Broken]:
        return [self.sample(-1 - index) for index in range(self.config.validation)]

    def read(self, positions: range, wanted: Sequence[int]) -> dict[int, Sample | Broken]:
        return {position: self.sample(position) for position in wanted}

    def sample(self, index: int) -> Sample:
        return Sample(index, tiny.picture(abs(index), (40, 30)), self.config.prompt, caption(index))


def values(model: Path, data: Path, /, **changes: Any) -> dict[str, Any]:
    """A config of few steps; a change of a section is merged into it."""
    config: dict[str, Any] = {
        "backbone": {"name": "llava", "weights": str(model), "dtype": "float32"},
        "budget": {"keep": 4},
        "tau": {"anneal_steps": 0.5},
        "optim": {"lr": 3e-3, "batch_size": 2, "accumulate": 2, "steps": 6, "precision": "float32"},
        "data": {"name": str(data), "validation": 4},
        "validation": {"every": 3},
        "saving": {"every": 2, "tensorboard": False},
    }
    for key, value in changes.items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    return config


def train(disk: Path, out: Path, *, resume: bool = False, **changes: Any) -> dict[str, Any]:
    """The summary of a run with the model and the pictures of the `disk` fixture."""
    from diffprune.config import make_config
    from diffprune.train.run import train_pruner

    config = make_config(values(disk / "model", disk / "data", **changes))
    return train_pruner(config, out, resume=resume, quiet=True)


def write_config(path: Path, config: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(config))
    return path


def losses(folder: Path) -> list[float]:
    """The training loss of every step, each step once and in order."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in trained] == list(range(1, len(trained) + 1))
    return [record["loss"] for record in trained]


def forget_after(folder: Path, step: int) -> None:
    """Take away the checkpoints after a step, as if the run had been killed soon after it."""
    for path in folder.glob("checkpoint-*"):
        if int(path.name.rpartition("-")[2]) > step:
            shutil.rmtree(path)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


class ForkServer:
    """A process that has imported everything and forks a child for each command: a run starts in no time.

    Use it as a context; `start` gives the child's process id, `wait` its exit code (negative: the signal it died of).
    """

    def __init__(self, log: Path) -> None:
        self.log = log

    def __enter__(self) -> "ForkServer":
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.train.runs", str(self.log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=ROOT,
        )
        self._read("ready")
        return self

    def __exit__(self, *error: object) -> None:
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.close()
        self.server.stdout.close()
        self.server.wait()

    def start(self, *arguments: str, end: tuple[str, int, int] | None = None) -> int:
        """The child's process id; with `end` it sends itself a signal (place, step, signal number; see `end_at`)."""
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps([arguments, end]) + "\n")
        self.server.stdin.flush()
        return self._read("child")

    def wait(self) -> int:
        return self._read("exit")

    def _read(self, kind: str) -> int:
        """The number of the next message, which must be of that kind: a number taken for a process id may be killed."""
        assert self.server.stdout is not None
        found, number = self.server.stdout.readline().split()
        assert found == kind, f"{found} {number} came where {kind} was awaited"
        return int(number)


def end_at(place: str, step: int, number: int) -> None:
    """Have this process send itself a signal at one place of a run, whatever the time and however busy the machine.

    Args:
        place: "begin" (all is loaded, no step was taken), "metrics" (the step is in the metrics file) or "checkpoint"
            (that of the step is written whole and not yet renamed).
    """
    from diffprune.train import checkpointing, trainer, watch

    def after(owner: Any, name: str, is_there: Callable[..., bool]) -> None:
        original = getattr(owner, name)

        def called(*arguments: Any) -> Any:
            result = original(*arguments)
            if is_there(*arguments):
                os.kill(os.getpid(), number)
            return result

        setattr(owner, name, called)

    if place == "begin":
        after(trainer.Trainer, "begin", lambda _: True)
    elif place == "metrics":
        after(watch.Watch, "step", lambda _, record: record["step"] == step)
    else:
        last = f"{checkpointing.UNFINISHED}{step:06d}/{checkpointing.STATE_FILE}"
        after(checkpointing, "write_bytes", lambda path, _: str(path).endswith(last))


def serve(log: str) -> None:
    """Fork a child for each line of stdin, tell its id, then its exit code."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaForConditionalGeneration  # noqa: F401

    import diffprune.train.run  # noqa: F401  # everything a run needs, once
    from diffprune.cli.main import _run
    from diffprune.registry import BACKBONES, METHODS

    torch.set_num_threads(1)
    BACKBONES.names(), METHODS.names()
    print("ready 0", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            arguments, end = json.loads(line)
            if end is not None:
                end_at(*end)
            code = _run(arguments)
            sys.stdout.flush()
            os._exit(code)
        print("child", child, flush=True)
        print("exit", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
