"""Redis that is emptied, frozen, killed, slow, read-only or failed over under load.

Each test has an engine that holds ten long streams: its count has one right value all the time, so that "exact
again" can be told while other requests come and go.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import pytest
from redis.exceptions import ResponseError

from tests.integration.serving import chat, chat_body, on_every_worker
from tests.integration.stage import (
    Bench,
    EngineFactory,
    Fleet,
    Stage,
    beside,
    during,
    lanes,
    staged,
    start,
)
from tests.support import load
from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine
from tests.support.quiet import counts as all_counts
from tests.support.quiet import quiet_check
from tests.support.redis import PrivateRedis, Space, TcpProxy, low_port
from tests.support.wait import eventually

LEASE_S, REDIS_TIMEOUT_S = 3.0, 0.5
SETTINGS = {"lease_s": LEASE_S, "redis_timeout_s": REDIS_TIMEOUT_S, "probe_interval_s": 1}
HELD = 10
SYNC_AT_ONCE = {"repl-diskless-sync-delay": "0"}  # by default a master waits 5 s for more replicas


pytestmark = pytest.mark.timeout(180)  # the first test of the scenarios waits for all of them


@pytest.fixture(scope="module")
def fleet_server() -> Iterator[PrivateRedis]:
    """Not the one of the session: here it is emptied and killed."""
    with PrivateRedis(tcp=True, options=SYNC_AT_ONCE) as server:
        yield server


FLEET = {"workers": 2, "settings": SETTINGS}
BENCHES_AT_ONCE = 32


@pytest.fixture(scope="module")
def road(fleet_server: PrivateRedis) -> Iterator[TcpProxy]:
    with TcpProxy(fleet_server.socket) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def roadside(fleet_server: PrivateRedis, road: TcpProxy) -> Iterator[Fleet]:
    """Deployments that reach Redis over the road only."""
    fleet = Fleet(fleet_server, workers=2, settings={**SETTINGS, "redis_url": road.url}, redis=None)
    yield fleet
    fleet.close()


def held_streams(stage: Stage, for_s: float) -> tuple[SimulatedEngine, Future[list[load.Answer]]]:
    """An engine that does nothing but hold `HELD` streams."""
    model = f"{stage.model}-held"
    engine = stage.engine(models=(model,), gap_s=0.25, chunks=round(for_s / 0.25))
    streams = stage.many(HELD, model=model, stream=True)
    eventually(lambda: stage.counts(engine) == (HELD,))
    return engine, streams


def readiness(deployment: Deployment) -> set[int]:
    """What `/ready` says, asked often enough that each of two workers is asked (but once in 500)."""
    return {deployment.get("/ready").status for _ in range(10)}


def told_by_all(deployment: Deployment, status: int, *, within_s: float) -> None:
    eventually(lambda: readiness(deployment) == {status}, within_s=within_s, every_s=0.1)


def longest_gap_s(answer: load.Answer) -> float:
    moments = [at_s for at_s, _ in answer.reads]
    return max(b - a for a, b in pairwise(moments))


def registry(stage: Stage) -> dict[str, list[str | None]]:
    """What Redis holds of each of the test's nodes, but for what changes by itself."""
    urls = set(stage.space.cli("SMEMBERS", stage.space.key("nodes")))
    fields = ("role", "models", "speed", "state")
    return {
        engine.url: stage.space.client.hmget(stage.space.key(f"node:{engine.url}"), fields)  # type: ignore[misc]
        for engine in stage.made
        if engine.url in urls
    }


def exact_again(stage: Stage, held: SimulatedEngine, registry_before: dict[str, list[str | None]]) -> bool:
    assert registry(stage) == registry_before
    assert stage.counts(held) == (HELD,)
    assert sum(stage.share(worker, held) for worker in stage.worker_ids()) == HELD
    return True


# --- emptied


