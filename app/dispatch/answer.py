"""What a use case takes and gives: the request for an engine, and the answer that holds a count."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from app.store.ledger import Ticket
from app.upstream.transport import Response


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
    the client's own key; `body` is the client's, byte for byte.
    """

    method: bytes
    path: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    model: str


class Answer:
    """An engine's answer whose head has come. Whoever holds it must `close` it: that gives the count back."""

    __slots__ = ("_response", "_ticket", "headers", "status")

    def __init__(self, response: Response, ticket: Ticket) -> None:
        self.status = response.status
        self.headers = response.headers
        self._response = response
        self._ticket = ticket

    @property
    def url(self) -> str:
        return self._ticket.url

    async def read(self) -> bytes:
        """The next bytes as they came, b"" at the proper end. Raises UpstreamError."""
        return await self._response.read()

    def close(self, outcome: Outcome) -> None:
        """End the engine's side (aborting it where it is not at its end) and release. Once, at once."""
        try:
            self._response.close()
        finally:
            self._ticket.release(succeeded=outcome is Outcome.OK)
