"""By which way a command reaches its deployment, and what it says when it does not."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable

import pytest

from app.errors import StoreUnavailable
from tests.support.contract import Scripted, ScriptedView, candidate, explain

Run = Callable[..., int]
REDIS = "redis://:hush@10.0.0.2:6379/0"
HTTP = "http://a:1"  # a node of the deployment over HTTP
IN_REDIS = "http://r:1"


@pytest.mark.parametrize(
    ("flags", "variables", "where"),
    [
        ("--url {url}", "", HTTP),
        ("--redis-url {redis}", "", IN_REDIS),
        ("--url {url}", "EVENHAND_REDIS_URL", HTTP),
        ("--redis-url {redis}", "EVENHAND_URL", IN_REDIS),
        ("", "EVENHAND_URL", HTTP),
        ("", "EVENHAND_REDIS_URL", IN_REDIS),
        ("", "EVENHAND_URL EVENHAND_REDIS_URL", HTTP),
    ],
)
def test_a_flag_wins_over_variables_and_a_url_over_a_redis_url(
    run: Run,
    deployment: Scripted,
    view: ScriptedView,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    variables: str,
    where: str,
) -> None:
    values = {"EVENHAND_URL": deployment.url, "EVENHAND_REDIS_URL": REDIS}
    for name in variables.split():
        monkeypatch.setenv(name, values[name])
    assert run("top", "--once", *flags.format(url=deployment.url, redis=REDIS).split()) == 0
    drawn = capsys.readouterr().out
    assert {node for node in (HTTP, IN_REDIS) if node.removeprefix("http://") in drawn} == {where}


def test_nodes_are_listed_from_redis_by_the_flag_only(
    run: Run,
    deployment: Scripted,
    view: ScriptedView,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scripts that run where `serve` does have the variable, and read fields that only HTTP has."""
    monkeypatch.setenv("EVENHAND_REDIS_URL", REDIS)
    monkeypatch.setattr("app.terminal.reach.DEFAULT_URL", deployment.url)
    deployment.nodes = {HTTP: {"role": 1, "state": "ready", "static": True}}
    assert run("nodes", "list", "--json") == 0
    assert json.loads(capsys.readouterr().out) == deployment.nodes
    assert run("nodes", "list", "--json", "--redis-url", REDIS) == 0
    assert list(json.loads(capsys.readouterr().out)) == [IN_REDIS]


@pytest.mark.parametrize("command", ["nodes list", "top --once", "explain --model m", "check"])
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (f"--url http://a --redis-url {REDIS}", "give --url or --redis-url, not both"),
        ("--url http://a --namespace x", "--namespace goes with --redis-url"),
        ("--redis-url http://a", "--redis-url: must be redis://HOST:PORT/DB"),
        (f"--redis-url {REDIS} --namespace a/b", "--namespace: must be 1 to 64 letters"),
    ],
)
def test_flags_that_contradict_each_other_end_with_one_line_and_2(
    run: Run, view: ScriptedView, capsys: pytest.CaptureFixture[str], command: str, flags: str, line: str
) -> None:
    assert run(*command.split(), *flags.split()) == 2
    captured = capsys.readouterr()
    name = " ".join(word for word in command.split() if not word.startswith("-") and word != "m")
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"evenhand {name}: {line}") and "hush" not in captured.err


