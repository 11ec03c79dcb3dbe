"""How a node is chosen by a strategy: in Redis, here while Redis is away, and for who watches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from app.balancing import DECIDE_BY_LEARNED, POLICIES, Policy
from app.store.keys import Keys
from app.store.scripts import Prepared, Script
from app.store.sight import Score, of_nodes


class Way(NamedTuple):
    """`call`: of the strategy's acquire script; `call_giving`: the same where something is given back in it."""

    call: Prepared
    call_giving: Prepared
    policy: Policy
    score: Score
    by_chance: bool
    by_learned: bool

    @classmethod
    def of(cls, strategy: str, scripts: dict[str, Script], keys: Keys, worker: str) -> Way:
        script, by_learned = scripts[f"acquire_{strategy}"], strategy in DECIDE_BY_LEARNED
        names: Sequence[str] = (
            *(keys.unfinished, keys.ledger(worker), keys.sessions, keys.version),
            *(keys.latency_mean, keys.explored, keys.load_index),
            *((keys.learned, keys.learned_since) if by_learned else ()),
        )
        call, giving = Prepared(script, names, (worker,)), Prepared(script, (*names, keys.failures), (worker,))
        return cls(call, giving, POLICIES[strategy], of_nodes(strategy), strategy == "random", by_learned)
