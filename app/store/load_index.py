"""The nodes of large fleets in groups, so that the one of least load is read and not looked for.

Pure: it must not know Redis. A group is the nodes of one role that have the same models and get requests; the
candidates for a model are some groups, all of each. In Redis each group is ordered by load (`load:<group>`), by
`index_loads.lua` once per registry version and then by whoever changes a count or a learned speed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from app.nodes import Breaker, Node, Role, State
from app.store.keys import Keys
from app.store.scripts import Argument
from app.store.snapshot import Pool, Snapshot, effective_speeds

LARGE = 24
"""Nodes from which on an ordered set is cheaper for Redis than a look at each candidate."""
FEW_GROUPS, NODES_A_GROUP = 4, 8
"""Groups are looked at one by one, so they must be few, or large on average."""
LIFETIME_MS = 10_000
"""After which the loads are ordered anew, whatever somebody may have done to them: a few ms of Redis."""


class By(StrEnum):
    """Which speeds the loads are of, as the scripts name it."""

    GIVEN = "given"
    LEARNED = "learned"


BY = {"min_expected_latency": By.GIVEN, "least_expected_delay": By.LEARNED}
"""Of the routing strategies that go by an order of loads."""


class Place(NamedTuple):
    """Where a node stands: the group, its speed there, and its name in the ordered set."""

    group: int
    speed: float
    member: str


class LoadIndex:
    """The groups of one snapshot; none where its fleet is not large.

    `name` is what `load_index` says where the loads are ordered in these groups: the registry version, and a digest
    that tells them from those of another fleet that came to the same version.

    Args:
        by: None: the routing strategy goes by no order; then there are no groups either.
    """

    def __init__(self, keys: Keys, snapshot: Snapshot, *, by: By | None) -> None:
        self.snapshot = snapshot
        self.by = by or By.GIVEN
        self.draws = 2 if by == By.LEARNED else 1  # that a decision takes
        self._keys = keys
        self._places: dict[str, Place] = {}
        self._sizes: list[int] = []
        self._pools: dict[Pool, tuple[int, ...]] = {}
        words: list[Argument] = []
        for nodes in _groups_of(snapshot) if by and len(snapshot.nodes) >= LARGE else ():
            places = [Place(len(self._sizes), speed, f"{speed!r} {node.url}") for node, speed in nodes]
            self._places.update((node.url, place) for (node, _), place in zip(nodes, places, strict=True))
            self._sizes.append(len(nodes))
            words += [len(nodes), *(place.member for place in places)]
        self._words = words
        # By given speeds as it always was: workers of before and of now must not take each other's order away.
        text = "\n".join(map(str, words if self.by == By.GIVEN else (self.by, *words)))
        self.name = f"{snapshot.version}:{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"

    def __repr__(self) -> str:
        return f"<LoadIndex {self.name} nodes={len(self._places)} groups={len(self._sizes)}>"

    def __len__(self) -> int:
        """How many groups."""
        return len(self._sizes)

    def place(self, url: str) -> Place | None:
        """None: no group has it, so no load of it is kept."""
        return self._places.get(url)

    def groups(self, pool: Pool) -> tuple[int, ...]:
        """The groups that are the candidates of `pool`, none more and none less; empty if there are no such, or if
        looking at each candidate is cheaper."""
        if not pool.kept:
            return ()  # a part of what a model has, made for one request
        known = self._pools.get(pool)
        if known is None:
            known = self._pools[pool] = self._make_groups(pool)
        return known

    def arguments(self) -> tuple[list[str], list[Argument]]:
        """KEYS and ARGV of index_loads.lua."""
        keys = self._keys
        names = [keys.unfinished, keys.version, keys.load_index, *self.keys([range(len(self))])]
        return names, [self.snapshot.version, self.name, LIFETIME_MS, self.by, *self._words]

    def keys(self, groups: Iterable[Iterable[int]]) -> list[str]:
        """Of these groups, and behind them what an order by learned speeds has besides: the last KEYS of the scripts
        that go by it."""
        names = [self._keys.load(group) for of_pool in groups for group in of_pool]
        return [*names, self._keys.learned, self._keys.load_sums] if self.by == By.LEARNED else names

    def _make_groups(self, pool: Pool) -> tuple[int, ...]:
        places = [self._places.get(url) for url in pool.urls]
        # A node without a speed counts as the average of its pool, which may be another one than that of its group.
        if any(place is None or place.speed != speed for place, speed in zip(places, pool.speeds, strict=True)):
            return ()
        found = tuple(dict.fromkeys(place.group for place in places if place is not None))
        whole = sum(self._sizes[number] for number in found) == len(pool.urls)
        return found if whole and len(found) <= max(FEW_GROUPS, len(pool.urls) // NODES_A_GROUP) else ()


def _groups_of(snapshot: Snapshot) -> Iterator[Sequence[tuple[Node, float]]]:
    """The nodes of each group with their speeds."""
    found: dict[tuple[Role, frozenset[str]], list[Node]] = {}
    for node in snapshot.nodes.values():
        # Encoders have their own round.
        if node.state == State.READY and node.breaker == Breaker.CLOSED and node.role != Role.Encode:
            found.setdefault((node.role, frozenset(node.models)), []).append(node)
    for nodes in found.values():
        yield list(zip(nodes, effective_speeds(nodes), strict=True))
