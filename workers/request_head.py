"""Which request heads are refused although the parser lets them pass.

Owns the rules for what could be read in another way behind us than here: framing, version, target, Host. Pure. The
syntax (line ends, names, control characters, repeated Content-Length, Content-Length beside Transfer-Encoding) is
llhttp's, and `tests/integration/test_request_shapes.py` holds it to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from app.errors import BadRequest, EvenhandError

HEAD_LIMIT_BYTES = 64 * 1024  # request line and headers; httptools itself has no limit
HEADERS_LIMIT = 100  # what gunicorn and Apache take by default; no client of an LLM API needs a third of it

_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:%\[\]-]*").fullmatch  # RFC 3986, 3.2.2 and 3.2.3
_CODING = "Transfer-Encoding must be chunked, once, in HTTP/1.1"
_ABSOLUTE = re.compile(rb"https?://", re.IGNORECASE).match


class HeadTooLarge(EvenhandError):
    status = 431
    type = "invalid_request_error"
    code = "head_too_large"

    def __init__(self) -> None:
        super().__init__(f"request line and headers are longer than {HEAD_LIMIT_BYTES} bytes or {HEADERS_LIMIT} lines")


class VersionNotSupported(EvenhandError):
    status = 505
    type = "invalid_request_error"
    code = "http_version_not_supported"


def fault_of(
    version: str, target: bytes, headers: Sequence[tuple[bytes, bytes]], named: Mapping[bytes, bytes]
) -> EvenhandError | None:
    """Why a whole head is refused, if it is.

    Args:
        version: of HTTP, such as "1.1".
        headers: names in lower case.
        named: the same by name; of repeated ones any.
    """
    if version not in ("1.1", "1.0"):
        # llhttp also takes 0.9 and 2.0 for a version of the text protocol; nobody's client says so in earnest.
        return VersionNotSupported("only HTTP/1.1 and HTTP/1.0 are served")
    if not (target.startswith(b"/") or target == b"*" or _ABSOLUTE(target)):
        return BadRequest("the request's target is neither a path nor an http URL")
    if len(named) != len(headers) and (fault := _twice(headers)):
        return fault
    host = named.get(b"host")
    if host is None and version == "1.1":
        return BadRequest("a request has one Host header")
    if host is not None and not _HOST(host):
        return BadRequest("the Host header is not a host")
    coding = named.get(b"transfer-encoding")
    # Any other coding would be forwarded undecoded and without its name. RFC 9112, 6.1: with HTTP/1.0 the framing is
    # faulty, for a proxy of that version in between did not understand it.
    if coding is not None and (coding.strip().lower() != b"chunked" or version == "1.0"):
        return BadRequest(_CODING)
    return None


def _twice(headers: Sequence[tuple[bytes, bytes]]) -> EvenhandError | None:
    names = [name for name, _ in headers]
    if names.count(b"host") > 1:
        return BadRequest("a request has one Host header")  # RFC 9112, 3.2
    return BadRequest(_CODING) if names.count(b"transfer-encoding") > 1 else None
