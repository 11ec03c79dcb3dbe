"""`/health` and `/ready`: is this process alive, and can it serve.

Two questions with two answers: a process that is restarted because Redis or an engine is away comes
back no better, so only `/ready` looks at them.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.dispatch.topology import Topology
from app.errors import EvenhandError, NoNodeAvailable, ShuttingDown, StoreUnavailable
from app.http.interrupt import Running
from app.http.ports import NodeRegistry
from app.nodes import Role, State


class Health:
    """The endpoints.

    Args:
        store_ok: None while Redis can be used, else the reason why it can't.
    """

    def __init__(
        self, *, registry: NodeRegistry, running: Running, topology: Topology, store_ok: Callable[[], str | None]
    ) -> None:
        self._registry = registry
        self._running = running
        self._needed = topology.needed
        self._store_ok = store_ok

    async def health(self, request: Request) -> Response:
        answer: dict[str, object] = {"status": "healthy"}
        if request.query_params.get("detail") in ("1", "true"):
            answer["roles"] = self._roles()
        return JSONResponse(answer)

    async def ready(self, request: Request) -> Response:
        trouble = self._trouble()
        if trouble is not None:
            raise trouble
        return JSONResponse({"status": "ready"})

    def _roles(self) -> dict[str, dict[str, int]]:
        """Role -> state -> how many nodes, as this worker last read the registry."""
        roles: dict[str, dict[str, int]] = {role.name: {} for role in Role}
        for node in self._registry.snapshot.nodes.values():
            states = roles[node.role.name]
            states[node.state.value] = states.get(node.state.value, 0) + 1
        return roles

    def _trouble(self) -> EvenhandError | None:
        if self._running.stopping:
            return ShuttingDown("This worker is stopping")
        reason = self._store_ok()
        if reason is not None:
            return StoreUnavailable(f"Redis: {reason.removeprefix('Redis ')}")
        ready = {node.role for node in self._registry.snapshot.nodes.values() if node.state == State.READY}
        missing = [" or ".join(role.name for role in roles) for roles in self._needed if ready.isdisjoint(roles)]
        if missing:
            return NoNodeAvailable(f"No ready node of role {' and of role '.join(missing)}")
        return None
