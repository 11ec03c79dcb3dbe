"""What a host last knew of the nodes, for workers that start while Redis is away."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from pathlib import Path

import pytest

from app.nodes import Breaker, Node, Role, State
from app.store import last_known as module
from app.store.last_known import LastKnown
from app.store.snapshot import Snapshot
from tests.store.harness import Worker, held_by
from tests.support.redis import PrivateRedis, Space
from tests.support.wait import aeventually

A, B = "http://a:1", "http://b:1/prefix"
NODES = {
    A: Node(A, role=Role.Prefill, models=("m", "ü"), speed=2.5, state=State.DOWN, order=7, breaker=Breaker.OPEN),
    B: Node(B, models=("m",), state=State.READY, static=True, order=3, bootstrap_port=8998),
}
KEYS = {A: "sk-secret"}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITE_AFTER_S", 0.02)


async def written(path: Path, *snapshots: Snapshot) -> LastKnown:
    known = LastKnown(path)
    for snapshot in snapshots:
        known.keep(snapshot)
    await known.close()
    return known


async def test_what_was_kept_is_read_again_by_another(tmp_path: Path) -> None:
    await written(tmp_path / "nodes", Snapshot(41, {}, {}), Snapshot(42, NODES, KEYS))
    found = LastKnown(tmp_path / "nodes").load()
    assert found is not None
    snapshot, age_s = found
    assert snapshot.version == 0, "a version of before would be taken for newer than Redis's own"
    assert (dict(snapshot.nodes), dict(snapshot.engine_keys)) == (NODES, KEYS)
    assert 0 <= age_s < 10


async def test_it_is_written_soon_without_an_end_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "state" / "nodes"
    known = LastKnown(path)
    known.keep(Snapshot(1, NODES, KEYS))
    known.keep(Snapshot(2, {A: NODES[A]}, KEYS))
    for _ in range(200):
        if path.exists():
            break
        await asyncio.sleep(0.01)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert list(path.parent.iterdir()) == [path]
    found = known.load()
    assert found is not None and set(found[0].nodes) == {A}
    await known.close()


async def test_the_same_again_is_not_written_but_renewed(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    await written(path, Snapshot(1, NODES, KEYS))
    os.utime(path, (1_000, 1_000))
    inode = path.stat().st_ino
    await written(path, Snapshot(9, NODES, KEYS))
    found = LastKnown(path).load()
    assert path.stat().st_ino == inode and found is not None and found[1] < 60
    await written(path, Snapshot(10, NODES, {}))
    assert path.stat().st_ino != inode


@pytest.mark.parametrize("content", [b"", b"\x00", b"{}", b"\x81\xa1a\x01", b"\xff" * 100], ids=repr)
async def test_damage_is_passed_over_told_and_written_over(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "nodes"
    path.write_bytes(content)
    assert LastKnown(path).load() is None
    assert "are damaged and passed over" in caplog.text
    await written(path, Snapshot(1, NODES, KEYS))
    found = LastKnown(path).load()
    assert found is not None and set(found[0].nodes) == {A, B}
    path.write_bytes(path.read_bytes()[:-9])  # cut short by a full disk
    assert LastKnown(path).load() is None


async def test_a_directory_that_takes_no_files_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    known = LastKnown(tmp_path / "file" / "nodes")
    with caplog.at_level(logging.WARNING):
        for version in (1, 2):
            known.keep(Snapshot(version, NODES, KEYS))
            await asyncio.sleep(0.1)
    assert caplog.text.count("can't be written to --state-dir") == 1
    assert "sk-secret" not in caplog.text
    assert LastKnown(tmp_path / "none").load() is None
    await known.close()


async def test_deployments_of_one_host_have_files_of_their_own(tmp_path: Path) -> None:
    one, other = LastKnown.of(tmp_path, "redis a"), LastKnown.of(tmp_path, "redis b")
    one.keep(Snapshot(1, NODES, KEYS))
    await one.close()
    assert other.load() is None
    other.forget()
    assert LastKnown.of(tmp_path, "redis a").load() is not None
    one.forget()
    one.forget()
    assert one.load() is None


def test_half_written_files_of_killed_workers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    one, other = LastKnown.of(tmp_path, "redis a"), LastKnown.of(tmp_path, "redis b")
    for known in (one, other):
        known._write_now(Snapshot(1, NODES, KEYS))
    kept = sorted(tmp_path.iterdir())
    assert len(kept) == 2
    copy = tmp_path / f"{kept[0].name}.bak"
    old = [tmp_path / f"{path.name}.4711-0a1b2c3d" for path in kept]
    new = tmp_path / f"{kept[0].name}.4712-0a1b2c3d"
    for path in (copy, *old, new):
        path.write_bytes(b"sk-secret")
    for path in (copy, *old, *kept):
        os.utime(path, (time.time() - 7200,) * 2)
    assert one.load() is not None
    assert sorted(tmp_path.iterdir()) == sorted([copy, *kept, new])


# --- a worker that starts without Redis -----------------------------------------------------------


async def started(space: Space, name: str, known: LastKnown | None) -> Worker:
    """Without a Redis: the server of `space` is stopped."""
    worker = Worker(space.url, space.namespace, name, timeout_s=0.2, last_known=known)
    await worker.__aenter__()
    assert worker.registry.assuming
    return worker


async def test_it_serves_what_the_host_knew_and_goes_by_redis_when_it_is_there(tmp_path: Path) -> None:
    with PrivateRedis() as server:
        space = Space(server, "n")
        async with Worker(space.url, "n", "before", last_known=LastKnown(tmp_path / "nodes")) as before:
            await before.add_ready(A, models=("m",), key="sk-secret")
            await before.add_ready(B, models=("m",))
        server.cli("SAVE")
        server.kill()
        worker = await started(space, "w", LastKnown(tmp_path / "nodes"))
        assert set(worker.registry.snapshot.nodes) == {A, B}
        assert worker.registry.snapshot.engine_keys == {A: "sk-secret"}
        tickets = await worker.take(4, "m")
        assert held_by([worker]) == {A: 2, B: 2}
        server.start()  # as it was: but meanwhile another host has removed one of them
        async with Worker(space.url, "n", "other") as other:
            await other.registry.refresh()
            await other.registry.remove(B)
            version = other.registry.snapshot.version
            await aeventually(lambda: set(worker.registry.snapshot.nodes) == {A}, within_s=5)
            await worker.registry.verify()
            assert set(other.registry.snapshot.nodes) == {A}
            assert worker.registry.snapshot.version == other.registry.snapshot.version == version
        for ticket in tickets:
            ticket.release(succeeded=True)
        await worker.__aexit__(None, None, None)


async def test_an_empty_redis_gets_what_the_host_knew_unless_somebody_knows_better(tmp_path: Path) -> None:
    with PrivateRedis() as server:
        space = Space(server, "n")
        async with Worker(space.url, "n", "before", last_known=LastKnown(tmp_path / "nodes")) as before:
            await before.add_ready(A, models=("m",), key="sk-secret")
            await before.add_ready(B, models=("m",))
            await before.registry.remove(B)
            newest = before.registry.snapshot.version
            server.kill()
            # One with the file of before B was removed, while `before` lives and knows better.
            old = Snapshot(0, {A: before.registry.snapshot.nodes[A], B: Node(B, models=("m",))}, {})
            await written(tmp_path / "old", old)
            worker = await started(space, "w", LastKnown(tmp_path / "old"))
            server.start()
            await aeventually(lambda: not worker.registry.assuming, within_s=5)
            await aeventually(
                lambda: (
                    space.cli("SMEMBERS", space.key("nodes")) == {A}
                    and int(space.cli("GET", space.key("version"))) >= newest
                    and set(worker.registry.snapshot.nodes) == {A}
                ),
                within_s=8,
            )
            await worker.__aexit__(None, None, None)
        server.kill()
        alone = await started(space, "w2", LastKnown(tmp_path / "nodes"))
        server.start()
        await aeventually(lambda: alone.registry.snapshot.version == 1, within_s=5)
        assert space.cli("SMEMBERS", space.key("nodes")) == {A}
        assert space.cli("HGETALL", space.key("engine_keys")) == {A: "sk-secret"}
        await alone.__aexit__(None, None, None)


async def test_nodes_that_settings_name_are_assumed_only_until_redis_is_there() -> None:
    with PrivateRedis() as server:
        space = Space(server, "n")
        server.kill()
        worker = await started(space, "w", None)
        worker.registry.assume(NODES[B])
        assert [ticket.url for ticket in await worker.take(1, "m")] == [B]
        server.start()
        await aeventually(lambda: not worker.registry.assuming, within_s=5)
        assert not worker.registry.snapshot.nodes, "registering them is another's work"
        worker.registry.assume(NODES[B])
        assert not worker.registry.snapshot.nodes
        assert space.cli("EXISTS", space.key("nodes")) == 0
        await worker.__aexit__(None, None, None)


async def test_what_is_written_slowly_does_not_come_after_what_is_newer(tmp_path: Path) -> None:
    last, begun, go = LastKnown(tmp_path / "nodes"), threading.Event(), threading.Event()
    write = last._write_now

    def slowly(snapshot: Snapshot) -> None:
        if not begun.is_set():
            begun.set()
            go.wait(5)
        write(snapshot)

    last._write_now = slowly  # type: ignore[method-assign]
    for state in (State.PENDING, State.READY):
        last.keep(Snapshot(1, {A: Node(A, models=("m",), state=state)}, {}))
        await asyncio.to_thread(begun.wait, 5)
    asyncio.get_running_loop().call_later(0.1, go.set)
    await last.close()
    found = LastKnown(tmp_path / "nodes").load()
    assert found is not None and found[0].nodes[A].state == State.READY


async def test_what_is_being_written_is_waited_for(tmp_path: Path) -> None:
    last, begun = LastKnown(tmp_path / "nodes"), threading.Event()
    write = last._write_now

    def slowly(snapshot: Snapshot) -> None:
        begun.set()
        time.sleep(0.2)
        write(snapshot)

    last._write_now = slowly  # type: ignore[method-assign]
    last.keep(Snapshot(1, {A: NODES[A]}, {}))
    await asyncio.to_thread(begun.wait, 5)
    await last.close()
    assert (tmp_path / "nodes").exists()


async def test_what_was_about_to_be_written_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the thread has not begun when the worker leaves."""
    last, to_thread = LastKnown(tmp_path / "nodes"), asyncio.to_thread

    async def never_begins(*_: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(module.asyncio, "to_thread", never_begins)
    last.keep(Snapshot(1, NODES, {}))
    await asyncio.sleep(0.1)
    monkeypatch.setattr(module.asyncio, "to_thread", to_thread)
    await last.close()
    found = LastKnown(tmp_path / "nodes").load()
    assert found is not None and found[0].nodes.keys() == NODES.keys()
