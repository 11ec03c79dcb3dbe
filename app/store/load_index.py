"""The nodes of large fleets in groups, so that the one of least load is read and not looked for.

Pure: it must not know Redis. A group is the nodes of one role that have the same models and get requests; the
candidates for a model are some groups, all of each. In Redis each group is ordered by load (`load:<group>`), by
`index_loads.lua` once per registry version and then by whoever changes a count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from app.nodes import Breaker, Node, Role, State
from app.store.keys import Keys
from app.store.scripts import Argument
from app.store.snapshot import Pool, Snapshot, effective_speeds

LARGE = 40
"""Nodes from which on an ordered set is cheaper for Redis than a look at each candidate."""
NODES_A_GROUP = 8
"""At least, on average: groups are looked at one by one."""
LIFETIME_MS = 10_000
"""After which the loads are ordered anew, whatever somebody may have done to them: a few ms of Redis."""
POOLS = 4096
"""Whose groups are remembered: those of one registry version are bounded, retries make some of their own."""


class Place(NamedTuple):
    """Where a node stands: the group, its speed there, and its name in the ordered set."""

    group: int
    speed: float
    member: str


class LoadIndex:
    """The groups of one snapshot. Cheap to make; the groups themselves are found when they are first asked for."""

    def __init__(self, keys: Keys, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._keys = keys
        self._groups: list[list[Node]] | None = None
        self._places: dict[str, Place] = {}
        self._pools: dict[Pool, tuple[int, ...]] = {}

    def __repr__(self) -> str:
        return f"<LoadIndex version={self.snapshot.version} nodes={len(self.snapshot.nodes)}>"

    def place(self, url: str) -> Place | None:
        """None: no group has it, so no load of it is kept."""
        self._find_groups()
        return self._places.get(url)

    def groups(self, pool: Pool) -> tuple[int, ...]:
        """The groups that are the candidates of `pool`, none more and none less; empty if there are no such, or if
        looking at each candidate is cheaper."""
        known = self._pools.get(pool)
        if known is None:
            if len(self._pools) >= POOLS:
                self._pools.clear()
            known = self._pools[pool] = self._groups_of(pool)
        return known

    def arguments(self) -> tuple[list[str], list[Argument]]:
        """KEYS and ARGV of index_loads.lua."""
        groups = self._find_groups()
        names = [
            self._keys.unfinished,
            self._keys.version,
            self._keys.load_index,
            *map(self._keys.load, range(len(groups))),
        ]
        words: list[Argument] = [self.snapshot.version, LIFETIME_MS]
        for nodes in groups:
            words += [len(nodes), *(self._places[node.url].member for node in nodes)]
        return names, words

    def _find_groups(self) -> list[list[Node]]:
        if self._groups is None:
            found: dict[tuple[Role, frozenset[str]], list[Node]] = {}
            if len(self.snapshot.nodes) >= LARGE:
                for node in _getting_requests(self.snapshot):
                    found.setdefault((node.role, frozenset(node.models)), []).append(node)
            self._groups = list(found.values())
            for number, nodes in enumerate(self._groups):
                for node, speed in zip(nodes, effective_speeds(nodes), strict=True):
                    self._places[node.url] = Place(number, speed, f"{speed!r} {node.url}")
        return self._groups

    def _groups_of(self, pool: Pool) -> tuple[int, ...]:
        groups = self._find_groups()
        places = [self._places.get(url) for url in pool.urls]
        # A node without a speed counts as the average of its pool, which may be another one than that of its group.
        if any(place is None or place.speed != speed for place, speed in zip(places, pool.speeds, strict=True)):
            return ()
        found = tuple(dict.fromkeys(place.group for place in places if place is not None))
        whole = sum(len(groups[number]) for number in found) == len(pool.urls)
        return found if whole and len(found) * NODES_A_GROUP <= len(pool.urls) else ()


def _getting_requests(snapshot: Snapshot) -> Iterator[Node]:
    for node in snapshot.nodes.values():
        # Encoders have their own round.
        if node.state == State.READY and node.breaker == Breaker.CLOSED and node.role != Role.Encode:
            yield node
