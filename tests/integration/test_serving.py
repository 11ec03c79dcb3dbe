"""Requests reach the engine as the client sent them, and answers the client as the engine sent them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.serving import (
    Factory,
    ScriptedEngine,
    SharedDeployment,
    ask_scripted,
    chat,
    chat_body,
    connected,
    in_chunks,
    on_every_worker,
    openai_error,
    post_json,
    raw,
    raw_post,
    read_reply,
    remove_nodes,
    values,
)
from tests.support import load
from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine
from tests.support.http import request
from tests.support.wait import eventually

DEPLOYMENT = SharedDeployment(workers=2)

MB = 1_000_000


# --- connections


def test_r57_connections_are_shared_evenly_over_the_workers(deployment: Deployment) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(socket.create_connection(("127.0.0.1", deployment.port)))
        eventually(lambda: sum(connections(pid, deployment.port) for pid in deployment.worker_pids()) >= 60)
        counts = [connections(pid, deployment.port) for pid in deployment.worker_pids()]
    assert max(counts) - min(counts) <= 4, counts


def connections(pid: int, port: int) -> int:
    """How many that came in at `port` the process holds."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inodes = {f"socket:[{line[9]}]" for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "01"}
    found = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found += os.readlink(fd) in inodes
    return found


# --- the body


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b' {\n\t"model" :  "sim" ,\r\n "messages":[ ] }  \n', id="odd whitespace"),
        pytest.param(b'{"n":1,"model":"sim","n":2,"messages":[],"n":3}', id="duplicate keys"),
        pytest.param(b'{"model":"sim","user":"\\u00e9\\ud83d\\ude00\\/ \xc3\xa9","messages":[]}', id="unicode escapes"),
        pytest.param(b'{"\\u006dodel":"s\\u0069m","messages":[]}', id="escaped model"),
        pytest.param(b'{"model":"sim","seed":123456789012345678901234567890,"top_p":1E-0,"messages":[]}', id="numbers"),
        pytest.param(b'{"messages":[{"model":"other","stream":true}],"x":{"model":"y"},"model":"sim"}', id="nested"),
        pytest.param(b'{"model":"sim","user":"\\ud800","messages":[]}', id="lone surrogate"),
        pytest.param(b'{"model":"sim","stream":null,"messages":[],"unknown_to_us":{"a":[1,{}]}}', id="unknown fields"),
    ],
)
def test_the_body_reaches_the_engine_byte_for_byte(
    deployment: Deployment, engine: SimulatedEngine, body: bytes
) -> None:
    chat(deployment, body)
    assert [record.body for record in engine.requests] == [body]


def test_a_chunked_body_reaches_the_engine_byte_for_byte(deployment: Deployment, engine: SimulatedEngine) -> None:
    body = chat_body(prompt="é" * 50_000)
    lines = ["Host: x", "Content-Type: application/json", "Transfer-Encoding: chunked"]
    assert raw(deployment.url, raw_post(lines, in_chunks(body, 777))).status == 200
    (record,) = engine.requests
    assert record.body == body
    assert values(record, b"content-length") == [b"%d" % len(body)] and not values(record, b"transfer-encoding")


def test_a_client_that_expects_100_continue_is_served(deployment: Deployment, engine: SimulatedEngine) -> None:
    body = chat_body()
    lines = ["Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}", "Expect: 100-continue"]
    with connected(deployment.url) as s:
        s.sendall(raw_post(lines))
        assert s.recv(1000).startswith(b"HTTP/1.1 100")
        s.sendall(body)
        assert read_reply(s).status == 200
    assert engine.requests[0].body == body and not values(engine.requests[0], b"expect")


# --- the head


