"""The commands against the real run API, rewarder and training rank. Only vLLM is missing, so runs wait for it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli import command_line as cli
from tests.headrace.launcher_rig import ROOT, LauncherRig, wait_for
from tests.tiny_model import make_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LauncherRig]:
    """Return a launcher whose generator never serves."""
    directory = tmp_path_factory.mktemp("up")
    (directory / "my_rewards.py").write_text(
        "def length(completions, **columns):\n    return [1.0 for _ in completions]\n"
    )
    rig = LauncherRig(directory, stand_ins=("generator",))
    try:
        rig.launch_until_ready()
        yield rig
    finally:
        rig.end()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a model and a dataset, as a user has them."""
    directory = tmp_path_factory.mktemp("project")
    make_tiny_model(directory / "model")
    rows = [{"prompt": f"{number}+{number}=", "answer": str(2 * number)} for number in range(20)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def headrace(rig: LauncherRig, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments, "--state-dir", str(rig.state.path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def run_file(project: Path, text: str) -> str:
    path = project / "run.yaml"
    path.write_text(text)
    return str(path)


GOOD = """
name: tiny            # a comment
model: model
dataset_name: train.jsonl
reward_funcs: [my_rewards:length]
num_generations: 2
groups_per_step: 2
max_steps: 3
learning_rate: 1e-5
max_completion_length: 8
"""


def test_a_dry_run_says_what_the_settings_amount_to_and_makes_no_run(rig: LauncherRig, project: Path) -> None:
    done = headrace(rig, "submit", run_file(project, GOOD), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "it would be accepted" in done.stdout
    assert "steps: 3" in done.stdout
    assert "no runs yet" in headrace(rig, "runs").stdout


def test_a_configuration_of_trl_is_accepted_by_the_run_api(rig: LauncherRig, project: Path) -> None:
    (project / "train.csv").write_text("prompt,answer\n1+1=,2\n2+2=,4\n")
    text = (
        f"model_name_or_path: {project}/model\ndataset_name: {project}/train.csv\nreward_funcs: my_rewards.length\n"
        "output_dir: out/tiny\nper_device_train_batch_size: 4\nnum_generations: 2\nmax_steps: 4\nsave_steps: 0.5\n"
        "max_completion_length: 8\nvllm_mode: colocate\nuse_vllm: true\noptim: adamw_torch\n"
    )
    done = headrace(rig, "submit", "--trl", run_file(project, text), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "it would be accepted" in done.stdout
    assert "prompt_groups: 8" in done.stdout, "4 completions a step are 2 groups"
    assert "no runs yet" in headrace(rig, "runs").stdout


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("learning_rate", "learning_rat"), "did you mean learning_rate?"),
        (("train.jsonl", "missing.jsonl"), "missing.jsonl"),
        (("my_rewards:length", "my_rewards:width"), "width"),
        (("model: model", "model: ./nothing"), "nothing"),
        (("num_generations: 2", "num_generations: 1"), "num_generations"),
    ],
)
def test_a_run_that_cannot_work_is_refused_in_a_sentence_with_exit_status_1(
    rig: LauncherRig, project: Path, change: tuple[str, str], sentence: str
) -> None:
    done = headrace(rig, "submit", run_file(project, GOOD.replace(*change)))
    assert done.returncode == 1
    assert done.stderr.startswith("headrace: ")
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_is_submitted_shown_waiting_edited_stopped_and_watched_to_its_end(
    rig: LauncherRig, project: Path
) -> None:
    """A command that reads means the run of a name that has not ended. `edit` wants an id if there are several."""
    submitted = headrace(rig, "submit", run_file(project, GOOD))
    assert submitted.returncode == 0, submitted.stderr
    run_id = submitted.stdout.splitlines()[-2].removeprefix("submitted ")
    assert run_id.startswith("run-")
    wait_for(
        lambda: "a generator" in headrace(rig, "show").stdout, "the newest run to say that it waits for a generator"
    )
    listed = headrace(rig, "runs").stdout
    assert run_id in listed
    assert "running" in listed
    queued = headrace(rig, "submit", run_file(project, GOOD)).stdout.splitlines()[-2].removeprefix("submitted ")
    assert "had not started" in headrace(rig, "stop", queued).stdout
    assert json.loads(headrace(rig, "show", "tiny", "--json").stdout)["run_id"] == run_id
    refused = headrace(rig, "edit", "tiny", "--name", "other")
    assert refused.returncode == 1
    assert refused.stderr.startswith("headrace: several runs fit tiny; use the id of one:\n")
    assert run_id in refused.stderr
    changes = ("--name", "renamed", "--add-tag", "keep", "--metadata", "lr=1e-5", "--max-steps", "5")
    edited = headrace(rig, "edit", run_id[:12], *changes)
    assert edited.returncode == 0, edited.stderr
    assert f"{run_id} has max_steps: 5\n" in edited.stdout
    (shown,) = json.loads(headrace(rig, "runs", "--json", "--tag", "keep").stdout)["runs"]
    assert (shown["run_id"], shown["name"], shown["metadata"]) == (run_id, "renamed", {"lr": 1e-5})
    stopped = headrace(rig, "stop", "renamed")
    assert stopped.returncode == 0
    assert "keeps a checkpoint" in stopped.stdout
    watched = headrace(rig, "watch", "renamed")
    assert watched.returncode == 0, watched.stderr
    assert watched.stdout.splitlines()[-1].startswith(f"{run_id} stopped after 0 steps")
    assert "has ended already" in headrace(rig, "stop", run_id).stdout
    assert "has logged no rollouts yet" in headrace(rig, "rollouts", run_id).stdout


def test_an_unknown_run_is_a_sentence(rig: LauncherRig, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("show", "watch", "pause", "resume", "stop", "rollouts"):
        assert cli.main([command, "run-nothing", "--state-dir", str(rig.state.path)]) == 1
        assert capsys.readouterr().err == "headrace: there is no run run-nothing; `headrace runs` lists them\n"


def test_down_ends_the_launcher_and_the_commands_say_so(rig: LauncherRig) -> None:
    done = headrace(rig, "down")
    assert done.returncode == 0, done.stderr
    assert "stopped; runs and logs are in" in done.stdout
    assert "no headrace service found" in headrace(rig, "runs").stderr
