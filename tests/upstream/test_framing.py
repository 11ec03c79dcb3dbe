"""Every way in which an answer can be framed, in any fragmentation, against hand-worked results and aiohttp."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp
import pytest

from app.errors import EngineBroke
from app.upstream.http1 import Http1Transport
from tests.upstream.client import ask, whole
from tests.upstream.scripted import Peer, Script, ScriptedServer, always, until

OK = b"HTTP/1.1 200 OK\r\n"


@dataclass(frozen=True)
class Case:
    """An answer's bytes and what they mean, worked out by hand from RFC 9112."""

    wire: bytes
    body: bytes
    status: int = 200
    reused: bool = True  # whether the connection may carry another request
    method: bytes = b"POST"
    eof: bool = False  # the engine's end of the connection is the end of the answer


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
HI = OK + b"Content-Length: 2\r\n\r\nhi"

CASES = {
    "content-length": Case(OK + b"Content-Length: 5\r\n\r\nhello", b"hello"),
    "content-length zero": Case(OK + b"Content-Length: 0\r\n\r\n", b""),
    "chunked": Case(CHUNKED + b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n", b"hello world"),
    "chunked, nothing in it": Case(CHUNKED + b"0\r\n\r\n", b""),
    "chunked in capitals": Case(OK + b"TRANSFER-ENCODING: CHUNKED\r\n\r\n1\r\na\r\n0\r\n\r\n", b"a"),
    "chunked, padded size": Case(CHUNKED + b"00A\r\n0123456789\r\n0\r\n\r\n", b"0123456789"),
    "chunked with extension": Case(CHUNKED + b"2;a=b;c\r\nhi\r\n0;z\r\n\r\n", b"hi"),
    "chunked with trailers": Case(CHUNKED + b"2\r\nhi\r\n0\r\nX-Sum: 9\r\nX-Empty:\r\n\r\n", b"hi"),
    "body that looks like framing": Case(OK + b"Content-Length: 10\r\n\r\n0\r\n\r\nHTTP/", b"0\r\n\r\nHTTP/"),
    "close-delimited": Case(OK + b"Content-Type: text/plain\r\n\r\nhello", b"hello", reused=False, eof=True),
    "close-delimited, nothing in it": Case(OK + b"\r\n", b"", reused=False, eof=True),
    "close-delimited, HTTP/1.0": Case(b"HTTP/1.0 200 OK\r\n\r\nhello", b"hello", reused=False, eof=True),
    "HTTP/1.0 with a length": Case(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi", b"hi", reused=False),
    "HTTP/1.0 keep-alive": Case(b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nhi", b"hi"),
    "connection close": Case(OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nhi", b"hi", reused=False),
    "close among others": Case(OK + b"Connection: x, Close\r\nContent-Length: 2\r\n\r\nhi", b"hi", reused=False),
    "204": Case(b"HTTP/1.1 204 No Content\r\n\r\n", b"", status=204),
    "304 and a length": Case(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\n\r\n", b"", status=304),
    "HEAD and a length": Case(OK + b"Content-Length: 99\r\n\r\n", b"", method=b"HEAD", reused=False),
    "HEAD and a body all the same": Case(HI, b"", method=b"HEAD", reused=False),
    "HEAD, chunked": Case(CHUNKED, b"", method=b"HEAD", reused=False),
    "100 before": Case(b"HTTP/1.1 100 Continue\r\n\r\n" + HI, b"hi"),
    "103 with headers before": Case(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + HI, b"hi"),
    "no reason": Case(b"HTTP/1.1 429\r\nContent-Length: 2\r\n\r\nhi", b"hi", status=429),
    "error with a body": Case(b'HTTP/1.1 500 Oh\r\nContent-Length: 4\r\n\r\n{"a"', b'{"a"', status=500),
}


def play(case: Case, size: int) -> Script:
    """The case's bytes, `size` at a time, once for each request."""
    pieces = [case.wire[i : i + size] for i in range(0, len(case.wire), size)]

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(*pieces)
            if case.eof:
                return

    return script


@pytest.mark.parametrize("name", CASES)
async def test_framing_is_understood_in_any_fragmentation(transport: Http1Transport, name: str) -> None:
    case = CASES[name]
    for size in (1, 7, 1 << 20):
        async with ScriptedServer(play(case, size)) as server:
            for _ in range(2):  # twice: what is left of one answer must not leak into the next
                response = await ask(transport, server.url, method=case.method)
                assert response.status == case.status
                assert await whole(response) == case.body
            assert server.accepted == (1 if case.reused else 2)
            assert transport.idle == (1 if case.reused else 0)
        await until(lambda: transport.open == 0)  # the server has closed


@pytest.mark.parametrize("name", [name for name in CASES if "all the same" not in name])
async def test_aiohttp_reads_the_same(transport: Http1Transport, name: str) -> None:
    case = CASES[name]
    async with ScriptedServer(play(case, 16)) as server:
        ours = await ask(transport, server.url, method=case.method)
        body = await whole(ours)
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.request(case.method.decode(), server.url, data=b"{}") as theirs,
        ):
            assert (ours.status, body) == (theirs.status, await theirs.read())
            assert ours.headers == [(name.lower(), value) for name, value in theirs.raw_headers]


async def test_headers_come_as_sent(transport: Http1Transport) -> None:
    lines = b"Set-Cookie: a=1\r\nX-Empty:\r\nSET-COOKIE: b=2\r\nX-Latin: \xe9\xff\r\nX-Wide:   v\r\n"
    async with ScriptedServer(always(OK + lines + b"Content-Length: 0\r\n\r\n")) as server:
        response = await ask(transport, server.url)
    assert response.headers == [
        (b"set-cookie", b"a=1"),
        (b"x-empty", b""),
        (b"set-cookie", b"b=2"),
        (b"x-latin", b"\xe9\xff"),
        (b"x-wide", b"v"),
        (b"content-length", b"0"),
    ]


async def test_trailers_and_early_hints_are_no_headers(transport: Http1Transport) -> None:
    wire = (
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
        + OK
        + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX-Sum: 9\r\n\r\n"
    )
    async with ScriptedServer(always(wire)) as server:
        response = await ask(transport, server.url)
        assert await whole(response) == b"a"
    assert response.headers == [(b"transfer-encoding", b"chunked")]


async def test_read_gives_what_came_when_it_came(transport: Http1Transport) -> None:
    first, second = b"data: \xe4\xbd", b"\xa0\n\ndata: [DONE]\n\n"  # split inside a character

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK + b"Transfer-Encoding: chunked\r\n\r\n")
        await peer.send(b"%x\r\n%b\r\n" % (len(first), first))
        await peer.reader.readexactly(1)  # nothing more until the client has seen the first
        await peer.send(b"%x\r\n%b\r\n" % (len(second), second), b"0\r\n\r\n")

    async with ScriptedServer(script) as server:
        response = await ask(transport, server.url)
        assert await response.read() == first
        transport_of(response).write(b"!")
        assert await response.read() == second
        assert await response.read() == b""
        assert await response.read() == b""


async def test_what_waits_is_read_at_once(transport: Http1Transport) -> None:
    wire = OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 3 + b"0\r\n\r\n"
    async with ScriptedServer(always(wire)) as server:
        response = await ask(transport, server.url)
        assert await response.read() == b"aaa"


@pytest.mark.parametrize(
    "wire",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x00\x00\x12\x04\x00\x00\x00\x00\x00",  # HTTP/2 settings
        b"HTTP/1.1 abc OK\r\n\r\n",
        OK + b"Bad Header: x\r\n\r\n",
        OK + b"X: a\r\n folded\r\n\r\n",
        OK + b"X: nul\x00\r\n\r\n",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        OK + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",  # the classic of smuggling
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    ],
)
async def test_what_is_no_answer_breaks(transport: Http1Transport, wire: bytes) -> None:
    async with ScriptedServer(always(wire)) as server:
        with pytest.raises(EngineBroke, match=f"engine {server.url} broke off: what it sent is no valid HTTP"):
            await ask(transport, server.url)
        assert transport.open == 0


async def test_broken_chunk_breaks_after_what_came_before(transport: Http1Transport) -> None:
    async with ScriptedServer(always(OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\nzz\r\n")) as server:
        response = await ask(transport, server.url)
        assert await response.read() == b"hi"
        with pytest.raises(EngineBroke) as caught:
            await response.read()
        assert caught.value.__cause__ is not None
        assert transport.open == 0


HEADER = b"X-Long: " + b"a" * 1000 + b"\r\n"


@pytest.mark.parametrize("count", [60, 70])
@pytest.mark.parametrize("size", [1 << 20, 10_000])
async def test_head_is_bounded(transport: Http1Transport, count: int, size: int) -> None:
    wire = OK + HEADER * count + b"Content-Length: 2\r\n\r\nhi"  # 60 KB, 70 KB
    pieces = [wire[i : i + size] for i in range(0, len(wire), size)]
    async with ScriptedServer(always(*pieces)) as server:
        if count == 60:
            assert await whole(await ask(transport, server.url)) == b"hi"
        else:
            with pytest.raises(EngineBroke, match="longer than 65536 bytes"):
                await ask(transport, server.url)


async def test_short_head_before_a_long_body_is_no_long_head(transport: Http1Transport) -> None:
    body = b"x" * 200_000
    async with ScriptedServer(always(OK + b"Content-Length: 200000\r\n\r\n" + body)) as server:
        assert await whole(await ask(transport, server.url)) == body


@pytest.mark.parametrize("endless", [b"HTTP/1.1 100 Continue\r\n\r\n", b"a" * 1000])
async def test_endless_head_is_bounded(transport: Http1Transport, endless: bytes) -> None:
    async with ScriptedServer(always(OK[:9] if endless[:1] == b"a" else b"", *[endless] * 4000)) as server:
        with pytest.raises(EngineBroke):
            await ask(transport, server.url)


@pytest.mark.parametrize("endless", [HEADER, b"X-Long: " + b"a" * 100_000])
async def test_endless_trailers_are_bounded(transport: Http1Transport, endless: bytes) -> None:
    pieces = [OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n"] + [endless] * 80
    async with ScriptedServer(always(*pieces)) as server:
        response = await ask(transport, server.url)
        assert await response.read() == b"hi"
        with pytest.raises(EngineBroke, match="longer than 65536 bytes"):
            await response.read()


async def test_long_lines_and_bodies_pass_whole(transport: Http1Transport) -> None:
    line = b"data: " + b"\xf0\x9f\x98\x80" * 2_000_000 + b"\n\n"  # R45: 8 MB in one line
    async with ScriptedServer(
        always(OK + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(line), line, b"\r\n0\r\n\r\n")
    ) as server:
        assert await whole(await ask(transport, server.url)) == line


@pytest.mark.parametrize("rubbish", [b"HTTP/1.1 2", OK + b"Content-Length: 0\r\n\r\n", b"zzz", b"\x00"])
@pytest.mark.parametrize("together", [True, False])
async def test_second_answer_is_not_believed(transport: Http1Transport, rubbish: bytes, together: bool) -> None:
    wire = OK + b"Content-Length: 2\r\n\r\nhi"
    pieces = [wire + rubbish] if together else [wire, rubbish]
    async with ScriptedServer(always(*pieces)) as server:
        assert await whole(await ask(transport, server.url)) == b"hi"
        await until(lambda: transport.open == 0)
        assert await whole(await ask(transport, server.url)) == b"hi"
        assert server.accepted == 2


def transport_of(response: object) -> asyncio.Transport:
    """The socket's transport below an answer that has not ended."""
    return response._connection._transport  # type: ignore[attr-defined, no-any-return]
