"""When the janitor looks: at each change of the registry, now and then, and only whoever has the turn tidies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.errors import StoreUnavailable
from tests.support.wait import aeventually
from workers import janitor as janitor_module
from workers.janitor import Janitor


class FakeDistServe:
    """Notes what it is asked for; `trouble` is raised by what goes to Redis."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.trouble: Exception | None = None
        self.gate: asyncio.Event | None = None

    def tidy_own(self) -> None:
        self.log.append("own")

    async def tidy(self) -> None:
        self.log.append("all")
        if self.gate is not None:
            await self.gate.wait()
        if self.trouble is not None:
            raise self.trouble


class FakeRegistry:
    def __init__(self) -> None:
        self.on_change: list[Callable[[], Any]] = []

    def changes(self) -> None:
        for told in self.on_change:
            told()


class World:
    def __init__(self) -> None:
        self.distserve = FakeDistServe()
        self.registry = FakeRegistry()
        self.leads = True
        self.janitor = Janitor(
            distserve=self.distserve,  # type: ignore[arg-type]
            registry=self.registry,  # type: ignore[arg-type]
            leads=lambda: self.leads,
        )


@asynccontextmanager
async def running(world: World) -> AsyncIterator[list[str]]:
    task = asyncio.create_task(world.janitor.run())
    yield world.distserve.log
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)


@pytest.fixture
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor_module, "LOOK_EVERY_S", 3600.0)


async def test_who_has_the_turn_tidies_for_all_and_the_others_for_themselves(no_hurry: None) -> None:
    world = World()
    async with running(world) as log:
        await aeventually(lambda: log == ["own", "all"])
        world.leads = False
        world.registry.changes()
        await aeventually(lambda: log == ["own", "all", "own"])
        world.leads = True
        world.registry.changes()
        await aeventually(lambda: log == ["own", "all", "own", "own", "all"])


async def test_it_looks_now_and_then_without_being_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor_module, "LOOK_EVERY_S", 0.005)
    async with running(World()) as log:
        await aeventually(lambda: log.count("all") >= 5)


async def test_a_change_while_it_tidies_is_looked_at_afterwards(no_hurry: None) -> None:
    world = World()
    world.distserve.gate = asyncio.Event()
    async with running(world) as log:
        await aeventually(lambda: log == ["own", "all"])
        for _ in range(3):
            world.registry.changes()
        world.distserve.gate.set()
        await aeventually(lambda: log == ["own", "all"] * 2)
        await asyncio.sleep(0.02)
        assert log == ["own", "all"] * 2, "once for all of them"


async def test_r96_redis_away_does_not_end_it(no_hurry: None) -> None:
    world = World()
    world.distserve.trouble = StoreUnavailable("Redis can't be used")
    async with running(world) as log:
        await aeventually(lambda: log == ["own", "all"])
        world.registry.changes()
        await aeventually(lambda: log == ["own", "all"] * 2)


async def test_it_ends_in_the_middle_of_tidying(no_hurry: None) -> None:
    world = World()
    world.distserve.gate = asyncio.Event()
    async with running(world) as log:
        await aeventually(lambda: log == ["own", "all"])
