"""One HTTP/1.1 connection to an engine, and the answer that is being read from it.

Owns the bytes between a socket and an answer: framing, back-pressure, the clock of one request, and
the verdict whether the connection can carry another one. It must not know how connections come about
(`http1`) or which are kept (`pool`).

The two classes are the two halves of one thing: `Connection` is what the event loop talks to,
`Http1Response` what the caller holds. They part as soon as the last byte of the answer has come, so that
the connection can serve somebody else while the caller still reads what is buffered.

Nothing here makes a task, and a request on a reused connection makes no timer either: the timer of the
connection outlives its requests and, when it fires too early, is armed again for the deadline that holds then.
"""

from __future__ import annotations

import asyncio
import math
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from app.errors import EngineBroke, EngineTimeout
from app.heads import Head, is_to_be_kept
from app.upstream.pool import Pool
from app.upstream.transport import Drain, Sink, Target, Timeouts, Upload
from app.upstream.uploading import Uploading

HEAD_LIMIT_BYTES = 64 * 1024  # status line and headers; also trailers, and what surrounds chunks
BUFFER_LIMIT_BYTES = 256 * 1024  # a reader that is slower than its engine holds this much, plus one socket read
JOIN_LIMIT_BYTES = 64 * 1024  # up to here copying a body behind its head costs less than a second write
_TOO_LONG = f"its headers or trailers are longer than {HEAD_LIMIT_BYTES} bytes"
_TIMER_SLACK_S = 0.001  # uvloop's timers have whole milliseconds and may fire just before their time
# A timer that is so late tells of this process, which was stopped or stuck, and not of the engine. What the engine
# sent meanwhile waits in the socket, and a loop runs its timers first: only the next one is a fair one.
_LATE_S = 0.1
_SECOND_LOOK_S = 0.1

# Where the connection stands with its answer. Plain ints: they are compared for every callback of the parser.
_IDLE, _HEAD, _BODY, _COMPLETE = range(4)
CHUNK_DIGITS = 3
CHUNK_SIZES = {b"%x" % size: size for size in range(1, 16**CHUNK_DIGITS)}
"""What stands before a chunk, as engines write it: one that holds an event is seldom larger."""

_STAGE_NAMES = ("idle", "head", "body", "complete")


