"""Whoever stops waiting stops the engine: cancellation and close, at every stage, at once, leaving nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from typing import Any

import pytest

from app.errors import EngineBroke
from app.upstream.connection import Connection
from app.upstream.http1 import Http1Transport
from app.upstream.pool import Pool
from app.upstream.transport import Target
from tests.upstream.client import ask, whole
from tests.upstream.scripted import Peer, ScriptedServer, always, black_hole, turns, until
from tests.upstream.unplugged import FakeTransport, begun, connected

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
HI = OK + b"Content-Length: 2\r\n\r\nhi"


def open_sockets() -> int:
    count = 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists them is closed again
            count += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
    return count


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelled_connect_leaves_nothing(transport: Http1Transport) -> None:
    with black_hole() as port:
        before = open_sockets()
        for host in ("127.0.0.1", "localhost"):  # one address; names go another way
            task = asyncio.ensure_future(ask(transport, f"http://{host}:{port}"))
            await until(lambda: open_sockets() > before)
            await cancel(task)
            await until(lambda: open_sockets() == before)
        assert transport.open == 0


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 100 Continue\r\n\r\n", OK[:-5]])
async def test_cancelled_wait_for_the_head_is_seen_by_the_engine(transport: Http1Transport, answer: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer)
        arrived.set()
        await peer.gone()

    async with ScriptedServer(script) as server:  # R39 b, c
        for _ in range(3):
            arrived = asyncio.Event()
            task = asyncio.ensure_future(ask(transport, server.url))
            await arrived.wait()
            await cancel(task)
            assert transport.open == 0
        await until(lambda: server.done == 3, within_s=1)


async def test_cancelled_upload_is_seen_by_the_engine(transport: Http1Transport) -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        arrived.set()
        rest = await peer.gone()
        assert len(rest) < 40_000_000

    arrived = asyncio.Event()
    async with ScriptedServer(script) as server:
        task = asyncio.ensure_future(ask(transport, server.url, body=b"x" * 60_000_000))
        await arrived.wait()
        await cancel(task)
        await until(lambda: server.done == 1, within_s=1)
        assert transport.open == 0


@pytest.mark.parametrize("read", [True, False])
async def test_close_in_mid_answer_is_seen_by_the_engine(transport: Http1Transport, read: bool) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED, b"1\r\na\r\n")
        await peer.gone()

    async with ScriptedServer(script) as server:  # R39 a
        response = await ask(transport, server.url)
        if read:
            assert await response.read() == b"a"
        response.close()
        response.close()
        assert transport.open == 0
        await until(lambda: server.done == 1, within_s=1)
        with pytest.raises(EngineBroke):
            await response.read()


async def test_close_under_back_pressure_is_seen_by_the_engine(transport: Http1Transport) -> None:
    """Bytes that nobody read are in flight both ways: the engine must not be left writing."""

    async def script(peer: Peer) -> None:
        await peer.request()
        peer.writer.write(OK + b"Content-Length: 90000000\r\n\r\n" + b"x" * 80_000_000)
        with pytest.raises(ConnectionError):
            await peer.writer.drain()

    async with ScriptedServer(script) as server:
        response = await ask(transport, server.url)
        await until(lambda: paused(response))
        response.close()
        await until(lambda: server.done == 1, within_s=1)


async def test_cancelled_read_loses_nothing(transport: Http1Transport) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(CHUNKED)
        await go.wait()
        await peer.send(b"1\r\na\r\n0\r\n\r\n")
        await peer.gone()

    go = asyncio.Event()
    async with ScriptedServer(script) as server:
        response = await ask(transport, server.url)
        for _ in range(3):
            task = asyncio.ensure_future(response.read())
            await turns()
            await cancel(task)
        task = asyncio.ensure_future(response.read())
        await turns()
        task.cancel()
        go.set()
        await until(lambda: transport.idle == 1)
        assert await whole(response) == b"a"


async def test_cancelled_when_the_head_has_just_come() -> None:
    """The wait is over but its task has not run: nobody holds the answer, so nobody else would close it."""
    connection, socket, pool = connected()
    task = asyncio.ensure_future(begun(connection).head())
    await turns()
    connection.data_received(CHUNKED)
    await cancel(task)
    assert socket.aborted
    assert pool.open == 0


async def test_given_up_while_it_was_being_made() -> None:
    """A loop may say that a connection is made after whoever wanted it has left."""
    pool = Pool(4.0, asyncio.get_running_loop())
    connection, socket = Connection(Target("http://e:1"), pool, pool.loop), FakeTransport()
    connection.drop()
    connection.connection_made(socket)
    connection.connection_lost(None)
    assert socket.aborted
    assert pool.open == 0


async def test_random_cancellations_leave_nothing(transport: Http1Transport) -> None:
    dice = random.Random(7)

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(*[HI[i : i + 9] for i in range(0, len(HI), 9)])

    async def once(url: str) -> None:
        assert await whole(await ask(transport, url)) == b"hi"

    before = open_sockets()
    async with ScriptedServer(script) as server:  # R03, without the rest of the project
        for _ in range(40):
            tasks = [asyncio.ensure_future(once(server.url)) for _ in range(5)]
            for task in tasks:
                await turns(dice.randrange(8))
                if dice.random() < 0.7:
                    task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(one) for one in done} <= {type(None), asyncio.CancelledError}
            assert transport.in_use == 0
        await once(server.url)
    await transport.close()
    await until(lambda: open_sockets() <= before)


async def test_no_task_is_made_for_a_request(transport: Http1Transport) -> None:
    async with ScriptedServer(always(CHUNKED + b"1\r\na\r\n", b"0\r\n\r\n")) as server:
        await whole(await ask(transport, server.url))
        before = asyncio.all_tasks()
        response = await ask(transport, server.url)
        assert asyncio.all_tasks() == before
        await whole(response)
        assert asyncio.all_tasks() == before


def paused(response: object) -> bool:
    return bool(response._connection.paused)  # type: ignore[attr-defined]
