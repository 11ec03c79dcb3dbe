"""The page at `/`: Swagger UI, served wholly from a package, so that it works without the Internet.

Only the files that the page needs are served, by name; nothing of a request reaches the file system.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from swagger_ui_bundle import swagger_ui_path  # type: ignore[import-untyped]

from app.errors import NotFound
from app.http.openapi import document

_TYPES = {
    "swagger-ui.css": "text/css",
    "swagger-ui-bundle.js": "text/javascript",
    "favicon-32x32.png": "image/png",
}

# Addresses are relative, so that the page also works under a path prefix of a reverse proxy.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Evenhand</title>
<link rel="stylesheet" href="swagger-ui/swagger-ui.css">
<link rel="icon" type="image/png" href="swagger-ui/favicon-32x32.png">
</head>
<body>
<div id="swagger-ui"></div>
<script src="swagger-ui/swagger-ui-bundle.js"></script>
<script src="swagger-ui/start.js"></script>
</body>
</html>
"""

_START = """window.ui = SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#swagger-ui",
  deepLinking: true,
  presets: [SwaggerUIBundle.presets.apis],
});
"""

# The page holds the operator's key once it is typed in: nothing from elsewhere may run or be framed here.
_POLICY = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'"
}


class DocsPage:
    """The endpoints."""

    def __init__(self) -> None:
        self._folder = Path(str(swagger_ui_path))

    @cached_property
    def _document(self) -> bytes:
        return json.dumps(document()).encode()

    async def page(self, request: Request) -> Response:
        return HTMLResponse(_PAGE, headers=_POLICY)

    async def openapi(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name == "start.js":
            return Response(_START, media_type="text/javascript")
        if name not in _TYPES:
            raise NotFound(f"There is no file {name[:200]!r} here.")
        return FileResponse(self._folder / name, media_type=_TYPES[name])
