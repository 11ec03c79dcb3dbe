"""How much work an answer was, from what passes of it; and that it comes to the node's ticket."""

from __future__ import annotations

import pytest

from app.dispatch.work import tokens_of, work_of


@pytest.mark.parametrize(
    ("request_bytes", "tokens", "work"),
    [(0, 40, 40), (512, 40, 41), (51_200, 40, 140), (51_200, 1, 101), (0, 0, 1), (256, 0.25, 1.5)],
)
def test_a_token_of_the_answer_is_512_bytes_of_the_prompt(request_bytes: int, tokens: float, work: float) -> None:
    assert work_of(request_bytes, tokens) == work


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":150,"total_tokens":157}}', 150),
        (b'{"usage": {"completion_tokens" : 3}, "kv_transfer_params": null}', 3),
        (b'{"data":[0.1,0.2]}', 18 / 4),  # no usage: by size
        (b'{"usage":{"completion_tokens":null}}', 36 / 4),
        (b'"completion_tokens":9' + b" " * 2000, 2021 / 4),  # said far from the end: not the usage
        (b"", 0),
    ],
)
def test_the_tokens_of_an_answer(body: bytes, tokens: float) -> None:
    assert tokens_of(body, len(body)) == tokens


def test_of_a_long_answer_its_end_is_enough() -> None:
    assert tokens_of(b'"usage":{"completion_tokens":12}}', 10**6) == 12
    assert tokens_of(b"no usage", 10**6) == 250_000
