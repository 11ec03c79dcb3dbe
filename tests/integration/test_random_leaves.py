"""5,000 clients that leave at random moments, by seed, in every mode over 2 masters x 2 workers: nothing stays behind.

A client leaves in the middle of its request, before, at or after the first byte of its answer, by closing or by a
reset. What each mode's engines hold and what they may be asked is checked by the strict ones of `tests.support`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.integration.stage import Fleet
from tests.support import epd_floor, load, pd
from tests.support.engine import SimulatedEngine
from tests.support.epd_floor import pictures
from tests.support.loop import LoopThread
from tests.support.pd_vllm import pd_floor
from tests.support.redis import PrivateRedis
from workers.engine.pd_rules import Protocol

pytestmark = pytest.mark.long

SEED = 20261130
LEAVES = 5000
AT_ONCE = 50
TTFT_S, CHUNKS, GAP_S = 0.05, 6, 0.02
# What prefill keeps of those who left in between ends with it; long enough that no other ends on a busy machine.
LEASE_S = 8.0
HYBRID = {"probe_interval_s": 1, "lease_s": 2}
DISTSERVE = HYBRID | {"serving_strategy": "DistServe", "prefill_timeout_s": 5}


@dataclass
class Mode:
    """Where clients of one mode go, whom they reach, and how to see that nothing of them is left."""

    ports: list[int]
    model: str
    entry: list[SimulatedEngine]  # the engines that see a request first
    last: list[SimulatedEngine]  # those that write the answer
    settle: Callable[[], object]
    stream: bool | None = None  # None: streams and others by turns
    messages: Callable[[], list[dict[str, Any]]] = lambda: [{"role": "user", "content": "hello"}]

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]


Place = Callable[[PrivateRedis, LoopThread], AbstractContextManager[list[Mode]]]


@contextlib.contextmanager
def hybrid(server: PrivateRedis, loop: LoopThread) -> Iterator[list[Mode]]:
    """Engines that prefill and decode, with streams and without; and encoders, which only media go to."""
    fleet = Fleet(server, masters=2, workers=2, settings=HYBRID)
    try:
        with epd_floor.floor_on(*fleet.get(), loop) as floor:
            last = floor.engines("both", 2, ttft_s=TTFT_S, gap_s=GAP_S, chunks=CHUNKS)
            encoders = floor.encoders(3, ttft_s=0.02)
            ports = [master.port for master in floor.masters]
            yield [
                Mode(ports, floor.model, list(last), list(last), floor.quiet, stream=True),
                Mode(ports, floor.model, list(last), list(last), floor.quiet, stream=False),
                Mode(ports, floor.model, list(encoders), list(last), floor.quiet, messages=lambda: pictures(2)),
            ]
    finally:
        fleet.close()


@contextlib.contextmanager
def lmdeploy(server: PrivateRedis, loop: LoopThread) -> Iterator[list[Mode]]:
    fleet = Fleet(server, masters=2, workers=2, settings=DISTSERVE)
    try:
        with pd.floor_on(*fleet.get(), loop) as floor:
            entry = [floor.prefill(ttft_s=TTFT_S) for _ in range(2)]
            last = [floor.decode(gap_s=GAP_S, chunks=CHUNKS) for _ in range(2)]
            ports = [master.port for master in floor.masters]
            yield [Mode(ports, floor.model, list(entry), list(last), floor.settle)]
    finally:
        fleet.close()


def handed_over(protocol: Protocol) -> Place:
    @contextlib.contextmanager
    def place(server: PrivateRedis, loop: LoopThread) -> Iterator[list[Mode]]:
        settings = DISTSERVE | {"pd_protocol": protocol, "handover_lease_s": LEASE_S / 2}
        fleet = Fleet(server, masters=2, workers=2, settings=settings)
        try:
            with pd_floor(*fleet.get(), loop, protocol) as floor:
                entry = floor.engines("prefill", 2, lease_s=LEASE_S, ttft_s=TTFT_S)
                last = floor.engines("decode", 2, gap_s=GAP_S, chunks=CHUNKS, prompt_tokens=13)
                ports = [master.port for master in floor.masters]
                yield [Mode(ports, floor.model, list(entry), list(last), lambda: floor.quiet(LEASE_S + 3))]
        finally:
            fleet.close()

    return place


PLACES: dict[str, Place] = {
    "hybrid and encoders": hybrid,
    "lmdeploy": lmdeploy,
    "nixl": handed_over("nixl"),
    "mooncake": handed_over("mooncake"),
    "sglang": handed_over("sglang"),
}
EACH = -(-LEAVES // 7)  # modes


@dataclass(frozen=True)
class Leave:
    """What one client does: sends so much of its request, waits, and goes in one of two ways."""

    sent_ratio: float
    after_s: float
    reset: bool

    @classmethod
    def drawn(cls, chance: random.Random, latest_s: float) -> Leave:
        whole = chance.random() < 0.9
        return cls(1.0 if whole else chance.random(), chance.uniform(0, latest_s), chance.random() < 0.5)


async def leave(port: int, request: bytes, how: Leave) -> bytes:
    """What had come until then."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    came = b""
    try:
        writer.write(request[: round(len(request) * how.sent_ratio)])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(how.after_s):
                while data := await reader.read(65536):
                    came += data
    finally:
        if how.reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            writer.transport.abort()
        writer.close()
    return came


async def leave_all(mode: Mode, chance: random.Random, latest_s: float) -> list[bytes]:
    numbers = iter(range(EACH))
    came: list[bytes] = []

    async def clients() -> None:
        for i in numbers:
            stream = i % 2 == 0 if mode.stream is None else mode.stream
            body = json.dumps({"model": mode.model, "messages": mode.messages(), "stream": stream}).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
            request = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
            came.append(await leave(mode.ports[i % len(mode.ports)], request, Leave.drawn(chance, latest_s)))

    await asyncio.gather(*(clients() for _ in range(AT_ONCE)))
    return came


def whole_answers(mode: Mode, count: int) -> float:
    """How long one takes among so many, seconds."""
    options: dict[str, Any] = {"model": mode.model, "messages": mode.messages(), "stream": bool(mode.stream)}
    answers = asyncio.run(load.many(mode.urls, count, **options))
    assert all(answer.ok for answer in answers), [answer.body for answer in answers if not answer.ok]
    return statistics.median(answer.finished_s - answer.started_s for answer in answers if answer.finished_s)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", PLACES)
def test_clients_that_leave_at_random_moments_leave_nothing_behind(
    name: str, redis_server: PrivateRedis, engine_loop: LoopThread
) -> None:
    redis_server.ensure_running()
    chance = random.Random(f"{SEED} {name}")
    with PLACES[name](redis_server, engine_loop) as modes:
        for mode in modes:
            # Over the whole time that an answer takes, whatever else this machine does.
            latest_s = 1.3 * whole_answers(mode, AT_ONCE)
            for engine in (*mode.entry, *mode.last):
                engine.forget()
            came = asyncio.run(leave_all(mode, chance, latest_s))
            mode.settle()
            reached = sum(len(engine.requests) for engine in mode.entry)
            answered = sum(len(engine.requests) for engine in mode.last)
            cut = sum(len(engine.aborts) for engine in mode.last)
            print(f"{name}: {len(came)} left, {reached} reached an engine, {answered} the last one, {cut} in there")
            # Else nobody left at a moment that shows anything.
            assert len(came) == EACH
            assert reached > EACH / 4 and answered > EACH / 8 and cut > EACH / 20
            whole_answers(mode, 8)
