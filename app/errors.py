"""The error tree, and the one function that turns an error into an HTTP answer.

Owns the words, statuses and codes that a client reads. It must not know Starlette, aiohttp or Redis:
foreign exceptions are mapped to these at the edge of `store` and `upstream`, with the cause kept.

Every answer body is an OpenAI error object with LMDeploy's `error_code` and `text` beside it where
LMDeploy has a code for the case, so that both kinds of client understand it.
"""

from __future__ import annotations

import json
from enum import IntEnum

Headers = list[tuple[bytes, bytes]]


class LmdeployCode(IntEnum):
    """`error_code` values of LMDeploy's proxy (source: lmdeploy/serve/proxy/utils.py)."""

    MODEL_NOT_FOUND = 10400
    SERVICE_UNAVAILABLE = 10401
    TIMEOUT = 10402


class EvenhandError(Exception):
    """Base of all errors that this project raises on purpose.

    Args:
        message: one sentence for the person who reads the answer; never holds a key or a body.
        param: name of the offending request field, if there is one.
    `retry_after_s` is what `Retry-After` says: whole seconds, at most 60.
    """

    status = 500
    type = "server_error"
    code: str | None = "internal_error"
    lmdeploy_code: LmdeployCode | None = None
    retry_after_s: int | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigurationError(EvenhandError):
    """A setting is missing or wrong; raised before anything is served."""

    @property
    def lines(self) -> list[str]:
        """What to print, a line for each fault."""
        return [self.message]


# --- ours: the request or the deployment's state -------------------------------------------------


class BadRequest(EvenhandError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class Unauthorized(EvenhandError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(EvenhandError):
    status = 403
    type = "permission_error"
    code = "admin_key_required"


class NotFound(EvenhandError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(EvenhandError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class NotServed(EvenhandError):
    """A route that engines have, and that has no meaning in front of many of them."""

    status = 501
    type = "invalid_request_error"
    code = "not_supported"


class ModelNotFound(EvenhandError):
    status = 404
    type = "invalid_request_error"
    code = "model_not_found"
    lmdeploy_code = LmdeployCode.MODEL_NOT_FOUND


class BodyTooLarge(EvenhandError):
    status = 413
    type = "invalid_request_error"
    code = "body_too_large"


RETRY_AFTER_DOWN_S = 2
"""An engine that restarts is back after two probes. The `openai` SDK asks three times in all: this way the
third comes after four seconds, not after one and a half."""


class NoNodeAvailable(EvenhandError):
    """No node at all, or none alive for a known model."""

    status = 503
    code = "no_node_available"
    lmdeploy_code = LmdeployCode.SERVICE_UNAVAILABLE
    retry_after_s = RETRY_AFTER_DOWN_S


class TooManyViewers(EvenhandError):
    """As many watch this worker as may."""

    status = 503
    code = "too_many_viewers"
    retry_after_s = 5


class ShuttingDown(EvenhandError):
    status = 503
    code = "shutting_down"
    lmdeploy_code = LmdeployCode.SERVICE_UNAVAILABLE
    retry_after_s = 1


# --- theirs: the engine ---------------------------------------------------------------------------


class UpstreamError(EvenhandError):
    """An engine could not be reached, was too slow, or broke off its answer."""

    status = 502
    code = "engine_unreachable"
    lmdeploy_code = LmdeployCode.TIMEOUT


class EngineUnreachable(UpstreamError):
    """No connection: DNS, TLS, unreachable, reset while connecting."""

    retry_after_s = RETRY_AFTER_DOWN_S


class EngineRefused(EngineUnreachable):
    """The engine's host answered that nobody listens: proof, not suspicion."""


class EngineBroke(UpstreamError):
    """The connection ended, or the answer was no valid HTTP, before the answer was complete."""

    code = "engine_broke_off"


class EngineProtocolError(UpstreamError):
    """The engine answered whole, but not what its protocol says: asking another time is no use."""

    code = "engine_protocol_error"


class EngineAnswered(UpstreamError):
    """The engine answered a call of ours with a status that is no use. `answered`: that status."""

    def __init__(self, message: str, *, answered: int) -> None:
        super().__init__(message)
        self.answered = answered

    @property
    def lacking(self) -> bool:
        """Whether it has no such route: asking another time is no use."""
        return self.answered in (404, 405, 501)


class EngineTimeout(UpstreamError):
    """The engine was too slow. `stage` is connect, first_byte, idle or total."""

    status = 504
    code = "engine_timeout"

    def __init__(self, message: str, *, stage: str) -> None:
        super().__init__(message)
        self.stage = stage


# --- Redis ----------------------------------------------------------------------------------------


class StoreUnavailable(EvenhandError):
    """Redis did not answer in time, refused, or lost what the call needs."""

    status = 503
    code = "store_unavailable"
    lmdeploy_code = LmdeployCode.SERVICE_UNAVAILABLE
    retry_after_s = 1


def error_object(error: EvenhandError) -> dict[str, object]:
    """The JSON object for `error`: `{"error": {message, type, param, code}[, error_code, text]}`."""
    body: dict[str, object] = {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }
    if error.lmdeploy_code is not None:
        body["error_code"] = int(error.lmdeploy_code)
        body["text"] = error.message
    return body


def error_answer(error: EvenhandError) -> tuple[int, Headers, bytes]:
    """(status, headers, body) for `error`. The only place that writes an error answer."""
    body = json.dumps(error_object(error), ensure_ascii=False).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % error.retry_after_s))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    return error.status, headers, body


def error_event(error: EvenhandError) -> bytes:
    """One SSE event that tells a client, in mid-stream, that the answer is not complete."""
    return b"data: " + json.dumps(error_object(error), ensure_ascii=False).encode() + b"\n\n"


def message_error_event(error: EvenhandError) -> bytes:
    """The same where clients go by the names of events, and pass over one without.

    Source: Anthropic's API reference, streaming messages, "Error events".
    """
    named = {"type": "error", "error": {"type": "api_error", "message": error.message}}
    return b"event: error\ndata: " + json.dumps(named, ensure_ascii=False).encode() + b"\n\n"
