"""StreamTail: whatever the fragmentation, it knows `[DONE]` and event boundaries."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.http.sse import KEEP_BYTES, StreamTail


def tail_of(stream: bytes, cuts: list[int] | None = None) -> StreamTail:
    tail = StreamTail()
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts or [])})
    for start, end in itertools.pairwise(edges):
        tail.feed(stream[start:end])
    return tail


def lines_of(stream: bytes) -> list[bytes]:
    """Lines as the standard cuts them; the last, unended one is a line too."""
    return stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")


def events_of(stream: bytes) -> list[bytes]:
    """The data of each event that a standard parser would dispatch."""
    events: list[bytes] = []
    data: list[bytes] = []
    for line in lines_of(stream)[:-1]:
        if not line:
            if data:
                events.append(b"\n".join(data))
            data = []
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
    return events


cuts = st.lists(st.integers(0, 10**6), max_size=12)
pieces = st.sampled_from(
    [b"data: [DONE]", b"data:[DONE]", b"data: x", b": note", b"[DONE]", b"data: [DONE]x", b" data: [DONE]", b"event: e"]
    + [b"data: \xf0\x9f\x98\x80", b"\xff\xfe", b"y" * KEEP_BYTES, b"z" * 5000]
)
ends = st.sampled_from([b"\n", b"\r\n", b"\r", b"\n\n", b"\r\n\r\n", b"", b"\n\r\n", b"\r\r"])
streams = st.lists(st.tuples(pieces, ends), max_size=8).map(lambda parts: b"".join(a + b for a, b in parts))


@settings(deadline=None)
@given(streams, cuts)
def test_done_is_seen_whatever_the_fragmentation(stream: bytes, at: list[int]) -> None:
    expected = any(line in (b"data: [DONE]", b"data:[DONE]") for line in lines_of(stream))
    assert tail_of(stream, at).done is expected


@settings(deadline=None)
@given(streams, cuts)
def test_an_event_after_the_missing_newlines_is_an_event_of_its_own(stream: bytes, at: list[int]) -> None:
    closed = stream + tail_of(stream, at).missing_newlines()
    assert events_of(closed + b"data: {}\n\n") == [*events_of(closed), b"{}"]


@settings(deadline=None)
@given(streams)
def test_byte_by_byte_is_the_same_as_in_one_piece(stream: bytes) -> None:
    one, many = tail_of(stream), tail_of(stream, list(range(len(stream))))
    assert (one.done, one.missing_newlines()) == (many.done, many.missing_newlines())


@pytest.mark.parametrize(
    ("stream", "missing"),
    [
        (b"", b""),
        (b"data: x\n\n", b""),
        (b"data: x\r\n\r\n", b""),
        (b"data: x\r\r", b"\n"),  # the second CR may be half of a CRLF; one newline more does no harm
        (b"data: x\n", b"\n"),
        (b"data: x\r\n", b"\n"),
        (b"data: x\r", b"\n\n"),
        (b"data: x\r\n\r", b"\n"),
        (b"data: x", b"\n\n"),
        (b"data: \xf0\x9f", b"\n\n"),
        (b"\n", b""),
    ],
)
def test_missing_newlines_by_hand(stream: bytes, missing: bytes) -> None:
    assert tail_of(stream).missing_newlines() == missing


def test_done_in_a_large_chunk_and_over_its_seam() -> None:
    done = b"\ndata: [DONE]\n\n"
    big = b"x" * 100_000
    assert tail_of(b"data: " + big + b"\n" + done + b"data: " + big).done
    for cut in range(100_000 - 2, 100_000 + len(done) + 2):
        assert tail_of(big + done + big, [cut]).done


def test_done_inside_of_a_value_is_not_the_end() -> None:
    assert not tail_of(b'data: {"text":"data: [DONE]"}\n\n').done
    assert not tail_of(b"data: [DONE]x\n\n").done


def test_memory_is_bounded() -> None:
    tail = tail_of(b"x" * 10_000_000)
    assert len(tail._tail) == KEEP_BYTES
