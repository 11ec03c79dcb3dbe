"""The Redis of a deployment as a server: version, role, persistence, eviction, memory, clock, latency, access.

Owns the questions to the server and what the answers mean. It must not know what is stored there; touches no key.
"""

from __future__ import annotations

import ipaddress
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from app.checks.finding import Finding, bad, ok, warn
from app.redis_url import Kind, RedisPlace
from app.store.clock import redis_ms
from app.terminal.words import count, span

OLDEST = (6, 2)
TRIPS = 15
SLOW_S = 0.005
"""A request waits for a round trip before its engine hears of it; a Redis in the same rack answers in 0.2 ms."""
SKEW_S = 1.0
FULL = 0.9
ASKED_OF_CONFIG = ("save", "min-replicas-to-write")


@dataclass(frozen=True, slots=True)
class Server:
    """What was asked of it. `config`: None where CONFIG is refused, as by many that are rented; `ahead_s`: this
    host's clock before Redis's; `silent`: sentinels and cluster nodes of the URL that don't answer, each with why;
    `patience_s`: how long a request waits for Redis."""

    place: RedisPlace
    info: Mapping[str, Any]
    config: Mapping[str, str] | None
    trips_s: tuple[float, ...]
    ahead_s: float
    patience_s: float
    silent: Mapping[str, str] = field(default_factory=dict)
    cluster_state: str = ""

    @property
    def mode(self) -> str:
        """standalone, cluster or sentinel; newer Valkeys have a name of their own for it."""
        return str(self.info.get("server_mode") or self.info.get("redis_mode", ""))

    @property
    def stores(self) -> bool:
        """Whether it is a server that holds keys at all."""
        return self.mode != "sentinel"


def look(client: redis.Redis, place: RedisPlace, *, patience_s: float, silent: Mapping[str, str]) -> Server:
    """Raises RedisError."""
    info: dict[str, Any] = client.info()
    server = Server(place, info, None, (), 0.0, patience_s, silent)
    if not server.stores:
        return server  # it knows none of the commands below
    trips_s, ahead_s = [], 0.0
    for _ in range(TRIPS):
        # Not PING, which a Redis that can't write its snapshot refuses.
        begun, began_at = time.monotonic(), time.time()
        theirs = client.time()
        trips_s.append(time.monotonic() - begun)
        # It answered somewhere between: the middle is wrong by half of the round trip at most, so the quickest is best.
        if trips_s[-1] == min(trips_s):
            ahead_s = began_at + trips_s[-1] / 2 - redis_ms(theirs) / 1000
    cluster_state = _cluster_state(client) if place.kind is Kind.CLUSTER else ""
    return replace(server, config=_config(client), trips_s=tuple(trips_s), ahead_s=ahead_s, cluster_state=cluster_state)


def _config(client: redis.Redis) -> dict[str, str] | None:
    try:
        return {name: str(client.config_get(name).get(name, "")) for name in ASKED_OF_CONFIG}
    except RedisError:
        return None


def _cluster_state(client: redis.Redis) -> str:
    answer: Any = client.execute_command("CLUSTER INFO")  # type: ignore[no-untyped-call]
    pairs = answer if isinstance(answer, dict) else dict(line.partition(":")[::2] for line in str(answer).splitlines())
    return str(pairs.get("cluster_state", "")).strip()


def judge(server: Server) -> Iterator[Finding]:
    yield _version(server)
    yield from _form(server)
    if not server.stores:
        return
    yield _role(server)
    yield from _persistence(server)
    yield _eviction(server)
    yield _memory(server)
    yield from _clients(server)
    yield _clock(server)
    yield _latency(server)
    yield _access(server)


def not_checked(server: Server) -> list[tuple[str, str]]:
    """(what, why) of what could not be looked at."""
    if server.config is not None or not server.stores:
        return []
    return [("redis.persistence: the save points", "Redis refuses CONFIG GET")]


def _version(server: Server) -> Finding:
    info = server.info
    name, said = ("Valkey", info["valkey_version"]) if "valkey_version" in info else ("Redis", info["redis_version"])
    parts = str(info["redis_version"]).split(".")  # Valkey says there with which Redis it is compatible
    if tuple(int(part) if part.isdecimal() else 0 for part in parts[:2]) < OLDEST:
        return bad("redis.version", f"{name} {said} is too old", "run Redis 6.2 or newer, or Valkey")
    return ok("redis.version", f"{name} {said}")


