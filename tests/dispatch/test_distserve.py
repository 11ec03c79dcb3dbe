"""Links made ahead, the table, and what is left behind cleared away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from app.dispatch.handover import links as links_module
from app.errors import BadRequest, EngineRefused
from app.nodes import Role, State
from tests.dispatch.fakes import D0, D1, P0, P1
from tests.dispatch.linking import PAIR, LinkEngines, Linker, counted, hold, record, register
from tests.store.harness import workers
from tests.support.redis import Space
from tests.support.wait import aeventually


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "PAUSES_S", (0.001, 0.002))
    monkeypatch.setattr(links_module, "LOOK_EVERY_S", 0.002)


@asynccontextmanager
async def serving(space: Space, count: int = 1) -> AsyncIterator[tuple[LinkEngines, list[Linker]]]:
    engines = LinkEngines()
    async with workers(space, count) as made:
        await register(made[0], prefill=2, decode=2)
        for worker in made:
            await worker.registry.refresh()
        linkers = [Linker(worker, engines) for worker in made]
        yield engines, linkers
        for linker in linkers:
            await linker.close()


async def test_a_warm_up_links_every_pair_of_the_same_model_and_says_what_became_of_each(redis: Space) -> None:
    async with serving(redis) as (engines, (linker,)):
        await linker.worker.add_ready("http://p9:1", role=Role.Prefill, models=("other",))
        await linker.worker.add_ready("http://h9:1", role=Role.Hybrid)
        down = linker.worker.registry.snapshot.nodes[D1]
        assert await linker.worker.registry.set_state(down, State.DOWN)
        engines.failures["connect", P1] = [EngineRefused(f"engine {P1} refused the connection")] * 3
        found = await linker.distserve.warm_up()
        why = f"the link could not be made: engine {P1} refused the connection"
        assert found == {
            "SUCCESS": False,
            "links": {
                f"{P0}|{D0}": {"state": "connected", "error": None},
                f"{P1}|{D0}": {"state": "failed", "error": why},
            },
        }


async def test_a_warm_up_of_what_is_linked_calls_nobody(redis: Space) -> None:
    async with serving(redis, 2) as (engines, (first, second)):
        found = await first.distserve.warm_up()
        assert found["SUCCESS"] is True and len(found["links"]) == 4
        called = len(engines.calls)
        assert await second.distserve.warm_up() == found
        assert len(engines.calls) == called


async def test_a_warm_up_without_a_pair_is_no_success_and_names_what_is_missing(redis: Space) -> None:
    async with workers(redis, 1) as (worker,):
        linker = Linker(worker, LinkEngines())

        async def reason() -> str:
            found = await linker.distserve.warm_up()
            assert (found["SUCCESS"], found["links"]) == (False, {})
            return str(found["reason"])

        assert await reason() == "no Prefill and no Decode node is registered and up"
        await worker.add_ready(P0, role=Role.Prefill)
        assert await reason() == "no Decode node is registered and up"
        await worker.add_ready(D0, role=Role.Decode, models=("other",))
        assert await reason() == "no Prefill and Decode node have a model in common"


async def test_the_table_shows_every_link_the_sessions_and_the_counters(redis: Space) -> None:
    async with serving(redis) as (engines, (linker,)):
        engines.failures["connect", P1] = [EngineRefused("refused")] * 3
        await linker.links.ensure(P0, D0)
        await asyncio.gather(linker.links.ensure(P1, D0), return_exceptions=True)
        await linker.links.ensure(P0, D1)
        await linker.worker.add_ready(D1, role=Role.Decode)  # another process there now
        hold(linker, P0, 7, D0)
        await counted(linker.worker)
        found = await linker.distserve.table()
        states = {pair: link["state"] for pair, link in found["links"].items()}
        assert states == {f"{P0}|{D0}": "connected", f"{P1}|{D0}": "failed", f"{P0}|{D1}": "void"}
        good, bad = found["links"][PAIR], found["links"][f"{P1}|{D0}"]
        assert (good["owner"], good["error"], bad["took_ms"]) == ("w1", None, None)
        assert "refused" in bad["error"] and good["since_ms"] > 1_600_000_000_000
        assert (found["sessions"], found["counts"]) == (1, {"links_made": 2, "links_failed": 1})


async def test_garbage_is_what_is_older_than_the_age(redis: Space) -> None:
    async with serving(redis) as (engines, (linker,)):
        for session in (1, 2):
            hold(linker, P0, session, D0)
        await counted(linker.worker)
        old = f'{{"decode":"{D0}","worker":"w1","life":{linker.sessions.life_of(P0)},"at_ms":1}}'
        redis.cli("HSET", redis.key("migrations"), f"{P0}|2", old)
        found = await linker.distserve.collect()
        assert found == {"freed": [{"prefill": P0, "session": 2}], "failed": [], "kept": 1}
        assert engines.calls == [("free", P0, "2")]


@pytest.mark.parametrize("call", ["warm_up", "collect"])
async def test_without_links_there_is_nothing_to_warm_or_to_collect(redis: Space, call: str) -> None:
    async with serving(redis) as (engines, (linker,)):
        linker.distserve._linked = False
        with pytest.raises(BadRequest, match="--pd-protocol lmdeploy only"):
            await getattr(linker.distserve, call)()
        assert (await linker.distserve.table())["links"] == {} and engines.calls == []


@pytest.mark.parametrize("removed", [P0, D0])
async def test_links_of_a_removed_node_are_undone_once_at_both_ends(redis: Space, removed: str) -> None:
    async with serving(redis, 2) as (engines, (first, second)):
        await first.distserve.warm_up()
        engines.calls.clear()
        await first.worker.registry.remove(removed)
        await second.worker.registry.refresh()
        await asyncio.gather(*(linker.distserve.tidy() for linker in (first, second, first, second)))
        gone = [(P0, d) for d in (D0, D1)] if removed == P0 else [(p, D0) for p in (P0, P1)]
        assert sorted(engines.calls) == sorted(call for p, d in gone for call in (("drop", p, d), ("drop", d, p)))
        assert len(redis.cli("HKEYS", redis.key("links"))) == 2


async def test_tidying_leaves_what_is_true_or_being_made(redis: Space) -> None:
    async with serving(redis, 2) as (engines, (first, second)):
        await first.distserve.warm_up()
        await second.worker.links.claim(f"http://gone:1|{D0}", "none|1", 1, wait_s=60)
        engines.calls.clear()
        await first.distserve.tidy()
        assert engines.calls == [] and len(redis.cli("HKEYS", redis.key("links"))) == 5


async def test_a_failed_link_of_a_removed_node_is_only_struck_off(redis: Space) -> None:
    async with serving(redis) as (engines, (linker,)):
        engines.failures["engine_info", P0] = [EngineRefused("refused")] * 3
        await asyncio.gather(linker.links.ensure(P0, D0), return_exceptions=True)
        assert record(redis).state == "failed"
        engines.calls.clear()
        await linker.worker.registry.remove(P0)
        await linker.distserve.tidy()
        assert engines.calls == [] and redis.cli("HKEYS", redis.key("links")) == []


async def test_links_that_a_worker_died_undoing_are_undone_by_the_next(redis: Space) -> None:
    async with serving(redis, 2) as (engines, (first, second)):
        await first.links.ensure(P0, D0)
        await first.worker.registry.remove(P0)
        await second.worker.registry.refresh()
        engines.gates["drop"] = asyncio.Event()
        task = asyncio.create_task(first.distserve.tidy())
        while not engines.counts["drop"]:
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await first.worker.ledger.close()  # its lease is gone too
        engines.calls.clear()
        engines.gates["drop"].set()
        await second.distserve.tidy()
        assert sorted(engines.calls) == [("drop", D0, P0), ("drop", P0, D0)]
        assert redis.cli("HKEYS", redis.key("links")) == []


async def test_tidying_frees_the_sessions_of_dead_workers_only(redis: Space) -> None:
    async with serving(redis, 2) as (engines, (first, second)):
        hold(first, P0, 1, D0)
        hold(second, P0, 2, D0)
        for linker in (first, second):
            await counted(linker.worker)
        await second.distserve.tidy()
        assert engines.calls == []
        await first.worker.ledger.close()
        await second.distserve.tidy()
        assert engines.calls == [("free", P0, "1")]


async def test_each_worker_looks_after_its_own(redis: Space) -> None:
    async with serving(redis, 2) as (engines, (first, second)):
        for linker, number in ((first, 1), (second, 2)):
            hold(linker, P0, number)
            await counted(linker.worker)
        await first.worker.add_ready(P0, role=Role.Prefill)
        first.distserve.tidy_own()
        await counted(first.worker)
        assert set(await second.worker.migrations.all()) == {f"{P0}|2"} and engines.calls == []


async def test_a_link_over_which_a_cache_is_on_its_way_is_undone_afterwards(redis: Space) -> None:
    async with serving(redis, 2) as (engines, (first, second)):
        await first.links.ensure(P0, D0)
        await first.links.ensure(P0, D1)
        first.worker.handing.begin(P0, D0)
        await counted(first.worker)
        await first.worker.registry.remove(P0)
        await second.worker.registry.refresh()
        engines.calls.clear()
        await second.distserve.tidy()
        assert sorted(engines.calls) == [("drop", D1, P0), ("drop", P0, D1)]
        first.worker.handing.end(P0, D0)
        await aeventually(lambda: redis.cli("EXISTS", redis.key(f"handing:{first.worker.name}")) == 0)
        await second.distserve.tidy()
        assert engines.calls[2:] == [("drop", P0, D0), ("drop", D0, P0)]


async def test_who_was_stopped_in_the_middle_of_undoing_does_not_undo_the_next_link(redis: Space) -> None:
    async with serving(redis, 2) as (engines, (first, second)):
        await first.links.ensure(P0, D0)
        await first.worker.registry.remove(P0)
        engines.gates["drop"] = asyncio.Event()
        task = asyncio.create_task(first.distserve.tidy())
        while not engines.counts["drop"]:
            await asyncio.sleep(0.001)
        # Meanwhile its claim runs out, and the pair is linked anew.
        link = record(redis)
        link.until_ms = 1
        redis.cli("HSET", redis.key("links"), PAIR, msgspec.json.encode(link).decode())
        await second.worker.add_ready(P0, role=Role.Prefill)
        await second.links.ensure(P0, D0)
        engines.gates["drop"].set()
        await task
        assert engines.counts["drop"] == 1, "the one that was under way"
        assert record(redis).state == "connected"
