"""`evenhand check` of a real Redis: each finding once, by really setting it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis as redis_library

from app.checks import redis_server
from app.redis_url import RedisPlace
from app.store.keys import Keys
from tests.checks.conftest import PERSISTENT, Check, Checked
from tests.support.contract import ScriptedView
from tests.support.engine import SimulatedEngine
from tests.support.redis import PrivateRedis, Space, TcpProxy, free_port
from tests.support.redis_groups import cluster, sentinel_set
from tests.support.wait import eventually

Well = Callable[[], Checked]


def test_a_deployment_that_is_well(well: Well) -> None:
    checked = well()
    assert checked.trouble == {} and checked.code == 0
    said = {f["check"]: f["says"] for f in checked.document["findings"]}
    assert said["redis.persistence"] == "append-only file"
    assert said["redis.eviction"] == "noeviction"
    assert said["redis.access"] == "unix socket"
    assert said["keys.layout"].startswith("layout 1, ")
    assert said["workers.totals"] == "2 unfinished requests, the sum of the ledgers"
    assert said["nodes.answers"] == "2 nodes of 2 answer this host's GET /health"
    assert checked.document["deployment"].endswith("redis.sock, namespace default")
    assert (checked.document["bad"], checked.document["warn"]) == (0, 0)


@pytest.mark.parametrize(
    ("settings", "level", "says"),
    [
        ({"maxmemory-policy": "allkeys-lru"}, "warn", "allkeys-lru takes away any key of ours"),
        ({"maxmemory-policy": "allkeys-lru", "maxmemory": "100mb"}, "bad", "allkeys-lru takes away any key of ours"),
        ({"maxmemory-policy": "volatile-ttl", "maxmemory": "100mb"}, "warn", "volatile-ttl takes leases and notes"),
        ({"maxmemory-policy": "volatile-ttl"}, "ok", "volatile-ttl, no maxmemory"),
    ],
)
def test_eviction(well: Well, server: PrivateRedis, settings: dict[str, str], level: str, says: str) -> None:
    for name, value in settings.items():
        server.cli("CONFIG", "SET", name, value)
    checked = well()
    assert [text[: len(says)] for text in checked.of("redis.eviction", level)] == [says]
    assert checked.trouble == ({} if level == "ok" else {"redis.eviction": level})


def test_persistence(well: Well, server: PrivateRedis) -> None:
    server.cli("CONFIG", "SET", "appendonly", "no")
    checked = well()
    assert checked.trouble == {"redis.persistence": "warn"}
    assert "nothing is written to disk" in checked.of("redis.persistence")[0]
    server.cli("CONFIG", "SET", "save", "900 1")
    assert well().of("redis.persistence", "ok") == ["snapshots (save 900 1)"]


def test_a_snapshot_that_can_not_be_written(check: Check, view: ScriptedView) -> None:
    with PrivateRedis(options={"dbfilename": "taken", "save": "900 1"}) as server:
        (server.directory / "taken").mkdir()
        server.cli("BGSAVE")
        eventually(lambda: server.client.info("persistence")["rdb_last_bgsave_status"] == "err")  # type: ignore[index]
        checked = check("--redis-url", server.url)
        assert checked.trouble["redis.persistence"] == "bad"
        (server.directory / "taken").rmdir()


@pytest.mark.parametrize(("spare", "level"), [(1_000_000, "warn"), (-1_000_000, "bad")])
def test_memory_near_its_limit(well: Well, server: PrivateRedis, spare: int, level: str) -> None:
    server.cli("SETRANGE", "theirs", 20_000_000, "x")
    used = int(server.client.info("memory")["used_memory"])  # type: ignore[index]
    server.cli("CONFIG", "SET", "maxmemory", used + spare)
    checked = well()
    assert checked.trouble == {"redis.memory": level}


def test_a_clock_that_is_another(well: Well, monkeypatch: pytest.MonkeyPatch) -> None:
    real = redis_server.time.time
    monkeypatch.setattr(redis_server.time, "time", lambda: real() - 90)
    checked = well()
    assert checked.trouble == {"redis.clock": "warn"}
    assert checked.of("redis.clock")[0].startswith("this host's clock is 90 s behind Redis's")


@pytest.mark.parametrize(("patience", "level"), [("0.5", "warn"), ("0.01", "bad")])
def test_a_redis_that_is_far(
    check: Check,
    server: PrivateRedis,
    deployed: Space,
    view: ScriptedView,
    monkeypatch: pytest.MonkeyPatch,
    patience: str,
    level: str,
) -> None:
    monkeypatch.setenv("EVENHAND_REDIS_TIMEOUT_S", patience)
    with TcpProxy(server.socket, delay_s=0.02) as road:
        checked = check("--redis-url", road.url)
    assert checked.trouble == {"redis.latency": level}


def test_a_replica(check: Check, well: Well, server: PrivateRedis, deployed: Space, view: ScriptedView) -> None:
    with PrivateRedis(tcp=True, options=PERSISTENT) as replica:
        replica.cli("REPLICAOF", "127.0.0.1", server.port)
        checked = check("--redis-url", replica.url)
    assert checked.trouble["redis.role"] == "bad"
    mend = next(f["mend"] for f in checked.document["findings"] if f["check"] == "redis.role")
    assert f"127.0.0.1:{server.port}" in mend


def test_a_password_that_is_lacking_or_wrong_and_one_that_is_right(
    check: Check, well: Well, server: PrivateRedis, view: ScriptedView, capsys: pytest.CaptureFixture[str]
) -> None:
    server.cli("CONFIG", "SET", "requirepass", "hush")
    try:
        for user in ("", ":wrong@"):
            checked = check("--redis-url", f"redis://{user}127.0.0.1:{server.port}")
            assert checked.trouble == {"redis.reach": "bad"}
            mend = next(f["mend"] for f in checked.document["findings"] if f["check"] == "redis.reach")
            assert mend.startswith("name user and password")
        checked = check("--redis-url", f"redis://:hush@127.0.0.1:{server.port}")
        assert checked.trouble == {} and "hush" not in str(checked.document) + capsys.readouterr().err
    finally:
        server.client.connection_pool.disconnect()
        with redis_library.Redis(port=server.port, password="hush") as client:
            client.config_set("requirepass", "")


def test_a_redis_over_the_network_without_a_password(
    check: Check, server: PrivateRedis, deployed: Space, view: ScriptedView
) -> None:
    """The host's own address, where it has one beside loopback: Redis listens on it for this test only."""
    address = own_address()
    server.cli("CONFIG", "SET", "bind", f"127.0.0.1 {address}")
    server.cli("CONFIG", "SET", "protected-mode", "no")
    checked = check("--redis-url", f"redis://{address}:{server.port}")
    assert checked.trouble == {"redis.access": "warn"}
    assert check("--redis-url", f"redis://127.0.0.1:{server.port}").of("redis.access") == ["loopback"]


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.connect(("192.0.2.1", 9))  # nothing is sent: it is asked which address would be used
        except OSError:
            pytest.skip("this host has no address but loopback")
        address = str(s.getsockname()[0])
    if address.startswith("127."):
        pytest.skip("this host has no address but loopback")
    return address


