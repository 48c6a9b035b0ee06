"""Gathers the named weights of a sharded policy, one bucket at a time. With adapters, gathers only the adapters.

    bucket 0   embeddings                   -- full_tensor, on all ranks --> rank 0 hands it to the push, or to a file
    bucket 1   layer 0, layer 1, ...        -- full_tensor, on all ranks -->
    ...

All collectives of a bucket are finished and synchronised before any of its weights are sent elsewhere. If collectives
of two groups interleave on one device, each can wait for the other forever. The buckets are independent: a bucket may
be skipped or gathered twice.
"""

import re
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from services.trainer.policy.lora import file_name, has_adapters, pushed_adapters
from services.trainer.policy.policy_model import dtype_of, exact_weights, on_hub
from services.trainer.policy.sharding import decoder_layers

BUCKET_BYTES = 256 * 1024 * 1024


class WeightBuckets:
    """The weights of a sharded model, in buckets that are gathered one by one in fixed order. Tied weights appear once.

    Names are as in checkpoints on the hub or, for the adapters of a LoRA run, as in PEFT's files.

    Args:
        lm: The model; its parameters are DTensors.
        dtype: Dtype of the gathered weights.
        bucket_bytes: Size after which a bucket is closed. A layer is never split, because weights that transformers
            fused on loading, such as the experts of a mixture, must be split again within one bucket.
    """

    def __init__(self, lm: Any, *, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._lm = lm
        self._dtype = dtype
        self._exact = frozenset[str]() if has_adapters(lm) else exact_weights(lm)
        self._buckets: list[list[str]] = []
        size = bucket_bytes
        for names in _names_by_layer(lm):
            if size >= bucket_bytes:
                self._buckets.append([])
                size = 0
            self._buckets[-1].extend(names)
            size += sum(self._described_own(name).nbytes for name in names)

    def __len__(self) -> int:
        return len(self._buckets)

    def described(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names with tensors that have a shape and a dtype but no content. Gathers nothing."""
        for names in self._buckets:
            yield from self._hub({name: self._described_own(name) for name in names}).items()

    @torch.no_grad()
    def gather(self, bucket: int) -> dict[str, Tensor]:
        """Gather one bucket, and return its whole weights by name. Call it on every rank."""
        whole: dict[str, Tensor] = {}
        for name in self._buckets[bucket]:
            own: Any = self._tensor(name).detach()
            own = own.to(dtype_of(name, own.dtype, run=self._dtype, exact=self._exact))
            whole[name] = own.full_tensor() if hasattr(own, "full_tensor") else own
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self._hub(whole)

    def _tensor(self, name: str) -> Tensor:
        # Looked up each time: FSDP replaces the object while weights are gathered for a pass.
        module, _, leaf = name.rpartition(".")
        return cast(Tensor, getattr(self._lm.get_submodule(module), leaf))

    def _described_own(self, name: str) -> Tensor:
        tensor = self._tensor(name)
        dtype = dtype_of(name, tensor.dtype, run=self._dtype, exact=self._exact)
        return torch.empty(tuple(tensor.shape), dtype=dtype, device="meta")

    def _hub(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if has_adapters(self._lm):
            return pushed_adapters(self._lm, tensors)
        return on_hub(self._lm, tensors)


def _names_by_layer(lm: Any) -> list[list[str]]:
    """Return the names of all parameters and persistent buffers, or only of adapters, grouped by decoder layer."""
    owner = re.compile("|".join(f"({re.escape(name)})\\." for name, _ in decoder_layers(lm)))
    parameters = [name for name, _ in lm.named_parameters()]
    tied = {name for name, _ in lm.named_parameters(remove_duplicate=False)}
    groups: dict[str, list[str]] = {}
    kept = [*parameters, *(name for name in lm.state_dict() if name not in tied)]
    if has_adapters(lm):
        kept = [name for name in parameters if file_name(name) is not None]
    for name in kept:
        match = owner.match(name)
        groups.setdefault(match[0] if match else name, []).append(name)
    return list(groups.values())
