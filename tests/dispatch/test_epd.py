"""Encoders first, then whoever answers: order, retries, failures, and that every count is given back."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import pytest

from app.dispatch import epd
from app.dispatch.answer import Answer, EngineRequest, Outcome, Server
from app.dispatch.caller import AnswerTooLong
from app.dispatch.consumers import Consumers
from app.dispatch.epd import PATH, Epd, EpdRules
from app.dispatch.hybrid import Hybrid
from app.dispatch.media import ReportError
from app.errors import (
    BadRequest,
    EngineBroke,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    EvenhandError,
    ModelNotFound,
    NoNodeAvailable,
    error_answer,
)
from app.nodes import Node, Role, State
from tests.dispatch.fakes import (
    D0,
    D1,
    E0,
    E1,
    E2,
    E3,
    HEADERS,
    MODEL,
    P0,
    PARAMS,
    Call,
    FakeBreakers,
    FakeBudget,
    FakeCaller,
    FakeFigures,
    FakeLedger,
    FakeRegistry,
    FakeTaker,
    encoded,
    hangs,
    nodes_of,
    refuses,
    split_by,
)
from tests.dispatch.test_media import Json, audio, body_of, image, sha, sound, text, video

RULES = EpdRules(batch_limit=0, encoder_retries=2, decode_retries=1, rewrite=True)


class World:
    """An `Epd` with fakes around it. `inner` makes the use case behind it; default: one that notes what it gets."""

    def __init__(
        self,
        *nodes: Node,
        inner: Callable[[World], Server] | None = None,
        takes: tuple[str, ...] = (D0,),
        consumers: Consumers | None = None,
        expects_encoders: bool = False,
        **rules: Any,
    ) -> None:
        self.registry = FakeRegistry(*(nodes or nodes_of()))
        self.ledger = FakeLedger(self.registry)
        self.caller = FakeCaller()
        self.budget = FakeBudget()
        self.figures = FakeFigures()
        self.taker = FakeTaker(self.ledger, *takes)
        served_by: Any = inner(self) if inner else self.taker
        self.epd = Epd(
            registry=self.registry,  # type: ignore[arg-type]
            ledger=self.ledger,  # type: ignore[arg-type]
            caller=self.caller,  # type: ignore[arg-type]
            inner=served_by,
            consumer_taker=served_by,
            rules=replace(RULES, **rules),
            consumers=consumers or Consumers((), (), 1),
            budget=self.budget,  # type: ignore[arg-type]
            figures=self.figures,  # type: ignore[arg-type]
            expects_encoders=expects_encoders,
        )

    @property
    def _parts(self) -> Any:
        parts = {"registry": self.registry, "ledger": self.ledger, "caller": self.caller, "budget": self.budget}
        return {**parts, "breakers": FakeBreakers(), "retries": 2}

    async def ask(self, *parts: Json, **more: Any) -> Answer:
        return await self.open(body_of(*parts, **more))

    async def open(self, body: bytes, path: bytes = PATH, model: str = MODEL) -> Answer:
        return await self.epd.open(EngineRequest(b"POST", path, list(HEADERS), body, model))

    async def served(self, *parts: Json, **more: Any) -> Json:
        """The body that the inner use case got; the answer is closed and nothing is counted any more."""
        answer = await self.ask(*parts, **more)
        assert answer.status == 200
        answer.close(Outcome.OK)
        assert self.ledger.unfinished == {}
        return self.taker.bodies[-1]


def hybrid(world: World) -> Server:
    return Hybrid(**world._parts)


def prefill_decode(world: World) -> Server:
    return split_by(world.registry, world.ledger, world.caller, FakeFigures())


def parts_of(body: Json) -> list[Json]:
    parts: list[Json] = body["messages"][0]["content"]
    return parts


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# --- the way of a request ---------------------------------------------------------------------------


async def test_every_item_goes_to_the_encoder_of_its_turn_and_what_they_report_goes_on() -> None:
    world = World()
    body = await world.served(text(), image(0), image(1), image(2), image(3), temperature=0.5)
    assert [(call.url, [part["image_url"]["url"] for part in call.parts]) for call in world.caller.calls] == [
        (E0, ["http://img/0.png", "http://img/3.png"]),
        (E1, ["http://img/1.png"]),
        (E2, ["http://img/2.png"]),
    ]
    names = [sha(f"http://img/{n}.png") for n in range(4)]
    assert parts_of(body) == [
        text(),
        *({"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 2, 2]}, "uuid": name} for name in names),
    ]
    params = body["ec_transfer_params"]
    assert [item["mm_hash"] for item in params.pop("ec_items")] == ["hash-of-" + name[:12] for name in names]
    assert {name: entry["peer_host"] for name, entry in params.items()} == {
        "hash-of-" + name[:12]: url for name, url in zip(names, (E0, E1, E2, E0), strict=True)
    }
    assert body["temperature"] == 0.5


async def test_a_sub_request_is_a_chat_call_under_an_id_of_its_own_and_the_rest_keeps_the_parents() -> None:
    world = World()
    await world.served(text(), image(0), image(1), image(2), image(3))
    assert [re.sub("[0-9a-f]{6}$", "hex", call.id) for call in world.caller.calls] == [
        "parent:0:hex",
        "parent:1:hex",
        "parent:2:hex",
    ]
    assert len({call.id for call in world.caller.calls}) == 3
    for call in world.caller.calls:
        assert (call.request.method, call.request.path, call.request.model) == (b"POST", PATH, MODEL)
        assert [header for header in call.request.headers if header[0] != b"x-request-id"] == [HEADERS[0]]
    assert world.taker.sent[0].headers == HEADERS


async def test_the_index_in_a_child_id_counts_all_items_of_the_request() -> None:
    world = World(batch_limit=1)
    await world.served(image(0), image(0), video(0), image(1))
    assert [call.id.split(":")[1] for call in world.caller.calls] == ["0", "2", "3"]


async def test_items_that_are_the_same_are_encoded_once_and_counted_once() -> None:
    world = World()
    body = await world.served(image(0), image(0, detail="x"), image(0))
    assert len(world.caller.calls) == 1 and world.ledger.steps == [1] and world.ledger.cursor == 1
    assert [part["type"] for part in parts_of(body)] == ["image_embeds"] * 3
    assert len(body["ec_transfer_params"]["ec_items"]) == 3


async def test_the_batch_limit_is_kept() -> None:
    world = World(*nodes_of(2), batch_limit=2)
    await world.served(*(image(n) for n in range(6)))
    assert [(call.url, len(call.parts)) for call in world.caller.calls] == [(E0, 2), (E1, 2), (E0, 1), (E1, 1)]


async def test_r75_what_changes_the_encoding_is_passed_on_and_nothing_else() -> None:
    world = World()
    options = {"mm_processor_kwargs": {"max_pixels": 3}, "media_io_kwargs": {}, "priority": None, "session_id": "s"}
    await world.served(image(0), **options, temperature=1, max_tokens=5, stream=True, tools=[])
    (call,) = world.caller.calls
    assert call.body.keys() - {"model", "messages", "stream"} == set(options)
    assert call.body["stream"] is False
    assert {name: call.body[name] for name in options} == options


async def test_without_rewriting_the_request_goes_on_as_it_came_with_the_handles() -> None:
    world = World(rewrite=False)
    body = await world.served(text(), image(0), video(0))
    assert parts_of(body) == [text(), image(0), video(0)]
    assert all("uuid" not in part for call in world.caller.calls for part in call.parts)
    assert "ec_items" not in body["ec_transfer_params"] and len(body["ec_transfer_params"]) == 2


async def test_the_cursor_goes_on_from_request_to_request() -> None:
    world = World()
    run = []
    for items in (2, 1, 3, 1):
        before = len(world.caller.calls)
        await world.served(*(image(n) for n in range(items)))
        run.append([call.url for call in world.caller.calls[before:]])
    assert run == [[E0, E1], [E2], [E0, E1, E2], [E0]]


async def test_one_call_is_one_latency_however_many_items_it_had() -> None:
    world = World(*nodes_of(1))
    await world.served(image(0), image(1), image(2), video(0))
    assert world.ledger.taken[E0] == 4
    assert world.ledger.latencies == {E0: 2, D0: 1}


async def test_an_answer_over_the_limit_is_a_502_and_not_tried_again() -> None:
    world = World()
    world.caller.behaviour[E0] = lambda call: AnswerTooLong("its answer is longer than 5 bytes")
    with pytest.raises(ReportError, match="longer than 5 bytes") as caught:
        await world.ask(image(0))
    assert caught.value.status == 502 and len(world.caller.calls) == 1
    assert world.ledger.unfinished == {}


async def test_the_encoders_answers_are_read_up_to_a_limit() -> None:
    world = World()
    await world.served(image(0))
    assert world.caller.limits == {E0: 64 * 2**20}


# --- order and concurrency --------------------------------------------------------------------------


async def test_r77_all_encoders_work_at_once_and_only_then_prefill_and_then_decode() -> None:
    world = World(*nodes_of(3, prefill=1), inner=prefill_decode)
    gates = {url: asyncio.Event() for url in (E0, E1, E2, P0)}
    for url, gate in gates.items():

        async def wait(call: Call, gate: asyncio.Event = gate) -> None:
            await gate.wait()

        world.caller.behaviour[url] = wait
    task = asyncio.create_task(world.ask(image(0), image(1), image(2)))
    await turns()
    assert [call.url for call in world.caller.calls] == [E0, E1, E2]
    assert world.caller.most == 3
    for url in (E1, E0):
        gates[url].set()
        await turns()
        assert len(world.caller.calls) == 3, "prefill began before all encoders were done"
    gates[E2].set()
    await turns()
    assert [call.url for call in world.caller.calls] == [E0, E1, E2, P0]
    # The encoders are free while the rest goes on.
    assert world.ledger.unfinished == {P0: 1, D0: 1}
    gates[P0].set()
    answer = await task
    assert [call.url for call in world.caller.calls] == [E0, E1, E2, P0, D0]
    assert world.ledger.unfinished == {D0: 1}
    answer.close(Outcome.OK)
    assert world.ledger.unfinished == {}
    prefill, decode = world.caller.calls[3:]
    assert [part["type"] for part in prefill.parts] == ["image_embeds"] * 3
    # Decode needs what prefill needed, and where the cache lies.
    assert decode.parts == prefill.parts
    assert decode.body["ec_transfer_params"] == prefill.body["ec_transfer_params"]
    assert decode.body["kv_transfer_params"] == PARAMS
    assert {call.id for call in (prefill, decode)} == {"parent"}


async def test_groups_of_one_encoder_run_at_once_too() -> None:
    world = World(*nodes_of(1), batch_limit=1)
    world.caller.behaviour[E0] = hangs
    task = asyncio.create_task(world.ask(*(image(n) for n in range(5))))
    await turns()
    assert world.caller.running == {E0: 5} and world.ledger.unfinished == {E0: 5}
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert world.ledger.unfinished == {}


# --- requests that no encoder sees ------------------------------------------------------------------

EMBEDS: Json = {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 2, 3]}, "uuid": "known"}


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (body_of(text("just words")), PATH),
        (body_of(EMBEDS, {"type": "audio_embeds", "audio_embeds": None, "uuid": "a"}, text()), PATH),
        (body_of(text("about image_url and input_audio \\u00e4")), PATH),
        (body_of(EMBEDS, text("about image_url")), PATH),
        (b'{"model":"m","messages":[{"role":"user","content":"image_url"}]}', PATH),
        (b'{"model":"m","prompt":"image_url"}', b"/v1/completions"),
        (body_of(image(0)), b"/v1/responses"),
        (body_of(image(0)), b"/v1/chat/completions/batch"),
        (b"--x\r\nimage_url", b"/v1/audio/transcriptions"),
    ],
)
async def test_text_and_embeds_never_touch_an_encoder_and_go_on_byte_for_byte(body: bytes, path: bytes) -> None:
    world = World(expects_encoders=True)
    answer = await world.open(body, path)
    assert world.caller.calls == [] and world.ledger.steps == [] and world.ledger.cursor == 0
    (sent,) = world.taker.sent
    assert sent == EngineRequest(b"POST", path, list(HEADERS), body, MODEL)
    answer.close(Outcome.OK)
    assert world.ledger.unfinished == {}


async def test_text_with_a_lone_surrogate_goes_on_byte_for_byte() -> None:
    world = World()
    body = rb'{"model":"m","messages":[{"role":"user","content":"cut \ud83d"}]}'
    (await world.open(body)).close(Outcome.OK)
    assert world.taker.sent[0].body == body
    assert world.caller.calls == []


async def test_a_query_string_does_not_hide_a_chat_request() -> None:
    world = World()
    (await world.open(body_of(image(0)), PATH + b"?x=1")).close(Outcome.OK)
    assert [call.request.path for call in world.caller.encodes] == [PATH]
    assert world.taker.sent[0].path == PATH + b"?x=1"


async def test_embeds_beside_media_stay_and_only_the_media_are_encoded() -> None:
    world = World()
    body = await world.served(EMBEDS, image(0))
    (call,) = world.caller.calls
    assert (len(call.parts), call.id.split(":")[1]) == (1, "0")
    assert parts_of(body)[0] == EMBEDS


async def test_where_no_encoder_serves_the_model_media_go_on_as_they_are() -> None:
    world = World(*nodes_of(0))
    raw = body_of(image(0))
    (await world.open(raw)).close(Outcome.OK)
    other = Node(E0, role=Role.Encode, models=("another",), state=State.READY)
    world.registry.set(other)
    (await world.open(raw)).close(Outcome.OK)
    assert world.caller.calls == []
    assert [sent.body for sent in world.taker.sent] == [raw, raw]


async def test_where_encoders_are_expected_media_without_one_are_a_503() -> None:
    world = World(*nodes_of(0), expects_encoders=True)
    with pytest.raises(NoNodeAvailable, match="Encode"):
        await world.ask(image(0))
    assert world.taker.takes == []


async def test_encoders_that_are_all_down_are_a_503_that_names_the_role() -> None:
    world = World(*nodes_of(2, state=State.DOWN))
    with pytest.raises(NoNodeAvailable, match="no Encode node with the model 'm' is alive") as caught:
        await world.ask(image(0))
    status, headers, body = error_answer(caught.value)
    assert status == 503 and (b"retry-after", b"2") in headers
    assert json.loads(body)["error_code"] == 10401
    assert world.taker.takes == [] and world.caller.calls == []


async def test_an_unknown_model_is_a_404() -> None:
    world = World(expects_encoders=True)
    with pytest.raises(ModelNotFound):
        await world.open(body_of(image(0)), model="other")


async def test_a_malformed_request_is_a_400_before_anything_is_counted() -> None:
    world = World()
    with pytest.raises(BadRequest, match="image_url.url"):
        await world.ask({"type": "image_url", "image_url": {}})
    assert world.ledger.taken == {} and world.taker.takes == []


# --- an encoder that fails --------------------------------------------------------------------------


def timed_out(call: Call) -> Exception:
    return EngineTimeout(f"engine {call.url} was too slow", stage="first_byte")


def broke_off(call: Call) -> Exception:
    return EngineBroke(f"engine {call.url} broke off")


def unreachable(call: Call) -> Exception:
    return EngineUnreachable(f"engine {call.url} has no route")


FAILURES = [
    refuses,
    unreachable,
    timed_out,
    broke_off,
    lambda call: (500, b"no"),
    lambda call: (503, b"no"),
    lambda call: (204, b""),
]
FAILURE_NAMES = ["refuses", "unreachable", "timeout", "broke off", "500", "503", "204"]


@pytest.mark.parametrize("failure", FAILURES, ids=FAILURE_NAMES)
async def test_r76_the_items_of_an_encoder_that_fails_go_to_the_next_one(failure: Any) -> None:
    world = World()
    world.caller.behaviour[E0] = failure
    body = await world.served(image(0), image(1), image(2), image(3))
    assert [(call.url, len(call.parts)) for call in world.caller.calls] == [(E0, 2), (E1, 1), (E2, 1), (E1, 2)]
    first, again = world.caller.calls[0], world.caller.calls[3]
    assert again.parts == first.parts
    assert len(parts_of(body)) == 4 and {part["type"] for part in parts_of(body)} == {"image_embeds"}
    # Counted where it really ran; the failed call left no latency.
    assert world.ledger.taken == {E0: 2, E1: 3, E2: 1, D0: 1}
    assert world.ledger.latencies == {E0: 0, E1: 2, E2: 1, D0: 1}
    assert sorted(world.figures.stages) == [("encode", E1), ("encode", E1), ("encode", E2)]
    assert world.figures.counts == {"encodes_failed": 1}


async def test_a_retry_moves_no_cursor_and_the_next_request_goes_on_in_turn() -> None:
    world = World()
    world.caller.behaviour[E0] = refuses
    await world.served(image(0))
    assert world.ledger.steps == [1] and world.ledger.cursor == 1
    await world.served(image(0))
    assert [call.url for call in world.caller.calls] == [E0, E1, E1]


async def test_a_retry_has_a_fresh_child_id_and_fresh_transfer_ids() -> None:
    world = World(takes=(D0,), consumers=Consumers([D0], ["tcp://d0:1"], 1))
    world.caller.behaviour[E0] = refuses
    body = await world.served(image(0), image(1), image(2), image(3))
    first, again = world.caller.to(E0)[0], world.caller.to(E1)[-1]
    assert (first.id != again.id, again.id.startswith("parent:0:")) == (True, True)
    assert not set(first.transfer_ids) & set(again.transfer_ids)
    # What goes on names those of the calls that succeeded.
    by_uuid = {
        part["uuid"]: transfer_id
        for call in world.caller.encodes
        if call is not first
        for part, transfer_id in zip(call.parts, call.transfer_ids, strict=True)
    }
    ids = [item["transfer_id"] for item in body["ec_transfer_params"]["ec_items"]]
    assert ids == [by_uuid[part["uuid"]] for part in parts_of(body)]


def down(world: World, url: str) -> None:
    world.registry.set(replace(world.registry.snapshot.nodes[url], state=State.DOWN))


async def test_the_items_of_an_encoder_that_went_down_while_it_worked_go_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A frozen host breaks no connection: without this its items wait for --first-byte-timeout-s, 10 minutes."""
    monkeypatch.setattr(epd, "LOOK_EVERY_S", 0.01)
    world = World()
    world.caller.behaviour[E0] = hangs
    task = asyncio.create_task(world.ask(image(0), image(1)))
    await asyncio.sleep(0.05)
    assert not task.done() and world.caller.running[E0] == 1
    down(world, E0)
    answer = await asyncio.wait_for(task, 1)
    assert answer.status == 200
    assert [(call.url, call.cancelled) for call in world.caller.encodes] == [(E0, True), (E1, False), (E1, False)]
    answer.close(Outcome.OK)
    assert world.ledger.unfinished == {} and not any(world.caller.running.values())