class Http1Response:
    """An answer in the course of arriving; the contract is `transport.Response`."""

    __slots__ = (
        "_buffered_bytes",
        "_chunks",
        "_connection",
        "_ended",
        "_error",
        "_full",
        "_head_only",
        "_read",
        "_sink",
        "_stale",
        "_timeouts",
        "_total_at_s",
        "_waiter",
        "headers",
        "status",
    )

    def __init__(self, connection: Connection, timeouts: Timeouts, total_at_s: float, head_only: bool) -> None:
        self.status = 0  # until the head is complete
        self.headers: list[tuple[bytes, bytes]] = []
        self._connection: Connection | None = connection
        self._timeouts = timeouts
        self._total_at_s = total_at_s
        self._head_only = head_only  # the answer to HEAD describes a body and has none
        self._chunks: list[bytes] = []
        self._buffered_bytes = 0
        self._ended = False
        self._error: Exception | None = None  # an upload's own, if the client is to blame
        self._stale = False
        self._read = False
        self._sink: Sink | None = None
        self._full = False  # the sink wants no more
        self._waiter: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        where = self._connection or ("failed" if self._error else "ended")
        return f"<Http1Response {self.status} buffered_bytes={self._buffered_bytes} {where}>"

    @property
    def stale(self) -> bool:
        """The engine had closed the reused connection: not one byte came, so the request may be sent again."""
        return self._stale

    async def head(self) -> None:
        """Wait until status and headers are there. Raises what `Transport.send` promises; cancelling aborts."""
        connection = self._connection
        if connection is not None and self.status == 0:
            waiter = self._waiter = connection.loop.create_future()
            try:
                await waiter
            except BaseException:
                self.close()
                raise
        if self.status == 0 and self._error is not None:
            raise self._error

    async def read(self) -> bytes:
        while not self._chunks:
            if self._ended:
                if self._error is not None:
                    raise self._error
                return b""
            await self._more()
        return self._take()

    def whole(self) -> bytes | None:
        """As `transport.whole`."""
        if not self._ended or self._error is not None or self._read:
            return None
        chunks = self._chunks
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def pipe(self, sink: Sink, drain: Drain) -> None:
        """As `transport.pipe`."""
        while True:
            if self._chunks:
                if not sink(self._take()):
                    await drain()
            elif self._ended:
                if self._error is not None:
                    raise self._error
                return
            else:
                self._sink = sink  # while it waits, `came` hands on what comes
                try:
                    await self._more()
                finally:
                    self._sink = None
                if self._full:
                    self._full = False
                    await drain()

    def _take(self) -> bytes:
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._buffered_bytes = 0
        self._read = True
        connection = self._connection
        if connection is not None and connection.paused:
            connection.resume()
        return data

    def _came(self, connection: Connection) -> None:
        """Something of the body has come while somebody waits for it."""
        if self._sink is not None and not self._full:
            self._pass(connection, self._take())
        else:
            connection._deadline_s = self._total_at_s  # only a reader that waits may find the engine slow
            self._wake()

    def _pass(self, connection: Connection, data: bytes) -> None:
        assert self._sink is not None
        idle_s = self._timeouts.idle_s
        if idle_s:
            # Later than the one before, for which a timer is armed: see `watch`.
            at_s = connection.loop.time() + idle_s
            connection._deadline_s = at_s if at_s < self._total_at_s else self._total_at_s
        self._read = True
        if not self._sink(data):
            self._full = True
            self._wake()

    async def _more(self) -> None:
        connection = self._connection
        assert connection is not None  # it leaves only with the end of the answer
        if self._waiter is not None:
            raise RuntimeError("an answer has one reader")
        idle_s = self._timeouts.idle_s
        if idle_s:
            connection.watch(min(connection.loop.time() + idle_s, self._total_at_s))
        waiter = self._waiter = connection.loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None
            if not self._ended:
                # Only a reader that waits may find the engine slow. After data this has been done already.
                connection.watch(self._total_at_s)

    def close(self) -> None:
        connection = self._connection
        if connection is not None:
            connection.give_up(EngineBroke(f"the answer of engine {connection.target.url} was closed before its end"))
        self._chunks.clear()
        self._buffered_bytes = 0

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():  # a cancelled reader stays here until its task has run
                waiter.set_result(None)

    def _end(self, error: Exception | None) -> None:
        self._connection = None
        self._ended = True
        self._error = error
        self._wake()


