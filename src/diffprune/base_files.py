"""The files of a base model, looked at before anything large is read: all there, whole, and of a kind that can be run.

A download that was cut short, a folder without a processor, or weights whose library is missing are each one sentence
within a second, not a stack of errors after the weights.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
from tokenizers import Tokenizer

from diffprune.json_files import read_json

ADAPTER = "adapter_config.json"
INDEX = "model.safetensors.index.json"
QUANTISERS = {"bitsandbytes": "bitsandbytes", "torchao": "torchao"}  # those that are tested, and the package each needs
HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies")
_WEIGHTS = ("model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_AGAIN = "download the model again, or save it with model.save_pretrained and processor.save_pretrained"


def require_config(folder: Path) -> None:
    """An error where a folder is none of a model."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json, so no model; {_AGAIN}")


def require_whole(folder: Path) -> None:
    """An error that names the first thing a model's folder lacks: its config, weights, image processor or tokenizer."""
    require_config(folder)
    if missing := missing_weights(folder):
        raise ValueError(
            f"{folder} is only partly downloaded: {missing[0]} is missing"
            f"{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}; {_AGAIN}"
        )
    if not _has_image_processor(folder):
        raise ValueError(
            f"{folder} has no image processor (preprocessor_config.json or processor_config.json); save the "
            "processor beside the model, or load both yourself: PrunedVLM(model, processor)"
        )
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise ValueError(
            f"{folder} has no tokenizer (tokenizer.json); save the processor beside the model, or load both yourself: "
            "PrunedVLM(model, processor)"
        )


def missing_weights(folder: Path) -> list[str]:
    """Weight files that the folder should hold and does not: those its index names, or any at all."""
    index = folder / INDEX
    if index.is_file():
        named = _read_json(index).get("weight_map")
        files = set(named.values()) if isinstance(named, dict) else set()
        return sorted(name for name in files if not (folder / str(name)).is_file())
    return [] if any((folder / name).is_file() for name in _WEIGHTS) else ["model.safetensors"]


def _has_image_processor(folder: Path) -> bool:
    if (folder / "preprocessor_config.json").is_file():
        return True
    return "image_processor" in _read_json(folder / "processor_config.json")


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
                read_json(path)
        except OSError:
            continue  # not there or not ours to read: the loader's own message says so
        except Exception:  # the tokenizers' errors have no class of their own
            return path
    return None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none, and whoever loads the model says what is wrong with it."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


# Adapters and quantised weights --------------------------------------------------------------------------------------


def adapted_base(folder: Path) -> str | None:
    """The base model that an adapter's folder (LoRA, by PEFT) names; None where the folder holds no adapter."""
    if not (folder / ADAPTER).is_file() or (folder / "config.json").is_file():
        return None
    base = _read_json(folder / ADAPTER).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ValueError(f"{folder / ADAPTER} names no base model; load it yourself: PrunedVLM(model, processor)")
    require_package("peft", f"{folder} is an adapter for {base}")
    return base


def quantiser(config: Any) -> str | None:
    """How a configuration says its weights are stored: `bitsandbytes`, `torchao`, ...; None where they are plain.

    Args:
        config: The `quantization_config` of a checkpoint or of a call: a mapping or an object, or None.
    """
    if config is None:
        return None
    found = config.get("quant_method") if isinstance(config, Mapping) else getattr(config, "quant_method", None)
    if found is None and isinstance(config, Mapping) and (config.get("load_in_4bit") or config.get("load_in_8bit")):
        return "bitsandbytes"  # as older checkpoints say it
    return None if found is None else str(getattr(found, "value", found))


def require_quantiser(name: str, config: Any) -> None:
    """An error where weights are quantised in a way that is not tested, or whose package is missing."""
    found = quantiser(config)
    if found is None:
        return
    if found not in QUANTISERS:
        raise ValueError(
            f"{name} is quantised by {found}, which is not tested here ({' and '.join(QUANTISERS)} are); "
            "load it yourself, at your own risk: PrunedVLM(model, processor)"
        )
    require_package(QUANTISERS[found], f"{name} is quantised by {found}")


def require_package(package: str, reason: str) -> None:
    """An error with the reason where a package is not installed."""
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"{reason}, and {package} is not installed: run pip install {package}")
