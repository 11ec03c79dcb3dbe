"""EPD: media items go to encoder nodes first, then the request goes to whoever answers it.

Takes the request apart (`media`), has each item encoded by the node that the shared cursor gives it,
puts what the encoders report in place of the media, and hands the request on to the inner use case
(one node for prefill and decode, or a pair). It must not know Redis or Starlette.

Source: vLLM's encoder-disaggregation proxy; docs/epd.md says where this differs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.dispatch.answer import Answer, EngineRequest, Outcome, Server, Taker, Whole
from app.dispatch.breakers import speaks_against
from app.dispatch.caller import AnswerTooLong, Caller
from app.dispatch.consumers import Consumer, Consumers
from app.dispatch.media import (
    Group,
    Item,
    Key,
    MediaRequest,
    Report,
    ReportError,
    group_items,
    may_have_media,
    read_reports,
)
from app.dispatch.retries import never_arrived
from app.errors import EngineBroke, Headers, ModelNotFound, NoNodeAvailable, UpstreamError
from app.nodes import Role, State
from app.store.budget import RetryBudget
from app.store.handovers import Handovers
from app.store.ledger import Ledger, Select, Ticket
from app.store.registry import Registry
from app.store.snapshot import Pool, Snapshot

log = logging.getLogger("evenhand.dispatch")

PATH = b"/v1/chat/completions"
LOOK_EVERY_S = 1.0
"""How often a call that waits for an encoder looks whether that one is down by now."""
REPORT_LIMIT_BYTES = 64 * 2**20
"""Of an encoder's answer: metadata is small, but some connectors send more."""


class _Refused(Exception):
    """An encoder's own 4xx: the client's error, which it gets as it is."""

    def __init__(self, answer: Whole) -> None:
        super().__init__()
        self.answer = answer


@dataclass(frozen=True, slots=True)
class EpdRules:
    """From settings. `batch_limit`: images in one call, 0 = no limit."""

    batch_limit: int
    encoder_retries: int
    decode_retries: int
    rewrite: bool


