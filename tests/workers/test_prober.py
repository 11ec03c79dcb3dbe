"""The prober: what it concludes, and that one in the whole deployment does it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import EngineBroke, EngineRefused, EngineTimeout, UpstreamError
from app.nodes import Node, Role, State
from app.store.keys import Keys
from app.store.locator import Locator
from app.store.registry import BreakerRules, Registry
from app.store.scripts import load_scripts
from app.upstream.management import Health, Verdict
from tests.store.harness import Worker, give_back, registered, totals
from tests.support.redis import Space
from tests.support.wait import aeventually
from workers import prober as prober_module
from workers.prober import Finding, Prober, Record, Rules, expired, interval_s, verdict

A, B, C = "http://10.0.0.1:23333", "http://10.0.0.2:23333", "http://10.0.0.3:23333"
D = "http://10.0.0.4:23333"
RULES = Rules(
    interval_s=5.0, down_after=3, up_after=2, busy_grace_s=10.0, heartbeat_expiration_s=90.0, forget_after_s=86_400.0
)
NOW_MS = 1_700_000_000_000


def node(state: State, *, since_s: float = 0.0, static: bool = False) -> Node:
    """In `state` for `since_s` seconds, at NOW_MS."""
    return Node(A, models=("m",), state=state, static=static, state_since_ms=NOW_MS - round(since_s * 1000))


# --- verdicts -------------------------------------------------------------------------------------


def states(start: State, findings: str, *, busy: bool = False) -> list[str]:
    """The state after each finding: o ok, b bad, t timeout, r refused, z asleep."""
    kinds = {"o": "ok", "b": "bad", "t": "timeout", "r": "refused", "z": "asleep"}
    now, record, seen = node(start), Record(incarnation=1), []
    for letter in findings:
        state = verdict(now, record, Finding(kinds[letter]), RULES, busy=busy)
        assert state != now.state, "a verdict is a change"
        now = replace(now, state=state or now.state)
        seen.append(now.state.value)
    return seen


@pytest.mark.parametrize(
    ("start", "findings", "expected"),
    [
        # down after three misses in a row, or one refused connection
        (State.READY, "bbb", "ready ready down"),
        (State.READY, "ttt", "ready ready down"),
        (State.READY, "btb", "ready ready down"),
        (State.READY, "r", "down"),
        (State.READY, "br", "ready down"),
        (State.READY, "bbobb", "ready ready ready ready ready"),
        (State.READY, "bbobbb", "ready ready ready ready ready down"),
        (State.READY, "bbbo", "ready ready down down"),
        # up after two hits in a row
        (State.DOWN, "oo", "down ready"),
        (State.DOWN, "obo", "down down down"),
        (State.DOWN, "oboo", "down down down ready"),
        (State.DOWN, "oro", "down down down"),
        (State.DOWN, "oto", "down down down"),
        (State.GONE, "oo", "gone ready"),
        (State.GONE, "rrrr", "gone gone gone gone"),
        # a new node needs one good look, and is not taken down by bad ones
        (State.PENDING, "o", "ready"),
        (State.PENDING, "rbtrbt", "pending pending pending pending pending pending"),
        (State.PENDING, "rro", "pending pending ready"),
        # the engine's own word: not routed, not deleted
        (State.READY, "z", "asleep"),
        (State.READY, "zo", "asleep ready"),
        (State.READY, "bbzbb", "ready ready asleep asleep asleep"),
        (State.PENDING, "zzo", "asleep asleep ready"),
        (State.DOWN, "z", "asleep"),
        (State.GONE, "z", "asleep"),
        (State.READY, "zr", "asleep down"),
        (State.READY, "zbbb", "asleep asleep asleep down"),
        (State.DOWN, "ozo", "down asleep ready"),
    ],
)
def test_verdicts(start: State, findings: str, expected: str) -> None:
    assert states(start, findings) == expected.split()


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        ("tttttttt", "ready"),  # r26: busy is not dead
        ("r", "down"),  # but nobody listens there
        ("bbb", "down"),  # and what it says itself counts
        ("ttbtbtt", "ready"),  # two misses and timeouts that prove nothing
        ("ttbtbttb", "down"),
    ],
)
def test_a_timeout_is_no_miss_while_requests_succeed(findings: str, expected: str) -> None:
    assert states(State.READY, findings, busy=True)[-1] == expected


def test_the_thresholds_are_the_operators() -> None:
    rules = replace(RULES, down_after=1, up_after=1)
    assert verdict(node(State.READY), Record(1), Finding("bad"), rules, busy=False) is State.DOWN
    assert verdict(node(State.DOWN), Record(1), Finding("ok"), rules, busy=False) is State.READY


# --- when -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "since_s", "expected_s"),
    [
        (State.READY, 0, 5),
        (State.READY, 100_000, 5),
        (State.ASLEEP, 0, 1),
        (State.ASLEEP, 60, 5),
        (State.PENDING, 0, 1),
        (State.PENDING, 59.9, 1),
        (State.PENDING, 60, 5),
        (State.DOWN, 0, 1),
        (State.DOWN, 59.9, 1),
        (State.DOWN, 60, 5),
        # gone: a twentieth of how long it is gone, between ten seconds and five minutes
        (State.GONE, 0, 10),
        (State.GONE, 200, 10),
        (State.GONE, 400, 20),
        (State.GONE, 3_600, 180),
        (State.GONE, 6_000, 300),
        (State.GONE, 86_400, 300),
        (State.GONE, -50, 10),  # Redis's clock was set back
        (State.DOWN, -50, 1),
    ],
)
def test_interval(state: State, since_s: float, expected_s: float) -> None:
    assert interval_s(node(state, since_s=since_s), RULES, NOW_MS) == expected_s


def test_a_shorter_interval_is_never_made_longer() -> None:
    assert interval_s(node(State.DOWN), replace(RULES, interval_s=0.2), NOW_MS) == 0.2


@pytest.mark.parametrize(
    ("state", "since_s", "static", "expected"),
    [
        (State.DOWN, 90.001, False, State.GONE),
        (State.DOWN, 90.0, False, None),
        (State.PENDING, 90.001, False, State.GONE),
        (State.PENDING, 5, False, None),
        (State.DOWN, 1e6, True, None),
        (State.PENDING, 1e6, True, None),
        (State.READY, 1e6, False, None),
        (State.ASLEEP, 1e6, False, None),
        (State.DRAINING, 1e6, False, None),
        (State.GONE, 1e6, False, None),
        (State.DOWN, -50, False, None),
    ],
)
def test_expired(state: State, since_s: float, static: bool, expected: State | None) -> None:
    assert expired(node(state, since_s=since_s, static=static), RULES, NOW_MS) is expected


# --- the loop -------------------------------------------------------------------------------------


class Engines:
    """Stands for the EngineClient: `answers[url]` is what the next probes see; ok where nothing is said."""

    def __init__(self) -> None:
        self.answers: dict[str, Health | Exception] = {}
        self.models_of: dict[str, tuple[str, ...] | Exception] = {}
        self.hold: asyncio.Event | None = None
        self.asked: list[tuple[str, str | None]] = []
        self.looks: Counter[str] = Counter()
        self.at_once = self.most_at_once = self.cancelled = 0

    async def health(self, url: str, key: str | None) -> Health:
        self.asked.append((url, key))
        self.looks[url] += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await (self.hold.wait() if self.hold is not None else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.at_once -= 1
        answer = self.answers.get(url, Health(Verdict.OK, "HTTP 200"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def models(self, url: str, key: str | None) -> tuple[str, ...]:
        self.asked.append((url, key))
        found = self.models_of.get(url, ("m",))
        if isinstance(found, Exception):
            raise found
        return found


def refused() -> EngineRefused:
    return EngineRefused("nobody listens")


def timeout() -> EngineTimeout:
    return EngineTimeout("too slow", stage="total")


RACING = replace(RULES, interval_s=0.01)


def registry_of(space: Space, worker: str, timeout_s: float = 0.5) -> Registry:
    keys = Keys(space.namespace)
    locator = Locator.of(space.url, keys=keys, timeout_s=timeout_s)
    return Registry(locator=locator, keys=keys, scripts=load_scripts(), worker=worker, timeout_s=timeout_s)


@asynccontextmanager
async def probing(
    space: Space,
    *,
    name: str = "w1",
    engines: Engines | None = None,
    rules: Rules = RACING,
    key: str | None = None,
    turn_s: float = 0.02,
    timeout_s: float = 0.5,
    counts_are_whole: Callable[[], bool] = lambda: True,
) -> AsyncIterator[SimpleNamespace]:
    """A registry of its own and a prober on it that runs, fast: the loop's own pace is nothing to wait for."""
    registry = registry_of(space, name, timeout_s)
    engines = engines or Engines()
    prober = Prober(
        registry=registry,
        engines=engines,  # type: ignore[arg-type]
        keys=Keys(space.namespace),
        worker=name,
        rules=rules,
        engine_key=key,
        counts_are_whole=counts_are_whole,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prober_module, "TURN_S", turn_s)
        await registry.start()
        task = asyncio.create_task(prober.run())
        try:
            yield SimpleNamespace(registry=registry, engines=engines, prober=prober, task=task, name=name)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await registry.close()


