"""What stands in for the parts behind the HTTP face, and two ways to talk to it: ASGI calls and sockets."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping, Sequence
from typing import Any

import pytest
from pydantic import SecretStr
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.access_keys import KeyRing
from app.dispatch.answer import EngineRequest, Outcome
from app.errors import ModelNotFound, UpstreamError
from app.http.metrics import Metrics
from app.http.ports import WIRE
from app.http.routes import HttpFace, build_app
from app.metrics.figures import Figures
from app.nodes import Node, Role, State
from app.settings import Settings
from app.store.registry import NodeStatus
from app.store.snapshot import Snapshot
from workers.protocol import Shared

Pairs = list[tuple[bytes, bytes]]
JSON: Pairs = [(b"content-type", b"application/json")]
SSE: Pairs = [(b"content-type", b"text/event-stream; charset=utf-8")]
CHAT = b'{"model":"m","messages":[]}'
HANG = object()


class FakeAnswer:
    """An engine's answer from a script: bytes, exceptions to raise, HANG to wait for ever, callables to await."""

    def __init__(self, *script: Any, status: int = 200, headers: Pairs | None = None) -> None:
        self.status = status
        self.headers = JSON if headers is None else headers
        self.url = "http://engine:1"
        self.script = list(script)
        self.reads = 0
        self.measured = True
        self.tokens = 0.0
        self.outcomes: list[Outcome] = []
        self.failures: list[UpstreamError] = []
        self.closed_at_s: float | None = None

    async def read(self) -> bytes:
        assert not self.outcomes, "read after close"
        self.reads += 1
        if not self.script:
            return b""
        item = self.script.pop(0)
        if item is HANG:
            await asyncio.Event().wait()
        if isinstance(item, BaseException):
            raise item
        if callable(item):
            item = await item()
        assert isinstance(item, bytes)
        return item

    def whole(self) -> bytes | None:
        """What comes in one piece is all there; what comes in several is not."""
        (one,) = self.script if len(self.script) == 1 else (None,)
        return one if isinstance(one, bytes) and not self.reads else None

    async def pipe(self, sink: Callable[[bytes], bool], drain: Callable[[], Awaitable[None]]) -> None:
        while chunk := await self.read():
            if not sink(chunk):
                await drain()

    def failed(self, error: UpstreamError) -> None:
        self.failures.append(error)

    def close(self, outcome: Outcome) -> None:
        if self.closed_at_s is None:
            self.closed_at_s = time.monotonic()
        self.outcomes.append(outcome)

    @property
    def outcome(self) -> Outcome | None:
        return self.outcomes[0] if self.outcomes else None


