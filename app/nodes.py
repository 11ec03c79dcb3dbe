"""Nodes: what an engine address is, which roles and states it can have, and how it is named.

Pure values and rules; it must not know Redis, HTTP or a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from ipaddress import ip_address
from urllib.parse import urlsplit

from app.errors import BadRequest


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
    GONE = "gone"  # down for longer than the heart-beat expiration: hidden, still probed
    DRAINING = "draining"  # no new requests, finish the old, then removed


@dataclass(frozen=True, slots=True)
class Node:
    """One engine address as the registry knows it.

    `order` is the registry version at which the node first came (registration order);
    `incarnation` is the version of its latest registration: a probe's verdict on an older
    incarnation is void. `life` is the version at which it was registered or came back: links and
    sessions of an older life are void. `bootstrap_port` is where a prefill node tells of its KV cache.
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


def normalise_url(value: object, *, field: str = "url") -> str:
    """The one spelling of a node URL: scheme and host in lower case, no default port, no final slash.

    Raises:
        BadRequest: not http(s), no host, a bad port, or user, query or fragment present.
    """
    if not isinstance(value, str) or not value.strip():
        raise BadRequest(f"{field} must be a non-empty string such as http://10.0.0.5:23333", param=field)
    text = value.strip()
    if any(c.isspace() or ord(c) < 33 or ord(c) > 126 for c in text):
        raise BadRequest(f"{field} holds characters that a URL can't have", param=field)
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
    if "\\" in text or "//" in parts.path or any(p in (".", "..") for p in parts.path.split("/")):
        raise BadRequest(f"{field} has a path with empty, . or .. parts", param=field)
    scheme = parts.scheme.lower()
    host = parts.hostname
    if "[" in parts.netloc:
        try:
            host = f"[{ip_address(host).compressed}]"
        except ValueError as e:
            raise BadRequest(f"{field} has a host that is no IPv6 address", param=field) from e
    default_port = 443 if scheme == "https" else 80
    authority = host if port in (None, default_port) else f"{host}:{port}"
    return f"{scheme}://{authority}{parts.path.rstrip('/')}"


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


def _is_text(value: str) -> bool:
    """Whether it can be written as UTF-8: a lone surrogate can't."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
