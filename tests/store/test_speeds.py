"""Learned speeds in Redis: the script against its twin, what takes an entry away, and workers that share them."""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.balancing import POLICIES, Candidate
from app.balancing.learning import Learned, learn
from app.nodes import Role, State
from app.store import ledger as ledger_module
from app.store.keys import Keys
from app.store.ledger import Ticket
from app.store.load_index import LARGE
from app.store.registry import BreakerRules
from app.store.scripts import load_scripts
from app.store.snapshot import Pool
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
        names = [self.keys.nodes, self.keys.unfinished, self.keys.learned, self.keys.learned_since]
        names += [self.keys.load_index, self.keys.load_sums]
        arguments: list[Any] = [now_ms, ""]
        for name, some in rates.items():
            names += [self.keys.learning(urls[name]), self.keys.load(0)]
            arguments += [urls[name], "", len(some), *map(repr, some)]
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


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        assert teacher.counted() == pytest.approx(expected.counted, rel=0.0105)  # smaller steps are not written


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


# --- what an acquire takes from its arguments, and what it reads


class Fixed(random.Random):
    """Gives the two numbers of one decision, over and over."""

    two: tuple[float, float] = (0.5, 0.5)
    _at = 0

    def random(self) -> float:
        self._at += 1
        return self.two[(self._at - 1) % 2]


def expected(space: Space, pool: Pool, two: tuple[float, float]) -> str:
    """By what stands in Redis right now."""
    counts = space.cli("HGETALL", space.key("unfinished"))
    learned = {url: float(speed) for url, speed in space.cli("HGETALL", space.key("learned")).items()}
    candidates = {
        url: Candidate(speed, int(counts.get(url, 0)), learned=learned.get(url))
        for url, speed in zip(pool.urls, pool.speeds, strict=True)
    }
    urls = list(pool.urls)
    if len(urls) >= LARGE:  # equals are drawn from as they stand in the order of loads

        def place(url: str) -> tuple[float, str]:
            known, count = learned.get(url), candidates[url].unfinished
            speed = candidates[url].speed
            return ((count + 1) / known if known else -speed / (count + 1)), f"{speed} {url}"

        urls.sort(key=place)
    return urls[POLICIES[STRATEGY]([candidates[url] for url in urls], two)[0]]


@pytest.mark.parametrize(("size", "seed"), [(3, 0), (3, 1), (LARGE + 2, 2)])
async def test_every_choice_is_by_what_is_learned_at_that_moment_whatever_workers_were_told(
    redis: Space, monkeypatch: pytest.MonkeyPatch, size: int, seed: int
) -> None:
    """Two workers that are told now and then, or go by the order of loads, and everything that may change a speed in
    between."""
    monkeypatch.setattr(ledger_module, "SETTLED_S", 0.0)
    urls = [f"http://n{number}:1" for number in range(size)]
    steps = random.Random(seed)
    kinds = [*["acquire"] * 24, *["learn"] * 4, "fail", "come back", "edit", "lose"]
    async with workers(redis, 2, strategy=STRATEGY) as both:
        for number, url in enumerate(urls):
            await both[0].add_ready(url, speed=2.0 ** (number % 3))
        for worker in both:
            await worker.registry.refresh()
        redis.cli("HSET", redis.key("learned"), *(word for url in urls[3:] for word in (url, "7")), urls[0], "9")
        tickets: list[Ticket] = []
        by_arguments = by_order = 0
        for _ in range(300):
            worker, url, kind = steps.choice(both), steps.choice(urls), steps.choice(kinds)
            if kind == "acquire":
                ledger = worker.ledger
                ledger._draws = fixed = Fixed()
                # Seldom one that explores: then no speed matters.
                fixed.two = steps.random(), steps.choice((0.5, 0.5, 0.5, 0.05, 0.001))
                pool = worker.registry.snapshot.pool(MODEL, Role.Hybrid)
                told = ledger._learned.get(pool)
                right = expected(redis, pool, fixed.two)
                by_arguments += told is not None and told.since.decode() == redis.cli("GET", redis.key("learned_since"))
                tickets.append(await ledger.acquire(of(MODEL)))
                assert tickets[-1].url == right
                by_order += redis.cli("EXISTS", redis.key("load_index"))
            elif kind == "learn":
                await answer(worker, url, work=steps.choice((5.0, 10.0, 40.0)), times=steps.randint(1, 4))
            elif kind == "fail":
                await worker.registry.record_failure(url, BreakerRules(threshold=1000, open_s=10))
            elif kind == "come back":
                await worker.registry._to_show_its_speed(url)
            elif kind == "edit":  # by hand, and heard of when what was told has expired
                redis.cli("HSET", redis.key("learned"), url, str(steps.randint(1, 90)))
                redis.cli("DEL", redis.key("learned_since"), redis.key("load_index"))
            elif steps.random() < 0.3:
                redis.cli("DEL", redis.key("learned"), redis.key("learned_since"), redis.key("load_index"))
            if tickets and steps.random() < 0.4:
                tickets.pop(steps.randrange(len(tickets))).release(succeeded=False)
                await both[0].take_nothing()
                await both[1].take_nothing()
        assert by_order > 150 if size >= LARGE else by_arguments > 20
        for ticket in tickets:
            ticket.release(succeeded=False)


