"""What a request costs in our own code must not grow unnoticed: figures that don't depend on the machine's speed."""

from __future__ import annotations

import re
import subprocess
import sys

CALLS = 208
"""Functions called for a request: 207 on Python 3.11, fewer later. 318 before what a turn brings was one call (decision
35), and heads that come again were not read again (37)."""
RATIO = 0.45
"""CPU of a request against the fixed program: 0.18 to 0.26, by the build of Python; it moves by a tenth with the
machine's other work."""


def test_a_request_costs_no_more_than_it_did() -> None:
    calls, left, ratio = cost(rounds=10)
    assert 150 < calls <= CALLS, "fewer than that can't be the whole path"
    assert left == 0, "what is in a circle waits for the collector, which makes all requests wait"
    assert ratio <= RATIO or cost(rounds=100)[2] <= RATIO, "where the machine did much else, the least of more counts"


def cost(*, rounds: int) -> tuple[float, int, float]:
    command = [sys.executable, "-m", "bench.guard", "--rounds", str(rounds)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    words = r"([\d.]+) calls, (\d+) objects left, ([\d.]+) x the fixed program, ([\d.]+) us of CPU a request\n"
    found = re.fullmatch(words, ran.stdout)
    assert found, ran.stdout
    return float(found[1]), int(found[2]), float(found[3])
