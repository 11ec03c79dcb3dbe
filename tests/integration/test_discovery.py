"""Nodes that nobody registers: two hosts with a worker each, a file, and a name server.

Both hosts have the same settings, so one worker of the two follows each source.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.serving import Factory, chat, chat_body, streams
from tests.integration.stage import Fleet
from tests.support.deployment import Deployment
from tests.support.engine import SimulatedEngine
from tests.support.name_server import NameServer
from tests.support.quiet import quiet_check
from tests.support.redis import PrivateRedis, Space
from tests.support.wait import eventually

KEY = "sk-of-the-file"
EVERY_S = 0.1  # what is waited for takes seconds, and each look is two requests


class Hosts:
    def __init__(self, space: Space, masters: list[Deployment], path: Path, server: NameServer, port: int) -> None:
        self.space, self.masters, self.path, self.server, self.port = space, masters, path, server, port

    @property
    def file_source(self) -> str:
        return f"file://{self.path}"

    def write(self, text: str) -> None:
        """As one should: beside it, and then over it."""
        new = self.path.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self.path)

    def list(self, *engines: SimulatedEngine, more: str = "") -> None:
        self.write("nodes:" + ("".join(f"\n  - url: {one.url}{more}" for one in engines) or " []"))

    def nodes(self) -> dict[str, dict[str, Any]]:
        """As both hosts tell of them."""
        first, second = (master.nodes("?all=1") for master in self.masters)
        assert first.keys() == second.keys()
        return first

    def state(self, engine: SimulatedEngine) -> str | None:
        found = self.nodes().get(engine.url)
        return None if found is None else found["state"]

    def empty(self) -> None:
        """No source lists anything, and has been seen to; then what they left is removed by hand."""
        self.server.forget("engine.test")
        self.list()
        asked = len(self.server.asked)
        eventually(lambda: len(self.server.asked) >= asked + 4, within_s=10, every_s=EVERY_S)
        eventually(
            lambda: self.file_source not in {said["source"] for said in self.nodes().values()},
            within_s=10,
            every_s=EVERY_S,
        )
        for url in self.nodes():
            self.masters[0].post("/nodes/remove", {"url": url})
        assert self.nodes() == {}

    def told(self, words: str) -> int:
        return sum(len(re.findall(words, master.log())) for master in self.masters)


@pytest.fixture(scope="module")
def free_port_for_dns(engine_loop: Any) -> int:
    """One port on several addresses of loopback, as engines behind one name have it."""
    with SimulatedEngine(loop=engine_loop, host="127.0.0.1") as probe:
        return probe.port


@pytest.fixture(scope="module")
def all_hosts(
    redis_server: PrivateRedis, free_port_for_dns: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Hosts]:
    path = tmp_path_factory.mktemp("discovery") / "nodes.yaml"
    path.write_text("nodes: []")
    with NameServer() as server:
        sources = [f"dns://engine.test:{free_port_for_dns}?interval_s=1&resolver={server.address}", f"file://{path}"]
        settings = {"discover": sources, "probe_interval_s": 1, "heartbeat_expiration_s": 2, "log_level": "INFO"}
        fleet = Fleet(redis_server, masters=2, workers=1, settings=settings)
        space, masters = fleet.get()
        yield Hosts(space, masters, path, server, free_port_for_dns)
        fleet.close()


@pytest.fixture
def hosts(all_hosts: Hosts, engine_factory: Factory) -> Iterator[Hosts]:
    yield all_hosts
    quiet_check(all_hosts.space, engines=engine_factory.made)  # type: ignore[attr-defined]
    all_hosts.empty()


def test_a_file_brings_nodes_once_with_all_that_it_says_and_takes_them(hosts: Hosts, engine_factory: Factory) -> None:
    one, two = engine_factory(models=("filed",)), engine_factory(models=("filed",))
    hosts.list(one, two, more=f"\n    speed: 2\n    key: {KEY}\n    host_header: engine.example")
    eventually(lambda: (hosts.state(one), hosts.state(two)) == ("ready", "ready"), within_s=10, every_s=EVERY_S)
    for engine in (one, two):
        said = hosts.nodes()[engine.url]
        assert (said["source"], said["speed"], said["static"]) == (hosts.file_source, 2, False)
        assert (said["models"], said["host_header"]) == (["filed"], "engine.example")
        assert hosts.told(f"{engine.url} is added") == 1, "by one worker of the two"
        assert {record.header(b"authorization") for record in engine.probes} == {f"Bearer {KEY}".encode()}
        assert {record.header(b"host") for record in engine.probes} == {b"engine.example"}
    # Counts are exact over both hosts while all of it goes on.
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda master: streams(master, 10, "filed").result(20), hosts.masters))
    assert all(answer.done for found in answers for answer in found)
    assert len(one.requests) + len(two.requests) == 20 and min(len(one.requests), len(two.requests)) >= 5

    one.set(chunks=30, gap_s=0.1)
    running = streams(hosts.masters[0], 4, "filed")
    eventually(lambda: one.in_flight > 0)
    hosts.list(two)
    eventually(lambda: hosts.state(one) == "draining", within_s=5, every_s=EVERY_S)
    assert hosts.nodes()[one.url]["reason"] == f"no longer listed by {hosts.file_source}"
    assert all(answer.done for answer in running.result(20)), "what ran there ended"
    eventually(lambda: hosts.state(one) is None, within_s=5, every_s=EVERY_S)
    assert hosts.state(two) == "ready"
    assert not any(KEY in text for master in hosts.masters for text in (master.log(), master.get("/nodes/status").text))


def test_a_bad_file_changes_nothing_and_is_told_once(hosts: Hosts, engine_factory: Factory) -> None:
    one = engine_factory(models=("kept",))
    hosts.list(one)
    eventually(lambda: hosts.state(one) == "ready", within_s=10, every_s=EVERY_S)
    hosts.write(f"nodes:\n  - url: {one.url}\n    spede: 2\n  - url: http://127.0.0.1:9\n")
    words = r"line 3: nodes\[0\] has the unknown field spede; did you mean speed\?; its nodes stay as they are"
    eventually(lambda: hosts.told(words) == 1, within_s=5, every_s=EVERY_S)
    hosts.path.unlink()
    eventually(
        lambda: hosts.told("can't be read: No such file or directory; its nodes stay") == 1, within_s=5, every_s=EVERY_S
    )
    assert list(hosts.nodes()) == [one.url]
    assert chat(hosts.masters[1], chat_body("kept")).status == 200
    hosts.list()
    eventually(lambda: hosts.nodes() == {}, within_s=5, every_s=EVERY_S)
    assert hosts.told(words) == 1


def test_what_is_registered_by_a_call_stays_the_callers(hosts: Hosts, engine_factory: Factory) -> None:
    called, taken = engine_factory(models=("whose",)), engine_factory(models=("whose",))
    hosts.masters[0].add(called)
    hosts.list(called, taken, more="\n    speed: 5")
    eventually(lambda: hosts.state(taken) == "ready", within_s=10, every_s=EVERY_S)
    hosts.masters[1].add(taken)  # as an LMDeploy engine does when it starts
    said = hosts.nodes()
    assert [said[one.url]["source"] for one in (called, taken)] == [None, None]
    assert [said[one.url]["speed"] for one in (called, taken)] == [None, 5]
    marker = engine_factory(models=("marker",))
    hosts.list(marker)
    eventually(lambda: hosts.state(marker) == "ready", within_s=10, every_s=EVERY_S)
    assert (hosts.state(called), hosts.state(taken)) == ("ready", "ready")
    # Removed by hand and listed still: it is back with the next look.
    hosts.masters[0].post("/nodes/remove", {"url": marker.url})
    eventually(lambda: hosts.state(marker) == "ready", within_s=10, every_s=EVERY_S)
    assert hosts.told(f"{marker.url} is added") == 2


def test_addresses_of_a_name_are_nodes_and_stay_known_over_an_outage(hosts: Hosts, engine_factory: Factory) -> None:
    first, second = (
        engine_factory(host=host, port=hosts.port, models=("named",)) for host in ("127.0.0.2", "127.0.0.3")
    )
    hosts.server.say("engine.test", "A", ["127.0.0.2", "127.0.0.3"])
    eventually(lambda: (hosts.state(first), hosts.state(second)) == ("ready", "ready"), within_s=10, every_s=EVERY_S)
    source = f"dns://engine.test:{hosts.port}"
    assert {said["source"] for said in hosts.nodes().values()} == {source}
    assert [hosts.told(f"{one.url} is added") for one in (first, second)] == [1, 1]

    # An outage longer than the heart-beat expiration, with a name server that fails, and then says there is no such
    # name: what was known stays, and serves again without having registered.
    first.crash()
    eventually(lambda: hosts.state(first) == "down", within_s=5, every_s=EVERY_S)
    hosts.server.say("engine.test", "A", "SERVFAIL")
    hosts.server.say("engine.test", "AAAA", "SERVFAIL")
    eventually(
        lambda: hosts.told(f"{source}: A: no name server gave a usable answer") == 1, within_s=10, every_s=EVERY_S
    )
    hosts.server.forget("engine.test")
    eventually(lambda: hosts.told(f"{source}: is read again") == 1, within_s=10, every_s=EVERY_S)
    since_ms = hosts.nodes()[first.url]["state_since_ms"]
    eventually(lambda: _now_ms(hosts) - since_ms > 4_000, within_s=10, every_s=EVERY_S)
    assert (hosts.state(first), hosts.state(second)) == ("down", "ready"), "neither gone nor drained"
    first.set(models=("named", "newer"))
    first.start()
    eventually(lambda: hosts.state(first) == "ready", within_s=5, every_s=EVERY_S)
    assert hosts.nodes()[first.url]["models"] == ["named", "newer"]
    assert chat(hosts.masters[0], chat_body("newer")).status == 200


def test_the_worker_that_reads_dies_and_another_goes_on(hosts: Hosts, engine_factory: Factory) -> None:
    one, two = engine_factory(models=("lead",)), engine_factory(models=("lead",))
    hosts.list(one)
    eventually(lambda: hosts.state(one) == "ready", within_s=10, every_s=EVERY_S)
    lease = hosts.space.key(f"discovering:{hosts.file_source}")
    leader = str(hosts.space.cli("GET", lease))
    pid = int(leader.split("-")[-2])
    (master,) = [master for master in hosts.masters if pid in master.worker_pids()]
    master.kill_worker(pid)
    hosts.list(one, two)
    eventually(lambda: hosts.state(two) == "ready", within_s=20, every_s=EVERY_S)
    assert hosts.space.cli("GET", lease) != leader
    assert (hosts.told(f"{one.url} is added"), hosts.told(f"{two.url} is added")) == (1, 1)


def _now_ms(hosts: Hosts) -> float:
    seconds, micros = hosts.space.cli("TIME")
    return int(seconds) * 1000 + int(micros) / 1000
