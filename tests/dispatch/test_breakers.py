"""What counts as a node's failure, what is told of it, and who makes the one trial; without Redis."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from app.dispatch.answer import Answer, EngineRequest, Outcome
from app.dispatch.breakers import AT_ONCE, TRIAL_S, Breakers, speaks_against
from app.dispatch.caller import Caller
from app.errors import (
    EngineBroke,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    EngineUnreachable,
    StoreUnavailable,
    UpstreamError,
)
from app.nodes import Breaker, Node, Role, State
from app.store.registry import BreakerRules
from app.upstream.transport import Timeouts
from tests.dispatch.fakes import MODEL, FakeLedger, FakeRegistry, FakeResponse

A, B, C = "http://a:1", "http://b:1", "http://c:1"
RULES = BreakerRules(threshold=5, open_s=10)
AGAINST = [
    EngineRefused("x"),
    EngineUnreachable("x"),
    EngineBroke("x"),
    EngineTimeout("x", stage="connect"),
    EngineTimeout("x", stage="first_byte"),
]
NOT_AGAINST = [
    EngineTimeout("x", stage="idle"),
    EngineTimeout("x", stage="total"),
    EngineProtocolError("x"),
    UpstreamError("x"),
]


class Registry(FakeRegistry):
    """What it is told; `trials`: the nodes of which a trial may be claimed, each once."""

    def __init__(self, *nodes: Node) -> None:
        super().__init__(*nodes)
        self.told: list[tuple[Any, ...]] = []
        self.trials: list[str] = []
        self.trouble: Exception | None = None
        self.gate: asyncio.Event | None = None

    async def record_failure(self, url: str, rules: BreakerRules) -> None:
        await self._note("failure", url, rules)

    async def move_breaker(self, url: str, move: str, number: int = 0) -> bool:
        await self._note(move, url, number)
        if move != "trial":
            return True
        mine = url in self.trials
        if mine:
            self.trials.remove(url)
        return mine

    async def _note(self, *what: Any) -> None:
        self.told.append(what)
        if self.gate is not None:
            await self.gate.wait()
        if self.trouble is not None:
            raise self.trouble


def node(url: str, breaker: Breaker = Breaker.CLOSED, **more: Any) -> Node:
    return Node(url, models=(MODEL,), state=State.READY, breaker=breaker, **more)


def breakers_of(*nodes: Node) -> tuple[Registry, Breakers]:
    registry = Registry(*nodes)
    return registry, Breakers(registry=registry, ledger=Ledger(), rules=RULES)  # type: ignore[arg-type]


class Ledger:
    """Shared, or not (`trouble`); whom it was told to pass over, and for how long."""

    def __init__(self, trouble: str | None = None) -> None:
        self.trouble = trouble
        self.on_told_again: list[Any] = []
        self.shunned: list[tuple[str, float]] = []
        self.open = False

    def shun(self, url: str, seconds: float) -> None:
        self.shunned.append((url, seconds))
        self.open = True

    def shuns(self, url: str) -> bool:
        return self.open


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# --- failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", AGAINST, ids=lambda e: f"{type(e).__name__}-{getattr(e, 'stage', '')}")
async def test_what_speaks_against_a_node_is_told(error: UpstreamError) -> None:
    registry, breakers = breakers_of(node(A))
    breakers.failed(A, error)
    await turns()
    assert speaks_against(error) and registry.told == [("failure", A, RULES)]


@pytest.mark.parametrize("error", NOT_AGAINST, ids=lambda e: f"{type(e).__name__}-{getattr(e, 'stage', '')}")
async def test_what_is_slow_work_or_a_wrong_answer_is_not(error: UpstreamError) -> None:
    registry, breakers = breakers_of(node(A))
    breakers.failed(A, error)
    await turns()
    assert not speaks_against(error) and registry.told == []


async def test_of_a_node_that_is_unknown_or_open_already_nothing_is_told() -> None:
    registry, breakers = breakers_of(node(A, Breaker.OPEN), node(B, Breaker.HALF_OPEN))
    for url in (A, B, C):
        breakers.failed(url, EngineBroke("x"))
    await turns()
    assert registry.told == [("failure", B, RULES)], "a trial that fails opens it again"


async def test_telling_costs_the_request_nothing_and_is_bounded() -> None:
    registry, breakers = breakers_of(node(A))
    registry.gate = asyncio.Event()
    for _ in range(3 * AT_ONCE):
        breakers.failed(A, EngineBroke("x"))
    await turns()
    assert len(registry.told) == AT_ONCE and repr(breakers) == f"<Breakers broken=0 telling={AT_ONCE}>"
    registry.gate.set()
    await turns()
    breakers.failed(A, EngineBroke("x"))
    await turns()
    assert len(registry.told) == AT_ONCE + 1
    assert repr(breakers) == "<Breakers broken=0 telling=0>"


async def test_while_redis_is_away_nothing_fails() -> None:
    registry, breakers = breakers_of(node(A), node(B, Breaker.HALF_OPEN))
    registry.trouble = StoreUnavailable("away")
    breakers.failed(A, EngineBroke("x"))
    breakers.answered(B)
    await turns()
    assert len(registry.told) == 2
    select = await breakers.select(lambda snapshot: snapshot.pool(MODEL, Role.Hybrid), MODEL, Role.Hybrid)
    assert select(registry.snapshot).urls == (A,)
    registry.trouble = None
    breakers.answered(B)
    await turns()
    assert registry.told[-1] == ("close", B, 0), "a close that failed can be told again"


def alone(*nodes: Node) -> tuple[Ledger, Registry, Breakers]:
    """A worker whose Redis is away."""
    ledger, registry = Ledger("away"), Registry(*nodes)
    return ledger, registry, Breakers(registry=registry, ledger=ledger, rules=RULES)  # type: ignore[arg-type]


async def test_while_redis_is_away_each_worker_opens_it_for_itself_by_the_same_rules() -> None:
    ledger, registry, breakers = alone(node(A), node(B, Breaker.HALF_OPEN))
    for _ in range(4):
        breakers.failed(A, 503)
    assert ledger.shunned == []
    breakers.failed(A, EngineBroke("x"))
    assert ledger.shunned == [(A, 10)]
    for _ in range(9):
        breakers.failed(A, 503)  # were under way
    for _ in range(4):  # its time is over, and the next one fails: the trial
        ledger.open = False
        breakers.failed(A, 503)
    assert ledger.shunned == [(A, 10), (A, 20), (A, 40), (A, 60), (A, 60)]
    assert await selected(registry, breakers) == (A,)
    assert registry.told == [], "nobody is waited for"


async def test_an_answer_or_redis_itself_ends_the_row_that_a_worker_counts_for_itself() -> None:
    ledger, _, breakers = alone(node(A))
    for end in (lambda: breakers.answered(A), lambda: [tell() for tell in ledger.on_told_again]):
        for _ in range(4):
            breakers.failed(A, 500)
        end()
    breakers.failed(A, 500)
    assert ledger.shunned == []
    breakers.failed(A, 404)
    breakers.failed(B, 500)
    assert ledger.shunned == []


# --- successes --------------------------------------------------------------------------------------


async def test_an_answer_closes_what_is_not_closed_once_and_asks_redis_for_nothing_else() -> None:
    registry, breakers = breakers_of(node(A), node(B, Breaker.OPEN), node(C, Breaker.HALF_OPEN))
    registry.gate = asyncio.Event()
    for _ in range(10):
        for url in (A, B, C):
            breakers.answered(url)
    await turns()
    assert registry.told == [("close", B, 0), ("close", C, 0)]
    registry.gate.set()
    await turns()
    assert "telling=0" in repr(breakers)


async def test_what_is_being_told_reaches_redis_before_the_end() -> None:
    registry, breakers = breakers_of(node(A))
    await breakers.close()
    registry.gate = asyncio.Event()
    breakers.failed(A, EngineBroke("x"))
    closing = asyncio.create_task(breakers.close())
    await turns()
    assert not closing.done()
    registry.gate.set()
    await asyncio.wait_for(closing, 1)


# --- trials -----------------------------------------------------------------------------------------


async def selected(registry: Registry, breakers: Breakers, *roles: Role) -> tuple[str, ...]:
    roles = roles or (Role.Hybrid,)
    select = await breakers.select(lambda snapshot: snapshot.pool(MODEL, *roles), MODEL, *roles)
    return select(registry.snapshot).urls


async def test_where_all_are_closed_nobody_is_asked() -> None:
    registry, breakers = breakers_of(node(A), node(B))
    assert await selected(registry, breakers) == (A, B)
    assert registry.told == []


async def test_an_open_one_gets_no_trial() -> None:
    registry, breakers = breakers_of(node(A), node(B, Breaker.OPEN))
    assert await selected(registry, breakers) == (A,)
    assert registry.told == []


async def test_of_all_requests_the_one_that_claims_the_trial_goes_there() -> None:
    registry, breakers = breakers_of(node(A), node(B, Breaker.HALF_OPEN))
    registry.trials = [B]
    chosen = [await selected(registry, breakers) for _ in range(5)]
    assert chosen == [(B,), *[(A,)] * 4]
    assert registry.told[0] == ("trial", B, round(TRIAL_S * 1000))


async def test_a_trial_is_for_requests_that_the_node_can_serve() -> None:
    others = [
        node(B, Breaker.HALF_OPEN, role=Role.Prefill),
        replace(node(C, Breaker.HALF_OPEN), models=("other",)),
        replace(node("http://d:1", Breaker.HALF_OPEN), state=State.DOWN),
    ]
    registry, breakers = breakers_of(node(A), *others)
    registry.trials = [B, C, "http://d:1"]
    assert await selected(registry, breakers) == (A,)
    assert registry.told == []
    assert await selected(registry, breakers, Role.Prefill) == (B,)


async def test_a_node_that_goes_away_with_the_trial_claimed_is_not_waited_for() -> None:
    registry, breakers = breakers_of(node(A), node(B, Breaker.HALF_OPEN))
    registry.trials = [B]
    select = await breakers.select(lambda snapshot: snapshot.pool(MODEL, Role.Hybrid), MODEL, Role.Hybrid)
    registry.set(gone=(B,))
    assert select(registry.snapshot).urls == (A,)


# --- what the caller tells --------------------------------------------------------------------------


class Reading(FakeResponse):
    def __init__(self, error: UpstreamError) -> None:
        super().__init__()
        self.error = error

    async def read(self) -> bytes:
        raise self.error


def caller_of(registry: Registry, breakers: Breakers, result: Any) -> Caller:
    class Transport:
        async def send(self, *arguments: Any) -> Any:
            if isinstance(result, Exception):
                raise result
            return result

    return Caller(
        registry=registry,  # type: ignore[arg-type]
        transport=Transport(),  # type: ignore[arg-type]
        breakers=breakers,
        timeouts=Timeouts(1, 1, 1, 1),
        engine_key=None,
    )


REQUEST = EngineRequest(b"POST", b"/v1/x", [], b"", MODEL)


@pytest.mark.parametrize(
    "error", [*AGAINST, *NOT_AGAINST], ids=lambda e: f"{type(e).__name__}-{getattr(e, 'stage', '')}"
)
async def test_a_failure_is_told_once_wherever_it_happens(error: UpstreamError) -> None:
    registry, breakers = breakers_of(node(A))
    expected = [("failure", A, RULES)] * (error in AGAINST)
    with pytest.raises(type(error)):
        await caller_of(registry, breakers, error).send(A, REQUEST)
    await turns()
    assert registry.told == expected
    with pytest.raises(type(error)):
        await caller_of(registry, breakers, Reading(error)).fetch(A, REQUEST, limit_bytes=9)
    await turns()
    assert registry.told == expected * 2, "an answer that is read here"
    caller = caller_of(registry, breakers, None)
    answer = Answer(Reading(error), A, (), caller.broke)
    with pytest.raises(type(error)):
        await answer.read()
    await turns()
    assert registry.told == expected * 3, "an answer that the client reads"


@pytest.mark.parametrize("status", [200, 302, 400, 404, 429, 501, 505])
async def test_any_other_answer_closes_the_breaker_and_counts_against_nobody(status: int) -> None:
    registry, breakers = breakers_of(node(A, Breaker.HALF_OPEN), node(B))
    for url in (A, B):
        await caller_of(registry, breakers, FakeResponse(status)).send(url, REQUEST)
    await turns()
    assert registry.told == [("close", A, 0)]


@pytest.mark.parametrize("breaker", [Breaker.CLOSED, Breaker.HALF_OPEN])
@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_node_that_says_that_it_can_not_serve_has_failed_and_closes_nothing(
    status: int, breaker: Breaker
) -> None:
    registry, breakers = breakers_of(node(A, breaker))
    await caller_of(registry, breakers, FakeResponse(status)).send(A, REQUEST)
    await caller_of(registry, breakers, FakeResponse(status)).fetch(A, REQUEST, limit_bytes=9)
    await turns()
    assert registry.told == [("failure", A, RULES)] * 2


@pytest.mark.parametrize(
    ("status", "outcome", "ends"),
    [
        (200, Outcome.OK, True),
        (400, Outcome.CLIENT_ERROR, True),
        (429, Outcome.CLIENT_ERROR, True),
        (501, Outcome.ENGINE_ERROR, True),
        (500, Outcome.ENGINE_ERROR, False),
        (503, Outcome.ENGINE_ERROR, False),
        (200, Outcome.ABORTED, False),
    ],
)
def test_the_release_ends_a_row_only_where_nothing_was_counted(status: int, outcome: Outcome, ends: bool) -> None:
    ledger = FakeLedger(FakeRegistry(node(A)))
    Answer(FakeResponse(status), A, (ledger.ticket(A),)).close(outcome)
    assert ledger.rows_ended[A] == ends


async def test_an_answer_that_is_too_long_is_no_failure_of_the_connection() -> None:
    registry, breakers = breakers_of(node(A))
    with pytest.raises(EngineProtocolError):
        await caller_of(registry, breakers, FakeResponse(200, b"x" * 10)).fetch(A, REQUEST, limit_bytes=9)
    await turns()
    assert registry.told == []
