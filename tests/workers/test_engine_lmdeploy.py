"""The simulated LMDeploy engines keep honest books: what the DistServe tests build their proof on.

A small client plays the distributor, by LMDeploy's protocol and by hand; each test changes one thing of it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from app.nodes import Role
from tests.support.http import request
from tests.support.loop import LoopThread
from tests.support.pd import Fabric, PdEngine
from tests.support.process import Process
from tests.support.template import TEMPLATE
from tests.support.wait import aeventually, eventually
from workers.engine.books import Books
from workers.engine.command import add_arguments, run
from workers.engine.lmdeploy import LmdeployEngine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROXY = {"x-lmdeploy-distserve-proxy": "1", "x-request-id": "r1"}
RDMA = {"with_gdr": True, "link_type": 2}
JSON = tuple[int, Any]


class Distributor:
    """LMDeploy's protocol, step by step; `leave` closes connections in mid-answer."""

    def __init__(self, prefill: PdEngine, decode: PdEngine, client: aiohttp.ClientSession) -> None:
        self.p, self.d, self.client = prefill, decode, client

    async def call(self, engine: PdEngine, path: str, value: Any, headers: dict[str, str] | None = None) -> JSON:
        async with self.client.post(engine.url + path, json=value, headers=headers) as answer:
            return answer.status, await answer.json(content_type=None)

    async def info(self, engine: PdEngine) -> dict[str, Any]:
        async with self.client.get(engine.url + "/distserve/engine_info") as answer:
            text = await answer.json()
        assert isinstance(text, str), "JSON in a JSON string"
        found: dict[str, Any] = json.loads(text)
        return found

    async def initialize(self, us: PdEngine, them: PdEngine, **changes: Any) -> JSON:
        value = {
            "local_engine_id": us.url,
            "local_engine_config": await self.info(us),
            "remote_engine_id": them.url,
            "remote_engine_config": await self.info(them),
            "protocol": 2,
            "rank": None,
            "tcp_config": None,
            "rdma_config": RDMA,
            "nvlink_config": None,
        }
        return await self.call(us, "/distserve/p2p_initialize", value | changes)

    async def connect(self, us: PdEngine, them: PdEngine, told: dict[str, Any], **changes: Any) -> JSON:
        value = {
            "protocol": 2,
            "remote_engine_id": them.url,
            "remote_engine_endpoint_info": told["engine_endpoint_info"],
            "remote_kvtransfer_endpoint_info": told["kvtransfer_endpoint_info"],
        }
        return await self.call(us, "/distserve/p2p_connect", value | changes)

    async def link(self) -> None:
        _, of_p = await self.initialize(self.p, self.d)
        _, of_d = await self.initialize(self.d, self.p)
        assert (await self.connect(self.p, self.d, of_d))[1] == {"status": 1}
        assert (await self.connect(self.d, self.p, of_p))[1] == {"status": 1}

    def body(self, path: str = CHAT, **fields: Any) -> dict[str, Any]:
        asked = {"prompt": "hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
        return {"model": "sim", **asked, **fields}

    async def prefill(self, path: str = CHAT, *, headers: dict[str, str] = PROXY, **fields: Any) -> JSON:
        one = {"max_tokens": 1} | ({"max_completion_tokens": 1} if path == CHAT else {})
        value = self.body(path, **(one | {"with_cache": True, "preserve_cache": True, "stream": False} | fields))
        return await self.call(self.p, path, value, headers)

    def migration(self, told: dict[str, Any], **changes: Any) -> dict[str, Any]:
        return {
            "protocol": 2,
            "remote_engine_id": self.p.url,
            "remote_session_id": told.get("cache_session_id", 0),
            "remote_token_id": told["remote_token_ids"][-1],
            "remote_block_ids": told["cache_block_ids"],
            "is_dummy_prefill": False,
        } | changes

    async def decode(self, migration: dict[str, Any], path: str = CHAT, headers: Any = PROXY, **fields: Any) -> JSON:
        return await self.call(self.d, path, self.body(path, migration_request=migration, **fields), headers)

    async def free(self, number: Any, **changes: Any) -> JSON:
        value = {"remote_engine_id": self.p.url, "remote_session_id": number}
        return await self.call(self.p, "/distserve/free_cache", value | changes)


@pytest.fixture
def fabric() -> Fabric:
    return Fabric()


@pytest.fixture
def engines(engine_loop: LoopThread, fabric: Fabric) -> Iterator[tuple[PdEngine, PdEngine]]:
    made = [PdEngine(role, fabric, loop=engine_loop) for role in (Role.Prefill, Role.Decode)]
    yield made[0], made[1]
    for engine in made:
        engine.close()


@pytest.fixture
async def us(engines: tuple[PdEngine, PdEngine]) -> Any:
    async with aiohttp.ClientSession() as client:
        yield Distributor(*engines, client)


def refused(answer: JSON, fabric: Fabric, reason: str) -> None:
    """400 with the reason, which is the only violation so far; it is taken away."""
    assert answer[0] == 400, answer
    assert reason in answer[1]["error"]["message"], answer
    assert len(fabric.violations) == 1 and reason in fabric.violations[0]
    fabric.violations.clear()


# --- links


async def test_engine_info_is_json_in_a_json_string(us: Distributor) -> None:
    us.p.set(tp_size=4)
    assert await us.info(us.p) == {
        "tp_size": 4,
        "ep_size": 1,
        "dp_size": 1,
        "pp_size": None,
        "dp_rank": 0,
        "block_size": 64,
        "num_cpu_blocks": 0,
        "num_gpu_blocks": 100_000,
    }


async def test_a_link_is_true_once_both_sides_are_connected(us: Distributor, fabric: Fabric) -> None:
    status, of_p = await us.initialize(us.p, us.d)
    assert (status, of_p["status"]) == (200, 1)
    assert of_p["engine_endpoint_info"]["zmq_address"].startswith("tcp://")
    assert [entry["protocol"] for entry in of_p["kvtransfer_endpoint_info"]] == [2]
    _, of_d = await us.initialize(us.d, us.p)
    await us.connect(us.p, us.d, of_d)
    assert us.p.links == us.d.links == set()
    await us.connect(us.d, us.p, of_p)
    assert us.p.links == {us.d.url} and us.d.links == {us.p.url}
    assert dict(fabric.links_made) == {(us.p.url, us.d.url, 1, 1): 1}
    assert not fabric.violations


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"local_engine_id": "http://10.0.0.1:1"}, "local_engine_id"),
        ({"remote_engine_id": "http://10.0.0.1:1"}, "unknown engine"),
        ({"protocol": "RDMA"}, "protocol"),
        ({"rdma_config": {"with_gdr": True, "link_type": "RoCE"}}, "rdma_config"),
        ({"rdma_config": {"with_gdr": True, "link_type": 1}}, "rdma_config"),
        ({"nvlink_config": {}}, "NVLINK"),
        ({"colour": 1}, "keys of p2p_initialize"),
        ({"rank": 0}, "rank"),
    ],
)
async def test_initialize_is_held_to_every_field(
    us: Distributor, fabric: Fabric, changes: dict[str, Any], reason: str
) -> None:
    refused(await us.initialize(us.p, us.d, **changes), fabric, reason)


