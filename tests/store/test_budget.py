"""The retry budget on the real server: 20 and a fifth of the requests within ten seconds, of all workers together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from redis.exceptions import RedisError

import app.store.budget as budget_module
import app.store.ledger as ledger_module
from tests.store.harness import Worker, give_back, workers
from tests.support.redis import Space, TcpProxy
from tests.support.wait import aeventually

A = "http://a:1"
FLOOR = 20


def second(space: Space) -> int:
    seconds, _ = space.client.time()  # type: ignore[misc]
    return int(seconds)


def taken(space: Space) -> int:
    return sum(int(n) for n in space.cli("HGETALL", space.key("retries")).values())


def noted(space: Space) -> int:
    """Requests of the window, all workers together."""
    return sum(int(n) for n in space.cli("HGETALL", space.key("requests")).values())


def note(space: Space, requests: int, *, age_s: int = 0) -> None:
    space.cli("HINCRBY", space.key("requests"), second(space) - age_s, requests)


async def take(made: list[Worker], times: int) -> int:
    """How many of `times` are affordable, asked by all workers in turn and at once."""
    asked = [made[i % len(made)].budget.take() for i in range(times)]
    return sum(await asyncio.gather(*asked))


# --- how many ---------------------------------------------------------------------------------------


async def test_without_traffic_twenty_are_affordable_in_the_whole_deployment(redis: Space) -> None:
    async with workers(redis, 3) as made:
        assert await take(made, 60) == FLOOR
        assert taken(redis) == FLOOR
        assert not await made[0].budget.take()


async def test_a_fifth_of_the_requests_of_all_workers_comes_on_top(redis: Space) -> None:
    async with workers(redis, 3) as made:
        for requests in (100, 50, 25):
            note(redis, requests)
        assert await take(made, 120) == FLOOR + 35
        note(redis, 4)  # less than one more
        assert not await made[1].budget.take()
        note(redis, 1)
        assert await take(made, 9) == 1


async def test_requests_count_for_ten_seconds_by_the_servers_clock(redis: Space) -> None:
    async with workers(redis, 1) as made:
        for age_s in (10, 60, -60):
            note(redis, 5000, age_s=age_s)
        redis.cli("HSET", redis.key("requests"), "x", 5000)
        note(redis, 50, age_s=6)
        assert await take(made, 100) == FLOOR + 10


async def test_requests_of_a_worker_that_left_count_on(redis: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reload replaces all workers; what they sent again within the window counts too."""
    monkeypatch.setattr(ledger_module, "RENEW_S", 60.0)  # what is noted is noted in leaving
    async with workers(redis, 1) as made:
        async with Worker(redis.url, redis.namespace, "old") as old:
            await old.add_ready(A)
            give_back(await old.take(100))
            assert noted(redis) == 0
        assert noted(redis) == 100
        assert await take(made, 100) == FLOOR + 20


async def test_retries_count_for_ten_seconds_by_the_servers_clock(redis: Space) -> None:
    async with workers(redis, 1) as made:
        now = second(redis)
        key = redis.key("retries")
        redis.cli("HSET", key, now - 10, 500, now - 60, 500, now + 60, 500, "nan", 500, "x", 500, now - 6, 15)
        assert await take(made, 20) == 5
        left = {int(when): int(n) for when, n in redis.cli("HGETALL", key).items()}
        assert left.pop(now - 6) == 15 and sum(left.values()) == 5, "what is over is dropped"
        assert all(0 <= when - now <= 3 for when in left)


async def test_what_was_refused_is_not_counted(redis: Space, caplog: pytest.LogCaptureFixture) -> None:
    async with workers(redis, 1) as made:
        assert await take(made, 100) == FLOOR == taken(redis)
        assert "a request is not sent again" in caplog.text


# --- what workers say of themselves ------------------------------------------------------------------


async def test_each_worker_notes_its_requests_once_and_the_notes_expire(
    redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "RENEW_S", 0.1)
    monkeypatch.setattr(ledger_module, "WINDOW_S", 2)
    async with workers(redis, 2) as (w1, w2):
        await w1.add_ready(A)
        await w2.registry.refresh()
        give_back(await w1.take(30))
        give_back(await w2.take(7))
        assert (w1.ledger.requests_in_window, w2.ledger.requests_in_window) == (30, 7)
        await aeventually(lambda: noted(redis) == 37)
        assert 1 <= redis.cli("TTL", redis.key("requests")) <= 2
        await aeventually(lambda: noted(redis) == 0)
        assert w1.ledger.requests_in_window == 0


async def test_a_note_drops_what_is_over(redis: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "RENEW_S", 60.0)
    async with workers(redis, 1) as (w1,):
        await w1.add_ready(A)
        note(redis, 500, age_s=10)
        note(redis, 500, age_s=-60)
        note(redis, 50, age_s=6)
        give_back(await w1.take(7))
        await w1.ledger.close()
        assert noted(redis) == 57


