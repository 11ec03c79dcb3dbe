"""Heads that come again: which are kept, and which bytes are taken for the same head."""

from __future__ import annotations

import re

import pytest

from app.errors import BadRequest, Headers
from app.heads import Head, Written, is_to_be_kept, lines_of, with_header

HEAD = b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nX-Y: z\r\n\r\n"
HEADERS: Headers = [(b"host", b"a"), (b"content-length", b"5"), (b"x-y", b"z")]


def kept(data: bytes = HEAD + b"hello", headers: Headers = HEADERS) -> Head | None:
    return Head.begins(data, headers)


def test_the_same_head_is_found_with_another_length() -> None:
    head = kept()
    assert head is not None
    found = head.of(HEAD.replace(b"h: 5", b"h: 1234") + b"body")
    assert found is not None
    assert found == [(b"host", b"a"), (b"content-length", b"1234"), (b"x-y", b"z")]
    assert (found.length, found.end, found.head) == (1234, len(HEAD) + 3, head)


def test_what_was_found_before_stays_as_it_was() -> None:
    head = kept()
    assert head is not None
    first, second = head.of(HEAD), head.of(HEAD.replace(b"h: 5", b"h: 6"))
    assert first == HEADERS and second is not None and second[1] == (b"content-length", b"6")


@pytest.mark.parametrize(
    "data",
    [
        HEAD.replace(b"X-Y: z\r\n", b""),
        HEAD.replace(b"X-Y: z\r\n", b"X-Y: z\r\nContent-Length: 5\r\n"),
        HEAD.replace(b": 5", b": 5, 5"),
        HEAD.replace(b": 5", b": 5_0"),
        HEAD.replace(b": 5", b": 0x5"),
        HEAD.replace(b": 5", b": " + b"1" * 13),
        b"\r\n" + HEAD,
        b"",
    ],
)
def test_what_is_not_the_same_is_another_head(data: bytes) -> None:
    head = kept()
    assert head is not None and head.of(data) is None


def test_any_one_byte_makes_another_head_but_for_the_digits_of_its_length() -> None:
    head = kept()
    before, behind = HEAD.split(b"5")
    same = re.compile(re.escape(before) + b"([0-9]+)" + re.escape(behind))
    assert head is not None
    for at in range(len(HEAD)):
        assert head.of(HEAD[:at] + HEAD[at + 1 :]) is None
        for byte in map(bytes, zip(range(256), strict=True)):
            for data in (HEAD[:at] + byte + HEAD[at + 1 :], HEAD[:at] + byte + HEAD[at:]):
                found, expected = head.of(data), same.match(data)
                assert (found is not None) is (expected is not None), data
                if found is not None and expected is not None:
                    assert (found.length, found.end) == (int(expected[1]), expected.end())


@pytest.mark.parametrize(
    ("data", "headers"),
    [
        pytest.param(HEAD.replace(b"X-Y: z\r\n", b"X-Y: z\n"), HEADERS, id="a bare LF"),
        pytest.param(HEAD.replace(b"X-Y: z", b"X-Y: z\rw"), HEADERS, id="a bare CR"),
        pytest.param(HEAD.replace(b"X-Y: z", b"X-Y: z\r\n w"), HEADERS, id="a folded line"),
        pytest.param(HEAD.replace(b"X-Y: z", b"X-Y: z\0"), HEADERS, id="a NUL"),
        pytest.param(b"\r\n" + HEAD, HEADERS, id="an empty line before it"),
        pytest.param(HEAD[:-2], HEADERS, id="no end"),
        pytest.param(HEAD.replace(b"Content-Length: 5\r\n", b""), [HEADERS[0], HEADERS[2]], id="no length"),
        pytest.param(HEAD.replace(b": 5", b": 5 "), HEADERS, id="a blank behind the length"),
        pytest.param(HEAD.replace(b"Content-Length: ", b"Content-Length:\t"), HEADERS, id="a tab before the length"),
        pytest.param(HEAD.replace(b"Content-Length", b"content-LENGTH"), HEADERS, id="a spelling that nobody uses"),
        pytest.param(
            HEAD.replace(b"X-Y: z", b"Content-Length: 5"), [*HEADERS[:2], HEADERS[1]], id="two lengths that are equal"
        ),
        pytest.param(HEAD, [HEADERS[0], (b"content-length", b"6"), HEADERS[2]], id="not what was read"),
        pytest.param(HEAD, HEADERS[:2], id="fewer headers than lines"),
        pytest.param(HEAD.replace(b"z", b"z" * 9000), HEADERS, id="too long to be kept"),
    ],
)
def test_a_head_that_could_be_read_in_two_ways_is_not_kept(data: bytes, headers: Headers) -> None:
    assert kept(data, headers) is None


def test_who_never_sends_a_head_twice_pays_for_few() -> None:
    tried = [seen for seen in range(1, 65) if is_to_be_kept(min(seen - 1, 4), seen)]
    assert tried == [1, 2, 3, 4, 16, 32, 48, 64]


def test_lines() -> None:
    assert lines_of([(b"a", b"1"), (b"b", b"")]) == b"a: 1\r\nb: \r\n"
    assert lines_of([]) == b""
    written = Written([(b"a", b"1")], b"a: 1\r\n")
    assert written == [(b"a", b"1")] and written.lines == b"a: 1\r\n"


@pytest.mark.parametrize("bad", [b"1\r\nb: 2", b"\n", b"\r", b"\0"])
def test_a_header_is_one_line(bad: bytes) -> None:
    with pytest.raises(BadRequest, match="'a' holds a line end or a NUL"):
        lines_of([(b"ok", b"1"), (b"a", bad)])


# --- headers as written -----------------------------------------------------------------------------------------------

PLAIN: Headers = [(b"accept", b"*/*"), (b"x-accept-encoding", b"gzip"), (b"accept-encoding", b"gzip"), (b"x", b"y")]


@pytest.mark.parametrize(
    "headers",
    [
        PLAIN,
        PLAIN[2:],
        PLAIN[:2],
        PLAIN[2:3],
        [],
        [*PLAIN, (b"accept-encoding", b"gzip"), (b"accept-encoding", b"br")],
        [(b"a", b"accept-encoding: gzip"), (b"accept-encoding", b"gzip")],
        [(b"accept-encoding", b""), (b"a", b""), (b"accept-encoding", b"")],
    ],
)
def test_one_header_takes_the_place_of_those_of_its_name(headers: Headers) -> None:
    wanted = [header for header in headers if header[0] != b"accept-encoding"] + [(b"accept-encoding", b"identity")]
    before = Written(headers, lines_of(headers))
    found = with_header(before, b"accept-encoding", b"identity")
    assert found == wanted and type(found) is Written
    assert found.lines == b"".join(name + b": " + value + b"\r\n" for name, value in wanted)
    assert before == headers and before.lines == lines_of(headers)
    unwritten = with_header(headers, b"accept-encoding", b"identity")
    assert unwritten == wanted and type(unwritten) is list


@pytest.mark.parametrize("end", [b"\r", b"\n", b"\0"])
def test_a_header_that_would_be_two_takes_nobody_s_place(end: bytes) -> None:
    with pytest.raises(BadRequest, match="authorization"):
        with_header(Written(PLAIN, lines_of(PLAIN)), b"authorization", b"Bearer a" + end + b"b: c")
