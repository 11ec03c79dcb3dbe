"""Redis frozen, killed, emptied, read-only, full, unreachable, or losing replies: requests go on, within one
bounded wait each, from the last known nodes and local counts; soon after it is back the counts are exact.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import NoNodeAvailable, StoreUnavailable
from app.store import ledger as ledger_module
from app.store.ledger import Ticket
from app.store.locator import Locator
from app.store.pipeline import Pipeline
from app.store.registry import CALLS_AT_ONCE
from tests.store.faults import LossyRoad
from tests.store.harness import Load, Worker, exact, give_back, held_by, ledger_of, of, registered, totals, workers
from tests.store.processes import worker_processes
from tests.support.redis import PrivateRedis, Space, TcpProxy
from tests.support.wait import aeventually
from workers.reaper import Reaper

A, B = "http://10.0.0.1:23333", "http://10.0.0.2:23333"

TIMEOUT_S = 0.3
BOUNDED_S = 1.3
"""One wait for a reply (TIMEOUT_S and its grace), or one for a look at the registry (twice TIMEOUT_S),
and what a busy machine adds."""
AT_ONCE_S = 0.25
"""What a busy machine may need for a decision that waits for nothing."""


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The instants at which somebody tried to open a hot connection."""
    tried: list[float] = []
    real = Pipeline.open

    async def tell(*args: Any, **options: Any) -> Pipeline:
        tried.append(time.monotonic())
        return await real(*args, **options)

    monkeypatch.setattr(Pipeline, "open", tell)
    return tried


class Scene:
    """Three workers under load, 15 long requests of theirs, and the nodes A and B."""

    def __init__(self, space: Space, made: list[Worker], load: Load, held: list[Ticket]) -> None:
        self.space, self.made, self.load, self.held = space, made, load, held
        self.nodes = registered(space)

    async def all_local(self) -> None:
        await aeventually(lambda: not any(worker.shared for worker in self.made))

    async def go_on_locally(self) -> None:
        """Everybody notices; from then on nobody waits for anything."""
        await self.all_local()
        await self.go_on()
        self.load.longest_s = 0.0
        await self.go_on()
        assert self.load.longest_s < AT_ONCE_S

    async def go_on(self) -> None:
        """The usual traffic; long requests begin and end too."""
        await self.load.more(40)
        give_back(self.held[:3], succeeded=True)
        del self.held[:3]
        self.held += await self.made[0].take(2)

    async def is_exact(self, within_s: float = 2.0) -> None:
        """Redis is well from now on: soon all is as if nothing had happened."""
        since_s = time.monotonic()
        await aeventually(lambda: all(worker.shared for worker in self.made), within_s=within_s)
        await self.load.more(30)
        await self.load.stop()
        assert self.load.failures == []
        assert len(self.held) == sum(held_by(self.made).values())
        await aeventually(lambda: exact(self.space, self.made), within_s=since_s + within_s - time.monotonic())
        assert registered(self.space) == self.nodes
        give_back(self.held)
        await aeventually(lambda: totals(self.space) == {})


async def scene(stack: AsyncExitStack, space: Space, url: str | None = None) -> Scene:
    made = await stack.enter_async_context(workers(space, 3, url=url, timeout_s=TIMEOUT_S))
    await made[0].add_ready(A)
    await made[0].add_ready(B, key="key-of-b")
    held = [ticket for worker in made for ticket in await worker.take(5)]
    load = await stack.enter_async_context(Load(made, clients=9))
    await load.more(60)
    return Scene(space, made, load, held)


# --- the server -----------------------------------------------------------------------------------


async def test_r96_frozen_while_acquiring_and_releasing(own_redis: Space, attempts: list[float]) -> None:
    async with AsyncExitStack() as stack:
        now = await scene(stack, own_redis)
        own_redis.server.pause()
        await now.go_on_locally()
        # Frozen long enough for everybody to have tried again, and what they sent lies in its sockets.
        goal = len(attempts) + 6
        await aeventually(lambda: len(attempts) >= goal, within_s=10)
        await now.go_on()
        own_redis.server.resume()
        await now.is_exact()
        assert now.load.longest_s < BOUNDED_S


