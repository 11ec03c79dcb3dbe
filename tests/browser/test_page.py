"""The live page in a real browser, against documents as decision 22 has them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.conftest import Open
from tests.browser.documents import Document, candidate, decision, node, state, worker
from tests.browser.site import Refusal, Site
from tests.support.wait import eventually

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.wide

ONE, TWO, THREE = (node(i)["url"] for i in (1, 2, 3))
NONE = "\N{EN DASH}"
HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\'"&\u202e'


def row(page: Page, url: str) -> Locator:
    return page.locator("#nodes-body tr", has=page.locator(f'[title="{url}"]'))


def urls(page: Page) -> list[str]:
    """The nodes shown, from top to bottom."""
    found: list[str] = page.evaluate(
        "[...document.querySelectorAll('#nodes-body tr')].map(tr => tr.querySelector('.url').title)"
    )
    return found


def troubles(page: Page) -> list[str]:
    return page.locator("#troubles li b").all_inner_texts()


def expect_text(locator: Locator, text: str) -> None:
    """Within the browser's time, so that no test asks it in a loop."""
    locator.filter(has_text=text).first.wait_for()


def wide(page: Page) -> int:
    width: int = page.evaluate("document.documentElement.scrollWidth")
    return width


def split(**fields: Any) -> Document:
    """Prefill, decode and encode nodes, with links."""
    prefill = [node(i, role="Prefill", speed=2.0) for i in (1, 2)]
    decode = [node(i, role="Decode") for i in (3, 4)]
    encode = [node(i, role="Encode", share=share, models=[]) for i, share in ((5, 0.6), (6, 0.3), (7, 0.1))]
    pairs = [(p["url"], d["url"]) for p in prefill for d in decode]
    states = ["connected", "connecting", "failed"]  # the fourth pair has no link
    return state(
        [*prefill, *decode, *encode],
        serving="DistServe",
        encoders={"cursor": 4711, "next": encode[1]["url"], "urls": [one["url"] for one in encode]},
        links=[{"prefill": p, "decode": d, "state": s} for (p, d), s in zip(pairs, states, strict=False)],
        sessions=3,
        handovers={"sessions_lost": 2},
        **fields,
    )


# --- what is shown


def test_a_node_is_a_row_with_its_figures_in_words_too(site: Site, open_page: Open) -> None:
    busy = node(1, speed=4.0, unfinished=6, latency_s=[0.25, 0.75, 0.5], requests=900, share=0.75, failures=2)
    site.state = state([busy, node(2, speed=2.0, unfinished=1, requests=300, share=0.25)])
    page = open_page(site.url)
    cells = row(page, ONE)
    expect_text(cells, "ready")
    text = cells.inner_text()
    assert all(
        part in text
        for part in ("10.0.0.1:23333", "llama-3-70b", "Hybrid", "breaker closed", "2 failed in a row", "6", "speed 4")
    )
    assert "500 ms" in text and "75.0 %" in text and "900" in text
    # 6/4 = 1.5, on a scale to 2; fair is 7/6, which is 58 % of it.
    images = cells.get_by_role("img").evaluate_all("all => all.map(one => one.getAttribute('aria-label'))")
    assert images == [
        "6 unfinished, at speed 4: 1.5 of 2",
        "Last 3 latencies: newest 500 ms, longest 750 ms",
        "given 900 in the last minute, 75.0 % of its role",
    ]
    assert cells.locator("td.share .track i").first.evaluate("e => e.style.transform") == "scaleX(0.75)"
    assert cells.locator("td.load .track i").first.evaluate("e => e.style.transform") == "scaleX(0.75)"
    assert page.locator("#nodes-body").evaluate("e => e.style.getPropertyValue('--fair-Hybrid')") == "58%"
    # Also as cards on a phone it stays a table to a screen reader.
    assert page.get_by_role("table", name="Nodes").get_by_role("row").count() == 3
    assert page.get_by_role("columnheader").count() == 7 and page.get_by_role("rowheader").count() == 2


def test_the_figures_at_the_top(site: Site, open_page: Open) -> None:
    site.state = split()
    for one, requests in zip(site.state["nodes"], (60, 60, 30, 90, 500, 0, 0), strict=True):
        one.update(requests=requests, unfinished=2)
    site.state["nodes"][1]["breaker"] = "open"
    site.state["links"] = []
    page = open_page(site.url)
    expect_text(page.locator("#figure-nodes"), "6 of 7")
    unfinished = page.locator("#figure-unfinished").inner_text()
    assert unfinished.startswith("Unfinished on nodes\n14")
    assert "a split request counts on each of its nodes" in unfinished
    # A split request counts once, where it ends.
    requests = page.locator("#figure-requests").inner_text()
    assert "Given to nodes, last minute" in requests and "120 2 a second" in requests
    assert "1" in page.locator("#figure-workers").inner_text()
    assert page.title() == "✕ 1 breaker open · Evenhand"