@pytest.mark.parametrize("case", ["nobody else", "no retries", "removed"])
async def test_an_encoder_that_may_still_end_its_work_is_waited_for(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that shuts down properly refuses connections, and serves what it has."""
    monkeypatch.setattr(epd, "LOOK_EVERY_S", 0.01)
    world = World(*nodes_of(1 if case == "nobody else" else 2), encoder_retries=0 if case == "no retries" else 2)
    go = asyncio.Event()

    async def slowly(call: Call) -> None:
        await go.wait()

    world.caller.behaviour[E0] = slowly
    task = asyncio.create_task(world.ask(image(0)))
    await asyncio.sleep(0.03)
    if case == "removed":
        world.registry.set(gone=(E0,))
    else:
        down(world, E0)
    await asyncio.sleep(0.05)
    go.set()
    assert (await asyncio.wait_for(task, 1)).status == 200
    assert [(call.url, call.cancelled) for call in world.caller.encodes] == [(E0, False)]


async def test_no_encoder_is_tried_twice_for_an_item() -> None:
    world = World(encoder_retries=9)
    for url in (E0, E1, E2):
        world.caller.behaviour[url] = refuses
    with pytest.raises(NoNodeAvailable):
        await world.ask(image(0), image(1))
    for items in world.caller.calls:
        assert len(items.parts) == 1
    tried = Counter((call.url, call.parts[0]["uuid"]) for call in world.caller.calls)
    assert set(tried.values()) == {1} and len(tried) == 6


@pytest.mark.parametrize("encoders", [1, 2, 3])
@pytest.mark.parametrize("failure", FAILURES, ids=FAILURE_NAMES)
async def test_r76_all_down_is_a_503_naming_the_role_and_neither_prefill_nor_decode_is_called(
    encoders: int, failure: Any
) -> None:
    world = World(*nodes_of(encoders, prefill=1), inner=prefill_decode)
    for n in range(encoders):
        world.caller.behaviour[f"http://e{n}:1"] = failure
    with pytest.raises(NoNodeAvailable, match="no Encode node could take the media: ") as caught:
        await world.ask(image(0))
    assert caught.value.status == 503 and caught.value.retry_after_s == 2
    assert Counter(call.url for call in world.caller.calls) == {f"http://e{n}:1": 1 for n in range(encoders)}
    assert world.ledger.unfinished == {}
    assert world.ledger.taken[D0] == world.ledger.taken[P0] == 0


@pytest.mark.parametrize(
    ("retries", "failure", "status", "tried"),
    [
        (2, refuses, 502, [E0, E1, E2]),
        (1, timed_out, 504, [E0, E1]),
        (0, lambda call: (500, b"no"), 502, [E0]),
    ],
)
async def test_after_the_last_retry_the_failure_is_told_as_it_is_where_another_encoder_is_left(
    retries: int, failure: Any, status: int, tried: list[str]
) -> None:
    world = World(*nodes_of(4), encoder_retries=retries)
    for url in tried:
        world.caller.behaviour[url] = failure
    with pytest.raises(EvenhandError) as caught:
        await world.ask(image(0))
    assert caught.value.status == status and tried[-1] in caught.value.message
    assert [call.url for call in world.caller.calls] == tried
    assert world.ledger.unfinished == {} and world.taker.takes == []


async def test_the_next_one_is_the_next_in_registration_order_also_where_the_failed_one_is_down_by_now() -> None:
    world = World(*nodes_of(4))

    def goes_down(call: Call) -> Exception:
        node = world.registry.snapshot.nodes[call.url]
        world.registry.set(replace(node, state=State.DOWN))
        return EngineRefused("refused")

    world.ledger.cursor = 2
    world.caller.behaviour[E2] = goes_down
    world.caller.behaviour[E3] = goes_down
    await world.served(image(0))
    assert [call.url for call in world.caller.calls] == [E2, E3, E0]


async def test_an_encoder_that_was_removed_meanwhile_is_not_the_next() -> None:
    world = World()

    def leaves(call: Call) -> Exception:
        world.registry.set(gone=(E0, E1))
        return EngineRefused("refused")

    world.caller.behaviour[E0] = leaves
    await world.served(image(0))
    assert [call.url for call in world.caller.calls] == [E0, E2]


async def test_one_that_joined_meanwhile_may_be_the_next() -> None:
    world = World(*nodes_of(1))

    def another_joins(call: Call) -> Exception:
        world.registry.set(Node(E3, role=Role.Encode, models=(MODEL,), state=State.READY, order=9))
        return EngineRefused("refused")

    world.caller.behaviour[E0] = another_joins
    await world.served(image(0))
    assert [call.url for call in world.caller.calls] == [E0, E3]


async def test_each_group_has_retries_of_its_own() -> None:
    world = World(encoder_retries=1)
    world.caller.behaviour[E0, 0] = refuses
    world.caller.behaviour[E1, 0] = refuses
    await world.served(image(0), image(1))
    assert [call.url for call in world.caller.calls] == [E0, E1, E1, E2]


# --- failures that can't be mended ------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 429])
async def test_an_encoders_4xx_is_the_clients_answer_as_it_is(status: int) -> None:
    world = World()
    said = b'{"error":{"message":"the image is broken"}}'
    world.caller.behaviour[E1] = lambda call: (status, said)
    answer = await world.ask(image(0), image(1), image(2))
    assert (answer.status, answer.url, await answer.read(), await answer.read()) == (status, E1, said, b"")
    assert (b"x-engine", b"yes") in answer.headers
    answer.close(Outcome.CLIENT_ERROR)
    assert len(world.caller.calls) == 3 and world.taker.takes == []
    assert world.ledger.unfinished == {} and world.ledger.latencies[E1] == 0
    assert world.ledger.rows_ended[E1] == 1


async def test_an_encoders_own_5xx_ends_no_row_of_its_failures() -> None:
    world = World()
    world.caller.behaviour[E0] = lambda call: (503, b"{}")
    await world.served(image(0))
    assert (world.ledger.rows_ended[E0], world.ledger.rows_ended[E1]) == (0, 1)


@pytest.mark.parametrize(
    "answer",
    [
        b"no json",
        b"[]",
        b'{"ec_transfer_params":[]}',
        b'{"ec_transfer_params":{"a":{},"b":{}}}',
        b'{"ec_transfer_params":{"a":{"metadata":{"g":["x"]}}}}',
    ],
)
async def test_r80_a_malformed_report_is_a_502_without_a_retry(answer: bytes) -> None:
    world = World()
    world.caller.behaviour[E0] = lambda call: answer
    with pytest.raises(EngineBroke) as caught:
        await world.ask(image(0))
    assert caught.value.status == 502 and E0 in caught.value.message
    assert [call.url for call in world.caller.calls] == [E0]
    assert world.ledger.unfinished == {} and world.taker.takes == [] and world.ledger.latencies[E0] == 0


@pytest.mark.parametrize("failure", ["4xx", "malformed", "all down"])
@pytest.mark.parametrize("consumers", [False, True])
async def test_r80_the_first_failure_cancels_the_other_calls_and_nothing_goes_on(failure: str, consumers: bool) -> None:
    world = World(consumers=Consumers([D0], ["tcp://d0:1"], 1) if consumers else None, encoder_retries=0)
    world.caller.behaviour[E0] = world.caller.behaviour[E1] = hangs
    said: Any = {"4xx": (400, b"{}"), "malformed": b"{", "all down": EngineRefused("refused")}[failure]

    async def fails_later(call: Call) -> Any:
        await turns(3)
        return said

    world.caller.behaviour[E2] = fails_later
    async with asyncio.timeout(2):
        if failure == "4xx":
            answer = await world.ask(image(0), image(1), image(2))
            assert answer.status == 400
            answer.close(Outcome.CLIENT_ERROR)
        else:
            with pytest.raises(EvenhandError):
                await world.ask(image(0), image(1), image(2))
    assert [(call.url, call.cancelled) for call in world.caller.calls] == [(E0, True), (E1, True), (E2, False)]
    assert world.ledger.unfinished == {}
    assert world.taker.sent == []


async def test_the_failure_that_came_first_is_the_one_that_is_told() -> None:
    world = World(encoder_retries=0)

    async def fails(call: Call) -> Any:
        await turns({E0: 6, E1: 2, E2: 4}[call.url])
        return 400 + int(call.url[8]), b"{}"

    for url in (E0, E1, E2):
        world.caller.behaviour[url] = fails
    answer = await world.ask(image(0), image(1), image(2))
    assert answer.status == 401


async def test_an_unforeseen_fault_is_not_swallowed_and_gives_everything_back() -> None:
    world = World()
    world.caller.behaviour[E0] = lambda call: ZeroDivisionError("bug")
    world.caller.behaviour[E1] = hangs
    with pytest.raises(ZeroDivisionError):
        await world.ask(image(0), image(1))
    assert world.ledger.unfinished == {}


# --- an engine that says 500 ------------------------------------------------------------------------


async def test_a_500_of_the_answering_engine_begins_everything_again_with_new_ids() -> None:
    world = World()
    world.taker.statuses = [500, 200]
    answer = await world.ask(image(0), image(1), image(2), image(3))
    assert answer.status == 200
    # The turns go on: 0 1 2 0, then 1 2 0 1.
    assert [(call.url, len(call.parts)) for call in world.caller.calls] == [
        (E0, 2),
        (E1, 1),
        (E2, 1),
        (E1, 2),
        (E2, 1),
        (E0, 1),
    ]
    assert world.ledger.steps == [4, 4]
    first, second = world.taker.bodies
    assert parts_of(first) == parts_of(second)
    ids = [item["transfer_id"] for body in (first, second) for item in body["ec_transfer_params"]["ec_items"]]
    assert len(set(ids)) == 8
    assert len({call.id for call in world.caller.calls}) == 6
    # The first answer is closed, its node given back without a latency.
    assert [response.closed for response in world.taker.responses] == [1, 0]
    assert world.ledger.unfinished == {D0: 1}
    answer.close(Outcome.OK)
    assert world.ledger.unfinished == {} and world.ledger.latencies[D0] == 1


async def test_nothing_of_the_first_attempt_is_in_the_second() -> None:
    world = World(*nodes_of(1))
    world.taker.statuses = [500, 200]
    world.caller.behaviour[E0, 1] = lambda call: b"{}"
    await world.ask(image(0))
    first, second = world.taker.bodies
    assert "ec_transfer_params" in first and "ec_transfer_params" not in second
    assert [part["type"] for part in parts_of(second)] == ["image_url"]


@pytest.mark.parametrize(("retries", "sent"), [(0, 1), (1, 2), (3, 4)])
async def test_a_500_that_stays_is_told_after_the_last_retry(retries: int, sent: int) -> None:
    world = World(decode_retries=retries)
    world.taker.statuses = [500] * 9
    answer = await world.ask(image(0))
    assert answer.status == 500 and len(world.taker.sent) == sent == len(world.caller.calls)
    answer.close(Outcome.ENGINE_ERROR)
    assert world.ledger.unfinished == {} and world.ledger.latencies[D0] == 0


@pytest.mark.parametrize("status", [400, 404, 429, 501, 502, 503, 504, 200, 201])
async def test_no_other_status_begins_anything_again(status: int) -> None:
    world = World()
    world.taker.statuses = [status]
    answer = await world.ask(image(0))
    assert answer.status == status and len(world.taker.sent) == 1


async def test_an_engine_that_can_not_be_reached_is_no_500_and_gives_everything_back() -> None:
    world = World()
    world.taker.statuses = [EngineRefused("refused")]
    with pytest.raises(EngineRefused):
        await world.ask(image(0))
    assert len(world.taker.sent) == 1 and world.ledger.unfinished == {}


async def test_behind_encoders_the_next_use_case_tries_no_500_elsewhere_and_without_media_it_does() -> None:
    world = World()
    await world.served(image(0))
    await world.served({"type": "text", "text": "hi"})
    assert world.taker.retries_500 == [False, True]


async def test_everything_once_more_takes_from_the_budget_and_without_it_the_500_is_the_answer() -> None:
    world = World(decode_retries=3)
    world.budget.left = 1
    world.taker.statuses = [500] * 9
    answer = await world.ask(image(0))
    assert answer.status == 500 and len(world.taker.sent) == 2 and world.budget.taken == 1
    assert [response.closed for response in world.taker.responses] == [1, 0], "the last one is the client's"
    answer.close(Outcome.ENGINE_ERROR)
    assert world.ledger.unfinished == {}


async def test_a_client_that_leaves_while_the_budget_is_asked_leaves_no_answer_open() -> None:
    world = World()
    world.taker.statuses = [500]
    world.budget.take = asyncio.Event().wait  # type: ignore[method-assign,assignment]
    task = asyncio.create_task(world.ask(image(0)))
    await turns()
    assert world.ledger.unfinished == {D0: 1}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [response.closed for response in world.taker.responses] == [1]
    assert world.ledger.unfinished == {}


@pytest.mark.parametrize(
    ("failure", "free"), list(zip(FAILURES, [True, True, *[False] * 5], strict=True)), ids=FAILURE_NAMES
)
async def test_another_encoder_costs_the_budget_where_the_first_may_have_worked(failure: Any, free: bool) -> None:
    world = World()
    world.caller.behaviour[E0] = failure
    await world.served(image(0))
    assert world.budget.taken == (0 if free else 1)
    world = World()
    world.budget.left = 0
    world.caller.behaviour[E0] = failure
    if free:
        await world.served(image(0))
        return
    with pytest.raises(EvenhandError) as caught:
        await world.ask(image(0))
    assert E0 in caught.value.message and [call.url for call in world.caller.calls] == [E0]
    assert world.ledger.unfinished == {} and world.taker.takes == []


@pytest.mark.parametrize(("status", "answered"), [(500, D0), (503, "http://d1:1")])
async def test_behind_encoders_a_503_goes_to_another_node_with_what_was_encoded_and_a_500_begins_anew(
    status: int, answered: str
) -> None:
    world = World(*nodes_of(1, decode=2), inner=hybrid)
    world.caller.behaviour["http://d0:1", 0] = lambda call: (status, b"no")
    answer = await world.ask(image(0))
    assert answer.status == 200 and answer.url == answered
    assert len(world.caller.encodes) == (2 if status == 500 else 1) and world.budget.taken == 1
    answer.close(Outcome.OK)
    assert world.ledger.unfinished == {} and all(response.closed for response in world.caller.responses)


async def test_where_the_encoders_are_gone_at_the_second_attempt_that_is_told() -> None:
    world = World(*nodes_of(1))
    world.taker.statuses = [500]

    def leaves(call: Call) -> bytes:
        world.registry.set(replace(world.registry.snapshot.nodes[E0], state=State.DOWN))
        return encoded(call)

    world.caller.behaviour[E0] = leaves
    with pytest.raises(NoNodeAvailable, match="Encode"):
        await world.ask(image(0))
    assert world.ledger.unfinished == {}


# --- Mooncake consumers -----------------------------------------------------------------------------

TWO = Consumers([D0, D1], ["tcp://d0:1", "tcp://d0:2", "tcp://d1:1", "tcp://d1:2"], 2)


async def test_the_consumer_is_held_before_anything_is_encoded_and_encoders_are_told_where_to_push() -> None:
    world = World(takes=(D1,), consumers=TWO)
    world.caller.behaviour[E0] = hangs
    task = asyncio.create_task(world.ask(image(0)))
    await turns()
    assert world.ledger.unfinished == {D1: 1, E0: 1} and world.taker.sent == []
    (call,) = world.caller.calls
    assert call.body["ec_transfer_params"]["consumer_zmq"] in ("tcp://d1:1", "tcp://d1:2")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert world.ledger.unfinished == {}


async def test_one_consumer_for_all_items_and_the_rank_goes_to_it_and_to_no_encoder() -> None:
    world = World(takes=(D0,), consumers=TWO)
    seen = set()
    for _ in range(40):
        world.caller.calls.clear()
        await world.served(image(0), image(1), sound())
        (address,) = {call.body["ec_transfer_params"]["consumer_zmq"] for call in world.caller.encodes}
        sent = world.taker.sent[-1]
        assert sent.headers == [*HEADERS, (b"x-data-parallel-rank", b"%d" % (int(address[-1]) - 1))]
        assert all(len(call.request.headers) == len(HEADERS) for call in world.caller.encodes)
        seen.add(address)
    assert seen == {"tcp://d0:1", "tcp://d0:2"}


async def test_transfer_ids_that_encoders_announced_are_those_that_the_consumer_gets() -> None:
    world = World(takes=(D0,), consumers=Consumers([D0], ["tcp://d0:1"], 1))
    body = await world.served(image(0), image(1), image(2), image(0))
    announced = {
        part["uuid"]: transfer_id
        for call in world.caller.encodes
        for part, transfer_id in zip(call.parts, call.transfer_ids, strict=True)
    }
    assert len(set(announced.values())) == 3
    ids = [item["transfer_id"] for item in body["ec_transfer_params"]["ec_items"]]
    assert ids == [announced[sha(f"http://img/{n}.png")] for n in (0, 1, 2, 0)]


async def test_without_rewriting_the_transfer_ids_go_along() -> None:
    world = World(takes=(D0,), consumers=Consumers([D0], ["tcp://d0:1"], 1), rewrite=False)
    body = await world.served(image(0))
    (call,) = world.caller.encodes
    assert [item["transfer_id"] for item in body["ec_transfer_params"]["ec_items"]] == call.transfer_ids
    assert parts_of(body) == [image(0)]


async def test_the_consumer_is_kept_when_everything_begins_again() -> None:
    for _ in range(8):
        world = World(takes=(D0, D1), consumers=TWO, decode_retries=3)
        world.taker.statuses = [500, 500, 500, 200]
        answer = await world.ask(image(0))
        assert answer.url == D0 and world.taker.takes == [None, D0, D0, D0]
        assert len({call.body["ec_transfer_params"]["consumer_zmq"] for call in world.caller.encodes}) == 1
        assert len({tuple(sent.headers) for sent in world.taker.sent}) == 1
        assert len({call.transfer_ids[0] for call in world.caller.encodes}) == 4


async def test_a_consumer_whose_node_is_gone_is_replaced_by_one_of_the_node_that_is_taken() -> None:
    world = World(*nodes_of(1, decode=2), inner=hybrid, consumers=Consumers([D0, D1], ["tcp://d0:1", "tcp://d1:1"], 1))

    def leaves(call: Call) -> tuple[int, bytes]:
        world.registry.set(gone=(D0,))
        return 500, b"no"

    world.caller.behaviour[D0] = leaves
    answer = await world.ask(image(0))
    assert answer.url == D1
    assert [call.url for call in world.caller.calls] == [E0, D0, E0, D1]
    zmq = [call.body["ec_transfer_params"]["consumer_zmq"] for call in world.caller.encodes]
    assert zmq == ["tcp://d0:1", "tcp://d1:1"]


async def test_media_never_go_to_a_node_without_a_control_channel_and_text_does() -> None:
    """Such a node may be registered at any time, and then it is the least busy one."""
    world = World(*nodes_of(1, decode=1, hybrid=1), inner=hybrid, consumers=Consumers([D0], ["tcp://d0:1"], 1))
    answers = [await world.ask(image(n)) for n in range(3)]
    assert [answer.url for answer in answers] == [D0, D0, D0]
    assert (await world.ask(text())).url == "http://h0:1"


async def test_where_no_node_with_a_control_channel_is_alive_media_are_a_503_that_names_them() -> None:
    world = World(*nodes_of(1, decode=0, hybrid=1), inner=hybrid, consumers=Consumers([D0], ["tcp://d0:1"], 1))
    with pytest.raises(NoNodeAvailable, match=f"no Hybrid or Decode node of {D0} "):
        await world.ask(image(0))
    assert world.ledger.unfinished == {} and world.caller.calls == []


async def test_text_goes_to_any_consumer_without_a_rank() -> None:
    world = World(takes=(D0,), consumers=TWO)
    await world.served(text())
    assert world.taker.sent[0].headers == HEADERS


# --- the client leaves ------------------------------------------------------------------------------


def waiting(world: World, where: str) -> None:
    if where == "encode":
        for url in (E0, E1, E2):
            world.caller.behaviour[url] = hangs
    elif where == "encode again":
        world.caller.behaviour[E0] = refuses
        world.caller.behaviour[E1, 1] = hangs
    elif where == "acquire encoders":
        world.ledger.waits = asyncio.Event().wait  # type: ignore[assignment]
    elif where == "acquire the next":

        def refuses_and_freezes(call: Call) -> Exception:
            world.ledger.waits = asyncio.Event().wait  # type: ignore[assignment]
            return EngineRefused("refused")

        world.caller.behaviour[E0] = refuses_and_freezes
    elif where == "prefill":
        world.caller.behaviour[P0] = hangs
    elif where == "decode":
        world.caller.behaviour[D0] = hangs
    else:
        world.caller.behaviour[D0, 0] = lambda call: (500, b"no")
        world.caller.behaviour[{"encode after a 500": E1, "decode after a 500": D0}[where], 1] = hangs


PLACES = ["acquire encoders", "encode", "encode again", "acquire the next"]
PLACES += ["decode", "encode after a 500", "decode after a 500"]


@pytest.mark.parametrize(
    ("where", "consumers"),
    [("prefill", False), *((where, consumers) for where in PLACES for consumers in (False, True))],
)
async def test_r80_wherever_the_client_leaves_all_calls_are_aborted_and_all_counts_given_back(
    where: str, consumers: bool
) -> None:
    split = where == "prefill"
    world = World(
        *nodes_of(3, prefill=split),
        inner=prefill_decode if split else hybrid,
        consumers=Consumers([D0], ["tcp://d0:1"], 1) if consumers else None,
    )
    waiting(world, where)
    task = asyncio.create_task(world.ask(image(0), image(1), image(2), image(3)))
    await turns(60)
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.ledger.unfinished == {}
    assert not any(world.caller.running.values())


async def test_r03_whenever_the_client_leaves_nothing_stays_counted() -> None:
    """Cancelled after every number of turns that a request can take, with a failure and a second attempt on its way."""
    ended = 0
    for turn in range(400):
        world = World(*nodes_of(3, prefill=1), inner=prefill_decode)
        world.ledger.waits = turns
        world.caller.behaviour[E1, 0] = refuses
        world.caller.behaviour[D0, 0] = lambda call: (500, b"no")
        task = asyncio.create_task(world.ask(image(0), image(1), video(0)))
        await turns(turn)
        if task.done():
            ended += 1
            (await task).close(Outcome.ABORTED)
        else:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert world.ledger.unfinished == {}, f"cancelled after {turn} turns"
        assert not any(world.caller.running.values())
        if ended > 3:
            break
    assert ended > 3 and turn > 30


# --- other kinds, together --------------------------------------------------------------------------


async def test_audio_and_video_go_alone_and_a_silent_encoder_keeps_all_media_of_a_request_with_audio() -> None:
    world = World(*nodes_of(1))
    world.caller.behaviour[E0] = lambda call: b"{}" if call.parts[0]["type"] == "video_url" else encoded(call)
    body = await world.served(image(0), audio(0), video(0), image(1))
    assert [[part["type"] for part in call.parts] for call in world.caller.calls] == [
        ["image_url", "image_url"],
        ["audio_url"],
        ["video_url"],
    ]
    assert [part["type"] for part in parts_of(body)] == ["image_url", "audio_url", "video_url", "image_url"]
    assert all("uuid" in part for part in parts_of(body))
    assert len(body["ec_transfer_params"]["ec_items"]) == 3


async def test_a_video_with_its_own_sound_is_served_raw() -> None:
    world = World(*nodes_of(1))
    two = {"a": {"metadata": {"g": [1]}, "item_indices": [0]}, "b": {"metadata": {"l": [2]}, "item_indices": [1]}}
    world.caller.behaviour[E0] = lambda call: json.dumps({"ec_transfer_params": two}).encode()
    body = await world.served(video(0), mm_processor_kwargs={"use_audio_in_video": True})
    assert parts_of(body) == [video(0, uuid=sha("http://vid/0.mp4"))]
    assert "ec_transfer_params" not in body


async def test_looking_after_encoders_leaves_nothing_to_the_garbage_collector() -> None:
    def looks() -> int:
        functions = [o for o in gc.get_objects() if type(o) is FunctionType]
        return sum(o.__qualname__ == "Epd._while_up.<locals>.look" for o in functions)

    world = World()
    gc.collect()
    before = looks()
    gc.disable()
    try:
        await world.served(text("what is it?"), image(1))
        await asyncio.sleep(0)
        assert world.caller.calls
        assert looks() == before
    finally:
        gc.enable()
