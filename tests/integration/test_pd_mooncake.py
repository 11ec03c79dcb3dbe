"""Prefill/decode with vLLM's Mooncake connector: bootstrap queries, transfer ids, both legs at once.

Source: vLLM's Mooncake proxy; the engines are those of `workers.engine.mooncake`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.integration.stage import PD_SETTINGS, Fleet
from tests.support.loop import LoopThread
from tests.support.pd_vllm import Leaving, PdFloor, PdVllmEngine, pd_floor, took_s, usage_of
from tests.support.wait import eventually

WORKERS = 2
SETTINGS = PD_SETTINGS | {"pd_protocol": "mooncake"}


@pytest.fixture(scope="module")
def default_port() -> Iterator[int]:
    """What the second deployment has as --bootstrap-port: free, since 8998 may not be."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.fixture(scope="module")
def fleets(fleet_of: Callable[..., Fleet], default_port: int) -> dict[str, Fleet]:
    others = {"prefill_fallback": True, "bootstrap_port": default_port}
    return {
        "": fleet_of(workers=WORKERS, settings=SETTINGS),
        "other": fleet_of(workers=1, settings=SETTINGS | others),
    }


@pytest.fixture
def floor(fleets: dict[str, Fleet], engine_loop: LoopThread) -> Iterator[PdFloor]:
    with pd_floor(*fleets[""].get(), engine_loop, "mooncake") as one:
        yield one


@pytest.fixture
def other(fleets: dict[str, Fleet], engine_loop: LoopThread) -> Iterator[PdFloor]:
    """Another --bootstrap-port, and --prefill-fallback."""
    with pd_floor(*fleets["other"].get(), engine_loop, "mooncake") as one:
        yield one


def transfers(engine: PdVllmEngine) -> list[str]:
    return [body["kv_transfer_params"]["transfer_id"] for body in engine.bodies]


# --- what goes over the wire


def test_both_legs_field_by_field(floor: PdFloor) -> None:
    p, d = floor.pair()
    answer = floor.chat(temperature=0.5, max_completion_tokens=9)
    assert answer.ok, answer.body
    (first,), (second,) = p.bodies, d.bodies
    messages = [{"role": "user", "content": "hello"}]
    (transfer_id,) = transfers(p)
    assert first == {
        "model": floor.model,
        "messages": messages,
        "temperature": 0.5,
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id},
    }
    assert second == {
        "model": floor.model,
        "messages": messages,
        "temperature": 0.5,
        "stream": False,
        "max_completion_tokens": 9,
        "kv_transfer_params": {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": f"http://127.0.0.1:{p.bootstrap_port}",
            "remote_engine_id": p.pd.engine_ids[0],
            "transfer_id": transfer_id,
        },
    }
    assert p.requests[0].header(b"x-data-parallel-rank") == b"0"


@pytest.mark.parametrize("stream", [False, True])
def test_the_legs_run_at_once_and_decode_speaks_when_prefill_has_computed(floor: PdFloor, stream: bool) -> None:
    p, d = floor.pair(prefill={"ttft_s": 0.5})
    answer = floor.chat(stream=stream)
    assert answer.ok
    (prefill,), (decode,) = p.requests, d.requests
    assert abs(prefill.started_s - decode.started_s) < 0.3
    assert prefill.finished_s is not None and decode.first_byte_s is not None
    assert decode.started_s < prefill.finished_s <= decode.first_byte_s
    assert took_s(answer) < 0.5 + 0.5


def test_transfer_ids_are_new_for_each_request_whatever_its_request_id(floor: PdFloor) -> None:
    p, d = floor.pair()
    each = lambda i: {"headers": {"x-request-id": "always-the-same"}} if i % 2 else {}  # noqa: E731
    answers = asyncio.run(floor.many(20, concurrency=1, each=each))
    assert [(a.status, a.body) for a in answers if not a.ok] == []
    assert len(set(transfers(p))) == 20
    assert sorted(transfers(p)) == sorted(transfers(d))


