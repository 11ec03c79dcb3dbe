"""Prefill and decode on two nodes: both bodies field by field, and every way to fail."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from app.dispatch.answer import Answer, EngineRequest, Outcome
from app.dispatch.prefill_decode import PrefillDecode, for_decode, for_prefill
from app.errors import EngineBroke, EngineRefused, EngineTimeout, ModelNotFound, NoNodeAvailable, UpstreamError
from app.nodes import Node, Role, State
from tests.dispatch.fakes import (
    D0,
    D1,
    HEADERS,
    MODEL,
    P0,
    P1,
    PARAMS,
    FakeCaller,
    FakeLedger,
    FakeRegistry,
    Json,
    hangs,
    nodes_of,
)

ASK: Json = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
CLIENT: Json = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 100,
    "max_completion_tokens": 100,
    "min_tokens": 5,
    "min_completion_tokens": 5,
    "n": 3,
    "best_of": 3,
    "stop": ["x"],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto",
    "response_format": {"type": "json_object"},
    "temperature": 0.5,
    "seed": 7,
    "logprobs": True,
    "ec_transfer_params": {"hash": {"metadata": {}}, "ec_items": []},
}


class World:
    def __init__(self, *nodes: Node) -> None:
        self.registry = FakeRegistry(*(nodes or nodes_of(0, prefill=1)))
        self.ledger = FakeLedger(self.registry)
        self.caller = FakeCaller()
        self.pair = PrefillDecode(ledger=self.ledger, caller=self.caller)  # type: ignore[arg-type]

    async def ask(self, body: bytes | Json = CLIENT, model: str = MODEL) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.pair.open(EngineRequest(b"POST", b"/v1/chat/completions?q=1", list(HEADERS), raw, model))


# --- bodies -----------------------------------------------------------------------------------------


def test_r66_prefill_gets_one_token_to_make_and_nothing_that_one_token_can_not_honour() -> None:
    body = json.loads(for_prefill(json.dumps(CLIENT).encode()))
    kept = {"model", "messages", "stop", "tools", "tool_choice", "response_format", "temperature", "seed", "logprobs"}
    assert body == {
        **{name: CLIENT[name] for name in kept | {"ec_transfer_params"}},
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "kv_transfer_params": ASK,
    }


def test_r66_max_completion_tokens_is_not_added_where_it_was_not() -> None:
    assert json.loads(for_prefill(b'{"model":"m","prompt":"hi"}')) == {
        "model": "m",
        "prompt": "hi",
        "stream": False,
        "max_tokens": 1,
        "kv_transfer_params": ASK,
    }


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "min_tokens", "stream"])
def test_r66_null_counts_as_given(field: str) -> None:
    body = json.loads(for_prefill(json.dumps({"model": "m", field: None}).encode()))
    assert body["max_tokens"] == 1 and body["stream"] is False and "min_tokens" not in body
    assert body.get("max_completion_tokens") == (1 if field == "max_completion_tokens" else None)


def test_prefills_own_words_overrule_a_clients() -> None:
    body = json.loads(for_prefill(b'{"model":"m","kv_transfer_params":{"do_remote_prefill":true},"stream":true}'))
    assert body["kv_transfer_params"] == ASK


def test_what_is_not_changed_stays_byte_for_byte() -> None:
    written = b'{ "model" : "m", "messages":[ {"content" : "\\u00e4", "n":1e2} ],"temperature": 0.70,"max_tokens":5}'
    before = msgspec.json.decode(written, type=dict[str, msgspec.Raw])
    for made in (for_prefill(written), for_decode(written, msgspec.Raw(b'{"a" : 1.0}'))):
        after = msgspec.json.decode(made, type=dict[str, msgspec.Raw])
        for name in ("model", "messages", "temperature"):
            assert bytes(after[name]) == bytes(before[name])


def test_r66_decode_gets_the_clients_request_with_the_whole_object_that_prefill_named() -> None:
    named = b'{"remote_block_ids" : [[1,2]], "remote_port":5600 , "new_field": {"a":1.50}}'
    made = for_decode(json.dumps(CLIENT).encode(), msgspec.Raw(named))
    assert json.loads(made) == {**CLIENT, "kv_transfer_params": json.loads(named)}
    assert named in made


def test_decode_never_gets_a_clients_transfer_params() -> None:
    made = for_decode(b'{"model":"m","kv_transfer_params":{"remote_host":"evil"}}', msgspec.Raw(b'{"remote_host":"p"}'))
    assert json.loads(made)["kv_transfer_params"] == {"remote_host": "p"}


@pytest.mark.parametrize("params", [b"null", b"{}", b"{ }", b"{\n}"])
def test_without_a_place_decode_gets_the_clients_bytes(params: bytes) -> None:
    raw = b'{"model": "m" , "x":1.0}'
    assert for_decode(raw, msgspec.Raw(params)) is raw


# --- the way of a request ---------------------------------------------------------------------------


async def test_prefill_first_and_decode_with_what_it_said() -> None:
    world = World()
    answer = await world.ask()
    prefill, decode = world.caller.calls
    assert (prefill.url, decode.url, answer.url) == (P0, D0, D0)
    for call in (prefill, decode):
        assert (call.request.method, call.request.path, call.request.headers) == (
            b"POST",
            b"/v1/chat/completions?q=1",
            HEADERS,
        )
    assert prefill.body == json.loads(for_prefill(json.dumps(CLIENT).encode()))
    assert decode.body == {**CLIENT, "kv_transfer_params": PARAMS}
    assert (answer.status, await answer.read()) == (200, b'{"answered":true}')
    answer.close(Outcome.OK)
    assert world.ledger.unfinished == {} and world.ledger.latencies == {P0: 1, D0: 1}


async def test_r07_both_are_counted_while_prefill_works_and_prefill_is_free_once_it_is_done() -> None:
    world = World()
    gate, gate2 = asyncio.Event(), asyncio.Event()

    async def wait(_: Any, gate: asyncio.Event = gate) -> None:
        await gate.wait()

    async def wait_too(_: Any) -> None:
        await gate2.wait()

    world.caller.behaviour = {P0: wait, D0: wait_too}
    task = asyncio.create_task(world.ask())
    for _ in range(5):
        await asyncio.sleep(0)
    assert world.ledger.unfinished == {P0: 1, D0: 1}
    gate.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert world.ledger.unfinished == {D0: 1}
    gate2.set()
    (await task).close(Outcome.OK)
    assert world.ledger.unfinished == {}


async def test_r07_a_busy_prefill_node_is_passed_over() -> None:
    world = World(*nodes_of(0, prefill=2))
    world.caller.behaviour[P0] = hangs
    task = asyncio.create_task(world.ask())
    await asyncio.sleep(0)
    (await world.ask()).close(Outcome.OK)
    assert [call.url for call in world.caller.calls] == [P0, P1, D0]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert world.ledger.unfinished == {}


@pytest.mark.parametrize(
    "said",
    [b"{}", b'{"kv_transfer_params":null}', b'{"kv_transfer_params": {} }', b'{"id":"x","kv_transfer_params":{ }}'],
)
async def test_where_prefill_names_no_place_decode_computes_it_again(said: bytes) -> None:
    world = World()
    world.caller.behaviour[P0] = lambda call: said
    raw = json.dumps(CLIENT).encode()
    (await world.ask(raw)).close(Outcome.OK)
    assert world.caller.to(D0)[0].request.body == raw


# --- failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
async def test_r60_prefills_own_failure_is_the_answer_and_decode_is_not_called(status: int) -> None:
    world = World()
    world.caller.behaviour[P0] = lambda call: (status, b'{"error":{"message":"too long"}}')
    answer = await world.ask()
    assert (answer.status, answer.url, await answer.read()) == (status, P0, b'{"error":{"message":"too long"}}')
    assert (b"x-engine", b"yes") in answer.headers
    assert [call.url for call in world.caller.calls] == [P0]
    assert world.ledger.unfinished == {}
    answer.close(Outcome.ENGINE_ERROR)
    assert world.ledger.unfinished == {} and world.ledger.latencies[P0] == 0


@pytest.mark.parametrize(
    "failure",
    [EngineRefused("refused"), EngineTimeout("slow", stage="first_byte"), EngineBroke("reset")],
    ids=lambda failure: type(failure).__name__,
)
async def test_r60_a_prefill_node_that_can_not_be_reached_is_told_and_decode_is_not_called(
    failure: UpstreamError,
) -> None:
    world = World()
    world.caller.behaviour[P0] = lambda call: failure
    with pytest.raises(type(failure)):
        await world.ask()
    assert [call.url for call in world.caller.calls] == [P0]
    assert world.ledger.unfinished == {}


@pytest.mark.parametrize(
    "said", [b"", b"null", b"[]", b"<html>", b'{"kv_transfer_params":', b"\xff", b'{"x":' + b"[" * 100_000]
)
async def test_a_prefill_answer_that_is_no_json_object_is_a_502_and_decode_is_not_called(said: bytes) -> None:
    world = World()
    world.caller.behaviour[P0] = lambda call: said
    with pytest.raises(EngineBroke, match=P0) as caught:
        await world.ask()
    assert caught.value.status == 502
    assert [call.url for call in world.caller.calls] == [P0] and world.ledger.unfinished == {}
    assert world.ledger.latencies[P0] == 0


async def test_r61_a_decode_node_that_can_not_be_reached_is_told_and_given_back() -> None:
    world = World()
    world.caller.behaviour[D0] = lambda call: EngineRefused("refused")
    with pytest.raises(EngineRefused):
        await world.ask()
    assert [call.url for call in world.caller.calls] == [P0, D0] and world.ledger.unfinished == {}


@pytest.mark.parametrize("status", [400, 500, 503])
async def test_r47_decodes_own_failure_is_the_answer(status: int) -> None:
    world = World()
    world.caller.behaviour[D0] = lambda call: (status, b'{"error":{}}')
    answer = await world.ask()
    assert (answer.status, answer.url) == (status, D0)
    answer.close(Outcome.ENGINE_ERROR)
    assert world.ledger.unfinished == {} and world.ledger.latencies == {P0: 1, D0: 0}


@pytest.mark.parametrize(("missing", "nodes"), [("Prefill", nodes_of(1)), ("Decode", nodes_of(1, prefill=1, decode=0))])
async def test_r68_a_missing_role_is_a_503_that_names_it_and_nothing_is_counted(
    missing: str, nodes: list[Node]
) -> None:
    world = World(*nodes)
    with pytest.raises(NoNodeAvailable, match=f"no {missing} node"):
        await world.ask()
    assert world.ledger.unfinished == {} and world.caller.calls == []


async def test_hybrid_and_encoder_nodes_are_no_candidates() -> None:
    world = World(*nodes_of(1, prefill=0, decode=0, hybrid=1))
    with pytest.raises(NoNodeAvailable):
        await world.ask()
    with pytest.raises(ModelNotFound):
        await world.ask(model="other")


@pytest.mark.parametrize("where", [P0, D0])
async def test_r62_the_client_leaves_and_both_are_given_back(where: str) -> None:
    world = World()
    world.caller.behaviour[where] = hangs
    task = asyncio.create_task(world.ask())
    for _ in range(10):
        await asyncio.sleep(0)
    assert world.ledger.unfinished == ({P0: 1, D0: 1} if where == P0 else {D0: 1})
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.ledger.unfinished == {} and world.caller.calls[-1].cancelled


# --- taking -----------------------------------------------------------------------------------------


async def test_a_pair_that_is_taken_and_not_sent_is_given_back_once() -> None:
    world = World(*nodes_of(0, prefill=1, decode=2))
    held = await world.pair.take(MODEL, only=D1)
    assert (held.url, world.ledger.unfinished) == (D1, {P0: 1, D1: 1})
    for _ in range(3):
        held.give_back()
    assert world.ledger.unfinished == {}


async def test_the_wanted_decode_node_is_wanted_only_while_it_is_a_candidate() -> None:
    world = World(*nodes_of(0, prefill=1, decode=2))
    world.registry.set(Node(D1, role=Role.Decode, models=(MODEL,), state=State.DOWN, order=2))
    held = await world.pair.take(MODEL, only=D1)
    assert held.url == D0
    held.give_back()


async def test_a_cancelled_take_gives_the_first_node_back() -> None:
    world = World()
    first = True

    async def second_hangs() -> None:
        nonlocal first
        if not first:
            await asyncio.Event().wait()
        first = False

    world.ledger.waits = second_hangs
    task = asyncio.create_task(world.pair.take(MODEL))
    for _ in range(3):
        await asyncio.sleep(0)
    assert sum(world.ledger.unfinished.values()) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.ledger.unfinished == {}
