"""DistServe under load on two hosts with two workers each: counts that hold, workers that die, faults everywhere."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.nodes import Role
from tests.integration.stage import Fleet, start
from tests.support import load
from tests.support.deployment import Deployment
from tests.support.loop import LoopThread
from tests.support.pd import Floor, PdEngine, floor_on
from tests.support.redis import PrivateRedis, Space
from tests.support.wait import eventually

pytestmark = pytest.mark.long

LEASE_S = 3.0
SETTINGS = {
    "serving_strategy": "DistServe",
    "probe_interval_s": 1,
    "lease_s": LEASE_S,
    "connect_timeout_s": 1,
    "link_timeout_s": 10,
    "gc_age_s": 2,
}
SEED = 4
REQUESTS, DEATHS = 1000, 3  # at least
# What is promised: the first pair and --retries others may each take all the time that a link has.
ENDS_WITHIN_S = 3 * SETTINGS["link_timeout_s"] + 10
LISTENS_AFTER_S = 0.5  # longer than any delay that the faults make


@pytest.fixture(scope="module")
def fleet(redis_server: PrivateRedis) -> Iterator[Fleet]:
    one = Fleet(redis_server, masters=2, workers=2, settings=SETTINGS)
    yield one
    one.close()


@pytest.fixture
def floor(fleet: Fleet, engine_loop: LoopThread) -> Iterator[Floor]:
    with floor_on(*fleet.get(), engine_loop) as one:
        yield one


# --- counts


def test_a_burst_holds_its_pairs_at_once_and_evenly(floor: Floor) -> None:
    """Pair and counts are one step: no worker can overfill a node meanwhile, of either role."""
    prefills, decodes = floor.engines(Role.Prefill, 2, ttft_s=1.5), floor.engines(Role.Decode, 2)
    running = start(load.many(floor.urls, 40, model=floor.model))
    seen: list[list[int]] = []
    while not seen or seen[-1] != [20, 20, 20, 20]:
        seen.append(floor.counts(*prefills, *decodes))
        assert not running.done(), seen[-1]
    for sample in seen:
        first, second = sample[:2], sample[2:]
        assert abs(first[0] - first[1]) <= 1 and abs(second[0] - second[1]) <= 1, sample
        assert sum(first) == sum(second), "a request holds both or none"
    assert all(answer.ok for answer in running.result(20))
    assert [len(engine.legs) for engine in (*prefills, *decodes)] == [20] * 4


def test_speeds_are_minded_at_both_stages(floor: Floor) -> None:
    prefills = [floor.prefill(add=False, ttft_s=1.5) for _ in range(2)]
    decodes = [floor.decode(add=False) for _ in range(2)]
    for engines in (prefills, decodes):
        for engine, speed in zip(engines, (3, 1), strict=True):
            floor.deployment.add(engine, ready=False, role=engine.role.name, speed=speed)
    floor.wait_until_ready(*prefills, *decodes)
    assert all(answer.ok for answer in floor.many(40))
    for engines in (prefills, decodes):
        fast, slow = (len(engine.legs) for engine in engines)
        assert abs(fast - 30) <= 1 and fast + slow == 40


# --- what dies


def sessions_by_worker(floor: Floor) -> dict[int, set[int]]:
    """{pid: sessions under migration}; a worker's id in Redis is <host>-<pid>-<random>."""
    found: dict[int, set[int]] = {}
    for name, entry in floor.hash("migrations").items():
        pid = int(json.loads(entry)["worker"].split("-")[-2])
        found.setdefault(pid, set()).add(int(name.rpartition("|")[2]))
    return found


def test_sessions_of_a_killed_worker_are_freed_within_its_lease_and_no_others(floor: Floor) -> None:
    prefill, decode = floor.pair()
    assert floor.chat().ok
    decode.set(stall_after=-1)
    clients = [floor.leaving(stream=i % 2 == 0) for i in range(12)]
    eventually(lambda: decode.in_flight == 12 and len(floor.migrations()) == 12)
    by_pid = sessions_by_worker(floor)
    assert set(by_pid) <= set(floor.deployment.worker_pids())
    victim = next(iter(by_pid))
    lost, others = by_pid[victim], set(prefill.held) - by_pid[victim]
    assert lost and len(prefill.held) == 12
    os.kill(victim, signal.SIGKILL)
    killed_s = time.monotonic()
    eventually(lambda: set(prefill.held) == others, within_s=LEASE_S + 3)
    assert sorted(prefill.freed) == sorted(lost), f"each once, {time.monotonic() - killed_s:.1f} s after"
    eventually(lambda: {number for _, number in floor.migrations()} == others, within_s=1)
    floor.deployment.wait_for_workers(without=[victim])
    for client in clients:
        client.leave()
    eventually(lambda: not prefill.held, within_s=2)
    assert len(prefill.freed) == len(set(prefill.freed)) == 12


