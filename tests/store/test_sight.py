"""Decisions in sight: what a request saw when it was decided, exactly, and what that costs whom nobody watches."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator

import pytest

import app.store.ledger as ledger_module
from app.journey import Journey, Leg, Try, current
from app.metrics.figures import Served
from app.nodes import Role
from app.store.ledger import Ticket
from app.store.load_index import LARGE
from app.store.pipeline import Callback, Pipeline
from app.store.snapshot import Pool, Snapshot
from app.traceparent import Trace
from tests.store.harness import Worker, exact, give_back, held_by, of, totals, workers
from tests.support.redis import Space
from tests.support.wait import aeventually

A, B, C, P, D, E1, E2 = (f"http://{name}:1" for name in ("a", "b", "c", "p", "d", "e1", "e2"))


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    yield
    current.set(None)


def role(one: Role) -> Callable[[Snapshot], Pool]:
    return lambda snapshot: snapshot.pool("m", one)


async def take(worker: Worker, *, watched: bool = True) -> tuple[Ticket, Try]:
    """A request of its own task, as a server makes one."""

    async def request() -> tuple[Ticket, Try]:
        journey = Journey(watched=watched)
        current.set(journey)
        ticket = await worker.ledger.acquire(of())
        (one,) = journey.tries
        return ticket, one

    return await asyncio.create_task(request())


# --- the counts are those of that very moment -----------------------------------------------------


@pytest.mark.parametrize("nodes", [3, LARGE + 5])
async def test_each_of_many_at_once_sees_what_all_before_it_left(
    redis: Space, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    """Nothing is given back, so the totals that are seen are 0, 1, 2, ...: each once, whoever else acquires."""
    monkeypatch.setattr(ledger_module, "SETTLED_S", 0.0)
    monkeypatch.setattr("app.store.sight.KEPT", 1000)
    async with workers(redis, 3) as made:
        for number in range(nodes):
            await made[0].add_ready(f"http://n{number}:1", speed=1.0 + number % 3)
        for worker in made:
            await worker.registry.refresh()
        taken = await asyncio.gather(*(take(worker) for _ in range(20) for worker in made))
        ordered = nodes >= LARGE
        assert bool(redis.cli("EXISTS", redis.key("load_index"))) == ordered, "decided by the order of loads"
        assert sorted(sum(seen.unfinished for seen in one.candidates) for _, one in taken) == [*range(60)]
        for ticket, one in taken:
            assert one.node == ticket.url
            assert {seen.node for seen in one.candidates} == set(made[0].registry.snapshot.nodes)
            assert all(seen.score == seen.unfinished / seen.speed for seen in one.candidates)
            (chosen,) = [seen for seen in one.candidates if seen.node == one.node]
            assert chosen.score == one.candidates[0].score == min(seen.score or 0 for seen in one.candidates)
        assert totals(redis) == held_by(made)
        give_back([ticket for ticket, _ in taken])


async def test_of_many_candidates_the_best_16_are_kept_and_the_chosen_one_always(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategy="random", seed=3) as worker:
        for number in range(20):
            await worker.add_ready(f"http://n{number:02}:1")
        chosen = set()
        for _ in range(40):
            ticket, one = await take(worker)
            assert len(one.candidates) == 16 and one.left_off == 4
            assert all(seen.score is None for seen in one.candidates)
            assert ticket.url in [seen.node for seen in one.candidates]
            chosen.add(ticket.url)
            give_back([ticket])
        assert len(chosen) > 16, "also those that stand last"


async def test_min_observed_shows_the_means(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategy="min_observed_latency") as worker:
        await worker.add_ready(A)
        await worker.add_ready(B, speed=2.0)
        redis.cli("HSET", redis.key("latency_mean"), A, "0.5", B, "0.25")
        ticket, one = await take(worker)
        assert [(s.node, s.score, s.mean_latency_s, s.speed) for s in one.candidates] == [
            (B, 0.25, 0.25, 2.0),
            (A, 0.5, 0.5, 2.0),
        ]
        assert (ticket.url, one.stage, one.left_off) == (B, "request", 0)
        give_back([ticket])


async def test_prefill_and_decode_each_show_their_own_candidates(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(P, role=Role.Prefill, speed=4.0)
        await worker.add_ready(D, role=Role.Decode)
        await worker.add_ready(C, role=Role.Decode)
        redis.cli("HSET", redis.key("unfinished"), P, 2, D, 3)
        journey = Journey(watched=True)
        current.set(journey)
        tickets = await worker.ledger.acquire_each(role(Role.Prefill), role(Role.Decode))
        prefill, decode = journey.tries
        assert (prefill.node, prefill.stage, decode.node, decode.stage) == (P, "prefill", C, "decode")
        assert [(seen.node, seen.score) for seen in prefill.candidates] == [(P, 0.5)]
        assert [(seen.node, seen.score) for seen in decode.candidates] == [(C, 0.0), (D, 3.0)]
        # Decode failed: another one is taken, and it is the same request.
        tickets.append(await worker.ledger.acquire(role(Role.Decode), again=True))
        assert journey.tries[2].stage == "decode" and journey.tries[2].candidates[0].unfinished == 1
        give_back(tickets)


async def test_a_decode_node_that_does_all_is_asked_for_the_request(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(D, role=Role.Decode)
        journey = Journey(watched=True)
        current.set(journey)
        give_back([await worker.ledger.acquire(role(Role.Decode))])
        assert [one.stage for one in journey.tries] == ["request"]


@pytest.mark.parametrize(
    ("policy", "scores"), [("round_robin", [None, None]), ("weighted", [-3.0, -1.5]), ("least_unfinished", [0.5, 2.0])]
)
async def test_encoders_are_shown_once_for_all_items_of_a_request(
    redis: Space, policy: str, scores: list[float | None]
) -> None:
    async with Worker(redis.url, redis.namespace, "w1", encoder_policy=policy) as worker:
        await worker.add_ready(E1, role=Role.Encode, speed=2.0)
        await worker.add_ready(E2, role=Role.Encode, speed=1.0)
        redis.cli("HSET", redis.key("unfinished"), E1, 1, E2, 2)
        redis.cli("HSET", redis.key("encoder_credit"), E1, "1", E2, "0.5")
        journey = Journey(watched=True)
        current.set(journey)
        tickets = await worker.ledger.acquire_encoders(role(Role.Encode), 5)
        assert len(tickets) == 5
        assert {one.node for one in journey.tries} == {E1, E2} and len(journey.tries) == 2
        for one in journey.tries:
            assert one.stage == "encode"
            assert [(seen.node, seen.score, seen.unfinished) for seen in one.candidates] == [
                (E1, scores[0], 1),
                (E2, scores[1], 2),
            ]
        give_back(tickets)


# --- when something is wrong ----------------------------------------------------------------------


async def test_scripts_that_redis_lost_are_sent_again_and_the_counts_are_those_of_then(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        redis.cli("SCRIPT", "FLUSH")
        # All are refused before one of them is sent again.
        taken = await asyncio.gather(*(take(worker) for _ in range(3)))
        assert [[seen.unfinished for seen in one.candidates] for _, one in taken] == [[0], [1], [2]]
        assert totals(redis) == {A: 3} and worker.shared
        give_back([ticket for ticket, _ in taken])


async def test_a_key_that_the_strategy_does_not_read_is_shown_as_unknown_where_it_is_damaged(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        for name in ("latency_mean", "encoder_credit"):
            redis.cli("SET", redis.key(name), "x")
        ticket, one = await take(worker)
        assert [(seen.unfinished, seen.mean_latency_s) for seen in one.candidates] == [(0, None)]
        assert worker.shared
        give_back([ticket])


async def test_a_key_that_it_reads_heals_as_ever(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        redis.cli("DEL", redis.key("unfinished"))
        redis.cli("SET", redis.key("unfinished"), "x")
        ticket, one = await take(worker)
        assert ticket.url == A and one.candidates == [], "it was decided by this worker's own counts"
        await aeventually(lambda: exact(redis, [worker]))
        give_back([ticket])


async def test_one_that_is_cancelled_gives_its_count_back(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        tasks = [asyncio.create_task(take(worker)) for _ in range(5)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await aeventually(lambda: totals(redis) == {} == worker.ledger.counts)


async def test_without_redis_the_node_is_noted_and_no_candidates(own_redis: Space) -> None:
    async with Worker(own_redis.url, own_redis.namespace, "w1", timeout_s=0.3) as worker:
        await worker.add_ready(A)
        own_redis.server.kill()
        await aeventually(lambda: not worker.shared)
        ticket, one = await take(worker)
        assert (one.node, one.candidates, one.stage) == (A, [], "request")
        assert not worker.ledger.watched
        give_back([ticket])


async def test_a_flush_in_the_middle_is_an_acquire_like_any(redis: Space) -> None:
    async with workers(redis, 2) as made:
        await made[0].add_ready(A)
        await made[1].registry.refresh()
        held = [(await take(worker))[0] for worker in made]
        redis.clear()
        taken = await asyncio.gather(*(take(worker) for worker in made for _ in range(4)))
        await aeventually(lambda: exact(redis, made))
        assert totals(redis) == {A: 2 + 8}
        give_back([*held, *(ticket for ticket, _ in taken)])


# --- who is watched -------------------------------------------------------------------------------


@pytest.mark.parametrize("journey", [None, Journey(), Journey(trace=Trace(1, 2, 0, True))])
async def test_unwatched_requests_send_what_they_always_sent(
    redis: Space, journey: Journey | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        sent: list[bytes] = []
        send = Pipeline.send

        def note(pipeline: Pipeline, packed: bytes, callback: Callback) -> None:
            sent.append(packed.split(b"\r\n")[2])
            send(pipeline, packed, callback)

        monkeypatch.setattr(Pipeline, "send", note)
        current.set(journey)
        tickets = [await worker.ledger.acquire(of()) for _ in range(5)]
        assert sent.count(b"EVALSHA") == 5 and b"MULTI" not in sent and b"HMGET" not in sent
        if journey is not None:
            assert [one.node for one in journey.tries] == ([] if journey.trace is None else [A] * 5)
            assert all(not one.candidates and one.took_s > 0 for one in journey.tries)
        sent.clear()
        current.set(Journey(watched=True))
        tickets.append(await worker.ledger.acquire(of()))
        first = sent.index(b"MULTI")
        assert sent[first:] == [b"MULTI", *[b"HMGET"] * 4, b"EVALSHA", b"EXEC"]
        give_back(tickets)


async def test_a_worker_learns_of_watchers_within_a_second_and_of_their_leaving_too(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        assert not worker.ledger.watched and not worker.ledger.watch_next()
        await worker.view.watch()
        assert 4000 < redis.cli("PTTL", redis.key("watched")) <= 5000
        await aeventually(lambda: worker.ledger.watched, within_s=1.5)
        redis.cli("PEXPIRE", redis.key("watched"), 1)
        await aeventually(lambda: not worker.ledger.watched, within_s=1.5)


async def test_five_requests_a_second_are_watched(redis: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        worker.ledger.watched = True
        now_s = 100.0
        monkeypatch.setattr(ledger_module.time, "monotonic", lambda: now_s)
        assert [worker.ledger.watch_next() for _ in range(8)] == [True] * 5 + [False] * 3
        now_s = 101.0
        assert [worker.ledger.watch_next() for _ in range(8)] == [True] * 5 + [False] * 3
        monkeypatch.undo()
        worker.ledger.watched = False
        assert not worker.ledger.watch_next()


# --- the stream -----------------------------------------------------------------------------------


def served(journey: Journey | None, request: str = "r1") -> Served:
    one = Served("/v1/chat/completions")
    one.request, one.model, one.status, one.journey = request.encode(), "m", 200, journey
    one.end(A, "ok")
    return one


async def test_what_was_watched_is_written_and_nothing_else(redis: Space) -> None:
    async with workers(redis, 2) as (w1, w2):
        await w1.add_ready(A)
        journey = Journey(watched=True)
        current.set(journey)
        give_back([await w1.ledger.acquire(of())])
        w1.decisions.note([served(None), served(Journey()), served(journey, "seen")])
        await w1.take_nothing()
        (found,) = await w2.view.decisions()
        assert abs(found.pop("time") - time.time()) < 60
        assert found.pop("id") == redis.client.xrange(redis.key("decisions"))[0][0]  # type: ignore[index]
        assert 0 <= found.pop("seconds") < 5
        candidate = {"node": A, "score": 0.0, "unfinished": 0, "speed": 1.0, "mean_latency_s": None}
        assert found == {
            "request": "seen",
            "worker": "w1",
            "model": "m",
            "path": "/v1/chat/completions",
            "outcome": "ok",
            "status": 200,
            "first_byte_s": None,
            "node": A,
            "tries": [{"node": A, "stage": "request", "score": 0.0, "candidates": [candidate], "left_off": 0}],
            "legs": [],
        }


async def test_of_requests_that_were_given_to_nobody_those_that_wanted_a_node_are_written(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        refused, nobody = (served(Journey(watched=True), name) for name in ("refused", "nobody"))
        refused.outcome, nobody.outcome = "client_error", "no_node"
        worker.decisions.note([refused, nobody])
        await worker.take_nothing()
        assert [(one["request"], one["tries"]) for one in await worker.view.decisions()] == [("nobody", [])]


async def test_what_clients_choose_is_cut_and_made_text(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        one = served(Journey(watched=True, tries=[Try(A, 0.0)], legs=[Leg(A, "request", 0.0, error="e" * 999)]))
        one.model, one.path, one.request = "m" * 10_000 + "\ud800", "/v1/\ud800" + "p" * 10_000, b"\xff" * 999
        worker.decisions.note([one])
        await worker.take_nothing()
        (found,) = await worker.view.decisions()
        assert (found["model"], found["path"]) == ("m" * 200, "/v1/?" + "p" * 195)
        assert (found["request"], found["legs"][0]["error"]) == ("\xff" * 200, "e" * 200)


async def test_the_stream_keeps_200_and_goes_a_minute_after_the_last(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        worker.decisions.note([served(Journey([Try(A, 0.0)], watched=True), f"r{n}") for n in range(230)])
        await worker.take_nothing()
        assert redis.cli("XLEN", redis.key("decisions")) == 200
        assert 55 < redis.cli("TTL", redis.key("decisions")) <= 60
        found = await worker.view.decisions()
        assert [one["request"] for one in found] == [f"r{n}" for n in range(30, 230)]
        assert await worker.view.decisions(found[-1]["id"]) == []
        assert [one["request"] for one in await worker.view.decisions(found[-3]["id"])] == ["r228", "r229"]


async def test_what_somebody_else_put_into_the_stream_is_passed_over(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        key = redis.key("decisions")
        for fields in ({"decision": "{"}, {"decision": "[]"}, {"f": "x"}, {"decision": b"\xff"}):
            redis.client.xadd(key, fields)  # type: ignore[arg-type]
        redis.cli("XADD", key, "*", "decision", json.dumps({"request": "good"}))
        assert [one["request"] for one in await worker.view.decisions()] == ["good"]
        redis.cli("DEL", key)
        redis.cli("SET", key, "x")
        assert await worker.view.decisions() == [], "a key of another type is healed by who meets it"
