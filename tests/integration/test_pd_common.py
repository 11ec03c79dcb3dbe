"""Prefill/decode with NIXL, Mooncake and SGLang: what holds for all of them.

The engines keep books (`workers.engine.pd`): every test ends with nothing held, no count, and no engine that was asked
what is not in its protocol. What one protocol has for itself is in the files named after it, LMDeploy in its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration.stage import MOSTLY_STREAM, PD_FIRST_BYTE_S, PD_SETTINGS, Fleet, each_once_and_all_wide, start
from tests.support import load
from tests.support.collector import TRACEPARENT
from tests.support.engine import SimulatedEngine
from tests.support.loop import LoopThread
from tests.support.pd_vllm import Leaving, PdFloor, pd_floor, timings, usage_of, without_usage
from tests.support.wait import eventually
from workers.engine.pd_rules import CHAT, COMPLETIONS, NIXL_WANTED, Protocol

PROTOCOLS: tuple[Protocol, ...] = ("nixl", "mooncake", "sglang")


# What does not depend on the protocol between the engines: in the others it is wide.
ONE_PROTOCOL = pytest.mark.parametrize(
    "floor", ["nixl", *(pytest.param(one, marks=pytest.mark.wide) for one in PROTOCOLS[1:])], indirect=True
)


@pytest.fixture(scope="module")
def fleets(fleet_of: Callable[..., Fleet]) -> dict[Protocol, Fleet]:
    return {one: fleet_of(workers=2, settings=PD_SETTINGS | {"pd_protocol": one}) for one in PROTOCOLS}


@pytest.fixture(params=PROTOCOLS)
def floor(request: pytest.FixtureRequest, fleets: dict[Protocol, Fleet], engine_loop: LoopThread) -> Iterator[PdFloor]:
    with pd_floor(*fleets[request.param].get(), engine_loop, request.param) as one:
        yield one


# --- what each leg gets


@ONE_PROTOCOL
def test_both_legs_carry_the_clients_trace(floor: PdFloor) -> None:
    engines = floor.pair()
    assert floor.chat(headers={"traceparent": TRACEPARENT, "tracestate": "a=1"}).ok
    for engine in engines:
        (record,) = engine.requests
        assert (record.header(b"traceparent"), record.header(b"tracestate")) == (TRACEPARENT.encode(), b"a=1")


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
OF_CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 3,
    "max_completion_tokens": 3,
    "tools": TOOLS,
    "tool_choice": "auto",
    "response_format": {"type": "json_object"},
}
OF_BOTH: dict[str, Any] = {"min_tokens": 2, "n": 2, "stop": ["x"], "temperature": 0.5, "seed": 7, "logprobs": None}
KEPT = {CHAT: {"model", "messages", "tools"}, COMPLETIONS: {"model", "prompt"}}  # the prompt must be the same


@pytest.mark.parametrize(("path", "stream"), each_once_and_all_wide([CHAT, COMPLETIONS]))
def test_r66_prefill_makes_one_token_and_decode_gets_the_clients_values(
    floor: PdFloor, path: str, stream: bool
) -> None:
    p, d = floor.pair()
    asked = {"model": floor.model, "stream": stream, **OF_BOTH}
    asked |= OF_CHAT if path == CHAT else {"prompt": "hi", "max_tokens": 3}
    asked |= {"stream_options": {"include_usage": True}} if stream else {}
    answer = floor.chat(path=path, body=json.dumps(asked).encode())
    assert answer.ok, answer.body
    (first,), (second,) = p.bodies, d.bodies
    own = {"kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"}
    assert {name: value for name, value in second.items() if name not in own} == asked
    if floor.protocol == "sglang":
        assert first == second
        return
    one = {"stream": False, "max_tokens": 1} | ({"max_completion_tokens": 1} if path == CHAT else {})
    assert {name: first[name] for name in one} == one
    others = {name: value for name, value in first.items() if name not in {*one, *own}}
    assert others == {name: asked[name] for name in others}, "nothing else is changed"
    assert KEPT[path] <= set(first)
    assert not {"min_tokens", "stream_options", "n"} & set(first)


@ONE_PROTOCOL
def test_both_legs_carry_the_clients_request_id(floor: PdFloor) -> None:
    p, d = floor.pair()
    mine = floor.chat(headers={"x-request-id": "mine-1"}, key="sk-client")
    given = floor.chat()
    assert mine.ok and given.ok, "an engine that gets the client's key refuses it"
    assert mine.headers["x-request-id"] == "mine-1"
    assert [r.id for r in p.requests] == [r.id for r in d.requests] == ["mine-1", given.headers["x-request-id"]]


@ONE_PROTOCOL
def test_r83_each_leg_carries_the_key_of_its_own_engine(floor: PdFloor) -> None:
    p, d = floor.pair(prefill={"key": "sk-p"}, decode={"key": "sk-d"})
    assert floor.chat().ok
    assert [r.header(b"authorization") for r in (p.requests[0], d.requests[0])] == [b"Bearer sk-p", b"Bearer sk-d"]


@ONE_PROTOCOL
def test_a_path_with_a_slash_at_its_end_is_split_all_the_same(floor: PdFloor) -> None:
    p, d = floor.pair()
    answer = floor.chat(path=f"{CHAT}/", stream=True)
    assert answer.ok and answer.done, answer.body
    assert [record.path for record in (*p.requests, *d.requests)] == [CHAT, CHAT]


@ONE_PROTOCOL
def test_other_paths_go_whole_to_decode(floor: PdFloor) -> None:
    p, d = floor.pair()
    answer = floor.chat(path="/v1/embeddings", input="x")
    assert answer.ok and answer.json()["object"] == "list"
    assert len(d.requests) == 1 and not p.requests


# --- the answer

FRAGMENTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "bytes": {"frag_bytes": 1},
    "sevens": {"frag_bytes": 7, "crlf": True, "comments": True},
    "long": {"line_kb": 600, "body_mb": 1},
}
TOLD = {
    "prompt_tokens": 11,
    "total_tokens": 14,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 4},
}
ODD_TEXT = '{"usage":{"prompt_tokens":99,"completion_tokens":1}}\ndata: 漢字 🦀 '


# `make test` has each kind of fragments with NIXL, and each protocol with a stream byte by byte and a whole answer.
BRIEF = {
    *(("nixl", CHAT, True, fragments) for fragments in FRAGMENTS),
    *((protocol, CHAT, True, "bytes") for protocol in PROTOCOLS),
    *((protocol, COMPLETIONS, False, "whole") for protocol in PROTOCOLS),
    ("nixl", CHAT, False, "long"),
    ("nixl", COMPLETIONS, True, "sevens"),
}


@pytest.mark.parametrize(
    ("floor", "path", "stream", "fragments"),
    [
        pytest.param(*case, marks=() if case in BRIEF else pytest.mark.wide)
        for case in itertools.product(PROTOCOLS, (CHAT, COMPLETIONS), (False, True), FRAGMENTS)
    ],
    indirect=["floor"],
)
def test_r44_usage_is_of_both_legs_and_every_other_byte_is_decodes(
    floor: PdFloor, path: str, stream: bool, fragments: str
) -> None:
    """Prompt and cached tokens from prefill (11, 4), completion tokens from decode (3), whatever decode counts."""
    knobs: dict[str, Any] = {"text": ODD_TEXT, **FRAGMENTS[fragments]}
    floor.pair(prefill={"frag_bytes": knobs.get("frag_bytes", 0)}, decode=knobs)
    options: dict[str, Any] = {"path": path, "stream": stream, "headers": {"x-request-id": "same"}}
    options |= {"stream_options": {"include_usage": True}} if stream else {}
    answer = floor.chat(**options)
    assert answer.ok, answer.body
    assert usage_of(answer) == TOLD
    with SimulatedEngine(models=(floor.model,), chunks=3, **knobs) as plain:
        said = asyncio.run(_directly(plain, floor, options))
    assert without_usage(answer.body) == without_usage(said)


@ONE_PROTOCOL
def test_events_whose_usage_is_null_keep_it(floor: PdFloor) -> None:
    floor.pair(prefill={"null_usage": True}, decode={"null_usage": True})
    answer = floor.chat(stream=True, stream_options={"include_usage": True})
    assert [event["usage"] for _, event in answer.chunks()] == [None, None, None, TOLD]


@ONE_PROTOCOL
def test_no_leg_is_asked_for_a_compressed_answer(floor: PdFloor) -> None:
    """What comes compressed can't be given the right usage."""
    p, d = floor.pair()
    assert floor.chat(headers={"accept-encoding": "gzip, br"}).ok
    assert {r.header(b"accept-encoding") for r in (*p.requests, *d.requests)} <= {None, b"identity"}


