"""Prefill/decode with NIXL, Mooncake and SGLang: either leg fails, or the client leaves.

The engines keep books (`workers.engine.pd`): every test ends with nothing held, no count, and no engine that was asked
what is not in its protocol.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration.stage import (
    MOSTLY_STREAM,
    PD_FIRST_BYTE_S,
    PD_PREFILL_S,
    PD_SETTINGS,
    Fleet,
    each_once_and_all_wide,
)
from tests.support.loop import LoopThread
from tests.support.pd_vllm import Leaving, PdFloor, PdVllmEngine, pd_floor, took_s
from tests.support.wait import eventually
from workers.engine.pd_rules import Protocol

PROTOCOLS: tuple[Protocol, ...] = ("nixl", "mooncake", "sglang")
SHORT_LEASE = {"lease_s": 0.5}  # of prefill's blocks, where a test leaves them to it


@pytest.fixture(scope="module")
def fleets(fleet_of: Callable[..., Fleet]) -> dict[Protocol, Fleet]:
    return {one: fleet_of(workers=2, settings=PD_SETTINGS | {"pd_protocol": one}) for one in PROTOCOLS}


# Mooncake's and SGLang's legs run at once and fail alike: of SGLang most is wide.
@pytest.fixture(params=["nixl", "mooncake", pytest.param("sglang", marks=pytest.mark.wide)])
def floor(request: pytest.FixtureRequest, fleets: dict[Protocol, Fleet], engine_loop: LoopThread) -> Iterator[PdFloor]:
    with pd_floor(*fleets[request.param].get(), engine_loop, request.param) as one:
        yield one


def concurrent(floor: PdFloor) -> bool:
    return floor.protocol != "nixl"


def never_decoded(floor: PdFloor, d: PdVllmEngine, since_s: float) -> bool:
    """Decode was not called, or, where the legs run at once, is aborted within a second."""
    return not d.requests or (concurrent(floor) and d.aborted_since(since_s))


# --- prefill fails

FAULTS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "400": ({"status": 400}, (400,)),
    "500": ({"status": 500}, (500,)),
    "reset before the head": ({"cut_after": -1}, (502,)),
    "reset in the body": ({"cut_after": 1}, (502,)),
    "end before the head": ({"eof_after": -1}, (502,)),
    "abort": ({"finish": "abort"}, (502,)),
    "refuse": ({"refuse": True}, (502, 503)),  # 503: the prober was faster
}


@pytest.mark.parametrize(("fault", "stream"), each_once_and_all_wide(FAULTS))
def test_r60_a_prefill_that_fails_is_told_at_once_and_decode_is_not_left_waiting(
    floor: PdFloor, fault: str, stream: bool
) -> None:
    knobs, statuses = FAULTS[fault]
    # A decode engine may send its 200 before it has anything to say: that must not be the client's.
    p, d = floor.pair(decode={"head_first": True})
    p.set(ttft_s=0.2, **knobs)
    answer = floor.chat(stream=stream)
    assert answer.status in statuses, answer.body
    assert answer.head_s is not None
    failed_s = p.requests[0].finished_s if p.requests else answer.started_s + 0.2
    assert failed_s is not None and answer.head_s - failed_s < 1
    error = answer.json()["error"]
    if "status" in knobs:
        assert error["code"] == "scripted", "the engine's own words"
    eventually(lambda: never_decoded(floor, d, failed_s), within_s=1)
    floor.quiet(within_s=1)


def test_r60_a_prefill_that_never_answers_is_given_up(floor: PdFloor) -> None:
    p, d = floor.pair(prefill={"stall_after": -1}, decode={"head_first": True})
    answer = floor.chat(stream=True, within_s=PD_PREFILL_S + 5)
    assert answer.status == 504, answer.body
    assert PD_PREFILL_S * 0.9 < took_s(answer) < PD_PREFILL_S + 1
    eventually(lambda: p.aborted_since(answer.started_s + PD_PREFILL_S), within_s=1)
    eventually(lambda: never_decoded(floor, d, answer.started_s + PD_PREFILL_S), within_s=1)


def test_r60_a_prefill_that_refuses_costs_no_request_where_there_is_another(floor: PdFloor) -> None:
    bad, good = floor.engines("prefill", 2)
    (d,) = floor.engines("decode", chunks=2)
    bad.set(refuse=True)
    answers = asyncio.run(floor.many(8, concurrency=4))
    assert [(a.status, a.body) for a in answers if not a.ok] == []
    assert len(good.requests) == 8 and not bad.requests
    eventually(lambda: not d.in_flight)


# --- decode fails


@pytest.mark.parametrize(("status", "stream"), each_once_and_all_wide([400, 500, 503]))
def test_r47_decodes_own_status_and_body_reach_the_client(floor: PdFloor, status: int, stream: bool) -> None:
    _, d = floor.pair(prefill=SHORT_LEASE, decode={"status": status})
    answer = floor.chat(stream=stream)
    assert answer.status == status
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.json()["error"]["code"] == "scripted"
    assert len(d.requests) == 1


@pytest.mark.parametrize("floor", ["mooncake", "sglang"], indirect=True)
def test_r62_decode_that_fails_at_once_ends_the_prefill_that_runs_beside_it(floor: PdFloor) -> None:
    p, _ = floor.pair(prefill={"ttft_s": 30}, decode={"status": 400})
    answer = floor.chat()
    assert answer.status == 400
    assert took_s(answer) < 1
    eventually(lambda: all(r.aborted_s is not None for r in p.requests) and not p.in_flight, within_s=1)
    floor.quiet(within_s=1)


def test_r61_decode_that_refuses_is_replaced_by_another(floor: PdFloor) -> None:
    prefills = floor.engines("prefill", 1, **SHORT_LEASE)
    bad, good = floor.engines("decode", 2, chunks=2)
    bad.set(refuse=True)
    answers = asyncio.run(floor.many(8, concurrency=4))
    assert [(a.status, a.body) for a in answers if not a.ok] == []
    assert len(good.requests) == 8
    if floor.protocol == "nixl":
        assert len(prefills[0].requests) == 8, "what prefill gave is good for the other decode node"
    assert not good.pd.recomputed


@MOSTLY_STREAM
def test_r61_no_decode_that_can_be_reached_is_told_at_once(floor: PdFloor, stream: bool) -> None:
    p, d = floor.pair(prefill=SHORT_LEASE)
    d.set(refuse=True)
    answer = floor.chat(stream=stream)
    assert answer.status in (502, 503), answer.body
    assert took_s(answer) < 1
    eventually(lambda: not p.in_flight, within_s=1)


def test_r61_decode_that_never_answers_is_given_up(floor: PdFloor) -> None:
    _, d = floor.pair(decode={"stall_after": -1})
    answer = floor.chat(stream=True)
    assert answer.status == 504
    assert PD_FIRST_BYTE_S * 0.9 < took_s(answer) < PD_FIRST_BYTE_S + 1
    eventually(lambda: len(d.aborts) == 1)


def test_r46_decode_that_breaks_off_in_the_stream_ends_with_an_error_event(floor: PdFloor) -> None:
    p, d = floor.pair(decode={"cut_after": 1, "gap_s": 0.05})
    answer = floor.chat(stream=True, stream_options={"include_usage": True})
    assert (answer.status, answer.done) == (200, False)
    assert [event for event in answer.events() if "error" in json.loads(event)]
    assert (len(p.requests), len(d.requests)) == (1, 1), "nothing is begun again"


# --- the client leaves

STAGES: dict[str, dict[str, dict[str, Any]]] = {
    "prefill computes": {"prefill": {"ttft_s": 30}},
    "before decode's first token": {"prefill": SHORT_LEASE, "decode": {"ttft_s": 30}},
    "decode streams": {"decode": {"gap_s": 0.1, "chunks": 300}},
}


@pytest.mark.parametrize(("stage", "stream"), each_once_and_all_wide(STAGES))
def test_r62_a_client_that_leaves_ends_both_legs_within_a_second(floor: PdFloor, stage: str, stream: bool) -> None:
    p, d = floor.pair(**STAGES[stage])
    client = Leaving(floor, stream=stream)
    if stage == "prefill computes":
        eventually(lambda: [p.in_flight, d.in_flight] == [1, int(concurrent(floor))])
    else:
        eventually(lambda: bool(p.requests) and p.requests[0].finished_s is not None and d.in_flight == 1)
    left_s = client.leave()
    eventually(lambda: not p.in_flight and not d.in_flight, within_s=1)
    running = [r for engine in (p, d) for r in engine.requests if r.aborted_s is not None]
    assert running and all(r.aborted_s is not None and r.aborted_s - left_s < 1 for r in running)
    floor.quiet(within_s=1)


@pytest.mark.parametrize("floor", PROTOCOLS, indirect=True)
def test_r08_a_worker_that_dies_gives_both_legs_back(floor: PdFloor) -> None:
    p, d = floor.pair(prefill={"ttft_s": 30})
    clients = [Leaving(floor) for _ in range(6)]
    eventually(lambda: p.in_flight == 6)
    assert floor.counts(p, d) == [6, 6]
    pids = floor.deployment.worker_pids()
    for pid in pids:
        floor.deployment.kill_worker(pid)
    eventually(lambda: not p.in_flight and not d.in_flight, within_s=1)
    eventually(lambda: floor.counts(p, d) == [0, 0], within_s=2 * PD_SETTINGS["lease_s"] + 2)
    for client in clients:
        client.leave()
    floor.deployment.wait_for_workers(without=pids)
    p.set(ttft_s=0)
    eventually(lambda: floor.chat().ok, within_s=5)
