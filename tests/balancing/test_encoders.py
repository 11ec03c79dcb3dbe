"""The encoder policies: assignments worked out by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.balancing import ENCODER_POLICIES, Encoder
from app.balancing.encoders import assign_round_robin, least_unfinished, round_robin, weighted

E0, E1, E2, E3 = "http://e0:1", "http://e1:1", "http://e2:1", "http://e3:1"
THREE = [E0, E1, E2]


def of_speeds(*speeds: float) -> list[Encoder]:
    return [Encoder(speed) for speed in speeds]


# --- round_robin ------------------------------------------------------------------------------------


def test_r74_requests_of_two_one_three_and_one_items_go_on_where_the_last_one_ended() -> None:
    """The vector of vLLM's own test of its proxy (tests/v1/ec_connector/unit/test_epd_proxy_round_robin.py)."""
    position, assigned = 0, []
    for count in (2, 1, 3, 1):
        urls, position = assign_round_robin(THREE, position, count)
        assigned.append(urls)
    assert assigned == [[E0, E1], [E2], [E0, E1, E2], [E0]]
    assert position == 1


@pytest.mark.parametrize(
    ("urls", "start", "count", "assigned", "after"),
    [
        (THREE, 0, 0, [], 0),
        (THREE, 2, 0, [], 2),
        (THREE, 2, 1, [E2], 0),
        (THREE, 1, 7, [E1, E2, E0, E1, E2, E0, E1], 2),
        ([E0], 0, 3, [E0, E0, E0], 0),
        # The set has changed: the same position number, modulo the new size.
        ([E0, E1], 2, 2, [E0, E1], 0),
        ([E0, E1], 7, 1, [E1], 0),
        ([E0, E1, E2, E3], 2, 3, [E2, E3, E0], 1),
    ],
)
def test_assignments_by_hand(urls: list[str], start: int, count: int, assigned: list[str], after: int) -> None:
    assert assign_round_robin(urls, start, count) == (assigned, after)


@given(
    size=st.integers(1, 7),
    start=st.integers(0, 10**6),
    counts=st.lists(st.integers(0, 9), max_size=12),
)
def test_any_run_of_assignments_is_one_round_after_the_other(size: int, start: int, counts: list[int]) -> None:
    urls = [f"http://e{n}:1" for n in range(size)]
    run: list[str] = []
    position = start
    for count in counts:
        assigned, position = assign_round_robin(urls, position, count)
        run += assigned
        assert 0 <= position < size
    assert run == [urls[(start + n) % size] for n in range(sum(counts))]
    share = Counter(run)
    assert not run or max(share.values()) - min(share.get(url, 0) for url in urls) <= 1


@given(speeds=st.lists(st.floats(0.1, 10), min_size=1, max_size=7), start=st.integers(0, 99), items=st.integers(0, 20))
def test_the_policy_says_the_same_as_the_pure_function(speeds: list[float], start: int, items: int) -> None:
    urls = [f"http://e{n}:1" for n in range(len(speeds))]
    encoders = of_speeds(*speeds)
    assert [urls[n] for n in round_robin(encoders, start, items)] == assign_round_robin(urls, start, items)[0]
    assert encoders == of_speeds(*speeds)


# --- weighted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speeds", "order"),
    [
        # nginx's own example, in the commit that brought the smooth algorithm (52327e0627f4).
        ((5, 1, 1), "aabacaa"),
        # (1,2,3): c -> (1,2,-3) | (2,4,0) b -> (2,-2,0) | (3,0,3) tie a -> (-3,0,3) | (-2,2,6) c -> (-2,2,0)
        # | (-1,4,3) b -> (-1,-2,3) | (0,0,6) c -> (0,0,0)
        ((1, 2, 3), "cbacbc"),
        ((1, 1, 1), "abc"),
        ((2, 1), "aba"),
        ((0.5, 0.25), "aba"),
        ((7,), "aaaaaaa"),
    ],
)
def test_weighted_is_nginxs_smooth_sequence_and_begins_again_after_a_round(
    speeds: tuple[float, ...], order: str
) -> None:
    encoders = of_speeds(*speeds)
    for _ in range(3):
        assert "".join("abc"[n] for n in weighted(encoders, 0, len(order))) == order
        assert [encoder.credit for encoder in encoders] == [0.0] * len(speeds)


def test_weighted_is_one_sequence_however_the_items_come() -> None:
    at_once, one_by_one = of_speeds(5, 1, 1), of_speeds(5, 1, 1)
    run = weighted(at_once, 0, 10)
    assert [n for _ in range(10) for n in weighted(one_by_one, 3, 1)] == run
    assert at_once == one_by_one


