"""LMDeploy DistServe: what prefill and decode get, by whichever path and id, and what a client can't get in.

The engines hold every field to the protocol (`workers.engine.books`), and each test ends with nothing held.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.stage import Fleet, start
from tests.support import load
from tests.support.collector import TRACEPARENT
from tests.support.deployment import ROOT, Deployment
from tests.support.engine import SimulatedEngine
from tests.support.http import request
from tests.support.loop import LoopThread
from tests.support.pd import Fabric, Floor, PdEngine, floor_on, openai_error, server_timing, user
from tests.support.process import Process
from tests.support.redis import PrivateRedis, Space
from tests.support.template import TEMPLATE
from tests.support.wait import eventually

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HEADER = b"x-lmdeploy-distserve-proxy"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
INTERNAL: dict[str, Any] = {
    "migration_request": {
        "protocol": 2,
        "remote_engine_id": "http://10.9.9.9:1",
        "remote_session_id": 1,
        "remote_token_id": 1,
        "remote_block_ids": [1],
        "is_dummy_prefill": False,
    },
    "with_cache": True,
    "preserve_cache": True,
    "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.9.9.9"},
    "ec_transfer_params": {"consumer_zmq": "tcp://10.9.9.9:1"},
    "bootstrap_host": "10.9.9.9",
    "bootstrap_port": 1,
    "bootstrap_room": 1,
}


@pytest.fixture(scope="module")
def fleet(redis_server: PrivateRedis) -> Iterator[Fleet]:
    one = Fleet(redis_server, workers=2, settings={"serving_strategy": "DistServe", "probe_interval_s": 1})
    yield one
    one.close()


@pytest.fixture
def floor(fleet: Fleet, engine_loop: LoopThread) -> Iterator[Floor]:
    with floor_on(*fleet.get(), engine_loop) as one:
        yield one


def asked(floor: Floor, path: str, **fields: Any) -> dict[str, Any]:
    """The body that `load.chat` sends."""
    prompt = {"prompt": "hello"} if path == COMPLETIONS else {"messages": [user("hello")]}
    return {"model": floor.model, "stream": False, **prompt, **fields}


# --- the two legs


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_request_is_prefilled_on_one_engine_and_decoded_on_another(floor: Floor, path: str, stream: bool) -> None:
    prefill, decode = floor.pair(chunks=5)
    answer = floor.chat(path=path, stream=stream, max_tokens=4)
    assert answer.ok, answer.body
    assert answer.text == "token0 token1 token2 token3 "
    assert answer.done is stream
    assert [record.path for record in (*prefill.legs, *decode.legs)] == [path, path]

    (first,), (second,) = prefill.bodies, decode.bodies
    wanted = asked(floor, path, stream=False, max_tokens=1, with_cache=True, preserve_cache=True)
    first.setdefault("stream", False)
    assert first == (wanted | {"max_completion_tokens": 1} if path == CHAT else wanted)
    migration = second.pop("migration_request")
    assert second == asked(floor, path, stream=stream, max_tokens=4), "the client's own"
    assert migration == {
        "protocol": 2,
        "remote_engine_id": prefill.url,
        "remote_session_id": 1,
        "remote_token_id": 1001,
        "remote_block_ids": migration["remote_block_ids"],
        "is_dummy_prefill": False,
    }
    assert floor.fabric.migrated == 1
    assert prefill.freed == [], "decode has told prefill itself"


def test_both_legs_carry_the_proxys_header_and_one_request_id(floor: Floor) -> None:
    prefill, decode = floor.pair()
    assert floor.chat(headers={"X-Request-Id": "mine-1", "traceparent": TRACEPARENT, "tracestate": "a=1"}).ok
    assert floor.chat().ok
    for engine in (prefill, decode):
        assert [record.header(HEADER) for record in engine.legs] == [b"1", b"1"]
        assert engine.legs[0].id == "mine-1"
        assert engine.legs[0].header(b"traceparent") == TRACEPARENT.encode()
        assert engine.legs[0].header(b"tracestate") == b"a=1"
    assert prefill.legs[1].id == decode.legs[1].id != ""


def test_a_leg_is_counted_until_its_answer_has_ended(floor: Floor) -> None:
    """The pair is held before prefill begins; prefill's count goes when its own answer has ended."""
    prefill, decode = floor.prefill(ttft_s=0.4), floor.decode(ttft_s=0.4)
    running = start(load.chat(floor.urls[0], model=floor.model))
    eventually(lambda: prefill.in_flight == 1)
    assert floor.counts(prefill, decode) == [1, 1]
    eventually(lambda: decode.in_flight == 1 and decode.legs)
    eventually(lambda: floor.counts(prefill, decode) == [0, 1], within_s=0.3)
    status = floor.deployment.nodes()
    assert [status[engine.url]["unfinished"] for engine in (prefill, decode)] == [0, 1]
    assert running.result(10).ok
    eventually(lambda: floor.counts(prefill, decode) == [0, 0])


