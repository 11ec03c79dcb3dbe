"""What a `--discover` says: a name in the DNS or a file, with its options.

Pure: nothing is looked up or opened. A source's `name` has no options in it, so that they may change and its nodes stay
its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import parse_qsl, unquote, urlsplit

from app.errors import BadRequest
from app.nodes import Role, normalise_url, parse_host_header, parse_role

DNS_OPTIONS = ("scheme", "role", "interval_s", "path", "host_header", "resolver")
INTERVAL_S = 5.0
INTERVALS_S = (1.0, 3600.0)
DNS_PORT = 53
EXAMPLES = "dns://HOST:PORT, dns+srv://_SERVICE._tcp.HOST or file:///PATH"


@dataclass(frozen=True, slots=True)
class DnsSource:
    """`port` None: SRV records say it. `host_header`, `path`: of each node. `resolver`: instead of the system's."""

    name: str
    host: str
    port: int | None
    scheme: str = "http"
    role: Role = Role.Hybrid
    interval_s: float = INTERVAL_S
    path: str = ""
    host_header: str = ""
    resolver: tuple[str, int] | None = None

    def url_of(self, host: str, port: int) -> str:
        """The node there. Raises BadRequest: it could be none."""
        literal = f"[{host}]" if ":" in host else host
        return normalise_url(f"{self.scheme}://{literal}:{port}{self.path}")


@dataclass(frozen=True, slots=True)
class FileSource:
    """`label`: the name before the path, by which hosts with lists of their own tell their sources apart."""

    name: str
    path: str
    label: str = ""


Source = DnsSource | FileSource


def parse_source(text: str) -> Source:
    """Raises ValueError, with the rest of the sentence that names what is wrong."""
    if not text.isascii() or not text.isprintable():
        raise ValueError("holds characters that a URL can't have")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as e:
        raise ValueError(f"is not a URL: {e}") from e
    if parts.fragment or "@" in parts.netloc:
        raise ValueError(f"must be {EXAMPLES}, without a user or fragment")
    if parts.scheme == "file":
        return _file(parts.netloc, unquote(parts.path), parts.query)
    if parts.scheme not in ("dns", "dns+srv") or not parts.hostname:
        raise ValueError(f"must be {EXAMPLES}")
    if parts.path.strip("/"):
        raise ValueError("must have no path; that of its nodes goes in ?path=")
    return _dns(parts.scheme, parts.hostname, port, parts.query)


def _file(label: str, path: str, query: str) -> FileSource:
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise ValueError("must be file:///PATH, the absolute path of a file")
    if query:
        raise ValueError("must have no options: they stand in the file")
    return FileSource(f"file://{label.lower()}{path}", path, label.lower())


def _dns(scheme: str, host: str, port: int | None, query: str) -> DnsSource:
    by_srv = scheme == "dns+srv" or (port is None and host.startswith("_"))
    if by_srv and port is not None:
        raise ValueError("must have no port: SRV records say it")
    if not by_srv and not port:
        raise ValueError("needs a port, as in dns://engine:8000; SRV records, which say it, are asked by dns+srv://")
    if _is_address(host) or "[" in host:
        raise ValueError("must have a name, not an address: --nodes takes addresses")
    # The rules of a node's host are those of a name that can be asked for.
    host = _node(f"http://{host}").removeprefix("http://")
    options = _options(query)
    nodes_scheme = options.get("scheme", "http")
    if nodes_scheme not in ("http", "https"):
        raise ValueError("must have ?scheme=http or ?scheme=https")
    path = options.get("path", "")
    _node(f"http://a{path}" if path.startswith("/") or not path else "")
    try:
        role = parse_role(options.get("role", "Hybrid"), field="?role=")
        named = parse_host_header(options.get("host_header"), field="?host_header=")
    except BadRequest as e:
        raise ValueError(e.message) from e
    if not named and nodes_scheme == "https" and not by_srv:
        named = host if port == 443 else f"{host}:{port}"  # certificates are for names, and this is the one asked for
    return DnsSource(
        name=f"dns+srv://{host}" if by_srv else f"dns://{host}:{port}",
        host=host,
        port=None if by_srv else port,
        scheme=nodes_scheme,
        role=role,
        interval_s=_interval_s(options.get("interval_s")),
        path=path.rstrip("/"),
        host_header=named,
        resolver=_resolver(options.get("resolver")),
    )


def _options(query: str) -> dict[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    for name, _ in pairs:
        if name not in DNS_OPTIONS:
            raise ValueError(f"has the unknown option {name}; there are {', '.join(DNS_OPTIONS)}")
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("has an option twice")
    return dict(pairs)


def _interval_s(text: str | None) -> float:
    if text is None:
        return INTERVAL_S
    least, most = INTERVALS_S
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not least <= value <= most:
        raise ValueError(f"must have an ?interval_s= from {least:g} to {most:g}")
    return value


def _resolver(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    try:
        parts = urlsplit(f"//{text}")
        address, port = parts.hostname or "", parts.port
        if port != 0 and parts.netloc == text and _is_address(address):
            return address, port or DNS_PORT
    except ValueError:
        pass
    raise ValueError("must have a ?resolver= of ADDRESS or ADDRESS:PORT")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _node(url: str) -> str:
    try:
        return normalise_url(url, field="it")
    except BadRequest as e:
        raise ValueError(f"is not right: {e.message}" if url else "must have a ?path= that begins with /") from e
