"""Web pages of other origins: what a browser is told before an answer and with it, and where nothing is said."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import ConfigurationError, NoNodeAvailable
from app.nodes import Node
from app.settings import Settings
from tests.http.fakes import FakeAnswer, Reply, World

PAGE, OTHER = b"https://chat.example", b"https://evil.example"
NODE = Node("http://10.0.0.1:1", models=("m",))
STREAM = [(b"content-type", b"text/event-stream")]
EXPOSED = "x-request-id, retry-after, server-timing"


def world(*script: Any, origins: tuple[str, ...] = (PAGE.decode(), "http://localhost:3000"), **more: Any) -> World:
    return World(*script, nodes=[NODE], cors_origins=origins, **more)


def said(reply: Reply) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in reply.headers:
        if name.startswith(b"access-control-") or name == b"vary":
            found.setdefault(name.decode(), []).append(value.decode())
    return found


def of(origin: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"origin", origin)]


def asking(origin: bytes = PAGE, method: bytes = b"POST") -> list[tuple[bytes, bytes]]:
    names = b"authorization,content-type,x-api-key"
    return [*of(origin), (b"access-control-request-method", method), (b"access-control-request-headers", names)]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/embeddings", "/tokenize", "/v2/rerank"])
async def test_a_preflight_is_answered_without_a_key(path: str) -> None:
    reply = await world(api_keys=["k"]).ask("OPTIONS", path, headers=asking())
    assert (reply.status, reply.body) == (204, b"")
    assert said(reply) == {
        "access-control-allow-origin": [PAGE.decode()],
        "access-control-allow-methods": ["GET, POST, OPTIONS"],
        "access-control-allow-headers": ["authorization,content-type,x-api-key"],
        "access-control-max-age": ["600"],
        "vary": ["origin", "access-control-request-headers"],
    }


async def test_a_preflight_of_another_origin_gets_no_leave() -> None:
    reply = await world().ask("OPTIONS", "/v1/chat/completions", headers=asking(OTHER))
    assert said(reply) == {"vary": ["origin"]}


async def test_names_that_are_none_are_not_repeated() -> None:
    headers = [*asking()[:2], (b"access-control-request-headers", b"a\r\nx: y")]
    assert "access-control-allow-headers" not in said(await world().ask("OPTIONS", "/v1/models", headers=headers))


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (FakeAnswer(b"{}"), 200),
        (FakeAnswer(b"data: [DONE]\n\n", headers=STREAM), 200),
        (FakeAnswer(b"{}", status=422), 422),
        (NoNodeAvailable("none"), 503),
    ],
)
async def test_answers_streams_and_errors_may_be_read_by_the_page(script: Any, status: int) -> None:
    reply = await world(script).post(headers=of(PAGE))
    assert reply.status == status
    assert said(reply) == {
        "access-control-allow-origin": [PAGE.decode()],
        "access-control-expose-headers": [EXPOSED],
        "vary": ["origin"],
    }


async def test_so_may_the_models_and_a_401() -> None:
    one = world(api_keys=["k"])
    for reply in (
        await one.ask("GET", "/v1/models", headers=[*of(PAGE), (b"authorization", b"Bearer k")]),
        await one.ask("GET", "/v1/models", headers=of(PAGE)),
        await one.post(headers=of(PAGE)),
    ):
        assert said(reply)["access-control-allow-origin"] == [PAGE.decode()]


@pytest.mark.parametrize("origin", [OTHER, b"null", b"https://chat.example:8443", b"http://chat.example", b""])
async def test_other_origins_may_not_and_caches_are_told_that_it_depends(origin: bytes) -> None:
    assert said(await world().post(headers=of(origin))) == {"vary": ["origin"]}


async def test_any_origin_is_a_star_and_never_credentials() -> None:
    one = world(origins=("*",))
    assert said(await one.post(headers=of(OTHER))) == {
        "access-control-allow-origin": ["*"],
        "access-control-expose-headers": [EXPOSED],
    }
    found = said(await one.ask("OPTIONS", "/v1/models", headers=asking(OTHER)))
    assert found["access-control-allow-origin"] == ["*"] and "access-control-allow-credentials" not in found
    assert found["access-control-allow-headers"] == ["authorization,content-type,x-api-key"]


async def test_an_engines_own_words_to_pages_give_way() -> None:
    headers = [(b"content-type", b"application/json"), (b"access-control-allow-origin", b"*"), (b"x-engine", b"1")]
    reply = await world(FakeAnswer(b"{}", headers=headers)).post(headers=of(PAGE))
    assert said(reply)["access-control-allow-origin"] == [PAGE.decode()]
    assert (b"x-engine", b"1") in reply.headers


@pytest.mark.parametrize("path", ["/tokenize", "/v2/rerank"])
async def test_what_goes_to_engines_beside_v1_may_be_read_too(path: str) -> None:
    reply = await world(FakeAnswer(b"{}")).ask("POST", path, b"{}", headers=of(PAGE))
    assert reply.status == 200
    assert said(reply)["access-control-allow-origin"] == [PAGE.decode()]


async def test_management_is_for_no_page() -> None:
    one = world()
    for method, path in (
        ("GET", "/nodes/status"),
        ("OPTIONS", "/nodes/add"),
        ("GET", "/health"),
        ("OPTIONS", "/flush_cache"),
    ):
        assert said(await one.ask(method, path, headers=asking())) == {}


async def test_off_nothing_is_said_and_engines_words_pass() -> None:
    headers = [(b"content-type", b"application/json"), (b"access-control-allow-origin", b"*")]
    one = World(FakeAnswer(b"{}", headers=headers), FakeAnswer(b"{}"), nodes=[NODE])
    assert said(await one.post(headers=of(PAGE))) == {"access-control-allow-origin": ["*"]}
    assert said(await one.post(headers=of(PAGE))) == {}
    reply = await one.ask("OPTIONS", "/v1/chat/completions", headers=asking())
    assert reply.status == 405 and said(reply) == {}


@pytest.mark.parametrize(
    ("origins", "line"),
    [
        (["*", "https://a"], "--cors-origins: * stands alone: it is every origin"),
        (
            ["https://a/"],
            "--cors-origins: must be https://HOST or https://HOST:PORT in lower case, without a path, or *",
        ),
        (
            ["a.example"],
            "--cors-origins: must be https://HOST or https://HOST:PORT in lower case, without a path, or *",
        ),
        (
            ["https://A"],
            "--cors-origins: must be https://HOST or https://HOST:PORT in lower case, without a path, or *",
        ),
        (["https://a:443"], "--cors-origins: must be without the port that goes without saying, not https://a:443"),
    ],
)
def test_what_no_browser_sends_is_refused(origins: list[str], line: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Settings.load({"cors_origins": origins})
    assert caught.value.message.startswith(line)
    right = ["https://a.example", "http://localhost:3000", "http://[::1]:8080", "app://local"]
    assert Settings.load({"cors_origins": right}).cors_origins == tuple(right)
