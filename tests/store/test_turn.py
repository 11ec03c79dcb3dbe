"""What one turn of the event loop brings is one call: it ends as single calls would, and costs as little as one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.balancing import DECIDE_BY_LEARNED, POLICIES
from app.nodes import Node, Role, State
from app.store.keys import Keys
from app.store.ledger import FEW, Ticket
from app.store.scripts import load_scripts
from app.store.snapshot import Snapshot
from app.store.turn import Turn, Wish
from app.store.way import Way
from tests.store.harness import Worker, exact, give_back, ledger_of, of, totals, workers
from tests.store.test_sight import take as take_in_sight
from tests.support.redis import PrivateRedis, Space, TcpProxy
from tests.support.wait import aeventually

SCRIPTS = load_scripts()
URLS = ("http://a", "http://b", "http://c", "http://d")
SPEEDS = {"http://a": "1.0", "http://b": "2.0", "http://c": "0.1", "http://d": "1.0"}
A, B, C = "http://10.0.0.1:23333", "http://10.0.0.2:23333", "http://10.0.0.3:23333"

# --- the script: any split into calls -------------------------------------------------------------

urls = st.sampled_from(URLS)
counts = st.dictionaries(urls, st.integers(-1, 3))  # below 0: somebody's edit
draws = st.tuples(
    st.sampled_from([0.0, 0.3, 0.5, 0.9999999999999999]), st.sampled_from([0.0, 0.0049, 0.05, 0.0999, 0.1, 0.7])
)
Draws = tuple[float, float]


@dataclass(frozen=True)
class Call:
    """Releases (url, answered) and then acquires: each wants one node of the pool, `wants` with two draws each."""

    releases: tuple[tuple[str, bool], ...]
    wants: tuple[tuple[tuple[str, ...], tuple[Draws, ...]], ...]
    stale: bool = False


pools = st.lists(urls, min_size=1, max_size=4, unique=True).map(tuple)
calls = st.builds(
    Call,
    st.lists(st.tuples(urls, st.booleans()), max_size=6).map(tuple),
    st.lists(st.tuples(pools, st.lists(draws, min_size=1, max_size=5).map(tuple)), max_size=3).map(tuple),
    st.sampled_from([False, False, False, True]),
)


@dataclass(frozen=True)
class Before:
    """What stands in Redis. `means`, `learned`: of which nodes there is none; `told`: the caller knows `learned`."""

    unfinished: dict[str, int]
    ledger: dict[str, int]
    failures: dict[str, int]
    explored: dict[str, int]
    means: frozenset[str]
    learned: frozenset[str]
    ordered: bool
    told: bool
    member: bool = True


befores = st.builds(
    Before,
    counts,
    counts,
    counts,
    counts,
    st.frozensets(urls),
    st.frozensets(urls),
    st.booleans(),
    st.booleans(),
    st.sampled_from([True, True, True, True, False]),
)


class Side:
    """One way to say it, with a namespace of its own."""

    def __init__(self, server: PrivateRedis, name: str, policy: str, before: Before) -> None:
        self.client, self.keys, self.before, self.policy = server.client, Keys(f"turn-{name}"), before, policy
        keys, self.generation = self.keys, 5
        names = list(self.client.scan_iter(keys.prefix + "*", count=1000))
        hashes: dict[str, dict[str, Any]] = {
            keys.unfinished: before.unfinished,
            keys.ledger("w"): before.ledger,
            keys.failures: before.failures,
            keys.explored: before.explored,
            keys.latency_mean: {url: 0.25 * (n + 1) for n, url in enumerate(URLS) if url not in before.means},
            keys.learned: {url: 10.0 + n for n, url in enumerate(URLS) if url not in before.learned},
            keys.sessions: {"w": 5 if before.member else 6},
        }
        with self.client.pipeline(transaction=False) as pipe:
            if names:
                pipe.delete(*names)
            pipe.mset({keys.version: 3, keys.learned_since: "77"})
            if before.ordered:
                pipe.set(keys.load_index, "3:ab12")
            for key, mapping in hashes.items():
                if mapping:
                    pipe.hset(key, mapping=mapping)
            pipe.execute()

    def acquire(self, call: Call, more: Sequence[Any]) -> Any:
        keys = self.keys
        names = [keys.unfinished, keys.ledger("w"), keys.sessions, keys.version]
        names += [keys.latency_mean, keys.explored, keys.load_index]
        since = []
        if self.policy in DECIDE_BY_LEARNED:
            names += [keys.learned, keys.learned_since]
            since = ["77" if self.before.told and not self.before.learned else "76" if self.before.told else ""]
        if call.releases:
            names.append(keys.failures)
        words = ["w", self.generation, 2 if call.stale else 3, *since, *more]
        return self.client.execute_command(*SCRIPTS[f"acquire_{self.policy}"].evalsha(names, words))

    def pool(self, pool: Sequence[str]) -> list[Any]:
        learned = self.policy in DECIDE_BY_LEARNED and self.before.told and not self.before.learned
        return [len(pool), *pool, *(10.0 + URLS.index(url) if learned else SPEEDS[url] for url in pool)]

    def refuses(self, call: Call) -> bool:
        """Whether the speeds are not those of now, and of some candidate none is learned."""
        wanted = {url for pool, _ in call.wants for url in pool}
        knows = self.before.told and self.before.member and self.policy in DECIDE_BY_LEARNED
        return knows and bool(self.before.learned & wanted)

    def release(self, url: str, answered: bool) -> int:
        keys = self.keys
        names = [keys.unfinished, keys.ledger("w"), keys.sessions, keys.version, keys.failures, keys.load_index]
        code, version = self.client.execute_command(
            *SCRIPTS["release"].evalsha(names, ["w", self.generation, url, int(answered), ""])
        )
        assert version == 3
        return int(code)

    def one_by_one(self, call: Call) -> tuple[int, list[int], int]:
        """Code of the acquires, what they chose, and how many releases found nothing."""
        codes = Counter(self.release(url, answered) for url, answered in call.releases)
        alone = Call((), (), call.stale)
        code = 0
        chosen: list[int] = []
        if self.refuses(call) and not (call.stale or codes[1]):
            return 7, [], codes[3]  # all of a call or nothing
        for pool, each in call.wants:
            for two in each:
                code, version, *rest = self.acquire(alone, [*self.pool(pool), *map(repr, two)])
                assert version == 3
                chosen += rest[:1]
                if code:
                    return code, chosen, codes[3]
        return code if call.wants else 1 if codes[1] else 0, chosen, codes[3]

    def at_once(self, call: Call) -> tuple[int, list[int], int]:
        """The same in one call."""
        words: list[Any] = []
        if call.releases:
            # Each pair stands by itself: the same url may be among those that answered and those that did not.
            given = Counter(call.releases)
            order = sorted(given, key=lambda pair: not pair[1])
            answered = sum(1 for _, answered in order if answered)
            words += [-len(order), answered, *(url for url, _ in order), *(given[pair] for pair in order)]
        for pool, each in call.wants:
            words += [*self.pool(pool), *map(repr, each[0])]
            if len(each) > 1:
                words += [0, len(each) - 1, *(repr(draw) for two in each[1:] for draw in two)]
        code, version, *rest = self.acquire(call, words)
        assert version == 3
        missed = rest.pop() if call.releases and code != 1 else 0
        if rest and isinstance(rest[-1], list):
            since, *speeds = rest.pop()
            assert since == "77"
            assert [float(speed) for speed in speeds] == [
                10.0 + URLS.index(url) for pool, _ in call.wants for url in pool
            ]
        return code, rest, missed

    def holds(self) -> dict[str, Any]:
        keys = self.keys
        hashes = (keys.unfinished, keys.ledger("w"), keys.failures, keys.explored, keys.learned, keys.latency_mean)
        found: dict[str, Any] = {key.removeprefix(keys.prefix): self.client.hgetall(key) for key in hashes}
        return found | {"load_index": self.client.get(keys.load_index)}


@pytest.fixture
def server(redis_server: PrivateRedis) -> Iterator[PrivateRedis]:
    redis_server.ensure_running()
    for name, script in SCRIPTS.items():
        if name == "release" or name.startswith("acquire"):
            redis_server.client.script_load(script.text)
    yield redis_server
    for name in redis_server.client.scan_iter("evenhand:{turn-*", count=1000):
        redis_server.client.delete(name)


NOTHING = Before({}, {}, {}, {}, frozenset(), frozenset(), ordered=True, told=False)
UNTRUE = Before({"http://a": -1}, {}, {}, {"http://b": 1}, frozenset(URLS), frozenset(), ordered=False, told=False)
"""Who is chosen for its least count, which is then 0, has been tried by then."""
TWICE = Call((), ((URLS[:2], ((0.0, 0.7), (0.0, 0.7))),))


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=befores, said=st.lists(calls.filter(lambda call: call.releases or call.wants), min_size=1, max_size=3))
@example(before=NOTHING, said=[TWICE])
@example(before=UNTRUE, said=[Call((), ((URLS[:2], ((0.5, 0.7), (0.9999999999999999, 0.7))),))])
@example(before=NOTHING, said=[Call((("http://a", True), ("http://a", False)), (), stale=True)])
def test_one_call_ends_as_single_calls_in_its_order_would(
    server: PrivateRedis, policy: str, before: Before, said: list[Call]
) -> None:
    single, whole = Side(server, "single", policy, before), Side(server, "whole", policy, before)
    for call in said:
        one, all_at_once = single.one_by_one(call), whole.at_once(call)
        if not call.wants and call.stale and before.member:
            assert all_at_once[0] == 2
            one = (2, *one[1:])
        assert all_at_once == one
        assert whole.holds() == single.holds()


def test_the_second_of_a_call_sees_the_first(server: PrivateRedis) -> None:
    """By hand: of d's 7 two are given back, and the third was never counted; a has 0, 1, 2 before each."""
    of_d = ({"http://d": 7}, {"http://d": 2}, {"http://d": 1}, {})
    before = Before(*of_d, frozenset(), frozenset(), ordered=True, told=False)
    side = Side(server, "whole", "min_expected_latency", before)
    releases = (("http://d", True), ("http://d", True), ("http://d", False))
    call = Call(releases, ((("http://a", "http://d"), ((0.0, 0.7),) * 3),))
    assert side.at_once(call) == (0, [1, 1, 1], 1)
    holds = side.holds()
    assert holds["unfinished"] == {"http://a": "3", "http://d": "5"}
    assert holds["unfinished:w"] == {"http://a": "3"}
    assert holds["failures"] == {} and holds["load_index"] is None


