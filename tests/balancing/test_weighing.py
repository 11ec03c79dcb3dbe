"""What a policy says that it would do, against what its `choose` does with every draw there is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.balancing import ENCODER_POLICIES, POLICIES, WEIGHS, Candidate, Encoder, weigh_encoders

SLICES = 60
"""Of the first draw: groups of 1 to 6 equals all divide it, so the middles of the slices meet each just as often."""
SECOND = (0.002, Fraction(1, 200)), (0.05, Fraction(19, 200)), (0.5, Fraction(9, 10))
"""A second draw that explores whoever idles, one that explores newcomers, one that does neither, with their chances:
EXPLORE_RATIO and EXPLORE_NEW are 0.1, EXPLORE_IDLE is 0.005."""

MEANS = st.one_of(st.none(), st.sampled_from([0.25, 0.5]), st.floats(0, 1e6))
FEW = st.lists(
    st.builds(
        Candidate,
        st.sampled_from([1.0, 2.0, 0.5, 1e-300, 1e300]),
        st.integers(0, 3),
        MEANS,
        st.integers(0, 2),
        st.one_of(st.none(), st.sampled_from([1.0, 2.0, 40.0])),
    ),
    min_size=1,
    max_size=6,
)


def chances_by_choosing(policy: str, candidates: Sequence[Candidate], slices: int) -> list[Fraction]:
    """How often `choose` takes each, over all draws."""
    taken: Counter[int] = Counter()
    for second, weight in SECOND:
        for one in range(slices):
            index, _ = POLICIES[policy](candidates, ((one + 0.5) / slices, second))
            taken[index] += weight / slices  # type: ignore[assignment]
    return [Fraction(taken[index]) for index in range(len(candidates))]


@pytest.mark.parametrize("policy", ["min_expected_latency", "min_observed_latency", "least_expected_delay"])
@settings(max_examples=40, deadline=None)
@given(candidates=FEW)
@example(candidates=[Candidate(5e-324, 1), Candidate(5e-324, 2)])
@example(candidates=[Candidate(1, 0, 0.5), Candidate(1, 0), Candidate(1, 0, None, 1)])
def test_the_chance_is_how_often_it_is_chosen(policy: str, candidates: list[Candidate]) -> None:
    weighing = WEIGHS[policy](candidates)
    assert weighing.chances == pytest.approx([*map(float, chances_by_choosing(policy, candidates, SLICES))])


@settings(max_examples=40, deadline=None)
@given(speeds=st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_the_chance_of_random_is_how_often_it_is_chosen(speeds: list[int]) -> None:
    candidates = [Candidate(float(speed), 0) for speed in speeds]
    exact = chances_by_choosing("random", candidates, sum(speeds))
    assert exact == [Fraction(speed, sum(speeds)) for speed in speeds]
    assert WEIGHS["random"](candidates).chances == pytest.approx([*map(float, exact)])


def test_of_speeds_that_are_too_large_to_add_random_takes_the_last() -> None:
    candidates = [Candidate(1e308, 0), Candidate(1e308, 0), Candidate(1.0, 0)]
    assert {POLICIES["random"](candidates, (draw, 0.5))[0] for draw in (0.0, 0.3, 0.99)} == {2}
    assert WEIGHS["random"](candidates).chances == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=30, deadline=None)
@given(candidates=FEW, draws=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)))
def test_whoever_is_chosen_has_the_least_score_or_is_explored(
    policy: str, candidates: list[Candidate], draws: tuple[float, float]
) -> None:
    index, exploring = POLICIES[policy](candidates, draws)
    weighing = WEIGHS[policy](candidates)
    assert math.isclose(sum(weighing.chances), 1)
    assert weighing.chances[index] > 0 or policy == "random"  # 1e-300 of 1e300 is less than a float can say
    known = [score for score in weighing.scores if score is not None]
    if policy == "random":
        assert known == []
    elif policy == "least_expected_delay" and draws[1] < 0.1:
        assert candidates[index].unfinished == 0 or weighing.scores[index] == min(known)
    elif not exploring:
        assert weighing.scores[index] == min(known)
    else:
        assert weighing.scores[index] is None, "what is explored has no history"
    assert weighing.rule


def test_weighings_worked_out_by_hand() -> None:
    # 2/4, 1/2, 3/2: two tie at 0.5.
    found = WEIGHS["min_expected_latency"]([Candidate(4, 2), Candidate(2, 1), Candidate(2, 3)])
    assert (found.scores, found.chances) == ([0.5, 0.5, 1.5], [0.5, 0.5, 0.0])
    found = WEIGHS["random"]([Candidate(3, 9), Candidate(1, 0)])
    assert (found.scores, found.chances) == ([None, None], [0.75, 0.25])
    # 0.2 is the least; the third was explored in vain, so one request in ten goes there; the fourth is busy.
    found = WEIGHS["min_observed_latency"](
        [Candidate(1, 0, 0.2), Candidate(1, 0, 0.3), Candidate(1, 0, None, 2), Candidate(1, 1)]
    )
    assert found.scores == [0.2, 0.3, None, None]
    assert found.chances == pytest.approx([0.9, 0, 0.1, 0])


# --- encoders -------------------------------------------------------------------------------------

ENCODERS = st.lists(
    st.builds(Encoder, st.sampled_from([1.0, 2.0, 3.0, 0.1]), st.integers(0, 3), st.floats(-9, 9)),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("policy", sorted(ENCODER_POLICIES))
@settings(max_examples=30, deadline=None)
@given(encoders=ENCODERS, start=st.integers(0, 9))
def test_the_next_encoder_is_the_one_that_gets_the_item(policy: str, encoders: list[Encoder], start: int) -> None:
    before = repr(encoders)
    weighing = weigh_encoders(policy, encoders, start)
    assert repr(encoders) == before, "nothing is moved by looking"
    (index,) = ENCODER_POLICIES[policy](encoders, start, 1)
    assert weighing.chances == [float(other == index) for other in range(len(encoders))]
    scores = [score for score in weighing.scores if score is not None]
    assert scores == [] if policy == "round_robin" else weighing.scores[index] == min(scores)


def test_scores_of_encoders_worked_out_by_hand() -> None:
    def two() -> list[Encoder]:
        return [Encoder(2.0, 3, 1.0), Encoder(1.0, 1, -0.5)]

    assert weigh_encoders("least_unfinished", two(), 0).scores == [1.5, 1.0]
    assert weigh_encoders("weighted", two(), 0).scores == [-3.0, -0.5]  # credit and speed: what each is owed
    found = weigh_encoders("round_robin", two(), 5)
    assert (found.scores, found.chances) == ([None, None], [0.0, 1.0])
