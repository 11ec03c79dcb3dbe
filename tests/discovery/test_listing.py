"""Whose a node is, and what a source may do with it: the table of docs/discovery.md."""

from __future__ import annotations

from typing import Any

import pytest

from app.discovery.listing import Drain, Listed, Register, decide
from app.nodes import Node, Role, State

A = "http://10.0.0.1:8000"
MINE, OTHER = "dns://engine:8000", "file:///nodes.yaml"


def registered(**fields: Any) -> Node:
    found = {"source": MINE, "models": ("m",), "asked": True, "incarnation": 7, "state": State.READY} | fields
    return Node(A, **found)  # type: ignore[arg-type]


def steps(node: Node | None, *, listed: bool, gone: bool = False, has: str | None = None, **says: Any) -> str:
    nodes = {} if node is None else {A: node}
    found = list(
        decide(MINE, {A: Listed(A, **says)} if listed else {}, {A} if gone else (), nodes, {A: has} if has else {})
    )
    assert len(found) <= 1
    if not found:
        return "nothing"
    if isinstance(found[0], Drain):
        assert found[0] == Drain(A, "7")
        return "drain"
    assert found[0] == Register(Listed(A, **says))
    return "register"


@pytest.mark.parametrize(
    ("owner", "listed", "gone"),
    # owner of the node; what a source does that lists it, and one that lists it no longer
    [
        (None, "register", "nothing"),
        ({"source": MINE}, "nothing", "drain"),
        ({"source": OTHER}, "nothing", "nothing"),
        ({"source": ""}, "nothing", "nothing"),
        ({"source": "", "static": True}, "nothing", "nothing"),
        ({"source": "", "state": State.GONE}, "nothing", "nothing"),
    ],
)
def test_a_source_touches_only_its_own(owner: dict[str, Any] | None, listed: str, gone: str) -> None:
    node = None if owner is None else registered(**owner)
    assert steps(node, listed=True) == listed
    assert steps(node, listed=False, gone=True) == gone
    assert steps(node, listed=False) == "nothing", "left out, but not for long enough"


@pytest.mark.parametrize(
    ("state", "reason", "listed", "gone"),
    [
        (State.PENDING, "", "nothing", "drain"),
        (State.READY, "", "nothing", "drain"),
        (State.DOWN, "connection refused", "nothing", "drain"),
        (State.ASLEEP, "sleeping", "nothing", "drain"),
        (State.GONE, "connection refused", "register", "drain"),
        (State.DRAINING, f"no longer listed by {MINE}", "register", "nothing"),
        (State.DRAINING, "", "nothing", "nothing"),  # by hand: it goes on to its end
        (State.DRAINING, "connection refused", "nothing", "nothing"),
    ],
)
def test_what_is_done_in_each_state(state: State, reason: str, listed: str, gone: str) -> None:
    node = registered(state=state, reason=reason)
    assert steps(node, listed=True) == listed
    assert steps(node, listed=False, gone=True) == gone


@pytest.mark.parametrize(
    ("node", "has", "says", "step"),
    [
        ({}, None, {}, "nothing"),
        ({}, None, {"role": Role.Decode}, "register"),
        ({}, None, {"speed": 2.0}, "register"),
        ({"speed": 2.0}, None, {"speed": 2.0}, "nothing"),
        ({"speed": 2.0}, None, {}, "register"),
        ({}, None, {"host_header": "h"}, "register"),
        ({}, None, {"bootstrap_port": 1}, "register"),
        ({}, None, {"key": "k"}, "register"),
        ({}, "k", {"key": "k"}, "nothing"),
        ({}, "k", {"key": "other"}, "register"),
        ({}, "k", {}, "register"),
        # models: the engine's own, whatever they are by now, or those that are listed
        ({"models": ("of", "the engine")}, None, {}, "nothing"),
        ({"asked": False}, None, {}, "register"),
        ({"asked": False}, None, {"models": ("m",)}, "nothing"),
        ({"asked": False}, None, {"models": ("m", "n")}, "register"),
        ({"asked": True}, None, {"models": ("m",)}, "register"),
    ],
)
def test_what_is_listed_otherwise_is_registered_anew(
    node: dict[str, Any], has: str | None, says: dict[str, Any], step: str
) -> None:
    assert steps(registered(**node), listed=True, has=has, **says) == step


def test_a_key_is_never_shown() -> None:
    assert "sk-1" not in repr(Register(Listed(A, key="sk-1")))
