"""A breaker per node, one for all workers of all hosts: it opens, lets one request of the deployment try, and closes.

Probes never end here once a node is ready (`unprobed`), so what moves a breaker is requests alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.failing import (
    BREAKER_FLEET,
    OPEN_S,
    SEEN,
    N,
    becomes,
    breaker,
    failures,
    field,
    half_open,
    made_its_trial,
    open_for_s,
    stays,
    tries,
    trip,
    unprobed,
)
from tests.integration.serving import broken_stream
from tests.integration.stage import Lane, Stage, lanes
from tests.support.engine import SimulatedEngine
from tests.support.wait import eventually

FLEET = BREAKER_FLEET

pytestmark = pytest.mark.timeout(120)


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


# --- it opens


def test_it_opens_on_the_fifth_failure_in_a_row_over_all_workers(stage: Stage) -> None:
    engine = unprobed(stage, cut_after=-1)
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


@pytest.mark.parametrize(
    "fault",
    [{"reset_on_accept": True}, {"eof_after": -1}, SEEN["silence"], {"refuse": True}, {"status": 503}],
)
def test_what_opens_it(stage: Stage, fault: dict[str, Any]) -> None:
    engine = unprobed(stage, **fault)
    answers = stage.many(N).result(10)
    # A refused node is down at once, and then nobody asks it any more.
    assert {a.status for a in answers} <= ({504} if "blackhole" in fault else {fault.get("status", 502), 503})
    if "refuse" in fault:
        eventually(lambda: stage.state(engine) == "down")
        assert 1 <= failures(stage, engine) <= N
    else:
        becomes(stage, engine, "open")


@pytest.mark.parametrize("fault", [{"cut_after": 2}, {"eof_after": 2}, {"eof_after": 2, "eof_how": "close"}])
def test_r46_death_in_mid_stream_is_a_failure_of_the_node(stage: Stage, fault: dict[str, Any]) -> None:
    engine = unprobed(stage, **fault)
    for i in range(N):
        assert failures(stage, engine) == i
        broken_stream(stage.many(1, stream=True).result(5)[0].body, chunks=2)
        eventually(lambda i=i: failures(stage, engine) == i + 1)  # type: ignore[misc]
    becomes(stage, engine, "open")


def test_death_in_the_middle_of_an_answer_that_is_no_stream_is_a_failure_of_the_node(stage: Stage) -> None:
    engine = unprobed(stage, cut_after=1, body_mb=0.1)
    stage.many(2).result(5)
    stays(stage, engine, "closed", 2)


def test_answers_that_speak_of_the_request_do_not_open_it(stage: Stage) -> None:
    engine = unprobed(stage)
    for status in (400, 404, 429, 501):
        engine.set(status=status)
        assert {answer.status for answer in stage.many(2 * N).result(5)} == {status}
    stays(stage, engine, "closed", 0)
    assert len(engine.requests) == 4 * 2 * N


@pytest.mark.parametrize("fault", [{"cut_after": -1}, {"status": 503}])
def test_any_other_answer_ends_a_row_of_failures(stage: Stage, fault: dict[str, Any]) -> None:
    """A request that no engine can serve is no row: others' answers come between."""
    engine = unprobed(stage, **fault)
    stage.many(N - 1, concurrency=1).result(5)
    stays(stage, engine, "closed", N - 1)
    engine.set(cut_after=None, status=400)
    assert stage.many(1).result(5)[0].status == 400
    engine.set(**{"status": 200, **fault})
    stage.many(1).result(5)
    eventually(lambda: failures(stage, engine) in (1, N))
    assert (breaker(stage, engine), failures(stage, engine)) == ("closed", 1)


def test_clients_that_leave_do_not_open_it(stage: Stage) -> None:
    engine = unprobed(stage, ttft_s=0.8, gap_s=0.05)
    answers = stage.many(2 * N, leave_after_s=0.2).result(5)
    engine.set(ttft_s=0)
    answers += stage.many(2 * N, stream=True, leave_after_chunks=2).result(5)
    assert all(answer.left for answer in answers)
    eventually(lambda: len(engine.aborts) == 4 * N)
    stays(stage, engine, "closed", 0)


# --- while it is open


def test_while_it_is_open_the_node_gets_nothing(stage: Stage) -> None:
    bad = unprobed(stage)
    trip(stage, bad)
    good = unprobed(stage)
    # All workers know of it within a second, which is less than what is left: it opens once more, for twice as long.
    half_open(stage, bad)
    bad.set(cut_after=-1)
    assert made_its_trial(stage, bad)[-1].ok, "the other one served it"
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
    engines = [unprobed(stage) for _ in range(2)]
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


# --- the registry


def test_registering_again_closes_it_and_forgets_the_failures(stage: Stage) -> None:
    """An engine registers when it has started: whatever failed before was another process."""
    engine = unprobed(stage)
    trip(stage, engine)
    again(stage, engine)
    becomes(stage, engine, "closed")
    assert failures(stage, engine) == 0
    assert stage.many(4).result(5)[0].ok
    eventually(lambda: failures(stage, engine) == 0)


def test_registering_again_gives_it_a_whole_row_of_failures(stage: Stage) -> None:
    engine = unprobed(stage)
    trip(stage, engine)
    again(stage, engine)
    engine.set(cut_after=-1)
    stage.many(N - 1, concurrency=1).result(5)
    stays(stage, engine, "closed", N - 1)
    stage.many(1).result(5)
    becomes(stage, engine, "open")
    assert 0 < open_for_s(stage, engine) <= OPEN_S


def test_a_removed_node_leaves_no_failures_behind(stage: Stage) -> None:
    engine = unprobed(stage, cut_after=-1)
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
