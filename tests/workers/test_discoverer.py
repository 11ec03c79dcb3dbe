"""The discoverer on a real registry: patience, failures, whose a node is, and whose turn it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from app.discovery.listing import Drain, Listed, ReadFailed, Reading, decide
from app.nodes import Node, Role, State
from tests.store.harness import Worker, registered, workers
from tests.support.redis import Space
from tests.support.wait import aeventually
from workers import discoverer as module
from workers.discoverer import Discoverer

A, B, C = (f"http://10.0.0.{i}:8000" for i in (1, 2, 3))
NAME = "dns://engine:8000"


class FakeReader:
    """Says what `now` is; each look counts."""

    every_s = 0.0

    def __init__(self, patience_s: float = 0.0, name: str = NAME) -> None:
        self.name = name
        self.patience_s = patience_s
        self.now: Reading | ReadFailed | None = None
        self.looks = 0
        self.forgot = 0

    async def look(self) -> Reading | None:
        self.looks += 1
        if isinstance(self.now, ReadFailed):
            raise ReadFailed(str(self.now))
        return self.now

    def forget(self) -> None:
        self.forgot += 1

    def says(self, *listed: str | Listed, whole: bool = True) -> None:
        nodes = [one if isinstance(one, Listed) else Listed(one) for one in listed]
        self.now = Reading({one.url: one for one in nodes}, whole, "" if whole else "AAAA: silence")


class World:
    def __init__(self, redis: Space, worker: Worker, reader: FakeReader) -> None:
        self.redis, self.worker, self.reader = redis, worker, reader
        self.registry = worker.registry
        self.discoverer = Discoverer(
            reader=reader, registry=worker.registry, keys=worker.keys, worker=worker.name, grace_s=60.0
        )

    async def turn(self) -> dict[str, str]:
        """One turn at this moment; url -> state of all nodes."""
        assert await self.discoverer.lease.hold()
        self.discoverer._due_s = 0.0
        await self.discoverer._turn()
        return {url: node.state.value for url, node in self.registry.snapshot.nodes.items()}

    def later(self, seconds: float) -> None:
        """As if so many seconds had passed since all that was seen before."""
        self.discoverer._missing = {url: since - seconds for url, since in self.discoverer._missing.items()}

    def node(self, url: str) -> Node:
        return self.registry.snapshot.nodes[url]


@asynccontextmanager
async def world_of(redis: Space, **options: Any) -> AsyncIterator[World]:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        yield World(redis, worker, FakeReader(**options))


async def test_what_is_listed_is_registered_with_its_source_and_updated(redis: Space) -> None:
    async with world_of(redis) as world:
        world.reader.says(Listed(A, speed=2.0, key="k1", models=("m",), host_header="h", bootstrap_port=9), B)
        assert await world.turn() == {A: "pending", B: "pending"}
        fields = registered(redis)
        assert {name: fields[A][name] for name in ("source", "host_header", "speed", "key", "asked", "models")} == {
            "source": NAME,
            "host_header": "h",
            "speed": "2.0",
            "key": "k1",
            "asked": "0",
            "models": '["m"]',
        }
        assert (fields[B]["source"], fields[B]["asked"], fields[B]["key"]) == (NAME, "1", "")
        version = world.registry.snapshot.version
        await world.turn()
        assert world.registry.snapshot.version == version, "nothing has changed"
        world.reader.says(Listed(A, role=Role.Decode), B)
        await world.turn()
        node = world.node(A)
        assert (node.role, node.speed, node.host_header, node.asked) == (Role.Decode, None, "", True)
        assert A not in world.registry.snapshot.engine_keys, "a key that is listed no longer is sent no longer"
        assert world.registry.snapshot.version == version + 1


async def test_a_node_that_the_engine_says_the_models_of_keeps_them_over_an_update(redis: Space) -> None:
    async with world_of(redis) as world:
        world.reader.says(A)
        await world.turn()
        await world.registry.set_state(world.node(A), State.READY, models=("its", "own"))
        world.reader.says(Listed(A, speed=3.0))
        await world.turn()
        assert (world.node(A).models, world.node(A).asked, world.node(A).speed) == (("its", "own"), True, 3.0)


async def test_what_is_listed_no_longer_is_drained_and_comes_back(redis: Space) -> None:
    async with world_of(redis) as world:
        world.reader.says(A, B)
        await world.turn()
        world.reader.says(B)
        assert await world.turn() == {A: "draining", B: "pending"}
        assert world.node(A).reason == f"no longer listed by {NAME}"
        assert 0 < world.node(A).drain_until_ms - world.node(A).state_since_ms <= 60_000
        until_ms = world.node(A).drain_until_ms
        await world.turn()
        assert world.node(A).drain_until_ms == until_ms, "asked for once"
        world.reader.says(A, B)
        assert await world.turn() == {A: "pending", B: "pending"}
        world.reader.says()
        assert await world.turn() == {A: "draining", B: "draining"}


@pytest.mark.parametrize(
    ("then", "drained"),
    [
        ([], False),
        (["left out"], False),
        (["left out", "29 s"], False),
        (["left out", "29 s", "left out"], False),
        (["left out", "31 s", "left out"], True),
        (["left out", "31 s"], False),  # no answer says so still
        (["left out", "20 s", "listed", "20 s", "left out"], False),
        (["left out", "31 s", "fails"], False),
        (["left out", "31 s", "in part"], False),
        (["left out", "20 s", "fails", "20 s", "left out"], True),
        (["fails", "40 s", "fails"], False),
        (["in part", "40 s", "in part"], False),
        (["fails", "40 s", "left out"], False),
        (["left out", "20 s", "another has the turn", "20 s", "left out"], False),
    ],
)
async def test_answers_must_leave_a_node_out_for_thirty_seconds(redis: Space, then: list[str], drained: bool) -> None:
    async with world_of(redis, patience_s=30.0) as world:
        world.reader.says(A)
        await world.turn()
        for what in then:
            match what.split():
                case [seconds, "s"]:
                    world.later(float(seconds))
                    continue
                case ["left", "out"]:
                    world.reader.says()
                case ["listed"]:
                    world.reader.says(A)
                case ["in", "part"]:
                    world.reader.says(whole=False)
                case ["fails"]:
                    world.reader.now = ReadFailed("silence")
                case _:
                    world.discoverer._forget()
                    continue
            await world.turn()
        assert world.node(A).state == (State.DRAINING if drained else State.PENDING)


async def test_a_look_in_part_adds(redis: Space) -> None:
    async with world_of(redis) as world:
        world.reader.says(A)
        await world.turn()
        world.reader.says(B, whole=False)
        assert await world.turn() == {A: "pending", B: "pending"}


async def test_a_source_that_was_never_read_changes_nothing(redis: Space) -> None:
    async with world_of(redis) as world:
        world.reader.says(A)
        await world.turn()
        world.discoverer._forget()
        world.reader.now = ReadFailed("line 1: is no YAML")
        assert await world.turn() == {A: "pending"}
        world.reader.now = None
        assert await world.turn() == {A: "pending"}


async def test_each_trouble_is_told_once_and_its_end(redis: Space, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "evenhand.discovery")
    async with world_of(redis) as world:
        for what in ("a", "a", "b", "b", None, None, "b"):
            world.reader.now = ReadFailed(what) if what else Reading({})
            await world.turn()
    assert [record.getMessage() for record in caplog.records] == [
        f"{NAME}: a; its nodes stay as they are",
        f"{NAME}: b; its nodes stay as they are",
        f"{NAME}: is read again",
        f"{NAME}: b; its nodes stay as they are",
    ]


async def test_nodes_of_others_stay_as_they_are_listed_or_not(redis: Space) -> None:
    plain: dict[str, Any] = {"role": Role.Hybrid, "models": ("m",), "speed": None, "key": None}
    async with world_of(redis) as world:
        await world.registry.add(A, **plain)
        await world.registry.add(B, **plain, static=True)
        await world.registry.add(C, **plain, source="file:///nodes.yaml")
        version = world.registry.snapshot.version
        world.reader.says(*(Listed(url, speed=9.0) for url in (A, B, C)))
        await world.turn()
        world.reader.says()
        await world.turn()
        assert world.registry.snapshot.version == version


async def test_a_call_makes_a_node_the_callers_and_a_removal_by_hand_gives_it_back(redis: Space) -> None:
    plain: dict[str, Any] = {"role": Role.Hybrid, "models": ("m",), "speed": None, "key": None}
    async with world_of(redis) as world:
        world.reader.says(A)
        await world.turn()
        await world.registry.add(A, **plain)
        world.reader.says()
        await world.turn()
        assert (world.node(A).source, world.node(A).state) == ("", State.PENDING)
        world.reader.says(A)
        await world.registry.remove(A)
        await world.turn()
        assert world.node(A).source == NAME, "with the next look"


async def test_a_call_between_the_look_and_the_change_wins(redis: Space) -> None:
    """The scripts decide it, not what this worker had read."""
    plain: dict[str, Any] = {"role": Role.Hybrid, "models": ("m",), "speed": None, "key": "sk"}
    async with workers(redis, 1) as (worker,):
        registry = worker.registry
        assert await registry.add(A, **plain)
        assert not await registry.add(A, **plain, source=NAME)
        assert (registry.snapshot.nodes[A].source, registry.snapshot.engine_keys) == ("", {A: "sk"})
        assert await registry.add(B, **plain, source=NAME)
        seen = str(registry.snapshot.nodes[B].incarnation)
        assert await registry.add(B, **plain)
        assert await registry.drain_all([(B, seen)], 60, reason="no longer listed") == [False]
        assert registry.snapshot.nodes[B].state == State.PENDING
        assert not await registry.add(B, **plain, source="file:///other")


async def test_what_redis_loses_is_restored_with_its_source(redis: Space) -> None:
    async with world_of(redis) as world:
        world.reader.says(Listed(A, host_header="h"))
        await world.turn()
        redis.cli("FLUSHALL")
        assert await world.turn() == {A: "pending"}
        assert (world.node(A).source, world.node(A).host_header) == (NAME, "h")


async def test_many_nodes_are_registered_without_reading_the_registry_for_each(
    redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [f"http://10.1.0.{i}:8000" for i in range(250)]
    async with world_of(redis) as world:
        world.reader.says(*many)
        reads, read = 0, world.registry._read

        async def counted() -> Any:
            nonlocal reads
            reads += 1
            return await read()

        monkeypatch.setattr(world.registry, "_read", counted)
        assert list(await world.turn()) == many
        assert reads < 12
        assert [world.node(url).order for url in many] == list(range(1, 251))
        world.reader.says()
        reads = 0
        assert set((await world.turn()).values()) == {"draining"}
        await world.registry.remove_drained(many)
        assert reads < 16 and not world.registry.snapshot.nodes and not registered(redis)


async def test_a_long_list_that_was_a_mistake_is_taken_back_half_way(
    redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHANGES_S", -1.0)
    monkeypatch.setattr(module, "AT_ONCE", 1)
    async with world_of(redis) as world:
        world.reader.says(A, B, C)
        assert await world.turn() == {A: "pending"}
        assert await world.turn() == {A: "pending", B: "pending"}
        world.reader.says()
        assert sorted((await world.turn()).values()) == ["draining", "pending"]
        assert await world.turn() == {A: "draining", B: "draining"}
        assert await world.turn() == {A: "draining", B: "draining"}


async def test_a_registry_that_is_lost_between_two_of_many_is_restored(
    redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world_of(redis) as world:
        world.reader.says(A)
        await world.turn()
        world.reader.says(A, B, C)
        run = world.registry.run

        async def losing(name: str, names: Any, arguments: Any) -> Any:
            if name == "add_node" and arguments[0] == C:
                monkeypatch.setattr(world.registry, "run", run)
                redis.cli("FLUSHALL")
            return await run(name, names, arguments)

        monkeypatch.setattr(world.registry, "run", losing)
        await world.turn()
        assert await world.turn() == {A: "pending", B: "pending", C: "pending"}
        assert registered(redis).keys() == {A, B, C}
        assert {fields["source"] for fields in registered(redis).values()} == {NAME}


async def test_what_was_decided_of_an_older_registration_is_not_done(redis: Space) -> None:
    plain: dict[str, Any] = {"role": Role.Hybrid, "models": ("m",), "speed": None, "key": None}
    async with world_of(redis) as world:
        world.reader.says(A)
        await world.turn()
        (step,) = decide(NAME, {}, {A}, world.registry.snapshot.nodes, {})
        assert isinstance(step, Drain)
        await world.registry.add(A, **plain)
        await world.discoverer._drain([step])
        assert world.node(A).state == State.PENDING


# --- whose turn it is


@asynccontextmanager
async def running(redis: Space, readers: list[FakeReader]) -> AsyncIterator[list[World]]:
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(workers(redis, len(readers)))
        worlds = [World(redis, worker, reader) for worker, reader in zip(made, readers, strict=True)]
        tasks = [asyncio.create_task(world.discoverer.run()) for world in worlds]
        try:
            yield worlds
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURN_S", 0.02)


def looking(worlds: list[World]) -> Callable[[], list[World]]:
    return lambda: [world for world in worlds if world.discoverer.lease.held]


@pytest.mark.usefixtures("quick")
async def test_one_of_several_reads_and_another_follows(redis: Space, caplog: pytest.LogCaptureFixture) -> None:
    readers = [FakeReader(), FakeReader(), FakeReader()]
    for reader in readers:
        reader.says(A, B)
    async with running(redis, readers) as worlds:
        await aeventually(lambda: len(worlds[0].registry.snapshot.nodes) == 2)
        (leader,) = await aeventually(looking(worlds))
        assert [world.reader.looks > 0 for world in worlds] == [world is leader for world in worlds]
        assert redis.cli("GET", redis.key("version")) == "2", "each was added once"
        assert redis.cli("GET", redis.key(f"discovering:{NAME}")) == leader.worker.name
        assert 0 < redis.cli("PTTL", redis.key(f"discovering:{NAME}")) <= module.LEASE_MS
        # Somebody takes the lease, with a value that is nobody's: whoever had it reads no more.
        redis.cli("SET", redis.key(f"discovering:{NAME}"), "w9", "PX", "300")
        await aeventually(lambda: not leader.discoverer.lease.held)
        assert leader.reader.forgot > 1
        await aeventually(lambda: len(looking(worlds)()) == 1)
        # Another type, and it is nobody's for ever.
        redis.cli("DEL", redis.key(f"discovering:{NAME}"))
        redis.cli("RPUSH", redis.key(f"discovering:{NAME}"), "x")
        await aeventually(lambda: redis.cli("TYPE", redis.key(f"discovering:{NAME}")) == "string")
        line = f"'{redis.key(f'discovering:{NAME}')}' was a list and no string; it is replaced"
        await aeventually(lambda: line in caplog.text)
    assert redis.cli("EXISTS", redis.key(f"discovering:{NAME}")) == 0, "given back"
    assert redis.cli("GET", redis.key("version")) == "2"


@pytest.mark.usefixtures("quick")
async def test_each_source_has_a_turn_of_its_own(redis: Space) -> None:
    readers = [FakeReader(), FakeReader(name="file:///nodes.yaml")]
    readers[0].says(A)
    readers[1].says(A, B)
    async with running(redis, readers) as worlds:
        await aeventually(lambda: len(looking(worlds)()) == 2)
        await aeventually(lambda: len(worlds[0].registry.snapshot.nodes) == 2)
        assert worlds[0].node(B).source == "file:///nodes.yaml"
        assert worlds[0].node(A).source in (NAME, "file:///nodes.yaml")
