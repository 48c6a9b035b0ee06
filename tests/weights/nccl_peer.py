"""A worker's end of the NCCL wire, on the second GPU; run as a separate process.

Reads one JSON line with the unique id and the announcement, and prints one with the sum of every parameter.
"""

import json
import sys
from typing import Any

import torch

from shared.weights.parameter_spec import Spec


def main() -> None:
    from services.generator.worker.nccl_wire import NcclWire
    from services.generator.worker.weight_wires import receive_chunks

    order: dict[str, Any] = json.loads(sys.stdin.readline())
    torch.cuda.set_device(1)
    wire = NcclWire(
        unique_id=order["unique_id"],
        rank=1,
        world_size=2,
        device=torch.device("cuda", 1),
        timeout_s=100.0,
        is_given_up=lambda: False,
    )
    specs = [Spec(name, torch.float32, tuple(shape)) for name, shape in order["shapes"].items()]
    sums = {
        name: float(tensor.sum())
        for chunk in receive_chunks(wire, specs, buffer_bytes=order["buffer_bytes"], timeout_s=30.0)
        for name, tensor in chunk
    }
    wire.leave()
    sys.stdout.write(json.dumps(sums) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