async def test_r08_releases_while_frozen_are_made_good(own_redis: Space) -> None:
    async with workers(own_redis, 2, timeout_s=TIMEOUT_S) as made:
        await made[0].add_ready(A)
        tickets, others = await made[0].take(30), await made[1].take(4)
        own_redis.server.pause()
        give_back(tickets, succeeded=True)  # at once, no waiting
        await aeventually(lambda: not any(worker.shared for worker in made))
        own_redis.server.resume()
        await aeventually(lambda: exact(own_redis, made))
        assert totals(own_redis) == {A: len(others)}


async def test_killed_and_restarted_empty(own_redis: Space) -> None:
    async with AsyncExitStack() as stack:
        now = await scene(stack, own_redis)
        own_redis.server.kill()
        await now.go_on_locally()
        await asyncio.to_thread(own_redis.server.start)
        await now.is_exact()
        assert now.load.longest_s < BOUNDED_S


async def test_restarted_from_an_older_dump(own_redis: Space) -> None:
    async with AsyncExitStack() as stack:
        now = await scene(stack, own_redis)
        own_redis.cli("SAVE")
        older = now.nodes
        await now.made[1].add_ready("http://10.0.0.3:23333", models=("another",))
        assert await now.made[1].registry.remove("http://10.0.0.3:23333")
        await now.made[2].add_ready(A, speed=1.5)
        now.nodes = registered(own_redis)
        assert now.nodes != older
        await now.go_on()
        own_redis.server.kill()
        await now.go_on_locally()
        await asyncio.to_thread(own_redis.server.start)
        await now.is_exact()


async def test_flushall_under_load(own_redis: Space) -> None:
    async with AsyncExitStack() as stack:
        now = await scene(stack, own_redis)
        for _ in range(3):
            own_redis.cli("FLUSHALL")
            await now.go_on()
        own_redis.cli("FLUSHALL")
        await now.is_exact()
        assert now.load.longest_s < BOUNDED_S


async def test_r99_scripts_flushed_in_mid_traffic(own_redis: Space, attempts: list[float]) -> None:
    async with AsyncExitStack() as stack:
        now = await scene(stack, own_redis)
        joined = len(attempts)
        for _ in range(5):
            own_redis.cli("SCRIPT", "FLUSH")
            await now.go_on()
        assert len(attempts) == joined, "lost scripts are no reason to give up the connection"
        await now.is_exact()


async def test_a_decision_after_the_scripts_were_lost_is_a_shared_one(own_redis: Space) -> None:
    async with workers(own_redis, 2) as (w1, w2):
        await w1.add_ready(A, models=("m", "only-a"))
        await w1.add_ready(B)
        await w2.registry.refresh()
        await w1.take(10, model="only-a")
        own_redis.cli("SCRIPT", "FLUSH")
        assert [ticket.url for ticket in await w2.take(10)] == [B] * 10
        assert totals(own_redis) == {A: 10, B: 10}


async def test_r97_demoted_to_a_read_only_replica(own_redis: Space) -> None:
    async with AsyncExitStack() as stack:
        now = await scene(stack, own_redis)
        own_redis.cli("REPLICAOF", "127.0.0.1", "1")
        await now.go_on_locally()
        assert "READONLY" in str(now.made[0].ledger.trouble)
        own_redis.cli("REPLICAOF", "NO", "ONE")
        await now.is_exact()
        assert now.load.longest_s < BOUNDED_S


FULL = (("CONFIG", "SET", "maxmemory", "1"), ("CONFIG", "SET", "maxmemory", "0"), "OOM")
READ_ONLY = (("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE"), "READONLY")


