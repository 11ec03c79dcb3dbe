"""Where is Redis now? One answer for the hot connection, the management client, the events and the master process.

Owns the questions to sentinels and cluster nodes, and the client whose connections follow the answer. It must not
know what is done there. Touches no key; in a cluster it asks for the owner of the one slot that all keys share.

Everybody asks at every connect, and whoever is told that it is in the wrong place (READONLY, MOVED, ...) hangs
up. So nothing has to be notified of a failover, and no list of nodes has to be kept right. The questions are
plain generators ("ask this one that"), because asyncio asks them in the workers and a blocking socket elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Generator, Iterable
from typing import Any

import redis
import redis.asyncio as aioredis
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, ReadOnlyError, RedisError, ResponseError, TryAgainError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.retry import Retry as BlockingRetry

from app.errors import StoreUnavailable
from app.redis_url import Kind, RedisAddress, RedisPlace
from app.store.keys import Keys
from app.store.pipeline import Pipeline, Reply

Search = Generator[tuple[RedisAddress, tuple[str, ...]], Reply, RedisAddress]
"""Yields whom to ask what, is sent the reply or thrown StoreUnavailable, returns where Redis is."""

NODES_LEARNT = 64
"""Cluster nodes that are asked beside those of the URL: all of any real cluster's masters."""


class Locator:
    """See the module. One per process; `timeout_s` bounds each question, not the search."""

    def __init__(self, place: RedisPlace, *, keys: Keys, timeout_s: float) -> None:
        self._place = place
        self._slot = key_slot(keys.version.encode())
        self._timeout_s = timeout_s
        self._turn = 0
        self._learnt: tuple[RedisAddress, ...] = ()
        self._found: RedisAddress | None = None if place.asked else place.redis
        self._outcome: tuple[float, RedisAddress | StoreUnavailable] = (float("-inf"), place.redis)
        self._asking = asyncio.Lock()

    @classmethod
    def of(cls, url: str, *, keys: Keys, timeout_s: float) -> Locator:
        """Raises ConfigurationError."""
        return cls(RedisPlace.parse(url), keys=keys, timeout_s=timeout_s)

    def __repr__(self) -> str:
        return f"<Locator {self._place!r} found={self._found}>"

    async def locate(self) -> RedisAddress:
        """Where Redis is. Raises StoreUnavailable where nobody knows it, or what they know is no master."""
        if not self._place.asked:
            return self._place.redis
        since = time.monotonic()
        async with self._asking:
            at, outcome = self._outcome
            if at < since:  # else somebody asked while this one waited: one search serves all
                try:
                    outcome = await self._ask()
                    self._found = outcome
                except StoreUnavailable as e:
                    outcome = e
                self._outcome = (time.monotonic(), outcome)
        if isinstance(outcome, StoreUnavailable):
            raise StoreUnavailable(outcome.message) from outcome
        return outcome

    async def _ask(self) -> RedisAddress:
        search = self._search()
        step = _step(search, None)
        while not isinstance(step, RedisAddress):
            step = _step(search, await self._reply(*step))
        return step

    async def _reply(self, address: RedisAddress, command: tuple[str, ...]) -> Reply:
        try:
            # Half of it: to be reached may take twice what an answer may.
            asked = await Pipeline.open(address, timeout_s=self._timeout_s / 2, on_lost=lambda reason: None)
            try:
                return await asked.call(command)
            finally:
                asked.close()
        except StoreUnavailable as e:
            return e

    def locate_now(self) -> RedisAddress:
        """`locate` for a process without an event loop. Raises StoreUnavailable."""
        if not self._place.asked:
            return self._place.redis
        search = self._search()
        step = _step(search, None)
        while not isinstance(step, RedisAddress):
            step = _step(search, self._reply_now(*step))
        return step

    def _reply_now(self, address: RedisAddress, command: tuple[str, ...]) -> Reply:
        kind = redis.SSLConnection if address.tls else redis.Connection
        timeout_s = self._timeout_s / 2
        # Protocol 2: replies as the hot connection has them.
        asked = kind(**_options(address), socket_timeout=timeout_s, socket_connect_timeout=timeout_s, protocol=2)
        try:
            asked.connect()  # type: ignore[no-untyped-call]
            asked.send_command(*command)  # type: ignore[no-untyped-call]
            return asked.read_response()
        except ResponseError as e:
            return StoreUnavailable(f"Redis answered: {e.status_code or ''} {e}")
        except (RedisError, OSError) as e:
            return StoreUnavailable(f"Redis can't be reached: {e}")
        finally:
            asked.disconnect()  # type: ignore[no-untyped-call]

    # --- the questions ----------------------------------------------------------------------------

    def _search(self) -> Search:
        # Each time another one is the first: what is out of date at one of them costs one attempt, not all.
        asked = _distinct((*self._place.asked, *self._learnt))
        first = self._turn % len(asked)
        self._turn += 1
        return self._search_among((*asked[first:], *asked[:first]))

    def _search_among(self, asked: Iterable[RedisAddress]) -> Search:
        troubles: list[str] = []
        tried: set[str] = set()
        for address in asked:
            try:
                found = yield from self._master_by(address)
                if found.name not in tried:
                    tried.add(found.name)
                    yield from _check_role(found)
                    return found
            except StoreUnavailable as e:
                troubles.append(f"{address.name}: {e.message}")
            except (TypeError, ValueError, LookupError, AttributeError):
                troubles.append(f"{address.name}: its answer makes no sense")
        raise StoreUnavailable("no Redis master is found: " + "; ".join(troubles))

    def _master_by(self, address: RedisAddress) -> Search:
        if self._place.kind is Kind.CLUSTER:
            return self._owner_by(address)
        return self._master_by_sentinel(address)

    def _master_by_sentinel(self, sentinel: RedisAddress) -> Search:
        reply = yield sentinel, ("SENTINEL", "get-master-addr-by-name", self._place.master)
        if reply is None:
            raise StoreUnavailable(f"it knows no master named {self._place.master!r}")
        host, port = reply
        return self._place.redis.at(host.decode(), int(port))

    def _owner_by(self, node: RedisAddress) -> Search:
        # Not CLUSTER SHARDS, which is of Redis 7.
        reply = yield node, ("CLUSTER", "SLOTS")
        owner = None
        nodes = []
        for first, last, master, *_ in reply:
            # A node that does not know its own address leaves it out: then it is the one that was asked for it.
            name = master[0].decode() if master[0] else ""
            nodes.append(node.at(node.host if name in ("", "?") else name, int(master[1])))
            if first <= self._slot <= last:
                owner = nodes[-1]
        self._learnt = _distinct(nodes)[:NODES_LEARNT]
        if owner is None:
            raise StoreUnavailable(f"no node of the cluster owns slot {self._slot}")
        return owner

    # --- clients ----------------------------------------------------------------------------------

    def client(self, *, max_connections: int | None = None, retries: int = 0, **options: Any) -> aioredis.Redis:
        """The client library's, each of whose connections looks where Redis is when it connects.

        Args:
            retries: how often a call runs again after a connection was lost or was found to lead to the wrong
                place; only for calls that may run twice.
            options: of the client library's connections.
        """
        place = self._place.redis
        kind = _UnixConnection if place.path is not None else _TlsConnection if place.tls else _TcpConnection
        pool = aioredis.ConnectionPool(
            connection_class=kind,
            max_connections=max_connections,
            locator=self,
            retry=Retry(NoBackoff(), retries, supported_errors=(RedisConnectionError,)),
            driver_info=None,  # else each connection reads the library's metadata for its version, 0.8 ms of the loop
            **_options(place),
            **options,
        )
        return aioredis.Redis.from_pool(pool)

    def client_now(self, **options: Any) -> redis.Redis:
        """A synchronous client of where Redis is now, for a few calls. Raises StoreUnavailable."""
        found = _options(self.locate_now())
        if "path" in found:
            found["unix_socket_path"] = found.pop("path")
        return redis.Redis(**found, ssl=self._place.redis.tls, retry=BlockingRetry(NoBackoff(), 0), **options)

    def has_left(self, host: str, port: int) -> bool:
        """Whether Redis was found somewhere else since."""
        found = self._found
        return found is not None and (found.host, found.port) != (host, port)


