"""W3C Trace Context: where a request is in its trace, read from its headers and written into those of its legs.

Owns the two headers and the ids. It must not know who records spans, or whether anybody does.

Source: W3C Trace Context, sections 3.2 and 4.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from app.errors import Headers
from app.heads import with_header

_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?").fullmatch
_NEVER = b"ff"  # no version has this number
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class Parent:
    """What a client's `traceparent` says."""

    trace_id: int
    span_id: int
    sampled: bool


@dataclass(slots=True)
class Trace:
    """A request's own span. `parent_id`: 0 where it begins the trace; `relay_at_s`: monotonic, 0 before its answer."""

    trace_id: int
    span_id: int
    parent_id: int
    sampled: bool
    relay_at_s: float = 0.0

    def onwards(self, headers: Headers) -> tuple[int, Headers]:
        """The span id of a leg, and its headers: below this span. A `tracestate` without a trace of its own is left."""
        span_id = new_span_id()
        if not self.parent_id and any(name == b"tracestate" for name, _ in headers):
            headers = [header for header in headers if header[0] != b"tracestate"]
        value = b"00-%032x-%016x-%02x" % (self.trace_id, span_id, _SAMPLED if self.sampled else 0)
        return span_id, with_header(headers, b"traceparent", value)


def read_parent(headers: Headers) -> Parent | None:
    """None: there is none, or none that can be understood; then a trace begins here."""
    values = [value for name, value in headers if name == b"traceparent"]
    match = _PARENT(values[0].strip()) if len(values) == 1 else None
    if match is None or match[1] == _NEVER or (match[1] == b"00" and match[5] is not None):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    return Parent(trace_id, span_id, bool(int(match[4], 16) & _SAMPLED)) if trace_id and span_id else None


def new_trace_id() -> int:
    return random.getrandbits(128) or 1


def new_span_id() -> int:
    return random.getrandbits(64) or 1
