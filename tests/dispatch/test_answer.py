"""A response whose first bytes were read before: its reader gets them first, once, and nothing keeps them."""

from __future__ import annotations

import pytest

from app.dispatch.answer import Begun
from app.errors import EngineBroke
from app.upstream.transport import Drain, Sink, pipe
from tests.dispatch.fakes import FakeResponse


class Piping(FakeResponse):
    """One that hands on what comes by itself."""

    async def pipe(self, sink: Sink, drain: Drain) -> None:
        while chunk := await self.read():
            if not sink(chunk):
                await drain()


class Breaking(FakeResponse):
    async def read(self) -> bytes:
        if not self.body:
            raise EngineBroke("reset")
        return await super().read()


def begun(kind: type[FakeResponse], first: bytes) -> Begun:
    response = kind(200)
    response.body = [b"b", b"c"]
    return Begun(response, first)


@pytest.mark.parametrize("kind", [FakeResponse, Piping])
@pytest.mark.parametrize("first", [b"", b"a"])
@pytest.mark.parametrize("behind", [False, True])
async def test_it_is_piped_in_order_and_waits_for_a_client_that_is_behind(
    kind: type[FakeResponse], first: bytes, behind: bool
) -> None:
    answer, did = begun(kind, first), list[bytes]()

    def sink(data: bytes) -> bool:
        did.append(data)
        return not behind

    async def drain() -> None:
        assert answer.first == b"", "a client that is slow must not make it hold more"
        did.append(b"drained")

    await pipe(answer, sink, drain)
    pieces = [piece for piece in (first, b"b", b"c") if piece]
    assert did == ([one for piece in pieces for one in (piece, b"drained")] if behind else pieces)


@pytest.mark.parametrize("first", [b"", b"a"])
async def test_it_is_read_in_order(first: bytes) -> None:
    answer, came = begun(FakeResponse, first), b""
    while data := await answer.read():
        came += data
        assert answer.first == b""
    assert came == first + b"bc"


async def test_one_that_breaks_off_is_told_behind_what_came() -> None:
    came: list[bytes] = []

    async def drain() -> None:
        raise AssertionError("nobody is behind")

    with pytest.raises(EngineBroke):
        await pipe(begun(Breaking, b"a"), lambda data: came.append(data) is None, drain)
    assert came == [b"a", b"b", b"c"]
