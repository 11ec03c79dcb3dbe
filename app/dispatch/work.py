"""How much work a request was for its engine, in tokens that are generated one by one. Pure.

It makes samples of a node's speed comparable: an answer of 2,000 tokens that took a minute is no sign of a slow node.
Nobody is asked for it and nothing is decoded: events of a stream are counted as they pass, and of any other answer the
number of its tokens stands near its end. Where neither is there, bytes have to do.
"""

from __future__ import annotations

import re

PROMPT_BYTES = 512
"""Of a request's body that cost an engine as much as a token of the answer: about 128 tokens of a prompt, which are
read together, at about 100 times the rate. Measured: docs/balancing.md."""
TOKEN_BYTES = 4
"""Of text, as OpenAI's help pages say of English."""
USAGE_BYTES = 1024
"""From the end of an answer: its usage is behind all its text (vLLM, SGLang, LMDeploy)."""
EVENT = b"data:"
"""How an event of a stream begins; engines send one a token, or each the same few."""

_completion_tokens = re.compile(rb'"completion_tokens"\s*:\s*(\d{1,9})').search


def work_of(request_bytes: int, tokens: float) -> float:
    """Of a request with a body of so many bytes and so many tokens in its answer; at least one token."""
    return request_bytes / PROMPT_BYTES + max(tokens, 1.0)


def tokens_of(body: bytes, size: int) -> float:
    """Of an answer that is no stream. `body`: all of it, or its end; `size`: bytes of all of it."""
    found = _completion_tokens(body[-USAGE_BYTES:])
    return float(found[1]) if found else size / TOKEN_BYTES
