"""A breaker per node, one for all workers of all hosts: it opens, lets one request of the deployment try, and closes.

Probes never end here once a node is ready (`node`), so what moves a breaker is requests alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.failing import (
    ONLY_CHATS,
    SEEN,
    asked,
    becomes,
    breaker,
    failures,
    field,
    open_for_s,
    stays,
    tries,
    trip,
)
from tests.integration.serving import broken_stream
from tests.integration.stage import Lane, Stage, beside, lanes, start
from tests.support import load
from tests.support.engine import SimulatedEngine
from tests.support.wait import eventually

N, OPEN_S, FIRST_BYTE_S = 5, 1.0, 1.0
SETTINGS = {
    "breaker_open_s": OPEN_S,
    "first_byte_timeout_s": FIRST_BYTE_S,
    "connect_timeout_s": 0.5,
    "probe_interval_s": 60,
    "probe_timeout_s": 600,
}
FLEET = {"masters": 2, "workers": 2, "settings": SETTINGS}
LOOK_S = 1.5  # within this an open breaker whose time is over is half-open

pytestmark = pytest.mark.timeout(120)  # the first test of the scenarios waits for all of them


def node(stage: Stage, **knobs: Any) -> SimulatedEngine:
    """A node that is ready and then never answers a probe, nor lets one time out."""
    engine = stage.engine()
    engine.set(health_delay_s=600, **knobs)
    return engine


def again(stage: Stage, engine: SimulatedEngine) -> None:
    """It registers again, through the other host, and is ready."""
    engine.set(health_delay_s=0)
    stage.masters[1].add(engine)
    engine.set(health_delay_s=600)


@contextlib.contextmanager
def every_worker(stage: Stage) -> Iterator[list[Lane]]:
    """A connection to each worker of both masters."""
    with contextlib.ExitStack() as stack:
        made: list[Lane] = []
        for master in stage.masters:
            for pid in master.worker_pids():
                made += stack.enter_context(lanes(master, pid, 1))
        assert len(made) == 4
        yield made


def half_open(stage: Stage, engine: SimulatedEngine) -> None:
    becomes(stage, engine, "half_open", within_s=max(open_for_s(stage, engine), 0) + LOOK_S)


def made_its_trial(stage: Stage, engine: SimulatedEngine, **options: Any) -> load.Answer:
    """The answer to the request that was the trial; a worker may know of it a moment later than Redis does."""
    before = len(engine.requests)
    deadline_s = time.monotonic() + 2
    while time.monotonic() < deadline_s:
        answer = stage.many(1, **options).result(10)[0]
        if len(engine.requests) > before:
            return answer
    raise AssertionError("no request was let through")


# --- it opens


def test_it_opens_on_the_fifth_failure_in_a_row_over_all_workers(stage: Stage) -> None:
    engine = node(stage, cut_after=-1)
    with every_worker(stage) as (first, second, third, fourth):
        for lane in (first, second, third, fourth):
            assert lane.chat(stage.model).status == 502
        stays(stage, engine, "closed", 4)
        engine.set(cut_after=None)
        assert third.chat(stage.model).status == 200
        eventually(lambda: failures(stage, engine) == 0)
        engine.set(cut_after=-1)
    with every_worker(stage) as (first, second, third, fourth):
        for lane in (fourth, third, second, first):
            assert lane.chat(stage.model).status == 502
        stays(stage, engine, "closed", 4)
    with every_worker(stage) as (first, *_):
        assert first.chat(stage.model).status == 502
        becomes(stage, engine, "open")
        assert 0 < open_for_s(stage, engine) <= OPEN_S
        assert field(stage, engine, "breaker_opens") == "1"


@pytest.mark.parametrize("fault", [{"reset_on_accept": True}, {"eof_after": -1}, SEEN["silence"], {"refuse": True}])
def test_what_opens_it(stage: Stage, fault: dict[str, Any]) -> None:
    engine = node(stage, **fault)
    answers = stage.many(N).result(10)
    # A refused node is down at once, and then nobody asks it any more.
    assert {a.status for a in answers} <= ({504} if "blackhole" in fault else {502, 503})
    if "refuse" in fault:
        eventually(lambda: stage.state(engine) == "down")
        assert 1 <= failures(stage, engine) <= N
    else:
        becomes(stage, engine, "open")


@pytest.mark.parametrize("fault", [{"cut_after": 2}, {"eof_after": 2}, {"eof_after": 2, "eof_how": "close"}])
def test_r46_death_in_mid_stream_is_a_failure_of_the_node(stage: Stage, fault: dict[str, Any]) -> None:
    engine = node(stage, **fault)
    for i in range(N):
        assert failures(stage, engine) == i
        broken_stream(stage.many(1, stream=True).result(5)[0].body, chunks=2)
        eventually(lambda i=i: failures(stage, engine) == i + 1)  # type: ignore[misc]
    becomes(stage, engine, "open")


def test_death_in_the_middle_of_an_answer_that_is_no_stream_is_a_failure_of_the_node(stage: Stage) -> None:
    engine = node(stage, cut_after=1, body_mb=0.1)
    stage.many(2).result(5)
    stays(stage, engine, "closed", 2)


def test_answers_of_the_engine_do_not_open_it(stage: Stage) -> None:
    engine = node(stage)
    for status in (400, 404, 429, 500, 502, 503, 504):
        engine.set(status=status)
        assert {answer.status for answer in stage.many(2 * N).result(5)} == {status}
    stays(stage, engine, "closed", 0)
    assert len(engine.requests) == 7 * 2 * N


def test_an_answer_of_any_status_ends_a_row_of_failures(stage: Stage) -> None:
    """They are no failures in a row when the connection worked between them."""
    engine = node(stage, cut_after=-1)
    stage.many(N - 1, concurrency=1).result(5)
    stays(stage, engine, "closed", N - 1)
    engine.set(cut_after=None, status=400)
    assert stage.many(1).result(5)[0].status == 400
    engine.set(cut_after=-1, status=200)
    stage.many(1).result(5)
    eventually(lambda: failures(stage, engine) in (1, N))
    assert (breaker(stage, engine), failures(stage, engine)) == ("closed", 1)


def test_clients_that_leave_do_not_open_it(stage: Stage) -> None:
    engine = node(stage, ttft_s=0.8, gap_s=0.05)
    answers = stage.many(2 * N, leave_after_s=0.2).result(5)
    engine.set(ttft_s=0)
    answers += stage.many(2 * N, stream=True, leave_after_chunks=2).result(5)
    assert all(answer.left for answer in answers)
    eventually(lambda: len(engine.aborts) == 4 * N)
    stays(stage, engine, "closed", 0)


# --- while it is open


def test_while_it_is_open_the_node_gets_nothing(stage: Stage) -> None:
    bad = node(stage)
    trip(stage, bad)
    good = node(stage)
    # All workers know of it within a second, which is less than what is left: it opens once more, for twice as long.
    half_open(stage, bad)
    bad.set(cut_after=-1)
    assert made_its_trial(stage, bad).ok, "the other one served it"
    becomes(stage, bad, "open")
    bad.set(cut_after=None)
    bad.forget()
    good.forget()
    with every_worker(stage) as workers:
        for lane in workers * 10:
            assert lane.chat(stage.model).status == 200
    assert breaker(stage, bad) == "open"
    assert tries(bad, good) == [0, 40]


def test_where_all_are_open_a_node_is_tried_all_the_same(stage: Stage) -> None:
    engines = [node(stage) for _ in range(2)]
    for engine in engines:
        engine.set(cut_after=-1)
    while not all(breaker(stage, engine) == "open" for engine in engines):
        assert stage.many(2).result(5)[0].status == 502
        assert sum(tries(*engines)) < 40
    for engine in engines:
        engine.set(cut_after=None)
        engine.forget()
    answer = stage.many(1).result(5)[0]
    assert answer.ok
    assert sum(tries(*engines)) == 1


# --- half-open


@beside
def test_half_open_lets_exactly_one_request_of_the_deployment_through(stage: Stage) -> None:
    tested = node(stage)
    trip(stage, tested)
    good = node(stage, ttft_s=0.1)
    tested.set(ttft_s=0.9)  # so long takes the trial
    half_open(stage, tested)
    answers = stage.many(200, concurrency=100).result(20)
    assert all(answer.ok for answer in answers)
    trial, *later = asked(tested)
    assert trial.finished_s is not None
    assert [r for r in later if r.started_s < trial.finished_s] == []
    during_it = [r for r in asked(good) if trial.started_s < r.started_s < trial.finished_s]
    assert len(during_it) > 50, "there must have been enough that could have gone there"
    # It went well: all workers of both hosts use the node again.
    becomes(stage, tested, "closed")
    assert failures(stage, tested) == 0
    for engine in (tested, good):
        engine.set(ttft_s=0.7)
        engine.forget()
    assert all(answer.ok for answer in stage.many(40).result(10))
    assert tries(tested, good) == [20, 20]


@beside
def test_a_trial_that_fails_opens_it_for_twice_as_long(stage: Stage) -> None:
    tested = node(stage)
    trip(stage, tested)
    good = node(stage)
    tested.set(cut_after=-1)
    for opens, longest_s in ((2, 2 * OPEN_S), (3, 4 * OPEN_S)):
        half_open(stage, tested)
        tested.forget()
        assert all(answer.ok for answer in stage.many(10).result(5)), "the trial's client is served by another node"
        assert len(tested.requests) == 1
        becomes(stage, tested, "open")
        assert longest_s - 0.9 < open_for_s(stage, tested) <= longest_s
        assert field(stage, tested, "breaker_opens") == str(opens)
    # After a good trial it begins anew.
    tested.set(cut_after=None)
    half_open(stage, tested)
    eventually(lambda: stage.many(4).result(5) and breaker(stage, tested) == "closed")
    stage.deployment.post("/nodes/remove", {"url": good.url})
    tested.set(cut_after=-1)
    stage.many(N, concurrency=1).result(5)
    becomes(stage, tested, "open")
    assert 0 < open_for_s(stage, tested) <= OPEN_S
    assert field(stage, tested, "breaker_opens") == "1"


@beside
def test_a_trial_answered_with_a_refusal_closes_it(stage: Stage) -> None:
    """400 is the client's fault; that it came shows that the node is well."""
    tested = node(stage)
    trip(stage, tested)
    node(stage)
    tested.set(status=400)
    half_open(stage, tested)
    assert made_its_trial(stage, tested).status == 400
    becomes(stage, tested, "closed")


