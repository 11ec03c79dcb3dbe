"""The simulated engines of split serving keep true books: what the tests of the distributor build their proof on.

The proxy is played by hand here, so every expectation is worked out from the protocol.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support import load
from tests.support.http import request
from tests.support.loop import LoopThread
from tests.support.pd_vllm import PdVllmEngine
from tests.support.wait import aeventually
from workers.engine.pd import Fabric
from workers.engine.pd_rules import Leg, Protocol

Factory = Callable[..., PdVllmEngine]
Fields = dict[str, Any]

ASK: Fields = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
SHORT: Fields = {"max_tokens": 1, "kv_transfer_params": ASK}


@pytest.fixture
def engines(engine_loop: LoopThread) -> Iterator[Factory]:
    """`engines("nixl", "prefill", ...)`; they share one fabric, and none must have refused anything unseen."""
    made: list[PdVllmEngine] = []
    fabric = Fabric()

    def make(protocol: Protocol, leg: Leg, **knobs: Any) -> PdVllmEngine:
        made.append(PdVllmEngine(protocol, leg, fabric, loop=engine_loop, **knobs))
        return made[-1]

    yield make
    violations = [line for engine in made for line in engine.pd.violations]
    for engine in made:
        engine.close()
    assert not violations
    assert not [engine for engine in made if engine.held or engine.in_flight]
    assert not fabric.meetings


async def ask(engine: PdVllmEngine, *, request_id: str = "r1", **options: Any) -> load.Answer:
    headers = {"x-request-id": request_id} | options.pop("headers", {})
    return await load.chat(engine.url, headers=headers, **options)


async def refused(engine: PdVllmEngine, reason: str, **options: Any) -> None:
    answer = await ask(engine, **options)
    assert answer.status == 400
    assert answer.json()["error"]["code"] == "not_in_the_protocol"
    (line,) = engine.pd.violations
    assert reason in line
    engine.pd.violations.clear()


def usage_of(answer: load.Answer) -> Fields:
    if not answer.headers["content-type"].startswith("text/event-stream"):
        found: Fields = answer.json()["usage"]
        return found
    told: list[Fields] = [event["usage"] for _, event in answer.chunks() if not event["choices"]]
    return told[0]


# --- NIXL


async def test_nixl_prefill_keeps_blocks_until_decode_fetches_them(engines: Factory) -> None:
    p, d = engines("nixl", "prefill"), engines("nixl", "decode", prompt_tokens=13, chunks=3)
    first = await ask(p, **SHORT)
    assert first.text == "token0 "
    assert first.json()["choices"][0]["finish_reason"] == "length"
    assert usage_of(first) == {
        "prompt_tokens": 11,
        "completion_tokens": 1,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    params = first.json()["kv_transfer_params"]
    assert set(params) == {
        *("do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id"),
        *("remote_request_id", "remote_host", "remote_port", "tp_size"),
    }
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert params["remote_engine_id"] == p.pd.engine_ids[0]
    assert p.held == 1
    second = await ask(d, kv_transfer_params=params)
    assert second.text == "token0 token1 token2 "
    assert usage_of(second) == {
        "prompt_tokens": 13,
        "completion_tokens": 3,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 13},
    }
    assert p.held == 0
    assert d.pd.recomputed == []


async def test_nixl_decode_takes_what_prefill_gave_once_and_nothing_else(engines: Factory) -> None:
    p, d = engines("nixl", "prefill"), engines("nixl", "decode")
    params = (await ask(p, **SHORT)).json()["kv_transfer_params"]
    await refused(d, "prefill gave", kv_transfer_params=params | {"remote_host": "10.6.6.6"})
    await refused(d, "no such engine", kv_transfer_params=params | {"remote_engine_id": "other"})
    await refused(d, "no blocks", kv_transfer_params=params | {"remote_request_id": "other"})
    await refused(d, "on prefill it was r1", request_id="r2", kv_transfer_params=params)
    await refused(d, "another prompt", prompt="bye", kv_transfer_params=params)
    await refused(d, "without anything", kv_transfer_params={})
    assert p.held == 1
    assert (await ask(d, kv_transfer_params=params)).ok
    await refused(d, "fetched before", kv_transfer_params=params)


async def test_nixl_lease_ends(engines: Factory) -> None:
    p, d = engines("nixl", "prefill", lease_s=0.1), engines("nixl", "decode")
    params = (await ask(p, **SHORT)).json()["kv_transfer_params"]
    await aeventually(lambda: p.held == 0)
    assert p.pd.expired == [params["remote_request_id"]]
    await refused(d, "older than the lease", kv_transfer_params=params)


async def test_nixl_decode_computes_again_without_params_or_after_prefill_restarted(engines: Factory) -> None:
    p, d = engines("nixl", "prefill"), engines("nixl", "decode")
    params = (await ask(p, **SHORT)).json()["kv_transfer_params"]
    p.restart()
    assert p.held == 0
    assert p.pd.engine_ids[0] != params["remote_engine_id"]
    assert usage_of(await ask(d))["prompt_tokens_details"] == {"cached_tokens": 0}
    assert (await ask(d, request_id="r2", kv_transfer_params=params)).ok
    assert d.pd.recomputed == [("r1", "no kv_transfer_params"), ("r2", "the prefill engine restarted")]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_tokens": 2}, "max_tokens is 2"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"max_completion_tokens": 7}, "max_completion_tokens is 7"),
        ({"stream": True}, "stream is True"),
        ({"stream_options": {}}, "stream_options on prefill"),
        ({"min_tokens": 0}, "min_tokens on prefill"),
        ({"n": 1}, "n on prefill"),
        ({"kv_transfer_params": ASK | {"remote_port": 1}}, "params"),
        ({"kv_transfer_params": None}, "params"),
        ({"migration_request": {}}, "unknown to this engine: ['migration_request']"),
        ({"echo": True}, "unknown to this engine: ['echo']"),
        ({"headers": {"x-lmdeploy-distserve-proxy": "1"}}, "header x-lmdeploy-distserve-proxy"),
        ({"headers": {"x-request-id": ""}}, "no x-request-id"),
        ({"key": "sk-client"}, "a key that is not this engine's"),
        ({"model": "other"}, "model other"),
    ],
)
async def test_vllm_prefill_refuses_what_is_not_in_the_protocol(engines: Factory, change: Fields, reason: str) -> None:
    await refused(engines("nixl", "prefill"), reason, **(SHORT | change))


async def test_nothing_is_kept_for_a_prefill_that_fails_or_is_aborted(engines: Factory) -> None:
    p = engines("nixl", "prefill", ttft_s=5)
    assert (await ask(p, leave_after_s=0.1, **SHORT)).left
    await aeventually(lambda: len(p.aborts) == 1)
    faults: list[Fields] = [{"status": 500}, {"cut_after": -1}, {"cut_after": 1}, {"finish": "abort"}]
    for fault in faults:
        p.set(**({"ttft_s": 0, "status": 200, "cut_after": None, "finish": ""} | fault))
        answer = await ask(p, **SHORT)
        assert p.held == 0, fault
    assert answer.json()["choices"][0]["finish_reason"] == "abort"
    assert answer.json()["kv_transfer_params"] is None
    p.set(finish="", with_params=False)
    assert (await ask(p, **SHORT)).json()["kv_transfer_params"] is None
    assert p.held == 0


async def test_a_decode_that_fails_before_it_takes_the_request_leaves_the_blocks_to_the_lease(
    engines: Factory,
) -> None:
    p, d = engines("nixl", "prefill", lease_s=0.2), engines("nixl", "decode", status=503)
    params = (await ask(p, **SHORT)).json()["kv_transfer_params"]
    assert (await ask(d, kv_transfer_params=params)).status == 503
    assert p.held == 1
    await aeventually(lambda: p.held == 0)
    assert len(p.pd.expired) == 1


async def test_responses_are_split_too(engines: Factory) -> None:
    p, d = engines("nixl", "prefill"), engines("nixl", "decode", chunks=2, prompt_tokens=13)
    body: Fields = {"model": "sim", "input": "hi", "max_output_tokens": 1, "stream": False, "kv_transfer_params": ASK}
    first = await ask(p, path="/v1/responses", body=json.dumps(body).encode())
    assert first.json()["usage"] == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 1,
        "total_tokens": 12,
    }
    params = first.json()["kv_transfer_params"]
    body = {"model": "sim", "input": "hi", "stream": True, "kv_transfer_params": params}
    second = await ask(d, path="/v1/responses", body=json.dumps(body).encode())
    last = json.loads(second.events()[-1])
    assert last["type"] == "response.completed"
    assert last["response"]["usage"]["output_tokens"] == 2
    assert p.held == 0


async def test_usage_can_come_with_every_chunk(engines: Factory) -> None:
    d = engines("nixl", "decode", chunks=2)
    answer = await ask(d, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [event["usage"]["completion_tokens"] for _, event in answer.chunks()] == [1, 2, 2]


@pytest.mark.parametrize("fault", [{"cut_after": -1}, {"eof_after": -1}])
async def test_what_ends_before_the_head_was_not_taken_and_may_come_again(engines: Factory, fault: Fields) -> None:
    """A sender can't tell it from a kept connection that the engine had closed."""
    p, d = engines("nixl", "prefill"), engines("nixl", "decode", **fault)
    params = (await ask(p, **SHORT)).json()["kv_transfer_params"]
    assert (await ask(d, kv_transfer_params=params)).error is not None
    assert p.held == 1
    d.set(cut_after=None, eof_after=None)
    assert (await ask(d, kv_transfer_params=params)).ok
    d.restart()
    assert (await ask(d, kv_transfer_params=params)).ok
    assert [reason for _, reason in d.pd.recomputed] == ["fetched by an engine that crashed"]


