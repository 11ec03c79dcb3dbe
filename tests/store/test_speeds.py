"""Learned speeds in Redis: the script against its twin, what takes an entry away, and workers that share them."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.balancing.learning import Learned, learn
from app.nodes import State
from app.store.keys import Keys
from app.store.ledger import Ticket
from app.store.registry import BreakerRules
from app.store.scripts import load_scripts
from tests.store.harness import MODEL, Worker, of, workers
from tests.support.redis import PrivateRedis, Space
from tests.support.wait import aeventually

SCRIPT = load_scripts()["learn_speeds"]
A, B, C = "http://a:1", "http://b:1", "http://c:1"
STRATEGY = "least_expected_delay"


class Teacher:
    """Calls the script on a clock of its own."""

    def __init__(self, server: PrivateRedis) -> None:
        self.keys = Keys(f"speeds{secrets.token_hex(4)}")
        self.client = server.client
        self.client.sadd(self.keys.nodes, A, B)

    def teach(self, now_ms: int | str, **rates: list[float]) -> None:
        urls = {name: {"a": A, "b": B, "c": C}[name] for name in rates}
        names = [self.keys.nodes, self.keys.unfinished, self.keys.learned, *map(self.keys.learning, urls.values())]
        arguments: list[Any] = [now_ms]
        for name, some in rates.items():
            arguments += [urls[name], len(some), *map(repr, some)]
        command = SCRIPT.evalsha(names, arguments)
        assert self.client.execute_command("EVAL", SCRIPT.text, *command[2:]) == [0]

    def learned(self, url: str = A) -> Learned:
        found: dict[str, str] = self.client.hgetall(self.keys.learning(url))  # type: ignore[assignment]
        at_s = float(found["at_ms"]) / 1000
        return Learned(float(found["speed"]), float(found["weight"]), int(found["shown"]), at_s)

    def counted(self, url: str = A) -> float | None:
        found = self.client.hget(self.keys.learned, url)
        return None if found is None else float(found)  # type: ignore[arg-type]

    def clear(self) -> None:
        for name in self.client.scan_iter(self.keys.prefix + "*"):
            self.client.delete(name)


@pytest.fixture
def teacher(redis_server: PrivateRedis) -> Iterator[Teacher]:
    redis_server.ensure_running()
    teacher = Teacher(redis_server)
    yield teacher
    teacher.clear()


NOTES = st.lists(
    st.tuples(st.lists(st.floats(1e-3, 1e5), min_size=1, max_size=5), st.integers(0, 40), st.integers(-5_000, 60_000)),
    min_size=1,
    max_size=8,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(notes=NOTES)
def test_lua_and_python_learn_alike(teacher: Teacher, notes: list[tuple[list[float], int, int]]) -> None:
    teacher.client.delete(teacher.keys.learned, teacher.keys.learning(A))
    now_ms, expected = 1_000_000_000, None
    for rates, unfinished, later_ms in notes:
        now_ms += later_ms
        teacher.client.hset(teacher.keys.unfinished, A, unfinished)
        teacher.teach(now_ms, a=rates)
        expected = learn(expected, rates, unfinished, now_ms / 1000)
        found = teacher.learned()
        assert found.speed == pytest.approx(expected.speed, rel=1e-5)
        assert found.weight == pytest.approx(expected.weight, abs=0.02)
        assert (found.shown, found.at_s) == (expected.shown, expected.at_s)
        assert teacher.counted() == pytest.approx(expected.counted, rel=1e-3)


def test_a_removed_node_is_not_brought_back_and_nodes_are_learned_each_for_itself(teacher: Teacher) -> None:
    teacher.teach(1000, a=[10.0, 10.0], c=[1.0], b=[40.0])
    assert teacher.learned(A).speed == pytest.approx(10.0)
    assert teacher.learned(B).speed == pytest.approx(40.0)
    assert teacher.counted(C) is None and not teacher.client.exists(teacher.keys.learning(C))


@pytest.mark.parametrize("rubbish", ["abc", "-5", "0", "nan", "inf", ""])
def test_a_figure_that_cannot_be_is_learned_anew(teacher: Teacher, rubbish: str) -> None:
    teacher.client.hset(teacher.keys.learning(A), mapping=dict.fromkeys(("speed", "weight", "shown"), rubbish))
    teacher.teach(1000, a=[10.0])
    assert teacher.learned().speed == pytest.approx(10.0)
    assert math.isfinite(teacher.learned().weight)


def test_who_comes_back_starts_slowly_with_the_speed_that_it_had(teacher: Teacher) -> None:
    teacher.teach(1000, a=[10.0] * 20)
    teacher.client.hdel(teacher.keys.learned, A)
    counted = []
    for step in range(5):
        teacher.teach(2000 + step, a=[10.0])
        counted.append(teacher.counted())
    assert counted == pytest.approx([4.0, 6.0, 8.0, 10.0, 10.0])


def test_without_a_clock_given_it_is_that_of_redis(teacher: Teacher) -> None:
    teacher.teach("", a=[10.0])
    seconds, _ = teacher.client.time()  # type: ignore[misc]
    assert abs(teacher.learned().at_s - seconds) < 5


# --- through workers


def learned_of(space: Space) -> dict[str, float]:
    return {url: float(speed) for url, speed in space.cli("HGETALL", space.key("learned")).items()}


async def answer(worker: Worker, url: str, *, work: float = 10.0, took_s: float = 1.0, times: int = 1) -> None:
    """Answers of one node as if they had taken so long."""
    tickets = []
    for _ in range(times):
        ticket = await worker.ledger.acquire(lambda snapshot: snapshot.only(url))
        ticket._began -= took_s
        tickets.append(ticket)
    for ticket in tickets:
        ticket.release(succeeded=True, work=work)
    worker.ledger._speeds.note()  # type: ignore[union-attr]
    await worker.take_nothing()


async def share(worker: Worker, requests: int) -> dict[str, int]:
    tickets: list[Ticket] = [await worker.ledger.acquire(of(MODEL)) for _ in range(requests)]
    found: dict[str, int] = {}
    for ticket in tickets:
        found[ticket.url] = found.get(ticket.url, 0) + 1
        ticket.release(succeeded=False)
    return found


async def test_all_workers_go_by_what_one_has_learned(redis: Space) -> None:
    async with workers(redis, 2, strategy=STRATEGY) as (w1, w2):
        for url in (A, B):
            await w1.add_ready(url)
        await aeventually(lambda: B in w2.registry.snapshot.nodes)
        await answer(w1, A, work=30.0, times=4)
        await answer(w1, B, work=10.0, times=4)
        found = learned_of(redis)
        assert found[A] / found[B] == pytest.approx(3, rel=0.05)
        assert await share(w2, 40) == {A: pytest.approx(30, abs=2), B: pytest.approx(10, abs=2)}


async def test_nothing_is_learned_under_another_strategy_or_of_failures_or_without_work(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        (ticket,) = await worker.take()
        ticket.release(succeeded=True, work=10.0)
    async with Worker(redis.url, redis.namespace, "w2", strategy=STRATEGY) as worker:
        for succeeded, work in ((False, 10.0), (True, None)):
            (ticket,) = await worker.take()
            ticket.release(succeeded=succeeded, work=work)
    assert learned_of(redis) == {} and not [name for name in redis.key_names() if name.startswith("learning")]


async def test_what_was_waited_for_before_the_request_went_out_does_not_count(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategy=STRATEGY) as worker:
        await worker.add_ready(A)
        (ticket,) = await worker.take()
        ticket._since = ticket._began = ticket._since - 60
        ticket.begin()
        ticket._began -= 1.0
        ticket.release(succeeded=True, work=10.0)
        worker.ledger._speeds.note()  # type: ignore[union-attr]
        await worker.take_nothing()
        assert learned_of(redis)[A] == pytest.approx(10.0 * 2 / 5, rel=0.05)
        assert float(redis.cli("LINDEX", redis.key(f"latency:{A}"), 0) or 61) > 60  # the window is as ever


async def test_each_failure_of_a_row_halves_and_an_answer_makes_it_whole_again(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategy=STRATEGY) as worker:
        await worker.add_ready(A)
        await answer(worker, A, times=4)
        whole = learned_of(redis)[A]
        seen = []
        for _ in range(6):
            await worker.registry.record_failure(A, BreakerRules(threshold=100, open_s=10))
            seen.append(whole / learned_of(redis)[A])
        assert seen == pytest.approx([2, 4, 8, 16, 16, 16], rel=2e-3)
        await answer(worker, A)
        assert learned_of(redis)[A] == pytest.approx(whole, rel=0.1)


async def test_a_node_that_comes_back_or_whose_breaker_closes_has_to_show_its_speed(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategy=STRATEGY) as worker:
        await worker.add_ready(A)
        for come_back in ("down", "breaker"):
            await answer(worker, A, times=4)
            assert A in learned_of(redis)
            if come_back == "down":
                for state in (State.DOWN, State.READY):
                    await worker.registry.set_state(worker.registry.snapshot.nodes[A], state)
            else:
                await worker.registry.record_failure(A, BreakerRules(threshold=1, open_s=10))
                await worker.registry.move_breaker(A, "close")
            assert A not in learned_of(redis)
            assert redis.cli("HGET", redis.key(f"learning:{A}"), "speed")


async def test_a_good_probe_of_a_ready_node_takes_nothing_away_and_a_removal_all(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategy=STRATEGY) as worker:
        await worker.add_ready(A)
        await answer(worker, A, times=4)
        await worker.registry.set_state(worker.registry.snapshot.nodes[A], State.READY)
        assert A in learned_of(redis)
        await worker.registry.remove(A)
        assert not [name for name in redis.key_names() if name.startswith("learn")]


async def test_without_redis_a_worker_goes_by_its_own_answers(own_redis: PrivateRedis) -> None:
    async with Worker(own_redis.url, "alone", "w1", strategy=STRATEGY, timeout_s=0.5) as worker:
        for url in (A, B):
            await worker.add_ready(url)
        await answer(worker, A, work=30.0, times=4)
        await answer(worker, B, work=10.0, times=4)
        own_redis.server.kill()
        await aeventually(lambda: not worker.shared)
        assert await share(worker, 40) == {A: pytest.approx(30, abs=2), B: pytest.approx(10, abs=2)}