def test_data_parallel_ranks_are_all_used_and_decode_is_told_the_engine_id_of_the_rank(floor: PdFloor) -> None:
    p, d = floor.pair(prefill={"ranks": 3})
    answers = asyncio.run(floor.many(18, concurrency=6))
    assert [(a.status, a.body) for a in answers if not a.ok] == []
    ranks = {transfer_id: int(r.header(b"x-data-parallel-rank") or b"") for transfer_id, r in ids_with(p)}
    told = {transfer_id: body["kv_transfer_params"]["remote_engine_id"] for transfer_id, body in bodies_with(d)}
    assert {transfer_id: p.pd.engine_ids[rank] for transfer_id, rank in ranks.items()} == told
    assert set(ranks.values()) == {0, 1, 2}


def ids_with(engine: PdVllmEngine) -> list[tuple[str, Any]]:
    return list(zip(transfers(engine), engine.requests, strict=True))


def bodies_with(engine: PdVllmEngine) -> list[tuple[str, Any]]:
    return list(zip(transfers(engine), engine.bodies, strict=True))


def test_a_clients_rank_gives_way(floor: PdFloor) -> None:
    p, _ = floor.pair(prefill={"ranks": 2})
    assert all(floor.chat(headers={"x-data-parallel-rank": "7"}).ok for _ in range(4))
    assert {r.header(b"x-data-parallel-rank") for r in p.requests} <= {b"0", b"1"}


