"""One key for everything, nobody trusted, and the switches that let more through to the engines."""

from __future__ import annotations

import pytest

from tests.integration.serving import SharedDeployment, chat, openai_error, values
from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine

KEY = "one-single-key"
WITH_KEY = {"authorization": f"Bearer {KEY}"}

DEPLOYMENT = SharedDeployment(
    workers=1,
    key=KEY,
    settings={
        "api_keys": KEY,
        "trusted_nodes": "none",
        "forward_client_key": True,
        "allow_transfer_params": True,
    },
)


def test_r82_a_key_given_as_one_string_is_one_key(deployment: Deployment, engine: SimulatedEngine) -> None:
    assert chat(deployment, **WITH_KEY).status == 200
    for part in (*KEY[:4], KEY[:3], KEY[-3:]):
        assert chat(deployment, authorization=f"Bearer {part}").status == 401


def test_r82_without_admin_keys_the_api_keys_count(deployment: Deployment, engine: SimulatedEngine) -> None:
    assert set(deployment.nodes(headers=WITH_KEY)) == {engine.url}
    for headers in ({}, {"authorization": "Bearer wrong"}):
        reply = deployment.get("/nodes/status", headers=headers)
        assert reply.status in (401, 403)


def test_none_trusts_not_even_loopback(deployment: Deployment) -> None:
    value = {"url": "http://127.0.0.1:9", "status": {"models": ["m"], "role": 1}}
    reply = deployment.post("/nodes/add", value)
    assert reply.status in (401, 403)
    openai_error(reply, reply.status)
    assert deployment.nodes("?all=1", headers=WITH_KEY).keys().isdisjoint({"http://127.0.0.1:9"})


def test_r85_switched_on_the_clients_key_reaches_the_engine(deployment: Deployment, engine: SimulatedEngine) -> None:
    assert chat(deployment, **WITH_KEY).status == 200
    assert values(engine.requests[0], b"authorization") == [f"Bearer {KEY}".encode()]


@pytest.mark.parametrize("field", ["migration_request", "kv_transfer_params", "bootstrap_room", "with_cache"])
def test_r65_allowed_internal_fields_pass_byte_for_byte(
    deployment: Deployment, engine: SimulatedEngine, field: str
) -> None:
    body = b'{"model":"sim",  "%b": {"a":[1, 2]}, "messages":[]}' % field.encode()
    assert chat(deployment, body, **WITH_KEY).status == 200
    assert engine.requests[0].body == body
