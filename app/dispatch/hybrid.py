"""Hybrid serving: one node does the whole request.

Acquire a node that has the model, send it the client's bytes, hand the answer on. It must not know
Starlette or Redis.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from app.dispatch.answer import Answer, EngineRequest, Outcome
from app.dispatch.breakers import Breakers
from app.dispatch.caller import Caller
from app.dispatch.retries import Retries
from app.errors import ModelNotFound, NoNodeAvailable, UpstreamError
from app.nodes import Role
from app.store.budget import RetryBudget
from app.store.ledger import Ledger, Select, Ticket
from app.store.registry import Registry
from app.store.snapshot import Pool, Snapshot

ROLES = (Role.Hybrid, Role.Decode)
"""A Decode node prefills too where nobody else does: vLLM's PD nodes behind encoders."""


class Hybrid:
    """The use case; one per worker. `retries`: other nodes that a request may be sent to."""

    def __init__(
        self,
        *,
        registry: Registry,
        ledger: Ledger,
        caller: Caller,
        breakers: Breakers,
        budget: RetryBudget,
        retries: int,
    ) -> None:
        self._registry = registry
        self._ledger = ledger
        self._caller = caller
        self._breakers = breakers
        self._budget = budget
        self._retries = retries

    async def open(self, request: EngineRequest, *, retry_500: bool = True) -> Answer:
        """Count the request on a node, send it there, and return when the answer's head has come.

        A node that fails is replaced by one that has not been tried, as `Retries` allows.

        Raises:
            ModelNotFound, NoNodeAvailable: nobody can serve it.
            UpstreamError: the last engine could not be reached or did not answer in time.
        On every way out but the good one the count is given back here.
        """
        held = await self._take(request.model)
        retries: Retries | None = None
        tried: list[str] = []
        doubted: list[str] = []  # they answered 500: if another can serve the request, it was their fault
        while True:
            answer: Answer | None = None
            failure: UpstreamError | int
            try:
                answer = await held.send(request)
                failure = answer.status
                if failure < 400:
                    for url in doubted:
                        self._breakers.failed(url, 500)
                    return answer
            except UpstreamError as e:
                failure = e
            retries = retries or Retries(self._retries, self._budget, server_errors=retry_500)
            if answer is not None:
                if not retries.concerns(answer.status):
                    return answer
                if failure == 500:
                    doubted.append(held.url)
            tried.append(held.url)
            try:
                another = None if request.spent else await self._take_another(request.model, tried, retries, failure)
            except BaseException:
                if answer is not None:
                    answer.close(Outcome.ABORTED)
                raise
            if another is None:
                if answer is not None:
                    return answer
                assert isinstance(failure, UpstreamError)
                raise failure
            if answer is not None:
                answer.close(Outcome.ENGINE_ERROR)
            held = another

    async def take_among(self, model: str, urls: Collection[str], *, only: str | None = None) -> HeldNode:
        return HeldNode(await self._ledger.acquire(candidates(model, *ROLES, only=only, among=urls)), self._caller)

    async def _take(self, model: str) -> HeldNode:
        select = await self._breakers.select(candidates(model, *ROLES), model, *ROLES)
        return HeldNode(await self._ledger.acquire(select), self._caller)

    async def _take_another(
        self, model: str, tried: list[str], retries: Retries, failure: UpstreamError | int
    ) -> HeldNode | None:
        """Another node for the request; None: there is none, or it may not have it."""
        select = untried(model, tried, *ROLES)
        try:
            select(self._registry.snapshot)
            if not await retries.may(failure):
                return None
            return HeldNode(await self._ledger.acquire(select, again=True), self._caller)
        except (ModelNotFound, NoNodeAvailable):
            return None


def untried(model: str, tried: Collection[str], *roles: Role) -> Select:
    """The candidates but those that failed this request already."""
    select = candidates(model, *roles)

    def select_untried(snapshot: Snapshot) -> Pool:
        left = snapshot.without(select(snapshot), tried)
        if left is None:
            words = " or ".join(role.name for role in roles)
            raise NoNodeAvailable(f"no other {words} node with the model {model!r} is left to try")
        return left

    return select_untried


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


@dataclass(slots=True)
class HeldNode:
    """One node that does the whole request."""

    ticket: Ticket
    caller: Caller

    @property
    def url(self) -> str:
        return self.ticket.url

    async def send(self, request: EngineRequest) -> Answer:
        url = self.ticket.url
        if self.ticket.learns:
            self.ticket.begin()
        try:
            response = await self.caller.send(url, request)
        except BaseException:
            self.give_back()
            raise
        # A form that streams takes as long as its client sends: nothing is learned from it.
        size_bytes = len(request.body) if self.ticket.learns and request.upload is None else None
        return Answer(response, url, (self.ticket,), self.caller.broke, request_bytes=size_bytes)

    def give_back(self) -> None:
        self.ticket.release(succeeded=False)
