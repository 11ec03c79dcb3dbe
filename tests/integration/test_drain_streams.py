"""Nodes that leave and come back under running streams, many times, over two hosts: no stream is cut, no count is off.

One leaving, one drain and one return each are in test_two_masters.
"""

from __future__ import annotations

import random
import time

import pytest

from tests.integration.failing import tries
from tests.integration.stage import TWO_HOSTS, Stage
from tests.support.wait import eventually

FLEET = TWO_HOSTS

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("drain", [False, True])
def test_streams_outlive_their_node_that_leaves_and_comes_back_again_and_again(stage: Stage, drain: bool) -> None:
    moving, staying = stage.engines(2, gap_s=0.1, chunks=50)
    chance = random.Random(4)
    lengths = [chance.randint(10, 50) for _ in range(60)]
    streams = stage.many(60, stream=True, each=lambda i: {"max_tokens": lengths[i]})
    eventually(lambda: sum(stage.counts()) == 60 and min(stage.counts()) == 30, within_s=3)
    query = "?drain=true&timeout_s=0.1" if drain else ""
    for turn in range(6):
        here, there = stage.masters if turn % 2 else stage.masters[::-1]
        assert here.post(f"/nodes/remove{query}", {"url": moving.url}).status == 200
        eventually(lambda: moving.url not in here.nodes("?all=1"), within_s=3)  # noqa: B023
        assert moving.in_flight or turn > 2, "streams must be running on it"
        there.add(moving)
        eventually(lambda: stage.counts(moving, staying) == (moving.in_flight, staying.in_flight), within_s=1)
        # Streams end meanwhile: of two looks one after the other the second may see fewer.
        eventually(lambda: there.unfinished()[moving.url] == stage.counts(moving)[0], within_s=1)  # noqa: B023
    answers = streams.result(20)
    assert [(a.status, a.error) for a in answers if not a.done] == []
    assert [len(a.chunks()) for a in answers] == lengths
    assert not moving.aborts + staying.aborts


def test_a_drained_node_is_not_one_to_fail_over_to(stage: Stage) -> None:
    draining, failing = stage.engines(2, gap_s=0.1, chunks=40)
    streams = stage.many(10, stream=True)
    eventually(lambda: stage.counts(draining, failing) == (5, 5), within_s=3)
    assert stage.deployment.post("/nodes/remove?drain=true&timeout_s=30", {"url": draining.url}).status == 200
    eventually(lambda: tries(draining, failing) == [5, 5])  # counted is not there yet
    failing.set(status=503)
    asked_s = time.monotonic()
    assert {answer.status for answer in stage.many(10).result(5)} == {503}
    assert time.monotonic() - asked_s < 3, "streams must be running still"
    assert tries(draining, failing) == [5, 15]
    assert all(answer.done for answer in streams.result(20))


def test_a_stream_dies_with_its_engine_only_and_counts_stay_right(stage: Stage) -> None:
    """The node was removed and added again since its stream began; then the process behind it ends."""
    dying, staying = stage.engines(2, gap_s=0.05, chunks=100)
    streams = stage.many(10, stream=True)
    eventually(lambda: stage.counts(dying, staying) == (5, 5), within_s=3)
    assert stage.masters[1].post("/nodes/remove", {"url": dying.url}).status == 200
    stage.deployment.add(dying)
    eventually(lambda: stage.counts(dying, staying) == (5, 5))
    dying.crash()
    eventually(lambda: stage.counts(dying, staying) == (0, 5))
    dying.start()
    answers = streams.result(20)
    cut = [answer for answer in answers if not answer.done]
    assert len(cut) == 5
    assert all(answer.status == 200 and '"error"' in answer.events()[-1] for answer in cut)
    assert tries(dying, staying) == [5, 5], "nothing is begun anew"
