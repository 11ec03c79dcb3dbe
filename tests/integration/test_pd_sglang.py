"""Prefill/decode with SGLang's bootstrap: the same body on both legs, which meet in a room.

Source: SGLang's mini_lb; the engines are those of `workers.engine.sglang`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.stage import PD_SETTINGS, Fleet, start
from tests.support.loop import LoopThread
from tests.support.pd_vllm import PdFloor, PdVllmEngine, pd_floor, took_s, usage_of
from tests.support.wait import eventually

FLEET = {"workers": 2, "settings": PD_SETTINGS | {"pd_protocol": "sglang"}}
DEFAULT_PORT = 8998


@pytest.fixture
def floor(fleet: Fleet, engine_loop: LoopThread) -> Iterator[PdFloor]:
    with pd_floor(*fleet.get(), engine_loop, "sglang") as one:
        yield one


def rooms(engine: PdVllmEngine) -> list[Any]:
    return [body["bootstrap_room"] for body in engine.bodies]


# --- what goes over the wire


@pytest.mark.parametrize("stream", [False, True])
def test_both_legs_get_the_clients_body_and_where_to_meet(floor: PdFloor, stream: bool) -> None:
    p, d = floor.pair()
    answer = floor.chat(stream=stream, max_tokens=2, temperature=0.5)
    assert answer.ok and answer.text == "token0 token1 "
    (first,), (second,) = p.bodies, d.bodies
    assert first == second
    assert first == {
        "model": floor.model,
        "messages": [{"role": "user", "content": "hello"}],
        "stream": stream,
        "max_tokens": 2,
        "temperature": 0.5,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": p.bootstrap_port,
        "bootstrap_room": first["bootstrap_room"],
    }


def test_rooms_are_random_numbers_of_63_bits(floor: PdFloor) -> None:
    p, d = floor.pair()
    answers = asyncio.run(floor.many(20, concurrency=5))
    assert [(a.status, a.body) for a in answers if not a.ok] == []
    assert len(set(rooms(p))) == 20 and sorted(rooms(p)) == sorted(rooms(d))
    assert all(0 <= room < 2**63 for room in rooms(p))
    assert max(rooms(p)) > 2**58, "of 20, one is in the upper 31 of 32 parts"


@pytest.mark.parametrize("prompt", [["a"], ["a", "b", "c"], [[1, 2], [3]]], ids=["one", "three", "token ids"])
def test_a_batch_of_prompts_has_a_room_for_each(floor: PdFloor, prompt: list[Any]) -> None:
    p, d = floor.pair()
    answer = floor.chat(path="/v1/completions", prompt=prompt)
    assert answer.ok, answer.body
    (body,) = p.bodies
    assert body["bootstrap_host"] == ["127.0.0.1"] * len(prompt)
    assert body["bootstrap_port"] == [p.bootstrap_port] * len(prompt)
    assert len(set(body["bootstrap_room"])) == len(prompt)
    assert d.bodies == [body]
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(len(prompt)))


def test_one_prompt_of_token_ids_is_no_batch(floor: PdFloor) -> None:
    p, _ = floor.pair()
    assert floor.chat(path="/v1/completions", prompt=[1, 2, 3]).ok
    assert isinstance(rooms(p)[0], int)


def test_a_prefill_without_a_bootstrap_port_has_8998(floor: PdFloor) -> None:
    (p,) = floor.engines("prefill", register=False, bootstrap_port=DEFAULT_PORT)
    floor.register(p, port=False)
    (d,) = floor.engines("decode")
    assert floor.chat().ok
    assert d.bodies[0]["bootstrap_port"] == DEFAULT_PORT


def test_each_prefill_node_is_named_by_its_own_port(floor: PdFloor) -> None:
    prefills, decodes = floor.engines("prefill", 3), floor.engines("decode", 2, chunks=1)
    answers = asyncio.run(floor.many(30, concurrency=6))
    assert [(a.status, a.body) for a in answers if not a.ok] == []
    for p in prefills:
        assert {body["bootstrap_port"] for body in p.bodies} == {p.bootstrap_port}
    assert sum(len(d.requests) for d in decodes) == 30


@pytest.mark.parametrize("stream", [False, True])
def test_the_legs_run_at_once_and_prefills_answer_is_drained(floor: PdFloor, stream: bool) -> None:
    p, d = floor.pair(prefill={"ttft_s": 0.5}, decode={"gap_s": 0.05, "chunks": 4})
    answer = floor.chat(stream=stream)
    assert answer.ok
    (prefill,), (decode,) = p.requests, d.requests
    assert abs(prefill.started_s - decode.started_s) < 0.3
    assert prefill.finished_s is not None and decode.first_byte_s is not None
    assert decode.started_s < prefill.finished_s <= decode.first_byte_s
    assert prefill.aborted_s is None
    assert took_s(answer) < 0.5 + 0.15 + 0.5


def test_a_large_prefill_answer_is_drained_and_kept_from_nobody(floor: PdFloor) -> None:
    p, _ = floor.pair(prefill={"body_mb": 8})
    answer = floor.chat()
    assert answer.ok and answer.text == "token0 token1 token2 "
    eventually(lambda: p.requests[0].finished_s is not None)


# --- log probabilities of the prompt

MERGED = [100, 101, 102, 103]  # prefill's three, decode's one


def token_ids(meta: dict[str, Any], name: str = "input_token_logprobs") -> list[int]:
    return [entry[1] for entry in meta[name]]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_logprobs_of_the_prompt_are_prefills_and_then_decodes(floor: PdFloor, path: str) -> None:
    floor.pair()
    answer = floor.chat(path=path, return_logprob=True, top_logprobs_num=1)
    assert answer.ok, answer.body
    value = answer.json()
    assert token_ids(value["meta_info"]) == MERGED
    assert [entry[0][1] for entry in value["meta_info"]["input_top_logprobs"]] == [200, 201, 202, 203]
    assert value["meta_info"]["id"] == "decode-meta", "the rest is decode's"
    assert answer.text == "token0 token1 token2 "
    assert usage_of(answer)["prompt_tokens"] == 11


@pytest.mark.parametrize("frag_bytes", [0, 7])
def test_logprobs_are_merged_in_every_event_of_a_stream(floor: PdFloor, frag_bytes: int) -> None:
    floor.pair(prefill={"frag_bytes": frag_bytes}, decode={"frag_bytes": frag_bytes})
    answer = floor.chat(stream=True, return_logprob=True, stream_options={"include_usage": True})
    assert answer.ok and answer.done and answer.text == "token0 token1 token2 "
    events = [event for _, event in answer.chunks()]
    assert [token_ids(event["meta_info"]) for event in events if event["choices"]] == [MERGED] * 3
    assert usage_of(answer)["prompt_tokens"] == 11


def test_no_logprobs_where_none_were_asked_for(floor: PdFloor) -> None:
    floor.pair()
    assert "meta_info" not in floor.chat(return_logprob=False).json()


# --- what fails


def test_a_prefill_that_crashes_cancels_decode(floor: PdFloor) -> None:
    p, d = floor.pair(prefill={"stall_after": -1}, decode={"head_first": True})
    running = start(floor.many(3, stream=True))
    eventually(lambda: (p.in_flight, d.in_flight) == (3, 3))
    p.crash()
    answers = running.result(5)
    assert {a.status for a in answers} == {502}
    eventually(lambda: not d.in_flight, within_s=1)
    p.start()


def test_a_prefill_that_restarted_is_used_again(floor: PdFloor) -> None:
    p, _ = floor.pair()
    assert floor.chat().ok
    p.restart()
    floor.register(p)
    assert all(floor.chat().ok for _ in range(4))


def test_a_decode_that_refuses_is_replaced_with_a_new_room_or_the_same_one_nobody_was_in(floor: PdFloor) -> None:
    (p,) = floor.engines("prefill")
    bad, good = floor.engines("decode", 2, chunks=1)
    bad.set(refuse=True)
    answers = [floor.chat() for _ in range(2)]
    assert [(a.status, a.body) for a in answers if not a.ok] == []
    assert set(rooms(good)) <= set(rooms(p)), "a room is never used by two prefills: the engines hold it to that"
