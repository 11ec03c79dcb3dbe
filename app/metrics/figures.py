"""The figures of one process, as plain numbers: a request costs an `append`, all else is done ten times a second.

Owns what is counted in this worker and under which labels. It must not know files, Redis or HTTP.

Label values are bounded: a model that no node has is "unknown", a route that is none of `ROUTES` "other", and a family
that has as many series as `SERIES_KEPT` says gives further models and nodes the name "other".
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable

from app.journey import Journey
from app.metrics.families import ACQUIRES, DURATION, FAMILIES, ITL, REQUESTS, TTFT, Family, Kind

log = logging.getLogger("evenhand")

ROUTES = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"))
SERIES_KEPT = {Kind.COUNTER: 10_000, Kind.GAUGE: 10_000, Kind.HISTOGRAM: 1_000}
"""Of one family in one process: a fleet of a thousand nodes has room. Nodes and adapters that come and go must not fill
memory, nor the monitoring; a histogram has twenty values a series."""
LABEL_LENGTH = 200
UNBOUNDED = ("model", "node")
"""Labels whose values the deployment's users choose."""

Key = tuple[Family, tuple[str, ...]]


class Served:
    """One request, from its first moment on; whoever serves it notes here what becomes of it.

    `request`: its X-Request-Id. `status`: what its client was told; None: nothing. `bytes_in`, `bytes_out`: of its
    body, and of the engine's that went to the client. `client`: (address, port) of the connection. `reason`: why it
    failed. `key`: the name of the key that it came with, for lines only: labels would be too many.
    """

    __slots__ = (
        "began_s",
        "bytes_in",
        "bytes_out",
        "chunks",
        "client",
        "ended_s",
        "first_s",
        "journey",
        "key",
        "model",
        "node",
        "outcome",
        "path",
        "reason",
        "request",
        "status",
    )

    def __init__(self, path: str) -> None:
        self.path = path
        self.model = ""
        self.node = ""
        self.outcome = ""
        self.reason = ""
        self.key = ""
        self.request = b""
        self.client: tuple[str, int] | None = None
        self.status: int | None = None
        self.journey: Journey | None = None
        self.bytes_in = self.bytes_out = 0
        self.chunks = 0  # of a stream; the first came at `first_s`
        self.first_s = 0.0
        self.began_s = self.ended_s = time.monotonic()

    def end(self, node: str, outcome: str) -> None:
        """`outcome`: unless it is known already."""
        self.node = node
        self.outcome = self.outcome or outcome
        self.ended_s = time.monotonic()


class Distribution:
    """A histogram's numbers. `counts`: by bucket, the last one beyond all bounds."""

    __slots__ = ("counts", "sum")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * (buckets + 1)
        self.sum = 0.0


class Alike:
    """Requests of one moment with the same labels. `labels`: of REQUESTS."""

    __slots__ = ("durations", "labels", "requests")

    def __init__(self, labels: tuple[str, ...], durations: Distribution) -> None:
        self.labels = labels
        self.requests = 0
        self.durations = durations


class Figures:
    """One per worker.

    Args:
        knows: whether a node has the model.
    """

    def __init__(self, knows: Callable[[str], bool] = lambda model: False) -> None:
        self.ended: list[Served] = []
        """Requests that have ended since the last `digest`. Appending is all that a request does here."""
        self.on_ended: list[Callable[[list[Served]], None]] = []
        """Are told of the requests that have ended, many at once, by each `digest`."""
        self.acquires_s: list[float] = []
        """How long Redis took for acquires, a sample; taken away by the next `digest`."""
        self.numbers: dict[Key, float] = {}
        self.distributions: dict[Key, Distribution] = {}
        self.changed: set[Key] = set()
        self._knows = knows
        self._series: dict[Family, int] = {}
        for family in FAMILIES:
            if family.kind is Kind.COUNTER and not family.labels and not family.shared:
                self.count(family, by=0)  # a counter that begins at 0 shows its first step

    def __repr__(self) -> str:
        return f"<Figures series={sum(self._series.values())} ended={len(self.ended)}>"

    def count(self, family: Family, *labels: str, by: float = 1) -> None:
        key = self._key(family, labels)
        self.numbers[key] = self.numbers.get(key, 0.0) + by
        self.changed.add(key)

    def set(self, family: Family, value: float) -> None:
        key = self._key(family, ())
        self.numbers[key] = value
        self.changed.add(key)

    def observe(self, family: Family, seconds: float, *labels: str, times: int = 1) -> None:
        """`times` events that took `seconds` each."""
        found = self._distribution(family, labels)
        found.counts[bisect_left(family.buckets, seconds)] += times
        found.sum += seconds * times

    def digest(self) -> None:
        """Count the requests that have ended: few calls for each, as those of a moment are mostly alike."""
        ended, self.ended = self.ended, []
        kinds: dict[tuple[str, ...], Alike] = {}  # of this moment only: clients choose what is in its keys
        bounds = DURATION.buckets
        for served in ended:
            kind = served.model, served.path, served.outcome, served.node
            found = kinds.get(kind)
            if found is None:
                found = kinds[kind] = self._kind(*kind)
            found.requests += 1
            took_s = served.ended_s - served.began_s
            durations = found.durations
            durations.counts[bisect_left(bounds, took_s)] += 1
            durations.sum += took_s
            if served.chunks:
                self._count_stream(served, found)
        for found in kinds.values():
            self.count(REQUESTS, *found.labels, by=found.requests)
        self._count_acquires()
        if ended:
            for tell in self.on_ended:
                try:
                    tell(ended)
                except Exception:
                    log.exception("what has ended could not be told")

    def _count_acquires(self) -> None:
        took, self.acquires_s = self.acquires_s, []
        if took:
            found = self._distribution(ACQUIRES, ())
            for took_s in took:
                found.counts[bisect_left(ACQUIRES.buckets, took_s)] += 1
            found.sum += sum(took)

    def _count_stream(self, served: Served, found: Alike) -> None:
        model, _, _, node = found.labels
        self.observe(TTFT, served.first_s - served.began_s, model, node)
        gaps = served.chunks - 1
        if gaps:
            self.observe(ITL, (served.ended_s - served.first_s) / gaps, model, node, times=gaps)

    def _kind(self, model: str, path: str, outcome: str, node: str) -> Alike:
        model = text_of(model) if model and self._knows(model) else "unknown"
        path = path.rstrip("/")
        route = path if path in ROUTES else "other"
        return Alike((model, route, outcome, node or "none"), self._distribution(DURATION, (model, route, outcome)))

    def _distribution(self, family: Family, labels: tuple[str, ...]) -> Distribution:
        key = self._key(family, labels)
        found = self.distributions.get(key)
        if found is None:
            found = self.distributions[key] = Distribution(len(family.buckets))
        self.changed.add(key)
        return found

    def _key(self, family: Family, labels: tuple[str, ...]) -> Key:
        key = family, labels
        if key in self.numbers or key in self.distributions:
            return key
        series = self._series.get(family, 0)
        if series >= SERIES_KEPT[family.kind]:
            named = zip(family.labels, labels, strict=True)
            return family, tuple("other" if name in UNBOUNDED else value for name, value in named)
        self._series[family] = series + 1
        return key


def text_of(model: str) -> str:
    """A name as a label: text, and not too long."""
    return model[:LABEL_LENGTH].encode("utf-8", "replace").decode()
