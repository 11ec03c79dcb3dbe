"""Watching the deployment: its state, the stream of states and decisions, and what the next decision would weigh.

Owns the hub: one reader for all viewers of this worker, and none while nobody looks. A state is put into bytes once,
whoever is behind gets the newest one only, and of decisions the last 200. It must not know Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.errors import BadRequest, NotFound, ShuttingDown, StoreUnavailable, TooManyViewers
from app.http.ports import WIRE, Wire

log = logging.getLogger("evenhand.http")

EVERY_S = 1.0
NOTHING_NEW_S = 10.0
"""After that a comment line: proxies on the way, and the page, see that the connection lives."""
VIEWERS = 50
DECISIONS_KEPT = 200
LAST_WORDS_S = 0.5
"""How long a viewer may take for what is being sent to it when the worker stops."""

COMMENT = b": nothing new\n\n"
encode = msgspec.json.Encoder().encode


class Seen(Protocol):
    """What is watched; every coroutine but `state` may raise StoreUnavailable."""

    async def state(self) -> dict[str, Any]: ...

    async def explain(self, model: str) -> dict[str, Any]: ...

    async def watch(self) -> None: ...

    async def decisions(self, after: str = "") -> list[dict[str, Any]]: ...


class Hub:
    """One per worker. A viewer is somebody between `enter` and `leave`."""

    def __init__(self, seen: Seen, *, every_s: float = EVERY_S) -> None:
        self.closed = False
        self._seen = seen
        self._every_s = every_s
        self._viewers = 0
        self._reader: asyncio.Task[None] | None = None
        self._left = asyncio.Event()  # the last viewer has
        self._turn = asyncio.Event()  # a new one for each news
        self._number = 0  # of the state
        self._state = b""
        self._decided = 0  # decisions since the first viewer
        self._decisions: deque[bytes] = deque(maxlen=DECISIONS_KEPT)

    def __repr__(self) -> str:
        return f"<Hub viewers={self._viewers} closed={self.closed}>"

    def enter(self) -> None:
        """Raises TooManyViewers, ShuttingDown."""
        if self.closed:
            raise ShuttingDown("This worker is stopping")
        if self._viewers >= VIEWERS:
            raise TooManyViewers(f"{VIEWERS} others watch this worker already")
        self._viewers += 1
        self._left.clear()
        if self._reader is None:
            self._reader = asyncio.create_task(self._read(), name="watch")

    def leave(self) -> None:
        self._viewers -= 1
        if not self._viewers:
            self._left.set()

    def close(self) -> None:
        """The worker stops: whoever looks is told the end."""
        self.closed = True
        self._left.set()
        self._tell()

    async def news(self) -> None:
        """Return when there is something, or the end; a moment ago counts as nothing."""
        await self._turn.wait()

    def since(self, state: int, decided: int) -> tuple[bytes, int, int]:
        """What is new to a viewer that has had that state and so many decisions, as events, and what it has then."""
        events = b""
        if self._state and state != self._number:
            events = b"event: state\ndata: %b\n\n" % self._state
        if fresh := min(self._decided - decided, len(self._decisions)):
            events += b"event: decisions\ndata: [%b]\n\n" % b",".join([*self._decisions][-fresh:])
        return events, self._number, self._decided

    def _tell(self) -> None:
        turn, self._turn = self._turn, asyncio.Event()
        turn.set()

    async def _read(self) -> None:
        after = ""
        # Not cancelled: a connection that the client library is just making would stay open.
        while self._viewers and not self.closed:
            next_s = asyncio.get_running_loop().time() + self._every_s
            try:
                after = await self._look(after)
            except Exception:
                log.exception("the state could not be read for those who watch; it is tried again")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(next_s):
                    await self._left.wait()
        self._reader = None
        self._state, self._decided = b"", 0
        self._decisions.clear()

    async def _look(self, after: str) -> str:
        with contextlib.suppress(StoreUnavailable):
            await self._seen.watch()
            for decision in await self._seen.decisions(after):
                after = decision["id"]
                self._decisions.append(encode(decision))
                self._decided += 1
        self._state = encode(await self._seen.state())
        self._number += 1
        self._tell()
        return after


class Events(Response):
    """A viewer's stream: news until the viewer leaves or the hub closes."""

    def __init__(self, hub: Hub) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(None, media_type="text/event-stream", headers=headers)
        del self.headers["content-length"]
        self._hub = hub

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._hub.enter()
        try:
            await self._run(scope, receive, send)
        finally:
            self._hub.leave()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        tasks = [asyncio.create_task(work) for work in (self._send_all(send), _gone(receive), self._stopped())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended, *_ = await asyncio.gather(*tasks, return_exceptions=True)
        if ended is None:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        elif isinstance(ended, Exception):
            raise ended
        elif (wire := _wire(scope)) is not None:
            wire.write(b"", more=False)  # it does not wait for a viewer who takes nothing

    async def _send_all(self, send: Send) -> None:
        hub, state, decided = self._hub, 0, 0
        while not hub.closed:
            events, state, decided = hub.since(state, decided)
            if not events:
                try:
                    async with asyncio.timeout(NOTHING_NEW_S):
                        await hub.news()
                    continue
                except TimeoutError:
                    events = COMMENT
            await send({"type": "http.response.body", "body": events, "more_body": True})

    async def _stopped(self) -> None:
        while not self._hub.closed:
            await self._hub.news()
        await asyncio.sleep(LAST_WORDS_S)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _wire(scope: Scope) -> Wire | None:
    wire: Wire | None = scope.get("extensions", {}).get(WIRE)
    return wire


class Watch:
    """The endpoints; `seen` None: nothing can be watched."""

    def __init__(self, seen: Seen | None) -> None:
        self._seen = seen
        self.hub = None if seen is None else Hub(seen)

    def __repr__(self) -> str:
        return f"<Watch {self.hub!r}>"

    async def state(self, request: Request) -> Response:
        return _json(await self._watched().state())

    async def events(self, request: Request) -> Response:
        self._watched()
        assert self.hub is not None
        return Events(self.hub)

    async def explain(self, request: Request) -> Response:
        model = request.query_params.get("model")
        if not model:
            raise BadRequest("`model` must be given: GET /nodes/explain?model=NAME", param="model")
        return _json(await self._watched().explain(model))

    def close(self) -> None:
        if self.hub is not None:
            self.hub.close()

    def _watched(self) -> Seen:
        if self._seen is None:
            raise NotFound("There is nothing to watch here.")
        return self._seen


def _json(document: dict[str, Any]) -> Response:
    return Response(encode(document), media_type="application/json", headers={"cache-control": "no-store"})
