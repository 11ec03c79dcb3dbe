"""A simulated LMDeploy engine of role Prefill or Decode: the routes of DistServe over real books.

Owns what such an engine answers and when a session ends; the books and their rules are in `books`. Sessions:
held from the moment a prefill begins, until `free_cache`, or until a decode engine that pulled it has its first token
and says so (LMDeploy does that over ZMQ; here it is a call where both are in one Fabric, else HTTP on `/sim/release`).
Links: made by p2p_initialize and p2p_connect on both sides, void as soon as one of them has restarted.

Source: lmdeploy 0.18.0, serve/openai/endpoints/{distserve,completions}.py, pytorch/disagg/conn/*; the header and
`cache_session_id` of later versions (serve/openai/distserve_fields.py, PR #4989).
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Literal

import aiohttp
import msgspec

from app.nodes import Role
from workers.engine import answers
from workers.engine.answers import Answer, Knobs
from workers.engine.books import (
    CLIENT_FIELDS,
    HEADER,
    PROMPT_FIELDS,
    Books,
    Fabric,
    Session,
    Stale,
    check_migration,
    check_prefill,
    is_int,
    keys_are,
)
from workers.engine.http import Made, Record, scripted_end
from workers.engine.links import Links
from workers.engine.rules import Refused, need, parse
from workers.engine.server import Engine

BLOCK_BYTES = 64  # of the prompt as JSON: its blocks are counted, not computed
RELEASE_TIMEOUT_S = 5.0
SPLIT_PATHS = ("/v1/chat/completions", "/v1/completions")
Call = Literal["engine_info", "p2p_initialize", "p2p_connect", "p2p_drop_connect", "free_cache"]


@dataclass(slots=True)
class Traits:
    """What differs between versions and set-ups of the engine, and what a prefill may get wrong."""

    tp_size: int = 1
    num_gpu_blocks: int = 100_000
    cache_session_id: bool = True  # newer engines tell the number of the session
    ids: Literal["public", "integer"] = "public"  # chatcmpl-..., and the client's session_id (-1); or the number
    wants_header: bool = True  # newer engines believe DistServe fields only with the proxy's header
    abort_frees: bool = True  # a prefill whose client left ends its session; else it computes on and stays held
    ignores_cache: bool = False  # answers as if with_cache were not there
    omit: tuple[str, ...] = ()  # fields that its answer lacks, though the session is held
    finish_reason: str = ""  # of a prefill; "abort": nothing is held


@dataclass(slots=True)
class Fault:
    """What happens to a call of `/distserve/...`; a `status` other than 200 leaves the books untouched."""

    status: int = 200
    delay_s: float = 0.0
    body: object = None  # said instead, with the books changed as if nothing were wrong
    times: int = 1  # -1: for ever


@dataclass(eq=False, slots=True)
class Pull:
    """A decode request that takes a session over; `timer` until its first token."""

    number: int
    owner: str
    session: Session | None  # None: of an engine that is not in the Fabric
    reaches: bool = True  # False: by script it ends before its first token
    taken: bool = False  # its first token is there
    timer: asyncio.TimerHandle | None = None


class LmdeployEngine(Engine):
    """One engine. `books` and `links` are its own; the Fabric is shared.

    Args:
        role: Prefill or Decode.
        known_as: the URL it is registered by, where that is not its own.
    """

    def __init__(
        self,
        role: Role,
        fabric: Fabric | None = None,
        knobs: Knobs | None = None,
        traits: Traits | None = None,
        *,
        known_as: str = "",
        **more: Any,
    ) -> None:
        if role not in (Role.Prefill, Role.Decode):
            raise ValueError(f"an engine of DistServe is Prefill or Decode, not {role.name}")
        super().__init__(knobs, **more)
        self.role = role
        self.fabric = fabric or Fabric(closed=False)
        self.traits = traits or Traits()
        self.books = Books(self.fabric)
        self.links = Links(self)
        self.incarnation = 1
        self.faults: dict[str, deque[Fault]] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []  # POSTs to /distserve, as they came
        self.known_as = known_as
        self._prefills: dict[Record, Session] = {}
        self._pulls: dict[Record, Pull] = {}
        self._frees: dict[Record, int] = {}  # calls of free_cache whose answer is on its way
        self._releases: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<LmdeployEngine {self.role.name} {self.name} {self.incarnation}. {self.books} {self.links}>"

    @property
    def name(self) -> str:
        """Its id for the others: the URL by which the distributor knows it."""
        return self.known_as or self.url

    def info(self) -> dict[str, Any]:
        """What `info` tells. Source: DistServeEngineConfig."""
        traits = self.traits
        return {
            "tp_size": traits.tp_size,
            "ep_size": 1,
            "dp_size": 1,
            "pp_size": None,
            "dp_rank": 0,
            "block_size": 64,
            "num_cpu_blocks": 0,
            "num_gpu_blocks": traits.num_gpu_blocks,
        }

    def fault(self, call: Call, **how: Any) -> None:
        self.faults.setdefault(call, deque()).append(Fault(**how))

    async def change(self, **traits: Any) -> None:
        """Change traits; raises TypeError for an unknown one."""
        self.traits = replace(self.traits, **traits)

    # --- life

    async def start(self) -> None:
        self.fabric.engines[self.name] = self
        await super().start()

    async def crash(self) -> None:
        """As a SIGKILL: what it held is gone, and its links are void for the other side too."""
        for number in self._frees.values():
            self.books.unheard(number)
        await super().crash()
        self.incarnation += 1
        self.books.restart()
        self.links.void()

    async def close(self) -> None:
        await super().close()
        if self._releases:
            await asyncio.gather(*self._releases, return_exceptions=True)

    def end(self, record: Record, *, aborted: bool = False) -> None:
        ends = record.running
        super().end(record, aborted=aborted)
        if not ends:
            return
        freed = self._frees.pop(record, None)
        if freed is not None and aborted:
            self.books.unheard(freed)
        session = self._prefills.pop(record, None)
        if session is not None and (session.undelivered or (aborted and self.traits.abort_frees)):
            self.books.end(session, "lost")
        pull = self._pulls.pop(record, None)
        if pull is None:
            return
        if pull.timer is not None:
            pull.timer.cancel()
            # The timer may be a moment later than the write that ends a short answer.
            if pull.reaches and (not aborted or record.chunk_s):
                self._first_token(pull)
        if pull.session is not None and pull.session.ended == "freed" and pull.taken and not aborted:
            self._violation(f"session {pull.number} was freed while decode pulled it")

    def remembered(self, record: Record, keep_alive: bool) -> Made | None:
        return None  # every answer changes the books

    def struck(self, record: Record) -> bool:
        """The scripted faults of the knobs are for inference only."""
        return record.path.startswith(self.knobs.prefix + "/v1/") and super().struck(record)

    # --- answers

    def answer(self, record: Record) -> Answer:
        knobs = self.knobs
        path = record.path.partition("?")[0].removeprefix(knobs.prefix)
        if knobs.key and record.header(b"authorization") != b"Bearer " + knobs.key.encode():
            return super().answer(record)
        try:
            if path.startswith("/distserve/"):
                return self._control(record, path.removeprefix("/distserve/"))
            if record.method == "POST" and path in SPLIT_PATHS:
                return self._inference(record, path)
            if record.method == "POST" and path == "/sim/release":
                return self._released(parse(record.body))
            if record.method == "POST" and path.startswith("/v1/") and self.role is Role.Prefill:
                raise Refused(f"{path} on a prefill engine")
        except Stale as e:
            self.fabric.note("refusals", f"{self.role.name} {self.name} {path} {record.id}: {e}")
            return answers.error(400, str(e), "stale")
        except (Refused, AttributeError, KeyError, TypeError, ValueError) as e:  # the latter: of no shape at all
            self._violation(f"{path} {record.id}: {e if isinstance(e, Refused) else repr(e)}")
            return answers.error(400, str(e), "not_in_the_protocol")
        if record.method == "GET" and path == "/sim/books":
            return answers.json_answer(200, self.summary())
        return super().answer(record)

    def summary(self) -> dict[str, Any]:
        return {
            "role": self.role.name,
            "incarnation": self.incarnation,
            "sessions": len(self.books.sessions),
            "blocks": self.books.blocks,
            "links": {remote: self.links.true_to(remote) is not None for remote in self.links.held},
            "violations": self.fabric.violations[-20:],
            "refusals": self.fabric.refusals[-20:],
        }

    def _violation(self, text: str) -> None:
        self.fabric.note("violations", f"{self.role.name} {self.name} {text}")

    # --- /distserve

    def _control(self, record: Record, call: str) -> Answer:
        method = "GET" if call == "engine_info" else "POST"
        routes = {
            "p2p_initialize": self.links.initialize,
            "p2p_connect": self.links.connect,
            "p2p_drop_connect": self.links.drop,
            "free_cache": self._free,
        }
        need(record.method == method and (call in routes or method == "GET"), f"{record.method} {call} is no call")
        body: dict[str, Any] = {}
        if method == "POST":
            body = parse(record.body)
            content_type = record.header(b"content-type") or b""
            need(content_type.startswith(b"application/json"), f"content-type {content_type!r}")
            if self._keep_records:
                self.calls.append((call, body))
        fault = self._next_fault(call)
        if fault.status != 200:
            answer = answers.error(fault.status, f"scripted {call}", "scripted")
        elif method == "GET":
            # The route returns text, which the framework writes as JSON once more.
            answer = answers.json_answer(200, msgspec.json.encode(self.info()).decode())
        else:
            answer = answers.json_answer(200, routes[call](body))
            if call == "free_cache":
                self._frees[record] = body["remote_session_id"]
        if fault.body is not None:
            answer = answers.json_answer(200, fault.body)
        answer.first_s = fault.delay_s
        return answer

    def _next_fault(self, call: str) -> Fault:
        waiting = self.faults.get(call)
        if not waiting:
            return Fault()
        fault = waiting[0]
        fault.times -= fault.times > 0
        if fault.times == 0:
            waiting.popleft()
        return fault

    def _free(self, body: dict[str, Any]) -> dict[str, Any]:
        keys_are(body, {"remote_engine_id", "remote_session_id"}, "free_cache")
        need(self.role is Role.Prefill, "free_cache on a decode engine")
        need(body["remote_engine_id"] == self.name, f"remote_engine_id {body['remote_engine_id']}, I am {self.name}")
        number = body["remote_session_id"]
        need(is_int(number) and number > 0, f"remote_session_id {number!r}")
        self.books.free(number)
        return {"status": "SUCCESS"}

    # --- inference

    def _inference(self, record: Record, path: str) -> Answer:
        body = parse(record.body)
        values = [value for name, value in record.headers if name.lower() == HEADER]
        need(values in ([], [b"1"]), f"{HEADER.decode()}: {values}")
        ours = {"with_cache", "preserve_cache", "migration_request"} & set(body)
        need(values or not ours or not self.traits.wants_header, f"{sorted(ours)} without {HEADER.decode()}")
        if self.role is Role.Prefill:
            return self._prefill(record, path, body)
        return self._decode(record, path, body)

    def _plain(self, record: Record, path: str) -> Answer:
        content_type = record.header(b"content-type") or b""
        return answers.inference(self.knobs, path, content_type, record.body, record.id)

    def _prefill(self, record: Record, path: str, body: dict[str, Any]) -> Answer:
        traits, knobs, chat = self.traits, self.knobs, path.startswith("/v1/chat")
        check_prefill(body, chat=chat)
        need(record.id, "no x-request-id")
        if knobs.status != 200 and self.struck(record):
            return answers.scripted(knobs)
        answer = self._plain(record, path)
        if answer.status != 200 or traits.ignores_cache:
            return answer
        value = msgspec.json.decode(answer.pieces[0])
        if traits.finish_reason:
            value["choices"][0]["finish_reason"] = traits.finish_reason
        if traits.finish_reason == "abort":
            given: dict[str, Any] = {"cache_block_ids": None, "remote_token_ids": None}
        else:
            session = self.books.hold(record, body, BLOCK_BYTES, traits.num_gpu_blocks)
            if session is None:
                return answers.error(503, "no free blocks", "no_blocks")
            session.undelivered = self.struck(record) and scripted_end(knobs)[0] is not None
            self._prefills[record] = session
            given = {"cache_block_ids": session.blocks, "remote_token_ids": [session.token]}
            self._tell(value, session, body, chat=chat)
        value |= {name: one for name, one in given.items() if name not in traits.omit}
        made = answers.json_answer(200, value, first_s=answer.first_s)
        made.headers += answers.as_bytes(knobs.headers)
        return made

    def _tell(self, value: dict[str, Any], session: Session, body: dict[str, Any], *, chat: bool) -> None:
        """The ids of the answer, and by which numbers a distributor may mean the session afterwards."""
        traits = self.traits
        if traits.ids == "integer":
            value["id"] = str(session.number)
        elif not chat:
            value["id"] = str(body.get("session_id", -1))
        if traits.cache_session_id and "cache_session_id" not in traits.omit:
            value["cache_session_id"] = session.number
        elif traits.ids == "public":
            session.told = {0} if chat else {0, int(value["id"])}

    def _decode(self, record: Record, path: str, body: dict[str, Any]) -> Answer:
        unknown = set(body) - CLIENT_FIELDS - {"migration_request"}
        need(not unknown, f"unknown on decode: {sorted(unknown)}")
        pull = None
        if "migration_request" in body:
            need(body.get("n", 1) in (1, None), "n > 1 with migration_request")
            pull = self._pull(record, body)
        else:
            self.fabric.recomputed += 1
        if self.knobs.status != 200 and self.struck(record):
            return answers.scripted(self.knobs)
        answer = self._plain(record, path)
        if pull is not None and answer.status == 200:
            self._pulls[record] = pull
            after = scripted_end(self.knobs)[0] if self.struck(record) else None
            pull.reaches = after is None or after > 0
            if pull.reaches:
                pull.timer = asyncio.get_running_loop().call_later(self.knobs.ttft_s, self._first_token, pull)
        return answer

    def _pull(self, record: Record, body: dict[str, Any]) -> Pull | None:
        """The session that a migration request names, every field held to what prefill answered."""
        migration = check_migration(body["migration_request"], self.fabric)
        if self.fabric.dummy:
            return None
        owner, number, blocks = (
            migration["remote_engine_id"],
            migration["remote_session_id"],
            migration["remote_block_ids"],
        )
        prefill = self.links.other(owner)
        if self.links.true_to(owner) is None:
            known = owner in self.links.held or owner in self.links.dropped
            gone = prefill is not None and (self.name in prefill.links.dropped or prefill.incarnation > 1)
            if known or gone or self.incarnation > 1:
                raise Stale(f"the link to {owner} is not true any more")
            raise Refused(f"no link to {owner}")
        if prefill is None:
            return Pull(number, owner, None)
        session = prefill.books.find(number, blocks)
        need(number in session.told, f"remote_session_id {number}, told was {session.told}")
        need(blocks == session.blocks, f"blocks {blocks}, session {session.number} has {session.blocks}")
        need(migration["remote_token_id"] == session.token, f"token {migration['remote_token_id']}")
        need(session.record.finished_s is not None, "its prefill still runs")
        need(record.id == session.request_id, f"x-request-id {record.id}, prefill's was {session.request_id}")
        prompt = {name: body[name] for name in PROMPT_FIELDS if name in body}
        need(prompt == session.prompt, f"prompt {prompt}, prefill's was {session.prompt}")
        return Pull(number, owner, session)

    def _first_token(self, pull: Pull) -> None:
        """What decode tells prefill when it has the blocks: that they may go."""
        pull.timer = None
        pull.taken = True
        self.fabric.migrated += 1
        prefill = self.fabric.engines.get(pull.owner)
        if prefill is None:
            task = asyncio.get_running_loop().create_task(self._release(pull))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)
        elif pull.session is not None and pull.number == pull.session.number:
            prefill.books.end(pull.session, "migrated")
        elif pull.session is not None:
            # LMDeploy ends the session of the number that it was told, which is nobody's: these blocks leak (#4967).
            self.fabric.orphans.append(pull.session.number)
            prefill.books.end(pull.session, "orphaned")

    async def _release(self, pull: Pull) -> None:
        timeout = aiohttp.ClientTimeout(total=RELEASE_TIMEOUT_S)
        value = {"decode": self.name, "session": pull.number}
        async with aiohttp.ClientSession(timeout=timeout) as client:
            try:
                async with client.post(pull.owner + "/sim/release", json=value) as answer:
                    await answer.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as e:
                self._violation(f"can't tell {pull.owner} to end session {pull.number}: {e!r}")

    def _released(self, body: dict[str, Any]) -> Answer:
        keys_are(body, {"decode", "session"}, "release")
        if self.links.true_to(body["decode"]) is None:
            raise Stale(f"no link to {body['decode']}")
        session = self.books.sessions.get(body["session"])
        if session is None:
            raise Stale(f"session {body['session']} is not held: {self.books.ended.get(body['session'])}")
        self.books.end(session, "migrated")
        return answers.json_answer(200, {"status": "SUCCESS"})
