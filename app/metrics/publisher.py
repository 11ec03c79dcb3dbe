"""Tells the other workers of this host what this one has counted, ten times a second and at the end.

Owns the gauges of a worker and the time that it was on its own. It must not know Redis: it is told whether there is
trouble.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from app.metrics.families import DEGRADED, HOST_WORKERS, LOCAL_WORKERS, REDIS_UP
from app.metrics.figures import Figures
from app.metrics.files import PUBLISH_S, MetricsWriter

log = logging.getLogger("evenhand")


class Publisher:
    """One per worker; `run` until it is cancelled, then `close`.

    Args:
        trouble: why decisions are local for now; None while they are shared.
    """

    def __init__(self, figures: Figures, writer: MetricsWriter, trouble: Callable[[], str | None]) -> None:
        self._figures = figures
        self._writer = writer
        self._trouble = trouble
        self._local: bool | None = None
        self._full = False  # there was no room for the last figures
        self._seen_s = time.monotonic()
        figures.set(HOST_WORKERS, 1)

    def __repr__(self) -> str:
        return f"<Publisher {self._figures!r} local={self._local}>"

    async def run(self) -> None:
        while True:
            self.publish()
            await asyncio.sleep(PUBLISH_S)

    def publish(self) -> None:
        figures, now_s = self._figures, time.monotonic()
        local = self._trouble() is not None
        if local:
            figures.count(DEGRADED, by=now_s - self._seen_s)
        if local is not self._local:
            self._local = local
            figures.set(LOCAL_WORKERS, local)
            figures.set(REDIS_UP, not local)
        self._seen_s = now_s
        self._write()

    def close(self) -> None:
        """The last figures; the worker is none of the host's any more."""
        self._write()
        while self._figures.changed and not self._full:
            self._write()
        self._writer.close()

    def _write(self) -> None:
        figures = self._figures
        if not (figures.ended or figures.changed or figures.acquires_s):
            return
        try:
            self._writer.write(figures)
        except OSError as e:
            if not self._full:
                log.warning("metrics can't be published: %s", e)
            self._full = True
        else:
            self._full = False
