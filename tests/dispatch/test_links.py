"""Linking LMDeploy's engines: once a pair for all workers, in which order, how often tried, and how undone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from app.dispatch.handover import links as links_module
from app.dispatch.handover.protocol import LinkFailed
from app.errors import EngineAnswered, EngineBroke, EngineRefused, StoreUnavailable
from app.nodes import Role, State
from app.store import ledger as ledger_module
from app.store.links import Link, read_link
from tests.dispatch.fakes import D0, P0, P1
from tests.dispatch.linking import ONCE, PAIR, LinkEngines, Linker, counted, record, register
from tests.store.harness import workers
from tests.support.redis import Space
from tests.support.wait import aeventually


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "PAUSES_S", (0.001, 0.002))
    monkeypatch.setattr(links_module, "LOOK_EVERY_S", 0.002)
    monkeypatch.setattr(links_module, "DOUBT_EVERY_S", 0.0)


@asynccontextmanager
async def linking(space: Space, count: int = 1, **rules: Any) -> AsyncIterator[tuple[LinkEngines, list[Linker]]]:
    """`count` workers that know P0 and D0."""
    engines = LinkEngines()
    async with workers(space, count) as made:
        await register(made[0])
        for worker in made:
            await worker.registry.refresh()
        linkers = [Linker(worker, engines, **rules) for worker in made]
        yield engines, linkers
        for linker in linkers:
            await linker.close()


def refusals(engines: LinkEngines, call: str, url: str, count: int) -> None:
    engines.failures[call, url] = [EngineRefused(f"engine {url} refused the connection") for _ in range(count)]


# --- making -----------------------------------------------------------------------------------------


async def test_both_ends_are_asked_prepared_and_connected_in_this_order(redis: Space) -> None:
    async with linking(redis) as (engines, (linker,)):
        await linker.ensure()
        # Source: lmdeploy/pytorch/disagg/conn/proxy_conn.py.
        assert engines.calls == [
            ("engine_info", P0),
            ("engine_info", D0),
            ("initialize", P0, D0),
            ("initialize", D0, P0),
            ("connect", P0, D0),
            ("connect", D0, P0),
        ]
        link = record(redis)
        assert (link.state, link.owner, link.error) == ("connected", "w1", "")
        assert link.lives == linker.links.lives_of(P0, D0) and link.took_ms < 5000
        assert await counted(linker.worker) == {"links_made": 1}
        linker.worker.figures.note()
        assert (await linker.worker.registry.status())[D0].stages["link"]["count"] == 1
        assert repr(linker.links) == "<Links made=1 making=0>"


async def test_a_link_is_made_once_for_all_requests_of_all_workers(redis: Space) -> None:
    async with linking(redis, 3) as (engines, linkers):
        await asyncio.gather(*(linker.ensure() for linker in linkers for _ in range(20)))
        assert engines.counts == ONCE
        assert await counted(linkers[0].worker) == {"links_made": 1}
        assert all(linker.links.made(P0, D0) for linker in linkers)


async def test_what_is_linked_is_not_looked_at_again(redis: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    async with linking(redis) as (engines, (linker,)):
        assert not linker.links.made(P0, D0)
        await linker.ensure()

        async def claim(*_: Any, **__: Any) -> Any:
            raise AssertionError("Redis was asked")

        monkeypatch.setattr(linker.worker.links, "claim", claim)
        await linker.ensure()
        assert engines.counts == ONCE


async def test_each_engine_gets_its_own_key_else_the_common_one(redis: Space) -> None:
    async with linking(redis) as (engines, (linker,)):
        await linker.worker.add_ready(P0, role=Role.Prefill, key="own")
        await linker.ensure()
        assert engines.keys == {(P0, "own"), (D0, "common")}
        await linker.worker.registry.remove(P0)
        assert linker.links.key_of(P0) == "own", "its links are still to be undone"


# --- tries ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["engine_info", "initialize", "connect"])
@pytest.mark.parametrize("url", [P0, D0])
async def test_a_try_that_fails_is_made_again_from_the_beginning(redis: Space, call: str, url: str) -> None:
    async with linking(redis) as (engines, (linker,)):
        refusals(engines, call, url, 2)
        await linker.ensure()
        assert engines.calls.count(("engine_info", P0)) == 3
        assert record(redis).state == "connected"
        assert await counted(linker.worker) == {"links_made": 1}


async def test_after_all_tries_the_engine_to_blame_is_named(redis: Space) -> None:
    async with linking(redis) as (engines, (linker,)):
        refusals(engines, "connect", D0, 3)
        with pytest.raises(LinkFailed, match=f"could not be made: engine {D0} refused") as caught:
            await linker.ensure()
        assert (caught.value.url, caught.value.status) == (D0, 502)
        assert engines.counts["connect"] == 6
        link = record(redis)
        assert link.state == "failed" and D0 in link.error
        assert await counted(linker.worker) == {"links_failed": 1}


async def test_tp_sizes_that_differ_are_refused_with_the_reason_and_not_tried_again(redis: Space) -> None:
    async with linking(redis) as (engines, (linker,)):
        engines.info = {P0: {"tp_size": 2}, D0: {"tp_size": 4}}
        with pytest.raises(LinkFailed, match=f"{P0} has tp_size 2 and {D0} has 4"):
            await linker.ensure()
        assert engines.counts == {"engine_info": 2}
        assert "tp_size 2" in record(redis).error


@pytest.mark.parametrize("answered", [404, 405, 501, 503])
async def test_an_engine_without_distserve_fails_at_the_first_try_with_its_reason(redis: Space, answered: int) -> None:
    async with linking(redis) as (engines, (linker,)):
        words = f"engine {D0} answered {answered} to /distserve/engine_info: Not Found"
        engines.failures["engine_info", D0] = [EngineAnswered(words, answered=answered)] * 3
        with pytest.raises(LinkFailed, match=words) as caught:
            await linker.ensure()
        assert caught.value.url == D0
        assert engines.calls.count(("engine_info", D0)) == (3 if answered == 503 else 1)
        assert words in record(redis).error


async def test_a_link_that_fails_is_a_warning_once_a_minute(redis: Space, caplog: pytest.LogCaptureFixture) -> None:
    async with linking(redis) as (engines, (linker,)):
        refusals(engines, "connect", D0, 60)
        for _ in range(3):
            with pytest.raises(LinkFailed):
                await linker.ensure()
            redis.cli("HDEL", redis.key("links"), PAIR)
        assert await counted(linker.worker) == {"links_failed": 3}
        said = [line.getMessage() for line in caplog.records if line.levelname == "WARNING"]
        assert said == [
            f"no link between {P0} and {D0}: the link could not be made: engine {D0} refused the connection"
        ]


async def test_linking_ends_in_time_whatever_hangs(redis: Space) -> None:
    async with linking(redis, timeout_s=0.2) as (engines, (linker,)):
        engines.gates["initialize"] = asyncio.Event()
        begun_s = time.monotonic()
        with pytest.raises(LinkFailed, match=f"engine {P0} does not answer") as caught:
            await linker.ensure()
        assert 0.14 < time.monotonic() - begun_s < 3, "a moment before its end, so that the engine is named"
        assert caught.value.url == P0
        assert record(redis).state == "failed"


async def test_a_hang_after_a_failure_is_told_as_the_hang(redis: Space) -> None:
    async with linking(redis, timeout_s=0.3) as (engines, (linker,)):
        refusals(engines, "initialize", P0, 1)
        engines.gates["connect"] = asyncio.Event()
        with pytest.raises(LinkFailed, match=f"engine {P0} does not answer"):
            await linker.ensure()


async def test_for_a_moment_after_a_failure_everybody_is_told_its_reason_and_then_it_is_tried_again(
    redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links_module, "HOLD_OFF_S", (60.0, 60.0))
    async with linking(redis, 2) as (engines, (first, second)):
        refusals(engines, "engine_info", D0, 3)
        with pytest.raises(LinkFailed):
            await first.ensure()
        asked = len(engines.calls)
        for linker in (first, second):
            with pytest.raises(LinkFailed, match=f"engine {D0} refused") as caught:
                await linker.ensure()
            assert caught.value.url == D0, "the one to blame, so that another is taken in its place"
        assert len(engines.calls) == asked
        link = record(redis)
        link.until_ms -= 60_000
        assert await second.worker.links.settle(PAIR, redis.cli("HGET", redis.key("links"), PAIR), link)
        await second.ensure()
        await first.ensure()
        assert engines.counts["connect"] == 2


async def fail_again(space: Space, engines: LinkEngines, linker: Linker) -> Link:
    """One more failure in a row, at once; the record of it."""
    text = space.cli("HGET", space.key("links"), PAIR)
    if text:
        link = read_link(text)
        link.until_ms = 0
        assert await linker.worker.links.settle(PAIR, text, link)
    refusals(engines, "engine_info", P0, 3)
    with pytest.raises(LinkFailed, match=f"engine {P0} refused"):
        await linker.ensure()
    found: Link = record(space)
    return found


async def test_after_each_further_failure_it_is_left_alone_for_longer(redis: Space) -> None:
    async with linking(redis) as (engines, (linker,)):
        pauses_ms = []
        for n in range(1, 7):
            link = await fail_again(redis, engines, linker)
            assert link.failures == n
            pauses_ms.append(link.until_ms - link.since_ms)
        # 0.2 s, four times as long each time, 30 s at most; and what the tries took.
        for pause_ms, expected_ms in zip(pauses_ms, [200, 800, 3200, 12_800, 30_000, 30_000], strict=True):
            assert expected_ms <= pause_ms < expected_ms + 150
        text = redis.cli("HGET", redis.key("links"), PAIR)
        assert await linker.worker.links.settle(PAIR, text, Link("failed", link.lives, link.version, failures=6))
        await linker.ensure()
        assert record(redis).state == "connected" and record(redis).failures == 0


async def test_a_node_that_fails_for_a_day_is_a_failure_as_on_the_first_minute(redis: Space) -> None:
    # 30 s apart, 514 failures are 4.3 hours.
    async with linking(redis) as (engines, (linker,)):
        link = await fail_again(redis, engines, linker)
        link.failures = 3000
        redis.cli("HSET", redis.key("links"), PAIR, msgspec.json.encode(link).decode())
        link = await fail_again(redis, engines, linker)
        assert link.failures == 3001 and 30_000 <= link.until_ms - link.since_ms < 30_150


# --- waiting ----------------------------------------------------------------------------------------


async def test_the_others_wait_for_the_worker_that_links(redis: Space) -> None:
    async with linking(redis, 2) as (engines, (first, second)):
        engines.gates["connect"] = asyncio.Event()
        begun = asyncio.create_task(first.ensure())
        await aeventually(lambda: engines.counts["connect"] == 1)
        waits = [asyncio.create_task(second.ensure()) for _ in range(5)]
        await asyncio.sleep(0.03)
        assert not any(task.done() for task in waits) and record(redis).state == "connecting"
        engines.gates["connect"].set()
        await asyncio.gather(begun, *waits)
        assert engines.counts == ONCE


async def test_the_others_are_told_of_a_failure_too(redis: Space) -> None:
    async with linking(redis, 2) as (engines, (first, second)):
        engines.gates["connect"] = asyncio.Event()
        refusals(engines, "connect", P0, 3)
        tasks = [asyncio.create_task(linker.ensure()) for linker in (first, second)]
        await aeventually(lambda: engines.counts["connect"] == 1)
        engines.gates["connect"].set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [LinkFailed, LinkFailed]
        assert engines.counts["connect"] == 3, "one worker's tries"


async def test_waiting_for_another_worker_ends_in_time(redis: Space) -> None:
    async with linking(redis, 2, timeout_s=0.1) as (engines, (first, second)):
        claim = await first.worker.links.claim(PAIR, first.links.lives_of(P0, D0), 1, wait_s=60)
        assert claim.link.state == "connecting"
        with pytest.raises(LinkFailed, match=r"within 0\.1 s"):
            await second.ensure()
        assert engines.calls == []


async def test_the_link_of_a_worker_that_died_over_it_is_taken_over(redis: Space) -> None:
    async with linking(redis, 2) as (engines, (first, second)):
        await first.worker.links.claim(PAIR, first.links.lives_of(P0, D0), 1, wait_s=60)
        await first.worker.ledger.close()  # its lease is gone
        await second.ensure()
        assert engines.counts == ONCE and record(redis).owner == "w2"


@pytest.mark.parametrize("step", ["engine_info", "initialize", "connect"])
async def test_a_worker_that_was_stopped_over_it_takes_no_further_step_once_it_is_anothers(
    redis: Space, step: str
) -> None:
    async with linking(redis, 2) as (engines, (first, second)):
        engines.gates[step] = asyncio.Event()
        task = asyncio.create_task(first.ensure())
        await aeventually(lambda: engines.counts[step] == 1)
        link = record(redis)
        link.until_ms = 1
        redis.cli("HSET", redis.key("links"), PAIR, msgspec.json.encode(link).decode())
        stopped, engines.gates = engines.gates, {}
        await second.ensure()
        calls = len(engines.calls)
        stopped[step].set()
        await task
        # What it asked for before it was stopped; `engine_info` changes nothing at an engine.
        assert [call for call in engines.calls[calls:] if call[0] != "engine_info"] == []
        assert (record(redis).state, record(redis).owner) == ("connected", "w2")
        assert await counted(first.worker) == {"links_made": 1}


async def test_a_link_is_made_once_though_redis_loses_everything_over_it(own_redis: Space) -> None:
    async with linking(own_redis, 4) as (engines, linkers):
        engines.gates["connect"] = asyncio.Event()
        tasks = [asyncio.create_task(linkers[0].ensure())]
        await aeventually(lambda: engines.counts["connect"] == 1)
        own_redis.cli("FLUSHALL")
        tasks += [asyncio.create_task(linker.ensure()) for linker in linkers[1:]]
        await asyncio.sleep(1.5)  # all have joined again, and said what they hold
        engines.gates["connect"].set()
        await asyncio.gather(*tasks)
        assert engines.counts == ONCE
        assert (record(own_redis).state, record(own_redis).owner) == ("connected", "w1")


async def test_nobody_claims_a_link_before_all_have_said_theirs_again(own_redis: Space) -> None:
    async with linking(own_redis, 2) as (engines, (first, second)):
        engines.gates["connect"] = asyncio.Event()
        task = asyncio.create_task(first.ensure())
        await aeventually(lambda: engines.counts["connect"] == 1)
        slow = first.worker.ledger
        assert slow._keeper is not None
        slow._keeper.cancel()  # it notices later than the others that it has to say anything
        own_redis.cli("FLUSHALL")
        await aeventually(lambda: own_redis.cli("GET", own_redis.key("restating")) == "w2")
        other = asyncio.create_task(second.ensure())
        await asyncio.sleep(0.3)
        assert own_redis.cli("HGETALL", own_redis.key("links")) == {}
        slow._restate_soon()
        await aeventually(lambda: record(own_redis).owner == "w1")
        engines.gates["connect"].set()
        await asyncio.gather(task, other)
        assert engines.counts == ONCE


async def test_a_link_whose_claim_nobody_says_again_is_claimed_anew(
    own_redis: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "RESTATED_WITHIN_S", 0.4)
    async with linking(own_redis, 1) as (engines, (linker,)):
        own_redis.cli("FLUSHALL")
        await aeventually(lambda: own_redis.cli("GET", own_redis.key("restating")) == "w1")
        await linker.ensure()
        assert engines.counts == ONCE and record(own_redis).owner == "w1"
        assert own_redis.cli("EXISTS", own_redis.key("restating")) == 0


@pytest.mark.parametrize("words", [("SET", "w9"), ("LPUSH", "x"), ("HSET", "a", "b")])
async def test_rubbish_in_the_place_of_the_mark_holds_nobody_up(own_redis: Space, words: tuple[str, ...]) -> None:
    async with linking(own_redis, 1) as (engines, (linker,)):
        own_redis.cli(words[0], own_redis.key("restating"), *words[1:])
        await linker.ensure()
        assert engines.counts == ONCE
        own_redis.cli("HDEL", own_redis.key("sessions"), "w1")
        await aeventually(lambda: 0 < own_redis.cli("PTTL", own_redis.key("restating")) <= 3000)


async def test_the_table_is_back_after_redis_has_lost_everything(own_redis: Space) -> None:
    async with linking(own_redis, 2) as (engines, (first, second)):
        await first.ensure()
        before = record(own_redis)
        own_redis.cli("FLUSHALL")
        await aeventually(lambda: record(own_redis) == before, within_s=5)
        await second.ensure()
        assert engines.counts == ONCE
        await first.worker.registry.remove(P0)
        await first.worker.add_ready(P1, role=Role.Prefill)
        await first.ensure(P1)
        assert set(first.worker.links.stands) == {f"{P1}|{D0}"}, "that of the removed node is not brought back"


@pytest.mark.parametrize("gone", [P0, D0])
async def test_nobody_waits_for_the_link_of_a_node_that_was_taken_out(redis: Space, gone: str) -> None:
    async with linking(redis, 2) as (engines, (first, second)):
        await first.worker.links.claim(PAIR, first.links.lives_of(P0, D0), 1, wait_s=60)
        task = asyncio.create_task(second.ensure())
        await asyncio.sleep(0.03)
        assert not task.done()
        await second.worker.registry.remove(gone)
        with pytest.raises(LinkFailed, match=f"{gone} was taken out") as caught:
            await asyncio.wait_for(task, 1)
        assert caught.value.url == gone and engines.calls == []


async def test_of_two_that_do_not_match_the_one_is_to_blame_that_matches_with_fewer(redis: Space) -> None:
    async with linking(redis) as (engines, (linker,)):
        await linker.worker.add_ready(P1, role=Role.Prefill)
        engines.info[D0] = {"tp_size": 2, "of": D0}
        blamed = []
        for prefill in (P0, P1, P0):
            redis.cli("DEL", redis.key("links"))
            with pytest.raises(LinkFailed, match="tp_size") as caught:
                await linker.ensure(prefill)
            blamed.append(caught.value.url)
        assert blamed == [P0, D0, D0], "of the first two nobody can tell"


async def test_who_leaves_ends_nobodys_link(redis: Space) -> None:
    async with linking(redis) as (engines, (linker,)):
        engines.gates["connect"] = asyncio.Event()
        tasks = [asyncio.create_task(linker.ensure()) for _ in range(2)]
        await aeventually(lambda: engines.counts["connect"] == 1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        engines.gates["connect"].set()
        await aeventually(lambda: record(redis).state == "connected")
        assert engines.counts == ONCE


async def test_a_worker_that_stops_over_it_leaves_the_link_to_the_others_at_once(redis: Space) -> None:
    async with linking(redis, 2) as (engines, (first, second)):
        engines.gates["connect"] = asyncio.Event()
        task = asyncio.create_task(first.ensure())
        await aeventually(lambda: engines.counts["connect"] == 1)
        await first.close()
        await asyncio.gather(task, return_exceptions=True)
        assert (record(redis).state, record(redis).error) == ("failed", "the worker that made it stopped")
        engines.gates["connect"].set()
        await second.ensure()
        assert record(redis).owner == "w2"


# --- Redis away -------------------------------------------------------------------------------------


async def test_r96_while_redis_is_away_a_worker_links_for_itself(redis: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    async with linking(redis) as (engines, (linker,)):

        async def away(*_: Any, **__: Any) -> Any:
            raise StoreUnavailable("Redis can't be used")

        monkeypatch.setattr(linker.worker.links, "claim", away)
        await asyncio.gather(*(linker.ensure() for _ in range(5)))
        assert engines.counts == ONCE
        await linker.ensure()
        assert engines.counts == ONCE


async def test_r96_redis_that_goes_away_over_it_costs_nothing(redis: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    async with linking(redis) as (engines, (linker,)):

        async def away(*_: Any, **__: Any) -> Any:
            raise StoreUnavailable("Redis can't be used")

        monkeypatch.setattr(linker.worker.links, "settle", away)
        await linker.ensure()
        assert engines.counts == ONCE and linker.links.made(P0, D0)


# --- lives ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", [P0, D0])
async def test_an_engine_that_registers_again_makes_its_link_void_on_all_workers(redis: Space, url: str) -> None:
    async with linking(redis, 2) as (engines, (first, second)):
        await asyncio.gather(first.ensure(), second.ensure())
        await first.worker.add_ready(url, role=Role.Prefill if url == P0 else Role.Decode)
        await second.worker.registry.refresh()
        assert not first.links.made(P0, D0) and not second.links.made(P0, D0)
        await asyncio.gather(first.ensure(), second.ensure())
        assert engines.counts == {name: 2 * count for name, count in ONCE.items()}
        assert record(redis).lives == second.links.lives_of(P0, D0)


async def test_a_link_survives_the_workers_that_made_it(redis: Space) -> None:
    async with linking(redis) as (engines, (linker,)):
        await linker.ensure()
        async with workers(redis, 1) as (again,):
            await Linker(again, engines).ensure()
        assert engines.counts == ONCE


async def test_a_worker_that_has_not_heard_of_a_new_life_does_not_link_the_old_one(redis: Space) -> None:
    async with linking(redis, 2) as (engines, (first, second)):
        stale = second.worker.registry.snapshot
        await first.worker.add_ready(P0, role=Role.Prefill)
        await first.ensure()
        second.worker.registry.snapshot = stale
        await second.ensure()
        assert engines.counts == ONCE
        assert second.links.made(P0, D0) and second.links.lives_of(P0, D0) == record(redis).lives


async def test_who_comes_with_a_new_life_does_not_make_do_with_the_link_of_an_old_one(redis: Space) -> None:
    async with linking(redis) as (engines, (linker,)):
        engines.gates["connect"] = asyncio.Event()
        old = asyncio.create_task(linker.ensure())
        await aeventually(lambda: engines.counts["connect"] == 1)
        await linker.worker.add_ready(P0, role=Role.Prefill)
        new = asyncio.create_task(linker.ensure())
        await asyncio.sleep(0.01)
        engines.gates["connect"].set()
        await asyncio.gather(old, new)
        assert linker.links.made(P0, D0), "linked in their present lives, says ensure"
        assert record(redis).lives == linker.links.lives_of(P0, D0)


async def test_a_record_of_a_registry_version_that_never_was_is_somebodys_edit_and_ends_nothing(redis: Space) -> None:
    async with linking(redis, timeout_s=0.3) as (engines, (linker,)):
        redis.cli("HSET", redis.key("links"), PAIR, '{"state":"connected","lives":"8|9","version":999999}')
        await linker.ensure()
        assert engines.counts == ONCE and record(redis).state == "connected"


# --- doubt ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", [P0, D0])
async def test_an_engine_that_answers_with_another_identity_gets_a_new_life(redis: Space, url: str) -> None:
    async with linking(redis) as (engines, (linker,)):
        await linker.ensure()
        lives = linker.links.lives_of(P0, D0).split("|")
        engines.info[url] = {"tp_size": 1, "of": url, "port": 2}
        linker.links.doubt(P0, D0)
        await aeventually(lambda: not linker.links.made(P0, D0))
        after = linker.links.lives_of(P0, D0).split("|")
        assert [a != b for a, b in zip(lives, after, strict=True)] == [url == P0, url == D0]
        assert linker.worker.registry.snapshot.nodes[url].state == State.READY
        await linker.ensure()
        assert engines.counts["connect"] == 4


async def test_engines_that_are_still_the_same_keep_their_link(redis: Space) -> None:
    async with linking(redis) as (engines, (linker,)):
        await linker.ensure()
        engines.gates["engine_info"] = asyncio.Event()
        for _ in range(5):
            linker.links.doubt(P0, D0)
        await asyncio.sleep(0.02)
        engines.gates["engine_info"].set()
        await aeventually(lambda: engines.counts["engine_info"] == 4)
        await asyncio.sleep(0.02)
        assert engines.counts["engine_info"] == 4, "once, however many migrations fail"
        assert linker.links.made(P0, D0)


@pytest.mark.parametrize("fails", [EngineRefused("refused"), EngineBroke("no JSON")], ids=lambda e: type(e).__name__)
async def test_an_engine_that_can_not_be_asked_is_not_another_one(redis: Space, fails: Exception) -> None:
    async with linking(redis) as (engines, (linker,)):
        await linker.ensure()
        engines.failures["engine_info", P0] = [fails]
        linker.links.doubt(P0, D0)
        await aeventually(lambda: not engines.failures["engine_info", P0])
        await asyncio.sleep(0.01)
        assert linker.links.made(P0, D0)


# --- undoing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [None, P0, D0])
async def test_undoing_tells_both_ends_whichever_fails(redis: Space, fails: str | None) -> None:
    async with linking(redis) as (engines, (linker,)):
        if fails:
            refusals(engines, "drop", fails, 1)
        redis.cli("HSET", redis.key("links"), PAIR, "claim")
        await linker.links.undo(P0, D0, "claim")
        assert engines.calls == [("drop", P0, D0), ("drop", D0, P0)]
        redis.cli("HSET", redis.key("links"), PAIR, "another's")
        await linker.links.undo(P0, D0, "claim")
        assert len(engines.calls) == 2


async def test_a_pair_that_is_being_undone_is_linked_afterwards(redis: Space) -> None:
    async with linking(redis, 2) as (engines, (first, second)):
        table = second.worker.links
        await first.ensure()
        await first.worker.add_ready(P0, role=Role.Prefill)
        undoing = Link("undoing", "", 0, owner="w2")
        mine = await table.mark_undoing(PAIR, redis.cli("HGET", redis.key("links"), PAIR), undoing, within_ms=60_000)
        assert mine is not None
        task = asyncio.create_task(first.ensure())
        await asyncio.sleep(0.03)
        assert not task.done() and engines.counts == ONCE
        assert await table.drop(PAIR, mine)
        await task
        assert engines.counts["connect"] == 4