def test_r07_a_prefill_that_computes_ranks_as_busy(floor: Floor) -> None:
    busy, idle = floor.prefill(), floor.prefill()
    decode = floor.decode()
    busy.set(ttft_s=2)
    idle.set(ttft_s=2)
    first = start(load.chat(floor.urls[0], model=floor.model))
    eventually(lambda: busy.in_flight + idle.in_flight == 1)
    second = start(load.chat(floor.urls[0], model=floor.model))
    eventually(lambda: (busy.in_flight, idle.in_flight) == (1, 1), within_s=1)
    assert floor.counts(busy, idle, decode) == [1, 1, 2], "each stage shows its own"
    assert first.result(10).ok and second.result(10).ok


def test_r66_prefill_is_spared_what_it_cant_take_and_decode_gets_it_unchanged(floor: Floor) -> None:
    prefill, decode = floor.pair(chunks=12)
    fields = {
        "max_tokens": 9,
        "max_completion_tokens": 9,
        "min_tokens": 3,
        "n": 1,
        "stop": ["end"],
        "tools": TOOLS,
        "response_format": {"type": "json_object"},
        "stream_options": {"include_usage": True},
    }
    answer = floor.chat(stream=True, **fields)
    assert answer.ok and answer.done
    (first,), (second,) = prefill.bodies, decode.bodies
    assert (first["max_tokens"], first["max_completion_tokens"], first.get("stream", False)) == (1, 1, False)
    assert not {"min_tokens", "stream_options"} & set(first)
    assert first["tools"] == TOOLS, "the prompt is made of them too"
    second.pop("migration_request")
    assert second == asked(floor, CHAT, stream=True, **fields)
    assert answer.chunks()[-1][1]["usage"]["completion_tokens"] == 9


def test_decode_is_given_no_limit_that_the_client_did_not_set(floor: Floor) -> None:
    _, decode = floor.pair(chunks=3)
    assert floor.chat().text == "token0 token1 token2 "
    assert not {"max_tokens", "max_completion_tokens"} & set(decode.bodies[0])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_n_above_1_is_refused_by_name(floor: Floor, path: str) -> None:
    prefill, decode = floor.pair()
    assert openai_error(floor.chat(path=path, n=2), 400)["param"] == "n"
    assert not prefill.legs and not decode.legs
    assert floor.chat(path=path, n=1).ok


@pytest.mark.parametrize(("path", "field", "value"), [(COMPLETIONS, "echo", True), (CHAT, "prompt_logprobs", 1)])
def test_r72_echo_and_prompt_logprobs_are_refused_by_name(floor: Floor, path: str, field: str, value: Any) -> None:
    prefill, decode = floor.pair()
    error = openai_error(floor.chat(path=path, **{field: value}), 400)
    assert field in error["message"] or error["param"] == field
    assert not prefill.legs and not decode.legs


def test_other_paths_go_whole_to_a_decode_node(floor: Floor) -> None:
    prefill, decode = floor.pair()
    body = b'{"model": "%b",  "input": ["a", "b"]}' % floor.model.encode()
    answer = floor.chat(path="/v1/embeddings", body=body, headers={HEADER.decode(): "1"})
    assert answer.ok and len(answer.json()["data"]) == 2
    assert [(record.path, record.body) for record in decode.legs] == [("/v1/embeddings", body)]
    assert decode.legs[0].header(HEADER) is None
    assert not prefill.legs
    eventually(lambda: floor.counts(decode) == [0])


