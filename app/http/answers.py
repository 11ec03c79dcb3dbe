"""Answers of the routes that Starlette serves, and what they take from a request.

Every error, Starlette's own too, leaves in the one shape that `app.errors` writes.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from app.errors import BadRequest, EvenhandError, MethodNotAllowed, NotFound, error_answer
from app.http.body import read_body

MAX_ADMIN_BODY_BYTES = 2**20
"""A registration with thousands of adapters fits many times over."""


def error_response(error: EvenhandError, extra: dict[str, str] | None = None) -> Response:
    status, headers, body = error_answer(error)
    response = Response(body, status)
    response.raw_headers = headers
    for name, value in (extra or {}).items():
        response.headers[name] = value
    return response


async def on_evenhand_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EvenhandError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own exceptions: unknown path, wrong method, and whatever else it may raise."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(NotFound(f"There is no {request.url.path[:200]!r} here."))
    if error.status_code == 405:
        allow = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        return error_response(
            MethodNotAllowed(f"{request.method} is not possible here, only {allow}."), {"Allow": allow}
        )
    other = BadRequest(str(error.detail)) if error.status_code < 500 else EvenhandError(str(error.detail))
    other.status = error.status_code
    return error_response(other)


async def on_client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


async def on_fault(request: Request, error: Exception) -> Response:
    return error_response(EvenhandError("Internal error"))


async def json_object(request: Request) -> dict[str, Any]:
    """The request's body as a JSON object; an empty body is an empty object.

    Python's own parser on purpose: it lets NaN through, so that the field which holds it can be named.

    Raises:
        BadRequest, BodyTooLarge
    """
    body = await read_body(request.scope, request.receive, limit_bytes=MAX_ADMIN_BODY_BYTES)
    if not body.strip():
        return {}
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as e:
        raise BadRequest(f"The request body is not valid JSON: {e}"[:300]) from e
    if not isinstance(value, dict):
        raise BadRequest("The request body must be a JSON object")
    return value
