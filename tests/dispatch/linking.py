"""Engines that can be linked, and workers that link them, on the real Redis."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import Any

from app.dispatch.distserve import DistServe
from app.dispatch.handover.links import LinkRules, Links
from app.dispatch.handover.sessions import Sessions
from app.nodes import Role
from app.store.links import read_link
from app.store.migrations import Session
from app.upstream.distserve import Endpoint
from tests.dispatch.fakes import D0, D1, P0, P1, Json
from tests.store.harness import Worker
from tests.support.redis import Space

PAIR = f"{P0}|{D0}"


class LinkEngines:
    """LMDeploy's engines of all workers of a test: what they were called with, and how they fail by script."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.failures: defaultdict[tuple[str, str], list[Exception]] = defaultdict(list)
        self.info: dict[str, Json] = {}
        self.keys: set[tuple[str, str | None]] = set()
        self.gates: dict[str, asyncio.Event] = {}

    async def _called(self, call: str, url: str, key: str | None, *more: str) -> None:
        self.calls.append((call, url, *more))
        self.keys.add((url, key))
        await asyncio.sleep(0)
        if call in self.gates:
            await self.gates[call].wait()
        if self.failures[call, url]:
            raise self.failures[call, url].pop(0)

    async def engine_info(self, url: str, key: str | None) -> Json:
        await self._called("engine_info", url, key)
        return self.info.get(url, {"tp_size": 1, "of": url})

    async def p2p_initialize(self, local: tuple[str, Json], remote: tuple[str, Json], key: str | None) -> Endpoint:
        assert (local[1], remote[1]) == tuple(self.info.get(u, {"tp_size": 1, "of": u}) for u in (local[0], remote[0]))
        await self._called("initialize", local[0], key, remote[0])
        return Endpoint({"of": local[0]}, [{"rank": 0}])

    async def p2p_connect(self, url: str, remote: str, endpoint: Endpoint, key: str | None) -> None:
        assert endpoint == Endpoint({"of": remote}, [{"rank": 0}]), "each end is told of the other"
        await self._called("connect", url, key, remote)

    async def p2p_drop_connect(self, url: str, remote: str, key: str | None) -> None:
        await self._called("drop", url, key, remote)

    async def free_cache(self, url: str, session: int, key: str | None) -> None:
        await self._called("free", url, key, str(session))

    @property
    def counts(self) -> Counter[str]:
        return Counter(call[0] for call in self.calls)


ONCE = {"engine_info": 2, "initialize": 2, "connect": 2}
"""Calls of a link that is made at the first try."""


class Linker:
    """What one worker needs to link engines and to free their caches."""

    def __init__(self, worker: Worker, engines: LinkEngines, *, timeout_s: float = 5.0, tries: int = 3) -> None:
        parts: Any = {"registry": worker.registry, "engines": engines, "figures": worker.figures}
        self.worker = worker
        rules = LinkRules(timeout_s=timeout_s, tries=tries)
        self.links = Links(**parts, table=worker.links, rules=rules, engine_key="common")
        self.sessions = Sessions(**parts, migrations=worker.migrations, key_of=self.links.key_of)
        self.distserve = DistServe(
            registry=worker.registry,
            figures=worker.figures,
            table=worker.links,
            links=self.links,
            sessions=self.sessions,
            migrations=worker.migrations,
            keys=worker.keys,
            worker=worker.name,
            gc_age_s=600,
            linked=True,
        )

    async def ensure(self, prefill: str = P0, decode: str = D0) -> None:
        await self.links.ensure(prefill, decode)

    async def close(self) -> None:
        await self.sessions.close()
        await self.links.close()


async def register(worker: Worker, *, prefill: int = 1, decode: int = 1) -> None:
    for role, urls in ((Role.Prefill, (P0, P1)[:prefill]), (Role.Decode, (D0, D1)[:decode])):
        for url in urls:
            await worker.add_ready(url, role=role)


def hold(linker: Linker, prefill: str = P0, number: int = 7, decode: str = D0) -> Session:
    session = Session(prefill, number, linker.sessions.life_of(prefill), decode)
    linker.sessions.hold(session)
    return session


async def counted(worker: Worker) -> dict[str, int]:
    """The shared counters, once all that this worker has sent is there."""
    (await worker.ledger.acquire(lambda snapshot: snapshot.pool("m", Role.Decode))).release(succeeded=False)
    return await worker.figures.counts()


def record(space: Space, pair: str = PAIR) -> Any:
    return read_link(space.cli("HGET", space.key("links"), pair) or "")
