"""Prefill/decode with vLLM's NIXL connector, pull: `kv_transfer_params` out, in and on.

Source: vLLM's NIXL toy proxy; the engines are those of `workers.engine.nixl`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration.stage import PD_CONNECT_S, PD_SETTINGS, Fleet
from tests.support import load
from tests.support.loop import LoopThread
from tests.support.pd_vllm import FullListener, PdFloor, pd_floor, took_s, usage_of
from tests.support.wait import eventually
from tests.support.watch import Viewer

SETTINGS = PD_SETTINGS | {"pd_protocol": "nixl"}
OTHERS: dict[str, dict[str, Any]] = {
    "": {},
    "strict": {"pd_missing_params": "fail", "prefill_fallback": True, "handover_lease_s": PD_CONNECT_S / 2},
}


@pytest.fixture(scope="module")
def fleets(fleet_of: Callable[..., Fleet]) -> dict[str, Fleet]:
    return {name: fleet_of(workers=2, settings=SETTINGS | more) for name, more in OTHERS.items()}


@pytest.fixture
def floor(fleets: dict[str, Fleet], engine_loop: LoopThread) -> Iterator[PdFloor]:
    with pd_floor(*fleets[""].get(), engine_loop, "nixl") as one:
        yield one


@pytest.fixture
def strict(fleets: dict[str, Fleet], engine_loop: LoopThread) -> Iterator[PdFloor]:
    """Missing params fail, a missing prefill node is done without, and params age in half a second."""
    with pd_floor(*fleets["strict"].get(), engine_loop, "nixl") as one:
        yield one


def counted(floor: PdFloor, name: str) -> int:
    """One of the counters that `GET /distserve/links` shows."""
    return int(floor.deployment.get("/distserve/links").json()["counts"].get(name, 0))


def test_decisions_show_the_candidates_of_both_halves(floor: PdFloor) -> None:
    p, d = floor.pair()
    with Viewer(floor.deployment.url) as viewer:
        time.sleep(1.2)  # every worker asks once a second whether somebody looks
        assert floor.chat().ok
        (one,) = viewer.decided(floor.model, 1)
        assert viewer.states[-1]["serving"] == "DistServe"
        explained = floor.deployment.get(f"/nodes/explain?model={floor.model}").json()
    assert [(taken["stage"], taken["node"]) for taken in one["tries"]] == [("prefill", p.url), ("decode", d.url)]
    assert [[seen["node"] for seen in taken["candidates"]] for taken in one["tries"]] == [[p.url], [d.url]]
    assert one["node"] == d.url
    assert [choice["roles"] for choice in explained["choices"]] == [["Prefill"], ["Decode"]]
    assert [choice["candidates"][0]["node"] for choice in explained["choices"]] == [p.url, d.url]


def test_params_go_out_come_in_and_go_on_unchanged(floor: PdFloor) -> None:
    p, d = floor.pair()
    answer = floor.chat(temperature=0.5)
    assert answer.ok, answer.body
    (first,), (second,) = p.bodies, d.bodies
    messages = [{"role": "user", "content": "hello"}]
    assert first == {
        "model": floor.model,
        "messages": messages,
        "temperature": 0.5,
        "stream": False,
        "max_tokens": 1,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }
    params = second.pop("kv_transfer_params")
    assert second == {"model": floor.model, "stream": False, "messages": messages, "temperature": 0.5}
    # That it is what prefill gave, whole and for this request id, is what the decode engine holds it to.
    assert (params["do_remote_prefill"], params["remote_engine_id"]) == (True, p.pd.engine_ids[0])
    assert list(p.pd.fetched) == [params["remote_request_id"]]
    assert not d.pd.recomputed


def test_decode_is_called_at_once_after_prefill_has_answered(floor: PdFloor) -> None:
    p, d = floor.pair(prefill={"ttft_s": 0.3})
    assert floor.chat(stream=True).ok
    computed_s = p.requests[0].finished_s
    assert computed_s is not None
    assert 0 <= d.requests[0].started_s - computed_s < 0.2


@pytest.mark.parametrize("stream", [False, True])
def test_responses_are_split_too(floor: PdFloor, stream: bool) -> None:
    p, d = floor.pair()
    asked = {"model": floor.model, "input": "hi", "stream": stream, "max_output_tokens": 2}
    answer = floor.chat(path="/v1/responses", body=json.dumps(asked).encode())
    assert answer.ok, answer.body
    assert (p.bodies[0]["max_output_tokens"], p.bodies[0]["stream"]) == (1, False)
    assert {k: v for k, v in d.bodies[0].items() if k != "kv_transfer_params"} == asked
    usage = (answer.chunks()[-1][1]["response"] if stream else answer.json())["usage"]
    assert usage == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 2,
        "total_tokens": 13,
    }


def test_usage_of_every_chunk_is_right_where_it_is_asked_for(floor: PdFloor) -> None:
    floor.pair(decode={"frag_bytes": 5})
    answer = floor.chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    told = [event["usage"] for _, event in answer.chunks()]
    assert [usage["completion_tokens"] for usage in told] == [1, 2, 3, 3]
    assert [usage["prompt_tokens"] for usage in told] == [11] * 4
    assert [usage["total_tokens"] for usage in told] == [12, 13, 14, 14]
    assert all(usage["prompt_tokens_details"] == {"cached_tokens": 4} for usage in told)


def test_usage_without_details_gets_none(floor: PdFloor) -> None:
    floor.pair(prefill={"details": False}, decode={"details": False})
    assert usage_of(floor.chat()) == {"prompt_tokens": 11, "total_tokens": 14, "completion_tokens": 3}


# --- params that are missing, or that nobody may use any more


@pytest.mark.parametrize("stream", [False, True])
def test_missing_params_are_counted_and_decode_computes_again(floor: PdFloor, stream: bool) -> None:
    _, d = floor.pair(prefill={"with_params": False})
    before = counted(floor, "missing_params")
    answer = floor.chat(stream=stream)
    assert answer.ok and answer.text == "token0 token1 token2 "
    assert [reason for _, reason in d.pd.recomputed] == ["no kv_transfer_params"]
    assert "kv_transfer_params" not in d.bodies[0]
    assert counted(floor, "missing_params") == before + 1


def test_missing_params_fail_where_that_is_wanted(strict: PdFloor) -> None:
    _, d = strict.pair(prefill={"with_params": False})
    before = counted(strict, "missing_params")
    answer = strict.chat()
    assert answer.status == 502
    assert "kv_transfer_params" in answer.json()["error"]["message"]
    assert not d.requests
    assert counted(strict, "missing_params") == before + 1


def test_r69_params_older_than_the_lease_are_never_sent(strict: PdFloor) -> None:
    """The first decode node takes so long to be reached that prefill has to begin again."""
    (p,) = strict.engines("prefill", lease_s=PD_CONNECT_S * 0.8)
    slow, good = strict.engines("decode", 2, chunks=2)
    slow.stop()
    full = FullListener(slow.port)
    try:
        answers: list[load.Answer] = []
        while not answers or took_s(answers[-1]) < PD_CONNECT_S * 0.9:
            assert len(answers) < 20, "none of them tried the slow one first"
            answers.append(strict.chat())
    finally:
        full.close()
    assert [(a.status, a.body) for a in answers if not a.ok] == []
    assert not good.pd.recomputed
    assert len(good.requests) == len(answers)
    assert len(p.requests) == len(answers) + 1, "once more for the one whose params had aged"
    eventually(lambda: len(p.pd.expired) == 1)


def test_r62_blocks_that_nobody_fetched_go_when_their_lease_ends(floor: PdFloor) -> None:
    p, d = floor.pair(prefill={"lease_s": 1}, decode={"status": 400})
    assert floor.chat().status == 400
    assert p.held == 1, "vLLM has no call that frees them: docs say so"
    eventually(lambda: p.held == 0)
    d.set(status=200)
    assert floor.chat().ok


# --- engines that restart, roles that are missing


def test_a_prefill_that_restarted_is_used_with_its_new_engine_id(floor: PdFloor) -> None:
    p, d = floor.pair()
    assert floor.chat().ok
    p.restart()
    answers = [floor.chat() for _ in range(4)]
    assert all(answer.ok for answer in answers[1:])
    ids = [body["kv_transfer_params"]["remote_engine_id"] for body in d.bodies[1:]]
    assert ids and set(ids) == {p.pd.engine_ids[0]}


@pytest.mark.parametrize("stream", [False, True])
def test_r68_prefill_fallback_serves_on_decode_and_counts_it(strict: PdFloor, stream: bool) -> None:
    (d,) = strict.engines("decode", chunks=2)
    before = counted(strict, "prefill_fallback")
    answer = strict.chat(stream=stream)
    assert answer.ok and answer.text == "token0 token1 "
    assert "kv_transfer_params" not in d.bodies[0]
    assert counted(strict, "prefill_fallback") == before + 1


def test_100_requests_at_once_each_get_the_blocks_of_their_own(floor: PdFloor) -> None:
    prefills, decodes = floor.engines("prefill", 2, ttft_s=0.05), floor.engines("decode", 2, chunks=2)
    each = lambda i: {"prompt": f"prompt {i}", "stream": bool(i % 2)}  # noqa: E731
    answers = asyncio.run(floor.many(100, concurrency=25, each=each))
    assert [(a.status, a.body) for a in answers if not a.ok] == []
    assert sum(len(p.pd.fetched) for p in prefills) == 100
    assert not any(d.pd.recomputed for d in decodes)
