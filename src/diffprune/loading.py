"""Load models the safe way: the stock class, nothing missing or random, and the pruner on the base it was made for."""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import safetensors
import torch
from tokenizers import Tokenizer
from torch import nn

from diffprune import doors
from diffprune.fitting import refuse_offloaded, wrap_backbone
from diffprune.methods.options import build_method
from diffprune.registry import BACKBONES
from diffprune.saving import CONFIG_FILE, exported_state, fingerprint, load_pruner, vision_state


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


def is_pruner(name: str | Path) -> bool:
    """Whether the name is that of a saved pruner, brought along by a package or in a folder or repository."""
    if any(str(name) in source.pruners for source in model_sources()) and not Path(name).is_dir():
        return True
    path = Path(name)
    if not path.is_dir():
        if source_of(name) is not None or not _may_be_on_hub(str(name)):
            return False
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(str(name), CONFIG_FILE)
        if not isinstance(cached, str):
            return False
        path = Path(cached).parent
    try:
        config = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # whoever loads it says what is wrong
    return isinstance(config, dict) and "method" in config and "format" in config


def load_base(name: str | Path, **kwargs: Any) -> tuple[nn.Module, Any]:
    """A stock Hugging Face VLM and its processor from a folder, a hub id, or a package that brings it along.

    A checkpoint that leaves weights out would leave them random, with no more than a log line; here it is an error.
    A file of the model that cannot be read is named.
    """
    source = source_of(name)
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
    from transformers import AutoModelForImageTextToText, AutoProcessor

    name = hub_id(str(name))
    refuse_unknown(name, repr(name))
    kwargs.setdefault("attn_implementation", "sdpa")
    revision = {key: value for key, value in kwargs.items() if key == "revision"}
    try:
        loaded: Any = AutoModelForImageTextToText.from_pretrained(name, output_loading_info=True, **kwargs)
        model, info = loaded
        refuse_gaps(name, info)
        return model, AutoProcessor.from_pretrained(name, **revision)
    except OSError as error:
        if Path(name).is_dir() or error.errno is not None:  # with a number it is of this machine, not of the hub
            raise
        raise unreachable(repr(name), error) from error


def refuse_unknown(name: str, given: str) -> None:
    """An error with the nearest names where a name can be no model: no folder, and not of the hub's form.

    Args:
        given: The name as the user gave it, for the message.
    """
    if Path(name).is_dir() or _may_be_on_hub(name):
        return
    known = [*brought_models(), *(preset for family in BACKBONES.names() for preset in BACKBONES.get(family).presets)]
    near = difflib.get_close_matches(name, known, n=3)
    others = f"give a folder that is there, a hub id (owner/name) or one of {', '.join(known)}"
    way_out = f"did you mean {' or '.join(near)}?" if near else others
    raise ValueError(f"{given} is neither a folder with a model nor a known one; {way_out}")


def unreachable(given: str, error: Exception) -> ValueError:
    """The error for a name that is no folder and that the hub did not give either, with the hub's first sentence."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return ValueError(
        f"{given} is neither a folder with a model nor a model id of the hub that can be reached ({reason})"
    )


def _may_be_on_hub(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/"))


def damaged_file(folder: Path) -> Path | None:
    """The first weight, tokenizer or JSON file of the folder that cannot be read; None where all can."""
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
        try:
            if path.suffix == ".safetensors":
                with safetensors.safe_open(path, "pt"):
                    pass
            elif path.name == "tokenizer.json":
                Tokenizer.from_file(str(path))
            else:
                json.loads(path.read_text(encoding="utf-8"))
        except OSError:
            continue  # not there or not ours to read: the loader's own message says so
        except Exception:  # the tokenizers' errors have no class of their own
            return path
    return None


def hub_id(name: str) -> str:
    """The hub's name of a preset (`llava-1.5-7b`); any other name is its own."""
    for family in BACKBONES.names():
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


def load_pruned_vlm(
    cls: type,
    directory: str | Path,
    *,
    keep: int | float | None,
    base: nn.Module | None,
    processor: Any,
    allow_other_base: bool,
    model_kwargs: dict[str, Any],
) -> Any:
    """A saved pruner on its base model; another base than the one it was trained on is refused unless asked for."""
    folder, restore = _local(directory)
    config, state = load_pruner(folder, restore=restore)
    wanted = config["base"]
    if base is None:
        if not wanted["id"]:
            raise ValueError(
                f"{directory} does not name its base model; "
                "give it: from_pretrained(..., base=model, processor=processor)"
            )
        if wanted["revision"] is not None:
            model_kwargs = {"revision": wanted["revision"], **model_kwargs}
        base, processor = load_base(wanted["id"], **model_kwargs)
    elif processor is None:
        raise ValueError("a base model was given without its processor; give both")
    backbone = wrap_backbone(base, processor)
    refuse_offloaded(backbone, backbone.model.get_input_embeddings().weight.device)
    found = fingerprint(vision_state(backbone).items())
    if found != wanted["fingerprint"] and not allow_other_base:
        name = getattr(base.config, "_name_or_path", "") or type(base).__name__
        raise ValueError(
            f"this pruner was trained on {wanted['id'] or wanted['model_type']!r}, not on {name!r}: "
            "their vision weights differ; load its own base, or say allow_other_base=True"
        )
    if (order := config.get("order", "raster")) != "raster":
        raise ValueError(
            f"{directory} was saved with order={order!r}, which is no longer an option; change it to "
            '"raster" in its config.json: kept tokens reach the language model in raster order'
        )
    name, options = config["method"]["name"], config["method"]["options"]
    method = build_method(name, block=backbone.block, language=backbone.language, **options)
    own = set(exported_state(method.state_dict()))
    if own != set(state):
        odd = sorted(own ^ set(state))[0]
        raise ValueError(
            f"{directory}: the weights do not fit method {config['method']['name']!r}, "
            f"the first that differs is {odd!r}"
        )
    method.load_state_dict({key: value.to(torch.float32) for key, value in state.items()}, strict=False)
    budget = keep if keep is not None else config["budgets"][-1]
    vlm = cls(
        base,
        processor,
        method=method.eval(),
        keep=budget,
        positions=config["positions"],
        newline=config.get("newline", "rows"),
        budget=config.get("budget", "global"),
    )
    vlm.trained_for, vlm.artefact = tuple(config["budgets"]), config
    return vlm


def _local(directory: str | Path) -> tuple[Path, str | None]:
    """A saved pruner's folder: given, brought along by a package, or a hub id's files; and how to restore its files."""
    path = Path(directory)
    if path.is_dir():
        return path, None
    for source in model_sources():
        if str(directory) in source.pruners:
            return source.pruners[str(directory)], source.restore
    if not _may_be_on_hub(str(directory)):
        return path, None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(directory))), None
    except Exception as error:
        raise ValueError(
            f"{directory} is neither a local folder nor a hub repository that can be reached ({type(error).__name__})"
        ) from error
