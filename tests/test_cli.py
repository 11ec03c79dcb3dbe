"""The command: what it accepts, what it says when it does not, and a deployment started as a new user would."""

from __future__ import annotations

import contextlib
import fcntl
import http.server
import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from app import __version__, cli
from app.commands import nodes as nodes_command
from app.settings import Settings, flag_of
from tests.support.process import Process, children
from tests.support.process import command as command_of
from tests.support.template import TEMPLATE
from tests.support.wait import eventually
from workers.endpoint import Endpoint
from workers.greeting import greeting

ROOT = Path(__file__).resolve().parents[1]
EVENHAND = [sys.executable, "-m", "app.cli"]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [v for v in os.environ if v.startswith("EVENHAND_")]:
        monkeypatch.delenv(variable)


def run(*words: str) -> int:
    try:
        return cli.main(words)
    except SystemExit as e:
        return int(e.code or 0)


# --- parsing ----------------------------------------------------------------------------------------


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"evenhand {__version__}\n"


def test_help_of_serve_names_every_setting_and_its_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run("serve", "--help") == 0
    text = capsys.readouterr().out
    for name in Settings.model_fields:
        assert flag_of(name) in text
        assert f"EVENHAND_{name.upper()}" in text


COMMANDS = [*cli.COMMANDS, *(f"config {verb}" for verb in ("show", "check", "hash-key"))]
COMMANDS += [f"nodes {verb}" for verb in ("list", "add", "remove", "drain")]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_help_shows_a_percent_sign_twice(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """argparse unescapes it in the help of an option, and not in a description."""
    assert run(*command.split(), "--help") == 0
    assert "%%" not in capsys.readouterr().out


def test_flags_of_serve_become_settings() -> None:
    parser = cli.build_parser("serve")
    words = "serve --nodes http://a:1,http://b:2 http://c --nodes http://d --api-keys k1 k2 --dummy-prefill --grace-s 3"
    args = parser.parse_args(shlex.split(words))
    settings = Settings.load({name: getattr(args, name) for name in Settings.model_fields})
    assert settings.nodes == ("http://a:1", "http://b:2", "http://c", "http://d")
    assert [key.get_secret_value() for key in settings.api_keys] == ["k1", "k2"]
    assert settings.dummy_prefill and settings.grace_s == 3
    assert settings.workers == 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "evenhand: the following arguments are required: COMMAND"),
        ("--verzion", "evenhand: unknown: --verzion; did you mean --version?"),
        ("--versoin serve", "evenhand: unknown: --versoin; did you mean --version?"),
        ("--bogus", "evenhand: unknown: --bogus"),
        ("sevre --workers 2", "evenhand: unknown command: sevre; did you mean serve?"),
        ("status", "evenhand: unknown command: status; there are serve, config, nodes, top, explain, check, engine"),
        ("nodes lst", "evenhand nodes: unknown verb: lst; did you mean list?"),
        ("nodes destroy http://a", "evenhand nodes: unknown verb: destroy; there are list, add, remove, drain"),
        ("nodes add http://a --modles m", "evenhand nodes: unknown: --modles m; did you mean --models?"),
        ("engine --modle m", "evenhand engine: unknown: --modle m; did you mean --model?"),
        ("serve --worker=2", "evenhand serve: unknown: --worker=2; did you mean --workers?"),
        ("serve --bogus", "evenhand serve: unknown: --bogus"),
        ("serve --host h", "evenhand serve: unknown: --host h; did you mean --server-name?"),
        ("serve --port=1", "evenhand serve: unknown: --port=1; did you mean --server-port?"),
        ("serve --worker-urls http://a", "evenhand serve: unknown: --worker-urls http://a; did you mean --nodes?"),
        ("config check --policy p", "evenhand config: unknown: --policy p; did you mean --routing-strategy?"),
        ("serve --num_workers 2", "evenhand serve: unknown: --num_workers 2; did you mean --workers?"),
        ("config hash-key sk-1", "evenhand config hash-key: the key comes on stdin, "),
        ("serve --server-por 1", "evenhand serve: unknown: --server-por 1"),
        ("serve --api-keys", "evenhand serve: argument --api-keys: expected at least one argument"),
        ("serve --workers many", "evenhand serve: --workers: must be a whole number from 1 to 1024, not 'many'"),
        (
            "serve --simulate 101",
            "evenhand serve: argument --simulate: must be a whole number from 0 to 100, not '101'",
        ),
        ("serve --server-name 203.0.113.1", "evenhand serve: --server-name: can't listen on 203.0.113.1: "),
        ("serve --server-name nobody.invalid", "evenhand serve: --server-name: nobody.invalid is no address: "),
        (
            "serve --server-port 0 --state-dir /dev/null/x",
            "evenhand serve: --state-dir: can't use /dev/null/x/redis: Not a directory",
        ),
        ("nodes", "evenhand nodes: the following arguments are required: VERB"),
        ("nodes add a:1", "evenhand nodes add: argument NODE_URL: NODE_URL must start with http:// or https://"),
        ("nodes add http://a --speed -1", "evenhand nodes add: argument --speed: must be a finite number greater than"),
        ("nodes add http://a --role x", "evenhand nodes add: argument --role: must be one of 1 Hybrid, 2 Prefill"),
        (
            "nodes add http://a --bootstrap-port 0",
            "evenhand nodes add: argument --bootstrap-port: must be a whole number from 1 to 65535, not '0'",
        ),
        ("nodes drain http://a --timeout-s x", "evenhand nodes drain: argument --timeout-s: must be a number of secon"),
        ("nodes list --url nowhere", "evenhand nodes list: argument --url: a deployment's URL must start with http://"),
        (
            "engine --port 70000",
            "evenhand engine: argument --port: must be a whole number from 0 to 65535, not '70000'",
        ),
        ("engine --chunks -1", "evenhand engine: argument --chunks: must be a whole number of at least 0, not '-1'"),
    ],
)
def test_a_wrong_value_ends_with_one_clear_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: str, line: str
) -> None:
    assert run(*words.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    *usage, last = captured.err.splitlines()
    assert last.startswith(line)
    assert all(text.startswith("usage: ") for text in usage) and len(usage) <= 1


@pytest.mark.parametrize(
    ("value", "nodes", "engine"),
    [
        ("x", "nodes add http://a --role", "engine --role"),
        ("nan", "nodes add http://a --speed", "engine --speed"),
        ("0", "nodes add http://a --speed", "engine --speed"),
        ("-1", "nodes drain http://a --timeout-s", "engine --gap-s"),
        ("inf", "nodes drain http://a --timeout-s", "engine --ttft-s"),
    ],
)
def test_what_is_wrong_with_a_value_is_said_in_the_same_words_by_every_command(
    capsys: pytest.CaptureFixture[str], value: str, nodes: str, engine: str
) -> None:
    said = []
    for words in (nodes, engine):
        assert run(*words.split(), value) == 2
        said.append(capsys.readouterr().err.rpartition(words.rpartition(" ")[2])[2])
    assert said[0] == said[1] and said[0].startswith(": must be ") and said[0].endswith(f", not {value!r}\n")


def test_serve_tells_of_variables_that_are_no_setting_and_never_their_values(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENHAND_API_KEY", "hush")
    monkeypatch.setenv("EVENHAND_WORKERS", "none")  # so that it ends at once
    assert run("serve") == 2
    first, second = capsys.readouterr().err.splitlines()
    meant = "did you mean EVENHAND_API_KEYS?"
    assert first == f"evenhand serve: the variable EVENHAND_API_KEY is no setting and is ignored; {meant}"
    assert second.startswith("evenhand serve: EVENHAND_WORKERS: must be")


def test_a_port_in_use_is_told_before_anything_is_started(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["--server-name", "127.0.0.1", "--server-port", str(port), "--state-dir", str(tmp_path / "state")]
        assert run("serve", *words) == 2
    expected = f"evenhand serve: --server-port: {port} is in use; stop what listens there or take another\n"
    assert capsys.readouterr().err == expected
    assert not (tmp_path / "state").exists()


# --- evenhand nodes ---------------------------------------------------------------------------------


class Deployment(http.server.BaseHTTPRequestHandler):
    """Answers as it is told and keeps what it was asked."""

    answer: tuple[int, Any] = (200, {})
    nodes: ClassVar[dict[str, Any]] = {}  # the answer of /nodes/status, where it has any
    asked: ClassVar[list[tuple[str, str, Any, str | None]]]

    def handle_all(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        type(self).asked.append(
            (self.command, self.path, json.loads(body) if body else None, self.headers.get("authorization"))
        )
        status, value = type(self).answer
        if self.path.startswith("/nodes/status") and self.nodes:
            value = self.nodes
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = handle_all

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Deployment]]:
    class One(Deployment):
        asked: ClassVar[list[tuple[str, str, Any, str | None]]] = []

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), One)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("EVENHAND_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # must not be used
    yield One
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("list", ("GET", "/nodes/status", None)),
        ("list --all", ("GET", "/nodes/status?all=1", None)),
        ("add HTTP://a:80/", ("POST", "/nodes/add", {"url": "http://a"})),
        (
            "add http://a:1 --role prefill --models m n --speed 2.5 --key k",
            (
                "POST",
                "/nodes/add",
                {"url": "http://a:1", "status": {"role": 2, "models": ["m", "n"], "speed": 2.5}, "key": "k"},
            ),
        ),
    ],
)
def test_each_verb_is_one_call(
    deployment: type[Deployment], capsys: pytest.CaptureFixture[str], words: str, call: tuple[str, str, Any]
) -> None:
    assert run("nodes", *words.split(), "--json") == 0
    assert deployment.asked == [(*call, None)]
    assert json.loads(capsys.readouterr().out) == {}


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("remove http://a:1", ("POST", "/nodes/remove", {"url": "http://a:1"})),
        ("drain http://a:1", ("POST", "/nodes/remove?drain=true", {"url": "http://a:1"})),
        ("drain http://a:1 --timeout-s 30", ("POST", "/nodes/remove?drain=true&timeout_s=30", {"url": "http://a:1"})),
    ],
)
def test_a_node_is_removed_if_it_is_known(
    deployment: type[Deployment], capsys: pytest.CaptureFixture[str], words: str, call: tuple[str, str, Any]
) -> None:
    deployment.nodes = {"http://a:1": {"state": "gone"}}
    deployment.answer = (200, "Deleted successfully")
    assert run("nodes", *words.split(), "--json") == 0
    assert deployment.asked == [("GET", "/nodes/status?all=1", None, None), (*call, None)]
    assert json.loads(capsys.readouterr().out) == "Deleted successfully"


