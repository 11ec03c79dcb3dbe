"""Clients that leave at each stage of DistServe, and sessions that can't be freed when they should be.

Each test ends with: no session and no block held, no count left, the ledger of migrations empty.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.stage import Fleet
from tests.support import load
from tests.support.loop import LoopThread
from tests.support.pd import Floor, floor_on
from tests.support.redis import PrivateRedis
from tests.support.wait import eventually

READ_ON_S = 5.0  # so long prefill's answer is read on after its client has left
STREAM = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def fleet(redis_server: PrivateRedis) -> Iterator[Fleet]:
    settings = {"serving_strategy": "DistServe", "probe_interval_s": 1, "gc_age_s": 2}
    one = Fleet(redis_server, workers=2, settings=settings)
    yield one
    one.close()


@pytest.fixture
def floor(fleet: Fleet, engine_loop: LoopThread) -> Iterator[Floor]:
    with floor_on(*fleet.get(), engine_loop) as one:
        yield one


# --- the client leaves


@STREAM
def test_r62_client_that_leaves_while_prefill_computes_has_its_answer_read_and_freed(
    floor: Floor, stream: bool
) -> None:
    prefill, decode = floor.linked_pair()
    prefill.set(ttft_s=1)
    client = floor.leaving(stream=stream)
    eventually(lambda: prefill.in_flight == 1)
    client.leave()
    eventually(lambda: prefill.freed == [2] and not prefill.held, within_s=3)
    assert not prefill.aborts, "read to its end"
    assert not decode.legs


def test_a_prefill_that_takes_too_long_for_nobody_is_given_up(floor: Floor) -> None:
    prefill, decode = floor.linked_pair(abort_frees=True)
    prefill.set(ttft_s=30)
    client = floor.leaving()
    eventually(lambda: prefill.in_flight == 1)
    left_s = client.leave()
    eventually(lambda: prefill.aborts, within_s=READ_ON_S + 3)
    assert prefill.aborts[0].aborted_s is not None
    assert READ_ON_S - 1 < prefill.aborts[0].aborted_s - left_s < READ_ON_S + 1.5
    assert not decode.legs


@STREAM
def test_r62_client_that_leaves_at_the_hand_over_has_its_session_freed(floor: Floor, stream: bool) -> None:
    prefill, decode = floor.linked_pair()
    decode.set(ttft_s=30)
    client = floor.leaving(stream=stream)
    eventually(lambda: decode.in_flight == 1 and floor.migrations() == {(prefill.url, 2)})
    left_s = client.leave()
    eventually(lambda: prefill.freed == [2] and not prefill.held, within_s=1)
    eventually(lambda: decode.aborts)
    assert decode.aborts[0].aborted_s is not None and decode.aborts[0].aborted_s - left_s < 1
    eventually(lambda: not floor.migrations(), within_s=1)


def test_r62_client_that_leaves_while_the_link_is_made_leaves_nothing_held(floor: Floor) -> None:
    prefill, decode = floor.pair()
    decode.fault("p2p_connect", delay_s=1)
    client = floor.leaving()
    eventually(lambda: decode.calls("p2p_connect"))
    client.leave()
    eventually(lambda: floor.counts(prefill, decode) == [0, 0] and not prefill.held, within_s=3)
    assert not decode.legs
    assert floor.chat().ok


@STREAM
def test_client_that_leaves_after_the_first_token_has_nothing_to_free(floor: Floor, stream: bool) -> None:
    """The ledger is cleared when decode has sent its first token, which a stream shows at once."""
    prefill, decode = floor.linked_pair(chunks=200)
    decode.set(gap_s=0.05)
    client = floor.leaving(stream=stream)
    eventually(lambda: decode.in_flight == 1 and not prefill.held)
    if stream:
        eventually(lambda: not floor.migrations())
    client.leave()
    eventually(lambda: decode.aborts)
    eventually(lambda: not floor.migrations(), within_s=1)
    if stream:
        assert (prefill.freed, floor.fabric.late_frees) == ([], [])


def test_100_clients_that_leave_at_any_moment_leave_nothing(floor: Floor) -> None:
    prefill, decode = floor.linked_pair()
    prefill.set(ttft_s=0.1)
    decode.set(ttft_s=0.1, gap_s=0.02, chunks=10)
    each = lambda i: {"leave_after_s": 0.005 * i, "stream": i % 2 == 0}  # noqa: E731
    answers = asyncio.run(load.many(floor.urls, 100, model=floor.model, each=each))
    assert {answer.status for answer in answers} <= {0, 200}
    floor.settle(within_s=8)


# --- freeing itself fails; gc


def test_a_session_that_can_not_be_freed_stays_in_the_ledger_until_gc_frees_it(floor: Floor) -> None:
    prefill, decode = floor.linked_pair()
    prefill.fault("free_cache", status=503, times=3)
    decode.set(status=500)
    assert floor.chat().status == 500

    def collected() -> bool:
        reply = floor.deployment.post("/distserve/gc", {})
        assert reply.status == 200 and {"freed", "failed", "kept"} <= set(reply.json()), reply
        return not prefill.held

    eventually(collected, within_s=8, every_s=0.2)
    eventually(lambda: not floor.migrations())


def test_gc_frees_what_is_older_than_its_age_and_tells_so(floor: Floor) -> None:
    prefill, decode = floor.linked_pair()
    decode.set(stall_after=-1)
    client = floor.leaving()
    eventually(lambda: decode.in_flight == 1 and floor.migrations() == {(prefill.url, 2)})
    assert floor.deployment.post("/distserve/gc", {}).json() == {"freed": [], "failed": [], "kept": 1}
    assert floor.table()["sessions"] == 1
    wanted = {"freed": [{"prefill": prefill.url, "session": 2}], "failed": [], "kept": 0}
    told: list[Any] = []

    def collected() -> bool:
        told.append(floor.deployment.post("/distserve/gc", {}).json())
        return bool(told[-1] == wanted)

    eventually(collected, within_s=5, every_s=0.2)
    assert prefill.freed == [2] and not prefill.held
    client.leave()
    eventually(lambda: decode.aborts)
    assert prefill.freed == [2], "not twice"
