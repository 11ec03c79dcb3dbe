"""What a `--discover` may say, and what is wrong with it otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from app.discovery.sources import DnsSource, FileSource, parse_source
from app.errors import ConfigurationError
from app.nodes import Role
from app.settings import Settings


def dns(name: str, host: str, port: int | None, **more: Any) -> DnsSource:
    return DnsSource(name, host, port, **more)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("dns://engine:8000", dns("dns://engine:8000", "engine", 8000)),
        ("dns://Engine.NS.svc.:8000", dns("dns://engine.ns.svc:8000", "engine.ns.svc", 8000)),
        (
            "dns://engine:8000?role=prefill&interval_s=30&path=/llm/",
            dns("dns://engine:8000", "engine", 8000, role=Role.Prefill, interval_s=30.0, path="/llm"),
        ),
        # an address is asked for by the name that was looked up: certificates have names
        (
            "dns://engine:8000?scheme=https",
            dns("dns://engine:8000", "engine", 8000, scheme="https", host_header="engine:8000"),
        ),
        (
            "dns://engine:443?scheme=https",
            dns("dns://engine:443", "engine", 443, scheme="https", host_header="engine"),
        ),
        (
            "dns://engine:443?scheme=https&host_header=llm.example",
            dns("dns://engine:443", "engine", 443, scheme="https", host_header="llm.example"),
        ),
        ("dns+srv://_http._tcp.engine", dns("dns+srv://_http._tcp.engine", "_http._tcp.engine", None)),
        ("dns://_http._tcp.engine", dns("dns+srv://_http._tcp.engine", "_http._tcp.engine", None)),
        ("dns+srv://engine?scheme=https", dns("dns+srv://engine", "engine", None, scheme="https")),
        ("dns://e:1?resolver=127.0.0.1:8600", dns("dns://e:1", "e", 1, resolver=("127.0.0.1", 8600))),
        ("dns://e:1?resolver=[::1]", dns("dns://e:1", "e", 1, resolver=("::1", 53))),
        ("file:///etc/evenhand/nodes.yaml", FileSource("file:///etc/evenhand/nodes.yaml", "/etc/evenhand/nodes.yaml")),
        ("file:///a%20b.yaml", FileSource("file:///a b.yaml", "/a b.yaml")),
        ("file://GPU1/etc/n.yaml", FileSource("file://gpu1/etc/n.yaml", "/etc/n.yaml", "gpu1")),
    ],
)
def test_what_a_source_is(text: str, source: object) -> None:
    assert parse_source(text) == source


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("engine:8000", "must be dns://HOST:PORT"),
        ("http://engine:8000", "must be dns://HOST:PORT"),
        ("dns://", "must be dns://HOST:PORT"),
        ("dns://:8000", "must be dns://HOST:PORT"),
        ("dns://engine", "needs a port"),
        ("dns://engine:0", "needs a port"),
        ("dns://engine:99999", "is not a URL"),
        ("dns://10.0.0.5:8000", "--nodes takes addresses"),
        ("dns://[::1]:8000", "--nodes takes addresses"),
        ("dns://a..b:1", "is not right: it has the host"),
        ("dns://u:p@engine:1", "without a user"),
        ("dns://engine:1#x", "without a user or fragment"),
        ("dns://engine:1/llm", "that of its nodes goes in ?path="),
        ("dns://_http._tcp.engine:80", "needs"),
        ("dns+srv://engine:80", "must have no port"),
        ("dns://e:1?rol=Prefill", "unknown option rol;"),
        ("dns://e:1?role=x", "?role= must be one of"),
        ("dns://e:1?role=Decode&role=Decode", "has an option twice"),
        ("dns://e:1?scheme=ftp", "?scheme=http or ?scheme=https"),
        ("dns://e:1?interval_s=0.5", "?interval_s= from 1 to 3600"),
        ("dns://e:1?interval_s=nan", "?interval_s= from 1 to 3600"),
        ("dns://e:1?interval_s=x", "?interval_s= from 1 to 3600"),
        ("dns://e:1?path=llm", "?path= that begins with /"),
        ("dns://e:1?path=/a/../b", "is not right"),
        ("dns://e:1?host_header=a/b", "?host_header= must be HOST or HOST:PORT"),
        ("dns://e:1?resolver=ns.example", "?resolver= of ADDRESS"),
        ("dns://e:1?resolver=10.0.0.1:0", "?resolver= of ADDRESS"),
        ("file://nodes.yaml", "the absolute path of a file"),
        ("file:///", "the absolute path of a file"),
        ("file:///etc/", "the absolute path of a file"),
        ("file:///a?role=Prefill", "they stand in the file"),
        ("dns://engîne:1", "characters that a URL can't have"),
    ],
)
def test_what_is_no_source_is_one_line(text: str, words: str) -> None:
    if text == "dns://_http._tcp.engine:80":
        assert parse_source(text).name == text, "a name may begin so, and have addresses"
        return
    with pytest.raises(ConfigurationError) as caught:
        Settings.load({"discover": [text]})
    assert caught.value.message.startswith("--discover: ") and words in caught.value.message
    assert "\n" not in caught.value.message


def test_several_sources_come_from_the_flag_and_from_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    both = ("dns://a:1?role=Decode", "file:///b")
    assert [source.name for source in Settings.load({"discover": list(both)}).sources] == ["dns://a:1", "file:///b"]
    monkeypatch.setenv("EVENHAND_DISCOVER", " ".join(both))
    settings = Settings.load()
    assert settings.discover == both
    monkeypatch.setenv("EVENHAND_DISCOVER", settings.environment()["EVENHAND_DISCOVER"])
    assert Settings.load() == settings


def test_two_sources_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="dns://a:1 is named twice"):
        Settings.load({"discover": ["dns://a:1", "dns://A.:1?role=Prefill"]})
