"""The nodes of a deployment: who is in trouble, which roles and models have nobody, who answers this host.

Rules over a `state` document (docs/decisions/0022) and over what `engines` found; no I/O. It must not know where the
document came from.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from app.checks.finding import Finding, bad, named, ok, warn
from app.nodes import Breaker, State, about_itself
from app.terminal.words import count

TOLD = 20

ANSWERS = ""
"""What `engines.ask` says of a node that is well."""

MEND = {
    State.DOWN: "start the engine, or take it out: evenhand nodes remove",
    State.GONE: "start the engine, or take it out: evenhand nodes remove",
    State.PENDING: "it becomes ready with its first good answer to /health; look at its log and its address",
    State.ASLEEP: "it says so itself: wake it up, or wait until it has loaded its model",
}

LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
KEY_REFUSED = re.compile(r"\b(HTTP|answered) 40[13]\b").search
WRONG_KEY = "it refuses our key: evenhand nodes add URL --key KEY, or --engine-key of `serve`, which is for all"


def judge(state: Mapping[str, Any], asked: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """`asked`: what `engines.ask` found, None where nobody was asked from here."""
    nodes: list[Mapping[str, Any]] = state["nodes"]
    if not nodes:
        yield bad(
            "nodes.registered", "no node is registered", "evenhand nodes add URL, or start engines with --proxy-url"
        )
        return
    states = Counter(node["state"] for node in nodes)
    ready = states[State.READY]
    tally = ", ".join(f"{number} {name}" for name, number in states.most_common())
    if ready:
        yield ok("nodes.registered", f"{count(len(nodes), 'node')}: {tally}")
    else:
        yield bad("nodes.registered", f"{count(len(nodes), 'node')}, none is ready: {tally}", "see below, node by node")
    troubles = [finding for node in nodes if (finding := _trouble(node, asked))]
    yield from troubles[:TOLD]
    if len(troubles) > TOLD:
        more = len(troubles) - TOLD
        yield warn("nodes.trouble", f"{more} more nodes are in trouble", "evenhand nodes list --all shows all of them")
    yield from _twice(nodes)
    if asked is not None:
        yield from _answers(asked)
    if ready:
        yield from _roles(state)
        yield from _models(state)


def _trouble(node: Mapping[str, Any], asked: Mapping[str, str] | None) -> Finding | None:
    url, state, reason = node["url"], node["state"], about_itself(node["reason"], node["url"])
    seen = asked.get(url) if asked is not None else None
    says = f"{url} is {state}" + (f": {reason}" if reason else "")
    if state in MEND:
        if seen == ANSWERS:
            return warn("nodes.trouble", f"{says}; it answers this host", "the workers ask it again within seconds")
        return warn(
            "nodes.trouble",
            says + (f"; asked from here: {seen}" if seen and seen != reason else ""),
            WRONG_KEY if KEY_REFUSED(f"{reason} {seen}") else MEND[State(state)],
        )
    if node["breaker"] != Breaker.CLOSED:
        return warn(
            "nodes.trouble",
            f"{url}: its breaker is {node['breaker'].replace('_', '-')}, after failures of requests in a row",
            "look at the engine's log; one request tries it when --breaker-open-s is over",
        )
    if state == State.READY and seen:
        return warn(
            "nodes.trouble",
            f"{url} is ready, but not for this host: {seen}",
            WRONG_KEY if KEY_REFUSED(seen) else "if workers run here: name resolution, firewall",
        )
    return None


def _twice(nodes: list[Mapping[str, Any]]) -> Iterator[Finding]:
    """Nodes of this host under two names."""
    alike: dict[str, list[str]] = {}
    for node in nodes:
        scheme, _, rest = str(node["url"]).partition("://")
        host = next((name for name in LOCAL_HOSTS if rest == name or rest.startswith((f"{name}:", f"{name}/"))), None)
        if host is not None:
            alike.setdefault(f"{scheme}://{rest.removeprefix(host)}", []).append(node["url"])
    for urls in alike.values():
        if len(urls) > 1:
            yield warn(
                "nodes.twice",
                f"most likely one engine, which gets twice its share: {' and '.join(urls)}",
                f"if so, take one out: evenhand nodes remove {urls[-1]}",
            )


def _answers(asked: Mapping[str, str]) -> Iterator[Finding]:
    well = sum(what == ANSWERS for what in asked.values())
    if well == len(asked):
        yield ok("nodes.answers", f"{count(well, 'node')} of {len(asked)} answer this host's GET /health")


def _roles(state: Mapping[str, Any]) -> Iterator[Finding]:
    """No node of a role that is needed, or nodes of one that is never called."""
    there = Counter(node["role"] for node in state["nodes"])
    ready = Counter(node["role"] for node in state["nodes"] if node["state"] == State.READY)
    text = ", ".join(f"{ready[role]} of {number} {role}" for role, number in sorted(there.items()))
    lacking = []
    for group in _groups(state):
        if not any(ready[role] for role in group):
            lacking.append(" or ".join(group))
    if lacking:
        yield bad(
            "nodes.roles",
            f"no ready node of role {' and none of role '.join(lacking)}; ready are {text}",
            "evenhand nodes add URL --role ROLE, or mend those that are registered",
        )
    elif there["Encode"] and not ready["Encode"]:
        yield bad(
            "nodes.roles", f"no encoder is ready, so requests with media fail; ready are {text}", "mend the encoders"
        )
    elif there["Prefill"] and not _split(state):
        yield warn(
            "nodes.roles",
            f"{count(there['Prefill'], 'Prefill node')} never called: every node does prefill and decode here",
            "serve with --serving-strategy DistServe, or take them out",
        )
    elif there["Hybrid"] and _split(state):
        yield warn(
            "nodes.roles",
            f"{count(there['Hybrid'], 'Hybrid node')} beside separate prefill and decode: "
            "called with --prefill-fallback only",
            "take them out, or give them a role: evenhand nodes add URL --role Decode",
        )
    else:
        yield ok("nodes.roles", f"ready are {text}")


def _split(state: Mapping[str, Any]) -> bool:
    """Whether prefill and decode are apart, as the workers say, else as the nodes look."""
    if state.get("serving"):
        return bool(state["serving"] == "DistServe")
    roles = {node["role"] for node in state["nodes"]}
    return "Prefill" in roles and "Hybrid" not in roles


def _groups(state: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Roles of which one of each group is needed to answer a request."""
    return (("Prefill",), ("Decode",)) if _split(state) else (("Hybrid", "Decode"),)


def _models(state: Mapping[str, Any]) -> Iterator[Finding]:
    lacking: list[str] = []
    hoping: list[str] = []
    single: list[str] = []
    for model in _answered_models(state):
        for group in _groups(state):
            states = Counter(
                node["state"] for node in state["nodes"] if node["role"] in group and model in node["models"]
            )
            name = f"{model} ({' or '.join(group)})"
            if not states[State.READY]:
                (hoping if states[State.PENDING] else lacking).append(name)
            elif states[State.READY] == 1:
                single.append(model)
    mend = "start an engine that has it, or mend its nodes"
    if lacking:
        yield bad("nodes.models", f"models without a ready node: {named(lacking)}", mend)
    if hoping:
        yield warn("nodes.models", f"models with pending nodes only, used as a last resort: {named(hoping)}", mend)
    if single:
        yield ok("nodes.models", f"served by one node only: {named(dict.fromkeys(single))}")
    if not lacking and not hoping and not single:
        yield ok("nodes.models", "every model has two ready nodes or more")


def _answered_models(state: Mapping[str, Any]) -> list[str]:
    """Models that requests may name; encoders have some that only they know."""
    return list(dict.fromkeys(m for node in state["nodes"] if node["role"] != "Encode" for m in node["models"]))
