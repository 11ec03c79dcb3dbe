"""What is known of a request once it is over, and when its journey is kept."""

from __future__ import annotations

from typing import Any

import pytest

from app.dispatch.answer import Outcome
from app.errors import EngineBroke, NoNodeAvailable
from app.http.proxy import Proxy
from app.http.relay import Relay
from app.journey import Journey, current
from app.metrics.figures import Figures, Served
from app.traceparent import Trace
from tests.http.fakes import CHAT, HANG, SSE, Call, FakeAnswer, World, both_ways, until

BROKE = EngineBroke("engine http://engine:1 broke off: reset")


class Kept(Figures):
    """Figures that keep what has ended."""

    @property
    def last(self) -> Served:
        return self.ended[-1]


@pytest.fixture
def figures() -> Kept:
    return Kept()


async def test_of_a_whole_answer(figures: Kept) -> None:
    world = World(FakeAnswer(b'{"id": 1}', status=201), figures=figures)
    await world.post(headers=[(b"x-request-id", b"r7")], client=("10.1.2.3", 5))
    one = figures.last
    assert (one.request, one.client, one.status, one.outcome) == (b"r7", ("10.1.2.3", 5), 201, Outcome.OK)
    assert (one.bytes_in, one.bytes_out, one.chunks, one.reason) == (len(CHAT), 9, 0, "")


async def test_of_a_stream_and_of_a_body_in_pieces(figures: Kept) -> None:
    events = [b"data: 1\n\n", b"data: 22\n\n", b"data: [DONE]\n\n"]
    world = World(FakeAnswer(*events, headers=SSE), FakeAnswer(b"abc", b"de"), figures=figures)
    await world.post([CHAT[:9], CHAT[9:]])
    assert (figures.last.bytes_in, figures.last.bytes_out, figures.last.chunks) == (len(CHAT), 9 + 10 + 14, 3)
    await world.post()
    assert (figures.last.bytes_out, figures.last.chunks) == (5, 0)


@pytest.mark.parametrize(
    ("script", "status", "outcome", "reason"),
    [
        (NoNodeAvailable("none is alive"), 503, "no_node", "none is alive"),
        (lambda: FakeAnswer(BROKE), 502, "engine_error", BROKE.message),
        (lambda: FakeAnswer(b"data: x\n\n", BROKE, headers=SSE), 200, "engine_error", BROKE.message),
        (lambda: FakeAnswer(b"ab", BROKE), 200, "engine_error", BROKE.message),
        (lambda: FakeAnswer(b"{}", status=404), 404, "client_error", ""),
        (ZeroDivisionError("bug"), 500, "internal_error", ""),
    ],
)
async def test_of_one_that_fails(figures: Kept, script: Any, status: int, outcome: str, reason: str) -> None:
    await Call(World(script, figures=figures).app, "POST", "/v1/chat/completions", CHAT).run()
    one = figures.last
    assert (one.status, str(one.outcome), one.reason) == (status, outcome, reason)


async def test_of_one_that_is_not_let_in(figures: Kept) -> None:
    world = World(figures=figures, api_keys=["sk-1"])
    await world.post(headers=[(b"authorization", b"Bearer sk-hush")])
    assert (figures.last.status, figures.last.outcome, figures.last.bytes_in) == (401, "client_error", 0)
    assert "hush" not in figures.last.reason


async def test_of_one_whose_client_leaves_before_it_is_told_anything(figures: Kept) -> None:
    world = World(HANG, figures=figures)
    call = Call(world.app, "POST", "/v1/chat/completions", CHAT).start()
    await until(lambda: world.hybrid.waiting == 1)
    call.leave()
    await until(lambda: bool(figures.ended))
    assert (figures.last.status, figures.last.outcome) == (None, Outcome.ABORTED)


# --- its journey


class Asking:
    """An answer that looks at the journey in which it is opened."""

    def __init__(self) -> None:
        self.seen: list[Journey | None] = []

    def __call__(self) -> FakeAnswer:
        self.seen.append(current.get())
        return FakeAnswer(b"{}")


@pytest.mark.parametrize(("log_requests", "kept"), [("off", False), ("errors", True), ("all", True)])
async def test_a_journey_is_kept_where_lines_are_written(figures: Kept, log_requests: str, kept: bool) -> None:
    asking = Asking()
    world = World(asking, asking, figures=figures, log_requests=log_requests)
    await world.post()
    await world.post()
    assert [one.journey for one in figures.ended] == asking.seen
    assert [journey is not None for journey in asking.seen] == [kept, kept]
    assert not kept or asking.seen[0] is not asking.seen[1]


class Tracer:
    def begin(self, headers: list[tuple[bytes, bytes]]) -> Trace:
        return Trace(7, 8, parent_id=int(dict(headers)[b"x-parent"]), sampled=True)


def proxy_of(world: World, figures: Figures, **more: Any) -> Proxy:
    return Proxy(
        dispatcher=world.hybrid,  # type: ignore[arg-type]
        authority=world.app._proxy._authority,
        running=world.app.running,
        figures=figures,
        max_body_bytes=1000,
        allow_transfer_params=False,
        forward_client_key=False,
        only_model=str,
        **more,
    )


async def test_while_decisions_are_watched_each_request_has_a_journey_that_says_so(figures: Kept) -> None:
    watched = iter([False, True, False])
    asking = Asking()
    proxy = proxy_of(World(asking, asking, asking), figures, watched=lambda: next(watched))
    for _ in range(3):
        call = Call(proxy, "POST", "/v1/chat/completions", CHAT)
        await proxy(call.scope, call.receive, call.send)  # in one context, as pipelined requests are
    assert [None if one is None else one.watched for one in asking.seen] == [None, True, None]


async def test_a_traced_request_has_its_span_and_the_begin_of_its_relay(figures: Kept) -> None:
    asking = Asking()
    proxy = proxy_of(World(asking, NoNodeAvailable("none")), figures, tracer=Tracer())
    for _ in range(2):
        await Call(proxy, "POST", "/v1/chat/completions", CHAT, headers=[(b"x-parent", b"9")]).run()
    relayed, refused = (one.journey.trace for one in figures.ended if one.journey is not None)
    assert relayed is not None and refused is not None
    assert (relayed.trace_id, relayed.span_id, relayed.parent_id) == (7, 8, 9)
    one = figures.ended[0]
    assert one.began_s <= relayed.relay_at_s <= one.ended_s and refused.relay_at_s == 0


async def test_an_answer_without_a_proper_end_is_said_to_be_meant(figures: Kept) -> None:
    call = Call(World(FakeAnswer(b"ab", BROKE)).app, "POST", "/v1/chat/completions", CHAT)
    await call.run()
    assert not call.reply().complete
    assert getattr(call.wire, "broken_off", False) is call.wired
