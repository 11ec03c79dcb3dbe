"""What simulated LMDeploy engines hold for each other: sessions with blocks, links, and what went wrong.

Pure books and rules; no socket, no clock. The routes are in `lmdeploy`. Whoever breaks a rule is answered
400, and the reason stands in `Fabric.violations`; what was true once and is not any more (the other side has
restarted, the session was freed a moment ago) is refused as well, but stands in `Fabric.refusals`: no distributor
can know such a thing in time.

Source of the shapes: lmdeploy 0.18.0, pytorch/disagg/conn/protocol.py and serve/openai/endpoints/distserve.py.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from workers.engine.http import Record
from workers.engine.rules import need

if TYPE_CHECKING:
    from workers.engine.lmdeploy import LmdeployEngine

RDMA, NVLINK = 2, 3  # MigrationProtocol as it is serialised
IB, ROCE = 1, 2  # RDMALinkType
SUCCESS, FAIL = 1, 2  # DistServeConnectionStatus
HEADER = b"x-lmdeploy-distserve-proxy"
UNHEARD = "freed, unheard"
REMEMBERED = 10_000  # ended sessions, and notes of each kind: an engine of a demonstration runs for ever

# What a client's request may hold; anything else on a leg is an invention of the distributor's.
CLIENT_FIELDS = {
    "model", "messages", "prompt", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens",
    "n", "temperature", "top_p", "seed", "stop", "tools", "tool_choice", "response_format", "user", "logprobs",
    "top_logprobs", "presence_penalty", "frequency_penalty", "suffix", "logit_bias", "chat_template_kwargs",
    "session_id", "ignore_eos", "skip_special_tokens", "top_k", "min_p", "repetition_penalty", "min_new_tokens",
    "echo",
}  # fmt: skip
PROMPT_FIELDS = ("messages", "prompt", "tools", "tool_choice", "chat_template_kwargs", "suffix")
MIGRATION_FIELDS = {
    "protocol", "remote_engine_id", "remote_session_id", "remote_token_id", "remote_block_ids", "is_dummy_prefill",
}  # fmt: skip


class Stale(Exception):
    """The request speaks of what was so once."""


@dataclass(eq=False, slots=True)
class Session:
    """What a prefill left behind: blocks that stay until somebody takes or frees them."""

    number: int
    token: int
    blocks: list[int]
    record: Record
    request_id: str
    prompt: dict[str, Any]  # of the request: decode's must be the same
    told: set[int]  # numbers that its answer lets a distributor know it by
    undelivered: bool = False  # by script its answer doesn't arrive whole: nobody can free it
    ended: str = ""  # how, by whom


@dataclass(eq=False, slots=True)
class Link:
    """One side of a link. It is true as long as both sides are connected and neither has restarted."""

    remote: str
    address: str  # ours, that the other side connects to
    transfer: list[dict[str, Any]]
    connected_to: int = 0  # incarnation of the other side


@dataclass(eq=False)
class Fabric:
    """What the engines of one deployment know together.

    Args:
        protocol: what every call must name.
        rdma: the RDMA configuration that must come with it; None where there is none.
        dummy: the distributor runs with --dummy-prefill.
        closed: no engine exists but those in it; else one that isn't here is reached by HTTP, and believed.
    """

    protocol: int = RDMA
    rdma: dict[str, Any] | None = field(default_factory=lambda: {"with_gdr": True, "link_type": ROCE})
    dummy: bool = False
    closed: bool = True
    engines: dict[str, LmdeployEngine] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    late_frees: list[int] = field(default_factory=list)  # sessions that decode had taken already
    orphans: list[int] = field(default_factory=list)  # taken, and not ended: prefill had not told their number
    recomputed: int = 0  # decode without a hand-over
    migrated: int = 0
    # (prefill, decode, incarnation of each) -> how often its link was completed
    links_made: Counter[tuple[str, str, int, int]] = field(default_factory=Counter)
    # (engine, remote, incarnation of the engine) -> p2p_initialize calls that it took
    initialized: Counter[tuple[str, str, int]] = field(default_factory=Counter)

    def __repr__(self) -> str:
        held = sum(len(engine.books.sessions) for engine in self.engines.values())
        return (
            f"<Fabric {len(self.engines)} engines, {held} sessions held, {self.migrated} migrated, "
            f"{len(self.violations)} violations, {len(self.refusals)} refusals>"
        )

    def note(self, kind: Literal["violations", "refusals"], text: str) -> None:
        notes: list[str] = getattr(self, kind)
        if len(notes) < REMEMBERED:
            notes.append(text)


class Books:
    """The sessions and blocks of one engine."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.sessions: dict[int, Session] = {}  # held
        self.ended: dict[int, str] = {}
        self.most_held = 0
        self._numbers = itertools.count(1)
        self._next_block = 0
        self._in_use: set[int] = set()

    def __repr__(self) -> str:
        return f"<Books {len(self.sessions)} sessions, {self.blocks} blocks>"

    @property
    def blocks(self) -> int:
        return len(self._in_use)

    def hold(self, record: Record, body: Mapping[str, Any], size: int, limit: int) -> Session | None:
        """A new session with blocks for its prompt; None where too few are left."""
        prompt = {name: body[name] for name in PROMPT_FIELDS if name in body}
        count = 1 + len(msgspec.json.encode(prompt)) // size
        if len(self._in_use) + count > limit:
            return None
        blocks: list[int] = []
        while len(blocks) < count:
            if self._next_block not in self._in_use:
                blocks.append(self._next_block)
            self._next_block = (self._next_block + 1) % limit
        self._in_use.update(blocks)
        number = next(self._numbers)
        session = Session(number, 1000 + number, blocks, record, record.id, prompt, {number})
        self.sessions[number] = session
        self.ended.pop(number, None)  # by the process before
        self.most_held = max(self.most_held, len(self.sessions))
        return session

    def end(self, session: Session, how: str) -> None:
        if self.sessions.pop(session.number, None) is None:
            return
        session.ended = how
        self._in_use.difference_update(session.blocks)
        self.ended[session.number] = how
        if len(self.ended) > REMEMBERED:
            del self.ended[next(iter(self.ended))]

    def restart(self) -> None:
        """All is gone, and the next process counts from the start, as LMDeploy's do."""
        for session in list(self.sessions.values()):
            self.end(session, "restarted")
        self._numbers = itertools.count(1)

    def find(self, number: int, blocks: Iterable[int]) -> Session:
        """The session that a migration means: by its number, or by its blocks where the number wasn't told.

        Raises:
            Refused: there never was such a session, or it is not these blocks'.
            Stale: it has ended.
        """
        session = self.sessions.get(number)
        if session is None:
            if number in self.ended:
                raise Stale(f"session {number} has ended: {self.ended[number]}")
            wanted = list(blocks)
            session = next((s for s in self.sessions.values() if s.blocks == wanted), None)
        need(session is not None, f"no session {number} is held")
        assert session is not None
        return session

    def free(self, number: int) -> None:
        """What `free_cache` does.

        Raises:
            Refused: the session isn't held here, and decode did not take it either.
        """
        session = self.sessions.get(number)
        if session is not None:
            need(not session.record.running, f"session {number} is freed while its prefill runs")
            self.end(session, "freed")
            return
        how = self.ended.get(number, "never held")
        if how == "migrated":
            self.fabric.late_frees.append(number)
            return
        again = how in ("restarted", UNHEARD)
        need(again, f"free_cache of session {number}, which is not held: {how}")

    def unheard(self, number: int) -> None:
        """The answer to its `free_cache` was lost: it may be asked for again."""
        if self.ended.get(number) == "freed":
            self.ended[number] = UNHEARD


