"""A simulated engine inside the test's process, in a loop of its own thread."""

from __future__ import annotations

import ssl
from types import TracebackType
from typing import Any, Self

from tests.support.loop import LoopThread
from workers.engine.answers import Knobs
from workers.engine.http import Record
from workers.engine.server import Engine, Stats


class SimulatedEngine:
    """Starts at once; a context manager. The knobs are those of `workers.engine.answers.Knobs`.

        with SimulatedEngine(ttft_s=0.1, chunks=5) as engine:
            engine.set(status=500)          # in force for every request that arrives from here on
            engine.requests[0].header(b"authorization")

    Args:
        loop: where it lives; by default a thread of its own.
    """

    def __init__(
        self,
        *,
        loop: LoopThread | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        **knobs: Any,
    ) -> None:
        self._own_loop = None if loop is not None else LoopThread()
        self._loop = loop or self._own_loop
        assert self._loop is not None
        self.terminated = 0
        self._closed = False
        self._engine = Engine(Knobs(**knobs), host=host, port=port, tls=tls, on_terminate=self._count_terminate)
        self.start()

    def __repr__(self) -> str:
        return repr(self._engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def url(self) -> str:
        return self._engine.url

    @property
    def port(self) -> int:
        return self._engine.port

    @property
    def knobs(self) -> Knobs:
        """For reading; change them with `set`."""
        return self._engine.knobs

    @property
    def in_flight(self) -> int:
        """POST requests begun and not ended."""
        return self._engine.stats.in_flight

    @property
    def stats(self) -> Stats:
        return self._engine.stats

    @property
    def requests(self) -> list[Record]:
        """Every POST so far, oldest first."""
        return list(self._engine.requests)

    @property
    def probes(self) -> list[Record]:
        """Everything else: health, models, terminate."""
        return list(self._engine.probes)

    @property
    def aborts(self) -> list[Record]:
        """The requests whose client went away while they ran."""
        return [r for r in self.requests if r.aborted_s is not None]

    def set(self, **knobs: Any) -> None:
        """Change knobs; in force when this returns. Running answers keep what they began with."""
        assert self._loop is not None
        self._loop.run(self._engine.apply(**knobs))

    def forget(self) -> None:
        """Drop the records and the totals, keep what runs."""
        assert self._loop is not None
        self._loop.run(self._forget())

    def stop(self) -> None:
        """Nobody listens any more; running answers go on. `start` opens the same port again."""
        assert self._loop is not None
        self._loop.run(self._engine.stop_listening())

    def crash(self) -> None:
        """What a SIGKILL does: nobody listens, every connection is reset. `start` opens the same port again."""
        assert self._loop is not None
        self._loop.run(self._engine.crash())

    def start(self) -> None:
        assert self._loop is not None
        self._loop.run(self._engine.start())

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        assert self._loop is not None
        self._loop.run(self._engine.close())
        if self._own_loop is not None:
            self._own_loop.close()

    def _count_terminate(self) -> None:
        self.terminated += 1

    async def _forget(self) -> None:
        engine = self._engine
        engine.requests, engine.probes = [], []
        engine.stats.requests = engine.stats.finished = engine.stats.aborted = engine.stats.dropped = 0
        engine.stats.max_in_flight = engine.stats.in_flight
