"""Sessions under migration: caches that prefill engines keep until decode has taken them over.

Owns HASH migrations (`<prefill>|<session>` -> JSON). A session stands here from before decode is called
until decode has sent its first token. Notes go out on the ordered hot connection and nobody waits for them;
what a worker that died has left is found and freed by another one. It must not know HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from app.store.clock import redis_ms
from app.store.keys import Keys
from app.store.ledger import Ledger
from app.store.links import field_of, hash_of, swap
from app.store.registry import Registry, as_unavailable
from app.store.scripts import Script


class Migration(msgspec.Struct, omit_defaults=True):
    """A record. `life`: of the prefill node; a number of an older life may belong to another session by now.
    `freed`: by another than its worker, which has not heard of it yet."""

    decode: str
    worker: str
    life: int
    at_ms: int
    freed: bool = False


def name_of(prefill: str, session: int) -> str:
    return f"{prefill}|{session}"


def session_of(name: str) -> tuple[str, int]:
    """(prefill URL, session id). Raises ValueError for a name that no worker wrote."""
    prefill, _, session = name.rpartition("|")
    return prefill, int(session)


class Migrations:
    """One per worker. `held`: this worker's own, name -> (decode, life)."""

    def __init__(
        self, *, ledger: Ledger, registry: Registry, keys: Keys, scripts: Mapping[str, Script], worker: str
    ) -> None:
        self.worker = worker
        self.held: dict[str, tuple[str, int]] = {}
        self._ledger = ledger
        self._registry = registry
        self._keys = keys
        self._hold = scripts["hold_migration"]
        ledger.on_told_again.append(self._note_again)

    def __repr__(self) -> str:
        return f"<Migrations held={len(self.held)}>"

    # --- notes: at once, never failing

    def hold(self, prefill: str, session: int, *, decode: str, life: int) -> None:
        name = name_of(prefill, session)
        self.held[name] = (decode, life)
        self._note(name, decode, life, worker=self.worker)

    def clear(self, prefill: str, session: int) -> None:
        name = name_of(prefill, session)
        if self.held.pop(name, None) is not None:
            self.forget_note(prefill, session)

    def let_go(self, prefill: str, session: int) -> tuple[str, int] | None:
        """From now on it is held no more, but still noted; its (decode, life), None: it was not held."""
        return self.held.pop(name_of(prefill, session), None)

    def leave(self, prefill: str, session: int, *, decode: str, life: int) -> None:
        """Note it as nobody's: whoever looks for what is left behind takes it."""
        self._note(name_of(prefill, session), decode, life, worker="")

    def forget_note(self, prefill: str, session: int) -> None:
        self._ledger.note("HDEL", self._keys.migrations, name_of(prefill, session))

    def _note_again(self) -> None:
        """Write down once more what is held: Redis has lost it, or was away when it was said."""
        for name, (decode, life) in self.held.items():
            self._note(name, decode, life, worker=self.worker)

    def _note(self, name: str, decode: str, life: int, *, worker: str) -> None:
        command = self._hold.evalsha([self._keys.migrations], [name, decode, worker, life])
        # EVAL: no answer is looked at, so nobody would notice that the server has lost the script.
        self._ledger.note("EVAL", self._hold.text, *command[2:])

    # --- what others left: may raise StoreUnavailable

    async def all(self) -> dict[str, str]:
        """Every session with its record, as text."""
        return await hash_of(self._registry, self._keys.migrations)

    async def take_over(self, name: str, seen: str, record: Migration) -> str | None:
        """Make another worker's session this one's, to free it; its record then, None if another was faster."""
        mine = msgspec.json.encode(msgspec.structs.replace(record, worker=self.worker)).decode()
        return mine if await self._swap(name, seen, mine) else None

    async def give_back(self, name: str, seen: str, record: Migration, *, owner_lives: bool) -> None:
        """Undo `take_over`: its owner's again, or nobody's, so that whoever looks next takes it."""
        before = record if owner_lives else msgspec.structs.replace(record, worker="")
        await self._swap(name, seen, msgspec.json.encode(before).decode())

    async def one(self, prefill: str, session: int) -> Migration | None:
        """A session's record; None where it has none."""
        text = await field_of(self._registry, self._keys.migrations, name_of(prefill, session))
        return read_migration(text) if text else None

    async def mark_freed(self, name: str, seen: str, record: Migration) -> None:
        """Tell the session's own worker that there is nothing left to free."""
        freed = msgspec.structs.replace(record, freed=True)
        await self._swap(name, seen, msgspec.json.encode(freed).decode())

    async def forget(self, name: str, seen: str) -> bool:
        return await self._swap(name, seen, "")

    async def workers_and_time(self) -> tuple[set[str], int]:
        """The workers whose lease runs, and Redis's clock in ms."""
        with as_unavailable():
            async with self._registry.redis.pipeline(transaction=True) as pipe:
                pipe.time()
                pipe.zrange(self._keys.workers, 0, -1, withscores=True)
                time, leases = await pipe.execute()
        now_ms = redis_ms(time)
        return {worker for worker, until_ms in leases if until_ms > now_ms}, now_ms

    async def _swap(self, name: str, seen: str, new: str) -> bool:
        return await swap(self._registry, self._keys.migrations, name, seen, new)


def read_migration(text: str) -> Migration | None:
    """A record; None for one that somebody damaged."""
    try:
        return msgspec.json.decode(text, type=Migration)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
