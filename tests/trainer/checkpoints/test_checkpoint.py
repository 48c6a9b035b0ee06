"""Checkpoint directories are complete or do not exist. Checkpoints of a real core are tested in tests/trainer."""

import json
import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from services.trainer.checkpoints.checkpoint import (
    Checkpoint,
    checkpoint_paths,
    load_into,
    newest_valid,
    use_newest,
)
from services.trainer.checkpoints.checkpoint_writer import CheckpointError, CheckpointWriter, remove_leftovers
from services.trainer.checkpoints.manifest import find_damage, write_manifest
from shared.errors import FencedError, HeadraceError
from tests.checkpoints import save_checkpoint

pytestmark = pytest.mark.unit

MODEL = "model/shard-00001-model-00001-of-00001.safetensors"


class FakeCore:
    """A core whose state is one number. The test decides when it writes, and whether the disk is full then."""

    def __init__(self, weight: int = 0, *, disk_is_full: bool = False, writes_at_once: bool = True) -> None:
        self.weight = weight
        self._disk_is_full = disk_is_full
        self._writes_at_once = writes_at_once
        self._copied: tuple[Path, int] | None = None
        self._written: Future[None] = Future()

    def begin_save(self, directory: Path, tokenizer: Any | None) -> "Future[None]":
        del tokenizer
        self._copied, self._written = (directory, self.weight), Future()
        if self._writes_at_once:
            self.write()
        return self._written

    def write(self) -> None:
        assert self._copied is not None
        directory, weight = self._copied
        (directory / "model").mkdir()
        (directory / MODEL).write_text(f"{weight:08d}")
        if self._disk_is_full:
            self._written.set_exception(OSError(28, "No space left on device"))
        else:
            self._written.set_result(None)

    def load_state(self, directory: Path) -> None:
        self.weight = int((directory / MODEL).read_text())


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
    assert list(files) == [MODEL, "trainer_state.json"]
    # printf 00000007 | sha256sum
    assert files[MODEL] == {
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
    (damaged / MODEL).unlink()
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
        (MODEL, truncate, "has 7 bytes instead of 8"),
        (MODEL, flip_a_bit, "its SHA-256 differs"),
        (MODEL, delete, "is missing"),
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
    remove_leftovers(tmp_path / "absent", incarnation=1)


def test_the_newest_is_found_although_the_training_prunes_what_was_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, FakeCore(1), {}, step=1, keep=1)
    published: list[Path] = []

    def find_damage_while_it_trains(path: Path) -> str | None:
        if not published:
            published.append(save_checkpoint(tmp_path, FakeCore(2), {}, step=2, keep=1))
        return find_damage(path)

    monkeypatch.setattr("services.trainer.checkpoints.checkpoint.find_damage", find_damage_while_it_trains)
    checkpoint = newest_valid(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 2


def weight_of(checkpoint: Checkpoint) -> int:
    core = FakeCore()
    load_into(core, checkpoint)
    return core.weight


def test_what_is_pruned_while_it_is_used_is_replaced_by_the_newest(tmp_path: Path) -> None:
    def weight_while_it_trains(checkpoint: Checkpoint) -> int:
        if checkpoint.step < 3:
            step = checkpoint.step + 1
            save_checkpoint(tmp_path, FakeCore(10 * step), {}, step=step, keep=1)
        return weight_of(checkpoint)

    assert use_newest(tmp_path, weight_of) is None
    save_checkpoint(tmp_path, FakeCore(10), {}, step=1, keep=1)
    assert use_newest(tmp_path, weight_while_it_trains) == 30


def test_an_error_about_a_checkpoint_that_is_still_there_is_not_repeated(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, FakeCore(1), {}, step=1, keep=1)
    used: list[int] = []

    def fail(checkpoint: Checkpoint) -> None:
        used.append(checkpoint.step)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        use_newest(tmp_path, fail)
    assert used == [1]


def test_a_training_that_prunes_each_one_that_is_used_is_named(tmp_path: Path) -> None:
    def fall_behind(checkpoint: Checkpoint) -> int:
        save_checkpoint(tmp_path, FakeCore(), {}, step=checkpoint.step + 1, keep=1)
        return weight_of(checkpoint)

    save_checkpoint(tmp_path, FakeCore(), {}, step=1, keep=1)
    with pytest.raises(HeadraceError, match=r"the training deleted each checkpoint in .*: pause the run, or keep more"):
        use_newest(tmp_path, fall_behind)


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
    (tmp_path / ".writing-step_00000002-1a2b3c4d" / "model").mkdir(parents=True)
    (tmp_path / ".writing-step_00000002-1a2b3c4d" / MODEL).write_text("0000")
    checkpoint = newest_valid(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 1
    remove_leftovers(tmp_path, incarnation=1)
    assert names(tmp_path) == ["step_00000001"]


def test_a_checkpoint_is_of_the_moment_it_was_begun_and_counts_for_nothing_until_it_is_published(
    tmp_path: Path,
) -> None:
    core, writer = FakeCore(1, writes_at_once=False), CheckpointWriter(tmp_path, keep=2)
    pending = writer.begin(core, {"cursor": 1}, step=1)
    core.weight = 2  # training goes on
    assert newest_valid(tmp_path) is None
    core.write()
    writer.wait(pending)
    assert newest_valid(tmp_path) is None
    writer.publish(pending)
    checkpoint = newest_valid(tmp_path)
    assert checkpoint is not None
    load_into(core, checkpoint)
    assert (core.weight, checkpoint.extra) == (1, {"cursor": 1})


def test_a_crash_before_it_is_published_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, FakeCore(1), {}, step=1, keep=1)
    writer = CheckpointWriter(tmp_path, keep=1)
    writer.wait(writer.begin(FakeCore(2), {}, step=2))
    remove_leftovers(tmp_path, incarnation=1)  # of the next start
    assert names(tmp_path) == ["step_00000001"]


def test_two_that_write_the_same_step_do_not_write_into_each_other(tmp_path: Path) -> None:
    """A trainer is superseded while it writes; and the trainer that took over."""
    old, new = CheckpointWriter(tmp_path, keep=1), CheckpointWriter(tmp_path, keep=1)
    late, core = FakeCore(7, writes_at_once=False), FakeCore(8)
    pending = old.begin(late, {}, step=1)
    new_pending = new.begin(core, {}, step=1)
    late.write()
    new.wait(new_pending)
    new.publish(new_pending)
    old.wait(pending)
    checkpoint = newest_valid(tmp_path)
    assert checkpoint is not None
    load_into(core, checkpoint)
    assert core.weight == 8


def test_a_core_that_never_finishes_writing_is_given_up_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.trainer.checkpoints.checkpoint_writer.WRITING_DEADLINE_S", 0.01)
    writer = CheckpointWriter(tmp_path, keep=1)
    with pytest.raises(CheckpointError, match=r"step 1 could not be written .* longer than 0.01 s"):
        writer.wait(writer.begin(FakeCore(writes_at_once=False), {}, step=1))
    assert names(tmp_path) == []


def test_the_sums_of_a_kept_checkpoint_are_not_computed_again_at_every_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = CheckpointWriter(tmp_path, keep=2)
    for step in (1, 2):
        pending = writer.begin(FakeCore(step), {}, step=step)
        writer.wait(pending)
        writer.publish(pending)

    def never(directory: Path) -> str | None:
        raise AssertionError(f"{directory} was read again")

    monkeypatch.setattr("services.trainer.checkpoints.checkpoint_writer.find_damage", never)
    pending = writer.begin(FakeCore(3), {}, step=3)
    writer.wait(pending)
    writer.publish(pending)
    assert names(tmp_path) == ["step_00000002", "step_00000003"]


def test_a_crash_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, FakeCore(1), {}, step=1, keep=2).rename(tmp_path / ".replaced-step_00000001")
    remove_leftovers(tmp_path, incarnation=1)
    checkpoint = newest_valid(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 1


def test_a_run_that_resumed_past_a_damaged_checkpoint_writes_that_step_again(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, FakeCore(1), {}, step=1, keep=2)
    flip_a_bit(save_checkpoint(tmp_path, FakeCore(2), {}, step=2, keep=2) / MODEL)
    save_checkpoint(tmp_path, FakeCore(22), {"again": True}, step=2, keep=2)
    checkpoint = newest_valid(tmp_path)
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.extra) == (2, {"again": True})
    assert names(tmp_path) == ["step_00000001", "step_00000002"]


