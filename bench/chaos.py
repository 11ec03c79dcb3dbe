"""A soak under faults: load over two masters with two workers each and four engines, while everything fails in turn.

Faults of engines, of workers and hosts, of Redis, of the node list and of clients are injected at random from a seed,
one of each of these lanes at a time, so that up to five overlap. Every second the counts in Redis (`unfinished`) are
compared with what the engines really hold.

It ends well (exit code 0) if every failed request is explained by a fault that was on, if the counts were exact
within 2 s after the faults that part them from the engines, and if nothing is left over: counts, requests in
engines, keys, processes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `python bench/chaos.py` works as well as `python -m bench.chaos`

from bench.soak.faults import KINDS, PAIRS, Kind, Window, Windows  # noqa: E402
from bench.soak.load import LEFT, Load, Result  # noqa: E402
from bench.soak.stage import ENGINES, MASTERS, WORKERS, Stage  # noqa: E402
from bench.soak.watch import Watch  # noqa: E402

LANES = ("engine", "worker", "redis", "node", "client")
GAP_S = (1.0, 4.0)  # between two faults of a lane
SETTLE_S = 2.0  # the counts are exact again so long after a fault
LATE_S = 1.0  # a client may see the end of a fault's effect so much later than that
CALM_S = 5.0  # without faults, at the begin and at the end
PROGRESS_S = 5.0
LEAVING, SLOW = 0.1, 1  # share of clients that leave at random; slow readers
LONGEST_EXTRA_S = 180.0  # beyond the minutes asked for: something hangs then
QUICK = ("engine kill -9, restarted", "worker kill -9", "FLUSHALL", "node removed, added", "SCRIPT FLUSH")


# --- what is injected when


@dataclass(frozen=True)
class Planned:
    """`at_s` counts from the start; the fault begins later if the one before takes longer than planned."""

    kind: Kind
    at_s: float
    hold_s: float
    seed: str  # of its own choices: which engine, which worker


def plan(seed: int, lane: str, kinds: Sequence[Kind], begin_s: float, end_s: float) -> list[Planned]:
    """A lane's faults: all its kinds in a random order, then all in another order, as long as there is time."""
    rng = random.Random(f"{seed}/{lane}")
    planned: list[Planned] = []
    deck: list[Kind] = []
    at_s = begin_s
    while kinds:
        deck = deck or rng.sample(list(kinds), len(kinds))
        kind = deck.pop()
        at_s += rng.uniform(*GAP_S) if end_s - begin_s > 20 else 0.3
        hold_s = rng.uniform(*kind.hold_s)
        if at_s + hold_s > end_s:
            break
        planned.append(Planned(kind, at_s, hold_s, f"{seed}/{lane}/{len(planned)}"))
        at_s += hold_s
    return planned


class Lane(threading.Thread):
    """Does one lane's plan. `trouble` is what it could not do or undo."""

    def __init__(self, planned: Sequence[Planned], stage: Stage, load: Load, windows: Windows, end_s: float) -> None:
        super().__init__(name="lane", daemon=True)
        self.trouble: list[str] = []
        self.begun_s = time.monotonic()
        self._planned, self._stage, self._load, self._windows, self._end_s = planned, stage, load, windows, end_s

    def run(self) -> None:
        for one in self._planned:
            _sleep_until(self.begun_s + one.at_s, self._load)
            if self._load.stopping or time.monotonic() + one.hold_s > self.begun_s + self._end_s:
                return
            try:
                with self._windows.hurt(one.kind, self._stage, self._load, random.Random(one.seed)):
                    _sleep_until(time.monotonic() + one.hold_s, self._load)
            except Exception as e:
                self.trouble.append(f"{one.kind.name}: {type(e).__name__}: {e}"[:2000])
                traceback.print_exc()


# --- what came of it


@dataclass
class Verdict:
    """`wrong` is what makes the exit code 1."""

    failures: Counter[tuple[str, str]]  # (what the client saw, under which faults)
    wrong: list[str]


