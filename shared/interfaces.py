"""Finds the network interface that has an address. NCCL needs its name, and the order of names is not reliable.

A container engine numbers the interfaces of a container arbitrarily, and some engines differently at every start.
"""

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator, MutableMapping
from pathlib import Path

_SIOCGIFADDR = 0x8915
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def interface_of(address: str) -> str | None:
    """Return the name of this machine's interface that has ``address`` (an IP or a host name); None if none has it.

    Raises:
        OSError: The name does not resolve.
    """
    wanted = {ipaddress.ip_address(str(found[4][0]).partition("%")[0]) for found in socket.getaddrinfo(address, None)}
    return next((name for name, own in _own_addresses() if own in wanted), None)


def let_nccl_use(address: str, environment: MutableMapping[str, str]) -> None:
    """Set NCCL_SOCKET_IFNAME in ``environment`` to the interface of an address of this machine.

    The variable stays as it is if it has a value, if the interface is loopback, or if the address is another machine's.

    Raises:
        OSError: The name does not resolve.
    """
    if environment.get("NCCL_SOCKET_IFNAME"):
        return
    interface = interface_of(address)
    if interface is not None and interface != "lo":
        environment["NCCL_SOCKET_IFNAME"] = f"={interface}"  # "=" matches exactly: eth1 would also match eth10


def _own_addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            # An interface without an IPv4 address raises an error.
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, ipaddress.IPv4Address(answer[20:24])
    with contextlib.suppress(OSError):
        for line in _IPV6_ADDRESSES.read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            yield name, ipaddress.IPv6Address(bytes.fromhex(digits))
