"""Bytes of an answer on a connection: what leaves in which write, and how a bad end looks."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from uvicorn.config import Config

from app.http.ports import WIRE
from workers.cycle import JOIN_LIMIT_BYTES
from workers.protocol import Protocol, Shared

Pairs = list[tuple[bytes, bytes]]
HTML: Pairs = [(b"content-type", b"text/html")]


class Socket(asyncio.Transport):
    """A transport that remembers what was written, and how it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.end = ""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.end = self.end or "closed"

    def abort(self) -> None:
        self.end = self.end or "aborted"

    def is_closing(self) -> bool:
        return bool(self.end)

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def connected(app: Callable[..., Awaitable[None]]) -> tuple[Protocol, Socket, Shared]:
    config = Config(app=app, http=Protocol, lifespan="off", log_level="critical")
    config.load()
    state = Shared()
    protocol, socket = Protocol(config=config, server_state=state, app_state={}), Socket()
    protocol.connection_made(socket)
    return protocol, socket, state


async def ask(app: Callable[..., Awaitable[None]], head: bytes = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n") -> Socket:
    """What one request to `app` wrote."""
    protocol, socket, state = connected(app)
    protocol.data_received(head)
    while state.tasks:
        await asyncio.sleep(0)
    protocol.connection_lost(ConnectionResetError())
    return socket


def answers(headers: Pairs, *bodies: bytes, status: int = 200, ends: bool = True) -> Callable[..., Awaitable[None]]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for i, body in enumerate(bodies):
            await send({"type": "http.response.body", "body": body, "more_body": not ends or i < len(bodies) - 1})

    return app


async def test_head_and_body_leave_in_one_write() -> None:
    socket = await ask(answers([*HTML, (b"Content-Length", b"2")], b"hi"))
    assert socket.writes == [b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 2\r\n\r\nhi"]
    assert socket.end == ""


async def test_without_a_length_a_body_goes_in_chunks() -> None:
    socket = await ask(answers(HTML, b"hello", b"", b"!" * 17))
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ntransfer-encoding: chunked\r\n\r\n"
    assert socket.writes == [head + b"5\r\nhello\r\n", b"11\r\n" + b"!" * 17 + b"\r\n0\r\n\r\n"]


async def test_a_large_piece_is_written_as_it_is_and_no_copy_of_it_held() -> None:
    piece = b"x" * (JOIN_LIMIT_BYTES + 1)
    socket = await ask(answers(HTML, piece, piece))
    _, written = b"".join(socket.writes).split(b"\r\n\r\n", 1)
    assert written == b"10001\r\n%b\r\n10001\r\n%b\r\n0\r\n\r\n" % (piece, piece)
    assert [w is piece for w in socket.writes].count(True) == 2


@pytest.mark.parametrize(
    ("limit", "before", "seen"),
    [
        (300_000, 1, [(300_000, False)]),
        (300_000, 3, [(300_000, False)]),
        (150_000, 1, [(200_000, True), (100_000, False)]),
        (99_999, 1, [(100_000, True), (100_000, True), (100_000, False)]),
        (0, 3, [(300_000, False)]),
    ],
)
async def test_a_gathered_body_comes_at_once_or_when_it_is_too_long(
    limit: int, before: int, seen: list[tuple[int, bool]]
) -> None:
    """Of three pieces `before` have come when it is asked for."""
    found = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["extensions"][WIRE].gather(limit)
        more = True
        while more:
            message = await receive()
            more = message["more_body"]
            found.append((len(message["body"]), more))
            bodies.append(message["body"])
        await answers([(b"content-length", b"0")], b"")(scope, receive, send)

    bodies: list[bytes] = []
    pieces = [bytes([n]) * 100_000 for n in (1, 2, 3)]
    protocol, socket, _state = connected(app)
    protocol.data_received(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 300000\r\n\r\n")
    for n, piece in enumerate(pieces):
        protocol.data_received(piece)
        if n + 1 >= before:
            for _ in range(5):
                await asyncio.sleep(0)
    assert b"".join(bodies) == b"".join(pieces)
    assert found == seen
    assert len(socket.writes) == 1
    protocol.connection_lost(ConnectionResetError())


async def test_reading_goes_on_until_the_request_has_had_a_turn_and_no_further() -> None:
    """A body that is a little longer than a read would have it stopped and begun again for nothing."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    protocol, _, state = connected(app)
    protocol.data_received(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 300000\r\n\r\n" + b"x" * 100_000)
    assert not protocol.flow.read_paused
    await asyncio.sleep(0)
    protocol.data_received(b"x")
    assert protocol.flow.read_paused
    for task in state.tasks:
        task.cancel()
    while state.tasks:
        await asyncio.sleep(0)
    protocol.connection_lost(ConnectionResetError())


async def test_who_leaves_while_its_body_is_gathered_is_gone() -> None:
    kinds = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["extensions"][WIRE].gather(10)
        kinds.append((await receive())["type"])

    protocol, _, state = connected(app)
    protocol.data_received(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n12345678")
    await asyncio.sleep(0)
    assert kinds == []
    protocol.connection_lost(None)
    while state.tasks:
        await asyncio.sleep(0)
    assert kinds == ["http.disconnect"]


async def test_the_head_of_a_stream_does_not_wait_for_its_first_chunk() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        wire = scope["extensions"][WIRE]
        wire.start(200, HTML, None)
        assert wire.transport.writes == []
        await asyncio.sleep(0)
        assert len(wire.transport.writes) == 1
        assert wire.write(b"x", more=False)

    socket = await ask(app)
    assert socket.writes[1] == b"1\r\nx\r\n0\r\n\r\n"


@pytest.mark.parametrize("status", [204, 304])
@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_what_has_no_body_gets_none(status: int, version: bytes) -> None:
    head = b"GET / HTTP/%s\r\nhost: x\r\n\r\n" % version
    socket = await ask(answers(HTML, b"body", status=status), head)
    (written,) = socket.writes
    assert written.endswith(b"\r\n\r\n") and b"transfer-encoding" not in written


async def test_head_is_answered_with_a_head() -> None:
    socket = await ask(answers([(b"content-length", b"4")], b"body"), b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert socket.writes == [b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n"] and socket.end == ""


async def test_in_http_1_0_a_body_ends_with_the_connection() -> None:
    socket = await ask(answers(HTML, b"a", b"b"), b"GET / HTTP/1.0\r\n\r\n")
    assert b"".join(socket.writes) == b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\nconnection: close\r\n\r\nab"
    assert socket.end == "closed"


@pytest.mark.parametrize(("version", "end"), [(b"1.0", "aborted"), (b"1.1", "closed")])
async def test_an_answer_without_its_end_never_looks_whole(version: bytes, end: str) -> None:
    head = b"GET / HTTP/%s\r\nhost: x\r\n\r\n" % version
    socket = await ask(answers(HTML, b"half", ends=False), head)
    assert b"half" in b"".join(socket.writes) and not b"".join(socket.writes).endswith(b"0\r\n\r\n")
    assert socket.end == end


@pytest.mark.parametrize(
    ("headers", "bodies"),
    [
        ([(b"content-length", b"1")], [b"xx"]),
        ([(b"content-length", b"3")], [b"xx"]),
        ([(b"a", b"b\r\nset-cookie: c")], [b""]),
        ([(b"a\nb", b"c")], [b""]),
        ([(b"a", b"\0")], [b""]),
    ],
)
async def test_an_answer_that_can_not_be_framed_ends_the_connection(headers: Pairs, bodies: list[bytes]) -> None:
    socket = await ask(answers(headers, *bodies))
    written = b"".join(socket.writes)
    assert b"set-cookie" not in written and b"\0" not in written
    assert socket.end == "closed"


@pytest.mark.parametrize(("version", "asked"), [(b"1.0", False), (b"1.1", True)])
async def test_a_client_that_waits_to_be_asked_for_its_body_is_asked(version: bytes, asked: bool) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.request"
        await answers([(b"content-length", b"0")], b"")(scope, receive, send)

    head = b"POST / HTTP/%s\r\nhost: x\r\nexpect: 100-Continue\r\ncontent-length: 2\r\n\r\nhi" % version
    socket = await ask(app, head)
    assert (socket.writes[0] == b"HTTP/1.1 100 Continue\r\n\r\n") is asked


async def test_who_leaves_is_told_of_once_and_what_is_written_then_is_dropped() -> None:
    gone: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        wire = scope["extensions"][WIRE]
        wire.when_gone(lambda: gone.append("gone"))
        wire.depart()
        wire.depart()
        wire.start(200, HTML, None)
        assert wire.write(b"x", more=True)
        await wire.drain()

    socket = await ask(app)
    assert gone == ["gone"] and socket.writes == []


async def test_who_had_left_before_it_was_asked_is_told_of_too() -> None:
    gone: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        wire = scope["extensions"][WIRE]
        wire.depart()
        wire.when_gone(lambda: gone.append("gone"))
        assert gone == [], "not in the middle of the turn in which it asks"
        await asyncio.sleep(0)

    await ask(app)
    assert gone == ["gone"]


async def test_nothing_is_asked_for_a_client_that_does_not_take_its_answers() -> None:
    """Else a client that sends and never reads would fill the worker."""
    served = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        served.append(scope["path"])
        await answers([(b"content-length", b"2")], b"hi")(scope, receive, send)

    protocol, socket, state = connected(app)
    protocol.data_received(b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\n")
    await asyncio.gather(*state.tasks)
    protocol.pause_writing()
    protocol.data_received(b"GET /2 HTTP/1.1\r\nhost: x\r\n\r\n")
    for _ in range(10):
        await asyncio.sleep(0)
    assert served == ["/1"]
    protocol.resume_writing()
    await asyncio.gather(*state.tasks)
    assert served == ["/1", "/2"] and len(socket.writes) == 2
    protocol.connection_lost(None)


@pytest.mark.parametrize("reason", [None, ConnectionResetError()])
async def test_a_lost_connection_is_held_by_nothing(reason: Exception | None) -> None:
    protocol, _, state = connected(answers([(b"content-length", b"2")], b"hi"))
    protocol.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    await asyncio.gather(*state.tasks)
    held = weakref.ref(protocol)
    protocol.connection_lost(reason)
    await asyncio.sleep(0)
    del protocol
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("meant", [False, True])
async def test_an_answer_without_an_end_is_a_fault_unless_it_is_meant(
    meant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "error", lambda words, **_: said.append(words))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        wire = scope["extensions"][WIRE]
        wire.start(200, [], None)
        wire.write(b"ab", more=True)
        if meant:
            wire.break_off()

    socket = await ask(app)
    assert socket.end == "closed" and not b"".join(socket.writes).endswith(b"0\r\n\r\n")
    assert ["without an end" in words for words in said] == ([] if meant else [True])
