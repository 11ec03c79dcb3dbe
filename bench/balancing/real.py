"""The same in real time: real processes, requests over HTTP as they arrive, half of them streams.

The perfect dispatcher is the load generator itself: it knows the speeds and what it has in flight, and asks the engines
directly. Everybody gets the same arrivals and lengths in a round. Who needs speeds and can be told them is told.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import aiohttp

from bench.balancing.scenarios import FOUR
from bench.balancing.simulation import Scenario, arrivals
from bench.routing.contenders import CONTENDERS, HOST, Contender, NotHad, Place, ask, provide
from bench.routing.engine import MODEL
from bench.routing.stage import CHAT, Engines, Standing, standing
from tests.support.redis import PrivateRedis

SLOWER = 2.0
"""Than in the simulation: a busy machine's late timers matter less."""
REQUESTS = 500
SCENARIO = Scenario("real", FOUR, 0.75, REQUESTS)
LED, TOLD = "least_expected_delay", "min_expected_latency"
PEERS = ("nginx", "vllm-router", "sglang-router", "smg", "lmdeploy", "litellm")
ANSWER_WITHIN_S = 60.0
PERFECT = "perfect"


def tell_speeds(place: Place) -> None:
    for url, speed in zip(place.engines, FOUR, strict=True):
        status, said = ask(place.url, "/nodes/add", {"url": url, "status": {"models": [MODEL], "speed": speed}})
        if status != 200:
            raise NotHad(f"/nodes/add: {status} {said[:200]!r}")


def evenhand(strategy: str, workers: int, *, told: bool = False, redis_url: str = "") -> Contender:
    def command(python: str, place: Place) -> Sequence[str | Path]:
        listen = ["--server-name", HOST, "--server-port", str(place.port), "--workers", str(workers)]
        state = ["--state-dir", str(place.directory / "state"), "--routing-strategy", strategy]
        shared = ["--redis-url", redis_url] if redis_url else []
        nodes = [] if told else ["--nodes", *place.engines]
        return [python, "-m", "app.cli", "serve", *listen, *state, *shared, *nodes]

    health = "/health" if told else "/ready"  # without a node it is not ready
    return Contender(strategy, "", None, command, health=health, introduce=tell_speeds if told else None)


Stand = Callable[[ExitStack, Engines], list[str]]


def one(contender: Contender, python: str = sys.executable) -> Stand:
    def stand(stack: ExitStack, engines: Engines) -> list[str]:
        return stack.enter_context(standing(contender, python, engines)).urls

    return stand


def two_masters(stack: ExitStack, engines: Engines) -> list[str]:
    server = stack.enter_context(PrivateRedis())
    made: list[Standing] = [
        stack.enter_context(standing(evenhand(LED, 2, redis_url=server.url), sys.executable, engines)) for _ in range(2)
    ]
    return [url for standing_ in made for url in standing_.urls]


def contenders(only: Sequence[str], tell: Callable[[str], None]) -> dict[str, Stand]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evenhand-bench"
    made: dict[str, Stand] = {
        f"{LED}, 1 worker": one(evenhand(LED, 1)),
        f"{LED}, 2 workers": one(evenhand(LED, 2)),
        f"{LED}, 4 workers": one(evenhand(LED, 4)),
        f"{LED}, 2 masters of 2": two_masters,
        f"{TOLD}, told": one(evenhand(TOLD, 2, told=True)),
        f"{TOLD}, not told": one(evenhand(TOLD, 2)),
    }
    for name in PEERS:
        if only and not any(word in name for word in only):
            continue
        contender = CONTENDERS[name]
        if name == "lmdeploy":
            contender = replace(contender, introduce=tell_speeds, what="min_expected_latency, told")
        try:
            made[f"{name}, {contender.what}"] = one(contender, provide(contender, cache, tell))
        except NotHad as e:
            tell(f"{name} is left out: {e}")
    return {name: stand for name, stand in made.items() if not only or any(word in name for word in only)}


