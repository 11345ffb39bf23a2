"""One training run from a config to a saved pruner, on Hugging Face Accelerate: one process or several, the same run.

    config = load_config("configs/scenes_llava/diffprune_k64.yaml")
    train_pruner(config, Path("runs/scenes-k64"))

The frozen model is called and never changed; only the method's own parameters get gradients. A step draws its samples,
their noise and their budgets from (seed, step, sample), and divides its loss by the answer tokens of the global batch.
So the same steps follow from any checkpoint, and from any number of processes with the same global batch.
"""

import json
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from diffprune.backbones.base import Batch
from diffprune.checkpoint import CONFIG_FILE
from diffprune.config import STARTS, RunConfig, differences, load_config, to_yaml
from diffprune.fitting import wrap_backbone
from diffprune.methods.diffprune import DiffPrune
from diffprune.methods.options import build_method
from diffprune.methods.random import Random
from diffprune.model import PrunedVLM
from diffprune.results import write_text
from diffprune.schedules import resolve_steps, tau_at
from diffprune.train.agreement import BATCH, SAMPLES, Captions, agreement, choose_start, smallest_share
from diffprune.train.captions import INSTRUCTION, caption_batch, item_regions
from diffprune.train.checkpointing import (
    RUN_FILE,
    Checkpoint,
    list_checkpoints,
    load_latest,
    optimizer_tensors,
    random_tensors,
    remove_unfinished,
    restore_optimizer,
    restore_random,
    save_checkpoint,
    writing,
)
from diffprune.train.data import Broken, Feed, Sample, open_feed
from diffprune.train.frozen import load_frozen, recomputing
from diffprune.train.loop import descend, make_optimizer
from diffprune.train.sampler import draw_keep, global_batch, micro_batches, noise_generator
from diffprune.train.watch import Watch, peak_memory_gb, plot_losses, read_metrics
from diffprune.types import Budget, VisualTokens
from diffprune_lab.scenes import Scene
from diffprune_lab.scenes.encode import own_sizes, scene_images
from diffprune_lab.scenes.pixels import takes_pixels

BROKEN_FILE = "broken.jsonl"
MAX_BROKEN = 0.01  # share of the rows a run reads
CALIBRATION = 1024  # pictures from which the scale of matched noise is taken
BLANK = (Sample(id=-1, picture=Image.new("RGB", (56, 56)), question=INSTRUCTION, answer="."),)
How = Literal["throttled", "hard", "random"]
FIXED = "validation"  # in place of the step: noise and budgets of validation are the same each time


# --- what is trained --------------------------------------------------------------------------------------------------


