"""The EPD protocol as rules: a request in, the reason why an engine of that role refuses it out.

Pure: no socket, no clock. Written from the protocol, not from the code under test, and strict: a field or a header
that the protocol does not name is refused. The engines that apply the rules are in `tests.support.epd`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from workers.engine.rules import need

EMBEDS_OF = {
    "image_url": "image_embeds",
    "video_url": "video_embeds",
    "audio_url": "audio_embeds",
    "input_audio": "audio_embeds",
}
OPTIONS = ("mm_processor_kwargs", "media_io_kwargs", "priority", "session_id")
KV_WANTED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# What a chat request of a client may hold; the tests send nothing else.
CLIENT_FIELDS = {
    "model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens", "n",
    "temperature", "seed", "stop", "tools", "user", "chat_template_kwargs", "cache_salt", *OPTIONS,
}  # fmt: skip
# A client's other headers pass, as they do in Hybrid serving; these would speak for the client.
KEY_HEADERS = {"x-api-key", "api-key"}
CHILD_ID = re.compile(r"(?P<parent>.+):(?P<index>\d+):(?P<hex>[0-9a-f]{6})")
TRANSFER_ID = re.compile(r"[0-9a-f]{32}")


def headers_of(pairs: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    names = [name.decode("latin-1").lower() for name, _ in pairs]
    need(len(names) == len(set(names)), f"a header stands twice: {names}")
    return dict(zip(names, (value.decode("latin-1") for _, value in pairs), strict=True))


def url_of(part: Mapping[str, Any]) -> str:
    inner = part.get("image_url") or part.get("audio_url") or part.get("video_url") or {}
    return inner if isinstance(inner, str) else str(inner.get("url") or "")


def derived_uuid(part: Mapping[str, Any]) -> str:
    """SHA-256 of the URL, or of the whole part as Python writes it with sorted keys where it has none."""
    plain = {key: value for key, value in part.items() if key != "uuid"}
    return hashlib.sha256((url_of(part) or json.dumps(plain, sort_keys=True)).encode()).hexdigest()


def flat(values: list[Any]) -> list[Any]:
    """One level of lists taken out: [[1, 2, 2]] -> [1, 2, 2]."""
    return [one for value in values for one in (value if isinstance(value, list) else [value])]


def check_encode(body: Mapping[str, Any], headers: Mapping[str, str], *, pinned: bool) -> list[dict[str, Any]]:
    """The items of a sub-request.

    Args:
        pinned: every item carries its uuid; a caller's own begins with `own-` in these tests. Not pinned
            (--no-rewrite): only a caller's own rides along.
    """
    need(not set(headers) & KEY_HEADERS, "a key of the client")
    need(headers.get("content-type") == "application/json", f"content-type {headers.get('content-type')}")
    need(CHILD_ID.fullmatch(headers.get("x-request-id", "")), f"x-request-id {headers.get('x-request-id')}")
    known = {"model", "messages", "stream", "ec_transfer_params", *OPTIONS}
    need(set(body) <= known, f"not for an encoder: {set(body) - known}")
    need(body.get("stream") is False, f"stream is {body.get('stream')!r}")
    messages = body.get("messages")
    need(isinstance(messages, list) and len(messages) == 1, f"one message wanted: {messages}")
    assert isinstance(messages, list)
    need(set(messages[0]) == {"role", "content"}, f"keys of the message: {set(messages[0])}")
    need(messages[0]["role"] == "user", f"role {messages[0]['role']}")
    items: list[dict[str, Any]] = messages[0]["content"]
    need(isinstance(items, list) and items, f"no items: {items}")
    for item in items:
        need(item.get("type") in EMBEDS_OF and item["type"] in item, f"no media item: {item}")
        uuid = item.get("uuid")
        own = isinstance(uuid, str) and uuid.startswith("own-")
        wanted = derived_uuid(item) if pinned else None
        need(own or uuid == wanted, f"uuid {uuid}, wanted {wanted} or the caller's own")
    need(len(items) == 1 or all(item["type"] == "image_url" for item in items), "only images go together")
    keys = [item.get("uuid") or derived_uuid(item) for item in items]
    need(len(keys) == len(set(keys)), "one item twice in a call")
    return items


def check_push(params: Any, count: int, addresses: Iterable[str]) -> list[str]:
    """The transfer ids of `ec_transfer_params` as a Mooncake encoder gets it."""
    need(isinstance(params, dict), "no ec_transfer_params, and the consumer is a Mooncake one")
    need(set(params) == {"consumer_zmq", "ec_items"}, f"keys of ec_transfer_params: {set(params)}")
    need(params["consumer_zmq"] in set(addresses), f"consumer_zmq {params['consumer_zmq']}")
    need(len(params["ec_items"]) == count, f"{len(params['ec_items'])} transfer ids for {count} items")
    for item in params["ec_items"]:
        need(set(item) == {"transfer_id"} and TRANSFER_ID.fullmatch(item["transfer_id"]), f"ec_items: {item}")
    return [item["transfer_id"] for item in params["ec_items"]]


def check_consume(body: Mapping[str, Any], headers: Mapping[str, str], *, more: set[str]) -> None:
    """What every prefill and decode request keeps to; `more`: the hand-over fields that belong to its role."""
    need(headers.get("content-type") == "application/json", f"content-type {headers.get('content-type')}")
    need(headers.get("x-request-id"), "no x-request-id")
    need(not set(headers) & KEY_HEADERS, "a key of the client")
    need(set(body) <= CLIENT_FIELDS | more, f"unknown: {set(body) - CLIENT_FIELDS - more}")


def check_prefill(body: Mapping[str, Any]) -> None:
    need(body.get("kv_transfer_params") == KV_WANTED, f"kv_transfer_params: {body.get('kv_transfer_params')}")
    need(body.get("stream") is False, f"stream is {body.get('stream')!r}")
    need(body.get("max_tokens") == 1, f"max_tokens is {body.get('max_tokens')!r}")
    need(body.get("max_completion_tokens", 1) == 1, "max_completion_tokens is not 1")
    for name in ("min_tokens", "stream_options"):
        need(name not in body, f"{name} on prefill")


def media_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Raw media and embeds of all messages, in reading order."""
    kinds = {*EMBEDS_OF, *EMBEDS_OF.values()}
    contents = [message.get("content") for message in body.get("messages") or []]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part for part in parts if isinstance(part, dict) and part.get("type") in kinds]
