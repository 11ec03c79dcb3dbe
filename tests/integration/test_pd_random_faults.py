"""300 requests over 2 masters x 2 workers for each protocol while engines fail at every stage, at random, by seed.

Nothing may be held in the end, no count off, and no engine asked for what is not in its protocol.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.stage import Fleet
from tests.support import load
from tests.support.loop import LoopThread
from tests.support.pd_vllm import PdFloor, PdVllmEngine, pd_floor
from tests.support.redis import PrivateRedis
from workers.engine.pd_rules import Protocol

pytestmark = pytest.mark.long

REQUESTS, AT_ONCE, SEED = 300, 12, 20261130
EVERY_S = 0.04
LEASE_S = 2.0
PROTOCOLS: tuple[Protocol, ...] = ("nixl", "mooncake", "sglang")
SETTINGS: dict[str, Any] = {
    "serving_strategy": "DistServe",
    "probe_interval_s": 0.5,
    "lease_s": 2,
    "prefill_timeout_s": 1,
    "first_byte_timeout_s": 1,
    "handover_lease_s": LEASE_S / 2,
}
WELL: dict[str, Any] = {
    "status": 200,
    "cut_after": None,
    "eof_after": None,
    "stall_after": None,
    "refuse": False,
    "finish": "",
    "with_params": True,
}
FAULTS: list[dict[str, Any]] = [
    {"status": 400},
    {"status": 500},
    {"status": 503},
    {"cut_after": -1},
    {"cut_after": 1},
    {"eof_after": -1},
    {"stall_after": -1},
    {"refuse": True},
]
OF_PREFILL: list[dict[str, Any]] = [{"finish": "abort"}, {"with_params": False}]
TOLD = {200, 400, 500, 502, 503, 504}


class Chaos:
    """One engine at a time is broken, for a moment; now and then one is killed and comes back."""

    def __init__(self, engines: list[PdVllmEngine], seed: int) -> None:
        self.done: list[str] = []
        self._engines = engines
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Chaos:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(20)
        for engine in self._engines:
            engine.set(**WELL)
            engine.start()

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            engine = self._random.choice(self._engines)
            fault = self._random.choice([*FAULTS, *(OF_PREFILL if engine.leg == "prefill" else []), None])
            self.done.append(f"{engine.leg} {fault}")
            if fault is None:
                engine.restart()
                continue
            engine.set(**fault)
            self._over.wait(EVERY_S)
            engine.set(**WELL)


@pytest.fixture(params=PROTOCOLS)
def floor(request: pytest.FixtureRequest, redis_server: PrivateRedis, engine_loop: LoopThread) -> Iterator[PdFloor]:
    fleet = Fleet(redis_server, masters=2, workers=2, settings=SETTINGS | {"pd_protocol": request.param})
    try:
        with pd_floor(*fleet.get(), engine_loop, request.param) as one:
            yield one
    finally:
        fleet.close()


@pytest.mark.timeout(120)
def test_random_faults_at_every_stage_leave_nothing_behind(floor: PdFloor) -> None:
    prefills = floor.engines("prefill", 3, lease_s=LEASE_S, ttft_s=0.05)
    decodes = floor.engines("decode", 3, chunks=4, gap_s=0.03, prompt_tokens=13)
    draw = random.Random(SEED)
    options = [
        {
            "prompt": f"prompt {i}",
            "stream": draw.random() < 0.5,
            "leave_after_s": draw.uniform(0.0, 0.2) if draw.random() < 0.25 else None,
            "within_s": 20,
        }
        for i in range(REQUESTS)
    ]
    with Chaos([*prefills, *decodes], SEED) as chaos:
        answers = asyncio.run(floor.many(REQUESTS, concurrency=AT_ONCE, each=lambda i: options[i]))
    print(f"{len(chaos.done)} faults, {sum(whole(a) for a in answers if not a.left)} of {REQUESTS} answers whole")
    assert len(chaos.done) >= 20, "too few faults to show anything"
    stayed = [answer for answer in answers if not answer.left]
    assert {answer.status for answer in stayed} <= TOLD, [a.error for a in stayed if a.status not in TOLD]
    silent = [answer.body for answer in stayed if answer.status == 200 and not whole(answer) and not told(answer)]
    assert silent == [], "an answer is whole, or says that it is not"
    assert sum(map(whole, stayed)) > len(stayed) / 4, "too few went well to show anything"
    floor.quiet(within_s=LEASE_S + 2)
    again = asyncio.run(floor.many(12, concurrency=4))
    assert sum(answer.ok for answer in again) >= 6, "it works again"


def whole(answer: load.Answer) -> bool:
    if not answer.ok or answer.text != "token0 token1 token2 token3 ":
        return False
    return answer.done or not of_stream(answer)


def told(answer: load.Answer) -> bool:
    """It broke off in a way that a client can't take for the end: an event, or fewer bytes than were announced."""
    if of_stream(answer):
        return any('"error"' in event for event in answer.events())
    return answer.error is not None


def of_stream(answer: load.Answer) -> bool:
    return answer.headers.get("content-type", "").startswith("text/event-stream")