def test_nothing_wrong_is_said(site: Site, open_page: Open) -> None:
    page = open_page(site.url)
    expect_text(page.locator("#troubles"), "All is well")
    assert page.title() == "2/2 ready · Evenhand"
    assert page.locator("#link-text").inner_text() == "live"
    for section in ("encoders", "links", "key-form", "stale"):
        assert page.locator(f"#{section}").is_hidden()
    assert page.get_by_role("status").inner_text() == "All is well"


def test_the_worst_comes_first_at_the_top_and_in_the_table(site: Site, open_page: Open) -> None:
    nodes = [
        node(1),
        node(2, state="draining"),
        node(3, state="pending", reason="refused"),
        node(4, breaker="half_open"),
        node(5, breaker="open", failures=5),
        node(6, state="asleep"),
        node(7, state="down", reason="connection refused", models=["other"]),
    ]
    site.state = state(nodes, workers=[worker("good"), worker("bad", 1.25, {ONE: 3})])
    page = open_page(site.url)
    page.locator("#troubles li").first.wait_for()
    assert troubles(page) == [
        "No Hybrid node serves other",
        "1 node down",
        "1 breaker open",
        "The lease of worker bad runs out",
        "1 breaker half open",
        "1 node asleep",
        "1 node pending",
        "1 node draining",
    ]
    assert urls(page) == [node(i)["url"] for i in (7, 5, 4, 6, 3, 2, 1)]
    assert "connection refused" in row(page, node(7)["url"]).inner_text()
    assert "runs out" in page.locator("#workers-list li").first.inner_text()
    page.get_by_role("button", name="Show these: 1 breaker open").click()
    assert urls(page) == [node(5)["url"]]


def test_while_redis_is_away_nothing_is_made_up(site: Site, open_page: Open) -> None:
    alone = worker("h1-1", 0.0, {ONE: 3})
    encoder = node(2, role="Encode", requests=40, share=1.0)
    ring = {"cursor": 1, "next": TWO, "urls": [TWO]}
    away = {"up": False, "reason": "Connection refused."}
    busy = node(1, requests=40, share=1.0, unfinished=3)
    site.state = state([busy, encoder], redis=away, workers=[alone], encoders=ring)
    page = open_page(site.url)
    page.locator("#troubles li").first.wait_for()
    assert troubles(page) == ["Redis is away"]  # no lease runs out: nobody knows
    line = page.locator("#troubles li").inner_text()
    assert "Connection refused. Each worker" in line and "the counts of one worker only" in line
    figures = {name: page.locator(f"#figure-{name} dd").inner_text() for name in ("unfinished", "requests", "workers")}
    assert figures["unfinished"].split("\n") == ["3", "of this worker only"]
    assert figures["requests"].split("\n") == [NONE, "unknown"]
    assert figures["workers"].split("\n") == ["1", "this worker only"]
    assert row(page, ONE).locator("td.share").inner_text().strip() == NONE
    assert NONE in page.locator("#encoders-list li").inner_text()
    assert "lease unknown" in page.locator("#workers-list li").inner_text()
    assert page.locator("#workers-list li.grave").count() == 0
    assert page.locator("#decisions-away").is_visible()
    site.show(state())
    page.locator("#decisions-away").wait_for(state="hidden")


def test_a_request_now_and_then_is_no_rate(site: Site, open_page: Open) -> None:
    site.state = state([node(1, requests=1, share=1.0)])
    page = open_page(site.url)
    row(page, ONE).wait_for()
    assert page.locator("#figure-requests dd").inner_text().strip() == "1"
    assert page.locator("#figure-unfinished").inner_text().strip() == "Unfinished on nodes\n0"  # nothing is split


def test_a_node_that_is_down_is_told_once_whatever_its_breaker(site: Site, open_page: Open) -> None:
    site.state = state([node(1), node(2, state="down", breaker="open", failures=6, reason="refused")])
    page = open_page(site.url)
    row(page, TWO).wait_for()
    assert troubles(page) == ["1 node down"]
    assert "breaker open" in row(page, TWO).inner_text()