# --- Mooncake

XFER: Fields = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer-1"}
FIRST: Fields = {"max_tokens": 1, "kv_transfer_params": XFER, "headers": {"x-data-parallel-rank": "0"}}


def take(p: PdVllmEngine, transfer_id: str = "xfer-1", rank: int = 0) -> Fields:
    params = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": f"http://127.0.0.1:{p.bootstrap_port}",
        "remote_engine_id": p.pd.engine_ids[rank],
        "transfer_id": transfer_id,
    }
    return {"kv_transfer_params": params}


def test_mooncake_bootstrap_tells_an_engine_id_per_rank_and_new_ones_after_a_restart(engines: Factory) -> None:
    p = engines("mooncake", "prefill", ranks=2)
    address = f"http://127.0.0.1:{p.bootstrap_port}/query"
    told = request("GET", address).json()
    assert {rank: entry["engine_id"] for rank, entry in told.items()} == dict(enumerate_text(p.pd.engine_ids))
    p.restart()
    again = request("GET", address).json()
    assert {entry["engine_id"] for entry in told.values()}.isdisjoint(entry["engine_id"] for entry in again.values())
    assert len(p.queries) == 2
    p.set_bootstrap(status=503)
    assert request("GET", address).status == 503


def enumerate_text(values: list[str]) -> list[tuple[str, str]]:
    return [(str(i), value) for i, value in enumerate(values)]


