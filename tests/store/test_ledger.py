"""Acquiring and releasing on the real server: exact counts, whatever is cancelled at whatever moment.

What happens while Redis itself misbehaves is in test_outages.py.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import ModelNotFound, NoNodeAvailable
from app.nodes import Role
from app.store import ledger as ledger_module
from app.store.latencies import NODES_A_NOTE
from app.store.ledger import Ticket
from app.store.pipeline import Pipeline
from app.store.registry import Registry
from app.store.scripts import Code
from app.store.snapshot import Pool, Snapshot
from app.store.soon import NOTE_AFTER_S
from tests.store.harness import Load, Worker, exact, give_back, ledger_of, of, totals, workers
from tests.store.processes import worker_processes
from tests.support.redis import Space, TcpProxy
from tests.support.wait import aeventually

A, B, C = "http://10.0.0.1:23333", "http://10.0.0.2:23333", "http://10.0.0.3:23333"
STRATEGIES = ["min_expected_latency", "random", "min_observed_latency", "least_expected_delay"]


@contextmanager
def sampled(space: Space) -> Iterator[list[tuple[int, int]]]:
    """Reads the totals of A and B as fast as it can, in a thread."""
    samples: list[tuple[int, int]] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            a, b = space.client.hmget(space.key("unfinished"), A, B)
            samples.append((int(a or 0), int(b or 0)))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


# --- one shared view ------------------------------------------------------------------------------


@pytest.mark.parametrize(("speeds", "split"), [((None, None), (100, 100)), ((3.0, 1.0), (150, 50))])
async def test_r01_a_burst_over_four_workers_is_split_as_one_worker_would(
    redis: Space, speeds: tuple[float | None, float | None], split: tuple[int, int]
) -> None:
    async with workers(redis, 4) as made:
        for url, speed in zip((A, B), speeds, strict=True):
            await made[0].add_ready(url, speed=speed)
        with sampled(redis) as samples:
            held = await asyncio.gather(*(worker.take(50) for worker in made))
        assert totals(redis) == pytest.approx({A: split[0], B: split[1]}, abs=0 if split[0] == 100 else 1)
        ratio = (speeds[0] or 1) / (speeds[1] or 1)
        assert samples and all(abs(a / ratio - b) <= 1 for a, b in samples)
        assert {worker.name: sum(worker.ledger.counts.values()) for worker in made} == dict.fromkeys(
            ("w1", "w2", "w3", "w4"), 50
        )
        with sampled(redis) as samples:
            for tickets in held:
                give_back(tickets)
            await aeventually(lambda: totals(redis) == {} and exact(redis, made))
        assert all(a >= 0 and b >= 0 for a, b in samples)


async def test_r01_the_same_over_four_processes(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w0") as registrar, worker_processes(redis, 4) as made:
        for url in (A, B):
            await registrar.add_ready(url)
        # One each first: whoever has an old snapshot learns the registry by it.
        await asyncio.gather(*(process.order("take", 1) for process in made))
        await asyncio.gather(*(process.order("give", 1) for process in made))
        await aeventually(lambda: totals(redis) == {})
        with sampled(redis) as samples:
            shares = await asyncio.gather(*(process.order("take", 50) for process in made))
        assert totals(redis) == {A: 100, B: 100}
        assert [sum(share.values()) for share in shares] == [50, 50, 50, 50]
        assert sum(share.get(A, 0) for share in shares) == 100
        assert all(abs(a - b) <= 1 for a, b in samples)
        await asyncio.gather(*(process.order("give", 50) for process in made))
        await aeventually(lambda: totals(redis) == {})


async def test_r02_what_one_worker_counts_the_next_sees_in_its_first_look(redis: Space) -> None:
    async with workers(redis, 2) as (w1, w2):
        await w1.add_ready(A, models=("m", "only-a"))
        await w1.add_ready(B)
        await w2.registry.refresh()
        tickets = await w1.take(20, model="only-a")
        # No waiting: what is true 0 ms later is true within the 50 ms that the report allows.
        status = await w2.registry.status()
        assert (status[A].unfinished, status[B].unfinished) == (20, 0)
        assert [ticket.url for ticket in await w2.take(20)] == [B] * 20
        give_back(tickets)


async def test_r10_each_worker_balances_on_the_counts_of_all(redis: Space) -> None:
    async with workers(redis, 4) as made:
        await made[0].add_ready(A, models=("m", "only-a"))
        await made[0].add_ready(B)
        await made[0].take(10, model="only-a")
        for worker in made[1:]:
            assert [ticket.url for ticket in await worker.take()] == [B]
        assert totals(redis) == {A: 10, B: 3}


@pytest.fixture
def quarter_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request takes 0.25 s by the ledger's clock, exactly: means of such latencies tie."""
    now = iter(range(1_000_000))
    clock = SimpleNamespace(monotonic=lambda: next(now) * 0.25, time_ns=ledger_module.time.time_ns)
    monkeypatch.setattr(ledger_module, "time", clock)
    monkeypatch.setattr(ledger_module, "RENEW_S", 60.0)  # a renewal looks at the clock too


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_r12_idle_equal_nodes_are_taken_equally_often(redis: Space, strategy: str, quarter_seconds: None) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategy=strategy, seed=12, lease_s=60.0) as worker:
        for url in (A, B, C):
            await worker.add_ready(url)
        chosen: Counter[str] = Counter()
        for _ in range(900):
            (ticket,) = await worker.take()
            chosen[ticket.url] += 1
            ticket.release(succeeded=True)
        # Binomial(900, 1/3) has a standard deviation of 14: most seeds pass, a skew does not.
        assert sum(chosen.values()) == 900
        assert all(270 <= chosen[url] <= 330 for url in (A, B, C)), chosen
        if strategy == "min_observed_latency":
            await aeventually(lambda: totals(redis) == {})
            means = redis.cli("HGETALL", redis.key("latency_mean"))
            assert {url: float(mean_s) for url, mean_s in means.items()} == dict.fromkeys((A, B, C), 0.25)


