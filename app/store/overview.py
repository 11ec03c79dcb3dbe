"""The deployment as a whole, for whoever watches it: what all workers share, read once.

It must not know in which form it is shown. Reads nodes and their counts, workers, encoder_cursor, links,
migrations, handovers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio.client import Pipeline

from app.nodes import Node
from app.store.keys import Keys
from app.store.links import ends_of, lives_of, read_link
from app.store.registry import Registry, number
from app.store.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Overview:
    """As Redis has it now. `unfinished` has no entry for an idle node; `workers`: id -> when its lease ends, ms;
    `links`: (prefill, decode) -> state."""

    version: int
    nodes: dict[str, Node]
    unfinished: dict[str, int]
    workers: dict[str, int]
    encoder_cursor: int
    links: dict[tuple[str, str], str]
    held_sessions: int
    handovers: dict[str, int]


async def overview(registry: Registry, keys: Keys) -> Overview:
    """Raises StoreUnavailable."""
    await registry.refresh()

    async def read() -> Overview:
        async with registry.redis.pipeline(transaction=False) as pipe:
            ask(pipe, keys)
            return told(await pipe.execute(), registry.snapshot)

    return await registry.guarded(read)


def ask(pipe: Pipeline, keys: Keys) -> None:
    """What `told` wants to hear."""
    pipe.hgetall(keys.unfinished)
    pipe.zrange(keys.workers, 0, -1, withscores=True)
    pipe.get(keys.encoder_cursor)
    pipe.hgetall(keys.links)
    pipe.hlen(keys.migrations)
    pipe.hgetall(keys.handovers)


ASKED = 6


def told(found: Sequence[Any], snapshot: Snapshot) -> Overview:
    counts, workers, cursor, links, sessions, handovers = found
    return Overview(
        version=snapshot.version,
        nodes=dict(snapshot.nodes),
        unfinished={url: number(count) for url, count in counts.items()},
        workers={worker: int(ends_ms) for worker, ends_ms in workers},
        encoder_cursor=number(cursor),
        links={ends_of(pair): _state(pair, text, snapshot) for pair, text in links.items()},
        held_sessions=sessions,
        handovers={what: number(count) for what, count in handovers.items() if what.isidentifier()},
    )


def _state(pair: str, text: str, snapshot: Snapshot) -> str:
    link = read_link(text)
    return link.state if link.lives == lives_of(snapshot.nodes, *ends_of(pair)) else "void"
