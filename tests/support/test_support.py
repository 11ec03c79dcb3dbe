"""The test support itself: a quiet check that can't fail, or a guard that leaves a process behind, proves nothing."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis as redis_py

from app import __version__
from tests.support import load
from tests.support.deployment import ROOT, Deployment
from tests.support.engine import SimulatedEngine
from tests.support.http import request
from tests.support.process import Process, children
from tests.support.process import command as command_of
from tests.support.quiet import counts, quiet_check
from tests.support.redis import AT_ONCE, PrivateRedis, Space, TcpProxy, server_binary
from tests.support.template import TEMPLATE
from tests.support.wait import aeventually, eventually

Factory = Callable[..., SimulatedEngine]

# A shell whose children leave its process group, one of them orphaned.
FAMILY = "setsid sleep 300 & (sleep 300 &) ; sleep 300 & echo up; wait"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


# --- processes


def test_exit_code_and_output(tmp_path: Path) -> None:
    process = Process(["sh", "-c", "echo out; echo err >&2; exit 3"], log_file=tmp_path / "log")
    assert process.wait(5) == 3
    assert sorted(process.log().split()) == ["err", "out"]
    assert not process.running


def test_stop_sends_a_signal_and_kills_what_does_not_end(tmp_path: Path) -> None:
    polite = Process(["sleep", "300"], log_file=tmp_path / "a")
    assert polite.stop() == -signal.SIGTERM
    deaf = Process(["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.05; done"], log_file=tmp_path / "b")
    eventually(lambda: "up" in deaf.log())
    with pytest.raises(AssertionError, match="did not end"):
        deaf.stop(within_s=0.2)
    assert not alive(deaf.pid)


def test_signals_reach_the_command_with_their_defaults(tmp_path: Path) -> None:
    process = Process(["sleep", "300"], log_file=tmp_path / "log")
    assert process.stop(signal.SIGINT) == -signal.SIGINT


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--version"], 0, f"evenhand {__version__}"),
        (["serve", "--workers", "none"], 2, "--workers"),
        (["nodes", "list"], 1, "can't reach http://127.0.0.1:9"),
    ],
)
def test_a_fork_of_the_template_is_what_a_python_of_its_own_is(
    tmp_path: Path, words: list[str], code: int, said: str
) -> None:
    command = [sys.executable, "-m", "app.cli", *words]
    env = dict(os.environ, EVENHAND_URL="http://127.0.0.1:9")
    logs = []
    for template in (None, TEMPLATE):
        log_file = tmp_path / f"{template is None}"
        process = Process(command, log_file=log_file, env=env, cwd=ROOT, template=template)
        assert process.wait(20) == code
        assert process.left_behind == []
        logs.append(process.log())
    assert said in logs[0] and logs[0] == logs[1]


def test_a_fork_of_the_template_is_named_and_killed_as_others_are(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "app.cli", "engine"]
    process = Process(words, log_file=tmp_path / "log", cwd=ROOT, template=TEMPLATE)
    eventually(lambda: "http://" in process.log(), within_s=10)
    assert command_of(process.pid) == " ".join(words)
    assert set(os.listdir(f"/proc/{process.pid}/fd")) >= {"0", "1", "2"}
    assert os.readlink(f"/proc/{process.pid}/fd/0") == os.devnull
    assert process.kill() == -signal.SIGKILL
    assert not alive(process.pid)
    deaf = Process(["sh", "-c", "exit 7"], log_file=tmp_path / "other", template=TEMPLATE)
    assert deaf.wait(5) == 7, "what is no Python of ours is started as ever"


def test_threads_that_fork_at_the_same_time_each_hear_of_their_own(tmp_path: Path) -> None:
    def code_of(number: int) -> int:
        words = ["--version"] if number % 2 else ["serve", "--workers", "none"]
        command = [sys.executable, "-m", "app.cli", *words]
        log_file = tmp_path / str(number)
        return Process(command, log_file=log_file, cwd=ROOT, template=TEMPLATE).wait(30)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(code_of, range(24))) == [2, 0] * 12


def test_what_outlives_the_command_is_told_and_killed(tmp_path: Path) -> None:
    process = Process(["sh", "-c", "setsid sleep 301 & sleep 0.2"], log_file=tmp_path / "log")
    eventually(lambda: children(process.pid))
    assert process.wait(10) == 0
    assert len(process.left_behind) == 1 and "sleep 301" in process.left_behind[0]
    assert not alive(int(process.left_behind[0].split()[0]))


def test_kill_ends_every_descendant(tmp_path: Path) -> None:
    process = Process(["sh", "-c", FAMILY], log_file=tmp_path / "log")
    eventually(lambda: "up" in process.log() and len(children(process.pid)) == 2)
    pids = [process.pid, *children(process.pid)]
    assert process.kill() == -signal.SIGKILL
    assert not any(alive(pid) for pid in pids)


def test_nothing_is_left_when_the_tests_are_killed(tmp_path: Path) -> None:
    # What pytest is to a deployment: a process that dies without a word.
    script = f"""