@beside
def test_a_trial_that_is_silent_opens_it_again(stage: Stage) -> None:
    tested = node(stage)
    trip(stage, tested)
    good = node(stage)
    tested.set(blackhole=True, only_for=ONLY_CHATS)
    half_open(stage, tested)
    answers = stage.many(30).result(10)
    assert all(answer.ok for answer in answers)
    assert tries(tested, good) == [1, 30]
    becomes(stage, tested, "open")
    assert OPEN_S < open_for_s(stage, tested) <= 2 * OPEN_S


@beside
def test_a_client_that_leaves_its_trial_decides_nothing(stage: Stage) -> None:
    """The node is neither well nor broken by that, and the next request is the trial."""
    tested = node(stage)
    trip(stage, tested)
    good = node(stage)
    tested.set(ttft_s=0.8)
    half_open(stage, tested)
    assert made_its_trial(stage, tested, leave_after_s=0.3).left
    eventually(lambda: len(tested.aborts) == 1)
    assert breaker(stage, tested) == "half_open"
    tested.set(ttft_s=0)
    eventually(lambda: stage.many(2).result(5) and breaker(stage, tested) == "closed", within_s=3)
    assert good.requests


# --- R21: over time, with traffic through all workers


@beside
def test_r21_a_broken_node_gets_at_most_one_trial_in_a_cool_down(stage: Stage) -> None:
    broken, good = node(stage), node(stage)
    broken.set(cut_after=-1)
    with stage.traffic(every_s=0.02) as traffic:
        eventually(lambda: field(stage, broken, "breaker_opens") == "3", within_s=10)
        broken.set(cut_after=None)
        eventually(lambda: breaker(stage, broken) == "closed", within_s=8)
        back = len(broken.requests)
        eventually(lambda: len(broken.requests) > back + 10)
    assert traffic.failed == []
    failed = [r.started_s for r in broken.requests if r.status == 200 and r.sent_bytes == 0]
    until_open, trials = failed[:-2], failed[-2:]
    # What was on its way when the fifth failure was counted may have failed as well.
    assert N <= len(until_open) <= N + 4, failed
    assert trials[0] - until_open[-1] >= OPEN_S - 0.05
    assert trials[1] - trials[0] >= 2 * OPEN_S - 0.05
    good_trial = next(r for r in broken.requests if r.sent_bytes)
    assert good_trial.started_s - trials[1] >= 4 * OPEN_S - 0.05
    assert len(good.requests) > 100


