"""Writes docs/methods.md, docs/methods/*.md, docs/backbones.md, docs/cli.md, docs/config.md, the signatures of
docs/api.md and the table of docs/harness.md from what the code says of itself.

A method's page opens with a block made from its `Card`, its docstring and its `Options`. What stands below the block is
prose, written by hand where there is something to say; a new method has a page without any.

python tools/make_catalogue.py
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from diffprune import config
from diffprune.cli.backbones import list_backbones
from diffprune.cli.main import module_of, subcommands
from diffprune.cli.methods import CATALOGUE, describe
from diffprune.integrations.suites import protocol_table
from diffprune.registry import METHODS
from diffprune.results import Row, markdown_table, write_text

sys.path.insert(0, str(Path(__file__).resolve().parent))
from api_page import api_block, with_block
from check_docs import method_page  # the rule for what is a method's page, in the tool that checks it
from try_families import COLUMNS
from try_families import OUT as FAMILIES

DOCS = Path(__file__).resolve().parent.parent / "docs"
OPEN, CLOSE = "<!-- made from the code -->", "<!-- end of what is made from the code -->"
SHOWN = {True: "yes", False: "fails", None: "-"}
NOTE = "Made by `make docs` from the code; do not edit by hand.\n"
NATIVE_POSITIONS = (
    "**Positions.** With `native=True` what is left is numbered without gaps, as released. A model that was trained or "
    "measured with original positions loses by that alone "
    "(`python -m diffprune_lab.studies.positions` measures it, into `results/scenes_positions.json`). "
    'Give `positions="original"` beside it to compare choices and not numberings.'
)
MEANINGS = {"seed": "Of everything a run draws: the scorer's start, order of samples, noise, budgets."}


def methods_page() -> str:
    """Every pruning method with its idea, its needs and its source."""
    columns = ["name", "idea", "place", "needs", "trained", "budget", "paper", "year", "licence", "certainty"]
    rows = [
        {
            **method,
            "name": linked_name(method["name"]),
            "needs": ", ".join(f"`{need}`" for need in method["needs"]),
            "year": str(method["year"] or ""),
        }
        for method in map(describe, METHODS.names())
    ]
    return (
        f"# Methods\n\n{NOTE}\n"
        "`needs` is what a method asks of the model besides the visual features. `certainty` says how sure the rule "
        "is: own, from the paper's formula, from reading the release, or unofficial. "
        "A name leads to the method's page: its idea, its rule, and where ours differs from the release. "
        "Options are told there, and on the command line given in brackets: `fastv[layer=3;budget=average]`. "
        "How to add one: [add_a_method.md](add_a_method.md).\n\n"
        f"{markdown_table(rows, columns)}"
    )


def linked_name(name: str) -> str:
    """The name as code, linked to its page."""
    return f"[`{name}`](methods/{page_of(name).name})"


def page_of(name: str) -> Path:
    """Where a method's page is, or will be once it is written."""
    return method_page(name, DOCS / "methods") or DOCS / "methods" / f"{name.partition('-')[0]}.md"


def method_page_text(name: str, before: str) -> str:
    """A method's page: the block made from the code, and the prose that `before` has around it."""
    method = METHODS.get(name)
    card = method.card
    names = [other for other in METHODS.names() if METHODS.get(other) is method]
    source = ", ".join(str(part) for part in (card.paper, card.year) if part) or "none, a control"
    facts = [
        ("names", ", ".join(f"`{other}`" for other in names)),
        ("idea", card.idea),
        ("place", method.place),
        ("needs", ", ".join(f"`{need}`" for need in sorted(method.needs)) or "visual features alone"),
        ("trained", "yes" if method.trained else "no"),
        ("budget", card.budget),
        ("source", source),
        ("licence of the released code", card.licence or "-"),
        ("certainty", card.certainty),
    ]
    block = [OPEN, "", *inspect.cleandoc(method.__doc__ or "").splitlines(), "", "| | |", "|---|---|"]
    block += [f"| {key} | {value} |" for key, value in facts]
    options = list(described_fields(method.Options))
    if any(option["option"] == "`native`" for option in options) and method.native_positions == "packed":
        block += ["", NATIVE_POSITIONS]
    block += ["", markdown_table(options, ["option", "default", "meaning"]).rstrip()] if options else []
    made = "\n".join([*block, "", "All methods: [methods.md](../methods.md).", "", CLOSE])
    if OPEN in before:
        head, _, rest = before.partition(OPEN)
        return head + made + rest.partition(CLOSE)[2]
    title, _, prose = (before or f"# {name}\n").partition("\n")
    return f"{title}\n\n{made}\n{prose}"


