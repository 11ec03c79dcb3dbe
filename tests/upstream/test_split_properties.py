"""Random valid answers, split at random places: what is read must not depend on how it came.

Bytes are handed to the connection itself, so that the splits are exactly the drawn ones; the expected result
is what the answer was built from.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import EngineBroke
from app.upstream.connection import Http1Response
from tests.upstream.unplugged import begun, connected

LOOPS = ("asyncio",)  # the bytes come by hand, not from a loop

TOKEN = st.text("abcdefghijklmnopqrstuvwxyzABCXYZ0123456789-_", min_size=1, max_size=12).map(str.encode)
VALUE = st.binary(max_size=20).map(lambda b: bytes(c for c in b if c > 0x20 and c != 0x7F))  # no space at its ends


@dataclass
class Drawn:
    """A valid answer and what a reader must see of it."""

    wire: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    until_eof: bool


@st.composite
def answers(draw: st.DrawFn) -> Drawn:
    reserved = {b"content-length", b"transfer-encoding", b"connection", b"keep-alive", b"upgrade"}
    headers = draw(st.lists(st.tuples(TOKEN.filter(lambda n: n.lower() not in reserved), VALUE), max_size=4))
    parts = draw(st.lists(st.binary(min_size=1, max_size=300), max_size=5))
    framing = draw(st.sampled_from(["length", "chunked", "eof"]))
    body = b"".join(parts)
    if framing == "length":
        headers.append((b"Content-Length", b"%d" % len(body)))
    elif framing == "chunked":
        headers.append((b"Transfer-Encoding", b"chunked"))
        extension = draw(st.sampled_from([b"", b";x=y"]))
        trailers = draw(st.lists(st.tuples(TOKEN.map(lambda n: b"X-" + n), VALUE), max_size=2))
        body_wire = b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts)
        body_wire += b"0\r\n" + b"".join(b"%b: %b\r\n" % pair for pair in trailers) + b"\r\n"
    early = draw(st.sampled_from([b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early\r\nLink: <a>\r\n\r\n"]))
    head = early + b"HTTP/1.1 200 OK\r\n" + b"".join(b"%b: %b\r\n" % pair for pair in headers) + b"\r\n"
    wire = head + (body_wire if framing == "chunked" else body)
    return Drawn(wire, [(name.lower(), value) for name, value in headers], body, framing == "eof")


def split(wire: bytes, cuts: set[int]) -> list[bytes]:
    places = sorted({0, len(wire), *(cut for cut in cuts if cut < len(wire))})
    return [wire[a:b] for a, b in pairwise(places)]


async def read_on(response: Http1Response) -> bytes:
    body = b""
    while data := await response.read():
        body += data
    return body


CUTS = st.sets(st.integers(1, 2000), max_size=12) | st.just(set(range(1, 4000)))  # a few places, or all


@given(drawn=answers(), cuts=CUTS, eager=st.booleans())
@settings(max_examples=50, deadline=None)
async def test_any_split_reads_the_same(drawn: Drawn, cuts: set[int], eager: bool) -> None:
    connection, transport, pool = connected()
    response = begun(connection)
    reading = asyncio.ensure_future(read_on(response)) if eager else None
    for piece in split(drawn.wire, cuts):
        connection.data_received(piece)
        if eager:
            await asyncio.sleep(0)
    if drawn.until_eof:
        connection.eof_received()
    assert await (reading or read_on(response)) == drawn.body
    assert response.status == 200
    assert response.headers == drawn.headers
    assert pool.idle == (0 if drawn.until_eof else 1)
    assert transport.aborted == drawn.until_eof
    pool.close()


@given(drawn=answers(), keep=st.floats(0, 1, exclude_max=True), reset=st.booleans())
@settings(max_examples=50, deadline=None)
async def test_any_truncation_is_noticed(drawn: Drawn, keep: float, reset: bool) -> None:
    connection, _, pool = connected()
    response = begun(connection)
    part = drawn.wire[: int(len(drawn.wire) * keep)]
    if part:
        connection.data_received(part)
    if not reset:
        connection.eof_received()
    connection.connection_lost(ConnectionResetError() if reset else None)
    broke = False
    body = b""
    try:
        await response.head()
        while data := await response.read():
            body += data
    except EngineBroke:
        broke = True
    assert drawn.body.startswith(body)
    has_head = response.status != 0
    assert broke != (drawn.until_eof and has_head and not reset)  # only there can nobody know
    assert pool.open == 0


@given(drawn=answers(), rubbish=st.binary(min_size=1, max_size=40).filter(lambda b: b.strip(b"\r\n")))
@settings(max_examples=40, deadline=None)
async def test_anything_behind_an_answer_ends_the_connection(drawn: Drawn, rubbish: bytes) -> None:
    if drawn.until_eof:
        return
    connection, transport, pool = connected()
    response = begun(connection)
    connection.data_received(drawn.wire + rubbish)
    assert await read_on(response) == drawn.body
    assert (pool.idle, pool.open, transport.aborted) == (0, 0, True)
