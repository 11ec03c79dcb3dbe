"""Breakers: what the outcome of a call says of the node, told to all workers.

A node that fails several requests in a row gets no traffic for a while, then one request of the whole
deployment as a trial. Owns what counts as a failure and who makes the trial; the states are in the registry.
Telling costs the request nothing: it happens in the background. While Redis is away nobody can be told: then each
worker counts for itself, and its ledger passes the node over for as long as a breaker would be open.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any

from app.dispatch.retries import AT_ANOTHER
from app.errors import EngineBroke, EngineTimeout, EngineUnreachable, StoreUnavailable, UpstreamError
from app.metrics.families import FAILURES
from app.metrics.figures import Figures
from app.nodes import Breaker, Role
from app.store.ledger import Ledger, Select
from app.store.registry import BreakerRules, Registry

log = logging.getLogger("evenhand.dispatch")

TRIAL_S = 30.0
"""After that a trial that told nothing (its worker died, its client left) may be made again."""
AT_ONCE = 64
"""Failures that are being told; more at the same time say nothing new."""


FAILED = AT_ANOTHER | {500}
"""Statuses by which a node says that it can't serve. Nothing is so idle as an engine that says so at once: it would
draw most of the traffic. Source: Envoy's consecutive_5xx, less what says that a request can't be served (501, 505)."""


def speaks_against(outcome: UpstreamError | int) -> bool:
    """Whether a call's error, or the status of an answer, is a failure of the node: of its connection, its silence
    before the first byte, or its own word for it. What an answer says of the request (4xx, 429) never is.
    """
    if isinstance(outcome, int):
        return outcome in FAILED
    if isinstance(outcome, EngineTimeout):
        return outcome.stage in ("connect", "first_byte")
    return isinstance(outcome, EngineUnreachable | EngineBroke)


class Breakers:
    """One per worker."""

    def __init__(
        self, *, registry: Registry, ledger: Ledger, rules: BreakerRules, figures: Figures | None = None
    ) -> None:
        self._registry = registry
        self._ledger = ledger
        self._rules = rules
        self._figures = figures or Figures()
        self._telling: set[asyncio.Task[None]] = set()
        self._closing: set[str] = set()
        self._untold: dict[str, int] = {}  # url -> failures in a row here, while Redis is away
        ledger.on_told_again.append(self._untold.clear)

    def __repr__(self) -> str:
        return f"<Breakers broken={len(self._registry.snapshot.broken)} telling={len(self._telling)}>"

    def failed(self, url: str, outcome: UpstreamError | int) -> None:
        node = self._registry.snapshot.nodes.get(url)
        if node is None or not speaks_against(outcome):
            return
        self._figures.count(FAILURES, url)
        if node.breaker == Breaker.OPEN:
            return
        if self._ledger.trouble is not None:
            self._count_here(url)
        elif len(self._telling) < AT_ONCE:
            self._tell(self._registry.record_failure(url, self._rules))

    def answered(self, url: str) -> None:
        """The node answered what does not speak against it."""
        if self._untold:
            self._untold.pop(url, None)
        if url in self._registry.snapshot.broken and url not in self._closing:
            self._closing.add(url)
            self._tell(self._close(url))

    def left(self, url: str) -> None:
        """A request left the node before it answered: if it was the trial, another may make it."""
        node = self._registry.snapshot.nodes.get(url)
        if node is not None and node.breaker == Breaker.HALF_OPEN:
            self._tell(self._registry.move_breaker(url, "leave trial"))

    async def select(self, otherwise: Select, model: str, *roles: Role) -> Select:
        """Whom a request is to be counted on: a node on trial, if it is this request that makes it."""
        if not self._registry.snapshot.broken or self._ledger.trouble is not None:
            return otherwise
        url = await self._trial(model, *roles)
        if url is None:
            return otherwise
        return lambda snapshot: snapshot.only(url) if url in snapshot.nodes else otherwise(snapshot)

    async def _trial(self, model: str, *roles: Role) -> str | None:
        for url in self._registry.snapshot.half_open(model, *roles):
            with contextlib.suppress(StoreUnavailable):
                if await self._registry.move_breaker(url, "trial", round(TRIAL_S * 1000)):
                    return url
        return None

    def _count_here(self, url: str) -> None:
        """As record_failure.lua: each failure from the threshold on opens it, for twice as long as the one before."""
        if self._ledger.shuns(url):
            return
        count = self._untold[url] = self._untold.get(url, 0) + 1
        rules = self._rules
        if count >= rules.threshold:
            open_s = min(rules.open_s * 2 ** min(count - rules.threshold, 16), rules.longest_s)
            self._ledger.shun(url, open_s)
            log.warning("node %s: %d failures in a row while Redis is away: passed over for %g s", url, count, open_s)

    async def close(self) -> None:
        """Let what is being told reach Redis."""
        if self._telling:
            await asyncio.wait(self._telling, timeout=1.0)

    async def _close(self, url: str) -> None:
        try:
            await self._registry.move_breaker(url, "close")
        finally:
            self._closing.discard(url)

    def _tell(self, work: Coroutine[Any, Any, object]) -> None:
        async def quietly() -> None:
            with contextlib.suppress(StoreUnavailable):
                await work

        task = asyncio.create_task(quietly(), name="breaker")
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)