async def add(registry: Registry, url: str, state: State | None = None, **more: Any) -> None:
    said = {"role": Role.Hybrid, "models": ("m",), "speed": None, "key": None, **more}
    await registry.add(url, **said)
    if state is not None:
        assert await registry.set_state(registry.snapshot.nodes[url], state)


def state_of(space: Space, url: str = A) -> str | None:
    found: str | None = space.cli("HGET", space.key(f"node:{url}"), "state")
    return found


def becomes(space: Space, state: str | None, url: str = A) -> Callable[[], bool]:
    return lambda: state_of(space, url) == state


async def test_a_new_node_is_probed_within_a_second_at_the_usual_pace(redis: Space) -> None:
    async with probing(redis, rules=RULES, turn_s=1.0) as one:
        await aeventually(lambda: redis.cli("GET", redis.key("prober")) == "w1")
        since_s = time.monotonic()
        await add(one.registry, A)
        await aeventually(becomes(redis, "ready"), within_s=1.0)
        assert time.monotonic() - since_s < 1.0


async def test_the_way_of_a_node_down_and_up_again(redis: Space) -> None:
    async with probing(redis) as one:
        await add(one.registry, A)
        await aeventually(becomes(redis, "ready"))
        one.engines.answers[A] = Health(Verdict.BAD, "HTTP 503")
        await aeventually(becomes(redis, "down"))
        assert redis.cli("HGET", redis.key(f"node:{A}"), "reason") == "HTTP 503"
        one.engines.answers[A] = Health(Verdict.ASLEEP, "sleeping")
        await aeventually(becomes(redis, "asleep"))
        assert redis.cli("HGET", redis.key(f"node:{A}"), "reason") == "sleeping"
        del one.engines.answers[A]
        await aeventually(becomes(redis, "ready"))
        assert redis.cli("HGET", redis.key(f"node:{A}"), "reason") == ""
        one.engines.answers[A] = refused()
        await aeventually(becomes(redis, "down"))


