"""From samples to figures: what is compared with what, medians and ratios. No I/O.

Whatever is compared is of the same round, so that a machine that is slow for a while is slow for both; a ratio's
median is the median of the rounds' ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

LIMIT = 0.85  # of a core: from there on the load generator, or the engines, decide, and not the router
Measured = Mapping[str, Any]  # of load.Measured


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest rank: a value that was measured, with at least that share at or below it."""
    rank = max(-(-len(values) * share // 1), 1)
    return sorted(values)[int(rank) - 1]


class Spread(NamedTuple):
    least: float
    median: float
    most: float


def spread(values: Iterable[float | None]) -> Spread | None:
    """Of those that are there."""
    there = [value for value in values if value is not None]
    return Spread(min(there), statistics.median(there), max(there)) if there else None


# --- what is read from one measurement


@dataclass(frozen=True)
class Metric:
    """`of(measured, direct)`: None where it can't be told. `less`: whether less is better."""

    key: str
    title: str
    digits: int
    of: Callable[[Measured, Measured | None], float | None]
    less: bool = True


def _cpu(per: str, unit: float) -> Callable[[Measured, Measured | None], float | None]:
    def of(measured: Measured, direct: Measured | None) -> float | None:
        trees: list[float] = measured["trees_cpu_s"]
        if measured is direct or not measured[per] or not trees:
            return None
        number: int = measured[per]
        return trees[0] * unit / number * 1000

    return of


def _added(what: str) -> Callable[[Measured, Measured | None], float | None]:
    def of(measured: Measured, direct: Measured | None) -> float | None:
        if direct is None or measured is direct or measured[what] is None or direct[what] is None:
            return None
        added: float = measured[what] - direct[what]
        return added

    return of


def _rate(what: str) -> Callable[[Measured, Measured | None], float | None]:
    def of(measured: Measured, direct: Measured | None) -> float | None:
        number: int = measured[what]
        window_s: float = measured["window_s"]
        return number / window_s if number else None

    return of


CPU = Metric("cpu_s", "CPU s per 1,000 requests", 3, _cpu("requests", 1.0))
CHUNK_CPU = Metric("chunk_cpu_ms", "CPU ms per 1,000 chunks", 1, _cpu("chunks", 1000.0))
P50 = Metric("added_p50_ms", "added p50, ms", 2, _added("p50_ms"))
P99 = Metric("added_p99_ms", "added p99, ms", 2, _added("p99_ms"))
TTFT = Metric("added_ttft_p50_ms", "added TTFT p50, ms", 2, _added("ttft_p50_ms"))
GAP = Metric("added_gap_p99_ms", "added gap p99, ms", 2, _added("gap_p99_ms"))
REQUESTS = Metric("requests_per_s", "requests/s", 0, _rate("requests"), less=False)
CHUNKS = Metric("chunks_per_s", "chunks/s", 0, _rate("chunks"), less=False)


@dataclass(frozen=True)
class Scenario:
    key: str
    title: str
    connections: int
    metrics: tuple[Metric, ...]
    body_bytes: int = 1024
    stream: bool = False
    many_workers: bool = False  # Evenhand with more than one is measured too
    paired: bool = False  # direct is measured again just before each contender: here small differences matter


WORKERS = {1: "evenhand", 2: "evenhand-2", 4: "evenhand-4"}
PLAIN = (CPU, P50, P99, REQUESTS)
SCENARIOS = {
    scenario.key: scenario
    for scenario in (
        Scenario("one", "1 KB body, 1 connection", 1, PLAIN, paired=True),
        Scenario("many", "1 KB body, 64 connections", 64, PLAIN, many_workers=True),
        Scenario("large", "256 KB bodies, 8 connections", 8, PLAIN, body_bytes=256 * 1024),
        Scenario("streams", "64 streams, 5 ms gaps", 64, (CHUNK_CPU, TTFT, GAP, CHUNKS), stream=True, paired=True),
    )
}


# --- a whole run


@dataclass(frozen=True)
class Sample:
    """`direct`: measured just before it, where that was done."""

    round: int
    contender: str
    scenario: str
    measured: Measured
    direct: Measured | None = None


@dataclass
class Run:
    """All that was measured, as it goes to a file and comes back. `memory_mib`: idle, a value a round."""

    machine: dict[str, str]
    contenders: dict[str, dict[str, Any]]  # name -> what, version, rust, workers
    missing: dict[str, str] = field(default_factory=dict)  # name -> why
    samples: list[Sample] = field(default_factory=list)
    memory_mib: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def measured(self, scenario: str, contender: str) -> dict[int, Measured]:
        return {s.round: s.measured for s in self.samples if s.scenario == scenario and s.contender == contender}

    def values(self, scenario: str, contender: str, metric: Metric) -> dict[int, float]:
        """By round; what is added is added to the direct measurement just before, else to that of the round."""
        direct = self.measured(scenario, "direct")
        found = {
            s.round: metric.of(s.measured, s.direct or direct.get(s.round))
            for s in self.samples
            if s.scenario == scenario and s.contender == contender
        }
        return {nth: value for nth, value in found.items() if value is not None}

    def names(self, scenario: str) -> list[str]:
        there = {sample.contender for sample in self.samples if sample.scenario == scenario}
        return [name for name in self.contenders if name in there]

    def limits(self, scenario: str, contender: str) -> list[str]:
        """Who else than the router had no room left on its core in some round."""
        there = self.measured(scenario, contender).values()
        busy = {
            "load generator": [one["load_cpu_s"] / one["window_s"] for one in there],
            "engines": [one["trees_cpu_s"][-1] / one["window_s"] for one in there],
        }
        return [who for who, shares in busy.items() if max(shares, default=0.0) > LIMIT]

    def failures(self, scenario: str, contender: str) -> dict[str, int]:
        total: dict[str, int] = {}
        for one in self.measured(scenario, contender).values():
            for why, n in one["failures"].items():
                total[why] = total.get(why, 0) + n
        return total

    def worker_mib(self) -> Spread | None:
        """What one more worker of Evenhand takes: the fewest and the most that were measured, round by round."""
        few, many = min(WORKERS), max(WORKERS)
        pairs = zip(*(self.memory_mib.get(WORKERS[n], []) for n in (few, many)), strict=False)
        return spread((more - less) / (many - few) for less, more in pairs)

    def elsewhere(self) -> Spread | None:
        """Cores that others used meanwhile: what was busy, less the router, the engines and the load."""
        return spread(
            max(s.measured["machine_cpu_s"] - sum(s.measured["trees_cpu_s"]) - s.measured["load_cpu_s"], 0.0)
            / s.measured["window_s"]
            for s in self.samples
        )

    def stolen(self) -> Spread | None:
        """Cores that the host of a virtual machine gave to others."""
        return spread(s.measured["stolen_s"] / s.measured["window_s"] for s in self.samples)


def ratios(own: Mapping[int, float], rivals: Sequence[Mapping[int, float]]) -> list[float]:
    """Own / least of the rivals, round by round; no ratio where the least is not above 0."""
    found = []
    for nth, value in own.items():
        there = [rival[nth] for rival in rivals if nth in rival]
        if there and min(there) > 0:
            found.append(value / min(there))
    return found


# --- what issue and design ask for


@dataclass(frozen=True)
class Target:
    """`of`'s value / the least of those of `against` (none named: the routers in Rust), or, a `bound`, itself."""

    scenario: str
    metric: Metric
    limit: float
    against: tuple[str, ...] = ()
    of: str = "evenhand"
    bound: bool = False

    def reached(self, run: Run) -> Spread | None:
        own = run.values(self.scenario, self.of, self.metric)
        if self.bound:
            return spread(own.values())
        rivals = self.against or tuple(name for name, one in run.contenders.items() if one["rust"])
        return spread(ratios(own, [run.values(self.scenario, rival, self.metric) for rival in rivals]))

    @property
    def title(self) -> str:
        if self.bound:
            return "itself, ms"
        who = " and ".join(self.against) or "best in Rust"
        return f"{self.of} / {who}"

    def held(self, reached: Spread | None) -> bool | None:
        if reached is None:
            return None
        return reached.median <= self.limit if self.metric.less else reached.median >= self.limit


TARGETS = (
    Target("one", CPU, 0.8),
    Target("one", P50, 1.0),
    Target("one", P99, 1.0),
    Target("many", CPU, 1.0),
    Target("many", CPU, 1 / 15, against=("lmdeploy",)),
    Target("many", CPU, 1.1, against=("evenhand",), of="evenhand-2"),
    Target("many", CPU, 1.1, against=("evenhand",), of="evenhand-4"),
    Target("many", REQUESTS, 1.8, against=("evenhand",), of="evenhand-2"),
    Target("large", CPU, 0.6),
    Target("streams", CHUNK_CPU, 0.75),
    Target("streams", TTFT, 1.0),
    Target("streams", GAP, 0.5, bound=True),
)
