"""The table of links on the real server: of all who ask at once, one links; of all who saw a record, one undoes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from app.errors import StoreUnavailable
from app.store import ledger as ledger_module
from app.store.links import Claim, Link, LinkTable, ends_of, pair_of, read_link
from app.store.scripts import Code
from tests.store.harness import Worker, workers
from tests.support.redis import Space
from tests.support.wait import aeventually

P, D = "http://10.0.0.1:23333", "http://10.0.0.2:23333"
PAIR = f"{P}|{D}"
LIVES = "3|5"
VERSION = 9
"""Of the registry; what is of a later one was written by somebody else."""


@pytest.fixture
def redis(redis: Space) -> Space:
    redis.cli("SET", redis.key("version"), VERSION)
    return redis


def text_in(space: Space, pair: str = PAIR) -> str | None:
    found: str | None = space.cli("HGET", space.key("links"), pair)
    return found


def put(space: Space, value: object, pair: str = PAIR) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    space.cli("HSET", space.key("links"), pair, text)
    return text


def now_ms(space: Space) -> int:
    seconds, microseconds = space.client.time()  # type: ignore[misc]
    return int(seconds * 1000 + microseconds // 1000)


async def claim(worker: Worker, lives: str = LIVES, version: int = 5, *, wait_s: float = 60.0) -> Claim:
    return await worker.links.claim(PAIR, lives, version, wait_s=wait_s)


def test_a_pair_is_named_by_its_ends() -> None:
    assert pair_of(P, D) == PAIR and ends_of(PAIR) == (P, D)
    assert ends_of("rubbish") == ("rubbish", "")


# --- claims -----------------------------------------------------------------------------------------


async def test_a_claim_says_who_is_at_it_and_until_when(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        before_ms = now_ms(redis)
        found = await claim(w1, wait_s=2.5)
        assert found.code == Code.DONE and found.text == text_in(redis)
        link = found.link
        assert (link.state, link.owner, link.lives, link.version, link.error) == ("connecting", "w1", LIVES, 5, "")
        assert before_ms <= link.since_ms <= now_ms(redis)
        assert link.until_ms - link.since_ms == 2500


async def test_of_all_who_ask_at_once_one_links(redis: Space) -> None:
    async with workers(redis, 4) as made:
        found = await asyncio.gather(*(claim(worker) for worker in made for _ in range(25)))
        codes = [one.code for one in found]
        assert codes.count(Code.DONE) == 1 and codes.count(Code.HELD) == 99
        assert len({one.text for one in found}) == 1, "all see the same record"


async def test_each_pair_is_claimed_by_itself(redis: Space) -> None:
    async with workers(redis, 2) as made:
        pairs = [f"http://p{n}:1|{D}" for n in range(20)]
        found = await asyncio.gather(
            *(worker.links.claim(pair, LIVES, 5, wait_s=60) for pair in pairs for worker in made)
        )
        assert [one.code for one in found].count(Code.DONE) == 20
        assert set(await made[0].links.all()) == set(pairs)


@pytest.mark.parametrize(
    ("stands", "code"),
    [
        ({"state": "connected", "lives": LIVES, "version": 5}, Code.UNCHANGED),
        ({"state": "connected", "lives": LIVES, "version": 9}, Code.UNCHANGED),
        ({"state": "connected", "lives": "1|5", "version": 4}, Code.DONE),
        ({"state": "connected", "lives": "1|5", "version": 5}, Code.DONE),
        ({"state": "connected", "lives": "9|5", "version": 9}, Code.STALE),
        ({"state": "connecting", "lives": "9|5", "version": 9, "owner": "w2", "until_ms": "soon"}, Code.STALE),
        ({"state": "connecting", "lives": LIVES, "version": 5, "owner": "w2", "until_ms": "soon"}, Code.HELD),
        ({"state": "connecting", "lives": LIVES, "version": 5, "owner": "w2", "until_ms": "past"}, Code.DONE),
        ({"state": "connecting", "lives": LIVES, "version": 5, "owner": "dead", "until_ms": "soon"}, Code.DONE),
        ({"state": "connecting", "lives": "1|5", "version": 4, "owner": "w2", "until_ms": "soon"}, Code.HELD),
        ({"state": "connecting", "lives": "1|5", "version": 4, "owner": "w2", "until_ms": "past"}, Code.DONE),
        ({"state": "connecting", "lives": "1|5", "version": 4, "owner": "dead", "until_ms": "soon"}, Code.DONE),
        ({"state": "failed", "lives": LIVES, "version": 5, "until_ms": "soon", "error": "why"}, Code.REFUSED),
        ({"state": "failed", "lives": LIVES, "version": 5, "until_ms": "past", "error": "why"}, Code.DONE),
        ({"state": "failed", "lives": "1|5", "version": 4, "until_ms": "soon", "error": "why"}, Code.DONE),
        ({"state": "undoing", "lives": "", "version": 0, "owner": "w2", "until_ms": "soon"}, Code.HELD),
        ({"state": "undoing", "lives": "", "version": 0, "owner": "w2", "until_ms": "past"}, Code.DONE),
        ({"state": "undoing", "lives": "", "version": 0, "owner": "dead", "until_ms": "soon"}, Code.DONE),
        ({"state": "void", "lives": LIVES, "version": 5}, Code.DONE),
    ],
)
async def test_what_stands_there_decides(redis: Space, stands: dict[str, Any], code: Code) -> None:
    async with workers(redis, 2) as (w1, _):
        instants = {"soon": now_ms(redis) + 60_000, "past": now_ms(redis) - 1}
        text = put(redis, {**stands, "until_ms": instants.get(str(stands.get("until_ms")), 0)})
        found = await claim(w1)
        assert found.code == code
        if code == Code.DONE:
            assert found.link.owner == "w1" and found.text == text_in(redis) != text
        else:
            assert found.text == text_in(redis) == text
            assert found.link.error == stands.get("error", "")


async def test_the_claim_of_a_worker_whose_lease_ran_out_is_taken_over_by_one(redis: Space) -> None:
    async with workers(redis, 3) as (w1, w2, w3):
        assert (await claim(w1)).code == Code.DONE
        assert (await claim(w2)).code == Code.HELD
        await w1.ledger.close()
        found = await asyncio.gather(*(claim(worker) for worker in (w2, w3) for _ in range(10)))
        assert [one.code for one in found].count(Code.DONE) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rubbish",
        "[]",
        "[1]",
        "1",
        "null",
        "true",
        '"x"',
        "{",
        "{}",
        '{"state":"connected"}',
        '{"state":1,"lives":2}',
        '{"lives":null,"version":null,"state":null}',
        '{"lives":"3|5","version":"x","state":[]}',
        "[" * 2000,
        '{"state":"undoing","owner":{},"until_ms":[]}',
        '{"lives":"x","version":{},"state":"connected"}',
        '{"state":"connecting","lives":"3|5","owner":null,"until_ms":1e300}',
        "\x00",
    ],
)
async def test_a_damaged_record_counts_as_none(redis: Space, text: str) -> None:
    async with workers(redis, 1) as (w1,):
        put(redis, text)
        found = await claim(w1)
        assert (found.code, found.link.owner) == (Code.DONE, "w1")
        assert await w1.links.settle(PAIR, found.text, Link("connected", LIVES, 5))
        assert (await claim(w1)).code == Code.UNCHANGED


@pytest.mark.parametrize("text", ["", "rubbish", "[]", '{"state":1}', '{"state":"x","lives":"y"}', "\x00"])
def test_a_damaged_record_is_read_as_void(text: str) -> None:
    assert read_link(text) == Link("void", "", 0)


# --- settling and undoing ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("link", "code"),
    [
        (Link("connected", LIVES, 5, took_ms=3, identity="a|b"), Code.UNCHANGED),
        (Link("failed", LIVES, 5, until_ms=2**50, error="why"), Code.REFUSED),
        (Link("failed", LIVES, 5, until_ms=1, error="why"), Code.DONE),
    ],
)
async def test_what_became_of_a_claim_is_seen_by_all_at_once(redis: Space, link: Link, code: Code) -> None:
    async with workers(redis, 2) as (w1, w2):
        assert await w1.links.settle(PAIR, (await claim(w1)).text, link)
        assert await w2.links.one(PAIR) == link
        found = await claim(w2)
        assert found.code == code
        if code != Code.DONE:
            assert found.link == link


async def test_a_claim_that_was_taken_over_is_not_settled(redis: Space) -> None:
    async with workers(redis, 2) as (w1, w2):
        first = await claim(w1, wait_s=0)
        second = await claim(w2)
        assert second.code == Code.DONE
        assert not await w1.links.settle(PAIR, first.text, Link("connected", LIVES, 5))
        assert text_in(redis) == second.text
        assert await w2.links.settle(PAIR, second.text, Link("connected", LIVES, 5))


async def test_a_worker_without_a_lease_claims_nothing(redis: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis has lost everything: who has a claim has not said so again yet."""
    monkeypatch.setattr(ledger_module, "RENEW_S", 60.0)  # its next renewal would bring the lease back
    async with workers(redis, 1) as (w1,):
        table = LinkTable(ledger=w1.ledger, registry=w1.registry, keys=w1.keys, worker="one that has not joined")
        assert (await table.claim(PAIR, LIVES, 5, wait_s=60)).code == Code.ABSENT and text_in(redis) is None
        put(redis, {"state": "connected", "lives": LIVES})
        assert (await table.claim(PAIR, LIVES, 5, wait_s=60)).code == Code.UNCHANGED, "that much can be told"


