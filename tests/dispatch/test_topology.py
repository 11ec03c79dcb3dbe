"""Which roles work together: a table of deployments, each accepted or refused with the reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from app.dispatch.epd import Epd
from app.dispatch.handover.lmdeploy import Lmdeploy
from app.dispatch.handover.mooncake import Mooncake
from app.dispatch.handover.nixl import Nixl
from app.dispatch.handover.sglang import Sglang
from app.dispatch.hybrid import Hybrid
from app.dispatch.prefill_decode import PrefillDecode
from app.dispatch.topology import Topology
from app.errors import BadRequest, ConfigurationError
from app.main import Split, dispatcher
from app.metrics.figures import Figures
from app.nodes import Role
from app.settings import Settings
from app.store.keys import Keys
from app.store.scripts import load_scripts

E, P, D, H = ("http://e:1",), ("http://p:1",), ("http://d:1",), ("http://h:1",)
NIXL = {"serving_strategy": "DistServe", "pd_protocol": "nixl"}


def settings_of(**flags: Any) -> Settings:
    return Settings.load(flags)


ACCEPTED = [
    # name, flags, split?, protocol, encoders expected?, roles that may register, roles that /ready waits for
    ("nothing named", {}, False, "lmdeploy", False, "HDEP", [{"H", "D"}]),
    ("hybrid", {"nodes": H}, False, "lmdeploy", False, "HDEP", [{"H", "D"}]),
    ("E + hybrid", {"encode_servers_urls": E, "nodes": H}, False, "nixl", True, "HDE", [{"H", "D"}, {"E"}]),
    ("E + PD", {"encode_servers_urls": E, "decode_servers_urls": D}, False, "nixl", True, "HDE", [{"H", "D"}, {"E"}]),
    (
        "E + PD, as vLLM's example says it",
        {"encode_servers_urls": E, "prefill_servers_urls": ("disable",), "decode_servers_urls": D},
        False,
        "nixl",
        True,
        "HDE",
        [{"H", "D"}, {"E"}],
    ),
    (
        "E + PD + hybrid",
        {"encode_servers_urls": E, "prefill_servers_urls": ("NONE",), "decode_servers_urls": D, "nodes": H},
        False,
        "nixl",
        True,
        "HDE",
        [{"H", "D"}, {"E"}],
    ),
    ("E alone, the rest registers", {"encode_servers_urls": E}, False, "nixl", True, "HDE", [{"H", "D"}, {"E"}]),
    ("PD alone", {"decode_servers_urls": D}, False, "lmdeploy", False, "HDE", [{"H", "D"}]),
    (
        "E + P + D",
        {"encode_servers_urls": E, "prefill_servers_urls": P, "decode_servers_urls": D},
        True,
        "nixl",
        True,
        "PDE",
        [{"P"}, {"D"}, {"E"}],
    ),
    (
        "E + P + D, said twice",
        {
            "serving_strategy": "DistServe",
            "encode_servers_urls": E,
            "prefill_servers_urls": P,
            "decode_servers_urls": D,
        },
        True,
        "nixl",
        True,
        "PDE",
        [{"P"}, {"D"}, {"E"}],
    ),
    (
        "P + D",
        {"prefill_servers_urls": P, "decode_servers_urls": D},
        True,
        "nixl",
        False,
        "PDE",
        [{"P"}, {"D"}],
    ),
    ("P, decode registers", {"prefill_servers_urls": P}, True, "nixl", False, "PDE", [{"P"}, {"D"}]),
    ("all register, NIXL", NIXL, True, "nixl", False, "PDE", [{"P"}, {"D"}]),
    ("E, P and D register", {**NIXL, "encode_servers_urls": E}, True, "nixl", True, "PDE", [{"P"}, {"D"}, {"E"}]),
    (
        "LMDeploy's own DistServe, said",
        {"serving_strategy": "DistServe", "pd_protocol": "lmdeploy"},
        True,
        "lmdeploy",
        False,
        "PD",
        [{"P"}, {"D"}],
    ),
    (
        "E + P + D, NIXL said",
        {"encode_servers_urls": E, "prefill_servers_urls": P, "decode_servers_urls": D, "pd_protocol": "nixl"},
        True,
        "nixl",
        True,
        "PDE",
        [{"P"}, {"D"}, {"E"}],
    ),
    (
        "LMDeploy's own DistServe",
        {"serving_strategy": "DistServe"},
        True,
        "lmdeploy",
        False,
        "PD",
        [{"P"}, {"D"}],
    ),
    (
        "LMDeploy's nodes, named",
        {"prefill_servers_urls": P, "decode_servers_urls": D, "pd_protocol": "lmdeploy"},
        True,
        "lmdeploy",
        False,
        "PD",
        [{"P"}, {"D"}],
    ),
    (
        "LMDeploy's decode nodes alone, told that prefill took place",
        {"serving_strategy": "DistServe", "dummy_prefill": True},
        True,
        "lmdeploy",
        False,
        "PD",
        [{"D"}],
    ),
    (
        "P + D, Hybrid nodes as fallback",
        {**NIXL, "nodes": H, "prefill_fallback": True},
        True,
        "nixl",
        False,
        "HPDE",
        [{"H", "D"}],
    ),
    ("SGLang", {**NIXL, "pd_protocol": "sglang"}, True, "sglang", False, "PD", [{"P"}, {"D"}]),
    (
        "E + P + D, handed over by Mooncake",
        {**NIXL, "pd_protocol": "mooncake", "encode_servers_urls": E},
        True,
        "mooncake",
        True,
        "PDE",
        [{"P"}, {"D"}, {"E"}],
    ),
    (
        "a Mooncake consumer",
        {"encode_servers_urls": E, "decode_servers_urls": D, "ec_consumer_zmq_addrs": ("tcp://d:2",)},
        False,
        "nixl",
        True,
        "HDE",
        [{"H", "D"}, {"E"}],
    ),
]
LETTERS = {"H": Role.Hybrid, "P": Role.Prefill, "D": Role.Decode, "E": Role.Encode}


@pytest.mark.parametrize(
    ("flags", "split", "protocol", "expects", "may", "needed"),
    [row[1:] for row in ACCEPTED],
    ids=[r[0] for r in ACCEPTED],
)
def test_r78_topologies_that_work(
    flags: dict[str, Any], split: bool, protocol: str, expects: bool, may: str, needed: list[set[str]]
) -> None:
    topology = Topology.of(settings_of(**flags))
    assert (topology.split, topology.protocol, topology.expects_encoders) == (split, protocol, expects)
    assert [{role.name[0] for role in roles} for roles in topology.needed] == needed
    for letter, role in LETTERS.items():
        if letter in may:
            topology.check(role)
        else:
            with pytest.raises(BadRequest, match=f"An? {role.name} node can't be used w") as caught:
                topology.check(role)
            assert caught.value.param == "status.role"
            # The reason names the setting that decides, and what may be registered instead.
            by_protocol = split and role is Role.Encode
            assert ("--pd-protocol" if by_protocol else "--serving-strategy") in caught.value.message
            allowed = caught.value.message.partition("; allowed are ")[2]
            assert {name[0] for name in allowed.split(", ")} == set(may)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"serving_strategy": "DistServe", "prefill_servers_urls": ("disable",)},
            "--prefill-servers-urls: disable means that prefill and decode run together",
        ),
        ({"serving_strategy": "DistServe", "nodes": H}, "--nodes are Hybrid nodes"),
        ({"prefill_servers_urls": P, "decode_servers_urls": D, "nodes": H}, "--nodes are Hybrid nodes"),
        ({"encode_servers_urls": E, "prefill_servers_urls": P, "nodes": H}, "--nodes are Hybrid nodes"),
        (
            {"prefill_servers_urls": P, "decode_servers_urls": D, "ec_consumer_zmq_addrs": ("tcp://d:2",)},
            "--ec-consumer-zmq-addrs: pushed embeddings work only where prefill and decode run together",
        ),
        ({**NIXL, "ec_consumer_zmq_addrs": ("tcp://d:2",)}, "--ec-consumer-zmq-addrs"),
        (
            {"decode_servers_urls": ("http://d:1", "http://d:2"), "ec_consumer_zmq_addrs": ("tcp://d:2", "tcp://d:2")},
            "--ec-consumer-zmq-addrs: tcp://d:2 is named twice",
        ),
        ({"decode_servers_urls": D, "ec_consumer_dp_size": 2}, "--ec-consumer-dp-size is for --ec-consumer-zmq-addrs"),
        (
            {"serving_strategy": "DistServe", "encode_servers_urls": E, "pd_protocol": "lmdeploy"},
            "--pd-protocol lmdeploy can't be used with --encode-servers-urls",
        ),
        (
            {"serving_strategy": "DistServe", "encode_servers_urls": E, "pd_protocol": "sglang"},
            "--pd-protocol sglang can't be used with --encode-servers-urls",
        ),
        ({**NIXL, "dummy_prefill": True}, "--dummy-prefill can't be used with --pd-protocol nixl"),
        (
            {**NIXL, "pd_protocol": "mooncake", "dummy_prefill": True},
            "--dummy-prefill can't be used with --pd-protocol m",
        ),
        ({"prefill_servers_urls": P, "dummy_prefill": True}, "--dummy-prefill can't be used with --pd-protocol nixl"),
        ({"encode_servers_urls": E, "decode_servers_urls": E}, "http://e:1 is named twice"),
        ({"encode_servers_urls": E, "nodes": E}, "http://e:1 is named twice"),
        ({"prefill_servers_urls": P, "decode_servers_urls": (*D, *P)}, "http://p:1 is named twice"),
        ({"encode_servers_urls": (*E, *E), "decode_servers_urls": D}, "http://e:1 is named twice"),
        ({"decode_servers_urls": ("http://D:1/",), "nodes": D}, "http://d:1 is named twice"),
    ],
)
def test_r78_mixtures_that_can_not_work_are_refused_at_the_start_with_the_reason(
    flags: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Topology.of(settings_of(**flags))
    assert caught.value.message.startswith(words)


LMDEPLOYS = {"serving_strategy": "DistServe", "link_type": "IB", "disable_gdr": True, "migration_protocol": "NVLINK"}
HYBRID = "without --serving-strategy DistServe or --prefill-servers-urls"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({}, None),
        ({"dummy_prefill": False, "pd_protocol": "auto"}, None),
        ({"pd_protocol": "nixl"}, f"--pd-protocol has no effect {HYBRID}"),
        # As a script for LMDeploy's proxy may have it: served, and told.
        (
            {"dummy_prefill": True, "link_type": "RoCE", "migration_protocol": "RDMA", "disable_gdr": True},
            f"--dummy-prefill, --migration-protocol, --link-type, --disable-gdr have no effect {HYBRID}",
        ),
        ({"prefill_fallback": True, "encode_servers_urls": E}, f"--prefill-fallback has no effect {HYBRID}"),
        ({**LMDEPLOYS, "dummy_prefill": True, "link_tries": 2, "gc_age_s": 9, "pd_missing_params": "fail"}, None),
        (
            {**LMDEPLOYS, "pd_protocol": "sglang", "bootstrap_port": 1, "pd_missing_params": "fail"},
            "--migration-protocol, --link-type, --disable-gdr, --pd-missing-params have no effect "
            "with --pd-protocol sglang",
        ),
        ({**NIXL, "handover_lease_s": 9, "prefill_timeout_s": 9, "prefill_fallback": True}, None),
        ({**NIXL, "bootstrap_port": 9}, "--bootstrap-port has no effect with --pd-protocol nixl"),
    ],
)
def test_settings_that_change_nothing_are_named(flags: dict[str, Any], line: str | None) -> None:
    settings = settings_of(**flags)
    assert Topology.of(settings).without_effect(settings) == line


def test_settings_of_the_environment_that_change_nothing_are_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENHAND_PD_PROTOCOL", "mooncake")
    settings = settings_of()
    assert Topology.of(settings).without_effect(settings) == f"--pd-protocol has no effect {HYBRID}"


@pytest.mark.parametrize(
    ("flags", "used"),
    [
        ({}, "HDE"),
        ({"serving_strategy": "DistServe"}, "PD"),
        (NIXL, "PDE"),
        ({**NIXL, "prefill_fallback": True}, "HPDE"),
    ],
)
def test_which_roles_are_ever_called(flags: dict[str, Any], used: str) -> None:
    topology = Topology.of(settings_of(**flags))
    assert {letter for letter, role in LETTERS.items() if topology.uses(role)} == set(used)


def test_a_wrong_number_of_consumers_is_refused_at_the_start_too() -> None:
    settings = settings_of(
        encode_servers_urls=E, decode_servers_urls=D, ec_consumer_zmq_addrs=("tcp://d:2",), ec_consumer_dp_size=2
    )
    with pytest.raises(ConfigurationError, match="--ec-consumer-zmq-addrs"):
        made_by(settings)


def made_by(settings: Settings) -> Any:
    """The use case that these settings are served by; nothing behind it is called."""
    nothing: Any = {"registry": None, "ledger": SimpleNamespace(on_told_again=[])}
    split = Split(
        settings,
        **nothing,
        keys=Keys("n"),
        scripts=load_scripts(),
        engines=None,
        worker="w",
        linked=False,
        figures=Figures(),
    )
    return dispatcher(settings, **nothing, caller=None, split=split, breakers=None, budget=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "inner", "protocol"),
    [
        ({}, Hybrid, None),
        ({"encode_servers_urls": E, "decode_servers_urls": D}, Hybrid, None),
        ({"encode_servers_urls": E, "prefill_servers_urls": P, "decode_servers_urls": D}, PrefillDecode, Nixl),
        ({"prefill_servers_urls": P, "decode_servers_urls": D}, PrefillDecode, Nixl),
        (NIXL, PrefillDecode, Nixl),
        ({"serving_strategy": "DistServe"}, PrefillDecode, Lmdeploy),
        ({**NIXL, "pd_protocol": "lmdeploy"}, PrefillDecode, Lmdeploy),
        ({**NIXL, "pd_protocol": "mooncake"}, PrefillDecode, Mooncake),
        ({**NIXL, "pd_protocol": "sglang"}, PrefillDecode, Sglang),
    ],
)
def test_the_use_case_follows_the_topology(flags: dict[str, Any], inner: type, protocol: type | None) -> None:
    made = made_by(settings_of(**flags))
    assert (type(made), type(made._inner)) == (Epd, inner)
    if protocol is not None:
        assert type(made._inner._protocol) is protocol


@pytest.mark.parametrize(
    ("flags", "nodes"),
    [
        ({"nodes": H}, {H[0]: Role.Hybrid}),
        (
            {"encode_servers_urls": E, "prefill_servers_urls": P, "decode_servers_urls": D},
            {E[0]: Role.Encode, P[0]: Role.Prefill, D[0]: Role.Decode},
        ),
        (
            {"encode_servers_urls": E, "prefill_servers_urls": ("none",), "decode_servers_urls": D, "nodes": H},
            {E[0]: Role.Encode, D[0]: Role.Decode, H[0]: Role.Hybrid},
        ),
    ],
)
def test_the_nodes_that_are_named_get_their_roles(flags: dict[str, Any], nodes: dict[str, Role]) -> None:
    settings = settings_of(**flags)
    assert settings.static_nodes == nodes
    for role in nodes.values():
        Topology.of(settings).check(role)


def test_a_source_whose_role_the_arrangement_cant_use_is_refused_at_the_start() -> None:
    split = {"serving_strategy": "DistServe"}
    Topology.of(Settings.load({**split, "discover": ["dns://p:1?role=Prefill", "dns://d:1?role=Decode"]}))
    for options, words in ((split, "a:1: ?role=Hybrid: A Hybrid node can't be used"), ({}, "")):
        settings = Settings.load({**options, "discover": ["dns://a:1"]})
        if not words:
            Topology.of(settings)
            continue
        with pytest.raises(ConfigurationError, match=words.replace("?", r"\?")):
            Topology.of(settings)
