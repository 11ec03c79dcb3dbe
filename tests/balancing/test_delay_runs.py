"""least_expected_delay over whole runs: its twins, simulated engines, a virtual clock. Nothing here takes real time.

Speeds are never told. What is compared with is a dispatcher that knows them; see bench/balance.py, which does the same
with the Lua files, more often.
"""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace

import pytest

from bench.balancing.dispatchers import Knowing, Told, Twin
from bench.balancing.scenarios import FOUR
from bench.balancing.simulation import Request, Result, Scenario, run

SEEDS = range(4)


def perfect(scenario: Scenario, seed: int) -> Result:
    return run(scenario, Knowing(scenario, seed, lambda count, speed: (count + 1) / speed), seed)


def ratio(scenario: Scenario) -> float:
    """Of the mean, over some seeds: each strays by a few hundredths."""
    return statistics.fmean(
        run(scenario, Twin(scenario, seed), seed).mean_s / perfect(scenario, seed).mean_s for seed in SEEDS
    )


@pytest.mark.parametrize("load", [0.4, 0.75, 0.9])
def test_untold_it_is_as_good_as_one_that_knows_the_speeds(load: float) -> None:
    assert ratio(Scenario("", FOUR, load)) <= 1.05


def test_an_equal_fleet_is_served_as_by_join_the_shortest_queue() -> None:
    scenario = Scenario("", (1.0,) * 8, 0.75)
    shortest = [run(scenario, Told(scenario, seed, lambda count, _: count), seed).mean_s for seed in SEEDS]
    ours = [run(scenario, Twin(scenario, seed), seed).mean_s for seed in SEEDS]
    assert statistics.fmean(ours) <= 1.02 * statistics.fmean(shortest)


@pytest.mark.parametrize(("node", "speed"), [(3, 2.0), (0, 0.5)])
def test_30_s_after_a_node_became_half_as_fast_it_is_weighed_right(node: int, speed: float) -> None:
    changed = Scenario("", FOUR, 0.6, 2600, changes=((10.0, node, speed),), since_s=40.0)
    assert ratio(changed) <= 1.05


def test_nobody_oscillates() -> None:
    scenario = Scenario("", FOUR, 0.75, 2000)
    twin = Twin(scenario, 1)
    shares = run(scenario, twin, 1).shares
    begin = len(twin.chosen) // 5
    for at in range(begin, len(twin.chosen) - 250, 250):
        part = Counter(node for _, node, _ in twin.chosen[at : at + 250])
        for node, share in enumerate(shares):
            # Binomial(250, share), three standard deviations, and what queues do.
            assert abs(part[node] / 250 - share) <= 3 * (share * (1 - share) / 250) ** 0.5 + 0.02


def test_nobody_herds() -> None:
    """Whoever is chosen is never far above its fair part of what is in flight."""
    scenario = Scenario("", (1.0,) * 8, 0.75, 1600)
    twin = Twin(scenario, 1)
    run(scenario, twin, 1)
    settled = [(node, counts) for at_s, node, counts in twin.chosen if at_s > 3]
    above = [counts[node] + 1 - sum(counts) / len(counts) for node, counts in settled]
    assert max(above) <= 4 and statistics.fmean(above) <= 1


def test_what_fails_at_once_gains_nothing() -> None:
    # The fastest of all fails everything from second 5 on: it has nothing unfinished, ever.
    failing = Scenario("", FOUR, 0.4, 2000, changes=((5.0, 3, 0.0),), since_s=5.0)
    twin = Twin(failing, 1)
    shares = run(failing, twin, 1).shares
    assert twin.halved[3] == 4
    assert shares[3] < 0.3  # without a breaker, which ends it after five failures
    shortest = run(failing, Told(failing, 1, lambda count, speed: count / speed), 1).shares[3]
    assert shares[3] < shortest / 2


def test_a_newcomer_gets_few_requests_before_it_has_shown_its_speed() -> None:
    slow = Scenario("", (*FOUR, 0.25), 0.7, 1200)
    twin = Twin(slow, 1, absent={4: 8.0})
    run(slow, twin, 1)
    known_s = twin.learned[4].at_s
    before = [at_s for at_s, node, _ in twin.chosen if node == 4 and at_s < 9.0]
    assert 1 <= len(before) <= 5 and known_s > 8.0
    # One as fast as the fastest is in full use soon after.
    fast = Scenario("", (*FOUR, 4.0), 0.7, 1600)
    twin = Twin(fast, 1, absent={4: 8.0})
    run(fast, twin, 1)
    later = Counter(node for at_s, node, _ in twin.chosen if at_s > 11)
    assert later[4] / later.total() == pytest.approx(later[3] / later.total(), rel=0.3)


def test_a_slow_node_that_nobody_needs_is_explored_and_found_to_have_become_fast() -> None:
    idle = Scenario("", (1.0, 0.125, 1.0), 0.15, 3000)
    share = run(idle, Twin(idle, 1), 1).shares[1]
    assert 0 < share < 0.03
    found = replace(idle, changes=((20.0, 1, 1.0),), since_s=60.0, requests=3000)
    assert run(found, Twin(found, 1), 1).shares[1] > 0.2


def test_what_never_answers_draws_no_more_than_a_few() -> None:
    # It has no sample, ever: explored while it idles, which is once, and then it counts as a slow one that is busy.
    hanging = Scenario("", (*FOUR, 1e-9), 0.4, 2000)
    twin = Twin(hanging, 1)
    run(hanging, twin, 1)
    drawn = [at_s for at_s, node, _ in twin.chosen if node == 4]
    assert 1 <= len(drawn) <= 6
    # With join the shortest queue it is what all others have, whenever they have it.
    shortest = run(hanging, Told(hanging, 1, lambda count, _: count), 1).shares[4]
    assert shortest * 2000 > len(drawn)


@pytest.mark.parametrize("times", [1e-3, 1e3])
def test_one_answer_that_took_a_thousand_times_as_long_or_as_short_changes_no_share(times: float) -> None:
    class Off(Twin):
        def finished(self, request: Request, now_s: float) -> None:
            if request.node == 3 and self.at_s is None and now_s > 10:
                self.at_s = now_s
                request = replace(request, at_s=now_s - times * (now_s - request.at_s))
            super().finished(request, now_s)

        at_s: float | None = None

    scenario = Scenario("", FOUR, 0.75, 1600)
    shares = []
    for twin in (Twin(scenario, 1), Off(scenario, 1)):
        run(scenario, twin, 1)
        after = Counter(node for at_s, node, _ in twin.chosen if 10 < at_s < 14)
        shares.append(after[3] / after.total())
    assert shares[1] == pytest.approx(shares[0], abs=0.03) and shares[1] != shares[0]