class FakeHybrid:
    """Opens the answers of a script, in order; an exception is raised, HANG waits until it is cancelled."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.requests: list[EngineRequest] = []
        self.opened: list[FakeAnswer] = []
        self.waiting = 0
        self.cancelled_at_s: float | None = None

    async def open(self, request: EngineRequest) -> FakeAnswer:
        self.requests.append(request)
        item = self.script.pop(0) if self.script else FakeAnswer(b"{}")
        if callable(item):
            item = item()
        if item is HANG:
            self.waiting += 1
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled_at_s = time.monotonic()
                raise
            finally:
                self.waiting -= 1
        if isinstance(item, BaseException):
            raise item
        assert isinstance(item, FakeAnswer)
        self.opened.append(item)
        return item

    def unreleased(self) -> list[FakeAnswer]:
        return [answer for answer in self.opened if not answer.outcomes]


class FakeRegistry:
    """A registry in memory; `trouble` is raised by everything that would go to Redis."""

    def __init__(self, *nodes: Node) -> None:
        self.snapshot = Snapshot(1, {node.url: node for node in nodes})
        self.calls: list[tuple[Any, ...]] = []
        self.unfinished: dict[str, int] = {}
        self.latency_s: dict[str, list[float]] = {}
        self.stages: dict[str, dict[str, dict[str, float]]] = {}
        self.trouble: Exception | None = None

    def _write(self, nodes: dict[str, Node], keys: dict[str, str]) -> None:
        self.snapshot = Snapshot(self.snapshot.version + 1, nodes, keys)

    def _check(self) -> None:
        if self.trouble is not None:
            raise self.trouble

    async def add(
        self,
        url: str,
        *,
        role: Role,
        models: tuple[str, ...],
        speed: float | None,
        key: str | None,
        asked: bool = False,
        static: bool = False,
        bootstrap_port: int | None = None,
        host_header: str = "",
    ) -> bool:
        self._check()
        self.calls.append(("add", url, role, models, speed, key, asked))
        node = Node(
            url,
            role=role,
            models=models,
            speed=speed,
            asked=asked,
            bootstrap_port=bootstrap_port,
            host_header=host_header,
        )
        keys = dict(self.snapshot.engine_keys) | ({url: key} if key else {})
        self._write({**self.snapshot.nodes, url: node}, keys)
        return True

    async def remove(self, url: str) -> bool:
        self._check()
        self.calls.append(("remove", url))
        nodes = dict(self.snapshot.nodes)
        known = nodes.pop(url, None) is not None
        self._write(nodes, dict(self.snapshot.engine_keys))
        return known

    async def drain(self, url: str, timeout_s: float) -> bool:
        self._check()
        self.calls.append(("drain", url, timeout_s))
        node = self.snapshot.nodes.get(url)
        if node is None:
            return False
        self._write(
            {**self.snapshot.nodes, url: dataclasses.replace(node, state=State.DRAINING)},
            dict(self.snapshot.engine_keys),
        )
        return True

    async def status(self) -> dict[str, NodeStatus]:
        self._check()
        return {
            url: NodeStatus(node, self.unfinished.get(url, 0), self.latency_s.get(url, []), self.stages.get(url, {}))
            for url, node in self.snapshot.nodes.items()
        }


class FakeLinks:
    """What `/distserve/*` asks; `trouble` is raised by all of it."""

    def __init__(self, trouble: Exception | None = None) -> None:
        self.calls: list[str] = []
        self.trouble = trouble

    async def warm_up(self) -> dict[str, Any]:
        return self._answer("warm_up", {"SUCCESS": False, "links": {"a|b": {"state": "failed", "error": "why"}}})

    async def collect(self) -> dict[str, Any]:
        return self._answer("collect", {"freed": [], "failed": [], "kept": 2})

    async def table(self) -> dict[str, Any]:
        link = {"state": "void", "owner": "w1", "since_ms": 1, "took_ms": None, "error": None}
        return self._answer("table", {"links": {"a|b": link}, "sessions": 3, "counts": {"links_made": 1}})

    def _answer(self, call: str, answer: dict[str, Any]) -> dict[str, Any]:
        self.calls.append(call)
        if self.trouble is not None:
            raise self.trouble
        return answer


class FakeSeen:
    """What is watched: documents of the right shape; `trouble` is raised by all of it but `state`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.trouble: Exception | None = None
        self.decided: list[dict[str, Any]] = []
        self.up = True

    async def state(self) -> dict[str, Any]:
        self.calls.append("state")
        return {
            "time": 1796049288.5,
            "version": "0.1.0",
            "strategy": "random",
            "encoder_policy": "round_robin",
            "serving": "Hybrid",
            "grace_s": 120.0,
            "redis": {"up": self.up, "reason": None if self.up else "it is away"},
            "registry_version": 3,
            "models": ["m"],
            "aliases": {},
            "nodes": [],
            "workers": [{"id": "w1", "lease_s": 7.5, "unfinished": 2, "nodes": {"http://a": 2}}],
            "encoders": {"cursor": 0, "next": None, "urls": []},
            "links": [],
            "sessions": 0,
            "handovers": {},
        }

    async def explain(self, model: str) -> dict[str, Any]:
        self.calls.append(f"explain {model}")
        if model != "m":
            raise ModelNotFound("there is none", param="model")
        return {"model": model, "strategy": "random", "rule": "by chance", "choices": []}

    async def watch(self) -> None:
        self.calls.append("watch")
        if self.trouble is not None:
            raise self.trouble

    async def decisions(self, after: str = "") -> list[dict[str, Any]]:
        self.calls.append(f"decisions {after}")
        if self.trouble is not None:
            raise self.trouble
        return [decision for decision in self.decided if not after or decision["id"] > after]


