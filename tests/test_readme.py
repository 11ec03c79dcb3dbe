"""The README's settings table says what `app/settings.py` says."""

from __future__ import annotations

import re
from pathlib import Path

from docs.scripts.reference import readme_table

README = Path(__file__).parent.parent / "README.md"


def test_the_settings_table_is_the_settings() -> None:
    found = re.search(r"<!-- settings: begin -->\n(.*)\n?<!-- settings: end -->", README.read_text(), re.DOTALL)
    assert found is not None
    assert found[1].strip() == readme_table(), "run `make docs`"
