"""The generator's half of a measured push: ``python -m benchmarks.bench_push_model.receiving_process PORT ROUNDS``.

    phases of this process --> [meet] the trainer's --> [meet] bare broadcasts --> [meet] a push, loaded --> [meet]

Reads the announcement as JSON from standard input. After each round it writes the times of all phases as one line of
JSON.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from services.generator.worker.gloo_wire import GlooWire
from services.generator.worker.staged_weights import StagedWeights, digest
from services.generator.worker.weight_wires import receive_version
from shared.weights.parameter_spec import Spec, cut

TIMEOUT_S = 300.0
_ResultT = TypeVar("_ResultT")


class Timer:
    """Seconds of phases, by the clock and of this process's CPU."""

    def __init__(self) -> None:
        self.phases: dict[str, tuple[float, float]] = {}

    def time(self, phase: str, work: Callable[[], _ResultT]) -> _ResultT:
        """Return the result of ``work``, and note how long it took."""
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        self.phases[phase] = time.perf_counter() - wall, time.process_time() - cpu
        return result


def main() -> None:
    """Take part in all rounds."""
    torch.set_num_threads(1)
    announced: dict[str, Any] = json.load(sys.stdin)
    buffer_bytes = int(announced["buffer_bytes"])
    specs = [
        Spec(name, getattr(torch, dtype), tuple(shape))
        for name, dtype, shape in zip(announced["names"], announced["dtypes"], announced["shapes"], strict=True)
    ]
    wire = GlooWire(master_address="127.0.0.1", master_port=int(sys.argv[1]), rank=1, world_size=2, timeout_s=TIMEOUT_S)
    staged = StagedWeights(specs)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in staged.tensors.items()}
    sizes = [sum(spec.num_bytes for spec in chunk) for chunk in cut(specs, buffer_bytes)]

    def copy(targets: dict[str, Tensor], sources: dict[str, Tensor]) -> None:
        for name, tensor in sources.items():
            targets[name].copy_(tensor)

    def meet() -> None:
        wire.confirm(deadline=time.monotonic() + TIMEOUT_S)

    def broadcasts() -> None:
        for size in sizes:
            wire.receive(torch.empty(size, dtype=torch.uint8), deadline=time.monotonic() + TIMEOUT_S)
        meet()

    def push() -> str:
        what = {"timeout_s": TIMEOUT_S}
        receive_version(staged, wire, what, buffer_bytes=buffer_bytes)
        checksum = staged.checksum()
        copy(loaded, staged.tensors)
        meet()
        return checksum

    copy(staged.tensors, loaded)  # memory is taken before the first round
    for _ in range(int(sys.argv[2])):
        timer = Timer()
        timer.time("stage", lambda: copy(staged.tensors, loaded))
        timer.time("digest", lambda: [digest(tensor) for tensor in staged.tensors.values()])
        timer.time("load", lambda: copy(loaded, staged.tensors))
        meet()  # the trainer measures its own phases
        meet()
        timer.time("send", broadcasts)
        checksum = timer.time("push", push)
        sys.stdout.write(json.dumps({"phases": timer.phases, "checksum": checksum}) + "\n")
        sys.stdout.flush()
    wire.leave()


if __name__ == "__main__":
    main()
