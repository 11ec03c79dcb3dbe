"""The newest picture of a deployment, kept up in the background for who draws it.

Owns the thread that reads and what becomes of failures: it begins anew, and says since when there is nothing. It
must not know where the documents come from, nor how they are drawn.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from app.terminal.failures import CommandError
from app.terminal.reach import Deployment

DECISIONS = 200
"""As many as a deployment keeps."""
PAUSE_S = 1.0
"""Before it begins anew."""


@dataclass(frozen=True, slots=True)
class Seen:
    """`age_s`: of the state; `trouble`: why no newer one comes, empty while they do; `decisions`: newest first."""

    state: dict[str, Any]
    age_s: float = 0.0
    trouble: str = ""
    decisions: tuple[dict[str, Any], ...] = field(default=())


class Feed:
    """One deployment, read until closed."""

    def __init__(
        self, deployment: Deployment, interval_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._deployment = deployment
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._state: dict[str, Any] = {}
        self._at_s = 0.0
        self._trouble = ""
        self._decisions: deque[dict[str, Any]] = deque(maxlen=DECISIONS)
        self._newest = ""
        self._over = threading.Event()
        # It may hang in a read for seconds; the command does not wait for that.
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def __repr__(self) -> str:
        return f"<Feed {self._deployment.name} decisions={len(self._decisions)} trouble={self._trouble!r}>"

    def start(self) -> None:
        """Read once, so that a wrong address is told at once; then go on in the background. Raises CommandError."""
        self._take("state", self._deployment.state())
        self._thread.start()

    def close(self) -> None:
        self._over.set()

    @property
    def seen(self) -> Seen:
        with self._lock:
            age_s = max(0.0, self._clock() - self._at_s)
            return Seen(self._state, age_s, self._trouble, tuple(reversed(self._decisions)))

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                for kind, document in self._deployment.watch(self._interval_s):
                    self._take(kind, document)
                    if self._over.is_set():
                        return
                trouble = "the connection ended"
            except CommandError as e:
                trouble = str(e)
            except Exception as e:  # whatever it is, the person at the terminal sees it, and it is tried again
                trouble = f"{type(e).__name__}: {e}"
            with self._lock:
                self._trouble = trouble
            self._over.wait(PAUSE_S)

    def _take(self, kind: str, document: Any) -> None:
        with self._lock:
            if kind == "state":
                self._state, self._at_s, self._trouble = document, self._clock(), ""
            elif kind == "decisions":
                self._note(document)

    def _note(self, decisions: Iterable[dict[str, Any]]) -> None:
        """Who begins anew is told of the last ones again."""
        for decision in decisions:
            if place(decision["id"]) > place(self._newest):
                self._decisions.append(decision)
                self._newest = decision["id"]


def place(entry: str) -> tuple[int, int]:
    """Where an entry of a Redis stream stands; its id is `ms-number`."""
    ms, _, number = entry.partition("-")
    return (int(ms) if ms.isdecimal() else 0), (int(number) if number.isdecimal() else 0)
