"""The workers of a deployment: whether there are any, and whether their leases are renewed.

Rules over a `state` document (docs/decisions/0022); no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from app.checks.finding import Finding, bad, named, ok, warn
from app.terminal.words import count

SOON_S = 0.9
"""A lease is 2 s or more, and renewed each second: with less left a renewal is late."""


def judge(state: Mapping[str, Any]) -> Iterator[Finding]:
    if not state["redis"]["up"]:
        return  # leases are not known
    workers: list[Mapping[str, Any]] = state["workers"]
    alive = [worker for worker in workers if worker["lease_s"] > 0]
    if not alive:
        yield bad(
            "workers.number",
            "no worker is alive" + (f"; {count(len(workers), 'lease')} of dead ones" if workers else ""),
            "start `evenhand serve` with this Redis and namespace; if one runs, its log says why it can't join",
        )
        return
    if len(alive) == 1:
        yield ok("workers.number", "1 worker")
    else:
        yield ok("workers.number", f"{len(alive)} workers, {_hosts(alive)}")
    yield from _leases(workers)


def _hosts(workers: list[Mapping[str, Any]]) -> str:
    return "on " + count(len({host_of(str(worker["id"])) for worker in workers}), "host")


def _leases(workers: list[Mapping[str, Any]]) -> Iterator[Finding]:
    dead = [worker for worker in workers if worker["lease_s"] <= 0]
    late = [worker for worker in workers if 0 < worker["lease_s"] < SOON_S]
    if dead:
        held = sum(worker["unfinished"] for worker in dead)
        yield warn(
            "workers.leases",
            f"{count(len(dead), 'lease')} over, {count(held, 'request')} counted there: {named(w['id'] for w in dead)}",
            "others give the counts back within a second; look why it died (out-of-memory killer?)",
        )
    if late:
        yield warn(
            "workers.leases",
            f"{count(len(late), 'lease')} about to run out: {named(w['id'] for w in late)}",
            "the worker is stopped, overloaded or cut off from Redis: its log, its CPU",
        )
    if not dead and not late:
        yield ok("workers.leases", "all leases are renewed")


def host_of(worker: str) -> str:
    """A worker's id is host-pid-nonce."""
    return worker.rsplit("-", 2)[0]
