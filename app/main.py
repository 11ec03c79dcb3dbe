"""The composition root: settings become objects, objects become the ASGI app. The only place that wires.

`gunicorn app.main:app` works by itself with EVENHAND_* variables; nothing is built at import, `app` is
made when it is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

from app.dispatch.distserve import DistServe
from app.dispatch.hybrid import Hybrid
from app.errors import ConfigurationError, StoreUnavailable
from app.http.routes import HttpFace, build_app
from app.nodes import Role
from app.settings import Settings
from app.store.keys import Keys
from app.store.ledger import Ledger
from app.store.pipeline import RedisAddress
from app.store.registry import Registry
from app.store.scripts import load_scripts
from app.upstream.http1 import Http1Transport
from app.upstream.management import EngineClient
from app.upstream.transport import Timeouts
from workers.prober import Prober, Rules
from workers.reaper import Reaper

log = logging.getLogger("evenhand")


def __getattr__(name: str) -> HttpFace:
    if name == "app":
        return create_app(Settings.load())
    raise AttributeError(name)


def create_app(settings: Settings) -> HttpFace:
    """The ASGI app of one worker. Raises ConfigurationError without a Redis URL."""
    if settings.redis_url is None:
        raise ConfigurationError("EVENHAND_REDIS_URL is not set; `evenhand serve` starts a Redis of its own")
    worker = os.environ.get("EVENHAND_WORKER_ID") or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
    engine_key = settings.engine_key.get_secret_value() if settings.engine_key else None
    keys, scripts = Keys(settings.namespace), load_scripts()
    registry = Registry(
        redis_url=settings.redis_url,
        keys=keys,
        scripts=scripts,
        worker=worker,
        timeout_s=settings.redis_timeout_s,
    )
    ledger = Ledger(
        address=RedisAddress.parse(settings.redis_url),
        keys=keys,
        scripts=scripts,
        registry=registry,
        worker=worker,
        strategy=settings.routing_strategy,
        lease_s=settings.lease_s,
        timeout_s=settings.redis_timeout_s,
    )
    transport = Http1Transport()
    engines = EngineClient(probe_timeout_s=settings.probe_timeout_s)
    hybrid = Hybrid(
        registry=registry,
        ledger=ledger,
        transport=transport,
        timeouts=Timeouts(
            connect_s=settings.connect_timeout_s,
            first_byte_s=settings.first_byte_timeout_s,
            idle_s=settings.idle_timeout_s,
            total_s=settings.total_timeout_s,
        ),
        engine_key=engine_key,
    )
    prober = Prober(
        registry=registry,
        engines=engines,
        keys=keys,
        worker=worker,
        rules=Rules(
            interval_s=settings.probe_interval_s,
            down_after=settings.probe_down_after,
            up_after=settings.probe_up_after,
            busy_grace_s=settings.probe_busy_grace_s,
            heartbeat_expiration_s=settings.heartbeat_expiration_s,
            forget_after_s=settings.forget_after_s,
        ),
        engine_key=engine_key,
    )
    reaper = Reaper(registry, keys)

    @contextlib.asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        # Counts outlive the loops, the store outlives the counts: the order below, backwards.
        await registry.start()
        await ledger.start()
        tasks = [
            asyncio.create_task(keep_running(name, loop), name=name)
            for name, loop in (
                ("prober", prober.run),
                ("reaper", reaper.run),
                ("static nodes", lambda: name_static_nodes(registry, settings.nodes)),
            )
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await transport.close()
            await engines.close()
            await ledger.close()
            await registry.close()

    return build_app(
        settings=settings,
        registry=registry,
        hybrid=hybrid if settings.serving_strategy == "Hybrid" else DistServe(),
        engine_client=engines,
        store_ok=lambda: ledger.trouble,
        lifespan=lifespan,
    )


async def keep_running(name: str, loop: Callable[[], Awaitable[None]], *, pause_s: float = 1.0) -> None:
    """Run a background loop; a fault in it is logged and the loop begun again: nobody watches it."""
    while True:
        try:
            return await loop()
        except Exception:
            log.exception("the %s loop failed; it begins again", name)
            await asyncio.sleep(pause_s)


async def name_static_nodes(registry: Registry, urls: tuple[str, ...], *, retry_s: float = 1.0) -> None:
    """Register what `--nodes` names and is not registered as such yet; keeps trying until Redis took it."""
    while True:
        try:
            await registry.refresh()
            for url in urls:
                known = registry.snapshot.nodes.get(url)
                if known is None:
                    await registry.add(url, role=Role.Hybrid, models=(), speed=None, key=None, asked=True, static=True)
                elif not known.static:
                    await registry.add(
                        url,
                        role=known.role,
                        models=known.models,
                        speed=known.speed,
                        key=None,
                        asked=known.asked,
                        static=True,
                    )
            return
        except StoreUnavailable:
            await asyncio.sleep(retry_s)
