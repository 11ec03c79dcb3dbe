"""Breakers on the real server: failures of all workers count together, and one trial is one in the whole deployment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from app.errors import NoNodeAvailable, StoreUnavailable
from app.nodes import Breaker, Node, Role, State
from app.store.registry import BreakerRules
from tests.store.harness import Worker, exact, give_back, workers
from tests.support.redis import Space
from tests.support.wait import aeventually

A, B = "http://a:1", "http://b:1"
RULES = BreakerRules(threshold=5, open_s=10.0)
AT_ONCE = BreakerRules(threshold=1, open_s=10.0)


def now_ms(space: Space) -> int:
    seconds, microseconds = space.client.time()  # type: ignore[misc]
    return int(seconds * 1000 + microseconds // 1000)


def field(space: Space, name: str, url: str = A) -> str | None:
    found: str | None = space.cli("HGET", space.key(f"node:{url}"), name)
    return found


def failures(space: Space) -> dict[str, str]:
    found: dict[str, str] = space.cli("HGETALL", space.key("failures"))
    return found


def node(worker: Worker, url: str = A) -> Node:
    return worker.registry.snapshot.nodes[url]


async def fail(worker: Worker, times: int = 1, rules: BreakerRules = RULES, url: str = A) -> None:
    for _ in range(times):
        await worker.registry.record_failure(url, rules)


async def succeed(worker: Worker, space: Space) -> None:
    give_back(await worker.take(), succeeded=True)
    await aeventually(lambda: A not in failures(space))


def its_time_is_over(space: Space, url: str = A) -> None:
    space.cli("HSET", space.key(f"node:{url}"), "breaker_until_ms", now_ms(space) - 1)


async def open_to_half_open(worker: Worker, space: Space) -> None:
    its_time_is_over(space)
    assert await worker.registry.move_breaker(A, "half_open")


def open_for_s(space: Space) -> float:
    """How long it is open for from now on."""
    return (int(field(space, "breaker_until_ms") or 0) - now_ms(space)) / 1000


# --- opening ----------------------------------------------------------------------------------------


async def test_failures_of_all_workers_count_together_and_the_last_one_opens_it(redis: Space) -> None:
    async with workers(redis, 3) as made:
        await made[0].add_ready(A)
        await made[0].add_ready(B)
        version = int(redis.cli("GET", redis.key("version")))
        for worker in (*made, made[0]):
            await fail(worker)
        assert failures(redis) == {A: "4"} and field(redis, "breaker") == "closed"
        assert int(redis.cli("GET", redis.key("version"))) == version, "four change nothing for anybody"
        await fail(made[1])
        assert field(redis, "breaker") == "open" and field(redis, "breaker_opens") == "1"
        assert 9 < open_for_s(redis) <= 10
        await aeventually(lambda: all(worker.registry.snapshot.broken == {A} for worker in made))
        for worker in made:
            assert worker.registry.snapshot.pool("m", Role.Hybrid).urls == (B,)
            assert (node(worker).state, node(worker).breaker) == (State.READY, Breaker.OPEN)


async def test_of_failures_at_the_same_time_none_is_lost_and_one_opens_it(redis: Space) -> None:
    async with workers(redis, 4) as made:
        await made[0].add_ready(A)
        version = int(redis.cli("GET", redis.key("version")))
        await asyncio.gather(*(fail(worker, 1, BreakerRules(20, 10.0)) for worker in made for _ in range(10)))
        assert failures(redis) == {A: "40"}
        assert field(redis, "breaker") == "open" and field(redis, "breaker_opens") == "1"
        assert int(redis.cli("GET", redis.key("version"))) == version + 1


async def test_a_success_in_between_begins_the_count_anew(redis: Space) -> None:
    async with workers(redis, 2) as (w1, w2):
        await w1.add_ready(A)
        await w2.registry.refresh()
        for _ in range(3):
            await fail(w1, 4)
            await succeed(w2, redis)
        assert failures(redis) == {} and field(redis, "breaker") == "closed"


async def test_an_answer_that_did_not_end_well_is_no_success(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        await w1.add_ready(A)
        await fail(w1, 4)
        give_back(await w1.take(), succeeded=False)
        await aeventually(lambda: w1.ledger.counts == {})
        await fail(w1)
        assert field(redis, "breaker") == "open"


async def test_a_node_with_the_best_history_that_fails_at_once_gains_nothing_by_it(redis: Space) -> None:
    async with workers(redis, 2, strategy="min_observed_latency") as made:
        await made[0].add_ready(A)
        redis.cli("HSET", redis.key("latency_mean"), A, "0.001")
        await made[0].add_ready(B)
        redis.cli("HSET", redis.key("latency_mean"), B, "5.0")
        await made[1].registry.refresh()
        asked = []
        for i in range(40):
            worker = made[i % 2]
            (ticket,) = await worker.take()
            asked.append(ticket.url)
            if ticket.url == A:
                await fail(worker)
            ticket.release(succeeded=ticket.url == B, answered=ticket.url == B)
        assert asked == [A] * 5 + [B] * 35
        await aeventually(lambda: exact(redis, made))
        assert redis.cli("HGET", redis.key("latency_mean"), A) == "0.001"
        assert redis.cli("LRANGE", redis.key(f"latency:{A}"), 0, -1) == []


async def test_while_it_is_open_failures_change_nothing(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        await w1.add_ready(A)
        await fail(w1, 5)
        version, until_ms = redis.cli("GET", redis.key("version")), field(redis, "breaker_until_ms")
        await fail(w1, 20)
        assert (redis.cli("GET", redis.key("version")), field(redis, "breaker_until_ms")) == (version, until_ms)
        assert field(redis, "breaker_opens") == "1"


async def test_each_time_in_a_row_it_is_open_for_twice_as_long_up_to_the_longest(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        await w1.add_ready(A)
        await fail(w1, 5)
        lasted = [round(open_for_s(redis))]
        for _ in range(6):
            await open_to_half_open(w1, redis)
            await fail(w1)  # the trial: one is enough
            lasted.append(round(open_for_s(redis)))
        assert lasted == [10, 20, 40, 60, 60, 60, 60]
        assert field(redis, "breaker_opens") == "7"
        await aeventually(lambda: node(w1).breaker_opens == 7)


async def test_a_thousand_times_in_a_row_is_no_number_that_breaks_anything(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        await w1.add_ready(A)
        await fail(w1, 5)
        redis.cli("HSET", redis.key(f"node:{A}"), "breaker_opens", "5000")
        await open_to_half_open(w1, redis)
        await fail(w1)
        assert 59 < open_for_s(redis) <= 60


async def test_after_a_success_it_opens_for_the_first_time_again(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        await w1.add_ready(A)
        await fail(w1, 5)
        await open_to_half_open(w1, redis)
        await fail(w1)
        await open_to_half_open(w1, redis)
        assert await w1.registry.move_breaker(A, "close")
        assert failures(redis) == {} and field(redis, "breaker_opens") is None
        await fail(w1, 4)
        assert field(redis, "breaker") == "closed", "all five are needed"
        await fail(w1)
        assert 9 < open_for_s(redis) <= 10


async def test_one_failure_on_probation_opens_it_again_for_longer_and_a_success_ends_the_probation(
    redis: Space,
) -> None:
    """A probe's success says that somebody listens, not that requests get an answer."""
    async with workers(redis, 1) as (w1,):
        await w1.add_ready(A)
        await fail(w1, 5)
        await open_to_half_open(w1, redis)
        assert await w1.registry.move_breaker(A, "close on probation", 5)
        assert field(redis, "breaker") == "closed" and node(w1).breaker == Breaker.CLOSED
        await fail(w1)
        assert field(redis, "breaker") == "open" and 19 < open_for_s(redis) <= 20
        await open_to_half_open(w1, redis)
        assert await w1.registry.move_breaker(A, "close on probation", 5)
        await succeed(w1, redis)
        await fail(w1, 4)
        assert field(redis, "breaker") == "closed"
        await fail(w1)
        assert 9 < open_for_s(redis) <= 10, "the first of a new row"


