"""Becomes another program that is asked to end when its parent dies.

    launcher --> python guarded_exec.py PARENT_PID COMMAND... --exec--> COMMAND

A program of its own instead of a function between fork and exec, which threads of the launcher could deadlock. Run by
path and isolated, so it may import the standard library alone.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def guard() -> list[str]:
    """Return what to put in front of a command so that it ends when this process dies."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid())]


def main() -> None:
    """Arrange for SIGTERM at the parent's death, then exec."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the launcher died before this process began")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
