"""Which failures send a request to another node, and how often.

Only before the client has the first byte, only to nodes that have not been tried, and within the budget of the
whole deployment where an engine has worked for nothing. An engine's 4xx and 429 are answers, not failures.
"""

from __future__ import annotations

from app.errors import EngineBroke, EngineTimeout, EngineUnreachable, UpstreamError
from app.store.budget import RetryBudget

AT_ANOTHER = frozenset((502, 503, 504))
"""Statuses that say that this engine can't serve now; a 500 may be the request's own fault, so once only."""


def never_arrived(error: UpstreamError) -> bool:
    """Whether the engine can't have seen the request: then it costs nothing to ask another."""
    return isinstance(error, EngineUnreachable) or (isinstance(error, EngineTimeout) and error.stage == "connect")


class Retries:
    """One request's. `left`: other nodes that may still be tried.

    Args:
        server_errors: whether a 500 is tried elsewhere, once.
    """

    __slots__ = ("_budget", "_server_errors", "left")

    def __init__(self, left: int, budget: RetryBudget, *, server_errors: bool = True) -> None:
        self.left = left
        self._budget = budget
        self._server_errors = server_errors

    def concerns(self, status: int) -> bool:
        """Whether an answer of this status is one to be tried elsewhere."""
        return status in AT_ANOTHER or (status == 500 and self._server_errors)

    async def may(self, failure: UpstreamError | int) -> bool:
        """Whether the request may go to another node after an error, or an answer that `concerns`; counts it."""
        if not self.left:
            return False
        if isinstance(failure, UpstreamError):
            free = never_arrived(failure)
            wanted = free or _broke_early(failure)
        else:
            free, wanted = False, self.concerns(failure)
        if not wanted or not (free or await self._budget.take()):
            return False
        self.left -= 1
        if failure == 500:
            self._server_errors = False
        return True

    async def may_again(self) -> bool:
        """Whether the same nodes may do it once more, through no fault of theirs; counts it."""
        if not self.left or not await self._budget.take():
            return False
        self.left -= 1
        return True


def _broke_early(error: UpstreamError) -> bool:
    return isinstance(error, EngineBroke) or (isinstance(error, EngineTimeout) and error.stage == "first_byte")