def test_r44_a_stream_that_asks_for_no_usage_is_passed_byte_for_byte(floor: PdFloor) -> None:
    floor.pair(decode={"text": ODD_TEXT, "frag_bytes": 3})
    options: dict[str, Any] = {"stream": True, "headers": {"x-request-id": "same"}}
    answer = floor.chat(**options)
    with SimulatedEngine(models=(floor.model,), chunks=3, text=ODD_TEXT) as plain:
        assert answer.body == asyncio.run(_directly(plain, floor, options))


async def _directly(engine: SimulatedEngine, floor: PdFloor, options: dict[str, Any]) -> bytes:
    return (await load.chat(engine.url, model=floor.model, **options)).body


@MOSTLY_STREAM
def test_server_timing_tells_the_stages_and_the_nodes_status_their_means(floor: PdFloor, stream: bool) -> None:
    p, d = floor.pair(prefill={"ttft_s": 0.2}, decode={"ttft_s": 0.1})
    answer = floor.chat(stream=stream)
    told = timings(answer)
    assert {"prefill", "decode"} <= set(told) <= {"link", "prefill", "handover", "decode"}
    assert 190 <= told["prefill"] < 1000
    assert 90 <= told["decode"] < 1000

    def told_by_status() -> bool:
        nodes = floor.deployment.nodes()
        prefill, decode = nodes[p.url]["stages"].get("prefill"), nodes[d.url]["stages"].get("decode")
        assert prefill and decode
        assert (prefill["count"], decode["count"]) == (1, 1)
        return bool(0.19 <= prefill["mean_s"] < 1 and 0.09 <= decode["mean_s"] < 1)

    eventually(told_by_status)


