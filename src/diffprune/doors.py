"""Doors: how other packages join in, by entry points of their own and without a change here.

    [project.entry-points."diffprune.methods"]
    my_method = "my_package.my_method:MyMethod"

| group                | what an entry names                                                                  |
|----------------------|--------------------------------------------------------------------------------------|
| `diffprune.commands` | a module with a function `command`, a subcommand of the entry's name                 |
| `diffprune.models`   | a `loading.ModelSource`: models and pruners that come with a package                 |
| `diffprune.data`     | a source of training samples, for `data.source` of a run                             |
| `diffprune.tasks`    | a source of questions, for `eval --tasks`                                            |
| `diffprune.methods`  | a `Pruner` class                                                                     |
| `diffprune.backbones`| a `Backbone` class                                                                   |
| `diffprune.moved`    | a public name that has moved to that package                                         |

An entry that cannot be imported is named in one warning and skipped: it does not take the others down. A single file
joins by `import_file`, on the command line `--plugin FILE`.
"""

import importlib.metadata
import importlib.util
import logging
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

logger = logging.getLogger("diffprune")

COMMANDS, MODELS, DATA, TASKS, METHODS, BACKBONES, MOVED = (
    f"diffprune.{group}" for group in ("commands", "models", "data", "tasks", "methods", "backbones", "moved")
)
_joined: dict[str, dict[str, importlib.metadata.EntryPoint]] = {}  # by `join`, for packages that are not installed


def join(group: str, name: str, target: str) -> None:
    """Add an entry by hand, `"package.module:attribute"`, for a package that lies on the path but is not installed."""
    _joined.setdefault(group, {})[name] = importlib.metadata.EntryPoint(name, target, group)


@cache
def _installed(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=group)}


def entries(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    """Every entry of a group by name, none of them imported."""
    return {**_installed(group), **_joined.get(group, {})}


@cache
def _load(entry: importlib.metadata.EntryPoint) -> Any:
    try:
        return entry.load()
    except Exception as error:  # whatever another package does wrong
        reason = " ".join(str(error).split()) or type(error).__name__
        logger.warning(
            f"{entry.name!r} of {entry.group} is skipped: {entry.value} cannot be imported ({reason}); "
            "install its package again or remove it"
        )
        return None


def load(group: str, name: str) -> Any:
    """What the entry of that name holds; None where there is none, or it cannot be imported."""
    entry = entries(group).get(name)
    return None if entry is None else _load(entry)


def load_all(group: str) -> dict[str, Any]:
    """Every entry of a group that can be imported, by name."""
    loaded = {name: _load(entry) for name, entry in entries(group).items()}
    return {name: value for name, value in loaded.items() if value is not None}


def import_file(path: str | Path) -> ModuleType:
    """Import a Python file that lies anywhere, once; what it registers is known from then on."""
    path = Path(path).resolve()
    if not path.is_file():
        raise ValueError(f"{path} is no file; give a Python file that registers a method or a backbone")
    name = f"diffprune_plugin_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path):
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file; give one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module