@pytest.mark.parametrize("width", [360, 1000, 1280])
def test_a_reason_has_the_whole_row_and_is_not_cut(site: Site, open_page: Open, width: int) -> None:
    reason = "refused the connection, and said why at some length, " * 4
    site.state = state([node(1), node(2, state="down", reason=reason)])
    page = open_page(site.url, width=width)
    cell = row(page, TWO).locator(".reason")
    expect_text(cell, "refused the connection")
    sizes = "e => [e.clientWidth, e.parentElement.clientWidth, e.scrollHeight - e.clientHeight]"
    mine, rows, cut = cell.evaluate(sizes)
    assert mine > 0.9 * rows and cut <= 0
    assert row(page, ONE).locator(".reason").is_hidden()
    # Nothing lies over it.
    below = cell.evaluate(
        "e => Math.max(...[...e.parentElement.children].filter(o => o !== e && o.className !== 'manage')"
        ".map(o => o.getBoundingClientRect().bottom)) <= e.getBoundingClientRect().top + 1"
    )
    assert below or width == 360


def test_links_of_a_dead_node_are_stale(site: Site, open_page: Open) -> None:
    site.state = split()
    site.state["nodes"][0]["state"] = "down"
    page = open_page(site.url)
    cells = page.locator("#links-table tbody td")
    cells.first.wait_for()
    stale = "stale: a node of it is down"
    texts = cells.evaluate_all("all => all.map(one => one.textContent)")
    assert texts == [stale, stale, "failed", "none"]
    assert f"2 {stale}" in page.locator("#links-legend").inner_text()


def test_counts_of_encoders_are_not_called_prefill_to_decode(site: Site, open_page: Open) -> None:
    both = [node(1), node(2, role="Encode")]
    site.state = state(both, handovers={"encoded": 4})
    page = open_page(site.url)
    expect_text(page.locator("#handovers"), "encoded")
    assert page.locator("#links-name").inner_text() == "Handed over"
    assert "caches held" not in page.locator("#handovers").inner_text()
    site.show(state([*both, node(3, role="Prefill")], handovers={"encoded": 4}))
    expect_text(page.locator("#links-name"), "Prefill to decode")


@pytest.mark.parametrize("width", [780, 400])
def test_the_lists_read_as_sentences_and_nothing_is_cut(site: Site, open_page: Open, width: int) -> None:
    page = open_page(site.url, width=width)
    row(page, ONE).wait_for()
    assert page.locator("#sort option").all_inner_texts()[2] == "by trouble, worst first"
    # As wide as it would like to be by itself.
    fits = """e => {
        const given = e.offsetWidth;
        Object.assign(e.style, { flex: 'none', width: 'max-content', maxWidth: 'none' });
        return e.offsetWidth <= given;
    }"""
    for name in ("filter-model", "filter-state", "sort", "decisions-which"):
        assert page.locator(f"#{name}").evaluate(fits), name
    page.get_by_role("button", name="Add node").click()
    assert page.locator("#add-role").evaluate(fits)


def test_workers_show_their_ledgers(site: Site, open_page: Open) -> None:
    site.state = state(workers=[worker("h1-1", 6.5, {ONE: 3, TWO: 1}), worker("h1-2", 8.0)])
    page = open_page(site.url)
    first = page.locator("#workers-list li").first
    expect_text(first, "4 unfinished on 2 nodes")
    assert "lease 6.5 s" in first.inner_text()
    first.locator("summary").click()
    first.locator("dd").nth(1).wait_for()
    assert first.locator("dt").all_inner_texts() == ["10.0.0.1:23333", "10.0.0.2:23333"]
    assert first.locator("dd").all_inner_texts() == ["3", "1"]
    assert "nothing unfinished" in page.locator("#workers-list li").last.inner_text()


def test_encoders_are_a_ring_and_links_a_matrix(site: Site, open_page: Open) -> None:
    site.state = split()
    page = open_page(site.url)
    expect_text(page.locator("#encoders-list"), "60.0 %")
    label = page.locator("#ring-label").text_content()
    assert label is not None and label.startswith("Next is 2: 10.0.0.6:23333. 1: 10.0.0.5:23333 60.0 %;")
    assert page.locator("#ring .cursor").text_content() == "2"  # as the arcs and the list count
    assert page.locator("#ring path").count() == 3 and page.locator("#ring path.next").count() == 1
    assert "next" in page.locator("#encoders-list li").nth(1).inner_text()
    cells = page.locator("#links-table tbody td").evaluate_all("all => all.map(one => one.textContent)")
    assert cells == ["connected", "connecting", "failed", "none"]
    assert page.locator("#links-table").get_by_role("columnheader").count() == 3
    counts = page.locator("#handovers").inner_text()
    assert "caches held\n3" in counts and "sessions lost\n2" in counts
    site.show(state())
    page.locator("#links").wait_for(state="hidden")
    assert page.locator("#encoders").is_hidden()


