"""Pooled connections that the engine closes meanwhile: no client sees it, and no engine runs a request twice.

R52's 4.9-5.1 s with uvicorn's 5 s, at a twentieth: the engine closes after 0.25 s, requests come after 0.245-0.255 s.
The distributor's own limit is seconds, so here it reuses each connection at the very moment it is closed.
"""

from __future__ import annotations

import asyncio
import random
import time

import aiohttp
import pytest

from tests.integration.failing import breaker, failures, ranked, tries
from tests.integration.serving import openai_error
from tests.integration.stage import Stage, start
from tests.support import load
from tests.support.engine import SimulatedEngine
from tests.support.wait import eventually

FLEET = {"workers": 1, "settings": {"probe_interval_s": 60, "first_byte_timeout_s": 2}}
IDLE_S, SPREAD_S = 0.25, 0.005
OVERHEAD_S = 0.004  # between an answer and the next request, at the engine
ENGINES, ROUNDS = 50, 40

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]


def ids(engine: SimulatedEngine) -> list[str]:
    return [record.id for record in engine.requests]


async def one_by_one(stage: Stage, i: int, client: aiohttp.ClientSession) -> list[load.Answer]:
    """A node that only this asks: its one connection idles for exactly as long as is waited here."""
    chance = random.Random(i)
    answers = []
    for n in range(ROUNDS):
        answers.append(
            await load.chat(stage.deployment.url, model=f"{stage.model}-{i}", stream=n % 2 == 0, client=client)
        )
        await asyncio.sleep(chance.uniform(IDLE_S - SPREAD_S, IDLE_S + SPREAD_S) - OVERHEAD_S)
    return answers


async def all_beside(stage: Stage) -> list[load.Answer]:
    async with load.session(keep_alive=True) as client:
        answers = await asyncio.gather(*(one_by_one(stage, i, client) for i in range(ENGINES)))
    return [answer for some in answers for answer in some]


def test_r52_two_thousand_requests_about_when_connections_are_closed(stage: Stage) -> None:
    engines = [
        stage.engine(models=(f"{stage.model}-{i}",), idle_close_s=IDLE_S, chunks=2, ready=False) for i in range(ENGINES)
    ]
    stage.deployment.wait_for_state("ready", *engines)
    answers = start(all_beside(stage)).result(60)
    assert len(answers) == 2000
    assert [(a.status, a.error, a.body) for a in answers if not a.ok] == []
    for engine in engines:
        assert len(ids(engine)) == len(set(ids(engine))) == ROUNDS
        assert (breaker(stage, engine), failures(stage, engine)) == ("closed", 0)
    reused = sum(record.nth > 1 for engine in engines for record in engine.requests)
    assert 20 < reused < 1950, "both must have happened: a connection that was closed already, and one in time"
    assert not stage.space.client.hgetall(stage.space.key("retries")), "it costs the engine nothing, so it is free"


@pytest.mark.parametrize("how", [True, "rst"])
@pytest.mark.parametrize("stream", [False, True])
def test_r52_an_engine_that_closes_just_as_the_request_arrives(stage: Stage, how: object, stream: bool) -> None:
    engine = stage.engine(close_on_request=how)
    answers = stage.many(200, concurrency=4, stream=stream).result(20)
    assert [(a.status, a.error, a.body) for a in answers if not a.ok] == []
    assert len(ids(engine)) == len(set(ids(engine))) == 200
    assert engine.stats.dropped >= 90, "every second use of a connection"
    assert (breaker(stage, engine), failures(stage, engine)) == ("closed", 0)
    assert not stage.space.client.hgetall(stage.space.key("retries"))


def test_a_stale_connection_is_no_reason_to_go_to_another_node(stage: Stage) -> None:
    with ranked(stage, {}, {}) as (first, second):
        assert stage.many(1).result(5)[0].ok
        eventually(lambda: stage.counts(first, second) == (0, 1))
        first.set(close_on_request=True)
        assert stage.many(1).result(5)[0].ok
        assert first.stats.dropped == 1
        assert tries(first, second) == [2, 0]


def test_a_new_connection_that_breaks_is_not_tried_again_at_the_same_node(stage: Stage) -> None:
    engine = stage.engine(eof_after=-1)
    openai_error(stage.many(1).result(5)[0], 502, 10402)
    assert len(engine.requests) == 1


def test_there_is_one_silent_try_more_and_not_two(stage: Stage) -> None:
    engine = stage.engine()
    assert all(answer.ok for answer in stage.many(8).result(5))
    eventually(lambda: stage.counts() == (0,))
    engine.forget()
    engine.set(eof_after=-1)  # many pooled connections, and none of them, nor a new one, brings an answer
    openai_error(stage.many(1).result(5)[0], 502, 10402)
    assert len(engine.requests) == 2


def test_after_a_byte_of_the_answer_nothing_is_sent_again(stage: Stage) -> None:
    engine = stage.engine()
    assert stage.many(1).result(5)[0].ok
    eventually(lambda: stage.counts() == (0,))
    engine.forget()
    engine.set(frag_bytes=9, frag_gap_s=30)  # "HTTP/1.1 ", and then nothing
    waiting = stage.many(1)
    eventually(lambda: engine.requests and engine.requests[0].sent_bytes == 9)
    assert engine.requests[0].nth > 1, "on a connection that was used before"
    engine.crash()
    engine.start()
    openai_error(waiting.result(5)[0], 502, 10402)
    assert len(engine.requests) == 1


# --- what the engine says of itself


def idle_for(s: float) -> None:
    until_s = time.monotonic() + s
    eventually(lambda: time.monotonic() > until_s, within_s=s + 1, every_s=0.05)


def asked_after(stage: Stage, engine: SimulatedEngine, idle_s: float) -> bool:
    """Whether a request after so long comes on the same connection as the one before."""
    engine.forget()
    assert stage.many(1).result(5)[0].ok
    idle_for(idle_s)
    assert stage.many(1).result(5)[0].ok
    first, second = engine.requests
    return first.connection == second.connection


@pytest.mark.parametrize("value", ["timeout=2", "timeout=2, max=100", "max=100, Timeout = 2"])
def test_a_keep_alive_header_is_minded(stage: Stage, value: str) -> None:
    engine = stage.engine(headers=(("Keep-Alive", value),))
    assert asked_after(stage, engine, 0.2)
    assert not asked_after(stage, engine, 2.0), "the engine closes it at this moment"


def test_without_the_header_a_connection_is_kept_for_longer(stage: Stage) -> None:
    engine = stage.engine()
    assert asked_after(stage, engine, 2.0)


@pytest.mark.parametrize("value", ["timeout=abc", "", "timeout=-1", "timeout=99999999999999999999", "timeout=0"])
def test_a_keep_alive_header_that_says_nothing_useful_fails_no_request(stage: Stage, value: str) -> None:
    engine = stage.engine(headers=(("Keep-Alive", value),))
    assert all(answer.ok for answer in stage.many(20, concurrency=2).result(5))
    assert len(set(ids(engine))) == 20
