"""The hot endpoint: every POST that goes to an engine, a raw ASGI callable.

Reads the request, lets a dispatcher choose an engine and open its answer, and relays that. Nothing
per request goes through Starlette, middleware, log formatters or thread pools. It must not know Redis
or how an engine is chosen.

The count of a request is given back in the `finally` of `__call__`, by a synchronous call: generator
`finally` blocks and background tasks are both skipped on some disconnects, this is not.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol
from urllib.parse import unquote

from starlette.types import Receive, Scope, Send

from app.access_keys import AccessKey
from app.dispatch.answer import Answer, EngineRequest, Outcome
from app.errors import (
    BadRequest,
    EvenhandError,
    Headers,
    NoNodeAvailable,
    ShuttingDown,
    StoreUnavailable,
    UpstreamError,
    error_answer,
)
from app.heads import Repeated, Written, lines_of
from app.http.auth import Authority, check_model
from app.http.body import ClientLeft, declared_bytes, header, read_body, too_large
from app.http.cors import Cors, without_cors
from app.http.endpoints import UNNAMED
from app.http.form import Form, is_form, model_of_form, renamed_form
from app.http.headers import CLOSE, NOT_FOR_ENGINE, NOT_FOR_ENGINE_BUT_KEYS, for_engine, given_id, new_id
from app.http.interrupt import Running, Watch, Why
from app.http.names import Names
from app.http.peek import peek, renamed
from app.http.ports import WIRE, Dispatcher, Wire
from app.http.relay import Relay, relay_again
from app.http.upload import Upload
from app.journey import Journey, current
from app.metrics.figures import Figures, Served
from app.traceparent import Trace

log = logging.getLogger("evenhand.http")

GENERATING = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/responses"))
"""What may be split, have encoders before it, or end with [DONE]: engines, and those who choose them, see one
spelling of these."""
_SPELT = {path: path.encode() for path in GENERATING}
DECODED_AT_MOST = 4
_NOT_IN_PATHS = re.compile("[\x00-\x1f\x7f\ufffd]").search
LAST_WORDS_S = 0.5
"""How long a stopping worker waits for a client that does not take the last event."""


class Tracer(Protocol):
    """Who records traces."""

    def begin(self, headers: Headers) -> Trace:
        """The span of a request with these headers."""
        ...


class Proxy:
    """The ASGI callable; one per worker.

    Args:
        notes: whether each request's journey is wanted; with a `tracer` it is.
        only_model: the one model of the deployment, for a request that may leave it out and does. Raises BadRequest
            or NoNodeAvailable: it has several, or none.
        watched: whether somebody watches decisions now; asked at the begin of each request.
        names: None where each name means itself.
        cors: None where no web page of another origin may call.
    """

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        authority: Authority,
        running: Running,
        figures: Figures,
        max_body_bytes: int,
        allow_transfer_params: bool,
        forward_client_key: bool,
        only_model: Callable[[], str],
        notes: bool = False,
        watched: Callable[[], bool] = lambda: False,
        tracer: Tracer | None = None,
        names: Names | None = None,
        cors: Cors | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._authority = authority
        self._running = running
        self._watched = watched
        self._figures = figures
        self._max_body_bytes = max_body_bytes
        self._allow_transfer_params = allow_transfer_params
        self._only_model = only_model
        self._notes = notes or tracer is not None
        self._tracer = tracer
        self._cors = cors
        self._names = names
        self._default = names.default if names is not None else ""
        self._not_for_engine = NOT_FOR_ENGINE_BUT_KEYS if forward_client_key else NOT_FOR_ENGINE

    def __repr__(self) -> str:
        return f"<Proxy {self._running!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        served = Served(scope["path"])
        served.client = scope.get("client")
        headers = scope["headers"]
        known: Meaning | None = headers.head.meaning if type(headers) is Repeated else None
        served.request = identifier = (given_id(headers) if known is None else known.request_id) or new_id()
        watched, journey = self._watched(), None
        if watched or self._notes:
            journey = served.journey = Journey(watched=watched)
            if self._tracer is not None:
                journey.trace = self._tracer.begin(scope["headers"])
        current.set(journey)  # also None: a pipelined request begins in the context of the one before
        wire: Wire | None = scope.get("extensions", {}).get(WIRE)
        watch = self._running.enter(asyncio.current_task() if wire is None else wire.task)
        answer: Answer | None = None
        relay: Relay | None = None
        outcome = Outcome.ABORTED
        try:
            answer = await self._open(scope, receive, identifier, watch, wire, served)
            if journey is not None and journey.trace is not None:
                journey.trace.relay_at_s = time.monotonic()
            if self._cors is not None:
                answer.headers = without_cors(answer.headers)
            told = answer.headers
            passed: Outcome | None = None
            if type(told) is Repeated and wire is not None and not self._running.stopping:
                passed = relay_again(answer, told, wire, served, identifier)
            if passed is None:
                path, extra = routed(scope["path"]), self._extra(scope, identifier)
                relay = Relay(answer, send, wire, served, path=path, extra=extra)
                passed = await relay.run()
            outcome = passed
        except ClientLeft:
            pass
        except asyncio.CancelledError:
            if not watch.absorb():
                raise
            if relay is not None and relay.complete:
                outcome = Outcome.OK
            if answer is not None:
                answer.close(outcome)
            if watch.why is Why.SHUTDOWN:
                if outcome is not Outcome.OK:
                    served.outcome = "shutdown"
                await self._last_words(relay, scope, send, served)
        except EvenhandError as e:
            served.outcome, served.reason = outcome_of_error(e), e.message
            watch.stop()
            if answer is not None:
                answer.close(Outcome.ENGINE_ERROR)
            await self._refuse(e, scope, send, served)
        except Exception:
            served.outcome = "internal_error"
            watch.stop()
            log.exception("request %s failed on a fault of ours", identifier.decode())
            if relay is None or not relay.started:
                await self._refuse(EvenhandError("Internal error"), scope, send, served)
        finally:
            try:
                if answer is not None:
                    answer.close(outcome)
            finally:
                self._running.leave(watch)
                served.end(answer.url if answer is not None else "", outcome)
                self._figures.ended.append(served)

    async def _open(
        self, scope: Scope, receive: Receive, identifier: bytes, watch: Watch, wire: Wire | None, served: Served
    ) -> Answer:
        # The body lives in this frame only: a stream of an hour must not keep an image of 40 MB.
        if self._running.ended:
            raise ShuttingDown("This worker is stopping")
        key = self._authority.check_client(scope["headers"])
        if key is not None:
            served.key = key.name
        meaning = self._meaning(scope)
        body = None if wire is None else wire.whole_body()
        if body is None:
            if meaning.form_type is not None and routed(scope["path"]) not in GENERATING:
                return await self._open_upload(scope, receive, identifier, watch, wire, served, key, meaning)
            if wire is not None:
                wire.gather(self._max_body_bytes)
            body = await read_body(scope, receive, limit_bytes=self._max_body_bytes, setting="--max-body-size")
        served.bytes_in = size_bytes = len(body)
        if size_bytes > self._max_body_bytes:
            raise too_large(self._max_body_bytes, "--max-body-size")
        asked, body = self._peek(scope["path"], meaning.form_type, body)
        served.model = asked if asked and self._names is None else self._meant(asked)
        if key is not None and key.models is not None:
            check_model(key, asked, asked or self._default, served.model)
        if served.model != asked and (asked or self._default):  # what the only model is for goes on without a name
            form = meaning.form_type
            body = renamed(body, served.model) if form is None else renamed_form(form, body, served.model)
        headers = meaning.headers_of(identifier)
        watch.start(receive, wire)
        return await self._dispatcher.open(EngineRequest(b"POST", meaning.path, headers, body, served.model))

    async def _open_upload(
        self,
        scope: Scope,
        receive: Receive,
        identifier: bytes,
        watch: Watch,
        wire: Wire | None,
        served: Served,
        key: AccessKey | None,
        meaning: Meaning,
    ) -> Answer:
        """A form that is not all here: it goes on as it comes, from the moment on in which its model is known."""
        upload = watch.upload = Upload(
            receive,
            Form(
                meaning.form_type or b"",
                allow_transfer_params=self._allow_transfer_params,
                nameless=bool(self._default),
            ),
            length=declared_bytes(scope),
            limit_bytes=self._max_body_bytes,
            setting="--max-body-size",
        )
        try:
            asked = await upload.begin()
            served.model = self._meant(asked)
            if key is not None and key.models is not None:
                check_model(key, asked, asked or self._default, served.model)
            if served.model != asked:
                upload.rename(served.model)
            headers = meaning.headers_of(identifier)
            request = EngineRequest(b"POST", meaning.path, headers, upload.whole or b"", served.model)
            if upload.whole is None:
                request.upload = upload
            if wire is not None or upload.ended:
                watch.start(receive, wire)
                return await self._dispatcher.open(request)
            # Without a wire the upload itself finds out that the client has left; two can't ask.
            answer = await self._dispatcher.open(request)
            if upload.ended or answer.status >= 400:
                watch.start(receive, None)
            return answer
        finally:
            served.bytes_in = upload.received_bytes

    def _meaning(self, scope: Scope) -> Meaning:
        headers = scope["headers"]
        if type(headers) is not Repeated:
            return Meaning.of(scope, self._not_for_engine)
        meaning: Meaning | None = headers.head.meaning
        if meaning is None:
            meaning = headers.head.meaning = Meaning.of(scope, self._not_for_engine)
        return meaning

    def _peek(self, path: str, form: bytes | None, body: bytes) -> tuple[str, bytes]:
        allow, nameless = self._allow_transfer_params, bool(self._default)
        if form is not None:
            return model_of_form(form, body, allow_transfer_params=allow, nameless=nameless), body
        return peek(body, allow_transfer_params=allow, unnamed=path in UNNAMED, nameless=nameless)

    def _meant(self, asked: str) -> str:
        """The model of a request that names `asked`, or none. Raises as `only_model`."""
        return (asked if self._names is None else self._names.meant(asked)) or self._only_model()

    def _extra(self, scope: Scope, identifier: bytes) -> Headers:
        extra = [(b"x-request-id", identifier)]
        if self._cors is not None:
            extra += self._cors.headers(scope)
        if self._running.stopping:
            extra.append(CLOSE)
        return extra

    async def _refuse(self, error: EvenhandError, scope: Scope, send: Send, served: Served) -> None:
        served.status, headers, body = error_answer(error)
        headers += self._extra(scope, served.request)
        if CLOSE not in headers and header(scope, b"expect") is not None:
            # The client may skip a body that was not asked for; then its next request would be read as that body.
            headers.append(CLOSE)
        await send({"type": "http.response.start", "status": served.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _last_words(self, relay: Relay | None, scope: Scope, send: Send, served: Served) -> None:
        """Tell the client that the worker stops, if it is willing to hear it."""
        error = ShuttingDown("The worker that served this request is stopping")
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                if relay is None or not relay.started:
                    await self._refuse(error, scope, send, served)
                else:
                    await relay.end_early(error)
        except TimeoutError:
            log.warning("request %s: the client did not take the end of its stream", served.request.decode())


class Meaning(NamedTuple):
    """What follows from the head of a request, its Content-Length aside.

    `request_id`: the client's own; b"": it has none. `path`: for the engine, with the query string. `form_type`: None
    where the body is no form. `headers`: for the engine, but for the request's id; `lines`: the same as written.
    """

    request_id: bytes
    path: bytes
    form_type: bytes | None
    headers: Headers
    lines: bytes

    @classmethod
    def of(cls, scope: Scope, not_for_engine: frozenset[bytes]) -> Meaning:
        """Raises BadRequest: a path or headers that can't be passed on."""
        path, form, headers = path_for_engine(scope), form_type(scope), for_engine(scope, not_for_engine)
        return cls(given_id(scope["headers"]), path, form, headers, lines_of(headers))

    def headers_of(self, identifier: bytes) -> Headers:
        header = (b"x-request-id", identifier)
        return Written([*self.headers, header], self.lines + b"%b: %b\r\n" % header)


