"""Which interface of this machine has an address: NCCL wants its name, and no order of names can be relied on.

An engine numbers the interfaces of a container as it likes, some of them anew at every start.
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
    """Return the interface that has an address, or one of those of a name; None if it is another machine's.

    Raises:
        OSError: The name does not resolve.
    """
    wanted = {ipaddress.ip_address(str(found[4][0]).partition("%")[0]) for found in socket.getaddrinfo(address, None)}
    return next((name for name, own in _own_addresses() if own in wanted), None)


def let_nccl_use(address: str, environment: MutableMapping[str, str]) -> None:
    """Make NCCL talk over the interface of an address, unless somebody has said which, or it is loopback.

    Raises:
        OSError: The name does not resolve.
    """
    if environment.get("NCCL_SOCKET_IFNAME"):
        return
    interface = interface_of(address)
    if interface is not None and interface != "lo":
        environment["NCCL_SOCKET_IFNAME"] = f"={interface}"  # exactly: eth1 alone would also mean eth10


def _own_addresses() -> Iterator[tuple[str, ipaddress.IPv4Address | ipaddress.IPv6Address]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            # One without an address of IPv4 is refused.
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield name, ipaddress.IPv4Address(answer[20:24])
    with contextlib.suppress(OSError):
        for line in _IPV6_ADDRESSES.read_text(encoding="ascii").splitlines():
            digits, *_, name = line.split()
            yield name, ipaddress.IPv6Address(bytes.fromhex(digits))
