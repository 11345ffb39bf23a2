"""Optional packages: what each extra is made of, what it gives, and the one sentence said where it is missing."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Extra:
    """An entry of `pyproject.toml`'s optional dependencies: the modules it brings and what they are for."""

    modules: tuple[str, ...]
    gives: str


EXTRAS: dict[str, Extra] = {
    "train": Extra(
        ("datasets", "pyarrow", "tensorboard"),
        "training on Hugging Face datasets and parquet files, curves in TensorBoard",
    ),
    "app": Extra(("gradio",), "the page in the browser"),
    "serve": Extra(("fastapi", "uvicorn"), "the OpenAI-compatible server"),
    "lmms": Extra(("lmms_eval",), "the public benchmarks through lmms-eval"),
    "vllm": Extra(("vllm",), "pruning inside the vLLM engine"),
}


class MissingExtraError(ImportError):
    """An optional package is asked for and not installed."""


def missing_modules(extra: str) -> list[str]:
    """The modules of an extra that cannot be found; found ones are not imported."""
    return [module for module in EXTRAS[extra].modules if importlib.util.find_spec(module) is None]


def require(extra: str) -> None:
    """Raise one sentence that names the extra where a module of it is missing."""
    missing = missing_modules(extra)
    if missing:
        raise MissingExtraError(f"{', '.join(missing)} is not installed: run pip install 'diffprune[{extra}]'")
