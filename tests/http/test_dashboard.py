"""The files of the live page: open, complete, cached by their content, and nothing beside them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import app.http
from tests.http.fakes import World

FOLDER = Path(app.http.__file__).parent / "pages"
ANYBODY = ("203.0.113.9", 1)


async def test_the_page_is_open_and_holds_no_data() -> None:
    page = await World(api_keys=["k"], admin_keys=["a"]).ask("GET", "/dashboard", client=ANYBODY)
    assert (page.status, page.header(b"content-type")) == (200, b"text/html; charset=utf-8")
    assert page.body == (FOLDER / "dashboard.html").read_bytes()


async def test_everything_that_the_page_and_its_scripts_name_is_served() -> None:
    world = World(api_keys=["k"])
    kinds = {"css": b"text/css", "js": b"text/javascript", "svg": b"image/svg+xml"}
    wanted, seen = {"dashboard/assets/dashboard.js"}, set()
    wanted |= set(re.findall(r'(?:src|href)="(dashboard/[^"]+)"', (FOLDER / "dashboard.html").read_text()))
    while wanted - seen:
        address = min(wanted - seen)
        seen.add(address)
        reply = await world.ask("GET", f"/{address}", client=ANYBODY)
        assert reply.status == 200, address
        kind = reply.header(b"content-type")
        assert kind is not None and kind.startswith(kinds[address.rpartition(".")[2]])
        imported = re.findall(r'from "\./([^"]+)"', reply.body.decode())
        wanted |= {f"dashboard/assets/{name}" for name in imported}
    there = {f"dashboard/assets/{path.name}" for path in FOLDER.iterdir() if path.name != "dashboard.html"}
    assert seen == there


def test_nothing_is_asked_elsewhere_and_no_text_becomes_markup() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text()
        # The placeholder of an address, and the name of SVG, which nobody asks for.
        foreign = set(re.findall(r"https?://[\w.:/]+", text)) - {"http://10.0.0.5:23333", "http://www.w3.org/2000/svg"}
        assert not foreign, path.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", text), (
            path.name
        )
    page = (FOLDER / "dashboard.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]* src=)", page)


@pytest.mark.parametrize("path", ["/dashboard", "/dashboard/assets/dashboard.js", "/dashboard/assets/icon.svg"])
async def test_a_file_is_asked_for_each_time_and_sent_once(path: str) -> None:
    world = World()
    first = await world.ask("GET", path)
    etag = first.header(b"etag")
    assert etag is not None and first.header(b"cache-control") == b"no-cache"
    for known in (etag, b"W/" + etag, b'"other", ' + etag):
        again = await world.ask("GET", path, headers=[(b"if-none-match", known)])
        assert (again.status, again.body, again.header(b"etag")) == (304, b"", etag)
    assert (await world.ask("GET", path, headers=[(b"if-none-match", b'"other"')])).body == first.body
    head = await world.ask("HEAD", path)
    assert (head.status, head.header(b"content-length")) == (200, b"%d" % len(first.body))


async def test_the_policy_lets_nothing_in_but_our_own_files() -> None:
    for path in ("/dashboard", "/dashboard/assets/dashboard.js"):
        reply = await World().ask("GET", path)
        policy = (reply.header(b"content-security-policy") or b"").decode()
        rules = dict(rule.strip().partition(" ")[::2] for rule in policy.split(";"))
        assert rules == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "connect-src": "'self'",
            "img-src": "'self'",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
            "require-trusted-types-for": "'script'",
        }
        assert reply.header(b"x-content-type-options") == b"nosniff"


@pytest.mark.parametrize("name", ["x", "../dashboard.py", "..%2fdashboard.py", "dashboard.html", "", ".", "%00"])
async def test_no_other_file_is_served(name: str) -> None:
    assert (await World().ask("GET", f"/dashboard/assets/{name}")).status == 404


async def test_a_slash_at_the_end_leads_to_the_page_whatever_is_before_it() -> None:
    reply = await World().ask("GET", "/dashboard/")
    assert (reply.status, reply.header(b"location")) == (307, b"../dashboard")
