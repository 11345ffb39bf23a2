"""What a run is made of (model, method, data, optimiser, state) and what it does: a step, a validation, a save."""

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from diffprune.backbones.prompts import Batch
from diffprune.config import RunConfig
from diffprune.fingerprint import base_fingerprint, sampled_fingerprint
from diffprune.fitting import wrap_backbone
from diffprune.methods.base import ScoringPruner, SelfSupervisedPruner
from diffprune.methods.options import build_method, require_trainable
from diffprune.model import PrunedVLM
from diffprune.registry import METHODS
from diffprune.restriction import refuse_removal
from diffprune.schedules import Schedule, resolve_steps
from diffprune.train.checkpointing import (
    Checkpoint,
    load_latest,
    optimizer_tensors,
    random_tensors,
    restore_optimizer,
    restore_random,
    save_checkpoint,
    set_damaged_aside,
    writing,
)
from diffprune.train.features import CachedFeed, FeatureCache
from diffprune.train.feed import Broken, Feed, Sample
from diffprune.train.folder import RunState, first_broken, note_broken
from diffprune.train.frozen import load_frozen, require_whole_layers
from diffprune.train.guardian import reversed_scores, signs
from diffprune.train.loop import account, descend, make_optimizer, make_schedule
from diffprune.train.objective import LossKind, Objective
from diffprune.train.sampler import global_batch, micro_batches
from diffprune.train.sources import open_feed
from diffprune.train.step import HostCopy, Part, Taken
from diffprune.train.validate import held_out_losses, judge
from diffprune.train.watch import plot_losses, read_metrics
from diffprune.types import VisualTokens

CALIBRATION = 1024  # pictures from which the scale of matched noise is taken


