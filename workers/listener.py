"""Taking connections, so that each worker of a host has its share of them.

Owns the listening socket of one worker from its start to the drain. It must not know what is said on a connection.

The workers share one listening socket: nothing that waits in it is lost when a worker ends, as would be what the
kernel has given to that worker's own (SO_REUSEPORT). But an event loop takes all that waits whenever it wakes, so
whoever wakes first has most of a burst, and keeps it for as long as clients keep their connections. Therefore a
worker takes one connection a turn, and one that holds more than another lets that one go first.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import socket
import ssl
from collections.abc import Callable

logger = logging.getLogger("uvicorn.error")

YIELD_S = 0.001  # for which a worker that holds more leaves a connection to the others
PAUSE_S = 1.0  # when no more files may be opened
OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
FREE, STARTING, LEFT = -1, -2, -3  # what stands in a place instead of a count


class Shares:
    """How many connections each worker holds, in memory that the master makes before the fork.

    Each place is written by its worker alone, and by the master before it is there and when it is dead; 4 aligned
    bytes are written at once, so nobody waits for anybody.
    """

    def __init__(self, places: int) -> None:
        self._counts = memoryview(mmap.mmap(-1, 4 * places)).cast("i")
        for place in range(places):
            self._counts[place] = FREE

    def __repr__(self) -> str:
        return f"<Shares {[count for count in self._counts if count != FREE]}>"

    def take(self) -> Share:
        """One for a worker that is about to be forked; those beyond the places go by themselves."""
        for place, count in enumerate(self._counts):
            if count == FREE:
                self._counts[place] = STARTING
                return Share(self._counts, place)
        return Shares(1).take()


class Share:
    """One worker's count among those of all."""

    def __init__(self, counts: memoryview[int], place: int) -> None:
        self._counts = counts
        self._place = place

    def __repr__(self) -> str:
        return f"<Share {self._counts[self._place]}>"

    @property
    def serves(self) -> bool:
        return self._counts[self._place] >= 0

    @property
    def has_left(self) -> bool:
        """Whether it takes no more connections."""
        return self._counts[self._place] == LEFT

    def is_ahead(self) -> bool:
        """Whether another worker holds fewer."""
        mine = self._counts[self._place]
        return any(0 <= count < mine for count in self._counts.tolist())

    def serve(self) -> None:
        self._counts[self._place] = 0

    def begun(self) -> None:
        self._counts[self._place] += 1

    def ended(self) -> None:
        if self._counts[self._place] > 0:
            self._counts[self._place] -= 1

    def leave(self) -> None:
        self._counts[self._place] = LEFT

    def free(self) -> None:
        """Its worker is dead: the place is another's."""
        self._counts[self._place] = FREE


class Listener:
    """Takes connections from `sock` until closed, and closes it then."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        make_protocol: Callable[[], asyncio.Protocol],
        ssl_context: ssl.SSLContext | None,
        share: Share,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._make_protocol = make_protocol
        self._ssl = ssl_context
        self._share = share
        self._greeting: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._open = True
        sock.setblocking(False)
        self._loop.add_reader(sock, self._on_waiting)
        share.serve()

    def __repr__(self) -> str:
        return f"<Listener {self._share!r} open={self._open}>"

    @property
    def greets(self) -> bool:
        """Whether connections that it took are still being made: no protocol knows of them."""
        return bool(self._greeting)

    def close(self) -> None:
        """Take no more connections. Those that are taken go on."""
        if self._open:
            self._open = False
            if self._timer is not None:
                self._timer.cancel()
            self._loop.remove_reader(self._sock)
            self._sock.close()
            self._share.leave()

    def _on_waiting(self) -> None:
        if self._share.is_ahead():
            self._pause(YIELD_S)
        else:
            self._take()

    def _pause(self, pause_s: float) -> None:
        self._loop.remove_reader(self._sock)
        self._timer = self._loop.call_later(pause_s, self._go_on)

    def _go_on(self) -> None:
        # It has waited: what is still there is taken, for who holds fewer may be busy or stopped.
        self._loop.add_reader(self._sock, self._on_waiting)
        self._take()

    def _take(self) -> None:
        try:
            connection, _ = self._sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as e:
            if e.errno not in OUT_OF_FILES:
                raise
            logger.error("no connection can be taken for %g s: %s", PAUSE_S, e.strerror)
            self._pause(PAUSE_S)
            return
        connection.setblocking(False)
        self._share.begun()
        task = self._loop.create_task(self._greet(connection))
        self._greeting.add(task)
        task.add_done_callback(self._greeting.discard)

    async def _greet(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection, ssl=self._ssl)
        except BaseException as e:
            self._share.ended()
            connection.close()
            if not isinstance(e, OSError):  # a client that has gone, or speaks no TLS, is nothing to tell
                raise