async def test_mooncake_decode_says_nothing_before_prefill_has_computed(engines: Factory) -> None:
    p, d = engines("mooncake", "prefill", ttft_s=0.3), engines("mooncake", "decode", chunks=2)
    decode = asyncio.create_task(ask(d, stream=True, **take(p)))
    await aeventually(lambda: d.in_flight == 1)
    prefill = await ask(p, **FIRST)
    assert prefill.ok
    assert "kv_transfer_params" not in prefill.json()
    answer = await decode
    assert answer.text == "token0 token1 "
    computed_s, begun_s = p.requests[0].finished_s, d.requests[0].first_byte_s
    assert computed_s is not None and begun_s is not None and computed_s <= begun_s


async def test_mooncake_decodes_head_may_come_before(engines: Factory) -> None:
    p, d = engines("mooncake", "prefill"), engines("mooncake", "decode", head_first=True)
    answer = await ask(d, stream=True, leave_after_s=0.2, **take(p))
    assert answer.left and answer.status == 200 and not answer.body
    await aeventually(lambda: d.held == 0)


async def test_mooncake_prefill_keeps_what_it_computed_until_decode_comes(engines: Factory) -> None:
    p, d = engines("mooncake", "prefill"), engines("mooncake", "decode")
    assert (await ask(p, **FIRST)).ok
    assert p.held == 1
    assert (await ask(d, **take(p))).ok
    assert p.held == 0
    await refused(p, "came to a prefill engine before", **FIRST)
    await refused(d, "came to a decode engine before", **take(p))