def test_a_redis_that_is_not_there(check: Check, view: ScriptedView) -> None:
    checked = check("--redis-url", f"redis://127.0.0.1:{free_port()}")
    assert checked.trouble == {"redis.reach": "bad"} and "refused" in checked.of("redis.reach")[0]
    assert checked.of("host.files")  # the host is looked at all the same
    assert checked.not_checked == ["keys, workers and nodes"]


def test_a_frozen_redis_ends_soon(check: Check, server: PrivateRedis, view: ScriptedView) -> None:
    server.pause()
    try:
        checked = check("--redis-url", server.url)
        assert checked.trouble == {"redis.reach": "bad"}
        (mend,) = (f["mend"] for f in checked.document["findings"] if f["check"] == "redis.reach")
        assert mend.startswith("it accepts connections but does not answer")
    finally:
        server.resume()


def test_config_that_is_refused_is_no_trouble_but_told(
    check: Check, server: PrivateRedis, deployed: Space, view: ScriptedView
) -> None:
    server.cli("ACL", "SETUSER", "some", "on", ">pw", "~*", "&*", "+@all", "-config")
    server.cli("CONFIG", "SET", "appendonly", "no")
    checked = check("--redis-url", f"redis://some:pw@127.0.0.1:{server.port}")
    assert checked.trouble == {}
    assert checked.not_checked == ["redis.persistence: the save points", "open files of the workers"]