class FakeEngines:
    """Engines' own routes: a list of models, an answer to a POST, or an exception by URL."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, str] | Exception] = {}
        self.lists: dict[str, tuple[str, ...] | Exception] = {}
        self.refusals: dict[str, Exception] = {}
        self.calls: list[tuple[str, str, str | None]] = []
        self.bodies: list[bytes] = []

    async def models(self, url: str, key: str | None, *, host_header: str | None = None) -> tuple[str, ...]:
        self.calls.append(("models", url, key))
        answer = self.lists[url]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def terminate(self, url: str, key: str | None) -> None:
        self.calls.append(("terminate", url, key))
        if url in self.refusals:
            raise self.refusals[url]

    async def profile(self, url: str, path: str, key: str | None, body: bytes) -> tuple[int, str]:
        self.calls.append((path, url, key))
        self.bodies.append(body)
        await asyncio.sleep(0)
        answer = self.answers.get(url, (200, ""))
        if isinstance(answer, Exception):
            raise answer
        return answer


@functools.cache
def _settings(written: str) -> Settings:
    """Of a `repr`: what is asked for again and again is loaded once."""
    given = ast.literal_eval(written)
    for name in ("api_keys", "admin_keys", "reader_keys"):
        if name in given:
            given[name] = tuple(SecretStr(key) for key in given[name])
    return Settings.load(given)


class World:
    """One HTTP face with fakes behind it."""

    def __init__(
        self,
        *script: Any,
        nodes: Sequence[Node] = (),
        links: FakeLinks | None = None,
        figures: Figures | None = None,
        metrics: Metrics | None = None,
        watched: Callable[[], bool] = lambda: False,
        keys: KeyRing | None = None,
        **settings: Any,
    ) -> None:
        self.settings = _settings(repr(settings))
        self.hybrid = FakeHybrid(*script)
        self.registry = FakeRegistry(*nodes)
        self.engines = FakeEngines()
        self.seen = FakeSeen()
        self.store_trouble: str | None = None
        self.app: HttpFace = build_app(
            settings=self.settings,
            registry=self.registry,
            dispatcher=self.hybrid,  # type: ignore[arg-type]
            engine_client=self.engines,
            store_ok=lambda: self.store_trouble,
            links=links,
            figures=figures,
            metrics=metrics or Metrics(settled_s=0.0),
            seen=self.seen,
            watched=watched,
            keys=keys,
        )

    async def ask(self, method: str, path: str, body: bytes | Iterable[bytes] = b"", **more: Any) -> Reply:
        call = Call(self.app, method, path, body, **more)
        await call.run()
        return call.reply()

    async def post(self, body: bytes | Iterable[bytes] = CHAT, **more: Any) -> Reply:
        return await self.ask("POST", more.pop("path", "/v1/chat/completions"), body, **more)

    async def json(self, method: str, path: str, value: Any = None, **more: Any) -> Reply:
        return await self.ask(method, path, b"" if value is None else json.dumps(value).encode(), **more)


@dataclasses.dataclass
class Reply:
    status: int
    headers: Pairs
    body: bytes
    complete: bool

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json()["error"]  # type: ignore[no-any-return]

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key.lower() == name), None)


class FakeWire:
    """`app.http.ports.Wire` of a call: what is written while its gate is closed comes through when that opens."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.gone: Callable[[], None] | None = None
        self.held: list[MutableMapping[str, Any]] = []

    def when_gone(self, callback: Callable[[], None] | None) -> None:
        self.gone = callback
        if callback is not None and self.call.has_left:
            asyncio.get_running_loop().call_soon(self.leave)

    @property
    def task(self) -> asyncio.Task[None] | None:
        return asyncio.current_task()

    def whole_body(self) -> bytes | None:
        """As our server: what has come in one piece."""
        declared = dict(self.call.scope["headers"]).get(b"content-length")
        if len(self.call.messages) != 1 or self.call.messages[0].get("more_body") or self.call.has_left:
            return None
        if declared is not None and int(declared) != len(self.call.messages[0]["body"]):
            return None
        return bytes(self.call.messages.pop()["body"])

    def gather(self, limit_bytes: int) -> None:
        """Here the body comes in its pieces all the same: a server may be unable to hold it."""

    def leave(self) -> None:
        gone, self.gone = self.gone, None
        if gone is not None:
            gone()

    def start(self, status: int, headers: Pairs, length: int | None) -> None:
        headers = list(headers)
        assert [int(value) for name, value in headers if name == b"content-length"] == [length] * (length is not None)
        self._pass({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, data: bytes, *, more: bool) -> bool:
        message = {"type": "http.response.body", "body": data, "more_body": more}
        if self.held or (self.call.gate is not None and not self.call.gate.is_set()):
            self.held.append(message)
            return False
        self._pass(message)
        return True

    def break_off(self) -> None:
        self.broken_off = True

    async def drain(self) -> None:
        if self.call.gate is not None and self.held:
            await self.call.gate.wait()
        self.flush()

    def flush(self) -> None:
        if self.call.gate is None or self.call.gate.is_set():
            for message in self.held:
                self._pass(message)
            self.held.clear()

    def _pass(self, message: MutableMapping[str, Any]) -> None:
        if not self.call.has_left:
            self.call.sent.append(message)


class Call:
    """One ASGI call, as a server would make it. `leave()` disconnects; `gate` holds back sends of body bytes.

    `wired`: the server offers a wire, as our own does.
    """

    wired = False

    def __init__(
        self,
        app: Any,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] = b"",
        *,
        headers: Iterable[tuple[bytes, bytes]] = (),
        client: tuple[str, int] | None = ("127.0.0.1", 50000),
        raw_path: bytes | None = None,
        query: bytes = b"",
        scheme: str = "http",
    ) -> None:
        path, _, more_query = path.partition("?")
        self.app = app
        self.scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": raw_path if raw_path is not None else path.encode(),
            "query_string": query or more_query.encode(),
            "root_path": "",
            "scheme": scheme,
            "headers": [(b"host", b"evenhand.test"), *headers],
            "client": client,
            "server": ("127.0.0.1", 8000),
            "state": {},
        }
        chunks = [body] if isinstance(body, bytes) else list(body)
        self.messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": chunk, "more_body": i < len(chunks) - 1} for i, chunk in enumerate(chunks)
        ]
        self.sent: list[MutableMapping[str, Any]] = []
        self.gate: asyncio.Event | None = None
        self.receives = 0
        self._left = asyncio.Event()
        self.wire = FakeWire(self)
        if self.wired:
            self.scope["extensions"] = {WIRE: self.wire}
        self.task: asyncio.Task[None] | None = None

    @property
    def has_left(self) -> bool:
        return self._left.is_set()

    def leave(self) -> None:
        self._left.set()
        self.wire.leave()
        if self.gate is not None:
            self.gate.set()  # as uvicorn: a lost connection wakes a blocked send

    async def receive(self) -> dict[str, Any]:
        self.receives += 1
        assert self.receives_waiting == 0, "two tasks wait in receive()"
        if self.messages:
            return self.messages.pop(0)
        self.receives_waiting += 1
        try:
            await self._left.wait()
        finally:
            self.receives_waiting -= 1
        return {"type": "http.disconnect"}

    receives_waiting = 0

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if self.gate is not None and message["type"] == "http.response.body":
            await self.gate.wait()
        if not self._left.is_set():
            self.sent.append(message)

    async def run(self) -> None:
        await asyncio.wait_for(self.app(self.scope, self.receive, self.send), 5)

    def start(self) -> Call:
        self.task = asyncio.create_task(self.run())
        return self

    def reply(self) -> Reply:
        self.wire.flush()
        start = self.sent[0]
        assert start["type"] == "http.response.start"
        bodies = self.sent[1:]
        assert all(message["type"] == "http.response.body" for message in bodies)
        complete = bool(bodies) and not bodies[-1].get("more_body", False)
        return Reply(start["status"], list(start["headers"]), b"".join(m.get("body", b"") for m in bodies), complete)

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent if m["type"] == "http.response.body")


async def until(condition: Callable[[], bool], within_s: float = 2.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def listening(
    app: Callable[..., Awaitable[None]],
    *,
    protocol: type[HttpToolsProtocol] = HttpToolsProtocol,
    client_timeout_s: float = 0.0,
) -> AsyncIterator[int]:
    """The app behind a real protocol (httptools), uvicorn's or ours, on a loopback port. Only ours has the timeout."""
    config = Config(app, http="httptools", lifespan="off", log_config=None, proxy_headers=False)
    config.load()
    state = Shared()
    state.client_timeout_s = client_timeout_s
    server = await asyncio.get_running_loop().create_server(
        lambda: protocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        await until(lambda: not state.tasks)


def request_bytes(
    body: bytes = CHAT, path: str = "/v1/chat/completions", headers: Sequence[str] = (), method: str = "POST"
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: evenhand.test", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@pytest.fixture(autouse=True, params=[False, True], ids=["asgi", "wire"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a module that imports it: every test with a server that speaks ASGI alone, and with our own."""
    monkeypatch.setattr(Call, "wired", request.param)
