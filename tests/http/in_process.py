"""Our protocol, the HTTP face and our transport in one loop, without a socket towards the client.

Bytes are handed to the protocol itself, so that they arrive in exactly the pieces that a test has chosen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from uvicorn.config import Config

from app.dispatch.answer import Answer, EngineRequest
from app.http.routes import build_app
from app.settings import Settings
from app.upstream.http1 import Http1Transport
from app.upstream.transport import Target, Timeouts
from tests.http.fakes import FakeEngines, FakeRegistry, until
from tests.support.loop import LoopThread
from workers.protocol import Protocol, Shared


class ClientSide(asyncio.Transport):
    """What the protocol writes to. `stuck_bytes` of it stay in the buffer: the client reads nothing of them."""

    def __init__(self, stuck_bytes: int = 0) -> None:
        super().__init__()
        self.written = bytearray()
        self.reading = asyncio.Event()
        self.reading.set()
        self.ended = False  # it says nothing more
        self.closing = False
        self.aborted = False
        self.stuck_bytes = stuck_bytes

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 6)}.get(name, default)

    def write(self, data: Any) -> None:
        assert not self.ended and not self.closing, f"written after the end: {bytes(data)!r}"
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True

    def pause_reading(self) -> None:
        self.reading.clear()

    def resume_reading(self) -> None:
        self.reading.set()

    def get_write_buffer_size(self) -> int:
        return min(self.stuck_bytes, len(self.written))


class Straight:
    """Sends every request to one engine."""

    def __init__(self, url: str) -> None:
        self.transport = Http1Transport()
        self._target = Target(url)

    async def open(self, request: EngineRequest) -> Answer:
        body = request.upload or request.body
        response = await self.transport.send(
            self._target, request.method, request.path, request.headers, body, Timeouts(1, 5, 5, 0)
        )
        return Answer(response, self._target.url, ())


class Face:
    """A worker without its socket. All its methods are for other threads than the loop's."""

    def __init__(self, engine_url: str, loop: LoopThread, *, client_timeout_s: float = 0.0, **settings: Any) -> None:
        self._loop = loop
        self._dispatcher = Straight(engine_url)
        app = build_app(
            settings=Settings.load(settings),
            registry=FakeRegistry(),  # type: ignore[arg-type]
            dispatcher=self._dispatcher,
            engine_client=FakeEngines(),
            store_ok=lambda: None,
        )
        self._config = Config(app, http=Protocol, lifespan="off", log_config=None, proxy_headers=False)
        self._config.load()
        self._state = Shared()
        self._state.client_timeout_s = client_timeout_s

    def connect(self, transport: ClientSide) -> Protocol:
        """In the loop's thread."""
        protocol = Protocol(config=self._config, server_state=self._state, app_state={})
        protocol.connection_made(transport)
        return protocol

    def say(self, pieces: Sequence[bytes]) -> ClientSide:
        """One connection on which `pieces` arrive and all that they ask for is answered; then it ends."""
        return self._loop.run(self._say(pieces))

    async def _say(self, pieces: Sequence[bytes]) -> ClientSide:
        transport = ClientSide()
        protocol = self.connect(transport)
        for piece in pieces:
            await asyncio.sleep(0)  # what came before has had its turn: Python 3.12 waits for nothing that is there
            await asyncio.wait_for(transport.reading.wait(), 5)
            if transport.closing:
                break
            protocol.data_received(piece)
        # What waits for the rest of a body, or behind a connection's last answer, does so until the client is gone.
        await until(lambda: transport.closing or all(c.response_complete or c.more_body for c in protocol._cycles), 5)
        protocol.connection_lost(None)
        await until(lambda: not self._state.tasks, 5)
        return transport

    def close(self) -> None:
        self._loop.run(self._dispatcher.transport.close())