async def test_a_node_that_nobody_knows_has_no_failures(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        await fail(w1, 9)
        assert failures(redis) == {} and not redis.cli("EXISTS", redis.key(f"node:{A}"))
        assert not await w1.registry.move_breaker(A, "close")


@pytest.mark.parametrize("how", ["removed and added", "registered anew"])
async def test_another_process_at_the_address_begins_without_failures(redis: Space, how: str) -> None:
    async with workers(redis, 1) as (w1,):
        await w1.add_ready(A)
        await fail(w1, 9)
        if how == "removed and added":
            assert await w1.registry.remove(A)
            assert failures(redis) == {}
        await w1.add_ready(A)
        assert failures(redis) == {} and node(w1).breaker == Breaker.CLOSED
        await fail(w1, 4)
        assert field(redis, "breaker") == "closed"


async def test_what_is_known_of_a_breaker_comes_back_with_the_registry(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        await w1.add_ready(A)
        await fail(w1, 5)
        until_ms = field(redis, "breaker_until_ms")
        redis.cli("DEL", *(redis.key(name) for name in ("nodes", "version", f"node:{A}")))
        await w1.registry.refresh()
        assert (field(redis, "breaker"), field(redis, "breaker_until_ms")) == ("open", until_ms)


# --- half-open, and the one trial -------------------------------------------------------------------


async def test_it_is_half_open_only_when_its_time_is_over_and_only_once(redis: Space) -> None:
    async with workers(redis, 3) as made:
        await made[0].add_ready(A)
        assert not await made[0].registry.move_breaker(A, "half_open"), "it is closed"
        await fail(made[0], 1, BreakerRules(1, 0.15))
        assert not await made[0].registry.move_breaker(A, "half_open")
        await asyncio.sleep(0.2)
        moved = await asyncio.gather(
            *(worker.registry.move_breaker(A, "half_open") for worker in made for _ in range(10))
        )
        assert moved.count(True) == 1
        await aeventually(lambda: all(node(worker).breaker == Breaker.HALF_OPEN for worker in made))
        assert made[1].registry.snapshot.half_open("m", Role.Hybrid) == [A]


async def test_of_a_node_that_comes_back_it_is_half_open_before_its_time(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        await w1.add_ready(A)
        assert not await w1.registry.move_breaker(A, "half_open", 1), "it is closed"
        await fail(w1, 5)
        assert await w1.registry.move_breaker(A, "half_open", 1)
        assert field(redis, "breaker") == "half_open"
        assert not await w1.registry.move_breaker(A, "half_open", 1), "it is so already"


async def test_of_all_who_claim_the_trial_exactly_one_has_it(redis: Space) -> None:
    async with workers(redis, 4) as made:
        await made[0].add_ready(A)
        await fail(made[0], 1, AT_ONCE)
        for worker in made:
            assert not await worker.registry.move_breaker(A, "trial", 30_000), "it is open"
        for _ in range(3):  # each time in a row
            await open_to_half_open(made[0], redis)
            version = redis.cli("GET", redis.key("version"))
            claims = await asyncio.gather(
                *(worker.registry.move_breaker(A, "trial", 30_000) for worker in made for _ in range(25))
            )
            assert claims.count(True) == 1
            assert redis.cli("GET", redis.key("version")) == version, "the others need not look again"
            await fail(made[1], 1, AT_ONCE)


async def test_a_trial_that_told_nothing_can_be_claimed_again_after_its_time(redis: Space) -> None:
    async with workers(redis, 2) as (w1, w2):
        await w1.add_ready(A)
        await fail(w1, 1, AT_ONCE)
        await open_to_half_open(w1, redis)
        assert await w1.registry.move_breaker(A, "trial", 100)
        assert not await w2.registry.move_breaker(A, "trial", 100)
        await asyncio.sleep(0.15)
        claims = await asyncio.gather(
            *(w.registry.move_breaker(A, "trial", 30_000) for w in (w1, w2) for _ in range(9))
        )
        assert claims.count(True) == 1


async def test_a_trial_that_succeeds_closes_it_for_all(redis: Space) -> None:
    async with workers(redis, 2) as (w1, w2):
        await w1.add_ready(A)
        await fail(w1, 1, AT_ONCE)
        await open_to_half_open(w1, redis)
        assert await w2.registry.move_breaker(A, "trial", 30_000)
        assert await w2.registry.move_breaker(A, "close")
        assert not await w1.registry.move_breaker(A, "close"), "it is closed already"
        assert [field(redis, name) for name in ("breaker", "breaker_until_ms", "trial_until_ms")] == [
            "closed",
            None,
            None,
        ]
        await aeventually(lambda: not w1.registry.snapshot.broken and not w2.registry.snapshot.broken)


async def test_a_success_of_the_least_bad_node_closes_an_open_one_and_a_probe_does_not(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        await w1.add_ready(A)
        await fail(w1, 5)
        assert not await w1.registry.move_breaker(A, "close on probation", 5), "its time is not over"
        assert await w1.registry.move_breaker(A, "close")
        assert not w1.registry.snapshot.broken


async def test_where_all_are_open_requests_are_counted_on_the_least_bad_one(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        await w1.add_ready(A)
        await w1.add_ready(B)
        for url, times in ((A, 2), (B, 1)):
            await fail(w1, 1, AT_ONCE, url)
            for _ in range(times - 1):
                its_time_is_over(redis, url)
                assert await w1.registry.move_breaker(url, "half_open")
                await fail(w1, 1, AT_ONCE, url)
        tickets = await w1.take(4)
        assert {ticket.url for ticket in tickets} == {B}
        give_back(tickets)
        await w1.registry.remove(B)
        tickets = await w1.take(2)
        assert {ticket.url for ticket in tickets} == {A}
        give_back(tickets)
        await w1.registry.remove(A)
        with pytest.raises(NoNodeAvailable):
            await w1.take()


async def test_r96_redis_away_is_one_error_at_every_call(own_redis: Space) -> None:
    async with workers(own_redis, 1) as (w1,):
        await w1.add_ready(A)
        own_redis.server.kill()
        await aeventually(lambda: not w1.shared)
        calls: list[Callable[[], object]] = [
            lambda: w1.registry.record_failure(A, RULES),
            *(lambda move=move: w1.registry.move_breaker(A, move, 1) for move in ("half_open", "trial", "close")),  # type: ignore[misc]
        ]
        for call in calls:
            with pytest.raises(StoreUnavailable):
                await call()  # type: ignore[misc]