async def test_a_pair_is_one_request(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        await w1.add_ready(A)
        select = lambda snapshot: snapshot.only(A)  # noqa: E731
        give_back(await w1.ledger.acquire_each(select, select))
        assert w1.ledger.requests_in_window == 1


# --- while Redis is away ------------------------------------------------------------------------------


async def test_while_redis_is_away_each_worker_keeps_to_its_own_share(
    own_redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "RENEW_S", 0.1)
    async with workers(own_redis, 2) as made:
        await made[0].add_ready(A)
        await made[1].registry.refresh()
        await aeventually(lambda: [worker.ledger.workers for worker in made] == [2, 2])
        own_redis.server.kill()
        await aeventually(lambda: not any(worker.shared for worker in made))
        give_back(await made[0].take(50))
        since_s = time.monotonic()
        assert await take(made[:1], 60) == FLOOR / 2 + 10
        assert await take(made[1:], 60) == FLOOR / 2
        assert time.monotonic() - since_s < 1.0, "nobody waits for what is known to be away"


async def test_where_redis_was_never_met_each_worker_of_a_host_has_its_share(own_redis: Space) -> None:
    own_redis.server.kill()
    async with workers(own_redis, 4, on_host=4) as made:
        assert await take(made, 60) == FLOOR
        assert await take(made[:1], 10) == 0


async def test_who_joins_knows_how_many_there_are_and_the_others_know_at_their_next_renewal(
    redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "RENEW_S", 0.1)
    async with workers(redis, 3, on_host=2) as made:
        assert made[2].ledger.workers == 3
        assert made[0].ledger.workers >= 2, "nobody told the first one that it is alone"
        await aeventually(lambda: [worker.ledger.workers for worker in made] == [3, 3, 3])


async def test_a_redis_that_lost_the_workers_makes_no_share_larger_while_they_come_back(
    redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "RENEW_S", 0.1)
    monkeypatch.setattr(ledger_module, "RESTATED_WITHIN_S", 1.0)
    async with workers(redis, 1) as (w1,):
        in_a_minute_ms = (second(redis) + 60) * 1000
        redis.cli("ZADD", redis.key("workers"), in_a_minute_ms, "w8", in_a_minute_ms, "w9")
        await aeventually(lambda: w1.ledger.workers == 3)
        redis.cli("DEL", redis.key("workers"), redis.key("sessions"))
        emptied_s = time.monotonic()
        await aeventually(lambda: w1.ledger.workers == 1)
        assert time.monotonic() - emptied_s >= 1.0


async def test_requests_from_before_the_window_are_none_however_long_redis_is_away(
    own_redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(ledger_module, "time", SimpleNamespace(monotonic=lambda: now_s, time_ns=time.time_ns))
    async with workers(own_redis, 1) as made:
        await made[0].add_ready(A)
        own_redis.server.kill()
        await aeventually(lambda: not made[0].shared)
        for _ in range(30):
            give_back(await made[0].take(10))
            now_s += 1
        assert made[0].ledger.requests_in_window == 90
        await asyncio.to_thread(own_redis.server.start)
        await aeventually(lambda: made[0].shared)
        await made[0].ledger.close()
        assert noted(own_redis) == 90, "and no more is told of them afterwards"


async def test_what_was_taken_from_redis_counts_when_it_is_away(own_redis: Space) -> None:
    async with workers(own_redis, 1) as made:
        assert await take(made, 15) == 15
        own_redis.server.kill()
        await aeventually(lambda: not made[0].shared)
        assert await take(made, 60) == 5


async def test_the_own_share_comes_back_after_the_window(own_redis: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    async with workers(own_redis, 1) as made:
        own_redis.server.kill()
        await aeventually(lambda: not made[0].shared)
        now_s = 1000.0
        monkeypatch.setattr(budget_module, "time", SimpleNamespace(monotonic=lambda: now_s))
        assert await take(made, 60) == FLOOR
        now_s += 9.9
        assert await take(made, 60) == 0
        now_s += 0.1
        assert await take(made, 60) == FLOOR


@pytest.fixture
def road(redis: Space) -> Iterator[TcpProxy]:
    with TcpProxy(redis.server.socket) as proxy:
        yield proxy


async def test_a_redis_that_hangs_is_waited_for_once_and_not_for_long(redis: Space, road: TcpProxy) -> None:
    async with workers(redis, 1, url=road.url, timeout_s=0.2) as made:
        assert await made[0].budget.take()
        road.block()
        since_s = time.monotonic()
        assert await made[0].budget.take()
        assert time.monotonic() - since_s < 2.0
        road.unblock()


async def test_nothing_that_redis_answers_fails_a_request(redis: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    async with workers(redis, 1) as (w1,):
        redis.client.script_flush()
        assert await w1.budget.take() and taken(redis) == 1
        for command in (("SET", "retries", "x"), ("SADD", "requests", "x"), ("HSET", "retries", second(redis), "x")):
            redis.cli("DEL", redis.key(command[1]))
            redis.cli(command[0], redis.key(str(command[1])), *command[2:])
            assert await w1.budget.take(), command

        async def away(*_: Any) -> Any:
            raise RedisError("away")

        monkeypatch.setattr(w1.registry, "run", away)
        assert await w1.budget.take()


async def test_who_leaves_while_it_is_asked_for_has_taken_one_at_most(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        for steps in range(12):
            task = asyncio.create_task(w1.budget.take())
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert await w1.budget.take() and 1 <= taken(redis) <= 13
