"""What the black-box tests of serving share: deployments for the session, raw sockets, the shape of errors.

Its fixtures are in `conftest`. Nothing here knows the code under test; the expected words are LMDeploy's and OpenAI's.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import resource
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import pytest

from tests.support import load
from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine
from tests.support.http import Reply, request
from tests.support.loop import LoopThread
from tests.support.quiet import quiet_check
from tests.support.redis import PrivateRedis, Space
from tests.support.wait import WITHIN_S, eventually
from workers.engine.http import Record

Factory = Callable[..., SimulatedEngine]


CONNECT_S, FIRST_BYTE_S, IDLE_S, TOTAL_S = 0.3, 0.6, 0.4, 2.5
LIMIT_BYTES = 1_000_000
# Short times and a small body: what the tests of failures run on.
TIGHT = {
    "connect_timeout_s": CONNECT_S,
    "first_byte_timeout_s": FIRST_BYTE_S,
    "idle_timeout_s": IDLE_S,
    "total_timeout_s": TOTAL_S,
    "max_body_size": "1MB",
}


class Deployments:
    """The deployments of the session, one for each set of options: a start takes a second or two."""

    def __init__(self, server: PrivateRedis) -> None:
        self._server = server
        self._made: dict[str, Deployment] = {}

    def get(self, workers: int, *, open_files: int | None = None, **options: Any) -> Deployment:
        """`open_files`: the soft limit that it is started under."""
        self._server.ensure_running()
        name = json.dumps([workers, open_files, options], sort_keys=True)
        made = self._made.get(name)
        if made is None or made.process is None or not made.process.running:
            if made is not None:
                made.close()
            with _soft_limit(open_files):
                made = Deployment(workers, redis=Space(self._server, f"t{secrets.token_hex(6)}"), **options)
            self._made[name] = made
        return made

    def close(self) -> None:
        """Stop all at the same time: each takes a second or two."""
        made = list(self._made.values())
        try:
            with ThreadPoolExecutor(max(len(made), 1)) as pool:
                list(pool.map(_stop, made))
        finally:
            for deployment in made:
                deployment.close()
        left = [line for deployment in made for line in deployment.left_behind]
        assert not left, f"processes left behind: {left}"


@contextlib.contextmanager
def _soft_limit(open_files: int | None) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files or before[0], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def _stop(deployment: Deployment) -> None:
    if deployment.process is not None and deployment.process.running:
        deployment.stop()


class SharedDeployment:
    """What a module's tests run on, said as its `DEPLOYMENT`; modules that say the same share one.

    Args:
        key: the admin key, where the deployment wants one even from loopback.
        client_key: a key for /v1, where it is not the same.
        options: of `Deployments.get`.
    """

    def __init__(
        self, *, workers: int = 2, key: str | None = None, client_key: str | None = None, **options: Any
    ) -> None:
        self.workers = workers
        self.options = options
        self.admin = {"authorization": f"Bearer {key}"} if key else None
        self.client = {"authorization": f"Bearer {client_key or key}"} if key else None


def on_every_worker(deployment: Deployment, check: Callable[[], bool], *, within_s: float = WITHIN_S) -> None:
    """`check` asks on a connection of its own each time: 12 in a row reach both of two workers."""
    eventually(lambda: all(check() for _ in range(12)), within_s=within_s)


def remove_nodes(deployment: Deployment, *, but: str = "", headers: dict[str, str] | None = None) -> None:
    for url in set(deployment.nodes("?all=1", headers=headers)) - {but}:
        assert deployment.post("/nodes/remove", {"url": url}, headers=headers).status == 200


Scenario = Callable[[Deployment, Factory], None]


class Together:
    """Scenarios that run at the same time, because they mostly wait; each is a test with its own name.

        together = Together(settings={"probe_interval_s": 1})
        running = together.fixture()

        @together
        def test_a_rule(deployment: Deployment, make: Factory) -> None: ...

    They share one deployment, so each gives its engines models of its own. Only those that were selected run.
    """

    def __init__(self, workers: int = 2, **options: Any) -> None:
        self._workers = workers
        self._options = options
        self._scenarios: dict[str, Scenario] = {}

    def __call__(self, scenario: Scenario) -> Callable[..., None]:
        name = scenario.__name__
        self._scenarios[name] = scenario

        def test(running: dict[str, Future[None]]) -> None:
            running[name].result(60)

        test.__name__ = test.__qualname__ = name
        test.__doc__ = scenario.__doc__
        return test

    def fixture(self) -> Any:
        """To be bound as `running` in the module."""

        @pytest.fixture(scope="module", name="running")
        def running(
            request: pytest.FixtureRequest, deployments_of_session: Deployments, engine_loop: LoopThread
        ) -> Iterator[dict[str, Future[None]]]:
            deployment = deployments_of_session.get(self._workers, **self._options)
            made: list[SimulatedEngine] = []

            def make(**options: Any) -> SimulatedEngine:
                made.append(SimulatedEngine(loop=engine_loop, **options))
                return made[-1]

            mine = {item.name for item in request.session.items if item.path == request.path}
            chosen = {name: scenario for name, scenario in self._scenarios.items() if name in mine}
            with ThreadPoolExecutor(max(len(chosen), 1)) as pool:
                yield {name: pool.submit(scenario, deployment, make) for name, scenario in chosen.items()}
            try:
                assert deployment.space is not None
                quiet_check(deployment.space, engines=made)
            finally:
                for engine in made:
                    engine.close()

        return running


# --- requests


def chat_body(model: str = "sim", *, stream: bool = False, prompt: str = "hello", **fields: Any) -> bytes:
    messages = [{"role": "user", "content": prompt}]
    return json.dumps({"model": model, "stream": stream, "messages": messages, **fields}).encode()


def post_json(url: str, path: str, body: bytes, headers: dict[str, str] | None = None, **more: Any) -> Reply:
    sent = {"content-type": "application/json", **(headers or {})}
    return request("POST", url + path, body=body, headers=sent, **more)


def chat(deployment: Deployment, body: bytes | None = None, **headers: str) -> Reply:
    """One chat request on a connection of its own; `headers` with _ for -."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return post_json(deployment.url, "/v1/chat/completions", body if body is not None else chat_body(), named)


