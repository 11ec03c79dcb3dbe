"""`evenhand serve`: one process that starts the parts of a deployment on this host and ends all of them.

Owns the order of start (embedded Redis, gunicorn, simulated engines) and of end (the reverse), the signals
between the terminal and gunicorn, and the port check. It must not know HTTP beyond one question to itself,
nor what is in Redis.

It stays the parent also with an external Redis, where it could become gunicorn: gunicorn takes Ctrl-C for
"stop at once", and here it means "drain", as SIGTERM does. Its children have sessions of their own, so that
the terminal's signals come here only, and die with it (`die_with_parent`), so that SIGKILL leaves nothing.

Signals: SIGINT, SIGTERM drain, a second one ends streams at once, a third kills; SIGHUP reloads worker by
worker; SIGUSR1, SIGTTIN and SIGTTOU go to gunicorn as they are.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping

from app.dispatch.topology import Topology
from app.errors import ConfigurationError
from app.settings import SOURCES_VARIABLE, Settings
from workers.agreed import MASTER_MARGIN_S, READY_FD_VARIABLE
from workers.embedded_redis import EmbeddedRedis, EmbeddedRedisError
from workers.endpoint import Endpoint
from workers.greeting import greeting, has_keys, trusts
from workers.processes import ROOT, child_setup, python_command, python_environment, say, warn

SIMULATED_MODEL = "sim"
TICK_S = 1.0
STARTING_TICK_S = 0.05
REGISTER_WITHIN_S = 5.0
NAMED_WITHIN_S = 2.0
ENGINES_END_WITHIN_S = 5.0
FORWARDED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGTTIN, signal.SIGTTOU)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGCHLD, *FORWARDED)


def serve(settings: Settings, *, sources: Mapping[str, str], simulate: int = 0) -> int:
    """Serve until told to stop; the exit code.

    Args:
        sources: where settings come from, for the log.
        simulate: simulated engines to start beside the workers; they register themselves.

    Raises:
        ConfigurationError: the port is taken, or the embedded Redis can't be started.
    """
    settings = settings.model_copy(update={"server_port": free_port(settings.server_name, settings.server_port)})
    if settings.redis_url is not None:
        return Supervisor(settings, None, simulate, sources).run()
    redis = EmbeddedRedis(settings.state_dir)
    try:
        joined = redis.join()
        if joined:
            say(f"joining the embedded Redis that runs in {redis.directory}")
        settings, sources = settings.model_copy(update={"redis_url": redis.url}), {**sources, "redis_url": "embedded"}
        return Supervisor(settings, redis, simulate, sources).run()
    except EmbeddedRedisError as e:
        raise ConfigurationError(f"--state-dir: {e}") from e
    finally:
        redis.leave()


def free_port(host: str, port: int) -> int:
    """`port` if `host` can listen on it; where it is 0, one that is free now.

    Raises:
        ConfigurationError: it is taken, not allowed, or the host is not one of ours.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            return int(sock.getsockname()[1])
    except socket.gaierror as e:
        raise ConfigurationError(f"--server-name: {host} is no address: {e.strerror}") from e
    except OSError as e:
        if e.errno == errno.EADDRINUSE:
            raise ConfigurationError(f"--server-port: {port} is in use; stop what listens there or take another") from e
        if e.errno == errno.EACCES:
            raise ConfigurationError(f"--server-port: this user may not listen on {port}") from e
        raise ConfigurationError(f"--server-name: can't listen on {host}: {e.strerror}") from e


