"""Who may do what: clients' keys, the admin's key, trusted networks, and the keys that engines get."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.integration.serving import (
    Factory,
    SharedDeployment,
    chat,
    chat_body,
    openai_error,
    post_json,
    raw,
    raw_post,
    values,
)
from tests.support import load
from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine
from tests.support.http import request

CLIENT, OTHER_CLIENT, ADMIN, ENGINE, NODE = "client-key-1", "client-key-2", "admin-key", "engine-key", "node-key"
AS_ADMIN = {"authorization": f"Bearer {ADMIN}"}
DEAD = "http://127.0.0.1:9"

DEPLOYMENT = SharedDeployment(
    workers=1,
    key=ADMIN,
    client_key=CLIENT,
    settings={
        "api_keys": [CLIENT, OTHER_CLIENT],
        "admin_keys": [ADMIN],
        "trusted_nodes": ["10.0.0.0/8", "fd00::/8"],  # we come from 127.0.0.1
        "engine_key": ENGINE,
        "log_level": "DEBUG",
    },
)

NO_KEY: list[dict[str, str]] = [
    {},
    {"authorization": ""},
    {"authorization": "Bearer"},
    {"authorization": "Bearer "},
    {"authorization": "Bearer wrong"},
    {"authorization": f"Bearer {CLIENT[:-1]}"},
    {"authorization": f"Bearer {CLIENT}1"},
    {"authorization": f"Bearer {CLIENT},{OTHER_CLIENT}"},
    {"authorization": f"Basic {CLIENT}"},
    {"authorization": CLIENT},
    {"api-key": CLIENT},
    {"x-api-key": CLIENT[:-1]},
    {"x-api-key": f"Bearer {CLIENT}"},
    {"authorization": "Bearer \xfc\xff"},
]


# --- /v1


@pytest.mark.parametrize("headers", NO_KEY)
def test_r89_v1_without_a_right_key_is_401(
    deployment: Deployment, engine: SimulatedEngine, headers: dict[str, str]
) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/anything"):
        openai_error(post_json(deployment.url, path, chat_body(), headers), 401)
    openai_error(deployment.get("/v1/models", headers=headers), 401)
    assert not engine.requests


@pytest.mark.parametrize("body", [b"{", chat_body("never-seen"), b""])
def test_who_has_no_key_learns_nothing_of_his_request(
    deployment: Deployment, engine: SimulatedEngine, body: bytes
) -> None:
    openai_error(chat(deployment, body), 401)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {CLIENT}"},
        {"authorization": f"Bearer {OTHER_CLIENT}"},
        {"authorization": f"bearer {CLIENT}"},
        {"x-api-key": CLIENT},
        {"authorization": "Bearer ", "x-api-key": CLIENT},
    ],
)
def test_v1_with_one_of_the_keys_is_served(
    deployment: Deployment, engine: SimulatedEngine, headers: dict[str, str]
) -> None:
    assert post_json(deployment.url, "/v1/messages", chat_body(), headers).status == 200
    assert deployment.get("/v1/models", headers=headers).status == 200
    assert all(name != b"x-api-key" for name, _ in engine.requests[0].headers), "it stays here"


def test_the_sdk_raises_authentication_error(deployment: Deployment, engine: SimulatedEngine) -> None:
    with openai.OpenAI(base_url=deployment.url + "/v1", api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model="sim", messages=[])
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
    with openai.OpenAI(base_url=deployment.url + "/v1", api_key=CLIENT) as client:
        assert [model.id for model in client.models.list()] == ["sim"]


# --- /nodes and /distserve

ADMIN_CALLS: list[tuple[str, str, Any]] = [
    ("GET", "/nodes/status", None),
    ("GET", "/nodes/status?all=1", None),
    ("POST", "/nodes/add", {"url": DEAD, "status": {"models": ["sim"]}}),
    ("POST", "/nodes/remove", {"url": "SIM"}),
    ("POST", "/nodes/remove?drain=true", {"url": "SIM"}),
    ("POST", "/nodes/terminate", {"url": "SIM"}),
    ("GET", "/nodes/terminate_all", None),
    ("POST", "/distserve/connection_warmup", {}),
    ("POST", "/distserve/gc", {}),
    ("GET", "/distserve/links", None),
]


@pytest.mark.parametrize("call", ADMIN_CALLS, ids=lambda call: call[1])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Bearer {CLIENT}"},
        {"x-forwarded-for": "10.1.2.3"},
        {"x-forwarded-for": "127.0.0.1", "forwarded": "for=10.1.2.3", "x-real-ip": "10.1.2.3"},
    ],
    ids=["no key", "wrong key", "client's key", "forwarded for a trusted one", "many words"],
)
def test_r82_management_needs_the_admin_key(
    deployment: Deployment, engine: SimulatedEngine, call: tuple[str, str, Any], headers: dict[str, str]
) -> None:
    method, path, value = call
    if value == {"url": "SIM"}:
        value = {"url": engine.url}
    before = deployment.nodes("?all=1", headers=AS_ADMIN)
    reply = deployment.request(method, path, value=value, headers=headers)
    assert reply.status in (401, 403)
    openai_error(reply, reply.status)
    after = deployment.nodes("?all=1", headers=AS_ADMIN)
    assert {url: node["state"] for url, node in after.items()} == {url: node["state"] for url, node in before.items()}
    assert engine.terminated == 0


def test_r82_with_the_admin_key_it_is_done(deployment: Deployment, engine_factory: Factory) -> None:
    for method, path, value in ADMIN_CALLS:
        if path.startswith("/nodes"):
            sent = {"url": DEAD, **value} | {"url": DEAD} if value is not None else None
            if "terminate" in path:
                continue
            assert deployment.request(method, path, value=sent, headers=AS_ADMIN).status == 200, path
    made = engine_factory(models=("mortal",), key=ENGINE)
    deployment.add(made, headers=AS_ADMIN)
    assert deployment.post("/nodes/terminate", {"url": made.url}, headers=AS_ADMIN).status == 200
    assert made.terminated == 1, "the engine's key goes with it"


def test_r82_health_ready_and_the_docs_page_are_open(deployment: Deployment, engine: SimulatedEngine) -> None:
    for path in ("/", "/health", "/ready", "/openapi.json"):
        assert deployment.get(path).status == 200, path


def test_r82_a_path_that_only_looks_open_is_not(deployment: Deployment, engine: SimulatedEngine) -> None:
    for path in ("/health/../nodes/status", "//nodes/status", "/nodes/status/", "/NODES/STATUS", "/nodes/%73tatus"):
        reply = request("GET", deployment.url + path)
        assert reply.status in (400, 401, 403, 404), (path, reply.status)
    for path in ("/health/../v1/chat/completions", "/health?/v1/chat/completions", "//v1/chat/completions"):
        reply = post_json(deployment.url, path, chat_body())
        assert reply.status in (400, 401, 403, 404, 405), (path, reply.status)
    assert not engine.requests


# --- the keys that engines get


def test_r85_a_clients_key_never_reaches_an_engine_and_the_engines_key_does(
    deployment: Deployment, engine: SimulatedEngine
) -> None:
    body = chat_body()
    lines = ["Host: h", f"Authorization: Bearer {CLIENT}", f"Content-Length: {len(body)}"]
    assert raw(deployment.url, raw_post(lines, body)).status == 200
    (record,) = engine.requests
    assert values(record, b"authorization") == [b"Bearer " + ENGINE.encode()]
    assert all(CLIENT.encode() not in value for _, value in record.headers)


def test_r83_an_engine_that_wants_a_key_on_every_path_is_ready_and_serves(
    deployment: Deployment, engine_factory: Factory
) -> None:
    keyed = engine_factory(models=("keyed",), key=ENGINE)
    assert deployment.post("/nodes/add", {"url": keyed.url}, headers=AS_ADMIN).json() == "Added successfully"
    deployment.wait_for_state("ready", keyed, headers=AS_ADMIN)
    assert deployment.nodes(headers=AS_ADMIN)[keyed.url]["models"] == ["keyed"]
    answers = asyncio.run(load.many(deployment.url, 10, model="keyed", key=CLIENT, concurrency=2))
    assert all(answer.ok for answer in answers)
    assert {r.header(b"authorization") for r in keyed.probes} == {b"Bearer " + ENGINE.encode()}


def test_r83_a_node_may_have_a_key_of_its_own(deployment: Deployment, engine_factory: Factory) -> None:
    own, common = engine_factory(models=("own",), key=NODE), engine_factory(models=("common",), key=ENGINE)
    value = {"url": own.url, "key": NODE}
    assert deployment.post("/nodes/add", value, headers=AS_ADMIN).json() == "Added successfully"
    deployment.add(common, headers=AS_ADMIN)
    deployment.wait_for_state("ready", own, headers=AS_ADMIN)
    asked = {name: load.many(deployment.url, 6, model=name, key=CLIENT, concurrency=1) for name in ("own", "common")}
    for work in asked.values():
        assert all(answer.ok for answer in asyncio.run(work))
    seen = [{r.header(b"authorization") for r in made.requests} for made in (own, common)]
    assert seen == [{b"Bearer " + NODE.encode()}, {b"Bearer " + ENGINE.encode()}]

    # An update without a key keeps it.
    update = {"url": own.url, "status": {"models": ["own"], "speed": 3}}
    assert deployment.post("/nodes/add", update, headers=AS_ADMIN).status == 200
    assert chat(deployment, chat_body("own"), authorization=f"Bearer {CLIENT}").status == 200


def test_r85_keys_are_never_shown_nor_logged(deployment: Deployment, engine_factory: Factory) -> None:
    made = engine_factory(models=("secretive",), key=NODE)
    deployment.post("/nodes/add", {"url": made.url, "key": NODE}, headers=AS_ADMIN)
    deployment.wait_for_state("ready", made, headers=AS_ADMIN)
    as_client = f"Bearer {CLIENT}"
    made.set(key="another")
    shown = [
        chat(deployment, chat_body("secretive"), authorization=as_client).text,
        chat(deployment, chat_body("never-seen"), authorization=as_client).text,
        chat(deployment, authorization="Bearer wrong-secret").text,
        deployment.post("/nodes/add", {"url": made.url, "key": 7}, headers=AS_ADMIN).text,
        json.dumps(deployment.nodes("?all=1", headers=AS_ADMIN)),
        deployment.get("/ready").text,
        deployment.get("/openapi.json").text,
        deployment.log(),
    ]
    assert "DEBUG" in shown[-1] or "debug" in shown[-1], "the log is at its most talkative"
    for text in shown:
        for secret in (CLIENT, OTHER_CLIENT, ADMIN, ENGINE, NODE, "wrong-secret"):
            assert f"{secret}" not in text.replace("--admin-key", "").replace("--engine-key", ""), text[:2000]


@pytest.mark.parametrize("key", [7, "a b", "a\r\nX: y", ["k"], {"k": 1}, "\xfc\u65e5"])
def test_a_nodes_key_that_can_be_none_is_400(deployment: Deployment, engine: SimulatedEngine, key: object) -> None:
    value = {"url": DEAD, "status": {"models": ["m"]}, "key": key}
    error = openai_error(deployment.post("/nodes/add", value, headers=AS_ADMIN), 400)
    assert "key" in (error["param"] or "") or "key" in error["message"]
    assert DEAD not in deployment.nodes("?all=1", headers=AS_ADMIN)
