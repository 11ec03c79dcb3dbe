"""How long a connection waits for its client, by a clock of the test's own."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from tests.upstream.test_clock import Clock
from workers.patience import ENOUGH_BYTES, LOOKS, Kind, Owed, Patience

LIMIT_S = 8.0


class Waiting:
    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self.clock = Clock()
        self.owed: Owed | None = None
        self.given_up: list[Owed] = []
        loop = cast(asyncio.AbstractEventLoop, self.clock)
        self.patience = Patience(loop, limit_s, lambda: self.owed, self.given_up.append)


async def test_nobody_waits_for_what_is_not_owed() -> None:
    waiting = Waiting()
    await waiting.clock.pass_(100 * LIMIT_S)
    assert waiting.given_up == []


async def test_what_is_owed_is_given_up_after_the_limit_and_at_most_two_looks() -> None:
    waiting = Waiting()
    waiting.owed = Owed(Kind.HEAD, 3)
    await waiting.clock.pass_(LIMIT_S - 0.01)
    assert waiting.given_up == []
    await waiting.clock.pass_(2 * LIMIT_S / LOOKS)
    assert waiting.given_up == [Owed(Kind.HEAD, 3)]


@pytest.mark.parametrize("kind", [Kind.BODY, Kind.ANSWER])
@pytest.mark.parametrize(("bytes_a_limit", "gets_on"), [(ENOUGH_BYTES * 1.2, True), (ENOUGH_BYTES * 0.8, False)])
async def test_slow_is_fine_as_long_as_enough_comes(kind: Kind, bytes_a_limit: float, gets_on: bool) -> None:
    waiting = Waiting()
    for step in range(400):
        waiting.owed = Owed(kind, 1, int(bytes_a_limit * step / 40))
        await waiting.clock.pass_(LIMIT_S / 40)
    assert (waiting.given_up == []) == gets_on


async def test_the_next_one_has_the_whole_limit_again() -> None:
    waiting = Waiting()
    for number in range(10):
        waiting.owed = Owed(Kind.HEAD, number)
        await waiting.clock.pass_(0.7 * LIMIT_S)
    assert waiting.given_up == []


async def test_a_moment_in_which_nothing_is_owed_begins_it_anew() -> None:
    waiting = Waiting()
    for _ in range(10):
        waiting.owed = Owed(Kind.BODY, 1)
        await waiting.clock.pass_(0.7 * LIMIT_S)
        waiting.owed = None
        await waiting.clock.pass_(2 * LIMIT_S / LOOKS)
    assert waiting.given_up == []


async def test_nothing_is_looked_at_any_more_at_the_end_nor_without_a_limit() -> None:
    waiting, for_ever = Waiting(), Waiting(limit_s=0)
    waiting.owed = for_ever.owed = Owed(Kind.HEAD, 0)
    waiting.patience.end()
    for one in (waiting, for_ever):
        await one.clock.pass_(10 * LIMIT_S)
        assert one.given_up == [] and one.clock.armed == 0
