"""What fails on the way: encoders, their reports, the node that decodes, the client. E+PD.

After each test: no count left, nothing in flight at any engine of any stage.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.stage import MOSTLY_STREAM, start
from tests.support import load
from tests.support.epd import EpdEngine
from tests.support.epd_floor import Floor, audio, image, pictures, text, user, video
from tests.support.wait import eventually

FIRST_BYTE_S = 2.0


FLEET = {
    "workers": 2,
    "settings": {"probe_interval_s": 1, "lease_s": 2, "first_byte_timeout_s": FIRST_BYTE_S},
}


def openai_error(answer: load.Answer, status: int) -> dict[str, Any]:
    assert answer.status == status, answer.body
    assert answer.headers["content-type"].startswith("application/json")
    error: dict[str, Any] = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    return error


# --- an encoder fails


@MOSTLY_STREAM
def test_r76_one_encoder_that_refuses_costs_no_request(floor: Floor, both: EpdEngine, stream: bool) -> None:
    encoders = floor.encoders(3)
    encoders[0].crash()
    each = lambda i: {"messages": pictures(1 + i % 4)}  # noqa: E731
    answers = asyncio.run(floor.many(30, concurrency=8, each=each, stream=stream))
    assert [(answer.status, answer.body) for answer in answers if not answer.ok] == []
    assert not encoders[0].requests
    assert encoders[1].items + encoders[2].items == sum(1 + i % 4 for i in range(30))
    assert len(both.requests) == 30
    floor.deployment.wait_for_state("down", encoders[0])


FAULTS: dict[str, dict[str, Any]] = {
    "500": {"status": 500},
    "503": {"status": 503},
    "reset before the head": {"cut_after": -1},
    "reset in the body": {"cut_after": 1},
    "end before the head": {"eof_after": -1},
    "end in the body": {"eof_after": 1, "eof_how": "close"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_r76_items_of_an_encoder_that_fails_go_to_the_next_one(floor: Floor, both: EpdEngine, fault: str) -> None:
    encoders = floor.encoders(3)
    encoders[1].set(**FAULTS[fault])
    asked = user(image("a"), image("b"), image("c"), text(), image("d"))
    for _ in range(3):
        assert floor.chat(asked).ok
    assert encoders[1].requests, "the fault must have been met"
    parts = both.bodies[-1]["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_embeds"] * 3 + ["text"] + ["image_embeds"]
    hosts = {entry["peer_port"] for key, entry in both.bodies[-1]["ec_transfer_params"].items() if key != "ec_items"}
    assert hosts <= {encoders[0].port, encoders[2].port}


def test_r80_times_and_failures_of_the_encoder_stage_are_shown(floor: Floor, both: EpdEngine) -> None:
    good, bad = floor.encoders(2, ttft_s=0.1)
    bad.set(status=500)
    space = floor.deployment.space
    assert space is not None
    failed_before = int(space.cli("HGET", space.key("handovers"), "encodes_failed") or 0)
    assert floor.chat(user(image("a"), image("b"))).ok
    eventually(
        lambda: int(space.cli("HGET", space.key("handovers"), "encodes_failed") or 0) == failed_before + 1, within_s=2
    )
    # Those of a quarter of a second are noted together.
    eventually(lambda: "encode" in floor.deployment.nodes()[good.url]["stages"], within_s=2)
    stages = {url: node["stages"] for url, node in floor.deployment.nodes().items()}
    assert stages[bad.url] == {}
    assert stages[good.url]["encode"]["count"] == 2
    assert 0.1 <= stages[good.url]["encode"]["mean_s"] < 5


def test_r76_an_encoder_that_is_too_slow_is_given_up_for_the_next(floor: Floor, both: EpdEngine) -> None:
    encoders = floor.encoders(2)
    floor.turn_to(0)
    encoders[0].set(blackhole=True, only_for="model")
    answer = floor.chat(pictures(1))
    assert answer.ok
    assert answer.finished_s is not None
    assert FIRST_BYTE_S * 0.9 < answer.finished_s - answer.started_s < FIRST_BYTE_S + 2
    assert len(encoders[0].aborts) == 1, "its call is aborted, not left behind"
    encoders[0].set(blackhole=False)


def test_r76_items_are_tried_at_no_more_than_two_other_encoders(floor: Floor, both: EpdEngine) -> None:
    encoders = floor.encoders(5, status=500)
    answer = floor.chat(pictures(1))
    assert answer.status >= 500, answer.body
    assert sorted(len(encoder.requests) for encoder in encoders) == [0, 0, 1, 1, 1], "--encoder-retries is 2"
    assert not both.requests
    openai_error(answer, answer.status)


@MOSTLY_STREAM
def test_r76_all_encoders_down_is_503_naming_the_role_and_nobody_else_is_called(
    floor: Floor, both: EpdEngine, stream: bool
) -> None:
    encoders = floor.encoders(3)
    for encoder in encoders:
        encoder.crash()
    error = openai_error(floor.chat(pictures(4), stream=stream), 503)
    assert "Encode" in error["message"]
    floor.deployment.wait_for_state("down", *encoders)
    answer = floor.chat(pictures(2), stream=stream)
    assert "Encode" in openai_error(answer, 503)["message"]
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert not both.requests
    assert not any(floor.counts())
    assert floor.chat(user(text())).ok, "a request without media needs no encoder"


def test_items_never_go_to_an_encoder_of_another_model(floor: Floor, both: EpdEngine) -> None:
    (other,) = floor.encoders(1, models=("another",))
    (own,) = floor.encoders(1)
    assert all(floor.chat(pictures(3)).ok for _ in range(3))
    assert (own.items, other.items) == (9, 0)


def test_encoders_have_probes_counts_and_latency_windows_like_other_nodes(floor: Floor, both: EpdEngine) -> None:
    encoders = floor.encoders(2, ttft_s=0.5)
    asking = start(floor.many(1, messages=pictures(4)))
    eventually(lambda: all(encoder.in_flight for encoder in encoders))
    assert min(floor.counts(*encoders)) > 0
    assert floor.counts(both) == [0], "not before its stage"
    assert min(floor.deployment.unfinished()[encoder.url] for encoder in encoders) > 0
    assert asking.result(5)[0].ok
    floor.quiet()
    eventually(lambda: all(floor.deployment.nodes()[encoder.url]["latency"] for encoder in encoders))
    nodes = floor.deployment.nodes()
    for encoder in encoders:
        assert (nodes[encoder.url]["role"], nodes[encoder.url]["state"]) == (4, "ready")
        assert 0.5 <= nodes[encoder.url]["latency"][0] < 2
        assert [probe.path for probe in encoder.probes if probe.path == "/health"]


# --- an encoder refuses: the client's error


def test_r76_a_4xx_of_an_encoder_passes_through_and_is_not_tried_again(floor: Floor, both: EpdEngine) -> None:
    encoders = floor.encoders(3)
    told = json.dumps({"error": {"message": "image is broken", "type": "x", "param": None, "code": 7}})
    for status in (400, 413, 422, 429):
        for encoder in encoders:
            encoder.forget()
            encoder.set(status=status, body=told, error_headers=(("retry-after", "9"),))
        answer = floor.chat(pictures(1), stream=True)
        assert (answer.status, answer.body.decode()) == (status, told)
        assert answer.headers["retry-after"] == "9"
        assert sum(len(encoder.requests) for encoder in encoders) == 1
    assert not both.requests


def test_the_first_failure_that_cant_be_mended_cancels_the_other_encodes(floor: Floor, both: EpdEngine) -> None:
    encoders = floor.encoders(3, ttft_s=1.9)
    encoders[1].set(status=400, ttft_s=0.2)
    answer = floor.chat(user(video("a"), video("b"), video("c")))
    assert answer.status == 400
    assert answer.finished_s is not None
    assert answer.finished_s - answer.started_s < 1.2, "the others need not be waited for"
    for encoder in (encoders[0], encoders[2]):
        eventually(lambda e=encoder: e.aborted_since(answer.finished_s, within_s=1))  # type: ignore[misc]
    assert not both.requests


# --- reports that can't be right

IMAGES = user(image("a"), image("b"), image("c"))


def _edited(edit: Callable[[list[dict[str, Any]]], object]) -> Callable[[dict[str, Any]], object]:
    """A report whose three entries, in content order, went through `edit`."""

    def report(proper: dict[str, Any]) -> object:
        entries = [dict(entry) for entry in proper.values()]
        changed = edit(entries)
        return dict(zip(proper, entries, strict=True)) if changed is None else changed

    return report


def _set(field: str, value: Any) -> Callable[[list[dict[str, Any]]], object]:
    return lambda entries: entries[1].update({field: value})


REPORTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no JSON": lambda proper: b'{"id": "x", "ec_transfer',
    "no JSON at all": lambda proper: b"<html>",
    "empty": lambda proper: b"",
    "no object": lambda proper: b"[]",
    "a list of handles": lambda proper: list(proper.values()),
    "a word": lambda proper: "hash",
    "an entry that is a list": lambda proper: {key: [1] for key in proper},
    "an entry that is null": dict.fromkeys,
    "metadata that is a list": _edited(_set("metadata", [1, 2])),
    "metadata that is a word": _edited(_set("metadata", "grid")),
    "metadata that has a word in it": _edited(_set("metadata", {"image_grid_thw": ["a"]})),
    "metadata that is no array": _edited(_set("metadata", {"image_grid_thw": {"t": 1}})),
    "an index twice": _edited(_set("item_indices", [0])),
    "an index twice in one entry": _edited(_set("item_indices", [1, 1])),
    "an index out of range": _edited(_set("item_indices", [3])),
    "an index below 0": _edited(_set("item_indices", [-1])),
    "an index that is true": _edited(_set("item_indices", [True])),
    "an index that is a word": _edited(_set("item_indices", ["1"])),
    "an index that is a fraction": _edited(_set("item_indices", [1.0])),
    "indices that are no list": _edited(_set("item_indices", 1)),
    "an item that is missing": lambda proper: dict(list(proper.items())[:2]),
    "unmatchable entries": lambda proper: {f"other-{i}": {"metadata": {}} for i in range(3)},
}


def test_r80_a_report_that_is_malformed_or_cant_be_matched_is_502(floor: Floor, both: EpdEngine) -> None:
    (encoder,) = floor.encoders(1)
    told = {}
    for kind, report in REPORTS.items():
        encoder.script(report)
        answer = floor.chat(IMAGES)
        error = answer.json()["error"]
        told[kind] = (answer.status, {"message", "type", "param", "code"} <= set(error))
    assert told == dict.fromkeys(REPORTS, (502, True))
    assert not both.requests
    encoder.script(None)
    assert floor.chat(IMAGES).ok


def test_r80_a_partial_result_fails_closed(floor: Floor, both: EpdEngine) -> None:
    """Of several encoders one reports what can't be matched: nothing goes on, whatever the others said."""
    encoders = floor.encoders(3)
    encoders[2].script(lambda proper: {f"other-{key}": {"metadata": {}, "item_indices": [9]} for key in proper})
    encoders[2].set(ttft_s=0.3)  # else it may end what has not been sent yet
    openai_error(floor.chat(pictures(6)), 502)
    assert all(encoder.requests for encoder in encoders)
    assert not both.requests


