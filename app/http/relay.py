"""An engine's answer on its way to the client.

Every chunk goes out when it came in, byte for byte; the next one is read only when the server has
taken this one, so a slow client slows its own engine and nobody else. It must not know how an engine
is chosen or counted: it closes the `Answer` as soon as the engine's part is over, and whoever made
the relay closes it again in a `finally`, for the ways out that lead past here.

How an answer that is not complete ends:
- a stream: one event that says so, then a proper end. Clients read events, and would take a cut
  connection for a network fault of their own;
- anything else: no proper end, so that the client's HTTP library raises. There is no other place
  left to say it once the status is out; so the head waits for the first bytes of the body, and an
  answer of which none come is an error of its own.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from starlette.types import Send

from app.dispatch.answer import Answer, Outcome
from app.dispatch.work import EVENT, USAGE_BYTES, tokens_of
from app.errors import EngineBroke, EvenhandError, Headers, UpstreamError, error_event, message_error_event
from app.heads import LENGTH, Head, Repeated, lines_of
from app.http.headers import ClientHead
from app.http.ports import Wire
from app.http.sse import StreamTail
from app.metrics.figures import Served

log = logging.getLogger("evenhand.http")

DONE_PATHS = frozenset(("/v1/chat/completions", "/v1/completions"))
"""Here, and only here, a complete stream ends with `data: [DONE]` (OpenAI API reference, streaming)."""


MESSAGES = "/v1/messages"
"""Anthropic's: its clients go by the names of events."""


class AroundLength(NamedTuple):
    """The headers that a client gets of an engine's answer, as they are written before and behind the value of
    Content-Length; `before` None: not with a length."""

    before: bytes | None
    behind: bytes

    @classmethod
    def of(cls, status: int, head: Head) -> AroundLength:
        headers = ClientHead(status, head.headers, []).headers if 200 <= status <= 599 else []
        at = next((at for at, (name, _) in enumerate(headers) if name == LENGTH), None)
        if at is None:
            return cls(None, b"")
        return cls(lines_of(headers[:at]) + LENGTH + b": ", b"\r\n" + lines_of(headers[at + 1 :]))


