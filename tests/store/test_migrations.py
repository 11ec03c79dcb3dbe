"""Notes of sessions under migration, on the real server: there before decode is called, taken over by one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from app.errors import StoreUnavailable
from app.store.migrations import Migration, Session, name_of, read_migration, session_of
from tests.store.harness import Worker, workers
from tests.support.redis import Space
from tests.support.wait import aeventually

A, B = "http://10.0.0.1:23333", "http://10.0.0.2:23333"
NAME = f"{A}|7"


def notes(space: Space) -> dict[str, Migration | None]:
    found: dict[str, str] = space.cli("HGETALL", space.key("migrations"))
    return {name: read_migration(text) for name, text in found.items()}


async def there(space: Space, names: set[str]) -> None:
    await aeventually(lambda: set(notes(space)) == names)


def hold(worker: Worker, number: int = 7, *, life: int = 3) -> Session:
    session = Session(A, number, life, B)
    worker.migrations.hold(session)
    return session


def tell_again(worker: Worker) -> None:
    """What the ledger does once Redis has lost everything."""
    for tell in worker.ledger.on_told_again:
        tell()


def test_a_name_holds_the_node_and_the_session() -> None:
    assert name_of(A, 7) == NAME and session_of(NAME) == (A, 7)
    assert session_of("http://[::1]:1/a|b|-2") == ("http://[::1]:1/a|b", -2)
    for name in ("rubbish", "|", A + "|x", A + "|"):
        with pytest.raises(ValueError, match="invalid literal"):
            session_of(name)


@pytest.mark.parametrize(
    "text", ["", "rubbish", "[]", "{}", '{"decode":"d","worker":"w","life":"1","at_ms":1}', "\x00"]
)
def test_a_damaged_record_is_none(text: str) -> None:
    assert read_migration(text) is None


async def test_a_note_says_who_serves_which_session_since_when(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        hold(w1)
        await there(redis, {NAME})
        note = notes(redis)[NAME]
        _, now_ms = await w1.migrations.workers_and_time()
        assert note is not None
        assert (note.decode, note.worker, note.life) == (B, "w1", 3) and 0 <= now_ms - note.at_ms < 10_000
        assert repr(w1.migrations) == "<Migrations held=1>"


async def test_a_note_goes_out_before_anything_that_is_sent_later(redis: Space) -> None:
    """A request that is counted after it can only be seen together with it."""
    async with workers(redis, 1) as (w1,):
        await w1.add_ready(A)
        for session in range(50):
            hold(w1, session)
        await w1.take(1)
        assert len(notes(redis)) == 50


async def test_a_session_is_struck_off_once(redis: Space) -> None:
    async with workers(redis, 2) as (w1, w2):
        first = hold(w1)
        await there(redis, {NAME})
        assert not w2.migrations.clear(first), "not its own"
        assert not w1.migrations.clear(Session(A, 7, 3, B)), "another request's"
        assert w1.migrations.clear(first)
        await there(redis, set())
        hold(w2)
        await there(redis, {NAME})
        assert not w1.migrations.clear(first), "a second time: the number may be another's by now"
        hold(w1, 9)
        await there(redis, {NAME, f"{A}|9"})


async def test_what_is_held_twice_is_noted_once_with_the_later_decode_node(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        session = hold(w1)
        session.decode = "http://10.0.0.3:23333"
        w1.migrations.hold(session)
        await aeventually(lambda: [n.decode for n in notes(redis).values() if n] == [session.decode])
        assert w1.migrations.clear(session)
        await there(redis, set())


@pytest.mark.parametrize("same_worker", [True, False])
async def test_a_number_that_a_later_process_gave_again_is_another_session(redis: Space, same_worker: bool) -> None:
    """Whichever of the two ends first takes nothing from the other."""
    async with workers(redis, 2) as (w1, w2):
        later_worker = w1 if same_worker else w2
        old = hold(w1, life=3)
        await there(redis, {NAME})
        new = hold(later_worker, life=4)
        await aeventually(lambda: [n.life for n in notes(redis).values() if n] == [4])
        w1.migrations.clear(old)
        w1.migrations.leave(old)
        w1.migrations.hold(old)  # with another decode node, too late
        hold(w1, 8)
        await there(redis, {NAME, f"{A}|8"})
        note = notes(redis)[NAME]
        assert note is not None and (note.worker, note.life) == (later_worker.name, 4)
        assert later_worker.migrations.holds(new)
        assert later_worker.migrations.clear(new)
        await there(redis, {f"{A}|8"})


async def test_a_number_that_was_given_again_in_one_life_is_the_later_requests(redis: Space) -> None:
    """The engine restarted, and nobody has noticed."""
    async with workers(redis, 2) as (w1, w2):
        old = hold(w1)
        await there(redis, {NAME})
        new = hold(w2)
        await aeventually(lambda: [n.worker for n in notes(redis).values() if n] == ["w2"])
        assert w1.migrations.clear(old)
        await w1.take_nothing()
        assert set(notes(redis)) == {NAME}, "the other worker's"
        found = await w1.migrations.one(new)
        assert found is not None and found.worker == "w2"


async def test_what_is_left_is_nobodys(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        session = hold(w1)
        w1.migrations.leave(session)
        await aeventually(lambda: [n.worker for n in notes(redis).values() if n] == [""])
        note = notes(redis)[NAME]
        assert note is not None and (note.worker, note.life, note.decode) == ("", 3, B)
        assert w1.migrations.held == {}


async def test_what_is_struck_off_after_another_one_has_freed_it_is_gone(redis: Space) -> None:
    async with workers(redis, 2) as (w1, w2):
        for end in (w1.migrations.clear, w1.migrations.leave):
            session = hold(w1)
            await there(redis, {NAME})
            (seen,) = (await w2.migrations.all()).values()
            record = read_migration(seen)
            assert record is not None
            mine = await w2.migrations.take_over(NAME, seen, record)
            assert mine is not None
            await w2.migrations.mark_freed(NAME, mine, record)
            note = notes(redis)[NAME]
            assert note is not None and (note.freed, note.worker, note.by) == (True, "w1", "")
            end(session)
            await there(redis, set())


async def test_telling_again_keeps_what_stands_and_brings_what_is_missing(redis: Space) -> None:
    async with workers(redis, 2) as (w1, w2):
        kept, lost = hold(w1, 1), hold(w1, 2)
        hold(w2, 4)
        await there(redis, {f"{A}|{n}" for n in (1, 2, 4)})
        redis.cli("HDEL", redis.key("migrations"), f"{A}|2")
        stale = {"decode": B, "worker": "w1", "life": 3, "at_ms": 5}
        redis.cli("HSET", redis.key("migrations"), f"{A}|3", json.dumps(stale))  # struck off while Redis was away
        freed = {"decode": B, "worker": "w1", "life": 3, "at_ms": 6, "freed": True}
        redis.cli("HSET", redis.key("migrations"), f"{A}|1", json.dumps(freed))
        redis.cli("HSET", redis.key("migrations"), "x|9", "rubbish")
        tell_again(w1)
        await there(redis, {f"{A}|{n}" for n in (1, 2, 4)} | {"x|9"})
        note = notes(redis)[f"{A}|1"]
        assert note is not None and note.freed and note.at_ms == 6, "somebody has freed it, and that stays known"
        again = notes(redis)[f"{A}|2"]
        assert again is not None and (again.worker, again.life, again.decode) == ("w1", 3, B)
        assert w1.migrations.holds(kept) and w1.migrations.holds(lost)


async def test_telling_again_does_not_displace_a_later_process(redis: Space) -> None:
    async with workers(redis, 2) as (w1, w2):
        hold(w1, life=3)
        hold(w2, life=4)
        await aeventually(lambda: [n.life for n in notes(redis).values() if n] == [4])
        tell_again(w1)
        await w1.take_nothing()
        note = notes(redis)[NAME]
        assert note is not None and (note.worker, note.life) == ("w2", 4)


async def test_what_redis_lost_is_written_down_again_and_nothing_else(own_redis: Space) -> None:
    async with workers(own_redis, 1) as (w1,):
        sessions = [hold(w1, session) for session in (1, 2, 3)]
        await there(own_redis, {f"{A}|{n}" for n in (1, 2, 3)})
        w1.migrations.clear(sessions[1])
        await there(own_redis, {f"{A}|{n}" for n in (1, 3)})
        own_redis.cli("FLUSHALL")
        await there(own_redis, {f"{A}|{n}" for n in (1, 3)})
        own_redis.server.restart()
        await there(own_redis, {f"{A}|{n}" for n in (1, 3)})


async def test_what_was_said_while_redis_was_away_is_noted_when_it_is_back(own_redis: Space) -> None:
    async with workers(own_redis, 1) as (w1,):
        first = hold(w1, 1)
        await there(own_redis, {f"{A}|1"})
        own_redis.server.kill()
        await aeventually(lambda: not w1.shared)
        hold(w1, 2)
        w1.migrations.clear(first)
        own_redis.server.start()
        await there(own_redis, {f"{A}|2"})


async def test_notes_survive_a_server_that_lost_its_scripts(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        redis.client.script_flush()
        hold(w1)
        await there(redis, {NAME})


async def test_of_all_who_take_over_one_session_one_may_free_it(redis: Space) -> None:
    async with workers(redis, 4) as (w1, *others):
        hold(w1)
        await there(redis, {NAME})
        (seen,) = (await others[0].migrations.all()).values()
        record = read_migration(seen)
        assert record is not None
        tries = [worker.migrations.take_over(NAME, seen, record) for worker in others for _ in range(20)]
        mine = [text for text in await asyncio.gather(*tries) if text is not None]
        # By worker: whoever was first may be followed by none of the others.
        assert len(set(mine)) == 1
        note = notes(redis)[NAME]
        assert note is not None and note.by in {worker.name for worker in others}
        assert (note.worker, note.life) == ("w1", 3), "still that of its own worker, should it end meanwhile"
        assert not await w1.migrations.forget(NAME, seen), "it is another's by now"
        assert await others[0].migrations.forget(NAME, mine[0])
        assert notes(redis) == {}


async def test_of_one_workers_own_tasks_one_may_too(redis: Space) -> None:
    async with workers(redis, 2) as (w1, w2):
        hold(w1)
        await there(redis, {NAME})
        (seen,) = (await w2.migrations.all()).values()
        record = read_migration(seen)
        assert record is not None
        got = await asyncio.gather(*(w2.migrations.take_over(NAME, seen, record) for _ in range(20)))
        assert sum(text is not None for text in got) == 1


async def test_a_session_that_was_struck_off_meanwhile_can_not_be_taken_over(redis: Space) -> None:
    async with workers(redis, 2) as (w1, w2):
        session = hold(w1)
        await there(redis, {NAME})
        (seen,) = (await w2.migrations.all()).values()
        w1.migrations.clear(session)
        await there(redis, set())
        assert await w2.migrations.take_over(NAME, seen, Migration(B, "w1", 3, 1)) is None
        assert notes(redis) == {}


async def test_workers_are_those_whose_lease_runs(redis: Space) -> None:
    async with workers(redis, 2) as (w1, w2):
        redis.cli("ZADD", redis.key("workers"), "1000", "dead")
        alive, now_ms = await w1.migrations.workers_and_time()
        assert alive == {"w1", "w2"} and now_ms > 1_600_000_000_000
        await w2.ledger.close()
        assert (await w1.migrations.workers_and_time())[0] == {"w1"}


async def test_r96_while_redis_is_away_a_note_fails_nobody_and_a_question_is_an_error(own_redis: Space) -> None:
    async with workers(own_redis, 1) as (w1,):
        own_redis.server.kill()
        await aeventually(lambda: not w1.shared)
        session = hold(w1)
        tell_again(w1)
        w1.migrations.clear(session)
        hold(w1, 8)
        assert set(w1.migrations.held) == {f"{A}|8"}
        calls: list[Any] = [
            w1.migrations.all,
            w1.migrations.workers_and_time,
            lambda: w1.migrations.take_over(NAME, "", Migration(B, "w1", 3, 1)),
            lambda: w1.migrations.forget(NAME, ""),
        ]
        for call in calls:
            with pytest.raises(StoreUnavailable):
                await call()
