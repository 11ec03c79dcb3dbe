"""The documents of docs/decisions/0022, scripted, and a deployment that answers with them over HTTP.

A test says what the deployment would; so the commands are tested without one, and without a worker's timing.
"""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import pytest

from app import __version__
from app.errors import EvenhandError, ModelNotFound
from app.terminal import by_redis

NOW_S = 1_795_992_650.0


def node(url: str, /, **given: Any) -> dict[str, Any]:
    return {
        "url": url,
        "role": "Hybrid",
        "state": "ready",
        "reason": "",
        "breaker": "closed",
        "models": ["m"],
        "speed": None,
        "unfinished": 0,
        "failures": 0,
        "latency_s": [],
        "requests": 0,
        "share": 0.0,
        "source": None,
        **given,
    }


def worker(name: str, **given: Any) -> dict[str, Any]:
    return {"id": name, "lease_s": 7.2, "unfinished": 0, "nodes": {}, **given}


def state(*nodes: dict[str, Any], **given: Any) -> dict[str, Any]:
    return {
        "time": NOW_S,
        "version": __version__,
        "strategy": "min_expected_latency",
        "encoder_policy": "round_robin",
        "serving": "Hybrid",
        "grace_s": 120.0,
        "redis": {"up": True, "reason": ""},
        "registry_version": 12,
        "models": list(dict.fromkeys(model for one in nodes for model in one["models"])),
        "aliases": {},
        "nodes": list(nodes),
        "workers": [worker("vm-11-aa"), worker("vm-12-bb")],
        "encoders": {"cursor": 0, "next": None, "urls": []},
        "links": [],
        "sessions": 0,
        "handovers": {},
        **given,
    }


def decision(number: int, **given: Any) -> dict[str, Any]:
    candidate = {"node": "http://a:1", "score": 0.5, "unfinished": 1, "speed": 2.0, "mean_latency_s": None}
    return {
        "id": f"{1000 + number}-0",
        "time": NOW_S + number,
        "request": f"r{number}",
        "worker": "vm-11-aa",
        "model": "m",
        "path": "/v1/chat/completions",
        "outcome": "done",
        "status": 200,
        "seconds": 0.25,
        "first_byte_s": 0.05,
        "node": "http://a:1",
        "tries": [
            {"node": "http://a:1", "stage": "request", "score": 0.5, "candidates": [candidate], "left_off": 0},
        ],
        "legs": [{"node": "http://a:1", "stage": "request", "status": 200, "seconds": 0.25, "error": None}],
        **given,
    }


def candidate(url: str, **given: Any) -> dict[str, Any]:
    return {
        "node": url,
        "role": "Hybrid",
        "score": 0.0,
        "chance": 0.0,
        "unfinished": 0,
        "speed": 1.0,
        "given_speed": 1.0,
        "mean_latency_s": None,
        **given,
    }


def explain(*candidates: dict[str, Any], **given: Any) -> dict[str, Any]:
    return {
        "model": "m",
        "alias": None,
        "strategy": "min_expected_latency",
        "redis": {"up": True, "reason": None},
        "rule": "Least unfinished / speed; ties by chance.",
        "choices": [{"roles": ["Hybrid", "Decode"], "candidates": list(candidates), "passed_over": []}],
        **given,
    }


