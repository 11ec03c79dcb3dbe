"""What the store counts for the metrics, and what it reads for them, on the real server."""

from __future__ import annotations

from app.metrics.families import ACQUIRES, BREAKER_CHANGES, ENCODER_ITEMS, RETRIES, STAGES, Family
from app.nodes import Role
from app.store.overview import overview
from app.store.registry import BreakerRules
from tests.store.harness import Worker, give_back, of, workers
from tests.support.redis import Space, TcpProxy
from tests.support.wait import aeventually

A, B, P, D = "http://a:1", "http://b:1", "http://p:1", "http://d:1"


def counts(family: Family, *made: Worker) -> dict[tuple[str, ...], float]:
    found: dict[tuple[str, ...], float] = {}
    for worker in made:
        worker.counted.digest()
        for (of_family, labels), number in worker.counted.numbers.items():
            if of_family is family:
                found[labels] = found.get(labels, 0) + number
    return found


async def test_a_second_try_is_a_retry_of_the_node_that_gets_it(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        await w1.add_ready(A)
        give_back(await w1.take(3))
        assert counts(RETRIES, w1) == {}
        give_back([await w1.ledger.acquire(of("m"), again=True) for _ in range(2)])
        assert counts(RETRIES, w1) == {(A,): 2}


async def test_each_change_of_a_breaker_is_counted_once_by_who_made_it(redis: Space) -> None:
    async with workers(redis, 2) as made:
        w1, w2 = made
        await w1.add_ready(A)
        await aeventually(lambda: A in w2.registry.snapshot.nodes)
        for worker in (w1, w2, w1):
            await worker.registry.record_failure(A, BreakerRules(threshold=2, open_s=10))
        assert counts(BREAKER_CHANGES, w1, w2) == {(A, "open"): 1}
        redis.cli("HSET", redis.key(f"node:{A}"), "breaker_until_ms", 1)
        for worker in made:
            await worker.registry.move_breaker(A, "half_open")
            await worker.registry.move_breaker(A, "trial", 1000)
        await w2.registry.move_breaker(A, "leave trial")
        for worker in made:
            await worker.registry.move_breaker(A, "close")
        assert counts(BREAKER_CHANGES, w1, w2) == {(A, "open"): 1, (A, "half_open"): 1, (A, "closed"): 1}


async def test_media_items_are_counted_where_they_go(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        for url in (A, B):
            await w1.add_ready(url, role=Role.Encode)
        give_back(await w1.ledger.acquire_encoders(lambda snapshot: snapshot.pool("m", Role.Encode), 5))
        found = counts(ENCODER_ITEMS, w1)
        assert sorted(found.values()) == [2, 3] and set(found) == {(A,), (B,)}


async def test_the_time_that_redis_takes_is_that_of_the_way_there_and_back(redis: Space, slow_road: TcpProxy) -> None:
    async with Worker(slow_road.url, redis.namespace, "w1") as w1:
        await w1.add_ready(A)
        slow_road.delay_s = 0.02
        for _ in range(3):
            give_back(await w1.take())
            give_back(await w1.take())  # is not measured: one was, since the last figures
            w1.counted.digest()
        found = w1.counted.distributions[ACQUIRES, ()]
        assert sum(found.counts) == 3 and 0.06 < found.sum < 3.0


async def test_stages_are_counted_by_node(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        for seconds in (0.2, 0.3, 7.0):
            w1.figures.took(P, "prefill", seconds)
        found = w1.counted.distributions[STAGES, ("prefill", P)]
        assert found.sum == 7.5
        assert {bound: n for bound, n in zip(STAGES.buckets, found.counts, strict=False) if n} == {
            0.25: 1,
            0.5: 1,
            10.0: 1,
        }


async def test_the_overview_is_what_all_workers_share(redis: Space) -> None:
    async with workers(redis, 2) as (w1, w2):
        await w1.add_ready(P, role=Role.Prefill)
        await w1.add_ready(D, role=Role.Decode, speed=2.0)
        await w1.add_ready(A)
        held = [*await w1.take(2), *await w2.take(3)]
        await w1.leave_traces(P, D)
        await w1.take_nothing()
        redis.cli("HSET", redis.key("handovers"), "\udcff".encode("utf-8", "surrogateescape"), 3)
        for worker in (w1, w2):
            found = await overview(worker.registry, worker.keys)
            assert {url: node.role for url, node in found.nodes.items()} == {
                P: Role.Prefill,
                D: Role.Decode,
                A: Role.Hybrid,
            }
            assert found.nodes[D].speed == 2.0
            assert {url: count for url, count in found.unfinished.items() if count} == {A: 5}
            assert (set(found.workers), found.held_sessions, found.encoder_cursor) == ({"w1", "w2"}, 1, 0)
            # Made for lives that the two nodes don't have.
            assert found.links == {(P, D): "void"} and found.handovers == {"links_made": 1}
            assert found.version == int(redis.cli("GET", redis.key("version")))
        give_back(held)