@pytest.mark.parametrize(("begin", "end", "word"), [FULL, READ_ONLY], ids=["full", "read-only"])
@pytest.mark.parametrize("idle", [False, True], ids=["under load", "idle"])
async def test_a_redis_that_takes_no_writes_is_left_once_until_it_does(
    own_redis: Space,
    attempts: list[float],
    caplog: pytest.LogCaptureFixture,
    begin: tuple[str, ...],
    end: tuple[str, ...],
    word: str,
    idle: bool,
) -> None:
    async with AsyncExitStack() as stack:
        now = await scene(stack, own_redis)
        if idle:  # with nothing counted anywhere too, a full one must not look well
            await now.load.stop()
            give_back(now.held)
            await aeventually(lambda: exact(own_redis, now.made))
        caplog.clear()
        own_redis.cli(*begin)
        await now.all_local()
        goal = len(attempts) + 9  # three each
        while len(attempts) < goal:
            assert not any(worker.shared for worker in now.made), "local, until a write is taken"
            if not idle:
                await now.go_on()
            await asyncio.sleep(0.01)
        assert all(word in str(worker.ledger.trouble) for worker in now.made)
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(said) == len(now.made) and all("decisions are local" in line and word in line for line in said), said
        own_redis.cli(*end)
        if idle:
            await aeventually(lambda: exact(own_redis, now.made), within_s=2.0)
        else:
            await now.is_exact()
            assert now.load.longest_s < BOUNDED_S


