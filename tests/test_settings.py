"""Settings: flag over variable over default, one line for what is wrong, nothing secret in what is shown."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

import pytest
import trustme

from app.errors import ConfigurationError
from app.settings import Settings, flag_of, is_secret, misspelt_variables, tls_towards_engines, variables_of

# The flags of `lmdeploy serve proxy` and their defaults (source: lmdeploy/cli/serve.py, 0.18.0).
LMDEPLOY_DEFAULTS = {
    "server_name": "0.0.0.0",
    "server_port": 8000,
    "serving_strategy": "Hybrid",
    "dummy_prefill": False,
    "routing_strategy": "min_expected_latency",
    "disable_cache_status": False,
    "migration_protocol": "RDMA",
    "link_type": "RoCE",
    "disable_gdr": False,
    "api_keys": (),
    "ssl": False,
    "log_level": "WARNING",
}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {variable for name in Settings.model_fields for variable in variables_of(name)}
    for variable in [v for v in os.environ if v.startswith("EVENHAND_") or v in others]:
        monkeypatch.delenv(variable)


def complaint(flags: dict[str, object]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        Settings.load(flags)
    return caught.value.message


def test_defaults_are_those_of_lmdeploys_proxy() -> None:
    settings = Settings.load()
    assert {name: getattr(settings, name) for name in LMDEPLOY_DEFAULTS} == LMDEPLOY_DEFAULTS


def test_defaults_that_the_issue_names() -> None:
    settings = Settings.load()
    assert settings.workers == 2
    assert settings.max_body_size == 268_435_456  # 256 MiB
    assert (settings.connect_timeout_s, settings.first_byte_timeout_s) == (5, 600)
    assert (settings.idle_timeout_s, settings.total_timeout_s, settings.grace_s) == (300, 0, 120)
    assert settings.trusted_nodes == ("127.0.0.0/8", "::1/128")
    assert settings.heartbeat_expiration_s == 90


def test_a_flag_wins_over_its_variable_and_the_variable_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_WORKERS", "3")
    assert Settings.load().workers == 3
    assert Settings.load({"workers": "4"}).workers == 4
    assert Settings.load({"workers": None}).workers == 3


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_WORKERS", "")
    assert Settings.load().workers == 2


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("AIOHTTP_TIMEOUT", "first_byte_timeout_s"),
        ("LMDEPLOY_CONTROLLER_HEART_BEAT_EXPIRATION", "heartbeat_expiration_s"),
    ],
)
def test_lmdeploys_variables_are_honoured_after_ours(monkeypatch: pytest.MonkeyPatch, variable: str, name: str) -> None:
    monkeypatch.setenv(variable, "30")
    assert getattr(Settings.load(), name) == 30
    monkeypatch.setenv(f"EVENHAND_{name.upper()}", "40")
    assert getattr(Settings.load(), name) == 40
    assert getattr(Settings.load({name: "50"}), name) == 50


@pytest.mark.parametrize("text", ["http://a:1 http://b:2", "http://a:1,http://b:2", " http://a:1 ,  http://b:2/ "])
def test_a_list_in_a_variable_is_split_at_spaces_or_commas(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("EVENHAND_NODES", text)
    assert Settings.load().nodes == ("http://a:1", "http://b:2")


def test_nodes_are_split_and_normalised() -> None:
    assert Settings.load({"nodes": ["HTTP://A:80/,https://b:443/x/", "http://c"]}).nodes == (
        "http://a",
        "https://b/x",
        "http://c",
    )


def test_keys_are_several_and_empty_ones_are_dropped() -> None:
    keys = Settings.load({"api_keys": ["sk-1", "", "sk-2"]}).api_keys
    assert [key.get_secret_value() for key in keys] == ["sk-1", "sk-2"]


def test_keys_that_are_all_empty_do_not_open_the_door() -> None:
    assert complaint({"api_keys": [""]}) == "--api-keys: needs at least one key that is not empty"


def test_trusted_nodes_none_is_nobody() -> None:
    assert Settings.load({"trusted_nodes": ["none"]}).trusted_nodes == ()
    assert Settings.load({"trusted_nodes": ["10.0.0.0/8", "::1"]}).trusted_nodes == ("10.0.0.0/8", "::1/128")


@pytest.mark.parametrize(("item", "alone"), [("10.1.2.3/8", "10.0.0.0/8"), ("fd00::5/8", "fd00::/8")])
def test_a_trusted_network_with_an_address_in_it_is_not_guessed_at(item: str, alone: str) -> None:
    address = item.partition("/")[0]
    meant = f"{item} may mean {alone}, the whole network, or {address} alone: write which"
    assert complaint({"trusted_nodes": [item]}) == f"--trusted-nodes: {meant}"


def test_a_wrong_value_does_not_hide_what_settings_lack_together() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Settings.load({"server_port": "x", "ssl": True, "engine_cert_file": "/c.pem"})
    lines = caught.value.lines
    assert len(lines) == 2
    assert lines[0].startswith("--server-port: must be a whole number")
    assert lines[1] == "--ssl: needs SSL_KEYFILE: set it to the path of a PEM file"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("512B", 512),
        ("1KB", 1_000),
        ("1KiB", 1_024),
        ("2mb", 2_000_000),
        ("2 MiB", 2_097_152),
        ("1.5GiB", 1_610_612_736),
        ("1GB", 1_000_000_000),
    ],
)
def test_sizes_have_decimal_and_binary_suffixes(text: str, size: int) -> None:
    assert Settings.load({"max_body_size": text}).max_body_size == size


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"server_port": "65536"}, "--server-port: must be a whole number from 0 to 65535, not '65536'"),
        ({"server_port": "http"}, "--server-port: must be a whole number from 0 to 65535, not 'http'"),
        ({"workers": "0"}, "--workers: must be a whole number from 1 to 1024, not '0'"),
        ({"grace_s": "-1"}, "--grace-s: must be a number of at least 0, not '-1'"),
        ({"grace_s": "nan"}, "--grace-s: must be a number of at least 0, not 'nan'"),
        ({"lease_s": "inf"}, "--lease-s: must be a number of at least 2, not 'inf'"),
        (
            {"routing_strategy": "round_robin"},
            "--routing-strategy: must be one of min_expected_latency, random, min_observed_latency, "
            "least_expected_delay, not 'round_robin'",
        ),
        ({"serving_strategy": "hybrid"}, "--serving-strategy: must be one of Hybrid, DistServe, not 'hybrid'"),
        ({"nodes": ["ftp://a"]}, "--nodes: a node URL must start with http:// or https://, not 'ftp://a'"),
        ({"server_name": "a b"}, "--server-name: must be a host name or an address such as 0.0.0.0 or ::, not 'a b'"),
        (
            {"namespace": "a{b}"},
            "--namespace: must be 1 to 64 letters, digits, dots, dashes or underscores, not 'a{b}'",
        ),
        (
            {"max_body_size": "3 parsecs"},
            "--max-body-size: must be a number of bytes or have a suffix of KB, MB, GB, KiB, MiB, GiB, not '3 parsecs'",
        ),
        ({"nonsense": "1"}, "nonsense is not a setting"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_flag_and_allowed_values(flags: dict[str, object], line: str) -> None:
    assert complaint(flags) == line


def test_a_wrong_variable_is_named_as_the_variable_that_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOHTTP_TIMEOUT", "soon")
    assert complaint({}) == "AIOHTTP_TIMEOUT: must be a number of at least 0, not 'soon'"
    monkeypatch.delenv("AIOHTTP_TIMEOUT")
    monkeypatch.setenv("EVENHAND_TRUSTED_NODES", "10.0.0.0/99")
    assert complaint({}).startswith("EVENHAND_TRUSTED_NODES: must be networks such as 10.0.0.0/8 or fd00::/8")


@pytest.mark.parametrize(
    "flags",
    [
        {"api_keys": ["hush,hush"]},
        {"reader_keys": ["hush,hush"]},
        {"api_keys": ["hüsh"]},
        {"engine_key": "hush hush"},
        {"redis_url": "http://:hush@redis"},
        {"redis_url": "redis://:hush@redis/zero"},
        {"redis_url": "redis+sentinel://:hush@redis"},
        {"redis_url": "redis+cluster://me:hu@hush:x"},
        {"redis_url": "redis+cluster://h?password=hush"},
        {"nodes": ["http://me:hush@a"]},
    ],
)
def test_a_wrong_secret_is_not_repeated(flags: dict[str, object]) -> None:
    text = complaint(flags)
    assert "hush" not in text and "hüsh" not in text


def test_every_setting_that_holds_a_key_is_a_secret() -> None:
    keys = {name for name, field in Settings.model_fields.items() if "SecretStr" in str(field.annotation)}
    assert keys == {"api_keys", "admin_keys", "reader_keys", "engine_key"}
    assert all(map(is_secret, keys))


def test_secrets_are_not_in_the_repr() -> None:
    settings = Settings.load(
        {name: ["hush"] for name in ("api_keys", "admin_keys", "reader_keys")}
        | {"engine_key": "hush", "redis_url": "redis://:hush@redis"}
    )
    assert "hush" not in repr(settings) + str(settings)


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://:p@h:6379/3",
        "rediss://u:p@h/0",
        "unix:///run/r.sock?db=2",
        "redis+sentinel://h/m",
        "rediss+sentinel://u:p@h:1,[::1]:2/m/3",
        "redis+cluster://h:1,h:2",
    ],
)
def test_redis_urls_of_all_kinds_are_taken(url: str) -> None:
    assert Settings.load({"redis_url": url}).redis_url == url


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "redis://h:x",
        "redis://h/name",
        "unix://run/r.sock",
        "valkey://h",
        "h",
        "redis+sentinel://h",
        "redis+cluster://h/1",
        "redis+other://h",
        "valkey+sentinel://h/m",
    ],
)
def test_other_redis_urls_are_not(url: str) -> None:
    assert complaint({"redis_url": url}).count("--redis-url") == 1


@pytest.mark.parametrize("address", ["tcp://10.0.0.8:14579", "tcp://host-1.local:1", "tcp://[fd00::8]:65535"])
def test_mooncake_addresses_are_those_of_zmqs_tcp(address: str) -> None:
    assert Settings.load({"ec_consumer_zmq_addrs": [address]}).ec_consumer_zmq_addrs == (address,)


@pytest.mark.parametrize(
    "address", ["10.0.0.8:14579", "http://h:1", "tcp://h", "tcp://:1", "tcp://h:0", "tcp://h:65536", "tcp://fd00::8:1"]
)
def test_other_mooncake_addresses_are_not(address: str) -> None:
    with pytest.raises(ConfigurationError, match="--ec-consumer-zmq-addrs: must be tcp://HOST:PORT"):
        Settings.load({"ec_consumer_zmq_addrs": [address]})


@pytest.mark.parametrize("words", [["disable", "http://p:1"], ["http://p:1,none"]])
def test_prefill_is_switched_off_or_named(words: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="disable or none can't stand beside URLs"):
        Settings.load({"prefill_servers_urls": words})


def test_the_environment_makes_the_same_settings_in_a_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings.load(
        {
            "api_keys": ["sk-1", "sk-2"],
            "admin_keys": ["ad"],
            "reader_keys": ["re"],
            "engine_key": "en",
            "nodes": ["http://a:1", "http://b:2"],
            "trusted_nodes": ["none"],
            "max_body_size": "1MB",
            "redis_url": "unix:///run/a%20b.sock",
            "state_dir": "here",
            "dummy_prefill": True,
            "grace_s": "0.25",
            "log_level": "debug",
        }
    )
    for name, value in settings.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AIOHTTP_TIMEOUT", "1")  # ours is set in the child, so this one does not count any more
    monkeypatch.chdir("/")
    assert Settings.load() == settings
    assert settings.state_dir == tmp_path / "here"


def test_state_is_below_the_users_state_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert Settings.load().state_dir == Path("/home/me/.local/state/evenhand")
    monkeypatch.setenv("XDG_STATE_HOME", "/var/lib/state")
    assert Settings.load().state_dir == Path("/var/lib/state/evenhand")


def test_every_field_has_a_flag_a_variable_and_a_description() -> None:
    flags = [flag_of(name) for name in Settings.model_fields]
    variables = [variable for name in Settings.model_fields for variable in variables_of(name)]
    assert len(set(flags)) == len(flags) and len(set(variables)) == len(variables)
    for name, field in Settings.model_fields.items():
        assert field.description and field.description.endswith("."), name
        assert variables_of(name)[0] == f"EVENHAND_{name.upper()}"


def test_ssl_says_which_file_is_missing_or_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    certificate = trustme.CA().issue_cert("127.0.0.1")
    key, chain = tmp_path / "key.pem", tmp_path / "chain.pem"
    assert complaint({"ssl": True}) == "--ssl: needs SSL_KEYFILE: set it to the path of a PEM file"
    monkeypatch.setenv("SSL_KEYFILE", str(key))
    assert complaint({"ssl": True}) == f"--ssl: can't read SSL_KEYFILE: {key}: No such file or directory"
    certificate.private_key_pem.write_to_path(key)
    assert complaint({"ssl": True}) == "--ssl: needs SSL_CERTFILE: set it to the path of a PEM file"
    monkeypatch.setenv("SSL_CERTFILE", str(chain))
    chain.write_text("no certificate")
    assert "are not a pair of PEM files" in complaint({"ssl": True})
    certificate.cert_chain_pems[0].write_to_path(chain)
    settings = Settings.load({"ssl": True})
    assert (settings.ssl_keyfile, settings.ssl_certfile) == (key, chain)


@pytest.mark.timeout(5)
def test_a_pipe_for_a_pem_file_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "pipe")
    assert complaint({"engine_ca_file": str(path)}).endswith(f"can't read {path}: it is no regular file")
    both = {"engine_key_file": str(path), "engine_cert_file": str(path)}
    assert complaint(both).endswith(f"can't read --engine-key-file: {path}: it is no regular file")


def test_what_engines_are_shown_is_a_pair_of_files(tmp_path: Path) -> None:
    certificate = trustme.CA().issue_cert("127.0.0.1")
    key, chain = tmp_path / "key.pem", tmp_path / "chain.pem"
    certificate.private_key_pem.write_to_path(key)
    certificate.cert_chain_pems[0].write_to_path(chain)
    both = {"engine_key_file": key, "engine_cert_file": chain}
    settings = Settings.load(both)
    assert (settings.engine_key_file, settings.engine_cert_file) == (key, chain)
    for lacking, name in (("engine_key_file", "--engine-key-file"), ("engine_cert_file", "--engine-cert-file")):
        one = {field: path for field, path in both.items() if field != lacking}
        (there,) = ("--" + field.replace("_", "-") for field in one)
        assert complaint(one) == f"{there}: needs {name}: set it to the path of a PEM file"
    chain.write_text("no certificate")
    assert "are not a pair of PEM files" in complaint(both)


def test_whom_engines_are_trusted_by_is_a_file_with_certificates(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    said = complaint({"engine_ca_file": str(path)})
    assert said == f"--engine-ca-file: can't read {path}: No such file or directory"
    assert complaint({"engine_ca_file": str(tmp_path)}).endswith(f"can't read {tmp_path}: Is a directory")
    path.write_text("no certificate")
    assert complaint({"engine_ca_file": str(path)}).startswith(f"--engine-ca-file: {path} is no PEM file with cert")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(path)
    context = tls_towards_engines(Settings.load({"engine_ca_file": str(path)}))
    assert context is not None and context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname
    assert len(context.get_ca_certs()) == 1, "and by nobody else"
    assert tls_towards_engines(Settings.load()) is None


def test_variables_that_are_no_setting_are_told_with_the_nearest_that_is_and_without_their_value() -> None:
    lines = misspelt_variables(
        {
            "EVENHAND_API_KEY": "hush-1",
            "EVENHAND_WORKRES": "4",
            "evenhand_redis_ulr": "redis://:hush@h",
            "EVENHAND_XYZZY": "hush-2",
            # right ones, ours beside the settings, others', and what Kubernetes sets for services
            "EVENHAND_WORKERS": "4",
            "evenhand_grace_s": "1",
            "EVENHAND_ADMIN_KEY": "hush",
            "EVENHAND_URL": "http://a",
            "EVENHAND_READY_FD": "7",
            "AIOHTTP_TIMEOUT": "1",
            "PATH": "/",
            "EVENHAND_SERVICE_HOST": "10.0.0.1",
            "EVENHAND_SERVICE_PORT": "8000",
            "EVENHAND_SERVICE_PORT_HTTP": "8000",
            "EVENHAND_PORT": "tcp://10.0.0.1:8000",
            "EVENHAND_REDIS_PORT_6379_TCP_ADDR": "10.0.0.1",
        }
    )
    assert lines == [
        "the variable EVENHAND_API_KEY is no setting and is ignored; did you mean EVENHAND_API_KEYS?",
        "the variable EVENHAND_WORKRES is no setting and is ignored; did you mean EVENHAND_WORKERS?",
        "the variable EVENHAND_XYZZY is no setting and is ignored",
        "the variable evenhand_redis_ulr is no setting and is ignored; did you mean EVENHAND_REDIS_URL?",
    ]


def test_a_port_that_no_kubernetes_set_is_told() -> None:
    (line,) = misspelt_variables({"EVENHAND_PORT": "9000"})
    assert "EVENHAND_PORT is no setting" in line and "9000" not in line


def test_an_empty_path_is_refused_and_not_taken_for_the_working_directory() -> None:
    with pytest.raises(ConfigurationError, match="--state-dir: must be a path; an empty one"):
        Settings.load({"state_dir": ""})


def test_what_traces_need_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError) as caught:
        Settings.load({"trace_endpoint": "http://h:4318"})
    assert caught.value.message == (
        "--trace-endpoint: can't be used without the extra otel: pip install '.[otel]' where `pip install .` was, "
        "'FILE.whl[otel]' after a wheel"
    )