def form_type(scope: Scope) -> bytes | None:
    """The Content-Type of a form; None: the request is none.

    Raises:
        BadRequest: a form with two. Engines may go by the one that we don't, which may have another boundary.
    """
    found = [value for name, value in scope["headers"] if name == b"content-type"]
    if not any(map(is_form, found)):
        return None
    if len(found) > 1:
        raise BadRequest("A form must have one Content-Type")
    return bytes(found[0])


def outcome_of_error(error: EvenhandError) -> str:
    """What a request that ends in `error` counts as."""
    if isinstance(error, UpstreamError):
        return Outcome.ENGINE_ERROR
    if isinstance(error, ShuttingDown):
        return "shutdown"
    if isinstance(error, NoNodeAvailable | StoreUnavailable):
        return "no_node"
    return Outcome.CLIENT_ERROR if error.status < 500 else "internal_error"


def routed(path: str) -> str:
    """The (decoded) path as Starlette, on which the engines are built, finds its route: past a slash at the end."""
    if path in GENERATING:
        return path
    bare = path.rstrip("/")
    return bare if bare in GENERATING else path


def path_for_engine(scope: Scope) -> bytes:
    """Path and query string exactly as the client wrote them, but for other spellings of `GENERATING`.

    Raises:
        BadRequest: a `..` segment, plain or encoded, which could lead out of /v1 on the engine's side; or encoded
            what others may cut out of it or make a dot of.
    """
    raw: bytes = scope["raw_path"]
    if (b"." in raw or b"%" in raw) and (fault := _fault_of(scope["path"])):
        raise BadRequest(fault)
    path = scope["path"]
    raw = _SPELT.get(path) or _SPELT.get(routed(path), raw)
    query: bytes = scope["query_string"]
    return raw + b"?" + query if query else raw


def _fault_of(path: str) -> str | None:
    # Decoded a few times more: a proxy in front of the engine may decode once more than we did. Who needs
    # still more has something to hide, and each round costs time.
    for _ in range(DECODED_AT_MOST):
        # Java's servers cut `;...` off a segment before they look at it.
        if any(segment.partition(";")[0] == ".." for segment in re.split(r"[/\\]", path)):
            return "The path must not have .. segments"
        # URL parsers of browsers drop tabs and line ends, C code stops at a NUL; lenient decoders of UTF-8 read
        # %C0%AE as a dot, which is undecodable to ours.
        if _NOT_IN_PATHS(path):
            return "The path must not have encoded control characters or bytes that are not UTF-8"
        decoded = unquote(path)
        if decoded == path:
            return None
        path = decoded
    return "The path must not be encoded over and over"
