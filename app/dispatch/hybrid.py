"""Hybrid serving: every node does the whole request.

Acquire a node that has the model, send it the client's bytes, hand the answer on. It must not know
Starlette or Redis.
"""

from __future__ import annotations

from app.dispatch.answer import Answer, EngineRequest
from app.errors import EngineRefused
from app.nodes import Role
from app.store.ledger import Ledger
from app.store.registry import Registry
from app.upstream.transport import Target, Timeouts, Transport


class Hybrid:
    """The use case; one per worker."""

    def __init__(
        self, *, registry: Registry, ledger: Ledger, transport: Transport, timeouts: Timeouts, engine_key: str | None
    ) -> None:
        self._registry = registry
        self._ledger = ledger
        self._transport = transport
        self._timeouts = timeouts
        self._engine_key = engine_key
        self._targets: dict[str, Target] = {}

    async def open(self, request: EngineRequest) -> Answer:
        """Count the request on a node, send it there, and return when the answer's head has come.

        Raises:
            ModelNotFound, NoNodeAvailable: nobody can serve it.
            UpstreamError: the chosen engine could not be reached or did not answer in time.
        On every way out but the good one the count is given back here.
        """
        ticket = await self._ledger.acquire(lambda snapshot: snapshot.pool(request.model, Role.Hybrid))
        try:
            response = await self._transport.send(
                self._target(ticket.url),
                request.method,
                request.path,
                self._with_key(ticket.url, request.headers),
                request.body,
                self._timeouts,
            )
        except BaseException as e:
            ticket.release(succeeded=False)
            if isinstance(e, EngineRefused):
                self._registry.refused(ticket.url)
            raise
        return Answer(response, ticket)

    def _with_key(self, url: str, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        key = self._registry.snapshot.engine_keys.get(url) or self._engine_key
        if key is None:
            return headers
        kept = [header for header in headers if header[0] != b"authorization"]
        return [*kept, (b"authorization", b"Bearer " + key.encode())]

    def _target(self, url: str) -> Target:
        target = self._targets.get(url)
        if target is None:
            if len(self._targets) > 2 * len(self._registry.snapshot.nodes) + 16:
                self._targets.clear()
            target = self._targets[url] = Target(url)
        return target
