"""Strict simulated engines of the EPD roles: encoder, prefill, decode, and prefill and decode in one.

They are the project's simulated engine, with its knobs and faults, and check every field that they get: what is not
in the protocol is answered 400 with the reason, and stands in `Fabric.violations`. The rules are in
`tests.support.epd_rules`; what only several engines can know together (has this item been encoded? is this
handle the one that was reported? was this transfer id announced?) is in the Fabric they share.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.support.engine import SimulatedEngine
from tests.support.epd_rules import (
    CHILD_ID,
    EMBEDS_OF,
    TRANSFER_ID,
    check_consume,
    check_encode,
    check_prefill,
    check_push,
    derived_uuid,
    flat,
    headers_of,
    media_of,
    url_of,
)
from tests.support.loop import LoopThread
from workers.engine import answers
from workers.engine.answers import Answer, Knobs
from workers.engine.http import Record
from workers.engine.rules import Refused, need, parse
from workers.engine.server import Engine

Part = Literal["encode", "prefill", "decode", "both"]

ROLE_OF: dict[Part, str] = {"encode": "Encode", "prefill": "Prefill", "decode": "Decode", "both": "Hybrid"}
PROFILE_PATHS = ("/start_profile", "/stop_profile")


@dataclass(eq=False)
class Encode:
    """One sub-request that an encoder took, and what it reported."""

    record: Record
    encoder: str
    parent: str
    index: int  # of its first item, as its request id says
    items: list[dict[str, Any]]
    entries: list[tuple[str, dict[str, Any]]]  # (reported hash, entry) of each item; none where it keeps silent
    transfer_ids: list[str]
    consumer: str | None


@dataclass(eq=False)
class Fabric:
    """What the engines of a test know together.

    Args:
        mooncake: the control addresses that consumers may have; () is no Mooncake.
        rewrite: False for a distributor with --no-rewrite.
    """

    mooncake: tuple[str, ...] = ()
    rewrite: bool = True
    violations: list[str] = field(default_factory=list)
    encodes: list[Encode] = field(default_factory=list)
    consumed: list[tuple[str, Record, list[Encode]]] = field(default_factory=list)  # part, request, its encodes
    handed_over: dict[str, Any] = field(default_factory=dict)  # request id -> what prefill gave, not used yet
    transfer_ids: set[str] = field(default_factory=set)  # of all attempts so far
    _open: dict[str, list[Encode]] = field(default_factory=dict)  # parent -> encodes that no consumer has seen
    _taken: dict[str, list[Encode]] = field(default_factory=dict)  # parent -> what prefill took

    def take_encode(self, encode: Encode) -> None:
        self.encodes.append(encode)
        self._open.setdefault(encode.parent, []).append(encode)

    def take_consumer(self, part: Part, record: Record, body: dict[str, Any], headers: dict[str, str]) -> None:
        """Hold a prefill or decode request to the encodes and the prefill that came before it."""
        parent = headers["x-request-id"]
        running = [encode for encode in self._open.get(parent, []) if encode.record.running]
        need(not running, f"{len(running)} encodes of it still run")
        if part == "decode":
            self._after_prefill(parent, body)
            return
        done = [encode for encode in self._open.pop(parent, []) if encode.record.finished_s is not None]
        self._taken[parent] = done
        self.consumed.append((part, record, done))
        self._check_content(body, done)
        self._check_handles(body, done)

    def _after_prefill(self, parent: str, body: dict[str, Any]) -> None:
        # Looked at before the request is known to be good: prefill's blocks are pulled once.
        need(parent in self.handed_over, "no prefill for it, or its blocks were used before")
        handed_over = self.handed_over.pop(parent)
        need(body.get("kv_transfer_params") == handed_over, "kv_transfer_params are not what prefill answered")
        need(handed_over is not None or "kv_transfer_params" not in body, "kv_transfer_params: null")
        self._check_content(body, self._taken.get(parent, []))
        if "ec_transfer_params" in body:
            self._check_handles(body, self._taken.get(parent, []), again=True)

    def _check_content(self, body: dict[str, Any], done: list[Encode]) -> None:
        reported = {key: entry for key, _, entry in _reports(done)}
        encoded = [item for encode in done for item in encode.items]
        # vLLM's rule: where audio is in the request, and the metadata of any item is missing, all of it stays raw.
        whole = len(encoded) == len(reported) and all(entry["metadata"] for entry in reported.values())
        all_raw = not whole and any("audio" in item["type"] for item in encoded)
        for part in media_of(body):
            uuid = part.get("uuid")
            metadata = reported[uuid]["metadata"] if uuid in reported else {}
            if part["type"] in EMBEDS_OF:
                if not self.rewrite:
                    continue
                need(uuid in {_key(item) for item in encoded}, f"raw media without its encoder's uuid: {part}")
                need(all_raw or not metadata, f"reported, and not rewritten: {part}")
                continue
            if isinstance(uuid, str) and uuid.startswith("client-"):
                continue  # embeds that the client made
            need(self.rewrite, f"rewritten in spite of --no-rewrite: {part}")
            need(not all_raw, f"rewritten beside audio, though an item has no metadata: {part}")
            need(set(part) == {"type", part["type"], "uuid"}, f"keys of embeds: {set(part)}")
            wanted = {name: flat(values) for name, values in metadata.items()}
            need(wanted and part[part["type"]] == wanted, f"embeds {part}, reported were {metadata}")

    def _check_handles(self, body: dict[str, Any], done: list[Encode], *, again: bool = False) -> None:
        params = body.get("ec_transfer_params")
        wanted = {reported: entry for _, reported, entry in _reports(done)}
        if not wanted:
            need(params is None and "ec_transfer_params" not in body, f"nothing was reported, but {params}")
            return
        need(isinstance(params, dict), f"ec_transfer_params: {params}")
        assert isinstance(params, dict)
        handles = {key: value for key, value in params.items() if key != "ec_items"}
        need(handles == wanted, f"handles {handles}, reported were {wanted}")
        if self.rewrite or self.mooncake:
            self._check_items(body, params.get("ec_items"), done, again=again)
        else:
            need("ec_items" not in params, "ec_items without rewriting and without a Mooncake consumer")

    def _check_items(self, body: dict[str, Any], items: Any, done: list[Encode], *, again: bool) -> None:
        need(isinstance(items, list), f"ec_items: {items}")
        for item in items:
            need(set(item) == {"mm_hash", "transfer_id"}, f"keys of ec_items: {item}")
            need(TRANSFER_ID.fullmatch(item["transfer_id"]), f"transfer id {item['transfer_id']}")
        hash_of = {key: reported for key, reported, _ in _reports(done)}
        encoded = [_key(part) for part in media_of(body)]
        # Content order. An item without metadata may be left out: it has a handle, but nothing to be matched to.
        all_of_them = [hash_of[key] for key in encoded if key in hash_of]
        bare = {reported for _, reported, entry in _reports(done) if not entry["metadata"]}
        hashes = [item["mm_hash"] for item in items]
        need(
            hashes in (all_of_them, [one for one in all_of_them if one not in bare]),
            f"ec_items name {hashes}, content has {all_of_them}",
        )
        ids = {item["mm_hash"]: item["transfer_id"] for item in items}
        need(all(ids[item["mm_hash"]] == item["transfer_id"] for item in items), "one embedding, two transfer ids")
        need(len(set(ids.values())) == len(ids), "two embeddings, one transfer id")
        announced = {reported: own for encode in done for (reported, _), own in _announced(encode)}
        for mm_hash, transfer_id in ids.items():
            wanted = announced.get(mm_hash)
            need(wanted in (None, transfer_id), f"transfer id {transfer_id}, announced was {wanted}")
        fresh = self.transfer_ids.isdisjoint(ids.values())
        need(again or announced or fresh, "a transfer id of an earlier attempt")
        self.transfer_ids |= set(ids.values())

    def orders(self) -> list[tuple[str, list[tuple[str, float, float]]]]:
        """For each request id: its stages as (encode, prefill, decode or both; begun, ended), in order of beginning."""
        found: dict[str, list[tuple[str, float, float]]] = {}
        stages = [(encode.parent, "encode", encode.record) for encode in self.encodes]
        stages += [(record.id, part, record) for part, record, _ in self.consumed]
        for parent, part, record in stages:
            ended_s = record.finished_s if record.finished_s is not None else float("inf")
            found.setdefault(parent, []).append((part, record.started_s, ended_s))
        return [(parent, sorted(stages, key=lambda stage: stage[1])) for parent, stages in found.items()]


def _key(item: dict[str, Any]) -> str:
    return item.get("uuid") or derived_uuid(item)


def _reports(done: Iterable[Encode]) -> list[tuple[str, str, dict[str, Any]]]:
    """(uuid that was sent, hash that was reported, its entry) of every item with a report."""
    return [
        (_key(item), reported, entry)
        for encode in done
        for item, (reported, entry) in zip(encode.items, encode.entries, strict=False)
    ]


def _announced(encode: Encode) -> list[tuple[tuple[str, dict[str, Any]], str]]:
    return list(zip(encode.entries, encode.transfer_ids, strict=False))


Report = Callable[[dict[str, Any]], object]


class Strict(Engine):
    """The server: an engine of one role."""

    def __init__(self, part: Part, fabric: Fabric, knobs: Knobs, **more: Any) -> None:
        super().__init__(knobs, **more)
        self.part = part
        self.fabric = fabric
        self.coming: deque[int] = deque()  # statuses of the next requests, before the knobs count
        self.report: Report | None = None  # what becomes of a proper report, or of prefill's answer
        self.profiled: list[Record] = []
        self.profile_status = 200

    def answer(self, record: Record) -> Answer:
        path = record.path.partition("?")[0]
        if self.knobs.key and record.header(b"authorization") != b"Bearer " + self.knobs.key.encode():
            return answers.error(401, "Incorrect API key provided.", "invalid_api_key")
        if record.method == "POST" and path in PROFILE_PATHS:
            self.profiled.append(record)
            return Answer(self.profile_status, [], [b""])  # vLLM answers with an empty body
        if record.method != "POST":
            return super().answer(record)
        try:
            need(path == "/v1/chat/completions", f"{path} is no path of EPD")
            need(self.knobs.key or record.header(b"authorization") is None, "a key that is not this engine's")
            headers = headers_of(record.headers)
            body = parse(record.body)
            return (
                self._encode(record, body, headers) if self.part == "encode" else self._consume(record, body, headers)
            )
        except (Refused, AttributeError, KeyError, TypeError, ValueError) as e:  # the latter: of no shape at all
            self.fabric.violations.append(f"{self.part} {record.id}: {e}")
            return answers.error(400, str(e), "not_in_the_protocol")

    def _scripted(self, record: Record) -> Answer | None:
        if self.coming:
            return answers.error(self.coming.popleft(), "scripted", "scripted")
        if self.knobs.status != 200 and self.struck(record):
            return answers.scripted(self.knobs)
        return None

    # --- encoder

    def _encode(self, record: Record, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        need(body.get("model") in self.knobs.models, f"model {body.get('model')}")
        items = check_encode(body, headers, pinned=self.fabric.rewrite)
        ids: list[str] = []
        if self.fabric.mooncake:
            ids = check_push(body.get("ec_transfer_params"), len(items), self.fabric.mooncake)
            need(self.fabric.transfer_ids.isdisjoint(ids), "a transfer id that was used before")
            self.fabric.transfer_ids |= set(ids)
        else:
            need("ec_transfer_params" not in body, f"ec_transfer_params: {body.get('ec_transfer_params')}")
        scripted = self._scripted(record)
        if scripted is not None:
            return scripted
        entries = [self._entry(item, i, ids) for i, item in enumerate(items)]
        proper = dict(entries)
        reported: object = proper if self.report is None else self.report(proper)
        known = matched(reported, items)
        if _film_with_sound(body, reported) and not self.fabric.mooncake:
            known = []  # one part, two features: the film stays as it is, without handles
        child = CHILD_ID.fullmatch(record.id)
        assert child is not None
        consumer = body["ec_transfer_params"]["consumer_zmq"] if self.fabric.mooncake else None
        self.fabric.take_encode(
            Encode(
                *(record, self.url, child["parent"], int(child["index"])),
                *(items, known, ids, consumer),
            )
        )
        if isinstance(reported, bytes):
            return Answer(200, [(b"content-type", b"application/json")], [reported], first_s=self.knobs.ttft_s)
        message = {"role": "assistant", "content": ""}
        value = {
            "id": "chatcmpl-encode",
            "object": "chat.completion",
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 0, "total_tokens": 9},
            "ec_transfer_params": reported,
        }
        return answers.json_answer(200, value, first_s=self.knobs.ttft_s)

    def _entry(self, item: dict[str, Any], index: int, ids: list[str]) -> tuple[str, dict[str, Any]]:
        """The report of one item, under a hash that is not its uuid; a `bare` item's metadata is hidden."""
        key = _key(item)
        entry: dict[str, Any] = {"metadata": metadata_of(item, key), "item_indices": [index]}
        if "bare" in url_of(item):
            entry["metadata"] = {}
        elif ids:
            entry["transfer_id"] = ids[index]
        else:
            entry |= {"peer_host": "10.0.0.5", "peer_port": self.port, "size_bytes": 4505600}
        return f"processed-{key}", entry

    # --- prefill and decode

    def _consume(self, record: Record, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        need(body.get("model") in self.knobs.models, f"model {body.get('model')}")
        more = {"prefill": {"kv_transfer_params"}, "decode": {"kv_transfer_params"}}.get(self.part, set())
        check_consume(body, headers, more={"ec_transfer_params"} | more)
        if self.part == "prefill":
            check_prefill(body)
        self.fabric.take_consumer(self.part, record, body, headers)
        if self.part == "decode":
            self.fabric.consumed.append((self.part, record, []))
        scripted = self._scripted(record)
        if scripted is not None:
            return scripted
        if self.part != "prefill":
            answer = answers.inference(self.knobs, "/v1/chat/completions", b"application/json", record.body, record.id)
            return answer
        given = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[next(_blocks), next(_blocks)]],
            "remote_engine_id": f"engine-{self.port}",
            "remote_request_id": f"chatcmpl-{record.id}",
            "remote_host": "10.0.0.7",
            "remote_port": 5600,
            "tp_size": 1,
        }
        value = {"id": "chatcmpl-prefill", "object": "chat.completion", "choices": [], "kv_transfer_params": given}
        changed = value if self.report is None else self.report(value)
        self.fabric.handed_over[record.id] = changed.get("kv_transfer_params") if isinstance(changed, dict) else None
        if isinstance(changed, bytes):
            return Answer(200, [(b"content-type", b"application/json")], [changed], first_s=self.knobs.ttft_s)
        return answers.json_answer(200, changed, first_s=self.knobs.ttft_s)


