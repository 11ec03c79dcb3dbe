"""The picture of `evenhand top`: what is shown in so many columns and lines."""

from __future__ import annotations

from typing import Any

import pytest
from rich.cells import cell_len

from app.terminal.feed import Seen
from app.terminal.node_table import bar, loads_of, sparkline
from app.terminal.picture import draw
from tests.support.contract import decision, many, node, state, worker


def picture(said: dict[str, Any], *, width: int = 80, height: int | None = None, **given: Any) -> list[str]:
    sort = given.pop("sort", "trouble")
    return [line.plain.rstrip() for line in draw(Seen(said, **given), width=width, height=height, sort=sort)]


def busy(**given: Any) -> dict[str, Any]:
    """Something of everything."""
    return state(
        node(
            "http://10.0.0.5:23333",
            speed=2.0,
            unfinished=8,
            latency_s=[0.1, 0.2, 0.4, 0.8],
            requests=90,
            share=0.75,
        ),
        node("http://10.0.0.6:23333", speed=1.0, unfinished=2, requests=30, share=0.25),
        node("http://p:1", role="Prefill", requests=120, share=1.0),
        node("http://down:1", state="down", reason="refused the connection"),
        workers=[worker("vm-11-aa", unfinished=10, nodes={"http://a": 9, "http://b": 1, "http://c": 0})],
        encoders={"cursor": 1, "next": "http://e2:1", "urls": ["http://e1:1", "http://e2:1"]},
        links=[
            {"prefill": "http://p:1", "decode": "http://d1:1", "state": "connected"},
            {"prefill": "http://p:1", "decode": "http://d2:1", "state": "failed"},
            {"prefill": "http://q:1", "decode": "http://d2:1", "state": "connecting"},
        ],
        **given,
    )


def test_80_columns() -> None:
    assert picture(busy(time=0.0))[1:] == [
        "3/4 nodes ready  10 unfinished on nodes  120 given/min  1 worker  1 model",
        "unfinished: a split request counts on each of its nodes",
        "",
        "nodes",
        "STATE     ROLE    NODE                       LOAD   UNFIN LATENCY   MEAN_S 1MIN",
        "down      Hybrid  down:1: refused the connection",
        "ready     Hybrid  10.0.0.5:23333             ██████     8 ▁▂▄█       0.375  75%",
        "ready     Hybrid  10.0.0.6:23333             ███        2                -  25%",
        "ready     Prefill p:1                                   0                - 100%",
        "",
        "workers",
        "vm-11-aa  10 unfinished on 2 nodes  lease 7.2 s left",
        "",
        "encoders, in the order of the round",
        "   e1:1  ▶ e2:1",
        "",
        "links: prefill down, decode across",
        "            1  2",
        "http://p:1  ●  ✗",
        "http://q:1  ·  ◐",
        "  1 http://d1:1",
        "  2 http://d2:1",
    ]


def test_120_columns_have_room_for_speed_and_the_whole_window() -> None:
    lines = picture(busy(), width=120)
    (head,) = (line for line in lines if line.startswith("STATE"))
    (first,) = (line for line in lines if "10.0.0.5" in line)
    assert head.split() == ["STATE", "ROLE", "NODE", "LOAD", "UNFIN", "SPEED", "LATENCY", "MEAN_S", "1MIN"]
    assert first.split() == ["ready", "Hybrid", "10.0.0.5:23333", "█" * 12, "8", "2", "▁▂▄█", "0.375", "75%"]
    assert "REASON" in "".join(picture(busy(), width=140))


@pytest.mark.parametrize("width", [20, 40, 60, 69, 70, 80, 99, 100, 120, 125, 126, 200, 400])
@pytest.mark.parametrize("height", [1, 5, 10, 17, 24, 50, None])
def test_the_picture_never_is_larger_than_the_terminal(width: int, height: int | None) -> None:
    said = busy()
    said["nodes"] += many(50)["nodes"]
    said["nodes"][0]["url"] = f"http://{'long' * 50}:1"
    lines = picture(said, width=width, height=height, decisions=(decision(1),) * 30)
    assert max(map(cell_len, lines)) <= max(width, 40)
    assert height is None or len(lines) <= height


def test_what_does_not_fit_is_said() -> None:
    lines = picture(many(100), height=24)
    assert len(lines) == 24
    shown = sum(line.startswith("ready") for line in lines)
    assert f"  {100 - shown} more nodes" in lines
    assert "workers" in lines  # nobody takes all the room


def test_sections_without_room_are_named() -> None:
    lines = picture(busy(), height=15, decisions=(decision(1),) * 9)
    assert lines[-1] == "no room for: workers, encoders, links"
    assert "latest decisions: a sample, at most 5 a second of each worker" in lines


