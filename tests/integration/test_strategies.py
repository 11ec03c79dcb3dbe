"""The routing strategies on real workers, against distributions worked out by hand.

Bounds for what is left to chance are five standard deviations of the binomial: a correct build fails one run in
two million.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

import pytest

from tests.integration.stage import EngineFactory, Fleet, Outcomes, Stage, beside, lanes, run_beside, staged, stages
from tests.support import load
from tests.support.engine import SimulatedEngine
from tests.support.loop import LoopThread
from tests.support.redis import PrivateRedis
from tests.support.wait import eventually

WORKERS = {"min_expected_latency": 4, "random": 2, "min_observed_latency": 2, "least_expected_delay": 2}


pytestmark = pytest.mark.timeout(180)  # the first test of the scenarios waits for all of them


@pytest.fixture(scope="module")
def fleets(redis_server: PrivateRedis) -> Iterator[dict[str, Fleet]]:
    made = {
        strategy: Fleet(redis_server, workers=workers, settings={"routing_strategy": strategy, "probe_interval_s": 0.5})
        for strategy, workers in WORKERS.items()
    }
    yield made
    for fleet in made.values():
        fleet.close()


@pytest.fixture
def expected(fleets: dict[str, Fleet], engine_factory: EngineFactory) -> Iterator[Stage]:
    with staged(*fleets["min_expected_latency"].get(), engine_factory) as stage:
        yield stage


@pytest.fixture
def observed(fleets: dict[str, Fleet], engine_factory: EngineFactory) -> Iterator[Stage]:
    with staged(*fleets["min_observed_latency"].get(), engine_factory) as stage:
        yield stage


@pytest.fixture
def delay(fleets: dict[str, Fleet], engine_factory: EngineFactory) -> Iterator[Stage]:
    with staged(*fleets["least_expected_delay"].get(), engine_factory) as stage:
        yield stage


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, fleets: dict[str, Fleet], engine_loop: LoopThread) -> Iterator[Outcomes]:
    yield from run_beside(request, stages(lambda strategy: fleets[strategy].get(), engine_loop))


with_min_expected = partial(beside, on="min_expected_latency")
with_random = partial(beside, on="random")
with_min_observed = partial(beside, on="min_observed_latency")
with_delay = partial(beside, on="least_expected_delay")


def five_sigma(n: int, p: float) -> float:
    return 5 * math.sqrt(n * p * (1 - p))


def served(engines: list[SimulatedEngine]) -> list[int]:
    return [len(engine.requests) for engine in engines]


def counts_while_filling(stage: Stage, requests: int) -> tuple[list[tuple[int, ...]], list[load.Answer]]:
    """The counts, looked at as often as possible while the requests are sent, and the answers. The last half goes out
    at once, and may be counted between two looks; the others in ten parts, each when the one before is counted."""
    seen: list[tuple[int, ...]] = []
    bursts: list[Future[list[load.Answer]]] = []
    part = requests // 20
    for total in (*range(part, 10 * part + 1, part), requests):
        bursts.append(stage.many(total - (sum(seen[-1]) if seen else 0)))
        while not seen or sum(seen[-1]) < total:
            assert not bursts[0].done(), f"ended before all were counted: {seen[-3:]}"
            seen.append(stage.counts())
    return seen, [answer for burst in bursts for answer in burst.result(30)]


# --- min_expected_latency


def test_r01_burst_over_all_workers_splits_exactly(expected: Stage) -> None:
    engines = expected.engines(2, ttft_s=2)
    seen, answers = counts_while_filling(expected, 200)
    assert all(answer.ok for answer in answers)
    assert max(abs(a - b) for a, b in seen) <= 1 and len(set(seen)) >= 11
    assert served(engines) == [100, 100]


def test_r01_burst_over_speeds_3_and_1_splits_150_to_50(expected: Stage) -> None:
    engines = expected.engines(2, speeds=[3, 1], ttft_s=2)
    seen, answers = counts_while_filling(expected, 200)
    assert all(answer.ok for answer in answers)
    # Each step takes the smaller of a/3 and b/1, so that neither can be a whole request ahead of the other.
    assert max(abs(a / 3 - b) for a, b in seen) <= 1 and len(set(seen)) >= 11
    assert served(engines)[0] == pytest.approx(150, abs=1)


@with_min_expected
def test_r04_count_survives_probes_registration_and_speed_update(expected: Stage) -> None:
    first, second = expected.engines(2)
    first.set(stall_after=1)  # its streams run until it crashes
    expected.deployment.post("/nodes/remove", {"url": second.url})
    streams = expected.many(20, stream=True)
    eventually(lambda: expected.counts() == (20, 0))
    expected.deployment.add(second)
    probes_before = len(first.probes)
    eventually(lambda: len(first.probes) >= probes_before + 3)  # health cycles
    assert expected.counts() == (20, 0)
    expected.deployment.add(first)  # registers once more
    assert expected.counts() == (20, 0)
    expected.deployment.add(first, speed=1.5)
    assert expected.counts() == (20, 0)
    assert expected.deployment.unfinished()[first.url] == 20
    new = expected.many(10, max_tokens=1).result(20)
    assert all(answer.ok for answer in new)
    assert served([first, second]) == [20, 10]
    assert expected.counts(first) == (20,) and not streams.done()
    first.crash()
    assert len(streams.result(20)) == 20


def test_r10_each_worker_sees_the_load_of_the_others(expected: Stage) -> None:
    first, second = expected.engines(2, gap_s=0.1, chunks=22)
    expected.deployment.post("/nodes/remove", {"url": second.url})
    one, *others = expected.deployment.worker_pids()
    assert len(others) == 3
    with lanes(expected.deployment, one, 10) as busy:
        streams = [lane.stream(expected.model) for lane in busy]
        assert expected.share(expected.id_of(one), first) == 10
        expected.deployment.add(second)
        for pid in others:
            with lanes(expected.deployment, pid, 1) as (lane,):
                assert lane.chat(expected.model, max_tokens=1).status == 200
        assert served([first, second]) == [10, 3]
        assert all(stream.read().endswith(b"data: [DONE]\n\n") for stream in streams)


def test_r16_speeds_8_and_2_hold_80_and_20_in_flight(expected: Stage) -> None:
    fast, slow = expected.engines(2, speeds=[8, 2], gap_s=0.05, chunks=30)  # few enough a second for a busy machine
    chance = random.Random(16)
    lengths = [chance.randint(5, 30) for _ in range(300)]
    # Answers of different length: else all of a wave end at once, and the counts show nothing but the wave.
    closed_loop = expected.many(300, concurrency=100, stream=True, each=lambda i: {"max_tokens": lengths[i]})
    seen = []
    while not closed_loop.done():
        seen.append(expected.counts(fast, slow))
        time.sleep(0.01)
    assert all(answer.done for answer in closed_loop.result(30))
    # A client may have its next request counted before the release of its last one has arrived.
    assert max(a + b for a, b in seen) <= 110, "what has ended must not be counted"
    full = [(a, b) for a, b in seen if a + b >= 95]
    assert len(full) > 20, "the samples must show the full loop"
    assert all(75 <= a <= 85 and 15 <= b <= 25 for a, b in full), [s for s in full if not 75 <= s[0] <= 85]


@pytest.mark.parametrize("speed", [0, -2, "NaN", "Infinity", '"fast"', "true", "[1]"])
def test_r16_speed_that_is_no_positive_number_is_refused(expected: Stage, speed: object) -> None:
    body = f'{{"url": "http://127.0.0.1:9", "status": {{"models": ["m"], "speed": {speed}}}}}'.encode()
    reply = expected.deployment.request("POST", "/nodes/add", body=body, headers={"content-type": "application/json"})
    assert reply.status == 400
    if speed not in ("NaN", "Infinity"):  # these are no JSON: the body as a whole may be what is wrong
        assert "speed" in reply.json()["error"]["message"]
    assert "http://127.0.0.1:9" not in expected.deployment.nodes("?all=1")


@with_min_expected
def test_node_without_speed_counts_as_the_average_of_those_that_have_one(expected: Stage) -> None:
    # 6, 2 and the average 4 of a dozen: of 120 requests 60, 20 and 40.
    engines = expected.engines(3, speeds=[6, 2, None], ttft_s=1.5)
    assert all(answer.ok for answer in expected.many(120).result(30))
    assert served(engines) == [pytest.approx(60, abs=1), pytest.approx(20, abs=1), pytest.approx(40, abs=1)]


def test_pending_node_gets_traffic_only_while_none_is_ready(expected: Stage) -> None:
    (pending,) = expected.engines(1, ready=False, health_status=503, health_word="")
    assert expected.state(pending) == "pending"
    assert all(answer.ok for answer in expected.many(5).result(10))
    assert len(pending.requests) == 5
    ready = expected.engine()
    assert all(answer.ok for answer in expected.many(30).result(10))
    assert served([pending, ready]) == [5, 30]


# --- ties


@with_min_expected
def test_r12_min_expected_breaks_ties_at_random(expected: Stage) -> None:
    engines = expected.engines(3)
    assert all(answer.ok for answer in expected.many(300, concurrency=1, keep_alive=True).result(30))
    assert served(engines) == [pytest.approx(100, abs=five_sigma(300, 1 / 3))] * 3


@with_random
def test_r12_random_is_even_over_equal_nodes(by_chance: Stage) -> None:
    engines = by_chance.engines(3)
    assert all(answer.ok for answer in by_chance.many(300, concurrency=1, keep_alive=True).result(30))
    assert served(engines) == [pytest.approx(100, abs=five_sigma(300, 1 / 3))] * 3


@with_min_observed
def test_r12_min_observed_is_even_while_no_node_has_a_history(observed: Stage) -> None:
    engines = observed.engines(3, status=400)  # a 4xx makes no history: the windows stay empty all the time
    answers = observed.many(300, concurrency=1, keep_alive=True).result(30)
    assert {answer.status for answer in answers} == {400}
    assert served(engines) == [pytest.approx(100, abs=five_sigma(300, 1 / 3))] * 3


# --- random


@with_random
def test_random_is_weighted_by_speed(by_chance: Stage) -> None:
    # 3 : 1, and a node without speed counts as their average, 2: of 300 requests 150, 50 and 100.
    engines = by_chance.engines(3, speeds=[3, 1, None])
    assert all(answer.ok for answer in by_chance.many(300, concurrency=1, keep_alive=True).result(30))
    assert served(engines) == [
        pytest.approx(150, abs=five_sigma(300, 1 / 2)),
        pytest.approx(50, abs=five_sigma(300, 1 / 6)),
        pytest.approx(100, abs=five_sigma(300, 1 / 3)),
    ]


# --- min_observed_latency


def took_s(answer: load.Answer) -> float:
    """As its client saw it; a worker may notice a moment later that it has ended."""
    assert answer.finished_s is not None
    return answer.finished_s - answer.started_s


def window(stage: Stage, engine: SimulatedEngine) -> list[float]:
    found: list[float] = stage.deployment.nodes()[engine.url]["latency"]
    return found


def test_min_observed_prefers_the_node_with_the_least_mean(observed: Stage) -> None:
    """Not beside other scenarios: they would make the quick one slow."""
    quick, slow = observed.engines(2)
    slow.set(ttft_s=0.3)
    # Each is explored once, at once; from then on both have a history, and 0.3 s is never the least.
    assert all(answer.ok for answer in observed.many(30, concurrency=1).result(60))
    assert served([quick, slow]) == [29, 1]
    # The mean follows what is seen. With n answers of twice the slow one's latency in its window of 15, the quick
    # one's mean is above the slow one's once n is 8.
    quick.set(ttft_s=2 * window(observed, slow)[0])
    assert all(answer.ok for answer in observed.many(10, concurrency=1).result(60))
    assert 29 + 1 <= len(quick.requests) <= 29 + 8
    assert len(quick.requests) + len(slow.requests) == 30 + 10


@with_min_observed
def test_window_holds_the_last_15_latencies_newest_first_in_seconds(observed: Stage) -> None:
    engine = observed.engine(ttft_s=0.15)
    slow = observed.many(5, concurrency=1).result(60)
    # Both workers have told theirs: else one's would be newer than what comes now. No milliseconds.
    eventually(lambda: len(window(observed, engine)) == 5)
    assert all(0.15 <= latency < 150 for latency in window(observed, engine))
    engine.set(ttft_s=0)
    quick = observed.many(12, concurrency=1).result(60)
    assert all(answer.ok for answer in slow + quick)
    longest_s = max(took_s(answer) for answer in quick)

    def check() -> bool:
        held = window(observed, engine)
        assert len(held) == 15
        assert all(latency < longest_s + 0.09 for latency in held[:12])
        assert all(latency >= 0.15 for latency in held[12:])
        return True

    assert eventually(check)


@with_min_observed
def test_node_without_history_is_explored_by_one_request_at_a_time(observed: Stage) -> None:
    known = observed.engine()
    assert all(answer.ok for answer in observed.many(3, concurrency=1).result(10))
    unknown = observed.engine(ttft_s=1)
    assert all(answer.ok for answer in observed.many(50, concurrency=10).result(20))
    assert len(unknown.requests) == 1, "one explores it, all others go where the latency is known"
    assert len(known.requests) == 3 + 49
    assert eventually(lambda: len(window(observed, unknown)) == 1)


@with_min_observed
def test_r14_node_that_fails_fast_does_not_attract_traffic(observed: Stage) -> None:
    good = observed.engine(ttft_s=0.5)
    assert observed.many(1).result(5)[0].ok
    bad = observed.engine(status=500, ttft_s=0.002)
    answers = observed.many(100, concurrency=25).result(30)
    assert {answer.status for answer in answers} <= {200, 500}, "a 500 is tried elsewhere, once"
    # The first look at once, then one request in ten while it has no success (docs/decisions/0006).
    assert 1 <= len(bad.requests) <= 1 + 10 + five_sigma(100, 0.1)
    assert window(observed, bad) == []
    assert all(0.5 <= latency < 2 for latency in window(observed, good))


def test_r14_failed_aborted_and_4xx_answers_enter_no_window(observed: Stage) -> None:
    engine = observed.engine(chunks=5, gap_s=0.02)
    assert observed.many(1, stream=True).result(5)[0].done
    held = eventually(lambda: window(observed, engine))
    assert len(held) == 1
    for status in (400, 404, 429, 500, 503):
        engine.set(status=status)
        assert observed.many(1).result(5)[0].status == status
    engine.set(status=200, cut_after=2)
    assert not observed.many(1, stream=True).result(5)[0].done
    engine.set(cut_after=None, eof_after=2)
    assert not observed.many(1, stream=True).result(5)[0].done
    engine.set(eof_after=None)
    assert observed.many(1, stream=True, leave_after_chunks=2).result(5)[0].left
    eventually(lambda: observed.counts(engine) == (0,))
    assert window(observed, engine) == held
    assert observed.many(1, stream=True).result(5)[0].done
    assert eventually(lambda: len(window(observed, engine)) == 2)


# --- least_expected_delay


@with_delay
def test_speeds_are_learned_by_all_workers_together_and_followed(delay: Stage) -> None:
    quick, slow = delay.engines(2, chunks=10)
    quick.set(gap_s=0.01)
    slow.set(gap_s=0.04)
    assert all(answer.ok for answer in delay.many(40, concurrency=8, stream=True).result(30))

    def learned() -> list[float]:
        found = delay.space.client.hmget(delay.space.key("learned"), [quick.url, slow.url])
        return [float(speed or 0) for speed in found]

    # 0.1 and 0.4 s, and what runs on each: the root of it is between 1 and 3.
    eventually(lambda: learned()[0] > 1.5 * learned()[1] > 0)
    before = len(quick.requests), len(slow.requests)
    assert all(answer.ok for answer in delay.many(80, concurrency=8).result(30))
    more = len(quick.requests) - before[0], len(slow.requests) - before[1]
    assert sum(more) == 80 and more[0] > 2 * more[1] > 0


@with_delay
def test_a_node_that_fails_at_once_gains_nothing(delay: Stage) -> None:
    good, bad = delay.engines(2, gap_s=0.01, chunks=5)
    assert all(answer.ok for answer in delay.many(30, concurrency=4).result(20))
    had = len(bad.requests)
    bad.set(status=503, ttft_s=0)
    assert all(answer.ok for answer in delay.many(60, concurrency=8).result(30))
    assert len(good.requests) >= 60
    # Five open its breaker, and those that were under way then.
    assert len(bad.requests) - had <= 5 + 8