def judge(results: Sequence[Result], windows: Windows, watch: Watch, extra: Sequence[str]) -> Verdict:
    failures: Counter[tuple[str, str]] = Counter()
    unexplained: Counter[str] = Counter()
    for result in results:
        if not result.failed:
            continue
        causes = causes_of(result, windows)
        failures[result.saw, " or ".join(causes) or "NO FAULT EXPLAINS IT"] += 1
        if not causes:
            beside = ", ".join(sorted({w.kind.name for w in windows.all if touches(result, w)})) or "no fault at all"
            unexplained[f"{result.saw} (beside: {beside})"] += 1
    wrong = [f"{n} x {saw}" for saw, n in unexplained.items()]
    wrong += [
        f"{apart.url} was {apart.largest:+d} apart for {apart.alone_s:.1f} s that no fault excuses"
        for apart in watch.found
        if apart.alone_s > SETTLE_S
    ]
    return Verdict(failures, wrong + list(extra))


def touches(result: Result, window: Window, lasts_s: float = 0.0) -> bool:
    """Whether the request ran while the fault, or what it leaves behind for so long, was on."""
    ended_s = window.ended_s
    until_s = float("inf") if ended_s is None else ended_s + SETTLE_S + LATE_S + lasts_s
    return result.began_s < until_s and result.ended_s > window.began_s


def causes_of(result: Result, windows: Windows) -> list[str]:
    """The faults, or else pairs of faults, that explain what a client saw."""
    alone = [w for w in windows.all if touches(result, w) and result.saw.startswith(w.kind.costs)]
    at_its_end = [
        w for w in alone if w.began_s <= result.ended_s and (w.ended_s is None or result.ended_s <= w.ended_s)
    ]
    if alone:
        return sorted({window.kind.name for window in at_its_end or alone})

    def names(lasts_s: float) -> set[str]:
        return {window.kind.name for window in windows.all if touches(result, window, lasts_s)}

    return [
        pair.name
        for pair in PAIRS
        if result.saw.startswith(pair.costs) and names(0.0) & pair.first and names(pair.second_lasts_s) & pair.second
    ]


def excuses(windows: Windows) -> list[str]:
    now_s = time.monotonic()
    return [w.kind.name for w in list(windows.all) if w.kind.parts and now_s < w.excuses_until_s()]


def report(results: Sequence[Result], verdict: Verdict, windows: Windows, watch: Watch) -> str:
    saw = Counter(result.saw for result in results)
    failed = sum(result.failed for result in results)
    lines = [
        "| requests | whole answers | clients left | failed | first host refused, second served |",
        "|---|---|---|---|---|",
        f"| {len(results)} | {saw['ok']} | {saw[LEFT]} | {failed} "
        f"| {sum(r.passed_over and not r.failed for r in results)} |",
        "",
        "| failures: what the client saw | under | number |",
        "|---|---|---|",
        *(f"| {what} | {under} | {n} |" for (what, under), n in verdict.failures.most_common()),
        "",
        "| counts against engines | |",
        "|---|---|",
        f"| looks, of them with no fault that may part them | {watch.looks}, {watch.unexcused} |",
        f"| seconds in which Redis could not be read | {watch.blind} |",
        f"| latest look: so long the machine was too busy | {watch.late_s:.1f} s |",
        f"| times that a node's count was apart | {len(watch.found)} |",
    ]
    if watch.found:
        largest = max(watch.found, key=lambda apart: abs(apart.largest))
        longest = max(watch.found, key=lambda apart: apart.lasted_s)
        alone = max(watch.found, key=lambda apart: apart.alone_s)
        for name, apart in (("largest", largest), ("longest", longest)):
            under = ", ".join(sorted(apart.faults)) or "no fault that parts them"
            lines.append(f"| {name} | {apart.largest:+d} for {apart.lasted_s:.1f} s, under {under} |")
        lines.append(f"| longest without a fault that excuses it | {alone.alone_s:.1f} s ({alone.largest:+d}) |")
    lines += ["", "| fault | times |", "|---|---|"]
    times = Counter(window.kind.name for window in windows.all)
    return "\n".join(lines + [f"| {name} | {times[name]} |" for name in KINDS if times[name]])


