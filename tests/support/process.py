"""Processes that tests start: none is left behind, even when the tests are killed (see `guard`)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.guard import command_of, parent_of, parents
from tests.support.template import Guard, Template

GUARD = Path(__file__).with_name("guard.py")


class Process:
    """One command under guard, its output in `log_file`; a fork of `template` where one is given.

    `left_behind` holds, once it has ended, the descendants that had outlived it by 3 s and were killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log_file: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        template: Template | None = None,
    ) -> None:
        self.log_file = log_file
        self.left_behind: list[str] = []
        self.exit_code: int | None = None
        self._guard: subprocess.Popen[bytes] | Guard
        if template is not None:
            self._guard = template.guarded(log_file, command, env, cwd)
        else:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), str(log_file), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=env,
                cwd=cwd,
            )
        assert self._guard.stdout is not None
        word, _, pid = self._guard.stdout.readline().decode().partition(" ")
        assert word == "pid", f"the guard did not start {command}"
        self.pid = int(pid)

    def __repr__(self) -> str:
        return f"<Process {self.pid} {'running' if self.exit_code is None else f'ended {self.exit_code}'}>"

    @property
    def running(self) -> bool:
        if self.exit_code is not None or self._guard.poll() is not None:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def send(self, number: int) -> None:
        """Send `number` to the command itself, not to its children."""
        if self.exit_code is None:
            os.kill(self.pid, number)

    def wait(self, within_s: float) -> int:
        """Its exit code (negative: the signal that killed it).

        Raises:
            subprocess.TimeoutExpired: it runs still.
        """
        if self.exit_code is None:
            self._guard.wait(within_s)
            self._collect()
        assert self.exit_code is not None
        return self.exit_code

    def stop(self, number: int = signal.SIGTERM, *, within_s: float = 10.0) -> int:
        """Ask it to end and wait; what has not ended by then is killed, and that is an AssertionError."""
        if self.exit_code is None:
            if self.running:
                self.send(number)
            try:
                self.wait(within_s)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"did not end within {within_s} s of signal {number}:\n{self.log()}") from None
        assert self.exit_code is not None
        return self.exit_code

    def kill(self) -> int:
        """SIGKILL to it and all its descendants at once, as when a host is lost."""
        if self.exit_code is None:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            self._guard.wait(10)
            self._collect()
            self.left_behind = []
        assert self.exit_code is not None
        return self.exit_code

    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def _collect(self) -> None:
        assert self._guard.stdout is not None and self._guard.stdin is not None
        for line in self._guard.stdout.read().decode().splitlines():
            word, _, rest = line.partition(" ")
            if word == "left":
                self.left_behind.append(rest)
            elif word == "exit":
                self.exit_code = int(rest)
        self._guard.stdout.close()
        self._guard.stdin.close()
        if self.exit_code is None:
            self.exit_code = -int(signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Those that still run. Asked every few milliseconds, on machines with hundreds of processes."""
    lists = list(Path(f"/proc/{pid}/task").glob("*/children"))
    if not lists:  # it has ended, or this kernel keeps no such lists
        return sorted(child for child, parent in parents().items() if parent == pid)
    found: list[int] = []
    for path in lists:
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return sorted(child for child in found if parent_of(child) is not None)


def command(pid: int) -> str:
    return command_of(pid)
