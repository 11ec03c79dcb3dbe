"""A road to Redis that loses replies, cuts them short, or adds to them: what no delay can show."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Self, cast

from tests.support.wait import aeventually


class LossyRoad:
    """A TCP proxy in the test's own loop; an async context manager.

    Attributes:
        swallow: commands reach the server and run, their replies are lost; the connection stands.
        cut_after_bytes: so many bytes of replies more, then the client's connection is aborted (once).
        append: is sent to the client right behind the next reply, in the same write (once).
    """

    def __init__(self, target: Path) -> None:
        self.swallow = False
        self.cut_after_bytes: int | None = None
        self.append = b""
        self.url = ""
        self.target = target
        self.ends: set[_End] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.get_running_loop().create_server(lambda: _ClientEnd(self), "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        for end in list(self.ends):
            end.abort()
        await aeventually(lambda: not self.ends)

    def pass_back(self, data: bytes, client: _End) -> None:
        """What of a reply the client gets."""
        if self.swallow:
            return
        if self.cut_after_bytes is not None:
            client.write(data[: self.cut_after_bytes])
            self.cut_after_bytes -= min(len(data), self.cut_after_bytes)
            if self.cut_after_bytes == 0:
                self.cut_after_bytes = None
                client.abort()
            return
        extra, self.append = self.append, b""
        client.write(data + extra)


class _End(asyncio.Protocol):
    """One end of a connection through the road; `other` is the other one."""

    def __init__(self, road: LossyRoad) -> None:
        self.road = road
        self.other: _End | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are of no asyncio class
        self.road.ends.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.road.ends.discard(self)
        if self.other is not None:
            self.other.abort()

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class _ServerEnd(_End):
    def data_received(self, data: bytes) -> None:
        assert self.other is not None
        self.road.pass_back(data, self.other)


class _ClientEnd(_End):
    def __init__(self, road: LossyRoad) -> None:
        super().__init__(road)
        self._early: list[bytes] = []
        self._dialling: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._dialling = asyncio.create_task(self._dial())

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early.append(data)
        else:
            self.other.write(data)

    async def _dial(self) -> None:
        there = _ServerEnd(self.road)
        there.other = self
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: there, str(self.road.target))
        except OSError:
            self.abort()
            return
        self.other = there
        for data in self._early:
            there.write(data)
        if self not in self.road.ends:  # the client was faster to leave
            there.abort()
