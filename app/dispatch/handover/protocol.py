"""The two ways in which a hand-over can go: one leg after the other, or both at once.

`Sequential` and `Concurrent` own the order of the calls, what happens when one fails and who has to give back
what; a protocol fills in the bodies. Nothing of decode's answer goes to the client before its first bytes are
here, so every failure until then has a status of its own, and another node can still be tried.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from app.dispatch.answer import Answer, Begun, Broke, EngineRequest, Whole
from app.dispatch.bodies import members_of
from app.dispatch.caller import Caller, Leg, uncompressed
from app.dispatch.handover.bodies import (
    Members,
    Prefilled,
    check_one_prompt,
    check_splittable,
    read_prefilled,
    shows_failure,
)
from app.dispatch.handover.merge import Known, Wait, merged
from app.dispatch.pair import Pair
from app.dispatch.retries import never_arrived
from app.dispatch.seldom import Seldom
from app.errors import EngineProtocolError, EngineTimeout, EngineUnreachable, UpstreamError
from app.store.handovers import Handovers
from app.upstream.transport import Response, whole

log = logging.getLogger("evenhand.dispatch")

PREFILL_ANSWER_LIMIT_BYTES = 64 * 2**20
DRAIN_S = 1.0
"""How long figures of decode's answer wait for prefill's, which computes nothing after decode has begun."""

CHAT, COMPLETIONS, RESPONSES = b"/v1/chat/completions", b"/v1/completions", b"/v1/responses"


class Protocol(ABC):
    """One per worker."""

    paths: frozenset[bytes] = frozenset((CHAT, COMPLETIONS))
    """What is split; requests to other paths go whole to a decode node."""

    one_prompt = True
    """Whether a hand-over is the cache of one prompt, so that a list of them can't be served."""

    def __init__(self, *, caller: Caller, figures: Handovers) -> None:
        self.caller = caller
        self.figures = figures

    def check(self, members: Members) -> None:
        """Refuse what can't be served split. Raises BadRequest."""
        check_splittable(members)
        if self.one_prompt:
            check_one_prompt(members)

    @abstractmethod
    async def run(self, pair: Pair, request: EngineRequest) -> Answer:
        """Serve the request by the pair; whoever calls gives the pair back if this raises."""

    # --- the calls

    async def call_prefill(self, url: str, request: EngineRequest) -> Whole:
        return await self.caller.fetch(
            url, request, limit_bytes=PREFILL_ANSWER_LIMIT_BYTES, leg=Leg.PREFILL, stage="prefill"
        )

    async def call_decode(self, pair: Pair, request: EngineRequest, leg: Leg = Leg.WHOLE) -> Response:
        """Decode's answer, its first bytes included; or one of 400 and more, to its head."""
        url, begun_s = pair.decode.url, time.monotonic()
        response = await self.caller.send(url, uncompressed(request), leg, stage="decode")
        if response.status >= 400:
            return response
        body = whole(response)
        if body is None:
            try:
                response = Begun(response, await self.caller.read(url, response))
            except BaseException:
                response.close()
                raise
        else:
            response = Whole(url, response.status, response.headers, body)
        pair.took("decode", url, time.monotonic() - begun_s)
        return response


class Handed:
    """What prefill handed over, and what is owed for it until decode has taken it."""

    def __init__(self, prefilled: Prefilled | None, body: bytes, *, valid_until_s: float = float("inf")) -> None:
        self.prefilled = prefilled
        self.body = body
        self.valid_until_s = valid_until_s  # time.monotonic()
        self._abandoned = False

    @property
    def valid(self) -> bool:
        return time.monotonic() < self.valid_until_s

    def goes_to(self, url: str) -> None:
        """Decode at `url` is going to be called."""

    async def taking(self, call: Awaitable[Response]) -> Response:
        """Decode's answer, which shows whether it has taken it. Raises HandOverLost: `call` was ended before."""
        return await call

    def taken(self) -> None:
        """Decode has sent its first token: the cache has moved."""

    def abandon(self) -> None:
        """Decode won't take it. May be called more than once."""
        if not self._abandoned:
            self._abandoned = True
            self._give_up()

    def _give_up(self) -> None:
        """What a protocol does about what nobody takes."""

    def voided(self) -> bool:
        """Whether what decode needs to take it has gone: then its refusal proves nothing."""
        return False


