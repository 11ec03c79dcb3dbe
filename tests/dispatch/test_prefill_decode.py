"""Prefill and decode on two nodes: order, counts, and every way to fail. By NIXL where the protocol matters.

The bodies: test_handover_bodies.py. What the client reads of both legs: test_merge.py.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from app.dispatch import caller as caller_module
from app.dispatch.answer import Answer, EngineRequest, Outcome
from app.dispatch.caller import Leg
from app.dispatch.handover import protocol as protocol_module
from app.dispatch.handover.bodies import Members, Prefilled, for_prefill, with_values
from app.dispatch.handover.lmdeploy import _Migrating
from app.dispatch.handover.nixl import Nixl
from app.dispatch.handover.protocol import Concurrent, Handed, HandOverLost, Legs, LinkFailed, Protocol
from app.dispatch.pair import Pair
from app.dispatch.retries import never_arrived
from app.dispatch.work import work_of
from app.errors import (
    BadRequest,
    EngineBroke,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    ModelNotFound,
    NoNodeAvailable,
    UpstreamError,
)
from app.nodes import Node, Role, State
from app.store.migrations import Session
from app.upstream.transport import Timeouts
from tests.dispatch.fakes import (
    D0,
    D1,
    HEADERS,
    MODEL,
    P0,
    P1,
    PARAMS,
    PREFILLED,
    Call,
    FakeBudget,
    FakeCaller,
    FakeFigures,
    FakeHanding,
    FakeLedger,
    FakeRegistry,
    FakeResponse,
    Json,
    hangs,
    nodes_of,
    refuses,
    split_by,
)

CLIENT: Json = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 100,
    "min_tokens": 5,
    "temperature": 0.5,
}
CHAT = b"/v1/chat/completions?q=1"


class Both(Concurrent):
    """Both legs at once with nothing to meet by but a number, new for each attempt."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.attempts = itertools.count()
        self.failures: list[str] = []
        self.refusals: list[str] = []

    async def legs(self, pair: Pair, request: EngineRequest, members: Members) -> Legs:
        attempt = {"attempt": next(self.attempts)}
        prefill = EngineRequest(b"POST", request.path, request.headers, for_prefill(members, attempt), request.model)
        decode = EngineRequest(b"POST", request.path, request.headers, with_values(members, attempt), request.model)
        return Legs(prefill, decode)

    def failed(self, url: str) -> None:
        self.failures.append(url)

    def refused(self, url: str) -> None:
        self.refusals.append(url)


def nixl(*, lease_s: float = 30, recompute: bool = True) -> Callable[..., Protocol]:
    return lambda **parts: Nixl(**parts, lease_s=lease_s, recompute=recompute)


class World:
    def __init__(self, *nodes: Node, by: Callable[..., Protocol] | None = None, **rules: Any) -> None:
        self.registry = FakeRegistry(*(nodes or nodes_of(0, prefill=1)))
        self.ledger = FakeLedger(self.registry)
        self.caller = FakeCaller()
        self.figures = FakeFigures()
        self.handing = FakeHanding()
        parts: Any = {"caller": self.caller, "figures": self.figures}
        self.protocol = (by or nixl())(**parts)
        more: Any = {"protocol": self.protocol, "handing": self.handing}
        self.split = split_by(self.registry, self.ledger, **parts, **more, **rules)

    async def ask(self, body: bytes | Json = CLIENT, model: str = MODEL, path: bytes = CHAT) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.split.open(EngineRequest(b"POST", path, list(HEADERS), raw, model))

    async def served(self, body: bytes | Json = CLIENT, **more: Any) -> str:
        """The node that answered with 200; nothing is counted any more."""
        answer = await self.ask(body, **more)
        assert answer.status == 200
        answer.close(Outcome.OK)
        await turns()
        assert self.ledger.unfinished == {} and not self.handing.counts.total()
        return answer.url

    @property
    def called(self) -> list[str]:
        return [call.url for call in self.caller.calls]

    def begin(self, body: Json = CLIENT) -> asyncio.Task[Answer]:
        return asyncio.create_task(self.ask(body))


BOTH_WAYS = pytest.mark.parametrize("by", [nixl(), Both], ids=["one after the other", "both at once"])


@BOTH_WAYS
async def test_each_leg_is_noted_as_what_it_is(by: Callable[..., Protocol]) -> None:
    world = World(by=by)
    await world.served()
    assert sorted(world.caller.stages) == [("decode", D0), ("prefill", P0)]


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def waits_for(gate: asyncio.Event, result: Any = None) -> Callable[[Call], Any]:
    async def wait(call: Call) -> Any:
        await gate.wait()
        return result(call) if callable(result) else result

    return lambda call: wait(call)


# --- the way of a request ---------------------------------------------------------------------------


async def test_prefill_first_and_decode_with_what_it_said() -> None:
    world = World()
    answer = await world.ask()
    prefill, decode = world.caller.calls
    assert (prefill.url, decode.url, answer.url) == (P0, D0, D0)
    assert (prefill.leg, decode.leg) == (Leg.PREFILL, Leg.WHOLE), "each has time limits of its own"
    for call in (prefill, decode):
        assert (call.request.method, call.request.path, call.id) == (b"POST", CHAT, "parent")
        assert [header for header in call.request.headers if header[0] != b"accept-encoding"] == HEADERS
    assert (prefill.body["max_tokens"], prefill.body["stream"]) == (1, False)
    assert decode.body == {**CLIENT, "kv_transfer_params": PARAMS}
    assert (answer.status, await answer.read()) == (200, b'{"answered":true}')
    answer.close(Outcome.OK)
    assert world.ledger.unfinished == {} and world.ledger.latencies == {P0: 1, D0: 1}


async def test_decodes_answer_is_read_here_so_it_is_not_asked_for_compressed() -> None:
    world = World()
    request = EngineRequest(
        b"POST", CHAT, [*HEADERS, (b"accept-encoding", b"gzip")], json.dumps(CLIENT).encode(), MODEL
    )
    (await world.split.open(request)).close(Outcome.OK)
    sent = world.caller.to(D0)[0].request.headers
    assert [value for name, value in sent if name == b"accept-encoding"] == [b"identity"]


async def test_r07_both_are_counted_while_prefill_works_and_prefill_is_free_once_it_is_done() -> None:
    world = World()
    first, second = asyncio.Event(), asyncio.Event()
    world.caller.behaviour = {P0: waits_for(first), D0: waits_for(second)}
    task = world.begin()
    await turns()
    assert world.ledger.unfinished == {P0: 1, D0: 1}
    first.set()
    await turns()
    assert world.ledger.unfinished == {D0: 1}
    second.set()
    (await task).close(Outcome.OK)
    assert world.ledger.unfinished == {}


