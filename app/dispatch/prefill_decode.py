"""Prefill and decode on two nodes, the KV cache handed over as vLLM's NIXL connector pulls it.

The prefill node gets the request with one token to make, and names in `kv_transfer_params` where the
cache lies; the decode node gets the client's request with that object in it. One after the other.

Source: the NIXL toy proxy and the encoder-disaggregation proxy in vLLM; docs/epd.md shows the bodies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from app.dispatch.answer import Answer, EngineRequest
from app.dispatch.caller import Caller
from app.dispatch.hybrid import candidates
from app.errors import EngineBroke
from app.nodes import Role
from app.store.ledger import Ledger, Ticket

PREFILL_ANSWER_LIMIT_BYTES = 64 * 2**20
ASK_FOR_PARAMS = msgspec.json.encode(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
)
NOT_FOR_PREFILL = ("stream_options", "min_tokens", "min_completion_tokens", "n", "best_of")
"""What one token without a stream can't honour, or what an engine refuses beside it."""


class _PrefillAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class PrefillDecode:
    """The use case; one per worker."""

    def __init__(self, *, ledger: Ledger, caller: Caller) -> None:
        self._ledger = ledger
        self._caller = caller

    async def open(self, request: EngineRequest) -> Answer:
        """As `Hybrid.open`; a prefill that fails is the answer, and decode is not called."""
        return await (await self.take(request.model)).send(request)

    async def take(self, model: str, *, only: str | None = None) -> HeldPair:
        decode = await self._ledger.acquire(candidates(model, Role.Decode, only=only))
        try:
            prefill = await self._ledger.acquire(candidates(model, Role.Prefill))
        except BaseException:
            decode.release(succeeded=False)
            raise
        return HeldPair(prefill, decode, self._caller)


@dataclass(frozen=True, slots=True)
class HeldPair:
    """The two nodes of one request, each counted."""

    prefill: Ticket
    decode: Ticket
    caller: Caller

    @property
    def url(self) -> str:
        return self.decode.url

    async def send(self, request: EngineRequest) -> Answer:
        try:
            prefilled = await self._prefill(request)
            if isinstance(prefilled, Answer):
                self.give_back()
                return prefilled
            response = await self.caller.send(self.decode.url, replace(request, body=prefilled))
        except BaseException:
            self.give_back()
            raise
        return Answer(response, self.decode.url, (self.decode,))

    async def _prefill(self, request: EngineRequest) -> Answer | bytes:
        """The body for decode; or the prefill node's own failure, as the client gets it."""
        url, succeeded = self.prefill.url, False
        try:
            whole = await self.caller.fetch(
                url, replace(request, body=for_prefill(request.body)), limit_bytes=PREFILL_ANSWER_LIMIT_BYTES
            )
            if whole.status >= 400:
                return Answer(whole, url, ())
            try:
                params = msgspec.json.decode(whole.body, type=_PrefillAnswer).kv_transfer_params
            except (msgspec.DecodeError, RecursionError) as e:
                raise EngineBroke(f"engine {url} broke off: its prefill answer is no JSON object") from e
            succeeded = True
            return for_decode(request.body, params)
        finally:
            self.prefill.release(succeeded=succeeded)

    def give_back(self) -> None:
        self.prefill.release(succeeded=False)
        self.decode.release(succeeded=False)


def for_prefill(body: bytes) -> bytes:
    """The request with one token to make, asking where the cache will lie."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    for name in NOT_FOR_PREFILL:
        fields.pop(name, None)
    one, no = msgspec.Raw(b"1"), msgspec.Raw(b"false")
    fields |= {"stream": no, "max_tokens": one, "kv_transfer_params": msgspec.Raw(ASK_FOR_PARAMS)}
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = one
    return msgspec.json.encode(fields)


def for_decode(body: bytes, params: msgspec.Raw) -> bytes:
    """The client's request with the place of the cache; without one decode computes it again."""
    if bytes(params).translate(None, b" \t\r\n") in (b"null", b"{}"):
        return body
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode(fields | {"kv_transfer_params": params})