@pytest.mark.parametrize("verb", ["remove", "drain"])
def test_removing_a_node_that_a_source_lists_says_that_it_comes_back(
    deployment: type[Deployment], capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    deployment.nodes = {"http://a:1": {"state": "ready", "source": "file:///n.yaml"}}
    deployment.answer = (200, "Deleted successfully")
    assert run("nodes", verb, "http://a:1") == 0
    captured = capsys.readouterr()
    assert captured.out == "Deleted successfully\n"
    again = "registers it again as long as it lists it; take it out there"
    assert captured.err == f"evenhand nodes {verb}: file:///n.yaml {again}\n"


@pytest.mark.parametrize("verb", ["remove", "drain"])
def test_removing_an_unknown_node_says_so_and_fails(
    deployment: type[Deployment], capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    deployment.nodes = {"http://a:1": {"state": "ready"}}
    deployment.answer = (200, "Deleted successfully")  # what a deployment says, as LMDeploy does
    assert run("nodes", verb, "http://a:2") == 1
    captured = capsys.readouterr()
    line = f"evenhand nodes {verb}: http://a:2 is not registered; `evenhand nodes list --all` shows what is\n"
    assert (captured.out, captured.err) == ("", line)
    assert [path for _, path, *_ in deployment.asked] == ["/nodes/status?all=1"]


@pytest.mark.parametrize("words", ["nodes --admin-key ad list", "nodes list --admin-key ad", "nodes list"])
def test_the_admin_key_is_sent(deployment: type[Deployment], monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    if "--admin-key" not in words:
        monkeypatch.setenv("EVENHAND_ADMIN_KEY", "ad")
    assert run(*words.split()) == 0
    assert deployment.asked[0][3] == "Bearer ad"


def test_nodes_are_listed_in_columns() -> None:
    nodes = {
        "http://10.0.0.5:23333": {
            "role": 1,
            "models": ["llama", "qwen"],
            "unfinished": 12,
            "latency": [0.5, 1.5],
            "speed": 2,
            "state": "ready",
        },
        "http://b": {"role": 3, "models": [], "unfinished": 0, "latency": [], "speed": None, "state": "down\x1b[2J"},
    }
    nodes["http://b"]["reason"] = "refused"
    assert nodes_command.table(nodes).splitlines() == [
        "URL                    ROLE    STATE     UNFINISHED  LATENCY_S  SPEED  MODELS      REASON",
        "http://10.0.0.5:23333  Hybrid  ready             12      1.000      2  llama,qwen",
        "http://b               Decode  down?[2J           0          -      -  -           refused",
    ]
    assert nodes_command.table({}) == "no nodes"
    nodes["http://b"]["source"] = "dns://engine:8000"
    assert nodes_command.table(nodes).splitlines() == [
        "URL                    ROLE    STATE     UNFINISHED  LATENCY_S  SPEED  MODELS      SOURCE             REASON",
        "http://10.0.0.5:23333  Hybrid  ready             12      1.000      2  llama,qwen  -",
        "http://b               Decode  down?[2J           0          -      -  -           dns://engine:8000  refused",
    ]


@pytest.mark.parametrize(
    ("status", "body", "line"),
    [
        (401, {"error": {"message": "no key"}}, "401 no key; give --admin-key (EVENHAND_ADMIN_KEY)"),
        (504, {"error": {"message": "the engine\nis silent"}}, "504 the engine?is silent"),
        (
            502,
            {"error": {"message": "http://a refused (10402: Failed to get response after a period of time)"}},
            "502 http://a refused",
        ),
        (500, "what?", "500 Internal Server Error"),
    ],
)
def test_a_refusal_is_one_line_and_exit_code_1(
    deployment: type[Deployment], capsys: pytest.CaptureFixture[str], status: int, body: Any, line: str
) -> None:
    deployment.answer = (status, body)
    assert run("nodes", "add", "http://a") == 1
    assert capsys.readouterr().err == f"evenhand nodes add: {line}\n"


def test_a_deployment_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("nodes", "--url", "http://127.0.0.1:1", "list") == 1
    err = capsys.readouterr().err
    assert err.startswith("evenhand nodes list: can't reach http://127.0.0.1:1: Connection refused")
    assert err.count("\n") == 1


# --- evenhand serve, as a new user starts it --------------------------------------------------------


def test_the_greeting_holds_no_key_and_no_password() -> None:
    settings = Settings.load(
        {
            "api_keys": ["hush"],
            "admin_keys": ["hush"],
            "reader_keys": ["hush"],
            "engine_key": "hush",
            "redis_url": "rediss://me:hush@redis:6380/1",
            "server_name": "::",
        }
    )
    url = Endpoint(settings).url
    assert url == "http://[::1]:8000"
    text = greeting(url, settings, ["it's"], "Redis is away", embedded=False)
    assert "hush" not in text
    assert "Not ready yet: Redis is away" in text
    assert "redis-cli -u rediss://redis:6380/1 hgetall 'evenhand:{default}:unfinished'" in text
    (request,) = re.findall(r"  (curl .*?)\nAdd", text, re.DOTALL)
    words = shlex.split(request)
    assert f"{url}/v1/chat/completions" in words
    assert json.loads(words[words.index("-d") + 1])["model"] == "it's"


@pytest.mark.parametrize(
    ("url", "command"),
    [
        ("redis+cluster://:hush@h:7000,i", "redis-cli -h h -p 7000 -c hgetall"),
        (
            "rediss+sentinel://:hush@h,i/m/2",
            "redis-cli --tls -n 2 $(redis-cli --tls -h h -p 26379 sentinel get-master-addr-by-name m"
            " | xargs printf -- '-h %s -p %s') hgetall",
        ),
    ],
)
def test_the_greeting_knows_how_to_look_behind_sentinels_and_into_a_cluster(url: str, command: str) -> None:
    settings = Settings.load({"redis_url": url})
    text = greeting("http://h", settings, [], None, embedded=False).replace("valkey-cli", "redis-cli")
    assert f"  {command} 'evenhand:{{default}}:unfinished'" in text
    assert "hush" not in text


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ({}, ""),
        ({"admin_keys": ["hush"]}, ""),
        ({"admin_keys": ["hush"], "trusted_nodes": ["10.0.0.0/8"]}, " --admin-key KEY"),
        ({"api_keys": ["hush"], "trusted_nodes": ["none"]}, " --admin-key KEY"),
        ({"reader_keys": ["hush"], "trusted_nodes": ["none"]}, " --admin-key KEY"),
        ({"api_keys": ["hush"], "trusted_nodes": ["127.0.0.1/32"]}, ""),
    ],
)
def test_the_greetings_commands_have_what_they_need(flags: dict[str, Any], options: str) -> None:
    settings = Settings.load({"redis_url": "redis://r", **flags})
    text = greeting("http://127.0.0.1:8000", settings, [], None, embedded=False)
    assert f"nodes add http://HOST:PORT{options}    #" in text and f"nodes list{options}\n" in text
    assert f" top{options}    # in a browser: http://127.0.0.1:8000/dashboard\n" in text
    assert "--role" not in text and "hush" not in text


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"server_name": "0.0.0.0", "api_keys": ["k"]}, True),
        ({"server_name": "10.0.0.1", "api_keys": ["k"]}, True),
        ({"server_name": "127.0.0.1", "api_keys": ["k"]}, False),
        ({"server_name": "::1", "api_keys": ["k"]}, False),
        ({"server_name": "localhost", "api_keys": ["k"]}, False),
        ({"server_name": "127.0.0.1", "trusted_nodes": ["none"], "api_keys": ["k"]}, True),
        ({"server_name": "127.0.0.1", "trusted_nodes": ["10.0.0.0/8"], "api_keys": ["k"]}, True),
        ({"server_name": "0.0.0.0"}, False),
    ],
)
@pytest.mark.parametrize("strategy", ["Hybrid", "DistServe"])
def test_the_greeting_tells_of_trusted_networks_where_an_engine_may_be_in_another(
    flags: dict[str, Any], told: bool, strategy: str
) -> None:
    settings = Settings.load({"redis_url": "redis://r", "serving_strategy": strategy, **flags})
    text = greeting(Endpoint(settings).url, settings, [], None, embedded=False)
    assert ("must be in --trusted-nodes" in text) is told


