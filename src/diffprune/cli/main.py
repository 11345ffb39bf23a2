"""`diffprune`: finds the subcommands, runs one, and turns an error into one sentence and a non-zero exit code.

Subcommands are the files of this folder, and those that other packages add (`diffprune.doors`).
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.metadata
import io
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import diffprune.cli
from diffprune import doors
from diffprune.extras import MissingExtraError

_USER_ERRORS = (ValueError, OSError, MissingExtraError)  # their message says what to do; others are our own mistakes
_BAD_INPUT, _OUR_MISTAKE = 2, 1  # exit codes; a wrong option has the first one too


# Subcommands of the lab, a package of its own: asked for without it, the error names the way to install it.
_OF_THE_LAB = ("demo", "probe")


def subcommands() -> list[str]:
    """Names of the subcommands: the files of this folder, and what other packages add."""
    own = {module.name for module in pkgutil.iter_modules(diffprune.cli.__path__) if module.name != "main"}
    return sorted(own | doors.entries(doors.COMMANDS).keys())


def module_of(name: str) -> Any:
    """The module of a subcommand; None where another package's cannot be imported."""
    if name in doors.entries(doors.COMMANDS):
        return doors.load(doors.COMMANDS, name)
    return importlib.import_module(f"diffprune.cli.{name}")


def _print_version(wanted: bool) -> bool:
    if wanted:
        print(f"diffprune {importlib.metadata.version('diffprune')}")
        raise typer.Exit
    return wanted


def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    plugin: Annotated[
        list[str] | None,
        typer.Option("--plugin", help="A Python file with a method or backbone of your own; may be repeated."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Visual token pruning for vision-language models: train by throttling, deploy by dropping."""


def build_app(names: Sequence[str] | None = None) -> typer.Typer:
    """The application with these subcommands; default: with every one found."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback()(_root)
    for name in subcommands() if names is None else names:
        module = module_of(name)
        if module is not None:
            app.command(name)(module.command)
    return app


def _one_sentence(error: Exception) -> str:
    """What went wrong on one line; an unexpected error also says how to see more."""
    text = " ".join(str(error).split())
    if isinstance(error, _USER_ERRORS):
        return text
    return f"unexpected {type(error).__name__}: {text} (run again with --debug for the traceback)"


def _take_plugins(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without every `--plugin FILE`, wherever it stands, and the files."""
    rest: list[str] = []
    files: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--plugin":
            file = next(remaining, None)
            if file is None:
                raise ValueError("--plugin has no file; give the Python file of your method: --plugin FILE")
            files.append(file)
        elif argument.startswith("--plugin="):
            files.append(argument.removeprefix("--plugin="))
        else:
            rest.append(argument)
    return rest, files


def _run(arguments: Sequence[str]) -> int:
    """The exit code of one run; whatever goes wrong is printed to stderr in one sentence."""
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        if sys.flags.optimize > 1:
            raise ValueError(
                "Python runs without docstrings (-OO or PYTHONOPTIMIZE=2), which transformers reads; leave that out"
            )
        arguments, plugins = _take_plugins(arguments)
        for file in plugins:
            doors.import_file(file)
        arguments = arguments or ["--help"]
        if arguments[0] in _OF_THE_LAB and arguments[0] not in subcommands():
            raise ValueError(
                f"`diffprune {arguments[0]}` comes with the lab, which is not installed; "
                "install it from a checkout of the repository: pip install -e . -e lab"
            )
        asked = [arguments[0]] if arguments[0] in subcommands() else None  # one is enough, where it is named
        code: Any = build_app(asked)(args=arguments, prog_name="diffprune", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        print("diffprune: stopped", file=sys.stderr)
        return 130
    except Exception as error:
        if debug:
            raise
        # A wrong option or subcommand: typer's own exception class has moved between its versions, its method has not.
        describe = getattr(error, "format_message", None)
        sentence = f"{describe()} (see diffprune --help)" if describe else _one_sentence(error)
        print(f"diffprune: {sentence}", file=sys.stderr)
        return int(getattr(error, "exit_code", _BAD_INPUT if isinstance(error, _USER_ERRORS) else _OUR_MISTAKE))


def main() -> None:
    """The console script."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its advice is for those who call it, not for our users
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # an answer may hold what the terminal's encoding has no sign for
    # At its end Python would look through every object of torch and transformers for garbage, which takes a second.
    atexit.register(gc.freeze)
    sys.exit(_run(sys.argv[1:]))
