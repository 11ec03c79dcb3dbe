"""The figures of all workers of a host, in files of `prometheus_client`'s multiprocess mode.

Owns the directory that a master makes and its workers write to, one file a worker and kind, and what becomes of the
figures of a worker that is gone. It must not know what is counted.

The library's files and its collector are used, its metric objects are not: each of their steps costs several calls,
and which mode they are in depends on the environment at the moment of import. A worker publishes its plain numbers
every `PUBLISH_S`; who reads waits for `SETTLED_S` first, and so sees all that had ended when it began.

The library keeps the files of dead workers for ever; with `--max-requests` they would be without number. So the
master adds a dead worker's figures to `<kind>_gone.db`, under a lock that readers share: no sum ever goes back.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client.metrics_core import Metric
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.utils import floatToGoString

from app.metrics.families import Family, Kind
from app.metrics.figures import SERIES_KEPT, UNBOUNDED, Figures, Key

DIRECTORY_VARIABLE = "EVENHAND_METRICS_DIR"
PUBLISH_S = 0.1
SETTLED_S = 0.15
LOCK_WITHIN_S = 1.0
"""Whoever holds the lock for longer is frozen, and must not freeze others."""
PREFIX = "evenhand-metrics-"
ALIVE, LOCK = "alive", "lock"
"""Files of a directory: locked for as long as a process of its deployment lives; locked while files are read or
added up."""
NEW_AT_ONCE = 50
"""Series that begin in one writing: each costs up to 0.2 ms, and requests wait meanwhile."""
FILE_BYTES = 2**16
"""Of a new file; it doubles, as the library has it."""
GONE = "gone"
"""In place of a worker's name."""


