"""One deployment that tells of every request: its lines, and its traces."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.stage import PD_SETTINGS, Fleet
from tests.support.collector import PARENT_ID, TRACE_ID, TRACEPARENT, Collector, attributes_of, collecting
from tests.support.loop import LoopThread
from tests.support.pd_vllm import PdFloor, pd_floor
from tests.support.redis import PrivateRedis
from tests.support.wait import eventually


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as one:
        yield one


@pytest.fixture(scope="module")
def fleet(redis_server: PrivateRedis, collector: Collector) -> Iterator[Fleet]:
    settings: dict[str, Any] = {
        "pd_protocol": "nixl",
        "log_requests": "all",
        "log_format": "json",
        "log_level": "INFO",
        "trace_endpoint": collector.url,
        "api_keys": ["sk-hush"],
    }
    env = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
    one = Fleet(redis_server, workers=1, settings=PD_SETTINGS | settings, env=env)
    yield one
    one.close()


@pytest.fixture
def floor(fleet: Fleet, engine_loop: LoopThread) -> Iterator[PdFloor]:
    with pd_floor(*fleet.get(), engine_loop, "nixl") as one:
        yield one


def lines(floor: PdFloor, request: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in floor.masters[0].log().splitlines() if line.startswith("{")]
    return [line for line in found if line.get("request") == request]


def ask(floor: PdFloor, request: str, **more: Any) -> Any:
    headers = {"x-request-id": request, "traceparent": TRACEPARENT}
    return floor.chat(headers=headers, key="sk-hush", prompt="the-prompt", **more)


def test_a_request_on_two_engines_is_one_line_and_one_trace(floor: PdFloor, collector: Collector) -> None:
    prefill, decode = floor.pair()
    answer = ask(floor, "r1", stream=True)
    assert answer.ok
    (line,) = eventually(lambda: lines(floor, "r1"))
    (at_prefill,), (at_decode,) = prefill.requests, decode.requests
    assert (line["outcome"], line["status"], line["node"]) == ("ok", 200, decode.url)
    assert (line["model"], line["path"], line["client"]) == (floor.model, "/v1/chat/completions", "127.0.0.1")
    assert (line["bytes_in"], line["bytes_out"]) == (len(at_decode.body) - added(at_decode.body), len(answer.body))
    assert line["chunks"] > 0 and 0 < line["first_byte_s"] <= line["seconds"]
    legs = line["legs"]
    assert [(leg["stage"], leg["node"], leg["status"], leg["error"]) for leg in legs] == [
        ("prefill", prefill.url, 200, None),
        ("decode", decode.url, 200, None),
    ]
    assert 0 < legs[0]["seconds"] + legs[1]["seconds"] <= line["seconds"]

    spans = eventually(lambda: ours if len(ours := of_request(collector, "r1")) >= 4 else None, within_s=5)
    by_stage = {attributes_of(span).get("evenhand.stage"): span for span in spans if span.kind == span.SPAN_KIND_CLIENT}
    (server,) = (span for span in spans if span.kind == span.SPAN_KIND_SERVER)
    assert server.parent_span_id == PARENT_ID
    for record, stage in ((at_prefill, "prefill"), (at_decode, "decode")):
        sent = record.header(b"traceparent")
        assert sent == b"00-%b-%b-01" % (TRACE_ID.hex().encode(), by_stage[stage].span_id.hex().encode())
        assert by_stage[stage].parent_span_id == server.span_id and by_stage[stage].name == f"chat {floor.model}"
    (relay,) = (span for span in spans if span.name == "relay")
    assert server.start_time_unix_nano <= relay.start_time_unix_nano <= relay.end_time_unix_nano
    told = floor.masters[0].log() + str(collector.got)
    assert "sk-hush" not in told and "the-prompt" not in told


def added(body: bytes) -> int:
    """Bytes by which decode's body is longer than the client's."""
    asked = {name: value for name, value in json.loads(body).items() if name != "kv_transfer_params"}
    return len(body) - len(json.dumps(asked).encode())


def of_request(collector: Collector, request: str) -> list[Any]:
    """The spans of the one request in that trace which has this id."""
    spans = [span for span in collector.spans if span.trace_id == TRACE_ID]
    own = {span.span_id for span in spans if attributes_of(span).get("evenhand.request_id") == request}
    return [span for span in spans if span.span_id in own or span.parent_span_id in own]


def test_an_answer_that_breaks_off_is_told_of_once_and_why(floor: PdFloor) -> None:
    floor.pair(decode={"chunks": 5, "cut_after": 2})
    assert not ask(floor, "r2", stream=True).done
    (line,) = eventually(lambda: lines(floor, "r2"))
    assert (line["level"], line["outcome"], line["status"]) == ("WARNING", "engine_error", 200)
    others = [json.loads(one) for one in floor.masters[0].log().splitlines() if "broke off" in one]
    assert [one for one in others if one["level"] != "INFO"] == [line], "nobody else tells of it"
    assert "broke off" in line["reason"] and line["legs"][-1]["error"] == "engine_broke_off"


def test_the_settings_in_force_are_said_once_by_the_master(floor: PdFloor) -> None:
    found = [json.loads(line) for line in floor.masters[0].log().splitlines() if "settings in force" in line]
    (line,) = found
    assert line["settings"]["log_requests"] == {"value": "all", "from": "--log-requests"}
    assert line["settings"]["api_keys"] == {"value": "**********", "from": "--api-keys"}


def test_what_is_not_split_has_one_leg_and_an_unknown_model_none(floor: PdFloor) -> None:
    _, decode = floor.pair()
    ask(floor, "r3", path="/v1/embeddings")
    (line,) = eventually(lambda: lines(floor, "r3"))
    assert [(leg["stage"], leg["node"]) for leg in line["legs"]] == [("request", decode.url)]
    floor.chat(headers={"x-request-id": "r4"}, key="sk-hush", model="m\nforged")
    (line,) = eventually(lambda: lines(floor, "r4"))
    assert (line["outcome"], line["status"], line["legs"], line["model"]) == ("client_error", 404, None, "m\\nforged")
    assert line["reason"]
