"""Load models the safe way: the stock class, nothing missing or random, and the pruner on the base it was made for."""

import difflib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from diffprune import doors
from diffprune.backbones.image_only import load_processor
from diffprune.base_files import (
    HUB_OPTIONS,
    adapted_base,
    damaged_file,
    missing_weights,
    require_config,
    require_quantiser,
    require_whole,
)
from diffprune.fitting import require_family
from diffprune.json_files import read_json, short
from diffprune.registry import BACKBONES
from diffprune.saving import CONFIG_FILE, finish_saving
from diffprune.terminal import first_line

logger = logging.getLogger("diffprune")


@runtime_checkable  # the tests check types at run time
class ModelSource(Protocol):
    """Models and saved pruners that a package brings along, joined by the entry-point group `diffprune.models`."""

    models: Mapping[str, str]
    """Names that load as a folder or hub id does, each with its family."""

    pruners: Mapping[str, Path]
    """Names of saved pruners, each with its folder."""

    restore: str
    """How to get a file of the package back, with `{path}` where its path belongs: the end of a sentence."""

    def holds(self, name: str) -> bool:
        """Whether this source loads that name or folder; folders that the stock loader reads are not its business."""
        ...

    def load(self, name: str, **kwargs: Any) -> tuple[nn.Module, Any]:
        """The model and its processor; the keyword arguments are those of `from_pretrained`."""
        ...

    def describe(self, name: str) -> tuple[Any, Any]:
        """The model's configuration and its processor, without the weights where that is possible."""
        ...

    def folder(self, name: str) -> Path:
        """Where the files of that model are."""
        ...


def model_sources() -> list[ModelSource]:
    """Every source of models that can be imported."""
    return list(doors.load_all(doors.MODELS).values())


def source_of(name: str | Path) -> ModelSource | None:
    """The source that loads that name or folder; None for folders of the stock layout and for hub ids."""
    return next((source for source in model_sources() if source.holds(str(name))), None)


def brought_models() -> dict[str, str]:
    """Every model that an installed package brings along, with its family."""
    return {name: family for source in model_sources() for name, family in source.models.items()}


def is_pruner(name: str | Path, **options: Any) -> bool:
    """Whether the name is that of a saved pruner, brought along by a package or in a folder or repository.

    Args:
        options: Say where files of a repository come from (`hub_options`).
    """
    if any(str(name) in source.pruners for source in model_sources()) and not Path(name).is_dir():
        return True
    path = Path(name)
    if not path.is_dir():
        if source_of(name) is not None or not may_be_on_hub(str(name)):
            return False
        found = fetch(str(name), CONFIG_FILE, **options)
        if found is None:
            return False
        path = found
    try:
        finish_saving(path)
        config = read_json(path / CONFIG_FILE)
    except (OSError, ValueError):
        return False  # whoever loads it says what is wrong
    return isinstance(config, dict) and "method" in config and "format" in config


def load_base(name: str | Path, **kwargs: Any) -> tuple[nn.Module, Any]:
    """A stock Hugging Face VLM and its processor from a folder, a hub id, or a package that brings it along.

    A checkpoint that leaves weights out would leave them random, with no more than a log line; here it is an error.
    A file of the model that cannot be read is named. Code that lies beside a model is never run.

    Args:
        kwargs: Of the stock `from_pretrained`: dtype, device_map, revision, quantization_config, ...
    """
    require_name(name)
    source = source_of(name)
    require_revision(kwargs.get("revision"))
    if kwargs.pop("trust_remote_code", False):
        raise ValueError(
            f"trust_remote_code=True would run code from {name}; it is not needed: every family here is one of "
            "transformers' own, so leave it out"
        )
    try:
        return _load_base(name, kwargs) if source is None else source.load(str(name), **kwargs)
    except Exception as error:
        damaged = damaged_file(Path(name) if source is None else source.folder(str(name)))
        if damaged is None:
            raise
        way_back = "save or download the model again"
        if source is not None and str(name) in source.models:
            way_back = source.restore.format(path=damaged)
        raise ValueError(f"{damaged} is damaged: {way_back}") from error