class Connection(asyncio.Protocol):
    """A socket to one engine. Made idle; `begin` gives it a request."""

    __slots__ = (
        "_armed_at_s",
        "_between_chunks",
        "_chunk_ended",
        "_closed",
        "_deadline_s",
        "_head",
        "_overhead_bytes",
        "_parser",
        "_pool",
        "_response",
        "_reusable",
        "_stage",
        "_status",
        "_strange_heads",
        "_timer",
        "_transport",
        "_uploading",
        "idle_until_s",
        "keep_alive_s",
        "loop",
        "paused",
        "served",
        "target",
    )

    def __init__(self, target: Target, pool: Pool, loop: asyncio.AbstractEventLoop) -> None:
        self.target = target
        self.loop = loop
        self.keep_alive_s = pool.keep_alive_s
        self.idle_until_s = 0.0
        self.served = 0  # requests begun on it
        self.paused = False
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = HttpResponseParser(self)
        self._response: Http1Response | None = None
        self._stage = _IDLE
        self._overhead_bytes = 0  # received since the last byte of a body, or since the request
        self._reusable = False
        self._head: Head | None = None  # that came last and may come again
        self._status = 0  # that it has
        self._chunk_ended = False  # and no other has begun, as far as the parser can tell
        self._between_chunks = False
        self._strange_heads = 0  # kept in vain
        self._uploading: Uploading | None = None  # until all of its body is out
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._armed_at_s = 0.0  # never later than the deadline while a timer is armed
        self._deadline_s = math.inf

    def __repr__(self) -> str:
        stage = "closed" if self._closed else _STAGE_NAMES[self._stage]
        buffered = self._response._buffered_bytes if self._response else 0
        return f"<Connection {self.target.origin} {stage} served={self.served} buffered_bytes={buffered}>"

    @property
    def closed(self) -> bool:
        return self._closed

    # --- what the owner does with it ---------------------------------------------------------------

    def begin(
        self, head: bytes, body: bytes, timeouts: Timeouts, total_at_s: float, *, head_only: bool
    ) -> Http1Response:
        """Write one request. `head` ends with the empty line."""
        assert self._transport is not None and self._response is None and not self._closed
        response = self._response = Http1Response(self, timeouts, total_at_s, head_only)
        self.served += 1
        self._stage = _HEAD
        self._overhead_bytes = 0
        self._reusable = False
        first_byte_s = timeouts.first_byte_s
        self.watch(min(self.loop.time() + first_byte_s, total_at_s) if first_byte_s else total_at_s)
        if len(body) <= JOIN_LIMIT_BYTES:
            self._transport.write(head + body if body else head)
        else:
            self._transport.write(head)
            self._transport.write(body)
        return response

    def watch(self, deadline_s: float) -> None:
        """Give up at `deadline_s`, loop time; infinity watches nothing."""
        self._deadline_s = deadline_s
        if self._timer is not None:
            if self._armed_at_s <= deadline_s:
                return  # it fires early or in time, and `_tick` sees to the rest
            self._timer.cancel()
        elif deadline_s == math.inf:
            return
        self._armed_at_s = deadline_s
        self._timer = self.loop.call_at(deadline_s, self._tick)

    def give_up(self, error: Exception) -> None:
        """End the answer with `error` and abort the connection: an engine must not work for nobody."""
        response = self._response
        self._response = None
        self.drop()
        if response is not None:
            response._end(error)

    def drop(self) -> None:
        """Close the socket at once, sent or not; may be called more than once."""
        if self._closed:
            return
        self._closed = True
        self._pool.forget(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._uploading is not None:
            self._uploading.stop()
        if self._transport is not None:
            self._transport.abort()

    def resume(self) -> None:
        self.paused = False
        if self._transport is not None:
            self._transport.resume_reading()

    # --- a body that is still coming ---------------------------------------------------------------

    def upload(self, body: Upload) -> None:
        """Send `body` behind the head that `begin` has written."""
        self._uploading = Uploading(self, body)
        self.wait_for_client()

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._closed:
            self._transport.write(data)

    def wait_for_engine(self) -> None:
        """Nothing goes on before the engine has taken bytes, or answered."""
        response = self._response
        if response is not None and self._stage == _HEAD:
            first_byte_s = response._timeouts.first_byte_s
            until_s = self.loop.time() + first_byte_s if first_byte_s else math.inf
            self.watch(min(until_s, response._total_at_s))

    def wait_for_client(self) -> None:
        if self._response is not None and self._stage == _HEAD:
            self.watch(self._response._total_at_s)

    def upload_ended(self) -> None:
        self._uploading = None
        self.wait_for_engine()

    def upload_failed(self, error: Exception) -> None:
        if self._stage != _HEAD and not isinstance(error, EngineBroke):
            broke = EngineBroke(f"the request to engine {self.target.url} ended before its body was complete")
            broke.__cause__, error = error, broke
        self.give_up(error)

    # --- what the event loop says -------------------------------------------------------------------

    def pause_writing(self) -> None:
        if self._uploading is not None:
            self._uploading.pause()

    def resume_writing(self) -> None:
        if self._uploading is not None:
            self._uploading.resume()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast(asyncio.Transport, transport)  # uvloop's are of no asyncio class
        if self._closed:  # given up while it was being made
            transport.abort()
            return
        self._pool.members.add(self)

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None:
            self.drop()  # nobody asked: whatever it is, the next answer on this connection could not be trusted
            return
        if self._between_chunks and response._sink is not None and self._pass_chunk(data, response):
            return
        begins = self._stage == _HEAD and not self._overhead_bytes
        if begins and self._head is not None and self._read_head_again(data, self._head, response):
            return
        self._overhead_bytes += len(data)
        try:
            self._parser.feed_data(data)
            self._between_chunks = self._chunk_ended and data.endswith(b"\r\n")
        except (HttpParserError, HttpParserUpgrade) as e:
            if self._stage != _COMPLETE:
                too_long = self._overhead_bytes > HEAD_LIMIT_BYTES
                self._broke(_TOO_LONG if too_long else "what it sent is no valid HTTP/1.1 answer", e)
                return
            # Else rubbish follows a complete answer, and `on_message_begin` has seen it begin.
        if self._stage == _COMPLETE:
            if begins and self._reusable and is_to_be_kept(self._strange_heads, self.served):
                self._keep_head(data, response)
            self._finish(response)
            return
        if self._overhead_bytes > HEAD_LIMIT_BYTES:
            self._broke(_TOO_LONG)
            return
        if response._chunks:
            if response._waiter is not None:
                response._came(self)
            if response._buffered_bytes > BUFFER_LIMIT_BYTES and not self.paused:
                assert self._transport is not None
                self.paused = True
                self._transport.pause_reading()

    def _pass_chunk(self, data: bytes, response: Http1Response) -> bool:
        """Hand on one whole chunk of a stream, past the parser, which is between two; False: it is for the parser."""
        if response._full:
            return False
        end = data.find(b"\r\n", 0, CHUNK_DIGITS + 2)
        size = CHUNK_SIZES.get(data[:end]) if end > 0 else None
        if size is None or len(data) != end + size + 4 or not data.endswith(b"\r\n"):
            return False
        self._overhead_bytes = 0
        response._pass(self, data[end + 2 : -2])
        return True

    def _keep_head(self, data: bytes, response: Http1Response) -> None:
        """`data` was an answer that the parser has read: remember its head, if it is one to be found again."""
        status = response.status
        if response._head_only or status in (204, 304) or not data.startswith(b"HTTP/1.1 %d" % status):
            return  # another length than its Content-Length, or a 1xx answer before it
        head = Head.begins(data, response.headers)
        if head is not None:
            self._strange_heads += 1
            self._head, self._status = head, status

    def _read_head_again(self, data: bytes, head: Head, response: Http1Response) -> bool:
        """Take a whole answer with the head of the one before, past the parser; False: it is for the parser."""
        headers = head.of(data)
        if headers is None or len(data) - headers.end != headers.length:
            return False
        if response._head_only or self._uploading is not None:
            return False
        self._strange_heads = 0
        response.status, response.headers = self._status, headers
        if headers.length:
            response._chunks.append(data[headers.end :])
            response._buffered_bytes = headers.length
        self._reusable = True
        self._finish(response)
        return True

    def eof_received(self) -> None:
        response = self._response
        if response is None:
            self.drop()
        elif self._stage == _BODY and _ends_with_connection(response.headers):
            self._reusable = False
            self._finish(response)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._response is not None:
            self._response._stale = self.served > 1 and self._stage == _HEAD and self._overhead_bytes == 0
            before = "it answered" if self._stage == _HEAD else "its answer was complete"
            self._broke(f"it closed the connection before {before}", exc)
        self.drop()
        self._transport = None
        self._uploading = None
        del self._parser  # it holds this object's methods: a cycle that only the collector would find

    def _tick(self) -> None:
        self._timer = None
        response = self._response
        if response is None or self._deadline_s == math.inf:
            return
        late_s = self.loop.time() - self._deadline_s
        if late_s < -_TIMER_SLACK_S:
            self.watch(self._deadline_s)
            return
        if late_s > _LATE_S and self._deadline_s != response._total_at_s:
            self.watch(min(self.loop.time() + _SECOND_LOOK_S, response._total_at_s))
            return
        self.give_up(_too_slow(self.target.url, response, self._stage, self._deadline_s))

    def _finish(self, response: Http1Response) -> None:
        """The whole answer has come: part from it, and serve another request or close."""
        assert self._transport is not None
        self._response = None
        self._stage = _IDLE
        self._deadline_s = math.inf
        # It can't be paused here: a paused transport delivers nothing, so no answer ends on it.
        # An engine that answered before it had read the whole request may never read the rest.
        sent = self._uploading is None and not self._transport.get_write_buffer_size()
        if self._reusable and self.keep_alive_s > 0 and sent:
            self._pool.put(self)
        else:
            self.drop()
        response._end(None)

    def _broke(self, how: str, cause: BaseException | None = None) -> None:
        error = EngineBroke(f"engine {self.target.url} broke off: {how}")
        error.__cause__ = cause
        self.give_up(error)

    # --- what the parser says, inside data_received ---------------------------------------------------

    def on_message_begin(self) -> None:
        if self._stage != _HEAD:
            self._reusable = False  # a second answer to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._stage != _HEAD or self._response is None:
            return  # a trailer
        name = name.lower()
        if name == b"keep-alive":
            self.keep_alive_s = self._pool.learn_keep_alive_s(value)
        self._response.headers.append((name, value))

    def on_headers_complete(self) -> None:
        response = self._response
        if self._stage != _HEAD or response is None:
            return
        status = self._parser.get_status_code()
        if status < 200:
            if status < 100:
                raise ValueError("no status")
            return
        # The count includes what follows the head in the same read, so it only says when to look closer.
        if self._overhead_bytes > HEAD_LIMIT_BYTES and _size(response.headers) > HEAD_LIMIT_BYTES:
            raise ValueError("head too long")
        response.status = status
        self._stage = _COMPLETE if response._head_only else _BODY
        self._deadline_s = response._total_at_s
        if self._uploading is not None and status >= 400:
            self._uploading.stop()  # the rest would be for nothing
        response._wake()

    def on_body(self, data: bytes) -> None:
        response = self._response
        if self._stage != _BODY or response is None:
            self._reusable = False
            return
        self._overhead_bytes = 0
        response._buffered_bytes += len(data)
        response._chunks.append(data)

    def on_chunk_header(self) -> None:
        self._chunk_ended = False

    def on_chunk_complete(self) -> None:
        self._chunk_ended = True

    def on_message_complete(self) -> None:
        self._chunk_ended = False
        if self._stage == _BODY:
            self._stage = _COMPLETE
            self._reusable = self._parser.should_keep_alive()
        elif self._stage == _HEAD and self._response is not None:
            self._response.headers.clear()  # a 1xx answer: the real one follows


def _ends_with_connection(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether the body has no other end than the connection's (RFC 9112, 6.3)."""
    coding = b",".join(value for name, value in headers if name == b"transfer-encoding")
    if coding:
        return coding.rpartition(b",")[2].strip().lower() != b"chunked"
    return not any(name == b"content-length" for name, _ in headers)


def _size(headers: list[tuple[bytes, bytes]]) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)


def _too_slow(url: str, response: Http1Response, stage: int, deadline_s: float) -> EngineTimeout:
    limits = response._timeouts
    if deadline_s >= response._total_at_s:
        return EngineTimeout(f"engine {url} did not finish its answer within {limits.total_s:g} s", stage="total")
    if stage == _HEAD:
        message = f"engine {url} did not begin its answer within {limits.first_byte_s:g} s"
        return EngineTimeout(message, stage="first_byte")
    return EngineTimeout(f"engine {url} sent nothing for {limits.idle_s:g} s", stage="idle")
