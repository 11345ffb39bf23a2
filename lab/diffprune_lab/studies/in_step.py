"""Trainings that differ by their seed alone, in step with each other: one pass of the frozen model serves all of them.

    python -m diffprune_lab.studies.in_step --config lab/configs/scarce_llava/diffprune_any.yaml --seeds 42,123,456 \
        --out out/train/diffprune-{seed} optim.steps=1200

A small model's training step waits for the host, which starts thousands of short kernels. Here the samples of all seeds
are one batch: pictures, language model and gates run once, and only scorers and blocks are each run's own. Each run
draws what `diffprune train` would draw with its seed, and takes its steps up to rounding, none ending early; its folder
is as after that, but that `loss` in metrics.jsonl is the mean over the seeds. A folder that holds a saved pruner is
passed over; runs that were cut off go on from the last checkpoint that all of them have.
"""

import argparse
import itertools
import json
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

import diffprune_lab
from diffprune.cli import hush_loader
from diffprune.config import RunConfig, load_config
from diffprune.methods.options import build_method
from diffprune.model import PrunedVLM
from diffprune.saving import CONFIG_FILE
from diffprune.train.checkpointing import list_checkpoints, remove_unfinished
from diffprune.train.compiling import computing
from diffprune.train.folder import claimed, keep_config
from diffprune.train.frozen import load_frozen
from diffprune.train.loop import account, descend
from diffprune.train.repeatable import repeatable
from diffprune.train.run import precision_of_its_own, stop_on_signal
from diffprune.train.sampler import draw_keep, draw_tau, noise_generator
from diffprune.train.step import Part
from diffprune.train.trainer import Trainer
from diffprune.train.watch import Watch, peak_memory_gb

ROWWISE = ("scorer", "throttle_block")  # parts of a method that work on each row of a batch by itself


class Beside(nn.Module):
    """Modules of one kind, each for its own part of the rows."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(modules)

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        size = len(x) // len(self.members)
        parts = []
        for number, member in enumerate(self.members):
            rows = slice(number * size, (number + 1) * size)
            own = {name: value[rows] if isinstance(value, Tensor) else value for name, value in given.items()}
            parts.append(member(x[rows], **own))
        return torch.cat(parts)


def beside(trainers: Sequence[Trainer]) -> PrunedVLM:
    """The first run's model with a method that gives each run's samples to that run's own parts."""
    first = trainers[0]
    backbone, config = first.vlm.backbone, first.config.method
    method = build_method(config.name, block=backbone.block, language=backbone.language, **config.options)
    if method.is_inside or method.hides_tokens or method.learns_from_regions:
        raise ValueError(f"{config.name} does not learn before the language model alone; train its seeds one by one")
    if not getattr(method, "exact_in_training", True):
        raise ValueError(
            f"{config.name} with {config.options} has a penalty, a mean over all rows of a pass; train its seeds one "
            "by one"
        )
    for name in method.state_dict():  # of values that each run has for itself
        if name.partition(".")[0] not in ROWWISE:
            raise ValueError(
                f"{config.name} has {name!r}, which is not known to go row by row; train its seeds one by one"
            )
    for name, _ in list(method.named_children()):
        setattr(method, name, Beside([getattr(trainer.vlm.method, name) for trainer in trainers]))
    return first.vlm.with_method(method, keep=first.vlm.budget.keep)


class InStep:
    """The runs, and the step that all of them take together."""

    def __init__(self, trainers: Sequence[Trainer]) -> None:
        self.trainers, self.vlm = trainers, beside(trainers)
        self.accelerator = trainers[0].accelerator

    @property
    def step(self) -> int:
        steps = {trainer.state.step for trainer in self.trainers}
        if len(steps) > 1:
            raise ValueError(f"the runs are at steps {sorted(steps)}; go on with each by diffprune train --resume")
        return steps.pop()

    def read(self, step: int) -> list[Part]:
        """Each run's samples of this step."""
        return [part for trainer in self.trainers for part in trainer.read(step)]

    def take_step(self, parts: Sequence[Part]) -> list[dict[str, float]]:
        """One optimiser step of each run; their records."""
        accelerator, step, first = self.accelerator, self.step, self.trainers[0]
        device = accelerator.device
        pairs = list(zip(self.trainers, parts, strict=True))
        for row in (row for part in parts for row in part.broken):
            raise ValueError(
                f"row {row.id} cannot be used ({row.reason}), and runs in step need as many samples each; take it out, "
                "or train the seeds one by one"
            )
        samples = [sample for part in parts for sample in part.samples]
        drawn = [(trainer.config, sample.id) for trainer, part in pairs for sample in part.samples]
        annealed = first.schedule.tau(step)
        with accelerator.autocast():
            batch, tokens = first.feed.encode(self.vlm, samples)
            keeps = [self.vlm.budget_of(draw_keep(config.budget, config.seed, step, one)) for config, one in drawn]
            counts = [keep.count(n) for keep, n in zip(keeps, tokens.counts.tolist(), strict=True)]
            taus = [draw_tau(config.tau, annealed, config.seed, step, one) for config, one in drawn]
            total = sum(part.num_targets for part in parts)
            loss, alpha = self.vlm.loss(
                batch,
                tokens=tokens,
                tau=torch.tensor(taus, dtype=torch.float64, device=device) if first.config.tau.drawn else annealed,
                keep=torch.tensor(counts, device=device),
                generator=[noise_generator(device, config.seed, step, one) for config, one in drawn],
                num_targets=total,
                remove_below=first.config.remove_below,
                return_alpha=True,
            )
        accelerator.backward(loss)
        entropies = (alpha.detach() * (1 - alpha.detach())).sum(-1).float().unflatten(0, (len(parts), -1)).mean(-1)
        norms = [self._descend(trainer, total / part.num_targets, step) for trainer, part in pairs]
        value, *rest = torch.cat((loss.detach().float()[None], entropies, torch.stack(norms))).tolist()
        records = []
        for trainer, entropy, norm in zip(self.trainers, rest[: len(pairs)], rest[len(pairs) :], strict=True):
            lr = trainer.schedule.lr(step)
            lr = account(trainer.state, trainer.config.optim, step=step, loss=value, norm=norm, lr=lr)
            records.append({"loss": value, "tau": annealed, "lr": lr, "entropy": entropy})
        return records

    def _descend(self, trainer: Trainer, scale: float, step: int) -> Tensor:
        """Take the run's own step; the norm of its gradient.

        Args:
            scale: The loss was divided by the answer tokens of all runs, and is by its own in a run alone.
        """
        gradients = [one.grad for one in trainer.trained if one.grad is not None]
        torch._foreach_mul_(gradients, scale)  # pyright: ignore[reportPrivateImportUsage]
        lr, clip = trainer.schedule.lr(step), self.accelerator.clip_grad_norm_
        norm = descend(trainer.optimizer, trainer.trained, trainer.config.optim, trainer.state, lr=lr, clip=clip)
        trainer.optimizer.zero_grad()
        return norm.detach().float()


