"""gunicorn's side of a deployment, all from EVENHAND_* variables.

`evenhand serve` ends here; it also works by itself, from any directory:

    EVENHAND_REDIS_URL=redis://127.0.0.1:6379/0 gunicorn -c workers/gunicorn.conf.py app.main:app

Owns the master's settings and hooks. gunicorn reads every global whose name is one of its settings, so
whatever is not meant for it begins with an underscore.
"""

import gc
import math
import os
import resource
import secrets
import socket
import sys
from pathlib import Path
from typing import Any

import gunicorn.app.base

_ROOT = Path(__file__).resolve().parent.parent
if sys.path[0] != str(_ROOT):  # the working directory may hold an `app` of its own
    sys.path.insert(0, str(_ROOT))

# Once here, for all workers: they start faster and share the memory. Anew at SIGHUP: `Master.reload` sees to that.
import app.main
from app.dispatch.topology import Topology
from app.errors import ConfigurationError
from app.metrics.files import DIRECTORY_VARIABLE, MetricsDirectory
from app.settings import misspelt_variables, warnings_of
from workers.agreed import MASTER_MARGIN_S, READY_FD_VARIABLE
from workers.in_force import load_for_master, say_in_force
from workers.logs import logging_config, write_behind
from workers.master import Master
from workers.memory import keep_freed
from workers.processes import die_with_parent

# Two sockets a running request, plus what the process has open anyway.
_FEW_FILES = 4096
# Some hosts have a hard limit of a billion; code that walks all possible descriptors then takes minutes.
_MANY_FILES = 2**20
# A worker beats every second as long as its event loop turns: longer than this and it is stuck for good.
_STUCK_S = 60

try:
    _settings, _sources, _ignored = load_for_master(os.environ)
    if _settings.redis_url is None:
        raise ConfigurationError("EVENHAND_REDIS_URL is not set; `evenhand serve` would start an embedded Redis")
    Topology.of(_settings)
except ConfigurationError as _e:
    sys.exit(f"gunicorn.conf.py: {_e.message}")
gunicorn.app.base.Arbiter = Master  # there is no setting for it

chdir = str(_ROOT)
wsgi_app = "app.main:app"
bind = (
    f"[{_settings.server_name}]:{_settings.server_port}"
    if ":" in _settings.server_name
    else (f"{_settings.server_name}:{_settings.server_port}")
)
workers = _settings.workers
worker_class = "workers.server.EvenhandWorker"
preload_app = False  # what makes connections is built in the worker
timeout = _STUCK_S
graceful_timeout = math.ceil(_settings.grace_s + MASTER_MARGIN_S)
keepalive = 75  # seconds; above the 60 s that load balancers keep idle connections, so that they close first
max_requests = _settings.max_requests
max_requests_jitter = _settings.max_requests // 5  # so that workers do not all go at once
if _settings.ssl:
    keyfile = str(_settings.ssl_keyfile)
    certfile = str(_settings.ssl_certfile)
if os.access("/dev/shm", os.W_OK | os.X_OK):
    worker_tmp_dir = "/dev/shm"  # heartbeats on a disk that stalls would look like stuck workers
control_socket_disable = True  # it would be one path a user for all deployments
accesslog = None
logconfig_dict = logging_config(_settings.log_level, _settings.log_format)


def on_starting(server: Any) -> None:
    """Make room for the workers' figures; forget the registry where that is asked for; raise the limit on open files
    before the workers inherit it."""
    server.metrics = MetricsDirectory.make()
    os.environ[DIRECTORY_VARIABLE] = str(server.metrics.path)
    if READY_FD_VARIABLE not in os.environ:  # else `evenhand serve` has said it
        for line in [*misspelt_variables(os.environ), *warnings_of(_settings, _sources)]:
            server.log.warning(line)
    say_in_force(_settings, _sources)
    if _settings.disable_cache_status:
        app.main.last_known(_settings).forget()
        try:
            from workers.reaper import forget_registry

            forget_registry(_settings)
        except Exception as e:
            server.log.warning("the registry of the last run could not be forgotten: %s", e)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raised = soft
    if soft != resource.RLIM_INFINITY and soft != hard:
        wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else max(soft, min(hard, _MANY_FILES))
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            raised = wanted
        except (OSError, ValueError):  # some containers forbid it
            pass
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        server.log.warning(
            "the limit on open files was %d, now %s; a running request takes two: set `ulimit -n` (LimitNOFILE=)",
            soft,
            raised,
        )


def on_reload(server: Any) -> None:
    for line in _ignored:
        server.log.warning(line)
    say_in_force(_settings, _sources)


def pre_fork(server: Any, worker: Any) -> None:
    # Made before the fork, so that the master can name the worker's counts when it is dead.
    worker.nonce = secrets.token_hex(4)
    worker.share = server.shares.take()
    gc.freeze()  # a collection in the worker would write to the pages that it shares


def post_fork(server: Any, worker: Any) -> None:
    # A worker whose master was killed would go on serving, and hold the port against the next start.
    die_with_parent(worker.ppid)
    write_behind()
    # Requests leave nothing for the collector, and a few dozen that run are enough for it to look: 7 % of the time.
    gc.set_threshold(50_000, 20, 20)
    keep_freed()
    os.environ["EVENHAND_WORKER_ID"] = _worker_id(worker)


def child_exit(server: Any, worker: Any) -> None:
    """Give a dead worker's counts back at once instead of when its lease ends. Best effort: the lease stays."""
    worker.share.free()
    try:
        from workers.reaper import give_back

        give_back(_settings, _worker_id(worker))
    except Exception as e:
        server.log.warning("counts of worker %s are given back when its lease ends: %s", _worker_id(worker), e)
    try:
        server.metrics.absorb(_worker_id(worker))
    except Exception as e:
        server.log.warning("the metrics of worker %s could not be kept: %s", _worker_id(worker), e)


def on_exit(server: Any) -> None:
    server.metrics.remove()


def _worker_id(worker: Any) -> str:
    return f"{socket.gethostname()}-{worker.pid}-{worker.nonce}"
