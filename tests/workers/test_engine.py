"""The simulated engine does what its knobs say: what every other test builds its proof on."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.server
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import openai
import pytest

from app.dispatch.media import Group, MediaRequest, read_reports
from tests.support import load
from tests.support.engine import SimulatedEngine
from tests.support.http import request
from tests.support.process import Process
from tests.support.template import TEMPLATE
from tests.support.wait import aeventually, eventually
from workers.engine.command import LEAVE_TIMEOUT_S, add_arguments

Factory = Callable[..., SimulatedEngine]

CHAT = json.dumps({"model": "sim", "stream": True, "messages": []}).encode()
LATE_S = 0.4
PLAIN = json.dumps({"model": "sim", "messages": []}).encode()


@dataclass
class Wire:
    """What came over a raw socket, and how it ended: closed, reset or open."""

    ended: str = "open"
    reads: list[tuple[float, bytes]] = field(default_factory=list)

    @property
    def raw(self) -> bytes:
        return b"".join(data for _, data in self.reads)

    @property
    def head(self) -> bytes:
        return self.raw.partition(b"\r\n\r\n")[0]

    @property
    def rest(self) -> bytes:
        return self.raw.partition(b"\r\n\r\n")[2]

    @property
    def complete(self) -> bool:
        return self.raw.endswith(b"\r\n0\r\n\r\n")


def post(body: bytes = CHAT, path: str = "/v1/chat/completions", *extra: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: engine", f"Content-Length: {len(body)}", *extra]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@contextlib.contextmanager
def connected(engine: SimulatedEngine) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", engine.port), timeout=5) as s:
        yield s


def read(s: socket.socket, *, until: bytes | None = None, for_s: float = 3.0) -> Wire:
    """Read until the connection ends, `until` has come, or nothing more came for `for_s`."""
    wire = Wire()
    s.settimeout(for_s)
    try:
        while until is None or until not in wire.raw:
            data = s.recv(1 << 20)
            if not data:
                wire.ended = "closed"
                break
            wire.reads.append((time.monotonic(), data))
    except ConnectionResetError:
        wire.ended = "reset"
    except TimeoutError:
        pass
    return wire


def ask(engine: SimulatedEngine, sent: bytes | None = None, *, until: bytes | None = None, for_s: float = 3.0) -> Wire:
    with connected(engine) as s:
        s.sendall(sent or post())
        return read(s, until=until, for_s=for_s)


def on_time(took_s: float, due_s: float) -> bool:
    """Never early; late by no more than a busy machine explains."""
    return due_s - 0.002 <= took_s < due_s + LATE_S


def events(wire: Wire) -> int:
    return wire.raw.count(b'"choices"')


# --- answers


async def test_chat_answer_has_openai_shape(engine_factory: Factory) -> None:
    engine = engine_factory(chunks=3)
    answer = await load.chat(engine.url)
    assert answer.status == 200
    value = answer.json()
    assert value["object"] == "chat.completion"
    assert value["model"] == "sim"
    assert value["choices"][0]["message"] == {"role": "assistant", "content": "token0 token1 token2 "}
    assert value["choices"][0]["finish_reason"] == "stop"
    assert value["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


async def test_completion_answer_has_openai_shape(engine_factory: Factory) -> None:
    answer = await load.chat(engine_factory(chunks=2).url, path="/v1/completions")
    assert answer.json()["object"] == "text_completion"
    assert answer.json()["choices"][0]["text"] == "token0 token1 "


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_stream_is_chunks_then_done(engine_factory: Factory, path: str) -> None:
    answer = await load.chat(engine_factory(chunks=3).url, stream=True, path=path)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.text == "token0 token1 token2 "
    assert answer.done
    assert len(answer.events()) == 4
    finish = [event["choices"][0]["finish_reason"] for _, event in answer.chunks()]
    assert finish == [None, None, "stop"]


async def test_stream_tells_usage_only_when_asked(engine_factory: Factory) -> None:
    engine = engine_factory(chunks=2)
    asked = await load.chat(engine.url, stream=True, stream_options={"include_usage": True})
    not_asked = await load.chat(engine.url, stream=True)
    assert json.loads(asked.events()[-2])["usage"]["completion_tokens"] == 2
    assert json.loads(asked.events()[-2])["choices"] == []
    assert "usage" not in not_asked.body.decode()


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_max_tokens_is_the_number_of_chunks_at_most(engine_factory: Factory, name: str) -> None:
    engine = engine_factory(chunks=4)
    few = await load.chat(engine.url, stream=True, **{name: 2})
    many = await load.chat(engine.url, **{name: 9})
    assert few.text == "token0 token1 "
    assert few.chunks()[-1][1]["choices"][0]["finish_reason"] == "length"
    assert many.json()["usage"]["completion_tokens"] == 4


async def test_same_request_gives_same_bytes(engine_factory: Factory) -> None:
    engine, other = engine_factory(), engine_factory()
    answers = [await load.chat(url, stream=True) for url in (engine.url, engine.url, other.url)]
    assert len({answer.body for answer in answers}) == 1


async def test_the_openai_sdk_reads_it(engine_factory: Factory) -> None:
    engine = engine_factory(chunks=3)
    async with openai.AsyncOpenAI(base_url=engine.url + "/v1", api_key="k", max_retries=0) as client:
        said = await client.chat.completions.create(model="sim", messages=[{"role": "user", "content": "x"}])
        assert said.choices[0].message.content == "token0 token1 token2 "
        parts = await client.chat.completions.create(
            model="sim", messages=[{"role": "user", "content": "x"}], stream=True
        )
        assert [part.choices[0].delta.content async for part in parts] == ["token0 ", "token1 ", "token2 "]
        vectors = await client.embeddings.create(model="sim", input=["a", "b"])
        assert [len(row.embedding) for row in vectors.data] == [8, 8]
        assert [model.id async for model in client.models.list()] == ["sim"]


async def test_models_are_the_knobs(engine_factory: Factory) -> None:
    engine = engine_factory(models=("a", "b"))
    listed = request("GET", engine.url + "/v1/models").json()
    assert [card["id"] for card in listed["data"]] == ["a", "b"]
    assert (await load.chat(engine.url, model="b")).status == 200
    unknown = await load.chat(engine.url, model="c")
    assert (unknown.status, unknown.json()["error"]["code"]) == (404, "model_not_found")


def test_other_v1_paths_echo(engine_factory: Factory) -> None:
    engine = engine_factory()
    form = b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nsim\r\n--x--\r\n'
    reply = request("POST", engine.url + "/v1/audio/transcriptions?a=b", body=form, headers={"content-type": "x/y"})
    assert reply.json() == {
        "object": "echo",
        "path": "/v1/audio/transcriptions",
        "model": "",
        "bytes": len(form),
        "content_type": "x/y",
    }
    assert request("GET", engine.url + "/nothing").status == 404
    assert request("POST", engine.url + "/v1/chat/completions", body=b"{").status == 400


def test_embeddings_one_for_each_input(engine_factory: Factory) -> None:
    url = engine_factory().url + "/v1/embeddings"
    three = request("POST", url, body=b'{"model": "sim", "input": ["a", "b", "c"]}').json()
    one = request("POST", url, body=b'{"model": "sim", "input": "a"}').json()
    assert [row["index"] for row in three["data"]] == [0, 1, 2]
    assert len(one["data"]) == 1


async def test_ttft_and_gap_pace_the_answer(engine_factory: Factory) -> None:
    engine = engine_factory(ttft_s=0.1, gap_s=0.05, chunks=4)
    stream = await load.chat(engine.url, stream=True)
    plain = await load.chat(engine.url)
    times = [at_s - stream.started_s for at_s, _ in stream.chunks()]
    assert all(map(on_time, times, [0.1, 0.15, 0.2, 0.25]))
    assert stream.head_s is not None and stream.head_s - stream.started_s >= 0.1
    assert plain.finished_s is not None and on_time(plain.finished_s - plain.started_s, 0.25)
    sent = [at_s - engine.requests[0].started_s for at_s in engine.requests[0].chunk_s]
    assert all(map(on_time, sent, [0.1, 0.15, 0.2, 0.25]))


def test_head_first_sends_the_head_before_ttft(engine_factory: Factory) -> None:
    wire = ask(engine_factory(ttft_s=0.15, head_first=True), until=b"[DONE]")
    assert wire.reads[0][1].endswith(b"\r\n\r\n")
    assert wire.reads[1][0] - wire.reads[0][0] >= 0.1


async def test_unicode_comments_crlf(engine_factory: Factory) -> None:
    engine = engine_factory(text="漢字😀", comments=True, crlf=True, chunks=2)
    answer = await load.chat(engine.url, stream=True)
    assert answer.text == "漢字😀0 漢字😀1 "
    assert "漢字😀".encode() in answer.body
    assert answer.body.count(b": keep-alive\r\n\r\n") == 2
    assert b"\n" not in answer.body.replace(b"\r\n", b"")


async def test_huge_line_and_huge_body(engine_factory: Factory) -> None:
    engine = engine_factory(line_kb=8000, body_mb=50, chunks=2)
    stream, plain = await load.chat(engine.url, stream=True), await load.chat(engine.url)
    assert stream.done
    assert max(map(len, stream.events())) >= 8_000_000
    assert 50_000_000 <= len(plain.body) < 50_001_000
    assert plain.text.startswith("token0 token1 xxx")


async def test_own_headers_go_with_every_inference_answer(engine_factory: Factory) -> None:
    engine = engine_factory(headers=(("X-Own", "1"), ("X-Own", "2")))
    for stream in (True, False):
        answer = await load.chat(engine.url, stream=stream)
        assert answer.headers.getall("x-own") == ["1", "2"]


@pytest.mark.parametrize("framing", ["chunked", "close"])
async def test_framing_of_a_plain_answer(engine_factory: Factory, framing: str) -> None:
    engine = engine_factory(framing=framing)
    wire = ask(engine, post(PLAIN), until=b"\r\n0\r\n\r\n")
    assert b"content-length" not in wire.head
    assert (b"transfer-encoding: chunked" in wire.head) == (framing == "chunked")
    assert wire.ended == ("closed" if framing == "close" else "open")
    assert (await load.chat(engine.url)).json()["choices"]


def test_frag_writes_so_many_bytes_at_a_time(engine_factory: Factory) -> None:
    engine = engine_factory(chunks=1)
    whole = ask(engine, until=b"\r\n0\r\n\r\n").raw
    engine.set(frag_bytes=7, frag_gap_s=0.001)
    wire = ask(engine, until=b"\r\n0\r\n\r\n")
    assert wire.raw == whole
    # A read may join two writes, never split one.
    assert all(len(data) % 7 == 0 for _, data in wire.reads[:-1])
    assert len(wire.reads) > len(whole) / 7 / 3
    engine.set(frag_bytes=1, frag_gap_s=0)
    assert ask(engine, until=b"\r\n0\r\n\r\n").raw == whole


def test_prefix_stands_before_every_path(engine_factory: Factory) -> None:
    engine = engine_factory(prefix="/engine/a")
    assert engine.url.endswith("/engine/a")
    assert request("GET", engine.url + "/health").status == 200
    assert request("GET", engine.url.removesuffix("/engine/a") + "/health").status == 404


def test_key_is_asked_for_on_every_path(engine_factory: Factory) -> None:
    engine = engine_factory(key="secret")
    for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/terminate")):
        assert request(method, engine.url + path).status == 401
        assert request(method, engine.url + path, headers={"authorization": "Bearer wrong"}).status == 401
    assert engine.terminated == 0
    assert request("GET", engine.url + "/health", headers={"authorization": "Bearer secret"}).status == 200


def test_health_has_status_word_and_delay(engine_factory: Factory) -> None:
    engine = engine_factory()
    assert request("GET", engine.url + "/health").json()["status"] == "healthy"
    engine.set(health_status=503, health_word="initializing")
    reply = request("GET", engine.url + "/health")
    assert (reply.status, reply.json()["status"]) == (503, "initializing")
    engine.set(health_status=200, health_word="", health_delay_s=0.15)
    before_s = time.monotonic()
    assert request("GET", engine.url + "/health").body == b""
    assert time.monotonic() - before_s >= 0.15
    assert request("POST", engine.url + "/v1/chat/completions", body=PLAIN).status == 200


def test_terminate_is_counted(engine_factory: Factory) -> None:
    engine = engine_factory()
    assert request("GET", engine.url + "/terminate").status == 200
    assert engine.terminated == 1
    assert [probe.path for probe in engine.probes] == ["/terminate"]


# --- scripted faults


async def test_scripted_status_body_headers(engine_factory: Factory) -> None:
    engine = engine_factory(status=429, body='{"busy": true}', error_headers=(("Retry-After", "7"),))
    answer = await load.chat(engine.url, stream=True)
    assert (answer.status, answer.body, answer.headers["retry-after"]) == (429, b'{"busy": true}', "7")
    engine.set(status=500, body=None, error_headers=(), ttft_s=0.1)
    answer = await load.chat(engine.url)
    assert (answer.status, answer.json()["error"]["code"]) == (500, "scripted")
    assert answer.head_s is not None and answer.head_s - answer.started_s >= 0.1
    assert request("GET", engine.url + "/health").status == 200


async def test_only_for_spares_the_others(engine_factory: Factory) -> None:
    engine = engine_factory(status=500, only_for="poison")
    assert (await load.chat(engine.url, prompt="a poison b")).status == 500
    assert (await load.chat(engine.url, prompt="good")).status == 200
    engine.set(status=200, cut_after=1)
    assert (await load.chat(engine.url, prompt="poison", stream=True)).error is not None
    assert (await load.chat(engine.url, prompt="good", stream=True)).done
    engine.set(cut_after=None, blackhole=True)
    assert (await load.chat(engine.url, prompt="poison", leave_after_s=0.1)).status == 0
    assert (await load.chat(engine.url, prompt="good")).status == 200
    assert request("GET", engine.url + "/health").status == 200


@pytest.mark.parametrize("gap_s", [0, 0.005])
@pytest.mark.parametrize(
    ("knobs", "ended", "complete"),
    [
        ({"cut_after": 5}, "reset", False),
        ({"eof_after": 5}, "open", True),
        ({"eof_after": 5, "eof_how": "close"}, "closed", False),
        ({"stall_after": 5}, "open", False),
    ],
)
def test_stream_ends_early_after_k_chunks(
    engine_factory: Factory, knobs: dict[str, object], ended: str, complete: bool, gap_s: float
) -> None:
    engine = engine_factory(gap_s=gap_s, **knobs)
    wire = ask(engine, until=b"\r\n0\r\n\r\n", for_s=0.3)
    assert events(wire) == 5
    assert b"[DONE]" not in wire.raw
    assert (wire.ended, wire.complete) == (ended, complete)
    eventually(lambda: engine.in_flight == 0)


@pytest.mark.parametrize(
    ("knobs", "ended"),
    [({"cut_after": -1}, "reset"), ({"eof_after": -1}, "closed"), ({"stall_after": -1}, "open")],
)
def test_end_before_the_head(engine_factory: Factory, knobs: dict[str, object], ended: str) -> None:
    for body in (CHAT, PLAIN):
        wire = ask(engine_factory(ttft_s=0.05, **knobs), post(body), for_s=0.3)
        assert (wire.raw, wire.ended) == (b"", ended)


@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize(("knobs", "ended"), [("cut_after", "reset"), ("eof_after", "closed"), ("stall_after", "open")])
def test_plain_answer_ends_early(engine_factory: Factory, knobs: str, ended: str, k: int) -> None:
    wire = ask(engine_factory(**{knobs: k}), post(PLAIN), for_s=0.3)
    length = re.search(rb"content-length: (\d+)", wire.head)
    assert length is not None
    assert len(wire.rest) == (int(length[1]) // 2 if k else 0)
    assert wire.ended == ended


def test_refuse_closes_the_listener_not_the_running_answers(engine_factory: Factory) -> None:
    engine = engine_factory(chunks=5, gap_s=0.05)
    with connected(engine) as idle, connected(engine) as busy:
        idle.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in read(idle, until=b"healthy.").raw
        busy.sendall(post())
        assert b"token0" in read(busy, until=b"token0").raw
        engine.set(refuse=True)
        with pytest.raises(ConnectionRefusedError), connected(engine):
            pass
        assert read(idle).ended == "closed"
        wire = read(busy)
        assert b"[DONE]" in wire.raw and wire.ended == "closed"
    engine.set(refuse=False)
    assert request("GET", engine.url + "/health").status == 200


async def test_blackhole_accepts_and_never_answers(engine_factory: Factory) -> None:
    engine = engine_factory(blackhole=True)
    chat = asyncio.create_task(load.chat(engine.url, leave_after_s=0.2))
    await aeventually(lambda: engine.in_flight == 1)
    assert (await chat).status == 0
    await aeventually(lambda: engine.in_flight == 0 and len(engine.aborts) == 1)
    assert ask(engine, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", for_s=0.2).raw == b""


def test_reset_on_accept(engine_factory: Factory) -> None:
    engine = engine_factory(reset_on_accept=True)
    try:
        wire = ask(engine)
    except (ConnectionResetError, BrokenPipeError):
        wire = Wire("reset")
    assert (wire.ended, wire.raw) == ("reset", b"")
    assert engine.requests == []


def test_idle_close_after_an_answer(engine_factory: Factory) -> None:
    engine = engine_factory(idle_close_s=0.15)
    with connected(engine) as s:
        for _ in range(2):
            s.sendall(post(PLAIN))
            read(s, until=b"total_tokens")
        before_s = time.monotonic()
        assert read(s).ended == "closed"
        assert on_time(time.monotonic() - before_s, 0.14)
    assert [r.nth for r in engine.requests] == [1, 2]
    assert len({r.connection for r in engine.requests}) == 1


@pytest.mark.parametrize(("how", "ended"), [(True, "closed"), ("rst", "reset")])
def test_close_on_request_strikes_reused_connections_only(engine_factory: Factory, how: object, ended: str) -> None:
    engine = engine_factory(close_on_request=how)
    with connected(engine) as s:
        s.sendall(post(PLAIN))
        assert b"200 OK" in read(s, until=b"total_tokens").raw
        s.sendall(post(PLAIN))
        wire = read(s)
        assert (wire.raw, wire.ended) == (b"", ended)
    assert len(engine.requests) == 1
    assert engine.stats.dropped == 1


# --- what it records


def test_record_holds_the_request_as_it_came(engine_factory: Factory) -> None:
    engine = engine_factory(ttft_s=0.05)
    before_s = time.monotonic()
    ask(engine, post(PLAIN, "/v1/chat/completions?x=1", "X-Request-Id: r-1", "X-A: 1", "x-a: 2"), until=b"total_tokens")
    record = engine.requests[0]
    assert (record.id, record.method, record.path, record.status) == ("r-1", "POST", "/v1/chat/completions?x=1", 200)
    assert record.headers == [
        (b"Host", b"engine"),
        (b"Content-Length", b"%d" % len(PLAIN)),
        (b"X-Request-Id", b"r-1"),
        (b"X-A", b"1"),
        (b"x-a", b"2"),
    ]
    assert record.header(b"X-a") == b"1"
    assert record.body == PLAIN
    assert record.finished_s is not None and record.first_byte_s is not None and record.aborted_s is None
    assert before_s <= record.started_s <= record.first_byte_s - 0.05 <= record.finished_s <= time.monotonic()


def test_probes_are_recorded_apart(engine_factory: Factory) -> None:
    engine = engine_factory()
    request("GET", engine.url + "/health")
    request("GET", engine.url + "/v1/models")
    assert [probe.path for probe in engine.probes] == ["/health", "/v1/models"]
    assert engine.requests == [] and engine.stats.requests == 0


async def test_in_flight_is_exact(engine_factory: Factory) -> None:
    engine = engine_factory(ttft_s=0.3, chunks=1)
    running = asyncio.create_task(load.many(engine.url, 200, stream=True))
    await aeventually(lambda: engine.in_flight == 200)
    answers = await running
    assert engine.in_flight == 0  # at once: counted down before the last byte
    assert all(answer.done for answer in answers)
    assert (engine.stats.max_in_flight, engine.stats.finished, engine.stats.aborted) == (200, 200, 0)
    stats = request("GET", engine.url + "/sim/stats").json()
    assert (stats["in_flight"], stats["max_in_flight"], stats["requests"]) == (0, 200, 200)


@pytest.mark.parametrize(
    "leave",
    [
        {"stream": True, "leave_after_chunks": 3},
        {"stream": True, "leave_after_s": 0.05},
        {"stream": False, "leave_after_s": 0.05},
    ],
)
async def test_abort_is_seen_at_once(engine_factory: Factory, leave: dict[str, float]) -> None:
    engine = engine_factory(ttft_s=0.2, gap_s=0.2)
    answer = await load.chat(engine.url, **leave)
    assert answer.left
    assert answer.finished_s is not None
    await aeventually(lambda: engine.in_flight == 0)
    [record] = engine.aborts
    assert record.aborted_s is not None and record.aborted_s - answer.finished_s < LATE_S
    assert record.finished_s is None
    assert engine.stats.aborted == 1


def test_abort_is_seen_while_the_client_does_not_read(engine_factory: Factory) -> None:
    engine = engine_factory(body_mb=50)
    with connected(engine) as s:
        s.sendall(post(PLAIN))
        eventually(lambda: engine.in_flight == 1)
    eventually(lambda: engine.in_flight == 0 and len(engine.aborts) == 1)


def test_a_client_that_does_not_read_holds_the_engine_up(engine_factory: Factory) -> None:
    engine = engine_factory(body_mb=50)
    with connected(engine) as s:
        s.sendall(post(PLAIN))
        eventually(lambda: engine.requests and engine.requests[0].sent_bytes > 0)
        time.sleep(0.1)
        assert engine.in_flight == 1
        assert engine.requests[0].sent_bytes < 20_000_000
        s.settimeout(5)
        got = 0
        while got < 50_000_000:
            got += len(s.recv(1 << 20))
    eventually(lambda: engine.in_flight == 0)
    assert engine.aborts == []


def test_keep_alive_pipelining_and_close(engine_factory: Factory) -> None:
    engine = engine_factory(gap_s=0.01, chunks=2)
    wire = ask(engine, post() + post(PLAIN) + post(PLAIN, "/v1/completions", "Connection: close"))
    assert wire.ended == "closed"
    assert wire.raw.count(b"HTTP/1.1 200 OK") == 3
    assert wire.raw.index(b"[DONE]") < wire.raw.index(b'"chat.completion"') < wire.raw.index(b"text_completion")
    assert [r.nth for r in engine.requests] == [1, 2, 3]


def test_chunked_request_bodies_and_expect(engine_factory: Factory) -> None:
    engine = engine_factory()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
    )
    with connected(engine) as s:
        s.sendall(head)
        assert read(s, until=b"\r\n\r\n").raw == b"HTTP/1.1 100 Continue\r\n\r\n"
        s.sendall(b"%x\r\n%b\r\n" % (10, PLAIN[:10]) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(PLAIN) - 10, PLAIN[10:]))
        assert b"200 OK" in read(s, until=b"total_tokens").raw
    assert engine.requests[0].body == PLAIN


def test_garbage_is_a_400(engine_factory: Factory) -> None:
    wire = ask(engine_factory(), b"what is this\r\n\r\n")
    assert wire.raw.startswith(b"HTTP/1.1 400") and wire.ended == "closed"


# --- life


async def test_crash_and_start_on_the_same_port(engine_factory: Factory) -> None:
    engine = engine_factory(gap_s=0.05)
    url = engine.url
    running = asyncio.create_task(load.chat(url, stream=True))
    await aeventually(lambda: engine.requests and engine.requests[0].first_byte_s)
    engine.crash()
    assert (await running).error is not None
    assert engine.in_flight == 0 and engine.aborts == []
    assert isinstance((await load.chat(url)).error, aiohttp.ClientConnectorError)
    engine.start()
    assert engine.url == url
    assert (await load.chat(url)).status == 200
    engine.forget()
    assert engine.requests == [] and engine.stats.requests == 0


async def test_stop_lets_running_answers_end(engine_factory: Factory) -> None:
    engine = engine_factory(gap_s=0.05, chunks=4)
    running = asyncio.create_task(load.chat(engine.url, stream=True))
    await aeventually(lambda: engine.in_flight == 1)
    engine.stop()
    assert (await load.chat(engine.url)).status == 0
    assert (await running).done


def test_it_ends_without_a_shared_loop() -> None:
    with SimulatedEngine() as engine:
        assert request("GET", engine.url + "/health").status == 200
    with pytest.raises(ConnectionRefusedError):
        request("GET", engine.url + "/health")


# --- the command

COMMAND = [sys.executable, "-m", "app.cli", "engine"]


@contextlib.contextmanager
def command(tmp_path_factory: pytest.TempPathFactory, *flags: str) -> Iterator[tuple[Process, str]]:
    log = tmp_path_factory.mktemp("engine") / "log"
    process = Process([*COMMAND, *flags], log_file=log, template=TEMPLATE)
    try:
        said = eventually(lambda: re.search(r"http://\S+(?=\n)", process.log()), within_s=10)
        yield process, said[0]
    finally:
        process.kill()


def test_command_serves_and_ends_on_a_signal(tmp_path_factory: pytest.TempPathFactory) -> None:
    with command(tmp_path_factory, "--model", "a", "b", "--ttft-s", "0", "--chunks", "2") as (process, url):
        assert process.log() == f"simulated engine at {url}\n"
        models = request("GET", url + "/v1/models").json()["data"]
        assert [card["id"] for card in models] == ["a", "b"]
        bodies = [b'{"model": "a", "max_tokens": %d}' % n for n in (1, 2, 1, 2, 2)]  # some of them remembered
        said = [request("POST", url + "/v1/completions", body=body).json() for body in bodies]
        assert [value["usage"]["completion_tokens"] for value in said] == [1, 2, 1, 2, 2]
        assert said[1] == said[3] == said[4]
        assert request("GET", url + "/sim/stats").json()["finished"] == 5
        assert process.stop() == 0
        assert process.log().count("\n") == 1


def test_command_is_an_encoder_that_reports_what_its_consumer_counts(
    tmp_path_factory: pytest.TempPathFactory, engine_factory: Factory
) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://img/0.png"}}
    video = {"type": "video_url", "video_url": {"url": "http://img/1.mp4"}}
    sound = {"type": "audio_url", "audio_url": {"url": "http://img/2.mp3"}}
    sent = [part | {"uuid": uuid} for part, uuid in ((image, "a"), (video, "b"), (sound, "c"))]
    chat = {"model": "sim", "stream": False, "messages": [{"role": "user", "content": sent}]}
    with command(tmp_path_factory, "--role", "Encode", "--url", "http://encoder:8001") as (process, url):
        said = request("POST", url + "/v1/chat/completions", body=json.dumps(chat).encode()).json()
        group = Group("http://encoder:8001", tuple(MediaRequest(json.dumps(chat).encode()).items), ("", "", ""))
        bad = request("POST", url + "/v1/chat/completions", body=b'{"model": "sim", "messages": 1}')
        assert process.stop() == 0
    reported = said["ec_transfer_params"]
    assert [entry["item_indices"] for entry in reported.values()] == [[0], [1], [2]]
    assert not {"a", "b", "c"} & set(reported)  # as of vLLM's encoders, the hash is not the uuid
    assert [entry["metadata"] for entry in reported.values()] == [
        {"image_grid_thw": [[1, 16, 16]]},
        {"video_grid_thw": [[8, 16, 16]]},
        {"audio_feature_lengths": [100]},
    ]
    assert {entry["peer_host"] for entry in reported.values()} == {"encoder"}
    assert bad.status == 400
    reports = read_reports(group, json.dumps(said).encode(), audio_in_video=False, to_consumer=False)
    body = MediaRequest(json.dumps(chat).encode()).with_reports(reports, rewrite=True, to_consumer=False)
    consumer = engine_factory()
    for sending in (body, json.dumps(chat).encode(), PLAIN):
        assert request("POST", consumer.url + "/v1/chat/completions", body=sending).status == 200
    assert request("GET", consumer.url + "/sim/stats").json()["with_embeddings"] == 1


def test_command_ends_on_terminate(tmp_path_factory: pytest.TempPathFactory) -> None:
    with command(tmp_path_factory) as (process, url):
        assert request("GET", url + "/terminate").status == 200
        assert process.wait(5) == 0


def test_command_registers_once_as_lmdeploy_does(
    tmp_path_factory: pytest.TempPathFactory, engine_factory: Factory
) -> None:
    # The engine stands in for a distributor that is not there yet, then fails, then answers.
    proxy = engine_factory(refuse=True)
    flags = ["--proxy-url", proxy.url + "/v1/x/", "--role", "prefill", "--speed", "2.5", "--model", "m"]
    with command(tmp_path_factory, *flags) as (process, url):
        assert request("GET", url + "/health").status == 200  # serves meanwhile
        proxy.set(refuse=False, status=503)
        eventually(lambda: len(proxy.requests) == 1, within_s=5)
        proxy.set(status=200)
        eventually(lambda: len(proxy.requests) == 2, within_s=5)
        record = proxy.requests[1]
        assert record.path == "/v1/x/nodes/add"
        assert record.header(b"authorization") is None
        assert json.loads(record.body) == {"url": url, "status": {"models": ["m"], "role": 2, "speed": 2.5}}
        assert process.stop() == 0
        assert [record.path for record in proxy.requests[2:]] == ["/v1/x/nodes/remove"]


class Registry:
    """Stands in for a distributor. `fault`: what becomes of the calls from now on."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None, Any]] = []  # path, key, body
        self.fault: Literal["", "gone", "silent", "refusing"] = ""
        self._go_on = threading.Event()
        registry = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                registry.asked.append((self.path, self.headers["authorization"], body))
                if registry.fault == "gone":
                    self.close_connection = True
                elif registry.fault == "silent":
                    registry._go_on.wait(30)
                else:
                    self.send_response(403 if registry.fault else 200)
                    self.send_header("content-length", "4")
                    self.end_headers()
                    self.wfile.write(b'"no"' if registry.fault else b'"ok"')

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._go_on.set()
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    monkeypatch.delenv("EVENHAND_ADMIN_KEY", raising=False)
    registry = Registry()
    yield registry
    registry.close()


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "terminate"])
def test_command_is_registered_no_more_when_it_ends(
    tmp_path_factory: pytest.TempPathFactory, registry: Registry, how: str
) -> None:
    flags = ["--proxy-url", registry.url, "--admin-key", "ad", "--url", "http://engine:23333"]
    with command(tmp_path_factory, *flags) as (process, url):
        eventually(lambda: "registered at" in process.log(), within_s=5)
        if how == "terminate":
            assert request("GET", url + "/terminate").status == 200
            assert process.wait(5) == 0
        else:
            assert process.stop(signal.Signals[how]) == 0
        assert process.log().endswith(f"registered at {registry.url}\nremoved from {registry.url}\n")
    assert [path for path, _, _ in registry.asked] == ["/nodes/add", "/nodes/remove"]
    assert registry.asked[1][1:] == ("Bearer ad", {"url": "http://engine:23333"})