def test_sessions_of_a_lost_host_are_freed_by_the_other(
    deployment_factory: Callable[..., Deployment], redis: Space, engine_loop: LoopThread
) -> None:
    kept = deployment_factory(1, settings=SETTINGS)
    lost = kept.second_master(1)
    with floor_on(redis, [kept, lost], engine_loop) as floor:
        prefill, decode = floor.pair()
        assert floor.chat().ok
        decode.set(stall_after=-1)
        running = start(load.many(lost.url, 5, model=floor.model))
        client = floor.leaving()
        eventually(lambda: decode.in_flight == 6 and len(floor.migrations()) == 6)
        lost.kill()
        eventually(lambda: len(prefill.held) == 1, within_s=LEASE_S + 3)
        assert len(prefill.freed) == len(set(prefill.freed)) == 5
        assert not any(answer.ok for answer in running.result(10))
        floor.masters = [kept]
        client.leave()


def test_a_worker_that_dies_while_it_makes_a_link_leaves_it_to_another(floor: Floor) -> None:
    prefill, decode = floor.pair(abort_frees=True)
    decode.fault("p2p_connect", delay_s=2)
    client = floor.leaving()
    eventually(lambda: decode.calls("p2p_connect"))
    owner = (floor.link(prefill, decode) or {})["owner"]
    (victim,) = [pid for pid in floor.deployment.worker_pids() if f"-{pid}-" in owner]
    os.kill(victim, signal.SIGKILL)
    begun_s = time.monotonic()
    answers = floor.many(8)
    assert [(answer.status, answer.body) for answer in answers if not answer.ok] == []
    assert time.monotonic() - begun_s < LEASE_S + 5
    assert prefill.links == {decode.url}
    client.leave()
    floor.deployment.wait_for_workers(without=[victim])
    eventually(lambda: not floor.migrations(), within_s=LEASE_S + 3)
    if prefill.held:  # the worker died before it knew the number
        assert len(prefill.held) == 1
        prefill.restart()


def test_a_worker_that_is_stopped_while_it_makes_a_link_does_not_touch_that_of_the_next(floor: Floor) -> None:
    """Longer than its lease: another one links, and what the first had still to do would undo that."""
    prefill, decode = floor.pair()
    decode.fault("p2p_initialize", delay_s=1, times=1)
    clients = [floor.leaving()]
    eventually(lambda: decode.calls("p2p_initialize"))
    owner = (floor.link(prefill, decode) or {})["owner"]
    (stopped,) = [pid for pid in floor.deployment.worker_pids() if f"-{pid}-" in owner]
    os.kill(stopped, signal.SIGSTOP)
    try:
        decode.heal()
        linked = asyncio.run(load.many([floor.urls[1]], 8, model=floor.model))
        assert all(answer.ok for answer in linked)
        calls = [len(engine.calls(call)) for engine in (prefill, decode) for call in ("p2p_initialize", "p2p_connect")]
    finally:
        os.kill(stopped, signal.SIGCONT)
    time.sleep(2)
    for client in clients:
        client.leave()
    after = [len(engine.calls(call)) for engine in (prefill, decode) for call in ("p2p_initialize", "p2p_connect")]
    assert after == calls and (floor.link(prefill, decode) or {})["owner"] != owner
    assert all(answer.ok for answer in floor.many(16))
    assert prefill.links == {decode.url} and floor.fabric.refusals == []


# --- 1,000 requests with faults at every stage

PREFILL_FAULTS: list[dict[str, Any]] = [
    *({"status": 500}, {"status": 400}, {"status": 503}, {"cut_after": -1}, {"cut_after": 1}, {"eof_after": -1}),
    *({"refuse": True}, {"finish_reason": "abort"}, {"omit": ("cache_block_ids",)}, {"ignores_cache": True}),
    *({"ttft_s": 0.15}, {"frag_bytes": 7}),
]
DECODE_FAULTS: list[dict[str, Any]] = [
    *({"status": 500}, {"status": 400}, {"status": 503}, {"cut_after": -1}, {"cut_after": 1}, {"eof_after": 2}),
    *({"refuse": True}, {"ttft_s": 0.3}, {"gap_s": 0.05}, {"frag_bytes": 7}),
]
CALL_FAULTS: list[tuple[Any, dict[str, Any]]] = [
    *(("p2p_initialize", {"status": 500}), ("p2p_connect", {"status": 503}), ("p2p_connect", {"delay_s": 0.2})),
    *(("engine_info", {"status": 500}), ("free_cache", {"delay_s": 0.3}), ("free_cache", {"status": 503})),
]
HEALTHY: dict[str, Any] = {
    "status": 200,
    "cut_after": None,
    "eof_after": None,
    "refuse": False,
    "ttft_s": 0.01,
    "gap_s": 0.002,
    "frag_bytes": 0,
    "finish_reason": "",
    "omit": (),
    "ignores_cache": False,
}


