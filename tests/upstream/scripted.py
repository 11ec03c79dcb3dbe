"""A raw server for these tests: a script says which bytes come, in which pieces, and how it ends.

It knows just enough HTTP to take a request in. It runs in the test's own loop, so that a piece is in the
client's socket buffer before the next one is written, and the client sees every split that was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Request:
    line: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def header(self, name: bytes) -> list[bytes]:
        return [value for n, value in self.headers if n.lower() == name]


class Peer:
    """The server's side of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def head(self) -> Request:
        """The next request up to its empty line; the body stays unread."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        line, *rest = head[:-4].split(b"\r\n")
        pairs = [one.partition(b": ") for one in rest]
        return Request(line, [(name, value) for name, _, value in pairs], b"")

    async def request(self) -> Request:
        request = await self.head()
        length = int((request.header(b"content-length") or [b"0"])[0])
        return Request(request.line, request.headers, await self.reader.readexactly(length))

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            if self.writer.is_closing():  # uvloop's transports mind being written to
                raise ConnectionResetError
            self.writer.write(piece)
            await turns()

    def eof(self) -> None:
        """Close the sending half only."""
        self.writer.write_eof()

    def close(self) -> None:
        self.writer.close()

    def reset(self) -> None:
        """Close with an RST instead of a FIN."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def gone(self) -> bytes:
        """Wait until the client has closed; returns what it sent before."""
        rest = b""
        with contextlib.suppress(ConnectionError):
            while data := await self.reader.read(65536):
                rest += data
        return rest


Script = Callable[[Peer], Awaitable[None]]


class ScriptedServer:
    """`async with ScriptedServer(script) as server`: each connection is played `script`.

    A script that fails fails the test, and one that still runs when the test is over is cancelled.
    """

    def __init__(self, script: Script, *, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        self._script = script
        self._host = host
        self._tls = tls
        self._running: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._failures: list[BaseException] = []
        self.accepted = 0
        self.done = 0

    async def __aenter__(self) -> ScriptedServer:
        self._server = await asyncio.start_server(
            self._accept, self._host, 0, ssl=self._tls, limit=1 << 26, backlog=1024
        )
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for writer in self._writers:
            with contextlib.suppress(AttributeError):  # Python 3.11.2: of TLS that was aborted and closed already
                writer.transport.abort()
        await turns()
        if self._failures:
            raise self._failures[0]

    @property
    def url(self) -> str:
        scheme = "https" if self._tls else "http"
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{scheme}://{host}:{self.port}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._writers.append(writer)
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            await self._script(Peer(reader, writer))
            self.done += 1
        except (asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
            pass  # the client went first
        except BaseException as e:
            self._failures.append(e)
        finally:
            self._running.discard(task)
            writer.close()


def always(*pieces: bytes) -> Script:
    """Answer every request on a connection with these pieces."""

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(*pieces)

    return script


def cut(wire: bytes, places: Iterable[int]) -> list[bytes]:
    """What comes in one read each, where the cuts are at these places."""
    ends = sorted({0, len(wire), *(place for place in places if 0 < place < len(wire))})
    return [wire[a:b] for a, b in pairwise(ends)]


async def turns(count: int = 4) -> None:
    """Let everything that is ready run: this loop's I/O included, no time passes."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool], within_s: float = 2.0) -> None:
    """Poll until `condition` holds; fails when it does not in time."""
    deadline_s = asyncio.get_running_loop().time() + within_s
    while not condition():
        if asyncio.get_running_loop().time() > deadline_s:
            raise AssertionError("it did not come about in time")
        await asyncio.sleep(0.001)


@contextlib.contextmanager
def free_port(host: str = "127.0.0.1") -> Iterator[int]:
    """A port that nobody listens on and nobody else gets: bound, not listening."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        yield sock.getsockname()[1]


@contextlib.contextmanager
def black_hole() -> Iterator[int]:
    """A port that takes no more connections: its backlog is full, so the kernel drops what comes."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(listener.getsockname())
        yield listener.getsockname()[1]
