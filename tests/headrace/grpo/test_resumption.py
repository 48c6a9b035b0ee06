"""A script goes on with its run if it says the same as the run; otherwise a new run takes its place."""

from pathlib import Path
from typing import Any

import pytest

from headrace.client import HeadraceClient
from headrace.grpo.resumption import changed_settings, replaced
from headrace.grpo.script_services import ScriptServices
from tests.headrace.scripted_api import Asked, serving

pytestmark = pytest.mark.unit

SETTINGS = {"model": "org/model", "dataset_name": "org/rows", "reward_funcs": ["short_0a:short"], "max_steps": 10}


def test_only_what_the_script_says_differently_is_a_change() -> None:
    forked = SETTINGS | {"resume_from_checkpoint": "run-b:2", "learning_rate": 1e-6}
    assert changed_settings(forked, SETTINGS) == []
    other = SETTINGS | {"reward_funcs": ["short_0b:short"], "max_steps": 20, "learning_rate": 1e-5}
    assert sorted(changed_settings(other, SETTINGS)) == [
        *("learning_rate 1e-06 -> 1e-05", "max_steps 10 -> 20", "reward_funcs"),
    ]


@pytest.mark.parametrize("step", [0, 4])
def test_a_changed_script_begins_anew_only_if_its_run_has_no_checkpoint(tmp_path: Path, step: int) -> None:
    pause = {"by": "user", "since_s": 1.0}
    run: dict[str, Any] = {"run_id": "run-a", "run_dir": str(tmp_path), "status": "running", "config": SETTINGS}
    run |= {"desired": "run", "pause": None, "progress": {"step": step, "updated_at_s": 2.0}}
    if step:
        checkpoint = tmp_path / "checkpoints" / f"step_{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").touch()
    asked_for: list[str] = []

    def answer(asked: Asked) -> Any:
        if asked.path.endswith("/pause"):
            asked_for.append("pause")
            run.update(status="paused", desired="pause", pause=pause)
        return run

    said: list[str] = []
    with serving(answer) as api, HeadraceClient(api.url, "k") as client:
        services = ScriptServices(client, tmp_path / "inputs", None)
        assert replaced(services, dict(run), SETTINGS, say=said.append) is None
        assert asked_for == []
        old = replaced(services, dict(run), SETTINGS | {"max_steps": 20}, say=said.append)
    assert old is not None
    assert (old.source, asked_for) == ("run-a" if step else None, ["pause"])
    old.say_successor({"run_id": "run-b", "beginning": {"step": step} if step else None}, say=said.append)
    changed = "the script has changed (max_steps 10 -> 20)"
    assert said == [
        f"{changed}: run-b continues run-a from step 4"
        if step
        else f"{changed}, and run-a has no checkpoint yet: run-b begins anew"
    ]
