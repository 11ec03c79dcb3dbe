"""`/v1/models`, `/health`, `/ready`."""

from __future__ import annotations

from typing import Any

import pytest

from app.nodes import Node, Role, State
from tests.http.fakes import World

A, B = "http://10.0.0.1:1", "http://10.0.0.2:1"


async def test_R88_models_of_all_nodes_each_once_in_the_order_of_registration() -> None:
    world = World(
        nodes=[
            Node(B, models=("b", "c"), order=2, registered_at_ms=7_000),
            Node(A, models=("a", "b"), order=1, registered_at_ms=5_900),
            Node("http://10.0.0.3:1", models=("gone",), order=3, state=State.GONE),
        ]
    )
    body = (await world.ask("GET", "/v1/models")).json()
    assert body["object"] == "list"
    assert [(card["id"], card["created"]) for card in body["data"]] == [("a", 5), ("b", 5), ("c", 7)]


async def test_entry_has_lmdeploys_fields() -> None:
    card = (await World(nodes=[Node(A, models=("m",))]).ask("GET", "/v1/models")).json()["data"][0]
    assert list(card) == ["id", "object", "created", "owned_by", "root", "parent", "permission"]
    assert (card["object"], card["owned_by"], card["root"], card["parent"]) == ("model", "lmdeploy", "m", None)
    (permission,) = card["permission"]
    assert permission["id"].startswith("modelperm-") and len(permission["id"]) == 32
    assert set(permission) == {
        "id",
        "object",
        "created",
        "allow_create_engine",
        "allow_sampling",
        "allow_logprobs",
        "allow_search_indices",
        "allow_view",
        "allow_fine_tuning",
        "organization",
        "group",
        "is_blocking",
    }


async def test_R87_two_workers_give_the_same_bytes() -> None:
    nodes = [Node(A, models=("m",), registered_at_ms=5_000)]
    one, other = World(nodes=nodes), World(nodes=nodes)
    assert (await one.ask("GET", "/v1/models")).body == (await other.ask("GET", "/v1/models")).body


async def test_R29_without_nodes_the_list_is_empty() -> None:
    assert (await World().ask("GET", "/v1/models")).json() == {"object": "list", "data": []}


@pytest.mark.parametrize("model", ["m", "org/model", "org/model:tag v1", "/data/models/x", "models"])
async def test_one_model_by_a_name_that_may_hold_slashes(model: str) -> None:
    world = World(nodes=[Node(A, models=(model,))])
    assert (await world.ask("GET", f"/v1/models/{model}")).json()["id"] == model
    reply = await world.ask("GET", f"/v1/models/{model}x")
    assert (reply.status, reply.error["code"], reply.json()["error_code"]) == (404, "model_not_found", 10400)


async def test_models_need_an_api_key_where_there_are_any() -> None:
    world = World(api_keys=["k"], nodes=[Node(A, models=("m",))])
    for path in ("/v1/models", "/v1/models/m"):
        assert (await world.ask("GET", path)).status == 401
        assert (await world.ask("GET", path, headers=[(b"authorization", b"Bearer k")])).status == 200


# --- health -----------------------------------------------------------------------------------------


async def test_R96_health_is_green_whatever_is_away() -> None:
    world = World(api_keys=["k"])
    world.store_trouble = "frozen"
    reply = await world.ask("GET", "/health", client=("203.0.113.9", 1))
    assert (reply.status, reply.json()) == (200, {"status": "healthy"})


@pytest.mark.parametrize(
    ("strategy", "nodes", "missing"),
    [
        ("Hybrid", [(Role.Hybrid, State.READY)], None),
        ("Hybrid", [], "Hybrid"),
        ("Hybrid", [(Role.Decode, State.READY)], None),
        ("Hybrid", [(Role.Hybrid, State.PENDING), (Role.Hybrid, State.DOWN), (Role.Encode, State.READY)], "Hybrid"),
        ("DistServe", [(Role.Prefill, State.READY), (Role.Decode, State.READY)], None),
        ("DistServe", [(Role.Prefill, State.READY), (Role.Decode, State.ASLEEP)], "Decode"),
        ("DistServe", [(Role.Hybrid, State.READY)], "Prefill"),
    ],
)
async def test_ready_needs_a_ready_node_of_each_role(strategy: Any, nodes: list[Any], missing: str | None) -> None:
    made = [Node(f"http://n{i}:1", role=role, state=state) for i, (role, state) in enumerate(nodes)]
    reply = await World(nodes=made, serving_strategy=strategy).ask("GET", "/ready", client=("203.0.113.9", 1))
    if missing is None:
        assert (reply.status, reply.json()) == (200, {"status": "ready"})
    else:
        assert (reply.status, reply.error["code"]) == (503, "no_node_available")
        assert missing in reply.error["message"] and reply.header(b"retry-after")


async def test_ready_says_that_redis_is_away() -> None:
    world = World(nodes=[Node(A, state=State.READY)])
    world.store_trouble = "no reply within 0.5 s"
    reply = await world.ask("GET", "/ready")
    assert reply.status == 503 and "no reply within 0.5 s" in reply.error["message"]
    world.store_trouble = "Redis can't be reached: nobody listens"
    assert (await world.ask("GET", "/ready")).error["message"] == "Redis: can't be reached: nobody listens"
    world.store_trouble = None
    assert (await world.ask("GET", "/ready")).status == 200