def test_what_was_not_counted_is_taken_from_nothing(server: PrivateRedis) -> None:
    """Below 0 too, which somebody wrote there; 1 of 3 was counted."""
    counted = ({"http://a": 5, "http://b": 5}, {"http://a": -2, "http://b": 1})
    before = Before(*counted, {}, {}, frozenset(), frozenset(), ordered=True, told=False)
    side = Side(server, "whole", "random", before)
    releases = (("http://a", False), ("http://a", False), *[("http://b", True)] * 3)
    assert side.at_once(Call(releases, ())) == (0, [], 4)
    assert (side.holds()["unfinished"], side.holds()["unfinished:w"]) == ({"http://a": "5", "http://b": "4"}, {})


# --- the ledger -----------------------------------------------------------------------------------


def evalshas(space: Space) -> int:
    """How many calls of scripts that the server knew by name it has run."""
    return int(space.cli("INFO", "commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"])


async def taken_while_giving_back(
    worker: Worker, count: int, held: list[Ticket], *, answered: bool = False
) -> list[Ticket]:
    """So many requests counted, and those of `held` given back in the same turn."""
    tasks = [asyncio.create_task(worker.ledger.acquire(of())) for _ in range(count)]
    await asyncio.sleep(0)
    for ticket in held:
        ticket.release(succeeded=False, answered=answered)
    return [*await asyncio.gather(*tasks)]


