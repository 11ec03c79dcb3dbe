"""Sending a request to a chosen node: its address, its key, and what a refusal means for the registry."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from enum import Enum

from app import journey as journeys
from app.dispatch.answer import EngineRequest, Whole, with_length
from app.dispatch.breakers import Breakers, speaks_against
from app.errors import EngineProtocolError, EngineRefused, Headers, UpstreamError
from app.heads import with_header
from app.store.registry import Registry
from app.upstream.transport import Response, Target, Timeouts, Transport, whole

CANCELLED = "cancelled"
"""The error of a leg that nobody waits for any more."""
IDENTITY = (b"accept-encoding", b"identity")
REFUSAL_LIMIT_BYTES = 2**20
REFUSAL_S = 5.0
"""For the body of an answer of 400 and more, which engines send with its head: its status says what to do."""


def uncompressed(request: EngineRequest) -> EngineRequest:
    """The request for an answer that is read here: the client's wish for a compressed one is not passed on."""
    return request.having(headers=with_header(request.headers, *IDENTITY))


class AnswerTooLong(EngineProtocolError):
    """A body over the limit of whoever asked: it would be as long the next time."""


class Leg(Enum):
    """Which part of a request a call is: each has time limits of its own.

    WHOLE also is decode after prefill; BESIDE_PREFILL is decode while prefill still computes, whose first
    byte is waited for from prefill's end on, by who knows when that is.
    """

    WHOLE = "whole"
    PREFILL = "prefill"
    BESIDE_PREFILL = "beside prefill"


class Caller:
    """One per worker, shared by the use cases.

    Args:
        prefill_s: a prefill leg's limit, from its connection to the end of its answer; 0 = none.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        transport: Transport,
        breakers: Breakers,
        timeouts: Timeouts,
        engine_key: str | None,
        prefill_s: float = 0.0,
    ) -> None:
        self._registry = registry
        self._transport = transport
        self._breakers = breakers
        self.timeouts = timeouts
        self._timeouts = {
            Leg.PREFILL: replace(timeouts, first_byte_s=prefill_s, idle_s=prefill_s, total_s=prefill_s),
            Leg.BESIDE_PREFILL: replace(timeouts, first_byte_s=0.0),
        }
        self._engine_key = engine_key
        self._targets: dict[str, Target] = {}

    def __repr__(self) -> str:
        return f"<Caller targets={len(self._targets)}>"

    async def send(
        self,
        url: str,
        request: EngineRequest,
        leg: Leg = Leg.WHOLE,
        *,
        stage: str = "request",
        noted: journeys.Leg | None = None,
    ) -> Response:
        """Send `request` to the node and return when the answer's head has come. Raises UpstreamError.

        Args:
            stage: which leg of its request's journey this is.
            noted: that leg, of a caller who goes on with it; without one, it is made where there is a journey.
        """
        snapshot = self._registry.snapshot
        headers = request.headers
        if self._engine_key is not None or snapshot.engine_keys:
            headers = self._with_key(url, headers)
        if (journey := journeys.current.get()) is not None:
            if noted is None:
                noted = journeys.Leg(url, stage, time.monotonic())
            journey.legs.append(noted)
            if journey.trace is not None:
                noted.span_id, headers = journey.trace.onwards(headers)
        try:
            response = await self._transport.send(
                self._target(url),
                request.method,
                request.path,
                headers,
                request.body if request.upload is None else request.upload,
                self.timeouts if leg is Leg.WHOLE else self._timeouts[leg],
            )
        except UpstreamError as e:
            _end(noted, e.code)
            if isinstance(e, EngineRefused):
                self._registry.refused(url)
            self._breakers.failed(url, e)
            raise
        except BaseException:  # cancelled, or an upload whose client is to blame: it says nothing of the node
            if url in self._registry.snapshot.broken:
                self._breakers.left(url)
            _end(noted, CANCELLED)
            raise
        if noted is not None:
            noted.status = response.status
        if response.status == 500:
            self._breakers.left(url)  # the node's fault or the request's: another node's answer will tell
        elif response.status > 500 and speaks_against(response.status):
            self._breakers.failed(url, response.status)
        else:
            self._breakers.answered(url)
        return response

    def broke(self, url: str, error: UpstreamError) -> None:
        """An answer of the node ended before its end."""
        self._breakers.failed(url, error)
        if (journey := journeys.current.get()) is not None:
            journey.broke(url, error.code or "")

    async def fetch(
        self, url: str, request: EngineRequest, *, limit_bytes: int, leg: Leg = Leg.WHOLE, stage: str = "request"
    ) -> Whole:
        """The whole answer, read here; one of 400 and more as in `read_refusal`.

        Raises UpstreamError; AnswerTooLong where its body is longer than `limit_bytes`.
        """
        noted = journeys.Leg(url, stage, time.monotonic())
        response = await self.send(url, uncompressed(request), leg, noted=noted)
        error: str | None = None
        try:
            if response.status >= 400:
                return await self.read_refusal(url, response)
            body = whole(response)
            if body is None:
                read = bytearray()
                while len(read) <= limit_bytes and (chunk := await self.read(url, response)):
                    read += chunk
                body = bytes(read)
            if len(body) > limit_bytes:
                raise AnswerTooLong(f"engine {url}: its answer is longer than {limit_bytes} bytes")
            return Whole(url, response.status, response.headers, body)
        except asyncio.CancelledError:
            error = CANCELLED
            raise
        except UpstreamError as e:
            error = e.code
            raise
        finally:
            response.close()
            _end(noted, error)

    async def read_refusal(self, url: str, response: Response) -> Whole:
        """An answer of 400 and more with what comes of its body in good time; the rest is cut off.

        Raises UpstreamError.
        """
        body = bytearray()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REFUSAL_S):
                while len(body) < REFUSAL_LIMIT_BYTES and (chunk := await self.read(url, response)):
                    body += chunk
        response.close()
        return Whole(url, response.status, with_length(response.headers, len(body)), bytes(body))

    async def read(self, url: str, response: Response) -> bytes:
        """The next bytes of an answer that is read here; a node that breaks off is told of. Raises UpstreamError."""
        try:
            return await response.read()
        except UpstreamError as e:
            self.broke(url, e)
            raise

    def _with_key(self, url: str, headers: Headers) -> Headers:
        key = self._registry.snapshot.engine_keys.get(url) or self._engine_key
        if key is None:
            return headers
        return with_header(headers, b"authorization", b"Bearer " + key.encode())

    def _target(self, url: str) -> Target:
        target = self._targets.get(url)
        names = self._registry.snapshot.host_headers
        named = names.get(url, "") if names else ""
        if target is None or target.named != named:
            if len(self._targets) > 2 * len(self._registry.snapshot.nodes) + 16:
                self._targets.clear()
            target = self._targets[url] = Target(url, named)
        return target


def _end(leg: journeys.Leg | None, error: str | None) -> None:
    if leg is not None:
        leg.seconds = time.monotonic() - leg.began_s
        leg.error = error
