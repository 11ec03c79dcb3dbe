"""Links of DistServe: made once for the whole deployment, true as long as both engines are, gone with their nodes.

Two masters with two workers each on one Redis, as on two hosts: one engine is served by all of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.nodes import Role
from tests.integration.stage import MOSTLY_STREAM, Fleet, start
from tests.support import load
from tests.support.deployment import Deployment
from tests.support.epd_floor import RedisOrder
from tests.support.loop import LoopThread
from tests.support.pd import Fabric, Floor, PdEngine, floor_on, openai_error
from tests.support.redis import PrivateRedis, Space
from tests.support.wait import eventually

LINK_TIMEOUT_S = 2.5
DISTSERVE = {"serving_strategy": "DistServe", "probe_interval_s": 1}
BY_ROLE = pytest.mark.parametrize("role", [Role.Prefill, pytest.param(Role.Decode, marks=pytest.mark.wide)])


@pytest.fixture(scope="module")
def fleet(redis_server: PrivateRedis) -> Iterator[Fleet]:
    one = Fleet(redis_server, masters=2, workers=2, settings=DISTSERVE | {"link_timeout_s": LINK_TIMEOUT_S})
    yield one
    one.close()


@pytest.fixture
def floor(fleet: Fleet, engine_loop: LoopThread) -> Iterator[Floor]:
    with floor_on(*fleet.get(), engine_loop) as one:
        yield one


def failed(answers: list[load.Answer]) -> list[tuple[int, Exception | None, bytes]]:
    return [(answer.status, answer.error, answer.body) for answer in answers if not answer.ok]


def warm_up(floor: Floor, master: Deployment | None = None) -> dict[str, Any]:
    reply = (master or floor.deployment).post("/distserve/connection_warmup", {}, timeout_s=20)
    assert reply.status == 200, reply
    found: dict[str, Any] = reply.json()
    return found


def pair(prefill: PdEngine, decode: PdEngine) -> str:
    return f"{prefill.url}|{decode.url}"


# --- once for all


def test_100_first_requests_at_once_over_2_hosts_make_each_link_once(floor: Floor) -> None:
    """One worker connects, the others wait for it, and all see the result at once."""
    prefills, decodes = floor.engines(Role.Prefill, 2), floor.engines(Role.Decode, 2)
    for engine in (*prefills, *decodes):
        engine.fault("p2p_connect", delay_s=0.3, times=-1)
    with RedisOrder(floor.space) as order:
        answers = floor.many(100, stream=True)
    assert failed(answers) == []
    assert len(order.ledgers()) == 4, "all workers of both hosts took part"
    assert set(floor.fabric.links_made.values()) == {1}
    assert set(floor.fabric.initialized.values()) == {1}, "nobody began a link that somebody else was making"
    for engine in (*prefills, *decodes):
        assert len(engine.calls("p2p_connect")) == len(engine.links) >= 1
    longest_s = max(answer.finished_s - answer.started_s for answer in answers if answer.finished_s)
    assert longest_s < 6, "two connects of 0.3 s and 100 answers"


def test_one_engine_is_served_by_all_workers_of_both_hosts(floor: Floor) -> None:
    prefill, decode = floor.pair()
    assert floor.chat().ok
    assert all(floor.linked(prefill, decode) for _ in range(3))
    with RedisOrder(floor.space) as order:
        assert failed(floor.many(40, concurrency=16)) == []
    assert len(order.ledgers()) == 4
    assert dict(floor.fabric.initialized) == {(prefill.url, decode.url, 1): 1, (decode.url, prefill.url, 1): 1}
    assert (prefill.stats.finished, len(prefill.legs), len(decode.legs)) == (43, 41, 41)


def test_the_calls_are_those_of_the_protocol_in_its_order(floor: Floor) -> None:
    prefill, decode = floor.pair()
    assert floor.chat().ok
    for engine in (prefill, decode):
        assert "/distserve/engine_info" in [record.path for record in engine.probes]
    assert [name for name, _ in prefill.calls()] == ["p2p_initialize", "p2p_connect"]
    assert [name for name, _ in decode.calls()] == ["p2p_initialize", "p2p_connect"]
    ours = prefill.calls("p2p_initialize")[0]
    assert ours["protocol"] == 2
    assert ours["rdma_config"] == {"with_gdr": True, "link_type": 2}, "RoCE"
    assert (ours["local_engine_id"], ours["remote_engine_id"]) == (prefill.url, decode.url)


def test_the_table_of_links_is_the_same_everywhere(floor: Floor) -> None:
    prefill, decode = floor.pair()
    assert floor.chat().ok
    tables = [floor.table(master) for master in floor.masters]
    assert tables[0]["links"] == tables[1]["links"]
    entry = tables[0]["links"][pair(prefill, decode)]
    assert entry["state"] == "connected"
    assert entry["error"] is None
    assert tables[0]["sessions"] == 0
    assert tables[0]["counts"].get("links_made", 0) >= 1


# --- set-up that fails


@pytest.mark.parametrize(
    "call", [*(pytest.param(one, marks=pytest.mark.wide) for one in ("engine_info", "p2p_initialize")), "p2p_connect"]
)
def test_a_link_is_tried_again(floor: Floor, call: Any) -> None:
    prefill, decode = floor.pair()
    prefill.fault(call, status=503, times=1)
    decode.fault(call, status=500, times=1)
    answer = floor.chat()
    assert answer.ok, answer.body
    assert set(floor.fabric.links_made.values()) == {1}


def test_a_connect_that_says_fail_in_a_200_is_a_failure(floor: Floor) -> None:
    prefill, decode = floor.pair()
    decode.fault("p2p_connect", body={"status": 2}, times=1)
    assert floor.chat().ok
    assert len(decode.calls("p2p_connect")) == 2
    assert prefill.links == {decode.url}


def test_a_link_that_can_not_be_made_is_told_in_bounded_time_and_not_for_ever(floor: Floor) -> None:
    prefill, decode = floor.pair()
    decode.fault("p2p_initialize", status=500, times=-1)
    begun_s = time.monotonic()
    answer = floor.chat()
    assert answer.status in (500, 502, 503, 504)
    openai_error(answer, answer.status)
    assert time.monotonic() - begun_s < LINK_TIMEOUT_S + 2
    assert 1 <= len(decode.calls("p2p_initialize")) <= 8
    assert not decode.legs
    assert floor.table()["counts"].get("links_failed", 0) >= 1
    eventually(lambda: not prefill.held, within_s=2)
    decode.heal()
    eventually(lambda: floor.chat().ok, within_s=1)


def test_an_engine_that_never_answers_holds_nobody_longer_than_the_limit(floor: Floor) -> None:
    _, decode = floor.pair()
    decode.fault("p2p_connect", delay_s=30, times=-1)
    begun_s = time.monotonic()
    answers = floor.many(8)
    assert time.monotonic() - begun_s < LINK_TIMEOUT_S + 3
    assert {answer.status for answer in answers} <= {502, 503, 504}
    assert not decode.legs


@MOSTLY_STREAM
def test_another_tp_size_is_refused_with_the_reason(floor: Floor, stream: bool) -> None:
    prefill, decode = floor.prefill(tp_size=4), floor.decode(tp_size=8)
    begun_s = time.monotonic()
    answer = floor.chat(stream=stream)
    assert answer.status >= 500
    assert "tp_size" in openai_error(answer, answer.status)["message"]
    assert time.monotonic() - begun_s < 2, "it can't get better by trying again"
    assert not prefill.calls("p2p_initialize") and not decode.calls() and not decode.legs
    entry = floor.table()["links"][pair(prefill, decode)]
    assert entry["state"] == "failed" and "tp_size" in entry["error"]


# --- warm-up


def test_warm_up_connects_all_pairs_once_and_tells_of_each(floor: Floor) -> None:
    prefills = floor.engines(Role.Prefill, 2)
    decodes = [*floor.engines(Role.Decode, 2), *floor.engines(Role.Decode, 1, tp_size=2)]
    told = warm_up(floor)
    assert told["SUCCESS"] is False
    wanted = {pair(p, d): "failed" if d is decodes[2] else "connected" for p in prefills for d in decodes}
    assert {name: entry["state"] for name, entry in told["links"].items()} == wanted
    errors = {name: entry["error"] or "" for name, entry in told["links"].items()}
    wrong = {n: e for n, e in errors.items() if ("tp_size" in e) != (wanted[n] == "failed")}
    assert not wrong
    assert len(floor.fabric.links_made) == 4
    floor.remove(decodes[2])
    made = dict(floor.fabric.initialized)
    assert warm_up(floor, floor.masters[1])["SUCCESS"] is True
    assert failed(floor.many(20)) == []
    assert dict(floor.fabric.initialized) == made, "there was nothing left to make"


def test_warm_ups_at_once_on_both_hosts_make_each_link_once(floor: Floor) -> None:
    floor.engines(Role.Prefill, 3)
    decodes = floor.engines(Role.Decode, 3)
    for decode in decodes:
        decode.fault("p2p_connect", delay_s=0.2, times=-1)

    async def both() -> list[dict[str, Any]]:
        return await asyncio.gather(*(asyncio.to_thread(warm_up, floor, master) for master in floor.masters * 2))

    assert all(told["SUCCESS"] for told in asyncio.run(both()))
    assert sorted(floor.fabric.initialized.values()) == [1] * 18
    assert sorted(floor.fabric.links_made.values()) == [1] * 9


def test_warm_up_ends_though_an_engine_does_not_answer(floor: Floor) -> None:
    (prefill,) = floor.engines(Role.Prefill, 1)
    good, silent = floor.engines(Role.Decode, 2)
    silent.fault("p2p_initialize", delay_s=30, times=-1)
    begun_s = time.monotonic()
    told = warm_up(floor)
    assert time.monotonic() - begun_s < LINK_TIMEOUT_S + 3
    states = {name: entry["state"] for name, entry in told["links"].items()}
    assert (told["SUCCESS"], states) == (
        False,
        {pair(prefill, good): "connected", pair(prefill, silent): "failed"},
    )


# --- engines that restart, nodes that go


@pytest.mark.parametrize("role", [Role.Prefill, Role.Decode])
def test_an_engine_that_restarts_voids_its_links_on_all_workers(floor: Floor, role: Role) -> None:
    prefill, decode = floor.pair()
    assert failed(floor.many(16)) == [], "every worker knows the link"
    engine = prefill if role is Role.Prefill else decode
    for incarnation in (2, 3):
        engine.restart()
        floor.add(engine)  # as it does when it starts
        assert failed(floor.many(20)) == []
        assert engine.incarnation == incarnation
    ones = {(1, 1), (2, 1), (3, 1)} if role is Role.Prefill else {(1, 1), (1, 2), (1, 3)}
    assert dict(floor.fabric.links_made) == {(prefill.url, decode.url, *one): 1 for one in ones}
    assert not floor.fabric.refusals


def test_an_engine_that_restarts_untold_is_found_out(floor: Floor) -> None:
    prefill, decode = floor.pair()
    assert floor.chat().ok
    decode.crash()
    decode.set(num_gpu_blocks=50_000)  # its identity is another one
    decode.start()
    eventually(lambda: floor.chat().ok, within_s=15, every_s=0.2)
    assert failed(floor.many(16)) == []
    assert prefill.links == {decode.url}


def test_a_registration_anew_without_a_restart_keeps_serving(floor: Floor) -> None:
    _, decode = floor.pair(gap_s=0.02, chunks=20)
    assert floor.chat().ok
    running = start(load.many(floor.urls, 24, concurrency=8, model=floor.model, stream=True))
    for _ in range(3):
        floor.add(decode)
    assert failed(running.result(20)) == []


@BY_ROLE
def test_removing_a_node_frees_pending_sessions_and_drops_links_on_both_sides(floor: Floor, role: Role) -> None:
    prefill, decode = floor.pair()
    assert floor.chat().ok
    decode.set(stall_after=-1)
    client = floor.leaving()
    eventually(lambda: decode.in_flight == 1 and floor.migrations() == {(prefill.url, 2)})
    floor.remove(prefill if role is Role.Prefill else decode)
    eventually(lambda: not prefill.held, within_s=8)
    assert prefill.freed == [2]
    eventually(lambda: not prefill.strict.links.held and not decode.strict.links.held, within_s=3)
    assert prefill.calls("p2p_drop_connect") == [{"engine_id": prefill.url, "remote_engine_id": decode.url}]
    assert decode.calls("p2p_drop_connect") == [{"engine_id": decode.url, "remote_engine_id": prefill.url}]
    eventually(lambda: floor.link(prefill, decode) is None)
    assert pair(prefill, decode) not in floor.table(floor.masters[1])["links"]
    client.leave()


def test_a_drained_node_finishes_its_streams_and_then_drops_its_links(floor: Floor) -> None:
    prefill, decode = floor.pair()
    assert floor.chat().ok
    decode.set(gap_s=0.1, chunks=10)
    running = start(load.many(floor.urls, 4, model=floor.model, stream=True))
    eventually(lambda: decode.in_flight == 4)
    reply = floor.deployment.post("/nodes/remove?drain=true&timeout_s=20", {"url": decode.url})
    assert reply.status == 200, reply
    assert prefill.links == {decode.url}, "not yet"
    assert all(answer.ok and answer.done for answer in running.result(20))
    eventually(lambda: not prefill.strict.links.held and not decode.strict.links.held, within_s=5)
    eventually(lambda: floor.link(prefill, decode) is None, within_s=3)
    assert prefill.freed == []


def test_a_draining_prefill_node_stays_until_decode_has_fetched_its_session(floor: Floor) -> None:
    prefill, decode = floor.pair()
    assert floor.chat().ok
    decode.set(ttft_s=1.5)
    running = start(load.many(floor.urls, 1, model=floor.model, stream=True))
    eventually(lambda: decode.in_flight == 1 and floor.migrations() == {(prefill.url, 2)})
    assert floor.deployment.post("/nodes/remove?drain=true&timeout_s=20", {"url": prefill.url}).status == 200
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < 0.9:
        assert floor.deployment.nodes()[prefill.url]["state"] == "draining"
        assert prefill.links == {decode.url} and prefill.freed == []
        time.sleep(0.1)
    assert all(answer.ok and answer.done for answer in running.result(20))
    eventually(lambda: floor.link(prefill, decode) is None and not prefill.strict.links.held, within_s=5)
    assert prefill.freed == [] and floor.fabric.late_frees == []


def test_sessions_of_a_prefill_that_restarts_are_struck_off_and_not_freed(floor: Floor) -> None:
    """The new process counts its sessions from the start: a number of the old one may be somebody else's by now."""
    prefill, decode = floor.pair()
    assert floor.chat().ok
    decode.set(stall_after=-1)
    client = floor.leaving()
    eventually(lambda: decode.in_flight == 1 and floor.migrations() == {(prefill.url, 2)})
    before = floor.handovers("sessions_lost")
    prefill.restart()
    floor.add(prefill)
    eventually(lambda: not floor.migrations(), within_s=3)
    client.leave()
    eventually(lambda: floor.counts(prefill, decode) == [0, 0])
    assert prefill.freed == []
    eventually(lambda: floor.handovers("sessions_lost") == before + 1)


