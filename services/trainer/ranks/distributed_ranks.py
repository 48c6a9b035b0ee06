"""Several training ranks over torch.distributed: a mesh for weights, and a second group for commands and numbers.

    torchrun's store --+--> default group: gloo, and NCCL with GPUs     --> mesh: weights, gradients
                       +--> control group: gloo, always                 --> gather, send, receive
                       +--> words: why a rank failed (rank_words.py)

Messages are bytes and float64 arrays, with a length in front; nothing is pickled. Every wait ends: with a result, at
its deadline, or at once when the other process is gone, because its sockets close.
"""

import os
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed

from services.trainer.policy.ranks import Floats, RankLostError
from services.trainer.ranks.rank_words import read_words, root_cause
from services.trainer.torch_errors import first_line
from shared.errors import UserError

c10d: Any = torch.distributed  # a binding to C++ without complete types


class DistributedRanks:
    """Implements Ranks over torch.distributed, with messages between rank 0 and the others. `join_ranks` creates it.

    Args:
        rank: Number of this process among the ranks, from 0.
        size: Number of ranks.
        device: GPU or CPU of this rank; it decides whether collectives use NCCL.
        store: torch.distributed store that all ranks can reach.
        timeout_s: Longest duration of a collective, in seconds.
    """

    def __init__(self, *, rank: int, size: int, device: torch.device, store: Any, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.timeout_s = timeout_s
        self._store = store
        timeout = timedelta(seconds=timeout_s)
        try:
            c10d.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=c10d.PrefixStore("ranks", store),
                rank=rank,
                world_size=size,
                timeout=timeout,
            )
            self._control: Any = c10d.new_group(backend="gloo", timeout=timeout)
            self.mesh: Any = c10d.device_mesh.init_device_mesh(device.type, (size,))
        except (RuntimeError, ValueError) as error:
            raise RankLostError(f"the {size} training ranks did not come together: {first_line(error)}") from error

    def gather(self, array: Floats) -> list[Floats]:
        """Return the one-dimensional arrays of all ranks as float64, in rank order. Uses the gloo control group.

        Raises:
            RankLostError: Not every rank came in time.
        """
        own = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64))
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        try:
            c10d.all_gather(lengths, torch.tensor([own.numel()]), group=self._control)
            longest = max(int(length) for length in lengths)
            padded = torch.zeros(longest, dtype=torch.float64)
            padded[: own.numel()] = own
            arrays = [torch.zeros(longest, dtype=torch.float64) for _ in range(self.size)]
            if longest:
                c10d.all_gather(arrays, padded, group=self._control)
        except RuntimeError as error:
            raise self.lost("exchanging numbers", error) from error
        return [found[: int(length)].numpy() for found, length in zip(arrays, lengths, strict=True)]

    def send(self, messages: dict[int, bytes], *, timeout_s: float) -> None:
        """Send each rank its message, all concurrently.

        Raises:
            RankLostError: A rank did not receive its message in time.
        """
        works: list[Any] = []
        try:
            for rank, message in messages.items():
                # Copied, because torch warns about read-only memory.
                body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
                works.append((c10d.isend(torch.tensor([body.numel()]), group=self._control, group_dst=rank), None))
                works.append((c10d.isend(body, group=self._control, group_dst=rank), body))
            for work, _ in works:
                work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise self.lost(f"sending to rank {', '.join(map(str, messages))}", error) from error

    def receive(self, rank: int, *, timeout_s: float) -> bytes:
        """Return the next message of a rank.

        Raises:
            RankLostError: The message did not arrive in time.
        """
        try:
            length = torch.zeros(1, dtype=torch.int64)
            c10d.irecv(length, group=self._control, group_src=rank).wait(timedelta(seconds=timeout_s))
            body = torch.empty(int(length), dtype=torch.uint8)
            c10d.irecv(body, group=self._control, group_src=rank).wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise self.lost(f"waiting for rank {rank}", error) from error
        return body.numpy().tobytes()

    def lost(self, doing: str, error: BaseException) -> RankLostError:
        """Return the error that reports a lost peer. It quotes the reason that a failed rank stored, or torch's."""
        cause = root_cause(read_words(self._store, num_ranks=self.size), {})
        return RankLostError(f"training rank {self.rank} lost the others while {doing}: {cause or first_line(error)}")

    def close(self) -> None:
        """Destroy the torch.distributed groups of this process."""
        c10d.destroy_process_group()


def join_ranks(*, timeout_s: float) -> DistributedRanks:
    """Join the group of training ranks that torchrun's environment variables describe, and wait for all of them.

    Raises:
        RankLostError: Not every rank came in time.
        UserError: This machine has more ranks than GPUs.
    """
    device = own_device(int(os.environ["LOCAL_RANK"]), num_local_ranks=int(os.environ["LOCAL_WORLD_SIZE"]))
    try:
        store = c10d.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            None,
            is_master=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise RankLostError(f"the store of the training ranks cannot be reached: {first_line(error)}") from error
    return DistributedRanks(
        rank=int(os.environ["RANK"]),
        size=int(os.environ["WORLD_SIZE"]),
        device=device,
        store=store,
        timeout_s=timeout_s,
    )


def own_device(local_rank: int, *, num_local_ranks: int) -> torch.device:
    """Return this rank's device, and make it the current one: the GPU with its local rank, or the CPU without CUDA.

    Raises:
        UserError: This machine has more ranks than GPUs.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if num_local_ranks > num_gpus:
        raise UserError(
            f"this machine has {num_local_ranks} training ranks and {num_gpus} visible GPUs: each rank needs its own "
            f"GPU. Set nproc_per_node to at most {num_gpus}, or to auto",
            field="nproc_per_node",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def is_rank_loss(error: RuntimeError) -> bool:
    """Return whether torch raised this because a peer is gone or late.

    gloo has no exception class of its own, so the text is matched.
    """
    text = str(error).lower()
    return isinstance(error, c10d.DistError) or any(sign in text for sign in ("gloo", "connection", "nccl"))
