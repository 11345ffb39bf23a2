"""What the probes share: pictures, the classifier, and scorers trained on it by DiffPrune and by Gumbel-STE."""

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from diffprune.config import OptimConfig
from diffprune.methods.base import TrainablePruner
from diffprune.methods.options import build_method
from diffprune.recipes import recipe_values
from diffprune.train.loop import train
from diffprune_lab.deit import DeiT, Encoded
from diffprune_lab.probes.augment import augment
from diffprune_lab.probes.data import Photos, draw_rows, inside_box
from diffprune_lab.probes.deit import (
    RECORD,
    Classifier,
    CompiledDeiT,
    load_deit,
    right_answers,
    save_deit,
    train_deit,
)
from diffprune_lab.probes.hiding import PARTS
from diffprune_lab.probes.labels import LABELS
from diffprune_lab.probes.pictures import Pictures
from diffprune_lab.probes.settings import ProbeSettings
from diffprune_lab.probes.store import load_tensors, save_tensors
from diffprune_lab.probes.throttling import (
    Reader,
    Snapshot,
    budget_counts,
    draw_budgets,
    run_throttled,
    take_snapshot,
)

LEARNED = ("diffprune", "gumbel_ste")
DIVERSE = "diffprune-diverse"  # the first one's scorer, deployed by worth and diversity
PLAIN = "diffprune_plain"  # DiffPrune without the bridge, which is the paper's, where the trained one has it
SEEDS = (42, 123, 456, 789, 1000)  # the paper's
SCORER_OPTIM = OptimConfig(lr=5e-4)
SUPERVISED = "supervised"  # a scorer trained on the boxes: an upper bound for what scorers can find


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
        say: Gets a line about what happens.
    """

    backbone: str
    settings: ProbeSettings
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
        part = f"a quarter or a sixteenth of the patches near each other for {hide:g} of the time"
        shown = part if hide else "all patches all the time"
        weights = f"classifiers trained from scratch on such pictures, seeing {shown}, with token labels"
        if not is_own:
            weights = f"weights {Path(str(self.weights)).name}"
        return f"{self.settings.recipe}; {weights}; {pictures}"

    # --- pictures -----------------------------------------------------------------------------------------------------

    @property
    def pictures(self) -> Pictures:
        return self.once("pictures", self._find_pictures)

    def _find_pictures(self) -> Pictures:
        return Pictures(
            data=self.data,
            train_data=self.train_data,
            side=self.settings.shape.side,
            device=self.device,
            is_trial=self.settings.name == "tiny",
        )

    @property
    def train_photos(self) -> Photos:
        return self.pictures.train

    @property
    def photos(self) -> Photos:
        """Pictures nothing was trained on."""
        return self.pictures.held_out

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
        return classifier

    @torch.enable_grad()  # whoever asks for it first may be measuring without
    def _train_classifier(self) -> Classifier:
        settings = self.settings
        classifier = train_deit(
            self.backbone,
            self.train_photos,
            self.photos,
            shape=settings.shape,
            epochs=settings.epochs,
            batch=settings.train_batch,
            seconds=None if self.minutes is None else 60.0 * self.minutes,
            hide=settings.hide,
            say=self.say,
        )
        if self.save_weights is not None:
            save_deit(classifier, Path(self.save_weights))
        return classifier

    def _load_classifier(self, weights: str) -> Classifier:
        classifier = load_deit(weights, self.photos.names, self.device)
        training = classifier.training
        if training is not None and (training.hide, training.parts, training.labels) != (
            self.settings.hide,
            PARTS if self.settings.hide else training.parts,
            LABELS,
        ):
            raise ValueError(
                f"the classifier in {weights} was trained in another way (hide {training.hide}, parts "
                f"{training.parts}, labels {training.labels}); train it again with --save-weights"
            )
        return classifier

    def remembered(
        self, name: str, make: Callable[[], Any] | None = None, *, of: str | None = None, on: str | None = ""
    ) -> Any:
        """What an earlier process made under this name with the same classifier and settings; else what `make` gives.

        It lies beside a classifier that was trained here, so that a run that was cut short does not do it again. None
        where nothing is there and nothing is to be made.

        Args:
            of: What it depends on; default: the settings and the held-out pictures.
            on: `Pictures.trained_on` of something that was trained; None takes what was trained on whatever pictures,
                where that is one.
        """
        folder = Path(self.save_weights or self.weights or "")
        if not (folder / RECORD).is_file():
            return None if make is None else make()
        origin = f"{self.backbone} {self.classifier.training} {self.recipe if of is None else of} {name}"
        stem = hashlib.blake2b(origin.encode(), digest_size=10).hexdigest()
        path = folder / "probes" / (f"{stem}-{on}.safetensors" if on else f"{stem}.safetensors")
        if on is None:
            found = sorted(path.parent.glob(f"{stem}*.safetensors"))
            if len(found) > 1:
                raise ValueError(
                    f"{folder} has {name} trained on {len(found)} sets of pictures; name the one that is meant with "
                    "--train-data"
                )
            path = found[0] if found else path
        if path.is_file():
            return load_tensors(path, self.device)
        if make is None:
            return None
        made = make()
        path.parent.mkdir(exist_ok=True)
        save_tensors(path, made)
        return made

    def cut_open(self, cut: int | None = None) -> DeiT:
        """The classifier with a place to drop tokens."""
        depth = self.classifier.config.num_hidden_layers
        cut = min(self.settings.cut if cut is None else cut, depth)  # later cuts are those of twelve blocks
        return DeiT(self.classifier.model, cut=cut)

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
        """A learned method before its throttler has seen pictures.

        The head starts at random, not at zero: at zero all logits are equal, only the head would have a gradient, and
        there would be no landscape to walk through.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            method = build_method(
                "diffprune" if name == PLAIN else name,
                block=self.cut_open().block,
                noise="matched",
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
        recipe = "bridge" if name == "diffprune" else "default"  # PLAIN is never trained
        values = recipe_values(recipe, "diffprune" if name == PLAIN else name)
        return values.get("method", {}), values.get("remove_below", 0.0)

    def trained(self, name: str, seed: int) -> tuple[TrainablePruner, list[Snapshot]]:
        """A trained method and its scorer at the moments in between; those of the last seed are kept."""
        key = f"trained {name}"
        if key not in self._kept or self._kept[key][0] != seed:
            method, snapshots = self._train(name, seed)
            self._kept[key] = (seed, method, snapshots)
            of, on = self.settings.recipe, self.pictures.trained_on
            self.remembered(f"scorer {name} {seed}", lambda: snapshots[-1].state, of=of, on=on)
        return self._kept[key][1:]

    def scorer(self, name: str, seed: int) -> TrainablePruner:
        """A trained method alone, which an earlier process may have trained."""
        is_here = self._kept.get(f"trained {name}", (None,))[0] == seed
        of, on = self.settings.recipe, self.pictures.trained_on
        state = None if is_here else self.remembered(f"scorer {name} {seed}", of=of, on=on)
        return self.trained(name, seed)[0] if state is None else self._restored(name, seed, state)

    def _restored(self, name: str, seed: int, state: dict[str, Tensor]) -> TrainablePruner:
        method = self._build(name, seed)
        method.load_state_dict(state)
        return method.eval()

    def supervised(self, seed: int) -> TrainablePruner | None:
        """DiffPrune with a scorer trained on the boxes, in as many steps of as many training pictures: an upper bound.

        None where it was not made before and there are no pictures to make it from.
        """
        of, on = self.settings.recipe, self.pictures.trained_on
        make = None if on is None else lambda: self._supervise(seed)
        state = self.remembered(f"scorer {SUPERVISED} {seed}", make, of=of, on=on)
        return None if state is None else self._restored("diffprune", seed, state)

    @torch.enable_grad()
    def _supervise(self, seed: int) -> dict[str, Tensor]:
        settings, photos, deit = self.settings, self.train_photos, self.cut_open()
        method, inside = self._build("diffprune", seed), inside_box(photos.boxes, deit.side).float()

        def loss(step: int, tau: float) -> Float[Tensor, ""]:
            del tau
            rows, _ = draw_rows(photos, settings.batch, seed=seed, step=step)
            with self.autocast():  # pictures as they are: a crop would move the box
                logits = method.score(deit.encode(self.classifier.pixel_values(photos.pixels[rows])).tokens)
            return F.binary_cross_entropy_with_logits(logits.float(), inside[rows])

        losses = train(method.scorer.parameters(), loss, steps=settings.steps, optim=SCORER_OPTIM, tau=settings.tau)  # type: ignore[union-attr]
        self.say(f"{self.backbone} supervised by the boxes, seed {seed}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
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
            return value if restricted.penalty is None else value + restricted.penalty.mean()

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
