"""Hybrid serving: one node does the whole request.

Acquire a node that has the model, send it the client's bytes, hand the answer on. It must not know
Starlette or Redis.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from app.dispatch.answer import Answer, EngineRequest
from app.dispatch.caller import Caller
from app.errors import NoNodeAvailable
from app.nodes import Role
from app.store.ledger import Ledger, Select, Ticket
from app.store.snapshot import Pool, Snapshot

ROLES = (Role.Hybrid, Role.Decode)
"""A Decode node prefills too where nobody else does: vLLM's PD nodes behind encoders."""


class Hybrid:
    """The use case; one per worker."""

    def __init__(self, *, ledger: Ledger, caller: Caller) -> None:
        self._ledger = ledger
        self._caller = caller

    async def open(self, request: EngineRequest) -> Answer:
        """Count the request on a node, send it there, and return when the answer's head has come.

        Raises:
            ModelNotFound, NoNodeAvailable: nobody can serve it.
            UpstreamError: the chosen engine could not be reached or did not answer in time.
        On every way out but the good one the count is given back here.
        """
        return await (await self.take(request.model)).send(request)

    async def take(self, model: str, *, only: str | None = None) -> HeldNode:
        return HeldNode(await self._ledger.acquire(candidates(model, *ROLES, only=only)), self._caller)

    async def take_among(self, model: str, urls: Collection[str], *, only: str | None = None) -> HeldNode:
        return HeldNode(await self._ledger.acquire(candidates(model, *ROLES, only=only, among=urls)), self._caller)


def candidates(model: str, *roles: Role, only: str | None = None, among: Collection[str] | None = None) -> Select:
    """The nodes of `roles` with the model, of `among` where that is given; `only` that one if it is among them."""

    def select(snapshot: Snapshot) -> Pool:
        pool = snapshot.pool(model, *roles)
        if among is not None:
            left = snapshot.without(pool, [url for url in pool.urls if url not in among])
            if left is None:
                words = " or ".join(role.name for role in roles)
                raise NoNodeAvailable(f"no {words} node of {', '.join(among)} with the model {model!r} is alive")
            pool = left
        if only is None:
            return pool
        return snapshot.without(pool, [url for url in pool.urls if url != only]) or pool

    return select


@dataclass(frozen=True, slots=True)
class HeldNode:
    """One node that does the whole request."""

    ticket: Ticket
    caller: Caller

    @property
    def url(self) -> str:
        return self.ticket.url

    async def send(self, request: EngineRequest) -> Answer:
        try:
            response = await self.caller.send(self.url, request)
        except BaseException:
            self.give_back()
            raise
        return Answer(response, self.url, (self.ticket,))

    def give_back(self) -> None:
        self.ticket.release(succeeded=False)
