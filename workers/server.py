"""The worker class: uvicorn inside gunicorn, with a shutdown that lets streams end.

Owns signals, heartbeat and the order of shutdown of one worker process. It must not know what the app does
with a request; towards the app it has one contract beyond ASGI: when the worker begins to stop it calls
`app.begin_shutdown(deadline)`, if the app has it, with an instant of `time.monotonic()`. Requests that run
then have until the deadline; the app ends its own streams shortly before. A second call, with an earlier
deadline, may follow. ASGI's own lifespan event comes too late for that: after the last connection.

Why not `uvicorn_worker.UvicornWorker` as it is (0.4 with uvicorn 0.54):
- it stops telling gunicorn that it lives once it drains, so a drain longer than `timeout` is a WORKER TIMEOUT;
- its drain has no deadline of its own, so the master ends it with SIGKILL;
- its SIGQUIT handler sets a flag that nobody reads;
- it dies of the SIGTERM that it handled, so nothing after the drain runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import time
from typing import Any, ClassVar

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import Server
from uvicorn_worker import UvicornWorker

from app.errors import BadRequest, EvenhandError, error_answer
from app.settings import Settings
from workers.half_closed import HalfClosed
from workers.listener import Listener, Share
from workers.patience import Kind, Owed, Patience
from workers.request_head import HEAD_LIMIT_BYTES, HEADERS_LIMIT, HeadTooLarge, fault_of

logger = logging.getLogger("uvicorn.error")

PIPELINED_AT_ONCE = 16  # requests of one connection that are read ahead; more wait in the socket
# One read may hold thousands, each of them a task and a timer to come: what is beyond is not served.
PIPELINED_AT_MOST = 256
CHUNK_OVERHEAD_BYTES = 16  # that a chunk may cost without counting towards what surrounds a body
# After a refusal what the client still sends is read and dropped for this long: a close over unread bytes is a reset,
# which takes the refusal away from it before it was read.
LAST_READ_S = 1.0
HEARTBEAT_S = 1.0
POLL_S = 0.05
# An idle keep-alive connection may have a request under way to us. Kept open for this long, the request is
# answered with `Connection: close`; closed at once, it would be a reset that the client can't tell from a crash.
IDLE_LINGER_S = 0.5
QUICK_GRACE_S = 1.0  # after SIGQUIT or SIGINT; gunicorn's master kills 2 s after asking
# The app ends its streams a second before its deadline, so that is a second later than the grace time.
LAST_WORDS_S = 1.0
CANCEL_WAIT_S = 1.0  # for what cancelled requests do in their `finally`
LIFESPAN_SHUTDOWN_S = 5.0
# What the master must wait beyond the grace time so that it never kills a worker that keeps its own deadline.
MASTER_MARGIN_S = LAST_WORDS_S + CANCEL_WAIT_S + LIFESPAN_SHUTDOWN_S + 2.0

STOP_SIGNALS = (signal.SIGTERM, signal.SIGQUIT, signal.SIGINT)  # blocked by the master over the fork
READY_FD_VARIABLE = "EVENHAND_READY_FD"


class ClientTooSlow(EvenhandError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class CloseDelimited(int):
    """What uvicorn's count of the bytes that are still to come takes for a body of any length."""

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> CloseDelimited:
        return self


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with limits on what one client may hold, an end to keep-alive while the server stops,
    and an answer to those who offer an upgrade or have ended their side of the connection.

    Java's HttpClient, among others, offers h2c with its first request. httptools takes every offer as accepted
    and skips the body, so such a POST would arrive empty: it is read again without the offer.
    """

    _cycles: tuple[RequestResponseCycle, ...] = ()  # running and waiting, in order
    _in_head = True
    _begun = False  # the head that is being read
    _heads = 0  # complete ones seen on this connection
    _head_bytes = 0  # of the latest, as far as the parser has told
    _body_bytes = 0  # of this connection
    _overhead_bytes = 0  # received since the last head, body's end or refusal, and no part of a body
    _pauses = 0  # how often the client was too slow in reading
    _idle_since = 0.0  # time.monotonic()
    _half_closed: HalfClosed | None = None
    _fault: EvenhandError | None = None  # why a callback has ended the parsing
    _refusal: EvenhandError | None = None  # to be told once the answers before it are out
    _patience: Patience | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limit_s: float = getattr(self.server_state, "client_timeout_s", 0.0)
        self._patience = Patience(self.loop, limit_s, self._owed, self._give_up)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._refusal is not None:
            return
        heads, bodies, before = self._heads, self._body_bytes, self._in_head
        self._overhead_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as e:
            self._read_without_upgrade(data[e.args[0] :])
        except httptools.HttpParserError:
            # `_fault` has named it where the rule is ours and not the parser's.
            self._refuse(self._fault or BadRequest("the request is not valid HTTP/1.1"))
        if heads != self._heads or before != self._in_head:
            # Something ended in this read, so that not all of it belongs to what is still open.
            self._overhead_bytes = 0
            return
        # Never below 0: many small chunks earn no credit for a long trailer.
        self._overhead_bytes = max(0, self._overhead_bytes - (self._body_bytes - bodies))
        if self._overhead_bytes > HEAD_LIMIT_BYTES:
            what = "the request's chunk sizes and trailers are too long"
            self._refuse(HeadTooLarge() if self._in_head else BadRequest(what))

    # --- what the parser says, inside data_received

    def _stop(self, fault: EvenhandError) -> None:
        """End the parsing: whatever a callback raises becomes an HttpParserError."""
        self._fault = fault
        raise ValueError(fault.message)

    def on_message_begin(self) -> None:
        self._begun = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers come through here too; uvicorn would put them among the headers, past every filter in front of us.
        if self._in_head:
            self._count_head(len(name) + len(value) + 4)
            if len(self.headers) >= HEADERS_LIMIT:
                self._stop(HeadTooLarge())
            super().on_header(name, value)

    def _count_head(self, size_bytes: int) -> None:
        self._head_bytes += size_bytes
        if self._head_bytes > HEAD_LIMIT_BYTES:
            self._stop(HeadTooLarge())

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if fault := fault_of(self.parser.get_http_version(), self.url, self.headers):
            self._stop(fault)
        self._cycles = tuple(cycle for cycle in self._cycles if not cycle.response_complete)
        if len(self._cycles) >= PIPELINED_AT_MOST:
            self._stop(BadRequest(f"more than {PIPELINED_AT_MOST} requests at once on one connection"))
        super().on_headers_complete()
        self._in_head = self._begun = False
        self._heads += 1
        if self.scope["http_version"] == "1.0":
            # uvicorn would send chunks, which HTTP/1.0 does not have: there a body ends with the connection.
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = CloseDelimited()
        self._cycles = (*self._cycles, self.cycle)
        if 1 < len(self._cycles) <= PIPELINED_AT_ONCE:
            # uvicorn stops reading behind the first pipelined request; an unread socket tells of no departure.
            self.flow.resume_reading()
        if getattr(self.server_state, "stopping", False):
            self.cycle.keep_alive = False

    def on_chunk_header(self) -> None:
        self._overhead_bytes -= CHUNK_OVERHEAD_BYTES

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_head = True
        super().on_message_complete()

    # --- the end of a connection

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection where whole requests wait for an answer whose head is still to come.

        Elsewhere the client counts as gone, as it does for uvicorn: in mid-body of its request or of its answer,
        and in HTTP/1.0, which has no interim answers to find out by. TLS never comes here half-closed.
        """
        if self._half_closed is None:
            if self.scheme == "https" or not self._may_send_interim() or self.cycle.more_body:
                return False
            self.cycle.keep_alive = False
            self._half_closed = HalfClosed(self.loop, self.transport, self._may_send_interim)
        return True

    def _running(self) -> RequestResponseCycle | None:
        return next((cycle for cycle in self._cycles if not cycle.response_complete), None)

    def _may_send_interim(self) -> bool:
        running = self._running()
        return running is not None and not running.response_started and running.scope["http_version"] == "1.1"

    def connection_lost(self, exc: Exception | None) -> None:
        if self._patience is not None:
            self._patience.end()
        self._tell_of_departure()
        super().connection_lost(exc)
        share: Share | None = getattr(self.server_state, "share", None)
        if share is not None:
            share.ended()

    def _tell_of_departure(self) -> None:
        # uvicorn tells only the latest request; the one that runs is the first of a pipeline.
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def on_response_complete(self) -> None:
        self._idle_since = time.monotonic()
        super().on_response_complete()
        if self._refusal is not None:
            self._refuse_in_turn()

    def wind_down(self, *, idle_before: float) -> None:
        """Let this connection end with the answer that runs on it; what runs is not touched."""
        if self.cycle is None or self.cycle.response_complete:
            if self._idle_since <= idle_before:
                self.transport.close()
        elif not self.cycle.response_started:
            # The client reads `Connection: close`. Once the head is out it can't, and a close right after the
            # body would race with its next request: such a connection is closed when it has been idle.
            self.cycle.keep_alive = False

    # --- clients that do not get on

    def pause_writing(self) -> None:
        self._pauses += 1
        super().pause_writing()

    def _owed(self) -> Owed | None:
        unsent_bytes = self.transport.get_write_buffer_size()
        if self.flow.write_paused or (self.transport.is_closing() and unsent_bytes):
            return Owed(Kind.ANSWER, self._pauses, -unsent_bytes)
        if self.flow.read_paused or self._refusal is not None or self.transport.is_closing():
            return None
        if not self._in_head:
            return Owed(Kind.BODY, self._heads, self._body_bytes)
        # Between two requests uvicorn's keep-alive timer runs, until the first byte of the next one.
        idle = self.timeout_keep_alive_task is not None or self._running() is not None
        return Owed(Kind.HEAD, self._heads) if self._begun or not idle else None

    def _give_up(self, owed: Owed) -> None:
        if owed.kind is Kind.ANSWER:
            self.transport.abort()  # close() would wait until the rest is read
        elif owed.kind is Kind.HEAD and not self._begun:
            self.transport.close()
        else:
            self._refuse(ClientTooSlow(f"{owed.kind.value} did not come in time (--client-timeout-s)"))

    # --- refusals

    def _read_without_upgrade(self, rest: bytes) -> None:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self._refuse(BadRequest("CONNECT is not served"))
            return
        lines = [b"%s %s HTTP/%s" % (method, self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                kept = [t for t in value.split(b",") if t.strip().lower() not in (b"upgrade", b"http2-settings")]
                lines.append(b"connection: " + b",".join(kept))
            elif name not in (b"upgrade", b"http2-settings"):
                lines.append(name + b": " + value)
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", b""]) + rest)

    def _refuse(self, error: EvenhandError) -> None:
        """Say what is wrong with what the client sent last, and serve it no more.

        An answer that is under way to an earlier request is not disturbed: the refusal comes after it.
        """
        if self._refusal is None and not self.transport.is_closing():
            self._refusal = error
            self.flow.resume_reading()  # what still comes is dropped
            self._refuse_in_turn()

    def _refuse_in_turn(self) -> None:
        running = self._running()
        broken = self.cycle if not self._in_head else None
        if self._refusal is None or self.transport.is_closing() or (running is not None and running is not broken):
            return
        self._unset_keepalive_if_required()
        if broken is not None and broken.response_started:
            self.transport.close()  # it has its answer, or a part of it: there is no place left to say more
            return
        self._tell_of_departure()
        status, headers, body = error_answer(self._refusal)
        lines = [STATUS_LINE[status], *(b"%s: %s\r\n" % header for header in headers)]
        self.transport.write(b"".join([*lines, b"connection: close\r\n\r\n", body]))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LAST_READ_S, self.transport.close)


class GracefulServer(Server):
    """uvicorn's server with a deadline for the drain, told to the app before anything is closed.

    Overrides two of uvicorn's private methods; uvicorn is pinned in the lock files, and tests/workers/test_server.py
    fails if their meaning changes.
    """

    servers: list[Listener]  # type: ignore[assignment]

    def __init__(self, config: Config, app: object, *, grace_s: float, share: Share) -> None:
        super().__init__(config)
        self.server_state.share = share  # type: ignore[attr-defined]
        self._app = app
        self._grace_s = grace_s
        self._deadline: float | None = None  # time.monotonic(); set once the drain has begun

    def stop(self) -> None:
        """Drain within the grace time. Safe to call again."""
        self.should_exit = True

    def stop_quickly(self) -> None:
        """Drain within `QUICK_GRACE_S`, also when a longer drain is under way."""
        self._grace_s = min(self._grace_s, QUICK_GRACE_S)
        self.should_exit = True
        if self._deadline is not None:
            self._set_deadline()

    async def run_until_stopped(self, sockets: list[socket.socket]) -> None:
        """Serve until told to stop. The caller owns the signals, so uvicorn's own handling is left out."""
        await self._serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        config, state = self.config, self.server_state

        def make_protocol() -> asyncio.Protocol:
            return config.http_protocol_class(config=config, server_state=state, app_state=self.lifespan.state)  # type: ignore[call-arg]

        self.servers = [
            Listener(sock, make_protocol=make_protocol, ssl_context=config.ssl, share=state.share)  # type: ignore[attr-defined]
            for sock in sockets or []
        ]
        report_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._set_deadline()
        self.server_state.stopping = True  # type: ignore[attr-defined]
        for server in self.servers:
            server.close()
        await self._wait_tasks_to_complete()
        try:
            await asyncio.wait_for(self.lifespan.shutdown(), LIFESPAN_SHUTDOWN_S)
        except TimeoutError:
            logger.error("the app's shutdown took longer than %g s: left behind", LIFESPAN_SHUTDOWN_S)

    async def _wait_tasks_to_complete(self) -> None:
        state = self.server_state
        began = time.monotonic()
        while state.connections or state.tasks:
            now = time.monotonic()
            if now >= self._due:
                break
            # In a quick stop nothing lingers.
            linger_s = IDLE_LINGER_S if self._due - began > QUICK_GRACE_S else 0.0
            if now - began >= linger_s:
                for connection in list(state.connections):
                    connection.wind_down(idle_before=now - linger_s)  # type: ignore[union-attr]
            await asyncio.sleep(POLL_S)
        if state.tasks:
            logger.error("%d request(s) did not end within the grace time: cancelled", len(state.tasks))
            tasks = set(state.tasks)
            for task in tasks:
                task.cancel(msg="the worker's grace time is over")
            await asyncio.wait(tasks, timeout=CANCEL_WAIT_S)
        for connection in list(state.connections):
            # Not close(): that waits for a client that reads nothing.
            connection.transport.abort()

    @property
    def _due(self) -> float:
        assert self._deadline is not None
        return self._deadline

    def _set_deadline(self) -> None:
        margin_s = LAST_WORDS_S if self._grace_s > QUICK_GRACE_S else 0.0
        deadline = time.monotonic() + self._grace_s + margin_s
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
        begin_shutdown = getattr(self._app, "begin_shutdown", None)
        if begin_shutdown is not None:
            try:
                begin_shutdown(self._deadline)
            except Exception:
                logger.exception("the app's begin_shutdown failed; the drain goes on without it")


class EvenhandWorker(UvicornWorker):  # type: ignore[misc]
    """One worker process: SIGTERM drains within the grace time, SIGQUIT and SIGINT within a second or two."""

    CONFIG_KWARGS: ClassVar[dict[str, Any]] = {
        "http": Protocol,
        "loop": "uvloop",
        "interface": "asgi3",
        "lifespan": "on",
        "ws": "none",
        "access_log": False,
        "server_header": False,
        "date_header": False,
        # The peer's address decides who may register nodes: it must never come from a header.
        "proxy_headers": False,
        # Both done here, where they also hold during the drain.
        "callback_notify": None,
        "timeout_graceful_shutdown": None,
    }

    share: Share  # given by gunicorn.conf.py, before the fork
    told_to_stop = False  # in the master's copy: by the master

    def init_signals(self) -> None:
        super().init_signals()
        # The master answers a stuck worker with SIGABRT: say where it is stuck before it dies.
        faulthandler.enable()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def run(self) -> None:
        with asyncio.Runner(loop_factory=self.config.get_loop_factory()) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.config.app = self.wsgi
        settings = Settings.load()
        server = GracefulServer(self.config, self.wsgi, grace_s=settings.grace_s, share=self.share)
        server.server_state.client_timeout_s = settings.client_timeout_s  # type: ignore[attr-defined]
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, server.stop)
        loop.add_signal_handler(signal.SIGQUIT, server.stop_quickly)
        loop.add_signal_handler(signal.SIGINT, server.stop_quickly)
        heartbeat = loop.create_task(self._beat())
        try:
            # gunicorn wraps its sockets; uvloop takes only plain ones over and would close the others twice.
            await server.run_until_stopped([listener.sock for listener in self.sockets])
        finally:
            heartbeat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await heartbeat

    async def _beat(self) -> None:
        """Tell the master that the event loop turns: from before the app's start to after its end."""
        while True:
            self.notify()
            await asyncio.sleep(HEARTBEAT_S)


def report_ready() -> None:
    """Tell whoever started gunicorn, through the pipe it left in the environment, that requests are served."""
    fd = os.environ.get(READY_FD_VARIABLE)
    if fd:
        # Every worker writes, at any time in the deployment's life: the reader may long be gone.
        with contextlib.suppress(OSError, ValueError):
            os.write(int(fd), b"1")
