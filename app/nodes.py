"""Nodes: what an engine address is, which roles and states it can have, and how it is named.

Pure values and rules; it must not know Redis, HTTP or a clock.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from ipaddress import IPv4Address, IPv6Address
from urllib.parse import urlsplit

from app.errors import BadRequest

# RFC 1035, 2.3.4. A longer name can't even be asked for.
MAX_LABEL = 63
MAX_HOST = 253

_LABEL = re.compile(r"[a-z0-9_-]+").fullmatch
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]+").fullmatch
_PERCENT = re.compile(r"%([0-9A-Fa-f]{2})")
_BAD_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_KEY = re.compile(r"[\x21-\x7e]{1,4096}").fullmatch


class Role(IntEnum):
    """What a node does. 1-3 are LMDeploy's numbers (`EngineRole`); Encode is ours."""

    Hybrid = 1
    Prefill = 2
    Decode = 3
    Encode = 4


class State(StrEnum):
    """Where a node stands. Only ready nodes are candidates; pending ones are a last resort."""

    PENDING = "pending"  # registered, no good probe yet
    READY = "ready"
    ASLEEP = "asleep"  # the engine itself says sleeping or initializing: not routed, not deleted
    DOWN = "down"
    GONE = "gone"  # down or pending for longer than the heart-beat expiration: hidden, still probed
    DRAINING = "draining"  # no new requests, finish the old, then removed


class Breaker(StrEnum):
    """Whether a node's connections can be trusted, over all workers."""

    CLOSED = "closed"
    OPEN = "open"  # too many failed in a row: no traffic
    HALF_OPEN = "half_open"  # one request may try


@dataclass(frozen=True, slots=True)
class Node:
    """One engine address as the registry knows it.

    `order` is the registry version at which the node first came (registration order);
    `incarnation` is the version of its latest registration: a probe's verdict on an older
    incarnation is void. `life` is the version at which it was registered, or found to be another
    process: links and sessions of an older life are void. `bootstrap_port` is where a prefill node tells of
    its KV cache.
    """

    url: str
    role: Role = Role.Hybrid
    models: tuple[str, ...] = ()
    speed: float | None = None
    state: State = State.PENDING
    static: bool = False
    asked: bool = False  # the models come from the engine's /v1/models, not from the registration
    order: int = 0
    incarnation: int = 0
    registered_at_ms: int = 0
    state_since_ms: int = 0
    drain_until_ms: int = 0
    reason: str = ""
    life: int = 0
    bootstrap_port: int | None = None
    host_header: str = ""  # under which name it is spoken to; empty: that of its URL
    source: str = ""  # the `--discover` that it comes from; empty: registered by a call or a setting
    breaker: Breaker = Breaker.CLOSED
    breaker_until_ms: int = 0
    breaker_opens: int = 0  # in a row


def about_itself(text: str, url: str) -> str:
    """What is said of a node, without its own address, where that stands beside it."""
    text = re.sub(rf"( of)? ?\b(engine )?{re.escape(url)}(?=[\s:;,.)]|$)(?!:\d):?", "", text)
    return text.strip(" :")


def normalise_url(value: object, *, field: str = "url") -> str:
    """The one spelling of a node URL, or a refusal where it could mean two things. Nothing is looked up.

    Scheme and host in lower case, addresses as four decimals or in the shortest IPv6 form, no final dot, no default
    port, no needless percent-encoding, no final slash. So an engine is one node however it is written. What only a
    look-up or the kernel could tell to be the same stays two: `localhost`, 127.0.0.1, and the 0.0.0.0 that LMDeploy's
    engines may register as.

    Raises:
        BadRequest: not http(s), no host or none that can be looked up, a bad port, or user, query or fragment present.
    """
    if not isinstance(value, str) or not value.strip():
        raise BadRequest(f"{field} must be a non-empty string such as http://10.0.0.5:23333", param=field)
    text = value.strip()
    if any(c.isspace() or ord(c) < 33 or ord(c) > 126 for c in text):
        hint = "" if text.isascii() else " (an international name is written in its xn-- form)"
        raise BadRequest(f"{field} holds characters that a URL can't have{hint}", param=field)
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as e:
        raise BadRequest(f"{field} is not a URL: {e}", param=field) from e
    if parts.scheme.lower() not in ("http", "https"):
        raise BadRequest(f"{field} must start with http:// or https://", param=field)
    if not parts.hostname:
        raise BadRequest(f"{field} has no host", param=field)
    if parts.username is not None or parts.password is not None or "@" in parts.netloc:
        raise BadRequest(f"{field} must not hold a user or password; an engine's key goes in `key`", param=field)
    if "?" in text or "#" in text:
        raise BadRequest(f"{field} must not have a query or fragment", param=field)
    if port == 0:
        raise BadRequest(f"{field} has port 0; allowed are 1 to 65535", param=field)
    try:
        path = _normalise_path(parts.path)
        host = _normalise_ipv6(parts.hostname) if "[" in parts.netloc else _normalise_host(parts.hostname)
    except ValueError as e:
        raise BadRequest(f"{field} has {e}", param=field) from e
    scheme = parts.scheme.lower()
    default_port = 443 if scheme == "https" else 80
    authority = host if port in (None, default_port) else f"{host}:{port}"
    return f"{scheme}://{authority}{path.rstrip('/')}"


