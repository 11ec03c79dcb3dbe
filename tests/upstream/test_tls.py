"""https engines: names are checked, failures are told, and giving up is as quick as without TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import trustme

from app.errors import EngineBroke, EngineRefused, EngineTimeout, EngineUnreachable
from app.upstream.http1 import Http1Transport
from app.upstream.transport import Target
from tests.upstream.client import ask, limits, whole
from tests.upstream.scripted import Peer, ScriptedServer, always, free_port, until

OK = b"HTTP/1.1 200 OK\r\n"
HI = OK + b"Content-Length: 2\r\n\r\nhi"
AUTHORITY = trustme.CA()


def serving(*names: str) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    AUTHORITY.issue_cert(*names).configure_cert(context)
    return context


@pytest_asyncio.fixture
async def private() -> AsyncIterator[Http1Transport]:
    """A transport that trusts the tests' authority."""
    context = ssl.create_default_context()
    AUTHORITY.configure_trust(context)
    transport = Http1Transport(tls=context)
    yield transport
    await transport.close()
    await until(lambda: transport.open == 0)


async def test_private_authority_is_taken_and_connections_are_reused(private: Http1Transport) -> None:
    async with ScriptedServer(always(HI), tls=serving("127.0.0.1", "localhost")) as server:
        for url in (server.url, f"https://localhost:{server.port}"):
            for _ in range(3):
                assert await whole(await ask(private, url)) == b"hi"
        assert server.accepted == 2
        assert private.idle == 2


async def test_large_bodies_both_ways(private: Http1Transport) -> None:
    async def script(peer: Peer) -> None:
        body = (await peer.request()).body
        peer.writer.write(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        await peer.writer.drain()
        await peer.gone()

    body = bytes(range(256)) * 20_000  # 5 MB
    async with ScriptedServer(script, tls=serving("127.0.0.1")) as server:
        assert await whole(await ask(private, server.url, body=body)) == body


async def test_wrong_name_is_refused(private: Http1Transport) -> None:
    async with ScriptedServer(always(HI), tls=serving("other.test")) as server:
        with pytest.raises(EngineUnreachable, match="TLS certificate was not accepted: .*127.0.0.1") as caught:
            await ask(private, server.url)
        assert isinstance(caught.value.__cause__, ssl.SSLCertVerificationError)
        assert not isinstance(caught.value, EngineRefused)


async def test_unknown_authority_is_refused(transport: Http1Transport) -> None:
    async with ScriptedServer(always(HI), tls=serving("127.0.0.1")) as server:
        with pytest.raises(EngineUnreachable, match="TLS certificate was not accepted"):
            await ask(transport, server.url)
        assert transport.open == 0


async def test_engine_without_tls(private: Http1Transport) -> None:
    async def script(peer: Peer) -> None:
        await peer.reader.read(1)
        await peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with ScriptedServer(script) as server:
        with pytest.raises(EngineUnreachable, match="TLS failed"):
            await ask(private, f"https://127.0.0.1:{server.port}")


async def test_refusal_is_a_refusal(private: Http1Transport) -> None:
    with free_port() as port, pytest.raises(EngineRefused):
        await ask(private, f"https://127.0.0.1:{port}")


async def test_silent_handshake_is_a_connect_timeout_and_leaves_nothing(private: Http1Transport) -> None:
    async def script(peer: Peer) -> None:
        await peer.gone()

    async with ScriptedServer(script) as server:
        url = f"https://127.0.0.1:{server.port}"
        with pytest.raises(EngineTimeout) as caught:
            await ask(private, url, timeouts=limits(connect=0.1))
        assert caught.value.stage == "connect"
        task = asyncio.ensure_future(ask(private, url))
        await until(lambda: server.accepted == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: server.done == 2, within_s=1)
        assert private.open == 0


async def test_end_in_the_handshake_is_unreachable(private: Http1Transport) -> None:
    async def script(peer: Peer) -> None:
        await peer.reader.read(1)

    async with ScriptedServer(script) as server:
        with pytest.raises(EngineUnreachable):
            await ask(private, f"https://127.0.0.1:{server.port}")


async def test_close_in_mid_answer_is_seen_by_the_engine(private: Http1Transport) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        await peer.gone()

    async with ScriptedServer(script, tls=serving("127.0.0.1")) as server:
        response = await ask(private, server.url)
        assert await response.read() == b"a"
        response.close()
        await until(lambda: server.done == 1, within_s=1)
        assert private.open == 0


@pytest.mark.parametrize("reset", [True, False])
async def test_end_in_the_body_breaks(private: Http1Transport, reset: bool) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK + b"Content-Length: 9\r\n\r\nabc")
        if reset:
            peer.reset()

    async with ScriptedServer(script, tls=serving("127.0.0.1")) as server:
        response = await ask(private, server.url)
        assert await response.read() == b"abc"
        with pytest.raises(EngineBroke, match="before its answer was complete"):
            await response.read()
        assert private.open == 0


async def test_close_delimited(private: Http1Transport) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(OK + b"\r\nabc", b"def")

    async with ScriptedServer(script, tls=serving("127.0.0.1")) as server:
        assert await whole(await ask(private, server.url)) == b"abcdef"


async def test_slow_reader_slows_its_engine(private: Http1Transport) -> None:
    sent = 0

    async def script(peer: Peer) -> None:
        nonlocal sent
        await peer.request()
        await peer.send(OK + b"Content-Length: %d\r\n\r\n" % (200 * 65536))
        for _ in range(200):
            peer.writer.write(b"x" * 65536)
            await peer.writer.drain()
            sent += 1
        await peer.gone()

    async with ScriptedServer(script, tls=serving("127.0.0.1")) as server:
        response = await ask(private, server.url)
        await until(lambda: bool(response._connection.paused))  # type: ignore[attr-defined]
        assert len(await whole(response)) == 200 * 65536
        assert private.idle == 1


async def test_a_host_header_is_sent_and_is_the_name_that_the_certificate_must_have(private: Http1Transport) -> None:
    heads: list[list[bytes]] = []

    async def script(peer: Peer) -> None:
        while True:
            heads.append((await peer.request()).header(b"host"))
            await peer.send(HI)

    async with ScriptedServer(script, tls=serving("engine.example", "other.example")) as server:
        for named, sent in (("engine.example", 2), ("other.example:8443", 1)):
            for _ in range(sent):
                target = Target(f"https://127.0.0.1:{server.port}", named)
                answer = await private.send(target, b"GET", b"/", (), b"", limits())
                assert await whole(answer) == b"hi"
        assert heads == [[b"engine.example"], [b"engine.example"], [b"other.example:8443"]]
        assert server.accepted == 2, "no connection is shared by two names"
        with pytest.raises(EngineUnreachable, match="certificate was not accepted"):
            await private.send(Target(server.url, "wrong.example"), b"GET", b"/", (), b"", limits())
        with pytest.raises(EngineUnreachable, match="certificate was not accepted"):
            await ask(private, server.url)


async def test_the_server_is_told_the_name_too(private: Http1Transport) -> None:
    asked: list[str | None] = []
    context = serving("engine.example")
    context.sni_callback = lambda _socket, name, _context: asked.append(name)
    async with ScriptedServer(always(HI), tls=context) as server:
        answer = await private.send(Target(server.url, "engine.example"), b"GET", b"/", (), b"", limits())
        assert await whole(answer) == b"hi"
    assert asked == ["engine.example"]
