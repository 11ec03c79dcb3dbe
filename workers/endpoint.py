"""The deployment's own endpoint as this host reaches it, for the little that `evenhand serve` asks of it.

Owns its address and a few calls. All may fail, and nothing depends on them: they make a greeting true, and
bring simulated engines into a registry and out of it.
"""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from typing import Any

from pydantic import SecretStr

from app.access_keys import access_key
from app.nodes import Role
from app.settings import Settings

TIMEOUT_S = 1.0
ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class Endpoint:
    def __init__(self, settings: Settings) -> None:
        host = ANY_HOST.get(settings.server_name, settings.server_name)
        host = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if settings.ssl else 'http'}://{host}:{settings.server_port}"
        # Those of files are not looked at, and a digest is no key: then only trusted hosts' calls get through.
        self._client_keys = _plain(settings.api_keys)
        self._admin_keys = _plain(settings.admin_keys or settings.api_keys)
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if settings.ssl:
            # It is ourselves: our own certificate, whoever signed it, and whatever name it is for.
            context = ssl.create_default_context(cafile=str(settings.ssl_certfile))
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.check_hostname = False
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

    def roles(self) -> dict[str, Role]:
        """The role of each registered node; nothing while it can't be asked."""
        try:
            return {str(url): Role(node["role"]) for url, node in self._ask("/nodes/status", self._admin_keys).items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return {}

    def trouble(self) -> str | None:
        """Why it is not ready, in its own words; None when it is."""
        try:
            self._ask("/ready", ())
        except urllib.error.HTTPError as e:
            with e:
                return _message(e.read()) or f"{e.code} {e.reason}"
        except (OSError, ValueError) as e:
            return f"{self.url} does not answer: {e}"
        return None

    def add_node(self, node: str, model: str) -> bool:
        """Whether the node is in the registry now."""
        return self._manage("/nodes/add", {"url": node, "status": {"models": [model], "role": 1}})

    def remove_node(self, node: str) -> bool:
        """Whether the node is out of the registry now."""
        return self._manage("/nodes/remove", {"url": node})

    def _manage(self, path: str, body: dict[str, Any]) -> bool:
        try:
            self._ask(path, self._admin_keys, body)
        except (OSError, ValueError):
            return False
        return True

    def _ask(self, path: str, keys: tuple[SecretStr, ...], body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(self.url + path)
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        if keys:
            request.add_header("Authorization", f"Bearer {keys[0].get_secret_value()}")
        with self._opener.open(request, timeout=TIMEOUT_S) as answer:
            return json.loads(answer.read())


def _plain(keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
    return tuple(key for key in keys if access_key(key.get_secret_value()).plain)


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return ""