def test_nodes_in_trouble_come_first_and_the_others_as_they_are_registered() -> None:
    said = state(
        node("http://1"),
        node("http://2", state="pending"),
        node("http://3", breaker="half_open", failures=5),
        node("http://4"),
        node("http://5", state="gone"),
        node("http://6", state="down"),
    )
    order = [line.split()[2] for line in picture(said) if line.split()[1:2] == ["Hybrid"]]
    assert [url[0] for url in order] == ["6", "5", "3", "2", "1", "4"]


def test_sorting_by_load_and_by_name() -> None:
    said = state(node("http://b", speed=4.0, unfinished=4), node("http://c", speed=1.0, unfinished=2), node("http://a"))

    def order(sort: str) -> list[str]:
        return [line.split()[2] for line in picture(said, sort=sort) if line.startswith("ready")]

    assert order("load") == ["c", "b", "a"]
    assert order("name") == ["a", "b", "c"]


def test_a_node_without_a_speed_counts_as_the_average_of_the_others() -> None:
    nodes = [
        node("http://a", speed=1.0, unfinished=2),
        node("http://b", speed=3.0, unfinished=3),
        node("http://c", unfinished=4),
    ]
    assert loads_of(nodes) == {"http://a": 2.0, "http://b": 1.0, "http://c": 2.0}


def test_hostile_names_are_made_printable_everywhere() -> None:
    evil = "e\x1b[2J\x9b1m\n\u202e\r\x07"
    said = state(
        node(f"http://{evil}", reason=evil, role=evil, state=evil, models=[evil]),
        workers=[worker(evil)],
        encoders={"cursor": 0, "next": evil, "urls": [evil]},
        links=[{"prefill": evil, "decode": evil, "state": evil}],
        version=evil,
        strategy=evil,
        serving=evil,
        redis={"up": False, "reason": evil},
    )
    leg = {"node": evil, "stage": evil, "status": 500, "seconds": 1.0, "error": evil}
    one = decision(1, model=evil, outcome=evil, legs=[leg], node=evil)
    for width in (40, 80, 160):
        lines = picture(said, width=width, decisions=(one,), trouble=evil)
        assert all(line.isprintable() for line in lines), lines


def test_names_of_wide_letters_keep_the_columns() -> None:
    said = state(node("http://節点節点節点節点節点節点節点節点:1", unfinished=7), node("http://b", unfinished=7))
    wide, narrow = (line for line in picture(said) if line.startswith("ready"))
    assert cell_len(wide) == cell_len(narrow)


def test_the_end_of_a_long_address_stays() -> None:
    (line,) = (li for li in picture(state(node(f"http://{'x' * 60}.example:8001"))) if li.startswith("ready"))
    assert ".example:8001 " in line and "…" in line


def test_an_open_breaker_is_told_instead_of_ready() -> None:
    lines = picture(state(node("http://a", breaker="open", failures=5)), width=160)
    (line,) = (line for line in lines if line.startswith("open"))
    assert line.endswith("breaker open, 5 failures in a row")


@pytest.mark.parametrize(
    ("breaker", "words"), [("open", "breaker open, 6 failures"), ("half_open", "breaker half-open, 6 failures")]
)
@pytest.mark.parametrize("width", [80, 160])
def test_a_node_that_is_down_is_called_that_whatever_its_breaker(breaker: str, words: str, width: int) -> None:
    down = node("http://a:1", state="down", breaker=breaker, failures=6, reason="engine http://a:1 refused the call")
    (line,) = (line for line in picture(state(down), width=width) if line.startswith("down"))
    assert line.endswith(f"refused the call; {words} in a row")
    assert "engine" not in line


def test_the_latency_of_a_node_with_running_requests_is_not_given_up() -> None:
    down = node("http://a:1", state="down", unfinished=3, latency_s=[1.0], reason="refused the connection, as ever")
    (line,) = (line for line in picture(state(down)) if line.startswith("down"))
    assert "a:1: refused" in line and line.split()[-2:] == ["1.000", "0%"]


def test_nodes_of_a_role_stand_together() -> None:
    roles = ("Decode", "Prefill", "Decode", "Prefill")
    said = state(*(node(f"http://{n}", role=role, unfinished=n) for n, role in enumerate(roles)))

    def order(sort: str) -> list[str]:
        return [line.split()[2] for line in picture(said, sort=sort) if line.startswith("ready")]

    assert order("trouble") == ["1", "3", "0", "2"]
    assert order("load") == ["3", "1", "2", "0"]


