"""NCCL uses the network interface of the address at which others reach this process."""

import socket

import pytest

from shared import interfaces
from shared.interfaces import interface_of, let_nccl_use

pytestmark = pytest.mark.unit


def own_address() -> str:
    """Return an address of this machine other than loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a UDP connect, which sends nothing
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


def test_an_address_has_the_interface_that_it_was_given_to() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("localhost") == "lo"
    assert interface_of("192.0.2.1") is None, "an address for documentation, which no interface has"
    found = interface_of(own_address())
    assert found != "lo"
    assert found in {name for _, name in socket.if_nameindex()}


def test_a_name_that_does_not_resolve_is_an_error_and_not_no_interface() -> None:
    with pytest.raises(OSError, match=r"not known|resolution"):
        interface_of("no-such-machine.invalid")


def test_nccl_gets_exactly_the_interface_of_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "interface_of", {"trainer-weights": "eth4", "127.0.0.1": "lo"}.get)
    environment: dict[str, str] = {}
    let_nccl_use("127.0.0.1", environment)
    let_nccl_use("10.9.8.7", environment)
    assert environment == {}, "loopback does not reach another machine, and a foreign address is not ours"
    let_nccl_use("trainer-weights", environment)
    assert environment == {"NCCL_SOCKET_IFNAME": "=eth4"}


def test_an_interface_from_the_environment_is_kept() -> None:
    environment = {"NCCL_SOCKET_IFNAME": "ib0"}
    let_nccl_use("127.0.0.1", environment)
    assert environment == {"NCCL_SOCKET_IFNAME": "ib0"}
