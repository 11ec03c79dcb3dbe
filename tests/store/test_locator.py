"""Where Redis is: whom it asks, whom it believes, and that its clients leave a place that is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from redis.crc import key_slot
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from app.errors import StoreUnavailable
from app.redis_url import RedisAddress
from app.store.keys import Keys
from app.store.locator import Locator, _step
from tests.support.redis import PrivateRedis, Space
from tests.support.redis_groups import SYNC_AT_ONCE
from tests.support.wait import aeventually

KEYS = Keys("x")
SLOT = key_slot(KEYS.version.encode())
AWAY = StoreUnavailable("nobody there")
ROLE_MASTER, ROLE_REPLICA = [b"master", 0, []], [b"slave", b"h", 1, b"connected", 0]


def locator_of(url: str, timeout_s: float = 0.3) -> Locator:
    return Locator.of(url, keys=KEYS, timeout_s=timeout_s)


def search(locator: Locator, *replies: Any) -> tuple[list[str], RedisAddress | StoreUnavailable]:
    """One search with these replies: ("host:port COMMAND" of each question, its end)."""
    asked: list[str] = []
    left = list(replies)
    try:
        going = locator._search()
        step = _step(going, None)
        while not isinstance(step, RedisAddress):
            address, command = step
            asked.append(f"{address.name} {command[0]}")
            step = _step(going, left.pop(0))
    except StoreUnavailable as e:
        assert not left
        return asked, e
    assert not left
    return asked, step


def message(end: RedisAddress | StoreUnavailable) -> str:
    assert isinstance(end, StoreUnavailable)
    return end.message


def test_sentinels_are_asked_in_turn_each_time_from_another_one_on() -> None:
    locator = locator_of("redis+sentinel://u:p@a,b,c/m/2")
    asked, found = search(locator, AWAY, [b"h", b"7"], ROLE_MASTER)
    assert asked == ["a:26379 SENTINEL", "b:26379 SENTINEL", "h:7 ROLE"]
    assert isinstance(found, RedisAddress)
    assert (found.name, found.username, found.password, found.database) == ("h:7", "u", "p", 2)
    asked, found = search(locator, [b"h", b"7"], ROLE_MASTER)
    assert asked == ["b:26379 SENTINEL", "h:7 ROLE"]


def test_a_sentinel_that_names_a_replica_is_out_of_date() -> None:
    asked, found = search(
        locator_of("redis+sentinel://a,b,c/m"),
        [b"old", b"1"],
        ROLE_REPLICA,
        [b"old", b"1"],
        [b"new", b"1"],
        ROLE_MASTER,
    )
    assert asked == ["a:26379 SENTINEL", "old:1 ROLE", "b:26379 SENTINEL", "c:26379 SENTINEL", "new:1 ROLE"]
    assert isinstance(found, RedisAddress) and found.name == "new:1"


def test_who_may_not_ask_for_the_role_believes_the_sentinel() -> None:
    _, found = search(
        locator_of("redis+sentinel://a/m"), [b"h", b"1"], StoreUnavailable("Redis answered: NOPERM this user has no")
    )
    assert isinstance(found, RedisAddress)


def test_what_each_of_them_said_is_told_when_there_is_no_master() -> None:
    _, end = search(locator_of("redis+sentinel://a,b,c,d/m"), AWAY, None, [b"h", b"1"], AWAY, b"nonsense")
    assert message(end) == (
        "no Redis master is found: a:26379: nobody there; b:26379: it knows no master named 'm'; "
        "c:26379: h:1 should be the master: nobody there; d:26379: its answer makes no sense"
    )


def test_in_a_cluster_the_owner_of_the_one_slot_is_taken_and_the_others_are_remembered() -> None:
    locator = locator_of("redis+cluster://a:1")
    slots = [
        [0, SLOT - 1, [b"b", 2, b"id"], [b"r", 9, b"id"]],
        [SLOT, SLOT, [b"", 3, b"id"]],  # it does not know its own address
        [SLOT + 1, 16383, [None, 4, b"id"]],
    ]
    asked, found = search(locator, slots, ROLE_MASTER)
    assert asked == ["a:1 CLUSTER", "a:3 ROLE"]
    assert isinstance(found, RedisAddress) and found.name == "a:3"
    asked, _ = search(locator, AWAY, slots, ROLE_MASTER)
    assert asked == ["b:2 CLUSTER", "a:3 CLUSTER", "a:3 ROLE"]
    _, end = search(locator, AWAY, [[0, SLOT - 1, [b"b", 2, b"id"]]], AWAY, AWAY)
    assert f"no node of the cluster owns slot {SLOT}" in message(end)


async def test_many_that_ask_at_once_cost_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    locator = locator_of("redis+sentinel://a/m")
    asked = 0

    async def reply(*question: Any) -> Any:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        return {1: AWAY, 2: [b"h", b"1"], 3: ROLE_MASTER}[asked]

    monkeypatch.setattr(locator, "_reply", reply)
    failed = await asyncio.gather(*(locator.locate() for _ in range(20)), return_exceptions=True)
    assert all(isinstance(e, StoreUnavailable) for e in failed)
    assert asked == 1
    found = await asyncio.gather(*(locator.locate() for _ in range(20)))
    assert {address.name for address in found} == {"h:1"}
    assert asked == 3


async def test_nobody_there_is_told_in_one_line_without_the_password() -> None:
    url = "redis+sentinel://u:hush@127.0.0.1:1,[::1]:1/m?sentinel_password=hush"
    with pytest.raises(StoreUnavailable, match="no Redis master is found: 127.0.0.1:1: .*; ::1:1: ") as caught:
        await locator_of(url).locate()
    assert "hush" not in caught.value.message
    with pytest.raises(StoreUnavailable, match="no Redis master is found: 127.0.0.1:1: .*; ::1:1: ") as caught:
        await asyncio.to_thread(locator_of(url).locate_now)
    assert "hush" not in caught.value.message


@pytest.mark.parametrize("scheme", ["unix", "redis"])
async def test_a_client_leaves_a_server_that_became_a_replica(scheme: str) -> None:
    """The address leads to another server now (a service's, a balancer's): only a new connection gets there."""
    with PrivateRedis(tcp=True, options=SYNC_AT_ONCE) as server:
        client = locator_of(server.url if scheme == "unix" else server.tcp_url).client(retries=1)
        try:
            await client.set("k", "v")
            before = {row["id"] for row in await client.client_list()}
            server.cli("REPLICAOF", "127.0.0.1", "1")
            for call in (client.set("k", "w"), client.eval("return redis.call('SET', KEYS[1], 'w')", 1, "k")):
                with pytest.raises((RedisConnectionError, ResponseError), match="elsewhere.*READONLY"):
                    await call
            server.cli("REPLICAOF", "NO", "ONE")
            async with client.pipeline(transaction=True) as pipe:
                pipe.set("k", "x").get("k")
                assert await pipe.execute() == [True, b"x"]
            await aeventually(
                lambda: not before & {row["id"] for row in server.client.client_list() if row["cmd"] != "client|list"}
            )
        finally:
            await client.aclose()


async def test_over_tls_every_client_looks_at_the_certificate(
    redis: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    async with tls_front(redis.server.socket, context) as port:
        url = f"rediss://127.0.0.1:{port}"
        for trusted in (False, True):
            if trusted:
                monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
            locator = locator_of(url, timeout_s=5.0)
            client = locator.client()
            # The same way is used to ask sentinels and nodes.
            answers = [
                await locator._reply(await locator.locate(), ("PING",)),
                await asyncio.to_thread(locator._reply_now, locator.locate_now(), ("PING",)),
                *await asyncio.gather(client.ping(), asyncio.to_thread(ping_now, locator), return_exceptions=True),
            ]
            await client.aclose()
            if trusted:
                assert answers == [b"PONG", b"PONG", True, True]
            else:
                assert ["certificate verify failed" in str(answer).lower() for answer in answers] == [True] * 4


def ping_now(locator: Locator) -> bool:
    with locator.client_now(socket_timeout=5) as client:
        return bool(client.ping())


@asynccontextmanager
async def tls_front(target: Path, context: ssl.SSLContext) -> AsyncIterator[int]:
    """A server whose own binary can't do TLS, behind a front that can; its port."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_unix_connection(str(target))
        await asyncio.gather(copy(reader, there_writer), copy(there_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_a_connection_of_the_pool_does_not_read_the_librarys_version(
    redis_server: PrivateRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = locator_of(redis_server.url).client()
    monkeypatch.setattr("redis.utils.get_lib_version", lambda: pytest.fail("read for a connection"))
    try:
        assert await client.ping()
        id_ = await client.client_id()
        (itself,) = [entry for entry in await client.client_list() if entry["id"] == str(id_)]
        assert itself.get("lib-name", "") == itself.get("lib-ver", "") == ""
    finally:
        await client.aclose()
