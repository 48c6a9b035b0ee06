"""A worker's end of the wire within one GPU; run as a separate process.

Reads one JSON line with its part of the join body and the announcement, and prints one with the sum of every parameter.
"""

import json
import sys
from typing import Any

import torch

from services.generator.worker.disk_wire import DiskWire
from services.generator.worker.weight_wires import open_wire, receive_chunks
from shared.weights.parameter_spec import Spec


def main() -> None:
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    wire = open_wire(order["where"], rank=0, device=device)
    assert not isinstance(wire, DiskWire)
    specs = [Spec(name, torch.float32, tuple(shape)) for name, shape in order["shapes"].items()]
    sums: dict[str, float] = {}
    for chunk in receive_chunks(wire, specs, buffer_bytes=order["where"]["buffer_bytes"], timeout_s=60.0):
        for name, tensor in chunk:
            assert tensor.device == device
            sums[name] = float(tensor.sum())
    wire.leave()
    sys.stdout.write(json.dumps(sums) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
