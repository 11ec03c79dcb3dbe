"""Which headers cross the distributor, in both directions.

Owns the rules only: what belongs to one connection stays on it, what we know better is ours, and
everything else passes as it came, in its order, repeated ones too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from starlette.types import Scope

from app.errors import Headers

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""Source: RFC 9110 section 7.6.1 and what RFC 2616 section 13.5.1 named; any other `proxy-*` goes too.
RFC 7540 section 3.2.1 for `http2-settings`, which belongs to an Upgrade."""

CLIENT_KEYS = frozenset((b"authorization", b"x-api-key", b"api-key"))
"""Where OpenAI, Anthropic and Azure clients carry their key."""

_OURS_TO_ENGINE = frozenset(
    (
        b"host",
        b"content-length",
        b"expect",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
        b"x-request-id",
        b"x-lmdeploy-distserve-proxy",  # by which LMDeploy knows that migration fields come from its proxy
    )
)

_OURS_TO_CLIENT = HOP_BY_HOP | {b"x-request-id"}
_OURS_TO_STREAM = _OURS_TO_CLIENT | {b"cache-control", b"x-accel-buffering", b"content-length"}

NOT_FOR_ENGINE = HOP_BY_HOP | _OURS_TO_ENGINE | CLIENT_KEYS
NOT_FOR_ENGINE_BUT_KEYS = HOP_BY_HOP | _OURS_TO_ENGINE

PASSES_KNOWN = 256
_PASSES: dict[frozenset[bytes], set[bytes]] = {NOT_FOR_ENGINE: set(), NOT_FOR_ENGINE_BUT_KEYS: set()}
"""Names that were found to pass: most requests have no others."""

CLOSE = (b"connection", b"close")
_NO_OPTIONS = {b"", b"close", b"keep-alive", b"content-length"}
# nginx and friends collect an answer unless they are told not to; a stream must not wait for them.
_FOR_STREAMS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

DRAWN_AT_ONCE = 64
_VARIANT = dict(zip("0123456789abcdef", "89ab" * 4, strict=True))

_SANE_ID = re.compile(rb"[\x21-\x7e]{1,128}").fullmatch


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The client's X-Request-Id if it is 1 to 128 visible ASCII characters, else a new one."""
    return given_id(headers) or new_id()


def given_id(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The client's X-Request-Id, if there is one that `request_id` takes; else b""."""
    for name, value in headers:
        if name == b"x-request-id":
            return value if _SANE_ID(value) else b""
    return b""


_drawn: list[bytes] = []
os.register_at_fork(after_in_child=_drawn.clear)


def new_id() -> bytes:
    """A request id of 32 hexadecimal digits."""
    # As `uuid.uuid4().hex`, with one call of the system for many of them.
    if not _drawn:
        many = os.urandom(16 * DRAWN_AT_ONCE)
        _drawn.extend(many[i : i + 16] for i in range(0, len(many), 16))
    text = _drawn.pop().hex()
    return f"{text[:12]}4{text[13:16]}{_VARIANT[text[16]]}{text[17:]}".encode()


def for_engine(scope: Scope, not_for_engine: frozenset[bytes]) -> Headers:
    """The client's headers as an engine may see them, but for the request's id.

    Args:
        not_for_engine: NOT_FOR_ENGINE, or NOT_FOR_ENGINE_BUT_KEYS where clients' keys are passed on.
    """
    kept: Headers = []
    named: set[bytes] = set()
    hops: list[bytes] = []
    host: bytes | None = None
    passes = _PASSES[not_for_engine]
    for pair in scope["headers"]:
        name = pair[0]
        if name in passes:
            kept.append(pair)
        elif name in not_for_engine:
            if name == b"host":
                host = host if host is not None else pair[1]
            elif name == b"connection":
                named |= _options(pair[1])
            elif name == b"x-forwarded-for":
                hops.append(pair[1])
        elif not name.startswith(b"proxy-") and (b"_" not in name or not _is_spelt_otherwise(name, not_for_engine)):
            kept.append(pair)
            if len(passes) < PASSES_KNOWN:
                passes.add(name)
    if named:
        kept = [pair for pair in kept if pair[0] not in named]
    client = scope.get("client")
    if client:
        hops.append(client[0].encode())
    if hops:
        kept.append((b"x-forwarded-for", b", ".join(hops)))
    if host is not None:
        kept.append((b"x-forwarded-host", host))
    kept.append((b"x-forwarded-proto", scope["scheme"].encode()))
    return kept


def _is_spelt_otherwise(name: bytes, not_for_engine: frozenset[bytes]) -> bool:
    """Whether `content_length` and the like: WSGI, CGI and what is modelled on them take it for `content-length`."""
    spelt = name.replace(b"_", b"-")
    return spelt in not_for_engine or spelt.startswith(b"proxy-")


class ClientHead:
    """The head of the answer to a client, made from the engine's.

    `content_length` is None where the length is not known beforehand. A stream never keeps one: it
    may have to end with an event that the engine did not send.
    """

    __slots__ = ("content_length", "encoded", "headers", "streaming")

    def __init__(self, status: int, headers: Headers, extra: Headers) -> None:
        self.streaming = False
        self.encoded = False
        self.content_length: int | None = None
        named: set[bytes] = set()
        chunked = False
        for name, value in headers:
            if name == b"content-type":
                self.streaming = value[:17].lower() == b"text/event-stream" and status not in (204, 304)
            elif name == b"content-length":
                self.content_length = int(value)
            elif name == b"content-encoding":
                self.encoded = value.lower() != b"identity"
            elif name == b"transfer-encoding":
                chunked = True
            elif name == b"connection":
                named |= _options(value)
        dropped = _OURS_TO_STREAM if self.streaming else _OURS_TO_CLIENT
        if chunked or self.streaming or status in (204, 304):
            self.content_length = None
            dropped = dropped | {b"content-length"}
        if named:
            dropped = dropped | named
        self.headers = [pair for pair in headers if pair[0] not in dropped and not pair[0].startswith(b"proxy-")]
        if self.streaming:
            self.headers += _FOR_STREAMS
        self.headers += extra


def _options(connection: bytes) -> set[bytes]:
    """The header names in a Connection value; what frames a message is not its to take away."""
    return {option.strip().lower() for option in connection.split(b",")} - _NO_OPTIONS
