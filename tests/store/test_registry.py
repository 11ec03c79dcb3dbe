"""The registry on the real server: one truth for all workers, restored when Redis loses it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from typing import Any

import msgpack
import pytest
import redis as redis_client
import redis.asyncio as aioredis
from redis.asyncio.client import PubSub

from app.errors import StoreUnavailable
from app.nodes import Node, Role, State
from app.store.fields import node_from_fields, node_to_fields
from app.store.keys import Keys
from app.store.locator import Locator
from app.store.registry import NodeStatus, Registry
from app.store.snapshot import Snapshot
from tests.store.harness import SCRIPTS, Worker, give_back, of, registered, totals, workers
from tests.support.redis import Space
from tests.support.wait import aeventually

A, B, C = "http://10.0.0.1:23333", "http://10.0.0.2:23333", "http://10.0.0.3:23333"
SECRET = "sk-engine-secret"


def plain(role: Role = Role.Hybrid, models: tuple[str, ...] = ("m",), **more: Any) -> dict[str, Any]:
    """What `add` takes for a node about which nothing special is said."""
    return {"role": role, "models": models, "speed": None, "key": None, **more}


def version_of(space: Space) -> int:
    return int(space.cli("GET", space.key("version")) or 0)


class Watcher:
    """Registries of several workers that do nothing by themselves: no events, no hot path."""

    def __init__(self, space: Space, count: int) -> None:
        keys = Keys(space.namespace)
        locator = Locator.of(space.url, keys=keys, timeout_s=0.5)
        self.registries = [
            Registry(locator=locator, keys=keys, scripts=SCRIPTS, worker=f"w{i}", timeout_s=0.5) for i in range(count)
        ]

    async def __aenter__(self) -> list[Registry]:
        return self.registries

    async def __aexit__(self, *exc_info: object) -> None:
        for registry in self.registries:
            await registry.close()


# --- adding, updating, removing -------------------------------------------------------------------


async def test_a_new_node_is_pending_with_all_that_was_said(redis: Space) -> None:
    async with Watcher(redis, 1) as (registry,):
        await registry.add(A, role=Role.Decode, models=("m", "ü"), speed=2.5, key=SECRET, asked=True, static=True)
        node = registry.snapshot.nodes[A]
        assert (node.role, node.models, node.speed, node.state) == (Role.Decode, ("m", "ü"), 2.5, State.PENDING)
        assert (node.asked, node.static, node.order, node.incarnation) == (True, True, 1, 1)
        assert node.registered_at_ms == node.state_since_ms > 1_600_000_000_000
        assert registry.snapshot.engine_keys == {A: SECRET}
        # As a person reads it with redis-cli.
        assert redis.cli("HGET", redis.key(f"node:{A}"), "role_name") == "Decode"
        assert redis.cli("HGET", redis.key(f"node:{A}"), "models") == '["m", "ü"]'


@pytest.mark.parametrize("port", [None, 1, 65535])
async def test_a_bootstrap_port_is_registered_read_by_all_and_restored(redis: Space, port: int | None) -> None:
    async with Watcher(redis, 2) as (registry, other):
        await registry.add(A, **plain(Role.Prefill), bootstrap_port=port)
        assert redis.cli("HGET", redis.key(f"node:{A}"), "bootstrap_port") == ("" if port is None else str(port))
        await other.refresh()
        assert other.snapshot.nodes[A].bootstrap_port == port
        await registry.add(A, **plain(Role.Prefill), bootstrap_port=7)
        await other.refresh()
        assert other.snapshot.nodes[A].bootstrap_port == 7


async def test_a_life_begins_with_each_registration(redis: Space) -> None:
    async with Watcher(redis, 1) as (registry,):
        lives = []
        for _ in range(3):
            await registry.add(A, **plain())
            lives.append(registry.snapshot.nodes[A].life)
        assert lives == [1, 2, 3] == sorted(set(lives))
        assert registry.snapshot.nodes[A].order == 1


@pytest.mark.parametrize("away", [State.DOWN, State.GONE, State.ASLEEP])
@pytest.mark.parametrize("by_hand", ["asked", "static", None])
async def test_a_node_that_was_named_by_hand_and_comes_back_has_a_new_life(
    redis: Space, away: State, by_hand: str | None
) -> None:
    """One that registers itself does so when it starts; a pause that it slept through is no restart."""
    async with Watcher(redis, 1) as (registry,):
        await registry.add(A, **plain(), **({by_hand: True} if by_hand else {}))
        assert await registry.set_state(registry.snapshot.nodes[A], State.READY)
        life = registry.snapshot.nodes[A].life
        assert life == 1, "becoming ready for the first time is no other life"
        assert await registry.set_state(registry.snapshot.nodes[A], away)
        assert await registry.set_state(registry.snapshot.nodes[A], State.READY)
        renewed = registry.snapshot.nodes[A].life != life
        assert renewed is (by_hand is not None and away is not State.ASLEEP)


async def test_a_renewed_life_is_seen_by_all_and_is_of_that_registration_only(redis: Space) -> None:
    async with Watcher(redis, 2) as (registry, other):
        await registry.add(A, **plain())
        assert await registry.set_state(registry.snapshot.nodes[A], State.READY)
        await other.refresh()
        await other.renew_life(A)
        await registry.refresh()
        node = registry.snapshot.nodes[A]
        assert node.life == other.snapshot.nodes[A].life == 3 and node.state == State.READY
        stale = other.snapshot
        await registry.add(A, **plain())
        other.snapshot = stale
        await other.renew_life(A)
        await registry.refresh()
        assert registry.snapshot.nodes[A].life == 4, "the new registration has one of its own"
        await other.renew_life("http://unknown:1")


async def test_stages_are_means_over_all_workers_and_go_with_their_node(redis: Space) -> None:
    async with workers(redis, 2) as (w1, w2):
        await w1.add_ready(A)
        await w2.registry.refresh()
        for worker, seconds in ((w1, 0.5), (w2, 1.0), (w2, 1.5)):
            worker.figures.took(A, "prefill", seconds)
        w1.figures.took(A, "link", 2.0)
        for worker in (w1, w2):
            worker.figures.note()
            give_back(await worker.take())
        expected = {"prefill": {"mean_s": 1.0, "count": 3}, "link": {"mean_s": 2.0, "count": 1}}
        assert (await w1.registry.status())[A].stages == expected
        assert await w1.registry.remove(A)
        w1.figures.took(A, "prefill", 0.5)  # of a request that ended after it
        w1.figures.note()
        await w1.take_nothing()
        assert redis.cli("EXISTS", redis.key(f"stages:{A}")) == 0


async def test_stages_of_a_quarter_of_a_second_are_noted_together(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        await w1.add_ready(A)
        for _ in range(8):
            w1.figures.took(A, "prefill", 0.25)
        await w1.take_nothing()
        assert redis.cli("EXISTS", redis.key(f"stages:{A}")) == 0
        await aeventually(lambda: redis.cli("HGET", redis.key(f"stages:{A}"), "prefill_count") == "8", within_s=1.0)
        assert float(redis.cli("HGET", redis.key(f"stages:{A}"), "prefill_s")) == 2.0


@pytest.mark.parametrize(
    "damage", [{"prefill_s": "x"}, {"prefill_count": "0"}, {"prefill_count": "x"}, {"other_s": "1"}, {"_s": "1"}]
)
async def test_rubbish_among_the_stages_does_not_hide_the_status(redis: Space, damage: dict[str, str]) -> None:
    async with workers(redis, 1) as (w1,):
        await w1.add_ready(A)
        w1.figures.took(A, "prefill", 0.5)
        w1.figures.took(A, "decode", 0.25)
        w1.figures.note()
        give_back(await w1.take())
        for name, value in damage.items():
            redis.cli("HSET", redis.key(f"stages:{A}"), name, value)
        assert (await w1.registry.status())[A].stages["decode"] == {"mean_s": 0.25, "count": 1}


async def test_a_second_add_updates_and_keeps_counts_order_and_key(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        for url in (A, B):
            await worker.add_ready(url, key=SECRET if url == A else None)
        tickets = await worker.take(20)
        before = worker.registry.snapshot.nodes[A]
        await worker.registry.add(A, role=Role.Hybrid, models=("m", "n"), speed=3.0, key=None)
        after = worker.registry.snapshot.nodes[A]
        assert (after.models, after.speed, after.state) == (("m", "n"), 3.0, State.PENDING)
        assert (after.order, after.registered_at_ms) == (before.order, before.registered_at_ms)
        assert after.incarnation == version_of(redis) > before.incarnation
        assert list(worker.registry.snapshot.nodes) == [A, B]
        assert worker.registry.snapshot.engine_keys == {A: SECRET}  # engines register without their key
        status = await worker.registry.status()
        assert (status[A].unfinished, status[B].unfinished) == (10, 10)
        give_back(tickets)
        await aeventually(lambda: totals(redis) == {})


async def test_a_node_removed_and_added_again_comes_last(redis: Space) -> None:
    async with Watcher(redis, 1) as (registry,):
        for url in (B, A):
            await registry.add(url, **plain())
        assert list(registry.snapshot.nodes) == [B, A]
        assert await registry.remove(B)
        await registry.add(B, **plain())
        assert list(registry.snapshot.nodes) == [A, B]


async def test_a_static_node_stays_so_when_its_engine_registers_itself(redis: Space) -> None:
    async with Watcher(redis, 1) as (registry,):
        await registry.add(A, **plain(static=True, asked=True))
        await registry.add(A, **plain(models=("m",)))
        assert registry.snapshot.nodes[A].static
        assert not registry.snapshot.nodes[A].asked


async def test_every_change_moves_the_version_and_nothing_else_does(redis: Space) -> None:
    async with Watcher(redis, 1) as (registry,):

        async def moved(change: Any) -> tuple[Any, int]:
            before = version_of(redis)
            result = await change
            assert registry.snapshot.version == version_of(redis), "the changing worker knows at once"
            return result, version_of(redis) - before

        assert await moved(registry.add(A, **plain())) == (True, 1)
        assert await moved(registry.add(A, **plain())) == (True, 1)
        node = registry.snapshot.nodes[A]
        assert await moved(registry.set_state(node, State.READY)) == (True, 1)
        assert await moved(registry.set_state(node, State.READY)) == (True, 0)
        assert await moved(registry.set_state(node, State.READY, reason="new words")) == (True, 1)
        assert await moved(registry.set_state(node, State.READY, reason="new words", models=("n",))) == (True, 1)
        assert await moved(registry.drain(A, 10)) == (True, 1)
        assert await moved(registry.drain(B, 10)) == (False, 0)
        assert await moved(registry.remove(A)) == (True, 1)
        assert await moved(registry.remove(A)) == (False, 0)
        assert await moved(registry.set_state(node, State.DOWN)) == (False, 0)
        assert await moved(registry.verify()) == (None, 0)
        assert await moved(registry.status()) == ({}, 0)


async def test_removing_a_node_takes_its_history_with_it_and_leaves_its_count(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategy="min_observed_latency") as worker:
        await worker.add_ready(A, key=SECRET)
        for succeeded in (True, False):
            (ticket,) = await worker.take()
            ticket.release(succeeded=succeeded)
        held = await worker.take(2)
        assert await worker.registry.remove(A)
        of_worker = {"layout", "version", "workers", "sessions", "arrangement"}
        figures = {"requests", "dispatched"}
        assert set(redis.key_names()) - figures == of_worker | {"unfinished", "unfinished:w1"}
        assert totals(redis) == {A: 2}
        give_back(held)
        await aeventually(lambda: set(redis.key_names()) - figures == of_worker)


async def test_many_looks_at_once_wait_for_each_other(redis: Space) -> None:
    """More than there are connections: an answer a little later, not an error."""
    async with Watcher(redis, 1) as (registry,):
        await registry.add(A, **plain())
        before = redis.client.info("clients")["connected_clients"]
        seen = await asyncio.gather(*(registry.status() for _ in range(150)))
        assert all(list(status) == [A] for status in seen)
        assert redis.client.info("clients")["connected_clients"] - before < 70


async def test_an_add_is_known_to_its_worker_even_if_an_older_look_was_under_way(
    redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Watcher(redis, 1) as (registry,):
        await registry.add(A, **plain())
        looked, go = asyncio.Event(), asyncio.Event()
        real, run = registry._read, registry.run

        async def slow_read() -> Any:
            found = await real()
            looked.set()
            await go.wait()
            return found

        async def run_when_looked(*args: Any) -> Any:
            if args[0] == "add_node":
                # Another event comes in between: a look begins before the node is there, ends after.
                monkeypatch.setattr(registry, "_read", slow_read)
                registry.refresh_soon()
                await looked.wait()
                monkeypatch.setattr(registry, "_read", real)
                reply = await run(*args)
                asyncio.get_running_loop().call_later(0.02, go.set)
                return reply
            return await run(*args)

        monkeypatch.setattr(registry, "run", run_when_looked)
        await registry.add(B, **plain())
        assert list(registry.snapshot.nodes) == [A, B]


@pytest.mark.parametrize("fails", [False, True])
async def test_a_status_shows_what_another_worker_had_done_before_it_though_an_older_look_was_under_way(
    redis: Space, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    async with Watcher(redis, 2) as (registry, other):
        looked, go = asyncio.Event(), asyncio.Event()
        real = registry._read

        async def slow_read() -> Any:
            found = await real()
            looked.set()
            await go.wait()
            if fails:
                raise StoreUnavailable("of that look")
            return found

        monkeypatch.setattr(registry, "_read", slow_read)
        registry.refresh_soon()
        await looked.wait()
        monkeypatch.setattr(registry, "_read", real)
        await other.add(A, **plain())
        statuses = [asyncio.create_task(registry.status()) for _ in range(3)]
        await asyncio.sleep(0)
        go.set()
        assert [list(status) for status in await asyncio.gather(*statuses)] == [[A]] * 3


async def test_a_look_that_is_just_over_is_not_taken_for_one_under_way(redis: Space) -> None:
    async with Watcher(redis, 2) as (registry, other):
        look = registry._look()
        await asyncio.wait({look})
        registry._refreshing = look  # it is over, its callback has not run yet
        await other.add(A, **plain())
        await registry.refresh()
        assert list(registry.snapshot.nodes) == [A]


async def test_who_was_slower_to_repair_takes_what_the_faster_one_wrote(redis: Space) -> None:
    async with Watcher(redis, 2) as (faster, slower):
        await faster.add(A, **plain())
        await slower.refresh()
        redis.cli("DEL", redis.key("nodes"))
        read = slower._read

        async def read_then_be_overtaken() -> Any:
            found = await read()
            slower._read = read  # type: ignore[method-assign]
            await faster.verify()
            return found

        slower._read = read_then_be_overtaken  # type: ignore[method-assign]
        await slower.verify()
        assert slower.snapshot.version == faster.snapshot.version == version_of(redis) == 2
        assert list(registered(redis)) == [A]


# --- states ---------------------------------------------------------------------------------------


async def test_a_verdict_on_an_older_registration_is_void(redis: Space) -> None:
    async with Watcher(redis, 1) as (registry,):
        await registry.add(A, **plain())
        looked_at = registry.snapshot.nodes[A]
        await registry.add(A, **plain(models=("n",)))
        assert not await registry.set_state(looked_at, State.DOWN, reason="too late")
        assert registry.snapshot.nodes[A].state is State.PENDING
        assert not await registry.remove(A, when=str(looked_at.incarnation))
        assert A in registry.snapshot.nodes
        assert await registry.remove(A, when=str(registry.snapshot.nodes[A].incarnation))


async def test_a_state_keeps_its_since_until_it_changes(redis: Space) -> None:
    async with Watcher(redis, 1) as (registry,):
        await registry.add(A, **plain())
        node = registry.snapshot.nodes[A]
        redis.cli("HSET", redis.key(f"node:{A}"), "state_since_ms", "1000")
        redis.cli("INCR", redis.key("version"))  # else it would be taken for damage, and written back
        await registry.set_state(node, State.PENDING, reason="refused")
        assert registry.snapshot.nodes[A].state_since_ms == 1000
        await registry.set_state(node, State.READY)
        assert registry.snapshot.nodes[A].state_since_ms > 1_600_000_000_000
        assert registry.snapshot.nodes[A].reason == ""


async def test_no_probe_ends_a_drain_but_a_registration_does(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        node = worker.registry.snapshot.nodes[A]
        assert await worker.registry.drain(A, 60)
        assert not await worker.registry.set_state(node, State.READY)
        assert worker.registry.snapshot.nodes[A].state is State.DRAINING
        await worker.add_ready(A)
        assert worker.registry.snapshot.nodes[A].state is State.READY
        assert worker.registry.snapshot.nodes[A].drain_until_ms == 0


async def test_r32_a_draining_node_gets_nothing_new_and_goes_when_its_last_request_ends(redis: Space) -> None:
    async with workers(redis, 2) as (w1, w2):
        await w1.add_ready(A)
        held = await w2.take(10)
        await w2.add_ready(B)
        assert await w1.registry.drain(A, 60)
        # w2 may not know yet; its next acquire tells it.
        assert [ticket.url for ticket in await w2.take(5)] == [B] * 5
        for _ in range(10):
            assert not await w1.registry.remove(A, when="drained")
            assert A in registered(redis)
            held.pop().release(succeeded=True)
        await aeventually(lambda: A not in totals(redis))
        assert await w1.registry.remove(A, when="drained")
        assert list(registered(redis)) == [B]


async def test_r32_a_drain_ends_at_its_deadline(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        held = await worker.take(2)
        assert await worker.registry.drain(A, 60)
        assert not await worker.registry.remove(A, when="drained")
        assert await worker.registry.drain(A, 0.0)  # asked again, with another deadline
        assert await worker.registry.remove(A, when="drained")
        assert totals(redis) == {A: 2}  # still told as they are
        give_back(held)
        await aeventually(lambda: totals(redis) == {})


async def test_only_a_draining_node_is_removed_as_drained(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        assert not await worker.registry.remove(A, when="drained")


async def test_refused_traffic_takes_a_ready_node_down_once(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        await worker.registry.add(B, **plain())
        before = version_of(redis)
        for _ in range(50):
            worker.registry.refused(A)
            worker.registry.refused(B)  # pending: the prober's to judge
            worker.registry.refused(C)  # not there
        await aeventually(lambda: worker.registry.snapshot.nodes[A].state is State.DOWN)
        assert worker.registry.snapshot.nodes[A].reason == "connection refused"
        assert worker.registry.snapshot.nodes[B].state is State.PENDING
        assert version_of(redis) == before + 1


# --- the other workers ----------------------------------------------------------------------------


async def test_r87_a_change_reaches_idle_workers_by_its_event(redis: Space) -> None:
    async with workers(redis, 4) as made:
        for worker in made:  # the renewal would tell them too, a little later
            worker.ledger._keeper.cancel()  # type: ignore[union-attr]
        await aeventually(lambda: redis.cli("PUBSUB", "NUMSUB", redis.key("events"))[1] == 4)
        await made[0].add_ready(A)
        await aeventually(lambda: all(A in w.registry.snapshot.nodes for w in made), within_s=1)
        await made[1].add_ready(A, speed=7.0)
        await aeventually(lambda: all(w.registry.snapshot.nodes[A].speed == 7.0 for w in made), within_s=1)
        assert await made[2].registry.remove(A)
        await aeventually(lambda: all(A not in w.registry.snapshot.nodes for w in made), within_s=1)


@pytest.fixture
def without_events(own_redis: Space) -> str:
    """The URL of a user who may do everything but listen."""
    own_redis.cli("ACL", "SETUSER", "deaf", "on", ">pw", "~*", "&*", "+@all", "-subscribe", "-psubscribe")
    return f"unix://deaf:pw@{own_redis.server.socket}"


async def test_a_worker_that_hears_no_events_follows_by_its_replies(own_redis: Space, without_events: str) -> None:
    async with workers(own_redis, 1) as (teller,), Worker(without_events, own_redis.namespace, "deaf") as deaf:
        assert own_redis.cli("PUBSUB", "NUMSUB", own_redis.key("events"))[1] <= 1
        await teller.add_ready(A)
        # Idle: its renewal, each second, brings the version.
        await aeventually(lambda: A in deaf.registry.snapshot.nodes, within_s=1.5)
        await aeventually(lambda: deaf.registry.snapshot.version == teller.registry.snapshot.version, within_s=1.5)
        # At work: its very next acquire is on the new registry.
        await teller.add_ready(B)
        assert await teller.registry.remove(A)
        assert [ticket.url for ticket in await deaf.take(3)] == [B] * 3
        assert list(deaf.registry.snapshot.nodes) == [B]
        # ... and a release tells it too.
        ticket = await deaf.ledger.acquire(of())
        await teller.add_ready(C)
        ticket.release(succeeded=True)
        await aeventually(lambda: C in deaf.registry.snapshot.nodes, within_s=0.5)


@pytest.mark.parametrize("in_call", ["subscribe", "get_message"])
async def test_closing_ends_the_listener_even_if_its_cancellation_is_lost(
    redis: Space, monkeypatch: pytest.MonkeyPatch, in_call: str
) -> None:
    """As asyncio.wait_for, under the client library, loses one on Python 3.11."""
    async with Watcher(redis, 1) as (registry,):
        reached = asyncio.Event()
        real = getattr(PubSub, in_call)

        async def lose_one_cancellation(self: PubSub, *args: Any, **options: Any) -> Any:
            monkeypatch.setattr(PubSub, in_call, real)
            reached.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

        monkeypatch.setattr(PubSub, in_call, lose_one_cancellation)
        await registry.start()
        await reached.wait()
        listener = registry._listener
        assert listener is not None
        listener.cancel()
        done, _ = await asyncio.wait({listener}, timeout=2)
        assert done


async def test_a_look_that_the_listener_begins_while_it_ends_ends_too(redis: Space) -> None:
    """On Python 3.11 asyncio.wait_for loses a cancellation that comes with its result; here it always does."""
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        registry = worker.registry
        assert registry._listener is not None
        registry._listener.cancel()
        await asyncio.gather(registry._listener, return_exceptions=True)
        await aeventually(lambda: registry._refreshing is None)

        async def listen() -> None:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                registry._read = asyncio.Event().wait  # type: ignore[assignment]  # it takes its time
                registry.refresh_soon()

        registry._listener = asyncio.create_task(listen())
        await asyncio.sleep(0)
    assert registry._refreshing is None


async def test_what_is_still_to_be_told_is_told_before_it_closes(redis: Space) -> None:
    async with aioredis.Redis.from_url(redis.url) as client, client.pubsub() as heard:
        await heard.subscribe(redis.key("events"))
        assert (await heard.get_message(timeout=5))["type"] == "subscribe"
        async with Watcher(redis, 1) as (registry,):
            await registry.add(A, **plain())
        assert (await heard.get_message(timeout=5))["type"] == "message"


async def test_a_change_listener_is_told_of_every_new_snapshot(redis: Space) -> None:
    async with Watcher(redis, 2) as (one, other):
        told: list[int] = []
        other.on_change.append(lambda: told.append(other.snapshot.version))
        await one.add(A, **plain())
        await other.refresh()
        await other.refresh()
        assert told == [1]


async def test_a_slow_look_does_not_undo_a_newer_one(redis: Space) -> None:
    async with Watcher(redis, 1) as (registry,):
        await registry.add(A, **plain())
        newer = registry.snapshot
        registry._adopt(Snapshot(newer.version - 1, {}, {}))
        assert registry.snapshot is newer


async def test_namespaces_do_not_mix(redis: Space) -> None:
    other = Space(redis.server, redis.namespace + "x")
    try:
        async with Worker(redis.url, redis.namespace, "w") as one, Worker(other.url, other.namespace, "w") as two:
            await one.add_ready(A)
            await two.add_ready(B)
            await one.take(3)
            await two.take(2)
            assert (totals(redis), totals(other)) == ({A: 3}, {B: 2})
            assert (list(await one.registry.status()), list(await two.registry.status())) == ([A], [B])
            redis.clear()
            await aeventually(lambda: totals(redis) == {A: 3} and list(registered(redis)) == [A])
            assert totals(other) == {B: 2}
    finally:
        other.clear()


async def test_all_keys_of_a_namespace_share_one_cluster_slot() -> None:
    keys = Keys("ns")
    names = [*vars(keys).values(), keys.node(A), keys.ledger("w"), keys.latency(A)]
    assert {name[name.index("{") + 1 : name.index("}")] for name in names} == {"ns"}
    assert all(name.startswith("evenhand:{ns}:") for name in names)


# --- secrets --------------------------------------------------------------------------------------


async def test_an_engines_key_shows_nowhere_but_in_its_own_hash(redis: Space, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client = redis_client.Redis(unix_socket_path=str(redis.server.socket))
    events = client.pubsub()
    events.subscribe(redis.key("events"))
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A, key=SECRET)
        status = await worker.registry.status()
        assert redis.cli("HGET", redis.key("engine_keys"), A) == SECRET
        assert worker.registry.snapshot.engine_keys[A] == SECRET
        redis.cli("DEL", redis.key("nodes"))
        await worker.registry.verify()  # its words about the damage
        shown = [repr(worker.registry), repr(worker.registry.snapshot), repr(worker), repr(status), caplog.text]
        shown += [json.dumps(redis.cli("HGETALL", redis.key(f"node:{A}")))]
        assert not [text for text in shown if SECRET in text]
        assert "written back" in caplog.text

        def heard() -> list[Any]:
            while (message := events.get_message(timeout=0)) is not None:
                if message["type"] == "message":
                    got.append(message["data"])
            return got if len(got) >= 3 else []

        got: list[Any] = []
        assert SECRET not in repr(await aeventually(heard))
    events.close()
    client.close()


async def test_an_event_says_what_changed(redis: Space) -> None:
    client = redis_client.Redis(unix_socket_path=str(redis.server.socket))
    received = client.pubsub()
    received.subscribe(redis.key("events"))
    async with Watcher(redis, 1) as (registry,):
        await registry.add(A, **plain())
        event: dict[str, Any] = {}

        def heard() -> bool:
            message = received.get_message(timeout=0)
            if message and message["type"] == "message":
                event.update(msgpack.unpackb(message["data"]))
            return bool(event)

        await aeventually(heard)
        assert event == {"change": "add", "url": A, "version": 1, "worker": "w0"}
    received.close()
    client.close()


# --- damage ---------------------------------------------------------------------------------------

DAMAGE: list[tuple[str, ...]] = [
    ("DEL", "nodes"),
    ("DEL", f"node:{A}"),
    ("DEL", "version"),
    ("SET", "version", "no number"),
    ("DEL", "engine_keys"),
    ("HDEL", f"node:{A}", "models"),
    ("HDEL", f"node:{A}", "state"),
    ("HSET", f"node:{A}", "speed", "a hare's"),
    ("HSET", f"node:{A}", "models", "[broken"),
    ("HSET", f"node:{A}", "state", "merry"),
    ("HSET", f"node:{A}", "speed", "99.0"),
    ("HSET", f"node:{A}", "state", "down"),
    ("HSET", "engine_keys", A, "stolen"),
    ("SREM", "nodes", B),
    ("SADD", "nodes", "http://never-registered"),
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: " ".join(damage[:2]).replace(A, "A"))
async def test_r34_verify_writes_back_what_somebody_deleted_or_edited(redis: Space, damage: tuple[str, ...]) -> None:
    async with workers(redis, 2) as (w1, w2):
        await w1.add_ready(A, key=SECRET, speed=2.0)
        await w1.add_ready(B)
        await w2.registry.refresh()
        before, nodes = registered(redis), w1.registry.snapshot.nodes
        redis.cli(damage[0], redis.key(damage[1]), *damage[2:])
        await w1.registry.verify()
        assert registered(redis) == before
        assert w1.registry.snapshot.nodes == nodes
        await w2.registry.refresh()
        assert w2.registry.snapshot.nodes == nodes
        assert w1.registry.snapshot.version == w2.registry.snapshot.version == version_of(redis)
        assert w2.registry.snapshot.engine_keys == {A: SECRET}
        before_s = version_of(redis)
        await w1.registry.verify()
        assert version_of(redis) == before_s, "nothing is left to repair"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("ahead", [1, 2])
async def test_after_a_flush_the_newest_snapshot_wins_in_whatever_order_workers_come(
    redis: Space, order: tuple[int, ...], ahead: int
) -> None:
    """Three workers whose last looks at the registry lie `ahead` changes apart, and one that is as old as another."""
    async with Watcher(redis, 4) as registries:
        changer = registries[-1]
        for i in range(3):
            for j in range(ahead):
                await changer.add(f"http://n{i}-{j}", **plain(key=f"key{i}"))
            await registries[i].refresh()
        newest = registries[2].snapshot
        assert [registries[i].snapshot.version for i in range(3)] == [ahead, 2 * ahead, 3 * ahead]
        for key in redis.key_names():
            redis.cli("DEL", redis.key(key))
        for i in order:
            await registries[i].refresh()
        for registry in registries[:3]:
            await registry.refresh()
        assert {url: fields["key"] for url, fields in registered(redis).items()} == dict(newest.engine_keys)
        for registry in registries[:3]:
            assert registry.snapshot.nodes == newest.nodes
            assert registry.snapshot.engine_keys == newest.engine_keys
            assert registry.snapshot.version == version_of(redis)
        # From here on all is as ever.
        await registries[0].add(A, **plain())
        await registries[1].refresh()
        assert registries[1].snapshot.nodes == registries[0].snapshot.nodes
        assert list(registries[0].snapshot.nodes) == [*newest.nodes, A]


async def test_after_a_fall_back_to_an_older_copy_the_newer_snapshot_is_written_back(redis: Space) -> None:
    async with Watcher(redis, 2) as (one, other):
        await one.add(A, **plain())
        await one.add(B, **plain())
        await one.set_state(one.snapshot.nodes[A], State.READY)
        assert await one.remove(B)
        await one.add(C, **plain())
        await other.refresh()
        newest = one.snapshot
        # The older copy: A pending and B, at version 2.
        redis.cli("SET", redis.key("version"), "2")
        redis.cli("SADD", redis.key("nodes"), B)
        redis.cli("SREM", redis.key("nodes"), C)
        redis.cli("DEL", redis.key(f"node:{C}"))
        redis.cli("HSET", redis.key(f"node:{A}"), "state", "pending")
        redis.client.hset(redis.key(f"node:{B}"), mapping=node_to_fields(Node(B, order=2, incarnation=2)))
        await other.refresh()
        assert set(registered(redis)) == {A, C}
        assert other.snapshot.nodes == newest.nodes
        await one.refresh()
        assert one.snapshot.nodes == newest.nodes
        assert one.snapshot.version == other.snapshot.version == version_of(redis) >= newest.version


async def test_a_change_to_an_emptied_registry_does_not_forget_the_rest(redis: Space) -> None:
    async with Watcher(redis, 2) as (one, other):
        await one.add(A, **plain())
        await other.refresh()
        redis.clear()
        await other.add(B, **plain())
        assert set(registered(redis)) == {A, B}
        await one.refresh()
        assert list(one.snapshot.nodes) == [A, B]


async def test_a_fresh_worker_does_not_write_its_emptiness_back(redis: Space) -> None:
    async with Watcher(redis, 2) as (one, fresh):
        await one.add(A, **plain())
        await fresh.verify()
        assert list(fresh.snapshot.nodes) == [A]
        redis.clear()
        async with Watcher(redis, 1) as (late,):
            await late.refresh()
            await late.verify()
            assert late.snapshot.nodes == {}
            await one.refresh()
            await late.refresh()
            assert list(late.snapshot.nodes) == [A]


async def test_several_workers_that_see_the_loss_at_the_same_time_restore_once(redis: Space) -> None:
    async with Watcher(redis, 3) as registries:
        await registries[0].add(A, **plain())
        for registry in registries:
            await registry.refresh()
        redis.clear()
        await asyncio.gather(*(registry.refresh() for registry in registries))
        for registry in registries:
            await registry.refresh()
        assert {registry.snapshot.version for registry in registries} == {version_of(redis)}
        assert version_of(redis) == 1
        assert list(registered(redis)) == [A]


# --- reading --------------------------------------------------------------------------------------


async def test_status_is_what_redis_holds_now(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        await worker.registry.add(B, **plain())
        redis.cli("RPUSH", redis.key(f"latency:{A}"), "0.5", "0.25")
        await worker.take(2)
        nodes = worker.registry.snapshot.nodes
        assert await worker.registry.status() == {
            A: NodeStatus(nodes[A], 2, [0.5, 0.25]),
            B: NodeStatus(nodes[B], 0, []),
        }


@pytest.mark.parametrize(
    "node",
    [
        Node(A, role=Role.Encode, models=("m", "モデル"), speed=0.1, state=State.ASLEEP, static=True, order=3),
        Node(A, incarnation=7, registered_at_ms=5, state_since_ms=6, drain_until_ms=8, reason="so: said", asked=True),
        Node(A),
    ],
)
def test_a_node_survives_its_hash(node: Node) -> None:
    assert node_from_fields(A, node_to_fields(node)) == node


@pytest.mark.parametrize("field", ["role", "models", "state", "order", "incarnation"])
def test_a_hash_without_what_a_node_needs_is_damaged(field: str) -> None:
    fields = node_to_fields(Node(A))
    del fields[field]
    assert node_from_fields(A, fields) is None


# --- what an attack on the promises found ---------------------------------------------------------


async def test_a_key_that_the_snapshot_does_not_have_is_gone_after_one_repair(redis: Space) -> None:
    async with Watcher(redis, 1) as (registry,):
        await registry.add(A, **plain())
        redis.cli("HSET", redis.key("engine_keys"), "http://nobody", "z")
        await registry.verify()
        version = version_of(redis)
        for _ in range(3):
            await registry.verify()
        assert version_of(redis) == version
        assert redis.cli("HGETALL", redis.key("engine_keys")) == {}


@pytest.mark.parametrize("nodes_before", [0, 1, 3])
async def test_r34_a_change_is_not_lost_to_a_flush_in_its_middle(
    redis: Space, nodes_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Watcher(redis, 1) as (registry,):
        for url in (A, B, "http://10.0.0.9:1")[:nodes_before]:
            await registry.add(url, **plain())
        run, flushed = registry.run, []

        async def run_after_a_flush(name: str, *arguments: Any) -> Any:
            if name == "add_node" and not flushed:
                flushed.append(redis.cli("FLUSHALL"))
            return await run(name, *arguments)

        monkeypatch.setattr(registry, "run", run_after_a_flush)
        await registry.add(C, **plain())
        assert flushed
        assert C in registered(redis) and len(registered(redis)) == nodes_before + 1
        assert set(registry.snapshot.nodes) == set(registered(redis))


async def test_r34_a_change_does_not_carry_damage_on(redis: Space) -> None:
    async with Watcher(redis, 1) as (registry,):
        await registry.add(A, **plain(key=SECRET))
        await registry.add(B, **plain())
        redis.cli("DEL", redis.key("nodes"), redis.key("engine_keys"))
        await registry.add(C, **plain())
        assert set(registered(redis)) == {A, B, C}
        assert redis.cli("HGETALL", redis.key("engine_keys")) == {A: SECRET}


async def test_a_window_with_rubbish_in_it_does_not_hide_the_status(redis: Space) -> None:
    async with Watcher(redis, 1) as (registry,):
        await registry.add(A, **plain())
        redis.cli("RPUSH", redis.key(f"latency:{A}"), "0.5", "rubbish", "0.25")
        assert (await registry.status())[A].latency_s == [0.5, 0.25]


# --- what is said of changes


async def test_a_node_that_goes_down_is_one_warning_in_the_deployment_and_so_is_its_return(
    redis: Space, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with workers(redis, 2) as (w1, w2):
        await w1.add_ready(A)
        await w2.registry.refresh()
        for worker in (w1, w2, w1):
            worker.registry.refused(A)
        await aeventually(lambda: all(w.registry.snapshot.nodes[A].state is State.DOWN for w in (w1, w2)))
        down = w1.registry.snapshot.nodes[A]
        assert await w1.registry.set_state(down, State.DOWN, reason="other words")
        assert await w2.registry.set_state(down, State.READY)
        said = [(r.levelname, r.getMessage()) for r in caplog.records if r.getMessage().startswith("node")]
        assert said == [
            ("INFO", f"node {A}: pending -> ready"),
            ("WARNING", f"node {A}: ready -> down: connection refused"),
            ("WARNING", f"node {A}: down -> ready"),
        ]