@pytest.mark.parametrize("fault", ["closed", "gone", "silent", "refusing"])
def test_command_ends_whatever_becomes_of_the_distributor(
    tmp_path_factory: pytest.TempPathFactory, registry: Registry, fault: Any
) -> None:
    with command(tmp_path_factory, "--proxy-url", registry.url) as (process, _):
        eventually(lambda: "registered at" in process.log(), within_s=5)
        before = process.log()
        registry.fault = fault
        if fault == "closed":
            registry.close()
        assert process.stop(within_s=LEAVE_TIMEOUT_S + 3) == 0
        said = process.log().removeprefix(before)
    refused = (
        f'evenhand engine: {registry.url}/nodes/remove refused it: 403 "no"; give --admin-key (EVENHAND_ADMIN_KEY)\n'
    )
    assert said == (refused if fault == "refusing" else "")
    assert len(registry.asked) == (1 if fault == "closed" else 2)


def test_command_that_was_refused_removes_nobody(tmp_path_factory: pytest.TempPathFactory, registry: Registry) -> None:
    registry.fault = "refusing"
    with command(tmp_path_factory, "--proxy-url", registry.url) as (process, _):
        eventually(lambda: "refused it: 403" in process.log(), within_s=5)
        assert process.stop() == 0
    assert [path for path, _, _ in registry.asked] == ["/nodes/add"]


