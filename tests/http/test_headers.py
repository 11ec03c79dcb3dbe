"""Which headers cross, in both directions."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from app.http.headers import (
    NOT_FOR_ENGINE,
    NOT_FOR_ENGINE_BUT_KEYS,
    ClientHead,
    for_engine,
    request_id,
)

ID = b"id-1"


def scope(*headers: tuple[bytes, bytes], client: Any = ("10.1.2.3", 999), scheme: str = "http") -> dict[str, Any]:
    return {"headers": list(headers), "client": client, "scheme": scheme}


def sent(*headers: tuple[bytes, bytes], keys: bool = False, **more: Any) -> list[tuple[bytes, bytes]]:
    return for_engine(scope(*headers, **more), NOT_FOR_ENGINE_BUT_KEYS if keys else NOT_FOR_ENGINE)


OURS = [(b"x-forwarded-for", b"10.1.2.3"), (b"x-forwarded-proto", b"http")]


def test_everything_else_passes_in_order_repeated_ones_too() -> None:
    own = [(b"accept", b"a/b"), (b"x-b", b"1"), (b"cookie", b"c"), (b"x-b", b"2"), (b"user-agent", b"\xe4")]
    assert sent(*own) == [*own, *OURS]


@pytest.mark.parametrize(
    "name",
    [b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"content-length", b"expect"]
    + [b"proxy-authorization", b"proxy-connection", b"proxy-anything", b"authorization", b"x-api-key", b"api-key"],
)
def test_header_of_one_connection_or_a_key_stays_here(name: bytes) -> None:
    assert sent((name, b"v")) == OURS


def test_headers_named_by_connection_go_and_ours_can_not_be_named_away() -> None:
    headers = [
        (b"x-secret", b"1"),
        (b"x-kept", b"2"),
        (b"connection", b"close, X-Secret ,x-forwarded-for,x-request-id"),
    ]
    assert sent(*headers) == [(b"x-kept", b"2"), *OURS]


def test_client_key_passes_only_where_it_is_switched_on() -> None:
    key = (b"authorization", b"Bearer secret")
    assert sent(key) == OURS
    assert sent(key, keys=True) == [key, *OURS]


def test_forwarded_for_is_appended_and_the_rest_is_what_we_saw() -> None:
    headers = sent(
        (b"host", b"evenhand.test"),
        (b"x-forwarded-for", b"1.1.1.1"),
        (b"x-forwarded-for", b"2.2.2.2"),
        (b"x-forwarded-host", b"spoofed"),
        (b"x-forwarded-proto", b"spoofed"),
        scheme="https",
    )
    assert headers == [
        (b"x-forwarded-for", b"1.1.1.1, 2.2.2.2, 10.1.2.3"),
        (b"x-forwarded-host", b"evenhand.test"),
        (b"x-forwarded-proto", b"https"),
    ]


def test_a_peer_without_address_adds_nothing() -> None:
    assert sent(client=None) == OURS[1:]


@pytest.mark.parametrize("value", [b"a", b"x" * 128, b"!~", b"8f14e45f-ceea"])
def test_sane_request_id_is_kept(value: bytes) -> None:
    assert request_id([(b"a", b"b"), (b"x-request-id", value)]) == value


@pytest.mark.parametrize("value", [b"", b"x" * 129, b"a b", b"a\tb", b"\xc3\xa9", b"a\x7f"])
def test_other_request_id_is_replaced(value: bytes) -> None:
    made = request_id([(b"x-request-id", value)])
    parsed = uuid.UUID(made.decode())
    assert (parsed.version, parsed.variant, parsed.hex) == (4, uuid.RFC_4122, made.decode())
    assert made != request_id([])


def head(*headers: tuple[bytes, bytes], status: int = 200) -> ClientHead:
    return ClientHead(status, list(headers), [(b"x-request-id", ID)])


def test_answer_keeps_repeated_headers_and_loses_those_of_the_connection() -> None:
    made = head(
        (b"set-cookie", b"a=1"),
        (b"content-type", b"application/json"),
        (b"connection", b"keep-alive, x-hop"),
        (b"x-hop", b"1"),
        (b"keep-alive", b"timeout=5"),
        (b"proxy-authenticate", b"x"),
        (b"date", b"engine's"),
        (b"server", b"engine's"),
        (b"x-request-id", b"engine's"),
        (b"set-cookie", b"b=2"),
        (b"content-length", b"7"),
        (b"retry-after", b"3"),
    )
    assert made.headers == [
        (b"set-cookie", b"a=1"),
        (b"content-type", b"application/json"),
        (b"date", b"engine's"),
        (b"server", b"engine's"),
        (b"set-cookie", b"b=2"),
        (b"content-length", b"7"),
        (b"retry-after", b"3"),
        (b"x-request-id", ID),
    ]
    assert made.content_length == 7 and not made.streaming


def test_chunked_answer_has_no_length_whatever_else_it_says() -> None:
    made = head((b"transfer-encoding", b"chunked"), (b"content-length", b"7"))
    assert made.headers == [(b"x-request-id", ID)] and made.content_length is None


@pytest.mark.parametrize("status", [204, 304])
def test_answer_without_body_has_no_length(status: int) -> None:
    assert head((b"content-length", b"7"), status=status).content_length is None


def test_stream_is_never_collected_on_its_way() -> None:
    made = head(
        (b"content-type", b"Text/Event-Stream; charset=utf-8"),
        (b"cache-control", b"max-age=60"),
        (b"x-accel-buffering", b"yes"),
        (b"content-length", b"99"),
    )
    assert made.streaming and made.content_length is None
    assert made.headers == [
        (b"content-type", b"Text/Event-Stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
        (b"x-request-id", ID),
    ]


def test_encoded_is_known() -> None:
    assert head((b"content-encoding", b"gzip")).encoded
    assert not head((b"content-encoding", b"identity")).encoded


def test_an_engine_can_not_name_the_length_away() -> None:
    made = head((b"connection", b"x-a, Content-Length"), (b"content-length", b"5"), (b"x-a", b"1"))
    assert made.content_length == 5
    assert made.headers == [(b"content-length", b"5"), (b"x-request-id", ID)]
