"""What a client may do on its connection: how far it is read ahead, when it is idle, what it is told at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from tests.http.fakes import until
from tests.http.in_process import ClientSide
from workers.protocol import PIPELINED_AT_ONCE, Protocol

App = Callable[[Any, Any, Any], Awaitable[None]]


def connected(app: App, transport: ClientSide | None = None) -> tuple[Protocol, ClientSide, ServerState]:
    config = Config(app=app, http=Protocol, lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    protocol, transport = Protocol(config=config, server_state=state, app_state={}), transport or ClientSide()
    protocol.connection_made(transport)
    return protocol, transport, state


async def answer(send: Any, body: bytes = b"hi") -> None:
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def reading(scope: Any, receive: Any, send: Any) -> None:
    """An app that answers when it has the whole body."""
    while (await receive())["more_body"]:
        pass
    await answer(send)


def post(body: bytes, *lines: bytes) -> bytes:
    return b"\r\n".join([b"POST / HTTP/1.1", b"Host: x", b"Content-Length: %d" % len(body), *lines, b"", b""]) + body


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
