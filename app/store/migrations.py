"""Sessions under migration: caches that prefill engines keep until decode has taken them over.

Owns HASH migrations (`<prefill>|<session>` -> JSON). A session stands here from prefill's answer until decode has
sent its first token. Notes go out on the ordered hot connection and nobody waits for them; what a worker that died
has left is found and freed by another one.

An engine that restarts counts its sessions from the start, so a number alone names nothing: a worker's own session is
an object, its note is its own as long as worker and life are the same, and a later one with its number displaces it.
It must not know HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from app.store.clock import redis_ms
from app.store.keys import Keys
from app.store.ledger import Ledger
from app.store.links import field_of, hash_of, swap
from app.store.registry import Registry, as_unavailable
from app.store.scripts import Argument, Script


class Migration(msgspec.Struct, omit_defaults=True):
    """A record. `life`: of the prefill node; a number of an older life may belong to another session by now.
    `by`: another worker that is freeing it; `freed`: that has been done, and `worker` has not heard of it yet."""

    decode: str
    worker: str
    life: int
    at_ms: int
    by: str = ""
    freed: bool = False


@dataclass(eq=False, slots=True)
class Session:
    """One of this worker's own; `life` of the prefill node when it was asked."""

    prefill: str
    number: int
    life: int
    decode: str = ""
    freeing: bool = False

    @property
    def name(self) -> str:
        return name_of(self.prefill, self.number)


def name_of(prefill: str, session: int) -> str:
    return f"{prefill}|{session}"


def session_of(name: str) -> tuple[str, int]:
    """(prefill URL, session id). Raises ValueError for a name that no worker wrote."""
    prefill, _, session = name.rpartition("|")
    return prefill, int(session)


class Migrations:
    """One per worker. `held`: this worker's own, by name."""

    def __init__(
        self, *, ledger: Ledger, registry: Registry, keys: Keys, scripts: Mapping[str, Script], worker: str
    ) -> None:
        self.worker = worker
        self.held: dict[str, Session] = {}
        self._ledger = ledger
        self._registry = registry
        self._keys = keys
        self._scripts = scripts
        ledger.on_told_again.append(self._note_again)

    def __repr__(self) -> str:
        return f"<Migrations held={len(self.held)}>"

    # --- notes: at once, never failing

    def hold(self, session: Session) -> None:
        """From now on, or with another decode node. One of the same number is displaced: it went with its process."""
        held = self.held.get(session.name)
        if held is None or held.life <= session.life:
            self.held[session.name] = session
            self._run("hold_migration", session.name, session.decode, self.worker, session.life)

    def holds(self, session: Session) -> bool:
        return self.held.get(session.name) is session

    def clear(self, session: Session) -> bool:
        """There is nothing left to free. False: it was not held."""
        return self._drop(session, left=False)

    def leave(self, session: Session) -> None:
        """Nobody's from now on: whoever looks for what is left behind takes it."""
        self._drop(session, left=True)

    def _drop(self, session: Session, *, left: bool) -> bool:
        if not self.holds(session):
            return False
        del self.held[session.name]
        self._run("drop_migration", session.name, self.worker, session.life, int(left))
        return True

    def _note_again(self) -> None:
        """Write down what is held, and nothing else: Redis has lost it, or was away when it was said."""
        held = [part for s in self.held.values() for part in (s.name, s.decode, s.life)]
        self._run("restate_migrations", self.worker, *held)

    def _run(self, script: str, *arguments: Argument) -> None:
        command = self._scripts[script].evalsha([self._keys.migrations], arguments)
        # EVAL: no answer is looked at, so nobody would notice that the server has lost the script.
        self._ledger.note("EVAL", self._scripts[script].text, *command[2:])

    # --- what others left: may raise StoreUnavailable

    async def all(self) -> dict[str, str]:
        """Every session with its record, as text."""
        return await hash_of(self._registry, self._keys.migrations)

    async def one(self, session: Session) -> Migration | None:
        """What is noted under a session's name; None where there is nothing."""
        text = await field_of(self._registry, self._keys.migrations, session.name)
        return read_migration(text) if text else None

    async def take_over(self, name: str, seen: str, record: Migration) -> str | None:
        """Take it upon this worker to free another one's; the record then, None if another was faster."""
        mine = _text(record, by=self.worker)
        return mine if await self._swap(name, seen, mine) else None

    async def give_back(self, name: str, seen: str, record: Migration) -> None:
        """Undo `take_over`, so that whoever looks next takes it."""
        await self._swap(name, seen, _text(record, by=""))

    async def mark_freed(self, name: str, seen: str, record: Migration) -> None:
        """Tell the session's own worker that there is nothing left to free."""
        await self._swap(name, seen, _text(record, by="", freed=True))

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


def _text(record: Migration, *, by: str, freed: bool = False) -> str:
    return msgspec.json.encode(msgspec.structs.replace(record, by=by, freed=freed)).decode()
