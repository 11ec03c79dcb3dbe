"""Caches that prefill engines keep: freed once, by their own number, by their own worker or by whoever is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.dispatch.handover import sessions as sessions_module
from app.dispatch.handover.sessions import quietly
from app.errors import EngineBroke, EngineRefused, StoreUnavailable
from app.nodes import Role
from app.store.migrations import Migration
from tests.dispatch.fakes import D0, D1, P0, P1
from tests.dispatch.linking import LinkEngines, Linker, counted, register
from tests.store.harness import workers
from tests.support.redis import Space
from tests.support.wait import aeventually


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "PAUSE_S", 0.05)


@asynccontextmanager
async def serving(space: Space, count: int = 1) -> AsyncIterator[tuple[LinkEngines, list[Linker]]]:
    engines = LinkEngines()
    async with workers(space, count) as made:
        await register(made[0], prefill=2, decode=2)
        for worker in made:
            await worker.registry.refresh()
        linkers = [Linker(worker, engines) for worker in made]
        yield engines, linkers
        for linker in linkers:
            await linker.close()


async def noted(linker: Linker) -> set[str]:
    await counted(linker.worker)
    return set(await linker.worker.migrations.all())


def everything(*_: Any) -> bool:
    return True


def of_the_dead(prefill: str, record: Migration, alive: set[str], now_ms: int) -> bool:
    return record.worker not in alive


# --- one's own --------------------------------------------------------------------------------------


async def test_a_session_is_noted_until_decode_has_it(redis: Space) -> None:
    async with serving(redis) as (engines, (linker,)):
        linker.sessions.hold(P0, 7, decode=D0)
        assert await noted(linker) == {f"{P0}|7"}
        linker.sessions.clear(P0, 7)
        assert await noted(linker) == set()
        assert engines.calls == [] and linker.worker.migrations.held == {}


async def test_r62_a_session_is_freed_once_and_noted_until_it_is(redis: Space) -> None:
    async with serving(redis) as (engines, (linker,)):
        engines.gates["free"] = asyncio.Event()
        linker.sessions.hold(P0, 7, decode=D0)
        for _ in range(3):
            linker.sessions.free_soon(P0, 7)
        await aeventually(lambda: engines.counts["free"] == 1)
        assert await noted(linker) == {f"{P0}|7"}
        engines.gates["free"].set()
        await linker.sessions.close()
        assert engines.calls == [("free", P0, "7")] and engines.keys == {(P0, "common")}
        assert await noted(linker) == set()
        assert await counted(linker.worker) == {"sessions_freed": 1}


async def test_a_session_that_nobody_holds_is_not_freed(redis: Space) -> None:
    async with serving(redis) as (engines, (linker,)):
        linker.sessions.free_soon(P0, 7)
        linker.sessions.hold(P0, 8, decode=D0)
        linker.sessions.clear(P0, 8)
        linker.sessions.free_soon(P0, 8)
        await linker.sessions.close()
        assert engines.calls == []


async def test_a_free_that_fails_is_tried_three_times(redis: Space) -> None:
    async with serving(redis) as (engines, (linker,)):
        engines.failures["free", P0] = [EngineRefused("refused"), EngineBroke("reset")]
        assert await linker.sessions.free(P0, 7) is True
        assert engines.counts["free"] == 3
        engines.failures["free", P0] = [EngineRefused("refused")] * 3
        assert await linker.sessions.free(P0, 7) is False
        assert engines.counts["free"] == 6
        assert await counted(linker.worker) == {"sessions_freed": 1}


async def test_what_could_not_be_freed_is_left_for_whoever_looks_next(redis: Space) -> None:
    async with serving(redis, 2) as (engines, (first, second)):
        engines.failures["free", P0] = [EngineRefused("refused")] * 3
        first.sessions.hold(P0, 7, decode=D0)
        first.sessions.free_soon(P0, 7)
        await aeventually(lambda: not engines.failures["free", P0])
        await first.sessions.close()
        assert await noted(first) == {f"{P0}|7"}
        found = await second.sessions.collect(of_the_dead)
        assert found == {"freed": [{"prefill": P0, "session": 7}], "failed": []}
        assert await noted(first) == set()


async def test_what_the_collector_could_not_free_is_tried_again_by_whoever_looks_next(redis: Space) -> None:
    async with serving(redis, 2) as (engines, (first, second)):
        engines.failures["free", P0] = [EngineRefused("refused")] * 9
        first.sessions.hold(P0, 7, decode=D0)
        first.sessions.free_soon(P0, 7)
        await aeventually(lambda: len(engines.failures["free", P0]) == 6)
        await first.sessions.close()
        for _ in range(2):
            found = await second.sessions.collect(of_the_dead)
            assert found == {"freed": [], "failed": [{"prefill": P0, "session": 7}]}
        found = await first.sessions.collect(of_the_dead)
        assert found == {"freed": [{"prefill": P0, "session": 7}], "failed": []}
        assert await noted(first) == set()


async def test_sessions_of_nodes_that_were_taken_out_are_freed_and_no_others(redis: Space) -> None:
    async with serving(redis) as (engines, (linker,)):
        for prefill, session, decode in ((P0, 1, D0), (P1, 2, D0), (P0, 3, D1)):
            linker.sessions.hold(prefill, session, decode=decode)
        linker.sessions.look_after_own()
        await linker.worker.registry.remove(P1)
        await linker.worker.registry.remove(D1)
        linker.sessions.look_after_own()
        linker.sessions.look_after_own()
        await linker.sessions.close()
        assert sorted(engines.calls) == [("free", P0, "3"), ("free", P1, "2")]
        assert await noted(linker) == {f"{P0}|1"}


async def test_sessions_of_a_process_that_is_no_more_are_struck_off_and_never_freed(redis: Space) -> None:
    async with serving(redis) as (engines, (linker,)):
        linker.sessions.hold(P0, 7, decode=D0)
        linker.sessions.hold(P1, 7, decode=D0)
        await linker.worker.add_ready(P0, role=Role.Prefill)
        linker.sessions.look_after_own()
        await linker.sessions.close()
        assert engines.calls == [], "the number may be another session's by now"
        assert await noted(linker) == {f"{P1}|7"}
        assert await counted(linker.worker) == {"sessions_lost": 1}


async def test_the_end_of_a_worker_waits_for_what_is_under_way_and_not_for_ever(redis: Space) -> None:
    async with serving(redis) as (engines, (linker,)):
        engines.gates["free"] = asyncio.Event()
        linker.sessions.hold(P0, 7, decode=D0)
        linker.sessions.free_soon(P0, 7)
        await asyncio.wait_for(linker.sessions.close(), 5)
        assert await noted(linker) == {f"{P0}|7"}, "for those who are left"


# --- what others left -------------------------------------------------------------------------------


async def test_r62_the_sessions_of_a_worker_that_died_are_freed_once_by_whoever_is_left(redis: Space) -> None:
    async with serving(redis, 4) as (engines, (first, *others)):
        for session in range(10):
            first.sessions.hold(P0, session, decode=D0)
        others[0].sessions.hold(P1, 99, decode=D0)
        await noted(first)
        await noted(others[0])
        for linker in others:
            assert (await linker.sessions.collect(of_the_dead))["freed"] == []
        await first.worker.ledger.close()
        found = await asyncio.gather(*(linker.sessions.collect(of_the_dead) for linker in others))
        freed = sorted(entry["session"] for one in found for entry in one["freed"])
        assert freed == list(range(10)) and engines.counts["free"] == 10
        assert await noted(others[0]) == {f"{P1}|99"}


async def test_what_was_collected_while_its_worker_serves_is_not_freed_again(redis: Space) -> None:
    async with serving(redis, 2) as (engines, (first, second)):
        first.sessions.hold(P0, 7, decode=D0)
        await noted(first)
        assert (await second.sessions.collect(everything))["freed"] == [{"prefill": P0, "session": 7}]
        assert await second.sessions.collect(everything) == {"freed": [], "failed": []}
        assert (await second.distserve.table())["sessions"] == 0
        first.sessions.free_soon(P0, 7)
        await first.sessions.close()
        assert engines.calls == [("free", P0, "7")], "the number may be another session's by now"
        assert await noted(first) == set()


async def test_what_was_collected_of_a_worker_that_died_afterwards_is_struck_off(redis: Space) -> None:
    async with serving(redis, 2) as (engines, (first, second)):
        first.sessions.hold(P0, 7, decode=D0)
        await noted(first)
        await second.sessions.collect(everything)
        assert await noted(second) == {f"{P0}|7"}
        await first.worker.ledger.close()
        await second.sessions.collect(of_the_dead)
        assert await noted(second) == set() and engines.counts["free"] == 1


async def test_a_session_of_an_older_life_is_forgotten_and_never_freed(redis: Space) -> None:
    async with serving(redis, 2) as (engines, (first, second)):
        first.sessions.hold(P0, 7, decode=D0)
        await noted(first)
        await second.worker.add_ready(P0, role=Role.Prefill)
        assert await second.sessions.collect(everything) == {"freed": [], "failed": []}
        assert engines.calls == [] and await noted(first) == set()
        assert await counted(second.worker) == {"sessions_lost": 1}


async def test_what_can_not_be_freed_stays_while_its_node_is_there(redis: Space) -> None:
    async with serving(redis, 2) as (engines, (first, second)):
        first.sessions.hold(P0, 7, decode=D0)
        await noted(first)
        engines.failures["free", P0] = [EngineRefused("refused")] * 6
        entry = {"prefill": P0, "session": 7}
        assert await second.sessions.collect(everything) == {"freed": [], "failed": [entry]}
        assert await noted(second) == {f"{P0}|7"}
        await second.worker.registry.remove(P0)
        assert await second.sessions.collect(everything) == {"freed": [], "failed": [entry]}
        assert await noted(second) == set(), "nobody will ever reach it"
        assert await counted(second.worker) == {"sessions_lost": 1}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (f"{P0}|7", "rubbish"),
        (f"{P0}|7", "[]"),
        (f"{P0}|7", "{}"),
        (f"{P0}|7", '{"decode":1}'),
        (f"{P0}|7", "\x00"),
        ("rubbish", '{"decode":"d","worker":"w","life":1,"at_ms":1}'),
        (f"{P0}|x", '{"decode":"d","worker":"w","life":1,"at_ms":1}'),
        ("|", '{"decode":"d","worker":"w","life":1,"at_ms":1}'),
    ],
)
async def test_a_record_that_somebody_damaged_is_taken_away_and_nothing_is_freed(
    redis: Space, name: str, text: str
) -> None:
    async with serving(redis) as (engines, (linker,)):
        redis.cli("HSET", redis.key("migrations"), name, text)
        assert await linker.sessions.collect(everything) == {"freed": [], "failed": []}
        assert engines.calls == [] and await noted(linker) == set()


async def test_a_record_that_was_cleared_meanwhile_is_nobodys(redis: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(redis, 2) as (engines, (first, second)):
        first.sessions.hold(P0, 7, decode=D0)
        await noted(first)

        def cleared_now(*_: Any) -> bool:
            redis.cli("HDEL", redis.key("migrations"), f"{P0}|7")
            return True

        assert await second.sessions.collect(cleared_now) == {"freed": [], "failed": []}
        assert engines.calls == []


async def test_collecting_asks_by_age_and_redis_clock(redis: Space) -> None:
    async with serving(redis) as (_, (linker,)):
        linker.sessions.hold(P0, 7, decode=D0)
        await noted(linker)
        seen: list[tuple[Any, ...]] = []

        def look(*what: Any) -> bool:
            seen.append(what)
            return False

        await linker.sessions.collect(look)
        ((prefill, record, alive, now_ms),) = seen
        assert (prefill, record.decode, record.worker, alive) == (P0, D0, "w1", {"w1"})
        assert record.life == linker.sessions.life_of(P0) and 0 <= now_ms - record.at_ms < 10_000


async def test_a_loop_bears_that_redis_is_away() -> None:
    async def away() -> None:
        raise StoreUnavailable("Redis can't be used")

    await quietly(away())
