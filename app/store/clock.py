"""Redis's clock, the one that leases and states go by: several hosts' own would differ."""

from __future__ import annotations


def redis_ms(time_reply: tuple[int, int]) -> int:
    """The instant that `TIME` answered, ms."""
    seconds, microseconds = time_reply
    return seconds * 1000 + microseconds // 1000
