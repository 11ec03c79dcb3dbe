"""Engines of zero latency, as cheap as Python has them: three ports, one process, one protocol object a connection.

    python -m bench.routing.engine

Prints its ports as a line of JSON. What it says carries the number of the engine, so that a reader can tell who
answered; `GET /bench/counts` on any port says how many chats each has had. Ends with its guard.
"""

from __future__ import annotations

import asyncio
import json
import time
from email.utils import formatdate
from functools import partial
from itertools import cycle
from typing import cast

import httptools
import uvloop

ENGINES = 3
MODEL = "bench"
CHUNKS = 40  # of content; the finish and [DONE] are events of their own
GAP_S = 0.005
READ_BYTES = 65536
LENGTHS = 8  # of answers: one after the other is another number of bytes long
EVENTS = CHUNKS + 2
CREATED = 1_700_000_000
MARK = "said by engine"  # and its number
STREAM = b'"stream"'
TAIL_BYTES = 32  # more than STREAM and its value: two pieces of a body may share them
COUNTS = "/bench/counts"
TEXT = "A router is measured by what it adds to an answer that takes no time. "
# What the routers ask before they take an engine: vLLM's and SGLang's names for it.
INFO = {
    "/health": {},
    "/health_generate": {},
    "/ping": {},
    "/version": {"version": "0.18.0"},
    "/v1/models": {
        "object": "list",
        "data": [{"id": MODEL, "object": "model", "created": CREATED, "owned_by": "vllm", "max_model_len": 131072}],
    },
}


def head(status: bytes, kind: bytes, length: int | None) -> bytes:
    framing = b"transfer-encoding: chunked" if length is None else b"content-length: %d" % length
    told = b"date: %s\r\nserver: uvicorn\r\n" % formatdate(time.time(), usegmt=True).encode()  # as real engines do
    return b"HTTP/1.1 %s\r\n%scontent-type: %s\r\n%s\r\n\r\n" % (status, told, kind, framing)


def whole(value: object, status: bytes = b"200 OK") -> bytes:
    body = json.dumps(value, separators=(",", ":")).encode()
    return head(status, b"application/json", len(body)) + body


def answer(number: int, more: int = 0) -> bytes:
    """A chat's answer of about 1 KB, and so many bytes `more`, as it goes over the wire."""
    content = f"{MARK} {number}: " + TEXT * 9 + "." * more
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 200, "completion_tokens": 150, "total_tokens": 350}
    return whole(_object(number, "chat.completion", choice) | {"usage": usage})


def events(number: int) -> list[bytes]:
    """A stream's writes: the head, the content one by one, then all that ends it."""
    deltas: list[tuple[dict[str, str], str | None]] = [({"role": "assistant", "content": f"{MARK} {number}"}, None)]
    deltas += [({"content": f" word {n}"}, None) for n in range(1, CHUNKS)]
    deltas.append(({}, "stop"))
    lines = [
        json.dumps(
            _object(number, "chat.completion.chunk", {"index": 0, "delta": delta, "finish_reason": reason}),
            separators=(",", ":"),
        )
        for delta, reason in deltas
    ]
    written = [f"data: {line}\n\n".encode() for line in [*lines, "[DONE]"]]
    framed = [b"%x\r\n%s\r\n" % (len(event), event) for event in written]
    return [head(b"200 OK", b"text/event-stream", None), *framed[:CHUNKS], b"".join(framed[CHUNKS:]) + b"0\r\n\r\n"]


def _object(number: int, kind: str, choice: dict[str, object]) -> dict[str, object]:
    return {"id": f"chatcmpl-{number:024}", "object": kind, "created": CREATED, "model": MODEL, "choices": [choice]}


class Engine:
    """What one port says, made ready once."""

    def __init__(self, number: int, counts: list[int]) -> None:
        self.number, self.counts = number, counts
        self.info = {path.encode(): whole(value) for path, value in INFO.items()}
        self.look_at_the_clock()

    def look_at_the_clock(self) -> None:
        """Once a second: each answer says when it is."""
        self.answers = cycle([answer(self.number, more) for more in range(LENGTHS)])
        self.head, self.first, *self.later = events(self.number)
        asyncio.get_running_loop().call_later(1.0, self.look_at_the_clock)


class Connection(asyncio.BufferedProtocol):
    """One request after the other. A stream in the middle has a timer; nothing else waits here.

    One buffer of READ_BYTES for all connections: what is read is used before anything else can be read, and a new
    one for each read, with its page faults, would make the engines the limit for large bodies.
    """

    _buffer = bytearray(READ_BYTES)
    _view = memoryview(_buffer)

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop
        self._parser = httptools.HttpRequestParser(self)
        self._timer: asyncio.TimerHandle | None = None
        self._url = b""
        self._stream, self._tail = False, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer:
            self._timer.cancel()

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self._parser.feed_data(self._view[:nbytes])
        except httptools.HttpParserError:
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, data: bytes) -> None:
        if not self._stream:
            self._stream = wants_stream(data) or wants_stream(self._tail + data[:TAIL_BYTES])
            self._tail = data[-TAIL_BYTES:]

    def on_message_complete(self) -> None:
        url, self._url = self._url, b""
        stream, self._stream, self._tail = self._stream, False, b""
        engine = self._engine
        if url != b"/v1/chat/completions":
            counts = whole(engine.counts) if url == COUNTS.encode() else None
            said = counts or engine.info.get(url.partition(b"?")[0]) or whole({"error": "not here"}, b"404 Not Found")
            self._transport.write(said)
            return
        engine.counts[engine.number - 1] += 1
        if not stream:
            self._transport.write(next(engine.answers))
            return
        self._transport.write(engine.head)
        self._transport.write(engine.first)  # a second write, as of uvicorn under the real engines
        self._due_s = self._loop.time() + GAP_S
        self._timer = self._loop.call_at(self._due_s, self._next, 0)

    def _next(self, at: int) -> None:
        """Late ones don't delay those after them."""
        later = self._engine.later
        self._transport.write(later[at])
        self._timer = None
        if at + 1 < len(later):
            self._due_s += GAP_S
            self._timer = self._loop.call_at(self._due_s, self._next, at + 1)


def wants_stream(body: bytes) -> bool:
    """Without decoding; a router may have written the JSON anew, with spaces of its own."""
    at = body.find(STREAM)
    return at >= 0 and body[at + len(STREAM) : at + len(STREAM) + 10].lstrip(b" :\n").startswith(b"true")


async def serve() -> None:
    loop = asyncio.get_running_loop()
    counts = [0] * ENGINES
    servers = [
        await loop.create_server(partial(Connection, Engine(number, counts), loop), "127.0.0.1", 0, backlog=1024)
        for number in range(1, ENGINES + 1)
    ]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve())
