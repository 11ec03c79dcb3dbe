"""Every Redis key name, in one place.

The braces around the namespace are a hash tag: all keys of a deployment fall into one cluster slot,
so that every script may touch any of them, and several deployments can share one Redis.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

LAYOUT = 1
"""Number of the key layout. Raised by a change that a worker of before would misread or heal away; keys and fields
that it passes over are no such change."""


class Keys:
    """Key names of one deployment. `lua/README.md` is the dictionary: type and meaning of each."""

    def __init__(self, namespace: str) -> None:
        self.prefix = p = f"evenhand:{{{namespace}}}:"
        self.layout = p + "layout"
        self.nodes = p + "nodes"
        self.engine_keys = p + "engine_keys"
        self.version = p + "version"
        self.events = p + "events"
        self.unfinished = p + "unfinished"
        self.workers = p + "workers"
        self.sessions = p + "sessions"
        self.latency_mean = p + "latency_mean"
        self.explored = p + "explored"
        self.learned = p + "learned"
        self.learned_since = p + "learned_since"
        self.last_success = p + "last_success"
        self.prober = p + "prober"
        self.encoder_cursor = p + "encoder_cursor"
        self.encoder_credit = p + "encoder_credit"
        self.links = p + "links"
        self.migrations = p + "migrations"
        self.handovers = p + "handovers"
        self.failures = p + "failures"
        self.retries = p + "retries"
        self.requests = p + "requests"
        self.load_index = p + "load_index"
        self.load_sums = p + "load_sums"
        self.restating = p + "restating"
        self.dispatched = p + "dispatched"
        self.watched = p + "watched"
        self.decisions = p + "decisions"
        self.arrangement = p + "arrangement"

    def node(self, url: str) -> str:
        return f"{self.prefix}node:{url}"

    def ledger(self, worker: str) -> str:
        """The worker's own unfinished counts."""
        return f"{self.prefix}unfinished:{worker}"

    def handing(self, worker: str) -> str:
        """The worker's hand-overs that go on."""
        return f"{self.prefix}handing:{worker}"

    def discovering(self, source: str) -> str:
        """The worker whose turn it is to read the source."""
        return f"{self.prefix}discovering:{source}"

    def load(self, group: int) -> str:
        """The nodes of a group in the order of their load."""
        return f"{self.prefix}load:{group}"

    def latency(self, url: str) -> str:
        return f"{self.prefix}latency:{url}"

    def learning(self, url: str) -> str:
        """What the node's learned speed is made of."""
        return f"{self.prefix}learning:{url}"

    def stages(self, url: str) -> str:
        """Time that the stages of split requests took at the node."""
        return f"{self.prefix}stages:{url}"


class Shape(NamedTuple):
    """What a key must hold: its type as Redis's TYPE says it, and what its values are (see heal_keys.lua)."""

    type: str
    values: str


LEASE = Shape("string", "text")


def shapes(keys: Keys) -> dict[str, Shape]:
    """Key -> shape of all keys that a deployment has once, but those that are made anew whenever they are not right
    (`load_index`, its groups and `load_sums`, `learned_since`), `restating`, which is overwritten or expires, and the
    leases of sources, of which each worker knows its own. `events` is a channel, no key."""
    return {
        keys.layout: Shape("string", "count"),
        keys.version: Shape("string", "count"),
        keys.nodes: Shape("set", "registry"),
        keys.engine_keys: Shape("hash", "registry"),
        keys.workers: Shape("zset", "instant"),
        keys.sessions: Shape("hash", "count"),
        keys.unfinished: Shape("hash", "count"),
        keys.latency_mean: Shape("hash", "seconds"),
        keys.explored: Shape("hash", "count"),
        keys.learned: Shape("hash", "seconds"),  # no seconds, but as they are: a number that is not below 0
        keys.last_success: Shape("hash", "instant"),
        keys.prober: LEASE,
        keys.encoder_cursor: Shape("string", "count"),
        keys.encoder_credit: Shape("hash", "number"),
        keys.links: Shape("hash", "text"),
        keys.migrations: Shape("hash", "text"),
        keys.handovers: Shape("hash", "count"),
        keys.failures: Shape("hash", "count"),
        keys.retries: Shape("hash", "count"),
        keys.requests: Shape("hash", "count"),
        keys.dispatched: Shape("hash", "count"),
        keys.watched: Shape("string", "text"),
        keys.decisions: Shape("stream", "text"),
        keys.arrangement: Shape("hash", "text"),
    }


def shapes_of(keys: Keys, urls: Iterable[str], workers: Iterable[str]) -> dict[str, Shape]:
    """The same of the keys that each node and each worker has."""
    urls = list(urls)
    return (
        {keys.node(url): Shape("hash", "registry") for url in urls}
        | {keys.latency(url): Shape("list", "seconds") for url in urls}
        | {keys.stages(url): Shape("hash", "number") for url in urls}
        | {keys.learning(url): Shape("hash", "seconds") for url in urls}
        | {key: Shape("hash", "count") for worker in workers for key in (keys.ledger(worker), keys.handing(worker))}
    )


def of_worker_given_up(keys: Keys, worker: str) -> tuple[str, ...]:
    """KEYS of give_up_worker.lua."""
    return keys.unfinished, keys.ledger(worker), keys.sessions, keys.workers, keys.handing(worker), keys.load_index


def of_node_removed(keys: Keys, url: str) -> tuple[str, ...]:
    """KEYS of remove_node.lua."""
    return (
        keys.nodes,
        keys.node(url),
        keys.version,
        keys.engine_keys,
        keys.latency(url),
        keys.latency_mean,
        keys.explored,
        keys.last_success,
        keys.unfinished,
        keys.stages(url),
        keys.failures,
        keys.learned,
        keys.learning(url),
    )
