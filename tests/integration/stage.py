"""What the integration tests stand on: deployments that several tests share, and load that runs beside a test.

A deployment takes a second or more to start and a test mostly waits for others, so the tests of a file share one
wherever the settings allow. What keeps them apart is the model: each test's engines serve one of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import pytest

from tests.support import load
from tests.support.deployment import ROOT, Deployment
from tests.support.engine import SimulatedEngine
from tests.support.http import Reply
from tests.support.loop import LoopThread
from tests.support.process import Process
from tests.support.quiet import quiet_check
from tests.support.redis import PrivateRedis, Space
from tests.support.template import Template
from tests.support.wait import eventually

T = TypeVar("T")

EngineFactory = Callable[..., SimulatedEngine]

PROBE_INTERVAL_S, LEASE_S = 1.0, 2.0
FIRST_BYTE_S = 6.0
# Prefill and decode on vLLM or SGLang, beside the protocol between them.
PD_CONNECT_S, PD_PREFILL_S, PD_FIRST_BYTE_S = 1.0, 4.0, 1.5
PD_SETTINGS: dict[str, Any] = {
    "serving_strategy": "DistServe",
    "probe_interval_s": 1,
    "lease_s": 2,
    "connect_timeout_s": PD_CONNECT_S,
    "prefill_timeout_s": PD_PREFILL_S,
    "first_byte_timeout_s": PD_FIRST_BYTE_S,
}
# Two hosts, with times that a test can wait for.
TWO_HOSTS: dict[str, Any] = {
    "masters": 2,
    "workers": 2,
    "settings": {"probe_interval_s": PROBE_INTERVAL_S, "lease_s": LEASE_S, "first_byte_timeout_s": FIRST_BYTE_S},
}


class Fleet:
    """Deployments of one file, by name: started at first use, again if a test left one dead, stopped at the end.

    Args:
        masters: so many gunicorn masters a deployment, as on so many hosts.
    """

    def __init__(self, server: PrivateRedis, *, masters: int = 1, **deployment: Any) -> None:
        self.server = server
        self._masters = masters
        self._options = deployment
        self._running: dict[str, tuple[Space, list[Deployment]]] = {}
        self._lock = threading.Lock()

    def get(self, name: str = "") -> tuple[Space, list[Deployment]]:
        self.server.ensure_running()
        with self._lock:
            held = self._running.get(name)
            if held is None or not all(d.process is not None and d.process.running for d in held[1]):
                if held is not None:
                    _close(held[1])
                space = Space(self.server, f"t{secrets.token_hex(6)}")
                options = {"redis": space, "namespace": space.namespace, **self._options}
                self._running[name] = space, [Deployment(**options) for _ in range(self._masters)]
            return self._running[name]

    def close(self) -> None:
        """Raises AssertionError: something counts still, or a process was left behind."""
        masters = [master for _, held in self._running.values() for master in held]
        running = [master for master in masters if master.process is not None and master.process.running]
        try:
            for space, _ in self._running.values():
                quiet_check(space)
            with ThreadPoolExecutor(len(running) or 1) as pool:
                assert all(code == 0 for code in pool.map(Deployment.stop, running))
            left = [line for master in masters for line in master.left_behind]
            assert not left, f"processes left behind: {left}"
        finally:
            _close(masters)
            for space, _ in self._running.values():
                space.clear()


class Fleets:
    """Fleets by their options, for the files of one group at a time (`SHARING` in tests/conftest.py)."""

    def __init__(self) -> None:
        self._group = ""
        self._made: dict[str, Fleet] = {}

    def get(self, group: str, server: PrivateRedis, **options: Any) -> Fleet:
        if group != self._group:
            self.close()
            self._group = group
        name = json.dumps([id(server), options], sort_keys=True)
        if name not in self._made:
            self._made[name] = Fleet(server, **options)
        return self._made[name]

    def close(self) -> None:
        made, self._made = self._made, {}
        with contextlib.ExitStack() as stack:  # all of them, though one fails
            for fleet in made.values():
                stack.callback(fleet.close)


def _close(masters: Sequence[Deployment]) -> None:
    for master in masters:
        master.close()


class Stage:
    """One test's part of a shared deployment: a model of its own, its engines and what counts on them."""

    def __init__(self, space: Space, masters: Sequence[Deployment], make: EngineFactory) -> None:
        self.space = space
        self.masters = list(masters)
        self.deployment = self.masters[0]
        self.urls = [master.url for master in self.masters]
        self.model = f"model-{secrets.token_hex(4)}"
        self.make = make
        self.made: list[SimulatedEngine] = []

    def engine(self, *, speed: float | None = None, ready: bool = True, **knobs: Any) -> SimulatedEngine:
        return self.engines(1, speeds=[speed], ready=ready, **knobs)[0]

    def engines(
        self, count: int, *, speeds: Sequence[float | None] = (), ready: bool = True, **knobs: Any
    ) -> list[SimulatedEngine]:
        """Started and registered, all ready; `speeds` one by one."""
        made = [self.make(**({"models": (self.model,)} | knobs)) for _ in range(count)]
        self.made += made
        for i, engine in enumerate(made):
            status: dict[str, Any] = {"speed": speeds[i]} if speeds and speeds[i] else {}
            self.deployment.add(engine, ready=False, **status)
        if ready:
            self.deployment.wait_for_state("ready", *made)
            for other in self.masters[1:]:
                other.wait_for_state("ready", *made)
        return made

    def counts(self, *engines: SimulatedEngine) -> tuple[int, ...]:
        """Unfinished of each (default: all of the test), read from Redis in one command."""
        urls = [engine.url for engine in engines or self.made]
        if not urls:
            return ()
        return tuple(int(n or 0) for n in self.space.client.hmget(self.space.key("unfinished"), urls))

    def worker_ids(self) -> list[str]:
        found: list[str] = self.space.cli("ZRANGE", self.space.key("workers"), 0, -1)
        return found

    def id_of(self, pid: int) -> str:
        """The id that a worker process has in Redis: `<host>-<pid>-<random>`."""

        def look() -> str:
            found = [worker for worker in self.worker_ids() if worker.split("-")[-2] == str(pid)]
            assert len(found) == 1, f"{pid} in {self.worker_ids()}"
            return found[0]

        return eventually(look, within_s=5)  # one that has just started may not have joined yet

    def share(self, worker: str, engine: SimulatedEngine) -> int:
        """What one worker's ledger in Redis says about a node."""
        return int(self.space.cli("HGET", self.space.key(f"unfinished:{worker}"), engine.url) or 0)

    def state(self, engine: SimulatedEngine, deployment: Deployment | None = None) -> str | None:
        found: str | None = (deployment or self.deployment).nodes("?all=1").get(engine.url, {}).get("state")
        return found

    def many(self, n: int, **options: Any) -> Future[list[load.Answer]]:
        """`n` chats over all masters, in the background."""
        return start(load.many(self.urls, n, **({"model": self.model} | options)))

    def traffic(self, **options: Any) -> Traffic:
        return Traffic(self.urls, **({"model": self.model} | options))

    def close(self, *, alone: bool = True) -> None:
        """The quiet check, and none of the test's nodes stays; not `alone`: others run on the deployment still."""
        try:
            if alone:
                quiet_check(self.space, engines=self.made)
            else:
                eventually(lambda: not any(self.counts()) and not any(engine.in_flight for engine in self.made))
        finally:
            self.leave()

    def leave(self) -> None:
        """Remove the test's nodes; nothing to do if they are removed."""
        while self.made:
            eventually(lambda: self._removed(self.made[-1].url))
            self.made.pop()

    def _removed(self, url: str) -> bool:
        reply = self.deployment.post("/nodes/remove", {"url": url})
        assert reply.status == 200, reply
        return True