def test_r34_flushall_under_load_is_healed_within_two_seconds(stage: Stage) -> None:
    stage.engines(2, speeds=[3, 1], ttft_s=0.05)
    held, streams = held_streams(stage, 4)
    before = registry(stage)
    assert len(before) == 3
    with stage.traffic(every_s=0.05) as traffic:
        eventually(lambda: len(traffic.answers) > 10)
        stage.space.cli("FLUSHALL")
        eventually(lambda: exact_again(stage, held, before), within_s=2)
        for _ in during(0.5):
            all_counts(stage.space)  # raises for a count below 0
        stage.space.cli("FLUSHALL")  # and once more, while it has hardly recovered
        eventually(lambda: exact_again(stage, held, before), within_s=2)
    assert traffic.failed == []
    assert {url: node["speed"] for url, node in stage.deployment.nodes().items() if node["speed"]} == dict(
        zip([engine.url for engine in stage.made[:2]], [3, 1], strict=True)
    )
    assert all(answer.done for answer in streams.result(20))


@pytest.mark.parametrize(
    "lost",
    [
        pytest.param(["SREM nodes <url>"], marks=pytest.mark.wide),
        ["DEL node:<url>", "HDEL unfinished <url>"],
        pytest.param(["DEL unfinished", "DEL workers", "DEL sessions"], marks=pytest.mark.wide),
        ["DEL version", "DEL nodes", "DEL unfinished:<worker>"],
    ],
    ids=" and ".join,
)
def test_r34_half_of_the_keys_lost_is_healed_within_two_seconds(stage: Stage, lost: list[str]) -> None:
    held = stage.engine(gap_s=0.1, chunks=600)
    with lanes(stage.deployment, stage.deployment.worker_pids()[0], HELD) as busy:
        for lane in busy:
            lane.stream(stage.model)
        # The workers may be joining again still, after what the test before did to Redis.
        eventually(lambda: stage.counts(held) == (HELD,), within_s=5)
        worker = stage.id_of(stage.deployment.worker_pids()[0])
        before = registry(stage)
        assert exact_again(stage, held, before)
        for command in lost:
            verb, name, *more = command.replace("<url>", held.url).replace("<worker>", worker).split()
            assert stage.space.cli(verb, stage.space.key(name), *more) == 1
        eventually(lambda: exact_again(stage, held, before), within_s=2)
        assert stage.many(1, max_tokens=1).result(5)[0].ok


@pytest.mark.parametrize(
    "written",
    [
        # Beside these, they are written over one by one in store/test_healing.py.
        ["SET unfinished x", "SET unfinished:<worker> x", "SET explored x"],
        pytest.param(["RPUSH version a", "SET nodes x", "SET engine_keys x"], marks=pytest.mark.wide),
        pytest.param(["SET workers x", "SET sessions x"], marks=pytest.mark.long),
        pytest.param(
            ["SET node:<url> x", "SET latency:<url> x", "SET latency_mean x", "SET last_success x"],
            marks=pytest.mark.long,
        ),
        pytest.param(["SET prober nobody", "RPUSH encoder_cursor a", "RPUSH encoder_credit a"], marks=pytest.mark.long),
    ],
    ids=" and ".join,
)
@pytest.mark.parametrize("busy", [pytest.param(False, marks=pytest.mark.long), True], ids=["idle", "busy"])
def test_r34_keys_of_another_type_are_healed_and_counts_within_two_seconds(
    stage: Stage, written: list[str], busy: bool
) -> None:
    stage.engines(2)
    held, streams = held_streams(stage, 7)
    worker = stage.id_of(stage.deployment.worker_pids()[0])
    before = registry(stage)
    with stage.traffic(every_s=0.05) if busy else contextlib.nullcontext() as traffic:
        with stage.space.client.pipeline(transaction=True) as pipe:
            for command in written:
                verb, name, value = command.replace("<url>", held.url).replace("<worker>", worker).split()
                pipe.delete(stage.space.key(name))
                pipe.execute_command(verb, stage.space.key(name), value)  # type: ignore[no-untyped-call]
            pipe.execute()

        def counted() -> bool:
            with contextlib.suppress(ResponseError):
                return exact_again(stage, held, before)
            return False

        def healed() -> bool:
            types = {name: stage.space.cli("TYPE", stage.space.key(name)) for name in ONCE}
            assert all(types[name] in (type_, "none") for name, type_ in ONCE.items()), types
            return counted()

        eventually(counted, within_s=2)
        # What counts nothing waits for a turn of the prober, and that for its lease.
        eventually(healed, within_s=5)
        told_by_all(stage.deployment, 200, within_s=2)
        status = stage.deployment.nodes()
        assert status[held.url]["unfinished"] == HELD
        assert len(status) == 3
    assert traffic is None or traffic.failed == []
    assert all(answer.done for answer in streams.result(20))
    assert "is replaced" in stage.deployment.log() or written[0].startswith("SET prober")


