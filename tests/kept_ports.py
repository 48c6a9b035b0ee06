"""Ports for processes that a test starts later, and for addresses at which nothing answers.

A port that was only found free may be taken when the process binds it half a minute later. Then another test's server
would answer in its place.
"""

import atexit

from headrace.local.held_port import HeldPort

_kept: list[HeldPort] = []


def kept_port() -> int:
    """Return a port of 127.0.0.1 that is held until this process ends, so that no other process is assigned it.

    Connections are refused until the process that is given the port binds it.
    """
    port = HeldPort()
    port.let_bind()
    _kept.append(port)
    return port.number


@atexit.register
def _give_back() -> None:
    for port in _kept:
        port.close()
