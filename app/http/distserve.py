"""`/distserve/*`: what LMDeploy's proxy has under this name, and the table of links.

Who may call these is decided before (`app.http.auth`). It must not know Redis or how a link is made.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.errors import BadRequest
from app.http.ports import LinkKeeper


class DistServeRoutes:
    """The endpoints. `keeper`: None where prefill and decode are not separate."""

    def __init__(self, keeper: LinkKeeper | None) -> None:
        self._keeper = keeper

    async def warm_up(self, request: Request) -> Response:
        """POST /distserve/connection_warmup: 200 with SUCCESS false where a pair failed; each says why."""
        return await self._answer(lambda keeper: keeper.warm_up())

    async def collect(self, request: Request) -> Response:
        """POST /distserve/gc."""
        return await self._answer(lambda keeper: keeper.collect())

    async def links(self, request: Request) -> Response:
        """GET /distserve/links."""
        return await self._answer(lambda keeper: keeper.table())

    async def _answer(self, ask: Callable[[LinkKeeper], Awaitable[dict[str, Any]]]) -> Response:
        if self._keeper is None:
            raise BadRequest("There are no links here: prefill and decode are not separate in this deployment")
        return JSONResponse(await ask(self._keeper))
