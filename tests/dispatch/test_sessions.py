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
from app.store.migrations import Migration, Session, read_migration
from tests.dispatch.fakes import D0, D1, P0, P1
from tests.dispatch.linking import LinkEngines, Linker, counted, hold, register
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
        session = hold(linker)
        assert await noted(linker) == {f"{P0}|7"}
        linker.sessions.clear(session)
        assert await noted(linker) == set()
        assert engines.calls == [] and linker.worker.migrations.held == {}


async def test_r62_a_session_is_freed_once_and_noted_until_it_is(redis: Space) -> None:
    async with serving(redis) as (engines, (linker,)):
        engines.gates["free"] = asyncio.Event()
        session = hold(linker)
        for _ in range(3):
            linker.sessions.free_soon(session)
        await aeventually(lambda: engines.counts["free"] == 1)
        assert await noted(linker) == {f"{P0}|7"}
        engines.gates["free"].set()
        await linker.sessions.close()
        assert engines.calls == [("free", P0, "7")] and engines.keys == {(P0, "common")}
        assert await noted(linker) == set()
        assert await counted(linker.worker) == {"sessions_freed": 1}


async def test_a_session_that_nobody_holds_is_not_freed(redis: Space) -> None:
    async with serving(redis) as (engines, (linker,)):
        linker.sessions.free_soon(Session(P0, 7, linker.sessions.life_of(P0)))
        session = hold(linker, P0, 8)
        linker.sessions.clear(session)
        linker.sessions.free_soon(session)
        await linker.sessions.close()
        assert engines.calls == []


async def test_a_free_that_fails_is_tried_three_times(redis: Space) -> None:
    async with serving(redis) as (engines, (linker,)):
        engines.failures["free", P0] = [EngineRefused("refused"), EngineBroke("reset")]
        assert await linker.sessions.free(P0, 7, while_=lambda: True) is True
        assert engines.counts["free"] == 3
        engines.failures["free", P0] = [EngineRefused("refused")] * 3
        assert await linker.sessions.free(P0, 7, while_=lambda: True) is False
        assert engines.counts["free"] == 6
        assert await counted(linker.worker) == {"sessions_freed": 1}


async def test_what_could_not_be_freed_is_left_for_whoever_looks_next(redis: Space) -> None:
    async with serving(redis, 2) as (engines, (first, second)):
        engines.failures["free", P0] = [EngineRefused("refused")] * 3
        first.sessions.free_soon(hold(first))
        await aeventually(lambda: not engines.failures["free", P0])
        await first.sessions.close()
        assert await noted(first) == {f"{P0}|7"}
        found = await second.sessions.collect(of_the_dead)
        assert found == {"freed": [{"prefill": P0, "session": 7}], "failed": []}
        assert await noted(first) == set()


async def test_what_the_collector_could_not_free_is_tried_again_by_whoever_looks_next(redis: Space) -> None:
    async with serving(redis, 2) as (engines, (first, second)):
        engines.failures["free", P0] = [EngineRefused("refused")] * 9
        first.sessions.free_soon(hold(first))
        await aeventually(lambda: len(engines.failures["free", P0]) == 6)
        await first.sessions.close()
        for _ in range(2):
            found = await second.sessions.collect(of_the_dead)
            assert found == {"freed": [], "failed": [{"prefill": P0, "session": 7}]}
        found = await first.sessions.collect(of_the_dead)
        assert found == {"freed": [{"prefill": P0, "session": 7}], "failed": []}
        assert await noted(first) == set()


class Moving:
    """A move that is told to end."""

    def __init__(self, prefill: str, decode: str) -> None:
        self.prefill, self.decode = prefill, decode
        self.ends_at_s: float | None = None
        self.ended = 0

    def end(self) -> None:
        self.ended += 1


