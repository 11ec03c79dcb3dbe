"""One worker's store objects, as the tests use them: a registry and a ledger on a private Redis.

The objects are the real ones; what stands here only wires them as `app.main` does.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Self

from app.journey import Journey, Try
from app.metrics.figures import Figures, Served
from app.nodes import Role, State
from app.store.budget import RetryBudget
from app.store.decisions import Decisions
from app.store.handing import Handing
from app.store.handovers import Handovers
from app.store.keys import Keys
from app.store.last_known import LastKnown
from app.store.ledger import Ledger, Ticket
from app.store.links import LinkTable
from app.store.locator import Locator
from app.store.migrations import Migrations, Session
from app.store.registry import BreakerRules, Registry
from app.store.scripts import load_scripts
from app.store.snapshot import Pool, Snapshot
from app.store.view import Arrangement, View
from tests.support.quiet import counts
from tests.support.redis import Space
from tests.support.wait import aeventually

SCRIPTS = load_scripts()
MODEL = "m"


def of(model: str = MODEL) -> Callable[[Snapshot], Pool]:
    """What a use case gives to `acquire`: the candidates for one model."""
    return lambda snapshot: snapshot.pool(model, Role.Hybrid)


class Worker:
    """Registry and ledger of one worker; an async context manager. `url` may lead over a proxy."""

    def __init__(
        self,
        url: str,
        namespace: str,
        name: str,
        *,
        strategy: str = "min_expected_latency",
        strategies: dict[str, str] | None = None,
        encoder_policy: str = "round_robin",
        on_host: int = 1,
        lease_s: float = 8.0,
        timeout_s: float = 5.0,
        seed: int = 1,
        last_known: LastKnown | None = None,
    ) -> None:
        self.name = name
        self.keys = Keys(namespace)
        self.counted = Figures()
        locator = Locator.of(url, keys=self.keys, timeout_s=timeout_s)
        self.registry = Registry(
            locator=locator,
            keys=self.keys,
            scripts=SCRIPTS,
            worker=name,
            timeout_s=timeout_s,
            last_known=last_known,
            figures=self.counted,
        )
        self.ledger = Ledger(
            locator=locator,
            keys=self.keys,
            scripts=SCRIPTS,
            registry=self.registry,
            worker=name,
            strategy=strategy,
            strategies=strategies,
            encoder_policy=encoder_policy,
            workers=on_host,
            lease_s=lease_s,
            timeout_s=timeout_s,
            draws=random.Random(seed),
            figures=self.counted,
        )
        shared = {"registry": self.registry, "keys": self.keys}
        self.budget = RetryBudget(ledger=self.ledger, **shared)  # type: ignore[arg-type]
        self.figures = Handovers(ledger=self.ledger, figures=self.counted, **shared)  # type: ignore[arg-type]
        arrangement = Arrangement(
            strategy,
            encoder_policy,
            "Hybrid",
            strategies=json.dumps(strategies) if strategies else "",
            grace_s=120.0,
        )
        self.view = View(arrangement=arrangement, ledger=self.ledger, **shared)  # type: ignore[arg-type]
        self.decisions = Decisions(ledger=self.ledger, keys=self.keys)
        self.handing = Handing(ledger=self.ledger, keys=self.keys, worker=name)
        self.links = LinkTable(ledger=self.ledger, worker=name, **shared)  # type: ignore[arg-type]
        self.migrations = Migrations(ledger=self.ledger, scripts=SCRIPTS, worker=name, **shared)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"<Worker {self.name} {self.ledger!r} {self.registry!r}>"

    async def __aenter__(self) -> Self:
        await self.registry.start()
        await self.ledger.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.ledger.close()
        await self.registry.close()

    @property
    def shared(self) -> bool:
        return self.ledger.trouble is None

    async def take(self, count: int = 1, model: str = MODEL) -> list[Ticket]:
        """`count` requests counted at once."""
        return list(await asyncio.gather(*(self.ledger.acquire(of(model)) for _ in range(count))))

    async def take_nothing(self) -> None:
        """Return once Redis has got all that was sent before."""
        await self.registry.redis.ping()
        pipeline = self.ledger._pipeline
        if pipeline is not None:
            await pipeline.call(("PING",))

    async def leave_traces(self, prefill: str, decode: str) -> None:
        """What split serving, retries and breakers write, of each kind something."""
        await self.links.claim(f"{prefill}|{decode}", "1|2", self.registry.snapshot.version, wait_s=60)
        self.migrations.hold(Session(prefill, 7, 1, decode))
        self.handing.begin(prefill, decode)
        self.figures.count("links_made")
        self.figures.took(prefill, "prefill", 0.25)
        self.figures.note()
        await self.registry.record_failure(decode, BreakerRules(threshold=100, open_s=10))
        assert await self.budget.take()
        await self.view.watch()
        served = Served("/v1/chat/completions")
        served.journey = Journey([Try(decode, 0.0)], watched=True)
        self.decisions.note([served])
        give_back(await self.take())  # behind the notes on the same connection
        self.ledger.dispatched.roll()
        self.ledger.dispatched.note(lambda command: self.ledger.note(*command))

    async def add_ready(
        self,
        url: str,
        *,
        role: Role = Role.Hybrid,
        speed: float | None = None,
        models: tuple[str, ...] = (MODEL,),
        key: str | None = None,
    ) -> None:
        """Register a node and say that a probe found it ready."""
        await self.registry.add(url, role=role, models=models, speed=speed, key=key)
        assert await self.registry.set_state(self.registry.snapshot.nodes[url], State.READY)


@asynccontextmanager
async def workers(
    space: Space, count: int, *, url: str | None = None, **options: object
) -> AsyncIterator[list[Worker]]:
    """`count` workers of one deployment, named w1, w2, ..., each with draws of its own."""
    async with AsyncExitStack() as stack:
        made = [
            Worker(url or space.url, space.namespace, f"w{i}", seed=i, **options)  # type: ignore[arg-type]
            for i in range(1, count + 1)
        ]
        yield [await stack.enter_async_context(worker) for worker in made]


def give_back(tickets: list[Ticket], *, succeeded: bool = False) -> None:
    while tickets:
        tickets.pop().release(succeeded=succeeded)


def totals(space: Space) -> dict[str, int]:
    """url -> unfinished over all workers; never below 0."""
    return {url: n for url, n in counts(space).get("unfinished", {}).items() if n}


def ledger_of(space: Space, worker: str) -> dict[str, int]:
    return {url: n for url, n in counts(space).get(f"unfinished:{worker}", {}).items() if n}


def held_by(made: list[Worker]) -> dict[str, int]:
    """url -> what the workers' own counts add up to: what Redis must say."""
    held: dict[str, int] = {}
    for worker in made:
        for url, n in worker.ledger.counts.items():
            held[url] = held.get(url, 0) + n
    return held