@beside
def test_r20_every_request_beside_a_silent_node_ends_well_and_others_are_not_slowed(stage: Stage) -> None:
    silent, _ = node(stage), node(stage)
    other_model = f"{stage.model}-other"
    stage.engine(models=(other_model,))
    silent.set(blackhole=True)
    answers = stage.many(200, concurrency=50)
    others = start(load.many(stage.urls, 200, model=other_model, concurrency=20)).result(20)
    took = [a.finished_s - a.started_s for a in answers.result(20) if a.ok and a.finished_s]
    assert len(took) == 200
    assert max(took) < FIRST_BYTE_S + 1
    assert all(answer.ok for answer in others)
    other_took = sorted(a.finished_s - a.started_s for a in others if a.finished_s)
    assert other_took[len(other_took) // 2] < FIRST_BYTE_S / 4
    becomes(stage, silent, "open")


# --- the registry


def test_registering_again_closes_it_and_forgets_the_failures(stage: Stage) -> None:
    """An engine registers when it has started: whatever failed before was another process."""
    engine = node(stage)
    trip(stage, engine)
    again(stage, engine)
    becomes(stage, engine, "closed")
    assert failures(stage, engine) == 0
    assert stage.many(4).result(5)[0].ok
    eventually(lambda: failures(stage, engine) == 0)


def test_registering_again_gives_it_a_whole_row_of_failures(stage: Stage) -> None:
    engine = node(stage)
    trip(stage, engine)
    again(stage, engine)
    engine.set(cut_after=-1)
    stage.many(N - 1, concurrency=1).result(5)
    stays(stage, engine, "closed", N - 1)
    stage.many(1).result(5)
    becomes(stage, engine, "open")
    assert 0 < open_for_s(stage, engine) <= OPEN_S


def test_a_removed_node_leaves_no_failures_behind(stage: Stage) -> None:
    engine = node(stage, cut_after=-1)
    stage.many(2, concurrency=1).result(5)
    stays(stage, engine, "closed", 2)
    engine.set(cut_after=None, stall_after=1)
    with contextlib.closing(Lane(stage.deployment.port)) as lane:
        stream = lane.stream(stage.model)
        assert stream.status == 200
        assert stage.deployment.post("/nodes/remove", {"url": engine.url}).status == 200
        engine.crash()  # the stream of a node that is no node any more dies
        assert b'"error"' in stream.read()
    engine.start()
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < 0.3:
        assert stage.space.cli("HGET", stage.space.key("failures"), engine.url) is None
        assert not stage.space.client.exists(stage.space.key(f"node:{engine.url}"))
        time.sleep(0.01)
    engine.set(stall_after=None)
    again(stage, engine)
    stays(stage, engine, "closed", 0)
