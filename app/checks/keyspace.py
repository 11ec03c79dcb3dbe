"""The keys of a deployment: their layout, their types, names that nobody knows, and what belongs to no worker.

Owns one look at all keys under the prefix; it changes nothing, `heal_keys.lua` of a running worker does. It must not
know the server or the nodes. Reads every key's name and type, and layout, nodes, workers, sessions, the ledgers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.checks.finding import Finding, bad, named, ok, warn
from app.store.keys import LAYOUT, Keys, shapes, shapes_of
from app.terminal.words import count

LOOK_S = 5.0
KEYS_LOOKED_AT = 50_000
READ_TRIES = 3
GROUP = "load:"


@dataclass(frozen=True, slots=True)
class Keyspace:
    """As it was read. `types`: of the keys under the prefix; `whole`: whether those are all; `totals` and `ledgers`
    (of workers with a lease) are of one moment, None where they never held still or are no hashes."""

    layout: str | None
    types: Mapping[str, str]
    whole: bool
    urls: frozenset[str]
    workers: frozenset[str]
    sessions: frozenset[str]
    totals: Mapping[str, str] | None
    ledgers: Mapping[str, Mapping[str, str]]


def look(client: Any, keys: Keys) -> Keyspace:
    """Raises RedisError."""
    types, whole = _types(client, keys)

    def read(key: str, kind: str, command: str, *args: object) -> Any:
        return client.execute_command(command, key, *args) if types.get(key) == kind else ()

    layout = read(keys.layout, "string", "GET") or None
    urls = frozenset(read(keys.nodes, "set", "SMEMBERS"))
    sessions = frozenset(client.hkeys(keys.sessions)) if types.get(keys.sessions) == "hash" else frozenset()
    workers, totals, ledgers = _counts(client, keys, types)
    return Keyspace(layout, types, whole, urls, workers, sessions, totals, ledgers)


def _types(client: Any, keys: Keys) -> tuple[dict[str, str], bool]:
    """Name -> type of all our keys; False where there was no time for all. Names alone are walked over: in a Redis
    that other programs share most are theirs."""
    names: list[str] = []
    until, cursor = time.monotonic() + LOOK_S, 0
    while True:
        cursor, found = client.scan(cursor, match=keys.prefix + "*", count=1000)
        names += found
        if cursor == 0 or len(names) > KEYS_LOOKED_AT or time.monotonic() > until:
            break
    names = sorted({*names})
    types: list[str] = []
    for first in range(0, len(names), 500):
        with client.pipeline(transaction=False) as pipe:
            for name in names[first : first + 500]:
                pipe.type(name.encode(errors="surrogateescape"))
            types += pipe.execute()
    return {name: kind for name, kind in zip(names, types, strict=True) if kind != "none"}, cursor == 0


def _counts(
    client: Any, keys: Keys, types: Mapping[str, str]
) -> tuple[frozenset[str], dict[str, str] | None, dict[str, dict[str, str]]]:
    if types.get(keys.workers, "zset") != "zset" or types.get(keys.unfinished, "hash") != "hash":
        return frozenset(), None, {}
    workers: list[str] = client.zrange(keys.workers, 0, -1)
    for _ in range(READ_TRIES):
        if any(types.get(keys.ledger(worker), "hash") != "hash" for worker in workers):
            break
        with client.pipeline(transaction=True) as pipe:
            pipe.zrange(keys.workers, 0, -1)
            pipe.hgetall(keys.unfinished)
            for worker in workers:
                pipe.hgetall(keys.ledger(worker))
            again, totals, *ledgers = pipe.execute()
        if again == workers:
            return frozenset(workers), totals, dict(zip(workers, ledgers, strict=True))
        workers = again
    return frozenset(workers), None, {}


def judge(space: Keyspace, keys: Keys) -> Iterator[Finding]:
    yield _layout(space)
    yield _wrong_types(space, keys)
    yield _unknown(space, keys)
    yield from _left_over(space, keys)
    yield _ledgers(space, keys)
    if space.totals is not None:
        yield _totals(space)


def not_checked(space: Keyspace) -> list[tuple[str, str]]:
    return [] if space.whole else [("keys: some of them", f"Redis holds too many to walk over within {LOOK_S:g} s")]


def _layout(space: Keyspace) -> Finding:
    if not space.types:
        return warn(
            "keys.layout",
            "there is no key of this deployment",
            "start `evenhand serve` with this Redis and namespace; or is it another --redis-url or --namespace?",
        )
    if space.layout == str(LAYOUT):
        return ok("keys.layout", f"layout {LAYOUT}, {count(len(space.types), 'key')}")
    if space.layout is None:
        says = "the keys don't say their layout"
        return warn("keys.layout", says, "a running worker writes it; does one of this version run?")
    return bad(
        "keys.layout",
        f"the keys have layout {space.layout[:20]}, this version of Evenhand knows layout {LAYOUT} and touches nothing",
        "run the same version everywhere, or give this one a --namespace of its own",
    )


def _wrong_types(space: Keyspace, keys: Keys) -> Finding:
    wanted = {key: shape.type for key, shape in shapes(keys).items()}
    wanted |= {key: shape.type for key, shape in shapes_of(keys, space.urls, {*space.workers, *space.sessions}).items()}
    wrong = [
        f"{key.removeprefix(keys.prefix)} is a {kind} and no {wanted[key]}"
        for key, kind in space.types.items()
        if key in wanted and kind != wanted[key]
    ]
    if wrong:
        return bad(
            "keys.types",
            f"somebody wrote over our keys: {named(wrong)}",
            "running workers replace them within seconds; if it comes back, find out who writes there",
        )
    return ok("keys.types", "every key has its type")


def _unknown(space: Keyspace, keys: Keys) -> Finding:
    known = {value for value in vars(keys).values() if isinstance(value, str)}
    families = {name("").removeprefix(keys.prefix) for name in (keys.node, keys.ledger, keys.handing, keys.latency)}
    families |= {keys.stages("").removeprefix(keys.prefix), keys.discovering("").removeprefix(keys.prefix), GROUP}
    unknown = [
        name
        for key in space.types
        if key not in known and not (name := key.removeprefix(keys.prefix)).startswith(tuple(families))
    ]
    if unknown:
        return warn(
            "keys.unknown",
            f"{count(len(unknown), 'key')} that no Evenhand of this version knows: {named(unknown)}",
            "a newer version, or another program, uses the prefix; if it is nobody, DEL them",
        )
    return ok("keys.unknown", "no key under the prefix is unknown")


def _left_over(space: Keyspace, keys: Keys) -> Iterator[Finding]:
    """Keys of nodes that are not registered."""
    of_nodes = [keys.node(""), keys.latency(""), keys.stages("")]
    left = [
        key.removeprefix(keys.prefix)
        for key in space.types
        for start in of_nodes
        if key.startswith(start) and key.removeprefix(start) not in space.urls
    ]
    if left:
        yield warn(
            "keys.nodes",
            f"{count(len(left), 'key')} of nodes that are not registered: {named(left)}",
            "harmless; DEL them, or register the node again",
        )


def _ledgers(space: Keyspace, keys: Keys) -> Finding:
    owners = {*space.workers, *space.sessions}
    orphans = [
        key.removeprefix(keys.prefix)
        for key in space.types
        for start in (keys.ledger(""), keys.handing(""))
        if key.startswith(start) and key.removeprefix(start) not in owners
    ]
    if orphans:
        return warn(
            "workers.ledgers",
            f"{count(len(orphans), 'ledger')} of no worker: {named(orphans)}",
            "their counts are in no total, so no decision is wrong; DEL them",
        )
    return ok("workers.ledgers", "every ledger has its worker")


def _totals(space: Keyspace) -> Finding:
    sums: dict[str, int] = {}
    for ledger in space.ledgers.values():
        for url, value in ledger.items():
            sums[url] = sums.get(url, 0) + _number(value)
    totals = {url: _number(value) for url, value in (space.totals or {}).items()}
    wrong = [
        f"{url} counts {totals.get(url, 0)}, its workers {sums.get(url, 0)}"
        for url in sorted(totals.keys() | sums.keys())
        if totals.get(url, 0) != sums.get(url, 0)
    ]
    if wrong:
        return warn(
            "workers.totals",
            f"totals are not the sum of the ledgers: {named(wrong)}",
            "a running worker corrects it within a second or two; does one run?",
        )
    return ok("workers.totals", f"{count(sum(totals.values()), 'unfinished request')}, the sum of the ledgers")


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"-?[0-9]{1,15}", text) else 0
