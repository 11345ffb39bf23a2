"""The process: a socket, uvicorn on it, and an orderly end."""

import signal
import socket
from collections.abc import Callable
from typing import Any

from diffprune.backbones.processors import limits
from diffprune.extras import require
from diffprune.serve.settings import Settings


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; one sentence where the port is taken or the address is not ours."""
    made: socket.socket | None = None
    try:
        made = socket.socket(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0])
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(1024)
        return made
    except (OSError, OverflowError) as error:
        if made is not None:
            made.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"cannot listen on {host}:{port} ({reason}); choose another --port or --host") from None


def serve(
    vlm: Any,
    settings: Settings,
    *,
    name: str,
    made: socket.socket,
    on_ready: Callable[[str], None],
) -> None:
    """Serve a model until SIGTERM or SIGINT; what is under way then is still answered.

    Args:
        vlm: A `PrunedVLM`.
        name: Under which requests ask for it.
        made: From `listen`.
        on_ready: Called with the server's address when requests are taken.
    """
    require("serve")
    import uvicorn

    from diffprune.serve.app import make_app

    limits.max_pixels = min(limits.max_pixels, settings.max_pixels)
    host, port = made.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    app = make_app(vlm, settings, name=name, on_ready=lambda: on_ready(address))
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.timeout) + 5,
    )
    # uvicorn raises the signal it was ended by once more after its orderly end, which is no failure.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        uvicorn.Server(config).run(sockets=[made])
    finally:
        signal.signal(signal.SIGTERM, before)
        made.close()
