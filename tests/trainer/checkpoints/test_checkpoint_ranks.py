"""Checkpoints are resumed on other numbers of ranks, in real processes on gloo."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.trainer.checkpoints.checkpoint import load_into, newest_valid
from services.trainer.checkpoints.manifest import find_damage
from services.trainer.checkpoints.shards import read_shards, saved_shapes
from tests.checkpoints import save_checkpoint
from tests.trainer.checkpoints.sharded_learner import Learner
from tests.trainer.warm_ranks import REPOSITORY, run_group

_MODULE = "tests.trainer.checkpoints.sharded_learner"


def run_torchrun(num_ranks: int, root: Path, *, resume: Path) -> None:
    """Run ranks that share nothing, not even the order of their sets, as those of one fork do."""
    command = ["-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}", "--standalone"]
    finished = subprocess.run(
        [sys.executable, *command, "-m", _MODULE, str(root), str(resume)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-8000:]


def whole(checkpoint: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint (weights and moments), assembled from its shards."""
    found: dict[str, Tensor] = {}
    for collection in ("model", "optimizer"):
        tensors = {name: torch.full(shape, torch.nan) for name, shape in saved_shapes(checkpoint / collection).items()}
        read_shards(checkpoint / collection, tensors)
        found |= {f"{collection}/{name}": tensor for name, tensor in tensors.items()}
    return found


def newest(root: Path) -> Path:
    checkpoint = newest_valid(root)
    assert checkpoint is not None
    return checkpoint.path


def assert_close(left: Path, right: Path) -> None:
    lefts, rights = whole(left), whole(right)
    assert lefts.keys() == rights.keys()
    for name, tensor in lefts.items():
        torch.testing.assert_close(tensor, rights[name], rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return the checkpoints of an uninterrupted run on one rank, by step."""
    root, learner = tmp_path_factory.mktemp("straight"), Learner()
    return {
        step: save_checkpoint(root / str(step), learner.train(2), {}, step=step, keep=1) for step in (2, 4, 6)
    }  # fmt: skip


@pytest.fixture(scope="module")
def on_two(straight: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoints that two ranks made from the checkpoint of step 2."""
    root = tmp_path_factory.mktemp("two")
    run_torchrun(2, root, resume=straight[2].parent)
    return root


@pytest.fixture(scope="module")
def on_four(on_two: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoints that four ranks made from the two ranks' checkpoint of step 4."""
    root = tmp_path_factory.mktemp("four")
    run_group(_MODULE, str(root), str(on_two / "trained"), num_ranks=4, directory=root)
    return root


def assert_same_bits(left: Path, right: Path) -> None:
    lefts, rights = whole(left), whole(right)
    assert lefts.keys() == rights.keys()
    assert [name for name in lefts if not torch.equal(lefts[name], rights[name])] == []


def test_two_ranks_hold_every_bit_of_what_one_saved_even_if_they_train_on_while_they_write(
    straight: dict[int, Path], on_two: Path
) -> None:
    assert_same_bits(newest(on_two / "unchanged"), straight[2])


def test_one_rank_then_two_learn_what_one_learns(straight: dict[int, Path], on_two: Path) -> None:
    assert_close(newest(on_two / "trained"), straight[4])


def test_four_ranks_hold_every_bit_of_what_two_saved(on_two: Path, on_four: Path) -> None:
    assert_same_bits(newest(on_four / "unchanged"), newest(on_two / "trained"))


def test_two_ranks_then_four_learn_what_one_learns(straight: dict[int, Path], on_four: Path) -> None:
    assert_close(newest(on_four / "trained"), straight[6])


def test_two_ranks_then_one_learn_what_one_learns(straight: dict[int, Path], on_two: Path, tmp_path: Path) -> None:
    learner = Learner()
    checkpoint = newest_valid(on_two / "trained")
    assert checkpoint is not None
    load_into(learner, checkpoint)
    assert learner.policy_version == 4
    assert_close(save_checkpoint(tmp_path, learner.train(2), {}, step=6, keep=1), straight[6])


def test_every_rank_writes_its_own_shard_and_nothing_is_a_pickle(on_four: Path) -> None:
    files = sorted(path.name for path in (newest(on_four / "trained") / "model").iterdir())
    assert files == [f"shard-{rank:05d}-model-00001-of-00001.safetensors" for rank in (1, 2, 3, 4)]
    everything = [path for path in newest(on_four / "trained").rglob("*") if path.is_file()]
    assert {path.suffix for path in everything} == {".safetensors", ".json"}


@pytest.mark.parametrize("rank", [1, 2])
def test_a_truncated_shard_of_any_rank_is_found(on_two: Path, tmp_path: Path, rank: int) -> None:
    copy = tmp_path / "step_00000004"
    shutil.copytree(newest(on_two / "trained"), copy)
    shard = copy / "model" / f"shard-{rank:05d}-model-00001-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    damage = find_damage(copy)
    assert damage is not None
    assert f"{shard} has" in damage


def test_a_rank_that_cannot_write_and_one_that_writes_elsewhere_fail_the_checkpoint_with_the_reason(
    on_two: Path,
) -> None:
    elsewhere, full = (on_two / "said.txt").read_text().splitlines()
    assert "contains no files of training rank 1" in elsewhere
    assert "file system that all machines of the run share" in elsewhere
    assert "training rank 1: " in full
    assert "File too large" in full
    assert "older checkpoints are untouched" in full
    assert list((on_two / "elsewhere").iterdir()) == []
    assert list((on_two / "full").iterdir()) == []
