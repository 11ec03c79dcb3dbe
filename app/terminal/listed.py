"""The nodes of a `state` in the form of `/nodes/status`, as far as the view has it."""

from __future__ import annotations

from typing import Any

from app.nodes import Role, State


def listed(state: dict[str, Any], *, gone: bool) -> dict[str, dict[str, Any]]:
    return {
        node["url"]: {
            "role": int(Role[node["role"]]),
            "models": node["models"],
            "unfinished": node["unfinished"],
            "latency": node["latency_s"][::-1],
            "speed": node["speed"],
            "state": node["state"],
            "reason": node["reason"],
            "role_name": node["role"],
            "source": node.get("source"),  # an older deployment does not say it
        }
        for node in state["nodes"]
        if gone or node["state"] != State.GONE
    }
