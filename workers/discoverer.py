"""The discoverer: has the registry follow one `--discover`, on one worker of the deployment at a time.

Owns when the source is looked at, for how long a node must be left out, and what was said of it in the log. What
follows from a reading is decided by `app.discovery.listing`. Each worker runs one for each source that its settings
name; a lease in Redis says whose turn it is, one lease a source: hosts may name different ones. Keys: discovering:*,
and through the registry the nodes.
"""

from __future__ import annotations

import asyncio
import logging

from app.discovery.listing import Drain, Reader, ReadFailed, Reading, Register, decide, own
from app.store.keys import Keys
from app.store.registry import Registry
from workers.lease import Lease

log = logging.getLogger("evenhand.discovery")

TURN_S = 1.0
LEASE_MS = 10_000
"""A look may take seconds. A dead holder is followed within this time and one turn; its nodes serve meanwhile."""
RENEW_S = 2.0
"""The lease, while many changes are made."""


class Discoverer:
    """One per worker and source.

    Args:
        grace_s: how long the running requests of a node that is listed no longer may take.
    """

    def __init__(self, *, reader: Reader, registry: Registry, keys: Keys, worker: str, grace_s: float) -> None:
        self.lease = Lease(registry=registry, key=keys.discovering(reader.name), worker=worker, lease_ms=LEASE_MS)
        self._reader = reader
        self._registry = registry
        self._grace_s = grace_s
        self._forget()

    def __repr__(self) -> str:
        listed = len(self._last.nodes) if self._last is not None else "not read"
        return f"<Discoverer {self._reader.name} leading={self.lease.held} listed={listed}>"

    async def run(self) -> None:
        """Turn after turn, until cancelled."""
        try:
            await self.lease.take_turns(self._turn, self._forget, lambda: asyncio.sleep(TURN_S))
        finally:
            await self.lease.give_back()

    def _forget(self) -> None:
        """What was read is another's business by now; it reads for itself, and is as patient as at first."""
        self._last: Reading | None = None
        self._read_at_s = 0.0
        self._failing = False
        self._missing: dict[str, float] = {}  # url -> when a reading first left it out
        self._due_s = 0.0
        self._told = ""
        self._reader.forget()

    async def _turn(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._last is None:
            await self._registry.refresh()
        if now_s >= self._due_s:
            self._due_s = now_s + self._reader.every_s
            await self._read(now_s)
        if self._last is not None:
            await self._follow(self._last)

    async def _read(self, now_s: float) -> None:
        try:
            found = await self._reader.look()
        except ReadFailed as e:
            self._failing = True
            self._tell(f"{e}; its nodes stay as they are")
            return
        self._failing = False
        if found is not None:
            self._last = found
        if found is None or found.whole:
            self._read_at_s = now_s
        if found is None and self._last is None:
            return
        self._tell(f"{self._last.trouble}; no node is taken out" if self._last and self._last.trouble else "")

    def _tell(self, trouble: str) -> None:
        """Each trouble once, and its end."""
        if trouble and trouble != self._told:
            log.warning("%s: %s", self._reader.name, trouble)
        elif self._told and not trouble:
            log.warning("%s: is read again", self._reader.name)
        self._told = trouble

    def _gone(self, last: Reading) -> set[str]:
        """Its own nodes that readings have left out for long enough. A look that failed, or in part, says nothing."""
        mine = own(self._reader.name, self._registry.snapshot.nodes)
        if self._failing or not last.whole:
            self._missing = {url: since for url, since in self._missing.items() if url not in last.nodes}
            return set()
        self._missing = {url: self._missing.get(url, self._read_at_s) for url in mine - last.nodes.keys()}
        return {url for url, since in self._missing.items() if self._read_at_s - since >= self._reader.patience_s}

    async def _follow(self, last: Reading) -> None:
        registry = self._registry
        snapshot = registry.snapshot
        gone = self._gone(last)
        for step in list(decide(self._reader.name, last.nodes, gone, snapshot.nodes, snapshot.engine_keys)):
            if asyncio.get_running_loop().time() - self.lease.renewed_s > RENEW_S and not await self.lease.hold():
                return
            if isinstance(step, Register):
                await self._register(step)
            else:
                await self._drain(step)

    async def _register(self, step: Register) -> None:
        wanted, known = step.listed, self._registry.snapshot.nodes.get(step.listed.url)
        models = wanted.models
        if models is None:
            models = known.models if known is not None and known.asked else ()
        done = await self._registry.add(
            wanted.url,
            role=wanted.role,
            models=models,
            speed=wanted.speed,
            key=wanted.key,
            asked=wanted.models is None,
            bootstrap_port=wanted.bootstrap_port,
            host_header=wanted.host_header,
            source=self._reader.name,
        )
        if done:
            log.info("%s: node %s is %s", self._reader.name, wanted.url, "added" if known is None else "updated")

    async def _drain(self, step: Drain) -> None:
        if await self._registry.drain(step.url, self._grace_s, incarnation=step.incarnation, reason=step.reason):
            log.warning("%s: node %s is no longer listed, it is drained", self._reader.name, step.url)