@pytest.mark.parametrize("stream", [False, True])
def test_responses_are_split_too(floor: PdFloor, stream: bool) -> None:
    p, d = floor.pair()
    asked = {"model": floor.model, "input": "hi", "stream": stream, "max_output_tokens": 2}
    answer = floor.chat(path="/v1/responses", body=json.dumps(asked).encode())
    assert answer.ok, answer.body
    assert (p.bodies[0]["max_output_tokens"], p.bodies[0]["stream"]) == (1, False)
    assert {k: v for k, v in d.bodies[0].items() if k != "kv_transfer_params"} == asked
    usage = (answer.chunks()[-1][1]["response"] if stream else answer.json())["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (11, 2, 13)
    assert usage["input_tokens_details"] == {"cached_tokens": 4}


# --- the bootstrap server


def test_the_bootstrap_server_is_asked_once_by_each_worker_not_for_each_request(floor: PdFloor) -> None:
    prefills = floor.engines("prefill", 2)
    floor.engines("decode", chunks=1)
    answers = asyncio.run(floor.many(40, concurrency=8))
    assert all(answer.ok for answer in answers)
    assert all(1 <= len(p.queries) <= WORKERS for p in prefills), [len(p.queries) for p in prefills]
    assert {query.path for p in prefills for query in p.queries} == {"/query"}


def test_a_bootstrap_port_stands_in_the_registration(floor: PdFloor) -> None:
    p, d = floor.pair()
    nodes = floor.deployment.nodes()
    assert nodes[p.url]["bootstrap_port"] == p.bootstrap_port
    assert nodes[d.url].get("bootstrap_port") is None


def test_a_prefill_without_a_bootstrap_port_has_the_default_one(other: PdFloor, default_port: int) -> None:
    (p,) = other.engines("prefill", register=False, bootstrap_port=default_port)
    other.register(p, port=False)
    (d,) = other.engines("decode", chunks=1)
    assert other.chat().ok
    assert d.bodies[0]["kv_transfer_params"]["remote_bootstrap_addr"] == f"http://127.0.0.1:{default_port}"


@pytest.mark.parametrize("again", [True, False], ids=["registers again", "is only seen by the prober"])
def test_a_prefill_that_restarted_is_asked_for_its_new_engine_id(floor: PdFloor, again: bool) -> None:
    p, d = floor.pair()
    assert all(floor.chat().ok for _ in range(2 * WORKERS))
    p.crash()
    if not again:
        floor.deployment.wait_for_state("down", p)
    p.start()
    if again:
        floor.register(p)
    floor.deployment.wait_for_state("ready", p)
    seen = len(d.requests)
    answers = asyncio.run(floor.many(12, concurrency=4))
    assert [(a.status, a.body) for a in answers if not a.ok] == []
    ids = {body["kv_transfer_params"]["remote_engine_id"] for body in d.bodies[seen:]}
    assert ids == {p.pd.engine_ids[0]}, "on all workers"


@pytest.mark.parametrize("status", [500, 400])
def test_a_restart_that_nobody_told_of_costs_a_moment_and_not_for_ever(floor: PdFloor, status: int) -> None:
    """Too quick for the prober, and not registered again: the engine's refusal is how it is noticed."""
    p, _ = floor.pair(prefill={"lease_s": 0.5}, decode={"stale_status": status})
    assert all(floor.chat().ok for _ in range(2 * WORKERS))
    p.restart()
    eventually(lambda: all(floor.chat().ok for _ in range(2 * WORKERS)), within_s=5)


def test_a_clients_own_errors_hardly_cost_the_bootstrap_server_a_question(floor: PdFloor) -> None:
    p, _ = floor.pair(prefill={"lease_s": 0.5}, decode={"status": 400})
    begun_s = time.monotonic()
    answers = asyncio.run(floor.many(40, concurrency=4))
    assert {answer.status for answer in answers} == {400}
    assert len(p.queries) <= WORKERS * (1 + int(time.monotonic() - begun_s)), "one a second in each worker"


@pytest.mark.parametrize("fault", [{"status": 503}, {"refuse": True}], ids=["503", "refuses"])
def test_a_bootstrap_server_that_fails_fails_the_request_at_once_and_is_asked_again(
    floor: PdFloor, fault: dict[str, Any]
) -> None:
    p, d = floor.pair()
    p.set_bootstrap(**fault)
    answer = floor.chat()
    assert answer.status in (502, 503), answer.body
    assert took_s(answer) < 1
    assert not d.requests
    eventually(lambda: floor.counts() == [0, 0])
    p.set_bootstrap(status=200, refuse=False)
    eventually(lambda: floor.chat().ok)


def test_a_bootstrap_server_that_hangs_is_given_up(floor: PdFloor) -> None:
    p, d = floor.pair()
    p.set_bootstrap(blackhole=True)
    client = Leaving(floor)
    eventually(lambda: len(p.queries) == 1)
    client.leave()
    eventually(lambda: floor.counts() == [0, 0], within_s=1)
    assert not d.requests and not p.requests
    p.set_bootstrap(blackhole=False)
    eventually(lambda: floor.chat().ok, within_s=6)


# --- decode, and prefill nodes that are missing


def test_decode_that_refuses_is_replaced_and_no_transfer_is_left_open(floor: PdFloor) -> None:
    p = floor.engines("prefill", ttft_s=0.3, lease_s=0.5)[0]
    bad, good = floor.engines("decode", 2, chunks=1)
    bad.set(refuse=True)
    answers = [floor.chat() for _ in range(2)]
    assert [(a.status, a.body) for a in answers if not a.ok] == []
    # Which ids the second try has is free; that no id comes twice to an engine is what the engines hold it to.
    assert set(transfers(good)) <= set(transfers(p))
    eventually(lambda: not p.held)


def test_r68_prefill_fallback_serves_on_decode(other: PdFloor) -> None:
    (d,) = other.engines("decode", chunks=2)
    answer = other.chat(stream=True, stream_options={"include_usage": True})
    assert answer.ok and answer.text == "token0 token1 "
    assert "kv_transfer_params" not in d.bodies[0]
    assert usage_of(answer)["completion_tokens"] == 2
    counts = other.deployment.get("/distserve/links").json()["counts"]
    assert counts["prefill_fallback"] >= 1