def breaker_of(space: Space, url: str = A) -> str | None:
    found: str | None = space.cli("HGET", space.key(f"node:{url}"), "breaker")
    return found


async def test_a_node_that_comes_back_from_down_does_not_wait_for_its_breaker(redis: Space) -> None:
    """The failures were those of the process that died. One that stayed up waits for its time."""
    async with probing(redis) as one:
        for url in (A, B):
            await add(one.registry, url)
            await aeventually(becomes(redis, "ready", url))
            await one.registry.record_failure(url, BreakerRules(threshold=1, open_s=60.0))
        one.engines.answers[A] = refused()
        await aeventually(becomes(redis, "down"))
        assert breaker_of(redis) == "open"
        looks = one.engines.looks[A]
        await aeventually(lambda: one.engines.looks[A] > looks + 3)
        assert breaker_of(redis) == "open"
        del one.engines.answers[A]
        # The next good look closes it, on probation: one failure opens it again.
        await aeventually(lambda: (state_of(redis), breaker_of(redis)) == ("ready", "closed"))
        assert redis.cli("HGET", redis.key("failures"), A) == str(RULES.breaker_failures)
        assert (state_of(redis, B), breaker_of(redis, B)) == ("ready", "open")


def reason_of(space: Space, url: str = A) -> str | None:
    found: str | None = space.cli("HGET", space.key(f"node:{url}"), "reason")
    return found