def go_on_together(folders: Sequence[Path]) -> None:
    """Remove checkpoints behind the newest that all of these runs have: they were cut off between two saves."""
    found = [list_checkpoints(folder) for folder in folders]  # of each run the newest first
    shared = set.intersection(*({path.name for path in paths} for paths in found))
    if any(found) and not shared:
        raise ValueError("the runs have no checkpoint of one step; go on with each by diffprune train --resume")
    for paths in found:
        for path in itertools.takewhile(lambda path: path.name not in shared, paths):
            shutil.rmtree(path)


def train_in_step(runs: Sequence[tuple[RunConfig, Path]]) -> list[dict[str, Any]]:
    """Train all of these runs, whose configs differ by their seed alone; what came out of each."""
    first = runs[0][0]
    if any(replace(config, seed=first.seed) != first for config, _ in runs):
        raise ValueError("the runs differ by more than their seed; train them one by one")
    if first.optim.accumulate != 1:
        raise ValueError(f"optim.accumulate is {first.optim.accumulate}: runs in step take one batch a step")
    with ExitStack() as stack:
        stack.enter_context(repeatable(first.deterministic))
        stack.enter_context(precision_of_its_own())
        accelerator = Accelerator(mixed_precision="bf16" if first.optim.precision == "bfloat16" else "no")
        for config, folder in runs:
            stack.enter_context(claimed(folder, config, resume=True))
            remove_unfinished(folder)
        go_on_together([folder for _, folder in runs])
        frozen = load_frozen(first.backbone, accelerator.device)
        trainers = [Trainer(config, folder, accelerator, frozen) for config, folder in runs]
        for trainer in trainers:
            trainer.begin()
            trainer.state.plan(trainer.schedule)
            keep_config(trainer.folder, trainer.config)
        watches = [
            stack.enter_context(Watch(one.folder, steps=one.steps, start=one.state.step, tensorboard=False, quiet=True))
            for one in trainers
        ]
        together = InStep(trainers)
        stack.enter_context(computing(together.vlm, first, accelerator.autocast))
        stop = stack.enter_context(stop_on_signal())
        _steps(together, watches, stack.enter_context(ThreadPoolExecutor(max_workers=1)), stop)
        for trainer in trainers if together.step == trainers[0].steps else ():
            trainer.export()
    return [
        {"out": str(one.folder), "step": one.state.step, "best": one.state.best, "seconds": one.state.seconds}
        for one in trainers
    ]


def _steps(runs: InStep, watches: Sequence[Watch], reader: ThreadPoolExecutor, stop: threading.Event) -> None:
    """Take the steps that are left, until a signal asks to stop; then all is saved."""
    trainers, first = runs.trainers, runs.trainers[0]
    parts = reader.submit(runs.read, runs.step)
    while runs.step < first.steps:
        start = time.perf_counter()
        now = parts.result()
        if runs.step + 1 < first.steps:  # the next samples are made while this step is computed
            parts = reader.submit(runs.read, runs.step + 1)
        records = runs.take_step(now)
        seconds = time.perf_counter() - start
        for trainer, watch, record in zip(trainers, watches, records, strict=True):
            trainer.state.seconds += seconds
            speed = {"samples_s": trainer.size / seconds, "memory_gb": peak_memory_gb()}
            watch.step({"step": trainer.state.step, **record, **speed})
        asked, due = stop.is_set(), runs.step % first.validate_every == 0 or runs.step == first.steps
        wait([parts] if due else [])  # validation prepares batches too
        for trainer, watch in zip(trainers, watches, strict=True):
            if due and trainer.held_out:
                watch.validation(trainer.validate())
            if due or asked:
                trainer.save()
        if asked:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", type=Path, required=True, help="YAML file of the runs")
    parser.add_argument("--seeds", required=True, help="with commas between them")
    parser.add_argument("--out", required=True, help="folder of a run, with {seed} in it")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="values that win over the file")
    given = parser.parse_args()
    if "{seed}" not in given.out:
        parser.error(f"--out {given.out}: put {{seed}} where the folders differ")
    diffprune_lab.join()
    hush_loader()
    runs = []
    for seed in given.seeds.split(","):
        folder = Path(given.out.replace("{seed}", seed))
        if not (folder / CONFIG_FILE).exists():
            runs.append((load_config(given.config, [*given.overrides, f"seed={seed}"]), folder))
    print(json.dumps(train_in_step(runs) if runs else []))


if __name__ == "__main__":
    main()
