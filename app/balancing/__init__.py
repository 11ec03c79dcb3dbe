"""Policies: pure choices between candidates, the Python twins of `lua/policies/`.

A worker uses a twin while Redis is away; a property test holds each twin to its Lua file. Nothing
here may import redis or asyncio.
"""

from __future__ import annotations

from app.balancing import min_expected_latency, min_observed_latency, random
from app.balancing.candidate import Candidate, Policy
from app.balancing.encoders import ENCODER_POLICIES, Encoder

POLICIES: dict[str, Policy] = {
    "min_expected_latency": min_expected_latency.choose,
    "random": random.choose,
    "min_observed_latency": min_observed_latency.choose,
}

__all__ = ["ENCODER_POLICIES", "POLICIES", "Candidate", "Encoder", "Policy"]
