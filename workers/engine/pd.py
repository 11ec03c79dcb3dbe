"""Simulated engines of split serving with vLLM's connectors or SGLang's bootstrap, with real books.

They are the simulated engine with its knobs and faults, of role prefill or decode. Every request is held to the
protocol (`pd_rules`): what is not in it is answered 400 and stands in `violations`. What a real prefill engine
keeps for the other one (blocks, rooms) is kept here, until it is fetched, its lease ends or its request is aborted.

Engines reach each other over a Fabric, which stands for the network between them: those of one process only.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from workers.engine import answers
from workers.engine import pd_rules as rules
from workers.engine.answers import Answer, Gate
from workers.engine.http import Made, Record, scripted_end
from workers.engine.pd_answers import PdKnobs, speak
from workers.engine.pd_rules import Body, Leg, Protocol
from workers.engine.rules import Refused, need, parse
from workers.engine.server import Engine


@dataclass(eq=False, slots=True)
class Kept:
    """What a prefill engine holds for one request: its blocks, from its answer's end on."""

    key: str
    record: Record
    prompt: Body
    params: Body | None = None  # NIXL: as answered
    timer: asyncio.TimerHandle | None = None


@dataclass(eq=False, slots=True)
class Meeting:
    """The two legs of one transfer id or room, in whatever order they come."""

    request_id: str
    body: Body  # of the leg that came first: what must be the same on both
    prefill: Record | None = None
    decode: Record | None = None
    at: PdEngine | None = None  # the prefill engine, and
    rank: int | None = None  # its rank
    decode_came: Gate = field(default_factory=Gate)
    computed: Gate = field(default_factory=Gate)


@dataclass(frozen=True, slots=True)
class Taker:
    """Who took something. One that crashed since has forgotten it, and may be given it again.

    A request that met a crash on a kept connection is sent again, as one that a closed idle connection lost:
    its sender can't tell the two apart.
    """

    engine: PdEngine
    incarnation: int

    @classmethod
    def now(cls, engine: PdEngine) -> Taker:
        return cls(engine, engine.incarnation)

    @property
    def forgot(self) -> bool:
        return self.engine.incarnation != self.incarnation


