"""Multipart forms: the model anywhere in them, files untouched."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import BadRequest
from app.http.form import MAX_PARTS, Form, is_form, model_of_form

TYPE = b"multipart/form-data; boundary=XX"


def form(*parts: tuple[str, bytes], boundary: bytes = b"XX") -> bytes:
    body = b""
    for disposition, content in parts:
        body += b"--%s\r\nContent-Disposition: form-data; %s\r\n\r\n%s\r\n" % (boundary, disposition.encode(), content)
    return body + b"--%s--\r\n" % boundary


def model_of(body: bytes, content_type: bytes = TYPE, allow: bool = False) -> str:
    return model_of_form(content_type, body, allow_transfer_params=allow)


def refused(body: bytes, content_type: bytes = TYPE) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        model_of(body, content_type)
    return caught.value


FILE = ('name="file"; filename="a.wav"', b"\x00\r\n--X\r\n\r\nmodel\r\n")


@pytest.mark.parametrize("parts", [[FILE, ('name="model"', b"m")], [('name="model"', b"m"), FILE]])
def test_model_is_found_wherever_it_stands(parts: list[tuple[str, bytes]]) -> None:
    assert model_of(form(*parts)) == "m"


def test_unquoted_name_quoted_boundary_and_line_ends_before_it() -> None:
    assert model_of(b"\r\n\r\n" + form(("name=model", b"m")), b'Multipart/Form-Data; boundary="XX"') == "m"


@pytest.mark.parametrize(
    "order",
    [
        'name="file"; filename="; name=model"',
        'filename="; name=model"; name="file"',
        'filename="model"; name="file"',
    ],
)
def test_a_file_called_model_is_no_model(order: str) -> None:
    assert refused(form((order, b"m"))).param == "model"


@pytest.mark.parametrize(
    "disposition",
    [
        'name="model"; filename="a.txt"',
        'filename="a.txt"; name="model"',
        'name="model"; filename=""',
        "name=model; FileName=a",
        "name=\"model\"; filename*=utf-8''a",
    ],
)
def test_a_model_that_engines_take_for_a_file_is_refused(disposition: str) -> None:
    error = refused(form((disposition, b"m")))
    assert error.param == "model" and "file" in error.message
    assert refused(form(('name="model"', b"m"), (disposition, b"m"))).param == "model"


def test_the_charset_of_a_form_is_utf_8() -> None:
    for charset in (b"utf-8", b'"UTF-8"'):
        assert model_of(form(('name="model"', b"m")), TYPE + b"; charset=" + charset) == "m"
    # By this one an engine's parser reads `kv_transfer_params` and a second `model`.
    hidden = form(('name="model"', b"m"), ('name="+AGs-v_transfer_params"', b"{}"), ('name="+AG0-odel"', b"other"))
    assert "charset" in refused(hidden, TYPE + b"; charset=utf-7").message
    assert "charset" in refused(hidden, b'multipart/form-data; CharSet="utf-16"; boundary=XX').message


def test_empty_content_is_read_as_empty() -> None:
    assert model_of(form(('name="prompt"', b""), ('name="model"', b"m"))) == "m"
    assert refused(form(('name="model"', b""))).param == "model"


@pytest.mark.parametrize("second", [b"a", b"b"])
def test_a_second_model_is_refused(second: bytes) -> None:
    assert refused(form(('name="model"', b"a"), ('name="model"', second))).param == "model"


def test_internal_field_is_refused() -> None:
    body = form(('name="model"', b"m"), ('name="kv_transfer_params"', b"{}"))
    assert refused(body).param == "kv_transfer_params"
    assert model_of(body, allow=True) == "m"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (form(('name="model"', b"m")), b"multipart/form-data"),
        (b"", TYPE),
        (b"hello", TYPE),
        (b"--XX\r\n", TYPE),
        (b'--XX\r\nContent-Disposition: form-data; name="model"\r\n\r\nm', TYPE),
        (form(('name="model"', b"m"), boundary=b"YY"), TYPE),
        (form(*[('name="x"', b"m")] * MAX_PARTS, ('name="model"', b"m")), TYPE),
        (b"--XX \r\n" + form(('name="model"', b"m"))[6:], TYPE),
        (form(('name="model"', b"m" * 8193)), TYPE),
        (form(('name="model"', b"m"), boundary=b"X" * 257), b"multipart/form-data; boundary=" + b"X" * 257),
        (b"--XX\r\nA: " + b"a" * 10_000 + b"\r\n\r\n\r\n--XX--", TYPE),
    ],
)
def test_a_form_that_is_none_is_a_400(body: bytes, content_type: bytes) -> None:
    assert refused(body, content_type).status == 400


def test_model_must_be_utf8() -> None:
    assert refused(form(('name="model"', b"\xff"))).param == "model"


def test_is_form() -> None:
    assert is_form(TYPE) and is_form(b"Multipart/Form-Data")
    assert not is_form(b"application/json") and not is_form(None)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_model_or_a_400(body: bytes) -> None:
    with contextlib.suppress(BadRequest):
        assert model_of(body)


@pytest.mark.parametrize(
    "content_type",
    [
        b"multipart/form-data; x-boundary=AA; y-boundary=XX",
        b"multipart/form-data; boundary=XX; boundary=YY",
        b"multipart/form-data; boundary = XX",
        b"multipart/form-data, boundary=XX",
        b"multipart/form-data; boundary=XX; boundary*=utf-8''YY",
        b"multipart/form-data; boundary=XX; boundary*0=Y; boundary*1=Y",
    ],
)
def test_a_content_type_that_two_parsers_could_read_differently_is_refused(content_type: bytes) -> None:
    assert "boundary" in refused(form(('name="model"', b"m")), content_type).message


@pytest.mark.parametrize(
    "disposition",
    [
        'name = "kv_transfer_params"',
        'name="x"; name="kv_transfer_params"',
        'name="x"\r\nContent-Disposition: form-data; name="kv_transfer_params"',
        'name="x" kv_transfer_params',
        'name="x"; NAME="y"',
        "name*=utf-8''kv_transfer_params",
        "name=\"x\"; name*=utf-8''kv_transfer_params",
        "name*0=kv_transfer; name*1=_params",
        'name="kv_transfer\\_params"',
        'name="x"\n; name="kv_transfer_params"',
        'name="x"\r; name="kv_transfer_params"',
        'name="x"\r\n ; name="kv_transfer_params"',
        r'name="x"; filename="a\\"; y="; name=kv_transfer_params; z="',
        'name="x"\r\nno header',
    ],
)
def test_a_part_that_two_parsers_could_read_differently_is_refused(disposition: str) -> None:
    refused(form(('name="model"', b"m"), (disposition, b"{}")))


@pytest.mark.parametrize("before", [b"\n", b"\r", b"x", b"\r\n\n", b"--"])
@pytest.mark.parametrize("size", [1, 1000])
def test_no_part_hides_before_the_first_boundary(before: bytes, size: int) -> None:
    # A parser that passes over any line ends sees a field there, whose end is where ours would see the first boundary.
    body = before + form(("name=kv_transfer_params", b"{}"), ('name="model"', b"m"))
    reader = Form(TYPE, allow_transfer_params=False)

    def feed_all() -> None:
        for at in range(0, len(body), size):
            reader.feed(body[at : at + size])

    with pytest.raises(BadRequest):
        feed_all()


def test_a_head_ends_where_its_lines_do() -> None:
    # The empty line after the boundary ends a head without a disposition; what follows is content.
    hidden = b'--XX\r\n\r\nx\r\nContent-Disposition: form-data; name="x"\r\n\r\n\r\n'
    refused(hidden + form(('name="model"', b"m")))


def test_names_of_files_may_be_written_as_clients_do() -> None:
    files = [r'name="file"; filename="C:\talk.wav"', "name=file; filename=a; filename*=utf-8''%C3%A4"]
    files += [r'name="file"; filename="a\"b"', 'name="file"; filename="\u00e4"']
    assert model_of(form(('name="model"', b"m"), *((name, b"x") for name in files))) == "m"


WHOLE = b"\r\n" + form(FILE, ('name="model"', b"m1"), ('name="prompt"', b"\r\n--X\r")) + b"after\r\n--XX"


@pytest.mark.parametrize("at", range(len(WHOLE) + 1))
def test_where_a_form_is_cut_makes_no_difference(at: int) -> None:
    reader = Form(TYPE, allow_transfer_params=False)
    reader.feed(WHOLE[:at])
    reader.feed(WHOLE[at:])
    assert reader.end() == "m1"


def test_a_form_may_come_byte_by_byte() -> None:
    reader = Form(TYPE, allow_transfer_params=False)
    known_at = None
    for i in range(len(WHOLE)):
        reader.feed(WHOLE[i : i + 1])
        if known_at is None and reader.model is not None:
            known_at = i + 1
    assert reader.end() == "m1"
    assert known_at == WHOLE.index(b"m1\r\n--XX") + len(b"m1\r\n--XX")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_what_stands_behind_the_model_is_looked_at(size: int) -> None:
    body = form(('name="model"', b"m"), FILE, ('name="with_cache"', b"true"))
    reader = Form(TYPE, allow_transfer_params=False)

    def feed_all() -> None:
        for at in range(0, len(body), size):
            reader.feed(body[at : at + size])

    with pytest.raises(BadRequest) as caught:
        feed_all()
    assert caught.value.param == "with_cache"


def test_a_form_that_is_cut_off_has_no_end() -> None:
    body = form(('name="model"', b"m"), FILE)
    for end in range(len(body) - len(b"--\r\n")):
        reader = Form(TYPE, allow_transfer_params=False)
        reader.feed(body[:end])
        with pytest.raises(BadRequest):
            reader.end()