@contextlib.contextmanager
def staged(space: Space, masters: Sequence[Deployment], make: EngineFactory) -> Iterator[Stage]:
    """A stage, closed properly if the test went well, else left to the next quiet moment of the deployment."""
    stage = Stage(space, masters, make)
    yield stage
    space.server.ensure_running()
    stage.close()


class Bench:
    """What a scenario has that starts deployments and processes of its own: all of it ends with the scenario."""

    def __init__(self, server: PrivateRedis, loop: LoopThread) -> None:
        self.space = Space(server, f"t{secrets.token_hex(6)}")
        self.directory = Path(tempfile.mkdtemp(prefix="evenhand-bench-"))
        self._loop = loop
        self._engines: list[SimulatedEngine] = []
        self._deployments: list[Deployment] = []
        self._processes: list[Process] = []

    def engine(self, **knobs: Any) -> SimulatedEngine:
        self._engines.append(SimulatedEngine(loop=self._loop, **knobs))
        return self._engines[-1]

    def deployment(self, workers: int, **options: Any) -> Deployment:
        """On the Redis of the bench, unless told otherwise."""
        self._deployments.append(Deployment(workers, **({"redis": self.space} | options)))
        return self._deployments[-1]

    def process(
        self, name: str, words: Sequence[str], env: Mapping[str, str], *, template: Template | None = None
    ) -> Process:
        made = Process(words, log_file=self.directory / name, env=env, cwd=ROOT, template=template)
        self._processes.append(made)
        return self._processes[-1]

    def end(self) -> None:
        """Raises AssertionError: something counts still, or a process was left behind."""
        quiet_check(self.space, engines=self._engines)
        for deployment in self._deployments:
            if deployment.process is not None and deployment.process.running:
                deployment.stop()
        left = [line for deployment in self._deployments for line in deployment.left_behind]
        left += [line for process in self._processes for line in process.left_behind]
        assert not left, f"processes left behind: {left}"

    def clear(self) -> None:
        for ending in [d.close for d in self._deployments] + [e.close for e in self._engines]:
            ending()
        for process in self._processes:
            process.kill()
        self.space.clear()
        shutil.rmtree(self.directory, ignore_errors=True)