def test_what_others_have_named_is_never_markup(site: Site, open_page: Open) -> None:
    bad = node(1, url=f"http://{HOSTILE}", models=[HOSTILE, "b", HOSTILE], reason=HOSTILE, state="down", role="Prefill")
    encoders = {"cursor": 1, "next": bad["url"], "urls": [bad["url"]]}
    links = [{"prefill": bad["url"], "decode": HOSTILE, "state": HOSTILE}]
    site.state = state(
        [bad, node(2, models=["x" * 3000])],
        workers=[worker(HOSTILE, 6.0, {bad["url"]: 1})],
        redis={"up": False, "reason": HOSTILE},
        encoders=encoders,
        links=links,
        handovers={HOSTILE: 1},
        strategy=HOSTILE,
        version=HOSTILE,
    )
    page = open_page(site.url, width=360)
    expect_text(row(page, TWO), "ready")
    leg = {"node": HOSTILE, "stage": HOSTILE, "status": 500, "seconds": 1.0, "error": HOSTILE}
    tried = {"node": HOSTILE, "stage": HOSTILE, "score": 1.0, "candidates": [candidate(1, 1.0)], "left_off": 0}
    tried["candidates"][0]["node"] = HOSTILE  # type: ignore[index]
    told = {"model": HOSTILE, "node": HOSTILE, "request": HOSTILE, "worker": HOSTILE, "path": HOSTILE}
    site.decide(decision(**told, outcome=HOSTILE, tries=[tried], legs=[leg]))
    page.locator("#decisions-list summary").click()
    page.locator("#workers-list summary").click()
    page.get_by_label("1 more model", exact=True).click()
    page.locator(".journey table").last.wait_for()
    assert HOSTILE in page.locator("#nodes-body tr").first.inner_text()
    assert HOSTILE in page.locator("#troubles li").first.inner_text()
    page.get_by_role("button", name=f"Drain {bad['url']}").click()
    assert page.locator("#leave-url").inner_text() == bad["url"]
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img, main script, dialog img").count() == 0
    assert wide(page) == 360


def test_rows_change_in_place(site: Site, open_page: Open) -> None:
    page = open_page(site.url)
    expect_text(row(page, ONE), "ready")
    page.evaluate("document.querySelectorAll('#nodes-body tr').forEach(tr => (tr.mine = true))")
    site.show(state([node(1, unfinished=1234), node(3)]))
    expect_text(row(page, ONE), "1,234")
    assert urls(page) == [ONE, THREE]
    assert page.evaluate("[...document.querySelectorAll('#nodes-body tr')].map(tr => tr.mine === true)") == [
        True,
        False,
    ]


def test_of_hundreds_of_nodes_only_what_differs_is_touched(site: Site, open_page: Open) -> None:
    nodes = [node(i, speed=2.0, unfinished=3, latency_s=[0.5] * 15, requests=10, share=0.005) for i in range(1, 201)]
    site.state = state(nodes)
    page = open_page(site.url)
    row(page, nodes[199]["url"]).wait_for(state="attached")
    page.evaluate(
        """() => {
          window.seen = [];
          new MutationObserver((all) => window.seen.push(...all.map((one) => one.target.textContent.slice(0, 20))))
            .observe(document.getElementById('nodes-body'), {subtree: true, childList: true, attributes: true});
        }"""
    )
    nodes[99] = {**nodes[99], "unfinished": 4}
    site.show(state(nodes))
    expect_text(row(page, nodes[99]["url"]).locator("td.load b"), "4")
    # Its text, its bar, its label, and the average line, which all rows have in common.
    assert len(page.evaluate("window.seen")) <= 6
    nodes[149] = {**nodes[149], "state": "down", "reason": "refused"}
    site.show(state(nodes))
    expect_text(page.locator("#nodes-body tr").first, "refused")
    assert urls(page)[0] == nodes[149]["url"] and len(urls(page)) == 200


def test_rows_do_not_move_away_under_a_hand(site: Site, open_page: Open) -> None:
    page = open_page(site.url)
    row(page, ONE).hover()
    site.show(state([node(1), node(2, state="down")]))
    expect_text(row(page, TWO), "down")
    assert urls(page) == [ONE, TWO]
    page.get_by_role("button", name="State, breaker").click()
    page.get_by_role("button", name="State, breaker").click()
    assert urls(page) == [TWO, ONE]


