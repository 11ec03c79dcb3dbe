"""What has ended is gone at once: whatever waits for the garbage collector lets it stop all requests for as long as it
looks, which is tens of milliseconds where a busy worker has gathered some ten thousand objects."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from app.http.relay import Relay
from app.metrics.figures import Figures, Served
from tests.http.fakes import HANG, JSON, SSE, FakeAnswer, World, listening, request_bytes, until
from workers.cycle import Cycle
from workers.protocol import Protocol

TIMES = 3


class Left:
    """Counts what there is of the parts of connections and requests, beyond what other tests have left."""

    def __init__(self) -> None:
        gc.collect()
        self._before = self._count()

    def __call__(self) -> Counter[str]:
        return self._count() - self._before

    def _count(self) -> Counter[str]:
        kinds = {Protocol, Cycle, Relay, Served}
        return Counter(type(o).__name__ for o in gc.get_objects() if type(o) in kinds)


@pytest.fixture
def left() -> Iterator[Left]:
    left = Left()
    gc.disable()
    yield left
    gc.enable()


@asynccontextmanager
async def connected(world: World) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with listening(world.app, protocol=Protocol, client_timeout_s=5.0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield reader, writer
        finally:
            writer.close()


def stream() -> FakeAnswer:
    return FakeAnswer(b"data: x\n\n", b"data: [DONE]\n\n", headers=SSE)


def whole() -> FakeAnswer:
    return FakeAnswer(b"{}", headers=[*JSON, (b"content-length", b"2")])


@pytest.mark.parametrize(
    ("answer", "asked", "end"),
    [
        (stream, request_bytes(), b"0\r\n\r\n"),
        (whole, request_bytes(), b"{}"),
        (whole, request_bytes(b"no JSON"), b"}}"),
    ],
    ids=["stream", "whole", "refused"],
)
async def test_requests_and_then_their_connection(
    answer: Callable[[], FakeAnswer], asked: bytes, end: bytes, left: Left
) -> None:
    figures = Figures()
    world = World(*[answer() for _ in range(TIMES)], figures=figures)
    async with connected(world) as (reader, writer):
        for _ in range(TIMES):
            writer.write(asked)
            await asyncio.wait_for(reader.readuntil(end), 5)
        # The latest one its connection knows until the next, and what it was is told to the figures in a moment.
        await until(lambda: not left()["Relay"])
        assert left()["Cycle"] == 1
        figures.ended.clear()
    await until(lambda: not left())


async def test_clients_that_leave(left: Left) -> None:
    figures = Figures()
    world = World(FakeAnswer(b"data: x\n\n", HANG, headers=SSE), figures=figures)
    async with connected(world) as (reader, writer):
        writer.write(request_bytes())
        await asyncio.wait_for(reader.readuntil(b"data: x\n\n"), 5)
    figures.ended.clear()
    await until(lambda: not left())