def test_the_engine_sees_the_clients_headers_but_hop_by_hop_ones_and_host(
    deployment: Deployment, engine: SimulatedEngine
) -> None:
    body = chat_body()
    lines = [
        "Host: chat.example:8000",
        "Connection: keep-alive, X-Private , x-also-private",
        "X-Private: 1",
        "x-also-private: 2",
        "Keep-Alive: timeout=5",
        "TE: trailers",
        "Proxy-Connection: keep-alive",
        "Proxy-Authorization: Basic c2VjcmV0",
        "Upgrade: h2c",
        "X-Custom: one, two",
        "x-custom: three",
        "X-Latin: caf\xe9",
        "X-Empty:",
        "Accept-Encoding: gzip, br",
        "User-Agent: raw/1",
        "Cookie: a=1; b=2",
        "OpenAI-Organization: org-1",
        "Content-Type: application/json; charset=utf-8",
        f"Content-Length: {len(body)}",
        "X-Request-Id: r-1",
    ]
    assert raw(deployment.url, raw_post(lines, body)).status == 200
    (record,) = engine.requests
    assert sorted((name.lower(), value) for name, value in record.headers) == sorted(
        [
            (b"host", f"127.0.0.1:{engine.port}".encode()),
            (b"x-custom", b"one, two"),
            (b"x-custom", b"three"),
            (b"x-latin", b"caf\xe9"),
            (b"x-empty", b""),
            (b"accept-encoding", b"gzip, br"),
            (b"user-agent", b"raw/1"),
            (b"cookie", b"a=1; b=2"),
            (b"openai-organization", b"org-1"),
            (b"content-type", b"application/json; charset=utf-8"),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", b"r-1"),
            (b"x-forwarded-for", b"127.0.0.1"),
            (b"x-forwarded-host", b"chat.example:8000"),
            (b"x-forwarded-proto", b"http"),
        ]
    )
    assert values(record, b"x-custom") == [b"one, two", b"three"]


