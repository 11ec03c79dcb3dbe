"""`DistServeClient`: LMDeploy's `/distserve/*` calls, by which two engines are linked and caches freed.

Owns the bodies and what is wrong with an answer. It must not know when a link is made or by whom.

Source: lmdeploy/pytorch/disagg/conn/protocol.py and lmdeploy/serve/openai/endpoints/distserve.py (0.18.0);
enumerations travel as their numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from app.errors import EngineBroke
from app.upstream.management import EngineClient

SUCCESS = 1
"""DistServeConnectionStatus."""
PROTOCOLS = {"RDMA": 2, "NVLINK": 3}
LINK_TYPES = {"IB": 1, "RoCE": 2}
CALL_TIMEOUT_S = 15.0
"""Of one call; linking registers the whole KV cache with the network card, which takes seconds."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Migration:
    """How caches travel, from settings: protocol "RDMA" or "NVLINK", link_type "RoCE" or "IB"."""

    protocol: str
    link_type: str
    with_gdr: bool

    @property
    def number(self) -> int:
        return PROTOCOLS[self.protocol]

    def config(self) -> Json:
        """The configuration members of p2p_initialize: that of RDMA where it is used; NVLink has none to give."""
        rdma = {"with_gdr": self.with_gdr, "link_type": LINK_TYPES[self.link_type]} if self.protocol == "RDMA" else None
        return {"tcp_config": None, "rdma_config": rdma, "nvlink_config": None}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What an engine answered to p2p_initialize: its control address, and that of each of its ranks."""

    engine: Json
    kvtransfer: list[Json]


class DistServeClient:
    """One per worker. Every call may raise UpstreamError."""

    def __init__(self, engines: EngineClient, migration: Migration) -> None:
        self._engines = engines
        self._migration = migration

    async def engine_info(self, url: str, key: str | None) -> Json:
        """The engine's configuration: tp_size and more, passed on as it is."""
        found = await self._engines.ask_json("GET", url, "/distserve/engine_info", key, timeout_s=CALL_TIMEOUT_S)
        if isinstance(found, str):  # a JSON string that holds the JSON
            try:
                found = msgspec.json.decode(found)
            except msgspec.DecodeError as e:
                raise EngineBroke(f"engine {url}: its engine_info holds no JSON") from e
        if not isinstance(found, dict) or not isinstance(found.get("tp_size"), int):
            raise EngineBroke(f"engine {url}: its engine_info has no tp_size")
        return found

    async def p2p_initialize(self, local: tuple[str, Json], remote: tuple[str, Json], key: str | None) -> Endpoint:
        """Tell `local` (URL, configuration) of `remote`; what it answers is for the other end's p2p_connect."""
        payload = {
            "local_engine_id": local[0],
            "local_engine_config": local[1],
            "remote_engine_id": remote[0],
            "remote_engine_config": remote[1],
            "protocol": self._migration.number,
            "rank": None,
            **self._migration.config(),
        }
        found = await self._succeed(local[0], "p2p_initialize", key, payload)
        engine, kvtransfer = found.get("engine_endpoint_info"), found.get("kvtransfer_endpoint_info")
        if not isinstance(engine, dict) or not isinstance(kvtransfer, list):
            raise EngineBroke(f"engine {local[0]}: its answer to p2p_initialize names no endpoints")
        return Endpoint(engine, kvtransfer)

    async def p2p_connect(self, url: str, remote: str, endpoint: Endpoint, key: str | None) -> None:
        payload = {
            "protocol": self._migration.number,
            "remote_engine_id": remote,
            "remote_engine_endpoint_info": endpoint.engine,
            "remote_kvtransfer_endpoint_info": endpoint.kvtransfer,
        }
        await self._succeed(url, "p2p_connect", key, payload)

    async def p2p_drop_connect(self, url: str, remote: str, key: str | None) -> None:
        await self._post(url, "p2p_drop_connect", key, {"engine_id": url, "remote_engine_id": remote})

    async def free_cache(self, url: str, session: int, key: str | None) -> None:
        """Let a prefill engine give up the cache of a session. Only for a session that is known to be ours."""
        await self._post(url, "free_cache", key, {"remote_engine_id": url, "remote_session_id": session})

    async def _succeed(self, url: str, call: str, key: str | None, payload: Json) -> Json:
        found = await self._post(url, call, key, payload)
        if not isinstance(found, dict) or found.get("status") != SUCCESS:
            raise EngineBroke(f"engine {url} did not succeed at {call}")
        return found

    async def _post(self, url: str, call: str, key: str | None, payload: Json) -> object:
        path = f"/distserve/{call}"
        return await self._engines.ask_json("POST", url, path, key, payload, timeout_s=CALL_TIMEOUT_S)
