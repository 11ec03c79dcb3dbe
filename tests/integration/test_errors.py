"""Failures are told as they are: the right status, OpenAI's error object, the engine's own answer unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration.serving import (
    CONNECT_S,
    FIRST_BYTE_S,
    IDLE_S,
    LIMIT_BYTES,
    TIGHT,
    TOTAL_S,
    Factory,
    SharedDeployment,
    broken_stream,
    chat,
    chat_body,
    connected,
    events,
    in_chunks,
    openai_error,
    post_json,
    raw,
    raw_post,
    read_reply,
    remove_nodes,
)
from tests.support import load
from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine
from tests.support.http import request
from tests.support.wait import eventually

DEPLOYMENT = SharedDeployment(workers=2, settings=TIGHT)


# --- the client's mistakes


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{", id="cut off"),
        pytest.param(b'{"model":"sim"} x', id="rubbish behind"),
        pytest.param(b'{"model":"sim",}', id="comma"),
        pytest.param(b"\xff\xfe{}", id="no UTF-8"),
        pytest.param(b'{"model":"s\xffm"}', id="no UTF-8 inside"),
        pytest.param(b"model=sim", id="form"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b'{"model":"sim","a":' + b"[" * 450_000 + b"]" * 450_000 + b"}", id="deep and well-formed"),
        pytest.param(b'["model","sim"]', id="list"),
        pytest.param(b'"sim"', id="string"),
        pytest.param(b"null", id="null"),
        pytest.param(b"{}", id="no model"),
        pytest.param(b'{"x":{"model":"sim"}}', id="model elsewhere"),
        pytest.param(b'{"model":null}', id="model null"),
        pytest.param(b'{"model":""}', id="model empty"),
        pytest.param(b'{"model":7}', id="model a number"),
        pytest.param(b'{"model":["sim"]}', id="model a list"),
    ],
)
def test_r89_bad_json_or_no_model_is_400(
    deployment: Deployment, engine: SimulatedEngine, body: bytes, path: str
) -> None:
    reply = post_json(deployment.url, path, body)
    openai_error(reply, 400)
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.headers["x-request-id"]
    assert not engine.requests


def test_r89_a_body_without_content_type_is_json_all_the_same(deployment: Deployment, engine: SimulatedEngine) -> None:
    assert request("POST", deployment.url + "/v1/chat/completions", body=chat_body()).status == 200
    openai_error(request("POST", deployment.url + "/v1/chat/completions", body=b"{"), 400)


@pytest.mark.parametrize("stream", [False, True])
def test_r89_a_model_never_seen_is_404(deployment: Deployment, engine: SimulatedEngine, stream: bool) -> None:
    reply = chat(deployment, chat_body("never-seen", stream=stream))
    error = openai_error(reply, 404, 10400)
    assert "never-seen" in error["message"]
    assert error["code"] == "model_not_found"
    assert "retry-after" not in reply.headers
    assert not engine.requests


@pytest.mark.parametrize("name", ["mod\u00e8le-\u65e5\u672c", "a'b\"c\\d", "x" * 5000, "sim ", "SIM", "\n"])
def test_a_model_never_seen_is_404_whatever_its_name(
    deployment: Deployment, engine: SimulatedEngine, name: str
) -> None:
    openai_error(chat(deployment, chat_body(name)), 404, 10400)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", {404}),
        ("POST", "/nope", {404}),
        ("POST", "/v1", {404, 400}),
        ("GET", "/v1/nope", {404, 405}),
        ("GET", "/v1/chat/completions", {405}),
        ("DELETE", "/v1/models", {405}),
        ("POST", "/nodes/status", {405}),
        ("GET", "/nodes/add", {405}),
        ("POST", "/nodes/terminate_all", {405}),
        ("PUT", "/health", {405}),
    ],
)
def test_r89_unknown_paths_and_methods_have_openais_shape_too(
    deployment: Deployment, engine: SimulatedEngine, method: str, path: str, status: set[int]
) -> None:
    reply = request(method, deployment.url + path, body=b"{}" if method in ("POST", "PUT") else None)
    assert reply.status in status
    openai_error(reply, reply.status)
    if reply.status == 405:
        assert reply.headers["allow"]


# --- too large


def _sized(size: int) -> bytes:
    return chat_body(prompt="p" * (size - len(chat_body(prompt=""))))


def test_r58_a_body_of_exactly_the_limit_passes(deployment: Deployment, engine: SimulatedEngine) -> None:
    body = _sized(LIMIT_BYTES)
    assert len(body) == LIMIT_BYTES
    assert chat(deployment, body).status == 200
    lines = ["Host: h", "Transfer-Encoding: chunked"]
    assert raw(deployment.url, raw_post(lines, in_chunks(body, 60_000))).status == 200
    assert [record.body for record in engine.requests] == [body, body]


@pytest.mark.parametrize("size", [LIMIT_BYTES + 1, 12 * LIMIT_BYTES])
@pytest.mark.parametrize("chunked", [False, True])
def test_r58_a_larger_body_is_413_and_nothing_is_forwarded(
    deployment: Deployment, engine: SimulatedEngine, size: int, chunked: bool
) -> None:
    body = _sized(size)
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
    # Many clients write the whole body before they read: they too must get to see the answer.
    reply = raw(deployment.url, raw_post(["Host: h", framing], in_chunks(body, 60_000) if chunked else body))
    error = openai_error(reply, 413)
    assert "1000000" in error["message"].replace(",", "").replace("_", "") or "1 MB" in error["message"], error
    assert not engine.requests


def test_r58_a_client_that_asks_first_is_told_before_it_sends(deployment: Deployment, engine: SimulatedEngine) -> None:
    lines = ["Host: h", f"Content-Length: {LIMIT_BYTES + 1}", "Expect: 100-continue"]
    with connected(deployment.url) as s:
        s.sendall(raw_post(lines))
        openai_error(read_reply(s), 413)
    assert not engine.requests


# --- no node


def test_r89_without_any_node_it_is_503_with_retry_after(deployment: Deployment) -> None:
    remove_nodes(deployment)
    # The other worker knows of the removal within 1 s; until then it may still try the node.
    eventually(lambda: all(chat(deployment).status == 503 for _ in range(10)), within_s=2)
    reply = chat(deployment)
    error = openai_error(reply, 503, 10401)
    assert error["message"]
    assert 1 <= int(reply.headers["retry-after"]) <= 60


def test_r89_a_known_model_none_of_whose_nodes_is_alive_is_503_with_retry_after(
    deployment: Deployment, engine: SimulatedEngine, engine_factory: Factory
) -> None:
    other = engine_factory(models=("mortal",))
    deployment.add(other)
    other.set(refuse=True)
    deployment.wait_for_state("down", other, within_s=8)

    def refused() -> Any:
        replies = [chat(deployment, chat_body("mortal", stream=stream)) for stream in (False, True) * 4]
        assert {reply.status for reply in replies} == {503}
        return replies

    for reply in eventually(refused):
        openai_error(reply, 503, 10401)
        assert 1 <= int(reply.headers["retry-after"]) <= 60
    assert "mortal" in {card["id"] for card in deployment.get("/v1/models").json()["data"]}


# --- the engine's failures


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 429, 500, 503])
def test_r47_the_engines_own_error_passes_unchanged(
    deployment: Deployment, engine: SimulatedEngine, status: int, stream: bool
) -> None:
    own = b'{ "object":"error",  "message":"\\u00fcber 4096 tokens", "code":%d}\n' % status
    engine.set(status=status, body=own, error_headers=(("Retry-After", "17"), ("X-Own", "yes")))
    reply = chat(deployment, chat_body(stream=stream))
    assert (reply.status, reply.body) == (status, own)
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-own"] == "yes"
    assert len(engine.requests) == 1


def test_r90_the_engines_retry_after_passes(deployment: Deployment, engine: SimulatedEngine) -> None:
    for status in (429, 503):
        engine.set(status=status, error_headers=(("Retry-After", "17"),))
        body = chat_body()
        reply = raw(deployment.url, raw_post(["Host: h", f"Content-Length: {len(body)}"], body))
        assert (reply.status, reply.values("retry-after")) == (status, ["17"])


@pytest.mark.parametrize("stream", [False, True])
def test_r47_a_refusing_engine_is_never_200(
    deployment: Deployment, engine: SimulatedEngine, engine_factory: Factory, stream: bool
) -> None:
    other = engine_factory(models=("refusing",))
    deployment.add(other)
    eventually(lambda: all(chat(deployment, chat_body("refusing")).status == 200 for _ in range(5)))
    other.set(refuse=True)
    reply = chat(deployment, chat_body("refusing", stream=stream))
    # 502 for who meets the refusal, 503 once the deployment knows.
    assert reply.status in (502, 503)
    openai_error(reply, reply.status, 10402 if reply.status == 502 else 10401)
    assert reply.headers["content-type"].startswith("application/json")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fault",
    [{"cut_after": -1}, {"eof_after": -1}, {"reset_on_accept": True}],
    ids=["reset before the head", "closed before the head", "reset on accept"],
)
def test_r89_an_engine_that_breaks_before_its_answer_is_502(
    deployment: Deployment, engine_factory: Factory, fault: dict[str, Any], stream: bool
) -> None:
    other = engine_factory(models=("breaking",))
    deployment.add(other)
    eventually(lambda: all(chat(deployment, chat_body("breaking")).status == 200 for _ in range(5)))
    other.crash()  # no connection that is kept open
    other.set(**fault)
    other.start()
    reply = chat(deployment, chat_body("breaking", stream=stream))
    openai_error(reply, 502, 10402)
    assert reply.headers["content-type"].startswith("application/json")


def test_r18_mistakes_of_clients_are_no_failures_of_the_node(deployment: Deployment, engine: SimulatedEngine) -> None:
    own = b'{"error":{"message":"too long"}}'

    async def ask(n: int, prompt: str) -> list[load.Answer]:
        return await load.many(deployment.url, n, concurrency=20, prompt=prompt)

    for status, n in ((400, 50), (401, 10), (404, 10), (413, 10), (422, 10), (429, 10)):
        engine.set(status=status, body=own, only_for="long")
        assert [(a.status, a.body) for a in asyncio.run(ask(n, "long"))] == [(status, own)] * n
    assert all(answer.ok for answer in asyncio.run(ask(50, "short")))
    assert deployment.nodes()[engine.url]["state"] == "ready"


def test_r19_one_clients_500s_take_no_node_from_others(deployment: Deployment, engine: SimulatedEngine) -> None:
    engine.set(status=500, only_for="poison")

    async def ask() -> list[load.Answer]:
        each: Callable[[int], dict[str, Any]] = lambda i: {"prompt": "poison" if i < 100 else "good"}  # noqa: E731
        return await load.many(deployment.url, 200, concurrency=10, each=each)

    answers = asyncio.run(ask())
    assert {answer.status for answer in answers[:100]} == {500}
    assert all(answer.ok for answer in answers[100:])
    assert deployment.nodes()[engine.url]["state"] == "ready"


# --- too slow: each stage has its own limit


@contextlib.contextmanager
def _full_listener() -> Iterator[int]:
    """A port on which a connect neither succeeds nor is refused: its backlog is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(16):
            client = stack.enter_context(socket.socket())
            client.settimeout(0.1)
            try:
                client.connect(("127.0.0.1", port))
            except TimeoutError:
                yield port
                return
        raise AssertionError("the backlog never became full")


