"""The management of nodes by HTTP: LMDeploy's requests and answers, what we add, and what survives a restart."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.serving import (
    Factory,
    SharedDeployment,
    chat,
    chat_body,
    on_every_worker,
    openai_error,
    remove_nodes,
    streams,
)
from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine
from tests.support.http import Reply, request
from tests.support.wait import eventually

DEPLOYMENT = SharedDeployment(workers=2)

Deploy = Callable[..., Deployment]

DEAD = "http://127.0.0.1:9"  # discard: nobody listens there


def _add(deployment: Deployment, url: str, **status: Any) -> Reply:
    return deployment.post("/nodes/add", {"url": url, "status": status} if status else {"url": url})


# --- /nodes/status


def test_status_has_lmdeploys_fields_and_types(deployment: Deployment, engine: SimulatedEngine) -> None:
    remove_nodes(deployment, but=engine.url)
    on_every_worker(deployment, lambda: chat(deployment).status == 200)
    eventually(lambda: deployment.nodes()[engine.url]["latency"])  # told a quarter of a second later
    reply = deployment.get("/nodes/status")
    assert reply.status == 200
    (node,) = reply.json().values()
    assert list(reply.json()) == [engine.url]
    assert (node["role"], node["models"], node["unfinished"], node["speed"]) == (1, ["sim"], 0, None)
    assert type(node["role"]) is int
    assert 1 <= len(node["latency"]) <= 15
    assert all(isinstance(latency_s, float) and 0 < latency_s < 10 for latency_s in node["latency"])
    assert node["state"] == "ready"


def test_status_without_nodes_is_an_empty_object(deployment: Deployment) -> None:
    remove_nodes(deployment)
    reply = deployment.get("/nodes/status")
    assert (reply.status, reply.json()) == (200, {})


def test_status_counts_what_runs(deployment: Deployment, engine: SimulatedEngine) -> None:
    engine.set(chunks=10, gap_s=0.05)
    running = streams(deployment, 7)
    eventually(lambda: deployment.unfinished()[engine.url] == 7)
    assert all(answer.done for answer in running.result(10))
    eventually(lambda: deployment.unfinished()[engine.url] == 0)


def test_the_latency_window_holds_the_last_15_of_successes(deployment: Deployment, engine: SimulatedEngine) -> None:
    bounds: list[tuple[float, float]] = []
    for ttft_s, n in ((0.5, 2), (0.0, 10), (0.1, 5)):
        engine.set(ttft_s=ttft_s)
        for _ in range(n):
            begun_s = time.monotonic()
            assert chat(deployment).status == 200
            # Not longer than its client saw, but that a worker may notice a moment later that it has ended.
            bounds.append((ttft_s, time.monotonic() - begun_s + 0.09))
    least, most = (sorted(values) for values in zip(*bounds[-15:], strict=True))
    engine.set(status=500)
    assert chat(deployment).status == 500

    def fits() -> bool:
        """Where each of the values is within the bounds of one of the answers, the i-th is within the i-th bounds."""
        found = sorted(deployment.nodes()[engine.url]["latency"])
        assert len(found) == 15
        return all(a <= s <= b for a, s, b in zip(least, found, most, strict=True))

    eventually(fits)  # told a quarter of a second later


# --- /nodes/add


@pytest.mark.parametrize(
    ("role", "number"),
    [
        (1, 1), (2, 2), (3, 3), (4, 4),
        ("Hybrid", 1), ("prefill", 2), ("DECODE", 3), ("eNcOdE", 4),
    ],
)  # fmt: skip
def test_a_role_is_a_number_or_a_name_in_any_case(deployment: Deployment, role: object, number: int) -> None:
    reply = _add(deployment, DEAD, models=["m"], role=role)
    assert (reply.status, reply.json()) == (200, "Added successfully")
    assert deployment.nodes()[DEAD]["role"] == number


def test_a_self_registering_lmdeploy_engine_is_taken_as_it_is(
    deployment: Deployment, engine: SimulatedEngine, engine_factory: Factory
) -> None:
    """Source: lmdeploy/serve/openai/api_server.py, lifespan: posted once, without key, before it listens."""
    api_server = engine_factory(refuse=True, models=("internlm3", "lora-a"))
    url = f"http://0.0.0.0:{api_server.port}"  # --server-name verbatim
    reply = request(
        "POST",
        deployment.url + "/nodes/add",
        headers={"accept": "application/json", "Content-Type": "application/json"},
        body=json.dumps({"url": url, "status": {"models": ["internlm3", "lora-a"], "role": 1}}).encode(),
    )
    assert (reply.status, reply.text) == (200, '"Added successfully"')
    node = deployment.nodes("?all=1")[url]
    assert (node["role"], node["models"], node["unfinished"], node["latency"]) == (1, ["internlm3", "lora-a"], 0, [])
    assert node["speed"] is None
    assert node["state"] != "ready"
    api_server.set(refuse=False)
    eventually(lambda: deployment.nodes()[url]["state"] == "ready", within_s=3)
    on_every_worker(deployment, lambda: chat(deployment, chat_body("lora-a")).status == 200)


def test_models_given_are_registered_without_asking_the_engine(deployment: Deployment, engine_factory: Factory) -> None:
    hanging = engine_factory(blackhole=True)
    begun_s = time.monotonic()
    assert _add(deployment, hanging.url, models=["given"]).json() == "Added successfully"
    assert time.monotonic() - begun_s < 0.5
    assert deployment.nodes()[hanging.url]["state"] == "pending"


def test_an_engine_that_initializes_when_it_registers_is_used_soon_after(
    deployment: Deployment, engine_factory: Factory
) -> None:
    """LMDeploy's first word is `initializing`: until its first good probe a node is probed every second."""
    starting = engine_factory(health_status=503, health_word="initializing", models=("starting",))
    deployment.add(starting, ready=False)
    eventually(lambda: len(starting.probes) >= 2, within_s=3)
    starting.set(health_status=200, health_word="healthy")
    deployment.wait_for_state("ready", starting, within_s=2.5)


