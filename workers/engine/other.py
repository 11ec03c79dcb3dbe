"""What the simulated engine answers beside chat and completions: plausible words in the shapes of real engines.

Pure and deterministic, as `answers`. Shapes are vLLM's where several engines have a call, and
SGLang's for `/generate`. A token is a byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from workers.engine.answers import CREATED, Answer, Knobs, as_bytes, chunks_of, error, json_answer

Body = dict[str, Any]
Shape = Callable[[Knobs, str, Body], Body]
"""Knobs, model and request to the answer's JSON."""
Events = list[tuple[str, Body]]


def answer(knobs: Knobs, path: str, content_type: bytes, body: bytes) -> Answer | None:
    """None: it has no such call."""
    if path in FORMS and content_type.lower().startswith(b"multipart/form-data"):
        made = json_answer(200, {"text": words(knobs), "usage": {"type": "duration", "seconds": 1}})
    elif path in SHAPES:
        try:
            asked = msgspec.json.decode(body, type=Body)
            model = asked.get("model") or knobs.models[0]
            if model not in knobs.models:
                return error(404, f"The model `{model}` does not exist.", "model_not_found")
            streamed = STREAMS.get(path) if asked.get("stream") else None
            made = json_answer(200, SHAPES[path](knobs, model, asked))
            if streamed is not None:
                *pieces, last = [as_event(*event) for event in streamed(knobs, model, asked)]
                head = [(b"content-type", b"text/event-stream; charset=utf-8")]
                made = Answer(200, head, pieces, [last], stream=True, gap_s=knobs.gap_s)
        except (msgspec.DecodeError, TypeError) as e:
            return error(400, f"bad request body: {e}", "invalid_request")
    else:
        return None
    made.first_s = knobs.ttft_s
    made.headers += as_bytes(knobs.headers)
    return made


def as_event(name: str, data: Body) -> bytes:
    if not data:
        return b"data: [DONE]\n\n"
    label = b"event: " + name.encode() + b"\n" if name else b""
    return label + b"data: " + msgspec.json.encode(data) + b"\n\n"


def words(knobs: Knobs, count: int | None = None) -> str:
    return "".join(f"{knobs.text}{i} " for i in range(knobs.chunks if count is None else count))


def listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [value]


def usage(count: int) -> Body:
    return {"prompt_tokens": count, "total_tokens": count}


# --- one answer each


def scored(knobs: Knobs, model: str, asked: Body) -> Body:
    texts = listed(asked.get("text_2", asked.get("items")))
    rows = [{"index": i, "object": "score", "score": 1 / (i + 2)} for i in range(len(texts))]
    return {"id": "score-sim", "object": "list", "created": CREATED, "model": model, "data": rows, "usage": usage(5)}


def reranked(knobs: Knobs, model: str, asked: Body) -> Body:
    documents = listed(asked.get("documents"))
    rows = [{"index": i, "document": {"text": d}, "relevance_score": 1 / (i + 2)} for i, d in enumerate(documents)]
    return {"id": "rerank-sim", "model": model, "usage": {"total_tokens": 5}, "results": rows[: asked.get("top_n")]}


def classified(knobs: Knobs, model: str, asked: Body) -> Body:
    count = len(listed(asked.get("input")))
    rows = [{"index": i, "label": "LABEL_0", "probs": [0.75, 0.25], "num_classes": 2} for i in range(count)]
    return {"id": "classify-sim", "object": "list", "created": CREATED, "model": model, "data": rows, "usage": usage(5)}


def pooled(knobs: Knobs, model: str, asked: Body) -> Body:
    count = len(listed(asked.get("input")))
    rows = [{"index": i, "object": "pooling", "data": [0.5, -0.5]} for i in range(count)]
    return {"id": "pool-sim", "object": "list", "created": CREATED, "model": model, "data": rows, "usage": usage(5)}


def tokenized(knobs: Knobs, model: str, asked: Body) -> Body:
    tokens = list(str(asked.get("prompt", asked.get("messages"))).encode())
    return {"count": len(tokens), "max_model_len": 4096, "tokens": tokens, "token_strs": None}


