"""`evenhand explain`: the document in lines, and models that nobody has."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from app.commands.explain import told
from tests.support.contract import Scripted, ScriptedView, candidate, explain, state

Run = Callable[..., int]


def test_candidates_come_with_chance_and_score_the_likeliest_first() -> None:
    document = explain(
        candidate("http://a:1", score=1.5, chance=0.0, unfinished=3, speed=2.0, given_speed=2.0, mean_latency_s=0.25),
        candidate("http://b:1", score=1.0, chance=0.5, unfinished=1, role="Decode", speed=1.0, given_speed=None),
        candidate("http://c:1", score=None, chance=0.5),
    )
    document["choices"][0]["passed_over"] = [
        {"node": "http://d:1", "why": "it is down: engine http://d:1 refused\x1b[2J"}
    ]
    assert list(told(document)) == [
        "model m, strategy min_expected_latency",
        "Least unfinished / speed; ties by chance.",
        "",
        "Hybrid or Decode: 3 candidates",
        "  CHANCE  SCORE  NODE        ROLE    UNFINISHED  SPEED  LATENCY_S",
        "   50.0%      1  http://b:1  Decode           1    (1)          -",
        "   50.0%      -  http://c:1  Hybrid           0      1          -",
        "      0%    1.5  http://a:1  Hybrid           3      2      0.250",
        "  passed over:",
        "    http://d:1  it is down: refused?[2J",
    ]


def test_of_a_long_url_the_end_is_shown() -> None:
    long = "http://gpu.example/" + "x" * 5000 + "/7"
    document = explain(candidate("http://a:1"), candidate(long))
    document["choices"][0]["passed_over"] = [{"node": long, "why": "it is down"}]
    lines = list(told(document))
    assert max(map(len, lines)) < 120
    shown = "…" + "x" * 45 + "/7"  # 48 in all
    assert f"  {shown}  Hybrid" in lines[6]
    assert lines[-1] == f"    {shown}  it is down"


def test_a_choice_without_candidates_says_what_a_request_gets() -> None:
    lines = list(told(explain(strategy=None, rule="")))
    assert lines[0] == "model m, strategy not known: no worker has said it yet"
    assert lines[1:] == ["", "Hybrid or Decode: 0 candidates", "  nobody: a request would get a 503"]


def test_an_alias_is_told_with_its_model() -> None:
    lines = list(told(explain(alias="gpt\x1b")))
    assert lines[:2] == ["gpt? is an alias of m", "model m, strategy min_expected_latency"]
    older = explain()
    del older["alias"]
    assert next(told(older)) == "model m, strategy min_expected_latency"


def test_counts_of_one_worker_are_called_that() -> None:
    lines = list(told(explain(redis={"up": False, "reason": "Connection refused"})))
    assert lines[2] == "Redis is away (Connection refused): the counts are of the answering worker only"
    older = explain()
    del older["redis"]
    assert not any("Redis" in line for line in told(older))


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_role_that_has_nobody_ends_with_1(run: Run, deployment: Scripted, flags: list[str]) -> None:
    served = explain(candidate("http://a:1"))
    deployment.explained = {"m": served}
    assert run("explain", "--model", "m", "--url", deployment.url, *flags) == 0
    served["choices"].insert(0, {"roles": ["Encode"], "candidates": [], "passed_over": []})
    assert run("explain", "--model", "m", "--url", deployment.url, *flags) == 1
    assert "  nobody: a request with media would get a 503" in told(served)


def test_the_document_itself_is_printed_on_demand(
    run: Run, deployment: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment.explained = {"a/b &c": explain(candidate("http://a:1"), model="a/b &c")}
    assert run("explain", "--model", "a/b &c", "--json", "--url", deployment.url) == 0
    assert json.loads(capsys.readouterr().out) == deployment.explained["a/b &c"]


@pytest.mark.parametrize("way", ["http", "redis"])
def test_an_unknown_model_is_one_line_that_names_the_known_ones(
    run: Run, deployment: Scripted, view: ScriptedView, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    deployment.state = view.said = state(models=["llama", "qwen\x1b[2J"], aliases={"gpt-4o": "llama"})
    flags = ["--url", deployment.url] if way == "http" else ["--redis-url", "redis://r"]
    assert run("explain", "--model", "lama", *flags) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "evenhand explain: no node is registered with the model lama; did you mean llama? "
        "there are llama, qwen?[2J, gpt-4o\n"
    )


def test_of_many_models_the_first_are_named(run: Run, deployment: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    deployment.state = state(models=[f"model-{n}" for n in range(25)])
    assert run("explain", "--model", "x", "--url", deployment.url) == 1
    assert capsys.readouterr().err.endswith("model-18, model-19 and 5 more\n")


def test_the_model_has_to_be_given(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain") == 2
    assert capsys.readouterr().err.endswith("the following arguments are required: --model\n")


@pytest.mark.parametrize("command", ["explain", "top", "check"])
def test_the_help_teaches_by_an_example(run: Run, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert run(command, "--help") == 0
    text = capsys.readouterr().out
    assert f"example:\n  evenhand {command}" in text and "--redis-url" in text