@pytest.mark.parametrize(
    "report",
    [
        lambda proper: {key.removeprefix("processed-"): {"metadata": e["metadata"]} for key, e in proper.items()},
        lambda proper: dict(reversed(list(proper.items()))),
    ],
    ids=["by uuid", "in another order"],
)
def test_reports_are_matched_by_index_and_then_by_uuid(floor: Floor, both: EpdEngine, report: Any) -> None:
    (encoder,) = floor.encoders(1)
    encoder.script(report)
    assert floor.chat(IMAGES).ok, "the engine holds every embedding to its own item"
    assert [part["type"] for part in both.bodies[0]["messages"][0]["content"]] == ["image_embeds"] * 3


def test_a_single_item_is_matched_with_the_single_entry(floor: Floor, both: EpdEngine) -> None:
    (encoder,) = floor.encoders(1)
    encoder.script(lambda proper: {key[:20]: {"metadata": entry["metadata"]} for key, entry in proper.items()})
    assert floor.chat(user(audio("a"), video("b"))).ok


# --- the node that decodes fails


@MOSTLY_STREAM
def test_r80_a_500_of_decode_begins_once_more_from_the_encoders(floor: Floor, both: EpdEngine, stream: bool) -> None:
    encoders = floor.encoders(3)
    both.next(500)
    answer = floor.chat(pictures(2), stream=stream, max_tokens=2)
    assert answer.ok
    assert answer.text == "token0 token1 "
    assert sum(encoder.items for encoder in encoders) == 4, "both items twice"
    first, second = both.bodies
    ids = [[item["transfer_id"] for item in body["ec_transfer_params"]["ec_items"]] for body in (first, second)]
    assert len(set(ids[0] + ids[1])) == 4, "new transfer ids"
    children = [record.id for encoder in encoders for record in encoder.requests]
    assert len(set(children)) == 4, "new child ids"
    assert both.requests[0].id == both.requests[1].id == children[0].split(":")[0]


