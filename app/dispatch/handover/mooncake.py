"""vLLM's Mooncake connector: both legs at once, matched by a transfer id.

Prefill's engine ids come from its bootstrap server, asked once in a node's life: a restart has new ones. One that
nobody saw shows in a failed hand-over, after which the server is asked again.

Source: examples/online_serving/disaggregated_serving/mooncake_connector/ in vLLM.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time

from app.dispatch.answer import EngineRequest
from app.dispatch.caller import Caller
from app.dispatch.handover.bodies import Members, for_prefill, with_values
from app.dispatch.handover.bootstrap import Bootstrap
from app.dispatch.handover.nixl import limits_of
from app.dispatch.handover.protocol import CHAT, COMPLETIONS, RESPONSES, Concurrent, Legs
from app.dispatch.pair import Pair
from app.errors import EngineProtocolError, UpstreamError
from app.heads import with_header
from app.store.handovers import Handovers
from app.upstream.management import EngineClient

QUERY_TIMEOUT_S = 5.0
ASK_AGAIN_S = 1.0
"""Of one prefill node after requests that were refused, however many those are."""
RANK = b"x-data-parallel-rank"

Engines = dict[int, str]
"""Engine id by data-parallel rank."""


class _Known:
    """The engines of one life of a prefill node: the question, one for all who want to know, and the next one."""

    def __init__(self, life: object, question: asyncio.Task[Engines]) -> None:
        self.life = life
        self.question = question
        self.again: asyncio.Task[Engines] | None = None
        self.asked_s = time.monotonic()


class Mooncake(Concurrent):
    """The protocol; one per worker."""

    paths = frozenset((CHAT, COMPLETIONS, RESPONSES))

    def __init__(self, *, caller: Caller, figures: Handovers, bootstrap: Bootstrap, engines: EngineClient) -> None:
        super().__init__(caller=caller, figures=figures)
        self._bootstrap = bootstrap
        self._engines = engines
        self._known: dict[str, _Known] = {}  # by prefill URL

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
        return Legs(
            request.having(
                headers=with_header(request.headers, RANK, b"%d" % rank),
                body=for_prefill(members, {"kv_transfer_params": ask}, limits=limits),
            ),
            request.having(body=with_values(members, {"kv_transfer_params": fetch})),
        )

    def failed(self, url: str) -> None:
        # It may have restarted unseen, so that its ids are others now.
        known = self._known.get(url)
        if known is not None and known.question.done():
            del self._known[url]

    def refused(self, url: str) -> None:
        # The same, or the request's own fault: then nobody may wait for the answer, or suffer where there is none.
        known = self._known.get(url)
        if known is None or not known.question.done() or time.monotonic() - known.asked_s < ASK_AGAIN_S:
            return
        if known.again is None or known.again.done():
            known.asked_s = time.monotonic()
            known.again = asyncio.create_task(self._query(url), name="bootstrap query")
            known.again.add_done_callback(lambda again: _take_over(known, again))

    async def _engines_of(self, url: str) -> Engines:
        life = self._bootstrap.life_of(url)
        known = self._known.get(url)
        if known is None or known.life != life:
            self._known = {other: of for other, of in self._known.items() if self._bootstrap.knows(other)}
            known = self._known[url] = _Known(life, asyncio.create_task(self._query(url), name="bootstrap query"))
            # Not by whoever waits for it: they may all have left by then.
            known.question.add_done_callback(lambda question: self._forget_failed(url, question))
        return await asyncio.shield(known.question)

    async def _query(self, url: str) -> Engines:
        address = self._bootstrap.address_of(url)
        server = f"the bootstrap server {address} of prefill node {url}"
        try:
            found = await self._engines.ask_json("GET", address, "/query", None, timeout_s=QUERY_TIMEOUT_S)
            return _read_engines(server, found)
        except UpstreamError as e:
            # The engine client takes it for an engine, which nobody has registered at that address.
            e.message = f"{e.message.replace(f'engine {address}', server)} (its port: --bootstrap-port)"
            raise

    def _forget_failed(self, url: str, question: asyncio.Task[Engines]) -> None:
        known = self._known.get(url)
        if not _answered(question) and known is not None and known.question is question:
            del self._known[url]


def _take_over(known: _Known, again: asyncio.Task[Engines]) -> None:
    if _answered(again):
        known.question = again


def _answered(question: asyncio.Task[Engines]) -> bool:
    return not question.cancelled() and question.exception() is None


def _read_engines(server: str, found: object) -> Engines:
    """Raises EngineProtocolError."""
    engines: Engines = {}
    for rank, entry in found.items() if isinstance(found, dict) else ():
        identifier = entry.get("engine_id") if isinstance(entry, dict) else None
        if rank.isdecimal() and isinstance(identifier, str):
            engines[int(rank)] = identifier
    if not engines:
        raise EngineProtocolError(f"{server} names no engine")
    return engines
