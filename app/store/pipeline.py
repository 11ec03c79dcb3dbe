"""The hot path's connection to Redis: one socket, commands in the order given, many in flight.

Owns the socket, the framing and the deadline of each command. It must not know what a command means.

Why not the client library here: one connection gives one order, and the ledger's arithmetic rests on
that order (a restate is right only if nobody can tell what ran before it and what after). Commands
given in one turn of the event loop leave in one write, so N concurrent requests share a round trip; who can say
in one command what a turn brings gives that last (`defer`).
Nothing is ever sent twice: after any error nobody knows what ran, and the ledger restates.
A caller that is cancelled leaves nothing behind either: its reply still comes to its callback.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis

from app.errors import StoreUnavailable
from app.redis_url import RedisAddress

Reply = Any
Callback = Callable[[Reply], None]
"""Gets the reply: ints, bytes, lists of them, or an exception (an error reply, or StoreUnavailable)."""

LAST_WORDS_BYTES = 4096
GRACE_S = 0.05
"""A late reply may be waiting in the socket while our own event loop was stalled: look once more."""


class Pipeline(asyncio.Protocol):
    """One open connection. `submit` never waits; `on_lost` is called once, when it is gone."""

    def __init__(self, timeout_s: float, on_lost: Callable[[StoreUnavailable], None]) -> None:
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader()
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []
        self._deferred: Callable[[Pipeline], None] | None = None
        self._flushing: asyncio.Handle | None = None
        self._waiting: deque[tuple[Callback, float]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._lost: StoreUnavailable | None = None

    def __repr__(self) -> str:
        return f"<Pipeline {'lost' if self._lost else 'open'}, {len(self._waiting)} in flight>"

    @property
    def lost(self) -> StoreUnavailable | None:
        """Why the connection is gone; None while it stands."""
        return self._lost

    @classmethod
    async def open(
        cls, address: RedisAddress, *, timeout_s: float, on_lost: Callable[[StoreUnavailable], None]
    ) -> Pipeline:
        """Connect and greet (AUTH, SELECT). Raises StoreUnavailable."""
        loop = asyncio.get_running_loop()

        def make() -> Pipeline:
            return cls(timeout_s, on_lost)

        pipeline: Pipeline | None = None
        try:
            async with asyncio.timeout(timeout_s * 2):
                if address.path is not None:
                    _, pipeline = await loop.create_unix_connection(make, address.path)
                else:
                    tls = ssl.create_default_context() if address.tls else None
                    _, pipeline = await loop.create_connection(make, address.host, address.port, ssl=tls)
                await pipeline._greet(address)
        except (OSError, TimeoutError, StoreUnavailable) as e:
            if pipeline is not None:
                pipeline.close()
            if isinstance(e, StoreUnavailable):
                raise
            raise StoreUnavailable(f"Redis can't be reached: {e or type(e).__name__}") from e
        except BaseException:
            if pipeline is not None:
                pipeline.close()
            raise
        return pipeline

    async def _greet(self, address: RedisAddress) -> None:
        if address.password is not None:
            user = (address.username,) if address.username else ()
            await self.call(("AUTH", *user, address.password))
        if address.database:
            await self.call(("SELECT", address.database))
        await self.call(("PING",))

    def submit(self, command: Sequence[str | bytes | int], callback: Callback) -> None:
        """Send `command`; `callback` gets its reply, or StoreUnavailable if the connection is lost."""
        self.send(hiredis.pack_command(tuple(command)), callback)  # type: ignore[arg-type]  # its stub says 1-tuple

    def send(self, packed: bytes, callback: Callback) -> None:
        """The same of a command that is packed already."""
        if self._lost is not None:
            callback(self._lost)
            return
        if self._deferred is not None:
            self._send_deferred()
        if self._flushing is None:
            self.flush_behind()
        self._outgoing.append(packed)
        self._waiting.append((callback, time.monotonic()))
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._check_deadline)

    def defer(self, send: Callable[[Pipeline], None]) -> None:
        """Call `send` with this connection when this turn's commands leave, or before the next one is given: what it
        sends stands there.

        One at a time: another one before it is called first. It is called for certain, also where the connection is
        lost by then.
        """
        if self._deferred is not None:
            self._send_deferred()
        self._deferred = send
        if self._lost is not None:
            self._send_deferred()
        elif self._flushing is None:
            self.flush_behind()

    def flush_behind(self) -> None:
        """Send only when all has run that the event loop has scheduled by now: it may have something to send too.

        To be called while the loop reads, and not by what it runs then, which could go on without an end.
        """
        if self._flushing is not None:
            self._flushing.cancel()
        self._flushing = self._loop.call_soon(self._flush)

    async def call(self, command: Sequence[str | bytes | int]) -> Reply:
        """Send `command` and wait for its reply. Raises StoreUnavailable, also for an error reply."""
        future: asyncio.Future[Reply] = self._loop.create_future()

        def settle(reply: Reply) -> None:
            if not future.done():
                future.set_result(reply)

        self.submit(command, settle)
        reply = await future
        if isinstance(reply, StoreUnavailable):
            raise reply
        if isinstance(reply, Exception):
            raise StoreUnavailable(f"Redis answered: {reply}") from reply
        return reply

    def _send_deferred(self) -> None:
        send, self._deferred = self._deferred, None
        if send is not None:
            send(self)

    def _flush(self) -> None:
        try:
            if self._deferred is not None:
                self._send_deferred()
        finally:
            self._flushing = None
        if self._transport is not None and self._outgoing:
            self._transport.write(b"".join(self._outgoing))
        self._outgoing.clear()

    def _check_deadline(self) -> None:
        self._timer = None
        if not self._waiting:
            return
        callback, since = self._waiting[0]
        left_s = since + self._timeout_s - time.monotonic()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check_deadline)
        else:
            self._timer = self._loop.call_later(GRACE_S, self._give_up_on, callback)

    def _give_up_on(self, callback: Callback) -> None:
        self._timer = None
        if self._waiting and self._waiting[0][0] is callback:
            self._lose(StoreUnavailable(f"Redis did not answer within {self._timeout_s:g} s"))
        else:
            self._check_deadline()

    def close(self) -> None:
        """Drop the connection; whoever still waits gets StoreUnavailable."""
        self._lose(StoreUnavailable("the connection to Redis was closed"))

    def _lose(self, reason: StoreUnavailable) -> None:
        if self._lost is not None:
            return
        self._lost = reason
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            # abort, not close: unsent commands must not run after somebody restated.
            self._transport.abort()
        self._outgoing.clear()
        waiting, self._waiting = self._waiting, deque()
        for callback, _ in waiting:
            callback(reason)
        self._send_deferred()
        self._on_lost(reason)

    # --- asyncio.Protocol -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports are not asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while True:
            try:
                reply = self._reader.gets()
            except hiredis.ProtocolError as e:
                self._lose(StoreUnavailable(f"Redis sent what is no reply: {e}"))
                return
            if reply is False:
                return
            if not self._waiting:
                # A server that turns us away says so before it was asked anything.
                said = f"Redis answered: {reply}" if isinstance(reply, Exception) else "Redis sent a reply to nobody"
                self._lose(StoreUnavailable(said))
                return
            callback, _ = self._waiting.popleft()
            callback(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, BrokenPipeError | ConnectionResetError):
            self._hear_last_words()
        self._lose(StoreUnavailable(f"the connection to Redis was lost: {exc or 'closed by Redis'}"))

    def _hear_last_words(self) -> None:
        """A server that turns us away says why and closes: a write that fails then comes before what it said."""
        if self._transport is None or self._transport.get_extra_info("ssl_object") is not None:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno())) as s,
        ):
            s.setblocking(False)
            said = s.recv(LAST_WORDS_BYTES)
            if said and self._lost is None:
                self.data_received(said)
