"""Which paths go to an engine, which of them may leave their model out, and which are not served and why.

Owns the table only (docs/endpoints.md shows it). It must not know how a request is read or sent.

Source: the routes of vLLM (vllm/entrypoints, docs/serving/online_serving), SGLang
(srt/entrypoints/http_server.py) and LMDeploy (serve/openai/endpoints), as of autumn 2026.
"""

from __future__ import annotations

BESIDE_V1: dict[str, str] = {
    "/generate": "SGLang, LMDeploy, vLLM's demo server",
    "/inference/v1/generate": "vLLM",
    "/generative_scoring": "vLLM",
    "/encode": "SGLang",
    "/classify": "vLLM, SGLang",
    "/pooling": "vLLM, LMDeploy",
    "/score": "vLLM",
    "/rerank": "vLLM",
    "/v2/rerank": "vLLM",
    "/v2/embed": "vLLM",
    "/tokenize": "vLLM, SGLang",
    "/detokenize": "vLLM, SGLang",
    "/get_ppl": "LMDeploy",
}
"""The paths outside /v1 that are forwarded, and the engines that have them. Nothing else is: beside these, engines
have routes there that stop them or change their weights."""

UNNAMED = frozenset(
    (
        *BESIDE_V1,
        "/v1/classify",
        "/v1/encode",
        "/v1/tokenize",
        "/v1/detokenize",
        "/v1/score",
        "/v1/rerank",
    )
)
"""Where an engine with one model needs no name. In OpenAI's own calls a model stays required, as it is there."""

OF_ONE_ENGINE = {
    "/v1/load_lora_adapter": "It would change one engine of many; call the engines themselves.",
    "/v1/unload_lora_adapter": "It would change one engine of many; call the engines themselves.",
}
RESPONSES = "/v1/responses/"
WITHOUT_STATE = frozenset((RESPONSES + "input_tokens", RESPONSES + "compact"))
"""Below /v1/responses, and no id of a response (OpenAI API reference)."""


_MOST = frozenset(("/v1/chat/completions", "/v1/completions"))


def is_proxied(path: str) -> bool:
    """Whether a POST to the (decoded) path goes to an engine."""
    if path in _MOST:
        return True
    if not path.startswith("/v1/"):
        return path in BESIDE_V1
    if path.startswith(("/v1/models", "/v1/responses/", "/v1/load_lora", "/v1/unload_lora")):
        return not _is_ours(path.rstrip("/"))
    return path != "/v1/"


def _is_ours(bare: str) -> bool:
    if bare.startswith(RESPONSES):
        return bare not in WITHOUT_STATE
    return bare == "/v1/models" or bare.startswith("/v1/models/") or bare in OF_ONE_ENGINE
