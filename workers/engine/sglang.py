"""A simulated SGLang engine of prefill/decode disaggregation: both legs get the same body and meet in a room.

Prefill begins when decode has come to the room, decode speaks when prefill has ended; where the other never comes,
each hangs until its request is aborted. The bootstrap port is a number only: none but decode engines ever use it.

Source: SGLang's mini_lb; `meta_info` is of its native answers, and here of all that ask for return_logprob.
"""

from __future__ import annotations

from typing import Any

from workers.engine import pd_rules as rules
from workers.engine.answers import Answer, Gate
from workers.engine.http import Record
from workers.engine.pd import Admitted, Fabric, PdEngine
from workers.engine.pd_answers import PdKnobs
from workers.engine.pd_rules import Body, Leg, Protocol
from workers.engine.rules import need

BOOTSTRAP_PORT = 8998


class SglangEngine(PdEngine):
    """
    Args:
        bootstrap_port: of a prefill engine; one of a test's several needs its own.
    """

    protocol: Protocol = "sglang"

    def __init__(
        self,
        leg: Leg,
        fabric: Fabric,
        knobs: PdKnobs | None = None,
        *,
        bootstrap_port: int = BOOTSTRAP_PORT,
        **more: Any,
    ) -> None:
        super().__init__(leg, fabric, knobs, **more)
        self.bootstrap_port = bootstrap_port
        if leg == "prefill":
            fabric.bootstraps[self.host, bootstrap_port] = self

    def admit(
        self, record: Record, path: str, body: Body, headers: dict[str, str], *, dry: bool
    ) -> Admitted | Answer | None:
        if self.leg == "decode" and not any(name in body for name in rules.BOOTSTRAP):
            # SGLang's decode engine refuses it; a distributor whose --prefill-fallback came here is seen by this.
            need(False, "no bootstrap room: a decode engine can't compute a prompt")
        rooms = rules.check_rooms(path, body)
        for host, port, _ in rooms:
            engine = self.fabric.bootstraps.get((host, port))
            need(engine is not None, f"no prefill engine bootstraps at {host}:{port}")
            need(self.leg == "decode" or engine is self, f"{host}:{port} is {engine}, not this engine")
        if dry:
            return None
        return self._meet(record, body, [str(room) for _, _, room in rooms])

    def _meet(self, record: Record, body: Body, rooms: list[str]) -> Admitted:
        same = {name: value for name, value in body.items() if name not in rules.RANKS}
        for room in rooms:
            self.fabric.check(self.leg, room, record, same)
        meetings = [self.fabric.join(self, room, record, same) for room in rooms]

        def part() -> None:
            for room in rooms:
                self.fabric.part(self.leg, room)

        def computed() -> None:
            if not self.pd.finish:
                for meeting in meetings:
                    meeting.computed.open()

        more = self._meta(body)
        if self.leg == "prefill":
            gate = all_open([meeting.decode_came for meeting in meetings])
            return Admitted(self.usage(), gate=gate, more=more, proper_end=computed, any_end=part)
        gate = all_open([meeting.computed for meeting in meetings])
        return Admitted(self.usage(cached=0), gate=gate, more=more, any_end=part)

    def _meta(self, body: Body) -> Body:
        """Log probabilities of the prompt: all tokens are prefill's, decode knows of none, or of its last."""
        if not body.get("return_logprob"):
            return {}
        numbers = range(3) if self.leg == "prefill" else range(3, 4)
        meta: Body = {"input_token_logprobs": [[-0.5 * i, 100 + i, None] for i in numbers]}
        if body.get("top_logprobs_num"):
            meta["input_top_logprobs"] = [[[-0.25 * i, 200 + i, None]] for i in numbers]
        return {"meta_info": meta | {"id": f"{self.leg}-meta"}}


def all_open(gates: list[Gate]) -> Gate:
    """Open when all of them are."""
    whole = Gate()

    def look() -> None:
        if all(gate.is_open for gate in gates):
            whole.open()

    for gate in gates:
        gate.when_open(look)
    return whole
