"""Giving media items to encoders on the real server: one sequence, whoever asks, and exact counts.

The script is compared with the pure functions call by call; what a worker does around it (versions, sessions,
cancellation, Redis away) is tested through real ledgers.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis as redis_client
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.balancing import ENCODER_POLICIES, Encoder
from app.balancing.encoders import assign_round_robin
from app.errors import ModelNotFound, NoNodeAvailable
from app.nodes import Role, State
from app.store import ledger as ledger_module
from app.store.keys import Keys
from app.store.ledger import Ticket
from app.store.pipeline import Pipeline
from app.store.scripts import load_scripts
from app.store.snapshot import Pool, Snapshot
from tests.store.harness import MODEL, Worker, exact, give_back, held_by, ledger_of, totals, workers
from tests.support.redis import PrivateRedis, Space, TcpProxy
from tests.support.wait import aeventually

SCRIPTS = load_scripts()
POLICIES = sorted(ENCODER_POLICIES)
E0, E1, E2, E3, E4 = ENCODERS = tuple(f"http://10.0.1.{n}:8000" for n in range(5))
VERSION = 3


# --- the script against the pure functions ----------------------------------------------------------


@dataclass
class Fleet:
    """Four registered workers, each with a connection of its own, and the state by plain commands."""

    server: PrivateRedis
    keys: Keys = field(default_factory=lambda: Keys(f"enc{secrets.token_hex(4)}"))
    connections: list[redis_client.Redis] = field(default_factory=list)

    def __post_init__(self) -> None:
        for _ in range(4):
            self.connections.append(
                redis_client.Redis(unix_socket_path=str(self.server.socket), decode_responses=True, socket_timeout=5)
            )
        for policy in POLICIES:
            self.server.cli("SCRIPT", "LOAD", SCRIPTS[f"acquire_encoders_{policy}"].text)

    def begin(self, urls: tuple[str, ...] = ENCODERS) -> None:
        """A fresh state: no cursor, no counts."""
        self.clear()
        with self.server.client.pipeline(transaction=False) as pipe:
            pipe.set(self.keys.version, VERSION)
            pipe.sadd(self.keys.nodes, *urls)
            for n in range(len(self.connections)):
                pipe.hset(self.keys.sessions, f"w{n}", "5")
            pipe.execute()

    def call(
        self, n: int, policy: str, encoders: list[tuple[str, float]], items: int, **more: Any
    ) -> list[int | float | str]:
        """One call over connection `n`; `generation` and `version` may be other ones."""
        keys, worker = self.keys, f"w{n}"
        counting = (keys.unfinished, keys.ledger(worker), keys.sessions, keys.version)
        names = (*counting, keys.encoder_cursor, keys.encoder_credit, keys.nodes)
        pool = [len(encoders), *(url for url, _ in encoders), *(repr(speed) for _, speed in encoders)]
        arguments = (worker, more.get("generation", 5), more.get("version", str(VERSION)), items, *pool)
        command = SCRIPTS[f"acquire_encoders_{policy}"].evalsha(names, arguments)
        reply: list[int | float | str] = self.connections[n].execute_command(*command)  # type: ignore[no-untyped-call]
        return reply

    def counts(self, name: str) -> dict[str, int]:
        return {str(url): int(count) for url, count in self.server.cli("HGETALL", name).items() if int(count)}

    def everything(self) -> dict[str, Any]:
        read = {"string": "GET", "hash": "HGETALL", "set": "SMEMBERS"}
        names = list(self.server.client.scan_iter(self.keys.prefix + "*", count=1000))
        return {str(name): self.server.cli(read[self.server.cli("TYPE", name)], name) for name in names}

    def clear(self) -> None:
        names = list(self.server.client.scan_iter(self.keys.prefix + "*", count=1000))
        if names:
            self.server.client.delete(*names)

    def close(self) -> None:
        self.clear()
        for connection in self.connections:
            connection.close()


@pytest.fixture
def fleet(redis_server: PrivateRedis) -> Iterator[Fleet]:
    redis_server.ensure_running()
    fleet = Fleet(redis_server)
    yield fleet
    fleet.close()


def equal(urls: tuple[str, ...] | list[str]) -> list[tuple[str, float]]:
    return [(url, 1.0) for url in urls]


READY = st.sets(st.integers(0, 4), min_size=1).map(lambda chosen: [ENCODERS[n] for n in sorted(chosen)])
CALLS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), READY), min_size=1, max_size=20)
ON_REDIS = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


@ON_REDIS
@given(calls=CALLS)
# vLLM's vector, over four workers.
@example(calls=[(0, 2, [E0, E1, E2]), (1, 1, [E0, E1, E2]), (2, 3, [E0, E1, E2]), (3, 1, [E0, E1, E2])])
# 2 of 3, then one joins: position 2 of four; then it is 1 of four, two leave: position 1 of two.
@example(calls=[(0, 2, [E0, E1, E2]), (1, 3, [E0, E1, E2, E3]), (0, 1, [E2, E3])])
def test_r74_any_calls_over_any_connections_are_one_contiguous_sequence(
    fleet: Fleet, calls: list[tuple[int, int, list[str]]]
) -> None:
    fleet.begin()
    position = 0
    taken: Counter[tuple[int, str]] = Counter()
    for n, items, ready in calls:
        assigned, after = assign_round_robin(ready, position, items)
        code, version, start, *indices = fleet.call(n, "round_robin", equal(ready), items)
        assert (code, start, version) == (0, position % len(ready), VERSION)
        assert [ready[int(index) - 1] for index in indices] == assigned
        position = after
        assert fleet.server.cli("GET", fleet.keys.encoder_cursor) == str(position)
        taken.update((n, url) for url in assigned)
    for n in range(4):
        mine = {url: count for (m, url), count in taken.items() if m == n}
        assert fleet.counts(fleet.keys.ledger(f"w{n}")) == mine
    over_all: Counter[str] = Counter()
    for (_, url), count in taken.items():
        over_all[url] += count
    assert fleet.counts(fleet.keys.unfinished) == dict(over_all)


def at_once(fleet: Fleet, calls: list[list[int]], ready: list[str]) -> list[tuple[int, list[int]]]:
    """Each list of item counts over a connection of its own, all at the same time; (start, indices) of each call."""
    replies: list[tuple[int, list[int]]] = []
    barrier = threading.Barrier(len(calls))

    def client(n: int) -> None:
        barrier.wait(5)
        for items in calls[n]:
            _, _, start, *indices = fleet.call(n, "round_robin", equal(ready), items)
            replies.append((int(start), [int(index) for index in indices]))

    threads = [threading.Thread(target=client, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return replies


def test_r74_calls_at_the_same_moment_tile_the_round_without_gap_or_overlap(fleet: Fleet) -> None:
    # More encoders than items: every start stands for itself, so the order can be read off.
    ready = [f"http://many{n}:1" for n in range(499)]
    fleet.begin(tuple(ready))
    draws = random.Random(74)
    calls = [[draws.choice((1, 2, 3, 5)) for _ in range(40)] for _ in range(4)]
    total = sum(sum(counts) for counts in calls)
    assert total < 499
    at = 0
    for start, indices in sorted(at_once(fleet, calls, ready)):
        assert start == at
        assert indices == list(range(at + 1, at + 1 + len(indices)))
        at += len(indices)
    assert at == total


def test_r74_three_hundred_images_at_once_are_a_hundred_for_each_of_three(fleet: Fleet) -> None:
    fleet.begin()
    at_once(fleet, [[1] * 75] * 4, [E0, E1, E2])
    assert fleet.counts(fleet.keys.unfinished) == {E0: 100, E1: 100, E2: 100}


def test_any_thirty_assignments_one_after_the_other_differ_by_at_most_one(fleet: Fleet) -> None:
    fleet.begin()
    draws = random.Random(30)
    run: list[str] = []
    while len(run) < 200:
        reply = fleet.call(draws.randrange(4), "round_robin", equal([E0, E1, E2]), draws.choice((1, 2, 3, 5)))
        run += [ENCODERS[int(index) - 1] for index in reply[3:]]
    for first in range(len(run) - 30):
        assert set(Counter(run[first : first + 30]).values()) == {10}


SPEEDS = st.sampled_from([1.0, 2.0, 5.0, 0.1, 0.3]) | st.floats(1e-3, 1e6)
STEP = st.tuples(
    st.integers(0, 3),
    st.dictionaries(st.integers(0, 4), SPEEDS, min_size=1),
    st.integers(1, 6),
    st.lists(st.integers(0, 4), max_size=4),
    st.none() | st.integers(0, 4),
)


@pytest.mark.parametrize("policy", POLICIES)
@ON_REDIS
@given(steps=st.lists(STEP, min_size=1, max_size=8), cursor=st.integers(0, 10))
@example(steps=[(0, {0: 5.0, 1: 1.0, 2: 1.0}, 3, [], None), (1, {0: 5.0, 1: 1.0, 2: 1.0}, 4, [], None)], cursor=0)
@example(
    steps=[(0, {0: 1.0}, 1, [], None), (0, {1: 1.0, 2: 1.0}, 1, [], 0), (0, {0: 1.0, 1: 1.0}, 2, [], None)], cursor=0
)
def test_lua_and_python_assign_alike(policy: str, fleet: Fleet, steps: list[Any], cursor: int) -> None:
    """Each step: who calls, who is ready with which speed, how many items; who finishes items, who is removed."""
    fleet.begin()
    keys, cli = fleet.keys, fleet.server.cli
    cli("SET", keys.encoder_cursor, cursor)
    registered = set(ENCODERS)
    unfinished, credit = Counter[str](), dict[str, float]()
    for n, speeds, items, finished, removed in steps:
        ready = [(ENCODERS[m], speeds[m]) for m in sorted(speeds)]
        for url, _ in ready:
            registered.add(url)
            cli("SADD", keys.nodes, url)
        twins = [Encoder(speed, unfinished[url], credit.get(url, 0.0)) for url, speed in ready]
        start = cursor % len(ready)
        indices = ENCODER_POLICIES[policy](twins, start, items)
        assert fleet.call(n, policy, ready, items) == [0, VERSION, start, *(index + 1 for index in indices)]

        unfinished.update(ready[index][0] for index in indices)
        assert fleet.counts(keys.unfinished) == {url: count for url, count in unfinished.items() if count}
        if policy == "weighted":
            credit |= {url: twin.credit for (url, _), twin in zip(ready, twins, strict=True)}
            credit = {url: owed for url, owed in credit.items() if url in registered}
            assert {url: float(owed) for url, owed in cli("HGETALL", keys.encoder_credit).items()} == credit
        else:
            cursor = (start + items) % len(ready)
            assert cli("EXISTS", keys.encoder_credit) == 0
        assert cli("GET", keys.encoder_cursor) == str(cursor)

        for m in finished:
            if unfinished[ENCODERS[m]]:
                unfinished[ENCODERS[m]] -= 1
                cli("HINCRBY", keys.unfinished, ENCODERS[m], -1)
        if removed is not None:
            registered.discard(ENCODERS[removed])
            cli("SREM", keys.nodes, ENCODERS[removed])


def test_weighted_on_the_server_is_nginxs_sequence(fleet: Fleet) -> None:
    fleet.begin()
    speeds = [(E0, 5.0), (E1, 1.0), (E2, 1.0)]
    run = [fleet.call(n % 4, "weighted", speeds, 1)[3] for n in range(14)]
    assert "".join(" abc"[int(index)] for index in run) == "aabacaa" * 2


def test_weighted_keeps_the_turn_of_each_model_where_models_have_encoders_of_their_own(fleet: Fleet) -> None:
    fleet.begin()
    of_one, of_other = equal([E0, E1]), equal([E2, E3])
    run = [fleet.call(0, "weighted", pool, 1)[3] for _ in range(4) for pool in (of_one, of_other)]
    assert run == [1, 1, 2, 2, 1, 1, 2, 2]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("more", "code"), [({"generation": 4}, 1), ({"generation": 6}, 1), ({"version": "2"}, 2), ({"version": "4"}, 2)]
)
def test_a_call_that_is_refused_changes_nothing(fleet: Fleet, policy: str, more: Any, code: int) -> None:
    fleet.begin()
    fleet.call(0, policy, equal([E0, E1, E2]), 4)
    before = fleet.everything()
    assert fleet.call(1, policy, equal([E0, E1, E2]), 2, **more) == [code, VERSION]
    assert fleet.everything() == before


def test_a_call_that_takes_whatever_version_there_is(fleet: Fleet) -> None:
    fleet.begin()
    assert fleet.call(0, "round_robin", equal([E0, E1]), 1, version="") == [0, VERSION, 0, 1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("written", ["rubbish", "", "inf", "nan", "-1", "2.7", "9" * 400])
def test_whatever_somebody_wrote_there_does_not_stop_the_encoders(fleet: Fleet, policy: str, written: str) -> None:
    fleet.begin()
    fleet.server.cli("SET", fleet.keys.encoder_cursor, written)
    fleet.server.cli("HSET", fleet.keys.encoder_credit, E0, written)
    fleet.server.cli("SET", fleet.keys.version, "rubbish")
    for _ in range(4):
        code, version, start, *indices = fleet.call(0, policy, equal([E0, E1, E2]), 3, version="rubbish")
        assert (code, version, len(indices)) == (0, 0, 3)
        assert start in (0, 1, 2) and set(indices) <= {1, 2, 3}
    counted = fleet.counts(fleet.keys.unfinished)
    assert sum(counted.values()) == 12
    # Two rounds at most, 6 items, are owed to the first one or by it; the debt is shared by all three in the end.
    assert set(counted) == {E0, E1, E2} and max(counted.values()) <= 4 + 6 * 2 // 3


def test_weighted_follows_new_speeds_at_once(fleet: Fleet) -> None:
    """Speeds have any unit: an operator who goes from tokens to requests a second must not flood one encoder."""
    fleet.begin()
    fleet.call(0, "weighted", [(E0, 1000.0), (E1, 1000.0)], 1)
    fleet.call(0, "weighted", [(E0, 1.0), (E1, 1.0)], 20)
    counted = fleet.counts(fleet.keys.unfinished)
    # One before, then 10 each, but for the two rounds (4 items) that are owed.
    assert sum(counted.values()) == 21 and min(counted.values()) >= 6


# --- through ledgers --------------------------------------------------------------------------------


def to_encoders(snapshot: Snapshot) -> Pool:
    return snapshot.pool(MODEL, Role.Encode)


def only_the_first(snapshot: Snapshot) -> Pool:
    pool = to_encoders(snapshot)
    left = snapshot.without(pool, pool.urls[1:])
    assert left is not None
    return left


async def add_encoders(worker: Worker, *urls: str, speeds: tuple[float | None, ...] = ()) -> None:
    for n, url in enumerate(urls):
        await worker.add_ready(url, role=Role.Encode, speed=speeds[n] if speeds else None)


async def encode(worker: Worker, items: int) -> list[Ticket]:
    return await worker.ledger.acquire_encoders(to_encoders, items)


def urls_of(tickets: list[Ticket]) -> list[str]:
    return [ticket.url for ticket in tickets]


async def test_items_are_counted_one_by_one_and_go_round_over_all_workers(redis: Space) -> None:
    async with workers(redis, 3) as made:
        await add_encoders(made[0], E0, E1, E2)
        run, held = [], []
        for n, items in enumerate((2, 1, 3, 1, 5)):
            worker = made[n % 3]
            await worker.registry.refresh()
            tickets = await encode(worker, items)
            run += urls_of(tickets)
            held += tickets
        assert run == [ENCODERS[n % 3] for n in range(12)]
        assert totals(redis) == {E0: 4, E1: 4, E2: 4} == held_by(made)
        # w1 had 2 and 1, w2 had 1 and 5, w3 had 3.
        assert ledger_of(redis, "w1") == {E0: 2, E1: 1}
        assert ledger_of(redis, "w2") == {E2: 3, E1: 2, E0: 1}
        assert ledger_of(redis, "w3") == {E0: 1, E1: 1, E2: 1}
        give_back(held)
        await aeventually(lambda: totals(redis) == {})
        assert exact(redis, made) and held_by(made) == {}


async def test_r74_three_hundred_one_image_requests_at_once_over_four_workers(redis: Space) -> None:
    async with workers(redis, 4) as made:
        await add_encoders(made[0], E0, E1, E2)
        taken = await asyncio.gather(*(encode(made[n % 4], 1) for n in range(300)))
        held = [ticket for tickets in taken for ticket in tickets]
        assert totals(redis) == {E0: 100, E1: 100, E2: 100} == Counter(urls_of(held))
        give_back(held, succeeded=True)
        await aeventually(lambda: totals(redis) == {})


async def test_the_position_goes_on_modulo_the_new_number_of_encoders(redis: Space) -> None:
    async with workers(redis, 2) as (w1, w2):
        await add_encoders(w1, E0, E1, E2)
        held = await encode(w1, 5)  # 0 1 2 0 1, then 2
        await add_encoders(w1, E3)
        held += await encode(w1, 3)  # 2 3 0, then 1
        await w1.registry.remove(E0)
        held += await encode(w2, 3)  # of 1 2 3: the position 1 is E2; 2 3 1, then 1
        assert await w1.registry.set_state(w1.registry.snapshot.nodes[E2], State.DOWN)
        held += await encode(w2, 3)  # of 1 3: position 1 is E3
        assert urls_of(held) == [E0, E1, E2, E0, E1, E2, E3, E0, E2, E3, E1, E3, E1, E3]
        # One that comes again keeps its place in the order; one that was removed comes last.
        assert await w1.registry.set_state(w1.registry.snapshot.nodes[E2], State.READY)
        await add_encoders(w1, E0)
        await w1.registry.refresh()
        assert to_encoders(w1.registry.snapshot).urls == (E1, E2, E3, E0)
        give_back(held)


async def test_encoders_join_and_leave_under_load_and_no_request_fails(redis: Space) -> None:
    async with workers(redis, 3) as made:
        await add_encoders(made[0], E0, E1, E2)
        ended = asyncio.Event()
        chosen: Counter[str] = Counter()

        async def client(worker: Worker, seed: int) -> None:
            draws = random.Random(seed)
            while not ended.is_set():
                tickets = await encode(worker, draws.choice((1, 2, 3, 5)))
                chosen.update(urls_of(tickets))
                await asyncio.sleep(0)
                give_back(tickets)

        async with asyncio.TaskGroup() as clients:
            for n in range(12):
                clients.create_task(client(made[n % 3], n))
            await aeventually(lambda: chosen.total() > 200, within_s=10)
            await add_encoders(made[0], E3, E4)
            await made[1].registry.remove(E1)
            seen = chosen[E1]
            await made[0].registry.drain(E2, 5.0)
            # Whoever reads the version from now on knows; what was under way may still come in.
            goal = chosen.total() + 300
            await aeventually(lambda: chosen.total() > goal and chosen[E4] > 20, within_s=10)
            ended.set()
        assert chosen[E1] - seen <= 12 * 5
        await aeventually(lambda: totals(redis) == {})
        before = chosen.copy()
        await made[0].registry.refresh()
        held = [t for some in await asyncio.gather(*(encode(made[n % 3], 3) for n in range(20))) for t in some]
        assert Counter(urls_of(held)) == {E0: 20, E3: 20, E4: 20}
        assert before == chosen
        give_back(held)


async def test_a_stale_snapshot_is_refreshed_before_anything_is_assigned(
    redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "RENEW_S", 60.0)  # its replies tell of the version too
    async with workers(redis, 2) as (w1, w2):
        await add_encoders(w1, E0, E1, E2)
        await w2.registry.refresh()
        w2.registry._listener.cancel()  # type: ignore[union-attr]  # it hears of nothing by itself
        give_back(await encode(w2, 1))
        await w2.take_nothing()
        await w1.registry.remove(E1)
        assert E1 in w2.registry.snapshot.nodes
        held = await encode(w2, 4)  # position 1 of E0, E2
        assert urls_of(held) == [E2, E0, E2, E0]
        assert E1 not in w2.registry.snapshot.nodes
        assert totals(redis) == {E0: 2, E2: 2}
        give_back(held)


async def test_who_is_no_member_restates_first_and_counts_once(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        await add_encoders(w1, E0, E1, E2)
        held = await encode(w1, 2)
        redis.cli("HDEL", redis.key("sessions"), "w1")
        redis.cli("DEL", redis.key("unfinished"), redis.key("unfinished:w1"))
        held += await encode(w1, 3)
        assert urls_of(held) == [E0, E1, E2, E0, E1]
        assert totals(redis) == {E0: 2, E1: 2, E2: 1} == ledger_of(redis, "w1") == w1.ledger.counts
        give_back(held)
        await aeventually(lambda: totals(redis) == {})


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_server_that_lost_the_scripts_gets_them_again(redis: Space, policy: str) -> None:
    async with workers(redis, 1, encoder_policy=policy) as (w1,):
        await add_encoders(w1, E0, E1)
        redis.cli("SCRIPT", "FLUSH")
        held = await encode(w1, 3)
        assert totals(redis) == Counter(urls_of(held)) == w1.ledger.counts
        give_back(held)
        await aeventually(lambda: exact(redis, [w1]))


async def test_a_server_that_lost_everything_begins_a_new_round_with_the_old_encoders(own_redis: Space) -> None:
    async with workers(own_redis, 1) as (w1,):
        await add_encoders(w1, E0, E1, E2)
        held = await encode(w1, 4)
        own_redis.cli("FLUSHALL")
        held += await encode(w1, 2)
        assert urls_of(held)[4:] == [E0, E1]
        await aeventually(lambda: exact(own_redis, [w1]))
        assert totals(own_redis) == {E0: 3, E1: 2, E2: 1}
        give_back(held)


async def test_what_the_selection_raises_is_raised_and_nothing_is_counted_or_moved(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        with pytest.raises(NoNodeAvailable):
            await encode(w1, 1)
        await w1.add_ready("http://10.0.0.1:23333")
        with pytest.raises(NoNodeAvailable, match="no Encode node has the model"):
            await encode(w1, 1)
        with pytest.raises(ModelNotFound):
            await w1.ledger.acquire_encoders(lambda snapshot: snapshot.pool("other", Role.Encode), 1)
        assert totals(redis) == {} == w1.ledger.counts
        assert redis.cli("EXISTS", redis.key("encoder_cursor")) == 0


@pytest.mark.parametrize(
    ("policy", "speeds", "expected"),
    [
        ("round_robin", (5.0, 1.0, 1.0), [E0, E1, E2] * 2 + [E0]),
        ("weighted", (5.0, 1.0, 1.0), [E0, E0, E1, E0, E2, E0, E0]),
        # E0 has four requests. Item by item, looking from the cursor on: (4,0,0) b | c | (4,1,1) from c: c |
        # (4,1,2) b | (4,2,2) from b: b | (4,3,2) c | (4,3,3) from a: b
        ("least_unfinished", (1.0, 1.0, 1.0), [E1, E2, E2, E1, E1, E2, E1]),
    ],
)
async def test_each_policy_over_two_workers(
    redis: Space, policy: str, speeds: tuple[float, ...], expected: list[str]
) -> None:
    async with workers(redis, 2, encoder_policy=policy) as (w1, w2):
        await add_encoders(w1, E0, E1, E2, speeds=speeds)
        held: list[Ticket] = []
        if policy == "least_unfinished":
            held += [await w2.ledger.acquire(only_the_first) for _ in range(4)]
        run = [
            ticket for worker, items in ((w1, 2), (w2, 1), (w1, 3), (w2, 1)) for ticket in await encode(worker, items)
        ]
        assert urls_of(run) == expected
        give_back(held + run)
        await aeventually(lambda: totals(redis) == {})


async def test_an_encoder_that_is_removed_is_owed_nothing(redis: Space) -> None:
    async with workers(redis, 1, encoder_policy="weighted") as (w1,):
        await add_encoders(w1, E0, E1, E2, speeds=(5.0, 1.0, 1.0))
        give_back(await encode(w1, 2))
        credit = redis.cli("HGETALL", redis.key("encoder_credit"))
        assert {url: float(owed) for url, owed in credit.items()} == {E0: -4, E1: 2, E2: 2}
        await w1.registry.remove(E0)
        give_back(await encode(w1, 1))
        credit = redis.cli("HGETALL", redis.key("encoder_credit"))
        assert {url: float(owed) for url, owed in credit.items()} == {E1: 1, E2: 3}


# --- cancelled --------------------------------------------------------------------------------------


async def test_items_cancelled_in_the_turn_in_which_their_reply_comes_are_given_back(
    redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with workers(redis, 1) as (w1,):
        await add_encoders(w1, E0, E1)
        task = asyncio.create_task(w1.ledger.acquire_encoders(to_encoders, 3))
        receive = Pipeline.data_received

        def receive_then_cancel(self: Pipeline, data: bytes) -> None:
            receive(self, data)
            if w1.ledger.counts:
                task.cancel()

        monkeypatch.setattr(Pipeline, "data_received", receive_then_cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert w1.ledger.counts == {}
        await aeventually(lambda: totals(redis) == {} == ledger_of(redis, "w1"))


async def test_r09_items_cancelled_over_a_slow_road_leave_nothing(redis: Space, slow_road: TcpProxy) -> None:
    async with workers(redis, 1, url=slow_road.url) as (w1,):
        await add_encoders(w1, E0, E1, E2)
        slow_road.delay_s = 0.1
        draws, loop = random.Random(9), asyncio.get_running_loop()
        tasks = [asyncio.create_task(encode(w1, draws.choice((1, 2, 3, 5)))) for _ in range(200)]
        # Of the others the machine decides how many fall before the replies, and how many in their turn or after.
        for task in tasks[20:-20]:
            loop.call_later(draws.uniform(0, 0.2), task.cancel)
        await asyncio.sleep(0)
        for task in tasks[-20:]:
            task.cancel()
        came = await asyncio.gather(*tasks, return_exceptions=True)
        done = [tickets for tickets in came if not isinstance(tickets, BaseException)]
        assert 20 <= len(done) <= 180
        for tickets in done:
            give_back(tickets)
        assert w1.ledger.counts == {}
        slow_road.delay_s = 0.0
        await aeventually(lambda: totals(redis) == {})
        assert exact(redis, [w1])


async def test_release_twice_counts_once(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        await add_encoders(w1, E0, E1)
        tickets = await encode(w1, 2)
        for _ in range(3):
            tickets[0].release(succeeded=True)
        await aeventually(lambda: totals(redis) == {E1: 1} == ledger_of(redis, "w1") == w1.ledger.counts)
        w1.ledger.latencies.note()
        await w1.take_nothing()
        assert redis.cli("LLEN", redis.key(f"latency:{E0}")) == 1


# --- while Redis is away ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
async def test_without_redis_a_worker_goes_round_by_itself_and_restates_afterwards(
    own_redis: Space, policy: str
) -> None:
    async with workers(own_redis, 1, encoder_policy=policy) as (w1,):
        await add_encoders(w1, E0, E1, E2)
        shared = await encode(w1, 2)
        own_redis.server.kill()
        await aeventually(lambda: not w1.shared)
        give_back(shared)
        held = [ticket for items in (1, 2, 5, 1, 3) for ticket in await encode(w1, items)]
        # Equal and idle: whatever the policy, one after the other from some position on.
        run = [ENCODERS.index(url) for url in urls_of(held)]
        assert run == [(run[0] + n) % 3 for n in range(12)]
        assert w1.ledger.counts == {E0: 4, E1: 4, E2: 4}
        own_redis.server.start()
        await aeventually(lambda: exact(own_redis, [w1]), within_s=5)
        assert totals(own_redis) == {E0: 4, E1: 4, E2: 4}
        give_back(held)
        await aeventually(lambda: totals(own_redis) == {})


async def test_without_redis_weights_count_and_each_model_keeps_its_turn(own_redis: Space) -> None:
    async with workers(own_redis, 1, encoder_policy="weighted") as (w1,):
        await add_encoders(w1, E0, E1, E2, speeds=(5.0, 1.0, 1.0))
        for url in (E3, E4):
            await w1.add_ready(url, role=Role.Encode, models=("other",))
        own_redis.server.kill()
        await aeventually(lambda: not w1.shared)
        of_other: Callable[[Snapshot], Pool] = lambda snapshot: snapshot.pool("other", Role.Encode)  # noqa: E731
        run, others, held = [], [], []
        for _ in range(7):
            held += await encode(w1, 1)
            run.append(held[-1].url)
            held += await w1.ledger.acquire_encoders(of_other, 1)
            others.append(held[-1].url)
        assert run == [E0, E0, E1, E0, E2, E0, E0]
        assert others == [E3, E4, E3, E4, E3, E4, E3]
        give_back(held)


async def test_two_workers_without_redis_do_not_begin_at_the_same_encoder_by_design(own_redis: Space) -> None:
    """Each has a position of its own by chance; else a burst over many workers would all begin at the first encoder."""
    async with workers(own_redis, 12) as made:
        await add_encoders(made[0], E0, E1, E2)
        for worker in made:
            await worker.registry.refresh()
        own_redis.server.kill()
        await aeventually(lambda: not any(worker.shared for worker in made))
        first = {ticket.url for worker in made for ticket in await encode(worker, 1)}
        assert len(first) > 1


async def test_items_asked_for_while_redis_is_frozen_are_counted_once(own_redis: Space) -> None:
    async with workers(own_redis, 1, timeout_s=0.2) as (w1,):
        await add_encoders(w1, E0, E1, E2)
        own_redis.server.pause()
        held = [t for some in await asyncio.gather(*(encode(w1, 3) for _ in range(5))) for t in some]
        assert sum(w1.ledger.counts.values()) == 15
        own_redis.server.resume()
        await aeventually(lambda: exact(own_redis, [w1]), within_s=5)
        assert sum(totals(own_redis).values()) == 15
        give_back(held)
        await aeventually(lambda: totals(own_redis) == {})