async def test_initialize_asks_prefill_first_and_takes_the_same_tp_size_only(us: Distributor, fabric: Fabric) -> None:
    refused(await us.initialize(us.d, us.p), fabric, "asked first")
    us.d.set(tp_size=2)
    refused(await us.initialize(us.p, us.d), fabric, "tp_size 2, mine is 1")


async def test_nvlink_needs_no_rdma_configuration(us: Distributor, fabric: Fabric) -> None:
    fabric.protocol = 3
    refused(await us.initialize(us.p, us.d, protocol=3), fabric, "RDMA")
    assert (await us.initialize(us.p, us.d, protocol=3, rdma_config=None, nvlink_config={}))[0] == 200


async def test_connect_wants_what_the_other_side_answered(us: Distributor, fabric: Fabric) -> None:
    _, of_p = await us.initialize(us.p, us.d)
    refused(await us.connect(us.d, us.p, of_p), fabric, "without p2p_initialize")
    _, of_d = await us.initialize(us.d, us.p)
    other = {**of_d, "engine_endpoint_info": {"zmq_address": "tcp://10.0.0.1:1"}}
    refused(await us.connect(us.p, us.d, other), fabric, "was never")
    other = {**of_d, "kvtransfer_endpoint_info": []}
    refused(await us.connect(us.p, us.d, other), fabric, "remote_kvtransfer_endpoint_info")


