"""The simulated engine as a server: its listener, its knobs, its counts and records.

Everything here belongs to one event loop. Other threads may read records and counters, no more.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from app.http.endpoints import BESIDE_V1
from workers.engine import answers, other
from workers.engine.answers import Answer, Knobs
from workers.engine.http import Connection, Made, Record

REMEMBERED = 64  # answers, and of requests of at most
REMEMBERED_BYTES = 65536
EMBEDDED = b'_embeds"'  # of "image_embeds" and the like; in a text the quote would be escaped
BACKLOG = 4096  # a burst of new connections must not be refused by accident


@dataclass(slots=True)
class Stats:
    """What `GET /sim/stats` tells; requests are all POSTs."""

    in_flight: int = 0
    max_in_flight: int = 0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    dropped: int = 0  # connections closed by `close_on_request`
    connections: int = 0  # open now
    accepted: int = 0
    with_embeddings: int = 0  # requests with media that an encoder has turned into embeddings


class Engine:
    """One engine: a listener, its knobs, its records.

    `requests` holds the records of `POST`, `probes` those of everything else (health, models, terminate).
    Without `keep_records` only the counts are kept, so that it can run for ever; and the answer to a request
    like one before is not made again, so that a measurement sees little of this engine's own cost.
    """

    def __init__(
        self,
        knobs: Knobs | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        keep_records: bool = True,
        on_terminate: Callable[[], None] | None = None,
    ) -> None:
        self.knobs = knobs or Knobs()
        self.host = host
        self.stats = Stats()
        self.requests: list[Record] = []
        self.probes: list[Record] = []
        self.connections: set[Connection] = set()
        self.on_terminate = on_terminate
        self._tls = tls
        self._keep_records = keep_records
        self._memory: dict[tuple[str, bytes, bool], Made] = {}
        self._listener: asyncio.Server | None = None
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # Bound, never listening: the port stays ours while nobody listens, and a connect is refused.
        self._port_holder = socket.socket(family, socket.SOCK_STREAM)
        self._port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._port_holder.bind((host, port))
        except OSError:
            self._port_holder.close()
            raise
        self.port: int = self._port_holder.getsockname()[1]

    def __repr__(self) -> str:
        return f"<Engine {self.url} {'up' if self._listener else 'down'} {self.stats}>"

    @property
    def listening(self) -> bool:
        return self._listener is not None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self._tls else ''}://{host}:{self.port}{self.knobs.prefix}"

    async def start(self) -> None:
        """Listen. Raises OSError when the port is taken."""
        if self._listener is not None or self.knobs.refuse:
            return
        for attempt in range(200):
            listener = socket.socket(self._port_holder.family, socket.SOCK_STREAM)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((self.host, self.port))
                listener.listen(BACKLOG)
                break
            except OSError as e:
                listener.close()
                # An event loop may close our own earlier listener a little later than it is told to.
                if e.errno != errno.EADDRINUSE or attempt == 199:
                    raise
                await asyncio.sleep(0.005)
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            lambda: Connection(self), sock=listener, ssl=self._tls, backlog=BACKLOG
        )

    async def stop_listening(self) -> None:
        """Refuse new connections from here on; running answers go on, idle connections are closed."""
        if self._listener is None:
            return
        sockets = self._listener.sockets
        self._listener.close()
        self._listener = None
        for _ in range(200):
            if all(s.fileno() == -1 for s in sockets):
                break
            await asyncio.sleep(0.001)
        for connection in list(self.connections):
            connection.close_if_idle()

    async def crash(self) -> None:
        """What a SIGKILL does: nobody listens, every connection is reset."""
        await self.stop_listening()
        for _ in range(1000):
            for connection in list(self.connections):  # each time: one may have been accepted just before
                connection.reset()
            if not self.connections:
                break
            await asyncio.sleep(0.001)

    async def close(self) -> None:
        """The end of this engine; its port is free again."""
        await self.crash()
        self._port_holder.close()

    async def apply(self, **changes: object) -> None:
        """Change knobs; `refuse` closes or opens the listener. Raises TypeError for an unknown knob."""
        self.knobs = replace(self.knobs, **changes)  # type: ignore[arg-type]
        self._memory.clear()
        if self.knobs.refuse:
            await self.stop_listening()
        elif "refuse" in changes:
            await self.start()

    def begin(self, record: Record) -> None:
        stats = self.stats
        if record.method != "POST":
            if self._keep_records:
                self.probes.append(record)
            return
        stats.requests += 1
        stats.in_flight += 1
        stats.max_in_flight = max(stats.max_in_flight, stats.in_flight)
        stats.with_embeddings += EMBEDDED in record.body
        if self._keep_records:
            self.requests.append(record)

    def end(self, record: Record, *, aborted: bool = False) -> None:
        if not record.running:
            return
        now = time.monotonic()
        if aborted:
            record.aborted_s = now
        else:
            record.finished_s = now
        if record.method == "POST":
            self.stats.in_flight -= 1
            self.stats.aborted += aborted
            self.stats.finished += not aborted

    def remembered(self, record: Record, keep_alive: bool) -> Made | None:
        if not self._memory or record.method != "POST":
            return None
        return self._memory.get((record.path, record.body, keep_alive))

    def remember(self, record: Record, keep_alive: bool, made: Made) -> None:
        """Keep an answer that depends on nothing but knobs, path and body."""
        knobs = self.knobs
        if self._keep_records or record.method != "POST" or knobs.key or knobs.own_id:
            return
        if "completions" in record.path and len(record.body) + sum(map(len, made.pieces)) <= REMEMBERED_BYTES:
            if len(self._memory) >= REMEMBERED:
                self._memory.clear()
            self._memory[record.path, record.body, keep_alive] = made

    def answer(self, record: Record) -> Answer:
        """The answer by the knobs as they are now, scripted status included."""
        knobs = self.knobs
        whole = record.path.partition("?")[0]
        path = whole.removeprefix(knobs.prefix) if whole.startswith(knobs.prefix + "/") else "(outside the prefix)"
        if knobs.key and record.header(b"authorization") != b"Bearer " + knobs.key.encode():
            return answers.error(401, "Incorrect API key provided.", "invalid_api_key")
        if record.method == "POST" and (path.startswith("/v1/") or path in BESIDE_V1):
            if knobs.status != 200 and self.struck(record):
                return answers.scripted(knobs)
            kind = record.header(b"content-type") or b""
            found = other.answer(knobs, path, kind, record.body)
            return found or answers.inference(knobs, path, kind, record.body, record.id)
        if record.method in ("GET", "HEAD"):
            if path == "/health":
                return answers.health(knobs)
            if path == "/v1/models":
                return answers.model_list(knobs)
            if path == "/sim/stats":
                return answers.json_answer(200, self.stats)
            if path == "/terminate":
                if self.on_terminate is not None:
                    self.on_terminate()
                return Answer(200, [], [b""])
        return answers.error(404, f"{record.method} {path} is not known here.", "not_found")

    def struck(self, record: Record) -> bool:
        """Whether the scripted faults apply to this request."""
        return not self.knobs.only_for or self.knobs.only_for.encode() in record.body
