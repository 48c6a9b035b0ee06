"""Which directory ``resume_from_checkpoint`` means, and which are refused, each with a sentence."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from services.trainer.beginning import source
from services.trainer.beginning.source import find_source, run_reference
from services.trainer.checkpoints.manifest import find_damage
from shared.errors import UserError
from shared.files.file_roots import FileRoots
from shared.redis.run_record import Progress, RunRecord
from tests.trainer.beginning.made_checkpoints import make_adapter, make_checkpoint, make_model

pytestmark = pytest.mark.unit


def record(
    run_dir: Path, *, run_id: str = "run-source", status: Any = "finished", name: str | None = None
) -> RunRecord:
    return RunRecord(
        run_id=run_id,
        config={"name": name},
        status=status,
        desired="run",
        reason="",
        created_at_s=0.0,
        started_at_s=None,
        ended_at_s=None,
        run_dir=str(run_dir),
        progress=Progress(),
    )


def roots(*directories: Path) -> FileRoots:
    return FileRoots(tuple(map(str, directories)), "HEADRACE_DATA_ROOTS")


@pytest.mark.parametrize(
    ("said", "run"),
    [
        ("run-abc", "run-abc"),
        ("run-abc:40", "run-abc"),
        ("my:best", "my"),
        ("my:worst", None),
        ("my.run_2", "my.run_2"),
        ("/a/b", None),
        ("a/b:4", None),
    ],
)
def test_a_run_is_told_from_a_directory(said: str, run: str | None) -> None:
    assert run_reference(said) == run


@pytest.mark.parametrize("status", ["stopped", "finished", "failed"])
def test_a_run_means_its_newest_checkpoint(tmp_path: Path, status: str) -> None:
    make_checkpoint(tmp_path, step=2)
    newest = make_checkpoint(tmp_path, step=4)
    found = find_source("run-source", runs=[record(tmp_path, status=status)], roots=roots())
    assert (found.source, found.directory, found.run_id, found.notes) == ("checkpoint", newest, "run-source", [])
    assert found.state is not None
    assert found.state.step == 4


def test_the_newest_incarnation_decides_as_in_a_resume(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, step=8, incarnation=1)
    newest = make_checkpoint(tmp_path, step=6, incarnation=2)
    assert find_source("run-source", runs=[record(tmp_path)], roots=roots()).directory == newest


def test_a_run_that_still_trains_gives_its_newest_checkpoint_and_a_note(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, step=4)
    found = find_source("run-source", runs=[record(tmp_path, status="running")], roots=roots())
    assert found.notes == ["run-source is running: this run begins from its step 4, and does not follow it"]


def test_a_step_names_an_older_checkpoint(tmp_path: Path) -> None:
    older = make_checkpoint(tmp_path, step=2)
    make_checkpoint(tmp_path, step=4)
    assert find_source("run-source:2", runs=[record(tmp_path)], roots=roots()).directory == older
    with pytest.raises(UserError, match="has no checkpoint of step 3; it has 2, 4"):
        find_source("run-source:3", runs=[record(tmp_path)], roots=roots())


def test_the_best_checkpoint_is_that_of_the_best_evaluation(tmp_path: Path) -> None:
    best = make_checkpoint(tmp_path, step=2)
    make_checkpoint(tmp_path, step=4)
    config: dict[str, Any] = {"model": "m", "dataset_name": "d", "reward_funcs": ["accuracy_reward"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"best checkpoint of run-source is not known: .* Give a step; it has 2, 4"):
        find_source("run-source:best", runs=[record(tmp_path)], roots=roots())
    config |= {"eval_dataset_name": "e", "eval_steps": 2, "load_best_model_at_end": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    evaluations = [{"step": step, "eval_reward": reward} for step, reward in ((2, 0.9), (4, 0.5))]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evaluations))
    assert find_source("run-source:best", runs=[record(tmp_path)], roots=roots()).directory == best


def test_a_damaged_checkpoint_is_left_out_with_a_note_and_refused_if_it_was_named(tmp_path: Path) -> None:
    older = make_checkpoint(tmp_path, step=2)
    (make_checkpoint(tmp_path, step=4) / "core_state.json").write_text("{}")
    found = find_source("run-source", runs=[record(tmp_path)], roots=roots())
    assert found.directory == older
    assert re.search("step_00000004 of run-source is damaged and was left out: .*core_state.json has", found.notes[0])
    with pytest.raises(UserError, match=r"the checkpoint is damaged: .*core_state\.json has 2 bytes"):
        find_source("run-source:4", runs=[record(tmp_path)], roots=roots())
    (older / "model" / "config.json").unlink()
    with pytest.raises(UserError, match="every checkpoint of run-source is damaged"):
        find_source("run-source", runs=[record(tmp_path)], roots=roots())


def test_a_run_that_prunes_the_checkpoint_that_is_read_gives_its_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_checkpoint(tmp_path, step=2)

    def find_damage_while_it_trains(path: Path) -> str | None:
        if path == first:
            make_checkpoint(tmp_path, step=4)
            shutil.rmtree(first)
        return find_damage(path)

    monkeypatch.setattr(source, "find_damage", find_damage_while_it_trains)
    found = find_source("run-source", runs=[record(tmp_path)], roots=roots())
    assert (found.directory.name, found.notes) == ("step_00000004", [])


def test_a_run_without_a_checkpoint_no_run_and_several_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run-source has no checkpoint: a run writes one every save_steps"):
        find_source("run-source", runs=[record(tmp_path)], roots=roots())
    with pytest.raises(UserError, match="there is no run 'nothing'; `headrace runs` lists them"):
        find_source("nothing:4", runs=[], roots=roots())
    both = [record(tmp_path, run_id="run-a"), record(tmp_path, run_id="run-b", status="failed")]
    with pytest.raises(UserError, match=r"several runs fit 'twin': run-a \(finished\), run-b \(failed\); use the id"):
        find_source("twin", runs=both, roots=roots())


def test_the_directory_of_a_run_of_its_checkpoints_or_of_one_of_them_will_do(tmp_path: Path) -> None:
    run_dir = tmp_path / "run-other"
    make_checkpoint(run_dir, step=2)
    newest = make_checkpoint(run_dir, step=4)
    (run_dir / "config.json").write_text('{"name": "theirs", "reward_funcs": []}')
    for said in (run_dir, run_dir / "checkpoints", newest):
        found = find_source(str(said), runs=[], roots=roots(tmp_path))
        assert (found.directory, found.run_id, found.run_name) == (newest, "run-other", "theirs")


@pytest.mark.parametrize("said", ["", "checkpoints", "checkpoints/step_00000004"])
def test_the_checksums_of_a_checkpoint_are_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    newest = make_checkpoint(tmp_path / "run-other", step=4)
    checked: list[Path] = []
    monkeypatch.setattr(source, "find_damage", checked.append)
    find_source(str(tmp_path / "run-other" / said), runs=[], roots=roots(tmp_path))
    assert checked == [newest]


def test_a_checkpoint_that_was_copied_away_from_its_run_will_do(tmp_path: Path) -> None:
    shutil.copytree(make_checkpoint(tmp_path / "run-other", step=4), tmp_path / "kept")
    found = find_source(str(tmp_path / "kept"), runs=[], roots=roots(tmp_path))
    assert (found.source, found.run_id, dict(found.config)) == ("checkpoint", None, {})


def test_models_and_adapters_are_told_apart(tmp_path: Path) -> None:
    model, adapter = make_model(tmp_path / "model"), make_adapter(tmp_path / "adapter")
    assert find_source(str(model), runs=[], roots=roots(tmp_path)).source == "model"
    assert find_source(str(adapter), runs=[], roots=roots(tmp_path)).source == "adapter"


def test_other_directories_are_refused_with_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    pickled = make_model(tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    for said, sentence in (
        (str(tmp_path / "empty"), r"is not a checkpoint \(trainer_state.json\), a transformers model"),
        (str(tmp_path / "gone"), "there is no directory"),
        (str(tmp_path / ("long" * 100)), "cannot be read: File name too long"),
        (str(pickled), "Pickled weights"),
        ("checkpoints/step_00000004", "cannot resolve a relative path"),
        ("s3://bucket/checkpoint", "nor an absolute path"),
    ):
        with pytest.raises(UserError, match=sentence):
            find_source(said, runs=[], roots=roots(tmp_path))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["trainer_state.json", "manifest.json", "core_state.json"])
def test_a_pipe_in_place_of_a_file_is_damage_and_nothing_waits_for_its_other_end(tmp_path: Path, name: str) -> None:
    older = make_checkpoint(tmp_path / "run-other", step=2, incarnation=0)
    piped = make_checkpoint(tmp_path / "run-other", step=4, incarnation=0)
    (piped / name).unlink()
    os.mkfifo(piped / name)
    if name != "manifest.json":
        manifest = json.loads((piped / "manifest.json").read_text())
        manifest["files"][name] = {"size_bytes": 0, "sha256": ""}
        (piped / "manifest.json").write_text(json.dumps(manifest))
    found = find_source(str(tmp_path / "run-other"), runs=[], roots=roots(tmp_path))
    assert found.directory == older
    assert f"step_00000004 of {tmp_path / 'run-other'} is damaged" in found.notes[0]
    assert "Not a regular file" in found.notes[0]


@pytest.mark.parametrize("name", ["/etc/passwd", "../../secret", "model/../../../secret", "a\0b"])
def test_a_forged_manifest_tells_nothing_about_other_files(tmp_path: Path, name: str) -> None:
    path = make_checkpoint(tmp_path / "run-other", step=4)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"size_bytes": 1, "sha256": ""}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"the checkpoint is damaged: .*, which is not in the directory"):
        find_source(str(path), runs=[], roots=roots(tmp_path))


def test_a_directory_outside_the_places_that_runs_may_name_is_refused_before_it_is_read(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    secret = make_checkpoint(outside, step=4)
    (inside / "link").symlink_to(secret)
    (inside / "run").mkdir()
    (inside / "run" / "checkpoints").symlink_to(secret.parent)
    for said in (secret, tmp_path / "nothing"):
        with pytest.raises(UserError, match="is not in a place that runs may name; HEADRACE_DATA_ROOTS"):
            find_source(str(said), runs=[], roots=roots(inside))
    with pytest.raises(UserError, match="leads through a link out of the directories"):
        find_source(str(inside / "link"), runs=[], roots=roots(inside))
    with pytest.raises(UserError, match="has a link that leads out"):
        find_source(str(inside / "run"), runs=[], roots=roots(inside))
