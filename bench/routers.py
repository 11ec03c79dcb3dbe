"""What a router costs: Evenhand and its peers, each in front of the same three engines of zero latency, in rotation.

Each round visits all contenders, each time in another order: started, looked at (whole answers, from all engines),
warmed up, measured in each scenario, ended. What is compared is of one round. CPU is that of the router's whole process
tree, Evenhand's Redis included. All of it is on loopback.

Peers are installed from the package index on first use, pinned, each into an environment of its own in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `python bench/routers.py` works as well as `python -m bench.routers`

from bench.routing import report  # noqa: E402
from bench.routing.contenders import CONTENDERS, DIRECT, EVENHAND, Contender, NotHad, provide  # noqa: E402
from bench.routing.figures import SCENARIOS, Run, Sample, Scenario  # noqa: E402
from bench.routing.load import Plan  # noqa: E402
from bench.routing.stage import Engines, Standing, idle_mib, logged_bytes, measure, standing  # noqa: E402

WARM_S, WINDOW_S, ROUNDS, MINUTES = 1.0, 4.0, 3, 25.0
QUICK_WARM_S, QUICK_WINDOW_S, QUICK_MINUTES = 0.3, 1.0, 2.0
LAST_S = 90.0  # after the deadline nothing new begins; so long after it, what still runs is given up
EACH_S = 1.0  # around a measurement: the load generator's own start
QUICK_LESS = ("evenhand-2", "evenhand-4", "vllm-router-rr")


class Progress:
    """One line that is written over, or, where nobody looks, a line for each contender."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._begun_s = total, 0, time.monotonic()
        self._live = sys.stderr.isatty()
        self._last = ""

    def tell(self, what: str) -> None:
        if self._live:
            share = self._done / max(self._total, 1)
            bar = "#" * round(20 * share)
            elapsed_s = time.monotonic() - self._begun_s
            sys.stderr.write(f"\r\x1b[K[{bar:.<20}] {100 * share:3.0f} %  {elapsed_s:4.0f} s  {what[:70]}")
        elif what.partition(":")[0] != self._last:
            self._last = what.partition(":")[0]
            sys.stderr.write(f"{time.monotonic() - self._begun_s:4.0f} s  {what}\n")
        sys.stderr.flush()

    def step(self, number: int = 1) -> None:
        self._done += number

    def end(self) -> None:
        if self._live:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


# --- the order


def scenarios_of(contender: Contender, chosen: Sequence[Scenario]) -> list[Scenario]:
    return [scenario for scenario in chosen if contender.workers == 1 or scenario.many_workers]


