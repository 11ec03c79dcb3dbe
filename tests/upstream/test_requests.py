"""What is written to an engine, byte by byte, and what is refused."""

from __future__ import annotations

import socket

import pytest

from app.errors import BadRequest
from app.upstream.http1 import Http1Transport, write_head
from app.upstream.transport import Target
from tests.upstream.client import ask, whole
from tests.upstream.scripted import Peer, ScriptedServer, always

HI = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


@pytest.mark.parametrize(
    ("url", "host", "port", "prefix", "header", "origin"),
    [
        ("http://10.0.0.5:23333", "10.0.0.5", 23333, b"", b"10.0.0.5:23333", "http://10.0.0.5:23333"),
        ("http://engine", "engine", 80, b"", b"engine", "http://engine:80"),
        ("https://engine/a/b", "engine", 443, b"/a/b", b"engine", "https://engine:443"),
        ("http://[::1]:8000/x", "::1", 8000, b"/x", b"[::1]:8000", "http://::1:8000"),
    ],
)
def test_target_is_parsed_once(url: str, host: str, port: int, prefix: bytes, header: bytes, origin: str) -> None:
    target = Target(url)
    assert (target.host, target.port, target.prefix, target.host_header) == (host, port, prefix, header)
    assert (target.origin, target.url, repr(target)) == (origin, url, f"Target({url!r})")
    assert target.is_literal == (host != "engine")


@pytest.mark.parametrize("url", ["ftp://a", "a:1", "http://", "/v1"])
def test_target_is_no_validator_but_takes_no_nonsense(url: str) -> None:
    with pytest.raises(ValueError, match="not a normalised engine URL"):
        Target(url)


def test_head_is_what_was_given_and_host_and_length() -> None:
    headers = [(b"Accept", b"*/*"), (b"x-twice", b"1"), (b"x-twice", b"2"), (b"x-latin", b"\xe9")]
    assert write_head(Target("http://[::1]:8000/up"), b"POST", b"/v1/x?a=b", headers, b"body") == (
        b"POST /up/v1/x?a=b HTTP/1.1\r\nhost: [::1]:8000\r\nAccept: */*\r\nx-twice: 1\r\nx-twice: 2\r\n"
        b"x-latin: \xe9\r\ncontent-length: 4\r\n\r\n"
    )


@pytest.mark.parametrize(
    ("method", "body", "length"),
    [
        (b"POST", b"", b"content-length: 0\r\n"),
        (b"GET", b"", b""),
        (b"HEAD", b"", b""),
        (b"GET", b"ab", b"content-length: 2\r\n"),
    ],
)
def test_length_is_said_where_a_body_may_be(method: bytes, body: bytes, length: bytes) -> None:
    head = write_head(Target("http://a"), method, b"/", [], body)
    assert head == method + b" / HTTP/1.1\r\nhost: a\r\n" + length + b"\r\n"


@pytest.mark.parametrize("bad", [b"a\rb", b"a\nb", b"a\r\nx: y", b"a\0b", b"\r\n\r\nGET / HTTP/1.1"])
@pytest.mark.parametrize("where", ["name", "value", "path", "method"])
def test_line_ends_and_nul_are_refused(bad: bytes, where: str) -> None:
    headers = [(b"x-good", b"1"), (bad, b"1") if where == "name" else (b"x-bad", bad if where == "value" else b"1")]
    method = bad if where == "method" else b"POST"
    with pytest.raises(BadRequest) as caught:
        write_head(Target("http://a"), method, bad if where == "path" else b"/", headers, b"")
    if where == "value":
        assert caught.value.message == "the request header 'x-bad' holds a line end or a NUL"
    elif where != "name":
        assert caught.value.message == "the request's path holds a space, a line end or a NUL"


def test_space_in_the_path_is_refused() -> None:
    with pytest.raises(BadRequest):
        write_head(Target("http://a"), b"GET", b"/ HTTP/1.1", [], b"")


@pytest.mark.parametrize("size", [0, 10, 70_000])
async def test_engine_gets_exactly_this(transport: Http1Transport, size: int) -> None:
    seen = []

    async def script(peer: Peer) -> None:
        seen.append(await peer.request())
        await peer.send(HI)
        assert await peer.gone() == b""

    body = bytes(range(256)) * (size // 256) + b"\r\n"[: size % 256]
    async with ScriptedServer(script) as server:
        await whole(await ask(transport, server.url + "/pre", path=b"/v1/x?q=1", headers=[(b"a", b"b")], body=body))
        await transport.close()
    (request,) = seen
    assert request.line == b"POST /pre/v1/x?q=1 HTTP/1.1"
    assert request.headers == [
        (b"host", b"127.0.0.1:%d" % server.port),
        (b"a", b"b"),
        (b"content-length", b"%d" % len(body)),
    ]
    assert request.body == body


async def test_small_writes_are_not_held_back(transport: Http1Transport) -> None:
    """Both loops switch Nagle's algorithm off by themselves; this holds them to it."""
    async with ScriptedServer(always(HI)) as server:
        await whole(await ask(transport, server.url))
        for url in (server.url, f"http://localhost:{server.port}"):  # the two ways to connect
            await whole(await ask(transport, url))
            for connection in transport._pool.members:  # type: ignore[union-attr]
                sock = connection._transport.get_extra_info("socket")  # type: ignore[union-attr]
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_state_is_printable(transport: Http1Transport) -> None:
    async with ScriptedServer(always(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc")) as server:
        response = await ask(transport, server.url)
        where = f"<Connection {server.url} body served=1 buffered_bytes=3>"
        assert repr(response) == f"<Http1Response 200 buffered_bytes=3 {where}>"
        assert repr(transport._pool) == "<Pool open=1 idle=0 in_use=1>"
        response.close()
        assert repr(response) == "<Http1Response 200 buffered_bytes=0 failed>"
