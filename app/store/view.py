"""How a running deployment stands, as one document; and what the next decision would weigh, as another.

Owns both documents (docs/decisions/0022-seeing-it.md) and HASH arrangement, by which workers tell who has only Redis
what they go by. While Redis is away it shows the last known nodes with this worker's own counts. It must not know
HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from app import __version__
from app.balancing import WEIGHS, Candidate, Encoder, Weighing, weigh_encoders
from app.balancing.encoders import ENCODER_POLICIES
from app.errors import ModelNotFound, NoNodeAvailable, StoreUnavailable
from app.nodes import Breaker, Node, Role, State, about_itself
from app.store import decisions
from app.store.clock import redis_ms
from app.store.dispatched import of_last_minute
from app.store.keys import Keys
from app.store.ledger import Ledger
from app.store.locator import Locator
from app.store.overview import ASKED, Overview, ask, told
from app.store.registry import Registry, number, seconds
from app.store.scripts import load_scripts
from app.store.snapshot import Pool, Snapshot, effective_speeds

Json = dict[str, Any]
T = TypeVar("T")

WITHIN_S = 2.0
"""For all that is read: a fleet of a thousand nodes takes some 50 ms."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What the workers go by, from their settings. `serving`: Hybrid or DistServe; `fallback`: a node that does all
    serves where prefill or decode is missing; `dummy_prefill`: decode nodes alone serve."""

    strategy: str
    encoder_policy: str
    serving: str
    fallback: bool = False
    dummy_prefill: bool = False
    strategies: str = ""  # of models that have one of their own: JSON, model -> strategy
    grace_s: float | None = None  # how long a drain waits for running requests, where it is not told
    aliases: str = ""  # other names of models: JSON, alias -> model

    def strategy_of(self, model: str) -> str:
        found = _table(self.strategies).get(model)
        return found if isinstance(found, str) and found in WEIGHS else self.strategy

    def aliases_among(self, snapshot: Snapshot) -> dict[str, str]:
        """Alias -> model, as requests are routed: a model that a node has is itself, whatever the aliases say."""
        return {
            alias: model
            for alias, model in _table(self.aliases).items()
            if isinstance(model, str) and snapshot.knows(model) and not snapshot.knows(alias)
        }


def read_arrangement(fields: Mapping[str, str]) -> Arrangement | None:
    """From HASH arrangement; None where no worker wrote it."""
    strategy, encoder_policy, serving = map(fields.get, ("strategy", "encoder_policy", "serving"))
    if strategy not in WEIGHS or encoder_policy not in ENCODER_POLICIES or serving not in ("Hybrid", "DistServe"):
        return None
    flags = {name: fields.get(name) == "1" for name in ("fallback", "dummy_prefill")}
    grace_s = _floats({"grace_s": fields.get("grace_s", "")}).get("grace_s")
    strategies, aliases = fields.get("strategies", ""), fields.get("aliases", "")
    return Arrangement(
        strategy, encoder_policy, serving, **flags, strategies=strategies, grace_s=grace_s, aliases=aliases
    )


@dataclass(frozen=True, slots=True)
class Counts:
    """What the next decision goes by. `on_trial`: nodes with a half-open breaker whose one trial nobody makes yet."""

    unfinished: Mapping[str, int]
    mean_s: Mapping[str, float]
    explored: Mapping[str, int]
    learned: Mapping[str, float]
    cursor: int
    credit: Mapping[str, float]
    on_trial: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Standing:
    """All that a state is made of. `latency_s`: newest first; `ledgers`: worker -> its own counts."""

    time_s: float
    trouble: str | None
    overview: Overview
    arrangement: Arrangement | None
    latency_s: Mapping[str, Sequence[float]]
    requests: Mapping[str, int]
    failures: Mapping[str, int] = field(default_factory=dict)
    ledgers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    credit: Mapping[str, float] = field(default_factory=dict)


class View:
    """One per worker, or one of `over_redis`.

    Args:
        ledger: this worker's own; None where there is no worker: then nothing is known while Redis is away.
        arrangement: this worker's; None: as Redis has it.
    """

    def __init__(
        self, *, registry: Registry, keys: Keys, ledger: Ledger | None = None, arrangement: Arrangement | None = None
    ) -> None:
        self._registry = registry
        self._keys = keys
        self._ledger = ledger
        self._arrangement = arrangement
        if ledger is not None and arrangement is not None:
            words = [word for name, value in asdict(arrangement).items() for word in (name, _word(value))]
            for when in (ledger.on_told_again, ledger.on_watched):
                when.append(lambda: ledger.note("HSET", keys.arrangement, *words))

    def __repr__(self) -> str:
        return f"<View {self._registry!r} {self._ledger!r}>"

    async def state(self) -> Json:
        """A `state`. Raises StoreUnavailable only where there is no worker."""
        try:
            return state_of(await self._reached(self._read()))
        except StoreUnavailable as e:
            if self._ledger is None:
                raise
            return state_of(self._alone(self._ledger, e.message))

    async def explain(self, model: str) -> Json:
        """An `explain`. Raises ModelNotFound; StoreUnavailable only where there is no worker."""
        try:
            arrangement, counts = await self._reached(self._read_counts())
            trouble = None
        except StoreUnavailable as e:
            if self._ledger is None:
                raise
            arrangement, counts, trouble = self._arrangement, self._own_counts(self._ledger), e.message
        snapshot = self._registry.snapshot
        alias, model = model, (arrangement.aliases_among(snapshot) if arrangement else {}).get(model, model)
        if not snapshot.knows(model):
            raise ModelNotFound(f"The model {model[:200]!r} does not exist.", param="model")
        alone = self._ledger if trouble is not None else None
        shunned = {url for url in snapshot.nodes if alone is not None and alone.shuns(url)}
        return {
            **_of_redis(trouble),
            **explanation(snapshot, model, arrangement, counts, shunned),
            "alias": alias if alias != model else None,
        }

    async def watch(self) -> None:
        """Say that somebody looks: once a second. Raises StoreUnavailable."""
        await self._reached(decisions.watch(self._registry, self._keys))

    async def decisions(self, after: str = "") -> list[Json]:
        """Those behind the entry `after` ("": all), the oldest first. Raises StoreUnavailable."""
        return await self._reached(decisions.since(self._registry, self._keys, after))

    # --- reading ----------------------------------------------------------------------------------

    async def _reached(self, read: Coroutine[Any, Any, T]) -> T:
        """What `read` finds; StoreUnavailable at once where the worker knows that Redis is away."""
        if self._ledger is not None and self._ledger.trouble is not None:
            read.close()
            raise StoreUnavailable(self._ledger.trouble)
        try:
            async with asyncio.timeout(WITHIN_S):
                return await read
        except TimeoutError as e:
            raise StoreUnavailable(f"Redis did not answer within {WITHIN_S:g} s") from e

    async def _catch_up(self) -> None:
        """See the registry as it is now; it is read only where it has changed, as a fleet may be large."""
        registry, key = self._registry, self._keys.version
        (found,) = await registry.guarded(lambda: registry.redis.mget([key]))
        version = number(str(found))
        if self._ledger is None and version < registry.snapshot.version:
            registry.snapshot = Snapshot()  # who only looks writes nothing back
        if not version or version != registry.snapshot.version:
            await registry.refresh()

    async def _read(self) -> Standing:
        registry, keys = self._registry, self._keys
        await self._catch_up()

        async def read() -> Standing:
            snapshot = registry.snapshot
            async with registry.redis.pipeline(transaction=False) as pipe:
                pipe.zrange(keys.workers, 0, -1)
                pipe.hgetall(keys.failures)
                pipe.hgetall(keys.dispatched)
                pipe.hgetall(keys.encoder_credit)
                pipe.hgetall(keys.arrangement)
                for url in snapshot.nodes:
                    pipe.lrange(keys.latency(url), 0, -1)
                workers, failures, dispatched, credit, arrangement, *windows = await pipe.execute()
            # Totals, ledgers and leases of one moment: they add up, and no lease is longer than it can be.
            async with registry.redis.pipeline(transaction=True) as pipe:
                ask(pipe, keys)
                pipe.time()
                for worker in workers:
                    pipe.hgetall(keys.ledger(worker))
                found = await pipe.execute()
            now = found[ASKED]
            now_s = now[0] + now[1] / 1e6
            return Standing(
                now_s,
                None,
                told(found[:ASKED], snapshot),
                self._arrangement or read_arrangement(arrangement),
                {url: seconds(window) for url, window in zip(snapshot.nodes, windows, strict=True)},
                of_last_minute(dispatched, now_s),
                {url: number(count) for url, count in failures.items()},
                {worker: _counts(counts) for worker, counts in zip(workers, found[ASKED + 1 :], strict=True)},
                _floats(credit),
            )

        return await registry.guarded(read)

    async def _read_counts(self) -> tuple[Arrangement | None, Counts]:
        registry, keys = self._registry, self._keys
        await self._catch_up()

        async def read() -> tuple[Arrangement | None, Counts]:
            half_open = [url for url, node in registry.snapshot.nodes.items() if node.breaker is Breaker.HALF_OPEN]
            async with registry.redis.pipeline(transaction=True) as pipe:
                pipe.hgetall(keys.unfinished)
                pipe.hgetall(keys.latency_mean)
                pipe.hgetall(keys.explored)
                pipe.hgetall(keys.learned)
                pipe.get(keys.encoder_cursor)
                pipe.hgetall(keys.encoder_credit)
                pipe.hgetall(keys.arrangement)
                pipe.time()
                for url in half_open:
                    pipe.hget(keys.node(url), "trial_until_ms")
                (unfinished, means, explored, learned, cursor, credit, arrangement, now, *trials) = await pipe.execute()
            counts = Counts(
                _counts(unfinished),
                _floats(means),
                _counts(explored),
                _floats(learned),
                number(cursor),
                _floats(credit),
                [url for url, until_ms in zip(half_open, trials, strict=True) if number(until_ms) <= redis_ms(now)],
            )
            return self._arrangement or read_arrangement(arrangement), counts

        return await registry.guarded(read)

    # --- while Redis is away ----------------------------------------------------------------------

    def _own_counts(self, ledger: Ledger) -> Counts:
        found = {url: ledger.latencies.mean_s(url) for url in self._registry.snapshot.nodes}
        means = {url: mean_s for url, mean_s in found.items() if mean_s is not None}
        cursor, credit = ledger.round_of_encoders
        learned = {url: speed for url in found if (speed := ledger.learned(url)) is not None}
        return Counts(ledger.counts, means, {}, learned, cursor, credit)

    def _alone(self, ledger: Ledger, trouble: str) -> Standing:
        snapshot = self._registry.snapshot
        cursor, credit = ledger.round_of_encoders
        ledger.dispatched.roll()
        return Standing(
            time.time(),
            trouble,
            Overview(
                version=snapshot.version,
                nodes=dict(snapshot.nodes),
                unfinished=dict(ledger.counts),
                workers={ledger.worker: 0},
                encoder_cursor=cursor,
                links={},
                held_sessions=0,
                handovers={},
            ),
            self._arrangement,
            {url: ledger.latencies.newest_first(url) for url in snapshot.nodes},
            ledger.dispatched.of_last_minute(),
            ledgers={ledger.worker: dict(ledger.counts)},
            credit=credit,
        )


# --- state ----------------------------------------------------------------------------------------


def state_of(standing: Standing) -> Json:
    overview, arrangement = standing.overview, standing.arrangement
    nodes = overview.nodes
    snapshot = Snapshot(overview.version, nodes)
    of_role: Counter[Role] = Counter()
    for url, node in nodes.items():
        of_role[node.role] += standing.requests.get(url, 0)
    return {
        "time": standing.time_s,
        "version": __version__,
        "strategy": arrangement and arrangement.strategy,
        "encoder_policy": arrangement and arrangement.encoder_policy,
        "serving": arrangement and arrangement.serving,
        "grace_s": arrangement and arrangement.grace_s,
        **_of_redis(standing.trouble),
        "registry_version": overview.version,
        "models": snapshot.models(),
        "aliases": arrangement.aliases_among(snapshot) if arrangement else {},
        "nodes": [_node(node, standing, of_role[node.role]) for node in nodes.values()],
        "workers": [_worker(worker, ends_ms, standing) for worker, ends_ms in sorted(overview.workers.items())],
        "encoders": _encoders(standing),
        "links": [
            {"prefill": prefill, "decode": decode, "state": state}
            for (prefill, decode), state in overview.links.items()
        ],
        "sessions": overview.held_sessions,
        "handovers": overview.handovers,
    }


def _of_redis(trouble: str | None) -> Json:
    return {"redis": {"up": trouble is None, "reason": trouble}}


def _node(node: Node, standing: Standing, of_its_role: int) -> Json:
    requests = standing.requests.get(node.url, 0)
    return {
        "url": node.url,
        "role": node.role.name,
        "state": node.state.value,
        "reason": about_itself(node.reason, node.url),
        "breaker": node.breaker.value,
        "models": list(node.models),
        "speed": node.speed,
        "unfinished": standing.overview.unfinished.get(node.url, 0),
        "failures": standing.failures.get(node.url, 0),
        "latency_s": list(reversed(standing.latency_s.get(node.url, ()))),
        "requests": requests,
        "share": requests / of_its_role if of_its_role else 0.0,
        "source": node.source or None,
    }


def _worker(worker: str, ends_ms: int, standing: Standing) -> Json:
    counts = standing.ledgers.get(worker, {})
    return {
        "id": worker,
        "lease_s": max(0.0, round(ends_ms / 1000 - standing.time_s, 3)),
        "unfinished": sum(counts.values()),
        "nodes": {url: count for url, count in counts.items() if count},
    }


def _encoders(standing: Standing) -> Json:
    nodes = [
        node
        for node in standing.overview.nodes.values()
        if node.role is Role.Encode and node.state is State.READY and node.breaker is Breaker.CLOSED
    ]
    urls = [node.url for node in nodes]
    cursor = standing.overview.encoder_cursor
    # Each model's items go round among the encoders that have it: whose turn it is may depend on the model.
    following = set()
    if standing.arrangement is not None:
        models = {model for node in nodes for model in node.models}
        for places in {tuple(i for i, node in enumerate(nodes) if model in node.models) for model in models}:
            having = [nodes[i] for i in places]
            weighing = _weigh_encoders(
                standing.arrangement,
                [node.url for node in having],
                effective_speeds(having),
                standing.overview.unfinished,
                standing.credit,
                cursor,
            )
            following.add(having[weighing.chances.index(1.0)].url)
    return {"cursor": cursor, "next": following.pop() if len(following) == 1 else None, "urls": urls}


# --- explain --------------------------------------------------------------------------------------


def explanation(
    snapshot: Snapshot, model: str, arrangement: Arrangement | None, counts: Counts, shunned: set[str]
) -> Json:
    rule, choices = "", []
    if arrangement is not None:
        rule = WEIGHS[arrangement.strategy_of(model)]([Candidate(1.0, 0)]).rule
    for roles in _roles(snapshot, model, arrangement):
        pool = _pool(snapshot, model, roles)
        if pool is not None and shunned.intersection(pool.urls):
            pool = snapshot.without(pool, shunned) or pool
        weighing = _weigh(arrangement, pool, counts, roles) if pool is not None else None
        # The breakers' own choice, before the strategy's; no encoder is tried so.
        half_open = snapshot.half_open(model, *roles) if roles != (Role.Encode,) else []
        trials = [url for url in half_open if url in counts.on_trial]
        if trials and rule:
            rule += f"; before it, one request as a trial of {' or '.join(trials)}, whose breaker is half open"
        if roles == (Role.Encode,) and weighing is not None:
            rule += f"; media: {weighing.rule}" if weighing.rule else ""
        choices.append(
            {
                "roles": [role.name for role in roles],
                "candidates": _candidates(snapshot, pool, weighing, counts, trials),
                "passed_over": [
                    {"node": node.url, "why": _why_not(node, model, node.url in shunned)}
                    for node in snapshot.nodes.values()
                    if node.role in roles and (pool is None or node.url not in pool.urls) and node.url not in trials
                ],
            }
        )
    strategy = arrangement and arrangement.strategy_of(model)
    return {"model": model, "strategy": strategy, "rule": rule, "choices": choices}


def _roles(snapshot: Snapshot, model: str, arrangement: Arrangement | None) -> list[tuple[Role, ...]]:
    """Whom a request for the model is given to, one after the other."""
    there = {node.role for node in snapshot.nodes.values()}
    split = Role.Prefill in there if arrangement is None else arrangement.serving == "DistServe"
    choices: list[tuple[Role, ...]] = [(Role.Hybrid, Role.Decode)]
    if split:
        choices = [(Role.Prefill,), (Role.Decode,)]
        if arrangement is not None and arrangement.dummy_prefill:
            choices = [(Role.Decode,)]
        elif arrangement is not None and arrangement.fallback and None in [_pool(snapshot, model, c) for c in choices]:
            choices = [(Role.Decode, Role.Hybrid)]
    # Media goes first, and not every request has some.
    return [(Role.Encode,), *choices] if Role.Encode in there else choices


def _pool(snapshot: Snapshot, model: str, roles: tuple[Role, ...]) -> Pool | None:
    try:
        return snapshot.pool(model, *roles)
    except (ModelNotFound, NoNodeAvailable):
        return None


def _weigh(arrangement: Arrangement | None, pool: Pool, counts: Counts, roles: tuple[Role, ...]) -> Weighing:
    if arrangement is None:
        return Weighing([None] * len(pool.urls), [0.0] * len(pool.urls), "")
    if roles == (Role.Encode,):
        return _weigh_encoders(arrangement, pool.urls, pool.speeds, counts.unfinished, counts.credit, counts.cursor)
    return WEIGHS[arrangement.strategy_of(pool.model)](
        [
            Candidate(
                speed,
                counts.unfinished.get(url, 0),
                counts.mean_s.get(url),
                counts.explored.get(url, 0),
                counts.learned.get(url),
            )
            for url, speed in zip(pool.urls, pool.speeds, strict=True)
        ]
    )


def _weigh_encoders(
    arrangement: Arrangement,
    urls: Sequence[str],
    speeds: Sequence[float],
    unfinished: Mapping[str, int],
    credit: Mapping[str, float],
    cursor: int,
) -> Weighing:
    encoders = [
        Encoder(speed, unfinished.get(url, 0), credit.get(url, 0.0)) for url, speed in zip(urls, speeds, strict=True)
    ]
    return weigh_encoders(arrangement.encoder_policy, encoders, cursor)


def _candidates(
    snapshot: Snapshot, pool: Pool | None, weighing: Weighing | None, counts: Counts, trials: Sequence[str]
) -> list[Json]:
    """`trials`: nodes that get the request before all others, one of them."""
    if pool is None or weighing is None:
        return []
    weighed = list(zip(pool.urls, pool.speeds, weighing.scores, weighing.chances, strict=True))
    if trials:
        rest = [(url, speed, score, 0.0) for url, speed, score, _ in weighed if url not in trials]
        weighed = [(url, snapshot.only(url).speeds[0], None, 1 / len(trials)) for url in trials] + rest
    return [
        {
            "node": url,
            "role": snapshot.nodes[url].role.name,
            "score": score if score is None or math.isfinite(score) else None,
            "chance": chance,
            "unfinished": counts.unfinished.get(url, 0),
            "speed": speed,
            "given_speed": snapshot.nodes[url].speed,
            "mean_latency_s": counts.mean_s.get(url),
        }
        for url, speed, score, chance in weighed
    ]


def _why_not(node: Node, model: str, shunned: bool) -> str:
    if model not in node.models:
        return "it does not have the model"
    if node.state is not State.READY:
        return f"it is {node.state.value}" + (f": {reason}" if (reason := about_itself(node.reason, node.url)) else "")
    if node.breaker is Breaker.HALF_OPEN:
        return "its breaker is half open: it gets nothing but one request as a trial"
    if node.breaker is Breaker.OPEN:
        return "its breaker is open: too many requests failed there in a row"
    return "too many requests of this worker failed there while Redis is away" if shunned else "others come first"


# --- without a worker -----------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def over_redis(redis_url: str, namespace: str, *, timeout_s: float = 1.0) -> AsyncIterator[View]:
    """A view for who has only Redis. Entering does not talk to it. Raises ConfigurationError."""
    keys = Keys(namespace)
    locator = Locator.of(redis_url, keys=keys, timeout_s=timeout_s)
    registry = Registry(locator=locator, keys=keys, scripts=load_scripts(), worker="view", timeout_s=timeout_s)
    try:
        yield View(registry=registry, keys=keys)
    finally:
        await registry.close()


async def view_over_redis(redis_url: str, namespace: str) -> Json:
    async with over_redis(redis_url, namespace) as view:
        return await view.state()


async def explain_over_redis(redis_url: str, namespace: str, model: str) -> Json:
    async with over_redis(redis_url, namespace) as view:
        return await view.explain(model)


# --- values ---------------------------------------------------------------------------------------


def _word(value: str | float | None) -> str:
    return value if isinstance(value, str) else "" if value is None else f"{value:g}"


def _table(text: str) -> Json:
    try:
        found = json.loads(text or "{}")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {}


def _counts(found: Mapping[str, str]) -> dict[str, int]:
    return {url: number(count) for url, count in found.items()}


def _floats(found: Mapping[str, str]) -> dict[str, float]:
    """What is no finite number is left out."""
    numbers = {}
    for url, text in found.items():
        with contextlib.suppress(ValueError):
            if math.isfinite(value := float(text)):
                numbers[url] = value
    return numbers
