"""A simulated vLLM engine with the Mooncake connector: both legs run at once and meet by a transfer id.

A prefill engine has a bootstrap server on a port of its own that tells the engine id of each data-parallel rank; the
ids are new after a restart. Decode says nothing before prefill has computed, for ever if prefill never comes.
What prefill computed is kept until decode has come for it or the lease has ended.

Source: vLLM, MooncakeConnector, its bootstrap server and its example proxy.
"""

from __future__ import annotations

from typing import Any

from workers.engine import answers
from workers.engine import pd_rules as rules
from workers.engine.answers import Answer, Knobs
from workers.engine.http import Record
from workers.engine.pd import Admitted, Fabric, Kept, PdEngine
from workers.engine.pd_answers import PdKnobs
from workers.engine.pd_rules import Body, Leg, Protocol
from workers.engine.rules import need
from workers.engine.server import Engine


class Bootstrap(Engine):
    """`GET /query`: {rank: {engine_id, worker_addr}}."""

    def __init__(self, owner: MooncakeEngine, **more: Any) -> None:
        super().__init__(Knobs(), **more)
        self.owner = owner

    def answer(self, record: Record) -> Answer:
        if record.method != "GET" or record.path != "/query":
            self.owner.violations.append(f"bootstrap server: {record.method} {record.path}")
            return answers.error(404, f"{record.method} {record.path} is not known here.", "not_found")
        if self.knobs.status != 200:
            return answers.scripted(self.knobs)
        ranks = {
            str(rank): {"engine_id": engine_id, "worker_addr": {"0": {"0": f"tcp://{self.host}:{50000 + rank}"}}}
            for rank, engine_id in enumerate(self.owner.engine_ids)
        }
        return answers.json_answer(200, ranks, first_s=self.knobs.ttft_s)


class MooncakeEngine(PdEngine):
    """Beside the rest, `stale`: request ids of decode requests that named an engine id from before a restart.

    Args:
        bootstrap_port: of a prefill engine's bootstrap server; 0: any free one.
    """

    protocol: Protocol = "mooncake"

    def __init__(
        self, leg: Leg, fabric: Fabric, knobs: PdKnobs | None = None, *, bootstrap_port: int = 0, **more: Any
    ) -> None:
        super().__init__(leg, fabric, knobs, **more)
        self.stale: list[str] = []
        self.bootstrap: Bootstrap | None = None
        if leg == "prefill":
            self.bootstrap = Bootstrap(self, host=self.host, port=bootstrap_port)
            fabric.bootstraps[self.host, self.bootstrap.port] = self

    # --- life

    async def start(self) -> None:
        if self.bootstrap is not None:
            await self.bootstrap.start()
        await super().start()

    async def crash(self) -> None:
        if self.bootstrap is not None:
            await self.bootstrap.crash()
        await super().crash()

    async def close(self) -> None:
        await super().close()
        if self.bootstrap is not None:
            await self.bootstrap.close()

    # --- requests

    def admit(
        self, record: Record, path: str, body: Body, headers: dict[str, str], *, dry: bool
    ) -> Admitted | Answer | None:
        if self.leg == "prefill":
            key, rank = rules.check_mooncake_prefill(body, headers, self.pd.ranks)
            return None if dry else self._prefill(record, key, rank, body)
        if body.get("kv_transfer_params") is None:
            need("kv_transfer_params" not in body, "kv_transfer_params: null")
            if not dry:
                self.recomputed.append((record.id, "no kv_transfer_params"))
            return None if dry else Admitted(self.usage(cached=0))
        return self._decode(record, body, dry=dry)

    def _prefill(self, record: Record, key: str, rank: int, body: Body) -> Admitted:
        prompt = rules.prompt_of(body)
        self.fabric.check("prefill", key, record, prompt)
        meeting = self.fabric.join(self, key, record, prompt)
        meeting.at, meeting.rank = self, rank

        def computed() -> None:
            if self.pd.finish:
                return
            if meeting.decode is None:
                self.keep(Kept(key, record, prompt))
            else:
                self.fetched[key] = self.fabric.met["decode", key]
            meeting.computed.open()

        return Admitted(self.usage(), proper_end=computed, any_end=lambda: self.fabric.part("prefill", key))

    def _decode(self, record: Record, body: Body, *, dry: bool) -> Admitted | Answer | None:
        key, address, engine_id = rules.check_mooncake_decode(body)
        host, _, port = address.removeprefix("http://").rpartition(":")
        engine = self.fabric.bootstraps.get((host, int(port)))
        need(engine is not None, f"no bootstrap server at {address}")
        assert engine is not None
        if engine_id not in engine.engine_ids:
            need(engine_id in self.fabric.former, f"no engine {engine_id} at {address}")
            self.stale.append(record.id)
            message = f"engine id {engine_id} is of before a restart"
            return answers.error(self.pd.stale_status, message, "stale_engine_id")
        prompt = rules.prompt_of(body)
        self._check(engine, key, engine_id, record, prompt)
        if dry:
            return None
        meeting = self.fabric.join(self, key, record, prompt)
        if key in engine.kept:
            engine.fetch(key, self)
            meeting.computed.open()
        usage = self.usage(cached=self.pd.prompt_tokens)
        return Admitted(usage, gate=meeting.computed, any_end=lambda: self.fabric.part("decode", key))

    def _check(self, engine: PdEngine, key: str, engine_id: str, record: Record, prompt: Body) -> None:
        """Against what prefill has computed, or the leg that runs there."""
        need(key not in engine.expired, f"what {key} had computed is older than the lease")
        self.fabric.check("decode", key, record, prompt)
        kept, meeting = engine.kept.get(key), self.fabric.meetings.get(key)
        if kept is not None:
            need(record.id == kept.record.id, f"x-request-id {record.id}, on prefill it was {kept.record.id}")
            need(prompt == kept.prompt, "another prompt than prefill's")
        if meeting is not None:
            rank = meeting.rank or 0
            need(meeting.at is engine, f"prefill is at {meeting.at}, not at {engine}")
            need(engine.engine_ids[rank] == engine_id, f"prefill is at rank {rank}, not {engine_id}")
