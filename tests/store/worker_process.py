"""Workers' store objects in processes of their own.

    python -m tests.store.worker_process URL NAMESPACE LEASE_S NAME,FD...

One fork for each name, so that the modules are loaded once; FD is its socket. It says its pid, then reads one order a
line and answers each with one line of JSON: `take N` counts N requests at once, `give N` gives N back; the answer is
what it holds, url -> count. It ends when the socket does.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys

from app.store.ledger import Ticket
from tests.store.harness import Worker


async def main(url: str, namespace: str, lease_s: str, name: str, fd: str) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=int(fd)))
    tickets: list[Ticket] = []
    async with Worker(url, namespace, name, lease_s=float(lease_s), seed=os.getpid()) as worker:
        writer.write(b"%d\n" % os.getpid())
        while line := (await reader.readline()).decode().split():
            count = int(line[1])
            if line[0] == "take":
                tickets += await worker.take(count)
            else:
                for ticket in tickets[:count]:
                    ticket.release(succeeded=False)
                del tickets[:count]
            writer.write(json.dumps(worker.ledger.counts).encode() + b"\n")


if __name__ == "__main__":
    common, names = sys.argv[1:4], [word.split(",") for word in sys.argv[4:]]
    for name in names:
        if os.fork() == 0:
            asyncio.run(main(*common, *name))
            os._exit(0)
    for _ in names:
        os.wait()
