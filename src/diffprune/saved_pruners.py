"""A saved pruner comes back: its method by itself, or on its base model, where both are made for each other."""

import os
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from diffprune.backbones.base import Backbone
from diffprune.base_files import quantiser
from diffprune.budget import Budget
from diffprune.fingerprint import is_base, other_features
from diffprune.fitting import plain_model, refuse_offloaded, wrap_backbone
from diffprune.json_files import short
from diffprune.loading import (
    brought_models,
    hub_options,
    load_base,
    may_be_on_hub,
    model_sources,
    require_name,
    require_revision,
    say_hub_is_asked,
)
from diffprune.methods.base import Pruner
from diffprune.methods.options import build_method, deployed_as, make_options
from diffprune.saving import CARD_FILE, CONFIG_FILE, WEIGHTS_FILE, exported_state, load_pruner
from diffprune.terminal import first_line


def load_pruned_vlm(
    cls: type,
    directory: str | Path,
    *,
    keep: int | float | None,
    method: str | None = None,
    base: nn.Module | None,
    processor: Any,
    allow_other_base: bool,
    revision: str | None = None,
    base_revision: str | None = None,
    model_kwargs: dict[str, Any],
) -> Any:
    """A saved pruner on its base model; another base than the one it was trained on is refused unless asked for.

    Args:
        method: How its weights choose, where not by the saved `choice`.
        revision: Of the pruner's repository; `base_revision` that of its base model, where not the one it names.
        model_kwargs: Of the base model's `from_pretrained`; token and cache are the pruner's too.
    """
    require_name(directory)
    if not isinstance(method, str | None) or not isinstance(allow_other_base, bool):
        raise ValueError(
            f"method={short(method)}, allow_other_base={short(allow_other_base)}: give a text, and True or False"
        )
    if keep is not None:
        keep = Budget(keep).keep  # refused now, not after minutes of loading
    if base is None and processor is not None:
        raise ValueError("a processor was given without its base model; give both, or neither")
    require_revision(base_revision)
    folder, restore = local_pruner(directory, revision=revision, **hub_options(model_kwargs))
    config, state = load_pruner(folder, restore=restore)
    if keep is None and not config["budgets"]:
        raise ValueError(f"{directory} names no budget that it was trained for; give keep=...")
    wanted = config["base"]
    if base is None:
        if not wanted["id"]:
            raise ValueError(
                f"{directory} does not name its base model; "
                "give it: from_pretrained(..., base=model, processor=processor)"
            )
        if (of_base := base_revision or wanted["revision"]) is not None:
            model_kwargs = {**model_kwargs, "revision": of_base}
        base, processor = load_base(base_of(config, folder), **model_kwargs)
    elif processor is None:
        raise ValueError("a base model was given without its processor; give both")
    base = cast(nn.Module, plain_model(base))
    backbone = wrap_backbone(base, processor)
    refuse_offloaded(backbone, backbone.model.get_input_embeddings().weight.device)
    with _naming(directory):
        if not allow_other_base:
            refuse_other_base(backbone, config)
        vlm = cls(
            base,
            processor,
            method=saved_method(directory, config, state, backbone, method),
            keep=keep if keep is not None else config["budgets"][-1],
            positions=config["positions"],
            newline=config.get("newline", "rows"),
            budget=config.get("budget", "global"),
        )
    vlm.trained_for, vlm.artefact = tuple(config["budgets"]), config
    return vlm


def base_of(config: Mapping[str, Any], folder: Path) -> str:
    """By which name the base model of a saved pruner is loaded.

    A folder that was named from where the training ran is not there from elsewhere; it is then looked for from the
    folders above the pruner's, of which the one where it ran is most often one.

    Args:
        folder: Of the pruner.
    """
    name, revision = config["base"]["id"], config["base"]["revision"]
    if revision is not None or not name or name in brought_models() or os.path.isdir(name):
        return name
    return next((str(above / name) for above in folder.resolve().parents if os.path.isdir(above / name)), name)


