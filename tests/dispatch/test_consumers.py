"""Mooncake consumers: which address belongs to which node and data-parallel rank."""

from __future__ import annotations

from collections import Counter

import pytest

from app.dispatch.consumers import Consumer, Consumers
from app.errors import ConfigurationError
from tests.dispatch.fakes import D0, D1

S0R0, S0R1, S1R0, S1R1 = "tcp://s0:1", "tcp://s0:2", "tcp://s1:1", "tcp://s1:2"


def test_one_address_for_each_node_and_no_header() -> None:
    consumers = Consumers([D0, D1], [S0R0, S1R0], 1)
    assert consumers
    assert consumers.choose(D0) == Consumer(D0, S0R0, [])
    assert consumers.choose(D1) == Consumer(D1, S1R0, [])


@pytest.mark.parametrize(("url", "addresses"), [(D0, (S0R0, S0R1)), (D1, (S1R0, S1R1))])
def test_with_ranks_a_nodes_addresses_stand_together_and_the_header_names_the_rank(
    url: str, addresses: tuple[str, str]
) -> None:
    consumers = Consumers([D0, D1], [S0R0, S0R1, S1R0, S1R1], 2)
    chosen = Counter[str]()
    for _ in range(200):
        consumer = consumers.choose(url)
        assert consumer.headers == [(b"x-data-parallel-rank", b"%d" % addresses.index(consumer.zmq))]
        chosen[consumer.zmq] += 1
    # Binomial(200, 1/2): 100, standard deviation 7.
    assert set(chosen) == set(addresses) and min(chosen.values()) > 50


@pytest.mark.parametrize(
    ("urls", "addresses", "dp_size"),
    [
        ([D0, D1], [S0R0], 1),
        ([D0], [S0R0, S0R1], 1),
        ([D0, D1], [S0R0, S0R1, S1R0], 2),
        ([D0, D1], [S0R0, S1R0], 2),
        ([], [S0R0], 1),
    ],
)
def test_any_other_number_of_addresses_is_a_configuration_error(
    urls: list[str], addresses: list[str], dp_size: int
) -> None:
    with pytest.raises(ConfigurationError, match=f"each of the {len(urls)} decode servers and {dp_size} ") as caught:
        Consumers(urls, addresses, dp_size)
    assert "--ec-consumer-zmq-addrs" in caught.value.message


def test_one_address_for_two_replicas_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match=f"--ec-consumer-zmq-addrs: {S0R0} is named twice"):
        Consumers([D0, D1], [S0R0, S0R0], 1)


def test_without_addresses_nothing_is_pushed_and_ranks_have_no_meaning() -> None:
    assert not Consumers([D0, D1], [], 1)
    assert not Consumers([], [], 1)
    with pytest.raises(ConfigurationError, match="--ec-consumer-dp-size is for --ec-consumer-zmq-addrs"):
        Consumers([D0, D1], [], 2)


def test_the_nodes_that_can_be_pushed_to_are_named() -> None:
    assert set(Consumers([D0, D1], [S0R0, S1R0], 1).urls) == {D0, D1}
    assert set(Consumers([D0, D1], [], 1).urls) == set()
