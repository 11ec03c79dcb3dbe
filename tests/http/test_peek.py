"""What is read of a body: the model, and nothing internal gets past it."""

from __future__ import annotations

import json
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import BadRequest
from app.http.peek import INTERNAL, LARGE_BYTES, peek

NAMED_BY_THE_DESIGN = (
    "migration_request",
    "with_cache",
    "preserve_cache",
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "disagg_prefill_dp_rank",
    "disaggregated_params",
    "disagg_prefill_resp",
)


def refused(body: bytes) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        peek(body, allow_transfer_params=False)
    return caught.value


def test_internal_fields_are_those_that_the_design_names() -> None:
    assert INTERNAL == NAMED_BY_THE_DESIGN


def test_a_body_without_internal_fields_is_the_very_object_that_came() -> None:
    body = b' { "model" : "m", "x": [1,\t2.50, "\\u00e9"], "model2": null }\n'
    model, forwarded = peek(body, allow_transfer_params=False)
    assert model == "m"
    assert forwarded is body


@pytest.mark.parametrize("field", NAMED_BY_THE_DESIGN)
@pytest.mark.parametrize("value", ["{}", "0", "false", '""', "[null]", '"null"'])
def test_internal_field_is_refused_by_name(field: str, value: str) -> None:
    error = refused(b'{"model":"m","%s":%s}' % (field.encode(), value.encode()))
    assert (error.status, error.param) == (400, field)
    assert field in error.message and "--allow-transfer-params" in error.message


@pytest.mark.parametrize("field", NAMED_BY_THE_DESIGN)
def test_null_internal_field_is_cut_out_and_other_values_stay_byte_for_byte(field: str) -> None:
    body = b'{"model":"m", "%s" : null ,"n": [1,  2.50, 1e5, "\\u00e9\\/"]}' % field.encode()
    _, forwarded = peek(body, allow_transfer_params=False)
    assert forwarded == b'{"model":"m","n":[1,  2.50, 1e5, "\\u00e9\\/"]}'


def test_escaped_key_is_the_same_key() -> None:
    assert refused(b'{"model":"m","\\u006bv_transfer_params":{"a":1}}').param == "kv_transfer_params"
    assert refused(b'{"\\u006d\\u006Fdel":"m","with\\u005Fcache":true}').param == "with_cache"


def test_escaped_null_key_is_cut_out() -> None:
    _, forwarded = peek(b'{"model":"m","\\u006bv_transfer_params":null}', allow_transfer_params=False)
    assert forwarded == b'{"model":"m"}'


def test_of_a_repeated_key_nothing_but_the_harmless_last_one_can_get_through() -> None:
    first_null = b'{"model":"m","with_cache":null,"with_cache":true}'
    assert refused(first_null).param == "with_cache"
    last_null = b'{"model":"m","with_cache":true,"with_cache":null}'
    assert peek(last_null, allow_transfer_params=False)[1] == b'{"model":"m"}'


def test_of_a_repeated_model_the_last_counts_as_in_the_engines() -> None:
    body = b'{"model":"a","model":"b"}'
    assert peek(body, allow_transfer_params=False)[0] == json.loads(body)["model"] == "b"


def test_vllm_xargs_is_no_second_door() -> None:
    error = refused(b'{"model":"m","vllm_xargs":{"ok":1,"kv_transfer_params":"x"}}')
    assert error.param == "vllm_xargs.kv_transfer_params"
    for harmless in (b'{"model":"m","vllm_xargs":{"ok":1}}', b'{"model":"m","vllm_xargs":null}'):
        assert peek(harmless, allow_transfer_params=False)[1] is harmless


def test_allowed_transfer_params_pass_untouched() -> None:
    body = b'{"model":"m","kv_transfer_params":{"a":1},"with_cache":null}'
    assert peek(body, allow_transfer_params=True) == ("m", body)


def test_a_name_inside_of_another_field_is_the_users_own() -> None:
    body = b'{"model":"m","metadata":{"with_cache":true}}'
    assert peek(body, allow_transfer_params=False)[1] is body


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b'{"model":"m"',
        b'{"model":"m"} x',
        b'{"model":"m",}',
        b'{"model":"m","x":NaN}',
        b'{"model":"m","x":01}',
        b'{"model":"m","x":"\n"}',
        b'{"model":"\xff"}',
        b'\xef\xbb\xbf{"model":"m"}',  # json.loads would take it: then the engine would see what we did not
        '{"model":"m","with_cache":true}'.encode("utf-16"),  # and this, too
        '{"model":"m","with_cache":true}'.encode("utf-32"),
        b"\x00",
        b"\xff\xfe",
    ],
)
def test_bad_json_is_a_400(body: bytes) -> None:
    error = refused(body)
    assert (error.status, error.param) == (400, None)
    assert "valid JSON" in error.message


@pytest.mark.parametrize("body", [b"[]", b'"m"', b"null", b"1", b'[{"model":"m"}]'])
def test_other_json_than_an_object_is_a_400(body: bytes) -> None:
    assert "JSON object" in refused(body).message


