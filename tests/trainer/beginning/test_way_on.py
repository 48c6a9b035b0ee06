"""A run that one of its settings made fail says how to keep its steps."""

from pathlib import Path

import pytest

from services.trainer.beginning.way_on import reason_of_failure
from shared.errors import HeadraceError, UserError
from tests.trainer.beginning.made_checkpoints import make_checkpoint
from tests.trainer.beginning.test_source import record

pytestmark = pytest.mark.unit

WRONG = UserError("there is no metric nosuch", field="metric_for_best_model")


def test_the_reason_has_a_command_that_changes_the_setting_and_keeps_the_steps(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, step=2)
    assert reason_of_failure(WRONG, record(tmp_path)) == (
        "there is no metric nosuch. To change the setting and keep the steps that the run has made: "
        "`headrace submit --from run-source --set metric_for_best_model=...`"
    )


def test_without_a_checkpoint_there_are_no_steps_to_keep(tmp_path: Path) -> None:
    assert reason_of_failure(WRONG, record(tmp_path)) == "there is no metric nosuch"


@pytest.mark.parametrize(
    "error",
    [
        HeadraceError("broken"),
        UserError("broken"),
        UserError("broken", field="HEADRACE_PUSH_PORT"),
        UserError("broken", field="resume_from_checkpoint"),
    ],
)
def test_an_error_that_is_not_about_a_setting_stays_as_it_is(tmp_path: Path, error: HeadraceError) -> None:
    make_checkpoint(tmp_path, step=2)
    assert reason_of_failure(error, record(tmp_path)) == "broken"
