"""A worker's end of the NCCL wire, as vLLM's engine speaks it, on the second GPU; run as a process of its own.

Reads one JSON line with the unique id and the announcement, prints one with the sum of every parameter.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch


def main() -> None:
    from vllm.distributed.weight_transfer import nccl_common
    from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer

    rendezvous: Any = nccl_common

    order: dict[str, Any] = json.loads(sys.stdin.readline())
    torch.cuda.set_device(1)
    identifier = rendezvous.decode_nccl_unique_id(
        master_address=None, master_port=None, nccl_unique_id_b64=order["unique_id"], ctx="nccl_peer"
    )
    group = rendezvous.uid_init_process_group(identifier, 1, 2, torch.device("cuda", 1))
    sums: dict[str, float] = {}

    def announced() -> Iterator[tuple[str, tuple[list[int], torch.dtype]]]:
        for name, shape in order["shapes"].items():
            yield name, (shape, torch.float32)

    def load(weights: list[tuple[str, torch.Tensor]]) -> None:
        sums.update((name, float(tensor.sum())) for name, tensor in weights)

    packed_nccl_broadcast_consumer(
        iterator=announced(),
        group=group,
        src=0,
        post_unpack_func=load,
        buffer_size_bytes=order["buffer_bytes"],
        device=torch.device("cuda", 1),
    )
    sys.stdout.write(json.dumps(sums) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
