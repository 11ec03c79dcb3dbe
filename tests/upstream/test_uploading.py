"""A body that is sent while it comes: framing, pace, clocks, and every way in which it can end early."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.errors import BadRequest, EngineBroke, EngineTimeout
from app.upstream.http1 import Http1Transport
from tests.upstream.client import ask, limits, whole
from tests.upstream.scripted import Peer, ScriptedServer, turns, until

HI = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
TOO_LARGE = b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 4\r\n\r\nbig!"


class Pieces:
    """An upload from a script: bytes, an exception to raise, an event to wait for, HANG."""

    def __init__(self, *script: Any, length: int | None = None) -> None:
        self.script = list(script)
        self.length = length
        self.spent = False
        self.reads = 0
        self.rewound = 0

    async def read(self) -> bytes:
        self.reads += 1
        while self.script:
            item = self.script.pop(0)
            if isinstance(item, asyncio.Event):
                await item.wait()
                continue
            if isinstance(item, BaseException):
                raise item
            assert isinstance(item, bytes)
            return item
        return b""

    def rewind(self) -> None:
        self.rewound += 1


async def send(transport: Http1Transport, url: str, upload: Pieces, **more: Any) -> Any:
    return await ask(transport, url, body=upload, **more)  # type: ignore[arg-type]


async def test_with_a_length_the_bytes_follow_as_they_are(transport: Http1Transport) -> None:
    seen = []

    async def script(peer: Peer) -> None:
        seen.append(await peer.request())
        await peer.send(HI)
        seen.append(await peer.request())
        await peer.send(HI)
        await peer.gone()

    async with ScriptedServer(script) as server:
        body = [b"ab", b"c" * 100_000, b"d"]
        response = await send(transport, server.url, Pieces(*body, length=100_003))
        assert await whole(response) == b"hi"
        assert transport.idle == 1  # all of it is out, so the connection serves again
        await whole(await ask(transport, server.url, body=b"x"))
        await transport.close()
    assert seen[0].header(b"content-length") == [b"100003"] and not seen[0].header(b"transfer-encoding")
    assert seen[0].body == b"".join(body) and seen[1].body == b"x"


async def test_without_a_length_it_goes_in_chunks(transport: Http1Transport) -> None:
    seen = []

    async def script(peer: Peer) -> None:
        seen.append(await peer.head())
        seen.append(await peer.reader.readuntil(b"0\r\n\r\n"))
        await peer.send(HI)
        await peer.gone()

    async with ScriptedServer(script) as server:
        assert await whole(await send(transport, server.url, Pieces(b"abc", b"x" * 26))) == b"hi"
        await transport.close()
    assert seen[0].header(b"transfer-encoding") == [b"chunked"] and not seen[0].header(b"content-length")
    assert seen[1] == b"3\r\nabc\r\n1a\r\n" + b"x" * 26 + b"\r\n0\r\n\r\n"


async def test_an_upload_has_a_connection_of_its_own(transport: Http1Transport) -> None:
    """A pooled one may be stale, and the body can't be sent again."""
    accepted = 0

    async def script(peer: Peer) -> None:
        nonlocal accepted
        accepted += 1
        await peer.request()
        await peer.send(HI)
        await peer.gone()

    async with ScriptedServer(script) as server:
        await whole(await ask(transport, server.url))
        upload = Pieces(b"abc", length=3)
        await whole(await send(transport, server.url, upload))
        assert (accepted, upload.rewound) == (2, 1)
        await transport.close()


async def test_no_more_is_asked_for_than_the_engine_takes(transport: Http1Transport) -> None:
    go_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await go_on.wait()
        peer.writer.transport.resume_reading()  # type: ignore[attr-defined]
        await peer.request()
        await peer.send(HI)
        await peer.gone()

    async with ScriptedServer(script) as server:
        upload = Pieces(*[b"x" * 65536] * 1000, length=65536 * 1000)
        task = asyncio.create_task(send(transport, server.url, upload))
        reads = -1
        while reads != upload.reads:  # until nothing moves any more
            reads = upload.reads
            await asyncio.sleep(0.1)
        assert 0 < reads < 500  # what two sockets' buffers hold, of 64 MB
        go_on.set()
        assert await whole(await task) == b"hi"
        assert upload.reads == 1001
        await transport.close()