class Scripted:
    """A deployment over HTTP that answers with what stands in its attributes. A context manager.

    `explained`: model -> document; `refusal`: (status, message) that everything gets, `refusals`: that a path gets;
    `asked`: (method, path, key).
    """

    def __init__(self, said: dict[str, Any]) -> None:
        self.state = said
        self.explained: dict[str, dict[str, Any]] = {}
        self.nodes: dict[str, Any] = {}
        self.trouble = ""  # of /ready
        self.refusal: tuple[int, str] | None = None
        self.refusals: dict[str, tuple[int, str]] = {}
        self.older = False  # it knows none of the new routes
        self.asked: list[tuple[str, str, str | None]] = []
        self.decisions: list[dict[str, Any]] = []
        self._hang_up = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a client that left in mid-stream

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def hang_up(self) -> None:
        """End the streams that are open; new ones are taken."""
        self._hang_up.set()
        self._hang_up = threading.Event()

    def close(self) -> None:
        self._hang_up.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, asked: http.server.BaseHTTPRequestHandler) -> None:
        parts = urlsplit(asked.path)
        self.asked.append((asked.command, asked.path, asked.headers.get("authorization")))
        refusal = self.refusal or self.refusals.get(parts.path)
        if refusal is not None:
            self._say(asked, refusal[0], error(refusal[1]))
        elif self.older and parts.path.startswith(("/dashboard", "/nodes/explain")):
            self._say(asked, 404, error("Not Found", "not_found"))
        elif parts.path == "/dashboard/events":
            self._stream(asked, self._hang_up)
        elif parts.path == "/dashboard/state":
            self._say(asked, 200, self.state)
        elif parts.path == "/nodes/status":
            self._say(asked, 200, self.nodes)
        elif parts.path == "/nodes/explain":
            model = parse_qs(parts.query)["model"][0]
            found = self.explained.get(model)
            self._say(asked, 200 if found else 404, found or error(f"The model {model!r} does not exist.", UNKNOWN))
        elif parts.path == "/ready":
            self._say(asked, 503 if self.trouble else 200, error(self.trouble) if self.trouble else {"status": "ready"})
        elif parts.path == "/health":
            self._say(asked, 200, {"status": "healthy", "roles": {"Hybrid": {"ready": 1}, "Prefill": {}}})
        else:
            self._say(asked, 404, error("Not Found", "not_found"))

    def _say(self, asked: http.server.BaseHTTPRequestHandler, status: int, value: Any) -> None:
        text = json.dumps(value).encode()
        asked.send_response(status)
        asked.send_header("content-type", "application/json")
        asked.send_header("content-length", str(len(text)))
        asked.end_headers()
        asked.wfile.write(text)

    def _stream(self, asked: http.server.BaseHTTPRequestHandler, over: threading.Event) -> None:
        asked.send_response(200)
        asked.send_header("content-type", "text/event-stream")
        asked.end_headers()
        told = 0
        while not over.is_set():
            asked.wfile.write(b": a comment\n\n" + event("state", self.state))
            if told < len(self.decisions):
                asked.wfile.write(event("decisions", self.decisions[told:]))
                told = len(self.decisions)
            asked.wfile.flush()
            over.wait(0.05)


UNKNOWN = "model_not_found"


def error(message: str, code: str = "internal_error") -> dict[str, Any]:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": code}}


def event(kind: str, value: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(value)}\n\n".encode()


def many(count: int, **given: Any) -> dict[str, Any]:
    """A state of so many nodes."""
    return state(*(node(f"http://10.0.0.{n}:23333", unfinished=n % 5, **given) for n in range(1, count + 1)))


class ScriptedView:
    """What `app.store.view` reads from Redis, scripted: for commands that are given --redis-url."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.said = said
        self.explained: dict[str, dict[str, Any]] = {}
        self.told: list[dict[str, Any]] = []
        self.watched = self.looked = 0
        self.failure: EvenhandError | None = None
        self.places: list[tuple[str, str]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(by_redis, "view_over_redis", self._once)
        monkeypatch.setattr(by_redis, "explain_over_redis", self._explain_once)
        monkeypatch.setattr(by_redis, "over_redis", self._over_redis)

    async def state(self) -> dict[str, Any]:
        self.looked += 1
        if self.failure is not None:
            raise self.failure
        return self.said

    async def explain(self, model: str) -> dict[str, Any]:
        if self.failure is not None:
            raise self.failure
        if model not in self.explained:
            raise ModelNotFound(f"The model {model!r} does not exist.")
        return self.explained[model]

    async def watch(self) -> None:
        self.watched += 1

    async def decisions(self, after: str = "") -> list[dict[str, Any]]:
        return [one for one in self.told if one["id"] > after]

    async def _once(self, redis_url: str, namespace: str) -> dict[str, Any]:
        self.places.append((redis_url, namespace))
        return await self.state()

    async def _explain_once(self, redis_url: str, namespace: str, model: str) -> dict[str, Any]:
        self.places.append((redis_url, namespace))
        return await self.explain(model)

    @asynccontextmanager
    async def _over_redis(self, redis_url: str, namespace: str, *, timeout_s: float = 1.0) -> AsyncIterator[Self]:
        self.places.append((redis_url, namespace))
        yield self
