"""An engine's answer to the client: bytes, statuses, ends, outcomes."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from app.dispatch.answer import Outcome
from app.errors import EngineBroke, EngineTimeout
from app.http.interrupt import Why
from tests.http.fakes import CHAT, HANG, JSON, SSE, Call, FakeAnswer, World, both_ways, until

DONE = b"data: [DONE]\n\n"
BROKE = EngineBroke("engine http://engine:1 broke off")


def length(size_bytes: int) -> list[tuple[bytes, bytes]]:
    return [*JSON, (b"content-length", b"%d" % size_bytes)]


async def relayed(answer: FakeAnswer, path: str = "/v1/chat/completions") -> Call:
    world = World(answer)
    call = Call(world.app, "POST", path, CHAT)
    await call.run()
    assert world.hybrid.unreleased() == []
    return call


def error_of(tail: bytes) -> dict[str, Any]:
    """The error in exactly one event."""
    assert tail.startswith(b"data: ") and tail.endswith(b"\n\n") and tail.count(b"data:") == 1
    return json.loads(tail[6:])["error"]  # type: ignore[no-any-return]


async def test_answer_with_length_passes_whole_and_ends_with_its_last_bytes() -> None:
    answer = FakeAnswer(b'{"a":', b"1}", headers=length(7))
    call = await relayed(answer)
    reply = call.reply()
    assert (reply.status, reply.body, reply.complete) == (200, b'{"a":1}', True)
    assert reply.header(b"content-length") == b"7"
    assert [m.get("body") for m in call.sent[1:]] == [b'{"a":', b"1}"]
    assert answer.outcome == Outcome.OK


async def test_the_count_is_given_back_before_the_last_bytes_leave() -> None:
    answer = FakeAnswer(b"12", headers=length(2))
    world = World(answer)
    call = Call(world.app, "POST", "/v1/embeddings", CHAT)
    call.gate = asyncio.Event()
    call.start()
    await until(lambda: answer.outcome is Outcome.OK)
    assert len(call.sent) == 1
    call.gate.set()
    assert call.task is not None
    await call.task
    assert call.reply().complete


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, Outcome.OK),
        (302, Outcome.OK),
        (400, Outcome.CLIENT_ERROR),
        (401, Outcome.CLIENT_ERROR),
        (429, Outcome.CLIENT_ERROR),
        (500, Outcome.ENGINE_ERROR),
        (503, Outcome.ENGINE_ERROR),
    ],
)
async def test_R18_R47_status_and_body_of_the_engine_pass_unchanged(status: int, outcome: Outcome) -> None:
    body = b'{"detail" : "\xc3\xa9"}'
    answer = FakeAnswer(body, status=status, headers=[*length(len(body)), (b"retry-after", b"7")])
    reply = (await relayed(answer)).reply()
    assert (reply.status, reply.body, reply.complete) == (status, body, True)
    assert reply.header(b"retry-after") == b"7"
    assert answer.outcomes[0] == outcome


async def test_answer_without_body() -> None:
    answer = FakeAnswer(status=204, headers=[(b"content-length", b"5")])
    reply = (await relayed(answer)).reply()
    assert (reply.status, reply.body, reply.complete, reply.header(b"content-length")) == (204, b"", True, None)


async def test_status_that_is_none_is_a_502() -> None:
    answer = FakeAnswer(b"x", status=999)
    assert (await relayed(answer)).reply().status == 502
    assert answer.outcomes[0] is Outcome.ENGINE_ERROR


async def test_head_goes_out_before_the_first_chunk_and_each_chunk_when_it_came() -> None:
    more: asyncio.Queue[bytes] = asyncio.Queue()
    answer = FakeAnswer(*[more.get] * 6, headers=SSE)
    world = World(answer)
    call = Call(world.app, "POST", "/v1/chat/completions", CHAT).start()
    await until(lambda: len(call.sent) == 1)
    for count, chunk in enumerate([b"d", b"ata: \xf0\x9f", b"\x98\x80\r\n", b"\r\n: note\n\n", DONE], start=2):
        more.put_nowait(chunk)
        await until(lambda count=count: len(call.sent) == count)  # type: ignore[misc]
        assert call.sent[-1] == {"type": "http.response.body", "body": chunk, "more_body": True}
    more.put_nowait(b"")
    assert call.task is not None
    await call.task
    assert call.reply().complete and answer.outcome == Outcome.OK


async def test_stream_headers() -> None:
    reply = (await relayed(FakeAnswer(DONE, headers=[*SSE, (b"cache-control", b"public")]))).reply()
    assert reply.header(b"content-type") == SSE[0][1]
    assert reply.header(b"x-accel-buffering") == b"no"
    assert [v for k, v in reply.headers if k == b"cache-control"] == [b"no-cache"]


async def test_a_slow_client_slows_the_reading_of_its_engine() -> None:
    answer = FakeAnswer(*[b"x" * 1000] * 50, headers=SSE)
    world = World(answer)
    call = Call(world.app, "POST", "/v1/responses", CHAT)
    call.gate = asyncio.Event()
    call.start()
    await asyncio.sleep(0.05)
    assert answer.reads == 1
    call.gate.set()
    assert call.task is not None
    await call.task
    assert answer.reads == 51


# --- ends that are none -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [BROKE, EngineTimeout("too slow", stage="idle")])
async def test_R46_stream_that_breaks_ends_with_one_error_event(error: Any) -> None:
    chunks = [b"data: %d\n\n" % i for i in range(5)]
    answer = FakeAnswer(*chunks, error, headers=SSE)
    call = await relayed(answer, "/v1/responses")
    reply = call.reply()
    assert reply.complete and b"[DONE]" not in reply.body
    sent = b"".join(chunks)
    assert reply.body.startswith(sent)
    assert error_of(reply.body[len(sent) :])["code"] == error.code
    assert answer.outcome == Outcome.ENGINE_ERROR


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("chunks", "fill"),
    [
        ([b"data: x\n\n"], b""),
        ([b"data: x\r\n\r\n"], b""),
        ([], b""),
        ([b"data: x\n"], b"\n"),
        ([b"data: x"], b"\n\n"),
        ([b'data: "[DONE]"\n\n'], b""),
    ],
)
async def test_R46_chat_stream_that_ends_without_done_ends_with_an_error_event(
    path: str, chunks: list[bytes], fill: bytes
) -> None:
    answer = FakeAnswer(*chunks, headers=SSE)
    reply = (await relayed(answer, path)).reply()
    sent = b"".join(chunks) + fill
    assert reply.complete and reply.body.startswith(sent)
    assert error_of(reply.body[len(sent) :])["code"] == "engine_broke_off"
    assert answer.outcome == Outcome.ENGINE_ERROR


@pytest.mark.parametrize(
    "done", [DONE, b"data:[DONE]\n\n", b"data: [DONE]\r\n\r\n", b"data: [DONE]\n", b"data: [DONE]"]
)
async def test_stream_with_done_in_any_spelling_and_fragmentation_passes_untouched(done: bytes) -> None:
    stream = b"data: x\n\n" + done
    for size in (1, 2, 3, 5, 7, len(stream)):
        answer = FakeAnswer(*[stream[i : i + size] for i in range(0, len(stream), size)], headers=SSE)
        reply = (await relayed(answer)).reply()
        assert reply.complete and reply.body == stream
        assert answer.outcome == Outcome.OK


async def test_other_paths_need_no_done() -> None:
    answer = FakeAnswer(b"event: x\ndata: y\n\n", headers=SSE)
    assert (await relayed(answer, "/v1/messages")).reply().body == b"event: x\ndata: y\n\n"
    assert answer.outcome == Outcome.OK


async def test_error_that_comes_as_a_stream_needs_no_done() -> None:
    answer = FakeAnswer(b"data: {}\n\n", status=400, headers=SSE)
    assert (await relayed(answer)).reply().body == b"data: {}\n\n"
    assert answer.outcome == Outcome.CLIENT_ERROR


async def test_stream_that_breaks_after_done_is_complete() -> None:
    answer = FakeAnswer(b"data: x\n\n", DONE, BROKE, headers=SSE)
    reply = (await relayed(answer)).reply()
    assert reply.complete and reply.body == b"data: x\n\n" + DONE
    assert answer.outcome == Outcome.OK


async def test_encoded_stream_is_not_looked_into_and_gets_no_event() -> None:
    encoded = [*SSE, (b"content-encoding", b"gzip")]
    answer = FakeAnswer(b"\x1f\x8b", headers=encoded)
    assert (await relayed(answer)).reply().complete and answer.outcome == Outcome.OK
    answer = FakeAnswer(b"\x1f\x8b", BROKE, headers=encoded)
    reply = (await relayed(answer)).reply()
    assert reply.body == b"\x1f\x8b" and not reply.complete
    assert answer.outcome == Outcome.ENGINE_ERROR


@pytest.mark.parametrize("headers", [length(9), JSON])
async def test_other_answer_that_breaks_gets_no_proper_end(
    headers: list[tuple[bytes, bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    answer = FakeAnswer(b'{"a"', BROKE, headers=headers)
    reply = (await relayed(answer)).reply()
    assert reply.body == b'{"a"' and not reply.complete
    assert answer.outcome == Outcome.ENGINE_ERROR
    assert [record.exc_info for record in caplog.records] == [None]
    assert "http://engine:1" in caplog.text


async def test_answer_shorter_than_its_length_gets_no_proper_end() -> None:
    answer = FakeAnswer(b"12", headers=length(9))
    assert not (await relayed(answer)).reply().complete
    assert answer.outcome == Outcome.ENGINE_ERROR


async def test_stream_with_length_can_still_end_with_an_event() -> None:
    answer = FakeAnswer(b"data: x\n\n", BROKE, headers=[*SSE, (b"content-length", b"500")])
    reply = (await relayed(answer)).reply()
    assert reply.header(b"content-length") is None and reply.complete


async def test_fault_of_ours_in_mid_answer_still_releases(caplog: pytest.LogCaptureFixture) -> None:
    answer = FakeAnswer(b"x", ZeroDivisionError("bug"), headers=SSE)
    call = await relayed(answer)
    assert not call.reply().complete
    assert answer.outcome == Outcome.ABORTED
    assert caplog.records[-1].levelno == logging.ERROR


# --- the client leaves ------------------------------------------------------------------------------


async def test_client_leaves_while_its_body_is_read() -> None:
    world = World()
    call = Call(world.app, "POST", "/v1/chat/completions", b"")
    call.messages = [{"type": "http.request", "body": b"{", "more_body": True}]
    call.start()
    await asyncio.sleep(0.01)
    call.leave()
    assert call.task is not None
    await call.task
    assert not call.sent and not world.hybrid.requests and len(world.app.running) == 0


async def test_client_leaves_before_the_head() -> None:
    world = World(HANG)
    call = Call(world.app, "POST", "/v1/chat/completions", CHAT).start()
    await until(lambda: world.hybrid.waiting == 1)
    call.leave()
    assert call.task is not None
    await call.task
    assert world.hybrid.waiting == 0 and world.hybrid.cancelled_at_s is not None and not call.sent


@pytest.mark.parametrize("headers", [SSE, JSON, length(100)])
@pytest.mark.parametrize("chunks", [0, 3])
async def test_client_leaves_between_chunks(headers: list[tuple[bytes, bytes]], chunks: int) -> None:
    answer = FakeAnswer(*[b"data: x\n\n"] * chunks, HANG, headers=headers)
    world = World(answer)
    call = Call(world.app, "POST", "/v1/chat/completions", CHAT).start()
    sent = 1 + chunks if chunks or headers is SSE else 0  # the head of what is no stream waits for its body
    await until(lambda: answer.reads == chunks + 1 and len(call.sent) == sent)
    call.leave()
    assert call.task is not None
    await call.task
    assert set(answer.outcomes) == {Outcome.ABORTED} and len(call.sent) == sent


@pytest.mark.parametrize("headers", [JSON, length(100)])
@pytest.mark.parametrize(
    ("error", "status"), [(BROKE, 502), (EngineTimeout("engine http://engine:1 sent nothing", stage="idle"), 504)]
)
async def test_an_answer_of_which_nothing_came_but_its_head_is_an_error_of_its_own(
    headers: list[tuple[bytes, bytes]], error: Exception, status: int
) -> None:
    answer = FakeAnswer(error, headers=headers)
    reply = (await relayed(answer)).reply()
    assert (reply.status, reply.complete) == (status, True)
    assert error.args[0] in reply.error["message"] and answer.outcomes[0] is Outcome.ENGINE_ERROR


async def test_an_answer_that_ends_before_its_first_byte_is_a_502() -> None:
    answer = FakeAnswer(headers=length(100))
    reply = (await relayed(answer)).reply()
    assert reply.status == 502 and "shorter" in reply.error["message"]
    assert answer.failures and answer.outcomes[0] is Outcome.ENGINE_ERROR


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_a_body_is_no_stream_whatever_it_says(status: int) -> None:
    answer = FakeAnswer(status=status, headers=SSE)
    reply = (await relayed(answer)).reply()
    assert (reply.status, reply.body, reply.complete) == (status, b"", True)


async def test_client_leaves_while_a_send_is_blocked() -> None:
    answer = FakeAnswer(*[b"data: x\n\n"] * 3, HANG, headers=SSE)
    world = World(answer)
    call = Call(world.app, "POST", "/v1/chat/completions", CHAT)
    call.gate = asyncio.Event()
    call.start()
    await until(lambda: answer.reads == 1)
    call.leave()
    assert call.task is not None
    await call.task
    assert set(answer.outcomes) == {Outcome.ABORTED}


async def test_client_that_has_its_done_leaves_content() -> None:
    answer = FakeAnswer(b"data: x\n\n", DONE, HANG, headers=SSE)
    world = World(answer)
    call = Call(world.app, "POST", "/v1/chat/completions", CHAT).start()
    await until(lambda: len(call.sent) == 3)
    call.leave()
    assert call.task is not None
    await call.task
    assert set(answer.outcomes) == {Outcome.OK}


@pytest.mark.parametrize("turns", range(12))
async def test_leaving_at_any_turn_of_the_loop_releases_and_ends_quietly(
    turns: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def chunk() -> bytes:
        await asyncio.sleep(0)
        return b"data: x\n\n"

    answer = FakeAnswer(*[chunk] * 3, DONE, headers=SSE)
    world = World(answer)
    call = Call(world.app, "POST", "/v1/chat/completions", CHAT).start()
    assert call.task is not None
    for _ in range(turns):
        await asyncio.sleep(0)
    call.leave()
    await call.task
    assert call.task.cancelling() == 0
    assert world.hybrid.unreleased() == [] and len(world.app.running) == 0
    assert not caplog.records


async def test_cancelled_from_outside_releases_and_stays_cancelled() -> None:
    answer = FakeAnswer(b"data: x\n\n", HANG, headers=SSE)
    world = World(answer)
    call = Call(world.app, "POST", "/v1/chat/completions", CHAT)
    task = asyncio.create_task(world.app(call.scope, call.receive, call.send))
    await until(lambda: len(call.sent) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert answer.outcomes == [Outcome.ABORTED] and len(world.app.running) == 0


async def test_cancelled_from_outside_and_left_at_once_stays_cancelled() -> None:
    world = World(HANG)
    call = Call(world.app, "POST", "/v1/chat/completions", CHAT)
    task = asyncio.create_task(world.app(call.scope, call.receive, call.send))
    await until(lambda: world.hybrid.waiting == 1)
    (watch,) = world.app.running._watches
    watch.interrupt(Why.LEFT)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(world.app.running) == 0


async def test_one_watcher_on_receive_for_a_request() -> None:
    async def chunk() -> bytes:
        await asyncio.sleep(0)
        return b"data: x\n\n"

    # Call.receive itself fails on a second one that waits at the same time.
    call = await relayed(FakeAnswer(*[chunk] * 20, DONE, headers=SSE))
    assert call.receives == (0 if call.wired else 2)  # the body, and the watch
    await asyncio.sleep(0)
    assert call.receives_waiting == 0


# --- how much work an answer was --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunks", "headers", "tokens"),
    [
        ([b"data: a\n\n", b"data: b\n\ndata: c\n\n", b"da", b"ta: d\n\n", b"data: [DONE]\n\n"], SSE, 4),
        ([b'{"usage":{"completion_', b'tokens":12}}'], None, 12),
        ([b"x" * 3000, b"y" * 1000], None, 1000),
    ],
)
async def test_tokens_are_counted_as_they_pass(chunks: list[bytes], headers: Any, tokens: float) -> None:
    answer = FakeAnswer(*chunks, headers=headers)
    await relayed(answer, "/v1/chat/completions")
    assert answer.tokens == tokens
