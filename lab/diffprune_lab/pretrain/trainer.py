"""One trainer for every reference model: what its stages share, and the command line of a family of models."""

import argparse
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from diffprune_lab.pretrain import passes, turns
from diffprune_lab.pretrain.feed import Batch, Feeder, LanguageBatch, Make, SceneStream, draw_batch, parse_weights
from diffprune_lab.pretrain.muon import Muon
from diffprune_lab.pretrain.package import LOG, load_weights, save_weights
from diffprune_lab.scenes import reference

STAGES = ("tower", "language")
ROUND_SCENES = 10_000_000  # training scenes set aside for each round of each stage
LOG_SECONDS = 20.0
ENDING_SECONDS = 8.0  # set aside for the last check and for saving
IN_BLOCKS = re.compile(r"\.(layers|blocks)\.")  # in the names of parameters of the blocks of a tower or a decoder
MUON_RATE = 3.0  # Muon's learning rate in units of AdamW's

Logged = dict[str, Tensor | float | dict[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run; `python -m diffprune_lab.pretrain.llava --help` says what is what."""

    model: str
    stage: str
    out: Path
    init: Path | None = None
    minutes: float = 5.0
    steps: int = 0
    round: int = 0
    seed: int = 0
    batch: int = 256
    turns: int = 12
    workers: int = 12
    device: str = "cuda"
    lr: float = 1e-3
    weight_decay: float = 0.05
    warmup: float = 0.03
    full: float = 0.3
    weights: str = ""
    compile: bool = True
    base: Path | None = None


# Optimisation --------------------------------------------------------------------------------------------------------


def rate(share: float, warmup: float) -> float:
    """The learning rate's factor after this share of the run: up over `warmup`, level to 0.4, then straight to 0."""
    return min(1.0, share / warmup if warmup else 1.0, max(0.0, (1 - share) / 0.6))


def optimisers(modules: list[nn.Module], settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the rest."""
    named = [(f".{name}", p) for module in modules for name, p in module.named_parameters() if p.requires_grad]
    hidden = [p for name, p in named if p.ndim == 2 and IN_BLOCKS.search(name)]
    taken = {id(p) for p in hidden}
    others = [p for _, p in named if id(p) not in taken]
    groups = [
        {"params": [p for p in others if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.98), fused=settings.device.startswith("cuda"))
    return [Muon(hidden, settings.lr * MUON_RATE, settings.weight_decay / MUON_RATE), adam]


class Clock:
    """How far a run is: by steps where their number is given, else by time."""

    def __init__(self, minutes: float, steps: int) -> None:
        self.deadline = time.monotonic() + 60 * minutes - ENDING_SECONDS
        self.steps, self.step = steps, 0
        self._first: float | None = None

    def share(self) -> float:
        """From 0 at the first step to 1 at the end; compiling, in the first step, is no part of it."""
        if self.steps:
            return self.step / self.steps
        if self._first is None:
            return 0.0
        return (time.monotonic() - self._first) / max(1.0, self.deadline - self._first)

    def tick(self) -> None:
        """Counts a step."""
        self.step += 1
        self._first = self._first or time.monotonic()


class Log:
    """JSON lines in a file, and a compact line on the terminal."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
        self._path = path

    def write(self, **entry: object) -> None:
        """One line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        print(" ".join(f"{key}={_short(value)}" for key, value in entry.items()), flush=True)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return "{" + " ".join(f"{key}:{_short(part)}" for key, part in value.items()) + "}"
    return str(value)


def plain_number(value: Tensor | float | dict[str, Tensor]) -> object:
    if isinstance(value, dict):
        return {key: round(float(part), 4) for key, part in value.items()}
    return float(value)


# Stages --------------------------------------------------------------------------------------------------------------


def first_scene(settings: Settings) -> int:
    """Number of the first training scene of a stage and round."""
    return (STAGES.index(settings.stage) + len(STAGES) * settings.round) * ROUND_SCENES


class Loop:
    """Optimiser steps until a run's time is up, with its clock and its log; every world's models are trained by it.

    A stage sets `batches` and says what its `loss` is, how it is `save`d and what is `check`ed on the way.
    """

    check_seconds, save_seconds = 60.0, 120.0
    draw = staticmethod(draw_batch)  # a batch with its pictures, on the device
    batches: Iterator[Batch]

    def __init__(self, settings: Settings) -> None:
        self.settings: Any = settings
        self.clock = Clock(settings.minutes, settings.steps)
        self.device = torch.device(settings.device)
        self.log = Log(settings.out / LOG)
        self.log.write(settings={key: str(value) for key, value in asdict(settings).items()})
        self.last_log = self.last_save = self.last_check = 0.0
        self.logged_step = 0

    def loss(self, batch: Batch) -> tuple[Tensor, Logged]:
        """The loss of a batch, and what to log of it."""
        raise NotImplementedError

    def check(self) -> None:
        """Measures on validation scenes, where the stage has such a measure."""

    def save(self) -> None:
        """Writes the weights."""
        raise NotImplementedError

    def autocast(self) -> torch.autocast:
        """bfloat16 on a GPU, float32 elsewhere."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def train(self, modules: list[nn.Module]) -> None:
        """Steps until time is up."""
        feeder = Feeder(self.batches, self.device, self.draw)
        steppers = optimisers(modules, self.settings)
        parameters = [p for stepper in steppers for group in stepper.param_groups for p in group["params"]]
        share = 0.0
        self.last_log = self.last_save = self.last_check = time.monotonic()
        while share < 1.0:
            for stepper in steppers:
                for group in stepper.param_groups:
                    group["lr"] = stepper.defaults["lr"] * rate(share, self.settings.warmup)
            batch = feeder.next()
            with self.autocast():
                loss, logged = self.loss(batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(parameters, 1.0)
            for stepper in steppers:
                stepper.step()
                stepper.zero_grad(set_to_none=True)
            if self.clock.step == 0 and self.device.type == "cuda":
                torch.cuda.synchronize()  # the schedule starts when the first step is really done
            self.clock.tick()
            share = self.clock.share()
            self.report({"loss": loss.detach(), "norm": norm, **logged}, feeder, share)
        feeder.stop()
        self.save()
        self.check()

    def report(self, logged: Logged, feeder: Feeder, share: float) -> None:
        """Logs, checks and saves when it is time to."""
        now = time.monotonic()
        if share >= 1 or now - self.last_log >= LOG_SECONDS or self.clock.step == 1:
            numbers = {key: plain_number(value) for key, value in logged.items()}  # waits for the device
            seconds = time.monotonic() - self.last_log
            self.log.write(
                step=self.clock.step,
                pictures=self.clock.step * self.settings.batch,
                share=round(share, 4),
                per_second=(self.clock.step - self.logged_step) * self.settings.batch / seconds,
                waited=feeder.waited / seconds,
                **numbers,
            )
            feeder.waited = 0.0
            self.last_log, self.logged_step = time.monotonic(), self.clock.step
        if share < 1 and now - self.last_check >= self.check_seconds:
            self.check()
            self.last_check = time.monotonic()
        if share < 1 and now - self.last_save >= self.save_seconds:
            self.save()
            self.last_save = time.monotonic()


class Run(Loop):
    """What both stages share: the model and the feed."""

    language, stream = LanguageBatch, SceneStream

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.spec: Any = self.read_spec()
        tokenizer = self.build_tokenizer()
        encode = turns.PieceEncoder(tokenizer)
        weights = parse_weights(settings.weights, self.language.default_weights)
        self.language_batch = self.language(
            encode, reference.END, count=settings.turns, weights=weights, seed=settings.seed
        )
        stream = self.stream(self.make(), first=first_scene(settings), size=settings.batch, seed=settings.seed)
        self.batches = stream.start(settings.workers)  # before anything is on the device: they are forked

        self.whole = settings.stage == "language"  # there is a trained decoder to save beside the tower
        self.model: Any = self.build(tokenizer)
        self.model.to(self.device)
        self.tower: Any = self.find_tower()
        self.start_ids = torch.tensor([reference.START, *encode(turns.BEFORE_PICTURE)], device=self.device)
        # One compiled block serves all blocks, and one compiled layer all layers and prefix lengths.
        self.plain_block: Any = self.block()
        self.block_function, self.parts = self.plain_block, turns.PLAIN
        if settings.compile:
            self.block_function = self.compiled_block()
            self.parts = turns.LayerParts(
                torch.compile(turns.project_heads, dynamic=True), torch.compile(turns.mix_heads, dynamic=True)
            )

    def make(self) -> Make:
        """What makes the batches of this stage."""
        raise NotImplementedError

    def read_spec(self) -> Any:
        """The sizes of the model."""
        return reference.reference_spec(self.settings.model)

    def build_tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer of the model."""
        return reference.build_tokenizer()

    def find_tower(self) -> nn.Module:
        """The vision tower of the model."""
        return self.model.model.vision_tower

    def block(self) -> Any:
        """What runs a block of the tower."""
        return passes.tower_block

    def compiled_block(self) -> Any:
        """What runs a block of the tower, compiled."""
        return torch.compile(self.block())

    def build(self, tokenizer: PreTrainedTokenizerFast) -> nn.Module:
        """The model with the weights it starts from."""
        model = reference.build_model(self.spec, tokenizer, seed=self.settings.seed)
        if self.settings.init is not None:
            self.whole |= load_weights(model, self.settings.init)
        return model

    def run(self) -> None:
        """Trains and saves."""
        raise NotImplementedError

    def save(self) -> None:
        """Writes the weights."""
        save_weights(self.model, self.settings.out, tower_only=not self.whole)


def set_up_device() -> None:
    """Chooses fast kernels of a GPU for the whole process."""
    if not torch.cuda.is_available():
        return
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every prefix length


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models that are trained alike.

    Args:
        names: Of the models.
        stages: What runs a stage, by its name in STAGES.
        package: Writes trained weights in the hub's layout; called as `package.package`. None where that is done
            elsewhere.
        description: Of the command line.
        defaults: Settings of the command line that are not those of `Settings`.
        starts_from: Name of the model whose weights a first language stage takes; else it needs an earlier stage.
        first_round: Number of the first round, where the rounds before it belong to another model.
        settings: Their kind.
        numbers: Further settings of it that are numbers, with what the command line says of them.
    """

    names: Collection[str]
    stages: Mapping[str, Callable[[Any], Run]]  # each of the family's own settings
    package: Callable[..., None] | None
    description: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    starts_from: str | None = None
    first_round: int = 0
    settings: type[Settings] = Settings
    numbers: Mapping[str, str] = field(default_factory=dict)


def main(family: Family, arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=family.description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = list(family.names)
    add("--model", choices=names, required=len(names) > 1 and "model" not in family.defaults, default=names[0])
    add("--stage", choices=(*family.stages, *(["package"] if family.package else [])), required=True)
    add("--out", type=Path, required=True, help="where weights and log go")
    add("--init", type=Path, help="folder of an earlier stage")
    add("--logs", type=Path, nargs="*", default=[], help="folders of the runs before --init, for the model card")
    add("--minutes", type=float, help="time for all, start-up and compiling included")
    add("--steps", type=int, help="number of steps; takes the place of --minutes")
    add("--round", type=int, help="which range of training scenes: one more for each continuation")
    add("--seed", type=int)
    add("--batch", type=int, help="pictures in a step")
    add("--turns", type=int, help="turns told of each picture, as far as they fit")
    add("--workers", type=int, help="processes that make scenes and text")
    add("--device")
    add("--lr", type=float, help="peak learning rate of AdamW; Muon's is a multiple of it")
    add("--weight-decay", type=float)
    add("--warmup", type=float, help="share of the run")
    add("--full", type=float, help="share of steps with the whole prefix")
    add("--weights", help="weights of turns that differ from the default, as gqa=20,mme=4")
    for name, meaning in family.numbers.items():
        add(f"--{name.replace('_', '-')}", type=float, help=meaning)
    add("--no-compile", dest="compile", action="store_false")
    if family.starts_from is not None:
        add("--base", type=Path, help=f"folder of {family.starts_from}; default: the one that comes with the package")
    own = {
        one.name: one.default for one in fields(family.settings) if one.default is not MISSING and one.name != "init"
    }
    parser.set_defaults(**{**own, **family.defaults})
    given = vars(parser.parse_args(arguments))
    logs, init = given.pop("logs"), given["init"]
    if init is None and given["stage"] != "tower" and (family.starts_from is None or given["stage"] == "package"):
        parser.error(
            f"--stage {given['stage']} starts from trained weights: give --init the folder of an earlier stage"
        )
    if given["stage"] == "package" and family.package is not None:
        own_base = {} if family.starts_from is None else {"base": given["base"]}
        family.package(given["model"], init, logs, given["out"], **own_base)
        return
    set_up_device()
    settings = family.settings(**given)
    family.stages[settings.stage](replace(settings, round=settings.round + family.first_round)).run()
