"""The timers of a request, on a clock that the test moves: what fires, when, and how few of them are made."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, cast

import pytest

from app.errors import EngineBroke, EngineTimeout
from app.upstream.connection import Connection, Http1Response
from app.upstream.pool import Pool
from app.upstream.transport import Target
from tests.upstream.client import limits
from tests.upstream.scripted import turns
from tests.upstream.unplugged import FakeTransport

LOOPS = ("asyncio",)  # the bytes come by hand, not from a loop

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CHUNK = b"1\r\na\r\n"
END = b"0\r\n\r\n"


class Handle:
    def __init__(self, when: float, callback: Callable[[], None]) -> None:
        self.when, self.callback, self.cancelled = when, callback, False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """As much of an event loop as a connection uses, with a time of its own."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.made = 0
        self.handles: list[Handle] = []

    def time(self) -> float:
        return self.now

    def create_future(self) -> asyncio.Future[None]:
        return asyncio.get_running_loop().create_future()

    def call_at(self, when: float, callback: Callable[[], None]) -> Handle:
        assert math.isfinite(when)
        self.made += 1
        self.handles.append(Handle(when, callback))
        return self.handles[-1]

    def call_later(self, delay: float, callback: Callable[[], None]) -> Handle:
        return self.call_at(self.now + delay, callback)

    async def pass_(self, seconds: float) -> None:
        """Move on, firing what is due in its order, then let the tasks run."""
        await turns()
        end = self.now + seconds
        while due := sorted((h for h in self.handles if not h.cancelled and h.when <= end), key=lambda h: h.when):
            self.handles.remove(due[0])
            self.now = max(self.now, due[0].when)
            due[0].callback()
            await turns()
        self.now = end
        await turns()

    @property
    def armed(self) -> int:
        return sum(not handle.cancelled for handle in self.handles)


