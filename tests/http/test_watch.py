"""Watching a deployment over HTTP: documents, the stream, and many, slow and leaving viewers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import app.http.watch as watch_module
from app.errors import StoreUnavailable
from app.http.watch import Hub
from app.metrics.figures import Figures
from tests.http.fakes import Call, FakeSeen, World, both_ways, until

__all__ = ["both_ways"]

STRANGER = ("203.0.113.9", 1)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hub.__init__, "__kwdefaults__", {"every_s": 0.02})


def events(body: bytes) -> list[tuple[str, Any]]:
    """The events of a stream that have come whole."""
    found = []
    for block in body.split(b"\n\n")[:-1]:
        if not block.startswith(b":"):
            name, data = block.split(b"\n")
            assert name.startswith(b"event: ") and data.startswith(b"data: ")
            found.append((name[7:].decode(), json.loads(data[6:])))
    return found


def of_kind(call: Call, kind: str) -> list[Any]:
    return [data for name, data in events(call.body) if name == kind]


@asynccontextmanager
async def looking(world: World, *, count: int = 1) -> AsyncIterator[list[Call]]:
    calls = [Call(world.app, "GET", "/dashboard/events").start() for _ in range(count)]
    try:
        yield calls
    finally:
        for call in calls:
            call.leave()
            assert call.task is not None
        await asyncio.gather(*(call.task for call in calls if call.task is not None))


def hub_of(world: World) -> Hub:
    hub = world.app._watch.hub
    assert hub is not None
    return hub


def decision(number: int) -> dict[str, Any]:
    return {"id": f"{number:05}-0", "request": f"r{number}"}


# --- documents ------------------------------------------------------------------------------------


async def test_the_state_is_what_the_view_says() -> None:
    world = World()
    reply = await world.ask("GET", "/dashboard/state")
    assert (reply.status, reply.header(b"content-type")) == (200, b"application/json")
    assert reply.header(b"cache-control") == b"no-store"
    assert reply.json() == await FakeSeen().state()


async def test_explain_needs_a_model_that_some_node_has() -> None:
    world = World()
    assert (await world.ask("GET", "/nodes/explain?model=m")).json()["rule"] == "by chance"
    for query in ("", "?model="):
        reply = await world.ask("GET", f"/nodes/explain{query}")
        assert (reply.status, reply.error["param"]) == (400, "model")
    reply = await world.ask("GET", "/nodes/explain?model=another")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", ["/dashboard/state", "/dashboard/events", "/nodes/explain?model=m"])
@pytest.mark.parametrize(
    ("settings", "headers", "client", "status"),
    [
        ({}, [], STRANGER, 200),
        ({"admin_keys": ["a"]}, [], STRANGER, 401),
        ({"admin_keys": ["a"]}, [(b"authorization", b"Bearer a")], STRANGER, 200),
        ({"admin_keys": ["a"], "api_keys": ["k"]}, [(b"authorization", b"Bearer k")], STRANGER, 403),
        ({"reader_keys": ["r"]}, [], STRANGER, 401),
        ({"admin_keys": ["a"], "reader_keys": ["r"]}, [(b"authorization", b"Bearer r")], STRANGER, 200),
        ({"api_keys": ["k"]}, [], ("127.0.0.1", 1), 200),
    ],
)
async def test_readers_are_those_of_metrics(
    path: str, settings: dict[str, Any], headers: Any, client: Any, status: int
) -> None:
    world = World(**settings)
    call = Call(world.app, "GET", path, headers=headers, client=client).start()
    await until(lambda: bool(call.sent))
    assert call.sent[0]["status"] == status
    call.leave()
    assert call.task is not None
    await call.task


async def test_a_head_of_the_stream_is_refused_at_once() -> None:
    reply = await World().ask("HEAD", "/dashboard/events")
    assert (reply.status, reply.header(b"allow")) == (405, b"GET")


# --- the stream -----------------------------------------------------------------------------------


async def test_a_viewer_gets_states_and_new_decisions_oldest_first() -> None:
    world = World()
    world.seen.decided = [decision(1), decision(2)]
    async with looking(world) as (call,):
        await until(lambda: len(of_kind(call, "state")) >= 3)
        start = call.sent[0]
        assert (b"content-type", b"text/event-stream; charset=utf-8") in [tuple(h) for h in start["headers"]]
        assert not [h for h in start["headers"] if h[0] == b"content-length"]
        assert of_kind(call, "state")[0] == await FakeSeen().state()
        assert of_kind(call, "decisions") == [[decision(1), decision(2)]], "once, though it is asked each time"
        world.seen.decided.append(decision(3))
        await until(lambda: len(of_kind(call, "decisions")) == 2)
        assert of_kind(call, "decisions")[1] == [decision(3)]
        assert {"watch", "decisions ", "decisions 00002-0"} <= set(world.seen.calls)


async def test_who_comes_later_gets_the_decisions_that_are_there() -> None:
    world = World()
    world.seen.decided = [decision(1), decision(2)]
    async with looking(world) as (first,):
        await until(lambda: bool(of_kind(first, "decisions")))
        async with looking(world) as (second,):
            await until(lambda: bool(of_kind(second, "decisions")))
            assert of_kind(second, "decisions") == [[decision(1), decision(2)]]
            assert of_kind(second, "state")


async def test_many_viewers_share_one_reader_and_the_same_bytes() -> None:
    world = World()
    async with looking(world, count=20) as calls:
        await until(lambda: all(len(of_kind(call, "state")) >= 5 for call in calls))
        asked = world.seen.calls.count("state")
        assert asked <= max(len(of_kind(call, "state")) for call in calls) + 1
        bodies = {id(call.sent[2]["body"]) for call in calls}
        assert len({call.sent[2]["body"] for call in calls}) == 1 and bodies


async def test_while_redis_is_away_states_still_come() -> None:
    world = World()
    world.seen.trouble, world.seen.up = StoreUnavailable("it is away"), False
    world.seen.decided = [decision(1)]
    async with looking(world) as (call,):
        await until(lambda: len(of_kind(call, "state")) >= 3)
        assert of_kind(call, "state")[0]["redis"]["reason"] == "it is away"
        world.seen.trouble = None
        await until(lambda: of_kind(call, "decisions") == [[decision(1)]])


async def test_a_fault_in_a_look_is_logged_and_the_next_look_comes(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.seen.trouble = ZeroDivisionError("bug")
    async with looking(world) as (call,):
        await until(lambda: "tried again" in caplog.text)
        world.seen.trouble = None
        await until(lambda: bool(of_kind(call, "state")))


async def test_a_comment_says_that_the_connection_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "NOTHING_NEW_S", 0.01)
    world = World()

    async def hang() -> dict[str, Any]:
        await asyncio.sleep(0.2)
        return {}

    monkeypatch.setattr(world.seen, "state", hang)
    async with looking(world) as (call,):
        await until(lambda: b": nothing new\n\n" in call.body)


# --- viewers who are many, who leave, who are slow ------------------------------------------------


async def test_nobody_asks_while_nobody_looks() -> None:
    world = World()
    await asyncio.sleep(0.05)
    assert world.seen.calls == []
    async with looking(world, count=2) as (first, second):
        await until(lambda: bool(of_kind(second, "state")))
        first.leave()
        assert first.task is not None
        await first.task
        seen = len(of_kind(second, "state"))
        await until(lambda: len(of_kind(second, "state")) > seen)
    await until(lambda: hub_of(world)._reader is None)
    asked = len(world.seen.calls)
    await asyncio.sleep(0.08)
    assert len(world.seen.calls) == asked, "the last viewer has left"
    hub = hub_of(world)
    assert (hub._state, len(hub._decisions), hub._viewers) == (b"", 0, 0)
    async with looking(world) as (again,):
        await until(lambda: bool(of_kind(again, "state")))


async def test_who_comes_while_the_last_one_leaves_is_served() -> None:
    world = World()
    for _ in range(20):
        async with looking(world) as (one,):
            await until(lambda one=one: bool(of_kind(one, "state")))  # type: ignore[misc]
            one.leave()
            async with looking(world) as (two,):
                await until(lambda two=two: bool(of_kind(two, "state")))  # type: ignore[misc]


async def test_the_51st_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    async with looking(world, count=50) as calls:
        await until(lambda: all(call.sent for call in calls))
        reply = await world.ask("GET", "/dashboard/events")
        assert (reply.status, reply.error["code"], reply.header(b"retry-after")) == (503, "too_many_viewers", b"5")
        calls[7].leave()
        assert calls[7].task is not None
        await calls[7].task
        async with looking(world) as (another,):
            await until(lambda: bool(of_kind(another, "state")))


async def test_a_slow_viewer_gets_the_newest_state_only_and_holds_up_nobody() -> None:
    world = World()
    numbers = iter(range(10**6))

    async def state() -> dict[str, Any]:
        return {"number": next(numbers)}

    world.seen.state = state  # type: ignore[method-assign]
    async with looking(world, count=2) as (slow, quick):
        await until(lambda: bool(of_kind(slow, "state")))
        slow.gate = asyncio.Event()
        had = len(of_kind(slow, "state"))
        world.seen.decided = [decision(number) for number in range(300)]
        await until(lambda: len(of_kind(quick, "state")) > had + 20)
        newest = of_kind(quick, "state")[-1]["number"]
        slow.gate.set()
        slow.gate = None
        await until(lambda: of_kind(slow, "state")[-1]["number"] >= newest)
        # What was on its way when it stopped taking, and then the newest.
        assert len(of_kind(slow, "state")) <= had + 3
        got = [one["id"] for batch in of_kind(slow, "decisions") for one in batch]
        assert got == [decision(number)["id"] for number in range(100, 300)], "the last 200, each once"


async def test_the_streams_end_when_the_worker_stops() -> None:
    world = World()
    async with looking(world, count=3) as calls:
        await until(lambda: all(of_kind(call, "state") for call in calls))
        world.app.begin_shutdown(asyncio.get_running_loop().time() + 1000)
        await until(lambda: all(call.task is not None and call.task.done() for call in calls))
        assert all(call.reply().complete for call in calls)
        reply = await world.ask("GET", "/dashboard/events")
        assert (reply.status, reply.error["code"]) == (503, "shutting_down")
        await until(lambda: hub_of(world)._reader is None)
    world.app.running._timer.cancel()  # type: ignore[union-attr]


async def test_a_viewer_who_takes_nothing_does_not_hold_up_a_worker_that_stops() -> None:
    world = World()
    async with looking(world) as (call,):
        await until(lambda: bool(of_kind(call, "state")))
        call.gate = asyncio.Event()
        had = world.seen.calls.count("state")
        await until(lambda: world.seen.calls.count("state") > had + 3)
        world.app.begin_shutdown(asyncio.get_running_loop().time() + 1000)
        await until(lambda: call.task is not None and call.task.done())
    world.app.running._timer.cancel()  # type: ignore[union-attr]


async def test_viewers_who_come_and_go_leave_no_task_behind() -> None:
    world = World()
    before = len(asyncio.all_tasks())
    for _ in range(5):
        async with looking(world, count=10) as calls:
            await until(lambda calls=calls: all(of_kind(call, "state") for call in calls))  # type: ignore[misc]
    await until(lambda: len(asyncio.all_tasks()) == before)


# --- requests that are watched --------------------------------------------------------------------


def in_turn(*values: bool) -> Iterator[bool]:
    yield from values


async def test_the_journey_of_a_watched_request_says_so() -> None:
    ended: list[Any] = []
    figures = Figures()
    figures.on_ended.append(ended.extend)
    turns = in_turn(True, False, True)
    world = World(figures=figures, watched=lambda: next(turns))
    for number in range(3):
        await world.post(headers=[(b"x-request-id", b"r%d" % number)])
    figures.digest()
    assert [served.journey is not None and served.journey.watched for served in ended] == [True, False, True]
    assert [(served.request, served.status) for served in ended] == [(b"r0", 200), (b"r1", 200), (b"r2", 200)]
