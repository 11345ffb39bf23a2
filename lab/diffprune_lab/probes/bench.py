"""What the probes share: pictures, the classifier, and scorers trained on it by DiffPrune and by Gumbel-STE."""

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from diffprune.config import OptimConfig, TauConfig, recipe_values
from diffprune.methods.base import Restricted, TrainablePruner
from diffprune.methods.options import build_method
from diffprune.ops import take_tokens
from diffprune.schedules import resolve_steps, tau_at
from diffprune.train.agreement import scorer_told
from diffprune.train.loop import train
from diffprune.types import Budget
from diffprune_lab.deit import DeiT, Encoded
from diffprune_lab.probes.augment import augment
from diffprune_lab.probes.data import Photos, draw_photos, draw_rows, find_files, fingerprint, inside_box, read_photos
from diffprune_lab.probes.deit import (
    RECORD,
    Classifier,
    CompiledDeiT,
    Shape,
    load_deit,
    right_answers,
    save_deit,
    train_deit,
)
from diffprune_lab.probes.hiding import PARTS
from diffprune_lab.probes.labels import LABELS

Reader = Callable[[Tensor, Tensor], Tensor]  # class logits from the prefix and the patch tokens

LEARNED = ("diffprune", "gumbel_ste")
PLAIN = "diffprune_plain"  # DiffPrune without the bridge, which is the paper's, where the trained one has it
SEEDS = (42, 123, 456, 789, 1000)  # the paper's
SCORER_OPTIM = OptimConfig(lr=5e-4)
TAUGHT = "taught"  # a scorer shown the boxes: what can be had from where scorers look


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How much a run does.

    Args:
        steps: Of a scorer's training; `batch` pictures each, every step with a budget of its own between `train_keep`,
            at temperatures that fall from the first of `temperatures` to the second.
        moments: Shares of that training at which gradients are compared.
        keep: Budget at which gradients and losses are looked at.
        keeps: Budgets at which accuracy is measured; `box_keeps` those of relevance.
        cut: Blocks that run before tokens are dropped.
        look: Blocks that run, in a whole pass of its own, before a scorer looks, as it looks at what a vision encoder
            made of the picture where another model reads it. None: at the cut.
        min_area: Least share of a picture that a crop leaves in a scorer's training; 1 keeps things where they are.
        later_cuts: Further places for methods without training.
        batches: Of `pictures` pictures whose gradients are compared.
        line: Points along one direction of the scorer's weights; `slice` along each of two.
        draws: Samples of the straight-through gradient.
        shape: Of the classifier; `epochs` and `train_batch` are of its training, and `hide` the share of it that sees
            a part of the patches, a quarter or a sixteenth, of the make-up `parts`; `labels` is what it is told.
        noise: What takes a token's place, "matched" or "unit".
        bridge: Train DiffPrune by the recipe of that name: standardised logits, or a scorer may undo the temperature by
            making them all equal; kept tokens as they are; and tokens of no weight taken out, for noise in their place
            is not the same as their absence.
    """

    name: str
    steps: int = 200
    batch: int = 128
    moments: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    train_keep: tuple[float, float] = (0.25, 0.75)
    temperatures: tuple[float, float] = (2.0, 0.1)
    keep: float = 0.25
    keeps: tuple[float, ...] = (0.0556, 0.1111, 0.2222, 0.3333, 0.5, 0.7)
    box_keeps: tuple[float, ...] = (0.0556, 0.1111, 0.2222, 0.3333)
    cut: int = 0
    look: int | None = None
    min_area: float = 0.8
    later_cuts: tuple[int, ...] = (6, 9, 12)
    batches: int = 32
    pictures: int = 64
    line: int = 101
    slice: int = 15
    draws: int = 100_000
    shape: Shape = field(default_factory=Shape)
    epochs: int = 300
    train_batch: int = 256
    hide: float = 0.0
    parts: str = "near"
    labels: str = "tokens"
    noise: str = "matched"
    bridge: bool = True

    def __post_init__(self) -> None:
        if self.noise not in ("matched", "unit"):
            raise ValueError(f"noise {self.noise!r} is not known; give matched or unit")
        if self.parts not in PARTS:
            raise ValueError(f"parts {self.parts!r} are not known; give {' or '.join(PARTS)}")
        if self.labels not in LABELS:
            raise ValueError(f"labels {self.labels!r} are not known; give {' or '.join(LABELS)}")
        if not 0 <= self.hide <= 1:
            raise ValueError(f"hide {self.hide:g} is no share of the training; give a number from 0 to 1")
        if not 0 < self.min_area <= 1:
            raise ValueError(f"min_area {self.min_area:g} is no share of a picture; give a number above 0, 1 at most")
        low, high = self.train_keep
        if not 0 < low <= high <= 1:
            raise ValueError(
                f"train_keep {low:g},{high:g} are no two budgets; give two shares above 0, 1 at most, the smaller first"
            )
        first, last = self.temperatures
        if not 0 < last <= first < math.inf:
            raise ValueError(
                f"temperatures {first:g},{last:g} are not known; give two numbers above 0, the first no smaller"
            )

    def changed(self, **options: Any) -> "Settings":
        """The same with the options that are not None."""
        return replace(self, **{name: value for name, value in options.items() if value is not None})

    @property
    def tau(self) -> TauConfig:
        """How the temperature of a scorer's training falls."""
        start, end = self.temperatures
        return TauConfig(start=start, end=end, anneal_steps=0.8)

    @property
    def recipe(self) -> str:
        """What of it changes a number, in one sentence; the classifier's part is `Bench.recipe`'s."""
        place = f"after block {self.cut}" if self.cut else "before the first block"
        looked = "" if self.look is None else f"; scorers look at what block {self.look} of a whole pass gives"
        bridge = "with the bridge" if self.bridge else "without the bridge"
        return (
            f"size {self.name}; tokens dropped {place}{looked}; scorers trained for {self.steps} steps of "
            f"{self.batch} pictures, at least {self.min_area:g} of each, with budgets drawn from "
            f"{self.train_keep[0]} to {self.train_keep[1]}, temperature {self.temperatures[0]} to "
            f"{self.temperatures[1]}, {self.noise} noise, DiffPrune {bridge}"
        )


