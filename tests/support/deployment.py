"""A real deployment: `python -m app.cli serve` with real gunicorn workers, on a free port of loopback."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.engine import SimulatedEngine
from tests.support.http import Reply, request
from tests.support.process import Process, children, command
from tests.support.quiet import quiet_check
from tests.support.redis import PrivateRedis, Space
from tests.support.template import TEMPLATE
from tests.support.wait import eventually

__all__ = ["Deployment", "quiet_check"]

ROOT = Path(__file__).resolve().parents[2]
START_WITHIN_S = 40.0
STOP_WITHIN_S = 15.0

Setting = str | int | float | bool | Sequence[str] | None


class Deployment:
    """One master and its workers. Starts at once and answers `/health` when the constructor returns.

    Args:
        redis: where the shared state is; None: the embedded one, in a state directory of its own.
        namespace: by default that of `redis`, if it is a Space.
        settings: options of `serve` by field name: {"grace_s": 5, "api_keys": ["a", "b"], "ssl": True};
            True is a bare flag, False and None leave it out, a list gives several values.
        env: environment variables beside; EVENHAND_* of the test's own environment are not passed on.
        wait: False: do not wait for `/health`.
        own_python: start real interpreters, not forks of the template; by default where `env` could matter to them.
    """

    def __init__(
        self,
        workers: int = 2,
        *,
        redis: PrivateRedis | Space | str | None = None,
        namespace: str | None = None,
        settings: Mapping[str, Setting] | None = None,
        env: Mapping[str, str] | None = None,
        wait: bool = True,
        own_python: bool | None = None,
    ) -> None:
        self._own_python = bool(env) if own_python is None else own_python
        self.workers = workers
        self.redis = redis
        self.namespace = namespace or (redis.namespace if isinstance(redis, Space) else "test")
        self.settings = dict(settings or {})
        self.env = dict(env or {})
        self.directory = Path(tempfile.mkdtemp(prefix="evenhand-deployment-"))
        # Bound, never listening: the port stays ours over a restart, and nobody else is given it.
        self._port_holder = socket.socket()
        self._port_holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port_holder.bind(("127.0.0.1", 0))
        self.port: int = self._port_holder.getsockname()[1]
        self.url = f"http{'s' if self.settings.get('ssl') else ''}://127.0.0.1:{self.port}"
        self.process: Process | None = None
        self.left_behind: list[str] = []
        self.others: list[Deployment] = []  # made by `second_master`; closed with this one
        try:
            self.start(wait=wait)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<Deployment {self.url} {self.process}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def space(self) -> Space | None:
        """Its namespace on its private Redis, if it has one."""
        if isinstance(self.redis, Space):
            return Space(self.redis.server, self.namespace)
        return Space(self.redis, self.namespace) if isinstance(self.redis, PrivateRedis) else None

    # --- life

    def start(self, *, wait: bool = True) -> None:
        """Start it (again), on the same port."""
        assert self.process is None or not self.process.running, "it runs"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("EVENHAND_")}
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        env = inherited | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))} | self.env
        template = None if self._own_python else TEMPLATE
        self.process = Process(self.command(), log_file=self.directory / "log", env=env, cwd=ROOT, template=template)
        if wait:
            self.wait_for_health()

    def command(self) -> list[str]:
        words = [sys.executable, "-m", "app.cli", "serve", "--server-name", "127.0.0.1"]
        words += ["--server-port", str(self.port), "--workers", str(self.workers), "--namespace", self.namespace]
        if self.redis is not None:
            words += ["--redis-url", self.redis if isinstance(self.redis, str) else self.redis.url]
        settings: dict[str, Setting] = {"state_dir": str(self.directory / "state")} | self.settings
        for name, value in settings.items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                words.append(flag)
            elif isinstance(value, (list, tuple)):
                words += [flag, *value] if value else []
            elif value is not None and value is not False:
                words += [flag, str(value)]
        return words

    def wait_for_health(self, within_s: float = START_WITHIN_S) -> None:
        assert self.process is not None
        deadline_s = time.monotonic() + within_s
        while True:
            try:
                if self.get("/health", timeout_s=2).status == 200:
                    return
            except (OSError, http.client.HTTPException):
                pass
            if not self.process.running or time.monotonic() > deadline_s:
                state = "still starting" if self.process.running else "ended"
                raise AssertionError(f"no /health within {within_s} s, {state}:\n{self.log()[-6000:]}")
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGTERM, *, within_s: float | None = None) -> int:
        """Ask the master to end; its exit code. What it left behind is in `left_behind`.

        Raises:
            AssertionError: it had not ended `within_s` later (default: 15 s beyond its grace_s, if it has one).
        """
        assert self.process is not None
        grace_s = self.settings.get("grace_s")
        longest_s = STOP_WITHIN_S + (float(grace_s) if isinstance(grace_s, (int, float, str)) else 0.0)
        code = self.process.stop(number, within_s=within_s if within_s is not None else longest_s)
        self.left_behind += self.process.left_behind
        return code

    def kill(self) -> None:
        """SIGKILL to the master and all workers at once: the host is lost."""
        if self.process is not None:
            self.process.kill()

    def restart(self) -> None:
        """Stop it properly and start it on the same port."""
        self.stop()
        self.start()

    def close(self) -> None:
        """End it and its other masters whatever their state, and give back ports and directories."""
        for other in self.others:
            other.close()
        self.kill()
        self._port_holder.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def second_master(self, workers: int | None = None, **changes: Any) -> Deployment:
        """Another deployment on the same Redis and namespace, as on a second host."""
        assert self.redis is not None, "an embedded Redis is one host's own"
        arguments: dict[str, Any] = {"settings": self.settings, "env": self.env} | changes
        other = Deployment(workers or self.workers, redis=self.redis, namespace=self.namespace, **arguments)
        self.others.append(other)
        return other

    # --- processes

    def master_pid(self) -> int:
        """The gunicorn master: `serve` itself where it became one, else gunicorn's topmost process below it."""
        assert self.process is not None
        line = [self.process.pid]
        for pid in line:
            if "gunicorn" in command(pid):
                return pid
            line += children(pid)
        return self.process.pid

    def worker_pids(self) -> list[int]:
        master = self.master_pid()
        marks = ("gunicorn", "app.cli")
        return [pid for pid in children(master) if any(mark in command(pid) for mark in marks)]

    def wait_for_workers(self, count: int | None = None, *, without: Sequence[int] = (), within_s: float = 10) -> None:
        """Until `count` workers (default: all) run, none of them among `without`."""
        wanted = self.workers if count is None else count
        eventually(
            lambda: len(found := self.worker_pids()) == wanted and not set(found) & set(without), within_s=within_s
        )

    def kill_worker(self, pid: int | None = None, number: int = signal.SIGKILL) -> int:
        """Send `number` to a worker (default: the first); its pid."""
        chosen = self.worker_pids()[0] if pid is None else pid
        os.kill(chosen, number)
        return chosen

    def log(self) -> str:
        """What master and workers wrote to stdout and stderr, all starts together."""
        assert self.process is not None
        return self.process.log()

    # --- talking to it

    def request(self, method: str, path: str, *, value: Any = None, **more: Any) -> Reply:
        """`value` goes as JSON; else `body=`, `headers=`, `timeout_s=` as in tests.support.http.request."""
        if value is not None:
            more["body"] = json.dumps(value).encode()
            more["headers"] = {"content-type": "application/json", **(more.get("headers") or {})}
        return request(method, self.url + path, **more)

    def get(self, path: str, **more: Any) -> Reply:
        return self.request("GET", path, **more)

    def post(self, path: str, value: Any = None, **more: Any) -> Reply:
        return self.request("POST", path, value=value, **more)

    def nodes(self, query: str = "", **more: Any) -> dict[str, Any]:
        """`GET /nodes/status`."""
        reply = self.get("/nodes/status" + query, **more)
        assert reply.status == 200, reply
        found: dict[str, Any] = reply.json()
        return found

    def unfinished(self) -> dict[str, int]:
        return {url: node["unfinished"] for url, node in self.nodes().items()}

    def add(
        self,
        *engines: SimulatedEngine,
        ready: bool = True,
        within_s: float = 5.0,
        key: str | None = None,
        headers: dict[str, str] | None = None,
        **status: Any,
    ) -> None:
        """Register engines with their models, and wait until they are ready; `status`: role=, speed=."""
        for engine in engines:
            value: dict[str, Any] = {"url": engine.url, "status": {"models": list(engine.knobs.models), **status}}
            if key is not None:
                value["key"] = key
            reply = self.post("/nodes/add", value, headers=headers)
            assert reply.status == 200, reply
        if ready:
            self.wait_for_state("ready", *engines, within_s=within_s, headers=headers)

    def wait_for_state(self, state: str, *engines: SimulatedEngine, within_s: float = 5.0, **more: Any) -> None:
        urls = [engine.url for engine in engines]

        def check() -> bool:
            nodes = self.nodes("?all=1", **more)
            states = {url: nodes.get(url, {}).get("state") for url in urls}
            assert set(states.values()) <= {state}, f"{state} wanted: {states}"
            return True

        eventually(check, within_s=within_s, every_s=0.05)  # each look is a request