async def test_what_a_turn_asks_and_gives_back_is_one_call(own_redis: Space) -> None:
    async with Worker(own_redis.url, own_redis.namespace, "w1") as worker:
        for url in (A, B, C):
            await worker.add_ready(url)
        held = await worker.take(12)
        assert totals(own_redis) == {A: 4, B: 4, C: 4}
        before = evalshas(own_redis)
        held += await taken_while_giving_back(worker, 9, [held.pop() for _ in range(6)])
        assert evalshas(own_redis) == before + 1
        assert totals(own_redis) == {A: 5, B: 5, C: 5} == ledger_of(own_redis, "w1") == worker.ledger.counts
        give_back(held)
        await worker.take_nothing()
        assert evalshas(own_redis) == before + 2
        assert totals(own_redis) == {} == ledger_of(own_redis, "w1")


async def test_models_of_one_turn_share_the_call_and_pairs_do(own_redis: Space) -> None:
    async with Worker(own_redis.url, own_redis.namespace, "w1") as worker:
        await worker.add_ready(A, models=("m", "n"))
        await worker.add_ready(B, models=("n",))
        await worker.add_ready(C, role=Role.Prefill)
        before = evalshas(own_redis)

        def role(role: Role) -> Any:
            return lambda snapshot: snapshot.pool("m", role)

        single, pairs = await asyncio.gather(
            asyncio.gather(*(worker.ledger.acquire(of(model)) for model in ("m", "n", "m", "n", "n"))),
            asyncio.gather(*(worker.ledger.acquire_each(role(Role.Prefill), role(Role.Hybrid)) for _ in range(3))),
        )
        assert evalshas(own_redis) == before + 1
        # Both of m on A, then those of n where fewer run: B, B, and one of the two that tie; the pairs on C and A.
        assert single[0].url == A == single[2].url
        assert [[ticket.url for ticket in pair] for pair in pairs] == [[C, A]] * 3
        tickets = [*single, *(ticket for pair in pairs for ticket in pair)]
        assert totals(own_redis) == Counter(ticket.url for ticket in tickets) == worker.ledger.counts
        give_back(tickets)


