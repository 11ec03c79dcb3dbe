"""This host: how many files and connections a worker may have here, and how many workers share its cores.

Owns what /proc and the limits say; where there is no /proc, it says less. It must not know Redis.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from app.checks.finding import Finding, named, ok, warn
from app.checks.workers import host_of
from app.terminal.words import count

FEW_FILES = 4096
"""As in the warning of a worker's start: a running request takes two."""
BACKLOG = 2048
"""Connections that gunicorn lets wait for a worker; the kernel cuts it to somaxconn."""
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """A worker of this host: how many files it may have open, and how many it has; -1 where that is not told."""

    pid: int
    files: int
    open_files: int


@dataclass(frozen=True, slots=True)
class Host:
    cores: int
    soft: int
    hard: int
    somaxconn: int | None
    processes: Mapping[str, Process]


def look(workers: Iterable[str]) -> Host:
    """`workers`: ids of all that have a lease; those of this host are looked at."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    here = [worker for worker in workers if host_of(worker) == socket.gethostname()]
    found = {worker: process for worker in here if (process := _process(worker)) is not None}
    return Host(_cores(), soft, hard, _number(PROC / "sys/net/core/somaxconn"), found)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _process(worker: str) -> Process | None:
    """None where it can't be looked at, or the number is another's: a container has pids of its own."""
    pid = worker.rsplit("-", 2)[-2] if worker.count("-") >= 2 else ""
    directory = PROC / pid
    try:
        if b"gunicorn" not in (directory / "cmdline").read_bytes():
            return None
        line = next(
            line for line in (directory / "limits").read_text().splitlines() if line.startswith("Max open files")
        )
        limit = line.split()[3]
        files = resource.RLIM_INFINITY if limit == "unlimited" else int(limit)
        return Process(int(pid), files, _entries(directory / "fd"))
    except (OSError, ValueError, StopIteration, IndexError):
        return None


def _entries(directory: Path) -> int:
    try:
        return sum(1 for _ in directory.iterdir())
    except OSError:
        return -1


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def judge(host: Host) -> Iterator[Finding]:
    yield _files(host)
    if host.processes:
        yield _files_of_workers(host)
        yield _workers(host)
    if host.somaxconn is not None:
        yield _backlog(host.somaxconn)


def _files(host: Host) -> Finding:
    says = f"a process started here may open {_limit(host.hard)} files"
    if host.hard != resource.RLIM_INFINITY and host.hard < FEW_FILES:
        return warn(
            "host.files", f"{says}; a running request takes two", "ulimit -Hn 65536, LimitNOFILE= of its systemd unit"
        )
    return ok("host.files", says)


def _files_of_workers(host: Host) -> Finding:
    few = [p for p in host.processes.values() if p.files != resource.RLIM_INFINITY and p.files < FEW_FILES]
    full = [p for p in host.processes.values() if 0 < 0.8 * p.files < p.open_files]
    if full:
        return warn(
            "host.worker_files",
            "nearly no files left: " + named(f"pid {p.pid} has {p.open_files} of {p.files}" for p in full),
            "more workers, or start it with a higher ulimit -n",
        )
    if few:
        return warn(
            "host.worker_files",
            "workers may open few files: " + named(f"pid {p.pid} {p.files}" for p in few),
            "start it with a higher ulimit -n (LimitNOFILE=); a running request takes two",
        )
    least = min(p.files if p.files != resource.RLIM_INFINITY else 2**62 for p in host.processes.values())
    return ok("host.worker_files", f"the workers here may open {_limit(least if least < 2**62 else -1)} files")


def _workers(host: Host) -> Finding:
    number = len(host.processes)
    says = f"{count(number, 'worker')} on {count(host.cores, 'core')}"
    if number > 2 * host.cores:
        return warn("host.workers", f"{says}: they wait for each other", f"--workers {host.cores}")
    return ok("host.workers", says)


def _backlog(somaxconn: int) -> Finding:
    says = f"net.core.somaxconn is {somaxconn}"
    if somaxconn < BACKLOG:
        return warn(
            "host.backlog", f"{says}: a burst of connections is refused", f"sysctl net.core.somaxconn={2 * BACKLOG}"
        )
    return ok("host.backlog", says)


def _limit(files: int) -> str:
    return "any number of" if files == resource.RLIM_INFINITY else f"{files:,}"
