"""Giving back what the dead had counted: exactly that, once, and nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
import redis as redis_client

from app.nodes import Role
from app.settings import Settings
from tests.store.harness import Worker, exact, give_back, ledger_of, registered, totals, workers
from tests.store.test_ledger import kill
from tests.support.redis import PrivateRedis, Space
from tests.support.wait import aeventually
from workers import reaper as reaper_module
from workers.reaper import Reaper, forget_registry
from workers.reaper import give_back as give_back_at_once

A, B = "http://10.0.0.1:23333", "http://10.0.0.2:23333"


def settings_for(space: Space) -> Settings:
    return Settings.load({"redis_url": space.url, "namespace": space.namespace})


async def test_r08_a_killed_workers_share_comes_back_when_its_lease_is_over(redis: Space) -> None:
    lease_s = 1.5
    async with workers(redis, 2) as (w1, w2):
        await w1.add_ready(A)
        await w2.registry.refresh()
        dead = Worker(redis.url, redis.namespace, "dead", lease_s=lease_s)
        await dead.registry.start()
        await dead.ledger.start()
        await dead.take(30)
        await w1.take(3)
        await w2.take(4)
        since_s = time.monotonic()
        await kill(dead)
        reapers = [Reaper(worker.registry, worker.keys) for worker in (w1, w2)]
        assert await reapers[0].reap() == 0
        assert totals(redis) == {A: 37}
        returned = 0
        while not returned and time.monotonic() - since_s < lease_s + 1:
            returned += sum(await asyncio.gather(*(reaper.reap() for reaper in reapers)))
            await asyncio.sleep(0.01)
        assert returned == 30
        assert totals(redis) == {A: 7}
        assert ledger_of(redis, "dead") == {}
        assert redis.cli("ZSCORE", redis.key("workers"), "dead") is None
        assert redis.cli("HGET", redis.key("sessions"), "dead") is None
        assert exact(redis, [w1, w2])


async def test_the_loop_reaps_by_itself(redis: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper_module, "LOOK_EVERY_S", 0.02)
    async with workers(redis, 2) as (w1, w2):
        await w1.add_ready(A)
        await w2.registry.refresh()
        await w1.take(2)
        await w2.take(5)
        w2.ledger._keeper.cancel()  # type: ignore[union-attr]
        task = asyncio.create_task(Reaper(w1.registry, w1.keys).run())
        redis.cli("ZADD", redis.key("workers"), "1", "w2")
        await aeventually(lambda: totals(redis) == {A: 2})
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_loop_ends_even_if_its_cancellation_is_lost(redis: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    """As asyncio.wait_for, under the client library, loses one on Python 3.11."""
    monkeypatch.setattr(reaper_module, "LOOK_EVERY_S", 0.02)
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        reaper, reached = Reaper(worker.registry, worker.keys), asyncio.Event()
        reap = reaper.reap

        async def lose_one_cancellation() -> int:
            monkeypatch.setattr(reaper, "reap", reap)
            reached.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return 0

        monkeypatch.setattr(reaper, "reap", lose_one_cancellation)
        task = asyncio.create_task(reaper.run())
        await reached.wait()
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=2)
        assert done


async def test_many_dead_at_once_come_back_in_a_few_looks(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        await worker.take(1)
        with redis.client.pipeline(transaction=False) as pipe:
            for i in range(230):
                pipe.zadd(redis.key("workers"), {f"dead{i}": 1})
                pipe.hset(redis.key(f"unfinished:dead{i}"), A, 2)
            pipe.hincrby(redis.key("unfinished"), A, 460)
            pipe.execute()
        reaper = Reaper(worker.registry, worker.keys)
        assert [await reaper.reap() for _ in range(4)] == [200, 200, 60, 0]
        assert totals(redis) == {A: 1}


async def test_who_renewed_in_the_last_moment_is_spared(redis: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        await worker.take(2)

        async def as_it_was_before_the_renewal(*_: object, **__: object) -> list[str]:
            return ["w1"]

        monkeypatch.setattr(worker.registry.redis, "zrangebyscore", as_it_was_before_the_renewal)
        assert await Reaper(worker.registry, worker.keys).reap() == 0
        assert exact(redis, [worker])


async def test_the_master_gives_a_dead_child_back_at_once(redis: Space) -> None:
    async with workers(redis, 2) as (w1, w2):
        await w1.add_ready(A)
        await w2.registry.refresh()
        await w1.take(3)
        await w2.take(4)
        await kill(w2)
        await asyncio.to_thread(give_back_at_once, settings_for(redis), "w2")
        assert totals(redis) == {A: 3}
        # Again, and for one that never was: nothing.
        for name in ("w2", "nobody"):
            await asyncio.to_thread(give_back_at_once, settings_for(redis), name)
        assert totals(redis) == {A: 3}
        assert exact(redis, [w1])


def test_the_master_does_not_hang_on_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper_module, "MASTER_TIMEOUT_S", 0.1)
    with PrivateRedis() as server:
        server.pause()
        since_s = time.monotonic()
        with pytest.raises(redis_client.RedisError):
            give_back_at_once(settings_for(Space(server, "frozen")), "w1")
        assert time.monotonic() - since_s < 1.0


async def test_the_registry_is_forgotten_unless_somebody_lives(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A, key="k")
        await worker.registry.add(B, role=Role.Hybrid, models=("m",), speed=None, key=None)
        (ticket,) = await worker.take()
        ticket.release(succeeded=True)
        await aeventually(lambda: totals(redis) == {})
        assert await asyncio.to_thread(forget_registry, settings_for(redis)) == 0
        assert set(registered(redis)) == {A, B}
        version = int(redis.cli("GET", redis.key("version")))
        give_back([])
    # It left; one that died without a word, its lease over, does not live either.
    redis.cli("ZADD", redis.key("workers"), "1", "dead")
    assert await asyncio.to_thread(forget_registry, settings_for(redis)) == 2
    assert registered(redis) == {}
    left = {"layout", "version", "workers", "requests", "dispatched", "arrangement"}  # figures, and how it is set up
    assert {"layout", "version", "workers"} <= set(redis.key_names()) <= left
    assert int(redis.cli("GET", redis.key("version"))) == version + 2