async def test_a_restart_voids_the_link_for_both_sides(us: Distributor, fabric: Fabric) -> None:
    await us.link()
    _, told = await us.prefill()
    await asyncio.to_thread(us.d.restart)
    assert us.p.links == us.d.links == set()
    assert (await us.decode(us.migration(told)))[0] == 400
    assert len(fabric.refusals) == 1 and not fabric.violations, "nobody can know of a restart in time"
    await us.link()
    assert sorted(fabric.links_made) == [(us.p.url, us.d.url, 1, 1), (us.p.url, us.d.url, 1, 2)]
    assert (await us.decode(us.migration(told)))[0] == 200


async def test_an_address_of_before_the_restart_is_a_failed_connect(us: Distributor, fabric: Fabric) -> None:
    await us.initialize(us.p, us.d)
    _, of_d = await us.initialize(us.d, us.p)
    await asyncio.to_thread(us.d.restart)
    assert await us.connect(us.p, us.d, of_d) == (200, {"status": 2})
    assert not fabric.violations


async def test_drop_connect_ends_the_link(us: Distributor, fabric: Fabric) -> None:
    await us.link()
    value = {"engine_id": us.p.url, "remote_engine_id": us.d.url}
    assert await us.call(us.p, "/distserve/p2p_drop_connect", value) == (200, {"success": True})
    assert us.d.links == set()
    assert (await us.call(us.p, "/distserve/p2p_drop_connect", value))[0] == 400
    assert len(fabric.refusals) == 1 and not fabric.violations
    refused(await us.call(us.d, "/distserve/p2p_drop_connect", value), fabric, "engine_id")


# --- sessions


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_session_is_held_from_prefill_to_the_first_token(
    us: Distributor, fabric: Fabric, path: str, stream: bool
) -> None:
    await us.link()
    _, told = await us.prefill(path)
    assert us.p.held == [told["cache_session_id"]] == [1]
    assert us.p.blocks == len(told["cache_block_ids"]) == 1
    assert told["usage"]["completion_tokens"] == 1
    us.d.set(ttft_s=0.2, gap_s=0.2, chunks=3)
    body = us.body(path, migration_request=us.migration(told), stream=stream)
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        task = group.create_task(self_read(us, path, body))
        await aeventually(lambda: us.d.in_flight == 1)
        assert us.p.held == [1]
        await aeventually(lambda: us.p.held == [] and us.d.in_flight == 1)
        await task
    assert (us.p.blocks, fabric.migrated, fabric.violations) == (0, 1, [])


async def self_read(us: Distributor, path: str, body: dict[str, Any]) -> bytes:
    async with us.client.post(us.d.url + path, json=body, headers=PROXY) as answer:
        return await answer.read()


async def test_blocks_grow_with_the_prompt_and_run_out(us: Distributor, fabric: Fabric) -> None:
    us.p.set(num_gpu_blocks=4)
    _, told = await us.prefill(COMPLETIONS, prompt="x" * 128)  # {"prompt":"..."}: 141 bytes
    assert told["cache_block_ids"] == [0, 1, 2]
    assert (await us.prefill(COMPLETIONS, prompt="x" * 128))[0] == 503
    assert (await us.prefill())[1]["cache_block_ids"] == [3]
    assert (await us.free(told["cache_session_id"])) == (200, {"status": "SUCCESS"})
    assert us.p.blocks == 1


