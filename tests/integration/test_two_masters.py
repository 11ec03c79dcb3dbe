"""Two masters with two workers each on one Redis, as on two hosts: they are one distributor."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.integration.stage import (
    FIRST_BYTE_S,
    LEASE_S,
    PROBE_INTERVAL_S,
    TWO_HOSTS,
    Stage,
    beside,
    during,
    lanes,
    start,
)
from tests.integration.test_strategies import counts_while_filling, served
from tests.support import load
from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine
from tests.support.wait import eventually

pytestmark = pytest.mark.timeout(180)  # the first test of the scenarios waits for all of them


FLEET = TWO_HOSTS


def models_of(deployment: Deployment) -> list[str]:
    return [model["id"] for model in deployment.get("/v1/models").json()["data"]]


# --- counts


def test_r01_burst_over_two_masters_splits_exactly(stage: Stage) -> None:
    engines = stage.engines(2, ttft_s=2)
    seen, answers = counts_while_filling(stage, 600)
    assert all(answer.ok for answer in answers)
    assert max(abs(a - b) for a, b in seen) <= 1 and len(set(seen)) >= 11
    assert served(engines) == [300, 300]


def test_r02_streams_of_one_worker_count_at_once_for_all_others(stage: Stage) -> None:
    first, second = stage.engines(2, gap_s=0.1, chunks=20)
    here, there = stage.masters
    here.post("/nodes/remove", {"url": second.url})
    with lanes(here, here.worker_pids()[0], 20) as busy, lanes(there, there.worker_pids()[0], 1) as (other,):
        streams = [lane.stream(stage.model) for lane in busy]
        asked_s = time.monotonic()
        nodes = other.get("/nodes/status").json()
        assert time.monotonic() - asked_s < 1, "the read itself must not be what gave it time"
        assert nodes[first.url]["unfinished"] == 20
        here.add(second)
        assert other.chat(stage.model, max_tokens=1).status == 200
        assert served([first, second]) == [20, 1]
        assert all(stream.read().endswith(b"data: [DONE]\n\n") for stream in streams)


def test_all_traffic_through_one_worker_is_dispatched_exactly_over_what_all_hold(stage: Stage) -> None:
    first, second = stage.engines(2, gap_s=0.1, chunks=40)
    here, there = stage.masters
    here.post("/nodes/remove", {"url": second.url})
    with lanes(there, there.worker_pids()[0], 10) as held, lanes(here, here.worker_pids()[0], 30) as one:
        streams = [lane.stream(stage.model) for lane in held]
        here.add(second)
        streams += [lane.stream(stage.model) for lane in one]
        assert stage.counts() == (20, 20), "its own 30 would be 15 and 15"
        shares = [stage.share(stage.id_of(here.worker_pids()[0]), engine) for engine in (first, second)]
        assert shares == [10, 20]
        assert all(stream.read().endswith(b"data: [DONE]\n\n") for stream in streams)
    assert served([first, second]) == [20, 20]


@beside
def test_total_of_a_node_is_the_sum_of_all_ledgers(stage: Stage) -> None:
    engines = stage.engines(2, gap_s=0.1, chunks=25)
    streams = stage.many(21, stream=True)
    eventually(lambda: sum(stage.counts()) == 21)
    assert sorted(stage.counts()) == [10, 11]
    shares = [[stage.share(worker, engine) for worker in stage.worker_ids()] for engine in engines]
    assert tuple(map(sum, shares)) == stage.counts(), "the total of a node is the sum of the ledgers"
    eventually(lambda: [engine.in_flight for engine in engines] == list(stage.counts()))
    assert all(answer.done for answer in streams.result(10))


# --- the registry


@beside
def test_r87_removed_node_is_gone_for_every_worker_within_a_second(stage: Stage) -> None:
    other_model = f"{stage.model}-other"
    kept = stage.engine()
    removed = stage.engine(models=(stage.model, other_model))
    here, there = stage.masters
    here.post("/nodes/remove", {"url": removed.url})
    eventually(lambda: other_model not in models_of(there) + models_of(here), within_s=1, every_s=0.1)
    time.sleep(1)  # the second that the others have is theirs
    removed.forget()
    for deployment in stage.masters * 20:
        assert other_model not in models_of(deployment)
        assert removed.url not in deployment.nodes()
    assert all(answer.ok for answer in stage.many(50, concurrency=10).result(10))
    assert (len(kept.requests), removed.requests) == (50, [])


@beside
def test_r87_added_node_is_there_for_every_worker_within_a_second(stage: Stage) -> None:
    here, there = stage.masters
    engine = stage.engine(ready=False)
    added_s = time.monotonic()
    eventually(lambda: stage.model in models_of(there), within_s=1, every_s=0.1)
    assert there.nodes()[engine.url]["models"] == [stage.model]
    eventually(lambda: time.monotonic() - added_s > 1, within_s=2)
    for deployment in (here, there) * 20:
        assert stage.model in models_of(deployment)
        assert engine.url in deployment.nodes()


@beside
def test_r87_changed_speed_counts_for_every_worker_within_a_second(stage: Stage) -> None:
    here, there = stage.masters
    first, second = stage.engines(2, speeds=[1, 1], ttft_s=1)
    here.add(first, speed=3)
    eventually(lambda: there.nodes()[first.url]["speed"] == 3, within_s=1, every_s=0.1)
    for deployment in (here, there) * 20:
        assert deployment.nodes()[first.url]["speed"] == 3
    burst = start(load.many(there.url, 80, model=stage.model))
    assert all(answer.ok for answer in burst.result(20))
    assert served([first, second]) == [pytest.approx(60, abs=1), pytest.approx(20, abs=1)]


@beside
def test_second_registration_of_a_node_through_another_host_updates_it(stage: Stage) -> None:
    here, there = stage.masters
    engine = stage.engine(gap_s=0.1, chunks=30, speed=2)
    streams = stage.many(10, stream=True)
    eventually(lambda: stage.counts(engine) == (10,))
    status = {"models": [stage.model, f"{stage.model}-b"], "role": 1, "speed": 5}
    assert there.post("/nodes/add", {"url": engine.url + "/", "status": status}).json() == "Added successfully"
    node = eventually(lambda: [n for n in [here.nodes()[engine.url]] if n["speed"] == 5], within_s=1)[0]
    assert node["models"] == [stage.model, f"{stage.model}-b"]
    assert node["unfinished"] == 10
    assert engine.url + "/" not in here.nodes()
    assert all(answer.done for answer in streams.result(10))


# --- draining


LONG = 32  # chunks, 0.25 s each: what the tests below do meanwhile takes a second, on a busy machine a few


@beside
def test_r32_drain_finishes_what_runs_and_takes_nothing_new(stage: Stage) -> None:
    leaving, staying = stage.engines(2, gap_s=0.25, chunks=LONG)
    here, there = stage.masters
    here.post("/nodes/remove", {"url": staying.url})
    streams = start(load.many(here.url, 10, model=stage.model, stream=True))
    eventually(lambda: stage.counts(leaving) == (10,))
    here.add(staying)
    reply = there.post("/nodes/remove?drain=true&timeout_s=40", {"url": leaving.url})
    assert reply.status == 200
    assert not streams.done(), "it answers at once"
    assert there.nodes()[leaving.url]["state"] == "draining"
    assert there.nodes()[leaving.url]["unfinished"] == 10
    assert all(answer.ok for answer in stage.many(30, max_tokens=1).result(20))
    assert not streams.done(), "the others must have been served beside those that run"
    assert served([leaving, staying]) == [10, 30]
    assert all(answer.done for answer in streams.result(30))
    for deployment in stage.masters:
        eventually(lambda d=deployment: leaving.url not in d.nodes("?all=1"), within_s=5, every_s=0.1)  # type: ignore[misc]


@beside
def test_r32_drained_node_leaves_at_the_deadline_at_the_latest(stage: Stage) -> None:
    engine = stage.engine(gap_s=0.25, chunks=LONG)
    streams = stage.many(5, stream=True)
    eventually(lambda: stage.counts(engine) == (5,))
    asked_s = time.monotonic()
    assert stage.masters[1].post(f"/nodes/remove?drain=true&timeout_s=1&node_url={engine.url}").status == 200
    eventually(lambda: engine.url not in stage.deployment.nodes("?all=1"), within_s=5, every_s=0.1)
    assert time.monotonic() - asked_s > 0.9
    assert not streams.done(), "the node must have left before its streams ended"
    streams.result(30)


@beside
def test_r32_immediate_removal_stays_possible_and_cuts_nothing(stage: Stage) -> None:
    engine = stage.engine(gap_s=0.25, chunks=LONG)
    streams = stage.many(5, stream=True)
    eventually(lambda: stage.counts(engine) == (5,))
    reply = stage.masters[1].post("/nodes/remove", {"url": engine.url})
    assert (reply.status, reply.json()) == (200, "Deleted successfully")
    eventually(lambda: engine.url not in stage.deployment.nodes("?all=1"), within_s=3, every_s=0.1)
    assert stage.many(1).result(10)[0].status in (404, 503)
    assert all(answer.done for answer in streams.result(30))


@beside
def test_r32_node_that_comes_back_right_after_its_removal_has_the_right_count(stage: Stage) -> None:
    engine = stage.engine(gap_s=0.25, chunks=LONG)
    streams = stage.many(5, stream=True)
    eventually(lambda: stage.counts(engine) == (5,))
    stage.deployment.post("/nodes/remove", {"url": engine.url})
    stage.deployment.add(engine)
    eventually(lambda: stage.deployment.unfinished()[engine.url] == 5 == engine.in_flight, within_s=4, every_s=0.1)
    assert all(answer.done for answer in streams.result(30))
    eventually(lambda: stage.deployment.unfinished()[engine.url] == 0)


# --- isolation


@beside
def test_r20_engine_that_never_answers_slows_no_request_to_another(stage: Stage) -> None:
    hung = stage.engine(blackhole=True, only_for="messages")  # its /health is fine: it stays in rotation
    fine_model = f"{stage.model}-fine"
    stage.engine(models=(fine_model,))
    waiting = stage.many(50)
    eventually(lambda: stage.counts(hung) == (50,))
    quick = start(load.many(stage.urls, 120, model=fine_model, concurrency=40)).result(30)
    answers = waiting.result(30)
    assert all(answer.ok for answer in quick)
    assert {answer.status for answer in answers} == {504}
    took = [answer.finished_s - answer.started_s for answer in answers if answer.finished_s]
    assert min(took) >= FIRST_BYTE_S
    assert max(took) < FIRST_BYTE_S + 3
    # One that waited for one of those that hang would take about as long as they do. On a busy machine the last
    # of 120 may come after the first has given up; a third of them beside all 50 is enough to tell.
    given_up_s = min(answer.finished_s for answer in answers if answer.finished_s)
    beside_them = [answer for answer in quick if answer.finished_s and answer.finished_s < given_up_s]
    assert len(beside_them) >= 40
    assert max(answer.finished_s - answer.started_s for answer in quick if answer.finished_s) < FIRST_BYTE_S / 2


# --- the prober


def health_probes(engine: SimulatedEngine, since_s: float) -> int:
    return sum(probe.path == "/health" and probe.started_s >= since_s for probe in engine.probes)


@beside
def test_one_prober_in_the_whole_deployment(stage: Stage) -> None:
    engine = stage.engine()
    begun_s = time.monotonic()
    for _ in during(4.0, every_s=0.5):
        pass
    # One a second, and the one on the edge; fewer on a busy machine. Four workers that probe for themselves make 16.
    assert 1 <= health_probes(engine, begun_s) <= 5


def test_probing_goes_on_when_the_prober_dies(stage: Stage) -> None:
    engine = stage.engine()
    holder = stage.space.cli("GET", stage.space.key("prober"))
    (pid,) = [pid for master in stage.masters for pid in master.worker_pids() if str(pid) == holder.split("-")[-2]]
    os.kill(pid, signal.SIGKILL)
    died_s = time.monotonic()
    eventually(lambda: health_probes(engine, died_s + 0.1) >= 2, within_s=LEASE_S + 3 * PROBE_INTERVAL_S)
    assert stage.space.cli("GET", stage.space.key("prober")) != holder
    for master in stage.masters:
        master.wait_for_workers(2, without=[pid])
        assert master.get("/health").status == 200


def test_probing_goes_on_at_once_when_the_prober_stops_properly(stage: Stage) -> None:
    holder = stage.space.cli("GET", stage.space.key("prober"))
    (pid,) = [pid for master in stage.masters for pid in master.worker_pids() if str(pid) == holder.split("-")[-2]]
    os.kill(pid, signal.SIGTERM)  # as when it is recycled
    eventually(lambda: holder not in stage.worker_ids(), within_s=5)
    engine = stage.engine(ready=False)
    # The first probe of a node comes within a second; a lease that nobody gave back holds it up for longer.
    eventually(lambda: stage.state(engine) == "ready", within_s=1.5)
    for master in stage.masters:
        master.wait_for_workers(2, without=[pid])