def _load_base(name: str | Path, kwargs: dict[str, Any]) -> tuple[nn.Module, Any]:
    from transformers import AutoModelForImageTextToText

    kwargs.setdefault("attn_implementation", "sdpa")
    name = hub_id(str(name))
    base = adapted_base(Path(name))
    if base is not None:
        return _adapted(name, *_load_base(base, kwargs))
    described = describe_base(name, repr(name), **hub_options(kwargs))
    if Path(name).is_dir():  # looked at second: a model that is no vision-language model lacks nothing
        require_whole(Path(name))
    quantised = kwargs.get("quantization_config") or getattr(described, "quantization_config", None)
    require_quantiser(name, quantised)
    processor = describe_processor(name, described.model_type, **hub_options(kwargs))
    with _explained(name, **hub_options(kwargs)), _blaming(name, kwargs):
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            name, output_loading_info=True, **kwargs, trust_remote_code=False
        )
    model, info = loaded
    refuse_gaps(name, info)
    if not Path(name).is_dir() and getattr(model.config, "_commit_hash", None) is None:
        # The commit that was loaded, which a pruner made on this model names; older transformers note it themselves.
        cached = cached_folder(name, kwargs.get("revision"), kwargs.get("cache_dir"))
        model.config._commit_hash = None if cached is None else cached.name
    return model, processor


def _adapted(folder: str, model: Any, processor: Any) -> tuple[nn.Module, Any]:
    """The base model with a saved adapter in its layers; the module is the base's own class, as everywhere here."""
    from peft import PeftModel  # pyright: ignore[reportMissingImports]

    return PeftModel.from_pretrained(model, folder).get_base_model(), processor


