"""`diffprune`: finds the subcommands, runs one, and turns an error into one sentence and a non-zero exit code."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

import diffprune.cli
from diffprune.extras import MissingExtraError

_USER_ERRORS = (ValueError, OSError, MissingExtraError)  # their message says what to do; others are our own mistakes


def subcommands() -> list[str]:
    """Names of the subcommands: the files of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(diffprune.cli.__path__) if module.name != "main")


def _print_version(wanted: bool) -> bool:
    if wanted:
        print(f"diffprune {importlib.metadata.version('diffprune')}")
        raise typer.Exit
    return wanted


def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Visual token pruning for vision-language models: train by throttling, deploy by dropping."""


def build_app() -> typer.Typer:
    """The application with every subcommand found."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback()(_root)
    for name in subcommands():
        app.command(name)(importlib.import_module(f"diffprune.cli.{name}").command)
    return app


def _one_sentence(error: Exception) -> str:
    """What went wrong on one line; an unexpected error also says how to see more."""
    text = " ".join(str(error).split())
    if isinstance(error, _USER_ERRORS):
        return text
    return f"unexpected {type(error).__name__}: {text} (run again with --debug for the traceback)"


def _run(arguments: Sequence[str]) -> int:
    """The exit code of one run; whatever goes wrong is printed to stderr in one sentence."""
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"] or ["--help"]
    try:
        code: Any = build_app()(args=arguments, prog_name="diffprune", standalone_mode=False)
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
        return int(getattr(error, "exit_code", 1))


def main() -> None:
    """The console script."""
    sys.exit(_run(sys.argv[1:]))
