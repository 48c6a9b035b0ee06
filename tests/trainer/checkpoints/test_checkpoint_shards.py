"""Shards on one rank, compared with torch.distributed.checkpoint. For more ranks see test_checkpoint_ranks.py."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import Tensor

from services.trainer.checkpoints.checkpoint import load_into, newest_valid
from services.trainer.checkpoints.checkpoint_writer import remove_leftovers
from services.trainer.checkpoints.shards import Part, ShardError, read_shards, saved_dtypes, saved_shapes, write_shards
from tests.trainer.checkpoints.sharded_learner import Learner

dcp: Any = torch.distributed.checkpoint
WITHOUT_RANKS = "ignore:torch.distributed is disabled, unavailable or uninitialized"
REPOSITORY = Path(__file__).parents[3]


def tensors() -> dict[str, Tensor]:
    return {
        "matrix": torch.arange(12.0).reshape(4, 3),
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "scalar": torch.tensor(0.25),
        "count": torch.tensor(2**40),
        "bytes": torch.arange(256, dtype=torch.uint8),
        "flags": torch.tensor([True, False]),
    }


def like(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in given.items()}


def whole_parts(given: dict[str, Tensor]) -> dict[str, Part]:
    return {name: Part(tensor, (0,) * tensor.dim()) for name, tensor in given.items()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.filterwarnings(WITHOUT_RANKS)
def test_torchs_own_reader_reads_what_is_written(tmp_path: Path) -> None:
    write_shards(tmp_path, whole_parts(tensors()), rank=0)
    found: dict[str, Any] = like(tensors())
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert_equal(found, tensors())


@pytest.mark.filterwarnings(WITHOUT_RANKS)
def test_files_of_torchs_own_writer_are_read(tmp_path: Path) -> None:
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save(tensors(), storage_writer=writer, no_dist=True)
    found = like(tensors())
    read_shards(tmp_path, found)
    assert_equal(found, tensors())


def test_files_are_split_by_size_and_a_part_in_the_middle_finds_its_place(tmp_path: Path) -> None:
    given = tensors()
    files = write_shards(tmp_path, whole_parts(given), rank=0, max_file_bytes=50)
    assert [path.name for path in files[:2]] == [
        "shard-00001-model-00001-of-00004.safetensors",  # 48 bytes: the matrix
        "shard-00001-model-00002-of-00004.safetensors",  # 4 + 4 + 8
    ]
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map["matrix"] == files[0].name
    assert weight_map["count"] == files[1].name
    found = like(given)
    read_shards(tmp_path, found)
    assert_equal(found, given)


def write_halves(directory: Path) -> list[Path]:
    rows = torch.arange(10.0).reshape(5, 2)
    upper, lower = Part(rows[:3].clone(), (0, 0)), Part(rows[3:].clone(), (3, 0))
    return [
        *write_shards(directory, {"rows": upper}, rank=0, num_ranks=2),
        *write_shards(directory, {"rows": lower}, rank=1, num_ranks=2),
    ]


def test_parts_of_several_ranks_make_a_whole(tmp_path: Path) -> None:
    write_halves(tmp_path)
    assert saved_shapes(tmp_path) == {"rows": torch.Size([5, 2])}
    assert saved_dtypes(tmp_path) == {"rows": torch.float32}
    found = {"rows": torch.zeros(5, 2)}
    read_shards(tmp_path, found)
    assert torch.equal(found["rows"], torch.arange(10.0).reshape(5, 2))


def test_a_missing_part_is_never_made_up(tmp_path: Path) -> None:
    upper, _ = write_halves(tmp_path)
    upper.unlink()
    with pytest.raises(ShardError, match="a part of rows is missing"):
        read_shards(tmp_path, {"rows": torch.zeros(5, 2)})


def test_a_directory_without_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="contains no tensors"):
        saved_shapes(tmp_path)


@pytest.mark.parametrize(
    ("into", "said"),
    [
        ({"rows": torch.zeros(5, 3)}, r"rows has shape \(5, 2\) in the checkpoint, not \(5, 3\)"),
        ({"other": torch.zeros(5, 2)}, "other is not in the checkpoint"),
        ({}, "rows is not in the model"),
    ],
)
def test_tensors_of_another_model_are_refused_by_name(tmp_path: Path, into: dict[str, Tensor], said: str) -> None:
    write_halves(tmp_path)
    with pytest.raises(ShardError, match=said):
        read_shards(tmp_path, into)


DIE = """
import os, signal, sys
from pathlib import Path
from services.trainer.checkpoints.checkpoint_writer import CheckpointWriter
from tests.checkpoints import save_checkpoint
from tests.trainer.checkpoints.sharded_learner import Learner
root, learner = Path(sys.argv[1]), Learner()
save_checkpoint(root, learner.train(1), {}, step=1, keep=2)
CheckpointWriter(root, keep=2).begin(learner.train(1), {}, step=2)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_killed_while_it_writes_a_checkpoint_leaves_the_one_before(tmp_path: Path) -> None:
    died = subprocess.run(
        [sys.executable, "-c", DIE, str(tmp_path)], cwd=REPOSITORY, timeout=60, check=False, capture_output=True
    )
    assert died.returncode == -9, died.stderr
    assert len(list(tmp_path.iterdir())) == 2, "the previous checkpoint and the unfinished one"
    remove_leftovers(tmp_path, incarnation=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    checkpoint = newest_valid(tmp_path)
    assert checkpoint is not None
    resumed, straight = Learner(), Learner().train(3)
    load_into(resumed, checkpoint)
    resumed.train(2)
    for name, parameter in straight.parameters.items():
        assert torch.equal(resumed.parameters[name], parameter), name
