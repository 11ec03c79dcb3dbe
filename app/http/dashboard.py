"""The live page at `/dashboard`: its files, served as they stand in `pages/`.

The page is open and holds no data; its scripts ask `/dashboard/events` for that, with a key where one is needed.
Files are served by name only; nothing of a request reaches the file system.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from app.errors import NotFound

_FOLDER = Path(__file__).parent / "pages"
_PAGE = "dashboard.html"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

# The page holds the operator's key once it is typed in, and shows what others have named: nothing but our own files
# runs, nothing else is asked, no form leaves, and no script can make markup of a text.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Asked for each time, answered with 304: after an upgrade no old script meets a new document.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    media_type: str
    etag: str


@cache
def _files() -> dict[str, _File]:
    """By name. Read once in a process: some 80 KB."""
    return {path.name: _read(path) for path in _FOLDER.iterdir() if path.suffix in _TYPES}


def _read(path: Path) -> _File:
    body = path.read_bytes()
    return _File(body, _TYPES[path.suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


class Dashboard:
    """The endpoints."""

    async def page(self, request: Request) -> Response:
        return _answer(request, _files()[_PAGE])

    async def slash(self, request: Request) -> Response:
        """`/dashboard/`: addresses in the page are relative, and would be wrong there."""
        return RedirectResponse("../dashboard")

    async def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        file = _files().get(name)
        if file is None or name == _PAGE:
            raise NotFound(f"There is no file {name[:200]!r} here.")
        return _answer(request, file)


def _answer(request: Request, file: _File) -> Response:
    headers = {**_HEADERS, "ETag": file.etag}
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.body, media_type=file.media_type, headers=headers)
