"""An answer whose head came before is read as the first one was, and a chunk of a stream that comes alone as any other.

The same bytes come whole on one connection and byte by byte on a connection of its own for each answer, which nothing
but the parser can have read. Status, headers, body, what a sink was given, the error and whether the connection is kept
must be the same. What they are stands here where it can be said beforehand.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.errors import EngineBroke, EngineTimeout, UpstreamError
from app.upstream.connection import Connection, Http1Response
from app.upstream.pool import Pool
from app.upstream.transport import Target
from tests.upstream.client import limits
from tests.upstream.scripted import cut, turns, until
from tests.upstream.unplugged import FakeTransport

LOOPS = ("asyncio",)  # the bytes come by hand, not from a loop

EOF = b""  # in the place of a piece
JSON = b"Content-Type: application/json"
DATE = b"Date: Mon, 30 Nov 2026 12:00:00 GMT"


@dataclass(frozen=True)
class Sent:
    """What an engine sends to one request, which may be a HEAD."""

    wire: bytes
    head_only: bool = False
    eof: bool = False
    body: bytes = b"hello"  # that is in it


@dataclass
class Got:
    """What became of one answer."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    error: str = ""
    kept: bool = False  # the connection, for another request


class Line:
    """Connections to one engine, as a transport keeps them."""

    def __init__(self) -> None:
        self.pool = Pool(4.0, asyncio.get_running_loop())
        self.target = Target("http://e:1")
        self.made = 0

    def begin(self, *, head_only: bool = False, **more: float) -> tuple[Connection, FakeTransport, Http1Response]:
        connection = self.pool.take(self.target.origin, self.pool.loop.time())
        if connection is None:
            self.made += 1
            connection = Connection(self.target, self.pool, self.pool.loop)
            self.wire = FakeTransport()
            connection.connection_made(self.wire)
        head = b"%b / HTTP/1.1\r\n\r\n" % (b"HEAD" if head_only else b"POST")
        response = connection.begin(head, b"", limits(**more), float("inf"), head_only=head_only)
        return connection, self.wire, response

    async def ask(self, pieces: Iterable[bytes], how: str = "read", *, head_only: bool = False) -> Got:
        """One request and what comes to it. `how`: one of `HOW`."""
        connection, wire, response = self.begin(head_only=head_only)
        got = Got()
        early = how != "late"
        taking = asyncio.ensure_future(take(response, how, got)) if early else None
        for piece in pieces:
            if early:
                await turns(3)
            if wire.aborted:
                break
            assert wire.reading or early
            if piece != EOF:
                connection.data_received(piece)
            else:
                connection.eof_received()
                connection.connection_lost(None)
        taking = taking or asyncio.ensure_future(take(response, how, got))
        for _ in range(100):
            if not taking.done():
                await turns(1)
        if not taking.done():
            taking.cancel()
            raise AssertionError(f"it has not come to its end: {got}")
        await taking
        got.kept = self.pool.idle == 1
        assert (self.pool.open, self.pool.in_use) == (int(got.kept), 0)
        assert wire.aborted is not got.kept
        return got

    def stream(self, **more: float) -> tuple[Connection, FakeTransport, Http1Response]:
        """A request whose answer has begun, as a stream in chunks."""
        begun = self.begin(**more)
        begun[0].data_received(EVENTS)
        return begun

    def close(self) -> None:
        self.pool.close()


async def after(times: int) -> Line:
    """A connection behind that many requests that were answered."""
    line = Line()
    for _ in range(times):
        await line.ask([OK])
    return line


HOW = ["read", "late", "sink", "full sink", "whole"]


async def body_of(response: Http1Response) -> bytes:
    await response.head()
    body = b""
    while data := await response.read():
        body += data
    return body


async def take(response: Http1Response, how: str, got: Got) -> None:
    """`read`, `late`: piece by piece, waiting for them or when all have come. `whole`: at once if it may be."""
    ready = True

    def sink(data: bytes) -> bool:
        nonlocal ready
        assert ready and data and type(data) is bytes
        got.body += data
        ready = how == "sink"
        return ready

    async def drain() -> None:
        nonlocal ready
        assert not ready
        await turns(5)
        ready = True

    try:
        await response.head()
        got.status, got.headers = response.status, list(response.headers)
        if how in ("sink", "full sink"):
            await response.pipe(sink, drain)
        else:
            whole = response.whole() if how == "whole" else None
            while data := await response.read():
                assert type(data) is bytes
                got.body += data
            assert whole in (None, got.body)
    except UpstreamError as e:
        got.error = f"{type(e).__name__} {e.code} {e}"
    response.headers.append((b"x-left", b"behind"))  # whoever has an answer may do with it as it likes
    response.close()


def by_byte(wire: bytes) -> list[bytes]:
    return [wire[i : i + 1] for i in range(len(wire))]


async def in_a_row(sent: Sequence[Sent], how: str = "read", *, places: Iterable[int] = ()) -> tuple[list[Got], int]:
    """All of them on as few connections as can be, each whole in a read, or cut; and how many connections it took."""
    line, got = Line(), []
    places = list(places)
    for one in sent:
        pieces = cut(one.wire, places) + [EOF] * one.eof
        got.append(await line.ask(pieces, how, head_only=one.head_only))
    line.close()
    return got, line.made


