"""Checkpoints as directories: whole or not there. What a real core writes is tested in tests/trainer."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from services.trainer.checkpoint import (
    CheckpointError,
    checkpoint_paths,
    load_into,
    newest_valid,
    remove_leftovers,
    save_checkpoint,
)


class FakeCore:
    """Its whole state is one number, and it may run out of disk while writing it."""

    def __init__(self, weight: int = 0, *, disk_is_full: bool = False) -> None:
        self.weight = weight
        self._disk_is_full = disk_is_full

    def save_state(self, directory: Path, tokenizer: Any | None) -> None:
        (directory / "model.safetensors").write_text(f"{self.weight:08d}")
        if self._disk_is_full:
            raise OSError(28, "No space left on device")

    def load_state(self, directory: Path) -> None:
        self.weight = int((directory / "model.safetensors").read_text())


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_checkpoint_comes_back_with_its_step_its_extra_and_its_core(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "new", FakeCore(7), {"cursor": 12, "trained": ["00000001"]}, step=3, keep=2)
    assert path == tmp_path / "new" / "step_00000003"
    checkpoint = newest_valid(tmp_path / "new")
    assert checkpoint is not None
    assert (checkpoint.path, checkpoint.step) == (path, 3)
    assert checkpoint.extra == {"cursor": 12, "trained": ["00000001"]}
    core = FakeCore()
    load_into(core, checkpoint)
    assert core.weight == 7


def test_the_manifest_lists_every_file_with_its_size_and_sha256(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, FakeCore(7), {}, step=1, keep=1)
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert sorted(files) == ["model.safetensors", "trainer_state.json"]
    # printf 00000007 | sha256sum
    assert files["model.safetensors"] == {
        "size_bytes": 8,
        "sha256": "db36d895a408ea6c0440b0e316a85253a0aefdf21788c54d49652dd7dafdaf41",
    }


def test_the_newest_are_kept_and_the_older_pruned(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, FakeCore(step), {}, step=step, keep=2)
    assert names(tmp_path) == ["step_00000002", "step_00000003"]


def test_a_damaged_checkpoint_does_not_push_out_a_whole_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, FakeCore(1), {}, step=1, keep=2)
    damaged = save_checkpoint(tmp_path, FakeCore(2), {}, step=2, keep=2)
    (damaged / "model.safetensors").unlink()
    save_checkpoint(tmp_path, FakeCore(3), {}, step=3, keep=2)
    assert names(tmp_path) == ["step_00000001", "step_00000002", "step_00000003"]
    save_checkpoint(tmp_path, FakeCore(4), {}, step=4, keep=2)
    assert names(tmp_path) == ["step_00000003", "step_00000004"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


def delete(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("file", "damage", "said"),
    [
        ("model.safetensors", truncate, "has 7 bytes instead of 8"),
        ("model.safetensors", flip_a_bit, "its SHA-256 differs"),
        ("model.safetensors", delete, "is missing"),
        ("trainer_state.json", flip_a_bit, "its SHA-256 differs"),
        ("manifest.json", delete, "was never finished"),
        ("manifest.json", truncate, "cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_the_file_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, damage: Any, said: str
) -> None:
    save_checkpoint(tmp_path, FakeCore(1), {"cursor": 1}, step=1, keep=2)
    newest = save_checkpoint(tmp_path, FakeCore(2), {"cursor": 2}, step=2, keep=2)
    damage(newest / file)
    with caplog.at_level(logging.ERROR):
        checkpoint = newest_valid(tmp_path)
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.extra) == (1, {"cursor": 1})
    assert "step_00000002 is damaged and was skipped" in caplog.text
    assert file in caplog.text
    assert said in caplog.text


def test_with_every_checkpoint_damaged_there_is_none(tmp_path: Path) -> None:
    delete(save_checkpoint(tmp_path, FakeCore(1), {}, step=1, keep=2) / "manifest.json")
    assert newest_valid(tmp_path) is None


def test_a_run_that_never_saved_has_no_checkpoint(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "absent") is None
    assert checkpoint_paths(tmp_path / "absent") == []
    remove_leftovers(tmp_path / "absent")


def test_a_full_disk_leaves_the_older_checkpoint_and_no_leftovers(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, FakeCore(1), {}, step=1, keep=1)
    with pytest.raises(CheckpointError, match=r"step 2 .* No space left on device; older checkpoints are untouched"):
        save_checkpoint(tmp_path, FakeCore(2, disk_is_full=True), {}, step=2, keep=1)
    assert names(tmp_path) == ["step_00000001"]
    checkpoint = newest_valid(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 1


def test_a_crash_in_the_middle_of_writing_is_never_loaded_and_cleared_away_at_the_next_start(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, FakeCore(1), {}, step=1, keep=2)
    (tmp_path / ".writing-step_00000002").mkdir()
    (tmp_path / ".writing-step_00000002" / "model.safetensors").write_text("0000")
    checkpoint = newest_valid(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 1
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["step_00000001"]


def test_a_crash_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, FakeCore(1), {}, step=1, keep=2).rename(tmp_path / ".replaced-step_00000001")
    remove_leftovers(tmp_path)
    checkpoint = newest_valid(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 1


def test_a_run_that_resumed_past_a_damaged_checkpoint_writes_that_step_again(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, FakeCore(1), {}, step=1, keep=2)
    flip_a_bit(save_checkpoint(tmp_path, FakeCore(2), {}, step=2, keep=2) / "model.safetensors")
    save_checkpoint(tmp_path, FakeCore(22), {"again": True}, step=2, keep=2)
    checkpoint = newest_valid(tmp_path)
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.extra) == (2, {"again": True})
    assert names(tmp_path) == ["step_00000001", "step_00000002"]


def test_a_checkpoint_of_a_later_step_is_never_pruned_by_an_earlier_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, FakeCore(20), {}, step=20, keep=1)
    save_checkpoint(tmp_path, FakeCore(15), {}, step=15, keep=1)
    assert names(tmp_path) == ["step_00000015", "step_00000020"]