MOSTLY_STREAM = pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.wide), True])


def each_once_and_all_wide(cases: Iterable[object], variants: Sequence[object] = (False, True)) -> list[Any]:
    """(case, variant) for `parametrize`: each case in one of the variants, in turn; in the others it is wide."""
    return [
        pytest.param(case, variant, marks=() if i % len(variants) == j else pytest.mark.wide)
        for i, case in enumerate(cases)
        for j, variant in enumerate(variants)
    ]


P = TypeVar("P", Stage, Bench)
Outcomes = dict[str, Future[None]]
Place = Callable[[str], AbstractContextManager[P]]
_SCENARIO, _ON = "evenhand_scenario", "evenhand_on"


def beside(scenario: Callable[[P], None], *, on: str = "") -> Callable[[Outcomes], None]:
    """Make a test of a scenario that mostly waits: those of one file run beside each other.

    The file has a fixture `outcomes` that yields from `run_beside`. `on` names the deployment, if there are several.
    """

    def test(outcomes: Outcomes) -> None:
        outcomes[scenario.__name__].result(0)

    setattr(test, _SCENARIO, scenario)
    setattr(test, _ON, on)
    test.__doc__ = scenario.__doc__
    return test


def run_beside(request: pytest.FixtureRequest, place: Place[P], *, at_once: int = 32) -> Iterator[Outcomes]:
    """Run the scenarios of the file that were selected; they have ended when this yields.

    Args:
        place: gives each what it runs on, by the name given to `beside`.
        at_once: so many at a time.
    """

    def run(scenario: Callable[[P], None], on: str) -> None:
        with place(on) as given:
            scenario(given)

    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    tests = [item.function for item in items if item.module is request.module and hasattr(item.function, _SCENARIO)]
    scenarios = {getattr(test, _SCENARIO): getattr(test, _ON) for test in tests}
    with ThreadPoolExecutor(min(at_once, len(scenarios))) as pool:
        outcomes = {scenario.__name__: pool.submit(run, scenario, on) for scenario, on in scenarios.items()}
    yield outcomes


