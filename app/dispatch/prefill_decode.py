"""Split serving: prefill on one node, decode on another, both held from one moment on.

Takes the pair and leaves the rest to the protocol by which its engines hand the KV cache over. It must not know
Redis or Starlette.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.dispatch.answer import Answer, EngineRequest, Held
from app.dispatch.caller import Caller
from app.dispatch.handover.lmdeploy import HeldDummy
from app.dispatch.handover.protocol import Protocol
from app.dispatch.hybrid import HeldNode, candidates
from app.dispatch.pair import Pair
from app.errors import ModelNotFound, NoNodeAvailable
from app.nodes import Role
from app.store.handovers import Handovers
from app.store.ledger import Ledger
from app.store.registry import Registry


@dataclass(frozen=True, slots=True)
class SplitRules:
    """From settings.

    fallback: a Decode or Hybrid node serves alone where no prefill node can.
    dummy: LMDeploy's --dummy-prefill, with the number of the migration protocol; None = off.
    """

    fallback: bool
    dummy: int | None


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
        rules: SplitRules,
    ) -> None:
        self._registry = registry
        self._ledger = ledger
        self._caller = caller
        self._protocol = protocol
        self._figures = figures
        self._rules = rules

    async def open(self, request: EngineRequest) -> Answer:
        """As `Hybrid.open`; what isn't generated token by token (embeddings, ...) goes whole to a decode node.

        Prefill's failure is the answer, and decode is not called, or no longer.
        """
        if request.path.partition(b"?")[0] not in self._protocol.paths:
            return await (await self._take_one(request.model, Role.Decode)).send(request)
        return await (await self.take(request.model)).send(request)

    async def take(self, model: str, *, only: str | None = None) -> Held:
        if self._rules.dummy is not None:
            ticket = await self._ledger.acquire(candidates(model, Role.Decode, only=only))
            return HeldDummy(ticket, self._caller, self._rules.dummy)
        try:
            prefill, decode = await self._ledger.acquire_each(
                candidates(model, Role.Prefill), candidates(model, Role.Decode, only=only)
            )
        except NoNodeAvailable:
            if not self._rules.fallback or self._has_both(model):
                raise
            held = await self._take_one(model, Role.Decode, Role.Hybrid)
            self._figures.count("prefill_fallback")
            return held
        return HeldPair(Pair(model, prefill, decode, ledger=self._ledger, figures=self._figures), self._protocol)

    async def _take_one(self, model: str, *roles: Role) -> HeldNode:
        return HeldNode(await self._ledger.acquire(candidates(model, *roles)), self._caller)

    def _has_both(self, model: str) -> bool:
        try:
            for role in (Role.Prefill, Role.Decode):
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
        try:
            return await self.protocol.run(self.pair, request)
        except BaseException:
            self.give_back()
            raise

    def give_back(self) -> None:
        self.pair.give_back()
