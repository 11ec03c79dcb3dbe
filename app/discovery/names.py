"""Names in the DNS: A and AAAA records, or SRV records, as nodes.

Owns the questions and what an answer means. It must not know what becomes of the nodes.

A library of its own, not the system's `getaddrinfo`: that one can't tell "there is no such name" from "nobody answers",
and knows no SRV records. So /etc/hosts does not count; search domains and name servers are those of /etc/resolv.conf,
read anew each time. TTLs are the name server's business: it is asked each time, and keeps its answers as it may.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import dns.asyncresolver
import dns.exception
import dns.resolver

from app.discovery.listing import Listed, ReadFailed, Reading
from app.discovery.sources import DnsSource
from app.errors import BadRequest

LOOKUP_S = 4.0
"""For a question with its repetitions. Below the lease of who asks."""
PATIENCE_S = 30.0
"""Answers, "no such name" among them, must leave a node out for so long: a name server that has just been started, one
that gives a part of its records in turn, and a service between two of its engines say less than there is."""


class DnsReader:
    """See the module."""

    def __init__(self, source: DnsSource, *, lookup_s: float = LOOKUP_S, patience_s: float = PATIENCE_S) -> None:
        self.name = source.name
        self.every_s = source.interval_s
        self.patience_s = patience_s
        self._source = source
        self._lookup_s = lookup_s

    def __repr__(self) -> str:
        return f"<DnsReader {self.name}>"

    def forget(self) -> None:
        pass

    async def look(self) -> Reading:
        if self._source.port is None:
            (records,) = await self._ask("SRV")
            if isinstance(records, ReadFailed):
                raise records
            # A target of "." means that there is no such service (RFC 2782).
            places = [(one.target.to_text(omit_final_dot=True), one.port) for one in records]
            return self._reading((host, port) for host, port in places if host not in ("", ".") and port)
        answers = await self._ask("A", "AAAA")
        failed = [answer for answer in answers if isinstance(answer, ReadFailed)]
        if len(failed) == len(answers):
            raise failed[0]
        records = [one for answer in answers if not isinstance(answer, ReadFailed) for one in answer]
        places = [(one.address, self._source.port) for one in records]
        return self._reading(places, trouble="; ".join(map(str, failed)))

    def _reading(self, places: Iterable[tuple[str, int]], trouble: str = "") -> Reading:
        source = self._source
        nodes: dict[str, Listed] = {}
        for host, port in places:
            try:
                url = source.url_of(host, port)
            except BadRequest:
                trouble = trouble or "a record of it is no host of a node"
                continue
            nodes[url] = Listed(url, role=source.role, host_header=source.host_header)
        return Reading(nodes, whole=not trouble, trouble=trouble)

    async def _ask(self, *kinds: str) -> Sequence[Sequence[Any] | ReadFailed]:
        """For each kind its records, none where the name has none, or why that is not known."""
        try:
            resolver = self._resolver()
        except (dns.exception.DNSException, OSError, ValueError) as e:
            raise ReadFailed(f"there is no name server to ask: {e}") from e
        return await asyncio.gather(*(self._records(resolver, kind) for kind in kinds))

    def _resolver(self) -> dns.asyncresolver.Resolver:
        server = self._source.resolver
        resolver = dns.asyncresolver.Resolver(configure=server is None)
        if server is not None:
            resolver.nameservers = [server[0]]
            resolver.port = server[1]
        resolver.lifetime = self._lookup_s
        resolver.timeout = min(resolver.timeout, self._lookup_s / 2)
        return resolver

    async def _records(self, resolver: dns.asyncresolver.Resolver, kind: str) -> Sequence[Any] | ReadFailed:
        try:
            found = await resolver.resolve(self._source.host, kind, search=True)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return ()
        except dns.exception.Timeout:
            return ReadFailed(f"{kind}: no name server answered within {self._lookup_s:g} s")
        except dns.resolver.NoNameservers:
            return ReadFailed(f"{kind}: no name server gave a usable answer")
        except (dns.exception.DNSException, OSError, ValueError) as e:
            return ReadFailed(f"{kind}: {type(e).__name__}")
        return list(found)
