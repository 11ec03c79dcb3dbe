"""DistServe serving: prefill and decode on different nodes. Not built yet: every request is told so."""

from __future__ import annotations

from app.dispatch.answer import Answer, EngineRequest
from app.errors import NotBuilt


class DistServe:
    """The use case; one per worker."""

    async def open(self, request: EngineRequest) -> Answer:
        raise NotBuilt("--serving-strategy DistServe is not built yet; use Hybrid")
