"""The rules over a state: nodes, roles, models, workers; and those over this host."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from app.checks import engines, host, nodes, workers
from app.checks.finding import Finding
from tests.support.contract import node, state, worker
from tests.support.engine import SimulatedEngine
from tests.support.redis import free_port


def levels(findings: Iterable[Finding]) -> dict[str, str]:
    """check -> level of all that is not well."""
    return {finding.check: finding.level.value for finding in findings if finding.level != "ok"}


def says(findings: Iterable[Finding], check: str) -> list[str]:
    return [finding.says for finding in findings if finding.check == check]


def cluster_of(*roles: str, serving: str | None = "Hybrid", **given: Any) -> dict[str, Any]:
    """Two nodes of each role; a role with `-` is down."""
    made = []
    for n, role in enumerate(roles):
        well = {} if not role.startswith("-") else {"state": "down", "reason": "refused"}
        made += [node(f"http://{n}{copy}:1", role=role.lstrip("-"), **well) for copy in "ab"]
    return state(*made, serving=serving, **given)


# --- nodes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("roles", "serving", "trouble"),
    [
        ("Hybrid", "Hybrid", {}),
        ("Decode", "Hybrid", {}),
        ("Hybrid Encode", "Hybrid", {}),
        ("", "Hybrid", {"nodes.registered": "bad"}),
        ("-Hybrid", "Hybrid", {"nodes.registered": "bad", "nodes.trouble": "warn"}),
        ("Encode", "Hybrid", {"nodes.roles": "bad"}),
        ("Encode -Hybrid", "Hybrid", {"nodes.roles": "bad", "nodes.models": "bad", "nodes.trouble": "warn"}),
        ("Hybrid -Encode", "Hybrid", {"nodes.roles": "bad", "nodes.trouble": "warn"}),
        ("Hybrid Prefill", "Hybrid", {"nodes.roles": "warn"}),
        ("Prefill", "Hybrid", {"nodes.roles": "bad", "nodes.models": "bad"}),
        ("Prefill Decode", "DistServe", {}),
        ("Prefill", "DistServe", {"nodes.roles": "bad", "nodes.models": "bad"}),
        ("Decode", "DistServe", {"nodes.roles": "bad", "nodes.models": "bad"}),
        ("Hybrid", "DistServe", {"nodes.roles": "bad", "nodes.models": "bad"}),
        ("Prefill Decode Hybrid", "DistServe", {"nodes.roles": "warn"}),
        ("Prefill Decode", None, {}),  # nobody has said it yet: as the nodes look
        ("Prefill", None, {"nodes.roles": "bad", "nodes.models": "bad"}),
    ],
)
def test_a_role_without_a_ready_node(roles: str, serving: str | None, trouble: dict[str, str]) -> None:
    assert levels(nodes.judge(cluster_of(*roles.split(), serving=serving))) == trouble


def mends(findings: Iterable[Finding], check: str) -> list[str]:
    return [finding.mend for finding in findings if finding.check == check]


def test_a_node_that_refuses_our_key_is_mended_by_a_key() -> None:
    well = node("http://w:1")
    for reason in ("HTTP 401", "engine http://a:1 answered 403 to /v1/models"):
        pending = node("http://a:1", state="pending", reason=reason)
        (mend,) = mends(nodes.judge(state(well, pending)), "nodes.trouble")
        assert mend.startswith("it refuses our key: evenhand nodes add URL --key KEY, or --engine-key")
    (mend,) = mends(nodes.judge(state(well), {"http://w:1": "it says HTTP 403"}), "nodes.trouble")
    assert mend.startswith("it refuses our key")
    loads = node("http://a:1", state="pending", reason="HTTP 503")
    (mend,) = mends(nodes.judge(state(well, loads)), "nodes.trouble")
    assert mend.startswith("it becomes ready with its first good answer")


@pytest.mark.parametrize(
    ("urls", "twice"),
    [
        ("http://localhost:1 http://127.0.0.1:1", True),
        ("http://[::1]:1/llm http://localhost:1/llm", True),
        ("http://localhost http://127.0.0.1", True),
        ("http://localhost:1 http://127.0.0.1:2", False),
        ("http://localhost:1 https://127.0.0.1:1", False),
        ("http://localhost.example:1 http://127.0.0.1:1", False),
        ("http://a:1 http://127.0.0.1:1", False),
    ],
)
def test_an_engine_of_this_host_under_two_names(urls: str, twice: bool) -> None:
    found = list(nodes.judge(state(*(node(url) for url in urls.split()))))
    assert levels(found) == ({"nodes.twice": "warn"} if twice else {})


def test_models_without_a_ready_node_and_with_one_only() -> None:
    said = state(
        node("http://a", models=["two", "one", "none"], state="ready"),
        node("http://b", models=["two"]),
        node("http://c", models=["none"], state="down"),
        node("http://d", role="Encode", models=["vision"]),
        node("http://e", role="Encode", models=["vision"]),
        node("http://f", models=["new"], state="pending"),
    )
    said["nodes"][0]["models"].remove("none")
    found = list(nodes.judge(said))
    assert [f.level.value for f in found if f.check == "nodes.models"] == ["bad", "warn", "ok"]
    assert says(found, "nodes.models") == [
        "models without a ready node: none (Hybrid or Decode)",
        "models with pending nodes only, used as a last resort: new (Hybrid or Decode)",
        "served by one node only: one",
    ]


@pytest.mark.parametrize(
    ("given", "asked", "text"),
    [
        ({"state": "down", "reason": "refused"}, None, "http://a is down: refused"),
        ({"state": "down", "reason": "engine http://a: refused"}, "refused", "http://a is down: refused"),
        ({"state": "gone"}, "refused the connection", "http://a is gone; asked from here: refused the connection"),
        ({"state": "pending", "reason": "timeout"}, "", "http://a is pending: timeout; it answers this host"),
        ({"state": "asleep"}, None, "http://a is asleep"),
        ({"breaker": "half_open"}, "", "http://a: its breaker is half-open, after failures of requests in a row"),
        ({}, "refused the connection", "http://a is ready, but not for this host: refused the connection"),
        ({"state": "draining"}, "refused the connection", None),
        ({}, "", None),
    ],
)
def test_a_node_in_trouble_is_one_warning_with_its_reason(
    given: dict[str, Any], asked: str | None, text: str | None
) -> None:
    said = state(node("http://a", **given), node("http://b"), node("http://c"))
    answers = {"http://a": asked, "http://b": "", "http://c": ""} if asked is not None else None
    found = list(nodes.judge(said, answers))
    assert says(found, "nodes.trouble") == ([text] if text else [])
    assert levels(found) == ({"nodes.trouble": "warn"} if text else {})


def test_what_is_well_gets_no_advice() -> None:
    one = state(node("http://a"), workers=[worker("vm-11-aa")])
    found = [*nodes.judge(one), *workers.judge(one)]
    assert says(found, "workers.number") == ["1 worker"]
    assert [finding.mend for finding in found if finding.level == "ok"] == [""] * len(found)


def test_of_many_troubled_nodes_the_first_are_told() -> None:
    said = state(node("http://well"), node("http://too"), *(node(f"http://{n}", state="down") for n in range(50)))
    told = says(nodes.judge(said), "nodes.trouble")
    assert len(told) == nodes.TOLD + 1 and told[-1] == "30 more nodes are in trouble"


async def test_each_node_is_asked_with_its_key_and_says_what_is_wrong(
    engine_factory: Callable[..., SimulatedEngine],
) -> None:
    well, sick = engine_factory(), engine_factory()
    sick.set(health_status=503, health_word="unhealthy")
    gone = f"http://127.0.0.1:{free_port()}"
    slow = engine_factory()
    slow.set(health_delay_s=5)
    found = await engines.ask({well.url: None, sick.url: None, gone: "k", slow.url: None}, timeout_s=0.3)
    assert found[well.url] == nodes.ANSWERS
    assert found[gone] == "refused the connection"
    assert found[slow.url] == "did not answer within 0.3 s"
    assert found[sick.url] == "it says unhealthy"


async def test_asking_ends_however_many_nodes_are_silent(
    engine_factory: Callable[..., SimulatedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "ASKING_S", 0.2)
    monkeypatch.setattr(engines, "ASKED_AT_ONCE", 1)
    slow = engine_factory()
    slow.set(health_delay_s=5)
    found = await engines.ask({f"http://localhost:{slow.port}": None, slow.url: None}, timeout_s=5)
    assert set(found.values()) == {"not asked within 0.2 s"}


# --- workers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leases", "trouble"),
    [
        ([7.0, 7.5], {}),
        ([7.0], {}),
        ([], {"workers.number": "bad"}),
        ([-1.0], {"workers.number": "bad"}),
        ([7.0, -1.0], {"workers.leases": "warn"}),
        ([7.0, 0.5], {"workers.leases": "warn"}),
    ],
)
def test_workers_and_their_leases(leases: list[float], trouble: dict[str, str]) -> None:
    said = state(workers=[worker(f"h-{n}-aa", lease_s=left, unfinished=2) for n, left in enumerate(leases)])
    assert levels(workers.judge(said)) == trouble


def test_while_redis_is_away_no_lease_is_judged() -> None:
    said = state(workers=[worker("h-1-aa", lease_s=0.0)], redis={"up": False, "reason": "refused"})
    assert list(workers.judge(said)) == []


def test_a_dead_worker_is_named_with_what_it_counts() -> None:
    said = state(workers=[worker("h-1-aa"), worker("h-2-bb", lease_s=-3.0, unfinished=5)])
    assert says(workers.judge(said), "workers.leases") == ["1 lease over, 5 requests counted there: h-2-bb"]


# --- this host --------------------------------------------------------------------------------------


def a_host(**given: Any) -> host.Host:
    return host.Host(**{"cores": 4, "soft": 1024, "hard": 65536, "somaxconn": 4096, "processes": {}, **given})


def processes(*pairs: tuple[int, int]) -> dict[str, host.Process]:
    return {f"h-{n}-aa": host.Process(n, files, there) for n, (files, there) in enumerate(pairs)}


@pytest.mark.parametrize(
    ("given", "trouble"),
    [
        ({}, {}),
        ({"hard": 1024}, {"host.files": "warn"}),
        ({"hard": resource.RLIM_INFINITY}, {}),
        ({"somaxconn": 128}, {"host.backlog": "warn"}),
        ({"somaxconn": None}, {}),
        ({"processes": processes((65536, 40), (65536, 40))}, {}),
        ({"processes": processes((65536, 40), (1024, 40))}, {"host.worker_files": "warn"}),
        ({"processes": processes((65536, 60000))}, {"host.worker_files": "warn"}),
        ({"processes": processes((resource.RLIM_INFINITY, -1))}, {}),
        ({"processes": processes(*[(65536, 40)] * 9)}, {"host.workers": "warn"}),
    ],
)
def test_limits_of_this_host(given: dict[str, Any], trouble: dict[str, str]) -> None:
    assert levels(host.judge(a_host(**given))) == trouble


def test_the_limit_of_a_process_is_really_read() -> None:
    """In a process whose hard limit is low, as a shell with `ulimit -n 512` has it."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))\n"
        "from app.checks import host\n"
        "print([f.says for f in host.judge(host.look([])) if f.level == 'warn'])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True)
    assert "a process started here may open 512 files; a running request takes two" in done.stdout


@pytest.mark.skipif(not host.PROC.is_dir(), reason="needs /proc")
def test_a_running_worker_of_this_host_is_looked_at() -> None:
    pause = "import time; print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", pause, "gunicorn"], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (777, 888))
            name = f"{socket.gethostname()}-{process.pid}-aa"
            found = host.look([name, f"elsewhere-{process.pid}-aa", f"{socket.gethostname()}-{os.getpid()}-aa"])
        finally:
            process.kill()
    assert list(found.processes) == [name]
    assert found.processes[name].files == 777 and found.processes[name].open_files >= 3


@pytest.mark.parametrize("name", ["{host}", "{host}-..-aa", "{host}-0-", "--", ""])
def test_names_that_are_no_workers(name: str) -> None:
    assert host.look([name.format(host=socket.gethostname())]).processes == {}