async def test_models_of_different_strategies_have_a_call_each(own_redis: Space) -> None:
    async with Worker(own_redis.url, own_redis.namespace, "w1", strategies={"n": "random"}) as worker:
        await worker.add_ready(A, models=("m", "n"))
        before = evalshas(own_redis)
        tickets = [*await asyncio.gather(*(worker.ledger.acquire(of(model)) for model in "mmnnm"))]
        assert evalshas(own_redis) == before + 2
        assert totals(own_redis) == {A: 5}
        give_back(tickets)


async def test_a_few_have_calls_of_their_own_and_leave_with_the_turn(own_redis: Space) -> None:
    async with Worker(own_redis.url, own_redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        held = await worker.take(2)
        before = evalshas(own_redis)
        pipeline = worker.ledger._pipeline
        assert pipeline is not None
        tasks = [asyncio.create_task(worker.ledger.acquire(of())) for _ in range(FEW - 1)]
        await asyncio.sleep(0)
        held.pop().release(succeeded=False)
        assert not pipeline._outgoing
        held += await asyncio.gather(*tasks)
        assert evalshas(own_redis) == before + FEW
        assert totals(own_redis) == {A: FEW} == ledger_of(own_redis, "w1")
        give_back(held)


@pytest.mark.parametrize("strategy", sorted(POLICIES))
async def test_cancelled_ones_of_a_call_are_given_back_and_the_others_stay(redis: Space, strategy: str) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategy=strategy) as worker:
        for url in (A, B):
            await worker.add_ready(url)
        tasks = [asyncio.create_task(worker.ledger.acquire(of())) for _ in range(10)]
        await asyncio.sleep(0)  # each has asked, and nothing has left
        assert worker.ledger._acquiring == 10
        for task in tasks[::3]:
            task.cancel()
        came = await asyncio.gather(*tasks, return_exceptions=True)
        tickets = [ticket for ticket in came if isinstance(ticket, Ticket)]
        assert [isinstance(one, asyncio.CancelledError) for one in came] == [n % 3 == 0 for n in range(10)]
        await worker.take_nothing()
        assert worker.ledger._acquiring == 0
        assert sum(totals(redis).values()) == len(tickets) == 6
        assert exact(redis, [worker])
        give_back(tickets)
        await worker.take_nothing()
        assert totals(redis) == {}


async def test_a_stale_call_leaves_no_count_and_gives_back_once(own_redis: Space) -> None:
    async with workers(own_redis, 2) as (w1, w2):
        await w1.add_ready(A)
        held = await w1.take(5)
        own_redis.client.hset(own_redis.key("failures"), A, 2)
        assert await w2.registry.remove(A)
        await w2.add_ready(B)
        w1.registry.snapshot = Snapshot(1, w1.registry.snapshot.nodes)  # it has heard of nothing
        before = evalshas(own_redis)
        tickets = await taken_while_giving_back(w1, 6, [held.pop() for _ in range(3)], answered=True)
        assert [ticket.url for ticket in tickets] == [B] * 6
        assert evalshas(own_redis) == before + 2, "stale, and once more"
        assert totals(own_redis) == {A: 2, B: 6} == ledger_of(own_redis, "w1") == w1.ledger.counts
        assert not own_redis.client.hexists(own_redis.key("failures"), A)
        give_back([*held, *tickets])


