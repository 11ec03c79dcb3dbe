"""Which pairs hand over: known to all before a count is given back, and no more once nobody does."""

from __future__ import annotations

from typing import Any

from app.store.handing import fetched, pairs_in_use
from tests.store.harness import Worker, workers
from tests.support.redis import Space
from tests.support.wait import aeventually

P, D, E = "http://p:1", "http://d:1", "http://e:1"


class Sent:
    """What a worker sends to Redis from now on as notes."""

    def __init__(self, worker: Worker) -> None:
        self.words: list[tuple[Any, ...]] = []
        self._note = worker.ledger.note
        worker.ledger.note = self._take  # type: ignore[method-assign]

    def _take(self, *command: Any) -> None:
        self.words.append(command)
        self._note(*command)

    @property
    def kinds(self) -> list[str]:
        return [command[0] for command in self.words]


def handing(space: Space, worker: Worker) -> dict[str, str]:
    return dict(space.cli("HGETALL", space.key(f"handing:{worker.name}")))


async def test_a_pair_stands_there_before_what_is_sent_after_it(redis: Space) -> None:
    async with workers(redis, 1) as (worker,):
        await worker.add_ready(P)
        (ticket,) = await worker.take()
        worker.handing.begin(P, D)
        ticket.release(succeeded=True)
        await aeventually(lambda: redis.cli("HGET", redis.key("unfinished"), P) in (None, "0"), every_s=0.0)
        assert handing(redis, worker) == {f"{P}|{D}": "1"}
        assert not await fetched(worker.registry, worker.keys, P)


async def test_how_many_and_that_none_is_left_is_there_a_little_later(redis: Space) -> None:
    async with workers(redis, 1) as (worker,):
        for decode in (D, D, E):
            worker.handing.begin(P, decode)
        await aeventually(lambda: handing(redis, worker) == {f"{P}|{D}": "2", f"{P}|{E}": "1"})
        assert 0 < redis.cli("TTL", redis.key(f"handing:{worker.name}")) <= 86_400
        worker.handing.end(P, D)
        await aeventually(lambda: handing(redis, worker) == {f"{P}|{D}": "1", f"{P}|{E}": "1"})
        assert await pairs_in_use(worker.registry, worker.keys) == {f"{P}|{D}", f"{P}|{E}"}
        for decode in (D, E):
            worker.handing.end(P, decode)
        await aeventually(lambda: handing(redis, worker) == {})
        assert await fetched(worker.registry, worker.keys, P)
        assert repr(worker.handing) == "<Handing 0 between 0 pairs>"


async def test_a_pair_that_hands_over_all_the_time_is_noted_now_and_then(redis: Space) -> None:
    async with workers(redis, 1) as (worker,):
        sent = Sent(worker)
        for _ in range(500):
            worker.handing.begin(P, D)
            worker.handing.end(P, D)
        assert sent.kinds == ["HSET", "EXPIRE"]
        await aeventually(lambda: sent.kinds == ["HSET", "EXPIRE", "HDEL"])
        worker.handing.begin(P, D)
        assert sent.kinds[3:] == ["HSET", "EXPIRE"], "known again at once, not after a while"
        await aeventually(lambda: handing(redis, worker) == {f"{P}|{D}": "1"})


async def test_after_redis_lost_it_what_goes_on_is_there_again(redis: Space) -> None:
    async with workers(redis, 1) as (worker,):
        for decode in (D, D, E):
            worker.handing.begin(P, decode)
        worker.handing.end(P, E)
        redis.clear()
        await aeventually(lambda: handing(redis, worker) == {f"{P}|{D}": "2"})
        worker.handing.begin(P, E)
        await aeventually(lambda: handing(redis, worker) == {f"{P}|{D}": "2", f"{P}|{E}": "1"})
