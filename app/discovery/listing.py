"""What a source lists, and what follows from it for the registry: which nodes to register, which to drain.

Pure: `decide` looks at nodes and answers; who calls it does the rest. The rules are the table in docs/discovery.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from app.nodes import Node, Role, State

NO_LONGER = "no longer listed by "
"""Begins the reason of a node that a source drains. By it that is told from a drain by hand, which stands."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One node as a source says it. `models` None: the engine says them."""

    url: str
    role: Role = Role.Hybrid
    models: tuple[str, ...] | None = None
    speed: float | None = None
    key: str | None = field(default=None, repr=False)
    host_header: str = ""
    bootstrap_port: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """All that a source lists. `whole`: what is not in it is not listed; else a part could not be asked."""

    nodes: Mapping[str, Listed]
    whole: bool = True
    trouble: str = ""  # of the part that could not be asked


class ReadFailed(Exception):
    """A source could not be read; nothing follows from it. Its text says why, without a key."""


class Reader(Protocol):
    """A source that is looked at. `every_s`: how often; `patience_s`: for how long readings must leave a node out."""

    name: str
    every_s: float
    patience_s: float

    async def look(self) -> Reading | None:
        """What it lists; None: nothing new. Raises ReadFailed."""
        ...

    def forget(self) -> None:
        """The next look begins anew."""
        ...


@dataclass(frozen=True, slots=True)
class Register:
    listed: Listed


@dataclass(frozen=True, slots=True)
class Drain:
    """`incarnation`: of the registration that was looked at."""

    url: str
    incarnation: str


def decide(
    source: str,
    listed: Mapping[str, Listed],
    gone: Collection[str],
    nodes: Mapping[str, Node],
    keys: Mapping[str, str],
) -> Iterator[Register | Drain]:
    """What to do for `source`.

    Args:
        gone: nodes that it lists no longer, for long enough.
        nodes, keys: as registered; keys: url -> API key.
    """
    for url, wanted in listed.items():
        node = nodes.get(url)
        if node is None or (node.source == source and _is_due(node, wanted, keys.get(url))):
            yield Register(wanted)
    for url in gone:
        node = nodes.get(url)
        if node is not None and node.source == source and node.state != State.DRAINING:
            yield Drain(url, str(node.incarnation))


def own(source: str, nodes: Mapping[str, Node]) -> set[str]:
    return {url for url, node in nodes.items() if node.source == source}


def _is_due(node: Node, wanted: Listed, key: str | None) -> bool:
    if node.state == State.DRAINING:
        return node.reason.startswith(NO_LONGER)  # it is back; a drain by hand goes on to its end
    if node.state == State.GONE:
        return True  # while nobody read the source; listed, it is looked for as a node of `--nodes` is
    models = node.asked if wanted.models is None else not node.asked and node.models == wanted.models
    same = (node.role, node.speed, node.host_header, node.bootstrap_port, key) == (
        wanted.role,
        wanted.speed,
        wanted.host_header,
        wanted.bootstrap_port,
        wanted.key,
    )
    return not (models and same)