def test_links_of_a_node_that_is_down_are_stale() -> None:
    said = busy()
    said["nodes"][2]["state"] = "down"  # p:1
    lines = picture(said)
    assert "http://p:1  -  -" in lines and "http://q:1  ·  ◐" in lines
    assert "  - stale: a node of it is down" in lines


def test_old_data_says_how_old_it_is_and_why() -> None:
    assert picture(state(), age_s=0.5)[0].startswith("Evenhand")
    assert picture(state(), age_s=0.5, trouble="it ended.")[0] == "0.5 s old: it ended; it is tried again"
    assert picture(state(), age_s=200.0)[0] == "3 min old: nothing comes; it is tried again"


def test_who_looks_seldom_is_not_told_that_it_is_old() -> None:
    (first, *_) = draw(Seen(state(), age_s=12.0), width=80, old_after_s=20.0)
    assert first.plain.startswith("Evenhand")


def test_redis_that_is_away_is_told() -> None:
    away = {"up": False, "reason": "Connection refused"}
    lines = picture(state(version="1.0.0", redis=away, workers=[worker("w", lease_s=0.0)]))
    assert "Redis away: Connection refused" in lines[0]
    assert "w  0 unfinished on 0 nodes" in lines  # of leases nothing is known


def test_while_redis_is_away_what_one_worker_can_not_know_is_unknown() -> None:
    served = node("http://a:1", requests=30, share=1.0, unfinished=2)
    lines = picture(state(served, redis={"up": False, "reason": "away"}, workers=[worker("w")]))
    assert lines[1].startswith("1/1 nodes ready  2 unfinished on nodes  - given/min  1 worker")
    assert lines[2:4] == [
        "counts are of this worker only; the other workers are not shown",
        "leases, the last minute and decisions are not known while Redis is away",
    ]
    (line,) = (line for line in lines if line.startswith("ready"))
    assert line.split()[-1] == "-"


def test_whether_redis_is_up_is_not_said_from_an_old_picture() -> None:
    lines = picture(state(), trouble="Redis at r:6379, namespace default: Redis did not answer within 2 s")
    assert "Redis not known now" in lines[1] and "Redis up" not in "".join(lines)
    assert "Redis up" in picture(state())[0]


def test_a_decision_tells_each_leg_and_by_which_score() -> None:
    legs = [
        {"node": "http://a:1", "stage": "request", "status": 503, "seconds": 0.1, "error": None},
        {"node": "http://b:1", "stage": "request", "status": None, "seconds": 0.1, "error": "refused"},
        {"node": "http://c:1", "stage": "decode", "status": 200, "seconds": 0.1, "error": None},
    ]
    last = decision(1)["tries"][0] | {"score": 1.25, "left_off": 7}
    one = decision(1, legs=legs, tries=[last])
    (line,) = (line for line in picture(state(), width=120, decisions=(one,)) if "→" in line)
    assert line[9:] == "200 done 0.250 s  m → a:1 (503) → b:1 (refused) → decode c:1  score 1.25, 8 candidates"
    nobody = decision(1, legs=[], tries=[], node=None, status=503, outcome="no_node", seconds=None, model=None)
    (line,) = (line for line in picture(state(), decisions=(nobody,)) if "→" in line)
    assert line[9:] == "503 no_node  - → nobody"


def test_a_worker_whose_lease_is_over() -> None:
    lines = picture(state(workers=[worker("w", lease_s=-1.0)]))
    assert "w  0 unfinished on 0 nodes  lease over" in lines


def test_more_decode_nodes_than_columns_are_counted() -> None:
    links = [{"prefill": "http://p:1", "decode": f"http://d{n}:1", "state": "connected"} for n in range(60)]
    lines = picture(state(links=links))
    (head,) = (line for line in lines if line.endswith("more"))
    shown = next(line for line in lines if line.startswith("http://p")).count("●")
    assert head.endswith(f"{60 - shown} more")


@pytest.mark.parametrize(
    ("part", "drawn"), [(0, ""), (0.001, "▏"), (0.5, "██"), (0.53125, "██▏"), (1, "████"), (7, "████")]
)
def test_a_bar_has_eighths_and_nothing_is_lost(part: float, drawn: str) -> None:
    assert bar(part, 4) == drawn


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([], 8, ""),
        ([0.0, 0.0], 8, "▁▁"),
        ([1, 2, 3, 4, 5, 6, 7, 8], 8, "▁▂▃▄▅▆▇█"),
        ([9, 1, 8], 2, "▁█"),
        ([1.0], 0, ""),
    ],
)
def test_a_sparkline_is_the_latest_against_the_largest(values: list[float], width: int, drawn: str) -> None:
    assert sparkline(values, width) == drawn
