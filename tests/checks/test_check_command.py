"""`evenhand check`: how the findings are shown, and what it says of a deployment over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app import cli
from app.checks.finding import bad, ok, warn
from app.checks.report import Report, told
from app.errors import StoreUnavailable
from tests.checks.conftest import Check
from tests.support.contract import Scripted, ScriptedView, node, state
from tests.support.redis import PrivateRedis, Space


@pytest.fixture
def deployment() -> Iterator[Scripted]:
    with Scripted(state(node("http://a:1"), node("http://b:1"))) as scripted:
        yield scripted


def test_findings_are_shown_part_by_part_with_how_to_mend_them() -> None:
    report = Report("Redis at r:6379, namespace default")
    report.add([ok("redis.version", "Redis 7.4.0"), warn("redis.eviction", "allkeys-lru takes", "CONFIG SET")])
    report.add([bad("nodes.registered", "no node\x1b[2J is", "evenhand nodes add")])
    report.not_checked = [("the save points", "Redis refuses CONFIG GET")]
    assert list(told(report)) == [
        "Redis at r:6379, namespace default",
        "",
        "redis",
        "  ok    version     Redis 7.4.0",
        "  warn  eviction    allkeys-lru takes",
        "                    -> CONFIG SET",
        "",
        "nodes",
        "  bad   registered  no node?[2J is",
        "                    -> evenhand nodes add",
        "",
        "not looked at",
        "  the save points (Redis refuses CONFIG GET)",
        "",
        "1 thing bad, 1 warning, 1 ok",
    ]
    assert "\x1b[33mwarn\x1b[0m" in "\n".join(told(report, colour=True))


def test_over_http_it_says_what_needs_redis(check: Check, deployment: Scripted) -> None:
    checked = check("--url", deployment.url, "--admin-key", "ad")
    assert checked.trouble == {}
    assert checked.of("http.ready") == ["it can serve"]
    assert len(checked.not_checked) == 6 and "key layout, types and unknown keys" in checked.not_checked
    assert {item["why"] for item in checked.document["not_checked"]} == {"needs --redis-url"}
    assert {key for _, _, key in deployment.asked} == {"Bearer ad"}


def test_over_http_what_it_says_of_itself(check: Check, deployment: Scripted) -> None:
    deployment.trouble = "Redis: Connection refused"
    deployment.state |= {"redis": {"up": False, "reason": "Connection refused"}, "version": "9.9.9"}
    checked = check("--url", deployment.url)
    assert checked.trouble == {"http.ready": "bad", "http.redis": "bad", "http.version": "warn"}
    assert checked.of("http.ready") == ["Redis: Connection refused"]


def test_over_http_an_older_deployment_still_tells_of_its_roles(check: Check, deployment: Scripted) -> None:
    deployment.older = True
    checked = check("--url", deployment.url)
    assert checked.trouble == {"http.state": "bad"}
    assert checked.of("http.health") == ["Hybrid: 1 ready"]


def test_over_http_a_state_of_another_version(check: Check, deployment: Scripted) -> None:
    deployment.state["nodes"] = [{"url": "http://a"}]
    checked = check("--url", deployment.url)
    assert checked.trouble == {"http.state": "bad"} and "another version" in checked.of("http.state")[0]


@pytest.mark.parametrize("way", ["not there", "refused"])
def test_over_http_a_deployment_that_is_not_reached(check: Check, deployment: Scripted, way: str) -> None:
    if way == "refused":
        deployment.refusal = (401, "no key")
    checked = check("--url", deployment.url if way == "refused" else "http://127.0.0.1:1")
    assert checked.trouble == {"http.reach": "bad"}
    mend = checked.document["findings"][0]["mend"]
    assert mend.startswith("it is reached" if way == "refused" else "start `evenhand serve`")


def test_a_redis_url_in_the_environment_goes_before_a_url_there(
    check: Check,
    deployment: Scripted,
    deployed: Space,
    view: ScriptedView,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EVENHAND_URL", deployment.url)
    assert check().document["deployment"] == deployment.url
    monkeypatch.setenv("EVENHAND_REDIS_URL", deployed.url)
    assert "redis.sock" in check().document["deployment"]
    assert check("--url", deployment.url).document["deployment"] == deployment.url


def test_a_view_that_fails_is_told(check: Check, deployed: Space, view: ScriptedView) -> None:
    view.failure = StoreUnavailable("Redis did not answer within 2 s")
    checked = check("--redis-url", deployed.url)
    assert checked.trouble == {"nodes.state": "bad"} and "within 2 s" in checked.of("nodes.state")[0]
    assert checked.not_checked == ["nodes and workers"]
    deployed.cli("SET", deployed.key("layout"), "2")
    assert check("--redis-url", deployed.url).trouble == {"keys.layout": "bad"}


def test_variables_that_are_no_setting_are_warned_of(
    check: Check, deployed: Space, view: ScriptedView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENHAND_API_KEY", "hush")
    checked = check("--redis-url", deployed.url)
    assert checked.trouble == {"host.variables": "warn"} and "hush" not in str(checked.document)


def test_nodes_are_asked_with_the_keys_that_workers_send(
    check: Check, deployed: Space, view: ScriptedView, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, str | None] = {}

    async def ask(keys: dict[str, str | None], **options: object) -> dict[str, str]:
        asked.update(keys)
        return dict.fromkeys(keys, "")

    monkeypatch.setattr("app.checks.engines.ask", ask)
    first, second = (one["url"] for one in view.said["nodes"])
    deployed.cli("HSET", deployed.key("engine_keys"), first, "its-own")
    checked = check("--redis-url", deployed.url, "--engine-key", "for-all")
    assert asked == {first: "its-own", second: "for-all"}
    assert checked.trouble == {} and "its-own" not in str(checked.document)


@pytest.mark.parametrize("words", ["--state-dir /x", "--engine-key k", "--config /x.toml"])
def test_options_of_redis_beside_a_url(capsys: pytest.CaptureFixture[str], words: str) -> None:
    assert cli.main(["check", "--url", "http://a", *words.split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith("evenhand check: --config, --state-dir and --engine-key go without --url")


def test_a_broken_file_of_keys_is_a_finding_and_no_end(
    check: Check, deployed: Space, view: ScriptedView, tmp_path: Path
) -> None:
    keys, config = tmp_path / "keys", tmp_path / "evenhand.toml"
    keys.write_text("sk-1\nhush hush\n")
    config.write_text(f'redis-url = "{deployed.url}"\napi-keys-file = "{keys}"\n')
    checked = check("--config", str(config))
    assert checked.trouble == {"host.keys": "bad"}
    assert checked.of("host.keys")[0].startswith(f"{config}:2: api-keys-file: {keys}:2: must be one key")
    assert "hush" not in str(checked.document)
    keys.write_text("sk-1\n")
    assert check("--config", str(config)).trouble == {}
    config.write_text("wrong = 1\n")
    assert cli.main(["check", "--config", str(config)]) == 2


def test_a_setting_that_is_wrong_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENHAND_WORKERS", "many")
    assert cli.main(["check", "--redis-url", "redis://r"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("evenhand check: EVENHAND_WORKERS: must be") and err.count("\n") == 1


def test_the_exit_code_and_the_words(
    capsys: pytest.CaptureFixture[str], server: PrivateRedis, deployed: Space, view: ScriptedView
) -> None:
    server.cli("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    assert cli.main(["check", "--redis-url", deployed.url]) == 0  # a warning is no failure
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 things bad, 1 warning, ")
    server.cli("CONFIG", "SET", "maxmemory", "100mb")
    assert cli.main(["check", "--redis-url", deployed.url]) == 1
    assert "-> CONFIG SET maxmemory-policy noeviction" in capsys.readouterr().out
