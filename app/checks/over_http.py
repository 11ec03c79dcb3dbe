"""What a deployment says of itself over HTTP: whether it is ready, and whether it can use its Redis.

Owns these questions and rules; it must not know Redis.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from app import __version__
from app.checks.finding import Finding, bad, ok, warn
from app.terminal.by_url import ByUrl, Refused
from app.terminal.failures import CommandError
from app.terminal.words import printable

TIMEOUT_S = 10.0
NEEDS_REDIS = (
    "version, role, persistence, eviction and memory of Redis",
    "clock and latency between this host and Redis",
    "key layout, types and unknown keys",
    "ledgers without a worker",
    "nodes, asked from this host",
    "limits of this host and of its workers",
)


def ready(deployment: ByUrl) -> Finding:
    """Raises CommandError where it can't be reached."""
    try:
        deployment.ask("GET", "/ready", timeout_s=TIMEOUT_S)
    except Refused as e:
        if e.status != 503:
            raise
        return bad(
            "http.ready",
            printable(e).removeprefix("503 "),
            "/ready is what a balancer goes by; the lines below say more",
        )
    return ok("http.ready", "it can serve")


def health(deployment: ByUrl) -> Finding:
    """What its own worker knows of each role, where the state can't be had."""
    try:
        roles = deployment.ask("GET", "/health?detail=1", timeout_s=TIMEOUT_S)["roles"]
        told = [
            f"{role}: {', '.join(f'{n} {state}' for state, n in states.items())}"
            for role, states in roles.items()
            if states
        ]
    except (CommandError, LookupError, TypeError, AttributeError) as e:
        return warn("http.health", f"/health does not say how its nodes are: {printable(e)}", "is it an Evenhand?")
    return ok("http.health", printable("; ".join(told) or "no node"))


def judge(state: Mapping[str, Any]) -> Iterator[Finding]:
    redis = state["redis"]
    if redis["up"]:
        yield ok("http.redis", "the worker that answered can use Redis")
    else:
        yield bad(
            "http.redis",
            f"the worker that answered can't use Redis: {redis['reason']}",
            "mend Redis; until then every worker decides by its own counts",
        )
    if state["version"] != __version__:
        yield warn(
            "http.version",
            f"it is Evenhand {state['version']}, this command {__version__}",
            "install the same version here; what a newer one knows may be missing below",
        )
