"""Which nodes get traffic: probes, busy engines, dead ones, those that come later and those that come back."""

from __future__ import annotations

import time

import pytest

from tests.integration.stage import Stage, beside, during
from tests.integration.test_strategies import served
from tests.support.deployment import Deployment, Setting
from tests.support.engine import SimulatedEngine
from tests.support.wait import eventually

INTERVAL_S, TIMEOUT_S, DOWN_AFTER, BUSY_GRACE_S, EXPIRATION_S = 1.0, 0.5, 3, 1.5, 4.0
SETTINGS: dict[str, Setting] = {
    "probe_interval_s": INTERVAL_S,
    "probe_timeout_s": TIMEOUT_S,
    "probe_down_after": DOWN_AFTER,
    "probe_busy_grace_s": BUSY_GRACE_S,
    "heartbeat_expiration_s": EXPIRATION_S,
}
DOWN_WITHIN_S = DOWN_AFTER * (INTERVAL_S + TIMEOUT_S) + 1


pytestmark = pytest.mark.timeout(180)  # the first test of the scenarios waits for all of them


FLEET = {"workers": 2, "settings": SETTINGS}


def states(stage: Stage) -> dict[str, str]:
    return {url: node["state"] for url, node in stage.deployment.nodes("?all=1").items()}


def models_of(deployment: Deployment) -> list[str]:
    return [model["id"] for model in deployment.get("/v1/models").json()["data"]]


def even_again(stage: Stage, *two: SimulatedEngine) -> None:
    """Both get their half of what comes."""
    for engine in two:
        engine.set(ttft_s=0.7)
        engine.forget()
    assert all(answer.ok for answer in stage.many(20).result(10))
    assert served(list(two)) == [10, 10]


# --- requests are no probes


def test_r18_r19_answers_that_refuse_a_request_change_no_node(stage: Stage) -> None:
    body = b'{"error": {"message": "as the engine says it"}}'
    engines = stage.engines(2, body=body, only_for="poison")
    for status in (400, 401, 404, 413, 422, 429, 500):
        for engine in engines:
            engine.set(status=status)
        bad = stage.many(12, prompt="poison").result(10)
        assert {(answer.status, answer.body) for answer in bad} == {(status, body)}
        good = stage.many(12).result(10)
        assert all(answer.ok for answer in good)
        assert {states(stage)[engine.url] for engine in engines} == {"ready"}


# --- busy is not dead


@beside
def test_r26_engine_too_busy_for_probes_stays_while_its_requests_succeed(stage: Stage) -> None:
    engine = stage.engine()
    engine.set(health_delay_s=8)
    slow_since_s = time.monotonic()
    with stage.traffic(every_s=0.1) as traffic:
        for _ in during(DOWN_WITHIN_S + 0.5, every_s=0.2):
            assert states(stage)[engine.url] == "ready"
    assert traffic.failed == []
    missed = [p for p in engine.probes if p.started_s >= slow_since_s]
    assert len(missed) > DOWN_AFTER, "it must have been probed all the time"
    # The same silence without traffic is a node that is down.
    eventually(lambda: states(stage)[engine.url] == "down", within_s=BUSY_GRACE_S + DOWN_WITHIN_S, every_s=0.1)
    assert stage.many(1).result(5)[0].status == 503
    engine.set(health_delay_s=0)
    eventually(lambda: states(stage)[engine.url] == "ready", within_s=5, every_s=0.1)
    assert stage.many(1).result(5)[0].ok


@beside
def test_one_missed_probe_takes_no_node_down(stage: Stage) -> None:
    engine = stage.engine()
    engine.forget()
    engine.set(health_status=503, health_word="unhealthy")
    eventually(lambda: engine.probes, within_s=3)
    engine.set(health_status=200, health_word="healthy")
    for _ in during(1.5, every_s=0.1):
        assert states(stage)[engine.url] == "ready"


# --- dead


@beside
def test_r28_killed_engine_is_out_within_two_probes_and_back_without_restart(stage: Stage) -> None:
    dying, living = stage.engines(2)
    dying.crash()
    eventually(lambda: states(stage)[dying.url] == "down", within_s=2 * INTERVAL_S + 0.5, every_s=0.1)
    answers = stage.many(40, concurrency=10).result(10)
    assert all(answer.ok for answer in answers)
    assert len(living.requests) == 40
    dying.start()
    eventually(lambda: states(stage)[dying.url] == "ready", within_s=5, every_s=0.1)
    even_again(stage, dying, living)


@beside
def test_known_model_without_a_living_node_is_503_with_retry_after(stage: Stage) -> None:
    engine = stage.engine()
    engine.crash()
    eventually(lambda: states(stage)[engine.url] == "down", within_s=3, every_s=0.1)
    answer = stage.many(1).result(5)[0]
    assert answer.status == 503
    assert 0 < int(answer.headers["retry-after"]) <= 60
    assert answer.json()["error_code"] == 10401
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    engine.start()
    eventually(lambda: states(stage)[engine.url] == "ready", within_s=5, every_s=0.1)


