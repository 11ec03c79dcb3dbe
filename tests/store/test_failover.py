"""Redis behind sentinels and Redis as a cluster, real ones: the master dies, freezes, or gives its slot away under
load. Requests go on, and 2 s after there is a master again the counts are exact and the registry is whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from app.errors import StoreUnavailable
from app.nodes import Role
from app.settings import Settings
from app.store.locator import Locator
from tests.store.harness import Worker, held_by, registered, totals, workers
from tests.store.test_outages import BOUNDED_S, TIMEOUT_S, Scene, scene
from tests.support.redis import PrivateRedis, Space
from tests.support.redis_groups import (
    Cluster,
    SentinelSet,
    cluster,
    hand_over,
    is_master,
    sentinel_set,
    wait_for_failover,
)
from tests.support.wait import aeventually
from workers.reaper import forget_registry, give_back

A, B, C = "http://10.0.0.1:23333", "http://10.0.0.2:23333", "http://10.0.0.3:23333"
NAMESPACE = "ha"
KEY = f"evenhand:{{{NAMESPACE}}}:version"


@asynccontextmanager
async def sentinels(password: str = "", sentinel_password: str = "") -> AsyncIterator[SentinelSet]:
    async with AsyncExitStack() as stack:
        context = sentinel_set(password=password, sentinel_password=sentinel_password)
        group = await asyncio.to_thread(context.__enter__)
        stack.push_async_callback(asyncio.to_thread, context.__exit__, None, None, None)
        yield group


@asynccontextmanager
async def clustered() -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        context = cluster(KEY)
        group = await asyncio.to_thread(context.__enter__)
        stack.push_async_callback(asyncio.to_thread, context.__exit__, None, None, None)
        yield group


async def fails_over(now: Scene, master: PrivateRedis, replica: PrivateRedis, end: Callable[[], None]) -> None:
    """`end` ends the master; the scene goes on, and on the replica all is as it was."""
    await now.go_on()
    end()
    await now.all_local()
    await now.go_on()
    await asyncio.to_thread(wait_for_failover, replica)
    now.space = Space(replica, NAMESPACE)
    # A managing call finds the new master too, right away.
    await aeventually(lambda: all(worker.shared for worker in now.made))
    await now.made[0].registry.add(C, role=Role.Hybrid, models=("another",), speed=None, key=None)
    assert replica.cli("SISMEMBER", now.space.key("nodes"), C) == 1
    assert await now.made[1].registry.remove(C)
    await now.is_exact()
    assert now.load.longest_s < BOUNDED_S


async def test_the_master_under_sentinels_dies() -> None:
    async with sentinels(password="pw@1", sentinel_password="other") as group, AsyncExitStack() as stack:
        url = group.url.replace("pw@1", "pw%401")
        now = await scene(stack, Space(group.master, NAMESPACE), url=url)
        assert "pw" not in repr(now.made[0].registry) + repr(now.made[0].ledger._locator)
        wrong = Locator.of(url.replace("=other", "=wrong"), keys=now.made[0].keys, timeout_s=TIMEOUT_S)
        with pytest.raises(StoreUnavailable, match="WRONGPASS"):
            await wrong.locate()
        with pytest.raises(StoreUnavailable, match="WRONGPASS|invalid username-password pair"):
            await asyncio.to_thread(wrong.locate_now)
        await fails_over(now, group.master, group.replica, group.master.kill)


async def test_a_frozen_master_that_wakes_up_after_the_failover_is_left_alone() -> None:
    async with sentinels() as group, AsyncExitStack() as stack:
        now = await scene(stack, Space(group.master, NAMESPACE), url=group.url)
        await fails_over(now, group.master, group.replica, group.master.pause)
        # For some seconds it takes itself for the master, and idle connections to it stand.
        group.master.resume()
        assert is_master(group.master)
        await now.made[0].take(4)
        await aeventually(lambda: totals(now.space) == held_by(now.made))
        await now.made[2].add_ready(C, models=("another",))
        for worker in now.made:
            await aeventually(lambda worker=worker: C in worker.registry.snapshot.nodes)  # type: ignore[misc]
            assert C in await worker.registry.status()
        assert group.replica.cli("SISMEMBER", now.space.key("nodes"), C) == 1
        assert group.master.cli("SISMEMBER", now.space.key("nodes"), C) == 0


async def test_sentinels_that_are_away_or_know_nothing_are_passed_over() -> None:
    async with sentinels() as group:
        group.sentinels[0].process.kill()
        # Neither the second, which is no sentinel, nor the first is the last word.
        url = group.url.replace("://", f"://127.0.0.1:{group.replica.port},")
        async with workers(Space(group.master, NAMESPACE), 4, url=url, timeout_s=TIMEOUT_S) as made:
            assert all(worker.shared for worker in made)
        unknown = Worker(url + "-no", NAMESPACE, "w1", timeout_s=TIMEOUT_S)
        async with unknown as worker:
            assert "knows no master named 'evenhand-test-no'" in str(worker.ledger.trouble)


async def test_the_master_process_follows_the_sentinels() -> None:
    async with sentinels() as group:
        settings = Settings.load({"redis_url": group.url, "namespace": NAMESPACE})
        async with Worker(group.url, NAMESPACE, "w1", timeout_s=TIMEOUT_S) as worker:
            await worker.add_ready(A)
            await worker.take(3)
            await aeventually(lambda: registered(Space(group.replica, NAMESPACE)))
            group.master.kill()
            await asyncio.to_thread(wait_for_failover, group.replica)
            space = Space(group.replica, NAMESPACE)
            await aeventually(lambda: worker.shared and totals(space) == {A: 3})
            worker.ledger._keeper.cancel()  # type: ignore[union-attr]
            await asyncio.to_thread(give_back, settings, "w1")
            assert totals(space) == {}
            assert await asyncio.to_thread(forget_registry, settings) == 1


async def test_the_owner_of_our_slot_in_a_cluster_dies() -> None:
    async with clustered() as group, AsyncExitStack() as stack:
        now = await scene(stack, Space(group.owner, NAMESPACE), url=group.url)
        settings = Settings.load({"redis_url": group.url, "namespace": NAMESPACE})
        await asyncio.to_thread(give_back, settings, "nobody")  # learns the owner too
        await fails_over(now, group.owner, group.replica, group.owner.kill)


async def test_our_slot_in_a_cluster_moves_to_another_node() -> None:
    async with clustered() as group, AsyncExitStack() as stack:
        now = await scene(stack, Space(group.owner, NAMESPACE), url=group.url)
        target, other = group.others
        await now.go_on()
        await asyncio.to_thread(hand_over, group.slot, group.owner, target, [other])
        now.space = Space(target, NAMESPACE)
        await now.go_on()
        await now.is_exact()
        assert now.load.longest_s < BOUNDED_S
        assert group.owner.cli("CLUSTER", "COUNTKEYSINSLOT", group.slot) == 0