async def test_r14_a_node_that_fails_fast_gets_only_its_probe_share(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategy="min_observed_latency", seed=14) as worker:
        for url in (A, B):
            await worker.add_ready(url)
        chosen: Counter[str] = Counter()
        for _ in range(200):
            (ticket,) = await worker.take()
            chosen[ticket.url] += 1
            ticket.release(succeeded=ticket.url == B)
        # The first exploration and then one in ten: 1 + Binomial(199, 0.1), 21 +- 4 (three of these: 34).
        assert 1 <= chosen[A] <= 34
        await aeventually(lambda: totals(redis) == {})
        assert (noted(redis, A), noted(redis, B)) == (0, 15)
        assert redis.cli("HKEYS", redis.key("latency_mean")) == [B]
        assert redis.cli("HGETALL", redis.key("explored")) == {A: str(chosen[A])}
        assert redis.cli("HKEYS", redis.key("last_success")) == [B]


async def test_an_exploring_request_is_the_only_one_on_its_node(redis: Space) -> None:
    async with workers(redis, 3, strategy="min_observed_latency") as made:
        await made[0].add_ready(A)
        (ticket,) = await made[0].take()
        ticket.release(succeeded=True)
        await made[0].add_ready(B)
        # A has history, B none: one request explores B, the other 29 of the burst stay on A.
        tickets = [t for some in await asyncio.gather(*(w.take(10) for w in made)) for t in some]
        assert Counter(ticket.url for ticket in tickets) == {A: 29, B: 1}
        (exploring,) = (ticket for ticket in tickets if ticket.url == B)
        exploring.release(succeeded=True)
        await aeventually(lambda: redis.cli("HGETALL", redis.key("explored")) == {})
        give_back(tickets)


async def test_r16_a_closed_loop_follows_the_speeds(redis: Space) -> None:
    async with workers(redis, 2) as made:
        await made[0].add_ready(A, speed=8.0)
        await made[0].add_ready(B, speed=2.0)
        draws = random.Random(16)
        tickets = [t for some in await asyncio.gather(*(w.take(50) for w in made)) for t in some]
        for i in range(300):
            tickets.pop(draws.randrange(100)).release(succeeded=True)
            tickets += await made[i % 2].take()
            on_a = sum(ticket.url == A for ticket in tickets)
            assert 75 <= on_a <= 85
        assert totals(redis)[A] + totals(redis)[B] == 100
        give_back(tickets)


# --- the latency window ---------------------------------------------------------------------------


