"""What `--redis-url` says: one server, or the sentinels or cluster nodes that know which server it is now.

Owns the forms of that URL. It must not connect to anything. Passwords stay out of every repr and message.

    redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]    rediss:// over TLS    unix:///PATH[?db=DB]
    redis+sentinel://[[USER]:PASSWORD@]HOST[:PORT],...[/]MASTER[/DB][?sentinel_username=...&sentinel_password=...]
    redis+cluster://[[USER]:PASSWORD@]HOST[:PORT],...[/]
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

from app.errors import ConfigurationError

SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")
CLUSTER_SCHEMES = ("redis+cluster", "rediss+cluster")
SENTINEL_PORT, REDIS_PORT = 26379, 6379
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]/?#@,]+))(?::(\d{1,5}))?")


class Kind(Enum):
    """Who says where Redis is: the URL itself, sentinels, or the nodes of a cluster."""

    FIXED = "fixed"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """One server, from a redis://, rediss:// or unix:// URL. The password stays out of repr."""

    path: str | None
    host: str
    port: int
    tls: bool
    username: str | None
    password: str | None
    database: int

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """Raises ConfigurationError for anything but the three schemes."""
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss", "unix"):
            raise ConfigurationError("--redis-url must start with redis://, rediss:// or unix://")
        query = parse_qs(parts.query)
        digits = query.get("db", [""])[0] or (parts.path.strip("/") if parts.scheme != "unix" else "")
        try:
            database, port = int(digits or 0), parts.port or REDIS_PORT
        except ValueError as e:
            raise ConfigurationError(f"--redis-url: {e}") from e
        password = parts.password or query.get("password", [None])[0]
        username = parts.username or query.get("username", [None])[0]
        return cls(
            path=unquote(parts.path) if parts.scheme == "unix" else None,
            host=parts.hostname or "localhost",
            port=port,
            tls=parts.scheme == "rediss",
            username=unquote(username) if username else None,
            password=unquote(password) if password else None,
            database=database,
        )

    def at(self, host: str, port: int) -> RedisAddress:
        """Another server with the same credentials and database."""
        return replace(self, host=host, port=port)

    @property
    def name(self) -> str:
        """For messages."""
        return self.path or f"{self.host}:{self.port}"

    def __repr__(self) -> str:
        return f"<RedisAddress {self.name} db={self.database}>"


@dataclass(frozen=True, slots=True)
class RedisPlace:
    """Where Redis is, or whom to ask. `redis` says how to talk to it, and, if the kind is FIXED, where it is;
    `asked`: the sentinels or cluster nodes; `master`: its name among the sentinels."""

    kind: Kind
    redis: RedisAddress
    asked: tuple[RedisAddress, ...] = ()
    master: str = ""

    @classmethod
    def parse(cls, url: str) -> Self:
        """Raises ConfigurationError, with a line that names no password."""
        scheme = url.partition("://")[0].lower()
        try:
            if scheme in SENTINEL_SCHEMES:
                return cls._parse_sentinels(url)
            if scheme in CLUSTER_SCHEMES:
                return cls._parse_cluster(url)
        except ValueError as e:
            raise ConfigurationError(f"--redis-url: {e}") from e
        return cls(Kind.FIXED, RedisAddress.parse(url))

    @classmethod
    def _parse_sentinels(cls, url: str) -> Self:
        redis, hosts, path, query = _split(url, SENTINEL_PORT, ("sentinel_username", "sentinel_password"))
        match = re.fullmatch(r"([^/\s]+)(?:/(\d*))?", path)
        if match is None:
            raise ValueError(
                "needs the name of the master, as in redis+sentinel://HOST:PORT,HOST:PORT/MASTER, and maybe /DB"
            )
        username, password = query.get("sentinel_username"), query.get("sentinel_password")
        asks = replace(redis, username=username, password=password)
        return cls(
            Kind.SENTINEL,
            replace(redis, database=int(match[2] or 0)),
            tuple(asks.at(*host) for host in hosts),
            unquote(match[1]),
        )

    @classmethod
    def _parse_cluster(cls, url: str) -> Self:
        redis, hosts, path, _ = _split(url, REDIS_PORT, ())
        if path not in ("", "0"):
            raise ValueError("a cluster has database 0 only: nothing may follow redis+cluster://HOST:PORT,HOST:PORT/")
        return cls(Kind.CLUSTER, redis, tuple(redis.at(*host) for host in hosts))

    def __repr__(self) -> str:
        where = ",".join(address.name for address in self.asked) or self.redis.name
        return f"<RedisPlace {self.kind.value} {where}{f' {self.master}' if self.master else ''}>"


def _split(
    url: str, port: int, options: tuple[str, ...]
) -> tuple[RedisAddress, list[tuple[str, int]], str, dict[str, str]]:
    """(how to talk to Redis, the hosts, the path without its slashes, the options). Raises ValueError.

    By hand: `urlsplit` takes several hosts for one, and refuses IPv6 addresses among them.
    """
    scheme, _, rest = url.partition("://")
    rest, _, text = rest.partition("?")
    user, _, places = rest.rpartition("@")
    authority, _, path = places.partition("/")
    username, _, password = user.partition(":")
    hosts = [_host(host, port) for host in authority.split(",")]
    query = {name: values[-1] for name, values in parse_qs(text, keep_blank_values=True).items()}
    unknown = sorted(query.keys() - {*options})
    if unknown:
        known = f"; there are {' and '.join(options)}" if options else ""
        raise ValueError(f"{scheme}:// has no option {unknown[0]}{known}")
    redis = RedisAddress(
        path=None,
        host=hosts[0][0],
        port=hosts[0][1],
        tls=scheme.lower().startswith("rediss"),
        username=unquote(username) or None,
        password=unquote(password) or None,
        database=0,
    )
    return redis, hosts, path.strip("/"), query


def _host(text: str, port: int) -> tuple[str, int]:
    match = _HOST.fullmatch(text)
    if match is None or not 0 < int(match[3] or port) < 65536:
        # What stands there may be a part of a password with an `@` in it: it is not shown.
        raise ValueError("needs hosts as in HOST:PORT,HOST:PORT; write @ : / ? # in a password as %40 %3A %2F %3F %23")
    return match[1] or match[2], int(match[3] or port)
