"""Links between prefill and decode engines, as the whole deployment knows them.

Owns HASH links: `<prefill>|<decode>` -> a JSON record, readable with redis-cli. Establishing a link takes
seconds and must happen once, so one worker claims a pair while the others look at what becomes of it. It must
not know HTTP or how a link is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from app.errors import StoreUnavailable
from app.nodes import Node
from app.store.clock import redis_ms
from app.store.keys import Keys
from app.store.ledger import Ledger
from app.store.registry import Registry, as_unavailable
from app.store.scripts import Argument, Code


class Link(msgspec.Struct, omit_defaults=True):
    """A record. `lives` names the lives of both nodes; a link of other lives is void.

    state: connecting or undoing, until `until_ms` (Redis's clock); connected; or failed, and not tried again
    until `until_ms`. `identity`: of the two engines when they were linked; `error`, `blame`: why the last try
    failed, and at whose URL; `failures`: in a row.
    """

    state: str
    lives: str
    version: int
    since_ms: int = 0
    until_ms: int = 0
    owner: str = ""
    took_ms: int = 0
    error: str = ""
    blame: str = ""
    failures: int = 0
    identity: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """What `claim` found: `code` as in claim_link.lua, `text` the record as it stands, `link` the same read."""

    code: Code
    text: str
    link: Link


def pair_of(prefill: str, decode: str) -> str:
    return f"{prefill}|{decode}"


def ends_of(pair: str) -> tuple[str, str]:
    prefill, _, decode = pair.partition("|")
    return prefill, decode


def lives_of(nodes: Mapping[str, Node], prefill: str, decode: str) -> str:
    """What a link is good for: these two processes, and none that came after them."""
    return "|".join(str(nodes[url].life) if url in nodes else "none" for url in (prefill, decode))


def read_link(text: str) -> Link:
    """A record; one that somebody damaged counts as a link that is not there."""
    try:
        return msgspec.json.decode(text, type=Link)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Link("void", "", 0)


class LinkTable:
    """One per worker; every coroutine may raise StoreUnavailable.

    `stands`: pair -> record of each link that this worker uses or makes: what it tells Redis again when that has
    lost everything.
    """

    def __init__(self, *, ledger: Ledger, registry: Registry, keys: Keys, worker: str) -> None:
        self.stands: dict[str, str] = {}
        self._ledger = ledger
        self._registry = registry
        self._keys = keys
        self._worker = worker
        ledger.on_told_again.append(self._tell_again)

    def __repr__(self) -> str:
        return f"<LinkTable of {self._worker}>"

    async def claim(self, pair: str, lives: str, version: int, *, wait_s: float) -> Claim:
        """Learn whether `pair` is linked, or take it upon this worker to link it within `wait_s`.

        StoreUnavailable also while this worker counts for itself: a claim is worth nothing without a lease.
        """
        if self._ledger.trouble is not None:
            raise StoreUnavailable(f"Redis can't be used: {self._ledger.trouble}")
        arguments: list[Argument] = [pair, self._worker, lives, version, round(wait_s * 1000)]
        names = [self._keys.links, self._keys.workers, self._keys.version]
        with as_unavailable():
            code, text = await self._registry.run("claim_link", names, arguments)
        if code in (Code.DONE, Code.UNCHANGED):
            self.stands[pair] = text
        return Claim(Code(code), text, read_link(text))

    async def holds(self, pair: str, claim: str) -> bool:
        """Whether a claim is still this worker's; Redis may have lost it."""
        return await self._swap(pair, claim, claim) or await self._swap(pair, "", claim)

    async def settle(self, pair: str, claim: str, link: Link) -> bool:
        """Put down what became of a claim. False: it isn't this worker's any more."""
        text = msgspec.json.encode(link).decode()
        self.stands.pop(pair, None)
        if not (await self._swap(pair, claim, text) or await self._swap(pair, "", text)):
            return False
        if link.state == "connected":
            self.stands[pair] = text
        return True

    async def mark_undoing(self, pair: str, seen: str, link: Link, *, within_ms: int) -> str | None:
        """Keep everybody from linking the pair meanwhile; the record that says so, None: another was faster."""
        link.until_ms = await self._now_ms() + within_ms
        text = msgspec.json.encode(link).decode()
        return text if await self._swap(pair, seen, text) else None

    async def drop(self, pair: str, seen: str) -> bool:
        """Take a record away. True for exactly one of those who saw it: that one undoes the link."""
        self.stands.pop(pair, None)
        return await self._swap(pair, seen, "")

    def _tell_again(self) -> None:
        for pair, text in self.stands.items():
            self._ledger.note("HSETNX", self._keys.links, pair, text)

    async def one(self, pair: str) -> Link:
        """A pair's record; a void one where it has none."""
        return read_link(await field_of(self._registry, self._keys.links, pair))

    async def all(self) -> dict[str, str]:
        """Every pair with its record, as text."""
        return await hash_of(self._registry, self._keys.links)

    async def _now_ms(self) -> int:
        with as_unavailable():
            return redis_ms(await self._registry.redis.time())

    async def _swap(self, pair: str, seen: str, new: str) -> bool:
        return await swap(self._registry, self._keys.links, pair, seen, new)


async def swap(registry: Registry, name: str, field: str, seen: str, new: str) -> bool:
    """Replace a record of a hash, or delete it where `new` is "", if it is still `seen`. Raises StoreUnavailable."""
    with as_unavailable():
        (code,) = await registry.run("swap_record", [name], [field, seen, new])
    return bool(code == Code.DONE)


async def hash_of(registry: Registry, name: str) -> dict[str, str]:
    """A whole hash. Raises StoreUnavailable."""
    with as_unavailable():
        found: dict[Any, Any] = await registry.redis.hgetall(name)
    return found


async def field_of(registry: Registry, name: str, field: str) -> str:
    """A field of a hash, "" where it isn't there. Raises StoreUnavailable."""
    with as_unavailable():
        (found,) = await registry.redis.hmget(name, [field])
    return str(found or "")
