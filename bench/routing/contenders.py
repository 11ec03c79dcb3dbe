"""Who is measured: how each is installed, started, and asked whether it is ready.

All are pinned, each peer in an environment of its own. Three engines stand behind each. What they log is warnings only,
and nothing they do leaves this machine; else they run as they come. `direct` is no router: the clients talk to the
engines themselves.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from app import __version__
from bench.routing.engine import MODEL

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
INSTALL_WITHIN_S = 900
HOST = "127.0.0.1"


class NotHad(Exception):
    """A contender can't be measured here; the message says why."""


@dataclass(frozen=True)
class Place:
    """What a contender is given to start with. `port` and `spare` are free; `directory` is its own."""

    port: int
    spare: int
    engines: list[str]
    directory: Path

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def ports(self) -> list[str]:
        return ["--host", HOST, "--port", str(self.port)]


@dataclass(frozen=True)
class Package:
    """`whole`: with what it depends on; else `beside` is all that it gets."""

    name: str
    version: str
    extra: str = ""
    whole: bool = True
    beside: tuple[str, ...] = ()

    @property
    def spec(self) -> str:
        return f"{self.name}{self.extra}=={self.version}"


@dataclass(frozen=True)
class Contender:
    """`command` gets the interpreter of its environment. `rust`: one of those Evenhand has to beat."""

    name: str
    what: str
    package: Package | None
    command: Callable[[str, Place], Sequence[str | Path]] | None
    health: str = "/health"
    rust: bool = False
    workers: int = 1
    env: dict[str, str] = field(default_factory=dict)
    introduce: Callable[[Place], None] | None = None
    start_within_s: float = 30.0

    @property
    def version(self) -> str:
        if self.package:
            return self.package.version
        if self.name == "nginx":
            return _nginx_version()
        return __version__ if self.name.startswith("evenhand") else ""


# --- how each is started


def _evenhand(workers: int) -> Callable[[str, Place], Sequence[str | Path]]:
    def command(python: str, place: Place) -> Sequence[str | Path]:
        listen = ["--server-name", HOST, "--server-port", str(place.port), "--workers", str(workers)]
        state = ["--state-dir", str(place.directory / "state")]
        return [python, "-m", "app.cli", "serve", *listen, *state, "--nodes", *place.engines]

    return command


def _script(name: str, *words: str) -> Callable[[str, Place], Sequence[str | Path]]:
    """A Rust router: their flags are of one family."""

    def command(python: str, place: Place) -> Sequence[str | Path]:
        metrics = ["--prometheus-host", HOST, "--prometheus-port", str(place.spare)]
        script = Path(python).with_name(name)
        quiet = ["--log-level", "warning" if name == "vllm-router" else "warn"]
        return [python, script, *words, *place.ports, "--worker-urls", *place.engines, *metrics, *quiet]

    return command


def _lmdeploy(python: str, place: Place) -> Sequence[str | Path]:
    return [python, HERE / "lmdeploy_proxy.py", str(place.port)]


def _introduce(place: Place) -> None:
    for engine in place.engines:
        value = {"url": engine, "status": {"models": [MODEL]}}
        status, said = ask(place.url, "/nodes/add", value)
        if status != 200:
            raise NotHad(f"/nodes/add: {status} {said[:200]!r}")


def _litellm(python: str, place: Place) -> Sequence[str | Path]:
    bases = [{"api_base": f"{engine}/v1", "api_key": "-"} for engine in place.engines]
    models = [{"model_name": MODEL, "litellm_params": {"model": f"openai/{MODEL}", **base}} for base in bases]
    config = place.directory / "litellm.json"  # JSON is YAML too
    config.write_text(json.dumps({"model_list": models, "router_settings": {"routing_strategy": "least-busy"}}))
    return [python, Path(python).with_name("litellm"), *place.ports, "--config", config]


NGINX = """
worker_processes 1;
daemon off;
pid {directory}/pid;
error_log stderr warn;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    client_max_body_size 256m;
    client_body_buffer_size 1m;
    keepalive_requests 1000000000;
    upstream engines {{
        least_conn;
        {servers}
        keepalive 64;
        keepalive_requests 1000000000;
    }}
    server {{
        listen {address};
        location / {{
            proxy_pass http://engines;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
            proxy_read_timeout 600s;
        }}
    }}
}}
"""