@pytest.mark.parametrize("protocol", ["lmdeploy", "nixl"])
def test_the_greeting_names_the_roles_where_prefill_and_decode_are_separate(protocol: str) -> None:
    flags = {"redis_url": "redis://r", "serving_strategy": "DistServe", "pd_protocol": protocol}
    lines = greeting(
        "http://127.0.0.1:8001", Settings.load(flags), [], None, embedded=False, unused=["http://h (Hybrid)"]
    )
    for role in ("Prefill", "Decode"):
        assert f"nodes add http://HOST:PORT --role {role} --url http://127.0.0.1:8001    #" in lines
        assert (f"--proxy-url http://127.0.0.1:8001 --backend pytorch --role {role}\n" in lines) is (
            protocol == "lmdeploy"
        )
    assert "Never called with this serving strategy, and registered: http://h (Hybrid)" in lines


def test_serve_tells_of_settings_that_change_nothing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.supervisor.serve", lambda settings, *, sources, simulate: 0)
    assert run("serve", "--pd-protocol", "nixl", "--dummy-prefill") == 0
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("evenhand serve: --pd-protocol, --dummy-prefill have no effect without --serving-strategy")
    assert run("serve", "--serving-strategy", "DistServe", "--pd-protocol", "mooncake", "--dummy-prefill") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("evenhand serve: --dummy-prefill can't be used with --pd-protocol mooncake")


