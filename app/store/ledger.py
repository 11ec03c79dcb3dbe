"""The ledger: this worker's own unfinished counts, and acquiring and releasing on the shared ones.

Owns the hot connection, the worker's lease and the arithmetic between the local counts and Redis.
It must not know HTTP or engines. Keys: unfinished, unfinished:<worker>, sessions, workers, latency_mean,
explored, learned, learned_since, failures, requests, encoder_cursor, encoder_credit, load_index, load:<group>
(through lua/), watched, and those of `store.latencies`, `store.speeds` and `store.dispatched`.

The rule everything here follows: **a worker never replays, it restates.** The local counts are the
truth about this worker; after anything unclear (an error, a lost reply, a flush, a lease that ran
out) they are written absolutely, and one script corrects the totals by the difference. What makes
that exact:

- The counts change when a reply is *processed*, on one ordered connection, and a restate goes out
  only while no acquire is in flight (new ones wait for that moment: one round trip, once a second).
- What one turn of the event loop brings is gathered, and leaves as one call before anything else that is
  sent (`store.turn`): first what is given back, then the acquires.
- Each connection has a generation, larger than all before it, and every call carries it. What an
  older connection left in a frozen server's socket buffer runs late but is refused.

While Redis is away requests are balanced on the local counts by the policy's Python twin.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import hiredis

from app.balancing import (
    DECIDE_BY_LATENCY,
    DECIDE_BY_LEARNED,
    ENCODER_POLICIES,
    Candidate,
    Encoder,
)
from app.errors import ModelNotFound, NoNodeAvailable, StoreUnavailable
from app.journey import Journey, Try, current
from app.metrics.families import ENCODER_ITEMS, RETRIES
from app.metrics.figures import Figures
from app.nodes import Role
from app.store.dispatched import Dispatched
from app.store.keys import Keys, of_worker_given_up
from app.store.latencies import Latencies
from app.store.load_index import BY, LARGE, LoadIndex
from app.store.locator import Locator
from app.store.pipeline import Pipeline, Reply
from app.store.registry import Registry
from app.store.scripts import Argument, Code, Prepared, Script, packed, packed_command
from app.store.sight import Score, Sight, of_encoders
from app.store.snapshot import Pool, Snapshot
from app.store.speeds import Speeds
from app.store.turn import DRAWS, Answer, Release, Told, Turn, Wish
from app.store.way import Way

log = logging.getLogger("evenhand.store")

STALE_TRIES = 4
"""How often an acquire follows a registry that changes under it before it takes what it has."""
SETTLED_S = 0.5
"""A registry that has not changed for so long has its loads ordered: doing it for each of many changes costs more."""
RENEW_S = 1.0
"""Between two renewals of the lease; the same step repairs a ledger that somebody edited."""
WINDOW_S = 10
"""Seconds of which requests are noted, for the retry budget."""
RESTATED_WITHIN_S = 3.0
"""After Redis may have lost the counts, until those of every living worker are in it again: the longest pause before
another attempt, the attempt, and a second to spare."""
REASONS_TOLD = 8
"""Of one outage, in the log; sentinels asked in turn may each have a story of their own."""
WATCHED_A_SECOND = 5
"""Requests of this worker that are decided in sight of whoever watches: enough to look at, and next to no work."""
BACKOFF_S = (0.05, 1.0)
"""First and longest pause between attempts to reach Redis: counts are exact again 2 s after it is back."""

FEW = 4
"""Acquires and releases of one turn that leave by themselves: to compose so few to one call would cost the worker more
than it spares Redis."""

DONE = int(Code.DONE)
STAGES = {Role.Hybrid: "request", Role.Prefill: "prefill", Role.Decode: "decode", Role.Encode: "encode"}
"""What a request wants of a node of the role."""
MULTI, EXEC = packed_command(("MULTI",)), packed_command(("EXEC",))

Select = Callable[[Snapshot], Pool]
Ask = Callable[[Sequence[Pool], bool, Sight | None], asyncio.Future[Answer]]
Read = Callable[[list[Any]], list[list[str]]]
"""The nodes that a reply of an acquire script names, for each who asked in the call."""
Question = tuple[Script, bytes, Read]
"""What an acquire sends by itself: the script, its whole call as it goes over the wire, and what reads the reply."""


def _kind(reason: str) -> str:
    """Redis's own word where it has one (OOM, READONLY): it says the same of each script. Else the reason itself."""
    found = re.search(r": (?!ERR)([A-Z]+) ", reason)
    return found[1] if found else reason


def _ignore(reply: Reply) -> None:
    """What a note has for an answer: a lost one is mended by whoever finds the trace, or is only a figure."""


