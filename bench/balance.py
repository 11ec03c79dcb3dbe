"""How well Evenhand balances without being told the engines' speeds, against a dispatcher that knows everything.

The perfect dispatcher knows each engine's true speed and what is in flight, and takes the least (in flight + 1) /
speed. Everybody else is given in multiples of its mean and 99th percentile, on the same arrivals.

    python -m bench.balance              the simulation: Evenhand's Lua on a real Redis, engines on a virtual clock
    python -m bench.balance --cost       what an acquire costs Redis under each strategy
    python -m bench.balance --real       real workers and simulated engines in real time, with the peers that install
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `python bench/balance.py` works as well as `python -m bench.balance`

from app.balancing.least_expected_delay import EXPLORE_IDLE  # noqa: E402
from bench.balancing.dispatchers import SCRIPTS, InTurn, Knowing, Shared, Told, TwoChoices  # noqa: E402
from bench.balancing.plot import plot  # noqa: E402
from bench.balancing.scenarios import SCENARIOS, Aim  # noqa: E402
from bench.balancing.simulation import Dispatcher, Result, Scenario, run  # noqa: E402

if TYPE_CHECKING:
    from tests.support.redis import PrivateRedis

LED, TOLD, UNTOLD = "least_expected_delay", "min_expected_latency, told", "min_expected_latency, not told"
WORKERS = (1, 2, 4)
SPREAD = 0.03  # of the mean over the numbers of workers
LONGEST_S = 1200
SIZES = (3, 4, 8, 16, 24, 64, 256, 1000)
CALLS, WRITES, TURNS = 16, 4, 101  # calls a write, writes and turns

Make = Callable[[Scenario, int], Dispatcher]


def contenders(server: PrivateRedis) -> dict[str, Make]:
    def shared(workers: int) -> Make:
        return lambda scenario, seed: Shared(server, scenario, seed, LED, workers=workers)

    return {
        **{f"{LED}, {workers} worker{'s' * (workers > 1)}": shared(workers) for workers in WORKERS},
        # With exact counts these are their own rules, whoever runs them.
        TOLD: lambda scenario, seed: Told(scenario, seed, lambda count, speed: count / speed),
        UNTOLD: lambda scenario, seed: Told(scenario, seed, lambda count, _: count),
        "the less busy of two": lambda scenario, seed: TwoChoices(scenario, seed, lambda count, _: count),
        "one after the other": lambda scenario, seed: InTurn(scenario, seed, lambda count, _: count),
    }


def perfect(scenario: Scenario, seed: int) -> Result:
    return run(scenario, Knowing(scenario, seed, lambda count, speed: (count + 1) / speed), seed)


class Bar:
    """How far it is, on stderr."""

    def __init__(self, steps: int) -> None:
        self._steps, self._done, self._begun_s = steps, 0, time.monotonic()

    def __call__(self, what: str) -> None:
        self._done += 1
        if not sys.stderr.isatty() and self._done % 50 and self._done != self._steps:
            return
        spent_s = time.monotonic() - self._begun_s
        full = 30 * self._done // self._steps
        left_s = spent_s / self._done * (self._steps - self._done)
        end = "\r" if sys.stderr.isatty() and self._done < self._steps else "\n"
        print(
            f"[{'#' * full}{'.' * (30 - full)}] {self._done}/{self._steps} {left_s:4.0f} s left {what[:50]:50}",
            end=end, file=sys.stderr, flush=True,
        )  # fmt: skip


Ratios = dict[str, list[tuple[float, float]]]  # contender -> mean and p99 of each seed


def simulate(seeds: int, longest_s: float) -> dict[str, Ratios]:
    from tests.support.redis import PrivateRedis

    found: dict[str, Ratios] = {}
    until_s = time.monotonic() + longest_s
    with PrivateRedis() as server:
        made = contenders(server)
        tell = Bar(len(SCENARIOS) * seeds * len(made))
        for scenario, _ in SCENARIOS:
            ratios = found[scenario.name] = {name: [] for name in made}
            for seed in range(seeds):
                best = perfect(scenario, seed)
                for name, make in made.items():
                    if time.monotonic() > until_s:
                        raise SystemExit(f"balance: not done after {longest_s:g} s; fewer --seeds would be")
                    result = run(scenario, make(scenario, seed), seed)
                    ratios[name].append((result.mean_s / best.mean_s, result.p99_s / best.p99_s))
                    tell(f"{scenario.name}: {name}")
    return found


def means(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    first, second = zip(*pairs, strict=True)
    return statistics.fmean(first), statistics.fmean(second)


def table(found: dict[str, Ratios]) -> str:
    names = list(next(iter(found.values())))
    lines = ["| | aim | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for scenario, aim in SCENARIOS:
        ratios = {name: means(pairs) for name, pairs in found[scenario.name].items()}
        cells = [f"{mean:.3f} / {p99:.2f}" for mean, p99 in ratios.values()]
        lines.append(f"| {scenario.name} | {words(aim)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def pictures(found: dict[str, Ratios], directory: Path) -> None:
    """The mean and the p99 of those that a reader would choose between."""
    shown = {f"{LED}, 4 workers": LED, TOLD: TOLD, UNTOLD: UNTOLD, "the less busy of two": "the less busy of two"}
    for at, what in enumerate(("mean", "p99")):
        ratios = {
            scenario: {title: means(of[name])[at] for name, title in shown.items()} for scenario, of in found.items()
        }
        title = f"{what} latency, in multiples of the perfect dispatcher's (simulation)"
        (directory / f"balancing-{what}.svg").write_text(plot(title, ratios))


def words(aim: Aim) -> str:
    return " / ".join("" if value is None else f"{value:.2f}" for value in aim).strip(" /")


def verdicts(found: dict[str, Ratios]) -> Iterator[str]:
    for scenario, aim in SCENARIOS:
        ratios = {name: means(pairs) for name, pairs in found[scenario.name].items()}
        ours = [pair for name, pair in ratios.items() if name.startswith(LED)]
        for limit, at, what in ((aim.mean, 0, "mean"), (aim.p99, 1, "p99")):
            if limit is not None:
                most = max(pair[at] for pair in ours)
                yield f"{'reached' if most <= limit else 'MISSED '} {scenario.name}: {what} {most:.3f}, aim {limit}"
        spread = max(pair[0] for pair in ours) - min(pair[0] for pair in ours)
        yield f"{'reached' if spread <= SPREAD else 'MISSED '} {scenario.name}: spread over workers {spread:.3f}"


# --- what an acquire costs


PLAIN, BY_ORDER = "min_expected_latency", "min_expected_latency by the order of loads"
READ, LED_BY_ORDER = f"{LED}, the speeds read", f"{LED} by the order of loads"
EXPLORING = f"{LED_BY_ORDER}, the one in 200 that explores"
MEASURED = (PLAIN, LED, READ, BY_ORDER, LED_BY_ORDER, EXPLORING)


@contextmanager
def filled(server: PrivateRedis, size: int) -> Iterator[Callable[[str], tuple[float, float]]]:
    """A fleet of so many nodes; measures an acquire, us: its script alone, and the CPU of the server."""
    scenario = Scenario("cost", (1.0,) * size, 0.5)
    made = {name: Shared(server, scenario, 1, name) for name in (LED, PLAIN)}
    client, keys, urls = server.client, made[LED].keys, made[LED].urls
    client.hset(keys.unfinished, mapping={url: number % 9 for number, url in enumerate(urls)})
    client.hset(keys.learned, mapping={url: f"{40 + number / 7:.4g}" for number, url in enumerate(urls)})
    client.script_load(SCRIPTS["acquire_least_loaded"].text)

    def by_order(name: str) -> Callable[[], Sequence[Any]]:
        by, more = ("given", []) if name == BY_ORDER else ("learned", [keys.learned, keys.load_sums])
        last, order = [keys.load_index, keys.load(0), *more], f"1:{by}"
        script = SCRIPTS["index_loads"]  # the other acquires have taken it away
        words = [1, order, 60_000, by, size, *(f"1.0 {url}" for url in urls)]
        ordered = script.evalsha([keys.unfinished, keys.version, *last], words)
        client.execute_command("EVAL", script.text, *ordered[2:])
        names = [keys.unfinished, keys.ledger("w0"), keys.sessions, keys.version, *last]
        draws = [repr(0.5)] if name == BY_ORDER else [repr(0.5), repr(0.001 if name == EXPLORING else 0.5)]
        return lambda: SCRIPTS["acquire_least_loaded"].evalsha(names, ["w0", 1, 1, order, by, 1, *draws])

    def prepare(name: str) -> Callable[[], Sequence[Any]]:
        if name in (BY_ORDER, LED_BY_ORDER, EXPLORING):
            return by_order(name)
        one = made[PLAIN if name == PLAIN else LED]
        one.hear("w0", told=name == LED)
        return lambda: one.acquire_command("w0")

    def cpu_s() -> float:
        found: dict[str, Any] = client.info("cpu")  # type: ignore[assignment]
        return float(found["used_cpu_user"]) + float(found["used_cpu_sys"])

    def measure(name: str) -> tuple[float, float]:
        make = prepare(name)
        client.config_resetstat()
        since_s = cpu_s()
        for _ in range(WRITES):
            pipe = client.pipeline(transaction=False)
            for _ in range(CALLS):
                pipe.execute_command(*make())
            pipe.execute()
        spent_s = cpu_s() - since_s
        stats: dict[str, Any] = client.info("commandstats")["cmdstat_evalsha"]  # type: ignore[index]
        return float(stats["usec_per_call"]), spent_s * 1e6 / (WRITES * CALLS)

    yield measure


def cost() -> str:
    """Turn about, and of each the least: what else the machine does only adds."""
    from tests.support.redis import PrivateRedis

    heads = [f"{name}{'' if name == PLAIN else ' (ratio)'}" for name in MEASURED]
    heads.append("both orders, exploring included: ratio")
    lines = [f"| nodes | | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    with PrivateRedis() as server:
        tell = Bar(len(SIZES) * TURNS)
        for size in SIZES:
            with filled(server, size) as measure:
                turns = []
                for _ in range(TURNS):
                    turns.append([measure(name) for name in MEASURED])
                    tell(f"{size} nodes")
            for of, what in enumerate(("script alone, us", "CPU of the server, us")):
                least = [min(one[of] for one in column) for column in zip(*turns, strict=True)]
                cells = [f"{one:.1f} ({one / least[0]:.2f})" for one in least[1:]]
                given, learned, exploring = least[-3:]
                cells.append(f"{((1 - EXPLORE_IDLE) * learned + EXPLORE_IDLE * exploring) / given:.2f}")
                lines.append(f"| {size} | {what} | {least[0]:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.balance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--seeds", type=int, default=10, help="runs of each scenario (default: %(default)s)")
    made.add_argument("--quick", action="store_true", help="2 seeds: about two minutes; shorter rounds with --real")
    made.add_argument("--pictures", type=Path, metavar="DIRECTORY", help="also as SVG, into this directory")
    made.add_argument("--cost", action="store_true", help="what an acquire costs Redis")
    made.add_argument("--real", action="store_true", help="in real time, with peers")
    made.add_argument("--rounds", type=int, default=3, help="of --real (default: %(default)s)")
    made.add_argument("--only", nargs="+", default=[], metavar="NAME", help="contenders of --real; default: all")
    made.add_argument(
        "--longest-s", type=float, default=LONGEST_S, help="gives up after so long (default: %(default)s)"
    )
    return made


def main() -> int:
    arguments = parser().parse_args()
    if arguments.cost:
        print(cost())
        return 0
    if arguments.real:
        from bench.balancing.real import measure_all

        print(measure_all(arguments.only, 1 if arguments.quick else arguments.rounds, arguments.longest_s))
        return 0
    found = simulate(2 if arguments.quick else arguments.seeds, arguments.longest_s)
    print(table(found))
    if arguments.pictures:
        pictures(found, arguments.pictures)
    print()
    for verdict in verdicts(found):
        print(verdict)
    return 0


if __name__ == "__main__":
    sys.exit(main())
