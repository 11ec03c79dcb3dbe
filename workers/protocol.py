"""uvicorn's HTTP/1.1 protocol with limits on what one client may hold, an end to keep-alive while the server stops, and
an answer to those who offer an upgrade or have ended their side of the connection.

Owns one connection and what its client may do on it. Overrides uvicorn's callbacks where they cost a request most;
uvicorn is pinned in the lock files.
"""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from app.errors import BadRequest, EvenhandError, ShuttingDown, error_answer
from app.heads import Head, is_to_be_kept
from workers.cycle import Cycle
from workers.half_closed import HalfClosed, has_ended, may_have_ended
from workers.listener import Share
from workers.patience import Kind, Owed, Patience
from workers.pieces import Pieces
from workers.request_head import HEAD_LIMIT_BYTES, HEADERS_LIMIT, HeadTooLarge, fault_of

PIPELINED_AT_ONCE = 16  # requests of one connection that are read ahead; more wait in the socket
# One read may hold thousands, each of them a task and a timer to come: what is beyond is not served.
PIPELINED_AT_MOST = 256
LOOK_EVERY_S = 0.25  # behind what is not read the client's departure shows only to those who look
CHUNK_OVERHEAD_BYTES = 16  # that a chunk may cost without counting towards what surrounds a body
# After a refusal what the client still sends is read and dropped for this long: a close over unread bytes is a reset,
# which takes the refusal away from it before it was read.
LAST_READ_S = 1.0

_ASGI: Any = {"version": "3.0", "spec_version": "2.3"}


