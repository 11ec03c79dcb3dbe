"""A deployment that answers with scripted documents, and an environment without settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from app import cli
from tests.support.contract import Scripted, ScriptedView, node, state


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [v for v in os.environ if v.startswith("EVENHAND_")]:
        monkeypatch.delenv(variable)


@pytest.fixture
def deployment() -> Iterator[Scripted]:
    with Scripted(state(node("http://a:1", unfinished=3), node("http://b:2", models=["m", "n"]))) as scripted:
        yield scripted


@pytest.fixture
def view(monkeypatch: pytest.MonkeyPatch) -> ScriptedView:
    """What stands in Redis; every --redis-url leads to it."""
    scripted = ScriptedView(state(node("http://r:1", role="Decode", latency_s=[1.0, 2.0])))
    scripted.install(monkeypatch)
    return scripted


@pytest.fixture
def run() -> Callable[..., int]:
    def call(*words: str) -> int:
        try:
            return cli.main(words)
        except SystemExit as e:
            return int(e.code or 0)

    return call
