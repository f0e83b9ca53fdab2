"""Which addresses a request may be sent to: tables, pure, the same at create and at send.

Only globally routable unicast addresses are targets. `ipaddress`'s own `is_global` is not enough (Python 3.11
calls multicast, 192.0.0.192, 64:ff9b:1::/48, 2002::/16 and 3fff::/20 global), so the tables below follow the
IANA special-purpose registries (RFC 6890 and its updates), and IPv6 is refused outside 2000::/3 altogether.

Addresses that carry an IPv4 address inside: v4-mapped ones are judged by what they carry, because the kernel
connects to exactly that; NAT64 (64:ff9b::/96, RFC 6052) too, because IPv6-only clusters reach public targets
through it, but never with an allowance. 6to4, Teredo, ISATAP, v4-compatible and local-use NAT64 are refused
whatever they carry.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from types import MappingProxyType

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

LOOPBACK: tuple[Network, ...] = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
"""For `AddressPolicy.allowed_networks` on a developer's machine and in tests, never in production."""

REFUSED = "the target's address is not one that requests may be sent to (only public addresses are)"
"""The one text for every refused address, literal or resolved: a varying text would be a map of the inner
network."""

# https://fetch.spec.whatwg.org/#port-blocking: services that misread an HTTP request as their own protocol.
# fmt: off
UNSAFE_PORTS: frozenset[int] = frozenset({
    0, 1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95, 101,
    102, 103, 104, 109, 110, 111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161, 179, 389, 427,
    465, 512, 513, 514, 515, 526, 530, 531, 532, 540, 548, 554, 556, 563, 587, 601, 636, 989, 990,
    993, 995, 1719, 1720, 1723, 2049, 3659, 4045, 4190, 5060, 5061, 6000, 6566, 6665, 6666, 6667,
    6668, 6669, 6679, 6697, 10080,
})
# fmt: on


@dataclass(frozen=True, slots=True)
class AddressPolicy:
    """What an installation allows beyond, and refuses besides, the built-in tables.

    `allowed_networks` opens networks that the tables refuse (an operator's inner targets, loopback in
    development); cloud metadata addresses stay refused even inside them. `refused_networks` closes more, for
    example the installation's own public addresses or its own NAT64 prefix, and wins over what is allowed.
    """

    allowed_networks: tuple[Network, ...] = ()
    refused_networks: tuple[Network, ...] = ()
    schemes: frozenset[str] = field(default=frozenset({"http", "https"}))
    refused_ports: frozenset[int] = UNSAFE_PORTS


PUBLIC_ONLY = AddressPolicy()
WITH_LOOPBACK = AddressPolicy(allowed_networks=LOOPBACK)


def _table(*rows: tuple[str, str]) -> tuple[tuple[Network, str], ...]:
    return tuple((ip_network(network), reason) for network, reason in rows)


# Instance metadata, credentials and host agents of AWS, GCP, Azure, Alibaba and Oracle; link-local with them.
_NEVER: Mapping[int, tuple[tuple[Network, str], ...]] = MappingProxyType(
    {
        4: _table(
            ("169.254.0.0/16", "link_local"),
            ("168.63.129.16/32", "metadata"),
            ("100.100.100.200/32", "metadata"),
            ("192.0.0.192/32", "metadata"),
        ),
        6: _table(
            ("fe80::/10", "link_local"), ("fd00:ec2::/32", "metadata"), ("fd20:ce::254/128", "metadata")
        ),
    }
)

# https://www.iana.org/assignments/iana-ipv4-special-registry, all of 224.0.0.0/3 included.
_IPV4 = _table(
    ("0.0.0.0/8", "unspecified"),
    ("10.0.0.0/8", "private"),
    ("100.64.0.0/10", "shared"),
    ("127.0.0.0/8", "loopback"),
    ("172.16.0.0/12", "private"),
    ("192.0.0.0/24", "reserved"),
    ("192.0.2.0/24", "documentation"),
    ("192.88.99.0/24", "transition"),
    ("192.168.0.0/16", "private"),
    ("198.18.0.0/15", "benchmark"),
    ("198.51.100.0/24", "documentation"),
    ("203.0.113.0/24", "documentation"),
    ("224.0.0.0/4", "multicast"),
    ("240.0.0.0/4", "reserved"),
)

