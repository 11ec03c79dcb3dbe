"""Every option once: flag, environment variable, unit, default, reason.

Owns the `Settings` model, how it is read (flag over environment over file over default) and how it is handed to a
child process. The command line, the settings table of the README and the workers are all made from it.
It must not start anything, open a socket or know Redis and HTTP; of the disk it only reads the files that settings
name.

A field's name is its flag (`grace_s` is `--grace-s`), its variable (`EVENHAND_GRACE_S`) and its name in the file
(`grace-s`).

What a process hands on is complete, so it says so (`EVENHAND_SOURCES`), and who gets it does not read the file again:
all processes of a start have one reading of it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import json
import os
import re
import ssl
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin
from urllib.parse import urlsplit

from annotated_types import Ge, Le
from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.access_keys import KeysFileError, access_key, read_keys
from app.config_file import ConfigFile, others_can_read, read_config
from app.discovery.sources import FileSource, Source, parse_source
from app.errors import BadRequest, ConfigurationError
from app.looked_at import opened
from app.nearest import nearest
from app.nodes import Role, normalise_url
from app.redis_url import CLUSTER_SCHEMES, SENTINEL_SCHEMES, RedisPlace

ENV_PREFIX = "EVENHAND_"
SOURCES_VARIABLE = "EVENHAND_SOURCES"  # where each setting comes from: JSON, field -> flag, variable or place in a file
# Read elsewhere: the first two by the command line, the others from one process of a deployment to the next.
OTHER_VARIABLES = (
    "EVENHAND_URL",
    "EVENHAND_ADMIN_KEY",
    "EVENHAND_READY_FD",
    "EVENHAND_WORKER_ID",
    "EVENHAND_METRICS_DIR",
    SOURCES_VARIABLE,
)
# What Kubernetes sets in every pod beside a service whose name begins with evenhand: nobody's mistake.
_SERVICE_LINK = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")

TABLES = {"aliases": "alias", "models": "model_routing"}
"""Of the configuration file: its tables, and the fields that they are."""
KINDS = {"string_type": "text", "path_type": "text", "tuple_type": "a list of texts"}
"""What pydantic's own errors mean, as the end of "must be ..."."""