@MOSTLY_STREAM
def test_r80_a_second_500_of_decode_is_told(floor: Floor, both: EpdEngine, stream: bool) -> None:
    encoders = floor.encoders(2)
    both.next(500, 500, 500)
    answer = floor.chat(pictures(1), stream=stream)
    assert answer.status == 500
    assert answer.json()["error"]["code"] == "scripted", "the engine's own words"
    assert sum(len(encoder.requests) for encoder in encoders) == len(both.requests) == 2


def test_r80_a_4xx_of_decode_is_told_at_once(floor: Floor, both: EpdEngine) -> None:
    (encoder,) = floor.encoders(1)
    for n, status in enumerate((400, 404, 422, 429), 1):
        both.next(status)
        answer = floor.chat(pictures(1))
        assert (answer.status, answer.json()["error"]["code"]) == (status, "scripted")
        assert len(encoder.requests) == len(both.requests) == n


def test_r76_a_stream_that_breaks_after_its_first_chunk_is_not_begun_again(floor: Floor, both: EpdEngine) -> None:
    encoders = floor.encoders(2)
    both.set(cut_after=1, gap_s=0.01, chunks=5)
    answer = floor.chat(pictures(1), stream=True)
    assert (answer.status, answer.done) == (200, False)
    assert [event for event in answer.events() if "error" in json.loads(event)]
    assert sum(len(encoder.requests) for encoder in encoders) == len(both.requests) == 1