async def test_the_server_takes_no_more_connections(own_redis: Space) -> None:
    async with AsyncExitStack() as stack:
        now = await scene(stack, own_redis)
        own_redis.cli("CONFIG", "SET", "maxclients", "1")  # the test's own
        own_redis.cli("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        own_redis.cli("CLIENT", "KILL", "TYPE", "pubsub")
        await now.go_on_locally()
        assert "max number of clients" in str(now.made[0].ledger.trouble)
        own_redis.cli("CONFIG", "SET", "maxclients", "1000")
        await now.is_exact()


async def test_more_managing_calls_than_connections_wait_for_their_turn(own_redis: Space) -> None:
    calls = 10 * CALLS_AT_ONCE  # more than the client library has connections
    async with Worker(own_redis.url, own_redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        found = await asyncio.gather(*(worker.registry.move_breaker(A, "close") for _ in range(calls)))
        assert len(found) == calls
        assert len(own_redis.client.client_list()) <= CALLS_AT_ONCE + 5
    async with Worker(own_redis.url, own_redis.namespace, "w2", timeout_s=TIMEOUT_S) as worker:
        own_redis.server.pause()
        since_s = time.monotonic()
        ended = await asyncio.gather(
            *(worker.registry.move_breaker(A, "close") for _ in range(calls)), return_exceptions=True
        )
        assert time.monotonic() - since_s < 4 * BOUNDED_S
        assert all(isinstance(e, StoreUnavailable) for e in ended)
        own_redis.server.resume()
        await aeventually(lambda: worker.shared)
        await worker.take()


async def test_wrong_password(own_redis: Space) -> None:
    own_redis.cli("CONFIG", "SET", "requirepass", "right")
    async with AsyncExitStack() as stack:
        now = await scene(stack, own_redis, url=f"{own_redis.url}?password=right")
        own_redis.cli("CONFIG", "SET", "requirepass", "another")
        own_redis.cli("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await now.go_on_locally()
        assert "WRONGPASS" in str(now.made[0].ledger.trouble)
        own_redis.cli("CONFIG", "SET", "requirepass", "right")
        await now.is_exact()


async def test_r96_started_without_redis(own_redis: Space) -> None:
    own_redis.server.kill()
    since_s = time.monotonic()
    async with Worker(own_redis.url, own_redis.namespace, "w1", timeout_s=TIMEOUT_S) as worker:
        assert time.monotonic() - since_s < 2 * BOUNDED_S
        assert worker.ledger.trouble
        with pytest.raises(NoNodeAvailable):
            await worker.ledger.acquire(of())
        with pytest.raises(StoreUnavailable):
            await worker.add_ready(A)
        await asyncio.to_thread(own_redis.server.start)
        await aeventually(lambda: worker.shared)
        await worker.add_ready(A)
        await worker.take(2)
        assert totals(own_redis) == {A: 2}


async def test_local_decisions_are_the_policys_on_local_counts(own_redis: Space) -> None:
    async with Worker(own_redis.url, own_redis.namespace, "w1", timeout_s=TIMEOUT_S) as worker:
        await worker.add_ready(A, speed=3.0)
        await worker.add_ready(B, speed=1.0)
        own_redis.server.pause()
        # 60 while nobody knows yet (they wait for one timeout, together), 60 when it is known.
        tickets = await worker.take(60)
        tickets += await worker.take(60)
        assert worker.ledger.counts == pytest.approx({A: 90, B: 30}, abs=1)
        own_redis.server.resume()
        await aeventually(lambda: exact(own_redis, [worker]))
        assert len(tickets) == sum(totals(own_redis).values()) == 120


async def test_local_decisions_pass_a_shunned_node_over_until_its_time_or_the_outage_ends(
    own_redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(ledger_module, "time", SimpleNamespace(monotonic=lambda: now_s, time_ns=time.time_ns))
    async with Worker(own_redis.url, own_redis.namespace, "w1", timeout_s=TIMEOUT_S) as worker:
        await worker.add_ready(A, models=("m", "only-a"))
        await worker.add_ready(B)
        own_redis.server.kill()
        await aeventually(lambda: not worker.shared)
        worker.ledger.shun(A, 10.0)
        urls = [ticket.url for ticket in await worker.take(4)]
        assert urls == [B] * 4
        assert [ticket.url for ticket in await worker.take(1, "only-a")] == [A], "better than nobody"
        now_s = 10.0
        assert [ticket.url for ticket in await worker.take(1)] == [A], "the one with less: its time is over"
        worker.ledger.shun(A, 10.0)
        await asyncio.to_thread(own_redis.server.start)
        await aeventually(lambda: exact(own_redis, [worker]))
        assert [ticket.url for ticket in await worker.take(2)] == [A, A], "Redis knows of no breaker"
        assert not worker.ledger.shuns(A), "the next outage begins anew"


async def test_local_decisions_know_the_latencies_of_this_worker(
    own_redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: now_s, time_ns=time.time_ns)
    monkeypatch.setattr(ledger_module, "time", clock)
    async with Worker(
        own_redis.url, own_redis.namespace, "w1", strategy="min_observed_latency", timeout_s=TIMEOUT_S
    ) as worker:
        await worker.add_ready(A, models=("m", "only-a"))
        await worker.add_ready(B, models=("m", "only-b"))
        for model, latency_s in (("only-a", 0.5), ("only-b", 0.25)):
            (ticket,) = await worker.take(model=model)
            now_s += latency_s
            ticket.release(succeeded=True)
        own_redis.server.pause()
        assert [ticket.url for ticket in await worker.take(20)] == [B] * 20
        own_redis.server.resume()
        await aeventually(lambda: exact(own_redis, [worker]))


# --- the road -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut_after_bytes", [1, 3, 10, 101])
async def test_the_connection_is_reset_in_mid_reply(redis: Space, cut_after_bytes: int) -> None:
    async with AsyncExitStack() as stack:
        road = await stack.enter_async_context(LossyRoad(redis.server.socket))
        now = await scene(stack, redis, url=road.url)
        for _ in range(3):
            road.cut_after_bytes = cut_after_bytes
            await aeventually(lambda: road.cut_after_bytes is None)
            await now.go_on()
        await now.is_exact()
        assert now.load.longest_s < BOUNDED_S


async def test_replies_are_lost_after_the_scripts_ran(redis: Space) -> None:
    async with AsyncExitStack() as stack:
        road = await stack.enter_async_context(LossyRoad(redis.server.socket))
        now = await scene(stack, redis, url=road.url)
        road.swallow = True
        await now.go_on_locally()
        road.swallow = False
        await now.is_exact()
        assert now.load.longest_s < BOUNDED_S


async def test_an_acquire_whose_reply_is_lost_counts_once(redis: Space) -> None:
    async with (
        LossyRoad(redis.server.socket) as road,
        Worker(road.url, redis.namespace, "w1", timeout_s=TIMEOUT_S) as worker,
    ):
        await worker.add_ready(A)
        road.swallow = True
        taking = asyncio.create_task(worker.take(10))
        await aeventually(lambda: totals(redis) == {A: 10})
        assert worker.ledger.counts == {}  # it does not know
        assert [ticket.url for ticket in await taking] == [A] * 10  # counted locally
        road.swallow = False
        await aeventually(lambda: exact(redis, [worker]))
        assert totals(redis) == {A: 10}


async def test_a_connection_lost_in_the_turn_in_which_it_was_made_is_noticed(redis: Space) -> None:
    """The reply to the joining restate and the end of the connection come in one read."""
    async with LossyRoad(redis.server.socket) as road, Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        worker.ledger._keeper.cancel()  # type: ignore[union-attr]
        worker.ledger._locator = Locator.of(road.url, keys=worker.keys, timeout_s=TIMEOUT_S)
        real = Pipeline.call

        async def call(self: Pipeline, command: Any) -> Any:
            if command[0] == "EVAL" and command[1].startswith("-- restate:"):
                road.append = b":1\r\n"  # a reply that nobody waits for: the connection can't be trusted
            return await real(self, command)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Pipeline, "call", call)
            worker.ledger._drop("the test says so")
            with pytest.raises(StoreUnavailable):
                await worker.ledger._join()
        assert road.append == b"", "the reply must have been spoilt"
        assert not worker.shared
        worker.ledger._keeper = asyncio.create_task(worker.ledger._keep())
        await aeventually(lambda: worker.shared)
        await worker.take()
        assert totals(redis) == {A: 1}


async def test_r09_cancelled_acquires_while_the_road_is_blocked(redis: Space, slow_road: TcpProxy) -> None:
    async with Worker(slow_road.url, redis.namespace, "w1", timeout_s=TIMEOUT_S) as worker:
        await worker.add_ready(A)
        slow_road.block()
        tasks = [asyncio.create_task(worker.ledger.acquire(of())) for _ in range(50)]
        await asyncio.sleep(0)
        for task in tasks[:25]:
            task.cancel()
        slow_road.unblock()
        tickets = await asyncio.gather(*tasks[25:])
        assert worker.ledger.counts == {A: 25}
        await aeventually(lambda: totals(redis) == {A: 25})
        give_back(list(tickets))


# --- the worker -----------------------------------------------------------------------------------


async def test_a_worker_frozen_for_longer_than_its_lease_comes_back(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker, worker_processes(redis, 1) as (process,):
        await worker.add_ready(A)
        await worker.take(3)
        await process.order("take", 7)
        reaper = Reaper(worker.registry, worker.keys)
        assert await reaper.reap() == 0
        os.kill(process.pid, signal.SIGSTOP)
        try:
            # Time goes by: its lease is over by Redis's clock.
            redis.cli("ZADD", redis.key("workers"), "1", process.name)
            assert await reaper.reap() == 7
            assert totals(redis) == {A: 3}
        finally:
            os.kill(process.pid, signal.SIGCONT)
        await aeventually(lambda: totals(redis) == {A: 10} and ledger_of(redis, process.name) == {A: 7})
        await process.order("give", 7)
        await aeventually(lambda: totals(redis) == {A: 3})


@pytest.mark.parametrize("first_call", ["acquire", "release", "renewal"])
async def test_a_worker_that_was_given_up_restates_at_its_next_call(redis: Space, first_call: str) -> None:
    async with workers(redis, 2) as (w1, w2):
        await w1.add_ready(A)
        tickets = await w1.take(4)
        await w2.registry.refresh()
        await w2.take()
        if first_call != "renewal":
            w1.ledger._keeper.cancel()  # type: ignore[union-attr]
        redis.cli("ZADD", redis.key("workers"), "1", "w1")
        assert await Reaper(w2.registry, w2.keys).reap() == 4
        expected = {"acquire": 5, "release": 3, "renewal": 4}[first_call]
        if first_call == "acquire":
            tickets += await w1.take()
        elif first_call == "release":
            tickets.pop().release(succeeded=False)
        await aeventually(lambda: totals(redis) == {A: expected + 1})
        assert ledger_of(redis, "w1") == {A: expected}


async def test_a_worker_that_was_given_up_decides_with_the_others_counts_at_once(redis: Space) -> None:
    async with workers(redis, 2) as (w1, w2):
        await w1.add_ready(A, models=("m", "only-a"))
        await w1.add_ready(B)
        await w2.registry.refresh()
        await w2.take(10, model="only-a")
        redis.cli("ZADD", redis.key("workers"), "1", "w1")
        await Reaper(w2.registry, w2.keys).reap()
        assert [ticket.url for ticket in await w1.take(10)] == [B] * 10
        assert totals(redis) == {A: 10, B: 10}


@pytest.mark.parametrize(
    "damage",
    [
        ("DEL", "unfinished:w1"),
        ("DEL", "sessions"),
        ("DEL", "workers"),
        ("HSET", "unfinished:w1", A, "77"),
        ("HSET", "unfinished:w1", "http://never-was", "5"),
        ("HSET", "unfinished:w1", A, "no number"),
        ("SET", "unfinished:w1", "a string"),
    ],
)
async def test_the_renewal_repairs_a_ledger_that_somebody_edited(
    redis: Space, damage: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "RENEW_S", 0.1)
    async with workers(redis, 2) as made:
        await made[0].add_ready(A)
        await made[0].take(4)
        await made[1].take(2)
        redis.cli(damage[0], redis.key(damage[1]), *damage[2:])

        def mended() -> bool:
            assert redis.cli("TYPE", redis.key("unfinished:w1")) == "hash"
            assert ledger_of(redis, "w1") == {A: 4} and ledger_of(redis, "w2") == {A: 2}
            assert redis.cli("HLEN", redis.key("sessions")) == redis.cli("ZCARD", redis.key("workers")) == 2
            return all(worker.shared for worker in made)

        await aeventually(mended)
        names = [made[0].keys.unfinished, made[0].keys.workers, made[0].keys.load_index]
        names += [made[0].keys.ledger(w.name) for w in made]
        await made[0].registry.run("recount_unfinished", names, ["w1", "w2"])
        assert totals(redis) == {A: 6}


def mend(space: Space, worker: Worker) -> Callable[[], Awaitable[Any]]:
    names = [worker.keys.unfinished, worker.keys.workers, worker.keys.load_index, worker.keys.ledger(worker.name)]
    return lambda: worker.registry.run("recount_unfinished", names, [worker.name])


@pytest.mark.parametrize(
    "damage",
    [
        ("DEL", "unfinished"),
        ("HSET", "unfinished", A, "77"),
        ("HSET", "unfinished", B, "77"),
        ("HSET", "unfinished", A, "-3"),
        ("HSET", "unfinished", A, "no number"),
        ("HSET", "unfinished", B, "no number"),
        ("SET", "unfinished", "a string"),
    ],
)
async def test_a_recount_repairs_totals_that_somebody_edited(redis: Space, damage: tuple[str, ...]) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        await worker.take(4)
        redis.cli(damage[0], redis.key(damage[1]), *damage[2:])
        assert await mend(redis, worker)() == [0, 1]
        assert redis.cli("HGETALL", redis.key("unfinished")) == {A: "4"}
        assert await mend(redis, worker)() == [0, 0]


def test_a_private_redis_per_test_is_what_this_file_breaks(own_redis: Space, redis_server: PrivateRedis) -> None:
    assert own_redis.server.pid != redis_server.pid
