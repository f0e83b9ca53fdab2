"""Which addresses are targets: by the registries' tables, by every embedding of an IPv4 address, and at
random."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain.address import (
    PUBLIC_ONLY,
    REFUSED,
    WITH_LOOPBACK,
    AddressPolicy,
    host_problem,
    origin_problem,
    verdict,
)

REFUSED_NETWORKS = {
    "unspecified": ["0.0.0.0/8", "::/128"],
    "private": ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fec0::/10"],
    "shared": ["100.64.0.0/10"],
    "loopback": ["127.0.0.0/8", "::1/128"],
    "link_local": ["169.254.0.0/16", "fe80::/10"],
    "benchmark": ["198.18.0.0/15"],
    "documentation": ["192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20"],
    "multicast": ["224.0.0.0/4", "ff00::/8"],
    "reserved": [
        "192.0.0.0/24",
        "240.0.0.0/4",
        "100::/64",
        "5f00::/16",
        "2001:10::/28",
        "2001:20::/28",
        "4000::/3",
    ],
    "transition": ["192.88.99.0/24", "64:ff9b:1::/48", "2001::/32", "2002::/16"],
    "metadata": [
        "168.63.129.16/32",
        "100.100.100.200/32",
        "192.0.0.192/32",
        "fd00:ec2::/32",
        "fd20:ce::254/128",
    ],
}

PUBLIC = [
    *("1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255"),
    *(
        "128.0.0.0",
        "169.253.255.255",
        "169.255.0.0",
        "172.15.255.255",
        "172.32.0.0",
        "192.0.1.0",
        "192.0.3.0",
    ),
    *("192.31.196.1", "192.88.98.255", "192.88.100.0", "192.167.255.255", "192.169.0.0", "198.17.255.255"),
    *("198.20.0.0", "198.51.99.255", "198.51.101.0", "203.0.112.255", "203.0.114.0", "223.255.255.255"),
    *(
        "2000::",
        "2001:200::",
        "2001:4860:4860::8888",
        "2001:db7::",
        "2001:db9::",
        "2003::",
        "2606:4700::1111",
    ),
    *("2a00:1450::1", "3ffe::1", "3fff:1000::", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"),
]


@pytest.mark.parametrize(
    ("network", "reason"),
    [(network, reason) for reason, networks in REFUSED_NETWORKS.items() for network in networks],
)
def test_the_first_the_last_and_a_middle_address_of_a_refused_network_are_refused(
    network: str, reason: str
) -> None:
    whole = ip_network(network)
    first, last = int(whole.network_address), int(whole.broadcast_address)
    for number in (first, last, (first + last) // 2):
        address = IPv4Address(number) if whole.version == 4 else IPv6Address(number)
        assert verdict(str(address), PUBLIC_ONLY) == reason


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_up_to_the_edges_of_the_refused_ones_are_allowed(address: str) -> None:
    assert verdict(address, PUBLIC_ONLY) is None


@pytest.mark.parametrize(
    "address",
    [
        "",
        "127.1",
        "0x7f.1",
        "2130706433",
        "127.0.0.01",
        "1.1.1.1.",
        "example.com",
        "1.1.1.1/32",
        "fe80::1%",
        "::1%lo",
    ],
)
def test_what_is_no_canonical_address_is_refused(address: str) -> None:
    assert verdict(address, PUBLIC_ONLY) is not None


# What wraps an IPv4 address, as RFC 4291 (mapped, compatible), 6052 (NAT64), 8215 (local NAT64), 3056 (6to4),
# 4380 (Teredo: server in the clear, client inverted) and 5214 (ISATAP) say.
def mapped(inner: int) -> int:
    return 0xFFFF << 32 | inner


def compatible(inner: int) -> int:
    return inner


def nat64(inner: int) -> int:
    return 0x64FF9B << 96 | inner


def local_nat64(inner: int) -> int:
    return 0x64FF9B0001 << 80 | inner


def six_to_four(inner: int) -> int:
    return 0x2002 << 112 | inner << 80 | 1


def teredo_server(inner: int) -> int:
    return 0x20010000 << 96 | inner << 64 | 0xF7F7F7F7


def teredo_client(inner: int) -> int:
    return 0x20010000 << 96 | 0x08080808 << 64 | inner ^ 0xFFFFFFFF


def isatap(inner: int) -> int:
    return 0x2606_4700 << 96 | 0x5EFE << 32 | inner


WRAPPERS = [mapped, compatible, nat64, local_nat64, six_to_four, teredo_server, teredo_client, isatap]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize(
    "inner",
    ["127.0.0.1", "10.0.0.1", "169.254.169.254", "192.168.1.1", "100.100.100.200", "0.0.0.0", "224.0.0.1"],
)
def test_a_refused_ipv4_address_is_refused_in_every_wrapping(wrap, inner: str) -> None:  # type: ignore[no-untyped-def]
    address = str(IPv6Address(wrap(int(IPv4Address(inner)))))
    assert verdict(address, PUBLIC_ONLY) is not None
    if wrap is not mapped:
        assert verdict(address, AddressPolicy(allowed_networks=(ip_network("0.0.0.0/0"),))) is not None


@given(st.sampled_from(WRAPPERS), st.integers(0, 2**32 - 1))
def test_a_wrapping_is_never_allowed_where_what_it_carries_is_not(wrap, inner: int) -> None:  # type: ignore[no-untyped-def]
    if verdict(str(IPv4Address(inner)), PUBLIC_ONLY) is not None:
        assert verdict(str(IPv6Address(wrap(inner))), PUBLIC_ONLY) is not None


@given(st.integers(0, 2**32 - 1).map(IPv4Address) | st.integers(0, 2**128 - 1).map(IPv6Address))
def test_what_python_calls_not_global_or_multicast_is_never_allowed(
    address: IPv4Address | IPv6Address,
) -> None:
    """Python's opinion as a second one: ours may be stricter, never laxer (NAT64 is judged by what it
    carries)."""
    if verdict(str(address), PUBLIC_ONLY) is None and address not in ip_network("64:ff9b::/96"):
        inner = getattr(address, "ipv4_mapped", None) or address
        assert inner.is_global
        assert not any((inner.is_multicast, inner.is_reserved, inner.is_loopback, inner.is_link_local))


def test_loopback_is_allowed_only_where_it_is_said_and_nothing_else_with_it() -> None:
    for address in ("127.0.0.1", "127.255.255.255", "::1", "::ffff:127.0.0.1"):
        assert verdict(address, WITH_LOOPBACK) is None
        assert verdict(address, PUBLIC_ONLY) == "loopback"
    for address in (
        "10.0.0.1",
        "0.0.0.0",
        "::",
        "169.254.169.254",
        "64:ff9b::7f00:1",
        "::127.0.0.1",
        "::1%lo",
    ):
        assert verdict(address, WITH_LOOPBACK) is not None


def test_metadata_is_refused_even_inside_an_allowed_network() -> None:
    everything = AddressPolicy(allowed_networks=(ip_network("0.0.0.0/0"), ip_network("::/0")))
    assert verdict("10.0.0.1", everything) is None
    assert verdict("fd00::1", everything) is None
    for address in ("169.254.169.254", "169.254.170.2", "168.63.129.16", "100.100.100.200", "192.0.0.192"):
        assert verdict(address, everything) is not None
        assert verdict(f"::ffff:{address}", everything) is not None
    assert verdict("fd00:ec2::254", everything) is not None
    assert verdict("fe80::1", everything) is not None


def test_an_operators_refusal_wins_over_an_allowance() -> None:
    policy = AddressPolicy(
        allowed_networks=(ip_network("10.0.0.0/8"),),
        refused_networks=(ip_network("10.1.0.0/16"), ip_network("93.184.216.0/24")),
    )
    assert verdict("10.2.0.1", policy) is None
    assert verdict("10.1.0.1", policy) == "configured"
    assert verdict("93.184.216.34", policy) == "configured"
    assert verdict("::ffff:10.1.0.1", policy) == "configured"


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "::1", "[::1]", "localhost", "LocalHost.", "a.localhost", "::ffff:a00:1", "10.0.0.1"],
)
def test_a_refused_host_has_one_text_whatever_the_reason(host: str) -> None:
    assert host_problem(host, PUBLIC_ONLY) == REFUSED


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "api.localhost"])
def test_a_loopback_host_is_no_problem_in_development(host: str) -> None:
    assert host_problem(host, WITH_LOOPBACK) is None


@pytest.mark.parametrize(
    "host", ["example.com", "notlocalhost", "localhost.example", "1.1.1.1", "2606:4700::1111"]
)
def test_a_name_or_public_literal_is_no_problem(host: str) -> None:
    assert host_problem(host, PUBLIC_ONLY) is None


def test_scheme_and_port_follow_the_policy() -> None:
    only_https = AddressPolicy(schemes=frozenset({"https"}))
    assert origin_problem("https", "example.com", 443, only_https) is None
    assert "allowed: https" in (origin_problem("http", "example.com", 80, only_https) or "")
    for port in (22, 25, 6667):
        assert str(port) in (origin_problem("https", "example.com", port, PUBLIC_ONLY) or "")
    assert origin_problem("http", "10.0.0.1", 8080, PUBLIC_ONLY) == REFUSED


def test_the_tables_hold_where_python_is_known_to_be_lax() -> None:
    """Documents why `is_global` is not asked; when Python learns better this list may shrink, the tables
    stay."""
    lax = ["224.0.1.1", "192.0.0.192", "64:ff9b:1::1", "2002:7f00:1::", "ff0e::1", "3fff::1"]
    for address in lax:
        assert verdict(address, PUBLIC_ONLY) is not None
    assert any(ip_address(address).is_global for address in lax)
