"""Node management: LMDeploy's requests and answers, and what they lack."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.errors import EngineAnswered, EngineRefused, StoreUnavailable, UpstreamError
from app.nodes import Node, Role, State
from tests.http.fakes import FakeLinks, Reply, World

A, B, C = "http://10.0.0.1:23333", "http://10.0.0.2:23333", "http://10.0.0.3:23333"


def node(url: str = A, **more: Any) -> Node:
    return Node(url, **{"models": ("m",), "state": State.READY, **more})


def assert_400(reply: Reply, param: str | None) -> None:
    assert (reply.status, reply.error["param"]) == (400, param)
    if param is not None:
        assert param.rpartition(".")[2] in reply.error["message"]


# --- status -----------------------------------------------------------------------------------------


async def test_status_has_lmdeploys_fields_first_and_in_its_types() -> None:
    world = World(nodes=[node(speed=8.0, role=Role.Prefill), node(B, speed=2.5, order=1)])
    world.registry.unfinished = {A: 3}
    world.registry.latency_s = {A: [0.5, 1.25]}
    body = (await world.ask("GET", "/nodes/status")).json()
    assert list(body) == [A, B]
    assert list(body[A].items())[:5] == [
        ("role", 2),
        ("models", ["m"]),
        ("unfinished", 3),
        ("latency", [0.5, 1.25]),
        ("speed", 8),
    ]
    assert isinstance(body[A]["speed"], int) and body[B]["speed"] == 2.5
    assert body[A]["state"] == "ready" and body[A]["drain_until_ms"] is None


async def test_status_hides_gone_nodes_unless_asked() -> None:
    world = World(nodes=[node(), node(B, state=State.GONE, reason="down for 90 s")])
    assert list((await world.ask("GET", "/nodes/status")).json()) == [A]
    shown = (await world.ask("GET", "/nodes/status?all=1")).json()
    assert list(shown) == [A, B] and shown[B]["reason"] == "down for 90 s"
    assert_400(await world.ask("GET", "/nodes/status?all=perhaps"), "all")


async def test_status_has_the_stages_of_split_requests_and_the_bootstrap_port() -> None:
    world = World(nodes=[node(role=Role.Prefill, bootstrap_port=9001), node(B, role=Role.Decode, order=1)])
    stages = {"prefill": {"mean_s": 0.25, "count": 4}}
    world.registry.stages = {A: stages}
    body = (await world.ask("GET", "/nodes/status")).json()
    assert (body[A]["bootstrap_port"], body[A]["stages"]) == (9001, stages)
    assert (body[B]["bootstrap_port"], body[B]["stages"]) == (None, {})


async def test_status_without_nodes_is_an_empty_object() -> None:
    assert (await World().ask("GET", "/nodes/status")).body == b"{}"


async def test_engine_key_is_never_shown() -> None:
    world = World()
    reply = await world.json("POST", "/nodes/add", {"url": A, "status": {"models": ["m"]}, "key": "engine-secret"})
    assert reply.body == b'"Added successfully"'
    assert world.registry.snapshot.engine_keys == {A: "engine-secret"}
    for path in ("/nodes/status?all=1", "/v1/models", "/ready"):
        assert b"engine-secret" not in (await world.ask("GET", path)).body


async def test_store_away_is_a_503_with_retry_after() -> None:
    world = World(nodes=[node()])
    world.registry.trouble = StoreUnavailable("Redis can't be used")
    for reply in (
        await world.ask("GET", "/nodes/status"),
        await world.json("POST", "/nodes/add", {"url": A, "status": {"models": ["m"]}}),
        await world.json("POST", "/nodes/remove", {"url": A}),
        await world.json("POST", "/nodes/remove?drain=1", {"url": A}),
    ):
        assert (reply.status, reply.error["code"]) == (503, "store_unavailable")
        assert reply.header(b"retry-after") == b"1"


# --- add --------------------------------------------------------------------------------------------


async def test_what_an_lmdeploy_api_server_posts_is_taken_as_it_is_and_without_a_call_back() -> None:
    world = World()
    body = b'{"url": "http://0.0.0.0:23333", "status": {"models": ["internlm", "lora-1"], "role": 1}}'
    headers = [(b"accept", b"application/json"), (b"content-type", b"application/json")]
    reply = await world.ask("POST", "/nodes/add", body, headers=headers)
    assert (reply.status, reply.json()) == (200, "Added successfully")
    expected = ("add", "http://0.0.0.0:23333", Role.Hybrid, ("internlm", "lora-1"), None, None, False)
    assert world.registry.calls == [expected] and world.engines.calls == []


@pytest.mark.parametrize(
    ("role", "expected"),
    [(1, Role.Hybrid), (2, Role.Prefill), (3, Role.Decode), (4, Role.Encode), ("decode", Role.Decode)]
    + [("PREFILL", Role.Prefill), ("2", Role.Prefill), (None, Role.Hybrid)],
)
async def test_role_by_number_or_name(role: Any, expected: Role) -> None:
    # Prefill is for deployments where prefill and decode are separate (tests/http/test_roles.py).
    world = World(serving_strategy="DistServe" if expected is Role.Prefill else "Hybrid")
    await world.json("POST", "/nodes/add", {"url": A, "status": {"role": role, "models": ["m"]}})
    assert world.registry.calls[0][2] == expected


async def test_url_is_normalised() -> None:
    world = World()
    await world.json("POST", "/nodes/add", {"url": "HTTP://Engine:80/base/", "status": {"models": ["m"]}})
    assert world.registry.calls[0][1] == "http://engine/base"


async def test_an_engine_is_one_node_however_its_address_is_written() -> None:
    world = World()
    for host in ("127.0.0.1", "127.1:80", "0x7f.1", "2130706433", "127.0.0.1.", "[::ffff:127.0.0.1]:80"):
        reply = await world.json("POST", "/nodes/add", {"url": f"http://{host}", "status": {"models": ["m"]}})
        assert reply.status == 200
    assert list(world.registry.snapshot.nodes) == ["http://127.0.0.1"]
    await world.json("POST", "/nodes/remove", {"url": "http://127.1"})
    assert not world.registry.snapshot.nodes


@pytest.mark.parametrize("url", ["http://a..b", "http://010.0.0.5", "http://256.0.0.1", "http://[fe80::1%eth0]"])
async def test_an_address_that_can_not_be_reached_or_means_two_is_a_400_and_nobody_is_asked(url: str) -> None:
    world = World()
    assert_400(await world.json("POST", "/nodes/add", {"url": url}), "url")
    assert world.engines.calls == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "url"),
        ({"url": None}, "url"),
        ({"url": 7}, "url"),
        ({"url": ""}, "url"),
        ({"url": "ftp://x"}, "url"),
        ({"url": "http://u:p@x"}, "url"),
        ({"url": "http://x?y"}, "url"),
        ({"url": A, "status": 7}, "status"),
        ({"url": A, "status": []}, "status"),
        ({"url": A, "status": {"role": 0}}, "status.role"),
        ({"url": A, "status": {"role": 5}}, "status.role"),
        ({"url": A, "status": {"role": True}}, "status.role"),
        ({"url": A, "status": {"role": "cook"}}, "status.role"),
        ({"url": A, "status": {"models": "m"}}, "status.models"),
        ({"url": A, "status": {"models": [""]}}, "status.models"),
        ({"url": A, "status": {"models": [1]}}, "status.models"),
        ({"url": A, "status": {"models": ["m"], "speed": 0}}, "status.speed"),
        ({"url": A, "status": {"models": ["m"], "speed": -2}}, "status.speed"),
        ({"url": A, "status": {"models": ["m"], "speed": "7"}}, "status.speed"),
        ({"url": A, "status": {"models": ["m"], "speed": True}}, "status.speed"),
        ({"url": A, "status": {"models": ["m"], "speed": float("nan")}}, "status.speed"),
        ({"url": A, "status": {"models": ["m"], "speed": float("inf")}}, "status.speed"),
        ({"url": A, "status": {"models": ["m"], "speed": 10**400}}, "status.speed"),
        *(
            ({"url": A, "status": {"models": ["m"], "bootstrap_port": port}}, "status.bootstrap_port")
            for port in (0, -1, 65536, "8998", 8998.0, True, [], {})
        ),
        *(
            ({"url": A, "status": {"models": ["m"], "host_header": host}}, "status.host_header")
            for host in ("http://h", "h/x", "h x", "h:0", 7, ["h"])
        ),
        ({"url": A, "status": {"models": ["m"]}, "key": 7}, "key"),
        ({"url": A, "status": {"models": ["m"]}, "key": "a\r\nb"}, "key"),
        ({"url": A, "status": {"models": ["m"]}, "key": "a b"}, "key"),
    ],
)
async def test_R16_bad_field_is_a_400_that_names_it(body: Any, param: str) -> None:
    world = World()
    assert_400(await world.json("POST", "/nodes/add", body), param)
    assert not world.registry.calls and not world.engines.calls


@pytest.mark.parametrize("path", ["/nodes/add", "/nodes/remove", "/nodes/terminate"])
@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000, b"1" * 5000, b'{"url":' + b"[" * 9999])
async def test_bad_json_is_a_400(path: str, body: bytes) -> None:
    assert (await World().ask("POST", path, body)).status == 400


async def test_admin_bodies_are_bounded() -> None:
    world = World()
    for path in ("/nodes/add", "/nodes/remove", "/nodes/terminate"):
        reply = await world.ask("POST", path, [b" " * 600_000, b" " * 600_000])
        assert (reply.status, reply.error["code"]) == (413, "body_too_large")


async def test_speed_of_minus_one_counts_as_not_given() -> None:
    world = World()
    await world.json("POST", "/nodes/add", {"url": A, "status": {"models": ["m"], "speed": -1}})
    assert world.registry.calls[0][4] is None


@pytest.mark.parametrize("status", [None, {}, {"models": []}, {"role": 3}])
async def test_without_models_the_engine_is_asked(status: Any) -> None:
    world = World()
    world.engines.lists = {A: ("x", "y")}
    reply = await world.json("POST", "/nodes/add", {"url": A, "status": status, "key": "k"})
    assert reply.json() == "Added successfully"
    assert world.engines.calls == [("models", A, "k")]
    _, url, _, models, _, _, asked = world.registry.calls[0]
    assert (url, models, asked) == (A, ("x", "y"), True)


async def test_engine_that_can_not_be_asked_is_a_504_with_lmdeploys_code() -> None:
    for failure in (EngineRefused("engine refused the connection"), UpstreamError("engine answered 401")):
        world = World()
        world.engines.lists = {A: failure}
        reply = await world.json("POST", "/nodes/add", {"url": A})
        body = reply.json()
        assert (reply.status, body["error_code"]) == (504, 10402)
        assert body["text"].startswith(failure.message), "what happened first"
        assert "Failed to get response after a period of time" in body["text"]
        assert not world.registry.calls


@pytest.mark.parametrize(
    ("url", "answered", "hint"),
    [
        (A, 401, "; its API key is given as `key`"),
        (A, 403, "; its API key is given as `key`"),
        (A + "/v1", 404, "; is /v1 at the end of its address needless?"),
        (A, 404, "; is it an OpenAI-compatible engine?"),
        (A, 500, " (10402: Failed to get response after a period of time)"),
    ],
)
async def test_engine_that_refuses_to_list_its_models_is_told_with_a_hint(url: str, answered: int, hint: str) -> None:
    world = World()
    words = f"engine {url} answered {answered} to /v1/models"
    world.engines.lists = {url: EngineAnswered(words, answered=answered)}
    reply = await world.json("POST", "/nodes/add", {"url": url})
    assert (reply.status, reply.json()["error_code"]) == (504, 10402)
    assert reply.json()["error"]["message"].startswith(words + hint)


async def test_engine_is_asked_with_its_own_key_else_with_the_common_one() -> None:
    world = World(engine_key="common")
    world.engines.lists = {A: ("m",)}
    for key in (None, "own", None):
        await world.json("POST", "/nodes/add", {"url": A, "status": {}, "key": key})
    assert [key for _, _, key in world.engines.calls] == ["common", "own", "own"]


async def test_a_second_add_keeps_role_and_speed_that_it_does_not_give() -> None:
    world = World(nodes=[node(speed=8.0, role=Role.Decode)])
    await world.json("POST", "/nodes/add", {"url": A + "/", "status": {"models": ["n"]}})
    await world.json("POST", "/nodes/add", {"url": A, "status": {"models": ["n"], "role": 1, "speed": 2}})
    assert [call[2:5] for call in world.registry.calls] == [
        (Role.Decode, ("n",), 8.0),
        (Role.Hybrid, ("n",), 2.0),
    ]


async def test_a_host_header_is_registered_shown_and_kept_until_another_is_given() -> None:
    world = World()
    for more, stands in (
        ({}, None),
        ({"host_header": "E.example:80"}, "e.example:80"),
        ({}, "e.example:80"),
        ({"host_header": None}, "e.example:80"),
        ({"host_header": ""}, None),
    ):
        reply = await world.json("POST", "/nodes/add", {"url": A, "status": {"models": ["m"]} | more})
        assert reply.status == 200
        assert (await world.json("GET", "/nodes/status")).json()[A]["host_header"] == stands


async def test_the_bootstrap_port_is_registered_and_kept_until_another_is_given() -> None:
    world = World(serving_strategy="DistServe", pd_protocol="sglang")
    status: dict[str, Any] = {"role": "Prefill", "models": ["m"]}
    for given, stands in ((None, None), (1, 1), (65535, 65535), (None, 65535)):
        more = {} if given is None else {"bootstrap_port": given}
        reply = await world.json("POST", "/nodes/add", {"url": A, "status": status | more})
        assert reply.status == 200
        assert world.registry.snapshot.nodes[A].bootstrap_port == stands
    await world.json("POST", "/nodes/add", {"url": A, "status": status | {"bootstrap_port": None}})
    assert world.registry.snapshot.nodes[A].bootstrap_port == 65535
    await world.json("POST", "/nodes/add", {"url": A})
    assert world.registry.snapshot.nodes[A].bootstrap_port == 65535


async def test_a_second_add_without_status_keeps_all_and_asks_nobody() -> None:
    world = World(nodes=[node(speed=8.0)])
    await world.json("POST", "/nodes/add", {"url": A, "key": "new"})
    assert world.registry.calls == [("add", A, Role.Hybrid, ("m",), 8.0, "new", False)]
    assert not world.engines.calls


# --- remove -----------------------------------------------------------------------------------------


async def test_remove_by_body_and_by_query() -> None:
    world = World(nodes=[node(), node(B)])
    assert (await world.json("POST", "/nodes/remove", {"url": A})).body == b'"Deleted successfully"'
    assert (await world.ask("POST", f"/nodes/remove?node_url={B}")).body == b'"Deleted successfully"'
    assert not world.registry.snapshot.nodes


async def test_remove_of_an_unknown_node_is_no_error() -> None:
    for query in ("", "?drain=true"):
        reply = await World().json("POST", "/nodes/remove" + query, {"url": A})
        assert (reply.status, reply.json()) == (200, "Deleted successfully")


@pytest.mark.parametrize(
    ("query", "body", "timeout_s"),
    [
        ("?drain=true&timeout_s=5", {"url": A}, 5.0),
        ("?drain=1&timeout_s=0.5&node_url=" + A, None, 0.5),
        ("?drain=true", {"url": A}, 77.0),
        ("", {"url": A, "drain": True, "timeout_s": 9}, 9.0),
    ],
)
async def test_R32_drain(query: str, body: Any, timeout_s: float) -> None:
    world = World(nodes=[node()], grace_s=77)
    reply = await world.json("POST", "/nodes/remove" + query, body)
    assert (reply.status, reply.json()) == (200, "Draining started")
    assert world.registry.calls == [("drain", A, timeout_s)]


async def test_drain_false_removes_at_once() -> None:
    world = World(nodes=[node()])
    await world.json("POST", "/nodes/remove?drain=false", {"url": A})
    assert world.registry.calls == [("remove", A)]


@pytest.mark.parametrize(
    ("query", "body", "param"),
    [
        ("", {}, "url"),
        ("", {"url": "x"}, "url"),
        ("?node_url=x", None, "node_url"),
        ("?drain=perhaps", {"url": A}, "drain"),
        ("?drain=true&timeout_s=-1", {"url": A}, "timeout_s"),
        ("?drain=true&timeout_s=nan", {"url": A}, "timeout_s"),
        ("?drain=true&timeout_s=inf", {"url": A}, "timeout_s"),
        ("?drain=true&timeout_s=soon", {"url": A}, "timeout_s"),
        ("", {"url": A, "drain": []}, "drain"),
        ("", {"url": A, "drain": True, "timeout_s": None}, "timeout_s"),
        ("", {"url": A, "drain": True, "timeout_s": 10**400}, "timeout_s"),
    ],
)
async def test_bad_field_of_remove_is_a_400_that_names_it(query: str, body: Any, param: str) -> None:
    world = World(nodes=[node()])
    assert_400(await world.json("POST", "/nodes/remove" + query, body), param)
    assert not world.registry.calls


# --- terminate --------------------------------------------------------------------------------------


async def test_terminate_asks_the_engine_and_then_removes_it() -> None:
    world = World(nodes=[node()], engine_key="common")
    reply = await world.json("POST", "/nodes/terminate", {"url": A})
    assert (reply.status, reply.json()) == (200, "Terminated successfully")
    assert world.engines.calls == [("terminate", A, "common")]
    assert world.registry.calls == [("remove", A)]


async def test_terminate_that_is_refused_is_no_200_and_keeps_the_node() -> None:
    world = World(nodes=[node()])
    world.engines.refusals = {A: UpstreamError("engine answered 400")}
    reply = await world.json("POST", "/nodes/terminate", {"url": A})
    assert reply.status == 502
    assert reply.error["message"] == f"Failed to terminate node {A}: engine answered 400"
    assert not world.registry.calls


async def test_terminate_of_an_unknown_node_is_a_404() -> None:
    world = World()
    reply = await world.json("POST", "/nodes/terminate", {"url": A})
    assert (reply.status, reply.error["param"]) == (404, "url")
    assert f"Failed to terminate node {A}" in reply.error["message"] and not world.engines.calls


async def test_terminate_all() -> None:
    world = World(nodes=[node(), node(B), node(C, state=State.GONE)])
    reply = await world.ask("GET", "/nodes/terminate_all")
    assert (reply.status, reply.json()) == (200, "All nodes terminated successfully")
    assert {call[1] for call in world.engines.calls} == {A, B}
    assert list(world.registry.snapshot.nodes) == [C]


async def test_terminate_all_says_who_did_not_and_still_asks_the_others() -> None:
    world = World(nodes=[node(), node(B)])
    world.engines.refusals = {A: UpstreamError("engine answered 400")}
    reply = await world.ask("GET", "/nodes/terminate_all")
    assert reply.status == 502 and reply.error["message"].startswith("Failed to terminate all nodes")
    assert A in reply.error["message"] and B not in reply.error["message"]
    assert list(world.registry.snapshot.nodes) == [A]


async def test_terminate_all_of_nobody_is_a_success() -> None:
    assert (await World().ask("GET", "/nodes/terminate_all")).status == 200


async def test_head_terminates_nobody() -> None:
    world = World(nodes=[node()])
    reply = await world.ask("HEAD", "/nodes/terminate_all")
    assert (reply.status, reply.header(b"allow")) == (405, b"GET")
    assert not world.engines.calls


# --- who may ----------------------------------------------------------------------------------------

ADMIN_ROUTES = [
    ("GET", "/nodes/status"),
    ("POST", "/nodes/add"),
    ("POST", "/nodes/remove"),
    ("POST", "/nodes/terminate"),
    ("GET", "/nodes/terminate_all"),
    ("POST", "/distserve/connection_warmup"),
    ("POST", "/distserve/gc"),
    ("GET", "/distserve/links"),
]


READ_ONLY = [("GET", "/nodes/status"), ("GET", "/distserve/links")]


@pytest.mark.parametrize(("method", "path"), ADMIN_ROUTES)
async def test_R82_every_admin_route_needs_an_admin_key(
    method: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    links = FakeLinks()
    world = World(nodes=[node()], links=links, api_keys=["client"], admin_keys=["admin"], reader_keys=["reader"])
    body = json.dumps({"url": B, "status": {"models": ["m"]}}).encode()
    stranger = ("203.0.113.9", 1)

    async def status(key: str | None, *more: tuple[bytes, bytes], client: Any = stranger) -> int:
        headers = [*more] if key is None else [*more, (b"authorization", f"Bearer {key}".encode())]
        return (await world.ask(method, path, body, headers=headers, client=client)).status

    assert await status(None) == 401
    assert await status("wrong") == 401
    assert await status("client") == 403
    assert await status(None, (b"x-forwarded-for", b"127.0.0.1")) == 401
    assert await status(None, client=None) == 401
    assert await status(None, (b"sec-fetch-site", b"cross-site"), client=("127.0.0.1", 1)) == 401
    if (method, path) not in READ_ONLY:
        assert await status("reader") == 403
    assert not world.registry.calls and not world.engines.calls and not links.calls
    assert "203.0.113.9" in caplog.text and "wrong" not in caplog.text.replace("key is wrong", "")
    for allowed in (await status("admin"), await status(None, client=("127.0.0.1", 1))):
        assert allowed in (200, 404)
    if (method, path) in READ_ONLY:
        assert await status("reader") == 200


async def test_a_reader_key_asks_no_model() -> None:
    world = World(nodes=[node()], api_keys=["client"], reader_keys=["reader"])
    headers = [(b"authorization", b"Bearer reader")]
    body = json.dumps({"model": "m", "messages": []}).encode()
    assert (await world.ask("POST", "/v1/chat/completions", body, headers=headers)).status == 401
    assert (await world.ask("GET", "/v1/models", headers=headers)).status == 401


async def test_trusted_nodes_none_trusts_nobody() -> None:
    world = World(trusted_nodes="none", admin_keys=["a"])
    assert (await world.ask("GET", "/nodes/status")).status == 401


async def test_without_keys_a_stranger_is_told_what_to_configure() -> None:
    reply = await World().ask("GET", "/nodes/status", client=("203.0.113.9", 1))
    assert reply.status == 403
    assert "--trusted-nodes" in reply.error["message"] and "--admin-keys" in reply.error["message"]