async def test_a_claim_is_held_until_it_is_anothers_and_comes_back_where_redis_lost_it(redis: Space) -> None:
    async with workers(redis, 2) as (w1, w2):
        first = await claim(w1, wait_s=0)
        assert await w1.links.holds(PAIR, first.text)
        redis.cli("HDEL", redis.key("links"), PAIR)
        assert await w1.links.holds(PAIR, first.text) and text_in(redis) == first.text
        second = await claim(w2)
        assert not await w1.links.holds(PAIR, first.text) and text_in(redis) == second.text
        assert w1.links.stands == {PAIR: first.text} and w2.links.stands == {PAIR: second.text}
        assert await w2.links.settle(PAIR, second.text, Link("failed", LIVES, 5, until_ms=1))
        assert w2.links.stands == {}


async def test_of_all_who_would_undo_a_link_one_may(redis: Space) -> None:
    async with workers(redis, 4) as made:
        seen = put(redis, {"state": "connected", "lives": "1|5", "version": 4})
        marks = [
            worker.links.mark_undoing(PAIR, seen, Link("undoing", "", 0, owner=worker.name), within_ms=60_000)
            for worker in made
            for _ in range(10)
        ]
        mine = [text for text in await asyncio.gather(*marks) if text is not None]
        assert mine == [text_in(redis)]
        link = read_link(mine[0])
        assert link.state == "undoing" and 50_000 < link.until_ms - now_ms(redis) <= 60_000
        codes = [(await claim(worker)).code for worker in made]
        assert codes == [Code.HELD] * 4, "what is undone late would undo the new link"
        dropped = await asyncio.gather(*(worker.links.drop(PAIR, mine[0]) for worker in made for _ in range(10)))
        assert dropped.count(True) == 1 and text_in(redis) is None
        assert (await claim(made[0])).code == Code.DONE


