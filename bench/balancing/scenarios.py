"""What is simulated, and what is aimed at."""

from __future__ import annotations

from typing import NamedTuple

from bench.balancing.simulation import Scenario

FOUR = (1.0, 1.0, 2.0, 4.0)
EIGHT = (1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 4.0, 8.0)
EQUAL = (1.0,) * 16


class Aim(NamedTuple):
    """The most that mean and p99 may be, in multiples of the perfect dispatcher's; None: no figure was set."""

    mean: float | None = None
    p99: float | None = None


SCENARIOS: tuple[tuple[Scenario, Aim], ...] = (
    (Scenario("1:1:2:4, 40 %", FOUR, 0.4), Aim(1.10)),
    (Scenario("1:1:2:4, 75 %", FOUR, 0.75), Aim(1.05, 1.12)),
    (Scenario("1:1:2:4, 90 %", FOUR, 0.9), Aim(1.10)),
    (Scenario("1:1:1:1:2:2:4:8, 75 %", EIGHT, 0.75, requests=1600), Aim(1.08)),
    (Scenario("16 equal, 75 %", EQUAL, 0.75, requests=1600), Aim(1.08)),
    (
        Scenario("the 4 becomes a 2, 60 %: from 30 s after", FOUR, 0.6, 3200, changes=((15.0, 3, 2.0),), since_s=45.0),
        Aim(1.15),
    ),
    (
        Scenario(
            "the same: the 30 s in between", FOUR, 0.6, 3200, changes=((15.0, 3, 2.0),), since_s=15.0, until_s=45.0
        ),
        Aim(),
    ),
    (
        Scenario("a 1 becomes a 1/2, 60 %: from 30 s after", FOUR, 0.6, 3200, changes=((15.0, 0, 0.5),), since_s=45.0),
        Aim(1.15),
    ),
    (Scenario("lognormal lengths, 75 %", FOUR, 0.75, requests=1600, lengths="lognormal"), Aim()),
    (Scenario("prompts of 300 tokens, lognormal, 75 %", FOUR, 0.75, requests=1600, prompt_tokens=300), Aim()),
    (Scenario("flat 2: a batch costs more, 75 %", FOUR, 0.75, flat=2.0), Aim()),
    (Scenario("flat 32: a batch costs less, 75 %", FOUR, 0.75, flat=32.0), Aim()),
    (Scenario("batches of 64, 75 %", FOUR, 0.75, requests=2400, flat=32.0, full=64), Aim()),
)
