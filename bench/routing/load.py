"""The load: closed loops over kept connections, at what Python can do; a process of its own for each measurement.

    python -m bench.routing.load PLAN        PLAN and what it prints are JSON: `Plan`, `Measured`

Nothing is counted until the window opens, after the warm-up; at both its edges it reads the CPU time of the router's
process tree, so that both are of the same seconds. An answer that is not 200, not whole, or not from an engine is a
failure.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import cycle
from typing import cast
from urllib.parse import urlsplit

import httptools
import uvloop

from bench.routing import tree
from bench.routing.engine import CHUNKS, GAP_S, LENGTHS, MARK, MODEL, TEXT
from bench.routing.figures import percentile

SILENCE_S = 15.0  # an answer that is not whole after so long is a failure, and the end of its connection
FAILURES = 100  # after so many there is nothing to measure
LONG_S = 0.5
DRAIN_S = 2.0
SMALL_BYTES = 1024
RETRY_S = 0.05
TELLING = MARK.encode()


@dataclass(frozen=True)
class Plan:
    """`roots`: guards whose trees' CPU is read, the router's first."""

    urls: list[str]
    connections: int
    warm_s: float
    window_s: float
    body_bytes: int = SMALL_BYTES
    stream: bool = False
    roots: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Measured:
    """All of one window. Latencies, TTFTs and gaps in ms, None where there were none; CPU in seconds."""

    window_s: float
    requests: int
    chunks: int
    failures: dict[str, int]
    p50_ms: float | None
    p99_ms: float | None
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    gap_p99_ms: float | None
    trees_cpu_s: list[float]
    load_cpu_s: float
    machine_cpu_s: float
    stolen_s: float
    reconnects: int


def chat(size: int, stream: bool) -> bytes:
    """A chat of `size` bytes of JSON."""
    value = {
        "model": MODEL,
        "messages": [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": ""}],
        "temperature": 0.7,
        "max_tokens": 256,
        "stream": stream,
    }
    short = size - len(json.dumps(value))
    value["messages"][1]["content"] = (TEXT * (short // len(TEXT) + 1))[: max(short, 1)]  # type: ignore[index]
    return json.dumps(value).encode()


def request(url: str, size: int, stream: bool) -> bytes:
    body = chat(size, stream)
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        f"host: {urlsplit(url).netloc}",
        "accept: application/json",
        "content-type: application/json",
        "user-agent: evenhand-bench",
        f"content-length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def ended(cut: bytes, data: bytes) -> tuple[int, bytes]:
    """How many events end in `data`, each with an empty line, which two pieces may share; and what to keep of it."""
    joined = cut + data if cut else data
    return joined.count(b"\n\n"), b"\n" if data.endswith(b"\n") and not joined.endswith(b"\n\n") else b""


class Tally:
    """What all connections count in."""

    def __init__(self) -> None:
        self.opened_s = float("inf")  # of the window
        self.closing = False
        self.requests = self.chunks = self.reconnects = 0
        self.failures: Counter[str] = Counter()
        self.latencies_s: list[float] = []
        self.ttfts_s: list[float] = []
        self.gaps_s: list[float] = []

    def counts(self, began_s: float, now_s: float) -> bool:
        """Whether a duration that ends in the window is one of its: what ran while it opened waited for the reading of
        /proc, some milliseconds, which only what takes long can bear."""
        return began_s >= self.opened_s or (now_s >= self.opened_s and now_s - began_s > LONG_S)

    def open(self) -> None:
        self.requests = self.chunks = 0
        self.latencies_s.clear()
        self.ttfts_s.clear()
        self.gaps_s.clear()
        self.opened_s = time.perf_counter()


class Connection(asyncio.Protocol):
    """One closed loop: the next request goes out when the answer is whole."""

    def __init__(self, url: str, plan: Plan, tally: Tally) -> None:
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), int(parts.port or 80)
        # Of different lengths, as in a conversation that goes on: nobody is to know a request by its bytes.
        self._requests = cycle([request(url, plan.body_bytes + more, plan.stream) for more in range(LENGTHS)])
        self._stream, self._tally = plan.stream, tally
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.busy = False

    async def connect(self) -> None:
        """Until it succeeds or the measurement ends."""
        while not self._tally.closing:
            try:
                await self._loop.create_connection(lambda: self, self._host, self._port)
                return
            except OSError as e:
                self._tally.failures[f"no connection: {e.strerror}"] += 1
                await asyncio.sleep(RETRY_S)

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)
        self._send()

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as e:
            self._fail(f"not HTTP: {e}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._tally.closing:
            return
        if self.busy:
            self._tally.failures["connection closed within an answer"] += 1
        self._tally.reconnects += 1
        self.busy = False
        self._again = self._loop.create_task(self.connect())

    # --- one request

    def _send(self) -> None:
        if self._tally.closing or self._transport is None:
            return
        self.busy = True
        self._events, self._rest, self._cut, self._from_engine = 0, b"", b"", False
        self._last_s = self._began_s = time.perf_counter()
        self._transport.write(next(self._requests))

    def on_body(self, data: bytes) -> None:
        if not self._from_engine:
            self._rest += data
            self._from_engine = TELLING in self._rest
        if self._stream:
            self._on_events(data)

    def _on_events(self, data: bytes) -> None:
        found, self._cut = ended(self._cut, data)
        if not found:
            return
        now_s, tally = self._now_s, self._tally
        if now_s >= tally.opened_s:
            tally.chunks += found
            if self._events:
                tally.gaps_s.append(now_s - self._last_s)
            elif tally.counts(self._began_s, now_s):
                tally.ttfts_s.append(now_s - self._began_s)
        self._events += found
        self._last_s = now_s

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status == 100:
            return
        self.busy = False
        tally = self._tally
        if status != 200:
            return self._fail(f"status {status}")
        if not self._from_engine:
            return self._fail("an answer of no engine")
        if self._stream and self._events < CHUNKS:
            return self._fail("a stream cut short")
        tally.requests += 1
        if tally.counts(self._began_s, self._now_s):
            tally.latencies_s.append(self._now_s - self._began_s)
        if not self._parser.should_keep_alive():
            if self._transport:
                self._transport.close()
            return None
        self._send()
        return None

    def _fail(self, why: str) -> None:
        self.busy = False
        self._tally.failures[why] += 1
        if self._transport:
            self._transport.abort()

    def look(self) -> None:
        """Gives up on silence."""
        if self.busy and time.perf_counter() - self._last_s > SILENCE_S:
            self._fail(f"silent for {SILENCE_S:g} s")

    def close(self) -> None:
        if self._transport:
            self._transport.abort()


async def measure(plan: Plan) -> Measured:
    tally = Tally()
    connections = [Connection(plan.urls[i % len(plan.urls)], plan, tally) for i in range(plan.connections)]
    # Streams begin one after the other: in step, one wake-up would serve them all, and flatter everybody.
    apart_s = CHUNKS * GAP_S / plan.connections if plan.stream else 0.0
    connecting = []
    for connection in connections:
        connecting.append(asyncio.create_task(connection.connect()))
        await asyncio.sleep(apart_s)
    await _pass(plan.warm_s, connections, tally)
    before, own_before_s = tree.read(plan.roots), time.process_time()
    tally.open()
    await _pass(plan.window_s, connections, tally)
    window_s = time.perf_counter() - tally.opened_s
    tally.closing = True
    own_s = time.process_time() - own_before_s
    after = tree.read(plan.roots)
    measured = Measured(
        window_s=window_s,
        requests=tally.requests,
        chunks=tally.chunks,
        failures=dict(tally.failures),
        p50_ms=_ms(tally.latencies_s, 0.5),
        p99_ms=_ms(tally.latencies_s, 0.99),
        ttft_p50_ms=_ms(tally.ttfts_s, 0.5),
        ttft_p99_ms=_ms(tally.ttfts_s, 0.99),
        gap_p99_ms=_ms(tally.gaps_s, 0.99),
        trees_cpu_s=[b - a for a, b in zip(before.trees_s, after.trees_s, strict=True)],
        load_cpu_s=own_s,
        machine_cpu_s=after.machine_s - before.machine_s,
        stolen_s=after.stolen_s - before.stolen_s,
        reconnects=tally.reconnects,
    )
    await _drain(connections)
    for task in connecting:
        task.cancel()
    return measured


async def _drain(connections: list[Connection]) -> None:
    """Answers end before their connections do: a router's way with clients that leave is not measured here."""
    until_s = time.perf_counter() + DRAIN_S
    while any(connection.busy for connection in connections) and time.perf_counter() < until_s:
        await asyncio.sleep(DRAIN_S / 100)
    for connection in connections:
        connection.close()


async def _pass(seconds: float, connections: list[Connection], tally: Tally) -> None:
    until_s = time.perf_counter() + seconds
    while (left_s := until_s - time.perf_counter()) > 0 and tally.failures.total() < FAILURES:
        await asyncio.sleep(min(left_s, 1.0))
        for connection in connections:
            connection.look()


def _ms(values_s: list[float], share: float) -> float | None:
    return percentile(values_s, share) * 1000 if values_s else None


if __name__ == "__main__":
    print(json.dumps(asdict(uvloop.run(measure(Plan(**json.loads(sys.argv[1])))))))