def test_a_number_that_a_restarted_prefill_gave_again_is_not_freed_for_the_request_before(floor: Floor) -> None:
    prefill, decode = floor.linked_pair()
    decode.set(stall_after=-1)
    before = floor.leaving()
    eventually(lambda: floor.migrations() == {(prefill.url, 2)})
    prefill.restart()
    floor.add(prefill)
    after = [floor.leaving() for _ in range(2)]
    eventually(lambda: floor.migrations() == {(prefill.url, 1), (prefill.url, 2)} and sorted(prefill.held) == [1, 2])
    before.leave()
    eventually(lambda: decode.in_flight == 2)
    time.sleep(0.5)
    assert prefill.freed == [] and sorted(prefill.held) == [1, 2]
    assert floor.migrations() == {(prefill.url, 1), (prefill.url, 2)}
    for client in after:
        client.leave()
    eventually(lambda: not prefill.held and not floor.migrations())
    assert sorted(prefill.freed) == [1, 2]


@BY_ROLE
def test_a_node_that_is_taken_out_while_decode_fetches_costs_nobody_a_cache(floor: Floor, role: Role) -> None:
    prefill, decode = floor.linked_pair()
    decode.set(ttft_s=2.0)
    running = start(load.many(floor.urls, 1, model=floor.model, stream=True))
    eventually(lambda: decode.in_flight == 1 and floor.migrations() == {(prefill.url, 2)})
    floor.remove(prefill if role is Role.Prefill else decode)
    assert all(answer.ok and answer.done for answer in running.result(20))
    assert prefill.freed == [] and floor.fabric.late_frees == []
    eventually(lambda: not prefill.strict.links.held and not decode.strict.links.held, within_s=3)


