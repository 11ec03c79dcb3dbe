"""The command as an operator meets it: `serve` with its embedded Redis, `nodes`, `engine`, and bad values."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import redis as redis_client

from tests.integration.stage import Bench, beside, start
from tests.support import load
from tests.support.deployment import ROOT, Deployment, Setting
from tests.support.http import request
from tests.support.process import Process, children, command
from tests.support.template import TEMPLATE
from tests.support.wait import eventually

EVENHAND = [sys.executable, "-m", "app.cli"]


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("EVENHAND_")}
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return inherited | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "COLUMNS": "100"} | more


def evenhand(*words: str, **more_environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*EVENHAND, *words],
        capture_output=True,
        text=True,
        timeout=20,
        env=environment(**more_environment),
        check=False,
    )


def forked(directory: Path, *words: str, **more_environment: str) -> tuple[int, str]:
    """The command in a fork of what has imported it all: its exit code, and what it wrote, stdout and stderr together.

    Which of the two says what is looked at in tests/test_cli.py, and here where `evenhand` runs.
    """
    fd, name = tempfile.mkstemp(dir=directory)
    os.close(fd)
    env = environment(**more_environment)
    process = Process([*EVENHAND, *words], log_file=Path(name), env=env, cwd=ROOT, template=TEMPLATE)
    return process.wait(20), process.log()


pytestmark = pytest.mark.timeout(180)  # the first test of the scenarios waits for all of them


# Each scenario starts and stops processes and waits for them; two cores are busy with three of them.
BENCHES_AT_ONCE = 3


HEAD = {"authorization": "Bearer head"}


# --- the embedded Redis


def embedded_socket(deployment: Deployment) -> Path:
    (found,) = [path for path in (deployment.directory / "state").rglob("*") if path.is_socket()]
    return found


def descendants(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        found += children(one)
    return found[1:]


def redis_pids(above: int) -> list[int]:
    names = re.compile(r"\S*(redis|valkey)-server ")
    return [pid for pid in descendants(above) if names.match(command(pid) + " ")]


def listening_tcp_inodes() -> set[str]:
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {fields[9] for line in lines if (fields := line.split())[3] == "0A"}


def open_inodes(pid: int) -> set[str]:
    links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


@beside
def test_r33_embedded_redis_is_private_and_the_registry_survives_restart_and_kill(bench: Bench) -> None:
    engines = [bench.engine(), bench.engine(models=("sim", "other"))]
    deployment = bench.deployment(1, redis=None)
    path = embedded_socket(deployment)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert deployment.process is not None
    (pid,) = redis_pids(deployment.process.pid)
    assert not open_inodes(pid) & listening_tcp_inodes(), "it listens on a TCP port"
    with redis_client.Redis(unix_socket_path=str(path), decode_responses=True) as client:
        assert client.config_get("port") == {"port": "0"}
        assert client.scard("evenhand:{test}:nodes") == 0

    deployment.add(engines[0], speed=2.5)
    deployment.add(engines[1], role="encode", speed=4)
    assert start(load.many(deployment.url, 5)).result(10)[0].ok
    before = deployment.nodes()
    deployment.stop()
    assert deployment.left_behind == []
    assert not path.exists()
    deployment.start()
    after = deployment.nodes()
    for key in ("role", "models", "speed"):
        assert {url: node[key] for url, node in after.items()} == {url: node[key] for url, node in before.items()}
    assert sorted(node["speed"] for node in after.values()) == [2.5, 4]
    deployment.wait_for_state("ready", *engines)
    assert start(load.many(deployment.url, 5)).result(10)[0].ok

    # Killed with all its processes, as by a power cut; the socket file and the locks of the dead are in the way.
    engines.append(bench.engine())
    deployment.add(engines[2])
    log_size = sum(f.stat().st_size for f in path.parent.rglob("*.aof"))
    assert log_size > 0
    time_of_last_write = time.monotonic()
    eventually(lambda: time.monotonic() - time_of_last_write > 1.2, within_s=2)  # Redis writes its log once a second
    deployment.kill()
    deployment.start()
    assert set(deployment.nodes()) == {engine.url for engine in engines}
    deployment.stop(signal.SIGINT)  # Ctrl-C
    assert deployment.left_behind == []


@pytest.mark.wide  # two real starts; tests/workers/test_embedded_redis.py has a second user in the small
@beside
def test_second_serve_on_a_state_directory_joins_the_redis_which_outlives_the_first(bench: Bench) -> None:
    engine = bench.engine()
    ports = free_ports(2)
    words = " ".join([*EVENHAND, "serve --server-name 127.0.0.1 --workers 1 --state-dir state --server-port"])
    # One shell over both: what the first leaves behind on purpose must not count as an orphan of the test.
    wrapper = ["sh", "-c", f"cd {bench.directory}; {words} {ports[0]} & {words} {ports[1]} & wait"]
    both = bench.process("both", wrapper, environment())
    for port in ports:
        eventually(lambda port=port: status_of(port, "/health") == 200, within_s=20)  # type: ignore[misc]
    assert len(redis_pids(both.pid)) == 1
    starter = next(pid for pid in children(both.pid) if any("embedded" in command(c) for c in children(pid)))
    (port,) = [port for port in ports if f" {port}" in command(starter)]
    (other,) = set(ports) - {port}
    body = b'{"url": "%s"}' % engine.url.encode()
    headers = {"content-type": "application/json"}
    added = request("POST", f"http://127.0.0.1:{port}/nodes/add", body=body, headers=headers)
    assert added.status == 200
    eventually(lambda: engine.url in nodes_of(other), within_s=1)

    os.kill(starter, signal.SIGTERM)
    eventually(lambda: starter not in children(both.pid), within_s=15)
    assert engine.url in nodes_of(other)
    eventually(lambda: status_of(other, "/ready") == 200, within_s=5)  # it may have to take over the probing
    answers = start(load.many(f"http://127.0.0.1:{other}", 5)).result(10)
    assert all(answer.ok for answer in answers)

    for pid in children(both.pid):
        os.kill(pid, signal.SIGTERM)
    assert both.wait(15) == 0


def nodes_of(port: int) -> dict[str, Any]:
    found: dict[str, Any] = request("GET", f"http://127.0.0.1:{port}/nodes/status").json()
    return found


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def status_of(port: int, path: str) -> int:
    try:
        return request("GET", f"http://127.0.0.1:{port}{path}").status
    except OSError:
        return 0


# --- the registry on a Redis of the operator's


@beside
def test_r33_disable_cache_status_forgets_the_registry_with_the_whole_deployment_only(bench: Bench) -> None:
    redis = bench.space
    added, fixed = bench.engine(), bench.engine(models=("c",))
    deployment = bench.deployment(1)
    deployment.add(added)
    deployment.stop()
    assert redis.cli("SMEMBERS", redis.key("nodes")) == {added.url}
    deployment.workers = 2
    deployment.settings |= {"disable_cache_status": True, "nodes": [fixed.url]}
    deployment.start()
    deployment.wait_for_state("ready", fixed)
    assert list(deployment.nodes("?all=1")) == [fixed.url]
    eventually(lambda: [m["id"] for m in deployment.get("/v1/models").json()["data"]] == ["c"], within_s=1)
    # One worker that starts anew is no new start of the deployment.
    deployment.add(added)
    killed = deployment.kill_worker()
    deployment.wait_for_workers(without=[killed])
    eventually(lambda: len(redis.cli("ZRANGE", redis.key("workers"), 0, -1)) == 2, within_s=5)
    assert set(deployment.nodes()) == {fixed.url, added.url}


@beside
def test_gunicorn_alone_serves_by_environment_variables_and_an_engine_registers_itself(bench: Bench) -> None:
    redis = bench.space
    fixed = bench.engine()
    (port,) = free_ports(1)
    env = environment(
        EVENHAND_SERVER_NAME="127.0.0.1",
        EVENHAND_SERVER_PORT=str(port),
        EVENHAND_REDIS_URL=redis.url,
        EVENHAND_NAMESPACE=redis.namespace,
        EVENHAND_NODES=fixed.url,
        EVENHAND_WORKERS="2",
    )
    url = f"http://127.0.0.1:{port}"
    words = [*EVENHAND, "engine", "--proxy-url", url, "--model", "m1", "m2", "--speed", "3", "--chunks", "4"]
    engine = bench.process("engine", words, environment(), template=TEMPLATE)
    # The engine is there first, as engines that start with their distributor may be: it tries again.
    eventually(lambda: "simulated engine at" in engine.log(), within_s=10)
    words = [sys.executable, "-m", "gunicorn", "-c", "workers/gunicorn.conf.py", "app.main:app"]
    gunicorn = bench.process("gunicorn", words, env)
    eventually(lambda: status_of(port, "/health") == 200, within_s=20)
    eventually(lambda: len(children(gunicorn.pid)) == 2)
    eventually(lambda: nodes_of(port).get(fixed.url, {}).get("state") == "ready", within_s=5)
    eventually(lambda: status_of(port, "/ready") == 200, within_s=1)
    answers = start(load.many(url, 10)).result(10)
    assert all(answer.ok for answer in answers), [(answer.status, answer.body) for answer in answers]
    ((itself, node),) = eventually(lambda: [n for n in nodes_of(port).items() if n[0] != fixed.url], within_s=8)
    assert (node["models"], node["speed"], node["role"]) == (["m1", "m2"], 3, 1)
    assert itself in engine.log()
    (answer,) = start(load.many(url, 1, model="m2", stream=True)).result(10)
    assert answer.done
    assert len(answer.chunks()) >= 4
    assert engine.stop() == 0
    assert list(nodes_of(port)) == [fixed.url], "it has taken itself out"
    gunicorn.stop(within_s=15)


# --- bad values

# A value of each kind, through the real process; tests/test_settings.py and tests/test_cli.py have all the others.
BAD: dict[str, tuple[list[str], dict[str, str], str]] = {
    "port above 65535": (["--server-port", "70000"], {}, "--server-port"),
    "unknown strategy": (["--routing-strategy", "fastest"], {}, "--routing-strategy"),
    "redis over http": (["--redis-url", "http://127.0.0.1:6379"], {}, "--redis-url"),
    "ssl without files": (["--ssl"], {}, "SSL_"),
    "unknown flag": (["--wrokers", "2"], {}, "--wrokers"),
    "bad value in the environment": ([], {"EVENHAND_WORKERS": "many"}, "EVENHAND_WORKERS"),
}


@beside
def test_bad_value_ends_with_one_clear_line_and_code_2(bench: Bench) -> None:
    for case, (words, env, named) in BAD.items():
        code, told = forked(bench.directory, "serve", *words, EVENHAND_STATE_DIR=str(bench.directory), **env)
        assert code == 2, case
        # The usage line, and what argparse wraps of it, may stand before.
        lines = [line for line in told.splitlines() if not line.startswith(("usage:", " ")) and line]
        assert len(lines) == 1, (case, told)
        assert named in lines[0], case
    done = evenhand("serve", "--server-port", "70000", EVENHAND_STATE_DIR=str(bench.directory))
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr


def test_serve_takes_the_flags_of_lmdeploy(tmp_path: Path) -> None:
    _, words = forked(tmp_path, "serve", "--help")
    flags = "server-name server-port serving-strategy routing-strategy dummy-prefill disable-cache-status"
    flags += " migration-protocol link-type disable-gdr api-keys ssl log-level"
    assert [flag for flag in flags.split() if not re.search(rf"--{flag}\b(?!-)", words)] == []


# --- the other commands


def test_version() -> None:
    done = evenhand("--version")
    assert done.returncode == 0
    assert re.fullmatch(r"evenhand \d+\.\d+\.\d+\S*\n", done.stdout)


@beside
def test_nodes_commands_manage_a_deployment(bench: Bench) -> None:
    settings: dict[str, Setting] = {"admin_keys": ["head"], "trusted_nodes": "none"}  # everybody needs the key
    deployment = bench.deployment(2, settings=settings)
    # Its streams outlast the command, on a loaded machine too.
    engine = bench.engine(models=("cli-a", "cli-b"), gap_s=0.2, chunks=15)
    here = {"EVENHAND_URL": deployment.url, "EVENHAND_ADMIN_KEY": "head"}

    def nodes(*words: str, **env: str) -> tuple[int, str]:
        return forked(bench.directory, "nodes", *words, **env)

    assert nodes("add", engine.url, "--speed", "2", **here) == (0, "Added successfully\n")
    node = deployment.nodes(headers=HEAD)[engine.url]
    assert (node["models"], node["speed"], node["role"]) == (["cli-a", "cli-b"], 2, 1)

    code, listed = nodes("list", "--url", deployment.url, "--admin-key", "head")
    assert code == 0
    (line,) = [line for line in listed.splitlines() if engine.url in line]
    assert "cli-a" in line
    assert "Hybrid" in line

    streams = start(load.many(deployment.url, 3, model="cli-a", stream=True))
    eventually(lambda: engine.in_flight == 3)
    assert nodes("drain", engine.url, **here)[0] == 0
    assert engine.in_flight == 3
    assert deployment.nodes(headers=HEAD)[engine.url]["state"] == "draining"
    assert all(answer.done for answer in streams.result(20))
    eventually(lambda: engine.url not in deployment.nodes("?all=1", headers=HEAD), within_s=2)

    assert nodes("add", engine.url, "--models", "cli-c", **here)[0] == 0
    assert deployment.nodes(headers=HEAD)[engine.url]["models"] == ["cli-c"]
    assert nodes("remove", engine.url, **here) == (0, "Deleted successfully\n")
    assert engine.url not in deployment.nodes("?all=1", headers=HEAD)

    done = evenhand("nodes", "list", "--url", deployment.url, "--admin-key", "tail")
    assert (done.returncode, done.stdout, "40" in done.stderr.splitlines()[-1]) == (1, "", True), done.stderr
    for words, env, code, word in (
        (("list", "--url", "http://127.0.0.1:9"), {}, 1, "127.0.0.1:9"),
        (("add", "no-url"), here, 2, "no-url"),
    ):
        found, told = nodes(*words, **env)
        assert found == code
        assert word in told.splitlines()[-1]
        assert "Traceback" not in told
