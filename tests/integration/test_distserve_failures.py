"""What fails on the way from prefill to decode: whatever it is, it is told at once, and nothing stays held.

Each test ends with: no session and no block held, no count left, the ledger of migrations empty.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from app.nodes import Role
from tests.integration.stage import MOSTLY_STREAM, Fleet, each_once_and_all_wide, start
from tests.support import load
from tests.support.loop import LoopThread
from tests.support.pd import Floor, floor_on, openai_error
from tests.support.redis import PrivateRedis
from tests.support.wait import eventually

PREFILL_TIMEOUT_S = 2.5
FIRST_BYTE_S = 1.0
DISTSERVE = {"serving_strategy": "DistServe", "probe_interval_s": 1, "connect_timeout_s": 1}


@pytest.fixture(scope="module")
def fleet(redis_server: PrivateRedis) -> Iterator[Fleet]:
    one = Fleet(redis_server, workers=2, settings=DISTSERVE)
    yield one
    one.close()


@pytest.fixture(scope="module")
def strict_fleet(redis_server: PrivateRedis) -> Iterator[Fleet]:
    """The other choice wherever there are two, and short stages."""
    choices = {"pd_missing_params": "fail", "prefill_fallback": True}
    stages = {"prefill_timeout_s": PREFILL_TIMEOUT_S, "first_byte_timeout_s": FIRST_BYTE_S}
    one = Fleet(redis_server, workers=2, settings=DISTSERVE | choices | stages)
    yield one
    one.close()


@pytest.fixture
def floor(fleet: Fleet, engine_loop: LoopThread) -> Iterator[Floor]:
    with floor_on(*fleet.get(), engine_loop) as one:
        yield one


@pytest.fixture
def strict(strict_fleet: Fleet, engine_loop: LoopThread) -> Iterator[Floor]:
    with floor_on(*strict_fleet.get(), engine_loop) as one:
        yield one


# --- prefill fails

FAILURES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "400": ({"status": 400}, (400,)),
    "500": ({"status": 500}, (500,)),
    "503": ({"status": 503}, (503,)),
    "reset before the head": ({"cut_after": -1}, (502,)),
    "reset in the body": ({"cut_after": 1}, (502,)),
    "closed before the head": ({"eof_after": -1}, (502,)),
    "abort": ({"finish_reason": "abort"}, (502,)),
}


@pytest.mark.parametrize(("kind", "stream"), each_once_and_all_wide(FAILURES))
def test_r60_prefill_that_fails_is_told_at_once_and_decode_gets_nothing(floor: Floor, kind: str, stream: bool) -> None:
    prefill, decode = floor.linked_pair()
    knobs, statuses = FAILURES[kind]
    prefill.set(**knobs)
    answer = floor.chat(stream=stream)
    error = openai_error(answer, statuses[0])
    if kind.isdigit():
        assert error["code"] == "scripted", "the engine's own words"
    ended_s = prefill.legs[-1].finished_s
    assert ended_s is not None and answer.finished_s is not None and answer.finished_s - ended_s < 1
    assert not decode.legs
    assert not floor.migrations()


@MOSTLY_STREAM
def test_r60_prefill_that_exceeds_its_timeout_is_told_at_once(strict: Floor, stream: bool) -> None:
    prefill, decode = strict.linked_pair(abort_frees=True)
    prefill.set(ttft_s=30)
    answer = strict.chat(stream=stream)
    openai_error(answer, 504)
    assert answer.finished_s is not None
    assert PREFILL_TIMEOUT_S - 0.1 < answer.finished_s - answer.started_s < PREFILL_TIMEOUT_S + 1
    assert not decode.legs


@MOSTLY_STREAM
def test_r60_prefill_that_refuses_is_replaced_by_another(floor: Floor, stream: bool) -> None:
    prefills, _ = floor.engines(Role.Prefill, 2), floor.decode()
    prefills[0].crash()
    answers = floor.many(12, concurrency=4, stream=stream)
    assert [(answer.status, answer.body) for answer in answers if not answer.ok] == []
    assert len(prefills[1].legs) == 12


def test_r60_prefill_that_refuses_alone_is_an_error_at_once(floor: Floor) -> None:
    prefill, decode = floor.linked_pair()
    prefill.set(refuse=True)
    begun_s = time.monotonic()
    answer = floor.chat()
    openai_error(answer, answer.status)
    assert answer.status in (502, 503)
    assert time.monotonic() - begun_s < 2
    assert not decode.legs


# --- decode fails


@pytest.mark.parametrize(("status", "stream"), each_once_and_all_wide([400, 422, 500, 503]))
def test_r62_decode_that_rejects_is_told_and_prefills_session_is_freed(floor: Floor, status: int, stream: bool) -> None:
    prefill, decode = floor.linked_pair()
    decode.set(status=status)
    answer = floor.chat(stream=stream)
    assert openai_error(answer, status)["code"] == "scripted"
    eventually(lambda: prefill.freed == [2] and not prefill.held, within_s=1)
    assert len(decode.legs) >= 1


@MOSTLY_STREAM
def test_r62_decode_that_breaks_before_its_first_token_has_its_session_freed(floor: Floor, stream: bool) -> None:
    prefill, decode = floor.linked_pair()
    decode.set(cut_after=-1)
    openai_error(floor.chat(stream=stream), 502)
    eventually(lambda: not prefill.held, within_s=1)
    assert prefill.freed and prefill.freed[0] == 2


def test_a_stream_that_breaks_after_its_first_token_has_nothing_to_free(floor: Floor) -> None:
    prefill, decode = floor.linked_pair(gap_s=0.05)
    decode.set(cut_after=2)
    answer = floor.chat(stream=True)
    assert answer.status == 200 and not answer.done
    assert any("error" in json.loads(event) for event in answer.events())
    eventually(lambda: not floor.migrations())
    assert (prefill.freed, floor.fabric.late_frees, len(prefill.legs)) == ([], [], 1)


@MOSTLY_STREAM
def test_r61_decode_that_refuses_after_prefill_is_replaced_with_the_same_hand_over(floor: Floor, stream: bool) -> None:
    prefill, decodes = floor.prefill(ttft_s=0.5), floor.engines(Role.Decode, 2)
    assert floor.deployment.post("/distserve/connection_warmup", {}).json()["SUCCESS"]
    assert len(prefill.links) == 2
    for engine in floor.made:
        engine.forget()
    running = start(load.chat(floor.urls[0], model=floor.model, stream=stream))
    eventually(lambda: prefill.in_flight == 1)
    held = [engine for engine in decodes if floor.counts(engine) == [1]]
    held[0].set(refuse=True)
    answer = running.result(10)
    assert answer.ok, answer.body
    other = next(engine for engine in decodes if engine is not held[0])
    assert (len(prefill.legs), len(held[0].legs), len(other.legs)) == (1, 0, 1)
    assert prefill.freed == []


@MOSTLY_STREAM
def test_r61_decode_that_refuses_alone_is_an_error_and_the_session_is_freed(floor: Floor, stream: bool) -> None:
    prefill, decode = floor.linked_pair()
    prefill.set(ttft_s=0.5)
    running = start(load.chat(floor.urls[0], model=floor.model, stream=stream))
    eventually(lambda: prefill.in_flight == 1)
    decode.set(refuse=True)
    answer = running.result(10)
    assert answer.status in (502, 503)
    openai_error(answer, answer.status)
    first = prefill.legs[0].finished_s
    assert first is not None and answer.finished_s is not None
    assert answer.finished_s - first < 2 + 2 * 0.5, "not longer than to connect, and prefill again at most once"
    eventually(lambda: not prefill.held and prefill.freed, within_s=1)


def test_r69_decode_is_called_at_once_after_a_long_prefill(strict: Floor) -> None:
    """Prefill may take longer than the other stages: its timeout is its own."""
    prefill, decode = strict.linked_pair()
    prefill.set(ttft_s=FIRST_BYTE_S + 0.7)
    assert strict.chat(stream=True).ok
    ended_s, begun_s = prefill.legs[-1].finished_s, decode.legs[-1].started_s
    assert ended_s is not None and begun_s - ended_s < 0.3


def test_r69_decode_has_a_timeout_of_its_own(strict: Floor) -> None:
    prefill, decode = strict.linked_pair()
    decode.set(ttft_s=30)
    openai_error(strict.chat(), 504)
    eventually(lambda: prefill.freed == [2] and not prefill.held, within_s=1)


# --- hand-over fields that are missing


@pytest.mark.parametrize(
    ("traits", "freed"),
    [({"ignores_cache": True}, []), ({"omit": ("cache_block_ids",)}, [2]), ({"omit": ("remote_token_ids",)}, [2])],
    ids=["all", "blocks", "token"],
)
def test_missing_hand_over_fields_are_computed_again_and_counted(
    floor: Floor, traits: dict[str, Any], freed: list[int]
) -> None:
    prefill, decode = floor.linked_pair(chunks=3)
    prefill.set(**traits)
    before = floor.handovers("missing_params")
    answer = floor.chat()
    assert answer.ok and answer.text == "token0 token1 token2 "
    assert "migration_request" not in decode.bodies[-1]
    assert floor.fabric.recomputed == 1
    eventually(lambda: prefill.freed == freed and not prefill.held, within_s=1)
    eventually(lambda: floor.handovers("missing_params") == before + 1)


def test_missing_hand_over_fields_are_an_error_where_asked_for(strict: Floor) -> None:
    prefill, decode = strict.linked_pair()
    prefill.set(omit=("cache_block_ids",))
    answer = strict.chat(stream=True)
    assert answer.status >= 500
    openai_error(answer, answer.status)
    assert not decode.legs
    eventually(lambda: prefill.freed == [2] and not prefill.held, within_s=1)
    eventually(lambda: strict.handovers("missing_params") >= 1)


# --- a role is missing


@MOSTLY_STREAM
def test_r68_no_prefill_is_a_503_that_names_the_role(floor: Floor, stream: bool) -> None:
    decode = floor.decode()
    answer = floor.chat(stream=stream)
    assert "Prefill" in openai_error(answer, 503)["message"]
    assert answer.headers.get("retry-after")
    assert not decode.legs


def test_r68_no_decode_is_a_503_before_prefill_is_called(floor: Floor) -> None:
    prefill = floor.prefill()
    assert "Decode" in openai_error(floor.chat(), 503)["message"]
    assert not prefill.legs
    assert floor.counts(prefill) == [0]


def test_an_unknown_model_is_a_404(floor: Floor) -> None:
    floor.pair()
    openai_error(floor.chat(model="nobody-serves-this"), 404)


@pytest.mark.parametrize("role", ["Decode", "Hybrid"])
def test_r68_prefill_fallback_serves_whole_and_is_counted(strict: Floor, role: str) -> None:
    engine = strict.hybrid(chunks=3) if role == "Hybrid" else strict.decode(chunks=3)
    before = strict.handovers("prefill_fallback")
    for stream in (False, True):
        assert strict.chat(stream=stream).text == "token0 token1 token2 "
    bodies = [json.loads(record.body) for record in engine.requests]
    assert len(bodies) == 2
    assert not any({"migration_request", "with_cache", "preserve_cache"} & set(body) for body in bodies)
    eventually(lambda: strict.handovers("prefill_fallback") == before + 2)
    eventually(lambda: strict.counts(engine) == [0])
