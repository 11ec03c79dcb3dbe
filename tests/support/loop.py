"""An event loop in a thread of its own, so that tests in any loop, or in none, can use what lives in it."""

from __future__ import annotations

import asyncio
import resource
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")

FILES = 65536  # a test with 500 streams holds 500 clients and 500 engine connections in one process


class LoopThread:
    """Runs coroutines for other threads; `close` ends the thread."""

    def __init__(self) -> None:
        _allow_many_files()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engines", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], within_s: float = 10.0) -> T:
        """The result of `work`, which ran in the thread's loop."""
        assert threading.current_thread() is not self._thread, "would wait for itself"
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(within_s)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()


def _allow_many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