class _File(MmapedDict):
    """The library's file, with its room taken from the file system first: where that is full a mapped page that was
    not would be a SIGBUS, and not the OSError that this is."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            new = path.with_suffix(".new")  # complete before a reader may meet it
            with new.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, FILE_BYTES)
            new.rename(path)
        super().__init__(str(path))  # type: ignore[no-untyped-call]

    def reserve(self, size_bytes: int) -> None:
        """Have room for so much more."""
        wanted = self._capacity
        while self._used + size_bytes > wanted:
            wanted *= 2
        if wanted > self._capacity:
            os.posix_fallocate(self._f.fileno(), 0, wanted)

    def _init_value(self, key: str) -> None:
        self.reserve(len(key.encode()) + 64)
        super()._init_value(key)  # type: ignore[no-untyped-call]


class MetricsDirectory:
    """A host's figures; emptied by being made anew at each start of a master."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._alive = -1
        self._dead: set[str] = set()
        self._gone: dict[str, set[tuple[str, ...]]] = {}  # family -> series of dead workers

    def __repr__(self) -> str:
        return f"<MetricsDirectory {self.path}>"

    @classmethod
    def make(cls, base: Path | None = None) -> MetricsDirectory:
        """A new one, private to this user; takes away those whose processes are all gone."""
        base = base or _base()
        _sweep(base)
        hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=base))
        (hidden / LOCK).touch(0o600)
        alive = os.open(hidden / ALIVE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(alive, fcntl.LOCK_EX)
        made = cls(hidden.rename(base / hidden.name[1:]))  # seen by others only now that it is locked
        made._alive = alive  # workers inherit it: the lock ends with the last of them
        return made

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1

    def absorb(self, name: str) -> None:
        """A worker is dead: its gauges go, its counts stay. Only the master may call this."""
        mark_process_dead(name, str(self.path))  # type: ignore[no-untyped-call]
        self._dead.add(name)
        with _locked(self.path, fcntl.LOCK_EX) as held:
            if held:
                for dead in tuple(self._dead):
                    for kind in (Kind.COUNTER, Kind.HISTOGRAM):
                        self._add_to_gone(kind, dead)
                    self._dead.discard(dead)

    def _add_to_gone(self, kind: Kind, name: str) -> None:
        left = self.path / f"{kind}_{name}.db"
        if not left.exists():
            return
        gone = _File(self.path / f"{kind}_{GONE}.db")
        try:
            gone.reserve(left.stat().st_size)  # all of it is added, or nothing
            for key, value, _, _ in MmapedDict.read_all_values_from_file(str(left)):  # type: ignore[no-untyped-call]
                kept = self._kept(kind, key)
                gone.write_value(kept, gone.read_value(kept)[0] + value, 0.0)  # type: ignore[no-untyped-call]
        finally:
            gone.close()  # type: ignore[no-untyped-call]
        left.unlink()

    def _kept(self, kind: Kind, key: str) -> str:
        """The name under which a dead worker's value stays: workers come and go for ever, series must not add up."""
        name, sample, labels, text = json.loads(key)
        series = tuple(value for label, value in labels.items() if label != "le")
        known = self._gone.setdefault(name, set())
        if series not in known:
            if len(known) >= SERIES_KEPT[kind]:
                names = [*labels]
                values = ["other" if label in UNBOUNDED else value for label, value in labels.items()]
                return str(mmap_key(name, sample, names, values, text))
            known.add(series)
        return key

    def merged(self) -> Iterable[Metric]:
        """The figures of all workers, those that are gone included. Takes milliseconds: not for an event loop."""
        with _locked(self.path, fcntl.LOCK_SH):
            found: Iterable[Metric] = MultiProcessCollector(None, str(self.path)).collect()  # type: ignore[no-untyped-call]
            return found


class MetricsWriter:
    """A worker's own files in `directory`. `write` what has changed; `close` at the end."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._files: dict[str, _File] = {}
        self._keys: dict[Key, tuple[_File, list[str]]] = {}
        self._written: dict[Key, list[float]] = {}

    def __repr__(self) -> str:
        return f"<MetricsWriter {self._name} series={len(self._keys)}>"

    def write(self, figures: Figures) -> None:
        """What is still in `changed` afterwards is for the next time.

        Raises OSError: there is no room for what is new.
        """
        figures.digest()
        new = 0
        for key in tuple(figures.changed):
            if key not in self._keys:
                new += 1
                if new > NEW_AT_ONCE:
                    continue
            file, names = self._keys.get(key) or self._names(key)
            values = [figures.numbers[key]] if key in figures.numbers else _values(figures, key)
            before = self._written.get(key) or [-1.0] * len(names)  # all of a new series
            for name, value, old in zip(names, values, before, strict=True):
                if value != old:
                    file.write_value(name, value, 0.0)  # type: ignore[no-untyped-call]
            self._written[key] = values
            figures.changed.discard(key)

    def close(self) -> None:
        for file in self._files.values():
            file.close()  # type: ignore[no-untyped-call]
        self._files.clear()
        self._keys.clear()
        self._written.clear()

    def _names(self, key: Key) -> tuple[_File, list[str]]:
        family, labels = key
        found = self._keys[key] = self._file(family), names_of(family, labels)
        return found

    def _file(self, family: Family) -> _File:
        kind = f"{family.kind}_{family.merge}" if family.kind is Kind.GAUGE else family.kind.value
        file = self._files.get(kind)
        if file is None:
            file = self._files[kind] = _File(self._directory / f"{kind}_{self._name}.db")
        return file


def names_of(family: Family, labels: tuple[str, ...]) -> list[str]:
    """The library's names of a series' values: one, or those of the buckets and the sum."""
    if family.kind is not Kind.HISTOGRAM:
        return [mmap_key(family.stem, family.name, list(family.labels), list(labels), family.help)]
    bounds = [floatToGoString(bound) for bound in (*family.buckets, float("inf"))]  # type: ignore[no-untyped-call]
    with_le = [*family.labels, "le"]
    names = [mmap_key(family.name, f"{family.name}_bucket", with_le, [*labels, bound], family.help) for bound in bounds]
    return [*names, mmap_key(family.name, f"{family.name}_sum", list(family.labels), list(labels), family.help)]


def _values(figures: Figures, key: Key) -> list[float]:
    found = figures.distributions[key]
    return [*found.counts, found.sum]


def _base() -> Path:
    # Where there is no disk that could stall.
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def _sweep(base: Path) -> None:
    for path in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid != os.getuid():
                continue
            alive = os.open(path / ALIVE, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(alive)


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[bool]:
    """Whether the lock could be had in good time."""
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        deadline_s = time.monotonic() + LOCK_WITHIN_S
        held = False
        while not held:
            try:
                fcntl.flock(lock, how | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                if time.monotonic() >= deadline_s:
                    break
                time.sleep(0.002)
        yield held
    finally:
        os.close(lock)