async def test_a_worker_is_told_once_and_redis_reads_nothing_more_until_a_speed_changes(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategy=STRATEGY) as worker:
        for url in (A, B):
            await worker.add_ready(url)
        await answer(worker, A, work=30.0, times=4)
        assert not worker.ledger._learned, "one node of two is no speed to go by"
        await answer(worker, B, work=10.0, times=4)
        await share(worker, 2)
        pool = worker.registry.snapshot.pool(MODEL, Role.Hybrid)
        told = worker.ledger._learned[pool]
        redis.cli("SET", redis.key("learned_since"), told.since.decode())  # and it does not expire
        before = redis.cli("INFO", "commandstats")["cmdstat_hmget"]["calls"]
        await share(worker, 20)
        assert redis.cli("INFO", "commandstats")["cmdstat_hmget"]["calls"] - before == 20, "the counts, and no speeds"
        assert worker.ledger._learned[pool] is told
        await answer(worker, A, work=60.0)
        await share(worker, 1)
        assert worker.ledger._learned[pool].since != told.since


async def test_what_was_told_expires_so_that_an_edit_by_hand_is_heard_of(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategy=STRATEGY) as worker:
        await worker.add_ready(A)
        await answer(worker, A, times=4)
        await share(worker, 1)
        assert 0 < int(redis.cli("PTTL", redis.key("learned_since"))) <= 1000


@pytest.mark.parametrize(
    "write",
    [("SET", "x"), ("RPUSH", "x"), ("SADD", "x"), ("ZADD", "1", "x"), ("HSET", "f", "x"), ("XADD", "*", "f", "x")],
)
async def test_whatever_somebody_wrote_over_what_was_told_harms_nothing(redis: Space, write: tuple[str, ...]) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategy=STRATEGY) as worker:
        for url in (A, B):
            await worker.add_ready(url)
        redis.cli("HSET", redis.key("learned"), A, "30", B, "10")
        command, *words = write
        redis.cli("DEL", redis.key("learned_since"))
        redis.cli(command, redis.key("learned_since"), *words)
        assert await share(worker, 8) == {A: 6, B: 2} and worker.shared
        await answer(worker, A, work=90.0, times=4)  # whoever learns takes it away
        await share(worker, 1)
        assert redis.cli("GET", redis.key("learned_since")).isdigit()


async def test_pairs_are_chosen_by_what_both_roles_were_told(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategy=STRATEGY) as worker:
        for url, role in ((A, Role.Prefill), (B, Role.Prefill), (C, Role.Decode)):
            await worker.add_ready(url, role=role)
        redis.cli("HSET", redis.key("learned"), A, "10", B, "40", C, "5")
        worker.ledger._draws = Fixed()
        tickets = []
        for _ in range(6):
            tickets += await worker.ledger.acquire_each(
                lambda snapshot: snapshot.pool(MODEL, Role.Prefill), lambda snapshot: snapshot.pool(MODEL, Role.Decode)
            )
        # B at 1 / 40, 2 / 40, 3 / 40; at 4 / 40 it ties with A's 1 / 10, and the draw is for the second of two.
        assert [ticket.url for ticket in tickets] == [B, C, B, C, B, C, B, C, A, C, B, C]
        assert len(worker.ledger._learned) == 2
        for ticket in tickets:
            ticket.release(succeeded=False)


def test_a_speed_is_written_only_where_it_has_moved_by_more_than_a_hundredth(teacher: Teacher) -> None:
    since = teacher.keys.learned_since
    teacher.teach(1000, a=[10.0] * 400)
    teacher.client.set(since, "1")
    # One sample of four times the speed among four hundred: a third of a hundredth.
    teacher.teach(1001, a=[40.0])
    assert teacher.counted() == 10.0 and teacher.client.get(since) == "1"
    assert 10.02 < teacher.learned().speed < 10.05
    teacher.teach(1002, a=[40.0] * 3)
    assert teacher.counted() == pytest.approx(teacher.learned().speed, rel=1e-3) and not teacher.client.exists(since)
