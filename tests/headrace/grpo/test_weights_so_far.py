"""The weights of an interrupted training are never those that it began with."""

from pathlib import Path
from typing import Any

import pytest

from headrace.grpo.live_model import LiveModel
from headrace.grpo.run_of_script import Script
from headrace.grpo.script_run import ScriptRun
from headrace.grpo.training_events import TrainingEvents
from shared.errors import HeadraceError
from shared.run_options.grpo_config import GRPOConfig
from tests.headrace.scripted_api import Asked, serving

pytestmark = pytest.mark.unit


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
