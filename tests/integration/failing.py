"""What the tests of failing engines share: an order in which nodes are tried, and what the engines saw of it.

The names of fields and keys are written out: they are what an operator sees with redis-cli.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from tests.integration.stage import Lane, Stage
from tests.support import load
from tests.support.engine import SimulatedEngine
from tests.support.redis import Space
from tests.support.wait import eventually
from workers.engine.http import Record

ONLY_CHATS = "messages"  # `only_for`: a fault that leaves /health alone
HOLD = "held"
LOOK_S = 1.5  # within this an open breaker whose time is over is half-open

# Each ends a try before a byte of the answer came. What the engine has seen of it: nothing, or one request.
UNSEEN: dict[str, dict[str, Any]] = {
    "refused": {"refuse": True},
    "reset on accept": {"reset_on_accept": True},
}
SEEN: dict[str, dict[str, Any]] = {
    "reset before the head": {"cut_after": -1},
    "closed before the head": {"eof_after": -1},
    "502": {"status": 502},
    "503": {"status": 503},
    "504": {"status": 504},
    "500": {"status": 500},
    "silence": {"blackhole": True, "only_for": ONLY_CHATS},
}

# N: failures that open a breaker, the default. The first byte of a good answer may take 1 s in a test: a loaded machine
# has another second.
N, OPEN_S, FIRST_BYTE_S = 5, 1.0, 2.0
BREAKER_FLEET = {
    "masters": 2,
    "workers": 2,
    "settings": {
        "breaker_open_s": OPEN_S,
        "first_byte_timeout_s": FIRST_BYTE_S,
        "connect_timeout_s": 0.5,
        "probe_interval_s": 60,
        "probe_timeout_s": 600,
    },
}


@contextlib.contextmanager
def ranked(stage: Stage, *faults: dict[str, Any], **knobs: Any) -> Iterator[list[SimulatedEngine]]:
    """Engines of the stage's model with these faults, in the order in which min_expected_latency takes them.

    The i-th is busy with i streams, each of a model that nobody else has.
    """
    with contextlib.ExitStack() as stack:
        engines = []
        for i, fault in enumerate(faults):
            own = f"{stage.model}-{i}"
            engine = stage.engine(models=(stage.model, own), stall_after=1, **knobs)
            for _ in range(i):
                lane = stack.enter_context(contextlib.closing(Lane(stage.deployment.port)))
                assert lane.stream(own, user=HOLD).status == 200
            engines.append(engine)
            engine.set(stall_after=None, **fault)
        eventually(lambda: stage.counts(*engines) == tuple(range(len(engines))))
        yield engines


def asked(engine: SimulatedEngine) -> list[Record]:
    """What it was asked, without the streams that keep it busy."""
    return [record for record in engine.requests if HOLD.encode() not in record.body]


def tries(*engines: SimulatedEngine) -> list[int]:
    return [len(asked(engine)) for engine in engines]


def sent(record: Record) -> tuple[str, str, list[tuple[bytes, bytes]], bytes]:
    """All that a node was sent, but for its own name."""
    return record.method, record.path, [h for h in record.headers if h[0].lower() != b"host"], record.body


def never_twice(*engines: SimulatedEngine) -> None:
    """No engine saw one request id twice."""
    for engine in engines:
        ids = [record.id for record in asked(engine)]
        assert len(set(ids)) == len(ids), sorted(ids)
        assert all(ids), "each request has an id"


def fresh_budget(space: Space) -> None:
    """What tests before have taken of the deployment's retries is forgotten: each would else wait 10 s."""
    space.client.delete(space.key("retries"))


# --- the breaker


def field(stage: Stage, engine: SimulatedEngine, name: str) -> str | None:
    found: str | None = stage.space.cli("HGET", stage.space.key(f"node:{engine.url}"), name)
    return found


def breaker(stage: Stage, engine: SimulatedEngine) -> str:
    return field(stage, engine, "breaker") or "closed"


def failures(stage: Stage, engine: SimulatedEngine) -> int:
    """Failures in a row, as all workers have counted them together."""
    return int(stage.space.cli("HGET", stage.space.key("failures"), engine.url) or 0)


def open_for_s(stage: Stage, engine: SimulatedEngine) -> float:
    """For how long from now on, by Redis's clock."""
    seconds, microseconds = stage.space.client.time()
    return int(field(stage, engine, "breaker_until_ms") or 0) / 1000 - seconds - microseconds / 1e6


def becomes(stage: Stage, engine: SimulatedEngine, word: str, *, within_s: float = 2.0) -> None:
    def check() -> bool:
        assert (found := breaker(stage, engine)) == word, f"{found}, not {word}; {failures(stage, engine)} failures"
        return True

    eventually(check, within_s=within_s)


def stays(stage: Stage, engine: SimulatedEngine, word: str, count: int) -> None:
    """`count` failures are counted, no more, and the breaker is `word`: what is told in the background has come."""
    eventually(lambda: failures(stage, engine) == count)
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < 0.15:
        assert (breaker(stage, engine), failures(stage, engine)) == (word, count)
        time.sleep(0.01)


def trip(stage: Stage, engine: SimulatedEngine, *, times: int = 5) -> None:
    """Open its breaker by requests that it resets; it must be the only node of the stage's model."""
    engine.set(cut_after=-1)
    answers = stage.many(times, concurrency=1).result(20)
    assert {answer.status for answer in answers} == {502}
    becomes(stage, engine, "open")
    engine.set(cut_after=None)
    engine.forget()


def unprobed(stage: Stage, **knobs: Any) -> SimulatedEngine:
    """A node that is ready and then lets each probe wait for ever (with a --probe-timeout-s to match)."""
    engine = stage.engine()
    engine.set(health_delay_s=600, **knobs)
    return engine


def half_open(stage: Stage, engine: SimulatedEngine) -> None:
    becomes(stage, engine, "half_open", within_s=max(open_for_s(stage, engine), 0) + LOOK_S)


def made_its_trial(stage: Stage, engine: SimulatedEngine, at_once: int = 1, **options: Any) -> list[load.Answer]:
    """The answers to requests, so many at once, until one was let through to the node.

    A worker may know a moment later than Redis that the breaker is half-open.
    """
    before = len(engine.requests)
    answers: list[load.Answer] = []
    deadline_s = time.monotonic() + 3
    while len(engine.requests) == before:
        assert time.monotonic() < deadline_s, "no request was let through"
        answers += stage.many(at_once, **options).result(10)
    return answers
