"""What a worker asks of Redis in one turn of its event loop, as one call: acquires, and what is given back before them.

Pure: it must not know the connection. The call is of lua/acquire.lua, which says what it means and what it returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from app.store.scripts import Argument, packed
from app.store.snapshot import Pool
from app.store.way import Way

DRAWS = b"$12\r\n0.%010d\r\n$12\r\n0.%010d\r\n"
"""Two numbers in [0, 1), packed. Ten digits, always: a draw that was rounded up to 1 would be outside of what a policy
takes."""
MORE = b"$1\r\n0\r\n$%d\r\n%d\r\n"
"""That so many more requests want the pool before, packed."""

Answer = tuple[int | None, list[str]]
"""Of an acquire: the code, None without an answer, and the nodes that it counted on."""


class Told(NamedTuple):
    """The learned speeds of a pool, as an acquire that had to read them was told: `words` for the next ones, packed as
    `Pool.packed`. They are right until `since` is no longer what Redis has."""

    since: bytes
    words: bytes


Wish = tuple[Way, int | None, Sequence[Pool], asyncio.Future[Answer]]
"""An acquire: how, at which registry version (None: whatever it is), a node of which pools, and who gets the answer."""
Release = tuple[str, bool]
"""The url, and whether the node answered."""


class Turn:
    """Acquires of one way at one registry version, and what is given back before them.

    Args:
        way: None: of no acquire.
        version: None: whatever it is.
    """

    __slots__ = ("_answered", "_asked", "_others", "version", "way")

    def __init__(self, way: Way | None, version: int | None) -> None:
        self.way = way
        self.version = version
        self._asked: dict[tuple[Pool, ...], list[asyncio.Future[Answer]]] = {}  # those of the same pools together
        self._answered: dict[str, int] = {}  # url -> how many requests are given back
        self._others: dict[str, int] = {}  # the same where the node did not answer

    def __repr__(self) -> str:
        given = sum(self._answered.values()) + sum(self._others.values())
        return f"<Turn acquires={len(self.futures)} releases={given}>"

    @classmethod
    def each(cls, wishes: Iterable[Wish], releases: Iterable[Release]) -> list[Turn]:
        """One of each way and version; what is given back is in the first."""
        turns: list[Turn] = []
        turn: Turn | None = None
        for way, version, pools, future in wishes:
            if turn is None or turn.way is not way or turn.version != version:
                turn = next((one for one in turns if one.way is way and one.version == version), None)
                if turn is None:
                    turn = cls(way, version)
                    turns.append(turn)
            turn._asked.setdefault(tuple(pools), []).append(future)
        first = turns[0] if turns else cls(None, None)
        for url, answered in releases:
            counts = first._answered if answered else first._others
            counts[url] = counts.get(url, 0) + 1
        return turns or [first]

    @property
    def gives(self) -> bool:
        """Whether anything is given back."""
        return bool(self._answered or self._others)

    @property
    def futures(self) -> list[asyncio.Future[Answer]]:
        """Of the acquires, in the order of `read`."""
        return [future for futures in self._asked.values() for future in futures]

    def command(self, way: Way, generation: bytes, told: Mapping[Pool, Told], draw: Callable[[], float]) -> bytes:
        """The call as it goes over the wire.

        Args:
            way: that of the acquires; any where there are none.
            generation: packed.
            told: learned speeds of pools, where the way goes by them and the pool's are known.
            draw: a number in [0, 1).
        """
        count = 2
        version = b"" if self.version is None else b"%d" % self.version
        parts = [generation, b"$%d\r\n%b\r\n" % (len(version), version)]
        known: Mapping[Pool, Told] = {}
        if way.by_learned:
            known, since = self._known(told)
            parts.append(packed(since))
            count += 1
        if self.gives:
            answered, others = self._answered, self._others
            words: tuple[Argument, ...] = (-len(answered) - len(others), len(answered), *answered, *others)
            parts.append(packed(*words, *answered.values(), *others.values()))
            count += 2 * len(words) - 2
        for pools, futures in self._asked.items():
            wanted = len(futures)
            for pool in pools:
                parts.append(known[pool].words if known else pool.packed)
                parts.append(_draws(wanted, draw))
                count += pool.words + 2 * wanted + (2 if wanted > 1 else 0)
        return (way.call_giving if self.gives else way.call).command(count, b"".join(parts))

    def read(self, reply: list[Any]) -> list[list[str]]:
        """The nodes that the reply names, for each of `futures`."""
        at = 2
        found: list[list[str]] = []
        for pools, futures in self._asked.items():
            wanted, columns = len(futures), []
            for pool in pools:
                columns.append([pool.urls[index - 1] for index in reply[at : at + wanted]])
                at += wanted
            found += map(list, zip(*columns, strict=True))
        return found

    def read_told(self, reply: list[Any], told: dict[Pool, Told]) -> list[list[str]]:
        """The same where the reply may tell learned speeds: those are `told` from now on."""
        if type(reply[-1]) is list:
            since, *speeds = reply.pop()
            at = 0
            for pool in self._pools():
                size = len(pool.urls)
                # Of many that asked at once the first to hear is enough.
                known = told.get(pool)
                if pool.kept and (known is None or known.since != since):
                    told[pool] = Told(since, packed(size, *pool.urls, *speeds[at : at + size]))
                at += size
        return self.read(reply)

    def _pools(self) -> list[Pool]:
        return [pool for pools in self._asked for pool in pools]

    def _known(self, told: Mapping[Pool, Told]) -> tuple[Mapping[Pool, Told], bytes]:
        """What is known of all pools, and since when; nothing where it is of several times."""
        # The last try is refused for nothing.
        known = {pool: told[pool] for pool in self._pools() if pool in told} if self.version is not None else {}
        times = {one.since for one in known.values()}
        whole = len(times) == 1 and all(pool in known for pool in self._pools())
        return (known, times.pop()) if whole else ({}, b"")


def _draws(wanted: int, draw: Callable[[], float]) -> bytes:
    """Two for each request, packed, as they stand behind a pool."""
    if wanted == 1:
        return DRAWS % (int(draw() * 1e10), int(draw() * 1e10))
    more = wanted - 1
    digits = [int(draw() * 1e10) for _ in range(2 * wanted)]
    return (DRAWS + MORE + DRAWS * more) % (*digits[:2], len(str(more)), more, *digits[2:])
