"""The faults, each a file of one function's length: what is done, for how long, and what it may cost a user.

`costs` says which sights of a client a kind explains (beginnings of `Result.saw`): a failure that no fault explains
is a finding. Kinds without any must not cost a request at all.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass

from bench.soak.load import Load
from bench.soak.stage import LEASE_S, Stage
from tests.support.deployment import Deployment
from tests.support.wait import eventually

RELOAD_WITHIN_S = 40.0
ERROR_EVENT = "stream ended by an error event, engine_"
CUT_BODY = ("502 engine_broke_off", "answer cut short")  # before and after the head of an answer that is no stream
LOST = ("stream cut", "answer cut short", "connection lost", "a kept connection closed")

Fault = Callable[[Stage, Load, random.Random], AbstractContextManager[str]]


@dataclass(frozen=True)
class Kind:
    """Args:
    lane: faults of one lane never overlap.
    hold_s: shortest and longest time between its two halves.
    costs: what clients may see of it.
    parts: whether the counts may differ from the engines while it is on.
    """

    name: str
    lane: str
    hold_s: tuple[float, float]
    fault: Fault
    costs: tuple[str, ...] = ()
    parts: bool = False


# --- engines


def _knobs(**knobs: object) -> Fault:
    @contextmanager
    def fault(stage: Stage, load: Load, rng: random.Random) -> Iterator[str]:
        with stage.engine(rng) as engine:
            engine.set(**knobs)
            try:
                yield engine.url
            finally:
                normal = {"refuse": False, "cut_after": None, "eof_after": None, "stall_after": None, "status": 200}
                engine.set(**normal, ttft_s=0.05, gap_s=0.03)

    return fault


@contextmanager
def _engine_stopped(stage: Stage, load: Load, rng: random.Random) -> Iterator[str]:
    with stage.engine(rng) as engine:
        engine.stop()
        try:
            yield engine.url
        finally:
            engine.resume()


@contextmanager
def _engine_killed(stage: Stage, load: Load, rng: random.Random) -> Iterator[str]:
    with stage.engine(rng) as engine:
        engine.kill()
        try:
            yield engine.url
        finally:
            engine.begin()
            engine.wait()


# --- workers and hosts


def _worker(master: Deployment, rng: random.Random) -> int:
    return rng.choice(master.worker_pids() or [master.master_pid()])


def _wait_for_workers(master: Deployment, without: Sequence[int]) -> None:
    """Not `Deployment.wait_for_workers`: a look at all processes every 10 ms would slow down the load beside it."""

    def renewed() -> bool:
        pids = master.worker_pids()
        return len(pids) == master.workers and not set(pids) & set(without)

    eventually(renewed, within_s=RELOAD_WITHIN_S, every_s=0.3)


def _signal_to_worker(number: int) -> Fault:
    @contextmanager
    def fault(stage: Stage, load: Load, rng: random.Random) -> Iterator[str]:
        master = rng.choice(stage.masters)
        pid = _worker(master, rng)
        os.kill(pid, number)
        yield str(pid)
        _wait_for_workers(master, [pid])

    return fault


@contextmanager
def _worker_stopped(stage: Stage, load: Load, rng: random.Random) -> Iterator[str]:
    pid = _worker(rng.choice(stage.masters), rng)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield str(pid)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def _reload(stage: Stage, load: Load, rng: random.Random) -> Iterator[str]:
    master = rng.choice(stage.masters)
    before = master.worker_pids()
    os.kill(master.master_pid(), signal.SIGHUP)
    yield master.url
    _wait_for_workers(master, before)


@contextmanager
def _host_killed(stage: Stage, load: Load, rng: random.Random) -> Iterator[str]:
    master = rng.choice(stage.masters)
    master.kill()
    try:
        yield master.url
    finally:
        master.start()


# --- Redis


@contextmanager
def _redis_slow(stage: Stage, load: Load, rng: random.Random) -> Iterator[str]:
    stage.road.delay_s = 0.2
    try:
        yield ""
    finally:
        stage.road.delay_s = 0.0


@contextmanager
def _redis_frozen(stage: Stage, load: Load, rng: random.Random) -> Iterator[str]:
    stage.redis.pause()
    try:
        yield ""
    finally:
        stage.redis.resume()


@contextmanager
def _redis_restarted(stage: Stage, load: Load, rng: random.Random) -> Iterator[str]:
    stage.redis.kill()
    try:
        yield ""
    finally:
        stage.redis.start()


@contextmanager
def _redis_cut(stage: Stage, load: Load, rng: random.Random) -> Iterator[str]:
    stage.road.cut()
    yield ""


def _redis_told(*words: str, after: tuple[str, ...] = ()) -> Fault:
    @contextmanager
    def fault(stage: Stage, load: Load, rng: random.Random) -> Iterator[str]:
        stage.redis.cli(*words)
        try:
            yield ""
        finally:
            if after:
                stage.redis.cli(*after)

    return fault


# --- nodes


@contextmanager
def _node_drained(stage: Stage, load: Load, rng: random.Random) -> Iterator[str]:
    with stage.engine(rng) as engine:
        stage.admin("/nodes/remove", {"url": engine.url, "drain": True, "timeout_s": 20})
        try:
            yield engine.url
        finally:
            stage.add(engine)


@contextmanager
def _node_removed(stage: Stage, load: Load, rng: random.Random) -> Iterator[str]:
    with stage.engine(rng) as engine:
        stage.admin("/nodes/remove", {"url": engine.url})
        try:
            yield engine.url
        finally:
            stage.add(engine)


@contextmanager
def _node_readded(stage: Stage, load: Load, rng: random.Random) -> Iterator[str]:
    """Removed and added at once, under running requests, and again."""
    with stage.engine(rng) as engine:
        for _ in range(3):
            stage.admin("/nodes/remove", {"url": engine.url})
            stage.add(engine)
        yield engine.url


# --- clients


@contextmanager
def _clients_leave(stage: Stage, load: Load, rng: random.Random) -> Iterator[str]:
    before, load.leaving = load.leaving, 0.5
    try:
        yield ""
    finally:
        load.leaving = before


@contextmanager
def _clients_slow(stage: Stage, load: Load, rng: random.Random) -> Iterator[str]:
    before, load.slow = load.slow, 4
    try:
        yield ""
    finally:
        load.slow = before


KINDS = {
    kind.name: kind
    for kind in (
        Kind("engine refuses", "engine", (2, 5), _knobs(refuse=True)),
        Kind("engine resets before the head", "engine", (2, 5), _knobs(cut_after=-1)),
        Kind("engine answers 500", "engine", (2, 5), _knobs(status=500)),
        Kind("engine answers 503", "engine", (2, 5), _knobs(status=503)),
        Kind("engine hangs before the first byte", "engine", (3, 6), _knobs(stall_after=-1)),
        Kind("engine resets mid-stream", "engine", (2, 5), _knobs(cut_after=3), (ERROR_EVENT, *CUT_BODY)),
        Kind("engine ends without [DONE]", "engine", (2, 5), _knobs(eof_after=3), (ERROR_EVENT, *CUT_BODY)),
        Kind(
            "engine hangs mid-stream", "engine", (2, 5), _knobs(stall_after=3),
            (ERROR_EVENT, "504 engine_timeout", "answer cut short"),
        ),
        Kind("engine is slow", "engine", (3, 6), _knobs(ttft_s=1.0, gap_s=0.1)),
        Kind(
            "engine SIGSTOP", "engine", (2, 7), _engine_stopped, (ERROR_EVENT, "answer cut short"), parts=True
        ),
        Kind("engine kill -9, restarted", "engine", (1, 4), _engine_killed, (ERROR_EVENT, *CUT_BODY), parts=True),
        Kind("worker kill -9", "worker", (1, 2), _signal_to_worker(signal.SIGKILL), LOST, parts=True),
        Kind(
            "worker SIGSTOP beyond its lease", "worker", (LEASE_S + 1.5, LEASE_S + 3), _worker_stopped, (),
            parts=True,
        ),
        Kind("worker SIGTERM", "worker", (1, 2), _signal_to_worker(signal.SIGTERM)),
        Kind("master SIGHUP", "worker", (1, 2), _reload),
        Kind("host killed, restarted", "worker", (1, 4), _host_killed, LOST, parts=True),
        Kind("Redis 200 ms slow", "redis", (3, 6), _redis_slow, parts=True),
        Kind("Redis frozen", "redis", (2, 6), _redis_frozen, parts=True),
        Kind("Redis killed, restarted empty", "redis", (0.5, 4), _redis_restarted, parts=True),
        Kind("Redis connections reset", "redis", (0.5, 1), _redis_cut, parts=True),
        Kind("SCRIPT FLUSH", "redis", (0.5, 1), _redis_told("SCRIPT", "FLUSH")),
        Kind("FLUSHALL", "redis", (0.5, 1), _redis_told("FLUSHALL"), parts=True),
        Kind(
            "Redis read-only", "redis", (2, 5),
            _redis_told("REPLICAOF", "127.0.0.1", "1", after=("REPLICAOF", "NO", "ONE")), parts=True,
        ),
        Kind(
            "Redis full", "redis", (2, 5),
            _redis_told("CONFIG", "SET", "maxmemory", "1", after=("CONFIG", "SET", "maxmemory", "0")), parts=True,
        ),
        Kind("node drained, added", "node", (2, 4), _node_drained),
        Kind("node removed, added", "node", (1, 3), _node_removed),
        Kind("node removed and added at once", "node", (1, 2), _node_readded),
        Kind("clients leave at random", "client", (4, 8), _clients_leave),
        Kind("clients read slowly", "client", (4, 8), _clients_slow),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """What two faults cost together, which neither does alone: at least one of each side has to be on.

    The second may have ended so long before as its effect lasts.
    """

    name: str
    first: frozenset[str]
    second: frozenset[str]
    costs: tuple[str, ...]
    second_lasts_s: float = 0.0


def _lane(name: str) -> frozenset[str]:
    return frozenset(kind.name for kind in KINDS.values() if kind.lane == name)


# Redis can't be asked or written, or is another one than before.
_REDIS_AWAY = _lane("redis") - {"SCRIPT FLUSH"}
PAIRS = (
    # While Redis is away each worker has to learn by itself of an engine that fails at once, and pays for it from
    # its share of the floor.
    Pair(
        "the retry budget is used up",
        frozenset({"engine resets before the head", "engine answers 500", "engine answers 503"}), _REDIS_AWAY,
        ("502 engine_broke_off", "500 scripted", "503 scripted"), second_lasts_s=10.0,
    ),
)  # fmt: skip


@dataclass
class Window:
    """A fault that was on: from its first half on, until its second half was done."""

    kind: Kind
    target: str
    began_s: float
    ended_s: float | None = None

    def __str__(self) -> str:
        return f"{self.kind.name} {self.target.rpartition('/')[2]}".strip()

    def excuses_until_s(self) -> float:
        """Until when it may part the counts from the engines: its end, but not before a lease's end."""
        if self.ended_s is None:
            return float("inf")
        return max(self.ended_s, self.began_s + LEASE_S + 1.0)


class Windows:
    """All faults so far. Appended to by the lanes' threads, read by the others."""

    def __init__(self) -> None:
        self.all: list[Window] = []

    @contextmanager
    def hurt(self, kind: Kind, stage: Stage, load: Load, rng: random.Random) -> Iterator[None]:
        window = Window(kind, "", time.monotonic())
        self.all.append(window)
        try:
            with kind.fault(stage, load, rng) as window.target:
                yield
        finally:
            window.ended_s = time.monotonic()

    def on(self) -> list[Window]:
        return [window for window in self.all if window.ended_s is None]
