"""A head that comes again is served as the first one was: as if the parser had read each of them.

The same bytes come in reads of one byte, in whole requests, cut anywhere, and each request on a connection of its own.
What the app is asked, what the client gets and whether the connection goes on must be the same. Where a head is broken,
what follows from it is written down here.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.http.fakes import listening, until
from tests.upstream.scripted import cut, turns
from tests.workers.same_head import (
    Client,
    Recording,
    Seen,
    afresh,
    by_byte,
    connected,
    played,
    settled,
)
from workers.protocol import Protocol

LINE = b"POST /v1/x?q=1 HTTP/1.1"
LINES = [b"Host: h", b"User-Agent: t/1", b"Authorization: Bearer k1", b"Content-Type: application/json"]
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n"


def head(line: bytes = LINE, lines: list[bytes] = LINES, *more: bytes, at: int = 9) -> bytes:
    """`more` goes in at a place among the `lines`."""
    return b"\r\n".join([line, *lines[:at], *more, *lines[at:], b"", b""])


def post(body: bytes, *more: bytes, line: bytes = LINE, lines: list[bytes] = LINES, at: int = 9) -> bytes:
    return head(line, lines, b"Content-Length: %d" % len(body), *more, at=at) + body


def chunked(body: bytes, *more: bytes) -> bytes:
    parts = [part for part in (body[:3], body[3:]) if part]
    return (
        head(LINE, LINES, b"Transfer-Encoding: chunked", *more)
        + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        + b"0\r\n\r\n"
    )


def altered(number: int, old: bytes, new: bytes) -> list[bytes]:
    return [line.replace(old, new) if i == number else line for i, line in enumerate(LINES)]


# Requests that are good, each made of a body.
GOOD = {
    "plain": post,
    "length first": lambda body: post(body, at=0),
    "length in between": lambda body: post(body, at=2),
    "key's last byte": lambda body: post(body, lines=altered(2, b"k1", b"k2")),
    "key's case": lambda body: post(body, lines=altered(2, b"k1", b"K1")),
    "name's case": lambda body: post(body, lines=altered(1, b"User", b"user")),
    "a space more": lambda body: post(body, lines=altered(1, b": ", b":  ")),
    "no space": lambda body: post(body, lines=altered(1, b": ", b":")),
    "a space behind": lambda body: post(body, lines=altered(1, b"t/1", b"t/1 ")),
    "order": lambda body: post(body, lines=LINES[::-1]),
    "one less": lambda body: post(body, lines=LINES[:-1]),
    "one twice": lambda body: post(body, lines=[*LINES, LINES[1]]),
    "target": lambda body: post(body, line=b"POST /v1/x?q=2 HTTP/1.1"),
    "target, encoded": lambda body: post(body, line=b"POST /v1/%78?q=1 HTTP/1.1"),
    "target, absolute": lambda body: post(body, line=b"POST http://h/v1/x?q=1 HTTP/1.1"),
    "method": lambda body: post(body, line=b"PUT /v1/x?q=1 HTTP/1.1"),
    "host": lambda body: post(body, lines=altered(0, b"h", b"i")),
    "length's name": lambda body: post(body).replace(b"Content-Length: ", b"content-length: ", 1),
    "length, no space": lambda body: post(body).replace(b"Content-Length: ", b"Content-Length:", 1),
    "length, a tab": lambda body: post(body).replace(b"Content-Length: ", b"Content-Length:\t", 1),
    "length, zeros": lambda body: post(body).replace(b"Content-Length: ", b"Content-Length: 00", 1),
    "length, a space behind": lambda body: head(LINE, LINES, b"Content-Length: %d " % len(body)) + body,
    "another length before": lambda body: post(body, lines=[*LINES, b"X-Content-Length: 9"]),
    "another length before, other": lambda body: post(body, lines=[*LINES, b"X-Content-Length: 8"]),
    "another length behind": lambda body: post(body, b"X-Content-Length: 9"),
    "a length in a value": lambda body: post(body, lines=[*LINES, b"X-A: Content-Length: 3"]),
    "a length in a value, other": lambda body: post(body, lines=[*LINES, b"X-A: Content-Length: 4"]),
    "a length in the target": lambda body: post(body, line=b"POST /v1/x?Content-Length:3 HTTP/1.1"),
    "a length in the target, other": lambda body: post(body, line=b"POST /v1/x?Content-Length:4 HTTP/1.1"),
    "no body": lambda body: head(b"GET /v1/models HTTP/1.1"),
    "no body, but a length in a value": lambda body: head(LINE, [*LINES, b"X-A: content-length: 3"]),
    "HEAD": lambda body: head(b"HEAD /v1/models HTTP/1.1"),
    "chunked": chunked,
    "chunked, with a trailer": lambda body: chunked(body)[:-2] + b"X-T: 3\r\n\r\n",
    "expects": lambda body: post(body, b"Expect: 100-continue"),
    "keep-alive": lambda body: post(body, b"Connection: keep-alive"),
    "upgrade": lambda body: post(body, b"Connection: Upgrade", b"Upgrade: h2c"),
    "an empty line before": lambda body: b"\r\n" + post(body),
}
LAST = {
    "close": lambda body: post(body, b"Connection: close"),
    "HTTP/1.0": lambda body: post(body, line=b"POST /v1/x?q=1 HTTP/1.0"),
    "HTTP/1.0, keep-alive": lambda body: post(body, b"Connection: keep-alive", line=b"POST /v1/x?q=1 HTTP/1.0"),
    "CONNECT": lambda body: head(b"CONNECT h:1 HTTP/1.1"),
}
LONG = b"0123456789" * 30_000
BODIES = [b"", b"1", b"{}", b"hello", b"\r\n", b"0\r\n\r\n", SMUGGLED, post(b"{}"), post(b"hello") + b"x", LONG]
HOW = ["at once", "whole", "by wire", "begun", "late", "stream", "rude"]


def compared(seen: Seen, how: str) -> Seen:
    """Who takes a body that is there asks for none; where it is still to come, it does."""
    return replace(seen, written=seen.written.replace(CONTINUE, b"")) if how == "by wire" else seen


def difference(seen: Seen, parsed: Seen) -> str | None:
    """The first of them, told briefly: bodies may be long."""
    for n, (one, other) in enumerate(zip_longest(seen.asked, parsed.asked)):
        if one != other:
            return f"request {n}: {one!r:.1000} in place of {other!r:.1000}"
    if (seen.written, seen.end) != (parsed.written, parsed.end):
        return f"{seen.written!r:.3000} {seen.end} in place of {parsed.written!r:.3000} {parsed.end}"
    return None


@st.composite
def sequences(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Kinds of requests, of which most are the one before, and which of `BODIES` each has."""
    kinds: list[str] = []
    for _ in range(draw(st.integers(2, 6))):
        again = bool(kinds) and draw(st.integers(0, 3)) > 0
        kinds.append(kinds[-1] if again else draw(st.sampled_from(["plain", "plain", *GOOD])))
    found = [(kind, draw(st.integers(0, len(BODIES) - 2))) for kind in kinds]
    if draw(st.integers(0, 5)) == 0:
        found[draw(st.integers(0, len(found) - 1))] = ("plain", len(BODIES) - 1)
    if draw(st.integers(0, 3)) == 0:
        found.insert(draw(st.integers(1, len(found))), (draw(st.sampled_from(list(LAST))), 2))
    return found


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    drawn=sequences(),
    how=st.sampled_from(HOW),
    places=st.sets(st.integers(1, 3000), max_size=12),
    wait=st.booleans(),
)
async def test_however_it_comes_it_is_the_same(
    drawn: list[tuple[str, int]], how: str, places: set[int], wait: bool
) -> None:
    requests = [{**GOOD, **LAST}[kind](BODIES[number]) for kind, number in drawn]
    wire = b"".join(requests)
    parsed = await played(how, by_byte(requests))
    ways = {
        "whole": await played(how, requests, wait=wait),
        "cut": await played(how, cut(wire, places), wait=wait),
        "pipelined": await played(how, [wire]),
        "afresh": await afresh(how, requests),
    }
    for way, seen in ways.items():
        assert difference(compared(seen, how), compared(parsed, how)) is None, way


