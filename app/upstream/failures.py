"""Foreign exceptions of connecting, told in the project's own words.

Owns the mapping that the transport and the management client share. Messages name the engine's URL,
never a key.
"""

from __future__ import annotations

import errno
import socket
import ssl

from app.errors import EngineRefused, EngineTimeout, EngineUnreachable, UpstreamError

_OURS = {
    errno.EMFILE: "this worker has no file descriptors left (raise the limit on open files)",
    errno.ENFILE: "this host has no file descriptors left",
    errno.EADDRNOTAVAIL: "no local address or port is left for it",
}


def connect_failure(url: str, cause: BaseException) -> UpstreamError:
    """The error for a connection that did not come about.

    Only a refusal by every address of the host is `EngineRefused`: it proves that nobody listens. asyncio's
    and aiohappyeyeballs' joint error for several addresses has the errno that they all have, or none.
    """
    number = cause.errno if isinstance(cause, OSError) else None
    if isinstance(cause, ssl.SSLCertVerificationError):
        return EngineUnreachable(f"engine {url}: its TLS certificate was not accepted: {cause.verify_message}")
    if isinstance(cause, ssl.SSLError):
        return EngineUnreachable(f"engine {url}: TLS failed: {cause.reason or 'no common ground'}")
    if isinstance(cause, socket.gaierror | UnicodeError):
        return EngineUnreachable(f"engine {url}: its host name can't be resolved")
    if number == errno.ECONNREFUSED:
        return EngineRefused(f"engine {url} refused the connection")
    if number == errno.ETIMEDOUT:
        return EngineTimeout(f"engine {url} did not accept a connection: the network gave up", stage="connect")
    if number in _OURS:
        return EngineUnreachable(f"engine {url} can't be reached: {_OURS[number]}")
    if isinstance(cause, ConnectionError):
        return EngineUnreachable(f"engine {url} broke the connection off while it was being made")
    return EngineUnreachable(f"engine {url} can't be reached: {errno.errorcode.get(number or 0, type(cause).__name__)}")
