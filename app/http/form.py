"""The model that a multipart form names: audio transcriptions come as forms, not as JSON.

Only part headers are parsed and only the model is kept; a form may come in any pieces and be of any size. Pure.
"""

from __future__ import annotations

import re

from app.errors import BadRequest
from app.http.peek import INTERNAL, refuse

MAX_PARTS = 1000
"""As Starlette's own form parser, which the engines use."""
MAX_PART_HEAD_BYTES = 8192
MAX_MODEL_BYTES = 8192
MAX_BOUNDARY_BYTES = 256
"""RFC 2046, 5.1.1, allows 70."""

_CONTENT, _BOUNDARY, _HEAD, _EPILOGUE = range(4)

# Read strictly, and refused where it is not: whatever is written so that two parsers could read it differently
# would be one request for us and another for the engine.
# A text that ends in a backslash: some count its last quote as one with a backslash before it.
_PARAMETER = rb'\s*;\s*([!#$%&\'*+.^_`|~0-9A-Za-z-]+)=(?:"((?:[^"\\]|\\.)*)(?<!\\)"|([^\s;,"]*))'
_FORM = re.compile(rb"\s*multipart/form-data((?:%s)*)\s*" % _PARAMETER, re.IGNORECASE).fullmatch
_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([^\x00-\x08\x0a-\x1f\x7f]*)").fullmatch
_FORM_DATA = re.compile(rb"\s*form-data((?:%s)*)\s*" % _PARAMETER, re.IGNORECASE).fullmatch
# Every parameter in turn, quoted values whole: a file may be called `; name=model`.
_PARAMETERS = re.compile(_PARAMETER).findall


def is_form(content_type: bytes | None) -> bool:
    return content_type is not None and content_type[:19].lower() == b"multipart/form-data"


class Form:
    """A form as it comes, in whatever pieces: `feed` all of it, then `end`.

    `model` is None until its field is complete. Later fields are looked at as well: what is refused must not get
    through behind bytes that have gone on already.

    Args:
        nameless: it need not name a model; then `end` returns "", and the field may be empty.

    Raises:
        BadRequest: the Content-Type has no boundary, or two, or another charset than UTF-8.
    """

    __slots__ = (
        "_allow",
        "_delimiter",
        "_fed",
        "_first",
        "_left",
        "_nameless",
        "_parts",
        "_span",
        "_value",
        "_where",
        "model",
    )

    def __init__(self, content_type: bytes, *, allow_transfer_params: bool, nameless: bool = False) -> None:
        form = _FORM(content_type)
        given = _parameters(form[1]) if form is not None else {}
        boundary = given.get(b"boundary")
        if not boundary or len(boundary) > MAX_BOUNDARY_BYTES:
            raise BadRequest("The Content-Type of a form must have one boundary")
        if given.get(b"charset", b"utf-8").lower() != b"utf-8":
            # Starlette reads names and values by it: `+AG0-odel` would be the engine's `model`, and none to us.
            raise BadRequest("The charset of a form must be utf-8, if it has one")
        self.model: str | None = None
        self._allow = allow_transfer_params
        self._nameless = nameless
        self._delimiter = b"\r\n--" + boundary
        self._left = b"\r\n"  # the first delimiter may be the first line
        self._fed = -2  # where in the form `_left` begins
        self._first = 0  # where the first part's boundary begins
        self._span = (0, 0)  # of the model's value
        self._where = _CONTENT  # of what stands before the first part
        self._parts = 0
        self._value: bytearray | None = None  # of the model, while it comes

    def __repr__(self) -> str:
        return f"<Form model={self.model!r} parts={self._parts}>"

    def feed(self, data: bytes) -> None:
        """Raises BadRequest: it is no form, or has what is refused."""
        data = self._left + data
        at = 0
        while True:
            if self._where == _CONTENT:
                end = data.find(self._delimiter, at)
                till = end if end >= 0 else max(at, len(data) - len(self._delimiter) + 1)
                if not self._parts and data[at:till].strip(b"\r\n"):
                    # Where others see a boundary after another line end than ours, a part would stand there.
                    raise BadRequest("The form does not begin with its boundary")
                if self._value is not None:
                    self._take(data[at:till])
                at = till
                if end < 0:
                    break
                self._end_part(self._fed + end)
                at += len(self._delimiter)
                self._where = _BOUNDARY
            elif self._where == _BOUNDARY:
                if len(data) - at < 2:
                    break
                what = data[at : at + 2]
                if what not in (b"--", b"\r\n"):
                    # RFC 2046 has blanks here, which nobody sends; parsers differ in what they take it for.
                    raise BadRequest("A boundary of the form does not stand alone in its line")
                self._where = _EPILOGUE if what == b"--" else _HEAD
            elif self._where == _HEAD:
                end = data.find(b"\r\n\r\n", at, at + MAX_PART_HEAD_BYTES)
                if end < 0:
                    if len(data) - at >= MAX_PART_HEAD_BYTES:
                        raise BadRequest("A part of the form has a head that is too long")
                    break
                self._begin_part(data[at + 2 : end])
                at = end + 4
                self._where = _CONTENT
            else:
                return  # no parser reads what follows
        self._left = data[at:]
        self._fed += at

    def end(self) -> str:
        """All has been fed. Returns the model; raises BadRequest: it is not complete, or names none."""
        if self._where != _EPILOGUE:
            missing = "is not complete" if self._parts else "has no boundary in the request body"
            raise BadRequest(f"The form {missing}")
        if self.model is None:
            if not self._nameless:
                raise BadRequest("The form does not name a model", param="model")
            self.model = ""
        return self.model

    def swap(self, model: str) -> tuple[int, int, bytes]:
        """(start, end, instead): what of the form is to be replaced, so that it names `model` and is otherwise the
        same byte for byte. Only once its own `model` is known."""
        start, end = self._span
        if start:
            return start, end, model.encode()
        part = b'%b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n'
        return self._first, self._first, part % (self._delimiter[2:], model.encode())

    def _begin_part(self, head: bytes) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise BadRequest("The form has too many parts")
        name, is_file = _disposition_of(head)
        if name == "model":
            if self.model is not None:
                raise BadRequest("The form names a model twice", param="model")
            if is_file:
                # Starlette, which the engines use, takes a part with a file's name for a file, also an empty name.
                raise BadRequest("The form's model must be a field, not a file: it has a filename", param="model")
            self._value = bytearray()
        elif name in INTERNAL and not self._allow:
            raise refuse(name)

    def _take(self, data: bytes) -> None:
        assert self._value is not None
        self._value += data
        if len(self._value) > MAX_MODEL_BYTES:
            raise BadRequest("The form's model is too long", param="model")

    def _end_part(self, at: int) -> None:
        if not self._parts:
            self._first = at + 2
        value, self._value = self._value, None
        if value is None:
            return
        try:
            self.model = value.decode()
        except UnicodeDecodeError as e:
            raise BadRequest("model must be UTF-8", param="model") from e
        if not self.model and not self._nameless:
            raise BadRequest("The form does not name a model", param="model")
        self._span = (at - len(value), at)


