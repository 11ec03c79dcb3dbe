"""One request and its answer on a connection: in the place of uvicorn's cycle, with a straight way to the socket.

Owns the bytes of an answer: its head, its framing, and when they are written. Head and first bytes of a body leave in
one write. To an app that asks for it (`app.http.ports.Wire`, in the scope under `evenhand.wire`) it offers what ASGI
lacks: a write that makes no task wait, and a callback instead of a task that waits for the client to leave. It must
not know what the app is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from app.errors import Headers
from app.http.headers import CLOSE
from app.http.ports import WIRE
from workers.pieces import Pieces

if TYPE_CHECKING:
    from workers.protocol import Protocol

# Up to here copying what is written behind its head costs less than a second write. A larger copy would also be held,
# beside what it is of, for as long as a client does not take it.
JOIN_LIMIT_BYTES = 64 * 1024
# Of a body, until its request has had its first turn: it may want all of it, and then reading is not to be stopped and
# begun again.
BEFORE_ITS_TURN_BYTES = 2**20
FAULT = b"Internal Server Error"


class Cycle:
    """`protocol` has read the head; uvicorn's part of it goes by the names that its own cycle has.

    Args:
        keep_alive: whether the client wants to send another request afterwards.
        expected: what its Expect header says.
    """

    def __init__(self, protocol: Protocol, *, keep_alive: bool, expected: bytes | None) -> None:
        scope: Any = protocol.scope  # uvicorn's type of it knows no extensions of ours
        scope["extensions"] = {WIRE: self}
        self.scope = scope
        self.transport = protocol.transport
        self.flow = protocol.flow
        self.logger = protocol.logger
        self.on_response: Callable[[], None] = protocol.on_response_complete
        self.disconnected = False
        self.keep_alive = keep_alive
        self.body: bytes | memoryview | Pieces = b""  # what of it was not taken; most often it comes in one piece
        self.room_bytes = BEFORE_ITS_TURN_BYTES  # for what was not taken
        self.more_body = True
        self.response_started = False
        self.response_complete = False
        self.chunked_encoding = False
        self.expected_content_length = 0
        self.task: asyncio.Task[None] | None = None
        self.gathers = False  # only the whole body is news, or what does not fit into the room
        self._news = False  # since it was last asked for
        self._event: asyncio.Event | None = None  # of those who wait for it
        self._loop = protocol.loop
        self._head = b""  # started, and not written yet
        self._broken_off = False
        self._gone: Callable[[], None] | None = None
        self._bodyless = self.scope["method"] == "HEAD"
        # HTTP/1.0 has no chunks: there a body ends with the connection.
        self._until_close = self.scope["http_version"] == "1.0"
        self.waiting_for_100_continue = (
            expected is not None and not self._until_close and expected.lower() == b"100-continue"
        )

    def __repr__(self) -> str:
        state = "complete" if self.response_complete else "started" if self.response_started else "open"
        return f"<Cycle {self.scope['method']} {self.scope['path']} {state}>"

    @property
    def message_event(self) -> Cycle:
        """Uvicorn tells by its `set` that there is news."""
        return self

    # --- the wire

    def when_gone(self, callback: Callable[[], None] | None) -> None:
        self._gone = callback
        if callback is not None:
            if self.flow.read_paused:
                self.flow.resume_reading()  # an unread socket tells of no departure
            if self.disconnected:
                self._loop.call_soon(self.depart)

    def whole_body(self) -> bytes | None:
        if self.more_body or self.disconnected or self.response_complete:
            return None
        body, self.body, self._news = self.body, b"", False
        return body if type(body) is bytes else bytes(body)

    def gather(self, limit_bytes: int) -> None:
        self.gathers, self.room_bytes = True, limit_bytes
        self._news = not self.more_body or len(self.body) > limit_bytes

    def depart(self) -> None:
        """The client has left."""
        self.disconnected = True
        self.waiting_for_100_continue = False  # uvicorn would still ask for its body
        self.set()
        gone, self._gone = self._gone, None
        if gone is not None:
            gone()

    def start(self, status: int, headers: Headers, length: int | None) -> None:
        if self.disconnected:
            return
        self.response_started = True
        self.waiting_for_100_continue = False
        lines = [STATUS_LINE[status][:-2]]
        lines += [name + b": " + value for name, value in headers]
        if CLOSE in headers:
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close")
        self._bodyless = self._bodyless or status in (204, 304)
        self.chunked_encoding = False
        if length is not None:
            self.expected_content_length = length
        elif not self._until_close and not self._bodyless:
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
        head = self._head
        if more and self.chunked_encoding and not head and 0 < (size := len(data)) <= JOIN_LIMIT_BYTES:
            self.transport.write(b"%x\r\n%b\r\n" % (size, data))  # as most of a stream
            return not self.flow.write_paused
        self._head = b""
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
            self._complete()
        return not self.flow.write_paused

    def answer(self, status: int, lines: bytes, body: bytes) -> None:
        if self.disconnected:
            return
        if self.response_started or self._bodyless:
            raise RuntimeError("no whole answer can be given here")
        self.response_started = True
        close = b"" if self.keep_alive else b"connection: close\r\n"
        if len(body) > JOIN_LIMIT_BYTES:
            self.transport.write(b"%b%b%b\r\n" % (STATUS_LINE[status], lines, close))
            self.transport.write(body)
        else:
            self.transport.write(b"%b%b%b\r\n%b" % (STATUS_LINE[status], lines, close, body))
        self._complete()

    def _complete(self) -> None:
        self.response_complete = True
        self._gone = None
        self.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()

    def break_off(self) -> None:
        self._broken_off = True

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
        self.room_bytes = HIGH_WATER_LIMIT
        try:
            if self.flow.write_paused:
                await self.drain()
            await app(self.scope, self.receive, self.send)
            if not self.response_complete and not self.disconnected:
                if not self._broken_off:  # else the app has said why, and this is how the client learns it
                    self.logger.error("the app left a request without an answer or an answer without an end")
                await self._end_badly()
        except BaseException as e:
            self.logger.error("Exception in ASGI application\n", exc_info=e)
            await self._end_badly()
        finally:
            # What holds this would be left to the garbage collector, which stops all requests to find it.
            self.on_response = _nothing  # it holds the protocol
            self.scope["extensions"] = {}
            if self.task is not None:
                tasks.discard(self.task)

    async def _end_badly(self) -> None:
        if self.response_started and self._until_close:
            self.transport.abort()  # any other end would look like that of the answer
        elif self.response_started:
            self.transport.close()
        else:
            kind = (b"content-type", b"text/plain; charset=utf-8")
            headers = [kind, (b"content-length", b"%d" % len(FAULT)), CLOSE]
            await self.drain()
            self.start(500, headers, len(FAULT))
            self.write(FAULT, more=False)

    def set(self) -> None:
        """There is something new to `receive`."""
        self._news = True
        if self._event is not None:
            self._event.set()

    async def receive(self) -> Any:
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        if not self.disconnected and not self.response_complete:
            self.flow.resume_reading()
            if not self._news:
                event = self._event = self._event or asyncio.Event()
                event.clear()
                await event.wait()
            self._news = False
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self.body = self.body, b""
        return {"type": "http.request", "body": bytes(body), "more_body": self.more_body}

    async def send(self, message: Any) -> None:
        await self.drain()
        kind = message["type"]
        if self.disconnected:
            return
        if kind == "http.response.start" and not self.response_started:
            headers, length = framed(message.get("headers", ()))
            self.start(message["status"], headers, length)
        elif kind == "http.response.body" and self.response_started:
            self.write(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"{kind} out of order")


def framed(headers: Iterable[tuple[bytes, bytes]]) -> tuple[Headers, int | None]:
    """Headers as `Wire.start` takes them, and the length that they tell. Raises ValueError: it is none."""
    kept: Headers = []
    length = None
    for name, value in headers:
        name = name.lower()
        if name == b"content-length":
            length = int(value)
        elif name == b"connection" and b"close" in [token.strip() for token in value.lower().split(b",")]:
            value = CLOSE[1]
        if name != b"transfer-encoding":  # that follows from whether there is a length
            kept.append((name, value))
    return kept, length


def _nothing() -> None:
    pass
