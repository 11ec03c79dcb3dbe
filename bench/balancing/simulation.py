"""Engines and arrivals on a virtual clock. Pure: who decides is given.

An engine batches continuously: at most FULL requests run, the rest queue, a step takes BASE_S * (FLAT + running) /
speed, longer by the prompts that it lets in, and gives each running request one token. With FLAT 8 and answers of 1
to 63 tokens the perfect dispatcher and LMDeploy's stand to each other as the measured fleet did that the targets are
from (1.02 / 1.06 of the perfect one's mean and p99; join the shortest queue: 1.23 / 1.52).
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

FULL = 16
FLAT = 8.0
BASE_S = 0.00243
TOKENS = 32
READ_AT_ONCE = 0.128
"""Steps of one running request that a token of a prompt costs: 125 tokens are a step of half a batch."""


@dataclass(frozen=True)
class Scenario:
    """`changes`: (second, node, speed from then on; 0: what it gets fails at once). Counted is what comes from
    `since_s` to `until_s`. `flat`, `full`: of the engine; its step is set so that a full one does as much whatever
    they are."""

    name: str
    speeds: tuple[float, ...]
    load: float
    requests: int = 800
    lengths: str = "uniform"
    prompt_tokens: int = 0
    flat: float = FLAT
    full: int = FULL
    changes: tuple[tuple[float, int, float], ...] = ()
    since_s: float = 0.0
    until_s: float = math.inf

    @property
    def base_s(self) -> float:
        return BASE_S * (FLAT + FULL) / FULL * self.full / (self.flat + self.full)

    @property
    def rate(self) -> float:
        """Arrivals a second."""
        step = self.base_s * (self.flat + self.full) / self.full
        each_s = (TOKENS * step + self.prompt_tokens * READ_AT_ONCE * self.base_s) / sum(self.speeds)
        return self.load / each_s


@dataclass(slots=True)
class Request:
    at_s: float
    tokens: int
    prompt_tokens: float
    left: int
    node: int = -1
    worker: str = ""
    ended_s: float = math.nan
    failed: bool = False


class Dispatcher(Protocol):
    """Who decides. `counts`: unfinished of each node, this request not among them."""

    def choose(self, request: Request, counts: Sequence[int], now_s: float) -> int: ...

    def finished(self, request: Request, now_s: float) -> None: ...

    def changed(self, node: int, speed: float) -> None:
        """Only one that knows everything hears of it."""


class Result(NamedTuple):
    mean_s: float
    p99_s: float
    shares: list[float]


@dataclass
class _Engine:
    speed: float
    running: list[Request] = field(default_factory=list)
    queue: deque[Request] = field(default_factory=deque)
    stepping: bool = False


def arrivals(scenario: Scenario, seed: int) -> list[Request]:
    draws = random.Random(seed)
    made, at_s = [], 0.0
    for _ in range(scenario.requests):
        at_s += draws.expovariate(scenario.rate)
        if scenario.lengths == "uniform":
            tokens = draws.randint(1, 2 * TOKENS - 1)
        elif scenario.lengths == "lognormal":
            tokens = max(1, round(draws.lognormvariate(math.log(TOKENS) - 0.5, 1.0)))
        else:
            tokens = TOKENS
        prompt = scenario.prompt_tokens * draws.lognormvariate(-0.5, 1.0) if scenario.prompt_tokens else 0.0
        made.append(Request(at_s, tokens, prompt, tokens))
    return made


def run(scenario: Scenario, dispatcher: Dispatcher, seed: int) -> Result:
    """One run to the end of its last request."""
    requests = arrivals(scenario, seed)
    engines = [_Engine(speed) for speed in scenario.speeds]
    counts = [0] * len(engines)
    events: list[tuple[float, int, str, int, float]] = []
    for number, (at_s, node, speed) in enumerate(scenario.changes):
        heapq.heappush(events, (at_s, -1 - number, "change", node, speed))
    sequence = 0

    def step(node: int, now_s: float) -> None:
        nonlocal sequence
        engine, read = engines[node], 0.0
        while engine.queue and len(engine.running) < scenario.full:
            request = engine.queue.popleft()
            read += request.prompt_tokens * READ_AT_ONCE
            engine.running.append(request)
        engine.stepping = bool(engine.running)
        if engine.stepping:
            sequence += 1
            lasts_s = scenario.base_s * (scenario.flat + len(engine.running) + read) / (engine.speed or 1.0)
            heapq.heappush(events, (now_s + lasts_s, sequence, "step", node, 0.0))

    def end(request: Request, now_s: float) -> None:
        request.ended_s = now_s
        counts[request.node] -= 1
        dispatcher.finished(request, now_s)

    coming = 0
    while coming < len(requests) or any(counts):
        at_s = requests[coming].at_s if coming < len(requests) else math.inf
        if events and events[0][0] <= at_s:
            now_s, _, kind, node, speed = heapq.heappop(events)
            engine = engines[node]
            if kind == "change":
                engine.speed = speed
                dispatcher.changed(node, speed)
                continue
            running, engine.running = engine.running, []
            for request in running:
                request.left -= 1
                if request.left:
                    engine.running.append(request)
                else:
                    end(request, now_s)
            step(node, now_s)
            continue
        request = requests[coming]
        coming += 1
        node = request.node = dispatcher.choose(request, counts, at_s)
        counts[node] += 1
        engine = engines[node]
        if not engine.speed:
            request.failed = True
            end(request, at_s)
            continue
        engine.queue.append(request)
        if not engine.stepping:
            step(node, at_s)
    counted = [one for one in requests if scenario.since_s <= one.at_s < scenario.until_s]
    took = sorted(one.ended_s - one.at_s for one in counted if not one.failed)
    shares = [sum(one.node == node for one in counted) / len(counted) for node in range(len(engines))]
    return Result(statistics.fmean(took), took[min(len(took) - 1, int(0.99 * len(took)))], shares)
