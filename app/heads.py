"""Heads that come again: what was read from one holds for the next with the same bytes, and is not read again.

A client sends the same head with each request of a connection, an engine with each answer: only Content-Length
differs. So each connection keeps the head that came last, once a parser has found it good, and looks whether the next
one is that. What others make of its headers can be kept with it (`Head.meaning`). It must not know what heads mean.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from app.errors import BadRequest, Headers

LENGTH = b"content-length"
_UNWRITABLE = re.compile(rb"[\r\n\0]").search
_LENGTH_LINE = re.compile(rb"\r\n(?:Content-Length|content-length): ([0-9]{1,12})\r\n").search
LENGTH_DIGITS = 12
LONGEST_BYTES = 8 * 1024
"""Of a head that is kept: each connection may hold one."""
STRANGE_AT_ONCE, STRANGE_ONE_IN = 4, 16


class Head:
    """A head with one Content-Length, whose value may be another one each time.

    `headers`: names in lower case. `meaning`: what follows from all but the length, for whoever reads such headers;
    it goes when another head comes.
    """

    __slots__ = ("_at", "_before", "_behind", "_size_behind_bytes", "headers", "length_at", "meaning")

    def __init__(self, before: bytes, behind: bytes, headers: Headers, length_at: int) -> None:
        self._before = before
        self._behind = behind
        self._at = len(before)
        self._size_behind_bytes = len(behind)
        self.headers = headers
        self.length_at = length_at
        self.meaning: Any = None

    def __repr__(self) -> str:
        return f"<Head of {len(self.headers)} headers>"

    @classmethod
    def begins(cls, data: bytes, headers: Headers) -> Head | None:
        """The head that `data` begins with, which a parser found good and to hold `headers`.

        None: it is not one to be found again. That takes one Content-Length, written as everybody does, and no freedom
        in how the lines end: of bytes that could be read in two ways none are kept.
        """
        end = data.find(b"\r\n\r\n", 0, LONGEST_BYTES)
        lengths = [at for at, (name, _) in enumerate(headers) if name == LENGTH]
        if end < 0 or len(lengths) != 1 or data[:1].isspace():
            return None
        head = data[: end + 4]
        ends = head.count(b"\r\n")
        found = _LENGTH_LINE(head)
        if (
            found is None
            or head.count(b"\n") != ends
            or head.count(b"\r") != ends
            or len(headers) != ends - 2
            or b"\0" in head
        ):
            return None
        (at,) = lengths
        if headers[at][1] != found[1]:
            return None
        return cls(head[: found.start(1)], head[found.end(1) :], headers.copy(), at)

    def of(self, data: bytes) -> Repeated | None:
        """The headers of `data`, if it begins with this head."""
        at = self._at
        if not data.startswith(self._before):
            return None
        end = data.find(b"\r", at, at + LENGTH_DIGITS + 1)
        if end < 0 or not data.startswith(self._behind, end):
            return None
        digits = data[at:end]
        if not digits.isdigit():
            return None
        return Repeated(self, digits, end + self._size_behind_bytes)


def is_to_be_kept(strange: int, seen: int) -> bool:
    """Whether the next head is worth remembering, after `strange` ones that did not come again and `seen` in all: who
    never sends one twice is not to pay for each."""
    return strange < STRANGE_AT_ONCE or not seen % STRANGE_ONE_IN


class Repeated(list[tuple[bytes, bytes]]):
    """The headers of a head that came before. Not to be changed in place: a copy is a list like any other.

    `length`: of the body, which begins at `end` of what the head was found in.
    """

    __slots__ = ("end", "head", "length")

    def __init__(self, head: Head, length: bytes, end: int) -> None:
        super().__init__(head.headers)
        self[head.length_at] = (LENGTH, length)
        self.head = head
        self.length = int(length)
        self.end = end


class Written(list[tuple[bytes, bytes]]):
    """Headers, and beside them how they are written: `lines`, each with its end. Not to be changed in place."""

    __slots__ = ("lines",)

    def __init__(self, headers: Headers, lines: bytes) -> None:
        super().__init__(headers)
        self.lines = lines


def with_header(headers: Headers, name: bytes, value: bytes) -> Headers:
    """The headers with one of that name, at the end, in place of those that they have; as written where they are.

    Raises:
        BadRequest: the value holds a CR, LF or NUL, which may also be found later, by `lines_of`.
    """
    kept = [header for header in headers if header[0] != name]
    kept.append((name, value))
    if type(headers) is not Written:
        return kept
    if _UNWRITABLE(value):
        raise _unwritable(name)
    lines = headers.lines
    if len(kept) <= len(headers):
        for header in headers:
            if header[0] == name:
                lines = _less_line(lines, b"%b: %b\r\n" % header)
    return Written(kept, b"%b%b: %b\r\n" % (lines, name, value))


def _less_line(lines: bytes, line: bytes) -> bytes:
    if lines.startswith(line):
        return lines[len(line) :]
    at = lines.index(b"\r\n" + line) + 2
    return lines[:at] + lines[at + len(line) :]


def lines_of(headers: Collection[tuple[bytes, bytes]]) -> bytes:
    """The headers as they are written, each line with its end.

    Raises:
        BadRequest: one of them holds a CR, LF or NUL, which would let it be more than one.
    """
    lines = [b": ".join(header) for header in headers]
    lines.append(b"")
    written = b"\r\n".join(lines)
    # Counting the line ends of the whole is several times cheaper than looking into every part.
    ends = len(lines) - 1
    if written.count(b"\n") != ends or written.count(b"\r") != ends or b"\0" in written:
        at_fault = next(name for name, value in headers if _UNWRITABLE(name + value))
        raise _unwritable(at_fault)
    return written


def _unwritable(name: bytes) -> BadRequest:
    return BadRequest(f"the request header {name.decode('latin-1')!a} holds a line end or a NUL")
