"""Node URLs, roles, speeds and models: what is taken, how it is spelt, and which field a refusal names."""

from __future__ import annotations

import math
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import BadRequest
from app.nodes import (
    Node,
    Role,
    State,
    about_itself,
    normalise_url,
    parse_host_header,
    parse_models,
    parse_role,
    parse_speed,
)
from app.upstream.transport import Target


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
        ("http://engine/%61%2d%5a%7e", "http://engine/a-Z~"),
        ("http://engine/a%2fb%c3", "http://engine/a%2Fb%C3"),  # an encoded slash is no slash
        ("http://my_engine-1:65535", "http://my_engine-1:65535"),
    ],
)
def test_a_url_has_one_spelling(given_url: str, url: str) -> None:
    assert normalise_url(given_url) == url
    assert normalise_url(url) == url


# By inet_aton(3): one to four parts, decimal or 0x; the last fills the bytes that are left. 0x7f000001 is 2130706433.
@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1.",
        "127.0.1",
        "127.1",
        "127.1.",
        "2130706433",
        "0x7f000001",
        "0X7F.1",
        "0x7f.0x000001",
        "127.0x1",
        "[::ffff:127.0.0.1]",
        "[::FFFF:7f00:1]",
        "[0:0:0:0:0:ffff:7f00:0001]",
    ],
)
def test_every_spelling_of_an_ipv4_address_is_the_same_node(host: str) -> None:
    assert normalise_url(f"http://{host}:80") == "http://127.0.0.1"
    assert normalise_url(f"https://{host}:8443/") == "https://127.0.0.1:8443"


@pytest.mark.parametrize(
    ("host", "as_connected"),
    [("127.0.0.1", 0x7F000001), ("10.258", 0x0A000102), ("10.1.258", 0x0A010102), ("4294967295", 0xFFFFFFFF)],
)
def test_an_ipv4_address_is_the_one_that_a_connection_would_go_to(host: str, as_connected: int) -> None:
    assert int.from_bytes(socket.inet_aton(host)) == as_connected
    assert normalise_url(f"http://{host}") == "http://" + socket.inet_ntoa(as_connected.to_bytes(4))


@pytest.mark.parametrize(
    ("hosts", "host"),
    [
        (["localhost", "localhost.", "LocalHost", "LOCALHOST."], "localhost"),
        (["a.example.org", "A.Example.ORG."], "a.example.org"),
        (["xn--motr-8qa", "XN--MOTR-8QA."], "xn--motr-8qa"),
        (["[fd00::a]", "[FD00:0:0::000A]", "[fd00:0:0:0:0:0:0:a]", "[fd00::0.0.0.10]"], "[fd00::a]"),
        (["[::1]", "[0:0:0:0:0:0:0:1]", "[::0.0.0.1]"], "[::1]"),
        (["0.0.0.0", "0", "0x0.0", "[::ffff:0:0]"], "0.0.0.0"),
        (["engine_1.2", "engine_1.2."], "engine_1.2"),  # a name, although it ends in a number
        (["0xengine"], "0xengine"),
    ],
)
def test_every_spelling_of_a_host_is_the_same_node(hosts: list[str], host: str) -> None:
    assert {normalise_url(f"http://{text}:80/") for text in hosts} == {f"http://{host}"}


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
        ("http://motör", "xn--"),
        ("http://\uff11\uff12\uff17.1", "xn--"),
        ("http://engine//a", "empty, . or .."),
        ("http://engine/a/../b", "empty, . or .."),
        ("http://engine/./a", "empty, . or .."),
        ("http://engine/..", "empty, . or .."),
        ("http://engine\\a", "letters, digits"),
        ("http://engine/a\\b", "empty, . or .."),
        ("http://engine/%2e%2E/b", "empty, . or .."),
        ("http://engine/%2", "hexadecimal"),
        ("http://engine/%zz", "hexadecimal"),
        ("http://a..b", "empty part"),
        ("http://engine..", "empty part"),
        ("http://.engine", "empty part"),
        ("http://.", "empty part"),
        ("http://%65ngine", "letters, digits"),
        ("http://engine,other", "letters, digits"),
        ("http://010.0.0.5", "leading zero"),
        ("http://10.0.0.05", "leading zero"),
        ("http://00", "leading zero"),
        ("http://256.0.0.1", "no IPv4 address"),
        ("http://1.2.3.4.5", "no IPv4 address"),
        ("http://1.65536.1", "no IPv4 address"),
        ("http://4294967296", "no IPv4 address"),
        ("http://" + "9" * 5000, "no IPv4 address"),
        ("http://" + "a" * 64, "longer than"),
        ("http://" + "abcd." * 51, "longer than"),
        ("http://[fe80::1%eth0]", "IPv6 zone"),
        ("http://[fe80::1%25eth0]", "IPv6 zone"),
        ("http://[1.2.3.4]", "IPv6 address|not a URL"),
    ],
)
def test_what_is_no_engine_address_is_refused(given_url: object, words: str) -> None:
    with pytest.raises(BadRequest, match=words) as caught:
        normalise_url(given_url, field="node_url")
    assert caught.value.param == "node_url"
    assert caught.value.message.startswith("node_url")


@given(st.text("0123456789abcfx.:[]%-_/"))
def test_any_host_gives_a_stable_spelling_or_a_refusal(text: str) -> None:
    try:
        url = normalise_url(f"http://{text}")
    except BadRequest:
        return
    assert normalise_url(url) == url
    assert Target(url).url == url


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


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("engine http://a:1 refused the connection", "refused the connection"),
        ("engine http://a:1: its host name can't be resolved", "its host name can't be resolved"),
        ("the answer of engine http://a:1 was closed before its end", "the answer was closed before its end"),
        ("it is down: engine http://a:1: TLS failed", "it is down: TLS failed"),
        ("engine http://a:12 refused the connection", "engine http://a:12 refused the connection"),
        ("http://a:1/health is gone", "http://a:1/health is gone"),
        ("", ""),
    ],
)
def test_what_is_said_of_a_node_does_not_name_it_again(text: str, left: str) -> None:
    assert about_itself(text, "http://a:1") == left


@pytest.mark.parametrize(
    ("value", "spelt"),
    [
        (None, ""),
        ("", ""),
        ("Engine.Example.", "engine.example"),
        ("engine:8000", "engine:8000"),
        ("engine:443", "engine:443"),
        ("10.0.0.5", "10.0.0.5"),
        ("[2001:DB8::0:1]:80", "[2001:db8::1]:80"),
    ],
)
def test_a_host_header_has_one_spelling(value: object, spelt: str) -> None:
    assert parse_host_header(value) == spelt


@pytest.mark.parametrize(
    "value",
    [
        "http://a",
        "a/b",
        "a b",
        "a\r\nx: y",
        "u@a",
        "a:",
        "a:0",
        "a:65536",
        "a:x",
        "a..b",
        ":80",
        "[::1",
        "a?",
        7,
        [],
        "ä",
    ],
)
def test_what_is_no_host_header_is_refused(value: object) -> None:
    with pytest.raises(BadRequest, match="status.host_header must be HOST or HOST:PORT") as caught:
        parse_host_header(value, field="status.host_header")
    assert caught.value.param == "status.host_header"