@dataclass(eq=False)
class Fabric:
    """How the engines of one process reach each other. `repr` shows what is open."""

    engines: dict[str, PdEngine] = field(default_factory=dict)  # by the engine ids of now
    former: set[str] = field(default_factory=set)  # engine ids from before a restart
    bootstraps: dict[tuple[str, int], PdEngine] = field(default_factory=dict)
    meetings: dict[str, Meeting] = field(default_factory=dict)  # by transfer id or room
    met: dict[tuple[Leg, str], Taker] = field(default_factory=dict)  # every id that a leg ever came with

    def __repr__(self) -> str:
        return f"<Fabric engines={list(self.engines)} open={list(self.meetings)}>"

    def check(self, leg: Leg, key: str, record: Record, body: Body) -> None:
        """Raises Refused: a leg of this kind came with that id before, or the other one is of another request."""
        before = self.met.get((leg, key))
        need(before is None or before.forgot, f"id {key} came to a {leg} engine before")
        meeting = self.meetings.get(key)
        if meeting is not None:
            other = meeting.request_id
            need(record.id == other, f"x-request-id {record.id}, on the other leg of {key} it is {other}")
            need(body == meeting.body, f"the legs of {key} differ: {body} and {meeting.body}")

    def join(self, engine: PdEngine, key: str, record: Record, body: Body) -> Meeting:
        """For a leg that passed `check`."""
        leg = engine.leg
        self.met[leg, key] = Taker.now(engine)
        meeting = self.meetings.setdefault(key, Meeting(record.id, body))
        if leg == "prefill":
            meeting.prefill = record
        else:
            meeting.decode = record
            meeting.decode_came.open()
        return meeting

    def part(self, leg: Leg, key: str) -> None:
        """One leg has ended; with the last of them the meeting is over."""
        meeting = self.meetings.get(key)
        if meeting is None:
            return
        if leg == "prefill":
            meeting.prefill = None
        else:
            meeting.decode = None
        if meeting.prefill is None and meeting.decode is None:
            del self.meetings[key]


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that is in the protocol: how it is answered, and what follows from its end."""

    usage: Body
    gate: Gate | None = None
    more: Body = field(default_factory=dict)  # top-level fields of the answer
    proper_end: Callable[[], object] | None = None  # its answer was sent whole
    any_end: Callable[[], object] | None = None  # after that, and where it was aborted or broke off


class PdEngine(Engine):
    """One engine of one role; the protocols are `nixl`, `mooncake`, `sglang`.

    Attributes:
        violations: why requests were refused.
        recomputed: (request id, reason) of decode requests that came without the cache, or whose cache was gone.
        expired: request or transfer ids of what nobody fetched before the lease ended.
    """

    protocol: Protocol

    def __init__(self, leg: Leg, fabric: Fabric, knobs: PdKnobs | None = None, **more: Any) -> None:
        super().__init__(knobs or PdKnobs(), **more)
        self.leg: Leg = leg
        self.fabric = fabric
        self.violations: list[str] = []
        self.recomputed: list[tuple[str, str]] = []
        self.expired: list[str] = []
        self.fetched: dict[str, Taker] = {}
        self.kept: dict[str, Kept] = {}
        self._running: dict[Record, Admitted] = {}
        self._whole: set[Record] = set()  # those whose answer is not to be broken off by script
        self._lost = False  # it crashes
        self.incarnation = 0
        self.engine_ids: list[str] = []
        self._name_itself()

    def __repr__(self) -> str:
        running = [record.id for record in self._running]
        return f"<{self.protocol} {self.leg} {self.url} kept={list(self.kept)} running={running}>"

    @property
    def pd(self) -> PdKnobs:
        assert isinstance(self.knobs, PdKnobs)
        return self.knobs

    @property
    def held(self) -> int:
        """Requests whose blocks or rooms are held: fetched by nobody yet, or still being met."""
        return len(self.kept) + len(self._running)

    # --- life

    async def crash(self) -> None:
        """As a SIGKILL: what was kept is lost, and the next incarnation has new engine ids."""
        self._lost = True
        self.incarnation += 1  # before its connections end: what was on them may be elsewhere a moment later
        await super().crash()
        for key in list(self.kept):
            self._let_go(key)
        self._lost = False
        self._name_itself()

    def _name_itself(self) -> None:
        for engine_id in self.engine_ids:
            self.fabric.engines.pop(engine_id, None)
            self.fabric.former.add(engine_id)
        self.engine_ids = [f"{self.port}-{secrets.token_hex(4)}-dp{rank}" for rank in range(self.pd.ranks)]
        if self.leg == "prefill":
            self.fabric.engines |= dict.fromkeys(self.engine_ids, self)

    # --- requests

    def remembered(self, record: Record, keep_alive: bool) -> Made | None:
        return None  # an answer here depends on more than its request

    def remember(self, record: Record, keep_alive: bool, made: Made) -> None:
        return None

    def answer(self, record: Record) -> Answer:
        knobs = self.pd
        path = record.path.partition("?")[0].removeprefix(knobs.prefix)
        keyless = bool(knobs.key) and record.header(b"authorization") != b"Bearer " + knobs.key.encode()
        if record.method != "POST" or keyless:
            return super().answer(record)
        try:
            if path not in rules.PATHS[self.protocol]:
                need(self.leg == "decode", f"{path} is for nodes that serve it whole")
                return super().answer(record)
            headers = rules.check_headers(record.headers, key=knobs.key)
            body = parse(record.body)
            need(body.get("model") in knobs.models, f"model {body.get('model')}")
            rules.check_body(self.protocol, self.leg, path, body)
            scripted, unsaid = self.struck(record) and knobs.status != 200, self._ends_unsaid(record)
            admitted = self.admit(record, path, body, headers, dry=scripted or unsaid)
        except (Refused, AttributeError, KeyError, TypeError, ValueError) as e:  # the latter: of no shape at all
            self.violations.append(f"{self.leg} {record.id}: {e}")
            return answers.error(400, str(e), "not_in_the_protocol")
        if isinstance(admitted, Answer):
            return admitted
        if scripted:
            return answers.scripted(knobs)
        if admitted is None:
            return Answer(200, [], [b""])  # of which nothing is sent
        answer = speak(knobs, self.leg, path, body, record, admitted.usage, admitted.more)
        answer.gate = admitted.gate
        self._running[record] = admitted
        if not (self.struck(record) and scripted_end(knobs)[0] is not None):
            self._whole.add(record)
        return answer

    def _ends_unsaid(self, record: Record) -> bool:
        """The connection ends by script before the head: such a request was never taken, and may come again."""
        after, ending = scripted_end(self.knobs)
        return self.struck(record) and after is not None and after < 0 and ending != "stall"

    @abstractmethod
    def admit(
        self, record: Record, path: str, body: Body, headers: dict[str, str], *, dry: bool
    ) -> Admitted | Answer | None:
        """Hold a request to the protocol and enter it in the books; `dry`: look only, it will fail by script.

        Raises:
            Refused: it is not in the protocol.
        """

    def end(self, record: Record, *, aborted: bool = False) -> None:
        if not record.running:
            return
        super().end(record, aborted=aborted)
        admitted, whole = self._running.pop(record, None), record in self._whole
        self._whole.discard(record)
        if admitted is None:
            return
        if whole and not aborted and not self._lost and admitted.proper_end is not None:
            admitted.proper_end()
        if admitted.any_end is not None:
            admitted.any_end()

    # --- books

    def keep(self, kept: Kept) -> None:
        self.kept[kept.key] = kept
        kept.timer = asyncio.get_running_loop().call_later(self.pd.lease_s, self._expire, kept.key)

    def fetch(self, key: str, by: PdEngine) -> None:
        """Another engine has taken it over."""
        self._let_go(key)
        self.fetched[key] = Taker.now(by)

    def _let_go(self, key: str) -> None:
        kept = self.kept.pop(key)
        if kept.timer is not None:
            kept.timer.cancel()

    def _expire(self, key: str) -> None:
        self._let_go(key)
        self.expired.append(key)

    # --- answers

    def usage(self, *, cached: int | None = None) -> Body:
        """Prompt and cached tokens; the rest is added where the completion is known."""
        knobs = self.pd
        usage: Body = {"prompt_tokens": knobs.prompt_tokens}
        if knobs.details:
            told = knobs.cached_tokens if cached is None else cached
            usage["prompt_tokens_details"] = {"cached_tokens": told}
        return usage