async def test_a_node_that_stays_pending_has_the_reason_of_its_last_probe(redis: Space) -> None:
    async with probing(redis) as one:
        one.engines.answers[A] = refused()
        await add(one.registry, A)
        pending_since = redis.cli("HGET", redis.key(f"node:{A}"), "state_since_ms")
        await aeventually(lambda: reason_of(redis) == "nobody listens")
        version, looks = redis.cli("GET", redis.key("version")), one.engines.looks[A]
        await aeventually(lambda: one.engines.looks[A] > looks + 5)
        assert redis.cli("GET", redis.key("version")) == version, "the same reason again is no change"
        one.engines.answers[A] = Health(Verdict.BAD, "HTTP 500")
        await aeventually(lambda: reason_of(redis) == "HTTP 500")
        assert state_of(redis) == "pending"
        assert redis.cli("HGET", redis.key(f"node:{A}"), "state_since_ms") == pending_since
        del one.engines.answers[A]
        await aeventually(becomes(redis, "ready"))
        assert reason_of(redis) == ""


async def test_a_node_that_is_down_of_something_else_by_now_says_so(redis: Space) -> None:
    async with probing(redis) as one:
        await add(one.registry, A, State.READY)
        one.engines.answers[A] = refused()
        await aeventually(becomes(redis, "down"))
        one.engines.answers[A] = timeout()
        await aeventually(lambda: reason_of(redis) == "too slow")
        assert state_of(redis) == "down"


async def test_a_missed_probe_leaves_a_ready_node_without_a_reason(redis: Space) -> None:
    async with probing(redis, rules=replace(RACING, down_after=1000)) as one:
        await add(one.registry, A, State.READY)
        one.engines.answers[A] = timeout()
        looks = one.engines.looks[A]
        await aeventually(lambda: one.engines.looks[A] > looks + 3)
        assert (state_of(redis), reason_of(redis)) == ("ready", "")


async def test_the_words_of_a_probe_do_not_bring_back_the_state_that_it_began_in(redis: Space) -> None:
    async with probing(redis) as one:
        one.engines.answers[A] = refused()
        await add(one.registry, A)
        await aeventually(lambda: reason_of(redis) == "nobody listens")
        one.engines.answers[A] = timeout()
        one.engines.hold = asyncio.Event()
        await aeventually(lambda: one.engines.at_once == 1)
        one.prober._rules = replace(RACING, heartbeat_expiration_s=0.0)  # it ends now, however long all this took
        await aeventually(becomes(redis, "gone"))  # while a probe of the pending node is still running
        one.engines.hold.set()
        await aeventually(lambda: reason_of(redis) == "too slow")
        assert state_of(redis) == "gone"