async def test_both_at_once_are_called_at_once_and_each_is_given_back_when_its_own_answer_has_ended() -> None:
    world = World(by=Both)
    world.caller.kind = b"text/event-stream"
    first, second = asyncio.Event(), asyncio.Event()
    world.caller.behaviour = {P0: waits_for(first), D0: waits_for(second)}
    task = world.begin()
    await turns()
    assert (set(world.called), world.ledger.unfinished) == ({P0, D0}, {P0: 1, D0: 1})
    assert {call.url: call.leg for call in world.caller.calls} == {P0: Leg.PREFILL, D0: Leg.BESIDE_PREFILL}
    second.set()
    answer = await task
    assert world.ledger.unfinished == {P0: 1, D0: 1}, "prefill's own answer is on its way still"
    first.set()
    await turns()
    assert world.ledger.unfinished == {D0: 1} and world.ledger.latencies == {P0: 1}
    answer.close(Outcome.OK)
    assert world.ledger.unfinished == {} and world.ledger.latencies == {P0: 1, D0: 1}


async def test_prefills_answer_is_read_for_no_longer_than_decode_answers() -> None:
    world = World(by=Both)
    world.caller.kind = b"text/event-stream"
    world.caller.behaviour[P0] = hangs
    answer = await world.ask()
    answer.close(Outcome.OK)
    await turns()
    assert world.caller.to(P0)[0].cancelled
    assert world.ledger.unfinished == {} and world.ledger.latencies == {D0: 1, P0: 0}


async def test_without_a_stream_prefills_answer_is_waited_for_a_moment_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol_module, "DRAIN_S", 0.02)
    world = World(by=Both)
    world.caller.behaviour[P0] = hangs
    answer = await asyncio.wait_for(world.ask({**CLIENT, "stream": False}), 5)
    assert answer.status == 200
    answer.close(Outcome.OK)
    await turns()
    assert world.ledger.unfinished == {}


def usage_of(prompt: int, completion: int, cached: int) -> Json:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


OF_PREFILL, OF_DECODE = usage_of(11, 1, 4), usage_of(12, 7, 12)
RIGHT = usage_of(11, 7, 4)
SAID_LATE = json.dumps({"choices": [], "usage": OF_PREFILL}).encode()
FIRST, LAST = b'data: {"choices":[{}]}\n\n', b'data: {"choices":[],"usage":%s}\n\n' % json.dumps(OF_DECODE).encode()


def told(event: bytes) -> Json:
    usage: Json = json.loads(event.removeprefix(b"data: "))["usage"]
    return usage


async def test_figures_of_a_stream_wait_for_prefills_answer_and_nothing_else_does() -> None:
    world = World(by=Both)
    world.caller.kind = b"text/event-stream"
    says = asyncio.Event()
    world.caller.behaviour = {P0: waits_for(says, SAID_LATE), D0: lambda call: FIRST}
    answer = await world.ask()
    world.caller.responses[0].body += [LAST, b"data: [DONE]\n\n"]
    assert await asyncio.wait_for(answer.read(), 1) == FIRST
    last = asyncio.create_task(answer.read())
    await turns()
    assert not last.done()
    says.set()
    assert told(await last) == RIGHT
    assert await answer.read() == b"data: [DONE]\n\n"
    answer.close(Outcome.OK)
    assert world.ledger.unfinished == {} and world.ledger.latencies == {P0: 1, D0: 1}


async def test_without_a_stream_too_though_decodes_whole_answer_is_here() -> None:
    world = World(by=Both)
    says = asyncio.Event()
    whole = json.dumps({"choices": [], "usage": OF_DECODE}).encode()
    world.caller.behaviour = {P0: waits_for(says, SAID_LATE), D0: lambda call: whole}
    task = world.begin({**CLIENT, "stream": False})
    await turns()
    assert not task.done()
    says.set()
    answer = await task
    assert json.loads(await answer.read())["usage"] == RIGHT
    answer.close(Outcome.OK)


