"""One thing that was looked at: whether it is well, and how to mend it where it is not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

NAMED = 10
"""Names in one finding; the rest is a number."""


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"  # it works, and will not in some case that is to be expected
    BAD = "bad"  # requests fail because of it, or state is lost


@dataclass(frozen=True, slots=True)
class Finding:
    """`check`: `<part>.<what>`; `says`: what is, `mend`: what to do, in words or as a command."""

    check: str
    level: Level
    says: str
    mend: str = ""


def ok(check: str, says: str) -> Finding:
    """What is well needs no advice."""
    return Finding(check, Level.OK, says)


def warn(check: str, says: str, mend: str) -> Finding:
    return Finding(check, Level.WARN, says, mend)


def bad(check: str, says: str, mend: str) -> Finding:
    return Finding(check, Level.BAD, says, mend)


def named(names: Iterable[object]) -> str:
    """The first few of them, and how many more there are."""
    texts = [str(name) for name in names]
    more = len(texts) - NAMED
    return ", ".join(texts[:NAMED]) + (f" and {more:,} more" if more > 0 else "")