def keys_are(value: object, wanted: set[str], what: str, *, maybe: Iterable[str] = ()) -> None:
    need(isinstance(value, dict), f"{what}: no object but {value!r}")
    assert isinstance(value, dict)
    found = set(value)
    need(wanted <= found <= wanted | set(maybe), f"keys of {what}: {sorted(found)}")


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_prefill(body: Mapping[str, Any], *, chat: bool) -> None:
    """A prefill leg: one token, no stream, the blocks kept and told."""
    unknown = set(body) - CLIENT_FIELDS - {"with_cache", "preserve_cache"}
    need(not unknown, f"unknown on prefill: {sorted(unknown)}")
    need(body.get("with_cache") is True and body.get("preserve_cache") is True, "with_cache and preserve_cache")
    need(is_int(body.get("max_tokens")) and body["max_tokens"] == 1, f"max_tokens is {body.get('max_tokens')!r}")
    need(chat or body.get("max_completion_tokens", 1) == 1, "max_completion_tokens is not 1")
    need(not chat or body.get("max_completion_tokens") == 1, "max_completion_tokens is not 1")
    need(body.get("stream", False) is False, f"stream is {body.get('stream')!r}")
    need(body.get("n", 1) in (1, None), f"n is {body.get('n')!r}")
    for name in ("min_tokens", "min_new_tokens", "stream_options"):
        need(name not in body, f"{name} on prefill")


def check_migration(migration: object, fabric: Fabric) -> dict[str, Any]:
    """The fields of `migration_request`, without what they point at."""
    keys_are(migration, MIGRATION_FIELDS, "migration_request")
    assert isinstance(migration, dict)
    need(migration["protocol"] == fabric.protocol, f"protocol {migration['protocol']!r}, not {fabric.protocol}")
    need(isinstance(migration["remote_engine_id"], str), "remote_engine_id is no string")
    for name in ("remote_session_id", "remote_token_id"):
        need(is_int(migration[name]), f"{name} is {migration[name]!r}")
    blocks = migration["remote_block_ids"]
    need(isinstance(blocks, list) and all(is_int(block) for block in blocks), f"remote_block_ids: {blocks!r}")
    need(migration["is_dummy_prefill"] is fabric.dummy, f"is_dummy_prefill is {migration['is_dummy_prefill']!r}")
    return migration
