"""The live page of a real deployment: that it and the documents it shows agree."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import Open
from tests.integration.serving import Factory, streams
from tests.support.deployment import Deployment
from tests.support.quiet import quiet_check
from tests.support.redis import PrivateRedis, Space

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.wide

KEY = "admin-key"
ADMIN = {"authorization": f"Bearer {KEY}"}
WITHIN_MS = 10_000  # a state a second, of workers beside other tests


@pytest.fixture(scope="module")
def deployment(redis_server: PrivateRedis) -> Iterator[Deployment]:
    space = Space(redis_server, f"t{secrets.token_hex(6)}")
    settings = {"admin_keys": [KEY], "trusted_nodes": "none"}
    with Deployment(2, redis=space, settings=settings) as deployment:  # type: ignore[arg-type]
        yield deployment
        quiet_check(space, engines=[])
        deployment.stop()
        assert not deployment.left_behind


def with_key(open_page: Open, deployment: Deployment) -> Page:
    page = open_page(deployment.url)
    page.set_default_timeout(WITHIN_MS)
    page.locator("#key").fill(KEY)
    page.locator("#key").press("Enter")
    return page


def test_a_wrong_key_is_refused_and_the_right_one_shows_the_deployment(
    deployment: Deployment, engine_factory: Factory, open_page: Open
) -> None:
    engine = engine_factory(models=("keys",))
    deployment.add(engine, headers=ADMIN)
    page = open_page(deployment.url)
    page.set_default_timeout(WITHIN_MS)
    page.locator("#key").fill("wrong")
    page.locator("#key").press("Enter")
    page.locator("#key-why", has_text="The admin key is wrong.").wait_for()
    page.locator("#key").fill(KEY)
    page.locator("#key").press("Enter")
    page.locator("#nodes-body tr", has_text="keys").filter(has_text="ready").wait_for()
    assert page.locator("#workers-list li").count() == 2
    assert page.locator("#link-text").inner_text() == "live"


def test_running_requests_and_their_decisions_show_as_they_come(
    deployment: Deployment, engine_factory: Factory, open_page: Open
) -> None:
    engine = engine_factory(models=("live", "later"), chunks=4, gap_s=0.5)
    deployment.add(engine, headers=ADMIN)
    page = with_key(open_page, deployment)
    row = page.locator("#nodes-body tr", has_text="live")
    row.wait_for()
    asked = streams(deployment, 5, "live")
    row.locator("td.load b", has_text="5").wait_for()
    assert [answer.status for answer in asked.result(30)] == [200] * 5
    row.locator("td.load b", has_text="0").wait_for()
    # Each worker asks once a second whether somebody looks: by now all know.
    assert streams(deployment, 1, "later").result(30)[0].status == 200
    entry = page.locator("#decisions-list > li", has_text="later")
    entry.wait_for()
    assert "ok 200" in entry.inner_text()
    entry.locator("summary").click()
    entry.locator("tr.is-chosen").wait_for()
    row.locator("td.share", has_text="100 %").wait_for()


def test_a_node_is_drained_from_the_page(deployment: Deployment, engine_factory: Factory, open_page: Open) -> None:
    engine = engine_factory(models=("drained",))
    deployment.add(engine, headers=ADMIN)
    page = with_key(open_page, deployment)
    page.get_by_role("button", name=f"Drain {engine.url}").click()
    page.get_by_role("button", name="Drain node").click()
    page.get_by_role("dialog").wait_for(state="hidden")
    page.locator(f'#nodes-body [title="{engine.url}"]').wait_for(state="detached")
    assert engine.url not in deployment.nodes(headers=ADMIN)


def test_redis_that_is_away_is_said(deployment: Deployment, open_page: Open) -> None:
    assert deployment.space is not None
    page = with_key(open_page, deployment)
    page.locator("#figure-nodes").wait_for()
    away = page.locator("#troubles li", has_text="Redis is away")
    deployment.space.server.pause()
    away.wait_for()
    deployment.space.server.resume()
    away.wait_for(state="detached")