# --- one kind after the other


def cost_row(kind: str, results: Sequence[Result], times: int) -> str:
    """What the requests that met a fault had of it."""
    waits = sorted(r.head_s - r.began_s for r in results if r.stream and r.head_s is not None and not r.failed)
    failures = Counter(r.saw for r in results if r.failed)
    shown = "; ".join(f"{n} x {saw}" for saw, n in failures.most_common()) or "none"
    spread = (
        f"{statistics.median(waits):.2f} / {waits[int(0.99 * (len(waits) - 1))]:.2f} / {waits[-1]:.2f}"
        if waits
        else "-"
    )
    return f"| {kind} | {times} | {len(results)} | {sum(failures.values())} | {shown} | {spread} |"


def run_each(kinds: Sequence[Kind], seed: int, times: int, stage: Stage, load: Load, windows: Windows) -> list[str]:
    """Each kind `times` times, alone, everything well again before the next; the rows of the table."""
    rows = []
    begun_s = time.monotonic()
    _sleep_until(begun_s + 10, load)
    rows.append(cost_row("(none)", _between(load, begun_s, time.monotonic()), 1))
    for kind in kinds:
        met: list[Result] = []
        for i in range(times):
            rng = random.Random(f"{seed}/{kind.name}/{i}")
            begun_s = time.monotonic()
            with windows.hurt(kind, stage, load, rng):
                _sleep_until(begun_s + max(kind.hold_s), load)
            ended_s = time.monotonic() + SETTLE_S
            _sleep_until(ended_s, load)
            if load.stopping:
                return rows
            stage.recover()
            _sleep_until(
                time.monotonic() + 3.5, load
            )  # so long a first byte may take: what is slow through the fault is counted for it
            met += _between(load, begun_s, ended_s)
        rows.append(cost_row(kind.name, met, times))
        print(rows[-1], flush=True)
    return rows


def _between(load: Load, begun_s: float, ended_s: float) -> list[Result]:
    return [r for r in list(load.results) if r.began_s < ended_s and r.ended_s > begun_s]


# --- the run


def _sleep_until(at_s: float, load: Load) -> None:
    """Or until the load is told to stop."""
    while not load.stopping and (left_s := at_s - time.monotonic()) > 0:
        time.sleep(min(left_s, 0.1))


@contextmanager
def progress(load: Load, windows: Windows, watch: Watch, stage: Stage) -> Iterator[None]:
    ending = threading.Event()
    begun_s = time.monotonic()

    def tell() -> None:
        while not ending.wait(PROGRESS_S):
            failed = sum(result.failed for result in load.results)
            held = " ".join(str(engine.in_flight) for engine in stage.engines)
            apart = sum(map(abs, watch.last.values()))
            on = ", ".join(str(window) for window in windows.on()) or "no fault"
            print(
                f"{time.monotonic() - begun_s:4.0f} s  {len(load.results)} requests, {failed} failed, {load.running} "
                f"running; engines hold {held}, counts {apart} apart; {on}",
                flush=True,
            )

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(5)


