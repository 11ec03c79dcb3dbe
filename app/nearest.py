"""What somebody who mistyped a name most likely meant: of a flag, a command, a variable."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name most like `word`; None where nothing is like it."""
    found = difflib.get_close_matches(word, list(names), n=1)
    return found[0] if found else None
