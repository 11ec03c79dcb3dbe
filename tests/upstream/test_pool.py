"""Which connection carries which request: reuse, what ends it, and the one silent re-send."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from app.errors import EngineBroke, EngineRefused, EngineTimeout, ShuttingDown
from app.upstream.connection import Connection
from app.upstream.http1 import Http1Transport
from tests.upstream.client import ask, limits, whole
from tests.upstream.scripted import Peer, ScriptedServer, always, turns, until
from tests.upstream.unplugged import begun, connected

HI = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


async def test_connections_are_reused_and_counted(transport: Http1Transport) -> None:
    async with ScriptedServer(always(HI)) as server:
        assert repr(transport) == "<Http1Transport open=0 idle=0 in_use=0>"
        for _ in range(5):
            assert await whole(await ask(transport, server.url)) == b"hi"
        assert server.accepted == 1
        assert repr(transport) == "<Http1Transport open=1 idle=1 in_use=0>"


async def test_number_of_connections_has_no_limit(transport: Http1Transport) -> None:
    go = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await go.wait()
        await peer.send(HI)
        await peer.gone()

    async with ScriptedServer(script) as server:  # R51
        asking = [asyncio.ensure_future(ask(transport, server.url)) for _ in range(120)]
        await until(lambda: server.accepted == 120 and transport.in_use == 120)
        go.set()
        bodies = [await whole(await one) for one in asking]
        assert bodies == [b"hi"] * 120
        assert (transport.open, transport.idle, transport.in_use) == (120, 120, 0)


async def test_latest_used_connection_is_taken_first(transport: Http1Transport) -> None:
    served: list[int] = []

    async def script(peer: Peer) -> None:
        number = server.accepted
        while True:
            await peer.request()
            served.append(number)
            await until(lambda: server.accepted == 2)
            await peer.send(HI)

    async with ScriptedServer(script) as server:
        first, second = await asyncio.gather(ask(transport, server.url), ask(transport, server.url))
        await whole(first)
        await whole(second)
        await whole(await ask(transport, server.url))
        latest = served[-1]
        for _ in range(3):
            await whole(await ask(transport, server.url))
        assert served[2:] == [latest] * 4


async def test_connection_is_free_before_its_answer_is_read(transport: Http1Transport) -> None:
    async with ScriptedServer(always(HI)) as server:
        unread = await ask(transport, server.url)
        await until(lambda: transport.idle == 1)
        assert await whole(await ask(transport, server.url)) == b"hi"
        assert await whole(unread) == b"hi"
        assert server.accepted == 1


async def test_close_of_a_complete_answer_keeps_the_connection(transport: Http1Transport) -> None:
    async with ScriptedServer(always(HI)) as server:
        response = await ask(transport, server.url)
        await until(lambda: transport.idle == 1)
        response.close()
        response.close()
        await turns()
        assert transport.idle == 1


async def test_two_engines_share_no_connection(transport: Http1Transport) -> None:
    async with ScriptedServer(always(HI)) as one, ScriptedServer(always(HI)) as two:
        for server in (one, two, one, two):
            await whole(await ask(transport, server.url))
        assert (one.accepted, two.accepted) == (1, 1)


@pytest.mark.parametrize("how", ["eof", "reset", "bytes", "half"])
async def test_idle_connection_that_stirs_is_dropped(transport: Http1Transport, how: str) -> None:
    now = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(HI)
        if server.accepted == 1:
            await now.wait()
            if how == "reset":
                peer.reset()
            elif how == "bytes":
                await peer.send(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
                assert await peer.gone() == b""
            elif how == "half":
                peer.eof()
                assert await peer.gone() == b""
            return
        await peer.gone()

    async with ScriptedServer(script) as server:
        await whole(await ask(transport, server.url))
        assert transport.idle == 1
        now.set()
        await until(lambda: transport.open == 0)
        assert transport.idle == 0
        assert await whole(await ask(transport, server.url)) == b"hi"


async def test_half_closed_connection_is_not_taken_any_more() -> None:
    """Not even in the loop's round between its EOF and its end."""
    connection, socket, pool = connected()
    begun(connection)
    connection.data_received(HI)
    assert pool.idle == 1
    connection.eof_received()
    assert (pool.idle, pool.open, socket.aborted) == (0, 0, True)