def order(contenders: Sequence[Contender], nth: int, rounds: int) -> list[Contender]:
    """Of round `nth`, from 0: turned so far that in `rounds` rounds everybody is early and late."""
    turn = nth * max(len(contenders) // rounds, 1) % max(len(contenders), 1)
    return [*contenders[turn:], *contenders[:turn]]


# --- the run


def install(names: Sequence[str], cache: Path, run: Run) -> dict[str, str]:
    """Name -> interpreter; who can't be had goes to `run.missing`."""
    pythons = {}
    for name in names:
        begun_s = time.monotonic()
        told: list[str] = []

        def tell(what: str, told: list[str] = told) -> None:
            told.append(what)
            print(what, end=" ", file=sys.stderr, flush=True)

        try:
            pythons[name] = provide(CONTENDERS[name], cache, tell)
        except NotHad as e:
            run.missing[name] = str(e)
        if told:
            why = run.missing.get(name, "")
            print(f"{time.monotonic() - begun_s:.0f} s {why}", file=sys.stderr)
        elif name in run.missing:
            print(f"{name}: {run.missing[name]}", file=sys.stderr)
    return pythons


def visit(
    contender: Contender, one: Standing, nth: int, arguments: argparse.Namespace, engines: Engines, run: Run
) -> Iterator[str]:
    """Measures each of its scenarios; yields the name of the one that comes next."""
    memory = idle_mib(one)
    if memory is not None:
        run.memory_mib.setdefault(contender.name, []).append(memory)
    for scenario in scenarios_of(contender, arguments.scenarios):
        yield scenario.title
        alone = Plan(
            urls=engines.urls,
            connections=scenario.connections,
            warm_s=arguments.warm_s,
            window_s=arguments.seconds,
            body_bytes=scenario.body_bytes,
            stream=scenario.stream,
            roots=[engines.root],
        )
        if one.root is None:
            run.samples.append(Sample(nth, contender.name, scenario.key, measure(alone)))
            continue
        direct = None
        if scenario.paired and not arguments.quick:
            direct = measure(replace(alone, window_s=arguments.seconds / 2))
        logged = logged_bytes(one)
        measured = measure(replace(alone, urls=one.urls, roots=[one.root, engines.root]))
        measured["logged_bytes"] = logged_bytes(one) - logged
        run.samples.append(Sample(nth, contender.name, scenario.key, measured, direct))


def measure_all(pythons: dict[str, str], arguments: argparse.Namespace, run: Run) -> None:
    contenders = [CONTENDERS[name] for name in pythons]
    steps = sum(len(scenarios_of(one, arguments.scenarios)) for one in contenders) * arguments.rounds
    progress = Progress(steps)
    deadline_s = time.monotonic() + arguments.minutes * 60
    with Engines() as engines, within(arguments.minutes * 60 + LAST_S):
        for nth in range(arguments.rounds):
            for contender in order(contenders, nth, arguments.rounds):
                if contender.name in run.missing:
                    continue
                where = f"round {nth + 1}/{arguments.rounds} {contender.name}"
                progress.tell(f"{where}: starting")
                try:
                    with standing(contender, pythons[contender.name], engines) as one:
                        for title in visit(contender, one, nth, arguments, engines, run):
                            if time.monotonic() > deadline_s:
                                run.notes.append(f"Ended by its deadline, in {where}.")
                                progress.end()
                                return
                            progress.tell(f"{where}: {title}")
                            progress.step()
                except NotHad as e:
                    run.missing[contender.name] = f"in round {nth + 1}: {e}"
                    progress.end()
                    print(f"{contender.name}: {e}", file=sys.stderr)
    progress.end()


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the body when so much time has passed."""

    def expire(number: int, frame: object) -> None:
        raise TimeoutError(f"something hangs: it should have ended {LAST_S:g} s ago")

    signal.signal(signal.SIGALRM, expire)
    signal.alarm(round(seconds))
    try:
        yield
    finally:
        signal.alarm(0)


def machine(arguments: argparse.Namespace) -> dict[str, str]:
    return {
        "measured": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "cores": str(os.cpu_count()),
        "CPU": _cpu_model(),
        "Linux": platform.release(),
        "Python": platform.python_version(),
        "a million additions in it": _pace_ms(_add),
        "a thousand times 1 KB over loopback": _pace_ms(_pass),
        "rounds": str(arguments.rounds),
        "window": f"{arguments.seconds:g} s",
    }


def _add() -> None:
    total = 0
    for number in range(1_000_000):
        total += number


def _pass() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            for _ in range(1000):
                one.send(bytes(1024))
                other.recv(2048)


def _pace_ms(work: Callable[[], None]) -> str:
    """CPU time of a fixed program: the same cores are slower at times, under a busy host, and systems differ."""
    found = []
    for _ in range(3):
        begun_s = time.process_time()
        work()
        found.append((time.process_time() - begun_s) * 1000)
    return f"{min(found):.0f} ms"


def _commit() -> str:
    """With a + where the tree is not what was committed."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--exclude", "*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10).stdout.strip() or "unknown"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def about(names: Sequence[str]) -> dict[str, dict[str, object]]:
    return {
        name: {"what": one.what, "version": one.version, "rust": one.rust, "workers": one.workers}
        for name, one in CONTENDERS.items()
        if name in names
    }


# --- files


def save(run: Run, path: Path) -> None:
    path.write_text(json.dumps(asdict(run), indent=1) + "\n")


class BadFile(Exception):
    """Not what `save` wrote."""


def load(path: Path) -> Run:
    try:
        value = json.loads(path.read_text())
        return Run(**value | {"samples": [Sample(**sample) for sample in value["samples"]]})
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise BadFile(f"--from {path}: not what --json wrote: {e}") from None


# --- the command


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.routers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help="one round of short windows, within two minutes: a trial")
    made.add_argument("--only", nargs="+", choices=CONTENDERS, metavar="NAME", help=f"of {', '.join(CONTENDERS)}")
    made.add_argument("--scenario", nargs="+", choices=SCENARIOS, metavar="NAME", help=f"of {', '.join(SCENARIOS)}")
    made.add_argument("--rounds", type=_number(int, 1, 50), help=f"default {ROUNDS}; quick: 1")
    made.add_argument("--seconds", type=_number(float, 0.2, 60), help=f"of each window; default {WINDOW_S:g}")
    made.add_argument(
        "--minutes", type=_number(float, 0.1, 180), help=f"after which nothing new begins; default {MINUTES:g}"
    )
    made.add_argument("--cache", type=Path, default=_cache(), help="where the peers are installed (%(default)s)")
    where = made.add_mutually_exclusive_group()
    where.add_argument("--json", type=Path, metavar="FILE", help="all that was measured goes there")
    where.add_argument("--from", type=Path, dest="source", metavar="FILE", help="measure nothing; show such a file")
    made.add_argument("--write-docs", action="store_true", help="rewrite the figures and plots of docs/performance.md")
    return made


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evenhand-bench"


