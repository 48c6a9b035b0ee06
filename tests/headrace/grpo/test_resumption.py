"""A script goes on with its run if it says the same as the run; otherwise a new run takes its place."""

from pathlib import Path
from typing import Any

import pytest

from headrace.client import HeadraceClient
from headrace.grpo.argument_error import in_python
from headrace.grpo.resumption import changed_settings, has_made_all_steps, own_steps, replaced, say_differences
from headrace.grpo.script_services import ScriptServices
from tests.headrace.scripted_api import Answer, Asked, serving

pytestmark = pytest.mark.unit

SETTINGS = {"model": "org/model", "dataset_name": "org/rows", "reward_funcs": ["short_0a:short"], "max_steps": 10}


def test_only_what_the_script_says_differently_is_a_change() -> None:
    forked = SETTINGS | {"resume_from_checkpoint": "run-b:2", "learning_rate": 1e-6}
    assert changed_settings(forked, SETTINGS) == []
    other = SETTINGS | {"reward_funcs": ["short_0b:short"], "max_steps": 20, "learning_rate": 1e-5}
    assert sorted(changed_settings(other, SETTINGS)) == [
        *("learning_rate 1e-06 -> 1e-05", "max_steps 10 -> 20", "reward_funcs"),
    ]


def test_values_are_shown_unless_they_are_files_or_code() -> None:
    old = SETTINGS | {"dtype": "float32", "reward_funcs": ["length"]}
    assert changed_settings(old | {"dtype": "bfloat16", "reward_funcs": ["boxed_math"]}, old) == [
        "dtype float32 -> bfloat16",
        "reward_funcs ['length'] -> ['boxed_math']",
    ]


SOURCE = SETTINGS | {"name": "animals", "dtype": "float32"}


@pytest.mark.parametrize(
    ("beginning", "config", "says"),
    [
        ({"run_id": "run-a"}, SETTINGS | {"dtype": "bfloat16"}, "dtype float32 -> bfloat16"),
        ({"run_id": "run-a"}, SETTINGS | {"name": "fork", "dtype": "float32"}, None),
        ({"run_id": "animals"}, SETTINGS, None),  # a directory of this name
        ({"run_id": "run-gone"}, SETTINGS, None),
        ({"run_id": None}, SETTINGS, None),
        (None, SETTINGS, None),
    ],
)
def test_a_run_that_begins_from_another_says_which_settings_differ(
    beginning: dict[str, Any] | None, config: dict[str, Any], says: str | None
) -> None:
    def answer(asked: Asked) -> Any:
        if asked.path.endswith("run-gone"):
            return Answer(404)
        return {"run_id": "run-a", "config": SOURCE}

    said: list[str] = []
    with serving(answer) as api, HeadraceClient(api.url, "k") as client:
        say_differences(client, {"run_id": "run-b", "beginning": beginning, "config": config}, say=said.append)
    assert said == ([] if says is None else [f"note: settings that differ from run-a: {says}"])


@pytest.mark.parametrize(
    ("status", "step", "steps_before", "is_made"),
    [
        ("finished", 10, 0, True),
        ("finished", 6, 4, True),
        ("finished", 6, 0, False),  # stopped early, or the script has a larger max_steps by now
        ("stopped", 12, 0, True),
        ("failed", 10, 0, False),
        ("finished", 0, 10, True),
    ],
)
def test_a_run_with_all_steps_of_the_settings_has_nothing_left(
    status: str, step: int, steps_before: int, is_made: bool
) -> None:
    run = {"status": status, "progress": {"step": step}, "beginning": {"steps_before": steps_before}}
    with (
        serving(lambda _: {"derived": {"steps": 10}}) as api,
        HeadraceClient(api.url, "k") as client,
    ):
        assert has_made_all_steps(client, run, SETTINGS | {"resume_from_checkpoint": "run-a"}) is is_made
        assert all("resume_from_checkpoint" not in (asked.body or {}) for asked in api.asked)


@pytest.mark.parametrize(("answer", "steps"), [({"derived": {"steps": 10}}, 6), (Answer(503), None)])
def test_the_steps_of_a_run_that_continues_another_one_are_its_own(answer: Any, steps: int | None) -> None:
    run = {"beginning": {"steps_before": 4}}
    with serving(lambda _: answer) as api, HeadraceClient(api.url, "k") as client:
        assert own_steps(client, run, SETTINGS) == steps


def test_messages_of_the_run_api_say_what_to_write_in_python() -> None:
    assert in_python("set resume_only_model: true to begin at step 0; set log_completions: true to print it") == (
        'set run_options={"resume_only_model": True} to begin at step 0; set log_completions=True to print it'
    )


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
        services = ScriptServices(client, None)
        for labels in ({}, {"name": "another", "tags": ["keep"], "metadata": {"note": "b"}}):
            assert replaced(services, dict(run), SETTINGS | labels, say=said.append) is None
        assert asked_for == []
        old = replaced(services, dict(run), SETTINGS | {"max_steps": 20}, say=said.append)
    assert old is not None
    assert (old.has_checkpoint, asked_for) == (step > 0, ["pause"])
    old.say_successor({"run_id": "run-b", "beginning": {"step": step} if step else None}, say=said.append)
    changed = "the script has changed (max_steps 10 -> 20)"
    assert said == [
        f"{changed}: run-b continues run-a from step 4"
        if step
        else f"{changed}, and run-a has no checkpoint yet: run-b begins anew"
    ]