async def parsed(sent: Sequence[Sent], how: str = "read") -> list[Got]:
    """Byte by byte, each on a connection of its own."""
    got = []
    for one in sent:
        line = Line()
        got.append(await line.ask(by_byte(one.wire) + [EOF] * one.eof, how, head_only=one.head_only))
        line.close()
    return got


async def alike(sent: Sequence[Sent]) -> list[Got]:
    """What it comes to in every way."""
    expected = await parsed(sent)
    made = 1 + sum(not one.kept for one in expected[:-1])
    for how in HOW:
        assert await in_a_row(sent, how) == (expected, made), how
    for places in ([1], [20], [60], [len(sent[0].wire) - 1], [len(sent[0].wire) // 2], range(0, 10_000, 7)):
        assert await in_a_row(sent, places=places) == (expected, made), places
    return expected


def answer(
    body: bytes, *more: bytes, line: bytes = b"HTTP/1.1 200 OK", length: bytes | None = None, at: int = 9
) -> bytes:
    lines = [DATE, JSON, *more]
    lines.insert(at, b"Content-Length: " + (b"%d" % len(body) if length is None else length))
    return b"\r\n".join([line, *lines, b"", b""]) + body


def chunked(
    *parts: bytes, end: bytes = b"0\r\n\r\n", head: bytes = b"HTTP/1.1 200 OK\r\n", size: bytes = b"%x"
) -> bytes:
    chunks = [size % len(part) + b"\r\n" + part + b"\r\n" for part in parts]
    return head + JSON + b"\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(chunks) + end


HEADERS = [(b"date", DATE[6:]), (b"content-type", b"application/json")]


# --- equal heads

SMUGGLED = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nbad"
BODIES = [b"", b"1", b"hello", b"0\r\n\r\n", b"3\r\nabc\r\n", SMUGGLED, answer(b"hello"), b"x" * 100_000]


@pytest.mark.parametrize("at", [9, 0, 1])
async def test_equal_heads_with_other_lengths(at: int) -> None:
    sent = [Sent(answer(body, at=at)) for body in [b"hello", *BODIES, b"hello", b""]]
    for how in HOW:
        got, made = await in_a_row(sent, how)
        assert made == 1
        for one, body in zip(got, [b"hello", *BODIES, b"hello", b""], strict=True):
            headers = [*HEADERS]
            headers.insert(at, (b"content-length", b"%d" % len(body)))
            assert one == Got(200, headers, body, "", True)


@pytest.mark.parametrize("behind", [0, 1, 4, 5])
async def test_a_body_that_reads_like_the_answer_is_a_body(behind: int) -> None:
    """It begins a read of its own, as an answer whose head came before does."""
    inner = answer(b"hello")
    body = b"12345"[:behind] + inner
    for outer in (answer(body), chunked(body), chunked(b"ab", body, b"cd")):
        begins = outer.index(inner)
        line = Line()
        assert (await line.ask([inner])).body == b"hello"
        got = await line.ask(cut(outer, [begins, begins + len(inner)]))
        assert got.body == (b"ab" + body + b"cd" if b"\r\nab\r\n" in outer else body)
        assert (await line.ask([inner])) == Got(200, [*HEADERS, (b"content-length", b"5")], b"hello", "", True)
        assert line.made == 1
        line.close()


OK = answer(b"hello")
CASES = {
    "a date that changes": [Sent(OK), Sent(OK.replace(b"12:00:00", b"12:00:01")), Sent(OK)],
    "a name in another case": [Sent(OK), Sent(OK.replace(b"Date", b"date")), Sent(OK)],
    "the length's name in another case": [Sent(OK), Sent(OK.replace(b"Content-L", b"content-l")), Sent(OK)],
    "a value in another case": [Sent(OK), Sent(OK.replace(b"application", b"Application")), Sent(OK)],
    "a length in a header, and then the body's": [
        Sent(answer(b"hello", b"X-A: content-length: 3")),
        Sent(answer(b"hello", b"X-A: content-length: 5")),
        Sent(answer(b"hello", b"X-A: content-length: 3")),
    ],
    "another length before it, and then the body's": [
        Sent(answer(b"hello", b"X-Content-Length: 9")),
        Sent(answer(b"hello", b"X-Content-Length: 5")),
        Sent(answer(b"hello", b"X-Content-Length: 9")),
    ],
    "204, and then one with a body": [
        Sent(OK[:-5].replace(b"200 OK", b"204 No Content")),
        Sent(OK.replace(b"200 OK", b"204 No Content")),
        Sent(OK),
    ],
    "304, and then one with a body": [
        Sent(OK[:-5].replace(b"200 OK", b"304 Not Modified")),
        Sent(OK.replace(b"200 OK", b"304 Not Modified")),
        Sent(OK),
    ],
    "another status": [
        Sent(OK),
        Sent(OK.replace(b"200 OK", b"500 OK")),
        Sent(OK.replace(b"200 OK", b"404 OK")),
        Sent(OK),
    ],
    "another reason": [Sent(OK), Sent(OK.replace(b"200 OK", b"200 KO")), Sent(OK)],
    "another version": [Sent(OK), Sent(OK), Sent(OK.replace(b"HTTP/1.1", b"HTTP/1.0")), Sent(OK)],
    "a header more": [Sent(OK), Sent(answer(b"hello", b"X-A: 1")), Sent(OK)],
    "a header twice": [Sent(answer(b"hello", b"X-A: 1", b"X-A: 1"))] * 3,
    "another order": [Sent(OK), Sent(answer(b"hello", at=0)), Sent(OK)],
    "an error with equal heads": [Sent(OK.replace(b"200 OK", b"503 Busy"))] * 3,
    "zeros before the length": [Sent(OK), Sent(answer(b"hello", length=b"05")), Sent(answer(b"hello", length=b"005"))],
    "a space behind the length": [Sent(OK), Sent(answer(b"hello", length=b"5 ")), Sent(OK)],
    "a tab before the length": [Sent(OK), Sent(answer(b"hello", length=b"\t5")), Sent(OK)],
    "another length in a header": [
        Sent(answer(b"hello", b"X-A: content-length: 3")),
        Sent(answer(b"hello!", b"X-A: content-length: 3"), body=b"hello!"),
        Sent(answer(b"hello", b"X-A: content-length: 4")),
    ],
    "another length before it": [Sent(answer(b"hello", b"X-Content-Length: 9"))] * 2
    + [Sent(answer(b"hi", b"X-Content-Length: 8"), body=b"hi")],
    "100 before it": [Sent(OK), Sent(b"HTTP/1.1 100 Continue\r\n\r\n" + OK), Sent(OK)],
    "100 before each": [Sent(b"HTTP/1.1 100 Continue\r\n\r\n" + OK)] * 3,
    "103 with a length before each": [Sent(b"HTTP/1.1 103 Early Hints\r\nContent-Length: 5\r\n\r\n" + OK)] * 3,
    "103 with the same headers before each": [Sent(OK[:-5].replace(b"200 OK", b"103 Early Hints") + OK)] * 3,
    "103 with the same headers, then with the length of all behind it": [
        Sent(OK[:-5].replace(b"200 OK", b"103 Early Hints") + OK),
        Sent(OK[:-5].replace(b"200 OK", b"103 Early Hints").replace(b"h: 5", b"h: %d" % len(OK)) + OK),
    ],
    "102, twice": [Sent(OK), Sent(b"HTTP/1.1 102 Processing\r\n\r\n" * 2 + OK), Sent(OK)],
    "204 with a length": [Sent(OK[:-5].replace(b"200 OK", b"204 No Content"))] * 3,
    "304 with a length": [Sent(OK[:-5].replace(b"200 OK", b"304 Not Modified"))] * 3,
    "204 with a length, then with a body": [
        Sent(OK[:-5].replace(b"200 OK", b"204 No Content")),
        Sent(OK.replace(b"200 OK", b"204 No Content")),
    ],
    "204 with a body all the same": [Sent(OK.replace(b"200 OK", b"204 No Content"))] * 3,
    "HEAD": [Sent(OK), Sent(OK[:-5], head_only=True), Sent(OK), Sent(OK[:-5], head_only=True)],
    "HEAD and a body all the same": [Sent(OK), Sent(OK, head_only=True), Sent(OK)],
    "HEAD first": [Sent(OK[:-5], head_only=True), Sent(OK), Sent(OK)],
    "HEAD without a body to tell of": [
        Sent(answer(b""), body=b""),
        Sent(answer(b""), head_only=True),
        Sent(answer(b""), body=b""),
    ],
    "nothing in it": [Sent(answer(b""), body=b"")] * 3,
    "chunked in between": [Sent(OK), Sent(chunked(b"hello")), Sent(OK), Sent(OK), Sent(chunked(b"hello"))],
    "chunked, equal heads": [Sent(chunked(b"hello")), Sent(chunked(b"he", b"llo")), Sent(chunked(), body=b"")],
    "close": [
        Sent(OK),
        Sent(answer(b"hello", b"Connection: close")),
        Sent(answer(b"hello", b"Connection: close")),
        Sent(OK),
    ],
    "keep-alive": [Sent(answer(b"hello", b"Connection: keep-alive", b"Keep-Alive: timeout=4"))] * 3,
    "HTTP/1.0": [Sent(answer(b"hello", line=b"HTTP/1.0 200 OK"))] * 3,
    "HTTP/1.0, keep-alive": [Sent(answer(b"hello", b"Connection: keep-alive", line=b"HTTP/1.0 200 OK"))] * 3,
    "until it closes": [Sent(OK), Sent(OK.replace(b"Content-Length: 5", b"X-Length: 5"), eof=True), Sent(OK)],
    "breaks off in the body": [Sent(OK), Sent(OK[:-1], eof=True, body=b"hell"), Sent(OK)],
    "breaks off in the head": [Sent(OK), Sent(OK[:-10], eof=True), Sent(OK)],
    "breaks off behind the head": [Sent(OK), Sent(OK[:-5], eof=True, body=b""), Sent(OK)],
    "an empty line before": [Sent(OK), Sent(b"\r\n" + OK), Sent(OK)],
    "something behind": [Sent(OK), Sent(OK + b"x"), Sent(OK)],
    "the next head's first byte behind": [Sent(OK), Sent(OK + b"H"), Sent(OK)],
    "two in one": [Sent(OK), Sent(OK + OK), Sent(OK)],
    "two in one, and others": [Sent(OK), Sent(answer(b"hi") + answer(b"other"), body=b"hi"), Sent(OK)],
}
KEPT = {  # of each answer, by what RFC 9112 says of its connection, and by our own rule for HEAD
    "another version": [True, True, False, True],
    "HEAD": [True, False, True, False],
    "HEAD and a body all the same": [True, False, True],
    "HEAD first": [False, True, True],
    "HEAD without a body to tell of": [True, False, True],
    "204 with a length, then with a body": [True, False],
    "204 with a body all the same": [False] * 3,
    "204, and then one with a body": [True, False, True],
    "304, and then one with a body": [True, False, True],
    "close": [True, False, False, True],
    "HTTP/1.0": [False] * 3,
    "until it closes": [True, False, True],
    "breaks off in the body": [True, False, True],
    "breaks off in the head": [True, False, True],
    "breaks off behind the head": [True, False, True],
    "something behind": [True, False, True],
    "the next head's first byte behind": [True, False, True],
    "two in one": [True, False, True],
    "two in one, and others": [True, False, True],
}


@pytest.mark.parametrize("name", CASES)
async def test_answers_in_a_row_are_read_as_each_alone(name: str) -> None:
    sent = CASES[name]
    got = await alike(sent)
    assert [one.kept for one in got] == KEPT.get(name, [True] * len(sent))
    for one, of in zip(got, sent, strict=True):
        status = next(int(code) for code in re.findall(rb"HTTP/1\.\d (\d+)", of.wire) if int(code) >= 200)
        if of.eof and name.startswith("breaks off"):
            assert one.error.startswith("EngineBroke")
            assert (one.status, one.body) == ((0, b"") if "in the head" in name else (200, of.body))
        else:
            assert (one.status, one.error) == (status, "")
            assert one.body == (b"" if of.head_only or status in (204, 304) else of.body)
            lengths = [value for key, value in one.headers if key == b"content-length"]
            assert len(lengths) == (re.search(rb"^content-length:", of.wire, re.IGNORECASE | re.MULTILINE) is not None)


async def test_an_empty_line_behind_an_answer_is_none_of_the_next() -> None:
    """In its read it is passed over; in a read of its own it comes unasked."""
    got, made = await in_a_row([Sent(OK + b"\r\n")] * 3)
    assert [(one.body, one.kept) for one in got] == [(b"hello", True)] * 3 and made == 1
    got, made = await in_a_row([Sent(OK + b"\r\n")] * 3, places=[len(OK)])
    assert [(one.body, one.kept) for one in got] == [(b"hello", False)] * 3 and made == 3


BROKEN = [b"+5", b"-5", b"5, 5", b"5 5", b"5_0", b"0x5", b"5;", b"", b" ", b"5\x0b", b"\xb2", b"\xef\xbc\x95", b"five"]
BROKEN += [b"9" * 20, b"18446744073709551616", b"5\r\n 5", b"5\nX-A: b", b"5\0", b"5\r\nContent-Length: 5"]
BROKEN += [b"5\r\nContent-Length: 6", b"5\r\ncontent-length: 5", b"5\r\nTransfer-Encoding: chunked", b"5\r\nX : a"]


@pytest.mark.parametrize("length", BROKEN, ids=lambda value: repr(value)[2:-1])
@pytest.mark.parametrize("at", [9, 0])
async def test_a_length_that_is_none_breaks_behind_one_that_was_good(length: bytes, at: int) -> None:
    good = Sent(answer(b"hello", at=at))
    broken = Sent(answer(b"hello", length=length, at=at))
    for how in ("read", "sink"):
        got, made = await in_a_row([good, good, broken, good], how)
        assert [one.body for one in got] == [b"hello", b"hello", b"", b"hello"] and made == 2
        assert [one.kept for one in got] == [True, True, False, True]
        assert got[2] == (await parsed([broken]))[0]
        assert got[2].error.startswith(
            "EngineBroke engine_broke_off engine http://e:1 broke off: what it sent is no valid"
        )


@pytest.mark.parametrize("status", [b"099", b"20", b"0200", b"101", b"1000", b"2 0", b"+20"])
async def test_a_status_that_is_none_breaks_behind_one_that_was_good(status: bytes) -> None:
    odd = Sent(OK.replace(b"200", status, 1))
    got, _ = await in_a_row([Sent(OK), Sent(OK), odd])
    assert got[2] == (await parsed([odd]))[0]
    assert got[2].error.startswith("EngineBroke") and not got[2].kept


# --- when it comes, and what else a connection knows


async def test_behind_half_a_head_a_head_that_came_before_is_a_part_of_it() -> None:
    line = await after(1)
    got = await line.ask([b"HTTP/1.1 500 No\r\nX-A: ", OK])
    headers = [(b"x-a", b"HTTP/1.1 200 OK"), *HEADERS, (b"content-length", b"5")]
    assert got == Got(500, headers, b"hello", "", True)
    assert (await line.ask([OK])).status == 200 and line.made == 1
    line.close()


async def test_what_follows_an_early_head_with_a_length_is_no_body_of_it() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nContent-Length: 5\r\n\r\n"
    line = Line()
    whole, apart = [early + OK], [early, OK]
    for pieces in (whole, [early + OK[:5], OK[5:]], whole, apart, whole, [early + OK[:-5], OK[-5:]], apart):
        got = await line.ask(pieces)
        assert got == Got(200, [*HEADERS, (b"content-length", b"5")], b"hello", "", True)
    assert line.made == 1
    line.close()


@pytest.mark.parametrize("how", HOW[:4])
@pytest.mark.parametrize("until_eof", [False, True])
async def test_a_body_that_reads_like_chunks_is_a_body(how: str, until_eof: bool) -> None:
    parts = [chunk(b"abc"), chunk(b"x" * 20), chunk(b"abc"), b"0\r\n\r\n"]
    body = b"".join(parts)
    head = OK.replace(b"Content-Length: 5", b"X-A: 1" if until_eof else b"Content-Length: %d" % len(body))[:-5]
    for pieces in ([head, *parts], [head + parts[0], *parts[1:]], [head, parts[0] + parts[1], *parts[2:]]):
        line = Line()
        await line.ask([EVENTS, chunk(b"abc"), b"0\r\n\r\n"])
        got = await line.ask([*pieces, EOF] if until_eof else pieces, how)
        assert (got.body, got.error, got.kept) == (body, "", not until_eof)
        line.close()


async def test_what_comes_unasked_is_not_believed_however_equal() -> None:
    line = Line()
    assert (await line.ask([OK])).kept
    connection, wire, _ = line.begin()
    connection.data_received(OK)
    assert line.pool.idle == 1
    connection.data_received(OK)
    assert (line.pool.idle, line.pool.open, wire.aborted) == (0, 0, True)
    line.close()


async def test_a_reader_that_comes_later_gets_the_answer_that_was_its_own() -> None:
    """A connection serves the next request while the answer before is still unread."""
    line = Line()
    responses = []
    for body in (b"first", b"second!", b""):
        connection, _, response = line.begin()
        connection.data_received(answer(body))
        responses.append((body, response))
    assert line.made == 1
    for body, response in responses:
        got = Got()
        await take(response, "read", got)
        assert (got.body, dict(got.headers)[b"content-length"]) == (body, b"%d" % len(body))
        assert [name for name, _ in response.headers].count(b"x-left") == 1
    line.close()


async def test_every_answer_says_anew_how_long_its_connection_may_wait() -> None:
    """A second less than the engine says; what was said on another connection is not said on this one."""
    line = Line()
    for of_connection in ((3, 3, 2, 2, 3), (3, 2), (2, 2)):
        for seconds in of_connection:
            assert (await line.ask([answer(b"hello", b"Keep-Alive: timeout=%d" % seconds)])).kept
            connection = line.pool.take(line.target.origin, line.pool.loop.time())
            assert connection is not None
            left_s = connection.idle_until_s - line.pool.loop.time()
            assert seconds - 1.2 < left_s <= seconds - 1
            line.pool.put(connection)
        connection.drop()
    assert line.made == 3
    line.close()


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_an_answer_before_all_was_sent_ends_its_connection(times: int) -> None:
    class Clogged(FakeTransport):
        def get_write_buffer_size(self) -> int:
            return unsent

    line, unsent = Line(), 0
    connection = Connection(line.target, line.pool, line.pool.loop)
    wire = Clogged()
    connection.connection_made(wire)
    for n in range(times):
        unsent = int(n == times - 1)
        response = connection.begin(b"POST / HTTP/1.1\r\n\r\n", b"", limits(), float("inf"), head_only=False)
        connection.data_received(OK)
        assert response.whole() == b"hello"
        assert wire.aborted is bool(unsent)
        if not unsent:
            assert line.pool.take(line.target.origin, line.pool.loop.time()) is connection
    line.close()


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("what", ["nothing", "a byte"])
async def test_a_connection_that_ends_is_stale_only_behind_an_answer_and_before_the_next(times: int, what: str) -> None:
    line = await after(times - 1)
    connection, _, response = line.begin()
    if what == "a byte":
        connection.data_received(OK[:1])
    connection.connection_lost(None)
    with pytest.raises(EngineBroke, match="it closed the connection before it answered"):
        await response.head()
    assert response.stale is (times > 1 and what == "nothing")
    line.close()


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize(("sent", "stage"), [(b"", "first_byte"), (OK[:20], "first_byte"), (OK[:-2], "idle")])
async def test_an_engine_that_stops_is_given_up_in_time(times: int, sent: bytes, stage: str) -> None:
    line = await after(times - 1)
    connection, wire, response = line.begin(first_byte=0.06, idle=0.06)
    if sent:
        connection.data_received(sent)
    since_s = line.pool.loop.time()
    with pytest.raises(EngineTimeout) as caught:
        await body_of(response)
    assert caught.value.stage == stage and wire.aborted
    assert 0.05 < line.pool.loop.time() - since_s < 0.5
    line.close()


async def test_an_answer_that_was_given_up_is_forgotten_with_its_connection() -> None:
    line = await after(1)
    connection, wire, response = line.begin()
    connection.data_received(OK[:-2])
    response.close()
    assert wire.aborted
    assert (await line.ask([OK])).body == b"hello" and line.made == 2
    line.close()


@pytest.mark.parametrize("size", [60_000, 70_000])
async def test_a_long_head_counts_alone(size: int) -> None:
    long = answer(b"hello", *[b"X-%d: %b" % (i, b"a" * 990) for i in range(size // 1000)])
    got, _ = await in_a_row([Sent(OK), Sent(OK), Sent(long), Sent(long), Sent(OK)], places=[30_000, 61_000])
    assert [one.body for one in got] == [b"hello", b"hello", *[b"hello" if size == 60_000 else b""] * 2, b"hello"]
    for one in got[2:4]:
        assert ("longer than 65536 bytes" in one.error) is (size == 70_000)


# --- streams in chunks

EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes, size: bytes = b"%x", extension: bytes = b"") -> bytes:
    return size % len(data) + extension + b"\r\n" + data + b"\r\n"


CHUNKS = st.lists(
    st.builds(
        chunk,
        st.sampled_from(
            [b"a", b"data: 1\n\n", b"0\r\n\r\n", b"3\r\nabc\r\n", b"\r\n", b"x" * 17, b"y" * 300, chunk(b"z" * 10)]
        ),
        st.sampled_from([b"%x", b"%X", b"0%x", b"000%X"]),
        st.sampled_from([b"", b"", b"", b";a=b", b";a", b" ;a=b"]),
    ),
    max_size=8,
)
ENDS = [
    b"0\r\n\r\n",
    b"0\r\n\r\n",
    b"000\r\n\r\n",
    b"0;a=b\r\n\r\n",
    b"0\r\nX-T: 1\r\n\r\n",
    b"0\r\nContent-Type: x\r\nX-T:\r\n\r\n",
]
BAD = [
    b"0x1\r\na\r\n",
    b"+1\r\na\r\n",
    b"-1\r\na\r\n",
    b"1_0\r\na\r\n",
    b"g\r\n",
    b"\r\n",
    b" 1\r\na\r\n",
    b"1\r\nab\r\n",
    b"1\na\r\n",
]
BAD += [
    b"1\r\na\n",
    b"1\r\na\rx",
    b"2\r\na\r\n0",
    b"1 1\r\na\r\n",
    b"1" + b"0" * 16 + b"\r\na\r\n",
    b";a\r\n",
    b"1\r\naa",
    b"\xb2\r\nab\r\n",
]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    chunks=CHUNKS,
    end=st.sampled_from([*ENDS, *ENDS, EOF, *BAD]),
    how=st.sampled_from(HOW[:4]),
    together=st.lists(st.booleans(), min_size=10, max_size=10),
    places=st.sets(st.integers(1, 900), max_size=5),
)
async def test_a_stream_is_read_the_same_however_its_chunks_come(
    chunks: list[bytes], end: bytes, how: str, together: list[bool], places: set[int]
) -> None:
    wire = EVENTS + b"".join(chunks) + end
    pieces = [EVENTS]
    for one, joined in zip([*chunks, end], together, strict=False):
        if joined:
            pieces[-1] += one
        elif one:
            pieces.append(one)
    breaks = [EOF] if end == EOF else []
    line = Line()
    expected = await line.ask(by_byte(wire) + breaks)
    for way in (pieces, [EVENTS, *filter(None, [*chunks, end])], cut(wire, places), [wire]):
        got = await line.ask(way + breaks, how)
        if not same_but_for_the_break(got, expected):
            assert got == expected
    line.close()


def same_but_for_the_break(got: Got, expected: Got) -> bool:
    """Of a chunk that breaks, what came of its data before may have been handed on or not."""
    return bool(expected.error) and replace(got, body=b"") == replace(expected, body=b"")


OPEN = chunk(b"one")
STREAMS = {  # reads behind the head; what is read of them, or None where it breaks
    "chunk by chunk": ([OPEN, chunk(b"two"), chunk(b"3"), b"0\r\n\r\n"], b"onetwo3"),
    "several a read": ([OPEN + chunk(b"two"), chunk(b"3") + b"0\r\n\r\n"], b"onetwo3"),
    "a chunk and a half": ([OPEN + b"3\r\nt", b"wo\r\n", OPEN, b"0\r\n\r\n"], b"onetwoone"),
    "cut in the size": ([OPEN, b"1", b"0\r\n0123456789abcdef\r\n", OPEN, b"0\r\n\r\n"], b"one0123456789abcdefone"),
    "cut in the size, and the rest reads like a chunk": (
        [
            OPEN,
            b"1",
            b"5\r\nhello\r\n",
            b"0123456789abcd\r\n",
            OPEN + b"1",
            b"5\r\nhello\r\n",
            b"0123456789abcd\r\n0\r\n\r\n",
        ],
        b"onehello\r\n0123456789abcdonehello\r\n0123456789abcd",
    ),
    "cut behind the size": ([OPEN, b"3", b"\r\ntwo\r\n", OPEN, b"0\r\n\r\n"], b"onetwoone"),
    "cut in its line end": ([OPEN, b"3\r", b"\ntwo\r\n", OPEN, b"0\r\n\r\n"], b"onetwoone"),
    "cut behind its line end": ([OPEN, b"3\r\n", b"two\r\n", OPEN, b"0\r\n\r\n"], b"onetwoone"),
    "cut before the end": ([OPEN, b"3\r\ntwo", b"\r\n", OPEN, b"0\r\n\r\n"], b"onetwoone"),
    "cut in the end": ([OPEN, b"3\r\ntwo\r", b"\n", OPEN, b"0\r\n\r\n"], b"onetwoone"),
    "cut in the end, more behind": ([OPEN, b"3\r\ntwo\r", b"\n" + OPEN, OPEN, b"0\r\n\r\n"], b"onetwooneone"),
    "a chunk in a chunk": ([b"10\r\n", OPEN, OPEN, b"\r\n", OPEN, b"0\r\n\r\n"], OPEN + OPEN + b"one"),
    "a chunk in a chunk, begun": ([OPEN, b"11\r\nx", OPEN, OPEN, b"\r\n0\r\n\r\n"], b"onex" + OPEN + OPEN),
    "a last chunk in a chunk": ([OPEN, b"5\r\n", b"0\r\n\r\n", b"\r\n", b"0\r\n\r\n"], b"one0\r\n\r\n"),
    "an answer in a chunk": ([OPEN, b"%x\r\n" % len(OK), OK, b"\r\n", OPEN, b"0\r\n\r\n"], b"one" + OK + b"one"),
    "only a size where data is due": ([b"5\r\n", b"3\r\nab", b"\r\n", b"0\r\n\r\n"], b"3\r\nab"),
    "capitals and zeros": ([chunk(b"x" * 10, b"%X"), chunk(b"y" * 171, b"0%X"), b"00\r\n\r\n"], b"x" * 10 + b"y" * 171),
    "extensions": ([chunk(b"one", extension=b";a=b"), chunk(b"two", extension=b';a="1"'), b"0;z\r\n\r\n"], b"onetwo"),
    "the end cut": ([OPEN, b"0", b"\r\n\r\n"], b"one"),
    "the end cut, later": ([OPEN, b"0\r\n", b"\r\n"], b"one"),
    "trailers": ([OPEN, b"0\r\n", b"X-T: 1\r\n", b"\r\n"], b"one"),
    "a trailer that reads like a chunk": ([OPEN, b"0\r\n", OPEN, b"\r\n"], None),
    "nothing but the end": ([b"0\r\n\r\n"], b""),
    "0x": ([OPEN, b"0x3\r\ntwo\r\n", b"0\r\n\r\n"], None),
    "plus": ([OPEN, b"+3\r\ntwo\r\n", b"0\r\n\r\n"], None),
    "minus": ([OPEN, b"-3\r\ntwo\r\n", b"0\r\n\r\n"], None),
    "underscore": ([OPEN, b"0_3\r\ntwo\r\n", b"0\r\n\r\n"], None),
    "a space before": ([OPEN, b" 3\r\ntwo\r\n", b"0\r\n\r\n"], None),
    "no size": ([OPEN, b"\r\ntwo\r\n", b"0\r\n\r\n"], None),
    "a size of no digits": ([OPEN, b"\xc2\xb3\r\ntwo\r\n", b"0\r\n\r\n"], None),
    "a form feed in the size": ([OPEN, b"3\x0c\r\ntwo\r\n", b"0\r\n\r\n"], None),
    "a NUL in the size": ([OPEN, b"3\0\r\ntwo\r\n", b"0\r\n\r\n"], None),
    "a size without end": ([OPEN, b"1" + b"0" * 16 + b"\r\ntwo\r\n"], None),
    "a bare LF behind the size": ([OPEN, b"3\ntwo\r\n", b"0\r\n\r\n"], None),
    "a bare LF at the end": ([OPEN, b"3\r\ntwo\n", b"0\r\n\r\n"], None),
    "a bare CR at the end": ([OPEN, b"3\r\ntwo\rx", b"0\r\n\r\n"], None),
    "longer than it says": ([OPEN, b"3\r\ntwo!\r\n", b"0\r\n\r\n"], None),
    "longer by a line end": ([OPEN, b"3\r\ntwo\r\n\r\n", b"0\r\n\r\n"], None),
    "shorter than it says": ([OPEN, b"4\r\ntwo\r\n", OPEN, b"0\r\n\r\n"], None),
    "breaks off between chunks": ([OPEN, OPEN, EOF], None),
    "breaks off in a chunk": ([OPEN, b"3\r\ntw", EOF], None),
    "breaks off before its last line end": ([OPEN, b"0\r\n", EOF], None),
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("how", HOW[:4])
async def test_a_stream_is_what_its_chunks_say(name: str, how: str) -> None:
    reads, body = STREAMS[name]
    wire = EVENTS + b"".join(reads)
    ends = [EOF] if EOF in reads else []
    for before in ([], [OK], [EVENTS + OPEN + b"0\r\n\r\n"], [EVENTS, OPEN, OPEN, b"0\r\n\r\n"]):
        line = Line()
        if before:
            assert (await line.ask(before, how)).kept
        got = await line.ask([EVENTS, *reads], how)
        of_bytes = await line.ask(by_byte(wire) + ends, how)
        if body is None:
            assert got.error.startswith("EngineBroke engine_broke_off") and not got.kept
            assert got.body.startswith(b"one"[: len(got.body)]) and b"0\r\n" not in got.body
            assert replace(got, body=b"") == replace(of_bytes, body=b"")
        else:
            assert got == of_bytes == Got(200, got.headers, body, "", True)
            assert [name for name, _ in got.headers] == [b"content-type", b"transfer-encoding"]
        line.close()


async def test_a_chunk_is_handed_on_in_the_turn_in_which_it_came() -> None:
    line = Line()
    connection, _, response = line.stream()
    came: list[bytes] = []
    piping = asyncio.ensure_future(response.pipe(lambda data: came.append(data) is None, turns))
    await turns()
    for n in range(1, 20):
        connection.data_received(chunk(b"%d" % n * n))
        assert came == [b"%d" % m * m for m in range(1, n + 1)]
    connection.data_received(b"0\r\n\r\n")
    await piping
    assert line.pool.idle == 1
    line.close()


async def test_a_sink_that_is_full_gets_no_more_before_it_is_drained() -> None:
    line = Line()
    connection, _, response = line.stream()
    came: list[bytes] = []
    room = asyncio.Event()
    piping = asyncio.ensure_future(response.pipe(lambda data: came.append(data) or len(came) != 2, room.wait))  # type: ignore[func-returns-value,arg-type]
    await turns()
    for n in range(5):
        connection.data_received(chunk(b"%d" % n))
    await turns()
    assert came == [b"0", b"1"]
    connection.data_received(chunk(b"5"))
    room.set()
    await turns()
    assert came == [b"0", b"1", b"2345"]
    connection.data_received(chunk(b"6"))
    assert came == [b"0", b"1", b"2345", b"6"]
    connection.data_received(b"0\r\n\r\n")
    await piping
    line.close()


@pytest.mark.parametrize("how", ["nobody", "full sink"])
async def test_chunks_that_nobody_takes_stop_the_reading(how: str) -> None:
    line = Line()
    connection, wire, response = line.stream()
    room, came = asyncio.Event(), bytearray()

    def sink(data: bytes) -> bool:
        came.extend(data)
        return room.is_set()

    piping = asyncio.ensure_future(response.pipe(sink, room.wait)) if how == "full sink" else None
    await turns()
    count = 0
    while wire.reading:
        connection.data_received(chunk(b"x" * 30_000))
        count += 1
        assert count < 20
    # 256 KiB wait; what the sink was given first does not count to them.
    assert count == 9 + (how == "full sink")
    room.set()
    piping = piping or asyncio.ensure_future(response.pipe(sink, room.wait))
    await until(lambda: wire.reading)
    connection.data_received(b"0\r\n\r\n")
    await piping
    assert len(came) == count * 30_000 and line.pool.idle == 1
    line.close()


@pytest.mark.parametrize("how", ["sink", "read"])
async def test_each_chunk_gives_an_engine_time_anew_and_no_more_than_that(how: str) -> None:
    line, idle_s = Line(), 0.1
    connection, wire, response = line.stream(idle=idle_s)
    got = Got()
    taking = asyncio.ensure_future(take(response, how, got))
    for _ in range(6):
        await asyncio.sleep(idle_s * 0.6)
        assert not wire.aborted
        connection.data_received(chunk(b"x"))
    since_s = line.pool.loop.time()
    await taking
    assert idle_s * 0.9 < line.pool.loop.time() - since_s < idle_s * 4
    assert got.body == b"x" * 6 and "EngineTimeout" in got.error and wire.aborted
    line.close()


async def test_all_of_a_stream_has_its_time_however_its_chunks_come() -> None:
    line = Line()
    connection, wire, _ = line.begin()
    connection.data_received(OK)
    total_at_s = line.pool.loop.time() + 0.15
    assert line.pool.take(line.target.origin, line.pool.loop.time()) is connection
    response = connection.begin(b"POST / HTTP/1.1\r\n\r\n", b"", limits(total=0.15), total_at_s, head_only=False)
    connection.data_received(EVENTS)
    got = Got()
    taking = asyncio.ensure_future(take(response, "sink", got))
    while not wire.aborted:
        await asyncio.sleep(0.02)
        assert line.pool.loop.time() < total_at_s + 1
        if not wire.aborted:
            connection.data_received(chunk(b"x"))
    await taking
    assert "EngineTimeout" in got.error and "did not finish its answer" in got.error and len(got.body) > 2
    line.close()


@pytest.mark.parametrize("behind", ["trailers", "a chunk's extension", "a size"])
async def test_many_chunks_are_no_long_head_and_what_surrounds_the_next_is_bounded(behind: str) -> None:
    line = Line()
    connection, wire, response = line.stream()
    got = Got()
    taking = asyncio.ensure_future(take(response, "sink", got))
    await turns()
    for _ in range(15_000):  # 90 KB, of which 75 surround
        connection.data_received(b"1\r\na\r\n")
    assert got.body == b"a" * 15_000 and not wire.aborted
    connection.data_received(b"3\r\n")
    connection.data_received(b"two\r\n")
    assert got.body.endswith(b"atwo") and not wire.aborted
    start = {"trailers": b"0\r\nX-T: ", "a chunk's extension": b"1;", "a size": b"0"}[behind]
    connection.data_received(start)
    for _ in range(70):
        if not wire.aborted:
            connection.data_received((b"0" if behind == "a size" else b"a") * 1000)
    await taking
    assert "longer than 65536 bytes" in got.error and not got.kept
    line.close()


async def test_a_stream_whose_client_left_takes_its_connection_with_it() -> None:
    line = Line()
    connection, wire, response = line.stream()
    connection.data_received(OPEN)
    piping: asyncio.Future[Any] = asyncio.ensure_future(response.pipe(lambda data: True, turns))
    await turns()
    connection.data_received(OPEN)
    piping.cancel()
    await turns()
    response.close()
    assert wire.aborted and line.pool.open == 0
    connection.data_received(OPEN)  # it was on its way
    assert line.pool.open == 0
    line.close()


async def test_a_sink_that_closes_its_answer_gets_no_more() -> None:
    line = Line()
    connection, _, response = line.begin()
    calls: list[bytes] = []

    def sink(data: bytes) -> bool:
        calls.append(data)
        response.close()  # as one does whose client has gone
        return True

    connection.data_received(EVENTS)
    piping = asyncio.ensure_future(response.pipe(sink, turns))
    await turns()
    connection.data_received(OPEN)
    connection.data_received(OPEN)
    with pytest.raises(EngineBroke):
        await piping
    assert calls == [b"one"] and line.pool.open == 0
    line.close()
