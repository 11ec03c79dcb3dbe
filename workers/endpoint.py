"""The deployment's own endpoint as this host reaches it, for the little that `evenhand serve` asks of it.

Owns its address and two calls. Both may fail, and nothing depends on them: they make a greeting true and leave
no simulated engine in a registry that outlives them.
"""

from __future__ import annotations

import json
import ssl
import urllib.request
from typing import Any

from pydantic import SecretStr

from app.settings import Settings

TIMEOUT_S = 1.0
ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Endpoint:
    def __init__(self, settings: Settings) -> None:
        host = ANY_HOST.get(settings.server_name, settings.server_name)
        host = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if settings.ssl else 'http'}://{host}:{settings.server_port}"
        self._client_keys = settings.api_keys
        self._admin_keys = settings.admin_keys or settings.api_keys
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if settings.ssl:  # its certificate is often signed by itself
            context = ssl.create_default_context(cafile=str(settings.ssl_certfile))
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)

    def __repr__(self) -> str:
        return f"<Endpoint {self.url}>"

    def models(self) -> list[str]:
        """What `/v1/models` lists; nothing while it can't be reached."""
        try:
            return [str(model["id"]) for model in self._ask("/v1/models", self._client_keys)["data"]]
        except (OSError, ValueError, LookupError, TypeError):
            return []

    def remove_node(self, node: str) -> bool:
        """Whether the node is out of the registry."""
        try:
            self._ask("/nodes/remove", self._admin_keys, {"url": node})
        except (OSError, ValueError):
            return False
        return True

    def _ask(self, path: str, keys: tuple[SecretStr, ...], body: dict[str, str] | None = None) -> Any:
        request = urllib.request.Request(self.url + path)
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        if keys:
            request.add_header("Authorization", f"Bearer {keys[0].get_secret_value()}")
        with self._opener.open(request, timeout=TIMEOUT_S) as answer:
            return json.loads(answer.read())