@pytest.mark.parametrize("depth", [10_000, 1_000_000] if sys.version_info < (3, 14) else [1_000_000])
@pytest.mark.parametrize("field", [b"x", b"kv_transfer_params", b"vllm_xargs"])
def test_deep_nesting_is_a_400(depth: int, field: bytes) -> None:
    assert "nested" in refused(b'{"model":"m","%s":%s%s}' % (field, b"[" * depth, b"]" * depth)).message


@pytest.mark.parametrize("body", [b"{}", b'{"model":""}', b'{"model":null}', b'{"model":1}', b'{"model":["m"]}'])
def test_no_usable_model_is_a_400_that_names_it(body: bytes) -> None:
    assert refused(body).param == "model"


leaves = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
keys = st.sampled_from(NAMED_BY_THE_DESIGN) | st.text(max_size=8)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(keys, values, max_size=6), st.booleans())
def test_what_is_forwarded_holds_all_of_the_users_and_nothing_internal(members: dict[str, object], ascii: bool) -> None:
    members = {**members, "model": "m"}
    members.pop("vllm_xargs", None)
    body = json.dumps(members, ensure_ascii=ascii).encode("utf-8", "replace")
    try:
        _, forwarded = peek(body, allow_transfer_params=False)
    except BadRequest:
        assert any(members.get(field) is not None for field in INTERNAL)
    else:
        assert json.loads(forwarded) == {k: v for k, v in json.loads(body).items() if k not in INTERNAL}


def test_an_internal_field_can_not_hide_behind_what_only_another_parser_takes() -> None:
    for inside in (b'{"kv_transfer_params":{},"\\ud800":1}', b'{"kv_transfer_params":{},"\xff":1}'):
        body = b'{"model":"m","vllm_xargs":' + inside + b"}"
        with pytest.raises(BadRequest):
            peek(body, allow_transfer_params=False)


def test_broken_json_is_not_built_in_memory_to_find_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def built(*args: object, **options: object) -> None:
        raise AssertionError("the whole body was decoded")

    monkeypatch.setattr(json, "loads", built)
    for body in (b'{"model":"m","a":[[],[],', b'{"model":"m","a":"\\ud800","b":"' + b"x" * 2**20 + b'"}'):
        assert refused(body).status == 400


LONG = b"x" * (LARGE_BYTES + 1)
long_pieces = st.sampled_from(
    [
        b'"%s"' % LONG,
        b'"a\\"%s"' % LONG,
        b'"%s\\"b"' % LONG,
        b'"%s\\\\"' % LONG,
        b"[%s1]" % (b"1, " * LARGE_BYTES),
        b'["a",%s"b"]' % (b" " * LARGE_BYTES),
        b'{"model":"other","kv_transfer_params":{},"x":"%s"}' % LONG,
        b'{"%s":"kv_transfer_params"}' % LONG,
        b'"%s","kv_transfer_params":1,"y":"%s"' % (LONG, LONG),
        b'"%s","kv_transfer_params":null,"y":"%s"' % (LONG, LONG),
        b'"%s","model":"n","y":"%s"' % (LONG, LONG),
        b'"%s","%s":1' % (LONG, b"\\u006dodel"),
        b'"%s","model":"%s"' % (LONG, LONG),
        b'"%s","model":""' % LONG,
        b'1,"model":"n\\"%s"' % LONG,
        b'"%s"%s"z"' % (LONG, b" " * LARGE_BYTES),
        b'"%s" "kv_transfer_params":1,"%s"' % (LONG, LONG),
        b'"%s' % LONG,
        b'1,"%s":%s' % (LONG, b"1" * LARGE_BYTES),
    ]
)
short_pieces = st.sampled_from([b'"short"', b"{}", b'"\\""', b'[1, "2"]', b'"\\ud800"', b"nul"])


@settings(max_examples=100, deadline=None)
@given(st.lists(long_pieces | short_pieces, min_size=1, max_size=4), st.booleans(), st.booleans(), st.booleans())
def test_a_large_body_is_understood_as_if_all_of_it_was_read(
    pieces: list[bytes], first: bool, allow: bool, unnamed: bool
) -> None:
    members = [b'"p%d": %b' % (n, piece) for n, piece in enumerate(pieces)]
    body = b"{" + b",".join([b'"model":"m"', *members] if first else [*members, b'"model":"m"']) + b"}"

    def understood(body: bytes) -> object:
        try:
            return peek(body, allow_transfer_params=allow, unnamed=unnamed)
        except BadRequest as e:
            return e.message, e.param

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("app.http.peek.LARGE_BYTES", 2**40)
        whole = understood(body)
    assert understood(body) == whole


def test_a_long_text_is_passed_over_unread() -> None:
    body = b'{"model":"m","image":"%s\n%s","model":"n"}' % (LONG, LONG)  # which is for the engine to refuse
    assert peek(body, allow_transfer_params=False) == ("n", body)
    with pytest.raises(BadRequest):
        peek(body.replace(LONG, b""), allow_transfer_params=False)


@pytest.mark.parametrize("before", ["", "n", 'n"', "n\\"])
def test_a_long_model_is_not_cut(before: str) -> None:
    model = before + LONG.decode()
    assert peek(json.dumps({"x": 1, "model": model}).encode(), allow_transfer_params=False)[0] == model