def test_filter_and_order(site: Site, open_page: Open) -> None:
    nodes = [
        node(1, models=["a"], speed=1.0, unfinished=3, latency_s=[0.1]),
        node(2, models=["b"], speed=4.0, unfinished=8, latency_s=[0.4], share=0.5, requests=1),
        node(10, models=["a", "b"], state="down"),
    ]
    one, two, ten = (one["url"] for one in nodes)
    site.state = state(nodes)
    page = open_page(site.url)
    row(page, ten).wait_for()
    orders = {"Node": [one, two, ten], "Unfinished": [one, two, ten], "Latency": [two, one, ten]}
    for name, order in {**orders, "Last minute": [two, one, ten]}.items():
        page.get_by_role("button", name=name, exact=True).click()
        assert urls(page) == order, name
    assert page.locator("th.share").get_attribute("aria-sort") == "descending"
    page.get_by_role("button", name="Node", exact=True).click()
    page.get_by_role("button", name="Node", exact=True).click()
    assert urls(page) == [ten, two, one]
    page.get_by_label("Model", exact=True).select_option("b")
    assert urls(page) == [ten, two]
    page.get_by_label("State", exact=True).select_option("ready")
    assert urls(page) == [two] and "1 of 3" in page.locator("#nodes-title").inner_text()
    page.get_by_label("State", exact=True).select_option("")
    page.get_by_label("Filter nodes by text").fill("0.10:")
    assert urls(page) == [ten]
    page.get_by_label("Filter nodes by text").fill("nobody")
    assert page.locator("#nodes-nothing").inner_text() == "No node is like that."


# --- decisions


def test_a_decision_opens_to_its_candidates_and_legs(site: Site, open_page: Open) -> None:
    page = open_page(site.url)
    row(page, ONE).wait_for()
    first = {"node": TWO, "stage": "request", "score": 0.5, "left_off": 3}
    first["candidates"] = [candidate(2, 0.5, unfinished=1, speed=2.0, mean_latency_s=0.25), candidate(3, None)]
    failed = {"node": TWO, "stage": "request", "status": None, "seconds": 0.25, "error": "connection refused"}
    plain = decision()
    retried = decision(tries=[first, *plain["tries"]], legs=[failed, *plain["legs"]])
    site.decide(plain, retried)
    entry = page.locator("#decisions-list > li").first
    expect_text(entry, "1 failed before")
    assert all(part in entry.inner_text() for part in ("ok 200", "llama-3-70b", "10.0.0.1:23333", "1.25 s", "125 ms"))
    entry.locator("summary").click()
    tables = entry.locator("table")
    tables.nth(2).wait_for()
    assert tables.count() == 3
    assert tables.nth(0).locator("caption").inner_text() == "request: 10.0.0.2:23333, score 0.5; less is better"
    lines = (
        tables.nth(0)
        .locator("tbody tr")
        .evaluate_all("all => all.map(tr => [...tr.children].map(td => td.textContent))")
    )
    assert lines == [
        ["10.0.0.2:23333chosen", "0.5", "1", "2", "250 ms"],
        ["10.0.0.3:23333", NONE, "0", "1", NONE],
        ["and 3 more candidates"],
    ]
    assert "connection refused" in tables.nth(2).inner_text()
    assert retried["request"] in entry.inner_text() and "h1-21-4f1c" in entry.inner_text()
    page.get_by_label("Which decisions").select_option("troubled")
    assert page.locator("#decisions-list > li:visible").count() == 1


def test_a_split_decision_names_its_way_and_scores_only_where_there_are_some(site: Site, open_page: Open) -> None:
    page = open_page(site.url)
    row(page, ONE).wait_for()
    leg = {"status": 200, "seconds": 0.1, "error": None}
    legs = [
        {"node": url, "stage": stage, **leg} for url, stage in ((ONE, "encode"), (TWO, "prefill"), (THREE, "decode"))
    ]
    failed = {"node": ONE, "stage": "prefill", "status": None, "seconds": 0.1, "error": "refused"}
    tried = {"node": ONE, "stage": "encode", "score": None, "left_off": 0, "candidates": [candidate(1, None)]}
    site.decide(decision(node=THREE, legs=[failed, *legs], tries=[tried]))
    entry = page.locator("#decisions-list > li").first
    expect_text(entry.locator(".to"), "encode 10.0.0.1:23333 → prefill 10.0.0.2:23333 → decode 10.0.0.3:23333")
    assert "1 failed before" in entry.inner_text()
    entry.locator("summary").click()
    caption = entry.locator("caption").first
    caption.wait_for()
    assert caption.inner_text() == "encode: 10.0.0.1:23333"
    assert "A sample: at most 5 requests a second" in page.locator("#decisions").inner_text()