def _normalise_path(path: str) -> str:
    """RFC 3986, 6.2.2: what needs no percent-encoding has none, and the rest has it in upper case."""
    if _BAD_PERCENT.search(path):
        raise ValueError("a % in its path that two hexadecimal digits don't follow")

    def decode(match: re.Match[str]) -> str:
        char = chr(int(match[1], 16))
        return char if char.isascii() and (char.isalnum() or char in "-._~") else match[0].upper()

    path = _PERCENT.sub(decode, path)
    if "\\" in path or "//" in path or any(part in (".", "..") for part in path.split("/")):
        raise ValueError("a path with empty, . or .. parts")
    return path


def _normalise_ipv6(text: str) -> str:
    if "%" in text:
        raise ValueError("an IPv6 zone, which only one host knows the meaning of; give an address without one")
    try:
        address = IPv6Address(text)
    except ValueError as e:
        raise ValueError("a host that is no IPv6 address") from e
    if address.ipv4_mapped is not None:  # the same socket address to the kernel
        return str(address.ipv4_mapped)
    return f"[{address.compressed}]"


def _normalise_host(text: str) -> str:
    labels = text.removesuffix(".").split(".")
    if not all(labels):
        raise ValueError(f"the host {text!r}, with an empty part between its dots")
    if not all(map(_LABEL, labels)):
        raise ValueError(f"the host {text!r}; letters, digits, dots, dashes and underscores are allowed")
    if all(map(_NUMBER, labels)):
        return str(_parse_ipv4(text, labels))
    if max(map(len, labels)) > MAX_LABEL or len(text) > MAX_HOST:
        raise ValueError(f"a host longer than {MAX_HOST} characters, or than {MAX_LABEL} between two dots")
    return ".".join(labels)


def _parse_ipv4(text: str, labels: list[str]) -> IPv4Address:
    """All that `inet_aton` reads, and so a connection would: 127.1, 0x7f.1, 2130706433.

    But not a leading zero: `inet_aton` reads it as octal, people and other programs as nothing.
    """
    if any(len(label) > 1 and label[0] == "0" and label[1] != "x" for label in labels):
        raise ValueError(f"the address {text!r} with a leading zero, which some read as octal; leave it out")
    if len(labels) <= 4 and max(map(len, labels)) <= 12:
        *front, last = (int(label, 16 if label.startswith("0x") else 10) for label in labels)
        if all(number < 256 for number in front) and last < 256 ** (4 - len(front)):
            return IPv4Address(sum(number << 8 * (3 - i) for i, number in enumerate(front)) + last)
    raise ValueError(f"a host that is no IPv4 address: {text!r}")


def parse_role(value: object, *, field: str = "role") -> Role:
    """A role by number (1-4) or by name in any case.

    Raises:
        BadRequest: anything else.
    """
    if isinstance(value, bool):
        pass
    elif isinstance(value, int):
        if value in Role._value2member_map_:
            return Role(value)
    elif isinstance(value, str):
        for role in Role:
            if value.strip().lower() in (role.name.lower(), str(role.value)):
                return role
    allowed = ", ".join(f"{r.value} {r.name}" for r in Role)
    raise BadRequest(f"{field} must be one of {allowed}", param=field)


def parse_speed(value: object, *, field: str = "speed") -> float | None:
    """A node's speed, or None where it is not given (None, or LMDeploy's -1).

    Raises:
        BadRequest: not a finite number greater than 0.
    """
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value == -1:
            return None
        try:
            speed = float(value)
        except OverflowError:
            speed = math.inf
        if math.isfinite(speed) and speed > 0:
            return speed
    raise BadRequest(f"{field} must be a finite number greater than 0", param=field)


def parse_models(value: object, *, field: str = "models") -> tuple[str, ...]:
    """A list of model names, each once, in the order given; `()` where it is not given.

    Raises:
        BadRequest: not a list of non-empty strings.
    """
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(m, str) and m and _is_text(m) for m in value):
        raise BadRequest(f"{field} must be a list of non-empty strings", param=field)
    return tuple(dict.fromkeys(value))


def parse_port(value: object, *, field: str) -> int | None:
    """A TCP port; None where it is not given. Raises BadRequest."""
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65535:
        return value
    raise BadRequest(f"{field} must be a whole number from 1 to 65535", param=field)


def parse_key(value: object, *, field: str = "key") -> str | None:
    """A key for the engine: it travels in a header, so it must be visible ASCII. Raises BadRequest."""
    if value is None or value == "":
        return None
    if not isinstance(value, str) or not _KEY(value):
        raise BadRequest(f"{field} must be a string of 1 to 4096 visible ASCII characters", param=field)
    return value


def parse_host_header(value: object, *, field: str = "host_header") -> str:
    """HOST or HOST:PORT in its one spelling; empty where it is not given. Raises BadRequest."""
    if value is None or value == "":
        return ""
    if isinstance(value, str) and not re.search(r"[/?#@\\]", value):
        try:
            # As a URL of no scheme's default port: one that is given stays.
            parts = urlsplit(f"//{value}")
            host = _normalise_ipv6(parts.hostname or "") if "[" in value else _normalise_host(parts.hostname or "")
            port = parts.port
            if port != 0 and not value.endswith(":") and value.isascii() and not re.search(r"\s", value):
                return host if port is None else f"{host}:{port}"
        except ValueError:
            pass
    raise BadRequest(f"{field} must be HOST or HOST:PORT, such as engine.example", param=field)


def _is_text(value: str) -> bool:
    """Whether it can be written as UTF-8: a lone surrogate can't."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
