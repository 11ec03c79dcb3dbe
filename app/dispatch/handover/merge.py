"""What the client reads of both legs in one answer: prompt figures from prefill, the rest from decode.

A decode node counts the transferred cache as cached tokens and can't know what prefill found in its own, so
`usage` of its answer is put right; and it has no log probabilities of the prompt. Everything else passes byte
for byte. It must not know how nodes are chosen.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Raw

from app.dispatch.answer import Begun, Whole, with_length
from app.dispatch.bodies import decode, decode_members
from app.dispatch.handover.bodies import Prefilled
from app.upstream.transport import Response, whole

LIMIT_BYTES = 64 * 2**20
"""Of an answer that is put right as a whole; a longer one passes as it is."""
LINE_LIMIT_BYTES = 2**20
"""Of an event that is held back until it is complete; of a longer one the beginning passes as it is."""

_FIGURES = re.compile(rb'"(?:usage|meta_info)"\s*:\s*\{').search

_MEMBERS = {name: re.compile(rb'"%s"\s*:\s*' % name.encode()).finditer for name in ("usage", "meta_info", "response")}

Known = Callable[[], Prefilled | None]
"""What prefill said, once it is known."""

Wait = Callable[[], Awaitable[object]]
"""Waits until that is known, or no longer worth it."""


async def merged(response: Response, known: Known, *, url: str, wait: Wait | None = None) -> Response:
    """The answer of decode with prefill's figures in it; as it is where it can't be read.

    Args:
        wait: awaited before figures pass; None: prefill has said what it has to say.
    """
    headers = dict(response.headers)
    if response.status != 200 or headers.get(b"content-encoding", b"identity") != b"identity":
        return response
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if kind == b"text/event-stream":
        return _Stream(response, known, wait)
    if kind != b"application/json":
        return response
    body = whole(response)
    if body is None:
        read = bytearray()
        while chunk := await response.read():
            read += chunk
            if len(read) > LIMIT_BYTES:
                return Begun(response, bytes(read))
        body = bytes(read)
    if wait is not None:
        await wait()
    prefilled = known()
    response.close()
    if prefilled is not None:
        body = put_right(body, prefilled)
    return Whole(url, response.status, with_length(response.headers, len(body)), body)


class _Stream:
    """Events pass as they come; one that holds figures is held back until its line is complete."""

    def __init__(self, response: Response, known: Known, wait: Wait | None) -> None:
        self.status = response.status
        self.headers = response.headers
        self._response = response
        self._known = known
        self._wait = wait
        self._held = bytearray()
        self._ended = False
        self._too_long = False

    async def read(self) -> bytes:
        while not self._ended:
            chunk = await self._response.read()
            if not chunk:
                self._ended = True
                return bytes(self._held)  # an incomplete line is no event
            passed = await self._feed(chunk)
            if passed:
                return passed
        return b""

    def close(self) -> None:
        self._response.close()

    async def _feed(self, chunk: bytes) -> bytes:
        self._held += chunk
        end = max(self._held.rfind(b"\n"), self._held.rfind(b"\r")) + 1
        lines = bytes(self._held[:end])
        del self._held[:end]
        if self._too_long and lines:  # the rest of the line whose beginning has passed
            at = min(i for i in (lines.find(b"\n"), lines.find(b"\r")) if i >= 0) + 1
            first, lines, self._too_long = lines[:at], lines[at:], False
        else:
            first = b""
        passed = first + await self._put_right(lines)
        if len(self._held) > LINE_LIMIT_BYTES or self._too_long:
            self._too_long = True
            passed += bytes(self._held)
            self._held.clear()
        return passed

    async def _put_right(self, lines: bytes) -> bytes:
        if not _FIGURES(lines):
            return lines
        if self._wait is not None:
            await self._wait()
        prefilled = self._known()
        if prefilled is None:
            return lines
        return b"".join(
            line[:5] + put_right(line[5:], prefilled) if line.startswith(b"data:") else line
            for line in lines.splitlines(keepends=True)
        )


def put_right(text: bytes, prefilled: Prefilled) -> bytes:
    """A JSON object with prefill's figures in its `usage` and `meta_info`, and in those of the `response` that
    an event of /v1/responses holds; what is none passes as it is."""
    try:
        members = decode_members(text)
        changes: dict[str, bytes] = {}
        usage = _object(members, "usage")
        if usage is not None and prefilled.usage is not None:
            changes["usage"] = msgspec.json.encode(merged_usage(usage, prefilled.usage))
        info, of_prompt = _object(members, "meta_info"), _object(prefilled.members, "meta_info")
        if info is not None and of_prompt is not None:
            changes["meta_info"] = msgspec.json.encode(merged_logprobs(info, of_prompt))
        if bytes(members.get("response", b""))[:1] == b"{":
            changes["response"] = put_right(bytes(members["response"]), prefilled)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return text
    for name, value in changes.items():
        text = _replace(text, members, name, value)
        members[name] = Raw(value)
    return text


def _object(members: dict[str, Raw], name: str) -> dict[str, Any] | None:
    value = decode(members[name]) if name in members else None
    return value if isinstance(value, dict) else None


def merged_usage(usage: dict[str, Any], of_prefill: dict[str, Any]) -> dict[str, Any]:
    """Prompt and cached tokens from prefill, completion tokens from decode."""
    of_prompt, of_completion = ("prompt", "completion") if "prompt_tokens" in usage else ("input", "output")
    prompt, completion = of_prefill.get(f"{of_prompt}_tokens"), usage.get(f"{of_completion}_tokens")
    if not isinstance(prompt, int):
        return usage
    found = usage | {f"{of_prompt}_tokens": prompt}
    details = f"{of_prompt}_tokens_details"
    if details in usage or of_prefill.get(details) is not None:
        found[details] = of_prefill.get(details)
    if isinstance(completion, int):
        found["total_tokens"] = prompt + completion
    return found


def merged_logprobs(info: dict[str, Any], of_prompt: dict[str, Any]) -> dict[str, Any]:
    """SGLang's `input_token_logprobs` and their like: prefill's, then decode's (source: its mini_lb)."""
    return info | {
        name: [*of_prompt[name], *value]
        for name, value in info.items()
        if name.startswith("input_") and isinstance(value, list) and isinstance(of_prompt.get(name), list)
    }


def _replace(text: bytes, members: dict[str, Raw], name: str, value: bytes) -> bytes:
    """Put `value` in the place of a member and leave every other byte."""
    before = bytes(members[name])
    if before == value:
        return text
    if text.count(before) == 1:
        return text.replace(before, value)
    # A quote inside of a string is escaped, so this is a member; but perhaps one of an inner object.
    places = [found.end() for found in _MEMBERS[name](text) if text.startswith(before, found.end())]
    if len(places) == 1:
        (at,) = places
        replaced = text[:at] + value + text[at + len(before) :]
        # Else it was the inner one, and this member's name is written with an escape.
        if bytes(decode_members(replaced)[name]) == value:
            return replaced
    ending = text[len(text.rstrip(b"\r\n")) :]
    start = text[: len(text) - len(text.lstrip(b" "))]
    return start + msgspec.json.encode(members | {name: Raw(value)}) + ending
