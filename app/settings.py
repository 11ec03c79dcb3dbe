"""Every option once: flag, environment variable, unit, default, reason.

Owns the `Settings` model, how it is read (flag over environment over default) and how it is handed to a
child process. The command line, the settings table of the README and the workers are all made from it.
It must not start anything, open a socket or know Redis and HTTP; of the disk it only reads the TLS files.

A field's name is its flag (`grace_s` is `--grace-s`) and its variable (`EVENHAND_GRACE_S`).
"""

from __future__ import annotations

import ipaddress
import os
import re
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_origin
from urllib.parse import urlsplit

from annotated_types import Ge, Le
from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.errors import BadRequest, ConfigurationError
from app.nearest import nearest
from app.nodes import normalise_url
from app.redis_url import CLUSTER_SCHEMES, SENTINEL_SCHEMES, RedisPlace

ENV_PREFIX = "EVENHAND_"
# Read elsewhere: the first two by the command line, the others from one process of a deployment to the next.
OTHER_VARIABLES = (
    "EVENHAND_URL",
    "EVENHAND_ADMIN_KEY",
    "EVENHAND_READY_FD",
    "EVENHAND_WORKER_ID",
    "EVENHAND_METRICS_DIR",
)
# What Kubernetes sets in every pod beside a service whose name begins with evenhand: nobody's mistake.
_SERVICE_LINK = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")

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


def _check_zmq(value: str) -> str:
    match = re.fullmatch(r"tcp://([^\s/:\[\]]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})", value)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ValueError("must be tcp://HOST:PORT")
    return value


def _check_networks(value: tuple[str, ...]) -> tuple[str, ...]:
    if [item.lower() for item in value] == ["none"]:
        return ()
    try:
        return tuple(str(ipaddress.ip_network(item, strict=False)) for item in value)
    except ValueError as e:
        raise ValueError(f"must be networks such as 10.0.0.0/8 or fd00::/8, or the word none: {e}") from e


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


def _check_host(value: str) -> str:
    host = value.strip().removeprefix("[").removesuffix("]")
    if not host or re.search(r"[\s/]", host):
        raise ValueError("must be a host name or an address such as 0.0.0.0 or ::")
    return host


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


Keys = Annotated[tuple[Annotated[SecretStr, AfterValidator(_check_key)], ...], NoDecode, BeforeValidator(_split_keys)]
NodeUrls = Annotated[tuple[Annotated[str, AfterValidator(_check_node)], ...], NoDecode, BeforeValidator(_split)]
Networks = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split), AfterValidator(_check_networks)]
Seconds = Annotated[float, Ge(0), Field(allow_inf_nan=False)]
Wait = Annotated[float, Ge(0.001), Field(allow_inf_nan=False)]
Upper = BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value)
FilePath = Annotated[Path, AfterValidator(_absolute)]


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
        "Better in the environment: flags are visible to every user of the host.",
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

    # --- nodes ---------------------------------------------------------------------------------------
    nodes: NodeUrls = Field(
        (), description="Engines that always belong to the deployment; their models are asked from each."
    )
    engine_key: Annotated[SecretStr, AfterValidator(_check_key)] | None = Field(
        None, description="API key sent to engines; a node may have its own, given when it is added."
    )
    engine_certfile: FilePath | None = Field(
        None,
        description="PEM file with the certificate chain that https engines are shown, where they ask for one. "
        "Whom to trust is OpenSSL's own business: SSL_CERT_FILE.",
    )
    engine_keyfile: FilePath | None = Field(None, description="PEM file with the private key for --engine-certfile.")
    forward_client_key: bool = Field(
        False, description="Pass a client's own key on to the engine. Off: a client's key never leaves here."
    )
    heartbeat_expiration_s: Wait = Field(
        90.0,
        validation_alias=_environment_names(
            "EVENHAND_HEARTBEAT_EXPIRATION_S", "LMDEPLOY_CONTROLLER_HEART_BEAT_EXPIRATION"
        ),
        description="Seconds after which a node that is down is gone from the lists; it is still probed.",
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
    trusted_nodes: Networks = Field(
        ("127.0.0.0/8", "::1/128"),
        description="Networks from which nodes may register without a key; none = nobody. The address of the "
        "connection counts: behind a reverse proxy on this host everybody is loopback.",
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
        if self.engine_certfile or self.engine_keyfile:
            tls_towards_engines(self)
        return self

    @property
    def prefill_disabled(self) -> bool:
        """Whether decode nodes prefill too, by the operator's word."""
        return self.prefill_servers_urls == ("disable",)

    @classmethod
    def load(cls, flags: Mapping[str, object] | None = None) -> Self:
        """The settings from flags (by field name; None = not given), then environment, then defaults.

        Raises:
            ConfigurationError: with one line that names the first wrong flag or variable.
        """
        given = {name: value for name, value in (flags or {}).items() if value is not None}
        try:
            return cls(**given)  # type: ignore[arg-type]
        except ValidationError as e:
            raise ConfigurationError(_one_line(e.errors()[0], given)) from e

    def environment(self) -> dict[str, str]:
        """The variables that make the same settings in a child process. They hold the keys: never log them."""
        return {f"{ENV_PREFIX}{name.upper()}": _as_text(name, getattr(self, name)) for name in type(self).model_fields}


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
    return name in ("api_keys", "admin_keys", "engine_key", "redis_url")


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
    if not (settings.engine_certfile or settings.engine_keyfile):
        return None  # not made for nothing: it takes a worker 40 ms
    context = ssl.create_default_context()
    files = {"--engine-keyfile": settings.engine_keyfile, "--engine-certfile": settings.engine_certfile}
    load_tls_files("engine_certfile", context, files)
    return context


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
        try:
            path.read_bytes()
        except OSError as e:
            raise TlsFileError(field, f"can't read {setting}: {path}: {e.strerror}") from e
    (key, keyfile), (chain, certfile) = files.items()
    assert keyfile is not None and certfile is not None
    try:
        # Without an answer to the password question OpenSSL would ask at the terminal.
        context.load_cert_chain(certfile, keyfile, password=lambda: "")
    except (ssl.SSLError, OSError) as e:
        raise TlsFileError(field, f"{key} {keyfile} and {chain} {certfile} are not a pair of PEM files: {e}") from e


def _as_text(name: str, value: Any) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, tuple):
        return " ".join(_as_text(name, item) for item in value) or ("none" if name == "trusted_nodes" else "")
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def _one_line(error: ErrorDetails, flags: Mapping[str, object]) -> str:
    name = _field_of(str(error["loc"][0])) if error["loc"] else error["ctx"]["error"].field
    if name is None:
        return f"{error['loc'][0]} is not a setting"
    field = Settings.model_fields[name]
    # A check of our own says it best; pydantic's words ("Input should be ...") know no flag.
    if error["type"] == "value_error":
        text = str(error["ctx"]["error"])
    else:
        text = f"must be {allowed(field)}" if allowed(field) else error["msg"]
    shown = isinstance(error["input"], (str, int, float)) and not is_secret(name) and "@" not in str(error["input"])
    value = f", not {error['input']!r}" if shown else ""
    return " ".join(f"{_source_of(name, flags)}: {text}{value}".split())


def _field_of(location: str) -> str | None:
    for name in Settings.model_fields:
        if location == name or location.upper() in variables_of(name):
            return name
    return None


def _source_of(name: str, flags: Mapping[str, object]) -> str:
    if name in flags:
        return flag_of(name)
    return next((variable for variable in variables_of(name) if os.environ.get(variable)), flag_of(name))
