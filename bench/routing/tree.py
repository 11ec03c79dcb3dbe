"""CPU and memory of a whole process tree, read from /proc: what a router costs is all that it started.

A contender runs under `tests.support.guard`, which is the subreaper of everything below it: also what made itself a
daemon stays a descendant of the guard, and the time of what exited is in the guard's, or its own parent's, sum of
children. The guard's own time does not count.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
KIB_PER_MIB = 1024


@dataclass(frozen=True)
class Stat:
    """What /proc/PID/stat says of a process, in clock ticks; `children`: of those that exited and were waited for."""

    parent: int
    own: int
    children: int


def parse(line: bytes) -> Stat:
    """The name, in parentheses, may hold anything, parentheses too."""
    fields = line.rpartition(b")")[2].split()
    user, system, children_user, children_system = map(int, fields[11:15])
    return Stat(parent=int(fields[1]), own=user + system, children=children_user + children_system)


def below(stats: Mapping[int, Stat], root: int) -> list[int]:
    """All descendants of `root`, without itself."""
    found = [root]
    for one in found:
        found += [pid for pid, stat in stats.items() if stat.parent == one]
    return found[1:]


def ticks(stats: Mapping[int, Stat], root: int) -> int:
    """Of all that ever ran below `root`, as far as it was waited for or still runs; without `root` itself."""
    reaped = stats[root].children if root in stats else 0
    return reaped + sum(stats[pid].own + stats[pid].children for pid in below(stats, root))


def everything() -> dict[int, Stat]:
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as f:
                found[int(name)] = parse(f.read())
    return found


@dataclass(frozen=True)
class Reading:
    """CPU seconds so far: of each tree asked for, of the whole machine, and what its host gave to others."""

    trees_s: tuple[float, ...]
    machine_s: float
    stolen_s: float


def read(roots: Iterable[int]) -> Reading:
    stats = everything()
    with open("/proc/stat", "rb") as f:
        user, nice, system, _idle, _iowait, irq, softirq, stolen, *_ = map(int, f.readline().split()[1:])
    busy = user + nice + system + irq + softirq
    return Reading(tuple(ticks(stats, root) / TICKS_PER_S for root in roots), busy / TICKS_PER_S, stolen / TICKS_PER_S)


def guard_of(pid: int) -> int:
    return parse(Path(f"/proc/{pid}/stat").read_bytes()).parent


def memory_mib(root: int) -> float:
    """Of all below `root`: each page that several share counts once in all (proportional set size)."""
    kib = 0
    for pid in below(everything(), root):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    kib += int(line.split()[1])
    return kib / KIB_PER_MIB
