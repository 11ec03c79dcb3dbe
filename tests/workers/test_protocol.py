"""What a client may do on its connection: how far it is read ahead, when it is idle, what it is told at the end."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trustme
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from app.http.ports import WIRE
from tests.http.fakes import until
from tests.http.in_process import ClientSide
from tests.support.wait import aeventually
from workers.protocol import PIPELINED_AT_ONCE, Protocol, Shared

App = Callable[[Any, Any, Any], Awaitable[None]]


def connected(app: App, transport: ClientSide | None = None) -> tuple[Protocol, ClientSide, Shared]:
    config = Config(app=app, http=Protocol, lifespan="off", log_config=None)
    config.load()
    state = Shared()
    protocol, transport = Protocol(config=config, server_state=state, app_state={}), transport or ClientSide()
    protocol.connection_made(transport)
    return protocol, transport, state


async def answer(send: Any, body: bytes = b"hi") -> None:
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def reading(scope: Any, receive: Any, send: Any) -> None:
    """An app that answers when it has the whole body."""
    more = True
    while more:
        more = (message := await receive()).get("more_body", False)
    if message["type"] != "http.disconnect":
        await answer(send)


def post(body: bytes, *lines: bytes) -> bytes:
    return b"\r\n".join([b"POST / HTTP/1.1", b"Host: x", b"Content-Length: %d" % len(body), *lines, b"", b""]) + body


# --- what an app hears of what has been read


async def test_an_app_that_wants_to_know_hears_of_each_request_that_is_read_before_its_task_runs() -> None:
    """Not of one that waited behind another's answer: its task begins in a turn of tasks, and not while it is read."""
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.append("runs")
        await reading(scope, receive, send)

    protocol, _, state = connected(app)
    state.expect = lambda: asyncio.get_running_loop().call_soon(heard.append, "behind it")
    for _ in range(3):  # the second and third have a head that came before
        protocol.data_received(post(b"abc"))
        assert heard == []
        await aeventually(lambda: len(heard) == 2)
        assert heard == ["runs", "behind it"]
        heard.clear()
    protocol.data_received(post(b"abc") * 3)
    await aeventually(lambda: heard.count("runs") == 3)
    assert heard == ["runs", "behind it", "runs", "runs"]


# --- reading ahead

READ_REQUESTS = 4  # that come in one read


@pytest.mark.parametrize("size", [0, 60_000, 200_000])
async def test_no_more_is_read_ahead_however_many_answers_are_out(size: int) -> None:
    turn = asyncio.Semaphore(0)
    most = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal most
        while (await receive())["more_body"]:
            pass
        await turn.acquire()
        most = max(most, sum(len(cycle.body) for cycle in protocol._cycles))
        await answer(send)

    protocol, transport, state = connected(app)
    request, sent, requests = post(b"x" * size), 0, 60
    wire = request * requests
    for done in range(requests):
        while transport.reading.is_set() and sent < len(wire):
            protocol.data_received(wire[sent : sent + READ_REQUESTS * len(request)])
            sent += READ_REQUESTS * len(request)
            await asyncio.sleep(0)
            assert len(protocol.pipeline) < PIPELINED_AT_ONCE + READ_REQUESTS
        turn.release()
        await until(lambda done=done: transport.written.count(b"HTTP/1.1 200") == done + 1)  # type: ignore[misc]
    assert sent >= len(wire)
    # Each of those that wait may be whole in 64 KiB and less; of the last, and of the one that runs, a read may follow.
    assert most <= PIPELINED_AT_ONCE * 65536 + 2 * READ_REQUESTS * size
    protocol.connection_lost(None)
    await until(lambda: not state.tasks)


# --- slow readers


async def test_over_tls_no_more_waits_for_a_client_than_without() -> None:
    """The event loop's own limit for it is eight times as high."""
    full = asyncio.get_running_loop().create_future()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        wire = scope["extensions"][WIRE]
        wire.start(200, [], None)
        while wire.write(b"x" * 8192, more=True):
            await asyncio.sleep(0)
        full.set_result(wire.transport.get_write_buffer_size())

    authority = trustme.CA()
    server_side, client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("localhost").configure_cert(server_side)
    authority.configure_trust(client_side)
    config = Config(app=app, http=Protocol, lifespan="off", log_config=None)
    config.load()
    server = await asyncio.get_running_loop().create_server(
        lambda: Protocol(config=config, server_state=Shared(), app_state={}), "localhost", 0, ssl=server_side
    )
    port = server.sockets[0].getsockname()[1]
    _, writer = await asyncio.open_connection("localhost", port, ssl=client_side, limit=1024)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert await asyncio.wait_for(full, 10) < 2 * HIGH_WATER_LIMIT
    writer.transport.abort()
    server.close()


# --- idle connections


async def unread(scope: Any, receive: Any, send: Any) -> None:
    """An app that answers without a look at the body."""
    await answer(send)


BEHIND = {
    "nothing": (post(b""), []),
    "empty lines": (post(b""), [b"\r\n", b"\n\r\n"]),
    "the rest of a body that was not waited for": (post(b"12345")[:-3], [b"3", b"45"]),
    "a body that was not waited for, later than the limit": (post(b"12345")[:-3], [b"", b"345"]),
}


@pytest.mark.parametrize("name", BEHIND)
async def test_whatever_comes_behind_the_last_answer_it_is_idle_then(name: str) -> None:
    protocol, transport, state = connected(unread)
    protocol.timeout_keep_alive = limit_s = 0.1  # type: ignore[assignment]
    request, pieces = BEHIND[name]
    protocol.data_received(request)
    await asyncio.gather(*state.tasks)
    for piece in pieces:
        if piece:
            protocol.data_received(piece)
        else:
            await asyncio.sleep(2 * limit_s)
        assert not transport.closing
    await until(lambda: transport.closing, 10 * limit_s)
    protocol.connection_lost(None)


@pytest.mark.parametrize("what", ["a head", "a body", "an answer"])
async def test_what_has_begun_is_not_idle(what: str) -> None:
    ends = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if transport.written:
            await ends.wait()
        await reading(scope, receive, send)

    protocol, transport, state = connected(app)
    protocol.timeout_keep_alive = limit_s = 0.1  # type: ignore[assignment]
    protocol.data_received(post(b""))
    await asyncio.gather(*state.tasks)
    request = post(b"12345")
    cut = {"a head": 9, "a body": len(request) - 2, "an answer": len(request)}[what]
    protocol.data_received(request[:cut])
    await asyncio.sleep(2 * limit_s)
    assert not transport.closing
    ends.set()
    if cut < len(request):
        protocol.data_received(request[cut:])
    await asyncio.gather(*state.tasks)
    assert transport.written.count(b"HTTP/1.1 200") == 2
    await until(lambda: transport.closing, 10 * limit_s)
    protocol.connection_lost(None)


# --- refusals


@pytest.mark.parametrize("before", [b"", post(b"")])
async def test_a_body_that_is_broken_is_not_asked_for(before: bytes, caplog: pytest.LogCaptureFixture) -> None:
    protocol, transport, state = connected(reading)
    broken = b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    protocol.data_received(before + broken)
    await asyncio.gather(*state.tasks)
    await until(lambda: transport.ended and not state.tasks)
    assert b"100 Continue" not in transport.written
    assert transport.written.count(b"HTTP/1.1 400 ") == 1
    assert transport.written.count(b"HTTP/1.1 ") == (2 if before else 1)
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []
    protocol.connection_lost(None)
