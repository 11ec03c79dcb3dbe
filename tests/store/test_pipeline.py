"""The hot connection: order, deadlines, what ends it, and addresses."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import hiredis
import pytest

from app.errors import ConfigurationError, StoreUnavailable
from app.redis_url import RedisAddress
from app.store.pipeline import Pipeline
from tests.store.faults import LossyRoad
from tests.support.redis import Space
from tests.support.wait import aeventually

TIMEOUT_S = 0.2


@asynccontextmanager
async def opened(url: str, *, timeout_s: float = TIMEOUT_S) -> AsyncIterator[tuple[Pipeline, list[StoreUnavailable]]]:
    """A pipeline, and what it said when it was lost."""
    lost: list[StoreUnavailable] = []
    pipeline = await Pipeline.open(RedisAddress.parse(url), timeout_s=timeout_s, on_lost=lost.append)
    try:
        yield pipeline, lost
    finally:
        pipeline.close()
        await asyncio.sleep(0)  # the transport's last callback


class Replies(list[Any]):
    """Collects replies in the order they come."""

    def to(self, name: Any) -> Callable[[Any], None]:
        return lambda reply: self.append((name, reply))


async def test_replies_come_in_order_each_to_its_own_caller(redis: Space) -> None:
    async with opened(redis.url) as (pipeline, lost):
        got = Replies()
        for i in range(1000):
            pipeline.submit(("ECHO", f"{i}"), got.to(i))
        await aeventually(lambda: len(got) == 1000)
        assert list(got) == [(i, b"%d" % i) for i in range(1000)]
        assert not lost


def written_by(pipeline: Pipeline) -> list[bytes]:
    """What it writes from now on, write by write."""
    written: list[bytes] = []
    transport = pipeline._transport
    assert transport is not None

    class Tapped:
        def write(self, data: bytes) -> None:
            written.append(data)
            transport.write(data)

        def abort(self) -> None:
            transport.abort()

    pipeline._transport = Tapped()  # type: ignore[assignment]
    return written


async def test_commands_of_one_turn_leave_in_one_write(redis: Space) -> None:
    async with opened(redis.url) as (pipeline, _):
        written = written_by(pipeline)
        await asyncio.gather(*(pipeline.call(("PING",)) for _ in range(50)))
        assert len(written) == 1


async def test_an_error_reply_is_the_callers_and_the_connection_stands(redis: Space) -> None:
    async with opened(redis.url) as (pipeline, lost):
        got = Replies()
        pipeline.submit(("NO_SUCH_COMMAND",), got.to("wrong"))
        pipeline.submit(("PING",), got.to("right"))
        await aeventually(lambda: len(got) == 2)
        assert isinstance(got[0][1], hiredis.ReplyError)
        assert got[1] == ("right", b"PONG")
        with pytest.raises(StoreUnavailable, match="unknown command"):
            await pipeline.call(("NO_SUCH_COMMAND",))
        assert not lost


async def test_a_frozen_server_costs_one_timeout_for_all_that_wait(own_redis: Space) -> None:
    async with opened(own_redis.url) as (pipeline, lost):
        own_redis.server.pause()
        since_s = time.monotonic()
        came = await asyncio.gather(*(pipeline.call(("PING",)) for _ in range(20)), return_exceptions=True)
        waited_s = time.monotonic() - since_s
        assert TIMEOUT_S <= waited_s < TIMEOUT_S + 0.5
        assert all(isinstance(e, StoreUnavailable) and "within 0.2 s" in e.message for e in came)
        assert len(lost) == 1
        # It stays lost, also when the server is back: what it would say belongs to nobody.
        own_redis.server.resume()
        got = Replies()
        pipeline.submit(("PING",), got.to("late"))
        assert isinstance(got[0][1], StoreUnavailable)
        assert len(lost) == 1
        assert repr(pipeline) == "<Pipeline lost, 0 in flight>"


async def test_a_stall_of_our_own_loop_is_not_the_servers(redis: Space) -> None:
    """The reply lies in the socket, the deadline is over, and the loop looks at its timers first."""
    async with opened(redis.url) as (pipeline, lost):
        got = Replies()
        pipeline.submit(("PING",), got.to("ping"))
        await asyncio.sleep(0)
        time.sleep(TIMEOUT_S * 1.5)  # noqa: ASYNC251  the stall itself
        assert pipeline._timer is not None
        pipeline._timer.cancel()
        pipeline._check_deadline()
        await aeventually(lambda: got)
        assert list(got) == [("ping", b"PONG")]
        assert not lost


async def test_the_deadline_is_each_commands_own(redis: Space) -> None:
    """Steady traffic for longer than the timeout is no timeout."""
    async with opened(redis.url) as (pipeline, lost):
        since_s = time.monotonic()
        while time.monotonic() - since_s < 2.5 * TIMEOUT_S:
            assert await pipeline.call(("PING",)) == b"PONG"
        assert not lost


async def test_who_waits_is_told_when_the_server_dies(own_redis: Space) -> None:
    async with opened(own_redis.url, timeout_s=5) as (pipeline, lost):
        own_redis.server.pause()
        got = Replies()
        pipeline.submit(("PING",), got.to("a"))
        await asyncio.sleep(0)
        own_redis.server.kill()
        await aeventually(lambda: got)
        assert isinstance(got[0][1], StoreUnavailable)
        assert len(lost) == 1


async def test_a_cancelled_caller_leaves_its_reply_to_nobody_else(redis: Space) -> None:
    async with opened(redis.url) as (pipeline, _):
        one = asyncio.create_task(pipeline.call(("ECHO", "one")))
        other = asyncio.create_task(pipeline.call(("ECHO", "other")))
        await asyncio.sleep(0)
        one.cancel()
        assert await other == b"other"


@pytest.mark.parametrize("garbage", [b"!!!\r\n", b":1\r\n"])
async def test_what_is_no_reply_or_nobodys_ends_the_connection(redis: Space, garbage: bytes) -> None:
    async with LossyRoad(redis.server.socket) as road, opened(road.url) as (pipeline, lost):
        road.append = garbage
        assert await pipeline.call(("PING",)) == b"PONG"
        await aeventually(lambda: lost)
        with pytest.raises(StoreUnavailable):
            await pipeline.call(("PING",))


async def test_what_was_not_sent_when_it_closed_never_runs(redis: Space) -> None:
    async with opened(redis.url) as (pipeline, _):
        got = Replies()
        pipeline.submit(("SET", redis.key("version"), "99"), got.to("set"))
        pipeline.close()
        assert isinstance(got[0][1], StoreUnavailable)
    async with opened(redis.url) as (pipeline, _):
        assert await pipeline.call(("GET", redis.key("version"))) is None


@pytest.mark.parametrize(
    ("url", "path", "host", "port", "tls", "user", "password", "database"),
    [
        ("redis://", None, "localhost", 6379, False, None, None, 0),
        ("redis://redis.local:6380/2", None, "redis.local", 6380, False, None, None, 2),
        ("redis://:p%40ss@h", None, "h", 6379, False, None, "p@ss", 0),
        ("redis://me:pw@h:1/", None, "h", 1, False, "me", "pw", 0),
        ("redis://h?db=3", None, "h", 6379, False, None, None, 3),
        ("rediss://h:6390/1", None, "h", 6390, True, None, None, 1),
        ("redis://[::1]:7/4", None, "::1", 7, False, None, None, 4),
        ("unix:///run/r.sock", "/run/r.sock", "localhost", 6379, False, None, None, 0),
        ("unix:///run/a%20b.sock?db=5&password=x", "/run/a b.sock", "localhost", 6379, False, None, "x", 5),
        ("unix://me:pw@/run/r.sock", "/run/r.sock", "localhost", 6379, False, "me", "pw", 0),
    ],
)
def test_an_address_is_read_from_its_url(
    url: str, path: str | None, host: str, port: int, tls: bool, user: str | None, password: str | None, database: int
) -> None:
    address = RedisAddress.parse(url)
    assert (address.path, address.host, address.port, address.tls) == (path, host, port, tls)
    assert (address.username, address.password, address.database) == (user, password, database)
    assert password is None or password not in repr(address)


@pytest.mark.parametrize("url", ["http://h", "h:6379", "", "redis://h/one", "redis://h:x", "redis://h?db=x"])
def test_what_is_no_redis_address_is_a_configuration_error(url: str) -> None:
    with pytest.raises(ConfigurationError, match="--redis-url"):
        RedisAddress.parse(url)


async def test_it_greets_with_password_and_database(own_redis: Space) -> None:
    own_redis.cli("CONFIG", "SET", "requirepass", "pw")
    async with opened(f"{own_redis.url}?password=pw&db=3") as (pipeline, _):
        await pipeline.call(("SET", "k", "in three"))
    async with opened(f"{own_redis.url}?password=pw") as (pipeline, _):
        assert await pipeline.call(("GET", "k")) is None
    for wrong in (own_redis.url, f"{own_redis.url}?password=other"):
        with pytest.raises(StoreUnavailable, match="NOAUTH|WRONGPASS"):
            await Pipeline.open(RedisAddress.parse(wrong), timeout_s=TIMEOUT_S, on_lost=lambda reason: None)


async def test_nobody_there_is_told_at_once(own_redis: Space) -> None:
    own_redis.server.kill()
    with pytest.raises(StoreUnavailable, match="can't be reached"):
        await Pipeline.open(RedisAddress.parse(own_redis.url), timeout_s=TIMEOUT_S, on_lost=lambda reason: None)


async def test_why_a_server_turned_it_away_is_told_though_the_write_failed_first(tmp_path: Path) -> None:
    road = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(road)
        server.listen()
        server.setblocking(False)
        loop = asyncio.get_running_loop()
        opening = asyncio.ensure_future(
            Pipeline.open(RedisAddress.parse(f"unix://{road}"), timeout_s=1, on_lost=lambda _: None)
        )
        with (await loop.sock_accept(server))[0] as client:
            # All before our side's loop runs again: it writes first, into a socket that is closed.
            client.send(b"-ERR max number of clients reached\r\n")
        with pytest.raises(StoreUnavailable, match="max number of clients"):
            await opening


async def test_what_is_to_run_next_may_still_send_in_the_same_write(redis: Space) -> None:
    async with opened(redis.url) as (pipeline, _):
        loop, written, got = asyncio.get_running_loop(), written_by(pipeline), Replies()
        for i in range(5):
            loop.call_soon(pipeline.submit, ("ECHO", f"{i}"), got.to(i))
            pipeline.flush_behind()
        await aeventually(lambda: len(got) == 5)
        assert len(written) == 1 and [name for name, _ in got] == [0, 1, 2, 3, 4]
        pipeline.flush_behind()  # of nothing
        await asyncio.sleep(0)
        assert len(written) == 1


# --- what is said last of a turn ------------------------------------------------------------------


async def test_what_is_deferred_leaves_with_the_turn_in_the_same_write(redis: Space) -> None:
    async with opened(redis.url) as (pipeline, _):
        written, got = written_by(pipeline), Replies()
        pipeline.submit(("ECHO", "1"), got.to("first"))
        pipeline.defer(lambda its: its.submit(("ECHO", "2"), got.to("deferred")))
        assert not written
        await aeventually(lambda: len(got) == 2)
        assert [name for name, _ in got] == ["first", "deferred"]
        assert len(written) == 1


async def test_what_is_given_behind_it_runs_behind_it(redis: Space) -> None:
    async with opened(redis.url) as (pipeline, _):
        got = Replies()
        pipeline.defer(lambda its: its.submit(("ECHO", "1"), got.to("deferred")))
        pipeline.submit(("ECHO", "2"), got.to("behind"))
        pipeline.defer(lambda its: its.submit(("ECHO", "3"), got.to("deferred again")))
        pipeline.defer(lambda its: its.submit(("ECHO", "4"), got.to("and again")))
        await aeventually(lambda: len(got) == 4)
        assert [(name, int(reply)) for name, reply in got] == [
            ("deferred", 1),
            ("behind", 2),
            ("deferred again", 3),
            ("and again", 4),
        ]


async def test_what_is_deferred_is_called_where_the_connection_is_lost_too(redis: Space) -> None:
    async with opened(redis.url) as (pipeline, lost):
        got = Replies()
        pipeline.defer(lambda its: its.submit(("PING",), got.to("before")))
        pipeline.close()
        assert [(name, type(reply)) for name, reply in got] == [("before", StoreUnavailable)]
        pipeline.defer(lambda its: its.submit(("PING",), got.to("after")))
        assert [(name, type(reply)) for name, reply in got[1:]] == [("after", StoreUnavailable)]
        assert len(lost) == 1
