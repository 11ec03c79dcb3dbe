"""The whole HTTP face, put together: the hot endpoint first, Starlette for everything else.

Owns which path goes where and who may call it. `app.main` is its only caller beside tests.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Lifespan, Message, Receive, Scope, Send

from app.access_keys import KeyRing
from app.dispatch.topology import Topology
from app.errors import EvenhandError, Forbidden, Unauthorized
from app.http.admin import Admin
from app.http.answers import on_client_left, on_evenhand_error, on_fault, on_http_exception
from app.http.auth import Authority, HeaderPairs
from app.http.body import ClientLeft
from app.http.cors import Cors
from app.http.dashboard import Dashboard
from app.http.distserve import DistServeRoutes
from app.http.docs_page import DocsPage
from app.http.endpoints import BESIDE_V1, OF_ONE_ENGINE, RESPONSES, is_proxied
from app.http.headers import CLOSE, request_id
from app.http.health import Health
from app.http.interrupt import Running
from app.http.metrics import Metrics
from app.http.models import Models, OnlyModel
from app.http.names import Names
from app.http.not_served import not_served
from app.http.ports import Dispatcher, Engines, LinkKeeper, NodeRegistry
from app.http.proxy import Proxy, Tracer
from app.http.watch import Seen, Watch
from app.metrics.figures import Figures

if TYPE_CHECKING:
    from app.settings import Settings

log = logging.getLogger("evenhand.http")

Endpoint = Callable[[Request], Awaitable[Response]]


class HttpFace:
    """The ASGI application of one worker; made by `build_app`."""

    def __init__(
        self,
        *,
        proxy: Proxy,
        site: Starlette,
        running: Running,
        watch: Watch,
        expect: Callable[[], None],
        cors: Cors | None = None,
    ) -> None:
        self.expect = expect
        self.site = site
        self.running = running
        self._proxy = proxy
        self._watch = watch
        self._cors = cors

    def __repr__(self) -> str:
        return f"<HttpFace {self.running!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.site(scope, receive, send)
        elif scope["method"] == "POST" and is_proxied(scope["path"]):
            await self._proxy(scope, receive, send)
        else:
            await self._serve_site(scope, receive, send)

    async def _serve_site(self, scope: Scope, receive: Receive, send: Send) -> None:
        extra = [(b"x-request-id", request_id(scope["headers"]))]
        if self.running.stopping:
            extra.append(CLOSE)
        if self._cors is not None and (scope["path"].startswith("/v1/") or scope["path"] in BESIDE_V1):
            allowed = self._cors.preflight(scope)
            if allowed is not None:  # before the key is looked at: a browser sends none with this question
                await send({"type": "http.response.start", "status": 204, "headers": [*allowed, *extra]})
                await send({"type": "http.response.body", "body": b""})
                return
            extra += self._cors.headers(scope)

        async def send_with_extra(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        await self.site(scope, receive, send_with_extra)

    def begin_shutdown(self, deadline_monotonic_s: float) -> None:
        """Stop gracefully. Call it in the event loop's thread, once a worker knows that it must stop.

        From now on every answer closes its connection; 1 s before the deadline (`time.monotonic()`)
        what still runs is ended: a stream with an error event, an unanswered request with a 503.
        """
        self.running.begin_shutdown(deadline_monotonic_s)
        self._watch.close()


def build_app(
    *,
    settings: Settings,
    registry: NodeRegistry,
    dispatcher: Dispatcher,
    engine_client: Engines,
    store_ok: Callable[[], str | None],
    links: LinkKeeper | None = None,
    figures: Figures | None = None,
    metrics: Metrics | None = None,
    seen: Seen | None = None,
    watched: Callable[[], bool] = lambda: False,
    expect: Callable[[], None] = lambda: None,
    tracer: Tracer | None = None,
    keys: KeyRing | None = None,
    lifespan: Lifespan[Starlette] | None = None,
) -> HttpFace:
    """The ASGI application.

    Args:
        dispatcher: what opens a request for an engine.
        store_ok: None while Redis can be used, else the reason why it can't; called by `/ready`.
        links: what `/distserve/*` asks; None where engines are not linked.
        figures: where requests are counted.
        metrics: what `/metrics` shows.
        seen: what `/dashboard/state` and those beside it show.
        watched: whether somebody watches decisions.
        expect: called, by a server that can, whenever it has read a request, whose task runs next.
        tracer: who records traces.
        keys: whoever made them keeps those of files up to date.
        lifespan: starts and stops what `app.main` has wired.
    """
    running = Running()
    topology = Topology.of(settings)
    authority = Authority(keys or key_ring(settings), trusted_networks=settings.trusted_nodes)
    renames = settings.aliases or settings.default_model
    names = Names(registry, aliases=settings.aliases, default=settings.default_model) if renames else None
    cors = Cors(settings.cors_origins) if settings.cors_origins else None
    proxy = Proxy(
        dispatcher=dispatcher,
        authority=authority,
        running=running,
        figures=figures or Figures(),
        max_body_bytes=settings.max_body_size,
        allow_transfer_params=settings.allow_transfer_params,
        forward_client_key=settings.forward_client_key,
        only_model=OnlyModel(registry, topology),
        notes=settings.log_requests != "off",
        watched=watched,
        tracer=tracer,
        names=names,
        cors=cors,
    )
    admin = Admin(
        registry=registry,
        engines=engine_client,
        engine_key=settings.engine_key.get_secret_value() if settings.engine_key is not None else None,
        drain_timeout_s=settings.grace_s,
        topology=topology,
    )
    health = Health(registry=registry, running=running, topology=topology, store_ok=store_ok)
    watch = Watch(seen)
    models, docs, distserve = Models(registry, names), DocsPage(), DistServeRoutes(links)
    dashboard = Dashboard()
    for_clients, for_admins = _for_clients(authority), _guarded_by(authority.check_admin)
    for_readers, for_viewers = _guarded_by(authority.check_reader), _guarded_by(authority.check_viewer)
    # A HEAD, which Starlette would answer like the GET, must not empty the deployment.
    terminate_all = Route("/nodes/terminate_all", for_admins(admin.terminate_all), methods=["GET"])
    terminate_all.methods = {"GET"}
    events = Route("/dashboard/events", for_viewers(watch.events), methods=["GET"])
    events.methods = {"GET"}  # a HEAD would be answered without an end
    site = Starlette(
        routes=[
            Route("/v1/models", for_clients(models.list), methods=["GET"]),
            Route("/v1/models/{model:path}", for_clients(models.one), methods=["GET"]),
            # A POST never comes here; these say what the others are told.
            Route("/v1/chat/completions", proxy, methods=["POST"]),
            Route("/v1/completions", proxy, methods=["POST"]),
            *(Route(path, proxy, methods=["POST"]) for path in BESIDE_V1),
            Route(RESPONSES + "{response}", for_clients(not_served), methods=["GET", "DELETE"]),
            Route(RESPONSES + "{response}/cancel", for_clients(not_served), methods=["POST"]),
            *(Route(path, for_clients(not_served), methods=["POST"]) for path in OF_ONE_ENGINE),
            Route("/nodes/explain", for_viewers(watch.explain), methods=["GET"]),
            Route("/nodes/status", for_readers(admin.status), methods=["GET"]),
            Route("/nodes/add", for_admins(admin.add), methods=["POST"]),
            Route("/nodes/remove", for_admins(admin.remove), methods=["POST"]),
            Route("/nodes/terminate", for_admins(admin.terminate), methods=["POST"]),
            terminate_all,
            Route("/start_profile", for_admins(admin.profile), methods=["POST"]),
            Route("/stop_profile", for_admins(admin.profile), methods=["POST"]),
            Route("/distserve/connection_warmup", for_admins(distserve.warm_up), methods=["POST"]),
            Route("/distserve/gc", for_admins(distserve.collect), methods=["POST"]),
            Route("/distserve/links", for_readers(distserve.links), methods=["GET"]),
            Route("/health", health.health, methods=["GET"]),
            Route("/ready", health.ready, methods=["GET"]),
            Route("/dashboard/state", for_viewers(watch.state), methods=["GET"]),
            events,
            Route("/metrics", for_viewers((metrics or Metrics()).page), methods=["GET"]),
            Route("/", docs.page, methods=["GET"]),
            Route("/openapi.json", docs.openapi, methods=["GET"]),
            Route("/swagger-ui/{name}", docs.asset, methods=["GET"], include_in_schema=False),
            Route("/dashboard", dashboard.page, methods=["GET"]),
            Route("/dashboard/", dashboard.slash, methods=["GET"], include_in_schema=False),
            Route("/dashboard/assets/{name}", dashboard.asset, methods=["GET"], include_in_schema=False),
        ],
        exception_handlers={
            HTTPException: on_http_exception,
            EvenhandError: on_evenhand_error,
            ClientLeft: on_client_left,
            Exception: on_fault,
        },
        lifespan=lifespan,
    )
    site.router.redirect_slashes = False
    return HttpFace(proxy=proxy, site=site, running=running, watch=watch, expect=expect, cors=cors)


def key_ring(settings: Settings) -> KeyRing:
    """The keys that the settings have or name; those of files once it is started."""
    return KeyRing(
        api=[key.get_secret_value() for key in settings.api_keys],
        admin=[key.get_secret_value() for key in settings.admin_keys],
        reader=[key.get_secret_value() for key in settings.reader_keys],
        api_file=settings.api_keys_file,
        admin_file=settings.admin_keys_file,
        reader_file=settings.reader_keys_file,
    )


def _for_clients(authority: Authority) -> Callable[[Endpoint], Endpoint]:
    def guard(endpoint: Endpoint) -> Endpoint:
        async def guarded(request: Request) -> Response:
            request.state.key = authority.check_client(request.scope["headers"])
            return await endpoint(request)

        return guarded

    return guard


def _guarded_by(check: Callable[[HeaderPairs, str | None], None]) -> Callable[[Endpoint], Endpoint]:
    def guard(endpoint: Endpoint) -> Endpoint:
        async def guarded(request: Request) -> Response:
            peer = request.client.host if request.client is not None else None
            try:
                check(request.scope["headers"], peer)
            except (Unauthorized, Forbidden) as e:
                # An engine that may not register only logs that it failed; the reason has to stand here.
                log.warning("refused %s %s from %s: %s", request.method, request.url.path, peer, e.message)
                raise
            return await endpoint(request)

        return guarded

    return guard