def _number(kind: Callable[[str], float], least: float, most: float) -> Callable[[str], float]:
    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be a number from {least} to {most}, not {text!r}")
        return value

    return convert


def complete(arguments: argparse.Namespace) -> None:
    """What was not said follows from --quick."""
    quick = arguments.quick
    arguments.rounds = arguments.rounds or (1 if quick else ROUNDS)
    arguments.seconds = arguments.seconds or (QUICK_WINDOW_S if quick else WINDOW_S)
    arguments.minutes = arguments.minutes or (QUICK_MINUTES - 0.25 if quick else MINUTES)
    arguments.warm_s = QUICK_WARM_S if quick else WARM_S
    arguments.scenarios = [SCENARIOS[name] for name in arguments.scenario or SCENARIOS]
    names = arguments.only or [name for name in CONTENDERS if not (quick and name in QUICK_LESS)]
    chosen = [name for name in CONTENDERS if name in names or name == DIRECT]  # what is added is added to direct
    arguments.names = [name for name in chosen if scenarios_of(CONTENDERS[name], arguments.scenarios)]


def run_bench(arguments: argparse.Namespace) -> Run:
    run = Run(machine(arguments), about(arguments.names))
    pythons = install(arguments.names, arguments.cache.expanduser().resolve(), run)
    try:
        measure_all(pythons, arguments, run)
    except KeyboardInterrupt:
        run.notes.append("Interrupted.")
    except TimeoutError as e:
        run.notes.append(f"Given up: {e}.")
    return run


def main() -> int:
    parsing = parser()
    arguments = parsing.parse_args()
    complete(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell started it with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    try:
        run = load(arguments.source) if arguments.source else run_bench(arguments)
    except KeyboardInterrupt:
        return 130
    except BadFile as e:
        parsing.error(str(e))
    print(report.text(run))
    if arguments.json:
        save(run, arguments.json)
    if arguments.write_docs:
        for path in report.write_docs(run, ROOT / "docs"):
            print(f"written: {path.relative_to(ROOT)}", file=sys.stderr)
    ours = [name for name in run.missing if name.startswith(EVENHAND)]
    return 1 if run.notes or ours or not run.samples else 0


if __name__ == "__main__":
    sys.exit(main())
