"""One request and its answer on a connection: uvicorn's cycle with a straight way to the socket.

Owns the bytes of an answer: its head, its framing, and when they are written. Head and first bytes of a body leave in
one write. To an app that asks for it (`app.http.ports.Wire`, in the scope under `evenhand.wire`) it offers what ASGI
lacks: a write that makes no task wait, and a callback instead of a task that waits for the client to leave. It must
not know what the app is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from app.http.body import header
from app.http.ports import WIRE

if TYPE_CHECKING:
    from workers.protocol import Protocol

# Up to here copying what is written behind its head costs less than a second write. A larger copy would also be held,
# beside what it is of, for as long as a client does not take it.
JOIN_LIMIT_BYTES = 64 * 1024


class Cycle(RequestResponseCycle):
    """`protocol` has read the head; `keep_alive`: the client wants to send another request afterwards."""

    def __init__(self, protocol: Protocol, *, keep_alive: bool) -> None:
        # Not uvicorn's: it is called for every request, and most of what it sets is set otherwise here.
        self.scope = protocol.scope
        self.transport = protocol.transport
        self.flow = protocol.flow
        self.logger = protocol.logger
        self.message_event = asyncio.Event()
        self.on_response = protocol.on_response_complete
        self.disconnected = False
        self.keep_alive = keep_alive
        self.body = bytearray()
        self.more_body = True
        self.response_started = False
        self.response_complete = False
        self.chunked_encoding = None
        self.expected_content_length = 0
        self._loop = protocol.loop
        self._head = b""  # started, and not written yet
        self._gone: Callable[[], None] | None = None
        self._bodyless = self.scope["method"] == "HEAD"
        # HTTP/1.0 has no chunks: there a body ends with the connection.
        self._until_close = self.scope["http_version"] == "1.0"
        scope: Any = self.scope  # uvicorn's type of it knows no extensions of ours
        expected = None if self._until_close else header(scope, b"expect")
        self.waiting_for_100_continue = expected is not None and expected.lower() == b"100-continue"
        scope["extensions"] = {WIRE: self}

    def __repr__(self) -> str:
        state = "complete" if self.response_complete else "started" if self.response_started else "open"
        return f"<Cycle {self.scope['method']} {self.scope['path']} {state}>"

    # --- the wire

    def when_gone(self, callback: Callable[[], None] | None) -> None:
        self._gone = callback
        if callback is not None:
            self.flow.resume_reading()  # an unread socket tells of no departure
            if self.disconnected:
                self._loop.call_soon(self.depart)

    def depart(self) -> None:
        """The client has left."""
        self.disconnected = True
        self.waiting_for_100_continue = False  # uvicorn would still ask for its body
        self.message_event.set()
        gone, self._gone = self._gone, None
        if gone is not None:
            gone()

    def start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        if self.disconnected:
            return
        self.response_started = True
        self.waiting_for_100_continue = False
        lines = [STATUS_LINE[status][:-2]]
        close = False
        for name, value in headers:
            name = name.lower()
            if name == b"content-length" and self.chunked_encoding is None:
                self.expected_content_length = int(value)
                self.chunked_encoding = False
            elif name == b"transfer-encoding" and value.lower() == b"chunked":
                self.chunked_encoding = True
            elif name == b"connection" and b"close" in [token.strip() for token in value.lower().split(b",")]:
                self.keep_alive = False
                close = True
            lines.append(name + b": " + value)
        if not self.keep_alive and not close:
            lines.append(b"connection: close")
        self._bodyless = self._bodyless or status in (204, 304)
        if self._until_close:
            self.chunked_encoding = False
        elif self.chunked_encoding is None and not self._bodyless:
            self.chunked_encoding = True
            lines.append(b"transfer-encoding: chunked")
        lines += (b"", b"")
        head = b"\r\n".join(lines)
        if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1 or b"\0" in head:
            raise RuntimeError("a header of the answer holds a line end or a NUL")
        self._head = head
        if self.chunked_encoding:
            # A stream's first event may take minutes; its head is not to.
            self._loop.call_soon(self._write_head)

    def write(self, data: bytes, *, more: bool) -> bool:
        if self.disconnected:
            return True
        if self.response_complete:
            raise RuntimeError("the answer is complete already")
        head, self._head = self._head, b""
        if self._bodyless:
            self.expected_content_length = 0
            data = head
        elif self.chunked_encoding:
            end = b"" if more else b"0\r\n\r\n"
            size = len(data)
            if size > JOIN_LIMIT_BYTES:
                self.transport.write(b"%b%x\r\n" % (head, size))
                self.transport.write(data)
                data = b"\r\n" + end
            else:
                data = b"%b%x\r\n%b\r\n%b" % (head, size, data, end) if size else head + end
        else:
            if not self._until_close:
                if len(data) > self.expected_content_length:
                    raise RuntimeError("the answer is longer than its Content-Length")
                self.expected_content_length -= len(data)
            if head and len(data) > JOIN_LIMIT_BYTES:
                self.transport.write(head)
            elif head:
                data = head + data
        if data:
            self.transport.write(data)
        if not more:
            if self.expected_content_length and not self._until_close:
                raise RuntimeError("the answer is shorter than its Content-Length")
            self.response_complete = True
            self._gone = None
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()
        return not self.flow.write_paused

    async def drain(self) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()

    def _write_head(self) -> None:
        head, self._head = self._head, b""
        if head and not self.disconnected:
            self.transport.write(head)

    # --- ASGI

    async def run(self, app: Any, tasks: set[asyncio.Task[None]]) -> None:
        """The app's call, as a task of `tasks`; not before the client has taken most of the answers before."""
        try:
            await self.drain()
            await app(self.scope, self.receive, self.send)
            if not self.response_complete and not self.disconnected:
                self.logger.error("the app left a request without an answer or an answer without an end")
                await self._end_badly()
        except BaseException as e:
            self.logger.error("Exception in ASGI application\n", exc_info=e)
            await self._end_badly()
        finally:
            self.on_response = _nothing  # it holds the protocol, which holds this
            task = asyncio.current_task()
            if task is not None:
                tasks.discard(task)

    async def _end_badly(self) -> None:
        if self.response_started and self._until_close:
            self.transport.abort()  # any other end would look like that of the answer
        elif self.response_started:
            self.transport.close()
        else:
            await self.send_500_response()

    async def send(self, message: Any) -> None:
        await self.drain()
        kind = message["type"]
        if self.disconnected:
            return
        if kind == "http.response.start" and not self.response_started:
            self.start(message["status"], message.get("headers", ()))
        elif kind == "http.response.body" and self.response_started:
            self.write(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"{kind} out of order")


def _nothing() -> None:
    pass
