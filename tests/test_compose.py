"""The compose file and the image keep their promises, as far as that can be read without Docker."""

from __future__ import annotations

import http.server
import ipaddress
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from app.settings import Settings, variables_of
from workers import alive

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docker-compose.yml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
EXAMPLE = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE))

OURS = [name for name, service in SERVICES.items() if service["image"] == "evenhand"]
ENGINES = [name for name in OURS if SERVICES[name].get("command", [""])[0] == "engine"]
DISTRIBUTORS = [name for name in OURS if "command" not in SERVICES[name]]
PROFILES = {
    "epd": ["encoder-1", "encoder-2"],
    "distserve": ["decode-1", "decode-2", "distserve", "prefill-1"],
    "tls": ["certificate", "distributor-tls"],
    "observability": ["grafana", "prometheus"],
}
PROMETHEUS = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
GRAFANA = ROOT / "deploy/grafana"


def of_profile(profile: str | None) -> list[str]:
    wanted = [] if profile is None else [profile]
    return sorted(name for name, service in SERVICES.items() if service.get("profiles", []) == wanted)


def option(engine: str, flag: str) -> str:
    command = SERVICES[engine]["command"]
    return str(command[command.index(flag) + 1])


def test_it_is_a_redis_a_distributor_and_three_engines() -> None:
    assert of_profile(None) == ["distributor", "engine-1", "engine-2", "engine-3", "redis"]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_adds_services_and_is_told(profile: str) -> None:
    assert of_profile(profile) == PROFILES[profile]
    assert re.search(rf"^#   {profile} ", TEXT, re.MULTILINE)


def test_every_service_is_in_no_profile_or_in_one() -> None:
    assert len(SERVICES) == 5 + sum(map(len, PROFILES.values()))


def test_the_example_holds_what_compose_reads_with_the_same_defaults() -> None:
    read = re.findall(r"(?<!\$)\$\{(\w+):-([^}]*)\}", TEXT)
    assert len(read) == len(re.findall(r"(?<!\$)\$[\w{]", TEXT))
    assert {*read, ("COMPOSE_PROFILES", "")} == set(EXAMPLE.items())


@pytest.mark.parametrize("name", DISTRIBUTORS)
def test_settings_of_a_distributor_are_settings(name: str) -> None:
    known = {variable for name in Settings.model_fields for variable in variables_of(name)}
    assert set(SERVICES[name]["environment"]) <= known
    assert set(SERVICES["distributor"]["environment"].items()) <= set(SERVICES[name]["environment"].items())


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_can_write_nowhere_but_where_it_must(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"privileged", "cap_add", "devices", "pid", "ipc"} & set(service)
    assert service.get("user", "redis" if name == "redis" else "the image's") != "root"
    for volume in service.get("volumes", ()):
        assert volume.endswith(":ro") or volume.rsplit(":", 1)[0] in (
            "redis-data",
            "prometheus-data",
            "${TLS_FILES:-tls}",
        )


@pytest.mark.parametrize("name", [name for name in SERVICES if name != "certificate"])
def test_a_service_has_a_health_check_and_comes_back(name: str) -> None:
    service = SERVICES[name]
    assert "healthcheck" in service or (service["image"] == "evenhand" and "HEALTHCHECK" in DOCKERFILE)
    assert "curl" not in str(service.get("healthcheck"))
    assert service["restart"] == "unless-stopped"


def test_the_image_is_built_once_and_never_pulled() -> None:
    assert [name for name in SERVICES if "build" in SERVICES[name]] == ["distributor"]
    assert {SERVICES[name]["pull_policy"] for name in OURS} == {"never"}
    assert not any(re.search(r":latest$|^[^:]*$", SERVICES[name]["image"]) for name in SERVICES if name not in OURS)


@pytest.mark.parametrize(
    ("name", "variable"),
    [("distributor", "EVENHAND_PORT"), ("distributor-tls", "TLS_PORT"), ("distserve", "DISTSERVE_PORT")],
)
def test_a_distributor_can_be_scaled(name: str, variable: str) -> None:
    service = SERVICES[name]
    assert "container_name" not in service
    assert service["networks"] == {"evenhand": {}}  # no address of its own
    assert service["ports"] == [f"${{{variable}:-{EXAMPLE[variable]}}}:8000"]


def test_three_distributors_have_a_port_each_and_those_of_profiles_one_that_stays() -> None:
    first, last = map(int, EXAMPLE["EVENHAND_PORT"].split("-"))
    assert last - first >= 2
    assert EXAMPLE["TLS_PORT"].isdecimal() and EXAMPLE["DISTSERVE_PORT"].isdecimal()


