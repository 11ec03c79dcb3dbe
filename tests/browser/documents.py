"""Documents as decision 22 has them, to be varied by tests."""

from __future__ import annotations

import itertools
from typing import Any

from tests.support import contract

Document = dict[str, Any]

NOW_S = 1_760_000_000.0
_ids = itertools.count(1)


def node(number: int = 1, **fields: Any) -> Document:
    """A ready node with nothing to do; `number` makes its URL."""
    url = f"http://10.0.{number // 250}.{number % 250}:23333"
    return contract.node(url, **{"models": ["llama-3-70b"], **fields})


def worker(name: str = "h1-21-4f1c", lease_s: float = 6.5, nodes: dict[str, int] | None = None) -> Document:
    return contract.worker(name, lease_s=lease_s, unfinished=sum((nodes or {}).values()), nodes=nodes or {})


def state(nodes: list[Document] | None = None, **fields: Any) -> Document:
    nodes = [node(1), node(2)] if nodes is None else nodes
    ours = {
        "time": NOW_S,
        "version": "0.1.0",
        "redis": {"up": True, "reason": None},
        "registry_version": 7,
        "models": sorted({model for one in nodes for model in one["models"]}),
        "workers": [worker()],
    }
    return contract.state(*nodes, **{**ours, **fields})


def candidate(number: int, score: float | None, **fields: Any) -> Document:
    return {
        "node": node(number)["url"],
        "score": score,
        "unfinished": 0,
        "speed": 1.0,
        "mean_latency_s": None,
        **fields,
    }


def decision(**fields: Any) -> Document:
    """One that node 1 served at once, weighed against node 2."""
    number = next(_ids)
    one = node(1)["url"]
    chosen = {"node": one, "stage": "request", "score": 0.25, "left_off": 0}
    chosen["candidates"] = [candidate(1, 0.25, unfinished=1, speed=4.0), candidate(2, 1.5, unfinished=3, speed=2.0)]
    return {
        "id": f"1760000000000-{number}",
        "time": NOW_S,
        "request": f"req-{number}",
        "worker": "h1-21-4f1c",
        "model": "llama-3-70b",
        "path": "/v1/chat/completions",
        "outcome": "ok",
        "status": 200,
        "seconds": 1.25,
        "first_byte_s": 0.125,
        "node": one,
        "tries": [chosen],
        "legs": [{"node": one, "stage": "request", "status": 200, "seconds": 1.25, "error": None}],
        **fields,
    }
