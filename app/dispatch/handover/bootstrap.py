"""Where a prefill node tells decode nodes of its KV cache: its host and its bootstrap port."""

from __future__ import annotations

from urllib.parse import urlsplit

from app.store.registry import Registry


class Bootstrap:
    """One per worker. `default_port`: of nodes that were registered without one."""

    def __init__(self, *, registry: Registry, default_port: int) -> None:
        self._registry = registry
        self._default_port = default_port

    def host_of(self, url: str) -> str:
        """As it stands in a URL: an IPv6 address in brackets."""
        host = urlsplit(url).hostname or ""
        return f"[{host}]" if ":" in host else host

    def port_of(self, url: str) -> int:
        node = self._registry.snapshot.nodes.get(url)
        return node.bootstrap_port if node is not None and node.bootstrap_port else self._default_port

    def address_of(self, url: str) -> str:
        return f"http://{self.host_of(url)}:{self.port_of(url)}"

    def knows(self, url: str) -> bool:
        """Whether the node is registered still."""
        return url in self._registry.snapshot.nodes

    def life_of(self, url: str) -> tuple[int, int]:
        """Changes when the node may have restarted: registered again, or away and back."""
        node = self._registry.snapshot.nodes.get(url)
        return (node.life, node.state_since_ms) if node is not None else (0, 0)
