"""Where an event stream stands, known from its last bytes alone.

A relay passes bytes and never waits for a whole line; still it has to know, when the stream ends,
whether the engine had said `[DONE]`, and whether an event of our own would start on a fresh line.
Pure; it must not know where the bytes come from.

Source of the line rules: WHATWG HTML, "Parsing an event stream" (CR, LF and CRLF all end a line).
"""

from __future__ import annotations

import re

KEEP_BYTES = 64
"""How much of the end is remembered: `data: [DONE]` with its line ends, and room for blanks after it."""

_WHOLE_LINE = re.compile(rb"[\r\n]data: ?\[DONE\][ \t]*[\r\n]").search
_LAST_LINE = re.compile(rb"[\r\n]data: ?\[DONE\][ \t]*\Z").search
_SMALL_BYTES = 4096


class StreamTail:
    """Fed with every chunk that was sent, in order; how the bytes are cut does not matter."""

    __slots__ = ("_seen", "_tail")

    def __init__(self) -> None:
        self._tail = b"\n\n"  # the start of a stream is the start of a line and of an event
        self._seen = False

    def __repr__(self) -> str:
        return f"<StreamTail done={self.done} {self._tail!r}>"

    def feed(self, chunk: bytes) -> None:
        size = len(chunk)
        if size <= _SMALL_BYTES:
            text = self._tail + chunk
            if not self._seen and b"[DONE]" in text and _WHOLE_LINE(text):
                self._seen = True
            self._tail = text[-KEEP_BYTES:]
            return
        # A large chunk is searched where it lies: once over the seam, once inside.
        if not self._seen:
            seam = self._tail + chunk[:KEEP_BYTES]
            self._seen = bool(_WHOLE_LINE(seam)) or (b"[DONE]" in chunk and bool(_WHOLE_LINE(chunk)))
        self._tail = chunk[-KEEP_BYTES:]

    @property
    def done(self) -> bool:
        """Whether a `[DONE]` line was there; the stream's end counts as the end of its last line."""
        return self._seen or _LAST_LINE(self._tail) is not None

    def missing_newlines(self) -> bytes:
        """What has to be sent so that the next byte starts a new event."""
        # A final CR may be half of a CRLF: then the first newline only completes it.
        missing = b"\n" if self._tail.endswith(b"\r") else b""
        while not _at_boundary(self._tail + missing):
            missing += b"\n"
        return missing


def _at_boundary(tail: bytes) -> bool:
    return tail[-4:].replace(b"\r\n", b"\n").replace(b"\r", b"\n").endswith(b"\n\n")