async def test_what_a_call_gives_back_and_nobody_counted_is_restated(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        for url in (A, B):
            await worker.add_ready(url)
        worker.ledger._keeper.cancel()  # type: ignore[union-attr]  # it would restate by itself
        held = await worker.take(6)
        redis.client.delete(redis.key("unfinished"), redis.key("unfinished:w1"))
        held += await taken_while_giving_back(worker, 3, [held.pop() for _ in range(3)])
        await worker.take_nothing()
        await aeventually(lambda: exact(redis, [worker]))
        assert sum(totals(redis).values()) == 6
        give_back(held)


async def test_releases_alone_that_nobody_counted_are_restated_too(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        worker.ledger._keeper.cancel()  # type: ignore[union-attr]  # it would restate by itself
        held = await worker.take(6)
        redis.client.delete(redis.key("unfinished"), redis.key("unfinished:w1"))
        give_back([held.pop() for _ in range(5)])
        await aeventually(lambda: exact(redis, [worker]))
        assert totals(redis) == {A: 1}
        give_back(held)


async def test_acquires_of_two_versions_have_a_call_each() -> None:
    """Each is refused or taken by its own: the newer one must not let candidates of the older one pass."""
    one, loop = Snapshot(7, {A: Node(A, models=("m",), state=State.READY)}), asyncio.get_running_loop()
    way = Way.of("random", SCRIPTS, Keys("turn"), "w1")
    wishes: list[Wish] = [
        (way, version, [one.pool("m", Role.Hybrid)], loop.create_future()) for version in (8, 7, None, 8)
    ]
    turns = Turn.each(wishes, [(A, True)])
    assert [(turn.version, len(turn.futures), turn.gives) for turn in turns] == [
        (8, 2, True),
        (7, 1, False),
        (None, 1, False),
    ]
    assert repr(turns[0]) == "<Turn acquires=2 releases=1>"


async def test_not_a_member_nothing_is_done_and_the_restate_says_all(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        held = await worker.take(5)
        redis.client.hset(redis.key("sessions"), "w1", 1)
        held += await taken_while_giving_back(worker, 2, [held.pop() for _ in range(3)])
        assert totals(redis) == {A: 4} == ledger_of(redis, "w1") == worker.ledger.counts
        give_back(held)


async def test_scripts_that_the_server_lost_are_loaded_and_the_call_is_sent_again(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        for url in (A, B):
            await worker.add_ready(url)
        held = await worker.take(8)
        redis.cli("SCRIPT", "FLUSH")
        held += await taken_while_giving_back(worker, 3, [held.pop() for _ in range(5)])
        assert sum(totals(redis).values()) == 6 and exact(redis, [worker])
        # Without an acquire nothing is sent again: the counts are stated.
        redis.cli("SCRIPT", "FLUSH")
        give_back([held.pop() for _ in range(5)])
        await aeventually(lambda: exact(redis, [worker]))
        assert sum(totals(redis).values()) == 1
        names = ("release", "acquire_min_expected_latency")
        assert all(redis.client.script_exists(*(SCRIPTS[name].sha for name in names)))
        give_back(held)


async def test_a_lost_connection_is_told_to_each(redis: Space, slow_road: TcpProxy) -> None:
    async with Worker(slow_road.url, redis.namespace, "w1") as worker:
        for url in (A, B):
            await worker.add_ready(url)
        held = await worker.take(4)
        # One call on its way, one that has not left.
        slow_road.delay_s = 0.2
        on_its_way = asyncio.create_task(worker.take(3))
        await aeventually(lambda: worker.ledger._acquiring == 3 and not worker.ledger._wishes)
        gathered = asyncio.create_task(worker.take(3))
        await asyncio.sleep(0)
        give_back([held.pop() for _ in range(2)])
        worker.ledger._pipeline.close()  # type: ignore[union-attr]
        slow_road.delay_s = 0.0
        tickets = [*await on_its_way, *await gathered]
        assert len(tickets) == 6 and worker.ledger._acquiring == 0
        assert sum(worker.ledger.counts.values()) == 8
        await aeventually(lambda: exact(redis, [worker]))
        give_back([*held, *tickets])


async def test_a_restate_stands_behind_what_was_given_back_before_it(redis: Space) -> None:
    """It says what is left: what was given back in the same turn must not be taken from that once more."""
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        held = await worker.take(6)
        give_back([held.pop() for _ in range(2)])
        worker.ledger._restate_soon()
        held.pop().release(succeeded=False)
        worker.ledger.note("INCR", redis.key("noted"))
        held.pop().release(succeeded=False)
        await worker.take_nothing()
        assert totals(redis) == {A: 2} == ledger_of(redis, "w1") == worker.ledger.counts
        redis.client.delete(redis.key("noted"))
        give_back(held)


async def test_who_is_watched_has_a_call_of_its_own_among_the_others(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        for url in (A, B):
            await worker.add_ready(url)
        tasks = [asyncio.create_task(worker.ledger.acquire(of())) for _ in range(3)]
        await asyncio.sleep(0)
        ticket, seen = await take_in_sight(worker)
        tickets = [*await asyncio.gather(*tasks), ticket]
        assert sum(candidate.unfinished for candidate in seen.candidates) == 3, "who asked before it"
        assert totals(redis) == {A: 2, B: 2}
        give_back(tickets)