def test_a_client_of_few_words_gets_none_added_but_forwarding_and_request_id(
    deployment: Deployment, engine: SimulatedEngine
) -> None:
    body = chat_body()
    raw(deployment.url, raw_post(["Host: h", f"Content-Length: {len(body)}"], body))
    names = sorted(name.lower() for name, _ in engine.requests[0].headers)
    forwarded = [b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto"]
    assert names == [b"content-length", b"host", *forwarded, b"x-request-id"]


def test_r85_without_an_engine_key_the_engine_sees_no_key_at_all(
    deployment: Deployment, engine: SimulatedEngine
) -> None:
    chat(deployment, authorization="Bearer sk-clients-own")
    chat(deployment, authorization="Basic c2VjcmV0")
    assert [values(record, b"authorization") for record in engine.requests] == [[], []]
    assert all(b"sk-clients-own" not in value for record in engine.requests for _, value in record.headers)


def test_x_forwarded_for_is_appended_to(deployment: Deployment, engine: SimulatedEngine) -> None:
    body = chat_body()
    lines = ["Host: h", f"Content-Length: {len(body)}", "X-Forwarded-For: 203.0.113.9", "x-forwarded-for: 10.0.0.1"]
    raw(deployment.url, raw_post(lines, body))
    seen = b",".join(values(engine.requests[0], b"x-forwarded-for")).split(b",")
    assert [address.strip() for address in seen] == [b"203.0.113.9", b"10.0.0.1", b"127.0.0.1"]


def test_a_request_id_is_kept_and_returned(deployment: Deployment, engine: SimulatedEngine) -> None:
    reply = chat(deployment, x_request_id="mine-0815")
    assert reply.headers["x-request-id"] == "mine-0815" and engine.requests[0].id == "mine-0815"


def test_a_request_id_is_made_where_there_is_none(deployment: Deployment, engine: SimulatedEngine) -> None:
    returned = [chat(deployment).headers["x-request-id"] for _ in range(20)]
    assert [record.id for record in engine.requests] == returned
    assert len(set(returned)) == 20 and all(returned)


def test_the_engines_own_request_id_does_not_make_two(deployment: Deployment, engine: SimulatedEngine) -> None:
    engine.set(headers=(("X-Request-Id", "engines"),))
    body = chat_body()
    reply = raw(deployment.url, raw_post(["Host: h", "X-Request-Id: mine", f"Content-Length: {len(body)}"], body))
    assert reply.values("x-request-id") == ["mine"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_engines_headers_reach_the_client_but_hop_by_hop_ones(
    deployment: Deployment, engine: SimulatedEngine, stream: bool
) -> None:
    engine.set(
        headers=(
            ("X-Engine", "caf\xe9"),
            ("Set-Cookie", "a=1"),
            ("Set-Cookie", "b=2"),
            ("Connection", "X-Hop"),
            ("X-Hop", "1"),
            ("Keep-Alive", "timeout=99"),
        )
    )
    body = chat_body(stream=stream)
    reply = raw(deployment.url, raw_post(["Host: h", f"Content-Length: {len(body)}"], body))
    assert reply.status == 200 and reply.complete
    assert reply.values("x-engine") == ["caf\xe9"] and reply.values("set-cookie") == ["a=1", "b=2"]
    assert not reply.values("x-hop") and reply.values("keep-alive") != ["timeout=99"]
    assert len(reply.values("date")) <= 1 and len(reply.values("server")) <= 1


def test_a_header_line_can_not_be_smuggled_into_the_engines_request(
    deployment: Deployment, engine: SimulatedEngine
) -> None:
    body = chat_body()
    for value in ("a\nX-Injected: 1", "a\rX-Injected: 1", "a\0b"):
        try:
            reply = raw(deployment.url, raw_post(["Host: h", f"X-A: {value}", f"Content-Length: {len(body)}"], body))
        except OSError:
            continue
        # A bare LF ends a line for lenient parsers: then X-Injected is a header of the client's own.
        assert reply.status in (200, 400)
    for record in engine.requests:
        assert all(b"\n" not in v and b"\r" not in v and b"\0" not in v for _, v in record.headers)


# --- the connection


def test_one_connection_serves_answers_streams_and_errors_in_turn(
    deployment: Deployment, engine: SimulatedEngine
) -> None:
    bodies = [chat_body(stream=True), chat_body(), chat_body("never-seen"), b"{", chat_body(stream=True), chat_body()]
    with connected(deployment.url) as s:
        replies = []
        for body in bodies:
            s.sendall(raw_post(["Host: h", f"Content-Length: {len(body)}"], body))
            replies.append(read_reply(s))
    assert [reply.status for reply in replies] == [200, 200, 404, 400, 200, 200]
    assert all(reply.complete for reply in replies)
    assert replies[0].body.endswith(b"data: [DONE]\n\n")
    assert replies[4].body.endswith(b"data: [DONE]\n\n")


def test_pipelined_requests_are_answered_in_order(deployment: Deployment, engine: SimulatedEngine) -> None:
    engine.set(gap_s=0.02, chunks=5)
    asked = [("a", True), ("b", False), ("c", True)]
    sent = b""
    for name, stream in asked:
        body = chat_body(stream=stream, max_tokens=5 if stream else 1)
        sent += raw_post(["Host: h", f"X-Request-Id: {name}", f"Content-Length: {len(body)}"], body)
    with connected(deployment.url) as s:
        s.sendall(sent)
        received = b""
        while received.count(b"[DONE]") < 2:
            data = s.recv(65536)
            assert data, received
            received += data
    heads = [part.partition(b"\r\n\r\n")[0].lower() for part in received.split(b"HTTP/1.1 200 OK\r\n")[1:]]
    assert [head.count(b"x-request-id: %b" % name.encode()) for head, (name, _) in zip(heads, asked, strict=True)] == [
        1,
        1,
        1,
    ]
    assert [record.id for record in engine.requests] == ["a", "b", "c"]
    assert not engine.aborts


def test_a_body_framed_twice_is_no_way_to_smuggle_a_request(deployment: Deployment, engine: SimulatedEngine) -> None:
    hidden = raw_post(["Host: h", "X-Request-Id: hidden", "Content-Length: 15"], b'{"model":"sim"}')
    body = in_chunks(chat_body(), 1000)
    lines = ["Host: h", f"Content-Length: {len(body) - 7}", "Transfer-Encoding: chunked", "Connection: close"]
    with connected(deployment.url) as s:
        s.sendall(raw_post(lines, body + hidden))
        reply = read_reply(s)
    assert reply.status in (200, 400)
    assert "hidden" not in [record.id for record in engine.requests]
    for record in engine.requests:
        assert record.body == chat_body()
        assert not values(record, b"transfer-encoding")


@pytest.mark.parametrize("stream", [False, True])
def test_an_http_1_0_client_gets_no_chunked_framing(
    deployment: Deployment, engine: SimulatedEngine, stream: bool
) -> None:
    """RFC 9112, 6.1: no Transfer-Encoding unless the request indicates HTTP/1.1. nginx asks in 1.0 by default."""
    body = chat_body(stream=stream)
    request_1_0 = raw_post(["Host: h", f"Content-Length: {len(body)}"], body).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    with connected(deployment.url) as s:
        s.sendall(request_1_0)
        received = b""
        while data := s.recv(65536):
            received += data
    head, _, rest = received.partition(b"\r\n\r\n")
    assert b" 200 " in head.partition(b"\r\n")[0]
    assert b"transfer-encoding" not in head.lower()
    assert rest.startswith(b"data: " if stream else b"{")
    assert rest.endswith(b"data: [DONE]\n\n" if stream else b"}")


# --- the path


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/rerank", "/v1/chat/completions/render?a=1&b=%2F+c"],
)
def test_any_v1_post_that_names_a_known_model_is_forwarded(
    deployment: Deployment, engine: SimulatedEngine, path: str
) -> None:
    body = b'{"model":"sim", "input":["a","b"],"prompt":"a"}'
    sent = {"x-request-id": "same"}
    reply = post_json(deployment.url, path, body, sent)
    direct = post_json(engine.url, path, body, sent)
    through, straight = engine.requests
    assert (through.path, through.body) == (path, body) == (straight.path, straight.body)
    assert (reply.status, reply.body) == (direct.status, direct.body)
    assert reply.headers["content-type"] == direct.headers["content-type"]


def test_a_path_prefix_of_the_node_is_put_in_front(deployment: Deployment, engine_factory: Factory) -> None:
    prefixed = engine_factory(prefix="/engine/a", models=("prefixed",))
    deployment.add(prefixed)
    assert chat(deployment, chat_body("prefixed")).status == 200
    assert prefixed.requests[0].path == "/engine/a/v1/chat/completions"


def test_r91_a_multipart_form_with_the_model_anywhere_is_forwarded_unparsed(
    deployment: Deployment, engine: SimulatedEngine
) -> None:
    sound = bytes(range(256)) * 4000
    part = b'--XX\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    file = part % (b"file", b'; filename="a.wav"\r\nContent-Type: audio/wav', sound)
    model = part % (b"model", b"", b"sim")
    decoy = part % (b"prompt", b"", b'name="model"\r\n\r\nwrong')
    sent = {"content-type": "multipart/form-data; boundary=XX"}
    for body in (model + file, file + decoy + model, decoy + model + file):
        body += b"--XX--\r\n"
        reply = request("POST", deployment.url + "/v1/audio/transcriptions", body=body, headers=sent)
        assert reply.status == 200, reply
        record = engine.requests[-1]
        assert record.body == body and values(record, b"content-type") == [b"multipart/form-data; boundary=XX"]
    other = request(
        "POST",
        deployment.url + "/v1/audio/transcriptions",
        body=part % (b"model", b"", b"zz") + b"--XX--\r\n",
        headers=sent,
    )
    openai_error(other, 404, 10400)
    assert len(engine.requests) == 3


# --- the answer


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_answer_reaches_the_client_byte_for_byte(deployment: Deployment, engine: SimulatedEngine, path: str) -> None:
    engine.set(text="日本語 😀 ")
    sent = {"x-request-id": "same"}
    reply = post_json(deployment.url, path, chat_body(prompt="x"), sent)
    direct = post_json(engine.url, path, chat_body(prompt="x"), sent)
    assert (reply.status, reply.body) == (200, direct.body)
    assert reply.headers["content-type"] == direct.headers["content-type"] == "application/json"


def test_r45_a_body_of_50_mb_is_delivered_whole(deployment: Deployment, engine: SimulatedEngine) -> None:
    engine.set(body_mb=50)
    sent = {"x-request-id": "same"}
    reply = chat(deployment, x_request_id="same")
    assert reply.status == 200 and len(reply.body) > 50 * MB
    assert reply.body == post_json(engine.url, "/v1/chat/completions", chat_body(), sent).body


def test_r58_a_body_of_40_mb_passes_by_default(deployment: Deployment, engine: SimulatedEngine) -> None:
    body = chat_body(prompt="i" * (40 * MB))
    assert chat(deployment, body).status == 200
    (record,) = engine.requests
    assert len(record.body) == len(body) and record.body == body


@pytest.mark.parametrize(
    ("answer", "status", "body"),
    [
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\n{close-delimited}", 200, b"{close-delimited}", id="close-delimited"),
        pytest.param(b"HTTP/1.0 200 OK\r\n\r\nold", 200, b"old", id="HTTP/1.0"),
        pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", id="204"),
        pytest.param(
            b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
            200,
            b"ok",
            id="1xx before",
        ),
        pytest.param(b"HTTP/1.1 418 Teapot\r\nContent-Length: 3\r\n\r\npot", 418, b"pot", id="odd status"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=1\r\nabc\r\n2\r\nde\r\n0\r\nX-T: 1\r\n\r\n",
            200,
            b"abcde",
            id="chunk extensions and trailers",
        ),
    ],
)
def test_any_framing_of_the_engine_is_understood(
    deployment: Deployment, answer: bytes, status: int, body: bytes
) -> None:
    with ScriptedEngine(answer) as scripted:
        reply = ask_scripted(deployment, scripted, path="/v1/tokenize")
        assert (reply.status, reply.body, reply.complete) == (status, body, True)
        assert scripted.posts == 1


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"no HTTP at all\r\n\r\n", id="no HTTP"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Le", id="half a head"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 300_000 + b"\r\n\r\n", id="endless head"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_an_engine_that_breaks_before_its_head_is_whole_is_502(deployment: Deployment, answer: bytes) -> None:
    with ScriptedEngine(answer) as scripted:
        openai_error(ask_scripted(deployment, scripted), 502, 10402)
        assert scripted.posts == 1, "a request on a fresh connection is not sent again"


# --- models


def test_v1_models_is_an_openai_list(deployment: Deployment, engine: SimulatedEngine) -> None:
    remove_nodes(deployment, but=engine.url)
    reply = deployment.get("/v1/models")
    value = reply.json()
    assert reply.status == 200 and value["object"] == "list"
    (card,) = value["data"]
    assert (card["id"], card["object"]) == ("sim", "model")
    assert isinstance(card["created"], int) and isinstance(card["owned_by"], str)


def test_r88_models_are_merged_each_once_and_routed_by_name(deployment: Deployment, engine_factory: Factory) -> None:
    remove_nodes(deployment)
    first, second = engine_factory(models=("a", "b")), engine_factory(models=("b", "c"))
    deployment.add(first, second)
    assert sorted(card["id"] for card in deployment.get("/v1/models").json()["data"]) == ["a", "b", "c"]

    async def ask() -> list[load.Answer]:
        return await load.many(deployment.url, 60, concurrency=10, each=lambda i: {"model": "abc"[i % 3]})

    assert all(answer.ok for answer in asyncio.run(ask()))
    asked = [{json.loads(r.body)["model"] for r in made.requests} for made in (first, second)]
    assert asked == [{"a", "b"}, {"b", "c"}]


def test_r88_a_model_served_under_two_names_works(deployment: Deployment, engine_factory: Factory) -> None:
    both = engine_factory(models=("org/Model-7B", "model"))
    deployment.add(both)
    assert [chat(deployment, chat_body(name)).status for name in both.knobs.models] == [200, 200]
    assert [json.loads(r.body)["model"] for r in both.requests] == ["org/Model-7B", "model"]


def test_get_health_is_live_and_ready_tells_the_reason(deployment: Deployment, engine_factory: Factory) -> None:
    remove_nodes(deployment)
    assert deployment.get("/health").status == 200

    def not_ready() -> bool:
        reply = deployment.get("/ready")
        return reply.status == 503 and "node" in reply.text.lower()

    on_every_worker(deployment, not_ready)
    deployment.add(engine_factory())
    on_every_worker(deployment, lambda: deployment.get("/ready").status == 200)


def test_ready_wants_each_role_that_the_strategy_needs(
    deployment_factory: Callable[..., Deployment], engine_factory: Factory
) -> None:
    split = deployment_factory(1, settings={"serving_strategy": "DistServe"})
    prefill, decode = engine_factory(models=("pd",)), engine_factory(models=("pd",))
    assert split.get("/ready").status == 503
    split.add(prefill, role="Prefill")
    half = split.get("/ready")
    assert half.status == 503
    assert "decode" in half.text.lower()
    split.add(decode, role="Decode")
    assert split.get("/ready").status == 200
    openai_error(chat(split, chat_body("pd")), 502)  # these two engines know nothing of links


# --- internal fields


@pytest.mark.parametrize(
    "field",
    [
        b'"migration_request":{"protocol":1}',
        b'"with_cache":true',
        b'"preserve_cache":true',
        b'"kv_transfer_params":{"do_remote_decode":true}',
        b'"ec_transfer_params":{"a":1}',
        b'"bootstrap_host":"10.0.0.1"',
        b'"bootstrap_port":1',
        b'"bootstrap_room":7',
        b'"bootstrap_pair_key":"k"',
        b'"migration\\u005frequest":{"protocol":1}',
        b'"kv_transfer_params":null,"kv_transfer_params":{"a":1}',
        b'"kv_transfer_params":{"a":1},"kv_transfer_params":null',
        b'"migration_request":null',
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
def test_r65_internal_fields_of_a_client_never_reach_an_engine(
    deployment: Deployment, engine: SimulatedEngine, field: bytes, path: str
) -> None:
    reply = post_json(deployment.url, path, b'{"model":"sim", ' + field + b',  "user":"u"}')
    name = json.loads(b"{" + field + b"}").keys()
    if reply.status == 400:
        assert next(iter(name)) in openai_error(reply, 400)["message"]
        assert not engine.requests
    else:
        assert reply.status == 200
        (record,) = engine.requests
        assert json.loads(record.body) == {"model": "sim", "user": "u"}
