"""The strict engines of the EPD tests do refuse what is not in the protocol: a proper request, changed in one place.

Without these, a test that passes because "no engine refused anything" would say little.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.engine import SimulatedEngine
from tests.support.epd import EpdEngine, Fabric, Part
from tests.support.epd_rules import KV_WANTED, derived_uuid
from tests.support.http import Reply, request
from tests.support.loop import LoopThread

MODEL = "m"
ADDRESS = "tcp://10.1.0.1:14579"
PARENT = "parent-1"
A, B, BARE = ({"type": "image_url", "image_url": {"url": f"http://media/{name}.png"}} for name in ("a", "b", "bare-c"))
VIDEO = {"type": "video_url", "video_url": {"url": "http://media/d.mp4"}}

Body = dict[str, Any]
Edit = Callable[[Body], object]


def pinned(item: Body) -> Body:
    return item | {"uuid": derived_uuid(item)}


def encode_body(*items: Body) -> Body:
    content = [pinned(item) for item in items]
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "stream": False}


class Chain:
    """An engine of each part, on one fabric; `send` is what a distributor would do."""

    def __init__(self, loop: LoopThread, fabric: Fabric) -> None:
        self.fabric = fabric
        parts: tuple[Part, ...] = ("encode", "prefill", "decode", "both")
        self.engines = {part: EpdEngine(part, fabric, loop=loop, models=(MODEL,), chunks=1) for part in parts}

    def send(self, part: Part, body: Body | bytes, *, id: str = PARENT, **headers: str) -> Reply:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        names = {"content-type": "application/json", "x-request-id": id} | headers
        url = self.engines[part].url + "/v1/chat/completions"
        return request("POST", url, body=raw, headers={name.replace("_", "-"): value for name, value in names.items()})

    def encode(self, *items: Body) -> Body:
        """Encode them; what the encoder reported."""
        reply = self.send("encode", encode_body(*items), id=f"{PARENT}:0:0a1b2c")
        assert reply.status == 200, reply
        reported: Body = reply.json()["ec_transfer_params"]
        return reported

    def consumer_body(self, *items: Body) -> Body:
        """The proper request after encoding `items`."""
        reported = self.encode(*items)
        content, ec_items = [], []
        for i, item in enumerate(items):
            uuid = derived_uuid(item)
            (mm_hash, entry) = next(pair for pair in reported.items() if i in pair[1]["item_indices"])
            kind = {"image_url": "image_embeds", "video_url": "video_embeds"}[item["type"]]
            flat = {
                name: [n for row in rows for n in (row if isinstance(row, list) else [row])]
                for name, rows in entry["metadata"].items()
            }
            content.append({"type": kind, kind: flat, "uuid": uuid} if flat else pinned(item))
            ec_items.append({"mm_hash": mm_hash, "transfer_id": f"{i:032x}"})
        params = reported | {"ec_items": ec_items}
        return {"model": MODEL, "messages": [{"role": "user", "content": content}], "ec_transfer_params": params}


@pytest.fixture
def chain(engine_loop: LoopThread) -> Any:
    made = Chain(engine_loop, Fabric())
    yield made
    for engine in made.engines.values():
        assert isinstance(engine, SimulatedEngine)
        engine.close()


def content(body: Body) -> list[Body]:
    found: list[Body] = body["messages"][0]["content"]
    return found


def refused(chain: Chain, part: Part, body: Body, edits: dict[str, Edit], *, id: str = PARENT) -> list[str]:
    """The edits that the engine let pass."""
    passed = []
    for name, edit in edits.items():
        edited = copy.deepcopy(body)
        edit(edited)
        before = len(chain.fabric.violations)
        reply = chain.send(part, edited, id=id)
        if reply.status != 400 or len(chain.fabric.violations) != before + 1:
            passed.append(name)
    return passed


ENCODE: dict[str, Edit] = {
    "a field of the client": lambda b: b.update(temperature=1),
    "a token limit": lambda b: b.update(max_tokens=1),
    "a stream": lambda b: b.update(stream=True),
    "no stream field": lambda b: b.pop("stream"),
    "another model": lambda b: b.update(model="x"),
    "no model": lambda b: b.pop("model"),
    "two messages": lambda b: b["messages"].append(b["messages"][0]),
    "the role of another": lambda b: b["messages"][0].update(role="system"),
    "a name": lambda b: b["messages"][0].update(name="x"),
    "text": lambda b: content(b).append({"type": "text", "text": "x"}),
    "no items": lambda b: content(b).clear(),
    "no uuid": lambda b: content(b)[0].pop("uuid"),
    "a made-up uuid": lambda b: content(b)[0].update(uuid="0" * 64),
    "an item twice": lambda b: content(b).append(content(b)[0]),
    "a film among images": lambda b: content(b).append(pinned(VIDEO)),
    "consumer params without Mooncake": lambda b: b.update(ec_transfer_params={"ec_items": []}),
}


def test_encoder_refuses_each_change_of_a_proper_call(chain: Chain) -> None:
    body = encode_body(A, B)
    assert chain.send("encode", body, id=f"{PARENT}:0:0a1b2c").status == 200
    assert refused(chain, "encode", body, ENCODE, id=f"{PARENT}:0:0a1b2c") == []


def test_encoder_refuses_headers_that_are_not_right(chain: Chain) -> None:
    body, child = encode_body(A), f"{PARENT}:0:0a1b2c"
    for id in (PARENT, f"{PARENT}:x:0a1b2c", f"{PARENT}:0:0a1b2", f"{PARENT}:0:0A1B2C", ":0:0a1b2c"):
        assert chain.send("encode", body, id=id).status == 400, id
    assert chain.send("encode", body, id=child, authorization="Bearer x").status == 400
    assert chain.send("encode", body, id=child, x_api_key="x").status == 400
    assert chain.send("encode", body, id=child, content_type="text/plain").status == 400
    assert chain.send("encode", b'{"model": "m", "model": "m"}', id=child).status == 400
    assert chain.send("encode", b"[]", id=child).status == 400


def _push(b: Body, **changes: Any) -> None:
    b["ec_transfer_params"] |= changes


PUSH: dict[str, Edit] = {
    "no params": lambda b: b.pop("ec_transfer_params"),
    "another consumer": lambda b: _push(b, consumer_zmq="tcp://x:1"),
    "one id too few": lambda b: b["ec_transfer_params"]["ec_items"].pop(),
    "a short id": lambda b: b["ec_transfer_params"]["ec_items"][0].update(transfer_id="0" * 31),
    "a hash": lambda b: b["ec_transfer_params"]["ec_items"][0].update(mm_hash="x"),
    "more params": lambda b: _push(b, x=1),
    "ids of an earlier call": lambda b: None,
}


def test_mooncake_encoder_refuses_each_change_of_a_proper_call(chain: Chain) -> None:
    chain.fabric.mooncake = (ADDRESS,)
    ids = [{"transfer_id": f"{i:032x}"} for i in (1, 2)]
    body = encode_body(A, B) | {"ec_transfer_params": {"consumer_zmq": ADDRESS, "ec_items": ids}}
    assert chain.send("encode", body, id=f"{PARENT}:0:0a1b2c").status == 200
    assert refused(chain, "encode", body, PUSH, id=f"{PARENT}:0:0a1b2c") == []


def _handles(b: Body) -> Body:
    found: Body = b["ec_transfer_params"]
    return found


def _first(b: Body) -> Body:
    found: Body = next(iter(_handles(b).values()))
    return found


CONSUME: dict[str, Edit] = {
    "an unknown field": lambda b: b.update(bootstrap_host="x"),
    "KV params": lambda b: b.update(kv_transfer_params={}),
    "no handles": lambda b: b.pop("ec_transfer_params"),
    "a handle that is missing": lambda b: _handles(b).pop(next(iter(_handles(b)))),
    "a handle more": lambda b: _handles(b).update(x={"metadata": {}}),
    "a handle under its uuid": lambda b: _handles(b).update(
        {derived_uuid(A): _handles(b).pop(next(iter(_handles(b))))}
    ),
    "another peer": lambda b: _first(b).update(peer_host="10.6.6.6"),
    "no ec_items": lambda b: _handles(b).pop("ec_items"),
    "ec_items in another order": lambda b: _handles(b)["ec_items"].reverse(),
    "one of ec_items missing": lambda b: _handles(b)["ec_items"].pop(0),
    "one transfer id for two": lambda b: _handles(b)["ec_items"][1].update(transfer_id="0" * 32),
    "a transfer id that is none": lambda b: _handles(b)["ec_items"][0].update(transfer_id="x"),
    "raw media though reported": lambda b: content(b).__setitem__(0, pinned(A)),
    "raw media without uuid": lambda b: content(b)[2].pop("uuid"),
    "embeds that were not reported": lambda b: content(b)[0].update(uuid="0" * 64),
    "embeds of the other image": lambda b: content(b)[0].update(image_embeds=content(b)[1]["image_embeds"]),
    "nested embeds": lambda b: content(b)[0].update(image_embeds={"image_grid_thw": [[1, 2, 3]]}),
    "something left of the old part": lambda b: content(b)[0].update(detail="low"),
}


@pytest.mark.parametrize("name", CONSUME)
def test_node_refuses_each_change_of_a_proper_request(chain: Chain, name: str) -> None:
    body = chain.consumer_body(A, B, BARE)
    assert refused(chain, "both", body, {name: CONSUME[name]}) == []


def test_node_takes_the_proper_request_once_and_holds_a_retry_to_new_encodes(chain: Chain) -> None:
    body = chain.consumer_body(A, B, BARE)
    assert chain.send("both", body).status == 200
    assert chain.send("both", body).status == 400, "no encodes since the last time"
    again = chain.consumer_body(A, B, BARE)
    assert chain.send("both", again).status == 400, "the transfer ids of the last time"
    assert len(chain.fabric.violations) == 2


PREFILL: dict[str, Edit] = {
    "no KV params": lambda b: b.pop("kv_transfer_params"),
    "KV params of a decode": lambda b: b["kv_transfer_params"].update(do_remote_prefill=True),
    "a stream": lambda b: b.update(stream=True),
    "two tokens": lambda b: b.update(max_tokens=2),
    "no limit": lambda b: b.pop("max_tokens"),
    "two completion tokens": lambda b: b.update(max_completion_tokens=2),
    "a least number of tokens": lambda b: b.update(min_tokens=1),
    "stream options": lambda b: b.update(stream_options={}),
}


def test_prefill_and_decode_refuse_each_change_of_a_proper_request(chain: Chain) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": False, "max_tokens": 1}
    body |= {"kv_transfer_params": KV_WANTED}
    assert refused(chain, "prefill", body, PREFILL) == []
    given = chain.send("prefill", body).json()["kv_transfer_params"]
    decode = {"model": MODEL, "messages": body["messages"], "kv_transfer_params": given}
    assert chain.send("decode", decode, id="another").status == 400
    assert chain.send("decode", decode).status == 200
    assert chain.send("decode", decode).status == 400, "the blocks were pulled before"
    chain.send("prefill", body)
    assert chain.send("decode", decode).status == 400, "the blocks of an earlier prefill"
