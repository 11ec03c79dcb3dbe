"""Routes that engines have and that can't be served in front of many: the answer says so, and why.

Owns those answers. What lies below `/v1/responses/` is kept by the one engine that made it, in its memory, and
nobody else knows of it: to find it again the distributor would have to remember for each id where it is.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from app.errors import NotServed
from app.http.endpoints import OF_ONE_ENGINE


async def not_served(request: Request) -> Response:
    path = request.url.path
    why = OF_ONE_ENGINE.get(path, "A stored response is known to the engine that made it only; use stream=true.")
    raise NotServed(f"This route is not served by the distributor. {why}")
