"""`GET /metrics`: who may read it, what of the shared state it shows, and what it does without Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from app.errors import EngineRefused, NoNodeAvailable, StoreUnavailable
from app.http.metrics import Metrics
from app.metrics.families import REQUESTS
from app.metrics.figures import Figures
from app.nodes import Breaker, Node, Role, State
from app.store.overview import Overview
from tests.http.fakes import HANG, Call, FakeAnswer, World, until
from tests.support.metrics import samples, value

A, B = "http://10.0.0.1:1", "http://10.0.0.2:1"
STRANGER = ("203.0.113.9", 1)
NODES = {
    A: Node(A, models=("m", "n"), speed=2.5, state=State.READY),
    B: Node(B, role=Role.Decode, state=State.DOWN, breaker=Breaker.HALF_OPEN),
}


def world(shared: Callable[[], Awaitable[Overview]] | None = None, *script: Any, **settings: Any) -> World:
    return World(*script, metrics=Metrics(shared=shared, within_s=0.2, settled_s=0.0), **settings)


async def overview() -> Overview:
    return Overview(
        version=7,
        nodes=NODES,
        unfinished={A: 3},
        workers={f"w{n}": 1000 * n for n in range(4)},
        encoder_cursor=5,
        links={("p", "c"): "connected", ("p", "d"): "connected", ("p", "e"): "failed"},
        held_sessions=6,
        handovers={"links_made": 8},
    )


async def test_shared_state_is_there_once() -> None:
    reply = await world(overview).ask("GET", "/metrics")
    assert reply.status == 200
    assert reply.header(b"content-type") == b"text/plain; version=0.0.4; charset=utf-8"
    found = samples(reply.body.decode())
    for name, expected in {"workers": 4, "encoder_cursor": 5, "registry_version": 7}.items():
        assert value(found, f"evenhand_{name}") == expected
    assert [value(found, "evenhand_links", state=state) for state in ("connected", "failed")] == [2, 1]
    assert value(found, "evenhand_held_sessions") == 6
    assert value(found, "evenhand_handovers_total", what="links_made") == 8
    assert [value(found, "evenhand_node_unfinished", node=url) for url in (A, B)] == [3, 0]
    assert [value(found, "evenhand_node_speed", node=url) for url in (A, B)] == [2.5, None]
    assert [value(found, "evenhand_node_models", node=url) for url in (A, B)] == [2, 0]
    assert value(found, "evenhand_node_info", node=B, role="Decode") == 1
    states = {state.value: value(found, "evenhand_node_state", node=B, state=state.value) for state in State}
    assert states == {"pending": 0, "ready": 0, "asleep": 0, "down": 1, "gone": 0, "draining": 0}
    breakers = {kind: value(found, "evenhand_node_breaker", node=B, breaker=kind) for kind in Breaker}
    assert breakers == {"closed": 0, "open": 0, "half_open": 1}


@pytest.mark.parametrize(
    ("settings", "headers", "client", "status"),
    [
        ({}, [], STRANGER, 200),
        ({"admin_keys": ["a"]}, [], STRANGER, 401),
        ({"admin_keys": ["a"]}, [(b"authorization", b"Bearer a")], STRANGER, 200),
        ({"admin_keys": ["a"], "api_keys": ["k"]}, [(b"authorization", b"Bearer k")], STRANGER, 403),
        ({"reader_keys": ["r"]}, [], STRANGER, 401),
        ({"admin_keys": ["a"], "reader_keys": ["r"]}, [(b"authorization", b"Bearer r")], STRANGER, 200),
        ({"api_keys": ["k"]}, [], STRANGER, 401),
        ({"api_keys": ["k"]}, [(b"authorization", b"Bearer k")], STRANGER, 200),
        ({"api_keys": ["k"]}, [], ("127.0.0.1", 1), 200),
        ({"api_keys": ["k"], "trusted_nodes": ["203.0.113.0/24"]}, [], STRANGER, 200),
        ({"trusted_nodes": []}, [], STRANGER, 200),
    ],
)
async def test_it_is_open_without_keys_and_else_for_readers_admins_and_trusted_nodes(
    settings: dict[str, Any], headers: Any, client: Any, status: int
) -> None:
    assert (await world(**settings).ask("GET", "/metrics", headers=headers, client=client)).status == status


async def frozen() -> Overview:
    await asyncio.sleep(60)
    raise AssertionError


async def away() -> Overview:
    raise StoreUnavailable("Redis can't be reached")


@pytest.mark.parametrize("shared", [frozen, away])
async def test_without_redis_it_answers_at_once_and_leaves_out_what_is_shared(
    shared: Callable[[], Awaitable[Overview]],
) -> None:
    began_s = time.monotonic()
    reply = await world(shared).ask("GET", "/metrics")
    assert reply.status == 200 and b"evenhand_node" not in reply.body and b"evenhand_workers" not in reply.body
    assert time.monotonic() - began_s < 1.0


@pytest.mark.parametrize(
    ("script", "body", "outcome"),
    [
        (EngineRefused("refused"), b'{"model": "m"}', "engine_error"),
        (NoNodeAvailable("nobody"), b'{"model": "m"}', "no_node"),
        (RuntimeError("a fault"), b'{"model": "m"}', "internal_error"),
        (None, b"{", "client_error"),
    ],
)
async def test_every_way_to_end_is_counted(script: Any, body: bytes, outcome: str) -> None:
    figures = Figures(knows=lambda model: model == "m")
    await World(*([script] if script else []), figures=figures).post(body)
    figures.digest()
    model = "m" if script else "unknown"
    counted = {labels: number for (family, labels), number in figures.numbers.items() if family is REQUESTS}
    assert counted == {(model, "/v1/chat/completions", outcome, "none"): 1}


async def test_answers_are_counted_by_the_engines_status_and_a_client_that_leaves_as_aborted() -> None:
    figures = Figures(knows=lambda model: True)
    one = World(*(FakeAnswer(b"{}", status=status) for status in (200, 404, 500)), HANG, figures=figures)
    for _ in range(3):
        await one.post()
    call = Call(one.app, "POST", "/v1/completions", b'{"model": "m"}').start()
    await until(lambda: one.hybrid.waiting == 1)
    call.leave()
    await until(lambda: len(figures.ended) == 4)
    figures.digest()
    ends = {labels[1:]: number for (family, labels), number in figures.numbers.items() if family is REQUESTS}
    chat, node = "/v1/chat/completions", "http://engine:1"
    assert ends == {
        (chat, "ok", node): 1,
        (chat, "client_error", node): 1,
        (chat, "engine_error", node): 1,
        ("/v1/completions", "aborted", "none"): 1,
    }


async def test_what_the_end_of_a_worker_cuts_off_is_counted_as_that() -> None:
    figures = Figures(knows=lambda model: True)
    one = World(HANG, figures=figures)
    call = Call(one.app, "POST", "/v1/completions", b'{"model": "m"}').start()
    await until(lambda: one.hybrid.waiting == 1)
    one.app.begin_shutdown(time.monotonic())
    await until(lambda: len(figures.ended) == 1)
    assert call.task is not None
    await call.task
    assert figures.ended[0].outcome == "shutdown"


@pytest.mark.parametrize("wired", [False, True])
async def test_a_streams_first_chunk_and_their_number_are_noted(wired: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Call, "wired", wired)
    figures = Figures(knows=lambda model: True)
    reached = asyncio.Event()

    async def second() -> bytes:
        await reached.wait()
        return b"data: [DONE]\n\n"

    stream = FakeAnswer(b'data: {"n": 1}\n\n', second, headers=[(b"content-type", b"text/event-stream")])
    one = World(stream, FakeAnswer(b"{}"), figures=figures)
    call = Call(one.app, "POST", "/v1/chat/completions", b'{"model": "m", "stream": true}').start()
    await until(lambda: stream.reads == 2)
    between_s = time.monotonic()
    reached.set()
    assert call.task is not None
    await call.task
    await one.post()
    (streamed, whole) = figures.ended
    assert streamed.chunks == 2 and streamed.began_s <= streamed.first_s <= between_s <= streamed.ended_s
    assert whole.chunks == 0
