"""A connection without a socket: the test is the event loop, and hands it bytes and ends."""

from __future__ import annotations

import asyncio
from typing import Any

from app.upstream.connection import Connection, Http1Response
from app.upstream.pool import Pool
from app.upstream.transport import Target
from tests.upstream.client import limits


class FakeTransport(asyncio.Transport):
    """Takes what is written and remembers how it was closed."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.aborted = False
        self.reading = True

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        self.aborted = True


def connected() -> tuple[Connection, FakeTransport, Pool]:
    pool = Pool(4.0, asyncio.get_running_loop())
    connection, transport = Connection(Target("http://e:1"), pool, pool.loop), FakeTransport()
    connection.connection_made(transport)
    return connection, transport, pool


def begun(connection: Connection) -> Http1Response:
    return connection.begin(b"POST / HTTP/1.1\r\n\r\n", b"", limits(), float("inf"), head_only=False)