def _timed(ask: Callable[[], Any]) -> tuple[Any, float]:
    begun_s = time.monotonic()
    return ask(), time.monotonic() - begun_s


@pytest.mark.parametrize("stream", [False, True])
def test_r50_connect_has_its_own_limit(deployment: Deployment, engine: SimulatedEngine, stream: bool) -> None:
    with _full_listener() as port:
        added = {"url": f"http://127.0.0.1:{port}", "status": {"models": ["full"]}}
        assert deployment.post("/nodes/add", added).status == 200
        eventually(
            lambda: all("full" in deployment.get("/v1/models").text for _ in range(10)),
        )
        reply, took_s = _timed(lambda: chat(deployment, chat_body("full", stream=stream)))
        # 503 from the moment a probe has found that nobody answers.
        if reply.status != 503:
            openai_error(reply, 504, 10402)
            assert CONNECT_S - 0.05 < took_s < FIRST_BYTE_S


@pytest.mark.parametrize("stream", [False, True])
def test_r50_the_first_byte_has_its_own_limit(deployment: Deployment, engine: SimulatedEngine, stream: bool) -> None:
    engine.set(ttft_s=30.0)
    reply, took_s = _timed(lambda: chat(deployment, chat_body(stream=stream)))
    openai_error(reply, 504, 10402)
    assert FIRST_BYTE_S - 0.05 < took_s < FIRST_BYTE_S + 1
    assert reply.headers["content-type"].startswith("application/json")
    eventually(lambda: len(engine.aborts) == 1, within_s=1)