@pytest.mark.parametrize("kind", [*GOOD, *LAST])
@pytest.mark.parametrize("how", ["whole", "by wire"])
async def test_each_kind_comes_twice_between_plain_ones(kind: str, how: str) -> None:
    make = {**GOOD, **LAST}[kind]
    requests = [make(b"ab"), make(b"hello"), post(b"{}"), make(b""), post(b"12345678"), make(b"x"), make(b"hello")]
    parsed = compared(await played(how, by_byte(requests)), how)
    assert compared(await afresh(how, requests), how) == parsed
    assert compared(await played(how, requests), how) == parsed
    joined = [*(a + b for a, b in zip(requests[::2], requests[1::2], strict=False)), requests[-1]]
    assert compared(await played(how, joined), how) == parsed
    behind_one = [
        requests[0],
        requests[1] + requests[2],
        requests[3],
        requests[4],
        requests[5],
        requests[6] + requests[4],
    ]
    assert (await played(how, behind_one)).asked[:7] == parsed.asked
    # The end of one request comes with the beginning, the head or all of the next one.
    for behind in (1, len(requests[1]) - 2, len(requests[1])):
        places = [len(requests[0]) - 1, len(requests[0]) + behind]
        assert compared(await played(how, cut(b"".join(requests), places)), how) == parsed
    if kind in GOOD:
        bodies = [one.body for one in parsed.asked]
        empty = make(b"ab") == make(b"")
        expected = [b"", b"", b"{}", b"", b"12345678", b"", b""]
        assert bodies == (expected if empty else [b"ab", b"hello", b"{}", b"", b"12345678", b"x", b"hello"])
        assert parsed.end == "" and parsed.written.count(b"HTTP/1.1 200 OK\r\n") == 7
    else:
        assert len(parsed.asked) == (kind != "CONNECT") and parsed.end == ("ended" if kind == "CONNECT" else "closing")


