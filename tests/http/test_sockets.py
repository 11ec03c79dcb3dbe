"""On real sockets, behind uvicorn's own protocol: who leaves, who is slow, what ends how."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from app.dispatch.answer import Outcome
from app.errors import EngineBroke
from tests.http.fakes import CHAT, HANG, JSON, SSE, FakeAnswer, World, listening, request_bytes, until

SOON_S = 0.5
"""An engine must hear of a client that left within a second; here only a busy machine is in the way."""


@asynccontextmanager
async def connected(world: World) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with listening(world.app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield reader, writer
        finally:
            writer.close()


async def head_of(reader: asyncio.StreamReader) -> bytes:
    return (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 2)).lower()


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.read(), 2)


def hang_up(writer: asyncio.StreamWriter, how: str) -> None:
    if how == "reset":
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        writer.transport.abort()
    else:
        writer.close()


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_R39_leaves_before_the_head(how: str) -> None:
    world = World(HANG)
    async with connected(world) as (_, writer):
        writer.write(request_bytes())
        await until(lambda: world.hybrid.waiting == 1)
        left_s = time.monotonic()
        hang_up(writer, how)
        await until(lambda: world.hybrid.waiting == 0)
        assert world.hybrid.cancelled_at_s is not None and world.hybrid.cancelled_at_s - left_s < SOON_S


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("headers", [SSE, JSON])
async def test_R39_leaves_after_three_chunks(
    how: str, headers: list[tuple[bytes, bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    answer = FakeAnswer(*[b"data: x\n\n"] * 3, HANG, headers=headers)
    world = World(answer)
    async with connected(world) as (reader, writer):
        writer.write(request_bytes())
        await head_of(reader)
        for _ in range(3):
            await reader.readuntil(b"data: x\n\n")
        left_s = time.monotonic()
        hang_up(writer, how)
        await until(lambda: bool(answer.outcomes))
        assert answer.closed_at_s is not None and answer.closed_at_s - left_s < SOON_S
        assert answer.outcome == Outcome.ABORTED
        await until(lambda: len(world.app.running) == 0)
    assert not caplog.records


async def test_R39_leaves_while_it_takes_nothing_and_the_send_is_blocked() -> None:
    chunk = b"x" * 65536
    answer = FakeAnswer(*[chunk] * 1000, headers=SSE)
    world = World(answer)
    async with connected(world) as (reader, writer):
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(request_bytes())
        await until(lambda: answer.reads > 2)
        await asyncio.sleep(0.1)
        reads = answer.reads
        assert reads < 200, "a client that takes nothing must slow its engine"
        await asyncio.sleep(0.05)
        assert answer.reads == reads
        left_s = time.monotonic()
        hang_up(writer, "reset")
        await until(lambda: bool(answer.outcomes))
        assert answer.closed_at_s is not None and answer.closed_at_s - left_s < SOON_S
        assert answer.outcome == Outcome.ABORTED and answer.reads <= reads + 2


async def test_a_slow_client_does_not_slow_another() -> None:
    slow = FakeAnswer(*[b"x" * 65536] * 1000, headers=SSE)
    world = World(slow, lambda: FakeAnswer(*[b"data: y\n\n"] * 100, b"data: [DONE]\n\n", headers=SSE))
    async with listening(world.app) as port:
        slow_reader, slow_writer = await asyncio.open_connection("127.0.0.1", port)
        slow_reader._transport.pause_reading()  # type: ignore[attr-defined]
        slow_writer.write(request_bytes())
        await until(lambda: slow.reads > 2)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_bytes(headers=["Connection: close"]))
        body = await rest_of(reader)
        assert body.count(b"data: y\n\n") == 100 and body.endswith(b"0\r\n\r\n")
        writer.close()
        slow_writer.transport.abort()
        await until(lambda: len(world.app.running) == 0)


async def test_R39_leaves_while_it_uploads(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    async with connected(world) as (_, writer):
        writer.write(request_bytes()[:-5])
        await until(lambda: len(world.app.running) == 1)
        writer.close()
        await until(lambda: len(world.app.running) == 0)
    assert not world.hybrid.requests and not caplog.records


async def test_non_stream_that_breaks_is_cut_without_an_end_and_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for headers in (JSON, [*JSON, (b"content-length", b"100")]):
        caplog.clear()
        world = World(FakeAnswer(b'{"a":', EngineBroke("broke"), headers=headers))
        async with connected(world) as (reader, writer):
            writer.write(request_bytes())
            head = await head_of(reader)
            body = await rest_of(reader)
        assert head.startswith(b"http/1.1 200 ")
        assert b'{"a":' in body and not body.endswith(b"0\r\n\r\n") and len(body) < 100
        assert all(record.exc_info is None for record in caplog.records)


async def test_stream_that_breaks_ends_properly_and_the_connection_lives_on() -> None:
    world = World(FakeAnswer(b"data: x", EngineBroke("broke"), headers=SSE), FakeAnswer(b"{}"))
    async with connected(world) as (reader, writer):
        writer.write(request_bytes())
        head = await head_of(reader)
        assert b"transfer-encoding: chunked" in head and b"cache-control: no-cache" in head
        body = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 2)
        assert body.count(b"data: ") == 2 and b'"engine_broke_off"' in body
        writer.write(request_bytes())
        assert (await head_of(reader)).startswith(b"http/1.1 200 ")


async def test_R58_too_large_by_its_length_gets_its_413_and_the_connection_lives_on() -> None:
    world = World(max_body_size=1000)
    async with connected(world) as (reader, writer):
        body = b"x" * 3_000_000
        writer.write(request_bytes(body))
        assert (await head_of(reader)).startswith(b"http/1.1 413 ")
        assert b"body_too_large" in await reader.readuntil(b"}}")
        await asyncio.wait_for(writer.drain(), 2)
        writer.write(request_bytes())
        assert (await head_of(reader)).startswith(b"http/1.1 200 ")
    assert len(world.hybrid.requests) == 1


async def test_R58_too_large_in_chunks_gets_its_413_and_the_connection_lives_on() -> None:
    world = World(max_body_size=1000)
    async with connected(world) as (reader, writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(20):
            writer.write(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
            await asyncio.wait_for(writer.drain(), 2)
        assert (await head_of(reader)).startswith(b"http/1.1 413 ")
        await reader.readuntil(b"}}")
        writer.write(b"0\r\n\r\n" + request_bytes())
        assert (await head_of(reader)).startswith(b"http/1.1 200 ")
    assert len(world.hybrid.requests) == 1


async def test_a_refused_body_is_not_asked_for() -> None:
    world = World(max_body_size=1000)
    async with connected(world) as (reader, writer):
        writer.write(b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\nExpect: 100-continue\r\n\r\n")
        head = await head_of(reader)
        assert head.startswith(b"http/1.1 413 ") and b"connection: close" in head
        await rest_of(reader)


async def test_an_accepted_body_is_asked_for() -> None:
    world = World()
    async with connected(world) as (reader, writer):
        writer.write(
            b"POST /v1/x HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n" % len(CHAT)
        )
        assert (await head_of(reader)).startswith(b"http/1.1 100 ")
        writer.write(CHAT)
        assert (await head_of(reader)).startswith(b"http/1.1 200 ")
    assert b"expect" not in dict(world.hybrid.requests[0].headers)


async def test_R45_huge_lines_pass_whole() -> None:
    line = b"data: " + b"\xe4" * 8_000_000 + b"\n\n"
    pieces = [line[i : i + 262_144] for i in range(0, len(line), 262_144)]
    world = World(FakeAnswer(*pieces, b"data: [DONE]\n\n", headers=SSE))
    received = b""
    async with connected(world) as (reader, writer):
        writer.write(request_bytes(headers=["Connection: close"]))
        await head_of(reader)
        while size := int(await asyncio.wait_for(reader.readuntil(b"\r\n"), 2), 16):
            received += (await reader.readexactly(size + 2))[:-2]
    assert received == line + b"data: [DONE]\n\n"


async def test_R03_300_clients_leave_at_random_moments_and_every_count_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def late() -> bytes:
        await asyncio.sleep(0.005)
        return b"data: x\n\n"

    def made() -> object:
        if len(world.hybrid.requests) % 3 == 0:
            return HANG
        return FakeAnswer(*[late] * 10, b"data: [DONE]\n\n", headers=SSE)

    world = World(*[made] * 300)
    async with listening(world.app) as port:

        async def one(number: int) -> None:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_bytes()[: None if number % 7 else number % 150])
            await asyncio.sleep((number * 37 % 100) / 1000)
            hang_up(writer, "reset" if number % 2 else "close")

        await asyncio.gather(*map(one, range(300)))
        await until(lambda: len(world.app.running) == 0)
    assert world.hybrid.unreleased() == [] and world.hybrid.waiting == 0
    assert not [record for record in caplog.records if record.exc_info]


async def test_pipelined_requests_are_answered_in_order() -> None:
    world = World(*[FakeAnswer(b"%d" % i, headers=[*JSON, (b"content-length", b"1")]) for i in range(3)])
    async with connected(world) as (reader, writer):
        writer.write(request_bytes() * 3)
        for expected in (b"0", b"1", b"2"):
            await head_of(reader)
            assert await reader.readexactly(1) == expected


async def test_R54_shutdown_ends_streams_on_the_wire() -> None:
    world = World(FakeAnswer(b"data: x\n\n", HANG, headers=SSE))
    async with connected(world) as (reader, writer):
        writer.write(request_bytes())
        await head_of(reader)
        await reader.readuntil(b"data: x\n\n")
        world.app.begin_shutdown(time.monotonic() + 1.05)
        body = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 1)
        assert b'"shutting_down"' in body
