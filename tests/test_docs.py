"""The documentation is whole: it builds as a site, and what it names of ours exists."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from pymdownx.slugs import slugify

from app.cli import Parser, build_parser
from app.dispatch.handover.protocol import LinkFailed
from app.errors import EvenhandError
from app.http.peek import INTERNAL
from app.metrics.families import FAMILIES
from app.settings import OTHER_VARIABLES, Settings, flag_of, variables_of
from docs.scripts.reference import api_page, default_of, settings_page
from tests.support.deployment import Deployment
from tests.support.redis import PrivateRedis
from tests.support.wait import eventually

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OUTSIDE = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "lua" / "README.md"]
PAGES = [*OUTSIDE, *sorted(DOCS.rglob("*.md"))]
FLAGS = {flag_of(name) for name in Settings.model_fields}
VARIABLES = {variable for name in Settings.model_fields for variable in variables_of(name)} | set(OTHER_VARIABLES)
VARIABLES |= set(re.findall(r"\bEVENHAND_[A-Z_]+[A-Z]\b", (ROOT / "docker-compose.yml").read_text()))
parser_of = cache(build_parser)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# --- the site


@pytest.mark.wide
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=55)
    assert built.returncode == 0, built.stderr
    pages = {path.relative_to(tmp_path / "site").as_posix() for path in (tmp_path / "site").rglob("*.html")}
    sources = {path.relative_to(DOCS).with_suffix(".html").as_posix() for path in DOCS.rglob("*.md")}
    assert pages == sources | {"404.html", "redis-keys.html", "changelog.html"}
    assert [page for page in pages if "sequenceDiagram" in (tmp_path / "site" / page).read_text()] == []
    # Nothing is fetched from elsewhere by who reads it.
    fetched = re.compile(r'<(?:script|img|link rel="stylesheet")[^>]*(?:src|href)="(?:https?:)?//[^"]*"')
    assert [page for page in pages if fetched.search((tmp_path / "site" / page).read_text())] == []
    # The search: guides before decisions, and hash-key is one word.
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())
    boosts = {entry["location"]: entry.get("boost", 1) for entry in index["docs"] if "#" not in entry["location"]}
    less = {location for location, boost in boosts.items() if boost < 1}
    assert less == {page for page in pages if page.startswith("decisions/")} | {"redis-keys.html", "changelog.html"}
    words = "rotate a --hash-key, `hash-key`."
    assert [word for word in re.split(index["config"]["separator"], words) if word][2:] == ["hash-key", "`hash-key`"]


def test_pages_that_are_made_from_the_code_are_current() -> None:
    assert (DOCS / "settings.md").read_text() == settings_page(), "run `make docs`"
    assert (DOCS / "api.md").read_text() == api_page(), "run `make docs`"


# --- links of pages that are not only in the site

LINK = re.compile(r"\]\(([^()\s]+)\)")
SLUG = slugify(case="lower")


@cache
def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", re.sub(r"(?ms)^```.*?^```$", "", page.read_text()), re.MULTILINE)
    return {SLUG(re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading), "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_in_the_repository_lead_somewhere(page: Path) -> None:
    wrong = []
    for target in LINK.findall(re.sub(r"(?ms)^```.*?^```$", "", page.read_text())):
        path, _, anchor = target.partition("#")
        if re.match(r"https?:", target):
            continue
        place = (page.parent / path).resolve() if path else page
        if not place.exists() or (anchor and place.suffix == ".md" and anchor not in anchors(place)):
            wrong.append(target)
    assert wrong == []


# --- commands, flags, variables, metrics


def typed(text: str) -> Iterator[str]:
    """What is to be typed: commands of `evenhand` in blocks and within a line."""
    for block in re.findall(r"(?ms)^```\w*\n(.*?)^```$", text):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            found = re.match(r"(?:\$ )?(?:\w+=\S+ )*(evenhand (?!\d).*)", line)
            if found:
                yield re.split(r"\s#|[|;>&]", found[1])[0]
    yield from re.findall(r"`(evenhand [a-z][^`]*)`", text)


def flags_of(words: list[str]) -> set[str]:
    """Those that a command of `evenhand` takes."""
    parser = parser_of(words[0])
    used = parser.below(words[0])
    assert used is not None, f"there is no command {words[0]}"
    known = set(used.flags())
    for verb in (used.below(word) for word in words[1:]):
        known |= set(verb.flags()) if isinstance(verb, Parser) else set()
    return known


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_that_a_page_names_exist(page: Path) -> None:
    for command in typed(page.read_text()):
        words = command.split()[1:]
        first = words[0].rstrip(".,:")
        if first.startswith("-"):
            continue
        used = {re.split("[=,]", word)[0] for word in words if re.match(r"--[a-z]", word)}
        known = set().union(*(flags_of([each, *words[1:]]) for each in first.split("|")))
        assert used <= known, f"{command}: {used - known}"


@pytest.mark.parametrize("page", sorted(DOCS.glob("from-*.md")), ids=name_of)
def test_what_others_flags_are_called_here_exists(page: Path) -> None:
    """In the tables: the second column is ours."""
    ours = set()
    for line in page.read_text().splitlines():
        cells = re.split(r"(?<!\\)\|", line)
        if line.startswith("| `") and len(cells) > 3:
            for code in re.findall(r"`([^`]+)`", cells[2]):
                if code.startswith("evenhand "):
                    continue  # looked at above
                ours |= set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", code))
                ours |= {f"--{name}" for name in re.findall(r"^[a-z]+(?:-[a-z]+)+(?= =|$)", code)}
            if "the same" in cells[2]:
                ours |= set(re.findall(r"`(--[a-z-]+)`", cells[1]))
    assert len(ours) > 5
    assert ours <= FLAGS, ours - FLAGS


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != DOCS / "decisions"], ids=name_of)
def test_defaults_that_a_page_names_are_those_of_the_settings(page: Path) -> None:
    """`--flag` (5), where 5 is no status, and the column `default` of tables whose rows begin with a flag."""
    text = page.read_text()
    if page.name.startswith("from-"):
        text = "\n".join(line.split("|")[2] for line in text.splitlines() if line.startswith("| ") and "`" in line)
    named = re.findall(r"`--([a-z-]+)` \(`?(?![45]\d\d\b)([\d.]+|off|on)(?: s| MiB)?`?\)", text)
    for table in re.findall(r"(?m)^\| \w+ \| default \|.*\n\|[-|]+\n((?:\|.*\n)+)", text):
        for row in table.splitlines():
            flags, defaults = (cell.strip() for cell in row.split("|")[1:3])
            if flags.startswith("`--"):
                shown = re.split(r",\s*", defaults.replace("`", ""))
                named += zip(re.findall(r"`--([a-z-]+)`", flags), shown, strict=True)
    fields = {flag_of(name)[2:]: name for name in Settings.model_fields}
    wrong = [(flag, shown) for flag, shown in named if flag in fields and shown != _default(fields[flag])]
    assert wrong == []


def _default(name: str) -> str:
    if name == "max_body_size":
        return "256"  # MiB
    return "off" if name == "total_timeout_s" else default_of(name)


@cache
def names_of_metrics() -> set[str]:
    """And of what else begins as theirs do."""
    adapter = (ROOT / "deploy/kubernetes/prometheus/adapter-values.yaml").read_text()
    volumes = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["volumes"]
    names = {family.name for family in FAMILIES} | set(re.findall(r"as: (\w+)", adapter))
    return names | {f"evenhand_{volume}" for volume in volumes}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_variables_and_metrics_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    variables = set(re.findall(r"\bEVENHAND_[A-Z_]+[A-Z]\b", text))
    assert variables <= VARIABLES, variables - VARIABLES
    metrics = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bevenhand(?:_[a-z]+)+\b", text)}
    assert metrics <= names_of_metrics(), metrics - names_of_metrics()


def test_figures_of_sizing_are_those_that_were_measured() -> None:
    page = (DOCS / "sizing.md").read_text()
    part = page.partition("## Workers")[2].partition("So a deployment")[0]
    measured = re.findall(r"\d+,\d{3}(?= requests/s| chunks/s)", part)
    assert len(measured) == 4
    figures = (DOCS / "performance.md").read_text()
    assert [figure for figure in measured if f"| {figure} (" not in figures] == []


# --- troubleshooting


def test_codes_that_troubleshooting_names_are_those_of_errors() -> None:
    def below(kind: type[EvenhandError]) -> set[str | None]:
        return {kind.code}.union(*(below(each) for each in kind.__subclasses__()))

    rows = re.findall(r"^\| \d{3} (.*?) \|", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    named = {code for row in rows for code in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", row)}
    assert len(named) > 8
    assert LinkFailed.code in named <= below(EvenhandError)


def test_lines_of_the_log_that_troubleshooting_quotes_are_written_somewhere() -> None:
    sources = [path.read_text() for package in ("app", "workers") for path in sorted((ROOT / package).rglob("*.py"))]
    # A text that goes over several lines of the source is one again; what is put into it is `...`.
    joined = re.sub(r"\{[^{}]*\}|%[sdr]", "...", re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources)))
    page = (DOCS / "troubleshooting.md").read_text()
    quoted = re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| log: (.*?) \|", page, re.MULTILINE)))
    quoted += re.findall(r"^\| `([^`]*)` \| ", page.partition("## Lines of nodes in the log")[2], re.MULTILINE)
    assert len(quoted) > 10
    ours = [text for text in quoted if text != "Worker (pid:...) was sent SIGKILL!"]  # that is gunicorn's
    parts = [part.strip(" :;,") for text in ours for part in text.split("...")]
    assert [part for part in parts if len(part) > 8 and part not in joined] == []


# --- security


def test_security_names_every_field_that_is_refused() -> None:
    section = (
        (DOCS / "security.md").read_text().partition("## Fields that clients may not send")[2].partition("\n## ")[0]
    )
    assert set(INTERNAL) == set(re.findall(r"`(\w+)`", section.partition(" move caches")[0]))


def test_the_rights_that_security_names_are_enough() -> None:
    found = re.search(r"^user evenhand (on .*)$", (DOCS / "security.md").read_text(), re.MULTILINE)
    assert found is not None
    with PrivateRedis(tcp=True) as redis:
        redis.client.execute_command("ACL", "SETUSER", "evenhand", *found[1].split())
        url = f"redis://evenhand:PASSWORD@127.0.0.1:{redis.port}/0"
        with Deployment(1, redis=url, namespace="default", settings={"simulate": 1}) as deployment:
            eventually(lambda: deployment.get("/ready").status == 200)
            assert deployment.post("/v1/completions", {"model": "sim", "prompt": "hi", "max_tokens": 1}).status == 200
            eventually(lambda: bool(redis.client.keys("*:latency:*")))
            refused = redis.client.execute_command("ACL", "LOG")
    assert refused == []