def streams(deployment: Deployment, n: int, model: str = "sim", **fields: Any) -> Future[list[load.Answer]]:
    """`n` streams in the background."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(lambda: asyncio.run(load.many(deployment.url, n, stream=True, model=model, **fields)))
    pool.shutdown(wait=False)
    return future


@dataclass
class RawReply:
    status: int
    headers: list[tuple[str, str]]  # as they came; names in lower case
    body: bytes
    complete: bool = True  # False: the connection ended before the framing did

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    def json(self) -> Any:
        return json.loads(self.body)


@contextlib.contextmanager
def connected(url: str, *, timeout_s: float = 10.0, receive_bytes: int = 0) -> Iterator[socket.socket]:
    """A raw connection to `url`, TLS included (certificates are not checked).

    Args:
        receive_bytes: the kernel's receive buffer, where a slow client must be slow at once.
    """
    parts = urlsplit(url)
    plain = socket.socket()
    try:
        if receive_bytes:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        plain.settimeout(timeout_s)
        plain.connect((parts.hostname, parts.port))
        if parts.scheme == "https":
            trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            trusting.check_hostname = False
            trusting.verify_mode = ssl.CERT_NONE
            plain = trusting.wrap_socket(plain)
        yield plain
    finally:
        plain.close()


def read_reply(s: socket.socket) -> RawReply:
    answer = http.client.HTTPResponse(s, method="POST")
    try:
        answer.begin()
        headers = [(name.lower(), value) for name, value in answer.getheaders()]
        complete = True
        try:
            body = answer.read()
        except http.client.IncompleteRead as e:
            body, complete = e.partial, False
        except ConnectionResetError:
            body, complete = b"", False
        return RawReply(answer.status, headers, body, complete)
    finally:
        answer.close()


def raw(url: str, data: bytes, *, timeout_s: float = 10.0) -> RawReply:
    """`data` as it is, on a connection of its own, and what came back."""
    with connected(url, timeout_s=timeout_s) as s:
        s.sendall(data)
        return read_reply(s)


def raw_post(lines: list[str], body: bytes = b"", path: str = "/v1/chat/completions") -> bytes:
    """A POST of exactly these header lines (latin-1) and this body."""
    return "\r\n".join([f"POST {path} HTTP/1.1", *lines, "", ""]).encode("latin-1") + body


def in_chunks(body: bytes, size: int) -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


# --- what came


def values(record: Record, name: bytes) -> list[bytes]:
    """All values of a header, as the engine saw them."""
    return [value for key, value in record.headers if key.lower() == name]


def openai_error(reply: Any, status: int, code: int | None = None) -> dict[str, Any]:
    """The `error` object of an answer that must have OpenAI's shape, LMDeploy's `code` and a text beside it."""
    assert reply.status == status, (reply.status, reply.body[:500])
    value = json.loads(reply.body)
    error: dict[str, Any] = value["error"]
    assert set(error) >= {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str) and error["type"]
    if code is not None:
        assert value["error_code"] == code, value
        assert isinstance(value["text"], str), value
        assert value["text"], value
    return error


def events(body: bytes) -> list[str]:
    """The data of each SSE event, in order."""
    return [line[6:] for line in body.decode().replace("\r\n", "\n").split("\n") if line.startswith("data: ")]


def broken_stream(body: bytes, chunks: int) -> dict[str, Any]:
    """The error at the end of a stream that broke off after `chunks` events: one event, no `[DONE]`."""
    *before, last = events(body)
    assert len(before) == chunks, f"{len(before)} chunks before the last event: {body[-600:]!r}"
    assert all("choices" in json.loads(event) for event in before)
    assert body.endswith(b"\n\n") and "[DONE]" not in (last, *before)
    error: dict[str, Any] = json.loads(last)["error"]
    assert set(error) >= {"message", "type", "param", "code"} and error["message"], error
    return error


# --- an engine that says exactly what it is told


def ask_scripted(deployment: Deployment, engine: ScriptedEngine, *, stream: bool = False, path: str = "") -> RawReply:
    """Register it and ask it for a chat at once, on one connection: other workers may know of it 1 s later."""
    body = chat_body("scripted", stream=stream)
    added = json.dumps({"url": engine.url, "status": {"models": ["scripted"]}}).encode()
    with connected(deployment.url) as s:
        for data, to in ((added, "/nodes/add"), (body, path or "/v1/chat/completions")):
            lines = ["Host: h", "Content-Type: application/json", f"Content-Length: {len(data)}"]
            s.sendall(raw_post(lines, data, to))
            reply = read_reply(s)
            if to == "/nodes/add":
                assert reply.json() == "Added successfully"
        return reply


@dataclass
class ScriptedEngine:
    """A node whose answer to every POST is `answer`, byte for byte; then it closes. Healthy for probes."""

    answer: bytes
    port: int = 0
    posts: int = 0
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in (self._accepting, *self._threads):
            thread.join(5)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                taken, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(taken,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, s: socket.socket) -> None:
        with s, contextlib.suppress(OSError):
            s.settimeout(5)
            asked = b""
            while b"\r\n\r\n" not in asked:
                asked += s.recv(65536)
            head, _, body = asked.partition(b"\r\n\r\n")
            if head.startswith(b"GET"):
                s.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
                return
            length = next(int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length"))
            while len(body) < length:
                body += s.recv(65536)
            self.posts += 1
            s.sendall(self.answer)