def _form(server: Server) -> Iterator[Finding]:
    """Whether the URL has the form that fits what is there."""
    mode, kind = server.mode, server.place.kind
    if mode == "sentinel":
        yield bad(
            "redis.form",
            "this is a sentinel and no Redis",
            "name it as --redis-url redis+sentinel://HOST:PORT/MASTER: the sentinels are asked for the master",
        )
    elif mode == "cluster" and kind is not Kind.CLUSTER:
        yield warn(
            "redis.form",
            "this is a node of a cluster, named as a single server: no worker follows when the slot moves",
            "name it as --redis-url redis+cluster://HOST:PORT,HOST:PORT",
        )
    if kind is Kind.FIXED:
        return
    asked = "sentinel" if kind is Kind.SENTINEL else "cluster node"
    total = count(len(server.place.asked), asked)
    if server.silent:
        reasons = "; ".join(f"{name}: {why}" for name, why in server.silent.items())
        yield warn(
            "redis.form", f"{len(server.silent)} of {total} can't be asked: {reasons}", "start it, or name others"
        )
    else:
        yield ok("redis.form", f"{total} answer")
    if kind is Kind.CLUSTER and server.cluster_state not in ("", "ok"):
        yield bad("redis.cluster", f"the cluster's state is {server.cluster_state}", "look at CLUSTER INFO and NODES")
    if kind is Kind.SENTINEL:
        yield _replicas(server)


def _replicas(server: Server) -> Finding:
    if not server.info.get("connected_slaves"):
        return warn("redis.replicas", "the master has no replica that could follow it", "start one, or look at its log")
    if server.config is not None and server.config["min-replicas-to-write"] in ("", "0"):
        return warn(
            "redis.replicas",
            "a master that is cut off from the others goes on by itself, and what it takes is lost",
            "CONFIG SET min-replicas-to-write 1 on all servers, and in their configuration files",
        )
    return ok("redis.replicas", count(server.info["connected_slaves"], "replica"))


def _role(server: Server) -> Finding:
    info = server.info
    if info.get("role") == "slave":
        master = f"{info.get('master_host', '?')}:{info.get('master_port', '?')}"
        return bad(
            "redis.role",
            "this is a replica: it takes no writes (READONLY), so every worker decides for itself",
            f"name the master, {master}; or the sentinels, redis+sentinel://, which know who it is",
        )
    return ok("redis.role", "master")


def _persistence(server: Server) -> Iterator[Finding]:
    info, config = server.info, server.config
    appends = bool(info.get("aof_enabled"))
    saves = config["save"] if config is not None else None
    if info.get("rdb_last_bgsave_status", "ok") != "ok" and saves != "":
        yield bad(
            "redis.persistence",
            "the last snapshot could not be written: Redis refuses writes until one can (MISCONF)",
            "make room on its disk, or give it a directory that it may write (CONFIG GET dir), then BGSAVE",
        )
    elif appends and info.get("aof_last_write_status", "ok") != "ok":
        yield bad(
            "redis.persistence",
            "the append-only file can't be written: Redis refuses writes until it can",
            "make room on its disk",
        )
    elif appends:
        yield ok("redis.persistence", "append-only file")
    elif saves == "":
        yield warn(
            "redis.persistence",
            "nothing is written to disk: when Redis starts anew, running workers write the nodes back, "
            "but latencies are lost, and all of it where the workers start anew too",
            "CONFIG SET appendonly yes, and in its configuration file; counts are not written, so it costs little",
        )
    elif saves is not None:
        yield ok("redis.persistence", f"snapshots (save {saves})")


