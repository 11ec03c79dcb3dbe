"""One contender on its feet, three engines behind it, and a measurement of it; all under guard, on loopback."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.routing import tree
from bench.routing.contenders import HOST, ROOT, Contender, NotHad, Place, ask
from bench.routing.engine import CHUNKS, COUNTS, MARK, MODEL
from bench.routing.load import Plan
from tests.support.process import Process
from tests.support.wait import eventually

ENGINES_WITHIN_S = 10.0
STOP_WITHIN_S = 10.0
FIRST_ANSWER_WITHIN_S = 15.0
COLOURS = re.compile("\x1b\\[[0-9;]*m")
CHAT = "/v1/chat/completions"
TRIES, AT_ONCE = 8, 6  # of the look whether all engines get requests
EXTRA_S = 25.0  # beyond its time, after which a measurement hangs


class Engines:
    """A context manager. `words`: their module, which says their ports, and its arguments. `root`: their guard, for the
    CPU they use."""

    def __init__(self, *words: str) -> None:
        self._words = words or ("bench.routing.engine",)

    def __enter__(self) -> Engines:
        self._log = Path(tempfile.mkstemp(prefix="evenhand-bench-", suffix=".log")[1])
        self._process = Process([sys.executable, "-m", *self._words], log_file=self._log, cwd=ROOT)
        try:
            ports = json.loads(eventually(lambda: self._process.log().strip(), within_s=ENGINES_WITHIN_S))
        except (AssertionError, ValueError):
            self.__exit__()
            raise
        self.urls = [f"http://{HOST}:{port}" for port in ports]
        self.root = tree.guard_of(self._process.pid)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._log.unlink(missing_ok=True)

    def counts(self) -> list[int]:
        counts: list[int] = json.loads(ask(self.urls[0], COUNTS)[1])
        return counts


class Standing:
    """A contender that serves. `root` is None for `direct`."""

    def __init__(self, urls: list[str], root: int | None, log: Path | None) -> None:
        self.urls, self.root, self.log = urls, root, log


@contextmanager
def standing(contender: Contender, python: str, engines: Engines) -> Iterator[Standing]:
    """Started, ready and looked at.

    Raises:
        NotHad: it did not become ready, or is not what it should be; with the end of its log.
    """
    if contender.command is None:
        one = Standing(engines.urls, None, None)
        look(one, engines, every=False)
        yield one
        return
    directory = Path(tempfile.mkdtemp(prefix="evenhand-bench-"))
    port, spare = _free_ports(2)
    place = Place(port, spare, engines.urls, directory)
    ours = contender.package is None
    process = Process(
        [str(word) for word in contender.command(python, place)],
        log_file=directory / "log",
        env=_environment() | contender.env,
        cwd=ROOT if ours else directory,
    )
    try:
        try:
            _await_ready(contender, place, process)
            one = Standing([place.url], tree.guard_of(process.pid), process.log_file)
            look(one, engines)
        except (AssertionError, OSError, http.client.HTTPException, NotHad) as e:
            told = f"{e}; {_end_of(process.log())}"
            raise NotHad(told.replace(str(directory), "...").replace(str(Path.home()), "~")) from None
        yield one
    finally:
        with suppress(AssertionError):
            process.stop(within_s=STOP_WITHIN_S)
        process.kill()
        shutil.rmtree(directory, ignore_errors=True)


def _await_ready(contender: Contender, place: Place, process: Process) -> None:
    """Some are healthy before they know their engines: a first answer is waited for too."""

    def answers(path: str, value: object = None) -> bool:
        if not process.running:
            raise NotHad("it ended")
        try:
            return ask(place.url, path, value, timeout_s=2)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    eventually(lambda: answers(contender.health), within_s=contender.start_within_s, every_s=0.1)
    if contender.introduce:
        contender.introduce(place)
    eventually(lambda: answers(CHAT, _value(False)), within_s=FIRST_ANSWER_WITHIN_S, every_s=0.1)


def look(one: Standing, engines: Engines, *, every: bool = True) -> None:
    """Whole answers and streams come from the engines, and (`every`) from each of them.

    Raises:
        NotHad: they don't.
    """
    before = engines.counts()
    asked = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in range(TRIES):
            for stream in (False, True):
                for status, said in pool.map(lambda _, stream=stream: _chat(one.urls[0], stream), range(AT_ONCE)):
                    asked += 1
                    _check(status, said, stream)
            seen = [now - then for now, then in zip(engines.counts(), before, strict=True)]
            if all(seen) or not every:
                break
    if sum(seen) < asked:
        raise NotHad(f"of {asked} requests only {seen} came to the engines")
    if every and not all(seen):
        raise NotHad(f"not all engines get requests: {seen}")


def _chat(url: str, stream: bool) -> tuple[int, bytes]:
    return ask(url, CHAT, _value(stream), timeout_s=20)


def _value(stream: bool) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": stream}


def _check(status: int, said: bytes, stream: bool) -> None:
    if status != 200 or MARK.encode() not in said:
        raise NotHad(f"its answer is {status} {said[:300]!r}")
    if stream and (said.count(b"data:") < CHUNKS or b"[DONE]" not in said):
        raise NotHad(f"its stream has {said.count(b'data:')} events and ends with {said[-60:]!r}")


def measure(plan: Plan) -> dict[str, Any]:
    """Raises NotHad if the load generator fails."""
    words = [sys.executable, "-m", "bench.routing.load", json.dumps(asdict(plan))]
    limit_s = plan.warm_s + plan.window_s + EXTRA_S
    try:
        ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise NotHad(f"its measurement took longer than {limit_s:g} s") from None
    if ran.returncode:
        raise NotHad(f"the load generator failed: {ran.stderr.strip()[-500:]}")
    measured: dict[str, Any] = json.loads(ran.stdout)
    return measured


def logged_bytes(one: Standing) -> int:
    return one.log.stat().st_size if one.log else 0


def idle_mib(one: Standing) -> float | None:
    return None if one.root is None else tree.memory_mib(one.root)


def _environment() -> dict[str, str]:
    """Without what would change Evenhand's settings, another interpreter's modules, or the way to loopback."""
    foreign = ("evenhand_", "python", "http_proxy", "https_proxy", "all_proxy")
    return {name: value for name, value in os.environ.items() if not name.lower().startswith(foreign)}


def _free_ports(number: int) -> list[int]:
    held = [socket.create_server((HOST, 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def _end_of(log: str) -> str:
    lines = [line for line in COLOURS.sub("", log).splitlines() if line.strip()]
    return "its log ends: " + " | ".join(lines[-3:])[-600:] if lines else "it logged nothing"