class ClientTooSlow(EvenhandError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class Flow(FlowControl):
    """uvicorn's, which reads no further while requests that wait are enough."""

    enough = False

    def resume_reading(self) -> None:
        if self.read_paused and not self.enough:
            self.read_paused = False
            self._transport.resume_reading()


class Shared(ServerState):
    """uvicorn's state that all connections of a worker share, and ours.

    `share`: of the worker in new connections; `stopping`: none is kept alive any more; `client_timeout_s`: how long a
    client may owe something, 0 = for ever; `expect`: the app's, to be called where what is read begins a task.
    """

    def __init__(self, share: Share | None = None) -> None:
        super().__init__()
        self.share = share
        self.stopping = False
        self.client_timeout_s = 0.0
        self.expect: Callable[[], None] = lambda: None


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with limits on what one client may hold, an end to keep-alive while the server stops,
    and an answer to those who offer an upgrade or have ended their side of the connection.

    Java's HttpClient, among others, offers h2c with its first request. httptools takes every offer as accepted
    and skips the body, so such a POST would arrive empty: it is read again without the offer.
    """

    server_state: Shared
    flow: Flow
    cycle: Cycle  # type: ignore[assignment]  # in the place of uvicorn's; None before the first request
    pipeline: deque[tuple[Cycle, Any]]  # type: ignore[assignment]
    _cycles: Sequence[Cycle] = ()  # running and waiting, in order
    _in_head = True
    _begun = False  # the head that is being read
    _heads = 0  # complete ones seen on this connection
    _received_bytes = 0  # on this connection
    _read_from_bytes = 0  # of these, before the latest read
    _head_from_bytes = 0  # and before the one in which the latest head began
    _body_bytes = 0  # of this connection
    _overhead_bytes = 0  # received since the last head, body's end or refusal, and no part of a body
    _pauses = 0  # how often the client was too slow in reading
    _idle = False  # between two requests
    _idle_since = 0.0  # time.monotonic()
    _half_closed: HalfClosed | None = None
    _said_all = False  # the client has ended its side
    _looking = False  # whether the client has left behind what is not read
    _fault: EvenhandError | None = None  # why a callback has ended the parsing
    _refusal: EvenhandError | None = None  # to be told once the answers before it are out
    _patience: Patience | None = None
    _head: Head | None = None  # that came last and may come again
    _scope: Any = None  # of its request
    _strange_heads = 0  # kept in vain
    _may_come_again = False  # the latest head, as far as the parser tells
    _left_bytes = 0  # of a body that is read past the parser

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Flow(transport)
        if self.scheme == "https":
            transport.set_write_buffer_limits(HIGH_WATER_LIMIT)  # as without TLS, which is not the event loop's default
        self._patience = Patience(self.loop, self.server_state.client_timeout_s, self._owed, self._give_up)

    def data_received(self, data: bytes) -> None:
        self._idle = False
        if self._refusal is not None:
            return
        if self._left_bytes:
            self._read_body(data)
            return
        heads, bodies, before = self._heads, self._body_bytes, self._in_head
        at_boundary = before and not self._begun
        if at_boundary and self._head is not None and self._read_head_again(data, self._head):
            return
        size_bytes = len(data)
        self._read_from_bytes = self._received_bytes
        self._received_bytes += size_bytes
        self._overhead_bytes += size_bytes
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as e:
            self._read_without_upgrade(data[e.args[0] :])
        except httptools.HttpParserError:
            # `_fault` has named it where the rule is ours and not the parser's.
            self._refuse(self._fault or BadRequest("the request is not valid HTTP/1.1"))
        if at_boundary and self._heads == heads + 1 and is_to_be_kept(self._strange_heads, self._heads):
            self._keep_head(data)
        if heads != self._heads or before != self._in_head:
            # Something ended in this read, so that not all of it belongs to what is still open.
            self._overhead_bytes = 0
            return
        # Never below 0: many small chunks earn no credit for a long trailer.
        self._overhead_bytes = max(0, self._overhead_bytes - (self._body_bytes - bodies))
        if self._overhead_bytes > HEAD_LIMIT_BYTES:
            what = "the request's chunk sizes and trailers are too long"
            self._refuse(HeadTooLarge() if self._in_head else BadRequest(what))

    # --- a head that came before

    def _keep_head(self, data: bytes) -> None:
        """`data` began with the head of the latest request: remember it, if it is one to be found again."""
        cycle = self.cycle
        if self._refusal is not None or not self._may_come_again:
            return
        head = Head.begins(data, cycle.scope["headers"])
        if head is not None:
            self._strange_heads += 1
            self._head = head
            self._scope = cycle.scope.copy()
            del self._scope["extensions"]  # they hold the request

    def _read_head_again(self, data: bytes, head: Head) -> bool:
        """Take a request that begins with the head of the one before, past the parser; False: it is for the parser."""
        if not self.cycle.response_complete:
            return False
        headers = head.of(data)
        if headers is None:
            return False
        self._strange_heads = 0
        scope = self._scope.copy()
        scope["headers"] = headers
        scope["state"] = self.app_state.copy()
        self.scope = scope
        cycle = self.cycle = Cycle(self, keep_alive=not self.server_state.stopping, expected=None)
        self._heads += 1
        self._overhead_bytes = 0
        self._cycles = (cycle,)
        self._start_asgi_task(cycle, self.app)
        self.server_state.expect()
        if len(data) - headers.end == headers.length:
            self._body_bytes += headers.length
            cycle.body, cycle.more_body = data[headers.end :], False
            cycle.set()
        else:
            self._left_bytes = headers.length
            self._in_head = False
            self._read_body(memoryview(data)[headers.end :])  # copied once all of it is there
        return True

    def _read_body(self, data: bytes | memoryview) -> None:
        """What follows a head that came before; behind the body's end the next request begins."""
        left = self._left_bytes
        rest = b""
        if len(data) > left:
            data, rest = data[:left], bytes(data[left:])
        self._left_bytes = left = left - len(data)
        if data:
            self._take(data)
        if not left:
            self._end_body()
            if rest:
                self.data_received(rest)

    # --- what the parser says, inside data_received

    def _stop(self, fault: EvenhandError) -> None:
        """End the parsing: whatever a callback raises becomes an HttpParserError."""
        self._fault = fault
        raise ValueError(fault.message)

    def on_message_begin(self) -> None:
        self._begun = True
        self._head_from_bytes = self._read_from_bytes
        self.url = b""
        self.headers = []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer; among the headers it would get past every filter in front of us
        headers = self.headers
        if len(headers) >= HEADERS_LIMIT:
            self._stop(HeadTooLarge())
        headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self.parser
        if parser.should_upgrade():
            return
        headers = self.headers
        # Of what has come most may be body: only then it is counted.
        if self._received_bytes - self._head_from_bytes > HEAD_LIMIT_BYTES < _size_of(self.url, headers):
            self._stop(HeadTooLarge())
        version = parser.get_http_version()
        named = dict(headers)
        if fault := fault_of(version, self.url, headers, named):
            self._stop(fault)
        waiting = self._cycles
        if waiting:
            waiting = [cycle for cycle in waiting if not cycle.response_complete]
            if len(waiting) >= PIPELINED_AT_MOST:
                self._stop(BadRequest(f"more than {PIPELINED_AT_MOST} requests at once on one connection"))
        raw_path, query = _split(self.url)
        path = raw_path.decode("ascii")
        self.scope = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme or "http",
            "method": parser.get_method().decode("ascii"),
            "root_path": "",
            "path": urllib.parse.unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": headers,
            "state": self.app_state.copy(),
        }
        expected = named.get(b"expect")
        keep_alive = version != "1.0" and parser.should_keep_alive()
        self._may_come_again = keep_alive and expected is None
        keep_alive = keep_alive and not self.server_state.stopping
        self.cycle = cycle = Cycle(self, keep_alive=keep_alive, expected=expected)
        self._in_head = self._begun = False
        self._heads += 1
        self._cycles = [*waiting, cycle]
        if not waiting:
            self._start_asgi_task(cycle, self.app)
            self.server_state.expect()
            return
        cycle.room_bytes = HIGH_WATER_LIMIT
        self.pipeline.appendleft((cycle, self.app))
        if len(waiting) >= PIPELINED_AT_ONCE:
            self._read_no_further()

    def _start_asgi_task(self, cycle: Cycle, app: Any) -> None:  # type: ignore[override]
        task = cycle.task = self.loop.create_task(cycle.run(app, self.tasks))
        self.tasks.add(task)

    def on_chunk_header(self) -> None:
        self._overhead_bytes -= CHUNK_OVERHEAD_BYTES

    def on_body(self, body: bytes) -> None:
        if not self.parser.should_upgrade():
            self._take(body)

    def _take(self, body: bytes | memoryview) -> None:
        self._body_bytes += len(body)
        cycle = self.cycle
        if cycle.response_complete:
            return
        held = cycle.body
        if not held:
            cycle.body = held = body
        else:
            if not isinstance(held, Pieces):
                cycle.body = held = Pieces(held)
            held.add(body)
        if len(held) > cycle.room_bytes:
            if self.pipeline:
                self._read_no_further()
            else:
                self.flow.pause_reading()  # until it is taken
                self._look_later()
        elif cycle.gathers:
            return
        cycle.set()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._end_body()

    def _end_body(self) -> None:
        self._in_head = True
        cycle = self.cycle
        if not cycle.response_complete:
            cycle.more_body = False
            cycle.set()
        else:
            self._be_idle()  # the answer, a refusal, did not wait for this

    def _read_no_further(self) -> None:
        self.flow.enough = True
        self.flow.pause_reading()
        self._look_later()

    def _look_later(self) -> None:
        if not self._looking:
            self._looking = True
            self.loop.call_later(LOOK_EVERY_S, self._look_for_departure)

    @property
    def _body_waits(self) -> bool:
        """Whether the client's body is not read on because nobody has taken what has come of it."""
        return self.flow.read_paused and not self._in_head

    def _is_enough(self) -> bool:
        """Whether what waits is as much as is read ahead."""
        waiting = len(self.pipeline)
        return waiting >= PIPELINED_AT_ONCE or (waiting > 0 and len(self.cycle.body) > HIGH_WATER_LIMIT)

    # --- the end of a connection

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection where whole requests wait for an answer whose head is still to come.

        Elsewhere the client counts as gone, as it does for uvicorn: in mid-body of its request or of its answer,
        and in HTTP/1.0, which has no interim answers to find out by. TLS never comes here half-closed.
        """
        if self.scheme == "https" or not self._may_send_interim():
            return False
        if self._refusal is None:  # which ends the connection, behind the answers before it
            if self.cycle.more_body:
                return False
            self.cycle.keep_alive = False
        self._said_all = True
        self._find_out()
        return True

    def _look_for_departure(self) -> None:
        """What `eof_received` does, while nothing is read: it comes only behind the last byte."""
        waits = self.flow.enough or self._body_waits
        self._looking = waits and self._half_closed is None and not self.transport.is_closing()
        if not self._looking:
            return
        ended, may_ask = has_ended(self.transport), self._may_send_interim()
        if ended and (self.scheme == "https" or not may_ask):
            self.transport.abort()
            return
        # Behind a body much is unread as a rule, and a proxy that is busy sending one may not expect to be asked.
        if may_ask and (ended or (self.flow.enough and may_have_ended(self.transport))):
            self._find_out()
        self.loop.call_later(LOOK_EVERY_S, self._look_for_departure)

    def _find_out(self) -> None:
        if self._half_closed is None:
            self._half_closed = HalfClosed(
                self.loop, self.transport, may_probe=self._may_send_interim, in_doubt=self._is_in_doubt
            )

    def _is_in_doubt(self) -> bool:
        if self._said_all or self.flow.enough or self._body_waits:
            return True
        self._half_closed = None  # it is there, and what it sends is read again
        return False

    def _running(self) -> Cycle | None:
        return next((cycle for cycle in self._cycles if not cycle.response_complete), None)

    def _may_send_interim(self) -> bool:
        cycle = self._running()
        if cycle is None or cycle.disconnected or cycle.response_started:
            return False
        return bool(cycle.scope["http_version"] == "1.1")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._patience is not None:
            self._patience.end()
        self._tell_of_departure()
        self._unset_keepalive_if_required()  # uvicorn leaves it to one that was reset, and all that it holds with it
        super().connection_lost(exc)
        share = self.server_state.share
        if share is not None:
            share.ended()

    def _tell_of_departure(self) -> None:
        # uvicorn tells only the latest request; the one that runs is the first of a pipeline.
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.depart()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            if self.pipeline:
                cycle, app = self.pipeline.pop()
                self.flow.enough = self._is_enough()
                self._start_asgi_task(cycle, app)
            else:
                self._be_idle()
            if self.flow.read_paused:
                self.flow.resume_reading()
        if self._refusal is not None:
            self._refuse_in_turn()

    def _be_idle(self) -> None:
        self._idle, self._idle_since = True, time.monotonic()
        if self.timeout_keep_alive_task is None:
            self._wait_for_next_request(self.timeout_keep_alive)

    def _wait_for_next_request(self, seconds: float) -> None:
        # Not moved by each request, which would cost it a timer: looked at when its time has come.
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self._look_whether_idle)

    def _look_whether_idle(self) -> None:
        self.timeout_keep_alive_task = None
        # Not by `_idle`: an empty line behind an answer ends that, and begins nothing.
        if self._begun or not self._in_head or self._running() is not None:
            return  # the end of what runs starts it again
        left_s = self._idle_since + self.timeout_keep_alive - time.monotonic()
        if left_s > 0:
            self._wait_for_next_request(left_s)
        elif not self.transport.is_closing():
            self.transport.close()

    def wind_down(self, *, idle_before: float, heads: bool) -> None:
        """Let this connection end with the answer that runs on it; what runs is not touched.

        Args:
            heads: whether what has begun to be a request, or is a connection without any, ends too.
        """
        if self._refusal is not None:
            return  # it ends the connection, and closed at once it would be lost
        if self.transport.is_closing():
            return  # a TLS transport of asyncio that is closed twice can't be aborted any more
        if self.cycle is None or self.cycle.response_complete:
            if not self._begun:
                # Who has connected and sent nothing yet is about to: it waits as long as half a head.
                if self._idle_since <= idle_before if self._heads else heads:
                    self.transport.close()
            elif heads:
                self._refuse(ShuttingDown("This worker is stopping"))
        elif not self.cycle.response_started:
            # The client reads `Connection: close`. Once the head is out it can't, and a close right after the
            # body would race with its next request: such a connection is closed when it has been idle.
            self.cycle.keep_alive = False

    # --- clients that do not get on

    def pause_writing(self) -> None:
        self._pauses += 1
        super().pause_writing()

    def _owed(self) -> Owed | None:
        unsent_bytes = self.transport.get_write_buffer_size()
        if self.flow.write_paused or (self.transport.is_closing() and unsent_bytes):
            return Owed(Kind.ANSWER, self._pauses, -unsent_bytes - _in_kernel(self.transport))
        if self.flow.read_paused or self._refusal is not None or self.transport.is_closing():
            return None
        if not self._in_head:
            return Owed(Kind.BODY, self._heads, self._body_bytes)
        # Between two requests uvicorn's keep-alive timer runs, until the first byte of the next one.
        idle = self._idle or self._running() is not None
        return Owed(Kind.HEAD, self._heads) if self._begun or not idle else None

    def _give_up(self, owed: Owed) -> None:
        if owed.kind is Kind.ANSWER:
            self.transport.abort()  # close() would wait until the rest is read
        elif owed.kind is Kind.HEAD and not self._begun:
            self.transport.close()
        else:
            self._refuse(ClientTooSlow(f"{owed.kind.value} did not come in time (--client-timeout-s)"))

    # --- refusals

    def _read_without_upgrade(self, rest: bytes) -> None:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self._refuse(BadRequest("CONNECT is not served"))
            return
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                kept = [t for t in value.split(b",") if t.strip().lower() not in (b"upgrade", b"http2-settings")]
                lines.append(b"connection: " + b",".join(kept))
            elif name not in (b"upgrade", b"http2-settings"):
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", b""]) + rest)

    def _refuse(self, error: EvenhandError) -> None:
        """Say what is wrong with what the client sent last, and serve it no more.

        An answer that is under way to an earlier request is not disturbed: the refusal comes after it.
        """
        if self._refusal is None and not self.transport.is_closing():
            self._refusal = error
            self.flow.enough = False
            self.flow.resume_reading()  # what still comes is dropped
            self._refuse_in_turn()

    def _refuse_in_turn(self) -> None:
        running = self._running()
        broken = self.cycle if not self._in_head else None
        if self._refusal is None or self.transport.is_closing() or (running is not None and running is not broken):
            return
        self._unset_keepalive_if_required()
        if broken is not None and broken.response_started:
            self.transport.close()  # it has its answer, or a part of it: there is no place left to say more
            return
        self._tell_of_departure()
        status, headers, body = error_answer(self._refusal)
        lines = [STATUS_LINE[status], *(b"%s: %s\r\n" % header for header in headers)]
        self.transport.write(b"".join([*lines, b"connection: close\r\n\r\n", body]))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LAST_READ_S, self.transport.close)


def _size_of(url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> int:
    return len(url) + sum(len(name) + len(value) + 4 for name, value in headers)


def _split(url: bytes) -> tuple[bytes, bytes]:
    """Path and query of a request's target. Raises ValueError: it has no path."""
    if url.startswith(b"/") and b"#" not in url:
        path, _, query = url.partition(b"?")
        return path, query
    parsed = httptools.parse_url(url)
    if parsed.path is None:
        raise ValueError("a target without a path")
    return parsed.path, parsed.query or b""


def _in_kernel(transport: asyncio.Transport) -> int:
    """Bytes that the system holds because the client has not taken them; 0 where it does not say.

    They may be megabytes, and it asks for more only when a third of them has gone.
    """
    try:
        count = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, AttributeError):
        return 0
    return int.from_bytes(count, sys.byteorder)