class Sequential(Protocol):
    """Prefill, then decode with what prefill answered."""

    def __init__(self, *, caller: Caller, figures: Handovers) -> None:
        super().__init__(caller=caller, figures=figures)
        self._failing = Seldom(log)

    def handed_nothing(self, url: str, missing: str, *, fatal: bool) -> None:
        """Prefill answered without `missing`; raises EngineProtocolError where that is `fatal`."""
        self.figures.count("missing_params")
        words = f"engine {url} handed nothing over: no {missing} in its answer"
        self._failing.warn(url, words if fatal else f"{words}; decode computes the prompt")
        if fatal:
            raise EngineProtocolError(words)

    @abstractmethod
    def prefill_body(self, members: Members, path: bytes) -> bytes: ...

    @abstractmethod
    def hand(self, pair: Pair, life: int, members: Members, prefilled: Prefilled) -> Handed:
        """`life`: of the prefill node when it was asked.

        Raises EngineProtocolError where nothing was handed over and the settings want that to fail.
        """

    async def link(self, pair: Pair) -> None:
        """Make sure that the two can reach each other. Raises LinkFailed."""

    def life_of(self, url: str) -> int:
        """Which process is at a node's address, where a protocol minds."""
        return 0

    def gave_up(self, url: str, life: int, prefilled: Prefilled) -> None:
        """Prefill answered that it gave the request up."""

    async def ask_prefill(self, pair: Pair, life: int, request: EngineRequest) -> Whole:
        """Prefill's answer. Cancelled where the client leaves meanwhile."""
        return await self.call_prefill(pair.prefill.url, request)

    async def run(self, pair: Pair, request: EngineRequest) -> Answer:
        members = members_of(request.body)
        self.check(members)
        while True:
            handed = await self._prefill_somewhere(pair, request, members)
            if isinstance(handed, Answer):
                pair.give_back(handed)
                return handed
            try:
                answer = await self._decode_somewhere(pair, request, handed)
            finally:
                pair.handed_over()
            if answer is not None:
                return answer

    async def _prefill_somewhere(self, pair: Pair, request: EngineRequest, members: Members) -> Handed | Answer:
        """What prefill handed over; or its own answer where it failed, and no other prefill node may be tried."""
        path = request.path.partition(b"?")[0]
        request = request.having(body=self.prefill_body(members, path))
        while True:
            try:
                await self.link(pair)
                handed = await self._prefill(pair, request, members)
            except UpstreamError as e:
                url = e.url if isinstance(e, LinkFailed) else pair.prefill.url
                if not await pair.retries.may(e) or not await pair.replace(url):
                    raise
                continue
            if not isinstance(handed, Answer) or not pair.retries.concerns(handed.status):
                return handed
            if not await pair.retries.may(handed.status) or not await pair.replace_prefill():
                return handed

    async def _prefill(self, pair: Pair, request: EngineRequest, members: Members) -> Handed | Answer:
        url, begun_s = pair.prefill.url, time.monotonic()
        life = self.life_of(url)
        whole = await self.ask_prefill(pair, life, request)
        if whole.status >= 400:
            return Answer(whole, url, ())
        pair.took("prefill", url, time.monotonic() - begun_s)
        prefilled = read_prefilled(whole)
        if prefilled.aborted:
            self.gave_up(url, life, prefilled)
            raise gave_up(url)
        handed = self.hand(pair, life, members, prefilled)
        pair.hand_over()
        return handed

    async def _decode_somewhere(self, pair: Pair, request: EngineRequest, handed: Handed) -> Answer | None:
        """The answer; None: what was handed over can't be used any longer, and prefill is held once more."""
        done_s = time.monotonic()
        try:
            while True:
                try:
                    response = await self._decode(pair, request, handed, done_s)
                    break
                except HandOverLost:
                    handed.abandon()
                    if await pair.retries.may_again() and await pair.prefill_again():
                        return None
                    raise
                except UpstreamError as e:
                    at_prefill = isinstance(e, LinkFailed) and e.url == pair.prefill.url
                    if not await pair.retries.may(e) or not await pair.replace(
                        pair.prefill.url if at_prefill else pair.decode.url
                    ):
                        raise
                    if at_prefill:
                        handed.abandon()
                        return None
                    if not (never_arrived(e) and handed.valid):
                        handed.abandon()
                        if await pair.prefill_again():
                            return None
                        raise
                done_s = time.monotonic()
        except BaseException:
            handed.abandon()
            raise
        url = pair.decode.url
        if response.status < 400:
            if isinstance(response, Begun | Whole) and shows_failure(response.first):
                handed.abandon()
            else:
                handed.taken()
        else:
            handed.abandon()
            try:
                again = await self._decode_again(pair, handed, response.status)
            except BaseException:
                response.close()
                raise
            if again:
                response.close()
                return None
        return await finish(pair, response, lambda: handed.prefilled, url=url, broke=self.caller.broke)

    async def _decode(self, pair: Pair, request: EngineRequest, handed: Handed, done_s: float) -> Response:
        """Decode's answer. Raises HandOverLost: prefill's process or one of the two nodes has gone meanwhile."""
        if not handed.voided():
            await self.link(pair)
        if handed.voided():
            raise HandOverLost(f"engine {pair.prefill.url} has gone before {pair.decode.url} could fetch its cache")
        url = pair.decode.url
        handed.goes_to(url)
        pair.took("handover", url, time.monotonic() - done_s)
        return await handed.taking(self.call_decode(pair, request.having(body=handed.body)))

    async def _decode_again(self, pair: Pair, handed: Handed, status: int) -> bool:
        """Whether a refused hand-over is to be made once more, at the same decode node or another."""
        if handed.voided():
            return await pair.retries.may_again() and await pair.prefill_again()
        if not pair.retries.concerns(status) or not await pair.retries.may(status):
            return False
        return await pair.replace_decode() and await pair.prefill_again()


