"""The embedded Redis: private, shared by all who use it, there as long as any of them, gone with the last."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis as redis_py

from tests.support.wait import eventually
from workers import embedded_redis
from workers.embedded_redis import PONG, EmbeddedRedis, EmbeddedRedisError, ask, find_servers, socket_path

Make = Callable[[], EmbeddedRedis]


@pytest.fixture
def state_dir() -> Iterator[Path]:
    # pytest's own tmp_path can be too long for a socket; that case has a test of its own.
    with tempfile.TemporaryDirectory(prefix="evenhand-state-") as name:
        yield Path(name)


@pytest.fixture
def make(state_dir: Path) -> Iterator[Make]:
    """Users of one state directory; all of them leave at the end."""
    made: list[EmbeddedRedis] = []

    def one() -> EmbeddedRedis:
        made.append(EmbeddedRedis(state_dir))
        return made[-1]

    yield one
    for user in made:
        user.leave()
    for user in made:
        if user._keeper is not None:
            user._keeper.wait(10)


def command(user: EmbeddedRedis, *words: str) -> Any:
    with redis_py.Redis(unix_socket_path=str(user.socket), decode_responses=True, socket_timeout=5) as client:
        return client.execute_command(*words)


def server_pid(user: EmbeddedRedis) -> int:
    return int(command(user, "INFO", "server")["process_id"])


def keeper_pid(user: EmbeddedRedis) -> int:
    assert user._keeper is not None
    return user._keeper.pid


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False


def test_it_listens_on_a_private_unix_socket_and_nowhere_else(make: Make) -> None:
    user = make()
    assert user.join() is False
    assert command(user, "CONFIG", "GET", "port") == {"port": "0"}
    assert command(user, "CONFIG", "GET", "appendonly") == {"appendonly": "yes"}
    assert stat.S_IMODE(user.socket.stat().st_mode) == 0o700
    assert stat.S_IMODE(user.directory.stat().st_mode) == 0o700
    with redis_py.Redis.from_url(user.url) as client:
        assert client.ping()


def test_a_directory_that_others_may_enter_is_closed_to_them(make: Make, state_dir: Path) -> None:
    (state_dir / "redis").mkdir(mode=0o755)
    user = make()
    user.join()
    assert stat.S_IMODE(user.directory.stat().st_mode) == 0o700


def test_a_second_user_joins_and_the_server_lives_until_the_last_has_left(make: Make) -> None:
    first, second = make(), make()
    assert first.join() is False
    assert second.join() is True
    pid = server_pid(first)
    assert server_pid(second) == pid
    first.leave()
    assert server_pid(second) == pid
    second.leave()
    assert not is_running(pid)
    assert ask(second.socket) == b""


def test_it_keeps_its_data_over_a_restart(make: Make) -> None:
    first = make()
    first.join()
    command(first, "SET", "kept", "1")
    first.leave()
    second = make()
    assert second.join() is False
    assert command(second, "GET", "kept") == "1"


def test_a_killed_server_is_started_again_with_its_data(make: Make) -> None:
    user = make()
    user.join()
    command(user, "CONFIG", "SET", "appendfsync", "always")
    command(user, "SET", "kept", "1")
    os.kill(server_pid(user), signal.SIGKILL)
    eventually(lambda: ask(user.socket) == PONG)
    assert command(user, "GET", "kept") == "1"


def test_after_a_killed_keeper_there_is_one_server_again_and_never_two(make: Make) -> None:
    user = make()
    user.join()
    pid = server_pid(user)
    os.kill(keeper_pid(user), signal.SIGKILL)

    def is_back() -> bool:
        user.watch()
        return not is_running(pid) and ask(user.socket) == PONG

    eventually(is_back, within_s=5)
    assert server_pid(user) != pid


def test_signals_that_a_service_manager_sends_to_all_do_not_end_it_before_its_users(make: Make) -> None:
    user = make()
    user.join()
    os.kill(keeper_pid(user), signal.SIGTERM)
    os.kill(keeper_pid(user), signal.SIGINT)
    os.kill(server_pid(user), signal.SIGTERM)
    eventually(lambda: ask(user.socket) == PONG and server_pid(user), within_s=5)
    assert is_running(keeper_pid(user))


def test_a_killed_user_leaves_nothing_behind(state_dir: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from workers.embedded_redis import EmbeddedRedis\n"
        "r = EmbeddedRedis(Path(sys.argv[1])); r.join(); print(r._keeper.pid, flush=True); time.sleep(60)"
    )
    user = subprocess.Popen([sys.executable, "-c", script, str(state_dir)], stdout=subprocess.PIPE, text=True)
    assert user.stdout is not None
    keeper = int(user.stdout.readline())
    pid = server_pid(EmbeddedRedis(state_dir))
    user.kill()
    user.wait()
    user.stdout.close()
    eventually(lambda: not is_running(keeper) and not is_running(pid), within_s=5)


def test_it_lives_as_long_as_a_process_that_was_given_its_lock(make: Make) -> None:
    user = make()
    user.join()
    heir = subprocess.Popen(["sleep", "60"], pass_fds=[user.users_fd])
    pid = server_pid(user)
    try:
        os.close(user.users_fd)  # as when the user is killed
        user._users_fd = -1
        other = make()
        assert other.join() is True
        other.leave()
        assert is_running(pid)
    finally:
        heir.kill()
        heir.wait()
    eventually(lambda: not is_running(pid), within_s=5)


def test_a_socket_that_a_dead_server_left_is_no_obstacle(make: Make, state_dir: Path) -> None:
    (state_dir / "redis").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(state_dir / "redis" / "redis.sock"))
    user = make()
    assert user.join() is False
    assert command(user, "PING") is True


def test_a_path_too_long_for_a_socket_gets_one_in_a_private_directory_elsewhere(state_dir: Path) -> None:
    deep = state_dir / ("d" * 120)
    user, other = EmbeddedRedis(deep), EmbeddedRedis(deep)
    try:
        user.join()
        assert other.join() is True
        assert user.socket == other.socket == socket_path(deep / "redis")
        assert len(str(user.socket)) <= 100
        assert stat.S_IMODE(user.socket.parent.stat().st_mode) == 0o700
        assert (deep / "redis" / "redis.sock").readlink() == user.socket
        assert command(user, "PING") is True
    finally:
        user.leave()
        other.leave()
        if user._keeper is not None:
            user._keeper.wait(10)
        user.socket.parent.rmdir()


@pytest.mark.parametrize("in_the_way", ["file", "link"])
def test_what_is_not_a_directory_of_this_user_is_refused(make: Make, state_dir: Path, in_the_way: str) -> None:
    path = state_dir / "redis"
    if in_the_way == "file":
        path.write_text("")
    else:
        path.symlink_to("/")
    with pytest.raises(EmbeddedRedisError, match="--state-dir"):
        make().join()


def test_data_that_the_server_refuses_is_told_in_one_line_with_the_reason(make: Make, state_dir: Path) -> None:
    data = state_dir / "redis" / "appendonlydir"
    data.mkdir(parents=True)
    (data / "appendonly.aof.manifest").write_text("this is no manifest\n")
    with pytest.raises(EmbeddedRedisError) as caught:
        make().join()
    text = str(caught.value)
    assert text.startswith("the embedded Redis does not start: ") and "\n" not in text
    assert "manifest" in text


def test_the_next_program_is_tried_where_the_first_does_not_start(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = find_servers()
    monkeypatch.setattr(embedded_redis, "find_servers", lambda: ["/bin/false", *servers])
    user = make()
    assert user.join() is False
    assert command(user, "PING") is True


def test_the_server_on_path_comes_before_the_one_of_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, version in (("redis-server", "v=7.2.4"), ("valkey-server", "v=8.0.1")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho 'server {version} sha=0'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert find_servers()[0] == str(tmp_path / "redis-server")


def test_a_server_older_than_6_2_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\necho 'Redis server v=6.0.16 sha=0'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert str(program) not in find_servers()


def test_without_any_server_it_says_what_to_do(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_redis, "_version", lambda path: ())
    with pytest.raises(EmbeddedRedisError, match=r"no redis-server or valkey-server >= 6.2 .*--redis-url"):
        make().join()
