"""Edits of reward modules as users see them: the rewarder is a separate process and checks the files by itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.rewarder.conftest import RewarderProcess, wait_for

NAME = "reloaded_rewards:constant"
KEY = {"Authorization": "Bearer key-of-the-test"}


def score(rewarder: RewarderProcess) -> tuple[float | None, str]:
    """Return value and version of one completion."""
    body = {"reward_funcs": [NAME], "prompts": ["p"], "completions": ["c"]}
    answer = httpx.post(rewarder.url("/v1/score"), json=body, headers=KEY, timeout=60, trust_env=False)
    (outcome,) = answer.raise_for_status().json()["outcomes"][0]
    return outcome["value"], outcome["version"]


def listed(rewarder: RewarderProcess) -> dict[str, Any]:
    """Return a function's entry in GET /v1/rewards."""
    answer = httpx.get(rewarder.url("/v1/rewards"), headers=KEY, timeout=60, trust_env=False).raise_for_status().json()
    (entry,) = [item for item in answer["reward_funcs"] if item["name"] == NAME]
    return dict(entry)


def test_an_edit_is_taken_in_unless_a_setting_says_not_to(
    start_rewarder: Callable[..., RewarderProcess], tmp_path: Path
) -> None:
    directory = tmp_path / "mounted"
    directory.mkdir()
    file = directory / "reloaded_rewards.py"
    source = "def constant(**_):\n    'A constant.'\n    return [{}]\n"
    file.write_text(source.format(1.0))
    settings = {"HEADRACE_REWARD_PATH": str(directory), "HEADRACE_NUM_REWARD_WORKERS": "1"}
    watching = start_rewarder(HEADRACE_REWARD_RELOAD_EVERY_S="0.05", **settings)
    other = start_rewarder(HEADRACE_REWARD_RELOAD_EVERY_S="0", HEADRACE_REPLICA_ID="rewarder-1", **settings)
    for rewarder in (watching, other):
        rewarder.wait_until_ready()
    first = score(watching)
    assert first[0] == 1.0
    assert score(other) == first, "the same file is the same version everywhere"

    file.write_text(source.format(2.0))
    wait_for(lambda: score(watching)[0] == 2.0, what="the edit")
    assert score(watching)[1] != first[1]
    file.write_text("def constant(**_): return [3.0")
    wait_for(lambda: listed(watching)["warning"], what="the warning")
    entry = listed(watching)
    assert score(watching)[0] == 2.0
    assert (entry["kind"], entry["summary"], entry["version"]) == ("sync", "A constant.", score(watching)[1])
    assert "SyntaxError: '[' was never closed (reloaded_rewards.py, line 1)" in entry["warning"]
    assert "is not in force" in watching.log()
    file.write_text(source.format(4.0))
    wait_for(lambda: score(watching)[0] == 4.0, what="the repair")
    assert listed(watching)["warning"] == ""
    assert score(other) == first, "checking is turned off"
    assert watching.stop() == 0, watching.log()
    assert other.stop() == 0, other.log()
