"""`GET /metrics`: the figures of this host's workers and the deployment's shared state, as Prometheus reads them.

The same whichever worker answers: workers' figures come from their files, shared ones from Redis. It never fails or
waits because Redis is away: then what is shared is left out, and `evenhand_redis_up` says why.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from starlette.requests import Request
from starlette.responses import Response

from app.errors import StoreUnavailable
from app.metrics import families
from app.metrics.families import Family
from app.metrics.files import SETTLED_S
from app.nodes import Breaker, State
from app.store.overview import Overview


class Metrics:
    """The endpoint.

    Args:
        host: the merged figures of this host's workers; called in a thread.
        shared: what Redis has; raises StoreUnavailable. None: nothing is shared.
        within_s: how long Redis may take.
        settled_s: after so long every worker has told what ended before.
    """

    def __init__(
        self,
        host: Callable[[], Iterable[Metric]] = lambda: (),
        shared: Callable[[], Awaitable[Overview]] | None = None,
        *,
        within_s: float = 0.5,
        settled_s: float = SETTLED_S,
    ) -> None:
        self._host = host
        self._shared = shared
        self._within_s = within_s
        self._settled_s = settled_s

    async def page(self, request: Request) -> Response:
        overview, _ = await asyncio.gather(self._overview(), asyncio.sleep(self._settled_s))
        text = await asyncio.to_thread(self._text, overview)
        return Response(text, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    async def _overview(self) -> Overview | None:
        try:
            async with asyncio.timeout(self._within_s):
                return None if self._shared is None else await self._shared()
        except (StoreUnavailable, TimeoutError):
            return None

    def _text(self, overview: Overview | None) -> bytes:
        metrics = sorted(self._host(), key=lambda metric: metric.name)
        if overview is not None:
            metrics += shared_metrics(overview)
        return generate_latest(_Collected(metrics))


class _Collected:
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def shared_metrics(overview: Overview) -> list[Metric]:
    """The families that are `shared`."""
    made: dict[Family, Metric] = {}

    def add(family: Family, value: float, *labels: str) -> None:
        metric = made.get(family)
        if metric is None:
            metric = made[family] = Metric(family.stem, family.help, family.kind.value)
        # Somebody may have written to Redis what is no text.
        texts = [label.encode("utf-8", "replace").decode() for label in labels]
        metric.add_sample(family.name, dict(zip(family.labels, texts, strict=True)), value)

    add(families.WORKERS, len(overview.workers))
    add(families.CURSOR, overview.encoder_cursor)
    add(families.VERSION, overview.version)
    add(families.HELD_SESSIONS, overview.held_sessions)
    for state, count in Counter(overview.links.values()).items():
        add(families.LINKS, count, state)
    for what, count in overview.handovers.items():
        add(families.HANDOVERS, count, what)
    for url, node in overview.nodes.items():
        add(families.NODE_INFO, 1, url, node.role.name)
        add(families.NODE_UNFINISHED, overview.unfinished.get(url, 0), url)
        add(families.NODE_MODELS, len(node.models), url)
        if node.speed is not None:
            add(families.NODE_SPEED, node.speed, url)
        for one in State:
            add(families.NODE_STATE, node.state is one, url, one.value)
        for breaker in Breaker:
            add(families.NODE_BREAKER, node.breaker is breaker, url, breaker.value)
    return list(made.values())
