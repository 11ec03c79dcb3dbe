"""One cursor for all workers: which encoder gets which item, over two masters with two workers each.

Redis's own order is read with MONITOR (`RedisOrder`): the order in which requests come to the encoders is another one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tests.integration.stage import TWO_HOSTS, start
from tests.support import load
from tests.support.epd_floor import Floor, RedisOrder, pictures, spread, text, user
from tests.support.wait import eventually

AT_A_TIME = 16
WINDOW = 30
FLEET = TWO_HOSTS


def contiguous(assigned: Sequence[int], encoders: int) -> bool:
    return all(number == (assigned[0] + i) % encoders for i, number in enumerate(assigned))


def widest(assigned: Sequence[int], encoders: int) -> int:
    """The greatest difference in any WINDOW consecutive assignments."""
    assert len(assigned) >= WINDOW
    return max(spread(assigned[i : i + WINDOW], encoders) for i in range(len(assigned) - WINDOW + 1))


def follows(assigned: Sequence[int], rings: Sequence[Sequence[int]]) -> bool:
    """Whether the assignments, of one-item requests, go round the first ring, then round the second, ..., the last.

    Where the ring changes they go on from the same position number modulo the new size; when it changes is unknown.
    """
    states = {(0, position) for position in range(len(rings[0]))}
    for number in assigned:
        states = {
            (later, (position % len(rings[later]) + 1) % len(rings[later]))
            for now, position in states
            for later in range(now, len(rings))
            if rings[later][position % len(rings[later])] == number
        }
    return any(ring == len(rings) - 1 for ring, _ in states)


@pytest.mark.parametrize(
    ("assigned", "right"),
    [
        ([1, 2, 0, 1, 2, 3, 0, 1], True),  # the position is 2 when 3 joins
        ([1, 2, 0, 1, 3, 0], False),  # 3 came one too early
        ([1, 2, 0, 0, 1, 2, 3], False),  # a step was lost
        ([0, 1, 2, 3, 0, 1, 2, 0], False),  # back to the first ring
    ],
)
def test_the_reading_of_changing_rings_can_tell_right_from_wrong(assigned: list[int], right: bool) -> None:
    assert follows(assigned, [[0, 1, 2], [0, 1, 2, 3]]) is right


# --- the cursor


def test_r74_150_requests_of_one_image_over_4_workers_fill_3_encoders_exactly(floor: Floor) -> None:
    encoders = floor.encoders(3, ttft_s=0.005)
    floor.one("both", chunks=1)
    with RedisOrder(floor.space) as order:
        answers = asyncio.run(floor.many(150, concurrency=AT_A_TIME, each=lambda i: {"messages": pictures(1)}))
    assert all(answer.ok for answer in answers)
    assert [encoder.items for encoder in encoders] == [50, 50, 50]
    assigned = order.assignments(encoders)
    assert len(assigned) == 150
    assert widest(assigned, 3) <= 1
    assert order.cursors() == [(number + 1) % 3 for number in assigned], "the cursor is the next encoder's position"
    assert len(order.ledgers()) == 4, "all workers must have taken part"


def test_r74_mixes_of_1_2_3_and_5_images_are_even_by_item_and_one_step_each(floor: Floor) -> None:
    encoders = floor.encoders(3)
    floor.one("both", chunks=1)
    sizes = [(1, 2, 3, 5)[i % 4] for i in range(80)]
    with RedisOrder(floor.space) as order:
        answers = asyncio.run(
            floor.many(80, concurrency=AT_A_TIME, each=lambda i: {"messages": pictures(sizes[i])}, max_tokens=1)
        )
    assert all(answer.ok for answer in answers)
    items = [encoder.items for encoder in encoders]
    assert sum(items) == sum(sizes) == 220
    assert max(items) - min(items) <= 1
    assigned = order.assignments(encoders)
    assert len(assigned) == 220
    assert contiguous(assigned, 3)
    moves = [(after - before) % 3 for before, after in zip(order.cursors(), order.cursors()[1:], strict=False)]
    assert len(moves) == 79, "one step a request, whatever its number of items"
    assert moves.count(0) >= 19, "a request of three comes back to where it began"
    calls = sum(len(encoder.requests) for encoder in encoders)
    assert calls == sum(min(size, 3) for size in sizes), "images that fall on the same encoder go in one call"


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_r74_requests_of_one_size_are_even_too(floor: Floor, count: int) -> None:
    encoders = floor.encoders(4)
    floor.one("both", chunks=1)
    answers = asyncio.run(floor.many(20, concurrency=AT_A_TIME, each=lambda i: {"messages": pictures(count)}))
    assert all(answer.ok for answer in answers)
    assert [encoder.items for encoder in encoders] == [5 * count] * 4


def test_r74_a_request_without_media_leaves_the_cursor_alone(floor: Floor) -> None:
    encoders = floor.encoders(3)
    floor.one("both", chunks=1)
    assert floor.chat(pictures(2)).ok
    before = floor.cursor()
    with RedisOrder(floor.space) as order:
        assert all(answer.ok for answer in asyncio.run(floor.many(8, concurrency=4)))
        assert floor.chat(user(text(), text("more"))).ok
    assert (order.cursors(), order.assignments(encoders)) == ([], [])
    assert floor.cursor() == before


# --- encoders come and go


def test_r74_the_position_goes_on_modulo_the_new_number_of_encoders(floor: Floor) -> None:
    encoders = floor.encoders(3)
    floor.one("both", chunks=1)
    floor.turn_to(2)
    encoders += floor.encoders(1)
    with RedisOrder(floor.space) as order:
        for _ in range(4):
            assert floor.chat(pictures(1)).ok
    assert order.assignments(encoders) == [2, 3, 0, 1]
    assert order.cursors() == [3, 0, 1, 2]

    floor.remove(encoders[0])  # 1, 2 and 3 are left: position 2 is number 3
    with RedisOrder(floor.space) as order:
        for _ in range(3):
            assert floor.chat(pictures(1)).ok
    assert order.assignments(encoders) == [3, 1, 2]

    assert floor.chat(pictures(2)).ok  # the position is 1 then; of two encoders: 2 and 3
    floor.remove(encoders[1])
    with RedisOrder(floor.space) as order:
        assert floor.chat(pictures(3)).ok
    assert order.assignments(encoders) == [3, 2, 3]


class Run:
    """Requests of one image, so many at a time, until it is told to stop."""

    def __init__(self, floor: Floor, at_a_time: int = 6) -> None:
        self.answers: list[load.Answer] = []
        self._floor = floor
        self._over = threading.Event()
        self._running = start(self._all(at_a_time))

    def stop(self) -> list[load.Answer]:
        self._over.set()
        self._running.result(30)
        return self.answers

    def more(self, count: int) -> None:
        """Until so many more have ended."""
        goal = len(self.answers) + count
        eventually(lambda: len(self.answers) >= goal or self._running.done(), within_s=20)

    async def _all(self, at_a_time: int) -> None:
        async with load.session(keep_alive=False) as client:
            await asyncio.gather(*(self._lane(i, client) for i in range(at_a_time)))

    async def _lane(self, number: int, client: Any) -> None:
        urls = self._floor.urls
        while not self._over.is_set():
            number += 1
            options = {"model": self._floor.model, "messages": pictures(1)}
            self.answers.append(await load.chat(urls[number % len(urls)], client=client, **options))


def test_r74_r78_encoders_join_and_leave_under_load_without_a_failed_request(floor: Floor) -> None:
    encoders = floor.encoders(3, ttft_s=0.01)
    floor.one("both", chunks=1)
    rings = [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 2, 3, 4], [2, 3, 4]]
    with RedisOrder(floor.space) as order:
        run = Run(floor)
        run.more(15)
        for _ in range(2):
            encoders += floor.encoders(1, ttft_s=0.01)
            run.more(15)
        floor.remove(encoders[1], drain=True)
        run.more(15)
        floor.remove(encoders[0])
        run.more(15)
        answers = run.stop()
    assert [(answer.status, answer.error, answer.body) for answer in answers if not answer.ok] == []
    assigned = order.assignments(encoders)
    assert len(assigned) == len(answers) == sum(encoder.items for encoder in encoders)
    assert follows(assigned, rings)
    assert min(encoder.items for encoder in encoders) > 0
    states = floor.deployment.nodes("?all=1")
    assert encoders[0].url not in states
    eventually(lambda: encoders[1].url not in floor.deployment.nodes("?all=1"))


def test_r74_a_worker_killed_in_mid_run_leaves_the_assignments_contiguous(floor: Floor) -> None:
    encoders = floor.encoders(3, ttft_s=0.02)
    floor.one("both", chunks=1)
    master = floor.masters[0]
    with RedisOrder(floor.space) as order:
        running = start(floor.many(150, concurrency=AT_A_TIME, each=lambda i: {"messages": pictures(1)}))
        eventually(lambda: sum(len(encoder.requests) for encoder in encoders) > 40, within_s=10)
        killed = master.kill_worker()
        answers = running.result(30)
    failed = [answer for answer in answers if not answer.ok]
    assert len(failed) <= AT_A_TIME, "only what the dead worker held"
    assigned = order.assignments(encoders)
    assert 150 - len(failed) <= len(assigned) <= 150
    assert contiguous(assigned, 3)
    assert widest(assigned, 3) <= 1
    assert sum(encoder.items for encoder in encoders) <= len(assigned)
    master.wait_for_workers(without=[killed])
    floor.quiet(within_s=6)