def test_weighted_after_two_of_nginxs_items_stands_at_nginxs_credits() -> None:
    # (5,1,1) a -> (-2,1,1); (3,2,2) a -> (-4,2,2)
    encoders = of_speeds(5, 1, 1)
    assert weighted(encoders, 0, 2) == [0, 0]
    assert [encoder.credit for encoder in encoders] == [-4, 2, 2]


def nginx(speeds: list[float], items: int) -> list[int]:
    """ngx_http_upstream_get_peer, as it stands there: current weights without bound."""
    current, picked = [0.0] * len(speeds), []
    for _ in range(items):
        best, total = 0, 0.0
        for i, speed in enumerate(speeds):
            current[i] += speed
            total += speed
            if current[i] > current[best]:
                best = i
        current[best] -= total
        picked.append(best)
    return picked


@pytest.mark.parametrize(
    "speeds",
    [[5.0, 1.0, 1.0], [3.0, 10.0, 100.0, 7.0, 100.0, 0.1, 5.0, 5.0], [1 / n for n in range(1, 65)], [0.1, 100.0]],
)
def test_weighted_with_speeds_that_stay_never_meets_its_bound(speeds: list[float]) -> None:
    assert weighted(of_speeds(*speeds), 0, 1000) == nginx(speeds, 1000)


@pytest.mark.parametrize("credit", [1e9, float("inf"), -1e9, float("-inf"), float("nan")])
def test_weighted_pays_two_rounds_of_an_old_debt_at_most(credit: float) -> None:
    encoders = of_speeds(1, 1)
    encoders[0].credit = credit
    picked = weighted(encoders, 0, 20)
    # 4 is owed to the first, or by it: shared by both in the end, so 2 items more or less than 10.
    assert 8 <= picked.count(0) <= 12


def test_weighted_goes_on_from_the_credits_that_it_finds() -> None:
    # (1, 1) with credits (-1, 0): (0, 1) b -> (0, -1); (1, 0) a -> (-1, 0)
    encoders = [Encoder(1, credit=-1), Encoder(1)]
    assert weighted(encoders, 0, 2) == [1, 0]
    assert [encoder.credit for encoder in encoders] == [-1, 0]


# --- least_unfinished -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoders", "start", "items", "order", "unfinished"),
    [
        # Idle and equal: round from the cursor.
        ([Encoder(1), Encoder(1), Encoder(1)], 0, 4, "abca", [2, 1, 1]),
        ([Encoder(1), Encoder(1), Encoder(1)], 2, 4, "cabc", [1, 1, 2]),
        # One has two running: the others are filled up to it first. Item n looks from encoder n % 3 on:
        # (2,0,0) b | (2,1,0) c | (2,1,1) tie, from c | (2,1,2) b | (2,2,2) tie, from b
        ([Encoder(1, 2), Encoder(1), Encoder(1)], 0, 5, "bccbb", [2, 3, 2]),
        # By speed: 0/2 0/1 tie a | 1/2 0/1 b | 1/2 1/1 a | 2/2 1/1 tie, item 3 looks from 3 % 2 = 1 on: b
        ([Encoder(2), Encoder(1)], 0, 4, "abab", [2, 2]),
        ([Encoder(3, 3), Encoder(1, 1)], 1, 1, "b", [3, 2]),
        ([Encoder(3, 2), Encoder(1, 1)], 1, 1, "a", [3, 1]),
        ([Encoder(1, 9)], 5, 2, "aa", [11]),
    ],
)
def test_least_unfinished_by_hand(
    encoders: list[Encoder], start: int, items: int, order: str, unfinished: list[int]
) -> None:
    assert "".join("abc"[n] for n in least_unfinished(encoders, start, items)) == order
    assert [encoder.unfinished for encoder in encoders] == unfinished


# --- all --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", sorted(ENCODER_POLICIES))
def test_equal_idle_encoders_share_evenly_and_no_items_are_no_assignments(policy: str) -> None:
    encoders = of_speeds(1, 1, 1)
    assign = ENCODER_POLICIES[policy]
    assert assign(encoders, 1, 0) == []
    chosen, start = Counter[int](), 1
    for items in (1, 2, 5, 3, 1, 3):
        indices = assign(encoders, start, items)
        assert len(indices) == items
        chosen.update(indices)
        start = (start + items) % 3
    assert chosen == {0: 5, 1: 5, 2: 5}
