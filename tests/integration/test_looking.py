"""`evenhand nodes list`, `top`, `explain` and `check` of a real deployment: over HTTP and from Redis, the same.

The commands' own tests go by scripted documents; these hold the scripts to what a deployment says.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

import pytest

from app import cli
from app.terminal.by_redis import ByRedis
from app.terminal.by_url import ByUrl
from app.terminal.feed import Feed
from tests.integration.serving import SharedDeployment
from tests.support import contract
from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine
from tests.support.wait import eventually

DEPLOYMENT = SharedDeployment(workers=2)
MODEL = "sim"
STRANGER = "http://127.0.0.1:9"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [v for v in os.environ if v.startswith("EVENHAND_")]:
        monkeypatch.delenv(variable)


@pytest.fixture
def engines(engine: SimulatedEngine, engine_factory: Callable[..., SimulatedEngine]) -> list[SimulatedEngine]:
    return [engine, engine_factory()]


@pytest.fixture
def looked_at(deployment: Deployment, engines: list[SimulatedEngine]) -> Deployment:
    """Two workers, two ready nodes with the same model, and one that is not there."""
    deployment.add(engines[1], within_s=20)
    for _ in range(6):
        assert complete(deployment).status == 200
    assert deployment.post("/nodes/add", {"url": STRANGER, "status": {"models": ["other"]}}).status == 200
    return deployment


def complete(deployment: Deployment) -> Any:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    return deployment.post("/v1/chat/completions", body)


def ways(deployment: Deployment) -> dict[str, list[str]]:
    assert deployment.space is not None
    redis = ["--redis-url", deployment.space.url, "--namespace", deployment.namespace]
    return {"http": ["--url", deployment.url], "redis": redis}


WAYS = pytest.mark.parametrize("way", ["http", "redis"])


def said(capsys: Capture, *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert cli.main(list(words)) == code
    return capsys.readouterr().out


def test_the_scripted_documents_have_the_fields_of_the_real_ones(looked_at: Deployment) -> None:
    assert looked_at.space is not None
    for reached in (ByUrl(looked_at.url, None), ByRedis(looked_at.space.url, looked_at.namespace)):
        state = reached.state()
        assert state.keys() == contract.state().keys()
        assert {frozenset(one) for one in state["nodes"]} == {frozenset(contract.node("http://a"))}
        assert {frozenset(one) for one in state["workers"]} == {frozenset(contract.worker("w"))}
        explained = reached.explain(MODEL)
        assert explained.keys() == contract.explain().keys()
        (choice,) = explained["choices"]
        assert choice.keys() == contract.explain()["choices"][0].keys()
        assert choice["candidates"][0].keys() == contract.candidate("http://a").keys()


@WAYS
def test_nodes_are_listed_alike(looked_at: Deployment, capsys: Capture, way: str) -> None:

    def alike() -> bool:  # once what ended before has been told
        listed = json.loads(said(capsys, "nodes", "list", "--json", *ways(looked_at)[way]))
        asked = looked_at.get("/nodes/status").json()
        assert list(listed) == list(asked)
        for url, node in listed.items():
            assert {name: asked[url][name] for name in node} == node
        return True

    eventually(alike)


@WAYS
def test_the_picture(looked_at: Deployment, engines: list[SimulatedEngine], capsys: Capture, way: str) -> None:
    text = said(capsys, "top", "--once", *ways(looked_at)[way])
    assert "Hybrid min_expected_latency  Redis up" in text and "2/3 nodes ready" in text and "2 workers" in text
    for engine in engines:
        assert engine.url.removeprefix("http://") in text


@WAYS
def test_decisions_are_told_while_somebody_looks(looked_at: Deployment, way: str) -> None:
    assert looked_at.space is not None
    reached = ByUrl(looked_at.url, None) if way == "http" else ByRedis(looked_at.space.url, looked_at.namespace)
    feed = Feed(reached, 0.2)
    feed.start()
    try:

        def told() -> bool:
            assert complete(looked_at).status == 200
            return bool(feed.seen.decisions)

        eventually(told, within_s=15, every_s=0.2)
        (one, *_) = feed.seen.decisions
        assert one.keys() == contract.decision(1).keys()
        assert all(leg.keys() == contract.decision(1)["legs"][0].keys() for leg in one["legs"])
        assert one["tries"][0].keys() == contract.decision(1)["tries"][0].keys()
    finally:
        feed.close()


@WAYS
def test_what_the_next_decision_would_weigh(
    looked_at: Deployment, engines: list[SimulatedEngine], capsys: Capture, way: str
) -> None:
    lines = said(capsys, "explain", "--model", MODEL, *ways(looked_at)[way]).splitlines()
    assert lines[0] == f"model {MODEL}, strategy min_expected_latency"
    for engine in engines:
        (line,) = (line for line in lines if engine.url in line)
        assert re.match(r" +50\.0% +0 ", line)
    capsys.readouterr()
    assert cli.main(["explain", "--model", "simm", *ways(looked_at)[way]]) == 1
    err = capsys.readouterr().err
    assert "did you mean sim? there are " in err and err.count("\n") == 1


@WAYS
def test_a_check(looked_at: Deployment, capsys: Capture, way: str) -> None:
    document = json.loads(said(capsys, "check", "--json", *ways(looked_at)[way]))
    trouble = {f["check"]: f["level"] for f in document["findings"] if f["level"] != "ok"}
    # The Redis of the tests keeps nothing; the stranger has never answered, and nobody else has its model.
    expected = {"nodes.trouble": "warn", "nodes.models": "warn"}
    assert trouble == expected | ({"redis.persistence": "warn"} if way == "redis" else {}), document


def test_a_check_of_the_embedded_redis_looks_at_its_workers(
    deployment_factory: Callable[..., Deployment], engine_factory: Callable[..., SimulatedEngine], capsys: Capture
) -> None:
    nodes = [engine_factory().url for _ in range(2)]
    deployment = deployment_factory(workers=2, redis=None, settings={"nodes": nodes})
    eventually(lambda: deployment.get("/ready").status == 200, within_s=10)
    state_dir = str(deployment.directory / "state")
    words = ["check", "--json", "--state-dir", state_dir, "--namespace", deployment.namespace]

    def findings() -> dict[str, dict[str, str]]:
        return {f["check"]: f for f in json.loads(said(capsys, *words))["findings"]}

    # One worker is enough to be ready.
    eventually(lambda: findings()["host.workers"]["says"].startswith("2 workers on "))
    found = findings()
    assert [check for check, f in found.items() if f["level"] == "bad"] == []
    assert found["host.worker_files"]["level"] == "ok"
    assert found["redis.persistence"]["says"] == "append-only file"
