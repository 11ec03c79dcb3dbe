"""What a request met: how its legs end, and what of a trace goes on with each of them."""

from __future__ import annotations

import pytest

from app.journey import Journey, Leg
from app.traceparent import Parent, Trace, read_parent

A, B = "http://a:1", "http://b:1"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_a_leg_that_is_open_ended_with_the_next_of_its_stage_or_with_the_request() -> None:
    journey = Journey(legs=[Leg(A, "prefill", 10.0, 1.5), Leg(A, "decode", 12.0), Leg(B, "decode", 15.0)])
    journey.settle(21.0)
    assert [leg.seconds for leg in journey.legs] == [1.5, 3.0, 6.0]
    journey.settle(99.0)  # by the next who reads it
    assert [leg.seconds for leg in journey.legs] == [1.5, 3.0, 6.0]


def test_what_breaks_off_is_the_latest_open_leg_of_that_node() -> None:
    journey = Journey(
        legs=[Leg(A, "request", 1.0), Leg(A, "request", 2.0), Leg(A, "request", 3.0, 0.5), Leg(B, "x", 4.0)]
    )
    journey.broke(A, "engine_broke_off")
    assert [leg.error for leg in journey.legs] == [None, "engine_broke_off", None, None]
    journey.broke("http://unknown:1", "x")


@pytest.mark.parametrize(
    ("value", "sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),  # a flag of a later version
        (f"00-{TRACE}-{SPAN}-02", False),
        (f"cc-{TRACE}-{SPAN}-01-what the future will be like", True),
        (f" 00-{TRACE}-{SPAN}-01 ", True),
    ],
)
def test_a_clients_span_is_the_parent(value: str, sampled: bool) -> None:
    found = read_parent([(b"host", b"x"), (b"traceparent", value.encode())])
    assert found == Parent(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, sampled)


@pytest.mark.parametrize(
    "value",
    [
        "",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"cc-{TRACE}-{SPAN}-01.more",
        f"00-{TRACE}-{SPAN}-0g",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\x00",
    ],
)
def test_a_malformed_traceparent_is_none(value: str) -> None:
    assert read_parent([(b"traceparent", value.encode())]) is None


def test_two_traceparents_are_none() -> None:
    header = (b"traceparent", f"00-{TRACE}-{SPAN}-01".encode())
    assert read_parent([header, header]) is None
    assert read_parent([]) is None


def test_a_leg_goes_on_below_the_requests_span_with_an_id_of_its_own() -> None:
    trace = Trace(int(TRACE, 16), 0xABC, parent_id=0xDEF, sampled=True)
    state = (b"tracestate", b"vendor=1")
    first, headers = trace.onwards([(b"a", b"b"), (b"traceparent", b"old"), state])
    assert headers == [(b"a", b"b"), state, (b"traceparent", b"00-%b-%016x-01" % (TRACE.encode(), first))]
    second, _ = trace.onwards([])
    assert len({first, second, 0xABC, 0xDEF, 0}) == 5


def test_the_state_of_a_trace_that_was_not_understood_is_left() -> None:
    trace = Trace(1, 2, parent_id=0, sampled=False)
    span_id, headers = trace.onwards([(b"traceparent", b"nonsense"), (b"tracestate", b"vendor=1")])
    assert headers == [(b"traceparent", b"00-%032x-%016x-00" % (1, span_id))]
