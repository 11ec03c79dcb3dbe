"""vLLM's NIXL connector, pull: prefill says where the cache lies, decode fetches it.

Prefill's `kv_transfer_params` go on as they are. Prefill keeps the blocks for a lease of its own (30 s) and
frees them by itself where nobody comes, so nothing has to be freed from here, and nothing older is passed on.

Source: tests/v1/kv_connector/nixl_integration/toy_proxy_server.py in vLLM.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from msgspec import Raw

from app.dispatch.caller import Caller
from app.dispatch.handover.bodies import Members, Prefilled, for_prefill, with_values
from app.dispatch.handover.protocol import CHAT, COMPLETIONS, RESPONSES, Handed, Sequential
from app.dispatch.pair import Pair
from app.store.handovers import Handovers

ASK_FOR_PARAMS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Nixl(Sequential):
    """The protocol; one per worker.

    Args:
        lease_s: how long prefill keeps the blocks (vLLM's kv_lease_duration).
        recompute: whether decode computes the prompt itself where prefill named no place.
    """

    paths = frozenset((CHAT, COMPLETIONS, RESPONSES))

    def __init__(self, *, caller: Caller, figures: Handovers, lease_s: float, recompute: bool) -> None:
        super().__init__(caller=caller, figures=figures)
        self._lease_s = lease_s
        self._recompute = recompute

    def prefill_body(self, members: Members, path: bytes) -> bytes:
        return for_prefill(members, {"kv_transfer_params": ASK_FOR_PARAMS}, limits=limits_of(path))

    def hand(self, pair: Pair, life: int, members: Members, prefilled: Prefilled) -> Handed:
        params = prefilled.members.get("kv_transfer_params")
        if params is None or not _names_a_place(params):
            self.handed_nothing(pair.prefill.url, "usable kv_transfer_params", fatal=not self._recompute)
            return Handed(prefilled, with_values(members, {}))
        body = with_values(members | {"kv_transfer_params": params}, {})
        return _Leased(prefilled, body, self.figures, valid_until_s=time.monotonic() + self._lease_s)


class _Place(msgspec.Struct):
    """What decode needs; what stands beside it differs by version.

    Source: vLLM, NixlConnector's scheduler, `request_finished` (prefill) and `update_state_after_alloc` (decode). No
    blocks at all is an answer too: older versions give none for a prompt that is shorter than a block.
    """

    do_remote_prefill: bool
    remote_engine_id: str
    remote_block_ids: list[Any]
    remote_host: str
    remote_port: int


def _names_a_place(params: Raw) -> bool:
    try:
        return msgspec.json.decode(params, type=_Place).do_remote_prefill
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


class _Leased(Handed):
    """Blocks that prefill frees by itself; how many had to wait for that is counted."""

    def __init__(self, prefilled: Prefilled, body: bytes, figures: Handovers, *, valid_until_s: float) -> None:
        super().__init__(prefilled, body, valid_until_s=valid_until_s)
        self._figures = figures

    def _give_up(self) -> None:
        self._figures.count("sessions_lost")


def limits_of(path: bytes) -> tuple[str, ...]:
    """The token limits that prefill gets on a path, whatever the client gave."""
    return ("max_output_tokens",) if path == RESPONSES else ("max_tokens",)
