"""LMDeploy's migration: prefill keeps the cache, decode fetches it over a link that was made before.

Prefill's answer names the session and its blocks. What decode doesn't take is freed at the prefill engine, but
only where the session's number is known for sure: an engine ends whatever session has the number it is told.

Source: lmdeploy/serve/proxy/proxy.py and lmdeploy/pytorch/disagg/conn/protocol.py (0.18.0); the header from
lmdeploy/serve/openai/distserve_fields.py, which newer engines want.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

import msgspec

from app.dispatch.answer import Answer, EngineRequest, Whole
from app.dispatch.bodies import members_of
from app.dispatch.caller import Caller, Leg
from app.dispatch.handover.bodies import (
    Members,
    Prefilled,
    for_prefill,
    read_prefilled,
    value_of,
    with_values,
)
from app.dispatch.handover.links import Links
from app.dispatch.handover.protocol import CHAT, Handed, HandOverLost, Sequential
from app.dispatch.handover.sessions import Sessions
from app.dispatch.hybrid import HeldNode
from app.dispatch.pair import Pair
from app.errors import BadRequest, UpstreamError
from app.heads import with_header
from app.store.handovers import Handovers
from app.store.ledger import Ticket
from app.store.migrations import Session
from app.upstream.transport import Response

FROM_PROXY = (b"x-lmdeploy-distserve-proxy", b"1")
LEARN_WITHIN_S = 5.0
"""How long prefill's answer is read on for a client that left, to learn what is to be freed."""


class Lmdeploy(Sequential):
    """The protocol; one per worker."""

    def __init__(
        self,
        *,
        caller: Caller,
        figures: Handovers,
        links: Links,
        sessions: Sessions,
        protocol_number: int,
        recompute: bool,
    ) -> None:
        super().__init__(caller=caller, figures=figures)
        self._links = links
        self._sessions = sessions
        self._protocol_number = protocol_number
        self._recompute = recompute

    def check(self, members: Members) -> None:
        super().check(members)
        n = value_of(members, "n")
        # As engines read it, who take 2.0 and "2" for 2.
        if isinstance(n, int | float | str) and str(n).strip() not in ("1", "1.0", "True"):
            raise BadRequest("n must be 1: LMDeploy migrates the cache of one choice only", param="n")

    async def link(self, pair: Pair) -> None:
        if not self._links.made(pair.prefill.url, pair.decode.url):
            with pair.waited("link"):
                await self._links.ensure(pair.prefill.url, pair.decode.url)

    def prefill_body(self, members: Members, path: bytes) -> bytes:
        limits = ("max_tokens", "max_completion_tokens") if path == CHAT else ("max_tokens",)
        # Without the client's session_id: completions would answer with it in place of the engine's own number,
        # and freeing by that would end somebody else's session.
        kept = {name: raw for name, raw in members.items() if name != "session_id"}
        return for_prefill(kept, {"with_cache": True, "preserve_cache": True}, limits=limits)

    async def call_prefill(self, url: str, request: EngineRequest) -> Whole:
        return await super().call_prefill(url, from_proxy(request))

    async def call_decode(self, pair: Pair, request: EngineRequest, leg: Leg = Leg.WHOLE) -> Response:
        return await super().call_decode(pair, from_proxy(request), leg)

    def life_of(self, url: str) -> int:
        return self._sessions.life_of(url)

    def gave_up(self, url: str, life: int, prefilled: Prefilled) -> None:
        self._free(url, life, read_kept(prefilled.members))

    def hand(self, pair: Pair, life: int, members: Members, prefilled: Prefilled) -> Handed:
        url, kept = pair.prefill.url, read_kept(prefilled.members)
        if kept.blocks is None or kept.token is None:
            self._free(url, life, kept)
            self.handed_nothing(url, "cache_block_ids", fatal=not self._recompute)
            return Handed(prefilled, with_values(members, {}))
        migration = {
            "protocol": self._protocol_number,
            "remote_engine_id": url,
            "remote_session_id": kept.session,
            "remote_token_id": kept.token,
            "remote_block_ids": kept.blocks,
            "is_dummy_prefill": False,
        }
        body = with_values(members, {"migration_request": migration})
        session = Session(url, kept.session, life, pair.decode.url)
        move = _Migrating(prefilled, body, session, kept.sure, self._links, self._sessions, self.figures)
        if kept.sure:
            self._sessions.hold(session)
        return move

    async def ask_prefill(self, pair: Pair, life: int, request: EngineRequest) -> Whole:
        answer = asyncio.create_task(self.call_prefill(pair.prefill.url, request), name="prefill")
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            # Aborted, the engine would keep a cache of which nobody has learnt the number.
            self._sessions.run_in_background(self._learn_and_free(pair.leave_prefill(), life, answer))
            raise

    async def _learn_and_free(self, ticket: Ticket, life: int, answer: asyncio.Task[Whole]) -> None:
        url = ticket.url
        try:
            async with asyncio.timeout(LEARN_WITHIN_S):
                whole = await answer
            kept = read_kept(read_prefilled(whole).members) if whole.status < 400 else Kept(0, False, None, None)
        except (TimeoutError, UpstreamError):
            self.figures.count("sessions_lost")
            return
        finally:
            answer.cancel()
            ticket.release(succeeded=False)
        self._free(url, life, kept)
        if whole.status < 400 and not kept.sure:
            self.figures.count("sessions_lost")

    def _free(self, url: str, life: int, kept: Kept) -> None:
        if kept.sure:
            session = Session(url, kept.session, life)
            self._sessions.hold(session)
            self._sessions.free_soon(session)


