"""Decides which URLs reward endpoints may have: parses the URL once, and checks every address of its host.

    URL --parse (httpx)--> scheme, host, port --> port allowed? --> resolve --> every address allowed? --> connect

Connections use the result of this parse: no second parser reads the text. The addresses are checked again at each
connect (pinned_network.py), because a host name that is harmless now may have another address at the next lookup.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from services.rewarder.endpoints.transport.addresses import Address, Network, why_denied
from shared.errors import UserError

MAX_URL_CHARACTERS = 2000
DEFAULT_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?\.?|\[[0-9a-f:.]+\]")
_ALLOWED_HOST = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|(\*\.)?[A-Za-z0-9_.-]+)(:(?P<port>\d{1,5}|\*))?")


class ForbiddenTargetError(UserError):
    """The URL, or an address of its host, is not allowed for reward endpoints."""


@dataclass(frozen=True)
class AllowedHost:
    """A host that may have an internal address, because the operator allows it.

    ``port`` None means the ports that all endpoints may use, 0 means all ports, and a number only that port.
    """

    host: str
    port: int | None = None

    def covers(self, host: str) -> bool:
        """Return whether ``host`` is this entry's host, or a subdomain of ``domain`` if the entry is ``*.domain``."""
        name = host.rstrip(".")
        return name == self.host or (self.host.startswith("*.") and name.endswith(self.host[1:]))

    def opens(self, host: str, port: int) -> bool:
        """Return whether this entry allows ``host`` at ``port``. Another port of the host may be another service."""
        return self.covers(host) and self.port in (None, 0, port)


@dataclass(frozen=True)
class OutboundRules:
    """The operator's rules: the allowed ports, and the hosts and networks allowed besides public addresses."""

    hosts: tuple[AllowedHost, ...] = ()
    networks: tuple[Network, ...] = ()
    ports: tuple[tuple[int, int], ...] = ((80, 80), (443, 443))

    def parse(self, text: str) -> httpx.URL:
        """Parse a URL and check its form, scheme and port.

        Raises:
            ForbiddenTargetError: The URL is not allowed; the message says why.
        """
        if len(text) > MAX_URL_CHARACTERS:
            raise ForbiddenTargetError(f"the URL has more than {MAX_URL_CHARACTERS} characters")
        if not text.isascii() or "\\" in text or any(character <= " " or character == "\x7f" for character in text):
            raise ForbiddenTargetError(
                "the URL has a backslash, a space, a control character or a letter outside ASCII; write an "
                "international name in its xn-- form, and %-escape the rest"
            )
        try:
            url = httpx.URL(text)
            host, port = url.raw_host.decode("ascii"), url.port
        except (httpx.InvalidURL, ValueError) as error:
            raise ForbiddenTargetError("the URL cannot be parsed; write it as https://host/path") from error
        if url.scheme not in DEFAULT_PORTS:
            raise ForbiddenTargetError("the URL must begin with https:// or http://")
        if url.userinfo or "@" in text.partition("://")[2].partition("/")[0]:
            raise ForbiddenTargetError("the URL has a user or password in it; use a header with a secret instead")
        if url.fragment or "#" in text:
            raise ForbiddenTargetError("the URL has a #fragment, which is never sent; leave it out")
        if not _HOST.fullmatch(_bracketed(host)):
            raise ForbiddenTargetError(
                "the URL has no host, or a host with characters that are not allowed in host names"
            )
        self._check_port(host, DEFAULT_PORTS[url.scheme] if port is None else port)
        return url

    def check_addresses(self, host: str, port: int, addresses: Sequence[Address]) -> None:
        """Raise ForbiddenTargetError unless all the addresses may be dialled at ``port``.

        One allowed address is not enough, because the owner of the name decides the order of the addresses.
        """
        is_allowed_host = self.is_allowed_host(host, port)
        for address in addresses:
            kind = why_denied(address, is_allowed_host=is_allowed_host, allowed_networks=self.networks)
            if kind is not None:
                is_enough = why_denied(address, is_allowed_host=True, allowed_networks=self.networks) is None
                hosts = "HEADRACE_REWARD_ALLOWED_HOSTS or " if is_enough else ""
                raise ForbiddenTargetError(
                    f"{host} has an address that is {kind}, which reward endpoints may not have; an operator allows it "
                    f"with {hosts}HEADRACE_REWARD_ALLOWED_NETWORKS of the rewarder"
                )

    def is_allowed_host(self, host: str, port: int) -> bool:
        """Return whether an entry of the operator names this host with this port, with all ports, or without a port."""
        return any(allowed.opens(host, port) for allowed in self.hosts)

    def is_named_by_operator(self, host: str, port: int) -> bool:
        """Return whether the operator allowed this host, or, if it is an address, a network that contains it."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return self.is_allowed_host(host, port)
        return self.is_allowed_host(host, port) or any(address in network for network in self.networks)

    def _check_port(self, host: str, port: int) -> None:
        if any(first <= port <= last for first, last in self.ports):
            return
        if 1 <= port <= 65535 and any(allowed.port in (port, 0) for allowed in self.hosts if allowed.covers(host)):
            return
        raise ForbiddenTargetError(
            f"reward endpoints may not use port {port}; an operator allows it with "
            f"HEADRACE_REWARD_ALLOWED_PORTS, or with {_bracketed(host)}:{port} in HEADRACE_REWARD_ALLOWED_HOSTS"
        )


def target(url: httpx.URL) -> tuple[str, int]:
    """Return the host and the port of a parsed URL. An international host name stays in its xn-- form."""
    return url.raw_host.decode("ascii"), DEFAULT_PORTS[url.scheme] if url.port is None else url.port


def parse_hosts(text: str) -> tuple[AllowedHost, ...]:
    """Parse a list of hosts, such as ``judge.internal,*.svc.cluster.local:8080,127.0.0.1:*``; raises ValueError."""
    found: list[AllowedHost] = []
    for entry in _entries(text):
        match = _ALLOWED_HOST.fullmatch(entry)
        if match is None:
            raise ValueError(f"'{entry}' is not a host; write name, name:port, name:* or *.domain")
        port = match["port"]
        host = match["host"].strip("[]").lower().rstrip(".")
        found.append(AllowedHost(host, None if port is None else 0 if port == "*" else _port(port)))
    return tuple(found)


def parse_networks(text: str) -> tuple[Network, ...]:
    """Parse a list of networks, such as ``10.1.0.0/16,fd00::/8``; raises ValueError."""
    found: list[Network] = []
    for entry in _entries(text):
        try:
            found.append(ipaddress.ip_network(entry))
        except ValueError as error:
            raise ValueError(f"'{entry}' is not a network; write 10.1.0.0/16 or fd00::/8") from error
    return tuple(found)


def parse_ports(text: str) -> tuple[tuple[int, int], ...]:
    """Parse a list of ports, such as ``80,443,8000-8999``, into ranges of first and last port; raises ValueError."""
    found: list[tuple[int, int]] = []
    for entry in _entries(text):
        first, _, last = entry.partition("-")
        found.append((_port(first), _port(last or first)))
    return tuple(found)


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ValueError(f"'{text}' is not a port; write a number from 1 to 65535, or a range like 8000-8999")
    return int(text)


def _entries(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