def test_new_decisions_wait_while_one_is_open_or_on_demand(site: Site, open_page: Open) -> None:
    page = open_page(site.url)
    row(page, ONE).wait_for()
    entries = page.locator("#decisions-list > li")
    first = decision()
    site.decide(first)
    entries.first.locator("summary").click()
    site.decide(decision(), decision())
    expect_text(page.locator("#decisions-count"), "2 new wait for the open one")
    assert entries.count() == 1
    entries.first.locator("summary").first.click()
    entries.nth(2).wait_for()
    pause = page.locator("#decisions-pause")
    pause.click()
    site.decide(first, decision())  # the first is known, as after a new connection
    expect_text(pause, "Go on (1 new)")
    assert pause.get_attribute("aria-pressed") == "true" and entries.count() == 3
    pause.click()
    entries.nth(3).wait_for()
    site.decide(*[decision() for _ in range(150)])
    entries.nth(99).wait_for()
    assert entries.count() == 100


# --- keys


def test_a_key_is_asked_for_and_kept_in_memory_only(site: Site, open_page: Open) -> None:
    site.key = "s3cret-key"
    page = open_page(site.url)
    field = page.get_by_label("Reader key or admin key", exact=True)
    field.wait_for()
    # How a program sends it is no matter here.
    assert page.locator("#key-why").inner_text() == "This needs a reader key or an admin key."
    assert page.locator("#key-form").is_visible() and page.locator("main").is_hidden()
    assert page.locator("#key").evaluate("e => e === document.activeElement")
    field.fill("wrong")
    field.press("Enter")
    expect_text(page.locator("#key-why"), "The admin key is wrong.")
    field.fill("s3cret-key")
    page.get_by_role("button", name="Look").click()
    row(page, ONE).wait_for()
    assert page.locator("#key-form").is_hidden()
    assert site.of("/dashboard/events")[-1].headers["authorization"] == "Bearer s3cret-key"
    assert all("s3cret-key" not in one.target for one in site.asked) and "s3cret" not in page.url
    kept = page.evaluate(
        "JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, history.state, window.name])"
    )
    assert "s3cret" not in kept
    assert "s3cret" not in page.content() and page.locator("#key").input_value() == ""
    page.get_by_role("button", name="Forget the key").click()
    expect_text(page.locator("#key-why"), "This needs a reader key or an admin key.")


def test_a_key_that_is_refused_later_is_asked_for_again(site: Site, open_page: Open) -> None:
    page = open_page(site.url)
    row(page, ONE).wait_for()
    site.key = "new"
    site.drop()
    page.get_by_label("Reader key or admin key", exact=True).wait_for()
    assert page.locator("#link-text").inner_text() == "needs a key"
    page.get_by_label("Reader key or admin key", exact=True).fill("ключ")
    page.get_by_role("button", name="Look").click()
    expect_text(page.locator("#key-why"), "visible ASCII")


# --- the connection


def step_until(page: Page, check: Callable[[], object]) -> None:
    """Let the page's time pass, slowly, until `check` is true."""

    def step() -> object:
        page.clock.run_for(20)
        return check()

    eventually(step, within_s=10)


def test_it_connects_again_by_itself_with_growing_pauses(site: Site, open_page: Open) -> None:
    site.silent = True
    page = open_page(site.url, clock=True)
    eventually(lambda: site.viewers == 1)
    site.show(state())
    step_until(page, row(page, ONE).is_visible)
    site.down = Refusal(503, "50 others watch this worker already")
    site.drop()
    banner = page.locator("#stale")
    for n, planned_s in enumerate((1, 2, 4, 8, 15, 15), 1):
        eventually(lambda: re.search(r"in \d+ s\.$", banner.text_content() or ""))
        found = re.search(r"in (\d+) s\.$", banner.text_content() or "")
        assert found is not None
        # A fifth more or less, and in whole seconds.
        assert planned_s * 0.8 <= int(found[1]) <= planned_s * 1.2 + 1
        assert page.locator("#link-text").inner_text() == "not connected"
        assert len(site.asked) == n
        if n == 6:
            break
        page.clock.run_for(int(found[1]) * 1000 + 50)
        eventually(lambda n=n: len(site.asked) == n + 1)
    assert re.match(r"What is shown is \d\d s old\. 50 others watch this worker already\. Asking", banner.inner_text())
    site.down = None
    page.clock.run_for(20_000)
    eventually(lambda: site.viewers == 1)
    site.show(state([node(3)]))
    step_until(page, row(page, THREE).is_visible)
    assert banner.is_hidden() and page.locator("#link-text").inner_text() == "live"


