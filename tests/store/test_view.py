"""The documents: how a deployment stands, and what the next decision would weigh, against what then happens."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from openapi_schema_validator import OAS30Validator

import app.store.ledger as ledger_module
from app import __version__
from app.errors import ConfigurationError, ModelNotFound, StoreUnavailable
from app.http.openapi import document
from app.journey import Journey, current
from app.nodes import Node, Role, State
from app.store.ledger import Ticket
from app.store.links import Link
from app.store.registry import BreakerRules
from app.store.snapshot import Snapshot
from app.store.view import Arrangement, View, explain_over_redis, over_redis, read_arrangement, view_over_redis
from tests.store.harness import Worker, give_back, of, workers
from tests.store.test_dispatched import counts
from tests.store.test_sight import role, served
from tests.support.redis import Space, TcpProxy
from tests.support.wait import aeventually

A, B, C, P, D, E1, E2 = (f"http://{name}:1" for name in ("a", "b", "c", "p", "d", "e1", "e2"))


def conforms(name: str, found: dict[str, Any]) -> None:
    """The document is what /openapi.json says of it, to the last field."""
    whole = document()
    schema = {**whole["components"]["schemas"][name], "components": whole["components"]}
    OAS30Validator(schema).validate(found)
    assert set(found) == set(whole["components"]["schemas"][name]["properties"])


def chances(found: dict[str, Any], *roles: Role) -> dict[str, float]:
    (choice,) = [one for one in found["choices"] if one["roles"] == [role.name for role in roles]]
    return {one["node"]: one["chance"] for one in choice["candidates"]}


def why(found: dict[str, Any], *roles: Role) -> dict[str, str]:
    (choice,) = [one for one in found["choices"] if one["roles"] == [role.name for role in roles]]
    return {one["node"]: one["why"] for one in choice["passed_over"]}


HYBRID = (Role.Hybrid, Role.Decode)

# --- state ----------------------------------------------------------------------------------------


async def test_a_state_is_what_all_workers_share(redis: Space) -> None:
    async with workers(redis, 2, encoder_policy="weighted") as (w1, w2):
        await w1.add_ready(A, speed=2.0)
        await w1.add_ready(B, models=("m", "n"))
        await w1.add_ready(E1, role=Role.Encode, speed=1.0)
        await w1.add_ready(E2, role=Role.Encode, speed=3.0)
        await w1.registry.set_state(w1.registry.snapshot.nodes[B], State.DOWN, reason=f"engine {B} hangs")
        await w1.registry.record_failure(A, BreakerRules(threshold=100, open_s=10))
        redis.cli("RPUSH", redis.key(f"latency:{A}"), "0.3", "0.2", "0.1")  # newest first
        await w2.registry.refresh()
        held = [*await w1.take(2), *await w2.take(3)]
        encoding = await w1.ledger.acquire_encoders(role(Role.Encode), 1)
        await aeventually(lambda: sum(counts(redis).values()) == 6)
        found, other = await w1.view.state(), await w2.view.state()
        conforms("State", found)
        assert abs(found.pop("time") - time.time()) < 60
        leases = {worker["id"]: worker.pop("lease_s") for worker in found["workers"]}
        assert set(leases) == {"w1", "w2"} and all(6 < left_s <= 8 for left_s in leases.values())
        common = {"failures": 0, "latency_s": [], "reason": "", "breaker": "closed", "speed": None, "models": ["m"]}
        common["source"] = None
        assert found == {
            "version": __version__,
            "strategy": "min_expected_latency",
            "encoder_policy": "weighted",
            "serving": "Hybrid",
            "grace_s": 120.0,
            "redis": {"up": True, "reason": None},
            "registry_version": 9,
            "models": ["m", "n"],
            "aliases": {},
            "nodes": [
                common
                | {"url": A, "role": "Hybrid", "state": "ready", "speed": 2.0, "unfinished": 5, "failures": 1}
                | {"latency_s": [0.1, 0.2, 0.3], "requests": 5, "share": 1.0},
                common
                | {"url": B, "role": "Hybrid", "state": "down", "reason": "hangs", "models": ["m", "n"]}
                | {"unfinished": 0, "requests": 0, "share": 0.0},
                common
                | {"url": E1, "role": "Encode", "state": "ready", "speed": 1.0}
                | {"unfinished": 0, "requests": 0, "share": 0.0},
                common
                | {"url": E2, "role": "Encode", "state": "ready", "speed": 3.0}
                | {"unfinished": 1, "requests": 1, "share": 1.0},
            ],
            "workers": [
                {"id": "w1", "unfinished": 3, "nodes": {A: 2, E2: 1}},
                {"id": "w2", "unfinished": 3, "nodes": {A: 3}},
            ],
            # 3 of 4 went to E2, which is owed -1 now, E1 1: of the next, E1 is owed 2 and E2 2, and E1 is the first.
            "encoders": {"cursor": 0, "next": E1, "urls": [E1, E2]},
            "links": [],
            "sessions": 0,
            "handovers": {},
        }
        assert other["nodes"] == found["nodes"]
        give_back([*held, *encoding])


@pytest.fixture
def road(redis: Space) -> Iterator[TcpProxy]:
    with TcpProxy(redis.server.socket) as proxy:
        yield proxy


async def test_a_lease_is_told_by_the_clock_of_its_own_moment(
    redis: Space, road: TcpProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round trip of who looks takes 0.15 s, in which the lease of 8 s is renewed several times. (Near the timeout
    of 0.5 s a busy machine would let it see itself alone.)"""
    monkeypatch.setattr(ledger_module, "RENEW_S", 0.02)
    async with workers(redis, 1), Worker(road.url, redis.namespace, "far") as far:
        road.delay_s = 0.15
        leases = {worker["id"]: worker["lease_s"] for worker in (await far.view.state())["workers"]}
        assert 0 < leases["w1"] <= 8
        road.delay_s = 0.0


