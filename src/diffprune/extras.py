"""Optional packages: what each extra is made of, what it gives, and the one sentence said where it is missing."""

from __future__ import annotations

import importlib.util
import shlex
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Extra:
    """An entry of `pyproject.toml`'s optional dependencies: the modules it brings and what they are for."""

    modules: tuple[str, ...]
    gives: str


EXTRAS: dict[str, Extra] = {  # each is used by something: a test looks for it
    "train": Extra(
        ("datasets", "pyarrow", "tensorboard"),
        "training on Hugging Face datasets and parquet files, curves in TensorBoard",
    ),
    "serve": Extra(("fastapi", "uvicorn", "prometheus_client"), "`diffprune serve` and the page of `diffprune app`"),
    "lmms": Extra(("lmms_eval",), "the public benchmarks through lmms-eval"),
    "vllm": Extra(("vllm",), "pruned models behind vLLM's server"),
}

VERSIONS = {
    "datasets": ">=4",
    "lmms_eval": ">=0.7.3",
    "vllm": ">=0.32,<0.33",
}  # those that were tested, as pyproject.toml has them

# Packages of others that are taken where they are there, and what changes then.
OPTIONAL: dict[str, str] = {
    "torchvision": "the stock processors as they are; without it pictures go through Pillow, and videos are left out",
    "bitsandbytes": "bases in 4 or 8 bits",
    "torchao": "bases in 8 bits",
    "peft": "bases with a LoRA",
}


class MissingExtraError(ImportError):
    """An optional package is asked for and not installed."""


def is_installed(package: str) -> bool:
    """Whether a package can be found; it is not imported."""
    return importlib.util.find_spec(package) is not None


def missing_modules(extra: str) -> list[str]:
    """The modules of an extra that cannot be found; found ones are not imported."""
    return [module for module in EXTRAS[extra].modules if not is_installed(module)]


def require(extra: str) -> None:
    """Raise one sentence that names the extra where a module of it is missing."""
    missing = missing_modules(extra)
    if missing:
        raise MissingExtraError(
            f"{', '.join(missing)} of the extra {extra!r} is not installed: run {install_line(extra)}"
        )


def install_line(extra: str) -> str:
    """What installs the missing packages of an extra, whichever way this package was installed."""
    wanted = [module.replace("_", "-") + VERSIONS.get(module, "") for module in missing_modules(extra)]
    return f"pip install {shlex.join(wanted)}"
