"""A server of the real page whose documents and answers are what a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from app.http.dashboard import Dashboard
from tests.browser.documents import Document, state
from tests.support.loop import LoopThread

EVERY_S = 1.0  # as the real one sends its state


@dataclass
class Asked:
    method: str
    target: str  # path and query
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Refusal:
    status: int
    message: str

    def response(self) -> Response:
        error = {"message": self.message, "type": "t", "param": None, "code": "c"}
        return JSONResponse({"error": error}, self.status)


@dataclass
class Site:
    """Attributes may be set at any time; `show` and `decide` reach the pages at once."""

    loop: LoopThread
    state: Document = field(default_factory=state)
    key: str | None = None  # events and management need it
    down: Refusal | None = None  # what events answer instead
    silent: bool = False  # sends nothing by itself
    management: Refusal | None = None  # what management answers instead
    asked: list[Asked] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._viewers: set[asyncio.Queue[bytes | None]] = set()
        dashboard = Dashboard()
        app = Starlette(
            routes=[
                Route("/dashboard", dashboard.page),
                Route("/dashboard/", dashboard.slash),
                Route("/dashboard/assets/{name}", dashboard.asset),
                Route("/dashboard/events", self._events),
                Route("/nodes/add", self._manage, methods=["POST"]),
                Route("/nodes/remove", self._manage, methods=["POST"]),
            ]
        )
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self.url = self.loop.run(self._start())
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.drop()
        self._server.should_exit = True
        self.loop.run(self._serving())

    async def _start(self) -> str:
        self._task = asyncio.create_task(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.005)
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    async def _serving(self) -> None:
        await asyncio.wait_for(self._task, 5)

    # --- for tests

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    def show(self, document: Document) -> None:
        self.state = document
        self._send(event("state", document))

    def decide(self, *decisions: Document) -> None:
        self._send(event("decisions", list(decisions)))

    def drop(self) -> None:
        """End all streams."""
        self._send(None)

    def of(self, path: str) -> list[Asked]:
        return [one for one in self.asked if one.target.partition("?")[0] == path]

    def _send(self, data: bytes | None) -> None:
        async def send() -> None:
            for queue in self._viewers:
                queue.put_nowait(data)

        self.loop.run(send())

    # --- the endpoints

    async def _note(self, request: Request) -> None:
        query = f"?{request.url.query}" if request.url.query else ""
        body = await request.body()
        self.asked.append(Asked(request.method, request.url.path + query, dict(request.headers), body))

    def _refusal(self, request: Request, other: Refusal | None) -> Refusal | None:
        sent = request.headers.get("authorization")
        if self.key is not None and sent != f"Bearer {self.key}":
            if sent is None:
                return Refusal(401, "This needs an admin key: send `Authorization: Bearer <key>`.")
            return Refusal(401, "The admin key is wrong.")
        return other

    async def _events(self, request: Request) -> Response:
        await self._note(request)
        refusal = self._refusal(request, self.down)
        if refusal is not None:
            return refusal.response()
        return StreamingResponse(self._stream(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def _stream(self) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._viewers.add(queue)
        try:
            if not self.silent:
                yield event("state", self.state)
            while True:
                try:
                    data = await asyncio.wait_for(queue.get(), None if self.silent else EVERY_S)
                except TimeoutError:
                    data = event("state", self.state)
                if data is None:
                    return
                yield data
        finally:
            self._viewers.discard(queue)

    async def _manage(self, request: Request) -> Response:
        await self._note(request)
        refusal = self._refusal(request, self.management)
        if refusal is not None:
            return refusal.response()
        if request.url.path == "/nodes/add":
            return JSONResponse("Added successfully")
        drain = request.query_params.get("drain") == "true"
        return JSONResponse("Draining started" if drain else "Deleted successfully")


def event(name: str, value: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(value)}\n\n".encode()
