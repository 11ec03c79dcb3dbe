#!/usr/bin/env python3
"""What an idle worker holds of the memory, and what open streams add to it.

    python -m bench.memory [--streams 1000]

Starts a deployment of one worker in front of an engine that begins a stream and says no more, looks at every process
of it, opens the streams, and looks again. Everything is on loopback and ends with it; under half a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from bench.routing import tree

ROOT = Path(__file__).parent.parent
HOST = "127.0.0.1"
OPENED_AT_ONCE = 50
SETTLED_S = 3.0
STARTED_WITHIN_S = 30.0
FIRST_EVENT = b"data: {}\n\n"
BODY = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": "x" * 900}]}).encode()
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
)


class Held(NamedTuple):
    """Of one process, MiB. `rss` counts what it shares with others as its own, `pss` its part of that."""

    what: str
    rss: float
    pss: float


async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers probes, and begins a stream for everything else."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"POST"):
            body = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()
            lines = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d" % len(body)
            writer.write(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n%b" % (lines, body))
            return
        lines = b"content-type: text/event-stream\r\ntransfer-encoding: chunked"
        writer.write(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n%x\r\n%b\r\n" % (lines, len(FIRST_EVENT), FIRST_EVENT))
        await reader.read()  # the body, and then until it is gone
    finally:
        writer.close()


def held(root: int) -> dict[int, Held]:
    """By process id; a worker is a gunicorn process below a gunicorn process."""
    found: dict[int, Held] = {}
    masters: set[int] = set()
    stats = tree.everything()
    for pid in tree.below(stats, root):
        directory = Path(f"/proc/{pid}")
        words = (directory / "cmdline").read_bytes().split(b"\0")
        if b"gunicorn" in words:
            what = "worker" if stats[pid].parent in masters else "master"
            masters.add(pid)
        else:
            what = "Redis" if b"embedded_redis" not in b" ".join(words) else "keeper of Redis"
        lines = (line.split() for line in (directory / "smaps_rollup").read_text().splitlines()[1:])
        sizes = {words[0]: int(words[1]) / tree.KIB_PER_MIB for words in lines}
        found[pid] = Held(what, sizes["Rss:"], sizes["Pss:"])
    return found


async def opened(port: int) -> asyncio.StreamWriter:
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(REQUEST)
    await reader.readuntil(FIRST_EVENT)
    return writer


async def started(port: int) -> None:
    async with asyncio.timeout(STARTED_WITHIN_S):
        while True:
            try:
                reader, writer = await asyncio.open_connection(HOST, port)
                writer.write(b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                said = await reader.read()
                writer.close()
                if b" 200 " in said.partition(b"\r\n")[0]:
                    return
            except OSError:
                pass
            await asyncio.sleep(0.1)


@asynccontextmanager
async def one_worker(flags: str) -> AsyncIterator[tuple[int, int]]:
    """Process id and port of a deployment of one worker that is ready and has settled."""
    spare = await asyncio.start_server(lambda *_: None, HOST, 0)
    port = spare.sockets[0].getsockname()[1]
    spare.close()
    with tempfile.TemporaryDirectory(prefix="evenhand-bench-") as state:
        words = ["serve", "--workers", "1", "--server-name", HOST, "--server-port", str(port), "--state-dir", state]
        nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        serving = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "app.cli", *words, *flags.split(), cwd=ROOT, **nowhere
        )
        try:
            await started(port)
            await asyncio.sleep(SETTLED_S)
            yield serving.pid, port
        finally:
            serving.send_signal(signal.SIGINT)
            await serving.wait()


async def measure(streams: int) -> tuple[dict[int, Held], dict[int, Held]]:
    server = await asyncio.start_server(engine, HOST, 0, backlog=2048)
    engine_port = server.sockets[0].getsockname()[1]
    async with one_worker(f"--nodes http://{HOST}:{engine_port}") as (pid, port):
        before = held(pid)
        clients: list[asyncio.StreamWriter] = []
        while len(clients) < streams:
            some = min(OPENED_AT_ONCE, streams - len(clients))
            clients += await asyncio.gather(*(opened(port) for _ in range(some)))
        await asyncio.sleep(SETTLED_S)
        after = held(pid)
        for client in clients:
            client.close()
        await asyncio.sleep(1.0)
    server.close()
    return before, after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000, help="how many are open at the same time (1000)")
    streams = parser.parse_args().streams
    wanted = 2 * streams + 200
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(wanted, resource.getrlimit(resource.RLIMIT_NOFILE)[1])))
    before, after = asyncio.run(measure(streams))
    print(f"Python {platform.python_version()}, {os.uname().sysname} {os.uname().release.partition('-')[0]}, MiB:")
    print(f"| process | idle: RSS (PSS) | with {streams} open streams | more |\n|---|---|---|---|")
    for pid, idle in before.items():
        full = after[pid]
        print(
            f"| {idle.what} | {idle.rss:.1f} ({idle.pss:.1f}) | {full.rss:.1f} ({full.pss:.1f}) "
            f"| {full.rss - idle.rss:.1f} |"
        )


if __name__ == "__main__":
    main()