class Objective(nn.Module):
    """The loss of a few samples as a module whose parameters are the method's, for Accelerate to wrap."""

    def __init__(self, vlm: PrunedVLM, config: RunConfig) -> None:
        super().__init__()
        self.method = vlm.method
        self._vlm = (vlm,)  # in a tuple: the method must not be registered twice
        self.config = config

    def forward(
        self,
        samples: Sequence[Sample],
        step: int | str,
        tau: float,
        num_targets: Float[Tensor, ""],
        *,
        how: How = "throttled",
        batch: Batch | None = None,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """The samples' part of the loss, and the sum over them of the budget entropy, sum alpha (1 - alpha).

        Args:
            step: Noise and budgets are drawn from it, the seed and the sample.
            num_targets: Answer tokens of the global batch.
            how: Or "hard": drop as in deployment; or "random": drop as many, drawn by lot.
            batch: The samples as the model takes them, where that is done already.
        """
        (vlm,), config = self._vlm, self.config
        if not samples and not config.backbone.shard:  # all broken: others still wait for this process's gradients
            nothing = sum((parameter.sum() * 0 for parameter in self.parameters()), torch.zeros((), device=self.device))
            return nothing, torch.zeros((), device=self.device)  # type: ignore[return-value]
        if not samples:  # others wait for this process's part of every layer too
            loss, entropy = self(BLANK, step, tau, num_targets, how=how)
            return loss * 0, entropy * 0
        batch, tokens = make_batch(vlm, samples, batch, sizes=config.data.sizes)
        counts = self._budgets(tokens, samples, step)
        if how == "hard":
            return vlm.loss(batch, tokens=tokens, keep=counts, hard=True, num_targets=num_targets), num_targets * 0
        if how == "random":
            lm = vlm.splice(batch, tokens, Random().deploy(tokens, counts))
            return vlm.decoder.loss(lm, None, None, num_targets=num_targets)[0], num_targets * 0
        noise = [noise_generator(tokens.x.device, config.seed, step, sample.id) for sample in samples]
        if vlm.method.learns_from_regions:
            pictures = [sample.picture for sample in samples]
            tokens = replace(tokens, regions=item_regions(tokens, pictures, config.data.sizes or own_sizes(vlm)))
        loss, alpha = vlm.loss(
            batch,
            tokens=tokens,
            tau=tau,
            keep=counts,
            generator=noise,
            num_targets=num_targets,
            remove_below=config.remove_below,
            return_alpha=True,
        )
        return loss, (alpha.detach() * (1 - alpha.detach())).sum().float()

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def _budgets(self, tokens: VisualTokens, samples: Sequence[Sample], step: int | str) -> Int[Tensor, " B"]:
        keeps = [draw_keep(self.config.budget, self.config.seed, step, sample.id) for sample in samples]
        counts = [Budget(keep).count(int(n)) for keep, n in zip(keeps, tokens.counts.tolist(), strict=True)]
        return torch.tensor(counts, device=tokens.x.device)


def make_batch(
    vlm: PrunedVLM, samples: Sequence[Sample], batch: Batch | None = None, *, sizes: str | None = None
) -> tuple[Batch, VisualTokens]:
    """The samples as the model takes them, and their visual tokens.

    Scenes are drawn where the model runs, where its processor would leave their size alone; else they are pictures
    like any other.

    Args:
        batch: From `prepare`, where that was called before.
        sizes: How pictures of scenes are sized; the model's own way where left out.
    """
    sizes = own_sizes(vlm) if sizes is None else sizes
    batch = prepare(vlm, samples, sizes=sizes) if batch is None else batch
    if batch is None:
        scenes = [sample.picture for sample in samples if isinstance(sample.picture, Scene)]
        return caption_batch(vlm, scenes, [sample.answer for sample in samples], sizes)
    tokens = vlm.encode(batch)
    assert tokens is not None
    return batch, tokens


def prepare(vlm: PrunedVLM, samples: Sequence[Sample], *, sizes: str | None = None) -> Batch | None:
    """The samples as the model takes them, made on the CPU; None for scenes that are drawn where the model runs."""
    sizes = own_sizes(vlm) if sizes is None else sizes
    scenes = [sample.picture for sample in samples if isinstance(sample.picture, Scene)]
    drawn = len(scenes) == len(samples)
    if drawn and takes_pixels(vlm.backbone, sizes) and all(one.question == INSTRUCTION for one in samples):
        return None
    pictures: list[Any] = scene_images(scenes, sizes) if drawn else [sample.picture for sample in samples]
    return vlm.prepare(
        pictures,
        [sample.question for sample in samples],
        [sample.answer for sample in samples],
        later=[sample.later for sample in samples],
    )


# --- the folder -------------------------------------------------------------------------------------------------------


@contextmanager
def claimed(folder: Path, config: RunConfig, *, resume: bool) -> Iterator[None]:
    """Hold the run's folder; one whose run failed before its first checkpoint is free again."""
    is_new = claim_folder(folder, config, resume=resume)
    try:
        yield
    except Exception:
        if is_new and not list_checkpoints(folder):
            (folder / RUN_FILE).unlink(missing_ok=True)
        raise


def claim_folder(folder: Path, config: RunConfig, *, resume: bool) -> bool:
    """Write the resolved config into the run's folder, unless it is there; refuse a folder that holds another run.

    Returns:
        Whether the folder was free.
    """
    written = folder / RUN_FILE
    if written.is_file():
        changed = differences(load_config(written), config)
        if changed and not resume:
            raise ValueError(f"{folder} holds another run ({'; '.join(changed)}); choose another folder with --out")
        if not resume:
            raise ValueError(
                f"{folder} holds this run already; go on with --resume, or choose another folder with --out"
            )
        if changed:
            raise ValueError(
                f"{folder} was started with another config ({'; '.join(changed)}); resume with the same one, "
                "or choose another folder with --out"
            )
    elif (folder / CONFIG_FILE).exists():
        raise ValueError(f"{folder} holds a saved model or pruner already; choose another folder with --out")
    else:
        write_text(written, to_yaml(config))
        return True
    return False


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


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Standing:
    """Where a run stands, as plain values.

    Args:
        step: Optimiser steps taken.
        best: The best validation so far.
        random: The held-out loss of random choice at the same budgets: what a scorer must be below.
        waited: Validations since then, counted once the temperature has settled.
        skipped: Steps that were not taken, for their gradient was not finite; `skipped_last` of them the last ones.
        tau_start: The temperature of the first step, where the run found it itself.
        broken: Rows that could not be used.
        early: Whether patience has run out.
        seconds: Of training, over all sittings.
        batch: Samples of the global batch.
    """

    step: int = 0
    best: dict[str, Any] | None = None
    random: float | None = None
    waited: int = 0
    skipped: int = 0
    skipped_last: int = 0
    tau_start: float | None = None
    broken: list[dict[str, Any]] = field(default_factory=list)
    early: bool = False
    seconds: float = 0.0
    batch: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """What one forward pass is given.

    Args:
        samples: Of the rows that can be used.
        broken: The other rows.
        batch: The samples as the model takes them; None where that is left to the pass.
        num_targets: Answer tokens of the samples.
    """

    samples: list[Sample]
    broken: list[Broken]
    batch: Batch | None
    num_targets: int


class Run:
    """A run with everything in its place; `train_pruner` goes through it.

    Args:
        frozen: Model, processor and the name to load them by, where they are not to be loaded as the config says.
    """

    def __init__(
        self, config: RunConfig, folder: Path, accelerator: Accelerator, frozen: tuple[Any, Any, str] | None = None
    ) -> None:
        self.config, self.folder, self.accelerator = config, folder, accelerator
        seed_everything(config.seed)
        model, processor, self.base_id = frozen or self._load()
        budgets = (config.budget.keep,) if config.budget.range is None else config.budget.range
        keep = budgets[-1]
        assert keep is not None
        seed_everything(config.seed)  # again: what loading drew must not decide where the scorer starts
        backbone = wrap_backbone(model, processor)
        method = build_method(
            config.method.name, block=backbone.block, language=backbone.language, **config.method.options
        )
        self.vlm = PrunedVLM(model, processor, method=method, keep=keep)
        self.vlm.trained_for = tuple(budgets)  # type: ignore[assignment]
        if not self.vlm.method.trained:
            raise ValueError(f"method {config.method.name!r} has nothing to train; choose a learned one")
        self.vlm.method.start_training()
        if config.tau.start == "auto":
            self._check_auto()
        self.feed: Feed = open_feed(config.data, config.seed)
        optim = config.optim
        self.size = optim.batch_size * optim.accumulate * accelerator.num_processes
        self.steps = self._count_steps()
        self.anneal_steps = resolve_steps(config.tau.anneal_steps, self.steps)
        self.validate_every = max(1, resolve_steps(config.validation.every, self.steps))
        trained = [parameter for parameter in self.vlm.method.parameters() if parameter.requires_grad]
        objective = Objective(self.vlm, config)
        self.objective, self.optimizer = accelerator.prepare(objective, make_optimizer(trained, optim))
        self.trained = trained
        self.standing = Standing(batch=self.size)
        self.best_weights: dict[str, Tensor] = {}
        self.held_out: list[Sample] = []
        self.agreements: list[tuple[float, float]] = []  # temperature and correlation, where a start was looked for

    def _load(self) -> tuple[Any, Any, str]:
        """The frozen model; where it is split over processes, one after the other loads it, for the host's memory."""
        config, accelerator = self.config.backbone, self.accelerator
        if accelerator.distributed_type == DistributedType.FSDP:
            raise ValueError(
                "accelerate was launched with its own FSDP, which would split the pruner and leave the frozen model "
                "whole; launch with --multi_gpu and set backbone.shard=true"
            )
        if not config.shard or accelerator.num_processes == 1:
            return load_frozen(config, accelerator.device)
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
        loaded = None
        for turn in range(accelerator.num_processes):
            if turn == accelerator.process_index:
                loaded = load_frozen(config, accelerator.device, mesh)
            accelerator.wait_for_everyone()
        assert loaded is not None
        return loaded

    def _count_steps(self) -> int:
        optim, per_epoch = self.config.optim, self.feed.per_epoch
        if optim.steps is not None:
            return optim.steps
        if per_epoch is None:
            raise ValueError(f"there is no end of {self.config.data.name}; say how long to train with optim.steps=...")
        steps = optim.epochs * per_epoch // self.size
        if steps < 1:
            raise ValueError(
                f"{per_epoch} samples are fewer than one global batch of {self.size}; lower optim.batch_size or "
                "optim.accumulate, or give more data"
            )
        return steps

    @property
    def tau_start(self) -> float:
        found = self.standing.tau_start
        return self.config.tau.given_start if found is None else found

    @property
    def tau_end(self) -> float:
        return self.config.tau.end

    # --- before the first step ---

    def begin(self) -> None:
        """Go on from the last checkpoint, or calibrate and start; then read the held-out samples."""
        found = load_latest(self.folder)
        if found is not None:
            self._restore(found)
        else:
            if getattr(self.vlm.method, "throttle_noise", None) is not None:
                self.vlm.method.calibrate(tokens for _, _, tokens in self._first(CALIBRATION))  # type: ignore[operator]
            if self.config.tau.start == "auto":
                self.standing.tau_start = self._find_start()
        rows = self.feed.validation()
        whole = [row for row in rows if isinstance(row, Sample)]
        self._count_broken([row for row in rows if isinstance(row, Broken)] if found is None else [])
        self.held_out = whole

    def _first(self, count: int, size: int | None = None) -> Iterator[tuple[list[Sample], Batch, VisualTokens]]:
        """The first samples to train on, some at a time, encoded."""
        per_epoch = self.feed.per_epoch
        count = count if per_epoch is None else min(count, per_epoch)
        size = size or self.config.optim.batch_size
        for start in range(0, count, size):
            positions = range(start, min(start + size, count))
            rows = self.feed.read(positions, positions).values()
            samples = [row for row in rows if isinstance(row, Sample)]
            if samples:
                yield samples, *make_batch(self.vlm, samples, sizes=self.config.data.sizes)

    def _check_auto(self) -> None:
        method = self.vlm.method
        if not isinstance(method, DiffPrune):
            raise ValueError(
                f"tau.start=auto is measured with diffprune's throttled loss, and {method.name!r} has none; give it a "
                "number"
            )
        if not method.options.standardise:
            raise ValueError(
                "tau.start=auto is measured with standardised logits, and method.standardise is false; set it to true, "
                "as recipe=bridge does, or give tau.start a number"
            )

    def _find_start(self) -> float:
        """The highest temperature at which the smallest budget's throttled loss agrees with that of dropping."""
        config, accelerator = self.config, self.accelerator
        captions = [
            Captions.of(samples, batch, tokens, config)
            for samples, batch, tokens in self._first(SAMPLES, min(BATCH, config.optim.batch_size))
        ]
        if not captions:
            raise ValueError(
                f"none of the first {SAMPLES} rows of {config.data.name} can be used, so tau.start=auto has nothing to "
                "measure with; check the data, or give a number"
            )
        keep = smallest_share(config.budget, captions)
        values = agreement(self.vlm, captions, keep, (STARTS[-1], *STARTS[:-1]))
        with accelerator.autocast():  # all processes decide by the same numbers
            start, self.agreements = choose_start(
                (tau, self.sum_up(value / accelerator.num_processes)[0]) for tau, value in values
            )
        return start

    def _restore(self, found: Checkpoint) -> None:
        standing = Standing(**found.state)
        if standing.batch != self.size:
            raise ValueError(
                f"the run was started with {standing.batch} samples a step and this would be {self.size}; keep "
                "batch_size * accumulate * processes as it was"
            )
        self.standing, self.best_weights = standing, found.tensors.get("best", {})
        self.vlm.method.load_state_dict(found.tensors["weights"])
        restore_optimizer(self.optimizer, found.tensors["optimizer"])
        restore_random(found.tensors["random"])

    # --- one step ---

    def read(self, step: int) -> list[Part]:
        """This process's part of a step, one for each forward pass; a thread does this while the step before runs.

        Tokenizers are not to be used by two threads at once, so nothing else may prepare a batch in the meantime.
        """
        positions = global_batch(step, self.size)
        parts = micro_batches(
            positions,
            batch_size=self.config.optim.batch_size,
            rank=self.accelerator.process_index,
            world=self.accelerator.num_processes,
        )
        found = self.feed.read(positions, [position for part in parts for position in part])
        return [self._part([found[position] for position in part]) for part in parts]

    def _part(self, rows: Sequence[Sample | Broken]) -> Part:
        samples = [row for row in rows if isinstance(row, Sample)]
        return Part(
            samples=samples,
            broken=[row for row in rows if isinstance(row, Broken)],
            batch=prepare(self.vlm, samples, sizes=self.config.data.sizes) if samples else None,
            num_targets=sum(self.count_targets(sample) for sample in samples),
        )

    def take_step(self, parts: list[Part], *, stop: bool) -> tuple[dict[str, float], bool]:
        """One optimiser step; what is to be told of it, and whether any process was asked to stop."""
        accelerator, step = self.accelerator, self.standing.step
        broken = [row for part in parts for row in part.broken]
        num_targets = sum(part.num_targets for part in parts)
        targets, num_broken, num_asked = self.sum_up(num_targets, len(broken), int(stop))
        if num_broken:
            self._count_broken(gather_object(broken) if accelerator.num_processes > 1 else broken)
        if not targets:
            raise ValueError(f"no row of step {step} can be used; {self._first_broken()}")
        tau = tau_at(step, start=self.tau_start, end=self.tau_end, anneal_steps=self.anneal_steps)
        divisor = torch.tensor(targets, dtype=torch.float32, device=accelerator.device)
        loss_sum = entropy_sum = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            with nullcontext() if last else accelerator.no_sync(self.objective):
                loss, entropy = self.objective(part.samples, step, tau, divisor, batch=part.batch)
                # Gradients are averaged over processes, and this is a sum over all samples.
                accelerator.backward(loss * accelerator.num_processes)
            loss_sum = loss_sum + loss.detach().double()
            entropy_sum = entropy_sum + entropy.double()
        value, entropy, num_samples = self.sum_up(loss_sum, entropy_sum, sum(len(part.samples) for part in parts))
        lr = descend(
            self.optimizer,
            self.trained,
            self.config.optim,
            loss=value,
            step=step,
            place=step,
            steps=self.steps,
            skipped=self.standing.skipped_last,
            clip=accelerator.clip_grad_norm_,
        )
        self.standing.skipped += lr == 0
        self.standing.skipped_last = 0 if lr else self.standing.skipped_last + 1
        self.optimizer.zero_grad()
        self.standing.step += 1
        record = {"loss": value, "tau": tau, "lr": lr, "entropy": entropy / num_samples}
        return record, num_asked > 0

    def count_targets(self, sample: Sample) -> int:
        """Answer tokens of a sample."""
        return sum(len(self.vlm.backbone._answer_ids(answer)) for answer in sample.answers)

    def sum_up(self, *values: int | float | Tensor) -> list[float]:
        """Each value summed over the processes."""
        device = self.accelerator.device
        packed = torch.stack([torch.as_tensor(value, dtype=torch.float64, device=device) for value in values])
        summed = self.accelerator.reduce(packed, "sum")
        assert isinstance(summed, Tensor)
        return summed.tolist()

    def _count_broken(self, rows: Sequence[Broken]) -> None:
        """Note rows that cannot be used; more than one in a hundred of what the run reads stops it."""
        if not rows:
            return
        known = {entry["row"] for entry in self.standing.broken}
        self.standing.broken += [{"row": row.id, "reason": row.reason} for row in rows if row.id not in known]
        if self.accelerator.is_main_process:
            write_broken(self.folder, self.standing.broken)
        per_epoch = self.feed.per_epoch
        read = self.steps * self.size if per_epoch is None else min(self.steps * self.size, per_epoch)
        limit = MAX_BROKEN * (read + self.config.data.validation)
        if len(self.standing.broken) > limit:
            raise ValueError(
                f"{len(self.standing.broken)} rows of {self.config.data.name} cannot be used, more than 1 % of the "
                f"{read + self.config.data.validation} this run reads; {self._first_broken()}"
            )

    def _first_broken(self) -> str:
        first = self.standing.broken[0]
        return f"the first is row {first['row']}: {first['reason']} (all are listed in {self.folder / BROKEN_FILE})"

    # --- validation ---

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """Both losses of the held-out samples at the final temperature, with the same noise each time.

        Beside them stands the loss of random choice, which no step changes.
        """
        config, accelerator = self.config, self.accelerator
        mine = self.held_out[accelerator.process_index :: accelerator.num_processes]
        divisor = torch.tensor(sum(map(self.count_targets, self.held_out)), dtype=torch.float32).to(accelerator.device)
        objective = accelerator.unwrap_model(self.objective)
        ways: tuple[How, ...] = ("throttled", "hard", *(("random",) if self.standing.random is None else ()))
        sums = {how: torch.zeros((), dtype=torch.float64, device=accelerator.device) for how in ways}
        most = -(-len(self.held_out) // accelerator.num_processes)  # as many passes in each process
        for start in range(0, most, config.optim.batch_size):
            part = mine[start : start + config.optim.batch_size]
            for how in sums:
                with accelerator.autocast():
                    sums[how] += objective(part, FIXED, self.tau_end, divisor, how=how)[0].double()
        throttled, hard, *chance = self.sum_up(*sums.values())
        if chance:
            (self.standing.random,) = chance
        record = {"step": self.standing.step, "throttled": throttled, "hard": hard, "gap": hard - throttled}
        record["random"] = self.standing.random
        self._judge(record)
        return record

    def _judge(self, record: dict[str, Any]) -> None:
        """Note whether this validation is the best so far, and whether patience has run out."""
        standing, choose_by, patience = self.standing, self.config.validation.choose_by, self.config.optim.patience
        record["best"] = standing.best is None or record[choose_by] < standing.best[choose_by]
        if record["best"]:
            standing.best, standing.waited = dict(record), 0
            self.best_weights = {
                name: value.detach().to("cpu", copy=True) for name, value in self.vlm.method.state_dict().items()
            }
        elif standing.step > self.anneal_steps:
            standing.waited += 1
            standing.early = patience is not None and standing.waited >= patience

    # --- the end ---

    def save(self) -> None:
        """Write a checkpoint, from the first process."""
        if self.accelerator.is_main_process:
            tensors = {
                "weights": self.vlm.method.state_dict(),
                "optimizer": optimizer_tensors(self.optimizer),
                "random": random_tensors(),
                **({"best": self.best_weights} if self.best_weights else {}),
            }
            state = {name: getattr(self.standing, name) for name in Standing.__slots__}  # type: ignore[attr-defined]
            checkpoint = Checkpoint(state, tensors)
            save_checkpoint(self.folder, self.standing.step, checkpoint, keep=self.config.saving.keep)

    def export(self) -> None:
        """Save the best pruner (the last one, where nothing was held out) and the picture of its losses."""
        if self.best_weights:
            self.vlm.method.load_state_dict(self.best_weights)
        if self.accelerator.is_main_process:
            with writing("the trained pruner", self.folder):
                self.vlm.save_pretrained(self.folder, base_id=self.base_id)
            plot_losses(self.folder, read_metrics(self.folder))


def write_broken(folder: Path, broken: Sequence[dict[str, Any]]) -> None:
    """The list of rows that could not be used, one JSON object per line."""
    with writing(BROKEN_FILE, folder):
        write_text(folder / BROKEN_FILE, "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in broken))


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch on every device. What a step draws comes from generators of its own."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def train_pruner(config: RunConfig, folder: Path, *, resume: bool = False, quiet: bool = False) -> dict[str, Any]:
    """Train as the config says and save the pruner into `folder`; what came out, as plain values.

    `main` is True in the first process alone, whose business it is to tell.

    Args:
        folder: Of the run: run.yaml, checkpoints, metrics.jsonl, and at the end the pruner and loss.png.
        resume: Go on from the folder's last checkpoint, or start where there is none.
        quiet: Show nothing on stderr.
    """
    precision = "bf16" if config.optim.precision == "bfloat16" else "no"
    accelerator = Accelerator(mixed_precision=precision)
    is_main = accelerator.is_main_process
    with claimed(folder, config, resume=resume) if is_main else nullcontext():
        if is_main:
            remove_unfinished(folder)
        accelerator.wait_for_everyone()
        return _train(config, folder, accelerator, resume=resume, quiet=quiet)


def _train(config: RunConfig, folder: Path, accelerator: Accelerator, *, resume: bool, quiet: bool) -> dict[str, Any]:
    """The run itself, in a folder that is its own."""
    run = Run(config, folder, accelerator)
    run.begin()
    asked = False
    with (
        stop_on_signal() as stop,
        Watch(
            folder if accelerator.is_main_process else None,
            steps=run.steps,
            start=run.standing.step,
            tensorboard=config.saving.tensorboard,
            quiet=quiet,
        ) as watch,
        recomputing(run.vlm.backbone, enabled=config.optim.gradient_checkpointing),
        ThreadPoolExecutor(max_workers=1) as reader,
    ):
        if run.agreements:
            watch.begin(run.tau_start, run.agreements)
        if resume:
            done = run.standing.step
            watch.say(f"going on after step {done}" if done else f"nothing to resume in {folder}: starting anew")
        asked = _steps(run, watch, stop, reader)
    if not asked:
        run.export()
    accelerator.wait_for_everyone()
    standing = run.standing
    summary = {
        "out": str(folder),
        "ended": "stopped" if asked else "early" if standing.early else "finished",
        "step": standing.step,
        "steps": run.steps,
        "best": standing.best,
        "random": standing.random,
        "skipped": standing.skipped,
        "broken": len(standing.broken),
        "seconds": standing.seconds,
        "samples_s": standing.step * run.size / standing.seconds if standing.seconds else 0.0,
        "peak_gb": peak_memory_gb(),
        "main": accelerator.is_main_process,
        **run.vlm.method.parameter_counts(),  # type: ignore[operator]
    }
    accelerator.end_training()
    return summary


def _steps(run: Run, watch: Watch, stop: threading.Event, reader: ThreadPoolExecutor) -> bool:
    """Take the steps that are left; whether they were broken off by a signal."""
    standing, saving = run.standing, run.config.saving
    if standing.step >= run.steps or standing.early:
        return False
    parts: Future[list[Part]] = reader.submit(run.read, standing.step)
    while standing.step < run.steps and not standing.early:
        start = time.perf_counter()
        now = parts.result()
        if standing.step + 1 < run.steps:  # the next samples are read and prepared while this step is computed
            parts = reader.submit(run.read, standing.step + 1)
        record, asked = run.take_step(now, stop=stop.is_set())
        seconds = time.perf_counter() - start
        standing.seconds += seconds
        watch.step({"step": standing.step, **record, "samples_s": run.size / seconds, "memory_gb": peak_memory_gb()})
        due = standing.step % run.validate_every == 0 or standing.step == run.steps
        if due and run.held_out:
            wait([parts])  # validation prepares batches too
            watch.validation(run.validate())
        if asked or due or standing.step % saving.every == 0:
            run.save()
        if asked:
            return True
    return False
