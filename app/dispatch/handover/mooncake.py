"""vLLM's Mooncake connector: both legs at once, matched by a transfer id.

Prefill's engine ids come from its bootstrap server, asked once in a node's life: a restart has new ones.

Source: examples/online_serving/disaggregated_serving/mooncake_connector/ in vLLM.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from dataclasses import replace

from app.dispatch.answer import EngineRequest
from app.dispatch.caller import Caller
from app.dispatch.handover.bodies import Members, for_prefill, with_values
from app.dispatch.handover.bootstrap import Bootstrap
from app.dispatch.handover.nixl import limits_of
from app.dispatch.handover.protocol import CHAT, COMPLETIONS, RESPONSES, Concurrent, Legs
from app.dispatch.pair import Pair
from app.errors import EngineProtocolError, UpstreamError
from app.store.handovers import Handovers
from app.upstream.management import EngineClient

QUERY_TIMEOUT_S = 5.0
RANK = b"x-data-parallel-rank"


class Mooncake(Concurrent):
    """The protocol; one per worker."""

    paths = frozenset((CHAT, COMPLETIONS, RESPONSES))

    def __init__(self, *, caller: Caller, figures: Handovers, bootstrap: Bootstrap, engines: EngineClient) -> None:
        super().__init__(caller=caller, figures=figures)
        self._bootstrap = bootstrap
        self._engines = engines
        # Prefill URL -> its life, and the question: rank -> engine id. One question for all who want to know.
        self._known: dict[str, tuple[object, asyncio.Task[dict[int, str]]]] = {}

    async def legs(self, pair: Pair, request: EngineRequest, members: Members) -> Legs:
        url = pair.prefill.url
        engines = await self._engines_of(url)
        rank = random.choice(sorted(engines))
        transfer = f"xfer-{secrets.token_hex(16)}"
        ask = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        fetch = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": self._bootstrap.address_of(url),
            "remote_engine_id": engines[rank],
            "transfer_id": transfer,
        }
        limits = limits_of(request.path.partition(b"?")[0])
        kept = [header for header in request.headers if header[0] != RANK]
        return Legs(
            replace(
                request,
                headers=[*kept, (RANK, b"%d" % rank)],
                body=for_prefill(members, {"kv_transfer_params": ask}, limits=limits),
            ),
            replace(request, body=with_values(members, {"kv_transfer_params": fetch})),
        )

    def failed(self, url: str) -> None:
        # It may have restarted unseen, so that its ids are others now.
        known = self._known.get(url)
        if known is not None and known[1].done():
            del self._known[url]

    async def _engines_of(self, url: str) -> dict[int, str]:
        life = self._bootstrap.life_of(url)
        known = self._known.get(url)
        if known is None or known[0] != life:
            self._known = {other: of for other, of in self._known.items() if self._bootstrap.knows(other)}
            known = self._known[url] = (life, asyncio.create_task(self._query(url), name="bootstrap query"))
        try:
            return await asyncio.shield(known[1])
        except UpstreamError:
            self._forget(url, known[1])
            raise

    async def _query(self, url: str) -> dict[int, str]:
        address = self._bootstrap.address_of(url)
        server = f"the bootstrap server {address} of prefill node {url}"
        try:
            found = await self._engines.ask_json("GET", address, "/query", None, timeout_s=QUERY_TIMEOUT_S)
            return _read_engines(server, found)
        except UpstreamError as e:
            # The engine client takes it for an engine, which nobody has registered at that address.
            e.message = f"{e.message.replace(f'engine {address}', server)} (its port: --bootstrap-port)"
            raise

    def _forget(self, url: str, task: asyncio.Task[dict[int, str]]) -> None:
        if self._known.get(url, (0, None))[1] is task:
            del self._known[url]


def _read_engines(server: str, found: object) -> dict[int, str]:
    """Engine id by data-parallel rank. Raises EngineProtocolError."""
    engines: dict[int, str] = {}
    for rank, entry in found.items() if isinstance(found, dict) else ():
        identifier = entry.get("engine_id") if isinstance(entry, dict) else None
        if rank.isdecimal() and isinstance(identifier, str):
            engines[int(rank)] = identifier
    if not engines:
        raise EngineProtocolError(f"{server} names no engine")
    return engines
