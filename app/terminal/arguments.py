"""What may stand behind the flags of several commands: types for argparse, in one wording.

Each raises ArgumentTypeError with what is allowed and what was given.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from app.errors import BadRequest
from app.nodes import Role, parse_role, parse_speed


def seconds(least: float = 0.0, most: float = math.inf) -> Callable[[str], float]:
    """A finite number of seconds in these limits."""
    limits = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"

    def convert(text: str) -> float:
        value = _number(text)
        if math.isfinite(value) and least <= value <= most:
            return value
        raise argparse.ArgumentTypeError(f"must be a number of seconds {limits}, not {text!r}")

    return convert


def whole_number(least: int = 0, most: float = math.inf) -> Callable[[str], int]:
    limits = f"of at least {least}" if most == math.inf else f"from {least} to {most}"

    def convert(text: str) -> int:
        if text.isdecimal() and least <= int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"must be a whole number {limits}, not {text!r}")

    return convert


def role(text: str) -> Role:
    try:
        return parse_role(text)
    except BadRequest as e:
        raise argparse.ArgumentTypeError(f"{e.message.removeprefix('role ')}, not {text!r}") from e


def speed(text: str) -> float:
    try:
        found = parse_speed(_number(text))
        if found is not None:  # as for -1, which is LMDeploy's word for none
            return found
    except BadRequest:
        pass
    raise argparse.ArgumentTypeError(f"must be a finite number greater than 0, not {text!r}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