def stages(get: Callable[[str], tuple[Space, list[Deployment]]], loop: LoopThread) -> Place[Stage]:
    """Places on shared deployments, for scenarios that run beside others on them."""

    @contextlib.contextmanager
    def place(on: str) -> Iterator[Stage]:
        made: list[SimulatedEngine] = []

        def make(**options: Any) -> SimulatedEngine:
            made.append(SimulatedEngine(loop=loop, **options))
            return made[-1]

        stage = Stage(*get(on), make)
        try:
            yield stage
            stage.close(alone=False)
        finally:
            stage.leave()
            for engine in made:
                engine.close()

    return place


def benches(server: PrivateRedis, loop: LoopThread) -> Place[Bench]:
    @contextlib.contextmanager
    def place(on: str) -> Iterator[Bench]:
        bench = Bench(server, loop)
        try:
            yield bench
            bench.end()
        finally:
            bench.clear()

    return place


def start(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Run `work` in a loop and a thread of its own; the test goes on beside it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(asyncio.run(work))
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return future


class Traffic:
    """Chats at a steady pace while the block runs, whatever happens to those before; `answers` as they end."""

    def __init__(self, urls: Sequence[str], *, every_s: float = 0.02, **options: Any) -> None:
        self.answers: list[load.Answer] = []
        self._urls = urls
        self._every_s = every_s
        self._options = options
        self._over = threading.Event()
        self._running: Future[None] | None = None

    def __enter__(self) -> Self:
        self._running = start(self._run())
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        assert self._running is not None
        self._running.result(60)

    @property
    def failed(self) -> list[tuple[int, Exception | None, bytes]]:
        return [(a.status, a.error, a.body) for a in self.answers if not a.ok]

    def since(self, at_s: float) -> list[load.Answer]:
        """Those that were asked after `at_s` and have ended."""
        return [answer for answer in self.answers if answer.started_s >= at_s]

    async def _run(self) -> None:
        due_s = time.monotonic()
        number = 0
        async with load.session(keep_alive=False) as client, asyncio.TaskGroup() as group:
            while not self._over.is_set():
                group.create_task(self._one(self._urls[number % len(self._urls)], client))
                number += 1
                due_s += self._every_s
                await asyncio.sleep(max(due_s - time.monotonic(), 0))

    async def _one(self, url: str, client: Any) -> None:
        self.answers.append(await load.chat(url, client=client, **self._options))


class Lane:
    """A connection that stays with one worker."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        self.get("/health")

    def get(self, path: str) -> Reply:
        self._connection.request("GET", path)
        return self._reply()

    def chat(self, model: str, **fields: Any) -> Reply:
        self._ask(model, fields)
        return self._reply()

    def stream(self, model: str, **fields: Any) -> http.client.HTTPResponse:
        """Its head has come; the rest waits in the socket until it is read."""
        self._ask(model, {"stream": True, **fields})
        return self._connection.getresponse()

    def close(self) -> None:
        self._connection.close()

    def _ask(self, model: str, fields: Mapping[str, Any]) -> None:
        value = {"model": model, "messages": [{"role": "user", "content": "hello"}], **fields}
        headers = {"content-type": "application/json"}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(value), headers)

    def _reply(self) -> Reply:
        answer = self._connection.getresponse()
        return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())


@contextlib.contextmanager
def lanes(deployment: Deployment, pid: int, count: int) -> Iterator[list[Lane]]:
    """`count` connections that the worker `pid` took; the others stand still while they are made."""
    others = [other for other in deployment.worker_pids() if other != pid]
    made: list[Lane] = []
    try:
        with frozen(*others):
            made += [Lane(deployment.port) for _ in range(count)]
        yield made
    finally:
        for lane in made:
            lane.close()


@contextlib.contextmanager
def frozen(*pids: int) -> Iterator[None]:
    """The processes stand still (SIGSTOP) while the block runs."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            eventually(lambda pid=pid: state_of(pid) == "T")  # type: ignore[misc]
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def state_of(pid: int) -> str:
    """The kernel's letter for what a process does: R, S, T (stopped), Z, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def during(for_s: float, *, every_s: float = 0.02) -> Iterator[float]:
    """Moments to look at something that must hold for `for_s`; each one's distance from the first."""
    begun_s = time.monotonic()
    while (past_s := time.monotonic() - begun_s) < for_s:
        yield past_s
        time.sleep(every_s)
