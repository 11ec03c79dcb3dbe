"""What was dispatched to each node within the last minute, by all workers together.

Owns HASH dispatched (through lua/note_dispatched.lua): `<slot> <url>` -> requests. A slot is 10 s of Redis's clock.
Each worker adds what it dispatched once a second. They are figures: a note may be lost. It must not know connections.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence

from app.store.keys import Keys
from app.store.scripts import Argument, Script

SLOT_S = 10
SLOTS = 6
"""So the last minute is the last 50 to 60 seconds."""
NODES_A_NOTE = 200
"""About 0.5 ms of Redis."""


class Dispatched:
    """One per worker. `new`: what was dispatched since the last `roll`; who dispatches adds to it."""

    def __init__(self, *, keys: Keys, script: Script) -> None:
        self.new: defaultdict[str, int] = defaultdict(int)
        self._key = keys.dispatched
        self._script = script
        self._not_noted: Counter[str] = Counter()
        self._slots: deque[tuple[int, Counter[str]]] = deque()  # this worker's own, by its own clock

    def __repr__(self) -> str:
        return f"<Dispatched {sum(self.of_last_minute().values())} within the last minute>"

    def roll(self, now_s: float | None = None) -> None:
        """Once a second, Redis or not."""
        slot = int(time.monotonic() if now_s is None else now_s) // SLOT_S
        if not self._slots or self._slots[-1][0] != slot:
            self._slots.append((slot, Counter()))
            while self._slots[0][0] <= slot - SLOTS:
                self._slots.popleft()
        self._slots[-1][1].update(self.new)
        self._not_noted.update(self.new)
        self.new.clear()

    def note(self, send: Callable[[Sequence[Argument]], None]) -> None:
        """Send what is not noted yet; less than all where Redis was away for longer than a minute."""
        own, self._not_noted, not_noted = self.of_last_minute(), Counter(), self._not_noted
        counts = [(url, min(count, own[url])) for url, count in not_noted.items() if own[url]]
        for first in range(0, len(counts), NODES_A_NOTE):
            words = [word for item in counts[first : first + NODES_A_NOTE] for word in item]
            # EVAL: once a second is too seldom to depend on a cache.
            command = self._script.evalsha((self._key,), (SLOT_S, SLOTS, *words))
            send(("EVAL", self._script.text, *command[2:]))

    def of_last_minute(self) -> Counter[str]:
        """What this worker dispatched itself, until the last `roll`."""
        found: Counter[str] = Counter()
        for _, counts in self._slots:
            found.update(counts)
        return found


def of_last_minute(found: Mapping[str, str], now_s: float) -> dict[str, int]:
    """url -> requests, from HASH dispatched; what somebody else put there is left out."""
    slot = int(now_s) - int(now_s) % SLOT_S
    counts: Counter[str] = Counter()
    for field, count in found.items():
        began, _, url = field.partition(" ")
        if url and began.isdecimal() and count.isdecimal() and slot - SLOTS * SLOT_S < int(began) <= slot:
            counts[url] += int(count)
    return dict(counts)