class Stale:
    """An engine that closes a connection when its second request arrives, in the way that is asked for."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.requests: list[bytes] = []
        self.connections = 0

    async def __call__(self, peer: Peer) -> None:
        self.connections += 1
        first = self.connections == 1
        for number in range(3):
            request = await peer.request()
            self.requests.append(request.body)
            if first and number == 1:
                if self.how == "reset":
                    peer.reset()
                elif self.how == "byte":
                    await peer.send(b"H")
                elif self.how == "continue":
                    await peer.send(b"HTTP/1.1 100 Continue\r\n\r\n")
                return
            await peer.send(HI)


@pytest.mark.parametrize("how", ["eof", "reset"])
async def test_stale_connection_is_hidden_once(transport: Http1Transport, how: str) -> None:
    stale = Stale(how)
    async with ScriptedServer(stale) as server:  # R52
        await whole(await ask(transport, server.url, body=b"1"))
        assert await whole(await ask(transport, server.url, body=b"2")) == b"hi"
        assert stale.requests == [b"1", b"2", b"2"]
        assert server.accepted == 2


@pytest.mark.parametrize("how", ["byte", "continue"])
async def test_no_second_send_once_a_byte_has_come(transport: Http1Transport, how: str) -> None:
    stale = Stale(how)
    async with ScriptedServer(stale) as server:
        await whole(await ask(transport, server.url, body=b"1"))
        with pytest.raises(EngineBroke, match="closed the connection before it answered"):
            await ask(transport, server.url, body=b"2")
        assert stale.requests == [b"1", b"2"]


async def test_no_second_send_on_a_new_connection(transport: Http1Transport) -> None:
    requests = 0

    async def script(peer: Peer) -> None:
        nonlocal requests
        await peer.request()
        requests += 1

    async with ScriptedServer(script) as server:
        with pytest.raises(EngineBroke, match=f"engine {server.url} broke off: it closed"):
            await ask(transport, server.url)
        assert requests == 1
        assert transport.open == 0


async def test_second_send_is_the_last(transport: Http1Transport) -> None:
    requests = 0

    async def script(peer: Peer) -> None:
        nonlocal requests
        await peer.request()
        requests += 1
        if requests == 1:
            await peer.send(HI)
            await peer.request()
            requests += 1

    async with ScriptedServer(script) as server:
        await whole(await ask(transport, server.url))
        with pytest.raises(EngineBroke):
            await ask(transport, server.url)
        assert requests == 3


async def test_second_send_goes_to_a_new_connection(transport: Http1Transport) -> None:
    """With two stale connections in the pool a re-send through the other one would fail as well."""
    stale = asyncio.Event()
    requests = 0

    async def script(peer: Peer) -> None:
        nonlocal requests
        old = server.accepted <= 2
        await peer.request()
        await until(lambda: server.accepted >= 2)
        await peer.send(HI)
        if old:
            await peer.request()
            requests += 1
            return
        await peer.gone()

    async with ScriptedServer(script) as server:
        stale.set()
        first, second = await asyncio.gather(ask(transport, server.url), ask(transport, server.url))
        assert await whole(first) + await whole(second) == b"hihi"
        assert transport.idle == 2
        assert await whole(await ask(transport, server.url)) == b"hi"
        assert requests == 1


async def test_engine_that_is_gone_when_sent_again_is_refused(transport: Http1Transport) -> None:
    server = ScriptedServer(always(HI))

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(HI)
        await peer.request()
        server._server.close()

    server._script = script
    async with server:
        await whole(await ask(transport, server.url))
        with pytest.raises(EngineRefused):
            await ask(transport, server.url)


async def test_timeout_on_a_reused_connection_is_no_reason_to_send_again(transport: Http1Transport) -> None:
    requests = 0

    async def script(peer: Peer) -> None:
        nonlocal requests
        while True:
            await peer.request()
            requests += 1
            if requests == 1:
                await peer.send(HI)

    async with ScriptedServer(script) as server:
        await whole(await ask(transport, server.url))
        with pytest.raises(EngineTimeout):
            await ask(transport, server.url, timeouts=limits(first_byte=0.05))
        assert requests == 2
        assert transport.open == 0


async def test_early_answer_to_a_body_that_nobody_reads(transport: Http1Transport) -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        if server.accepted == 1:
            return  # closes with megabytes unread: an RST follows the answer
        await peer.gone()

    async with ScriptedServer(script) as server:
        for _ in range(2):
            response = await ask(transport, server.url, body=b"x" * 40_000_000)
            assert response.status == 413
            assert await whole(response) == b"no"
            await until(lambda: transport.open == 0)  # the rest of the body will never be sent
        assert server.accepted == 2


async def test_large_body_arrives_whole(transport: Http1Transport) -> None:
    bodies: list[bytes] = []

    async def script(peer: Peer) -> None:
        while True:
            bodies.append((await peer.request()).body)
            await peer.send(HI)

    sent = [bytes([n % 251]) * n for n in (0, 1, 65_536, 65_537, 20_000_000)]
    async with ScriptedServer(script) as server:
        for body in sent:
            assert await whole(await ask(transport, server.url, body=body)) == b"hi"
        assert server.accepted == 1
    assert bodies == sent


async def test_close_ends_everything() -> None:
    transport = Http1Transport()

    async def script(peer: Peer) -> None:
        if (await peer.request()).body == b"quick":
            await peer.send(HI)
        await peer.gone()

    async with ScriptedServer(script) as server:
        running = asyncio.ensure_future(ask(transport, server.url, body=b"slow"))
        await whole(await ask(transport, server.url, body=b"quick"))
        await until(lambda: server.accepted == 2)
        assert (transport.open, transport.idle) == (2, 1)
        await transport.close()
        with pytest.raises(EngineBroke):
            await running
        assert (transport.open, transport.idle) == (0, 0)
        await until(lambda: server.done == 2)
        with pytest.raises(ShuttingDown):
            await ask(transport, server.url)
        await transport.close()
        assert server.accepted == 2


class Meddled(Http1Transport):
    """Something happens to each connection between its making and its first request."""

    def __init__(self, meddle: Callable[[Connection], None]) -> None:
        super().__init__()
        self._meddle = meddle

    async def _open_socket(self, connection: Connection) -> None:
        await super()._open_socket(connection)
        self._meddle(connection)


@pytest.mark.parametrize(
    "meddle",
    [
        lambda connection: connection.eof_received(),
        lambda connection: connection.data_received(b"220 smtp.example ESMTP\r\n"),
    ],
)
async def test_connection_that_ends_before_its_request_breaks(meddle: Callable[[Connection], None]) -> None:
    async with ScriptedServer(always(HI)) as server:
        transport = Meddled(meddle)
        with pytest.raises(EngineBroke, match="closed the connection before it answered"):
            await ask(transport, server.url)
        assert transport.open == 0


async def test_close_while_a_connection_is_being_made() -> None:
    async with ScriptedServer(always(HI)) as server:
        transport = Meddled(lambda _: setattr(transport, "_closed", True))
        with pytest.raises(ShuttingDown):
            await ask(transport, server.url)
        assert transport.open == 0