async def test_ids_of_all_kinds(us: Distributor) -> None:
    assert re.fullmatch(r"chatcmpl-.+", (await us.prefill())[1]["id"])
    assert (await us.prefill(COMPLETIONS))[1]["id"] == "-1"
    assert (await us.prefill(COMPLETIONS, session_id=77))[1]["id"] == "77", "the client's, not the engine's"
    us.p.set(cache_session_id=False)
    assert "cache_session_id" not in (await us.prefill())[1]
    us.p.set(ids="integer")
    _, told = await us.prefill()
    assert told["id"] == str(us.p.held[-1]) == "5"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"max_tokens": 2}, "max_tokens"),
        ({"max_completion_tokens": 9}, "max_completion_tokens"),
        ({"stream": True}, "stream"),
        ({"with_cache": 1}, "with_cache"),
        ({"preserve_cache": False}, "preserve_cache"),
        ({"n": 2}, "n is 2"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"migration_request": {}}, "unknown on prefill"),
        ({"headers": {"x-request-id": "r1"}}, "without x-lmdeploy-distserve-proxy"),
        ({"headers": {**PROXY, "x-lmdeploy-distserve-proxy": "yes"}}, "x-lmdeploy-distserve-proxy"),
        ({"headers": {"x-lmdeploy-distserve-proxy": "1"}}, "x-request-id"),
    ],
)
async def test_prefill_is_held_to_every_field(
    us: Distributor, fabric: Fabric, fields: dict[str, Any], reason: str
) -> None:
    refused(await us.prefill(**fields), fabric, reason)
    assert us.p.held == []


async def test_an_older_engine_needs_no_header(us: Distributor, fabric: Fabric) -> None:
    us.p.set(wants_header=False)
    assert (await us.prefill(headers={"x-request-id": "r1"}))[0] == 200
    assert not fabric.violations


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": 3}, "protocol"),
        ({"remote_session_id": 99}, "remote_session_id 99"),
        ({"remote_session_id": "1"}, "remote_session_id"),
        ({"remote_block_ids": [5]}, "blocks [5]"),
        ({"remote_token_id": 5}, "token 5"),
        ({"remote_engine_id": "http://10.0.0.1:1"}, "unknown engine"),
        ({"is_dummy_prefill": True}, "is_dummy_prefill"),
        ({"more": 1}, "keys of migration_request"),
    ],
)
async def test_decode_holds_a_migration_to_what_prefill_answered(
    us: Distributor, fabric: Fabric, changes: dict[str, Any], reason: str
) -> None:
    await us.link()
    _, told = await us.prefill()
    refused(await us.decode(us.migration(told, **changes)), fabric, reason)
    assert us.p.held == [1], "nothing is freed by a refusal"
    assert (await us.decode(us.migration(told)))[0] == 200
    assert us.p.held == []


async def test_decode_refuses_another_prompt_or_request_a_copy_and_n(us: Distributor, fabric: Fabric) -> None:
    await us.link()
    _, told = await us.prefill()
    refused(await us.decode(us.migration(told), messages=[]), fabric, "prompt")
    refused(await us.decode(us.migration(told), headers=PROXY | {"x-request-id": "r2"}), fabric, "x-request-id r2")
    refused(await us.decode(us.migration(told), n=2), fabric, "n > 1")
    refused(await us.decode(us.migration(told), with_cache=True), fabric, "unknown on decode")
    refused(await us.decode(us.migration(told), headers={"x-request-id": "r1"}), fabric, "without x-lmdeploy")
    assert (await us.decode(us.migration(told)))[0] == 200
    assert (await us.decode(us.migration(told)))[0] == 400
    assert fabric.refusals and not fabric.violations


async def test_decode_refuses_without_a_link(us: Distributor, fabric: Fabric) -> None:
    _, told = await us.prefill()
    refused(await us.decode(us.migration(told)), fabric, "no link")


