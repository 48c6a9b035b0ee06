"""Decides which addresses a reward endpoint may have: public addresses, and addresses that the operator allows.

    address --unwrap--> itself and every IPv4 address inside it --> each public, or allowed by the operator? --> dial

The list of networks that are not public is our own: the tables of ``ipaddress`` change between Python releases, and
they call the NAT64 form of loopback global. The functions here take addresses that a resolver returned, never text:
``127.1``, ``2130706433`` and ``0x7f000001`` are not addresses to ``ipaddress``, but the resolver reads them as
loopback.
"""

import ipaddress
from collections.abc import Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_INTERNAL = (
    ("10.0.0.0/8", "private"),
    ("172.16.0.0/12", "private"),
    ("192.168.0.0/16", "private"),
    ("100.64.0.0/10", "private (carrier-grade NAT)"),
    ("127.0.0.0/8", "loopback"),
    ("::1/128", "loopback"),
    ("fc00::/7", "private"),
)
"""Networks where an operator's own services run. They are open to every host name that the operator allows."""

_NOBODY = (
    ("0.0.0.0/8", "unspecified"),
    ("169.254.0.0/16", "link-local (cloud metadata)"),
    ("100.100.100.200/32", "cloud metadata"),
    ("168.63.129.16/32", "cloud metadata"),
    ("192.0.0.0/24", "reserved"),
    ("192.0.2.0/24", "documentation"),
    ("192.88.99.0/24", "reserved"),
    ("198.18.0.0/15", "benchmarking"),
    ("198.51.100.0/24", "documentation"),
    ("203.0.113.0/24", "documentation"),
    ("224.0.0.0/4", "multicast"),
    ("240.0.0.0/4", "reserved"),
    ("fd00:ec2::/32", "cloud metadata"),
    ("fd20:ce::/64", "cloud metadata"),
    ("fe80::/10", "link-local"),
    ("fec0::/10", "site-local"),
    ("ff00::/8", "multicast"),
    ("2001::/23", "reserved"),  # Teredo, ORCHID, benchmarking
    ("2001:db8::/32", "documentation"),
    ("3fff::/20", "documentation"),
)
"""Networks where no reward endpoint belongs. An allowed host name does not open them, only an allowed network does."""

_CARRIERS = tuple(
    (ipaddress.IPv6Network(network), shift)
    for network, shift in (
        ("::/96", 0),  # IPv4-compatible, deprecated
        ("::ffff:0:0/96", 0),  # IPv4-mapped
        ("::ffff:0:0:0/96", 0),  # IPv4-translated
        ("64:ff9b::/96", 0),  # NAT64
        ("64:ff9b:1::/48", 0),  # NAT64, local use
        ("2002::/16", 80),  # 6to4
        ("2001::/32", 64),  # Teredo: the server's address; _inside adds the client's
    )
)
_TEREDO = ipaddress.IPv6Network("2001::/32")
_GLOBAL_UNICAST = ipaddress.IPv6Network("2000::/3")
_TRANSPARENT = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("::ffff:0:0/96"))
"""Networks whose addresses stand for one IPv4 address and nothing else. If that address is allowed, so are they.

Networks without IPv4 reach IPv4 hosts through NAT64.
"""
_LOOPBACK_6 = ipaddress.IPv6Address("::1")
_INTERNAL_NETWORKS = tuple((ipaddress.ip_network(network), kind) for network, kind in _INTERNAL)
_NOBODYS_NETWORKS = tuple((ipaddress.ip_network(network), kind) for network, kind in _NOBODY)


def why_denied(address: Address, *, is_allowed_host: bool, allowed_networks: Sequence[Network]) -> str | None:
    """Return the kind of a forbidden address, such as ``loopback``, or None if the address may be dialled.

    Args:
        address: The address from the resolver.
        is_allowed_host: Whether the operator allowed the host name that has this address.
        allowed_networks: The networks that the operator allowed.
    """
    if any(address in network for network in allowed_networks):
        return None
    inside = _inside(address)
    for part in inside:
        kind = why_denied(part, is_allowed_host=is_allowed_host, allowed_networks=allowed_networks)
        if kind is not None:
            return kind
    if inside and any(address in network for network in _TRANSPARENT):
        return None
    kind = _kind(_NOBODYS_NETWORKS, address)
    if kind is not None:
        return kind
    kind = _kind(_INTERNAL_NETWORKS, address)
    if kind is not None:
        return None if is_allowed_host else kind
    return "reserved" if isinstance(address, ipaddress.IPv6Address) and address not in _GLOBAL_UNICAST else None


def _inside(address: Address) -> list[Address]:
    """Return the IPv4 addresses that an IPv6 address carries, as in NAT64, 6to4 or Teredo."""
    if not isinstance(address, ipaddress.IPv6Address) or address == _LOOPBACK_6:
        return []
    found: list[Address] = [
        ipaddress.IPv4Address((int(address) >> shift) & 0xFFFFFFFF)
        for network, shift in _CARRIERS
        if address in network
    ]
    if address in _TEREDO:
        found.append(ipaddress.IPv4Address(~int(address) & 0xFFFFFFFF))
    return found


def _kind(networks: Sequence[tuple[Network, str]], address: Address) -> str | None:
    return next((kind for network, kind in networks if address in network), None)
