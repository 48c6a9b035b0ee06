"""Ports for processes that a test starts later, and for addresses at which nobody answers.

A port that was only looked for is somebody else's when the process binds it half a minute later, and another test's
server answers in its place.
"""

import atexit

from headrace.held_port import HeldPort

_kept: list[HeldPort] = []


def kept_port() -> int:
    """Return a port of 127.0.0.1 that is held until this process ends, so that nobody is given it by chance.

    Callers are refused until a process that is told the port binds it.
    """
    port = HeldPort()
    port.let_bind()
    _kept.append(port)
    return port.number


@atexit.register
def _give_back() -> None:
    for port in _kept:
        port.close()
