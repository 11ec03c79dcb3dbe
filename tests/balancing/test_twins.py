"""Each Lua policy, inside its acquire script on a real server, against its Python twin."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.balancing import POLICIES, Candidate
from app.store.keys import Keys
from app.store.scripts import Script, load_scripts
from tests.support.redis import PrivateRedis

SPEEDS = st.one_of(
    st.sampled_from([1.0, 2.0, 3.0, 0.1, 1e-300, 1e300]),
    st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False),
)
MEANS = st.one_of(st.none(), st.sampled_from([0.25, 0.5, 0.1]), st.floats(min_value=0, max_value=1e6, allow_nan=False))
# Small counts: ties and idle nodes are where the policies branch.
COUNTS = st.one_of(st.integers(0, 3), st.integers(0, 10**6))
LEARNED = st.one_of(st.none(), st.sampled_from([1.0, 2.0, 0.1, 1e-9, 1e12]), st.floats(1e-9, 1e12))
A_CANDIDATE = st.builds(Candidate, SPEEDS, COUNTS, MEANS, st.integers(0, 2), LEARNED)
CANDIDATES = st.lists(A_CANDIDATE, min_size=1, max_size=7)
DRAW = st.one_of(
    st.sampled_from([0.0, 0.0049, 0.005, 0.0999, 0.1, 0.5, 0.9999999999999999]),
    st.floats(min_value=0, max_value=1, exclude_max=True),
)


class Acquirer:
    """One registered worker that acquires over plain commands; its state is set by plain commands too."""

    def __init__(self, server: PrivateRedis, script: Script) -> None:
        self.keys = Keys(f"twins{secrets.token_hex(4)}")
        self.script = script
        self.learns = script.name == "acquire_least_expected_delay"
        self.client = server.client
        self.client.script_load(script.text)

    def acquire(self, candidates: list[Candidate], draws: tuple[float, float]) -> Any:
        return self.acquire_each((candidates,), draws)

    def acquire_each(self, pools: Sequence[list[Candidate]], draws: Sequence[float]) -> Any:
        """One node of each pool, by two draws each; nodes are numbered through all pools."""
        keys = self.keys
        candidates = [candidate for pool in pools for candidate in pool]
        self.clear()
        with self.client.pipeline(transaction=False) as pipe:
            pipe.hset(keys.sessions, "w", "5")
            pipe.set(keys.version, "3")
            for i, candidate in enumerate(candidates):
                url = f"http://n{i}"
                if candidate.unfinished or i % 2:  # an idle node stands there as 0 or not at all
                    pipe.hset(keys.unfinished, url, candidate.unfinished)
                if candidate.mean_latency_s is not None:
                    pipe.hset(keys.latency_mean, url, f"{candidate.mean_latency_s:.17g}")
                if candidate.learned:
                    pipe.hset(keys.learned, url, f"{candidate.learned:.17g}")
                if candidate.explored:
                    pipe.hset(keys.explored, url, candidate.explored)
            pipe.execute()
        counting = (keys.unfinished, keys.ledger("w"), keys.sessions, keys.version)
        names = (*counting, keys.latency_mean, keys.explored, keys.load_index, keys.learned, keys.learned_since)
        arguments: list[str | int] = [""] if self.learns else []
        numbers = itertools.count()
        for n, pool in enumerate(pools):
            arguments += [len(pool), *(f"http://n{next(numbers)}" for _ in pool), *(repr(one.speed) for one in pool)]
            arguments += map(repr, draws[2 * n : 2 * n + 2])
        reply = self.client.execute_command(*self.script.evalsha(names, ("w", 5, "3", *arguments)))
        if isinstance(reply[-1], list):
            self.ask_again_with_what_was_told(names, pools, draws, reply)
            return reply[:-1]
        return reply

    def ask_again_with_what_was_told(
        self, names: Sequence[str], pools: Sequence[list[Candidate]], draws: Sequence[float], reply: list[Any]
    ) -> None:
        """The same state, and the learned speeds as arguments: the same choice, and nothing told."""
        told = reply[-1]
        since, speeds = told[0], iter(told[1:])
        urls = [f"http://n{n}" for n in range(sum(map(len, pools)))]
        firsts = list(itertools.accumulate([0, *map(len, pools)]))
        for first, index in zip(firsts, reply[2:-1], strict=False):
            for name in (names[0], names[1]):
                self.client.hincrby(name, urls[first + index - 1], -1)
        arguments: list[str | int] = [since]
        for n, pool in enumerate(pools):
            arguments += [len(pool), *urls[firsts[n] : firsts[n + 1]], *(next(speeds) for _ in pool)]
            arguments += map(repr, draws[2 * n : 2 * n + 2])
        again = self.client.execute_command(*self.script.evalsha(names, ("w", 5, "3", *arguments)))
        assert again == reply[:-1]

    def counts(self, name: str) -> dict[str, int]:
        return {url: int(count) for url, count in self.client.hgetall(name).items() if int(count)}

    def clear(self) -> None:
        names = list(self.client.scan_iter(self.keys.prefix + "*", count=1000))
        if names:
            self.client.delete(*names)


@pytest.fixture(params=sorted(POLICIES))
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def acquirer(redis_server: PrivateRedis, policy: str) -> Iterator[Acquirer]:
    redis_server.ensure_running()
    acquirer = Acquirer(redis_server, load_scripts()[f"acquire_{policy}"])
    yield acquirer
    acquirer.clear()


def check_twins(acquirer: Acquirer, policy: str, candidates: list[Candidate], draws: tuple[float, float]) -> None:
    index, exploring = POLICIES[policy](candidates, draws)
    assert acquirer.acquire(candidates, draws) == [0, 3, index + 1]

    expected = {f"http://n{i}": candidate.unfinished for i, candidate in enumerate(candidates)}
    expected[f"http://n{index}"] += 1
    assert acquirer.counts(acquirer.keys.unfinished) == {url: n for url, n in expected.items() if n}
    assert acquirer.counts(acquirer.keys.ledger("w")) == {f"http://n{index}": 1}

    # Explorations are counted only where the policy reads them, and only on the chosen node.
    tries = {f"http://n{i}": candidate.explored for i, candidate in enumerate(candidates)}
    tries[f"http://n{index}"] += exploring
    assert acquirer.counts(acquirer.keys.explored) == {url: n for url, n in tries.items() if n}


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(candidates=CANDIDATES, draws=st.tuples(DRAW, DRAW))
@example(candidates=[Candidate(5e-324, 1), Candidate(5e-324, 2)], draws=(0.5, 0.5))  # both are infinitely busy
@example(candidates=[Candidate(0.1, 0), Candidate(0.2, 0), Candidate(0.3, 0)], draws=(0.9999999999999999, 0.5))
@example(candidates=[Candidate(0.1, 0), Candidate(0.2, 0), Candidate(0.3, 0)], draws=(0.4, 0.5))
def test_lua_and_python_choose_alike(
    acquirer: Acquirer, policy: str, candidates: list[Candidate], draws: tuple[float, float]
) -> None:
    check_twins(acquirer, policy, candidates, draws)


@pytest.mark.parametrize("last_is_best", [True, False])
def test_a_fleet_larger_than_one_batch_of_500(acquirer: Acquirer, policy: str, last_is_best: bool) -> None:
    candidates = [Candidate(1.0, 2, 0.5) for _ in range(1203)]
    best = 1202 if last_is_best else 500
    candidates[best] = Candidate(1e6, 1, 0.25)
    check_twins(acquirer, policy, candidates, (0.999, 0.5))
    if policy != "random":
        assert acquirer.counts(acquirer.keys.ledger("w")) == {f"http://n{best}": 1}


@pytest.mark.parametrize("size", [32, 33, 700])
def test_a_large_fleet_of_which_nearly_all_are_learned(acquirer: Acquirer, policy: str, size: int) -> None:
    candidates = [
        Candidate(1.0 + i % 3, i % 5, 0.5, learned=None if i % 11 == 7 else 10.0 + i % 13) for i in range(size)
    ]
    for draws in ((0.3, 0.5), (0.3, 0.05), (0.7, 0.001)):
        check_twins(acquirer, policy, candidates, draws)


# --- two pools, as for prefill and decode ---------------------------------------------------------

POOL = st.lists(A_CANDIDATE, min_size=1, max_size=4)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(pools=st.tuples(POOL, POOL), draws=st.tuples(DRAW, DRAW, DRAW, DRAW))
def test_of_two_pools_lua_and_python_choose_alike_each_by_its_own_draws(
    acquirer: Acquirer,
    policy: str,
    pools: tuple[list[Candidate], list[Candidate]],
    draws: tuple[float, float, float, float],
) -> None:
    first, second = pools
    chosen = [POLICIES[policy](first, draws[:2]), POLICIES[policy](second, draws[2:])]
    urls = [f"http://n{chosen[0][0]}", f"http://n{len(first) + chosen[1][0]}"]
    # The nodes of the second pool are numbered on from those of the first.
    assert acquirer.acquire_each(pools, draws) == [0, 3, chosen[0][0] + 1, chosen[1][0] + 1]
    assert acquirer.counts(acquirer.keys.ledger("w")) == dict.fromkeys(urls, 1)
    before = {f"http://n{i}": candidate for i, candidate in enumerate([*first, *second])}
    after = {url: candidate.unfinished + (url in urls) for url, candidate in before.items()}
    assert acquirer.counts(acquirer.keys.unfinished) == {url: n for url, n in after.items() if n}
    tries = {url: candidate.explored for url, candidate in before.items()}
    for url, (_, exploring) in zip(urls, chosen, strict=True):
        tries[url] += exploring
    assert acquirer.counts(acquirer.keys.explored) == {url: n for url, n in tries.items() if n}


@pytest.mark.parametrize("sizes", [(1, 1203), (1203, 1), (501, 500)])
def test_two_pools_larger_than_one_batch_of_500(acquirer: Acquirer, policy: str, sizes: tuple[int, int]) -> None:
    pools = [[Candidate(1.0, 2, 0.5) for _ in range(size)] for size in sizes]
    for pool in pools:
        pool[-1] = Candidate(1e9, 1, 0.25)
    code, version, *indices = acquirer.acquire_each((pools[0], pools[1]), (0.5, 0.5, 0.5, 0.5))
    # The last is the fastest, the least busy and so much faster that nearly every draw is its own.
    assert (code, version, indices) == (0, 3, list(sizes))
