"""`Http1Transport`: requests to engines over pooled HTTP/1.1 connections of our own.

Owns how a request is written, how a connection comes about, and the one silent re-send. Framing and
clocks are `connection`'s, idle connections are `pool`'s, bodies that are still coming are `uploading`'s.

Source: RFC 9112; the re-send is RFC 9110, 9.2.2, narrowed to the case where nothing can have been lost but
the race between an engine's keep-alive timer and our request.
"""

from __future__ import annotations

import asyncio
import math
import re
import socket
import ssl
from collections.abc import Sequence

from aiohappyeyeballs import AddrInfoType, start_connection

from app.errors import BadRequest, EngineBroke, EngineTimeout, ShuttingDown
from app.heads import Written, lines_of
from app.upstream.connection import Connection, Http1Response
from app.upstream.failures import connect_failure
from app.upstream.pool import Pool
from app.upstream.transport import Target, Timeouts, Upload

_SECOND_ADDRESS_AFTER_S = 0.25  # RFC 8305, 5: Connection Attempt Delay
_ENDS_WORD = re.compile(rb"[ \r\n\0]").search
_LENGTH_ALWAYS = frozenset({b"POST", b"PUT", b"PATCH"})  # RFC 9110, 8.6: they say so even of an empty body


class Http1Transport:
    """The contract is `transport.Transport`. Belongs to the event loop of its first request.

    Args:
        keep_alive_s: longest idle time of a pooled connection; an engine's own `Keep-Alive: timeout=` shortens it.
        tls: for https engines; None verifies against the system's certificates.
    """

    def __init__(self, keep_alive_s: float = 4.0, tls: ssl.SSLContext | None = None) -> None:
        self._keep_alive_s = keep_alive_s
        self._tls = tls
        self._pool: Pool | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<Http1Transport open={self.open} idle={self.idle} in_use={self.in_use}>"

    @property
    def open(self) -> int:
        """Connections that exist."""
        return self._pool.open if self._pool is not None else 0

    @property
    def idle(self) -> int:
        """Connections that wait for a request."""
        return self._pool.idle if self._pool is not None else 0

    @property
    def in_use(self) -> int:
        """Connections that carry a request, or were made for one just now."""
        return self._pool.in_use if self._pool is not None else 0

    async def send(
        self,
        target: Target,
        method: bytes,
        path: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes | Upload,
        timeouts: Timeouts,
    ) -> Http1Response:
        if not isinstance(body, bytes):
            return await self._send_upload(target, method, path, headers, body, timeouts)
        head = write_head(target, method, path, headers, body)
        pool = self._pool or self._open_pool()
        loop = pool.loop
        now_s = loop.time()
        total_at_s = now_s + timeouts.total_s if timeouts.total_s else math.inf
        connection = pool.take(target.origin, now_s)
        if connection is None:
            connection = await self._connect(target, pool, timeouts, total_at_s)
        response = connection.begin(head, body, timeouts, total_at_s, head_only=method == b"HEAD")
        try:
            await response.head()
        except EngineBroke:
            if not response.stale:
                raise
        else:
            return response
        # Another pooled connection may be just as stale; a new one can't be, so once is enough.
        connection = await self._connect(target, pool, timeouts, total_at_s)
        response = connection.begin(head, body, timeouts, total_at_s, head_only=method == b"HEAD")
        await response.head()
        return response

    async def _send_upload(
        self,
        target: Target,
        method: bytes,
        path: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: Upload,
        timeouts: Timeouts,
    ) -> Http1Response:
        """On a connection of its own: a pooled one may turn out stale when the body can't be sent again."""
        length = body.length
        framing = b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
        head = write_head(target, method, path, headers, b"", framing)
        pool = self._pool or self._open_pool()
        total_at_s = pool.loop.time() + timeouts.total_s if timeouts.total_s else math.inf
        connection = await self._connect(target, pool, timeouts, total_at_s)
        body.rewind()
        response = connection.begin(head, b"", timeouts, total_at_s, head_only=False)
        connection.upload(body)
        await response.head()
        return response

    async def close(self) -> None:
        self._closed = True
        if self._pool is not None:
            self._pool.close()
            for _ in range(3):  # an aborted transport closes its socket in one of the loop's next rounds
                await asyncio.sleep(0)

    def _open_pool(self) -> Pool:
        self._pool = Pool(self._keep_alive_s, asyncio.get_running_loop())
        return self._pool

    async def _connect(self, target: Target, pool: Pool, timeouts: Timeouts, total_at_s: float) -> Connection:
        """A new connection, ready for a request, within `connect_s` and before `total_at_s`."""
        if self._closed:
            raise ShuttingDown("this worker is shutting down")
        connect_at_s = pool.loop.time() + timeouts.connect_s if timeouts.connect_s else math.inf
        deadline_s = min(connect_at_s, total_at_s)
        connection = Connection(target, pool, pool.loop)
        try:
            async with asyncio.timeout_at(None if deadline_s == math.inf else deadline_s) as limit:
                await self._open_socket(connection)
        except BaseException as e:
            connection.drop()
            if isinstance(e, TimeoutError) and limit.expired():
                raise _connect_too_slow(target.url, timeouts, by_total=total_at_s <= connect_at_s) from e
            if isinstance(e, OSError | UnicodeError):
                raise connect_failure(target.url, e) from e
            raise
        if self._closed:
            connection.drop()
            raise ShuttingDown("this worker is shutting down")
        if connection.closed:
            raise EngineBroke(f"engine {target.url} broke off: it closed the connection before it answered")
        return connection

    async def _open_socket(self, connection: Connection) -> None:
        loop, target = connection.loop, connection.target
        tls = self._context() if target.scheme == "https" else None
        name = target.server_name if tls is not None else None
        if target.is_literal:
            await loop.create_connection(lambda: connection, target.host, target.port, ssl=tls, server_hostname=name)
            return
        # uvloop tries the addresses of a name one after the other: a black hole in front of a good one would
        # cost the whole connect timeout, and its joint error would not say whether all of them refused.
        sock = await start_connection(
            await self._addresses(target), happy_eyeballs_delay=_SECOND_ADDRESS_AFTER_S, loop=loop
        )
        await loop.create_connection(lambda: connection, sock=sock, ssl=tls, server_hostname=name)

    async def _addresses(self, target: Target) -> Sequence[AddrInfoType]:
        loop = asyncio.get_running_loop()
        return await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


