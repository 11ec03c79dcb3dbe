"""What a line says of a request, how many there are, and that nothing of a client's making breaks it."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from app.journey import Journey, Leg
from app.metrics.figures import Figures, Served
from app.metrics.request_log import LINES_AT_ONCE, RequestLog
from workers.logs import formatter

NODE = "http://10.0.0.1:1"


def served(outcome: str = "ok", *, model: str = "m", path: str = "/v1/chat/completions") -> Served:
    one = Served(path)
    one.request, one.client, one.status = b"r7", ("10.1.2.3", 50000), 200
    one.model, one.bytes_in, one.bytes_out = model, 120, 3400
    one.end(NODE, outcome)
    one.began_s, one.ended_s = 100.0, 101.25
    return one


def split() -> Served:
    one = served("engine_error")
    one.key = "team-a"
    one.status, one.reason = 502, "engine http://d:1 broke off: reset"
    one.first_s, one.chunks = 100.5, 3
    legs = [
        Leg("http://p:1", "prefill", 100.0, 0.120, 200),
        Leg("http://d:1", "decode", 100.2, 0.034, 503),
        Leg("http://e:1", "decode", 100.25, 1.0, 200, "engine_broke_off"),
    ]
    one.journey = Journey(legs=legs)
    return one


def lines(caplog: pytest.LogCaptureFixture, style: str = "json") -> list[str]:
    form = formatter(style)
    return [form.format(record) for record in caplog.records if record.name == "evenhand.request"]


@pytest.fixture(autouse=True)
def everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "evenhand.request")


def objects(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(caplog)]


def test_a_line_in_json_has_every_field(caplog: pytest.LogCaptureFixture) -> None:
    RequestLog(1.0, "json")([split()])
    (line,) = objects(caplog)
    assert line.pop("time").endswith("Z") and isinstance(line.pop("pid"), int)
    assert line == {
        "level": "WARNING",
        "logger": "evenhand.request",
        "message": "request ended",
        "request": "r7",
        "model": "m",
        "path": "/v1/chat/completions",
        "node": NODE,
        "outcome": "engine_error",
        "status": 502,
        "reason": "engine http://d:1 broke off: reset",
        "seconds": 1.25,
        "first_byte_s": 0.5,
        "chunks": 3,
        "bytes_in": 120,
        "bytes_out": 3400,
        "client": "10.1.2.3",
        "key": "team-a",
        "legs": [
            {"node": "http://p:1", "stage": "prefill", "status": 200, "seconds": 0.12, "error": None},
            {"node": "http://d:1", "stage": "decode", "status": 503, "seconds": 0.034, "error": None},
            {"node": "http://e:1", "stage": "decode", "status": 200, "seconds": 1.0, "error": "engine_broke_off"},
        ],
    }


def test_a_line_in_text_names_its_fields_and_leaves_out_what_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    RequestLog(1.0, "text")([split(), served()])
    first, second = lines(caplog, "text")
    assert first.partition(" evenhand.request: ")[2] == (
        f"request ended request=r7 model=m path=/v1/chat/completions node={NODE} outcome=engine_error status=502 "
        'reason="engine http://d:1 broke off: reset" seconds=1.25 first_byte_s=0.5 chunks=3 bytes_in=120 '
        "bytes_out=3400 client=10.1.2.3 key=team-a "
        'legs="prefill=http://p:1:0.120s decode=http://d:1:0.034s:503 decode=http://e:1:1.000s:engine_broke_off"'
    )
    assert (
        " INFO [" in second
        and "reason" not in second
        and "key" not in second
        and "legs" not in second
        and "first_byte_s" not in second
    )


def test_without_successes_only_what_failed_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    RequestLog(0.0, "json")([served(), served("aborted"), served("client_error"), served("no_node"), served()])
    assert [line["outcome"] for line in objects(caplog)] == ["aborted", "client_error", "no_node"]


def test_a_sample_is_of_those_that_ended_well(caplog: pytest.LogCaptureFixture) -> None:
    draws = iter([0.1, 0.3, 0.24, 0.25])
    log = RequestLog(0.25, "json", draw=lambda: next(draws))
    log([served(), served(), served("no_node"), served(), served()])
    assert sorted(line["outcome"] for line in objects(caplog)) == ["no_node", "ok", "ok"]


def test_of_thousands_that_end_at_once_the_failures_come_first_and_the_rest_is_a_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    RequestLog(1.0, "json")([*(served() for _ in range(3000)), *(served("no_node") for _ in range(7))])
    *told, last = objects(caplog)
    assert len(told) == LINES_AT_ONCE and sum(line["outcome"] == "no_node" for line in told) == 7
    assert last["message"] == f"{3007 - LINES_AT_ONCE} more requests ended at the same time, 0 of them not well"
    caplog.clear()
    RequestLog(0.0, "json")([served("no_node") for _ in range(LINES_AT_ONCE + 5)])
    assert objects(caplog)[-1]["message"] == "5 more requests ended at the same time, 5 of them not well"


@pytest.mark.parametrize("style", ["text", "json"])
@pytest.mark.parametrize(
    "nasty", ["m\nWARNING forged", "m\r\n", "\x1b[2J\x07", "\ud800", "a\u2028b\u202ec\x85", 'q" x="1', "\x00" * 9]
)
def test_a_name_is_no_second_line_and_nothing_that_a_terminal_obeys(
    caplog: pytest.LogCaptureFixture, style: str, nasty: str
) -> None:
    one = split()
    one.model = one.path = one.reason = nasty
    one.request = nasty.encode("latin-1", "replace")
    one.journey.legs[0].node = nasty  # type: ignore[union-attr]
    RequestLog(1.0, style)([one])
    (line,) = lines(caplog, style)
    assert line.isprintable()
    line.encode()
    if style == "json":
        assert json.loads(line)["outcome"] == "engine_error"
    else:
        assert line.count(" outcome=") == 1


def test_a_line_is_not_longer_than_its_fields_may_be(caplog: pytest.LogCaptureFixture) -> None:
    one = split()
    one.model = one.path = one.reason = "x" * 10**6
    one.journey = Journey(legs=[Leg("http://n:1", "request", 0.0, 1.0, 500) for _ in range(1000)])
    RequestLog(1.0, "text")([one])
    (line,) = lines(caplog, "text")
    assert len(line) < 2000 and line.count("request=http://n:1:1.000s:500") == 8
    caplog.clear()
    RequestLog(1.0, "json")([one])
    (found,) = objects(caplog)
    assert len(found["legs"]) == 8


def test_requests_are_told_of_by_each_digest_and_a_fault_there_costs_no_figures(
    caplog: pytest.LogCaptureFixture,
) -> None:
    figures, told = Figures(knows=lambda model: True), list[list[Served]]()

    def fails(ended: list[Served]) -> None:
        raise ZeroDivisionError

    figures.on_ended += [fails, told.append]
    one = served()
    figures.ended.append(one)
    figures.digest()
    figures.digest()
    assert told == [[one]] and "could not be told" in caplog.text
    assert sum(figures.numbers.values()) == 1
