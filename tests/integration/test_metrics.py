"""R101: `/metrics` says the same whichever worker answers, and goes on over the end of any of them."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.serving import Factory, chat, chat_body
from tests.support import load
from tests.support.deployment import Deployment
from tests.support.metrics import Samples, samples, total, value
from tests.support.redis import PrivateRedis
from tests.support.wait import eventually

WORKERS = 3
REQUESTS = 300
EVERY_S = 0.1  # a scrape is the most that a worker is asked for

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def own_redis() -> Iterator[PrivateRedis]:
    with PrivateRedis() as server:
        yield server


def scrape(deployment: Deployment) -> Samples:
    reply = deployment.get("/metrics")
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    return samples(reply.text)


def requests_of(found: Samples) -> float:
    return total(found, "evenhand_requests_total", model="sim", route="/v1/chat/completions", outcome="ok")


def test_r101_every_scrape_gives_all_requests_and_no_worker_that_goes_takes_any_along(
    deployment_factory: Callable[..., Deployment], engine_factory: Factory
) -> None:
    deployment = deployment_factory(WORKERS, settings={"grace_s": 5})
    engines = [engine_factory(chunks=1), engine_factory(chunks=1)]
    deployment.add(*engines, speed=2)
    answers = asyncio.run(load.many(deployment.url, REQUESTS, concurrency=20, keep_alive=False))
    assert all(answer.ok for answer in answers)

    found = scrape(deployment)
    assert value(found, "evenhand_workers") == value(found, "evenhand_host_workers") == WORKERS
    for _ in range(20):  # on connections of their own: by all workers
        found = scrape(deployment)
        assert requests_of(found) == REQUESTS
        assert total(found, "evenhand_requests_total") == REQUESTS
        assert total(found, "evenhand_request_duration_seconds_count", model="sim") == REQUESTS
    for engine in engines:
        assert total(found, "evenhand_requests_total", node=engine.url) == len(engine.requests)
        assert value(found, "evenhand_node_speed", node=engine.url) == 2  # once, not for each worker
        assert value(found, "evenhand_node_unfinished", node=engine.url) == 0
        assert value(found, "evenhand_node_state", node=engine.url, state="ready") == 1

    last = [float(REQUESTS)]

    def look() -> Samples:
        found = scrape(deployment)
        assert requests_of(found) >= last[-1]
        last.append(requests_of(found))
        return found

    before = deployment.worker_pids()
    deployment.kill_worker(number=signal.SIGKILL)
    eventually(
        lambda: bool(look()) and len(set(deployment.worker_pids()) - set(before)) == 1, within_s=10, every_s=EVERY_S
    )
    eventually(lambda: value(look(), "evenhand_host_workers") == WORKERS, within_s=10, every_s=EVERY_S)
    assert look() and last[-1] == REQUESTS

    before = deployment.worker_pids()
    assert deployment.process is not None
    deployment.process.send(signal.SIGHUP)
    eventually(lambda: bool(look()) and not set(deployment.worker_pids()) & set(before), within_s=30, every_s=EVERY_S)
    eventually(lambda: value(look(), "evenhand_host_workers") == WORKERS, within_s=10, every_s=EVERY_S)
    assert chat(deployment).status == 200
    assert requests_of(look()) == REQUESTS + 1
    assert value(look(), "evenhand_redis_up") == 1


def test_while_redis_is_away_it_says_so_and_answers_at_once(
    own_redis: PrivateRedis, deployment_factory: Callable[..., Deployment], engine_factory: Factory
) -> None:
    deployment = deployment_factory(2, redis=own_redis)
    engine = engine_factory(chunks=1)
    deployment.add(engine)
    before = scrape(deployment)
    assert [value(before, f"evenhand_{name}") for name in ("redis_up", "local_workers")] == [1, 0]
    own_redis.pause()
    try:
        eventually(lambda: value(scrape(deployment), "evenhand_local_workers") == 2, within_s=10, every_s=EVERY_S)
        began_s = time.monotonic()
        found = scrape(deployment)
        assert time.monotonic() - began_s < 1.0
        assert value(found, "evenhand_redis_up") == 0
        assert not any(name.startswith("evenhand_node") or name == "evenhand_workers" for name, _ in found)
        assert chat(deployment, chat_body()).status == 200
        assert requests_of(scrape(deployment)) == 1
        degraded = [total(scrape(deployment), "evenhand_degraded_seconds_total") for _ in range(2)]
        assert before_s(before) < degraded[0] < degraded[1]
    finally:
        own_redis.resume()
    eventually(lambda: value(scrape(deployment), "evenhand_redis_up") == 1, within_s=10, every_s=EVERY_S)
    assert value(scrape(deployment), "evenhand_node_unfinished", node=engine.url) == 0


def before_s(found: Samples) -> float:
    return total(found, "evenhand_degraded_seconds_total")


def test_streams_retries_failures_and_breakers_are_counted(
    deployment_factory: Callable[..., Deployment], engine_factory: Factory
) -> None:
    deployment = deployment_factory(2, settings={"breaker_failures": 3, "breaker_open_s": 60, "probe_interval_s": 60})
    bad, good = engine_factory(models=["sim"]), engine_factory(models=["sim"], chunks=5, ttft_s=0.1, gap_s=0.05)
    deployment.add(bad, good)
    bad.set(status=503)
    asked, tried = 0, 3
    while len(bad.requests) < tried:
        asked += 1
        (answer,) = asyncio.run(load.many(deployment.url, 1, stream=True))
        assert answer.ok and answer.done
        eventually(lambda: value(scrape(deployment), "evenhand_node_unfinished", node=good.url) == 0)
    changes = "evenhand_breaker_changes_total"
    eventually(lambda: value(scrape(deployment), changes, node=bad.url, breaker="open") == 1)
    found = scrape(deployment)
    assert value(found, "evenhand_node_breaker", node=bad.url, breaker="open") == 1
    assert len(bad.requests) == tried
    assert value(found, "evenhand_retries_total", node=good.url) == tried
    assert value(found, "evenhand_node_failures_total", node=bad.url) == tried
    assert total(found, "evenhand_redis_duration_seconds_count") > 0  # a sample
    labels = {"model": "sim", "node": good.url}
    assert value(found, "evenhand_time_to_first_token_seconds_count", **labels) == asked
    first_s = value(found, "evenhand_time_to_first_token_seconds_sum", **labels)
    assert first_s is not None and 0.9 * 0.1 * asked <= first_s < 2 * asked
    gaps = value(found, "evenhand_inter_token_latency_seconds_count", **labels)
    took_s = value(found, "evenhand_inter_token_latency_seconds_sum", **labels)
    assert gaps is not None and took_s is not None and 4 <= gaps / asked <= 8 and 0.9 * 4 * 0.05 <= took_s / asked < 4


def directory_of(deployment: Deployment) -> Path:
    """Where the first worker has its figures: what it has mapped."""
    maps = Path(f"/proc/{deployment.worker_pids()[0]}/maps").read_text()
    found = re.search(r"(/\S+/evenhand-metrics-\w+)/counter_\S+\.db", maps)
    assert found, "no figures are published"
    return Path(found[1])


def test_it_ends_with_its_master_and_begins_anew(deployment_factory: Callable[..., Deployment]) -> None:
    deployment = deployment_factory(1)
    chat(deployment)
    assert total(scrape(deployment), "evenhand_requests_total", outcome="no_node") == 1
    directory = directory_of(deployment)
    assert directory.stat().st_mode & 0o777 == 0o700
    deployment.restart()
    assert not directory.exists()
    assert total(scrape(deployment), "evenhand_requests_total") == 0
    directory = directory_of(deployment)
    deployment.kill()
    assert directory.exists()
    deployment.start()
    assert not directory.exists(), "the next start takes away what a killed master has left"
