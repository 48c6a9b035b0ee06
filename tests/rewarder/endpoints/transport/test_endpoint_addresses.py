"""Allowed addresses of reward endpoints: the list of addresses, the format of URLs, and an operator's exceptions."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rewarder.endpoints.transport.addresses import why_denied
from services.rewarder.endpoints.transport.outbound_rules import (
    AllowedHost,
    ForbiddenTargetError,
    OutboundRules,
    parse_hosts,
    parse_networks,
    parse_ports,
)

pytestmark = pytest.mark.unit

PUBLIC = OutboundRules()


def denied(address: str, *, is_allowed_host: bool = False, networks: str = "") -> str | None:
    return why_denied(
        ipaddress.ip_address(address), is_allowed_host=is_allowed_host, allowed_networks=parse_networks(networks)
    )


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8", "2002:808:808::1", "172.32.0.1"],
)
def test_public_addresses_may_be_dialled(address: str) -> None:
    assert denied(address) is None


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("127.0.0.1", "loopback"),
        ("127.255.255.254", "loopback"),
        ("::1", "loopback"),
        ("::ffff:127.0.0.1", "loopback"),
        ("::127.0.0.1", "loopback"),
        ("::ffff:0:127.0.0.1", "loopback"),
        ("64:ff9b::7f00:1", "loopback"),
        ("64:ff9b:1::7f00:1", "loopback"),
        ("2002:7f00:1::", "loopback"),
        ("2001:0:7f00:1::", "loopback"),
        ("2001:0:808:808::80ff:fffe", "loopback"),
        ("10.0.0.1", "private"),
        ("172.16.0.1", "private"),
        ("172.31.255.255", "private"),
        ("192.168.1.1", "private"),
        ("::ffff:10.0.0.1", "private"),
        ("100.64.0.1", "private (carrier-grade NAT)"),
        ("100.100.100.200", "cloud metadata"),
        ("fd00::1", "private"),
        ("fc00::1", "private"),
        ("0.0.0.0", "unspecified"),
        ("::", "unspecified"),
        ("0.1.2.3", "unspecified"),
        ("169.254.169.254", "link-local (cloud metadata)"),
        ("64:ff9b::a9fe:a9fe", "link-local (cloud metadata)"),
        ("fd00:ec2::254", "cloud metadata"),
        ("168.63.129.16", "cloud metadata"),
        ("192.0.0.192", "reserved"),
        ("192.0.2.1", "documentation"),
        ("198.18.0.1", "benchmarking"),
        ("198.51.100.7", "documentation"),
        ("203.0.113.9", "documentation"),
        ("224.0.0.1", "multicast"),
        ("239.255.255.250", "multicast"),
        ("240.0.0.1", "reserved"),
        ("255.255.255.255", "reserved"),
        ("fe80::1", "link-local"),
        ("fec0::1", "site-local"),
        ("ff02::1", "multicast"),
        ("100::1", "reserved"),
        ("5f00::1", "reserved"),
        ("2001:db8::1", "documentation"),
        ("2001:20::1", "reserved"),
        ("3fff::1", "documentation"),
        ("64:ff9b:1::808:808", "reserved"),
    ],
)
def test_everything_else_may_not(address: str, kind: str) -> None:
    assert denied(address) == kind


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "10.1.2.3", "100.64.0.1", "fd12::1", "::ffff:10.0.0.1"])
def test_a_host_that_the_operator_names_may_be_internal(address: str) -> None:
    assert denied(address, is_allowed_host=True) is None


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254", "100.100.100.200", "::ffff:100.100.100.200", "168.63.129.16", "0.0.0.0", "224.0.0.1",
        "fd00:ec2::254", "fd20:ce::254", "fe80::1", "64:ff9b::a9fe:a9fe",
    ],
)  # fmt: skip
def test_no_name_makes_a_metadata_service_an_endpoint(address: str) -> None:
    assert denied(address, is_allowed_host=True) is not None


@pytest.mark.parametrize(
    ("address", "opens_it"),
    [
        ("10.1.2.3", "HEADRACE_REWARD_ALLOWED_HOSTS or HEADRACE_REWARD_ALLOWED_NETWORKS"),
        ("169.254.169.254", "HEADRACE_REWARD_ALLOWED_NETWORKS"),
    ],
)
def test_a_refusal_names_the_settings_that_would_open_the_address_and_no_other(address: str, opens_it: str) -> None:
    with pytest.raises(ForbiddenTargetError, match=f"an operator allows it with {opens_it} of the rewarder"):
        PUBLIC.check_addresses("judge.example", 443, [ipaddress.ip_address(address)])


def test_an_allowed_network_opens_what_is_in_it_and_nothing_else() -> None:
    assert denied("10.1.2.3", networks="10.1.0.0/16") is None
    assert denied("::ffff:10.1.2.3", networks="10.1.0.0/16") is None
    assert denied("10.2.2.3", networks="10.1.0.0/16") == "private"
    assert denied("169.254.1.1", networks="169.254.1.0/24") is None


@given(st.ip_addresses(v=4))
def test_no_disguise_changes_the_verdict_on_an_ipv4_address(address: ipaddress.IPv4Address) -> None:
    bare = why_denied(address, is_allowed_host=False, allowed_networks=())
    for prefix in ("::ffff:0:0", "64:ff9b::"):
        disguised = ipaddress.IPv6Address(int(ipaddress.IPv6Address(prefix)) | int(address))
        assert why_denied(disguised, is_allowed_host=False, allowed_networks=()) == bare


@given(st.ip_addresses())
def test_addresses_that_python_knows_as_internal_are_never_allowed(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    if address.is_loopback or address.is_link_local or address.is_multicast or address.is_unspecified:
        assert why_denied(address, is_allowed_host=False, allowed_networks=()) is not None


@pytest.mark.parametrize(
    "url",
    [
        "https://judge.example/score", "https://judge.example:443/", "http://judge.example", "https://1.1.1.1/x?y=1",
        "https://[2606:4700::1111]/", "https://JUDGE.example/%41", "https://a_b.example./",
    ],
)  # fmt: skip
def test_ordinary_urls_are_taken(url: str) -> None:
    assert PUBLIC.parse(url).host


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("ftp://judge.example/", "must begin with https://"),
        ("unix:///run/judge.sock", "must begin with https://"),
        ("judge.example/score", "must begin with https://"),
        ("//judge.example/", "must begin with https://"),
        ("https:///score", "no host"),
        ("https://user@judge.example/", "a user or password"),
        ("https://user:password@judge.example/", "a user or password"),
        ("https://@judge.example/", "a user or password"),
        ("https://judge.example\\@127.0.0.1/", "a backslash"),
        ("http://127.0.0.1:80\\good/", "a backslash"),
        ("https://jüdge.example/", "outside ASCII"),
        ("http://\uff11\uff12\uff17.0.0.1/", "outside ASCII"),
        ("https://judge.example/a b", "a space"),
        ("https://judge.example/\r\nX: y", "a space, a control character"),
        ("https://judge.example/#part", "#fragment"),
        ("https://judge.example:8080/", "may not use port 8080;"),
        ("https://judge.example:22/", "may not use port 22;"),
        ("https://judge.example:0/", "may not use port 0;"),
        ("https://judge.example:99999/", "may not use port 99999;"),
        ("https://jud%2ege.example/", "characters that are not allowed in host names"),
        ("https://[fe80::1%25eth0]/", "characters that are not allowed in host names"),
        ("https://-judge.example/", "characters that are not allowed in host names"),
        ("https://" + "a" * 2000, "more than 2000 characters"),
    ],
)
def test_other_urls_are_refused_with_a_sentence(url: str, why: str) -> None:
    with pytest.raises(ForbiddenTargetError, match=why):
        PUBLIC.parse(url)


URL_PARTS = st.sampled_from(
    [
        "http",
        "https",
        "://",
        ":",
        "/",
        "\\",
        "@",
        "[",
        "]",
        "::1",
        "127.0.0.1",
        "judge.example",
        "%",
        "#",
        "?",
        "443",
        ".",
    ]
)


@given(st.text(max_size=20) | st.lists(URL_PARTS | st.text(max_size=2), max_size=8).map("".join))
def test_any_text_is_a_url_or_refused(text: str) -> None:
    try:
        url = PUBLIC.parse(text)
    except ForbiddenTargetError:
        return
    assert url.scheme in ("http", "https")
    assert url.host
    assert url.port in (None, 80, 443)


def test_an_operator_allows_ports_and_hosts() -> None:
    rules = OutboundRules(
        hosts=parse_hosts("judge.internal:8080, *.svc.cluster.local:*,[::1]:9000"),
        ports=parse_ports("443,8000-8010"),
    )
    assert rules.parse("https://anywhere.example:8005/")
    assert rules.parse("http://judge.internal:8080/")
    assert rules.parse("http://rm.team.svc.cluster.local:31000/")
    assert rules.parse("http://[::1]:9000/")
    for url in (
        "http://rm.svc.cluster.local:99999/",
        "http://rm.svc.cluster.local:0/",
        "http://judge.internal:8081/",
        "http://anywhere.example/",
        "http://svc.cluster.local:1/",
    ):
        with pytest.raises(ForbiddenTargetError, match="reward endpoints may not use port"):
            rules.parse(url)


def test_all_addresses_of_a_name_must_be_allowed() -> None:
    both = [ipaddress.ip_address("8.8.8.8"), ipaddress.ip_address("10.0.0.1")]
    with pytest.raises(ForbiddenTargetError, match=r"judge\.example has an address that is private, which"):
        PUBLIC.check_addresses("judge.example", 443, both)
    OutboundRules(hosts=(AllowedHost("judge.example"),)).check_addresses("judge.example", 443, both)


@pytest.mark.parametrize(
    ("allowed", "ports"),
    [("127.0.0.1:9000", [9000]), ("127.0.0.1:*", [80, 443, 9000]), ("127.0.0.1", [80, 443, 9000])],
)
def test_a_host_that_is_allowed_at_one_port_is_internal_at_no_other(allowed: str, ports: list[int]) -> None:
    rules, here = OutboundRules(hosts=parse_hosts(allowed)), [ipaddress.ip_address("127.0.0.1")]
    for port in (80, 443, 9000):
        assert rules.is_named_by_operator("127.0.0.1", port) == (port in ports)
        if port in ports:
            rules.check_addresses("127.0.0.1", port, here)
        else:
            with pytest.raises(ForbiddenTargetError, match="an address that is loopback"):
                rules.check_addresses("127.0.0.1", port, here)


@pytest.mark.parametrize("text", ["http://judge", "judge:0", "judge:99999", "judge:x", "*", "a b"])
def test_a_setting_that_is_not_a_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a (host|port)"):
        parse_hosts(text)


def test_settings_that_are_not_a_network_or_port_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'10\.0\.0\.1/8' is not a network"):
        parse_networks("10.0.0.1/8")
    for ports in ("x", "80-x", "-80", "0", "70000"):
        with pytest.raises(ValueError, match="is not a port; write a number from 1 to 65535"):
            parse_ports(ports)
