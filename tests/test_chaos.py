"""The soak itself: a few seconds of it on real parts, its plan, and how it tells what a client saw."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest
from multidict import CIMultiDict

from bench.chaos import LANES, QUICK, causes_of, plan
from bench.soak.faults import KINDS, Window, Windows
from bench.soak.load import OK, Result, what_came
from tests.support.load import Answer

pytestmark = pytest.mark.long

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(180)
def test_a_few_seconds_of_faults_leave_nothing_over() -> None:
    words = [sys.executable, "-m", "bench.chaos", "--quick", "--seed", "3"]
    ran = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "left over: nothing" in ran.stdout


def test_a_seed_gives_the_same_plan_and_another_seed_another() -> None:
    kinds = [kind for kind in KINDS.values() if kind.lane == "engine"]
    first = plan(1, "engine", kinds, 5, 300)
    assert first == plan(1, "engine", kinds, 5, 300)
    assert first != plan(2, "engine", kinds, 5, 300)
    assert {one.kind.name for one in first[: len(kinds)]} == {kind.name for kind in kinds}
    assert all(a.at_s + a.hold_s < b.at_s for a, b in pairwise(first))


def test_every_kind_has_a_lane() -> None:
    assert {kind.lane for kind in KINDS.values()} == set(LANES)
    assert set(QUICK) <= set(KINDS)


def answer(body: bytes, status: int = 200, error: Exception | None = None) -> Answer:
    made = Answer(status=status, reads=[(0.0, body)], error=error)
    if body.startswith(b"data:"):
        made.headers = type(made.headers)(CIMultiDict({"content-type": "text/event-stream"}))
    return made


def event(i: int) -> bytes:
    return b'data: {"choices": [{"delta": {"content": "token%d "}}]}\n\n' % i


WHOLE = event(0) + event(1) + b"data: [DONE]\n\n"
TOLD = b'data: {"error": {"code": "engine_broke_off"}}\n\n'


@pytest.mark.parametrize(
    ("came", "saw"),
    [
        (answer(WHOLE), OK),
        (answer(event(0) + b"data: [DONE]\n\n"), "WRONG TEXT"),
        (answer(event(0) + event(0) + event(1) + b"data: [DONE]\n\n"), "WRONG TEXT"),
        (answer(event(0) + TOLD), "stream ended by an error event, engine_broke_off"),
        (answer(event(0)), "stream cut, no error event"),
        (answer(event(0) + event(1)[:20], error=aiohttp.ClientPayloadError()), "stream cut, no error event"),
        (answer(b"", error=TimeoutError()), "nothing more within 30 s"),
        (answer(b"", status=0, error=aiohttp.ServerDisconnectedError()), "connection lost, no answer"),
        (answer(b'{"error": {"code": "no_node_available"}}', status=503), "503 no_node_available"),
    ],
)
def test_what_a_client_saw_of_a_stream(came: Answer, saw: str) -> None:
    assert what_came(came, stream=True, count=2) == saw


def test_a_fault_explains_only_what_it_may_cost_and_only_while_it_is_on() -> None:
    windows = Windows()
    at_s = time.monotonic()
    windows.all.append(Window(KINDS["worker kill -9"], "1", at_s, at_s + 1))
    windows.all.append(Window(KINDS["FLUSHALL"], "", at_s, at_s + 1))

    def seen(saw: str, after_s: float) -> list[str]:
        return causes_of(Result(at_s + after_s, None, at_s + after_s + 0.5, saw, True, False), windows)

    assert seen("stream cut, no error event", 0.2) == ["worker kill -9"]
    assert seen("stream cut, no error event", 10) == []
    assert seen("502 engine_broke_off", 0.2) == []
    assert seen("503 no_node_available", 0.2) == []  # no fault costs that, nor do two at once
