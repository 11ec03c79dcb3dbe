"""The simulation that docs/balancing.md rests on, against times worked out by hand; no Redis, no real time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bench.balance import means, words
from bench.balancing import plot
from bench.balancing.dispatchers import InTurn, Knowing, Told, TwoChoices
from bench.balancing.scenarios import FOUR, SCENARIOS, Aim
from bench.balancing.simulation import BASE_S, FLAT, FULL, TOKENS, Request, Scenario, arrivals, run


class Fixed:
    """Everything to one node; remembers when what ended."""

    def __init__(self, node: int = 0) -> None:
        self.node = node
        self.ended: list[Request] = []

    def choose(self, request: Request, counts: Sequence[int], now_s: float) -> int:
        return self.node

    def finished(self, request: Request, now_s: float) -> None:
        self.ended.append(request)

    def changed(self, node: int, speed: float) -> None:
        pass


def test_an_answer_alone_takes_a_step_a_token() -> None:
    scenario = Scenario("", (1.0, 4.0), 1e-6, requests=2, lengths="fixed")
    for node, speed in enumerate(scenario.speeds):
        assert run(scenario, Fixed(node), 1).mean_s == pytest.approx(TOKENS * BASE_S * (FLAT + 1) / speed)


def test_at_most_so_many_run_and_the_others_wait_for_a_place() -> None:
    # All come at once, all as long: the seventeenth begins when the first sixteen end.
    scenario = Scenario("", (1.0,), 1e9, requests=17, lengths="fixed")
    fixed = Fixed()
    run(scenario, fixed, 1)
    ended_s = [request.ended_s for request in fixed.ended]
    # The very first step is taken before the others have come.
    together_s = BASE_S * (TOKENS - 1) * (FLAT + FULL)
    assert ended_s[0] == pytest.approx(BASE_S * (FLAT + 1) + together_s, rel=1e-6)
    assert ended_s[-1] > ended_s[0] + BASE_S * (TOKENS - 2) * (FLAT + 1)


def test_a_full_engine_does_as_much_whatever_a_step_is_made_of() -> None:
    rates = {
        Scenario("", FOUR, 0.75, flat=flat, full=full).rate for flat, full in ((8, 16), (2, 16), (32, 16), (32, 64))
    }
    assert max(rates) == pytest.approx(min(rates))
    # 8 times 16 tokens in a step of 24 * BASE_S, at 75 %.
    assert max(rates) == pytest.approx(0.75 * 8 * 16 / (24 * BASE_S) / TOKENS)


def test_the_same_seed_is_the_same_traffic() -> None:
    scenario = SCENARIOS[0][0]
    # As texts: what has not ended yet is at no number, which is not equal to itself.
    assert repr(arrivals(scenario, 3)) == repr(arrivals(scenario, 3)) != repr(arrivals(scenario, 4))


def test_who_knows_everything_hears_of_changes_and_who_was_told_does_not() -> None:
    scenario = Scenario("", (1.0, 2.0), 0.5)
    request = arrivals(scenario, 1)[0]
    knowing = Knowing(scenario, 1, lambda count, speed: (count + 1) / speed)
    told = Told(scenario, 1, lambda count, speed: (count + 1) / speed)
    for dispatcher in (knowing, told):
        assert dispatcher.choose(request, [0, 0], 0.0) == 1
        dispatcher.changed(1, 0.25)
    assert knowing.choose(request, [0, 0], 0.0) == 0
    assert told.choose(request, [0, 0], 0.0) == 1


def test_one_after_the_other_and_the_less_busy_of_two() -> None:
    scenario = Scenario("", (1.0, 1.0), 0.5)
    request = arrivals(scenario, 1)[0]
    in_turn = InTurn(scenario, 1, lambda count, _: count)
    assert [in_turn.choose(request, [9, 0], 0.0) for _ in range(3)] == [0, 1, 0]
    assert {TwoChoices(scenario, seed, lambda count, _: count).choose(request, [3, 2], 0.0) for seed in range(9)} == {1}


def test_what_is_said_of_it() -> None:
    assert means([(1.0, 2.0), (3.0, 4.0)]) == (2.0, 3.0)
    assert [words(aim) for aim in (Aim(1.05, 1.12), Aim(1.1), Aim())] == ["1.05 / 1.12", "1.10", ""]
    drawn = plot.plot("<title>", {"a & b": {"ours": 1.0, "theirs": 99.0}})
    assert "&lt;title&gt;" in drawn and "a &amp; b" in drawn
    assert plot.x(99.0) == plot.x(plot.HIGH) == plot.WIDTH - plot.RIGHT
