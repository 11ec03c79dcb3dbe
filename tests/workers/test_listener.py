"""Workers that share one listening socket take their fair share of its connections."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from uvicorn.config import Config

from tests.support.wait import aeventually
from workers import listener as listener_module
from workers.listener import Listener, Share, Shares
from workers.protocol import Protocol
from workers.server import GracefulServer


class Echo(asyncio.Protocol):
    """What a worker's protocol owes its share: to tell of the end."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        assert self.transport is not None
        self.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._share.ended()


class Host:
    """Workers of one host, here in one loop, and the socket that they share."""

    def __init__(self, shares: Shares, *, ssl_context: ssl.SSLContext | None = None) -> None:
        self._sock = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.address = self._sock.getsockname()
        self._shares = shares
        self._ssl = ssl_context
        self.taken: list[list[Echo]] = []
        self.listeners: list[Listener] = []
        self._clients: list[asyncio.StreamWriter] = []

    def worker(self) -> Listener:
        share, mine = self._shares.take(), list[Echo]()

        def make() -> Echo:
            mine.append(Echo(share))
            return mine[-1]

        listener = Listener(self._sock.dup(), make_protocol=make, ssl_context=self._ssl, share=share)
        self.taken.append(mine)
        self.listeners.append(listener)
        return listener

    async def connect(self, count: int) -> None:
        """So many clients at once; each has heard its echo."""

        async def one() -> None:
            reader, writer = await asyncio.open_connection(*self.address)
            self._clients.append(writer)
            writer.write(b"?")
            assert await reader.readexactly(1) == b"?"

        await asyncio.gather(*(one() for _ in range(count)))

    def counts(self) -> list[int]:
        return [len(mine) for mine in self.taken]

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()
        for writer in self._clients:
            writer.close()
        self._sock.close()


@contextlib.asynccontextmanager
async def host(shares: Shares, workers: int, *, ssl_context: ssl.SSLContext | None = None) -> AsyncIterator[Host]:
    made = Host(shares, ssl_context=ssl_context)
    for _ in range(workers):
        made.worker()
    try:
        yield made
    finally:
        made.close()


def test_a_worker_is_ahead_while_another_holds_fewer() -> None:
    shares = Shares(4)
    first, second = shares.take(), shares.take()
    first.serve()
    first.begun()
    assert not first.is_ahead(), "who has not begun to serve holds up nobody"
    first.ended()
    second.serve()
    assert not first.is_ahead() and not second.is_ahead()
    first.begun()
    assert first.is_ahead() and not second.is_ahead()
    second.begun()
    assert not first.is_ahead() and not second.is_ahead()
    first.ended()
    first.ended()  # one too many is none: it must not draw all that comes
    assert repr(shares) == "<Shares [0, 1]>"
    first.leave()
    assert not second.is_ahead(), "who takes no more holds up nobody"


def test_places_are_used_again_and_more_workers_than_places_go_by_themselves() -> None:
    shares = Shares(1)
    first, more = shares.take(), shares.take()
    first.serve()
    more.serve()
    more.begun()
    assert not more.is_ahead()
    assert repr(shares) == "<Shares [0]>"
    first.leave()
    assert shares.take() is not None and first.has_left, "as long as its worker drains"
    first.free()
    again = shares.take()
    assert not again.serves and not again.has_left
    again.serve()
    again.begun()
    assert repr(shares) == "<Shares [1]>"


async def test_r57_a_burst_is_shared_evenly() -> None:
    async with host(Shares(8), workers=4) as one:
        await one.connect(200)
        assert sum(one.counts()) == 200
        assert max(one.counts()) - min(one.counts()) <= 2, one.counts()


async def test_who_lost_its_connections_takes_the_next_ones() -> None:
    async with host(Shares(8), workers=2) as one:
        await one.connect(40)
        before = one.counts()
        for echo in one.taken[0]:
            assert echo.transport is not None
            echo.transport.abort()
        await aeventually(lambda: repr(one.listeners[0]).startswith("<Listener <Share 0>"))
        for _ in range(10):
            await one.connect(1)
        # One or two may come just when the other has ended its wait for the one before.
        assert one.counts()[0] - before[0] >= 8, one.counts()


async def test_a_worker_that_takes_nothing_delays_the_others_only_a_little() -> None:
    shares = Shares(8)
    shares.take().serve()  # stopped, or stuck: it holds none, so the others hold more
    async with host(shares, workers=2) as one:
        await one.connect(1)
        begun_s = time.monotonic()
        for _ in range(20):
            await one.connect(1)
        assert time.monotonic() - begun_s < 1
        assert sum(one.counts()) == 21


async def test_a_listener_that_is_closed_takes_no_more_and_keeps_what_it_has() -> None:
    async with host(Shares(8), workers=2) as one:
        await one.connect(20)
        before = one.counts()
        one.listeners[0].close()
        one.listeners[0].close()
        await one.connect(20)
        assert one.counts() == [before[0], before[1] + 20]
        assert all(echo.transport is not None and not echo.transport.is_closing() for echo in one.taken[0])


async def test_out_of_files_it_waits_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "PAUSE_S", 0.05)
    async with host(Shares(8), workers=1) as one:
        refused = []

        class Full:
            def __init__(self, sock: socket.socket) -> None:
                self._sock = sock

            def __getattr__(self, name: str) -> object:
                return getattr(self._sock, name)

            def accept(self) -> tuple[socket.socket, object]:
                if len(refused) < 3:
                    refused.append(time.monotonic())
                    raise OSError(errno.EMFILE, "Too many open files")
                return self._sock.accept()

        one.listeners[0]._sock = Full(one.listeners[0]._sock)  # type: ignore[assignment]
        await one.connect(1)
        assert len(refused) == 3
        assert refused[2] - refused[0] >= 0.09, "no busy loop meanwhile"


async def test_a_client_that_speaks_no_tls_is_not_counted() -> None:
    shares = Shares(2)
    async with host(shares, workers=1, ssl_context=ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)) as one:
        _, writer = await asyncio.open_connection(*one.address)
        await aeventually(lambda: repr(shares) == "<Shares [1]>")
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await aeventually(lambda: repr(shares) == "<Shares [0]>")
        writer.close()


async def test_a_connection_that_was_just_taken_is_served_though_the_worker_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No protocol knows of it yet: a worker that waits for its connections only would be gone when it is made."""
    greet, go, ended = Listener._greet, asyncio.Event(), []

    async def slowly(self: Listener, connection: socket.socket) -> None:
        await go.wait()
        await greet(self, connection)

    monkeypatch.setattr(Listener, "_greet", slowly)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            ended.append("app")
            await send({"type": "lifespan.shutdown.complete"})
            return
        await send({"type": "http.response.start", "status": 503 if ended else 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    config = Config(app=app, http=Protocol, lifespan="on", log_config=None)
    server = GracefulServer(config, app, grace_s=10.0, share=Shares(1).take())
    with socket.create_server(("127.0.0.1", 0)) as sock:
        serving = asyncio.create_task(server.run_until_stopped([sock.dup()]))
        await aeventually(lambda: server.started)
        reader, writer = await asyncio.open_connection(*sock.getsockname())
        await aeventually(lambda: server.servers[0].greets)
        server.stop()
        await asyncio.sleep(0.5)
        go.set()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        await asyncio.wait_for(serving, 5)
        assert ended == ["app"]
        writer.close()
