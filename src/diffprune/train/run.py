"""One training run from a config to a saved pruner, on Hugging Face Accelerate: one process or several, the same run.

    config = load_config("configs/llava/diffprune_k64.yaml")
    train_pruner(config, Path("runs/llava-k64"))

The frozen model is called and never changed; only the method's own parameters get gradients. A step draws its samples,
their noise and their budgets from (seed, step, sample), and divides its loss by the answer tokens of the global batch.
So the same steps follow from any checkpoint, and from any number of processes with the same global batch.
"""

import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, is_initialized

from diffprune.config import RunConfig
from diffprune.json_files import short
from diffprune.loading import require_name
from diffprune.schedules import Schedule
from diffprune.terminal import count_text, describe_model
from diffprune.train.checkpointing import remove_unfinished
from diffprune.train.compiling import computing
from diffprune.train.folder import claimed, keep_config
from diffprune.train.repeatable import repeatable
from diffprune.train.step import Part, Taken
from diffprune.train.trainer import Trainer
from diffprune.train.watch import Watch, peak_memory_gb


@contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """An event that SIGTERM or Ctrl-C sets, so that the step under way is finished; a second Ctrl-C stops at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(number: int, frame: object) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train_pruner(config: RunConfig, folder: str | Path, *, resume: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Train as the config says and save the pruner into `folder`; what came out, as plain values.

    `main` is True in the first process alone, the one that prints.

    Args:
        folder: Of the run: run.yaml, checkpoints, metrics.jsonl, and at the end the pruner and loss.png.
        resume: Go on from the folder's last checkpoint, or start where there is none.
        quiet: Show nothing on stderr.
    """
    if not isinstance(config, RunConfig) or not isinstance(folder, str | Path):
        raise ValueError(
            f"train({short(config)}, {short(folder)}): give a Config (dp.Config) and the folder of the run"
        )
    require_name(folder)
    folder = Path(folder)
    with repeatable(config.deterministic):
        return _claim_and_train(config, folder, resume=resume, quiet=quiet)


def _claim_and_train(config: RunConfig, folder: Path, *, resume: bool, quiet: bool) -> dict[str, Any]:
    """The run, once its folder is its own."""
    precision = "bf16" if config.optim.precision == "bfloat16" else "no"
    with precision_of_its_own():
        accelerator = Accelerator(mixed_precision=precision)
        is_main = accelerator.is_main_process
        with claimed(folder, config, resume=resume) if is_main else nullcontext():
            if is_main:
                remove_unfinished(folder)
            accelerator.wait_for_everyone()
            return _train(config, folder, accelerator, resume=resume, quiet=quiet)


@contextmanager
def precision_of_its_own() -> Iterator[None]:
    """Accelerate takes one precision for a process: inside it is a run's, and free again for the next run's."""
    is_a_users = is_initialized()
    try:
        yield
    finally:
        if not is_a_users:
            AcceleratorState._reset_state()


def _train(config: RunConfig, folder: Path, accelerator: Accelerator, *, resume: bool, quiet: bool) -> dict[str, Any]:
    """The run itself, in a folder that is its own."""
    trainer = Trainer(config, folder, accelerator)
    trainer.begin()
    trainer.state.plan(trainer.schedule)
    if accelerator.is_main_process:
        keep_config(folder, config)
    asked = False
    with (
        stop_on_signal() as stop,
        Watch(
            folder if accelerator.is_main_process else None,
            steps=trainer.steps,
            start=trainer.state.step,
            tensorboard=config.saving.tensorboard,
            quiet=quiet,
        ) as watch,
        computing(trainer.vlm, config, accelerator.autocast) as missing,
        ThreadPoolExecutor(max_workers=1) as reader,
    ):
        watch.print_line(header(trainer))
        for warning in (late_annealing(trainer.schedule), long_warmup(trainer.schedule), missing):
            if warning:
                watch.print_line(warning)
        if resume:
            done = trainer.state.step
            watch.print_line(f"going on after step {done}" if done else f"nothing to resume in {folder}: starting anew")
        asked = _steps(trainer, watch, stop, reader)
    if not asked:
        trainer.export()
    accelerator.wait_for_everyone()
    state = trainer.state
    summary = {
        "out": str(folder),
        "ended": "stopped" if asked else "early" if state.early else "finished",
        "step": state.step,
        "steps": trainer.steps,
        "best": state.best,
        "random": state.random,
        "warnings": list(state.warned.values()),
        "skipped": state.skipped,
        "broken": len(state.broken),
        "seconds": state.seconds,
        "samples_s": state.step * trainer.size / state.seconds if state.seconds else 0.0,
        "peak_gb": peak_memory_gb(),
        "main": accelerator.is_main_process,
        **trainer.vlm.method.parameter_counts(),  # type: ignore[operator]
    }
    accelerator.end_training()
    return summary


