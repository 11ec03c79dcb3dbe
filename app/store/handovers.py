"""Figures of split serving and of encoders: how often what happened, and how long its stages took, over all
workers.

Owns HASH handovers (what -> how often) and HASH stages:<url> (<stage>_s, <stage>_count: sums that only grow).
They are figures: sent behind the counts on the hot connection, never waited for, lost while Redis is away. Stages of a
quarter of a second go together: a request has up to five.
"""

from __future__ import annotations

from app.metrics.families import STAGES
from app.metrics.figures import Figures
from app.store.keys import Keys
from app.store.ledger import Ledger
from app.store.links import hash_of
from app.store.registry import Registry
from app.store.soon import Soon


class Handovers:
    """One per worker."""

    def __init__(self, *, ledger: Ledger, registry: Registry, keys: Keys, figures: Figures | None = None) -> None:
        self._ledger = ledger
        self._registry = registry
        self._keys = keys
        self._figures = figures or Figures()
        self._sums: dict[tuple[str, str], tuple[float, int]] = {}  # url, stage -> seconds and times not noted yet
        self._soon = Soon(self.note)

    def count(self, what: str) -> None:
        """One more: links_made, links_failed, sessions_freed, sessions_lost, missing_params,
        prefill_fallback, encodes_failed."""
        self._ledger.note("HINCRBY", self._keys.handovers, what, 1)

    def took(self, url: str, stage: str, seconds: float) -> None:
        """A stage of a request (encode, link, prefill, handover, decode) took so long at the node."""
        self._figures.observe(STAGES, seconds, stage, url)
        total_s, times = self._sums.get((url, stage), (0.0, 0))
        self._sums[url, stage] = total_s + seconds, times + 1
        if self._soon.timer is None:
            self._soon.start()

    def note(self) -> None:
        """Send what is not noted yet; of nodes that are gone nothing is kept."""
        self._soon.stop()
        sums, self._sums = self._sums, {}
        for (url, stage), (total_s, times) in sums.items():
            if url in self._registry.snapshot.nodes:
                name = self._keys.stages(url)
                self._ledger.note("HINCRBYFLOAT", name, f"{stage}_s", f"{total_s:.6f}")
                self._ledger.note("HINCRBY", name, f"{stage}_count", times)

    async def counts(self) -> dict[str, int]:
        """Raises StoreUnavailable."""
        found = await hash_of(self._registry, self._keys.handovers)
        return {what: int(count) for what, count in found.items() if count.isdecimal()}