async def test_a_link_of_another_life_is_void(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(P, role=Role.Prefill)
        await worker.add_ready(D, role=Role.Decode)
        nodes = worker.registry.snapshot.nodes
        claim = await worker.links.claim(f"{P}|{D}", f"{nodes[P].life}|{nodes[D].life}", 3, wait_s=60)
        await worker.links.settle(f"{P}|{D}", claim.text, Link("connected", claim.link.lives, 3))
        assert (await worker.view.state())["links"] == [{"prefill": P, "decode": D, "state": "connected"}]
        await worker.registry.renew_life(P)
        assert (await worker.view.state())["links"] == [{"prefill": P, "decode": D, "state": "void"}]


async def test_totals_and_ledgers_of_a_state_are_of_one_moment(redis: Space) -> None:
    async with workers(redis, 2) as made:
        await made[0].add_ready(A)
        await made[1].registry.refresh()

        async def traffic(worker: Worker) -> None:
            while True:
                tickets = await worker.take(3)
                await asyncio.sleep(0)
                give_back(tickets)

        tasks = [asyncio.create_task(traffic(worker)) for worker in made]
        try:
            for _ in range(60):
                found = await made[0].view.state()
                assert found["nodes"][0]["unfinished"] == sum(worker["unfinished"] for worker in found["workers"])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_without_redis_it_is_the_last_known_nodes_and_this_workers_own_counts(own_redis: Space) -> None:
    async with workers(own_redis, 2, timeout_s=0.3) as (w1, w2):
        await w1.add_ready(A, speed=2.0)
        await w1.add_ready(E1, role=Role.Encode)
        for url in (B, C):
            await w1.add_ready(url, models=("n",))
        await w2.registry.refresh()
        held = [*await w1.take(2), *await w2.take(5)]
        held.pop(0).release(succeeded=True)
        own_redis.server.kill()
        await aeventually(lambda: not w1.shared, within_s=5)
        since_s = time.monotonic()
        found = await w1.view.state()
        assert time.monotonic() - since_s < 0.2, "nobody waits for what is known to be away"
        conforms("State", found)
        assert not found["redis"]["up"] and found["redis"]["reason"]
        assert abs(found["time"] - time.time()) < 2
        told = {n["url"]: (n["unfinished"], n["requests"], len(n["latency_s"])) for n in found["nodes"]}
        assert told == {A: (1, 2, 1), E1: (0, 0, 0), B: (0, 0, 0), C: (0, 0, 0)}
        assert found["workers"] == [{"id": "w1", "lease_s": 0.0, "unfinished": 1, "nodes": {A: 1}}]
        assert found["encoders"] == {"cursor": found["encoders"]["cursor"], "next": E1, "urls": [E1]}
        assert found["strategy"] == "min_expected_latency"
        explained = await w1.view.explain("m")
        conforms("Explanation", explained)
        assert [one["unfinished"] for one in explained["choices"][1]["candidates"]] == [1]
        w1.ledger.shun(B, 60)
        passed_over = why(await w1.view.explain("n"), *HYBRID)
        assert passed_over[B] == "too many requests of this worker failed there while Redis is away"
        w1.ledger.shun(C, 60)
        assert set(chances(await w1.view.explain("n"), *HYBRID)) == {B, C}, "better than nobody"
        with pytest.raises(StoreUnavailable):
            await w1.view.decisions()
        with pytest.raises(StoreUnavailable):
            await w1.view.watch()
        give_back(held)


async def test_a_frozen_redis_is_told_as_away_in_bounded_time(own_redis: Space) -> None:
    async with Worker(own_redis.url, own_redis.namespace, "w1", timeout_s=0.3) as worker:
        await worker.add_ready(A)
        own_redis.server.pause()
        try:
            found = await asyncio.wait_for(worker.view.state(), 3)
            assert not found["redis"]["up"] and [node["url"] for node in found["nodes"]] == [A]
        finally:
            own_redis.server.resume()
        await aeventually(lambda: worker.shared, within_s=5)


async def test_a_damaged_key_is_healed_by_who_looks(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        for name in ("dispatched", "failures", f"latency:{A}", "arrangement", "handovers", "encoder_cursor"):
            redis.cli("DEL", redis.key(name))
            redis.cli("ZADD", redis.key(name), 1, "x")
            assert (await worker.view.state())["redis"]["up"], name
            assert (await worker.view.explain("m"))["choices"], name
        redis.cli("HSET", redis.key("latency_mean"), A, "nan")
        conforms("Explanation", await worker.view.explain("m"))


# --- explain --------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["min_expected_latency", "random", "min_observed_latency"])
async def test_what_is_explained_is_what_happens(redis: Space, strategy: str) -> None:
    """One request after the other: where the chance is 0 none may go, where it is 1 each must."""
    draws = random.Random(7)
    async with workers(redis, 2, strategy=strategy) as made:
        await made[0].add_ready(A, speed=3.0)
        await made[0].add_ready(B)
        await made[0].add_ready(C, speed=1.0)
        await made[1].registry.refresh()
        held: list[Ticket] = []
        seen: set[float] = set()
        for number in range(60):
            found = await made[number % 2].view.explain("m")
            candidates = found["choices"][0]["candidates"]
            assert sum(one["chance"] for one in candidates) == pytest.approx(1)
            assert [one["speed"] for one in candidates] == [3.0, 2.0, 1.0]
            assert [one["given_speed"] for one in candidates] == [3.0, None, 1.0]
            (ticket,) = await made[draws.randrange(2)].take()
            chance = chances(found, *HYBRID)[ticket.url]
            assert chance > 0
            seen.add(round(chance, 3))
            held.append(ticket)
            if draws.random() < 0.4:
                held.pop(draws.randrange(len(held))).release(succeeded=draws.random() < 0.7)
                for worker in made:
                    await worker.take_nothing()
        assert seen == {0.5, round(1 / 3, 3), round(1 / 6, 3)} if strategy == "random" else 1.0 in seen
        give_back(held)


async def test_a_node_that_was_explored_in_vain_has_one_chance_in_ten(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategy="min_observed_latency") as worker:
        await worker.add_ready(A)
        await worker.add_ready(B)
        redis.cli("HSET", redis.key("latency_mean"), A, "0.25")
        found = await worker.view.explain("m")
        assert chances(found, *HYBRID) == pytest.approx({A: 0.0, B: 1.0}), "it is tried at once"
        redis.cli("HSET", redis.key("explored"), B, 1)
        found = await worker.view.explain("m")
        assert chances(found, *HYBRID) == pytest.approx({A: 0.9, B: 0.1})
        assert [one["score"] for one in found["choices"][0]["candidates"]] == [0.25, None]


async def test_whom_it_passes_over_and_why(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        registry = worker.registry
        for name in ("ready", "other", "down", "open", "half", "pending", "drained"):
            await worker.add_ready(f"http://{name}:1", models=("n",) if name == "other" else ("m",))
        nodes = registry.snapshot.nodes
        await registry.set_state(nodes["http://down:1"], State.DOWN, reason="engine http://down:1 hangs")
        await registry.add("http://pending:1", role=Role.Hybrid, models=("m",), speed=None, key=None)
        rules = BreakerRules(threshold=1, open_s=0.001)
        for name in ("open", "half"):
            await registry.record_failure(f"http://{name}:1", rules)
        await asyncio.sleep(0.01)
        await registry.move_breaker("http://half:1", "half_open")
        await worker.add_ready(P, role=Role.Prefill)
        await worker.add_ready(D, role=Role.Decode)
        held = await worker.take(4)
        await registry.drain("http://drained:1", 60)
        found = await worker.view.explain("m")
        conforms("Explanation", found)
        assert found["strategy"] == "min_expected_latency" and "unfinished / speed" in found["rule"]
        assert chances(found, *HYBRID) == {"http://half:1": 1.0, "http://ready:1": 0.0, D: 0.0}, "the trial comes first"
        assert found["rule"].endswith("one request as a trial of http://half:1, whose breaker is half open")
        assert await registry.move_breaker("http://half:1", "trial", 60_000)
        found = await worker.view.explain("m")
        assert set(chances(found, *HYBRID)) == {"http://ready:1", D}
        assert "trial" not in found["rule"]
        told = why(found, *HYBRID)
        assert told["http://other:1"] == "it does not have the model"
        assert told["http://down:1"] == "it is down: hangs"
        assert told["http://open:1"] == "its breaker is open: too many requests failed there in a row"
        assert told["http://half:1"] == "its breaker is half open: it gets nothing but one request as a trial"
        assert told["http://pending:1"] == "it is pending"
        assert told["http://drained:1"].startswith("it is draining")
        assert P not in told, "it is asked for nothing here"
        give_back(held)


async def test_an_unknown_model_is_none_and_a_known_one_without_nodes_has_no_candidates(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        with pytest.raises(ModelNotFound):
            await worker.view.explain("m")
        await worker.add_ready(A)
        await worker.registry.set_state(worker.registry.snapshot.nodes[A], State.DOWN)
        found = await worker.view.explain("m")
        assert found["choices"] == [
            {"roles": ["Hybrid", "Decode"], "candidates": [], "passed_over": [{"node": A, "why": "it is down"}]}
        ]
        with pytest.raises(ModelNotFound):
            await worker.view.explain("another")


ALIASES = '{"gpt": "m", "one": "m", "gone": "nobody\'s"}'


async def test_an_alias_is_explained_as_its_model_also_to_who_has_only_redis(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
        await worker.add_ready(C, models=("one",))
        seen = seen_as(worker, Arrangement("random", "round_robin", "Hybrid", aliases=ALIASES))
        await worker.take_nothing()
        redis.cli("HSET", redis.key("arrangement"), "aliases", ALIASES)
        for by_alias in (await seen.explain("gpt"), await explain_over_redis(redis.url, redis.namespace, "gpt")):
            conforms("Explanation", by_alias)
            assert (by_alias["alias"], by_alias["model"]) == ("gpt", "m")
            assert set(chances(by_alias, *HYBRID)) == {A}
        itself = await seen.explain("one")
        assert (itself["alias"], itself["model"]) == (None, "one"), "what a node has is itself"
        with pytest.raises(ModelNotFound, match="'gone'"):
            await seen.explain("gone")
        state = await seen.state()
        conforms("State", state)
        assert state["aliases"] == {"gpt": "m"}


@pytest.mark.parametrize("text", ["{", "[]", '"x"', '{"gpt": ["m"], "m": 1}'])
def test_what_redis_says_of_aliases_may_be_rubbish(text: str) -> None:
    said = {"strategy": "random", "encoder_policy": "weighted", "serving": "Hybrid", "aliases": text}
    arrangement = read_arrangement(said)
    assert arrangement is not None
    assert arrangement.aliases_among(Snapshot(1, {A: Node(A, models=("m",))})) == {}


def seen_as(worker: Worker, arrangement: Arrangement) -> View:
    return View(registry=worker.registry, keys=worker.keys, ledger=worker.ledger, arrangement=arrangement)


async def test_separate_prefill_and_decode_are_two_choices(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(P, role=Role.Prefill)
        await worker.add_ready(D, role=Role.Decode)
        await worker.add_ready(C, role=Role.Decode)
        await worker.add_ready(A)
        held = [await worker.ledger.acquire(role(Role.Decode))]
        split = Arrangement("min_expected_latency", "round_robin", "DistServe")
        found = await seen_as(worker, split).explain("m")
        assert [choice["roles"] for choice in found["choices"]] == [["Prefill"], ["Decode"]]
        assert chances(found, Role.Prefill) == {P: 1.0}
        assert chances(found, Role.Decode) == {url: float(url != held[0].url) for url in (D, C)}
        pair = await worker.ledger.acquire_each(role(Role.Prefill), role(Role.Decode))
        assert chances(found, Role.Prefill)[pair[0].url] == chances(found, Role.Decode)[pair[1].url] == 1.0
        dummy = Arrangement("min_expected_latency", "round_robin", "DistServe", dummy_prefill=True)
        assert [choice["roles"] for choice in (await seen_as(worker, dummy).explain("m"))["choices"]] == [["Decode"]]
        # A node that does all serves only where one of the two is missing.
        falls_back = seen_as(worker, Arrangement("min_expected_latency", "round_robin", "DistServe", fallback=True))
        assert len((await falls_back.explain("m"))["choices"]) == 2
        await worker.registry.set_state(worker.registry.snapshot.nodes[P], State.DOWN)
        found = await falls_back.explain("m")
        assert set(chances(found, Role.Decode, Role.Hybrid)) == {D, C, A}
        give_back([*held, *pair])


@pytest.mark.parametrize("policy", ["round_robin", "weighted", "least_unfinished"])
async def test_the_next_encoder_is_the_one_that_gets_the_next_item(redis: Space, policy: str) -> None:
    async with workers(redis, 2, encoder_policy=policy) as made:
        await made[0].add_ready(E1, role=Role.Encode, speed=1.0)
        await made[0].add_ready(E2, role=Role.Encode, speed=2.5)
        await made[0].add_ready("http://e3:1", role=Role.Encode)
        await made[0].add_ready(A)
        await made[1].registry.refresh()
        held: list[Ticket] = []
        for number in range(20):
            looks, takes = made[number % 2], made[(number // 2) % 2]
            found, state = await looks.view.explain("m"), await looks.view.state()
            (ticket,) = await takes.ledger.acquire_encoders(role(Role.Encode), 1)
            assert chances(found, Role.Encode)[ticket.url] == 1.0
            assert state["encoders"]["next"] == ticket.url
            held.append(ticket)
            if number % 3 == 0:
                held.pop(0).release(succeeded=False)
                await takes.take_nothing()
        assert "media: " in found["rule"]
        give_back(held)


async def test_a_trial_that_told_nothing_may_be_made_again_and_an_encoder_gets_none(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        for url, role_ in ((A, Role.Hybrid), (E1, Role.Encode), (E2, Role.Encode)):
            await worker.add_ready(url, role=role_)
        for url in (A, E1):
            await worker.registry.record_failure(url, BreakerRules(threshold=1, open_s=0.001))
            await asyncio.sleep(0.002)
            await worker.registry.move_breaker(url, "half_open")
        assert await worker.registry.move_breaker(A, "trial", 60_000)
        found = await worker.view.explain("m")
        assert chances(found, *HYBRID)[A] > 0, "nobody else has the model"
        assert "trial" not in found["rule"]
        redis.cli("HSET", redis.key(f"node:{A}"), "trial_until_ms", "1")
        found = await worker.view.explain("m")
        assert found["choices"][1]["candidates"][0]["chance"] == 1.0
        assert f"a trial of {A}, whose" in found["rule"] and E1 not in found["rule"]
        assert chances(found, Role.Encode) == {E2: 1.0}


async def test_who_is_next_of_encoders_with_different_models_is_told_where_it_is_one_for_all(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1", encoder_policy="least_unfinished") as worker:
        await worker.add_ready(E1, role=Role.Encode, models=("m", "n"))
        await worker.add_ready(E2, role=Role.Encode, models=("n",))
        assert (await worker.view.state())["encoders"] == {"cursor": 0, "next": E1, "urls": [E1, E2]}
        # One item of m runs on E1: the next of n goes to E2, the next of m to E1 still.
        (ticket,) = await worker.ledger.acquire_encoders(lambda snapshot: snapshot.only(E1), 1)
        assert (await worker.view.state())["encoders"]["next"] is None
        ticket.release(succeeded=False)


# --- without a worker -----------------------------------------------------------------------------


async def test_over_redis_it_is_the_same(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1", strategy="min_observed_latency") as worker:
        await worker.add_ready(A, speed=2.0)
        await worker.add_ready(E1, role=Role.Encode)
        held = await worker.take(2)
        journey = Journey(watched=True)
        current.set(journey)
        held.append(await worker.ledger.acquire(of()))
        current.set(None)
        worker.decisions.note([served(journey)])
        await worker.take_nothing()
        there, here = await view_over_redis(redis.url, redis.namespace), await worker.view.state()
        conforms("State", there)
        for found in (there, here):
            del found["time"], found["workers"][0]["lease_s"]
        assert there == here
        explained = await explain_over_redis(redis.url, redis.namespace, "m")
        assert explained == await worker.view.explain("m")
        with pytest.raises(ModelNotFound):
            await explain_over_redis(redis.url, redis.namespace, "another")
        async with over_redis(redis.url, redis.namespace) as view:
            await view.watch()
            (decision,) = await view.decisions()
            conforms("Decision", decision)
        await aeventually(lambda: worker.ledger.watched, within_s=1.5)
        give_back(held)


async def test_over_redis_what_no_worker_ever_said_is_unknown(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
    redis.cli("DEL", redis.key("arrangement"))
    found = await view_over_redis(redis.url, redis.namespace)
    conforms("State", found)
    assert (found["strategy"], found["encoder_policy"], found["serving"], found["workers"]) == (None, None, None, [])
    explained = await explain_over_redis(redis.url, redis.namespace, "m")
    conforms("Explanation", explained)
    assert (explained["strategy"], explained["rule"], chances(explained, *HYBRID)) == (None, "", {A: 0.0})


async def test_while_somebody_watches_workers_say_again_what_they_go_by(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.view.watch()
        redis.cli("DEL", redis.key("arrangement"))
        await aeventually(lambda: redis.cli("HGET", redis.key("arrangement"), "serving") == "Hybrid", within_s=2.5)
        assert redis.cli("HGETALL", redis.key("arrangement")) == {
            "strategy": "min_expected_latency",
            "encoder_policy": "round_robin",
            "serving": "Hybrid",
            "fallback": "0",
            "dummy_prefill": "0",
            "strategies": "",
            "aliases": "",
            "grace_s": "120",
        }


async def test_over_redis_nothing_is_written_back_after_a_flush(redis: Space) -> None:
    async with Worker(redis.url, redis.namespace, "w1") as worker:
        await worker.add_ready(A)
    async with over_redis(redis.url, redis.namespace) as view:
        assert [node["url"] for node in (await view.state())["nodes"]] == [A]
        redis.clear()
        assert (await view.state())["nodes"] == []
        assert not redis.cli("EXISTS", redis.key("nodes"))


async def test_over_redis_that_is_away_it_says_so() -> None:
    with pytest.raises(StoreUnavailable):
        await view_over_redis("redis://127.0.0.1:1/0", "x")
    with pytest.raises(ConfigurationError):
        await view_over_redis("http://nowhere", "x")
