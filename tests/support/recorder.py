"""An engine that keeps every byte it receives, and reads it as strictly as it can be read.

What the code under test sends is judged here without a library: a lenient parser would make two requests of one, or
one of two, in its own way and hide what another engine would see.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from tests.support.loop import LoopThread

LINE = re.compile(rb"([A-Z]+) ([!-~]+) HTTP/1\.1")
HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ?([\t -~\x80-\xff]*)")
FRAMING = {b"transfer-encoding", b"te", b"trailer", b"upgrade", b"http2-settings", b"keep-alive", b"expect"}
ANSWER = b'{"object":"chat.completion","choices":[]}'


class NotOne(AssertionError):
    """Bytes that are no single, plainly framed request."""


@dataclass
class Received:
    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]  # names in lower case
    body: bytes
    raw: bytes  # all of it

    def values(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]


@dataclass(eq=False)  # two over which nothing has come are two all the same
class Wire:
    """One connection, and what came over it."""

    data: bytearray = field(default_factory=bytearray)
    requests: list[Received] = field(default_factory=list)
    fault: NotOne | None = None

    @property
    def rest(self) -> bytes:
        return bytes(self.data[sum(len(request.raw) for request in self.requests) :])

    def read(self) -> Received | None:
        """The next request, if it is complete."""
        data = self.rest
        head, end, rest = data.partition(b"\r\n\r\n")
        if not end:
            return None
        first, *lines = head.split(b"\r\n")
        line = LINE.fullmatch(first)
        if line is None:
            raise NotOne(f"request line {first!r}")
        headers = []
        for text in lines:
            header = HEADER.fullmatch(text)
            if header is None:
                raise NotOne(f"header line {text!r}")
            headers.append((header[1].lower(), header[2]))
        names = [name for name, _ in headers]
        if FRAMING & set(names):
            raise NotOne(f"framing of another connection: {headers}")
        if names.count(b"host") != 1:
            raise NotOne(f"not one Host: {headers}")
        lengths = [value for name, value in headers if name == b"content-length"]
        if (lengths or line[1] == b"POST") and (len(lengths) != 1 or not re.fullmatch(rb"0|[1-9]\d*", lengths[0])):
            raise NotOne(f"not one plain Content-Length: {lengths}")
        length = int(lengths[0]) if lengths else 0
        if len(rest) < length:
            return None
        raw = data[: len(head) + len(end) + length]
        return Received(line[1], line[2], headers, rest[:length], raw)


class Recorder:
    """Listens at once. Probes are answered and not kept among `posts`; connections are kept alive."""

    def __init__(self, loop: LoopThread, model: str = "recorded") -> None:
        self.model = model
        self.wires: list[Wire] = []
        self._loop = loop
        self._open: set[asyncio.StreamWriter] = set()
        self._server = loop.run(self._listen())
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._loop.run(self._close())

    @property
    def posts(self) -> list[Received]:
        """All requests but probes since the start or `forget`, whichever connection they came over.

        Raises:
            NotOne: something came that is no request, or more than one.
        """
        return self._loop.run(self._posts())

    def forget(self) -> None:
        self._loop.run(self._forget())

    async def _posts(self) -> list[Received]:
        for wire in self.wires:
            if wire.fault is not None:
                raise wire.fault
            if wire.rest:
                raise NotOne(f"the beginning of another request: {wire.rest[:300]!r}")
        return [request for wire in self.wires for request in wire.requests if request.method != b"GET"]

    async def _forget(self) -> None:
        self.wires = [wire for wire in self.wires if wire in self._alive]
        for wire in self.wires:
            del wire.data[: len(wire.data) - len(wire.rest)]
            wire.requests.clear()

    async def _listen(self) -> asyncio.Server:
        self._alive: list[Wire] = []
        return await asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=256)

    async def _close(self) -> None:
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire()
        self.wires.append(wire)
        self._alive.append(wire)
        self._open.add(writer)
        try:
            while data := await reader.read(2**18):
                wire.data += data
                while (request := wire.read()) is not None:
                    wire.requests.append(request)
                    writer.write(self._answer(request))
        except NotOne as e:
            wire.fault = e
        except OSError:
            pass
        finally:
            self._alive.remove(wire)
            self._open.discard(writer)
            writer.close()

    def _answer(self, request: Received) -> bytes:
        body = ANSWER
        if request.target == b"/v1/models":
            body = b'{"object":"list","data":[{"id":"%b","object":"model"}]}' % self.model.encode()
        return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