async def test_linking_and_undoing_race_and_one_wins(redis: Space) -> None:
    async with workers(redis, 2) as (w1, w2):
        for _ in range(30):
            seen = put(redis, {"state": "connected", "lives": "1|5", "version": 4})
            undoing = Link("undoing", "", 0, owner="w2")
            found, mine = await asyncio.gather(claim(w1), w2.links.mark_undoing(PAIR, seen, undoing, within_ms=60_000))
            assert (found.code == Code.DONE) is (mine is None)
            assert found.code in (Code.DONE, Code.HELD)


async def test_the_table_is_read_whole_and_one_by_one(redis: Space) -> None:
    async with workers(redis, 1) as (w1,):
        assert await w1.links.all() == {} and (await w1.links.one(PAIR)).state == "void"
        text = (await claim(w1)).text
        assert await w1.links.all() == {PAIR: text}
        assert (await w1.links.one(PAIR)).state == "connecting"
        assert repr(w1.links) == "<LinkTable of w1>"


async def test_r96_redis_away_is_one_error_at_every_call(own_redis: Space) -> None:
    async with workers(own_redis, 1) as (w1,):
        own_redis.server.kill()
        await aeventually(lambda: not w1.shared)
        table: LinkTable = w1.links
        link = Link("connected", LIVES, 5)
        for call in (
            lambda: claim(w1),
            lambda: table.settle(PAIR, "", link),
            lambda: table.mark_undoing(PAIR, "", link, within_ms=1),
            lambda: table.drop(PAIR, ""),
            lambda: table.one(PAIR),
            lambda: table.all(),
        ):
            with pytest.raises(StoreUnavailable):
                await call()
