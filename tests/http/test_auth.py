"""Who may do what."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from app.access_keys import KeyRing, access_key
from app.errors import EvenhandError, Forbidden, Unauthorized
from app.http.auth import Authority

LOOPBACK = ("127.0.0.0/8", "::1/128")
STRANGER = "203.0.113.9"


def authority(api: str = "", admin: str = "", trusted: tuple[str, ...] = LOOPBACK, reader: str = "") -> Authority:
    ring = KeyRing(api=api.split(), admin=admin.split(), reader=reader.split())
    return Authority(ring, trusted_networks=trusted)


def bearer(key: str, scheme: str = "Bearer") -> list[tuple[bytes, bytes]]:
    return [(b"host", b"127.0.0.1:8000"), (b"authorization", f"{scheme} {key}".encode())]


def client_says(who: Authority, headers: list[tuple[bytes, bytes]]) -> type[EvenhandError] | None:
    try:
        who.check_client(headers)
    except EvenhandError as e:
        return type(e)
    return None


def admin_says(who: Authority, headers: list[tuple[bytes, bytes]], peer: str | None) -> type[EvenhandError] | None:
    try:
        who.check_admin(headers, peer)
    except EvenhandError as e:
        return type(e)
    return None


def test_without_api_keys_clients_need_none() -> None:
    assert client_says(authority(admin="a"), []) is None


@pytest.mark.parametrize("key", ["k1", "k2", "k3"])
def test_every_api_key_opens(key: str) -> None:
    assert client_says(authority("k1 k2 k3"), bearer(key)) is None
    assert client_says(authority("k1 k2 k3"), bearer(key, "bEARER")) is None


@pytest.mark.parametrize("key", ["", "k", "k11", "K1", "k1 k2", "\xe4", "a1"])
def test_other_keys_do_not(key: str) -> None:
    assert client_says(authority("k1 k2", "a1"), bearer(key)) is Unauthorized


def test_only_bearer_and_x_api_key_count() -> None:
    assert client_says(authority("k1"), bearer("k1", "Basic")) is Unauthorized
    for name in (b"api-key", b"x_api_key", b"x-api-keys", b"cookie"):
        assert client_says(authority("k1"), [(name, b"k1")]) is Unauthorized
    assert client_says(authority("k1"), []) is Unauthorized


@pytest.mark.parametrize(("value", "opens"), [(b"k2", True), (b" k2 ", True), (b"", False), (b"k", False)])
def test_anthropics_clients_send_x_api_key(value: bytes, opens: bool) -> None:
    assert client_says(authority("k1 k2"), [(b"x-api-key", value)]) is (None if opens else Unauthorized)


@pytest.mark.parametrize("value", [b"Bearer k1", b"Bearer", b"bearer k1 ", b"Basic k1"])
def test_x_api_key_is_the_key_and_nothing_before_it(value: bytes) -> None:
    assert client_says(authority("k1"), [(b"x-api-key", value)]) is Unauthorized


@pytest.mark.parametrize("wrong", [b"", b"Bearer", b"Bearer ", b"Bearer wrong", b"Basic k1", b"k1"])
@pytest.mark.parametrize("first", [True, False])
def test_a_right_x_api_key_opens_beside_an_authorization_that_does_not(wrong: bytes, first: bool) -> None:
    headers = [(b"x-api-key", b"k1"), (b"authorization", wrong)]
    assert client_says(authority("k1"), headers if first else headers[::-1]) is None


@pytest.mark.parametrize("wrong", [b"", b"wrong"])
def test_a_right_bearer_opens_beside_any_x_api_key(wrong: bytes) -> None:
    assert client_says(authority("k1"), [(b"x-api-key", wrong), *bearer("k1")]) is None


def test_of_two_right_keys_the_bearers_counts() -> None:
    few = access_key("few", name="few", models=frozenset("m"))
    keys = KeyRing(api=["all"])
    keys.api += (few,)
    headers = [(b"x-api-key", b"all"), *bearer("few")]
    assert Authority(keys, trusted_networks=()).check_client(headers) == few


def test_no_right_key_is_told_whether_there_was_one() -> None:
    who = authority("k1")
    for headers, words in [
        ([], "needs an API key"),
        ([(b"x-api-key", b"")], "needs an API key"),
        ([(b"x-api-key", b"wrong")], "is wrong"),
        ([*bearer("wrong"), (b"x-api-key", b"")], "is wrong"),
    ]:
        with pytest.raises(Unauthorized, match=words):
            who.check_client(headers)


def test_admin_keys_are_bearers_only() -> None:
    assert admin_says(authority("c", "a"), [(b"x-api-key", b"a")], STRANGER) is Unauthorized
    assert admin_says(authority("c"), [(b"x-api-key", b"c")], STRANGER) is Unauthorized


def test_every_key_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    def compare(a: bytes, b: bytes) -> bool:
        seen.append(b)
        return a == b

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for headers in (bearer("k1"), [(b"x-api-key", b"k1")], [*bearer("k1"), (b"x-api-key", b"k2")]):
        seen.clear()
        authority("k1 k2 k3").check_client(headers)
        assert seen == [hashlib.sha256(key).digest() for key in (b"k1", b"k2", b"k3")]


def test_R82_client_key_on_an_admin_route_is_403_no_key_401_wrong_key_401() -> None:
    who = authority("client", "admin")
    assert admin_says(who, bearer("admin"), STRANGER) is None
    assert admin_says(who, bearer("client"), STRANGER) is Forbidden
    assert admin_says(who, [], STRANGER) is Unauthorized
    assert admin_says(who, bearer("wrong"), STRANGER) is Unauthorized


def test_api_keys_are_admin_keys_where_there_are_no_others() -> None:
    assert admin_says(authority("client"), bearer("client"), STRANGER) is None
    assert admin_says(authority("client"), [], STRANGER) is Unauthorized


@pytest.mark.parametrize(
    ("keys", "key", "viewer", "reader", "admin"),
    [
        ({}, None, None, Forbidden, Forbidden),
        ({"reader": "r"}, None, Unauthorized, Unauthorized, Forbidden),
        ({"reader": "r"}, "r", None, None, Forbidden),
        ({"reader": "r"}, "wrong", Unauthorized, Unauthorized, Forbidden),
        ({"api": "c", "reader": "r"}, "c", None, None, None),  # an admin key, as there are no others
        ({"api": "c", "reader": "r"}, "r", None, None, Forbidden),
        ({"api": "c", "admin": "a", "reader": "r1 r2"}, "r2", None, None, Forbidden),
        ({"api": "c", "admin": "a", "reader": "r"}, "a", None, None, None),
        ({"api": "c", "admin": "a", "reader": "r"}, "c", Forbidden, Forbidden, Forbidden),
        ({"api": "c", "admin": "a", "reader": "r"}, None, Unauthorized, Unauthorized, Unauthorized),
        ({"admin": "a"}, "r", Unauthorized, Unauthorized, Unauthorized),
    ],
)
def test_a_reader_key_opens_what_shows_and_nothing_that_changes(
    keys: dict[str, str], key: str | None, viewer: object, reader: object, admin: object
) -> None:
    who, said = authority(**keys), []
    for check in (who.check_viewer, who.check_reader, who.check_admin):
        try:
            said.append(check([] if key is None else bearer(key), STRANGER))
        except EvenhandError as e:
            said.append(type(e))
    assert said == [viewer, reader, admin]


def test_a_reader_key_is_no_api_key_and_comes_as_a_bearer_only() -> None:
    who = authority("c", "a", reader="r")
    assert client_says(who, bearer("r")) is client_says(who, [(b"x-api-key", b"r")]) is Unauthorized
    assert client_says(authority(reader="r"), []) is None, "clients need none where there are no API keys"
    with pytest.raises(Unauthorized):
        who.check_reader([(b"x-api-key", b"r")], STRANGER)


def test_whoever_is_refused_is_told_which_key_it_takes() -> None:
    who = authority("c", "a", reader="r")
    for check, key, words in [
        (who.check_reader, "c", "This needs a reader key or an admin key; an API key is not enough."),
        (who.check_admin, "c", "This needs an admin key; an API key is not enough."),
        (who.check_admin, "r", "This needs an admin key; a reader key is not enough."),
    ]:
        with pytest.raises(Forbidden) as caught:
            check(bearer(key), STRANGER)
        assert caught.value.message == words
    with pytest.raises(Unauthorized, match="^This needs an admin key: "):
        authority("c", "a").check_reader([], STRANGER)


def test_without_any_key_only_trusted_peers_administrate() -> None:
    assert admin_says(authority(), [], "127.0.0.1") is None
    assert admin_says(authority(), [], STRANGER) is Forbidden


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1", "::1%lo"])
def test_loopback_is_trusted_by_default(peer: str) -> None:
    assert admin_says(authority("c", "a"), [], peer) is None


@pytest.mark.parametrize(
    "peer", [None, "", "testclient", STRANGER, "::ffff:203.0.113.9", "fe80::1%eth0", "127.0.0.1.x"]
)
def test_others_are_not_and_a_unix_socket_is_nobody(peer: str | None) -> None:
    assert admin_says(authority("c", "a"), [], peer) is Unauthorized


def test_trusted_networks_are_what_the_operator_says() -> None:
    assert admin_says(authority("c", "a", ("10.0.0.0/8", "fd00::/8")), [], "10.9.9.9") is None
    assert admin_says(authority("c", "a", ("10.0.0.0/8", "fd00::/8")), [], "fd00::1") is None
    assert admin_says(authority("c", "a", ("10.0.0.0/8",)), [], "127.0.0.1") is Unauthorized
    assert admin_says(authority("c", "a", ()), [], "127.0.0.1") is Unauthorized


def test_forwarded_for_is_not_believed() -> None:
    spoofed = [(b"x-forwarded-for", b"127.0.0.1"), (b"forwarded", b"for=127.0.0.1"), (b"x-real-ip", b"127.0.0.1")]
    assert admin_says(authority("c", "a"), spoofed, STRANGER) is Unauthorized


HOST = (b"host", b"127.0.0.1:8000")


@pytest.mark.parametrize(
    "headers",
    [
        [HOST, (b"sec-fetch-site", b"cross-site")],
        [HOST, (b"sec-fetch-site", b"same-site")],
        [HOST, (b"origin", b"http://evil.test")],
        [HOST, (b"origin", b"null")],
        [HOST, (b"origin", b"http://127.0.0.1:9999")],
        [(b"host", b"evil.test:8000"), (b"origin", b"http://evil.test:8000"), (b"sec-fetch-site", b"same-origin")],
        [(b"host", b"evil.test:8000"), (b"sec-fetch-site", b"none")],
    ],
)
def test_a_foreign_page_in_a_trusted_hosts_browser_needs_a_key(headers: list[tuple[bytes, bytes]]) -> None:
    assert admin_says(authority("c", "a"), headers, "127.0.0.1") is Unauthorized
    assert admin_says(authority(), headers, "127.0.0.1") is Forbidden
    assert admin_says(authority("c", "a"), [*headers, (b"authorization", b"Bearer a")], "127.0.0.1") is None


@pytest.mark.parametrize("host", [b"127.0.0.1:8000", b"localhost:8000", b"[::1]:8000"])
def test_our_own_docs_page_in_a_trusted_hosts_browser_needs_none(host: bytes) -> None:
    headers = [(b"host", host), (b"origin", b"http://" + host), (b"sec-fetch-site", b"same-origin")]
    assert admin_says(authority("c", "a"), headers, "127.0.0.1") is None


def test_keys_are_never_shown() -> None:
    assert "secret" not in repr(authority("secret1", "secret2", reader="secret3"))
