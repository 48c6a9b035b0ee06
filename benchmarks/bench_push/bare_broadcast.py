"""The bare broadcast: only torch's ProcessGroupGloo and two processes.

    this process, rank 0   [chunks] --broadcast--> rank 1, the child: into fresh memory    then one all-reduce: done

The child runs on the cores of vLLM's worker, so that it competes with decoding as a receiving generator does.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed

from benchmarks.local_generator import worker_placement
from headrace.local.cpu_placement import WORKER_CORES

c10d: Any = torch.distributed  # a binding to C++ without complete types
_TIMEOUT = timedelta(seconds=300)
_ADDRESS = "127.0.0.1"


class BareBroadcast:
    """Rank 0 and the child process.

    Args:
        chunks: One-dimensional uint8 tensors, packed as in a push.
    """

    def __init__(self, chunks: Sequence[torch.Tensor]) -> None:
        self._chunks = list(chunks)
        self._store: Any = c10d.TCPStore(_ADDRESS, 0, None, is_master=True, timeout=_TIMEOUT, wait_for_workers=False)
        sizes = json.dumps([chunk.numel() for chunk in self._chunks])
        command = [sys.executable, "-m", __name__, str(self._store.port), sizes]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **worker_placement()}
        self._child = subprocess.Popen(command, env=environment)
        self._group = _group(self._store, rank=0)

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the child."""
        if kind is None:
            _broadcast(self._group, torch.zeros(1, dtype=torch.int64))
            self._child.wait(timeout=30)
        self._child.kill()
        self._child.wait()

    def seconds(self) -> float:
        """Broadcast everything once, and return the seconds that it took. Blocks."""
        _broadcast(self._group, torch.ones(1, dtype=torch.int64))
        _meet(self._group)  # the child is ready
        began_at = time.perf_counter()
        for chunk in self._chunks:
            _broadcast(self._group, chunk)
        _meet(self._group)
        return time.perf_counter() - began_at


def _group(store: Any, *, rank: int) -> Any:
    options = c10d.ProcessGroupGloo._Options()  # noqa: SLF001  the only name it has
    options._timeout = _TIMEOUT  # noqa: SLF001
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=_ADDRESS)]  # noqa: SLF001
    return c10d.ProcessGroupGloo(c10d.PrefixStore("bare", store), rank, 2, options)


def _broadcast(group: Any, tensor: torch.Tensor) -> None:
    options = c10d.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    group.broadcast([tensor], options).wait()


def _meet(group: Any) -> None:
    group.allreduce([torch.zeros(1, dtype=torch.int64)], c10d.AllreduceOptions()).wait()


def _child(port: int, sizes: Sequence[int]) -> None:
    if cores := os.environ.get(WORKER_CORES):
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    store = c10d.TCPStore(_ADDRESS, port, None, is_master=False, timeout=_TIMEOUT)
    group = _group(store, rank=1)
    is_another = torch.ones(1, dtype=torch.int64)
    while True:
        _broadcast(group, is_another)
        if not is_another.item():
            return
        _meet(group)
        for size in sizes:
            _broadcast(group, torch.empty(size, dtype=torch.uint8))
        _meet(group)


if __name__ == "__main__":
    _child(int(sys.argv[1]), json.loads(sys.argv[2]))