@pytest.mark.parametrize("late", [hangs, lambda call: (500, b"{}")], ids=["hangs", "fails"])
async def test_figures_that_prefill_does_not_say_soon_are_decodes_own_and_waited_for_once(
    late: Callable[[Call], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol_module, "DRAIN_S", 0.05)
    world = World(by=Both)
    world.caller.kind = b"text/event-stream"
    decode_speaks = asyncio.Event()

    async def fails_after_it(call: Call) -> Any:
        await decode_speaks.wait()
        await turns()
        result = late(call)
        return await result if isinstance(result, Awaitable) else result

    world.caller.behaviour = {P0: fails_after_it, D0: lambda call: LAST}
    answer = await world.ask()
    world.caller.responses[0].body += [LAST] * 100
    decode_speaks.set()
    async with asyncio.timeout(2):  # of 5 s if each of them waited
        for _ in range(101):
            assert told(await answer.read()) == OF_DECODE
    answer.close(Outcome.OK)
    await turns()
    assert world.ledger.unfinished == {}


async def test_r07_a_busy_prefill_node_is_passed_over() -> None:
    world = World(*nodes_of(0, prefill=2))
    world.caller.behaviour[P0] = hangs
    task = world.begin()
    await turns(2)
    (await world.ask()).close(Outcome.OK)
    assert world.called == [P0, P1, D0]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert world.ledger.unfinished == {}


async def test_stages_are_timed_at_their_nodes_and_told_in_a_header() -> None:
    world = World()
    answer = await world.ask()
    assert world.figures.stages == [("prefill", P0), ("handover", D0), ("decode", D0)]
    (value,) = (value.decode() for name, value in answer.headers if name == b"server-timing")
    # Source: W3C Server Timing: name;dur=milliseconds, with commas between.
    stages = [stage.split(";dur=") for stage in value.split(", ")]
    assert [name for name, _ in stages] == ["prefill", "handover", "decode"]
    assert all(0 <= float(milliseconds) < 5000 for _, milliseconds in stages)
    answer.close(Outcome.OK)


async def test_a_stage_that_failed_is_not_timed() -> None:
    world = World()
    world.caller.behaviour[P0] = lambda call: (500, b"{}")
    (await world.ask()).close(Outcome.ENGINE_ERROR)
    world.caller.behaviour = {D0: lambda call: (500, b"{}")}
    answer = await world.ask()
    assert world.figures.stages == [("prefill", P0), ("handover", D0)]
    answer.close(Outcome.ENGINE_ERROR)


# --- what is not split ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [b"/v1/embeddings", b"/v1/audio/transcriptions", b"/v1/chat/completions/batch"])
async def test_what_is_not_generated_token_by_token_goes_whole_to_a_decode_node(path: bytes) -> None:
    world = World()
    raw = b'{"model": "m" , "x":1.0, "echo":true}'
    assert await world.served(raw, path=path) == D0
    (call,) = world.caller.calls
    assert (call.url, call.request.body, call.request.path) == (D0, raw, path)
    assert world.ledger.taken == {D0: 1}


@pytest.mark.parametrize(("by", "split"), [(nixl(), True), (Both, False)], ids=["nixl", "others"])
async def test_responses_are_split_by_the_protocols_that_know_them(by: Callable[..., Protocol], split: bool) -> None:
    world = World(by=by)
    await world.served({"model": MODEL, "input": "hi"}, path=b"/v1/responses")
    assert world.called == ([P0, D0] if split else [D0])


@BOTH_WAYS
@pytest.mark.parametrize(
    ("field", "value"), [("echo", True), ("prompt_logprobs", 1), ("prompt_logprobs", 0), ("echo", "yes")]
)
async def test_r72_what_decode_can_not_answer_is_a_400_that_names_it_and_nobody_is_called(
    by: Callable[..., Protocol], field: str, value: object
) -> None:
    world = World(by=by)
    with pytest.raises(BadRequest, match=field) as caught:
        await world.ask({**CLIENT, field: value})
    assert caught.value.param == field
    assert world.called == [] and world.ledger.unfinished == {}


@BOTH_WAYS
@pytest.mark.parametrize(("field", "value"), [("echo", False), ("echo", None), ("prompt_logprobs", None)])
async def test_r72_what_is_not_asked_for_is_no_reason(by: Callable[..., Protocol], field: str, value: object) -> None:
    assert await World(by=by).served({**CLIENT, field: value}) == D0


@BOTH_WAYS
@pytest.mark.parametrize("raw", [b"[]", b'{"model":"m","n":' + b"[" * 100_000])
async def test_a_body_that_nobody_can_read_is_a_400_and_nothing_stays_counted(
    by: Callable[..., Protocol], raw: bytes
) -> None:
    world = World(by=by)
    with pytest.raises(BadRequest):
        await world.ask(raw)
    assert world.called == [] and world.ledger.unfinished == {}


class BreaksOff(FakeResponse):
    async def read(self) -> bytes:
        if chunk := await super().read():
            return chunk
        raise EngineBroke("reset")


@BOTH_WAYS
@pytest.mark.parametrize("stream", [True, False])
async def test_decode_that_breaks_off_in_the_middle_has_failed(by: Callable[..., Protocol], stream: bool) -> None:
    world = World(by=by)
    kind = b"text/event-stream" if stream else b"application/json"

    async def sent(url: str, request: EngineRequest, leg: Leg, *, stage: str) -> Any:
        return BreaksOff(200, b"data: 1\n\n", [(b"content-type", kind)])

    world.caller.send = sent  # type: ignore[method-assign]

    async def read_on() -> None:
        answer = await world.ask()
        while True:
            await answer.read()

    with pytest.raises(EngineBroke):
        await read_on()
    assert world.caller.broken == [(D0, "EngineBroke")]


# --- prefill fails ----------------------------------------------------------------------------------


@BOTH_WAYS
@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
async def test_r60_prefills_own_failure_is_the_answer_and_decode_is_not_called_or_no_longer(
    by: Callable[..., Protocol], status: int
) -> None:
    world = World(by=by)
    world.caller.behaviour = {P0: lambda call: (status, b'{"error":{"message":"too long"}}'), D0: hangs}
    answer = await asyncio.wait_for(world.ask(), 1)
    assert (answer.status, answer.url, await answer.read()) == (status, P0, b'{"error":{"message":"too long"}}')
    assert (b"x-engine", b"yes") in answer.headers
    assert all(call.cancelled for call in world.caller.to(D0)) and len(world.caller.to(D0)) == (by is Both)
    assert world.ledger.unfinished == {}
    answer.close(Outcome.ENGINE_ERROR)
    assert world.ledger.unfinished == {} and world.ledger.latencies[P0] == 0
    assert dict(+world.ledger.rows_ended) == ({P0: 1} if status < 500 else {}), "a row of failures ends, or goes on"
    if by is Both:
        told = (world.protocol.failures, world.protocol.refusals)
        assert told == (([P0], []) if status >= 500 else ([], [P0]))


MAY_HAVE_BEGUN = [EngineTimeout("slow", stage="first_byte"), EngineBroke("reset"), 500, 502, 503, 504]


def fails_by(failure: UpstreamError | int) -> Callable[[Call], Any]:
    return lambda call: (failure, b"{}") if isinstance(failure, int) else failure


def name_of(failure: object) -> str:
    return str(failure) if isinstance(failure, int) else type(failure).__name__


@BOTH_WAYS
@pytest.mark.parametrize("failure", MAY_HAVE_BEGUN, ids=name_of)
async def test_r60_where_a_prefill_node_may_have_begun_another_is_asked_within_the_budget(
    by: Callable[..., Protocol], failure: UpstreamError | int
) -> None:
    budget = FakeBudget()
    world = World(*nodes_of(0, prefill=2), by=by, budget=budget)
    world.caller.behaviour = {P0: fails_by(failure), (D0, 0): hangs if by is Both else lambda call: None}
    assert await world.served() == D0
    assert world.called.count(P0) == world.called.count(P1) == 1 and budget.taken == 1
    assert world.ledger.latencies == {P0: 0, P1: 1, D0: 1}
    if by is Both:
        first, second = world.caller.to(D0)
        assert first.cancelled and (first.body["attempt"], second.body["attempt"]) == (0, 1)


@BOTH_WAYS
@pytest.mark.parametrize("failure", MAY_HAVE_BEGUN, ids=name_of)
@pytest.mark.parametrize("fails", [P0, D0])
async def test_without_a_budget_nobody_else_is_asked_and_the_failure_is_the_answer(
    by: Callable[..., Protocol], failure: UpstreamError | int, fails: str
) -> None:
    world = World(*nodes_of(0, prefill=2, decode=2), by=by, budget=FakeBudget(0))
    world.caller.behaviour = {P0: hangs, D0: hangs} if by is Both else {}
    world.caller.behaviour[fails] = fails_by(failure)
    if isinstance(failure, int):
        answer = await asyncio.wait_for(world.ask(), 1)
        assert (answer.status, answer.url) == (failure, fails)
        answer.close(Outcome.ENGINE_ERROR)
    else:
        with pytest.raises(type(failure)) as caught:
            await asyncio.wait_for(world.ask(), 1)
        assert caught.value is failure
    await turns()
    assert P1 not in world.called and D1 not in world.called and world.ledger.unfinished == {}
    assert all(response.closed for response in world.caller.responses) and not world.caller.running.total()


@BOTH_WAYS
async def test_a_failure_that_is_neither_the_connections_nor_silence_is_not_tried_elsewhere(
    by: Callable[..., Protocol],
) -> None:
    for failure in (UpstreamError("else"), EngineProtocolError("else"), EngineTimeout("slow", stage="idle")):
        world = World(*nodes_of(0, prefill=2), by=by)
        world.caller.behaviour = {P0: fails_by(failure), D0: hangs}
        with pytest.raises(UpstreamError) as caught:
            await world.ask()
        assert caught.value is failure
        assert P1 not in world.called and world.ledger.unfinished == {}
        assert all(call.cancelled for call in world.caller.to(D0))


@BOTH_WAYS
@pytest.mark.parametrize(
    "failure",
    [EngineRefused("refused"), EngineUnreachable("dns"), EngineTimeout("slow", stage="connect")],
    ids=lambda failure: type(failure).__name__,
)
async def test_r60_another_prefill_node_is_asked_where_the_first_can_not_have_seen_it(
    by: Callable[..., Protocol], failure: UpstreamError
) -> None:
    world = World(*nodes_of(0, prefill=2), by=by)
    world.caller.behaviour = {P0: lambda call: failure}
    assert await world.served() == D0
    assert world.called.count(P0) == world.called.count(P1) == 1
    assert world.ledger.latencies == {P0: 0, P1: 1, D0: 1}


@BOTH_WAYS
async def test_of_many_prefill_nodes_that_refuse_three_are_tried(by: Callable[..., Protocol]) -> None:
    urls = [f"http://p{n}:1" for n in range(5)]
    world = World(*nodes_of(0, prefill=5), by=by)
    world.caller.behaviour = dict.fromkeys(urls, refuses) | {D0: hangs}
    with pytest.raises(EngineRefused, match="http://p2:1"):
        await world.ask()
    assert [url for url in world.called if url in urls] == urls[:3]
    assert world.ledger.unfinished == {}


@BOTH_WAYS
async def test_where_the_only_prefill_node_refuses_that_is_the_error(by: Callable[..., Protocol]) -> None:
    world = World(by=by)
    world.caller.behaviour = {P0: refuses, D0: hangs}
    with pytest.raises(EngineRefused, match=P0):
        await world.ask()
    assert world.called.count(P0) == 1 and world.ledger.unfinished == {}


@BOTH_WAYS
@pytest.mark.parametrize(
    "said", [b"", b"null", b"[]", b"<html>", b'{"kv_transfer_params":', b"\xff", b'{"usage":' + b"[" * 100_000]
)
async def test_a_prefill_answer_that_is_no_json_object_is_a_502_and_decode_is_not_called(
    by: Callable[..., Protocol], said: bytes
) -> None:
    world = World(by=by)
    world.caller.behaviour = {P0: lambda call: said, D0: hangs}
    with pytest.raises(EngineProtocolError, match=P0) as caught:
        await world.ask()
    assert caught.value.status == 502
    assert all(call.cancelled for call in world.caller.to(D0)) and world.ledger.unfinished == {}
    assert world.ledger.latencies[P0] == 0


@BOTH_WAYS
@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_r60_a_prefill_that_the_engine_gave_up_is_a_502_at_once(by: Callable[..., Protocol], reason: str) -> None:
    world = World(by=by)
    said = json.dumps({"choices": [{"finish_reason": reason}], "kv_transfer_params": PARAMS}).encode()
    world.caller.behaviour = {P0: lambda call: said, D0: hangs}
    with pytest.raises(EngineProtocolError, match=f"{P0}.*gave up"):
        await asyncio.wait_for(world.ask(), 1)
    assert all(call.cancelled for call in world.caller.to(D0)) and world.ledger.unfinished == {}
    assert world.ledger.latencies[P0] == 0


# --- prefill names no place -------------------------------------------------------------------------

NO_PLACE = [
    b"{}",
    b'{"kv_transfer_params":null}',
    b'{"kv_transfer_params": {} }',
    b'{"id":"x","kv_transfer_params":{\n}}',
    *(b'{"kv_transfer_params":%s}' % shape for shape in (b'"x"', b"[1]", b"3", b"false", b"[" * 900 + b"]" * 900)),
    # Source: vLLM's NixlConnector. Without one of these its decode engine fetches nothing.
    *(
        json.dumps({"kv_transfer_params": {k: v for k, v in PARAMS.items() if k != name}}).encode()
        for name in ("do_remote_prefill", "remote_block_ids", "remote_engine_id", "remote_host", "remote_port")
    ),
    *(
        json.dumps({"kv_transfer_params": PARAMS | wrong}).encode()
        for wrong in (
            {"remote_block_ids": None},
            {"remote_engine_id": None},
            {"remote_host": 7},
            {"remote_port": "5600"},
            {"do_remote_prefill": False},  # what prefill was asked, said back
        )
    ),
]


@pytest.mark.parametrize("said", NO_PLACE)
async def test_where_prefill_names_no_place_decode_computes_it_again_and_it_is_counted(said: bytes) -> None:
    world = World()
    world.caller.behaviour[P0] = lambda call: said
    assert await world.served() == D0
    assert world.caller.to(D0)[0].body == CLIENT
    assert world.figures.counts == {"missing_params": 1}


@pytest.mark.parametrize("said", NO_PLACE)
async def test_where_prefill_names_no_place_it_can_be_a_502_instead(said: bytes) -> None:
    world = World(by=nixl(recompute=False))
    world.caller.behaviour[P0] = lambda call: said
    with pytest.raises(EngineProtocolError, match=f"{P0}.*kv_transfer_params") as caught:
        await world.ask()
    assert caught.value.status == 502
    assert world.called == [P0] and world.ledger.unfinished == {}
    assert world.figures.counts == {"missing_params": 1}


@pytest.mark.parametrize("less", [{"remote_block_ids": []}, {"remote_request_id": None}, {"tp_size": None}])
async def test_what_older_engines_leave_out_is_not_missed(less: Json) -> None:
    world = World(by=nixl(recompute=False))
    params = {name: value for name, value in (PARAMS | less).items() if value is not None}
    world.caller.behaviour[P0] = lambda call: json.dumps({"kv_transfer_params": params}).encode()
    assert await world.served() == D0
    assert world.caller.to(D0)[0].body["kv_transfer_params"] == params and not world.figures.counts


# --- decode fails -----------------------------------------------------------------------------------


@BOTH_WAYS
async def test_r61_another_decode_node_is_asked_where_the_first_refuses(by: Callable[..., Protocol]) -> None:
    world = World(*nodes_of(0, prefill=1, decode=2), by=by)
    world.caller.behaviour = {D0: refuses}
    assert await world.served() == D1
    # Both at once, prefill has ended by the time decode refuses, and computes again.
    assert world.ledger.latencies == {P0: 1 + (by is Both), D0: 0, D1: 1}


async def test_r61_the_other_decode_node_gets_the_same_hand_over_and_prefill_is_not_asked_again() -> None:
    world = World(*nodes_of(0, prefill=1, decode=2))
    world.caller.behaviour = {D0: refuses}
    await world.served()
    assert world.called == [P0, D0, D1]
    assert world.caller.to(D0)[0].request.body == world.caller.to(D1)[0].request.body


async def test_r61_both_at_once_the_next_attempt_has_new_ids() -> None:
    world = World(*nodes_of(0, prefill=1, decode=2), by=Both)
    world.caller.behaviour = {D0: refuses, (P0, 0): hangs}
    await world.served()
    assert [call.body["attempt"] for call in world.caller.to(P0)] == [0, 1]
    assert [call.body["attempt"] for call in world.caller.to(D0, D1)] == [0, 1]
    assert world.caller.to(P0)[0].cancelled, "nobody fetches what the first attempt left"
    assert world.protocol.failures == [P0]


async def test_r61_both_at_once_prefill_is_counted_again_where_it_had_ended_before_decode_refused() -> None:
    world = World(*nodes_of(0, prefill=1, decode=2), by=Both)
    refuse, second = asyncio.Event(), asyncio.Event()
    world.caller.behaviour = {
        D0: waits_for(refuse, refuses),
        (P0, 1): waits_for(second, PREFILLED),
        D1: waits_for(second),
    }
    task = world.begin()
    await turns()
    assert world.ledger.unfinished == {D0: 1}, "prefill has ended"
    refuse.set()
    await turns()
    assert world.caller.running[P0] == 1, "it computes a second time"
    counted = world.ledger.unfinished
    second.set()
    (await task).close(Outcome.OK)
    assert counted == {P0: 1, D1: 1}


@BOTH_WAYS
async def test_r61_a_decode_node_that_can_not_be_reached_is_told_and_given_back(by: Callable[..., Protocol]) -> None:
    world = World(by=by)
    world.caller.behaviour[D0] = refuses
    with pytest.raises(EngineRefused, match=D0):
        await world.ask()
    assert world.called.count(D0) == 1 and world.ledger.unfinished == {}
    if by is not Both:
        assert world.figures.counts == {"sessions_lost": 1}, "prefill's blocks wait for the end of their lease"


@BOTH_WAYS
@pytest.mark.parametrize("failure", MAY_HAVE_BEGUN, ids=name_of)
async def test_r61_where_a_decode_node_may_have_begun_another_gets_a_hand_over_of_its_own(
    by: Callable[..., Protocol], failure: UpstreamError | int
) -> None:
    budget = FakeBudget()
    world = World(*nodes_of(0, prefill=1, decode=2), by=by, budget=budget)
    fresh = {**PARAMS, "remote_request_id": "chatcmpl-2"}
    world.caller.behaviour = {
        D0: fails_by(failure),
        (P0, 1): lambda call: json.dumps({"kv_transfer_params": fresh}).encode(),
    }
    assert await world.served() == D1
    assert [world.called.count(url) for url in (P0, D0, D1)] == [2, 1, 1] and budget.taken == 1
    assert all(response.closed for response in world.caller.responses)
    if by is Both:
        assert [call.body["attempt"] for call in world.caller.to(P0)] == [0, 1]
        assert [call.body["attempt"] for call in world.caller.to(D0, D1)] == [0, 1]
    else:
        assert world.called == [P0, D0, P0, D1]
        assert world.caller.to(D0)[0].body["kv_transfer_params"] == PARAMS
        assert world.caller.to(D1)[0].body["kv_transfer_params"] == fresh
        assert world.figures.counts == {"sessions_lost": 1}, "what the first decode node got is nobody's"


@BOTH_WAYS
async def test_a_500_is_tried_elsewhere_once(by: Callable[..., Protocol]) -> None:
    world = World(*nodes_of(0, prefill=3), by=by)
    world.caller.behaviour = {"http://p0:1": fails_by(500), "http://p1:1": fails_by(500), D0: hangs}
    answer = await asyncio.wait_for(world.ask(), 1)
    assert (answer.status, answer.url) == (500, P1) and "http://p2:1" not in world.called
    answer.close(Outcome.ENGINE_ERROR)
    await turns()
    assert world.ledger.unfinished == {}


@BOTH_WAYS
async def test_behind_encoders_a_500_is_the_answer_and_a_503_is_tried_elsewhere(by: Callable[..., Protocol]) -> None:
    for status, url in ((500, P0), (503, D0)):
        world = World(*nodes_of(0, prefill=2), by=by)
        world.caller.behaviour = {P0: fails_by(status), (D0, 0): hangs if by is Both else lambda call: None}
        request = EngineRequest(b"POST", CHAT, list(HEADERS), json.dumps(CLIENT).encode(), MODEL)
        answer = await asyncio.wait_for(world.split.open(request, retry_500=False), 1)
        assert answer.url == url
        answer.close(Outcome.OK)
        await turns()
        assert world.ledger.unfinished == {}


@BOTH_WAYS
async def test_retries_are_those_of_the_whole_request_whichever_leg_fails(by: Callable[..., Protocol]) -> None:
    world = World(*nodes_of(0, prefill=4, decode=4), by=by, retries=2)
    world.caller.behaviour = {P0: refuses, D0: fails_by(503), D1: fails_by(503)}
    if by is Both:
        world.caller.behaviour[D0, 0] = hangs
    answer = await asyncio.wait_for(world.ask(), 1)
    assert (answer.status, answer.url) == (503, D1)
    answer.close(Outcome.ENGINE_ERROR)
    await turns()
    assert world.ledger.unfinished == {} and all(response.closed for response in world.caller.responses)


async def test_a_refusal_that_breaks_off_is_decodes_failure_and_not_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(*nodes_of(0, prefill=2, decode=2), by=Both)
    world.caller.behaviour = {P0: hangs, (P0, 1): lambda call: None, D0: fails_by(503)}
    send = world.caller.send

    async def broken(url: str, request: EngineRequest, leg: Leg, *, stage: str) -> Any:
        response = await send(url, request, leg)

        async def read() -> bytes:
            raise EngineBroke("reset")

        if url == D0:
            response.read = read  # type: ignore[method-assign]
        return response

    monkeypatch.setattr(world.caller, "send", broken)
    assert await world.served() == D1
    assert P1 not in world.called and world.caller.broken == [(D0, "EngineBroke")]
    assert all(response.closed for response in world.caller.responses)


async def test_a_refusal_whose_body_hangs_is_the_answer_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_module, "REFUSAL_S", 0.02)
    world = World(by=Both)
    world.caller.behaviour = {P0: hangs, D0: fails_by(429)}
    send = world.caller.send

    async def hanging(url: str, request: EngineRequest, leg: Leg, *, stage: str) -> Any:
        response = await send(url, request, leg)
        response.read = asyncio.Event().wait  # type: ignore[assignment,method-assign]
        return response

    monkeypatch.setattr(world.caller, "send", hanging)
    answer = await asyncio.wait_for(world.ask(), 5)
    assert (answer.status, answer.url, await answer.read()) == (429, D0, b"")
    assert world.ledger.unfinished == {} and world.caller.responses[0].closed
    answer.close(Outcome.CLIENT_ERROR)
    assert world.ledger.unfinished == {}