import time, pathlib
from tests.support.process import Process
process = Process(["sh", "-c", {FAMILY!r}], log_file=pathlib.Path({str(tmp_path / "log")!r}))
while "up" not in process.log(): time.sleep(0.01)
print(process.pid, flush=True)
time.sleep(300)
"""
    asker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT)
    assert asker.stdout is not None
    shell = int(asker.stdout.readline())
    pids = [shell, *children(shell)]
    guard = children(asker.pid)
    assert len(pids) == 3 and all(alive(pid) for pid in pids)
    asker.kill()
    asker.wait(5)
    asker.stdout.close()
    eventually(lambda: not any(alive(pid) for pid in [*pids, *guard]))


# --- Redis


def test_the_named_server_is_taken_and_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_TEST_REDIS_SERVER", "/nowhere/redis-server")
    with pytest.raises(AssertionError, match="EVENHAND_TEST_REDIS_SERVER"):
        server_binary()
    monkeypatch.setenv("EVENHAND_TEST_REDIS_SERVER", sys.executable)
    assert server_binary() == sys.executable


def test_private_redis_lives_and_dies_as_told() -> None:
    with PrivateRedis() as server:
        assert server.cli("SET", "a", "1")
        server.pause()
        with redis_py.Redis(unix_socket_path=str(server.socket), socket_timeout=0.1, retry=AT_ONCE) as client:
            with pytest.raises(redis_py.TimeoutError):
                client.ping()
            server.resume()
            assert client.ping()
        server.restart(keep_data=True)
        assert server.cli("GET", "a") == "1"
        server.restart()
        assert server.cli("GET", "a") is None
        server.kill()
        with pytest.raises(redis_py.ConnectionError):
            server.cli("PING")
        server.ensure_running()
        assert server.cli("PING")
        assert (server.socket.stat().st_mode & 0o777, server.directory.stat().st_mode & 0o777) == (0o700, 0o700)
        pid = server.pid
    assert not alive(pid)
    assert not server.directory.exists()


def test_namespaces_are_fresh_and_apart(redis: Space) -> None:
    other = Space(redis.server, redis.namespace + "x")
    redis.cli("SET", redis.key("version"), 1)
    other.cli("SET", other.key("version"), 2)
    assert (redis.key_names(), other.key_names()) == (["version"], ["version"])
    other.clear()
    assert (redis.key_names(), other.key_names()) == (["version"], [])


def test_slow_road_delays_blocks_and_cuts(redis_server: PrivateRedis, slow_road: TcpProxy) -> None:
    def ping_s(client: redis_py.Redis) -> float:
        before_s = time.monotonic()
        client.ping()
        return time.monotonic() - before_s

    with redis_py.Redis.from_url(slow_road.url, socket_timeout=0.3, retry=AT_ONCE) as client:
        client.ping()
        slow_road.delay_s = 0.1
        assert 0.099 <= ping_s(client) < 0.3  # uvloop counts whole milliseconds
        slow_road.delay_s = 0.0
        slow_road.block()
        with pytest.raises(redis_py.TimeoutError):
            client.ping()
        slow_road.unblock()
        assert client.ping()
        with socket.create_connection(("127.0.0.1", slow_road.port), timeout=2) as raw:
            raw.sendall(b"PING\r\n")
            assert raw.recv(100) == b"+PONG\r\n"
            slow_road.cut()
            assert raw.recv(100) == b""
        assert client.ping()


async def test_slow_road_keeps_the_order(slow_road: TcpProxy) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", slow_road.port)
    for i in range(20):
        slow_road.delay_s = 0.05 if i < 10 else 0.0
        writer.write(b"ECHO %02d\r\n" % i)
        await asyncio.sleep(0.002)
    answers = b"".join([await reader.readexactly(8) for _ in range(20)])
    assert re.findall(rb"\d\d", answers) == [b"%02d" % i for i in range(20)]
    writer.close()
    await writer.wait_closed()


# --- the quiet check


def test_quiet_passes_on_zeros_and_what_may_stay(redis: Space) -> None:
    redis.client.hset(redis.key("unfinished"), mapping={"http://a": "0"})
    redis.client.hset(redis.key("unfinished:host-1-aa"), mapping={"http://a": "0"})
    redis.client.rpush(redis.key("latency:http://a"), "0.5")
    redis.client.set(redis.key("version"), "3")
    quiet_check(redis, redis.namespace, within_s=0)
    quiet_check(redis.server, redis.namespace, within_s=0)


@pytest.mark.parametrize("name", ["unfinished", "unfinished:host-1-aa"])
def test_quiet_waits_for_counts_then_fails(redis: Space, name: str) -> None:
    redis.client.hset(redis.key(name), "http://a", "2")
    with pytest.raises(AssertionError, match=f"{name} http://a is 2"):
        quiet_check(redis, within_s=0.1)


@pytest.mark.parametrize("value", ["-1", "1.0", "x"])
def test_quiet_fails_at_once_below_zero(redis: Space, value: str) -> None:
    redis.client.hset(redis.key("unfinished"), "http://a", value)
    before_s = time.monotonic()
    with pytest.raises(AssertionError, match="never below 0"):
        quiet_check(redis, within_s=10)
    assert time.monotonic() - before_s < 2


def test_quiet_fails_on_a_key_of_a_request(redis: Space) -> None:
    redis.client.set(redis.key("request:1"), "x")
    with pytest.raises(AssertionError, match="request:1"):
        quiet_check(redis, within_s=0)


async def test_quiet_fails_while_an_engine_works(redis: Space, engine_factory: Factory) -> None:
    engine = engine_factory(ttft_s=0.4)
    running = asyncio.create_task(load.chat(engine.url))
    await aeventually(lambda: engine.in_flight == 1)
    with pytest.raises(AssertionError, match="1 in flight"):
        await asyncio.to_thread(quiet_check, redis, None, [engine], 0)
    await asyncio.to_thread(quiet_check, redis, None, [engine])
    assert (await running).ok


def test_counts_reads_totals_and_ledgers(redis: Space) -> None:
    redis.client.hset(redis.key("unfinished"), mapping={"http://a": "3", "http://b": "0"})
    redis.client.hset(redis.key("unfinished:w"), mapping={"http://a": "3"})
    assert counts(redis) == {"unfinished": {"http://a": 3, "http://b": 0}, "unfinished:w": {"http://a": 3}}


# --- load


async def test_many_keeps_its_concurrency_and_order(engine_factory: Factory) -> None:
    first, second = engine_factory(ttft_s=0.03), engine_factory(ttft_s=0.03)
    answers = await load.many([first.url, second.url], 20, concurrency=6, each=lambda i: {"prompt": f"p{i}"})
    assert all(answer.ok for answer in answers)
    assert [len(engine.requests) for engine in (first, second)] == [10, 10]
    assert first.stats.max_in_flight + second.stats.max_in_flight <= 12
    assert all(b'"p%d"' % (2 * i) in b"".join(r.body for r in first.requests) for i in range(10))
    assert len({record.connection for record in first.requests}) == 10
    await load.many(first.url, 4, concurrency=1, keep_alive=True)
    assert len({record.connection for record in first.requests[10:]}) == 1


async def test_chat_tells_what_broke_and_what_had_come(engine_factory: Factory) -> None:
    engine = engine_factory(cut_after=3, gap_s=0.01)
    answer = await load.chat(engine.url, stream=True)
    assert answer.status == 200 and answer.error is not None and not answer.ok
    assert answer.text == "token0 token1 token2 "
    engine.set(cut_after=None, stall_after=2)
    answer = await load.chat(engine.url, stream=True, within_s=0.2)
    assert isinstance(answer.error, TimeoutError) and not answer.left


# --- a real deployment


def test_deployment_serves_and_leaves_nothing(
    deployment_factory: Callable[..., Deployment], engine_factory: Factory, redis: Space
) -> None:
    engine = engine_factory()
    deployment = deployment_factory(workers=2)
    other = deployment.second_master(workers=2)
    deployment.add(engine, speed=2.0)
    other.wait_for_state("ready", engine)
    for one in (deployment, other):
        one.wait_for_workers()
        answer = one.post("/v1/chat/completions", {"model": "sim", "messages": []})
        assert answer.status == 200 and answer.json()["model"] == "sim"
    eventually(lambda: deployment.unfinished() == {engine.url: 0})
    assert redis.key_names()

    struck = deployment.kill_worker()
    deployment.wait_for_workers(without=[struck])
    assert not alive(struck)

    pids = [deployment.master_pid(), *deployment.worker_pids()]
    assert len(set(pids)) == 3
    assert deployment.stop() == 0
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(ConnectionRefusedError):
        request("GET", deployment.url + "/health")
    deployment.start()
    assert deployment.get("/health").status == 200

    pids = [other.master_pid(), *other.worker_pids()]
    other.kill()
    assert not any(alive(pid) for pid in pids)
    assert os.path.isdir(deployment.directory)


def test_deployment_that_can_not_start_says_why(redis: Space) -> None:
    with pytest.raises(AssertionError, match="routing-strategy"):
        Deployment(redis=redis, settings={"routing_strategy": "no_such"})
