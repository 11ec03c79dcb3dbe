"""Which model a request's name means: aliases, and the model of requests that name none.

Owns the rules. It must not know bodies, nor who may use what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from app.http.ports import NodeRegistry


class Names:
    """One per worker. A model that a node has is itself, whatever aliases say, also while that node is away: an
    alias must not turn requests for one model into answers of another just because a node has failed."""

    def __init__(self, registry: NodeRegistry, *, aliases: Mapping[str, str], default: str | None) -> None:
        self._registry = registry
        self._aliases = aliases
        self._default = default or ""

    def __repr__(self) -> str:
        return f"<Names aliases={len(self._aliases)} default={self._default!r}>"

    @property
    def default(self) -> str:
        """The name that requests without one are taken to say; "": they are not."""
        return self._default

    def meant(self, name: str) -> str:
        """The model of a request that says `name`; "": it says nothing."""
        name = name or self._default
        model = self._aliases.get(name)
        return name if model is None or self._registry.snapshot.knows(name) else model

    def aliases(self) -> Iterator[tuple[str, str]]:
        """(alias, model) of those that are in force."""
        snapshot = self._registry.snapshot
        return ((alias, model) for alias, model in self._aliases.items() if not snapshot.knows(alias))