def test_a_checkpoint_of_a_later_step_is_never_pruned_by_an_earlier_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, FakeCore(20), {}, step=20, keep=1)
    save_checkpoint(tmp_path, FakeCore(15), {}, step=15, keep=1)
    assert names(tmp_path) == ["step_00000015", "step_00000020"]


def test_an_older_trainer_neither_replaces_nor_prunes_what_a_newer_one_wrote(tmp_path: Path) -> None:
    newer, older = CheckpointWriter(tmp_path, keep=1, incarnation=2), CheckpointWriter(tmp_path, keep=1, incarnation=1)

    def write(writer: CheckpointWriter, *, step: int, weight: int) -> Path:
        pending = writer.begin(FakeCore(weight), {}, step=step)
        writer.wait(pending)
        return writer.publish(pending)

    kept = write(newer, step=4, weight=24)
    with pytest.raises(FencedError, match="written by incarnation 2"):
        write(older, step=4, weight=14)
    assert names(tmp_path) == ["step_00000004"], "the unfinished checkpoint of the older trainer is gone"
    write(older, step=6, weight=16)
    found = newest_valid(tmp_path)
    assert found is not None
    assert (found.path, found.step, found.incarnation) == (kept, 4, 2), "the checkpoint of the newer trainer counts"
    core = FakeCore(0)
    load_into(core, found)
    assert core.weight == 24


