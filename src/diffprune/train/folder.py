"""The folder of a run: who may write into it, where the run in it is, and the rows that could not be used."""

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from diffprune.atomic import require_plain, write_text
from diffprune.config import RUN_FILE, DataConfig, OptimConfig, RunConfig, differences, load_config, to_yaml
from diffprune.saving import CONFIG_FILE
from diffprune.schedules import Schedule
from diffprune.train.checkpointing import list_checkpoints, writing
from diffprune.train.feed import Broken
from diffprune.train.loop import Progress

BROKEN_FILE, LOCK_FILE = "broken.jsonl", ".lock"
# What may change when a run goes on: how long it is, what it leaves behind, where features are kept, and how a global
# batch is cut into forward passes (`RunState.require_batch` holds its size). Everything else makes another run.
MAY_CHANGE = (
    *("optim.steps", "optim.epochs", "optim.patience"),
    *("saving.every", "saving.keep", "saving.tensorboard"),
    *("optim.batch_size", "optim.accumulate", "data.cache"),
)


@dataclass(slots=True)
class RunState(Progress):
    """Where a run is, as plain values: what a checkpoint keeps beside its tensors.

    Args:
        best: The best validation so far.
        random: The held-out loss of random choice at the same budgets: what a scorer must be below.
        waited: Validations since the best one, counted once the temperature has settled.
        broken: Rows that could not be used.
        early: Whether patience has run out.
        warned: What went wrong, a sentence for each sign (`guardian.signs`).
        seconds: Of training, over all sittings.
        batch: Samples of the global batch.
        base: Fingerprint of the frozen model; None where it is split over processes.
        steps: Of the whole run, as planned when the checkpoint was written.
        anneal_steps, warmup_steps: As first planned: a share of the run is not measured anew when it is made longer.
    """

    best: dict[str, Any] | None = None
    random: float | None = None
    waited: int = 0
    broken: list[dict[str, Any]] = field(default_factory=list)
    early: bool = False
    warned: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    batch: int = 0
    base: str | None = None
    steps: int | None = None
    anneal_steps: int | None = None
    warmup_steps: int | None = None

    def plan(self, schedule: Schedule) -> None:
        """Take the run's schedule: its shares are fixed when it starts, and one made longer goes on after its end."""
        if schedule.steps < self.step:
            raise ValueError(
                f"the run is at step {self.step} and would have {schedule.steps} steps; give optim.steps at least "
                f"{self.step}, more to make it longer"
            )
        if self.steps is not None and schedule.steps > self.steps:
            self.early, self.waited = False, 0
        self.steps = schedule.steps
        if self.anneal_steps is None or self.warmup_steps is None:
            self.anneal_steps, self.warmup_steps = schedule.anneal_steps, schedule.warmup_steps

    def planned(self, schedule: Schedule) -> Schedule:
        """The schedule with the lengths that were fixed when the run started."""
        if self.anneal_steps is None or self.warmup_steps is None:
            return schedule
        return replace(schedule, anneal_steps=self.anneal_steps, warmup_steps=self.warmup_steps)

    def require_batch(self, optim: OptimConfig, num_processes: int) -> None:
        """A `ValueError` that says what to set where a step would have more or fewer samples than it had."""
        at_once = optim.batch_size * num_processes
        if self.batch == at_once * optim.accumulate:
            return
        times, rest = divmod(self.batch, at_once)
        way = f"set optim.accumulate={times}" if not rest else "set optim.batch_size and optim.accumulate to that"
        raise ValueError(
            f"the run was started with {self.batch} samples a step, and optim.batch_size={optim.batch_size} * "
            f"optim.accumulate={optim.accumulate} * {num_processes} process{'es' * (num_processes > 1)} would be "
            f"{at_once * optim.accumulate}; {way}"
        )

    def plain(self) -> dict[str, Any]:
        """Every value by name, as `RunState(**values)` takes them."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


@contextmanager
def claimed(folder: Path, config: RunConfig, *, resume: bool) -> Iterator[None]:
    """Hold the run's folder alone; one whose run failed before its first checkpoint is free again."""
    with alone_in(folder):
        is_new = claim_folder(folder, config, resume=resume)
        try:
            yield
        except Exception:
            if is_new and not list_checkpoints(folder):
                (folder / RUN_FILE).unlink(missing_ok=True)
            raise


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock the folder against a second run; the system lets go of the lock when the process ends, however it ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a file lies there, or on the way; or it may not be made
        raise ValueError(f"{folder} cannot be a run's folder ({error.strerror}); choose another --out") from error
    require_plain(folder / LOCK_FILE)
    with (folder / LOCK_FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is writing into {folder}; wait for it, or choose another --out") from None
        yield


def claim_folder(folder: Path, config: RunConfig, *, resume: bool) -> bool:
    """Write the resolved config into the run's folder, unless it is there; refuse a folder that holds another run.

    Returns:
        Whether the folder was free.
    """
    written = folder / RUN_FILE
    if written.is_file():
        changed = differences(load_config(written), config)
        if resume:  # what may change is written down once the run has taken it (`keep_config`)
            changed = [one for one in changed if one.partition(":")[0] not in MAY_CHANGE]
        if changed and not resume:
            raise ValueError(f"{folder} holds another run ({'; '.join(changed)}); choose another folder with --out")
        if not resume:
            raise ValueError(
                f"{folder} holds this run already; go on with --resume, or choose another folder with --out"
            )
        if changed:
            raise ValueError(
                f"{folder} was started with another config ({'; '.join(changed)}); resume with the same one "
                "(--resume FOLDER takes it from there), or choose another folder with --out"
            )
    elif (folder / CONFIG_FILE).exists():
        raise ValueError(f"{folder} holds a saved model or pruner already; choose another folder with --out")
    elif list_checkpoints(folder):
        raise ValueError(
            f"{folder} holds checkpoints and no {RUN_FILE} that says of which run; put it back and add --resume, or "
            "choose another folder with --out"
        )
    else:
        with writing(RUN_FILE, folder):
            write_text(written, to_yaml(config))
        return True
    return False


def keep_config(folder: Path, config: RunConfig) -> None:
    """Write the config of a run that goes on, where something of it has changed."""
    if differences(load_config(folder / RUN_FILE), config):
        with writing(RUN_FILE, folder):
            write_text(folder / RUN_FILE, to_yaml(config))


def note_broken(
    folder: Path, state: RunState, rows: Sequence[Broken], *, data: DataConfig, read: int, write: bool
) -> None:
    """Note rows that cannot be used; more than `data.max_broken` of what the run reads stops it.

    Args:
        read: Rows that the run reads.
        write: Whether this process writes the list.
    """
    known = {entry["row"] for entry in state.broken}
    state.broken += [{"row": row.id, "reason": row.reason} for row in rows if row.id not in known]
    if write:
        write_broken(folder, state.broken)
    if len(state.broken) > data.max_broken * read:
        raise ValueError(
            f"{len(state.broken)} rows of {data.name} cannot be used, more than {100 * data.max_broken:g} % of the "
            f"{read} this run reads (data.max_broken); {first_broken(folder, state)}"
        )


def first_broken(folder: Path, state: RunState) -> str:
    """The first row that could not be used, as the end of a sentence."""
    first = state.broken[0]
    return f"the first is row {first['row']}: {first['reason']} (all are listed in {folder / BROKEN_FILE})"


def write_broken(folder: Path, broken: Sequence[dict[str, Any]]) -> None:
    """The list of rows that could not be used, one JSON object per line."""
    with writing(BROKEN_FILE, folder):
        write_text(folder / BROKEN_FILE, "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in broken))
