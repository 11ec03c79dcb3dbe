"""What a request costs in our own code must not grow unnoticed: figures that don't depend on the machine's speed."""

from __future__ import annotations

import re
import subprocess
import sys

CALLS = 319
"""Functions called for a request: 5 % more than the 304 of before there were metrics. 313 on Python 3.11, fewer
later."""
RATIO = 0.7
"""CPU of a request against the fixed program: 0.30 to 0.40, by the build of Python; it moves by a tenth with the
machine's other work."""


def test_a_request_costs_no_more_than_it_did() -> None:
    calls, ratio = cost(rounds=10)
    assert 200 < calls <= CALLS, "fewer than that can't be the whole path"
    assert ratio <= RATIO or cost(rounds=100)[1] <= RATIO, "where the machine did much else, the least of more counts"


def cost(*, rounds: int) -> tuple[float, float]:
    command = [sys.executable, "-m", "bench.guard", "--rounds", str(rounds)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.fullmatch(r"([\d.]+) calls, ([\d.]+) x the fixed program, ([\d.]+) us of CPU a request\n", ran.stdout)
    assert found, ran.stdout
    return float(found[1]), float(found[2])
