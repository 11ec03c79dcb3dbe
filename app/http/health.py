"""`/health` and `/ready`: is this process alive, and can it serve.

Two questions with two answers: a process that is restarted because Redis or an engine is away comes
back no better, so only `/ready` looks at them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.errors import EvenhandError, NoNodeAvailable, ShuttingDown, StoreUnavailable
from app.http.interrupt import Running
from app.http.ports import NodeRegistry
from app.nodes import Role, State

NEEDED_ROLES: dict[str, tuple[Role, ...]] = {
    "Hybrid": (Role.Hybrid,),
    "DistServe": (Role.Prefill, Role.Decode),
}
"""By serving strategy: one ready node of each has to be there."""


class Health:
    """The endpoints.

    Args:
        store_ok: None while Redis can be used, else the reason why it can't.
    """

    def __init__(
        self, *, registry: NodeRegistry, running: Running, serving_strategy: str, store_ok: Callable[[], str | None]
    ) -> None:
        self._registry = registry
        self._running = running
        self._roles: Sequence[Role] = NEEDED_ROLES[serving_strategy]
        self._store_ok = store_ok

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "healthy"})

    async def ready(self, request: Request) -> Response:
        trouble = self._trouble()
        if trouble is not None:
            raise trouble
        return JSONResponse({"status": "ready"})

    def _trouble(self) -> EvenhandError | None:
        if self._running.stopping:
            return ShuttingDown("This worker is stopping")
        reason = self._store_ok()
        if reason is not None:
            return StoreUnavailable(f"Redis: {reason}")
        ready = {node.role for node in self._registry.snapshot.nodes.values() if node.state == State.READY}
        missing = [role.name for role in self._roles if role not in ready]
        if missing:
            return NoNodeAvailable(f"No ready node of role {' and of role '.join(missing)}")
        return None
