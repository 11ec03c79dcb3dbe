"""Mooncake consumers of pushed embeddings: which control channel belongs to which node.

Source: `--ec-consumer-zmq-addrs` and `--ec-consumer-dp-size` of vLLM's encoder-disaggregation proxy.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from app.errors import ConfigurationError, Headers


@dataclass(frozen=True, slots=True)
class Consumer:
    """Where encoders push to for one request: a replica of the node `url`, and the header that leads to it."""

    url: str
    zmq: str
    headers: Headers


class Consumers:
    """The map; false where embeddings are not pushed.

    Args:
        urls: of the static decode nodes.
        addresses: one per decode node and data-parallel rank: s0r0, s0r1, s1r0, ...

    Raises:
        ConfigurationError: the counts don't fit, or an address stands twice.
    """

    def __init__(self, urls: Sequence[str], addresses: Sequence[str], dp_size: int) -> None:
        if addresses and len(addresses) != len(urls) * dp_size:
            raise ConfigurationError(
                f"--ec-consumer-zmq-addrs: must be one for each of the {len(urls)} decode servers "
                f"and {dp_size} data-parallel ranks, not {len(addresses)}"
            )
        twice = next((address for address in addresses if addresses.count(address) > 1), None)
        if twice is not None:
            raise ConfigurationError(f"--ec-consumer-zmq-addrs: {twice} is named twice; a replica has one of its own")
        if dp_size > 1 and not addresses:
            raise ConfigurationError("--ec-consumer-dp-size is for --ec-consumer-zmq-addrs, which is not given")
        self._dp_size = dp_size
        self._by_url = {url: addresses[i * dp_size : (i + 1) * dp_size] for i, url in enumerate(urls) if addresses}

    def __bool__(self) -> bool:
        return bool(self._by_url)

    @property
    def urls(self) -> Collection[str]:
        """The nodes that have a control channel: no other can be pushed to."""
        return self._by_url.keys()

    def choose(self, url: str) -> Consumer:
        """A replica of a node of `urls`, by chance."""
        addresses = self._by_url[url]
        rank = random.randrange(self._dp_size)
        headers = [(b"x-data-parallel-rank", b"%d" % rank)] if self._dp_size > 1 else []
        return Consumer(url, addresses[rank], headers)
