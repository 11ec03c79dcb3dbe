"""Requests of the last minute, node by node, over all workers."""

from __future__ import annotations

from collections.abc import Sequence

from app.store.dispatched import Dispatched, of_last_minute
from app.store.keys import Keys
from app.store.scripts import Argument
from tests.store.harness import SCRIPTS, give_back, workers
from tests.support.redis import Space
from tests.support.wait import aeventually

A, B = "http://a:1", "http://b:1"
NOW_S = 1_796_049_287.5
"""It is in the slot that began at ...280."""


def test_the_last_minute_is_this_slot_and_the_five_before() -> None:
    found = {
        f"1796049280 {A}": "3",
        f"1796049230 {A}": "4",  # the oldest that counts
        f"1796049220 {A}": "100",  # older than a minute
        f"1796049290 {A}": "1000",  # not yet: of a clock that was ahead
        f"1796049270 {B}": "5",
        "newest": "1796049280",
    }
    assert of_last_minute(found, NOW_S) == {A: 7, B: 5}


def test_rubbish_is_passed_over() -> None:
    found = {"": "1", "x": "1", f"x {A}": "1", f"1796049280 {A}": "abc", f"1796049280 {B}": "-1", f"-1 {B}": "9"}
    assert of_last_minute(found, NOW_S) == {}


class Sent:
    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def __call__(self, command: Sequence[Argument]) -> None:
        words = command[6:]  # behind EVAL, the text, 1, the key, the length and the number of slots
        for url, count in zip(words[::2], words[1::2], strict=True):
            self.counts[str(url)] = self.counts.get(str(url), 0) + int(count)


def test_a_worker_notes_each_request_once_and_none_that_is_older_than_a_minute() -> None:
    one, sent = Dispatched(keys=Keys("ns"), script=SCRIPTS["note_dispatched"]), Sent()
    one.new[A] += 2
    one.roll(1000.0)
    one.note(sent)
    one.note(sent)
    assert sent.counts == {A: 2}
    # Redis is away from here on: 3 requests, then a minute later 1.
    one.new[A] += 3
    one.roll(1001.0)
    one.new[A] += 1
    one.new[B] += 1
    one.roll(1065.0)
    assert one.of_last_minute() == {A: 1, B: 1}
    one.note(sent)
    assert sent.counts == {A: 2 + 1, B: 1}


def counts(space: Space) -> dict[str, int]:
    found = space.cli("HGETALL", space.key("dispatched"))
    return of_last_minute(found, float(space.client.time()[0]))  # type: ignore[index]


async def test_all_workers_add_up_exactly_within_two_seconds(redis: Space) -> None:
    async with workers(redis, 3) as made:
        await made[0].add_ready(A)
        await made[0].add_ready(B, speed=3.0)
        held = [ticket for number, worker in enumerate(made) for ticket in await worker.take(10 * (number + 1))]
        expected = {url: sum(ticket.url == url for ticket in held) for url in (A, B)}
        assert sum(expected.values()) == 60

        await aeventually(lambda: counts(redis) == expected)
        give_back(held, succeeded=True)
        assert counts(redis) == expected, "a request that is over was dispatched all the same"
        assert 0 < redis.cli("TTL", redis.key("dispatched")) <= 60


async def test_who_begins_a_slot_drops_the_old_ones_and_those_of_a_clock_that_was_ahead(redis: Space) -> None:
    key = redis.key("dispatched")
    now_s = int(redis.client.time()[0])  # type: ignore[index]
    slot = now_s - now_s % 10
    old, kept, ahead = slot - 60, slot - 40, slot + 20
    redis.cli("HSET", key, f"{old} {A}", 5, f"{kept} {A}", 6, f"{ahead} {A}", 7, "x", 8, "newest", old)
    async with workers(redis, 1) as (worker,):
        await worker.add_ready(A)
        give_back(await worker.take(2))
        await aeventually(lambda: int(redis.cli("HGET", key, "newest")) >= slot)
        fields = redis.cli("HGETALL", key)
        assert fields.pop("newest") == max(name.partition(" ")[0] for name in fields)
        assert fields[f"{kept} {A}"] == "6"
        assert set(fields) == {f"{kept} {A}", next(name for name in fields if fields[name] == "2")}


async def test_a_worker_that_leaves_has_noted_all(redis: Space) -> None:
    async with workers(redis, 1) as (worker,):
        await worker.add_ready(A)
        await worker.take(4)
    assert counts(redis) == {A: 4}
