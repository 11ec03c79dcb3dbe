"""A simulated engine as a process of its own, which can be stopped and killed.

Its in-flight count stands in a page that parent and child share: it can be read whatever state the process is in.
Knobs are changed over a unix socket, one JSON object a line. The port stays the parent's over a kill.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.process import Process
from workers.engine import answers
from workers.engine.answers import Answer, Knobs
from workers.engine.http import Record
from workers.engine.server import Engine

ROOT = Path(__file__).resolve().parents[2]
MODEL = "sim"
NORMAL: dict[str, Any] = {"models": (MODEL,), "ttft_s": 0.05, "gap_s": 0.03, "chunks": 64}
BIG = "a big answer"
"""A prompt with these words gets a first event of BIG_KB: more than the sockets on the way take in."""
BIG_KB = 4000
PAGE_BYTES = 4096
START_WITHIN_S = 20.0
CALL_WITHIN_S = 5.0


# --- the process


class SharedEngine(Engine):
    """Tells its in-flight count to whoever maps the page."""

    def __init__(self, page: mmap.mmap, knobs: Knobs, *, port: int) -> None:
        super().__init__(knobs, port=port, keep_records=False)
        self._page = page
        self._tell()

    def begin(self, record: Record) -> None:
        super().begin(record)
        self._tell()

    def end(self, record: Record, *, aborted: bool = False) -> None:
        super().end(record, aborted=aborted)
        self._tell()

    def answer(self, record: Record) -> Answer:
        if BIG.encode() in record.body and self.knobs.status == 200:
            big = replace(self.knobs, line_kb=BIG_KB)
            return answers.inference(big, "/v1/chat/completions", b"application/json", record.body, record.id)
        return super().answer(record)

    def _tell(self) -> None:
        struct.pack_into("<q", self._page, 0, self.stats.in_flight)


async def serve(directory: Path, port: int) -> None:
    page = map_page(directory)
    engine = SharedEngine(page, Knobs(**NORMAL), port=port)

    async def take_orders(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            await engine.apply(**json.loads(line))
            writer.write(b"done\n")
        writer.close()

    await engine.start()
    control = directory / "control"
    control.unlink(missing_ok=True)
    await asyncio.start_unix_server(take_orders, str(control))
    await asyncio.Event().wait()


def map_page(directory: Path) -> mmap.mmap:
    with open(directory / "page", "r+b") as file:
        return mmap.mmap(file.fileno(), PAGE_BYTES)


# --- its parent's side


class EngineProcess:
    """Starts at once. `readable`: whether what `in_flight` says is what the engine would say."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="evenhand-engine-"))
        (self.directory / "page").write_bytes(bytes(PAGE_BYTES))
        self._page = map_page(self.directory)
        self._port_holder = socket.socket()
        self._port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port_holder.bind(("127.0.0.1", 0))
        self.port: int = self._port_holder.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.readable = True
        self._process: Process | None = None
        try:
            self.begin()
            self.wait()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<EngineProcess {self.url} {self._process} in_flight={self.in_flight}>"

    @property
    def in_flight(self) -> int:
        return int(struct.unpack_from("<q", self._page, 0)[0])

    def begin(self) -> None:
        """Start the process without waiting for it."""
        (self.directory / "control").unlink(missing_ok=True)
        words = [sys.executable, "-m", "bench.soak.engine", str(self.directory), str(self.port)]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = Process(words, log_file=self.directory / "log", cwd=ROOT, env=env)

    def wait(self) -> None:
        """Until it listens."""
        deadline_s = time.monotonic() + START_WITHIN_S
        while not (self.directory / "control").exists():
            assert self._process is not None
            assert self._process.running, self._process.log()
            assert time.monotonic() < deadline_s, "an engine does not start"
            time.sleep(0.01)

    def set(self, **knobs: Any) -> None:
        """Change knobs; in force when this returns, for requests that arrive from then on."""
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(CALL_WITHIN_S)
            s.connect(str(self.directory / "control"))
            s.sendall(json.dumps(knobs).encode() + b"\n")
            assert s.recv(16), "the engine did not take its knobs"

    def stop(self) -> None:
        self.readable = False
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        self._send(signal.SIGCONT)
        self.readable = True

    def kill(self) -> None:
        """SIGKILL: it holds nothing any more."""
        if self._process is not None:
            self._process.kill()
        struct.pack_into("<q", self._page, 0, 0)

    def close(self) -> None:
        self.kill()
        self._port_holder.close()
        with contextlib.suppress(BufferError):
            self._page.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _send(self, number: int) -> None:
        assert self._process is not None
        self._process.send(number)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