def test_each_engine_is_called_with_its_own_key(floor: Floor) -> None:
    prefill, decode = floor.prefill(key="sk-prefill"), floor.decode(key="sk-decode")
    assert floor.chat(key="sk-of-the-client").ok, "links, legs and all"
    for engine, key in ((prefill, b"Bearer sk-prefill"), (decode, b"Bearer sk-decode")):
        assert {record.header(b"authorization") for record in engine.requests} == {key}


def test_stages_are_timed_in_a_header_and_in_redis(floor: Floor) -> None:
    prefill, decode = floor.prefill(ttft_s=0.2), floor.decode(ttft_s=0.3)
    prefill.fault("p2p_connect", delay_s=0.15)
    first = server_timing(floor.chat(stream=True))
    assert set(first) == {"link", "prefill", "handover", "decode"}
    assert 150 <= first["link"] < 1500
    assert 200 <= first["prefill"] < 1000
    assert 300 <= first["decode"] < 1500
    second = server_timing(floor.chat())
    assert {"prefill", "decode"} <= set(second)
    assert second.get("link", 0.0) < 100, "it is there already"
    eventually(lambda: stage_count(floor, prefill, "prefill") == stage_count(floor, decode, "decode") == 2)
    assert float(floor.hash(f"stages:{prefill.url}")["prefill_s"]) >= 0.4
    assert stage_count(floor, decode, "link") == 1, "who made it, and not who waited for it too"
    (shown,) = (
        node["stages"] for url, node in floor.deployment.get("/nodes/status").json().items() if url == prefill.url
    )
    assert shown["prefill"]["count"] == 2 and shown["prefill"]["mean_s"] >= 0.2


def stage_count(floor: Floor, engine: PdEngine, stage: str) -> int:
    return int(floor.hash(f"stages:{engine.url}").get(f"{stage}_count", 0))


# --- session ids


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("traits", "known"),
    [
        ({"cache_session_id": True, "ids": "public"}, True),
        ({"cache_session_id": True, "ids": "integer"}, True),
        ({"cache_session_id": False, "ids": "integer"}, True),
        ({"cache_session_id": False, "ids": "public"}, False),
    ],
    ids=["told", "told twice", "an integer id", "not told"],
)
def test_session_ids_of_all_kinds(floor: Floor, path: str, traits: dict[str, Any], known: bool) -> None:
    """Migrated in any case; when decode fails, freed where its number is known, and never by a guess."""
    prefill, decode = floor.prefill(**traits), floor.decode()
    assert floor.chat(path=path).ok
    assert floor.chat(path=path, stream=True).ok
    numbers = [body["migration_request"]["remote_session_id"] for body in decode.bodies]
    assert numbers == [1, 2] if known else set(numbers) <= {0, -1}
    decode.set(status=500)
    assert floor.chat(path=path).status == 500
    if known:
        eventually(lambda: prefill.freed == [3], within_s=1)
        return
    assert floor.fabric.orphans == [1, 2]
    time.sleep(0.3)  # a guess would come now
    assert prefill.freed == []
    assert floor.migrations() == set()
    prefill.restart()  # nobody can free it


def test_a_clients_session_id_is_not_taken_for_the_engines(floor: Floor) -> None:
    """LMDeploy's completions answer with the client's session_id: freeing by it would end somebody else's session."""
    prefill, decode = floor.prefill(), floor.decode()
    decode.set(ttft_s=1.5)
    running = start(load.chat(floor.urls[0], model=floor.model, prompt="held"))
    eventually(lambda: prefill.held == [1] and decode.in_flight)
    prefill.set(cache_session_id=False)
    decode.set(status=400, only_for="attack", ttft_s=0)
    assert floor.complete(prompt="attack", session_id=1).status == 400
    assert running.result(10).ok
    assert prefill.freed == []
    prefill.restart()  # the attacker's own session