class Supervisor:
    """The children of one `serve`, from their start to their end."""

    def __init__(
        self, settings: Settings, redis: EmbeddedRedis | None, simulate: int, sources: Mapping[str, str]
    ) -> None:
        self._settings = settings
        self._sources = sources
        self._redis = redis
        self._simulate = simulate
        self._endpoint = Endpoint(settings)
        self._engines: dict[str, subprocess.Popen[bytes]] = {}  # by node URL
        self._gunicorn: subprocess.Popen[bytes] | None = None
        self._ready_fd = -1
        self._next_step: Callable[[], bool] | None = self._workers_ready
        self._engines_started = 0.0
        self._greet_by_s = 0.0
        self._engines_added = False
        self._held: list[signal.Signals] = []
        self._stops = 0
        self._kill_at = 0.0
        self._has_terminal = os.isatty(0)

    def __repr__(self) -> str:
        return f"<Supervisor gunicorn={self._gunicorn} engines={len(self._engines)} stops={self._stops}>"

    def run(self) -> int:
        # Waited for, never handled: no code of ours runs between two of its own lines. Children unblock them.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self._gunicorn = self._start_gunicorn()
        try:
            while self._gunicorn.poll() is None:
                caught = signal.sigtimedwait(SIGNALS, STARTING_TICK_S if self._next_step else TICK_S)
                if caught is not None:
                    self._on_signal(signal.Signals(caught.si_signo))
                self._look_after()
        finally:
            self._end_all()
        code = self._gunicorn.returncode
        if self._stops == 0:
            self._warn(f"gunicorn ended by itself ({code}); see the log above")
            return code if code > 0 else 1
        return 0

    def _start_gunicorn(self) -> subprocess.Popen[bytes]:
        self._ready_fd, write_end = os.pipe()
        os.set_blocking(self._ready_fd, False)
        os.set_blocking(write_end, False)
        command = [*python_command("gunicorn"), "--chdir", str(ROOT)]
        environment = {
            **python_environment(),
            **self._settings.environment(),
            READY_FD_VARIABLE: str(write_end),
            SOURCES_VARIABLE: json.dumps(self._sources),
        }
        # With the lock on its users the Redis lives until the last worker is gone, whatever happens to us.
        held = [write_end] if self._redis is None else [write_end, self._redis.users_fd]
        try:
            return subprocess.Popen(
                [*command, "-c", str(ROOT / "workers" / "gunicorn.conf.py"), "app.main:app"],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=held,
                start_new_session=True,
                preexec_fn=child_setup(),
            )
        finally:
            os.close(write_end)

    # --- while it runs ------------------------------------------------------------------------------

    def _on_signal(self, signum: signal.Signals) -> None:
        assert self._gunicorn is not None
        if signum == signal.SIGHUP and self._has_terminal and _terminal_is_gone():
            # The window was closed. Under nohup that is meant to be survived.
            if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
                return
            signum = signal.SIGTERM
        if signum in FORWARDED:
            if self._next_step == self._workers_ready:
                self._held.append(signum)  # without its handlers gunicorn would die of it
            else:
                self._gunicorn.send_signal(signum)
        elif signum != signal.SIGCHLD:
            self._stop(signum)

    def _stop(self, signum: signal.Signals) -> None:
        assert self._gunicorn is not None
        self._stops += 1
        self._next_step = None
        if self._stops == 1 and signum != signal.SIGQUIT:
            grace_s = self._settings.grace_s
            self._kill_at = time.monotonic() + grace_s + MASTER_MARGIN_S + TICK_S
            say(f"\nstopping: running requests have {grace_s:g} s; once more ends them now")
            for url in self._engines:  # the registry outlives them; what runs on them goes on
                self._endpoint.remove_node(url)
            self._gunicorn.send_signal(signal.SIGTERM)
        elif self._stops <= 2:
            self._kill_at = time.monotonic() + MASTER_MARGIN_S
            self._gunicorn.send_signal(signal.SIGQUIT)
        else:
            self._kill_at = time.monotonic()

    def _look_after(self) -> None:
        if self._redis is not None:
            try:
                self._redis.watch()
            except (EmbeddedRedisError, OSError) as e:
                self._warn(f"the embedded Redis can't be started again: {e}")
        for url in [url for url, engine in self._engines.items() if engine.poll() is not None]:
            code = self._engines.pop(url).returncode
            self._warn(f"the simulated engine {url} ended ({code})")
        if self._next_step is not None and self._next_step():
            self._next_step = None
        if self._stops and time.monotonic() >= self._kill_at:
            self._kill_gunicorn()

    def _workers_ready(self) -> bool:
        try:
            ready = os.read(self._ready_fd, 1)
        except BlockingIOError:
            return False
        if not ready:
            return True  # gunicorn is gone
        assert self._gunicorn is not None
        for signum in dict.fromkeys(self._held):
            self._gunicorn.send_signal(signum)
        if not self._simulate:
            self._next_step = self._named_ready
            self._greet_by_s = time.monotonic() + (NAMED_WITHIN_S if self._settings.static_nodes else 0.0)
            return False
        for _ in range(self._simulate):
            self._start_engine()
        self._engines_started = time.monotonic()
        self._next_step = self._engines_registered
        return False

    def _engines_registered(self) -> bool:
        waited_s = time.monotonic() - self._engines_started
        if not self._engines_added and waited_s > (REGISTER_WITHIN_S if self._engines_register else 0.0):
            self._engines_added = True
            if not self._endpoint.models():
                for url in self._engines:
                    self._endpoint.add_node(url, SIMULATED_MODEL)
        if self._endpoint.trouble() is not None and waited_s < 2 * REGISTER_WITHIN_S:
            return False
        self._greet()
        return True

    @property
    def _engines_register(self) -> bool:
        """Whether the simulated engines can do it: over TLS they would need our certificate, from an address that is
        not trusted a key. Else it is ours to do."""
        settings = self._settings
        return not settings.ssl and (not has_keys(settings) or trusts(self._endpoint.url, settings))

    def _named_ready(self) -> bool:
        """The nodes that the settings name are there from the start: a moment later the greeting can tell of them."""
        if time.monotonic() < self._greet_by_s and self._endpoint.trouble() is not None:
            return False
        self._greet()
        return True

    def _warn(self, text: str) -> None:
        warn(text, self._settings.log_format)

    def _greet(self) -> None:
        trouble = self._endpoint.trouble()
        models = [] if trouble else self._endpoint.models()
        topology = Topology.of(self._settings)
        unused = [f"{url} ({role.name})" for url, role in self._endpoint.roles().items() if not topology.uses(role)]
        text = greeting(
            self._endpoint.url,
            self._settings,
            models,
            trouble,
            embedded=self._redis is not None,
            unused=unused,
        )
        say(text)

    def _start_engine(self) -> None:
        port = free_port("127.0.0.1", 0)
        options = ["--port", str(port), "--model", SIMULATED_MODEL]
        if self._engines_register:
            options += ["--proxy-url", self._endpoint.url]
        self._engines[f"http://127.0.0.1:{port}"] = subprocess.Popen(
            [*python_command("app.cli"), "engine", *options],
            env=python_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=child_setup(),
        )

    # --- the end ------------------------------------------------------------------------------------

    def _end_all(self) -> None:
        self._end_workers()
        # After the workers: until then their streams come from the engines.
        for engine in self._engines.values():
            engine.terminate()
        deadline = time.monotonic() + ENGINES_END_WITHIN_S
        for engine in self._engines.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                engine.wait(max(0.0, deadline - time.monotonic()))
            engine.kill()
            engine.wait()
        os.close(self._ready_fd)

    def _end_workers(self) -> None:
        """Wait for workers that outlived their master: they drain because it died."""
        assert self._gunicorn is not None
        if self._gunicorn.poll() is None:  # an error of ours
            self._gunicorn.terminate()
        deadline = time.monotonic() + self._settings.grace_s + MASTER_MARGIN_S
        while time.monotonic() < deadline:
            self._gunicorn.poll()
            try:
                os.killpg(self._gunicorn.pid, 0)
            except ProcessLookupError:
                return
            with contextlib.suppress(ChildProcessError):  # ours only where we are process 1 of a container
                os.waitpid(-self._gunicorn.pid, os.WNOHANG)
            if (caught := signal.sigtimedwait(SIGNALS, STARTING_TICK_S)) and caught.si_signo != signal.SIGCHLD:
                break
        self._kill_gunicorn()

    def _kill_gunicorn(self) -> None:
        assert self._gunicorn is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._gunicorn.pid, signal.SIGKILL)
        self._gunicorn.wait()


def _terminal_is_gone() -> bool:
    try:
        os.tcgetpgrp(0)
    except OSError:
        return True
    return False
