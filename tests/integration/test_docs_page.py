"""The docs page works without a network, and what it says of the API is complete and true."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urljoin, urlsplit

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from openapi_spec_validator import validate

from tests.integration.serving import SharedDeployment
from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine

DEPLOYMENT = SharedDeployment(workers=2)

# Source: the issue, "Node management" and "Serving"; lmdeploy's proxy for /distserve.
OPERATIONS = {
    ("get", "/health"),
    ("get", "/ready"),
    ("get", "/v1/models"),
    ("post", "/v1/chat/completions"),
    ("post", "/v1/completions"),
    ("get", "/nodes/status"),
    ("get", "/nodes/explain"),
    ("get", "/dashboard/state"),
    ("post", "/nodes/add"),
    ("post", "/nodes/remove"),
    ("post", "/nodes/terminate"),
    ("get", "/nodes/terminate_all"),
    ("post", "/distserve/connection_warmup"),
    ("post", "/distserve/gc"),
    ("get", "/distserve/links"),
}
OF_EACH_KIND = {
    ("get", "/ready"),
    ("post", "/v1/completions"),
    ("get", "/nodes/explain"),
    ("post", "/nodes/add"),
    ("post", "/distserve/gc"),
}
EXAMPLES = 15
ENDLESS = "/dashboard/events"
"""A stream without an end has no answer to compare; test_watch.py reads it."""


class _References(HTMLParser):
    """Every src and href of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in ("src", "href") and value]


def _document(deployment: Deployment) -> dict[str, Any]:
    reply = deployment.get("/openapi.json")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("application/json")
    document: dict[str, Any] = reply.json()
    return document


# --- the page


def test_the_page_is_swagger_ui_and_names_nothing_outside(deployment: Deployment) -> None:
    reply = deployment.get("/")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("text/html")
    assert "SwaggerUIBundle" in reply.text or "swagger-ui" in reply.text
    assert not re.findall(r"""["'(](?:https?:)?//[^"')]+""", reply.text), "an address outside"
    assert "openapi.json" in reply.text or any(
        b"openapi.json" in deployment.get(urljoin("/", name)).body for name in _References(reply.text).found
    )


def test_everything_the_page_needs_is_served(deployment: Deployment) -> None:
    kinds = {"js": "javascript", "css": "text/css", "png": "image/png", "ico": "image/"}
    found = _References(deployment.get("/").text).found
    assert any(name.endswith(".js") for name in found)
    assert any(name.endswith(".css") for name in found)
    for name in found:
        if name.startswith(("#", "data:")):
            continue
        reply = deployment.get(urljoin("/", name))
        assert reply.status == 200, name
        assert reply.body, name
        assert kinds[urlsplit(name).path.rpartition(".")[2]] in reply.headers["content-type"], name
        if name.endswith(".css"):
            outside = re.findall(rb"url\(\s*['\"]?(?!data:)([^'\")]+)", reply.body)
            assert all(deployment.get(urljoin(urljoin("/", name), url.decode())).status == 200 for url in outside)


def test_assets_are_no_way_out_of_their_directory(deployment: Deployment) -> None:
    (asset, *_) = (name for name in _References(deployment.get("/").text).found if name.endswith(".js"))
    directory = urljoin("/", asset).rpartition("/")[0]
    for way in ("/../__init__.py", "/..%2f__init__.py", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/%00", "/"):
        reply = deployment.get(directory + way)
        assert reply.status in (400, 404, 405), (way, reply.status)


# --- the document


def test_the_document_is_valid_openapi(deployment: Deployment) -> None:
    validate(_document(deployment))


def test_the_document_names_every_operation(deployment: Deployment) -> None:
    paths = _document(deployment)["paths"]
    documented = {(method, path) for path, item in paths.items() for method in item if method in ("get", "post")}
    assert documented >= OPERATIONS


def test_every_documented_operation_exists(deployment: Deployment, engine: SimulatedEngine) -> None:
    paths = _document(deployment)["paths"]
    for path, item in paths.items():
        for method in set(item) & {"get", "post", "put", "delete", "patch"} if path != ENDLESS else ():
            url = path.replace("{model}", "sim")
            body = b"{}" if method == "post" else None
            reply = deployment.request(method.upper(), url, body=body, headers={"content-type": "application/json"})
            assert reply.status not in (404, 405), (method, path)
            assert str(reply.status) in item[method]["responses"], (method, path, reply.status)


def test_operations_say_what_they_are_for(deployment: Deployment) -> None:
    paths = _document(deployment)["paths"]
    operations = [op for item in paths.values() for method, op in item.items() if method in ("get", "post")]
    assert all(op.get("summary") or op.get("description") for op in operations)
    ids = [op["operationId"] for op in operations if "operationId" in op]
    assert len(ids) == len(set(ids))


def _towards_loopback(case: Any) -> None:
    """Whatever address was made up, it becomes one of loopback where nobody listens: tests talk to nobody else."""
    if isinstance(case.body, dict) and isinstance(url := case.body.get("url"), str):
        case.body["url"] = re.sub(r"^(https?://)[^/?#]*", r"\g<1>127.0.0.1:9", url, flags=re.IGNORECASE)
    if isinstance(case.query, dict) and isinstance(url := case.query.get("node_url"), str):
        case.query["node_url"] = re.sub(r"^(https?://)[^/?#]*", r"\g<1>127.0.0.1:9", url, flags=re.IGNORECASE)


@pytest.mark.parametrize(
    "operations",
    [
        pytest.param(OF_EACH_KIND, id="of-each-kind"),
        pytest.param(OPERATIONS, marks=pytest.mark.wide, id="all"),
    ],
)
def test_schemathesis_finds_no_500_and_no_untruth(
    deployment: Deployment, engine: SimulatedEngine, operations: set[tuple[str, str]]
) -> None:
    import schemathesis  # here: it takes long, and each of several jobs collects all files
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    schema = schemathesis.openapi.from_url(deployment.url + "/openapi.json")
    paths = _document(deployment)["paths"]
    tried: set[str] = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path == ENDLESS:
            continue
        if operations is OF_EACH_KIND and (operation.method.lower(), operation.path) not in operations:
            continue
        if "501" in paths[operation.path][operation.method.lower()]["responses"]:
            continue  # it has no other answer

        @given(case=operation.as_strategy())
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def ask(case: Any) -> None:
            _towards_loopback(case)
            response = case.call(headers={"connection": "close"})
            assert response.status_code not in (500, 501), (case.as_curl_command(), response.text)
            if response.status_code not in (502, 503, 504):
                case.validate_response(
                    response,
                    checks=[
                        not_a_server_error,
                        status_code_conformance,
                        content_type_conformance,
                        response_schema_conformance,
                    ],
                )

        ask()
        tried.add(operation.label.lower())
    assert tried >= {f"{method} {path}" for method, path in operations}
    assert deployment.get("/health").status == 200
    assert "Traceback" not in deployment.log()


@pytest.mark.parametrize(
    ("method", "path"),
    [("post", "/distserve/connection_warmup"), ("post", "/distserve/gc"), ("get", "/distserve/links")],
)
def test_distserve_without_separate_nodes_is_a_documented_400(deployment: Deployment, method: str, path: str) -> None:
    item = _document(deployment)["paths"][path]
    reply = deployment.request(method.upper(), path, value={} if method == "post" else None)
    assert reply.status == 400 and "400" in item[method]["responses"]
    assert "not separate" in reply.json()["error"]["message"]
