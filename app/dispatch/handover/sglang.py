"""SGLang's bootstrap: both nodes get the same body, at once, and meet in a room of prefill's bootstrap server.

Source: python/sglang/srt/disaggregation/mini_lb.py and sgl-router in SGLang.
"""

from __future__ import annotations

import random
from typing import Any

from app.dispatch.answer import EngineRequest
from app.dispatch.caller import Caller
from app.dispatch.handover.bodies import Members, value_of, with_values
from app.dispatch.handover.bootstrap import Bootstrap
from app.dispatch.handover.protocol import COMPLETIONS, Concurrent, Legs
from app.dispatch.pair import Pair
from app.store.handovers import Handovers

ROOMS = 2**63
"""A room is a non-negative signed 64-bit number."""


class Sglang(Concurrent):
    """The protocol; one per worker."""

    one_prompt = False  # a room for each

    def __init__(self, *, caller: Caller, figures: Handovers, bootstrap: Bootstrap) -> None:
        super().__init__(caller=caller, figures=figures)
        self._bootstrap = bootstrap

    async def legs(self, pair: Pair, request: EngineRequest, members: Members) -> Legs:
        url = pair.prefill.url
        host, port = self._bootstrap.host_of(url), self._bootstrap.port_of(url)
        batch = batch_of(members) if request.path.partition(b"?")[0] == COMPLETIONS else None
        values: dict[str, Any] = (
            {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": random.randrange(ROOMS)}
            if batch is None
            else {
                "bootstrap_host": [host] * batch,
                "bootstrap_port": [port] * batch,
                "bootstrap_room": [random.randrange(ROOMS) for _ in range(batch)],
            }
        )
        both = request.having(body=with_values(members, values))
        return Legs(both, both)


def batch_of(members: Members) -> int | None:
    """How many prompts a completions request has; None for a single one, be it text or token ids."""
    prompt = value_of(members, "prompt")
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return None
    return len(prompt)
