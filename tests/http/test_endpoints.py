"""The calls beside chat: where they go, byte for byte, what is meant without a model, and what is not served."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from app.errors import EngineBroke
from app.http.endpoints import BESIDE_V1 as TABLE
from app.http.routes import is_proxied
from app.nodes import Node, Role, State
from tests.http.fakes import FakeAnswer, World

BESIDE_V1 = [
    "/generate",
    "/inference/v1/generate",
    "/generative_scoring",
    "/encode",
    "/classify",
    "/pooling",
    "/score",
    "/rerank",
    "/v2/rerank",
    "/v2/embed",
    "/tokenize",
    "/detokenize",
    "/get_ppl",
]
UNDER_V1 = [
    "/v1/embeddings",
    "/v1/responses",
    "/v1/responses/",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/rerank",
    "/v1/score",
    "/v1/classify",
    "/v1/tokenize",
    "/v1/detokenize",
    "/v1/encode",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/something/new",
]
UNNAMED = [*BESIDE_V1, "/v1/rerank", "/v1/score", "/v1/classify", "/v1/tokenize", "/v1/detokenize", "/v1/encode"]
MODEL = "org/Model-7B"
PLAIN = Node("http://10.0.0.1:8000", models=(MODEL,), state=State.READY)
BODY = b'{ "text":"a\\u00e9",\n "n": [1,  2.50, 1e5] }'


@pytest.mark.parametrize("path", [*BESIDE_V1, *UNDER_V1])
async def test_a_body_goes_on_byte_for_byte_with_the_query(path: str) -> None:
    body = b'{"x": [1,  2.50], "model" : "m", "input":"\\u00e9"}\n'
    world = World()
    reply = await world.ask("POST", path + "?a=b%20c", body)
    assert reply.status == 200
    (request,) = world.hybrid.requests
    spelt = path.rstrip("/") if path == "/v1/responses/" else path
    assert (request.path, request.body, request.model) == (spelt.encode() + b"?a=b%20c", body, "m")


@pytest.mark.parametrize("path", BESIDE_V1)
async def test_outside_v1_only_a_post_goes_on(path: str) -> None:
    world = World(nodes=[PLAIN])
    for method in ("GET", "PUT"):
        reply = await world.ask(method, path)
        assert (reply.status, reply.header(b"allow")) == (405, b"POST")
    assert not world.hybrid.requests


@pytest.mark.parametrize(
    "path",
    ["/invocations", "/sleep", "/flush_cache", "/update_weights", "/abort_request", "/collective_rpc", "/terminate"]
    + [
        "/generate/",
        "//generate",
        "/Generate",
        "/v2/rerank/x",
        "/v2/chat",
        "/pause",
        "/open_session",
        "/v1x/embeddings",
    ],
)
async def test_all_else_outside_v1_is_a_404(path: str) -> None:
    world = World(nodes=[PLAIN])
    assert (await world.ask("POST", path, b'{"model":"m"}')).status == 404
    assert not world.hybrid.requests


@pytest.mark.parametrize("path", UNNAMED)
@pytest.mark.parametrize("body", [BODY, b'{"model":null,"text":"a"}'])
async def test_without_a_model_the_only_one_is_meant(path: str, body: bytes) -> None:
    world = World(nodes=[PLAIN])
    assert (await world.ask("POST", path, body)).status == 200
    (request,) = world.hybrid.requests
    assert (request.model, request.body) == (MODEL, body)


@pytest.mark.parametrize("path", UNNAMED)
async def test_a_name_counts_where_one_is_given(path: str) -> None:
    world = World(nodes=[PLAIN])
    await world.ask("POST", path, b'{"model":"other"}')
    assert world.hybrid.requests[0].model == "other"
    assert (await world.ask("POST", path, b'{"model":""}')).error["param"] == "model"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"])
@pytest.mark.parametrize("body", [b"{}", b'{"model":null}'])
async def test_openais_own_calls_must_name_a_model(path: str, body: bytes) -> None:
    world = World(nodes=[PLAIN])
    reply = await world.ask("POST", path, body)
    assert (reply.status, reply.error["param"]) == (400, "model")
    assert not world.hybrid.requests


async def test_of_several_models_one_must_be_named() -> None:
    world = World(nodes=[PLAIN, Node("http://10.0.0.2:8000", models=("b", MODEL), state=State.READY)])
    reply = await world.ask("POST", "/generate", BODY)
    assert (reply.status, reply.error["param"]) == (400, "model")
    assert reply.error["message"] == "The request does not name a model, and this deployment has 2 (GET /v1/models)"


async def test_without_a_node_a_request_without_a_model_may_come_again() -> None:
    reply = await World().ask("POST", "/tokenize", BODY)
    assert (reply.status, reply.error["code"], reply.header(b"retry-after")) == (503, "no_node_available", b"2")


@pytest.mark.parametrize(("strategy", "roles"), [("Hybrid", ["Hybrid", "Decode"]), ("DistServe", ["Decode"])])
async def test_only_the_models_of_those_count_who_would_serve_it(strategy: str, roles: list[str]) -> None:
    for role in Role:
        world = World(
            nodes=[Node("http://10.0.0.9:1", role=role, models=(role.name,), state=State.READY)],
            serving_strategy=strategy,
        )
        reply = await world.ask("POST", "/generate", BODY)
        assert (reply.status == 200) is (role.name in roles), role
        assert [request.model for request in world.hybrid.requests] == ([role.name] if role.name in roles else [])


async def test_models_of_nodes_that_are_gone_do_not_count() -> None:
    gone = Node("http://10.0.0.2:8000", models=("b",), state=State.GONE)
    world = World(nodes=[PLAIN, gone])
    assert (await world.ask("POST", "/generate", BODY)).status == 200


async def test_internal_fields_are_refused_there_too() -> None:
    world = World(nodes=[PLAIN])
    assert (await world.ask("POST", "/generate", b'{"text":"a","bootstrap_room":1}')).error["param"] == "bootstrap_room"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/v1/load_lora%5Fadapter"),
    ],
)
async def test_what_belongs_to_one_engine_is_not_served(method: str, path: str) -> None:
    world = World(nodes=[PLAIN], api_keys=["k"])
    decoded = path.replace("%5F", "_")
    asked = {"raw_path": path.encode(), "headers": [(b"authorization", b"Bearer k")]}
    reply = await world.ask(method, decoded, b'{"model":"m"}', **asked)
    assert (reply.status, reply.error["code"]) == (501, "not_supported")
    assert (await world.ask(method, decoded, b'{"model":"m"}')).status == 401
    assert not world.hybrid.requests


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/v1/responses/a/cancel", False), ("/v1/responses/a", False), ("/v1/responses/compact", True)]
    + [("/v1/models/", False), ("/v1/modelsx/y", True), ("/v1/load_loras", True), ("/generate", True)],
)
def test_what_is_forwarded(path: str, expected: bool) -> None:
    assert is_proxied(path) is expected


async def test_a_stream_of_messages_that_breaks_says_so_in_their_own_words() -> None:
    """Anthropic's clients pass over an event without a name."""
    head = [(b"content-type", b"text/event-stream")]
    for path, expected in (("/v1/messages", True), ("/v1/responses", False)):
        world = World(FakeAnswer(b"event: ping\ndata: {}\n\n", EngineBroke("gone"), headers=head))
        body = (await world.ask("POST", path, b'{"model":"m"}')).body
        last = body.removeprefix(b"event: ping\ndata: {}\n\n")
        assert last.startswith(b"event: error\ndata: ") is expected and last.endswith(b"}\n\n")
        data = json.loads(last.rpartition(b"data: ")[2])
        if expected:
            assert data == {"type": "error", "error": {"type": "api_error", "message": "gone"}}
        else:
            assert data["error"]["code"] == "engine_broke_off"


def test_the_table_of_the_docs_is_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "endpoints.md").read_text()
    found = re.search(r"<!-- endpoints: begin -->\n(.*)<!-- endpoints: end -->", page, re.DOTALL)
    assert found is not None
    rows = [f"| `{path}` | {engines} |" for path, engines in TABLE.items()]
    assert found[1].splitlines() == ["| path | engines that have it |", "|---|---|", *rows]
    assert list(TABLE) == BESIDE_V1
