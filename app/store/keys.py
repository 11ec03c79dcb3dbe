"""Every Redis key name, in one place.

The braces around the namespace are a hash tag: all keys of a deployment fall into one cluster slot,
so that every script may touch any of them, and several deployments can share one Redis.
"""

from __future__ import annotations


class Keys:
    """Key names of one deployment. `lua/README.md` is the dictionary: type and meaning of each."""

    def __init__(self, namespace: str) -> None:
        self.prefix = p = f"evenhand:{{{namespace}}}:"
        self.nodes = p + "nodes"
        self.engine_keys = p + "engine_keys"
        self.version = p + "version"
        self.events = p + "events"
        self.unfinished = p + "unfinished"
        self.workers = p + "workers"
        self.sessions = p + "sessions"
        self.latency_mean = p + "latency_mean"
        self.explored = p + "explored"
        self.last_success = p + "last_success"
        self.prober = p + "prober"
        self.encoder_cursor = p + "encoder_cursor"
        self.encoder_credit = p + "encoder_credit"
        self.links = p + "links"
        self.migrations = p + "migrations"
        self.handovers = p + "handovers"

    def node(self, url: str) -> str:
        return f"{self.prefix}node:{url}"

    def ledger(self, worker: str) -> str:
        """The worker's own unfinished counts."""
        return f"{self.prefix}unfinished:{worker}"

    def latency(self, url: str) -> str:
        return f"{self.prefix}latency:{url}"

    def stages(self, url: str) -> str:
        """Time that the stages of split requests took at the node."""
        return f"{self.prefix}stages:{url}"


def of_worker_given_up(keys: Keys, worker: str) -> tuple[str, ...]:
    """KEYS of give_up_worker.lua."""
    return keys.unfinished, keys.ledger(worker), keys.sessions, keys.workers


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
    )
