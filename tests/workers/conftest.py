"""Real gunicorns, ended with the test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers.real_gunicorn import Client, Connect, Gunicorn, Start


@pytest.fixture
def connect() -> Iterator[Connect]:
    made: list[Client] = []

    def one(gunicorn: Gunicorn) -> Client:
        made.append(Client(gunicorn.port))
        return made[-1]

    yield one
    for client in made:
        client.sock.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Gunicorn] = []

    def one(*arguments: str, **options: Any) -> Gunicorn:
        made.append(Gunicorn(tmp_path / f"log-{len(made)}", *arguments, **options))
        return made[-1]

    yield one
    for gunicorn in made:
        gunicorn.process.kill()