def test_the_help_of_serve_says_how_lists_are_separated(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "a variable with spaces or commas between its items" in text
    assert "Default default" not in text


@pytest.fixture
def state_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="evenhand-state-") as name:
        yield Path(name)


class Served:
    """`evenhand serve` on a free port with the embedded Redis of `state_dir`."""

    def __init__(self, state_dir: Path, log_file: Path, *words: str) -> None:
        words = ("--server-name", "127.0.0.1", "--server-port", "0", "--state-dir", str(state_dir), *words)
        self.process = Process([*EVENHAND, "serve", *words], log_file=log_file, cwd=ROOT, template=TEMPLATE)
        eventually(lambda: "Ctrl-C stops all that this command has started." in self.process.log(), within_s=30)
        self.greeting = self.process.log()
        self.url = re.search(r"serves (http://\S+) with", self.greeting)[1]  # type: ignore[index]

    def nodes(self, *words: str) -> str:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            assert run("nodes", "--url", self.url, *words) == 0
        return said.getvalue()

    def states(self) -> list[str]:
        """Of all nodes; none while the deployment can't say."""
        try:
            with urllib.request.urlopen(f"{self.url}/nodes/status", timeout=5) as answer:
                return [node["state"] for node in json.load(answer).values()]
        except urllib.error.HTTPError as e:
            e.close()
            return []

    def stop(self, number: int = signal.SIGINT) -> None:
        assert self.process.stop(number, within_s=20) == 0
        assert self.process.left_behind == []


