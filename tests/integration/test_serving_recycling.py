"""R54: workers come and go under load, and every stream ends properly, or with an error event at the deadline."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable

from tests.integration.serving import Factory, events
from tests.support import load
from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine
from tests.support.wait import aeventually, eventually

Deploy = Callable[..., Deployment]


def _all_done(answers: list[load.Answer], chunks: int) -> None:
    assert [(a.status, a.error, a.body[-200:]) for a in answers if not (a.ok and a.done)] == []
    assert {len(answer.chunks()) for answer in answers} == {chunks}


def _no_worker_was_aborted(deployment: Deployment) -> None:
    log = deployment.log()
    assert "WORKER TIMEOUT" not in log
    assert "SIGKILL" not in log
    assert "Traceback" not in log, log[-4000:]
    assert "ERROR" not in log, log[-4000:]


async def _signalled(deployment: Deployment, engine: SimulatedEngine, number: int) -> list[load.Answer]:
    """40 streams, of which half run when the signal comes; for SIGTERM just these."""
    count = 20 if number == signal.SIGTERM else 40
    running = asyncio.create_task(load.many(deployment.url, count, concurrency=20, stream=True))
    await aeventually(lambda: engine.in_flight == 20)
    if number == signal.SIGTERM:
        assert await asyncio.to_thread(deployment.stop, number, within_s=8) == 0
    else:
        assert deployment.process is not None
        deployment.process.send(number)
    return await running


def test_r54_recycling_reload_and_sigterm_under_load_cost_no_stream(
    deployment_factory: Deploy, engine_factory: Factory
) -> None:
    deployment = deployment_factory(2, settings={"max_requests": 12, "grace_s": 10})
    engine = engine_factory(chunks=10, gap_s=0.08)
    deployment.add(engine)

    before = deployment.worker_pids()
    _all_done(asyncio.run(load.many(deployment.url, 75, concurrency=25, stream=True)), 10)
    deployment.wait_for_workers(2, without=before)
    _no_worker_was_aborted(deployment)

    before = deployment.worker_pids()
    _all_done(asyncio.run(_signalled(deployment, engine, signal.SIGHUP)), 10)
    deployment.wait_for_workers(2, without=before)
    _no_worker_was_aborted(deployment)

    engine.set(chunks=15, gap_s=0.1)
    _all_done(asyncio.run(_signalled(deployment, engine, signal.SIGTERM)), 15)
    _no_worker_was_aborted(deployment)
    assert len(engine.requests) == 75 + 40 + 20


def test_r54_at_the_deadline_streams_end_with_an_error_event(
    deployment_factory: Deploy, engine_factory: Factory
) -> None:
    deployment = deployment_factory(1, settings={"grace_s": 2})
    endless, silent = engine_factory(chunks=1000, gap_s=0.05), engine_factory(models=("silent",), ttft_s=60.0)
    deployment.add(endless, silent)

    async def stop_under_load() -> tuple[list[load.Answer], float]:
        each = lambda i: {"model": "sim"} if i < 20 else {"model": "silent", "stream": bool(i % 2)}  # noqa: E731
        running = asyncio.create_task(load.many(deployment.url, 30, stream=True, each=each))
        await aeventually(lambda: (endless.in_flight, silent.in_flight) == (20, 10))
        begun_s = time.monotonic()
        assert await asyncio.to_thread(deployment.stop, signal.SIGTERM, within_s=10) == 0
        return await running, begun_s

    answers, begun_s = asyncio.run(stop_under_load())
    for answer in answers[:20]:
        *chunks, last = events(answer.body)
        assert answer.error is None
        assert "error" in json.loads(last)
        assert all("choices" in json.loads(chunk) for chunk in chunks)
    # Nothing had been sent of these: they can still be told the truth.
    assert {answer.status for answer in answers[20:]} == {503}
    assert all("error" in answer.json() for answer in answers[20:])
    eventually(lambda: not endless.in_flight and not silent.in_flight)
    _no_worker_was_aborted(deployment)
    ended_s = [(answer.finished_s or 0.0) - begun_s for answer in answers]
    assert min(ended_s) > 1.9, "`--grace-s`: seconds that running requests get to end"
    assert max(ended_s) < 5
