"""The README's settings table says what `app/settings.py` says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from docs.scripts.reference import readme_table

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def test_the_settings_table_is_the_settings() -> None:
    found = re.search(r"<!-- settings: begin -->\n(.*)\n?<!-- settings: end -->", README.read_text(), re.DOTALL)
    assert found is not None
    assert found[1].strip() == readme_table(), "run `make docs`"


def test_the_command_of_a_checkout_is_one(tmp_path: Path) -> None:
    (line,) = re.findall(r"^alias evenhand=.*$", README.read_text(), re.MULTILINE)
    assert f"\n{line}\n" in (ROOT / "docs" / "start.md").read_text()
    line = line.replace("$PWD/.venv/bin/python", sys.executable)
    script = f"shopt -s expand_aliases\n{line}\ncd {tmp_path}\nevenhand --version\n"
    said = subprocess.run(["bash", "-ec", script], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert said.returncode == 0 and re.fullmatch(r"evenhand \d\S*\n", said.stdout), said.stderr


def test_the_text_of_a_link_that_names_a_page_is_where_it_leads() -> None:
    links = re.findall(r"\[`?((?:[\w-]+/)*[\w-]+\.\w+)`?\]\(([^)#]+)", README.read_text())
    assert len(links) > 8
    assert [link for link in links if link[0] not in (link[1], link[1].removeprefix("docs/"))] == []
