"""Which topologies there are: E+P+D, what is refused at the start and at registration, health and profiling.

One deployment asks for keys from everybody and gives its own to the engines: prefill and decode separate, NIXL pull.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from tests.integration.stage import MOSTLY_STREAM, Fleet
from tests.integration.test_epd_failures import Leaving, openai_error
from tests.integration.test_serve_command import EVENHAND, environment
from tests.support.deployment import ROOT, Deployment
from tests.support.epd import EpdEngine, Fabric, Part
from tests.support.epd_floor import Floor, floor_on, image, pictures, text, user, video
from tests.support.loop import LoopThread
from tests.support.process import Process
from tests.support.redis import PrivateRedis, Space
from tests.support.template import TEMPLATE
from tests.support.wait import eventually

SETTINGS = {"probe_interval_s": 1, "lease_s": 2}
HEAD = {"authorization": "Bearer head"}
CLIENT, ENGINE = "sk-client", "sk-engine"
SPLIT = {
    "serving_strategy": "DistServe",
    "pd_protocol": "nixl",
    "admin_keys": ["head"],
    "api_keys": [CLIENT],
    "trusted_nodes": "none",
    "engine_key": ENGINE,
}


FLEET = {"workers": 1, "settings": SETTINGS | SPLIT}


class Split(Floor):
    """Prefill and decode apart, everybody with a key."""

    def chat(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        return super().chat(messages, **({"key": CLIENT} | options))


@pytest.fixture
def split(fleet: Fleet, engine_loop: LoopThread) -> Iterator[Split]:
    space, masters = fleet.get()
    with floor_on(space, masters, engine_loop, kind=Split, headers=HEAD) as one:
        assert isinstance(one, Split)
        yield one


@pytest.fixture
def prefill(split: Split) -> EpdEngine:
    return split.one("prefill", key=ENGINE)


@pytest.fixture
def decode(split: Split) -> EpdEngine:
    return split.one("decode", key=ENGINE, chunks=3)


# --- E+P+D


def _in_order(fabric: Fabric, wanted: list[str]) -> None:
    """Every request has these stages, and each began after all before it had ended."""
    for parent, stages in fabric.orders():
        assert [part for part, _, _ in stages] == wanted, parent
        encoded_s = [ended for part, _, ended in stages if part == "encode"]
        others = [(begun, ended) for part, begun, ended in stages if part != "encode"]
        assert all(begun >= max(encoded_s) for begun, _ in others), "all encodes are done, then the rest"
        assert all(later >= ended for (_, ended), (later, _) in pairwise(others))


@MOSTLY_STREAM
def test_r77_50_requests_encode_then_prefill_then_decode(
    split: Split, prefill: EpdEngine, decode: EpdEngine, stream: bool
) -> None:
    encoders = split.encoders(3, key=ENGINE, ttft_s=0.01)
    prefill.set(ttft_s=0.005)
    answers = asyncio.run(
        split.many(50, concurrency=16, each=lambda i: {"messages": pictures(4)}, stream=stream, key=CLIENT)
    )
    assert [(answer.status, answer.body) for answer in answers if not answer.ok] == []
    assert all(answer.text == "token0 token1 token2 " for answer in answers)
    assert all(answer.done for answer in answers) or not stream
    assert len(split.fabric.orders()) == len(prefill.requests) == len(decode.requests) == 50
    # 4 images and 3 encoders: three calls of one request, one of them with two images.
    _in_order(split.fabric, ["encode", "encode", "encode", "prefill", "decode"])
    items = [encoder.items for encoder in encoders]
    assert sum(items) == 200
    assert max(items) - min(items) <= 1


def test_r77_the_slowest_encode_is_waited_for(split: Split, prefill: EpdEngine, decode: EpdEngine) -> None:
    encoders = split.encoders(3, key=ENGINE)
    encoders[1].set(ttft_s=0.4)
    assert split.chat(user(video("a"), video("b"), video("c"), text())).ok
    _in_order(split.fabric, ["encode", "encode", "encode", "prefill", "decode"])
    begun = [encode.record.started_s for encode in split.fabric.encodes]
    assert max(begun) - min(begun) < 0.3, "they run at the same time"


def test_r77_requests_without_media_skip_the_encoders(split: Split, prefill: EpdEngine, decode: EpdEngine) -> None:
    encoders = split.encoders(2, key=ENGINE)
    assert split.chat(user(text())).ok
    assert split.chat([{"role": "user", "content": "hello"}], stream=True).done
    assert (len(prefill.requests), len(decode.requests)) == (2, 2)
    assert not any(encoder.requests for encoder in encoders)
    assert "ec_transfer_params" not in str(prefill.bodies + decode.bodies)


def test_prefill_and_decode_bodies_field_by_field(split: Split, prefill: EpdEngine, decode: EpdEngine) -> None:
    split.encoders(1, key=ENGINE)
    fields = {
        "max_tokens": 2, "max_completion_tokens": 2, "min_tokens": 2, "stream_options": {"include_usage": True},
        "temperature": 0.5, "stop": ["x"],
    }  # fmt: skip
    assert split.chat(user(text(), image("a")), stream=True, **fields).ok
    (first,), (second,) = prefill.bodies, decode.bodies
    handed_over = second.pop("kv_transfer_params")
    assert handed_over["remote_engine_id"] == f"engine-{prefill.port}"
    params, messages = first["ec_transfer_params"], first["messages"]
    assert [part["type"] for part in messages[0]["content"]] == ["text", "image_embeds"]
    assert first == {
        "model": split.model, "messages": messages, "stream": False, "max_tokens": 1, "max_completion_tokens": 1,
        "temperature": 0.5, "stop": ["x"], "ec_transfer_params": params,
        "kv_transfer_params": {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
            "remote_block_ids": None, "remote_host": None, "remote_port": None,
        },
    }  # fmt: skip
    second.pop("ec_transfer_params", None)  # vLLM's example sends it to decode too, its Rust router does not
    assert second == {"model": split.model, "messages": messages, "stream": True, **fields}


def test_headers_engine_keys_on_all_roles_and_the_same_id_on_prefill_and_decode(
    split: Split, prefill: EpdEngine, decode: EpdEngine
) -> None:
    (encoder,) = split.encoders(1, key=ENGINE)
    assert split.chat(pictures(2), headers={"x-request-id": "mine", "x-api-key": CLIENT}).ok
    assert [record.id for record in prefill.requests + decode.requests] == ["mine", "mine"]
    assert encoder.requests[0].id.startswith("mine:0:")
    for engine in (encoder, prefill, decode):
        values = [value for record in engine.requests for _, value in record.headers]
        assert values.count(f"Bearer {ENGINE}".encode()) == 1
        assert not any(CLIENT.encode() in value for value in values)


def test_nodes_own_key_wins_over_the_engine_key(split: Split, prefill: EpdEngine, decode: EpdEngine) -> None:
    (encoder,) = split.encoders(1, key="its-own")
    assert split.chat(pictures(1)).ok, "the strict encoder answers 401 to any other key"
    assert encoder.requests[0].header(b"authorization") == b"Bearer its-own"


# --- prefill and decode fail


@pytest.mark.parametrize("status", [400, 422])
def test_r60_a_4xx_of_prefill_is_told_and_decode_is_not_called(
    split: Split, prefill: EpdEngine, decode: EpdEngine, status: int
) -> None:
    split.encoders(1, key=ENGINE)
    prefill.next(status)
    answer = split.chat(pictures(1), stream=True)
    assert (answer.status, answer.json()["error"]["code"]) == (status, "scripted")
    assert (len(prefill.requests), len(decode.requests)) == (1, 0)


def test_r60_prefill_that_keeps_failing_is_told_and_decode_is_not_called(
    split: Split, prefill: EpdEngine, decode: EpdEngine
) -> None:
    split.encoders(1, key=ENGINE)
    prefill.set(status=500)
    assert split.chat(pictures(1)).status == 500
    assert 1 <= len(prefill.requests) <= 2
    assert not decode.requests


def test_r60_prefill_that_breaks_off_or_answers_nonsense_is_502_and_decode_is_not_called(
    split: Split, prefill: EpdEngine, decode: EpdEngine
) -> None:
    split.encoders(1, key=ENGINE)
    prefill.script(lambda answer: b"<html>")
    openai_error(split.chat(pictures(1)), 502)
    prefill.script(None)
    prefill.set(cut_after=1)
    openai_error(split.chat(pictures(1), stream=True), 502)
    assert not decode.requests


def test_r80_a_500_of_decode_begins_again_with_encoders_and_prefill(
    split: Split, prefill: EpdEngine, decode: EpdEngine
) -> None:
    (encoder,) = split.encoders(1, key=ENGINE)
    decode.next(500)
    assert split.chat(pictures(2), stream=True).done
    assert [len(engine.requests) for engine in (encoder, prefill, decode)] == [2, 2, 2]
    ids = [item["transfer_id"] for body in prefill.bodies for item in body["ec_transfer_params"]["ec_items"]]
    assert len(set(ids)) == 4, "new transfer ids"
    blocks = [body["kv_transfer_params"]["remote_block_ids"] for body in decode.bodies]
    assert blocks[0] != blocks[1], "the blocks of the second prefill"


@pytest.mark.parametrize("role", ["Encode", "Prefill", "Decode"])
def test_r76_a_role_that_is_down_is_503_naming_it_and_no_later_stage_is_called(
    split: Split, prefill: EpdEngine, decode: EpdEngine, role: str
) -> None:
    (encoder,) = split.encoders(1, key=ENGINE)
    stages = {"Encode": encoder, "Prefill": prefill, "Decode": decode}
    stages[role].crash()
    split.deployment.wait_for_state("down", stages[role], headers=HEAD)
    answer = split.chat(pictures(2))
    assert role in openai_error(answer, 503)["message"]
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    order = list(stages)
    assert not any(stages[later].requests for later in order[order.index(role) :])


def test_client_that_leaves_in_prefill_aborts_it_and_decode_is_not_called(
    split: Split, prefill: EpdEngine, decode: EpdEngine
) -> None:
    split.encoders(2, key=ENGINE)
    prefill.set(ttft_s=30)
    client = Leaving(split, pictures(2), key=CLIENT, stream=True)
    eventually(lambda: prefill.in_flight == 1)
    left_s = client.leave()
    eventually(lambda: prefill.aborted_since(left_s, within_s=1))
    split.quiet(within_s=1)
    assert not decode.requests


# --- named at the start, or refused


def test_r78_servers_named_as_vllms_example_names_them_are_e_p_d(
    redis_server: PrivateRedis, engine_loop: LoopThread
) -> None:
    """Serving strategy and hand-over follow from the flags. (E+PD is named so in test_epd_settings.)"""
    floor = Floor(Space(redis_server, "epd-named"), [], engine_loop)
    parts: tuple[Part, ...] = ("encode", "prefill", "decode")
    urls = {part: ",".join(engine.url for engine in floor.engines(part, 2, register=False)) for part in parts}
    settings = SETTINGS | {f"{part}_servers_urls": named for part, named in urls.items()}
    with Deployment(1, redis=floor.space, settings=settings) as deployment:
        floor.open(deployment)
        for stream in (False, True):
            answers = asyncio.run(floor.many(4, messages=pictures(2), stream=stream))
            assert all(answer.ok for answer in answers)
        assert deployment.get("/ready").status == 200
        roles = deployment.get("/health?detail=1").json()["roles"]
        assert roles == {"Hybrid": {}, "Prefill": {"ready": 2}, "Decode": {"ready": 2}, "Encode": {"ready": 2}}
        floor.close()
        assert deployment.stop() == 0
    floor.space.clear()
    _in_order(floor.fabric, ["encode", "encode", "prefill", "decode"])


E, P, D = (f"http://127.0.0.1:{port}" for port in (1, 2, 3))
EPD = ["--encode-servers-urls", E, "--prefill-servers-urls", P, "--decode-servers-urls", D]
E_PD = ["--encode-servers-urls", E, "--decode-servers-urls", D]
# What is refused -> (flags, words that the line must have).
REFUSED: dict[str, tuple[list[str], str]] = {
    "a hybrid node beside prefill and decode": ([*EPD, "--nodes", "http://127.0.0.1:4"], "Hybrid"),
    "prefill switched off and on": (
        [*E_PD, "--prefill-servers-urls", "disable", "--serving-strategy", "DistServe"], "prefill-servers-urls",
    ),
    "one server, two roles": (["--encode-servers-urls", E, "--decode-servers-urls", E], E),
    "a Mooncake address too many": ([*E_PD, "--ec-consumer-zmq-addrs", "tcp://a:1,tcp://b:2"], "ec-consumer-zmq-addrs"),
    "too few for the ranks": (
        [*E_PD, "--ec-consumer-zmq-addrs", "tcp://a:1", "--ec-consumer-dp-size", "2"], "ec-consumer",
    ),
    "Mooncake consumers and prefill servers": ([*EPD, "--ec-consumer-zmq-addrs", "tcp://a:1"], "ec-consumer-zmq-addrs"),
    "Mooncake addresses of no server": (["--ec-consumer-zmq-addrs", "tcp://a:1"], "ec-consumer-zmq-addrs"),
    "one Mooncake address twice": (
        ["--decode-servers-urls", f"{D},{P}", "--ec-consumer-zmq-addrs", "tcp://a:1,tcp://a:1"], "named twice",
    ),
    "a Mooncake address that is none": ([*E_PD, "--ec-consumer-zmq-addrs", "a:1"], "must be tcp://HOST:PORT"),
    "ranks without Mooncake addresses": ([*E_PD, "--ec-consumer-dp-size", "2"], "--ec-consumer-dp-size is for"),
    "LMDeploy's protocol for vLLM's servers": ([*EPD, "--pd-protocol", "lmdeploy"], "--pd-protocol lmdeploy"),
    "prefill switched off and named": ([*E_PD, "--prefill-servers-urls", "disable", P], "disable or none"),
    "no rank at all": ([*E_PD, "--ec-consumer-dp-size", "0"], "ec-consumer-dp-size"),
    "a policy that is none": (["--encoder-policy", "sticky"], "encoder-policy"),
    "retries below none": (["--encoder-retries", "-1"], "encoder-retries"),
    "a batch below none": (["--encoder-max-batch-size", "-1"], "encoder-max-batch-size"),
    "an encoder URL that is none": (["--encode-servers-urls", "ftp://x", *E_PD[2:]], "encode-servers-urls"),
}  # fmt: skip


Refusals = dict[str, "Future[tuple[int, str]]"]


@pytest.fixture(scope="module")
def refusals(redis_server: PrivateRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Refusals]:
    """All of them, two at a time: each is a process that ends by itself; its exit code and what it wrote."""
    words = ["serve", "--server-name", "127.0.0.1", "--server-port", "0", "--workers", "1"]
    words += ["--redis-url", redis_server.url, "--namespace", "refused"]
    directory = tmp_path_factory.mktemp("refusals")

    def serve(name: str) -> tuple[int, str]:
        log_file = directory / str(list(REFUSED).index(name))
        command = [*EVENHAND, *words, *REFUSED[name][0]]
        process = Process(command, log_file=log_file, env=environment(COLUMNS="200"), cwd=ROOT, template=TEMPLATE)
        try:
            return process.wait(10), process.log()
        except subprocess.TimeoutExpired:
            process.stop(within_s=20)  # it serves: stopped properly, it takes its workers along
            return 0, process.log() + "\nit served"

    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(serve, name) for name in REFUSED}


@pytest.mark.parametrize("name", REFUSED)
def test_r78_what_cant_work_is_refused_at_the_start_in_one_line(refusals: Refusals, name: str) -> None:
    code, told = refusals[name].result(60)
    assert code == 2, told[-600:]
    lines = [line for line in told.splitlines() if line and not line.startswith(("usage:", " "))]
    assert len(lines) == 1, told
    assert REFUSED[name][1] in lines[0]


# --- registration


@pytest.mark.parametrize("role", ["Hybrid", 1])
def test_r78_a_hybrid_node_is_refused_where_prefill_and_decode_are_apart(split: Split, role: object) -> None:
    url = "http://127.0.0.1:9"
    reply = split.deployment.post("/nodes/add", {"url": url, "status": {"models": ["m"], "role": role}}, headers=HEAD)
    assert reply.status == 400
    error = reply.json()["error"]
    assert "Hybrid" in error["message"] and "role" in error["param"]
    assert url not in split.deployment.nodes("?all=1", headers=HEAD)


@pytest.mark.parametrize("role", ["Encode", "encode", 4, "Prefill", 2, "Decode", 3])
def test_r78_encode_prefill_and_decode_nodes_are_taken(split: Split, role: object) -> None:
    url = "http://127.0.0.1:9"
    status = {"models": [split.model], "role": role, "speed": 2}
    assert split.deployment.post("/nodes/add", {"url": url, "status": status}, headers=HEAD).status == 200
    node = split.deployment.nodes("?all=1", headers=HEAD)[url]
    assert node["role"] == {"e": 4, "p": 2, "d": 3}.get(str(role)[0].lower(), role)
    assert split.deployment.post("/nodes/remove", {"url": url}, headers=HEAD).status == 200


def test_r78_decode_is_not_routable_without_prefill(split: Split, decode: EpdEngine) -> None:
    split.encoders(1, key=ENGINE)
    assert "Prefill" in openai_error(split.chat(pictures(1)), 503)["message"]
    assert not decode.requests
    split.one("prefill", key=ENGINE)
    assert split.chat(pictures(1)).ok


# --- health and profiling


def test_health_with_detail_names_the_state_of_each_role(split: Split, prefill: EpdEngine, decode: EpdEngine) -> None:
    encoders = split.encoders(2, key=ENGINE)
    plain = split.deployment.get("/health")
    assert plain.status == 200
    assert "roles" not in plain.json() if plain.body else True
    detail = split.deployment.get("/health?detail=1")
    assert detail.status == 200, "it is open, and liveness"
    assert detail.json()["roles"] == {
        "Hybrid": {},
        "Prefill": {"ready": 1},
        "Decode": {"ready": 1},
        "Encode": {"ready": 2},
    }
    assert split.deployment.get("/ready").status == 200
    encoders[0].crash()
    prefill.crash()
    split.deployment.wait_for_state("down", encoders[0], prefill, headers=HEAD)
    detail = split.deployment.get("/health?detail=1")
    assert detail.status == 200
    assert detail.json()["roles"] == {
        "Hybrid": {}, "Prefill": {"down": 1}, "Decode": {"ready": 1}, "Encode": {"ready": 1, "down": 1},
    }  # fmt: skip
    ready = split.deployment.get("/ready")
    assert ready.status == 503
    assert "Prefill" in ready.text and "Decode" not in ready.text


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
def test_profiling_reaches_all_nodes_of_all_roles_and_tells_each_answer(
    split: Split, prefill: EpdEngine, decode: EpdEngine, path: str
) -> None:
    encoders = split.encoders(2, key=ENGINE)
    second = split.one("decode", key=ENGINE)
    encoders[1].strict.profile_status = 404  # an engine without a profiler
    prefill.crash()
    everyone = [*encoders, prefill, decode, second]
    reply = split.deployment.post(path, {"num_steps": 3}, headers=HEAD)
    assert reply.status == 200
    told = reply.json()
    assert set(told) == {engine.url for engine in everyone}
    assert [told[engine.url]["role"] for engine in everyone] == ["Encode", "Encode", "Prefill", "Decode", "Decode"]
    assert [told[e.url].get("status") for e in (*encoders, decode, second)] == [200, 404, 200, 200]
    assert told[prefill.url].get("status") in (None, 502, 504)
    for engine in everyone:
        assert [record.path for record in engine.profiled] == ([] if engine is prefill else [path])
        assert all(record.header(b"authorization") == f"Bearer {ENGINE}".encode() for record in engine.profiled)
        assert all(json.loads(record.body) == {"num_steps": 3} for record in engine.profiled)


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
def test_profiling_needs_an_admin_key(split: Split, decode: EpdEngine, path: str) -> None:
    for headers, status in (
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": f"Bearer {CLIENT}"}, 403),
    ):
        assert split.deployment.post(path, {}, headers=headers).status == status
    assert split.deployment.get(path, headers=HEAD).status in (404, 405)
    assert decode.profiled == []
    assert json.loads(split.deployment.post(path, {}, headers=HEAD).body)[decode.url]["status"] == 200
