"""What all strict simulated engines go by: a rule holds, or the request is refused with the reason.

Pure: no socket, no clock. The rules themselves are each protocol's.
"""

from __future__ import annotations

import json
from typing import Any


class Refused(Exception):
    """The request is not in the protocol; the message says why."""


def need(holds: object, reason: str) -> None:
    if not holds:
        raise Refused(reason)


def parse(body: bytes) -> dict[str, Any]:
    """The JSON object; a key that stands twice in one object is refused, since engines differ in which one counts."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        need(len(keys) == len(set(keys)), f"a key stands twice: {keys}")
        return dict(pairs)

    try:
        value = json.loads(body, object_pairs_hook=once)
    except ValueError as e:
        raise Refused(f"no JSON: {e}") from e
    need(isinstance(value, dict), "no JSON object")
    found: dict[str, Any] = value
    return found