async def test_free_cache_of_what_is_not_held(us: Distributor, fabric: Fabric) -> None:
    await us.link()
    for number in (0, -1, "1", 1):
        refused(await us.free(number), fabric, "session")
    _, told = await us.prefill()
    refused(await us.free(1, remote_engine_id=us.d.url), fabric, "remote_engine_id")
    assert (await us.free(1))[0] == 200
    refused(await us.free(1), fabric, "not held: freed")
    _, told = await us.prefill()
    await us.decode(us.migration(told))
    assert (await us.free(2))[0] == 200, "decode was a moment quicker"
    assert fabric.late_frees == [2] and not fabric.violations


async def test_a_session_that_is_freed_while_decode_pulls_it_is_a_violation(us: Distributor, fabric: Fabric) -> None:
    await us.link()
    _, told = await us.prefill()
    us.d.set(ttft_s=0.2)
    decode = asyncio.create_task(us.decode(us.migration(told)))
    await aeventually(lambda: us.d.in_flight == 1)
    await us.free(1)
    await decode
    assert len(fabric.violations) == 1 and "while decode pulled it" in fabric.violations[0]


async def test_a_number_that_was_not_told_leaves_an_orphan(us: Distributor, fabric: Fabric) -> None:
    await us.link()
    us.p.set(cache_session_id=False)
    _, told = await us.prefill()
    assert (await us.decode(us.migration(told)))[0] == 200
    assert (fabric.orphans, us.p.held, fabric.violations) == ([1], [], [])


# --- what fails


async def test_a_decode_that_fails_before_its_first_token_leaves_the_session_held(us: Distributor) -> None:
    await us.link()
    _, told = await us.prefill()
    us.d.set(status=500)
    assert (await us.decode(us.migration(told)))[0] == 500
    us.d.set(status=200, cut_after=-1)
    with pytest.raises(aiohttp.ClientError):
        await us.decode(us.migration(told))
    us.d.set(cut_after=None, ttft_s=30)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            await us.decode(us.migration(told))
    await aeventually(lambda: us.d.in_flight == 0)
    assert us.p.held == [1]
    us.d.set(ttft_s=0, cut_after=1)
    with pytest.raises(aiohttp.ClientError):
        await us.decode(us.migration(told), stream=True)
    assert us.p.held == []


@pytest.mark.parametrize(("abort_frees", "held"), [(True, []), (False, [1])])
async def test_a_prefill_whose_client_leaves(us: Distributor, abort_frees: bool, held: list[int]) -> None:
    us.p.set(ttft_s=30, abort_frees=abort_frees)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            await us.prefill()
    await aeventually(lambda: us.p.in_flight == 0)
    assert us.p.held == held


async def test_prefill_answers_that_lack_something(us: Distributor, fabric: Fabric) -> None:
    us.p.set(omit=("cache_block_ids",))
    assert {"cache_block_ids", "remote_token_ids", "cache_session_id"} - set((await us.prefill())[1]) == {
        "cache_block_ids"
    }
    us.p.set(omit=(), finish_reason="abort")
    _, told = await us.prefill()
    assert (told["cache_block_ids"], told["choices"][0]["finish_reason"]) == (None, "abort")
    us.p.set(finish_reason="", ignores_cache=True)
    assert "cache_block_ids" not in (await us.prefill())[1]
    us.p.set(ignores_cache=False, status=503)
    assert (await us.prefill())[0] == 503
    us.p.set(status=200, cut_after=1)
    with pytest.raises(aiohttp.ClientError):
        await us.prefill()
    assert us.p.held == [1], "only of the first: the others hold nothing that anybody could free"


async def test_faults_of_distserve_calls(us: Distributor, fabric: Fabric) -> None:
    us.p.fault("p2p_initialize", status=503, times=2)
    us.p.fault("p2p_initialize", body={"status": 2})
    us.p.fault("free_cache", delay_s=0.2)
    assert [(await us.initialize(us.p, us.d))[0] for _ in range(2)] == [503, 503]
    assert fabric.initialized == {}
    assert await us.initialize(us.p, us.d) == (200, {"status": 2})
    assert (await us.initialize(us.p, us.d))[1]["status"] == 1
    _, told = await us.prefill()
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    await us.free(told["cache_session_id"])
    assert loop.time() - begun_s > 0.19
    assert us.p.freed == [1]
    us.p.set(status=500, cut_after=0)
    assert (await us.info(us.p))["tp_size"] == 1 and (await us.initialize(us.p, us.d))[0] == 200
    assert not fabric.violations


