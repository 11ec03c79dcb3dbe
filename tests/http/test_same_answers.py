"""Through both sides: a client that asks again on its connection gets the engine's same answer as it got the first one.

The real app behind our protocol, and our transport to a scripted engine. What the client gets is written out here: the
headers in their order, none of the engine's connection, and an x-request-id of its own each time.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.dispatch.answer import Outcome
from app.heads import Head
from app.http.relay import relay_again
from app.http.routes import build_app
from app.metrics.figures import Figures, Served
from app.settings import Settings
from app.upstream.http1 import Http1Transport
from tests.http.fakes import FakeAnswer, FakeEngines, FakeRegistry, until
from tests.http.in_process import Straight
from tests.upstream.scripted import Peer, ScriptedServer, turns
from tests.workers.same_head import Client

Pairs = list[tuple[bytes, bytes]]

BODY = b'{"object":"chat.completion","choices":[]}'
ERROR = b'{"error":{"message":"no"}}'
DONE = b"data: [DONE]\n\n"
EVENTS = [b"data: {}\n\n", b'data: {"n":1}\n\n', DONE]
DATE = b"date: Mon, 30 Nov 2026 12:00:00 GMT"
ID = b"<id>"
TIMES = 4


class Engine:
    """Answers each request with the pieces that `said` makes for it, and keeps what it was asked."""

    def __init__(self, said: Callable[[int], Sequence[bytes]]) -> None:
        self.said = said
        self.requests: list[tuple[bytes, Pairs, bytes]] = []
        self.ends = False

    async def __call__(self, peer: Peer) -> None:
        while True:
            request = await peer.request()
            self.requests.append((request.line, request.headers, request.body))
            await peer.send(*self.said(len(self.requests) - 1))
            if self.ends:
                return


@asynccontextmanager
async def between(
    engine: Engine, figures: Figures | None = None, **settings: Any
) -> AsyncIterator[tuple[Client, ScriptedServer, Http1Transport]]:
    """A client of the real app, whose only engine this is."""
    async with ScriptedServer(engine) as server:
        straight = Straight(server.url)
        app = build_app(
            settings=Settings.load(settings),
            registry=FakeRegistry(),  # type: ignore[arg-type]
            dispatcher=straight,
            engine_client=FakeEngines(),
            store_ok=lambda: None,
            figures=figures,
        )
        client = Client(app)
        try:
            yield client, server, straight.transport
        finally:
            client.leave()
            await straight.transport.close()


def request(*lines: bytes, n: int = 0, path: bytes = b"/v1/chat/completions") -> bytes:
    body = b'{"model":"m","messages":[%b]}' % (b" " * n)
    top = [b"POST %b HTTP/1.1" % path, b"Host: h", *lines, b"Content-Length: %d" % len(body), b"", b""]
    return b"\r\n".join(top) + body


def wire(*lines: bytes, body: bytes = b"", status: bytes = b"200 OK", length: bool = True) -> bytes:
    own = [b"Content-Length: %d" % len(body)] if length else []
    return b"\r\n".join([b"HTTP/1.1 " + status, *lines, *own, b"", b""]) + body


def chunks(*parts: bytes) -> list[bytes]:
    return [b"%x\r\n%b\r\n" % (len(part), part) for part in parts] + [b"0\r\n\r\n"]


def parted(written: bytes) -> tuple[int, Pairs, bytes]:
    """Status, headers in their order and body, its chunks joined; an id that we drew is `ID`."""
    top, _, body = written.partition(b"\r\n\r\n")
    line, *lines = top.split(b"\r\n")
    headers = [(name, value) for name, _, value in (one.partition(b": ") for one in lines)]
    headers = [(n, ID if n == b"x-request-id" and re.fullmatch(rb"[0-9a-f]{32}", v) else v) for n, v in headers]
    if (b"transfer-encoding", b"chunked") in headers:
        joined = b""
        while True:
            size, _, body = body.partition(b"\r\n")
            length = int(size, 16)
            joined, end, body = joined + body[:length], body[length : length + 2], body[length + 2 :]
            assert end == b"\r\n"
            if not length:
                break
        assert body == b""
        body = joined
    return int(line.split(b" ")[1]), headers, body


def id_of(written: bytes) -> bytes:
    (found,) = re.findall(rb"\r\nx-request-id: (.*)\r\n", written)
    return found  # type: ignore[no-any-return]


JSON = b"content-type: application/json"
SSE = b"content-type: text/event-stream"
FOR_STREAMS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
CHUNKED = (b"transfer-encoding", b"chunked")


def pair(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b": ")
    return name.lower(), value


def length(body: bytes) -> tuple[bytes, bytes]:
    return b"content-length", b"%d" % len(body)


# What an engine sends, in reads; and what a client gets of it but for its x-request-id: status, headers before and
# behind that, body.
CASES: dict[str, tuple[list[bytes], int, Pairs, Pairs, bytes]] = {
    "plain": (
        [wire(DATE, b"Server: uvicorn", JSON, body=BODY)],
        200,
        [pair(DATE), (b"server", b"uvicorn"), pair(JSON), length(BODY)],
        [],
        BODY,
    ),
    "its own hop, its own id, its own pages": (
        [
            wire(
                JSON,
                b"Connection: keep-alive, X-Hop",
                b"X-Hop: 1",
                b"Keep-Alive: timeout=9",
                b"Proxy-Authenticate: Basic",
                b"X-Request-Id: the-engines",
                b"X-Kept: 1",
                b"Set-Cookie: a=1",
                b"Set-Cookie: b=2",
                body=BODY,
            )
        ],
        200,
        [pair(JSON), (b"x-kept", b"1"), (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"), length(BODY)],
        [],
        BODY,
    ),
    "encoded": (
        [wire(JSON, b"Content-Encoding: gzip", body=b"\x1f\x8b\x08\0")],
        200,
        [pair(JSON), (b"content-encoding", b"gzip"), length(b"1234")],
        [],
        b"\x1f\x8b\x08\0",
    ),
    "an error of the engine's": (
        [wire(JSON, body=ERROR, status=b"500 Internal Server Error")],
        500,
        [pair(JSON), length(ERROR)],
        [],
        ERROR,
    ),
    "a refusal of the engine's": (
        [wire(JSON, b"Retry-After: 7", body=ERROR, status=b"404 Not Found")],
        404,
        [pair(JSON), (b"retry-after", b"7"), length(ERROR)],
        [],
        ERROR,
    ),
    "nothing": (
        [wire(DATE, body=b"x", status=b"204 No Content")[:-1]],
        204,
        [pair(DATE)],
        [],
        b"",
    ),
    "empty": ([wire(JSON)], 200, [pair(JSON), length(b"")], [], b""),
    "early hints": (
        [b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nContent-Length: 3\r\n\r\n" + wire(JSON, body=BODY)],
        200,
        [pair(JSON), length(BODY)],
        [],
        BODY,
    ),
    "in two reads": (
        [wire(JSON, body=BODY)[:-9], BODY[-9:]],
        200,
        [pair(JSON), length(BODY)],
        [],
        BODY,
    ),
    "chunked": (
        [wire(JSON, b"Transfer-Encoding: chunked", length=False), *chunks(BODY[:9], BODY[9:])],
        200,
        [pair(JSON)],
        [CHUNKED],
        BODY,
    ),
    "chunked, in one read": (
        [wire(JSON, b"Transfer-Encoding: chunked", length=False) + b"".join(chunks(BODY[:9], BODY[9:]))],
        200,
        [pair(JSON)],
        [CHUNKED],
        BODY,
    ),
    "a stream": (
        [wire(SSE, b"Cache-Control: public", b"Transfer-Encoding: chunked", length=False), *chunks(*EVENTS)],
        200,
        [pair(SSE), *FOR_STREAMS],
        [CHUNKED],
        b"".join(EVENTS),
    ),
    "a stream, in one read": (
        [wire(SSE, b"Transfer-Encoding: chunked", length=False) + b"".join(chunks(*EVENTS))],
        200,
        [pair(SSE), *FOR_STREAMS],
        [CHUNKED],
        b"".join(EVENTS),
    ),
    "a stream with a length": (
        [wire(SSE, b"X-Accel-Buffering: yes", body=b"".join(EVENTS))],
        200,
        [pair(SSE), *FOR_STREAMS],
        [CHUNKED],
        b"".join(EVENTS),
    ),
    "a stream that is an error": (
        [wire(SSE, body=b"data: {}\n\n", status=b"400 Bad Request")],
        400,
        [pair(SSE), *FOR_STREAMS],
        [CHUNKED],
        b"data: {}\n\n",
    ),
}


def in_bytes(pieces: Sequence[bytes]) -> list[bytes]:
    joined = b"".join(pieces)
    return [joined[i : i + 1] for i in range(len(joined))]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bytewise", [False, True], ids=["as sent", "byte by byte"])
async def test_the_same_answer_comes_the_same_each_time(name: str, bytewise: bool) -> None:
    pieces, status, before, behind, body = CASES[name]
    if bytewise:
        pieces = in_bytes(pieces)
    engine = Engine(lambda _: pieces)
    async with between(engine) as (client, server, transport):
        written = [await client.ask(request(n=n)) for n in (0, 0, 100, 7)]
        for one in written:
            assert parted(one) == (status, [*before, (b"x-request-id", ID), *behind], body)
        assert len({id_of(one) for one in written}) == TIMES
        assert (server.accepted, transport.open, transport.idle) == (1, 1, 1)
        assert not client.side.closing
        ids = [dict(headers)[b"x-request-id"] for _, headers, _ in engine.requests]
        assert ids == [id_of(one) for one in written]
        assert [len(body) for _, _, body in engine.requests] == [27, 27, 127, 34]
        other = Client(client.app)  # the engine's same connection
        assert parted(await other.ask(request())) == (status, [*before, (b"x-request-id", ID), *behind], body)
        assert server.accepted == 1
        other.leave()


ORIGIN = b"https://chat.example"


@pytest.mark.parametrize(
    ("origins", "origin"), [("*", ORIGIN), (ORIGIN.decode(), ORIGIN), (ORIGIN.decode(), b"https://evil")]
)
async def test_what_web_pages_are_told_is_ours_each_time(origins: str, origin: bytes) -> None:
    said = wire(JSON, b"Access-Control-Allow-Origin: https://engine", b"Access-Control-Max-Age: 5", body=BODY)
    exposed = (b"access-control-expose-headers", b"x-request-id, retry-after, server-timing")
    vary = [(b"vary", b"origin")]
    ours = {
        "*": [(b"access-control-allow-origin", b"*"), exposed],
        ORIGIN.decode(): [(b"access-control-allow-origin", ORIGIN), exposed, *vary] if origin == ORIGIN else vary,
    }[origins]
    expected = [pair(JSON), length(BODY), (b"x-request-id", ID), *ours]
    async with between(Engine(lambda _: [said]), cors_origins=[origins]) as (client, server, _):
        for _ in range(TIMES):
            assert parted(await client.ask(request(b"Origin: " + origin))) == (200, expected, BODY)
        assert server.accepted == 1


async def test_a_page_of_another_origin_on_the_same_connection_gets_its_own_leave() -> None:
    """Behind a proxy many pages share one, and their heads differ in this line alone."""
    async with between(Engine(lambda _: [wire(JSON, body=BODY)]), cors_origins=[ORIGIN.decode()]) as (client, _, _):
        for origin in (ORIGIN, ORIGIN, b"https://evil.exampl", ORIGIN):
            _, headers, _ = parted(await client.ask(request(b"Origin: " + origin)))
            allowed = dict(headers).get(b"access-control-allow-origin")
            assert allowed == (ORIGIN if origin == ORIGIN else None)


async def test_answers_that_differ_a_little_come_as_they_are() -> None:
    """The head of before is no head of now: a date, a length, a status, a type, a name."""
    sent = [
        (wire(DATE, JSON, body=BODY), 200, [pair(DATE), pair(JSON), length(BODY)], BODY),
        (wire(DATE.replace(b"12:00:00", b"12:00:01"), JSON, body=BODY), 200, None, BODY),
        (wire(DATE, JSON, body=BODY + b" "), 200, None, BODY + b" "),
        (wire(DATE, JSON, body=ERROR, status=b"400 OK"), 400, None, ERROR),
        (wire(DATE, JSON, body=ERROR, status=b"500 OK"), 500, None, ERROR),
        (wire(DATE, JSON, b"Content-Encoding: gzip", body=b"abc"), 200, None, b"abc"),
        (wire(DATE, JSON, b"Content-Encoding: br", body=b"abc"), 200, None, b"abc"),
        (wire(DATE, JSON, b"X-A: 1", body=BODY), 200, None, BODY),
        (wire(DATE, JSON, b"X-B: 1", body=BODY), 200, None, BODY),
        (wire(DATE, JSON, body=BODY), 200, None, BODY),
    ]
    async with between(Engine(lambda n: [sent[n][0]])) as (client, server, _):
        for said, status, headers, body in sent:
            head = said[: -len(body)].split(b"\r\n")[1:-2]
            headers = headers or [pair(line) for line in head]
            assert parted(await client.ask(request())) == (status, [*headers, (b"x-request-id", ID)], body)
        assert server.accepted == 1


async def test_equal_heads_with_other_lengths_have_each_its_own() -> None:
    bodies = [BODY, BODY + b" ", ERROR, b"", BODY, BODY]
    async with between(Engine(lambda n: [wire(JSON, body=bodies[n])])) as (client, server, _):
        for body in bodies:
            expected = [pair(JSON), length(body), (b"x-request-id", ID)]
            assert parted(await client.ask(request())) == (200, expected, body)
        assert server.accepted == 1


async def test_equal_requests_that_come_together_behind_one_are_all_served() -> None:
    engine = Engine(lambda _: [wire(JSON, body=BODY)])
    async with between(engine) as (client, _, _):
        await client.ask(request())
        for together in (b"".join(request(n=n) for n in (1, 2, 3)), request(n=4) + request(n=5), request(n=6)):
            client.protocol.data_received(together)
            await turns(1)
        await until(lambda: bytes(client.side.written).count(BODY) == 7 and not client.state.tasks)
        assert [len(body) for _, _, body in engine.requests] == [27 + n for n in range(7)]


async def test_streams_and_answers_take_turns_on_one_connection() -> None:
    kinds = [
        "plain",
        "a stream",
        "plain",
        "plain",
        "a stream with a length",
        "chunked",
        "a stream",
        "a stream",
        "plain",
    ]
    async with between(Engine(lambda n: CASES[kinds[n]][0])) as (client, server, _):
        for kind in kinds:
            _, status, before, behind, body = CASES[kind]
            assert parted(await client.ask(request())) == (status, [*before, (b"x-request-id", ID), *behind], body)
        assert server.accepted == 1


@pytest.mark.parametrize("behind", [b"x", wire(JSON, body=BODY), b"HTTP/1.1 200 OK\r\n"])
async def test_what_an_engine_sends_behind_its_answer_reaches_nobody(behind: bytes) -> None:
    pieces = [wire(JSON, body=BODY) + behind]
    async with between(Engine(lambda _: pieces)) as (client, server, transport):
        for n in range(1, TIMES):
            assert parted(await client.ask(request()))[2] == BODY
            assert (server.accepted, transport.open) == (n, 0)


@pytest.mark.parametrize("close", [True, False])
async def test_an_engine_that_closes_is_asked_on_a_new_connection(close: bool) -> None:
    """Also where it does not say so: not one request is lost, none is sent twice."""
    engine = Engine(lambda _: [wire(JSON, *[b"Connection: close"] * close, body=BODY)])
    engine.ends = True
    async with between(engine) as (client, server, transport):
        for n in range(1, TIMES):
            assert parted(await client.ask(request())) == (200, [pair(JSON), length(BODY), (b"x-request-id", ID)], BODY)
            await until(lambda: transport.open == 0)
            assert server.accepted == len(engine.requests) == n


@pytest.mark.parametrize("length_said", [b"+41", b"41, 41", b"41\r\nContent-Length: 41", b"4_1", b"0x29", b""])
async def test_an_answer_that_is_none_is_a_502_behind_two_that_were_good(length_said: bytes) -> None:
    good = wire(JSON, body=BODY)
    broken = good.replace(b"Content-Length: 41", b"Content-Length: " + length_said)
    async with between(Engine(lambda n: [broken if n == 2 else good])) as (client, server, _):
        statuses = [parted(await client.ask(request()))[0] for _ in range(TIMES)]
        assert statuses == [200, 200, 502, 200] and server.accepted == 2


@pytest.mark.parametrize("fault", [b"0x1\r\na\r\n", b"+1\r\na\r\n", b"1\r\nab\r\n", b"1\r\na\n", b"g\r\na\r\n"])
async def test_a_stream_that_breaks_in_a_chunk_ends_with_an_error_each_time(fault: bytes) -> None:
    start = wire(SSE, b"Transfer-Encoding: chunked", length=False)
    pieces = [start, *chunks(*EVENTS[:2])[:-1], fault]
    async with between(Engine(lambda _: pieces)) as (client, server, _):
        for n in range(1, TIMES):
            status, headers, body = parted(await client.ask(request()))
            assert status == 200 and CHUNKED in headers
            assert body.startswith(b"".join(EVENTS[:2])) and b"engine_broke_off" in body and DONE not in body
            assert server.accepted == n and not client.side.closing


async def test_an_error_of_ours_looks_the_same_each_time() -> None:
    """Of the same head some are refused for their body, and an engine never hears of them."""
    engine = Engine(lambda _: [wire(JSON, body=BODY)])
    bad = request().replace(b'{"model"', b'["model"')
    async with between(engine) as (client, _, _):
        answers = [parted(await client.ask(one)) for one in (request(), bad, request(), bad, request(), bad)]
        assert [status for status, _, _ in answers] == [200, 400] * 3
        assert answers[1] == answers[3] == answers[5] and answers[0] == answers[2] == answers[4]
        assert len(engine.requests) == 3


@pytest.mark.parametrize("name", ["plain", "a stream"])
async def test_requests_that_come_together_get_their_answers_in_order(name: str) -> None:
    pieces, status, before, behind, body = CASES[name]
    engine = Engine(lambda _: pieces)
    async with between(engine) as (client, _, _):
        await client.ask(request())
        ids = [b"id-%d" % n for n in range(6)]
        same = [request(b"X-Request-Id: " + one, n=n) for n, one in enumerate(ids)]
        client.side.written.clear()
        client.protocol.data_received(same[0] + same[1] + same[2])
        for one in same[3:]:
            client.protocol.data_received(one)
        await until(lambda: bytes(client.side.written).count(b"x-request-id: ") == 6 and not client.state.tasks)
        assert re.findall(rb"x-request-id: (\S+)", bytes(client.side.written)) == ids
        assert [len(sent) for _, _, sent in engine.requests[1:]] == [27 + n for n in range(6)]
        assert [line for line, _, _ in engine.requests] == [b"POST /v1/chat/completions HTTP/1.1"] * 7
        assert parted(await client.ask(request())) == (status, [*before, (b"x-request-id", ID), *behind], body)


async def test_what_an_engine_gets_is_the_same_each_time() -> None:
    lines = [b"Accept: a/b", b"Connection: keep-alive, X-Hop", b"X-Hop: 1", b"TE: trailers", b"Authorization: Bearer k"]
    engine = Engine(lambda _: [wire(JSON, body=BODY)])
    async with between(engine) as (client, server, _):
        for n in (0, 0, 9, 0):
            await client.ask(request(*lines, b"X-Request-Id: mine", n=n))
        host = server.url.removeprefix("http://").encode()
        for n, (line, headers, body) in zip((0, 0, 9, 0), engine.requests, strict=True):
            assert line == b"POST /v1/chat/completions HTTP/1.1" and len(body) == 27 + n
            assert headers == [
                (b"host", host),
                (b"accept", b"a/b"),
                (b"x-forwarded-for", b"127.0.0.1"),
                (b"x-forwarded-host", b"h"),
                (b"x-forwarded-proto", b"http"),
                (b"x-request-id", b"mine"),
                (b"content-length", b"%d" % (27 + n)),
            ]


# --- what it was, and when it ends


async def test_what_became_of_each_request_is_noted_each_time() -> None:
    """200 and 404 and 500 behind one of its kind, and each with another length."""
    said = [(b"200 OK", 0), (b"200 OK", 9), (b"404 No", 26), (b"404 No", 2), (b"500 No", 26), (b"500 No", 700)]
    figures = Figures()
    engine = Engine(lambda n: [wire(JSON, status=said[n][0], body=b"x" * said[n][1])])
    async with between(engine, figures) as (client, server, _):
        for n in range(len(said)):
            await client.ask(request(n=n))
        assert server.accepted == 1
        found = [(one.status, one.bytes_in, one.bytes_out, one.outcome, one.node) for one in figures.ended]
        outcomes = [Outcome.OK, Outcome.OK, *[Outcome.CLIENT_ERROR] * 2, *[Outcome.ENGINE_ERROR] * 2]
        assert found == [
            (int(status[:3]), 27 + n, size, outcome, server.url)
            for n, ((status, size), outcome) in enumerate(zip(said, outcomes, strict=True))
        ]


async def test_a_worker_that_stops_says_so_with_the_same_answer_too() -> None:
    async with between(Engine(lambda _: [wire(JSON, body=BODY)])) as (client, _, _):
        for _ in range(2):
            assert b"connection: close" not in await client.ask(request())
        client.app.begin_shutdown(asyncio.get_running_loop().time() + 1000)
        expected = [pair(JSON), length(BODY), (b"x-request-id", ID), (b"connection", b"close")]
        assert parted(await client.ask(request())) == (200, expected, BODY)
        assert client.side.closing


class TakesWhole:
    """A client's wire that takes whole answers only."""

    def __init__(self, of: FakeAnswer) -> None:
        self.of = of
        self.taken: tuple[int, bytes, bytes] | None = None

    def answer(self, status: int, lines: bytes, body: bytes) -> None:
        assert self.of.outcomes, "a client that asks again at once would meet its own count"
        self.taken = status, lines, body


async def test_an_answer_is_measured_and_released_before_it_leaves_at_once() -> None:
    top = wire(JSON)
    kept = Head.begins(top, [pair(JSON), length(b"")])
    assert kept is not None
    for body, tokens in ((b'{"usage":{"completion_tokens":37}}', 37), (b"x" * 400, 100), (b"", 0)):
        headers = kept.of(top.replace(b"h: 0", b"h: %d" % len(body)))
        assert headers is not None
        answer = FakeAnswer(body, headers=headers)
        client = TakesWhole(answer)
        assert relay_again(answer, headers, client, Served("/v1/x"), b"id") is Outcome.OK  # type: ignore[arg-type]
        assert client.taken == (200, b"%b\r\ncontent-length: %d\r\nx-request-id: id\r\n" % (JSON, len(body)), body)
        assert (answer.tokens, answer.outcomes) == (tokens, [Outcome.OK])
