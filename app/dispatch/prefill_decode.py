"""Split serving: prefill on one node, decode on another, both held from one moment on.

Takes the pair and leaves the rest to the protocol by which its engines hand the KV cache over. It must not know
Redis or Starlette.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.dispatch.answer import Answer, EngineRequest, Held
from app.dispatch.breakers import Breakers
from app.dispatch.caller import Caller
from app.dispatch.handover.lmdeploy import HeldDummy
from app.dispatch.handover.protocol import Protocol
from app.dispatch.hybrid import HeldNode, candidates
from app.dispatch.pair import Pair
from app.dispatch.retries import Retries
from app.errors import ModelNotFound, NoNodeAvailable
from app.nodes import Role
from app.store.budget import RetryBudget
from app.store.handing import Handing
from app.store.handovers import Handovers
from app.store.ledger import Ledger
from app.store.registry import Registry

PAIR = (Role.Prefill, Role.Decode)


@dataclass(frozen=True, slots=True)
class SplitRules:
    """From settings.

    fallback: a Decode or Hybrid node serves alone where no prefill node can.
    dummy: LMDeploy's --dummy-prefill, with the number of the migration protocol; None = off.
    retries: other nodes that a request may be sent to.
    """

    fallback: bool
    dummy: int | None
    retries: int


class PrefillDecode:
    """The use case; one per worker."""

    def __init__(
        self,
        *,
        registry: Registry,
        ledger: Ledger,
        caller: Caller,
        protocol: Protocol,
        figures: Handovers,
        handing: Handing,
        rules: SplitRules,
        breakers: Breakers,
        budget: RetryBudget,
    ) -> None:
        self._registry = registry
        self._ledger = ledger
        self._caller = caller
        self._protocol = protocol
        self._figures = figures
        self._handing = handing
        self._rules = rules
        self._breakers = breakers
        self._budget = budget

    async def open(self, request: EngineRequest, *, retry_500: bool = True) -> Answer:
        """As `Hybrid.open`; what isn't generated token by token (embeddings, ...) goes whole to a decode node.

        Prefill's failure is the answer, and decode is not called, or no longer.
        """
        if request.path.partition(b"?")[0] not in self._protocol.paths:
            return await (await self._take_one(request.model, Role.Decode)).send(request)
        return await (await self._take(request.model, retry_500=retry_500)).send(request)

    async def _take(self, model: str, *, retry_500: bool) -> Held:
        if self._rules.dummy is not None:
            ticket = await self._ledger.acquire(candidates(model, Role.Decode))
            return HeldDummy(ticket, self._caller, self._rules.dummy)
        try:
            prefill, decode = await self._ledger.acquire_each(
                *[await self._breakers.select(candidates(model, role), model, role) for role in PAIR]
            )
        except NoNodeAvailable:
            if not self._rules.fallback or self._has_both(model):
                raise
            held = await self._take_one(model, Role.Decode, Role.Hybrid)
            self._figures.count("prefill_fallback")
            return held
        retries = Retries(self._rules.retries, self._budget, server_errors=retry_500)
        pair = Pair(
            model,
            prefill,
            decode,
            ledger=self._ledger,
            figures=self._figures,
            handing=self._handing,
            retries=retries,
        )
        return HeldPair(pair, self._protocol)

    async def _take_one(self, model: str, *roles: Role) -> HeldNode:
        select = await self._breakers.select(candidates(model, *roles), model, *roles)
        return HeldNode(await self._ledger.acquire(select), self._caller)

    def _has_both(self, model: str) -> bool:
        try:
            for role in PAIR:
                self._registry.snapshot.pool(model, role)
        except (ModelNotFound, NoNodeAvailable):
            return False
        return True


@dataclass(frozen=True, slots=True)
class HeldPair:
    """The two nodes of one request."""

    pair: Pair
    protocol: Protocol

    @property
    def url(self) -> str:
        return self.pair.decode.url

    async def send(self, request: EngineRequest) -> Answer:
        self.pair.begin(len(request.body))
        try:
            return await self.protocol.run(self.pair, request)
        except BaseException:
            self.give_back()
            raise

    def give_back(self) -> None:
        self.pair.give_back()
