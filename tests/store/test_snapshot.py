"""What a snapshot offers: candidates by model and role, speeds, the list of models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.errors import ModelNotFound, NoNodeAvailable
from app.nodes import Node, Role, State
from app.store.snapshot import Snapshot

A, B, C = "http://a", "http://b", "http://c"


def snapshot(*nodes: Node, version: int = 7) -> Snapshot:
    return Snapshot(version, {node.url: replace(node, order=i) for i, node in enumerate(nodes)})


def node(url: str, state: State = State.READY, *models: str, speed: float | None = None) -> Node:
    return Node(url, models=models or ("m",), state=state, speed=speed)


def test_the_candidates_are_the_ready_nodes_in_order_of_registration() -> None:
    pool = snapshot(node(C), node(A, State.DOWN), node(B)).pool("m", Role.Hybrid)
    assert (pool.urls, pool.version) == ((C, B), 7)


@pytest.mark.parametrize("state", [State.DOWN, State.GONE, State.ASLEEP, State.DRAINING])
def test_only_ready_and_pending_nodes_are_candidates(state: State) -> None:
    with pytest.raises(NoNodeAvailable, match="alive") as caught:
        snapshot(node(A, state)).pool("m", Role.Hybrid)
    assert 1 <= (caught.value.retry_after_s or 0) <= 60
    assert snapshot(node(A, state), node(B, State.PENDING)).pool("m", Role.Hybrid).urls == (B,)


def test_pending_nodes_are_a_last_resort() -> None:
    assert snapshot(node(A, State.PENDING), node(B)).pool("m", Role.Hybrid).urls == (B,)
    assert snapshot(node(A, State.PENDING), node(B, State.DOWN)).pool("m", Role.Hybrid).urls == (A,)


def test_a_node_of_another_model_or_role_is_no_candidate() -> None:
    known = snapshot(node(A, State.READY, "a", "b"), node(B, State.READY, "b", "c"))
    assert known.pool("a", Role.Hybrid).urls == (A,)
    assert known.pool("b", Role.Hybrid).urls == (A, B)
    assert known.pool("c", Role.Hybrid).urls == (B,)
    with pytest.raises(NoNodeAvailable, match="no Prefill node"):
        known.pool("a", Role.Prefill)


def test_an_unknown_model_is_not_found_and_no_node_at_all_is_not_available() -> None:
    with pytest.raises(ModelNotFound) as caught:
        snapshot(node(A)).pool("x", Role.Hybrid)
    assert caught.value.param == "model"
    with pytest.raises(NoNodeAvailable, match="no node is registered"):
        snapshot().pool("x", Role.Hybrid)
    # A model whose only node is gone is known still: it may come back.
    with pytest.raises(NoNodeAvailable, match="alive"):
        snapshot(node(A, State.GONE)).pool("m", Role.Hybrid)


def test_names_that_clients_make_up_are_not_kept() -> None:
    known = snapshot(node(A))
    for i in range(100):
        with pytest.raises(ModelNotFound):
            known.pool(f"made-up-{i}", Role.Hybrid)
    assert known._pools == {}
    assert known.pool("m", Role.Hybrid) is known.pool("m", Role.Hybrid)


def test_a_long_made_up_name_is_shortened_in_the_answer() -> None:
    with pytest.raises(ModelNotFound) as caught:
        snapshot(node(A)).pool("x" * 100_000, Role.Hybrid)
    assert len(caught.value.message) < 300


def test_missing_speeds_are_the_average_of_the_candidates_own() -> None:
    """Of those that are candidates now: a fast node that is down does not make the unknown ones fast."""
    known = snapshot(node(A, speed=4.0), node(B), node(C, State.DOWN, speed=100.0))
    pool = known.pool("m", Role.Hybrid)
    assert pool.speeds == (4.0, 4.0)
    assert pool.arguments == (A, "4.0", B, "4.0")


def test_models_are_listed_once_in_order_of_registration_without_those_of_gone_nodes() -> None:
    known = snapshot(
        node(C, State.READY, "b", "a"),
        node(A, State.DOWN, "a", "c"),
        node(B, State.GONE, "d"),
        node("http://d", State.ASLEEP, "e"),
        node("http://e", State.DRAINING, "f"),
        node("http://f", State.PENDING, "g"),
    )
    assert known.models() == ["b", "a", "c", "e", "f", "g"]
    assert known.knows("d") and not known.knows("x")


def test_a_snapshot_shows_no_keys() -> None:
    assert repr(Snapshot(3, {A: node(A)}, {A: "secret"})) == "<Snapshot version=3 nodes=1>"