async def test_an_engine_that_refuses_early_is_heard(transport: Http1Transport) -> None:
    never = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send(TOO_LARGE)
        assert await peer.gone() is not None

    async with ScriptedServer(script) as server:
        upload = Pieces(b"abc", never, length=1000)
        response = await send(transport, server.url, upload)
        assert (response.status, await whole(response)) == (413, b"big!")
        await turns()
        assert (transport.open, transport.in_use) == (0, 0)  # the rest of the request was never sent on it


async def test_after_a_refusal_no_more_is_sent(transport: Http1Transport) -> None:
    go_on, told = asyncio.Event(), asyncio.Event()
    got = []

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send(TOO_LARGE[:-4])
        await told.wait()
        await peer.send(b"big!")
        got.append(await peer.gone())

    async with ScriptedServer(script) as server:
        response = await send(transport, server.url, Pieces(b"abc", go_on, b"def", length=6))
        go_on.set()
        await turns(20)
        told.set()
        assert (response.status, await whole(response)) == (413, b"big!")
        await until(lambda: got == [b"abc"])


async def test_another_early_answer_goes_on_beside_the_upload(transport: Http1Transport) -> None:
    go_on = asyncio.Event()
    got = []

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nh")
        got.append(await peer.reader.readexactly(6))
        await peer.send(b"i")
        await peer.gone()

    async with ScriptedServer(script) as server:
        response = await send(transport, server.url, Pieces(b"abc", go_on, b"def", length=6))
        assert response.status == 200
        go_on.set()
        assert await whole(response) == b"hi"
        assert got == [b"abcdef"]
        await transport.close()


@pytest.mark.parametrize("error", [BadRequest("no form"), ZeroDivisionError("bug")])
async def test_what_the_upload_raises_ends_the_request(transport: Http1Transport, error: Exception) -> None:
    gone = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.gone()
        gone.set()

    async with ScriptedServer(script) as server:
        with pytest.raises(type(error)):
            await send(transport, server.url, Pieces(b"abc", error, length=1000))
        await asyncio.wait_for(gone.wait(), 1)
        await until(lambda: transport.open == 0)


async def test_a_cancelled_upload_cuts_the_connection_at_once(transport: Http1Transport) -> None:
    gone, came = asyncio.Event(), asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.head()
        came.set()
        await peer.gone()
        gone.set()

    async with ScriptedServer(script) as server:
        task = asyncio.create_task(send(transport, server.url, Pieces(b"abc", asyncio.Event(), length=1000)))
        await came.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(gone.wait(), 1)
        await until(lambda: not [t for t in asyncio.all_tasks() if "Uploading" in repr(t)])


async def test_an_engine_that_breaks_off_in_the_middle(transport: Http1Transport) -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        peer.reset()

    async with ScriptedServer(script) as server:
        with pytest.raises(EngineBroke):
            await send(transport, server.url, Pieces(b"abc", asyncio.Event(), length=1000))


async def test_a_slow_client_is_not_the_engines_fault_and_its_clock_starts_at_the_end(
    transport: Http1Transport,
) -> None:
    go_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.gone()

    async with ScriptedServer(script) as server:
        upload = Pieces(b"abc", go_on, b"def", length=6)
        task = asyncio.create_task(send(transport, server.url, upload, timeouts=limits(first_byte=0.2)))
        done, _ = await asyncio.wait((task,), timeout=0.6)
        assert not done
        go_on.set()
        with pytest.raises(EngineTimeout) as caught:
            await asyncio.wait_for(task, 1)
        assert caught.value.stage == "first_byte"


async def test_an_engine_that_takes_nothing_is_too_slow(transport: Http1Transport) -> None:
    async def script(peer: Peer) -> None:
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await asyncio.Event().wait()

    async with ScriptedServer(script) as server:
        upload = Pieces(*[b"x" * 65536] * 1000, length=65536 * 1000)
        with pytest.raises(EngineTimeout) as caught:
            await asyncio.wait_for(send(transport, server.url, upload, timeouts=limits(first_byte=0.3)), 5)
        assert caught.value.stage == "first_byte"
        await until(lambda: transport.open == 0)


async def test_the_total_time_holds_for_uploads_too(transport: Http1Transport) -> None:
    async def script(peer: Peer) -> None:
        await peer.head()
        await peer.gone()

    async with ScriptedServer(script) as server:
        upload = Pieces(b"abc", asyncio.Event(), length=6)
        with pytest.raises(EngineTimeout) as caught:
            await asyncio.wait_for(send(transport, server.url, upload, timeouts=limits(total=0.2)), 2)
        assert caught.value.stage == "total"