# Decimal and binary suffixes are both common in the documents of engines and of reverse proxies; taking
# MB for MiB would refuse a body that the operator meant to let in.
SIZE_SUFFIXES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _parse_size(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", value.strip(), re.IGNORECASE)
    if match is None or match[2].upper() not in SIZE_SUFFIXES:
        raise ValueError("must be a number of bytes or have a suffix of KB, MB, GB, KiB, MiB, GiB")
    return int(float(match[1]) * SIZE_SUFFIXES[match[2].upper()])


def _split(value: object) -> object:
    """The items of a list setting, from a variable (one string) or from a flag (several, each maybe with commas)."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(t, str) for t in texts):
        return value
    return tuple(item for text in texts for item in re.split(r"[\s,]+", text) if item)


def _split_pairs(value: object) -> object:
    """`NAME=VALUE` items of a setting that a file may have as a table; a process hands them on as JSON."""
    if isinstance(value, str) and value.startswith("["):
        try:
            return tuple(json.loads(value))
        except ValueError as e:
            raise ValueError("must be NAME=VALUE with spaces or commas between") from e
    if not isinstance(value, Mapping):
        return _split(value)
    if not all(isinstance(text, str) for text in value.values()):
        raise ValueError("must be a table of texts")
    if wrong := next((name for name in value if "=" in name), None):
        raise ValueError(f"{wrong}: a name can't hold =")
    return tuple(f"{name}={text}" for name, text in value.items())


def _check_aliases(value: tuple[str, ...]) -> tuple[str, ...]:
    found: dict[str, str] = {}
    for item in value:
        name, _, model = item.partition("=")
        if not name or not model or not item.isprintable():
            raise ValueError(f"must be NAME=MODEL, not {item!r}")
        if found.setdefault(name, model) != model:
            raise ValueError(f"{name} is an alias of two models")
    if chained := next((model for model in found.values() if model in found), None):
        raise ValueError(f"{chained} is an alias itself; name the model")
    return tuple(f"{name}={model}" for name, model in found.items())


def _strategies_of(value: object) -> object:
    """From the file's tables, model -> its settings, of which there is one."""
    if not isinstance(value, Mapping):
        return value
    pairs = []
    for model, given in value.items():
        if not isinstance(given, Mapping):
            raise ValueError(f'must have a table for each model, [models."{model}"]')
        for name, strategy in given.items():
            if name.replace("_", "-") != "routing-strategy":
                near = nearest(name.replace("_", "-"), ["routing-strategy"])
                hint = f"; did you mean {near}?" if near else ""
                raise ValueError(f"{model}: {name} is no setting of a model{hint}")
            pairs.append(f"{model}={strategy}")
    return json.dumps(pairs)


def _check_routing(value: tuple[str, ...]) -> tuple[str, ...]:
    strategies = choices_of(Settings.model_fields["routing_strategy"])
    found: dict[str, str] = {}
    for item in value:
        model, _, strategy = item.rpartition("=")
        if not model or not item.isprintable():
            raise ValueError(f"must be MODEL=STRATEGY, not {item!r}")
        if strategy not in strategies:
            raise ValueError(f"{model}: must be one of {', '.join(strategies)}, not {strategy!r}")
        if found.setdefault(model, strategy) != strategy:
            raise ValueError(f"{model} has two strategies")
    return tuple(f"{model}={strategy}" for model, strategy in found.items())


def _check_model(value: str) -> str:
    if not value or not value.isprintable():
        raise ValueError("must be the name of a model")
    return value


def _split_keys(value: object) -> object:
    """Like `_split`, but a flag's key with a comma is refused: it may be one key or two, and a guess opens a door."""
    if not isinstance(value, list):
        return _split(value)
    if any(isinstance(key, str) and re.search(r"[\s,]", key) for key in value):
        raise ValueError("must be keys separated by spaces; a key can't hold a comma or a space")
    keys = tuple(key for key in value if key != "")
    if not keys:
        raise ValueError("needs at least one key that is not empty")
    return keys


def _check_key(value: SecretStr) -> SecretStr:
    if not re.fullmatch(r"[!-~]+", value.get_secret_value()):
        raise ValueError("must be visible ASCII characters: a key travels in an HTTP header")
    return value


def _check_access_key(value: SecretStr) -> SecretStr:
    access_key(value.get_secret_value())
    return value


def _check_keys_file(value: Path) -> Path:
    if SOURCES_VARIABLE not in os.environ:  # else it was right when the deployment started
        read_keys(value)
    return value


def _check_file_of_other_keys(value: Path) -> Path:
    if SOURCES_VARIABLE not in os.environ:
        read_keys(value, of_clients=False)
    return value


def _check_node(value: str) -> str:
    try:
        return normalise_url(value, field="a node URL")
    except BadRequest as e:
        raise ValueError(e.message) from e


def _check_prefill(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(value) == 1 and value[0].lower() in ("disable", "none"):
        return ("disable",)
    if any(word.lower() in ("disable", "none") for word in value):
        raise ValueError("disable or none can't stand beside URLs")
    return tuple(_check_node(url) for url in value)


def _check_discover(value: tuple[str, ...]) -> tuple[str, ...]:
    names: set[str] = set()
    for text in value:
        try:
            name = parse_source(text).name
        except ValueError as e:
            raise ValueError(f"{text} {e}") from e
        if name in names:
            raise ValueError(f"{name} is named twice")
        names.add(name)
    return value


def _check_zmq(value: str) -> str:
    match = re.fullmatch(r"tcp://([^\s/:\[\]]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})", value)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ValueError("must be tcp://HOST:PORT")
    return value


def _check_networks(value: tuple[str, ...]) -> tuple[str, ...]:
    if [item.lower() for item in value] == ["none"]:
        return ()
    try:
        networks = [ipaddress.ip_network(item, strict=False) for item in value]
    except ValueError as e:
        raise ValueError(f"must be networks such as 10.0.0.0/8 or fd00::/8, or the word none: {e}") from e
    for item, network in zip(value, networks, strict=True):
        address = ipaddress.ip_interface(item).ip
        if address != network.network_address:  # one address may be meant or millions, and a guess opens a door
            raise ValueError(f"{item} may mean {network}, the whole network, or {address} alone: write which")
    return tuple(map(str, networks))


def _check_origins(value: tuple[str, ...]) -> tuple[str, ...]:
    if "*" in value and len(value) > 1:
        raise ValueError("* stands alone: it is every origin")
    for origin in value:
        # As browsers write it, or it would never be equal to what they send.
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://([^\s/:@A-Z\[\]]+|\[[0-9a-f:.]+\])(:\d+)?", origin):
            raise ValueError(
                f"must be https://HOST or https://HOST:PORT in lower case, without a path, or *, not {origin}"
            )
        if re.search(r"^http://.*:80$|^https://.*:443$", origin):
            raise ValueError(f"must be without the port that goes without saying, not {origin}")
    return tuple(dict.fromkeys(value))


def _check_redis_url(value: str) -> str:
    if value.partition("://")[0].lower() in (*SENTINEL_SCHEMES, *CLUSTER_SCHEMES):
        try:
            RedisPlace.parse(value)
        except ConfigurationError as e:
            raise ValueError(e.message.removeprefix("--redis-url: ")) from e
        return value
    try:
        parts = urlsplit(value)
        _ = parts.port
    except ValueError as e:
        raise ValueError(f"is not a URL: {e}") from e
    if parts.scheme in ("redis", "rediss") and parts.hostname and re.fullmatch(r"(/\d*)?", parts.path):
        return value
    if parts.scheme == "unix" and not parts.hostname and parts.path.startswith("/") and len(parts.path) > 1:
        return value
    raise ValueError(
        "must be redis://HOST:PORT/DB, unix:///PATH, redis+sentinel://HOST:PORT,HOST:PORT/MASTER/DB "
        "or redis+cluster://HOST:PORT,HOST:PORT, with rediss in place of redis for TLS"
    )


def _check_namespace(value: str) -> str:
    # It stands between the braces of every key: a brace in it would move keys to other cluster slots.
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", value):
        raise ValueError("must be 1 to 64 letters, digits, dots, dashes or underscores")
    return value


def _check_share(value: float) -> float:
    if not 0 < value <= 1:
        raise ValueError("must be a number above 0 and at most 1")
    return value


class NotInstalled(ValueError):
    """The value is right, and nothing is there that could use it."""


def _check_trace_endpoint(value: str) -> str:
    try:
        parts = urlsplit(value)
        _ = parts.port
    except ValueError as e:
        raise ValueError(f"is not a URL: {e}") from e
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be http://HOST:PORT or https://HOST:PORT, of a collector that takes OTLP over HTTP")
    for needed in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        try:
            found = importlib.util.find_spec(needed)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise NotInstalled(
                "can't be used without the extra otel: pip install '.[otel]' where `pip install .` was, "
                "'FILE.whl[otel]' after a wheel"
            )
    return value


def _check_host(value: str) -> str:
    host = value.strip().removeprefix("[").removesuffix("]")
    if not host or re.search(r"[\s/]", host):
        raise ValueError("must be a host name or an address such as 0.0.0.0 or ::")
    return host


def _check_path(value: object) -> object:
    if value == "":
        raise ValueError("must be a path; an empty one would be the working directory")
    return value


def _absolute(value: Path) -> Path:
    # A child process may have another working directory than the shell that gave the path.
    return Path(os.path.abspath(os.path.expanduser(value)))


def _default_state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "evenhand"
    try:
        return Path.home() / ".local" / "state" / "evenhand"
    except RuntimeError:  # a container user without a home
        return Path(f"/var/tmp/evenhand-{os.getuid()}")


Keys = Annotated[
    tuple[Annotated[SecretStr, AfterValidator(_check_access_key)], ...], NoDecode, BeforeValidator(_split_keys)
]
NodeUrls = Annotated[tuple[Annotated[str, AfterValidator(_check_node)], ...], NoDecode, BeforeValidator(_split)]
Networks = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_check_networks)]
Seconds = Annotated[float, Ge(0), Field(allow_inf_nan=False)]
Wait = Annotated[float, Ge(0.001), Field(allow_inf_nan=False)]
Upper = BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value)
FilePath = Annotated[Path, BeforeValidator(_check_path), AfterValidator(_absolute)]