def described_fields(options: type) -> Iterator[Row]:
    """Name, default and meaning of each field of a dataclass, from it and from the `Args` of its docstring."""
    text = inspect.cleandoc(options.__doc__ or "").partition("Args:")[2]
    meanings: dict[str, str] = {}
    known = [field.name for field in dataclasses.fields(options)]
    current: list[str] = []
    for line in map(str.strip, text.splitlines()):
        opening, _, rest = line.partition(": ")
        names = opening.split(", ")
        if all(name in known for name in names):
            current, line = names, rest
        for name in current:
            meanings[name] = f"{meanings.get(name, '')} {line}".strip()
    for field in dataclasses.fields(options):
        is_needed = field.default is dataclasses.MISSING
        default = "(needed)" if is_needed else f"`{field.default!r}`"
        yield {"option": f"`{field.name}`", "default": default, "meaning": meanings.get(field.name, "")}


def method_pages() -> dict[Path, str]:
    """The page of every method, variants on that of their method."""
    found: dict[Path, str] = {}
    for name in METHODS.names():
        page = page_of(name)
        before = page.read_text(encoding="utf-8") if page.exists() else ""
        found.setdefault(page, method_page_text(name, before))
    return found


def backbones_page() -> str:
    """Every model family, what it provides, and its presets."""
    families, presets = [], []
    for family in list_backbones():
        provides = ", ".join(f"`{item}`" for item in family["provides"])
        families.append({"family": f"`{family['family']}`", "provides": provides})
        for preset in family["presets"]:
            presets.append(
                {
                    "preset": f"`{preset['name']}`",
                    "family": f"`{family['family']}`",
                    "weights": preset["hub_id"],
                    "visual tokens": preset["num_visual"],
                    "note": preset["note"],
                }
            )
    return (
        f"# Backbones\n\n{NOTE}\n"
        "A family is a Hugging Face `model_type`; any checkpoint of it works. A preset is a real size of a family by a "
        "short name. How to add one: [add_a_backbone.md](add_a_backbone.md).\n\n"
        f"{markdown_table(families, ['family', 'provides'])}\n"
        "What the tests show of each family, on tiny models of the stock classes (`python tools/try_families.py` runs "
        "them and writes this table's file; `-`: there is none of that kind). PaliGemma chats without keeping a cache; "
        "where the fast path has no tower of a family, `vlm.compile()` says so.\n\n"
        f"{shown_table()}\n"
        f"{markdown_table(presets, ['preset', 'family', 'weights', 'visual tokens', 'note'])}"
    )


def shown_table() -> str:
    """What the tests showed of each family, from the file that `tools/try_families.py` wrote."""
    shown = json.loads(FAMILIES.read_text(encoding="utf-8"))
    rows = [
        {"family": f"`{family}`", **{column: SHOWN[found.get(column)] for column in COLUMNS}}
        for family, found in shown.items()
    ]
    tests = "\n".join(f"- {column}: `{test}`" for column, test in COLUMNS.items())
    return f"{markdown_table(rows, ['family', *COLUMNS])}\n{tests}\n"


def command_options(command: Callable[..., Any]) -> Iterator[Row]:
    """Name, default and help of each argument and option of a subcommand, from its signature."""
    hints = typing.get_type_hints(command, include_extras=True)
    for parameter in inspect.signature(command).parameters.values():
        info = hints[parameter.name].__metadata__[0]
        words = [word for word in (info.default, *(info.param_decls or ())) if isinstance(word, str)]
        spelled = " ".join(word for word in words if word.startswith("-")) or f"--{parameter.name.replace('_', '-')}"
        is_argument = type(info).__name__ == "ArgumentInfo"
        is_needed = parameter.default in (inspect.Parameter.empty, ...)
        yield {
            "option": f"`{parameter.name.upper() if is_argument else spelled}`",
            "default": "(needed)" if is_needed else "" if parameter.default in (None, False, "") else parameter.default,
            "meaning": info.help,
        }


def command_section(name: str) -> str:
    """One subcommand: its own text, examples as code, options as a table."""
    command = module_of(name).command
    text, _, examples = inspect.cleandoc(command.__doc__).replace("\b\n", "").partition("Examples:\n")
    options = list(command_options(command))
    table = f"\n{markdown_table(options, ['option', 'default', 'meaning'])}" if options else ""
    return f"## `diffprune {name}`\n\n{text.strip()}\n\n```\n{inspect.cleandoc(examples)}\n```\n{table}"