# --- the client leaves


class Leaving:
    """A client that asks and closes its connection when told to."""

    def __init__(self, floor: Floor, messages: list[dict[str, Any]], *, key: str = "", **fields: Any) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", floor.deployment.port, timeout=10)
        body = json.dumps({"model": floor.model, "messages": messages, **fields})
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self._connection.request("POST", "/v1/chat/completions", body, headers)

    def leave(self) -> float:
        """When it left."""
        self._connection.close()
        return time.monotonic()


@MOSTLY_STREAM
def test_r80_client_that_leaves_while_5_encodes_run_aborts_all_5_within_a_second(
    floor: Floor, both: EpdEngine, stream: bool
) -> None:
    encoders = floor.encoders(5, ttft_s=30)
    client = Leaving(floor, pictures(5), stream=stream)
    eventually(lambda: [encoder.in_flight for encoder in encoders] == [1] * 5)
    assert floor.counts(*encoders) == [1] * 5
    left_s = client.leave()
    eventually(lambda: all(encoder.aborted_since(left_s, within_s=1) for encoder in encoders))
    floor.quiet(within_s=1)
    assert not both.requests


def test_r80_client_that_leaves_while_the_answer_streams_aborts_the_node(floor: Floor, both: EpdEngine) -> None:
    floor.encoders(2)
    both.set(chunks=200, gap_s=0.05)
    client = Leaving(floor, pictures(2), stream=True)
    eventually(lambda: both.in_flight == 1 and both.requests[0].chunk_s)
    left_s = client.leave()
    eventually(lambda: both.aborted_since(left_s, within_s=1))
    floor.quiet(within_s=1)
