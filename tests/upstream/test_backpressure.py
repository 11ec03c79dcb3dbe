"""A slow reader slows its engine and nobody else, in bounded memory."""

from __future__ import annotations

import asyncio

from app.upstream.connection import BUFFER_LIMIT_BYTES
from app.upstream.http1 import Http1Transport
from app.upstream.transport import pipe
from tests.upstream.client import ask, limits, whole
from tests.upstream.scripted import Peer, ScriptedServer, turns, until
from tests.upstream.test_giving_up import paused

SIZE = 64 * 1024
COUNT = 250  # 16 MB: more than the socket buffers of both sides take in
SOCKET_READ_BYTES = 256 * 1024


def buffered(response: object) -> int:
    chunks = response._chunks  # type: ignore[attr-defined]
    return sum(map(len, chunks))


async def test_slow_reader_slows_its_engine_in_bounded_memory(transport: Http1Transport) -> None:
    sent = 0

    async def script(peer: Peer) -> None:
        nonlocal sent
        request = await peer.request()
        if request.body == b"small":
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")
            return
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (SIZE * COUNT))
        for number in range(COUNT):
            peer.writer.write(bytes([number % 256]) * SIZE)
            await peer.writer.drain()
            sent += 1
        await peer.gone()

    async with ScriptedServer(script) as server:
        response = await ask(transport, server.url)
        await until(lambda: paused(response))
        await turns(50)
        stalled_at = sent
        assert stalled_at < COUNT
        assert BUFFER_LIMIT_BYTES < buffered(response) <= BUFFER_LIMIT_BYTES + SOCKET_READ_BYTES

        assert await whole(await ask(transport, server.url, body=b"small")) == b"hi"  # others are not slowed
        assert sent == stalled_at

        body = b""
        while data := await response.read():
            assert buffered(response) == 0
            assert len(data) <= BUFFER_LIMIT_BYTES + SOCKET_READ_BYTES
            body += data
        assert body == b"".join(bytes([number % 256]) * SIZE for number in range(COUNT))
        assert transport.idle == 1


async def test_paused_connection_reads_again_once_its_answer_is_complete(transport: Http1Transport) -> None:
    """Else the pool would keep a connection that can't notice the engine's close."""
    go, end = asyncio.Event(), asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        length = 4 * BUFFER_LIMIT_BYTES
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % length)
        peer.writer.write(b"x" * length)
        await peer.writer.drain()
        await end.wait()

    async with ScriptedServer(script) as server:
        response = await ask(transport, server.url)
        await until(lambda: paused(response))
        body = await whole(response)
        assert len(body) == 4 * BUFFER_LIMIT_BYTES
        assert transport.idle == 1
        go.set()
        end.set()
        await until(lambda: transport.open == 0)


async def test_a_client_that_is_behind_makes_no_engine_slow(transport: Http1Transport) -> None:
    """However the engine fares meanwhile: it may have sent what it has, or be kept from sending more."""
    idle_s = 0.15
    for more in (0, 16 * SIZE):
        taken = asyncio.Event()

        async def script(peer: Peer, more: int = more, taken: asyncio.Event = taken) -> None:
            await peer.request()
            await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (2 + more + 3))
            await peer.send(b"a")
            await turns(20)
            await peer.send(b"b" + b"x" * more)
            await taken.wait()
            await peer.send(b"end")

        came = bytearray()

        def sink(data: bytes, came: bytearray = came) -> bool:
            came.extend(data)
            return not data.startswith(b"b")

        async def drain(taken: asyncio.Event = taken) -> None:
            await asyncio.sleep(3 * idle_s)
            taken.set()

        async with ScriptedServer(script) as server:
            response = await ask(transport, server.url, timeouts=limits(idle=idle_s))
            await pipe(response, sink, drain)
        assert len(came) == 2 + more + 3
