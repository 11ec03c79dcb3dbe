"""The discoverer: has the registry follow one `--discover`, on one worker of the deployment at a time.

Owns when the source is looked at, for how long a node must be left out, and what was said of it in the log. What
follows from a reading is decided by `app.discovery.listing`. Each worker runs one for each source that its settings
name; a lease in Redis says whose turn it is, one lease a source: hosts may name different ones. Keys: discovering:*,
and through the registry the nodes.
"""

from __future__ import annotations

import asyncio
import logging

from app.discovery.listing import NO_LONGER, Drain, Listed, Reader, ReadFailed, Reading, Register, decide, own
from app.nodes import Node
from app.store.keys import Keys
from app.store.registry import Registry
from workers.lease import Lease

log = logging.getLogger("evenhand.discovery")

TURN_S = 1.0
LEASE_MS = 10_000
"""A look may take seconds. A dead holder is followed within this time and one turn; its nodes serve meanwhile."""
CHANGES_S = 2.0
"""What a turn's changes may take: a list that was a mistake can be taken back before all of it has been done, and the
lease stays the holder's."""
AT_ONCE = 100
"""Nodes that are registered together: reading the registry, here and in each worker, costs more than a change."""


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
        """As much as CHANGES_S allows; the rest is decided anew in the next turn, by what is listed then."""
        registry, time = self._registry, asyncio.get_running_loop().time
        snapshot = registry.snapshot
        gone = self._gone(last)
        steps = list(decide(self._reader.name, last.nodes, gone, snapshot.nodes, snapshot.engine_keys))
        # The look may have taken long.
        if not steps or (time() - self.lease.renewed_s > CHANGES_S and not await self.lease.hold()):
            return
        until_s = time() + CHANGES_S
        new = [step.listed for step in steps if isinstance(step, Register)]
        old = [step for step in steps if isinstance(step, Drain)]
        while new or old:
            if new:
                await self._register(new[:AT_ONCE])
                del new[:AT_ONCE]
            else:
                await self._drain(old[:AT_ONCE])
                del old[:AT_ONCE]
            if time() > until_s:
                return

    async def _register(self, listed: list[Listed]) -> None:
        before = self._registry.snapshot.nodes
        nodes = [(_node_of(one, before.get(one.url), self._reader.name), one.key) for one in listed]
        for (node, _), done in zip(nodes, await self._registry.add_all(nodes), strict=True):
            if done:
                added = "updated" if node.url in before else "added"
                log.info("%s: node %s is %s", self._reader.name, node.url, added)

    async def _drain(self, steps: list[Drain]) -> None:
        nodes = [(step.url, step.incarnation) for step in steps]
        done = await self._registry.drain_all(nodes, self._grace_s, reason=NO_LONGER + self._reader.name)
        for step, drained in zip(steps, done, strict=True):
            if drained:
                log.warning("%s: node %s is no longer listed, it is drained", self._reader.name, step.url)


def _node_of(listed: Listed, known: Node | None, source: str) -> Node:
    models = listed.models
    if models is None:
        models = known.models if known is not None and known.asked else ()
    return Node(
        listed.url,
        role=listed.role,
        models=models,
        speed=listed.speed,
        asked=listed.models is None,
        bootstrap_port=listed.bootstrap_port,
        host_header=listed.host_header,
        source=source,
    )