def test_r50_an_answer_just_within_the_limit_is_served(deployment: Deployment, engine: SimulatedEngine) -> None:
    engine.set(ttft_s=FIRST_BYTE_S * 0.7)
    assert chat(deployment).status == 200


def test_r50_silence_between_chunks_has_its_own_limit(deployment: Deployment, engine: SimulatedEngine) -> None:
    engine.set(stall_after=3, gap_s=0.01)
    reply, took_s = _timed(lambda: chat(deployment, chat_body(stream=True)))
    assert IDLE_S - 0.05 < took_s < IDLE_S + 1
    broken_stream(reply.body, chunks=3)
    eventually(lambda: len(engine.aborts) == 1, within_s=1)


def test_r50_silence_within_an_answer_that_is_no_stream_ends_it(
    deployment: Deployment, engine: SimulatedEngine
) -> None:
    engine.set(stall_after=1)
    body = chat_body()
    reply, took_s = _timed(lambda: raw(deployment.url, raw_post(["Host: h", f"Content-Length: {len(body)}"], body)))
    assert took_s < IDLE_S + 1
    assert reply.status >= 500 or not reply.complete
    eventually(lambda: len(engine.aborts) == 1, within_s=1)


def test_r50_a_long_stream_is_cut_by_none_of_these(deployment: Deployment, engine: SimulatedEngine) -> None:
    engine.set(chunks=8, gap_s=0.22)
    reply, took_s = _timed(lambda: chat(deployment, chat_body(stream=True)))
    assert took_s > CONNECT_S + FIRST_BYTE_S + IDLE_S
    assert events(reply.body)[-1] == "[DONE]"


def test_r50_the_whole_answer_has_its_own_limit(deployment: Deployment, engine: SimulatedEngine) -> None:
    engine.set(chunks=100, gap_s=0.1)
    reply, took_s = _timed(lambda: chat(deployment, chat_body(stream=True)))
    assert TOTAL_S - 0.1 < took_s < TOTAL_S + 1
    *chunks, last = events(reply.body)
    assert 20 <= len(chunks) <= 26
    assert "error" in json.loads(last)
    eventually(lambda: len(engine.aborts) == 1, within_s=1)
