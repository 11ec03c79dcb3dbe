"""The pair of a split request: a prefill and a decode node, both counted from one moment on.

Owns which nodes a request holds, which have failed it, and the times of its stages. It must not know how the
KV cache is handed over.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from app.dispatch.answer import Answer
from app.dispatch.breakers import speaks_against
from app.dispatch.hybrid import untried
from app.dispatch.retries import Retries
from app.dispatch.work import work_of
from app.errors import Headers, ModelNotFound, NoNodeAvailable
from app.nodes import Role
from app.store.handing import Handing
from app.store.handovers import Handovers
from app.store.ledger import Ledger, Ticket


class Pair:
    """One request's. `prefill` and `decode` may become other nodes while it is tried."""

    def __init__(
        self,
        model: str,
        prefill: Ticket,
        decode: Ticket,
        *,
        ledger: Ledger,
        figures: Handovers,
        handing: Handing,
        retries: Retries,
    ) -> None:
        self.retries = retries
        self.prefill_work: float | None = None  # known with the request
        self.prefill = prefill
        self.decode = decode
        self._model = model
        self._ledger = ledger
        self._figures = figures
        self._handing = handing
        self._handed: tuple[str, str] | None = None
        self._tried: set[str] = set()
        self._left = False
        self._timings: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Pair {self.prefill.url} -> {self.decode.url} tried={len(self._tried)}>"

    async def replace_prefill(self) -> bool:
        """Take another prefill node instead. False: none is left."""
        ticket = await self._another(Role.Prefill, self.prefill)
        self.prefill = ticket or self.prefill
        return ticket is not None

    async def replace_decode(self) -> bool:
        ticket = await self._another(Role.Decode, self.decode)
        self.decode = ticket or self.decode
        if self._handed is not None and ticket is not None:
            prefill, before = self._handed
            self._handed = prefill, ticket.url
            self._handing.begin(*self._handed)
            self._handing.end(prefill, before)
        return ticket is not None

    async def replace(self, url: str) -> bool:
        """Whichever of the two is at `url`."""
        return await (self.replace_decode() if url == self.decode.url else self.replace_prefill())

    async def prefill_again(self) -> bool:
        """Count a prefill node once more: what was handed over can't be used any longer. False: there is none."""
        try:
            self.prefill = await self._ledger.acquire(untried(self._model, self._tried, Role.Prefill), again=True)
        except (ModelNotFound, NoNodeAvailable):
            return False
        return True

    def begin(self, request_bytes: int) -> None:
        """The request goes out, and has a body of so many bytes."""
        self.prefill_work = work_of(request_bytes, 1)
        self.prefill.begin()
        self.decode.begin()

    def hand_over(self) -> None:
        """Prefill's answer is complete. Its count goes back; its node is needed until `handed_over`."""
        self._handed = self.prefill.url, self.decode.url
        self._handing.begin(*self._handed)  # first: a drain must not see the node without either
        self.prefill.release(succeeded=True, work=self.prefill_work)
        self.decode.begin()

    def handed_over(self) -> None:
        """Decode has the cache, or won't fetch it. Once or not at all, whatever was called before."""
        pair, self._handed = self._handed, None
        if pair is not None:
            self._handing.end(*pair)

    def leave_prefill(self) -> Ticket:
        """From now on the prefill leg's count is given back by the caller, who waits for its end."""
        self._left = True
        return self.prefill

    def give_back(self, answer: Answer | None = None) -> None:
        """`answer`: what the node of one leg said; where that does not speak against it, its row of failures ends."""
        for ticket in (self.decode,) if self._left else (self.prefill, self.decode):
            answered = answer is not None and answer.url == ticket.url and not speaks_against(answer.status)
            ticket.release(succeeded=False, answered=answered)

    async def _another(self, role: Role, failed: Ticket) -> Ticket | None:
        self._tried.add(failed.url)
        failed.release(succeeded=False)
        try:
            return await self._ledger.acquire(untried(self._model, self._tried, role), again=True)
        except (ModelNotFound, NoNodeAvailable):
            return None

    # --- stages

    @contextmanager
    def waited(self, name: str) -> Iterator[None]:
        """Time what the request waits for and others do too: told to its client, and counted by who does it."""
        begun_s = time.monotonic()
        yield
        self._timings[name] = self._timings.get(name, 0.0) + time.monotonic() - begun_s

    def took(self, name: str, url: str, seconds: float) -> None:
        self._timings[name] = self._timings.get(name, 0.0) + seconds
        self._figures.took(url, name, seconds)

    def server_timing(self) -> Headers:
        """The header with all stages so far, ms; none where none has ended. Source: W3C Server Timing."""
        stages = [f"{name};dur={seconds * 1000:.1f}" for name, seconds in self._timings.items()]
        return [(b"server-timing", ", ".join(stages).encode())] if stages else []
