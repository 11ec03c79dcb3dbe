"""Several private servers that are one Redis: a master with a replica and three sentinels, and a cluster."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import redis

from tests.support.process import Process
from tests.support.redis import AT_ONCE, PrivateRedis, free_port, low_port, server_binary
from tests.support.wait import eventually

MASTER = "evenhand-test"
DOWN_AFTER_MS = 500
SYNC_AT_ONCE = {"repl-diskless-sync-delay": "0"}  # by default a master waits 5 s for more replicas
SLOTS = 16384
FAILED_OVER_WITHIN_S = 15.0


def is_master(server: PrivateRedis) -> bool:
    with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
        return str(server.cli("ROLE")[0]) == "master"
    return False


def wait_for_failover(server: PrivateRedis) -> None:
    """Until `server` has become the master."""
    eventually(lambda: is_master(server), within_s=FAILED_OVER_WITHIN_S)


class Sentinel:
    """One sentinel process."""

    def __init__(self, master: PrivateRedis, *, password: str = "", own_password: str = "") -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="evenhand-sentinel-"))
        self.port = free_port()
        self._own_password = own_password
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {self.directory}",
            f"sentinel monitor {MASTER} 127.0.0.1 {master.port} 2",
            f"sentinel down-after-milliseconds {MASTER} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {MASTER} 3000",
        ]
        if password:
            lines.append(f"sentinel auth-pass {MASTER} {password}")
        if own_password:
            lines += [f"requirepass {own_password}", f"sentinel sentinel-pass {own_password}"]
        conf = self.directory / "sentinel.conf"
        conf.write_text("\n".join(lines) + "\n")
        self.process = Process([server_binary(), str(conf), "--sentinel"], log_file=self.directory / "log")

    def ask(self, *command: str) -> object:
        password = self._own_password or None
        with redis.Redis(port=self.port, password=password, socket_timeout=1, retry=AT_ONCE, protocol=2) as client:
            client.response_callbacks.clear()
            return client.execute_command(*command)  # type: ignore[no-untyped-call]

    def knows_all(self, sentinels: int) -> bool:
        """Whether it has found the replica and the other sentinels."""
        with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
            replicas, others = self.ask("SENTINEL", "REPLICAS", MASTER), self.ask("SENTINEL", "SENTINELS", MASTER)
            assert isinstance(replicas, list) and isinstance(others, list)
            return len(replicas) == 1 and len(others) == sentinels - 1
        return False

    def close(self) -> None:
        self.process.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


class SentinelSet:
    """A master, a replica and three sentinels that agree on them."""

    def __init__(self, master: PrivateRedis, replica: PrivateRedis, sentinels: Sequence[Sentinel], user: str) -> None:
        self.master, self.replica, self.sentinels = master, replica, sentinels
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in sentinels)
        self.url = f"redis+sentinel://{user}{hosts}/{MASTER}"


@contextmanager
def sentinel_set(*, password: str = "", sentinel_password: str = "") -> Iterator[SentinelSet]:
    auth = {"requirepass": password, "masterauth": password} if password else {}
    with ExitStack() as stack:
        master, replica = (
            stack.enter_context(PrivateRedis(tcp=True, options=SYNC_AT_ONCE | auth, password=password))
            for _ in range(2)
        )
        replica.cli("REPLICAOF", "127.0.0.1", master.port)
        eventually(lambda: replica.cli("ROLE")[3] == "connected", within_s=10)
        sentinels = []
        for _ in range(3):
            sentinels.append(Sentinel(master, password=password, own_password=sentinel_password))
            stack.callback(sentinels[-1].close)
        eventually(lambda: all(sentinel.knows_all(3) for sentinel in sentinels), within_s=15, every_s=0.05)
        group = SentinelSet(master, replica, sentinels, f":{password}@" if password else "")
        if sentinel_password:
            group.url += f"?sentinel_password={sentinel_password}"
        yield group


class Cluster:
    """Three masters, and a replica of the one that owns `key`; `owner`, `replica`, `others` by that."""

    def __init__(self, owner: PrivateRedis, replica: PrivateRedis, others: Sequence[PrivateRedis], slot: int) -> None:
        self.owner, self.replica, self.others, self.slot = owner, replica, others, slot

    @property
    def url(self) -> str:
        """Names the two masters that own nothing of ours: the owner has to be learnt."""
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self.others)


@contextmanager
def cluster(key: str) -> Iterator[Cluster]:
    with ExitStack() as stack:
        servers = []
        for _ in range(4):
            options = {"cluster-enabled": "yes", "cluster-node-timeout": "1000", "port": str(low_port())}
            servers.append(stack.enter_context(PrivateRedis(options=SYNC_AT_ONCE | options)))
        *masters, replica = servers
        for i, server in enumerate(masters):
            server.cli("CLUSTER", "ADDSLOTS", *range(SLOTS * i // 3, SLOTS * (i + 1) // 3))
            server.cli("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for server in servers[1:]:
            server.cli("CLUSTER", "MEET", "127.0.0.1", servers[0].port)

        def settled() -> bool:
            infos = [cluster_info(server) for server in servers]
            return all(info["cluster_state"] == "ok" and info["cluster_known_nodes"] == "4" for info in infos)

        eventually(settled, within_s=15, every_s=0.05)
        slot = int(masters[0].cli("CLUSTER", "KEYSLOT", key))
        owner = masters[slot * 3 // SLOTS]
        replica.cli("CLUSTER", "REPLICATE", node_id(owner))
        eventually(lambda: replica.cli("ROLE")[3] == "connected", within_s=15)
        # A replica that the others don't know of yet is elected by nobody.
        eventually(lambda: all(knows_replica(server, replica) for server in masters), within_s=15, every_s=0.05)
        yield Cluster(owner, replica, [server for server in masters if server is not owner], slot)


def cluster_info(server: PrivateRedis) -> dict[str, str]:
    text = server.cli("CLUSTER", "INFO")
    return dict(text) if isinstance(text, dict) else dict(line.split(":", 1) for line in str(text).split())


def node_id(server: PrivateRedis) -> str:
    return str(server.cli("CLUSTER", "MYID"))


def knows_replica(server: PrivateRedis, replica: PrivateRedis) -> bool:
    nodes = server.cli("CLUSTER", "NODES")
    if isinstance(nodes, dict):
        return any(node["node_id"] == node_id(replica) and "slave" in node["flags"] for node in nodes.values())
    return any(line.startswith(node_id(replica)) and "slave" in line for line in str(nodes).splitlines())


def hand_over(slot: int, source: PrivateRedis, target: PrivateRedis, nodes: Sequence[PrivateRedis]) -> None:
    """Move a slot from one master to the other, key by key, as `redis-cli --cluster reshard` does."""
    target.cli("CLUSTER", "SETSLOT", slot, "IMPORTING", node_id(source))
    source.cli("CLUSTER", "SETSLOT", slot, "MIGRATING", node_id(target))
    while keys := source.cli("CLUSTER", "GETKEYSINSLOT", slot, 100):
        source.cli("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "REPLACE", "KEYS", *keys)
        time.sleep(0.05)  # requests meet a slot that is half here and half there
    for server in (target, source, *nodes):
        server.cli("CLUSTER", "SETSLOT", slot, "NODE", node_id(target))
