"""Workers' figures put together: sums over all of them, those that are gone too, and never less than before."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.exposition import generate_latest

from app.metrics import files
from app.metrics.families import DEGRADED, DURATION, LOCAL_WORKERS, REDIS_UP, REQUESTS, Kind
from app.metrics.figures import Figures
from app.metrics.files import MetricsDirectory, MetricsWriter
from app.metrics.publisher import Publisher
from tests.support.metrics import Samples, samples, total, value

OK = ("m", "other", "ok", "http://10.0.0.1:1")


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[MetricsDirectory]:
    made = MetricsDirectory.make(tmp_path)
    yield made
    made.remove()


class Worker:
    def __init__(self, directory: MetricsDirectory, name: str, trouble: str | None = None) -> None:
        self.figures = Figures(knows=lambda model: True)
        self.trouble = trouble
        self.publisher = Publisher(self.figures, MetricsWriter(directory.path, name), lambda: self.trouble)

    def serve(self, requests: int, seconds: float = 0.3) -> None:
        self.figures.count(REQUESTS, *OK, by=requests)
        self.figures.observe(DURATION, seconds, *OK[:3], times=requests)
        self.publisher.publish()


def read(directory: MetricsDirectory) -> Samples:
    class Collected:
        def collect(self) -> list[object]:
            return list(directory.merged())

    return samples(generate_latest(Collected()).decode())  # type: ignore[arg-type]


def test_counters_and_histograms_of_all_workers_add_up(directory: MetricsDirectory) -> None:
    a, b = Worker(directory, "host-1-aa"), Worker(directory, "host-2-bb")
    a.serve(3)
    b.serve(4, 700.0)
    a.serve(5)
    found = read(directory)
    labels = dict(zip(REQUESTS.labels, OK, strict=True))
    assert value(found, "evenhand_requests_total", **labels) == 12
    del labels["node"]
    name = "evenhand_request_duration_seconds"
    assert value(found, f"{name}_count", **labels) == 12
    assert value(found, f"{name}_sum", **labels) == pytest.approx(8 * 0.3 + 4 * 700)
    bounds = {le: value(found, f"{name}_bucket", le=le, **labels) for le in ("0.25", "0.5", "640.0", "1800.0", "+Inf")}
    assert bounds == {"0.25": 0, "0.5": 8, "640.0": 8, "1800.0": 12, "+Inf": 12}
    for worker in (a, b):
        worker.publisher.close()


def test_the_figures_of_a_dead_worker_stay_and_its_gauges_go(directory: MetricsDirectory) -> None:
    a, b = Worker(directory, "host-1-aa"), Worker(directory, "host-2-bb", trouble="Redis is away")
    a.serve(3)
    b.serve(4)
    found = read(directory)
    assert [value(found, f"evenhand_{name}") for name in ("host_workers", "local_workers", "redis_up")] == [2, 1, 0]
    for worker in (a, b):
        worker.publisher.close()
    before = sorted(path.name for path in directory.path.glob("*.db"))
    directory.absorb("host-2-bb")
    after = sorted(path.name for path in directory.path.glob("*.db"))
    assert sum("bb" in name for name in before) == 4 and not any("bb" in name for name in after)
    found = read(directory)
    assert total(found, "evenhand_requests_total") == total(found, "evenhand_request_duration_seconds_count") == 7
    assert [value(found, f"evenhand_{name}") for name in ("host_workers", "local_workers", "redis_up")] == [1, 0, 1]


def test_a_thousand_workers_that_came_and_went_leave_two_files(directory: MetricsDirectory) -> None:
    for n in range(50):
        worker = Worker(directory, f"host-{n}-cc")
        worker.serve(2)
        worker.publisher.close()
        directory.absorb(f"host-{n}-cc")
    assert sorted(path.name for path in directory.path.glob("*.db")) == ["counter_gone.db", "histogram_gone.db"]
    assert total(read(directory), "evenhand_requests_total") == 100


def test_no_reader_sees_a_dead_worker_twice_or_not_at_all(directory: MetricsDirectory) -> None:
    for n in range(30):
        worker = Worker(directory, f"host-{n}-cc")
        worker.serve(1)
        worker.publisher.close()
    seen: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(total(read(directory), "evenhand_requests_total"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    for n in range(30):
        directory.absorb(f"host-{n}-cc")
    done.set()
    watcher.join()
    assert set(seen) == {30} and len(seen) > 1


def test_a_frozen_reader_holds_nobody_up_for_long_and_nothing_is_lost(
    directory: MetricsDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LOCK_WITHIN_S", 0.05)
    for name in ("host-1-aa", "host-2-bb"):
        worker = Worker(directory, name)
        worker.serve(1)
        worker.publisher.close()
    lock = os.open(directory.path / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_SH)
    directory.absorb("host-1-aa")
    found = read(directory)
    assert total(found, "evenhand_requests_total") == 2 and value(found, "evenhand_host_workers") == 1
    os.close(lock)
    directory.absorb("host-2-bb")  # and the one before
    assert total(read(directory), "evenhand_requests_total") == 2
    assert sorted(path.name for path in directory.path.glob("*.db")) == ["counter_gone.db", "histogram_gone.db"]


def test_time_on_its_own_is_counted_while_it_lasts(
    directory: MetricsDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    worker = Worker(directory, "host-1-aa")
    steps = [(0.1, None, 0.0), (0.1, "away", 0.1), (2.0, "away", 2.1), (5.0, None, 2.1), (1.0, None, 2.1)]
    for passed_s, trouble, local_s in steps:
        now_s += passed_s
        worker.trouble = trouble
        worker.publisher.publish()
        found = worker.figures.numbers
        assert found[DEGRADED, ()] == pytest.approx(local_s)
        assert (found[REDIS_UP, ()], found[LOCAL_WORKERS, ()]) == ((0, 1) if trouble else (1, 0))
    worker.publisher.close()


def test_a_start_takes_away_what_the_dead_have_left_and_nothing_else(tmp_path: Path) -> None:
    code = (
        "import sys, os, time; from pathlib import Path; from app.metrics.files import MetricsDirectory\n"
        "made = MetricsDirectory.make(Path(sys.argv[1])); print(made.path, flush=True); sys.stdin.read(); os._exit(0)"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        theirs = Path(other.stdout.readline().strip())
        first = MetricsDirectory.make(tmp_path)
        assert theirs.is_dir() and theirs.stat().st_mode & 0o777 == 0o700
        other.stdin.close()
        other.wait(10)
    assert theirs.is_dir()
    second = MetricsDirectory.make(tmp_path)
    assert not theirs.exists() and first.path.is_dir()
    for one in (first, second):
        one.remove()
    assert list(tmp_path.iterdir()) == []


def test_workers_keep_the_directory_alive_when_their_master_is_gone(tmp_path: Path) -> None:
    made = MetricsDirectory.make(tmp_path)
    context = multiprocessing.get_context("fork")
    ready, go = context.Event(), context.Event()
    child = context.Process(target=lambda: (ready.set(), go.wait(10)))
    child.start()
    assert ready.wait(10)
    os.close(made._alive)
    made._alive = -1
    MetricsDirectory.make(tmp_path).remove()
    assert made.path.is_dir()
    go.set()
    child.join(10)
    MetricsDirectory.make(tmp_path).remove()
    assert not made.path.exists()


def test_a_full_file_system_costs_figures_and_no_process(
    directory: MetricsDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A page of a mapped file that is not there to be had would be a SIGBUS."""
    reserve, full = os.posix_fallocate, True

    def fallocate(fd: int, offset: int, length: int) -> None:
        if full:
            raise OSError(28, "No space left on device")
        reserve(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    worker = Worker(directory, "host-1-aa")
    worker.serve(3)
    worker.serve(4)
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    assert total(read(directory), "evenhand_requests_total") == 0
    full = False
    worker.publisher.publish()
    assert total(read(directory), "evenhand_requests_total") == 7
    for path in directory.path.glob("*.db"):
        assert path.stat().st_blocks * 512 >= path.stat().st_size, "it has holes"
    worker.publisher.close()
    full = True
    with pytest.raises(OSError, match="No space left"):
        directory.absorb("host-1-aa")
    assert total(read(directory), "evenhand_requests_total") == 7
    full = False
    directory.absorb("host-0-00")
    assert total(read(directory), "evenhand_requests_total") == 7


def test_files_grow_with_their_series(directory: MetricsDirectory) -> None:
    worker = Worker(directory, "host-1-aa")
    for n in range(300):
        worker.figures.observe(DURATION, 0.3, f"model-{n}", "other", "ok")
    worker.publisher.publish()
    # Not all at once: requests wait while they are written.
    assert 0 < total(read(directory), "evenhand_request_duration_seconds_count") <= files.NEW_AT_ONCE
    worker.publisher.close()
    found = read(directory)
    assert total(found, "evenhand_request_duration_seconds_count") == 300
    directory.absorb("host-1-aa")
    assert read(directory).items() >= {k: v for k, v in found.items() if "duration" in k[0]}.items()
    for path in directory.path.glob("*.db"):
        assert path.stat().st_blocks * 512 >= path.stat().st_size > 65536 or "counter" in path.name


def test_series_of_dead_workers_are_bounded_and_their_sums_stay(
    directory: MetricsDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SERIES_KEPT", {Kind.COUNTER: 5, Kind.HISTOGRAM: 3})
    for generation in range(4):
        worker = Worker(directory, f"host-{generation}-aa")
        for number in range(4):
            model = f"m{generation}-{number}"
            worker.figures.count(REQUESTS, model, "other", "ok", "none")
            worker.figures.observe(DURATION, 0.3, model, "other", "ok")
        worker.publisher.publish()
        worker.publisher.close()
        directory.absorb(f"host-{generation}-aa")
    found = read(directory)
    assert total(found, "evenhand_requests_total") == total(found, "evenhand_request_duration_seconds_count") == 16

    def models_of(wanted: str) -> set[str]:
        return {dict(labels)["model"] for name, labels in found if name == wanted}

    first = {"m0-0", "m0-1", "m0-2", "m0-3"}
    counted, timed = models_of("evenhand_requests_total"), models_of("evenhand_request_duration_seconds_count")
    assert counted > first | {"other"} and len(counted) == 5 + 1
    assert timed < first | {"other"} and len(timed) == 3 + 1
    assert value(found, "evenhand_request_duration_seconds_count", model="other", route="other", outcome="ok") == 13
