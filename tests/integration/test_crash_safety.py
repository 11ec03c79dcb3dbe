"""Workers and hosts that die, freeze or are told to end, and clients that leave: every count is given back, once."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.integration.stage import (
    Bench,
    Stage,
    beside,
    frozen,
    lanes,
    start,
)
from tests.integration.test_strategies import served
from tests.support import load
from tests.support.quiet import quiet_check
from tests.support.wait import eventually

LEASE_S = 2.0


pytestmark = pytest.mark.timeout(180)  # the first test of the scenarios waits for all of them


FLEET = {"workers": 4, "settings": {"lease_s": LEASE_S, "probe_interval_s": 1, "grace_s": 10}}
BENCHES_AT_ONCE = 32


# --- workers


def test_r08_counts_of_a_killed_worker_are_given_back_and_no_others(stage: Stage) -> None:
    engine = stage.engine(gap_s=0.1, chunks=50)
    victim, *others = stage.deployment.worker_pids()
    others_streams = []
    for pid in others:
        lane_block = lanes(stage.deployment, pid, 5)
        others_streams.append((lane_block, [lane.stream(stage.model) for lane in lane_block.__enter__()]))
    with lanes(stage.deployment, victim, 30) as doomed:
        for lane in doomed:
            lane.stream(stage.model)
        victim_id, other_ids = stage.id_of(victim), [stage.id_of(pid) for pid in others]
        assert stage.counts(engine) == (45,)
        assert [stage.share(worker, engine) for worker in [victim_id, *other_ids]] == [30, 5, 5, 5]

        os.kill(victim, signal.SIGKILL)
        killed_s = time.monotonic()
        seen: list[int] = []
        while not seen or seen[-1] != 15:
            seen.append(stage.counts(engine)[0])
            assert [stage.share(worker, engine) for worker in other_ids] == [5, 5, 5]
            assert time.monotonic() - killed_s < 10, seen[-1]
            time.sleep(0.001)
        assert set(seen) <= {45, 15}, "it is given back in one step"
    assert victim_id not in stage.worker_ids()
    assert f"unfinished:{victim_id}" not in stage.space.key_names()
    stage.deployment.wait_for_workers(4, without=[victim])
    assert len(engine.aborts) == 30
    for lane_block, streams in others_streams:
        assert all(stream.read().endswith(b"data: [DONE]\n\n") for stream in streams)
        lane_block.__exit__(None, None, None)
    eventually(lambda: stage.counts(engine) == (0,))
    eventually(lambda: len(stage.worker_ids()) == 4, within_s=5)  # the new one takes part
    assert stage.many(8).result(10)[0].ok


@beside
def test_r08_counts_of_a_lost_host_end_with_its_lease(bench: Bench) -> None:
    engine = bench.engine(gap_s=0.1, chunks=42)
    kept, lost = (bench.deployment(1, settings={"lease_s": LEASE_S}) for _ in range(2))
    kept.add(engine)
    lost_streams = start(load.many(lost.url, 20, stream=True))
    kept_streams = start(load.many(kept.url, 10, stream=True))
    total = bench.space.key("unfinished")
    eventually(lambda: bench.space.cli("HGET", total, engine.url) == "30")
    lost.kill()  # the master too: nobody on that host can give anything back
    killed_s = time.monotonic()
    seen: list[int] = []
    while not seen or seen[-1] != 10:
        seen.append(int(bench.space.cli("HGET", total, engine.url)))
        assert time.monotonic() - killed_s < LEASE_S + 3, seen[-1]
        time.sleep(0.002)
    assert set(seen) == {30, 10}, "nobody else's counts may change, not for a moment"
    assert time.monotonic() - killed_s > LEASE_S - 1.5, "a lease that was renewed a second ago has not ended yet"
    eventually(lambda: bench.space.cli("ZCARD", bench.space.key("workers")) == 1)
    assert not any(answer.done for answer in lost_streams.result(10))
    assert all(answer.done for answer in kept_streams.result(20))


def test_worker_frozen_for_longer_than_its_lease_counts_again_when_it_is_back(stage: Stage) -> None:
    engine = stage.engine(gap_s=0.1, chunks=48)
    sleeper, *others = stage.deployment.worker_pids()
    sleeper_id = stage.id_of(sleeper)
    with lanes(stage.deployment, sleeper, 10) as lane_list, lanes(stage.deployment, others[0], 5) as other_lanes:
        streams = [lane.stream(stage.model) for lane in lane_list] + [ln.stream(stage.model) for ln in other_lanes]
        assert stage.counts(engine) == (15,)
        with frozen(sleeper):
            eventually(lambda: stage.counts(engine) == (5,), within_s=LEASE_S + 3)
            assert sleeper_id not in stage.worker_ids()
        eventually(lambda: stage.counts(engine) == (15,), within_s=3)
        assert engine.in_flight == 15
        assert stage.share(stage.id_of(sleeper), engine) == 10
        assert all(stream.read().endswith(b"data: [DONE]\n\n") for stream in streams)
        eventually(lambda: stage.counts(engine) == (0,))
        engine.set(chunks=10)
        again = [lane.stream(stage.model) for lane in lane_list]
        assert stage.counts(engine) == (10,) and stage.share(stage.id_of(sleeper), engine) == 10, "it goes on as before"
        assert all(stream.read().endswith(b"data: [DONE]\n\n") for stream in again)
    eventually(lambda: stage.counts(engine) == (0,))
    assert sleeper in stage.deployment.worker_pids(), "it was not replaced"


def test_workers_killed_in_turn_under_load_leave_nothing_counted(stage: Stage) -> None:
    engines = stage.engines(2, gap_s=0.02, chunks=10)
    with stage.traffic(every_s=0.03, stream=True) as traffic:
        for pid in stage.deployment.worker_pids()[:2]:
            worker = stage.id_of(pid)
            os.kill(pid, signal.SIGKILL)
            eventually(lambda worker=worker: worker not in stage.worker_ids(), within_s=LEASE_S + 3)  # type: ignore[misc]
            eventually(lambda: len(stage.worker_ids()) == 4, within_s=5)  # the new one has joined
    assert {answer.status for answer in traffic.answers} <= {0, 200}, "a worker serves from its first request on"
    assert sum(answer.done for answer in traffic.answers) > len(traffic.answers) / 2
    eventually(lambda: stage.counts() == (0, 0), within_s=2)
    assert [engine.in_flight for engine in engines] == [0, 0]


# --- clients


def test_r03_clients_that_leave_at_any_moment_leave_no_count_behind(stage: Stage) -> None:
    first, second = stage.engines(2, ttft_s=30)
    chance = random.Random(3)
    moments = [chance.uniform(0, 0.3) for _ in range(250)]
    answers = stage.many(250, concurrency=40, each=lambda i: {"leave_after_s": moments[i]}).result(30)
    assert all(answer.left for answer in answers)
    assert sum(served([first, second])) > 25, "many must have reached an engine"
    quiet_check(stage.space, engines=[first, second])
    # An engine that was restarted draws no more than its half.
    second.crash()
    second.start()
    stage.deployment.wait_for_state("ready", first, second)
    for engine in (first, second):
        engine.set(ttft_s=1)
        engine.forget()
    assert all(answer.ok for answer in stage.many(100).result(20))
    assert served([first, second]) == [50, 50]


def test_r03_clients_that_leave_in_mid_stream_leave_no_count_behind(stage: Stage) -> None:
    engine = stage.engine(gap_s=0.02, chunks=100)
    chance = random.Random(4)
    after = [chance.randint(1, 20) for _ in range(100)]
    leaving = stage.many(100, concurrency=50, stream=True, each=lambda i: {"leave_after_chunks": after[i]})
    assert all(answer.left for answer in leaving.result(30))
    eventually(lambda: len(engine.aborts) == 100, within_s=1)
    quiet_check(stage.space, engines=[engine])


# --- the proper end


@beside
def test_sigterm_ends_streams_properly_and_leaves_no_process_and_no_worker_entry(bench: Bench) -> None:
    short = bench.engine(models=("short",), gap_s=0.1, chunks=10)
    endless = bench.engine(models=("endless",), gap_s=0.1, chunks=600)
    deployment = bench.deployment(2, settings={"grace_s": 2})
    redis = bench.space
    deployment.add(short, endless)
    finishing = start(load.many(deployment.url, 10, model="short", stream=True))
    cut = start(load.many(deployment.url, 4, model="endless", stream=True))
    eventually(lambda: (short.in_flight, endless.in_flight) == (10, 4))
    assert deployment.process is not None
    deployment.process.send(signal.SIGTERM)
    assert all(answer.done for answer in finishing.result(10))
    assert not cut.done(), "they have the grace time"
    for answer in cut.result(10):
        assert answer.error is None
        assert '"error"' in answer.events()[-1]
    assert deployment.process.wait(5) == 0
    assert deployment.process.left_behind == []
    assert redis.cli("ZRANGE", redis.key("workers"), 0, -1) == []
    assert [name for name in redis.key_names() if name.startswith("unfinished:")] == []
    assert not any(map(int, redis.cli("HVALS", redis.key("unfinished"))))
    assert "Traceback" not in deployment.log()