async def test_mooncake_decode_hangs_until_aborted_where_prefill_fails(engines: Factory) -> None:
    p, d = engines("mooncake", "prefill", status=500), engines("mooncake", "decode")
    decode = asyncio.create_task(ask(d, leave_after_s=0.5, **take(p)))
    assert (await ask(p, **FIRST)).status == 500
    answer = await decode
    assert answer.left and answer.status == 0
    await aeventually(lambda: len(d.aborts) == 1 and d.held == 0)


async def test_mooncake_refuses_the_wrong_rank_address_or_id(engines: Factory) -> None:
    p, d = engines("mooncake", "prefill", ranks=2, lease_s=0.5), engines("mooncake", "decode")
    await refused(p, "x-data-parallel-rank '2'", **(FIRST | {"headers": {"x-data-parallel-rank": "2"}}))
    await refused(p, "x-data-parallel-rank ''", **(FIRST | {"headers": {}}))
    await refused(p, "kv_transfer_params", **(FIRST | {"kv_transfer_params": ASK}))
    params = take(p)["kv_transfer_params"]
    await refused(d, "no engine", kv_transfer_params=params | {"remote_engine_id": "other"})
    await refused(d, "no bootstrap server", kv_transfer_params=params | {"remote_bootstrap_addr": "http://10.0.0.1:1"})
    await refused(d, "remote_bootstrap_addr", kv_transfer_params=params | {"remote_bootstrap_addr": "127.0.0.1:8998"})
    p.set(ttft_s=0.3)
    prefill = asyncio.create_task(ask(p, **(FIRST | {"headers": {"x-data-parallel-rank": "1"}})))
    await aeventually(lambda: p.in_flight == 1)
    await refused(d, "prefill is at rank 1", **take(p))
    assert (await prefill).ok
    await aeventually(lambda: p.held == 0)
    assert p.pd.expired == ["xfer-1"]


async def test_mooncake_an_engine_id_of_before_a_restart_fails_and_is_seen(engines: Factory) -> None:
    p, d = engines("mooncake", "prefill"), engines("mooncake", "decode")
    old = take(p)
    p.restart()
    assert (await ask(d, **old)).status == 500
    assert d.pd.stale == ["r1"]  # type: ignore[attr-defined]
    assert (await ask(d)).ok and len(d.pd.recomputed) == 1


# --- SGLang


def rooms(p: PdVllmEngine, room: Any = 7) -> Fields:
    count = len(room) if isinstance(room, list) else 0
    host: Any = ["127.0.0.1"] * count or "127.0.0.1"
    port: Any = [p.bootstrap_port] * count or p.bootstrap_port
    return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}


async def test_sglang_legs_meet_in_a_room(engines: Factory) -> None:
    p, d = engines("sglang", "prefill", ttft_s=0.2), engines("sglang", "decode", chunks=2, prompt_tokens=13)
    both = await asyncio.gather(*(ask(engine, **rooms(p)) for engine in (p, d)))
    assert [answer.text for answer in both] == ["token0 ", "token0 token1 "]
    assert usage_of(both[0])["prompt_tokens_details"] == {"cached_tokens": 4}
    computed_s, begun_s = p.requests[0].finished_s, d.requests[0].first_byte_s
    assert computed_s is not None and begun_s is not None and computed_s <= begun_s
    await refused(d, "came to a decode engine before", **rooms(p))


@pytest.mark.parametrize("alone", ["prefill", "decode"])
async def test_sglang_a_leg_alone_hangs_until_it_is_aborted(engines: Factory, alone: Leg) -> None:
    pair = {leg: engines("sglang", leg) for leg in ("prefill", "decode")}
    answer = await ask(pair[alone], leave_after_s=0.3, **rooms(pair["prefill"]))
    assert answer.left and answer.status == 0
    await aeventually(lambda: len(pair[alone].aborts) == 1 and pair[alone].held == 0)


