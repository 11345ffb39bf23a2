"""`diffprune doctor`: what is installed, which device there is, and what each missing extra would give."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

import typer

from diffprune.cli import JsonOption, print_json, print_table
from diffprune.extras import EXTRAS, OPTIONAL, install_line, is_installed, missing_modules
from diffprune.results import device_name, library_versions
from diffprune.versions import NEEDED, is_too_old


def _find_problems(versions: dict[str, str]) -> list[str]:
    """A sentence for every library that is missing or too old."""
    problems = []
    for package, needed in NEEDED.items():
        wanted = ".".join(map(str, needed))
        if package not in versions:
            problems.append(f"{package} is not installed: run pip install '{package}>={wanted}'")
        elif is_too_old(package, versions[package]):
            problems.append(f"{package} {versions[package]} is too old: run pip install '{package}>={wanted}'")
    return problems


def _broken_torchvision() -> list[str]:
    """A sentence where torchvision is there and of another build than torch: transformers' models then do not load."""
    if not is_installed("torchvision"):
        return []
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # whatever a build that does not fit raises
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return [f"torchvision cannot be imported ({reason}): install the one that fits torch, or pip uninstall it"]
    return []


def _accelerator() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"name": device_name(), "cuda": None, "memory_gb": None}
    memory = torch.cuda.get_device_properties(0).total_memory / 1e9
    return {"name": device_name(), "cuda": torch.version.cuda, "memory_gb": round(memory, 1)}


def inspect_installation() -> dict[str, Any]:
    """Versions, device, extras, other packages and problems, as `--json` prints them."""
    versions = library_versions()
    for package in ("accelerate", "safetensors", "huggingface_hub", "tokenizers", "pillow"):
        versions[package] = importlib.metadata.version(package)
    extras = {
        name: {"present": not missing_modules(name), "missing": missing_modules(name), "gives": extra.gives}
        for name, extra in EXTRAS.items()
    }
    optional = {name: {"present": is_installed(name), "gives": gives} for name, gives in OPTIONAL.items()}
    problems = [*_find_problems(versions), *_broken_torchvision()]
    device = None if any(problem.startswith("torch is not") for problem in problems) else _accelerator()
    return {"versions": versions, "device": device, "extras": extras, "optional": optional, "problems": problems}


def command(as_json: JsonOption = False) -> None:
    """Show versions, the device, and which extras and other packages are there.

    The exit code is 1 where something needed is missing or too old.

    \b
    Examples:
      diffprune doctor
      diffprune doctor --json
    """
    found = inspect_installation()
    if as_json:
        print_json(found)
    else:
        print_table([{"library": name, "version": version} for name, version in found["versions"].items()],
                    ["library", "version"])  # fmt: skip
        if found["device"] is not None:
            print(f"device: {found['device']['name']}")
        rows = [
            {"extra": name, "state": "present" if extra["present"] else "missing", "gives": extra["gives"]}
            for name, extra in found["extras"].items()
        ]
        print_table(rows, ["extra", "state", "gives"])
        rows = [
            {"package": name, "state": "present" if one["present"] else "missing", "gives": one["gives"]}
            for name, one in found["optional"].items()
        ]
        print_table(rows, ["package", "state", "gives"])
        for name in [name for name, extra in found["extras"].items() if not extra["present"]]:
            print(f"{name}: {install_line(name)}")
        for problem in found["problems"]:
            print(f"problem: {problem}")
    if found["problems"]:
        raise typer.Exit(1)