@pytest.mark.timeout(120)
def test_serve_greets_with_commands_that_work_and_ctrl_c_ends_all(state_dir: Path, tmp_path: Path) -> None:
    served = Served(state_dir, tmp_path / "log", "--simulate", "2")
    try:
        block = re.search(r"Try it:\n(.*?)\nAdd engines:", served.greeting, re.DOTALL)
        assert block is not None
        answer = subprocess.run(["bash", "-c", block[1]], capture_output=True, text=True, timeout=20, check=True).stdout
        assert answer.startswith("data: {") and answer.rstrip().endswith("data: [DONE]")

        eventually(lambda: served.states() == ["ready", "ready"], within_s=10)
        static = "http://127.0.0.1:9"
        add = [*EVENHAND, "nodes", "--url", served.url, "add", static, "--models", "other"]
        added = subprocess.run([*add, "--host-header", "Engine.example:80"], capture_output=True, text=True, cwd=ROOT)
        assert added.returncode == 0 and "Added" in added.stdout, added.stderr
        assert json.loads(served.nodes("list", "--json"))[static]["host_header"] == "engine.example:80"
        assert static in served.nodes("list")

        second = Served(state_dir, tmp_path / "log2", "--workers", "1")
        assert f"joining the embedded Redis that runs in {state_dir}/redis" in second.greeting
        assert static in second.nodes("list")
        second.stop(signal.SIGTERM)
        assert "Deleted" in served.nodes("remove", static)
        assert static not in served.nodes("list")
        served.nodes("add", static, "--models", "other")
        served.stop()
    finally:
        served.process.kill()

    again = Served(state_dir, tmp_path / "log3", "--workers", "1")
    try:
        listed = again.nodes("list", "--json")
        assert list(json.loads(listed)) == [static]  # the simulated ones went with their deployment
        again.stop()
    finally:
        again.process.kill()