def _check_role(address: RedisAddress) -> Generator[tuple[RedisAddress, tuple[str, ...]], Reply, None]:
    try:
        role = (yield address, ("ROLE",))[0]
    except StoreUnavailable as e:
        if "NOPERM" not in e.message:
            raise StoreUnavailable(f"{address.name} should be the master: {e.message}") from e
        return  # this user may not ask; a replica will say READONLY
    if role != b"master":
        raise StoreUnavailable(f"{address.name} should be the master, but is a {role.decode()}")


def _step(search: Search, reply: Reply) -> tuple[RedisAddress, tuple[str, ...]] | RedisAddress:
    """The next question, or the end of the search. Raises StoreUnavailable."""
    try:
        return search.throw(reply) if isinstance(reply, StoreUnavailable) else search.send(reply)
    except StopIteration as end:
        found: RedisAddress = end.value
        return found


def _distinct(addresses: Iterable[RedisAddress]) -> tuple[RedisAddress, ...]:
    return tuple({address.name: address for address in addresses}.values())


def _options(address: RedisAddress) -> dict[str, Any]:
    """The client library's words for it."""
    where = {"path": address.path} if address.path is not None else {"host": address.host, "port": address.port}
    return {**where, "username": address.username, "password": address.password, "db": address.database}


class _Connection(aioredis.connection.AbstractConnection):
    """A pooled connection that hangs up when it is told that it leads to the wrong place."""

    def __init__(self, *, locator: Locator, **options: Any) -> None:
        self._locator = locator
        super().__init__(**options)

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except ResponseError as e:
            if not _leads_elsewhere(e):
                raise
            await self.disconnect(nowait=True)
            raise RedisConnectionError(f"Redis is elsewhere now: {e.status_code or ''} {e}") from e


def _leads_elsewhere(e: ResponseError) -> bool:
    if isinstance(e, (ReadOnlyError, AskError, TryAgainError, ClusterDownError)):  # MOVED is an AskError there
        return True
    # Redis 6.2 wraps what a script met in an error of its own.
    return "READONLY" in str(e) or str(e).startswith("NOREPLICAS")


class _UnixConnection(_Connection, UnixDomainSocketConnection):
    pass


class _TcpConnection(_Connection, Connection):
    async def connect(self) -> None:
        # An idle one may still stand, at a master that was frozen or cut off from the others and is none any more.
        if self.is_connected and self._locator.has_left(self.host, self.port):
            with contextlib.suppress(RedisError, OSError):
                await self.disconnect(nowait=True)
        await super().connect()  # type: ignore[no-untyped-call]

    async def _connect(self) -> None:
        try:
            address = await self._locator.locate()
        except StoreUnavailable as e:
            raise RedisConnectionError(e.message) from e
        self.host, self.port = address.host, address.port
        await super()._connect()  # type: ignore[no-untyped-call]


class _TlsConnection(_TcpConnection, SSLConnection):
    pass
