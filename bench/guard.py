#!/usr/bin/env python3
"""What a request costs in our own code, told so that it doesn't depend on the machine: a guard against regressions.

The whole path of a chat request in one process, without a kernel: our HTTP protocol, the HTTP face, Hybrid serving,
the ledger with its connection to Redis, the transport to an engine, the metrics, the request log. Sockets are replaced
by objects that answer at once. Three figures come of it:

    calls       functions called for a request, Python's and C's: exact, on one version of Python
    left        objects that requests leave to the garbage collector, which stops all others to find them
    ratio       CPU of a request against a fixed program (`baseline`), both in turns within one run

Run it with `python -m bench.guard`; what it may come to is in tests/test_guard.py.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import hiredis
import uvloop
from uvicorn.config import Config

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from app.dispatch.breakers import Breakers
from app.dispatch.caller import Caller
from app.dispatch.hybrid import Hybrid
from app.http.routes import build_app
from app.metrics.figures import Figures
from app.metrics.files import MetricsDirectory, MetricsWriter
from app.metrics.publisher import Publisher
from app.metrics.request_log import RequestLog
from app.nodes import Node, State
from app.settings import Settings
from app.store.keys import Keys
from app.store.ledger import Ledger
from app.store.pipeline import Pipeline
from app.store.registry import Registry
from app.store.scripts import load_scripts
from app.store.snapshot import Snapshot
from app.upstream.connection import Connection
from app.upstream.http1 import Http1Transport
from app.upstream.transport import Timeouts
from workers.protocol import Protocol, Shared

ENGINES = tuple(f"http://10.0.0.{n}:23333" for n in (1, 2, 3))
MODEL = "m"
BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x" * 900}]}).encode()
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost:8000\r\nuser-agent: guard/1\r\naccept: */*\r\n"
    b"content-type: application/json\r\nauthorization: Bearer sk-guard\r\ncontent-length: %d\r\n\r\n%b"
    % (len(BODY), BODY)
)
ANSWER_BODY = json.dumps({"object": "chat.completion", "choices": [{"message": {"content": "y" * 600}}]}).encode()
ANSWER = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(ANSWER_BODY), ANSWER_BODY)
)
AT_ONCE = 8
SLICE = 25
"""Requests of each of the clients between two looks at the clock."""


class Cost(NamedTuple):
    """Of one request; `left`: of all that ran. `ratio`: its CPU in runs of `baseline`."""

    calls: float
    left: int
    ratio: float
    us: float


class Wire(asyncio.Transport):
    """A transport without a socket: `on_write` gets what is written."""

    def __init__(self, on_write: Callable[[bytes], None]) -> None:
        super().__init__()
        self.write = on_write  # type: ignore[method-assign]

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 6)}.get(name, default)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None: ...


class WiredLedger(Ledger):
    """A ledger on a connection that says yes to everything."""

    def connect(self) -> None:
        self._pipeline, self._trouble = Pipeline(5.0, print), None
        self._pipeline.connection_made(Wire(self._answer))
        self._acquire_sha = self._way.call.script.sha.encode()
        self._reader = hiredis.Reader()

    def _answer(self, written: bytes) -> None:
        self._reader.feed(written)
        replies = b""
        while (command := self._reader.gets()) is not False:
            more = self._more(command) if command[1] == self._acquire_sha else []
            words = [0, self._registry.snapshot.version, *more]
            replies += (b"*%d\r\n" + b":%d\r\n" * len(words)) % (len(words), *words)
        assert self._pipeline is not None
        self._loop.call_soon(self._pipeline.data_received, replies)

    def _more(self, command: list[bytes]) -> list[int]:
        """The first node for each acquire, all of them of one pool, and that no release was of nothing."""
        said = command[6 + int(command[2]) :]  # behind worker, generation and version
        missed = []
        if (urls := -int(said[0])) > 0:
            said, missed = said[2 + 2 * urls :], [0]
        if not said:
            return missed
        draws = said[1 + 2 * len(ENGINES) :]
        return [1] * (1 if len(draws) == 2 else 1 + int(draws[3])) + missed

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()


class WiredTransport(Http1Transport):
    """A transport whose engines answer at once."""

    async def _open_socket(self, connection: Connection) -> None:
        loop = connection.loop
        connection.connection_made(Wire(lambda _: loop.call_soon(connection.data_received, ANSWER) and None))


class Known(Registry):
    """A registry that knows its nodes and asks nobody."""

    def __init__(self) -> None:
        nodes = {url: Node(url, models=(MODEL,), state=State.READY, order=n) for n, url in enumerate(ENGINES)}
        self.snapshot = Snapshot(7, nodes)

    def refresh_soon(self) -> None:
        raise AssertionError("it has seen everything")


class Client:
    """One connection; a request follows on the answer to the one before."""

    def __init__(self, config: Config, state: Shared) -> None:
        self._protocol = Protocol(config=config, server_state=state, app_state={})
        self._protocol.connection_made(Wire(self._got))
        self._left = 0
        self.done = asyncio.Event()

    def run(self, requests: int) -> None:
        self._left = requests
        self.done.clear()
        self._protocol.data_received(REQUEST)

    def _got(self, answer: bytes) -> None:
        assert answer.endswith(ANSWER_BODY) and answer.startswith(b"HTTP/1.1 200"), answer
        self._left -= 1
        if self._left:
            asyncio.get_running_loop().call_soon(self._protocol.data_received, REQUEST)
        else:
            self.done.set()


def baseline() -> int:
    """The fixed program: of what a request's path is made of too. It must stay as it is."""
    found = 0
    for n in range(60):
        headers = [(b"name-%d" % k, b"value") for k in range(6)]
        scope = {"n": n, "headers": headers, "kept": [pair for pair in headers if pair[0] != b"name-3"]}
        text = b"".join(name + b": " + value + b"\r\n" for name, value in scope["kept"])
        found += len(text.split(b"\r\n")) + len(json.loads('{"a": [1, 2, {"b": "text"}]}'))
    return found