class LinkFailed(EngineUnreachable):
    """Two engines could not be linked. `url`: the one to blame."""

    code = "link_failed"

    def __init__(self, message: str, *, url: str) -> None:
        super().__init__(message)
        self.url = url


class HandOverLost(EngineUnreachable):
    """What prefill handed over has gone, through nobody's fault: it restarted, or a node was taken out."""

    code = "hand_over_lost"


def gave_up(url: str) -> EngineProtocolError:
    return EngineProtocolError(f"engine {url} gave up the prefill")


class _LegFailed(Exception):
    """A leg's error, with the node that it is about."""

    def __init__(self, url: str, error: UpstreamError) -> None:
        super().__init__()
        self.url = url
        self.error = error


@dataclass(frozen=True, slots=True)
class Legs:
    """The two calls of a hand-over that goes on at both ends at once."""

    prefill: EngineRequest
    decode: EngineRequest


class Concurrent(Protocol):
    """Both legs at once; each waits at the other engine for its counterpart."""

    @abstractmethod
    async def legs(self, pair: Pair, request: EngineRequest, members: Members) -> Legs:
        """With ids that no other attempt has. Raises UpstreamError: prefill can't say where its cache will be."""

    def failed(self, url: str) -> None:
        """A hand-over by the prefill node at `url` failed, at whichever end."""

    def refused(self, url: str) -> None:
        """The same by an engine's 4xx, so that it is most likely the request's own fault."""

    def read(self, whole: Whole) -> Prefilled:
        """Raises EngineProtocolError: no JSON, or the engine says that it gave the request up."""
        prefilled = read_prefilled(whole)
        if prefilled.aborted:
            raise gave_up(whole.url)
        return prefilled

    async def run(self, pair: Pair, request: EngineRequest) -> Answer:
        members = members_of(request.body)
        self.check(members)
        while True:
            prefill = url = pair.prefill.url
            answer: Answer | None = None
            failure: UpstreamError | int
            try:
                answer = await self._race(pair, await self.legs(pair, request, members))
                if answer.status < 400:
                    return answer
                url, failure = answer.url, answer.status
                again = pair.retries.concerns(failure) and await pair.retries.may(failure)
            except _LegFailed as e:
                url, failure = e.url, e.error
                again = await pair.retries.may(failure)
            except UpstreamError as e:
                failure = e
                again = await pair.retries.may(failure)
            if isinstance(failure, int) and failure < 500:
                self.refused(prefill)
            else:
                self.failed(prefill)
            again = again and await pair.replace(url) and (pair.prefill.held or await pair.prefill_again())
            if again:
                continue
            if answer is None:
                assert isinstance(failure, UpstreamError)
                raise failure
            pair.give_back(answer)
            return answer

    async def _race(self, pair: Pair, legs: Legs) -> Answer:
        """The answer: decode's, or that of the leg that failed first; the other leg is ended then."""
        prefill = asyncio.create_task(self._prefill_leg(pair, legs.prefill), name="prefill")
        decode = asyncio.create_task(self._decode_leg(pair, legs.decode), name="decode")
        try:
            done, _ = await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if prefill in done:
                whole = prefill.result()
                if whole.status >= 400:
                    await _end(decode)
                    return Answer(whole, whole.url, ())
                self.read(whole)
                pair.hand_over()
                await asyncio.wait((decode,), timeout=self.caller.timeouts.first_byte_s or None)
                if not decode.done():
                    raise _LegFailed(pair.decode.url, _too_slow(pair.decode.url, self.caller.timeouts.first_byte_s))
            response = decode.result()
            if response.status >= 400:
                await _end(prefill)
                return await self._refusal(pair.decode.url, response)
        except BaseException:
            await _end(prefill)
            await _end(decode)
            raise
        finally:
            pair.handed_over()
        return await self._beside(pair, response, prefill)

    async def _beside(self, pair: Pair, response: Response, prefill: asyncio.Task[Whole]) -> Answer:
        """Decode answers; prefill's own answer is read to its end beside it, and not for longer."""
        ticket, work = pair.prefill, pair.prefill_work
        prefill.add_done_callback(lambda task: ticket.release(succeeded=_succeeded(task), work=work))
        both = _Both(response, prefill, self.read)
        try:
            return await finish(pair, both, both.said, url=pair.decode.url, broke=self.caller.broke, wait=both.drain)
        except BaseException:
            both.close()
            raise

    async def _refusal(self, url: str, response: Response) -> Answer:
        """Decode's failure, read here, so that its count can be given back whatever is done with it."""
        try:
            return Answer(await self.caller.read_refusal(url, response), url, ())
        except UpstreamError as e:
            raise _LegFailed(url, e) from e

    async def _prefill_leg(self, pair: Pair, request: EngineRequest) -> Whole:
        url, begun_s = pair.prefill.url, time.monotonic()
        try:
            whole = await self.call_prefill(url, request)
        except UpstreamError as e:
            raise _LegFailed(url, e) from e
        if whole.status < 400:
            pair.took("prefill", url, time.monotonic() - begun_s)
        return whole

    async def _decode_leg(self, pair: Pair, request: EngineRequest) -> Response:
        try:
            return await self.call_decode(pair, request, Leg.BESIDE_PREFILL)
        except UpstreamError as e:
            raise _LegFailed(pair.decode.url, e) from e


