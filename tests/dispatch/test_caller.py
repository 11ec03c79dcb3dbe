"""Calling a node: the key that goes along, what a refusal tells the registry, answers that are read whole."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from app.dispatch import caller as caller_module
from app.dispatch.answer import EngineRequest, Whole
from app.dispatch.caller import AnswerTooLong, Caller, Leg
from app.errors import EngineBroke, EngineRefused, EngineUnreachable, Headers
from app.journey import Journey, current
from app.nodes import Node, Role
from app.traceparent import Trace
from app.upstream.transport import Target, Timeouts
from tests.dispatch.fakes import D0, E0, FakeBreakers, FakeRegistry, FakeResponse

TIMEOUTS = Timeouts(1, 2, 3, 4)
REQUEST = EngineRequest(b"POST", b"/v1/x?q=1", [(b"content-type", b"application/json")], b"body", "m")


class FakeTransport:
    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.sent: list[tuple[str, bytes, bytes, Headers, bytes]] = []

    async def send(
        self,
        target: Target,
        method: bytes,
        path: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes,
        t: Timeouts,
    ) -> FakeResponse:
        assert t == TIMEOUTS
        self.sent.append((target.url, method, path, list(headers), body))
        result = self.script.pop(0) if self.script else FakeResponse()
        if isinstance(result, Exception):
            raise result
        assert isinstance(result, FakeResponse)
        return result

    async def close(self) -> None:
        raise AssertionError("not the caller's")


def caller_of(transport: FakeTransport, registry: FakeRegistry | None = None, key: str | None = None) -> Caller:
    registry = registry or FakeRegistry(Node(D0, role=Role.Decode), Node(E0, role=Role.Encode))
    return Caller(registry=registry, transport=transport, breakers=FakeBreakers(), timeouts=TIMEOUTS, engine_key=key)  # type: ignore[arg-type]


class Endless(FakeResponse):
    async def read(self) -> bytes:
        return b"x" * 10


class Hanging(FakeResponse):
    async def read(self) -> bytes:
        await asyncio.Event().wait()
        return b""


class Breaking(FakeResponse):
    async def read(self) -> bytes:
        raise EngineBroke("reset")


class Late(FakeResponse):
    """Is read a few turns later than others."""

    def __init__(self, inner: FakeResponse) -> None:
        super().__init__()
        self.inner = inner

    async def read(self) -> bytes:
        for _ in range(5):
            await asyncio.sleep(0)
        return await self.inner.read()


async def test_a_request_is_sent_as_it_is() -> None:
    transport = FakeTransport()
    await caller_of(transport).send(D0, REQUEST)
    assert transport.sent == [(D0, b"POST", b"/v1/x?q=1", REQUEST.headers, b"body")]


@pytest.mark.parametrize(
    ("node_key", "engine_key", "sent"),
    [(None, None, b"client"), (None, "common", b"Bearer common"), ("own", "common", b"Bearer own")],
)
async def test_r83_a_nodes_own_key_goes_before_the_common_one_and_a_clients_passes_only_without_both(
    node_key: str | None, engine_key: str | None, sent: bytes
) -> None:
    registry = FakeRegistry()
    registry.set(Node(D0), keys={D0: node_key} if node_key else {})
    transport = FakeTransport()
    caller = caller_of(transport, registry, engine_key)
    request = replace(REQUEST, headers=[(b"authorization", b"client"), (b"x", b"y")])
    await caller.send(D0, request)
    await caller.fetch(D0, request, limit_bytes=10)
    for _, _, _, headers, _ in transport.sent:
        assert [value for name, value in headers if name == b"authorization"] == [sent]
        assert (b"x", b"y") in headers


async def test_only_a_refusal_is_told_to_the_registry() -> None:
    registry = FakeRegistry(Node(D0))
    for failure, told in ((EngineUnreachable("dns"), []), (EngineRefused("refused"), [D0])):
        with pytest.raises(type(failure)):
            await caller_of(FakeTransport(failure), registry).fetch(D0, REQUEST, limit_bytes=10)
        assert registry.refusals == told


async def test_an_answer_is_read_whole_and_can_be_read_again_like_any_other() -> None:
    response = FakeResponse(203, headers=[(b"x-a", b"1")])
    response.body = [b"ab", b"cd"]
    whole = await caller_of(FakeTransport(response)).fetch(E0, REQUEST, limit_bytes=4)
    assert (whole.url, whole.status, whole.headers, whole.body) == (E0, 203, [(b"x-a", b"1")], b"abcd")
    assert [await whole.read() for _ in range(3)] == [b"abcd", b"", b""]
    whole.close()
    assert response.closed == 1


async def test_an_empty_answer_is_read_as_empty() -> None:
    assert await Whole("u", 204, [], b"").read() == b""


async def test_an_answer_that_is_read_here_is_not_asked_for_compressed() -> None:
    transport = FakeTransport()
    caller = caller_of(transport)
    request = replace(REQUEST, headers=[(b"accept-encoding", b"gzip, br"), (b"x", b"y")])
    await caller.fetch(E0, request, limit_bytes=10)
    await caller.send(D0, request)
    assert transport.sent[0][3] == [(b"x", b"y"), (b"accept-encoding", b"identity")]
    assert transport.sent[1][3] == request.headers


async def test_an_answer_without_end_is_cut_off_at_the_limit() -> None:
    response = Endless()
    with pytest.raises(AnswerTooLong, match="longer than 25 bytes"):
        await caller_of(FakeTransport(response)).fetch(E0, REQUEST, limit_bytes=25)
    assert response.closed == 1


class Trickling(FakeResponse):
    """A byte each millisecond, for ever: no wait between two of them is a long one."""

    async def read(self) -> bytes:
        await asyncio.sleep(0.001)
        return b"x"


SIZED: Headers = [(b"x-a", b"1"), (b"content-length", b"9"), (b"transfer-encoding", b"chunked")]


@pytest.mark.parametrize("kind", [Hanging, Trickling])
async def test_a_refusal_is_its_status_with_what_comes_of_its_body_in_good_time(
    kind: type[FakeResponse], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caller_module, "REFUSAL_S", 0.05)
    response = kind(429, headers=SIZED)
    caller = caller_of(FakeTransport(response))
    whole = await asyncio.wait_for(caller.fetch(E0, REQUEST, limit_bytes=10**6, leg=Leg.WHOLE), 5)
    assert whole.status == 429 and response.closed
    assert (
        whole.body == b"x" * len(whole.body) and len(whole.body) < 50 and (len(whole.body) > 0) is (kind is Trickling)
    )
    assert whole.headers == [(b"x-a", b"1"), (b"content-length", b"%d" % len(whole.body))]


async def test_a_refusal_that_breaks_off_has_failed() -> None:
    response = Breaking(503)
    with pytest.raises(EngineBroke):
        await caller_of(FakeTransport(response)).fetch(E0, REQUEST, limit_bytes=25)
    assert response.closed == 1


async def test_a_refusal_is_read_to_its_end_and_of_a_long_one_the_beginning() -> None:
    response = FakeResponse(400, headers=SIZED)
    response.body = [b"ab", b"cd"]
    whole = await caller_of(FakeTransport(response)).fetch(E0, REQUEST, limit_bytes=3)
    assert (whole.body, whole.headers) == (b"abcd", [(b"x-a", b"1"), (b"content-length", b"4")])
    endless = Endless(501)
    whole = await caller_of(FakeTransport(endless)).fetch(E0, REQUEST, limit_bytes=3)
    assert len(whole.body) == 1_048_580 and endless.closed, "10 bytes at a time up to 2**20 and past it"


async def test_an_answer_that_breaks_off_is_closed() -> None:
    response = Breaking()
    with pytest.raises(EngineBroke):
        await caller_of(FakeTransport(response)).fetch(E0, REQUEST, limit_bytes=25)
    assert response.closed == 1


async def test_a_cancelled_fetch_closes_the_answer() -> None:
    response = Hanging()
    task = asyncio.create_task(caller_of(FakeTransport(response)).fetch(E0, REQUEST, limit_bytes=25))
    await asyncio.sleep(0)
    assert response.closed == 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert response.closed == 1


async def test_each_leg_has_time_limits_of_its_own() -> None:
    transport: Any = FakeTransport()
    given: list[Timeouts] = []

    async def send(*arguments: Any) -> FakeResponse:
        given.append(arguments[-1])
        return FakeResponse()

    transport.send = send
    registry: Any = FakeRegistry(Node(D0))
    caller = Caller(
        registry=registry, transport=transport, breakers=FakeBreakers(), timeouts=TIMEOUTS, engine_key=None, prefill_s=9
    )
    for leg in (Leg.WHOLE, Leg.PREFILL, Leg.BESIDE_PREFILL):
        await caller.send(D0, REQUEST, leg)
        await caller.fetch(D0, REQUEST, limit_bytes=10, leg=leg)
    # Beside prefill nobody knows when decode's first byte is due; prefill's limit is one for its whole answer.
    whole, prefill, beside = TIMEOUTS, Timeouts(1, 9, 9, 9), Timeouts(1, 0, 3, 4)
    assert given == [whole, whole, prefill, prefill, beside, beside]


async def test_addresses_are_kept_for_a_bounded_number_of_nodes() -> None:
    transport = FakeTransport()
    caller = caller_of(transport)  # two nodes: 2 * 2 + 16 is the bound
    for n in range(100):
        await caller.send(f"http://n{n}:1", REQUEST)
    assert len(transport.sent) == 100
    assert int(repr(caller).removeprefix("<Caller targets=").removesuffix(">")) <= 21


# --- the journey


@pytest.fixture
def journey() -> Iterator[Journey]:
    journey = Journey()
    token = current.set(journey)
    yield journey
    current.reset(token)


async def test_each_call_is_noted_with_its_stage_and_what_came_of_it(journey: Journey) -> None:
    ended = FakeResponse(200)
    caller = caller_of(FakeTransport(FakeResponse(503), ended, EngineRefused("no")))
    await caller.send(D0, REQUEST)
    await caller.fetch(E0, REQUEST, limit_bytes=10, stage="encode")
    with pytest.raises(EngineRefused):
        await caller.send(D0, REQUEST, stage="decode")
    assert [(leg.node, leg.stage, leg.status, leg.error) for leg in journey.legs] == [
        (D0, "request", 503, None),
        (E0, "encode", 200, None),
        (D0, "decode", None, "engine_unreachable"),
    ]
    # What is still to be read goes on; what was read here, or never came, is over.
    assert [leg.seconds > 0 for leg in journey.legs] == [False, True, True]


async def test_a_call_that_breaks_or_is_given_up_is_noted_as_that(journey: Journey) -> None:
    caller = caller_of(FakeTransport(Breaking(), Hanging(), Breaking(), Endless()))
    with pytest.raises(EngineBroke):
        await caller.fetch(E0, REQUEST, limit_bytes=10, stage="encode")
    task = asyncio.create_task(caller.fetch(E0, REQUEST, limit_bytes=10, stage="encode"))
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    response = await caller.send(D0, REQUEST, stage="decode")
    with pytest.raises(EngineBroke):
        await caller.read(D0, response)
    with pytest.raises(AnswerTooLong):
        await caller.fetch(E0, REQUEST, limit_bytes=10, stage="encode")
    assert [leg.error for leg in journey.legs] == [
        "engine_broke_off",
        "cancelled",
        "engine_broke_off",
        "engine_protocol_error",
    ]


class Slow(FakeTransport):
    """Its answers come some turns after the request."""

    async def send(self, *args: Any) -> FakeResponse:
        for _ in range(3):
            await asyncio.sleep(0)
        return await super().send(*args)


async def test_of_two_calls_at_one_node_the_one_that_breaks_is_noted(journey: Journey) -> None:
    caller = caller_of(Slow(Late(Breaking()), FakeResponse()))
    calls = [caller.fetch(E0, REQUEST, limit_bytes=10, stage="encode") for _ in range(2)]
    first, second = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(first, EngineBroke) and isinstance(second, Whole)
    assert [leg.error for leg in journey.legs] == ["engine_broke_off", None]


async def test_a_call_that_is_given_up_before_its_answer_comes_is_noted_as_that(journey: Journey) -> None:
    task = asyncio.create_task(caller_of(Slow()).send(D0, REQUEST))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait((task,))
    (leg,) = journey.legs
    assert leg.error == "cancelled" and leg.seconds > 0


async def test_a_leg_of_a_trace_carries_its_own_span(journey: Journey) -> None:
    transport = FakeTransport()
    journey.trace = Trace(0xA1, 0xB2, parent_id=0xC3, sampled=True)
    await caller_of(transport).send(D0, replace(REQUEST, headers=[(b"traceparent", b"of the client")]))
    (leg,) = journey.legs
    assert transport.sent[0][3] == [(b"traceparent", b"00-%032x-%016x-01" % (0xA1, leg.span_id))]
    assert leg.span_id not in (0, 0xB2, 0xC3)


async def test_without_a_journey_a_traceparent_passes_as_it_came() -> None:
    transport = FakeTransport()
    headers = [(b"traceparent", b"of the client"), (b"tracestate", b"a=b")]
    await caller_of(transport).send(D0, replace(REQUEST, headers=headers))
    assert transport.sent[0][3] == headers