class Chaos:
    """One fault at a time on each role and one of the calls, others every ten requests, and engines that die.

    A fault must not stay longer, not even until a dead engine is back: one that answers 400 at once is the least busy
    and gets all there is. Nor may those of calls that nobody makes add up: they would fail all tries of a link.
    """

    def __init__(self, floor: Floor) -> None:
        self.floor = floor
        self.begun = 0  # requests so far
        self.dice = random.Random(SEED)
        self.deaths = 0
        self._dead: tuple[PdEngine, float] | None = None  # and when it listens again, monotonic
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Chaos:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._revive()
        for engine in self.floor.made:
            engine.set(**HEALTHY)
            engine.heal()

    def each(self, number: int) -> dict[str, Any]:
        """The options of a request: every seventh leaves, at any moment."""
        self.begun += 1
        dice = random.Random(SEED * REQUESTS + number)
        leaves = {"leave_after_s": dice.uniform(0, 0.25)} if dice.random() < 1 / 7 else {}
        path = {"path": "/v1/completions"} if dice.random() < 0.3 else {}
        return {"stream": dice.random() < 0.5, "max_tokens": 4, **path, **leaves}

    def _run(self) -> None:
        step, next_death = 0, 20
        while not self._over.wait(0.005):
            if self._dead and time.monotonic() >= self._dead[1]:
                self._revive()
            if self.begun < step * 10:
                continue
            step += 1
            dead = self._dead and self._dead[0]  # left alone: it would listen again
            for engines, faults in ((self.floor.prefills, PREFILL_FAULTS), (self.floor.decodes, DECODE_FAULTS)):
                living = [engine for engine in engines if engine is not dead]
                for engine in living:
                    engine.set(**HEALTHY)
                self.dice.choice(living).set(**self.dice.choice(faults))
            for engine in self.floor.made:
                engine.heal()
            call, how = self.dice.choice(CALL_FAULTS)
            roles = self.floor.prefills if call == "free_cache" else self.floor.made
            self.dice.choice(roles).fault(call, **how)
            if step >= next_death and self._dead is None:
                next_death = step + 20
                self._die(self.dice.choice(self.floor.made))

    def _die(self, engine: PdEngine) -> None:
        """It registers when it starts, some time before it listens, as LMDeploy's api_server does.

        So a set-up that was begun for the process before has failed by the time that the new one can answer.
        """
        engine.crash()
        self.deaths += 1
        self.floor.add(engine, ready=False)
        self._dead = engine, time.monotonic() + LISTENS_AFTER_S

    def _revive(self) -> None:
        if self._dead is not None:
            self._dead[0].set(**HEALTHY)  # it listens
            self._dead = None


@pytest.mark.timeout(150)
def test_1000_requests_with_faults_at_every_stage_leave_nothing(floor: Floor) -> None:
    floor.engines(Role.Prefill, 3, **HEALTHY)
    floor.engines(Role.Decode, 3, **HEALTHY)
    answers: list[load.Answer] = []
    with Chaos(floor) as chaos:

        def send(count: int) -> None:
            sent = load.many(
                floor.urls, count, concurrency=24, model=floor.model, each=chaos.each, within_s=ENDS_WITHIN_S
            )
            answers.extend(asyncio.run(sent))

        send(REQUESTS)
        while chaos.deaths < DEATHS:  # they may all have been served before as many engines have died
            send(REQUESTS // 5)

    statuses = Counter("left" if answer.left else answer.status for answer in answers)
    slow = [answer for answer in answers if isinstance(answer.error, TimeoutError)]
    assert not slow, f"{len(slow)} answers never ended"
    assert set(statuses) <= {"left", 200, 400, 500, 502, 503, 504}, statuses
    assert statuses[200] > len(answers) / 2, statuses
    for answer in answers:
        if answer.left or (answer.status == 200 and answer.error is not None):
            continue  # an answer without stream that breaks after its head ends with the connection
        if answer.status != 200:
            assert "message" in answer.json()["error"]
        elif answer.headers["content-type"].startswith("application/json") or answer.done:
            assert answer.text == "token0 token1 token2 token3 "
        else:
            assert "error" in answer.events()[-1], "a stream that breaks says so"

    def gone() -> bool:
        floor.deployment.post("/distserve/gc", {})  # what could not be freed when it was due
        floor.check()
        return not any(floor.counts())

    eventually(gone, within_s=15, every_s=0.3)
    floor.made_once()
    assert floor.fabric.migrated > REQUESTS / 4
    floor.wait_until_ready(*floor.made)
    assert all(answer.ok for answer in floor.many(20))
