"""The version stands in app/__init__.py and nowhere else; the changelog has the form that a release goes by."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.version import Version

from app import __version__
from app.http.openapi import document
from tests.release.scripts import ROOT

CHANGELOG = (ROOT / "CHANGELOG.md").read_text()

# Elsewhere it stands in what was measured with a version or printed by one (docs), and in made-up documents (tests).
CODE = ["app", "workers", "lua", "deploy", ".ci"]
FILES = ["pyproject.toml", "Makefile", "Dockerfile", "docker-compose.yml", ".env.example", "README.md", "mkdocs.yml"]


def repeating(version: str) -> set[str]:
    files = [path for folder in CODE for path in (ROOT / folder).rglob("*") if path.is_file()]
    files += [ROOT / name for name in FILES if (ROOT / name).exists()]
    alone = re.compile(rf"(?<![\d.]){re.escape(version)}(?![\d.])".encode())
    return {str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc" and alone.search(path.read_bytes())}


def test_the_version_stands_in_one_place() -> None:
    assert repeating(__version__) == {"app/__init__.py"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"] and "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"] == {"path": "app/__init__.py"}
    assert Path(ROOT / "app" / "__init__.py").read_text() == f'__version__ = "{__version__}"\n'
    assert str(Version(__version__)) == __version__


def test_what_says_the_version_has_it_from_there() -> None:
    """`evenhand --version` and the metadata: test_package.py."""
    assert document()["info"]["version"] == __version__


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    headings = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    released = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:]]
    assert all(released), headings
    versions = [Version(found[1]) for found in released if found]
    assert versions == sorted(set(versions), reverse=True)
    assert all(version <= Version(__version__) for version in versions)
    sections = re.findall(r"^### (.*)$", CHANGELOG, re.MULTILINE)
    assert set(sections) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_each_entry_of_the_changelog_stands_in_a_section() -> None:
    for part in re.split(r"^## ", CHANGELOG, flags=re.MULTILINE)[1:]:
        heading, *lines = part.splitlines()
        before = "\n".join(lines).partition("\n### ")[0]
        assert not re.search(r"^- ", before, re.MULTILINE), f"entries of {heading} before any section"
