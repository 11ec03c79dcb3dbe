"""Streams: every chunk when it comes, byte for byte; a broken one says so; a client that leaves is noticed."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.serving import (
    Factory,
    ScriptedEngine,
    SharedDeployment,
    ask_scripted,
    broken_stream,
    chat,
    chat_body,
    connected,
    events,
    post_json,
    raw,
    raw_post,
    read_reply,
)
from tests.support import load
from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine
from tests.support.redis import free_port
from tests.support.wait import eventually

DEPLOYMENT = SharedDeployment(workers=2)

ON_TIME_S = 0.05  # R41
TRIES = 3  # a busy machine may be late by itself; what is held back on purpose is late every time


# --- when it comes


async def _lateness_s(url: str, engine: SimulatedEngine, clients: int) -> list[float]:
    """How long after the engine's write each chunk was with its client."""
    answers = await load.many(url, clients, stream=True, each=lambda i: {"headers": {"x-request-id": f"r{i}"}})
    assert all(answer.ok and answer.done for answer in answers)
    records = {record.id: record for record in engine.requests}
    late: list[float] = []
    for i, answer in enumerate(answers):
        written, came = records[f"r{i}"].chunk_s, [at_s for at_s, _ in answer.chunks()]
        assert len(came) == len(written) == engine.knobs.chunks
        late += [b - a for a, b in zip(written, came, strict=True)]
    return late


