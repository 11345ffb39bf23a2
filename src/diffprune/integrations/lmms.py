"""lmms-eval's side door: what its entry-point group `lmms_eval.models` is given, and whether it is there at all.

    python -m lmms_eval --model diffprune --model_args pruner=DIR,keep=64 --tasks pope
    python -m lmms_eval --model diffprune --model_args pretrained=BASE,method=divprune,keep=0.1111 --tasks pope

This file is light: the harness loads all entry points in one try, and one that fails hides the others.
"""

import importlib.metadata
import importlib.util
from typing import Any

from diffprune.extras import require

MODEL_ID = "diffprune"


def manifests() -> Any:
    """The harness's description of its model `diffprune`."""
    from lmms_eval.models.registry_v2 import ModelManifest  # pyright: ignore[reportMissingImports]

    return ModelManifest(
        model_id=MODEL_ID,
        simple_class_path="diffprune.integrations.lmms_model.Simple",
        chat_class_path="diffprune.integrations.lmms_model.Chat",
    )


def require_harness() -> None:
    """One sentence where the harness is not installed, or too old to take models of other packages."""
    require("lmms")
    if importlib.util.find_spec("lmms_eval.models.registry_v2") is None:
        raise ValueError(
            f"lmms-eval {harness_version()} is too old: it takes no models by entry points; update it: "
            "pip install --upgrade lmms-eval"
        )


def harness_version() -> str:
    """Of the harness that is installed."""
    try:
        return importlib.metadata.version("lmms-eval")
    except importlib.metadata.PackageNotFoundError:  # found, but not as a package: a folder on the path
        return "of an unknown version"
