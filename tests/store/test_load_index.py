"""Large fleets: which nodes stand together in an order of loads, and that requests go by it exactly.

What the scripts do with the order is held to a model in test_model.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from redis.exceptions import ResponseError

from app.nodes import Breaker, Node, Role, State
from app.store import ledger as ledger_module
from app.store import load_index as load_index_module
from app.store.fields import node_to_fields
from app.store.keys import Keys
from app.store.ledger import Ticket
from app.store.load_index import BY, LARGE, By, LoadIndex
from app.store.snapshot import Pool, Snapshot
from tests.store.harness import Worker, give_back, workers
from tests.support.redis import Space
from tests.support.wait import aeventually

KEYS = Keys("ns")


def node(number: int, **fields: object) -> Node:
    known: dict[str, object] = {"role": Role.Hybrid, "models": ("m",), "state": State.READY, "order": number}
    return Node(f"http://10.0.{number // 200}.{number % 200}:1", **(known | fields))  # type: ignore[arg-type]


def snapshot(nodes: Sequence[Node]) -> Snapshot:
    return Snapshot(7, {node.url: node for node in nodes})


def index_of(nodes: Sequence[Node]) -> LoadIndex:
    return LoadIndex(KEYS, snapshot(nodes), by=By.GIVEN)


# --- groups ---------------------------------------------------------------------------------------


def test_nodes_with_the_same_models_are_one_group_in_whatever_order_they_name_them() -> None:
    nodes = [node(n, models=("m", "n") if n % 2 else ("n", "m")) for n in range(LARGE)]
    index = index_of(nodes)
    assert index.groups(index.snapshot.pool("m", Role.Hybrid)) == index.groups(index.snapshot.pool("n", Role.Hybrid))
    names, words = index.arguments()
    assert names == [KEYS.unfinished, KEYS.version, KEYS.load_index, KEYS.load(0)]
    assert words[:2] + words[3:] == [7, index.name, "given", LARGE, *(f"1.0 {one.url}" for one in nodes)]


def test_a_model_of_two_kinds_of_nodes_has_both_groups() -> None:
    nodes = [node(n, models=("m", "n") if n < 30 else ("m",)) for n in range(60)]
    index = index_of([*nodes, node(60, models=("x",))])
    assert index.groups(index.snapshot.pool("m", Role.Hybrid)) == (0, 1)
    assert index.groups(index.snapshot.pool("n", Role.Hybrid)) == (0,)
    assert [index.place(one.url).group for one in (nodes[0], nodes[59])] == [0, 1]  # type: ignore[union-attr]


def test_a_small_fleet_has_no_groups() -> None:
    index = index_of([node(n) for n in range(LARGE - 1)])
    assert index.groups(index.snapshot.pool("m", Role.Hybrid)) == ()
    assert index.place(node(0).url) is None


@pytest.mark.parametrize(
    "out", [{"state": State.DOWN}, {"state": State.DRAINING}, {"breaker": Breaker.OPEN}, {"role": Role.Encode}]
)
def test_who_gets_no_requests_stands_in_no_group(out: dict[str, object]) -> None:
    index = index_of([*(node(n) for n in range(LARGE)), node(LARGE, **out)])
    pool = index.snapshot.pool("m", Role.Hybrid)
    assert len(pool.urls) == LARGE and index.groups(pool) == (0,)
    assert index.place(node(LARGE).url) is None


def test_candidates_that_are_no_whole_groups_are_looked_at_one_by_one() -> None:
    index = index_of([node(n) for n in range(60)])
    pool = index.snapshot.pool("m", Role.Hybrid)
    rest = index.snapshot.without(pool, [node(5).url])
    assert rest is not None and index.groups(rest) == () and index.groups(pool) == (0,)
    assert index.groups(index.snapshot.only(node(5).url)) == ()


def test_a_speed_that_depends_on_the_pool_keeps_it_out_of_the_groups() -> None:
    """Without a speed a node counts as the average: of 2 among all, of 4 among its own kind."""
    slow = [node(n, speed=1.0) for n in range(40)]
    index = index_of([*slow, *(node(40 + n, models=("m", "n"), speed=4.0 if n else None) for n in range(41))])
    assert index.groups(index.snapshot.pool("m", Role.Hybrid)) == ()
    assert index.groups(index.snapshot.pool("n", Role.Hybrid)) == (1,)


def test_a_model_of_few_nodes_goes_by_the_order_of_a_large_fleet_too() -> None:
    """Else each of its requests would take the order away from the others."""
    index = index_of([*(node(n) for n in range(LARGE)), node(99, models=("small",)), node(98, models=("small", "s"))])
    assert index.groups(index.snapshot.pool("small", Role.Hybrid)) == (1, 2)


def test_two_fleets_of_one_version_have_orders_of_two_names() -> None:
    one, other = index_of([node(n) for n in range(50)]), index_of([node(n) for n in range(1, 51)])
    assert one.name.split(":")[0] == other.name.split(":")[0] == "7" and one.name != other.name
    assert one.name == index_of([node(n) for n in range(50)]).name


def test_orders_by_given_and_by_learned_speeds_have_two_names() -> None:
    """And the one by given speeds has that of before there were two, for workers of before."""
    fleet = snapshot([node(n) for n in range(50)])
    given, learned = (LoadIndex(KEYS, fleet, by=by) for by in By)
    assert given.name != learned.name
    text = "\n".join(["50", *(f"1.0 {url}" for url in fleet.nodes)])
    assert given.name == f"7:{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


def test_where_the_strategy_goes_by_something_else_there_are_no_groups() -> None:
    index = LoadIndex(KEYS, snapshot([node(n) for n in range(50)]), by=None)
    assert len(index) == 0 and index.groups(index.snapshot.pool("m", Role.Hybrid)) == ()


def test_many_small_groups_are_looked_at_one_by_one() -> None:
    index = index_of([node(n, models=("m", f"adapter{n // 2}")) for n in range(80)])
    assert index.groups(index.snapshot.pool("m", Role.Hybrid)) == ()


# --- requests -------------------------------------------------------------------------------------


async def register(space: Space, nodes: Sequence[Node], *known_by: Worker) -> None:
    """At once: one by one each would be read by all workers."""
    keys = known_by[0].keys
    version = known_by[0].registry.snapshot.version + 1
    with space.client.pipeline(transaction=True) as pipe:
        for one in nodes:
            pipe.sadd(keys.nodes, one.url)
            pipe.hset(keys.node(one.url), mapping=node_to_fields(one))
        if known_by[0].ledger.learns:
            pipe.hset(keys.learned, mapping={one.url: "1" for one in nodes})
        pipe.set(keys.version, version)
        pipe.execute()
    for worker in known_by:
        await worker.registry.refresh()
        assert worker.registry.snapshot.version == version


def ordered(space: Space) -> bool:
    return str(space.cli("GET", space.key("load_index"))).startswith(f"{space.cli('GET', space.key('version'))}:")


def placed(space: Space, group: int = 0) -> dict[str, float]:
    """url -> unfinished by unit of speed, as the order says."""
    found: Any = space.client.zrange(space.key(f"load:{group}"), 0, -1, withscores=True)
    if space.cli("TYPE", space.key("load_sums")) == "hash":  # of speed 1, learned or not: n + 1, -1 / (n + 1)
        found = [(member, score - 1 if score > 0 else round(-1 / score - 1, 9)) for member, score in found]
    return {str(member).split(" ")[1]: score for member, score in found}


def held_on(tickets: Sequence[Ticket]) -> Counter[str]:
    return Counter(ticket.url for ticket in tickets)


@pytest.fixture(params=sorted(BY))
def strategy(request: pytest.FixtureRequest) -> str:
    """Each that goes by an order of loads; to what is learned all nodes are equal here, test_speeds.py has others."""
    return str(request.param)


@pytest.fixture(autouse=True)
def settles_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "SETTLED_S", 0.0)


async def test_all_workers_together_fill_a_large_fleet_evenly(redis: Space, strategy: str) -> None:
    nodes = [node(n) for n in range(100)]
    async with workers(redis, 3, strategy=strategy) as made:
        await register(redis, nodes, *made)
        tickets = [ticket for part in await asyncio.gather(*(worker.take(100) for worker in made)) for ticket in part]
        assert held_on(tickets) == {one.url: 3 for one in nodes}
        assert ordered(redis) and placed(redis) == {one.url: 3.0 for one in nodes}
        # Those that are given back are the next to be taken, whoever gave them back and whoever takes.
        random.Random(1).shuffle(tickets)
        back, kept = tickets[:70], tickets[70:]
        give_back(back)
        await asyncio.gather(*(worker.take_nothing() for worker in made))
        (ticket,) = await made[0].take()
        assert held_on(kept)[ticket.url] == min(held_on(kept)[one.url] for one in nodes)
        more = await made[1].take(69)
        assert held_on([*kept, ticket, *more]) == {one.url: 3 for one in nodes}
        give_back([*kept, ticket, *more])
        await asyncio.gather(*(worker.take_nothing() for worker in made))
        assert ordered(redis) and placed(redis) == {one.url: 0.0 for one in nodes}


async def test_load_is_unfinished_by_speed_over_all_groups_of_the_model(redis: Space) -> None:
    """20 nodes of speed 1, 20 of 2 and 20 of 3, in two groups: 120 requests are one per unit of speed."""
    nodes = [node(n, speed=1.0 + n % 3, models=("m", "n") if n < 30 else ("m",)) for n in range(60)]
    async with workers(redis, 2) as made:
        await register(redis, nodes, *made)
        tickets = [ticket for part in await asyncio.gather(*(worker.take(60) for worker in made)) for ticket in part]
        assert held_on(tickets) == {one.url: int(one.speed or 0) for one in nodes}
        assert ordered(redis)
        give_back(tickets)


async def test_ties_are_broken_by_chance(redis: Space, strategy: str) -> None:
    nodes = [node(n) for n in range(50)]
    async with Worker(redis.url, redis.namespace, "w1", strategy=strategy) as worker:
        await register(redis, nodes, worker)
        firsts: Counter[str] = Counter()
        for _ in range(1000):
            (ticket,) = await worker.take()
            firsts[ticket.url] += 1
            give_back([ticket])
        assert len(firsts) == 50 and max(firsts.values()) < 50  # 20 of each, 4.5 standard deviations: 40


async def test_a_pair_is_taken_from_two_orders_in_one_step(redis: Space, strategy: str) -> None:
    prefill = [node(n, role=Role.Prefill) for n in range(45)]
    decode = [node(100 + n, role=Role.Decode) for n in range(45)]

    async def pair(worker: Worker) -> list[Ticket]:
        of_role = [lambda snapshot, role=role: snapshot.pool("m", role) for role in (Role.Prefill, Role.Decode)]
        return await worker.ledger.acquire_each(*of_role)

    async with workers(redis, 2, strategy=strategy) as made:
        await register(redis, [*prefill, *decode], *made)
        pairs = await asyncio.gather(*(pair(worker) for worker in made for _ in range(45)))
        assert held_on([one for one, _ in pairs]) == {one.url: 2 for one in prefill}
        assert held_on([two for _, two in pairs]) == {one.url: 2 for one in decode}
        assert ordered(redis)
        give_back([ticket for two in pairs for ticket in two])


async def test_the_order_follows_a_fleet_that_changes(redis: Space, strategy: str) -> None:
    nodes = [node(n) for n in range(60)]
    async with workers(redis, 2, strategy=strategy) as made:
        await register(redis, nodes, *made)
        tickets = await made[0].take(60)
        await register(redis, [node(200), node(201)], *made)
        assert not ordered(redis)
        more = await made[1].take(2)
        assert held_on(more) == {node(200).url: 1, node(201).url: 1}
        assert await made[0].registry.set_state(made[0].registry.snapshot.nodes[node(200).url], State.DOWN)
        later = await made[1].take(61)
        assert held_on([*tickets, *more, *later]) == {one.url: 2 for one in [*nodes, node(201)]} | {node(200).url: 1}
        give_back([*tickets, *more, *later])


async def test_a_fleet_that_changes_all_the_time_is_looked_at_one_by_one(
    redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "SETTLED_S", 0.3)
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await register(redis, [node(n) for n in range(60)], worker)
        give_back(await worker.take(3))
        assert redis.cli("EXISTS", redis.key("load_index")) == 0
        await asyncio.sleep(0.3)
        give_back(await worker.take(3))
        assert ordered(redis)


async def test_who_changes_counts_beside_the_order_takes_it_away(redis: Space, strategy: str) -> None:
    """A retry has candidates of its own."""
    nodes = [node(n) for n in range(60)]
    async with workers(redis, 2, strategy=strategy) as made:
        await register(redis, nodes, *made)
        tickets = await made[0].take(60)
        assert ordered(redis)

        def retry(snapshot: Snapshot) -> object:
            return snapshot.without(snapshot.pool("m", Role.Hybrid), [node(0).url])

        tickets.append(await made[1].ledger.acquire(retry))  # type: ignore[arg-type]
        assert not ordered(redis) and tickets[-1].url != node(0).url
        tickets += await made[0].take(59)
        assert held_on(tickets) == {one.url: 2 for one in nodes}

        assert ordered(redis)
        give_back(tickets)
        await asyncio.gather(*(worker.take_nothing() for worker in made))
        assert ordered(redis) and set(placed(redis).values()) == {0.0}


DAMAGES = [
    ("DEL", "load:0"),
    ("SET", "load:0", "x"),
    ("ZREM", "load:0", f"1.0 {node(3).url}"),
    ("ZADD", "load:0", "-5", f"1.0 {node(3).url}"),
    ("ZADD", "load:0", "9", f"1.0 {node(3).url}"),
    ("DEL", "load_index"),
    ("SET", "load_index", "rubbish"),
    ("HSET", "load_index", "f", "x"),
    ("DEL", "load_sums"),
    ("SET", "load_sums", "x"),
    ("SET", "learned", "x"),
    ("FLUSHALL",),
]


@pytest.mark.parametrize(
    ("strategy", "damage"),
    [
        # Each under one strategy, by turns; under the others in test-wide.
        pytest.param(name, damage, marks=[] if i % len(BY) == turn else pytest.mark.wide, id=" ".join((name, *damage)))
        for i, damage in enumerate(DAMAGES)
        for turn, name in enumerate(sorted(BY))
    ],
    indirect=["strategy"],
)
async def test_what_somebody_does_to_the_order_is_mended(
    redis: Space, monkeypatch: pytest.MonkeyPatch, strategy: str, damage: tuple[str, ...]
) -> None:
    """At once where a request meets it, else when the order expires."""
    monkeypatch.setattr(load_index_module, "LIFETIME_MS", 1000)
    nodes = [node(n) for n in range(60)]
    async with workers(redis, 2, strategy=strategy) as made:
        await register(redis, nodes, *made)
        tickets = await made[0].take(60)
        if damage[0] == "FLUSHALL":
            for name in redis.key_names():
                redis.cli("DEL", redis.key(name))
        else:
            if damage[0] in ("SET", "HSET"):
                redis.cli("DEL", redis.key(damage[1]))
            redis.cli(damage[0], redis.key(damage[1]), *damage[2:])

        async def one_more_on_each() -> None:
            extra = await made[1].take(60)
            try:
                assert held_on(extra) == {one.url: 1 for one in nodes}
            finally:
                give_back(extra)
                await made[1].take_nothing()
            assert ordered(redis) and placed(redis) == {one.url: 1.0 for one in nodes}

        for _ in range(40):
            try:
                await one_more_on_each()
                break
            except (AssertionError, ResponseError):
                await asyncio.sleep(0.1)
        else:
            await one_more_on_each()
        give_back(tickets)
        await aeventually(lambda: all(worker.shared for worker in made))


async def test_random_asks_redis_about_one_node_of_a_large_fleet(redis: Space) -> None:
    """The draw needs nothing that is shared: shares follow the speeds, 1 to 3."""
    nodes = [node(n, speed=1.0 if n % 2 else 3.0) for n in range(60)]
    async with Worker(redis.url, redis.namespace, "w1", strategy="random") as worker:
        await register(redis, nodes, worker)
        redis.cli("CONFIG", "RESETSTAT")
        tickets = await worker.take(1000)
        fast = sum(count for url, count in held_on(tickets).items() if worker.registry.snapshot.nodes[url].speed == 3.0)
        assert 670 < fast < 830  # 750 expected, standard deviation 14
        sent = int(redis.client.info("stats")["total_net_input_bytes"])
        assert sent < 1000 * 1000, "a fleet of 60 is 2,000 bytes and more"
        assert redis.cli("EXISTS", redis.key("load_index")) == 0
        give_back(tickets)


async def test_a_request_is_counted_though_speeds_add_up_to_no_number(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategy="random") as worker:
        await register(redis, [node(n, speed=1e308) for n in range(60)], worker)
        give_back(await worker.take(5))


async def test_a_large_fleet_is_served_locally_and_in_order_again(own_redis: Space) -> None:
    nodes = [node(n) for n in range(60)]
    async with workers(own_redis, 2, timeout_s=0.2) as made:
        await register(own_redis, nodes, *made)
        tickets = await made[0].take(60)
        own_redis.server.pause()
        away = await made[1].take(60)
        assert held_on(away) == {one.url: 1 for one in nodes}, "its own counts, while Redis is away"
        own_redis.server.resume()
        await aeventually(lambda: all(worker.shared for worker in made))
        later = await made[0].take(60)
        assert held_on([*tickets, *away, *later]) == {one.url: 3 for one in nodes}
        give_back([*tickets, *away, *later])


async def test_requests_for_a_small_model_leave_the_order_of_a_large_one(redis: Space) -> None:
    nodes = [node(n, models=("m",) if n < 60 else ("x",)) for n in range(63)]
    async with workers(redis, 2) as made:
        await register(redis, nodes, *made)
        tickets = await made[0].take(60)
        small = [*await made[0].take(3, "x"), *await made[1].take(3, "x")]
        assert held_on(small) == {one.url: 2 for one in nodes[60:]} and ordered(redis)
        give_back([*tickets, *small])


async def test_retries_in_a_large_fleet_are_not_kept(redis: Space) -> None:
    """Each has candidates of its own: a whole fleet in bytes."""
    nodes = [node(n) for n in range(60)]
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await register(redis, nodes, worker)
        give_back(await worker.take())
        for one in nodes:

            def retry(snapshot: Snapshot, one: Node = one) -> Pool:
                left = snapshot.without(snapshot.pool("m", Role.Hybrid), [one.url])
                assert left is not None
                return left

            give_back([await worker.ledger.acquire(retry)])
        assert len(worker.ledger._calls) == 0 == len(worker.ledger._index._pools) - 1


async def test_two_workers_of_one_version_that_know_other_fleets_do_not_mix_their_orders(redis: Space) -> None:
    """After Redis fell back to an older copy a number may be given twice, until one of them looks."""
    nodes = [node(n) for n in range(60)]
    async with workers(redis, 2) as (w1, w2):
        await register(redis, nodes, w1, w2)
        first = await w1.take(60)
        w2.registry.snapshot = Snapshot(w2.registry.snapshot.version, {one.url: one for one in nodes[10:]})
        second = await w2.take(50)
        assert held_on(second) == {one.url: 1 for one in nodes[10:]}
        third = await w1.take(10)
        assert held_on(third) == {one.url: 1 for one in nodes[:10]}
        give_back([*first, *second, *third])


async def test_the_loads_are_ordered_once_for_all_that_ask_at_the_same_time(redis: Space) -> None:
    nodes = [node(n) for n in range(60)]
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await register(redis, nodes, worker)
        pipeline = worker.ledger._pipeline
        assert pipeline is not None
        send, orders = pipeline.send, 0

        def counting(packed: bytes, callback: Any) -> None:
            nonlocal orders
            orders += b"-- index_loads:" in packed
            send(packed, callback)

        pipeline.send = counting  # type: ignore[method-assign]
        tickets = await worker.take(120)
        assert held_on(tickets) == {one.url: 2 for one in nodes} and orders == 1
        redis.cli("DEL", redis.key("load_index"))
        tickets += await worker.take(60)
        assert held_on(tickets) == {one.url: 3 for one in nodes} and orders == 2
        give_back(tickets)