def hub_options(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `from_pretrained`'s arguments that say where files come from, the same for config and processor."""
    return {key: kwargs[key] for key in HUB_OPTIONS if key in kwargs}


def describe_base(name: str, given: str, **options: Any) -> Any:
    """The configuration of a base model, before any weights: an error where it is not there or of no known family.

    Args:
        given: The name as the user gave it, for messages.
        options: Of the stock `from_pretrained` (`hub_options`).
    """
    from transformers import AutoConfig, PreTrainedConfig

    refuse_unknown(name, given)
    if Path(name).is_dir():
        require_config(Path(name))
    else:
        say_hub_is_asked(name, **options)
    with _explained(name, given, **options):
        raw, _ = PreTrainedConfig.get_config_dict(name, **options)
        if "model_type" not in raw and "method" in raw and "format" in raw:
            raise ValueError(
                f"{given} is a saved pruner, no base model; name it as the pruner (--pruner, dp.load), without a method"
            )
        require_family(raw.get("model_type"))
        return AutoConfig.from_pretrained(name, **options, trust_remote_code=False)


def describe_processor(name: str, model_type: str, **options: Any) -> Any:
    """The processor of a base model, before any weights: an error where it has none for pictures."""
    try:
        with _explained(name, **options):
            processor = load_processor(name, model_type, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"the processor of {name} needs code that lies beside it, and no such code is run; save the stock "
            f"processor of {model_type} there, or load both yourself: PrunedVLM(model, processor)"
        ) from error
    if getattr(processor, "image_processor", None) is None:
        raise ValueError(
            f"{name} has no image processor (preprocessor_config.json or processor_config.json); save the processor "
            "beside the model, or load both yourself: PrunedVLM(model, processor)"
        )
    return processor


@contextmanager
def _explained(
    name: str, given: str | None = None, *, revision: str | None = None, cache_dir: Any = None, **_: Any
) -> Iterator[None]:
    """Inside, an error of the hub's client becomes one sentence; one of this machine (a full disk) stays as it is.

    Args:
        given: The name as the user gave it.
        revision, cache_dir: As the hub's client is given them.
    """
    try:
        yield
    except OSError as error:
        if Path(name).is_dir() or error.errno is not None:  # with a number it is of this machine, not of the hub
            raise
        cached = cached_folder(name, revision, cache_dir)
        if cached is not None and (missing := missing_weights(cached)):
            raise ValueError(
                f"{given or repr(name)} is only partly downloaded ({missing[0]} is missing in {cached}) and the hub "
                "cannot be reached; try again when it can"
            ) from error
        raise unreachable(given or repr(name), error) from error


@contextmanager
def _blaming(name: str, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Inside, whatever the stock loader makes of arguments that it cannot use becomes one sentence that shows them."""
    try:
        yield
    except (OSError, ImportError, MemoryError, torch.OutOfMemoryError):  # of the machine, and said by name
        raise
    except Exception as error:
        given = {
            key: value
            for key, value in kwargs.items()
            if not (key == "attn_implementation" and isinstance(value, str) and value == "sdpa")
        }
        if not given:
            raise
        listed = ", ".join(f"{key}={short(value)}" for key, value in given.items())
        raise ValueError(
            f"{name} cannot be loaded with {listed} ({type(error).__name__}: {first_line(error)[:200]}); leave out "
            "what the model's from_pretrained does not take"
        ) from error


def require_name(name: str | Path) -> None:
    """An error where a name can be that of no folder and of no model, whatever is asked for it."""
    text = str(name)
    if not isinstance(name, str | Path) or not text or "\0" in text or not text.isprintable() or len(text) > 4000:
        raise ValueError(f"{short(name)} is no name of a folder or a model; give a text or a Path")
    if max(len(part.encode()) for part in Path(text).parts or ("",)) > 255:
        raise ValueError(f"{short(name)} is too long for the name of a folder or a model")


def require_revision(revision: object) -> None:
    """An error where something can be no revision of a repository."""
    if not isinstance(revision, str | None):
        raise ValueError(f"revision={short(revision)} is no revision; give a branch, a tag or a commit")


def cached_folder(name: str, revision: str | None = None, cache_dir: Any = None) -> Path | None:
    """Where the hub's client keeps files of a repository on this machine; None where there are none.

    The folder's name is the commit that the revision stands for.
    """
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, CONFIG_FILE, revision=revision, cache_dir=cache_dir)
    return Path(found).parent if isinstance(found, str) else None


def fetch(name: str, *files: str, **options: Any) -> Path | None:
    """The folder that holds these files of a repository, which alone are downloaded; None where they cannot be had."""
    from huggingface_hub import hf_hub_download

    options.pop("proxies", None)  # for transformers alone
    say_hub_is_asked(name, **options)
    try:
        return [Path(hf_hub_download(name, file, **options)).parent for file in files][-1]
    except Exception:  # of the hub's client, of the network: whoever loads the model explains it
        return None


def say_hub_is_asked(name: str, revision: str | None = None, cache_dir: Any = None, **_: Any) -> None:
    """One line where a name is no folder and nothing of it is on this machine, so that the hub is asked for it.

    `runs/llava-k64` has the form of a hub id: a mistyped folder would otherwise become a request without a word.

    Args:
        cache_dir: Where the hub's client keeps files; default: its own place.
    """
    if cached_folder(name, revision, cache_dir) is None:
        logger.warning(f"there is no folder {name} here: asking the hub for a repository of that name")


def refuse_unknown(name: str, given: str) -> None:
    """An error with the nearest names where a name can be no model: no folder, and not of the hub's form.

    Args:
        given: The name as the user gave it, for the message.
    """
    if Path(name).is_dir() or may_be_on_hub(name):
        return
    known = [*brought_models(), *(preset for family in BACKBONES.names() for preset in BACKBONES.get(family).presets)]
    near = difflib.get_close_matches(name, known, n=3)
    others = f"give a folder that is there, a hub id (owner/name) or one of {', '.join(known)}"
    way_out = f"did you mean {' or '.join(near)}?" if near else others
    raise ValueError(f"{given} is neither a folder with a model nor a known one; {way_out}")


def unreachable(given: str, error: Exception) -> ValueError:
    """The error for a name that is no folder and that the hub did not give either, with the hub's first sentence."""
    reached = f"a model id of the hub that can be reached ({first_line(error).rstrip('.')})"
    return ValueError(f"{given} is neither a folder with a model nor {reached}")


def may_be_on_hub(name: str) -> bool:
    """Whether a name has the form of a hub id, `owner/name`."""
    return name.count("/") == 1 and not name.startswith((".", "/"))


def served_name(source: str) -> str:
    """Under which requests ask for a model, by either engine: a folder's own name, or the hub id."""
    return Path(source).resolve().name if Path(source).is_dir() else source


def hub_id(name: str) -> str:
    """The hub's name of a preset (`llava-1.5-7b`); any other name is its own."""
    for family in () if "/" in name else BACKBONES.names():  # a path needs no other family than its own
        preset = BACKBONES.get(family).presets.get(name)
        if preset is not None:
            return preset.hub_id
    return name


def refuse_gaps(name: str, info: dict[str, Any]) -> None:
    """An error where a checkpoint did not fill the model exactly."""
    for key, meaning in (
        ("missing_keys", "missing, so random"),
        ("unexpected_keys", "unknown"),
        ("mismatched_keys", "of another shape"),
    ):
        keys = sorted(str(key) for key in info.get(key) or ())
        if keys:
            raise ValueError(
                f"{name}: {len(keys)} weights are {meaning}, the first is {keys[0]}; "
                "the checkpoint does not fit its class"
            )
