"""Notes of sessions under migration, on the real server: there before decode is called, taken over by one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.errors import StoreUnavailable
from app.store.migrations import Migration, name_of, read_migration, session_of
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


def hold(worker: Worker, session: int = 7, *, life: int = 3) -> None:
    worker.migrations.hold(A, session, decode=B, life=life)


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
        hold(w1)
        await there(redis, {NAME})
        w2.migrations.clear(A, 7)  # not its own
        w1.migrations.clear(A, 8)
        w1.migrations.clear(A, 7)
        await there(redis, set())
        hold(w2)
        await there(redis, {NAME})
        w1.migrations.clear(A, 7)  # a second time: it may be another's by now
        hold(w1, 9)
        await there(redis, {NAME, f"{A}|9"})


async def test_what_is_let_go_stays_noted_and_is_not_noted_again(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        hold(w1)
        await there(redis, {NAME})
        assert w1.migrations.let_go(A, 7) == (B, 3) and w1.migrations.let_go(A, 7) is None
        redis.cli("DEL", redis.key("migrations"))
        hold(w1, 8)
        tell_again(w1)
        await there(redis, {f"{A}|8"})
        w1.migrations.forget_note(A, 8)
        await there(redis, set())


async def test_what_is_left_is_nobodys(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        w1.migrations.leave(A, 7, decode=B, life=3)
        await there(redis, {NAME})
        note = notes(redis)[NAME]
        assert note is not None and (note.worker, note.life, note.decode) == ("", 3, B)
        assert w1.migrations.held == {}


async def test_what_redis_lost_is_written_down_again_and_nothing_else(own_redis: Space) -> None:
    async with workers(own_redis, 1) as (w1,):
        for session in (1, 2, 3):
            hold(w1, session)
        await there(own_redis, {f"{A}|{n}" for n in (1, 2, 3)})
        w1.migrations.clear(A, 2)
        await there(own_redis, {f"{A}|{n}" for n in (1, 3)})
        own_redis.cli("FLUSHALL")
        await there(own_redis, {f"{A}|{n}" for n in (1, 3)})
        own_redis.server.restart()
        await there(own_redis, {f"{A}|{n}" for n in (1, 3)})


async def test_what_was_said_while_redis_was_away_is_noted_when_it_is_back(own_redis: Space) -> None:
    async with workers(own_redis, 1) as (w1,):
        hold(w1, 1)
        await there(own_redis, {f"{A}|1"})
        own_redis.server.kill()
        await aeventually(lambda: not w1.shared)
        hold(w1, 2)
        w1.migrations.clear(A, 1)
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
        assert note is not None and note.worker in {worker.name for worker in others} and note.life == 3
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
        hold(w1)
        await there(redis, {NAME})
        (seen,) = (await w2.migrations.all()).values()
        w1.migrations.clear(A, 7)
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
        hold(w1)
        tell_again(w1)
        w1.migrations.clear(A, 7)
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