@pytest.mark.parametrize("how", HOW)
async def test_whatever_an_app_does_it_is_asked_the_same_each_time(how: str) -> None:
    for kind in ("plain", "length in between", "no body", "HEAD", "chunked", "expects", "upgrade", "target, encoded"):
        requests = [GOOD[kind](b"hello")] * 4
        parsed = await played(how, by_byte(requests))
        assert len({repr(one) for one in parsed.asked}) == 1
        for pieces, wait in ((requests, True), (requests, False), ([*requests[:2], requests[2] + requests[3]], True)):
            assert compared(await played(how, pieces, wait=wait), how) == compared(parsed, how)


@pytest.mark.parametrize("size", [0, 1, 2, 65_536, 300_000])
@pytest.mark.parametrize("how", ["whole", "by wire"])
async def test_the_body_of_a_head_that_came_before_ends_where_it_says(size: int, how: str) -> None:
    """Whatever of it comes in the read of the head, and whatever comes behind it in the read of its end."""
    body = (post(b"{}") * (size // 100 + 1))[:size]
    request, start = post(body), len(post(body)) - size
    for first in {start, start + size // 2, start + max(0, size - 1), start + size}:
        for behind in (b"", post(b"12"), SMUGGLED, post(b"12")[:20]):
            pieces = [post(b"ab"), request[:first], request[first:] + behind]
            if first == start + size:
                pieces = [post(b"ab"), request + behind]
            pieces = [piece for piece in pieces if piece]
            if behind == post(b"12")[:20]:
                pieces.append(post(b"12")[20:])
            seen = await played(how, pieces)
            after = [] if not behind else [b""] if behind is SMUGGLED else [b"12"]
            assert [one.body for one in seen.asked] == [b"ab", body, *after]
            assert [one.scope["path"] for one in seen.asked].count("/smuggled") == (behind is SMUGGLED)
            assert seen.end == ""


@pytest.mark.parametrize("framing", ["length", "length of another head", "chunked"])
@pytest.mark.parametrize("before", [b"", b"abc"])
async def test_a_body_that_reads_like_the_head_is_a_body(framing: str, before: bytes) -> None:
    """It begins a read of its own, as a head that came before does."""
    te = head(LINE, LINES, b"Transfer-Encoding: chunked")
    inner = te + b"5\r\nhello\r\n0\r\n\r\n" if framing == "chunked" else post(b"hello")
    body = before + inner
    outer = {
        "length": post(body),
        "length of another head": post(body, b"X-A: 1"),
        "chunked": te + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body),
    }[framing]
    begins = outer.index(inner, 10)
    start = outer.index(b"\r\n\r\n") + 4
    for good in ([inner], [], [post(b"hello")]):
        for places in ([], [40], [start], [begins - len(before)], [40, begins - 1], range(begins)):
            pieces = [*good, *cut(outer, [*places, begins, begins + len(inner)]), inner]
            seen = await played("whole", pieces)
            assert [one.body for one in seen.asked] == [b"hello"] * len(good) + [body, b"hello"]
            assert seen.end == ""


async def test_behind_half_a_head_a_head_that_came_before_is_a_part_of_it() -> None:
    half = b"POST /other HTTP/1.1\r\nX-A: "
    seen = await played("whole", [post(b"hello"), half, post(b"ab"), post(b"hello")])
    assert [(one.scope["path"], one.body) for one in seen.asked] == [
        ("/v1/x", b"hello"),
        ("/other", b"ab"),
        ("/v1/x", b"hello"),
    ]
    assert dict(seen.asked[1].scope["headers"])[b"x-a"] == LINE


# --- what must be refused, or read as the parser reads it

REFUSED = [
    b"",
    b" ",
    b"+5",
    b"-5",
    b"-0",
    b"5, 5",
    b"5,5",
    b"5 5",
    b"5_0",
    b"0x5",
    b"5;",
    b"5.",
    b"5e0",
    b"five",
    b"NaN",
]
REFUSED += [b'"5"', b"5\x0b", b"\x0b5", b"5\x7f", b"5\0", b"\xef\xbc\x95", b"\xb2", b"5\xa0", b"\x1c5", b"5\x85"]
REFUSED += [b"9" * 20, b"18446744073709551616", b"1" + b"0" * 40]
REFUSED += [b"5\r\n 5", b"\r\n 5", b"5\n", b"5\r", b"5\r\r", b"5\nX-A: b"]
READ = [b"5", b"05", b"005", b" 5", b"\t5", b" \t 5", b"5 ", b"5\t", b" 05 ", b"0" * 30 + b"5"]

BROKEN = {
    "twice, equal": head(LINE, LINES, b"Content-Length: 5", b"Content-Length: 5"),
    "twice, other": head(LINE, LINES, b"Content-Length: 5", b"Content-Length: 6"),
    "twice, apart": head(LINE, [b"Content-Length: 5", *LINES], b"Content-Length: 5"),
    "twice, in two cases": head(LINE, LINES, b"Content-Length: 5", b"content-length: 5"),
    "chunked behind it": head(LINE, LINES, b"Content-Length: 5", b"Transfer-Encoding: chunked"),
    "chunked before it": head(LINE, LINES, b"Transfer-Encoding: chunked", b"Content-Length: 5"),
    "chunked last": head(LINE, LINES, b"Content-Length: 5", at=2)[:-2] + b"Transfer-Encoding: chunked\r\n\r\n",
    "another coding": head(LINE, LINES, b"Transfer-Encoding: identity"),
    "a space before the colon": head(LINE, LINES, b"Content-Length : 5"),
    "a tab before the colon": head(LINE, LINES, b"Content-Length\t: 5"),
    "a space before the name": head(LINE, LINES, b" Content-Length: 5"),
    "folded": head(LINE, LINES, b"Content-Length: 5", b" 0"),
    "folded, another": head(LINE, LINES, b"X-A: a", b" b", b"Content-Length: 5"),
    "bare LF": post(b"").replace(b"\r\n", b"\n"),
    "one bare LF": post(b"hello").replace(b"t/1\r\n", b"t/1\n"),
    "bare LF at the end": head(LINE, LINES, b"Content-Length: 5")[:-2] + b"\n",
    "bare CR": post(b"hello").replace(b"t/1\r\n", b"t/1\r"),
    "NUL in a value": post(b"hello").replace(b"t/1", b"t/\0"),
    "NUL in a name": post(b"hello").replace(b"User", b"Us\0r"),
    "no colon": head(LINE, [*LINES, b"nothing"], b"Content-Length: 5"),
    "two hosts": head(LINE, [*LINES, b"Host: h"], b"Content-Length: 5"),
    "no host": head(LINE, LINES[1:], b"Content-Length: 5"),
    "a host that is none": head(LINE, altered(0, b"h", b"h/x"), b"Content-Length: 5"),
    "another version": head(LINE.replace(b"1.1", b"2.0"), LINES, b"Content-Length: 5"),
    "no version": head(LINE[:-9], LINES, b"Content-Length: 5"),
    "method in small letters": head(LINE.replace(b"POST", b"post"), LINES, b"Content-Length: 5"),
    "a byte before": b"x" + post(b"hello"),
    "a space before": b" " + post(b"hello"),
    "a NUL before": b"\0" + post(b"hello"),
}


def statuses_of(written: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", written)]


async def refused_behind(before: list[bytes], broken: bytes) -> None:
    for pieces in ([*before, broken], [b"".join([*before, broken])], [*before, *cut(broken, [len(broken) - 5])]):
        seen = await played("whole", pieces)
        assert [one.body for one in seen.asked] == [b"hello"] * len(before)
        statuses = statuses_of(seen.written)
        assert statuses[:-1] == [200] * len(before) and statuses[-1] == (400 if b" HTTP/1.1" in broken else 505)
        assert seen.written.count(b"connection: close") == 1 and seen.end == "ended"


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: repr(value)[2:-1])
@pytest.mark.parametrize("at", [9, 0])
async def test_a_length_that_is_none_is_refused_behind_one_that_was_good(value: bytes, at: int) -> None:
    good = post(b"hello", at=at)
    broken = head(LINE, LINES, b"Content-Length: " + value, at=at) + b"hello"
    for count in (0, 1, 2):
        await refused_behind([good] * count, broken)


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_head_is_refused_behind_one_that_was_good(name: str) -> None:
    for before in ([], [post(b"hello")], [post(b"hello")] * 2, [post(b"hello", at=2)] * 2):
        await refused_behind(before, BROKEN[name] + b"hello")


@pytest.mark.parametrize("value", READ, ids=lambda value: repr(value)[2:-1])
async def test_a_length_is_read_and_shown_as_it_was_written(value: bytes) -> None:
    odd = head(LINE, LINES, b"Content-Length: " + value) + b"hello"
    shown = value.lstrip(b" \t")
    for pieces in (
        [post(b"hello"), odd, post(b"ab"), odd],
        [odd, odd, post(b"ab"), odd],
        [odd + odd, post(b"ab") + odd],
    ):
        seen = await played("whole", pieces)
        assert seen == await played("whole", by_byte(pieces))
        assert {one.body: dict(one.scope["headers"])[b"content-length"] for one in seen.asked}[b"hello"] == shown
        assert len(seen.asked) == 4 and seen.end == ""


async def test_a_length_of_twenty_digits_that_the_parser_takes_is_waited_for() -> None:
    huge = head(LINE, LINES, b"Content-Length: 18446744073709551615") + b"hello"
    seen = await played("whole", [post(b"hello"), post(b"hello"), huge, SMUGGLED])
    assert [one.body for one in seen.asked] == [b"hello", b"hello", None]
    assert seen.written.count(b"HTTP/1.1 ") == 2


FAULTS = [b"x\r\n", b"0x1\r\n", b"+1\r\n", b"-1\r\n", b"1\r\nabc", b"1\ra", b"1 \nx"]
FAULTS += [b"0\r\nContent-Length: 3\r\n\r\n"]  # in a trailer


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_chunked_body_is_refused_where_it_breaks_the_second_time_too(fault: bytes) -> None:
    good, start = chunked(b"hello"), head(LINE, LINES, b"Transfer-Encoding: chunked")
    for pieces in ([good, start + fault], [good, good, start, fault], [good + start + fault]):
        seen = await played("whole", pieces)
        assert [one.body for one in seen.asked][:-1] == [b"hello"] * (len(seen.asked) - 1)
        assert seen.asked[-1].body in (None, b"hello")
        assert seen.written.endswith(b"}") and seen.written.count(b"HTTP/1.1 400 ") == 1 and seen.end == "ended"


async def test_what_was_refused_is_not_remembered_as_good() -> None:
    """Nothing that comes behind a refusal is read, and least of all as the head that came before."""
    seen = await played("whole", [post(b"hello"), BROKEN["two hosts"], post(b"hello"), BROKEN["two hosts"]])
    assert len(seen.asked) == 1 and seen.written.count(b"HTTP/1.1 ") == 2


# --- limits of a connection


def long_head(size_bytes: int) -> list[bytes]:
    return [*LINES, *(b"X-%d: %b" % (i, b"a" * 990) for i in range(size_bytes // 1000))]


@pytest.mark.parametrize(("size", "status"), [(60_000, b"200"), (70_000, b"431")])
async def test_a_long_head_counts_alone(size: int, status: bytes) -> None:
    short, long = post(b"hello"), post(b"hello", lines=long_head(size))
    for pieces in ([short, short, long], [short, short, *cut(long, range(1, len(long), 900))], [short, short + long]):
        seen = await played("whole", pieces)
        assert seen.written.split(b"HTTP/1.1 ")[-1][:3] == status
    if status == b"200":
        seen = await played("whole", [long] * 4)
        assert len(seen.asked) == 4 and seen.end == ""


async def test_bodies_of_the_same_head_do_not_count_as_heads_or_trailers() -> None:
    many = [piece for _ in range(30) for piece in cut(post(b"x" * 9_000), [400, 2_000])]
    seen = await played("whole", [*many, b"GET /half HTTP/1.1\r\nHost:", b" h\r\n\r\n"])
    assert len(seen.asked) == 31 and seen.end == ""


async def test_an_endless_head_or_trailer_is_refused_behind_the_same_head_too() -> None:
    same = [post(b"x" * 70_000)] * 3
    for start in (b"GET / HTTP/1.1\r\nHost: h\r\n", chunked(b"hello")[:-2]):
        seen = await played("whole", [*same, start, *[b"X-A: " + b"a" * 993 + b"\r\n"] * 70])
        assert seen.written.split(b"HTTP/1.1 ")[-1][:3] == (b"431" if start[:3] == b"GET" else b"400")
        assert [one.body for one in seen.asked][:3] == [b"x" * 70_000] * 3 and seen.end == "ended"


async def test_empty_lines_between_requests_do_not_add_up() -> None:
    empty = b"\r\n" * 20_000
    seen = await played("whole", [post(b"hello"), empty, post(b"hello"), empty, post(b"hello")])
    assert len(seen.asked) == 3 and seen.end == ""


async def read_ahead(pieces: list[bytes]) -> tuple[list[bool], int]:
    """Whether reading went on after each piece, while nothing is answered; and how many requests were begun."""
    begun: list[None] = []

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        begun.append(None)
        await asyncio.Event().wait()

    protocol, side, state = connected(waits)
    reading = []
    for piece in pieces:
        protocol.data_received(piece)
        await turns()
        reading.append(side.reading.is_set())
    for task in list(state.tasks):
        task.cancel()
    protocol.connection_lost(None)
    await until(lambda: not state.tasks)
    return reading, len(begun)


@pytest.mark.parametrize("size", [0, 5, 70_000])
async def test_no_more_is_read_ahead_of_the_same_head_than_of_others(size: int) -> None:
    same = [post(b"x" * size) for _ in range(24)]
    others = [post(b"x" * size, lines=altered(1, b"t/1", b"%02d" % i)) for i in range(24)]
    found = await read_ahead(same)
    assert found == await read_ahead(others)
    assert found[1] == 1 and found[0].index(False) == (16 if size < 65_536 else 1)


async def test_a_long_body_that_nobody_takes_is_not_read_on() -> None:
    """Cut behind the head or not, and for the second head as for the first."""
    length = 400_000
    wire = post(b"x" * length)
    for pieces in (cut(wire, range(150, length, 60_000)), cut(wire, [100_000, 200_000, 300_000])):
        later = [post(b"{}", lines=altered(1, b"t/1", b"t/2")), *pieces]
        for first, rest in (([], pieces), ([post(b"{}")], pieces), ([later[0]], pieces)):
            reading, held = await unread(first, rest)
            assert not reading and held


async def unread(first: list[bytes], pieces: list[bytes]) -> tuple[bool, bool]:
    stop = asyncio.Event()
    bodies: list[bytes] = []

    async def stops(scope: Any, receive: Any, send: Any) -> None:
        if (b"content-length", b"2") not in scope["headers"]:
            await stop.wait()
        await Recording("whole")(scope, receive, send)
        bodies.append(b"")

    protocol, side, state = connected(stops)
    for piece in first:
        protocol.data_received(piece)
        await settled(state)
    sent = 0
    for piece in pieces:
        protocol.data_received(piece)
        sent += 1
        await turns()
        if not side.reading.is_set():
            break
    was_reading, held = side.reading.is_set(), sent < len(pieces)
    stop.set()
    for piece in pieces[sent:]:
        await asyncio.wait_for(side.reading.wait(), 5)
        protocol.data_received(piece)
    await until(lambda: not state.tasks)
    assert len(bodies) == len(first) + 1 and side.written.count(b"x-length: 400000") == 1
    protocol.connection_lost(None)
    return was_reading, held


# --- the clock, and the ends of a connection


async def after(times: int, **state_of_server: Any) -> Client:
    """A connection behind that many requests that were answered."""
    client = Client(Recording(), **state_of_server)
    for _ in range(times):
        await client.ask(post(b"hello"))
    return client


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_who_stops_in_the_body_is_told_so(times: int) -> None:
    client = await after(times - 1, client_timeout_s=0.1)
    client.side.written.clear()
    client.protocol.data_received(post(b"hello")[:-2])
    await until(lambda: client.side.ended)
    assert statuses_of(client.side.written) == [408]
    client.leave()
    await client.answered()


@pytest.mark.parametrize("times", [1, 2])
async def test_who_goes_on_in_the_body_has_time(times: int) -> None:
    client = await after(times - 1, client_timeout_s=0.2)
    for piece in cut(post(LONG), range(150, len(LONG), 70_000)):  # each is enough to be waited for
        client.protocol.data_received(piece)
        await asyncio.sleep(0.08)
    assert client.side.written.endswith(b"\r\n\r\n300000") and client.side.end() == ""
    client.leave()


async def test_who_is_in_a_body_at_every_look_has_time_for_each() -> None:
    app = Recording()
    protocol, side, _ = connected(app, client_timeout_s=0.1)
    protocol.data_received(post(b"hello")[:-2])
    for _ in range(7):
        await asyncio.sleep(0.04)
        protocol.data_received(b"lo")
        protocol.data_received(post(b"hello")[:-2])
    assert [one.body for one in app.asked][:6] == [b"hello"] * 6 and not side.ended
    protocol.connection_lost(None)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("times", [1, 2, 3])
async def test_a_connection_is_idle_behind_the_same_head_and_not_in_its_body(whole: bool, times: int) -> None:
    client = Client(Recording())
    client.protocol.timeout_keep_alive = limit_s = 0.1  # type: ignore[assignment]
    for _ in range(times - 1):
        await client.ask(post(b"hello"))
    client.side.written.clear()
    client.protocol.data_received(post(b"hello")[: None if whole else -2])
    if not whole:
        await asyncio.sleep(2.5 * limit_s)
        assert not client.side.closing
        client.protocol.data_received(b"lo")
    await until(lambda: statuses_of(client.side.written) == [200])
    assert not client.side.closing
    await until(lambda: client.side.closing, 10 * limit_s)
    assert not client.side.ended
    client.leave()


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("whole", [True, False])
async def test_who_ends_its_side_is_served_if_the_request_is_whole(times: int, whole: bool) -> None:
    go = asyncio.Event()

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        if (b"content-length", b"6") in scope["headers"]:
            await go.wait()
        await Recording()(scope, receive, send)

    async with listening(waits, protocol=Protocol) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(times - 1):
            writer.write(post(b"hello"))
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n5"), 2)
        writer.write(post(b"hello!")[: None if whole else -1])
        writer.write_eof()
        asyncio.get_running_loop().call_later(0.05, go.set)
        last = (await asyncio.wait_for(reader.read(), 2)).replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
        answer = b"HTTP/1.1 200 OK\r\nx-length: 6\r\ncontent-length: 1\r\nconnection: close\r\n\r\n6"
        assert last == (answer if whole else b"")
        writer.close()


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("left", [0, 2])
async def test_an_app_hears_of_a_client_that_leaves(times: int, left: int) -> None:
    """In the body, or while it waits for its answer."""
    heard: list[str] = []

    async def asks(scope: Any, receive: Any, send: Any) -> None:
        if len(heard) < times - 1:
            await Recording()(scope, receive, send)
            heard.append("answered")
            return
        while (message := await receive())["type"] != "http.disconnect":
            assert message["body"] in (b"hello", b"hel")
        heard.append("left")

    protocol, _, state = connected(asks)
    for n in range(times):
        request = post(b"hello")
        protocol.data_received(request[: len(request) - left * (n == times - 1)])
        await turns(8)
    protocol.connection_lost(None)
    await until(lambda: not state.tasks)
    assert heard == ["answered"] * (times - 1) + ["left"]


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_who_expects_to_be_asked_is_asked_each_time(times: int) -> None:
    client = Client(Recording())
    request = post(b"hello", b"Expect: 100-continue")
    for n in range(times):
        client.side.written.clear()
        client.protocol.data_received(request[:-5])
        await turns(6)
        assert client.side.written == CONTINUE, n
        assert await client.ask(request[-5:]) == b"HTTP/1.1 200 OK\r\nx-length: 5\r\ncontent-length: 1\r\n\r\n5"
    client.leave()


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_a_worker_that_stops_says_so_with_the_same_head_too(times: int) -> None:
    client = await after(times - 1)
    assert b"connection: close" not in client.side.written and not client.side.closing
    client.state.stopping = True
    assert b"connection: close" in await client.ask(post(b"hello")) and client.side.closing
    client.leave()


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("part", ["head", "body", "nothing"])
async def test_a_worker_that_winds_down_lets_a_body_come(times: int, part: str) -> None:
    client, request = await after(times), post(b"hello")
    kept = {"head": 20, "body": len(request) - 2, "nothing": 0}[part]
    if kept:
        client.protocol.data_received(request[:kept])
    await turns(6)
    client.protocol.wind_down(idle_before=float("inf"), heads=True)
    assert client.side.end() == {"nothing": "closing", "head": "ended", "body": ""}[part]
    if part == "body":
        written = await client.ask(request[kept:])
        assert statuses_of(written) == [200] and written.count(b"connection: close") == 1
    client.leave()
    await client.answered()