def test_a_user_that_may_not_look(check: Check, server: PrivateRedis, deployed: Space, view: ScriptedView) -> None:
    server.cli("ACL", "SETUSER", "some", "on", ">pw", "~*", "+@all", "-info")
    checked = check("--redis-url", f"redis://some:pw@127.0.0.1:{server.port}")
    assert checked.trouble == {"redis.reach": "bad"}
    assert "ACL SETUSER" in next(f["mend"] for f in checked.document["findings"] if f["check"] == "redis.reach")


def test_sentinels(check: Check, view: ScriptedView) -> None:
    with sentinel_set() as group:
        checked = check("--redis-url", group.url)
        assert checked.of("redis.form", "ok") == ["3 sentinels answer"]
        assert checked.trouble["redis.replicas"] == "warn"  # min-replicas-to-write is 0
        group.master.cli("CONFIG", "SET", "min-replicas-to-write", "1")
        group.sentinels[0].process.kill()
        checked = check("--redis-url", group.url)
        assert checked.of("redis.replicas", "ok") == ["1 replica"]
        assert checked.of("redis.form", "warn")[0].startswith("1 of 3 sentinels can't be asked")
        checked = check("--redis-url", f"redis://127.0.0.1:{group.sentinels[1].port}")
        assert checked.trouble["redis.form"] == "bad"


def test_a_cluster(check: Check, view: ScriptedView) -> None:
    with cluster(Keys("default").version) as group:
        checked = check("--redis-url", group.url)
        assert checked.of("redis.form", "ok") == ["2 cluster nodes answer"]
        assert "redis.cluster" not in checked.trouble and "redis.reach" not in checked.trouble
        checked = check("--redis-url", group.owner.url)
        assert checked.trouble["redis.form"] == "warn"


# --- the keys ---------------------------------------------------------------------------------------


def test_an_empty_namespace(check: Check, server: PrivateRedis, deployed: Space, view: ScriptedView) -> None:
    checked = check("--redis-url", server.url, "--namespace", "other")
    assert checked.trouble == {"keys.layout": "warn"}


@pytest.mark.parametrize(("layout", "level"), [("2", "bad"), (None, "warn")])
def test_another_layout(well: Well, deployed: Space, layout: str | None, level: str) -> None:
    key = deployed.key("layout")
    deployed.cli("SET", key, layout) if layout else deployed.cli("DEL", key)
    assert well().trouble == {"keys.layout": level}


def test_a_key_of_another_type(well: Well, deployed: Space) -> None:
    deployed.cli("SET", deployed.key("links"), "x")
    deployed.cli("DEL", deployed.key("unfinished:vm-11-aa"))
    deployed.cli("SET", deployed.key("unfinished:vm-11-aa"), "x")
    checked = well()
    assert checked.trouble == {"keys.types": "bad"}
    (says,) = checked.of("keys.types")
    assert "links is a string and no hash" in says and "unfinished:vm-11-aa is a string and no hash" in says


def test_the_keys_that_are_read_may_be_of_any_type(well: Well, deployed: Space) -> None:
    for name in ("layout", "nodes", "workers", "sessions", "unfinished", "engine_keys", "version"):
        deployed.cli("DEL", deployed.key(name))
        deployed.cli("XADD", deployed.key(name), "*", "a", "b")
    assert well().trouble["keys.types"] == "bad"


def test_unknown_keys_and_names_that_are_no_text(well: Well, deployed: Space) -> None:
    deployed.cli("SET", deployed.key("misspelt\x1b[2J"), "x")
    deployed.cli("SET", deployed.key("").encode() + b"\xff", "x")
    checked = well()
    assert checked.trouble == {"keys.unknown": "warn"}
    (says,) = checked.of("keys.unknown")
    assert says.startswith("2 keys that no Evenhand") and "misspelt?[2J" in says


def test_every_key_of_keys_py_is_known(well: Well, deployed: Space) -> None:
    keys = Keys("default")
    known = {name for name, value in vars(keys).items() if name not in ("prefix", "events")}
    for name in known:
        if deployed.cli("TYPE", getattr(keys, name)) == "none":
            deployed.cli("HSET", getattr(keys, name), "a", "1")
    assert "keys.unknown" not in well().trouble