def test_models_not_given_come_from_the_engine(deployment: Deployment, engine_factory: Factory) -> None:
    told = engine_factory(models=("told-a", "told-b"))
    for body in ({"url": told.url}, {"url": told.url, "status": None}, {"url": told.url, "status": {"models": []}}):
        reply = deployment.post("/nodes/add", body)
        assert (reply.status, reply.json()) == (200, "Added successfully")
        assert deployment.nodes()[told.url]["models"] == ["told-a", "told-b"]
        assert deployment.post("/nodes/remove", {"url": told.url}).status == 200


@pytest.mark.parametrize("knobs", [{"refuse": True}, {"reset_on_accept": True}], ids=["refused", "reset"])
def test_models_not_given_of_an_engine_that_cant_be_reached_are_504(
    deployment: Deployment, engine_factory: Factory, knobs: dict[str, Any]
) -> None:
    away = engine_factory(**knobs)
    openai_error(_add(deployment, away.url), 504, 10402)
    assert away.url not in deployment.nodes("?all=1")


def test_models_not_given_of_an_engine_that_answers_nonsense_are_no_500(
    deployment: Deployment, engine_factory: Factory
) -> None:
    odd = engine_factory(prefix="/only/here")
    reply = _add(deployment, odd.url.removesuffix("/only/here"))
    assert reply.status in (400, 502, 504)
    openai_error(reply, reply.status)
    assert not deployment.nodes("?all=1").keys() & {odd.url, odd.url.removesuffix("/only/here")}


def test_a_second_add_updates_and_keeps_the_running_count(deployment: Deployment, engine: SimulatedEngine) -> None:
    engine.set(chunks=12, gap_s=0.05, models=("sim", "new-name"))
    running = streams(deployment, 5)
    eventually(lambda: deployment.unfinished()[engine.url] == 5)
    counts = []
    for status in (
        {"models": ["sim"]},
        {"models": ["sim", "new-name"], "speed": 2.5, "role": 1},
        {"models": ["sim", "new-name"], "speed": 3, "unfinished": 99, "latency": [1, 2]},
        {},
    ):
        reply = deployment.post("/nodes/add", {"url": engine.url, "status": status})
        assert reply.json() == "Added successfully"
        counts.append(deployment.unfinished()[engine.url])
    assert counts == [5] * 4
    node = deployment.nodes()[engine.url]
    assert node["models"] == ["sim", "new-name"]
    assert node["latency"] == [] or max(node["latency"]) < 1, "latencies are measured, not told"
    on_every_worker(deployment, lambda: chat(deployment, chat_body("new-name", max_tokens=1)).status == 200)
    assert all(answer.done for answer in running.result(10))
    eventually(lambda: deployment.unfinished()[engine.url] == 0)
    remove_nodes(deployment)  # its speed is not what other tests expect


def test_a_second_add_that_makes_it_another_role_takes_it_out_of_hybrid_serving(
    deployment: Deployment, engine_factory: Factory
) -> None:
    changing = engine_factory(models=("changing",))
    deployment.add(changing)
    on_every_worker(deployment, lambda: chat(deployment, chat_body("changing")).status == 200)
    _add(deployment, changing.url, models=["changing"], role="Prefill")
    on_every_worker(deployment, lambda: chat(deployment, chat_body("changing")).status == 503)
    _add(deployment, changing.url, models=["changing"], role="Hybrid")
    on_every_worker(deployment, lambda: chat(deployment, chat_body("changing")).status == 200)


