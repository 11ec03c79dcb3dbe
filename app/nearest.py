"""What somebody who mistyped a name most likely meant: of a flag, a command, a variable."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ELSEWHERE = {
    "host": "server-name",
    "port": "server-port",
    "worker-urls": "nodes",
    "policy": "routing-strategy",
    "num-workers": "workers",
}
"""Settings as other routers of engines name them (sglang-router, vllm-router, uvicorn) -> ours. By their letters they
are like settings of quite another meaning."""


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name that `word` is elsewhere, or the one most like it; None where nothing is like it."""
    known = list(names)
    ours = ELSEWHERE.get(_plain(word))
    same = next((name for name in known if _plain(name) == ours), None)
    if same is not None:
        return same
    found = difflib.get_close_matches(word, known, n=1)
    return found[0] if found else None


def _plain(name: str) -> str:
    """Flag, variable and name in the file alike."""
    return name.lstrip("-").replace("_", "-").lower()
