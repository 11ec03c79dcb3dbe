"""`/distserve/*`: who is asked, and what is answered where nothing is split. Who may: test_admin.py."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import BadRequest, StoreUnavailable
from tests.http.fakes import FakeLinks, World

ROUTES = [
    ("POST", "/distserve/connection_warmup", "warm_up"),
    ("POST", "/distserve/gc", "collect"),
    ("GET", "/distserve/links", "table"),
]
ANSWERS: dict[str, Any] = {
    # 200 though a pair failed: the answer says which, and why.
    "warm_up": {"SUCCESS": False, "links": {"a|b": {"state": "failed", "error": "why"}}},
    "collect": {"freed": [], "failed": [], "kept": 2},
    "table": {
        "links": {"a|b": {"state": "void", "owner": "w1", "since_ms": 1, "took_ms": None, "error": None}},
        "sessions": 3,
        "counts": {"links_made": 1},
    },
}

each_route = pytest.mark.parametrize(("method", "path", "call"), ROUTES)


@each_route
async def test_each_route_asks_for_its_own(method: str, path: str, call: str) -> None:
    links = FakeLinks()
    reply = await World(links=links).ask(method, path)
    assert (reply.status, reply.json(), links.calls) == (200, ANSWERS[call], [call])
    assert reply.header(b"content-type") == b"application/json"


@each_route
async def test_a_body_and_a_query_change_nothing(method: str, path: str, call: str) -> None:
    # LMDeploy's own callers send {} or a whole configuration.
    links = FakeLinks()
    reply = await World(links=links).ask(method, path + "?x=1", b'{"protocol": 2}' if method == "POST" else b"")
    assert (reply.status, links.calls) == (200, [call])


@each_route
async def test_where_nothing_is_split_it_is_a_400_that_says_so(method: str, path: str, call: str) -> None:
    reply = await World().ask(method, path)
    assert (reply.status, reply.error["type"], reply.error["param"]) == (400, "invalid_request_error", None)
    assert "prefill and decode are not separate" in reply.error["message"]


@each_route
async def test_a_protocol_without_links_is_a_400_too(method: str, path: str, call: str) -> None:
    reply = await World(links=FakeLinks(BadRequest("with --pd-protocol lmdeploy only"))).ask(method, path)
    assert (reply.status, reply.error["message"]) == (400, "with --pd-protocol lmdeploy only")


@each_route
async def test_r96_redis_away_is_a_503_with_retry_after(method: str, path: str, call: str) -> None:
    reply = await World(links=FakeLinks(StoreUnavailable("Redis can't be used"))).ask(method, path)
    assert (reply.status, reply.error["code"], reply.header(b"retry-after")) == (503, "store_unavailable", b"1")


@each_route
async def test_the_other_method_is_a_405(method: str, path: str, call: str) -> None:
    links = FakeLinks()
    other = "GET" if method == "POST" else "POST"
    assert (await World(links=links).ask(other, path)).status == 405
    assert links.calls == []
