"""Forks engine cores from a process that has imported vLLM already. The import takes about 9 s of CPU time.

    python -m services.generator    imports vLLM at the same time
     +-- fork server                imports vLLM (preload.py), and waits
          +-- EngineCore            forked when a run needs one
          +-- engine check          forked when a run is submitted

vLLM starts its engine core with multiprocessing's ``spawn``. Here that method asks multiprocessing's fork server
instead. The fork server ends with this process, and the processes that it forked end with it (spawned.py). Workers of
an engine core are still spawned.

Used only with the CPU build: whether importing vLLM leaves CUDA untouched has not been tested.
"""

import multiprocessing
import os
import re
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import SpawnProcess
from typing import Any

from services.generator.engine import engine_failure
from services.generator.engine.vllm_environment import PARENT

_PLACES = ("GOMP_CPU_AFFINITY", "OMP_PLACES")
"""Variables in which vLLM tells OpenMP the cores of an engine core, as numbers."""


def start() -> None:
    """Start the fork server. Processes that this process spawns from now on are forked from that server.

    Does nothing with Intel's OpenMP, which cannot be set up after it was loaded.
    """
    if "iomp" in os.environ.get("LD_PRELOAD", ""):
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(["services.generator.engine.preload"])
    forkserver.ensure_running()
    SpawnProcess._Popen = staticmethod(_ForkedPopen)  # type: ignore[assignment]  # noqa: SLF001


class _ForkedPopen(popen_forkserver.Popen):
    """Forks a process from the fork server, with this process's environment and this thread's CPU cores."""

    def _launch(self, process_obj: Any) -> None:
        process_obj.surroundings = _Surroundings()
        super()._launch(process_obj)  # type: ignore[misc]


class _Surroundings:
    """Carries this process's environment variables and CPU affinity to a forked process.

    The forked process adopts them when it unpickles this object.
    """

    def __reduce__(self) -> Any:
        return _adopt, (dict(os.environ), os.sched_getaffinity(0))


def _adopt(variables: dict[str, str], cores: set[int]) -> None:
    import torch

    own = os.environ[PARENT]
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables | {PARENT: own})
    engine_failure.write_down_failures()  # one of the variables says where
    # OpenMP has read its variables when the fork server loaded it. Threads that it starts later inherit the cores.
    if (num_threads := variables.get("OMP_NUM_THREADS", "")).isdecimal():
        torch.set_num_threads(int(num_threads))
    places = next((variables[name] for name in _PLACES if name in variables), "")
    os.sched_setaffinity(0, {int(core) for core in re.findall(r"\d+", places)} or cores)