def noted(space: Space, url: str) -> int:
    """How many latencies of the node Redis knows."""
    return int(space.cli("LLEN", space.key(f"latency:{url}")))


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_the_window_holds_the_last_15_successes_newest_first(
    redis: Space, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: now_s, time_ns=ledger_module.time.time_ns)
    monkeypatch.setattr(ledger_module, "time", clock)
    async with Worker(redis.url, redis.namespace, "w1", strategy=strategy) as worker:
        await worker.add_ready(A)
        for i in range(1, 18):  # 1 s, 2 s, ... 17 s
            (ticket,) = await worker.take()
            now_s += i
            ticket.release(succeeded=True)
        (ticket,) = await worker.take()
        now_s += 1000
        ticket.release(succeeded=False)
        await aeventually(lambda: totals(redis) == {} and noted(redis, A) == 15)
        status = await worker.registry.status()
        assert status[A].latency_s == [float(i) for i in range(17, 2, -1)]
        # (3 + 17) / 2
        assert float(redis.cli("HGET", redis.key("latency_mean"), A)) == 10


async def test_windows_of_several_workers_and_notes_come_one_behind_the_other(redis: Space) -> None:
    async with workers(redis, 2) as made:
        await made[0].add_ready(A)
        await made[1].registry.refresh()
        for n, worker in enumerate((made[0], made[1], made[0])):
            for _ in range(6):
                worker.ledger.latencies.add(A, float(n), worker.registry.snapshot.nodes)
            worker.ledger.latencies.note()
            await worker.take_nothing()
        window = [float(text) for text in redis.cli("LRANGE", redis.key(f"latency:{A}"), 0, -1)]
        assert window == [2.0] * 6 + [1.0] * 6 + [0.0] * 3
        # (6 * 2 + 6 * 1) / 15
        assert float(redis.cli("HGET", redis.key("latency_mean"), A)) == 1.2


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_latencies_are_told_one_by_one_only_where_the_strategy_decides_by_them(
    own_redis: Space, strategy: str
) -> None:
    async with Worker(own_redis.url, own_redis.namespace, "w1", strategy=strategy) as worker:
        for url in (A, B):
            await worker.add_ready(url)
        for ticket in await worker.take(40):
            ticket.release(succeeded=True)
        if strategy == "min_observed_latency":
            await worker.take_nothing()  # no waiting: by the next decision it is known
            additions = 40
        else:
            await aeventually(lambda: noted(own_redis, A) and noted(own_redis, B), within_s=2 * NOTE_AFTER_S)
            additions = 2  # to each window one
        assert own_redis.cli("INFO", "commandstats")["cmdstat_lpush"]["calls"] == additions
        assert set(own_redis.cli("HKEYS", own_redis.key("last_success"))) == {A, B}


async def test_by_the_next_decision_the_latency_of_an_answer_is_known(redis: Space) -> None:
    """Of another worker's, too: a note runs before the release of its request."""
    async with workers(redis, 2, strategy="min_observed_latency") as made:
        for url in (A, B):
            await made[0].add_ready(url)
        await made[1].registry.refresh()
        tickets = await made[0].take(2)
        assert {ticket.url for ticket in tickets} == {A, B}
        await asyncio.sleep(0.01)
        tickets[0].release(succeeded=True)
        await made[0].take_nothing()
        assert [ticket.url for ticket in await made[1].take(5)] == [tickets[0].url] * 5


async def test_what_is_not_noted_yet_is_noted_when_the_worker_leaves(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        give_back(await worker.take(3), succeeded=True)
    assert noted(redis, A) == 3
    assert redis.cli("HKEYS", redis.key("last_success")) == [A]


async def test_a_note_of_more_nodes_than_one_command_takes(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        urls = [f"http://10.0.1.{i}:23333" for i in range(2 * NODES_A_NOTE + 1)]
        redis.cli("SADD", redis.key("nodes"), *urls)
        for url in urls:
            worker.ledger.latencies.add(url, 0.5, urls)
        worker.ledger.latencies.note()
        await worker.take_nothing()
        assert set(redis.cli("HKEYS", redis.key("latency_mean"))) == set(urls)
        redis.cli("DEL", redis.key("nodes"))


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_a_late_answer_of_a_removed_node_leaves_no_window_behind(redis: Space, strategy: str) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategy=strategy) as worker:
        await worker.add_ready(A)
        one, other = await worker.take(2)
        one.release(succeeded=True)
        worker.ledger.latencies.note()
        await worker.take_nothing()
        assert noted(redis, A) == 1
        assert await worker.registry.remove(A)
        assert totals(redis) == {A: 1}  # it still runs
        other.release(succeeded=True)
        worker.ledger.latencies.note()
        await worker.take_nothing()
        assert totals(redis) == {}
        figures = {"requests", "dispatched", "arrangement"}
        assert set(redis.key_names()) - figures == {"layout", "version", "workers", "sessions"}


@pytest.mark.parametrize("strategy", ["min_expected_latency", "min_observed_latency"])
async def test_a_window_of_another_type_is_met_by_the_next_note_and_healed(redis: Space, strategy: str) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategy=strategy) as worker:
        await worker.add_ready(A)
        redis.cli("SET", redis.key(f"latency:{A}"), "x")
        give_back(await worker.take(), succeeded=True)
        await aeventually(lambda: redis.cli("TYPE", redis.key(f"latency:{A}")) in ("none", "list"))
        await aeventually(lambda: exact(redis, [worker]))
        give_back(await worker.take(), succeeded=True)
        await aeventually(lambda: noted(redis, A) == 1)