def run(arguments: argparse.Namespace) -> int:
    duration_s = arguments.minutes * 60
    signal.signal(signal.SIGALRM, _out_of_time)
    if not arguments.each:
        signal.alarm(round(duration_s + LONGEST_EXTRA_S))
    kinds = [KINDS[name] for name in arguments.only or (QUICK if arguments.quick else KINDS)]
    with Stage() as stage:
        alone = arguments.only or arguments.each
        load = Load(
            [master.url for master in stage.masters],
            clients=arguments.clients,
            seed=arguments.seed,
            leaving=0.0 if alone else LEAVING,
            slow=0 if alone else SLOW,
        )
        windows = Windows()
        watch = Watch(stage.redis.socket, stage.space.key("unfinished"), stage.engines, lambda: excuses(windows))
        rows: list[str] = []

        def soak() -> list[str]:
            calm_s = min(CALM_S, duration_s / 10)
            end_s = duration_s - calm_s
            lanes = []
            for name in LANES:
                planned = plan(arguments.seed, name, [k for k in kinds if k.lane == name], calm_s, end_s)
                lanes.append(Lane(planned, stage, load, windows, end_s))
            for lane in lanes:
                lane.start()
            for lane in lanes:
                lane.join()
            _sleep_until(lanes[0].begun_s + duration_s, load)
            return [line for lane in lanes for line in lane.trouble]

        def each() -> list[str]:
            rows.extend(run_each(kinds, arguments.seed, arguments.times, stage, load, windows))
            return []

        watch.start()
        try:
            with progress(load, windows, watch, stage):
                wrong = asyncio.run(beside_load(load, each if arguments.each else soak))
        finally:
            watch.end()
        wrong += after(stage, windows)
        verdict = judge(load.results, windows, watch, wrong)
        print()
        if rows:
            head = "| fault | times | requests that met it | failed | what their clients saw | first byte, s |"
            print("\n".join([head, "|---|---|---|---|---|---|", *rows]), end="\n\n")
        print(report(load.results, verdict, windows, watch))
        print("\n" + machine(stage, arguments))
        print(f"left over: {'; '.join(wrong) or 'nothing'}")
        for line in verdict.wrong:
            print(f"WRONG: {line}")
        if verdict.wrong and arguments.keep_logs:
            for i, master in enumerate(stage.masters):
                (arguments.keep_logs / f"master-{i}.log").write_text(master.log())
    return 1 if verdict.wrong else 0


async def beside_load(load: Load, work: Callable[[], list[str]]) -> list[str]:
    """What `work` says, done in a thread while the load runs; the load ends with it."""
    clients = asyncio.create_task(load.run(float("inf")))
    try:
        return await asyncio.to_thread(work)
    finally:
        load.stopping = True
        await clients


def after(stage: Stage, windows: Windows) -> list[str]:
    """What is wrong or left over, once all clients have left."""
    wrong = [f"{window.kind.name} was never undone" for window in windows.on()]
    try:
        stage.recover()
    except AssertionError as e:
        wrong.append(f"not well again: {e}")
    wrong += stage.left_over()
    wrong += [f"traceback in a log: {n} x {line}" for line, n in Counter(stage.tracebacks()).items()]
    return wrong + stage.stop()


def machine(stage: Stage, arguments: argparse.Namespace) -> str:
    info = dict(stage.redis.client.info("server"))
    store = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"
    load_1, load_5, _ = os.getloadavg()
    return (
        f"seed {arguments.seed}, {MASTERS} masters x {WORKERS} workers, {ENGINES} engines, {arguments.clients} clients"
        f", {store}, Python {sys.version.split()[0]}, {os.cpu_count()} cores, load average {load_1:.1f} ({load_5:.1f})"
    )


def _out_of_time(number: int, frame: object) -> None:
    raise SystemExit("chaos: something hangs; it should have ended three minutes ago")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.chaos",
        description=__doc__,
        epilog="kinds of faults:\n  " + "\n  ".join(KINDS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--minutes", type=_minutes, default=5.0, help="of load and faults (default: %(default)s)")
    made.add_argument("--seed", type=int, default=1, help="of all that is drawn (default: %(default)s)")
    made.add_argument("--clients", type=int, default=16, help="closed loops of requests (default: %(default)s)")
    made.add_argument("--quick", action="store_true", help="five kinds of faults within a few seconds")
    made.add_argument("--only", nargs="+", choices=KINDS, metavar="KIND", help="these kinds only; clients behave")
    made.add_argument("--each", action="store_true", help="one kind after the other, and what each costs a user")
    made.add_argument("--times", type=int, default=1, help="how often with --each (default: %(default)s)")
    made.add_argument("--keep-logs", type=Path, metavar="DIR", help="where the masters' logs go if something is wrong")
    return made


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 60:
        raise argparse.ArgumentTypeError(f"must be a number above 0 and up to 60, not {text!r}")
    return value


def main() -> int:
    arguments = parser().parse_args()
    if arguments.quick:
        arguments.minutes, arguments.clients = 0.05, 8
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell started it with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    try:
        return run(arguments)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
