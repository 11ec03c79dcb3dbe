"""What the distributor reads of a request body: the model, and whether internal fields are in it.

Bodies are passed, not rebuilt: msgspec skips everything else, and only where a null internal field
has to be cut out is the top level written anew, its values byte for byte. Pure.

Internal fields steer the engines' cache transfer. From a client they are an attack: a made-up
`migration_request` stops an LMDeploy decode engine for everybody (InternLM/lmdeploy#4965).
"""

from __future__ import annotations

import json
import re
from itertools import islice

import msgspec
from msgspec import UNSET, Raw, UnsetType

from app.errors import BadRequest


class _Peek(msgspec.Struct, gc=False):
    # Keys are compared after unescaping and of repeated keys the last counts, both as Python's json
    # does it in the engines: an escaped or doubled name gets nothing past this.
    model: str | UnsetType | None = UNSET
    vllm_xargs: Raw | UnsetType = UNSET
    migration_request: Raw | UnsetType = UNSET
    with_cache: Raw | UnsetType = UNSET
    preserve_cache: Raw | UnsetType = UNSET
    kv_transfer_params: Raw | UnsetType = UNSET
    ec_transfer_params: Raw | UnsetType = UNSET
    bootstrap_host: Raw | UnsetType = UNSET
    bootstrap_port: Raw | UnsetType = UNSET
    bootstrap_room: Raw | UnsetType = UNSET
    bootstrap_pair_key: Raw | UnsetType = UNSET
    disagg_prefill_dp_rank: Raw | UnsetType = UNSET
    disaggregated_params: Raw | UnsetType = UNSET
    disagg_prefill_resp: Raw | UnsetType = UNSET


