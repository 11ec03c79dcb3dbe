"""Workers in processes of their own (see `worker_process`), as the tests hold them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from tests.support.redis import Space

ROOT = Path(__file__).parents[2]
ANSWER_WITHIN_S = 15.0


class WorkerProcess:
    """One of them: `order` and `pid`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process

    async def order(self, what: str, count: int) -> dict[str, int]:
        """Have it `take` or `give` so many; what it holds then."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what} {count}\n".encode())
        return await self.answer()

    async def answer(self) -> dict[str, int]:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), ANSWER_WITHIN_S)
        answer: dict[str, int] = json.loads(line)
        return answer


@asynccontextmanager
async def worker_processes(space: Space, count: int, *, lease_s: float = 8.0) -> AsyncIterator[list[WorkerProcess]]:
    """`count` of them, started together, named p1, p2, ...; all have joined."""
    async with AsyncExitStack() as stack:
        made = await asyncio.gather(*(_start(stack, space, f"p{i}", lease_s) for i in range(1, count + 1)))
        await asyncio.gather(*(process.answer() for process in made))
        yield list(made)


async def _start(stack: AsyncExitStack, space: Space, name: str, lease_s: float) -> WorkerProcess:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.store.worker_process", space.url, space.namespace, name, str(lease_s)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )

    async def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()

    stack.push_async_callback(end)
    return WorkerProcess(name, process)
