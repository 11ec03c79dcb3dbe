"""What the benchmark computes from what it measures: no timing, no processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.routers import BadFile, about, load, order, save
from bench.routing.contenders import CONTENDERS
from bench.routing.engine import wants_stream
from bench.routing.figures import CPU, GAP, P50, Run, Sample, Spread, Target, percentile, ratios, spread
from bench.routing.load import chat, ended
from bench.routing.report import BEGIN, END, Axis, plots, replaced, shown, text
from bench.routing.tree import Stat, below, parse, ticks


def measured(**values: Any) -> dict[str, Any]:
    nothing = dict.fromkeys(("p50_ms", "p99_ms", "ttft_p50_ms", "ttft_p99_ms", "gap_p99_ms"))
    always = {"window_s": 4.0, "requests": 1000, "chunks": 0, "failures": {}, "reconnects": 0}
    return (
        nothing
        | always
        | {"trees_cpu_s": [0.5, 0.5], "load_cpu_s": 1.0, "machine_cpu_s": 2.0, "stolen_s": 0.0, "logged_bytes": 0}
        | values
    )


def run_of(*samples: tuple[int, str, dict[str, Any]]) -> Run:
    known = about(list(CONTENDERS))
    return Run({"cores": "2"}, known, samples=[Sample(nth, name, "one", one) for nth, name, one in samples])


# --- the process tree


def test_a_stat_line_is_read_whatever_the_name_holds() -> None:
    line = b"7 (a) b (c) S 3 7 7 0 -1 4194560 100 200 0 0 11 22 33 44 20 0 1 0 99 1000 50"
    assert parse(line) == Stat(parent=3, own=33, children=77)


def test_a_tree_counts_descendants_and_the_exited_but_not_its_root() -> None:
    stats = {
        1: Stat(parent=0, own=1000, children=1000),
        10: Stat(parent=1, own=500, children=4),  # the guard: it waited for orphans that used 4
        11: Stat(parent=10, own=20, children=3),
        12: Stat(parent=11, own=7, children=0),
        13: Stat(parent=1, own=9, children=0),
    }
    assert sorted(below(stats, 10)) == [11, 12]
    assert ticks(stats, 10) == 4 + 20 + 3 + 7


# --- the figures


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_a_percentile_is_the_nearest_rank(share: float, expected: float) -> None:
    assert percentile(list(range(100, 0, -1)), share) == expected


def test_a_spread_leaves_out_what_was_not_measured() -> None:
    assert spread([3.0, None, 1.0, 8.0]) == Spread(1.0, 3.0, 8.0)
    assert spread([None]) is None


def test_ratios_are_of_the_same_round_against_the_least_rival() -> None:
    own = {0: 2.0, 1: 3.0, 2: 5.0}
    assert ratios(own, [{0: 4.0, 1: 1.5}, {0: 1.0, 1: 6.0}]) == [2.0, 2.0]
    assert ratios(own, [{0: 0.0, 1: -1.0}]) == []


def test_cpu_is_that_of_the_router_and_direct_has_none() -> None:
    run = run_of(
        (0, "direct", measured(trees_cpu_s=[0.7])), (0, "smg", measured(trees_cpu_s=[0.3, 0.7], requests=2000))
    )
    assert run.values("one", "smg", CPU) == {0: pytest.approx(0.15)}
    assert run.values("one", "direct", CPU) == {}


def test_added_latency_is_against_direct_of_the_same_round() -> None:
    run = run_of(
        (0, "direct", measured(p50_ms=1.0)),
        (1, "direct", measured(p50_ms=2.0)),
        (0, "smg", measured(p50_ms=1.5)),
        (1, "smg", measured(p50_ms=2.25)),
        (2, "smg", measured(p50_ms=9.0)),  # no direct: nothing to compare with
    )
    assert run.values("one", "smg", P50) == {0: 0.5, 1: 0.25}


def test_direct_just_before_counts_more_than_that_of_the_round() -> None:
    run = run_of((0, "direct", measured(p50_ms=1.0)))
    run.samples.append(Sample(0, "smg", "one", measured(p50_ms=1.5), measured(p50_ms=1.25)))
    assert run.values("one", "smg", P50) == {0: 0.25}


def test_a_target_takes_the_best_router_in_rust_of_each_round() -> None:
    run = run_of(
        (0, "evenhand", measured(trees_cpu_s=[0.2, 0])),
        (0, "smg", measured(trees_cpu_s=[0.4, 0])),
        (0, "vllm-router", measured(trees_cpu_s=[0.25, 0])),
        (0, "nginx", measured(trees_cpu_s=[0.01, 0])),  # not one of them
    )
    target = Target("one", CPU, 0.8)
    reached = target.reached(run)
    assert reached is not None
    assert reached.median == pytest.approx(0.8)
    assert target.held(Spread(0.7, 0.79, 0.9))
    assert not target.held(Spread(0.7, 0.81, 0.9))
    assert Target("streams", GAP, 0.5, bound=True).reached(run) is None


def test_the_limits_of_load_and_engines_are_told() -> None:
    run = run_of(
        (0, "nginx", measured(load_cpu_s=3.5, logged_bytes=90_000)), (0, "smg", measured(trees_cpu_s=[3.9, 3.5]))
    )
    assert run.limits("one", "nginx") == ["load generator"]
    assert run.limits("one", "smg") == ["engines"]
    assert "load generator at the limit; logs its requests" in text(run)


def test_every_contender_begins_late_and_early() -> None:
    some = list(CONTENDERS.values())[:6]
    rounds = [order(some, nth, 3) for nth in range(3)]
    assert [one[0].name for one in rounds] == [some[0].name, some[2].name, some[4].name]
    assert all(sorted(c.name for c in one) == sorted(c.name for c in some) for one in rounds)


# --- load and engine


@pytest.mark.parametrize(
    "pieces", [[b"data: 1\n\ndata: 2\n\n"], [b"data: 1\n", b"\ndata: 2", b"\n\n"], [b"\n\n", b"a\n\n"]]
)
def test_events_are_counted_however_they_are_cut(pieces: list[bytes]) -> None:
    total, cut = 0, b""
    for piece in pieces:
        found, cut = ended(cut, piece)
        total += found
    assert total == 2


@pytest.mark.parametrize("size", [1024, 256 * 1024])
def test_a_chat_has_its_size_and_says_what_it_wants(size: int) -> None:
    assert len(chat(size, False)) == size
    assert not wants_stream(chat(size, False))
    assert wants_stream(chat(size, True))
    assert wants_stream(b'{"stream":true}')
    assert not wants_stream(b"{}")


# --- the report


def test_a_run_comes_back_from_its_file(tmp_path: Path) -> None:
    run = run_of((0, "direct", measured()), (0, "smg", measured(p50_ms=0.25)))
    save(run, tmp_path / "run.json")
    assert load(tmp_path / "run.json") == run
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(BadFile):
        load(tmp_path / "other.json")


def test_a_figure_shows_its_spread_only_where_there_is_one() -> None:
    assert shown(Spread(1.0, 1234.5678, 2000.0), 2) == "1,234.57 (1.00 to 2,000.00)"
    assert shown(Spread(1.0, 1.0, 1.0), 0) == "1"
    assert shown(None, 1) == "-"


def test_an_axis_has_whole_decades_and_a_floor() -> None:
    axis = Axis([-3.0, 0.02, 7.0], 0.01)
    assert axis.ticks() == pytest.approx([0.01, 0.1, 1.0, 10.0])
    assert axis.x(-3.0) == axis.x(0.01) < axis.x(0.1) < axis.x(10.0)


def test_only_the_block_of_the_page_is_replaced() -> None:
    page = f"before\n{BEGIN}\nold \\1\n{END}\nafter\n"
    assert replaced(page, f"{BEGIN}\nnew \\2\n{END}") == f"before\n{BEGIN}\nnew \\2\n{END}\nafter\n"
    with pytest.raises(ValueError, match="has no"):
        replaced("nothing", "block")


def test_what_is_missing_is_named_and_one_round_can_be_drawn() -> None:
    run = run_of((0, "direct", measured(p50_ms=1.0, p99_ms=1.0)), (0, "smg", measured(p50_ms=0.9, p99_ms=2.0)))
    run.missing["nginx"] = "not installed"
    assert "- nginx: not measured: not installed" in text(run)
    assert all(drawing.startswith("<svg") and "smg" in drawing for drawing in plots(run).values())