class Wired:
    """A connection on the clock."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.pool = Pool(4.0, cast(asyncio.AbstractEventLoop, self.clock))
        self.connection = Connection(Target("http://e:1"), self.pool, self.pool.loop)
        self.transport = FakeTransport()
        self.connection.connection_made(self.transport)

    def begin(self, **kwargs: float) -> Http1Response:
        timeouts = limits(**kwargs)
        total_at = self.clock.now + timeouts.total_s if timeouts.total_s else math.inf
        return self.connection.begin(b"GET / HTTP/1.1\r\n\r\n", b"", timeouts, total_at, head_only=False)


async def stage(waiting: asyncio.Task[Any]) -> tuple[str, str]:
    with pytest.raises(EngineTimeout) as caught:
        await waiting
    return caught.value.stage, caught.value.message


async def test_first_byte_is_up_to_the_complete_head() -> None:
    wired = Wired()
    waiting = asyncio.ensure_future(wired.begin(first_byte=600).head())
    await wired.clock.pass_(599)
    wired.connection.data_received(b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD[:-2])  # not all of it
    await wired.clock.pass_(0.9)
    assert not waiting.done()
    await wired.clock.pass_(0.2)
    assert await stage(waiting) == ("first_byte", "engine http://e:1 did not begin its answer within 600 s")
    assert wired.transport.aborted


@pytest.mark.parametrize("stopped_s", [3.5, 60])  # the timer is late by 0.5 s, by 57 s
async def test_an_engine_that_sent_while_this_process_was_stopped_is_not_slow(stopped_s: float) -> None:
    """After SIGCONT the timers fire before the sockets are read."""
    wired = Wired()
    head = asyncio.ensure_future((response := wired.begin(first_byte=4, idle=4)).head())
    await wired.clock.pass_(1)
    wired.clock.now += stopped_s  # stopped: nothing fires
    await wired.clock.pass_(0)
    wired.connection.data_received(HEAD)
    await head
    reading = asyncio.ensure_future(response.read())
    await wired.clock.pass_(1)
    wired.clock.now += stopped_s
    await wired.clock.pass_(0)
    wired.connection.data_received(CHUNK)
    assert await reading == b"a"


@pytest.mark.parametrize("answered", [False, True])
async def test_an_engine_that_sent_nothing_while_this_process_was_stopped_is_slow(answered: bool) -> None:
    wired = Wired()
    response = wired.begin(first_byte=4, idle=4)
    if answered:
        wired.connection.data_received(HEAD)
    waiting: asyncio.Task[Any] = asyncio.ensure_future(response.read() if answered else response.head())
    await wired.clock.pass_(1)
    wired.clock.now += 60
    await wired.clock.pass_(0.2)
    assert (await stage(waiting))[0] == ("idle" if answered else "first_byte")


async def test_idle_is_between_chunks() -> None:
    wired = Wired()
    response = wired.begin(first_byte=10, idle=2.5)
    wired.connection.data_received(HEAD)
    for _ in range(5):  # longer in all than any limit
        waiting = asyncio.ensure_future(response.read())
        await wired.clock.pass_(2.4)
        wired.connection.data_received(CHUNK)
        assert await waiting == b"a"
    waiting = asyncio.ensure_future(response.read())
    await wired.clock.pass_(2.6)
    assert await stage(waiting) == ("idle", "engine http://e:1 sent nothing for 2.5 s")
    assert wired.transport.aborted


async def test_slow_reader_is_no_idle_engine() -> None:
    wired = Wired()
    response = wired.begin(first_byte=1, idle=1)
    wired.connection.data_received(HEAD + CHUNK)
    await wired.clock.pass_(100)
    assert await response.read() == b"a"
    waiting = asyncio.ensure_future(response.read())
    await wired.clock.pass_(0.9)
    wired.connection.data_received(CHUNK)
    assert await waiting == b"a"
    await wired.clock.pass_(100)
    wired.connection.data_received(END)
    assert await response.read() == b""


async def test_data_at_the_last_moment_counts() -> None:
    wired = Wired()
    response = wired.begin(idle=1)
    wired.connection.data_received(HEAD)
    waiting = asyncio.ensure_future(response.read())
    await wired.clock.pass_(0.99)
    assert wired.clock.armed == 1
    wired.connection.data_received(CHUNK)
    wired.clock.now += 0.02  # the reader's task has not run yet
    for handle in wired.clock.handles:
        if not handle.cancelled:
            handle.callback()
    assert await waiting == b"a"
    assert not wired.transport.aborted


async def test_reader_that_left_lets_no_time_run() -> None:
    wired = Wired()
    response = wired.begin(idle=1)
    wired.connection.data_received(HEAD)
    waiting = asyncio.ensure_future(response.read())
    await wired.clock.pass_(0.5)
    waiting.cancel()
    await wired.clock.pass_(100)
    assert not wired.transport.aborted


async def test_shorter_stage_after_a_longer_one_is_in_time() -> None:
    wired = Wired()
    response = wired.begin(first_byte=600, idle=1)
    wired.connection.data_received(HEAD)
    waiting = asyncio.ensure_future(response.read())
    await wired.clock.pass_(1.1)
    assert (await stage(waiting))[0] == "idle"
    assert wired.clock.armed == 0


async def test_total_covers_everything_and_needs_no_reader() -> None:
    wired = Wired()
    response = wired.begin(first_byte=0, idle=0, total=50)
    wired.connection.data_received(HEAD + CHUNK)
    await wired.clock.pass_(49)
    assert not wired.transport.aborted
    await wired.clock.pass_(2)
    assert wired.transport.aborted
    assert await response.read() == b"a"  # what came before is not lost
    with pytest.raises(EngineTimeout, match="did not finish its answer within 50 s") as caught:
        await response.read()
    assert caught.value.stage == "total"


async def test_total_comes_before_a_longer_stage() -> None:
    wired = Wired()
    waiting = asyncio.ensure_future(wired.begin(first_byte=60, total=5).head())
    await wired.clock.pass_(5.1)
    assert (await stage(waiting))[0] == "total"

    wired = Wired()
    response = wired.begin(idle=60, total=5)
    wired.connection.data_received(HEAD)
    reading = asyncio.ensure_future(response.read())
    await wired.clock.pass_(5.1)
    assert (await stage(reading))[0] == "total"


async def test_given_up_connection_leaves_no_timer() -> None:
    wired = Wired()
    wired.begin().close()
    assert wired.clock.made == 1
    assert wired.clock.armed == 0


async def test_zero_is_off() -> None:
    wired = Wired()
    response = wired.begin(first_byte=0, idle=0)
    wired.connection.data_received(HEAD)
    waiting = asyncio.ensure_future(response.read())
    await wired.clock.pass_(1e6)
    assert not waiting.done()
    assert wired.clock.made == 0
    response.close()
    with pytest.raises(EngineBroke):
        await waiting


async def test_requests_on_a_reused_connection_make_no_timers() -> None:
    wired = Wired()
    for _ in range(100):
        response = wired.begin(first_byte=600, idle=300)
        head = asyncio.ensure_future(response.head())
        await turns()
        wired.connection.data_received(HEAD)
        await head
        for _ in range(10):
            waiting = asyncio.ensure_future(response.read())
            await turns()
            wired.connection.data_received(CHUNK)
            assert await waiting == b"a"
        wired.connection.data_received(END)
        assert wired.pool.take("http://e:1", wired.clock.now) is wired.connection
    assert wired.clock.made <= 3  # first byte, idle, and the pool's sweep


async def test_idle_connection_closes_when_its_time_is_over() -> None:
    wired = Wired()
    wired.begin()
    wired.connection.data_received(HEAD + END)
    assert (wired.pool.open, wired.pool.idle, wired.pool.in_use) == (1, 1, 0)
    await wired.clock.pass_(3.9)
    assert not wired.transport.aborted
    await wired.clock.pass_(1.2)  # the sweep comes once a second
    assert wired.transport.aborted
    assert (wired.pool.open, wired.pool.idle, wired.pool.in_use) == (0, 0, 0)
    await wired.clock.pass_(10)
    assert wired.clock.armed == 0


async def test_closed_pool_leaves_no_timer() -> None:
    wired = Wired()
    wired.begin()
    wired.connection.data_received(HEAD + END)
    wired.pool.close()
    assert wired.transport.aborted
    assert wired.clock.armed == 0


async def test_expired_connection_is_not_taken() -> None:
    wired = Wired()
    wired.begin()
    wired.connection.data_received(HEAD + END)
    assert wired.pool.take("http://e:1", wired.clock.now + 4.0) is None
    assert wired.transport.aborted


@pytest.mark.parametrize(
    ("said", "kept_s"),
    [
        (b"timeout=3", 2.0),
        (b"timeout=3, max=100", 2.0),
        (b"max=5, Timeout = 2", 1.0),
        (b"timeout=60", 4.0),
        (b"max=100", 4.0),
        (b"", 4.0),
        (b"timeout=soon", 4.0),
    ],
)
async def test_keep_alive_is_learnt_and_stays_below_ours(said: bytes, kept_s: float) -> None:
    wired = Wired()
    wired.begin()
    wired.connection.data_received(b"HTTP/1.1 200 OK\r\nKeep-Alive: %b\r\nContent-Length: 0\r\n\r\n" % said)
    assert wired.connection.idle_until_s == wired.clock.now + kept_s


@pytest.mark.parametrize("said", [b"timeout=1", b"timeout=0"])
async def test_too_short_a_keep_alive_is_none(said: bytes) -> None:
    wired = Wired()
    wired.begin()
    wired.connection.data_received(b"HTTP/1.1 200 OK\r\nKeep-Alive: %b\r\nContent-Length: 0\r\n\r\n" % said)
    assert wired.transport.aborted
    assert wired.pool.open == 0
