"""Pictures of strangers: data URIs, and with the operator's leave those of named hosts. Never a local path.

A host is looked up once, every address it has must be a public one, and the connection goes to that address: a name
cannot lead elsewhere a moment later. Redirects are not followed.
"""

import http.client
import io
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from diffprune.backbones.messages import IMAGE_PARTS, PICTURE_KEYS

CHUNK = 65_536  # bytes read at once
SECONDS = 10.0  # for the pictures of a request that lie on other hosts, all together
GLOBAL = ipaddress.IPv6Network("2000::/3")  # all of IPv6 that is given out
TRANSLATED = ipaddress.IPv6Network("64:ff9b::/96")  # an IPv4 address, as networks without one of their own write it


def is_public(address: str) -> bool:
    """Whether an address is one of the open internet."""
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF) if parsed in TRANSLATED else parsed.ipv4_mapped
        if inner is None:
            return parsed in GLOBAL and parsed.is_global and parsed.sixtofour is None
        parsed = inner
    return parsed.is_global and not parsed.is_multicast


def with_pictures(messages: Sequence[Any], *, most: int, hosts: Sequence[str], max_bytes: int) -> tuple[list[Any], int]:
    """The messages with pictures of allowed hosts as bytes, and how many pictures there are.

    Args:
        most: Pictures a request may have.
        max_bytes: Of a picture of another host.
    """
    parts = [
        part
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS
    ]
    if len(parts) > most:
        raise ValueError(f"{len(parts)} pictures are more than the {most} of a request; send fewer")
    until = time.monotonic() + SECONDS
    found = {id(part): fetched(part, hosts, max_bytes, until) for part in parts}
    out: list[Any] = []
    for message in messages:
        if isinstance(message, Mapping) and isinstance(message.get("content"), list):
            message = {**message, "content": [found.get(id(part), part) for part in message["content"]]}
        out.append(message)
    return out, len(parts)


def fetched(
    part: Mapping[str, Any], hosts: Sequence[str], max_bytes: int, until: float | None = None
) -> Mapping[str, Any]:
    """The part as it is, or where it names an address with what lies there."""
    source: Any = next((part[key] for key in PICTURE_KEYS if part.get(key) is not None), None)
    if isinstance(source, Mapping):
        source = source.get("url")
    if not isinstance(source, str):
        raise ValueError(f"a part of type {part.get('type')!r} holds no picture; send data:image/...;base64,...")
    if not source.lower().startswith(("http://", "https://")):
        return part  # a data URI, or what is refused where messages are read
    if not hosts:
        raise ValueError(
            f"the picture {source[:200]} lies elsewhere, and nothing is fetched; send data:image/...;base64,..."
        )
    return {"type": "image", "image": fetch(source, hosts, max_bytes=max_bytes, until=until)}


def fetch(
    url: str,
    hosts: Sequence[str],
    *,
    max_bytes: int,
    until: float | None = None,
    allowed: Callable[[str], bool] = is_public,
) -> bytes:
    """What lies at an address of an allowed host.

    Args:
        hosts: Allowed ones.
        max_bytes: Of the answer.
        until: Of `time.monotonic`: when it must be here, however slowly it comes; default: in `SECONDS`.
        allowed: Whether an address may be connected to.
    """
    until = time.monotonic() + SECONDS if until is None else until
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme.lower() == "https" else 80)
    except ValueError:
        raise ValueError(f"the address {url[:200]} cannot be read; send data:image/...;base64,...") from None
    if host not in {name.lower() for name in hosts}:
        raise ValueError(f"the host {host[:200]!r} is not one from which pictures are fetched; send the picture itself")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"the host {host!r} is not known; send the picture itself") from error
    addresses = [str(entry[4][0]) for entry in found]
    if not all(map(allowed, addresses)):
        raise ValueError(
            f"the host {host!r} has an address of this network, which is not asked; send the picture itself"
        )
    late = f"{url[:200]} did not come within {SECONDS:g} s; send the picture itself"
    if time.monotonic() > until:
        raise ValueError(late)
    connection = _connect(parts.scheme.lower(), host, addresses[0], port, until)
    connection.response_class = lambda sock, **given: _TimedResponse(sock, until, **given)  # type: ignore[assignment]
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    pieces: list[bytes] = []
    size = 0
    try:
        connection.request("GET", path, headers={"Host": parts.netloc.rpartition("@")[2], "Accept": "image/*"})
        with connection.getresponse() as answer:
            if 300 <= answer.status < 400:
                raise ValueError(f"{url[:200]} leads elsewhere, which is not followed; give the picture's own address")
            if answer.status != 200:
                raise ValueError(f"{url[:200]} was answered with {answer.status}; send the picture itself")
            while size <= max_bytes and (piece := answer.read1(CHUNK)):
                pieces.append(piece)
                size += len(piece)
    except TimeoutError as error:
        raise ValueError(late) from error
    except (OSError, http.client.HTTPException, UnicodeError) as error:  # the last: of an address beyond ASCII
        raise ValueError(f"{url[:200]} cannot be fetched ({type(error).__name__}); send the picture itself") from error
    finally:
        connection.close()
    if size > max_bytes:
        raise ValueError(f"{url[:200]} has more than {max_bytes:,} bytes; send a smaller picture")
    return b"".join(pieces)


class _Timed(io.RawIOBase):
    """What comes by a socket until a time is over; its own limit is for each read, and a slow host has many."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        self.sock, self.until, self.raw = sock, until, sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if time.monotonic() > self.until:
            raise TimeoutError
        self.sock.settimeout(_left(self.until))
        return self.raw.readinto(buffer)

    def close(self) -> None:
        self.raw.close()
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    """An answer whose every byte, headers included, has to be here in time."""

    def __init__(self, sock: socket.socket, until: float, **given: Any) -> None:
        super().__init__(sock, **given)
        self.fp.close()
        self.fp = io.BufferedReader(_Timed(sock, until))


def _connect(scheme: str, host: str, address: str, port: int, until: float) -> http.client.HTTPConnection:
    """A connection to that address, under the host's name."""
    connection = http.client.HTTPConnection(host, port)
    try:
        plain = socket.create_connection((address, port), timeout=_left(until))
        plain.settimeout(_left(until))  # of the handshake, and of asking
        if scheme == "https":
            plain = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
    except OSError as error:
        raise ValueError(f"the host {host!r} does not answer; send the picture itself") from error
    connection.sock = plain
    return connection


def _left(until: float) -> float:
    """Seconds that a socket may wait; none at all would mean that it does not wait."""
    return max(0.001, until - time.monotonic())
