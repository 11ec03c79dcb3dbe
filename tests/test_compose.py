"""The compose file and the image keep their promises, as far as that can be read without Docker."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.settings import Settings, variables_of
from workers import alive

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docker-compose.yml").read_text()
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(TEXT)["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
ENGINES = [name for name in SERVICES if name.startswith("engine-")]
EXAMPLE = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))


def test_it_is_a_redis_a_distributor_and_three_engines() -> None:
    assert sorted(SERVICES) == ["distributor", "engine-1", "engine-2", "engine-3", "redis"]


def test_the_example_holds_what_compose_reads_with_the_same_defaults() -> None:
    assert dict(re.findall(r"\$\{(\w+):-([^}]*)\}", TEXT)) == EXAMPLE
    assert TEXT.count("${") == len(re.findall(r"\$\{\w+:-", TEXT))


def test_settings_of_the_distributor_are_settings() -> None:
    known = {variable for name in Settings.model_fields for variable in variables_of(name)}
    assert set(SERVICES["distributor"]["environment"]) <= known


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_can_write_nowhere_but_where_it_must(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    assert service.get("user", "redis" if name == "redis" else "the image's") != "root"


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_a_health_check_and_comes_back(name: str) -> None:
    service = SERVICES[name]
    assert "healthcheck" in service or (service["image"] == "evenhand" and "HEALTHCHECK" in DOCKERFILE)
    assert "curl" not in str(service.get("healthcheck"))
    assert service["restart"] == "unless-stopped"


def test_the_distributor_can_be_scaled() -> None:
    service = SERVICES["distributor"]
    assert "container_name" not in service
    assert service["networks"] == {"evenhand": {}}  # no address of its own
    first, last = map(int, EXAMPLE["EVENHAND_PORT"].split("-"))
    assert last - first >= 2


def test_engines_and_redis_outlive_a_draining_distributor() -> None:
    """Compose stops in the reverse order of `depends_on`."""
    assert set(SERVICES["distributor"]["depends_on"]) == {"redis", *ENGINES}
    assert not any("depends_on" in SERVICES[name] for name in ENGINES)
    minutes = re.match(r"(\d+)m$", SERVICES["distributor"]["stop_grace_period"])
    assert minutes is not None
    assert int(minutes[1]) * 60 > 2 * (float(EXAMPLE["EVENHAND_GRACE_S"]) + 10)


def test_redis_keeps_the_registry() -> None:
    command = SERVICES["redis"]["command"]
    assert command[command.index("--appendonly") + 1] == "yes"
    assert SERVICES["redis"]["volumes"] == ["redis-data:/data"]


def test_the_image_is_small_and_without_root() -> None:
    final = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE) == ["python:3.12-slim"] * 2
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", final, re.MULTILINE)
    assert not re.search(r"gcc|build-essential|curl|pip", final)
    assert not re.search(r"^#\s*syntax", DOCKERFILE, re.MULTILINE)
    assert not re.search(r"^VOLUME", final, re.MULTILINE)
    assert 'ENTRYPOINT ["tini", "--", "evenhand"]' in final


@pytest.fixture(params=[200, 503])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(request.param if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running.server_port, request.param
        running.shutdown()
        thread.join()


def test_the_health_check(
    server: tuple[int, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port, status = server
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # nothing is there, and it isn't asked
    code = 0 if status == 200 else 1
    assert alive.main([str(port)], {}) == code
    assert alive.main([], {"EVENHAND_SERVER_PORT": str(port), "EVENHAND_SERVER_NAME": "0.0.0.0"}) == code
    assert alive.main([str(port)], {"EVENHAND_SSL": "on"}) == 1
    assert "does not answer" in capsys.readouterr().err