# --- load


async def load(urls: Sequence[str], seed: int, *, knows: bool) -> list[float]:
    """Latencies of all requests, seconds. `knows`: the urls are the engines, chosen as the perfect dispatcher does."""
    draws, counts = random.Random(seed), [0] * len(urls)
    latencies: list[float] = []
    loop = asyncio.get_running_loop()
    begun_s = loop.time() + 0.2

    async def ask_one(session: aiohttp.ClientSession, number: int, at_s: float, tokens: int) -> None:
        await asyncio.sleep(begun_s + at_s - loop.time())
        if knows:
            scores = [(count + 1) / speed for count, speed in zip(counts, FOUR, strict=True)]
            node = draws.choice([node for node, score in enumerate(scores) if score == min(scores)])
        else:
            node = number % len(urls)
        counts[node] += 1
        value = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens}
        since_s = loop.time()
        try:
            async with session.post(urls[node] + CHAT, json=value | {"stream": number % 2 == 0}) as answer:
                said = await answer.read()
        finally:
            counts[node] -= 1
        if answer.status != 200:
            raise NotHad(f"it answered {answer.status} {said[:200]!r}")
        latencies.append(loop.time() - since_s)

    timeout = aiohttp.ClientTimeout(total=ANSWER_WITHIN_S)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        requests = arrivals(SCENARIO, seed)
        tasks = [ask_one(session, n, one.at_s * SLOWER, one.tokens) for n, one in enumerate(requests)]
        await asyncio.gather(*tasks)
    return latencies


def figures(latencies: list[float]) -> tuple[float, float]:
    return statistics.fmean(latencies), sorted(latencies)[int(0.99 * len(latencies))]


def measure_all(only: Sequence[str], rounds: int, longest_s: float) -> str:
    """Everybody once a round, between two perfect ones whose mean is what it is compared with; the table."""
    until_s = time.monotonic() + longest_s

    def tell(what: str) -> None:
        print(f"{longest_s - (until_s - time.monotonic()):5.0f} s  {what}", file=sys.stderr, flush=True)

    made = contenders(only, tell)
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    perfects: list[tuple[float, float]] = []
    for nth in range(rounds):
        seed = 100 + nth
        names = list(made)
        for name in names[nth % len(names) :] + names[: nth % len(names)]:
            if time.monotonic() > until_s - 90:
                tell("the time is over")
                break
            try:
                with Engines("bench.balancing.engine", str(SLOWER), *map(str, FOUR)) as engines, ExitStack() as stack:
                    best = figures(asyncio.run(load(engines.urls, seed, knows=True)))
                    urls = made[name](stack, engines)
                    mean_s, p99_s = figures(asyncio.run(load(urls, seed, knows=False)))
            except (NotHad, aiohttp.ClientError, TimeoutError) as e:
                tell(f"{name}: left out of round {nth + 1}: {e!r}"[:300])
                continue
            perfects.append(best)
            ratios[name].append((mean_s / best[0], p99_s / best[1]))
            tell(f"{name}: {mean_s / best[0]:.3f} / {p99_s / best[1]:.2f}, perfect {best[0]:.3f} s / {best[1]:.3f} s")
    lines = ["| contender | mean, of each round | p99, of each round | median |", "|---|---|---|---|"]
    for name, pairs in ratios.items():
        if pairs:
            mean, p99 = zip(*pairs, strict=True)
            each = [", ".join(f"{value:.2f}" for value in column) for column in (mean, p99)]
            middle = f"{statistics.median(mean):.2f} / {statistics.median(p99):.2f}"
            lines.append(f"| {name} | {each[0]} | {each[1]} | {middle} |")
    spread = ", ".join(f"{mean:.3f} / {p99:.3f}" for mean, p99 in sorted(perfects))
    return "\n".join([*lines, "", f"The perfect dispatcher's own runs, s: {spread}"])
