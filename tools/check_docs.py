"""Fails where the docs miss a public name, name a command that is not there, link to nothing, or hold a machine path.

Also where a method has no page of its own in docs/methods, or a page there is no method's.

python tools/check_docs.py
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)#\s]+)(?:#[^)]*)?\)")
COMMAND = re.compile(r"(?:^|`|\$ |bin/)diffprune ([a-z][a-z-]*)", re.MULTILINE)
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:work|tmp|root|home|mnt|Users)/[\w.]")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".cfg", ""}
MADE_FOLDERS = {"out", "build", "dist", "carry", "__pycache__"}  # by commands; not committed


def documents() -> list[Path]:
    """The pages a reader sees."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def code_in(pages: Iterable[str]) -> str:
    """Everything the pages write as code, in one text."""
    return "\n".join(span for page in pages for span in CODE.findall(page))


def is_named(name: str, code: str) -> bool:
    """Whether the name stands in the code by itself, not as a part of a longer one."""
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", code) is not None


def public_names() -> Iterator[tuple[str, str]]:
    """(kind, name) of everything the docs must mention."""
    import diffprune
    import diffprune.nn
    import diffprune.ops
    from diffprune.cli.main import subcommands
    from diffprune.registry import BACKBONES, METHODS

    yield from (("public name", name) for name in diffprune.__all__)
    yield from (("operator", name) for name in diffprune.ops.__all__)
    yield from (("module", name) for name in diffprune.nn.__all__)
    yield from (("method", name) for name in METHODS.names())
    yield from (("backbone", name) for name in BACKBONES.names())
    yield from (("subcommand", name) for name in subcommands())


def find_unnamed(code: str) -> list[str]:
    return [f"{kind} {name!r} is in no page of docs/" for kind, name in public_names() if not is_named(name, code)]


def find_unknown_commands(path: Path, known: Iterable[str]) -> list[str]:
    """Commands that a page's code shows and the command line does not have."""
    code = code_in([path.read_text(encoding="utf-8")])
    used = {match[1] for match in COMMAND.finditer(code)}
    return [
        f"{path.relative_to(ROOT)} shows `diffprune {name}`, which is not there" for name in sorted(used - set(known))
    ]


def find_dead_links(path: Path) -> list[str]:
    targets = LINK.findall(CODE.sub("", path.read_text(encoding="utf-8")))
    return [
        f"{path.relative_to(ROOT)} links to {target}, which is not there"
        for target in targets
        if not (path.parent / target).exists()
    ]


def method_page(name: str, folder: Path) -> Path | None:
    """The page of a method: under its own name, that of the method it varies, or another name of its class."""
    from diffprune.registry import METHODS

    kin = [other for other in METHODS.names() if METHODS.get(other) is METHODS.get(name)]
    pages = (folder / f"{known}.md" for known in (name, name.partition("-")[0], *kin))
    return next((page for page in pages if page.exists()), None)


def find_methods_without_page(folder: Path, names: Iterable[str]) -> list[str]:
    """Methods that no page of the folder tells of, pages that are no method's, and pages without the way back."""
    pages = {name: method_page(name, folder) for name in names}
    found = [
        f"method {name!r} has no page; write {folder.name}/{name}.md" for name, page in pages.items() if page is None
    ]
    for page in sorted(folder.glob("*.md")):
        if page not in pages.values():
            found.append(f"{folder.name}/{page.name} is the page of no method")
        if "../methods.md" not in LINK.findall(page.read_text(encoding="utf-8")):
            found.append(f"{folder.name}/{page.name} does not link back to ../methods.md")
    return found


def text_files(root: Path) -> Iterator[Path]:
    """Every text file of the project, without what commands make and tools cache."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if not is_made(name))
        if Path(folder) == root / "runs":
            subfolders.clear()  # scripts stand in runs/ itself, what they write in folders below
        yield from (
            Path(folder) / name for name in sorted(names) if name != ".git" and Path(name).suffix in TEXT_SUFFIXES
        )


def is_made(folder: str) -> bool:
    return folder in MADE_FOLDERS or folder.endswith(".egg-info") or (folder.startswith(".") and folder != ".ci")


def find_machine_paths(root: Path) -> Iterator[str]:
    """Lines of any text file of the project that hold a path of somebody's machine."""
    for path in text_files(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # weights and pictures without a telling name
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if MACHINE_PATH.search(line):
                yield f"{path.relative_to(root)}:{number}: a path of one machine: {line.strip()[:80]}"


def main() -> None:
    from diffprune.cli.main import subcommands
    from diffprune.registry import METHODS

    pages = documents()
    found = find_unnamed(code_in(page.read_text(encoding="utf-8") for page in pages if page.parent != ROOT))
    for page in pages:
        found += find_unknown_commands(page, subcommands()) + find_dead_links(page)
    found += find_methods_without_page(ROOT / "docs/methods", METHODS.names())
    found += find_machine_paths(ROOT)
    print("\n".join(found) or "the docs name everything public")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
