"""A client that has ended its side of the connection, or may have: does it still wait for its answer, or has it left?

Owns one connection from that moment on: how it is told, and when. It must not know requests.

TCP says the same in both cases: `shutdown(SHUT_WR)` and `close()` send one FIN. Only an answer to bytes of ours
tells them apart: a host whose socket is closed answers a reset, within a round trip. So something is written that
any HTTP/1.1 client passes over: `100 Continue`, which may come unasked and more than once before the answer's head.
More than once also because a TCP proxy in between takes the first for a client that is gone already, and because a
client may leave later. Once the head is out nothing of the kind exists; the answer's own bytes do it then.

Source: RFC 9110, 15.2 ("a client MUST be able to parse one or more 1xx responses") and 15.2.1; RFC 9293, 3.10.7.1.
"""

from __future__ import annotations

import asyncio
import fcntl
import select
import sys
import termios
from collections.abc import Callable

PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
PROBE_EVERY_S = 0.25  # two of them, a proxy's round trip and a look still fit into the second that a client has
LOOK_EVERY_S = 0.05
ROOM_BYTES = 16 * 1024  # the system has room for more than that, however small the pieces are


class HalfClosed:
    """Probes and looks until the connection is closed; aborts it when the client turns out to have left.

    Args:
        may_probe: whether an interim answer may be written at this moment.
        in_doubt: whether it is still to be found out; asked at every look, and no more once it is not.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        *,
        may_probe: Callable[[], bool],
        in_doubt: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._may_probe = may_probe
        self._in_doubt = in_doubt
        self._probe_at_s = 0.0
        self._look()

    def _look(self) -> None:
        if self._transport.is_closing() or not self._in_doubt():
            return
        if self._is_reset():
            self._transport.abort()
            return
        if self._loop.time() >= self._probe_at_s and self._may_probe():
            self._probe_at_s = self._loop.time() + PROBE_EVERY_S
            self._transport.write(PROBE)
        self._loop.call_later(LOOK_EVERY_S, self._look)

    def _is_reset(self) -> bool:
        # The event loop reads no more from such a socket, so it is asked: a reset closes both its directions.
        return _happens(self._transport, 0)


def has_ended(transport: asyncio.Transport) -> bool:
    """Whether the client has ended its side, or all: also behind bytes that nobody has read."""
    return _happens(transport, select.POLLRDHUP)


def may_have_ended(transport: asyncio.Transport) -> bool:
    """Whether so much is unread that the end may not have come through behind it: it waits for room at the client."""
    unread = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.FIONREAD, bytes(4))
    return int.from_bytes(unread, sys.byteorder) > ROOM_BYTES


def _happens(transport: asyncio.Transport, events: int) -> bool:
    """Whether one of `events` holds, or the connection has been reset."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), events)
    return bool(poll.poll(0))