@pytest.mark.timeout(120)
def test_a_killed_serve_leaves_nothing_and_a_killed_redis_comes_back(state_dir: Path, tmp_path: Path) -> None:
    served = Served(state_dir, tmp_path / "log", "--workers", "1", "--simulate", "1")
    try:
        pids = processes_with(str(state_dir))
        server = next(pid for pid, command in pids.items() if "redis.sock" in command)
        os.kill(server, signal.SIGKILL)
        eventually(lambda: any("redis.sock" in c for c in processes_with(str(state_dir)).values()), within_s=5)
        eventually(lambda: served.states() == ["ready"], within_s=10)
        served.process.send(signal.SIGKILL)
        eventually(lambda: not processes_with(str(state_dir)) and not listens(served.url), within_s=10)
    finally:
        served.process.kill()


def processes_with(text: str) -> dict[int, str]:
    """{pid: command line} of all processes whose command line holds `text`."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if text in command and entry.name != str(os.getpid()):
                found[int(entry.name)] = command
    return found


def listens(url: str) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) == 0


@pytest.mark.timeout(60)
def test_simulated_engines_are_registered_where_nobody_is_trusted_without_a_key(
    state_dir: Path, tmp_path: Path
) -> None:
    flags = ["--simulate", "1", "--workers", "1", "--admin-keys", "hush", "--trusted-nodes", "none"]
    served = Served(state_dir, tmp_path / "log", *flags)
    try:
        assert "refused" not in served.process.log() and "hush" not in served.process.log()
        assert "its network must be in --trusted-nodes" in served.greeting
        assert "Not ready" not in served.greeting
        served.stop()
    finally:
        served.process.kill()


@pytest.mark.timeout(60)
def test_every_line_of_stderr_is_json_where_that_is_asked_for(state_dir: Path, tmp_path: Path) -> None:
    words = ["--server-name", "127.0.0.1", "--server-port", "0", "--state-dir", str(state_dir), "--workers", "1"]
    words += ["--log-format", "json", "--log-level", "INFO", "--link-type", "IB", "--log-sample", "0.5"]
    with (tmp_path / "err").open("wb") as err, (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            [*EVENHAND, "serve", *words, "--simulate", "1"],
            stdout=out,
            stderr=err,
            cwd=ROOT,
            env={**os.environ, "EVENHAND_WORKRS": "3"},
        )
        try:
            eventually(lambda: "Ctrl-C stops" in (tmp_path / "out").read_text(), within_s=30)
            engine = next(pid for pid in children(process.pid) if " engine " in command_of(pid))
            os.kill(engine, signal.SIGKILL)
            eventually(lambda: "simulated engine" in (tmp_path / "err").read_text(), within_s=5)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(20)
    lines = [json.loads(line) for line in (tmp_path / "err").read_text().splitlines()]
    said = " ".join(line["message"] for line in lines)
    for words_ in (
        "EVENHAND_WORKRS",
        "--link-type has no effect",
        "--log-sample has no effect",
        "the simulated engine",
    ):
        assert words_ in said
    assert all(set(line) >= {"time", "level", "pid", "logger", "message"} for line in lines)


@pytest.mark.timeout(60)
def test_the_greeting_waits_a_moment_for_the_nodes_that_are_named(state_dir: Path, tmp_path: Path) -> None:
    engine = Process([*EVENHAND, "engine", "--model", "m"], log_file=tmp_path / "engine", cwd=ROOT, template=TEMPLATE)
    try:
        url = eventually(lambda: re.search(r"http://\S+", engine.log()), within_s=10)[0]
        served = Served(state_dir, tmp_path / "log", "--workers", "1", "--nodes", url)
        try:
            assert "Not ready" not in served.greeting and '"model": "m"' in served.greeting
            served.stop()
        finally:
            served.process.kill()
    finally:
        engine.kill()


@pytest.mark.timeout(60)
def test_dead_workers_are_replaced_and_the_end_comes_though_nobody_reads_stderr(
    state_dir: Path, tmp_path: Path
) -> None:
    words = ["--server-name", "127.0.0.1", "--server-port", "0", "--state-dir", str(state_dir), "--workers", "1"]
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    os.write(write_end, b"x" * 4096)  # full
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen([*EVENHAND, "serve", *words], stdout=out, stderr=write_end, cwd=ROOT)
    os.close(write_end)
    try:
        eventually(lambda: "Ctrl-C stops" in (tmp_path / "out").read_text(), within_s=30)
        master = next(pid for pid in children(process.pid) if "gunicorn" in command_of(pid))
        (worker,) = children(master)
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: (now := children(master)) and worker not in now, within_s=10)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        os.close(read_end)
        process.kill()
        process.wait()


@pytest.mark.timeout(60)
def test_a_reload_that_is_asked_for_during_the_start_comes_when_it_has_started(state_dir: Path, tmp_path: Path) -> None:
    words = ["--server-name", "127.0.0.1", "--server-port", "0", "--state-dir", str(state_dir), "--workers", "1"]
    process = Process(
        [*EVENHAND, "serve", *words, "--log-level", "INFO"], log_file=tmp_path / "log", cwd=ROOT, template=TEMPLATE
    )
    try:
        eventually(lambda: any("gunicorn" in command_of(pid) for pid in children(process.pid)), within_s=30)
        process.send(signal.SIGHUP)
        eventually(lambda: "Ctrl-C stops" in process.log(), within_s=30)
        eventually(lambda: "Handling signal: hup" in process.log(), within_s=10)
        process.send(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()


def test_a_password_in_the_url_of_a_deployment_is_not_said_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("top", "--once", "--url", "http://u:hush@127.0.0.1:1") == 2
    assert "hush" not in (told := capsys.readouterr().err) and "--admin-key" in told
    monkeypatch.setenv("EVENHAND_URL", "http://u:hush@127.0.0.1:1")
    assert run("nodes", "list") == 2
    assert "hush" not in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["add", "remove", "drain"])
def test_a_password_in_the_url_of_a_node_is_not_said_again(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert run("nodes", verb, "http://u:hush@127.0.0.1:1") == 2
    assert "hush" not in (told := capsys.readouterr().err) and "must not hold a user or password" in told
