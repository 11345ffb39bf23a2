"""Fails where an import points the wrong way: types <- ops <- nn <- methods <- model -> backbones.

Also fails where a third-party package outside the core list is imported at the top of a file: extras are imported where
they are used, so that a missing one is one sentence and not a broken package.

    python tools/check_imports.py [package folder]
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "diffprune"
CORE = {
    "torch", "transformers", "accelerate", "safetensors", "huggingface_hub", "tokenizers", "numpy", "PIL", "yaml",
    "typer", "rich", "matplotlib", "jaxtyping", "tqdm",
}  # fmt: skip

# What each part, or one file of it, may import of ours besides its own part. What is not here may import anything but
# the command line.
ALLOWED: dict[str, set[str]] = {
    "types": set(),
    "doors": set(),
    "registry": {"doors"},
    "extras": set(),
    "results": set(),
    "schedules": set(),
    "ops": {"types"},
    "nn": {"ops", "types"},
    "inside": {"ops", "types"},  # what methods inside the language model are given
    "inside.stream": {"backbones", "methods", "types"},  # from here on: runs a backbone's layers with a method between
    "inside.layers": {"ops"},
    "inside.loop": {"backbones", "losses", "methods", "ops", "types"},
    "inside.generate": {"backbones", "methods", "types"},
    "losses": {"methods"},
    "decoding": {"backbones", "inside", "losses", "methods", "ops", "types"},
    "restriction": {"methods", "ops", "tiles", "types"},
    "methods": {"inside", "nn", "ops", "registry", "types"},
    "backbones": {"nn", "ops", "registry", "types"},
    "tiles": {"backbones", "methods", "nn", "ops", "types"},  # between a method and the model, as model is
    "config": {"types"},
    "checkpoint": {"loading", "results"},
    "fitting": {"backbones", "checkpoint", "methods", "registry", "tiles"},
    "model": {"backbones", "checkpoint", "decoding", "fast", "fitting", "losses", "methods", "ops", "restriction"}
    | {"tiles", "types"},
    "scenes": {"backbones", "evaluate", "ops", "results", "types"},
    "scenes.oracle": {"methods", "registry", "types"},
    "scenes.world": {"results", "types"},
    "scenes.draw": {"results", "types"},
    "scenes.language": {"results", "types"},
}
EXTERNAL: dict[str, set[str]] = {"ops": {"torch", "jaxtyping"}}
USES_COMMAND_LINE = {"cli", "__main__"}


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, wherever it stands; `from a import b` is `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}") for alias in node.names)


def part_of(name: str) -> str:
    """The part of the package a dotted name belongs to: `diffprune.ops.hard_topk` is in `ops`."""
    return name.split(".")[1] if "." in name else ""


def find_violations(path: Path, module: str) -> Iterator[str]:
    """One sentence for every import of the file that it may not have; `module` is `ops.hard_topk` or `model`."""
    part = module.split(".")[0]
    allowed = ALLOWED.get(module, ALLOWED.get(part))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {line for function in functions for line, _ in imported_names(function)}
    for line, name in imported_names(tree):
        root = name.split(".")[0]
        if root == "":
            yield f"{path}:{line}: relative import {name}; write it from {PACKAGE} on"
        elif root == PACKAGE:
            target = part_of(name)
            if target == part or part == "__init__":
                continue
            if target == "cli" and part not in USES_COMMAND_LINE:
                yield f"{path}:{line}: {part} imports the command line"
            elif allowed is not None and target not in allowed:
                yield f"{path}:{line}: {part} may not import {target or PACKAGE}"
        elif root in sys.stdlib_module_names:
            continue
        elif part in EXTERNAL and root not in EXTERNAL[part]:
            yield f"{path}:{line}: {part} imports only {', '.join(sorted(EXTERNAL[part]))}, not {root}"
        elif root == "diffprune_lab" and part in ("evaluate", "train", "fast"):
            continue  # until tasks and training data have their doors
        elif root not in CORE and line not in inside:
            yield f"{path}:{line}: {root} is not in the core; import it where it is used, as an extra"


def check(package: Path) -> list[str]:
    """Every violation in a package folder."""
    found: list[str] = []
    for path in sorted(package.rglob("*.py")):
        module = ".".join(path.relative_to(package).with_suffix("").parts)
        found += find_violations(path, module.removesuffix(".__init__"))
    return list(dict.fromkeys(found))


def main() -> None:
    package = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "src" / PACKAGE
    found = check(package)
    print("\n".join(found) or "imports point the right way")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
