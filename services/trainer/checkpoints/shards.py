"""Tensors on the disk in as many shards as there are ranks, readable by any other number of them.

    rank 0 --write--> shard-00001-model-00001-of-00002.safetensors, shard-00001-model-00002-of-00002.safetensors
    rank 1 --write--> shard-00002-model-00001-of-00001.safetensors          read --> whatever part a rank has of each

The format is that of the HuggingFaceStorageWriter of ``torch.distributed.checkpoint``: safetensors whose headers say
where in its tensor each part belongs; and its HuggingFaceStorageReader reads it. Nothing is pickled, neither in the
files nor between the ranks: each writes and reads alone. DCP's own writer is not used because it builds every file in
memory with Python's lock held, which stops training, and because DCP's planner exchanges pickled plans.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor

from services.trainer.checkpoints.tensor_file import write_tensors
from shared.errors import HeadraceError

MAX_FILE_BYTES = 4 * 1024**3
INDEX_FILE = "model.safetensors.index.json"


class ShardError(HeadraceError):
    """The shards are not those of these tensors."""


@dataclass(frozen=True, eq=False)
class Part:
    """What one rank has of one tensor, on the CPU."""

    tensor: Tensor
    offsets: tuple[int, ...]
    """Where in the whole tensor it begins."""


def local_part(tensor: Tensor, *, is_first_rank: bool) -> Part | None:
    """Return what this rank writes of a tensor, without copying it; None if that is nothing.

    Of a sharded tensor that is the shard, of a tensor which every rank has, all of it on the first rank.
    """
    if not isinstance(tensor, DTensor):
        return Part(tensor.detach(), (0,) * tensor.dim()) if is_first_rank else None
    coordinate = tensor.device_mesh.get_coordinate()
    local = tensor.to_local().detach()
    if coordinate is None or local.numel() == 0:
        return None
    if any(where and placement.is_replicate() for where, placement in zip(coordinate, tensor.placements, strict=True)):
        return None  # another rank has the same and writes it
    (chunk,) = cast(Any, tensor).__create_chunk_list__()
    return Part(local, tuple(chunk.offsets))


def write_shards(
    directory: Path,
    parts: Mapping[str, Part],
    *,
    rank: int,
    num_ranks: int = 1,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[Path]:
    """Write this rank's parts, and return the files. The only rank adds the index by which transformers finds tensors.

    Raises:
        OSError: They could not be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    buckets = list(_buckets(parts, max_file_bytes))
    files: list[Path] = []
    for number, bucket in enumerate(buckets, start=1):
        path = directory / f"shard-{rank + 1:05d}-model-{number:05d}-of-{len(buckets):05d}.safetensors"
        _write_file(path, bucket)
        files.append(path)
    if num_ranks == 1:
        weight_map = {name: path.name for path, bucket in zip(files, buckets, strict=True) for name in bucket}
        index = {
            "metadata": {"total_size": sum(part.tensor.nbytes for part in parts.values())},
            "weight_map": weight_map,
        }
        files.append(directory / INDEX_FILE)
        files[-1].write_text(json.dumps(index, indent=2) + "\n")
    return files


def saved_shapes(directory: Path) -> dict[str, torch.Size]:
    """Return the whole tensors' shapes by name.

    Raises:
        ShardError: There are no shards, or they do not cover every tensor.
    """
    return {name: metadata.size for name, metadata in _read_metadata(directory)[1].state_dict_metadata.items()}


def saved_dtypes(directory: Path) -> dict[str, torch.dtype]:
    """Return the tensors' dtypes by name; raises as `saved_shapes` does."""
    metadata = _read_metadata(directory)[1].state_dict_metadata
    return {name: tensor.properties.dtype for name, tensor in metadata.items()}


def read_shards(directory: Path, into: Mapping[str, Tensor]) -> None:
    """Fill tensors in place, each with what this rank has of it.

    Raises:
        ShardError: The shards have other tensors, or of other shapes.
    """
    reader, metadata = _read_metadata(directory)
    saved: Mapping[str, Any] = metadata.state_dict_metadata
    for name in sorted(saved.keys() ^ into.keys()):
        where = "the model" if name in saved else "the checkpoint"
        raise ShardError(f"{name} is not in {where}")
    for name, tensor in into.items():
        if saved[name].size != tensor.shape:
            raise ShardError(f"{name} has shape {tuple(saved[name].size)} in the checkpoint, not {tuple(tensor.shape)}")
    wanted = {
        name: tensor.detach()
        for name, tensor in into.items()
        if not isinstance(tensor, DTensor) or tensor.to_local().numel()
    }
    # What dcp.load does on one rank, less its collectives and its warning that there are none.
    planner: Any = DefaultLoadPlanner()
    planner.set_up_planner(wanted, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    with torch.no_grad():
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


def _read_metadata(directory: Path) -> tuple[Any, Any]:
    reader: Any = HuggingFaceStorageReader(str(directory))
    metadata: Any = reader.read_metadata()
    if not metadata.state_dict_metadata:
        raise ShardError(f"there are no tensors in {directory}")
    for name, tensor in metadata.state_dict_metadata.items():
        if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size):
            raise ShardError(f"a part of {name} is missing in {directory}")
    return reader, metadata


def _write_file(path: Path, parts: Mapping[str, Part]) -> None:
    sharding = {name: {"saved_offsets": list(part.offsets)} for name, part in parts.items()}
    header = {"DCP_SHARDING_INFO": json.dumps(sharding), "DCP_VERSION": "1.0", "format": "pt"}
    write_tensors(path, {name: part.tensor for name, part in parts.items()}, header=header)


def _buckets(parts: Mapping[str, Part], max_file_bytes: int) -> Iterator[dict[str, Part]]:
    """Yield the parts of each file, in their order; a part that is larger has a file of its own."""
    bucket: dict[str, Part] = {}
    num_bytes = 0
    for name, part in parts.items():
        if bucket and num_bytes + part.tensor.nbytes > max_file_bytes:
            yield bucket
            bucket, num_bytes = {}, 0
        bucket[name] = part
        num_bytes += part.tensor.nbytes
    if bucket:
        yield bucket