async def test_misses_are_counted_one_probe_at_a_time(redis: Space) -> None:
    """Three misses are three probes, however many turns go by while one hangs."""
    async with probing(redis) as one:
        one.engines.hold = asyncio.Event()
        await add(one.registry, A, State.READY)
        await aeventually(lambda: one.engines.at_once == 1)
        looks = one.engines.looks[A]
        turns = len(redis.client.info("commandstats"))
        assert turns
        before = int(redis.client.info("commandstats")["cmdstat_time"]["calls"])
        await aeventually(lambda: int(redis.client.info("commandstats")["cmdstat_time"]["calls"]) > before + 10)
        assert one.engines.looks[A] == looks
        assert state_of(redis) == "ready"


# The success grows older while the test runs: 40 s of room on the one side, on the other any time only helps.
@pytest.mark.parametrize(("age_s", "expected"), [(0, "ready"), (60, "ready"), (101, "down")])
async def test_r26_a_busy_node_that_is_too_slow_to_answer_stays(redis: Space, age_s: float, expected: str) -> None:
    async with probing(redis, rules=replace(RACING, busy_grace_s=100)) as one:
        await add(one.registry, A, State.READY)
        seconds, _ = redis.client.time()
        redis.cli("HSET", redis.key("last_success"), A, (seconds - age_s) * 1000)
        one.engines.answers[A] = timeout()
        looks = one.engines.looks[A]
        await aeventually(lambda: one.engines.looks[A] > looks + 4)
        assert state_of(redis) == expected


async def test_a_node_without_any_success_that_is_too_slow_goes_down(redis: Space) -> None:
    async with probing(redis) as one:
        await add(one.registry, A, State.READY)
        one.engines.answers[A] = timeout()
        await aeventually(becomes(redis, "down"))


async def test_r83_each_engine_is_asked_with_its_key(redis: Space) -> None:
    async with probing(redis, key="general") as one:
        await add(one.registry, A, key="its-own")
        await add(one.registry, B)
        await aeventually(lambda: state_of(redis, A) == state_of(redis, B) == "ready")
        assert set(one.engines.asked) == {(A, "its-own"), (B, "general")}


async def test_models_are_taken_from_the_engine_only_where_none_were_registered(redis: Space) -> None:
    async with probing(redis) as one:
        one.engines.models_of = {A: ("from-a", "b"), B: ("from-b",)}
        await add(one.registry, A, models=("old",), asked=True)
        await add(one.registry, B, models=("registered",))
        await aeventually(lambda: state_of(redis, A) == state_of(redis, B) == "ready")
        await one.registry.refresh()
        nodes = one.registry.snapshot.nodes
        assert (nodes[A].models, nodes[B].models) == (("from-a", "b"), ("registered",))


@pytest.mark.parametrize("failure", [EngineBroke("no list"), UpstreamError("answered 401"), timeout()])
async def test_r30_an_engine_is_ready_only_once_its_own_list_answers(redis: Space, failure: Exception) -> None:
    async with probing(redis) as one:
        one.engines.models_of[A] = failure
        await add(one.registry, A)
        looks = one.engines.looks[A]
        await aeventually(lambda: one.engines.looks[A] > looks + 4)
        assert state_of(redis) == "pending"
        del one.engines.models_of[A]
        await aeventually(becomes(redis, "ready"))


async def test_a_node_that_is_away_for_too_long_is_gone_and_comes_back_by_itself(redis: Space) -> None:
    rules = replace(RACING, heartbeat_expiration_s=0.05)
    async with probing(redis, rules=rules) as one:
        one.engines.answers = {A: refused(), B: refused()}
        await add(one.registry, A)
        await add(one.registry, B, static=True)
        await aeventually(becomes(redis, "gone"))
        assert state_of(redis, B) == "pending"
        assert not one.registry.snapshot.models() or one.registry.snapshot.models() == ["m"]
        # It answers again, with its models: a gone node is probed still, if rarely.
        one.engines.answers.clear()

        def back() -> bool:
            for record in one.prober._records.values():
                record.due_at_s = 0.0
            return state_of(redis) == "ready"

        await aeventually(back)
        await aeventually(becomes(redis, "ready", B))


