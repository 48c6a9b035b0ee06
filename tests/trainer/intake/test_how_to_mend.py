"""The advice for the user of a run that its rewards have paused."""

import pytest

from services.trainer.intake.run_pause import how_to_mend

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("reward_func", "says"),
    [
        ("my_rewards:judge", "a saved edit that can be imported is loaded automatically"),
        ("judge", "repair an endpoint where it runs, or register it again"),
        ("accuracy_reward", "submit a new run with the columns and reward_kwargs"),
        ("some-org/some-model", "It is a reward model"),
        ("", "The dead letters and the logs of the rewarder and of the sessions service say what failed."),
    ],
)
def test_how_to_mend_a_reward_depends_on_what_it_is(reward_func: str, says: str) -> None:
    assert says in how_to_mend(reward_func)


@pytest.mark.parametrize("reward_func", ["judge", "some-org/some-model", ""])
def test_the_advice_names_a_module_only_for_functions_that_have_one(reward_func: str) -> None:
    assert "imports" not in how_to_mend(reward_func)
    assert "dry run" not in how_to_mend(reward_func)
