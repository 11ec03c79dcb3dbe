"""Runs one command and lets none of its processes outlive the one who asked. Runs as a script of its own.

    python -I -S guard.py LOGFILE COMMAND...

Answers on stdout: `pid <n>` at the start; then, at the end, `left <pid> <command>` for each descendant that
was still there LINGER_S after the command ended, and `exit <code>`. When stdin ends (the asker closed it, or
died of whatever), every descendant is killed at once. It is a subreaper, so that a descendant that left its
process group or lost its parent is found all the same.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable

LINGER_S = 3.0  # what gunicorn's workers need to notice that their master is gone: 1 s, and some more
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def parents() -> dict[int, int]:
    """{pid: parent's pid} of all processes that still run."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            parent = parent_of(int(name))
            if parent is not None:
                found[int(name)] = parent
    return found


def parent_of(pid: int) -> int | None:
    """None: the process does not run any more."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as f:
        fields = f.read().rpartition(b")")[2].split()
        if fields[0] not in (b"Z", b"X"):
            return int(fields[1])
    return None


def descendants(pid: int) -> list[int]:
    all_parents = parents()
    found = [pid]
    for one in found:
        found += [child for child, parent in all_parents.items() if parent == one]
    return found[1:]


def kill_all() -> None:
    while left := descendants(os.getpid()):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def command_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return f.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "?"


def execute(command: list[str]) -> None:
    try:
        os.execvp(command[0], command)
    except OSError as e:
        print(f"{command[0]}: {e}", file=sys.stderr, flush=True)
        os._exit(127)


def spawn(prctl: Callable[[int, int], int], log: str, command: list[str], start: Callable[[list[str]], None]) -> int:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    me = os.getpid()
    started, starting = os.pipe()  # closed by exec: until then a signal would meet our handlers, not the command's
    pid = os.fork()
    if pid:
        os.close(output)
        os.close(starting)
        os.read(started, 1)
        os.close(started)
        return pid
    os.setsid()  # Ctrl-C at a terminal is for the tests, not for what they run
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != me:
        os._exit(1)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # an ignored signal would stay ignored in the command
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    start(command)
    raise AssertionError("it came back")


def reap(main: int, code: int | None) -> int | None:
    """Collect the dead; `code` or the exit code of `main` if it is among them."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == main:
            code = os.waitstatus_to_exitcode(status)


def run(log: str, command: list[str], start: Callable[[list[str]], None] = execute) -> None:
    """`start`: becomes the command in the process that was forked for it."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # stdin's end is the only order
        signal.signal(number, signal.SIG_IGN)
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    main = spawn(prctl, log, command, start)
    print("pid", main, flush=True)
    code: int | None = None
    deadline: float | None = None
    while True:
        left_s = None if deadline is None else max(deadline - time.monotonic(), 0)
        readable, _, _ = select.select([0, wake], [], [], left_s)
        if 0 in readable and not os.read(0, 1):
            kill_all()
        if wake in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 512)
        code = reap(main, code)
        if code is not None:
            deadline = deadline or time.monotonic() + LINGER_S
            left = descendants(os.getpid())
            if left and time.monotonic() < deadline:
                continue
            for pid in left:
                print("left", pid, command_of(pid), flush=True)
            kill_all()
            print("exit", code, flush=True)
            return


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2:])
