"""A reload under real gunicorn, of a copy of the code that the tests change."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.support.wait import eventually
from tests.workers.real_gunicorn import ROOT, Client, Connect, Gunicorn, Start, listening_workers

WORKERS = 2


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """The directory of a copy of all that gunicorn runs."""
    there = tmp_path / "code"
    for name in ("app", "workers", "lua"):
        shutil.copytree(ROOT / name, there / name)  # with what is compiled: it need not be compiled anew
    (there / "tests" / "workers").mkdir(parents=True)
    for name in ("tests/__init__.py", "tests/workers/__init__.py", "tests/workers/small_app.py"):
        shutil.copy(ROOT / name, there / name)
    return there


def change(path: Path, text: str) -> None:
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()


def write(code: Path, version: str) -> None:
    change(code / "app" / "__init__.py", f'"""Changed."""\n__version__ = "{version}"\n')


def versions(gunicorn: Gunicorn, connect: Connect) -> set[str]:
    """Of the workers that serve, as far as some connections tell: they are shared evenly."""
    return {connect(gunicorn).ask("/")[1]["version"] for _ in range(3 * WORKERS)}


class Watch:
    """Asks over new connections all the time."""

    def __init__(self, gunicorn: Gunicorn) -> None:
        self._gunicorn = gunicorn
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.asked = 0
        self.lost: list[Exception] = []
        self.longest_s = 0.0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.is_set():
            begun_s = time.monotonic()
            try:
                client = Client(self._gunicorn.port)
                client.ask("/")
                client.sock.close()
                self.asked += 1
                self.longest_s = max(self.longest_s, time.monotonic() - begun_s)
            except Exception as e:
                self.lost.append(e)
            time.sleep(0.03)


def test_r54_a_reload_loads_new_code_worker_by_worker(start: Start, connect: Connect, code: Path) -> None:
    gunicorn = start(workers=WORKERS, root=code, EVENHAND_GRACE_S="20")
    old = gunicorn.workers()
    assert versions(gunicorn, connect) != {"7.7.7"}
    stream = connect(gunicorn)
    stream.send("/stream?n=90&gap_s=0.1")
    write(code, "7.7.7")
    app = code / "tests" / "workers" / "small_app.py"
    change(app, app.read_text() + "\nimport time\ntime.sleep(1.5)\n")  # what a large app takes to start
    with Watch(gunicorn) as watch:
        gunicorn.process.send(signal.SIGHUP)
        # While one of the old ones still streams, the new ones are there and complete.
        eventually(lambda: len(set(gunicorn.workers()) - set(old)) == WORKERS, within_s=20)
        eventually(lambda: versions(gunicorn, connect) == {"7.7.7"}, within_s=5)
        assert set(gunicorn.workers()) & set(old)
    assert watch.lost == []
    assert watch.asked > 20
    assert watch.longest_s < 1.2, "the old ones serve until the new ones do"
    assert stream.read_to_end().endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    eventually(lambda: not set(gunicorn.workers()) & set(old), within_s=5)
    gunicorn.stop()


def test_what_cannot_be_loaded_is_refused_and_the_old_workers_stay(start: Start, connect: Connect, code: Path) -> None:
    gunicorn = start(workers=WORKERS, root=code)
    old = sorted(gunicorn.workers())
    (before,) = versions(gunicorn, connect)
    ours, small_app = code / "app" / "__init__.py", code / "tests" / "workers" / "small_app.py"
    breaks = {
        "our code": (ours, "def ("),
        "what a worker loads": (small_app, "raise RuntimeError('bad')"),
        "a setting that cannot be read": (
            ours,
            "import os\n__version__ = '7.7.7'\nos.environ['EVENHAND_WORKERS'] = 'many'",
        ),
    }
    for refused, (broken, (path, text)) in enumerate(breaks.items(), 1):
        right = path.read_text()
        change(path, f"{right}\n{text}\n")
        gunicorn.process.send(signal.SIGHUP)
        eventually(lambda n=refused: gunicorn.log().count("the reload is refused") == n)  # type: ignore[misc]
        eventually(lambda: sorted(gunicorn.workers()) == old, within_s=5)
        assert versions(gunicorn, connect) == {before}, broken
        if refused < len(breaks):
            change(path, right)
    # A worker that dies then is replaced, by the code that serves.
    os.kill(old[0], signal.SIGKILL)
    eventually(lambda: len(gunicorn.workers()) == WORKERS and old[0] not in gunicorn.workers(), within_s=5)
    eventually(lambda: listening_workers(gunicorn) == WORKERS, within_s=5)
    assert versions(gunicorn, connect) == {before}
    # Right again, it is reloaded.
    old = gunicorn.workers()
    write(code, "7.7.8")
    gunicorn.process.send(signal.SIGHUP)
    eventually(lambda: len(set(gunicorn.workers()) - set(old)) == WORKERS)
    eventually(lambda: versions(gunicorn, connect) == {"7.7.8"}, within_s=5)
    assert gunicorn.process.stop() == 0


def test_workers_that_drain_are_none_of_those_that_serve(start: Start, connect: Connect) -> None:
    gunicorn = start(workers=WORKERS, EVENHAND_GRACE_S="30")
    streams = [connect(gunicorn) for _ in range(2 * WORKERS)]
    for stream in streams:
        stream.send("/stream?n=1000&gap_s=0.1")
        stream.read_until(b"data: 0\n\n\r\n")
    old = gunicorn.workers()
    os.kill(old[0], signal.SIGTERM)  # by an operator: it drains for as long as its streams run
    eventually(lambda: listening_workers(gunicorn) == WORKERS and len(gunicorn.workers()) == WORKERS + 1, within_s=5)
    gunicorn.process.send(signal.SIGHUP)
    eventually(lambda: len(gunicorn.workers()) == 2 * WORKERS + 1, within_s=10)  # 2 old ones, and the one between
    eventually(lambda: listening_workers(gunicorn) == WORKERS, within_s=5)
    newest = max(set(gunicorn.workers()) - set(old))
    os.kill(newest, signal.SIGKILL)
    eventually(lambda: listening_workers(gunicorn) == WORKERS and newest not in gunicorn.workers(), within_s=5)
    # The end does not wait for a reload that is under way.
    gunicorn.process.send(signal.SIGHUP)
    began = time.monotonic()
    gunicorn.process.stop(signal.SIGINT)
    assert time.monotonic() - began < 6
