"""What one request met on its way: the nodes that it was given, and each leg that was sent.

Hangs in a context variable, so that who takes nodes and who sends legs note in it without knowing of each other; tasks
that a request starts inherit it. None where nobody wants to know. It must not know Redis or HTTP.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field


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


@dataclass(slots=True)
class Journey:
    tries: list[Try] = field(default_factory=list)
    legs: list[Leg] = field(default_factory=list)
    watched: bool = False


current: ContextVar[Journey | None] = ContextVar("journey", default=None)