def test_keys_of_nodes_that_are_not_registered(well: Well, deployed: Space) -> None:
    deployed.cli("RPUSH", deployed.key("latency:http://old:1"), "1")
    checked = well()
    assert checked.trouble == {"keys.nodes": "warn"}
    assert checked.of("keys.nodes") == ["1 key of nodes that are not registered: latency:http://old:1"]


def test_a_ledger_without_a_worker(well: Well, deployed: Space) -> None:
    deployed.cli("HSET", deployed.key("unfinished:dead-1-aa"), "http://a:1", "3")
    deployed.cli("HSET", deployed.key("handing:dead-1-aa"), "http://a:1|http://b:1", "3")
    checked = well()
    assert checked.trouble == {"workers.ledgers": "warn"}
    assert checked.of("workers.ledgers") == ["2 ledgers of no worker: handing:dead-1-aa, unfinished:dead-1-aa"]


def test_totals_that_are_not_the_sum_of_the_ledgers(
    well: Well, deployed: Space, engines: list[SimulatedEngine]
) -> None:
    deployed.cli("HSET", deployed.key("unfinished"), engines[0].url, "7")
    checked = well()
    assert checked.trouble == {"workers.totals": "warn"}
    assert f"{engines[0].url} counts 7, its workers 2" in checked.of("workers.totals")[0]


def test_keys_of_others_are_not_looked_at(well: Well, deployed: Space) -> None:
    deployed.cli("SET", "theirs", "x")
    deployed.cli("SET", "evenhand:{default2}:nodes", "x")
    assert well().trouble == {}


# --- rules that no private server can be brought to ---------------------------------------------------


def server_of(url: str = "unix:///r", config: dict[str, str] | None = None, **info: Any) -> redis_server.Server:
    base = {"redis_version": "7.4.0", "role": "master", "aof_enabled": 1, "redis_mode": "standalone"}
    found = {"save": "", "min-replicas-to-write": "0"} if config is None else config
    return redis_server.Server(RedisPlace.parse(url), base | info, found, (0.001,), 0.0, 0.5)


def judged(server: redis_server.Server) -> dict[str, str]:
    return {f.check: f.level.value for f in redis_server.judge(server) if f.level != "ok"}


@pytest.mark.parametrize(
    ("info", "trouble"),
    [
        ({"redis_version": "6.0.16"}, {"redis.version": "bad"}),
        ({"redis_version": "6.2.0"}, {}),
        ({"redis_version": "10.1"}, {}),
        ({"redis_version": "7.2.4", "valkey_version": "8.1.1"}, {}),
        ({"aof_last_write_status": "err"}, {"redis.persistence": "bad"}),
        ({"connected_clients": 95, "maxclients": 100}, {"redis.clients": "warn"}),
        ({"used_memory_rss": 95, "total_system_memory": 100}, {"redis.memory": "warn"}),
        ({"redis_mode": "sentinel"}, {"redis.form": "bad"}),
        ({"redis_mode": "cluster"}, {"redis.form": "warn"}),
    ],
)
def test_rules(info: dict[str, Any], trouble: dict[str, str]) -> None:
    assert judged(server_of(**info)) == trouble


@pytest.mark.parametrize(
    ("url", "trouble"),
    [
        ("redis://10.0.0.1", True),
        ("rediss://10.0.0.1", True),
        ("redis://:pw@10.0.0.1", False),
        ("redis://localhost", False),
        ("redis://[::1]", False),
        ("redis://127.0.0.9", False),
        ("redis+cluster://127.0.0.1,h", True),
    ],
)
def test_who_may_reach_it(url: str, trouble: bool) -> None:
    assert ("redis.access" in judged(server_of(url, connected_slaves=1))) is trouble


def test_the_embedded_redis_is_found_in_the_state_dir(
    check: Check, view: ScriptedView, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from app import cli

    assert cli.main(["check", "--state-dir", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("evenhand check: no Redis is named") and err.count("\n") == 1
    assert "--state-dir" in err
    with pytest.raises(SystemExit):
        cli.main(["check", "--help"])
    assert "with 2 when it does not know what to look at" in capsys.readouterr().out
    with PrivateRedis() as server:
        directory = server.directory / "state" / "redis"
        directory.mkdir(parents=True)
        (directory / "redis.sock").symlink_to(server.socket)
        checked = check("--state-dir", str(server.directory / "state"))
        assert checked.document["deployment"] == f"Redis at {directory / 'redis.sock'}, namespace default"
        assert "redis.reach" not in checked.trouble