def detokenized(knobs: Knobs, model: str, asked: Body) -> Body:
    return {"prompt": bytes(token % 256 for token in asked.get("tokens", [])).decode(errors="replace")}


def generated(knobs: Knobs, model: str, asked: Body, count: int | None = None) -> Body:
    count = knobs.chunks if count is None else count
    finish = {"type": "stop"} if count == knobs.chunks else None
    meta = {"id": "sim", "finish_reason": finish, "prompt_tokens": 5, "completion_tokens": count}
    return {"text": words(knobs, count), "output_ids": list(range(count)), "meta_info": meta}


def message(knobs: Knobs, model: str, asked: Body) -> Body:
    count = chunks_of(knobs, asked.get("max_tokens"))
    return {
        "id": "msg_sim",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [{"type": "text", "text": words(knobs, count)}],
        "stop_reason": "end_turn" if count == knobs.chunks else "max_tokens",
        "stop_sequence": None,
        "usage": {"input_tokens": 5, "output_tokens": count},
    }


def response(knobs: Knobs, model: str, asked: Body) -> Body:
    count = chunks_of(knobs, asked.get("max_output_tokens"))
    status = "completed" if count == knobs.chunks else "incomplete"
    content = {"type": "output_text", "text": words(knobs, count), "annotations": []}
    said = {"type": "message", "id": "msg_sim", "role": "assistant", "status": status, "content": [content]}
    counted = {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": count,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 5 + count,
    }
    return {
        "id": "resp_sim",
        "object": "response",
        "created_at": CREATED,
        "status": status,
        "incomplete_details": None if status == "completed" else {"reason": "max_output_tokens"},
        "model": model,
        "output": [said],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": counted,
    }


# --- streams


def generated_stream(knobs: Knobs, model: str, asked: Body) -> Events:
    return [*(("", generated(knobs, model, asked, i + 1)) for i in range(knobs.chunks)), ("", {})]


def message_stream(knobs: Knobs, model: str, asked: Body) -> Events:
    whole = message(knobs, model, asked)
    begun = whole | {"content": [], "stop_reason": None}
    events: Events = [
        ("message_start", {"message": begun}),
        ("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
    ]
    for i in range(whole["usage"]["output_tokens"]):
        delta = {"type": "text_delta", "text": f"{knobs.text}{i} "}
        events.append(("content_block_delta", {"index": 0, "delta": delta}))
    ended = {
        "delta": {"stop_reason": whole["stop_reason"], "stop_sequence": None},
        "usage": {"output_tokens": whole["usage"]["output_tokens"]},
    }
    events += [("content_block_stop", {"index": 0}), ("message_delta", ended), ("message_stop", {})]
    return [(name, {"type": name} | data) for name, data in events]


def response_stream(knobs: Knobs, model: str, asked: Body) -> Events:
    whole = response(knobs, model, asked)
    begun = whole | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    events: Events = [("response.created", {"response": begun})]
    place = {"item_id": "msg_sim", "output_index": 0, "content_index": 0}
    for i in range(whole["usage"]["output_tokens"]):
        events.append(("response.output_text.delta", place | {"delta": f"{knobs.text}{i} ", "logprobs": []}))
    events.append((f"response.{whole['status']}", {"response": whole}))
    return [(name, {"type": name, "sequence_number": i} | data) for i, (name, data) in enumerate(events)]


FORMS = frozenset(("/v1/audio/transcriptions", "/v1/audio/translations"))
SHAPES: dict[str, Shape] = {
    **dict.fromkeys(("/score", "/v1/score"), scored),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), reranked),
    **dict.fromkeys(("/classify", "/v1/classify"), classified),
    "/pooling": pooled,
    **dict.fromkeys(("/tokenize", "/v1/tokenize"), tokenized),
    **dict.fromkeys(("/detokenize", "/v1/detokenize"), detokenized),
    "/generate": generated,
    "/v1/messages": message,
    "/v1/messages/count_tokens": lambda knobs, model, asked: {"input_tokens": 5},
    "/v1/responses": response,
}
STREAMS: dict[str, Callable[[Knobs, str, Body], Events]] = {
    "/generate": generated_stream,
    "/v1/messages": message_stream,
    "/v1/responses": response_stream,
}
