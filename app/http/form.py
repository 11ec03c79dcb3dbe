"""The model that a multipart form names: audio transcriptions come as forms, not as JSON.

Only part headers are parsed; files are skipped over where they lie, never copied. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from app.errors import BadRequest
from app.http.peek import INTERNAL, refuse

MAX_PARTS = 1000
"""As Starlette's own form parser, which the engines use."""
MAX_PART_HEAD_BYTES = 8192

# Read strictly, and refused where it is not: whatever is written so that two parsers could read it differently
# would be one request for us and another for the engine.
_PARAMETER = rb'\s*;\s*([!#$%&\'*+.^_`|~0-9A-Za-z-]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s;,"]*))'
_FORM = re.compile(rb"\s*multipart/form-data((?:%s)*)\s*" % _PARAMETER, re.IGNORECASE).fullmatch
_DISPOSITIONS = re.compile(rb"^content-disposition\s*:([^\r\n]*)", re.IGNORECASE | re.MULTILINE).findall
_FORM_DATA = re.compile(rb"\s*form-data((?:%s)*)\s*" % _PARAMETER, re.IGNORECASE).fullmatch
# Every parameter in turn, quoted values whole: a file may be called `; name=model`.
_PARAMETERS = re.compile(_PARAMETER).findall


def is_form(content_type: bytes | None) -> bool:
    return content_type is not None and content_type[:19].lower() == b"multipart/form-data"


def model_of_form(content_type: bytes, body: bytes, *, allow_transfer_params: bool, nameless: bool = False) -> str:
    """The value of the form's `model` field, the last one if it is repeated.

    Args:
        nameless: it need not have one; then it is "".

    Raises:
        BadRequest: no valid form, no model, or an internal field.
    """
    model = b""
    for name, start, end in _parts(body, _delimiter(content_type)):
        if name == "model":
            model = body[start:end]
        elif name in INTERNAL and not allow_transfer_params:
            raise refuse(name)
    try:
        text = model.decode()
    except UnicodeDecodeError as e:
        raise BadRequest("model must be UTF-8", param="model") from e
    if not text and not nameless:
        raise BadRequest("The form does not name a model", param="model")
    return text


def renamed_form(content_type: bytes, body: bytes, model: str) -> bytes:
    """A form that `model_of_form` has taken with another model in it, all else byte for byte."""
    delimiter, value = _delimiter(content_type), model.encode()
    spans = [(start, end) for name, start, end in _parts(body, delimiter) if name == "model"]
    if spans:
        start, end = spans[-1]
        return b"%b%b%b" % (body[:start], value, body[end:])
    first = 0 if body.startswith(delimiter) else body.index(b"\r\n" + delimiter) + 2
    part = b'%b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n' % (delimiter, value)
    return b"%b%b%b" % (body[:first], part, body[first:])


def _delimiter(content_type: bytes) -> bytes:
    form = _FORM(content_type)
    boundary = _parameters(form[1]).get(b"boundary") if form is not None else None
    if not boundary:
        raise BadRequest("The Content-Type of a form must have one boundary")
    return b"--" + boundary


def _parts(body: bytes, delimiter: bytes) -> Iterator[tuple[str, int, int]]:
    """(name, start, end) of every part's content."""
    at = 0 if body.startswith(delimiter) else body.find(b"\r\n" + delimiter) + 2
    if at == 1:
        raise BadRequest("The form's boundary is not in the request body")
    for _ in range(MAX_PARTS):
        at += len(delimiter)
        if body.startswith(b"--", at):
            return
        head_end = body.find(b"\r\n\r\n", at, at + MAX_PART_HEAD_BYTES)
        if head_end < 0:
            break
        start = head_end + 4
        end = body.find(b"\r\n" + delimiter, start)
        if end < 0:
            break
        yield _name_of(body[at:head_end]), start, end
        at = end + 2
    raise BadRequest("The form is not complete, or has too many parts")


def _name_of(head: bytes) -> str:
    dispositions = _DISPOSITIONS(head)
    form_data = _FORM_DATA(dispositions[0]) if len(dispositions) == 1 else None
    if form_data is None:
        raise BadRequest("Every part of a form must have one Content-Disposition: form-data")
    return _parameters(form_data[1]).get(b"name", b"").decode("utf-8", "replace")


def _parameters(text: bytes) -> dict[bytes, bytes]:
    """By name in lower case. Raises BadRequest where one is given twice."""
    found: dict[bytes, bytes] = {}
    for name, quoted, plain in _PARAMETERS(text):
        if name.lower() in found:
            raise BadRequest(f"The form gives the parameter {name.decode()} twice")
        found[name.lower()] = quoted or plain
    return found
