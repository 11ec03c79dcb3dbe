"""`GET /v1/models` and `GET /v1/models/{id}`: the models of all nodes, each once.

The entries are the same in every worker and at every call, so that a list read twice can be compared:
LMDeploy makes up a new time and a new permission id each time.

Source of the shape: lmdeploy/serve/openai/protocol.py, `ModelCard` and `ModelPermission`.
"""

from __future__ import annotations

import hashlib
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.access_keys import AccessKey
from app.dispatch.topology import Topology
from app.errors import BadRequest, ModelNotFound, NoNodeAvailable
from app.http.names import Names
from app.http.ports import NodeRegistry, SnapshotView


def model_card(model: str, created_s: int, name: str | None = None) -> dict[str, Any]:
    """One entry of the list.

    Args:
        created_s: when the first node with this model was registered.
        name: of an alias for it.
    """
    name = model if name is None else name
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": "lmdeploy",
        "root": model,
        "parent": None,
        "permission": [
            {
                "id": "modelperm-" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:22],
                "object": "model_permission",
                "created": created_s,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": True,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }


def created_s(snapshot: SnapshotView, model: str) -> int:
    since_ms = (node.registered_at_ms for node in snapshot.nodes.values() if model in node.models)
    return min(since_ms, default=0) // 1000


class OnlyModel:
    """What a request means that leaves its model out: the deployment's model, where it has one.

    Looked for among the nodes that would serve such a request, so that an encoder's models don't count.
    """

    def __init__(self, registry: NodeRegistry, topology: Topology) -> None:
        self._registry = registry
        self._roles = topology.alone

    def __call__(self) -> str:
        models = self._registry.snapshot.models(*self._roles)
        if not models:
            raise NoNodeAvailable("no node is registered that could serve this request")
        if len(models) > 1:
            raise BadRequest(
                f"The request does not name a model, and this deployment has {len(models)} (GET /v1/models)",
                param="model",
            )
        return models[0]


class Models:
    """The endpoints. They answer from the worker's snapshot and never wait for Redis. A key sees what it may use."""

    def __init__(self, registry: NodeRegistry, names: Names | None = None) -> None:
        self._registry = registry
        self._names = names

    async def list(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [*self._cards(request).values()]})

    async def one(self, request: Request) -> Response:
        model = request.path_params["model"]
        card = self._cards(request).get(model)
        if card is None:
            raise ModelNotFound(f"The model {model[:200]!r} does not exist.", param="model")
        return JSONResponse(card)

    def _cards(self, request: Request) -> dict[str, dict[str, Any]]:
        """By name: the models, then the aliases of models that are there."""
        key: AccessKey | None = request.state.key
        snapshot = self._registry.snapshot
        models = snapshot.models()
        aliases = self._names.aliases() if self._names is not None else ()
        named = [*((model, model) for model in models), *(pair for pair in aliases if pair[1] in models)]
        return {
            name: model_card(model, created_s(snapshot, model), name)
            for name, model in named
            if key is None or key.may_use(name, model)
        }
