"""A headless Chromium for the tests of the page: one for all of them, a context of its own for each.

After each test nothing may have gone wrong in the page: no error, no violation of its policy, no other origin asked.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

import pytest

from tests.browser.site import Site
from tests.support.loop import LoopThread

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --disable-crash-reporter --disable-breakpad --disable-extensions"""
WITHIN_MS = 5000

Open = Callable[..., "Page"]


def _missing(what: str) -> NoReturn:
    if os.environ.get("EVENHAND_CI_RUN"):
        pytest.fail(f"{what}: the tests of the page can't run", pytrace=False)
    pytest.skip(f"{what}: the tests of the page can't run")


# Not of the session: while it is there, no test beside these may run an event loop of its own.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    try:
        from playwright.sync_api import sync_playwright  # here: it takes long, and each of several jobs collects all
    except ImportError:
        _missing("there is no package playwright (make test installs it)")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        _missing("there is no chromium and no google-chrome (apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS.split())
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def common_page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page(reduced_motion="reduce")
    page.set_default_timeout(WITHIN_MS)
    yield page
    page.context.close()


@pytest.fixture
def open_page(common_page: Page) -> Iterator[Open]:
    """`open_page(url, width=360, color_scheme="dark", clock=True)`: the page, not waited for.

    `clock`: its time stands still but for `page.clock`. Only then is the page of this test alone: a new one takes most
    of a second of a processor. Each site has another port, so that nothing is left in a storage.
    """
    wrong: list[str] = []
    pages: list[Page] = []

    def request(sent: Any) -> None:
        if urlsplit(sent.url).netloc != urlsplit(pages[0].url).netloc and pages[0].url != "about:blank":
            wrong.append(f"asked elsewhere: {sent.url}")

    def console(message: Any) -> None:
        # The browser notes each answer that is no 2xx; tests of refusals have those.
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            wrong.append(f"console {message.type}: {message.text}")

    def error(error: Any) -> None:
        wrong.append(f"error: {error}")

    def open_(url: str, *, width: int = 1280, color_scheme: Any = "light", clock: bool = False) -> Page:
        assert not pages, "one a test"
        page = common_page
        if clock:
            page = common_page.context.browser.new_page(reduced_motion="reduce")  # type: ignore[union-attr]
            page.set_default_timeout(WITHIN_MS)
            page.clock.install(time=0)
            page.clock.pause_at(1000)
        pages.append(page)
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=color_scheme)
        for name, listener in (("request", request), ("console", console), ("pageerror", error)):
            page.on(name, listener)  # type: ignore[call-overload]
        page.goto(f"{url}/dashboard")
        return page

    yield open_
    for page in pages:
        if page is not common_page:
            page.context.close()
            continue
        for name, listener in (("request", request), ("console", console), ("pageerror", error)):
            page.remove_listener(name, listener)
        page.goto("about:blank")
    assert not wrong


@pytest.fixture
def site(engine_loop: LoopThread) -> Iterator[Site]:
    with Site(engine_loop) as site:
        yield site
