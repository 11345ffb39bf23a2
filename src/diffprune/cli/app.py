"""`diffprune app`: the page of our own server, opened in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from diffprune.cli import DeviceOption, MethodOption, ModelOption, PrunerOption
from diffprune.cli.serve import HostOption, KeepOption, run_own
from diffprune.methods.naming import check_names
from diffprune.versions import check_transformers


def command(
    pruner: PrunerOption = "none",
    model: ModelOption = None,
    method: MethodOption = None,
    keep: KeepOption = None,
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 7860,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the address, open no browser.")] = False,
    device: DeviceOption = "",
) -> None:
    """Open a page that shows what a pruner keeps of a picture, and what is then answered.

    \b
    Examples:
      diffprune app --pruner runs/llava-k64
      diffprune app --model llava-hf/llava-1.5-7b-hf --method divprune --keep 64 --no-open
    """
    check_names(method or "")
    check_transformers()
    run_own(
        pruner,
        model=model,
        method=method,
        keep=keep,
        host=host,
        port=port,
        name="",
        device=device,
        opens=not no_open,
    )
