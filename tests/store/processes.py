"""Workers in processes of their own (see `worker_process`), as the tests hold them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.redis import Space

ROOT = Path(__file__).parents[2]
ANSWER_WITHIN_S = 15.0


class WorkerProcess:
    """One of them: `order` and `pid`."""

    def __init__(self, name: str, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self.pid = pid
        self._reader = reader
        self._writer = writer

    @classmethod
    async def joined(cls, name: str, ours: socket.socket) -> WorkerProcess:
        reader, writer = await asyncio.open_connection(sock=ours)
        return cls(name, await _answer(reader), reader, writer)

    async def order(self, what: str, count: int) -> dict[str, int]:
        """Have it `take` or `give` so many; what it holds then."""
        self._writer.write(f"{what} {count}\n".encode())
        held: dict[str, int] = await _answer(self._reader)
        return held

    def close(self) -> None:
        self._writer.close()


async def _answer(reader: asyncio.StreamReader) -> Any:
    return json.loads(await asyncio.wait_for(reader.readline(), ANSWER_WITHIN_S))


@asynccontextmanager
async def worker_processes(space: Space, count: int, *, lease_s: float = 8.0) -> AsyncIterator[list[WorkerProcess]]:
    """`count` of them, started together, named p1, p2, ...; all have joined."""
    pairs = {f"p{i}": socket.socketpair() for i in range(1, count + 1)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.store.worker_process", space.url, space.namespace, str(lease_s)),
        *(f"{name},{theirs.fileno()}" for name, (_, theirs) in pairs.items()),
        pass_fds=[theirs.fileno() for _, theirs in pairs.values()],
        cwd=ROOT,
        start_new_session=True,
    )
    made: list[WorkerProcess] = []
    try:
        for _, theirs in pairs.values():
            theirs.close()
        for name, (ours, _) in pairs.items():
            made.append(await WorkerProcess.joined(name, ours))
        yield made
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        for one in made:
            one.close()
