"""The advice for the user of a run that its rewards have paused."""

import pytest

from services.trainer.loop.run_pause import how_to_mend


@pytest.mark.parametrize(
    ("reward_func", "says"),
    [
        ("my_rewards:judge", "an edit that is saved and imports is taken in by itself"),
        ("judge", "an endpoint where it runs, or by registering it again"),
        ("accuracy_reward", "submit a new run with the columns and reward_kwargs"),
        ("some-org/some-model", "It is a reward model"),
        ("", "Mend what fails."),
    ],
)
def test_how_to_mend_a_reward_depends_on_what_it_is(reward_func: str, says: str) -> None:
    assert says in how_to_mend(reward_func)


@pytest.mark.parametrize("reward_func", ["judge", "some-org/some-model", ""])
def test_nobody_is_told_to_edit_a_module_for_what_has_none(reward_func: str) -> None:
    assert "imports" not in how_to_mend(reward_func)
    assert "dry run" not in how_to_mend(reward_func)