class Trainer:
    """A run with everything in its place; `run.train_pruner` goes through it.

    Args:
        frozen: Model, processor and the name to load them by, where they are not to be loaded as the config says.
    """

    def __init__(
        self, config: RunConfig, folder: Path, accelerator: Accelerator, frozen: tuple[Any, Any, str] | None = None
    ) -> None:
        self.config, self.folder, self.accelerator = config, folder, accelerator
        require_trainable(config.method.name, config.method.options)  # before a large model is loaded
        kind = METHODS.get(config.method.name)
        if kind.is_inside or issubclass(kind, SelfSupervisedPruner):
            refuse_removal(config.remove_below)
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
        require_whole_layers(method, backbone)
        self.vlm = PrunedVLM(model, processor, method=method, keep=keep)
        self.vlm.trained_for = tuple(budgets)  # type: ignore[assignment]
        self.vlm.artefact = {"recipe": config.recipe}
        self.vlm.method.start_training()
        self.feed: Feed = open_feed(config.data, config.seed)
        self.cache: FeatureCache | None = None
        if config.data.cache is not None:
            with accelerator.main_process_first():
                self.cache = FeatureCache(Path(config.data.cache), self.vlm, precision=config.optim.precision)
            self.feed = CachedFeed(self.feed, self.cache)
        optim = config.optim
        self.size = optim.batch_size * optim.accumulate * accelerator.num_processes
        self.steps = self._count_steps()
        self.validate_every = max(1, resolve_steps(config.validation.every, self.steps))
        trained = [parameter for parameter in self.vlm.method.parameters() if parameter.requires_grad]
        objective = Objective(self.vlm, config, self.feed)
        self.objective, self.optimizer = accelerator.prepare(objective, make_optimizer(trained, optim))
        self.trained = trained
        self.state = RunState(batch=self.size)
        self.best_weights: dict[str, Tensor] = {}
        self.held_out: list[Sample] = []

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
            raise ValueError(f"there is no end of {self.config.data.name}; set how long to train with optim.steps=...")
        steps = optim.epochs * per_epoch // self.size
        if steps < 1:
            raise ValueError(
                f"{per_epoch} samples are fewer than one global batch of {self.size}; lower optim.batch_size or "
                "optim.accumulate, or give more data"
            )
        return steps

    @property
    def schedule(self) -> Schedule:
        """Temperature and learning rate by step."""
        made = make_schedule(self.config.optim, self.config.tau, self.steps)
        return self.state.planned(made)

    # --- before the first step ---

    def begin(self) -> None:
        """Go on from the last checkpoint, or calibrate and start; then read the held-out samples."""
        if self.accelerator.is_main_process:
            set_damaged_aside(self.folder)
        self.accelerator.wait_for_everyone()
        found = load_latest(self.folder)
        if found is not None:
            self._restore(found)
        else:
            self.state.base = self._base_fingerprint()
            if getattr(self.vlm.method, "throttle_noise", None) is not None:
                self.vlm.method.calibrate(tokens for _, _, tokens in self.encode_first(CALIBRATION))  # type: ignore[operator]
        rows = [self._usable(row) for row in self.feed.validation()]
        self.held_out = [row for row in rows if isinstance(row, Sample)]
        self._count_broken([row for row in rows if isinstance(row, Broken)] if found is None else [])

    def encode_first(self, count: int) -> Iterator[tuple[list[Sample], Batch, VisualTokens]]:
        """The first samples to train on, some at a time, encoded."""
        per_epoch = self.feed.per_epoch
        count = count if per_epoch is None else min(count, per_epoch)
        size = self.config.optim.batch_size
        for start in range(0, count, size):
            positions = range(start, min(start + size, count))
            rows = self.feed.read(positions, positions).values()
            samples = [row for row in map(self._usable, rows) if isinstance(row, Sample)]
            if samples:
                yield samples, *self.feed.encode(self.vlm, samples)

    def _base_fingerprint(self) -> str | None:
        """Of samples of the frozen weights, billions as they are, and of every value that scores depend on.

        None where each process holds a part of the weights.
        """
        if self.config.backbone.shard:
            return None
        return f"{sampled_fingerprint(self.vlm.base.state_dict().items())} {base_fingerprint(self.vlm.backbone)}"

    def _restore(self, found: Checkpoint) -> None:
        try:
            # Checkpoints of earlier versions name a start of the temperature, where a run found it itself.
            state = RunState(
                **{key: value for key, value in found.state.items() if (key, value) != ("tau_start", None)}
            )
        except TypeError as error:
            raise ValueError(
                f"the checkpoints of {self.folder} are of another version of diffprune ({error}); go on with that one, "
                "or choose another folder with --out"
            ) from error
        state.require_batch(self.config.optim, self.accelerator.num_processes)
        base = self._base_fingerprint()
        known = (None, base, base and base.partition(" ")[0])  # checkpoints of before kept nothing, or samples alone
        if state.base not in known:
            raise ValueError(
                f"the run was started on another base model than {self.base_id} is now (fingerprint {state.base}, now "
                f"{base}); put the old weights back, or choose another folder with --out"
            )
        state.base = base
        self.state, self.best_weights = state, found.tensors.get("best", {})
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
        rows = [self._usable(row) for row in rows]
        samples = [row for row in rows if isinstance(row, Sample)]
        return Part(
            samples=samples,
            broken=[row for row in rows if isinstance(row, Broken)],
            batch=self.feed.prepare(self.vlm, samples) if samples else None,
            num_targets=sum(self.count_targets(sample) for sample in samples),
        )

    def _usable(self, row: Sample | Broken) -> Sample | Broken:
        """The row, or what keeps it from becoming a prompt of this model."""
        if isinstance(row, Broken):
            return row
        texts = [row.question, *row.answers, *(question for question, _ in row.later)]
        if any(self.vlm.backbone.image_token in text for text in texts):
            return Broken(row.id, f"a text holds {self.vlm.backbone.image_token}, which stands for a picture")
        words = sum(len(text.split()) for text in texts)
        if words > self.config.data.max_words:
            return Broken(
                row.id, f"its texts have {words:,} words, more than data.max_words={self.config.data.max_words}"
            )
        return row

    @property
    def ahead(self) -> int:
        """Steps that may be queued before the record of one is read: a GPU is not to wait for the host between them."""
        return int(self.accelerator.device.type == "cuda")

    def take_step(self, parts: list[Part], *, stop: bool) -> Taken:
        """One optimiser step, which a device may still be at; `record` says what came of it."""
        accelerator, state, schedule = self.accelerator, self.state, self.schedule
        step, tau = state.step, schedule.tau(state.step)
        broken = [row for part in parts for row in part.broken]
        num_targets, num_samples = sum(part.num_targets for part in parts), sum(len(part.samples) for part in parts)
        targets, samples, num_broken, num_asked = self.sum_up(num_targets, num_samples, len(broken), int(stop))
        if num_broken:
            self._count_broken(gather_object(broken) if accelerator.num_processes > 1 else broken)
        if not targets:
            raise ValueError(f"no row of step {step} can be used; {first_broken(self.folder, state)}")
        divisor = torch.full((), targets, dtype=torch.float32, device=accelerator.device)
        loss_sum = entropy_sum = torch.zeros((), dtype=torch.float64, device=accelerator.device)
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            with nullcontext() if last else accelerator.no_sync(self.objective):
                loss, entropy = self.objective(
                    part.samples, step, tau, divisor, num_prompts=int(samples), batch=part.batch
                )
                # Gradients are averaged over processes, and this is a sum over all samples.
                accelerator.backward(loss * accelerator.num_processes)
            loss_sum = loss_sum + loss.detach().double()
            entropy_sum = entropy_sum + entropy.double()
        sums = self._summed(loss_sum, entropy_sum, num_samples)
        lr, clip = schedule.lr(step), accelerator.clip_grad_norm_
        norm = descend(self.optimizer, self.trained, self.config.optim, state, lr=lr, clip=clip)
        self.optimizer.zero_grad()
        values = HostCopy(torch.cat([sums, norm.detach().double().reshape(1).to(sums.device)]))
        return Taken(step=step, tau=tau, lr=lr, asked=num_asked > 0, values=values)

    def record(self, taken: Taken) -> dict[str, int | float]:
        """What came of a step, once the device is through with it; steps are asked for in their order."""
        value, entropy, num_samples, norm = taken.values.read()
        lr = account(self.state, self.config.optim, step=taken.step, loss=value, norm=norm, lr=taken.lr)
        return {"step": taken.step + 1, "loss": value, "tau": taken.tau, "lr": lr, "entropy": entropy / num_samples}

    def count_targets(self, sample: Sample) -> int:
        """Answer tokens of a sample."""
        return sum(len(self.vlm.backbone._answer_ids(answer)) for answer in sample.answers)

    def sum_up(self, *values: int | float | Tensor) -> list[float]:
        """Each value summed over the processes."""
        if self.accelerator.num_processes == 1 and not any(isinstance(value, Tensor) for value in values):
            return [float(value) for value in values]  # the device knows nothing of them
        return self._summed(*values).tolist()

    def _summed(self, *values: int | float | Tensor) -> Tensor:
        like = {"dtype": torch.float64, "device": self.accelerator.device}
        packed = [value.to(**like) if isinstance(value, Tensor) else torch.full((), value, **like) for value in values]
        summed = self.accelerator.reduce(torch.stack(packed), "sum")
        assert isinstance(summed, Tensor)
        return summed

    def _count_broken(self, rows: Sequence[Broken]) -> None:
        if rows:
            per_epoch, data = self.feed.per_epoch, self.config.data
            read = self.steps * self.size if per_epoch is None else min(self.steps * self.size, per_epoch)
            read, is_main = read + data.validation, self.accelerator.is_main_process
            note_broken(self.folder, self.state, rows, data=data, read=read, write=is_main)

    def validate(self) -> dict[str, Any]:
        """Both losses of the held-out samples at the final temperature, with the same noise each time.

        Beside them stands the loss of random choice, which no step changes.
        """
        config, state = self.config, self.state
        kinds: tuple[LossKind, ...] = ("throttled", "hard", *(("random",) if state.random is None else ()))
        throttled, hard, *chance = self._held_out_losses(kinds)
        if chance:
            (state.random,) = chance
        record = {"step": state.step, "throttled": throttled, "hard": hard, "gap": hard - throttled}
        record["random"] = state.random
        said = []
        if state.step > self.schedule.anneal_steps or state.step == self.steps:
            said = self._watch_over(record)
        judge(
            state,
            record,
            choose_by=config.validation.choose_by,
            patience=config.optim.patience,
            settled=state.step > self.schedule.anneal_steps,
        )
        if said:
            record["warnings"] = said
        if record["best"]:
            self.best_weights = {
                name: value.detach().to("cpu", copy=True) for name, value in self.vlm.method.state_dict().items()
            }
        return record

    def _held_out_losses(self, kinds: Sequence[LossKind]) -> list[float]:
        return held_out_losses(
            self.accelerator.unwrap_model(self.objective),
            self.held_out,
            kinds,
            tau=self.config.tau.end,
            num_targets=sum(map(self.count_targets, self.held_out)),
            accelerator=self.accelerator,
            total=self.sum_up,
        )

    def _watch_over(self, record: dict[str, Any]) -> list[str]:
        """Add to the record what else tells whether the run goes wrong; a sentence for each sign that is new."""
        if isinstance(self.vlm.method, ScoringPruner):
            with reversed_scores(self.vlm.method) as deviations:
                (record["reversed"],) = self._held_out_losses(("hard",))
            total, count = self.sum_up(sum(float(one.sum()) for one in deviations), sum(map(len, deviations)))
            record["deviation"] = total / max(1.0, count)
        method, objective = self.vlm.method, self.accelerator.unwrap_model(self.objective)
        (dropped,) = self.sum_up(objective.dropped)
        throttles = not (isinstance(method, SelfSupervisedPruner) or method.learns_from_regions)
        found = signs(record, whole=not dropped, throttles=throttles)
        new = {key: said for key, said in found.items() if key not in self.state.warned}
        self.state.warned |= new
        return list(new.values())

    # --- the end ---

    def save(self) -> None:
        """Write a checkpoint, from the first process; from each what it has encoded for the cache."""
        if self.cache is not None:
            self.cache.flush()
        if self.accelerator.is_main_process:
            tensors = {
                "weights": self.vlm.method.state_dict(),
                "optimizer": optimizer_tensors(self.optimizer),
                "random": random_tensors(),
                **({"best": self.best_weights} if self.best_weights else {}),
            }
            checkpoint = Checkpoint(self.state.plain(), tensors)
            save_checkpoint(self.folder, self.state.step, checkpoint, keep=self.config.saving.keep)

    def export(self) -> None:
        """Save the best pruner (the last one, where nothing was held out) and the picture of its losses."""
        if self.best_weights:
            self.vlm.method.load_state_dict(self.best_weights)
        if self.accelerator.is_main_process:
            with writing("the trained pruner", self.folder):
                self.vlm.save_pretrained(self.folder, base_id=self.base_id)
            plot_losses(self.folder, read_metrics(self.folder))


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch on every device. What a step draws comes from generators of its own."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
