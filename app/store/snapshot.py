"""The registry as one worker last read it: immutable, indexed for the hot path.

Pure: it must not know Redis. What a model's candidates are, and what speed a node without one
counts as, is decided here once per registry version and not once per request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from app.errors import ModelNotFound, NoNodeAvailable
from app.nodes import Breaker, Node, Role, State
from app.store.scripts import Argument, packed


@dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """The candidates for one model and role: `urls[i]` has the effective speed `speeds[i]`.

    `packed` is the same as acquire.lua takes it, ready for the wire: how many, all urls, all speeds, `words` in all.
    `kept`: the snapshot gives the same object again, so what is made of it is worth keeping as well. `model`: "" where
    it is of nodes and not of a model.
    """

    version: int
    urls: tuple[str, ...]
    speeds: tuple[float, ...]
    words: int = field(repr=False)
    packed: bytes = field(repr=False)
    kept: bool = False
    model: str = ""


def effective_speeds(nodes: Iterable[Node]) -> tuple[float, ...]:
    """Each node's speed; one without counts as the average of those that have one, 1 if none has.

    Source: lmdeploy/serve/proxy/proxy.py, `get_matched_urls`.
    """
    speeds = [node.speed for node in nodes]
    given = [speed for speed in speeds if speed is not None]
    default = sum(given) / len(given) if given else 1.0
    return tuple(default if speed is None else speed for speed in speeds)


def least_bad(nodes: Sequence[Node]) -> list[Node]:
    """Of nodes whose breakers are all open, those that opened the fewest times in a row: better than nobody."""
    fewest = min(node.breaker_opens for node in nodes)
    return [node for node in nodes if node.breaker_opens == fewest]


class Snapshot:
    """All nodes at one registry version. `engine_keys` (url -> key) never enters repr; `host_headers`: url -> the name
    that the node is spoken to under, where that is not its URL's."""

    def __init__(
        self, version: int = 0, nodes: Mapping[str, Node] | None = None, engine_keys: Mapping[str, str] | None = None
    ) -> None:
        self.version = version
        self.nodes: Mapping[str, Node] = dict(sorted((nodes or {}).items(), key=lambda item: (item[1].order, item[0])))
        self.engine_keys: Mapping[str, str] = dict(engine_keys or {})
        self._pools: dict[tuple[str, tuple[Role, ...]], Pool] = {}
        self.broken = frozenset(node.url for node in self.nodes.values() if node.breaker != Breaker.CLOSED)
        self.host_headers = {url: node.host_header for url, node in self.nodes.items() if node.host_header}
        self._served = frozenset((node.role, model) for node in self.nodes.values() for model in node.models)

    def __repr__(self) -> str:
        return f"<Snapshot version={self.version} nodes={len(self.nodes)}>"

    def models(self, *roles: Role) -> list[str]:
        """Every model of every node (of `roles`) that is not gone, each once, in the order of registration."""
        there = (node for node in self.nodes.values() if node.state != State.GONE and (not roles or node.role in roles))
        return list(dict.fromkeys(model for node in there for model in node.models))

    def without(self, pool: Pool, urls: Collection[str]) -> Pool | None:
        """The candidates but `urls`; None where nobody is left."""
        left = [self.nodes[url] for url in pool.urls if url not in urls]
        return self._pool_of(left, model=pool.model) if left else None

    def knows(self, model: str) -> bool:
        """Whether any node, a gone one too, has the model."""
        return any(model in node.models for node in self.nodes.values())

    def serves(self, model: str, role: Role) -> bool:
        """Whether any node of `role`, in whatever state, has the model."""
        return (role, model) in self._served

    def pool(self, model: str, *roles: Role) -> Pool:
        """The candidates, nodes of any of `roles` in registration order: ready ones, else pending ones as a
        last resort.

        Raises:
            ModelNotFound: no node has the model, though there are nodes, and Redis has said so.
            NoNodeAvailable: no node at all, or none alive for this model.
        """
        pool = self._pools.get((model, roles))
        if pool is None:
            pool = self._pools[model, roles] = self._make_pool(model, roles)
        return pool

    def half_open(self, model: str, *roles: Role) -> list[str]:
        """Ready nodes with a half-open breaker: one request of the whole deployment may try each."""
        return [
            url
            for url in self.broken
            if (node := self.nodes[url]).breaker == Breaker.HALF_OPEN
            and node.state == State.READY
            and node.role in roles
            and model in node.models
        ]

    def only(self, url: str) -> Pool:
        """A pool of one node, whatever its state."""
        return self._pool_of([self.nodes[url]])

    def _make_pool(self, model: str, roles: tuple[Role, ...]) -> Pool:
        # Failures are not cached: client-given names must not fill a dictionary.
        if not self.nodes:
            raise NoNodeAvailable("no node is registered")
        if not self.knows(model):
            if not self.version:
                raise NoNodeAvailable(f"Redis has not been reached yet, and no node with the model {model!r} is known")
            raise ModelNotFound(f"The model {model[:200]!r} does not exist.", param="model")
        having = [node for node in self.nodes.values() if node.role in roles and model in node.models]
        words = " or ".join(role.name for role in roles)
        if not having:
            raise NoNodeAvailable(f"no {words} node has the model {model!r}")
        for state in (State.READY, State.PENDING):
            chosen = [node for node in having if node.state == state]
            closed = [node for node in chosen if node.breaker == Breaker.CLOSED]
            if chosen:
                return self._pool_of(closed or least_bad(chosen), kept=True, model=model)
        raise NoNodeAvailable(f"no {words} node with the model {model!r} is alive")

    def _pool_of(self, nodes: Sequence[Node], *, kept: bool = False, model: str = "") -> Pool:
        speeds = effective_speeds(nodes)
        urls = tuple(node.url for node in nodes)
        words: tuple[Argument, ...] = (len(urls), *urls, *map(repr, speeds))
        return Pool(self.version, urls, speeds, len(words), packed(*words), kept, model)
