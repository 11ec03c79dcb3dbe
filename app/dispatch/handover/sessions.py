"""Caches that LMDeploy's prefill engines keep for a decode engine, and how they are given up.

An engine keeps a session's cache until decode says that it has it. Where decode never will, it is freed from
here, by the session's own number and no other: an engine ends whatever session has the number it is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from app.errors import StoreUnavailable, UpstreamError
from app.store.handovers import Handovers
from app.store.migrations import Migration, Migrations, Session, read_migration, session_of
from app.store.registry import Registry
from app.upstream.distserve import DistServeClient

log = logging.getLogger("evenhand.dispatch")

TRIES = 3
PAUSE_S = 0.3
MOVES_WITHIN_S = 5.0
"""For so long decode may still begin its answer once a node of the two was taken out; the cache itself takes
milliseconds, but the request may wait in a queue."""
CLOSE_WITHIN_S = 6.0
"""Longer than an answer is read on for a client that left."""


class Move(Protocol):
    """A decode node fetches a cache. `ends_at_s`: time.monotonic(), where a node of the two was taken out."""

    prefill: str
    decode: str
    ends_at_s: float | None

    def end(self) -> None:
        """Let decode's call end at once."""
        ...


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
        self._moves: set[Move] = set()
        self._background: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Sessions {self._migrations!r} background={len(self._background)}>"

    def life_of(self, url: str) -> int:
        node = self._registry.snapshot.nodes.get(url)
        return node.life if node is not None else 0

    def hold(self, session: Session) -> None:
        self._migrations.hold(session)

    def clear(self, session: Session) -> None:
        self._migrations.clear(session)

    def free_soon(self, session: Session) -> None:
        """Free a session of this worker in the background, once; it stays held until that is done."""
        if self._migrations.holds(session) and not session.freeing:
            session.freeing = True
            self.run_in_background(self._free_own(session))

    def look_after_own(self) -> None:
        """Strike off this worker's sessions of a prefill process that is no more: their numbers may be other
        sessions' by now. Have moves end that go on though a node of theirs was taken out a while ago: their sessions
        are freed then, and not while decode may still fetch them."""
        nodes, now_s = self._registry.snapshot.nodes, time.monotonic()
        for session in list(self._migrations.held.values()):
            if self._went(session):
                self._lose(session)
        for move in list(self._moves):
            if move.prefill in nodes and move.decode in nodes:
                move.ends_at_s = None
            elif move.ends_at_s is None:
                move.ends_at_s = now_s + MOVES_WITHIN_S
            elif now_s >= move.ends_at_s:
                move.end()

    def begin(self, move: Move) -> None:
        self._moves.add(move)

    def done(self, move: Move) -> None:
        self._moves.discard(move)

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name="session")
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def close(self) -> None:
        """Let what is under way end, within `CLOSE_WITHIN_S`."""
        if self._background:
            await asyncio.wait(self._background, timeout=CLOSE_WITHIN_S)
        for task in self._background:
            task.cancel()

    def _went(self, session: Session) -> bool:
        """Whether another process is at the prefill engine's address by now. A node that was taken out still runs."""
        return self.life_of(session.prefill) not in (0, session.life)

    def _lose(self, session: Session) -> None:
        if self._migrations.clear(session):
            self._figures.count("sessions_lost")

    async def _free_own(self, session: Session) -> None:
        for _ in range(TRIES):
            record = None
            with contextlib.suppress(StoreUnavailable):
                record = await self._migrations.one(session)
            if record is None or not record.by:
                break
            await asyncio.sleep(PAUSE_S)  # somebody was told to free it, and is at it
        if record is not None and record.freed:
            self._migrations.clear(session)
        elif self._went(session) or self._is_anothers(record, session):
            self._lose(session)
        elif await self.free(session.prefill, session.number, while_=lambda: not self._went(session)):
            self._migrations.clear(session)
        else:
            self._migrations.leave(session)

    def _is_anothers(self, record: Migration | None, session: Session) -> bool:
        """Whether the engine has given the number to another request since: it restarted, and nobody noticed."""
        if record is None or record.life < session.life:
            return False
        return record.life > session.life or record.worker not in (self._migrations.worker, "")

    async def free(self, prefill: str, session: int, *, while_: Callable[[], bool]) -> bool:
        """`while_`: whether the process that keeps the session is there; asked before each try."""
        for left in reversed(range(TRIES)):
            if not while_():
                break
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
        collecting = []
        for name, text in records.items():
            record = read_migration(text)
            try:
                prefill, _ = session_of(name)
            except ValueError:
                record = None
            if record is None:
                await self._migrations.forget(name, text)
            elif record.by in workers:
                continue
            elif record.by or wanted(prefill, record, workers, now_ms):
                work = self._collect(name, text, record, record.worker in workers, result)
                # To its end, though whoever asked leaves: what is taken over nobody else looks after.
                collecting.append(self.run_in_background(work))
        await asyncio.shield(asyncio.gather(*collecting))
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

        def kept() -> bool:
            node = self._registry.snapshot.nodes.get(prefill)
            return node is None or node.life == record.life

        freed = await self.free(prefill, session, while_=kept)
        if not freed and not kept():
            await self._migrations.forget(name, mine)  # it went with the process that kept it
            self._figures.count("sessions_lost")
            return
        result["freed" if freed else "failed"].append({"prefill": prefill, "session": session})
        if freed and owner_lives:
            await self._migrations.mark_freed(name, mine, record)
        elif freed or prefill not in self._registry.snapshot.nodes:
            await self._migrations.forget(name, mine)
            if not freed:
                self._figures.count("sessions_lost")
        else:
            await self._migrations.give_back(name, mine, record)


async def quietly(work: Coroutine[Any, Any, object]) -> None:
    """For a loop that comes back: Redis being away is not its business."""
    try:
        await work
    except StoreUnavailable as e:
        log.debug("put off: %s", e.message)