# --- counts


@ONE_PROTOCOL
def test_r07_a_computing_prefill_counts_and_the_next_request_goes_to_the_idle_one(floor: PdFloor) -> None:
    prefills = floor.engines("prefill", 2, ttft_s=5)
    (d,) = floor.engines("decode")
    first = Leaving(floor)
    eventually(lambda: sum(p.in_flight for p in prefills) == 1)
    assert sorted(floor.counts(*prefills)) == [0, 1]
    assert floor.counts(d) == [1], "the pair is held before prefill starts"
    second = Leaving(floor)
    eventually(lambda: [p.in_flight for p in prefills] == [1, 1])
    assert floor.counts(*prefills, d) == [1, 1, 2]
    nodes = floor.deployment.nodes()
    assert [nodes[e.url]["unfinished"] for e in (*prefills, d)] == [1, 1, 2], "each stage shows its own"
    first.leave(), second.leave()
    floor.quiet()


def test_r01_a_burst_over_all_workers_fills_no_decode_node_more_than_the_other(floor: PdFloor) -> None:
    prefills, decodes = floor.engines("prefill", 2, ttft_s=1), floor.engines("decode", 2)
    burst = start(floor.many(40))
    eventually(lambda: sum(floor.counts(*prefills)) == 40, within_s=5)
    assert floor.counts(*prefills, *decodes) == [20, 20, 20, 20]
    assert all(answer.ok for answer in burst.result(20))
    assert [len(e.requests) for e in (*prefills, *decodes)] == [20, 20, 20, 20]