def matched(reported: object, items: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """(hash, entry) of each item, as a scripted report has it; none where it is no proper report."""
    if not isinstance(reported, dict) or not all(isinstance(entry, dict) for entry in reported.values()):
        return []
    if len(reported) == len(items) == 1:
        return list(reported.items())
    if not all(isinstance(entry.get("item_indices", []), list) for entry in reported.values()):
        return []
    of_index = {i: pair for pair in reported.items() for i in pair[1].get("item_indices", [])}
    found = [of_index.get(i) or (_key(item), reported.get(_key(item))) for i, item in enumerate(items)]
    return [(key, entry) for key, entry in found if entry is not None] if all(e for _, e in found) else []


def _film_with_sound(body: dict[str, Any], reported: object) -> bool:
    kwargs = body.get("mm_processor_kwargs") or {}
    return (
        body["messages"][0]["content"][0]["type"] == "video_url"
        and bool(kwargs.get("use_audio_in_video"))
        and isinstance(reported, dict)
        and len(reported) == 2
        and all(set(entry) <= {"metadata", "item_indices"} for entry in reported.values())
    )


_blocks = itertools.count(1)


def metadata_of(item: dict[str, Any], key: str) -> dict[str, Any]:
    """Grid fields as engines have them: nested and flat, of numbers that tell one item from another."""
    digest = hashlib.sha256(key.encode()).digest()
    if item["type"] == "image_url":
        return {"image_grid_thw": [[1, digest[0], digest[1]]]}
    if item["type"] == "video_url":
        return {"video_grid_thw": [[8, digest[0], digest[1]]], "second_per_grid_ts": [0.5]}
    return {"audio_feature_lengths": [digest[0]]}


class EpdEngine(SimulatedEngine):
    """A strict engine in the loop of the tests.

    encoder.set(ttft_s=0.1)                      # the knobs of the simulated engine
    encoder.next(500, 429)                       # statuses of the next requests
    encoder.script(lambda report: {"x": []})     # reports this instead; bytes: the whole body
    """

    def __init__(self, part: Part, fabric: Fabric, *, loop: LoopThread, **knobs: Any) -> None:
        # Not SimulatedEngine's own __init__: it would make an engine that is not strict.
        self._own_loop = None
        self._loop = loop
        self.terminated = 0
        self._closed = False
        self.part = part
        self.fabric = fabric
        self.strict = Strict(part, fabric, Knobs(**knobs))
        self._engine = self.strict
        self.start()

    @property
    def profiled(self) -> list[Record]:
        return list(self.strict.profiled)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """Of the inference requests so far."""
        return [parse(record.body) for record in self.requests if record.path.startswith("/v1/")]

    @property
    def items(self) -> int:
        """Media items that came, in requests of any fate."""
        return sum(len(body["messages"][0]["content"]) for body in self.bodies)

    def next(self, *statuses: int) -> None:
        self.strict.coming.extend(statuses)

    def script(self, report: Report | None) -> None:
        self.strict.report = report

    def aborted_since(self, instant_s: float, *, within_s: float) -> bool:
        """Every request that it got was aborted, not later than that after `instant_s`."""
        records = self.requests
        return bool(records) and all(
            record.aborted_s is not None and record.aborted_s - instant_s <= within_s for record in records
        )