def exact(space: Space, made: list[Worker]) -> bool:
    """Totals and ledgers in Redis are the workers' own counts, and decisions are shared again."""
    return (
        all(worker.shared for worker in made)
        and totals(space) == held_by(made)
        and all(ledger_of(space, worker.name) == worker.ledger.counts for worker in made)
    )


class Load:
    """Clients that acquire, hold a moment and release, again and again, until the block ends.

    Attributes:
        done: requests that ran.
        longest_s: the longest that an acquire took.
        failures: what acquires raised; must stay empty.
    """

    def __init__(self, made: list[Worker], *, clients: int = 8, seed: int = 5) -> None:
        self.done = 0
        self.longest_s = 0.0
        self.failures: list[BaseException] = []
        self._made = made
        self._clients = clients
        self._draws = random.Random(seed)
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        for i in range(self._clients):
            worker = self._made[i % len(self._made)]
            self._tasks.append(asyncio.create_task(self._run(worker)))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def more(self, requests: int, *, within_s: float = 10.0) -> None:
        """Wait until so many more requests have run."""
        goal = self.done + requests
        await aeventually(lambda: self.done >= goal, within_s=within_s)

    async def _run(self, worker: Worker) -> None:
        while True:
            since_s = time.monotonic()
            try:
                ticket = await worker.ledger.acquire(of())
            except Exception as e:
                self.failures.append(e)
                return
            finally:
                self.longest_s = max(self.longest_s, time.monotonic() - since_s)
            try:
                await asyncio.sleep(self._draws.uniform(0, 0.004))
            finally:
                ticket.release(succeeded=self._draws.random() < 0.8)
                self.done += 1


def registered(space: Space) -> dict[str, dict[str, str]]:
    """url -> fields of every node in Redis; the engine keys among them."""
    keys = space.cli("HGETALL", space.key("engine_keys"))
    found = {url: space.cli("HGETALL", space.key(f"node:{url}")) for url in space.cli("SMEMBERS", space.key("nodes"))}
    return {url: {**fields, "key": keys.get(url, "")} for url, fields in found.items()}
