"""What a snapshot offers: candidates by model and role, speeds, the list of models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.errors import ModelNotFound, NoNodeAvailable
from app.nodes import Breaker, Node, Role, State
from app.store.scripts import packed
from app.store.snapshot import Snapshot, least_bad

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
    assert (pool.words, pool.packed) == (5, packed(2, A, B, "4.0", "4.0"))


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


# --- breakers ---------------------------------------------------------------------------------------


def broken(url: str, breaker: Breaker = Breaker.OPEN, state: State = State.READY, opens: int = 1) -> Node:
    return replace(node(url, state), breaker=breaker, breaker_opens=opens)


@pytest.mark.parametrize("breaker", [Breaker.OPEN, Breaker.HALF_OPEN])
def test_a_node_with_a_broken_breaker_is_no_candidate_beside_whole_ones(breaker: Breaker) -> None:
    known = snapshot(broken(A, breaker), node(B), node(C))
    assert known.pool("m", Role.Hybrid).urls == (B, C)
    assert known.broken == {A}


def test_of_a_pool_that_is_all_broken_the_least_bad_are_tried() -> None:
    known = snapshot(broken(A, opens=2), broken(B, Breaker.HALF_OPEN, opens=1), broken(C, opens=1))
    assert known.pool("m", Role.Hybrid).urls == (B, C)
    assert known.broken == {A, B, C}
    assert snapshot(broken(A, opens=9)).pool("m", Role.Hybrid).urls == (A,)
    assert least_bad([broken(A, opens=3), broken(B, opens=2), broken(C, opens=2)])[0].url == B


def test_a_broken_ready_node_goes_before_a_pending_one_and_never_one_that_is_down() -> None:
    assert snapshot(broken(A), node(B, State.PENDING)).pool("m", Role.Hybrid).urls == (A,)
    assert snapshot(broken(A, state=State.DOWN), node(B, State.PENDING)).pool("m", Role.Hybrid).urls == (B,)
    assert snapshot(broken(A, state=State.PENDING), node(B, State.PENDING)).pool("m", Role.Hybrid).urls == (B,)
    with pytest.raises(NoNodeAvailable, match="alive"):
        snapshot(broken(A, state=State.DOWN), broken(B, state=State.DRAINING)).pool("m", Role.Hybrid)


def test_each_model_and_role_has_a_least_bad_node_of_its_own() -> None:
    whole = replace(node(B, State.READY, "other"), role=Role.Hybrid)
    prefill = replace(broken(C), role=Role.Prefill)
    known = snapshot(broken(A), whole, prefill)
    assert known.pool("m", Role.Hybrid).urls == (A,)
    assert known.pool("other", Role.Hybrid).urls == (B,)
    assert known.pool("m", Role.Prefill).urls == (C,)


def test_half_open_are_ready_nodes_of_the_model_and_the_roles_that_are_half_open() -> None:
    half = Breaker.HALF_OPEN
    known = snapshot(
        broken(A, half),
        broken(B),
        node(C),
        broken("http://d", half, State.DOWN),
        broken("http://e", half, State.DRAINING),
        replace(broken("http://f", half), role=Role.Decode),
        replace(broken("http://g", half), models=("other",)),
    )
    assert known.half_open("m", Role.Hybrid) == [A]
    assert sorted(known.half_open("m", Role.Hybrid, Role.Decode)) == [A, "http://f"]
    assert known.half_open("other", Role.Hybrid) == ["http://g"]
    assert known.half_open("x", Role.Hybrid) == []


def test_a_pool_of_one_is_that_node_whatever_it_is() -> None:
    known = snapshot(broken(A, Breaker.HALF_OPEN), node(B, speed=2.0))
    pool = known.only(A)
    assert (pool.version, pool.urls, pool.speeds) == (7, (A,), (1.0,))
    with pytest.raises(KeyError):
        known.only(C)


def test_what_is_left_of_a_broken_pool_is_only_what_was_in_it() -> None:
    known = snapshot(broken(A, opens=1), broken(B, opens=1), broken(C, opens=2))
    pool = known.pool("m", Role.Hybrid)
    left = known.without(pool, {A})
    assert left is not None and left.urls == (B,)
    assert known.without(left, {B}) is None
