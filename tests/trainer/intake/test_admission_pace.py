"""Admission goes on as far as the trainer needs. While the run is paused, it stops or admits single test groups."""

from typing import Any

import pytest

from services.trainer.groups.ledger import Ledger
from services.trainer.intake.admission_pace import AdmissionPace
from shared.pause import PausedBy
from shared.run_options.run_config import RunConfig

pytestmark = pytest.mark.unit


def pace(
    config: RunConfig, *, in_flight: int = 0, test_group_every_s: float = 3600.0, **settings: Any
) -> AdmissionPace:
    config = config.model_copy(update={"max_staleness": 1, "groups_per_step": 4, **settings})
    return AdmissionPace(config, ledger=Ledger(admitted=in_flight), test_group_every_s=test_group_every_s)


def admit(paced: AdmissionPace, paused_by: PausedBy | None, *, waiting: int = 0, unadmitted: int = 0) -> int:
    return paced.num_to_admit(num_unadmitted=unadmitted, num_waiting=waiting, num_steps_left=10, paused_by=paused_by)


def test_groups_are_admitted_up_to_the_depth_while_the_run_goes_on(run_config: RunConfig) -> None:
    assert admit(pace(run_config), None) == 8
    assert admit(pace(run_config, in_flight=5), None) == 3


def test_nothing_is_admitted_while_a_user_has_paused_the_run(run_config: RunConfig) -> None:
    assert admit(pace(run_config, test_group_every_s=0.0), "user") == 0
    assert admit(pace(run_config, in_flight=80), "user", unadmitted=80) == 0


def test_failing_rewards_slow_admission_to_one_group_at_a_time(run_config: RunConfig) -> None:
    failing = pace(run_config)
    assert admit(failing, "rewards") == 1
    assert admit(failing, "rewards") == 0, "the next try is an hour away"
    assert admit(failing, None) == 8, "the full pace is back when rewards work again"


def test_no_second_test_group_starts_while_one_is_in_flight(run_config: RunConfig) -> None:
    failing = pace(run_config, in_flight=1, test_group_every_s=0.0)
    assert admit(failing, "rewards") == 0


def test_scored_groups_that_wait_for_a_full_step_do_not_stop_the_test_groups(run_config: RunConfig) -> None:
    failing = pace(run_config, in_flight=3, test_group_every_s=0.0)
    assert admit(failing, "rewards", waiting=3) == 1
    assert admit(failing, "rewards", waiting=2) == 0, "the three include the last test group, which is still in work"


def test_groups_to_be_admitted_again_take_no_place_until_they_are(run_config: RunConfig) -> None:
    assert admit(pace(run_config, in_flight=80), None, unadmitted=80) == 8
    assert admit(pace(run_config, in_flight=80), None, unadmitted=75) == 3


def test_admission_goes_deeper_after_a_batch_that_waited(run_config: RunConfig) -> None:
    waiting = pace(run_config, max_staleness=3)
    waiting.note_wait(100.0)
    waiting.note_batch(num_spare=0)
    assert admit(waiting, None) == 8, "the first batch has waited for generators to start"
    waiting.note_wait(100.0)
    waiting.note_batch(num_spare=0)
    assert admit(waiting, None) == 10


def test_a_batch_that_saw_a_pause_does_not_change_the_depth(run_config: RunConfig) -> None:
    paused = pace(run_config, max_staleness=3)
    paused.note_batch(num_spare=0)
    paused.note_pause()
    paused.note_wait(100.0)
    paused.note_batch(num_spare=0)
    assert admit(paused, None) == 8


def test_an_eager_run_admits_as_much_as_staleness_allows(run_config: RunConfig) -> None:
    assert admit(pace(run_config, max_staleness=3, admission="eager"), None) == 16


def test_groups_that_may_still_be_sampled_are_those_of_the_depth_that_are_not_scored(run_config: RunConfig) -> None:
    # One batch of 4 groups in training, and one ahead of it.
    assert pace(run_config).num_ahead(num_scored=4) == 4
    assert pace(run_config).num_ahead(num_scored=8) == 0
    # With max_staleness=0 nothing may be ahead.
    assert pace(run_config, max_staleness=0).num_ahead(num_scored=4) == 0
