"""A simulated vLLM engine with the NIXL connector, pull: prefill names its blocks, decode fetches them, once.

Blocks are kept from the end of prefill's answer until decode has fetched them or the lease has ended; a request
that is aborted before that keeps none. A decode engine answers as vLLM does after a transfer: all prompt tokens
count as cached. Without the object, or with one of an engine that restarted since, it computes the prompt again.

Source: vLLM, NixlConnector's request_finished and its toy proxy.
"""

from __future__ import annotations

import itertools

from workers.engine import pd_rules as rules
from workers.engine.answers import Answer
from workers.engine.http import Record
from workers.engine.pd import Admitted, Kept, PdEngine
from workers.engine.pd_rules import Body, Protocol
from workers.engine.rules import need

PORT = 5600  # vLLM's default side channel
BLOCK_TOKENS = 16

_numbers = itertools.count(1)


class NixlEngine(PdEngine):
    protocol: Protocol = "nixl"

    def admit(
        self, record: Record, path: str, body: Body, headers: dict[str, str], *, dry: bool
    ) -> Admitted | Answer | None:
        if self.leg == "prefill":
            need(body.get("kv_transfer_params") == rules.NIXL_WANTED, f"params {body.get('kv_transfer_params')}")
            return None if dry else self._prefill(record, body)
        return self._decode(record, body, dry=dry)

    def _prefill(self, record: Record, body: Body) -> Admitted:
        if not self.pd.with_params or self.pd.finish:
            return Admitted(self.usage(), more={"kv_transfer_params": None})
        key = f"cmpl-{record.id}-{next(_numbers)}"
        blocks = -(-self.pd.prompt_tokens // BLOCK_TOKENS)
        params: Body = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[next(_numbers) for _ in range(blocks)]],
            "remote_engine_id": self.engine_ids[0],
            "remote_request_id": key,
            "remote_host": self.host,
            "remote_port": PORT,
            "tp_size": 1,
        }
        kept = Kept(key, record, rules.prompt_of(body), params)
        return Admitted(self.usage(), more={"kv_transfer_params": params}, proper_end=lambda: self.keep(kept))

    def _decode(self, record: Record, body: Body, *, dry: bool) -> Admitted | None:
        need("kv_transfer_params" not in body or body["kv_transfer_params"], "kv_transfer_params without anything")
        params = body.get("kv_transfer_params")
        if params is None:
            return self._recompute(record, "no kv_transfer_params", dry=dry)
        engine, key = self.fabric.engines.get(params["remote_engine_id"]), params["remote_request_id"]
        if engine is None:
            need(params["remote_engine_id"] in self.fabric.former, f"no such engine: {params}")
            return self._recompute(record, "the prefill engine restarted", dry=dry)
        taker = engine.fetched.get(key)
        if taker is not None and taker.forgot:
            return self._recompute(record, "fetched by an engine that crashed", dry=dry)
        need(taker is None, f"blocks of {key} were fetched before")
        need(key not in engine.expired, f"blocks of {key} are older than the lease")
        kept = engine.kept.get(key)
        need(kept is not None, f"no blocks for {key}")
        assert kept is not None
        need(params == kept.params, f"kv_transfer_params {params}, prefill gave {kept.params}")
        need(record.id == kept.record.id, f"x-request-id {record.id}, on prefill it was {kept.record.id}")
        need(rules.prompt_of(body) == kept.prompt, "another prompt than prefill's")
        if dry:
            return None
        engine.fetch(key, self)
        return Admitted(self.usage(cached=self.pd.prompt_tokens))

    def _recompute(self, record: Record, reason: str, *, dry: bool) -> Admitted | None:
        if dry:
            return None
        self.recomputed.append((record.id, reason))
        return Admitted(self.usage(cached=0))
