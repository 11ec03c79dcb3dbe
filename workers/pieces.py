"""Bytes that come in pieces and are wanted in one: each is copied once, and the list of them stays short."""

from __future__ import annotations

LARGE_BYTES = 4096
"""Smaller pieces are joined as they come: a body of many would take twenty times its size."""


class Pieces:
    __slots__ = ("_pieces", "_size_bytes")

    def __init__(self, first: bytes | memoryview) -> None:
        self._pieces: list[bytes | bytearray | memoryview] = [first]
        self._size_bytes = len(first)

    def __repr__(self) -> str:
        return f"<Pieces {self._size_bytes} bytes in {len(self._pieces)}>"

    def __len__(self) -> int:
        return self._size_bytes

    def __bytes__(self) -> bytes:
        return b"".join(self._pieces)

    def add(self, piece: bytes | memoryview) -> None:
        self._size_bytes += len(piece)
        pieces = self._pieces
        if len(piece) >= LARGE_BYTES:
            pieces.append(piece)
            return
        last = pieces[-1]
        if type(last) is bytearray:
            last += piece
        else:
            pieces.append(bytearray(piece))
