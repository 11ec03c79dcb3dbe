"""Memory that is free again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

BODIES = """
import resource
from workers import memory
{first}
def rounds(n):
    for _ in range(n):
        held = [bytes([1]) * 300_000 for _ in range(6)]
        del held
rounds(3)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
rounds(100)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(first: str) -> int:
    code = BODIES.format(first=first)
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library has no such setting")
def test_pages_of_a_body_are_not_asked_for_again() -> None:
    assert faults("memory.keep_freed()") < 100
    assert faults("") > 100 * 100, "nothing is gained any more"