async def test_sglang_a_batch_has_a_room_for_each_prompt(engines: Factory) -> None:
    p, d = engines("sglang", "prefill"), engines("sglang", "decode")
    path, prompt = "/v1/completions", ["a", "b"]
    both = await asyncio.gather(*(ask(e, path=path, prompt=prompt, **rooms(p, [5, 6])) for e in (p, d)))
    assert [[choice["index"] for choice in answer.json()["choices"]] for answer in both] == [[0, 1], [0, 1]]
    await refused(p, "bootstrap_host", path=path, prompt=prompt, **rooms(p, 8))
    await refused(p, "bootstrap_host", path=path, prompt=prompt, **rooms(p, [8]))
    await refused(p, "one room for two prompts", path=path, prompt=prompt, **rooms(p, [8, 8]))
    await refused(p, "bootstrap_host", path=path, prompt=[1, 2], **rooms(p, [8, 9]))


async def test_sglang_refuses_what_is_no_room_of_that_engine(engines: Factory) -> None:
    p, d = engines("sglang", "prefill"), engines("sglang", "decode")
    other = engines("sglang", "prefill")
    for room in (2**63, -1, "7", None, 7.0, True):
        await refused(d, "bootstrap_room", **rooms(p, room))
    await refused(d, "bootstrap_port", **(rooms(p) | {"bootstrap_port": None}))
    await refused(d, "no prefill engine bootstraps at", **(rooms(p) | {"bootstrap_host": "10.0.0.1"}))
    await refused(p, "not this engine", **rooms(other))
    await refused(d, "a decode engine can't compute a prompt")
    await refused(p, "unknown to this engine", kv_transfer_params=ASK, **rooms(p))
    waiting = asyncio.create_task(ask(p, leave_after_s=0.5, **rooms(p)))
    await aeventually(lambda: p.in_flight == 1)
    await refused(d, "differ", temperature=0.5, **rooms(p))
    await refused(d, "x-request-id", request_id="r2", **rooms(p))
    await waiting
    await aeventually(lambda: p.held == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_sglang_tells_the_prompts_logprobs_of_each_leg(engines: Factory, stream: bool) -> None:
    p, d = engines("sglang", "prefill"), engines("sglang", "decode", chunks=2)
    both = await asyncio.gather(*(ask(e, stream=stream, return_logprob=True, **rooms(p)) for e in (p, d)))
    metas = [answer.chunks()[0][1] if stream else answer.json() for answer in both]
    assert [[entry[1] for entry in meta["meta_info"]["input_token_logprobs"]] for meta in metas] == [
        [100, 101, 102],
        [103],
    ]
    assert "meta_info" not in (await asyncio.gather(*(ask(e, **rooms(p, 9)) for e in (p, d))))[0].json()


# --- all of them


async def test_a_crash_loses_everything_and_frees_the_other_leg_to_be_aborted(engines: Factory) -> None:
    p, d = engines("sglang", "prefill", ttft_s=5), engines("sglang", "decode")
    both = [asyncio.create_task(ask(e, leave_after_s=0.6, **rooms(p))) for e in (p, d)]
    await aeventually(lambda: (p.in_flight, d.in_flight) == (1, 1))
    p.crash()
    assert p.held == 0
    answers = [await one for one in both]
    assert answers[0].error is not None
    assert answers[1].left
    await aeventually(lambda: d.held == 0)


async def test_other_paths_are_for_decode_only(engines: Factory) -> None:
    p, d = engines("sglang", "prefill"), engines("sglang", "decode")
    await refused(p, "is for nodes that serve it whole", path="/v1/embeddings", input="x")
    assert (await ask(d, path="/v1/embeddings", input="x")).json()["object"] == "list"


async def test_fragments_make_no_difference(engines: Factory) -> None:
    d = engines("nixl", "decode", chunks=3)
    options: Fields = {"stream": True, "stream_options": {"include_usage": True}}
    whole = await ask(d, **options)
    d.set(frag_bytes=7)
    assert (await ask(d, **options)).body == whole.body
