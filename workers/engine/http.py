"""One connection of the simulated engine: framing, pacing, scripted faults, and the record of each request.

What is said comes from `answers`, who listens is `server`. A raw asyncio.Protocol with no task
per request, so that it can stand in for an engine of zero latency in measurements.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Literal, cast

import httptools

from workers.engine.answers import Answer, Gate, Knobs

if TYPE_CHECKING:
    from workers.engine.server import Engine

Ending = Literal["proper", "close", "reset", "stall"]

WRITE_BYTES = 65536  # one write: what a full socket can hold up, at most
RESET_DELAY_S = 0.005  # before a scripted reset, so that what was written is on the other side
NOTHING = memoryview(b"")
NO_BODY = (204, 304)
REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}


@dataclass(slots=True, eq=False)
class Record:
    """One request, as the engine saw it. Instants are `time.monotonic()`, comparable over processes of a host."""

    method: str
    path: str  # with the query
    headers: list[tuple[bytes, bytes]]  # as received, order and case kept
    body: bytes
    connection: int  # number of the connection, and
    nth: int  # of the request on it, both from 1
    started_s: float
    id: str = ""  # x-request-id
    status: int = 0
    first_byte_s: float | None = None
    finished_s: float | None = None  # the engine ended it, properly or by its script
    aborted_s: float | None = None  # the client went away while it ran
    chunk_s: list[float] = field(default_factory=list)  # when each chunk was begun to be written
    sent_bytes: int = 0

    def header(self, name: bytes) -> bytes | None:
        """The first value of `name` (any case), if it came."""
        return next((value for key, value in self.headers if key.lower() == name.lower()), None)

    @property
    def running(self) -> bool:
        return self.finished_s is None and self.aborted_s is None


@dataclass(frozen=True, slots=True)
class Made:
    """An answer as bytes. Without a head nothing is sent at all."""

    status: int
    head: bytes
    pieces: list[bytes]
    ending: Ending
    keep_alive: bool
    first_s: float
    gap_s: float
    gate: Gate | None = None


@dataclass(slots=True)
class Play:
    """An answer on its way out: `pieces` at their times, then `ending`."""

    record: Record
    pieces: list[bytes]
    ending: Ending
    due_s: float  # of the next piece
    gap_s: float
    keep_alive: bool
    gated: bool = False  # nothing but the head goes out
    next: int = 0
    pending: memoryview = NOTHING

    @property
    def last(self) -> bool:
        return self.next >= len(self.pieces)


class Connection(asyncio.Protocol):
    """One client connection: requests are answered one after the other, in the order they came."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._number = 0
        self._served = 0
        self._waiting: deque[tuple[Record, bool]] = deque()
        self._play: Play | None = None
        self._timer: asyncio.Handle | None = None
        self._idle_timer: asyncio.TimerHandle | None = None
        self._can_write = True
        self._in_message = False
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no asyncio class
        self._engine.connections.add(self)
        self._engine.stats.connections += 1
        self._engine.stats.accepted += 1
        self._number = self._engine.stats.accepted
        if self._engine.knobs.reset_on_accept:
            self.reset()

    def data_received(self, data: bytes) -> None:
        self._stop_idling()
        if self._transport is None or self._transport.is_closing():
            return
        how = self._engine.knobs.close_on_request
        if how and self._served and self._play is None and not self._in_message:
            self._engine.stats.dropped += 1
            self.reset() if how == "rst" else self._transport.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._transport.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self._transport.close()

    def eof_received(self) -> bool:
        # A client that will send no more has left: engines take a half-closed connection for a lost one.
        # abort, not close: close would first wait until a client that has left reads what is buffered.
        self._leave()
        if self._transport is not None:
            self._transport.abort()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._engine.connections.discard(self)
        self._engine.stats.connections -= 1
        self._transport = None

    def pause_writing(self) -> None:
        self._can_write = False

    def resume_writing(self) -> None:
        self._can_write = True
        if self._timer is None:
            self._go_on()

    # --- httptools

    def on_message_begin(self) -> None:
        self._in_message = True
        self._url, self._headers, self._body = b"", [], []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._transport is not None and any(name.lower() == b"expect" for name, _ in self._headers):
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        self._served += 1
        record = Record(
            method=self._parser.get_method().decode("latin-1"),
            path=self._url.decode("latin-1"),
            headers=self._headers,
            body=self._body[0] if len(self._body) == 1 else b"".join(self._body),
            connection=self._number,
            nth=self._served,
            started_s=time.monotonic(),
        )
        record.id = (record.header(b"x-request-id") or b"").decode("latin-1")
        keep_alive = self._parser.should_keep_alive()
        if self._play is None:
            self._begin(record, keep_alive)
            self._go_on()
        else:
            self._waiting.append((record, keep_alive))

    # --- playing an answer

    def _begin(self, record: Record, keep_alive: bool) -> None:
        engine, knobs = self._engine, self._engine.knobs
        engine.begin(record)
        struck = engine.struck(record)
        if knobs.blackhole and struck:
            self._play = Play(record, [], "stall", record.started_s, 0.0, keep_alive)
            return
        made = engine.remembered(record, keep_alive)
        if made is None:
            answer = engine.answer(record)
            faulty = struck and record.method == "POST" and answer.status == 200
            made = wire(answer, knobs, record.method, keep_alive, faulty=faulty)
            engine.remember(record, keep_alive, made)
        record.status = made.status
        pieces = made.pieces
        if knobs.head_first and made.head:
            assert self._transport is not None
            record.first_byte_s = time.monotonic()
            self._transport.write(made.head)
        elif made.head:
            pieces = [made.head + pieces[0], *pieces[1:]] if pieces else [made.head]
        due_s = record.started_s + made.first_s
        self._play = play = Play(record, pieces, made.ending, due_s, made.gap_s, made.keep_alive)
        if made.gate is not None:
            play.gated = True
            # Not at once: who opens it has bytes of its own to write first.
            made.gate.when_open(partial(self._loop.call_soon, self._pass_gate, play, made.first_s))

    def _pass_gate(self, play: Play, first_s: float) -> None:
        play.gated = False
        play.due_s = time.monotonic() + first_s
        if self._play is play and self._timer is None:
            self._go_on()

    def _go_on(self) -> None:
        """Write all that is due; come back by timer, by resume_writing, by a gate, or never (stall)."""
        self._timer = None
        while (play := self._play) is not None and self._transport is not None and not play.gated:
            if play.pending:
                # A transport whose write failed takes and drops the rest; connection_lost follows.
                if not self._can_write or self._transport.is_closing():
                    return
                self._write_slice(play)
                if self._engine.knobs.frag_bytes and (play.pending or not play.last):
                    return self._come_back(self._engine.knobs.frag_gap_s)
            elif (wait_s := play.due_s - time.monotonic()) > 0.0 and not (play.last and play.pieces):
                return self._come_back(wait_s)
            elif not play.last:
                play.pending = memoryview(play.pieces[play.next])
                play.next += 1
                play.due_s += play.gap_s
                play.record.chunk_s.append(time.monotonic())
            elif play.ending == "stall":
                return
            elif play.ending == "reset":
                self._timer = self._loop.call_later(RESET_DELAY_S, self._reset_once_written)
                return
            else:
                self._end(play)

    def _come_back(self, delay_s: float) -> None:
        self._timer = self._loop.call_later(delay_s, self._go_on) if delay_s else self._loop.call_soon(self._go_on)

    def _write_slice(self, play: Play) -> None:
        assert self._transport is not None
        size = self._engine.knobs.frag_bytes or WRITE_BYTES
        piece, play.pending = play.pending[:size], play.pending[size:]
        record = play.record
        if record.first_byte_s is None:
            record.first_byte_s = time.monotonic()
        record.sent_bytes += len(piece)
        if not play.pending and play.last and play.ending == "proper":
            self._engine.end(record)  # before the client can know that its answer is complete
        self._transport.write(piece)

    def _end(self, play: Play) -> None:
        assert self._transport is not None
        self._engine.end(play.record)
        self._play = None
        if play.ending == "close" or not play.keep_alive or not self._engine.listening:
            self._transport.close()
        elif self._waiting:
            self._begin(*self._waiting.popleft())
        elif self._engine.knobs.idle_close_s is not None:
            self._idle_timer = self._loop.call_later(self._engine.knobs.idle_close_s, self._transport.close)

    def _reset_once_written(self) -> None:
        if self._transport is not None and self._transport.get_write_buffer_size():
            self._timer = self._loop.call_later(RESET_DELAY_S, self._reset_once_written)
        else:
            self.reset()

    def reset(self) -> None:
        """End the connection by a TCP reset, whatever runs on it."""
        if self._transport is None:
            return
        if self._play is not None:
            self._engine.end(self._play.record)
        raw = self._transport.get_extra_info("socket")
        if raw is not None and raw.fileno() != -1:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def close_if_idle(self) -> None:
        if self._transport is not None and self._play is None and not self._in_message:
            self._transport.close()

    def _leave(self) -> None:
        """The client is gone: what runs for it is aborted, what waits is never begun."""
        self._stop_idling()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waiting.clear()
        if self._play is not None:
            self._engine.end(self._play.record, aborted=True)
            self._play = None

    def _stop_idling(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None


def wire(answer: Answer, knobs: Knobs, method: str, keep_alive: bool, *, faulty: bool) -> Made:
    """`answer` as bytes, framed, and cut short where the script says so (`faulty`)."""
    bodiless = method == "HEAD" or answer.status in NO_BODY
    framing = knobs.framing or ("chunked" if answer.stream else "length")
    k, ending = scripted_end(knobs) if faulty else (None, "proper")
    if k is not None and ending == "proper" and (k < 0 or framing == "length"):
        ending = "close"  # no terminator can say "this is the end" here
    if k is not None and k < 0:
        return Made(answer.status, b"", [], ending, False, answer.first_s, 0.0)

    pieces, tail = answer.pieces, answer.tail
    if k is not None:
        tail = []
        pieces = pieces[:k] if answer.stream else [pieces[0][: len(pieces[0]) // 2]] if k else []
    if bodiless:
        pieces, tail = [], []
    headers = answer.headers
    if framing == "chunked" and not bodiless:
        headers = [*headers, (b"transfer-encoding", b"chunked")]
        pieces, tail = [chunked(p) for p in pieces], [chunked(p) for p in tail]
        if ending == "proper":
            tail.append(b"0\r\n\r\n")
    elif framing == "length" and answer.status not in NO_BODY:
        headers = [*headers, (b"content-length", b"%d" % sum(map(len, answer.pieces + answer.tail)))]
    keep_alive = keep_alive and framing != "close"
    if not keep_alive:
        headers = [*headers, (b"connection", b"close")]
    if pieces:
        pieces[-1] += b"".join(tail)
    elif tail:
        pieces = [b"".join(tail)]
    if not answer.gap_s and len(pieces) > 1:
        pieces = [b"".join(pieces)]  # nothing to pace: one write is cheaper than many
    head = head_of(answer.status, headers)
    return Made(answer.status, head, pieces, ending, keep_alive, answer.first_s, answer.gap_s, answer.gate)


def scripted_end(knobs: Knobs) -> tuple[int | None, Ending]:
    """After how many chunks an answer ends early, and how; (None, "proper") where it does not."""
    if knobs.cut_after is not None:
        return knobs.cut_after, "reset"
    if knobs.eof_after is not None:
        return knobs.eof_after, knobs.eof_how
    if knobs.stall_after is not None:
        return knobs.stall_after, "stall"
    return None, "proper"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def head_of(status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
    lines = [b"HTTP/1.1 %d %b\r\nserver: evenhand-sim\r\n" % (status, REASONS.get(status, b"Scripted"))]
    lines += [b"%b: %b\r\n" % pair for pair in headers]
    lines.append(b"\r\n")
    return b"".join(lines)