ONCE = {
    "nodes": "set",
    "engine_keys": "hash",
    "version": "string",
    "unfinished": "hash",
    "workers": "zset",
    "sessions": "hash",
    "latency_mean": "hash",
    "explored": "hash",
    "last_success": "hash",
    "prober": "string",
    "encoder_cursor": "string",
    "encoder_credit": "hash",
}


# --- frozen


@beside
def test_r96_frozen_redis_under_load(bench: Bench) -> None:
    frozen_under_load(bench, 9.0)


@pytest.mark.wide
@beside
def test_r96_frozen_for_twenty_seconds_under_load(bench: Bench) -> None:
    frozen_under_load(bench, 20.0)


def frozen_under_load(bench: Bench, frozen_s: float) -> None:
    """For longer than the lease: all workers are given up the moment Redis is back."""
    with PrivateRedis() as server:
        space = Space(server, "frozen")
        deployment = bench.deployment(2, redis=space, settings=SETTINGS)
        stage = Stage(space, [deployment], bench.engine)
        serves_while_frozen(stage, frozen_s)
        stage.close()
        deployment.stop()


def serves_while_frozen(stage: Stage, frozen_s: float) -> None:
    stage.engines(2, ttft_s=0.05)
    held, streams = held_streams(stage, frozen_s + 6)
    before = registry(stage)
    deployment = stage.deployment
    assert deployment.get("/ready").status == 200
    with stage.traffic(every_s=0.05) as traffic:
        eventually(lambda: len(traffic.answers) > 10)
        stage.space.server.pause()
        paused_s = time.monotonic()
        told_by_all(deployment, 503, within_s=3)
        assert "redis" in deployment.get("/ready").text.lower()
        lively_s = []
        for _ in during(frozen_s - (time.monotonic() - paused_s), every_s=0.2):
            asked_s = time.monotonic()
            assert deployment.get("/health").status == 200
            lively_s.append(time.monotonic() - asked_s)
        stage.space.server.resume()
        eventually(lambda: exact_again(stage, held, before), within_s=4)
        told_by_all(deployment, 200, within_s=4)
    assert few_longer(lively_s, REDIS_TIMEOUT_S), "who asks whether it lives waits for no Redis"
    assert traffic.failed == []
    took = [(a.started_s - paused_s, (a.finished_s or 0) - a.started_s) for a in traffic.since(paused_s)]
    assert len(took) > 100
    # Single ones may be late on a busy machine; who waits for a second timeout takes twice as long each time.
    waited = sorted(s for _, s in took if s > REDIS_TIMEOUT_S)
    assert waited and waited[len(waited) // 2] < 2 * REDIS_TIMEOUT_S, "one timeout each at most"
    assert waited[-1] < 6 * REDIS_TIMEOUT_S, "nobody hangs"
    assert few_longer([s for at_s, s in took if at_s > 2], REDIS_TIMEOUT_S), "then a breaker"
    answers = streams.result(20)
    assert all(answer.done for answer in answers)
    gaps_s = [longest_gap_s(answer) for answer in answers]
    assert sorted(gaps_s)[len(gaps_s) // 2] < frozen_s / 5, "running streams notice nothing"


def few_longer(values_s: list[float], limit_s: float) -> bool:
    return sum(s > limit_s for s in values_s) <= len(values_s) / 10


def test_r08_streams_that_end_while_redis_is_frozen_are_uncounted_afterwards(stage: Stage) -> None:
    engine = stage.engine(gap_s=0.05, chunks=10)
    streams = stage.many(30, stream=True)
    eventually(lambda: stage.counts(engine) == (30,))
    stage.space.server.pause()
    assert all(answer.done for answer in streams.result(10))
    assert engine.in_flight == 0
    stage.space.server.resume()
    eventually(lambda: stage.counts(engine) == (0,), within_s=2)


# --- killed


def test_r96_redis_killed_and_restarted_empty_under_load(stage: Stage) -> None:
    engines = stage.engines(2, speeds=[2, 2], ttft_s=0.05)
    held, streams = held_streams(stage, 5)
    before = registry(stage)
    deployment = stage.deployment
    with stage.traffic(every_s=0.05) as traffic:
        eventually(lambda: len(traffic.answers) > 10)
        stage.space.server.kill()
        killed_s = time.monotonic()
        told_by_all(deployment, 503, within_s=3)
        eventually(lambda: len(traffic.since(killed_s + 1)) > 5, within_s=5)
        assert deployment.get("/health").status == 200
        stage.space.server.restart()
        eventually(lambda: exact_again(stage, held, before), within_s=2)
        told_by_all(deployment, 200, within_s=2)
    assert traffic.failed == []
    assert all(answer.done for answer in streams.result(20))
    assert all(engine.requests for engine in engines)


@beside
def test_r96_starts_without_redis_and_recovers_by_itself(bench: Bench) -> None:
    engine = bench.engine()
    with PrivateRedis() as server:
        server.kill()
        deployment = bench.deployment(2, redis=Space(server, "late"), settings={**SETTINGS, "nodes": [engine.url]})
        assert deployment.get("/health").status == 200
        ready = deployment.get("/ready")
        assert (ready.status, "redis" in ready.text.lower()) == (503, True)
        reply = deployment.post("/v1/chat/completions", {"model": "unheard-of", "messages": []})
        assert reply.status == 503, "it may be there, in Redis"
        assert int(reply.headers["retry-after"]) > 0
        # The engine is named by a setting, so it is known without Redis.
        on_every_worker(deployment, lambda: chat(deployment, chat_body("sim")).status == 200)
        assert deployment.post("/nodes/add", {"url": engine.url, "status": {"models": ["sim"]}}).status == 503
        server.start()
        told_by_all(deployment, 200, within_s=6)
        assert deployment.post("/v1/chat/completions", {"model": "sim", "messages": []}).status == 200
        eventually(lambda: server.cli("ZCARD", "evenhand:{late}:workers") == 2, within_s=3)
        deployment.stop()


@beside
def test_workers_that_start_while_redis_is_away_serve_what_the_host_knew(bench: Bench) -> None:
    engine = bench.engine()
    with PrivateRedis() as server:
        deployment = bench.deployment(2, redis=Space(server, "known"), settings=SETTINGS)
        deployment.add(engine)
        files = deployment.directory / "state"
        eventually(lambda: [path for path in files.glob("nodes-*.msgpack") if engine.url.encode() in path.read_bytes()])
        server.kill()
        victim = deployment.kill_worker()
        deployment.wait_for_workers(2, without=[victim])
        # Connections are shared evenly, so the new worker has its half of them.
        assert [chat(deployment, chat_body("sim")).status for _ in range(20)] == [200] * 20
        deployment.stop()
        deployment.start()
        assert [chat(deployment, chat_body("sim")).status for _ in range(10)] == [200] * 10
        assert "started without Redis: it serves the 1 nodes" in deployment.log()
        assert deployment.get("/ready").status == 503
        server.start()
        told_by_all(deployment, 200, within_s=8)
        assert server.cli("SMEMBERS", "evenhand:{known}:nodes") == {engine.url}
        deployment.stop()


def test_r99_script_flush_and_restart_in_mid_traffic_fail_no_request(stage: Stage) -> None:
    stage.engines(2, ttft_s=0.02)
    with stage.traffic(every_s=0.01) as traffic:
        for _ in range(5):
            sent = len(traffic.answers)
            stage.space.cli("SCRIPT", "FLUSH")
            eventually(lambda sent=sent: len(traffic.answers) > sent + 10, within_s=5)  # type: ignore[misc]
        stage.space.server.restart(keep_data=True)
        sent = len(traffic.answers)
        eventually(lambda: len(traffic.answers) > sent + 50, within_s=5)
    assert traffic.failed == []


# --- slow, read-only, failed over


@pytest.fixture
def roadside_stage(roadside: Fleet, road: TcpProxy, engine_factory: EngineFactory) -> Iterator[Stage]:
    road.delay_s = 0.0
    space, masters = roadside.get()
    # Whatever the test before left of dead connections is used up.
    eventually(lambda: {masters[0].get("/nodes/status").status for _ in range(10)} == {200}, within_s=5)
    with staged(space, masters, engine_factory) as one:
        yield one
        road.delay_s = 0.0


def test_r09_clients_that_leave_while_the_release_is_on_its_way(roadside_stage: Stage, road: TcpProxy) -> None:
    stage = roadside_stage
    engine = stage.engine(gap_s=0.01, chunks=3)
    road.delay_s = 0.2
    (staying,) = stage.many(1, stream=True).result(10)
    assert staying.done
    events = len(staying.events())
    # The release takes 0.2 s from the moment at which the answer is complete, and that is some 0.03 s after its first
    # event. A client reads that one, pauses and reads the rest: so it leaves before, in or after the 0.2 s. Others
    # leave in mid-answer, or at any moment after the start, which may be in any of the steps.
    chance = random.Random(9)
    leaving: list[dict[str, Any]] = [
        *({"leave_after_chunks": events, "read_delay_s": chance.uniform(0.001, 0.4)} for _ in range(100)),
        *({"leave_after_chunks": chance.randint(1, events - 1)} for _ in range(50)),
        *({"leave_after_s": chance.uniform(0, 0.6)} for _ in range(50)),
    ]
    chance.shuffle(leaving)
    answers = stage.many(200, concurrency=100, stream=True, each=lambda i: leaving[i]).result(60)
    at_the_end = [a for a, how in zip(answers, leaving, strict=True) if "read_delay_s" in how]
    assert all(answer.done and answer.left for answer in at_the_end)
    in_between = [a for a, how in zip(answers, leaving, strict=True) if how.get("leave_after_chunks", events) < events]
    assert all(answer.left for answer in in_between)
    assert all(answer.left or answer.done for answer in answers)
    quiet_check(stage.space, engines=[engine])


def test_r94_cancelled_calls_leave_no_reply_to_the_next_caller(roadside_stage: Stage, road: TcpProxy) -> None:
    stage = roadside_stage
    models = [f"{stage.model}-{i}" for i in range(4)]
    engines = [stage.engine(models=(model,)) for model in models]
    road.delay_s = 0.1
    chance = random.Random(94)
    moments = [chance.uniform(0, 0.15) for _ in range(160)]
    left = stage.many(160, concurrency=80, each=lambda i: {"model": models[i % 4], "leave_after_s": moments[i]}).result(
        30
    )
    assert sum(answer.left for answer in left) > 50
    # Who has closed its half looks at first like one that only ends its sending: a request may still be on its way.
    quiet_check(stage.space, engines=engines, within_s=5)
    time.sleep(1)
    for engine in engines:
        engine.forget()
    reads = [start(asked_nodes(stage.deployment.url, 8)) for _ in range(4)]
    answers = stage.many(240, concurrency=120, each=lambda i: {"model": models[i % 4]}).result(30)
    assert all(answer.ok for answer in answers)
    assert all(answer.json()["model"] == models[i % 4] for i, answer in enumerate(answers))
    assert [len(engine.requests) for engine in engines] == [60] * 4
    right = {engine.url: [model] for engine, model in zip(engines, models, strict=True)}
    seen = [nodes for read in reads for nodes in read.result(20)]
    assert len(seen) > 16, "a busy moment may be a 503, most must be answers"
    assert all({url: node["models"] for url, node in nodes.items()} == right for nodes in seen)


async def asked_nodes(url: str, times: int) -> list[dict[str, dict[str, object]]]:
    """The answers with status 200."""
    found = []
    async with load.session() as client:
        for _ in range(times):
            answer = await client.get(url + "/nodes/status")
            found += [await answer.json()] if answer.status == 200 else []
    return found


def test_r96_management_calls_succeed_right_after_all_connections_were_reset(
    roadside_stage: Stage, road: TcpProxy
) -> None:
    # A restart, a failover and a firewall do this. An engine registers once in its life: it must not be refused
    # because a connection that idled in some pool is dead.
    stage = roadside_stage
    engine = stage.engine()
    for _ in range(2):
        for _ in range(10):
            assert stage.deployment.nodes()  # every worker has used its connection
        road.cut()
        told_by_all(stage.deployment, 200, within_s=3)
        for _ in range(5):
            reply = stage.deployment.post("/nodes/add", {"url": engine.url})
            assert (reply.status, reply.text) == (200, '"Added successfully"')
            assert engine.url in stage.deployment.nodes()


def test_r97_failover_that_leaves_us_on_a_read_only_server(roadside_stage: Stage, road: TcpProxy) -> None:
    stage = roadside_stage
    stage.engines(2, ttft_s=0.05)
    held, streams = held_streams(stage, 4)
    before = registry(stage)
    old = stage.space.server
    with PrivateRedis(tcp=True, options=SYNC_AT_ONCE) as new:
        new.cli("REPLICAOF", "127.0.0.1", old.port)
        eventually(lambda: new.client.info("replication").get("master_link_status") == "up", within_s=5)
        on_new = Stage(Space(new, stage.space.namespace), stage.masters, lambda: held)
        on_new.made = stage.made
        with stage.traffic(every_s=0.05) as traffic:
            eventually(lambda: len(traffic.answers) > 10)
            # The address leads to the new master; the connections that stand still end at the old one.
            new.cli("REPLICAOF", "NO", "ONE")
            old.cli("REPLICAOF", "127.0.0.1", new.port)
            road.target = new.socket
            eventually(lambda: exact_again(on_new, held, before), within_s=5)
            told_by_all(stage.deployment, 200, within_s=2)
        assert traffic.failed == []
        assert all(answer.done for answer in streams.result(20))
        eventually(lambda: on_new.counts(held) == (0,))
        quiet_check(on_new.space, engines=stage.made)

        # Back again, the short way: the server under us is demoted and promoted where it is.
        new.cli("REPLICAOF", "127.0.0.1", old.port)
        old.cli("REPLICAOF", "NO", "ONE")
        with stage.traffic(every_s=0.05) as traffic:
            eventually(lambda: len(traffic.answers) > 10)
            new.cli("REPLICAOF", "NO", "ONE")
            road.target = old.socket
            road.cut()
            told_by_all(stage.deployment, 200, within_s=5)
        assert traffic.failed == []


# --- several on one Redis


def test_r100_namespaces_on_one_redis_do_not_mix(stage: Stage, roadside_stage: Stage) -> None:
    other = roadside_stage
    other.model = stage.model
    mine, theirs = stage.engine(gap_s=0.1, chunks=10), other.engine(gap_s=0.1, chunks=10)
    streams = [stage.many(6, stream=True), other.many(3, stream=True)]
    eventually(lambda: (stage.counts(mine), other.counts(theirs)) == ((6,), (3,)))
    assert list(stage.deployment.nodes()) == [mine.url]
    assert list(other.deployment.nodes()) == [theirs.url]
    other.deployment.post("/nodes/remove", {"url": mine.url})  # unknown there
    assert mine.url in stage.deployment.nodes()
    assert all(answer.done for stream in streams for answer in stream.result(10))
    assert (len(mine.requests), len(theirs.requests)) == (6, 3)


def test_r100_all_keys_of_a_deployment_share_one_hash_tag(stage: Stage) -> None:
    stage.engines(2)
    assert stage.many(20, concurrency=5).result(5)[0].ok

    def found() -> list[str]:
        return list(stage.space.client.scan_iter("*", count=1000))

    eventually(lambda: len(found()) > 8)  # latencies are noted a moment later
    keys = found()
    tags = {key.partition("{")[2].partition("}")[0] for key in keys}
    assert stage.space.namespace in tags
    assert all(key.startswith("evenhand:{") for key in keys), keys


@beside
def test_r100_runs_on_a_cluster_node_which_checks_the_slots(bench: Bench) -> None:
    engine = bench.engine()
    port = low_port()
    with PrivateRedis(options={"cluster-enabled": "yes", "port": str(port)}) as server:
        server.cli("CLUSTER", "ADDSLOTS", *range(16384))
        eventually(lambda: "cluster_state:ok" in str(server.cli("CLUSTER", "INFO")), within_s=5)
        deployment = bench.deployment(1, redis=f"redis://127.0.0.1:{port}/0", namespace="c")
        deployment.add(engine)
        answers = start(load.many(deployment.url, 50, concurrency=10)).result(10)
        assert all(answer.ok for answer in answers)
        quiet_check(server, "c", engines=[engine])
        deployment.stop()