# --- what clients can't do


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_r65_internal_fields_never_come_from_clients(floor: Floor, path: str) -> None:
    """Stripped or refused; the engines would note every one as a violation."""
    prefill, decode = floor.pair()
    for name, value in INTERNAL.items():
        answer = floor.chat(path=path, **{name: value})
        assert answer.status in (200, 400), (name, answer.body)
    for body in decode.bodies:
        assert body["migration_request"]["remote_engine_id"] == prefill.url
    assert floor.chat(path=path, headers={HEADER.decode(): "spoofed"}).ok
    assert floor.chat(path=path).ok


@pytest.mark.parametrize("name", sorted(INTERNAL))
def test_r65_internal_fields_never_pass_whole_to_decode(floor: Floor, name: str) -> None:
    _, decode = floor.pair()
    answer = floor.chat(path="/v1/embeddings", body=json.dumps(
        {"model": floor.model, "input": "a", name: INTERNAL[name]}
    ).encode())  # fmt: skip
    assert answer.status in (200, 400)
    assert all(name not in json.loads(record.body) for record in decode.legs)


def test_r65_internal_fields_and_header_never_pass_in_hybrid_serving(
    deployment_factory: Callable[..., Deployment], engine_factory: Callable[..., SimulatedEngine]
) -> None:
    deployment, engine = deployment_factory(1), engine_factory()
    deployment.add(engine)
    for name, value in INTERNAL.items():
        answer = asyncio.run(load.chat(deployment.url, **{name: value}))
        assert answer.status in (200, 400), (name, answer.body)
    assert asyncio.run(load.chat(deployment.url, headers={HEADER.decode(): "1"})).ok
    assert all(not set(INTERNAL) & set(json.loads(record.body)) for record in engine.requests)
    assert all(record.header(HEADER) is None for record in engine.requests)


# --- other settings


def test_dummy_prefill_calls_decode_alone(
    deployment_factory: Callable[..., Deployment], redis: Space, engine_loop: LoopThread
) -> None:
    deployment = deployment_factory(1, settings={"serving_strategy": "DistServe", "dummy_prefill": True})
    with floor_on(redis, [deployment], engine_loop, fabric=Fabric(dummy=True)) as floor:
        decode = floor.decode(chunks=3)
        for path, stream in itertools.product((CHAT, COMPLETIONS), (False, True)):
            answer = floor.chat(path=path, stream=stream)
            assert answer.ok and answer.text == "token0 token1 token2 "
        migrations = [body["migration_request"] for body in decode.bodies]
        assert (
            migrations
            == [
                {
                    "protocol": 2,
                    "remote_engine_id": "dummy:dummy",
                    "remote_session_id": 0,
                    "remote_token_id": 0,
                    "remote_block_ids": [],
                    "is_dummy_prefill": True,
                }
            ]
            * 4
        )
        assert not decode.calls(), "no link is needed"


def test_simulated_engines_of_their_own_processes(
    deployment_factory: Callable[..., Deployment], redis: Space, tmp_path: Path
) -> None:
    """As the guide says to try it: two engines that register themselves, and a distributor."""
    deployment = deployment_factory(2, settings={"serving_strategy": "DistServe", "probe_interval_s": 1})
    words = [sys.executable, "-m", "app.cli", "engine", "--pd-protocol", "lmdeploy", "--proxy-url", deployment.url]
    roles = ("Prefill", "Decode")
    running = [
        Process([*words, "--role", role], log_file=tmp_path / role, cwd=ROOT, template=TEMPLATE) for role in roles
    ]
    try:
        eventually(lambda: all("registered at" in process.log() for process in running), within_s=20)
        eventually(lambda: [node["state"] for node in deployment.nodes().values()] == ["ready"] * 2, within_s=5)
        answers = asyncio.run(load.many(deployment.url, 20, stream=True, max_tokens=2))
        assert [answer.text for answer in answers] == ["token0 token1 "] * 20
        books = [request("GET", url + "/sim/books").json() for url in deployment.nodes()]
        assert sorted(book["role"] for book in books) == ["Decode", "Prefill"]
        assert [(book["violations"], book["refusals"]) for book in books] == [([], [])] * 2
        for url in deployment.nodes():
            eventually(lambda url=url: request("GET", url + "/sim/books").json()["sessions"] == 0)  # type: ignore[misc]
    finally:
        for process in running:
            process.kill()
