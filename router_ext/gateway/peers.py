"""Where a request came from, for logs and traces: never for identity or limits.

The address is that of the connection. If it lies in one of the operator's trusted networks, the rightmost address of
``X-Forwarded-For`` that does not is the client's: whatever stands left of it was written by the client itself.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Any, NamedTuple

from router_ext.settings import parse_networks

MAX_HOPS = 16
"""Entries looked at; a longer chain ends with the last of them."""


class Peer(NamedTuple):
    """``address`` is None where there is none (a local socket). ``proto``: ``http`` or ``https``."""

    address: str | None
    proto: str


NOBODY = Peer(None, "http")


class Peers:
    """See the module."""

    def __init__(self, trusted_proxies: str) -> None:
        self._networks = parse_networks(trusted_proxies)

    def of(self, scope: Any, headers: Sequence[tuple[bytes, bytes]]) -> Peer:
        """Who sent the request of this ASGI scope."""
        client = scope.get("client")
        address = None if not client else str(client[0])
        proto = str(scope.get("scheme", "http"))
        if not self._networks or address is None or not self._trusts(address):
            return Peer(address, proto)
        hops: list[str] = []
        protos: list[str] = []
        for name, value in headers:
            if name == b"x-forwarded-for":
                hops += [hop.strip() for hop in value.decode("latin-1").split(",")]
            elif name == b"x-forwarded-proto":
                protos += [each.strip().lower() for each in value.decode("latin-1").split(",")]
        if protos and protos[-1] in ("http", "https"):
            proto = protos[-1]
        for hop in reversed(hops[-MAX_HOPS:]):
            found = _address(hop)
            if found is None:
                break
            address = str(found)
            if not self._is_inside(found):
                break
        return Peer(address, proto)

    def _trusts(self, text: str) -> bool:
        address = _address(text)
        return address is not None and self._is_inside(address)

    def _is_inside(self, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
        return any(address.version == network.version and address in network for network in self._networks)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """``1.2.3.4``, ``1.2.3.4:80``, ``::1``, ``[::1]:80``; anything else is nobody's address."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found
