"""What the server allows: sizes, lengths, times, and who may ask."""

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Limits of the server; every one is an option of `diffprune serve`.

    Args:
        batch: Requests answered together at most.
        queue: Requests that may wait; one more is answered 429.
        max_new_tokens: Of an answer.
        max_body: Bytes of a request.
        max_pixels: Of the pictures of a request together.
        max_pictures: Of a request.
        timeout: Seconds a request may take, its wait included.
        linger: Seconds to wait for more requests after a batch of several, before the next one starts.
        token: Bearer token that requests must bring; None: none.
        hosts: From which pictures may be fetched; none by default.
    """

    batch: int = 8
    queue: int = 64
    max_new_tokens: int = 512
    max_body: int = 20_000_000
    max_pixels: int = 50_000_000
    max_pictures: int = 16
    timeout: float = 120.0
    linger: float = 0.01
    token: str | None = None
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and field.name != "linger" and not 0 < value < math.inf:
                raise ValueError(f"{field.name}={value} is no limit; give a number above 0")
        if self.token is not None and not (self.token and self.token.isascii() and self.token.isprintable()):
            raise ValueError("the token is empty or holds what a header cannot; give letters and digits")
        for host in self.hosts:
            if not host or "/" in host or host.count(":") == 1:  # an address of IPv6 has several
                raise ValueError(f"{host!r} is no host's name; give it alone, without https:// and port")

    @property
    def most(self) -> int:
        """Requests that may be under way at once, waiting ones included."""
        return self.queue + self.batch