@BY_ROLE
def test_a_request_whose_node_is_taken_out_goes_to_another_once_it_has_taken_too_long(floor: Floor, role: Role) -> None:
    prefill, decode = floor.linked_pair()
    decode.set(stall_after=-1)
    running = start(load.many(floor.urls, 1, model=floor.model, stream=True))
    eventually(lambda: decode.in_flight == 1 and floor.migrations() == {(prefill.url, 2)})
    other = floor.prefill() if role is Role.Prefill else floor.decode()
    decode.set(stall_after=None)  # what comes later is answered
    floor.remove(prefill if role is Role.Prefill else decode)
    assert all(answer.ok and answer.done for answer in running.result(20))
    assert prefill.freed == [2] and len(other.legs) == 1, other
    eventually(lambda: decode.in_flight == 0 and not floor.migrations())


def test_a_node_that_comes_back_is_linked_anew(floor: Floor) -> None:
    prefill, decode = floor.pair()
    assert failed(floor.many(8)) == []
    floor.remove(decode)
    eventually(lambda: not prefill.strict.links.held and not decode.strict.links.held, within_s=3)
    floor.add(decode)
    assert failed(floor.many(16)) == []
    assert floor.fabric.links_made == {(prefill.url, decode.url, 1, 1): 2}


@BY_ROLE
def test_removing_a_node_that_is_dead_leaves_the_other_side_clean(floor: Floor, role: Role) -> None:
    prefill, decode = floor.pair()
    assert floor.chat().ok
    dead, alive = (prefill, decode) if role is Role.Prefill else (decode, prefill)
    dead.crash()
    begun_s = time.monotonic()
    floor.remove(dead)
    assert time.monotonic() - begun_s < 3
    eventually(lambda: not alive.strict.links.held, within_s=3)
    eventually(lambda: floor.link(prefill, decode) is None, within_s=3)


