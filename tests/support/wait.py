"""Waiting for a state with a deadline: the tests never sleep to wait for time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

EVERY_S = 0.02

WITHIN_S = 10.0
"""For a state that comes if all is well: how soon is nothing that the test is about, and the machine may be busy.
A test of a promised time says so itself."""


def eventually(check: Callable[[], T], *, within_s: float = WITHIN_S, every_s: float = EVERY_S) -> T:
    """The first true value of `check()`; one that raises AssertionError counts as not true yet.

    Raises:
        AssertionError: not true within `within_s`; its own error, if it has one.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        last: object = None
        try:
            value = check()
            if value:
                return value
            last = value
        except AssertionError as e:
            last = e
        if time.monotonic() >= deadline_s:
            if isinstance(last, AssertionError):
                raise last
            raise AssertionError(f"still {last!r} after {within_s} s")
        time.sleep(every_s)


async def aeventually(check: Callable[[], T], *, within_s: float = WITHIN_S, every_s: float = EVERY_S) -> T:
    """`eventually` for a test whose own event loop must go on meanwhile; `check` itself is a plain function."""
    deadline_s = time.monotonic() + within_s
    while True:
        try:
            return eventually(check, within_s=0)
        except AssertionError as e:
            if time.monotonic() >= deadline_s:
                raise AssertionError(f"{e} (after {within_s} s)") from e
        await asyncio.sleep(every_s)
