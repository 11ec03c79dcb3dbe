"""The latencies of this worker's answers: what its local decisions go by, and what it tells Redis of them.

Owns the local windows and the notes that are not sent yet. It must not know connections. Keys: latency:*,
latency_mean, explored, last_success (through lua/note_latencies.lua).

They are figures, not counts: one that is lost while Redis is away is made up for by the next. So those of a quarter
of a second go together, and cost Redis next to nothing; but where the routing strategy decides by them each goes
at once, before the release of its request: the next decision knows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

from app.store.keys import Keys
from app.store.scripts import Argument, Script
from app.store.soon import Soon

WINDOW = 15
"""Latencies kept per node (source: LMDeploy's LATENCY_DEQUE_LEN)."""
NODES_A_NOTE = 50
"""About 0.5 ms of Redis: nobody waits longer for a note than for a slow command."""


class Latencies:
    """See the module. `send` gets commands, in order; it may lose them."""

    def __init__(
        self, *, keys: Keys, script: Script, at_once: bool, send: Callable[[Sequence[Argument]], None]
    ) -> None:
        self._keys = keys
        self._script = script
        self._at_once = at_once
        self._send = send
        self._windows: dict[str, deque[float]] = {}
        self._not_noted: dict[str, int] = {}  # url -> how many of its newest
        self._soon = Soon(self.note)

    def __repr__(self) -> str:
        return f"<Latencies of {len(self._windows)} nodes, not noted={sum(self._not_noted.values())}>"

    def mean_s(self, url: str) -> float | None:
        """Of the node's last answers to this worker; None without history."""
        window = self._windows.get(url)
        return sum(window) / len(window) if window else None

    def newest_first(self, url: str) -> list[float]:
        """The node's last answers to this worker, seconds."""
        return list(reversed(self._windows.get(url, ())))

    def add(self, url: str, latency_s: float, nodes: Collection[str]) -> None:
        """An answer of `url` ended well. `nodes`: those that there are, the windows of others may go."""
        window = self._windows.get(url)
        if window is None:
            if len(self._windows) > 2 * len(nodes) + 16:  # nodes come and go
                self._windows = {other: window for other, window in self._windows.items() if other in nodes}
            window = self._windows[url] = deque(maxlen=WINDOW)
        window.append(latency_s)
        self._not_noted[url] = self._not_noted.get(url, 0) + 1
        if self._at_once:
            self.note()
        elif self._soon.timer is None:
            self._soon.start()

    def note(self) -> None:
        """Send what is not noted yet."""
        self._soon.stop()
        not_noted, self._not_noted = self._not_noted, {}
        keys, urls = self._keys, [url for url in not_noted if url in self._windows]
        for first in range(0, len(urls), NODES_A_NOTE):
            names = [keys.nodes, keys.latency_mean, keys.explored, keys.last_success]
            arguments: list[Argument] = [WINDOW]
            for url in urls[first : first + NODES_A_NOTE]:
                newest = list(self._windows[url])[-not_noted[url] :]
                names.append(keys.latency(url))
                arguments += [url, len(newest), *(f"{latency_s:.6f}" for latency_s in newest)]
            self._send(self._script.evalsha(names, arguments))