@BOTH_WAYS
@pytest.mark.parametrize("status", [400, 500, 503])
async def test_r47_decodes_own_failure_is_the_answer(by: Callable[..., Protocol], status: int) -> None:
    world = World(by=by)
    world.caller.behaviour[D0] = lambda call: (status, b'{"error":{}}')
    answer = await world.ask()
    assert (answer.status, answer.url, await answer.read()) == (status, D0, b'{"error":{}}')
    answer.close(Outcome.ENGINE_ERROR)
    await turns()
    assert world.ledger.unfinished == {} and world.ledger.latencies[D0] == 0
    assert world.ledger.rows_ended[D0] == (status < 500)
    if by is Both:
        told = (world.protocol.failures, world.protocol.refusals)
        assert told == (([P0], []) if status >= 500 else ([], [P0]))
    else:
        assert world.figures.counts == {"sessions_lost": 1}


async def test_r47_both_at_once_decodes_failure_ends_prefill() -> None:
    world = World(by=Both)
    world.caller.behaviour = {D0: lambda call: (400, b"{}"), P0: hangs}
    answer = await asyncio.wait_for(world.ask(), 1)
    assert answer.status == 400 and world.caller.to(P0)[0].cancelled
    assert [name for name, _ in answer.headers if name == b"server-timing"] == [], "no stage has ended"
    assert world.ledger.unfinished == {}, "it was read to its end, so nothing runs"
    answer.close(Outcome.CLIENT_ERROR)
    assert world.ledger.unfinished == {} and world.caller.responses[0].closed