async def test_notes_go_on_after_redis_has_lost_the_scripts(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        redis.cli("SCRIPT", "FLUSH")
        give_back(await worker.take(), succeeded=True)
        worker.ledger.latencies.note()  # this one may be lost
        await worker.take_nothing()
        give_back(await worker.take(), succeeded=True)
        await aeventually(lambda: noted(redis, A) == 1)
        assert worker.shared


@pytest.mark.parametrize(("draw", "last"), [(0.0, False), (1 - 2**-53, True)])
async def test_the_least_and_the_largest_draw_are_taken(redis: Space, draw: float, last: bool) -> None:
    """1 - 2**-53 is the largest number below 1: rounded up on the wire it would name a node behind the last."""
    for strategy in STRATEGIES:
        async with Worker(redis.url, redis.namespace, f"w-{strategy}", strategy=strategy) as worker:
            for url in (A, B, C):
                await worker.add_ready(url)
            worker.ledger._draws = SimpleNamespace(random=lambda: draw)  # type: ignore[assignment]
            tickets = await worker.take()
            assert [ticket.url for ticket in tickets] == [C if last else A]
            give_back(tickets)
            await worker.take_nothing()


async def test_a_release_is_of_the_connection_that_it_goes_over(redis: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are packed once, and the generation is in them."""
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        tickets = await worker.take(3)
        tickets.pop().release(succeeded=False)
        await worker.take_nothing()
        worker.ledger._drop("a test")
        await aeventually(lambda: worker.shared)
        codes: list[int] = []
        monkeypatch.setattr(worker.ledger, "_released", lambda reply: codes.append(reply[0]))
        tickets.pop().release(succeeded=False)
        await worker.take_nothing()
        assert codes == [Code.DONE]
        assert totals(redis) == {A: 1} == ledger_of(redis, "w1")
        give_back(tickets)


# --- releasing, cancelling ------------------------------------------------------------------------


async def test_release_twice_counts_once(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        one, _other = await worker.take(2)
        one.release(succeeded=True)
        one.release(succeeded=False)
        assert worker.ledger.counts == {A: 1}
        await aeventually(lambda: noted(redis, A) == 1)
        assert totals(redis) == {A: 1} == ledger_of(redis, "w1")


async def test_an_acquire_cancelled_in_the_turn_in_which_its_reply_comes_gives_back(
    redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        task = asyncio.create_task(worker.ledger.acquire(of()))
        receive = Pipeline.data_received

        def receive_then_cancel(self: Pipeline, data: bytes) -> None:
            receive(self, data)
            if worker.ledger.counts:
                task.cancel()

        monkeypatch.setattr(Pipeline, "data_received", receive_then_cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert worker.ledger.counts == {}
        await aeventually(lambda: totals(redis) == {} == ledger_of(redis, "w1"))


async def cancelled_at_random(
    start: Callable[[], Any], count: int, within_s: float, seed: int
) -> list[Any | BaseException]:
    """`count` tasks at once, each cancelled at a moment of its own; what they came to."""
    draws, loop = random.Random(seed), asyncio.get_running_loop()
    tasks = [asyncio.ensure_future(start()) for _ in range(count)]
    for task in tasks:
        loop.call_later(draws.uniform(0, within_s), task.cancel)
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_r09_acquires_cancelled_over_a_slow_road_leave_nothing(redis: Space, slow_road: TcpProxy) -> None:
    async with workers(redis, 2, url=slow_road.url) as made:
        for url in (A, B):
            await made[0].add_ready(url)
        (running,) = await made[1].take()
        slow_road.delay_s = 0.2
        staying = asyncio.create_task(made[0].take(20))
        came = await cancelled_at_random(lambda: made[0].ledger.acquire(of()), 400, 0.4, seed=9)
        tickets = [ticket for ticket in came if not isinstance(ticket, BaseException)]
        assert len(tickets) < 350, "the cancellations must fall before the replies too"
        assert all(isinstance(e, asyncio.CancelledError) for e in came if isinstance(e, BaseException))
        tickets += await staying
        # The client goes while the release is under way: nothing waits for it, so nothing can cancel it.
        give_back(tickets, succeeded=True)
        assert made[0].ledger.counts == {}
        await aeventually(lambda: totals(redis) == {running.url: 1})
        await aeventually(lambda: exact(redis, made))


async def test_r94_cancelled_commands_leave_no_reply_for_the_next_caller(redis: Space, slow_road: TcpProxy) -> None:
    async with Worker(slow_road.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A, models=("m", "only-a"), speed=3.0)
        await worker.add_ready(B, models=("m", "only-b"), speed=1.0)
        slow_road.delay_s = 0.1
        for start in (worker.registry.status, lambda: worker.ledger.acquire(of())):
            for came in await cancelled_at_random(start, 250, 0.3, seed=94):
                if isinstance(came, ledger_module.Ticket):
                    came.release(succeeded=False)
                elif isinstance(came, BaseException):
                    assert isinstance(came, asyncio.CancelledError), came
        slow_road.delay_s = 0.0
        await aeventually(lambda: totals(redis) == {})
        redis.cli("LPUSH", redis.key(f"latency:{A}"), "0.5")

        async def ask(i: int) -> None:
            if i % 3 == 0:
                assert [t.url for t in await worker.take(model="only-a")] == [A]
            elif i % 3 == 1:
                assert [t.url for t in await worker.take(model="only-b")] == [B]
            else:
                status = await worker.registry.status()
                assert [(s.node.speed, s.latency_s) for s in status.values()] == [(3.0, [0.5]), (1.0, [])]
                assert all(isinstance(s.unfinished, int) for s in status.values())

        for first in range(0, 999, 111):
            await asyncio.gather(*(ask(i) for i in range(first, first + 111)))
        assert totals(redis) == {A: 333, B: 333}
        assert exact(redis, [worker])


# --- restating while others acquire ---------------------------------------------------------------


async def test_a_restate_waits_for_the_acquires_in_flight_and_later_ones_wait_for_it(
    redis: Space, slow_road: TcpProxy
) -> None:
    """It would else take away what an acquire that it does not know of has just counted."""
    async with Worker(slow_road.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        worker.ledger._keeper.cancel()  # type: ignore[union-attr]
        await worker.take(2)
        slow_road.delay_s = 0.1
        before = asyncio.create_task(worker.take(5))
        await aeventually(lambda: worker.ledger._acquiring == 5)
        worker.ledger._restate_soon()
        after = asyncio.create_task(worker.take(3))
        await before
        await after
        slow_road.delay_s = 0.0
        await worker.take(1)
        assert worker.ledger.counts == {A: 11} == totals(redis) == ledger_of(redis, "w1")


async def test_steady_traffic_does_not_keep_the_lease_from_being_renewed(
    redis: Space, slow_road: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "RENEW_S", 0.1)
    async with Worker(slow_road.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        slow_road.delay_s = 0.02
        async with Load([worker], clients=30):

            def lease_ms() -> float:
                return float(redis.cli("ZSCORE", redis.key("workers"), "w1"))

            for _ in range(3):
                before_ms = lease_ms()
                await aeventually(lambda before_ms=before_ms: lease_ms() > before_ms, within_s=1.5)  # type: ignore[misc]
        assert worker.shared


# --- joining and leaving --------------------------------------------------------------------------


async def test_leaving_gives_back_at_once_on_a_server_that_never_saw_the_script(own_redis: Space) -> None:
    async with Worker(own_redis.url, own_redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        await worker.take(3)
        assert totals(own_redis) == {A: 3}
    stay = ["arrangement", "layout", "nodes", "version", f"node:{A}"]
    assert own_redis.key_names() == sorted([*stay, "requests", "dispatched"])
    for name, window_s in (("requests", 10), ("dispatched", 60)):
        assert 0 < own_redis.cli("TTL", own_redis.key(name)) <= window_s, "it was in the window, and goes with it"


async def test_an_acquire_raises_what_the_selection_raises_and_counts_nothing(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        with pytest.raises(NoNodeAvailable):
            await worker.ledger.acquire(of())
        await worker.registry.add(A, role=Role.Hybrid, models=("m",), speed=None, key=None)
        with pytest.raises(ModelNotFound):
            await worker.ledger.acquire(of("another"))
        assert totals(redis) == {} == worker.ledger.counts
        # Pending nodes are a last resort, but a resort.
        assert [ticket.url for ticket in await worker.take()] == [A]


async def test_an_acquire_follows_a_registry_that_keeps_changing(redis: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the registry is out of date by the time the acquire runs: it must still end."""
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        catch_up, looks = Registry.catch_up, 0

        async def catch_up_then_change(self: Registry) -> None:
            nonlocal looks
            await catch_up(self)
            looks += 1
            redis.cli("INCR", redis.key("version"))

        monkeypatch.setattr(Registry, "catch_up", catch_up_then_change)
        redis.cli("INCR", redis.key("version"))
        assert [ticket.url for ticket in await worker.take()] == [A]
        assert looks == 3
        assert worker.ledger.counts == {A: 1} == totals(redis)


async def test_a_worker_restarted_under_its_id_starts_from_nothing(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as other:
        await other.add_ready(A)
        await other.take(2)
        before = Worker(redis.url, redis.namespace, "again")
        await before.registry.start()
        await before.ledger.start()
        await before.take(5)
        async with Worker(redis.url, redis.namespace, "again") as after:
            assert totals(redis) == {A: 2}
            await after.take()
            assert totals(redis) == {A: 3}
            # What the older process still says is refused, and it takes nothing away.
            for _ in range(20):
                ticket = await before.ledger.acquire(of())
                assert totals(redis) == {A: 3}
                ticket.release(succeeded=False)
            await aeventually(lambda: exact(redis, [other, after]))
            await kill(before)


async def kill(worker: Worker) -> None:
    """End a worker as SIGKILL would: nothing is said to Redis."""
    worker.ledger._keeper.cancel()  # type: ignore[union-attr]
    if worker.ledger._pipeline is not None:
        worker.ledger._pipeline.close()
    await worker.registry.close()


async def test_repr_shows_the_counts_and_no_password(redis: Space) -> None:
    worker = Worker(f"{redis.url}?password=secret-word", redis.namespace, "w1")
    assert repr(worker.ledger) == "<Ledger w1 local unfinished=0 nodes=0>"
    assert "secret-word" not in repr(worker.ledger) + repr(worker.ledger._locator) + repr(worker.registry)
    await worker.registry.close()
    async with Worker(redis.url, redis.namespace, "w2") as joined:
        await joined.add_ready(A)
        await joined.take(3)
        assert repr(joined.ledger) == "<Ledger w2 shared unfinished=3 nodes=1>"


# --- a node of each of several pools in one step --------------------------------------------------

P1, P2, D1, D2 = (f"http://10.0.1.{n}:23333" for n in range(1, 5))


def role(role: Role) -> Callable[[Snapshot], Pool]:
    return lambda snapshot: snapshot.pool("m", role)


async def add_pairs(worker: Worker) -> None:
    for url, of_role in ((P1, Role.Prefill), (P2, Role.Prefill), (D1, Role.Decode), (D2, Role.Decode)):
        await worker.add_ready(url, role=of_role)


async def take_pair(worker: Worker) -> list[Ticket]:
    return await worker.ledger.acquire_each(role(Role.Prefill), role(Role.Decode))


async def test_a_pair_is_counted_in_one_step_and_each_is_released_by_itself_once(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await add_pairs(worker)
        prefill, decode = await take_pair(worker)
        assert {prefill.url, decode.url} in ({P1, D1}, {P1, D2}, {P2, D1}, {P2, D2})
        assert totals(redis) == {prefill.url: 1, decode.url: 1} == ledger_of(redis, "w1") == worker.ledger.counts
        prefill.release(succeeded=True)
        prefill.release(succeeded=True)
        await aeventually(lambda: totals(redis) == {decode.url: 1})
        decode.release(succeeded=False)
        decode.release(succeeded=True)
        await aeventually(lambda: totals(redis) == {} == ledger_of(redis, "w1"))
        worker.ledger.latencies.note()
        await worker.take_nothing()
        assert (noted(redis, prefill.url), noted(redis, decode.url)) == (1, 0)


async def test_r01_a_burst_of_pairs_over_four_workers_fills_both_roles_evenly_at_every_moment(redis: Space) -> None:
    async with workers(redis, 4) as made:
        await add_pairs(made[0])
        samples: list[list[int]] = []
        over = threading.Event()

        def look() -> None:
            while not over.is_set():
                found = redis.client.hmget(redis.key("unfinished"), P1, P2, D1, D2)
                samples.append([int(count or 0) for count in found])

        thread = threading.Thread(target=look)
        thread.start()
        try:
            pairs = await asyncio.gather(*(take_pair(worker) for worker in made for _ in range(25)))
        finally:
            over.set()
            thread.join()
        assert totals(redis) == {P1: 50, P2: 50, D1: 50, D2: 50}
        assert samples and all(abs(p1 - p2) <= 1 and abs(d1 - d2) <= 1 for p1, p2, d1, d2 in samples)
        assert all(p1 + p2 == d1 + d2 for p1, p2, d1, d2 in samples), "nobody sees a half of a pair"
        for pair in pairs:
            give_back(pair)
        await aeventually(lambda: exact(redis, made) and totals(redis) == {})


async def test_where_one_pool_has_nobody_nothing_is_counted_on_the_other(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(P1, role=Role.Prefill)
        with pytest.raises(NoNodeAvailable, match="no Decode node"):
            await take_pair(worker)
        with pytest.raises(NoNodeAvailable, match="no Decode node"):
            await worker.ledger.acquire_each(role(Role.Decode), role(Role.Prefill))
        assert totals(redis) == {} == worker.ledger.counts


async def test_a_decode_node_that_another_worker_added_just_now_is_found(redis: Space) -> None:
    async with workers(redis, 2) as (w1, w2):
        await w1.add_ready(P1, role=Role.Prefill)
        await w2.registry.refresh()
        stale = w2.registry.snapshot
        await w1.add_ready(D1, role=Role.Decode)
        w2.registry.snapshot = stale
        assert [ticket.url for ticket in await take_pair(w2)] == [P1, D1]


async def test_a_pair_whose_request_was_cancelled_in_the_turn_of_its_reply_is_given_back_whole(
    redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await add_pairs(worker)
        task = asyncio.create_task(take_pair(worker))
        receive = Pipeline.data_received

        def receive_then_cancel(self: Pipeline, data: bytes) -> None:
            receive(self, data)
            if worker.ledger.counts:
                task.cancel()

        monkeypatch.setattr(Pipeline, "data_received", receive_then_cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert worker.ledger.counts == {}
        await aeventually(lambda: totals(redis) == {} == ledger_of(redis, "w1"))


async def test_r09_pairs_cancelled_over_a_slow_road_leave_nothing(redis: Space, slow_road: TcpProxy) -> None:
    async with workers(redis, 2, url=slow_road.url) as made:
        await add_pairs(made[0])
        slow_road.delay_s = 0.1
        for within_s in (0.25, 1.0, 4.0):  # a loaded machine may have answered none so soon
            came = await cancelled_at_random(lambda: take_pair(made[0]), 200, within_s, seed=9)
            pairs = [pair for pair in came if not isinstance(pair, BaseException)]
            assert len(pairs) < 200 and all(len(pair) == 2 for pair in pairs)
            answered = bool(pairs)
            for pair in pairs:
                give_back(pair)
            if answered:
                break
        assert answered
        slow_road.delay_s = 0.0
        await aeventually(lambda: totals(redis) == {} and exact(redis, made))


async def test_r96_while_redis_is_away_a_pair_is_chosen_by_the_twin_and_restated_afterwards(own_redis: Space) -> None:
    async with Worker(own_redis.url, own_redis.namespace, "w1", timeout_s=0.2) as worker:
        await add_pairs(worker)
        own_redis.server.pause()
        try:
            pairs = [await take_pair(worker) for _ in range(6)]
            assert not worker.shared
            # Least unfinished of each role, on this worker's own counts.
            assert worker.ledger.counts == {P1: 3, P2: 3, D1: 3, D2: 3}
        finally:
            own_redis.server.resume()
        await aeventually(lambda: exact(own_redis, [worker]))
        assert totals(own_redis) == {P1: 3, P2: 3, D1: 3, D2: 3}
        for pair in pairs:
            give_back(pair)
        await aeventually(lambda: totals(own_redis) == {})
