"""What one worker must carry alone: many requests, slow clients, and engines that close idle connections."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import secrets
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.serving import (
    Deployments,
    SharedDeployment,
    chat_body,
    connected,
    post_json,
    raw_post,
    read_reply,
)
from tests.support import load
from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine
from tests.support.wait import aeventually, eventually

FEW_FILES = 1000

DEPLOYMENT = SharedDeployment(workers=1, open_files=FEW_FILES)

MB = 1_000_000
# What may be on its way to a client that does not read: ours (256 KiB towards each side), and what the kernel
# takes on two connections (tcp_wmem and tcp_rmem end at 4 and 6 MB each).
ON_ITS_WAY_BYTES = 24 * MB
GROWTH_BYTES = 16 * MB


# --- many at once


def test_r51_500_requests_run_at_once_through_one_worker(deployment: Deployment, engine: SimulatedEngine) -> None:
    async def all_at_once(ttft_s: float) -> bool:
        await asyncio.to_thread(engine.set, ttft_s=ttft_s, chunks=1)
        running = asyncio.create_task(load.many(deployment.url, 500, each=lambda i: {"stream": bool(i % 2)}))
        try:
            await aeventually(lambda: engine.in_flight == 500, within_s=ttft_s)
            assert deployment.unfinished() == {engine.url: 500}
            return True
        except AssertionError:
            return False
        finally:
            assert all(answer.ok for answer in await running)

    # A busy machine may need longer to send 500 requests than the first of them takes; where fewer than 500 can run
    # at once, the longest is no help either.
    assert any(asyncio.run(all_at_once(ttft_s)) for ttft_s in (2.5, 5.0, 15.0))


def test_r51_few_open_files_are_warned_of_at_the_start(
    deployment: Deployment, deployments_of_session: Deployments
) -> None:
    assert re.search(rf"(?i)warn.*open files.*{FEW_FILES}", deployment.log())
    assert "open files" not in deployments_of_session.get(2).log(), "that one was started with many"


# --- slow clients


def _resident_bytes(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) * 1024


def _stopped_at(engine: SimulatedEngine, requests: int = 1) -> list[int]:
    """How much the engine had sent of each when it got no further with any for 0.3 s."""
    last: list[int] = []
    since_s = time.monotonic()

    def still() -> bool:
        nonlocal last, since_s
        sent = [record.sent_bytes for record in engine.requests]
        if sent != last or len(sent) < requests or not all(sent):
            last, since_s = sent, time.monotonic()
        return time.monotonic() - since_s > 0.3

    eventually(still, within_s=10)
    return last


@pytest.mark.parametrize("stream", [False, True])
def test_a_slow_client_slows_its_engine_and_memory_stays_bounded(
    deployment: Deployment, engine: SimulatedEngine, stream: bool
) -> None:
    (pid,) = deployment.worker_pids()
    body = chat_body(stream=stream)
    if stream:
        engine.set(text="x" * 100_000, chunks=800)
    else:
        engine.set(body_mb=80)
    before = _resident_bytes(pid)
    with connected(deployment.url, timeout_s=20, receive_bytes=64 * 1024) as s:
        s.sendall(raw_post(["Host: h", "X-Request-Id: same", f"Content-Length: {len(body)}"], body))
        (sent,) = _stopped_at(engine)
        assert sent < ON_ITS_WAY_BYTES, f"{sent / MB:.0f} MB taken from the engine for a client that reads nothing"
        grown = _resident_bytes(pid) - before
        assert grown < GROWTH_BYTES, f"the worker grew by {grown / MB:.0f} MB"
        reply = read_reply(s)
    straight = post_json(engine.url, "/v1/chat/completions", body, {"x-request-id": "same"})
    assert reply.complete
    assert reply.body == straight.body


def test_slow_clients_slow_no_other_stream(deployment: Deployment, engine: SimulatedEngine) -> None:
    body = chat_body(stream=True, prompt="slow")
    with contextlib.ExitStack() as stack:
        engine.set(text="x" * 100_000, chunks=600)
        for _ in range(5):
            s = stack.enter_context(connected(deployment.url, receive_bytes=64 * 1024))
            s.sendall(raw_post(["Host: h", f"Content-Length: {len(body)}"], body))
        _stopped_at(engine, requests=5)
        assert engine.in_flight == 5
        engine.set(text="token", chunks=10, gap_s=0.05)
        for _ in range(3):  # a busy machine may be late by itself
            answer = asyncio.run(load.chat(deployment.url, stream=True))
            assert answer.done
            written = engine.requests[-1].chunk_s
            late_s = max(b - a for a, (b, _) in zip(written, answer.chunks(), strict=True))
            if late_s < 0.05:
                break
        else:
            pytest.fail(f"a chunk was {late_s:.3f} s late beside slow clients")
    eventually(lambda: not engine.in_flight, within_s=2)


# --- connections that the engine closes


async def _paced(url: str, clients: int, each: int, pause_s: list[float]) -> list[load.Answer]:
    """Several clients, each with requests that are so far apart, in turn; ids that no two requests share."""
    async with load.session() as session:

        async def one(client: int) -> list[load.Answer]:
            answers = []
            for _, wait_s in zip(range(each), itertools.cycle(pause_s), strict=False):
                sent = {"x-request-id": f"{client}-{secrets.token_hex(4)}"}
                answers.append(await load.chat(url, client=session, headers=sent))
                await asyncio.sleep(wait_s + client * 0.0007)
            return answers

        return [answer for some in await asyncio.gather(*map(one, range(clients))) for answer in some]


def _once_each(engine: SimulatedEngine, answers: list[load.Answer]) -> None:
    assert [(a.status, a.error, a.body) for a in answers if not a.ok] == []
    executed = Counter(record.id for record in engine.requests)
    assert executed == dict.fromkeys((answer.headers["x-request-id"] for answer in answers), 1)


def test_r52_an_engine_that_closes_idle_connections_costs_no_request(
    deployment: Deployment, engine: SimulatedEngine
) -> None:
    engine.set(idle_close_s=0.1, chunks=1)
    answers = asyncio.run(_paced(deployment.url, clients=30, each=12, pause_s=[0.09, 0.095, 0.099, 0.1, 0.101, 0.105]))
    _once_each(engine, answers)
    assert max(record.nth for record in engine.requests) > 1, "no connection was kept at all"


@pytest.mark.parametrize("how", [True, "rst"], ids=["closed", "reset"])
def test_r52_a_connection_that_is_closed_as_the_request_comes_costs_no_request(
    deployment: Deployment, engine: SimulatedEngine, how: bool | str
) -> None:
    engine.set(ttft_s=0.1, chunks=1)

    async def burst() -> list[load.Answer]:
        each = [{"headers": {"x-request-id": secrets.token_hex(8)}} for _ in range(20)]
        return await load.many(deployment.url, 20, each=lambda i: each[i])

    asyncio.run(burst())  # 20 connections are in the pool now
    engine.set(close_on_request=how)
    engine.forget()
    answers = asyncio.run(burst())
    assert engine.stats.dropped > 0
    _once_each(engine, answers)


def test_r52_a_request_that_an_answer_had_begun_for_is_not_sent_again(
    deployment: Deployment, engine: SimulatedEngine
) -> None:
    assert post_json(deployment.url, "/v1/chat/completions", chat_body()).status == 200
    engine.set(cut_after=0)
    post_json(deployment.url, "/v1/chat/completions", chat_body(stream=True))
    assert len(engine.requests) == 2


def test_r52_a_fresh_connection_that_breaks_is_not_tried_again(deployment: Deployment, engine: SimulatedEngine) -> None:
    engine.crash()
    engine.set(cut_after=-1)
    engine.start()
    eventually(lambda: post_json(deployment.url, "/v1/chat/completions", chat_body()).status == 502, within_s=15)
    assert len(engine.requests) == 1