def model_of_form(content_type: bytes, body: bytes, *, allow_transfer_params: bool, nameless: bool = False) -> str:
    """The value of the form's `model` field.

    Args:
        nameless: it need not have one; then it is "".

    Raises:
        BadRequest: no valid form, no model or two, or an internal field.
    """
    form = Form(content_type, allow_transfer_params=allow_transfer_params, nameless=nameless)
    form.feed(body)
    return form.end()


def renamed_form(content_type: bytes, body: bytes, model: str) -> bytes:
    """A form that `model_of_form` has taken with another model in it, all else byte for byte."""
    form = Form(content_type, allow_transfer_params=True, nameless=True)
    form.feed(body)
    form.end()
    start, end, instead = form.swap(model)
    return b"%b%b%b" % (body[:start], instead, body[end:])


def _disposition_of(head: bytes) -> tuple[str, bool]:
    """A part's name, and whether it gives a file's name too."""
    lines = [_LINE(line) for line in head.split(b"\r\n")]
    found = [line[2] for line in lines if line is not None and line[1].lower() == b"content-disposition"]
    form_data = _FORM_DATA(found[0]) if len(found) == 1 and all(lines) else None
    if form_data is None:
        raise BadRequest("Every part of a form must have one Content-Disposition: form-data, and lines of headers only")
    given = _parameters(form_data[1])
    name = given.get(b"name", b"")
    if b"\\" in name:
        raise BadRequest("The name of a form's field must not have a backslash")
    return name.decode("utf-8", "replace"), b"filename" in given or b"filename*" in given


def _parameters(text: bytes) -> dict[bytes, bytes]:
    """By name in lower case. Raises BadRequest where one is given twice, or as RFC 2231 has it (`name*=`), which some
    take for the other spelling and some for another parameter; of a file's name it is allowed, as nobody goes by it."""
    found: dict[bytes, bytes] = {}
    for name, quoted, plain in _PARAMETERS(text):
        if b"*" in name and name.lower() != b"filename*":
            raise BadRequest(f"The form gives the parameter {name.decode()}, which must be written without an asterisk")
        if name.lower() in found:
            raise BadRequest(f"The form gives the parameter {name.decode()} twice")
        found[name.lower()] = quoted or plain
    return found