SECOND_OPINION_BYTES = 2**20
"""The standard library builds every object of a body; on a large one that would stop the worker for seconds."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]").search

_NAMES = re.compile(rb'"model"[ \t\r\n]*:[ \t\r\n]*("[^"\\]*(?:\\.[^"\\]*)*")').finditer
"""Members called so, at any depth; inside of a text a quote has a backslash before it."""
NAMES_TRIED = 4
"""Each try is another look at the whole body."""

LARGE_BYTES, LONG_BYTES = 32 * 1024, 16 * 1024
"""Bodies and texts in them from which on it pays to pass over texts unread."""
BACKSLASH = 0x5C

INTERNAL = _Peek.__struct_fields__[2:]
_NOTHING = (UNSET,) * (len(INTERNAL) + 1)

_peek = msgspec.json.Decoder(_Peek).decode
_members = msgspec.json.Decoder(dict[str, Raw]).decode


def peek(
    body: bytes, *, allow_transfer_params: bool, unnamed: bool = False, nameless: bool = False
) -> tuple[str, bytes]:
    """The model that `body` names, and the body to forward.

    Args:
        unnamed: whether it may leave the model out, or have null for it; then "" is given.
        nameless: as `unnamed`, and the name may be empty too.

    Raises:
        BadRequest: no JSON object, no model, or an internal field that is not null.
    """
    if len(body) > LARGE_BYTES and (model := _model_of_large(body)):
        return model, body
    try:
        found = _peek(body)
    except msgspec.ValidationError as e:
        if str(e).endswith("`$.model`"):
            raise BadRequest("model must be a string", param="model") from e
        raise BadRequest("The request body must be a JSON object") from e
    except msgspec.DecodeError as e:
        found = _second_opinion(body, e)
    except RecursionError as e:
        raise BadRequest("The request body is nested too deeply") from e
    if not found.model and not nameless and (not unnamed or found.model == ""):
        raise BadRequest("The request does not name a model", param="model")
    if not allow_transfer_params and msgspec.structs.astuple(found)[1:] != _NOTHING:
        body = _without_internal(found, body)
    return found.model or "", body


def _model_of_large(body: bytes) -> str | None:
    """The model of a body with long texts, images most often; None: it has to be read whole.

    What stands between a quote and the next, neither escaped, is a text or what is between two texts. Cut out, the
    first leaves an empty text, and the second no JSON, for there two texts touch. So what still is JSON has the same
    fields, though nobody has looked into the texts: an engine that minds a bare line end there says so itself.
    """
    kept = []
    at, begun, size = LONG_BYTES, 0, len(body)
    while at < size:
        first, last = body.rfind(b'"', begun, at), body.find(b'"', at)
        if last < 0:
            break
        if last - first > LONG_BYTES and first >= 0 and BACKSLASH not in (body[first - 1], body[last - 1]):
            kept.append(body[begun : first + 1])
            begun = last
        at = last + LONG_BYTES
    if not kept:
        return None
    kept.append(body[begun:])
    try:
        found = _peek(b"".join(kept))
    except (msgspec.DecodeError, RecursionError):
        return None
    return (found.model or None) if msgspec.structs.astuple(found)[1:] == _NOTHING else None


def renamed(body: bytes, model: str) -> bytes:
    """A body that `peek` has taken with another model in it, all else byte for byte.

    Where the name is written so that it isn't found at once (escaped, or behind many others called "model" further
    inside) the top level is written anew, its other values byte for byte.
    """
    value = msgspec.json.encode(model)
    if _model_of(body) is UNSET:
        opened = body.index(b"{") + 1
        comma = b"" if body[opened:].lstrip()[:1] == b"}" else b","
        return b'%b"model":%b%b%b' % (body[:opened], value, comma, body[opened:])
    for found in islice(_NAMES(body), NAMES_TRIED):
        start, end = found.span(1)
        made = b"%b%b%b" % (body[:start], value, body[end:])
        if _model_of(made) == model:  # it was another one: so this is where it is read
            return made
    try:
        members = _members(body)
    except msgspec.DecodeError as e:
        raise BadRequest(f"model can't be replaced in a body that is not strict JSON: {e}", param="model") from e
    members["model"] = Raw(value)
    return msgspec.json.encode(members)


def _model_of(body: bytes) -> str | UnsetType | None:
    try:
        return _peek(body).model
    except msgspec.DecodeError as e:
        return _second_opinion(body, e).model


def _second_opinion(body: bytes, strict: msgspec.DecodeError) -> _Peek:
    """The same by the standard library, which takes lone surrogates, as the engines' own parsers do.

    Raises:
        BadRequest: it is no JSON for that one either.
    """
    if len(body) > SECOND_OPINION_BYTES or not _SURROGATE(body):
        raise BadRequest(f"The request body is not valid JSON: {strict}") from strict
    try:
        members = json.loads(body.decode(), parse_constant=_no_constant)
    except RecursionError as e:
        raise BadRequest("The request body is nested too deeply") from e
    except ValueError as e:
        raise BadRequest(f"The request body is not valid JSON: {strict}") from e
    if not isinstance(members, dict):
        raise BadRequest("The request body must be a JSON object") from strict
    model = members.get("model", UNSET)
    if not isinstance(model, str | UnsetType | None):
        raise BadRequest("model must be a string", param="model") from strict
    known = {name: members[name] for name in (*INTERNAL, "vllm_xargs") if name in members}
    return _Peek(model, **{name: Raw(json.dumps(value).encode()) for name, value in known.items()})


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def refuse(field: str) -> BadRequest:
    """The error for an internal field that came from a client."""
    return BadRequest(
        f"{field} is internal to the engines and not taken from clients "
        "(--allow-transfer-params, for a distributor behind another one)",
        param=field,
    )


def _without_internal(found: _Peek, body: bytes) -> bytes:
    null = []
    for field in INTERNAL:
        value = getattr(found, field)
        if value is not UNSET:
            if bytes(value) != b"null":
                raise refuse(field)
            null.append(field)
    # vLLM merges these into the arguments where it keeps kv_transfer_params: a second door to the same room
    # (vllm/entrypoints/openai, `to_sampling_params`).
    if found.vllm_xargs is not UNSET:
        try:
            inside = _members(found.vllm_xargs)
        except (msgspec.DecodeError, UnicodeDecodeError):
            if bytes(found.vllm_xargs).lstrip()[:1] == b"{":  # the engine's parser may see more in it
                raise BadRequest("vllm_xargs is not strict JSON", param="vllm_xargs") from None
            inside = {}  # not an object: the engine will say so
        for field in inside:
            if field in INTERNAL:
                raise refuse(f"vllm_xargs.{field}")
    if not null:
        return body
    try:
        members = _members(body)
    except msgspec.DecodeError as e:
        raise BadRequest(f"{null[0]} can't be cut out of a body that is not strict JSON: {e}", param=null[0]) from e
    for field in null:
        del members[field]
    return msgspec.json.encode(members)