async def test_moves_of_nodes_that_were_taken_out_end_after_a_while_and_no_others(
    redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_module, "MOVES_WITHIN_S", 0.2)
    async with serving(redis) as (engines, (linker,)):
        moves = [Moving(P0, D0), Moving(P1, D0), Moving(P0, D1), Moving(P1, D1)]
        sessions = [hold(linker, move.prefill, number, move.decode) for number, move in enumerate(moves)]
        for move in moves:
            linker.sessions.begin(move)
        linker.sessions.look_after_own()
        await linker.worker.registry.remove(P1)
        await linker.worker.registry.remove(D1)
        linker.sessions.look_after_own()
        linker.sessions.done(moves[3])
        linker.sessions.look_after_own()
        assert not any(move.ended for move in moves), "decode may still fetch them"
        await asyncio.sleep(0.25)
        linker.sessions.look_after_own()
        assert [move.ended for move in moves] == [0, 1, 1, 0]
        assert engines.calls == [], "whose decode call that is frees them once it has ended"
        assert all(map(linker.worker.migrations.holds, sessions))
        linker.sessions.free_soon(sessions[1])
        await linker.sessions.close()
        assert engines.calls == [("free", P1, "1")], "the process of a node that was taken out still runs"


async def test_a_node_that_is_back_in_time_ends_no_move(redis: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MOVES_WITHIN_S", 0.1)
    async with serving(redis) as (_, (linker,)):
        move = Moving(P0, D0)
        linker.sessions.begin(move)
        await linker.worker.registry.remove(D0)
        linker.sessions.look_after_own()
        await linker.worker.add_ready(D0, role=Role.Decode)
        linker.sessions.look_after_own()
        await asyncio.sleep(0.15)
        await linker.worker.registry.remove(D0)
        linker.sessions.look_after_own()
        assert move.ended == 0, "the while begins anew"


async def test_a_number_that_another_request_has_by_now_is_not_freed_by_the_first(redis: Space) -> None:
    """The prefill engine restarted, and nobody has noticed."""
    async with serving(redis, 2) as (engines, (first, second)):
        old = hold(first)
        await noted(first)
        new = hold(second)
        await noted(second)
        first.sessions.free_soon(old)
        await first.sessions.close()
        assert engines.calls == [] and await counted(first.worker) == {"sessions_lost": 1}
        assert await noted(second) == {f"{P0}|7"} and second.worker.migrations.holds(new)
        second.sessions.free_soon(new)
        await second.sessions.close()
        assert engines.calls == [("free", P0, "7")] and await noted(second) == set()


async def test_a_number_of_an_older_process_is_not_freed_at_a_later_one(redis: Space) -> None:
    async with serving(redis) as (engines, (linker,)):
        old = hold(linker)
        await linker.worker.add_ready(P0, role=Role.Prefill)
        new = hold(linker)
        linker.sessions.free_soon(old)
        await linker.sessions.close()
        assert engines.calls == []
        assert linker.worker.migrations.holds(new) and await noted(linker) == {f"{P0}|7"}


async def test_a_process_that_goes_while_it_is_asked_to_free_is_not_asked_again(
    redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_module, "PAUSE_S", 1.0)
    async with serving(redis) as (engines, (linker,)):
        engines.failures["free", P0] = [EngineRefused("refused")] * 2
        linker.sessions.free_soon(hold(linker))
        await aeventually(lambda: engines.counts["free"] == 1)
        await linker.worker.add_ready(P0, role=Role.Prefill)
        await linker.sessions.close()
        assert engines.counts["free"] == 1, "the number may be another session's by now"


async def test_what_somebody_frees_right_now_is_waited_for(redis: Space) -> None:
    async with serving(redis, 2) as (engines, (first, second)):
        session = hold(first)
        await noted(first)
        engines.gates["free"] = asyncio.Event()
        collecting = asyncio.create_task(second.sessions.collect(everything))
        await aeventually(lambda: engines.counts["free"] == 1)
        first.sessions.free_soon(session)
        await asyncio.sleep(0.06)
        engines.gates["free"].set()
        await collecting
        await first.sessions.close()
        assert engines.counts["free"] == 1 and await noted(first) == set()


async def test_what_a_worker_was_freeing_when_it_died_is_taken_by_the_next(redis: Space) -> None:
    async with serving(redis, 3) as (_, (owner, dying, other)):
        hold(owner)
        await noted(owner)
        (entry,) = (await dying.worker.migrations.all()).items()
        record = read_migration(entry[1])
        assert record is not None
        assert await dying.worker.migrations.take_over(*entry, record) is not None
        assert (await other.sessions.collect(of_the_dead))["freed"] == []
        await dying.worker.ledger.close()
        assert (await other.sessions.collect(of_the_dead))["freed"] == [{"prefill": P0, "session": 7}]


async def test_who_leaves_while_sessions_are_collected_leaves_none_of_them_half_taken(redis: Space) -> None:
    async with serving(redis, 2) as (engines, (first, second)):
        hold(first)
        await noted(first)
        engines.gates["free"] = asyncio.Event()
        collecting = asyncio.create_task(second.sessions.collect(everything))
        await aeventually(lambda: engines.counts["free"] == 1)
        collecting.cancel()
        await asyncio.wait((collecting,))
        engines.gates["free"].set()
        await second.sessions.close()
        (text,) = (await second.worker.migrations.all()).values()
        record = read_migration(text)
        assert record is not None and (record.freed, record.by) == (True, "")


async def test_sessions_of_a_process_that_is_no_more_are_struck_off_and_never_freed(redis: Space) -> None:
    async with serving(redis) as (engines, (linker,)):
        hold(linker)
        hold(linker, P1, 7, D0)
        await linker.worker.add_ready(P0, role=Role.Prefill)
        linker.sessions.look_after_own()
        await linker.sessions.close()
        assert engines.calls == [], "the number may be another session's by now"
        assert await noted(linker) == {f"{P1}|7"}
        assert await counted(linker.worker) == {"sessions_lost": 1}


async def test_the_end_of_a_worker_waits_for_what_is_under_way_and_not_for_ever(
    redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_module, "CLOSE_WITHIN_S", 0.5)
    async with serving(redis) as (engines, (linker,)):
        engines.gates["free"] = asyncio.Event()
        linker.sessions.free_soon(hold(linker))
        await asyncio.wait_for(linker.sessions.close(), 5)
        assert await noted(linker) == {f"{P0}|7"}, "for those who are left"


# --- what others left -------------------------------------------------------------------------------


async def test_r62_the_sessions_of_a_worker_that_died_are_freed_once_by_whoever_is_left(redis: Space) -> None:
    async with serving(redis, 4) as (engines, (first, *others)):
        for session in range(10):
            hold(first, P0, session, D0)
        hold(others[0], P1, 99)
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
        session = hold(first)
        await noted(first)
        assert (await second.sessions.collect(everything))["freed"] == [{"prefill": P0, "session": 7}]
        assert await second.sessions.collect(everything) == {"freed": [], "failed": []}
        assert (await second.distserve.table())["sessions"] == 0
        first.sessions.free_soon(session)
        await first.sessions.close()
        assert engines.calls == [("free", P0, "7")], "the number may be another session's by now"
        assert await noted(first) == set()


async def test_what_was_collected_of_a_worker_that_died_afterwards_is_struck_off(redis: Space) -> None:
    async with serving(redis, 2) as (engines, (first, second)):
        hold(first)
        await noted(first)
        await second.sessions.collect(everything)
        assert await noted(second) == {f"{P0}|7"}
        await first.worker.ledger.close()
        await second.sessions.collect(of_the_dead)
        assert await noted(second) == set() and engines.counts["free"] == 1


async def test_a_session_of_an_older_life_is_forgotten_and_never_freed(redis: Space) -> None:
    async with serving(redis, 2) as (engines, (first, second)):
        hold(first)
        await noted(first)
        await second.worker.add_ready(P0, role=Role.Prefill)
        assert await second.sessions.collect(everything) == {"freed": [], "failed": []}
        assert engines.calls == [] and await noted(first) == set()
        assert await counted(second.worker) == {"sessions_lost": 1}


async def test_what_can_not_be_freed_stays_while_its_node_is_there(redis: Space) -> None:
    async with serving(redis, 2) as (engines, (first, second)):
        hold(first)
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
        hold(first)
        await noted(first)

        def cleared_now(*_: Any) -> bool:
            redis.cli("HDEL", redis.key("migrations"), f"{P0}|7")
            return True

        assert await second.sessions.collect(cleared_now) == {"freed": [], "failed": []}
        assert engines.calls == []


async def test_collecting_asks_by_age_and_redis_clock(redis: Space) -> None:
    async with serving(redis) as (_, (linker,)):
        hold(linker)
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