def test_a_restart_of_the_deployment_keeps_links_that_are_true(
    deployment_factory: Callable[..., Deployment], redis: Space, engine_loop: LoopThread
) -> None:
    deployment = deployment_factory(2, settings=DISTSERVE)
    with floor_on(redis, [deployment], engine_loop) as floor:
        prefill, decode = floor.pair()
        assert floor.chat().ok
        deployment.restart()
        floor.wait_until_ready(prefill, decode)
        assert failed(floor.many(16)) == []
        assert warm_up(floor)["SUCCESS"] is True
        assert set(floor.fabric.initialized.values()) == {1}, "no second warm-up"
        deployment.stop()
        decode.restart()  # while nobody looked
        deployment.start()
        floor.add(decode)
        assert failed(floor.many(16)) == []
        assert dict(floor.fabric.links_made) == {(prefill.url, decode.url, 1, n): 1 for n in (1, 2)}


# --- settings of the link


@pytest.mark.parametrize(
    ("settings", "fabric"),
    [
        ({"link_type": "IB", "disable_gdr": True}, {"rdma": {"with_gdr": False, "link_type": 1}}),
        pytest.param({"migration_protocol": "NVLINK"}, {"protocol": 3, "rdma": None}, marks=pytest.mark.wide),
    ],
    ids=["IB without GDR", "NVLINK"],
)
def test_the_kind_of_the_link_is_a_setting(
    deployment_factory: Callable[..., Deployment],
    redis: Space,
    engine_loop: LoopThread,
    settings: dict[str, Any],
    fabric: dict[str, Any],
) -> None:
    deployment = deployment_factory(1, settings=DISTSERVE | settings)
    with floor_on(redis, [deployment], engine_loop, fabric=Fabric(**fabric)) as floor:
        _, decode = floor.pair()
        answer = floor.chat()
        assert answer.ok, (answer.body, floor.fabric.violations)
        assert decode.bodies[0]["migration_request"]["protocol"] == floor.fabric.protocol
