"""Who may do what: clients' API keys, reader keys, admin keys, and the networks that engines register from.

Owns the rules; it must not know routes. A key that was sent is hashed once, and the digest is compared in constant
time with all that there are, so that neither a wrong character nor a key's place in the list shows.

Only the address of the connection counts as a peer's, never X-Forwarded-For, which anybody can write.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from app.access_keys import AccessKey, KeyRing, digest_of
from app.errors import Forbidden, ModelNotFound, Unauthorized

HeaderPairs = Collection[tuple[bytes, bytes]]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Authority:
    """Decides from headers and peer address; raises where the answer is no.

    Args:
        keys: where there are no admin keys, the API keys for all models count as such.
        trusted_networks: CIDRs whose hosts may use admin routes without a key.
    """

    def __init__(self, keys: KeyRing, *, trusted_networks: Iterable[str]) -> None:
        self._keys = keys
        self._asks = keys.asks_for_keys
        self._trusted: tuple[Network, ...] = tuple(ipaddress.ip_network(net, strict=False) for net in trusted_networks)

    def __repr__(self) -> str:
        return f"<Authority {self._keys!r} trusted={[str(net) for net in self._trusted]}>"

    @property
    def _admin_keys(self) -> tuple[AccessKey, ...]:
        return self._keys.admin or tuple(key for key in self._keys.api if key.models is None)

    def check_client(self, headers: HeaderPairs) -> AccessKey | None:
        """The key of the request; None: there are none, so none is needed. Raises Unauthorized.

        OpenAI's clients send it as `Authorization`, Anthropic's as `x-api-key`, and some send both. The second is
        looked at only where the first is none of ours, so where both are right the first one's name and models count.
        """
        if not self._asks:
            return None
        token = _bearer(headers)
        key = _among(token, self._keys.api)
        if key is None:
            other = _x_api_key(headers)
            key = _among(other, self._keys.api)
            if key is None and token is None and other is None:
                raise Unauthorized(
                    "This needs an API key: send `Authorization: Bearer <key>` or, as Anthropic's clients do, "
                    "`x-api-key: <key>`."
                )
            if key is None:
                raise Unauthorized("The API key is wrong.")
        return key

    def check_viewer(self, headers: HeaderPairs, peer: str | None) -> None:
        """For what everybody may see where there are no keys at all; else as `check_reader`."""
        if self._asks or self._keys.admin or self._keys.reader:
            self.check_reader(headers, peer)

    def check_reader(self, headers: HeaderPairs, peer: str | None) -> None:
        """For what shows the deployment and changes nothing: as `check_admin`, and a reader key will do."""
        self._check(headers, peer, self._keys.reader)

    def check_admin(self, headers: HeaderPairs, peer: str | None) -> None:
        """Let an admin key or a trusted peer pass.

        Args:
            peer: address of the connection; None (a unix socket) is never trusted, as a reverse proxy
                may sit behind it and hand through anybody.

        Raises:
            Unauthorized: no key, or one that is none of ours.
            Forbidden: a key of another kind; or no key can help, because none is configured.
        """
        self._check(headers, peer, ())

    def _check(self, headers: HeaderPairs, peer: str | None, readers: tuple[AccessKey, ...]) -> None:
        token = _bearer(headers)
        keys = self._admin_keys + readers
        if _among(token, keys):
            return
        if self._trusts(peer) and not _from_foreign_page(headers):
            return
        if not keys:
            raise Forbidden(
                "This is for trusted hosts (--trusted-nodes) or an admin key, "
                "and no admin key is configured (--admin-keys)."
            )
        needed = "a reader key or an admin key" if readers else "an admin key"
        if token is None:
            raise Unauthorized(f"This needs {needed}: send `Authorization: Bearer <key>`.")
        for kind, others in (("an API key", self._keys.api), ("a reader key", self._keys.reader)):
            if _among(token, others):
                raise Forbidden(f"This needs {needed}; {kind} is not enough.")
        raise Unauthorized(f"The {'' if readers else 'admin '}key is wrong.")

    def _trusts(self, peer: str | None) -> bool:
        address = _address(peer)
        return address is not None and any(address in net for net in self._trusted)


def _bearer(headers: HeaderPairs) -> bytes | None:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return token.strip() or None
    return None


def _x_api_key(headers: HeaderPairs) -> bytes | None:
    for name, value in headers:
        if name == b"x-api-key":
            return value.strip() or None
    return None


def _among(token: bytes | None, keys: tuple[AccessKey, ...]) -> AccessKey | None:
    if token is None:
        return None
    digest, found = digest_of(token), None
    for key in keys:
        if hmac.compare_digest(digest, key.digest):
            found = key
    return found


def check_model(key: AccessKey, asked: str, *names: str) -> None:
    """Raises ModelNotFound, unless the key may ask for the model that has these names beside the `asked` one.

    The same answer whether there is such a model or not: who may not use it doesn't learn of it, nor of its name where
    the request `asked` for none.
    """
    if not key.may_use(asked, *names):
        if not asked:
            raise ModelNotFound(
                "The request does not name a model, and this key may not use the one that it would go to.",
                param="model",
            )
        raise ModelNotFound(f"The model {asked[:200]!r} does not exist, or this key may not use it.", param="model")


def _address(peer: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address((peer or "").partition("%")[0])
    except ValueError:
        return None
    # A listener on :: sees IPv4 peers as ::ffff:a.b.c.d; the operator wrote a.b.c.d.
    return getattr(address, "ipv4_mapped", None) or address


def _from_foreign_page(headers: HeaderPairs) -> bool:
    """Whether a browser sent this for a web page that isn't ours.

    The browser runs on a trusted host, but the page in it may come from anywhere: without this check
    an `<img src="http://127.0.0.1:8000/nodes/terminate_all">` in any page would empty the deployment.
    Programs send neither header. A name as Host is not believed from a browser: a page can point a
    name of its own at a loopback address.
    """
    found = {name: value.decode("latin-1") for name, value in headers}
    site, origin = found.get(b"sec-fetch-site"), found.get(b"origin")
    if site is None and origin is None:
        return False
    host = found.get(b"host", "")
    if site not in (None, "same-origin", "none") or (origin is not None and urlsplit(origin).netloc != host):
        return True
    name = urlsplit(f"//{host}").hostname or ""
    return name != "localhost" and _address(name) is None
