"""Caches that LMDeploy's prefill engines keep for a decode engine, and how they are given up.

An engine keeps a session's cache until decode says that it has it. Where decode never will, it is freed from
here, by the session's own number and no other: an engine ends whatever session has the number it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from app.errors import StoreUnavailable, UpstreamError
from app.store.handovers import Handovers
from app.store.migrations import Migration, Migrations, read_migration, session_of
from app.store.registry import Registry
from app.upstream.distserve import DistServeClient

log = logging.getLogger("evenhand.dispatch")

TRIES = 3
PAUSE_S = 0.3


class Sessions:
    """One per worker.

    Args:
        key_of: the API key of an engine.
    """

    def __init__(
        self,
        *,
        migrations: Migrations,
        registry: Registry,
        engines: DistServeClient,
        figures: Handovers,
        key_of: Callable[[str], str | None],
    ) -> None:
        self._migrations = migrations
        self._registry = registry
        self._engines = engines
        self._figures = figures
        self._key_of = key_of
        self._background: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Sessions {self._migrations!r} background={len(self._background)}>"

    def life_of(self, url: str) -> int:
        node = self._registry.snapshot.nodes.get(url)
        return node.life if node is not None else 0

    def hold(self, prefill: str, session: int, *, decode: str) -> None:
        self._migrations.hold(prefill, session, decode=decode, life=self.life_of(prefill))

    def clear(self, prefill: str, session: int) -> None:
        self._migrations.clear(prefill, session)

    def free_soon(self, prefill: str, session: int) -> None:
        """Free a session of this worker in the background, once; it stays noted until that is done."""
        held = self._migrations.let_go(prefill, session)
        if held is not None:
            self.run_in_background(self._free_own(prefill, session, *held))

    def look_after_own(self) -> None:
        """Free this worker's sessions of nodes that were taken out: nobody will come for them. Strike off those
        of a prefill process that is no more: a number of its may be another session's by now."""
        nodes = self._registry.snapshot.nodes
        for name, (decode, life) in list(self._migrations.held.items()):
            prefill, session = session_of(name)
            if prefill not in nodes or decode not in nodes:
                self.free_soon(prefill, session)
            elif nodes[prefill].life != life:
                self._migrations.clear(prefill, session)
                self._figures.count("sessions_lost")

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="session")
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Let what is under way end; the frees are short."""
        if self._background:
            await asyncio.wait(self._background, timeout=TRIES * PAUSE_S)
        for task in self._background:
            task.cancel()

    async def _free_own(self, prefill: str, session: int, decode: str, life: int) -> None:
        with contextlib.suppress(StoreUnavailable):
            record = await self._migrations.one(prefill, session)
            if record is not None and record.freed:
                self._migrations.forget_note(prefill, session)
                return
        if await self.free(prefill, session):
            self._migrations.forget_note(prefill, session)
        else:
            self._migrations.leave(prefill, session, decode=decode, life=life)

    async def free(self, prefill: str, session: int) -> bool:
        for left in reversed(range(TRIES)):
            try:
                await self._engines.free_cache(prefill, session, self._key_of(prefill))
            except UpstreamError as e:
                log.warning("session %d of %s could not be freed: %s", session, prefill, e.message)
                if left:
                    await asyncio.sleep(PAUSE_S)
            else:
                self._figures.count("sessions_freed")
                return True
        return False

    # --- what others left

    async def collect(self, wanted: Callable[[str, Migration, set[str], int], bool]) -> dict[str, list[dict[str, Any]]]:
        """Free every noted session that is `wanted(prefill, record, workers whose lease runs, now in ms)`.

        Returns:
            {"freed": [...], "failed": [...]}, each entry {prefill, session}. Raises StoreUnavailable.
        """
        result: dict[str, list[dict[str, Any]]] = {"freed": [], "failed": []}
        records = await self._migrations.all()
        if not records:
            return result
        workers, now_ms = await self._migrations.workers_and_time()
        for name, text in records.items():
            record = read_migration(text)
            try:
                prefill, _ = session_of(name)
            except ValueError:
                record = None
            if record is None:
                await self._migrations.forget(name, text)
            elif wanted(prefill, record, workers, now_ms):
                await self._collect(name, text, record, record.worker in workers, result)
        return result

    async def _collect(
        self,
        name: str,
        text: str,
        record: Migration,
        owner_lives: bool,
        result: dict[str, list[dict[str, Any]]],
    ) -> None:
        if record.freed:
            if not owner_lives:
                await self._migrations.forget(name, text)
            return
        mine = await self._migrations.take_over(name, text, record)
        if mine is None:
            return
        prefill, session = session_of(name)
        entry = {"prefill": prefill, "session": session}
        node = self._registry.snapshot.nodes.get(prefill)
        if node is not None and node.life != record.life:
            await self._migrations.forget(name, mine)  # it went with the process that kept it
            self._figures.count("sessions_lost")
            return
        freed = await self.free(prefill, session)
        result["freed" if freed else "failed"].append(entry)
        if freed and owner_lives:
            await self._migrations.mark_freed(name, mine, record)
        elif freed or node is None:
            await self._migrations.forget(name, mine)
            if not freed:
                self._figures.count("sessions_lost")
        else:  # this worker has taken it over, and nobody looks after what the living hold
            await self._migrations.give_back(name, mine, record, owner_lives=owner_lives)


async def quietly(work: Coroutine[Any, Any, object]) -> None:
    """For a loop that comes back: Redis being away is not its business."""
    try:
        await work
    except StoreUnavailable as e:
        log.debug("put off: %s", e.message)
