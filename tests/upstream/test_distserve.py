"""LMDeploy's `/distserve/*` as it wants to be called, and what its answers may be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.errors import EngineBroke, EngineRefused
from app.upstream.distserve import DistServeClient, Endpoint, Migration

P, D = "http://10.0.0.1:23333", "http://10.0.0.2:23333"
INFO = {"tp_size": 2, "dp_size": None, "available_nics": ["mlx5_0"]}


class Engines:
    """Stands for the EngineClient: one answer to all."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[tuple[str, str, str, str | None, Any]] = []

    async def ask_json(
        self, method: str, url: str, path: str, key: str | None, payload: object = None, *, timeout_s: float
    ) -> object:
        assert timeout_s > 0
        self.asked.append((method, url, path, key, payload))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def client_of(answer: Any, protocol: str = "RDMA", link_type: str = "RoCE", gdr: bool = True) -> Any:
    engines = Engines(answer)
    return DistServeClient(engines, Migration(protocol, link_type, with_gdr=gdr)), engines  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [INFO, json.dumps(INFO)], ids=["an object", "a string that holds one"])
async def test_an_engine_tells_its_configuration(answer: object) -> None:
    client, engines = client_of(answer)
    assert await client.engine_info(P, "key") == INFO
    assert engines.asked == [("GET", P, "/distserve/engine_info", "key", None)]


@pytest.mark.parametrize("answer", [None, [], {}, "x", "[]", '{"tp_size":"2"}', {"tp_size": None}, 7])
async def test_a_configuration_without_tp_size_is_an_error_that_names_the_engine(answer: object) -> None:
    client, _ = client_of(answer)
    with pytest.raises(EngineBroke, match=P):
        await client.engine_info(P, None)


# Source: lmdeploy/pytorch/disagg/config.py: MigrationProtocol RDMA 2, NVLINK 3; RDMALinkType IB 1, RoCE 2.
@pytest.mark.parametrize(
    ("protocol", "link_type", "gdr", "number", "rdma"),
    [
        ("RDMA", "RoCE", True, 2, {"with_gdr": True, "link_type": 2}),
        ("RDMA", "IB", False, 2, {"with_gdr": False, "link_type": 1}),
        ("NVLINK", "RoCE", True, 3, None),
    ],
)
async def test_each_end_is_told_of_the_other_with_the_migrations_numbers(
    protocol: str, link_type: str, gdr: bool, number: int, rdma: object
) -> None:
    endpoints = {
        "status": 1,
        "engine_endpoint_info": {"zmq_address": "tcp://10.0.0.1:1"},
        "kvtransfer_endpoint_info": [{"protocol": number, "endpoint_info": "x"}],
    }
    client, engines = client_of(endpoints, protocol, link_type, gdr)
    endpoint = await client.p2p_initialize((P, INFO), (D, {"tp_size": 2}), "key")
    assert endpoint == Endpoint(endpoints["engine_endpoint_info"], endpoints["kvtransfer_endpoint_info"])
    await client.p2p_connect(D, P, endpoint, None)
    initialize, connect = engines.asked
    assert initialize == (
        "POST",
        P,
        "/distserve/p2p_initialize",
        "key",
        {
            "local_engine_id": P,
            "local_engine_config": INFO,
            "remote_engine_id": D,
            "remote_engine_config": {"tp_size": 2},
            "protocol": number,
            "rank": None,
            "tcp_config": None,
            "rdma_config": rdma,
            "nvlink_config": None,
        },
    )
    assert connect == (
        "POST",
        D,
        "/distserve/p2p_connect",
        None,
        {
            "protocol": number,
            "remote_engine_id": P,
            "remote_engine_endpoint_info": endpoints["engine_endpoint_info"],
            "remote_kvtransfer_endpoint_info": endpoints["kvtransfer_endpoint_info"],
        },
    )


@pytest.mark.parametrize("answer", [None, {}, [], "ok", {"status": 0}, {"status": 2}, {"status": "1"}])
async def test_an_engine_that_does_not_say_success_did_not_succeed(answer: object) -> None:
    client, _ = client_of(answer)
    with pytest.raises(EngineBroke, match=f"{P} did not succeed at p2p_initialize"):
        await client.p2p_initialize((P, INFO), (D, INFO), None)
    with pytest.raises(EngineBroke, match=f"{P} did not succeed at p2p_connect"):
        await client.p2p_connect(P, D, Endpoint({}, []), None)


@pytest.mark.parametrize("more", [{}, {"engine_endpoint_info": {}}, {"kvtransfer_endpoint_info": []}])
async def test_a_success_without_endpoints_is_none(more: dict[str, Any]) -> None:
    client, _ = client_of({"status": 1, **more})
    with pytest.raises(EngineBroke, match="names no endpoints"):
        await client.p2p_initialize((P, INFO), (D, INFO), None)


async def test_links_are_dropped_and_caches_freed_by_the_engines_own_names() -> None:
    client, engines = client_of({"status": "SUCCESS"})
    await client.p2p_drop_connect(P, D, "key")
    await client.free_cache(P, 7, None)
    assert engines.asked == [
        ("POST", P, "/distserve/p2p_drop_connect", "key", {"engine_id": P, "remote_engine_id": D}),
        ("POST", P, "/distserve/free_cache", None, {"remote_engine_id": P, "remote_session_id": 7}),
    ]


async def test_what_fails_on_the_way_is_told_as_it_is() -> None:
    failure = EngineRefused(f"engine {P} refused the connection")
    client, _ = client_of(failure)
    for call in (client.engine_info(P, None), client.free_cache(P, 7, None), client.p2p_drop_connect(P, D, None)):
        with pytest.raises(EngineRefused) as caught:
            await call
        assert caught.value is failure
