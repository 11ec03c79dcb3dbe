"""After its time an open breaker lets one request of the whole deployment try the node: it closes, or opens for longer.

Probes never end here once a node is ready (`unprobed`), so what moves a breaker is requests alone.
"""

from __future__ import annotations

import pytest

from tests.integration.failing import (
    BREAKER_FLEET,
    FIRST_BYTE_S,
    ONLY_CHATS,
    OPEN_S,
    N,
    asked,
    becomes,
    breaker,
    failures,
    field,
    half_open,
    made_its_trial,
    never_twice,
    open_for_s,
    tries,
    trip,
    unprobed,
)
from tests.integration.stage import Stage, beside, start
from tests.support import load
from tests.support.wait import eventually

FLEET = BREAKER_FLEET


pytestmark = pytest.mark.timeout(120)  # the first test of the scenarios waits for all of them


# --- half-open


@beside
def test_half_open_lets_exactly_one_request_of_the_deployment_through(stage: Stage) -> None:
    tested = unprobed(stage)
    trip(stage, tested)
    good = unprobed(stage, ttft_s=0.1)
    tested.set(ttft_s=0.9)  # so long takes the trial
    half_open(stage, tested)
    answers = stage.many(200, concurrency=100).result(20)
    assert all(answer.ok for answer in answers)
    trial, *later = asked(tested)
    assert trial.finished_s is not None
    assert [r for r in later if r.started_s < trial.finished_s] == []
    during_it = [r for r in asked(good) if trial.started_s < r.started_s < trial.finished_s]
    assert len(during_it) > 50, "there must have been enough that could have gone there"
    # It went well: all workers of both hosts use the node again.
    becomes(stage, tested, "closed")
    assert failures(stage, tested) == 0
    for engine in (tested, good):
        engine.set(ttft_s=0.7)
        engine.forget()
    assert all(answer.ok for answer in stage.many(40).result(10))
    assert tries(tested, good) == [20, 20]


@beside
def test_a_trial_that_fails_opens_it_for_twice_as_long(stage: Stage) -> None:
    tested = unprobed(stage)
    trip(stage, tested)
    good = unprobed(stage)
    tested.set(cut_after=-1)
    for opens, longest_s in ((2, 2 * OPEN_S), (3, 4 * OPEN_S)):
        half_open(stage, tested)
        tested.forget()
        answers = made_its_trial(stage, tested, at_once=10)
        assert all(answer.ok for answer in answers), "the trial's client is served by another node"
        assert len(tested.requests) == 1
        becomes(stage, tested, "open")
        assert longest_s - 0.9 < open_for_s(stage, tested) <= longest_s
        assert field(stage, tested, "breaker_opens") == str(opens)
    # After a good trial it begins anew.
    tested.set(cut_after=None)
    half_open(stage, tested)
    eventually(lambda: stage.many(4).result(5) and breaker(stage, tested) == "closed")
    stage.deployment.post("/nodes/remove", {"url": good.url})
    tested.set(cut_after=-1)
    stage.many(N, concurrency=1).result(5)
    becomes(stage, tested, "open")
    assert 0 < open_for_s(stage, tested) <= OPEN_S
    assert field(stage, tested, "breaker_opens") == "1"


@beside
def test_a_trial_answered_with_a_refusal_closes_it(stage: Stage) -> None:
    """400 is the client's fault; that it came shows that the node is well."""
    tested = unprobed(stage)
    trip(stage, tested)
    unprobed(stage)
    tested.set(status=400)
    half_open(stage, tested)
    assert made_its_trial(stage, tested)[-1].status == 400
    becomes(stage, tested, "closed")


@beside
def test_a_trial_that_is_silent_opens_it_again(stage: Stage) -> None:
    tested = unprobed(stage)
    trip(stage, tested)
    good = unprobed(stage)
    tested.set(blackhole=True, only_for=ONLY_CHATS)
    half_open(stage, tested)
    answers = made_its_trial(stage, tested, at_once=30)
    assert all(answer.ok for answer in answers)
    assert tries(tested, good) == [1, len(answers)]
    becomes(stage, tested, "open")
    assert OPEN_S < open_for_s(stage, tested) <= 2 * OPEN_S


@beside
def test_a_client_that_leaves_its_trial_decides_nothing(stage: Stage) -> None:
    """The node is neither well nor broken by that, and the next request is the trial."""
    tested = unprobed(stage)
    trip(stage, tested)
    unprobed(stage)
    tested.set(ttft_s=5)
    half_open(stage, tested)
    assert made_its_trial(stage, tested, leave_after_s=0.7)[-1].left
    eventually(lambda: len(tested.aborts) == 1)
    assert breaker(stage, tested) == "half_open"
    tested.set(ttft_s=0)
    eventually(lambda: stage.many(2).result(5) and breaker(stage, tested) == "closed", within_s=3)


# --- R21: over time, with traffic through all workers


@beside
def test_r21_a_broken_node_gets_at_most_one_trial_in_a_cool_down(stage: Stage) -> None:
    broken, good = unprobed(stage), unprobed(stage)
    broken.set(cut_after=-1)
    with stage.traffic(every_s=0.02) as traffic:
        eventually(lambda: field(stage, broken, "breaker_opens") == "3", within_s=10)
        broken.set(cut_after=None)
        eventually(lambda: breaker(stage, broken) == "closed", within_s=8)
        back = len(broken.requests)
        eventually(lambda: len(broken.requests) > back + 10)
    assert traffic.failed == []
    failed = [r.started_s for r in broken.requests if r.status == 200 and r.sent_bytes == 0]
    until_open, trials = failed[:-2], failed[-2:]
    # What was on its way when the fifth failure was counted may have failed as well: more of it on a slow machine.
    assert N <= len(until_open) <= N + 12, failed
    assert trials[0] - until_open[-1] >= OPEN_S - 0.05
    assert trials[1] - trials[0] >= 2 * OPEN_S - 0.05
    good_trial = next(r for r in broken.requests if r.sent_bytes)
    assert good_trial.started_s - trials[1] >= 4 * OPEN_S - 0.05
    assert len(good.requests) > 100


def test_r20_every_request_beside_a_silent_node_ends_well_and_others_are_not_slowed(stage: Stage) -> None:
    silent, _ = unprobed(stage), unprobed(stage)
    other_model = f"{stage.model}-other"
    stage.engine(models=(other_model,))
    silent.set(blackhole=True)
    answers = stage.many(200, concurrency=50)
    others = start(load.many(stage.urls, 200, model=other_model, concurrency=20)).result(20)
    took = [a.finished_s - a.started_s for a in answers.result(20) if a.ok and a.finished_s]
    assert len(took) == 200
    assert max(took) < 2 * FIRST_BYTE_S, "nobody waits for two silent nodes"
    never_twice(silent)
    assert all(answer.ok for answer in others)
    other_took = sorted(a.finished_s - a.started_s for a in others if a.finished_s)
    assert other_took[len(other_took) // 2] < FIRST_BYTE_S / 2, "who waited for the silent node took all of it"
    # Its time to be open may be over by now.
    eventually(lambda: int(field(stage, silent, "breaker_opens") or 0) >= 1)
