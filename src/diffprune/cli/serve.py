"""`diffprune serve`: an OpenAI-compatible server, by vLLM where it is installed, else by our own."""

from __future__ import annotations

import inspect
import os
import shlex
import sys
from typing import Annotated, Any

import typer

from diffprune.cli import (
    DeviceOption,
    MethodOption,
    ModelOption,
    PrunerOption,
    announce,
    announce_loading,
    choose_device,
    collector_at_rest,
    describe_model,
)
from diffprune.extras import install_line, is_installed, require
from diffprune.methods.naming import check_names
from diffprune.versions import check_transformers

ENGINES = ("auto", "own", "vllm")
KeepOption = Annotated[
    str | None, typer.Option(help="Tokens per picture (64) or a share (0.111), where a request does not say.")
]
HostOption = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every one of this machine.")]


def command(
    pruner: PrunerOption = "none",
    model: ModelOption = None,
    method: MethodOption = None,
    keep: KeepOption = None,
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    name: Annotated[str, typer.Option(help="Name of the model in requests; default: the pruner's or model's.")] = "",
    engine: Annotated[
        str, typer.Option(help="auto (vLLM where it is installed, else our own server), own or vllm.")
    ] = "auto",
    engine_args: Annotated[
        str, typer.Option(help="Further arguments of vLLM in one text, as they are: '--max-model-len 4096'.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be started, and start nothing.")] = False,
    batch: Annotated[int, typer.Option(help="Requests answered together at most.")] = 8,
    queue: Annotated[int, typer.Option(help="Requests that may wait; one more is answered 429.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(help="Length of an answer at most.")] = 512,
    max_body: Annotated[int, typer.Option(help="Bytes of a request at most.")] = 20_000_000,
    max_pixels: Annotated[int, typer.Option(help="Pixels of a request's pictures together at most.")] = 50_000_000,
    max_pictures: Annotated[int, typer.Option(help="Pictures of a request at most.")] = 16,
    timeout: Annotated[float, typer.Option(help="Seconds a request may take, its wait included.")] = 120.0,
    token: Annotated[
        str | None,
        typer.Option(
            help="Bearer token that requests must bring; better in the environment.", envvar="DIFFPRUNE_TOKEN"
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Name of a host from which pictures may be fetched; give the option again for more."),
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Compile first (static shapes, on a GPU CUDA graphs); our own server.")
    ] = False,
    device: DeviceOption = "",
) -> None:
    """Serve a model on OpenAI's interface, with a page at /.

    \b
    Examples:
      diffprune serve --pruner runs/llava-k64 --port 8000
      diffprune serve --model llava-hf/llava-1.5-7b-hf --method divprune --keep 64
      diffprune serve --pruner runs/llava-k64 --engine vllm --engine-args "--max-model-len 4096"
      diffprune serve --pruner runs/llava-k64 --engine vllm --dry-run
      DIFFPRUNE_TOKEN=secret diffprune serve --pruner runs/llava-k64 --host 0.0.0.0
    """
    if engine not in ENGINES:
        raise ValueError(f"--engine {engine!r} is unknown; choose {', '.join(ENGINES)}")
    check_names(method or "")
    check_transformers()
    own_only = {
        "batch": batch,
        "queue": queue,
        "max_new_tokens": max_new_tokens,
        "max_body": max_body,
        "max_pixels": max_pixels,
        "max_pictures": max_pictures,
        "timeout": timeout,
    }
    if engine == "vllm" or (engine == "auto" and is_installed("vllm")):
        given = {**own_only, "fast": fast, "device": device, "allow_host": allow_host}
        _refuse_own_options(given)
        served = {"model": model or ("scenes-llava" if pruner == "none" else None), "method": method}
        try:
            more = shlex.split(engine_args)
        except ValueError as error:
            raise ValueError(f"--engine-args {engine_args!r} cannot be split ({error}); close every quote") from None
        _start_engine(pruner, served, keep, host=host, port=port, name=name, token=token, dry_run=dry_run, more=more)
        return
    if engine_args:
        raise ValueError(f"--engine-args {engine_args!r} is for vLLM, and our own server is started; leave it out")
    run_own(
        pruner,
        model=model,
        method=method,
        keep=keep,
        host=host,
        port=port,
        name=name,
        device=device,
        fast=fast,
        dry_run=dry_run,
        token=token,
        hosts=tuple(allow_host or ()),
        **own_only,
    )


def _refuse_own_options(given: dict[str, Any]) -> None:
    """An error where an option of our own server is given, which an engine would be started without."""
    usual = inspect.signature(command).parameters
    if odd := [f"--{name.replace('_', '-')}" for name, value in given.items() if value != usual[name].default]:
        raise ValueError(
            f"{', '.join(odd)} of our own server {'is' if len(odd) == 1 else 'are'} unknown to vLLM; leave it out and "
            "give vLLM's own by --engine-args, or say --engine own"
        )


def _start_engine(
    pruner: str, served: dict[str, Any], keep: str | None, *, token: str | None, dry_run: bool, **options: Any
) -> None:
    """Print vLLM's command line, and unless that is all, become that process, so that signals and its end are its own.

    The token goes by the environment, where other users of the machine do not see it.
    """
    if not dry_run and not is_installed("vllm"):
        way_in = f"run {install_line('vllm')}, or leave --engine vllm out"
        raise ValueError(f"vLLM of the extra 'vllm' is not installed: {way_in}")
    from diffprune.budget import Budget
    from diffprune.integrations.vllm import require_engine
    from diffprune.integrations.vllm_command import command as vllm_command

    if not dry_run:
        require_engine()  # of a version that is known to work
    budget = None if keep is None else Budget.parse(keep).keep
    line = vllm_command(pruner, keep=budget, check_base=not dry_run, **served, **options)
    print(shlex.join(line), flush=True)
    if not dry_run:
        if token is not None:
            os.environ["VLLM_API_KEY"] = token
        os.execv(sys.executable, line)


def run_own(
    pruner: str,
    *,
    model: str | None,
    method: str | None,
    keep: str | None,
    host: str,
    port: int,
    name: str,
    device: str,
    fast: bool = False,
    dry_run: bool = False,
    opens: bool = False,
    **limits: Any,
) -> None:
    """Our own server, until it is ended.

    Args:
        opens: Open the page in a browser once it is there.
        limits: Of `serve.settings.Settings`.
    """
    from diffprune.loading import served_name
    from diffprune.serve.settings import Settings

    settings = Settings(**limits)
    require("serve")
    source = (model or "scenes-llava") if pruner == "none" else pruner
    name = name or served_name(source)
    if dry_run:
        print(f"vLLM is not used: our own server would serve {name} on {host}:{port}, {settings.batch} at a time")
        return
    from diffprune.serve.run import listen, serve

    def ready(address: str) -> None:
        announce(f"{name} is served at {address}/v1, the page at {address}/ (Ctrl+C ends it)")
        if opens:
            import webbrowser

            webbrowser.open(address)

    with listen(host, port) as made:  # before minutes are spent on loading
        announce_loading(source)
        with collector_at_rest():
            from diffprune.api import load_vlm

            vlm = load_vlm(pruner, model=model, method=method, keep=keep, device=choose_device(device))
        announce(describe_model(name, vlm.base, method=vlm.method.name, keep=vlm.budget.keep))
        if fast:
            try:
                sizes = sorted({1, settings.batch})
                # No client's odd size is to make all others wait for a compiler.
                vlm.compile(batch_sizes=sizes, max_new_tokens=settings.max_new_tokens, on_demand=0)
            except ValueError as reason:
                announce(f"{reason}. Requests run as without --fast.")
        serve(vlm, settings, name=name, made=made, on_ready=ready)
