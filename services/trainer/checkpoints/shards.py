"""Writes tensors to disk in one set of shards per rank; any number of ranks can read them.

    rank 0 --write--> shard-00001-model-00001-of-00002.safetensors, shard-00001-model-00002-of-00002.safetensors
    rank 1 --write--> shard-00002-model-00001-of-00001.safetensors          read --> the rank's part of each tensor

HuggingFaceStorageWriter in ``torch.distributed.checkpoint`` (DCP) writes the same format: safetensors files, with the
offsets of each part in the header. HuggingFaceStorageReader reads it. Nothing is pickled, neither in the files nor
between the ranks, because each rank writes and reads by itself. DCP's own writer is not used: it builds every file
in memory with Python's lock held, which stops training, and its planner exchanges pickled plans.
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
    """The shards do not match the given tensors."""


@dataclass(frozen=True, eq=False)
class Part:
    """The part of a tensor that one rank writes to a checkpoint."""

    tensor: Tensor
    offsets: tuple[int, ...]
    """Position of the part in the whole tensor."""


def local_part(tensor: Tensor, *, is_first_rank: bool) -> Part | None:
    """Return the part of a tensor that this rank writes, without a copy; None if this rank writes no part of it.

    A sharded tensor is written shard by shard. A tensor that all ranks hold is written by the first rank.
    """
    if not isinstance(tensor, DTensor):
        return Part(tensor.detach(), (0,) * tensor.dim()) if is_first_rank else None
    coordinate = tensor.device_mesh.get_coordinate()
    local = tensor.to_local().detach()
    if coordinate is None or local.numel() == 0:
        return None
    if any(where and placement.is_replicate() for where, placement in zip(coordinate, tensor.placements, strict=True)):
        return None  # another rank holds the same part and writes it
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
    """Write this rank's parts, and return the files. With one rank, adds the index that transformers reads.

    Raises:
        OSError: A file could not be written.
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
    """Return the unsharded shape of each saved tensor, by name.

    Raises:
        ShardError: The directory contains no shards, or a part of a tensor is missing.
    """
    return {name: metadata.size for name, metadata in _read_metadata(directory)[1].state_dict_metadata.items()}


def saved_dtypes(directory: Path) -> dict[str, torch.dtype]:
    """Return the dtype of each saved tensor, by name. Raises ShardError as `saved_shapes` does."""
    metadata = _read_metadata(directory)[1].state_dict_metadata
    return {name: tensor.properties.dtype for name, tensor in metadata.items()}


def read_shards(directory: Path, into: Mapping[str, Tensor], *, unread: frozenset[str] = frozenset()) -> None:
    """Read the shards in a directory into tensors, in place. A DTensor gets only this rank's part.

    Args:
        directory: Directory of the shards.
        into: The tensors to fill, by name.
        unread: Names of further tensors that the shards may have. They are not read.

    Raises:
        ShardError: The shards have other tensor names or shapes.
    """
    reader, metadata = _read_metadata(directory)
    saved: Mapping[str, Any] = metadata.state_dict_metadata
    for name in sorted((saved.keys() - unread) ^ into.keys()):
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
    # The same as dcp.load on one rank, without its collectives and its warning that no process group exists.
    planner: Any = DefaultLoadPlanner()
    planner.set_up_planner(wanted, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    with torch.no_grad():
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


def _read_metadata(directory: Path) -> tuple[Any, Any]:
    reader: Any = HuggingFaceStorageReader(str(directory))
    metadata: Any = reader.read_metadata()
    if not metadata.state_dict_metadata:
        raise ShardError(f"{directory} contains no tensors")
    for name, tensor in metadata.state_dict_metadata.items():
        if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size):
            raise ShardError(f"a part of {name} is missing in {directory}")
    return reader, metadata


def _write_file(path: Path, parts: Mapping[str, Part]) -> None:
    sharding = {name: {"saved_offsets": list(part.offsets)} for name, part in parts.items()}
    header = {"DCP_SHARDING_INFO": json.dumps(sharding), "DCP_VERSION": "1.0", "format": "pt"}
    write_tensors(path, {name: part.tensor for name, part in parts.items()}, header=header)


def _buckets(parts: Mapping[str, Part], max_file_bytes: int) -> Iterator[dict[str, Part]]:
    """Yield the parts of each file, in order. A part above the limit gets a file of its own."""
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
