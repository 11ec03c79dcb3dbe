"""Bodies of the two legs: what prefill gets of a request, and what it answers.

Pure. Members are kept as they were written, so that the client's values reach decode byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from app.dispatch.answer import Whole
from app.dispatch.bodies import decode, decode_members, encoded
from app.dispatch.bodies import value_of as decoded
from app.errors import BadRequest, EngineProtocolError

Members = dict[str, Raw]

NOT_FOR_PREFILL = (
    "stream_options",
    "min_tokens",
    "min_completion_tokens",
    "min_new_tokens",
    "n",
    "best_of",
)
"""What one token without a stream can't honour, or what an engine refuses beside it."""

TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")

_ONE, _NO, _NULL = Raw(b"1"), Raw(b"false"), Raw(b"null")


def value_of(members: Members, name: str) -> Any:
    """The value of a member; None where it isn't there. Raises BadRequest."""
    return decoded(members[name], name) if name in members else None


def with_values(members: Members, values: Mapping[str, object]) -> bytes:
    """The body with some members put in or replaced."""
    return encoded({**members, **values})


def for_prefill(members: Members, values: Mapping[str, object], *, limits: Sequence[str] = ("max_tokens",)) -> bytes:
    """The request with one token to make and no stream, and `values` put in.

    Args:
        limits: the token limits that prefill gets; others are lowered where the client gave them.
    """
    kept = {name: raw for name, raw in members.items() if name not in NOT_FOR_PREFILL}
    kept["stream"] = _NO
    kept |= {name: _ONE for name in TOKEN_LIMITS if name in kept or name in limits}
    return with_values(kept, values)


def check_splittable(members: Members) -> None:
    """Refuse what a decode node can't answer: it never computes the prompt's logits.

    Raises:
        BadRequest: echo, or logprobs of the prompt.
    """
    if value_of(members, "echo"):
        raise BadRequest("echo can't be used while prefill and decode are separate", param="echo")
    if value_of(members, "prompt_logprobs") is not None:
        raise BadRequest("prompt_logprobs can't be used while prefill and decode are separate", param="prompt_logprobs")


def check_one_prompt(members: Members) -> None:
    """Refuse several prompts in one request: a hand-over is the cache of one of them.

    Raises:
        BadRequest: `prompt` is a list of more than one text, or of more than one list of tokens.
    """
    if bytes(members.get("prompt", Raw(b""))).lstrip()[:1] != b"[":
        return
    prompts = value_of(members, "prompt")
    if len(prompts) > 1 and not isinstance(prompts[0], int):
        raise BadRequest(
            "prompt must be one prompt while prefill and decode are separate: send a request for each", param="prompt"
        )


GAVE_UP = ("abort", "error")
"""`finish_reason` of an engine that did not do what it was asked."""


class Prefilled(msgspec.Struct):
    """A prefill node's answer, as far as it is looked at. `members`: all of it, undecoded."""

    members: Members
    usage: dict[str, Any] | None
    aborted: bool


def read_prefilled(whole: Whole) -> Prefilled:
    """Raises EngineProtocolError for what is no JSON object, and no stream of them."""
    kind = dict(whole.headers).get(b"content-type", b"")
    texts = _events(whole.body) if kind.startswith(b"text/event-stream") else [whole.body]
    found = Prefilled({}, None, False)
    try:
        for text in texts:
            members = decode_members(text)
            found.members |= members
            usage = decode(members.get("usage", _NULL))
            choices = decode(members.get("choices", _NULL))
            found.usage = usage if isinstance(usage, dict) else found.usage
            found.aborted |= _gave_up(choices)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise EngineProtocolError(f"engine {whole.url} answered a prefill with what is no JSON object") from e
    return found


def shows_failure(first: bytes) -> bool:
    """Whether the first bytes of a 200 say that nothing was decoded: none at all, an error, or a request given up.

    What can't be read says nothing of the kind: it is the beginning of an answer.
    """
    if not first:
        return True
    events = _events(first)
    try:
        found = decode(events[0] if events else first)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    if not isinstance(found, dict):
        return False
    return bool(found.get("error")) or found.get("object") == "error" or _gave_up(found.get("choices"))


def _gave_up(choices: object) -> bool:
    found = choices if isinstance(choices, list) else []
    return any(isinstance(choice, dict) and choice.get("finish_reason") in GAVE_UP for choice in found)


def _events(body: bytes) -> list[bytes]:
    """The data of a stream's events, without its end mark."""
    lines = (line[5:].strip() for line in body.splitlines() if line.startswith(b"data:"))
    return [line for line in lines if line and line != b"[DONE]"]
