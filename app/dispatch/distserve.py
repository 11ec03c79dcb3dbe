"""LMDeploy's DistServe beside the requests: links made ahead, and what is left behind cleared away.

Owns warm-up, garbage collection and what there is to see. Links of nodes that were removed are undone,
sessions whose worker died or whose node was removed are freed. One worker of the deployment at a
time does that (`workers.janitor`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from app.dispatch.handover.links import Links
from app.dispatch.handover.sessions import Sessions, quietly
from app.errors import BadRequest, StoreUnavailable, UpstreamError
from app.nodes import Node, Role, State
from app.store.handing import pairs_in_use
from app.store.handovers import Handovers
from app.store.keys import Keys
from app.store.links import Link, LinkTable, ends_of, pair_of, read_link
from app.store.migrations import Migrations, read_migration
from app.store.registry import Registry

UNDO_WITHIN_MS = 60_000
"""For as long nobody links a pair that is being undone."""

Json = dict[str, Any]


class DistServe:
    """One per worker. `linked`: whether this deployment's engines are linked at all."""

    def __init__(
        self,
        *,
        registry: Registry,
        table: LinkTable,
        links: Links,
        sessions: Sessions,
        migrations: Migrations,
        figures: Handovers,
        keys: Keys,
        worker: str,
        gc_age_s: float,
        linked: bool,
    ) -> None:
        self._registry = registry
        self._table = table
        self._links = links
        self._sessions = sessions
        self._migrations = migrations
        self._figures = figures
        self._keys = keys
        self._worker = worker
        self._gc_age_s = gc_age_s
        self._linked = linked

    async def warm_up(self) -> Json:
        """Link every prefill with every decode node of the same model; what became of each pair."""
        self._check_linked()
        with contextlib.suppress(StoreUnavailable):
            await self._registry.refresh()  # a node may have been added through another worker just now
        pairs = list(self._pairs())
        failures = await asyncio.gather(*(self._ensure(*pair) for pair in pairs))
        links = {
            pair_of(*pair): {"state": "failed" if error else "connected", "error": error}
            for pair, error in zip(pairs, failures, strict=True)
        }
        if not pairs:
            return {"SUCCESS": False, "links": links, "reason": self._no_pair()}
        return {"SUCCESS": not any(failures), "links": links}

    async def collect(self) -> Json:
        """Free what is older than the age from settings. Raises StoreUnavailable."""
        self._check_linked()
        oldest_ms = self._gc_age_s * 1000
        found = await self._sessions.collect(lambda _, record, __, now_ms: now_ms - record.at_ms >= oldest_ms)
        return {**found, "kept": await self._held()}

    async def table(self) -> Json:
        """Every link, how many sessions are under migration, and the counters. Raises StoreUnavailable."""
        links = {}
        for pair, text in (await self._table.all()).items():
            link = read_link(text)
            current = link.lives == self._links.lives_of(*ends_of(pair))
            links[pair] = {
                "state": link.state if current else "void",
                "owner": link.owner,
                "since_ms": link.since_ms,
                "took_ms": link.took_ms or None,
                "error": link.error or None,
            }
        return {"links": links, "sessions": await self._held(), "counts": await self._figures.counts()}

    async def _held(self) -> int:
        records = map(read_migration, (await self._migrations.all()).values())
        return sum(record is not None and not record.freed for record in records)

    def _check_linked(self) -> None:
        if not self._linked:
            raise BadRequest("Engines are linked, and their caches freed, with --pd-protocol lmdeploy only")

    def _up(self) -> list[Node]:
        return [node for node in self._registry.snapshot.nodes.values() if node.state in (State.READY, State.PENDING)]

    def _pairs(self) -> Iterator[tuple[str, str]]:
        nodes = self._up()
        for prefill in (node for node in nodes if node.role == Role.Prefill):
            for decode in (node for node in nodes if node.role == Role.Decode):
                if not set(prefill.models).isdisjoint(decode.models):
                    yield prefill.url, decode.url

    def _no_pair(self) -> str:
        nodes = self._up()
        lacking = [role.name for role in (Role.Prefill, Role.Decode) if not any(node.role == role for node in nodes)]
        if lacking:
            return f"no {' and no '.join(lacking)} node is registered and up"
        return "no Prefill and Decode node have a model in common"

    async def _ensure(self, prefill: str, decode: str) -> str | None:
        try:
            await self._links.ensure(prefill, decode)
        except UpstreamError as e:
            return e.message
        return None

    # --- what is left behind

    async def tidy(self) -> None:
        """Undo the links of removed nodes and free the sessions of dead workers. Raises StoreUnavailable.

        A link over which a cache is on its way is left until that is over, which its worker sees to. A link of nodes
        that only have another life now is left: the next request replaces it.
        """
        await self._sessions.collect(lambda _, record, workers, __: record.worker not in workers)
        snapshot, records = self._registry.snapshot, await self._table.all()
        if not records:
            return
        workers, now_ms = await self._migrations.workers_and_time()
        in_use = await pairs_in_use(self._registry, self._keys)

        def is_left(pair: str, link: Link) -> bool:
            busy = link.state in ("connecting", "undoing") and link.owner in workers and now_ms < link.until_ms
            return not busy and pair not in in_use and not all(url in snapshot.nodes for url in ends_of(pair))

        left = [(pair, text, link) for pair, text in records.items() if is_left(pair, link := read_link(text))]
        await asyncio.gather(*(quietly(self._undo(*entry)) for entry in left))

    def tidy_own(self) -> None:
        """Every worker, now and then: its own sessions and moves of nodes that were removed or restarted."""
        self._sessions.look_after_own()

    async def _undo(self, pair: str, text: str, link: Link) -> None:
        undoing = Link("undoing", "", 0, since_ms=link.since_ms, owner=self._worker)
        mine = await self._table.mark_undoing(pair, text, undoing, within_ms=UNDO_WITHIN_MS)
        if mine is None:
            return
        if link.state in ("connected", "undoing"):
            await self._links.undo(*ends_of(pair), mine)
        await self._table.drop(pair, mine)
