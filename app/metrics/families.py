"""Every metric once: name, kind, labels, help, buckets. docs/metrics.md has the same as a table, which a test holds.

Pure; it must not know where the figures come from.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """A metric.

    Args:
        merge: of a gauge that each worker has, how those of the workers that live become one: livesum or livemin.
            Empty for what is read from Redis, once for the deployment.
        buckets: upper bounds, without infinity.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = field(default=(), repr=False)
    merge: str = ""
    shared: bool = False

    @property
    def stem(self) -> str:
        """The name without what marks a counter."""
        return self.name.removesuffix("_total") if self.kind is Kind.COUNTER else self.name


# --- of this host's workers

# From an answer out of a cache to a long generation; the proxies of the field end at 10 s, where LLMs begin.
_OF_REQUESTS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1800.0)

REQUESTS = Family(
    "evenhand_requests_total",
    Kind.COUNTER,
    "Requests to /v1 that ended, by how: ok, client_error, engine_error, no_node, aborted, shutdown, internal_error.",
    ("model", "route", "outcome", "node"),
)
DURATION = Family(
    "evenhand_request_duration_seconds",
    Kind.HISTOGRAM,
    "From a request's head to the end of its answer.",
    ("model", "route", "outcome"),
    _OF_REQUESTS,
)
TTFT = Family(
    "evenhand_time_to_first_token_seconds",
    Kind.HISTOGRAM,
    "Of streams: from a request's head to the first bytes of its answer's body.",
    ("model", "node"),
    (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 600.0),
)
ITL = Family(
    "evenhand_inter_token_latency_seconds",
    Kind.HISTOGRAM,
    "Of streams: gap between two chunks. A stream's gaps are all counted as their mean.",
    ("model", "node"),
    (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0),
)
RETRIES = Family(
    "evenhand_retries_total",
    Kind.COUNTER,
    "Requests, legs of them and media items that a node got because another one, or a first try, had failed.",
    ("node",),
)
FAILURES = Family(
    "evenhand_node_failures_total",
    Kind.COUNTER,
    "Failures of a node that count for its breaker.",
    ("node",),
)
BREAKER_CHANGES = Family(
    "evenhand_breaker_changes_total",
    Kind.COUNTER,
    "Changes of a node's breaker, by what it became; each is counted by the one worker that made it.",
    ("node", "breaker"),
)
ENCODER_ITEMS = Family(
    "evenhand_encoder_items_total",
    Kind.COUNTER,
    "Media items that an encoder was given in its turn; those that another had failed are retries.",
    ("node",),
)
STAGES = Family(
    "evenhand_stage_duration_seconds",
    Kind.HISTOGRAM,
    "Stages of split requests and of media at a node: encode, link, prefill, handover, decode.",
    ("stage", "node"),
    _OF_REQUESTS,
)
ACQUIRES = Family(
    "evenhand_redis_duration_seconds",
    Kind.HISTOGRAM,
    "From asking Redis for a node to its reply; of each worker about one request in 0.1 s is measured.",
    (),
    (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
)
DEGRADED = Family(
    "evenhand_degraded_seconds_total",
    Kind.COUNTER,
    "Time that workers of this host decided on their own counts because Redis was away, each worker's added up.",
)
REDIS_UP = Family(
    "evenhand_redis_up",
    Kind.GAUGE,
    "1 while every worker of this host decides on the shared state in Redis, 0 while one can't.",
    merge="livemin",
)
LOCAL_WORKERS = Family(
    "evenhand_local_workers",
    Kind.GAUGE,
    "Workers of this host that decide on their own counts because Redis is away.",
    merge="livesum",
)
HOST_WORKERS = Family(
    "evenhand_host_workers",
    Kind.GAUGE,
    "Workers of this host.",
    merge="livesum",
)

# --- of the deployment, from Redis

NODE_INFO = Family("evenhand_node_info", Kind.GAUGE, "1 for each registered node.", ("node", "role"), shared=True)
NODE_STATE = Family(
    "evenhand_node_state", Kind.GAUGE, "1 for the state that a node is in, else 0.", ("node", "state"), shared=True
)
NODE_BREAKER = Family(
    "evenhand_node_breaker",
    Kind.GAUGE,
    "1 for what a node's breaker is, else 0: closed, open, half_open.",
    ("node", "breaker"),
    shared=True,
)
NODE_UNFINISHED = Family(
    "evenhand_node_unfinished", Kind.GAUGE, "Requests that run on a node, of all workers.", ("node",), shared=True
)
NODE_SPEED = Family(
    "evenhand_node_speed", Kind.GAUGE, "A node's speed, where the operator gave one.", ("node",), shared=True
)
NODE_MODELS = Family("evenhand_node_models", Kind.GAUGE, "Models that a node has.", ("node",), shared=True)
WORKERS = Family("evenhand_workers", Kind.GAUGE, "Workers of the deployment whose lease runs.", shared=True)
CURSOR = Family(
    "evenhand_encoder_cursor", Kind.GAUGE, "Position of the next media item in the round of encoders.", shared=True
)
VERSION = Family("evenhand_registry_version", Kind.GAUGE, "Version of the node registry.", shared=True)
HELD_SESSIONS = Family(
    "evenhand_held_sessions",
    Kind.GAUGE,
    "Sessions under migration: caches that LMDeploy's prefill engines hold until decode has them.",
    shared=True,
)
LINKS = Family(
    "evenhand_links",
    Kind.GAUGE,
    "Links between LMDeploy's engines, by their state; void: of engines that have restarted since.",
    ("state",),
    shared=True,
)
HANDOVERS = Family(
    "evenhand_handovers_total",
    Kind.COUNTER,
    "What happened to hand-overs, as in `GET /distserve/links`: links_made, links_failed, sessions_freed, "
    "sessions_lost, missing_params, prefill_fallback, encodes_failed.",
    ("what",),
    shared=True,
)

FAMILIES: tuple[Family, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Family))
