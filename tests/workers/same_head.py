"""Our protocol without a socket, an app that records what it is asked, and two ways for the same bytes to come.

`whole`: each request, or what is left of it, in one read. `by_byte`: no head ever comes whole, so that nothing but the
parser can have read it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from uvicorn.config import Config

from app.http.ports import WIRE
from tests.http.fakes import until
from tests.http.in_process import ClientSide
from tests.upstream.scripted import turns
from workers.protocol import Protocol, Shared

App = Callable[[Any, Any, Any], Awaitable[None]]
PIECE_BYTES = 60_000
EDGE_BYTES = 300


@dataclass
class Asked:
    """`scope` without what belongs to the connection or the server; `body` None: it did not come to its end."""

    scope: dict[str, Any]
    body: bytes | None = None


@dataclass
class Seen:
    """What a connection came to."""

    asked: list[Asked] = field(default_factory=list)
    written: bytes = b""
    end: str = ""  # of the connection


class Recording:
    """An app that answers with the length of the body.

    Args:
        how: "whole", when it has the body; "by wire", which it takes as the proxy does; "at once", before a look at it;
            "begun", with something of it; "late", some turns later; "stream", in chunks; "rude", after which its scope
            is another.
    """

    def __init__(self, how: str = "whole") -> None:
        self.how = how
        self.asked: list[Asked] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        kept = {name: value for name, value in scope.items() if name != "extensions"}
        assert isinstance(scope["headers"], list)
        assert all(type(part) is bytes for pair in scope["headers"] for part in pair)
        asked = Asked({**kept, "headers": list(scope["headers"]), "state": dict(scope["state"])})
        self.asked.append(asked)
        extensions = scope["extensions"]
        if self.how == "rude":
            scope["headers"].append((b"x-left", b"behind"))
            scope["headers"][0] = (b"host", b"other")
            scope["state"]["left"] = "behind"
            for name in ("path", "root_path", "method", "router"):
                scope[name] = "/left/behind"
            scope["raw_path"] = scope["query_string"] = b"/left/behind"
        if self.how == "late":
            for _ in range(12):
                await asyncio.sleep(0)
        if self.how == "begun":
            if (await receive())["type"] == "http.disconnect":
                return
        elif self.how != "at once":
            body = await (self._by_wire(extensions[WIRE], receive) if self.how == "by wire" else body_of(receive))
            if body is None:
                return
            asked.body = body
        length = b"%d" % len(asked.body or b"")
        said = [(b"x-length", length)]
        if self.how == "stream":
            await send({"type": "http.response.start", "status": 200, "headers": said})
            for piece in (b"a" + length, b"b"):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                await asyncio.sleep(0)
            await send({"type": "http.response.body"})
            return
        said.append((b"content-length", b"%d" % len(length)))
        await send({"type": "http.response.start", "status": 200, "headers": said})
        await send({"type": "http.response.body", "body": length})

    async def _by_wire(self, wire: Any, receive: Any) -> bytes | None:
        body = wire.whole_body()
        if body is None:
            wire.gather(2**20)
            return await body_of(receive)
        assert type(body) is bytes
        return body


async def body_of(receive: Any) -> bytes | None:
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        assert type(message["body"]) is bytes
        body += message["body"]
        more = message["more_body"]
    return body


class Side(ClientSide):
    """A client's side for one that may end it too; it has no socket."""

    def __init__(self, host: str = "127.0.0.1", *, tls: bool = False) -> None:
        super().__init__()
        self._tls = tls
        self.peer = (host, 5)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        known = {"peername": self.peer, "sockname": ("127.0.0.1", 6), "sslcontext": self._tls or None}
        return known.get(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def end(self) -> str:
        return "aborted" if self.aborted else "closing" if self.closing else "ended" if self.ended else ""


def connected(app: App, side: Side | None = None, **state_of_server: Any) -> tuple[Protocol, Side, Any]:
    config = Config(app=app, http=Protocol, lifespan="off", log_config=None, proxy_headers=False)
    config.load()
    state: Any = Shared()
    for name, value in state_of_server.items():
        setattr(state, name, value)
    side = side or Side()
    protocol = Protocol(config=config, server_state=state, app_state={"kept": 1})
    protocol.connection_made(side)
    return protocol, side, state


class Client:
    """One connection to an app."""

    def __init__(self, app: App, host: str = "127.0.0.1", *, tls: bool = False, **state_of_server: Any) -> None:
        self.app: Any = app
        self.protocol, self.side, self.state = connected(app, Side(host, tls=tls), **state_of_server)

    async def ask(self, *pieces: bytes) -> bytes:
        """All that is written to the client on what comes in these reads."""
        self.side.written.clear()
        for piece in pieces:
            self.protocol.data_received(piece)
            await turns(6)
        await self.answered()
        return bytes(self.side.written)

    async def answered(self) -> None:
        await until(lambda: not self.state.tasks, 5)

    def leave(self) -> None:
        self.protocol.connection_lost(None)


async def settled(state: Any, rounds: int = 40) -> None:
    """Until the app waits for nothing but its client."""
    for _ in range(rounds):
        if not state.tasks:
            return
        await asyncio.sleep(0)


async def played(how: str, pieces: Iterable[bytes], *, wait: bool = True) -> Seen:
    """One connection on which the pieces come.

    Args:
        how: the app's, as `Recording` has it.
        wait: each piece finds everything answered that can be; else it comes in the same turn as the one before.
    """
    app = Recording(how)
    protocol, side, state = connected(app)
    for piece in pieces:
        if wait:
            await (settled(state) if len(piece) > 1 else turns())
        if not side.reading.is_set():
            await until(lambda: side.reading.is_set() or side.closing, 5)
        if side.closing:
            break
        protocol.data_received(piece)
    await settled(state, 200)
    seen = Seen(app.asked, bytes(side.written), side.end())
    protocol.connection_lost(None)
    await until(lambda: not state.tasks, 5)
    return seen


async def afresh(how: str, requests: Iterable[bytes]) -> Seen:
    """Each request on a connection of its own, in one read; none after one that ended its connection."""
    seen = Seen()
    for request in requests:
        one = await played(how, [request])
        seen.asked += one.asked
        seen.written += one.written
        seen.end = one.end
        if one.end:
            break
    return seen


def by_byte(requests: Sequence[bytes]) -> list[bytes]:
    """Every byte a read of its own, but for the middle of what is long."""
    pieces: list[bytes] = []
    for request in requests:
        if len(request) <= 2 * EDGE_BYTES + PIECE_BYTES:
            edge, inner = len(request), b""
        else:
            edge, inner = EDGE_BYTES, request[EDGE_BYTES:-EDGE_BYTES]
        pieces += [request[i : i + 1] for i in range(edge)]
        pieces += [inner[i : i + PIECE_BYTES] for i in range(0, len(inner), PIECE_BYTES)]
        if inner:
            pieces += [request[i : i + 1] for i in range(len(request) - EDGE_BYTES, len(request))]
    return pieces
