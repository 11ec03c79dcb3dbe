"""A Python that has imported all that a deployment needs, and forks where a new one would be started.

Starting a deployment costs two interpreters that import some 800 modules each: a third of what the whole suite
costs. So `Process` can ask this one: it forks a guard, the guard forks `serve`, and `serve` forks gunicorn, each with
the arguments, environment, descriptors, limits, session and title that an exec would have given it. What is run is the
same: `runpy` runs the module as `python -m` does. The tests of the command itself start real interpreters.

Runs as a script of its own, and ends when the other end of its socket does. It does not die with its parent as others
here do: that would be the thread which started it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.support import guard

ROOT = Path(__file__).resolve().parents[2]
FORKED = ("app.cli", "gunicorn")
LOADED = (
    "app.main",
    "app.commands.serve",
    "gunicorn.app.wsgiapp",
    "workers.engine.command",
    "workers.master",
    "workers.server",
    "workers.supervisor",
)
ROOM_FOR_TITLES = 16_384
"""Bytes of arguments that a template is started with, so that its forks can write theirs over them."""


class Template:
    """The asking side; `TEMPLATE` is that of this process of pytest, started when first asked."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        self._socket: socket.socket | None = None

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.support.template", str(theirs.fileno()), "x" * ROOM_FOR_TITLES],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
            cwd=ROOT,
        )
        theirs.close()
        atexit.register(self._close, ours)
        return ours

    def _close(self, ours: socket.socket) -> None:
        ours.close()
        self._process.wait()

    def guarded(self, log_file: Path, command: Sequence[str], env: Mapping[str, str] | None, cwd: Path | None) -> Guard:
        """`guard.run` with `command` in a fork."""
        orders, to_guard = os.pipe()
        from_guard, answers = os.pipe()
        value = {
            "log": str(log_file),
            "command": list(command),
            "env": dict(env or os.environ),
            "cwd": str(cwd or "."),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        }
        file = os.memfd_create("order")  # a datagram has a limit, an environment has none
        os.write(file, json.dumps(value).encode())
        with self._one_at_a_time:  # a test's threads start deployments too: each must hear of its own
            self._socket = self._socket or self._start()
            socket.send_fds(self._socket, [b"fork"], [orders, answers, file])
            guard = Guard(int(self._socket.recv(32)), to_guard, from_guard)
        for fd in (orders, answers, file):
            os.close(fd)
        return guard


class Guard:
    """A guard that is no child of ours, with what `Process` needs of a `subprocess.Popen`."""

    def __init__(self, pid: int, stdin: int, stdout: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb", buffering=0)
        self.stdout = os.fdopen(stdout, "rb")
        self._fd = os.pidfd_open(pid)  # it is a zombie at worst: its parent never waits before we have said so

    def poll(self) -> int | None:
        """0 once it has ended; with what, nobody needs to know."""
        return 0 if self._fd < 0 or self._ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        if self._fd >= 0:
            if not self._ended(timeout):
                raise subprocess.TimeoutExpired("guard", timeout or 0.0)
            os.close(self._fd)
            self._fd = -1
        return 0

    def _ended(self, timeout_s: float | None) -> bool:
        return bool(select.select([self._fd], [], [], timeout_s)[0])


TEMPLATE = Template()


# --- in the template ----------------------------------------------------------------------------------


def main(fd: int) -> None:
    for module in LOADED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    subprocess._fork_exec = _fork_or_exec(subprocess._fork_exec)  # type: ignore[attr-defined]
    asked = socket.socket(fileno=fd)
    guards: list[int] = []
    while True:
        message, fds, _, _ = socket.recv_fds(asked, 16, 3)
        if not message:
            return
        pid = os.fork()
        if pid:
            asked.send(b"%d" % pid)
            for one in fds:
                os.close(one)
            # Those of before that have ended; not the newest, whose pid the asker has not opened yet.
            guards = [one for one in guards if not os.waitpid(one, os.WNOHANG)[0]] + [pid]
            continue
        asked.detach()
        os.close(fd)
        _be_guard(*fds)


def _be_guard(orders: int, answers: int, file: int) -> NoReturn:
    with os.fdopen(file, "rb") as f:
        f.seek(0)
        order: dict[str, Any] = json.load(f)
    os.dup2(orders, 0)
    os.dup2(answers, 1)
    os.close(orders)
    os.close(answers)
    os.setsid()

    def start(command: list[str]) -> NoReturn:
        os.chdir(order["cwd"])
        resource.setrlimit(resource.RLIMIT_NOFILE, order["files"])
        if _is_ours(command):
            _close_all_but((0, 1, 2))
            _become(command, order["env"])
        os.environ.clear()
        os.environ.update(order["env"])
        guard.execute(command)
        raise AssertionError("exec came back")

    guard.run(order["log"], order["command"], start)
    sys.stdout.flush()
    os._exit(0)


def _is_ours(words: Sequence[str]) -> bool:
    return words[0] == sys.executable and "-m" in words and words[words.index("-m") + 1] in FORKED


def _fork_or_exec(fork_exec: Callable[..., int]) -> Callable[..., int]:
    """CPython's `_posixsubprocess.fork_exec`, but for a Python that runs one of FORKED."""

    def start(args: Sequence[bytes | str], *rest: Any) -> int:
        words = [os.fsdecode(word) for word in args]
        if not _is_ours(words):
            return fork_exec(args, *rest)
        _, _, keep, cwd, env, stdin, _, _, stdout, _, stderr, _, failed, _, session, *_ = rest
        prepare = rest[-2] if isinstance(rest[-1], bool) else rest[-1]  # before Python 3.14 one more follows it
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        try:
            for target, given in enumerate((stdin, stdout, stderr)):
                if given >= 0:
                    os.dup2(given, target)
            if cwd is not None:
                os.chdir(cwd)
            if session:
                os.setsid()
            if prepare is not None:
                prepare()
            _close_all_but((0, 1, 2, failed, *keep))
            os.close(failed)  # as an exec would: who waits for it goes on
            pairs = (os.fsdecode(entry).partition("=") for entry in env or ())
            _become(words, dict(os.environ) if env is None else {name: value for name, _, value in pairs})
        finally:
            os._exit(70)

    return start


def _close_all_but(kept: Sequence[int]) -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in kept:
            with contextlib.suppress(OSError):  # that of the listing itself
                os.close(fd)


def _become(words: list[str], env: Mapping[str, str]) -> NoReturn:
    """Be the process that `words` would have started; never returns."""
    code: object = 0
    try:
        _entitle(words)
        os.environ.clear()
        os.environ.update(env)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        module = words.index("-m") + 1
        sys.orig_argv[:] = words
        sys.argv[:] = words[module:]
        sys.stdin, sys.stdout, sys.stderr = (
            os.fdopen(os.dup(fd), mode, buffering=1, closefd=False) for fd, mode in ((0, "r"), (1, "w"), (2, "w"))
        )
        runpy.run_module(words[module], run_name="__main__", alter_sys=True)
    except SystemExit as e:
        code = e.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _entitle(words: list[str]) -> None:
    """Have /proc say what runs here: tests find gunicorn and its workers by it."""
    with open("/proc/self/stat", "rb") as f:
        fields = f.read().rpartition(b")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    title = b"".join(word.encode() + b"\0" for word in words)[: end - begin]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, title, len(title))


if __name__ == "__main__":
    main(int(sys.argv[1]))