def test_published_ports_do_not_meet() -> None:
    ranges = [EXAMPLE[name].rpartition(":")[2].split("-") for name in EXAMPLE if name.endswith("PORT")]
    ports = [port for ends in ranges for port in range(int(ends[0]), int(ends[-1]) + 1)]
    assert len(ranges) == 5 and len(ports) == len(set(ports))


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_registers_under_its_name_at_a_distributor_that_trusts_it(engine: str) -> None:
    assert option(engine, "--url") == f"http://{engine}:{option(engine, '--port')}"
    assert SERVICES[engine]["healthcheck"]["test"][-1] == option(engine, "--port")
    url = urlsplit(option(engine, "--proxy-url"))
    assert url.hostname in DISTRIBUTORS and url.port == 8000
    assert SERVICES[str(url.hostname)].get("profiles", []) in ([], SERVICES[engine].get("profiles"))
    assert trusted(SERVICES[engine]["networks"]["evenhand"]["ipv4_address"])


def trusted(address: str) -> bool:
    networks = SERVICES["distributor"]["environment"]["EVENHAND_TRUSTED_NODES"].split()
    return any(ipaddress.ip_address(address) in ipaddress.ip_network(network) for network in networks)


def test_only_addresses_that_are_given_by_name_are_trusted() -> None:
    (config,) = COMPOSE["networks"]["evenhand"]["ipam"]["config"]
    assert not trusted(config["gateway"])
    assert not any(trusted(str(address)) for address in ipaddress.ip_network(config["ip_range"]))
    fixed = [
        service["networks"]["evenhand"].get("ipv4_address") for service in SERVICES.values() if "networks" in service
    ]
    addresses = [address for address in fixed if address is not None]
    assert len(addresses) == len(set(addresses)) == len(ENGINES) + 1
    assert all(ipaddress.ip_address(address) in ipaddress.ip_network(config["subnet"]) for address in addresses)


@pytest.mark.parametrize("name", DISTRIBUTORS)
def test_engines_and_redis_outlive_a_draining_distributor(name: str) -> None:
    """Compose stops in the reverse order of `depends_on`. What only a profile has must not be needed without it."""
    deployment = "distserve" if name == "distserve" else "distributor"
    engines = {engine for engine in ENGINES if urlsplit(option(engine, "--proxy-url")).hostname == deployment}
    needs = SERVICES[name]["depends_on"]
    assert set(needs) - {"certificate"} == {"redis", *engines}
    mine = SERVICES[name].get("profiles", [])
    for needed, how in needs.items():
        assert how.get("required", True) is (SERVICES[needed].get("profiles", []) in ([], mine))
    assert not any("depends_on" in SERVICES[engine] for engine in ENGINES)
    minutes = re.match(r"(\d+)m$", SERVICES[name]["stop_grace_period"])
    assert minutes is not None
    assert int(minutes[1]) * 60 > 2 * (float(EXAMPLE["EVENHAND_GRACE_S"]) + 10)


def test_the_demo_of_prefill_and_decode_is_a_deployment_of_its_own() -> None:
    mine, other = (SERVICES[name]["environment"] for name in ("distserve", "distributor"))
    assert mine["EVENHAND_SERVING_STRATEGY"] == "DistServe"
    assert mine["EVENHAND_NAMESPACE"] != other.get("EVENHAND_NAMESPACE", "default")
    assert mine["EVENHAND_REDIS_URL"] == other["EVENHAND_REDIS_URL"]
    roles = {engine: option(engine, "--role") for engine in ENGINES if "--role" in SERVICES[engine]["command"]}
    assert sorted(roles.values()) == ["Decode", "Decode", "Encode", "Encode", "Prefill"]


def script() -> str:
    """The shell script of the service that makes certificates, as compose hands it on."""
    assert SERVICES["certificate"]["entrypoint"] == ["sh", "-euc"]
    (text,) = SERVICES["certificate"]["command"]
    return str(text).replace("$$", "$")


@pytest.fixture
def openssl() -> None:
    if shutil.which("openssl") is None:
        assert "EVENHAND_CI_RUN" not in os.environ, "openssl is missing (Debian's package openssl)"
        pytest.skip("openssl is not installed (Debian's package openssl)")


def make_certificate(where: Path, names: str = EXAMPLE["TLS_NAMES"]) -> None:
    keys = where.parent / "keys"
    keys.mkdir(exist_ok=True)
    text = script().replace("/tmp/", f"{keys}/").replace("/var/lib/evenhand/tls", str(where))
    environment = {"PATH": os.environ["PATH"], "TLS_NAMES": names}
    subprocess.run(["sh", "-euc", text], check=True, capture_output=True, env=environment, timeout=30)


@pytest.mark.usefixtures("openssl")
def test_the_certificate_is_for_the_names_and_its_key_for_nobody_else(tmp_path: Path) -> None:
    (files := tmp_path / "tls").mkdir()
    make_certificate(files, "DNS:llm.example,IP:10.0.0.7")
    assert sorted(path.name for path in files.iterdir()) == ["ca.pem", "cert.pem", "key.pem"]
    assert files.joinpath("key.pem").stat().st_mode & 0o077 == 0
    for host, good in [("llm.example", True), ("distributor-tls", True), ("localhost", False)]:
        verify = ["openssl", "verify", "-x509_strict", "-CAfile", "ca.pem", "-verify_hostname", host, "cert.pem"]
        assert (subprocess.run(verify, cwd=files, capture_output=True).returncode == 0) is good
    verify = ["openssl", "verify", "-x509_strict", "-CAfile", "ca.pem", "-verify_ip", "10.0.0.7", "cert.pem"]
    assert subprocess.run(verify, cwd=files, capture_output=True).returncode == 0