@beside
def test_gone_node_leaves_the_lists_and_comes_back_by_itself(stage: Stage) -> None:
    engine = stage.engine()
    deployment = stage.deployment
    assert stage.model in models_of(deployment)
    engine.crash()
    crashed_s = time.monotonic()
    eventually(lambda: engine.url not in deployment.nodes(), within_s=EXPIRATION_S + 4, every_s=0.1)
    assert time.monotonic() - crashed_s > EXPIRATION_S * 0.9
    assert deployment.nodes("?all=1")[engine.url]["state"] == "gone"
    assert stage.model not in models_of(deployment)
    assert stage.many(1).result(5)[0].status in (404, 503)
    engine.start()  # it does not register again: LMDeploy's engines do so once in their life
    eventually(lambda: states(stage)[engine.url] == "ready", within_s=15, every_s=0.1)
    assert stage.model in models_of(deployment)
    assert stage.many(1).result(5)[0].ok


# --- not yet


@beside
def test_r30_node_is_pending_until_it_answers(stage: Stage) -> None:
    ready = stage.engine()
    later = stage.engine(ready=False, refuse=True)
    assert stage.deployment.nodes()[later.url]["state"] == "pending"
    for _ in during(1.2 * INTERVAL_S, every_s=0.1):
        assert states(stage)[later.url] == "pending"
    eventually(lambda: "refused" in stage.deployment.nodes()[later.url]["reason"], within_s=2, every_s=0.1)
    assert all(answer.ok for answer in stage.many(20).result(5))
    assert (len(ready.requests), len(later.requests)) == (20, 0)
    later.set(refuse=False)
    # The first probe comes within 1 s, then every second.
    eventually(lambda: states(stage)[later.url] == "ready", within_s=2.5, every_s=0.1)
    even_again(stage, ready, later)


@beside
def test_r30_engine_that_sleeps_is_not_routed_and_not_deleted(stage: Stage) -> None:
    not_routed_not_deleted(stage, "sleeping", 200)


@beside
def test_r30_engine_that_initializes_is_not_routed_and_not_deleted(stage: Stage) -> None:
    not_routed_not_deleted(stage, "initializing", 503)


def not_routed_not_deleted(stage: Stage, word: str, status: int) -> None:
    other, engine = stage.engines(2)
    engine.set(health_word=word, health_status=status)
    eventually(lambda: states(stage)[engine.url] not in ("ready", "down", "gone"), within_s=3, every_s=0.1)
    engine.forget()
    assert all(answer.ok for answer in stage.many(20, concurrency=5).result(5))
    assert (len(engine.requests), len(other.requests)) == (0, 20)
    for _ in during(EXPIRATION_S + 1, every_s=0.2):  # longer than a node that is down would be listed
        assert engine.url in stage.deployment.nodes()
    engine.set(health_word="healthy", health_status=200)
    eventually(lambda: states(stage)[engine.url] == "ready", within_s=4, every_s=0.1)
    even_again(stage, other, engine)


def test_engine_without_models_and_without_answer_is_504_and_not_added(stage: Stage) -> None:
    url = "http://127.0.0.1:9"
    reply = stage.deployment.post("/nodes/add", {"url": url})
    assert reply.status == 504
    assert reply.json()["error_code"] == 10402
    assert url not in stage.deployment.nodes("?all=1")


# --- configured nodes


@beside
def test_r29_starts_with_a_configured_node_down_and_uses_it_once_it_is_up(stage: Stage) -> None:
    up = [stage.make(models=("a",)), stage.make(models=("b",))]
    down = stage.make(models=("c",), refuse=True)
    added = stage.make(models=("d",))
    nodes = [engine.url for engine in (*up, down)]
    settings = SETTINGS | {"nodes": nodes, "heartbeat_expiration_s": 1, "forget_after_s": 2}
    with Deployment(1, redis=stage.space.server, namespace=stage.model, settings=settings) as deployment:
        deployment.wait_for_state("ready", *up)
        assert models_of(deployment) == ["a", "b"]
        assert (chat(deployment, "a"), chat(deployment, "b")) == (200, 200)
        assert chat(deployment, "c") in (404, 503)
        assert deployment.get("/ready").status == 200
        # Beside it a node that was added at run time: that one is forgotten in the end, the configured one never.
        deployment.add(added)
        added.crash()
        eventually(lambda: added.url not in deployment.nodes("?all=1"), within_s=15, every_s=0.1)
        assert down.url in deployment.nodes("?all=1")
        down.set(refuse=False)
        eventually(lambda: chat(deployment, "c") == 200, within_s=15, every_s=0.1)
        assert "c" in models_of(deployment)
        deployment.stop()


def test_r29_without_any_node_all_answers_are_clean(stage: Stage) -> None:
    deployment = stage.deployment  # it was started with none, and that is how the other tests leave it
    eventually(lambda: deployment.get("/v1/models").json() == {"object": "list", "data": []}, within_s=1)
    eventually(lambda: deployment.nodes("?all=1") == {}, within_s=1)
    reply = deployment.post("/v1/chat/completions", {"model": "any", "messages": []})
    assert reply.status == 503
    assert reply.json()["error_code"] == 10401
    assert int(reply.headers["retry-after"]) > 0
    ready = deployment.get("/ready")
    assert ready.status == 503
    assert "node" in ready.text, "it says why"
    stage.engine()
    assert chat(deployment, stage.model) == 200
    assert deployment.get("/ready").status == 200


def chat(deployment: Deployment, model: str) -> int:
    return deployment.post("/v1/chat/completions", {"model": model, "messages": []}).status