# --- what is refused


def _field_named(reply: Reply, field: str) -> None:
    error = openai_error(reply, 400)
    assert field in (error["param"] or "") or field in error["message"], error


@pytest.mark.parametrize(
    "url",
    [
        "", "127.0.0.1:23333", "ftp://127.0.0.1:1", "file:///etc/passwd", "http://", "http:///v1", "http://:80",
        "http://user@127.0.0.1:1", "http://user:pw@127.0.0.1:1", "http://127.0.0.1:1?a=1", "http://127.0.0.1:1/?",
        "http://127.0.0.1:1#f", "http://127.0.0.1:99999", "http://127.0.0.1:x", "http://127.0.0.1:-1",
        "http://127.0.0.1:1/a b", "http://127.0.0.1:1/\r\nX: y", "http://a b:1", "http://[::1", "//127.0.0.1:1",
        "http://127.0.0.1:1/\u00e9\n", 7, None, ["http://127.0.0.1:1"], {"a": 1},
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/nodes/add", "/nodes/remove", "/nodes/terminate"])
def test_a_url_that_is_none_is_400_naming_the_field(deployment: Deployment, url: object, path: str) -> None:
    before = set(deployment.nodes("?all=1"))
    _field_named(deployment.post(path, {"url": url, "status": {"models": ["m"]}}), "url")
    assert set(deployment.nodes("?all=1")) == before


@pytest.mark.parametrize(
    "speed", ["0", "-0.0", "-2", "-1.5", "NaN", "Infinity", "-Infinity", "1e999", '"7"', '"fast"', "true", "[]", "{}"]
)
def test_r16_a_speed_that_is_no_finite_number_above_0_is_400(deployment: Deployment, speed: str) -> None:
    body = f'{{"url":"{DEAD}","status":{{"models":["m"],"speed":{speed}}}}}'.encode()
    _field_named(deployment.request("POST", "/nodes/add", body=body), "speed")
    assert DEAD not in deployment.nodes("?all=1")


@pytest.mark.parametrize(("speed", "kept"), [(-1, None), (None, None), (7, 7), (2.5, 2.5), (1e-9, 1e-9)])
def test_speeds_that_are_taken(deployment: Deployment, speed: float | None, kept: float | None) -> None:
    assert _add(deployment, DEAD, models=["m"], speed=speed).json() == "Added successfully"
    assert deployment.nodes()[DEAD]["speed"] == kept


@pytest.mark.parametrize(
    ("field", "status"),
    [
        ("role", {"role": 0}), ("role", {"role": 5}), ("role", {"role": "Router"}), ("role", {"role": 1.5}),
        ("role", {"role": True}), ("role", {"role": []}), ("models", {"models": "m"}), ("models", {"models": [1]}),
        ("models", {"models": [""]}), ("models", {"models": {"m": 1}}), ("status", []), ("status", "x"),
    ],
)  # fmt: skip
def test_a_bad_request_is_400_naming_the_field(deployment: Deployment, field: str, status: Any) -> None:
    value = {"models": ["m"], **status} if isinstance(status, dict) else status
    _field_named(deployment.post("/nodes/add", {"url": DEAD, "status": value}), field)
    assert DEAD not in deployment.nodes("?all=1")


@pytest.mark.parametrize("path", ["/nodes/add", "/nodes/remove", "/nodes/terminate"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"http://127.0.0.1:1"', b"{}", b"\xff", b"[" * 50_000])
def test_a_body_that_is_no_node_is_400(deployment: Deployment, path: str, body: bytes) -> None:
    openai_error(deployment.request("POST", path, body=body), 400)


def test_urls_are_normalised(deployment: Deployment, engine_factory: Factory) -> None:
    made = engine_factory(models=("normal",))
    for url in (f"http://127.0.0.1:{made.port}/", f"HTTP://127.0.0.1:{made.port}"):
        assert _add(deployment, url, models=["normal"]).status == 200
    _add(deployment, f"http://LocalHost:{made.port}/Prefix/A/", models=["normal"])
    _add(deployment, "HTTP://[::1]:5/", models=["normal"])
    mine = {url for url, node in deployment.nodes("?all=1").items() if node["models"] == ["normal"]}
    assert mine == {made.url, f"http://localhost:{made.port}/Prefix/A", "http://[::1]:5"}
    assert deployment.post("/nodes/remove", {"url": f"HTTP://127.0.0.1:{made.port}/"}).status == 200
    assert made.url not in deployment.nodes("?all=1")


# --- /nodes/remove


def test_a_node_is_removed_by_body_or_by_query(deployment: Deployment) -> None:
    for remove in (
        lambda: deployment.post("/nodes/remove", {"url": DEAD}),
        lambda: deployment.post(f"/nodes/remove?node_url={DEAD}"),
        lambda: deployment.post(f"/nodes/remove?node_url={DEAD.replace(':', '%3A').replace('/', '%2F')}"),
    ):
        assert _add(deployment, DEAD, models=["m"]).status == 200
        assert DEAD in deployment.nodes()
        reply = remove()
        assert (reply.status, reply.json()) == (200, "Deleted successfully")
        assert DEAD not in deployment.nodes("?all=1")


def test_a_removed_node_gets_nothing_and_its_streams_go_on(deployment: Deployment, engine: SimulatedEngine) -> None:
    engine.set(chunks=15, gap_s=0.05)
    running = streams(deployment, 4)
    eventually(lambda: deployment.unfinished()[engine.url] == 4)
    deployment.post("/nodes/remove", {"url": engine.url})
    on_every_worker(deployment, lambda: chat(deployment, chat_body(max_tokens=1)).status in (404, 503))
    assert all(answer.done for answer in running.result(10))
    engine.forget()
    assert chat(deployment).status in (404, 503)
    assert not engine.requests


def test_a_node_that_is_added_again_while_its_requests_run_is_counted_right(
    deployment: Deployment, engine: SimulatedEngine
) -> None:
    engine.set(chunks=15, gap_s=0.05)
    running = streams(deployment, 3)
    eventually(lambda: deployment.unfinished()[engine.url] == 3)
    deployment.post("/nodes/remove", {"url": engine.url})
    _add(deployment, engine.url, models=["sim"])
    eventually(lambda: deployment.unfinished()[engine.url] == 3)
    assert all(answer.done for answer in running.result(10))
    eventually(lambda: deployment.unfinished()[engine.url] == 0)


@pytest.mark.parametrize(
    "query", ["drain=maybe", "drain=true&timeout_s=-1", "drain=true&timeout_s=nan", "drain=true&timeout_s=x"]
)
def test_a_bad_query_of_remove_is_400_naming_the_field(deployment: Deployment, query: str) -> None:
    _add(deployment, DEAD, models=["m"])
    field = "timeout_s" if "timeout_s" in query else "drain"
    _field_named(deployment.post(f"/nodes/remove?{query}", {"url": DEAD}), field)
    assert DEAD in deployment.nodes("?all=1")


# --- /nodes/terminate


def test_terminate_calls_the_engine_and_forgets_the_node(deployment: Deployment, engine_factory: Factory) -> None:
    first, second = engine_factory(models=("t",)), engine_factory(models=("t",))
    deployment.add(first, second)
    reply = deployment.post("/nodes/terminate", {"url": first.url})
    assert (reply.status, reply.json()) == (200, "Terminated successfully")
    assert (first.terminated, second.terminated) == (1, 0)
    assert first.url not in deployment.nodes("?all=1")
    assert second.url in deployment.nodes("?all=1")


def test_terminate_of_an_engine_that_cant_be_reached_is_no_success(
    deployment: Deployment, engine_factory: Factory
) -> None:
    away = engine_factory(refuse=True, models=("t",))
    _add(deployment, away.url, models=["t"])
    # A worker that does not know of it yet, for 1 s at most, says 404.
    reply = eventually(lambda: (r := deployment.post("/nodes/terminate", {"url": away.url})).status != 404 and r)
    assert reply.status in (502, 504)
    openai_error(reply, reply.status, 10402)


def test_terminate_all_calls_every_engine(deployment: Deployment, engine_factory: Factory) -> None:
    remove_nodes(deployment)
    made = [engine_factory(models=(f"t{i}",)) for i in range(3)]
    deployment.add(*made)
    reply = deployment.get("/nodes/terminate_all")
    assert (reply.status, reply.json()) == (200, "All nodes terminated successfully")
    assert [one.terminated for one in made] == [1, 1, 1]
    assert deployment.nodes("?all=1") == {}
    assert deployment.get("/nodes/terminate_all").json() == "All nodes terminated successfully"


# --- shared and kept


def test_r33_nodes_survive_a_restart_of_all_workers(
    deployment: Deployment, engine: SimulatedEngine, engine_factory: Factory
) -> None:
    remove_nodes(deployment, but=engine.url)
    kept = engine_factory(models=("k1", "k2"), prefix="/kept")
    deployment.add(kept, speed=2.5)
    _add(deployment, DEAD, models=["p"], role="Prefill", speed=7)
    deployment.restart()
    nodes = deployment.nodes("?all=1")
    assert {url: (n["role"], n["models"], n["speed"], n["unfinished"]) for url, n in nodes.items()} == {
        engine.url: (1, ["sim"], None, 0),
        kept.url: (1, ["k1", "k2"], 2.5, 0),
        DEAD: (2, ["p"], 7, 0),
    }
    assert chat(deployment, chat_body("k2")).status == 200, "known from the first request on"