def _environment_names(own: str, other: str) -> AliasChoices:
    return AliasChoices(own, other)


class Settings(BaseSettings):
    """All options of a deployment's processes. Immutable; keys and passwords never show in its repr."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        validate_by_name=True,
        validate_by_alias=True,
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
    )

    config: FilePath | None = Field(
        None,
        description="TOML file with settings, named as the flags are: server-port = 8000. Flags and variables win "
        "over it.",
    )

    # --- the flags of `lmdeploy serve proxy`, same names and defaults --------------------------------
    server_name: Annotated[str, AfterValidator(_check_host)] = Field(
        "0.0.0.0", description="Host name or address to listen on."
    )
    server_port: Annotated[int, Ge(0), Le(65535)] = Field(
        8000, description="TCP port to listen on; 0 takes a free one."
    )
    serving_strategy: Literal["Hybrid", "DistServe"] = Field(
        "Hybrid",
        description="Hybrid: one engine serves a request whole. DistServe: prefill and decode on different engines.",
    )
    routing_strategy: Literal["min_expected_latency", "random", "min_observed_latency", "least_expected_delay"] = Field(
        "min_expected_latency",
        description="How a node is chosen: least unfinished/speed, by chance weighted by speed, "
        "least mean of the last 15 latencies, or where it will be done first, by speeds that are learned.",
    )
    dummy_prefill: bool = Field(False, description="DistServe: skip the prefill call, to profile decode engines alone.")
    disable_cache_status: bool = Field(
        False, description="Nodes that were added at run time are forgotten when the whole deployment starts anew."
    )
    migration_protocol: Literal["RDMA", "NVLINK"] = Field(
        "RDMA", description="DistServe: transport by which the KV cache migrates between engines."
    )
    link_type: Literal["RoCE", "IB"] = Field("RoCE", description="DistServe: link layer under RDMA.")
    disable_gdr: bool = Field(False, description="DistServe: no GPUDirect RDMA.")
    api_keys: Keys = Field(
        (),
        description="Keys that clients of /v1 must send one of. "
        "Better in the environment or a file: flags are visible to every user of the host. "
        "sha256:HEX, the digest of a key, will do.",
    )
    api_keys_file: Annotated[FilePath, AfterValidator(_check_keys_file)] | None = Field(
        None,
        description="File with more of them, a key a line or with names and models; read again whenever it changes.",
    )
    ssl: bool = Field(
        False, description="Serve https; needs SSL_KEYFILE and SSL_CERTFILE, the paths of two readable PEM files."
    )
    log_level: Annotated[Literal["CRITICAL", "FATAL", "ERROR", "WARN", "WARNING", "INFO", "DEBUG", "NOTSET"], Upper] = (
        Field("WARNING", description="Lowest level that is logged.")
    )

    # --- TLS files: LMDeploy has them in the environment only ----------------------------------------
    ssl_keyfile: FilePath | None = Field(
        None,
        validation_alias=_environment_names("EVENHAND_SSL_KEYFILE", "SSL_KEYFILE"),
        description="PEM file with the private key for --ssl.",
    )
    ssl_certfile: FilePath | None = Field(
        None,
        validation_alias=_environment_names("EVENHAND_SSL_CERTFILE", "SSL_CERTFILE"),
        description="PEM file with the certificate chain for --ssl.",
    )

    # --- processes and shared state ------------------------------------------------------------------
    workers: Annotated[int, Ge(1), Le(1024)] = Field(
        2, description="Worker processes on this host. One a CPU core is a good start; all share one exact state."
    )
    redis_url: Annotated[str, AfterValidator(_check_redis_url)] | None = Field(
        None,
        repr=False,
        description="Redis >= 6.2 or Valkey that holds the shared state: redis://, unix://, "
        "redis+sentinel://H:PORT,H:PORT/MASTER/DB or redis+cluster://H:PORT,H:PORT; rediss... over TLS. "
        "Not given: an embedded one, private to this host and user.",
    )
    namespace: Annotated[str, AfterValidator(_check_namespace)] = Field(
        "default", description="Name of the deployment: several can share a Redis."
    )
    state_dir: FilePath = Field(
        default_factory=_default_state_dir,
        description="Directory of the embedded Redis (its data, log and socket), and of what a worker that starts "
        "while Redis is away goes by: the nodes that this host last knew. "
        "Default: evenhand under $XDG_STATE_HOME, or ~/.local/state/evenhand.",
    )
    max_requests: Annotated[int, Ge(0)] = Field(
        0, description="Requests after which a worker is replaced, plus up to a fifth by chance; 0 = never."
    )
    grace_s: Seconds = Field(
        120.0,
        description="Seconds that running requests get to end when a worker stops; "
        "streams still open then end with an error event.",
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="Log lines for people, or one JSON object a line for log collectors."
    )

    log_requests: Literal["off", "errors", "all"] = Field(
        "errors",
        description="A log line for each request that did not end well, or for each; whatever --log-level says.",
    )
    log_sample: Annotated[float, AfterValidator(_check_share)] = Field(
        1.0,
        description="With --log-requests all: the share of requests that ended well that have a line, above 0 and at "
        "most 1.",
    )
    trace_endpoint: Annotated[str, AfterValidator(_check_trace_endpoint)] | None = Field(
        None,
        description="OTLP/HTTP collector that gets a trace of each request, as http://HOST:4318; needs the extra "
        "otel. OTEL_* variables say the rest. Not given: no traces; traceparent is passed on.",
    )

    # --- nodes ---------------------------------------------------------------------------------------
    nodes: NodeUrls = Field(
        (), description="Engines that always belong to the deployment; their models are asked from each."
    )
    discover: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_check_discover)] = Field(
        (),
        description="Where nodes are listed that come and go by themselves: dns://HOST:PORT (A and AAAA records), "
        "dns+srv://_SERVICE._tcp.HOST (SRV records), file:///PATH (YAML). docs/discovery.md has their options.",
    )
    engine_key: Annotated[SecretStr, AfterValidator(_check_key)] | None = Field(
        None, description="API key sent to engines; a node may have its own, given when it is added."
    )
    engine_ca_file: FilePath | None = Field(
        None,
        description="PEM file with the authorities that https engines are trusted by, instead of the system's.",
    )
    engine_cert_file: FilePath | None = Field(
        None,
        description="PEM file with the certificate chain that https engines are shown, where they ask for one.",
    )
    engine_key_file: FilePath | None = Field(None, description="PEM file with the private key for --engine-cert-file.")
    forward_client_key: bool = Field(
        False, description="Pass a client's own key on to the engine. Off: a client's key never leaves here."
    )
    heartbeat_expiration_s: Wait = Field(
        90.0,
        validation_alias=_environment_names(
            "EVENHAND_HEARTBEAT_EXPIRATION_S", "LMDEPLOY_CONTROLLER_HEART_BEAT_EXPIRATION"
        ),
        description="Seconds after which a node that is down or pending is gone from the lists; it is still probed.",
    )
    forget_after_s: Wait = Field(
        86400.0, description="Seconds after which a gone node is forgotten; engines register once in their life."
    )
    probe_interval_s: Wait = Field(5.0, description="Seconds between two health probes of a node.")
    probe_timeout_s: Wait = Field(3.0, description="Seconds that a probe waits for the engine's answer.")
    probe_down_after: Annotated[int, Ge(1)] = Field(
        3, description="Missed probes in a row that make a node down; a refused connection does it at once."
    )
    probe_up_after: Annotated[int, Ge(1)] = Field(
        2, description="Good probes in a row that make a down node ready again."
    )
    probe_busy_grace_s: Seconds = Field(
        10.0, description="Seconds for which a success of a real request outweighs missed probes: busy is not dead."
    )

    retries: Annotated[int, Ge(0), Le(10)] = Field(
        2,
        description="Other nodes that a request is sent to while its client has nothing yet: after a connection "
        "error, silence before the first byte, 502, 503, 504 and, once, 500.",
    )
    breaker_failures: Annotated[int, Ge(1)] = Field(
        5,
        description="Failures of a node in a row, over all workers, after which it gets no traffic for a while: failed "
        "connections, silence before the first byte, 502, 503, 504, and 500 where another node then serves the "
        "request.",
    )
    breaker_open_s: Wait = Field(
        10.0, description="Seconds of that while; twice as long each time in a row, at most 60. Then one trial."
    )

    # --- models --------------------------------------------------------------------------------------
    alias: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_pairs), AfterValidator(_check_aliases)] = Field(
        (),
        description="Other names of models, NAME=MODEL; in the file a table, [aliases]. What a node has under that "
        "name comes first.",
    )
    model_routing: Annotated[
        tuple[str, ...],
        NoDecode,
        BeforeValidator(lambda value: _split_pairs(_strategies_of(value))),
        AfterValidator(lambda value: _check_routing(value)),
    ] = Field(
        (),
        description="Routing strategies of models that have one of their own, MODEL=STRATEGY; in the file "
        '[models."MODEL"] routing-strategy = "STRATEGY".',
    )
    default_model: Annotated[str, AfterValidator(_check_model)] | None = Field(
        None, description="Model of requests that name none. Not given: they are refused."
    )

    # --- encoders before them, as vLLM's encoder-disaggregation example names them ---------------------
    encode_servers_urls: NodeUrls = Field(
        (), description="Encoder nodes, comma-separated; images, video and audio of a chat go to them first."
    )
    prefill_servers_urls: Annotated[
        tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_check_prefill)
    ] = Field(
        (),
        description="Prefill nodes, comma-separated: prefill and decode are separate then. "
        "disable or none: decode nodes prefill too.",
    )
    decode_servers_urls: NodeUrls = Field((), description="Decode nodes, comma-separated.")
    pd_protocol: Literal["auto", "lmdeploy", "nixl", "mooncake", "sglang"] = Field(
        "auto",
        description="How separate prefill and decode nodes hand the KV cache over; auto: nixl where encoders or "
        "prefill servers are named by the flags above, else lmdeploy.",
    )
    bootstrap_port: Annotated[int, Ge(1), Le(65535)] = Field(
        8998, description="mooncake, sglang: port of the bootstrap server of prefill nodes that name no other."
    )
    pd_missing_params: Literal["recompute", "fail"] = Field(
        "recompute",
        description="lmdeploy, nixl: what becomes of a request whose prefill answer does not say where its "
        "cache is: decode computes the prompt again, or a 502.",
    )
    prefill_fallback: bool = Field(
        False, description="Where no prefill node can serve, a decode node does all of it. Off: a 503 that says so."
    )
    prefill_timeout_s: Seconds = Field(
        600.0, description="Seconds until a prefill node's answer has to be complete; 0 = no limit."
    )
    handover_lease_s: Wait = Field(
        30.0, description="nixl: seconds for which prefill keeps a cache for decode (vLLM's kv_lease_duration)."
    )
    link_timeout_s: Wait = Field(
        60.0, description="lmdeploy: seconds that linking a prefill and a decode node may take, all tries included."
    )
    link_tries: Annotated[int, Ge(1)] = Field(8, description="lmdeploy: how often a link is tried.")
    gc_age_s: Seconds = Field(
        600.0, description="lmdeploy: age in seconds from which POST /distserve/gc frees a session under migration."
    )
    encoder_policy: Literal["round_robin", "weighted", "least_unfinished"] = Field(
        "round_robin", description="Which encoder gets a media item: in turn, in turn by speed, or the least busy."
    )
    encoder_retries: Annotated[int, Ge(0)] = Field(
        2, description="Other encoders that are tried for items whose encoder failed."
    )
    decode_retries: Annotated[int, Ge(0)] = Field(
        1, description="How often a request whose engine answers 500 begins again, from its encoders on."
    )
    encoder_max_batch_size: Annotated[int, Ge(0)] = Field(
        0,
        validation_alias=_environment_names("EVENHAND_ENCODER_MAX_BATCH_SIZE", "ENCODER_MAX_BATCH_SIZE"),
        description="Images of a request that go to an encoder in one call; 0 = no limit.",
    )
    no_rewrite: bool = Field(
        False, description="Pass media on as they are, instead of what the encoders report of them."
    )
    ec_consumer_zmq_addrs: Annotated[
        tuple[Annotated[str, AfterValidator(_check_zmq)], ...], NoDecode, BeforeValidator(_split)
    ] = Field(
        (),
        description="Mooncake control channels of the decode servers, comma-separated, "
        "one for each server and data-parallel rank.",
    )
    ec_consumer_dp_size: Annotated[int, Ge(1)] = Field(
        1, description="Data-parallel ranks of each decode server, for the setting above."
    )

    # --- who may do what -----------------------------------------------------------------------------
    admin_keys: Keys = Field(
        (),
        description="Keys for /nodes/*, /distserve/*, /start_profile and /stop_profile; where there are none, "
        "the API keys count.",
    )
    admin_keys_file: Annotated[FilePath, AfterValidator(_check_file_of_other_keys)] | None = Field(
        None, description="File with more admin keys, a key a line; read again whenever it changes."
    )
    reader_keys: Keys = Field(
        (),
        description="Keys that only read, for Prometheus and whoever looks on: GET of /metrics, /nodes/status, "
        "/nodes/explain, /distserve/links and the live page's data.",
    )
    reader_keys_file: Annotated[FilePath, AfterValidator(_check_file_of_other_keys)] | None = Field(
        None, description="File with more reader keys, a key a line; read again whenever it changes."
    )
    trusted_nodes: Networks = Field(
        ("127.0.0.0/8", "::1/128"),
        description="Networks from which nodes may register without a key; none = nobody. The address of the "
        "connection counts: behind a reverse proxy on this host everybody is loopback.",
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_check_origins)] = Field(
        (),
        description="Origins of pages that may call engines, https://HOST[:PORT] each, or *; never with credentials.",
    )
    allow_transfer_params: bool = Field(
        False,
        description="Let clients set the KV-transfer fields of a request; only for a distributor behind another one.",
    )

    # --- limits --------------------------------------------------------------------------------------
    max_body_size: Annotated[int, BeforeValidator(_parse_size), Ge(1)] = Field(
        256 * 2**20,
        description="Largest request body, in bytes or with a suffix; default 256MiB. Images and audio come inside it.",
    )
    client_timeout_s: Seconds = Field(
        60.0,
        description="Seconds that a client may take for the head of its request, or for 64 KiB of its body or of its "
        "answer; 0 = off.",
    )
    connect_timeout_s: Seconds = Field(5.0, description="Seconds to reach an engine; 0 = off.")
    first_byte_timeout_s: Seconds = Field(
        600.0,
        validation_alias=_environment_names("EVENHAND_FIRST_BYTE_TIMEOUT_S", "AIOHTTP_TIMEOUT"),
        description="Seconds until an engine's answer begins, so queue and prefill included; 0 = off.",
    )
    idle_timeout_s: Seconds = Field(300.0, description="Seconds between two chunks of an answer; 0 = off.")
    total_timeout_s: Seconds = Field(
        0.0, description="Seconds for a whole request; 0 = off, as a long generation is no fault."
    )
    redis_timeout_s: Wait = Field(
        0.5, description="Seconds that a request waits for Redis before it goes on with the last known nodes."
    )
    lease_s: Annotated[float, Ge(2), Field(allow_inf_nan=False)] = Field(
        8.0, description="Seconds after which a worker that renews no more is dead and its counts are given back."
    )

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if self.ssl:
            files = {"SSL_KEYFILE": self.ssl_keyfile, "SSL_CERTFILE": self.ssl_certfile}
            load_tls_files("ssl", ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)
        tls_towards_engines(self)
        return self

    @property
    def aliases(self) -> dict[str, str]:
        """Alias -> model."""
        pairs = (item.partition("=") for item in self.alias)
        return {name: model for name, _, model in pairs}

    @property
    def strategies(self) -> dict[str, str]:
        """Model -> strategy, of those that have one of their own."""
        pairs = (item.rpartition("=") for item in self.model_routing)
        return {model: strategy for model, _, strategy in pairs}

    @property
    def prefill_disabled(self) -> bool:
        """Whether decode nodes prefill too, by the operator's word."""
        return self.prefill_servers_urls == ("disable",)

    @property
    def static_nodes(self) -> dict[str, Role]:
        """The nodes that are named, with their roles."""
        prefill = () if self.prefill_disabled else self.prefill_servers_urls
        return (
            dict.fromkeys(self.nodes, Role.Hybrid)
            | dict.fromkeys(self.encode_servers_urls, Role.Encode)
            | dict.fromkeys(prefill, Role.Prefill)
            | dict.fromkeys(self.decode_servers_urls, Role.Decode)
        )

    @property
    def sources(self) -> tuple[Source, ...]:
        """What `discover` names."""
        return tuple(map(parse_source, self.discover))

    @classmethod
    def load(cls, flags: Mapping[str, object] | None = None, *, but: Collection[str] = ()) -> Self:
        """The settings from flags (by field name; None = not given), then environment, file, defaults.

        Args:
            but: settings that are left to their defaults, whatever is said of them.

        Raises:
            WrongSettings: with a line for each flag, variable or member of the file that is wrong.
        """
        return cls.load_with_sources(flags, but=but)[0]

    @classmethod
    def load_with_sources(
        cls, flags: Mapping[str, object] | None = None, *, but: Collection[str] = ()
    ) -> tuple[Self, dict[str, str]]:
        """The same, and where each setting that is not left to its default comes from, by field."""
        given: dict[str, Any] = {name: value for name, value in (flags or {}).items() if value is not None}
        file = _file_of(given)
        sources = sources_of(given, file)
        from_file: dict[str, Any] = {}
        faults: list[str] = []
        if file is not None:
            faults += file.faults
            from_file = {name: value for name, value in file.values.items() if sources[name] == file.place(name)}
        for name in [name for name, value in from_file.items() if _is_no_number(name, value)]:
            del from_file[name]
            faults.append(f"{_named(name, sources)}: must be {allowed(cls.model_fields[name])}, not true or false")
        values = {**from_file, **given, **cls._defaults(but)}
        try:
            settings = cls(**values)
        except ValidationError as e:
            found = e.errors()
            wrong = {_field_of(str(error["loc"][0])) for error in found if error["loc"]}
            try:
                cls(
                    **values | cls._defaults(name for name in wrong if name)
                )  # those that are looked at together only where each is right
            except ValidationError as of_several:
                found += of_several.errors()
            faults += dict.fromkeys(_one_line(error, sources) for error in found)
            raise WrongSettings(faults) from e
        if faults:
            raise WrongSettings(faults)
        return settings, sources

    @classmethod
    def _defaults(cls, names: Iterable[str]) -> dict[str, Any]:
        return {name: cls.model_fields[name].get_default(call_default_factory=True) for name in names}

    def environment(self) -> dict[str, str]:
        """The variables that make the same settings in a child process. They hold the keys: never log them."""
        return {f"{ENV_PREFIX}{name.upper()}": _as_text(name, getattr(self, name)) for name in type(self).model_fields}


