"""What vLLM and SGLang engines of split serving are asked, as rules: a request in, the reason to refuse it out.

Pure: no socket, no clock. Stricter than the engines: a field or a header that neither a client of the tests nor
the protocol has is refused, so that nothing goes astray unseen. What only two engines can know together (is this
what the other one gave?) is in `pd`.

Sources: vLLM's NIXL toy proxy and its Mooncake connector proxy; SGLang's mini_lb and protocol.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from workers.engine.rules import need

Protocol = Literal["nixl", "mooncake", "sglang"]
Leg = Literal["prefill", "decode"]
Body = dict[str, Any]

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PATHS: dict[Protocol, tuple[str, ...]] = {
    "nixl": (CHAT, COMPLETIONS, RESPONSES),
    "mooncake": (CHAT, COMPLETIONS, RESPONSES),
    "sglang": (CHAT, COMPLETIONS),
}
COMMON = {
    "model", "stream", "stream_options", "max_tokens", "min_tokens", "n", "stop", "temperature", "top_p", "seed",
    "user", "logprobs", "ignore_eos", "cache_salt", "priority", "frequency_penalty", "presence_penalty", "logit_bias",
}  # fmt: skip
OF_CLIENT = {
    CHAT: COMMON | {
        "messages", "max_completion_tokens", "min_completion_tokens", "tools", "tool_choice", "parallel_tool_calls",
        "response_format", "top_logprobs", "chat_template_kwargs",
    },
    COMPLETIONS: COMMON | {"prompt", "best_of", "suffix", "response_format"},
    RESPONSES: {
        "model", "input", "instructions", "stream", "max_output_tokens", "temperature", "top_p", "tools",
        "tool_choice", "parallel_tool_calls", "text", "user", "metadata",
    },
}  # fmt: skip
OF_SGLANG = {"return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"}
RANKS = {"routed_dp_rank", "disagg_prefill_dp_rank"}  # of SGLang; the legs may differ in them
BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
# The two caches are of one length only where the same prompt was made of them.
PROMPT = ("model", "messages", "prompt", "suffix", "input", "instructions", "tools", "chat_template_kwargs")
# vLLM refuses a minimum above the one token, and stream_options without a stream; one sequence is handed over.
NOT_FOR_PREFILL = ("stream_options", "min_tokens", "min_completion_tokens", "n", "best_of")
NOT_FOR_ENGINES = ("x-api-key", "api-key", "x-lmdeploy-distserve-proxy")

NIXL_WANTED: Body = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
ROOMS = 2**63


def check_headers(pairs: Iterable[tuple[bytes, bytes]], *, key: str) -> dict[str, str]:
    names = [name.decode("latin-1").lower() for name, _ in pairs]
    need(len(names) == len(set(names)), f"a header stands twice: {names}")
    headers = dict(zip(names, (value.decode("latin-1") for _, value in pairs), strict=True))
    need(headers.get("content-type", "").startswith("application/json"), f"type {headers.get('content-type')}")
    need(headers.get("x-request-id"), "no x-request-id")
    need(key or "authorization" not in headers, "a key that is not this engine's")
    for name in NOT_FOR_ENGINES:
        need(name not in headers, f"header {name}")
    return headers


def check_body(protocol: Protocol, leg: Leg, path: str, body: Body) -> None:
    """Known fields only, and of prefill with vLLM: one token, no stream, nothing that one token can't honour."""
    more = {*BOOTSTRAP, *RANKS, *OF_SGLANG} if protocol == "sglang" else {"kv_transfer_params"}
    unknown = set(body) - OF_CLIENT[path] - more
    need(not unknown, f"unknown to this engine: {sorted(unknown)}")
    if leg == "decode" or protocol == "sglang":
        return
    need(body.get("stream") is False, f"stream is {body.get('stream')!r} on prefill")
    limit, others = ("max_output_tokens", ()) if path == RESPONSES else ("max_tokens", ("max_completion_tokens",))
    need(is_int(body.get(limit)) and body[limit] == 1, f"{limit} is {body.get(limit)!r} on prefill")
    for name in others:
        need(name not in body or (is_int(body[name]) and body[name] == 1), f"{name} is {body.get(name)!r} on prefill")
    for name in NOT_FOR_PREFILL:
        need(name not in body, f"{name} on prefill")


def check_mooncake_prefill(body: Body, headers: Mapping[str, str], ranks: int) -> tuple[str, int]:
    """(transfer id, data-parallel rank)."""
    params = object_of(body, {"do_remote_decode", "do_remote_prefill", "transfer_id"})
    need(params["do_remote_decode"] is True and params["do_remote_prefill"] is False, f"flags of {params}")
    rank = headers.get("x-data-parallel-rank", "")
    need(re.fullmatch(r"\d+", rank) and int(rank) < ranks, f"x-data-parallel-rank {rank!r}, there are {ranks}")
    return text_of(params, "transfer_id"), int(rank)


def check_mooncake_decode(body: Body) -> tuple[str, str, str]:
    """(transfer id, bootstrap address, engine id)."""
    names = {"do_remote_decode", "do_remote_prefill", "remote_bootstrap_addr", "remote_engine_id", "transfer_id"}
    params = object_of(body, names)
    need(params["do_remote_decode"] is False and params["do_remote_prefill"] is True, f"flags of {params}")
    address = text_of(params, "remote_bootstrap_addr")
    parts = urlsplit(address)
    need(parts.scheme == "http" and parts.port and parts.path == "", f"remote_bootstrap_addr {address}")
    return text_of(params, "transfer_id"), address, text_of(params, "remote_engine_id")


def check_rooms(path: str, body: Body) -> list[tuple[str, int, int]]:
    """(host, port, room) of each prompt."""
    values = [body.get(name) for name in BOOTSTRAP]
    prompt = body.get("prompt")
    # A list of strings, or of lists of token ids, is a batch, though it be one of one.
    batch = path == COMPLETIONS and isinstance(prompt, list) and bool(prompt) and not is_int(prompt[0])
    if batch:
        assert isinstance(prompt, list)
        for name, value in zip(BOOTSTRAP, values, strict=True):
            need(isinstance(value, list) and len(value) == len(prompt), f"{name} {value} for {len(prompt)} prompts")
    else:
        values = [[value] for value in values]
    found: list[tuple[str, int, int]] = list(zip(*values, strict=True))
    for host, port, room in found:
        need(isinstance(host, str) and host, f"bootstrap_host {host!r}")
        need(is_int(port) and 0 < port < 65536, f"bootstrap_port {port!r}")
        need(is_int(room) and 0 <= room < ROOMS, f"bootstrap_room {room!r} is no number of 63 bits")
    rooms = [room for _, _, room in found]
    need(len(rooms) == len(set(rooms)), f"one room for two prompts: {rooms}")
    return found


def object_of(body: Body, names: set[str]) -> Body:
    params = body.get("kv_transfer_params")
    need(isinstance(params, dict) and set(params) == names, f"kv_transfer_params {params}, wanted are {sorted(names)}")
    assert isinstance(params, dict)
    return params


def text_of(params: Body, name: str) -> str:
    value = params[name]
    need(isinstance(value, str) and value, f"{name} {value!r}")
    return str(value)


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def prompt_of(body: Body) -> Body:
    return {name: body[name] for name in PROMPT if name in body}
