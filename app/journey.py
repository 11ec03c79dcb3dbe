"""What one request met on its way: the nodes that it was given, and each leg that was sent.

Hangs in a context variable, so that who takes nodes and who sends legs note in it without knowing of each other; tasks
that a request starts inherit it. None where nobody wants to know. It must not know Redis or HTTP.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from app.traceparent import Trace


@dataclass(slots=True)
class Weighed:
    """A candidate as it stood when it was decided. `score`: less is better; None: the strategy compares nothing."""

    node: str
    score: float | None
    unfinished: int
    speed: float
    mean_latency_s: float | None


@dataclass(slots=True)
class Try:
    """A node that was taken. `at_s`: monotonic; `candidates`: only while decisions are watched."""

    node: str
    at_s: float
    took_s: float = 0.0
    candidates: list[Weighed] = field(default_factory=list)
    left_off: int = 0
    stage: str = ""


@dataclass(slots=True)
class Leg:
    """A call to a node. `stage`: request, prefill, decode or encode; `began_s`: monotonic."""

    node: str
    stage: str
    began_s: float
    seconds: float = 0.0
    status: int | None = None
    error: str | None = None
    span_id: int = 0


class Journey:
    """`trace`: of a request that is traced."""

    __slots__ = ("legs", "trace", "tries", "watched")

    def __init__(
        self,
        tries: list[Try] | None = None,
        legs: list[Leg] | None = None,
        *,
        watched: bool = False,
        trace: Trace | None = None,
    ) -> None:
        self.tries = tries or []
        self.legs = legs or []
        self.watched = watched
        self.trace = trace

    def broke(self, node: str, error: str) -> None:
        """The answer that is under way from the node ended before its end."""
        for leg in reversed(self.legs):
            if leg.node == node and not leg.seconds:
                leg.error = error
                return

    def settle(self, ended_s: float) -> None:
        """For who reads it, once the request is over: a leg that is still open ended with the next one of its stage,
        or with the request. Nobody looks at a clock for that while it runs."""
        next_s: dict[str, float] = {}
        for leg in reversed(self.legs):
            leg.seconds = leg.seconds or max(next_s.get(leg.stage, ended_s) - leg.began_s, 0.0)
            next_s[leg.stage] = leg.began_s


current: ContextVar[Journey | None] = ContextVar("journey", default=None)
