"""Executes a command that gets SIGTERM when its parent dies and that can listen on its parent's sockets.

    launcher --> python guarded_exec.py PARENT_PID SOCKETS COMMAND... --exec--> COMMAND

This is a separate program because a function between fork and exec could deadlock with the launcher's threads. It is
run by its path in isolated mode, so it may import only the standard library.
"""

import ctypes
import fcntl
import os
import signal
import sys
from collections.abc import Mapping

_PR_SET_PDEATHSIG = 1
_FIRST_FD = 3


def guard(sockets: Mapping[str, int] | None = None) -> list[str]:
    """Return the arguments to put in front of a command so that it gets SIGTERM when this process dies.

    Args:
        sockets: File descriptors of sockets for the command to listen on, by name; see shared/serving/listening.py. The
            subprocess must inherit them.
    """
    listed = ",".join(f"{name}={descriptor}" for name, descriptor in (sockets or {}).items())
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), listed]


def main() -> None:
    """Ask the kernel for SIGTERM when the parent dies, then exec the command."""
    parent, listed, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the launcher died before this process began")
    if listed:
        _hand_on(dict(item.split("=") for item in listed.split(",")))
    os.execvp(command[0], command)


def _hand_on(sockets: Mapping[str, str]) -> None:
    """Move the sockets to descriptors 3, 4, ... and set the variables of sd_listen_fds(3)."""
    inherited = [int(descriptor) for descriptor in sockets.values()]
    out_of_the_way = max(*inherited, _FIRST_FD + len(inherited)) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, out_of_the_way) for descriptor in inherited]
    for descriptor in inherited:
        os.close(descriptor)
    for place, descriptor in enumerate(moved, _FIRST_FD):
        os.dup2(descriptor, place)
        os.close(descriptor)
    os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(moved)), "LISTEN_FDNAMES": ":".join(sockets)}


if __name__ == "__main__":
    main()
