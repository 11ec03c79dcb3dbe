"""`python -m workers.alive [PORT]`: exit code 0 if `/health` of this host answers 200; a container's health check.

Owns one request. Only the standard library, and little of it: it runs every few seconds beside the workers. For
the same reason it reads the few variables that matter itself; flags of `serve` it can't know. It never goes through
a proxy that the environment names.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException

TIMEOUT_S = 5.0  # below the health check's own, so that the reason is told
ANY_HOST = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
TRUE = ("1", "true", "t", "yes", "y", "on")  # as pydantic reads a bool


def main(arguments: list[str], environment: Mapping[str, str]) -> int:
    """The exit code; what is wrong goes to stderr, which `docker inspect` shows."""
    host = ANY_HOST.get(name := environment.get("EVENHAND_SERVER_NAME", ""), name)
    port = int(arguments[0] if arguments else environment.get("EVENHAND_SERVER_PORT") or 8000)
    try:
        connection = _connection(host, port, tls=environment.get("EVENHAND_SSL", "").lower() in TRUE)
        try:
            connection.request("GET", "/health")
            status = connection.getresponse().status
        finally:
            connection.close()
    except (OSError, HTTPException) as e:
        print(f"{host}:{port} does not answer: {e or type(e).__name__}", file=sys.stderr)
        return 1
    if status != 200:
        print(f"{host}:{port} answers {status}", file=sys.stderr)
    return 0 if status == 200 else 1


def _connection(host: str, port: int, *, tls: bool) -> HTTPConnection:
    if not tls:
        return HTTPConnection(host, port, timeout=TIMEOUT_S)
    import ssl
    from http.client import HTTPSConnection

    # It is ourselves, whoever signed the certificate and whatever name it is for; nothing secret is sent.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return HTTPSConnection(host, port, timeout=TIMEOUT_S, context=context)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