def test_a_legs_count_is_given_back_when_that_leg_has_ended(floor: PdFloor) -> None:
    p, d = floor.pair(decode={"gap_s": 0.1, "chunks": 30})
    client = Leaving(floor, stream=True)
    eventually(lambda: bool(d.requests) and len(d.requests[0].chunk_s) > 1)
    eventually(lambda: floor.counts(p, d) == [0, 1], within_s=1)
    client.leave()
    eventually(lambda: floor.counts(p, d) == [0, 0], within_s=1)


def test_a_draining_prefill_node_stays_until_decode_has_fetched_its_cache(floor: PdFloor) -> None:
    p, d = floor.pair(decode={"ttft_s": 1.2})
    client = Leaving(floor, stream=True)
    eventually(lambda: bool(d.requests) and floor.counts(p, d) == [0, 1], within_s=1)
    assert floor.deployment.post("/nodes/remove?drain=true&timeout_s=30", {"url": p.url}).status == 200
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < 0.7:
        assert floor.deployment.nodes()[p.url]["state"] == "draining"
        time.sleep(0.1)
    eventually(lambda: p.url not in floor.deployment.nodes(), within_s=3)
    client.leave()


# --- what clients may not say

INTERNAL: dict[str, Any] = {
    "kv_transfer_params": NIXL_WANTED,
    "bootstrap_host": "10.6.6.6",
    "bootstrap_port": 1,
    "bootstrap_room": 7,
    "migration_request": {"protocol": 2},
    "with_cache": True,
    "preserve_cache": True,
    "ec_transfer_params": {"h": {"peer_host": "10.6.6.6"}},
}


@ONE_PROTOCOL
def test_r65_a_clients_internal_fields_are_refused_and_their_nulls_taken_out(floor: PdFloor) -> None:
    p, d = floor.pair()
    for name, value in INTERNAL.items():
        answer = floor.chat(**{name: value})
        assert (answer.status, answer.json()["error"]["param"]) == (400, name)
    assert not p.requests and not d.requests
    assert floor.chat(**dict.fromkeys(INTERNAL)).ok
    again = floor.chat(headers={"x-lmdeploy-distserve-proxy": "1"})
    assert again.ok, "an engine that gets the header refuses it"


@ONE_PROTOCOL
def test_r72_what_decode_can_not_tell_of_the_prompt_is_refused(floor: PdFloor) -> None:
    p, d = floor.pair()
    for path, fields, named in (
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"prompt_logprobs": 1}, "prompt_logprobs"),
        (CHAT, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (CHAT, {"echo": True}, "echo"),
    ):
        answer = floor.chat(path=path, **fields)
        assert (answer.status, answer.json()["error"]["param"]) == (400, named), path
    assert not p.requests and not d.requests


# --- roles


@ONE_PROTOCOL
def test_r68_no_prefill_node_is_503_naming_the_role(floor: PdFloor) -> None:
    (d,) = floor.engines("decode")
    answer = floor.chat()
    assert answer.status == 503
    assert "Prefill" in answer.json()["error"]["message"]
    assert 0 < int(answer.headers["retry-after"]) <= 60
    assert not d.requests


@ONE_PROTOCOL
def test_r68_no_decode_node_is_503_naming_the_role(floor: PdFloor) -> None:
    (p,) = floor.engines("prefill")
    answer = floor.chat()
    assert answer.status == 503
    assert "Decode" in answer.json()["error"]["message"]
    assert not p.requests


def test_r69_prefill_has_a_timeout_of_its_own_and_decode_follows_at_once(floor: PdFloor) -> None:
    """Prefill takes longer than any first byte may: its stage, and decode's that waits for it, are timed apart."""
    p, d = floor.pair(prefill={"ttft_s": PD_FIRST_BYTE_S + 0.5})
    answer = floor.chat(stream=True)
    assert answer.ok, answer.body
    computed_s, first_s = p.requests[0].finished_s, d.requests[0].first_byte_s
    assert computed_s is not None and first_s is not None
    assert 0 <= first_s - computed_s < 0.3
