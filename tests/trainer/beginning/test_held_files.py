"""How a queued run keeps the checkpoint that it begins from."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.trainer.beginning.held_files import hold, let_go
from shared.beginning import Beginning
from shared.errors import UserError
from tests.trainer.beginning.made_checkpoints import make_checkpoint, make_model

pytestmark = pytest.mark.unit


def beginning_from(directory: Path, **about: Any) -> Beginning:
    plain: dict[str, Any] = {"source": "checkpoint", "directory": str(directory), "said": "run-source:4"}
    return Beginning(**plain | about)


def no_link(_source: str, _target: str) -> None:
    raise OSError(errno.EXDEV, "Invalid cross-device link")


def kept(run_dir: Path) -> Beginning:
    return msgspec.json.decode((run_dir / "beginning.json").read_bytes(), type=Beginning)


def test_links_outlive_the_source_and_are_let_go_with_the_file_about_them(tmp_path: Path) -> None:
    source, run_dir = make_checkpoint(tmp_path / "source", step=4), tmp_path / "new"
    files = {path.relative_to(source) for path in source.rglob("*")}
    held = hold(beginning_from(source), run_dir)
    shutil.rmtree(source)
    assert held.directory == str(run_dir / "beginning")
    assert {path.relative_to(held.directory) for path in Path(held.directory).rglob("*")} == files
    assert kept(run_dir) == held
    let_go(run_dir)
    assert list(run_dir.iterdir()) == []


def test_links_of_a_directory_that_nobody_may_write_into_can_be_removed(tmp_path: Path) -> None:
    source, run_dir = make_checkpoint(tmp_path / "source", step=4), tmp_path / "new"
    for directory in (source / "model", source):
        directory.chmod(0o555)
    held = Path(hold(beginning_from(source), run_dir).directory)
    assert held == run_dir / "beginning"
    assert all(path.stat().st_mode & 0o700 == 0o700 for path in (held, held / "model"))
    let_go(run_dir)
    assert list(run_dir.iterdir()) == []
    for directory in (source, source / "model"):
        directory.chmod(0o755)


def test_a_checkpoint_on_another_file_system_is_read_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, run_dir = make_checkpoint(tmp_path / "source", step=4), tmp_path / "new"
    monkeypatch.setattr(os, "link", no_link)
    assert hold(beginning_from(source), run_dir).directory == str(source)
    assert [path.name for path in run_dir.iterdir()] == ["beginning.json"]


def test_a_checkpoint_with_symbolic_links_is_read_where_it_is(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", step=4)
    (source / "core_state.json").rename(tmp_path / "elsewhere.json")
    (source / "core_state.json").symlink_to(tmp_path / "elsewhere.json")
    assert hold(beginning_from(source), tmp_path / "new").directory == str(source)


def test_a_model_is_read_where_it_is(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    assert hold(beginning_from(model, source="model"), tmp_path / "new").directory == str(model)


def delete_half(checkpoint: Path) -> None:
    (checkpoint / "core_state.json").unlink()


@pytest.mark.parametrize("delete", [shutil.rmtree, delete_half])
@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_a_source_that_is_being_deleted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delete: Callable[[Path], None], is_elsewhere: bool
) -> None:
    source, run_dir = make_checkpoint(tmp_path / "source", step=4), tmp_path / "new"
    if is_elsewhere:
        monkeypatch.setattr(os, "link", no_link)
    delete(source)
    with pytest.raises(UserError, match="was deleted while the run was submitted"):
        hold(beginning_from(source), run_dir)
    assert not (run_dir / "beginning").exists()