@BOTH_WAYS
async def test_r47_an_answer_that_breaks_off_before_its_first_byte_is_an_error_and_no_200(
    by: Callable[..., Protocol], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(by=by)
    send, closed = world.caller.send, []

    async def broken(url: str, request: EngineRequest, leg: Leg, *, stage: str) -> Any:
        response = await send(url, request, leg)

        async def read() -> bytes:
            raise EngineBroke("reset")

        response.read = read  # type: ignore[method-assign]
        closed.append(response)
        return response

    monkeypatch.setattr(world.caller, "send", broken)
    with pytest.raises(EngineBroke):
        await world.ask()
    assert [response.closed > 0 for response in closed] == [True] and world.ledger.unfinished == {}
    assert world.caller.broken == [(D0, "EngineBroke")], "the breaker is told"


async def test_r61_decode_beside_prefill_has_its_time_from_prefills_end_on() -> None:
    world = World(by=Both)
    world.caller.timeouts = Timeouts(1, 0.02, 1, 0)
    computes = asyncio.Event()
    world.caller.behaviour = {P0: waits_for(computes), D0: hangs}
    task = world.begin()
    await asyncio.sleep(0.06)
    assert not task.done(), "prefill computes as long as it likes"
    computes.set()
    with pytest.raises(EngineTimeout, match=rf"{D0}.*0\.02 s of the prefill's end") as caught:
        await asyncio.wait_for(task, 5)
    assert (caught.value.stage, caught.value.status) == ("first_byte", 504)
    assert world.caller.to(D0)[0].cancelled and world.ledger.unfinished == {}


class Voided(Nixl):
    """NIXL, as far as bodies go; its first `times` hand-overs go void once they have gone out, or `at_once`."""

    times = 1
    at_once = False
    count = 0

    def hand(self, pair: Pair, life: int, members: Members, prefilled: Prefilled) -> Handed:
        handed = super().hand(pair, life, members, prefilled)
        self.count += 1
        if self.count <= self.times:
            gone: list[str] = ["at once"] if self.at_once else []
            handed.goes_to = gone.append  # type: ignore[method-assign]
            handed.voided = lambda: bool(gone)  # type: ignore[method-assign]
        return handed


def voided(times: int, *, at_once: bool = False) -> Callable[..., Protocol]:
    def make(**parts: Any) -> Protocol:
        made = Voided(**parts, lease_s=30, recompute=True)
        made.times, made.at_once = times, at_once
        return made

    return make


async def test_a_refusal_of_what_had_gone_void_proves_nothing_and_prefill_is_asked_again() -> None:
    world = World(by=voided(1))
    world.caller.behaviour = {(D0, 0): lambda call: (400, b"{}")}
    assert await world.served() == D0
    assert world.called == [P0, D0, P0, D0] and world.caller.responses[0].closed
    assert world.ledger.latencies == {P0: 2, D0: 1}


async def test_a_refusal_of_what_goes_void_again_and_again_is_the_answer_in_the_end() -> None:
    world = World(by=voided(99))
    world.caller.behaviour = {D0: lambda call: (400, b"{}")}
    answer = await world.ask()
    assert answer.status == 400
    assert world.called == [P0, D0] * 3, "two retries"
    answer.close(Outcome.CLIENT_ERROR)
    assert world.ledger.unfinished == {} and all(response.closed for response in world.caller.responses)


async def test_where_prefill_can_not_be_asked_again_decodes_answer_is_the_answer() -> None:
    world = World(by=voided(1))

    def refuse(call: Call) -> tuple[int, bytes]:
        world.registry.set(gone=(P0,))
        return 400, b"{}"

    world.caller.behaviour = {D0: refuse}
    answer = await world.ask()
    assert (answer.status, answer.url) == (400, D0), "nobody else can be asked, so it is the answer"
    assert world.ledger.unfinished == {D0: 1}
    answer.close(Outcome.CLIENT_ERROR)
    assert world.caller.responses[0].closed and world.ledger.unfinished == {}


async def test_what_is_void_before_it_goes_out_is_never_sent_to_decode() -> None:
    world = World(by=voided(1, at_once=True))
    assert await world.served() == D0
    assert world.called == [P0, P0, D0]
    assert world.figures.counts["sessions_lost"] == 1, "NIXL's own: prefill frees it when its lease ends"


async def test_what_is_void_again_and_again_before_it_goes_out_is_an_error_in_the_end() -> None:
    world = World(by=voided(99, at_once=True))
    with pytest.raises(HandOverLost, match=rf"{P0} has gone before {D0}") as caught:
        await world.ask()
    assert (caught.value.status, caught.value.code) == (502, "hand_over_lost")
    assert world.called == [P0] * 3 and world.ledger.unfinished == {}


class Migrates(Nixl):
    """NIXL, as far as bodies go; its hand-overs can be ended, as LMDeploy's. It has what they need of others."""

    handed: _Migrating

    def hand(self, pair: Pair, life: int, members: Members, prefilled: Prefilled) -> Handed:
        others: Any = self
        session = Session(pair.prefill.url, 1, 1, pair.decode.url)
        self.handed = _Migrating(prefilled, with_values(members, {}), session, False, others, others, self.figures)
        return self.handed

    def life_of(self, url: str) -> int:
        return 1

    def lives_of(self, prefill: str, decode: str) -> str:
        return "1|1"

    def doubt(self, prefill: str, decode: str) -> None: ...

    def begin(self, move: object) -> None: ...

    def done(self, move: object) -> None: ...

    def clear(self, session: object) -> None: ...


async def test_a_decode_call_that_is_told_to_end_is_ended_and_prefill_asked_again() -> None:
    world, gate = World(by=lambda **parts: Migrates(**parts, lease_s=30, recompute=True)), asyncio.Event()
    world.caller.behaviour = {(D0, 0): waits_for(gate)}
    asked = world.begin()
    await turns()
    protocol: Any = world.protocol
    handed = protocol.handed
    handed.end()
    answer = await asyncio.wait_for(asked, 5)
    assert world.called == [P0, D0, P0, D0] and world.caller.to(D0)[0].cancelled
    answer.close(Outcome.OK)
    assert world.ledger.unfinished == {} and not world.handing.counts.total()
    handed.end()  # once it is over, that ends nothing


@pytest.mark.parametrize(
    ("first", "taken"),
    [
        (b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n', True),
        (b'{"choices":[{"message":{"content":"a"},"finish_reason":"stop"}]}', True),
        (b'{"choices":[{"mess', True),  # only the beginning of an answer
        (b": ping\n\n", True),
        (b'{"error":null,"choices":[]}', True),
        (b'data: {"error":{"message":"no blocks"}}\n\ndata: [DONE]\n\n', False),
        (b'{"error":{"message":"no blocks"}}', False),
        (b'{"object":"error","message":"no blocks"}', False),
        (b'data: {"choices":[{"delta":{},"finish_reason":"error"}]}\n\n', False),
        (b'{"choices":[{"message":{},"finish_reason":"abort"}]}', False),
        (b"", False),
    ],
)
async def test_decodes_200_counts_as_taken_unless_it_says_that_nothing_was_decoded(first: bytes, taken: bool) -> None:
    world = World(by=voided(0))
    world.caller.behaviour[D0] = lambda call: (200, first)
    answer = await world.ask()
    assert answer.status == 200
    answer.close(Outcome.OK)
    assert world.figures.counts["sessions_lost"] == (0 if taken else 1)


async def test_to_ask_prefill_again_for_what_went_void_takes_a_retry_and_the_budget() -> None:
    for rules in ({"retries": 0}, {"budget": FakeBudget(0)}):
        world = World(by=voided(99), **rules)
        world.caller.behaviour = {D0: lambda call: (400, b"{}")}
        answer = await world.ask()
        assert answer.status == 400 and world.called == [P0, D0]
        answer.close(Outcome.CLIENT_ERROR)
        assert world.ledger.unfinished == {}


# --- a hand-over that is too old --------------------------------------------------------------------


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        real = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: real() + self.ahead_s)

    def passes(self, seconds: float) -> Callable[[Call], Exception]:
        def behave(call: Call) -> Exception:
            self.ahead_s += seconds
            return EngineTimeout("nobody there", stage="connect")

        return behave


async def test_r69_after_the_lease_prefill_is_asked_again_and_nothing_old_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    world = World(*nodes_of(0, prefill=1, decode=2))
    fresh = {**PARAMS, "remote_request_id": "chatcmpl-2"}
    world.caller.behaviour = {
        D0: clock.passes(31),
        (P0, 1): lambda call: json.dumps({"kv_transfer_params": fresh}).encode(),
    }
    assert await world.served() == D1
    assert world.called == [P0, D0, P0, D1]
    assert world.caller.to(D1)[0].body["kv_transfer_params"] == fresh
    assert world.figures.counts == {"sessions_lost": 1}
    assert world.ledger.taken == {P0: 2, D0: 1, D1: 1}, "prefill is counted again while it computes again"


async def test_r69_within_the_lease_the_hand_over_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    world = World(*nodes_of(0, prefill=1, decode=2))
    world.caller.behaviour = {D0: clock.passes(29)}
    assert await world.served() == D1
    assert world.called == [P0, D0, D1] and world.figures.counts == {}


async def test_r69_a_hand_over_that_is_given_up_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for retries, nodes in ((1, 3), (2, 2)):  # none may be tried any more, or none is left to try
        world = World(*nodes_of(0, prefill=1, decode=nodes), retries=retries)
        refusals = clock.passes(0)
        world.caller.behaviour = {D0: refusals, D1: clock.passes(31)}
        with pytest.raises(EngineTimeout, match="nobody there"):
            await world.ask()
        assert world.called == [P0, D0, D1] and world.ledger.unfinished == {}
        assert world.figures.counts == {"sessions_lost": 1}


# --- nodes that are missing -------------------------------------------------------------------------


@BOTH_WAYS
@pytest.mark.parametrize(("missing", "nodes"), [("Prefill", nodes_of(1)), ("Decode", nodes_of(1, prefill=1, decode=0))])
async def test_r68_a_missing_role_is_a_503_that_names_it_and_nothing_is_counted(
    by: Callable[..., Protocol], missing: str, nodes: list[Node]
) -> None:
    world = World(*nodes, by=by)
    with pytest.raises(NoNodeAvailable, match=f"no {missing} node"):
        await world.ask()
    assert world.ledger.unfinished == {} and world.called == []
    assert world.figures.counts == {}


async def test_hybrid_and_encoder_nodes_are_no_candidates() -> None:
    world = World(*nodes_of(1, prefill=0, decode=0, hybrid=1))
    with pytest.raises(NoNodeAvailable):
        await world.ask()
    with pytest.raises(ModelNotFound):
        await world.ask(model="other")


async def test_r68_without_a_prefill_node_the_fallback_serves_on_decode_alone_and_is_counted() -> None:
    world = World(*nodes_of(0), fallback=True)
    raw = json.dumps(CLIENT).encode()
    assert await world.served(raw) == D0
    assert [(call.url, call.request.body) for call in world.caller.calls] == [(D0, raw)]
    assert world.figures.counts == {"prefill_fallback": 1} and world.ledger.taken == {D0: 1}


async def test_r68_prefill_nodes_that_are_down_are_none() -> None:
    down = Node(P0, role=Role.Prefill, models=(MODEL,), state=State.DOWN)
    world = World(down, *nodes_of(0), fallback=True)
    assert await world.served() == D0
    assert world.figures.counts == {"prefill_fallback": 1}


async def test_r68_while_there_is_a_prefill_node_nothing_falls_back() -> None:
    world = World(fallback=True)
    assert await world.served() == D0
    assert world.called == [P0, D0] and world.figures.counts == {}


async def test_r68_hybrid_nodes_are_a_fallback_too_where_either_role_is_missing() -> None:
    for nodes in (nodes_of(0, decode=0, hybrid=1), nodes_of(0, prefill=1, decode=0, hybrid=1)):
        world = World(*nodes, fallback=True)
        assert await world.served() == "http://h0:1"
        assert world.figures.counts == {"prefill_fallback": 1}


async def test_r68_the_fallback_is_no_help_where_nobody_decodes() -> None:
    for nodes in (nodes_of(1, decode=0), nodes_of(0, prefill=1, decode=0)):
        world = World(*nodes, fallback=True)
        with pytest.raises(NoNodeAvailable, match="no Decode or Hybrid node"):
            await world.ask()
        assert world.ledger.unfinished == {} and world.figures.counts == {}


# --- LMDeploy's --dummy-prefill ---------------------------------------------------------------------


async def test_dummy_prefill_tells_decode_of_a_prefill_that_did_not_take_place() -> None:
    world = World(*nodes_of(0), dummy=2)
    assert await world.served() == D0
    (call,) = world.caller.calls
    # Source: lmdeploy/serve/proxy/proxy.py, the branch of dummy_prefill.
    migration = {
        "protocol": 2,
        "remote_engine_id": "dummy:dummy",
        "remote_session_id": 0,
        "remote_token_id": 0,
        "remote_block_ids": [],
        "is_dummy_prefill": True,
    }
    assert call.body == {**CLIENT, "migration_request": migration}
    assert (b"x-lmdeploy-distserve-proxy", b"1") in call.request.headers
    assert world.ledger.taken == {D0: 1}


async def test_dummy_prefill_leaves_alone_what_is_not_split() -> None:
    world = World(*nodes_of(0), dummy=2)
    raw = b'{"model": "m", "input":"x"}'
    await world.served(raw, path=b"/v1/embeddings")
    assert world.caller.calls[0].request.body == raw


async def test_dummy_prefill_of_a_body_that_nobody_can_read_is_given_back() -> None:
    world = World(*nodes_of(0), dummy=2)
    with pytest.raises(BadRequest):
        await world.ask(b"[]")
    assert world.ledger.unfinished == {}


# --- the client leaves ------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [P0, D0])
async def test_r62_the_client_leaves_and_both_are_given_back(where: str) -> None:
    world = World()
    world.caller.behaviour[where] = hangs
    task = world.begin()
    await turns()
    assert world.ledger.unfinished == ({P0: 1, D0: 1} if where == P0 else {D0: 1})
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await turns()
    assert world.ledger.unfinished == {} and world.caller.calls[-1].cancelled
    assert world.figures.counts == ({} if where == P0 else {"sessions_lost": 1})


@BOTH_WAYS
@pytest.mark.parametrize("stream", [True, False])
async def test_r03_whenever_the_client_leaves_nothing_stays_counted_and_no_call_runs_on(
    by: Callable[..., Protocol], stream: bool
) -> None:
    """Cancelled after every single step of the loop, to the end of an undisturbed request and beyond."""
    ended = 0
    for steps in range(60):
        world = World(*nodes_of(0, prefill=2, decode=2), by=by)
        world.caller.behaviour = {P0: refuses, D0: refuses}
        task = world.begin({**CLIENT, "stream": stream})
        await turns(steps)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, Answer):
            ended += 1
            result.close(Outcome.ABORTED)
        else:
            assert isinstance(result, asyncio.CancelledError)
        await turns()
        assert world.ledger.unfinished == {}, steps
        assert world.caller.running.total() == 0, steps
        assert all(response.closed for response in world.caller.responses), steps
    assert ended > 5, "the request was never long enough over"


