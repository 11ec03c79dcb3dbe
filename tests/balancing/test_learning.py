"""What is learned of a node's speed, on a clock of the test's own; values worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.balancing.learning import CLIP, HALF_LIFE_S, KEPT, SHOWN, Learned, learn

settled = Learned(speed=10.0, weight=KEPT, shown=SHOWN, at_s=100.0)


def taught(before: Learned | None, rate: float, *, seconds: float, a_second: float, unfinished: int = 0) -> Learned:
    """So many answers a second, all alike, for so long; noted four times a second."""
    now_s = before.at_s if before else 0.0
    due = 0.0
    for _ in range(round(seconds * 4)):
        now_s += 0.25
        due += a_second / 4
        if due >= 1:
            before = learn(before, [rate] * int(due), unfinished, now_s)
            due -= int(due)
    assert before is not None
    return before


def test_the_first_answer_is_the_speed() -> None:
    # 3 others run: the root of 4 is 2.
    assert learn(None, [5.0], 3, 7.0) == Learned(10.0, 1.0, 1, 7.0)


def test_the_second_counts_half() -> None:
    # The mean of logarithms: the root of 10 * 40.
    assert learn(Learned(10.0, 1.0, 1, 7.0), [40.0], 0, 7.0).speed == pytest.approx(20.0)


def test_a_node_that_answers_as_fast_with_four_times_the_requests_counts_as_twice_as_fast() -> None:
    assert learn(None, [5.0], 15, 0.0).speed == 2 * learn(None, [5.0], 3, 0.0).speed


def test_one_outlier_moves_little_however_far_out_it_is() -> None:
    for rate in (1e-6, 1e9):
        after = learn(settled, [rate], 0, settled.at_s)
        assert abs(math.log(after.speed / 10)) == pytest.approx(CLIP / (KEPT + 1))
        assert 0.85 < after.speed / 10 < 1.17


def test_an_idle_node_keeps_its_speed_and_does_not_forget_all_that_it_stands_on() -> None:
    tomorrow_s = settled.at_s + 86_400
    assert learn(settled, [10.0], 0, tomorrow_s).speed == pytest.approx(10.0)
    after = learn(settled._replace(weight=500.0), [20.0], 0, tomorrow_s)
    assert after.speed == pytest.approx(10 * 2 ** (1 / (KEPT + 1)))


@pytest.mark.parametrize("a_second", [1, 5, 50])
def test_a_node_that_is_half_as_fast_is_weighed_right_within_30_s_of_traffic(a_second: float) -> None:
    before = taught(None, 10.0, seconds=120, a_second=a_second)
    assert before.speed == pytest.approx(10.0)
    after = taught(before, 5.0, seconds=30, a_second=a_second)
    # 30 s are 3.75 half-lives: a thirteenth of the way is left, 1.05; with few answers the kept ones hold it up.
    assert 5.0 <= after.speed < (5.6 if a_second > 1 else 6.0)
    assert taught(after, 10.0, seconds=30, a_second=a_second).speed > 8.4


def test_samples_lose_half_their_weight_in_a_half_life() -> None:
    after = learn(settled._replace(weight=64.0), [10.0], 0, settled.at_s + HALF_LIFE_S)
    assert after.weight == 33.0


def test_a_clock_that_goes_back_makes_no_sample_heavier() -> None:
    assert learn(settled._replace(weight=64.0), [10.0], 0, settled.at_s - 60).weight == 65.0


def test_a_newcomer_counts_in_full_after_four_answers() -> None:
    now: Learned | None = None
    counted = []
    for _ in range(5):
        now = learn(now, [10.0], 0, 0.0)
        counted.append(now.counted)
    assert counted == pytest.approx([4.0, 6.0, 8.0, 10.0, 10.0])


@given(
    st.lists(st.floats(1e-9, 1e12), min_size=1, max_size=20),
    st.integers(0, 10**6),
    st.floats(0, 1e9),
    st.one_of(
        st.none(), st.builds(Learned, st.floats(1e-9, 1e12), st.floats(0, 1e6), st.integers(0, 4), st.floats(0, 1e9))
    ),
)
def test_a_speed_stays_within_what_was_seen(
    rates: list[float], unfinished: int, now_s: float, before: Learned | None
) -> None:
    after = learn(before, rates, unfinished, now_s)
    seen = [rate * math.sqrt(unfinished + 1) for rate in rates] + ([before.speed] if before else [])
    assert min(seen) * 0.999 <= after.speed <= max(seen) * 1.001
    assert 0 < after.counted <= after.speed * (1 + 1e-12)
