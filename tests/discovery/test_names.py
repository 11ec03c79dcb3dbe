"""Names in the DNS, asked of a server of the tests' own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import uvloop

from app.discovery.listing import Listed, ReadFailed
from app.discovery.names import DnsReader
from app.discovery.sources import DnsSource, parse_source
from app.nodes import Role
from tests.support.name_server import NameServer


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Function
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def server() -> Iterator[NameServer]:
    with NameServer() as server:
        yield server


def reader_of(server: NameServer, url: str, **options: Any) -> DnsReader:
    source = parse_source(f"{url}{'&' if '?' in url else '?'}resolver={server.address}")
    assert isinstance(source, DnsSource)
    return DnsReader(source, **{"lookup_s": 1.0} | options)


async def urls(reader: DnsReader) -> list[str]:
    found = await reader.look()
    assert found.whole and not found.trouble
    return sorted(found.nodes)


async def test_each_address_is_a_node(server: NameServer) -> None:
    server.say("engine.test", "A", ["10.0.0.2", "10.0.0.1", "10.0.0.2"])
    server.say("engine.test", "AAAA", ["2001:db8::1", "::ffff:10.0.0.1"])
    reader = reader_of(server, "dns://Engine.test:8000")
    assert await urls(reader) == ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[2001:db8::1]:8000"]
    assert sorted(server.asked) == [("engine.test", "A", "udp"), ("engine.test", "AAAA", "udp")]


async def test_the_options_are_those_of_each_node(server: NameServer) -> None:
    server.say("engine.test", "A", ["10.0.0.1"])
    reader = reader_of(server, "dns://engine.test:443?scheme=https&role=Prefill&path=/llm&interval_s=7")
    found = await reader.look()
    url = "https://10.0.0.1/llm"
    assert found.nodes == {url: Listed(url, role=Role.Prefill, host_header="engine.test")}
    assert (reader.every_s, reader.patience_s, reader.name) == (7.0, 30.0, "dns://engine.test:443")


async def test_srv_records_say_host_and_port(server: NameServer) -> None:
    service = "_http._tcp.engine.test"
    server.say(service, "SRV", [(8001, "A.engine.test"), (8002, "a.engine.test"), (443, "b.engine.test")])
    assert await urls(reader_of(server, f"dns+srv://{service}")) == [
        "http://a.engine.test:8001",
        "http://a.engine.test:8002",
        "http://b.engine.test:443",
    ]
    assert await urls(reader_of(server, f"dns://{service}?scheme=https")) == [
        "https://a.engine.test:8001",
        "https://a.engine.test:8002",
        "https://b.engine.test",
    ]
    server.say(service, "SRV", [(80, ".")])
    assert await urls(reader_of(server, f"dns+srv://{service}")) == [], "RFC 2782: decidedly not available"


async def test_no_such_name_and_no_such_records_are_answers(server: NameServer) -> None:
    assert await urls(reader_of(server, "dns://engine.test:1")) == []
    server.say("engine.test", "A", [])
    assert await urls(reader_of(server, "dns://engine.test:1")) == []
    assert await urls(reader_of(server, "dns+srv://engine.test")) == []


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("SERVFAIL", "no name server gave a usable answer"),
        ("REFUSED", "no name server gave a usable answer"),
        ("silent", "no name server answered within 1 s"),
    ],
)
async def test_a_look_up_that_fails_is_no_answer(server: NameServer, kind: str, words: str) -> None:
    for record, url in (("A", "dns://engine.test:1"), ("SRV", "dns+srv://engine.test")):
        server.say("engine.test", record, kind)
        server.say("engine.test", "AAAA", kind)
        with pytest.raises(ReadFailed, match=f"{record}: {words}"):
            await reader_of(server, url).look()
    # One half of the question is answered: what it names is there, what it does not name may be too.
    server.say("engine.test", "A", ["10.0.0.1"])
    found = await reader_of(server, "dns://engine.test:1").look()
    assert (list(found.nodes), found.whole, found.trouble) == (["http://10.0.0.1:1"], False, f"AAAA: {words}")


async def test_nobody_listens(server: NameServer) -> None:
    with NameServer() as other:
        gone = other.address
    source = parse_source(f"dns://engine.test:1?resolver={gone}")
    assert isinstance(source, DnsSource)
    with pytest.raises(ReadFailed):
        await DnsReader(source, lookup_s=0.5).look()


async def test_an_answer_that_is_cut_off_is_asked_for_again_over_tcp(server: NameServer) -> None:
    addresses = [f"10.0.{i // 250}.{i % 250 + 1}" for i in range(1000)]
    server.say("engine.test", "A", addresses)
    server.only_over_tcp = True
    found = await urls(reader_of(server, "dns://engine.test:1"))
    assert found == sorted(f"http://{address}:1" for address in addresses)
    assert ("engine.test", "A", "tcp") in server.asked


async def test_a_record_that_is_no_host_is_passed_over_and_nothing_is_taken_out(server: NameServer) -> None:
    server.say("s.test", "SRV", [(80, "a b.test"), (80, "fine.test")])
    found = await reader_of(server, "dns+srv://s.test").look()
    assert (list(found.nodes), found.whole) == (["http://fine.test"], False)
    assert found.trouble == "a record of it is no host of a node"
