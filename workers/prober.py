"""The prober: one in the whole deployment at a time, it keeps the registry true.

Each worker runs one of these; a lease in Redis says whose turn it is. The holder probes nodes,
finishes drains, forgets what is long gone, and repairs what somebody deleted by hand. It decides
from what it sees (`verdict`, `interval_s` are pure) and then does the I/O. Keys: prober, last_success,
handing:*, and through the registry the nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from app.errors import EngineRefused, EngineTimeout, StoreUnavailable, UpstreamError
from app.nodes import Breaker, Node, State
from app.store.clock import redis_ms
from app.store.handing import fetched
from app.store.keys import Keys
from app.store.registry import Registry, number
from app.store.scripts import Code
from app.upstream.management import EngineClient, Verdict
from workers.lease import Lease

log = logging.getLogger("evenhand.prober")

TURN_S = 1.0
"""How often the holder looks around, and others whether the lease is free."""
LEASE_MS = 3_000
"""A dead holder is followed within this time and one turn."""
PROBES_AT_ONCE = 64
"""Bound on probes in flight: a fleet must not exhaust the worker's files."""
QUICK_S = 1.0
SECOND_LOOK_S = 0.25
QUICK_FOR_MS = 60_000
"""A node that is expected back soon is asked each second for a minute, then at the usual interval."""
GONE_INTERVALS_S = (10.0, 300.0)
"""A gone node: from every ten seconds to every five minutes, a twentieth of how long it is gone."""


@dataclass(frozen=True, slots=True)
class Rules:
    """When a node is up or down; all from settings, seconds unless the name says otherwise."""

    interval_s: float
    down_after: int
    up_after: int
    busy_grace_s: float
    heartbeat_expiration_s: float
    forget_after_s: float
    breaker_failures: int = 5


@dataclass(slots=True)
class Record:
    """What the holder remembers of one incarnation of a node between probes."""

    incarnation: int
    hits: int = 0
    misses: int = 0
    due_at_s: float = 0.0
    trouble: str = ""  # what was wrong at the last probe, where that changed no state
    running: asyncio.Task[None] | None = field(default=None, repr=False)


class Finding:
    """What one probe saw. `kind`: ok, asleep, refused, timeout, bad."""

    __slots__ = ("kind", "models", "words")

    def __init__(self, kind: str, words: str = "", models: tuple[str, ...] | None = None) -> None:
        self.kind = kind
        self.words = words
        self.models = models


def interval_s(node: Node, rules: Rules, now_ms: int) -> float:
    """Seconds until the next probe of `node`."""
    since_ms = max(0, now_ms - node.state_since_ms)
    if node.state == State.GONE:
        return min(GONE_INTERVALS_S[1], max(GONE_INTERVALS_S[0], since_ms / 20_000))
    if node.state in (State.PENDING, State.DOWN, State.ASLEEP) and since_ms < QUICK_FOR_MS:
        return min(QUICK_S, rules.interval_s)
    return rules.interval_s


def verdict(node: Node, record: Record, finding: Finding, rules: Rules, *, busy: bool) -> State | None:
    """The state that `finding` puts `node` into, None for no change. Counts hits and misses in `record`.

    `busy`: requests on the node succeeded recently, so a probe that timed out proves nothing.
    """
    if finding.kind == "ok":
        record.misses = 0
        record.hits += 1
        needed = rules.up_after if node.state in (State.DOWN, State.GONE) else 1
        return State.READY if node.state != State.READY and record.hits >= needed else None
    record.hits = 0
    if finding.kind == "asleep":
        record.misses = 0
        return State.ASLEEP if node.state != State.ASLEEP else None
    if finding.kind == "timeout" and busy:
        return None
    record.misses += 1
    if node.state in (State.READY, State.ASLEEP) and (finding.kind == "refused" or record.misses >= rules.down_after):
        return State.DOWN
    return None


def expired(node: Node, rules: Rules, now_ms: int, read: Collection[str] = ()) -> State | None:
    """GONE where `node` has been away for longer than the heart-beat expiration; never a static one, nor one of a
    source that somebody reads: `read`."""
    if node.source in read:
        return None
    away_ms = now_ms - node.state_since_ms
    if node.state in (State.DOWN, State.PENDING) and not node.static and away_ms > rules.heartbeat_expiration_s * 1000:
        return State.GONE
    return None


