"""Each policy against values worked out by hand, and its distribution over seeded draws."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from app.balancing import POLICIES, Candidate
from app.balancing.min_observed_latency import EXPLORE_RATIO
from app.nodes import Node
from app.store.snapshot import effective_speeds

min_expected = POLICIES["min_expected_latency"]
weighted = POLICIES["random"]
min_observed = POLICIES["min_observed_latency"]

HALF = (0.5, 0.5)


def seen(mean_latency_s: float, unfinished: int = 0) -> Candidate:
    return Candidate(1.0, unfinished, mean_latency_s)


def unseen(unfinished: int = 0, explored: int = 0, speed: float = 1.0) -> Candidate:
    return Candidate(speed, unfinished, None, explored)


def test_the_strategies_are_those_that_the_command_line_offers() -> None:
    assert set(POLICIES) == {"min_expected_latency", "random", "min_observed_latency", "least_expected_delay"}


# --- min_expected_latency -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidates", "chosen"),
    [
        ([Candidate(1, 4), Candidate(1, 3), Candidate(1, 5)], 1),
        ([Candidate(2, 3), Candidate(1, 1)], 1),  # 1.5 against 1
        ([Candidate(4, 3), Candidate(3, 3), Candidate(2, 3)], 0),  # 0.75, 1, 1.5
        ([Candidate(8, 63), Candidate(2, 16)], 0),  # 7.875 against 8
        ([Candidate(8, 65), Candidate(2, 16)], 1),  # 8.125 against 8
        ([Candidate(1, 1, 0.001), Candidate(1, 0, 9.0, 3)], 1),  # latencies and explorations do not matter
        ([Candidate(0.5, 7)], 0),
    ],
)
def test_min_expected_takes_the_least_unfinished_over_speed(candidates: list[Candidate], chosen: int) -> None:
    assert min_expected(candidates, HALF) == (chosen, False)


@pytest.mark.parametrize(("draw", "chosen"), [(0.0, 0), (0.33, 0), (0.34, 2), (0.66, 2), (0.67, 3), (0.999, 3)])
def test_min_expected_breaks_ties_by_the_draw(draw: float, chosen: int) -> None:
    # 2/2, 3/1, 3/3, 1/1: three tie at 1.
    candidates = [Candidate(2, 2), Candidate(1, 3), Candidate(3, 3), Candidate(1, 1)]
    assert min_expected(candidates, (draw, 0.0)) == (chosen, False)


def test_min_expected_idle_nodes_tie_whatever_their_speed() -> None:
    candidates = [Candidate(100, 0), Candidate(0.1, 0)]
    assert [min_expected(candidates, (draw, 0.0))[0] for draw in (0.0, 0.49, 0.5, 0.99)] == [0, 0, 1, 1]


def test_min_expected_fills_three_to_one_in_the_order_worked_out_by_hand() -> None:
    # Speeds 3 and 1, the first of a tie taken: (0,0) 0 | (1,0) 1 | (1,1) 0 | (2,1) 0 | (3,1) tie 0 |
    # (4,1) 4/3 against 1: 1 | (4,2) 0 | (5,2) 0
    counts, order = [0, 0], []
    for _ in range(8):
        index, _ = min_expected([Candidate(3, counts[0]), Candidate(1, counts[1])], (0.0, 0.0))
        counts[index] += 1
        order.append(index)
    assert order == [0, 1, 0, 0, 0, 1, 0, 0]


# --- random ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("draw", "chosen"), [(0.0, 0), (0.2499, 0), (0.25, 1), (0.7499, 1), (0.75, 2), (0.9999, 2)])
def test_random_walks_along_the_speeds(draw: float, chosen: int) -> None:
    assert weighted([Candidate(1, 9), Candidate(2, 0), Candidate(1, 3)], (draw, 0.7)) == (chosen, False)


def test_random_takes_the_last_where_rounding_runs_over_the_end() -> None:
    # 0.1 + 0.2 + 0.3 is 0.6000000000000001; times the largest draw it is 0.6, and 0.6 - 0.1 - 0.2 - 0.3
    # is exactly 0, which is not below 0.
    candidates = [Candidate(0.1, 0), Candidate(0.2, 0), Candidate(0.3, 0)]
    assert weighted(candidates, (0.9999999999999999, 0.0)) == (2, False)


def test_random_shares_by_speed() -> None:
    draws = random.Random(20)
    chosen = Counter(weighted([Candidate(3, 0), Candidate(1, 0)], (draws.random(), 0.0))[0] for _ in range(10_000))
    # Binomial(10000, 3/4): 7500, standard deviation 43.
    assert abs(chosen[0] - 7500) <= 150


# --- min_observed_latency -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("candidates", "draws", "expected"),
    [
        ([seen(0.3), seen(0.2), seen(0.4)], HALF, (1, False)),
        ([seen(0.2, unfinished=500), seen(0.3)], HALF, (0, False)),  # what runs does not matter: its flaw
        ([seen(0.2), seen(0.5), seen(0.2)], (0.49, 0.5), (0, False)),
        ([seen(0.2), seen(0.5), seen(0.2)], (0.5, 0.5), (2, False)),
        # without history: explored at once the first time, whatever the second draw
        ([seen(0.1), unseen()], (0.0, 0.999), (1, True)),
        # ... one request at a time
        ([seen(0.1), unseen(unfinished=1, explored=1)], (0.0, 0.0), (0, False)),
        ([seen(0.1), unseen(unfinished=1)], (0.0, 0.0), (0, False)),
        # ... again with a chance of one in ten after an exploration that brought nothing
        ([seen(0.1), unseen(explored=1)], (0.0, 0.0999), (1, True)),
        ([seen(0.1), unseen(explored=1)], (0.0, 0.1), (0, False)),
        ([seen(0.1), unseen(explored=40)], (0.0, 0.0999), (1, True)),
        # several to explore: by the first draw
        ([unseen(), seen(0.1), unseen()], (0.49, 0.5), (0, True)),
        ([unseen(), seen(0.1), unseen()], (0.5, 0.5), (2, True)),
        # no history anywhere and nothing to explore freely: the least unfinished / speed
        ([unseen(2, 1, speed=1), unseen(3, 1, speed=2)], (0.0, 0.5), (1, True)),  # 2 against 1.5
        ([unseen(2, 1, speed=1), unseen(4, 1, speed=2)], (0.5, 0.5), (1, True)),  # a tie at 2
        ([unseen(0, 3), unseen(1, 3)], (0.0, 0.5), (0, True)),
        # a node with history is preferred to a loaded one without
        ([unseen(1, 1), seen(99.0, unfinished=50)], (0.0, 0.0), (1, False)),
        ([seen(0.0)], HALF, (0, False)),
    ],
)
def test_min_observed(candidates: list[Candidate], draws: tuple[float, float], expected: tuple[int, bool]) -> None:
    assert min_observed(candidates, draws) == expected


def test_min_observed_explores_a_failing_node_with_one_request_in_ten() -> None:
    draws = random.Random(21)
    candidates = [seen(0.5), unseen(explored=1)]
    chosen = Counter(min_observed(candidates, (draws.random(), draws.random()))[0] for _ in range(10_000))
    # Binomial(10000, 1/10): 1000, standard deviation 30.
    assert EXPLORE_RATIO == 0.1
    assert abs(chosen[1] - 1000) <= 100


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_equal_candidates_are_taken_equally_often(policy: str) -> None:
    draws = random.Random(22)
    candidates = [Candidate(1, 0, 0.25)] * 3
    chosen = Counter(POLICIES[policy](candidates, (draws.random(), draws.random()))[0] for _ in range(9_000))
    # Binomial(9000, 1/3): 3000, standard deviation 45.
    assert all(abs(chosen[index] - 3000) <= 150 for index in range(3))


# --- speeds that are not given --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "effective"),
    [
        ((4.0, None, 2.0), (4.0, 3.0, 2.0)),  # the average of those that have one
        ((None, None), (1.0, 1.0)),
        ((8.0, None), (8.0, 8.0)),
        ((0.5,), (0.5,)),
        ((), ()),
    ],
)
def test_a_node_without_speed_counts_as_the_average(
    given: tuple[float | None, ...], effective: tuple[float, ...]
) -> None:
    assert effective_speeds(Node(f"http://n{i}", speed=speed) for i, speed in enumerate(given)) == effective


def test_effective_speeds_takes_any_iterable_once() -> None:
    assert effective_speeds(iter([Node("http://a", speed=2.0), Node("http://b")])) == (2.0, 2.0)


# --- least_expected_delay -------------------------------------------------------------------------

least_expected = POLICIES["least_expected_delay"]


def learned(speed: float, unfinished: int = 0, *, given: float = 1.0) -> Candidate:
    return Candidate(given, unfinished, learned=speed)


def newcomer(unfinished: int = 0, *, given: float = 1.0) -> Candidate:
    return Candidate(given, unfinished)


@pytest.mark.parametrize(
    ("candidates", "draws", "chosen"),
    [
        ([learned(10, 3), learned(20, 6)], HALF, 1),  # 0.4 against 0.35
        ([learned(10, 2), learned(20, 6)], HALF, 0),  # 0.3
        ([learned(10), learned(20)], HALF, 1),  # idle ones too: the faster
        ([learned(10, 1, given=9), learned(20, given=1)], HALF, 1),  # what was learned goes before what was said
        ([learned(10, 1), learned(20, 3), learned(5)], (0.34, 0.5), 1),  # all three tie at 0.2: by the draw
        ([learned(10, 1), learned(20, 3), learned(5)], (0.67, 0.5), 2),
        # Nobody is learned: the operator's speeds, or none.
        ([newcomer(1, given=1), newcomer(2, given=2)], HALF, 1),  # 2 against 1.5
        ([newcomer(2), newcomer(1), newcomer(3)], HALF, 1),
        # One of two is: the other counts as 10 * (1 - 0.9 / 2) = 5.5. An idle one at 0.18 against 0.2 and 0.1.
        ([learned(10, 1), newcomer()], HALF, 1),
        ([learned(10, 0), newcomer()], HALF, 0),
        ([learned(10, 1), newcomer(1)], HALF, 0),  # 0.36
        ([learned(10, 3), newcomer(1)], HALF, 1),
        ([learned(10, 0, given=1), newcomer(given=4)], HALF, 1),  # 22, by the operator's word
        # Three of four: 10 * (1 - 0.9 * 3 / 4) = 3.25, 0.31.
        ([learned(10, 3), learned(10, 3), learned(10, 3), newcomer()], HALF, 3),
        ([learned(10, 2), learned(10, 3), learned(10, 3), newcomer()], HALF, 0),
        # Exploring: an idle newcomer with a chance of one in ten, never a busy one.
        ([learned(10, 0), newcomer()], (0.5, 0.0999), 1),
        ([learned(10, 0), newcomer(1)], (0.5, 0.0999), 0),
        ([learned(10, 0), newcomer(), newcomer()], (0.5, 0.0999), 2),
        # ... any idle node with one in 200.
        ([learned(10, 0), learned(1, 0)], (0.5, 0.0049), 1),
        ([learned(10, 0), learned(1, 0)], (0.5, 0.005), 0),
        ([learned(10, 0), learned(1, 1)], (0.5, 0.0), 0),
        ([learned(10, 8), learned(1, 1)], (0.5, 0.0), 0),  # 0.9 against 2: nobody idles
    ],
)
def test_least_expected(candidates: list[Candidate], draws: tuple[float, float], chosen: int) -> None:
    assert least_expected(candidates, draws) == (chosen, False)


@pytest.mark.parametrize("failed", [True, False])
def test_least_expected_gives_a_node_that_never_answers_at_most_one_in_ten(failed: bool) -> None:
    draws = random.Random(23)
    # It fails at once, so it always idles; the others are idle too, and learned.
    others = [learned(10), learned(40)]
    candidates = [*others, newcomer() if not failed else learned(40 / 2**4)]
    chosen = Counter(least_expected(candidates, (draws.random(), draws.random()))[0] for _ in range(10_000))
    # Binomial(10000, 1/10): 1000, standard deviation 30. What failed is explored with one in 200, a third of it.
    assert chosen[2] <= (1100 if not failed else 50)
