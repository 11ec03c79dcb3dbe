"""gunicorn's master, with a reload that goes worker by worker and never leaves fewer than are configured.

Owns how many workers there are, and which. It must not know what they serve.

Why not gunicorn's `Arbiter` as it is (27.0):
- at SIGHUP it tells all old workers to stop at once, whether the new ones serve yet or not, and then does nothing
  else until the last of them has ended: a worker that dies meanwhile is not replaced, SIGTERM has to wait;
- a worker that drains counts as one that serves, so while its last streams run there is one fewer;
- a signal to stop that reaches a worker in its first milliseconds is lost, and the worker serves on;
- a mistake in the new code or settings ends the whole deployment.

Five of its methods are overridden, none of them private; gunicorn is pinned in the lock files, and
tests/workers/test_master.py fails if their meaning changes.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import ModuleType
from typing import Any

from gunicorn.arbiter import Arbiter
from gunicorn.errors import HaltServer

from workers.agreed import STOP_SIGNALS
from workers.listener import Shares

OURS = ("app", "workers")
BOOT_PAUSE_S = 1.0  # after a worker that could not start
PLACES = 256


class Master(Arbiter):  # type: ignore[misc]
    """One per `gunicorn`. The workers have `share`, one of `shares`: whether they serve is seen by it."""

    WORKERS: dict[int, Any]

    def __init__(self, app: Any) -> None:
        self.shares = Shares(PLACES)
        self._outdated = 0  # workers up to this age are to be replaced
        self._before_reload: Before | None = None  # until a worker of the new kind has served
        self._not_before = 0.0  # time.monotonic() of the next start
        super().__init__(app)

    def spawn_worker(self) -> Any:
        # Until the new process has its own handlers it has the master's, which would lose what came for the worker.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            return super().spawn_worker()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def kill_worker(self, pid: int, sig: int) -> None:
        if sig == signal.SIGTERM and pid in self.WORKERS:
            self.WORKERS[pid].told_to_stop = True
        super().kill_worker(pid, sig)

    def manage_workers(self) -> None:
        """As many as are configured, besides those that drain; at most one more while an old one is replaced."""
        staying = [w for w in self.WORKERS.values() if not (w.told_to_stop or w.share.has_left)]
        staying.sort(key=lambda w: w.age)
        starting = [w for w in staying if not w.share.serves]
        outdated = [w for w in staying if w.age <= self._outdated]
        if len(staying) > self.num_workers and not starting:
            self.kill_worker(staying[0].pid, signal.SIGTERM)
            outdated = outdated[1:]
            staying = staying[1:]
        if self._before_reload and any(w.age > self._outdated for w in staying if w not in starting):
            self._before_reload = None
        wanted = self.num_workers + bool(outdated and not starting)
        if time.monotonic() >= self._not_before:
            for _ in range(wanted - len(staying)):
                self.spawn_worker()

    def reap_workers(self) -> None:
        known = dict(self.WORKERS)
        try:
            super().reap_workers()
        except HaltServer as e:
            # A worker could not start. While others serve that is no reason to end them.
            if not any(w.share.serves for w in self.WORKERS.values()):
                raise
            for pid in known.keys() - self.WORKERS.keys():
                known[pid].tmp.close()
                self.cfg.child_exit(self, known[pid])
            self._not_before = time.monotonic() + BOOT_PAUSE_S
            if self._before_reload is not None:
                self._take_back(f"the first new worker could not start ({e.reason})")
            self.reap_workers()

    def reload(self) -> None:
        """Read code and settings again; the workers are replaced one by one, as `manage_workers` comes to it."""
        self._stats["reloads"] += 1
        before = self._before_reload or Before(self)
        forget_our_modules()  # so that the configuration imports them anew
        try:
            self.app.reload()
        except (SystemExit, Exception) as e:
            self._before_reload = before
            self._take_back(f"the configuration can't be loaded ({e})")
            return
        self._before_reload = before
        self.setup(self.app)
        self.log.reopen_files()
        self.cfg.on_reload(self)
        self._outdated = self.worker_age

    def _take_back(self, reason: str) -> None:
        """Go on with the code and the settings of before the reload, and with the workers that have them."""
        assert self._before_reload is not None
        self._before_reload.restore(self)
        self._before_reload = None
        self._outdated = 0
        self.log.error("the reload is refused, workers go on with what they have: %s", reason)


class Before:
    """What a reload replaces: the settings, and our modules."""

    def __init__(self, master: Master) -> None:
        self._cfg = master.app.cfg
        self._modules = our_modules()
        self._environment = dict(os.environ)

    def restore(self, master: Master) -> None:
        forget_our_modules()
        sys.modules.update(self._modules)
        os.environ.clear()
        os.environ.update(self._environment)
        master.app.cfg = self._cfg
        master.setup(master.app)


def our_modules() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] in OURS}


def forget_our_modules() -> None:
    for name in our_modules():
        del sys.modules[name]