async def test_dummy_prefill_names_no_session(us: Distributor, fabric: Fabric) -> None:
    fabric.dummy = True
    nobody = {"remote_token_ids": [0], "cache_block_ids": []}
    assert (await us.decode(us.migration(nobody, remote_engine_id="dummy:dummy", is_dummy_prefill=True)))[0] == 200
    refused(await us.decode(us.migration(nobody)), fabric, "is_dummy_prefill")


@pytest.mark.parametrize("how", ["the client leaves", "the engine dies"])
async def test_a_session_may_be_freed_again_where_the_answer_was_lost(
    us: Distributor, fabric: Fabric, how: str
) -> None:
    await us.prefill()
    us.p.fault("free_cache", delay_s=30)
    lost = asyncio.create_task(us.free(1))
    await aeventually(lambda: us.p.freed == [1])
    if how == "the client leaves":
        lost.cancel()
    else:
        await asyncio.to_thread(us.p.restart)
    with pytest.raises((asyncio.CancelledError, aiohttp.ClientError)):
        await lost
    await aeventually(lambda: us.p.in_flight == 0)
    assert (await us.free(1))[0] == 200
    assert not fabric.violations


# --- as processes of their own


def test_engines_of_their_own_processes_end_sessions_by_http(tmp_path: Any) -> None:
    words = [sys.executable, "-m", "app.cli", "engine", "--pd-protocol", "lmdeploy", "--role"]
    running = [Process([*words, role], log_file=tmp_path / role, template=TEMPLATE) for role in ("Prefill", "Decode")]
    try:
        urls = [eventually(lambda p=p: re.search(r"http://\S+", p.log()), within_s=20)[0] for p in running]  # type: ignore[misc]

        async def scenario() -> JSON:
            async with aiohttp.ClientSession() as client:
                us = Distributor(Remote(urls[0]), Remote(urls[1]), client)  # type: ignore[arg-type]
                await us.link()
                _, told = await us.prefill()
                assert books(urls[0])["sessions"] == 1
                return await us.decode(us.migration(told))

        assert asyncio.run(scenario())[0] == 200
        eventually(lambda: books(urls[0])["sessions"] == 0)
        assert [books(url)["violations"] for url in urls] == [[], []]
    finally:
        for process in running:
            process.kill()


class Remote:
    def __init__(self, url: str) -> None:
        self.url = url


def books(url: str) -> dict[str, Any]:
    found: dict[str, Any] = request("GET", url + "/sim/books").json()
    return found


def test_a_hybrid_engine_speaks_no_distserve(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args(["--pd-protocol", "lmdeploy"])) == 2
    assert "Prefill or Decode" in capsys.readouterr().err


def test_books_forget_what_is_long_over(monkeypatch: pytest.MonkeyPatch) -> None:
    books = Books(Fabric())
    monkeypatch.setattr("workers.engine.books.REMEMBERED", 2)
    record = object()
    for _ in range(4):
        session = books.hold(type("R", (), {"id": "r", "running": False})(), {"prompt": "x"}, 64, 10)
        assert session is not None and record
        books.end(session, "freed")
    assert list(books.ended) == [3, 4]
    assert repr(books) == "<Books 0 sessions, 0 blocks>"


def test_it_shows_what_it_holds(engines: tuple[PdEngine, PdEngine], fabric: Fabric) -> None:
    assert re.fullmatch(
        r"<LmdeployEngine Prefill http\S+ 1\. <Books 0 sessions, 0 blocks> <Links 0, 0 true>>", repr(engines[0])
    )
    assert repr(fabric) == "<Fabric 2 engines, 0 sessions held, 0 migrated, 0 violations, 0 refusals>"
    with pytest.raises(ValueError, match="Hybrid"):
        LmdeployEngine(Role.Hybrid)