def _eviction(server: Server) -> Finding:
    policy, limit = str(server.info.get("maxmemory_policy", "noeviction")), int(server.info.get("maxmemory", 0))
    mend = "CONFIG SET maxmemory-policy noeviction, and in its configuration file"
    evicted = int(server.info.get("evicted_keys", 0))
    past = f"; {count(evicted, 'key')} evicted since it started" if evicted else ""
    if policy == "noeviction":
        return ok("redis.eviction", f"noeviction{past}")
    if policy.startswith("volatile-"):
        # These expire: the probing lease, the retry budget, hand-overs, the order of loads.
        says = f"{policy} takes leases and notes of hand-overs away when memory is full"
        return (
            warn("redis.eviction", f"{says}{past}", mend) if limit else ok("redis.eviction", f"{policy}, no maxmemory")
        )
    says = f"{policy} takes away any key of ours when memory is full: nodes, counts, leases"
    if limit:
        return bad("redis.eviction", f"{says}{past}", mend)
    return warn("redis.eviction", f"{says}; no maxmemory is set yet", mend)


def _memory(server: Server) -> Finding:
    info = server.info
    used, limit = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if not limit:
        total = int(info.get("total_system_memory", 0))
        resident = int(info.get("used_memory_rss", used))
        if total and resident > FULL * total:
            says = f"{_mib(resident)} of the {_mib(total)} of its host are in use, and no maxmemory is set"
            return warn("redis.memory", says, "free memory on its host before the kernel kills somebody")
        return ok("redis.memory", f"{_mib(used)} in use, no maxmemory")
    says = f"{_mib(used)} of maxmemory {_mib(limit)} in use"
    if used >= limit:
        return bad(
            "redis.memory",
            f"{says}: it takes no writes (OOM), so every worker decides for itself",
            "CONFIG SET maxmemory",
        )
    if used > FULL * limit:
        return warn("redis.memory", says, "more memory (CONFIG SET maxmemory), or another Redis for the other programs")
    return ok("redis.memory", says)


def _clients(server: Server) -> Iterator[Finding]:
    there, most = int(server.info.get("connected_clients", 0)), int(server.info.get("maxclients", 0))
    if most and there > FULL * most:
        yield warn("redis.clients", f"{there:,} of at most {most:,} clients", "CONFIG SET maxclients, or fewer clients")


def _clock(server: Server) -> Finding:
    apart = abs(server.ahead_s)
    if apart <= SKEW_S:
        return ok("redis.clock", f"{apart * 1000:.0f} ms from this host's")
    return warn(
        "redis.clock",
        f"this host's clock is {span(apart)} {'ahead of' if server.ahead_s > 0 else 'behind'} Redis's; "
        "leases and states go by Redis's alone, but logs and figures don't fit together",
        "synchronize both clocks (NTP)",
    )


def _latency(server: Server) -> Finding:
    middle, worst = statistics.median(server.trips_s), max(server.trips_s)
    says = f"a round trip takes {middle * 1000:.2f} ms, {worst * 1000:.2f} ms at worst of {len(server.trips_s)}"
    if middle >= server.patience_s:
        mend = "a Redis that is nearer or less busy; or a longer --redis-timeout-s"
        return bad("redis.latency", f"{says}: longer than a request waits ({server.patience_s:g} s)", mend)
    if middle > SLOW_S:
        return warn("redis.latency", f"{says}; every request waits for one such", "a Redis that is nearer or less busy")
    return ok("redis.latency", says)


def _access(server: Server) -> Finding:
    place = server.place
    if place.redis.path is not None:
        return ok("redis.access", "unix socket")
    hosts = [address.host for address in place.asked] or [place.redis.host]
    if all(map(_is_loopback, hosts)):
        return ok("redis.access", "loopback")
    tls = "with TLS" if place.redis.tls else "without TLS"
    if place.redis.password is None:
        return warn(
            "redis.access",
            f"over the network without a password, {tls}: whoever reaches it reads the engines' keys",
            "set requirepass or an ACL, and name it: EVENHAND_REDIS_URL=redis://:PASSWORD@HOST:PORT",
        )
    return ok("redis.access", f"over the network with a password, {tls}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def silent(place: RedisPlace, *, timeout_s: float) -> dict[str, str]:
    """The sentinels or cluster nodes of the URL that don't answer: name -> why. None for a single server."""
    found = {}
    for address in place.asked:
        options: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
        with redis.Redis(
            host=address.host,
            port=address.port,
            username=address.username,
            password=address.password,
            ssl=address.tls,
            retry=Retry(NoBackoff(), 0),
            **options,
        ) as client:
            try:
                client.ping()
            except (RedisError, OSError) as e:
                found[address.name] = str(e) or type(e).__name__
    return found