# https://www.iana.org/assignments/iana-ipv6-special-registry; what is neither here nor in 2000::/3 is
# "reserved".
_IPV6 = _table(
    ("::/128", "unspecified"),
    ("::1/128", "loopback"),
    ("::/96", "transition"),
    ("64:ff9b:1::/48", "transition"),
    ("2001::/32", "transition"),
    ("2001::/23", "reserved"),
    ("2001:db8::/32", "documentation"),
    ("2002::/16", "transition"),
    ("3fff::/20", "documentation"),
    ("fc00::/7", "private"),
    ("fec0::/10", "private"),
    ("ff00::/8", "multicast"),
)
_GLOBAL_UNICAST = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")
_ISATAP = frozenset({0x0000_5EFE, 0x0200_5EFE})
"""Bits 64 to 95 of an ISATAP address (RFC 5214, section 6.1)."""


def verdict(address: str, policy: AddressPolicy) -> str | None:
    """None when a request may be sent to `address` (a canonical literal), else one word saying why not.

    The word is for logs and tests; people are told `REFUSED`, whatever the reason was.
    """
    try:
        parsed = ip_address(address)
    except ValueError:
        return "not_an_address"
    return _judge(parsed, policy)


def _judge(address: Address, policy: AddressPolicy) -> str | None:
    never = _never(address)
    if never is not None:
        return never
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return _judge(address.ipv4_mapped, policy)
    if any(address in network for network in policy.refused_networks):
        return "configured"
    if any(address in network for network in policy.allowed_networks):
        return None
    return _first_match(address, _IPV4) if isinstance(address, IPv4Address) else _judge_ipv6(address, policy)


def _never(address: Address) -> str | None:
    if isinstance(address, IPv6Address) and address.scope_id is not None:
        return "scoped"
    return _first_match(address, _NEVER[address.version])


def _judge_ipv6(address: IPv6Address, policy: AddressPolicy) -> str | None:
    if address in _NAT64:
        return _judge(IPv4Address(int(address) & 0xFFFF_FFFF), replace(policy, allowed_networks=()))
    if (int(address) >> 32) & 0xFFFF_FFFF in _ISATAP:
        return "transition"
    listed = _first_match(address, _IPV6)
    return listed or (None if address in _GLOBAL_UNICAST else "reserved")


def _first_match(address: Address, table: tuple[tuple[Network, str], ...]) -> str | None:
    return next((reason for network, reason in table if address in network), None)


_LOCALHOST = re.compile(r"(?:.*\.)?localhost\.?", re.ASCII | re.IGNORECASE)


def host_problem(host: str, policy: AddressPolicy) -> str | None:
    """What is wrong with `host` (normalised by `app.domain.url`) as far as its text tells, or None.

    A literal is judged like a resolved address. `localhost` and names below it are loopback by definition
    (RFC 6761, section 6.3). Every other name is judged when it is resolved, at each connection.
    """
    if _LOCALHOST.fullmatch(host):
        return REFUSED if verdict("127.0.0.1", policy) and verdict("::1", policy) else None
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return None
    return REFUSED if _judge(address, policy) else None


def origin_problem(scheme: str, host: str, port: int, policy: AddressPolicy) -> str | None:
    """What `policy` says against sending to this origin, as far as its text tells, or None."""
    if scheme not in policy.schemes:
        allowed = " and ".join(sorted(policy.schemes))
        return f"the scheme {scheme} is not allowed here; allowed: {allowed}"
    if port in policy.refused_ports:
        return f"port {port} belongs to another protocol and is not allowed"
    return host_problem(host, policy)
