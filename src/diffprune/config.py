"""What one training run is made of: frozen dataclasses, strict YAML, dotted overrides.

    run = load_config("configs/llava/diffprune_k64.yaml", ["optim.lr=1e-4"])

An unknown key, a value of the wrong type or one out of range is a `ValueError` that names the dotted key and the value.
Values come, weakest first, from the defaults below, the recipe, the file, the overrides.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from diffprune.budget import Budget
from diffprune.config_reader import build, coerce, merge, parse_override, parse_yaml
from diffprune.json_files import short
from diffprune.recipes import SURROGATES, Recipe, default_recipe, recipe_values

RUN_FILE = "run.yaml"  # the resolved config of a run, beside its checkpoints


def _require(holds: bool, key: str, value: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{key} is {value!r}: must be {wanted}")


def _is_amount(value: int | float) -> bool:
    """An int of 0 or more (steps), or a share of the run."""
    return value >= 0 if isinstance(value, int) else 0 <= value <= 1


_AMOUNT = "an integer number of steps or a float share of the run in [0, 1]"


@dataclass(frozen=True, kw_only=True, slots=True)
class BackboneConfig:
    """The frozen model.

    Args:
        name: A family (`llava`) or a preset (`llava-1.5-7b`); `diffprune backbones` lists both.
        weights: A Hugging Face model id or a folder; default: the preset's own.
        revision: Of the model id.
        dtype: Of the frozen weights.
        random_weights: The real shape with random numbers in it, for measuring speed without a download.
        shard: Split the decoder layers over the processes (FSDP2), for a model that does not fit on one GPU. The
            vision tower, the embeddings and the pruner stay whole in each.
    """

    name: str
    weights: str | None = None
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    random_weights: bool = False
    shard: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodConfig:
    """A method by name, and its own options, which YAML writes beside the name: `{name: diffprune, noise: unit}`.

    Args:
        name: Of a learned method; `diffprune methods` lists them.
        options: Of the method, checked by it.
    """

    name: str = "diffprune"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class BudgetConfig:
    """What stays during training: one `keep`, or a `range` from which K is drawn for each picture at each step.

    Args:
        keep: Tokens of a picture (int) or a share of them (float).
        range: The least and the most, both tokens or both shares; drawn evenly on a log scale.
    """

    keep: int | float | None = None
    range: tuple[int | float, int | float] | None = None

    def __post_init__(self) -> None:
        if (self.keep is None) == (self.range is None):
            raise ValueError(f"keep is {self.keep!r} and range is {self.range!r}: give one and set the other to null")
        for keep in (self.keep,) if self.range is None else self.range:
            assert keep is not None  # one of the two is given
            Budget(keep)  # a budget that cannot be is refused there
        if self.range is not None:
            low, high = self.range
            _require(type(low) is type(high), "range", self.range, "two integers or two floats")
            _require(low <= high, "range", self.range, "[smaller, larger]")


@dataclass(frozen=True, kw_only=True, slots=True)
class TauConfig:
    """The Soft Top-K temperature; `anneal_steps` is optimiser steps (int) or a share of the run (float).

    Args:
        start: The temperature of the first step.
        end: The temperature after annealing, and of every validation.
        anneal_steps: Optimiser steps (int) or a share of the run (float) over which it falls; steps beyond the end of
            the run are warned of.
        drawn: Each picture of a step has a temperature of its own, drawn evenly on a log scale between `end` and the
            annealed one: some see from the first step on what dropping will do. Not in the paper.
    """

    start: float = 2.0
    end: float = 0.1
    anneal_steps: int | float = 2000
    drawn: bool = False

    def __post_init__(self) -> None:
        _require(self.start > 0, "start", self.start, "above 0")
        _require(0 < self.end <= self.start, "end", self.end, f"above 0 and at most start, {self.start}")
        _require(_is_amount(self.anneal_steps), "anneal_steps", self.anneal_steps, _AMOUNT)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW with a cosine learning rate.

    Args:
        lr: Peak learning rate.
        batch_size: Samples per device and forward pass.
        accumulate: Forward passes per optimiser step; the effective batch is batch_size * accumulate * devices.
        epochs: Passes over the data at most.
        steps: Optimiser steps; in place of `epochs` where given.
        weight_decay: Decoupled, as AdamW has it.
        clip: Largest gradient norm; None does not clip.
        warmup: Optimiser steps (int) or a share of the run (float).
        patience: Validations without a better loss before the run stops, once the temperature has settled; None: never.
        precision: Of the forward and backward pass; the trained weights are float32.
        gradient_checkpointing: Run each frozen decoder layer again in the backward pass: less memory, more time.
        compile: Let torch.compile fuse the frozen model's decoder layers; the run begins once one is compiled.
    """

    lr: float = 2e-4
    batch_size: int = 4
    accumulate: int = 4
    epochs: int = 1
    steps: int | None = None
    weight_decay: float = 0.0
    clip: float | None = 1.0
    warmup: int | float = 0.03
    patience: int | None = 3
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    gradient_checkpointing: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        _require(self.lr > 0, "lr", self.lr, "above 0")
        for key in ("batch_size", "accumulate", "epochs", "steps", "patience"):
            value = getattr(self, key)
            _require(value is None or value >= 1, key, value, "1 or more")
        _require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more")
        _require(self.clip is None or self.clip > 0, "clip", self.clip, "above 0, or null for none")
        _require(_is_amount(self.warmup), "warmup", self.warmup, _AMOUNT)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Pictures with captions.

    Args:
        name: A folder with a JSONL file, parquet files or WebDataset tar shards; a JSON file of LLaVA conversations; a
            Hugging Face dataset id, which is streamed; or a source that an installed package brings, such as `scenes`
            (drawn, no download).
        split: Of a Hugging Face dataset.
        image: Column with the picture: its file, or its bytes.
        caption: Column with the text to learn.
        images: Folder that file names of pictures start from; default: the folder the data lies in.
        prompt: What is asked where a row has no `question`; the caption is its answer. Conversations bring their own.
        share: How much of the data is used, drawn once without replacement by `seed`.
        seed: Of that draw alone, so that runs with other seeds see the same subset.
        validation: Samples held out for the validation loss.
        max_broken: Share of the rows read that may be unusable (a damaged picture, no caption); beyond it a run stops.
        max_words: Words of the longest text, question and answers together; a longer row counts as broken.
        buffer: Rows of a stream (parquet, hub) that are held in memory to shuffle it.
        sizes: Of pictures that a source draws: "fixed" (192 x 192), "384" or "varying"; default: what the model's
            folder says (`scenes.json`), else fixed.
        cache: Folder for the frozen tower's features: a picture is encoded once, not in every epoch and run.
    """

    name: str
    split: str = "train"
    image: str = "image"
    caption: str = "caption"
    images: str | None = None
    prompt: str = "Describe the picture."
    share: float = 1.0
    seed: int = 42
    validation: int = 256
    max_broken: float = 0.01
    max_words: int = 4096
    buffer: int = 1024
    sizes: Literal["fixed", "384", "varying"] | None = None
    cache: str | None = None

    def __post_init__(self) -> None:
        _require(0 < self.share <= 1, "share", self.share, "above 0 and at most 1")
        _require(self.validation >= 0, "validation", self.validation, "0 or more")
        _require(0 <= self.max_broken <= 1, "max_broken", self.max_broken, "from 0 to 1")
        _require(self.max_words >= 1, "max_words", self.max_words, "1 or more")
        _require(self.buffer >= 1, "buffer", self.buffer, "1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationConfig:
    """When the held-out samples are looked at, and what decides which weights are the best.

    Args:
        every: Optimiser steps (int) or a share of the run (float) between two validations; there is one at the end.
        choose_by: "hard" takes the weights with the smallest hard top-K loss, which is the deployed path's;
            "throttled" those with the smallest loss of the kind that is trained.
    """

    every: int | float = 0.05
    choose_by: Literal["hard", "throttled"] = "hard"

    def __post_init__(self) -> None:
        _require(self.every > 0 and _is_amount(self.every), "every", self.every, f"above 0: {_AMOUNT}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SavingConfig:
    """What a run leaves in its folder while it is under way.

    Args:
        every: Optimiser steps between two checkpoints; there is also one after each validation.
        keep: Checkpoints that stay, the newest ones.
        tensorboard: Curves for TensorBoard, where that is installed.
    """

    every: int = 200
    keep: int = 2
    tensorboard: bool = True

    def __post_init__(self) -> None:
        _require(self.every >= 1, "every", self.every, "1 or more")
        _require(self.keep >= 1, "keep", self.keep, "1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One training run, complete: written beside its results, and enough to start it again.

    Args:
        remove_below: Tokens with a weight below this are taken out of the training sequence, all but the K best;
            0 takes none out, as in the paper.
        deterministic: Train with repeatable operations, where torch has them, so that two runs with one seed on one
            kind of machine end with the same weights; slower on a GPU.
        recipe: What set values before the file did (`recipe_values`); default: `default_recipe` of the method.
    """

    backbone: BackboneConfig
    budget: BudgetConfig
    method: MethodConfig = field(default_factory=MethodConfig)
    tau: TauConfig = field(default_factory=TauConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    saving: SavingConfig = field(default_factory=SavingConfig)
    remove_below: float = 0.0
    seed: int = 42
    deterministic: bool = False
    recipe: Recipe = "default"

    def __post_init__(self) -> None:
        for key, kind in typing.get_type_hints(RunConfig).items():
            value: object = getattr(self, key)
            if not dataclasses.is_dataclass(kind):
                coerce(kind, value, key)
            elif type(value) is not kind:
                raise ValueError(f"{key} is {short(value)}: must be of its own class, as make_config makes it")
        if self.backbone.dtype == "float16" and self.optim.precision == "bfloat16":
            raise ValueError(
                "backbone.dtype is 'float16' and optim.precision 'bfloat16': torch does not mix the two; set "
                "backbone.dtype=bfloat16 or optim.precision=float32"
            )
        _require(0 <= self.remove_below < 0.5, "remove_below", self.remove_below, "0 or more and below 0.5")
        if not -(1 << 63) <= self.seed < 1 << 64:
            raise ValueError(f"seed is {short(self.seed)}: must be an integer of 64 bits")


def make_config(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """A checked `RunConfig` from plain nested values; `overrides` are dotted and win."""
    if not isinstance(values, Mapping) or not isinstance(overrides, list | tuple):
        raise ValueError(
            f"{short(values)} with {short(overrides)}: give a mapping of keys to values, and a list of overrides"
        )
    for override in overrides:
        values = merge(values, parse_override(override))
    values = _without_retired(values)
    method = values.get("method")
    name = method.get("name", MethodConfig().name) if isinstance(method, Mapping) else MethodConfig().name
    given = values.get("recipe")
    recipe = default_recipe(name) if given is None else coerce(Recipe, given, "recipe")
    values = merge(recipe_values(recipe, name), {"data": {}, **values, "recipe": recipe})  # data.name is required
    if isinstance(values.get("method"), Mapping):  # YAML writes options beside the name
        options = {key: value for key, value in values["method"].items() if key != "name"}
        values["method"] = {"name": name, "options": options}
    return build(RunConfig, values)


def _without_retired(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without keys that earlier versions had, where they did nothing."""
    if values.get("hardness"):
        raise ValueError(
            f"hardness is {values['hardness']!r}: the hardness loss is no longer there (docs/decisions/knobs.md); set "
            "it to 0, or go on with the version that wrote the file"
        )
    tau = values.get("tau")
    if isinstance(tau, Mapping) and tau.get("start") == "auto":
        raise ValueError(
            "tau.start is 'auto', which is no longer there: the bridge draws a temperature for each picture instead "
            "(docs/decisions/temperature.md); give a number, such as 2.0"
        )
    return {key: value for key, value in values.items() if key not in ("hardness", "hardness_ramp")}


def _as_started(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A run's resolved config, which names every key there was, with what later versions set by its recipe."""
    tau, method = values.get("tau"), values.get("method")
    if isinstance(tau, Mapping):
        values = {**values, "tau": {"drawn": False, **tau}}
    if isinstance(method, Mapping) and method.get("name") in SURROGATES and values.get("recipe") == "paper":
        values = {**values, "method": {"final_norm": True, **method}}
    return values


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """A checked `RunConfig` from a YAML file; `overrides` like `optim.lr=1e-4` win over the file."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8 ({error}); save it as one") from error
    values = parse_yaml(text, str(path))
    if not isinstance(values, Mapping):
        raise ValueError(
            f"{path} holds {short(values)}: a config is a mapping with the keys backbone, method, budget, ..."
        )
    if path.name == RUN_FILE:
        values = _as_started(values)
    try:
        return make_config(values, overrides)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def to_yaml(config: RunConfig) -> str:
    """The resolved config as YAML that `load_config` reads back to an equal one."""
    values = dataclasses.asdict(config)
    method = values["method"]
    values["method"] = {"name": method["name"], **method["options"]}
    if values["budget"]["range"] is not None:
        values["budget"]["range"] = list(values["budget"]["range"])
    return yaml.safe_dump(values, sort_keys=False)


def differences(before: RunConfig, after: RunConfig) -> list[str]:
    """What differs between two configs, one `key: old -> new` each; empty where they are equal."""

    def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in values.items():
            out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        return out

    old, new = (flat(yaml.safe_load(to_yaml(config))) for config in (before, after))
    return [
        f"{key}: {old.get(key)!r} -> {new.get(key)!r}"
        for key in dict.fromkeys([*old, *new])
        if old.get(key) != new.get(key)
    ]
