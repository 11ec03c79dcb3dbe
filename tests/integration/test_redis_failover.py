"""A whole deployment on Redis behind sentinels, and on a Redis cluster: the master dies under load, and no client
sees an error; 2 s after there is a master again the counts are exact and the registry is what it was.
"""

from __future__ import annotations

import signal

import pytest

from tests.integration.stage import Bench, Stage, beside
from tests.integration.test_redis_faults import HELD, exact_again, held_streams, readiness, registry
from tests.support.deployment import Deployment
from tests.support.quiet import quiet_check
from tests.support.redis import PrivateRedis, Space
from tests.support.redis_groups import cluster, sentinel_set, wait_for_failover
from tests.support.wait import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]  # the first test waits for all of them
BENCHES_AT_ONCE = 4
# A long lease: what is given back within seconds was given back by the master process of the host.
SETTINGS = {"lease_s": 30, "redis_timeout_s": 0.5, "probe_interval_s": 1}


@beside
def test_the_master_under_sentinels_dies_under_load(bench: Bench) -> None:
    with sentinel_set() as group:
        fails_over_under_load(bench, group.url, "s", group.master, group.replica)


@beside
def test_the_owner_in_a_cluster_dies_under_load(bench: Bench) -> None:
    with cluster("evenhand:{c}:version") as group:
        fails_over_under_load(bench, group.url, "c", group.owner, group.replica)


def fails_over_under_load(bench: Bench, url: str, namespace: str, master: PrivateRedis, replica: PrivateRedis) -> None:
    deployment = bench.deployment(2, redis=url, namespace=namespace, settings=SETTINGS)
    stage = Stage(Space(master, namespace), [deployment], bench.engine)
    engines = stage.engines(2, speeds=[3, 1], ttft_s=0.05)
    held, streams = held_streams(stage, 12)
    before = registry(stage)
    assert len(before) == 3
    with stage.traffic() as traffic:
        eventually(lambda: len(traffic.answers) > 20)
        master.kill()
        sent = len(traffic.answers)
        wait_for_failover(replica)
        stage.space = Space(replica, namespace)
        eventually(lambda: exact_again(stage, held, before), within_s=2)
        eventually(lambda: readiness(deployment) == {200}, within_s=2)
        assert len(traffic.answers) > sent
        eventually(lambda: len(traffic.answers) > sent + 100, within_s=5)
    assert traffic.failed == []
    assert all(answer.done for answer in streams.result(20))
    assert all(engine.requests for engine in engines)
    a_dead_worker_is_given_back(stage, deployment)
    quiet_check(stage.space, engines=stage.made)
    deployment.stop()


def a_dead_worker_is_given_back(stage: Stage, deployment: Deployment) -> None:
    """The master process knows where Redis is by now."""
    slow = stage.engine(models=("slow",), gap_s=0.1, chunks=40)
    streams = stage.many(HELD, model="slow", stream=True)
    eventually(lambda: stage.counts(slow) == (HELD,))
    victims = deployment.worker_pids()
    for pid in victims:
        deployment.kill_worker(pid, signal.SIGKILL)
    eventually(lambda: stage.counts(slow) == (0,), within_s=5)
    deployment.wait_for_workers(without=victims)
    streams.result(20)
    eventually(lambda: readiness(deployment) == {200}, within_s=10)


@beside
def test_a_wrong_password_is_told_and_mended_by_the_right_one(bench: Bench) -> None:
    with PrivateRedis(tcp=True) as server:
        server.cli("CONFIG", "SET", "requirepass", "right")
        url = server.tcp_url.replace("://", "://:hush-hush@")
        deployment = bench.deployment(1, redis=url, namespace="p", settings=SETTINGS)
        assert deployment.get("/health").status == 200
        ready = deployment.get("/ready")
        assert (ready.status, "WRONGPASS" in ready.text) == (503, True)
        told = [line for line in deployment.log().splitlines() if "WARNING" in line and "WRONGPASS" in line]
        assert len(told) == 1, "the reason, once"
        server.cli("CONFIG", "SET", "requirepass", "hush-hush")
        eventually(lambda: readiness(deployment) == {503} and "Redis" not in deployment.get("/ready").text, within_s=3)
        engine = bench.engine(models=("m",))
        deployment.add(engine)
        assert readiness(deployment) == {200}
        assert "decisions are shared" in deployment.log()
        deployment.stop()
        assert "hush" not in deployment.log() + ready.text