class Ticket:
    """One counted request on `url`. `release` gives the count back: once, at once, never failing."""

    __slots__ = ("_began", "_ledger", "_since", "learns", "url")

    def __init__(self, ledger: Ledger, url: str) -> None:
        self.url = url
        self._ledger: Ledger | None = ledger
        self.learns = ledger.learns  # whether the work of requests is wanted
        self._since = self._began = time.monotonic()

    def begin(self) -> None:
        """The request goes to the node only now: what came before says nothing of the node's speed."""
        self._began = time.monotonic()

    @property
    def held(self) -> bool:
        """Whether it has not been released."""
        return self._ledger is not None

    def release(self, *, succeeded: bool, answered: bool = False, work: float | None = None) -> None:
        """Count the request as finished; its latency enters the node's window if it `succeeded`.

        Args:
            answered: the node answered, and not that it can't serve: its row of failures ends.
            work: that the request was, see `app.dispatch.work`; the node's speed is learned from it.
        """
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            now_s = time.monotonic()
            ledger._release(self.url, now_s - self._since if succeeded else None, answered=answered or succeeded)
            if succeeded and work is not None:
                ledger._learn(self.url, work, now_s - self._began)


class Asked:
    """A call that acquires, on the wire, which is called with its reply. `futures`: of those that ask in it, see
    `Ledger._settle`; `gives`: something is given back in it; `again`: the server had lost the script, so it was sent
    once more.

    An object and no closure: one that can send itself again would hold itself.
    """

    __slots__ = ("again", "command", "futures", "gives", "ledger", "read", "script", "sight", "since_s")

    def __init__(
        self,
        ledger: Ledger,
        question: Question,
        futures: list[asyncio.Future[Answer]],
        *,
        sight: Sight | None,
        gives: bool = False,
    ) -> None:
        self.ledger = ledger
        self.script, self.command, self.read = question
        self.futures = futures
        self.sight = sight
        self.since_s = time.monotonic()
        self.gives = gives
        self.again = False

    def __call__(self, reply: Reply) -> None:
        self.ledger._settle(self, reply)