def write_head(
    target: Target,
    method: bytes,
    path: bytes,
    headers: Sequence[tuple[bytes, bytes]],
    body: bytes,
    framing: bytes | None = None,
) -> bytes:
    """The bytes of a request before its body.

    Args:
        framing: the header that says where a body ends that isn't here yet.

    Raises:
        BadRequest: a CR, LF or NUL in a header, or one of these or a space in the path: each would let a
            client write a request of its own into the connection that others will use.
    """
    if framing is None:
        framing = b"content-length: %d" % len(body) if body or method in _LENGTH_ALWAYS else b""
    if _ENDS_WORD(method + path):
        raise BadRequest("the request's path holds a space, a line end or a NUL")
    lines = headers.lines if type(headers) is Written else lines_of(headers)
    begun = b"%b %b%b HTTP/1.1\r\nhost: %b\r\n%b" % (method, target.prefix, path, target.host_header, lines)
    return b"%b%b\r\n\r\n" % (begun, framing) if framing else begun + b"\r\n"


def _connect_too_slow(url: str, timeouts: Timeouts, *, by_total: bool) -> EngineTimeout:
    if by_total:
        return EngineTimeout(f"engine {url} did not finish its answer within {timeouts.total_s:g} s", stage="total")
    return EngineTimeout(f"engine {url} did not accept a connection within {timeouts.connect_s:g} s", stage="connect")
