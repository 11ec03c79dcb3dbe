"""The composition root: settings become objects, objects become the ASGI app. The only place that wires.

`gunicorn app.main:app` works by itself with EVENHAND_* variables; nothing is built at import, `app` is
made when it is asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from app.discovery.listing import Reader
from app.discovery.sources import FileSource
from app.dispatch.answer import Server
from app.dispatch.breakers import Breakers
from app.dispatch.caller import Caller
from app.dispatch.consumers import Consumers
from app.dispatch.distserve import DistServe
from app.dispatch.epd import Epd, EpdRules
from app.dispatch.handover.bootstrap import Bootstrap
from app.dispatch.handover.links import LinkRules, Links
from app.dispatch.handover.lmdeploy import Lmdeploy
from app.dispatch.handover.mooncake import Mooncake
from app.dispatch.handover.nixl import Nixl
from app.dispatch.handover.protocol import Protocol
from app.dispatch.handover.sessions import Sessions
from app.dispatch.handover.sglang import Sglang
from app.dispatch.hybrid import Hybrid
from app.dispatch.prefill_decode import PrefillDecode, SplitRules
from app.dispatch.topology import Topology
from app.errors import ConfigurationError, StoreUnavailable, UpstreamError
from app.http.metrics import Metrics
from app.http.ports import Dispatcher
from app.http.routes import HttpFace, build_app, key_ring
from app.metrics.figures import Figures
from app.metrics.files import DIRECTORY_VARIABLE, MetricsDirectory, MetricsWriter
from app.metrics.publisher import Publisher
from app.metrics.request_log import RequestLog
from app.nodes import Node, Role, State
from app.redis_url import RedisPlace
from app.settings import Settings, tls_towards_engines
from app.store.budget import RetryBudget
from app.store.decisions import Decisions
from app.store.handing import Handing
from app.store.handovers import Handovers
from app.store.keys import Keys
from app.store.last_known import LastKnown
from app.store.ledger import Ledger
from app.store.links import LinkTable
from app.store.locator import Locator
from app.store.migrations import Migrations
from app.store.overview import Overview, overview
from app.store.registry import BreakerRules, Registry
from app.store.scripts import Script, load_scripts
from app.store.view import Arrangement, View
from app.upstream.distserve import DistServeClient, Migration
from app.upstream.http1 import Http1Transport
from app.upstream.management import EngineClient
from app.upstream.transport import Timeouts
from workers.discoverer import Discoverer
from workers.janitor import Janitor
from workers.prober import Prober, Rules
from workers.reaper import Reaper

if TYPE_CHECKING:
    from app.metrics.traces import Traces

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
    engine_key = key_of(settings)
    keys, scripts = Keys(settings.namespace), load_scripts()
    locator = Locator.of(settings.redis_url, keys=keys, timeout_s=settings.redis_timeout_s)
    figures = Figures(knows=lambda model: registry.snapshot.knows(model))
    registry = Registry(
        locator=locator,
        keys=keys,
        scripts=scripts,
        worker=worker,
        timeout_s=settings.redis_timeout_s,
        last_known=last_known(settings),
        figures=figures,
    )
    ledger = Ledger(
        locator=locator,
        keys=keys,
        scripts=scripts,
        registry=registry,
        worker=worker,
        strategy=settings.routing_strategy,
        strategies=settings.strategies,
        encoder_policy=settings.encoder_policy,
        workers=settings.workers,
        lease_s=settings.lease_s,
        timeout_s=settings.redis_timeout_s,
        figures=figures,
    )
    tls = tls_towards_engines(settings)
    transport = Http1Transport(tls=tls)
    breakers = Breakers(
        registry=registry,
        ledger=ledger,
        rules=BreakerRules(threshold=settings.breaker_failures, open_s=settings.breaker_open_s),
        figures=figures,
    )
    budget = RetryBudget(registry=registry, ledger=ledger, keys=keys)
    engines = EngineClient(
        probe_timeout_s=settings.probe_timeout_s,
        tls=tls,
        host_header=lambda url: registry.snapshot.host_headers.get(url, ""),
    )
    caller = Caller(
        registry=registry,
        transport=transport,
        breakers=breakers,
        timeouts=Timeouts(
            connect_s=settings.connect_timeout_s,
            first_byte_s=settings.first_byte_timeout_s,
            idle_s=settings.idle_timeout_s,
            total_s=settings.total_timeout_s,
        ),
        prefill_s=settings.prefill_timeout_s,
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
            breaker_failures=settings.breaker_failures,
        ),
        engine_key=engine_key,
        counts_are_whole=lambda: ledger.counts_are_whole,
    )
    reaper = Reaper(registry, keys)
    topology = Topology.of(settings)
    discoverers = [
        Discoverer(reader=reader, registry=registry, keys=keys, worker=worker, grace_s=settings.grace_s)
        for reader in readers(settings, topology)
    ]
    linked = topology.split and topology.protocol == "lmdeploy"
    split = Split(
        settings,
        keys=keys,
        scripts=scripts,
        registry=registry,
        ledger=ledger,
        engines=engines,
        worker=worker,
        linked=linked,
        figures=figures,
    )
    janitor = Janitor(distserve=split.distserve, registry=registry, leads=lambda: prober.lease.held) if linked else None

    hosts = os.environ.get(DIRECTORY_VARIABLE)
    directory = MetricsDirectory(Path(hosts)) if hosts else MetricsDirectory.make()
    if settings.log_requests != "off":
        share = settings.log_sample if settings.log_requests == "all" else 0.0
        figures.on_ended.append(RequestLog(share, settings.log_format))
    traces = traces_of(settings, worker)
    if traces is not None:
        figures.on_ended.append(traces)
    publisher = Publisher(figures, MetricsWriter(directory.path, worker), lambda: ledger.trouble)

    view = View(registry=registry, keys=keys, ledger=ledger, arrangement=arrangement(settings, topology))
    figures.on_ended.append(Decisions(ledger=ledger, keys=keys).note)

    async def shared() -> Overview:
        if ledger.trouble is not None:
            raise StoreUnavailable(ledger.trouble)
        return await overview(registry, keys)

    access = key_ring(settings)

    @contextlib.asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        # Counts outlive the loops, the store outlives the counts: the order below, backwards.
        await access.start()
        await registry.start()
        await ledger.start()
        tasks = [
            asyncio.create_task(keep_running(name, loop), name=name)
            for name, loop in (
                ("prober", prober.run),
                ("reaper", reaper.run),
                ("metrics", publisher.run),
                ("keys", access.run),
                *((("janitor", janitor.run),) if janitor is not None else ()),
                *(("discovery", discoverer.run) for discoverer in discoverers),
                ("static nodes", lambda: name_static_nodes(registry, engines, settings.static_nodes, engine_key)),
            )
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await split.close()
            await breakers.close()
            await transport.close()
            await engines.close()
            await ledger.close()
            await registry.close()
            publisher.close()
            if traces is not None:
                await asyncio.to_thread(traces.close)
            if not hosts:
                directory.remove()

    return build_app(
        settings=settings,
        registry=registry,
        dispatcher=dispatcher(
            settings,
            registry=registry,
            ledger=ledger,
            caller=caller,
            split=split,
            breakers=breakers,
            budget=budget,
        ),
        links=split.distserve if topology.split else None,
        engine_client=engines,
        store_ok=lambda: ledger.trouble,
        figures=figures,
        metrics=Metrics(directory.merged, shared, within_s=settings.redis_timeout_s),
        tracer=traces,
        keys=access,
        seen=view,
        watched=ledger.watch_next,
        expect=ledger.expect,
        lifespan=lifespan,
    )


def traces_of(settings: Settings, worker: str) -> Traces | None:
    """Who records traces, where that is on."""
    if settings.trace_endpoint is None:
        return None
    from app.metrics.traces import Traces  # its libraries are an extra, and nobody else pays for their import

    return Traces.of(settings.trace_endpoint, worker)


async def keep_running(name: str, loop: Callable[[], Awaitable[None]], *, pause_s: float = 1.0) -> None:
    """Run a background loop; a fault in it is logged and the loop begun again: nobody watches it."""
    while True:
        try:
            return await loop()
        except Exception:
            log.exception("the %s loop failed; it begins again", name)
            await asyncio.sleep(pause_s)


class Split:
    """What separate prefill and decode nodes need: links, sessions, figures, and the protocol between them."""

    def __init__(
        self,
        settings: Settings,
        *,
        keys: Keys,
        scripts: dict[str, Script],
        registry: Registry,
        ledger: Ledger,
        engines: EngineClient,
        worker: str,
        linked: bool,
        figures: Figures,
    ) -> None:
        self._settings = settings
        self._engines = engines
        self._bootstrap = Bootstrap(registry=registry, default_port=settings.bootstrap_port)
        self._migration = Migration(settings.migration_protocol, settings.link_type, with_gdr=not settings.disable_gdr)
        self.figures = Handovers(ledger=ledger, registry=registry, keys=keys, figures=figures)
        self.handing = Handing(ledger=ledger, keys=keys, worker=worker)
        distserve = DistServeClient(engines, self._migration)
        table = LinkTable(ledger=ledger, registry=registry, keys=keys, worker=worker)
        migrations = Migrations(ledger=ledger, registry=registry, keys=keys, scripts=scripts, worker=worker)
        self.links = Links(
            table=table,
            registry=registry,
            engines=distserve,
            figures=self.figures,
            rules=LinkRules(timeout_s=settings.link_timeout_s, tries=settings.link_tries),
            engine_key=key_of(settings),
        )
        self.sessions = Sessions(
            migrations=migrations,
            registry=registry,
            engines=distserve,
            figures=self.figures,
            key_of=self.links.key_of,
        )
        self.distserve = DistServe(
            registry=registry,
            table=table,
            links=self.links,
            sessions=self.sessions,
            migrations=migrations,
            figures=self.figures,
            keys=keys,
            worker=worker,
            gc_age_s=settings.gc_age_s,
            linked=linked,
        )

    def protocol(self, name: str, caller: Caller) -> Protocol:
        recompute = self._settings.pd_missing_params == "recompute"
        if name == "nixl":
            lease_s = self._settings.handover_lease_s
            return Nixl(caller=caller, figures=self.figures, lease_s=lease_s, recompute=recompute)
        if name == "mooncake":
            return Mooncake(caller=caller, figures=self.figures, bootstrap=self._bootstrap, engines=self._engines)
        if name == "sglang":
            return Sglang(caller=caller, figures=self.figures, bootstrap=self._bootstrap)
        return Lmdeploy(
            caller=caller,
            figures=self.figures,
            links=self.links,
            sessions=self.sessions,
            protocol_number=self._migration.number,
            recompute=recompute,
        )

    def rules(self, topology: Topology) -> SplitRules:
        dummy = self._migration.number if topology.dummy_prefill else None
        return SplitRules(fallback=topology.fallback, dummy=dummy, retries=self._settings.retries)

    async def close(self) -> None:
        await self.sessions.close()
        await self.links.close()
        self.figures.note()


def key_of(settings: Settings) -> str | None:
    return settings.engine_key.get_secret_value() if settings.engine_key else None


def dispatcher(
    settings: Settings,
    *,
    registry: Registry,
    ledger: Ledger,
    caller: Caller,
    split: Split,
    breakers: Breakers,
    budget: RetryBudget,
) -> Dispatcher:
    """The use case that the settings ask for. Raises ConfigurationError where they contradict each other."""
    topology = Topology.of(settings)
    rules = EpdRules(
        batch_limit=settings.encoder_max_batch_size,
        encoder_retries=settings.encoder_retries,
        decode_retries=settings.decode_retries,
        rewrite=not settings.no_rewrite,
    )
    consumers = Consumers(settings.decode_servers_urls, settings.ec_consumer_zmq_addrs, settings.ec_consumer_dp_size)
    hybrid = Hybrid(
        registry=registry,
        ledger=ledger,
        caller=caller,
        breakers=breakers,
        budget=budget,
        retries=settings.retries,
    )
    inner: Server = (
        PrefillDecode(
            registry=registry,
            ledger=ledger,
            caller=caller,
            protocol=split.protocol(topology.protocol, caller),
            figures=split.figures,
            handing=split.handing,
            rules=split.rules(topology),
            breakers=breakers,
            budget=budget,
        )
        if topology.split
        else hybrid
    )
    return Epd(
        registry=registry,
        ledger=ledger,
        caller=caller,
        inner=inner,
        rules=rules,
        consumers=consumers,
        consumer_taker=hybrid,
        budget=budget,
        figures=split.figures,
        expects_encoders=topology.expects_encoders,
    )


def arrangement(settings: Settings, topology: Topology) -> Arrangement:
    """What this worker goes by, for who looks at the deployment."""
    return Arrangement(
        strategy=settings.routing_strategy,
        encoder_policy=settings.encoder_policy,
        serving="DistServe" if topology.split else "Hybrid",
        fallback=topology.fallback,
        dummy_prefill=topology.dummy_prefill,
        strategies=json.dumps(settings.strategies) if settings.strategies else "",
        grace_s=settings.grace_s,
        aliases=json.dumps(settings.aliases) if settings.aliases else "",
    )


def readers(settings: Settings, topology: Topology) -> Iterator[Reader]:
    """Who reads what `--discover` names. Their libraries are imported only where there is one."""
    for source in settings.sources:
        if isinstance(source, FileSource):
            from app.discovery.node_file import FileReader

            yield FileReader(source, topology.check)
        else:
            from app.discovery.names import DnsReader

            yield DnsReader(source)


async def name_static_nodes(
    registry: Registry, engines: EngineClient, nodes: Mapping[str, Role], key: str | None, *, retry_s: float = 1.0
) -> None:
    """Register what the settings name and is not registered as such yet; keeps trying until Redis took it.

    While Redis has never been reached they are served all the same, once they say which models they have.
    """
    while True:
        try:
            await registry.refresh()
            for url, role in nodes.items():
                known = registry.snapshot.nodes.get(url)
                if known is None:
                    await registry.add(url, role=role, models=(), speed=None, key=None, asked=True, static=True)
                elif not known.static or known.role != role:
                    await registry.add(
                        url,
                        role=role,
                        models=known.models,
                        speed=known.speed,
                        key=None,
                        asked=known.asked,
                        static=True,
                        bootstrap_port=known.bootstrap_port,
                        host_header=known.host_header,
                    )
            return
        except StoreUnavailable:
            unknown = [url for url in nodes if url not in registry.snapshot.nodes] if registry.assuming else []
            await asyncio.gather(*(assume_node(registry, engines, url, nodes[url], key) for url in unknown))
            await asyncio.sleep(retry_s)


async def assume_node(registry: Registry, engines: EngineClient, url: str, role: Role, key: str | None) -> None:
    with contextlib.suppress(UpstreamError):
        models = await engines.models(url, key)
        if models:
            registry.assume(Node(url, role=role, models=models, state=State.READY, asked=True, static=True))


def last_known(settings: Settings) -> LastKnown:
    """Where this host keeps the nodes that it knows."""
    place = RedisPlace.parse(settings.redis_url or "")
    return LastKnown.of(settings.state_dir, f"{place!r} {place.redis.database} {settings.namespace}")