class Ledger:
    """See the module. One per worker; `start` before use, `close` after the last request.

    Args:
        strategies: of models that have one of their own, by model.
        workers: that this one's host starts, itself among them.
    """

    def __init__(
        self,
        *,
        locator: Locator,
        keys: Keys,
        scripts: dict[str, Script],
        registry: Registry,
        worker: str,
        strategy: str,
        strategies: Mapping[str, str] | None = None,
        encoder_policy: str = "round_robin",
        workers: int = 1,
        lease_s: float,
        timeout_s: float,
        draws: random.Random | None = None,
        figures: Figures | None = None,
    ) -> None:
        self.worker = worker
        self.counts: dict[str, int] = {}
        self.on_told_again: list[Callable[[], None]] = []  # notes may be lost: called when Redis is told all anew
        self.on_watched: list[Callable[[], None]] = []  # called once a second while somebody watches decisions
        self.watched = False  # whether somebody did when Redis was last asked, once a second
        self._sights = 0, 0  # second, watched requests in it
        self._locator = locator
        self._keys = keys
        self._scripts = scripts
        used = {strategy, *(strategies or {}).values()}
        # An order of loads is void after each acquire that does not go by it: beside another strategy there is none.
        self._by = BY.get(strategy) if len(used) == 1 else None
        self._encoders_script = scripts[f"acquire_encoders_{encoder_policy}"]
        self._encoder_policy = ENCODER_POLICIES[encoder_policy]
        self._score_encoders = of_encoders(encoder_policy)
        self._registry = registry
        self._lease_ms = round(lease_s * 1000)
        self._timeout_s = timeout_s
        self._draws = draws or random.Random()
        self._figures = figures or Figures()
        self.latencies = Latencies(
            keys=keys,
            script=scripts["note_latencies"],
            at_once=not used.isdisjoint(DECIDE_BY_LATENCY),
            send=self._send_latencies,
        )
        self.learns = not used.isdisjoint(DECIDE_BY_LEARNED)
        self._speeds = (
            Speeds(
                keys=keys,
                script=scripts["learn_speeds"],
                counts=self.counts,
                index=self._load_index,
                send=self._send_latencies,
            )
            if self.learns
            else None
        )
        self.dispatched = Dispatched(keys=keys, script=scripts["note_dispatched"])
        self._pipeline: Pipeline | None = None
        self._generation = 0
        self._changes = 0
        self._shunned: dict[str, float] = {}  # url -> until when local decisions pass it over, monotonic
        self.workers = workers  # of the deployment, when Redis last said so; never fewer than its host starts
        self._workers_of_host = workers
        self._requests: deque[tuple[int, int]] = deque()  # second, this worker's in it; those of the window
        self._not_noted = 0  # of them, in Redis
        self._acquiring = 0
        self._restate_due = False
        self._restated: asyncio.Future[None] | None = None
        self._trouble: str | None = "not connected to Redis yet"
        self._lost_at_s: float | None = None  # when Redis was last found to have lost counts, or may have, monotonic
        self._told: set[str] = set()  # kinds of reasons why it is local or could not join, since it last did
        self._lost = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        counting = (keys.unfinished, keys.ledger(worker), keys.sessions, keys.version)
        encoding = (*counting, keys.encoder_cursor, keys.encoder_credit, keys.nodes)
        ways = {name: Way.of(name, scripts, keys, worker) for name in used}
        self._way = ways[strategy]
        self._ways = {model: ways[name] for model, name in (strategies or {}).items()}
        self._asking_scripts = [self._encoders_script, *(way.call.script for way in ways.values())]
        # What these are called for is not sent again where the server has lost them; several releases are an acquire
        # of nothing.
        names = ("release", "note_latencies", *(("learn_speeds",) if self._speeds else ()))
        self._told_scripts = [self._way.call.script, *(scripts[name] for name in names)]
        self._encoders_call = Prepared(self._encoders_script, encoding, (worker,))
        # What has not left yet.
        self._wishes: list[Wish] = []
        self._given_back: list[Release] = []
        # What such a call has besides, packed once too: of this connection, of a registry version, of a node.
        self._packed_generation = packed(self._generation)
        self._calls: dict[Pool, bytes] = {}  # an acquire of the pool by itself, but for the draws
        self._releases: dict[tuple[str, bool], bytes] = {}
        self._learned: dict[Pool, Told] = {}
        # Of the registry's snapshot: where nodes stand in the order of loads, since when, and calls that go by it.
        self._index = LoadIndex(keys, registry.snapshot, by=self._by)
        self._indexed_at_s = time.monotonic()
        self._ordered_calls: dict[tuple[tuple[int, ...], ...], Prepared] = {}
        self._ordering = False  # right now
        self._orders = 0  # that were done
        self._order_call: bytes | None = None
        # What the encoder policy goes by while Redis is away.
        self._cursor = self._draws.randrange(2**16)
        self._credits: dict[str, float] = {}

    def __repr__(self) -> str:
        state = "shared" if self.trouble is None else "local"
        return f"<Ledger {self.worker} {state} unfinished={sum(self.counts.values())} nodes={len(self.counts)}>"

    @property
    def trouble(self) -> str | None:
        """Why decisions are local for now, in words; None while they are shared."""
        return self._trouble

    @property
    def counts_are_whole(self) -> bool:
        """Whether every worker has had the time to state its counts since Redis may have lost them."""
        lost_at_s = self._lost_at_s
        return self.trouble is None and (lost_at_s is None or time.monotonic() - lost_at_s > RESTATED_WITHIN_S)

    async def start(self) -> None:
        """Join the deployment, or go on without it if Redis can't be reached; keeps trying by itself."""
        await self._try_to_join()
        self._keeper = asyncio.create_task(self._keep(), name="ledger")

    async def close(self) -> None:
        """Leave: give back what is still counted, forget the worker. Waits at most two timeouts."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self._note_requests()
        self.latencies.note()
        if self._speeds:
            self._speeds.note()
        pipeline, self._pipeline = self._pipeline, None
        self._trouble = "closed"
        if pipeline is not None:
            names = of_worker_given_up(self._keys, self.worker)
            with contextlib.suppress(StoreUnavailable):
                # EVAL: a server on which no worker has died yet has never seen this script.
                script = self._scripts["give_up_worker"]
                await pipeline.call(("EVAL", script.text, *script.evalsha(names, (self.worker, "1"))[2:]))
            pipeline.close()

    def expect(self) -> None:
        """A request has just been read, whose task acquires in the event loop's next turn: what that turn gathers
        leaves with it, and not with the one after it.

        Not for a request that begins in such a turn: who always has another one would keep all from leaving.
        """
        if self._pipeline is not None:
            self._pipeline.flush_behind()

    # --- acquire ----------------------------------------------------------------------------------

    async def acquire(self, select: Select, *, again: bool = False) -> Ticket:
        """Choose a node from `select(snapshot)` and count one request on it, in one step.

        Raises whatever `select` raises (no such model, no node); never because of Redis.
        """
        if not again:
            self._count_request()
        (ticket,) = await self._acquire((select,), self._ask, self._choose, self._score)
        if again:
            self._figures.count(RETRIES, ticket.url)
        return ticket

    async def acquire_each(self, *selects: Select, again: bool = False) -> list[Ticket]:
        """Choose a node from each `select(snapshot)` and count one request on each, all in one step.

        Args:
            again: the client's request has been given to a node before; the retry budget counts it once.

        Returns:
            One ticket per select, in order. Raises as `acquire`.
        """

        if not again:
            self._count_request()
        return await self._acquire(selects, self._ask, self._choose, self._score)

    async def acquire_encoders(self, select: Select, items: int) -> list[Ticket]:
        """Give each of `items` media items an encoder and count it there, all in one step.

        Returns:
            One ticket per item, in order. Raises as `acquire`.
        """

        def ask(pools: Sequence[Pool], whatever_version: bool, sight: Sight | None) -> asyncio.Future[Answer]:
            (pool,) = pools
            version = None if whatever_version else pool.version
            call = self._encoders_call
            command = self._call(call, version, pool.words + 1, packed(items) + pool.packed)
            return self._count(
                (call.script, command, lambda reply: [[pool.urls[index - 1] for index in reply[3:]]]), sight
            )

        def locally(pools: Sequence[Pool]) -> list[str]:
            return self._assign(pools[0], items)

        self._count_request()
        tickets = await self._acquire((select,), ask, locally, self._score_encoders)
        for ticket in tickets:
            self._figures.count(ENCODER_ITEMS, ticket.url)
        return tickets

    async def _acquire(
        self,
        selects: Sequence[Select],
        ask: Ask,
        locally: Callable[[Sequence[Pool]], list[str]],
        score: Score,
    ) -> list[Ticket]:
        """Follow the registry until the decision is made on its current version; else decide locally.

        Args:
            ask: sends it; the second argument says that it must be right for whatever version Redis has.
            score: what the decision compares, for whoever watches it.
        """
        journey = current.get()
        if journey is not None and not journey.watched and journey.trace is None:
            journey = None  # who writes a line of it tells of legs only
        began_s = 0.0 if journey is None else time.monotonic()
        sight: Sight | None = None
        for attempt in range(STALE_TRIES):
            try:
                pools = self._select(selects)
            except (ModelNotFound, NoNodeAvailable):
                # Before it is turned away: another worker may have added or revived a node just now.
                await self._look_again()
                pools = self._select(selects)
            while self._restated is not None:
                await asyncio.shield(self._restated)
            if self._pipeline is None:
                break
            if journey is not None and journey.watched:
                sight = Sight(self._keys, pools, score)
            orders = self._orders
            future = ask(pools, attempt == STALE_TRIES - 1, sight)
            try:
                code, urls = await future
            except asyncio.CancelledError:
                # Cancelled between the reply and this line: `settle` has counted, and nobody else will know.
                if future.done() and not future.cancelled():
                    for url in future.result()[1]:
                        self._release(url, None)
                raise
            if code == DONE:
                tickets = [Ticket(self, url) for url in urls]
                if journey is not None:
                    self._note_tries(journey, tickets, began_s, sight)
                return tickets
            if code == Code.STALE:
                try:
                    await self._registry.catch_up()
                except StoreUnavailable:
                    break
            elif code == Code.REFUSED:
                self._forget_learned(pools)
            elif code == Code.ABSENT:
                if orders == self._orders:  # else they have been ordered since this was asked
                    self._order_loads()
            elif code is None:
                break
        urls = locally([self._without_shunned(pool) for pool in self._select(selects)])
        for url in urls:
            self._add(url)
        # Redis may have come back since this was decided to be local: then it must hear of it.
        if self._pipeline is not None:
            self._restate_soon()
        tickets = [Ticket(self, url) for url in urls]
        if journey is not None:
            self._note_tries(journey, tickets, began_s, None)
        return tickets

    def _way_of(self, pool: Pool) -> Way:
        return self._ways.get(pool.model, self._way)

    def _score(self, pool: Pool, *found: Any) -> list[float | None]:
        return self._way_of(pool).score(pool, *found)

    def _call(self, call: Prepared, version: int | None, count: int, words: bytes) -> bytes:
        """An acquire on the wire. `version` None: whatever it is; `words`: `count` arguments behind it, packed."""
        begun = self._packed_generation + packed("" if version is None else version)
        return call.command(count + 2, begun + words)

    def _ask(self, pools: Sequence[Pool], whatever_version: bool, sight: Sight | None) -> asyncio.Future[Answer]:
        snapshot = self._registry.snapshot
        way = self._ways.get(pools[0].model, self._way) if self._ways else self._way
        large = len(snapshot.nodes) >= LARGE
        if large and snapshot.version == pools[0].version and not whatever_version:
            if self._by and (question := self._ask_by_load(pools)):
                return self._count(question, sight)
            if way.by_chance and all(sum(pool.speeds) < math.inf for pool in pools):
                # Chance needs nothing that is shared: Redis need not read a whole fleet for it.
                chosen = [self._draws.choices(pool.urls, pool.speeds)[0] for pool in pools]
                pools = [snapshot.only(url) for url in chosen]
        version = None if whatever_version else pools[0].version
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        wish = way, version, pools, future
        self._acquiring += 1
        if large or sight is not None:
            # By itself: what somebody looks at, and what is of so many candidates that several such in one call would
            # keep Redis from all others for long.
            assert self._pipeline is not None
            self._send_alone(wish, self._pipeline, sight)
        else:
            self._gather(self._wishes, wish)
        return future

    def _gather(self, into: list[Any], what: Wish | Release) -> None:
        """It leaves with this turn's commands, or before the next one that is given."""
        first = not self._wishes and not self._given_back
        into.append(what)
        if first:
            assert self._pipeline is not None
            self._pipeline.defer(self._send_gathered)

    def _send_gathered(self, pipeline: Pipeline) -> None:
        wishes, self._wishes = self._wishes, []
        releases, self._given_back = self._given_back, []
        if len(wishes) + len(releases) <= FEW:
            for url, answered in releases:
                pipeline.send(self._release_of(url, answered), self._released)
            for wish in wishes:
                self._send_alone(wish, pipeline)
        else:
            for turn in Turn.each(wishes, releases):
                self._send_turn(turn, turn.way or self._way, pipeline)

    def _send_alone(self, wish: Wish, pipeline: Pipeline, sight: Sight | None = None) -> None:
        way, version, pools, future = wish
        if len(pools) > 1 or version is None or way.by_learned:
            self._send_turn(Turn.each([wish], ())[0], way, pipeline, sight)
            return
        # The same bytes but for the draws.
        pool, draw = pools[0], self._draws.random
        begun = self._calls.get(pool)
        if begun is None:
            begun = self._call(way.call, version, pool.words + 2, pool.packed)
            if pool.kept:
                self._calls[pool] = begun
        command = begun + DRAWS % (int(draw() * 1e10), int(draw() * 1e10))
        question = way.call.script, command, lambda reply: [[pool.urls[reply[2] - 1]]]
        self._send_asked(Asked(self, question, [future], sight=sight), pipeline)

    def _send_turn(self, turn: Turn, way: Way, pipeline: Pipeline, sight: Sight | None = None) -> None:
        command = turn.command(way, self._packed_generation, self._learned, self._draws.random)
        if turn.way is None:
            # No acquire, which would be sent once more by a server that had lost the script: a release is not.
            pipeline.send(command, self._released)
            return
        read = partial(turn.read_told, told=self._learned) if way.by_learned else turn.read
        question = way.call.script, command, read
        asked = Asked(self, question, turn.futures, sight=sight, gives=turn.gives)
        self._send_asked(asked, pipeline)

    def _forget_learned(self, pools: Iterable[Pool]) -> None:
        for pool in pools:
            self._learned.pop(pool, None)

    def _ask_by_load(self, pools: Sequence[Pool]) -> Question | None:
        """For acquire_least_loaded.lua; None where each candidate has to be looked at."""
        index = self._load_index()
        if time.monotonic() - self._indexed_at_s < SETTLED_S:
            return None
        groups = tuple(map(index.groups, pools))
        if not all(groups):
            return None
        call = self._ordered_calls.get(groups)
        if call is None:
            keys = self._keys
            names = [keys.unfinished, keys.ledger(self.worker), keys.sessions, keys.version, keys.load_index]
            names += index.keys(groups)
            call = self._ordered_calls[groups] = Prepared(self._scripts["acquire_least_loaded"], names, (self.worker,))
        words: list[Argument] = [index.name, index.by]
        for of_pool in groups:
            words += [len(of_pool), *(repr(self._draws.random()) for _ in range(index.draws))]
        return call.script, self._call(call, pools[0].version, len(words), packed(*words)), self._read_members

    def _read_members(self, reply: list[Any]) -> list[list[str]]:
        return [[member.split(b" ", 1)[1].decode() for member in reply[2:]]]

    def _load_index(self) -> LoadIndex:
        snapshot = self._registry.snapshot
        if snapshot is not self._index.snapshot:
            self._index, self._indexed_at_s = LoadIndex(self._keys, snapshot, by=self._by), time.monotonic()
            self._ordered_calls.clear()
            self._calls.clear()
            self._releases.clear()
            self._learned.clear()
            self._order_call = None
        return self._index

    def _order_loads(self) -> None:
        """Once for all that found no order: what they ask again runs behind it."""
        index = self._load_index()
        if not self._ordering and self._pipeline is not None:
            if self._order_call is None:
                script = self._scripts["index_loads"]
                # EVAL: seldom, and half of the servers that it meets have never seen it.
                command = ("EVAL", script.text, *script.evalsha(*index.arguments())[2:])
                self._order_call = packed_command(command)
            self._ordering = True
            self._pipeline.send(self._order_call, self._ordered)

    def _ordered(self, reply: Reply) -> None:
        self._ordering = False
        self._orders += 1

    def shun(self, url: str, seconds: float) -> None:
        """Pass the node over for so long wherever another will do: in local decisions only, until the next join."""
        self._shunned[url] = time.monotonic() + seconds

    def shuns(self, url: str) -> bool:
        return self._shunned.get(url, 0.0) > time.monotonic()

    def _without_shunned(self, pool: Pool) -> Pool:
        shunned = [url for url in pool.urls if self.shuns(url)] if self._shunned else []
        return self._registry.snapshot.without(pool, shunned) or pool if shunned else pool

    def _select(self, selects: Sequence[Select]) -> list[Pool]:
        snapshot = self._registry.snapshot
        return [select(snapshot) for select in selects]

    async def _look_again(self) -> None:
        if self._pipeline is not None:
            with contextlib.suppress(StoreUnavailable):
                await self._registry.refresh()

    def _count(self, question: Question, sight: Sight | None) -> asyncio.Future[Answer]:
        """One acquire on the wire by itself, in `sight` of whoever watches."""
        assert self._pipeline is not None
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._acquiring += 1
        self._send_asked(Asked(self, question, [future], sight=sight), self._pipeline)
        return future

    def _send_asked(self, asked: Asked, pipeline: Pipeline) -> None:
        if asked.sight is None:
            pipeline.send(asked.command, asked)
        else:
            self._send_in_sight(asked.command, asked, asked.sight)

    def _settle(self, asked: Asked, reply: Reply) -> None:
        found: list[list[str]] | None = None
        if type(reply) is not list:
            if isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOSCRIPT"):
                # Nothing ran, so sending it again is no replay. It stays in flight.
                if self._pipeline is not None and not asked.again:
                    asked.again = True
                    self._pipeline.submit(("SCRIPT", "LOAD", asked.script.text), _ignore)
                    self._send_asked(asked, self._pipeline)
                    return
                reply = StoreUnavailable("Redis lost the scripts and then the connection, or does not take them")
            self._acquiring -= len(asked.futures)
            if not isinstance(reply, StoreUnavailable):
                self._distrust(f"Redis answered an acquire with: {reply}")
            code = None
        else:
            self._acquiring -= len(asked.futures)
            # One in a while: what all together would cost is more than what they would tell.
            if not self._figures.acquires_s:
                self._figures.acquires_s.append(time.monotonic() - asked.since_s)
            code, version = reply[0], reply[1]
            unclear = code == Code.NOT_MEMBER or (asked.gives and reply.pop())
            if code == DONE:
                found = asked.read(reply)
                for urls in found:
                    for url in urls:
                        self._add(url)
            if unclear:
                # Only now: what was just counted is stated too.
                self._restate_soon()
            if version != self._registry.snapshot.version:
                self._registry.refresh_soon()
        for future, urls in zip(asked.futures, found or [[] for _ in asked.futures], strict=True):
            if not future.done():
                future.set_result((code, urls))
            elif future.cancelled():
                for url in urls:
                    self._release(url, None)
        if self._restate_due:
            self._restate_if_due()

    def _send_in_sight(self, command: bytes, callback: Callable[[Reply], None], sight: Sight) -> None:
        """An acquire together with the counts that it finds: nobody changes them in between."""

        def executed(reply: Reply) -> None:
            if type(reply) is list:
                *found, reply = reply
                sight.take(found)
            callback(reply)

        assert self._pipeline is not None
        send = self._pipeline.send
        send(MULTI, _ignore)
        for read in (*sight.commands, command):
            send(read, _ignore)
        send(EXEC, executed)

    def _add(self, url: str) -> None:
        self.counts[url] = self.counts.get(url, 0) + 1
        self.dispatched.new[url] += 1
        self._changes += 1

    def _choose(self, pools: Sequence[Pool]) -> list[str]:
        urls = []
        for pool in pools:
            candidates = [
                Candidate(speed, self.counts.get(url, 0), self.latencies.mean_s(url), learned=self.learned(url))
                for url, speed in zip(pool.urls, pool.speeds, strict=True)
            ]
            index, _ = self._way_of(pool).policy(candidates, (self._draws.random(), self._draws.random()))
            urls.append(pool.urls[index])
        return urls

    def learned(self, url: str) -> float | None:
        """The node's speed by this worker's own answers; None without any, and under other strategies."""
        return self._speeds.counted(url) if self._speeds else None

    def _assign(self, pool: Pool, items: int) -> list[str]:
        encoders = [
            Encoder(speed, self.counts.get(url, 0), self._credits.get(url, 0.0))
            for url, speed in zip(pool.urls, pool.speeds, strict=True)
        ]
        indices = self._encoder_policy(encoders, self._cursor, items)
        self._cursor = (self._cursor + items) % len(encoders)
        kept = {url: credit for url, credit in self._credits.items() if url in self._registry.snapshot.nodes}
        self._credits = kept | {url: encoder.credit for url, encoder in zip(pool.urls, encoders, strict=True)}
        return [pool.urls[index] for index in indices]

    # --- release ----------------------------------------------------------------------------------

    def _release(self, url: str, latency_s: float | None, *, answered: bool = False) -> None:
        left = self.counts[url] - 1
        if left:
            self.counts[url] = left
        else:
            del self.counts[url]
        self._changes += 1
        if latency_s is not None:
            self.latencies.add(url, latency_s, self._registry.snapshot.nodes)
        if self._pipeline is None:
            return
        if len(self._registry.snapshot.nodes) >= LARGE:
            # By itself: the node is moved in the order of loads.
            self._pipeline.send(self._release_of(url, answered), self._released)
        else:
            self._gather(self._given_back, (url, answered))

    def _release_of(self, url: str, answered: bool) -> bytes:
        if self._registry.snapshot is not self._index.snapshot:
            self._load_index()  # what belongs to another snapshot is forgotten
        command = self._releases.get((url, answered))
        if command is None:
            command = self._releases[url, answered] = self._make_release(self._index, url, answered)
        return command

    def _learn(self, url: str, work: float, latency_s: float) -> None:
        if self._speeds:
            self._speeds.add(url, work, latency_s, self._registry.snapshot.nodes)

    def _make_release(self, index: LoadIndex, url: str, answered: bool) -> bytes:
        keys = self._keys
        names = [keys.unfinished, keys.ledger(self.worker), keys.sessions, keys.version, keys.failures, keys.load_index]
        words: list[Argument] = [self.worker, self._generation, url, int(answered)]
        words.append(index.name if len(index) else "")
        if place := index.place(url):
            names += index.keys([(place.group,)])
            words += [repr(place.speed), place.member]
        return packed_command(self._scripts["release"].evalsha(names, words))

    def _released(self, reply: Reply) -> None:
        if isinstance(reply, StoreUnavailable):
            return
        if isinstance(reply, Exception):
            # NOSCRIPT too: whether it ran matters less than that the restate is right either way.
            self._distrust(f"Redis answered a release with: {reply}")
        elif reply[0] != DONE or any(reply[2:]):
            self._restate_soon()
        elif reply[1] != self._registry.snapshot.version:
            self._registry.refresh_soon()

    def _send_latencies(self, command: Sequence[Argument]) -> None:
        if self._pipeline is not None:
            self._pipeline.submit(command, self._noted_latencies)

    def _noted_latencies(self, reply: Reply) -> None:
        if isinstance(reply, Exception) and not isinstance(reply, StoreUnavailable):
            self._distrust(f"Redis answered a note of latencies with: {reply}")

    @property
    def round_of_encoders(self) -> tuple[int, dict[str, float]]:
        """What encoders are chosen by while Redis is away: the cursor, and what each is owed."""
        return self._cursor, self._credits

    # --- what decisions show ----------------------------------------------------------------------

    def watch_next(self) -> bool:
        """Whether the request that begins now is one that is decided in sight of whoever watches."""
        if not self.watched:
            return False
        second, count = self._sights
        now_s = int(time.monotonic())
        count = count + 1 if second == now_s else 1
        self._sights = now_s, count
        return count <= WATCHED_A_SECOND

    def _note_tries(self, journey: Journey, tickets: list[Ticket], began_s: float, sight: Sight | None) -> None:
        # For each request where journeys are logged: few calls.
        nodes = self._registry.snapshot.nodes
        for number, ticket in enumerate(tickets):
            url = ticket.url
            stage = STAGES[nodes[url].role] if url in nodes else "request"
            if stage == "decode" and not any(one.stage == "prefill" for one in journey.tries):
                stage = "request"  # nobody prefilled it: the node does all
            elif stage == "encode" and any(one.node == url and one.at_s == began_s for one in journey.tries):
                continue  # another item of the same request
            taken = Try(url, began_s, ticket._since - began_s, stage=stage)
            if sight is not None:
                # One pool for each node; or one for all of them, as items have.
                pool = number if len(sight.pools) == len(tickets) else 0
                taken.candidates, taken.left_off = sight.candidates(pool, url)
            journey.tries += [taken]

    # --- notes ------------------------------------------------------------------------------------

    @property
    def requests_in_window(self) -> int:
        """This worker's of the last seconds."""
        now_s = int(time.monotonic())
        while self._requests and self._requests[0][0] <= now_s - WINDOW_S:
            self._requests.popleft()
        return sum(count for _, count in self._requests)

    def _count_request(self) -> None:
        now_s = int(time.monotonic())
        if self._requests and self._requests[-1][0] == now_s:
            self._requests[-1] = now_s, self._requests[-1][1] + 1
        else:
            self._requests.append((now_s, 1))
            while self._requests[0][0] <= now_s - WINDOW_S:
                self._requests.popleft()
        self._not_noted += 1

    def _note_requests(self) -> None:
        # Less than all where Redis was away for longer than the window.
        count, self._not_noted = min(self._not_noted, self.requests_in_window), 0
        if count:
            script = self._scripts["note_requests"]
            # EVAL: once a second is too seldom to depend on a cache.
            self.note("EVAL", script.text, *script.evalsha((self._keys.requests,), (count, WINDOW_S))[2:])
        self.dispatched.roll()
        if self._pipeline is not None:
            pipeline = self._pipeline
            self.dispatched.note(lambda command: pipeline.submit(command, _ignore))
            pipeline.submit(("EXISTS", self._keys.watched), self._heard_of_watchers)

    def _heard_of_watchers(self, reply: Reply) -> None:
        self.watched = reply == 1
        if self.watched:
            for tell in self.on_watched:
                tell()

    def note(self, *command: Argument) -> None:
        """Send a command that nobody waits for, behind all that was sent before; lost while Redis is away."""
        if self._pipeline is not None:
            self._pipeline.submit(command, _ignore)

    # --- restate ----------------------------------------------------------------------------------

    def _restate_command(self, *, was_member: bool = True) -> Sequence[str | bytes | int]:
        # EVAL, not EVALSHA: this is the step that mends things, so it must not depend on a cache.
        keys, script = self._keys, self._scripts["restate"]
        counting = [keys.unfinished, keys.ledger(self.worker), keys.sessions, keys.workers, keys.version]
        names = [*counting, keys.load_index, keys.restating]
        within_ms = round(RESTATED_WITHIN_S * 1000) if was_member else 0
        entries = [part for item in self.counts.items() for part in item]
        command = script.evalsha(names, (self.worker, self._generation, self._lease_ms, within_ms, *entries))
        return ("EVAL", script.text, *command[2:])

    def _restate_soon(self) -> None:
        """Restate as soon as no acquire is in flight; acquires that come meanwhile wait for that."""
        self._restate_due = True
        if self._restated is None:
            self._restated = asyncio.get_running_loop().create_future()
        self._restate_if_due()

    def _restate_if_due(self) -> None:
        if not self._restate_due or (self._acquiring and self._pipeline is not None):
            return
        self._restate_due = False
        restated, self._restated = self._restated, None
        if self._pipeline is not None:
            self._pipeline.submit(self._restate_command(), self._after_restate)
        if restated is not None and not restated.done():
            # Sent is enough: whatever an acquire sends now runs after it.
            restated.set_result(None)

    def _after_restate(self, reply: Reply) -> None:
        if isinstance(reply, StoreUnavailable):
            return
        if isinstance(reply, Exception) or reply[0] != Code.DONE:
            self._drop(f"Redis did not take the counts: {reply}")
            return
        if not reply[2] or reply[1] != self._registry.snapshot.version:
            # Unknown again in mid-session: Redis lost its data. The registry looks at once.
            self._registry.refresh_soon()
            if not reply[2]:
                self._lost_at_s = time.monotonic()
                self._tell_again()
        self._heard_of_workers(reply[3])

    def _heard_of_workers(self, count: int) -> None:
        # Those that Redis has lost come back to it one by one: until then it says too few.
        if count > self.workers or self.counts_are_whole:
            self.workers = max(count, self._workers_of_host)

    def _tell_again(self) -> None:
        for tell in self.on_told_again:
            tell()

    def _distrust(self, reason: str) -> None:
        """An error reply: nobody knows what ran. READONLY and LOADING need another connection."""
        if "NOSCRIPT" in reason and self._pipeline is not None:
            for script in self._told_scripts:
                self._pipeline.submit(("SCRIPT", "LOAD", script.text), _ignore)
            self._restate_soon()
        else:
            self._drop(reason)

    # --- the connection ---------------------------------------------------------------------------

    def _drop(self, reason: str) -> None:
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is not None:
            self._went_local(reason)
            pipeline.close()

    def _on_lost(self, pipeline: Pipeline, reason: StoreUnavailable) -> None:
        if self._pipeline is pipeline:
            self._pipeline = None
            self._went_local(reason.message)

    def _went_local(self, reason: str) -> None:
        log.warning("decisions are local now: %s", reason)
        self._told.add(_kind(reason))
        self._trouble = reason
        self.watched = False
        self._lost.set()
        self._restate_due = False
        restated, self._restated = self._restated, None
        if restated is not None and not restated.done():
            restated.set_result(None)

    async def _join(self) -> None:
        """One attempt: connect, load the hot scripts, restate; then decisions are shared again."""
        holder: list[Pipeline] = []

        def lost(reason: StoreUnavailable) -> None:
            if holder:
                self._on_lost(holder[0], reason)

        address = await self._locator.locate()
        pipeline = await Pipeline.open(address, timeout_s=self._timeout_s, on_lost=lost)
        holder.append(pipeline)
        try:
            for script in dict.fromkeys((*self._asking_scripts, *self._told_scripts)):
                await pipeline.call(("SCRIPT", "LOAD", script.text))
            # Wall-clock ms, so that a worker restarted under the same id is never behind itself.
            first = not self._generation
            self._speak_as(max(self._generation + 1, time.time_ns() // 1_000_000))
            # What brought us here may be a key that somebody wrote over: then the restate could fail as well.
            with contextlib.suppress(StoreUnavailable):
                await self._registry.heal()
            if self._registry.foreign:
                raise StoreUnavailable(self._registry.foreign)
            changes = self._changes
            reply = await pipeline.call(self._restate_command(was_member=not first))
            if reply[0] != Code.DONE:
                # This one is the newest: the number is somebody's edit, or of a clock that was ahead. Go beyond it.
                self._speak_as(reply[2])
                raise StoreUnavailable("a newer connection of this worker has spoken")
            if pipeline.lost is not None:
                raise pipeline.lost
        except BaseException as e:
            pipeline.close()
            self._trouble = e.message if isinstance(e, StoreUnavailable) else self._trouble
            raise
        # From here to the end of the turn nothing else runs: what changed while the restate was
        # under way is stated again before any acquire can follow it.
        self._pipeline, self._trouble = pipeline, None
        self._shunned.clear()
        quiet = first and not self._told
        self._told.clear()
        self._lost.clear()
        if changes != self._changes:
            self._restate_soon()
        self._registry.refresh_soon()
        if not first:
            self._lost_at_s = time.monotonic()
        self._heard_of_workers(reply[3])
        self._tell_again()
        # As loud as the line that said it was over.
        log.log(logging.INFO if quiet else logging.WARNING, "decisions are shared: joined as %s", self.worker)

    def _speak_as(self, generation: int) -> None:
        self._generation = generation
        self._packed_generation = packed(generation)
        self._calls.clear()
        self._releases.clear()
        self._learned.clear()

    async def _try_to_join(self) -> None:
        try:
            await self._join()
        except StoreUnavailable as e:
            self._trouble = e.message
            # Each reason once: a wrong password must be found in the log, not a line a second.
            if _kind(e.message) not in self._told and len(self._told) < REASONS_TOLD:
                self._told.add(_kind(e.message))
                log.warning("decisions are local, Redis can't be joined: %s", e.message)

    async def _keep(self) -> None:
        """Renew the lease each second; join again, with growing pauses, when the connection is gone."""
        pause_s = 0.0
        task = asyncio.current_task()
        assert task is not None
        # Not `while True`: what the registry's client swallows of a cancellation (see `Registry._listen`).
        while not task.cancelling():
            if self._pipeline is None:
                self.dispatched.roll()
                await asyncio.sleep(pause_s)
                pause_s = min(max(2 * pause_s, BACKOFF_S[0]), BACKOFF_S[1])
                await self._try_to_join()
                continue
            self._restate_soon()
            self._note_requests()
            try:
                async with asyncio.timeout(RENEW_S):
                    await self._lost.wait()
            except TimeoutError:
                # Only a connection that has held ends the pauses: a full Redis lets a worker join and then
                # refuses its first acquire, which would else be one connection a request.
                pause_s = 0.0
