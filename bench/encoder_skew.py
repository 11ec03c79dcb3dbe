"""How unevenly encoders fill when each process counts for itself, and how evenly with one shared cursor.

Real processes take requests from one queue on a real Redis, whoever is free first, as gunicorn's workers take
connections from one socket. For each request they give its media items to encoders in one of three ways; no engine is
called. What is compared is where the position of the round robin lives:

    request   it begins at encoder 0 for each request (vLLM's example before vllm-project/vllm#52491)
    process   each process has its own (vLLM's example since, run with several workers)
    shared    one number in Redis, moved by lua/acquire_encoders.lua through the store objects of a real worker

The order of the assignments is Redis's: MONITOR shows when the script counts an item on an encoder; the two others
push each item's encoder to a list on the same Redis as soon as they have decided.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `python bench/encoder_skew.py` works as well as `python -m bench.encoder_skew`

from redis.asyncio import Redis  # noqa: E402

from app.nodes import Role, State  # noqa: E402
from app.store.keys import Keys  # noqa: E402
from app.store.ledger import Ledger  # noqa: E402
from app.store.locator import Locator  # noqa: E402
from app.store.registry import Registry  # noqa: E402
from app.store.scripts import load_scripts  # noqa: E402

if TYPE_CHECKING:  # the worker processes do without: what they import is most of the time that this takes
    from tests.support.redis import PrivateRedis

MODEL = "m"
NAMESPACE = "skew"
QUEUE, ORDER = "skew:queue", "skew:order"
WINDOW = 30  # consecutive assignments: what encoders feel as a burst
HOLD_S = 0.002  # longest that a worker is busy with a request, at random: it makes the shares of workers uneven
WORKERS = (1, 2, 4, 8)
MODES = ("request", "process", "shared")
MIXES: dict[str, tuple[int, ...]] = {"1": (1,), "1, 2, 3, 5": (1, 2, 3, 5)}
LONGEST_S = 60  # of it all: something hangs then
LEASE_S, TIMEOUT_S = 60.0, 5.0


# --- one worker process


async def work(url: str, name: str, encoders: int) -> None:
    """Take orders from stdin, one JSON line each, and answer each with a line; end with stdin."""
    locator = Locator.of(url, keys=Keys(NAMESPACE), timeout_s=TIMEOUT_S)
    registry = Registry(locator=locator, keys=Keys(NAMESPACE), scripts=load_scripts(), worker=name, timeout_s=TIMEOUT_S)
    ledger = Ledger(
        locator=locator,
        keys=Keys(NAMESPACE),
        scripts=load_scripts(),
        registry=registry,
        worker=name,
        strategy="min_expected_latency",
        lease_s=LEASE_S,
        timeout_s=TIMEOUT_S,
    )
    redis = Redis.from_url(url, decode_responses=True)
    await registry.start()
    await ledger.start()
    try:
        print("{}", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            taken = await take_all(json.loads(line)["mode"], redis, ledger, encoders)
            print(json.dumps({"requests": taken, "trouble": ledger.trouble}), flush=True)
    finally:
        await ledger.close()
        await registry.close()
        await redis.aclose()


async def take_all(mode: str, redis: Redis, ledger: Ledger, encoders: int) -> int:
    """Serve until the queue says that it is over; how many requests this process had."""
    position, taken = 0, 0
    while True:
        _, size = await redis.blpop([QUEUE])
        items = int(size)
        if items == 0:
            return taken
        taken += 1
        if mode == "shared":
            tickets = await ledger.acquire_encoders(lambda snapshot: snapshot.pool(MODEL, Role.Encode), items)
            await asyncio.sleep(random.uniform(0, HOLD_S))
            for ticket in tickets:
                ticket.release(succeeded=False)
            continue
        if mode == "request":
            position = 0
        await redis.rpush(ORDER, *[(position + i) % encoders for i in range(items)])
        position = (position + items) % encoders
        await asyncio.sleep(random.uniform(0, HOLD_S))


# --- the measurement


class Skew(NamedTuple):
    """Items of each encoder; the greatest difference between two encoders at the end and in any WINDOW items."""

    items: list[int]
    end: int
    window: int

    @classmethod
    def of(cls, order: Sequence[int], encoders: int) -> Skew:
        def spread(part: Sequence[int]) -> int:
            counts = [part.count(encoder) for encoder in range(encoders)]
            return max(counts) - min(counts)

        windows = [order[i : i + WINDOW] for i in range(max(len(order) - WINDOW, 0) + 1)]
        return cls([order.count(i) for i in range(encoders)], spread(order), max(map(spread, windows)))


class Processes:
    """The worker processes, all started at once; `run` has the first so many of them serve."""

    def __init__(self, stack: ExitStack, url: str, count: int, encoders: int) -> None:
        self._made = [self._start(stack, url, f"w{i}", encoders) for i in range(count)]
        for process in self._made:
            self._answer(process)

    def run(self, mode: str, count: int) -> Iterator[int]:
        chosen = self._made[:count]
        for process in chosen:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"mode": mode}) + "\n")
            process.stdin.flush()
        for process in chosen:
            yield self._answer(process)

    @staticmethod
    def _start(stack: ExitStack, url: str, name: str, encoders: int) -> subprocess.Popen[str]:
        words = [sys.executable, __file__, "--as-worker", url, name, str(encoders)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)

        def end() -> None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=5)  # closes its stdin, which ends it
            process.kill()
            process.wait()

        stack.callback(end)
        return process

    @staticmethod
    def _answer(process: subprocess.Popen[str]) -> int:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit("encoder_skew: a worker process ended; see above")
        told = json.loads(line)
        if told.get("trouble"):
            raise SystemExit(f"encoder_skew: a worker was not on shared state: {told['trouble']}")
        return int(told.get("requests", 0))


async def register(url: str, encoders: Sequence[str]) -> None:
    """What `/nodes/add` and a good probe do."""
    locator = Locator.of(url, keys=Keys(NAMESPACE), timeout_s=TIMEOUT_S)
    registry = Registry(
        locator=locator, keys=Keys(NAMESPACE), scripts=load_scripts(), worker="bench", timeout_s=TIMEOUT_S
    )
    await registry.start()
    for encoder in encoders:
        await registry.add(encoder, role=Role.Encode, models=(MODEL,), speed=None, key=None)
        await registry.set_state(registry.snapshot.nodes[encoder], State.READY)
    await registry.close()


def measure(
    server: PrivateRedis, processes: Processes, urls: list[str], mode: str, workers: int, sizes: list[int]
) -> Skew:
    from tests.support.epd_floor import RedisOrder
    from tests.support.redis import Space

    server.client.delete(ORDER, QUEUE, Keys(NAMESPACE).encoder_cursor)
    with RedisOrder(Space(server, NAMESPACE)) as monitor:
        answers = processes.run(mode, workers)
        server.client.rpush(QUEUE, *sizes, *[0] * workers)  # the zeros end them, one each
        served = sum(answers)
    assert served == len(sizes), f"{served} of {len(sizes)} requests were served"
    if mode == "shared":
        return Skew.of(monitor.numbers(urls), len(urls))
    order: list[str] = server.client.lrange(ORDER, 0, -1)  # type: ignore[assignment]
    return Skew.of([int(encoder) for encoder in order], len(urls))


def table(rows: Sequence[tuple[int, str, dict[str, Skew]]]) -> str:
    mixes = list(rows[0][2])
    head = ["workers", "cursor"]
    for mix in mixes:
        head += [f"items per encoder, {mix} a request", "difference", f"in any {WINDOW}"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for workers, mode, skews in rows:
        cells = [str(workers), mode]
        for skew in skews.values():
            cells += [" / ".join(map(str, skew.items)), str(skew.end), str(skew.window)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> int:
    from tests.support.redis import PrivateRedis

    signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(LONGEST_S)
    begun_s = time.monotonic()
    urls = [f"http://encoder-{i}:8000" for i in range(arguments.encoders)]
    rows = []
    with ExitStack() as stack:
        server = stack.enter_context(PrivateRedis())
        asyncio.run(register(server.url, urls))
        processes = Processes(stack, server.url, max(arguments.workers), arguments.encoders)
        for workers in arguments.workers:
            for mode in MODES:
                skews = {}
                for mix, sizes in MIXES.items():
                    requests = [sizes[i % len(sizes)] for i in range(arguments.requests)]
                    random.Random(arguments.seed).shuffle(requests)
                    skews[mix] = measure(server, processes, urls, mode, workers, requests)
                rows.append((workers, mode, skews))
        info = dict(server.client.info("server"))  # type: ignore[arg-type]
    print(table(rows))
    store = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}"
    print(
        f"\n{arguments.requests} requests, {arguments.encoders} encoders, {store}, "
        f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, {time.monotonic() - begun_s:.0f} s"
    )
    return 0


def out_of_time(number: int, frame: FrameType | None) -> None:
    raise SystemExit(f"encoder_skew: not done after {LONGEST_S} s")


def at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, not {text!r}")
        return int(text)

    return parse


EPILOG = f"""
The table has the items that each encoder got; the greatest difference between two encoders at the end; and the
greatest in any {WINDOW} consecutive assignments, which is what a burst feels like. A perfect round robin over 3
encoders has 0 or 1 everywhere. The figures of `process` change from run to run, since it is chance which worker
gets which request; they grow with the number of workers, which all begin at encoder 0. Those of `shared` stay.

examples:
  python -m bench.encoder_skew --quick
  python -m bench.encoder_skew --workers 16 --encoders 5 --requests 500
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.encoder_skew",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--quick", action="store_true", help="1 and 4 workers, 60 requests: a few seconds")
    made.add_argument(
        "--workers", type=at_least(1), nargs="+", default=list(WORKERS), metavar="N",
        help="numbers of worker processes, one after the other (default: 1 2 4 8)",
    )  # fmt: skip
    made.add_argument(
        "--requests", type=at_least(1), default=300, metavar="N", help="of each run (default: %(default)s)"
    )
    made.add_argument("--encoders", type=at_least(2), default=3, metavar="N", help="default: %(default)s")
    made.add_argument("--seed", type=int, default=1, help="of the order of request sizes (default: %(default)s)")
    made.add_argument("--as-worker", nargs=3, help=argparse.SUPPRESS)
    return made


def main() -> int:
    arguments = parser().parse_args()
    if arguments.as_worker:
        url, name, encoders = arguments.as_worker
        asyncio.run(work(url, name, int(encoders)))
        return 0
    if arguments.quick:
        arguments.workers, arguments.requests = [1, 4], 60
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
