"""What can end a request from outside: its client leaves, or the worker has to stop.

Owns the one watcher that a request may have, on the wire where the server has one or else on `receive()`, and the
set of running requests. Both
causes work the same way, by cancelling the request's task: that reaches it wherever it waits (for
Redis, for an engine's head, between chunks, for a slow client), and at once.

Why the cancellation can't hit the wrong place: it is asked for only while the task waits inside the
watched part, so it is delivered at that very wait; after `stop` nothing asks for it any more.
"""

from __future__ import annotations

import asyncio
import time
from enum import Enum

from starlette.types import Receive

from app.http.ports import Wire
from app.http.upload import Upload

END_STREAMS_BEFORE_S = 1.0
"""Streams are ended this long before the deadline: the last event must still reach the client."""


class Why(Enum):
    LEFT = "the client left"
    SHUTDOWN = "the worker stops"


class Watch:
    """Stands over one request's task, from the request's first moment until `stop`.

    `upload`: what the request holds of its body beside its memory, to be closed when the request ends.
    """

    __slots__ = ("_task", "_watcher", "_wire", "upload", "why")

    def __init__(self, task: asyncio.Task[None] | None) -> None:
        self.why: Why | None = None
        self.upload: Upload | None = None
        self._task = task
        self._watcher: asyncio.Task[None] | None = None
        self._wire: Wire | None = None

    def __repr__(self) -> str:
        return f"<Watch why={self.why} watching={self._watcher is not None or self._wire is not None}>"

    def start(self, receive: Receive, wire: Wire | None) -> None:
        """Watch for the client from now on: the body has been read, `receive` has nothing else to say."""
        self._wire = wire
        if wire is not None:
            wire.when_gone(self._left)
        else:
            self._watcher = asyncio.get_running_loop().create_task(self._wait_for_disconnect(receive))

    def _left(self) -> None:
        self.interrupt(Why.LEFT)

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._left()

    def interrupt(self, why: Why) -> None:
        """Cancel the task, unless it was interrupted before or isn't watched any more."""
        if self.why is None and self._task is not None:
            self.why = why
            self._task.cancel()

    def absorb(self) -> bool:
        """After a CancelledError: True if it was ours alone, and then the task goes on uncancelled."""
        return self.why is not None and self._task is not None and self._task.uncancel() == 0

    def stop(self) -> None:
        self._task = None
        if self._wire is not None:
            self._wire.when_gone(None)
        if self._watcher is not None:
            self._watcher.cancel()


class Running:
    """The requests that are running in this worker, and whether it is stopping.

    `stopping`: connections are not kept alive any more. `ended`: nothing runs any more, new requests
    are refused.
    """

    def __init__(self) -> None:
        self.stopping = False
        self.ended = False
        self._watches: set[Watch] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Running {len(self._watches)} stopping={self.stopping} ended={self.ended}>"

    def __len__(self) -> int:
        return len(self._watches)

    def enter(self, task: asyncio.Task[None] | None) -> Watch:
        """A request begins, which `task` serves."""
        watch = Watch(task)
        self._watches.add(watch)
        return watch

    def leave(self, watch: Watch) -> None:
        watch.stop()
        if watch.upload is not None:
            watch.upload.close()
        self._watches.discard(watch)

    def begin_shutdown(self, deadline_monotonic_s: float) -> None:
        """Stop gracefully until `deadline_monotonic_s` (`time.monotonic()`); a second call moves the deadline."""
        self.stopping = True
        if self._timer is not None:
            self._timer.cancel()
        wait_s = max(0.0, deadline_monotonic_s - END_STREAMS_BEFORE_S - time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._end)

    def _end(self) -> None:
        self.ended = True
        for watch in tuple(self._watches):
            watch.interrupt(Why.SHUTDOWN)
