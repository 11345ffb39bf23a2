"""Fails where an import points the wrong way, where modules import each other in a circle, or where a part has no rule.

Every part of both packages has a line in `LIBRARY` or `LAB`. Imports inside functions count as well: a circle that is
only put off is still one. Also fails where a third-party package outside the core list is imported at the top of a file
of the library: extras are imported where they are used, so that a missing one is one sentence and not a broken package.

    python tools/check_imports.py [package folder ...]
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

CORE = {
    "torch", "transformers", "accelerate", "safetensors", "huggingface_hub", "tokenizers", "numpy", "PIL", "yaml",
    "typer", "rich", "matplotlib", "jaxtyping", "tqdm",
}  # fmt: skip

# What each part, or one module of it, may import of its own package besides its own part; the lowest come first.
_BASE = {"budget", "types", "rng", "atomic", "extras", "doors", "registry", "results", "schedules", "terminal"}
_BASE |= {"json_files", "versions"}
_METHOD = _BASE | {"ops", "nn", "inside", "methods", "backbones"}
_MODEL = _METHOD | {
    "tiles",
    "losses",
    "restriction",
    "decoding",
    "fitting",
    "arguments",
    "memory",
    "streaming",
    "chat",
    "fingerprint",
    "saving",
    "base_files",
    "loading",
    "saved_pruners",
    "pretrained",
    "fast",
}
_USER = _MODEL | {"model", "api", "config", "recipes", "shapes"}  # whoever uses a ready model
LIBRARY: dict[str, set[str]] = {
    "budget": set(),
    "types": {"budget"},
    "rng": set(),
    "atomic": set(),
    "json_files": set(),
    "extras": set(),
    "versions": set(),
    "doors": set(),
    "schedules": set(),
    "registry": {"doors", "json_files"},
    "results": {"atomic", "json_files"},
    "terminal": {"results"},
    "config_reader": {"json_files"},
    "recipes": set(),
    "config": {"budget", "config_reader", "json_files", "recipes", "schedules"},
    # the maths, what learns, the methods, and what they are given
    "ops": {"types"},
    "nn": {"ops", "types"},
    "inside.budget": set(),
    "inside.state": {"ops", "types"},
    "inside.reader": {"ops", "types"},
    "methods": {"inside", "nn", "ops", "registry", "types"},
    "backbones": {"nn", "ops", "registry", "types"},
    "inside": {"backbones", "losses", "methods", "nn", "ops", "types"},  # the loop over layers, and generation
    # what the model is put together from
    "tiles": {"backbones", "methods", "nn", "ops", "types"},
    "losses": {"methods", "ops", "types"},
    "restriction": {"methods", "ops", "tiles", "types"},
    "memory": {"backbones", "types"},
    "streaming": set(),
    "arguments": {"backbones", "ops"},
    "chat": {"backbones", "memory", "streaming"},
    "decoding": {"memory", "backbones", "inside", "losses", "methods", "ops", "types"},
    "saving": {"atomic", "fingerprint", "json_files", "results"},
    "fitting": {"backbones", "base_files", "fingerprint", "json_files", "methods", "ops", "registry", "tiles", "types"},
    "base_files": {"json_files"},
    "fingerprint": {"json_files"},
    "loading": _BASE | {"backbones", "base_files", "fitting", "saving"},
    "saved_pruners": _BASE | {"backbones", "base_files", "fingerprint", "fitting", "loading", "methods", "saving"},
    "pretrained": {"loading", "ops", "results", "saved_pruners", "saving"},
    "fast": {"backbones", "inside", "methods", "nn", "ops", "types"},
    "model": _MODEL,
    "api": _MODEL | {"model"},
    "checkpoint": {"saving"},
    "shapes": {"backbones", "registry", "types"},
    # who uses it
    "viz": _USER,
    "answering": _USER,
    "train": _USER,
    "evaluate": _USER | {"train"},
    "speed": _USER | {"evaluate", "train"},
    "report": _USER | {"evaluate", "speed"},
    "integrations": _USER | {"evaluate"},
    "serve": _USER | {"evaluate"},
    "cli": _USER | {"answering", "evaluate", "integrations", "report", "serve", "speed", "train", "viz"},
    "__main__": {"cli"},
}
LAB: dict[str, set[str]] = {
    "deit": set(),
    "classifier": {"deit"},
    "scenes": set(),
    "pretrain": {"scenes"},
    "scarce": {"pretrain", "scenes"},
    "models": {"scarce", "scenes"},
    "probes": {"classifier", "deit", "models", "pretrain", "scarce", "scenes"},
    "studies": {"classifier", "diffprune_lab", "deit", "models", "probes", "scarce", "scenes"},
    "demo": {"models", "scenes"},
    "cli": {"demo", "models", "probes", "scenes", "studies"},
    "__main__": {"diffprune_lab"},
}
# Parts that import less than the core, and the one file of kernels, which is imported where they run.
EXTERNAL: dict[str, set[str]] = {
    "ops": {"torch", "jaxtyping"},
    "ops.greedy_kernels": {"torch", "jaxtyping", "triton"},
}
# Modules that only an extra's own package imports, or who has asked whether it is there: they may begin with it.
PLUGINS: dict[str, set[str]] = {
    "integrations.lmms_model": {"lmms_eval"},
    "integrations.vllm_model": {"vllm"},
    "integrations.vllm_pictures": {"vllm"},
    "serve.app": {"fastapi", "starlette"},
    "serve.metrics": {"prometheus_client"},
    "serve.schema": {"pydantic"},
}


@dataclass(frozen=True)
class Package:
    """A package and its rules."""

    name: str
    parts: dict[str, set[str]]
    core_only: bool  # whether third-party imports outside the core belong inside functions


PACKAGES = {
    "diffprune": Package("diffprune", LIBRARY, core_only=True),
    "diffprune_lab": Package("diffprune_lab", LAB, core_only=False),
}


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, in any place but for types only; `from a import b` is `a.b`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}") for alias in node.names)
        else:
            yield from imported_names(node)


def part_of(name: str) -> str:
    """The part of the package a dotted name belongs to: `diffprune.ops.hard_topk` is in `ops`."""
    return name.split(".")[1] if "." in name else ""


def find_violations(path: Path, module: str, package: Package) -> Iterator[str]:
    """One sentence for every import of the file that it may not have; `module` is `ops.hard_topk` or `model`."""
    part = module.split(".")[0]
    if part not in package.parts and part not in ("__init__", ""):
        yield f"{path}: part {part!r} of {package.name} has no line in tools/check_imports.py; say what it may import"
        return
    allowed = package.parts.get(module, package.parts.get(part))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {line for function in functions for line, _ in imported_names(function)}
    for line, name in imported_names(tree):
        root = name.split(".")[0]
        if root == "":
            yield f"{path}:{line}: relative import {name}; write it from {package.name} on"
        elif root == package.name:
            target = part_of(name)
            if target != part and allowed is not None and (target or package.name) not in allowed:
                yield f"{path}:{line}: {part} may not import {target or package.name}"
        elif root in PACKAGES and package.name == "diffprune":
            yield f"{path}:{line}: the library may not import {root}"
        elif root in sys.stdlib_module_names or root in PACKAGES:
            continue
        elif part in EXTERNAL:
            own = EXTERNAL.get(module, EXTERNAL[part])
            if root not in own:
                yield f"{path}:{line}: {part} imports only {', '.join(sorted(own))}, not {root}"
        elif root in PLUGINS.get(module, ()):
            continue
        elif package.core_only and root not in CORE and line not in inside:
            yield f"{path}:{line}: {root} is not in the core; import it where it is used, as an extra"


def modules_of(folder: Path) -> dict[str, Path]:
    """Every module of a package folder by its dotted name."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def import_graph(modules: dict[str, Path]) -> dict[str, set[str]]:
    """For every module those of the same package that it imports."""
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        targets = set()
        for _, name in imported_names(ast.parse(path.read_text(encoding="utf-8"))):
            while name and name not in modules:  # `a.b.Class` is in module `a.b`
                name = name.rpartition(".")[0]
            if name and name != module:
                targets.add(name)
        graph[module] = targets
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def check(folder: Path) -> list[str]:
    """Every violation in a package folder."""
    package = PACKAGES.get(folder.name, PACKAGES["diffprune"])
    found: list[str] = []
    for path in sorted(folder.rglob("*.py")):
        module = ".".join(path.relative_to(folder).with_suffix("").parts)
        found += find_violations(path, module.removesuffix(".__init__"), package)
    found += [
        f"{folder.name}: these import each other: {', '.join(group)}"
        for group in cycles(import_graph(modules_of(folder)))
    ]
    return list(dict.fromkeys(found))


def check_all(folders: Iterable[Path]) -> list[str]:
    return [sentence for folder in folders for sentence in check(folder)]


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    folders = [Path(text) for text in sys.argv[1:]] or [root / "src/diffprune", root / "lab/diffprune_lab"]
    found = check_all(folders)
    print("\n".join(found) or "imports point one way, and no modules import each other")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