def nginx_path() -> str | None:
    """A user's PATH may lack the directory it is installed to."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def _nginx(python: str, place: Place) -> Sequence[str | Path]:
    servers = " ".join(f"server {engine.removeprefix('http://')};" for engine in place.engines)
    config = place.directory / "nginx.conf"
    config.write_text(NGINX.format(directory=place.directory, servers=servers, address=f"{HOST}:{place.port}"))
    path = nginx_path()
    assert path is not None  # `provide` has looked
    return [path, "-p", place.directory, "-e", "stderr", "-c", config]


def _nginx_version() -> str:
    path = nginx_path()
    said = subprocess.run([path, "-v"], capture_output=True, text=True).stderr if path else ""
    return said.strip().rpartition("/")[2]


# --- who there is

# Its --log-level leaves a line for each choice of power_of_two, which costs it more than the choice.
VLLM_QUIET = {"RUST_LOG": "warn"}
VLLM = Package("vllm-router", "0.1.17")
SGLANG = Package("sglang-router", "0.3.2")
SMG = Package("smg", "1.13.0")
# Its proxy needs none of the engine's packages, which are of gigabytes: see lmdeploy_proxy.py.
LMDEPLOY = Package(
    "lmdeploy",
    "0.18.0",
    whole=False,
    beside=("aiohttp", "fastapi", "numpy", "pydantic", "requests", "shortuuid", "uvicorn"),
)
LITELLM = Package("litellm", "1.108.7", extra="[proxy]")

DIRECT = "direct"
EVENHAND = "evenhand"
LMDEPLOY_PROXY = "lmdeploy"
CONTENDERS = {
    contender.name: contender
    for contender in (
        Contender(DIRECT, "no router", None, None),
        Contender(EVENHAND, "1 worker", None, _evenhand(1), health="/ready"),
        Contender("evenhand-2", "2 workers", None, _evenhand(2), health="/ready", workers=2),
        Contender("evenhand-4", "4 workers", None, _evenhand(4), health="/ready", workers=4),
        Contender("nginx", "least_conn, 1 worker", None, _nginx, health="/v1/models"),
        Contender(
            "vllm-router",
            "power_of_two",
            VLLM,
            _script("vllm-router", "--policy", "power_of_two"),
            rust=True,
            env=VLLM_QUIET,
        ),
        Contender(
            "vllm-router-rr",
            "round_robin",
            VLLM,
            _script("vllm-router", "--policy", "round_robin"),
            rust=True,
            env=VLLM_QUIET,
        ),
        Contender(
            "sglang-router",
            "power_of_two",
            SGLANG,
            _script("sglang-router", "launch", "--policy", "power_of_two"),
            rust=True,
        ),
        Contender("smg", "power_of_two", SMG, _script("smg", "launch", "--policy", "power_of_two"), rust=True),
        Contender(
            LMDEPLOY_PROXY,
            "min_expected_latency",
            LMDEPLOY,
            _lmdeploy,
            introduce=_introduce,
            env={"UVICORN_LOG_LEVEL": "warning"},
            health="/v1/models",
        ),
        Contender(
            "litellm",
            "least-busy",
            LITELLM,
            _litellm,
            health="/health/liveliness",
            env={
                "LITELLM_LOG": "ERROR",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
                "LITELLM_TELEMETRY": "False",
                "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # the others have no keys either
            },
            start_within_s=90.0,
        ),
    )
}


def ask(url: str, path: str, value: object = None, timeout_s: float = 5.0) -> tuple[int, bytes]:
    """Raises OSError or HTTPException where nobody answers."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout_s)
    try:
        headers = {"content-type": "application/json"}
        if value is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(value), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


# --- installation


def provide(contender: Contender, cache: Path, tell: Callable[[str], None]) -> str:
    """The interpreter that runs it; installed first if need be.

    Raises:
        NotHad: not here, and not to be had.
    """
    if contender.name == "nginx" and nginx_path() is None:
        raise NotHad("not installed (apt-get install nginx-light)")
    package = contender.package
    if package is None:
        return sys.executable
    home = cache / f"{package.name}-{package.version}"
    python, stamp = home / "bin" / "python", home / "installed"
    if stamp.exists() and stamp.read_text() == package.spec:
        return str(python)
    tell(f"installing {package.spec} (once)")
    shutil.rmtree(home, ignore_errors=True)
    cache.mkdir(parents=True, exist_ok=True)
    log = cache / f"{home.name}.log"
    _run([sys.executable, "-m", "venv", home], log)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--only-binary", ":all:"]
    _run([*pip, *([] if package.whole else ["--no-deps"]), package.spec], log)
    if package.beside:
        _run([*pip, *package.beside], log)
    stamp.write_text(package.spec)
    return str(python)


def _run(words: Sequence[str | Path], log: Path) -> None:
    try:
        ran = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=INSTALL_WITHIN_S
        )
    except subprocess.TimeoutExpired:
        raise NotHad(f"its installation took longer than {INSTALL_WITHIN_S} s") from None
    if ran.returncode:
        with suppress(OSError):
            log.write_text(ran.stdout)
        errors = [line for line in ran.stdout.splitlines() if line.startswith("ERROR")] or ["failed"]
        raise NotHad(f"could not be installed: {errors[-1]} ({log.name} in the cache says more)")