async def test_an_answer_whose_client_leaves_in_the_middle_ends_both_legs() -> None:
    world = World(by=Both)
    world.caller.kind = b"text/event-stream"
    world.caller.behaviour[P0] = hangs
    answer = await world.ask()
    answer.close(Outcome.ABORTED)
    await turns()
    assert world.caller.to(P0)[0].cancelled and world.caller.responses[0].closed
    assert world.ledger.unfinished == {} and world.ledger.latencies == {D0: 0, P0: 0}


# --- taking -----------------------------------------------------------------------------------------


async def test_a_pair_is_given_back_once() -> None:
    world = World(*nodes_of(0, prefill=1, decode=2))
    held = await world.split._take(MODEL, retry_500=True)
    assert (held.url, world.ledger.unfinished) == (D0, {P0: 1, D0: 1})
    for _ in range(3):
        held.give_back()
    assert world.ledger.unfinished == {}


async def test_a_pair_is_taken_in_one_step() -> None:
    world = World()
    steps = 0

    async def step() -> None:
        nonlocal steps
        steps += 1

    world.ledger.waits = step
    await world.served()
    assert steps == 1 and world.ledger.taken == {P0: 1, D0: 1}


async def test_a_cancelled_take_holds_nothing() -> None:
    world = World()
    world.ledger.waits = asyncio.Event().wait  # type: ignore[assignment]
    task = world.begin()
    await turns(3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.ledger.unfinished == {}


async def test_a_pair_says_where_it_is() -> None:
    world = World()
    held: Any = await world.split._take(MODEL, retry_500=True)
    assert repr(held.pair) == f"<Pair {P0} -> {D0} tried=0>"
    held.give_back()


@pytest.mark.parametrize(
    ("error", "never"),
    [
        (EngineRefused("x"), True),
        (EngineUnreachable("x"), True),
        (EngineTimeout("x", stage="connect"), True),
        (EngineTimeout("x", stage="first_byte"), False),
        (EngineBroke("x"), False),
        (EngineProtocolError("x"), False),
        (LinkFailed("x", url=P0), True),
    ],
)
def test_only_a_connection_that_never_stood_costs_nothing(error: UpstreamError, never: bool) -> None:
    assert never_arrived(error) is never


# --- what a drain waits for


@BOTH_WAYS
@pytest.mark.parametrize("end", ["answers", "fails", "client leaves"])
async def test_prefill_is_needed_from_the_end_of_its_answer_until_decode_has_the_cache(
    by: Callable[..., Protocol], end: str
) -> None:
    world, gate = World(by=by), asyncio.Event()
    world.caller.behaviour[D0] = waits_for(gate, EngineBroke("decode broke off") if end == "fails" else None)
    asked = world.begin()
    await turns()
    assert world.ledger.unfinished == {D0: 1} and world.handing.counts == {f"{P0}|{D0}": 1}
    if end == "client leaves":
        asked.cancel()
    gate.set()
    await asyncio.wait((asked,))
    if end == "answers":
        answer = asked.result()
        assert not world.handing.counts.total(), "from the first bytes on, not from the end of the answer"
        answer.close(Outcome.OK)
        await turns()
    assert world.ledger.unfinished == {} and not world.handing.counts.total()


@BOTH_WAYS
async def test_each_leg_is_learned_by_what_it_does(by: Callable[..., Protocol]) -> None:
    """Prefill by the prompt, decode by the tokens that it gave."""
    world = World(by=by)
    raw = json.dumps(CLIENT).encode()
    answer = await world.ask(raw)
    answer.tokens = 40
    answer.close(Outcome.OK)
    await turns()
    prefill, decode = (call.url for call in world.caller.calls)
    assert sorted(world.ledger.learned) == sorted([(prefill, work_of(len(raw), 1)), (decode, 40.0)])
