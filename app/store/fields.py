"""A node as the fields of HASH node:<url>, readable with redis-cli, and back.

Pure: it must not know Redis.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from app.errors import BadRequest
from app.nodes import Breaker, Node, Role, State, parse_host_header, parse_models, parse_speed


def node_to_fields(node: Node) -> dict[str, str]:
    """The fields of HASH node:<url>, readable with redis-cli."""
    return {
        "role": str(int(node.role)),
        "role_name": node.role.name,
        "models": json.dumps(list(node.models), ensure_ascii=False),
        "speed": "" if node.speed is None else repr(node.speed),
        "state": node.state.value,
        "reason": node.reason,
        "static": "1" if node.static else "0",
        "asked": "1" if node.asked else "0",
        "order": str(node.order),
        "incarnation": str(node.incarnation),
        "registered_at_ms": str(node.registered_at_ms),
        "state_since_ms": str(node.state_since_ms),
        "drain_until_ms": str(node.drain_until_ms),
        "life": str(node.life),
        "breaker": node.breaker.value,
        "breaker_until_ms": str(node.breaker_until_ms),
        "breaker_opens": str(node.breaker_opens),
        "bootstrap_port": "" if node.bootstrap_port is None else str(node.bootstrap_port),
        "host_header": node.host_header,
        "source": node.source,
    }


def node_from_fields(url: str, fields: Mapping[str, str]) -> Node | None:
    """The node in HASH node:<url>; None where the hash is missing or damaged."""
    try:
        return Node(
            url=url,
            role=Role(int(fields["role"])),
            models=parse_models(json.loads(fields["models"])),
            speed=parse_speed(float(fields["speed"])) if fields.get("speed") else None,
            state=State(fields["state"]),
            static=fields.get("static") == "1",
            asked=fields.get("asked") == "1",
            order=int(fields["order"]),
            incarnation=int(fields["incarnation"]),
            registered_at_ms=int(fields.get("registered_at_ms", 0)),
            state_since_ms=int(fields.get("state_since_ms", 0)),
            drain_until_ms=int(fields.get("drain_until_ms", 0)),
            reason=fields.get("reason", "").encode().decode(),  # raises where it is no UTF-8
            life=int(fields.get("life", fields["incarnation"])),
            bootstrap_port=int(fields["bootstrap_port"]) if fields.get("bootstrap_port") else None,
            host_header=parse_host_header(fields.get("host_header")),
            source=fields.get("source", "").encode().decode(),
            breaker=Breaker(fields.get("breaker", "closed")),
            breaker_until_ms=int(fields.get("breaker_until_ms", 0)),
            breaker_opens=int(fields.get("breaker_opens", 0)),
        )
    except (KeyError, ValueError, TypeError, RecursionError, BadRequest):
        return None
