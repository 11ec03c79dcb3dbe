"""Random requests, some of them broken, in random pieces: an engine sees what h11 makes of the bytes, or nothing.

h11 is a second reader who has nothing in common with ours (llhttp). Where it is the more lenient one, ours may refuse;
where it is the stricter one, ours must not pass on what h11 would not have passed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import h11
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.http.in_process import Face
from tests.support.loop import LoopThread
from tests.support.recorder import Received, Recorder

EXAMPLES = 120

BODIES = st.text(max_size=40).map(lambda text: json.dumps({"model": "recorded", "prompt": text}).encode())
SMUGGLED = b"POST /v1/smuggled HTTP/1.1\r\nHost: s\r\nContent-Length: 2\r\n\r\n{}"
TARGETS = st.sampled_from(
    [b"/v1/completions", b"/v1/x?q=1", b"/v1/a%20b", b"http://h/v1/x", b"/health", b"*", b"/v1/../x"]
)
METHODS = st.sampled_from([b"POST"] * 8 + [b"GET", b"PUT", b"post", b"CONNECT"])
VERSIONS = st.sampled_from([b"HTTP/1.1"] * 10 + [b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.2"])
GOOD = st.sampled_from(
    [
        b"X-A: 1",
        b"X-A:1 ",
        b"x-b:\t2\t",
        b"X-C: \xff",
        b"X_D: 4",
        b"X-E:",
        b"Content-Type: application/json",
        b"Connection: close",
        b"Connection: keep-alive, X-A",
        b"Connection: upgrade",
        b"Upgrade: h2c",
        b"Expect: 100-continue",
        b"TE: trailers",
        b"Trailer: X-A",
        b"Keep-Alive: timeout=5",
        b"X-Request-Id: mine",
        b"Accept-Encoding: gzip",
    ]
)
BAD = st.sampled_from(
    [
        b"Content-Length: 5",
        b"Content-Length: 0",
        b"Content-Length : 5",
        b"Content_Length: 5",
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: identity",
        b"Transfer-Encoding: xchunked",
        b"Transfer-Encoding:\x0bchunked",
        b"transfer-encoding: chunked, identity",
        b"Host: other",
        b" folded: 1",
        b"\tfolded: 1",
        b"no colon",
        b": no name",
        b"X\x00: 1",
        b"X-N: a\x00b",
        b"X-R: a\rb",
        b"X-L: a\nTransfer-Encoding: chunked",
    ]
)
SIZES = st.sampled_from([b"%X", b"0%x", b"%x;a=b", b"%x ", b" %x", b"0x%x", b"+%x", b"-%x", b"%x\t", b"1%016x"])
REST = st.sampled_from([b"", b"", b"", SMUGGLED])
OLD_AND_NEW = st.sampled_from([b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0"])
ENDS = st.sampled_from([b"\r\n"] * 8 + [b"\n", b"\r", b"\r\r\n", b"\n\r\n"])
NOISE = st.sampled_from(
    [b"\r", b"\n", b"\r\n", b" ", b"\t", b":", b"\0", b"0", b"1", b";", b",", b"\r\n\r\n", b"\x7f", b"\xff", b""]
)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    body = draw(BODIES)
    # Several things that are wrong at once only hide each other.
    wrong = draw(st.sampled_from(["", "", "line", "header", "header", "ends", "length", "both", "size", "host"]))
    headers = [b"Host: h"] if wrong != "host" else []
    headers += draw(st.lists(GOOD, max_size=4))
    if wrong == "header":
        headers.append(draw(BAD))
    ends = ENDS if wrong == "ends" else st.just(b"\r\n")
    length, payload = len(body), body
    if wrong in ("both", "size") or draw(st.booleans()):
        headers.append(b"Transfer-Encoding: chunked")
        cuts = sorted({0, len(body), *draw(st.lists(st.integers(0, len(body)), max_size=3))})
        size = draw(SIZES) if wrong == "size" else b"%x"
        payload = b"".join(size % (b - a) + draw(ends) + body[a:b] + draw(ends) for a, b in pairwise(cuts))
        payload += b"0\r\n" + draw(st.sampled_from([b"", b"X-T: 1\r\n", b"Content-Length: 3\r\n"])) + b"\r\n"
    elif wrong == "length":
        length = draw(st.integers(0, len(body) + len(SMUGGLED)))
    if payload is body or wrong == "both":
        headers.append(b"Content-Length: %d" % length)
    line = (METHODS, TARGETS, VERSIONS) if wrong == "line" else (st.just(b"POST"), st.just(b"/v1/x"), OLD_AND_NEW)
    lines = [b"%b %b %b" % tuple(map(draw, line)), *draw(st.permutations(headers))]
    return b"".join(one + draw(ends) for one in lines) + draw(ends) + payload + draw(REST)


@st.composite
def wires(draw: st.DrawFn) -> list[bytes]:
    """Up to three messages, a few bytes of them changed, in pieces."""
    wire = b"".join(draw(st.lists(messages(), min_size=1, max_size=3)))
    for _ in range(draw(st.sampled_from([0, 0, 0, 0, 1, 2]))):
        at = draw(st.integers(0, len(wire)))
        wire = wire[:at] + draw(NOISE) + wire[at + draw(st.integers(0, 1)) :]
    cuts = draw(st.lists(st.integers(1, max(1, len(wire) - 1)), max_size=8))
    places = sorted({0, len(wire), *(cut for cut in cuts if cut < len(wire))})
    return [wire[a:b] for a, b in pairwise(places)]


@dataclass
class Seen:
    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


def reference(wire: bytes) -> list[Seen]:
    """All requests that h11 finds in the bytes, up to the first that is none or the last of its connection."""
    found: list[Seen] = []
    # Line ends between two messages are nobody's: llhttp passes over any number of both kinds (RFC 9112, 2.2).
    while wire := wire.lstrip(b"\r\n"):
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=2**20)
        # Several spaces before the target are one to llhttp, as RFC 9112, 3 allows; what is read is the same.
        connection.receive_data(re.sub(rb"^([A-Z]+) +", rb"\1 ", wire))
        seen = _one(connection)
        if seen is None:
            break
        found.append(seen)
        connection.send(h11.Response(status_code=400, headers=[("content-length", "0")]))
        connection.send(h11.EndOfMessage())
        if connection.our_state is not h11.DONE:
            break
        wire = connection.trailing_data[0]
    return found


def _one(connection: h11.Connection) -> Seen | None:
    seen: Seen | None = None
    while True:
        try:
            event_ = connection.next_event()
        except h11.RemoteProtocolError:
            return None
        if isinstance(event_, h11.Request):
            seen = Seen(event_.method, event_.target, [(bytes(n), bytes(v)) for n, v in event_.headers], b"")
        elif isinstance(event_, h11.Data) and seen is not None:
            seen.body += bytes(event_.data)
        else:
            return seen if isinstance(event_, h11.EndOfMessage) else None


def same(received: Received, seen: Seen) -> bool:
    """Whether the engine got this request: its body, its target, and of its headers none that it did not have."""
    target = seen.target.removeprefix(b"http://h").partition(b"#")[0]
    ours = (b"host", b"content-length", b"x-request-id")
    others = [h for h in received.headers if h[0] not in ours and not h[0].startswith(b"x-forwarded-")]
    kept = Counter((name, value.strip()) for name, value in others)
    return (received.method, received.target, received.body) == (seen.method, target, seen.body) and not kept - Counter(
        (name, value.strip()) for name, value in seen.headers
    )


@pytest.fixture(scope="module")
def recorder(engine_loop: LoopThread) -> Iterator[Recorder]:
    with Recorder(engine_loop) as one:
        yield one


@pytest.fixture(scope="module")
def face(recorder: Recorder, engine_loop: LoopThread) -> Iterator[Face]:
    one = Face(recorder.url, engine_loop)
    yield one
    one.close()


@pytest.mark.timeout(120)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(pieces=wires())
def test_an_engine_sees_what_the_reference_says_or_nothing(face: Face, recorder: Recorder, pieces: list[bytes]) -> None:
    recorder.forget()
    face.say(pieces)
    wire = b"".join(pieces)
    expected = iter(reference(wire))
    posts = recorder.posts
    event(f"{len(posts)} reached the engine")
    for received in posts:
        # In their order, each at most once: whatever is left over was refused.
        assert any(same(received, seen) for seen in expected), f"{received.raw!r} is nowhere in {wire!r}"


PLAIN = st.builds(
    lambda body, headers, chunk: (body, headers, chunk),
    BODIES,
    st.lists(st.sampled_from([b"X-A: 1", b"X-B:2", b"X-C: \xff", b"Accept: */*"]), max_size=4),
    st.integers(0, 30),
)


@pytest.mark.timeout(120)
@settings(max_examples=EXAMPLES // 5, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=st.lists(PLAIN, min_size=1, max_size=4), cuts=st.sets(st.integers(1, 800), max_size=12))
def test_what_is_plain_reaches_the_engine_however_it_is_cut(
    face: Face, recorder: Recorder, drawn: list[tuple[bytes, list[bytes], int]], cuts: set[int]
) -> None:
    wire = b""
    for body, headers, chunk in drawn:
        framing = b"Transfer-Encoding: chunked" if chunk else b"Content-Length: %d" % len(body)
        wire += b"\r\n".join([b"POST /v1/completions HTTP/1.1", b"Host: h", *headers, framing, b"", b""])
        if chunk:
            for at in range(0, len(body), chunk):
                wire += b"%x\r\n%b\r\n" % (len(body[at : at + chunk]), body[at : at + chunk])
            wire += b"0\r\n\r\n"
        else:
            wire += body
    places = sorted({0, len(wire), *(cut for cut in cuts if cut < len(wire))})
    recorder.forget()
    answered = face.say([wire[a:b] for a, b in pairwise(places)])
    posts, expected = recorder.posts, reference(wire)
    assert len(posts) == len(expected) == len(drawn) == answered.written.count(b"HTTP/1.1 200 OK\r\n")
    assert all(same(received, seen) for received, seen in zip(posts, expected, strict=True))