def header(trainer: Trainer) -> str:
    """One line of what is trained, on what, and for how long."""
    config, vlm = trainer.config, trainer.vlm
    budget = config.budget.keep if config.budget.range is None else "{} to {}".format(*config.budget.range)
    model = describe_model(trainer.base_id, vlm.base, method=config.method.name, keep=budget)
    learned = count_text(sum(parameter.numel() for parameter in trainer.trained))
    return f"{model}; {learned} of them learn; {trainer.steps:,} steps of {trainer.size} samples"


def late_annealing(schedule: Schedule) -> str:
    """A warning for a temperature that is still falling when the run ends; empty where it is not."""
    if schedule.anneal_steps <= schedule.steps:
        return ""
    last = schedule.tau(schedule.steps - 1)
    wanted = f"{schedule.tau_end:g}"
    return (
        f"warning: tau.anneal_steps is {schedule.anneal_steps:,} and the run has {schedule.steps:,} steps: it ends at "
        f"tau {last:.2g} instead of {wanted} and never stops early; give a share, such as tau.anneal_steps=0.25"
    )


def long_warmup(schedule: Schedule) -> str:
    """A warning for a learning rate that is still rising when the run ends; empty where it is not."""
    if schedule.warmup_steps <= schedule.steps:
        return ""
    last = schedule.lr(schedule.steps - 1)
    return (
        f"warning: optim.warmup is {schedule.warmup_steps:,} and the run has {schedule.steps:,} steps: its learning "
        f"rate ends at {last:.2g} instead of reaching {schedule.peak_lr:g}; give a share, such as optim.warmup=0.03"
    )


def _steps(trainer: Trainer, watch: Watch, stop: threading.Event, reader: ThreadPoolExecutor) -> bool:
    """Take the steps that are left; whether they were broken off by a signal."""
    state, saving = trainer.state, trainer.config.saving
    if state.step >= trainer.steps or state.early:
        return False
    parts: Future[list[Part]] = reader.submit(trainer.read, state.step)
    taken: deque[Taken] = deque()  # steps whose records are still to be read
    since = time.perf_counter()
    while state.step < trainer.steps and not state.early:
        now = parts.result()
        if state.step + 1 < trainer.steps:  # the next samples are read and prepared while this step is computed
            parts = reader.submit(trainer.read, state.step + 1)
        taken.append(trainer.take_step(now, stop=stop.is_set()))
        asked = taken[-1].asked
        due = state.step % trainer.validate_every == 0 or state.step == trainer.steps
        pauses = asked or due or state.step % saving.every == 0
        while len(taken) > (0 if pauses else trainer.ahead):
            record = trainer.record(taken.popleft())
            seconds, since = time.perf_counter() - since, time.perf_counter()
            state.seconds += seconds
            watch.step({**record, "samples_s": trainer.size / seconds, "memory_gb": peak_memory_gb()})
        if due and trainer.held_out:
            wait([parts])  # validation prepares batches too
            watch.validation(trainer.validate())
        if pauses:
            trainer.save()
            since = time.perf_counter()
        if asked:
            return True
    return False
