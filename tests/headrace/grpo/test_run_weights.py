"""The weights of an interrupted training are never those that it began with."""

import contextlib
import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import pytest

from headrace.client import HeadraceClient
from headrace.grpo.live_model import LiveModel
from headrace.grpo.run_weights import RunWeights, export_newest
from headrace.grpo.script import Script
from headrace.grpo.script_run import ScriptRun
from headrace.grpo.script_services import ScriptServices, find_services
from headrace.grpo.training_events import TrainingEvents
from shared.errors import HeadraceError
from shared.run_options.grpo_config import GRPOConfig
from tests.checkpoints import save_checkpoint
from tests.headrace.scripted_api import HANG_UP, Asked, ScriptedApi, problem, serving
from tests.trainer.beginning.made_checkpoints import make_adapter

pytestmark = pytest.mark.unit


@contextlib.contextmanager
def weights_of(
    answer: Callable[[Asked], Any], monkeypatch: pytest.MonkeyPatch
) -> Generator[tuple[RunWeights, LiveModel, ScriptedApi]]:
    """Return the weights of a script whose services are what a function answers, its model, and the API."""
    live = LiveModel("org/model", None, peft_config=None, init_kwargs={})
    with serving(answer) as api:
        monkeypatch.setenv("HEADRACE_URL", api.url)
        monkeypatch.setenv("HEADRACE_API_KEY", "k")
        services = find_services(say=print)
        yield RunWeights(live, lambda: services), live, api
        services.client.close()


def no_services() -> ScriptServices:
    raise AssertionError("what this test saves is on this machine")


@pytest.mark.parametrize(
    ("is_here", "says"), [(True, "run-a has not reached a checkpoint"), (False, "are on the services' machine")]
)
def test_without_a_checkpoint_there_is_no_model_to_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_here: bool, says: str
) -> None:
    run_dir = tmp_path / "run-a"
    if is_here:
        pytest.importorskip("torch")  # reads checkpoints
        run_dir.mkdir()
    pause = {"by": "user", "since_s": 1.0}
    run: dict[str, Any] = {"run_id": "run-a", "name": None, "run_dir": str(run_dir), "status": "paused", "pause": pause}
    run["progress"] = {"step": 0, "updated_at_s": 2.0}

    def answer(_: Asked) -> Any:
        return run

    live = LiveModel("org/model", None, peft_config=None, init_kwargs={})
    args = GRPOConfig()
    with serving(answer) as api:
        monkeypatch.setenv("HEADRACE_URL", api.url)
        monkeypatch.setenv("HEADRACE_API_KEY", "k")
        script = Script(live, ["length"], args)
        training = ScriptRun(lambda: script, TrainingEvents(args, state=None, control=None))
        training.take_run(run)
        training.leave()
        with pytest.raises(HeadraceError, match=says):
            training.save_model(tmp_path / "saved")
        with pytest.raises(HeadraceError, match=says):
            _ = live.model
        training.client.close()
    assert not (tmp_path / "saved").exists()


def test_a_saved_adapter_names_the_scripts_model_as_its_base(tmp_path: Path) -> None:
    copy_of_model = "/state/inputs/model-5b"
    make_adapter(tmp_path / "run-a" / "model", base_model_name_or_path=copy_of_model)
    live = LiveModel("org/model", None, peft_config=None, init_kwargs={})
    weights = RunWeights(live, no_services)
    config = {"model": copy_of_model, "load_best_model_at_end": True}
    run = {"run_id": "run-a", "config": config, "progress": {"best": {"step": 2, "value": 0.5}}}
    weights.take(run, tmp_path / "run-a" / "model")
    assert live.weights_for_run(cast(Any, None)).source == "run-a:best"
    weights.save(None, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == "org/model"


def test_until_the_first_step_the_model_is_the_one_that_the_training_began_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run: dict[str, Any] = {"run_id": "run-a", "run_dir": "/r", "status": "running", "desired": "run"}
    run["progress"] = {"step": 0, "max_steps": 8}

    def answer(_: Asked) -> Any:
        return run

    with weights_of(answer, monkeypatch) as (weights, live, api):
        weights.give_so_far(run)
        assert live.so_far is None
    assert api.asked


def test_callbacks_wait_for_a_checkpoint_through_an_outage_but_not_for_one_that_is_no_longer_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: dict[str, Any] = {"run_id": "run-a", "run_dir": str(tmp_path / "run-a"), "status": "running"}
    run["progress"] = {"step": 4, "max_steps": 4}
    checkpoint = tmp_path / "run-a" / "checkpoints" / "step_00000004"
    checkpoint.mkdir(parents=True)
    answers: list[Any] = [problem(503, "Redis is away"), HANG_UP, run]

    def answer(_: Asked) -> Any:
        if len(answers) > 1:
            return answers.pop(0)
        (checkpoint / "manifest.json").touch()
        return run

    with weights_of(answer, monkeypatch) as (weights, _, api):
        weights.wait_for_checkpoint(run, 4, save_steps=500)
        assert (checkpoint / "manifest.json").exists()
        (checkpoint / "manifest.json").rename(tmp_path / "manifest.json")
        answers[:] = [run | {"progress": {"step": 5, "max_steps": 1000}}, run]  # it was made longer
        num_asked = len(api.asked)
        weights.wait_for_checkpoint(run, 4, save_steps=500)
        assert len(api.asked) == num_asked + 1


def test_of_the_models_that_a_training_leaves_before_its_end_the_newest_is_kept(model: Path, tmp_path: Path) -> None:
    from tests.trainer.cores import make_core  # needs torch

    services = ScriptServices(HeadraceClient("http://127.0.0.1:1", "k"), None)
    run: dict[str, Any] = {"run_id": "run-a", "name": None, "run_dir": str(tmp_path / "run-a"), "status": "running"}
    other = services.own_directory() / "run-b-step-1"
    other.mkdir()
    notes: list[str] = []
    for step in (1, 2):
        save_checkpoint(tmp_path / "run-a" / "checkpoints", make_core(model), {}, step=step, keep=2)
        exported = [export_newest(services, run, say=notes.append) for _ in range(2)]
    assert exported == [services.own_directory() / "run-a-step-2"] * 2
    assert {path.name for path in services.own_directory().iterdir()} == {"run-a-step-2", "run-b-step-1"}
    assert [note.partition(",")[0] for note in notes] == [
        f"note: the model has the weights of step {step} of run-a" for step in (1, 2)
    ]
    services.client.close()
