"""What a process of ours does so that none is left behind: it dies when its parent does.

Owns the two or three system calls for it; knows no Redis, no gunicorn and no settings.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # where `app` and `workers` are imported from

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent(parent_pid: int, signum: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send `signum` to this process when the thread that forked it ends, be it by SIGKILL.

    Elsewhere than on Linux this does nothing: there a killed parent leaves its children to the operator.
    """
    if _libc is None:
        return
    _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent_pid:  # it died between the fork and the call
        os.kill(os.getpid(), signum)


def child_setup(signum: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """A `preexec_fn` for a child of this process: it dies with us and has no signals blocked."""
    parent_pid = os.getpid()

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        die_with_parent(parent_pid, signum)

    return prepare


def write_unless_full(fd: int, data: bytes) -> bool:
    """False: not all of it was taken at once. A pipe that can be written has room for PIPE_BUF bytes (pipe(7))."""
    ready = select.poll()
    ready.register(fd, select.POLLOUT)
    try:
        while data:
            if not ready.poll(0):
                return False
            data = data[os.write(fd, data[: select.PIPE_BUF]) :]
    except OSError:
        pass  # closed: there is no other place to say it
    return True


def say(text: str) -> None:
    """On stdout of a process that must go on whoever reads it."""
    write_unless_full(1, f"{text}\n".encode("utf-8", "backslashreplace"))


def warn(text: str, log_format: str) -> None:
    """A line on stderr of a process that has no log of its own, in the form of those beside it."""
    told = f"evenhand serve: {text}"
    if log_format == "json":
        from workers.logs import formatter  # nobody else waits for its imports

        record = logging.LogRecord("evenhand.serve", logging.WARNING, __file__, 0, text, (), None)
        told = formatter("json").format(record)
    write_unless_full(2, f"{told}\n".encode("utf-8", "backslashreplace"))


def python_command(module: str) -> list[str]:
    """The command that runs one of our modules, with `python_environment`, from any working directory."""
    return [sys.executable, "-P", "-m", module]


def python_environment() -> dict[str, str]:
    """This process's environment, with our packages found first: a directory `app` elsewhere is not ours."""
    path = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}