def test_it_says_how_old_its_data_is_and_gives_a_silent_server_up(site: Site, open_page: Open) -> None:
    site.silent = True
    page = open_page(site.url, clock=True)
    eventually(lambda: site.viewers == 1)
    site.show(state())
    step_until(page, row(page, ONE).is_visible)
    page.clock.run_for(6000)
    assert page.locator("#link-text").inner_text() == "silent"
    assert page.locator("#stale").inner_text() == "What is shown is 6 s old. Waiting for the server."
    page.clock.run_for(9100)  # less than the pause behind it
    expect_text(page.locator("#stale"), "Nothing came for 15 s.")
    page.clock.run_for(2000)
    eventually(lambda: len(site.of("/dashboard/events")) == 2)


def test_a_hidden_tab_asks_nothing(site: Site, open_page: Open) -> None:
    page = open_page(site.url)
    row(page, ONE).wait_for()
    hide = "hidden => {Object.defineProperty(document, 'hidden', {get: () => hidden, configurable: true});"
    hide += "document.dispatchEvent(new Event('visibilitychange'))}"
    page.evaluate(hide, True)
    expect_text(page.locator("#link-text"), "paused")
    eventually(lambda: site.viewers == 0)
    asked = len(site.asked)
    page.evaluate(hide, False)
    expect_text(page.locator("#link-text"), "live")
    assert site.viewers == 1 and len(site.asked) == asked + 1


# --- management


def test_a_node_is_added_and_the_servers_words_are_shown(site: Site, open_page: Open) -> None:
    site.management = Refusal(504, "http://10.0.0.9:1 does not answer")
    page = open_page(site.url)
    row(page, ONE).wait_for()
    page.get_by_role("button", name="Add node").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Address").fill(" http://10.0.0.9:1 ")
    dialog.get_by_role("button", name="Add node").click()
    expect_text(dialog.get_by_role("alert"), "http://10.0.0.9:1 does not answer")
    assert site.of("/nodes/add")[-1].json() == {"url": "http://10.0.0.9:1"}
    site.management = None
    dialog.get_by_label("Models").fill("a/b\n\n c \n")
    dialog.get_by_label("Role").select_option("Decode")
    dialog.get_by_label("Speed").fill("2.5")
    dialog.get_by_label("The engine's own API key").fill("engine-key")
    dialog.get_by_role("button", name="Add node").click()
    dialog.wait_for(state="hidden")
    sent = site.of("/nodes/add")[-1]
    assert sent.headers["content-type"] == "application/json"
    assert sent.json() == {
        "url": "http://10.0.0.9:1",
        "status": {"models": ["a/b", "c"], "role": "Decode", "speed": 2.5},
        "key": "engine-key",
    }
    expect_text(page.locator("#said"), "Added successfully: http://10.0.0.9:1")
    assert page.locator("#add-key").input_value() == "" and page.locator("#add-url").input_value() == ""


def test_a_node_of_a_source_says_so_and_is_found_by_it(site: Site, open_page: Open) -> None:
    site.state = state([node(1, source="dns://engine:8000"), node(2)])
    page = open_page(site.url)
    expect_text(row(page, ONE).locator(".source"), "from dns://engine:8000")
    assert row(page, TWO).locator(".source").is_hidden()
    page.locator("#filter-text").fill("dns://eng")
    page.wait_for_function("document.querySelectorAll('#nodes-body tr').length === 1")
    assert urls(page) == [ONE]


def test_a_node_is_drained_with_the_keyboard_alone(site: Site, open_page: Open) -> None:
    site.key = "k"
    site.state = state([node(1, unfinished=3)], grace_s=90.0)
    page = open_page(site.url)
    page.locator("#key").wait_for()
    keyboard = page.keyboard
    keyboard.type("k")
    keyboard.press("Enter")
    row(page, ONE).wait_for()

    focused = "document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"

    def tab_to(name: str) -> None:
        for _ in range(40):
            keyboard.press("Tab")
            if page.evaluate(focused) == name:
                assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
                return
        raise AssertionError(f"no Tab leads to {name!r}")

    tab_to(f"Drain {ONE}")
    keyboard.press("Enter")
    asked = page.get_by_role("dialog", name="Drain this node?").inner_text()
    assert "It has 3 unfinished requests." in asked and "or the grace time of 90 s is over." in asked
    keyboard.press("Escape")
    assert page.evaluate(focused) == f"Drain {ONE}" and not site.of("/nodes/remove")
    keyboard.press("Enter")
    tab_to("Drain node")
    keyboard.press("Enter")
    page.get_by_role("dialog").wait_for(state="hidden")
    (sent,) = site.of("/nodes/remove")
    assert (sent.target, sent.json()) == ("/nodes/remove?drain=true", {"url": ONE})
    assert sent.headers["authorization"] == "Bearer k"
    expect_text(page.get_by_role("status"), f"Draining started: {ONE}")
    assert page.evaluate(focused) == f"Drain {ONE}"