@pytest.mark.parametrize(("gone_for_s", "expected"), [(86_300, "gone"), (86_401, None)])
async def test_a_gone_node_is_forgotten_after_a_day(redis: Space, gone_for_s: int, expected: str | None) -> None:
    async with Worker(redis.url, redis.namespace, "w0") as worker:
        await add(worker.registry, A, State.GONE)
        seconds, _ = redis.client.time()
        redis.cli("HSET", redis.key(f"node:{A}"), "state_since_ms", (seconds - gone_for_s) * 1000)
        redis.cli("INCR", redis.key("version"))
    engines = Engines()
    engines.answers[A] = refused()
    async with probing(redis, engines=engines) as one:
        if expected is None:
            await aeventually(lambda: registered(redis) == {})
        else:
            await aeventually(lambda: one.engines.looks[A] >= 1)
        assert state_of(redis) == expected


async def test_a_drain_is_finished_when_the_last_request_ends(redis: Space) -> None:
    async with probing(redis) as one, Worker(redis.url, redis.namespace, "w2") as worker:
        await add(one.registry, A, State.READY)
        await worker.registry.refresh()
        held = await worker.take(2)
        await worker.registry.drain(A, 60)
        looks = one.engines.looks[A]
        await aeventually(lambda: one.registry.snapshot.nodes[A].state is State.DRAINING)
        give_back(held[:1])
        held.pop().release(succeeded=True)
        await aeventually(lambda: registered(redis) == {})
        assert one.engines.looks[A] <= looks + 1, "a draining node is not probed"


async def test_no_drain_is_finished_while_counts_may_be_missing_but_at_its_end(redis: Space) -> None:
    """After a restart of Redis a node looks idle until those have come back whose requests run on it."""
    whole = False
    async with probing(redis, counts_are_whole=lambda: whole) as one:
        for url, timeout_s in ((A, 60), (B, 0.3)):
            await add(one.registry, url, State.READY)
            await one.registry.drain(url, timeout_s)
        await aeventually(lambda: set(registered(redis)) == {A})
        whole = True
        await aeventually(lambda: registered(redis) == {})


async def test_a_drain_waits_for_hand_overs_too_but_not_for_those_of_the_dead(redis: Space) -> None:
    """The second lease ends while its hand-over goes on: then nobody comes for that cache any more."""
    lasting = Worker(redis.url, redis.namespace, "w2")
    async with probing(redis) as one, lasting, Worker(redis.url, redis.namespace, "w3", lease_s=1) as dying:
        for url in (A, B):
            await add(one.registry, url, State.READY)
        lasting.handing.begin(A, D)
        dying.handing.begin(B, D)
        await aeventually(lambda: redis.cli("HGETALL", redis.key("handing:w3")) == {f"{B}|{D}": "1"})
        for url in (A, B):
            await one.registry.drain(url, 60)
        await asyncio.sleep(0.2)
        assert set(registered(redis)) == {A, B}
        redis.cli("ZREM", redis.key("workers"), "w3")
        await dying.ledger.close()
        await aeventually(lambda: set(registered(redis)) == {A})
        lasting.handing.end(A, D)
        await aeventually(lambda: registered(redis) == {})


async def test_a_drain_that_has_taken_too_long_waits_for_no_hand_over(redis: Space) -> None:
    async with probing(redis) as one, Worker(redis.url, redis.namespace, "w2") as worker:
        await add(one.registry, A, State.READY)
        worker.handing.begin(A, D)
        await aeventually(lambda: redis.cli("HGETALL", redis.key("handing:w2")) == {f"{A}|{D}": "1"})
        await one.registry.drain(A, 0.3)
        await aeventually(lambda: registered(redis) == {}, within_s=3)


