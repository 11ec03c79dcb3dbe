"""Bytes that come in pieces."""

from __future__ import annotations

import sys

import pytest

from workers.pieces import LARGE_BYTES, Pieces


@pytest.mark.parametrize(
    "sizes", [(1, 1), (LARGE_BYTES, 1, 2, LARGE_BYTES, 3), (1, LARGE_BYTES, LARGE_BYTES + 1), (3, LARGE_BYTES - 1, 5)]
)
def test_they_are_whole_and_in_order(sizes: tuple[int, ...]) -> None:
    parts = [bytes([n]) * size for n, size in enumerate(sizes)]
    pieces = Pieces(parts[0])
    for part in parts[1:]:
        pieces.add(part)
    assert len(pieces) == sum(sizes)
    assert bytes(pieces) == b"".join(parts)


def test_small_ones_do_not_take_many_times_their_size() -> None:
    pieces = Pieces(b"ab")
    for _ in range(10_000):
        pieces.add(b"cd")
    held = pieces._pieces
    assert sum(map(sys.getsizeof, held)) + sys.getsizeof(held) < 2 * len(pieces)