def test_a_certificate_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (files := tmp_path / "tls").mkdir()
    files.joinpath("key.pem").write_text("mine")
    make_certificate(files)
    assert [path.name for path in files.iterdir()] == ["key.pem"]
    assert files.joinpath("key.pem").read_text() == "mine"


def test_https_is_served_with_the_files_that_were_made() -> None:
    environment = SERVICES["distributor-tls"]["environment"]
    assert environment["EVENHAND_SSL"] == "on"
    (mount,) = SERVICES["distributor-tls"]["volumes"]
    where = mount.removesuffix(":ro").rpartition(":")[2]
    assert environment["EVENHAND_SSL_CERTFILE"] == f"{where}/cert.pem" and f"cd {where}" in script()
    assert environment["EVENHAND_SSL_KEYFILE"] == f"{where}/key.pem"
    assert SERVICES["certificate"]["volumes"] == [mount.removesuffix(":ro")]
    assert re.search(rf"install -d -m 700 -o evenhand -g evenhand {where}$", DOCKERFILE, re.MULTILINE)


def test_prometheus_asks_every_container_of_every_distributor() -> None:
    asked = {}
    for job in PROMETHEUS["scrape_configs"]:
        (source,) = job["dns_sd_configs"]
        assert (source["type"], source["port"]) == ("A", 8000)
        asked |= dict.fromkeys(source["names"], job.get("scheme", "http"))
    wanted = {name: "https" if "EVENHAND_SSL" in SERVICES[name]["environment"] else "http" for name in DISTRIBUTORS}
    assert asked == wanted
    assert trusted(SERVICES["prometheus"]["networks"]["evenhand"]["ipv4_address"])


def test_prometheus_and_grafana_are_given_files_that_are_there_and_this_host_only() -> None:
    for name in PROFILES["observability"]:
        for source in (volume.split(":")[0] for volume in SERVICES[name]["volumes"]):
            assert source in COMPOSE["volumes"] or (ROOT / source).exists()
        assert SERVICES[name]["ports"][0].startswith(f"${{{name.upper()}_PORT:-127.0.0.1:")
    assert "--config.file=/etc/prometheus/prometheus.yml" in SERVICES["prometheus"]["command"]
    assert (ROOT / "deploy/prometheus" / PROMETHEUS["rule_files"][0]).exists()


def test_grafana_has_the_dashboard_and_its_source() -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert set(source) <= {"name", "uid", "type", "access", "url", "isDefault", "jsonData"}
    assert (source["type"], source["access"], source["isDefault"]) == ("prometheus", "proxy", True)
    url = urlsplit(source["url"])
    assert url.hostname == "prometheus" and SERVICES["prometheus"]["ports"][0].endswith(f":{url.port}")
    assert source["jsonData"] == {"timeInterval": PROMETHEUS["global"]["scrape_interval"]}
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/evenhand.yml").read_text())["providers"]
    assert (provider["type"], provider["allowUiUpdates"]) == ("file", False)
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert str(Path(home).parent) == provider["options"]["path"]
    assert f"./deploy/grafana/evenhand.json:{home}:ro" in SERVICES["grafana"]["volumes"]
    assert json.loads((GRAFANA / "evenhand.json").read_text())["uid"] == "evenhand"


@pytest.mark.parametrize("profile", ["", *PROFILES, "*"])
def test_compose_understands_it(profile: str, tmp_path: Path) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode != 0:
        pytest.skip("no Docker client with compose here")
    (empty := tmp_path / ".env").touch()
    words = [docker, "compose", "--env-file", str(empty), *(("--profile", profile) if profile else ())]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **docker_settings()}
    done = subprocess.run([*words, "config", "--services"], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    found = of_profile(None) + (sorted(SERVICES) if profile == "*" else PROFILES.get(profile, []))
    assert set(done.stdout.split()) == set(found)


def docker_settings() -> dict[str, str]:
    """Where the client finds its plug-ins; COMPOSE_* and the settings of this shell stay away."""
    return {name: value for name, value in os.environ.items() if name.startswith("DOCKER_")}


def test_redis_keeps_the_registry() -> None:
    command = SERVICES["redis"]["command"]
    assert command[command.index("--appendonly") + 1] == "yes"
    assert SERVICES["redis"]["volumes"] == ["redis-data:/data"]


def test_the_image_is_small_and_without_root() -> None:
    final = DOCKERFILE[DOCKERFILE.rindex("\nFROM ") :]
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE) == ["python:3.14-slim"] * 2
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