class Relay:
    """One answer and what the client has of it so far.

    Args:
        served: is told of a stream's chunks.
        wire: used in place of `send` where the server has one: a chunk goes out in the turn in which it came.
        extra: headers of our own for the client, after the engine's.
        path: of the request, decoded.
    """

    __slots__ = ("_answer", "_extra", "_head", "_path", "_send", "_served", "_tail", "_wire", "started")

    def __init__(
        self, answer: Answer, send: Send, wire: Wire | None, served: Served, *, path: str, extra: Headers
    ) -> None:
        self._answer = answer
        self._served = served
        self._send = send
        self._wire = wire
        self._path = path
        self._extra = extra
        self._head: ClientHead | None = None
        self._tail: StreamTail | None = None  # of a stream
        self.started = False

    def __repr__(self) -> str:
        return f"<Relay {self._answer.url} started={self.started} {self._tail!r}>"

    async def run(self) -> Outcome:
        """Hand the whole answer on; on return the engine's side is closed.

        Raises:
            EngineBroke: its status can't be handed on.
            UpstreamError: it is no stream, and nothing of its body came. Of both nothing was sent yet.
        """
        answer = self._answer
        if not 200 <= answer.status <= 599:
            raise EngineBroke(f"The engine answered with status {answer.status}")
        self._head = head = ClientHead(answer.status, answer.headers, self._extra)
        if head.streaming:
            tail = self._tail = StreamTail()
            await self._start()
            return await self._stream(tail)
        whole = answer.whole()
        if whole is not None:
            size_bytes = len(whole)
            if answer.measured:
                answer.tokens = tokens_of(whole, size_bytes)
            if head.content_length in (None, size_bytes):
                self._served.bytes_out = size_bytes
                return await self._finish(whole)
        return await self._body(head.content_length)

    async def _start(self) -> None:
        head = self._head
        assert head is not None
        self.started = True
        self._served.status = self._answer.status
        if self._wire is not None:
            self._wire.start(self._answer.status, head.headers, head.content_length)
        else:
            await self._send({"type": "http.response.start", "status": self._answer.status, "headers": head.headers})

    @property
    def complete(self) -> bool:
        """Whether the client has all that an answer of this kind holds, though its end hasn't come."""
        return self._tail is not None and self._expects_done and self._tail.done

    @property
    def _expects_done(self) -> bool:
        head = self._head
        return (
            head is not None
            and head.streaming
            and not head.encoded
            and self._answer.status < 400
            and self._path in DONE_PATHS
        )

    async def _put(self, data: bytes, *, more: bool = True) -> None:
        wire = self._wire
        if wire is None:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        elif not wire.write(data, more=more) and more:
            await wire.drain()

    async def _stream(self, tail: StreamTail) -> Outcome:
        broke: EvenhandError | None = None
        served, answer = self._served, self._answer
        measured = answer.measured
        try:
            if self._wire is not None:
                write = self._wire.write

                def pass_on(chunk: bytes) -> bool:
                    if not served.chunks:
                        served.first_s = time.monotonic()
                    served.chunks += 1
                    served.bytes_out += len(chunk)
                    if measured:
                        answer.tokens += chunk.count(EVENT)
                    tail.feed(chunk)
                    return write(chunk, more=True)

                await self._answer.pipe(pass_on, self._wire.drain)
            else:
                while chunk := await self._answer.read():
                    if not served.chunks:
                        served.first_s = time.monotonic()
                    served.chunks += 1
                    served.bytes_out += len(chunk)
                    if measured:
                        answer.tokens += chunk.count(EVENT)
                    await self._put(chunk)
                    # Only now: a chunk whose send was interrupted never reached the client.
                    tail.feed(chunk)
        except UpstreamError as e:
            broke = e
        if broke is None and self._expects_done and not tail.done:
            broke = EngineBroke("The engine ended its stream before it was complete")
            self._answer.failed(broke)
        if broke is None or self.complete:
            return await self._finish()
        return await self._break(broke)

    async def _body(self, content_length: int | None) -> Outcome:
        read = self._answer.read
        left_bytes = -1 if content_length is None else content_length
        size, end = 0, b""
        try:
            while chunk := await read():
                size_bytes = len(chunk)
                left_bytes -= size_bytes
                self._served.bytes_out += size_bytes
                if self._answer.measured:
                    size, end = size + size_bytes, (end + chunk[-USAGE_BYTES:])[-USAGE_BYTES:]
                    self._answer.tokens = tokens_of(end, size)
                if left_bytes == 0:
                    await read()
                    return await self._finish(chunk)
                if not self.started:
                    await self._start()
                await self._put(chunk)
        except UpstreamError as e:
            if not self.started:
                raise
            return await self._break(e)
        if left_bytes > 0:
            short = EngineBroke("The engine's answer is shorter than its Content-Length")
            self._answer.failed(short)
            if not self.started:
                raise short
            return await self._break(short)
        return await self._finish()

    async def _finish(self, last: bytes = b"") -> Outcome:
        outcome = outcome_of(self._answer.status)
        # The last bytes leave after the release: a client that has its whole answer and asks again at once must not
        # meet its own old count.
        self._answer.close(outcome)
        if not self.started:
            await self._start()
        await self._put(last, more=False)
        return outcome

    async def _break(self, error: EvenhandError) -> Outcome:
        log.info("the answer of %s broke off: %s", self._answer.url, error.message)  # its request's line says so too
        self._served.reason = error.message
        self._answer.close(Outcome.ENGINE_ERROR)
        await self.end_early(error)
        return Outcome.ENGINE_ERROR

    async def end_early(self, error: EvenhandError) -> None:
        """End what the client has in the way that says that it is not all; see the module."""
        head = self._head
        if head is None or self._tail is None or head.encoded:
            if self._wire is not None:
                self._wire.break_off()
            return  # the server closes a connection whose answer was left without an end
        event = message_error_event if self._path.rstrip("/") == MESSAGES else error_event
        last = b"" if self.complete else self._tail.missing_newlines() + event(error)
        await self._put(last, more=False)


def relay_again(answer: Answer, headers: Repeated, wire: Wire, served: Served, identifier: bytes) -> Outcome | None:
    """Hand on, at once, an answer that has wholly come under a head that came before; None: it takes a `Relay`.

    Args:
        headers: the answer's.
        identifier: the request's id, the only header of our own that the client gets with it.
    """
    whole = answer.whole()
    if whole is None:
        return None
    status = answer.status
    written: AroundLength | None = headers.head.meaning
    if written is None:
        written = headers.head.meaning = AroundLength.of(status, headers.head)
    if written.before is None:
        return None
    size_bytes = len(whole)
    if answer.measured:
        answer.tokens = tokens_of(whole, size_bytes)
    outcome = outcome_of(status)
    answer.close(outcome)  # before the last bytes leave: see `Relay._finish`
    served.bytes_out, served.status = size_bytes, status
    lines = b"%b%d%bx-request-id: %b\r\n" % (written.before, size_bytes, written.behind, identifier)
    wire.answer(status, lines, whole)
    return outcome


def outcome_of(status: int) -> Outcome:
    """Of an answer that was handed on whole."""
    return Outcome.OK if status < 400 else Outcome.CLIENT_ERROR if status < 500 else Outcome.ENGINE_ERROR