@pytest.mark.parametrize("clients", [1, 50])
def test_r41_each_chunk_reaches_the_client_within_50_ms(
    deployment: Deployment, engine: SimulatedEngine, clients: int
) -> None:
    engine.set(chunks=8, gap_s=0.1)
    for _ in range(TRIES):
        engine.forget()
        late_s = asyncio.run(_lateness_s(deployment.url, engine, clients))
        if max(late_s) < ON_TIME_S:
            return
    pytest.fail(f"the latest chunk came {max(late_s):.3f} s after it was written")


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.long  # it wants nginx on this machine, which nothing else here does
def test_r42_each_chunk_reaches_a_client_behind_nginx_as_it_comes(
    deployment: Deployment, engine: SimulatedEngine, tmp_path: Path
) -> None:
    """With nginx's own settings: HTTP/1.0 towards us, and answers buffered unless they say otherwise."""
    port = free_port()
    server = f"listen 127.0.0.1:{port}; location / {{ proxy_pass {deployment.url}; }}"
    (tmp_path / "nginx.conf").write_text(
        f"daemon off; pid {tmp_path}/pid; error_log stderr; events {{}}\n"
        f"http {{ access_log off; server {{ {server} }} }}\n"
    )
    engine.set(chunks=8, gap_s=0.1)
    nginx = subprocess.Popen(["nginx", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")])
    try:
        eventually(lambda: is_open(port))
        for _ in range(TRIES):
            engine.forget()
            late_s = asyncio.run(_lateness_s(f"http://127.0.0.1:{port}", engine, 10))
            if max(late_s) < ON_TIME_S:
                return
    finally:
        nginx.terminate()
        nginx.wait(10)
    pytest.fail(f"the latest chunk came {max(late_s):.3f} s after it was written")


def test_the_head_does_not_wait_for_the_first_chunk(deployment: Deployment, engine: SimulatedEngine) -> None:
    engine.set(head_first=True, ttft_s=1.0)
    answer = asyncio.run(load.chat(deployment.url, stream=True))
    assert answer.head_s is not None and answer.done
    assert answer.head_s - answer.started_s < 0.5 < answer.reads[0][0] - answer.head_s


# --- as it is


def test_r42_streams_and_only_streams_tell_proxies_not_to_buffer(
    deployment: Deployment, engine: SimulatedEngine
) -> None:
    stream = chat(deployment, chat_body(stream=True))
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.headers["cache-control"] == "no-cache" and stream.headers["x-accel-buffering"] == "no"
    assert "content-length" not in stream.headers
    plain = chat(deployment)
    assert "x-accel-buffering" not in plain.headers and "cache-control" not in plain.headers


def _same_bytes(deployment: Deployment, engine: SimulatedEngine, body: bytes) -> bytes:
    """The body of a stream through the deployment, which must be what the engine alone sends."""
    through = chat(deployment, body, x_request_id="same")
    straight = post_json(engine.url, "/v1/chat/completions", body, {"x-request-id": "same"})
    assert through.status == straight.status == 200
    assert through.body == straight.body
    return through.body


@pytest.mark.parametrize("crlf", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_r44_fragmented_utf8_reaches_the_client_byte_for_byte(
    deployment: Deployment, engine: SimulatedEngine, size: int, crlf: bool
) -> None:
    engine.set(frag_bytes=size, crlf=crlf, text="日本語😀", chunks=4)
    body = _same_bytes(deployment, engine, chat_body(stream=True, stream_options={"include_usage": True}))
    assert body.count("日本語😀".encode()) == 4 and events(body)[-1] == "[DONE]"
    assert body.count(b"\r\n") == (12 if crlf else 0)  # 4 chunks, usage and [DONE], two line ends each


def test_comments_and_two_events_in_one_read_are_untouched(deployment: Deployment, engine: SimulatedEngine) -> None:
    engine.set(comments=True, crlf=True, gap_s=0.0)
    assert _same_bytes(deployment, engine, chat_body(stream=True)).count(b": keep-alive\r\n\r\n") == 16


def test_any_text_between_is_untouched(deployment: Deployment) -> None:
    odd = b'\xef\xbb\xbfevent: x\rid: 7\n\ndata:{"a":1}\ndata\n\n\n\nretry: 5\n:\n\ndata: \xff\xfe\r\n\r\n'
    odd += b"data: [DONE]\n\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(odd)
    with ScriptedEngine(head + odd) as scripted:
        assert ask_scripted(deployment, scripted, stream=True).body == odd


@pytest.mark.parametrize("size_kb", [200, 600, 8000])
def test_r45_a_line_of_8_mb_is_delivered_whole(deployment: Deployment, engine: SimulatedEngine, size_kb: int) -> None:
    engine.set(line_kb=size_kb)
    body = _same_bytes(deployment, engine, chat_body(stream=True))
    assert len(body) > size_kb * 1000 and events(body)[-1] == "[DONE]"


# --- broken off


@pytest.mark.parametrize(
    "fault",
    [
        {"cut_after": 5},
        {"eof_after": 5, "eof_how": "proper"},
        {"eof_after": 5, "eof_how": "close"},
        {"eof_after": 5, "framing": "close"},
    ],
    ids=["reset", "clean end", "closed", "close-delimited"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_r46_a_stream_that_breaks_off_ends_with_one_error_event(
    deployment: Deployment, engine: SimulatedEngine, fault: dict[str, object], path: str
) -> None:
    engine.set(gap_s=0.005, **fault)
    reply = post_json(deployment.url, path, b'{"model":"sim","stream":true,"messages":[],"prompt":""}')
    assert reply.status == 200
    broken_stream(reply.body, chunks=5)


def test_r46_a_stream_that_breaks_off_before_its_first_chunk_says_so(
    deployment: Deployment, engine: SimulatedEngine
) -> None:
    engine.set(eof_after=0)
    reply = chat(deployment, chat_body(stream=True))
    assert reply.status == 200
    broken_stream(reply.body, chunks=0)


@pytest.mark.parametrize("partial", [b'data: {"choices":[{"de', b"data", b'data: {"choices":[]}\n', b"data: \xe6\x97"])
def test_r46_a_break_inside_an_event_leaves_the_error_an_event_of_its_own(
    deployment: Deployment, partial: bytes
) -> None:
    whole = b'data: {"choices":[]}\n\n' + partial
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    with ScriptedEngine(head + b"%x\r\n%b\r\n" % (len(whole), whole)) as scripted:
        body = ask_scripted(deployment, scripted, stream=True).body
    assert body.startswith(whole) and body.endswith(b"\n\n")
    last = body[len(whole) :].strip(b"\r\n").split(b"\n")[-1]
    assert b"\n\n" in body[len(whole) - 1 : body.rindex(last)], "a blank line ends the broken event"
    assert "error" in json.loads(last.removeprefix(b"data: "))


def test_an_answer_that_is_no_stream_and_breaks_off_is_incomplete_for_the_client(
    deployment: Deployment, engine: SimulatedEngine
) -> None:
    engine.set(cut_after=1)
    body = chat_body()
    reply = raw(deployment.url, raw_post(["Host: h", f"Content-Length: {len(body)}"], body))
    assert reply.status >= 500 or not reply.complete


def test_r25_a_stream_that_breaks_off_is_not_begun_anew_elsewhere(
    deployment: Deployment, engine_factory: Factory
) -> None:
    broken, whole = (engine_factory(models=("two",), gap_s=0.005, **fault) for fault in ({"cut_after": 5}, {}))
    deployment.add(broken, whole)
    replies = [chat(deployment, chat_body("two", stream=True)) for _ in range(6)]
    assert len(broken.requests) + len(whole.requests) == 6
    assert sum("error" in events(reply.body)[-1] for reply in replies) == len(broken.requests)


# --- the client leaves


@pytest.mark.parametrize("keep_alive", [False, True], ids=["own connection", "keep-alive"])
@pytest.mark.parametrize(
    ("knobs", "how"),
    [
        pytest.param({"gap_s": 0.05, "chunks": 1000}, {"stream": True, "leave_after_chunks": 3}, id="in mid-stream"),
        pytest.param({"ttft_s": 30.0}, {"stream": True, "leave_after_s": 0.2}, id="before the head"),
        pytest.param(
            {"ttft_s": 30.0, "head_first": True}, {"stream": True, "leave_after_s": 0.2}, id="before the first chunk"
        ),
        pytest.param({"ttft_s": 30.0}, {"leave_after_s": 0.2}, id="no stream"),
        pytest.param({"ttft_s": 30.0, "head_first": True}, {"leave_after_s": 0.2}, id="no stream, after its head"),
        # The text is what the client counts its chunks by.
        pytest.param({"body_mb": 50.0, "text": "data: "}, {"leave_after_chunks": 1}, id="within a large body"),
    ],
)
def test_r39_a_client_that_leaves_ends_the_engines_work_within_1_s(
    deployment: Deployment, engine: SimulatedEngine, knobs: dict[str, Any], how: dict[str, Any], keep_alive: bool
) -> None:
    async def leave() -> load.Answer:
        async with load.session(keep_alive=keep_alive) as client:
            await load.chat(deployment.url, client=client)  # the one that is left is not the first of its connection
            await asyncio.to_thread(engine.set, **knobs)
            await asyncio.to_thread(engine.forget)
            return await load.chat(deployment.url, client=client, **how)

    answer = asyncio.run(leave())
    assert answer.left and answer.finished_s is not None
    (record,) = eventually(lambda: engine.aborts, within_s=1.5)
    assert record.aborted_s is not None
    assert -0.1 < record.aborted_s - answer.finished_s < 1.0
    eventually(lambda: deployment.unfinished() == {engine.url: 0}, within_s=1.0)


def test_r39_many_clients_that_leave_at_once_are_all_noticed(deployment: Deployment, engine: SimulatedEngine) -> None:
    engine.set(ttft_s=30.0)
    options = {"leave_after_s": 0.3, "each": lambda i: {"stream": bool(i % 2)}}
    answers = asyncio.run(load.many(deployment.url, 100, **options))
    left_s = max(answer.finished_s or 0.0 for answer in answers)
    eventually(lambda: len(engine.aborts) == len(engine.requests) and not engine.in_flight, within_s=1.5)
    assert max(record.aborted_s or 0.0 for record in engine.aborts) - left_s < 1.0
    eventually(lambda: deployment.unfinished() == {engine.url: 0}, within_s=1.0)


def test_a_client_that_ends_its_side_after_the_request_gets_its_whole_stream(
    deployment: Deployment, engine: SimulatedEngine
) -> None:
    engine.set(ttft_s=0.5, gap_s=0.05, chunks=8)
    body = chat_body(stream=True)
    with connected(deployment.url) as s:
        s.sendall(raw_post(["Host: h", "Content-Type: application/json", f"Content-Length: {len(body)}"], body))
        s.shutdown(socket.SHUT_WR)
        reply = read_reply(s)  # which passes over `100 Continue`, as every client does
    assert (reply.status, reply.complete) == (200, True)
    *chunks, last = events(reply.body)
    assert last == "[DONE]"
    assert [json.loads(chunk)["choices"][0]["delta"].get("content") for chunk in chunks if "token" in chunk] == [
        f"token{i} " for i in range(8)
    ]


def test_r39_a_client_that_ended_its_side_and_then_leaves_its_stream_ends_the_engines_work_within_1_s(
    deployment: Deployment, engine: SimulatedEngine
) -> None:
    engine.set(ttft_s=0.5, gap_s=0.05, chunks=1000)
    body = chat_body(stream=True)
    with connected(deployment.url) as s:
        s.sendall(raw_post(["Host: h", "Content-Type: application/json", f"Content-Length: {len(body)}"], body))
        s.shutdown(socket.SHUT_WR)
        came = b""
        while b"token2" not in came:
            came += s.recv(4096)
        left_s = time.monotonic()
    (record,) = eventually(lambda: engine.aborts, within_s=1.5)
    assert record.aborted_s is not None
    assert record.aborted_s - left_s < 1.0