class Epd:
    """The use case; one per worker.

    Args:
        consumer_taker: who serves a request with pushed embeddings; not asked where `consumers` is false.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        ledger: Ledger,
        caller: Caller,
        inner: Server,
        rules: EpdRules,
        consumers: Consumers,
        consumer_taker: Taker,
        budget: RetryBudget,
        figures: Handovers,
        expects_encoders: bool,
    ) -> None:
        self._registry = registry
        self._ledger = ledger
        self._caller = caller
        self._inner = inner
        self._rules = rules
        self._consumers = consumers
        self._consumer_taker = consumer_taker
        self._budget = budget
        self._figures = figures
        self._expects_encoders = expects_encoders

    async def open(self, request: EngineRequest) -> Answer:
        """Encode what there is to encode, then serve the rest; as `Hybrid.open` otherwise.

        An engine that answers 500 after the encoders did their work gets everything once more, from
        the encoders on: a consumer that lost what was pushed to it says 500.
        """
        if not self._expects_encoders and not self._registry.snapshot.serves(request.model, Role.Encode):
            return await self._inner.open(request)
        media = self._media_of(request)
        if media is None:
            return await self._inner.open(request)
        attempts = 1 + self._rules.decode_retries
        consumer: Consumer | None = None
        while True:
            attempts -= 1
            answer, consumer = await self._attempt(request, media, consumer)
            if answer.status != 500 or not attempts:
                return answer
            try:
                affordable = await self._budget.take()
            except BaseException:
                answer.close(Outcome.ABORTED)
                raise
            if not affordable:
                return answer
            answer.close(Outcome.ENGINE_ERROR)

    def _media_of(self, request: EngineRequest) -> MediaRequest | None:
        if request.path.partition(b"?")[0] != PATH or not may_have_media(request.body):
            return None
        media = MediaRequest(request.body)
        return media if media.items else None

    async def _attempt(
        self, request: EngineRequest, media: MediaRequest, before: Consumer | None
    ) -> tuple[Answer, Consumer | None]:
        """One time from the encoders on; `before`: the consumer of the attempt before, kept while its node is there."""
        if not self._consumers:
            try:
                body = await self._encode(request, media, None)
            except _Refused as e:
                return Answer(e.answer, e.answer.url, ()), None
            # Not a 500 elsewhere: what the encoders have handed out may be used up.
            return await self._inner.open(request.having(body=body), retry_500=False), None
        # A pushed embedding goes to one consumer, so that one is held before anything is encoded.
        held = await self._consumer_taker.take_among(
            request.model, self._consumers.urls, only=before.url if before else None
        )
        try:
            consumer = before if before and before.url == held.url else self._consumers.choose(held.url)
            body = await self._encode(request, media, consumer.zmq)
        except _Refused as e:
            held.give_back()
            return Answer(e.answer, e.answer.url, ()), None
        except BaseException:
            held.give_back()
            raise
        headers = [*without_rank(request.headers), *consumer.headers] if consumer.headers else request.headers
        return await held.send(request.having(body=body, headers=headers)), consumer

    async def _encode(self, request: EngineRequest, media: MediaRequest, consumer_zmq: str | None) -> bytes:
        """Every distinct item encoded, concurrently; the body that goes on.

        The first failure that can't be mended cancels the other calls.
        """
        items = media.distinct_items
        tickets = await self._ledger.acquire_encoders(encoders_for(request.model), len(items))
        groups = group_items(items, [ticket.url for ticket in tickets], batch_limit=self._rules.batch_limit)
        by_item = dict(zip((item.index for item in items), tickets, strict=True))
        reports: dict[Key, Report] = {}

        def encoding(group: Group) -> Coroutine[Any, Any, None]:
            held = [by_item[item.index] for item in group.items]
            return self._encode_group(request, media, group, held, consumer_zmq, reports)

        try:
            if len(groups) == 1:
                await encoding(groups[0])
            else:
                async with asyncio.TaskGroup() as calls:
                    for group in groups:
                        calls.create_task(encoding(group))
        except ExceptionGroup as failures:
            raise _first(failures) from None
        finally:
            for ticket in tickets:
                ticket.release(succeeded=False)
        return media.with_reports(reports, rewrite=self._rules.rewrite, to_consumer=consumer_zmq is not None)

    async def _encode_group(
        self,
        request: EngineRequest,
        media: MediaRequest,
        group: Group,
        tickets: Sequence[Ticket],
        consumer_zmq: str | None,
        reports: dict[Key, Report],
    ) -> None:
        """One call, at the encoder that was assigned or, where that fails, at the next ones."""
        tried = [group.url]
        while True:
            try:
                async with self._while_up(request.model, tried):
                    reports |= await self._call(request, media, group, tickets, consumer_zmq)
                return
            except ReportError:
                raise
            except UpstreamError as e:
                failure = e
            log.warning("encoder %s failed: %s", group.url, failure.message)
            self._figures.count("encodes_failed")
            try:
                if len(tried) > self._rules.encoder_retries:
                    next_encoder(request.model, tried)(self._registry.snapshot)
                    raise failure  # somebody is left, but it was tried often enough
                if not never_arrived(failure) and not await self._budget.take():
                    raise failure
                tickets = await self._take_next(request.model, tried, len(group.items))
            except NoNodeAvailable as none_left:
                raise NoNodeAvailable(f"no Encode node could take the media: {failure.message}") from none_left
            tried.append(tickets[0].url)
            group = replace(group, url=tickets[0].url, transfer_ids=tuple(secrets.token_hex(16) for _ in group.items))

    @contextlib.asynccontextmanager
    async def _while_up(self, model: str, tried: Sequence[str]) -> AsyncIterator[None]:
        """Give up what is inside when the encoder is down by now and another can take its items.

        A host that hangs or lost its power breaks no connection: only the probes find it out. Raises EngineBroke.
        """
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def look(again: Callable[[Any], None]) -> None:  # itself: by its name it would hold itself
            nonlocal timer
            if self._is_lost(model, tried):
                scope.reschedule(loop.time())
            else:
                timer = loop.call_later(LOOK_EVERY_S, again, again)

        timer = loop.call_later(LOOK_EVERY_S, look, look)
        try:
            async with asyncio.timeout(None) as scope:
                yield
        except TimeoutError as e:
            raise EngineBroke(f"encoder {tried[-1]} went down before it answered") from e
        finally:
            timer.cancel()

    def _is_lost(self, model: str, tried: Sequence[str]) -> bool:
        snapshot = self._registry.snapshot
        node = snapshot.nodes.get(tried[-1])
        if node is None or node.state not in (State.DOWN, State.GONE) or len(tried) > self._rules.encoder_retries:
            return False
        try:
            next_encoder(model, tried)(snapshot)
        except (ModelNotFound, NoNodeAvailable):
            return False  # it may have stopped listening only, and still end its work
        return True

    async def _take_next(self, model: str, tried: Sequence[str], items: int) -> list[Ticket]:
        """Count the items on the next encoder; the cursor stays where it is, so others' turns don't shift."""
        tickets = [await self._ledger.acquire(next_encoder(model, tried), again=True)]
        try:
            while len(tickets) < items:
                tickets.append(await self._ledger.acquire(only_encoder(model, tickets[0].url), again=True))
        except BaseException:
            for ticket in tickets:
                ticket.release(succeeded=False)
            raise
        return tickets

    async def _call(
        self,
        request: EngineRequest,
        media: MediaRequest,
        group: Group,
        tickets: Sequence[Ticket],
        consumer_zmq: str | None,
    ) -> dict[Key, Report]:
        succeeded, answered, begun_s = False, False, time.monotonic()
        try:
            answer = await self._caller.fetch(
                group.url,
                EngineRequest(
                    method=b"POST",
                    path=PATH,
                    headers=child_headers(request.headers, group.items[0]),
                    body=media.sub_request(group, pin_uuids=self._rules.rewrite, consumer_zmq=consumer_zmq),
                    model=request.model,
                ),
                limit_bytes=REPORT_LIMIT_BYTES,
                stage="encode",
            )
            answered = not speaks_against(answer.status)
            if 400 <= answer.status < 500:
                raise _Refused(answer)
            if answer.status != 200:
                raise EngineBroke(f"encoder {group.url} answered {answer.status}")
            found = read_reports(
                group,
                answer.body,
                audio_in_video=media.audio_in_video,
                to_consumer=consumer_zmq is not None,
            )
            succeeded = True
            self._figures.took(group.url, "encode", time.monotonic() - begun_s)
            return found
        except AnswerTooLong as e:
            raise ReportError(e.message) from e
        finally:
            # One call is one latency, however many items it had.
            for position, ticket in enumerate(tickets):
                ticket.release(succeeded=succeeded and position == 0, answered=answered)


def encoders_for(model: str) -> Select:
    """All ready encoders with the model, in registration order."""
    return lambda snapshot: snapshot.pool(model, Role.Encode)


def next_encoder(model: str, tried: Sequence[str]) -> Select:
    """Only the encoder that follows the last one of `tried` in registration order and was not tried yet."""

    def select(snapshot: Snapshot) -> Pool:
        urls = snapshot.pool(model, Role.Encode).urls
        # Among all nodes: who failed may be down by now, and what was its must not all go to the first one.
        order = list(snapshot.nodes)
        after = order.index(tried[-1]) + 1 if tried[-1] in snapshot.nodes else 0
        following = next((url for url in order[after:] + order[:after] if url in urls and url not in tried), "")
        return only_encoder(model, following)(snapshot)

    return select


def only_encoder(model: str, url: str) -> Select:
    """Just this one, if it is a candidate."""

    def select(snapshot: Snapshot) -> Pool:
        pool = snapshot.pool(model, Role.Encode)
        left = snapshot.without(pool, [other for other in pool.urls if other != url])
        if left is None:
            raise NoNodeAvailable(f"no other Encode node with the model {model!r} is alive")
        return left

    return select


def child_headers(headers: Headers, first: Item) -> Headers:
    """The request's headers under a request id of its own: `<parent>:<index of the first item>:<6 hex>`."""
    return [
        (name, value + b":%d:%s" % (first.index, secrets.token_hex(3).encode()) if name == b"x-request-id" else value)
        for name, value in without_rank(headers)
    ]


def without_rank(headers: Headers) -> Headers:
    """Less a data-parallel rank of the client's own: it names a replica of the node that answers, if anything."""
    return [header for header in headers if header[0] != b"x-data-parallel-rank"]


def _first(failures: BaseExceptionGroup[Exception]) -> Exception:
    """The failure that came first; the others are its consequence or say the same."""
    failure = failures.exceptions[0]
    return _first(failure) if isinstance(failure, BaseExceptionGroup) else failure