class _Both:
    """Decode's answer; whoever closes it ends prefill's leg too."""

    def __init__(
        self, response: Response, prefill: asyncio.Task[Whole], read_prefilled: Callable[[Whole], Prefilled]
    ) -> None:
        self.status = response.status
        self.headers = response.headers
        self._response = response
        self._prefill = prefill
        self._read_prefilled = read_prefilled
        self._said: Prefilled | None = None
        self._drained = False

    def said(self) -> Prefilled | None:
        """Prefill's answer, once it is there and good."""
        if self._said is None and self._prefill.done() and _succeeded(self._prefill):
            with contextlib.suppress(UpstreamError):
                self._said = self._read_prefilled(self._prefill.result())
        return self._said

    async def drain(self) -> None:
        """Wait for prefill's answer, once, and no longer than it takes to arrive."""
        if not self._drained:
            self._drained = True
            await asyncio.wait((self._prefill,), timeout=DRAIN_S)

    async def read(self) -> bytes:
        return await self._response.read()

    def close(self) -> None:
        self._prefill.cancel()
        self._response.close()


async def finish(
    pair: Pair, response: Response, known: Known, *, url: str, broke: Broke, wait: Wait | None = None
) -> Answer:
    """The answer for the client: decode's, of the node at `url`, with prefill's figures where it shows any.

    `broke` is told where it breaks off, here or in the client's hands; `wait` as in `merged`.
    """
    try:
        response = await merged(response, known, url=url, wait=wait)
    except BaseException as e:
        if isinstance(e, UpstreamError):
            broke(url, e)
        response.close()
        raise
    # The prompt was another node's work.
    answer = Answer(response, url, (pair.decode,), broke, request_bytes=0 if pair.decode.learns else None)
    answer.headers = [*answer.headers, *pair.server_timing()]
    return answer


def _too_slow(url: str, limit_s: float) -> EngineTimeout:
    return EngineTimeout(f"engine {url} did not answer within {limit_s:g} s of the prefill's end", stage="first_byte")


async def _end(leg: asyncio.Task[Any]) -> None:
    """Cancel a leg and wait until its connection is gone; an answer that it has got is closed."""
    leg.cancel()
    await asyncio.wait((leg,))
    if not leg.cancelled() and leg.exception() is None:
        leg.result().close()


def _succeeded(leg: asyncio.Task[Whole]) -> bool:
    return not leg.cancelled() and leg.exception() is None and leg.result().status < 400
