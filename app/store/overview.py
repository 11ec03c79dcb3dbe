"""The deployment as a whole, for whoever watches it: what all workers share, read once.

It must not know in which form it is shown. Reads nodes and their counts, workers, encoder_cursor, links,
migrations, handovers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from app.nodes import Node
from app.store.keys import Keys
from app.store.links import read_link
from app.store.registry import Registry, as_unavailable, number


@dataclass(frozen=True, slots=True)
class Overview:
    """As Redis has it now. `unfinished` has no entry for an idle node; `links`: state -> how many."""

    version: int
    nodes: dict[str, Node]
    unfinished: dict[str, int]
    workers: int
    encoder_cursor: int
    links: dict[str, int]
    held_sessions: int
    handovers: dict[str, int]


async def overview(registry: Registry, keys: Keys) -> Overview:
    """Raises StoreUnavailable."""
    await registry.refresh()
    snapshot = registry.snapshot
    with as_unavailable():
        async with registry.redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.unfinished)
            pipe.zcard(keys.workers)
            pipe.get(keys.encoder_cursor)
            pipe.hvals(keys.links)
            pipe.hlen(keys.migrations)
            pipe.hgetall(keys.handovers)
            found: list[Any] = await pipe.execute()
    counts, workers, cursor, links, sessions, handovers = found
    return Overview(
        version=snapshot.version,
        nodes=dict(snapshot.nodes),
        unfinished={url: number(count) for url, count in counts.items()},
        workers=workers,
        encoder_cursor=number(cursor),
        links=dict(Counter(read_link(text).state for text in links)),
        held_sessions=sessions,
        handovers={what: number(count) for what, count in handovers.items() if what.isidentifier()},
    )
