"""What engines of split serving say: the answers of the simulated engine, with usage and hand-over fields of their own.

Pure, as `answers` is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import msgspec

from workers.engine import answers
from workers.engine import pd_rules as rules
from workers.engine.answers import Answer, Knobs
from workers.engine.http import Record
from workers.engine.pd_rules import RESPONSES, Body, Leg

EVENT = re.compile(rb"\{.*\}")  # the JSON of an answer or of an event stands on one line
LEASE_S = 30.0  # vLLM's kv_lease_duration


@dataclass(slots=True)
class PdKnobs(Knobs):
    """Beside those of every engine. `ttft_s` of a leg that waits for the other one counts from its end."""

    prompt_tokens: int = 11
    cached_tokens: int = 4  # of the prompt, in this engine's own cache
    details: bool = True  # usage tells cached tokens
    null_usage: bool = False  # a stream's other events say "usage": null, as SGLang's do
    lease_s: float = LEASE_S  # prefill keeps for so long what nobody has fetched
    with_params: bool = True  # NIXL prefill answers kv_transfer_params
    finish: str = ""  # prefill's finish_reason instead of "length": then nothing is handed over
    ranks: int = 1  # data-parallel ranks of a Mooncake prefill engine
    stale_status: int = 500  # what a Mooncake decode engine answers to an engine id of before a restart


def speak(knobs: PdKnobs, leg: Leg, path: str, body: Body, record: Record, usage: Body, more: Body) -> Answer:
    """The answer of one leg; prefill makes one token.

    Args:
        usage: of the prompt; what was completed is added.
        more: top-level fields beside OpenAI's.
    """
    if leg == "prefill":
        knobs = replace(knobs, chunks=min(knobs.chunks, 1), gap_s=0.0)
    if path == RESPONSES:
        return _responded(knobs, leg, body, usage, more)
    answer = answers.inference(knobs, path, b"application/json", record.body, record.id)
    change = _Change(knobs, leg, body, usage, more)
    answer.pieces = [change.all_in(piece) for piece in answer.pieces]
    answer.tail = [change.all_in(piece) for piece in answer.tail]
    return answer


@dataclass(slots=True)
class _Change:
    """What an engine of split serving says otherwise than the plain simulated engine."""

    knobs: PdKnobs
    leg: Leg
    body: Body
    usage: Body
    more: Body
    said: int = 0  # content events so far

    def all_in(self, piece: bytes) -> bytes:
        return EVENT.sub(lambda found: msgspec.json.encode(self._one(msgspec.json.decode(found[0]))), piece)

    def _one(self, value: Body) -> Body:
        if value.get("usage"):
            value["usage"] = with_completion(self.usage, value["usage"]["completion_tokens"])
        elif (self.body.get("stream_options") or {}).get("continuous_usage_stats"):
            self.said += 1
            value["usage"] = with_completion(self.usage, self.said)
        elif self.knobs.null_usage:
            value["usage"] = None
        if not value["choices"]:
            return value
        if self.leg == "prefill":
            value["choices"][0]["finish_reason"] = self.knobs.finish or "length"
        prompt = self.body.get("prompt")
        if isinstance(prompt, list) and not rules.is_int(prompt[0]) and not self.body.get("stream"):
            value["choices"] = [value["choices"][0] | {"index": i} for i in range(len(prompt))]
        return value | self.more


def with_completion(usage: Body, count: int) -> Body:
    prompt = usage["prompt_tokens"]
    return {"prompt_tokens": prompt, "total_tokens": prompt + count, "completion_tokens": count} | usage


def _responded(knobs: PdKnobs, leg: Leg, body: Body, usage: Body, more: Body) -> Answer:
    """The answer to /v1/responses: OpenAI's shape, those of its events that matter."""
    limit = body.get("max_output_tokens")
    count = knobs.chunks if limit is None else min(knobs.chunks, limit)
    texts = [f"{knobs.text}{i} " for i in range(count)]
    told = {"input_tokens": usage["prompt_tokens"]}
    if "prompt_tokens_details" in usage:
        told["input_tokens_details"] = usage["prompt_tokens_details"]
    told |= {"output_tokens": count, "total_tokens": usage["prompt_tokens"] + count}
    content = [{"type": "output_text", "text": "".join(texts), "annotations": []}]
    value: Body = {
        "id": "resp_sim",
        "object": "response",
        "created_at": answers.CREATED,
        "model": body["model"],
        "status": (leg == "prefill" and knobs.finish) or "completed",
        "output": [{"type": "message", "id": "msg_sim", "role": "assistant", "content": content}],
        "usage": told,
        **more,
    }
    headers = answers.as_bytes(knobs.headers)
    if not body.get("stream"):
        return answers.json_answer(200, value, headers, first_s=knobs.ttft_s + knobs.gap_s * max(count - 1, 0))
    deltas = [{"type": "response.output_text.delta", "item_id": "msg_sim", "delta": text} for text in texts]
    headers.insert(0, (b"content-type", b"text/event-stream; charset=utf-8"))
    pieces, tail = [_event(delta) for delta in deltas], [_event({"type": "response.completed", "response": value})]
    return Answer(200, headers, pieces, tail, stream=True, first_s=knobs.ttft_s, gap_s=knobs.gap_s)


def _event(value: Body) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), msgspec.json.encode(value))
