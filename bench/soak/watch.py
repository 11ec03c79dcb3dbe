"""Compares the counts in Redis with what the engines really hold, every second.

A request on its way is counted before its engine has it, and a moment after its engine has ended it: a difference
counts only if it stands in several looks, and how long it stands is measured with a look every tenth of a second.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import redis

from bench.soak.engine import EngineProcess
from tests.support.redis import AT_ONCE

EVERY_S = 1.0
WHILE_APART_S = 0.1
LOOKS, BETWEEN_LOOKS_S = 5, 0.02
REPLY_WITHIN_S = 0.3


@dataclass
class Apart:
    """One node's count was not its engine's, from the first look that showed it to the first that did not."""

    url: str
    began_s: float
    ended_s: float
    largest: int  # unfinished - in flight, the one farthest from 0
    faults: set[str] = field(default_factory=set)  # that were on, or had just ended, at any look
    alone_began_s: float | None = None  # since when it has stood without any fault that excuses it
    alone_s: float = 0.0  # the longest that it stood so

    @property
    def lasted_s(self) -> float:
        return self.ended_s - self.began_s


class Watch(threading.Thread):
    """Args:
    excused: faults that are on now, or ended just now, and may part the counts from the engines.
    """

    def __init__(
        self,
        socket: Path,
        key: str,
        engines: Sequence[EngineProcess],
        excused: Callable[[], Sequence[str]],
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self.looks = 0
        self.unexcused = 0  # looks while no fault was on that may part the counts
        self.blind = 0  # seconds in which Redis could not be read
        self.late_s = 0.0  # by how much a look came too late, at most: the machine was busy with others then
        self.found: list[Apart] = []
        self.last: dict[str, int] = {}
        self._key = key
        self._engines = engines
        self._excused = excused
        self._open: dict[str, Apart] = {}
        self._ending = threading.Event()
        self._redis = redis.Redis(
            unix_socket_path=str(socket), decode_responses=True, socket_timeout=REPLY_WITHIN_S, retry=AT_ONCE
        )

    def run(self) -> None:
        tick_s = time.monotonic()
        while not self._ending.is_set():
            self.late_s = max(self.late_s, time.monotonic() - tick_s)
            self._look()
            now_s = time.monotonic()
            tick_s = max(tick_s + (WHILE_APART_S if self._open else EVERY_S), now_s)
            self._ending.wait(tick_s - now_s)
        for apart in self._open.values():
            self._close(apart)

    def end(self) -> None:
        self._ending.set()
        self.join(10)
        self._redis.close()

    def differences(self) -> dict[str, int] | None:
        """{url: unfinished - in flight}, each the least of several looks; None: Redis can't be read."""
        least: dict[str, int] = {}
        for look in range(LOOKS):
            if look:
                time.sleep(BETWEEN_LOOKS_S)
            before = {engine.url: engine.in_flight for engine in self._engines}
            try:
                held: dict[str, str] = self._redis.hgetall(self._key)  # type: ignore[assignment]
            except redis.RedisError:
                with contextlib.suppress(redis.RedisError):
                    self._redis.connection_pool.disconnect()
                return None
            for engine in self._engines:
                if not engine.readable:
                    continue
                count = int(held.get(engine.url, 0))
                now = (count - before[engine.url], count - engine.in_flight)
                least[engine.url] = min((*now, least.get(engine.url, now[0])), key=abs)
            if not any(least.values()):
                break
        return least

    def _look(self) -> None:
        at_s = time.monotonic()
        differences = self.differences()
        now_s = time.monotonic()
        excuses = self._excused()
        if differences is None:
            self.blind += not self._open
            return
        self.looks += 1
        self.unexcused += not excuses
        self.last = differences
        for url in set(self._open) | set(differences):
            difference, apart = differences.get(url, 0), self._open.get(url)
            if apart is None and difference:
                apart = self._open[url] = Apart(url, at_s, now_s, difference)
                self.found.append(apart)
            if apart is None:
                continue
            apart.ended_s = now_s
            if not difference:
                self._close(self._open.pop(url))
                continue
            apart.largest = max(apart.largest, difference, key=abs)
            apart.faults |= set(excuses)
            if excuses:
                self._close(apart)
            elif apart.alone_began_s is None:
                apart.alone_began_s = now_s

    @staticmethod
    def _close(apart: Apart) -> None:
        if apart.alone_began_s is not None:
            apart.alone_s = max(apart.alone_s, apart.ended_s - apart.alone_began_s)
            apart.alone_began_s = None
