"""A request's body on its way to an engine, piece by piece, beside the wait for the engine's answer.

Owns the pace of one upload: no piece is asked for before the engine has taken most of the one before. It must not
know where the pieces come from; framing of the answer and the connection's fate are `connection`'s.

The engine's clock runs only while something is up to the engine: while it takes no bytes, and from the body's end on.
A client that is slow is the server's business.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from app.upstream.transport import Upload

if TYPE_CHECKING:
    from app.upstream.connection import Connection


class Uploading:
    """Runs from its making until the body's end, the connection's end or `stop`."""

    __slots__ = ("_can_write", "_connection", "_task", "_upload")

    def __init__(self, connection: Connection, upload: Upload) -> None:
        self._connection = connection
        self._upload = upload
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._task = connection.loop.create_task(self._run())

    def __repr__(self) -> str:
        return f"<Uploading {'' if self._can_write.is_set() else 'paused '}done={self._task.done()}>"

    def pause(self) -> None:
        self._can_write.clear()

    def resume(self) -> None:
        self._can_write.set()

    def stop(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        connection, upload = self._connection, self._upload
        try:
            while piece := await upload.read():
                connection.write(piece if upload.length is not None else b"%x\r\n%b\r\n" % (len(piece), piece))
                if not self._can_write.is_set():
                    connection.wait_for_engine()
                    await self._can_write.wait()
                    connection.wait_for_client()
        except Exception as e:  # whoever waits for the answer gets it
            connection.upload_failed(e)
            return
        if upload.length is None:
            connection.write(b"0\r\n\r\n")
        connection.upload_ended()
