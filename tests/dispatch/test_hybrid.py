"""One node for the whole request: which ones are tried, in which order, and that every count is given back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.dispatch.answer import Answer, EngineRequest, Outcome
from app.dispatch.hybrid import Hybrid
from app.dispatch.work import work_of
from app.errors import (
    EngineBroke,
    EngineRefused,
    EngineTimeout,
    ModelNotFound,
    NoNodeAvailable,
    UpstreamError,
)
from app.nodes import Breaker, Node, Role, State
from tests.dispatch.fakes import (
    D0,
    D1,
    HEADERS,
    MODEL,
    FakeBreakers,
    FakeBudget,
    FakeCaller,
    FakeLedger,
    FakeRegistry,
    hangs,
    nodes_of,
    refuses,
)

RAW = b'{"model": "m" , "x":1.0}'
H = [f"http://h{n}:1" for n in range(5)]
SILENT = EngineTimeout("slow", stage="first_byte")
BROKE = EngineBroke("reset")


class World:
    def __init__(self, *nodes: Node, retries: int = 2, budget: int = 100, breakers: Any = None) -> None:
        self.registry = FakeRegistry(*(nodes or nodes_of(0, decode=0, hybrid=4)))
        self.ledger = FakeLedger(self.registry)
        self.caller = FakeCaller()
        self.budget = FakeBudget(budget)
        self.hybrid = Hybrid(
            registry=self.registry,  # type: ignore[arg-type]
            ledger=self.ledger,  # type: ignore[arg-type]
            caller=self.caller,  # type: ignore[arg-type]
            breakers=breakers or FakeBreakers(),
            budget=self.budget,  # type: ignore[arg-type]
            retries=retries,
        )

    def fail(self, *failures: UpstreamError | int) -> None:
        """H[0] by the first, H[1] by the second, ..."""
        for url, failure in zip(H, failures, strict=False):
            result: Any = (failure, b"%d" % failure) if isinstance(failure, int) else failure
            self.caller.behaviour[url] = lambda call, result=result: result  # type: ignore[misc]

    async def ask(self, model: str = MODEL, upload: Any = None, **more: Any) -> Answer:
        request = EngineRequest(b"POST", b"/v1/completions", list(HEADERS), RAW, model, upload)
        return await asyncio.wait_for(self.hybrid.open(request, **more), 5)

    async def answer(self, **more: Any) -> tuple[int, str]:
        """Status and node; while it is held only that node is counted, and afterwards none."""
        answer = await self.ask(**more)
        assert self.ledger.unfinished == {answer.url: 1}
        answer.close(Outcome.OK if answer.status < 400 else Outcome.ENGINE_ERROR)
        self.all_is_over()
        return answer.status, answer.url

    def all_is_over(self) -> None:
        assert self.ledger.unfinished == {} and self.caller.running.total() == 0
        assert all(response.closed for response in self.caller.responses)

    @property
    def called(self) -> list[str]:
        return [call.url for call in self.caller.calls]


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_good_answer_is_the_first_nodes_and_costs_nothing() -> None:
    world = World()
    assert await world.answer() == (200, H[0])
    assert (world.called, world.budget.taken, world.ledger.latencies) == ([H[0]], 0, {H[0]: 1})


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 501])
async def test_an_answer_of_the_engines_own_is_handed_on(status: int) -> None:
    world = World()
    world.fail(status)
    assert await world.answer() == (status, H[0])
    assert world.called == [H[0]] and world.budget.taken == 0


class Sent:
    """An upload of which something has gone out, or nothing."""

    length = None

    def __init__(self, spent: bool) -> None:
        self.spent = spent


@pytest.mark.parametrize("first", [SILENT, BROKE, 500, 503], ids=str)
async def test_a_body_that_is_gone_goes_to_nobody_else(first: UpstreamError | int) -> None:
    world = World()
    world.fail(first)
    assert await world.answer(upload=Sent(spent=False)) == (200, H[1])
    world = World()
    world.fail(first)
    if isinstance(first, int):
        assert await world.answer(upload=Sent(spent=True)) == (first, H[0])
    else:
        with pytest.raises(type(first)):
            await world.ask(upload=Sent(spent=True))
    assert world.called == [H[0]] and world.budget.taken == 0
    world.all_is_over()


@pytest.mark.parametrize("first", [EngineRefused("x"), SILENT, BROKE, 500, 502, 503, 504], ids=str)
async def test_the_same_bytes_go_to_a_node_that_has_not_been_tried(first: UpstreamError | int) -> None:
    world = World()
    world.fail(first)
    assert await world.answer() == (200, H[1])
    assert world.called == H[:2]
    assert {call.request.body for call in world.caller.calls} == {RAW}
    assert world.budget.taken == (0 if isinstance(first, EngineRefused) else 1)
    assert world.ledger.latencies == {H[0]: 0, H[1]: 1}


async def test_nodes_are_tried_in_turn_each_once_and_no_more_than_are_allowed() -> None:
    world = World(retries=2)
    world.fail(EngineRefused("x"), 503, BROKE, 200)
    with pytest.raises(EngineBroke):
        await world.ask()
    assert world.called == H[:3]
    world.all_is_over()


async def test_the_next_node_is_the_least_loaded_of_those_that_are_left() -> None:
    world = World()
    world.ledger.counts.update({H[1]: 5, H[2]: 1, H[3]: 3})
    world.fail(503)
    answer = await world.ask()
    assert world.called == [H[0], H[2]]
    answer.close(Outcome.OK)
    assert world.ledger.counts[H[2]] == 1


async def test_the_last_answer_is_the_answer_where_nobody_is_left() -> None:
    world = World(*nodes_of(0, decode=0, hybrid=2), retries=5)
    world.fail(503, 504)
    answer = await world.ask()
    assert (answer.status, await answer.read()) == (504, b"504"), "its own words, unread until now"
    answer.close(Outcome.ENGINE_ERROR)
    assert world.called == H[:2] and world.budget.taken == 1, "nobody to send to, so nothing is taken"
    world.all_is_over()


@pytest.mark.parametrize("rules", [{"retries": 0}, {"budget": 0}], ids=str)
async def test_who_may_not_be_tried_elsewhere_gets_the_engines_own_answer(rules: dict[str, int]) -> None:
    world = World(**rules)  # type: ignore[arg-type]
    world.fail(503)
    assert await world.answer() == (503, H[0])
    world.fail(BROKE)
    with pytest.raises(EngineBroke) as caught:
        await world.ask()
    assert caught.value is BROKE
    world.all_is_over()
    assert world.called == [H[0], H[0]]


async def test_without_a_budget_a_refused_connection_is_tried_elsewhere_still() -> None:
    world = World(budget=0)
    world.fail(EngineRefused("x"), EngineTimeout("x", stage="connect"))
    assert await world.answer() == (200, H[2])


async def test_a_500_is_tried_once_and_behind_encoders_not_at_all() -> None:
    world = World(retries=3)
    world.fail(500, 500, 500)
    assert await world.answer() == (500, H[1])
    assert await world.answer(retry_500=False) == (500, H[0])
    assert world.called == [*H[:2], H[0]]
    world.fail(503, 500)
    assert await world.answer(retry_500=False) == (500, H[1])


async def test_a_silence_after_the_first_byte_is_no_reason() -> None:
    world = World()
    world.fail(EngineTimeout("x", stage="idle"))
    with pytest.raises(EngineTimeout):
        await world.ask()
    world.all_is_over()
    assert world.called == [H[0]]


async def test_nodes_that_went_away_meanwhile_are_no_candidates() -> None:
    world = World(*nodes_of(0, decode=0, hybrid=2))

    def go(call: Any) -> tuple[int, bytes]:
        world.registry.set(gone=(H[1],))
        return 503, b""

    world.caller.behaviour[H[0]] = go
    assert await world.answer() == (503, H[0])


async def test_a_model_that_is_gone_meanwhile_is_no_other_error() -> None:
    world = World(*nodes_of(0, decode=0, hybrid=1))

    def go(call: Any) -> Exception:
        world.registry.set(gone=(H[0],))
        return BROKE

    world.caller.behaviour[H[0]] = go
    with pytest.raises(EngineBroke):
        await world.ask()
    world.all_is_over()


async def test_the_other_is_gone_once_the_budget_was_asked() -> None:
    """The answer that there is goes to the client, and stays open until he has it."""
    world = World(*nodes_of(0, decode=0, hybrid=2))
    world.fail(503)
    take = world.budget.take

    async def slow() -> bool:
        world.registry.set(gone=(H[1],))
        return await take()

    world.budget.take = slow  # type: ignore[method-assign]
    answer = await world.ask()
    assert (answer.status, answer.url) == (503, H[0]) and not world.caller.responses[0].closed
    answer.close(Outcome.ENGINE_ERROR)
    world.all_is_over()


async def test_unknown_models_and_missing_nodes_are_errors_and_nobody_is_called() -> None:
    world = World()
    with pytest.raises(ModelNotFound):
        await world.ask(model="x")
    world.registry.set(gone=tuple(H))
    with pytest.raises(NoNodeAvailable):
        await world.ask()
    assert world.called == []
    world.all_is_over()


async def test_a_failed_answer_is_held_until_another_is_taken_and_closed_then() -> None:
    """A client that leaves, or a node that is not to be had, must find it in order at every moment."""
    world = World()
    world.fail(503)
    seen: list[tuple[int, dict[str, int]]] = []

    async def look() -> None:
        if world.caller.responses:
            seen.append((world.caller.responses[0].closed, dict(world.ledger.unfinished)))

    world.ledger.waits = look
    assert await world.answer() == (200, H[1])
    assert seen == [(0, {H[0]: 1})]


@pytest.mark.parametrize(
    "failures", [(), (503,), (503, 503), (BROKE,), (EngineRefused("x"), 500), (503, BROKE)], ids=str
)
async def test_r03_whenever_the_client_leaves_nothing_stays_counted(failures: tuple[Any, ...]) -> None:
    """Cancelled after every single step of the loop, to the end of an undisturbed request and beyond."""
    ended = 0
    for steps in range(40):
        world = World()
        world.fail(*failures)
        world.ledger.waits = lambda: asyncio.sleep(0)
        take = world.budget.take

        async def slow(take: Any = take) -> bool:
            await asyncio.sleep(0)
            return bool(await take())

        world.budget.take = slow  # type: ignore[method-assign]
        request = EngineRequest(b"POST", b"/v1/completions", list(HEADERS), RAW, MODEL)
        task = asyncio.create_task(world.hybrid.open(request))
        await turns(steps)
        task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(result, Answer):
            ended += 1
            result.close(Outcome.ABORTED)
        else:
            assert isinstance(result, asyncio.CancelledError), steps
        await turns()
        world.all_is_over()
        assert world.ledger.latencies.total() == 0
    assert ended > 5, "the request was never long enough over"


@pytest.mark.parametrize("where", ["budget", "ledger"])
async def test_a_client_that_leaves_between_two_nodes_closes_the_first_answer(where: str) -> None:
    world = World()
    world.fail(503)
    never = asyncio.Event()

    async def wait() -> bool:
        return await never.wait()

    async def wait_the_second_time() -> None:
        if world.caller.responses:
            await never.wait()

    if where == "budget":
        world.budget.take = wait  # type: ignore[method-assign]
    else:
        world.ledger.waits = wait_the_second_time
    task = asyncio.create_task(world.ask())
    await turns()
    assert world.ledger.unfinished == {H[0]: 1} and not world.caller.responses[0].closed
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    world.all_is_over()


async def test_a_client_that_leaves_an_engine_that_says_nothing_aborts_it() -> None:
    world = World()
    world.caller.behaviour[H[0]] = hangs
    task = asyncio.create_task(world.ask())
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.caller.calls[0].cancelled and world.called == [H[0]]
    world.all_is_over()


async def test_an_answer_that_breaks_off_is_told_to_the_breaker() -> None:
    world = World()
    answer = await world.ask()

    async def read() -> bytes:
        raise BROKE

    world.caller.responses[0].read = read  # type: ignore[method-assign]
    with pytest.raises(EngineBroke):
        await answer.read()
    assert world.caller.broken == [(H[0], "EngineBroke")]
    answer.close(Outcome.ENGINE_ERROR)
    world.all_is_over()


async def test_the_first_node_is_whom_the_breakers_choose_and_the_next_are_no_trials() -> None:
    class Trial(FakeBreakers):
        asked = 0

        async def select(self, otherwise: Any, model: str, *roles: Role) -> Any:
            self.asked += 1
            assert (model, roles) == (MODEL, (Role.Hybrid, Role.Decode))
            return lambda snapshot: snapshot.only(H[2])

    trial = Trial()
    world = World(breakers=trial)
    world.caller.behaviour[H[2]] = refuses
    assert await world.answer() == (200, H[0])
    assert world.called == [H[2], H[0]] and trial.asked == 1


async def test_a_retry_goes_to_no_node_with_an_open_breaker_while_another_was_whole() -> None:
    broken = Node(H[1], models=(MODEL,), state=State.READY, order=1, breaker=Breaker.OPEN)
    world = World(Node(H[0], models=(MODEL,), state=State.READY), broken)
    world.fail(503)
    # The pool is the closed ones: of those none is left, and the client gets the engine's own answer.
    assert await world.answer() == (503, H[0])


# --- taken before it is sent: behind encoders that push ---------------------------------------------


async def test_the_wanted_node_is_wanted_only_while_it_is_a_candidate() -> None:
    world = World(*nodes_of(0, decode=2))
    held = await world.hybrid.take_among(MODEL, (D0, D1), only=D1)
    assert (held.url, world.ledger.unfinished) == (D1, {D1: 1})
    held.give_back()
    held.give_back()
    world.registry.set(Node(D1, role=Role.Decode, models=(MODEL,), state=State.DOWN, order=2))
    held = await world.hybrid.take_among(MODEL, (D0, D1), only=D1)
    assert held.url == D0
    held.give_back()
    world.all_is_over()
    with pytest.raises(NoNodeAvailable, match="is alive"):
        await world.hybrid.take_among(MODEL, (D1,))


@pytest.mark.parametrize(
    ("failures", "told"),
    [((500,), 1), ((500, 500), 0), ((500, 503), 1), ((503, 500), 1), ((503,), 0), ((), 0)],
    ids=str,
)
async def test_r19_a_500_is_the_nodes_fault_where_another_can_serve_the_request(
    failures: tuple[int, ...], told: int
) -> None:
    noted: list[tuple[str, Any]] = []

    class Noting(FakeBreakers):
        def failed(self, url: str, outcome: Any) -> None:
            noted.append((url, outcome))

    world = World(breakers=Noting())
    world.fail(*failures)
    status, _ = await world.answer()
    # The fake caller tells of no status itself, so all of these are the failover's.
    assert [outcome for _, outcome in noted] == [500] * (told if status == 200 else 0)


async def test_a_nodes_speed_is_learned_from_a_good_answer_by_its_work() -> None:
    for outcome, learned in ((Outcome.OK, [(H[0], work_of(len(RAW), 40))]), (Outcome.ABORTED, [])):
        world = World()
        answer = await world.ask()
        answer.tokens = 40
        answer.close(outcome)
        assert world.ledger.learned == learned