class WrongSettings(ConfigurationError):
    """`lines`: one for each fault; the message is the first."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__(lines[0])
        self._lines = list(lines)

    @property
    def lines(self) -> list[str]:
        return self._lines


def sources_of(flags: Mapping[str, object], file: ConfigFile | None = None) -> dict[str, str]:
    """Where each setting that is not left to its default comes from, by field: its flag, a variable, or the place
    in the file."""
    found: dict[str, str] = {}
    for name in Settings.model_fields:
        if flags.get(name) is not None:
            found[name] = flag_of(name)
        elif variable := next((v for v in variables_of(name) if os.environ.get(v)), None):
            found[name] = variable
        elif file is not None and name in file.values:
            found[name] = file.place(name)
    return found


def is_of_file(source: str) -> bool:
    """Whether what `sources_of` gave is a place in the file: its path is absolute."""
    return source.startswith("/")


def _file_of(flags: Mapping[str, object]) -> ConfigFile | None:
    """The file, read; None: none is named, or it has been read by whoever handed us the settings."""
    named = flags.get("config") or os.environ.get("EVENHAND_CONFIG")
    if not named or SOURCES_VARIABLE in os.environ:
        return None
    return read_config(
        _absolute(Path(str(named))), [name for name in Settings.model_fields if name != "config"], TABLES
    )


def warnings_of(settings: Settings, sources: Mapping[str, str]) -> list[str]:
    """What is allowed and better not so, or changes nothing, a line for each."""
    secrets = [flag_of(name)[2:] for name, source in sources.items() if is_secret(name) and is_of_file(source)]
    held = {settings.config: ", ".join(secrets)} if secrets else {}
    for path in (settings.api_keys_file, settings.admin_keys_file, settings.reader_keys_file):
        with contextlib.suppress(ValueError):
            if path is not None and any(key.plain for key in read_keys(path)):
                held[path] = "keys"
    found = [
        f"{path} holds {what} and every user of this host can read it: chmod o-r"
        for path, what in held.items()
        if path is not None and others_can_read(path)
    ]
    if "log_sample" in sources and settings.log_requests != "all":
        found.append("--log-sample has no effect without --log-requests all")
    files = [source for source in settings.sources if isinstance(source, FileSource)]
    return found + [_absent(source) for source in files if not os.path.exists(source.path)]


def _absent(source: FileSource) -> str:
    line = f"--discover {source.name}: there is no file {source.path} yet"
    if not source.label:
        return line
    meant = f"/{source.label}{source.path}"
    return f"{line}; {source.label} is a name that stands before the path, and {meant} is written file://{meant}"


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def variables_of(name: str) -> list[str]:
    """The environment variables of a field, the one that wins first."""
    alias = Settings.model_fields[name].validation_alias
    if isinstance(alias, AliasChoices):
        return [str(choice) for choice in alias.choices]
    return [f"{ENV_PREFIX}{name.upper()}"]


def misspelt_variables(environment: Mapping[str, str]) -> list[str]:
    """A line for each variable that looks like a setting and is none. Its value may be a key: it is not in the line."""
    names = [name for field in Settings.model_fields for name in variables_of(field)]
    names = [*(name for name in names if name.startswith(ENV_PREFIX)), *OTHER_VARIABLES]
    lines: list[str] = []
    for name, value in sorted(environment.items()):
        known = not name.upper().startswith(ENV_PREFIX) or name.upper() in names
        if not known and not _SERVICE_LINK.search(name) and not value.startswith(("tcp://", "udp://")):
            stems = [known.removeprefix(ENV_PREFIX) for known in names]  # the prefix makes all of them alike
            near = nearest(name.upper().removeprefix(ENV_PREFIX), stems)
            hint = f"; did you mean {ENV_PREFIX}{near}?" if near else ""
            lines.append(f"the variable {name} is no setting and is ignored{hint}")
    return lines


def is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


def is_secret(name: str) -> bool:
    """Whether a value of the field must not be shown: keys, and a URL that may hold a password."""
    return name in ("api_keys", "admin_keys", "reader_keys", "engine_key", "redis_url")


def choices_of(field: FieldInfo) -> tuple[str, ...]:
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else ()


def allowed(field: FieldInfo) -> str:
    """What a value may be, as the end of "must be ...". Empty where only the field's own check can say it."""
    if choices_of(field):
        return "one of " + ", ".join(choices_of(field))
    if field.annotation is bool:
        return "true or false"
    if field.annotation not in (int, float):
        return ""
    least = next((m.ge for m in field.metadata if isinstance(m, Ge)), None)
    most = next((m.le for m in field.metadata if isinstance(m, Le)), None)
    kind = "a whole number" if field.annotation is int else "a number"
    if least is not None and most is not None:
        return f"{kind} from {least} to {most}"
    return f"{kind} of at least {least}" if least is not None else kind


