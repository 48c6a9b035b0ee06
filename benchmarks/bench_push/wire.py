"""A network namespace for the benchmark, whose loopback is as slow as a network card.

    this process --exec--> unshare --net --> loopback up, tc tbf --exec--> this process again, under the rate

On loopback a broadcast is only a copy through the kernel. Between machines, the network takes most of the time.
Everything goes over this loopback: weights, HTTP and Redis, to the generator and back.
"""

import os
import shutil
import sys
from collections.abc import Sequence

_MARK = "HEADRACE_BENCH_WIRE"
_SET_UP = 'ip link set lo up && tc qdisc add dev lo root tbf rate "$0" burst 1mb limit 16mb && exec "$@"'


def is_set_up() -> bool:
    """Return whether this process was started by ``set_up``."""
    return _MARK in os.environ


def set_up(rate: str, arguments: Sequence[str]) -> None:
    """Restart the benchmark with these arguments, with loopback limited to ``rate`` (in tc's notation, such as
    ``1gbit``).
    """
    if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in ("unshare", "ip", "tc")):
        raise SystemExit("--wire needs root, and unshare, ip and tc (Debian: util-linux and iproute2)")
    os.environ[_MARK] = rate
    again = [sys.executable, "-m", "benchmarks.bench_push", *arguments]
    os.execvp("unshare", ["unshare", "--net", "sh", "-c", _SET_UP, rate, *again])
