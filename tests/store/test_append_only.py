"""A server with an append-only file, as the embedded Redis is: the registry is on the disk before it is answered for,
and what every request counts is not; after a restart the workers state it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.nodes import Role
from app.store import ledger as ledger_module
from tests.store.harness import Worker, exact, give_back, ledger_of, registered, totals, workers
from tests.support.redis import PrivateRedis, Space
from tests.support.wait import aeventually
from workers.reaper import Reaper

A, B, C = "http://10.0.0.1:23333", "http://10.0.0.2:23333", "http://10.0.0.3:23333"


@pytest.fixture
def durable() -> Iterator[Space]:
    with PrivateRedis(options={"appendonly": "yes", "appendfsync": "everysec"}) as server:
        yield Space(server, "own")


def on_disk(space: Space) -> bytes:
    """What a restart would find."""
    return b"".join(path.read_bytes() for path in Path(space.server.directory).rglob("*.aof"))


def restart(space: Space) -> None:
    space.server.kill()
    space.server.start()


async def test_what_every_request_counts_is_not_written_to_the_disk(durable: Space) -> None:
    async with workers(durable, 2) as made:
        for url in (A, B):
            await made[0].add_ready(url)
        await made[0].add_ready(C, role=Role.Encode)
        await made[1].registry.refresh()
        before = on_disk(durable)
        for worker in made:
            give_back(await worker.take(50))
            give_back(await worker.ledger.acquire_encoders(lambda snapshot: snapshot.pool("m", Role.Encode), 2))
            held = await worker.take(3)
            worker.ledger._restate_soon()
            await worker.take_nothing()
        await aeventually(lambda: totals(durable) == {A: 3, B: 3} and exact(durable, made))
        written = on_disk(durable)[len(before) :]
        assert durable.key("encoder_cursor").encode() in written, "else nothing of this is looked at"
        assert durable.key("unfinished").encode() not in on_disk(durable)
        give_back(held)


async def test_a_node_is_on_the_disk_before_its_registration_is_answered(durable: Space) -> None:
    async with Worker(durable.url, durable.namespace, "w1") as worker:
        await worker.registry.add(A, role=Role.Hybrid, models=("m",), speed=2.0, key="k")
        durable.server.kill()
    # The worker is gone as well: nobody is left who could bring the registry back.
    durable.server.start()
    assert registered(durable)[A]["speed"] == "2.0" and registered(durable)[A]["key"] == "k"


async def test_after_a_restart_the_counts_are_stated_again_and_the_leases_are_still_there(durable: Space) -> None:
    async with workers(durable, 3) as made:
        for url in (A, B):
            await made[0].add_ready(url)
        held = [ticket for worker in made for ticket in await worker.take(4)]
        for worker in made[1:]:
            worker.ledger._keeper.cancel()  # type: ignore[union-attr]  # these two don't come back yet
        restart(durable)
        leases = durable.cli("ZRANGE", durable.key("workers"), 0, -1)
        assert leases == ["w1", "w2", "w3"], "who lives must not look dead: its links and sessions would be taken away"
        assert set(registered(durable)) == {A, B}
        await aeventually(lambda: made[0].shared and sum(totals(durable).values()) == 4)
        for worker in made[1:]:
            await worker.ledger._try_to_join()
        await aeventually(lambda: exact(durable, made))
        assert sum(totals(durable).values()) == 12
        give_back(held)


@pytest.mark.parametrize("rewritten", [False, True])
async def test_counts_that_are_on_the_disk_all_the_same_are_corrected(durable: Space, rewritten: bool) -> None:
    """A file of an older version has them, and one that Redis has rewritten: it writes down all that there is."""
    async with workers(durable, 2) as made:
        await made[0].add_ready(A)
        held = [ticket for worker in made for ticket in await worker.take(5)]
        if rewritten:
            durable.cli("BGREWRITEAOF")
            await aeventually(lambda: not durable.cli("INFO", "persistence")["aof_rewrite_in_progress"])
        else:
            for name, count in (("unfinished", 10), ("unfinished:w1", 5), ("unfinished:w2", 5)):
                durable.cli("HSET", durable.key(name), A, count)
        give_back(held[:2])
        await aeventually(lambda: exact(durable, made))
        made[1].ledger._keeper.cancel()  # type: ignore[union-attr]
        restart(durable)
        await aeventually(lambda: made[0].shared and ledger_of(durable, "w1") == {A: made[0].ledger.counts[A]})
        durable.cli("ZADD", durable.key("workers"), "1", "w2")
        await Reaper(made[0].registry, made[0].keys).reap()
        assert totals(durable) == made[0].ledger.counts
        restart(durable)
        assert not durable.cli("EXISTS", durable.key("unfinished:w2")), "a dead worker's share must not come back"
        give_back(held[2:])


async def test_replicas_hear_of_every_count() -> None:
    """They may be the master in the next moment."""
    with PrivateRedis(tcp=True, options={"repl-diskless-sync-delay": "0"}) as master, PrivateRedis() as replica:
        replica.cli("REPLICAOF", "127.0.0.1", master.port)
        space, copy = Space(master, "own"), Space(replica, "own")
        await aeventually(lambda: replica.cli("INFO", "replication")["master_link_status"] == "up", within_s=10)
        async with workers(space, 2) as made:
            await made[0].add_ready(A)
            held = [ticket for worker in made for ticket in await worker.take(5)]
            give_back(held[:3])
            await aeventually(lambda: totals(copy) == {A: 7} and exact(space, made))
            assert ledger_of(copy, "w1") == made[0].ledger.counts
            give_back(held[3:])


async def test_counts_are_not_whole_for_a_while_after_redis_may_have_lost_them(
    own_redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "RESTATED_WITHIN_S", 0.3)
    async with Worker(own_redis.url, own_redis.namespace, "w1") as worker:
        assert worker.ledger.counts_are_whole, "a worker that starts has no reason to doubt them"
        own_redis.server.restart()
        await aeventually(lambda: worker.shared and worker.ledger._lost_at_s is not None)
        assert not worker.ledger.counts_are_whole
        await aeventually(lambda: worker.ledger.counts_are_whole)
        own_redis.cli("FLUSHALL")
        await aeventually(lambda: not worker.ledger.counts_are_whole)
        await aeventually(lambda: worker.ledger.counts_are_whole)
