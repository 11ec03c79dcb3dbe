"""Which roles work together in a deployment, and which mixtures can't.

    combined   Hybrid or Decode nodes do prefill and decode; Encode nodes may stand before them
    split      Prefill and Decode nodes share the work; Encode nodes may stand before them

A node of the other kind would be registered and never used, or be asked for half of a hand-over:
refused at start or registration, with the reason. Only a plain `serve`, which names no arrangement, takes
a Prefill node as LMDeploy's proxy does: it stands in the registry and serves nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.discovery.sources import DnsSource
from app.dispatch.consumers import Consumers
from app.errors import BadRequest, ConfigurationError
from app.nodes import Role
from app.settings import Settings, flag_of

FOR_ENCODERS = ("nixl", "mooncake")
"""Hand-overs of engines that take what encoders made: vLLM's."""


USED_BY: dict[str, tuple[str, ...]] = {
    "pd_protocol": ("lmdeploy", "nixl", "mooncake", "sglang"),
    "prefill_fallback": ("lmdeploy", "nixl", "mooncake", "sglang"),
    "prefill_timeout_s": ("lmdeploy", "nixl", "mooncake", "sglang"),
    "dummy_prefill": ("lmdeploy",),
    "migration_protocol": ("lmdeploy",),
    "link_type": ("lmdeploy",),
    "disable_gdr": ("lmdeploy",),
    "link_timeout_s": ("lmdeploy",),
    "link_tries": ("lmdeploy",),
    "gc_age_s": ("lmdeploy",),
    "handover_lease_s": ("nixl",),
    "bootstrap_port": ("mooncake", "sglang"),
    "pd_missing_params": ("lmdeploy", "nixl"),
}
"""Settings of separate prefill and decode, and the hand-overs that look at them."""


@dataclass(frozen=True, slots=True)
class Topology:
    """`protocol`: how a split deployment hands the KV cache over."""

    split: bool
    protocol: str
    expects_encoders: bool
    dummy_prefill: bool = False
    fallback: bool = False  # a node that decodes, or does all, serves where no prefill node can
    named: bool = True  # by flags, so that a node of the other kind is a mistake

    @classmethod
    def of(cls, settings: Settings) -> Topology:
        """Raises ConfigurationError for settings that contradict each other."""
        prefill = settings.prefill_servers_urls
        distserve = settings.serving_strategy == "DistServe"
        if distserve and settings.prefill_disabled:
            raise ConfigurationError(
                "--prefill-servers-urls: disable means that prefill and decode run together, "
                "and --serving-strategy DistServe that they don't"
            )
        split = distserve or bool(prefill and not settings.prefill_disabled)
        if split and settings.ec_consumer_zmq_addrs:
            raise ConfigurationError(
                "--ec-consumer-zmq-addrs: pushed embeddings work only where prefill and decode run together"
            )
        if split and settings.nodes and not settings.prefill_fallback:
            raise ConfigurationError(
                "--nodes are Hybrid nodes, which can't be used beside separate prefill and decode "
                "but with --prefill-fallback"
            )
        static = [
            *settings.nodes,
            *settings.encode_servers_urls,
            *(() if settings.prefill_disabled else prefill),
            *settings.decode_servers_urls,
        ]
        twice = next((url for url in static if static.count(url) > 1), None)
        if twice is not None:
            raise ConfigurationError(f"{twice} is named twice; a node has one role")
        Consumers(settings.decode_servers_urls, settings.ec_consumer_zmq_addrs, settings.ec_consumer_dp_size)
        vllm = bool(settings.encode_servers_urls or prefill)
        named = split or vllm or bool(settings.decode_servers_urls)
        protocol = settings.pd_protocol if settings.pd_protocol != "auto" else "nixl" if vllm else "lmdeploy"
        if split and settings.encode_servers_urls and protocol not in FOR_ENCODERS:
            raise ConfigurationError(
                f"--pd-protocol {protocol} can't be used with --encode-servers-urls, which names vLLM's nodes; "
                "they hand the KV cache over by nixl or mooncake"
            )
        dummy = split and settings.dummy_prefill
        if dummy and protocol != "lmdeploy":
            raise ConfigurationError(
                f"--dummy-prefill can't be used with --pd-protocol {protocol}; it is for --pd-protocol lmdeploy"
            )
        topology = cls(
            split,
            protocol,
            bool(settings.encode_servers_urls),
            dummy_prefill=dummy,
            fallback=split and settings.prefill_fallback,
            named=named,
        )
        for source in settings.sources:
            if isinstance(source, DnsSource):
                try:
                    topology.check(source.role)
                except BadRequest as e:
                    raise ConfigurationError(f"--discover: {source.name}: ?role={source.role.name}: {e.message}") from e
        return topology

    def check(self, role: Role, *, field: str = "status.role") -> None:
        """Raises BadRequest for a role that this deployment can't use."""
        if self.split and role is Role.Hybrid and not self.fallback:
            raise BadRequest(
                "A Hybrid node can't be used while prefill and decode are separate (--serving-strategy DistServe); "
                f"allowed are Prefill, Decode{', Encode' if self.protocol in FOR_ENCODERS else ''}",
                param=field,
            )
        if self.split and role is Role.Encode and self.protocol not in FOR_ENCODERS:
            raise BadRequest(
                f"An Encode node can't be used with --pd-protocol {self.protocol}; allowed are Prefill, Decode",
                param=field,
            )
        if not self.split and self.named and role is Role.Prefill:
            raise BadRequest(
                "A Prefill node can't be used while every node does prefill and decode (--serving-strategy Hybrid); "
                "allowed are Hybrid, Decode, Encode",
                param=field,
            )

    def uses(self, role: Role) -> bool:
        """Whether a node of the role ever gets a request here."""
        if not self.split:
            return role is not Role.Prefill
        unused = {Role.Hybrid} if not self.fallback else set()
        return role not in (unused if self.protocol in FOR_ENCODERS else unused | {Role.Encode})

    def without_effect(self, settings: Settings) -> str | None:
        """A line that names the settings that were given and change nothing, None where there are none.

        No refusal: `lmdeploy serve proxy` takes its flags in any combination, and so do the scripts that call it.
        """
        given = [name for name in USED_BY if name in settings.model_fields_set]
        given = [name for name in given if getattr(settings, name) not in (False, "auto")]
        idle = [flag_of(name) for name in given if not self.split or self.protocol not in USED_BY[name]]
        if not idle:
            return None
        words = f"{', '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect"
        if self.split:
            return f"{words} with --pd-protocol {self.protocol}"
        return f"{words} without --serving-strategy DistServe or --prefill-servers-urls"

    @property
    def alone(self) -> tuple[Role, ...]:
        """Who gets a request that is neither split nor encoded (embeddings, scores, forms, ...)."""
        return (Role.Decode,) if self.split else (Role.Hybrid, Role.Decode)

    @property
    def needed(self) -> tuple[tuple[Role, ...], ...]:
        """What has to be ready to serve: one role of each group."""
        answering: tuple[tuple[Role, ...], ...] = ((Role.Prefill,), (Role.Decode,))
        if not self.split or self.fallback:
            answering = ((Role.Hybrid, Role.Decode),)
        elif self.dummy_prefill:
            answering = ((Role.Decode,),)
        return (*answering, (Role.Encode,)) if self.expects_encoders else answering
