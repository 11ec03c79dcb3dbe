"""Request bodies that have to be taken apart and put together again; what is not touched stays bytes.

msgspec reads and writes them. Only where a string has a lone surrogate does the standard library: engines
take those, the peek lets them pass, and clients send them that cut a text in the middle of an emoji. Pure.
"""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec

from app.errors import BadRequest

decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
decode = msgspec.json.Decoder().decode


def members_of(body: bytes) -> dict[str, msgspec.Raw]:
    """The members of a JSON object, each as it was written. Raises BadRequest."""
    try:
        return decode_members(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        members = _second_opinion(body, "The request body", e)
        if not isinstance(members, dict):
            raise BadRequest("The request body must be a JSON object") from e
        return {name: msgspec.Raw(encoded(value)) for name, value in members.items()}
    except RecursionError as e:
        raise BadRequest("The request body is nested too deeply") from e


def value_of(raw: msgspec.Raw, name: str) -> Any:
    """The value of the member `name`. Raises BadRequest."""
    try:
        return decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        # What the peek has only skipped over is looked at here for the first time: UTF-8, sizes of numbers.
        return _second_opinion(bytes(raw), name, e)
    except RecursionError as e:
        raise BadRequest(f"{name} is nested too deeply") from e


def encoded(value: object) -> bytes:
    """JSON of `value`, in which there may be members as they were read. Raises BadRequest."""
    try:
        try:
            return msgspec.json.encode(value)
        except UnicodeEncodeError:
            return json.dumps(value, default=_as_read).encode()
    except RecursionError as e:
        raise BadRequest("The request body is nested too deeply") from e


def _second_opinion(raw: bytes, name: str, strict: Exception) -> Any:
    if b"\\u" not in raw:
        raise BadRequest(f"{name} is not valid JSON: {strict}") from strict
    try:
        return json.loads(raw.decode(), parse_float=_finite, parse_constant=_finite)
    except RecursionError as e:
        raise BadRequest(f"{name} is nested too deeply") from e
    except ValueError as e:
        raise BadRequest(f"{name} is not valid JSON: {strict}") from e


def _finite(text: str) -> float:
    """A number as msgspec takes it: what is too large for one would be written as another."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no JSON number")
    return number


def _as_read(value: object) -> Any:
    if isinstance(value, msgspec.Raw):
        return json.loads(bytes(value))
    raise TypeError(type(value).__name__)
