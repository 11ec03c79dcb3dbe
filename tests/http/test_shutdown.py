"""begin_shutdown: connections close, and what still runs is ended in time and in words."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import MutableMapping
from typing import Any

import pytest

from app.dispatch.answer import Outcome
from app.errors import EngineBroke
from app.http.interrupt import END_STREAMS_BEFORE_S
from tests.http.fakes import CHAT, HANG, JSON, SSE, Call, FakeAnswer, World, both_ways, until

NOW_S = END_STREAMS_BEFORE_S  # a deadline this far away ends everything at once


async def test_answers_after_it_began_close_their_connections() -> None:
    world = World()
    assert (await world.post()).header(b"connection") is None
    assert (await world.ask("GET", "/health")).header(b"connection") is None
    world.app.begin_shutdown(time.monotonic() + 30)
    for reply in (await world.post(), await world.post(b"{"), await world.ask("GET", "/health")):
        assert reply.status in (200, 400) and reply.header(b"connection") == b"close"
    assert (await world.ask("GET", "/ready")).error["code"] == "shutting_down"


async def test_a_request_whose_head_is_not_out_closes_its_connection_too() -> None:
    gate = asyncio.Event()
    world = World()
    answer = FakeAnswer(b"{}")

    async def late(request: object) -> FakeAnswer:
        await gate.wait()
        world.hybrid.opened.append(answer)
        return answer

    world.hybrid.open = late  # type: ignore[method-assign]
    call = Call(world.app, "POST", "/v1/chat/completions", CHAT).start()
    await asyncio.sleep(0)
    world.app.begin_shutdown(time.monotonic() + 30)
    gate.set()
    assert call.task is not None
    await call.task
    assert call.reply().header(b"connection") == b"close"


async def test_R54_running_streams_end_with_one_error_event_before_the_deadline() -> None:
    answer = FakeAnswer(b"data: x\n\n", b"data: y", HANG, headers=SSE)
    world = World(answer)
    call = Call(world.app, "POST", "/v1/chat/completions", CHAT).start()
    await until(lambda: len(call.sent) == 3)
    began_s = time.monotonic()
    world.app.begin_shutdown(began_s + END_STREAMS_BEFORE_S + 0.1)
    assert call.task is not None
    await call.task
    assert 0.05 < time.monotonic() - began_s < END_STREAMS_BEFORE_S
    reply = call.reply()
    sent = b"data: x\n\ndata: y\n\n"
    assert reply.complete and reply.body.startswith(sent)
    event = reply.body[len(sent) :]
    assert event.startswith(b"data: ") and event.count(b"data:") == 1
    assert json.loads(event[6:])["error"]["code"] == "shutting_down"
    assert set(answer.outcomes) == {Outcome.ABORTED}


async def test_a_later_deadline_moves_the_end() -> None:
    world = World(HANG)
    call = Call(world.app, "POST", "/v1/chat/completions", CHAT).start()
    await until(lambda: world.hybrid.waiting == 1)
    world.app.begin_shutdown(time.monotonic() + NOW_S + 0.02)
    world.app.begin_shutdown(time.monotonic() + 30)
    await asyncio.sleep(0.05)
    assert world.hybrid.waiting == 1
    call.leave()
    assert call.task is not None
    await call.task


async def test_stream_that_had_its_done_ends_without_an_event() -> None:
    answer = FakeAnswer(b"data: [DONE]\n\n", HANG, headers=SSE)
    world = World(answer)
    call = Call(world.app, "POST", "/v1/chat/completions", CHAT).start()
    await until(lambda: len(call.sent) == 2)
    world.app.begin_shutdown(time.monotonic() + NOW_S)
    assert call.task is not None
    await call.task
    assert call.reply().complete and call.reply().body == b"data: [DONE]\n\n"
    assert set(answer.outcomes) == {Outcome.OK}


async def test_unanswered_requests_get_a_503_and_half_answered_ones_no_end() -> None:
    half = FakeAnswer(b'{"a"', HANG, headers=JSON)
    world = World(HANG, half)
    waiting = Call(world.app, "POST", "/v1/chat/completions", CHAT).start()
    await until(lambda: world.hybrid.waiting == 1)
    answered = Call(world.app, "POST", "/v1/chat/completions", CHAT).start()
    uploading = Call(world.app, "POST", "/v1/chat/completions", b"")
    uploading.messages = [{"type": "http.request", "body": b"{", "more_body": True}]
    uploading.start()
    await until(lambda: len(answered.sent) == 2)
    world.app.begin_shutdown(time.monotonic() + NOW_S)
    await asyncio.gather(*(call.task for call in (waiting, answered, uploading) if call.task))
    for call in (waiting, uploading):
        reply = call.reply()
        assert (reply.status, reply.error["code"], reply.complete) == (503, "shutting_down", True)
        assert reply.header(b"retry-after") == b"1" and reply.header(b"connection") == b"close"
    assert not answered.reply().complete
    assert set(half.outcomes) == {Outcome.ABORTED}
    assert len(world.app.running) == 0


async def test_new_requests_after_the_end_are_refused() -> None:
    world = World()
    world.app.begin_shutdown(time.monotonic())
    await until(lambda: world.app.running.ended)
    reply = await world.post()
    assert (reply.status, reply.error["code"]) == (503, "shutting_down")
    assert not world.hybrid.requests


async def test_a_client_that_takes_nothing_does_not_hold_the_worker() -> None:
    answer = FakeAnswer(b"data: x\n\n", HANG, headers=SSE)
    world = World(answer)
    call = Call(world.app, "POST", "/v1/chat/completions", CHAT)
    call.gate = asyncio.Event()
    call.start()
    await until(lambda: answer.reads == 1)
    began_s = time.monotonic()
    world.app.begin_shutdown(time.monotonic() + NOW_S)
    assert call.task is not None
    await call.task
    assert time.monotonic() - began_s < END_STREAMS_BEFORE_S
    assert answer.outcomes[0] is Outcome.ABORTED


async def test_what_an_interrupted_send_held_back_is_not_taken_as_sent() -> None:
    gates = iter([False, True, False])
    answer = FakeAnswer(b"data: x\n\n", b"data: half", HANG, headers=SSE)
    world = World(answer)
    call = Call(world.app, "POST", "/v1/chat/completions", CHAT)
    plain = call.send

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.body" and next(gates):
            await asyncio.Event().wait()
        await plain(message)

    call.send = send  # type: ignore[method-assign]
    call.start()
    await until(lambda: answer.reads >= 2)
    world.app.begin_shutdown(time.monotonic() + NOW_S)
    assert call.task is not None
    await call.task
    # A wire has taken it, and the client gets it: then it is a line that has to be ended.
    half = b"data: half\n\n" if call.wired else b""
    assert call.body.startswith(b"data: x\n\n" + half + b'data: {"error"')


async def test_a_break_at_the_same_time_is_told_once() -> None:
    world = World()

    async def breaks_when_cancelled() -> bytes:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise EngineBroke("broke while stopping") from None
        raise AssertionError

    answer = FakeAnswer(b"data: x\n\n", breaks_when_cancelled, headers=SSE)
    world.hybrid.script = [answer]
    call = Call(world.app, "POST", "/v1/chat/completions", CHAT).start()
    await until(lambda: len(call.sent) == 2)
    world.app.begin_shutdown(time.monotonic() + NOW_S)
    assert call.task is not None
    await call.task
    assert call.reply().complete and call.body.count(b'"error"') == 1


@pytest.mark.parametrize("waiting", [0, 3])
def test_state_is_printable(waiting: int) -> None:
    assert "stopping=False" in repr(World().app)