def tls_towards_engines(settings: Settings) -> ssl.SSLContext | None:
    """By what https engines are trusted, and what they are shown; None: the system's certificates, and nothing.

    Raises TlsFileError.
    """
    shows = bool(settings.engine_cert_file or settings.engine_key_file)
    if not (shows or settings.engine_ca_file):
        return None  # not made for nothing: it takes a worker 40 ms
    if settings.engine_ca_file:
        context = trusting("engine_ca_file", settings.engine_ca_file)
    else:
        context = ssl.create_default_context()
    if shows:
        files = {"--engine-key-file": settings.engine_key_file, "--engine-cert-file": settings.engine_cert_file}
        load_tls_files("engine_cert_file" if settings.engine_cert_file else "engine_key_file", context, files)
    return context


def trusting(field: str, path: Path) -> ssl.SSLContext:
    """A client's context that trusts the authorities in a PEM file, and nobody else. Raises TlsFileError."""
    _check_readable(field, path)
    try:
        return ssl.create_default_context(cafile=path)
    except (ssl.SSLError, OSError) as e:
        raise TlsFileError(field, f"{path} is no PEM file with certificates: {e}") from e


class TlsFileError(ValueError):
    """`field`: the setting that asked for the file."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(text)
        self.field = field


def load_tls_files(field: str, context: ssl.SSLContext, files: Mapping[str, Path | None]) -> None:
    """Load a key and its certificate chain, so that a wrong file is a line at start and not a traceback later.

    Args:
        field: the setting that asks for it.
        files: first the key, then the chain, each under the name of its setting.

    Raises:
        TlsFileError: with a line that says which file is missing or wrong.
    """
    for setting, path in files.items():
        if path is None:
            raise TlsFileError(field, f"needs {setting}: set it to the path of a PEM file")
        _check_readable(field, path, setting)
    (key, keyfile), (chain, certfile) = files.items()
    assert keyfile is not None and certfile is not None
    try:
        # Without an answer to the password question OpenSSL would ask at the terminal.
        context.load_cert_chain(certfile, keyfile, password=lambda: "")
    except (ssl.SSLError, OSError) as e:
        raise TlsFileError(field, f"{key} {keyfile} and {chain} {certfile} are not a pair of PEM files: {e}") from e


def _check_readable(field: str, path: Path, setting: str = "") -> None:
    try:
        with opened(path) as file:
            file.read()
    except OSError as e:
        raise TlsFileError(field, f"can't read {setting + ': ' if setting else ''}{path}: {e.strerror}") from e


def _as_text(name: str, value: Any) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if name in TABLES.values() and value:
        return json.dumps(value)  # the name of a model may hold a space
    if isinstance(value, tuple):
        return " ".join(_as_text(name, item) for item in value) or ("none" if name == "trusted_nodes" else "")
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def _one_line(error: ErrorDetails, sources: Mapping[str, str]) -> str:
    name = _field_of(str(error["loc"][0])) if error["loc"] else error["ctx"]["error"].field
    if name is None:
        return f"{error['loc'][0]} is not a setting"
    field = Settings.model_fields[name]
    # A check of our own says it best; pydantic's words ("Input should be ...") know no flag.
    fault = error["ctx"]["error"] if error["type"] == "value_error" else None
    if fault is not None:
        text = str(fault)
    else:
        text = f"must be {allowed(field) or KINDS.get(error['type'], '')}"
        text = error["msg"] if text == "must be " else text
    shown = isinstance(error["input"], (str, int, float)) and not is_secret(name) and "@" not in str(error["input"])
    shown = shown and not isinstance(fault, (KeysFileError, NotInstalled))  # they are not about the value
    value = f", not {error['input']!r}" if shown else ""
    return " ".join(f"{_named(name, sources)}: {text}{value}".split())


def _is_no_number(name: str, value: object) -> bool:
    """Whether it is a truth value for a number, which pydantic would take as 0 or 1."""
    return isinstance(value, bool) and Settings.model_fields[name].annotation in (int, float)


def _field_of(location: str) -> str | None:
    for name in Settings.model_fields:
        if location == name or location.upper() in variables_of(name):
            return name
    return None


def _named(name: str, sources: Mapping[str, str]) -> str:
    """The setting as whoever gave it knows it."""
    source = sources.get(name, flag_of(name))
    return f"{source}: {name.replace('_', '-')}" if is_of_file(source) else source
