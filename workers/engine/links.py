"""The links of one simulated LMDeploy engine: how they are made, what makes them void.

A link has two sides, each at its own engine: p2p_initialize gives a side its address, p2p_connect ties it to the
other's. It is true as long as both sides are connected and neither engine has restarted since.

Source: lmdeploy 0.18.0, pytorch/disagg/conn/engine_conn.py and the order of calls in conn/proxy_conn.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.nodes import Role
from workers.engine.books import FAIL, RDMA, SUCCESS, Link, Stale, keys_are
from workers.engine.rules import need

if TYPE_CHECKING:
    from workers.engine.lmdeploy import LmdeployEngine


class Links:
    """This engine's side of each link."""

    def __init__(self, engine: LmdeployEngine) -> None:
        self.held: dict[str, Link] = {}
        self.dropped: set[str] = set()  # remotes whose link was dropped, or voided by a restart
        self.addresses: set[str] = set()  # of all incarnations
        self._engine = engine

    def __repr__(self) -> str:
        return f"<Links {len(self.held)}, {sum(self.true_to(remote) is not None for remote in self.held)} true>"

    def void(self) -> None:
        """The engine has restarted."""
        self.dropped |= set(self.held)
        self.held.clear()

    def other(self, name: object) -> LmdeployEngine | None:
        """An engine of the other role; None: one that is not in an open Fabric."""
        us = self._engine
        need(isinstance(name, str) and name, f"engine id {name!r}")
        other = us.fabric.engines.get(str(name))
        if other is None:
            need(not us.fabric.closed, f"unknown engine {name}")
            return None
        need(other.role is not us.role, f"{name} is {other.role.name} too")
        return other

    def initialize(self, body: dict[str, Any]) -> dict[str, Any]:
        us = self._engine
        wanted = {"local_engine_id", "local_engine_config", "remote_engine_id", "remote_engine_config", "protocol"}
        kinds = {"tcp_config", "rdma_config", "nvlink_config"}
        keys_are(body, wanted, "p2p_initialize", maybe={"rank"} | kinds)
        fabric = us.fabric
        need(
            body["local_engine_id"] == us.name,
            f"local_engine_id {body['local_engine_id']}, I am {us.name}",
        )
        need(body["local_engine_config"] == us.info(), f"local_engine_config {body['local_engine_config']}")
        remote = str(body["remote_engine_id"])
        other = self.other(remote)
        theirs = body["remote_engine_config"]
        keys_are(theirs, set(us.info()), "remote_engine_config")
        need(
            theirs["tp_size"] == us.traits.tp_size,
            f"tp_size {theirs['tp_size']}, mine is {us.traits.tp_size}",
        )
        if other is not None and theirs != other.info():
            raise Stale(f"remote_engine_config is not what {remote} tells now")
        need(body["protocol"] == fabric.protocol, f"protocol {body['protocol']!r}, not {fabric.protocol}")
        need(body.get("rank") is None, f"rank {body.get('rank')!r}")
        need(body.get("tcp_config") is None, "a TCP configuration")
        if fabric.protocol == RDMA:
            need(body.get("rdma_config") == fabric.rdma, f"rdma_config {body.get('rdma_config')}, not {fabric.rdma}")
            need(body.get("nvlink_config") is None, "an NVLINK configuration")
        else:
            need(body.get("nvlink_config") in (None, {}), f"nvlink_config {body.get('nvlink_config')}")
            need(body.get("rdma_config") is None, "an RDMA configuration")
        if us.role is Role.Decode and other is not None and us.name not in other.links.held:
            need(
                us.name in other.links.dropped or other.incarnation > 1,
                f"{remote}, the prefill, is asked first",
            )
            raise Stale(f"{remote} was asked before it restarted")
        fabric.initialized[us.name, remote, us.incarnation] += 1
        nth = fabric.initialized[us.name, remote, us.incarnation]
        address = f"tcp://{us.host}:{10_000 + len(self.addresses)}-{us.incarnation}.{nth}"
        self.addresses.add(address)
        told = {"protocol": fabric.protocol, "endpoint_info": f'{{"of": "{address}"}}', "cache_pools": None}
        self.held[remote] = Link(remote, address, [told])
        self.dropped.discard(remote)
        return {
            "status": SUCCESS,
            "engine_endpoint_info": {"zmq_address": address},
            "kvtransfer_endpoint_info": [told],
        }

    def connect(self, body: dict[str, Any]) -> dict[str, Any]:
        us = self._engine
        wanted = {"protocol", "remote_engine_id", "remote_engine_endpoint_info", "remote_kvtransfer_endpoint_info"}
        keys_are(body, wanted, "p2p_connect")
        keys_are(body["remote_engine_endpoint_info"], {"zmq_address"}, "remote_engine_endpoint_info")
        need(
            body["protocol"] == us.fabric.protocol,
            f"protocol {body['protocol']!r}, not {us.fabric.protocol}",
        )
        remote = str(body["remote_engine_id"])
        other = self.other(remote)
        link = self.held.get(remote)
        if link is None and remote in self.dropped:
            raise Stale(f"{remote} was initialised before the restart")
        need(link is not None, f"p2p_connect to {remote} without p2p_initialize")
        assert link is not None
        address = body["remote_engine_endpoint_info"]["zmq_address"]
        if other is None:
            link.connected_to = 1
            return {"status": SUCCESS}
        theirs = other.links.held.get(us.name)
        if theirs is None or theirs.address != address:
            need(address in other.links.addresses, f"zmq_address {address} was never {remote}'s")
            return {"status": FAIL}  # it has restarted, or was initialised anew, since it told this address
        transfer = body["remote_kvtransfer_endpoint_info"]
        keep = [{key: value for key, value in entry.items() if value is not None} for entry in transfer]
        told = [{key: value for key, value in entry.items() if value is not None} for entry in theirs.transfer]
        need(keep == told, f"remote_kvtransfer_endpoint_info {transfer}")
        was_whole = self.true_to(remote) is not None
        link.connected_to = other.incarnation
        if not was_whole and self.true_to(remote) is not None:
            prefill, decode = (us, other) if us.role is Role.Prefill else (other, us)
            key = (prefill.name, decode.name, prefill.incarnation, decode.incarnation)
            us.fabric.links_made[key] += 1
        return {"status": SUCCESS}

    def drop(self, body: dict[str, Any]) -> dict[str, Any]:
        us = self._engine
        keys_are(body, {"engine_id", "remote_engine_id"}, "p2p_drop_connect")
        need(body["engine_id"] == us.name, f"engine_id {body['engine_id']}, I am {us.name}")
        remote = str(body["remote_engine_id"])
        if remote not in self.held:
            # LMDeploy answers 500 here: after a restart, or where set-up ended half way, nobody can know.
            raise Stale(f"no link to {remote}")
        del self.held[remote]
        self.dropped.add(remote)
        return {"success": True}

    def true_to(self, remote: str) -> Link | None:
        """The link, if it is connected on both sides and neither has restarted since."""
        us = self._engine
        link = self.held.get(remote)
        if link is None or not link.connected_to:
            return None
        other = us.fabric.engines.get(remote)
        if other is None:
            return link
        theirs = other.links.held.get(us.name)
        if theirs is None or theirs.connected_to != us.incarnation or link.connected_to != other.incarnation:
            return None
        return link
