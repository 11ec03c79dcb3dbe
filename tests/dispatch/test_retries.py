"""Which failures may go to another node, how often, and what they cost the deployment."""

from __future__ import annotations

from typing import Any

import pytest

from app.dispatch.caller import AnswerTooLong
from app.dispatch.retries import Retries, never_arrived
from app.errors import (
    EngineBroke,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    UpstreamError,
)
from tests.dispatch.fakes import FakeBudget

FREE = [EngineRefused("x"), EngineUnreachable("x"), EngineTimeout("x", stage="connect")]
COSTS = [EngineBroke("x"), EngineTimeout("x", stage="first_byte"), 500, 502, 503, 504]
NEVER = [
    EngineProtocolError("x"),
    EngineTimeout("x", stage="idle"),
    EngineTimeout("x", stage="total"),
    UpstreamError("x"),
    *(200, 204, 301, 400, 401, 404, 408, 413, 422, 429, 499, 501, 505, 529, 599),
]


def retries(left: int = 2, budget: FakeBudget | None = None, **more: Any) -> Retries:
    return Retries(left, budget or FakeBudget(), **more)  # type: ignore[arg-type]


def name_of(failure: object) -> str:
    stage = getattr(failure, "stage", "")
    return str(failure) if isinstance(failure, int) else f"{type(failure).__name__}-{stage}"


@pytest.mark.parametrize("failure", FREE, ids=name_of)
async def test_what_no_engine_has_seen_is_free(failure: UpstreamError) -> None:
    budget = FakeBudget(0)
    some = retries(2, budget)
    assert never_arrived(failure)
    assert [await some.may(failure) for _ in range(4)] == [True, True, False, False]
    assert budget.taken == 0


@pytest.mark.parametrize("failure", COSTS, ids=name_of)
async def test_what_an_engine_may_have_worked_for_takes_from_the_budget(failure: UpstreamError | int) -> None:
    budget = FakeBudget()
    some = retries(1, budget)
    assert isinstance(failure, int) or not never_arrived(failure)
    assert await some.may(failure) and not await some.may(failure)
    assert (budget.taken, some.left) == (1, 0), "who has none left does not ask"


@pytest.mark.parametrize("failure", COSTS, ids=name_of)
async def test_where_the_budget_is_used_up_nothing_is_counted_against_the_request(failure: UpstreamError | int) -> None:
    budget = FakeBudget(0)
    some = retries(1, budget)
    assert not await some.may(failure)
    assert some.left == 1
    assert await some.may(EngineRefused("x")), "what is free is possible still"


@pytest.mark.parametrize("failure", NEVER, ids=name_of)
async def test_what_is_an_answer_or_the_requests_own_fault_is_not_tried_elsewhere(failure: UpstreamError | int) -> None:
    budget = FakeBudget()
    assert not await retries(2, budget).may(failure)
    assert budget.taken == 0
    if isinstance(failure, int):
        assert not retries().concerns(failure)


async def test_a_500_goes_elsewhere_once_and_not_at_all_behind_encoders() -> None:
    some = retries(5)
    assert some.concerns(500) and await some.may(500)
    assert not some.concerns(500) and not await some.may(500)
    assert some.concerns(503) and await some.may(503), "others are tried still"
    behind = retries(5, server_errors=False)
    assert not behind.concerns(500) and not await behind.may(500) and await behind.may(502)


async def test_a_500_that_the_budget_refused_has_not_been_tried() -> None:
    budget = FakeBudget(0)
    some = retries(2, budget)
    assert not await some.may(500)
    budget.left = 1
    assert await some.may(500)


async def test_without_retries_nobody_is_asked() -> None:
    budget = FakeBudget()
    for failure in (*FREE, *COSTS):
        assert not await retries(0, budget).may(failure)
    assert budget.taken == 0 and not await retries(0, budget).may_again()


async def test_the_same_once_more_takes_a_retry_and_the_budget() -> None:
    budget = FakeBudget(1)
    some = retries(3, budget)
    assert await some.may_again() and not await some.may_again()
    assert (some.left, budget.taken) == (2, 1)


async def test_an_answer_that_is_too_long_would_be_as_long_elsewhere() -> None:
    assert not await retries().may(AnswerTooLong("x"))
