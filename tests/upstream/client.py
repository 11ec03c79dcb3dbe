"""Short ways to use a transport in a test."""

from __future__ import annotations

from collections.abc import Sequence

from app.upstream.http1 import Http1Transport
from app.upstream.transport import Response, Target, Timeouts


def limits(*, connect: float = 5, first_byte: float = 5, idle: float = 5, total: float = 0) -> Timeouts:
    return Timeouts(connect_s=connect, first_byte_s=first_byte, idle_s=idle, total_s=total)


async def ask(
    transport: Http1Transport,
    url: str,
    *,
    method: bytes = b"POST",
    path: bytes = b"/v1/chat/completions",
    headers: Sequence[tuple[bytes, bytes]] = (),
    body: bytes = b'{"model": "m"}',
    timeouts: Timeouts | None = None,
) -> Response:
    return await transport.send(Target(url), method, path, headers, body, timeouts or limits())


async def whole(response: Response) -> bytes:
    """The rest of the body, and the answer closed."""
    body = b""
    while data := await response.read():
        body += data
    response.close()
    return body