SIZES = {
    "full": Settings(name="full", hide=0.75),
    "tiny": Settings(
        name="tiny",
        steps=8,
        batch=16,
        moments=(0.0, 1.0),
        keeps=(0.0556, 0.1111, 0.5),
        box_keeps=(0.0556, 0.1111),
        cut=1,
        later_cuts=(3,),
        batches=4,
        pictures=8,
        line=21,
        slice=4,
        draws=20_000,
        shape=Shape(side=32, patch=4, depth=3, width=32, head_width=16),
        epochs=3,
        train_batch=32,
    ),
}


class Snapshot(NamedTuple):
    """A scorer at one moment of its training: share of it that has passed, temperature, weights."""

    moment: float
    tau: float
    state: dict[str, Tensor]


@dataclass(slots=True, kw_only=True)
class Bench:
    """One backbone with its pictures; everything costly is made when it is first asked for.

    Args:
        backbone: deit-tiny, deit-small or deit-base.
        settings: How much to do.
        data: Parquet file or folder; None draws pictures, which only the tiny size may.
        train_data: Pictures to train on where `data` has none.
        weights: A folder or hub id; None trains the classifier here.
        save_weights: Where to keep a classifier that was trained here.
        minutes: For training the classifier; None trains all epochs.
        device: Where everything runs.
        seeds: All seeds of the run; what is done for one seed alone is done for the first.
        say: Told what happens.
    """

    backbone: str
    settings: Settings
    data: str | None = None
    train_data: str | None = None
    weights: str | None = None
    save_weights: str | None = None
    minutes: float | None = None
    device: str = "cpu"
    seeds: tuple[int, ...] = SEEDS
    say: Callable[[str], None] = field(default=lambda text: None)
    _kept: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` gave when it was first asked for under this name."""
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    @property
    def recipe(self) -> str:
        """Everything that changes a number besides the backbone: the settings, the pictures, whose weights."""
        if self.data is None:
            pictures = "drawn pictures, a trial that measures nothing"
        else:
            pictures = f"{len(self.photos):,} held-out pictures of {Path(self.data).name}"
        is_own = self.weights is None or (Path(self.weights) / RECORD).is_file()
        hide = self.settings.hide
        near = "near each other " if self.settings.parts == "near" else ""
        hidden = f"a quarter or a sixteenth of the patches {near}for {hide:g} of the time"
        shown = hidden if hide else "all patches all the time"
        told = ", told what each patch shows" if self.settings.labels == "tokens" else ""
        weights = f"classifiers trained from scratch on such pictures, seeing {shown}{told}"
        if not is_own:
            weights = f"weights {Path(str(self.weights)).name}"
        return f"{self.settings.recipe}; {weights}; {pictures}"

    # --- pictures -----------------------------------------------------------------------------------------------------

    @property
    def train_photos(self) -> Photos:
        return self.once("train_photos", self._read_train)

    @property
    def photos(self) -> Photos:
        """Pictures nothing was trained on."""
        return self.once("photos", self._read_held_out)

    @property
    def trained_on(self) -> str | None:
        """What tells the pictures to train on from others; None where there are none."""
        return self.once("trained_on", self._mark_train)

    def _mark_train(self) -> str | None:
        source = self.train_data or self.data
        if source is None:
            return "drawn"
        files, _ = find_files(source)
        return fingerprint(files) if files else None

    def _read_train(self) -> Photos:
        source = self.train_data or self.data
        if source is None:
            return self._draw(256, seed=0)
        files, _ = find_files(source)
        if not files:
            raise ValueError(
                f"{source} has no file whose name starts with train, so there is nothing to train on; "
                "name the folder that has with --train-data"
            )
        return read_photos(files, side=self.settings.shape.side, device=self.device)

    def _read_held_out(self) -> Photos:
        if self.data is None:
            return self._draw(64, seed=1)
        train, files = find_files(self.data)
        if self.train_data is not None:  # then everything here is to be measured on, whatever its name
            files = sorted([*train, *files])
        if not files:
            raise ValueError(f"every file of {self.data} is called train...; pictures to measure on need another name")
        return read_photos(files, side=self.settings.shape.side, device=self.device)

    def _draw(self, count: int, seed: int) -> Photos:
        if self.settings.name != "tiny":
            raise ValueError(
                "there are no pictures; give a folder of parquet files with --data, or try with --size tiny"
            )
        return draw_photos(count, side=self.settings.shape.side, seed=seed, device=self.device)

    # --- the classifier -----------------------------------------------------------------------------------------------

    @property
    def classifier(self) -> Classifier:
        return self.once("classifier", self._get_classifier)

    def _get_classifier(self) -> Classifier:
        classifier = self._train_classifier() if self.weights is None else self._load_classifier(self.weights)
        num_classes, largest = classifier.config.num_labels, int(self.photos.labels.max())
        if largest >= num_classes:
            raise ValueError(
                f"the pictures of {self.data} have a class {largest} and the classifier knows {num_classes}, from 0 "
                "on; give pictures of the classes it was trained for"
            )
        self._check_places(classifier.config.num_hidden_layers)
        return classifier

    def _check_places(self, depth: int) -> None:
        for option, place in (("--cut", self.settings.cut), ("--look", self.settings.look or 0)):
            if place > depth:
                raise ValueError(f"{option} {place} is beyond the {depth} blocks of {self.backbone}")

    @torch.enable_grad()  # whoever asks for it first may be measuring without
    def _train_classifier(self) -> Classifier:
        settings = self.settings
        self._check_places(settings.shape.depth)  # before minutes are spent
        classifier = train_deit(
            self.backbone,
            self.train_photos,
            self.photos,
            shape=settings.shape,
            epochs=settings.epochs,
            batch=settings.train_batch,
            seconds=None if self.minutes is None else 60.0 * self.minutes,
            hide=settings.hide,
            parts=settings.parts,
            labels=settings.labels,
            say=self.say,
        )
        if self.save_weights is not None:
            save_deit(classifier, Path(self.save_weights))
        return classifier

    def _load_classifier(self, weights: str) -> Classifier:
        classifier = load_deit(weights, self.photos.names, self.device)
        training = classifier.training
        if training is None:
            return classifier
        if training.hide not in (None, self.settings.hide):
            raise ValueError(
                f"the classifier in {weights} was trained with --hide {training.hide:g}; give that here too"
            )
        if training.hide and training.parts != self.settings.parts:
            raise ValueError(
                f"the classifier in {weights} was trained with --parts {training.parts}; give that here too"
            )
        if training.labels != self.settings.labels:
            raise ValueError(
                f"the classifier in {weights} was trained with --labels {training.labels}; give that here too"
            )
        return classifier

    def remembered(
        self, name: str, make: Callable[[], Any] | None = None, *, of: str | None = None, on: str | None = ""
    ) -> Any:
        """What an earlier process made under this name with the same classifier and settings; else what `make` gives.

        It lies beside a classifier that was trained here, so that a run that was cut short does not do it again. None
        where nothing is there and nothing is to be made.

        Args:
            of: What it hangs on; the settings and the held-out pictures where left out.
            on: `trained_on` of something that was trained; None takes what was trained on whatever pictures, where
                that is one.
        """
        folder = Path(self.save_weights or self.weights or "")
        if not (folder / RECORD).is_file():
            return None if make is None else make()
        origin = f"{self.backbone} {self.classifier.training} {self.recipe if of is None else of} {name}"
        stem = hashlib.blake2b(origin.encode(), digest_size=10).hexdigest()
        path = folder / "probes" / (f"{stem}-{on}.pt" if on else f"{stem}.pt")
        if on is None:
            found = sorted(path.parent.glob(f"{stem}*.pt"))
            if len(found) > 1:
                raise ValueError(
                    f"{folder} has {name} trained on {len(found)} sets of pictures; name the one that is meant with "
                    "--train-data"
                )
            path = found[0] if found else path
        if path.is_file():
            return torch.load(path, map_location=self.device, weights_only=True)
        if make is None:
            return None
        made = make()
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        torch.save(made, unfinished)
        unfinished.replace(path)
        return made

    def cut_open(self, cut: int | None = None) -> DeiT:
        """The classifier with a place to drop tokens."""
        depth = self.classifier.config.num_hidden_layers
        cut = min(self.settings.cut if cut is None else cut, depth)  # later cuts are those of twelve blocks
        return DeiT(self.classifier.model, cut=cut, look=self.settings.look)

    def autocast(self) -> torch.autocast:
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.device.startswith("cuda"))

    @torch.no_grad()
    def encoded(
        self, photos: Photos, cut: int | None = None, needs: frozenset[str] = frozenset()
    ) -> Iterator[tuple[Int[Tensor, " B"], Encoded]]:
        """Rows and tokens of all pictures, some at a time, in order."""
        deit = self.cut_open(cut)
        chunk = 8 * self.settings.pictures  # nothing is kept for a backward pass here
        for rows in torch.arange(len(photos), device=photos.labels.device).split(chunk):
            seeds = tuple(photos.seeds[row] for row in rows.tolist())
            with self.autocast():
                encoded = deit.encode(self.classifier.pixel_values(photos.pixels[rows]), needs, seeds=seeds)
            yield rows, encoded

    # --- scorers ------------------------------------------------------------------------------------------------------

    def start(self, name: str, seed: int) -> TrainablePruner:
        """A learned method at its start; the scorers of all methods of one seed are equal."""
        method, photos = self._build(name, seed), self.train_photos
        some = replace(photos, pixels=photos.pixels[:1024], labels=photos.labels[:1024], boxes=photos.boxes[:1024])
        method.calibrate(encoded.tokens for _, encoded in self.encoded(some))  # type: ignore[operator]
        return method

    def _build(self, name: str, seed: int) -> TrainablePruner:
        """The same before its throttler has seen pictures.

        The head starts at random, not at zero: at zero all logits are equal, only the head would have a gradient, and
        there would be no landscape to walk through.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            method = build_method(
                "diffprune" if name == PLAIN else name,
                block=self.cut_open().block,
                noise=self.settings.noise,
                **self.recipe_of(name)[0],
            )
            assert isinstance(method, TrainablePruner)
            torch.manual_seed(seed)
            head = method.scorer.head  # type: ignore[union-attr]
            assert isinstance(head, nn.Linear)
            head.reset_parameters()
        return method.to(self.device)

    def recipe_of(self, name: str) -> tuple[dict[str, Any], float]:
        """Options of a learned method, and the weight below which its training takes tokens out."""
        is_bridge = name == "diffprune" and self.settings.bridge  # PLAIN is never trained
        values = recipe_values("bridge" if is_bridge else "default", "diffprune" if name == PLAIN else name)
        return values.get("method", {}), values.get("remove_below", 0.0)

    def trained(self, name: str, seed: int) -> tuple[TrainablePruner, list[Snapshot]]:
        """A trained method and its scorer at the moments in between; those of the last seed are kept."""
        key = f"trained {name}"
        if key not in self._kept or self._kept[key][0] != seed:
            method, snapshots = self._train(name, seed)
            self._kept[key] = (seed, method, snapshots)
            of, on = self.settings.recipe, self.trained_on
            self.remembered(f"scorer {name} {seed}", lambda: snapshots[-1].state, of=of, on=on)
        return self._kept[key][1:]

    def scorer(self, name: str, seed: int) -> TrainablePruner:
        """A trained method alone, which an earlier process may have trained."""
        is_here = self._kept.get(f"trained {name}", (None,))[0] == seed
        of, on = self.settings.recipe, self.trained_on
        state = None if is_here else self.remembered(f"scorer {name} {seed}", of=of, on=on)
        return self.trained(name, seed)[0] if state is None else self._restored(name, seed, state)

    def _restored(self, name: str, seed: int, state: dict[str, Tensor]) -> TrainablePruner:
        method = self._build(name, seed)
        method.load_state_dict(state)
        return method.eval()

    def taught(self, seed: int) -> TrainablePruner | None:
        """DiffPrune with a scorer that was shown the boxes, in as many steps of as many training pictures.

        None where it was not made before and there are no pictures to make it from.
        """
        of, on = self.settings.recipe, self.trained_on
        make = None if on is None else lambda: self._teach(seed)
        state = self.remembered(f"scorer {TAUGHT} {seed}", make, of=of, on=on)
        return None if state is None else self._restored("diffprune", seed, state)

    @torch.enable_grad()
    def _teach(self, seed: int) -> dict[str, Tensor]:
        settings, photos, deit = self.settings, self.train_photos, self.cut_open()
        method, inside = self._build("diffprune", seed), inside_box(photos.boxes, deit.side).float()

        def loss(step: int, tau: float) -> Float[Tensor, ""]:
            del tau
            rows, _ = draw_rows(photos, settings.batch, seed=seed, step=step)
            with self.autocast():  # pictures as they are: a crop would move the box
                logits = method.score(deit.encode(self.classifier.pixel_values(photos.pixels[rows])).looked)
            return F.binary_cross_entropy_with_logits(logits.float(), inside[rows])

        losses = train(method.scorer.parameters(), loss, steps=settings.steps, optim=SCORER_OPTIM, tau=settings.tau)  # type: ignore[union-attr]
        self.say(f"{self.backbone} shown the boxes, seed {seed}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
        return method.state_dict()

    @property
    def read(self) -> Reader:
        """Class logits from prefix and tokens; compiled, where there is a GPU, for whole batches of whole pictures.

        Those are two shapes, a training step's and that of compared gradients. All others run as they are: the number
        of tokens left changes from step to step.
        """
        deit = self.cut_open()
        if not self.device.startswith("cuda"):
            return deit.logits
        compiled = CompiledDeiT(self.classifier.model, cut=deit.cut)
        shapes = [(count, deit.side**2) for count in (self.settings.batch, self.settings.pictures)]

        def read(prefix: Tensor, x: Tensor) -> Tensor:
            return (compiled if x.shape[:2] in shapes and torch.is_grad_enabled() else deit).logits(prefix, x)

        return read

    def _train(self, name: str, seed: int) -> tuple[TrainablePruner, list[Snapshot]]:
        settings, photos, deit, read = self.settings, self.train_photos, self.cut_open(), self.read
        method, remove_below = self.start(name, seed), self.recipe_of(name)[1]
        snapshots = [take_snapshot(method, 0.0, settings.tau)]
        later = [moment for moment in settings.moments if moment > 0]

        def loss(step: int, tau: float) -> Float[Tensor, ""]:
            rows, generator = draw_rows(photos, settings.batch, seed=seed, step=step)
            x = self.classifier.pixel_values(augment(photos.pixels[rows], generator, min_area=settings.min_area))
            with self.autocast():
                encoded = deit.encode(x)
                # One budget for all pictures of a step, so that the same number of tokens can be taken out of each.
                k = draw_budgets(1, deit.side**2, settings.train_keep, generator).expand(len(rows))
                logits, restricted = run_throttled(read, method, encoded, k, tau, generator, remove_below)
            value = F.cross_entropy(logits.float(), photos.labels[rows])
            return value if restricted.penalty is None else value + restricted.penalty

        def watch(step: int, value: float) -> None:
            del value
            while later and (step + 1) / settings.steps >= later[0]:
                snapshots.append(take_snapshot(method, later.pop(0), settings.tau))

        begun = time.perf_counter()
        losses = train(
            method.parameters(), loss, steps=settings.steps, optim=SCORER_OPTIM, tau=settings.tau, on_step=watch
        )
        last = losses[-max(1, len(losses) // 10) :]
        self.say(
            f"{self.backbone} {name} seed {seed}: throttled loss {losses[0]:.3f} to {sum(last) / len(last):.3f} "
            f"in {time.perf_counter() - begun:.0f} s"
        )
        return method.eval(), snapshots

    @torch.no_grad()
    def right_when(
        self, answer: Callable[[Encoded, Int[Tensor, " B"]], Float[Tensor, "B classes"]], keep: float
    ) -> Tensor:
        """[M, 2]: whether each held-out picture is right at first and among five, by `answer(encoded, k)`."""
        found = []
        for rows, encoded in self.encoded(self.photos):
            k = budget_counts(encoded, keep)
            with self.autocast():
                logits = answer(encoded, k)
            found.append(right_answers(logits, self.photos.labels[rows]))
        return torch.cat(found)


def take_snapshot(method: TrainablePruner, moment: float, falling: TauConfig) -> Snapshot:
    """The method's weights, throttler included, and the temperature its training has at this moment."""
    steps = 10_000
    tau = tau_at(
        round(moment * steps),
        start=falling.given_start,
        end=falling.end,
        anneal_steps=resolve_steps(falling.anneal_steps, steps),
    )
    return Snapshot(moment, tau, {name: value.detach().clone() for name, value in method.state_dict().items()})


def draw_budgets(
    count: int, num_tokens: int, between: tuple[float, float], generator: torch.Generator
) -> Int[Tensor, " B"]:
    """One number of tokens per picture, evenly spread on a logarithmic scale between two shares."""
    low, high = (math.log(max(1.0, share * num_tokens)) for share in between)
    drawn = torch.rand(count, generator=generator, device=generator.device)
    return (low + (high - low) * drawn).exp().round().long().clamp(1, num_tokens)


def budget_counts(encoded: Encoded, keep: float) -> Int[Tensor, " B"]:
    """Tokens to keep of each picture; all pictures have equally many."""
    num_images, num_tokens, _ = encoded.tokens.x.shape
    return torch.full((num_images,), Budget(keep).count(num_tokens), device=encoded.tokens.x.device)


def run_throttled(
    read: Reader,
    method: TrainablePruner,
    encoded: Encoded,
    k: Int[Tensor, " B"],
    tau: float,
    generator: torch.Generator,
    remove_below: float = 0.0,
) -> tuple[Float[Tensor, "B classes"], Restricted]:
    """Class logits by `read(prefix, tokens)` with every token weakened by its weight, and what weakened them.

    Args:
        remove_below: Tokens with a smaller weight are taken out, as many of each picture as can be of all.
    """
    with scorer_told(method, method.score(encoded.looked)):
        restricted = method.restrict(encoded.tokens, k, tau=tau, generator=generator)
    x, weight = restricted.x, restricted.alpha.detach()
    needed = int((weight >= remove_below).sum(-1).max()) if remove_below else x.shape[1]
    if needed < x.shape[1]:
        x = take_tokens(x, weight.topk(needed, -1).indices.sort(-1).values)
    return read(encoded.prefix, x), restricted