class Prober:
    """See the module."""

    def __init__(
        self,
        *,
        registry: Registry,
        engines: EngineClient,
        keys: Keys,
        worker: str,
        rules: Rules,
        engine_key: str | None,
        counts_are_whole: Callable[[], bool],
    ) -> None:
        self.lease = Lease(registry=registry, key=keys.prober, worker=worker, lease_ms=LEASE_MS)
        self._registry = registry
        self._counts_are_whole = counts_are_whole
        self._engines = engines
        self._keys = keys
        self._worker = worker
        self._rules = rules
        self._engine_key = engine_key
        self._records: dict[str, Record] = {}
        self._probes: set[asyncio.Task[None]] = set()  # those that are cancelled and not over yet too
        # One change of the registry at a time: a fleet that goes down together would else change it faster than each
        # of its nodes' changes, which begins with reading it, could be made.
        self._writing = asyncio.Lock()
        self._awake = asyncio.Event()
        self._slots = asyncio.Semaphore(PROBES_AT_ONCE)
        self._slots_of_failing = asyncio.Semaphore(PROBES_AT_ONCE)
        registry.on_change.append(self._awake.set)

    def __repr__(self) -> str:
        running = sum(record.running is not None for record in self._records.values())
        return f"<Prober {self._worker} nodes={len(self._records)} probing={running}>"

    async def run(self) -> None:
        """Turn after turn, until cancelled; a change of the registry starts the next turn at once."""
        try:
            await self.lease.take_turns(self._turn, self._rest, self._pause)
        finally:
            self._rest()
            # The registry's connections are closed next: no probe may be using one still.
            await asyncio.gather(*self._probes, return_exceptions=True)
            await self.lease.give_back()

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(TURN_S, self._rules.interval_s)):
                await self._awake.wait()
        self._awake.clear()

    def _rest(self) -> None:
        for record in self._records.values():
            if record.running is not None:
                record.running.cancel()
        self._records.clear()

    async def _turn(self) -> None:
        registry = self._registry
        await registry.heal()
        await registry.verify()
        await self._recount()
        now_ms = redis_ms(await registry.redis.time())
        now_s = asyncio.get_running_loop().time()
        nodes = registry.snapshot.nodes
        for url in self._records.keys() - nodes.keys():
            self._forget(url)
        read = await self._sources_read()
        drained = []
        for node in nodes.values():
            if node.state == State.DRAINING:
                # Past its end the script removes it, whoever needs it still.
                # While workers may have to state again what runs there, it looks idle and is not.
                whole = self._counts_are_whole()
                if now_ms >= node.drain_until_ms or (whole and await fetched(registry, self._keys, node.url)):
                    drained.append(node.url)
                continue
            if node.state == State.GONE and now_ms - node.state_since_ms > self._rules.forget_after_s * 1000:
                await registry.remove(node.url, when=str(node.incarnation))
                continue
            state = expired(node, self._rules, now_ms, read)
            if state is not None:
                await self._write(node, state, node.reason)
                continue
            await self._tell_why(node)
            if node.breaker == Breaker.OPEN and node.breaker_until_ms <= now_ms:
                await registry.move_breaker(node.url, "half_open")
            self._start_if_due(node, now_s, now_ms)
        if drained:
            await registry.remove_drained(drained)

    async def _sources_read(self) -> set[str]:
        """The sources that a worker follows just now. The nodes of one that no settings name any more are as if
        registered by a call."""
        sources = list({node.source for node in self._registry.snapshot.nodes.values() if node.source})
        if not sources:
            return set()
        holders = await self._registry.redis.mget(map(self._keys.discovering, sources))
        return {source for source, holder in zip(sources, holders, strict=True) if holder is not None}

    async def _recount(self) -> None:
        keys = self._keys
        workers = [str(worker) for worker in await self._registry.redis.zrange(keys.workers, 0, -1)]
        names = [keys.unfinished, keys.workers, keys.load_index, *map(keys.ledger, workers)]
        code, corrected = await self._registry.run("recount_unfinished", names, list(workers))
        if code == Code.DONE and corrected:
            log.warning("%d totals were not the sum of the ledgers; they are now", corrected)

    def _forget(self, url: str) -> None:
        record = self._records.pop(url)
        if record.running is not None:
            record.running.cancel()

    def _start_if_due(self, node: Node, now_s: float, now_ms: int) -> None:
        record = self._records.get(node.url)
        if record is not None and record.incarnation != node.incarnation:
            self._forget(node.url)
            record = None
        if record is None:
            record = self._records[node.url] = Record(node.incarnation)
        if record.running is None and now_s >= record.due_at_s:
            record.due_at_s = now_s + interval_s(node, self._rules, now_ms)
            record.running = task = asyncio.create_task(self._probe(node, record), name=f"probe {node.url}")
            self._probes.add(task)
            task.add_done_callback(self._probes.discard)

    async def _probe(self, node: Node, record: Record) -> None:
        try:
            # Silent nodes hold a slot for the whole timeout: they wait among themselves.
            async with self._slots if record.misses == 0 else self._slots_of_failing:
                finding = await self._look(node)
            busy = finding.kind == "timeout" and await self._succeeded_recently(node.url)
            state = verdict(node, record, finding, self._rules, busy=busy)
            # A change of state takes its words along. Told later too, they could bring the old state back with them.
            record.trouble = finding.words if state is None and finding.kind != "ok" else ""
            if finding.kind == "ok" and node.url in self._registry.snapshot.broken:
                # Not wholly trusted: a node may answer probes and nothing else. The next failure opens it again.
                await self._registry.move_breaker(node.url, "close on probation", self._rules.breaker_failures)
            if state is not None:
                await self._write(node, state, finding.words, finding.models)
                back = state is State.READY and node.state in (State.DOWN, State.GONE)
                if back and node.url in self._registry.snapshot.broken:
                    # What failed there was the process that went down: one request may try this one at once.
                    await self._registry.move_breaker(node.url, "half_open", 1)
            elif finding.kind == "ok" and node.state in (State.DOWN, State.GONE):
                # Half-way up: the second look decides, and somebody may be waiting for it.
                record.due_at_s = 0.0
                asyncio.get_running_loop().call_later(SECOND_LOOK_S, self._awake.set)
        except (StoreUnavailable, RedisError, OSError) as e:
            log.debug("probe of %s has no effect: %s", node.url, e)
            record.due_at_s = 0.0  # with the next turn, which waits for Redis
        finally:
            record.running = None

    async def _tell_why(self, node: Node) -> None:
        """Keep the reason of a node that is not ready true: why it is pending still, or what it is down of by now.

        Called by the turn and between two probes of the node, the two that change its state: nothing comes between.
        """
        record = self._records.get(node.url)
        if record is None or record.incarnation != node.incarnation or record.running is not None:
            return
        if node.state != State.READY and record.trouble not in ("", node.reason):
            await self._write(node, node.state, record.trouble)

    async def _write(self, node: Node, state: State, reason: str, models: tuple[str, ...] | None = None) -> None:
        async with self._writing:
            await self._registry.set_state(node, state, reason=reason, models=models)

    async def _look(self, node: Node) -> Finding:
        key = self._registry.snapshot.engine_keys.get(node.url) or self._engine_key
        try:
            found = await self._engines.health(node.url, key)
            if found.verdict is not Verdict.OK:
                return Finding(found.verdict.value, found.word)
            if node.state == State.READY:
                return Finding("ok")
            # Up again, perhaps with other models: an engine is served only once its own list answers.
            models = await self._engines.models(node.url, key)
            return Finding("ok", models=models if node.asked else None)
        except EngineRefused as e:
            return Finding("refused", e.message)
        except EngineTimeout as e:
            return Finding("timeout", e.message)
        except UpstreamError as e:
            return Finding("bad", e.message)

    async def _succeeded_recently(self, url: str) -> bool:
        client = self._registry.redis
        last_ms = await client.hget(self._keys.last_success, url)
        # Below 0: an instant to come was written by hand.
        since_ms = redis_ms(await client.time()) - number(str(last_ms or ""))
        return 0 <= since_ms <= self._rules.busy_grace_s * 1000
