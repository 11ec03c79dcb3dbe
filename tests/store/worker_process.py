"""A worker's store objects in a process of its own: `python -m tests.store.worker_process URL NAMESPACE NAME LEASE_S`.

Reads one order a line from stdin, answers each with one line of JSON, ends with stdin:
`take N` counts N requests at once, `give N` gives N back; the answer is what it holds, url -> count.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from app.store.ledger import Ticket
from tests.store.harness import Worker


async def main(url: str, namespace: str, name: str, lease_s: str) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tickets: list[Ticket] = []
    async with Worker(url, namespace, name, lease_s=float(lease_s), seed=os.getpid()) as worker:
        print("{}", flush=True)
        while line := (await reader.readline()).decode().split():
            count = int(line[1])
            if line[0] == "take":
                tickets += await worker.take(count)
            else:
                for ticket in tickets[:count]:
                    ticket.release(succeeded=False)
                del tickets[:count]
            print(json.dumps(worker.ledger.counts), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
