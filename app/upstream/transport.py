"""What the rest of the project knows about HTTP towards engines: an address, a send, an answer.

Owns the interface and the values that cross it. It must not know Redis, Starlette, or how bytes move:
`http1` is the implementation, and tests may bring their own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Protocol
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds for each stage of one request; 0 switches a stage off.

    connect_s ends with the connection (TLS included), first_byte_s with the answer's complete head,
    idle_s is the longest wait for the next bytes of the body, total_s covers everything.
    """

    connect_s: float
    first_byte_s: float
    idle_s: float
    total_s: float


class Target:
    """An engine's address, parsed once per node URL.

    Args:
        url: as `app.nodes.normalise_url` spells it.
        named: the Host it is sent instead of the URL's, and the name that its certificate must have; as
            `app.nodes.parse_host_header` spells it. Empty: the URL's.
    """

    __slots__ = (
        "host",
        "host_header",
        "is_literal",
        "named",
        "origin",
        "port",
        "prefix",
        "scheme",
        "server_name",
        "url",
    )

    def __init__(self, url: str, named: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not a normalised engine URL: {url!r}")
        self.url = url
        self.scheme = parts.scheme
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.prefix = parts.path.rstrip("/").encode("ascii")
        self.named = named
        self.host_header = (named or parts.netloc).encode("ascii")
        self.server_name = server_name(named) or self.host
        self.origin = f"{self.scheme}://{self.host}:{self.port}"  # what a connection can be shared by
        if self.scheme == "https" and named:
            self.origin += f" as {self.server_name}"  # no other name was verified
        self.is_literal = _is_address(self.host)

    def __repr__(self) -> str:
        return f"Target({self.url!r})"


def server_name(named: str) -> str:
    """The name in a host header; empty for none."""
    return urlsplit(f"//{named}").hostname or ""


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


Sink = Callable[[bytes], bool]
"""Takes bytes at once; False: no more, please, before `Drain` has returned."""
Drain = Callable[[], Awaitable[None]]


class Response(Protocol):
    """An engine's answer, from the moment its head is complete."""

    status: int
    headers: list[tuple[bytes, bytes]]
    """As received, in order, trailers excluded; names in lower case, values raw, nothing removed."""

    async def read(self) -> bytes:
        """The bytes of the body that have come and were not read yet; waits while there are none.

        What came before a failure is handed out before the failure is raised. A cancelled read loses
        nothing and leaves the answer open; only `close` ends it.

        Returns:
            At least one byte, or b"" at the proper end of the body.

        Raises:
            EngineBroke: the connection ended, or the framing broke, before the end.
            EngineTimeout: stage "idle" or "total".
        """
        ...

    def close(self) -> None:
        """Be done with the answer; may be called at any time and more than once.

        An answer that has not wholly arrived takes its connection with it, at once, so that the engine
        stops working for nobody.
        """
        ...


async def pipe(response: Response, sink: Sink, drain: Drain) -> None:
    """Give `sink` all that `read` would return; return at the proper end. Raises, and may be cancelled, as `read`.

    A response with a `pipe(sink, drain)` of its own does that without a task's turn for each piece.
    """
    own = getattr(response, "pipe", None)
    if own is not None:
        await own(sink, drain)
        return
    while chunk := await response.read():
        if not sink(chunk):
            await drain()


def whole(response: Response) -> bytes | None:
    """All of the body if it has come to its end and none was read; it stays to be read. None: not yet, or not known."""
    own = getattr(response, "whole", None)
    found: bytes | None = own() if own is not None else None
    return found


class Upload(Protocol):
    """A request's body that is still coming."""

    @property
    def length(self) -> int | None:
        """As Content-Length says; None: not known, so that it goes in chunks."""
        ...

    @property
    def spent(self) -> bool:
        """Whether bytes have been given out that can't be given again."""
        ...

    async def read(self) -> bytes:
        """The next bytes, b"" at the proper end. What it raises ends the request, and is raised there."""
        ...

    def rewind(self) -> None:
        """From the beginning again; not once it is `spent`."""
        ...


class Transport(Protocol):
    """Sends requests to engines."""

    async def send(
        self,
        target: Target,
        method: bytes,
        path: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes | Upload,
        timeouts: Timeouts,
    ) -> Response:
        """Send one request and wait for the head of its answer. Cancelling it aborts the connection at once.

        An engine may answer before it has all of an upload: an answer of 400 and more ends the upload, any other
        goes on beside it.

        Args:
            path: with the query string; the target's own path prefix goes before it.
            headers: what the engine gets beside Host, Content-Length and Transfer-Encoding, which must not be among
                them.
            timeouts: `first_byte_s` counts while an upload waits for the engine, and from its end on.

        Raises:
            BadRequest: a header or the path holds a character that would end its line.
            EngineRefused: nobody listens there, on any of the host's addresses.
            EngineUnreachable: no connection for another reason (DNS, route, TLS).
            EngineTimeout: stage "connect", "first_byte" or "total".
            EngineBroke: the connection ended, or what came was no HTTP, before the head was complete.
            ShuttingDown: this transport has been closed.
        """
        ...

    async def close(self) -> None:
        """Abort what is running and close every connection."""
        ...