async def test_a_verdict_on_a_node_registered_anew_meanwhile_is_void(redis: Space) -> None:
    async with probing(redis) as one:
        await add(one.registry, A, State.READY)
        one.engines.answers[A] = refused()
        await aeventually(becomes(redis, "down"))
        one.engines.hold = asyncio.Event()
        await aeventually(lambda: one.engines.at_once == 1)
        looked_at = one.registry.snapshot.nodes[A].incarnation
        # The engine was restarted: it registers, and the old look ends after that.
        other = registry_of(redis, "w2")
        await other.refresh()
        await add(other, A, models=("new",))
        await aeventually(lambda: one.registry.snapshot.nodes[A].incarnation != looked_at)
        await aeventually(lambda: one.engines.cancelled >= 1)
        one.engines.answers.clear()
        one.engines.hold.set()
        await aeventually(becomes(redis, "ready"))
        await other.close()


async def test_the_probe_of_a_removed_node_is_ended(redis: Space) -> None:
    async with probing(redis) as one:
        one.engines.hold = asyncio.Event()
        await add(one.registry, A)
        await aeventually(lambda: one.engines.at_once == 1)
        await one.registry.remove(A)
        await aeventually(lambda: one.engines.at_once == 0)
        assert one.engines.cancelled == 1
        assert one.prober._records == {}


async def fleet(space: Space, count: int, state: State = State.PENDING) -> None:
    """Nodes that are there, in this state, before the prober is."""
    nodes = [Node(f"http://n{i}", models=("m",)) for i in range(count)]
    async with Worker(space.url, space.namespace, "w0") as worker:
        await worker.registry.add_all([(node, None) for node in nodes])
    for node in nodes:
        space.cli("HSET", space.key(f"node:{node.url}"), "state", state.value)


async def test_a_fleet_is_probed_64_at_a_time(redis: Space) -> None:
    await fleet(redis, 80)
    engines = Engines()
    engines.hold = asyncio.Event()
    async with probing(redis, engines=engines) as one:
        await aeventually(lambda: engines.at_once == 64 and repr(one.prober) == "<Prober w1 nodes=80 probing=80>")
        engines.hold.set()
        await aeventually(lambda: len(engines.looks) == 80)
        assert engines.most_at_once == 64


async def test_a_fleet_that_times_out_together_goes_down_together(redis: Space) -> None:
    """Every probe asks Redis at the same moment whether its node is busy: none of them may be lost for that."""
    await fleet(redis, 40, State.READY)
    engines = Engines()
    engines.hold = asyncio.Event()
    engines.answers = {f"http://n{i}": timeout() for i in range(40)}
    # A probe that is lost is repeated after the interval only, far behind the deadline; a slow machine loses none.
    rules = replace(RULES, down_after=1, interval_s=600)
    async with probing(redis, engines=engines, rules=rules, timeout_s=15):
        await aeventually(lambda: engines.at_once == 40, within_s=10)
        engines.hold.set()
        await aeventually(
            lambda: {fields["state"] for fields in registered(redis).values()} == {"down"}, within_s=30, every_s=0.1
        )


async def test_damaged_keys_and_totals_are_put_right(redis: Space) -> None:
    async with probing(redis) as one, Worker(redis.url, redis.namespace, "w2") as worker:
        await add(one.registry, A, State.READY)
        await worker.registry.refresh()
        await worker.take(3)
        before = registered(redis)
        redis.cli("DEL", redis.key("nodes"), redis.key(f"node:{A}"))
        redis.cli("HSET", redis.key("unfinished"), A, 40, B, 2)
        await aeventually(lambda: registered(redis) == before and totals(redis) == {A: 3})


# --- one in the deployment ------------------------------------------------------------------------


