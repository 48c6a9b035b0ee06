"""Pushes of large models over NCCL and over disk: seconds and bytes by phase, at stated bandwidths.

    8 trainer GPUs --gather (NVLink)--> rank 0 --pack--> send (network) --> every worker --stage (PCIe)--> main memory
                                                                                              load (PCIe) --> its GPU

The weights are staged in main memory, because a GPU with an engine has no room for a copy of them. Every worker of a
replica stages and loads all of them, so the workers of a machine share its memory bandwidth.
"""

import math
from dataclasses import asdict, dataclass
from functools import partial

import torch

from benchmarks.bench_push_model.course import course_s
from benchmarks.bench_push_model.models import LARGE, empty_model
from benchmarks.bench_push_model.stand_ins import Sent, chunks_of
from services.generator.worker.staged_weights import digest_threads, staging_bytes
from services.trainer.push.transports import chunk_bytes
from services.trainer.push.weight_sender import SLOWEST_BYTES_PER_S
from services.trainer.ranks.lead_core import GatheredWeights
from services.trainer.ranks.weight_buckets import WeightBuckets
from shared.weights.parameter_spec import total_bytes

PUSH_TIMEOUT_S = 60.0
"""The default of ``push_timeout_s``."""


@dataclass(frozen=True)
class Bandwidths:
    """Stated bandwidths, in GB/s. They are inputs, not measurements: give yours as options.

    Attributes:
        network: Of one machine.
        nvlink: At which one rank gathers sharded weights.
        gpu_memory: Reads and writes of a GPU's memory together.
        pcie: Between a GPU and main memory, in one direction.
        main_memory: Of one machine, shared by its workers.
        digest: At which one CPU thread computes digests.
        page_lock: At which one process page-locks memory.
        disk: Of the shared directory.
        cores: Number of a generator machine's cores, from which the number of a worker's digest threads follows.
    """

    network: float = 3.1
    nvlink: float = 300.0
    gpu_memory: float = 2700.0
    pcie: float = 50.0
    main_memory: float = 300.0
    digest: float = 8.0
    page_lock: float = 2.0
    disk: float = 2.0
    cores: float = 96


@dataclass(frozen=True)
class LargePush:
    """One model on replicas of one size: seconds and bytes.

    ``*_before`` is the code without the changes that make large pushes possible: a page-locked block a parameter, whose
    size is rounded up to a power of two, allocated within the push, one digest thread, and 60 s for everything.
    """

    num_bytes: int
    num_chunks: int
    largest_chunk_bytes: int
    gather_s: float
    pack_s: float
    send_s: float
    stage_s: float
    digest_s: float
    load_s: float
    push_s: float
    push_before_s: float
    push_with_two_buffers_s: float
    page_lock_s: float
    page_lock_before_s: float
    allowed_s: float
    locked_bytes_a_worker: int
    locked_bytes_a_worker_before: int
    locked_bytes_a_replica: int
    locked_bytes_a_replica_before: int
    disk_push_s: float

    @property
    def is_in_time(self) -> bool:
        """Whether the first push ends within its deadline."""
        return self.push_s <= self.allowed_s

    @property
    def was_in_time(self) -> bool:
        """Whether it did before."""
        return self.page_lock_before_s + self.push_before_s <= PUSH_TIMEOUT_S

    def as_json(self) -> dict[str, object]:
        """Return all numbers."""
        found = {name: round(one, 3) if isinstance(one, float) else one for name, one in asdict(self).items()}
        return {**found, "is_in_time": self.is_in_time, "was_in_time": self.was_in_time}


def sent_by_ranks(model: str) -> Sent:
    """Return what several ranks push of a model, as their own code gathers and packs it."""
    buckets = WeightBuckets(empty_model(*LARGE[model]), dtype=torch.bfloat16)
    return Sent(GatheredWeights(buckets, buckets.gather), buffer_bytes=chunk_bytes("nccl"))


def large_push(sent: Sent, given: Bandwidths, *, trainer_gpus: int, tensor_parallel: int) -> LargePush:
    """Return the push of ``sent`` to replicas on one machine each."""
    size, specs = total_bytes(sent.announced), sent.specs
    giga = 1e9
    # The rank itself holds one part of the weights.
    gather_rate = giga * given.nvlink * trainer_gpus / max(trainer_gpus - 1, 1) if trainer_gpus > 1 else math.inf
    host_rate = giga * min(given.pcie, given.main_memory / tensor_parallel)
    charged = partial(
        chunks_of,
        sent,
        gather_rate=gather_rate,
        memory_rate=giga * given.gpu_memory,
        wire_rate=giga * given.network,
        stage_rate=2 * host_rate,
    )
    digest_rate = giga * min(digest_threads(int(given.cores)) * given.digest, given.main_memory / tensor_parallel)
    chunks = charged(digest_rate=digest_rate)
    chunks_before = charged(digest_rate=giga * min(given.digest, given.main_memory / tensor_parallel))
    load_s = size / host_rate
    locked = staging_bytes(specs)
    locked_before = sum(_power_of_two(spec.num_bytes) for spec in specs)
    disk = giga * given.disk
    return LargePush(
        num_bytes=size,
        num_chunks=len(chunks),
        largest_chunk_bytes=max(sent.chunk_bytes),
        gather_s=size / gather_rate,
        pack_s=sum(sent.moved_bytes) / (giga * given.gpu_memory),
        send_s=sum(one.send_s for one in chunks),
        stage_s=sum(one.stage_s for one in chunks),
        digest_s=sum(one.digest_s for one in chunks),
        load_s=load_s,
        push_s=course_s(chunks, num_buffers=1) + load_s,
        push_before_s=course_s(chunks_before, num_buffers=1) + load_s,
        push_with_two_buffers_s=course_s(chunks, num_buffers=2) + load_s,
        page_lock_s=locked / (giga * given.page_lock),
        page_lock_before_s=locked_before / (giga * given.page_lock),
        allowed_s=PUSH_TIMEOUT_S + size / SLOWEST_BYTES_PER_S,
        locked_bytes_a_worker=locked,
        locked_bytes_a_worker_before=locked_before,
        locked_bytes_a_replica=locked * tensor_parallel,
        locked_bytes_a_replica_before=locked_before * tensor_parallel,
        # One after the other: copied to main memory, written, read by every worker, staged and digested, loaded.
        disk_push_s=size / host_rate + size / disk + tensor_parallel * size / disk + size / digest_rate + load_s,
    )


def _power_of_two(num_bytes: int) -> int:
    """Return the size that torch's allocator of page-locked memory gives a block (CachingHostAllocator.h)."""
    return 1 << max(num_bytes - 1, 0).bit_length()
