"""Admission goes on as staleness allows, and slows to single probes while no reward can be had."""

from services.trainer.loop.admission_pace import AdmissionPace
from services.trainer.loop.ledger import Ledger
from shared.run_config import RunConfig


def pace(config: RunConfig, *, in_flight: int = 0, probe_every_s: float = 3600.0) -> AdmissionPace:
    config = config.model_copy(update={"max_staleness": 1, "groups_per_step": 4})
    return AdmissionPace(config, ledger=Ledger(admitted=in_flight), probe_every_s=probe_every_s)


def admit(paced: AdmissionPace, *, unscorable: int, waiting: int = 0, unadmitted: int = 0) -> int:
    return paced.num_to_admit(
        num_unadmitted=unadmitted, num_waiting=waiting, num_steps_left=10, unscorable_in_a_row=unscorable
    )


def test_the_window_is_filled_while_rewards_come_back(run_config: RunConfig) -> None:
    assert admit(pace(run_config), unscorable=0) == 8
    assert admit(pace(run_config, in_flight=5), unscorable=7) == 3


def test_a_window_without_a_reward_slows_admission_to_one_group_at_a_time(run_config: RunConfig) -> None:
    failing = pace(run_config)
    assert admit(failing, unscorable=8) == 1
    assert admit(failing, unscorable=9) == 0, "the next try is an hour away"
    assert failing.is_probing
    waiting_for = failing.waiting_for("scored groups")
    assert waiting_for.startswith("a reward function to work again; one group every 3600 s tries it.")


def test_no_second_probe_starts_while_one_is_in_flight(run_config: RunConfig) -> None:
    failing = pace(run_config, in_flight=1, probe_every_s=0.0)
    assert admit(failing, unscorable=8) == 0


def test_one_reward_brings_back_the_full_pace(run_config: RunConfig) -> None:
    mended = pace(run_config)
    assert admit(mended, unscorable=8) == 1
    assert admit(mended, unscorable=0) == 8
    assert mended.waiting_for("scored groups") == "scored groups"


def test_scored_groups_that_wait_for_a_full_step_do_not_stop_the_probes(run_config: RunConfig) -> None:
    failing = pace(run_config, in_flight=3, probe_every_s=0.0)
    assert admit(failing, unscorable=8, waiting=3) == 1
    assert admit(failing, unscorable=8, waiting=2) == 0, "one of the three is the last probe, still under way"


def test_groups_to_be_admitted_again_take_no_place_until_they_are(run_config: RunConfig) -> None:
    assert admit(pace(run_config, in_flight=80), unscorable=0, unadmitted=80) == 8
    assert admit(pace(run_config, in_flight=80), unscorable=0, unadmitted=75) == 3
