"""The configuration file, between the variables and the defaults, and the command that shows and checks it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from app import cli
from app.errors import ConfigurationError
from app.settings import SOURCES_VARIABLE, Settings, WrongSettings, variables_of
from workers.in_force import load_for_master

EXAMPLE = Path(__file__).parent.parent / "docs" / "evenhand.example.toml"
Write = Callable[..., Path]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {variable for name in Settings.model_fields for variable in variables_of(name)}
    for variable in [v for v in os.environ if v.startswith("EVENHAND_") or v in others]:
        monkeypatch.delenv(variable)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def one(text: str, mode: int = 0o600) -> Path:
        path = tmp_path / "evenhand.toml"
        path.write_text(text)
        path.chmod(mode)
        return path

    return one


def faults(path: Path, **flags: object) -> list[str]:
    with pytest.raises(WrongSettings) as caught:
        Settings.load({"config": str(path), **flags})
    return [line.replace(str(path), "FILE") for line in caught.value.lines]


def run(*words: str) -> int:
    try:
        return cli.main(words)
    except SystemExit as e:
        return int(e.code or 0)


# --- precedence


def test_flag_over_variable_over_file_over_default(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("workers = 5\nretries = 6\ngrace-s = 7\n")
    monkeypatch.setenv("EVENHAND_CONFIG", str(path))
    monkeypatch.setenv("EVENHAND_RETRIES", "8")
    monkeypatch.setenv("EVENHAND_GRACE_S", "9")
    settings, sources = Settings.load_with_sources({"grace_s": "10"})
    assert (settings.workers, settings.retries, settings.grace_s, settings.lease_s) == (5, 8, 10, 8)
    assert sources == {
        "config": "EVENHAND_CONFIG",
        "workers": f"{path}:1",
        "retries": "EVENHAND_RETRIES",
        "grace_s": "--grace-s",
    }


def test_another_projects_variable_wins_over_the_file_too(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOHTTP_TIMEOUT", "33")
    assert Settings.load({"config": str(write("first-byte-timeout-s = 44\n"))}).first_byte_timeout_s == 33


def test_the_flag_names_the_file_before_the_variable_does(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EVENHAND_CONFIG", str(tmp_path / "absent.toml"))
    assert Settings.load({"config": str(write("workers = 5\n"))}).workers == 5


def test_names_have_dashes_or_underscores_and_values_their_own_kinds(write: Write) -> None:
    path = write(
        'server-port = 81\nserver_name = "::1"\nssl-keyfile = "k.pem"\ngrace-s = 1.5\nforward-client-key = true\n'
        'nodes = ["http://a:1", "http://b:2"]\napi-keys = ["hush-1", "hush-2"]\nmax-body-size = "1MB"\n'
        "trusted-nodes = []\n"
    )
    settings = Settings.load({"config": str(path)})
    assert (settings.server_port, settings.server_name, settings.grace_s) == (81, "::1", 1.5)
    assert settings.forward_client_key and settings.nodes == ("http://a:1", "http://b:2")
    assert [key.get_secret_value() for key in settings.api_keys] == ["hush-1", "hush-2"]
    assert settings.max_body_size == 1_000_000
    assert settings.trusted_nodes == ()


def test_the_documents_example_is_right() -> None:
    settings = Settings.load({"config": str(EXAMPLE)})
    assert settings.server_port == 8000 and settings.workers == 4 and settings.grace_s == 120
    assert settings.aliases == {"gpt-4o": "internlm2"} and settings.default_model == "internlm2"
    assert settings.strategies == {"internlm2": "min_observed_latency"}


# --- what is wrong


def test_every_fault_is_told_with_its_line(write: Write) -> None:
    path = write(
        'server-port = 70000\n# a comment\nworkers = true\nnamespace = 5\nnodes = [\n  "http://a:1",\n]\n'
        'rounting-strategy = "random"\nlog-level = "LOUD"\n\n[retries]\nmany = 1\n'
    )
    assert sorted(faults(path, lease_s="x")) == [
        "--lease-s: must be a number of at least 2, not 'x'",
        "FILE:11: retries: must be a value, not a table",
        "FILE:1: server-port: must be a whole number from 0 to 65535, not 70000",
        "FILE:3: workers: must be a whole number from 1 to 1024, not true or false",
        "FILE:4: namespace: must be text, not 5",
        "FILE:8: rounting-strategy is no setting; did you mean routing-strategy?",
        "FILE:9: log-level: must be one of CRITICAL, FATAL, ERROR, WARN, WARNING, INFO, DEBUG, NOTSET, not 'LOUD'",
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("workers = \n", "FILE: is no TOML: Invalid value (at line 1, column 11)"),
        ("workers = 1\n\nworkers_ = 1\n", "FILE:3: workers_ is no setting; did you mean workers?"),
        ("server-port = 1\nserver_port = 1\n", "FILE:2: server-port: is given twice, in two spellings"),
        ('config = "other.toml"\n', "FILE:1: config is no setting"),
        ("nodes = 5\n", "FILE:1: nodes: must be a list of texts, not 5"),
        ("state-dir = 5\n", "FILE:1: state-dir: must be text, not 5"),
        ("workers = [1, 2]\n", "FILE:1: workers: must be a whole number from 1 to 1024"),
    ],
)
def test_a_fault_says_what_and_where(write: Write, text: str, line: str) -> None:
    assert faults(write(text))[0].startswith(line)


def test_an_absent_file_and_one_that_is_no_text_are_told(tmp_path: Path) -> None:
    assert faults(tmp_path / "absent.toml") == ["FILE: can't be read: No such file or directory"]
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    assert faults(tmp_path / "binary.toml") == ["FILE: is no UTF-8 text"]
    for odd in ("x = " + "[" * 5000, "workers = 1" + "0" * 5000):
        (tmp_path / "odd.toml").write_text(odd)
        (fault,) = faults(tmp_path / "odd.toml")
        assert fault.startswith("FILE: is no TOML: ")


@pytest.mark.timeout(5)
def test_what_is_no_file_is_told_and_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    assert faults(tmp_path / "pipe.toml") == ["FILE: can't be read: it is no regular file"]
    assert faults(tmp_path) == ["FILE: can't be read: Is a directory"]
    # What `<(...)` of a shell gives, written and ended: the next process of a deployment could not read it again.
    reader, writer = os.pipe()
    os.write(writer, b"workers = 5\n")
    os.close(writer)
    try:
        assert faults(Path(f"/dev/fd/{reader}")) == ["FILE: can't be read: it is no regular file"]
    finally:
        os.close(reader)


@pytest.mark.timeout(5)
def test_a_file_that_stdin_is_can_be_read(write: Write) -> None:
    with open(write("workers = 5\n"), "rb") as file:
        assert Settings.load({"config": f"/dev/fd/{file.fileno()}"}).workers == 5


def test_the_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "evenhand.toml"
    path.write_bytes(b"\xef\xbb\xbfworkers = 5\r\nretries = 6\r\n")
    settings = Settings.load({"config": str(path)})
    assert (settings.workers, settings.retries) == (5, 6)


def test_a_wrong_secret_in_the_file_is_not_repeated(write: Write) -> None:
    text = "\n".join(faults(write('api-keys = ["hu sh"]\nredis-url = "http://:hush@r"\nengine-key = 5551\n')))
    assert "hush" not in text and "hu sh" not in text and "5551" not in text and text.count("\n") == 2


# --- from process to process


def test_what_is_handed_on_is_complete_and_the_file_is_not_read_again(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write('workers = 5\napi-keys = ["hush-1"]\n')
    settings = Settings.load({"config": str(path)})
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(SOURCES_VARIABLE, "{}")
    path.write_text("workers = ")
    assert Settings.load() == settings


def test_a_reload_reads_the_file_again_and_leaves_flags_variables_and_what_can_not_change(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("retries = 5\nworkers = 5\ngrace-s = 5\nserver-port = 0\nidle-timeout-s = 5\n")
    monkeypatch.setenv("EVENHAND_WORKERS", "3")
    settings, sources = Settings.load_with_sources({"config": str(path), "grace_s": "6"})
    handed = {
        "HOME": os.environ["HOME"],
        **settings.model_copy(update={"server_port": 8123}).environment(),  # as `serve` found it free
        SOURCES_VARIABLE: json.dumps(sources),
    }
    monkeypatch.setattr(os, "environ", handed)
    first = load_for_master(handed)
    assert (first.settings.retries, first.settings.server_port, first.ignored) == (5, 8123, [])
    write('retries = 7\nworkers = 7\ngrace-s = 7\nserver-port = 7\nprobe-interval-s = 7\nnamespace = "n7"\n')
    again = load_for_master(handed)
    assert (again.settings.retries, again.settings.probe_interval_s) == (7, 7)
    assert (again.settings.workers, again.settings.grace_s) == (3, 6), "given by a variable, by a flag"
    assert again.settings.idle_timeout_s == 300, "no longer in the file, so the default"
    assert (again.settings.server_port, again.settings.namespace) == (8123, "default")
    assert again.ignored == [
        "--server-port changes at the next start only",
        "--namespace changes at the next start only",
    ]
    assert again.sources["retries"] == f"{path}:1" and again.sources["grace_s"] == "--grace-s"
    assert again.sources["workers"] == "EVENHAND_WORKERS" and "idle_timeout_s" not in again.sources
    assert "namespace" not in again.sources
    assert Settings.load() == again.settings, "what workers read"
    write("retries = many\n")
    with pytest.raises(ConfigurationError):
        load_for_master(handed)


# --- evenhand config


def test_show_has_values_with_their_sources_and_no_secret(
    write: Write, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write('api-keys = ["hush-1", "hush-2"]\nredis-url = "redis://:hush@r:6379/0"\n')
    monkeypatch.setenv("EVENHAND_RETRIES", "4")
    assert run("config", "show", "--config", str(path), "--workers", "3") == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines()]
    assert ["--workers", "3", "--workers"] in rows and ["--retries", "4", "EVENHAND_RETRIES"] in rows
    assert ["--api-keys", "**********", "**********", f"{path}:1"] in rows
    assert ["--redis-url", "redis://***@r:6379/0", f"{path}:2"] in rows
    assert ["--server-port", "8000", "default"] in rows and len(rows) == len(Settings.model_fields)
    assert "hush" not in out and err == ""


def test_show_in_json_is_one_object(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write('admin-keys = ["hush-1"]\nretries = 4\n')
    assert run("config", "show", "--json", "--config", str(path)) == 0
    text = capsys.readouterr().out
    assert "hush" not in text
    found = json.loads(text)
    assert found["retries"] == {"value": "4", "from": f"{path}:2"}
    assert found["workers"] == {"value": "2", "from": "default"}
    assert set(found) == set(Settings.model_fields)


def test_check_ends_with_0_or_with_2_and_a_line_for_each_fault(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write("workers = 3\n"))
    assert run("config", "check", "--config", path) == 0
    assert capsys.readouterr() == (f"the settings are right, those of {path} too\n", "")
    write("workers = 0\nretires = 1\n")
    assert run("config", "check", "--config", path) == 2
    out, err = capsys.readouterr()
    assert out == "" and sorted(err.splitlines()) == [
        f"{path}:1: workers: must be a whole number from 1 to 1024, not 0",
        f"{path}:2: retires is no setting; did you mean retries?",
    ]
    assert run("config", "show", "--config", path) == 2


def test_check_finds_settings_that_contradict_each_other(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write('serving-strategy = "DistServe"\nprefill-servers-urls = "disable"\n')
    assert run("config", "check", "--config", str(path)) == 2
    assert capsys.readouterr().err.startswith("--prefill-servers-urls: disable means that")


@pytest.mark.parametrize(("mode", "told"), [(0o644, True), (0o640, False)])
def test_secrets_that_everybody_can_read_are_told(
    write: Write, capsys: pytest.CaptureFixture[str], mode: int, told: bool
) -> None:
    path = write('engine-key = "hush"\n', mode)
    assert run("config", "check", "--config", str(path)) == 0
    line = f"note: {path} holds engine-key and every user of this host can read it: chmod o-r\n"
    assert capsys.readouterr().err == (line if told else "")


@pytest.mark.parametrize("kind", ["api", "admin", "reader"])
def test_files_of_plain_keys_that_everybody_can_read_are_told(
    write: Write, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    file = write("").parent / "keys"
    file.write_text("hush\n")
    file.chmod(0o644)
    assert run("config", "check", f"--{kind}-keys-file", str(file)) == 0
    line = f"note: {file} holds keys and every user of this host can read it: chmod o-r\n"
    assert capsys.readouterr().err == line


def test_a_file_of_nodes_that_is_not_there_is_told(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    there = write("")
    absent = there.parent / "nodes.yaml"
    sources = [f"file://{there}", f"file://{absent}", "file://etc/nobodys/nodes.yaml", "dns://engine:8000"]
    assert run("config", "check", "--discover", *sources) == 0
    assert capsys.readouterr().err.splitlines() == [
        f"note: --discover file://{absent}: there is no file {absent} yet",
        "note: --discover file://etc/nobodys/nodes.yaml: there is no file /nobodys/nodes.yaml yet; etc is a name that "
        "stands before the path, and /etc/nobodys/nodes.yaml is written file:///etc/nobodys/nodes.yaml",
    ]


def test_keys_in_the_file_of_settings_are_sent_to_their_own(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write('[[keys]]\nkey = "hush"\n')
    assert run("config", "check", "--config", str(path)) == 2
    where = "[[keys]] belongs into the file that api-keys-file, admin-keys-file or reader-keys-file names"
    assert capsys.readouterr().err == f"{path}:1: keys is no setting; {where}\n"


def test_serve_tells_every_fault_of_the_file(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write("workers = 0\nretires = 1\n")
    assert run("serve", "--config", str(path)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith(f"evenhand serve: {path}:") for line in lines)
