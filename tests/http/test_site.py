"""All routes together: shapes of errors, methods, the docs page and its document."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from openapi_spec_validator import validate
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route

from app.errors import EngineRefused
from app.http.openapi import document
from app.http.routes import build_app, is_proxied
from app.nodes import Node, State
from tests.http.fakes import Call, FakeEngines, FakeHybrid, FakeLinks, FakeRegistry, World

NODE = Node("http://10.0.0.1:1", models=("m",), state=State.READY)


def routes(world: World) -> list[Route]:
    return [route for route in world.app.site.routes if isinstance(route, Route)]


# --- errors and methods -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/nowhere", 404, None),
        ("POST", "/nowhere", 404, None),
        ("GET", "/docs", 404, None),
        ("GET", "/v1", 404, None),
        ("POST", "/v1", 404, None),
        ("POST", "/v1/", 404, None),
        ("GET", "/v1/embeddings", 404, None),
        ("HEAD", "/v1/embeddings", 404, None),
        ("GET", "/nodes/status/", 404, None),
        ("GET", "/swagger-ui/swagger-ui.js.map", 404, None),
        ("GET", "/swagger-ui/../routes.py", 404, None),
        ("GET", "/v1/chat/completions", 405, b"POST"),
        ("PUT", "/v1/completions", 405, b"POST"),
        ("POST", "/v1/models", 405, b"GET, HEAD"),
        ("POST", "/v1/models/m", 405, b"GET, HEAD"),
        ("DELETE", "/v1/models/m", 405, b"GET, HEAD"),
        ("GET", "/nodes/add", 405, b"POST"),
        ("POST", "/nodes/status", 405, b"GET, HEAD"),
        ("POST", "/nodes/terminate_all", 405, b"GET"),
        ("OPTIONS", "/health", 405, b"GET, HEAD"),
        ("POST", "/", 405, b"GET, HEAD"),
    ],
)
async def test_unknown_path_and_wrong_method(method: str, path: str, status: int, allow: bytes | None) -> None:
    reply = await World(nodes=[NODE]).ask(method, path, b'{"model":"m"}')
    assert (reply.status, reply.header(b"allow")) == (status, allow)
    assert reply.error["code"] == ("not_found" if status == 404 else "method_not_allowed")


async def test_every_error_of_every_route_has_the_one_shape_and_a_request_id() -> None:
    world = World(EngineRefused("refused"), api_keys=["k"], admin_keys=["a"])
    seen = 0
    for route in routes(world):
        path = re.sub(r"\{[^}]*\}", "x", route.path)
        for method in ("GET", "POST", "PUT", "OPTIONS"):
            reply = await world.ask(method, path, b"{", client=("203.0.113.9", 1))
            assert reply.header(b"x-request-id")
            if reply.status >= 400:
                seen += 1
                assert reply.header(b"content-type") == b"application/json"
                assert set(reply.error) == {"message", "type", "param", "code"}
                assert reply.header(b"content-length") == b"%d" % len(reply.body)
    assert seen > 3 * len(routes(world))


@pytest.mark.parametrize(("status", "kind"), [(415, "invalid_request_error"), (507, "server_error")])
async def test_other_exceptions_of_starlette_have_the_shape_too(status: int, kind: str) -> None:
    world = World()

    async def raises(request: Any) -> Any:
        raise HTTPException(status, "words")

    world.app.site.router.routes.append(Route("/raises", raises))
    reply = await world.ask("GET", "/raises")
    assert (reply.status, reply.error["type"], reply.error["message"]) == (status, kind, "words")


async def test_fault_of_ours_in_a_route_is_a_500_in_the_shape() -> None:
    world = World(nodes=[NODE])
    world.registry.trouble = ZeroDivisionError("bug")
    call = Call(world.app, "GET", "/nodes/status")
    with pytest.raises(ZeroDivisionError):  # for the server to log
        await call.run()
    assert (call.reply().status, call.reply().error["code"]) == (500, "internal_error")
    assert "bug" not in call.reply().error["message"]


async def test_request_id_is_kept_on_every_answer() -> None:
    for path in ("/", "/health", "/nowhere", "/nodes/status"):
        reply = await World().ask("GET", path, headers=[(b"x-request-id", b"mine")])
        assert [v for k, v in reply.headers if k == b"x-request-id"] == [b"mine"]


@pytest.mark.parametrize(
    "path", ["/", "/openapi.json", "/health", "/v1/models", "/nodes/status", "/swagger-ui/start.js"]
)
async def test_head_is_answered_like_get(path: str) -> None:
    world = World(nodes=[NODE])
    head, get = await world.ask("HEAD", path), await world.ask("GET", path)
    assert head.status == get.status == 200
    assert head.header(b"content-length") == get.header(b"content-length")


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/v1/chat/completions", True), ("/v1/x", True), ("/v1/modelsx", True), ("/v1/models", False)]
    + [("/v1/models/a/b", False), ("/v1/", False), ("/v1", False), ("/v2/x", False), ("/nodes/add", False)],
)
def test_what_is_proxied(path: str, expected: bool) -> None:
    assert is_proxied(path) is expected


async def test_other_scopes_go_to_starlette_and_the_lifespan_runs() -> None:
    steps: list[str] = []

    @asynccontextmanager
    async def lifespan(site: Starlette) -> AsyncIterator[None]:
        steps.append("up")
        yield
        steps.append("down")

    app = build_app(
        settings=World().settings,
        registry=FakeRegistry(),
        dispatcher=FakeHybrid(),  # type: ignore[arg-type]
        engine_client=FakeEngines(),
        store_ok=lambda: None,
        lifespan=lifespan,
    )
    incoming = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(incoming)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await app({"type": "lifespan", "state": {}}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"] and steps == ["up", "down"]
    sent.clear()
    await app({"type": "websocket", "path": "/", "headers": [], "query_string": b""}, receive, send)
    assert sent == ["websocket.close"]


# --- the docs page ----------------------------------------------------------------------------------


async def test_docs_page_works_offline() -> None:
    world = World(api_keys=["k"], admin_keys=["a"])
    page = await world.ask("GET", "/", client=("203.0.113.9", 1))
    assert page.status == 200 and page.header(b"content-type") == b"text/html; charset=utf-8"
    assert b"http://" not in page.body and b"https://" not in page.body and b"//" not in page.body
    needed = re.findall(rb'(?:src|href)="([^"]+)"', page.body)
    assert len(needed) == 4
    for address in needed:
        asset = await world.ask("GET", "/" + address.decode(), client=("203.0.113.9", 1))
        assert asset.status == 200 and asset.body
    start = await world.ask("GET", "/swagger-ui/start.js")
    assert b'"openapi.json"' in start.body
    policy = page.header(b"content-security-policy")
    assert policy is not None and b"default-src 'self'" in policy


async def test_openapi_document_is_valid() -> None:
    served = (await World().ask("GET", "/openapi.json")).json()
    validate(served)
    assert served == document()


def test_openapi_document_is_complete_and_true() -> None:
    world = World()
    there = {
        (re.sub(r":path\}", "}", route.path), method.lower())
        for route in routes(world)
        if route.include_in_schema
        for method in route.methods or ()
        if method != "HEAD"
    }
    described = {(path, method) for path, item in document()["paths"].items() for method in item}
    assert described - there == {("/v1/{path}", "post")}
    assert there - described == set()


def test_openapi_names_of_operations_are_unique() -> None:
    names = [op["operationId"] for item in document()["paths"].values() for op in item.values()]
    assert len(names) == len(set(names))


# A stream without an end is no answer that could be compared.
OPERATIONS = [
    (path, method) for path, item in document()["paths"].items() for method in item if path != "/dashboard/events"
]
OF_EACH_KIND = ["/v1/completions", "/v1/models/{model}", "/nodes/status", "/nodes/add", "/dashboard/state"]


@pytest.fixture(scope="module")
def schema() -> Any:
    import schemathesis  # here: it takes long, and each of several jobs collects all files

    return schemathesis.openapi.from_dict(document())


@pytest.mark.parametrize(
    ("path", "method"),
    [pytest.param(*o, marks=[] if o[0] in OF_EACH_KIND else pytest.mark.wide) for o in OPERATIONS],
)
def test_schemathesis_finds_no_500_and_no_lie(schema: Any, path: str, method: str) -> None:
    """As under its `schema.parametrize()`, which would make all examples of all operations at collection."""
    from schemathesis.generation.feedback import FeedbackSources
    from schemathesis.pytest._test_builder import build_operation_test
    from schemathesis.python._constants.orchestrator import make_constants_value_source
    from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

    @settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
    def ask(case: Any) -> None:
        world = World(nodes=[NODE], links=FakeLinks(), admin_keys=["a"])
        world.registry.stages = {NODE.url: {"prefill": {"mean_s": 0.25, "count": 4}}}
        world.engines.lists = _Anybody()
        response = case.call(base_url="http://testserver", app=world.app, headers={"Authorization": "Bearer a"})
        assert response.status_code not in (500, 401, 403)
        case.validate_response(response, checks=[status_code_conformance, response_schema_conformance])

    feedback = FeedbackSources(constants_value_source=make_constants_value_source(schema))
    operation = schema[path][method]
    build_operation_test(config=schema.config, operation=operation, test_func=ask, given_kwargs={}, feedback=feedback)()


class _Anybody(dict[str, Any]):
    """Every second engine answers."""

    def __missing__(self, url: str) -> Any:
        return ("m",) if len(url) % 2 else EngineRefused("nobody is there")
