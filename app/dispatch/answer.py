"""What a use case takes and gives: the request for an engine, and the answer that holds a count."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from app.dispatch.breakers import speaks_against
from app.dispatch.work import work_of
from app.errors import Headers, UpstreamError
from app.store.ledger import Ticket
from app.upstream.transport import Drain, Response, Sink, Upload, pipe, whole

Broke = Callable[[str, UpstreamError], None]
"""Is told of the node whose answer ended before its end."""


class Outcome(StrEnum):
    """How a request ended. Only OK lets its latency into the node's window."""

    OK = "ok"
    CLIENT_ERROR = "client_error"
    ENGINE_ERROR = "engine_error"
    ABORTED = "aborted"


@dataclass(slots=True)
class EngineRequest:
    """One client request, ready for an engine.

    `path` holds the query string too; `headers` are cleaned of everything that concerns one hop or
    the client's own key; `body` is the client's, byte for byte, or else it comes by `upload`, which only a node that
    serves the request whole can take.
    """

    method: bytes
    path: bytes
    headers: Headers
    body: bytes
    model: str
    upload: Upload | None = None

    def having(self, *, headers: Headers | None = None, body: bytes | None = None) -> EngineRequest:
        """The same request with other headers, or another body."""
        return EngineRequest(
            self.method,
            self.path,
            self.headers if headers is None else headers,
            self.body if body is None else body,
            self.model,
            self.upload,
        )

    @property
    def spent(self) -> bool:
        """Whether it can't be sent again."""
        return self.upload is not None and self.upload.spent


@dataclass(slots=True)
class Whole:
    """An answer that has been read to its end; a `Response` like any other to those who relay it."""

    url: str
    status: int
    headers: Headers
    body: bytes = field(repr=False)
    _rest: bytes | None = field(default=None, repr=False)

    async def read(self) -> bytes:
        rest = self.body if self._rest is None else self._rest
        self._rest = b""
        return rest

    def whole(self) -> bytes | None:
        """As `transport.whole`."""
        return self.body if self._rest is None else None

    @property
    def first(self) -> bytes:
        """What it begins with: all of it."""
        return self.body

    def close(self) -> None:
        pass


def with_length(headers: Headers, length: int) -> Headers:
    """Of an answer that was read here, and may have another length now."""
    kept = [header for header in headers if header[0] not in (b"content-length", b"transfer-encoding")]
    return [*kept, (b"content-length", b"%d" % length)]


class Begun:
    """A response of which the `first` bytes have been read here already; until they are read again from here."""

    __slots__ = ("_response", "first", "headers", "status")

    def __init__(self, response: Response, first: bytes) -> None:
        self.status = response.status
        self.headers = response.headers
        self._response = response
        self.first = first

    async def read(self) -> bytes:
        return self._take() or await self._response.read()

    async def pipe(self, sink: Sink, drain: Drain) -> None:
        """As `Answer.pipe`."""
        if self.first and not sink(self._take()):
            await drain()
        await pipe(self._response, sink, drain)

    def _take(self) -> bytes:
        # An answer that takes an hour must not keep how it began: of one that can't be put right that is 64 MB.
        first, self.first = self.first, b""
        return first

    def close(self) -> None:
        self._response.close()


class Answer:
    """An engine's answer whose head has come. Whoever holds it must `close` it: that gives the counts back.

    `broke` is told of a node whose answer ends before its end. `request_bytes`: of the body that it answers; None where
    nothing is learned from it. `tokens`: what the answer has, as far as whoever relays it has seen; wanted only where
    it is `measured`.
    """

    __slots__ = (
        "_broke", "_broken", "_closed", "_request_bytes", "_response", "_tickets", "headers", "measured", "status",
        "tokens", "url",
    )  # fmt: skip

    def __init__(
        self,
        response: Response,
        url: str,
        tickets: Sequence[Ticket],
        broke: Broke | None = None,
        *,
        request_bytes: int | None = None,
    ) -> None:
        self.url = url
        self.tokens = 0.0
        self.measured = request_bytes is not None
        self._request_bytes = request_bytes
        self._broke = broke
        self._broken = False
        self._closed = False
        self.status = response.status
        self.headers = response.headers
        self._response = response
        self._tickets = tickets

    async def read(self) -> bytes:
        """The next bytes as they came, b"" at the proper end. Raises UpstreamError."""
        try:
            return await self._response.read()
        except UpstreamError as e:
            self.failed(e)
            raise

    def whole(self) -> bytes | None:
        """All of the body if it has come to its end and none was read; it stays to be read."""
        return whole(self._response)

    async def pipe(self, sink: Sink, drain: Drain) -> None:
        """Hand all that comes to `sink`, in the turn in which it comes; return at the proper end.

        Raises UpstreamError, as `read`.
        """
        try:
            await pipe(self._response, sink, drain)
        except UpstreamError as e:
            self.failed(e)
            raise

    def failed(self, error: UpstreamError) -> None:
        """The answer is not what its engine meant to say: it broke off."""
        self._broken = True
        if self._broke is not None:
            self._broke(self.url, error)

    def close(self, outcome: Outcome) -> None:
        """End the engine's side (aborting it where it is not at its end) and release. Once, at once."""
        if self._closed:
            return
        self._closed = True
        # What speaks against the node was counted when the head came: the release must not take it back.
        failed = self._broken or (self.status >= 500 and speaks_against(self.status))
        answered = outcome is not Outcome.ABORTED and not failed
        work = None if self._request_bytes is None else work_of(self._request_bytes, self.tokens)
        try:
            self._response.close()
        finally:
            for ticket in self._tickets:
                ticket.release(succeeded=outcome is Outcome.OK, answered=answered, work=work)


class Held(Protocol):
    """The node or nodes that one request has been counted on, before it is sent."""

    @property
    def url(self) -> str:
        """The node that will answer."""
        ...

    async def send(self, request: EngineRequest) -> Answer:
        """Send the request; gives every count back where that fails. At most once."""
        ...

    def give_back(self) -> None:
        """Uncount what is still counted; may be called more than once."""
        ...


class Server(Protocol):
    """A use case that serves a request whole."""

    async def open(self, request: EngineRequest, *, retry_500: bool = True) -> Answer:
        """Count the request, send it, at as many nodes as it takes, and return when the answer's head has come.

        Args:
            retry_500: whether another node is tried after a 500.

        Raises:
            ModelNotFound, NoNodeAvailable: nobody can serve it.
            UpstreamError: the last engine could not be reached or did not answer in time.
        """
        ...


class Taker(Protocol):
    """A use case in two steps, for those who need to know the node before they send."""

    async def take_among(self, model: str, urls: Collection[str], *, only: str | None = None) -> Held:
        """Count a request for `model` on one of `urls`; on the node `only` if it is still a candidate.

        Raises:
            ModelNotFound, NoNodeAvailable: none of them can serve it.
        """
        ...
