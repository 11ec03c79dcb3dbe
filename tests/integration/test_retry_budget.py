"""The retry budget of a whole deployment: of its requests over 10 s a fifth may be sent again, and 20 more.

Two hosts with two workers each. The bounds are counted at the engines.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.integration.failing import asked, fresh_budget, never_twice, tries
from tests.integration.stage import EngineFactory, Fleet, Stage, frozen, staged
from tests.support.engine import SimulatedEngine
from tests.support.epd_floor import floor_on, pictures
from tests.support.loop import LoopThread
from tests.support.redis import PrivateRedis, Space
from tests.support.wait import eventually

WINDOW_S, FLOOR, RATIO = 10.0, 20, 0.2
# Breakers stay out of it: an open one would keep requests from the node that fails.
SETTINGS = {"probe_interval_s": 60, "first_byte_timeout_s": 2, "lease_s": 2, "breaker_failures": 100_000}
FLEET = {"masters": 2, "workers": 2, "settings": SETTINGS}

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def fleet_server() -> Iterator[PrivateRedis]:
    """Its own: it is frozen."""
    with PrivateRedis() as server:
        yield server


@pytest.fixture
def new_stage(fleet: Fleet, fleet_server: PrivateRedis, engine_factory: EngineFactory) -> Iterator[Stage]:
    """A deployment of which nothing has been asked in the last 10 s: the window has only the test's own."""
    with staged(*fleet.get(f"{time.monotonic()}"), engine_factory) as stage:
        yield stage


def failing(stage: Stage, count: int = 3) -> list[SimulatedEngine]:
    engines = stage.engines(count)
    for engine in engines:
        engine.set(status=503)
    return engines


def taken(space: Space) -> int:
    """How many were sent again within the window, as Redis has it."""
    return sum(map(int, space.client.hgetall(space.key("retries")).values()))


def use_up(space: Space) -> float:
    """As if others had sent very many again in this second; the moment."""
    second = int(space.client.time()[0])
    space.cli("HSET", space.key("retries"), second, 10_000)
    return time.monotonic()


def wait_for_renewals(stage: Stage) -> None:
    """Until each worker has joined and then renewed its lease."""
    workers = stage.space.key("workers")
    eventually(lambda: stage.space.cli("ZCARD", workers) == 4)
    seconds, microseconds = stage.space.client.time()
    begun_ms = seconds * 1000 + microseconds // 1000
    eventually(lambda: stage.space.client.zcount(workers, begun_ms + SETTINGS["lease_s"] * 1000 + 1, "+inf") == 4)


def test_when_it_is_used_up_only_what_cost_nothing_is_sent_again_until_the_window_is_over(stage: Stage) -> None:
    bad, good = stage.engines(2)
    bad.set(status=503)
    used_up_s = use_up(stage.space)
    answers = stage.many(40, concurrency=1).result(10)
    assert sorted(answer.status for answer in answers) == [200] * len(good.requests) + [503] * len(bad.requests)
    assert bad.requests and good.requests
    # A refused connection has cost no engine anything: through whichever worker, it goes to the other node.
    bad.set(refuse=True)
    assert all(answer.ok for answer in stage.many(20).result(10))
    bad.set(refuse=False)
    stage.deployment.wait_for_state("ready", bad)
    assert any(not answer.ok for answer in stage.many(20, concurrency=1).result(10))
    # Seconds are whole ones: the budget is back after 10 s, give or take one.
    eventually(lambda: taken(stage.space) < 10_000 or stage.many(4).result(5) is None, within_s=12, every_s=0.1)
    assert WINDOW_S - 1.2 < time.monotonic() - used_up_s < WINDOW_S + 1.5
    assert all(answer.ok for answer in stage.many(20, concurrency=1).result(10))
    assert taken(stage.space) >= 1


