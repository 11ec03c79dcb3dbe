"""The worker class: uvicorn inside gunicorn, with a shutdown that lets streams end.

Owns signals, heartbeat and the order of shutdown of one worker process. It must not know what the app does
with a request; towards the app it has two contracts beyond ASGI, where the app has the method. Whenever a request
has been read whose task runs next it calls `app.expect()`. When the worker begins to stop it calls
`app.begin_shutdown(deadline)`, with an instant of `time.monotonic()`. Requests that run then have until the
deadline; the app ends its own streams shortly before. A second call, with an earlier deadline, may follow. ASGI's
own lifespan event comes too late for that: after the last connection.

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

from uvicorn.config import Config
from uvicorn.server import Server
from uvicorn_worker import UvicornWorker

from app.settings import Settings
from workers.agreed import CANCEL_WAIT_S, LAST_WORDS_S, LIFESPAN_SHUTDOWN_S, READY_FD_VARIABLE, STOP_SIGNALS
from workers.listener import Listener, Share
from workers.protocol import Protocol, Shared

logger = logging.getLogger("uvicorn.error")

HEARTBEAT_S = 1.0
_SILENT = logging.Logger("silent", logging.CRITICAL + 1)
POLL_S = 0.05
# An idle keep-alive connection may have a request under way to us. Kept open for this long, the request is
# answered with `Connection: close`; closed at once, it would be a reset that the client can't tell from a crash.
IDLE_LINGER_S = 0.5
HEAD_LINGER_S = 5.0  # half a head gets this long for its rest; then its client is told that it was not read
QUICK_GRACE_S = 1.0  # after SIGQUIT or SIGINT; gunicorn's master kills 2 s after asking


class GracefulServer(Server):
    """uvicorn's server with a deadline for the drain, told to the app before anything is closed.

    Overrides two of uvicorn's private methods; uvicorn is pinned in the lock files, and tests/workers/test_server.py
    fails if their meaning changes.
    """

    servers: list[Listener]  # type: ignore[assignment]
    server_state: Shared

    def __init__(self, config: Config, app: object, *, grace_s: float, share: Share) -> None:
        super().__init__(config)
        self.server_state = Shared(share)
        self._share = share
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
        # The app may wait for as long as a file is broken that it needs, and nothing is served that could be drained.
        starting = asyncio.create_task(super().startup([]))
        while not starting.done() and not self.should_exit:
            await asyncio.wait({starting}, timeout=POLL_S)
        if not starting.done():
            starting.cancel()
            self.lifespan.logger = _SILENT  # the app's own start ends with the loop, which is no fault to be told
            return
        await starting
        config, state = self.config, self.server_state
        state.expect = getattr(self._app, "expect", state.expect)

        def make_protocol() -> asyncio.Protocol:
            return config.http_protocol_class(config=config, server_state=state, app_state=self.lifespan.state)  # type: ignore[call-arg]

        self.servers = [
            Listener(sock, make_protocol=make_protocol, ssl_context=config.ssl, share=self._share)
            for sock in sockets or []
        ]
        report_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._set_deadline()
        self.server_state.stopping = True
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
        while True:
            now = time.monotonic()
            greets = any(server.greets for server in self.servers) and now - began < HEAD_LINGER_S
            if now >= self._due or not (state.connections or state.tasks or greets):
                break
            # In a quick stop nothing lingers.
            quick = self._due - began <= QUICK_GRACE_S
            linger_s, head_linger_s = (0.0, 0.0) if quick else (IDLE_LINGER_S, HEAD_LINGER_S)
            if now - began >= linger_s:
                heads = now - began >= head_linger_s
                for connection in list(state.connections):
                    connection.wind_down(idle_before=now - linger_s, heads=heads)  # type: ignore[union-attr]
            await asyncio.sleep(POLL_S)
        if state.tasks:
            logger.error("%d request(s) did not end within the grace time: cancelled", len(state.tasks))
            tasks = set(state.tasks)
            for task in tasks:
                task.cancel(msg="the worker's grace time is over")
            await asyncio.wait(tasks, timeout=CANCEL_WAIT_S)
        for connection in list(state.connections):
            # Not close(): that waits for a client that reads nothing.
            with contextlib.suppress(AttributeError):  # Python 3.11.2: of TLS that was closed twice
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
        server.server_state.client_timeout_s = settings.client_timeout_s
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
