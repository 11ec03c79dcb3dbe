"""A real Redis with a deployment in it that is well, and `evenhand check` of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app import cli
from tests.support.contract import ScriptedView, node, state, worker
from tests.support.engine import SimulatedEngine
from tests.support.redis import PrivateRedis, Space

WORKERS = ("vm-11-aa", "vm-12-bb")
PERSISTENT = {"appendonly": "yes"}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [v for v in os.environ if v.startswith("EVENHAND_")]:
        monkeypatch.delenv(variable)


@pytest.fixture
def server() -> Iterator[PrivateRedis]:
    """A Redis of the test's own, set up as it should be."""
    with PrivateRedis(tcp=True, options=PERSISTENT) as server:
        yield server


@pytest.fixture
def engines(engine_factory: Callable[..., SimulatedEngine]) -> list[SimulatedEngine]:
    return [engine_factory(), engine_factory()]


@pytest.fixture
def deployed(server: PrivateRedis, engines: list[SimulatedEngine]) -> Space:
    """The keys of two workers and two nodes, one of which has two requests."""
    space = Space(server, "default")
    urls = [engine.url for engine in engines]
    until_ms = int(time.time() * 1000) + 8000
    space.cli("SET", space.key("layout"), "1")
    space.cli("SET", space.key("version"), "4")
    space.cli("SADD", space.key("nodes"), *urls)
    for url in urls:
        space.cli("HSET", space.key(f"node:{url}"), "role", "1", "state", "ready")
        space.cli("RPUSH", space.key(f"latency:{url}"), "0.5")
    for name in WORKERS:
        space.cli("ZADD", space.key("workers"), until_ms, name)
        space.cli("HSET", space.key("sessions"), name, "1")
        space.cli("HSET", space.key(f"unfinished:{name}"), urls[0], "1")
    space.cli("HSET", space.key("unfinished"), urls[0], "2")
    space.cli("SET", space.key("load:0"), "")  # rebuilt whenever it is not right
    return space


@pytest.fixture
def view(monkeypatch: pytest.MonkeyPatch, engines: list[SimulatedEngine]) -> ScriptedView:
    """The same as the view tells it."""
    scripted = ScriptedView(
        state(*(node(engine.url) for engine in engines), workers=[worker(name) for name in WORKERS])
    )
    scripted.install(monkeypatch)
    return scripted


class Checked:
    """What one `evenhand check --json` said."""

    def __init__(self, code: int, document: dict[str, Any]) -> None:
        self.code = code
        self.document = document
        self.not_checked = [item["what"] for item in document["not_checked"]]

    def of(self, check: str, level: str | None = None) -> list[str]:
        """What was said under a name (at a level)."""
        return [f["says"] for f in self.document["findings"] if f["check"] == check and level in (None, f["level"])]

    @property
    def trouble(self) -> dict[str, str]:
        """check -> level of all that is not well."""
        return {f["check"]: f["level"] for f in self.document["findings"] if f["level"] != "ok"}


Check = Callable[..., Checked]


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Check:
    """`check("--redis-url", ...)`; every finding that is no ok says how to mend it."""

    def call(*words: str) -> Checked:
        capsys.readouterr()
        code = cli.main(["check", "--json", *words])
        checked = Checked(code, json.loads(capsys.readouterr().out))
        assert all(f["mend"] for f in checked.document["findings"] if f["level"] != "ok")
        assert code == (1 if "bad" in checked.trouble.values() else 0)
        return checked

    return call


@pytest.fixture
def well(check: Check, deployed: Space, view: ScriptedView) -> Callable[[], Checked]:
    """`well()`: a check of the deployment that is well but for what the test did to it."""
    return lambda: check("--redis-url", deployed.url)