def test_a_node_is_removed_only_after_a_yes(site: Site, open_page: Open) -> None:
    page = open_page(site.url)
    page.get_by_role("button", name=f"Remove {TWO}").click()
    page.get_by_role("button", name="Cancel").click()
    assert not site.of("/nodes/remove")
    site.management = Refusal(403, "This is for trusted hosts.")
    page.get_by_role("button", name=f"Remove {TWO}").click()
    page.get_by_role("button", name="Remove node").click()
    expect_text(page.get_by_role("alert"), "This is for trusted hosts.")
    site.management = None
    page.get_by_role("button", name="Remove node").click()
    page.get_by_role("dialog").wait_for(state="hidden")
    sent = site.of("/nodes/remove")[-1]
    assert (sent.target, sent.json()) == ("/nodes/remove", {"url": TWO})


# --- how it looks


def test_nothing_is_wider_than_a_phone(site: Site, open_page: Open) -> None:
    site.state = split(
        workers=[worker("gateway-host-with-a-long-name-7.example.internal-2101-4f1c01aa", 1.0, {ONE: 3})]
    )
    site.state["nodes"][0].update(url="http://" + "engine-" * 12 + ":23333", state="down", reason="refused " * 40)
    page = open_page(site.url, width=360)
    row(page, TWO).wait_for()
    site.decide(decision(request="r" * 200, path="/v1/" + "p" * 300, outcome="internal_error", status=500))
    page.locator("#decisions-list summary").click()
    page.locator(".journey table").last.wait_for()
    assert wide(page) == 360
    assert page.locator("#sort").is_visible()
    page.locator("#sort").select_option("node")
    assert urls(page)[0] == TWO
    for button in ("Add node", f"Drain {TWO}"):
        page.get_by_role("button", name=button, exact=True).click()
        box = page.get_by_role("dialog").bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 360
        page.keyboard.press("Escape")


CONTRAST = """() => {
  // WCAG 2.2, 1.4.3. A canvas reads any way to write a colour.
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
  const known = new Map();
  const rgba = (colour) => {
    if (!known.has(colour)) {
      canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
      known.set(colour, [...canvas.getImageData(0, 0, 1, 1).data]);
    }
    return known.get(colour);
  };
  const part = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const ground = (e) => {
    for (; e; e = e.parentElement) { const c = rgba(getComputedStyle(e).backgroundColor); if (c[3] === 255) return c; }
    return [255, 255, 255];
  };
  const low = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text; (text = walker.nextNode()); ) {
    const e = text.parentElement;
    if (!text.data.trim() || !e.checkVisibility() || e.closest('svg, .unseen, option, noscript, :disabled')) continue;
    const [a, b] = [light(rgba(getComputedStyle(e).color)), light(ground(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push(`${text.data.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return low;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_enough(site: Site, open_page: Open, scheme: str) -> None:
    nodes = [node(i, state=s, reason="r") for i, s in enumerate(("ready", "down", "pending", "asleep", "draining"), 1)]
    nodes += [node(8, breaker="open", failures=5), node(9, breaker="half_open")]
    site.state = state(nodes, redis={"up": False, "reason": "away"}, workers=[worker(), worker("w", 1.0, {ONE: 1})])
    page = open_page(site.url, color_scheme=scheme)
    row(page, ONE).wait_for()
    site.decide(decision(), decision(outcome="engine_error", status=502), decision(outcome="aborted"))
    page.locator("#decisions-list summary").nth(2).click()
    page.locator(".journey table").last.wait_for()
    assert page.evaluate(CONTRAST) == []
    page.get_by_role("button", name="Add node").click()
    assert page.evaluate(CONTRAST) == []


def test_it_is_dark_where_the_system_is_or_somebody_wants_it(site: Site, open_page: Open) -> None:
    is_dark = "parseInt(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]) < 60"
    page = open_page(site.url, color_scheme="dark")
    row(page, ONE).wait_for()
    toggle = page.locator("#theme")
    assert page.evaluate(is_dark) and toggle.inner_text() == "Theme: system"
    toggle.click()
    assert not page.evaluate(is_dark) and toggle.inner_text() == "Theme: light"
    toggle.click()
    assert page.evaluate(is_dark) and toggle.inner_text() == "Theme: dark"
    page.reload()
    assert toggle.inner_text() == "Theme: dark"


def test_the_address_with_a_slash_leads_to_the_page(site: Site, open_page: Open) -> None:
    page = open_page(site.url)
    page.goto(f"{site.url}/dashboard/")
    row(page, ONE).wait_for()
    assert page.url == f"{site.url}/dashboard"
