"""Node URLs, roles, speeds and models: what is taken, how it is spelt, and which field a refusal names."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import BadRequest
from app.nodes import Node, Role, State, normalise_url, parse_models, parse_role, parse_speed


@pytest.mark.parametrize(
    ("given_url", "url"),
    [
        ("http://10.0.0.5:23333", "http://10.0.0.5:23333"),
        ("http://10.0.0.5:23333/", "http://10.0.0.5:23333"),
        ("  http://10.0.0.5:23333\n", "http://10.0.0.5:23333"),
        ("HTTP://Engine.Local:23333", "http://engine.local:23333"),
        ("http://engine:80", "http://engine"),
        ("https://engine:443", "https://engine"),
        ("https://engine:80", "https://engine:80"),
        ("http://engine:443/", "http://engine:443"),
        ("http://engine:", "http://engine"),
        ("http://engine:00080", "http://engine"),
        ("http://engine/v1/Prefix/", "http://engine/v1/Prefix"),  # a path keeps its case
        ("http://[::1]:23333", "http://[::1]:23333"),
        ("http://[FE80::A]:80/x", "http://[fe80::a]/x"),
        ("http://engine/a%20b", "http://engine/a%20b"),
        ("http://my_engine-1:65535", "http://my_engine-1:65535"),
    ],
)
def test_a_url_has_one_spelling(given_url: str, url: str) -> None:
    assert normalise_url(given_url) == url
    assert normalise_url(url) == url


@pytest.mark.parametrize(
    ("given_url", "words"),
    [
        (None, "non-empty string"),
        (5, "non-empty string"),
        (b"http://engine", "non-empty string"),
        (["http://engine"], "non-empty string"),
        ("", "non-empty string"),
        ("   ", "non-empty string"),
        ("engine:23333", "must start with"),
        ("10.0.0.5:23333", "must start with"),
        ("//engine", "must start with"),
        ("ftp://engine", "must start with"),
        ("unix:///engine", "must start with"),
        ("javascript:alert(1)", "must start with"),
        ("http://", "no host"),
        ("http://:23333", "no host"),
        ("http:///path", "no host"),
        ("http:engine", "no host"),
        ("http://user@engine", "user or password"),
        ("http://user:pw@engine:1", "user or password"),
        ("http://@engine", "user or password"),
        ("http://engine?x=1", "query or fragment"),
        ("http://engine/?", "query or fragment"),
        ("http://engine/#", "query or fragment"),
        ("http://engine/#a", "query or fragment"),
        ("http://engine:0", "port 0"),
        ("http://engine:65536", "not a URL"),
        ("http://engine:-1", "not a URL"),
        ("http://engine:http", "not a URL"),
        ("http://[::1", "not a URL"),
        ("http://[engine]", "not a URL"),
        ("http://engine/a b", "characters"),
        ("http://engine/\r\nX-Header: 1", "characters"),
        ("http://engine\x00", "characters"),
        ("http://engine\x7f", "characters"),
        ("http://motör", "characters"),
        ("http://engine//a", "empty, . or .."),
        ("http://engine/a/../b", "empty, . or .."),
        ("http://engine/./a", "empty, . or .."),
        ("http://engine/..", "empty, . or .."),
        ("http://engine\\a", "empty, . or .."),
    ],
)
def test_what_is_no_engine_address_is_refused(given_url: object, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as caught:
        normalise_url(given_url, field="node_url")
    assert caught.value.param == "node_url"
    assert caught.value.message.startswith("node_url")


@given(st.text())
def test_any_text_gives_a_stable_spelling_or_a_refusal(text: str) -> None:
    for candidate in (text, f"http://{text}", f"http://engine/{text}", f"http://engine:{text}"):
        try:
            url = normalise_url(candidate)
        except BadRequest:
            continue
        assert normalise_url(url) == url
        assert url.isascii() and url.isprintable() and " " not in url
        assert not url.endswith("/")


@pytest.mark.parametrize(
    ("value", "role"),
    [
        (1, Role.Hybrid),
        (2, Role.Prefill),
        (3, Role.Decode),
        (4, Role.Encode),
        ("1", Role.Hybrid),
        (" 3 ", Role.Decode),
        ("Hybrid", Role.Hybrid),
        ("prefill", Role.Prefill),
        ("DECODE", Role.Decode),
        (" eNcOdE\n", Role.Encode),
        (Role.Decode, Role.Decode),
    ],
)
def test_a_role_is_a_number_or_a_name_in_any_case(value: object, role: Role) -> None:
    assert parse_role(value) is role


@pytest.mark.parametrize(
    "value",
    [0, 5, -1, True, False, 1.0, None, "", " ", "0", "5", "1.0", "²", "1²", "9" * 5000, "decoder", [1], {"role": 1}],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_role_is_refused(value: object) -> None:
    with pytest.raises(BadRequest, match=r"role must be one of 1 Hybrid, 2 Prefill, 3 Decode, 4 Encode") as caught:
        parse_role(value)
    assert caught.value.param == "role"


@pytest.mark.parametrize(
    ("value", "speed"),
    [(None, None), (-1, None), (-1.0, None), (8, 8.0), (0.5, 0.5), (1e-300, 1e-300), (1e300, 1e300), (5e-324, 5e-324)],
)
def test_a_speed_is_any_finite_positive_number(value: object, speed: float | None) -> None:
    assert parse_speed(value) == speed


@pytest.mark.parametrize(
    "value",
    [0, 0.0, -0.0, -2, -0.5, -1.0000001, math.nan, math.inf, -math.inf, 10**400, "8", "", True, False, [8], {}],
    ids=lambda value: repr(value)[:20],
)
def test_r16_what_is_no_speed_is_refused(value: object) -> None:
    with pytest.raises(BadRequest, match="speed must be a finite number greater than 0") as caught:
        parse_speed(value)
    assert caught.value.param == "speed"


@pytest.mark.parametrize(
    ("value", "models"),
    [(None, ()), ([], ()), (["m"], ("m",)), (["b", "a", "b"], ("b", "a")), (["ü/模型"], ("ü/模型",))],
)
def test_models_are_kept_in_order_each_once(value: object, models: tuple[str, ...]) -> None:
    assert parse_models(value) == models


@pytest.mark.parametrize("value", ["m", ("m",), [""], ["m", None], [1], {"m": 1}, 5, True])
def test_what_is_no_list_of_names_is_refused(value: object) -> None:
    with pytest.raises(BadRequest, match="models must be a list of non-empty strings") as caught:
        parse_models(value)
    assert caught.value.param == "models"


def test_the_numbers_of_the_roles_are_lmdeploys() -> None:
    assert [(role.value, role.name) for role in Role] == [(1, "Hybrid"), (2, "Prefill"), (3, "Decode"), (4, "Encode")]


def test_a_node_is_pending_and_hybrid_unless_said_otherwise() -> None:
    node = Node("http://engine")
    assert (node.role, node.state, node.models, node.speed, node.static) == (
        Role.Hybrid,
        State.PENDING,
        (),
        None,
        False,
    )


def test_a_model_name_that_is_no_text_is_refused() -> None:
    with pytest.raises(BadRequest):
        parse_models(["m", "\ud800"])


def test_an_ipv6_address_has_one_spelling() -> None:
    assert normalise_url("http://[0:0:0:0:0:0:0:1]:8000") == "http://[::1]:8000"
    with pytest.raises(BadRequest):
        normalise_url("http://[v1.a]:8000")