async def test_one_of_three_probes_and_another_follows_it(redis: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prober_module, "LEASE_MS", 300)
    async with AsyncExitStack() as stack:
        all_three = {
            name: await stack.enter_async_context(probing(redis, name=name, engines=Engines()))
            for name in ("w1", "w2", "w3")
        }
        await add(all_three["w1"].registry, A)
        await aeventually(becomes(redis, "ready"))

        async def holder_at_work() -> SimpleNamespace:
            name = await aeventually(lambda: redis.cli("GET", redis.key("prober")))
            one = all_three[name]
            looks = one.engines.looks[A]
            await aeventually(lambda: one.engines.looks[A] > looks + 3)
            return one

        first = await holder_at_work()
        assert [one for one in all_three.values() if one.engines.looks[A]] == [first]
        # It dies: it says nothing, its lease runs out.
        first.task.cancel()
        since_s = time.monotonic()
        await aeventually(lambda: redis.cli("GET", redis.key("prober")) not in (None, first.name))
        assert time.monotonic() - since_s < 1.5
        second = await holder_at_work()
        assert second is not first
        third = next(one for one in all_three.values() if one not in (first, second))
        assert third.engines.looks[A] == 0
        # The new one knows nothing of the old one's counts, and needs none of them.
        second.engines.answers[A] = refused()
        await aeventually(becomes(redis, "down"))


async def test_who_lost_the_lease_ends_its_probes(redis: Space) -> None:
    async with probing(redis) as one:
        one.engines.hold = asyncio.Event()
        await add(one.registry, A)
        await aeventually(lambda: one.engines.at_once == 1)
        redis.cli("SET", redis.key("prober"), "somebody else", "PX", prober_module.LEASE_MS)
        await aeventually(lambda: one.engines.at_once == 0)
        assert one.prober._records == {}
        assert redis.cli("GET", redis.key("prober")) == "somebody else"


async def test_when_the_loop_has_ended_so_have_its_probes(redis: Space) -> None:
    """The registry's connections are closed next."""
    engines, over = Engines(), []

    async def slow_to_die(url: str, key: str | None) -> Health:
        engines.at_once += 1
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)  # as a connection takes a moment to close
            over.append(url)
        raise AssertionError

    engines.health = slow_to_die  # type: ignore[method-assign]
    async with probing(redis, engines=engines) as one:
        await add(one.registry, A)
        await add(one.registry, B)
        await aeventually(lambda: engines.at_once == 2)
        await one.registry.remove(B)  # cancelled already
        one.task.cancel()
        await asyncio.wait({one.task})
        assert sorted(over) == [A, B]


async def test_the_loop_ends_even_if_its_cancellation_is_lost(redis: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    """As asyncio.wait_for, under the client library, loses one on Python 3.11."""
    async with probing(redis) as one:
        turn, reached = one.prober._turn, asyncio.Event()

        async def lose_one_cancellation() -> None:
            monkeypatch.setattr(one.prober, "_turn", turn)
            reached.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

        monkeypatch.setattr(one.prober, "_turn", lose_one_cancellation)
        await reached.wait()
        one.task.cancel()
        done, _ = await asyncio.wait({one.task}, timeout=2)
        assert done


async def test_a_turn_without_redis_is_no_end(own_redis: Space) -> None:
    async with probing(own_redis) as one:
        await add(one.registry, A)
        await aeventually(lambda: one.registry.snapshot.nodes[A].state is State.READY)
        own_redis.server.kill()
        looks = one.engines.looks[A]
        await asyncio.to_thread(own_redis.server.start)
        one.engines.answers[A] = refused()
        await aeventually(becomes(own_redis, "down"), within_s=5)
        assert one.engines.looks[A] > looks
        assert not one.task.done()


# --- nodes of sources


@pytest.mark.parametrize("state", [State.DOWN, State.PENDING])
def test_a_node_of_a_source_that_is_read_is_never_gone(state: State) -> None:
    away = replace(node(state, since_s=1e6), source="dns://e:1")
    assert expired(away, RULES, NOW_MS, {"dns://e:1"}) is None
    assert expired(away, RULES, NOW_MS, {"dns://other:1"}) is State.GONE
    assert expired(replace(away, source=""), RULES, NOW_MS, {"dns://e:1"}) is State.GONE
