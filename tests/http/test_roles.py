"""What the HTTP face does by role: registrations that can't work, health in detail, profiling of all nodes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from app.errors import ConfigurationError, EngineRefused, EngineTimeout
from app.http.admin import CALLS_AT_ONCE
from app.nodes import Node, Role, State
from tests.http.fakes import World

E, P, D, H = (f"http://10.0.0.{n}:1" for n in range(1, 5))
ALL = [
    Node(E, role=Role.Encode, models=("m",), state=State.READY, order=1),
    Node(P, role=Role.Prefill, models=("m",), state=State.READY, order=2),
    Node(D, role=Role.Decode, models=("m",), state=State.DOWN, order=3),
    Node(H, role=Role.Hybrid, models=("m",), state=State.PENDING, order=4),
]
SPLIT: dict[str, Any] = {"serving_strategy": "DistServe", "pd_protocol": "nixl"}
STATIC_EPD: dict[str, Any] = {"encode_servers_urls": (E,), "decode_servers_urls": (D,)}
STATIC_SPLIT: dict[str, Any] = {"encode_servers_urls": (E,), "prefill_servers_urls": (P,), "decode_servers_urls": (D,)}


# --- registration -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "role", "taken"),
    [
        ({}, "Hybrid", True),
        ({}, "Decode", True),
        ({}, "Encode", True),
        ({}, "Prefill", True),
        (SPLIT, "Hybrid", False),
        (SPLIT, "Prefill", True),
        (SPLIT, "Decode", True),
        (SPLIT, "Encode", True),
        ({**SPLIT, "pd_protocol": "mooncake"}, "Encode", True),
        ({**SPLIT, "pd_protocol": "lmdeploy"}, "Encode", False),
        ({**SPLIT, "pd_protocol": "sglang"}, "Encode", False),
        (STATIC_EPD, "Encode", True),
        (STATIC_EPD, "Prefill", False),
        (STATIC_SPLIT, "Encode", True),
        (STATIC_SPLIT, "Hybrid", False),
    ],
)
async def test_r78_a_role_that_can_not_work_here_is_refused_with_the_reason(
    settings: dict[str, Any], role: str, taken: bool
) -> None:
    world = World(**settings)
    body = {"url": "http://new:1", "status": {"role": role, "models": ["m"]}}
    reply = await world.json("POST", "/nodes/add", body)
    if taken:
        assert (reply.status, world.registry.calls[0][2].name) == (200, role)
    else:
        assert (reply.status, reply.error["param"]) == (400, "status.role")
        assert f" {role} node can't be used w" in reply.error["message"]
        assert world.registry.calls == [] and world.engines.calls == []


async def test_r78_a_registration_without_a_role_is_a_hybrid_one_and_refused_where_those_are() -> None:
    reply = await World(**SPLIT).json("POST", "/nodes/add", {"url": "http://new:1", "status": {"models": ["m"]}})
    assert (reply.status, reply.error["param"]) == (400, "status.role")


async def test_r78_a_known_node_keeps_its_role_and_may_not_change_to_one_that_can_not_work() -> None:
    world = World(nodes=[ALL[0]], **STATIC_EPD)
    speed = await world.json("POST", "/nodes/add", {"url": E, "status": {"models": ["m"], "speed": 3}})
    assert speed.status == 200 and world.registry.calls[0][2] is Role.Encode
    reply = await world.json("POST", "/nodes/add", {"url": E, "status": {"role": "Prefill", "models": ["m"]}})
    assert reply.status == 400 and len(world.registry.calls) == 1


def test_r78_settings_that_contradict_each_other_end_the_start() -> None:
    with pytest.raises(ConfigurationError, match="--prefill-servers-urls: disable"):
        World(serving_strategy="DistServe", prefill_servers_urls=("disable",))


# --- health and readiness ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["1", "true"])
async def test_health_in_detail_counts_the_nodes_of_each_role_by_state(value: str) -> None:
    more = Node("http://10.0.0.9:1", role=Role.Encode, state=State.DOWN, order=9)
    again = Node("http://10.0.0.8:1", role=Role.Encode, state=State.READY, order=8)
    reply = await World(nodes=[*ALL, more, again]).ask("GET", f"/health?detail={value}", client=("203.0.113.9", 1))
    assert (reply.status, reply.json()) == (
        200,
        {
            "status": "healthy",
            "roles": {
                "Hybrid": {"pending": 1},
                "Prefill": {"ready": 1},
                "Decode": {"down": 1},
                "Encode": {"ready": 2, "down": 1},
            },
        },
    )


async def test_health_in_detail_names_every_role_also_where_nobody_has_it() -> None:
    reply = await World().ask("GET", "/health?detail=1")
    assert reply.json()["roles"] == {"Hybrid": {}, "Prefill": {}, "Decode": {}, "Encode": {}}


@pytest.mark.parametrize("query", ["", "?detail=0", "?detail=", "?detail=perhaps", "?other=1"])
async def test_health_is_short_unless_asked(query: str) -> None:
    assert (await World(nodes=ALL).ask("GET", "/health" + query)).json() == {"status": "healthy"}


@pytest.mark.parametrize(
    ("settings", "ready", "missing"),
    [
        ({}, "H", None),
        ({}, "D", None),
        ({}, "E", "Hybrid or Decode"),
        (STATIC_EPD, "ED", None),
        (STATIC_EPD, "EH", None),
        (STATIC_EPD, "D", "Encode"),
        (STATIC_EPD, "E", "Hybrid or Decode"),
        (STATIC_EPD, "", "Hybrid or Decode and of role Encode"),
        (STATIC_SPLIT, "EPD", None),
        (STATIC_SPLIT, "PD", "Encode"),
        (STATIC_SPLIT, "ED", "Prefill"),
        (STATIC_SPLIT, "EP", "Decode"),
        (SPLIT, "PD", None),
        (SPLIT, "EH", "Prefill and of role Decode"),
        ({**SPLIT, "pd_protocol": "lmdeploy", "dummy_prefill": True}, "D", None),
        ({**SPLIT, "pd_protocol": "lmdeploy", "dummy_prefill": True}, "P", "Decode"),
    ],
)
async def test_ready_needs_one_of_each_role_that_the_topology_needs(
    settings: dict[str, Any], ready: str, missing: str | None
) -> None:
    nodes = [Node(n.url, role=n.role, state=State.READY if n.role.name[0] in ready else State.DOWN) for n in ALL]
    reply = await World(nodes=nodes, **settings).ask("GET", "/ready")
    if missing is None:
        assert reply.status == 200
    else:
        assert reply.status == 503 and reply.header(b"retry-after")
        assert reply.error["message"] == f"No ready node of role {missing}"


# --- profiling --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
async def test_profiling_goes_to_all_nodes_of_all_roles_with_each_ones_answer(path: str) -> None:
    world = World(nodes=[*ALL, Node("http://gone:1", state=State.GONE, order=5)], engine_key="common")
    world.registry._write(dict(world.registry.snapshot.nodes), {P: "own"})
    world.engines.answers = {
        P: (200, '{"ok": true}'),
        D: (404, '{"detail":"Not Found"}'),
        H: EngineRefused("engine refused the connection"),
    }
    reply = await world.ask("POST", path)
    assert reply.status == 200
    # vLLM answers 200 with an empty body: that is a success.
    assert reply.json() == {
        E: {"role": "Encode", "status": 200, "answer": ""},
        P: {"role": "Prefill", "status": 200, "answer": '{"ok": true}'},
        D: {"role": "Decode", "status": 404, "answer": '{"detail":"Not Found"}'},
        H: {"role": "Hybrid", "status": None, "answer": "engine refused the connection"},
    }
    assert world.engines.calls == [(path, E, "common"), (path, P, "own"), (path, D, "common"), (path, H, "common")]


@pytest.mark.parametrize(
    ("sent", "passed"),
    [
        (b'{"num_steps": 3, "activities": ["CPU"]}', {"num_steps": 3, "activities": ["CPU"]}),  # SGLang's
        (b"{}", None),
        (b" ", None),
        (b"", None),
    ],
)
async def test_profiling_options_go_to_every_node(sent: bytes, passed: object) -> None:
    world = World(nodes=ALL)
    assert (await world.ask("POST", "/start_profile", sent)).status == 200
    assert [json.loads(body) if body else None for body in world.engines.bodies] == [passed] * len(ALL)


@pytest.mark.parametrize("sent", [b"[]", b"{", b"1"])
async def test_profiling_options_that_are_no_object_are_a_400_and_nobody_is_asked(sent: bytes) -> None:
    world = World(nodes=ALL)
    assert (await world.ask("POST", "/start_profile", sent)).status == 400
    assert world.engines.calls == []


async def test_profiling_that_no_node_takes_is_a_502_that_says_why() -> None:
    world = World(nodes=ALL[:2])
    world.engines.answers = {E: (404, "Not Found"), P: EngineTimeout("too slow", stage="total")}
    reply = await world.ask("POST", "/start_profile")
    assert (reply.status, reply.error["type"]) == (502, "server_error")
    assert (
        E in reply.error["message"] and "Not Found" in reply.error["message"] and "too slow" in reply.error["message"]
    )


async def test_profiling_without_nodes_is_a_503() -> None:
    reply = await World().ask("POST", "/start_profile")
    assert (reply.status, reply.error["code"], reply.header(b"retry-after")) == (503, "no_node_available", b"2")


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
async def test_profiling_is_for_admins(path: str) -> None:
    world = World(nodes=ALL, api_keys=["k"], admin_keys=["a"])
    away: Any = {"client": ("203.0.113.9", 1)}
    assert (await world.ask("POST", path, **away)).status == 401
    assert (await world.ask("POST", path, headers=[(b"authorization", b"Bearer k")], **away)).status == 403
    assert world.engines.calls == []
    assert (await world.ask("POST", path, headers=[(b"authorization", b"Bearer a")], **away)).status == 200
    assert (await world.ask("GET", path, **away)).status == 405


async def test_profiling_asks_a_bounded_number_of_nodes_at_once_and_bears_that_one_is_removed_meanwhile() -> None:
    urls = [f"http://n{n}:1" for n in range(3 * CALLS_AT_ONCE)]
    world = World(nodes=[Node(url, role=Role.Encode, order=n) for n, url in enumerate(urls)])
    running = most = 0
    profile = world.engines.profile

    async def counted(url: str, path: str, key: str | None, body: bytes) -> tuple[int, str]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await world.registry.remove(urls[-1])
        await asyncio.sleep(0)
        running -= 1
        return await profile(url, path, key, body)

    world.engines.profile = counted  # type: ignore[method-assign]
    reply = await world.ask("POST", "/start_profile")
    assert reply.status == 200 and set(reply.json()) == set(urls)
    assert most == CALLS_AT_ONCE
