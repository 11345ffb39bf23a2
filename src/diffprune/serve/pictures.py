"""Pictures of strangers: data URIs, and with the operator's leave those of named hosts. Never a local path.

A host is looked up once, every address it has must be a public one, and the connection goes to that address: a name
cannot lead elsewhere a moment later. Redirects are not followed.
"""

import http.client
import ipaddress
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from diffprune.backbones.messages import IMAGE_PARTS, PICTURE_KEYS

SECONDS = 10.0  # for a picture of another host


def is_public(address: str) -> bool:
    """Whether an address is one of the open internet."""
    parsed = ipaddress.ip_address(address)
    mapped = getattr(parsed, "ipv4_mapped", None)
    return (mapped or parsed).is_global and not (mapped or parsed).is_multicast


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
    found = {id(part): fetched(part, hosts, max_bytes) for part in parts}
    out: list[Any] = []
    for message in messages:
        if isinstance(message, Mapping) and isinstance(message.get("content"), list):
            message = {**message, "content": [found.get(id(part), part) for part in message["content"]]}
        out.append(message)
    return out, len(parts)


def fetched(part: Mapping[str, Any], hosts: Sequence[str], max_bytes: int) -> Mapping[str, Any]:
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
    return {"type": "image", "image": fetch(source, hosts, max_bytes=max_bytes)}


def fetch(url: str, hosts: Sequence[str], *, max_bytes: int, allowed: Callable[[str], bool] = is_public) -> bytes:
    """What lies at an address of an allowed host.

    Args:
        hosts: Allowed ones.
        max_bytes: Of the answer.
        allowed: Whether an address may be connected to.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme.lower() == "https" else 80)
    except ValueError:
        raise ValueError(f"the address {url[:200]} cannot be read; send data:image/...;base64,...") from None
    if host not in hosts:
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
    connection = _connect(parts.scheme.lower(), host, addresses[0], port)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    try:
        connection.request("GET", path, headers={"Host": parts.netloc.rpartition("@")[2], "Accept": "image/*"})
        answer = connection.getresponse()
        if 300 <= answer.status < 400:
            raise ValueError(f"{url[:200]} leads elsewhere, which is not followed; give the picture's own address")
        if answer.status != 200:
            raise ValueError(f"{url[:200]} was answered with {answer.status}; send the picture itself")
        data = answer.read(max_bytes + 1)
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"{url[:200]} cannot be fetched ({type(error).__name__}); send the picture itself") from error
    finally:
        connection.close()
    if len(data) > max_bytes:
        raise ValueError(f"{url[:200]} has more than {max_bytes:,} bytes; send a smaller picture")
    return data


def _connect(scheme: str, host: str, address: str, port: int) -> http.client.HTTPConnection:
    """A connection to that address, under the host's name."""
    connection = http.client.HTTPConnection(host, port, timeout=SECONDS)
    try:
        plain = socket.create_connection((address, port), timeout=SECONDS)
        if scheme == "https":
            plain = ssl.create_default_context().wrap_socket(plain, server_hostname=host)
    except OSError as error:
        raise ValueError(f"the host {host!r} does not answer; send the picture itself") from error
    connection.sock = plain
    return connection