@dataclass(frozen=True, slots=True)
class Kept:
    """What a prefill engine keeps. `sure`: its cache can be freed by the session's number."""

    session: int
    sure: bool
    blocks: list[int] | None
    token: int | None


SESSION_DIGITS = 19  # of a session's number


def read_kept(members: Members) -> Kept:
    """The session, blocks and last token of a prefill answer; None where they are missing or of no use."""
    blocks, tokens = _value(members, "cache_block_ids"), _value(members, "remote_token_ids")
    session = _session_of(_value(members, "cache_session_id"), _value(members, "id"))
    return Kept(
        session or 0,
        session is not None and session >= 0,
        blocks if isinstance(blocks, list) and all(map(_is_int, blocks)) else None,
        tokens[-1] if isinstance(tokens, list) and tokens and _is_int(tokens[-1]) else None,
    )


def _session_of(cache_session_id: Any, identifier: Any) -> int | None:
    """`cache_session_id`, else an integer `id` (also as text), else None: chatcmpl-... is no session's number."""
    if _is_int(cache_session_id):
        return int(cache_session_id)
    if _is_int(identifier):
        return int(identifier)
    text = identifier if isinstance(identifier, str) else ""
    digits = text.removeprefix("-")
    return int(text) if digits.isdecimal() and digits.isascii() and len(digits) <= SESSION_DIGITS else None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _value(members: Members, name: str) -> Any:
    try:
        return msgspec.json.decode(members[name]) if name in members else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # no UTF-8, or a number beyond all bounds
        return None


def from_proxy(request: EngineRequest) -> EngineRequest:
    return request.having(headers=with_header(request.headers, *FROM_PROXY))


class _Migrating(Handed):
    """A session whose cache prefill keeps until decode has it. `sure`: it can be freed by its number."""

    def __init__(
        self,
        prefilled: Prefilled,
        body: bytes,
        session: Session,
        sure: bool,
        links: Links,
        sessions: Sessions,
        figures: Handovers,
    ) -> None:
        super().__init__(prefilled, body)
        self.prefill = session.prefill
        self.decode = session.decode
        self.ends_at_s: float | None = None
        self._session = session
        self._sure = sure
        self._lives: str | None = None
        self._taking: asyncio.Timeout | None = None
        self._links = links
        self._sessions = sessions
        self._figures = figures

    def goes_to(self, url: str) -> None:
        self._lives = self._links.lives_of(self.prefill, url)
        self._sessions.begin(self)
        if url != self.decode:
            self.decode = self._session.decode = url
            if self._sure:
                self._sessions.hold(self._session)

    def voided(self) -> bool:
        if self._sessions.life_of(self.prefill) != self._session.life:
            return True
        return self._lives is not None and self._links.lives_of(self.prefill, self.decode) != self._lives

    async def taking(self, call: Awaitable[Response]) -> Response:
        try:
            async with asyncio.timeout(None) as self._taking:
                return await call
        except TimeoutError as e:
            raise HandOverLost(f"{self.prefill} or {self.decode} was taken out in the middle of a hand-over") from e
        finally:
            self._taking = None

    def end(self) -> None:
        """Decode's call is to end at once: a node of the two was taken out."""
        if self._taking is not None:
            self._taking.reschedule(0.0)

    def taken(self) -> None:
        self._sessions.done(self)
        self._sessions.clear(self._session)

    def _give_up(self) -> None:
        self._sessions.done(self)
        if self._lives is not None:
            self._links.doubt(self.prefill, self.decode)
        if self._sure:
            self._sessions.free_soon(self._session)
        else:
            self._figures.count("sessions_lost")


@dataclass(slots=True)
class HeldDummy(HeldNode):
    """`--dummy-prefill`: decode alone, told that a prefill took place which did not."""

    protocol_number: int

    async def send(self, request: EngineRequest) -> Answer:
        try:
            body = with_values(members_of(request.body), {"migration_request": self._migration()})
        except BaseException:
            self.give_back()
            raise
        return await HeldNode.send(self, from_proxy(request.having(body=body)))

    def _migration(self) -> dict[str, Any]:
        return {
            "protocol": self.protocol_number,
            "remote_engine_id": "dummy:dummy",
            "remote_session_id": 0,
            "remote_token_id": 0,
            "remote_block_ids": [],
            "is_dummy_prefill": True,
        }
