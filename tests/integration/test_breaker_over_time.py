"""Breakers over restarts, beside probes, and when they open many times: each on a deployment with its own settings."""

from __future__ import annotations

import pytest

from tests.integration.failing import ONLY_CHATS, becomes, breaker, failures, field, open_for_s, tries, trip, unprobed
from tests.integration.stage import Bench, Stage, beside
from tests.support.engine import SimulatedEngine
from tests.support.wait import eventually

BENCHES_AT_ONCE = 2
N = 5

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]  # the first test of the scenarios waits for all of them


def on(bench: Bench, *, masters: int = 1, workers: int = 2, **settings: int | float) -> Stage:
    times: dict[str, int | float] = {"first_byte_timeout_s": 1, "connect_timeout_s": 0.5, "breaker_failures": N}
    made = [bench.deployment(workers, settings=times | settings) for _ in range(masters)]
    return Stage(bench.space, made, bench.engine)


def time_is_over(stage: Stage, engine: SimulatedEngine) -> None:
    """As if the seconds for which it is open had passed."""
    stage.space.cli("HSET", stage.space.key(f"node:{engine.url}"), "breaker_until_ms", 1)
    stage.space.cli("INCR", stage.space.key("version"))
    becomes(stage, engine, "half_open", within_s=3)


@beside
def test_it_opens_for_twice_as_long_each_time_up_to_60_s(bench: Bench) -> None:
    stage = on(bench, workers=1, breaker_open_s=16, probe_interval_s=60, probe_timeout_s=600)
    engine = unprobed(stage)
    trip(stage, engine)
    engine.set(cut_after=-1)
    assert 14 < open_for_s(stage, engine) <= 16
    for length_s in (32, 60, 60):
        time_is_over(stage, engine)
        # All nodes of the model are broken: a request reaches this one, trial or not.
        assert stage.many(1).result(5)[0].status == 502
        becomes(stage, engine, "open")
        assert length_s - 2 < open_for_s(stage, engine) <= length_s
    time_is_over(stage, engine)
    engine.set(cut_after=None)
    assert stage.many(1).result(5)[0].ok
    becomes(stage, engine, "closed")
    assert (failures(stage, engine), field(stage, engine, "breaker_opens") or "0") == (0, "0")


@beside
def test_it_stays_open_over_a_restart_of_all_workers(bench: Bench) -> None:
    stage = on(bench, breaker_open_s=30, probe_interval_s=60, probe_timeout_s=600)
    bad = unprobed(stage)
    trip(stage, bad)
    good = unprobed(stage)
    left_s = open_for_s(stage, bad)
    stage.deployment.restart()
    assert breaker(stage, bad) == "open"
    assert 0 < open_for_s(stage, bad) < left_s
    good.forget()
    assert all(answer.ok for answer in stage.many(40, concurrency=10).result(10))
    assert tries(bad, good) == [0, 40]
    time_is_over(stage, bad)
    eventually(lambda: stage.many(2).result(5) and breaker(stage, bad) == "closed", within_s=3)
    assert len(bad.requests) >= 1


@beside
def test_a_good_probe_closes_it_on_probation(bench: Bench) -> None:
    stage = on(bench, breaker_open_s=1, probe_interval_s=0.4)
    engine = stage.engine()
    trip(stage, engine)
    opened = len(engine.probes)
    becomes(stage, engine, "closed", within_s=3.5)
    assert engine.requests == [], "no request was the trial"
    assert len(engine.probes) > opened
    # It may answer probes and nothing else: one failure is enough now.
    engine.set(cut_after=-1)
    assert stage.many(1).result(5)[0].status == 502
    becomes(stage, engine, "open")
    assert 1 < open_for_s(stage, engine) <= 2
    # One success, and it is trusted as before.
    engine.set(cut_after=None)
    becomes(stage, engine, "closed", within_s=4.5)
    assert stage.many(1).result(5)[0].ok
    eventually(lambda: failures(stage, engine) == 0)
    engine.set(cut_after=-1)
    stage.many(N - 1, concurrency=1).result(5)
    eventually(lambda: failures(stage, engine) == N - 1)
    assert breaker(stage, engine) == "closed"
    stage.many(1).result(5)
    becomes(stage, engine, "open")
    assert 0 < open_for_s(stage, engine) <= 1


@beside
def test_a_bad_probe_closes_nothing(bench: Bench) -> None:
    stage = on(bench, workers=1, breaker_open_s=0.5, probe_interval_s=0.4, probe_down_after=1000)
    engine = stage.engine()
    trip(stage, engine)
    engine.set(health_status=500)
    becomes(stage, engine, "half_open", within_s=3)
    seen = len(engine.probes)
    eventually(lambda: len(engine.probes) >= seen + 3, within_s=4)
    assert breaker(stage, engine) == "half_open"
    assert stage.state(engine) == "ready"


@beside
def test_r28_a_killed_engine_costs_no_client_anything_and_comes_back_by_itself(bench: Bench) -> None:
    stage = on(bench, masters=2, workers=1, probe_interval_s=1, probe_timeout_s=0.5)
    dying, living = stage.engines(2, ttft_s=0.05)
    with stage.traffic(every_s=0.02) as traffic:
        eventually(lambda: len(dying.requests) > 20)
        dying.crash()
        eventually(lambda: stage.state(dying) == "down", within_s=2)
        for master in stage.masters:
            eventually(lambda master=master: stage.state(dying, master) == "down", within_s=1)  # type: ignore[misc]
        before = len(traffic.answers)
        eventually(lambda: len(traffic.answers) > before + 20)
        dying.start()
        back = len(dying.requests)
        eventually(lambda: len(dying.requests) > back + 20, within_s=6)
    assert traffic.failed == []
    assert living.requests


@beside
def test_r28_an_engine_that_falls_silent_costs_no_client_anything(bench: Bench) -> None:
    stage = on(bench, masters=2, workers=1, probe_interval_s=1, probe_timeout_s=0.5, breaker_open_s=30)
    silent, living = stage.engines(2, ttft_s=0.3)
    with stage.traffic(every_s=0.03) as traffic:
        eventually(lambda: len(silent.requests) > 10)
        silent.set(blackhole=True)
        eventually(lambda: stage.state(silent) == "down" or breaker(stage, silent) == "open", within_s=5)
        living.forget()
        eventually(lambda: len(living.requests) > 40, within_s=4)
        silent.set(blackhole=False, only_for=ONLY_CHATS)
    assert traffic.failed == []
