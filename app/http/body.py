"""Reading a request body within a bound.

A body over the bound is refused before it is read where its length is declared, and as soon as the
bound is crossed where it comes in chunks. The rest is left to the server, which reads and drops it:
so a client that sends everything before it reads the answer still gets the 413, and its connection
stays usable.
"""

from __future__ import annotations

from starlette.types import Receive, Scope

from app.errors import BodyTooLarge


class ClientLeft(Exception):
    """The client went away before its request was complete: nobody is there to be answered."""


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first value of a request header; `name` in lower case."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def declared_bytes(scope: Scope) -> int | None:
    """What Content-Length says, if there is one."""
    declared = header(scope, b"content-length")
    return int(declared) if declared is not None and declared.isdigit() else None


async def read_body(scope: Scope, receive: Receive, *, limit_bytes: int, setting: str = "") -> bytes:
    """The whole body.

    Args:
        setting: the flag that changes the bound, for the message.

    Raises:
        BodyTooLarge: more than `limit_bytes`.
        ClientLeft: the client disconnected first.
    """
    if (declared_bytes(scope) or 0) > limit_bytes:
        raise too_large(limit_bytes, setting)
    # One array and no list of pieces: a body that comes two bytes at a time would take twenty times its size.
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk: bytes = message.get("body", b"")
        if len(body) + len(chunk) > limit_bytes:
            raise too_large(limit_bytes, setting)
        if not message.get("more_body", False) and not body:
            return chunk
        body += chunk
        if not message.get("more_body", False):
            return bytes(body)


def too_large(limit_bytes: int, setting: str) -> BodyTooLarge:
    hint = f" ({setting})" if setting else ""
    return BodyTooLarge(f"The request body is larger than the {limit_bytes} bytes that are allowed{hint}.")