@contextmanager
def counted() -> Iterator[list[int]]:
    """The calls of all functions, Python's and C's, while it is open."""
    calls = [0]

    def count(frame: FrameType, event: str, arg: object) -> None:
        if event in ("call", "c_call"):
            calls[0] += 1

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


async def measure(rounds: int) -> Cost:
    registry = Known()
    ledger = WiredLedger(
        locator=None,  # type: ignore[arg-type]
        keys=Keys("guard"),
        scripts=load_scripts(),
        registry=registry,
        worker="guard-1-00000000",
        strategy="min_expected_latency",
        lease_s=8.0,
        timeout_s=5.0,
    )
    ledger.connect()
    breakers = Breakers(registry=registry, ledger=ledger, rules=None)  # type: ignore[arg-type]
    timeouts = Timeouts(5.0, 600.0, 300.0, 0.0)
    caller = Caller(
        registry=registry, transport=WiredTransport(), breakers=breakers, timeouts=timeouts, engine_key=None
    )
    hybrid = Hybrid(registry=registry, ledger=ledger, caller=caller, breakers=breakers, budget=None, retries=2)  # type: ignore[arg-type]
    figures = Figures(knows=registry.snapshot.knows)
    app = build_app(
        settings=Settings.load(),
        registry=registry,  # type: ignore[arg-type]
        dispatcher=hybrid,
        engine_client=None,  # type: ignore[arg-type]
        store_ok=lambda: None,
        figures=figures,
        watched=ledger.watch_next,
    )
    figures.on_ended.append(RequestLog(0.0, "text"))
    config = Config(app, http=Protocol, lifespan="off", log_config=None, proxy_headers=False)
    config.load()
    state = Shared()
    state.expect = ledger.expect
    clients = [Client(config, state) for _ in range(AT_ONCE)]

    directory = MetricsDirectory.make()
    publisher = Publisher(figures, MetricsWriter(directory.path, "guard"), lambda: ledger.trouble)

    async def serve() -> None:
        for client in clients:
            client.run(SLICE)
        for client in clients:
            await client.done.wait()
        publisher.publish()  # it would be a timer's chance how often

    requests = AT_ONCE * SLICE
    for _ in range(3):
        await serve()
    with counted() as calls:
        await serve()
    ours, fixed = [], []
    gc.collect()
    gc.disable()  # whose turn it is to collect is chance
    try:
        for _ in range(rounds):
            # The least of many short turns: what else the machine did is in the others.
            since = time.process_time()
            await serve()
            ours.append((time.process_time() - since) / requests)
            since = time.process_time()
            for _ in range(20):
                baseline()
            fixed.append((time.process_time() - since) / 20)
        left = gc.collect()
    finally:
        gc.enable()
        publisher.close()
        directory.remove()
    return Cost(calls[0] / requests, left, min(ours) / min(fixed), min(ours) * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="turns of either program, 200 requests each (60)")
    cost = uvloop.run(measure(parser.parse_args().rounds))
    print(
        f"{cost.calls:.1f} calls, {cost.left} objects left, "
        f"{cost.ratio:.3f} x the fixed program, {cost.us:.1f} us of CPU a request"
    )


if __name__ == "__main__":
    main()
