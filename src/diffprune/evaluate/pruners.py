"""What is measured: methods and saved pruners as the command line lists them, loaded and laid out over the budgets."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffprune.config import RunConfig
from diffprune.evaluate.answers import THROTTLED, Entry
from diffprune.evaluate.downscale import DOWNSCALE, require_forms
from diffprune.evaluate.rows import Origins, place_of
from diffprune.evaluate.runner import Measurement
from diffprune.evaluate.throttled import Throttle, load_throttled, run_config
from diffprune.loading import load_base
from diffprune.methods.base import NEEDS, Pruner
from diffprune.methods.options import deployed_as, is_choice_of, parse_method, require_weights
from diffprune.model import PrunedVLM
from diffprune.recipes import Recipe, is_diffprune, recipe_values
from diffprune.types import Budget

RECIPES: tuple[Recipe, ...] = ("paper", "bridge", "default")  # the one that sets the most first
TOP_K = "top-k"  # the choice of an artefact that names none
ORACLE = "oracle"  # the method that a source of questions makes for its pictures


@dataclass(frozen=True, slots=True)
class PrunerFolder:
    """A saved pruner as `--pruner` names it: `FOLDER`, `LABEL=FOLDER` or `LABEL@KEEP=FOLDER`.

    Args:
        label: What it is listed as; default: its method's name.
        keep: The only budget it is measured at; default: every one of `--keep`.
    """

    folder: str
    label: str = ""
    keep: int | float | None = None

    @classmethod
    def parse(cls, text: str) -> "PrunerFolder":
        """One entry of `--pruner`."""
        name, equals, folder = text.rpartition("=")
        label, at, budget = name.partition("@")
        if not folder or (equals and not label):
            raise ValueError(f"--pruner {text!r} is no pruner; give FOLDER, LABEL=FOLDER or LABEL@KEEP=FOLDER")
        return cls(folder, label, Budget.parse(budget).keep if at else None)


@dataclass(frozen=True, slots=True)
class SavedPruner:
    """A saved pruner, loaded. Of one label there may be several, from trainings with other seeds.

    `origin` is what its rows say of where it comes from: `recipe` and `choice`.
    """

    label: str
    keep: int | float | None
    seed: int
    pruner: Pruner
    throttle: Throttle | None = None
    origin: Mapping[str, str] = field(default_factory=dict)


def parse_pruners(text: str) -> list[PrunerFolder]:
    """Saved pruners from a comma-separated list of the command line; "none" is none."""
    return [PrunerFolder.parse(item) for item in text.split(",") if item and item != "none"]


def parse_seeds(text: str) -> list[int]:
    """Seeds from a comma-separated list of the command line, each once."""

    def number(item: str) -> int:
        try:
            return int(item)
        except ValueError:
            raise ValueError(f"seed {item!r} is no whole number; give seeds as 0,1,2") from None

    return list(dict.fromkeys(number(item) for item in text.split(",") if item))


def load_pruners(
    folders: Sequence[PrunerFolder], model: str, device: str, *, throttled: bool = False, names: Sequence[str] = ()
) -> tuple[PrunedVLM, list[SavedPruner]]:
    """The full model, and the saved pruners, all on the one base they must share.

    Args:
        model: The base where there is no pruner, which would name its own.
        throttled: Each pruner also as it was in training.
        names: Methods that are asked for; those that are another choice by the weights of a pruner without a label of
            its own are measured with these, and go by what they are asked for as.
    """
    if not folders:
        base, processor = load_base(model)
        return PrunedVLM(base.to(device), processor, method="full"), []
    first = PrunedVLM.from_pretrained(folders[0].folder)
    saved: list[SavedPruner] = []
    for one in folders:
        vlm = PrunedVLM.from_pretrained(one.folder, base=first.base, processor=first.processor)
        rules = [(each.positions, each.backbone.keeps_newlines, each.budget_rule) for each in (first, vlm)]
        if rules[0] != rules[1]:
            raise ValueError(
                f"{one.folder} was saved with other rules for positions, newlines or tiles ({rules[1]}) than "
                f"{folders[0].folder} ({rules[0]}); measure them in two runs"
            )
        label, run = one.label or vlm.method.name, run_config(Path(one.folder))
        taken = [each.seed for each in saved if (each.label, each.keep) == (label, one.keep)]
        seed = run.seed if run is not None else len(taken)
        if seed in taken:
            raise ValueError(f"two pruners are listed as {label!r} with seed {seed}; give them labels: LABEL=FOLDER")
        origin = origin_of(vlm, run)
        saved.append(SavedPruner(label, one.keep, seed, vlm.method, origin=origin))
        trained = vlm.method.trained_as[0] if vlm.method.trained_as else vlm.method
        for name in () if one.label else names:
            if name != label and takes_weights(name, trained):
                other = deployed_as(trained, vlm.artefact.get("choice"), name)
                saved.append(SavedPruner(name, one.keep, seed, other, origin={**origin, "choice": choice_of(other)}))
        if throttled:
            pruner, throttle = load_throttled(Path(one.folder), trained)
            saved.append(
                SavedPruner(label + THROTTLED, one.keep, seed, pruner, throttle, {**origin, "choice": "throttled"})
            )
    first.base.to(device)
    return first.with_method("full"), saved


def takes_weights(name: str, trained: Pruner) -> bool:
    """Whether a method of the command line chooses by the weights of a trained one."""
    if name in (ORACLE, DOWNSCALE) or name.endswith(THROTTLED):
        return False
    kind = parse_method(name)
    return is_choice_of(kind.name, type(trained)) or (kind.name == trained.name and not kind.options)


def choice_of(method: Pruner) -> str:
    """What rows say of how scores are used."""
    return method.choice_name or TOP_K


def origin_of(vlm: PrunedVLM, run: RunConfig | None) -> dict[str, str]:
    """What rows of a saved pruner say of it: the `recipe` that trained it, the `choice` that uses its scores.

    An artefact of before it named its recipe tells it by the options that recipes set.
    """
    recipe = vlm.artefact.get("recipe") or (run.recipe if run is not None else "")
    if not recipe and is_diffprune(trained := vlm.artefact["method"]["name"]):
        options = vlm.artefact["method"]["options"]
        sets = {name: recipe_values(name, trained)["method"].items() for name in RECIPES}
        recipe = next((name for name in RECIPES if sets[name] <= options.items()), "")
    return {"recipe": recipe or "default", "choice": choice_of(vlm.method)}


def origins_of(planned: Sequence[Entry], saved: Sequence[SavedPruner]) -> Origins:
    """Of every measurement of a saved pruner what its rows say of where it comes from."""
    known = {(one.label, one.seed): one.origin for one in saved}
    return {place_of(one): known[one.method, one.seed] for one in planned if (one.method, one.seed) in known}


def needs_of(names: Sequence[str], saved: Sequence[SavedPruner]) -> frozenset[str]:
    """What the methods need of the encoder; an error where one is not known or has no weights."""
    needs = frozenset[str]().union(*(one.pruner.needs for one in saved))
    for name in names:
        if name not in (ORACLE, DOWNSCALE) and name not in {one.label for one in saved}:
            named = parse_method(name)
            require_weights(named.name)
            needs |= named.build().needs  # options may change them
    return needs & NEEDS


def measurements(
    name: str,
    budgets: Sequence[int | float],
    seeds: Sequence[int],
    vlm: PrunedVLM,
    saved: Sequence[SavedPruner],
) -> list[Measurement]:
    """A method at every budget; one that draws at random or was trained more than once, with every seed."""
    if name == "full":
        return []  # always there
    own = [one for one in saved if one.label == name]
    if own:
        return [
            Measurement(name, keep, one.seed, one.pruner, one.throttle)
            for one in own
            for keep in (budgets if one.keep is None else [one.keep])
        ]
    if name == ORACLE:
        return [Measurement(name, keep, 0, vlm.method, oracle=True) for keep in budgets]
    if name == DOWNSCALE:
        require_forms(vlm)
        return [Measurement(name, keep, 0, vlm.method, shrunk=True) for keep in budgets]
    named = parse_method(name)
    draws = "seed" in {field.name for field in dataclasses.fields(named.kind.Options)}
    drawn = [named.options["seed"]] if "seed" in named.options else seeds if draws else [0]
    settings: list[tuple[int, dict[str, Any]]] = [(seed, {"seed": seed} if draws else {}) for seed in drawn]
    return [
        Measurement(name, keep, seed, named.build(block=vlm.backbone.block, **options))
        for keep in budgets
        for seed, options in settings
    ]