def cli_page() -> str:
    """Every subcommand."""
    sections = "\n".join(command_section(name) for name in subcommands())
    return (
        f"# Command line\n\n{NOTE}\n"
        "The exit code is 0 only on success, 2 for bad input, 1 for a mistake of ours. An error is one sentence on "
        "stderr; `--debug` shows its traceback. What the screens look like: [screens.md](screens.md). "
        "`keep` is what stays: `64` is tokens per picture, `0.111` a share, `1.0` all. "
        "Where a method is named, its options may stand behind it in brackets, separated by semicolons: "
        "`'holov[variant=paper]'`, `'fastv[layer=3;budget=average]'`, `'pyramiddrop[layers=2,4,6]'`, "
        "`'visionzip[native=true]'`. Commas separate methods, the quotes are for the shell, and rows call the method "
        "by the whole text. The options of a method are on its page ([methods.md](methods.md)). "
        "A new subcommand is a new file in `src/diffprune/cli` with a function `command`.\n\n"
        f"{sections}"
    )


def config_page() -> str:
    """Every key of a run's YAML file, section by section, from the dataclasses that read it."""
    hints = typing.get_type_hints(config.RunConfig)
    alone: list[Row] = []
    sections: list[str] = []
    described = {row["option"]: row["meaning"] for row in described_fields(config.RunConfig)}
    for field in dataclasses.fields(config.RunConfig):
        kind = hints[field.name]
        if not dataclasses.is_dataclass(kind):
            meaning = described[f"`{field.name}`"] or MEANINGS.get(field.name, "")
            alone.append({"key": f"`{field.name}`", "type": type_text(kind), "default": f"`{field.default!r}`",
                          "meaning": meaning})  # fmt: skip
            continue
        types = typing.get_type_hints(kind)
        rows = [
            {"key": f"`{field.name}.{row['option'].strip('`')}`", "type": type_text(types[row["option"].strip("`")]),
             "default": row["default"], "meaning": row["meaning"]}
            for row in described_fields(kind)
            if row["option"] != "`options`"
        ]  # fmt: skip
        text = inspect.cleandoc(kind.__doc__ or "").partition("Args:")[0].strip()
        sections.append(f"## `{field.name}`\n\n{text}\n\n{markdown_table(rows, ['key', 'type', 'default', 'meaning'])}")
    return (
        f"# Keys of a run\n\n{NOTE}\n"
        "What a YAML file of `diffprune train` may hold, and what `key=value` on the command line sets; how they work "
        "together is in [training.md](training.md). The options of a method stand beside its name, "
        "`method: {name: diffprune, noise: unit}`, and are on its page ([methods.md](methods.md)). An unknown key is "
        "an error that suggests the near one. Defaults here are those before a recipe "
        "([training.md](training.md#the-config)).\n\n"
        + "\n".join(sections)
        + f"\n## On their own\n\n{markdown_table(alone, ['key', 'type', 'default', 'meaning'])}"
    )


def type_text(kind: Any) -> str:
    """A type as YAML has it: `int or float or nothing`."""
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return "two of: " + type_text(typing.get_args(kind)[0])
    if typing.get_args(kind):
        return " or ".join(type_text(arm) for arm in typing.get_args(kind))
    return "nothing" if kind is type(None) else kind.__name__


def harness_page() -> str:
    """The page on public benchmarks, its table made from the suite."""
    head, _, rest = (DOCS / "harness.md").read_text(encoding="utf-8").partition(OPEN)
    return f"{head}{OPEN}\n\n{protocol_table()}\n{CLOSE}{rest.partition(CLOSE)[2]}"


def pages() -> dict[Path, str]:
    """The text of each generated page."""
    return {
        CATALOGUE: json.dumps([*map(describe, METHODS.names())], indent=1, ensure_ascii=False) + "\n",
        DOCS / "methods.md": methods_page(),
        DOCS / "backbones.md": backbones_page(),
        DOCS / "cli.md": cli_page(),
        DOCS / "harness.md": harness_page(),
        DOCS / "config.md": config_page(),
        DOCS / "api.md": with_block(DOCS / "api.md", api_block()),
        **method_pages(),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        write_text(path, text)
        print(f"wrote {path.relative_to(DOCS.parent)}")
