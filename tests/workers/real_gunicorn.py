"""Real gunicorn with our configuration and the small app, and a client that says exactly what it is told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.support.process import Process, children
from tests.support.template import TEMPLATE
from tests.support.wait import eventually

ROOT = Path(__file__).resolve().parents[2]


class Gunicorn:
    """gunicorn with our configuration and the small app, on a free port of loopback, without a Redis."""

    def __init__(
        self,
        log_file: Path,
        *arguments: str,
        workers: int = 1,
        prefix: tuple[str, ...] = (),
        root: Path = ROOT,
        **env: str,
    ):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("EVENHAND_")}
        settings = {
            "EVENHAND_REDIS_URL": "unix:///nonexistent/redis.sock",
            "EVENHAND_SERVER_NAME": "127.0.0.1",
            "EVENHAND_SERVER_PORT": str(self.port),
            "EVENHAND_WORKERS": str(workers),
            "EVENHAND_LOG_LEVEL": "INFO",
        }
        config = str(root / "workers" / "gunicorn.conf.py")
        self.process = Process(
            [*prefix, sys.executable, "-m", "gunicorn", "-c", config, *arguments, "tests.workers.small_app:app"],
            log_file=log_file,
            env={**clean, **settings, **env},
            cwd=root,
            template=TEMPLATE if root == ROOT else None,
        )
        eventually(lambda: self.log().count("Application startup complete") >= workers, within_s=15)

    def log(self) -> str:
        return self.process.log()

    def workers(self) -> list[int]:
        return children(self.process.pid)

    def stop(self, number: int = signal.SIGTERM) -> float:
        """End it, cleanly; how long that took, seconds."""
        began = time.monotonic()
        assert self.process.stop(number) == 0
        assert "WORKER TIMEOUT" not in self.log() and "SIGKILL" not in self.log()
        return time.monotonic() - began


class Client:
    """One connection that says exactly what it is told."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=10)

    def send(self, path: str, *lines: str, method: str = "GET", body: bytes = b"") -> None:
        head = [f"{method} {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *lines, "", ""]
        self.sock.sendall("\r\n".join(head).encode() + body)

    def read_until(self, end: bytes) -> bytes:
        data = b""
        while not data.endswith(end):
            more = self.sock.recv(65536)
            assert more, f"closed after {data!r}"
            data += more
        return data

    def read_to_end(self) -> bytes:
        data = b""
        while more := self.sock.recv(65536):
            data += more
        return data

    def ask(self, path: str, *lines: str, method: str = "GET", body: bytes = b"") -> tuple[bytes, Any]:
        """Head and JSON body of a whole answer."""
        self.send(path, *lines, method=method, body=body)
        head, _, rest = self.read_until(b"}").partition(b"\r\n\r\n")
        return head, json.loads(rest)


Start = Callable[..., Gunicorn]
Connect = Callable[[Gunicorn], Client]


def listening_workers(gunicorn: Gunicorn) -> int:
    """How many of the workers have their listener open: a socket in LISTEN state."""
    listening = {
        line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "0A"
    }
    return sum(any(link in listening for link in links_of(pid)) for pid in gunicorn.workers())


def links_of(pid: int) -> Iterator[str]:
    """Inodes of the sockets that the process has open; none when it is gone."""
    with contextlib.suppress(FileNotFoundError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                target = os.readlink(fd)
                if target.startswith("socket:"):
                    yield target[8:-1]