def test_a_variable_that_is_no_url_is_named(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENHAND_URL", "nowhere")
    assert run("nodes", "list") == 2
    err = capsys.readouterr().err
    assert err.startswith("evenhand nodes list: EVENHAND_URL: a deployment's URL must start with http://")


def test_nodes_are_changed_over_http_only(run: Run, view: ScriptedView, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("nodes", "--redis-url", REDIS, "remove", "http://a") == 2
    assert capsys.readouterr().err.startswith("evenhand nodes remove: --redis-url is for `nodes list`")


@pytest.mark.parametrize("words", ["nodes --redis-url {0} list --json", "nodes list --redis-url {0} --json"])
def test_nodes_are_listed_from_redis_with_the_fields_of_nodes_status(
    run: Run, view: ScriptedView, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    assert run(*words.format(REDIS).split()) == 0
    assert json.loads(capsys.readouterr().out) == {
        IN_REDIS: {
            "role": 3,
            "models": ["m"],
            "unfinished": 0,
            "latency": [2.0, 1.0],  # newest first, as there
            "speed": None,
            "state": "ready",
            "reason": "",
            "role_name": "Decode",
            "source": None,
        }
    }
    assert view.places == [(REDIS, "default")]


def test_gone_nodes_are_listed_on_demand(run: Run, view: ScriptedView, capsys: pytest.CaptureFixture[str]) -> None:
    view.said["nodes"][0]["state"] = "gone"
    assert run("nodes", "list", "--redis-url", REDIS) == 0
    assert capsys.readouterr().out == "no nodes\n"
    assert run("nodes", "list", "--redis-url", REDIS, "--all") == 0
    assert IN_REDIS in capsys.readouterr().out


@pytest.mark.parametrize("command", ["nodes list", "top --once", "explain --model m"])
def test_a_redis_that_is_away_is_one_line_without_its_password(
    run: Run, view: ScriptedView, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    view.failure = StoreUnavailable("Redis can't be reached: Connection refused")
    words = [*command.split(), "--redis-url", REDIS, "--namespace", "blue"]
    assert run(*words) == 1
    err = capsys.readouterr().err
    assert "Redis at 10.0.0.2:6379, namespace blue: Redis can't be reached: Connection refused" in err
    assert err.count("\n") == 1 and "hush" not in err


@pytest.mark.parametrize("command", ["top --once", "explain --model m"])
def test_a_key_that_is_refused_is_one_line_and_names_the_option(
    run: Run, deployment: Scripted, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    name = command.split()[0]
    deployment.refusal = (401, "This needs an admin key: send `Authorization: Bearer <key>`.")
    assert run(*command.split(), "--url", deployment.url) == 1
    assert capsys.readouterr().err == (
        f"evenhand {name}: 401 This needs an admin key; give --admin-key (EVENHAND_ADMIN_KEY)\n"
    )


@pytest.mark.parametrize("command", ["top --once", "explain --model m", "nodes list"])
def test_who_gave_a_wrong_key_is_not_told_to_give_one(
    run: Run, deployment: Scripted, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    deployment.refusal = (401, "The admin key is wrong.")
    assert run(*command.split(), "--url", deployment.url, "--admin-key", "wrong") == 1
    assert capsys.readouterr().err.endswith(": 401 The admin key is wrong.\n")


def test_nodes_are_listed_as_last_known_while_redis_is_away(
    run: Run, deployment: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment.refusals["/nodes/status"] = (503, "Redis can't be reached: Connection refused.")
    assert run("nodes", "list", "--json", "--url", deployment.url) == 0
    captured = capsys.readouterr()
    assert list(json.loads(captured.out)) == [HTTP, "http://b:2"]
    assert captured.err == (
        "evenhand nodes list: 503 Redis can't be reached: Connection refused; "
        "these are the last known nodes, with counts of one worker\n"
    )
    deployment.older = True  # it has no such view
    assert run("nodes", "list", "--url", deployment.url) == 1
    assert capsys.readouterr().err == "evenhand nodes list: 503 Redis can't be reached: Connection refused.\n"


def test_a_list_names_each_node_once(run: Run, deployment: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    deployment.nodes = {HTTP: {"role": 1, "state": "down", "reason": f"engine {HTTP} refused the connection"}}
    assert run("nodes", "list", "--url", deployment.url) == 0
    assert capsys.readouterr().out.splitlines()[1].split("  ")[-1].strip() == "refused the connection"


@pytest.mark.parametrize("command", ["top --once", "explain --model m"])
def test_the_admin_key_goes_along(run: Run, deployment: Scripted, command: str) -> None:
    deployment.explained = {"m": explain(candidate(HTTP))}
    assert run(*command.split(), "--url", deployment.url, "--admin-key", "ad") == 0
    assert [key for _, _, key in deployment.asked] == ["Bearer ad"]


@pytest.mark.parametrize("command", ["top --once", "explain --model m"])
def test_an_older_deployment_is_called_that(
    run: Run, deployment: Scripted, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    deployment.older = True
    assert run(*command.split(), "--url", deployment.url) == 1
    assert capsys.readouterr().err.endswith("its Evenhand is an older one\n")


@pytest.mark.parametrize("command", ["nodes list", "top --once", "explain --model m"])
def test_something_else_at_the_address_is_one_line(
    run: Run, deployment: Scripted, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    deployment.state = deployment.nodes = ["what?"]  # type: ignore[assignment]
    deployment.explained = {"m": ["what?"]}  # type: ignore[dict-item]
    assert run(*command.split(), "--url", deployment.url) == 1
    err = capsys.readouterr().err
    assert "did not answer as Evenhand does" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("scheme", "answer", "hint"),
    [
        ("http", b"\x15\x03\x01\x00\x02\x02\x46", "is it https://127.0.0.1:PORT?"),  # an alert of TLS
        ("http", b"", "is it https://127.0.0.1:PORT?"),
        ("http", b"SSH-2.0-OpenSSH_9.2\r\n", ""),
        ("https", b"HTTP/1.1 400 Bad Request\r\n\r\n", "is it http://127.0.0.1:PORT?"),
    ],
)
def test_a_url_with_the_other_scheme_is_asked_about(
    run: Run, capsys: pytest.CaptureFixture[str], scheme: str, answer: bytes, hint: str
) -> None:
    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=[listener])
        thread.start()
        port = listener.getsockname()[1]
        assert run("nodes", "list", "--url", f"{scheme}://127.0.0.1:{port}") == 1
        thread.join()
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.endswith(f"; {hint.replace('PORT', str(port))}\n") if hint else "is it" not in err


@pytest.mark.parametrize("command", ["top --once", "explain --model m"])
def test_a_document_of_another_version_is_one_line(
    run: Run, deployment: Scripted, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    deployment.state["nodes"] = [{"url": "http://a"}]
    deployment.explained = {"m": {"choices": [{}]}}
    assert run(*command.split(), "--url", deployment.url) == 1
    err = capsys.readouterr().err
    assert "its answer can't be read" in err and err.count("\n") == 1