def test_command_that_ends_while_it_registers_leaves_no_entry(
    tmp_path_factory: pytest.TempPathFactory, registry: Registry
) -> None:
    registry.fault = "silent"
    with command(tmp_path_factory, "--proxy-url", registry.url) as (process, _):
        eventually(lambda: registry.asked, within_s=5)
        registry.fault = ""
        assert process.stop() == 0
    assert [path for path, _, _ in registry.asked] == ["/nodes/add", "/nodes/remove"]


@pytest.mark.parametrize("where", ["flag", "environment"])
def test_command_registers_with_the_admin_key_it_is_given(
    tmp_path_factory: pytest.TempPathFactory,
    engine_factory: Factory,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    proxy = engine_factory(key="ad")  # every path asks for it
    flags = ["--proxy-url", proxy.url]
    if where == "flag":
        flags += ["--admin-key", "ad"]
        monkeypatch.setenv("EVENHAND_ADMIN_KEY", "another")
    else:
        monkeypatch.setenv("EVENHAND_ADMIN_KEY", "ad")
    with command(tmp_path_factory, *flags) as (process, _):
        eventually(lambda: proxy.requests, within_s=5)
        assert proxy.requests[0].header(b"authorization") == b"Bearer ad"
        assert process.stop() == 0


def test_command_names_the_admin_key_where_it_is_refused_without(
    tmp_path_factory: pytest.TempPathFactory, engine_factory: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EVENHAND_ADMIN_KEY", raising=False)
    proxy = engine_factory(key="ad")
    with command(tmp_path_factory, "--proxy-url", proxy.url) as (process, _):
        eventually(lambda: "refused it: 401" in process.log(), within_s=5)
        assert process.log().rstrip().endswith("; give --admin-key (EVENHAND_ADMIN_KEY)")
        assert process.stop() == 0


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--port", "70000"], "--port"),
        (["--ttft-s", "-1"], "--ttft-s"),
        (["--chunks", "x"], "--chunks"),
        (["--role", "chef"], "--role"),
        (["--speed", "nan"], "--speed"),
    ],
)
def test_command_refuses_a_bad_value(flags: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit) as e:
        parser.parse_args(flags)
    assert e.value.code == 2
    assert word in capsys.readouterr().err


def test_command_says_when_the_port_is_taken(engine_factory: Factory) -> None:
    taken = engine_factory()
    ended = subprocess.run([*COMMAND, "--port", str(taken.port)], capture_output=True, text=True, timeout=20)
    assert ended.returncode == 1
    assert ended.stderr.startswith("evenhand engine: can't listen on") and ended.stderr.count("\n") == 1
