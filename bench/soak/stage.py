"""What the soak runs on: a private Redis behind a road, two masters, four engines; and who is being hurt just now."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any, Self

from bench.soak.engine import MODEL, EngineProcess
from tests.support.deployment import Deployment
from tests.support.http import Reply
from tests.support.quiet import MAY_STAY, counts
from tests.support.redis import PrivateRedis, Space, TcpProxy
from tests.support.wait import eventually

ENGINES, MASTERS, WORKERS = 4, 2, 2
NAMESPACE = "chaos"
LEASE_S = 3.0
SETTINGS: dict[str, Any] = {  # shorter than the defaults, so that many faults fit into five minutes
    "lease_s": LEASE_S,
    "redis_timeout_s": 0.5,
    "probe_interval_s": 1,
    "first_byte_timeout_s": 3,
    "idle_timeout_s": 4,
    "connect_timeout_s": 2,
    "breaker_open_s": 2,
    "grace_s": 6,
}
ADMIN_WITHIN_S = 20.0
RECOVER_WITHIN_S = 30.0
QUIET_WITHIN_S = LEASE_S + 3.0
PER_WORKER = ("unfinished:",)
PER_NODE = ("node:", "latency:", "stages:")


class Stage:
    """Starts at once; a context manager."""

    def __init__(self) -> None:
        self._taken: set[str] = set()  # engines that a fault has to itself
        self._lock = threading.Lock()
        self._stack = ExitStack()
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def _start(self) -> None:
        self.redis = self._stack.enter_context(PrivateRedis())
        self.space = Space(self.redis, NAMESPACE)
        self.road = self._stack.enter_context(TcpProxy(self.redis.socket))
        with ThreadPoolExecutor(ENGINES + MASTERS) as pool:
            masters = [
                pool.submit(Deployment, WORKERS, redis=self.road.url, namespace=NAMESPACE, settings=SETTINGS)
                for _ in range(MASTERS)
            ]
            engines = [pool.submit(EngineProcess) for _ in range(ENGINES)]
        for master in masters:
            if master.exception() is None:
                self._stack.callback(master.result().close)
        for engine in engines:
            if engine.exception() is None:
                self._stack.callback(engine.result().close)
        self.masters = [master.result() for master in masters]
        self.engines = [engine.result() for engine in engines]
        for one in self.engines:
            self.add(one)
        self.recover()

    # --- whom a fault hurts

    @contextmanager
    def engine(self, rng: random.Random) -> Iterator[EngineProcess]:
        """One that no other fault has."""
        with self._lock:
            chosen = rng.choice([engine for engine in self.engines if engine.url not in self._taken])
            self._taken.add(chosen.url)
        try:
            yield chosen
        finally:
            with self._lock:
                self._taken.discard(chosen.url)

    def add(self, engine: EngineProcess, **status: Any) -> None:
        self.admin("/nodes/add", {"url": engine.url, "status": {"models": [MODEL], **status}})

    def admin(self, path: str, value: dict[str, Any]) -> None:
        """Said to whichever master takes it; it may have to wait until Redis is back."""

        def say() -> bool:
            refused: list[Reply] = []
            for master in self.masters:
                with suppress(OSError, http.client.HTTPException):
                    reply = master.post(path, value, timeout_s=3)
                    if reply.status == 200:
                        return True
                    refused.append(reply)
            raise AssertionError(f"{path}: {refused}")

        eventually(say, within_s=ADMIN_WITHIN_S, every_s=0.3)

    # --- back to normal

    def recover(self) -> None:
        """All engines ready in the eyes of all, all workers there. Raises AssertionError."""
        urls = {engine.url for engine in self.engines}

        def well() -> bool:
            for master in self.masters:
                pids = master.worker_pids()
                assert len(pids) == WORKERS, f"{master} has the workers {pids}"
                with suppress(OSError, http.client.HTTPException):
                    states = {url: node["state"] for url, node in master.nodes("?all=1", timeout_s=2).items()}
                    assert states == dict.fromkeys(urls, "ready"), states
                    assert master.get("/ready", timeout_s=2).status == 200, "not ready"
                    continue
                raise AssertionError(f"{master} does not answer")
            return True

        eventually(well, within_s=RECOVER_WITHIN_S, every_s=0.3)

    # --- what is left over

    def left_over(self) -> list[str]:
        """What should not be there when all clients have left; first it may take a lease to go."""
        deadline_s = time.monotonic() + QUIET_WITHIN_S
        while (noise := self._noise()) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        return noise

    def _noise(self) -> list[str]:
        noise = [f"{name} {url} is {n}" for name, held in counts(self.space).items() for url, n in held.items() if n]
        noise += [
            f"engine {engine.url} has {engine.in_flight} in flight" for engine in self.engines if engine.in_flight
        ]
        names = self.space.key_names()
        workers = set(self.space.cli("ZRANGE", self.space.key("workers"), 0, -1))
        nodes = set(self.space.cli("SMEMBERS", self.space.key("nodes")))
        for name in names:
            if not MAY_STAY.fullmatch(name):
                noise.append(f"a key that should not be there: {name}")
            elif self._is_of_nobody(name, PER_WORKER, workers):
                noise.append(f"a key of a worker that is no more: {name}")
            elif self._is_of_nobody(name, PER_NODE, nodes):
                noise.append(f"a key of a node that is no more: {name}")
        return noise

    def _is_of_nobody(self, name: str, prefixes: Sequence[str], owners: set[str]) -> bool:
        for prefix in prefixes:
            if name.startswith(prefix) and name.removeprefix(prefix) not in owners:
                return bool(self.space.cli("TTL", self.space.key(name)) == -1)  # -1: it would stay for ever
        return False

    def stop(self) -> list[str]:
        """End all masters as an operator would; what they left behind."""
        noise = []
        with ThreadPoolExecutor(MASTERS) as pool:
            stopping = [(master, pool.submit(master.stop)) for master in self.masters]
        for master, stopped in stopping:
            if e := stopped.exception():
                noise.append(f"{master.url}: {str(e).splitlines()[0]}")
            elif code := stopped.result():
                noise.append(f"{master.url} ended with {code}")
            noise += [f"a process that was left behind: {line}" for line in master.left_behind]
        workers = self.space.cli("ZRANGE", self.space.key("workers"), 0, -1)
        noise += [f"a worker that is still listed: {worker}" for worker in workers]
        return noise + self._noise()

    def tracebacks(self) -> list[str]:
        """Last lines of tracebacks in the masters' logs: none of the faults is worth one."""
        found = []
        for master in self.masters:
            lines = master.log().splitlines()
            for i, line in enumerate(lines):
                if line.startswith("Traceback"):
                    end = next((x for x in lines[i + 1 :] if x and not x.startswith((" ", "\t"))), "?")
                    found.append(end[:200])
        return found
