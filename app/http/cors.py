"""Which web pages of other origins may call /v1 and what goes to engines beside it, and read what it answers.

Owns the headers of that (the CORS protocol, https://fetch.spec.whatwg.org/#http-cors-protocol). It must not know
routes or keys. Not Starlette's middleware: answers of engines don't pass Starlette, and without `--cors-origins`
nothing of this may cost anything.

Never with credentials: a browser sends our keys because a page's script put them into `Authorization` or
`x-api-key`, and cookies or client certificates open nothing here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from starlette.types import Scope

from app.errors import Headers

ALLOWED_METHODS = b"GET, POST, OPTIONS"
EXPOSED = b"x-request-id, retry-after, server-timing"
"""What a page may read beside the few that it always may."""
KEPT_S = b"600"
"""How long a browser may go by a preflight's answer."""
_NAMES = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z, -]{1,2000}").fullmatch
_PREFIX = b"access-control-"


class Cors:
    """One per worker. `origins`: as browsers write them, or `*` alone."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)
        self._any = b"*" in self._origins

    def __repr__(self) -> str:
        return f"<Cors {sorted(self._origins)}>"

    def headers(self, scope: Scope) -> Headers:
        """For an answer to the request."""
        if self._any:
            return [(b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", EXPOSED)]
        origin = _value(scope, b"origin")
        # Also where it is not allowed: a cache must not give another page's answer to this one.
        vary = (b"vary", b"origin")
        if origin not in self._origins:
            return [vary]
        return [(b"access-control-allow-origin", origin), (b"access-control-expose-headers", EXPOSED), vary]

    def preflight(self, scope: Scope) -> Headers | None:
        """The answer's headers to a browser that asks before it sends; None: this is no such question."""
        if scope["method"] != "OPTIONS" or not _value(scope, b"access-control-request-method"):
            return None
        found = self.headers(scope)
        if found[0][0] == b"vary":
            return found  # without leave the browser sends nothing
        # `*` would not mean Authorization. What the SDKs send beside differs, and nothing hangs on it.
        asked = _value(scope, b"access-control-request-headers")
        return [
            found[0],
            *found[2:],
            (b"access-control-allow-methods", ALLOWED_METHODS),
            *([(b"access-control-allow-headers", asked)] if _NAMES(asked) else []),
            (b"access-control-max-age", KEPT_S),
            (b"vary", b"access-control-request-headers"),
        ]


def without_cors(headers: Headers) -> Headers:
    """An engine's headers less what it says to web pages: with two answers to that a browser takes neither."""
    return [pair for pair in headers if not pair[0].startswith(_PREFIX)]


def _value(scope: Scope, wanted: bytes) -> bytes:
    for name, value in scope["headers"]:
        if name == wanted:
            found: bytes = value
            return found
    return b""