@contextmanager
def _naming(directory: str | Path) -> Iterator[None]:
    """Inside, an error names the saved pruner it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(str(error) if str(directory) in str(error) else f"{directory}: {error}") from error


def saved_method(
    directory: str | Path,
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    backbone: Backbone,
    method: str | None = None,
) -> Pruner:
    """The method of a saved pruner with its weights, as it is deployed; the base's weights are not looked at.

    Args:
        directory: Of the pruner, for messages.
        config: Its config, and `state` its weights (`load_pruner`).
        backbone: Whose kind of blocks it is made of.
        method: How its weights choose, where not by the saved `choice`.
    """
    if (order := config.get("order", "raster")) != "raster":
        raise ValueError(
            f"{directory} was saved with order={short(order)}, which is no longer an option; change it to "
            '"raster" in its config.json: kept tokens reach the language model in raster order'
        )
    name, options = config["method"]["name"], config["method"]["options"]
    with _naming(directory):
        make_options(name, options)  # also where one is called as an argument of the next call
        trained = build_method(name, block=backbone.block, language=backbone.language, **options)
        weights = exported_state(trained.state_dict())
        own, given = ({key: value.shape for key, value in one.items()} for one in (weights, state))
        if own != given:
            odd = min(key for key in own.keys() | given.keys() if own.get(key) != given.get(key))
            raise ValueError(f"the weights do not fit method {name!r}, the first that differs is {odd!r}")
        trained.load_state_dict({key: value.to(torch.float32) for key, value in state.items()}, strict=False)
        return deployed_as(trained.eval(), config.get("choice"), method)


def refuse_other_base(backbone: Any, config: Mapping[str, Any]) -> None:
    """An error where a saved pruner would choose other tokens on this base than on its own, and why.

    Args:
        config: Of the saved pruner.
    """
    wanted, base = config["base"], backbone.model
    trained_on = wanted["id"] or wanted["model_type"]
    if not is_base(backbone, wanted["fingerprint"]):
        name = getattr(base.config, "_name_or_path", "") or type(base).__name__
        stored = quantiser(getattr(base.config, "quantization_config", None))
        why = f" (those of this one are stored as {stored} has quantised them)" if stored else ""
        raise ValueError(
            f"this pruner was trained on {trained_on!r}, not on {name!r}: "
            f"their vision weights differ{why}; load its own base, or say allow_other_base=True"
        )
    if why := other_features(backbone, config["features"]):
        raise ValueError(
            f"this pruner was trained on {trained_on!r} with other settings: {why}; load its own base and processor, "
            "or say allow_other_base=True"
        )


def local_pruner(directory: str | Path, *, revision: str | None = None, **options: Any) -> tuple[Path, str | None]:
    """A saved pruner's folder: given, brought along by a package, or a hub id's files; and how to restore its files.

    Args:
        revision: Branch, tag or commit of its repository.
        options: Token, cache and the like of the hub's client.
    """
    require_revision(revision)
    path = Path(directory)
    brought = [source for source in model_sources() if str(directory) in source.pruners]
    if path.is_dir() or brought or not may_be_on_hub(str(directory)):
        if revision is not None:
            raise ValueError(
                f"revision={revision} is for a repository of the hub, and {directory} is none; leave it out, or say "
                "base_revision=... for that of the base model"
            )
        if path.is_dir() or not brought:
            return path, None
        return brought[0].pruners[str(directory)], brought[0].restore
    from huggingface_hub import snapshot_download

    options.pop("proxies", None)  # for transformers alone
    say_hub_is_asked(str(directory), revision, options.get("cache_dir"))
    try:
        files = [CONFIG_FILE, WEIGHTS_FILE, CARD_FILE]  # whatever else lies there is left there
        return Path(snapshot_download(str(directory), revision=revision, allow_patterns=files, **options)), None
    except Exception as error:
        named = directory if revision is None else f"{directory} at revision {revision}"
        raise ValueError(
            f"{named} is neither a local folder nor a hub repository that can be reached "
            f"({type(error).__name__}: {textwrap.shorten(first_line(error).rstrip('.'), 300)})"
        ) from error