def test_retries_of_encoders_and_of_decode_count(fleet: Fleet, engine_loop: LoopThread) -> None:
    with floor_on(*fleet.get(), engine_loop) as floor:
        fresh_budget(floor.space)
        both = floor.one("both", chunks=2)
        first, second = floor.encoders(2)
        first.set(status=503)
        floor.turn_to(0)
        assert floor.chat(pictures(1)).ok
        assert (len(first.requests), len(second.requests), len(both.requests)) == (1, 1, 1)
        assert taken(floor.space) == 1
        use_up(floor.space)
        floor.turn_to(0)
        first.forget()
        second.forget()
        both.forget()
        assert floor.chat(pictures(1)).status >= 500
        assert (len(first.requests), len(second.requests), len(both.requests)) == (1, 0, 0)
        # Decode: once more from the encoders on, --decode-retries times, if there is something left.
        first.set(status=200)
        both.set(status=500)
        assert floor.chat(pictures(1)).status == 500
        assert len(both.requests) == 1
        fresh_budget(floor.space)
        assert floor.chat(pictures(1)).status == 500
        assert len(both.requests) == 3
        assert taken(floor.space) == 1
        both.set(status=200)


def test_a_fifth_of_the_requests_of_all_hosts_and_twenty_are_sent_again(new_stage: Stage) -> None:
    """Those that went well through one host pay for those that fail through the other one."""
    stage = new_stage
    engines = stage.engines(3)
    first, second = stage.urls
    stage.urls = [first]
    begun_s = time.monotonic()
    assert all(answer.ok for answer in stage.many(400, concurrency=20).result(20))
    # Each worker tells of its requests once a second.
    told_s = time.monotonic() + 1.5
    eventually(lambda: time.monotonic() > told_s)
    for engine in engines:
        engine.set(status=503)
        engine.forget()
    stage.urls = [second]
    assert {answer.status for answer in stage.many(300, concurrency=20).result(20)} == {503}
    assert time.monotonic() - begun_s < WINDOW_S - 1, "all within one window"
    extra = sum(tries(*engines)) - 300
    assert FLOOR + RATIO * 400 <= extra <= FLOOR + RATIO * 700, "600 would be wanted"
    assert extra == taken(stage.space)
    never_twice(*engines)


def test_a_little_traffic_has_the_floor(stage: Stage) -> None:
    fresh_budget(stage.space)
    engines = failing(stage)
    stage.many(8, concurrency=2).result(10)
    assert sum(tries(*engines)) == 8 + 2 * 8, "each at two others: 16 of at least 20"


def test_stale_connections_are_free(stage: Stage) -> None:
    fresh_budget(stage.space)
    engine = stage.engine()
    assert all(answer.ok for answer in stage.many(20).result(10))
    engine.set(close_on_request=True)
    answers = stage.many(60, concurrency=6).result(10)
    assert all(answer.ok for answer in answers)
    assert engine.stats.dropped > 5, "connections must have been stale"
    assert not stage.space.client.hgetall(stage.space.key("retries"))


def test_while_redis_is_frozen_requests_are_sent_again_within_the_budget(new_stage: Stage) -> None:
    stage = new_stage
    engines = failing(stage, 2)
    good = stage.engine()
    wait_for_renewals(stage)  # each worker has been told of those that joined after it
    with frozen(stage.space.server.pid):
        # The first of each worker wait for Redis once, the rest don't: then they go on from what they know.
        answers = stage.many(12, concurrency=4).result(30)
        # A worker that got more of them than its share of the floor hands the engine's 503 on.
        assert {answer.status for answer in answers} <= {200, 503}
        good.set(status=503)
        for engine in (*engines, good):
            engine.forget()
        answers = stage.many(200, concurrency=20).result(30)
        assert {answer.status for answer in answers} == {503}
        extra = sum(tries(*engines, good)) - 200
        assert 0 < extra <= FLOOR + RATIO * 212
    never_twice(*engines, good)
    good.set(status=200)
    eventually(lambda: stage.many(4).result(10)[0].status in (200, 503) and stage.counts() == (0, 0, 0), within_s=5)
    assert asked(good)