def test_a_checkpoint_that_a_newer_trainer_is_writing_is_not_a_leftover(tmp_path: Path) -> None:
    pending = CheckpointWriter(tmp_path, keep=1, incarnation=2).begin(FakeCore(1), {}, step=1)
    remove_leftovers(tmp_path, incarnation=1)
    assert pending.directory.is_dir()
    remove_leftovers(tmp_path, incarnation=3)
    assert not pending.directory.exists()


@pytest.mark.parametrize(
    "state",
    [b"", b"[]", b'{"step": -1, "extra": {}}', b'{"step": 3}', b'{"step": 3, "\xff": 2, "extra": {}}', b"[" * 5000],
)
def test_a_checkpoint_whose_state_cannot_be_is_skipped_although_its_sums_agree(
    state: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "step_00000003").mkdir()
    (tmp_path / "step_00000003" / "trainer_state.json").write_bytes(state)
    write_manifest(tmp_path / "step_00000003")
    assert newest_valid(tmp_path) is None
    assert "cannot be decoded" in caplog.text


@pytest.mark.parametrize(("keep", "left"), [(1, [1, 4]), (2, [1, 3, 4])])
def test_the_best_checkpoint_is_never_pruned(keep: int, left: list[int], tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep=keep)
    for step in (1, 2, 3, 4):
        writer.best_step = 1
        pending = writer.begin(FakeCore(step), {}, step=step)
        writer.wait(pending)
        writer.publish(pending)
    assert names(tmp_path) == [f"step_{step:08d}" for step in left]


def test_a_checkpoint_that_is_no_longer_the_best_is_pruned(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path, keep=1)
    for step, best in ((1, 1), (2, 1), (3, 2)):
        writer.best_step = best
        pending = writer.begin(FakeCore(step), {}, step=step)
        writer.wait(pending)
        writer.publish(pending)
    assert names(tmp_path) == ["step_00000002", "step_00000003"]
